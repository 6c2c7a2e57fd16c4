"""The clocks of a board that is not connected: from its last description, or from its type's file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from device_agent.protocol import Clocks, Description, DomainClocks, ProtocolError
from farm.inventory.board_types import BoardType
from farm.points.grid import GPU, MEMORY


def find_clocks(board_type: BoardType, description: Mapping[str, Any]) -> Clocks | None:
    """The clocks of a board's last description, else those of its type's file; None where neither has any."""
    try:
        clocks = Description.from_dict(dict(description)).clocks if description else None
    except ProtocolError:
        # Kept by another version: the type's file is then the better source.
        clocks = None
    if clocks is not None and (clocks.clusters or clocks.power_modes):
        return clocks
    return _read_type(board_type)


def _read_type(board_type: BoardType) -> Clocks | None:
    if not board_type.clusters and not board_type.power_modes:
        return None
    gpu, memory = board_type.gpu, board_type.memory
    # Which of the tables a board has depends on its release: any of them will do until it has been asked.
    tables = (gpu.freqs_hz, *gpu.other_freqs_hz) if gpu else ()
    return Clocks(
        clusters=tuple(
            DomainClocks(each.name, available_hz=each.freqs_hz, cpus=each.cpus, isolated=each.isolated)
            for each in board_type.clusters
        ),
        gpu=DomainClocks(GPU, available_hz=tuple(sorted({hz for table in tables for hz in table}))) if gpu else None,
        memory=DomainClocks(MEMORY, available_hz=memory.freqs_hz) if memory else None,
        power_modes=tuple(mode.name for mode in board_type.power_modes),
    )
