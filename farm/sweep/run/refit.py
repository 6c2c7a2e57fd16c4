"""Try other schedules at some points of a sweep: time them there, keep records for the point, time the model again.

One board does it, after the sweep itself: `farm sweep run --top-k`. What is worth trying, and what figures mean, is in
`schedules.py`; the programs are built by `rivals.py`, in a process of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from device_agent.protocol import Engine, Limits, MeasureSpec, RunSpec, Status
from farm.artifacts.verify import OutputComparison, compare
from farm.crew import visits
from farm.crew.crew import BoardThread, wait_for
from farm.errors import UsageError
from farm.measure.arguments import make_inputs, read_arguments
from farm.points.values import Estimate, GridPoint, PointMeasurement
from farm.processes.compile_subprocess import compile_in_subprocess
from farm.settings import Settings
from farm.store import Store
from farm.sweep import stored
from farm.sweep.plan import schedules
from farm.sweep.plan.conductor import Series
from farm.sweep.plan.schedules import ScheduleVerdict
from farm.sweep.run.programs import TUNED, SweepProgram, SweepRecipe, require_equal_outputs
from farm.sweep.run.rivals import Contest, Rival, build_checks, build_rivals
from farm.values import DEFAULT_POINT, Record

# Every schedule of every workload once per round, in turns: what drifts, drifts for all of them.
_ROUNDS = 4
# Visits of the model with the old and with the new schedules, in turns.
_MODEL_VISITS = 2


@dataclasses.dataclass(frozen=True)
class Bench:
    """What is needed at every point: the board, what it runs, how it is asked."""

    board: BoardThread
    recipe: SweepRecipe
    settings: Settings
    store: Store
    sweep: int
    threads: int
    window: visits.Window
    needs_total: bool
    say: Callable[[str], None]

    def find_candidates(self, records: Sequence[Record], top_k: int) -> dict[str, list[Mapping[str, Any]]]:
        """The schedules worth trying, by workload, from what the store holds of the default point."""
        kind, simulated = self.recipe.board_type.name, self.recipe.simulated
        found = {
            record.workload: schedules.choose_candidates(
                self.store.fetch_known_candidates(record.workload, kind, DEFAULT_POINT, simulated),
                record.candidate,
                top_k,
            )
            for record in records
        }
        return {workload: rows for workload, rows in found.items() if rows}


def refit(bench: Bench, tuned: SweepProgram, points: Sequence[GridPoint], top_k: int) -> list[dict[str, Any]]:
    """What other schedules bring at each of the points; a document for each. Writes records where they differ.

    Raises what the board's calls raise.
    """
    chosen = bench.find_candidates(bench.recipe.records, top_k)
    if not chosen:
        bench.say("--top-k: the store knows no second schedule of any workload, so there is nothing to choose from")
        return []
    bench.say(f"compiling up to {top_k} schedules of {len(chosen)} workloads")
    job = functools.partial(build_rivals, bench.recipe, tuned.batch, chosen)
    contests = compile_in_subprocess(job, bench.recipe.source.name)
    worth = schedules.choose_workloads({c.workload: c.weight * c.rivals[0].default_s for c in contests})
    contests = [contest for contest in contests if contest.workload in worth]
    return [_refit_point(bench, tuned, point, contests) for point in points] if contests else []


def _refit_point(bench: Bench, tuned: SweepProgram, point: GridPoint, contests: Sequence[Contest]) -> dict[str, Any]:
    wait_for(bench.board.submit(lambda board, _: board.pin(point.point)))
    bench.say(f"{point.key}: {sum(len(each.rivals) for each in contests)} schedules, {_ROUNDS} times each")
    rounds: list[dict[str, dict[str, float]]] = [_measure_round(bench, contests, number) for number in range(_ROUNDS)]
    verdicts = {
        each.workload: schedules.judge([r[each.workload] for r in rounds], each.rivals[0].candidate)
        for each in contests
    }
    won = [(each, verdict) for each in contests if (verdict := verdicts[each.workload]) and verdict.differs]
    checks = _check(bench, won)
    records = [
        _to_record(bench, contest, verdict, point, check)
        for (contest, verdict), check in zip(won, checks, strict=True)
        if check.matches
    ]
    for record in records:
        bench.store.save_record(record)
    kept = {record.workload for record in records}
    lines = [_describe(each, verdicts[each.workload], each.workload in kept) for each in contests]
    bench.say(f"{point.key}: {len(kept)} of {len(contests)} workloads run better schedules there")
    model = _measure_model(bench, tuned, point, records) if records else None
    if model:
        ratio = model["after"]["latency_s"]["value"] / model["before"]["latency_s"]["value"]
        bench.say(f"{point.key}: with them the model takes {ratio - 1:+.1%} of the time")
    return {"key": point.key, "batch": tuned.batch, "workloads": lines, "model": model}


def _measure_round(bench: Bench, contests: Sequence[Contest], number: int) -> dict[str, dict[str, float]]:
    """Seconds by workload and candidate; another rival begins in every round."""
    found: dict[str, dict[str, float]] = {}
    for contest in contests:
        turn = number % len(contest.rivals)
        order = [*contest.rivals[turn:], *contest.rivals[:turn]]
        times = {rival.candidate: _time(bench, rival) for rival in order}
        found[contest.workload] = {name: time_s for name, time_s in times.items() if time_s is not None}
    return found


def _time(bench: Bench, rival: Rival) -> float | None:
    """A rival's median now; None where it says nothing."""
    settings = bench.settings
    spec = MeasureSpec(
        arguments=read_arguments(rival.trace_json),
        number=settings.measure_number,
        repeat=settings.measure_repeat,
        min_repeat_s=settings.measure_min_repeat_s,
        cold_weights=True,
        seed=settings.seed,
        limits=Limits(settings.measure_timeout_s, settings.measure_memory_bytes, threads=bench.threads),
    )
    outcome = wait_for(bench.board.submit(lambda board, _: board.measure(spec, rival.library)))
    return statistics.median(outcome.latency_s) if outcome.status is Status.OK and outcome.latency_s else None


