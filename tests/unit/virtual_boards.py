"""Virtual boards whose time the test moves."""

from __future__ import annotations

import dataclasses
import functools

from device_agent.board_types import BoardType, load_board_types
from farm.virtual.board import VirtualBoard
from farm.virtual.tree import VirtualTree
from tests.clocks import Clock as Clock


@functools.cache
def board_types() -> dict[str, BoardType]:
    return load_board_types()


SIMULATED = tuple(sorted(name for name, board_type in board_types().items() if board_type.simulation))


def make_board(name: str = "jetson-nano", seed: int = 0, typical: bool = True) -> tuple[VirtualBoard, Clock]:
    """A board and its clock; `typical`: exactly as the type says, else as the seed has it."""
    clock = Clock()
    board_type = board_types()[name]
    if typical:
        spread = dict.fromkeys(("capacitance", "leakage", "resistance", "latency", "sensor_gain"), 0.0)
        board_type = dataclasses.replace(board_type, simulation=board_type.simulation | {"spread": spread})
    return VirtualBoard(board_type, seed, clock), clock


def make_tree(name: str = "jetson-nano") -> VirtualTree:
    """Root's files of a typical board; it is the tree's `board`."""
    return VirtualTree(make_board(name)[0])
