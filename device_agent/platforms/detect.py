"""Which board type a board is, by its device tree. What the board really has is found by `platform`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from device_agent.platforms.board_types import BoardType
from device_agent.sysfs import Tree, read_text

# The first is a link to the second, where /proc is mounted.
_FOLDERS = ("/proc/device-tree", "/sys/firmware/devicetree/base")


@dataclasses.dataclass(frozen=True)
class Identity:
    """What the device tree says: `compatible` from the board to its chip, most specific first. Empty: there is none."""

    compatible: tuple[str, ...] = ()
    model: str = ""

    def __str__(self) -> str:
        if not self.compatible and not self.model:
            return "there is no device tree"
        return f"the device tree says {self.model or 'no model'} ({', '.join(self.compatible) or 'nothing compatible'})"


def read_identity(tree: Tree) -> Identity:
    """What the device tree says; empty where there is none."""
    for folder in _FOLDERS:
        compatible = tuple((read_text(tree, f"{folder}/compatible") or "").split())
        model = read_text(tree, f"{folder}/model") or ""
        if compatible or model:
            return Identity(compatible, model)
    return Identity()


def detect(tree: Tree, types: Mapping[str, BoardType]) -> BoardType | None:
    """The type that the device tree names; None for a board that no type describes.

    The board's `compatible` entries go before its model, the earlier ones before the later ones.
    """
    identity = read_identity(tree)
    for entry in identity.compatible:
        for board_type in types.values():
            if entry in board_type.detect.compatible:
                return board_type
    for board_type in types.values():
        if any(_is_model(identity.model, model) for model in board_type.detect.models):
            return board_type
    return None


def _is_model(said: str, known: str) -> bool:
    """Boards append their revision: `Raspberry Pi 4 Model B Rev 1.4`."""
    return re.fullmatch(rf"{re.escape(known)}(?: Rev\b.*)?", said) is not None
