"""The hardware sections of a board type's file: clocks, sensors, zones, power modes. Farm and agent share them.

Frequencies are Hz. The agent checks types alone; the farm, with pydantic, also checks the value rules beside them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Annotated, Any

from device_agent.protocol.messages import Message
from device_agent.protocol.outcome import EVERY_CLUSTER, Clocks, SensorInfo


@dataclasses.dataclass(frozen=True)
class Description(Message):
    """A board's description. Lists are empty and values null for missing hardware."""

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


class Rule:
    """A value rule beside its type: bounds in pydantic's core-schema terms, then a function that returns the value or
    raises ValueError. Numbers are `strict`: a message does not accept `"5"` for 5 either.
    """

    def __init__(self, check: Callable[[Any], Any] | None = None, **bounds: Any) -> None:
        self._check, self._bounds = check, bounds

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        schema = {**handler(source), **self._bounds}
        if self._check is None:
            return schema
        return {
            "type": "function-after",
            "function": {"type": "no-info", "function": self._check},
            "schema": schema,
        }


def _ascends(freqs_hz: tuple[int, ...]) -> tuple[int, ...]:
    for lower, upper in itertools.pairwise(freqs_hz):
        if lower >= upper:
            raise ValueError(f"frequencies must ascend, each once; {upper} follows {lower}")
    return freqs_hz


def _floors_rise(pairs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    _ascends(tuple(cpu_hz for cpu_hz, _ in pairs))
    _ascends(tuple(memory_hz for _, memory_hz in pairs))
    return pairs


def _rises(ends: tuple[float, float]) -> tuple[float, float]:
    if ends[0] >= ends[1]:
        raise ValueError(f"a range goes up, not from {ends[0]:g} to {ends[1]:g}")
    return ends


Name = Annotated[str, Rule(pattern=r"^[a-z0-9][a-z0-9.-]*$", max_length=63)]
Text = Annotated[str, Rule(min_length=1)]
Yes = Annotated[bool, Rule(strict=True)]
Count = Annotated[int, Rule(strict=True, gt=0)]
# From 0, as Linux counts CPUs and nvpmodel its modes.
Index = Annotated[int, Rule(strict=True, ge=0)]
Hertz = Annotated[int, Rule(strict=True, gt=0)]
Watt = Annotated[float, Rule(gt=0, lt=1000)]
Range = Annotated[tuple[Watt, Watt], Rule(_rises)]
Table = Annotated[tuple[Hertz, ...], Rule(_ascends)]
# The clock helper writes there as root, so a file may name nothing outside sysfs.
SysPath = Annotated[str, Rule(pattern=r"^(/sys(/[A-Za-z0-9@:+_-][A-Za-z0-9@:+_.-]*)+)?$")]


@dataclasses.dataclass(frozen=True)
class Detect(Message):
    """How a board is recognised: device-tree `compatible` entries, else its `model`."""

    compatible: tuple[Text, ...] = ()
    models: tuple[Text, ...] = ()


@dataclasses.dataclass(frozen=True)
class Cluster(Message):
    """Cores that share a clock. `cpus` are Linux CPU numbers; `isolated` ones run only pinned work.

    `memory_floor_hz` pairs a CPU clock with the lowest memory clock from there on. `measured_clock`: the driver
    measures the current frequency, so it jitters, and reads 0 when idle. `zone` is the cores' thermal zone.
    """

    name: Name
    core: Text
    cpus: Annotated[tuple[Index, ...], Rule(min_length=1)]
    isolated: Yes = False
    freqs_hz: Table = ()
    measured_clock: Yes = False
    memory_floor_hz: Annotated[tuple[tuple[Hertz, Hertz], ...], Rule(_floors_rise)] = ()
    zone: str = ""


@dataclasses.dataclass(frozen=True)
class Gpu(Message):
    """The GPU and its clock. `devices` are names of its platform device, the newest release's last.

    `other_freqs_hz` are tables of other releases. `processors` are streaming multiprocessors; a thread block's limits
    are in 32-bit registers and in bytes; `memory_bytes_per_s` is at the memory's highest clock. `cuda` is each
    release's CUDA version, which is its driver's.
    """

    arch: Annotated[str, Rule(pattern=r"^sm_\d{2,3}$")]
    devices: Annotated[tuple[Text, ...], Rule(min_length=1)]
    processors: Count | None = None
    registers_per_block: Count | None = None
    shared_bytes_per_block: Count | None = None
    memory_bytes_per_s: Count | None = None
    cuda: dict[str, Annotated[str, Rule(pattern=r"^\d+\.\d+$")]] = dataclasses.field(default_factory=dict)
    freqs_hz: Table = ()
    other_freqs_hz: tuple[Table, ...] = ()


@dataclasses.dataclass(frozen=True)
class Memory(Message):
    """The memory clock. `driver` selects its files: `override` (T210) or `bpmp` (T186 and later)."""

    driver: Annotated[str, Rule(type="literal", expected=["override", "bpmp"])]
    freqs_hz: Table = ()


@dataclasses.dataclass(frozen=True)
class PowerChip(Message):
    """One INA3221. `rails` in channel order, "" for an unused one; used if names are unreadable.

    `address` as in sysfs, `6-0040`; `*-0042` for an unknown bus. Not `fitted`: only on some carriers.
    """

    address: Annotated[str, Rule(pattern=r"^(\d+|\*)-00[0-7][0-9a-f]$")]
    rails: Annotated[tuple[str, ...], Rule(min_length=1, max_length=3)]
    shunt_ohm: Annotated[float, Rule(gt=0, lt=10)] | None = None
    fitted: Yes = True


@dataclasses.dataclass(frozen=True)
class Power(Message):
    """Power sensors. `total` rails sum to `total_scope`; with `board_total`, if fitted, to the whole board.

    `update_period_s` is a healthy board's sensor period; None if unknown. A healthy board's total lies within
    `idle_range_w` and, with one core busy, `busy_range_w`, both at the highest CPU clocks.
    """

    chips: tuple[PowerChip, ...] = ()
    total: tuple[Text, ...] = ()
    total_scope: str = ""
    board_total: tuple[Text, ...] = ()
    update_period_s: Annotated[float, Rule(gt=0, lt=60)] | None = None
    idle_range_w: Range | None = None
    busy_range_w: Range | None = None


@dataclasses.dataclass(frozen=True)
class Thermal(Message):
    """Thermal zones by `type`; those in `ignore` have meaningless values."""

    zones: tuple[Text, ...] = ()
    ignore: tuple[Text, ...] = ()


@dataclasses.dataclass(frozen=True)
class PowerMode(Message):
    """One nvpmodel mode. Null limits are the hardware's own.

    `cpu_max_hz` is per cluster, `EVERY_CLUSTER` for all. `power_gating` is the mask of unpowered GPU units; changing it
    takes a reboot.
    """

    id: Index
    name: Text
    cores_online: Annotated[tuple[Index, ...], Rule(min_length=1)] | None = None
    cpu_max_hz: dict[str, Hertz] = dataclasses.field(default_factory=dict)
    gpu_max_hz: Hertz | None = None
    memory_max_hz: Hertz | None = None
    power_gating: Index = 0
    note: str = ""

    @property
    def clusters(self) -> set[str]:
        """Names of the clusters with limits of their own."""
        return self.cpu_max_hz.keys() - {EVERY_CLUSTER}


@dataclasses.dataclass(frozen=True)
class Fan(Message):
    """The fan's control file, 0 to 255; empty if a service owns it."""

    pwm: SysPath = ""
    control: SysPath = ""
    rpm: SysPath = ""
