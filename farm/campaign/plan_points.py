"""A campaign's operating points on a board: whether it has them, and what they come to there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from device_agent.protocol import Clocks, Description, DomainClocks, OperatingPoint, ProtocolError
from farm.campaign.spec import PointSpec
from farm.inventory.board_types import BoardType
from farm.points.grid import GPU, MEMORY, Coupling, GridRequest, format_point, plan_grid
from farm.points.values import GridPoint


def find_clocks(board_type: BoardType, description: Mapping[str, Any]) -> Clocks | None:
    """What a board said of its clocks, else what its type's file says; None where neither knows any."""
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


def plan_point(spec: PointSpec, clocks: Clocks, board_type: BoardType) -> GridPoint:
    """The point as this board would be asked for it. Raises UsageError naming what the board lacks and what it has."""
    request = GridRequest(
        cpu_freqs_hz={name: (hz,) for name, hz in spec.cpu_freq_hz.items()} or None,
        cores=None if spec.cores is None else (spec.cores,),
        gpu_freqs_hz=None if spec.gpu_freq_hz is None else (spec.gpu_freq_hz,),
        memory_freqs_hz=None if spec.memory_freq_hz is None else (spec.memory_freq_hz,),
        power_modes=None if spec.power_mode is None else (spec.power_mode,),
    )
    (point,) = plan_grid(clocks, request, Coupling.of(board_type)).points
    return point


def format_spec(spec: PointSpec) -> str:
    """The point as it was written, in the words of `format_point`."""
    return format_point(to_point(spec))


def to_point(spec: PointSpec) -> OperatingPoint:
    """The point as it was written, for a board whose clocks nobody knows."""
    return OperatingPoint(spec.power_mode, spec.cores, dict(spec.cpu_freq_hz), spec.gpu_freq_hz, spec.memory_freq_hz)
