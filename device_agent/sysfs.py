"""Kernel files of a board as the agent sees them: the real ones, a captured tree's, or a virtual board's.

The one place that speaks kernel units (kHz, mW, millidegrees) to the rest of the agent: readers convert. Which files
mean what is said by `clocks/`, `power/` and `evidence.py`. Paths are absolute as on the board (`/sys/...`, `/proc/...`,
`/etc/...`), whatever tree they are read from.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

# Kernel files are short; whatever is longer is not one (an uploaded tree may hold anything).
MAX_BYTES = 1 << 20
# A driver that has hung keeps its reader for ever; tools (nvpmodel) are given this long.
TOOL_TIMEOUT_S = 4.0
# `--root virtual:SOCKET` names a simulator's socket instead of a folder.
VIRTUAL_PREFIX = "virtual:"
# Tools run as root at times: what they are, and what they read, is not for the caller's surroundings to say.
_TOOL_ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/", "LANG": "C"}


class Tree(Protocol):
    """Where /sys, /proc and /etc of a board are. Every method raises OSError as the kernel would."""

    @property
    def simulated(self) -> bool:
        """Whether the values come from a model instead of from hardware."""
        ...

    def read(self, path: str) -> str:
        """The text of a kernel file, without surrounding white space and NULs."""
        ...

    def write(self, path: str, text: str) -> None:
        """Write one value. Never creates a file."""
        ...

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted; symbolic links count as what they point to."""
        ...

    def exists(self, path: str) -> bool:
        """Whether the path is there; False too where a parent may not be entered."""
        ...

    def run(self, command: list[str]) -> str:
        """Run one of the board's own tools (nvpmodel); return what it printed, stdout and stderr together.

        Raises OSError when it is not there, fails (its exit code as `errno`) or takes longer than TOOL_TIMEOUT_S.
        """
        ...


@runtime_checkable
class RemoteTree(Protocol):
    """A tree where asking costs more than reading does."""

    def read_many(self, paths: Sequence[str]) -> list[str | None]:
        """The texts of several files, None for each that cannot be read. Raises OSError where nobody answers."""
        ...


class FileTree:
    """A tree of real files: `/` for the machine itself, or a captured copy of another's."""

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
        # Kernel files ignore O_TRUNC; files of a captured tree need it.
        fd = os.open(self._at(path), os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(fd, text.encode())
        finally:
            os.close(fd)

    def names(self, folder: str) -> list[str]:
        return sorted(os.listdir(self._at(folder)))

    def exists(self, path: str) -> bool:
        return os.path.exists(self._at(path))  # noqa: PTH110  as cheap as it gets: asked for every file of a clock

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
    """The tree that `--root` names: a folder, or `virtual:SOCKET` for a virtual board's.

    Raises OSError when the folder is not there or no simulator answers.
    """
    if root.startswith(VIRTUAL_PREFIX):
        from device_agent.virtual.client import SimulatedTree

        return SimulatedTree(root.removeprefix(VIRTUAL_PREFIX))
    if not Path(root).is_dir():
        raise NotADirectoryError(20, "--root must name a folder with /sys in it", root)
    return FileTree(Path(root))


def read_text(tree: Tree, path: str) -> str | None:
    """The text of a file, None if it cannot be read (a powered-down sensor returns an I/O error)."""
    with contextlib.suppress(OSError):
        return tree.read(path)
    return None


def read_int(tree: Tree, path: str) -> int | None:
    """The integer in a file, its unit stripped (`32760 ma`); None if it cannot be read or is not one."""
    return parse_int(read_text(tree, path))


def parse_int(text: str | None) -> int | None:
    """The integer that a text begins with; None if there is none."""
    found = re.match(r"\s*(-?\d+)\b", text or "")
    return int(found.group(1)) if found else None


def read_texts(tree: Tree, paths: Sequence[str]) -> list[str | None]:
    """What `read_text` gives for each of several files."""
    if isinstance(tree, RemoteTree):
        with contextlib.suppress(OSError):
            return tree.read_many(paths)
        return [None] * len(paths)
    return [read_text(tree, path) for path in paths]


def read_ints(tree: Tree, path: str) -> tuple[int, ...]:
    """The integers in a file such as `scaling_available_frequencies`; empty if it cannot be read."""
    return tuple(int(word) for word in (read_text(tree, path) or "").split() if word.isdecimal())


def list_names(tree: Tree, folder: str, pattern: str = "*") -> list[str]:
    """Names in a folder that match, numbers in natural order; empty if the folder cannot be read."""
    with contextlib.suppress(OSError):
        return sorted(fnmatch.filter(tree.names(folder), pattern), key=natural_key)
    return []


def natural_key(name: str) -> tuple[tuple[int, str], ...]:
    """Sort key that puts `cpu10` after `cpu9`."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name))
