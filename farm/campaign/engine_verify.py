"""Turn winners into records: run the best candidate of each workload on the board and check what it computes.

A schedule that computes something else is a candidate's fault; the next best one is tried then.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from device_agent.protocol import Outcome, Status
from farm.artifacts.verify import Comparison, compare
from farm.campaign.engine_parts import Parts
from farm.campaign.running import winner_check
from farm.campaign.running.winner_task import FAR_SLOWER
from farm.errors import InternalError, PermanentError
from farm.search.build_pool import BuildResult
from farm.store import Store
from farm.values import DEFAULT_POINT, WINNER_TRIAL, Record, Trial

_log = logging.getLogger(__name__)

# How many candidates of a workload are tried before it is left without a new record.
_TRIES = 3
# A candidate and untuned code are run in so many turns of so many runs each. With so little a difference of a tenth is
# none.
_TURNS, _RUNS = 3, 5
_SLOWER = 1.1


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What came of one campaign's winners. `rejected` counts candidates whose output was wrong, `slower` workloads that
    keep untuned code because the best candidate is slower.
    """

    records: int
    unchanged: int
    rejected: int
    slower: int = 0


def verify_winners(
    parts: Parts,
    store: Store,
    campaign: int,
    board_type: str,
    workloads: Sequence[Any],
    note: Callable[[str], None],
) -> Verdict:
    """Check the best known candidate of every workload and write the records that are new or better."""
    simulated = bool(parts.connect()["simulated"])
    records = {
        record.workload: record
        for record in store.fetch_records(
            workloads=[w.hash for w in workloads],
            board_type=board_type,
            operating_point=DEFAULT_POINT,
            simulated=simulated,
        )
    }
    written = unchanged = rejected = slower = 0
    pending = list(workloads)
    for _ in range(_TRIES):
        winners = []
        for workload in pending:
            best = _find_best(store, workload, board_type, simulated)
            record = records.get(workload.hash)
            if best is None:
                continue
            if record is not None and record.median_s <= best["median_s"]:
                unchanged += 1
            else:
                winners.append((workload, best))
        if not winners:
            break
        note(f"checking the output of {len(winners)} winners against unscheduled code on the board")
        pending = []
        for (workload, row), (verdict, loses) in zip(winners, _check_all(parts, winners), strict=True):
            if loses:
                slower += 1
                note(f"{workload.name}: its best candidate is slower than untuned code, which stays")
            elif verdict.matches:
                written += store.save_record(_record(workload, row, board_type, simulated, verdict))
            else:
                rejected += 1
                _log.warning("%s: candidate %s is wrong: %s", workload.name, row["candidate"], verdict.reason)
                # From now on the candidate counts as a failed one, so the next round finds the next best.
                store.add_trial(_wrong(campaign, workload, row, simulated, verdict))
                pending.append(workload)
    return Verdict(written, unchanged, rejected, slower)


def _find_best(store: Store, workload: Any, board_type: str, simulated: bool) -> dict[str, Any] | None:
    rows = store.fetch_known_candidates(workload.hash, board_type, DEFAULT_POINT, simulated)
    return min(
        (row for row in rows if row["median_s"] is not None), key=lambda row: float(row["median_s"]), default=None
    )


def _check_all(parts: Parts, winners: Sequence[tuple[Any, dict[str, Any]]]) -> Iterator[tuple[Comparison, bool]]:
    """A verdict per winner, in order, and whether untuned code beats it. All are built together, so that every compiler
    has work.
    """
    programs: list[tuple[str, bool]] = []
    places: list[tuple[int, int] | str] = []
    for workload, row in winners:
        try:
            scheduled = parts.replay(workload.hash, row["trace_json"])
        except InternalError as error:
            places.append(f"its trace cannot be replayed: {error.message}")
            continue
        places.append((len(programs), len(programs) + 1))
        programs += [(workload.module_json, True), (scheduled, True)]
    built = parts.build_all(programs, parts.target())
    for (workload, row), place in zip(winners, places, strict=True):
        if isinstance(place, str):
            yield Comparison(False, float("inf"), float("inf"), place), False
            continue
        verdict, untuned_s = _check(parts, workload, built[place[0]], built[place[1]])
        # One cold run of untuned code that took far longer says enough.
        doubtful = verdict.matches and untuned_s < FAR_SLOWER * row["median_s"]
        yield verdict, doubtful and _loses(parts, workload, row["median_s"], built[place[1]])


