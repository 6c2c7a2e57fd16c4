"""Detection of a board's type from its device tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_agent.board_types import BoardType, Identity, detect, load_board_types, read_identity
from device_agent.protocol.hardware import Detect
from device_agent.sysfs import FileTree

_TYPES = load_board_types()


def make_tree(root: Path, compatible: tuple[str, ...] = (), model: str = "") -> FileTree:
    folder = root / "proc/device-tree"
    folder.mkdir(parents=True)
    if compatible:
        (folder / "compatible").write_bytes("".join(f"{entry}\0" for entry in compatible).encode())
    if model:
        (folder / "model").write_bytes(f"{model}\0".encode())
    return FileTree(root)


# What real boards say, per public logs and Linux, arch/arm64/boot/dts/nvidia.
@pytest.mark.parametrize(
    ("compatible", "model", "expected"),
    [
        (("nvidia,jetson-nano", "nvidia,tegra210"), "NVIDIA Jetson Nano Developer Kit", "jetson-nano"),
        (("nvidia,p3450-0000", "nvidia,tegra210"), "NVIDIA Jetson Nano Developer Kit", "jetson-nano"),
        (("nvidia,p2597-0000+p3310-1000", "nvidia,tegra186"), "quill", "jetson-tx2"),
        (("nvidia,p3509-0000+p3636-0001", "nvidia,tegra186"), "lanai-3636", None),
        (
            ("nvidia,p3768-0000+p3767-0005-super", "nvidia,p3767-0005", "nvidia,tegra234"),
            "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
            "jetson-orin-nano-super",
        ),
        (("nvidia,p3971-0080+p3834-0008", "nvidia,p3834-0008", "nvidia,tegra264"), "", "jetson-agx-thor"),
        (("raspberrypi,5-model-b", "brcm,bcm2712"), "Raspberry Pi 5 Model B Rev 1.0", "raspberry-pi-5"),
        (("raspberrypi,4-model-b", "brcm,bcm2711"), "Raspberry Pi 4 Model B Rev 1.4", "raspberry-pi-4"),
        ((), "Raspberry Pi 4 Model B Rev 1.4", "raspberry-pi-4"),
        ((), "Raspberry Pi 4 Model B Plus", None),
        (("acme,unknown",), "Acme", None),
        ((), "", None),
    ],
)
def test_known_device_trees(tmp_path: Path, compatible: tuple[str, ...], model: str, expected: str | None) -> None:
    """Boards are detected by their parts or model; unknown ones match no type."""
    found = detect(make_tree(tmp_path, compatible, model), _TYPES)
    assert (found.name if found else None) == expected


def make_type(name: str, compatible: tuple[str, ...] = (), models: tuple[str, ...] = ()) -> BoardType:
    return BoardType(name, detect=Detect(compatible, models))


def test_the_most_specific_match_wins(tmp_path: Path) -> None:
    """Earlier entries of `compatible` go before later ones, and every entry before the model."""
    tree = make_tree(tmp_path, ("acme,board-rev2", "acme,board"), "Acme Board")
    types = [
        make_type("model", models=("Acme Board",)),
        make_type("family", ("acme,board",)),
        make_type("revision", ("acme,board-rev2",)),
    ]
    assert detect(tree, {t.name: t for t in types}) == types[2]
    assert detect(tree, {t.name: t for t in types[:2]}) == types[1]
    assert detect(tree, {t.name: t for t in types[:1]}) == types[0]


def test_what_the_device_tree_says_is_kept_for_people(tmp_path: Path) -> None:
    """The identity holds entries without their NULs, and can say that there is no device tree."""
    tree = make_tree(tmp_path, ("acme,board", "acme,soc"), "Acme Board")
    assert read_identity(tree) == Identity(("acme,board", "acme,soc"), "Acme Board")
    assert str(read_identity(tree)) == "the device tree says Acme Board (acme,board, acme,soc)"
    assert str(Identity()) == "there is no device tree"
