"""Kernel files over a virtual board as a table: what reading and writing do. Which there are is in `files_*.py`."""

from __future__ import annotations

import dataclasses
import errno
import posixpath
from collections.abc import Callable

from device_agent.virtual.clocks import refuse

Read = Callable[[], str]
Write = Callable[[str], None]
_MAX_LINKS = 20


@dataclasses.dataclass(frozen=True)
class File:
    """One file. None: cannot be read, or written. `private`: only root may read it."""

    read: Read | None
    write: Write | None = None
    private: bool = False


class Files:
    """Every file and symbolic link of a board as it is now."""

    def __init__(self) -> None:
        self._files: dict[str, File] = {}
        self._links: dict[str, str] = {}
        self._folders: dict[str, set[str]] = {"/": set()}

    def add(self, path: str, read: Read | None, write: Write | None = None, private: bool = False) -> None:
        """A file; the folders above it come with it."""
        self._files[path] = File(read, write, private)
        self._grow(path)

    def fixed(self, path: str, text: str) -> None:
        """A file that never changes."""
        self.add(path, lambda: text)

    def link(self, path: str, target: str) -> None:
        """A symbolic link to an absolute path."""
        self._links[path] = target
        self._grow(path)

    def resolve(self, path: str) -> str:
        """The path with every link followed. Raises OSError (ELOOP)."""
        for _ in range(_MAX_LINKS):
            before = path = posixpath.normpath(path)
            at = 0
            while at >= 0:
                at = path.find("/", at + 1)
                head = path if at < 0 else path[:at]
                if head in self._links:
                    path = self._links[head] + path[len(head) :]
                    break
            if path == before:
                return path
        raise refuse(errno.ELOOP, path)

    def file(self, path: str) -> File:
        """The file at a resolved path. Raises OSError (ENOENT, EISDIR, ENOTDIR)."""
        found = self._files.get(path)
        if found is None:
            if path in self._folders:
                raise refuse(errno.EISDIR, path)
            raise refuse(errno.ENOTDIR if posixpath.dirname(path) in self._files else errno.ENOENT, path)
        return found

    def names(self, path: str) -> list[str]:
        """What a folder at a resolved path holds. Raises OSError (ENOENT, ENOTDIR)."""
        if path not in self._folders:
            raise refuse(errno.ENOTDIR if path in self._files else errno.ENOENT, path)
        return sorted(self._folders[path])

    def exists(self, path: str) -> bool:
        """Whether a resolved path is there."""
        return path in self._files or path in self._folders

    def _grow(self, path: str) -> None:
        while path != "/":
            parent, name = posixpath.split(path)
            names = self._folders.setdefault(parent, set())
            if name in names:
                return
            names.add(name)
            path = parent


def parse_number(text: str, lowest: int = 0) -> int:
    """The number that a kernel file is given. Raises OSError (EINVAL) for anything else."""
    try:
        value = int(text.split()[0], 0)
    except (ValueError, IndexError):
        raise refuse(errno.EINVAL) from None
    if value < lowest:
        raise refuse(errno.EINVAL)
    return value
