"""Which boards a campaign may use: their types, operating points, and models that fit.

Rows are those of `store.boards.fetch`. The engine decides when a board is taken.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from device_agent.protocol import Clocks, OperatingPoint
from farm import units
from farm.campaign.plan_models import ModelVariant
from farm.campaign.spec import BoardsSpec, CampaignSpec, PointSpec
from farm.crew import choice as board_choice
from farm.crew.choice import TargetPlan
from farm.errors import FarmError, UsageError
from farm.inventory import documents
from farm.inventory.board_types import BoardType, require_board_type
from farm.inventory.documents import Place
from farm.points.grid import Coupling, GridRequest, format_point, is_default, plan_grid
from farm.points.requests import find_clocks
from farm.points.values import GridPoint
from farm.search.gpus import require_device
from farm.search.graph import pipelines
from farm.types.documents import BoardInfo
from farm.values import DEFAULT_POINT, Health, State

# A board's version of a point: its key, the request, and the key as written, before merging.
_PointOnBoard = tuple[str, OperatingPoint, str]
# Memory of the operating system without a desktop, and of the agent.
SYSTEM_BYTES = 512 << 20


def plan_points(
    specs: Sequence[PointSpec], board_type: BoardType, description: Mapping[str, Any]
) -> Iterator[_PointOnBoard | str]:
    """Return a board's version of each point, or why it lacks it.

    Points that are equal on the board get one key: the default's where it is among them, else the first one's.
    """
    clocks = find_clocks(board_type, description)
    coupling = Coupling.of(board_type)
    has_default = any(spec.is_default for spec in specs)
    kept: dict[object, GridPoint] = {}
    for spec in specs:
        if spec.is_default:
            yield DEFAULT_POINT, OperatingPoint(), DEFAULT_POINT
            continue
        if clocks is None:
            yield format_spec(spec), to_point(spec), format_spec(spec)
            continue
        try:
            planned = _plan_point(spec, clocks, coupling)
        except UsageError as error:
            yield f"{error.message}; {error.hint}" if error.hint else error.message
            continue
        if has_default and is_default(planned, clocks, coupling):
            yield DEFAULT_POINT, OperatingPoint(), planned.key
        else:
            first = kept.setdefault((planned.domains, planned.variant), planned)
            yield first.key, first.point, planned.key


def _plan_point(spec: PointSpec, clocks: Clocks, coupling: Coupling) -> GridPoint:
    """Return the request for this board. Raises UsageError naming what the board lacks and what it has."""
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
    """Format a point as the file has it, like `format_point`."""
    return format_point(to_point(spec))


def to_point(spec: PointSpec) -> OperatingPoint:
    """Return a point as the file has it, for a board with unknown clocks."""
    return OperatingPoint(spec.power_mode, spec.cores, dict(spec.cpu_freq_hz), spec.gpu_freq_hz, spec.memory_freq_hz)


@dataclasses.dataclass(frozen=True)
class BoardsAtPoint:
    """The boards of a type that have an operating point. `key` is its text in trials and records.

    `missing` says of each other board of the pool why it cannot take part.
    """

    key: str
    point: OperatingPoint
    boards: tuple[str, ...]
    missing: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class BoardsOfType:
    """A campaign's boards of one type.

    `pool` are all boards chosen by type and labels; `good` ones are fit, `idle` ones can be taken now, `usable` ones
    need no operator. `lacking`: points that no board of the type has, with the reason. `too_big`: models that fit on
    none, with the reason. `left_out`: boards of the other kind, real or simulated, and why. `merged`: points of the
    file that are equal on a board.
    """

    board_type: BoardType
    simulated: bool
    target: TargetPlan
    pool: tuple[str, ...]
    good: frozenset[str]
    idle: frozenset[str]
    usable: frozenset[str]
    points: tuple[BoardsAtPoint, ...]
    lacking: Mapping[str, str]
    too_big: Mapping[str, str]
    notes: tuple[str, ...] = ()
    left_out: str = ""
    merged: tuple[str, ...] = ()


def choose_boards(
    spec: CampaignSpec,
    types: Mapping[str, BoardType],
    rows: Sequence[BoardInfo],
    models: Sequence[ModelVariant],
    host_cores: int,
) -> tuple[list[BoardsOfType], list[tuple[Place, str]]]:
    """Choose the boards by type, and find everything in the file that they cannot do."""
    chosen: list[tuple[int, BoardsOfType]] = []
    faults: list[tuple[Place, str]] = []
    for index, name in enumerate(spec.boards.types):
        try:
            board_type = pipelines.make_exact(require_board_type(name, types), spec.search.exact)
            board_type = pipelines.store_weights(require_device(board_type, spec.device), spec.weights)
            mine = _filter(rows, board_type, spec.boards)
            by_energy = f"objective: {spec.objective}" if spec.objective != "latency" else ""
            needing = by_energy or ("a budget in joules" if spec.budget.joules is not None else "")
            board_choice.require_power(mine, board_type, needing)
            left_out = board_choice.find_left_out(rows, board_type.name, [row.name for row in mine])
            found = _choose_type(spec, board_type, mine, models, host_cores)
            chosen.append((index, dataclasses.replace(found, left_out=left_out)))
        except FarmError as error:
            faults.append((("boards", "types", index), documents.to_text(error)))
    # A type that could not be read may have what the others lack.
    if len(chosen) == len(spec.boards.types):
        faults += _find_impossible(spec, chosen, models)
    return [each for _, each in chosen], faults


def _filter(rows: Sequence[BoardInfo], board_type: BoardType, spec: BoardsSpec) -> list[BoardInfo]:
    """Return the rows of a type that carry all labels. Raises UsageError where there is none."""
    mine = [row for row in rows if row.board_type == board_type.name]
    if not mine and board_type.host_is_board and not spec.labels:
        return [_this_machine(board_type)]
    chosen = [row for row in mine if spec.labels.items() <= row.labels.items()]
    if mine and not chosen:
        wanted = ", ".join(f"{key}={value}" for key, value in spec.labels.items())
        raise UsageError(
            f"of {len(mine)} boards of type {board_type.name!r} none is labelled {wanted}",
            "`farm board list` shows labels.",
        )
    pool = board_choice.plan_pool(chosen or rows, board_type.name, None, simulated=spec.simulated)
    return [row for row in chosen if row.name in pool]


def _this_machine(board_type: BoardType) -> BoardInfo:
    """The row of this machine before it has one in the store."""
    return BoardInfo(
        name=platform.node() or "localhost",
        board_type=board_type.name,
        simulated=False,
        labels={},
        description={},
        transport={},
        state=State.IDLE,
        state_reason="",
        state_since=0.0,
        health=Health.GOOD,
        health_reason="",
        health_since=0.0,
        added_at=0.0,
        seen_at=None,
        quarantine=None,
        lease=None,
        power=[],
        power_cycled_s=[],
    )


def _choose_type(
    spec: CampaignSpec,
    board_type: BoardType,
    rows: Sequence[BoardInfo],
    models: Sequence[ModelVariant],
    host_cores: int,
) -> BoardsOfType:
    pool = tuple(row.name for row in rows)
    simulated = all(row.simulated for row in rows)
    targets, misfits = [], {}
    for row in rows:
        try:
            targets.append(board_choice.plan_target(board_type, board_choice.describe(row, board_type), host_cores))
        except FarmError as error:
            misfits[row.name] = error.message
    if not targets:
        raise UsageError("; ".join(misfits.values()), "`farm doctor` says what such a board is.")
    points, lacking, merged = _plan_points(
        spec.operating_points, board_type, [r for r in rows if r.name not in misfits]
    )
    unfit = {row.name for row in rows if board_choice.find_blocked(rows, [row.name])} | misfits.keys()
    notes = [f"{name}: {reason}" for name, reason in misfits.items()]
    if board_type.target is not None and not any(row.description for row in rows):
        notes.append("none is connected yet, so its type's file is used (`farm up` connects them)")
    if all(name in unfit for name in pool):
        notes.append(f"no board can be used before an operator acts: {board_choice.find_blocked(rows, pool)}")
    return BoardsOfType(
        board_type=board_type,
        simulated=simulated,
        target=targets[0],
        pool=pool,
        good=frozenset(row.name for row in rows if row.health == Health.GOOD) - misfits.keys(),
        idle=frozenset(board_choice.plan_choice(rows, pool).free) - misfits.keys(),
        usable=frozenset(pool) - unfit,
        points=points,
        lacking=lacking,
        too_big=dict(_find_too_big(models, board_type, rows)),
        notes=tuple(notes),
        merged=merged,
    )


def _plan_points(
    specs: Sequence[PointSpec], board_type: BoardType, rows: Sequence[BoardInfo]
) -> tuple[tuple[BoardsAtPoint, ...], dict[str, str], tuple[str, ...]]:
    """Return the points that a board has, merged where equal; why no board has the others; what was merged."""
    found: dict[str, tuple[OperatingPoint, dict[str, None]]] = {}
    reasons: dict[str, dict[str, str]] = {}
    lacking = {}
    merged: dict[tuple[str, str], list[str]] = {}
    by_board = {row.name: list(plan_points(specs, board_type, row.description)) for row in rows}
    for index, spec in enumerate(specs):
        missing = {}
        keys = []
        for name, points in by_board.items():
            planned = points[index]
            if isinstance(planned, str):
                missing[name] = planned
                continue
            key, point, written = planned
            found.setdefault(key, (point, {}))[1][name] = None
            keys.append(key)
            if written != key:
                missing[name] = f"{written} and {key} are the same on it"
                merged.setdefault((written, key), []).append(name)
        for key in keys:
            reasons.setdefault(key, {}).update(missing)
        if not keys:
            lacking[format_spec(spec)] = next(iter(missing.values()))
    at = []
    for key, (point, names) in found.items():
        others = {name: why for name, why in reasons[key].items() if name not in names}
        at.append(BoardsAtPoint(key, point, tuple(names), others))
    said = (
        f"{written} is the same as {key} on {units.name_some(names)}: done once"
        for (written, key), names in merged.items()
    )
    return tuple(at), lacking, tuple(said)


def _find_too_big(
    models: Sequence[ModelVariant], board_type: BoardType, rows: Sequence[BoardInfo]
) -> Iterator[tuple[str, str]]:
    sizes: list[int] = [row.description.get("memory_bytes") or board_type.memory_bytes or 0 for row in rows]
    if not all(sizes):
        return  # a board's memory is unknown
    largest = max(sizes)
    for model in models:
        if model.least_bytes > largest - SYSTEM_BYTES:
            yield (
                model.name,
                f"its weights and inputs take {_mib(model.least_bytes)}, and a {board_type.name} has "
                f"{_mib(largest)}, of which {_mib(SYSTEM_BYTES)} are its system's",
            )


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"


def _find_impossible(
    spec: CampaignSpec, chosen: Sequence[tuple[int, BoardsOfType]], models: Sequence[ModelVariant]
) -> Iterator[tuple[Place, str]]:
    """Find what no board of any type can do, and types without any work."""
    types = [each for _, each in chosen]
    for index, point in enumerate(spec.operating_points):
        text = format_spec(point)
        if all(text in each.lacking for each in types):
            whys = "; ".join(f"{each.board_type.name}: {each.lacking[text]}" for each in types)
            yield ("operating_points", index), f"no board has the operating point {text}: {whys}"
    for model in models:
        if all(model.name in each.too_big for each in types):
            whys = "; ".join(each.too_big[model.name] for each in types)
            yield ("models", model.index), f"no board can hold {model.name}: {whys}"
    if len(types) < 2:
        return
    for index, each in chosen:
        if not each.points:
            yield ("boards", "types", index), f"a {each.board_type.name} has none of the operating points"
        elif models and all(model.name in each.too_big for model in models):
            yield ("boards", "types", index), f"a {each.board_type.name} can hold none of the models"