def _check(bench: Bench, won: Sequence[tuple[Contest, ScheduleVerdict]]) -> list[OutputComparison]:
    """Whether each winner computes what unscheduled code does."""
    if not won:
        return []
    pairs = [(contest.module_json, _find(contest, verdict.best).scheduled_json) for contest, verdict in won]
    job = functools.partial(build_checks, bench.recipe, pairs)
    built = compile_in_subprocess(job, bench.recipe.source.name)
    return [_compare(bench, contest, *libraries) for (contest, _), libraries in zip(won, built, strict=True)]


def _compare(bench: Bench, contest: Contest, plain: bytes, scheduled: bytes) -> OutputComparison:
    settings = bench.settings
    limits = Limits(settings.model_timeout_s, settings.model_memory_bytes, threads=bench.threads)
    inputs = make_inputs(contest.arguments, settings.seed)
    outputs = []
    for library in (plain, scheduled):
        spec = RunSpec(Engine.KERNEL, limits=limits)

        def job(board: Any, _: Store, spec: RunSpec = spec, library: bytes = library) -> Any:
            return board.run(spec, library, inputs)

        outcome, arrays = wait_for(bench.board.submit(job))
        if outcome.status is not Status.OK:
            return OutputComparison(False, float("inf"), float("inf"), f"{outcome.status}: {outcome.message}")
        outputs.append(list(arrays.values()))
    return compare(outputs[1], outputs[0])


def _find(contest: Contest, candidate: str) -> Rival:
    return next(rival for rival in contest.rivals if rival.candidate == candidate)


