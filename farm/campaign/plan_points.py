"""A campaign's operating points on a board: whether it has them, and what they come to there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from device_agent.protocol import Clocks, OperatingPoint
from farm.campaign.spec import PointSpec
from farm.errors import UsageError
from farm.inventory.board_types import BoardType
from farm.points.grid import Coupling, GridRequest, format_point, is_default, plan_grid
from farm.points.known import find_clocks
from farm.points.values import GridPoint
from farm.values import DEFAULT_POINT


class PointOnBoard(NamedTuple):
    """What a board makes of a point: the key and what to ask for. `written`: the point's own key, before merging."""

    key: str
    point: OperatingPoint
    written: str


def plan_points(
    specs: Sequence[PointSpec], board_type: BoardType, description: Mapping[str, Any]
) -> Iterator[PointOnBoard | str]:
    """What a board makes of each point, or why it lacks it.

    Points that the board makes the same get one key: the default's where it is among them, else the first one's.
    """
    clocks = find_clocks(board_type, description)
    coupling = Coupling.of(board_type)
    has_default = any(spec.is_default for spec in specs)
    kept: dict[object, GridPoint] = {}
    for spec in specs:
        if spec.is_default:
            yield PointOnBoard(DEFAULT_POINT, OperatingPoint(), DEFAULT_POINT)
            continue
        if clocks is None:
            yield PointOnBoard(format_spec(spec), to_point(spec), format_spec(spec))
            continue
        try:
            planned = _plan_point(spec, clocks, coupling)
        except UsageError as error:
            yield f"{error.message}; {error.hint}" if error.hint else error.message
            continue
        if has_default and is_default(planned, clocks, coupling):
            yield PointOnBoard(DEFAULT_POINT, OperatingPoint(), planned.key)
        else:
            first = kept.setdefault((planned.domains, planned.variant), planned)
            yield PointOnBoard(first.key, first.point, planned.key)


def _plan_point(spec: PointSpec, clocks: Clocks, coupling: Coupling) -> GridPoint:
    """The point as this board would be asked for it. Raises UsageError naming what the board lacks and what it has."""
    request = GridRequest(
        cpu_freqs_hz={name: (hz,) for name, hz in spec.cpu_freq_hz.items()} or None,
        cores=None if spec.cores is None else (spec.cores,),
        gpu_freqs_hz=None if spec.gpu_freq_hz is None else (spec.gpu_freq_hz,),
        memory_freqs_hz=None if spec.memory_freq_hz is None else (spec.memory_freq_hz,),
        power_modes=None if spec.power_mode is None else (spec.power_mode,),
    )
    (point,) = plan_grid(clocks, request, coupling).points
    return point


def format_spec(spec: PointSpec) -> str:
    """The point as it was written, in the words of `format_point`."""
    return format_point(to_point(spec))


def to_point(spec: PointSpec) -> OperatingPoint:
    """The point as it was written, for a board whose clocks nobody knows."""
    return OperatingPoint(spec.power_mode, spec.cores, dict(spec.cpu_freq_hz), spec.gpu_freq_hz, spec.memory_freq_hz)
