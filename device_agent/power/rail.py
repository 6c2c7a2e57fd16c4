"""What every power sensor looks like to the sampler, one rail at a time, and how its files are read cheaply.

Which files there are is said by the drivers (`ina3221.py`, `rapl.py`); time and statistics belong elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from device_agent.errors import SensorError
from device_agent.sysfs import FileTree, Tree

# No board of ours draws this much; a value beyond it is garbage.
MAX_POWER_W = 1000.0
# A rail that draws nothing reads a step or so below zero (offset of the amplifier); steps reach 0.1 W at 5 V.
MIN_POWER_W = -0.1
# Longer than any number in a kernel file.
_BYTES = 64

Reader = Callable[[], "bytes | str"]


class Rail(Protocol):
    """The power of one rail.

    `chip` is shared by rails that are converted together. `note` says what is doubtful about the rail's name.
    """

    name: str
    driver: str
    chip: str
    note: str

    def start(self) -> None:
        """Forget what was read before; called at the start of every trace."""
        ...

    def read(self) -> float | None:
        """The latest value in W, None where a counter has not advanced far enough to tell. Raises SensorError."""
        ...

    def read_current_a(self) -> float | None:
        """The current in A that belongs to the latest value; None where the sensor has no such thing."""
        ...

    def resolution_w(self) -> float | None:
        """How far apart in W neighbouring values lie, near the values last seen; None: not known."""
        ...

    def longest_period_s(self) -> float:
        """How long the sensor takes to refresh its value at most, in s: what to assume until it has been seen."""
        ...


def open_reader(tree: Tree, path: str) -> Reader:
    """A function that reads one kernel file again and again. It raises OSError."""
    if isinstance(tree, FileTree) and tree.root == Path("/"):
        return _KernelFile(path)
    return lambda: tree.read(path)


class _KernelFile:
    """A file kept open: the kernel evaluates sysfs attributes anew on every read at offset 0, without a path lookup."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = -1

    def __call__(self) -> bytes:
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(self._fd, _BYTES, 0)
        except OSError:
            self._close()  # the device may come back under the same name
            raise

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self._close()


def read_number(reader: Reader, what: str) -> int:
    """The integer that a file holds. Raises SensorError for an I/O error and for anything else than an integer."""
    try:
        return int(reader())
    except OSError as error:
        raise SensorError(f"{what}: {error.strerror or error}") from error
    except ValueError as error:
        raise SensorError(f"{what} is not a number: {error}") from error


def check_power(power_w: float, what: str) -> float:
    """`power_w`, if it can be. Raises SensorError."""
    if not MIN_POWER_W <= power_w <= MAX_POWER_W:
        raise SensorError(f"{what} cannot be {power_w:g} W")
    return power_w
