"""Make an order from a campaign file, or of one model as `farm tune` and quickstart have it, and put it into the store.

Nothing is started here; `tune` runs the second kind.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from device_agent.protocol import NAME_RULE, OperatingPoint, is_name
from farm.artifacts import import_check
from farm.campaign.plan import CampaignPlan, make_plan, merge_workloads, to_measure
from farm.campaign.plan_document import find_plan, keep_plan, to_document
from farm.campaign.plan_estimate import NO_BOARDS
from farm.campaign.plan_models import Form, ModelVariant, WorkloadSurvey
from farm.campaign.spec import XGB, BudgetSpec, CampaignFile, MeasureOptions
from farm.crew.choice import TargetPlan, plan_place, plan_target, require_power
from farm.crew.local import share_cores
from farm.errors import UsageError
from farm.inventory.board_types import BoardType
from farm.inventory.documents import check_document
from farm.models.source import keep_model
from farm.processes.machine import process_identity
from farm.search import gpus
from farm.search.cores import find_clock_factor
from farm.settings import Settings
from farm.store import Store
from farm.types.campaigns import Budget, ModelOrder, Order, SearchOrder, TypeOrder, WorkloadOrder
from farm.values import DEFAULT_POINT, Workload

# The limits of a file's budget, as fields of `Budget`.
LIMITS = {
    "trials": "trials",
    "wall_clock": "wall_clock_s",
    "board_hours": "board_s",
    "per_workload": "per_workload",
    "joules": "energy_j",
}


def submit(
    campaign: CampaignFile,
    store: Store,
    settings: Settings,
    owner: str,
    command: str,
    note: Callable[[str], None],
    begin: Callable[[], None] = lambda: None,
    compile_to: str | None = None,
) -> str:
    """Plan a campaign and write its order to the store; return its name. `note` gets messages before slow steps;
    `begin` is called once only the models' contents can be wrong. `compile_to`: see `Order`.

    Raises UsageError where the file is impossible, its name is taken, or a model differs from the last plan of this
    name; PermanentError where a model to be compiled is imported wrongly.
    """
    name = campaign.spec.name
    require_new_name(store, name)
    kept = find_plan(settings.home_path, name)
    planned = make_plan(campaign, store, settings, note, begin, kept=kept, texts=True)
    order = make_order(planned, settings, owner).model_copy(update={"compile_to": compile_to})
    if not order.types:
        raise UsageError(f"{campaign.path}: no board type has both a workload and an operating point of this campaign")
    estimate = planned.estimate
    if not planned.trials and estimate.limit != NO_BOARDS:
        raise UsageError(
            f"{campaign.path}: the budget pays for no trial: {estimate.limit} is too small",
            f"Raise it; `farm campaign run --dry-run {shlex.quote(str(campaign.path))}` says what a trial costs.",
        )
    if compile_to is not None:
        for model in planned.models:
            import_check.require_right_import(model.source, model.inputs, note)
    for model in planned.models:
        keep_model(settings.models_path, model.source)
    if kept is None:
        document = {"file": str(campaign.path.absolute()), **to_document(planned)}
        keep_plan(settings.home_path, document)
    store.campaigns.submit(order, command, list_workloads(planned))
    return name


def clone(store: Store, name: str, new: str, changes: Mapping[str, Any], owner: str, command: str) -> str:
    """Submit another campaign's order under a new name, with changed budget limits; return the name.

    Models and boards are not read again: the same workloads are tuned. Raises UsageError.
    """
    source = store.campaigns.require(name)
    require_new_name(store, new)
    changed = {"name": new, "owner": owner, "budget": source.budget.change(changes)}
    # Its artifacts would replace the other's.
    order = source.order.model_copy(update=changed | {"compile_to": None, "process": None})
    store.campaigns.submit(order, command, store.workloads.fetch(source.id))
    return new


def require_new_name(store: Store, name: str) -> None:
    """Refuse an invalid name or one that is taken, before time is spent. Raises UsageError."""
    if not is_name(name):
        raise UsageError(f"{name!r} cannot be a campaign's name", f"A name is {NAME_RULE}.")
    there = {each.name: each for each in store.campaigns.fetch()}
    if name in there:
        state = there[name].state
        hint = (
            f"`farm campaign resume {name}` goes on with it; give this one another name otherwise."
            if not there[name].over
            else f"Give this one another name; `farm campaign run --from {name} --name NEW` does the same again."
        )
        raise UsageError(f"there is a campaign {name} already, which is {state}", hint)


def make_order(plan: CampaignPlan, settings: Settings, owner: str) -> Order:
    """Build the engine's order, with every default filled in. Types without work are left out."""
    spec = plan.spec
    targets = [
        next((each.target for _, survey in planned.surveys for each in survey.workloads), None)
        for planned in plan.types
    ]
    for made_for in filter(None, targets):
        gpus.prepare_boards(made_for, settings)
    return Order(
        name=spec.name,
        owner=owner,
        models=tuple(map(to_model, plan.models)),
        types=tuple(
            to_type(
                planned.boards.board_type,
                planned.boards.simulated,
                planned.boards.target,
                target,
                {each.key: each.point for each in planned.boards.points},
                planned.workloads,
            )
            for planned, target in zip(plan.types, targets, strict=True)
            if target and planned.workloads and planned.points
        ),
        budget=to_budget(spec.budget),
        search=SearchOrder(
            **dict(spec.search) | {"seed": settings.seed if spec.search.seed is None else spec.search.seed}
        ),
        measure=to_measure(spec.measure, settings),
        labels=dict(spec.boards.labels),
        priority=spec.priority,
        objective=spec.objective,
        deadline_s=spec.latest_s,
    )


