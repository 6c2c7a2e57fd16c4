"""Programs of torch.export (`.pt2`) as ONNX, converted once and kept by their content.

PyTorch is no dependency of the farm. It runs in a child process with limits of memory and time, since it and TVM each
bring an LLVM and threads. Reading such a program can run code that is in it, so the user must trust it first.
"""

from __future__ import annotations

import hashlib
import logging
import pathlib
import tempfile
import zipfile

from farm import folders
from farm import settings as farm_settings
from farm.errors import UnavailableError, UsageError
from farm.processes import confined

_log = logging.getLogger(__name__)

# Counts how conversions are done: another number makes new ones of files that were converted before.
_VERSION = 1
# Large transformers take a minute or two, and several copies of their weights.
_TIMEOUT_S = 900.0
_MEMORY_BYTES, _COPIES = 6 << 30, 8
_HINT = "`torch.onnx.export(program, dynamo=True).save(FILE)` makes ONNX of it where PyTorch is."
# What tells such an archive from others; the second is an older form.
_PROGRAMS = frozenset({"archive_format", "serialized_exported_program.json"})
# Members of an archive that PyTorch unpickles or loads as machine code, whoever trusts the rest: compiled programs and
# objects of classes of their own (torch/export/pt2_archive/constants.py of PyTorch 2.8 and later).
_FOLDERS = frozenset({"aotinductor"})
_FILES = ("custom_obj", "opaque_obj")


def is_exported(path: pathlib.Path) -> bool:
    """Whether a file is an archive that torch.export.save wrote, of any of its versions."""
    return bool({each.name for each in _list_members(path) or ()} & _PROGRAMS)


def explain_archive(path: pathlib.Path) -> str:
    """What a zip archive is that is no program of torch.export, and what to do about it."""
    members = _list_members(path)
    if members is None:
        return "it is a zip archive that breaks off or was changed; copy or save it again"
    names = {each.name for each in members}
    if "data.pkl" not in names:
        return "it is a zip archive of something else"
    what = "a TorchScript program" if "constants.pkl" in names else "a PyTorch checkpoint, which holds no steps"
    return f"it is {what}; save the model with torch.export.save or torch.onnx.export"


def _list_members(path: pathlib.Path) -> list[pathlib.PurePosixPath] | None:
    """The members' names; None for what is no whole archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [pathlib.PurePosixPath(name) for name in archive.namelist()]
    except (OSError, ValueError, NotImplementedError, zipfile.BadZipFile):
        return None


def convert(path: pathlib.Path, trusted: bool = False) -> bytes:
    """The program as ONNX, from the cache where the same content was converted before.

    `trusted` says that somebody vouches for the file, without which a new one is not read. Raises UsageError where it
    is not, or PyTorch is not installed, or cannot read or convert the file.
    """
    program = path.read_bytes()
    folder = farm_settings.load().home_path / "cache" / "exported"
    kept = folder / f"{hashlib.sha256(program).hexdigest()}-{_VERSION}.onnx"
    if kept.is_file():
        return kept.read_bytes()
    _refuse_code(path)
    if not trusted:
        raise UsageError(
            f"{path} is a program of torch.export, and reading one can run code that somebody put into it",
            f"If you trust who made it: `farm model show {path} --trust-model` converts it, once. Or: {_HINT}",
        )
    folders.make_private(folder)
    _log.info("converting %s with PyTorch", path)
    data = _convert(path, program)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = pathlib.Path(scratch) / "model.onnx"
        made.write_bytes(data)
        made.replace(kept)
    return data


def _refuse_code(path: pathlib.Path) -> None:
    """Raise UsageError naming what of the archive is no program but code, or an object that brings its own."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            parts = pathlib.PurePosixPath(name).parts
            if _FOLDERS.intersection(parts) or (parts and parts[-1].startswith(_FILES)):
                raise UsageError(
                    f"{path} is refused: its member {name!r} is machine code or a pickled object, and may do anything",
                    f"Save the program without it. {_HINT}",
                )


def _convert(path: pathlib.Path, program: bytes) -> bytes:
    limits = confined.ConfinedLimits(_MEMORY_BYTES + _COPIES * len(program), _TIMEOUT_S)
    try:
        return confined.call(
            f"{__package__}.exported_child:convert", program, "it was not converted", limits, trusted=True
        )
    except UnavailableError as error:
        raise UsageError(
            f"{path} is a program of torch.export, and it cannot be converted here ({error.message})",
            f"PyTorch converts it: `pip install torch onnxscript` beside the farm. Or: {_HINT}",
        ) from error
    except UsageError as error:
        raise UsageError(f"PyTorch cannot convert {path}: {error.message}", _HINT) from error
