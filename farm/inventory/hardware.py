"""What a board type's file says of the hardware: clocks, sensors, zones, power modes. The agent reads the same file.

Each model checks itself here; whether the sections agree with each other is checked in `board_types.py`. Frequencies
are Hz. Numbers are taken strictly, because the agent takes no `"5"` for 5 either.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable
from typing import Annotated, Literal, TypeVar

import pydantic

from device_agent.protocol import EVERY_CLUSTER
from farm.inventory.documents import StrictModel

Item = TypeVar("Item", bound=Hashable)


def find_repeated(items: Iterable[Item]) -> Item | None:
    """The first item that occurs a second time."""
    seen = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None


def _ascends(freqs_hz: tuple[int, ...]) -> tuple[int, ...]:
    for lower, upper in itertools.pairwise(freqs_hz):
        if lower >= upper:
            raise ValueError(f"frequencies must ascend, each once; {upper} follows {lower}")
    return freqs_hz


Name = Annotated[str, pydantic.Field(pattern=r"^[a-z0-9][a-z0-9.-]*$", max_length=63)]
# What is linked for, as Zig says it.
LinkTriple = Annotated[str, pydantic.Field(pattern=r"^[a-z0-9_]+-linux-[a-z]+(\.\d+)*$")]
Text = Annotated[str, pydantic.Field(min_length=1)]
Cpu = Annotated[int, pydantic.Field(strict=True, ge=0)]
Hertz = Annotated[int, pydantic.Field(strict=True, gt=0)]
Watt = Annotated[float, pydantic.Field(gt=0, lt=1000)]


def _rises(ends: tuple[float, float]) -> tuple[float, float]:
    if ends[0] >= ends[1]:
        raise ValueError(f"a range goes up, not from {ends[0]:g} to {ends[1]:g}")
    return ends


Range = Annotated[tuple[Watt, Watt], pydantic.AfterValidator(_rises)]
Table = Annotated[tuple[Hertz, ...], pydantic.AfterValidator(_ascends)]
# The clock helper writes there as root, so a file may name nothing outside of sysfs.
SysPath = Annotated[str, pydantic.Field(pattern=r"^(/sys(/[A-Za-z0-9@:+_-][A-Za-z0-9@:+_.-]*)+)?$")]


class Detect(StrictModel):
    """How a board is recognised: entries of its device tree's `compatible`, else its `model`."""

    compatible: tuple[Text, ...] = ()
    models: tuple[Text, ...] = ()


