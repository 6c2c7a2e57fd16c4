"""What the inventory says about a board type, as far as a board needs it: names, tables, rails, detection.

Read from `inventory/board_types/*.yaml`, checked strictly by the farm (`farm/inventory/board_types.py`) and only read
here. Frequencies are Hz. Tables serve checks, defaults and virtual boards; a real board is asked for its own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from device_agent.protocol import Message, ProtocolError

# Names a folder with more board types, one YAML file each; the farm reads the same variable.
EXTRA_FOLDER_VARIABLE = "FARM_BOARD_TYPES"
GENERIC = "generic-linux"
# Where PyYAML comes with libyaml, a board's processor reads the types in a seventh of the time.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclasses.dataclass(frozen=True)
class Detect(Message):
    """How a board is recognised: its device tree's `compatible` entries, else its `model`."""

    compatible: tuple[str, ...] = ()
    models: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Cluster(Message):
    """Cores that share a clock. `zone` is the thermal zone that cools them."""

    name: str
    core: str
    cpus: tuple[int, ...]
    isolated: bool = False
    freqs_hz: tuple[int, ...] = ()
    measured_clock: bool = False  # scaling_cur_freq is a measurement: it jitters, and reads 0 when idle
    memory_floor_hz: tuple[tuple[int, int], ...] = ()  # (from this CPU clock on, the memory clock is at least this)
    zone: str = ""


@dataclasses.dataclass(frozen=True)
class Gpu(Message):
    """The GPU and its clock. `devices` are names of its platform device, the newest release's last."""

    arch: str
    devices: tuple[str, ...]
    processors: int | None = None  # streaming multiprocessors
    memory_bytes_per_s: int | None = None  # at the memory's highest clock
    registers_per_block: int | None = None
    shared_bytes_per_block: int | None = None
    cuda: dict[str, str] = dataclasses.field(default_factory=dict)  # release -> the driver's version of CUDA
    freqs_hz: tuple[int, ...] = ()
    other_freqs_hz: tuple[tuple[int, ...], ...] = ()  # tables of other releases


@dataclasses.dataclass(frozen=True)
class Memory(Message):
    """The memory clock. `driver` says which files set it: `override` (T210), `bpmp` (T186 and later)."""

    driver: str
    freqs_hz: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class PowerChip(Message):
    """One INA3221. `rails` in channel order, "" where nothing is connected; used where names cannot be read."""

    address: str  # as sysfs writes it, e.g. 6-0040; `*-0042` where the bus is not known
    rails: tuple[str, ...]
    shunt_ohm: float | None = None
    fitted: bool = True  # False: only on some carriers


@dataclasses.dataclass(frozen=True)
class Power(Message):
    """Power sensors. `total` rails sum to `total_scope`; with `board_total` too, where fitted, to the whole board."""

    chips: tuple[PowerChip, ...] = ()
    total: tuple[str, ...] = ()
    total_scope: str = ""
    board_total: tuple[str, ...] = ()
    update_period_s: float | None = None  # what a healthy board's sensors do; here they are watched instead
    idle_range_w: tuple[float, float] | None = None  # the farm's to compare with (`farm board certify`)
    busy_range_w: tuple[float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Thermal(Message):
    """Thermal zones by their `type`; values of those in `ignore` mean nothing."""

    zones: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class PowerMode(Message):
    """One nvpmodel mode. Null limits are the hardware's own. `cpu_max_hz` is per cluster, `EVERY_CLUSTER` for all."""

    id: int
    name: str
    cores_online: tuple[int, ...] | None = None
    cpu_max_hz: dict[str, Any] = dataclasses.field(default_factory=dict)
    gpu_max_hz: int | None = None
    memory_max_hz: int | None = None
    power_gating: int = 0  # mask of power-gated GPU units; modes that differ in it need a reboot
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Fan(Message):
    """Where the fan's speed is set, 0 to 255; empty where a service owns it."""

    pwm: str = ""
    control: str = ""
    rpm: str = ""


@dataclasses.dataclass(frozen=True)
class BoardType(Message):
    """Everything a board may want to know of its type. `simulation` is read by `device_agent/virtual/`."""

    name: str
    title: str = ""
    detect: Detect = dataclasses.field(default_factory=Detect)
    soc: str = ""
    releases: tuple[str, ...] = ()  # L4T lines, oldest first: R32, R35, R36
    memory_bytes: int | None = None
    clusters: tuple[Cluster, ...] = ()
    gpu: Gpu | None = None
    memory: Memory | None = None
    power: Power = dataclasses.field(default_factory=Power)
    thermal: Thermal = dataclasses.field(default_factory=Thermal)
    power_modes: tuple[PowerMode, ...] = ()
    default_power_mode: int | None = None
    fan: Fan = dataclasses.field(default_factory=Fan)
    simulation: dict[str, Any] = dataclasses.field(default_factory=dict)


# What a generic board is: nothing is known, everything is asked.
UNKNOWN = BoardType(name=GENERIC, title="Linux board of no known type")


def find_inventory_folders() -> tuple[Path, ...]:
    """Folders with board types: the project's own (beside the package or in a checkout), then the user's."""
    here = Path(__file__).resolve().parent
    own = (here.parent / "farm" / "inventory" / "data" / "board_types", here.parent / "inventory" / "board_types")
    folders = [folder for folder in own if folder.is_dir()][:1]
    if extra := os.environ.get(EXTRA_FOLDER_VARIABLE):
        folders.append(Path(extra).expanduser())
    return tuple(folders)


def load_board_types(folders: tuple[Path, ...] | None = None) -> dict[str, BoardType]:
    """Every board type by name. Raises ProtocolError naming the file that is wrong, OSError for a missing folder."""
    types: dict[str, BoardType] = {}
    for folder in find_inventory_folders() if folders is None else folders:
        for name in sorted(os.listdir(folder)):
            if name.endswith(".yaml"):
                board_type = read_board_type(folder / name)
                types[board_type.name] = board_type
    return types


def read_board_type(path: Path) -> BoardType:
    """One file. Keys that only the farm needs are passed over. Raises ProtocolError, OSError."""
    try:
        document = yaml.load(path.read_text(), _LOADER)  # noqa: S506 - a safe loader, which the rule cannot see
        if not isinstance(document, Mapping):
            raise ProtocolError("not a mapping")
        known = {field.name for field in dataclasses.fields(BoardType)}
        return BoardType.from_dict({key: value for key, value in document.items() if key in known})
    except (yaml.YAMLError, ProtocolError) as error:
        raise ProtocolError(f"{path}: {error}") from error
