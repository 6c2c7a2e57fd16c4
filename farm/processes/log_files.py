"""Files that grow, read as lines: their ends, and what is written to them from now on, through every way in which logs
here are kept short: moved aside (`NAME.1`, `.2`, …), or copied to `NAME.1` and emptied.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_CHUNK = 1 << 16
# What one line may have; longer ones are cut in two.
_MOST_LINE_BYTES = 1 << 20
# As many pieces as any log here has.
_PIECES = 9


def list_pieces(path: Path) -> list[Path]:
    """A log and its older pieces, the oldest first; those that there are."""
    names = [path.with_name(f"{path.name}.{number}") for number in range(_PIECES, 0, -1)]
    return [each for each in (*names, path) if each.exists()]


def read_ends(path: Path, most_bytes: int) -> list[bytes]:
    """The lines in the last bytes of a log and its older pieces together, oldest first; one that is cut is left out."""
    left, found = most_bytes, []
    for piece in reversed(list_pieces(path)):
        with contextlib.suppress(OSError), piece.open("rb") as file:  # moved just now
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - left))
            lines = file.read(left).splitlines(keepends=True)
            found.append(lines[1:] if size > left else lines)
            left -= size
        if left <= 0:
            break
    return [line for lines in reversed(found) for line in lines]


class Follower:
    """What is written to one log from now on, in whole lines. Not thread-safe; never waits."""

    def __init__(self, path: Path, *, from_start: bool = False) -> None:
        """`from_start`: for a log that was not there when following began. It need not be there yet."""
        self._path = path
        self._file = self._open()
        self._cut = b""
        if self._file is not None and not from_start:
            self._file.seek(0, os.SEEK_END)

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def read(self) -> list[bytes]:
        """The whole lines that have come since."""
        return list(self._split(b"".join(self._read())))

    def _read(self) -> Iterator[bytes]:
        if self._file is None:
            self._file = self._open()
            if self._file is None:
                return
        if (lost := self._find_emptied()) is not None:
            yield lost
        yield from _drain(self._file)
        for newer in self._find_newer():
            # What came to the old one between its end and its being moved is read by now.
            yield from _drain(self._file)
            self.close()
            self._file = newer
            yield from _drain(newer)

    def _open(self) -> IO[bytes] | None:
        with contextlib.suppress(OSError):
            return self._path.open("rb")
        return None

    def _find_emptied(self) -> bytes | None:
        """Of a log that was emptied, what we had not read: it is in the copy. Begins anew with the log."""
        assert self._file is not None
        at = self._file.tell()
        if os.fstat(self._file.fileno()).st_size >= at:
            return None
        self._file.seek(0)
        with contextlib.suppress(OSError), self._path.with_name(f"{self._path.name}.1").open("rb") as copy:
            copy.seek(at)
            return copy.read()
        return b""

    def _find_newer(self) -> list[IO[bytes]]:
        """The pieces after the one that we have, oldest first, open; empty where the log is the same."""
        assert self._file is not None
        mine = os.fstat(self._file.fileno())
        with contextlib.suppress(OSError):
            if os.path.samestat(mine, self._path.stat()):
                return []
        newer: list[IO[bytes]] = []
        is_known = False
        for piece in list_pieces(self._path):
            with contextlib.suppress(OSError):
                newer.append(piece.open("rb"))
                if os.path.samestat(mine, os.fstat(newer[-1].fileno())):
                    is_known = True
                    _close_all(newer)
        if not is_known:  # it is gone altogether: of the others only the log itself is surely newer
            _close_all(newer, but=1)
        return newer

    def _split(self, data: bytes) -> Iterator[bytes]:
        *lines, self._cut = (self._cut + data).split(b"\n")
        yield from (line + b"\n" for line in lines)
        if len(self._cut) > _MOST_LINE_BYTES:
            yield self._cut + b"\n"
            self._cut = b""


def _drain(file: IO[bytes]) -> Iterator[bytes]:
    while data := file.read(_CHUNK):
        yield data


def _close_all(files: list[IO[bytes]], but: int = 0) -> None:
    """Close files and take them out of the list, all but the last ones."""
    while len(files) > but:
        files.pop(0).close()
