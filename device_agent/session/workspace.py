"""Temporary folders that are removed after their owner's death: the agent's, one per session, and a rig's."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

SESSIONS = "device-agent-"

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def work_folder(prefix: str = SESSIONS) -> Iterator[Path]:
    """Create a folder whose name begins with `prefix`; also remove those of killed owners.

    An owner holds a lock on its folder, which the kernel releases at its death.
    """
    root = Path(tempfile.gettempdir())
    for left in root.glob(f"{prefix}*"):
        lock = _lock(left)
        if lock is not None:
            _log.info("removing %s, left by a killed process", left)
            remove_folder(left)
            os.close(lock)
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    lock = _lock(folder)
    try:
        yield folder
    finally:
        remove_folder(folder)
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock `folder`; return the descriptor, None if another process holds it or it belongs to another user."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(descriptor).st_uid == os.getuid():
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor
        except OSError:
            pass
        os.close(descriptor)
    return None


def remove_folder(folder: Path) -> None:
    """Remove a folder even if its content changed its permissions; log what cannot be removed."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        for path, _, _ in os.walk(folder):
            with contextlib.suppress(OSError):
                Path(path).chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            _log.error("cannot remove %s", folder)
