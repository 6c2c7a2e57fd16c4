"""Retry schedules at some points of a sweep (`farm sweep run --top-k`): time them, write records, time the model again.

The best schedule depends on the clocks: memory is relatively faster or slower. First the pure selection of points and
schedules. `retrials` builds and times them; `farm.selection` decides, as for a campaign's finalists.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from device_agent.protocol import Engine, Limits, MeasureSpec, RunSpec, Status
from farm.artifacts.verify import OutputComparison, compare
from farm.crew import visits
from farm.crew.crew import Crew
from farm.crew.driven_board import DrivenBoard
from farm.errors import UsageError
from farm.measure.arrays import make_inputs, read_arguments
from farm.points.values import Estimate, Goal, GridPoint, PointMeasurement
from farm.processes.compile_subprocess import compile_in_subprocess
from farm.selection import tie
from farm.selection.decision import Conclusion, Decision
from farm.selection.rounds import LEAST_ROUNDS, Contest
from farm.settings import Settings
from farm.store import Store
from farm.store.trials import KnownCandidate
from farm.sweep import stored
from farm.sweep.fit.analysis import Analysis
from farm.sweep.fit.pareto import FrontCandidate, find_front
from farm.sweep.fit.pick import pick_point
from farm.sweep.plan.conductor import Series
from farm.sweep.run.programs import TUNED, SweepProgram, SweepRecipe, require_equal_outputs
from farm.sweep.run.retrials import RULE, Retrials, Rival, TriedWorkload, build_checks, build_rivals
from farm.values import DEFAULT_POINT, Record

# Workloads beyond this share of the model's time are left out.
_SHARE = 0.95


def choose_points(analysis: Analysis, goal: Goal) -> tuple[str, ...]:
    """Return the points for other schedules: the pick and both ends of the front."""
    if not analysis.measured:
        return ()
    combined = analysis.combine()
    candidates = [FrontCandidate(key, p.latency, p.energy or p.latency) for key, p in combined.items()]
    front = [point.key for point in find_front(candidates) if point.on_front]
    picked = pick_point(analysis, goal)
    keys = ([picked.best.point.key] if picked.best else []) + [front[0], front[-1]]
    return tuple(dict.fromkeys(keys))


def choose_candidates(known: Sequence[KnownCandidate], recorded: str, top_k: int) -> list[KnownCandidate]:
    """Return the record's candidate and the fastest others, `top_k` in all; none where there is no choice."""
    good = sorted((each for each in known if each.median_s), key=lambda each: each.median_s or 0.0)
    first = [each for each in good if each.candidate == recorded]
    others = [each for each in good if each.candidate != recorded]
    return [*first, *others[: top_k - 1]] if first and others and top_k > 1 else []


def choose_workloads(times_s: Mapping[str, float]) -> set[str]:
    """Return those that make up most of the model's time. `times_s` is each one's, as often as it occurs."""
    whole, sofar, chosen = sum(times_s.values()), 0.0, set()
    for name, time_s in sorted(times_s.items(), key=lambda item: -item[1]):
        if sofar >= _SHARE * whole:
            break
        chosen.add(name)
        sofar += time_s
    return chosen


# Visits of the model with the old and with the new schedules, in turns.
_MODEL_VISITS = 2


@dataclasses.dataclass(frozen=True)
class Bench:
    """What is needed at every point: boards, programs, settings of the measurement."""

    crew: Crew
    recipe: SweepRecipe
    settings: Settings
    store: Store
    sweep: int
    threads: int
    window: visits.Window
    needs_total: bool
    say: Callable[[str], None]

    @property
    def board(self) -> DrivenBoard:
        """The board that checks and runs the model."""
        return self.crew.boards[0]

    def fetch_records(self, point: str) -> dict[str, Record]:
        """Return the records of a point, by workload."""
        kind, simulated = self.recipe.board_type.name, self.recipe.simulated
        found = self.store.records.fetch(board_type=kind, operating_point=point, simulated=simulated)
        return {record.workload: record for record in found}

    def plan_spec(self, rival: Rival) -> MeasureSpec:
        """Plan how a schedule is timed, like a campaign's finalist."""
        settings = self.settings
        return MeasureSpec(
            arguments=read_arguments(rival.trace_json),
            number=settings.measure_number,
            repeat=settings.measure_repeat,
            min_repeat_s=settings.measure_min_repeat_s,
            cold_weights=True,
            seed=settings.seed,
            limits=Limits(settings.measure_timeout_s, settings.measure_memory_bytes, threads=self.threads),
        )

    def find_candidates(self, records: Sequence[Record], top_k: int) -> dict[str, list[KnownCandidate]]:
        """Return the candidate schedules by workload, from the store's data of the default point."""
        kind, simulated = self.recipe.board_type.name, self.recipe.simulated
        found = {
            record.workload: choose_candidates(
                self.store.trials.fetch_known_candidates(record.workload, kind, DEFAULT_POINT, simulated),
                record.candidate,
                top_k,
            )
            for record in records
        }
        return {workload: rows for workload, rows in found.items() if rows}


