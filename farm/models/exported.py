"""Convert programs of torch.export (`.pt2`) to ONNX once, cached by content.

PyTorch is no dependency of the farm. It runs in a child process with limits of memory and time, since it and TVM each
bring an LLVM and threads. Reading such a program can run code in it, so the user must trust it first.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import logging
import pickle
import re
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

from farm import folders
from farm import settings as farm_settings
from farm.errors import UnavailableError, UsageError
from farm.processes import confined

_log = logging.getLogger(__name__)

# Version of the conversion; raise it to convert files again.
_VERSION = 1
# Large transformers take a minute or two and several copies of their weights.
_TIMEOUT_S = 900.0
_MEMORY_BYTES, _COPIES = 6 << 30, 8
_HINT = "Where PyTorch is installed, `torch.onnx.export(program, dynamo=True).save(FILE)` converts it to ONNX."
# Members that identify such an archive; the second is an older form.
_PROGRAMS = frozenset({"archive_format", "serialized_exported_program.json"})
# Members that PyTorch unpickles or loads as machine code, even with `--trust-model`: compiled programs and objects of
# custom classes (torch/export/pt2_archive/constants.py of PyTorch 2.8 and later).
_FOLDERS = frozenset({"aotinductor"})
_FILES = ("custom_obj", "opaque_obj")


def is_exported(path: Path) -> bool:
    """Say whether a file is an archive of any version of torch.export.save."""
    return bool({each.name for each in _list_members(path) or ()} & _PROGRAMS)


def explain_archive(path: Path) -> str:
    """Describe a zip archive that is no torch.export program, and what to do about it."""
    members = _list_members(path)
    if members is None:
        return "it is a truncated or damaged zip archive; copy or save it again"
    names = {each.name for each in members}
    if "data.pkl" not in names:
        return "it is a zip archive of another kind"
    what = "a TorchScript program" if "constants.pkl" in names else "a PyTorch checkpoint without a program"
    return f"it is {what}; save the model with torch.export.save or torch.onnx.export"


def _list_members(path: Path) -> list[PurePosixPath] | None:
    """List the members' names; None for a damaged archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [PurePosixPath(name) for name in archive.namelist()]
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return None


def convert(path: Path, trusted: bool = False) -> bytes:
    """Return the program as ONNX, cached by content.

    An uncached file is read only if the user `trusted` it. Raises UsageError where it is not trusted, or PyTorch is
    missing or cannot read or convert the file.
    """
    program = path.read_bytes()
    folder = farm_settings.load().home_path / "cache" / "exported"
    kept = folder / f"{hashlib.sha256(program).hexdigest()}-{_VERSION}.onnx"
    if kept.is_file():
        return kept.read_bytes()
    _refuse_code(path)
    if not trusted:
        raise UsageError(
            f"{path} is a program of torch.export, and reading one can run code hidden in it",
            f"If you trust its author, `farm model show {path} --trust-model` converts it once. {_HINT}",
        )
    folders.make_private(folder)
    _log.info("converting %s with PyTorch", path)
    data = _convert(path, program)
    with folders.new_file(kept) as part:
        part.write_bytes(data)
    return data


def _refuse_code(path: Path) -> None:
    """Raise UsageError that names a member with code or a pickled object."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            parts = PurePosixPath(name).parts
            if _FOLDERS.intersection(parts) or (parts and parts[-1].startswith(_FILES)):
                raise UsageError(
                    f"{path} is refused: its member {name!r} is machine code or a pickled object",
                    f"Save the program without it. {_HINT}",
                )


def _convert(path: Path, program: bytes) -> bytes:
    limits = confined.ConfinedLimits(_MEMORY_BYTES + _COPIES * len(program), _TIMEOUT_S)
    try:
        return confined.call(f"{__name__}:convert_program", program, "it was not converted", limits, trusted=True)
    except UnavailableError as error:
        raise UsageError(
            f"{path} is a program of torch.export, which cannot be converted here ({error.message})",
            f"`pip install torch onnxscript` beside the farm. {_HINT}",
        ) from error
    except UsageError as error:
        raise UsageError(f"PyTorch cannot convert {path}: {error.message}", _HINT) from error


_PROGRAM, _MADE = "program.pt2", "model.onnx"


def convert_program(program: bytes) -> bytes:
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
        found = re.search(r"Unsupported \w+|GLOBAL [\w.]+|class [\w.]+", str(error).replace("\n", " "))
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