def list_workloads(plan: CampaignPlan) -> list[Workload]:
    """Return the workloads of an order with their functions, once for each board type."""
    workloads = []
    for planned in plan.types:
        chosen = {each.hash: each for each in planned.workloads}
        found = {each.hash: each for _, survey in planned.surveys for each in survey.workloads if each.hash in chosen}
        board_type = planned.boards.board_type.name
        workloads += [
            dataclasses.replace(found[key], weight=each.weight, board_type=board_type) for key, each in chosen.items()
        ]
    return workloads


def to_budget(spec: BudgetSpec) -> Budget:
    """Convert a budget to the scheduler's."""
    found = {LIMITS[key]: value for key, value in spec}
    return Budget(**found | {"board_s": spec.board_hours and spec.board_hours * 3600})


def read_limits(called: str, limits: Mapping[str, Any]) -> dict[str, Any]:
    """Convert limits written as in a file, None for none, to fields of a `Budget`. Raises UsageError."""
    if unknown := sorted(limits.keys() - LIMITS.keys()):
        raise UsageError(f"{called}: a budget has no {', '.join(unknown)}", f"It has: {', '.join(LIMITS)}.")
    given = {key: value for key, value in limits.items() if value is not None}
    checked = to_budget(check_document(given, BudgetSpec, called)) if given else Budget()
    return {LIMITS[key]: getattr(checked, LIMITS[key]) for key in limits}


def to_model(model: ModelVariant) -> ModelOrder:
    """Convert a planned model to an order's."""
    order = ModelOrder(
        name=model.name, origin=model.source.origin, sha256=model.source.sha256, batch=model.batch, shapes=model.shapes
    )
    return order.model_copy(update={"lengths": model.lengths}) if model.lengths else order


def to_type(
    board_type: BoardType,
    simulated: bool,
    plan: TargetPlan,
    target: Mapping[str, Any],
    points: Mapping[str, OperatingPoint],
    chosen: Sequence[WorkloadOrder],
) -> TypeOrder:
    """Return the work on boards of one type; `target` is that of its workloads."""
    return TypeOrder(
        board_type=board_type.name,
        simulated=simulated,
        target=dict(target),
        # Simulated boards share this host's cores with each other and with the search. One thread's time is measured as
        # CPU time at any load; several threads would wait for each other. Emulated code is counted.
        threads=1 if simulated and plan.is_for_host else plan.threads,
        pipeline=board_type.pipeline,
        points=dict(points),
        workloads=tuple(chosen),
        is_host=board_type.host_is_board,
    )


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


def submit_one(
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