def refit(bench: Bench, tuned: SweepProgram, points: Sequence[GridPoint], top_k: int) -> list[dict[str, Any]]:
    """Retry schedules at each of the points; return a document for each. Writes records where they differ.

    Raises what the board's calls raise.
    """
    chosen = bench.find_candidates(bench.recipe.records, top_k)
    if not chosen:
        bench.say("--top-k: the store knows no second schedule of any workload, so there is nothing to choose from")
        return []
    for point in points:  # the incumbent there takes part
        for workload, record in bench.fetch_records(point.key).items():
            known = chosen.get(workload)
            if known and all(each.candidate != record.candidate for each in known):
                chosen[workload] = [*known, KnownCandidate(record.candidate, record.trace_json, None, record.median_s)]
    bench.say(f"compiling up to {top_k} schedules of {len(chosen)} workloads")
    job = functools.partial(build_rivals, bench.recipe, tuned.batch, chosen)
    tried = compile_in_subprocess(job, bench.recipe.source.name, say=bench.say)
    worth = choose_workloads({each.workload.hash: each.workload.weight * each.rivals[0].default_s for each in tried})
    tried = [each for each in tried if each.workload.hash in worth]
    return [_refit_point(bench, tuned, point, tried) for point in points] if tried else []


def _refit_point(bench: Bench, tuned: SweepProgram, point: GridPoint, tried: Sequence[TriedWorkload]) -> dict[str, Any]:
    count = sum(len(each.rivals) for each in tried)
    bench.say(f"{point.key}: {count} schedules, {RULE.looks[0]} to {RULE.looks[-1]} times each")
    retrials = Retrials(bench.crew, tried, point.point, bench.plan_spec, bench.settings.seed, bench.say)
    retrials.play()
    held = bench.fetch_records(point.key)
    found = {
        each.workload.hash: _decide(retrials.contests[each.workload.hash], each, held.get(each.workload.hash))
        for each in tried
    }
    # A record of the point is written only where another candidate than the default point's is best.
    won = [(each, end) for each in tried if (end := found[each.workload.hash]) and _is_to_be_kept(each, end, held)]
    bench.crew.call(bench.board.pin(point.point))
    checked = zip(won, _check(bench, won), strict=True)
    records = [_to_record(bench, *each, point, check) for each, check in checked if check.matches]
    for record in records:
        bench.store.records.save(record)
    kept = {record.workload for record in records}
    lines = [_describe(each, retrials.contests[each.workload.hash], found[each.workload.hash], kept) for each in tried]
    better = sum(line["differs"] for line in lines)
    bench.say(f"{point.key}: {better} of {len(tried)} workloads run better schedules there")
    model = _measure_model(bench, tuned, point, records) if better else None
    if model:
        ratio = model["after"]["latency_s"]["value"] / model["before"]["latency_s"]["value"]
        bench.say(f"{point.key}: with them the model takes {100 * ratio:.1f} % of the time that it took")
    return {"key": point.key, "batch": tuned.batch, "workloads": lines, "model": model}


def _decide(contest: Contest, tried: TriedWorkload, held: Record | None) -> Conclusion | None:
    """Return the winner at a point; None where it could not be decided.

    Without a record the default point's schedule is used, so that is the baseline.
    """
    if contest.judgement is None:
        return None
    return Decision(contest, RULE, tried.rivals[0].candidate, held).conclude(contest.judgement)


def _is_to_be_kept(tried: TriedWorkload, end: Conclusion, held: Mapping[str, Record]) -> bool:
    return end.winner != tried.rivals[0].candidate or tried.workload.hash in held


def _check(bench: Bench, won: Sequence[tuple[TriedWorkload, Conclusion]]) -> list[OutputComparison]:
    """Check each winner's output against unscheduled code."""
    if not won:
        return []
    pairs = [(contest.workload.module_json, _find(contest, end.winner).scheduled_json) for contest, end in won]
    job = functools.partial(build_checks, bench.recipe, pairs)
    built = compile_in_subprocess(job, bench.recipe.source.name, say=bench.say)
    return [_compare(bench, contest, *libraries) for (contest, _), libraries in zip(won, built, strict=True)]


