"""Detect a board's type from its device tree. `platform` finds its actual hardware."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from device_agent.platforms.board_types import BoardType
from device_agent.sysfs import Tree, read_text

# The first links to the second if /proc is mounted.
_FOLDERS = ("/proc/device-tree", "/sys/firmware/devicetree/base")


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
        if any(_is_model(identity.model, model) for model in board_type.detect.models):
            return board_type
    return None


def _is_model(said: str, known: str) -> bool:
    """Boards append their revision: `Raspberry Pi 4 Model B Rev 1.4`."""
    return re.fullmatch(rf"{re.escape(known)}(?: Rev\b.*)?", said) is not None
