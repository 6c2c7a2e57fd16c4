"""The child process of `exported`: read a program with PyTorch and return it as ONNX."""

from __future__ import annotations

import functools
import importlib
import pickle
import re
from pathlib import Path
from typing import Any

from farm.errors import UnavailableError, UsageError

_PROGRAM, _MADE = "program.pt2", "model.onnx"


def convert(program: bytes) -> bytes:
    """Return a program as ONNX with its weights inside; works in the current folder.

    Raises UnavailableError where PyTorch or its exporter is missing, UsageError where it cannot read or convert the
    program.
    """
    try:
        torch = importlib.import_module("torch")
        importlib.import_module("torch.export")
        importlib.import_module("onnxscript")
    except ImportError as error:
        raise UnavailableError(str(error)) from error
    _unpickle_tensors_only(torch)
    Path(_PROGRAM).write_bytes(program)
    try:
        loaded = torch.export.load(_PROGRAM)
        torch.onnx.export(loaded, dynamo=True, verbose=False).save(_MADE, external_data=False)
    except pickle.UnpicklingError as error:
        said = str(error).replace("\n", " ")
        found = re.search(r"Unsupported \w+|GLOBAL [\w.]+|class [\w.]+", said)
        what = f" ({found.group()})" if found else ""
        raise UsageError(f"a pickle in it makes more than tensors{what}, and could run any code") from error
    except Exception as error:  # PyTorch raises errors of any type
        raise UsageError(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}") from error
    return Path(_MADE).read_bytes()


def _unpickle_tensors_only(torch: Any) -> None:
    """Make `torch.load` refuse everything but tensors.

    On reading a program, PyTorch retries a failed load of example inputs and weights without that limit.
    """
    load = torch.load

    @functools.wraps(load)
    def load_tensors(*arguments: Any, **options: Any) -> Any:
        return load(*arguments, **(options | {"weights_only": True}))

    torch.load = load_tensors
