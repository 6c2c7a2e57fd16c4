"""Private folders and files under any umask: FARM_HOME and its content."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

PRIVATE = 0o700
# A folder with one of these is a FARM_HOME; another may be a user's home folder.
_MARKS = ("farm.db", "services.lock", "web.token")

_log = logging.getLogger(__name__)


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents with mode 0700. Raises OSError."""
    for each in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        with contextlib.suppress(FileExistsError):
            each.mkdir(PRIVATE)
    folder.mkdir(exist_ok=True)  # raises FileExistsError for a file


def open_private(path: Path, flags: int, mode: str) -> IO[Any]:
    """Open a file, created with mode 0600; an existing one is closed to other users."""
    number = os.open(path, flags | os.O_CREAT | os.O_CLOEXEC, 0o600)
    status = os.fstat(number)
    if status.st_uid == os.getuid() and status.st_mode & 0o077:
        os.fchmod(number, 0o600)
    return os.fdopen(number, mode)


def try_lock(file: IO[Any]) -> bool:
    """Lock an open file until it is closed, or its process ends; False while another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a path for a file that takes its name if the block succeeds, and is removed otherwise. Raises OSError.

    Readers see all of it or none.
    """
    # Several hosts may share the folder.
    part = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.{threading.get_native_id()}")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_private(path: Path, text: str, *, durably: bool = False) -> None:
    """Write a file of mode 0600 atomically; `durably`: it survives a power cut. Raises OSError."""
    with new_file(path) as part, open_private(part, os.O_WRONLY | os.O_TRUNC, "w") as file:
        file.write(text)
        if durably:
            file.flush()
            os.fsync(file.fileno())


def require_private(home: Path) -> None:
    """Create a FARM_HOME with mode 0700, or close an existing one to other users. Raises OSError.

    Warns, unless the folder was empty. Folders of another owner, and shared ones (`/tmp`), stay as they are.
    """
    make_private(home)
    status = home.stat()
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.getuid() or not mode & 0o077 or mode & stat.S_ISVTX or home in (Path.home(), Path("/")):
        return
    with contextlib.suppress(OSError):
        is_new = not any(home.iterdir())
        if is_new or any((home / name).exists() for name in _MARKS):
            home.chmod(PRIVATE)
        if not is_new and not home.stat().st_mode & 0o077:
            _log.warning(
                "%s was open to other users (mode %o) and is now closed to them (mode 700). "
                "If they may have read it: `farm web token --new` makes a new token.",
                *(home, mode),
            )
