"""The interface of a power sensor's rail, and cheap reads of its files.

Drivers are in `sensors.py`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from device_agent.errors import SensorError
from device_agent.sysfs import FileTree, Tree

# No supported board draws this much: a larger value is garbage.
MAX_POWER_W = 1000.0
# An idle rail reads up to a step below zero (amplifier offset); steps reach 0.1 W at 5 V.
MIN_POWER_W = -0.1
# Longer than any number in a kernel file.
_BYTES = 64

Reader = Callable[[], "bytes | str"]


class Rail(Protocol):
    """One rail's power.

    `chip` is shared by rails converted together. `note` says what is doubtful about the rail's name.
    """

    name: str
    driver: str
    chip: str
    note: str

    def start(self) -> None:
        """Forget earlier reads; called at the start of every trace."""

    def read(self) -> float | None:
        """The latest value in W; None while a counter has not advanced far enough. Raises SensorError."""

    def read_current_a(self) -> float | None:
        """The current in A of the latest value; None if not measured."""

    def resolution_w(self) -> float | None:
        """The step in W near the last values; None if unknown."""

    def longest_period_s(self) -> float:
        """The longest refresh time in s: assumed until it is measured."""


def open_reader(tree: Tree, path: str) -> Reader:
    """Return a function that reads one kernel file repeatedly. It raises OSError."""
    if isinstance(tree, FileTree) and tree.root == Path("/"):
        return _KernelFile(path)
    return lambda: tree.read(path)


class _KernelFile:
    """An open file: sysfs attributes are evaluated anew on every read at offset 0, without a path lookup."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def __call__(self) -> bytes:
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(self._fd, _BYTES, 0)
        except OSError:
            self._close()  # the device may return under the same name
            raise

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self._close()


def read_number(reader: Reader, what: str) -> int:
    """Read an integer. Raises SensorError for an I/O error or any other text."""
    try:
        return int(reader())
    except OSError as error:
        raise SensorError(f"{what}: {error.strerror or error}") from error
    except ValueError as error:
        raise SensorError(f"{what} is not a number: {error}") from error


def check_power(power_w: float, what: str) -> float:
    """Return a plausible `power_w`. Raises SensorError."""
    if not MIN_POWER_W <= power_w <= MAX_POWER_W:
        raise SensorError(f"{what} cannot be {power_w:g} W")
    return power_w
