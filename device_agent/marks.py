"""Notes that a worker leaves for its session while it runs: when which phase began and ended, on the board's clock.

They lie in memory that both share, so that they survive a crash of the worker. What the session makes of them is in
`observe.py`.
"""

from __future__ import annotations

import dataclasses
import mmap
import struct

# Enough for every field of `Phases`, one double each.
_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Phases:
    """Moments on the board's clock in s, 0 where a phase did not happen; CPU time and calls of the worker."""

    idle_start_s: float = 0.0
    idle_end_s: float = 0.0
    timing_start_s: float = 0.0
    timing_end_s: float = 0.0
    busy_start_s: float = 0.0
    busy_end_s: float = 0.0
    busy_calls: float = 0.0
    cpu_s: float = 0.0  # CPU time of the worker from `timing_start_s` to the last phase's end
    loaded_s: float = 0.0  # from then on the worker reads sensors, and calls the candidate
    running_s: float = 0.0  # as `timing_start_s`, but on this machine's clock, as deadlines are


_FIELDS = tuple(field.name for field in dataclasses.fields(Phases))


class Marks:
    """Memory shared with workers forked from here. One worker at a time; `clear` before each."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _BYTES)

    def clear(self) -> None:
        """Forget the last worker's notes."""
        self._memory[: 8 * len(_FIELDS)] = bytes(8 * len(_FIELDS))

    def set(self, name: str, value: float) -> None:
        """Note `value`."""
        struct.pack_into("<d", self._memory, 8 * _FIELDS.index(name), value)

    def read(self) -> Phases:
        """The notes so far."""
        return Phases(*struct.unpack_from(f"<{len(_FIELDS)}d", self._memory))
