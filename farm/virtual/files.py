"""A table of a virtual board's kernel files: how to read and write each. `files_*.py` fill it."""

from __future__ import annotations

import dataclasses
import errno
import posixpath
from collections.abc import Callable

from farm.virtual.clocks import refuse

Read = Callable[[], str]
Write = Callable[[str], None]
_MAX_LINKS = 20


@dataclasses.dataclass(frozen=True)
class File:
    """One file. None: not readable, or not writable. `private`: readable by root only."""

    read: Read | None
    write: Write | None = None
    private: bool = False


class Files:
    """Every file and symbolic link of a board at present."""

    def __init__(self) -> None:
        self._files: dict[str, File] = {}
        self._links: dict[str, str] = {}
        self._folders: dict[str, set[str]] = {"/": set()}

    def add(self, path: str, read: Read | None, write: Write | None = None, private: bool = False) -> None:
        """Add a file, and the folders above it."""
        self._files[path] = File(read, write, private)
        self._grow(path)

    def fixed(self, path: str, text: str) -> None:
        """Add a constant file."""
        self.add(path, lambda: text)

    def link(self, path: str, target: str) -> None:
        """Add a symbolic link to an absolute path."""
        self._links[path] = target
        self._grow(path)

    def resolve(self, path: str) -> str:
        """Follow every link in a path. Raises OSError (ELOOP)."""
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
        """Names in the folder at a resolved path. Raises OSError (ENOENT, ENOTDIR)."""
        if path not in self._folders:
            raise refuse(errno.ENOTDIR if path in self._files else errno.ENOENT, path)
        return sorted(self._folders[path])

    def exists(self, path: str) -> bool:
        """Whether a resolved path exists."""
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
    """Parse a number written to a kernel file. Raises OSError (EINVAL)."""
    try:
        value = int(text.split()[0], 0)
    except (ValueError, IndexError):
        raise refuse(errno.EINVAL) from None
    if value < lowest:
        raise refuse(errno.EINVAL)
    return value
