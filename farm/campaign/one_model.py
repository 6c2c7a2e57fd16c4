"""A campaign of one model on one type of board, as `farm tune` and quickstart order it.

Here boards, target and workloads are chosen; `tune` runs it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Sequence

from device_agent.protocol import OperatingPoint
from farm.campaign.engine.host import share_cores
from farm.campaign.plan import merge_workloads, to_measure
from farm.campaign.plan_models import Form, ModelVariant, WorkloadSurvey
from farm.campaign.spec import XGB, MeasureOptions
from farm.campaign.submit import to_model, to_type
from farm.crew.choice import TargetPlan, plan_place, plan_target, require_power
from farm.errors import UsageError
from farm.inventory.board_types import BoardType
from farm.models.source import keep_model
from farm.processes.machine import process_identity
from farm.search import gpus
from farm.search.cores import find_clock_factor
from farm.settings import Settings
from farm.store import Store
from farm.types.campaigns import Budget, Order, SearchOrder
from farm.values import DEFAULT_POINT, Workload


@dataclasses.dataclass(frozen=True)
class OneModelRequest:
    """A user's request: `command` is its text, `since` its time (monotonic, s).

    `board` is the only board to use, None: any of the type. `ops` are operator kinds, none: all. `fresh` ignores
    earlier trials. `wait_s` is how long to wait for a board of the fleet. `only_unknown` leaves out workloads with a
    record. `simulated` says which records count; boards of the other kind are refused. `virtual` uses simulated boards
    even where there are real ones. `rivals` are what the model is timed beside at the end. `others` are the model with
    other lengths, tuned with it. `objective` and `deadline_s`: see `Order`. `name` is the campaign's; "": a new one.
    """

    command: str
    model: ModelVariant
    board_type: BoardType
    trials: int
    board: str | None = None
    ops: tuple[str, ...] = ()
    fresh: bool = False
    wait_s: float = 60.0
    only_unknown: bool = False
    simulated: bool | None = None
    virtual: bool = False
    rivals: tuple[str, ...] = ()
    others: tuple[ModelVariant, ...] = ()
    objective: str = "latency"
    deadline_s: float | None = None
    name: str = ""
    since: float = dataclasses.field(default_factory=time.monotonic)

    @property
    def models(self) -> tuple[ModelVariant, ...]:
        """The model and the others."""
        return (self.model, *self.others)


@dataclasses.dataclass(frozen=True)
class MeasuringPlace:
    """Where a model is tuned: the boards that may be used (none: this machine), and their common target."""

    boards: tuple[str, ...]
    simulated: bool
    target: TargetPlan

    @property
    def is_host(self) -> bool:
        """Whether it is this machine."""
        return not self.boards


def choose_place(request: OneModelRequest, store: Store, settings: Settings) -> MeasuringPlace:
    """Choose where a model is tuned. Raises UsageError, UnavailableError and BoardUnsafeError where it cannot be."""
    rows, kind = store.boards.fetch(), request.board_type
    if kind.host_is_board and request.board is None:
        board_cores, _ = share_cores(settings.isolation)
        place = MeasuringPlace((), False, plan_target(kind, {}, len(board_cores)))
    else:
        host_cores, simulated = len(os.sched_getaffinity(0)), request.virtual or None
        place = MeasuringPlace(*plan_place(rows, kind, request.board, host_cores, simulated=simulated))
    mine = [each for each in rows if each.name in place.boards or (place.is_host and each.board_type == kind.name)]
    needing = "" if request.objective == "latency" else f"--objective {request.objective}"
    require_power(mine, kind, needing)
    if needing and not mine:
        raise UsageError("this machine is not known to have a power sensor", "`farm up` looks for one.")
    if request.simulated not in (None, place.simulated):
        which = "virtual" if place.simulated else "real"
        raise UsageError(
            f"the boards of type {request.board_type.name} are {which} ones, whose records would not be used",
            "Leave --simulated out." if request.simulated else "Add --simulated to compile for them.",
        )
    return place


def to_form(request: OneModelRequest, place: MeasuringPlace) -> Form:
    """What decides a model's workloads there."""
    return Form.of(place.target.config, place.target.cores, request.board_type.pipeline)


def choose_workloads(workloads: Sequence[Workload], ops: Sequence[str]) -> tuple[Workload, ...]:
    """Select the workloads of these operator kinds (none: all). Raises UsageError for one that the model lacks."""
    kinds = {workload.kind for workload in workloads}
    if unknown := sorted(set(ops) - kinds):
        raise UsageError(
            f"the model has no operator {', '.join(map(repr, unknown))}", f"It has: {', '.join(sorted(kinds))}."
        )
    return tuple(workload for workload in workloads if not ops or workload.kind in ops)


def drop_known(request: OneModelRequest, workloads: Sequence[Workload], store: Store) -> tuple[Workload, ...]:
    """Return the workloads that have no record of their own board type."""
    records = store.records.fetch(
        board_type=request.board_type.name, operating_point=DEFAULT_POINT, simulated=bool(request.simulated)
    )
    known = {record.workload for record in records}
    return tuple(each for each in workloads if each.hash not in known)


def submit(
    request: OneModelRequest,
    place: MeasuringPlace,
    surveys: Sequence[WorkloadSurvey],
    workloads: Sequence[Workload],
    store: Store,
    settings: Settings,
    by: str,
) -> str:
    """Write a campaign of these workloads to the store; return its name. `surveys` are of the request's models."""
    model, kind, target = request.model, request.board_type, workloads[0].target
    gpus.prepare_boards(target, settings)
    found = {each.hash: each for each in workloads}
    chosen = [dataclasses.replace(s, workloads=tuple(w for w in s.workloads if w.hash in found)) for s in surveys]
    planned = merge_workloads(list(zip(request.models, chosen, strict=True)), (), find_clock_factor(target, kind))
    points = {DEFAULT_POINT: OperatingPoint()}
    order = Order(
        name=request.name or _find_name(store, f"{request.command}-{model.source.name}"),
        owner=by,
        models=tuple(map(to_model, request.models)),
        types=(to_type(kind, place.simulated, place.target, target, points, planned),),
        budget=Budget(trials=request.trials),
        search=SearchOrder(tuner=XGB, loss=None, early_stopping=None, warm_start=not request.fresh, seed=settings.seed),
        # By energy, the fastest trial is not known to be the best.
        measure=to_measure(MeasureOptions(verify_top=1 if request.objective == "latency" else 3), settings).model_copy(
            update={"repeat_alone": False}
        ),
        boards=() if request.board is None else (request.board,),
        rivals=request.rivals,
        process=process_identity(),
        objective=request.objective,
        deadline_s=request.deadline_s,
    )
    rows = [dataclasses.replace(found[each.hash], weight=each.weight, board_type=kind.name) for each in planned]
    keep_model(settings.models_path, model.source)
    store.campaigns.submit(order, request.command, rows)
    return order.name


def stamp_name(text: str) -> str:
    """Make a campaign's name of a text and the time."""
    return f"{re.sub('[^A-Za-z0-9_-]', '-', text)[:40].strip('-') or 'model'}-{time.strftime('%Y%m%d-%H%M%S')}"


def _find_name(store: Store, text: str) -> str:
    """Make a new campaign name from a command, a model and the time."""
    base = stamp_name(text)
    known = {each.name for each in store.campaigns.fetch()}
    return next(name for name in (base, *(f"{base}-{n}" for n in range(2, 1000))) if name not in known)