def _loses(parts: Parts, workload: Any, median_s: float, candidate: BuildResult) -> bool:
    """Whether code without a record is faster than a candidate, in its trial and beside it.

    Both count, since a candidate that wants its weights packed packs them here in each run.
    """
    try:
        module_json = parts.replay(workload.hash, "")
    except InternalError:  # it is among the candidates
        return False
    [untuned] = parts.build_all([(module_json, True)], parts.target())
    if untuned.library is None or candidate.library is None:
        return False
    inputs = winner_check.make_inputs(workload.arguments, parts.settings.seed)
    spec = dataclasses.replace(winner_check.to_run_spec(parts.settings), runs=_RUNS, warmup=1, return_outputs=False)
    latencies: list[list[float]] = [[], []]
    for _ in range(_TURNS):
        for taken, library in zip(latencies, (untuned.library, candidate.library), strict=True):
            outcome, _ = parts.run(spec, library, inputs)
            if outcome.status is not Status.OK:
                return False
            taken += outcome.latency_s
    untuned_s, tuned_s = (statistics.median(taken) for taken in latencies)
    return min(tuned_s, median_s) > _SLOWER * untuned_s


def _check(parts: Parts, workload: Any, reference: BuildResult, candidate: BuildResult) -> tuple[Comparison, float]:
    """Run both on the same inputs; with the verdict, how long the reference took (s).

    Raises PermanentError where it is the reference that fails.
    """
    spec = winner_check.to_run_spec(parts.settings)
    inputs = winner_check.make_inputs(workload.arguments, parts.settings.seed)
    results: list[list[Any]] = []
    reference_s = 0.0
    for what, program in (("reference", reference), ("candidate", candidate)):
        status, message = program.status, program.message
        if program.library is not None:
            outcome, outputs = parts.run(spec, program.library, inputs)
            status, message = outcome.status, outcome.message
        if status is Status.OK:
            results.append(list(outputs.values()))
            reference_s = reference_s or statistics.median(outcome.latency_s)
        elif what == "reference":
            raise PermanentError(f"the reference code of {workload.name} does not run: {status} {message}")
        else:
            return Comparison(False, float("inf"), float("inf"), f"{status}: {message}"), reference_s
    return compare(results[1], results[0]), reference_s


def _record(workload: Any, row: dict[str, Any], board_type: str, simulated: bool, verdict: Comparison) -> Record:
    return Record(
        workload=workload.hash,
        workload_name=workload.name,
        board_type=board_type,
        operating_point=DEFAULT_POINT,
        pipeline=workload.pipeline,
        candidate=row["candidate"],
        median_s=row["median_s"],
        flop=workload.flop,
        max_abs_error=verdict.max_abs_error,
        max_rel_error=verdict.max_rel_error,
        simulated=simulated,
        trace_json=row["trace_json"],
    )


def _wrong(campaign: int, workload: Any, row: dict[str, Any], simulated: bool, verdict: Comparison) -> Trial:
    return Trial(
        campaign=campaign,
        workload=workload.hash,
        candidate=row["candidate"],
        operating_point=DEFAULT_POINT,
        attempt=1,
        outcome=Outcome(Status.WRONG_RESULT, verdict.reason, simulated=simulated),
        trace_json=row["trace_json"],
        purpose=WINNER_TRIAL,
    )
