"""What a board says of itself, as a message."""

from __future__ import annotations

import dataclasses

from device_agent.protocol.clocks import Clocks
from device_agent.protocol.messages import Message
from device_agent.protocol.power import SensorInfo


@dataclasses.dataclass(frozen=True)
class Description(Message):
    """What a board says of itself. Lists are empty and values null where the board has no such thing."""

    name: str
    board_type: str
    agent_version: str
    protocol_version: int
    simulated: bool
    architecture: str  # as uname -m
    cpu_model: str
    cores_online: tuple[int, ...]
    cpu_freq_range_hz: dict[str, tuple[int, int]]  # core number -> [lowest, highest]
    memory_bytes: int
    engines: tuple[str, ...]  # values of `Engine` that this board can run
    engine_versions: dict[str, str]
    rails: tuple[str, ...]
    thermal_zones: tuple[str, ...]
    detected_type: str = ""  # board type that the device tree says this is; "": none known
    clocks: Clocks = dataclasses.field(default_factory=Clocks)
    sensors: tuple[SensorInfo, ...] = ()
    total_rails: tuple[str, ...] = ()  # rails whose sum is the total; empty: no total
    notes: tuple[str, ...] = ()  # what this board lacks
