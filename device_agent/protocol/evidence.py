"""What a board saw at one moment, as a message."""

from __future__ import annotations

import dataclasses

from device_agent.protocol.messages import Message


@dataclasses.dataclass(frozen=True)
class Evidence(Message):
    """What the board saw at one moment. A value that the board cannot read is missing or null, never zero."""

    cpu_freq_hz: dict[str, int] = dataclasses.field(default_factory=dict)  # core number -> Hz
    cpu_max_hz: dict[str, int] = dataclasses.field(default_factory=dict)  # core number -> upper limit in force, Hz
    gpu_freq_hz: int | None = None
    memory_freq_hz: int | None = None
    temperature_c: dict[str, float] = dataclasses.field(default_factory=dict)  # thermal zone -> degrees Celsius
    cooling: dict[str, int] = dataclasses.field(default_factory=dict)  # cooling device that slows clocks -> its state
    alarms: dict[str, int] = dataclasses.field(default_factory=dict)  # over-current alarm -> how often, or 0 and 1
    load_1min: float | None = None
    busy_s: float | None = None  # CPU time used since boot, over all cores and processes
    gpu_load: float | None = None  # share of the time that the GPU was busy of late, by its driver
