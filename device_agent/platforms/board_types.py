"""The inventory's board types, as far as a board needs them.

Read from `inventory/board_types/*.yaml`, which the farm validates (`farm/inventory/board_types.py`);
`protocol/hardware.py` declares their sections. Tables serve checks, defaults and virtual boards; a real board reads its
own.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from device_agent.protocol import Message, ProtocolError
from device_agent.protocol.hardware import Cluster, Detect, Fan, Gpu, Memory, Power, PowerMode, Thermal

# Names a folder with more board types, one YAML file each; the farm reads the same variable.
EXTRA_FOLDER_VARIABLE = "FARM_BOARD_TYPES"
GENERIC = "generic-linux"
# With libyaml, a board's processor reads the types in a seventh of the time.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclasses.dataclass(frozen=True)
class BoardType(Message):
    """A board type. `device_agent/virtual/` reads `simulation`."""

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


# A generic board: nothing is known in advance, everything is read.
UNKNOWN = BoardType(name=GENERIC, title="Linux board of no known type")


def find_inventory_folders() -> tuple[Path, ...]:
    """Folders with board types: the project's (beside the package or in a checkout), then the user's."""
    here = Path(__file__).resolve().parents[1]
    own = (here.parent / "farm" / "inventory" / "data" / "board_types", here.parent / "inventory" / "board_types")
    folders = [folder for folder in own if folder.is_dir()][:1]
    if extra := os.environ.get(EXTRA_FOLDER_VARIABLE):
        folders.append(Path(extra).expanduser())
    return tuple(folders)


def load_board_types(folders: tuple[Path, ...] | None = None) -> dict[str, BoardType]:
    """Load every board type by name. Raises ProtocolError naming the wrong file, OSError for a missing folder."""
    types: dict[str, BoardType] = {}
    for folder in find_inventory_folders() if folders is None else folders:
        for name in sorted(os.listdir(folder)):
            if name.endswith(".yaml"):
                board_type = read_board_type(folder / name)
                types[board_type.name] = board_type
    return types


def read_board_type(path: Path) -> BoardType:
    """Read one file; keys for the farm alone are skipped. Raises ProtocolError, OSError."""
    try:
        document = yaml.load(path.read_text(), _LOADER)  # noqa: S506 - a safe loader, which the rule cannot see
        if not isinstance(document, Mapping):
            raise ProtocolError("not a mapping")
        known = {field.name for field in dataclasses.fields(BoardType)}
        return BoardType.from_dict({key: value for key, value in document.items() if key in known})
    except (yaml.YAMLError, ProtocolError) as error:
        raise ProtocolError(f"{path}: {error}") from error