def _compare(bench: Bench, contest: TriedWorkload, plain: bytes, scheduled: bytes) -> OutputComparison:
    settings = bench.settings
    limits = Limits(settings.model_timeout_s, settings.model_memory_bytes, threads=bench.threads)
    inputs = make_inputs(contest.workload.arguments, settings.seed)
    outputs = []
    for library in (plain, scheduled):
        spec = RunSpec(Engine.KERNEL, limits=limits)
        outcome, arrays = bench.crew.call(bench.board.run(spec, library, inputs))
        if outcome.status is not Status.OK:
            return OutputComparison(False, float("inf"), float("inf"), f"{outcome.status}: {outcome.message}")
        outputs.append(list(arrays.values()))
    return compare(outputs[1], outputs[0])


def _find(contest: TriedWorkload, candidate: str) -> Rival:
    return next(rival for rival in contest.rivals if rival.candidate == candidate)


def _to_record(
    bench: Bench, tried: TriedWorkload, end: Conclusion, point: GridPoint, check: OutputComparison
) -> Record:
    return Record(
        workload=tried.workload.hash,
        workload_name=tried.workload.name,
        board_type=bench.recipe.board_type.name,
        operating_point=point.key,
        pipeline=tried.workload.pipeline,
        candidate=end.winner,
        median_s=end.median_s,
        flop=tried.workload.flop,
        max_abs_error=check.max_abs_error,
        max_rel_error=check.max_rel_error,
        simulated=bench.recipe.simulated,
        trace_json=_find(tried, end.winner).trace_json,
        evidence={"sweep": bench.sweep, **end.evidence, "settled": sorted({end.winner, *end.rivals})},
    )


def _describe(tried: TriedWorkload, contest: Contest, end: Conclusion | None, kept: Collection[str]) -> dict[str, Any]:
    """Compare a workload's best schedule at the point with the default point's."""
    default = tried.rivals[0].candidate
    known: dict[str, Any] = {
        "workload": tried.workload.hash,
        "name": tried.workload.name,
        "weight": tried.workload.weight,
        "schedules": len(tried.rivals),
    }
    both = [] if end is None else tie.complete(contest.rounds, {default, end.winner})
    if end is None or len(both) < LEAST_ROUNDS:
        return known | {"differs": False, "note": "not measured"}
    ratio, low, high = 1.0, 1.0, 1.0
    if end.winner != default:
        (found,) = tie.compare(contest.rounds, default, (end.winner,), RULE)
        ratio, low, high = found.value, found.low, found.high
    default_s, best_s = (statistics.median(each.latency_s[name] for each in both) for name in (default, end.winner))
    differs = end.winner != default
    return known | {
        "default": default,
        "best": end.winner,
        "default_s": default_s,
        "best_s": best_s,
        "ratio": ratio,
        "low": low,
        "high": high,
        "differs": differs and tried.workload.hash in kept,
        "note": "computes something else" if differs and tried.workload.hash not in kept else "",
    }


def _measure_model(bench: Bench, tuned: SweepProgram, point: GridPoint, records: Sequence[Record]) -> dict[str, Any]:
    """Time the model with the default point's schedules and with the point's own, in turns."""
    own = {record.workload: record for record in records}
    merged = [own.get(record.workload, record) for record in bench.recipe.records]
    recipe = dataclasses.replace(
        bench.recipe, candidates=dataclasses.replace(bench.recipe.candidates, records=tuple(merged), relatives=())
    )
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
    return bench.crew.call(bench.board.run(spec, program.library, program.inputs))


def _mean_visits(found: Sequence[PointMeasurement]) -> dict[str, Any]:
    """Average one program's visits; the interval is the widest one, or covers their differences."""
    energies = [visit.energy for visit in found if visit.energy]
    return {
        "latency_s": stored.estimate_to_dict(_join([visit.latency for visit in found])),
        "energy_j": stored.estimate_to_dict(_join(energies)) if len(energies) == len(found) else None,
    }


def _join(estimates: Sequence[Estimate]) -> Estimate:
    low, high = (pick(getattr(e, end) for e in estimates) for pick, end in ((min, "low"), (max, "high")))
    return Estimate(statistics.fmean(e.value for e in estimates), low, high)