def _to_record(
    bench: Bench, contest: Contest, verdict: ScheduleVerdict, point: GridPoint, check: OutputComparison
) -> Record:
    return Record(
        workload=contest.workload,
        workload_name=contest.name,
        board_type=bench.recipe.board_type.name,
        operating_point=point.key,
        pipeline=contest.pipeline,
        candidate=verdict.best,
        median_s=verdict.best_s,
        flop=contest.flop,
        max_abs_error=check.max_abs_error,
        max_rel_error=check.max_rel_error,
        simulated=bench.recipe.simulated,
        trace_json=_find(contest, verdict.best).trace_json,
        evidence={
            "sweep": bench.sweep,
            "board": bench.board.name,
            "rounds": _ROUNDS,
            "against": verdict.default,
            "ratio": [verdict.ratio, verdict.low, verdict.high],
        },
    )


def _describe(contest: Contest, verdict: ScheduleVerdict | None, kept: bool) -> dict[str, Any]:
    known: dict[str, Any] = {
        "workload": contest.workload,
        "name": contest.name,
        "weight": contest.weight,
        "schedules": len(contest.rivals),
    }
    if verdict is None:
        return known | {"differs": False, "note": "not measured"}
    note = "computes something else" if verdict.differs and not kept else ""
    return known | dataclasses.asdict(verdict) | {"differs": kept, "note": note}


def _measure_model(bench: Bench, tuned: SweepProgram, point: GridPoint, records: Sequence[Record]) -> dict[str, Any]:
    """The model with the default point's schedules and with the point's own, visited in turns."""
    own = {record.workload: record for record in records}
    merged = [own.get(record.workload, record) for record in bench.recipe.records]
    recipe = dataclasses.replace(bench.recipe, records=merged)
    job = functools.partial(recipe.compile_all, (TUNED,), (tuned.batch,))
    (fitted,) = compile_in_subprocess(job, recipe.source.name)
    first = visits.plan_first_run(bench.threads, bench.settings.model_memory_bytes, bench.settings.model_timeout_s)
    outputs: dict[Series, list[Any]] = {}
    for name, program in (("untuned", tuned), (TUNED, fitted)):
        outcome, arrays = _run(bench, first, program)
        outputs[(name, tuned.batch)] = list(arrays.values())
    require_equal_outputs(outputs)
    latency_s = max(outcome.latency_s)
    spec = visits.plan_visit(bench.window, latency_s, bench.threads, bench.settings.model_memory_bytes)
    made: dict[str, list[PointMeasurement]] = {"before": [], "after": []}
    for _ in range(_MODEL_VISITS):
        for name, program in (("before", tuned), ("after", fitted)):
            outcome, _arrays = _run(bench, spec, program)
            visit = visits.to_measurement(
                outcome, point.key, time.time(), bench.board.name, needs_total=bench.needs_total
            )
            if visit is not None and visit.is_valid:
                made[name].append(visit)
    if not all(made.values()):
        raise UsageError(f"{point.key}: the model with its own schedules could not be measured")
    return {name: _mean_visits(found) for name, found in made.items()}


def _run(bench: Bench, spec: RunSpec, program: SweepProgram) -> Any:
    return wait_for(bench.board.submit(lambda board, _: board.run(spec, program.library, program.inputs)))


def _mean_visits(found: Sequence[PointMeasurement]) -> dict[str, Any]:
    """Of one program: the visits' means, as wide as the widest or as far as they differ."""
    energies = [visit.energy for visit in found if visit.energy]
    return {
        "latency_s": stored.estimate_to_dict(_join([visit.latency for visit in found])),
        "energy_j": stored.estimate_to_dict(_join(energies)) if len(energies) == len(found) else None,
    }


def _join(estimates: Sequence[Estimate]) -> Estimate:
    low, high = (pick(getattr(e, end) for e in estimates) for pick, end in ((min, "low"), (max, "high")))
    return Estimate(statistics.fmean(e.value for e in estimates), low, high)
