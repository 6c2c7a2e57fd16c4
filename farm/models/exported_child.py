"""Run by `exported` in a process of its own: reads a program with PyTorch and gives it as ONNX."""

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
    """A program as ONNX with its weights inside; works in the current folder.

    Raises UnavailableError where PyTorch, or what it exports with, is not installed, and UsageError where it cannot
    read or convert the program.
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
    except Exception as error:  # PyTorch raises whatever it stumbles over
        raise UsageError(f"{type(error).__name__}: {' '.join(str(error).split())[:500]}") from error
    return Path(_MADE).read_bytes()


def _unpickle_tensors_only(torch: Any) -> None:
    """Have `torch.load` refuse whatever but tensors a pickle would make, also where PyTorch asks it for more: reading a
    program, it unpickles example inputs and weights once more without that limit where the first try fails.
    """
    load = torch.load

    @functools.wraps(load)
    def load_tensors(*arguments: Any, **options: Any) -> Any:
        return load(*arguments, **(options | {"weights_only": True}))

    torch.load = load_tensors
