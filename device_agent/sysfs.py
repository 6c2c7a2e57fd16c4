"""Read and write a board's kernel files: the real ones, a captured tree's, or those of another source.

Readers convert kernel units (kHz, mW, millidegrees). Paths are absolute as on the board (`/sys/...`), in every tree.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

# Kernel files are short; a longer one in an uploaded tree is not a kernel file.
MAX_BYTES = 1 << 20
# A hung driver blocks its reader for ever; tools (nvpmodel) get this long.
TOOL_TIMEOUT_S = 4.0
# Tools may run as root: the caller's environment must not change what they do.
_TOOL_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/", "LANG": "C"}


# Sources of files beside folders, by the scheme of `--root SCHEME:NAME`; a simulator adds its own.
SOURCES: dict[str, Callable[[str], Tree]] = {}


class Tree(Protocol):
    """The /sys, /proc and /etc of a board. Every method raises OSError as the kernel would."""

    @property
    def simulated(self) -> bool:
        """Whether values come from a model instead of from hardware."""

    def read(self, path: str) -> str:
        """Read a kernel file, stripped of white space and NULs."""

    def write(self, path: str, text: str) -> None:
        """Write one value. Never creates a file."""

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted; symbolic links included."""

    def exists(self, path: str) -> bool:
        """Whether the path exists; False also below an inaccessible folder."""

    def run(self, command: list[str]) -> str:
        """Run one of the board's tools (nvpmodel); return its stdout and stderr together.

        Raises OSError if it is missing, fails (exit code as `errno`) or exceeds TOOL_TIMEOUT_S.
        """


@runtime_checkable
class RemoteTree(Protocol):
    """A tree where a request costs more than the read itself."""

    def read_many(self, paths: Sequence[str]) -> list[str | None]:
        """Read several files; None for each unreadable one. Raises OSError without an answer."""


class FileTree:
    """A tree of real files: `/`, or a captured copy of another machine's."""

    simulated = False

    def __init__(self, root: Path = Path("/")) -> None:
        self.root = root

    def read(self, path: str) -> str:
        fd = os.open(self._at(path), os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = os.read(fd, MAX_BYTES)
        finally:
            os.close(fd)
        return data.decode(errors="replace").replace("\0", " ").strip()

    def write(self, path: str, text: str) -> None:
        # Kernel files ignore O_TRUNC; a captured tree's files need it.
        fd = os.open(self._at(path), os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)

    def names(self, folder: str) -> list[str]:
        return sorted(os.listdir(self._at(folder)))

    def exists(self, path: str) -> bool:
        return os.path.exists(self._at(path))  # noqa: PTH110  the cheapest way: called for every file of a clock

    def run(self, command: list[str]) -> str:
        if self.root != Path("/"):
            raise FileNotFoundError(2, "a captured tree runs no tools", command[0])
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=TOOL_TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
                env=_TOOL_ENVIRONMENT,
                cwd="/",
            )
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(110, f"not finished after {TOOL_TIMEOUT_S:g} s", command[0]) from error
        if done.returncode:
            raise OSError(done.returncode, (done.stdout + done.stderr).strip() or "failed", command[0])
        return done.stdout + done.stderr

    def _at(self, path: str) -> str:
        return path if self.root == Path("/") else f"{self.root}{path}"


def open_tree(root: str) -> Tree:
    """Open the tree that `--root` names: a folder, or `SCHEME:NAME` for one of `SOURCES`.

    Raises OSError when the folder is missing or the source does not answer.
    """
    scheme, _, name = root.partition(":")
    if scheme in SOURCES:
        return SOURCES[scheme](name)
    if not Path(root).is_dir():
        raise NotADirectoryError(20, "--root must name a folder with /sys in it", root)
    return FileTree(Path(root))


def read_text(tree: Tree, path: str) -> str | None:
    """Read a file; None if unreadable (a powered-down sensor returns an I/O error)."""
    with contextlib.suppress(OSError):
        return tree.read(path)
    return None


def read_int(tree: Tree, path: str) -> int | None:
    """Read an integer, its unit stripped (`32760 ma`); None if unreadable or not one."""
    return parse_int(read_text(tree, path))


def parse_int(text: str | None) -> int | None:
    """The integer that `text` begins with; None without one."""
    found = re.match(r"\s*(-?\d+)\b", text or "")
    return int(found.group(1)) if found else None


def read_texts(tree: Tree, paths: Sequence[str]) -> list[str | None]:
    """Apply `read_text` to several files."""
    if isinstance(tree, RemoteTree):
        with contextlib.suppress(OSError):
            return tree.read_many(paths)
        return [None] * len(paths)
    return [read_text(tree, path) for path in paths]


def read_ints(tree: Tree, path: str) -> tuple[int, ...]:
    """Read integers, as of `scaling_available_frequencies`; empty if unreadable."""
    return tuple(int(word) for word in (read_text(tree, path) or "").split() if word.isdecimal())


def list_names(tree: Tree, folder: str, pattern: str = "*") -> list[str]:
    """Matching names in a folder, in natural order; empty if unreadable."""
    with contextlib.suppress(OSError):
        return sorted(fnmatch.filter(tree.names(folder), pattern), key=natural_key)
    return []


def natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key that puts `cpu10` after `cpu9`."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name))
