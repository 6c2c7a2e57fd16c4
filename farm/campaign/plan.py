"""A campaign's plan: its workloads, boards, coverage, trials and time.

First the pure plan; then `gather`, which reads the file, models, boards and store, and the plans that are kept. No
board is touched.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from farm.campaign.plan_boards import BoardsAtPoint, BoardsOfType, choose_boards
from farm.campaign.plan_estimate import (
    CHECK_S,
    WINDOW_S,
    CampaignEstimate,
    LaneEstimate,
    count_functions,
    estimate,
    estimate_final_s,
)
from farm.campaign.plan_models import Form, ModelVariant, WorkloadSurvey, read_models, start_surveys, take_surveys
from farm.campaign.spec import CampaignFile, CampaignSpec, MeasureOptions
from farm.errors import UsageError
from farm.inventory import documents
from farm.inventory.board_types import load_board_types
from farm.inventory.documents import Place
from farm.processes.jobs import JobProcess
from farm.search.cores import find_clock_factor
from farm.settings import Settings
from farm.store import Store
from farm.store.totals import TrialCosts
from farm.types.campaigns import MeasureOrder, WorkloadOrder

# Assumed until trials of the type say better. Board time besides samples: upload, loading, warm-up, waiting for a quiet
# board. Compiling one candidate took 0.5 s on two processes; proposing eight took 1.8 to 6.8 s on two cores.
ASSUMED_OVERHEAD_S = 0.5
ASSUMED_BUILD_S = 1.0
ASSUMED_SEARCH_S = 1.0

Surveyed = Sequence[tuple[ModelVariant, WorkloadSurvey]]


@dataclasses.dataclass(frozen=True)
class Known:
    """The store's facts on one board type: costs, candidates by workload and point, records."""

    costs: TrialCosts
    candidates: Mapping[tuple[str, str], int]
    recorded: frozenset[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class PlannedType:
    """One board type. `extracted` counts workloads before equal ones were merged.

    `held_s`, `build_s` and `search_s` are the assumed costs of one trial; `costs` are the store's. `surveys` are of the
    models that it can hold. `points` are as in the plan's document: `recorded` of the workloads have a record, earlier
    trials give `known_candidates`; `seconds` is how long trials keep usable boards busy, None without any.
    """

    boards: BoardsOfType
    surveys: Surveyed
    pipelines: tuple[str, ...]
    extracted: int
    workloads: tuple[WorkloadOrder, ...]
    points: tuple[Mapping[str, Any], ...]
    costs: TrialCosts
    held_s: float
    build_s: float
    search_s: float = ASSUMED_SEARCH_S


@dataclasses.dataclass(frozen=True)
class CampaignPlan:
    """The whole plan. `tasks` are workloads that can be measured, on every board type at every operating point."""

    spec: CampaignSpec
    models: tuple[ModelVariant, ...]
    types: tuple[PlannedType, ...]
    estimate: CampaignEstimate
    tasks: int
    host_cores: int

    @property
    def trials(self) -> int:
        """All trials that the budget pays for."""
        return sum(self.estimate.trials)

    @property
    def winners(self) -> int:
        """The most measurements of finalists."""
        return sum(self.estimate.winners)

    @property
    def board_hours(self) -> float:
        """Hours for which trials and verification hold boards, all boards together, at most."""
        return sum(self.estimate.board_hours)


def merge_workloads(surveys: Surveyed, ops: Sequence[str], clock_factor: float = 1.0) -> tuple[WorkloadOrder, ...]:
    """Select the workloads of kinds `ops` (empty: all), equal ones once, those with the most work first.

    Predictions are for the core type's clock; `clock_factor` scales them to the board type's.
    """
    found: dict[str, WorkloadOrder] = {}
    for model, survey in surveys:
        for each in survey.workloads:
            if ops and each.kind not in ops:
                continue
            known = found.get(each.hash)
            if known is None:
                predicted_s = survey.predicted_s.get(each.hash)
                predicted_s = None if predicted_s is None else predicted_s * clock_factor
                known = WorkloadOrder(
                    hash=each.hash,
                    name=each.name,
                    kind=each.kind,
                    flop=each.flop,
                    weight=0,
                    models=(),
                    calls=(),
                    predicted_s=predicted_s,
                )
            calls = dict(zip(known.models, known.calls, strict=True))
            calls[model.name] = calls.get(model.name, 0) + int(each.weight)
            found[each.hash] = known.model_copy(
                update={"weight": known.weight + each.weight, "models": tuple(calls), "calls": tuple(calls.values())}
            )
    return tuple(sorted(found.values(), key=lambda each: (-each.flop * each.weight, each.name, each.hash)))


def to_measure(spec: MeasureOptions, settings: Settings) -> MeasureOrder:
    """Return how candidates are timed; defaults are the settings."""
    return MeasureOrder(
        number=spec.number or settings.measure_number,
        repeat=spec.repeat or settings.measure_repeat,
        min_repeat_s=settings.measure_min_repeat_s if spec.min_repeat is None else spec.min_repeat,
        timeout_s=settings.measure_timeout_s if spec.timeout is None else spec.timeout,
        memory_bytes=settings.measure_memory_bytes,
        verify_top=spec.verify_top,
    )


def plan_campaign(
    spec: CampaignSpec,
    measure: MeasureOrder,
    models: Sequence[ModelVariant],
    types: Sequence[tuple[BoardsOfType, Surveyed]],
    known: Mapping[str, Known],
    host_cores: int,
) -> CampaignPlan:
    """Make the plan; `types` have the surveys of the models that they can hold."""
    planned = [
        _plan_type(boards, surveys, known[boards.board_type.name], measure, spec.search.ops)
        for boards, surveys in types
    ]
    window_s = 0.0 if spec.objective == "latency" else WINDOW_S
    lanes = [_to_lane(each, at, window_s) for each in planned for at in each.boards.points]
    estimated = estimate(lanes, spec.budget, host_cores, measure.verify_top)
    spent = iter(zip(lanes, estimated.trials, estimated.board_hours, strict=True))
    filled = []
    for each in planned:
        points = tuple(
            _plan_point(each, at, known[each.boards.board_type.name], *next(spent)) for at in each.boards.points
        )
        filled.append(dataclasses.replace(each, points=points))
    tasks = sum(lane.jobs for lane in lanes if lane.boards)
    return CampaignPlan(spec, tuple(models), tuple(filled), estimated, tasks, host_cores)


def _plan_type(
    boards: BoardsOfType, surveys: Surveyed, known: Known, measure: MeasureOrder, ops: Sequence[str]
) -> PlannedType:
    factor = find_clock_factor(boards.target.config or {}, boards.board_type)
    costs = known.costs
    return PlannedType(
        boards=boards,
        surveys=surveys,
        pipelines=tuple(dict.fromkeys(survey.pipeline for _, survey in surveys)),
        extracted=sum(not ops or each.kind in ops for _, survey in surveys for each in survey.workloads),
        workloads=merge_workloads(surveys, ops, factor),
        points=(),
        costs=costs,
        held_s=costs.held_s or measure.repeat * measure.min_repeat_s + ASSUMED_OVERHEAD_S,
        build_s=ASSUMED_BUILD_S if costs.build_s is None else costs.build_s,
    )


def _to_lane(planned: PlannedType, at: BoardsAtPoint, window_s: float) -> LaneEstimate:
    return LaneEstimate(
        board_type=planned.boards.board_type.name,
        jobs=len(planned.workloads),
        boards=planned.boards.usable & set(at.boards),
        held_s=planned.held_s,
        host_core_s=planned.search_s + planned.build_s,
        alone=planned.boards.board_type.host_is_board,
        check_s=CHECK_S,
        window_s=0.0 if planned.boards.simulated else window_s,
        power_w=sum(planned.boards.board_type.power.idle_range_w or (0.0, 0.0)) / 2,
        finals_s=sum(
            estimate_final_s(count_functions(planned.workloads, model))
            for model in {name for each in planned.workloads for name in each.models}
        ),
    )


def _plan_point(
    planned: PlannedType, at: BoardsAtPoint, known: Known, lane: LaneEstimate, trials: int, board_hours: float
) -> dict[str, Any]:
    boards = planned.boards
    hashes = [each.hash for each in planned.workloads]
    return {
        "point": at.key,
        "boards": list(at.boards),
        "missing": dict(at.missing),
        "good": len(boards.good & set(at.boards)),
        "idle": len(boards.idle & set(at.boards)),
        "workloads": len(hashes),
        "recorded": sum((each, at.key) in known.recorded for each in hashes),
        "known_candidates": sum(known.candidates.get((each, at.key), 0) for each in hashes),
        "trials": trials,
        "board_hours": board_hours,
        "seconds": trials * lane.held_s / len(lane.boards) if lane.boards else None,
    }


def require_unchanged(plan: Mapping[str, Any], models: Sequence[ModelVariant]) -> None:
    """Refuse models whose bytes differ from the planned ones. Raises UsageError naming each that differs.

    A model that the plan lacks belongs to another file's plan, and is not compared.
    """
    planned = {each["name"]: each["sha256"] for each in plan["models"]}
    changed = [each for each in models if planned.get(each.name, each.source.sha256) != each.source.sha256]
    if changed:
        told = "; ".join(
            f"{each.name} ({each.source.origin}) was {planned[each.name][:12]} and is {each.source.sha256[:12]}"
            for each in changed
        )
        raise UsageError(
            f"models have changed since the campaign {plan['name']} was planned: {told}",
            "Trials of both would count as one campaign's. Plan it again if that is intended.",
        )


def make_plan(
    campaign: CampaignFile,
    store: Store,
    settings: Settings,
    note: Callable[[str], None],
    begin: Callable[[], None] = lambda: None,
    *,
    kept: Mapping[str, Any] | None = None,
    texts: bool = False,
) -> CampaignPlan:
    """Plan a campaign as things are now; `texts`: include the text of every workload's function, for a run.

    `note` gets messages before slow steps. `begin` is called once all but the models' contents was checked; importing
    these takes the time. Raises UsageError naming the line of everything in the file that is impossible, as far as was
    checked, and where models are not those of `kept`, the plan that the user has seen.
    """
    spec = campaign.spec
    host_cores = len(os.sched_getaffinity(0))
    measure = to_measure(spec.measure, settings)
    least_s = measure.repeat * measure.min_repeat_s
    if least_s >= measure.timeout_s:
        message = (
            f"measure: {measure.repeat} samples of {measure.min_repeat_s:g} s take {least_s:g} s, which is not "
            f"within the timeout of {measure.timeout_s:g} s"
        )
        raise documents.to_error(campaign.path, [(("measure",), message)])
    models, faults = read_models(campaign)
    if kept is not None:
        require_unchanged(kept, models)
    types, more = choose_boards(spec, load_board_types(), store.boards.fetch(), models, host_cores)
    if faults := [*faults, *more]:
        raise documents.to_error(campaign.path, faults)
    for each in types:
        if each.left_out:
            note(each.left_out)
        for text in each.merged:
            note(f"{each.board_type.name}: {text}")
    begin()
    surveyed = _survey(campaign, models, types, note, texts)
    known = {each.board_type.name: _fetch_known(store, each, surveys) for each, surveys in surveyed}
    return plan_campaign(spec, measure, models, surveyed, known, host_cores)


def _survey(
    campaign: CampaignFile,
    models: Sequence[ModelVariant],
    types: Sequence[BoardsOfType],
    note: Callable[[str], None],
    texts: bool,
) -> list[tuple[BoardsOfType, Surveyed]]:
    """Survey every model for every type that can hold it. Types of one form share an import."""
    wanted = [
        (model, each, Form.of(each.target.config, each.target.cores, each.board_type.pipeline))
        for each in types
        for model in models
        if model.name not in each.too_big
    ]
    jobs = list({(model.index, model.name, form): (model, form) for model, _, form in wanted}.values())
    answers: dict[tuple[int, str, Form], WorkloadSurvey] = {}
    faults: list[tuple[Place, str]] = []
    with JobProcess() as process:
        surveys = take_surveys(start_surveys(process, jobs, texts=texts), note)
    for (model, form), answer in zip(jobs, surveys, strict=True):
        if isinstance(answer, UsageError):
            faults.append((("models", model.index), f"{model.name}: {documents.to_text(answer)}"))
        else:
            answers[model.index, model.name, form] = answer
    if faults:
        raise documents.to_error(campaign.path, list(dict.fromkeys(faults)))
    surveyed: list[tuple[BoardsOfType, Surveyed]] = [
        (boards, [(model, answers[model.index, model.name, form]) for model, each, form in wanted if each is boards])
        for boards in types
    ]
    _require_work(campaign, surveyed)
    return surveyed


def _require_work(campaign: CampaignFile, surveyed: Sequence[tuple[BoardsOfType, Surveyed]]) -> None:
    """Raise UsageError for operators and models that leave nothing to tune."""
    ops = campaign.spec.search.ops
    by_model: dict[tuple[int, str], set[str]] = {}
    for _, surveys in surveyed:
        for model, survey in surveys:
            by_model.setdefault((model.index, model.name), set()).update(each.kind for each in survey.workloads)
    kinds = set().union(*by_model.values())
    faults: list[tuple[Place, str]] = [
        (("search", "ops", index), f"no model has the operator {op}; they have {', '.join(sorted(kinds)) or 'none'}")
        for index, op in enumerate(ops)
        if op not in kinds
    ]
    for (index, name), own in by_model.items():
        if not own:
            faults.append((("models", index), f"{name} has nothing that can be tuned"))
        elif ops and not faults and not own & set(ops):
            faults.append(
                (("models", index), f"{name} has none of the operators of search.ops; it has {', '.join(sorted(own))}")
            )
    if faults:
        raise documents.to_error(campaign.path, faults)


def _fetch_known(store: Store, boards: BoardsOfType, surveys: Surveyed) -> Known:
    name, simulated = boards.board_type.name, boards.simulated
    hashes = sorted({each.hash for _, survey in surveys for each in survey.workloads})
    return Known(
        store.totals.fetch_trial_costs(name, simulated=simulated),
        store.totals.count_known_candidates(hashes, name, simulated=simulated),
        frozenset(store.totals.fetch_recorded(hashes, name, simulated=simulated)),
    )
