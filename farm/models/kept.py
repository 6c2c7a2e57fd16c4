"""Models kept by their content in a folder that several hosts see, so that each finds what one of them was given.

Which folder that is, `Settings.models_path` says; a zoo's model needs none of it.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from farm.errors import UnavailableError
from farm.models.source import ModelSource


def keep_model(folder: Path | None, source: ModelSource) -> None:
    """Write a model, whole or not at all, unless it is there; without a folder nothing is kept.

    Raises UnavailableError where the folder takes none.
    """
    if folder is None or source.origin.startswith("zoo:") or (path := _locate(folder, source.sha256)).is_file():
        return
    part = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(source.onnx_bytes)
        part.replace(path)
    except OSError as error:
        raise UnavailableError(
            f"the model {source.name} cannot be kept in {folder}: {error.strerror or error}",
            "FARM_SHARED names that folder: it must be there on this host, and writable.",
        ) from error


def find_model(folder: Path, sha256: str) -> Path | None:
    """The file of a model with this content; None where there is none, or it holds something else."""
    path = _locate(folder, sha256)
    try:
        return path if hashlib.sha256(path.read_bytes()).hexdigest() == sha256 else None
    except OSError:
        return None


def _locate(folder: Path, sha256: str) -> Path:
    return folder / sha256[:2] / f"{sha256}.onnx"
