"""Write artifacts and packages atomically, and refuse to overwrite anything else."""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from farm import folders
from farm.errors import FarmError, UnavailableError, UsageError

# The file that marks an artifact.
MANIFEST = "manifest.json"
# Errors of the disk; any other error concerns the folder's name.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})


def is_artifact(path: Path) -> bool:
    """Say whether a path is an artifact: a folder with a manifest."""
    return (path / MANIFEST).is_file()


def require_place(folder: Path) -> None:
    """Raise UsageError where an artifact would overwrite something else, UnavailableError where the disk is full."""
    try:
        if folder.is_dir():
            if any(folder.iterdir()) and not is_artifact(folder):
                raise UsageError(f"{folder} holds something that is no artifact", "Give another folder with --out.")
        elif folder.exists():
            raise UsageError(f"{folder} is a file", "Give a folder with --out.")
    except OSError as error:
        raise _refuse(folder, error) from error
    require_room(folder.parent)


def require_room(folder: Path) -> None:
    """Refuse a folder that cannot be made or written, before doing work for it; leave nothing behind.

    A trial is needed, since permissions do not tell everything. Raises the errors of `require_place`.
    """
    made: list[Path] = []
    try:
        made += [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        Path(tempfile.mkdtemp(prefix=".farm.", suffix=".partial", dir=folder)).rmdir()
    except OSError as error:
        raise _refuse(folder, error) from error
    finally:
        for each in made:  # the innermost first; one that another process filled meanwhile stays
            with contextlib.suppress(OSError):
                each.rmdir()


def _refuse(folder: Path, error: OSError) -> FarmError:
    kind = UnavailableError if error.errno in _FULL else UsageError
    return kind(f"nothing can be written to {folder}: {error.strerror}", "Give another folder.")


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder that gets its name if the block succeeds and is removed otherwise. Raises UsageError."""
    require_place(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        yield partial
        partial.chmod(0o755)
        if folder.exists():
            before = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".old", dir=folder.parent))
            folder.replace(before)
            partial.replace(folder)
            shutil.rmtree(before)
        else:
            partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a file as `folders.new_file`, in a folder that is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with folders.new_file(path) as partial:
        yield partial
