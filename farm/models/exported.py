"""Programs of torch.export (`.pt2`) as ONNX, converted once and kept by their content.

PyTorch is no dependency of the farm. It is asked in a process of its own: it and TVM each bring an LLVM and threads.
"""

from __future__ import annotations

import hashlib
import logging
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from farm import settings as farm_settings
from farm.errors import UsageError
from farm.models import exported_child

_log = logging.getLogger(__name__)

# Counts how conversions are done: another number makes new ones of files that were converted before.
_VERSION = 1
# Large transformers take a minute or two.
_DEADLINE_S = 900.0
_HINT = "`torch.onnx.export(program, dynamo=True).save(FILE)` makes ONNX of it where PyTorch is."


def is_exported(path: pathlib.Path) -> bool:
    """Whether a file is an archive that torch.export.save wrote, of any of its versions."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = {pathlib.PurePosixPath(name).name for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile):
        return False
    return bool(names & {"archive_format", "serialized_exported_program.json"})


def convert(path: pathlib.Path) -> bytes:
    """The program as ONNX, from the cache where the same content was converted before.

    Raises UsageError where PyTorch is not installed, or cannot read or convert the file.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(2**20):
            digest.update(piece)
    folder = farm_settings.load().home_path / "cache" / "exported"
    kept = folder / f"{digest.hexdigest()}-{_VERSION}.onnx"
    if kept.is_file():
        return kept.read_bytes()
    folder.mkdir(parents=True, exist_ok=True)
    _log.info("converting %s with PyTorch", path)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = pathlib.Path(scratch) / "model.onnx"
        _run(path, made)
        data = made.read_bytes()
        made.replace(kept)
    return data


def _run(path: pathlib.Path, made: pathlib.Path) -> None:
    # As a module: a script's own folder would come first on its path, and this one has names that others have, too.
    command = [sys.executable, "-m", exported_child.__name__, str(path), str(made)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UsageError(f"PyTorch did not convert {path} within {_DEADLINE_S:.0f} s", _HINT) from error
    reason = next(iter(reversed(done.stderr.strip().splitlines())), f"exit code {done.returncode}")
    if done.returncode == exported_child.MISSING:
        raise UsageError(
            f"{path} is a program of torch.export, and PyTorch is not installed here ({reason})",
            f"`pip install torch onnxscript` beside the farm. Or: {_HINT}",
        )
    if done.returncode or not made.is_file():
        raise UsageError(f"PyTorch cannot convert {path}: {reason}", _HINT)
