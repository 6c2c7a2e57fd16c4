"""A campaign's operating points on a board: whether it has them, and what they come to there."""

from __future__ import annotations

from device_agent.protocol import Clocks, OperatingPoint
from farm.campaign.spec import PointSpec
from farm.inventory.board_types import BoardType
from farm.points.grid import Coupling, GridRequest, format_point, plan_grid
from farm.points.values import GridPoint


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
