"""The inventory's board types, as far as a board needs them, and which of them its device tree names.

Read from `inventory/board_types/*.yaml`, which the farm validates (`farm/inventory/board_types.py`);
`protocol/hardware.py` declares their sections. Tables serve checks, defaults and virtual boards; `platform`
finds a real board's actual hardware.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from device_agent.protocol import Message, ProtocolError
from device_agent.protocol.hardware import Cluster, Detect, Fan, Gpu, Memory, Power, PowerMode, Thermal
from device_agent.sysfs import Tree, read_text

# Names a folder with more board types, one YAML file each; the farm reads the same variable.
EXTRA_FOLDER_VARIABLE = "FARM_BOARD_TYPES"
GENERIC = "generic-linux"
# With libyaml, a board's processor reads the types in a seventh of the time.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# The first links to the second if /proc is mounted.
_FOLDERS = ("/proc/device-tree", "/sys/firmware/devicetree/base")


@dataclasses.dataclass(frozen=True)
class BoardType(Message):
    """A board type. `farm/virtual/` reads `simulation`."""

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
    here = Path(__file__).resolve().parent
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


@dataclasses.dataclass(frozen=True)
class Identity:
    """The device tree's identity: `compatible`, most specific first. Empty without a device tree."""

    compatible: tuple[str, ...] = ()
    model: str = ""

    def __str__(self) -> str:
        if not self.compatible and not self.model:
            return "there is no device tree"
        return f"the device tree says {self.model or 'no model'} ({', '.join(self.compatible) or 'nothing compatible'})"


def read_identity(tree: Tree) -> Identity:
    """Read the device tree's identity; empty without one."""
    for folder in _FOLDERS:
        compatible = tuple((read_text(tree, f"{folder}/compatible") or "").split())
        model = read_text(tree, f"{folder}/model") or ""
        if compatible or model:
            return Identity(compatible, model)
    return Identity()


def detect(tree: Tree, types: Mapping[str, BoardType]) -> BoardType | None:
    """The type that the device tree names; None for an unknown board.

    `compatible` entries take precedence over the model, in their order.
    """
    identity = read_identity(tree)
    for entry in identity.compatible:
        for board_type in types.values():
            if entry in board_type.detect.compatible:
                return board_type
    for board_type in types.values():
        # Boards append their revision: `Raspberry Pi 4 Model B Rev 1.4`.
        models = "|".join(map(re.escape, board_type.detect.models))
        if models and re.fullmatch(rf"(?:{models})(?: Rev\b.*)?", identity.model):
            return board_type
    return None
