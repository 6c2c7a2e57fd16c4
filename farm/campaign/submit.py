"""Make an order from a campaign file and put it into the store. Nothing is started here."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from device_agent.protocol import NAME_RULE, OperatingPoint, is_name
from farm.artifacts import import_check
from farm.campaign.plan import CampaignPlan, make_plan, to_measure
from farm.campaign.plan_document import find_plan, keep_plan, to_document
from farm.campaign.plan_estimate import NO_BOARDS
from farm.campaign.plan_models import ModelVariant
from farm.campaign.spec import BudgetSpec, CampaignFile
from farm.crew.choice import TargetPlan
from farm.errors import UsageError
from farm.inventory.board_types import BoardType
from farm.models.source import keep_model
from farm.search import gpus
from farm.settings import Settings
from farm.store import Store
from farm.types.campaigns import Budget, ModelOrder, Order, SearchOrder, TypeOrder, WorkloadOrder
from farm.values import Workload


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
                {each.at.key: each.at.point for each in planned.points},
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
        deadline_s=spec.deadline,
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
    return Budget(
        trials=spec.trials,
        wall_clock_s=spec.wall_clock,
        board_s=None if spec.board_hours is None else spec.board_hours * 3600,
        per_workload=spec.per_workload,
        energy_j=spec.joules,
    )


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