class Cluster(StrictModel):
    """Cores that share a clock. `cpus` are Linux CPU numbers; `isolated` ones run only what is sent there.

    `memory_floor_hz` pairs say: from this CPU clock on, the memory clock is at least that. `measured_clock` says that
    the current frequency is measured by the driver, so that it jitters. `zone` is the thermal zone that cools them.
    """

    name: Name
    core: Text
    cpus: tuple[Cpu, ...] = pydantic.Field(min_length=1)
    isolated: pydantic.StrictBool = False
    freqs_hz: Table = ()
    measured_clock: pydantic.StrictBool = False
    memory_floor_hz: tuple[tuple[Hertz, Hertz], ...] = ()
    zone: str = ""

    @pydantic.field_validator("memory_floor_hz")
    @classmethod
    def _floors_rise(cls, pairs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        _ascends(tuple(cpu_hz for cpu_hz, _ in pairs))
        _ascends(tuple(memory_hz for _, memory_hz in pairs))
        return pairs


class Gpu(StrictModel):
    """The GPU and its clock. `devices` are names of its platform device, the newest release's last.

    `other_freqs_hz` are tables of other releases. `processors` are streaming multiprocessors; what a block of threads
    may have is in registers of 32 bits and in bytes. `cuda` is each release's version of CUDA, which is its driver's.
    """

    arch: Annotated[str, pydantic.Field(pattern=r"^sm_\d{2,3}$")]
    processors: int | None = pydantic.Field(default=None, strict=True, gt=0)
    registers_per_block: int | None = pydantic.Field(default=None, strict=True, gt=0)
    shared_bytes_per_block: int | None = pydantic.Field(default=None, strict=True, gt=0)
    memory_bytes_per_s: int | None = pydantic.Field(default=None, strict=True, gt=0)
    cuda: dict[str, Annotated[str, pydantic.Field(pattern=r"^\d+\.\d+$")]] = pydantic.Field(default_factory=dict)
    devices: tuple[Text, ...] = pydantic.Field(min_length=1)
    freqs_hz: Table = ()
    other_freqs_hz: tuple[Table, ...] = ()


class Memory(StrictModel):
    """The memory clock. `driver` says which files set it: `override` (T210) or `bpmp` (T186 and later)."""

    driver: Literal["override", "bpmp"]
    freqs_hz: Table = ()


class PowerChip(StrictModel):
    """One INA3221. `rails` in channel order, "" where nothing is connected. Not `fitted`: only on some carriers.

    `address` as sysfs writes it, `6-0040`; `*-0042` where the bus is not known.
    """

    address: Annotated[str, pydantic.Field(pattern=r"^(\d+|\*)-00[0-7][0-9a-f]$")]
    rails: tuple[str, ...] = pydantic.Field(min_length=1, max_length=3)
    shunt_ohm: float | None = pydantic.Field(default=None, gt=0, lt=10)
    fitted: pydantic.StrictBool = True


class Power(StrictModel):
    """Power sensors. `total` rails sum to `total_scope`; with `board_total` too, where fitted, to the whole board.

    `update_period_s` is how often a healthy board's sensors have a new value; None where nobody knows. The total of
    healthy boards lies within `idle_range_w` and, with one core busy, `busy_range_w`, both at the highest CPU clocks.
    """

    chips: tuple[PowerChip, ...] = ()
    total: tuple[Text, ...] = ()
    total_scope: str = ""
    board_total: tuple[Text, ...] = ()
    update_period_s: float | None = pydantic.Field(default=None, gt=0, lt=60)
    idle_range_w: Range | None = None
    busy_range_w: Range | None = None

    @pydantic.model_validator(mode="after")
    def _totals_are_rails(self) -> Power:
        rails = [rail for chip in self.chips for rail in chip.rails if rail]
        if twice := find_repeated(rails):
            raise ValueError(f"the rail {twice} is connected twice")
        if twice := find_repeated(chip.address for chip in self.chips):
            raise ValueError(f"two chips have the address {twice}")
        if twice := find_repeated(self.total + self.board_total):
            raise ValueError(f"{twice} would be added to the total twice")
        if missing := [rail for rail in self.total + self.board_total if rail not in rails]:
            raise ValueError(f"no chip has the total's rail {missing[0]}; rails: {', '.join(rails) or 'none'}")
        fitted = {rail for chip in self.chips if chip.fitted for rail in chip.rails}
        if missing := [rail for rail in self.total if rail not in fitted]:
            raise ValueError(f"the total's rail {missing[0]} is on a chip that is not fitted everywhere")
        if bool(self.total) != bool(self.total_scope):
            raise ValueError("total and total_scope must both be given, or neither: a sum means nothing without scope")
        return self


class Thermal(StrictModel):
    """Thermal zones by their `type`; values of those in `ignore` mean nothing."""

    zones: tuple[Text, ...] = ()
    ignore: tuple[Text, ...] = ()

    @pydantic.model_validator(mode="after")
    def _ignored_exist(self) -> Thermal:
        if twice := find_repeated(self.zones):
            raise ValueError(f"the zone {twice} is listed twice")
        if missing := [zone for zone in self.ignore if zone not in self.zones]:
            raise ValueError(f"ignore names {missing[0]}, which is not among the zones")
        return self


class PowerMode(StrictModel):
    """One nvpmodel mode. Limits that are null are the hardware's own.

    `cpu_max_hz` is per cluster, `*` for all of them. `power_gating` is the mask of GPU units without power; modes that
    differ in it need a reboot.
    """

    id: int = pydantic.Field(strict=True, ge=0)
    name: Text
    cores_online: tuple[Cpu, ...] | None = pydantic.Field(default=None, min_length=1)
    cpu_max_hz: dict[str, Hertz] = pydantic.Field(default_factory=dict)
    gpu_max_hz: Hertz | None = None
    memory_max_hz: Hertz | None = None
    power_gating: int = pydantic.Field(default=0, strict=True, ge=0)
    note: str = ""

    @property
    def clusters(self) -> set[str]:
        """Names of the clusters that it limits one by one."""
        return self.cpu_max_hz.keys() - {EVERY_CLUSTER}


class Fan(StrictModel):
    """Where the fan's speed is set, 0 to 255; empty where a service owns it."""

    pwm: SysPath = ""
    control: SysPath = ""
    rpm: SysPath = ""
