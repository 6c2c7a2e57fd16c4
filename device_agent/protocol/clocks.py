"""Messages about clocks: the point to hold, the result, and every clock of a board."""

from __future__ import annotations

import dataclasses
from typing import Any

from device_agent.protocol.messages import Message, ProtocolError, StrEnum

EVERY_CLUSTER = "*"


@dataclasses.dataclass(frozen=True)
class OperatingPoint(Message):
    """Clocks to hold a board at. Null or empty values leave a clock as it is.

    `cpu_freq_hz` maps a cluster's name, or `EVERY_CLUSTER`, to Hz. `cores_online` lists all CPUs to be online. A power
    mode is applied first; one that needs a reboot is refused unless `allow_reboot`.
    """

    power_mode: str | None = None
    cores_online: tuple[int, ...] | None = None
    cpu_freq_hz: dict[str, Any] = dataclasses.field(default_factory=dict)
    gpu_freq_hz: int | None = None
    memory_freq_hz: int | None = None
    allow_reboot: bool = False

    def __post_init__(self) -> None:
        for name, value in {**self.cpu_freq_hz, "gpu": self.gpu_freq_hz, "memory": self.memory_freq_hz}.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
                raise ProtocolError(f"OperatingPoint: frequency of {name} must be a whole number of Hz, not {value!r}")
        if self.cores_online is not None and (not self.cores_online or min(self.cores_online) < 0):
            raise ProtocolError("OperatingPoint.cores_online must name at least one CPU")

    @property
    def is_empty(self) -> bool:
        """Whether the point sets nothing."""
        return self == OperatingPoint(allow_reboot=self.allow_reboot)


@dataclasses.dataclass(frozen=True)
class DomainClocks(Message):
    """One clock: a CPU cluster's, the GPU's or the memory's. Null: unreadable.

    `cpus` and `online` are empty except for CPU clusters. `available_hz` is empty without a table. The memory's
    `governor` is `locked` while its clock is held.
    """

    name: str
    min_hz: int | None = None
    max_hz: int | None = None
    current_hz: int | None = None
    governor: str | None = None
    available_hz: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()
    online: tuple[int, ...] = ()
    isolated: bool = False


@dataclasses.dataclass(frozen=True)
class Clocks(Message):
    """All clocks of a board, their holder, and whether they can be trusted.

    `unsafe` says why clocks could not be restored, empty if all is well. `notes` list what this board lacks or what
    looks wrong (clocks locked by another process, a table that differs from the board type's).
    """

    clusters: tuple[DomainClocks, ...] = ()
    gpu: DomainClocks | None = None
    memory: DomainClocks | None = None
    power_mode: str | None = None
    power_modes: tuple[str, ...] = ()
    holder: str = ""
    unsafe: str = ""
    notes: tuple[str, ...] = ()


class PinStatus(StrEnum):
    """How a `pin` or `unpin` ended."""

    OK = "ok"
    REFUSED = "refused"  # the board does not have what was asked for; the message names what it has
    BUSY = "busy"  # another client holds the clocks
    UNAVAILABLE = "unavailable"  # no clock helper answers, so nothing can be written
    FAILED = "failed"  # a write did not take; everything was restored
    UNSAFE = "unsafe"  # clocks could not be restored; an operator must look


@dataclasses.dataclass(frozen=True)
class PinReport(Message):
    """The result of a `pin` or `unpin`: the point reached, read back, and all clocks afterwards."""

    status: PinStatus
    message: str = ""
    reached: OperatingPoint | None = None
    clocks: Clocks | None = None
    notes: tuple[str, ...] = ()  # what was rounded, capped or raised, and by what
    took_s: float = 0.0
