"""One board's part of a gate: the candidate checked, then timed in turns with the baseline's artifact until it is
decided.

Rounds are the blocks of a comparison (`farm.selection.tie`): what the board does to both alike cancels. It is looked at
after 4, 8 and 16 of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from device_agent.protocol import Engine, Outcome
from farm.artifacts import checking
from farm.artifacts.brought import Brought
from farm.artifacts.manifest import Artifact
from farm.artifacts.on_board import HeldForModels
from farm.artifacts.running import read_energy
from farm.artifacts.timing import Timed, Turns, Variant, ordered
from farm.crew.visits import plan_window
from farm.gate.conditions import Condition, GateVerdict, MetricEstimate, find_worst
from farm.measure.statistics import CONFIDENCE, summarise
from farm.models.inputs import InputSpec, make_inputs
from farm.selection import tie
from farm.settings import Settings

CANDIDATE, BASELINE = "candidate", "baseline"
_WINDOW_S = 2.0
# Of the quantiles' ratio; the same draws for the same samples.
_DRAWS, _SEED = 2000, 7
_RULE = tie.TieRule(confidence=CONFIDENCE)
_QUANTILES = {"p90": 0.9, "p99": 0.99}


@dataclasses.dataclass(frozen=True)
class GateOrder:
    """What is to be decided on a board: an artifact, what it is held against (None: nothing), and what must not be."""

    brought: Brought
    candidate: Artifact
    baseline: Artifact | None
    conditions: Sequence[Condition]


def decide(order: GateOrder, board: HeldForModels, settings: Settings, say: Callable[[str], None]) -> dict[str, Any]:
    """Check and time on a board; returns this board's part of the gate's document.

    Outputs that are wrong fail it without timing. Raises PermanentError where an artifact does not run.
    """
    manifest = order.candidate.manifest
    cases = checking.make_cases(order.brought, manifest, [])
    say(f"{manifest.name} on {board.name}: comparing outputs with ONNX Runtime's")
    verified = checking.verify_artifact(order.candidate, board, order.brought.source, cases)
    document: dict[str, Any] = {
        "model": manifest.name,
        "board": board.name,
        "board_type": board.description.board_type,
        "simulated": board.description.simulated,
        "device": manifest.device,
        "operating_point": board.point,
        "verified": verified.model_dump(mode="json"),
        "verdict": str(GateVerdict.PASS if verified.matches else GateVerdict.FAIL),
        "rounds": 0,
        "threads": 0,
        "clocks": "",
        CANDIDATE: None,
        BASELINE: None,
        "conditions": [],
    }
    if not verified.matches:
        return document
    say(f"{manifest.name} on {board.name}: timing {'in turns with the baseline' if order.baseline else 'it'}")
    timed, judged, rounds = _time(order, board, settings)
    document |= {
        "verdict": str(find_worst([verdict for _, _, verdict in judged])),
        "rounds": rounds,
        "threads": board.limits(manifest.threads).threads,
        "clocks": board.read_clocks(timed.outcomes[CANDIDATE], manifest.device),
        CANDIDATE: _describe(order.candidate, timed, CANDIDATE),
        BASELINE: _describe(order.baseline, timed, BASELINE) if order.baseline else None,
        "conditions": [
            {
                "condition": condition.text,
                "metric": condition.metric,
                "is_change": condition.is_change,
                "limit": condition.limit,
                **(dataclasses.asdict(found) if found else dict.fromkeys(("value", "low", "high"))),
                "verdict": str(verdict),
            }
            for condition, found, verdict in judged
        ],
    }
    return document


Judged = list[tuple[Condition, MetricEstimate | None, GateVerdict]]


def _time(order: GateOrder, board: HeldForModels, settings: Settings) -> tuple[Timed, Judged, int]:
    artifacts = {CANDIDATE: order.candidate} | ({BASELINE: order.baseline} if order.baseline else {})
    variants = [_to_variant(name, artifact, order.brought, settings.seed) for name, artifact in artifacts.items()]
    limits = board.limits(order.candidate.manifest.threads)
    energy = plan_window(board.description, _WINDOW_S).to_energy()
    first = _RULE.looks[0]
    turns = Turns(variants, settings.model_runs, limits, rounds=first, energy=energy)
    done, judged = 0, Judged()
    for look in _RULE.looks if order.baseline else _RULE.looks[:1]:
        for number in range(done, look):
            asked = list(turns.list_round(number))
            # Whoever is second may find the board warmer, or its data nearer: each is so in every other round.
            for variant, spec in asked[:: -1 if number % 2 else 1]:
                turns.take(number, variant, *board.run(spec, variant.program, dict(variant.inputs)))
        done = look
        judged = [_judge(condition, order, turns.timed, board.name) for condition in order.conditions]
        if all(verdict is not GateVerdict.UNDECIDED for _, _, verdict in judged):
            break
    return turns.timed, judged, done


def _to_variant(name: str, artifact: Artifact, brought: Brought, seed: int) -> Variant:
    rows = {each.name: each.rows for each in brought.inputs}
    specs = [InputSpec(each.name, each.shape, each.dtype, rows.get(each.name)) for each in artifact.manifest.inputs]
    inputs, device = ordered(make_inputs(specs, seed)), artifact.manifest.device
    return Variant(name, Engine.RELAX_VM, artifact.read_library(), inputs, True, device)


def _judge(
    condition: Condition, order: GateOrder, timed: Timed, board: str
) -> tuple[Condition, MetricEstimate | None, GateVerdict]:
    found = _find_change(condition.metric, order, timed, board) if condition.is_change else None
    if not condition.is_change:
        found = _find_figure(condition.metric, order.candidate, timed, CANDIDATE)
    # What the board has no sensor for was not seen to be within.
    return condition, found, GateVerdict.UNDECIDED if found is None else condition.judge(found)


def _find_change(metric: str, order: GateOrder, timed: Timed, board: str) -> MetricEstimate | None:
    """How many times the baseline's the candidate's is."""
    if order.baseline is None:
        return None
    if metric == "latency":
        rounds = [tie.Round(number, board, each) for number, each in sorted(timed.rounds.items())]
        [ratio] = tie.compare(rounds, BASELINE, [CANDIDATE], _RULE)
        return MetricEstimate(ratio.value, ratio.low, ratio.high)
    if metric in _QUANTILES:
        return _compare_quantiles(timed.samples[CANDIDATE], timed.samples[BASELINE], _QUANTILES[metric])
    mine = _find_figure(metric, order.candidate, timed, CANDIDATE)
    theirs = _find_figure(metric, order.baseline, timed, BASELINE)
    if mine is None or theirs is None or not theirs.low > 0:
        return None
    # Both intervals at their ends: wider than need be, which leaves open rather than errs.
    return MetricEstimate(mine.value / theirs.value, mine.low / theirs.high, mine.high / theirs.low)


def _find_figure(metric: str, artifact: Artifact, timed: Timed, name: str) -> MetricEstimate | None:
    if metric == "latency":
        summary = summarise(timed.samples[name])
        return MetricEstimate(summary.median, summary.ci_low, summary.ci_high)
    if metric in _QUANTILES:
        draws = _draw_quantiles(timed.samples[name], _QUANTILES[metric])
        value = float(np.quantile(timed.samples[name], _QUANTILES[metric]))
        return _to_estimate(value, draws)
    if metric == "energy":
        return _read_energy(timed.outcomes[name])
    size = artifact.manifest.memory_bytes if metric == "memory" else artifact.manifest.library.bytes
    return MetricEstimate(float(size), float(size), float(size))


def _read_energy(outcome: Outcome) -> MetricEstimate | None:
    energy = outcome.energy
    if energy is None or energy.per_call_j is None or energy.per_call_ci_j is None:
        return None
    return MetricEstimate(energy.per_call_j, *energy.per_call_ci_j)


def _draw_quantiles(samples: Sequence[float], quantile: float) -> np.ndarray[Any, Any]:
    """The quantile of resamples: the percentile bootstrap (Efron 1979, Annals of Statistics 7)."""
    values = np.asarray(samples)
    drawn = np.random.default_rng(_SEED).integers(0, len(values), (_DRAWS, len(values)))
    return np.asarray(np.quantile(values[drawn], quantile, axis=1))


def _compare_quantiles(mine: Sequence[float], theirs: Sequence[float], quantile: float) -> MetricEstimate:
    value = float(np.quantile(mine, quantile) / np.quantile(theirs, quantile))
    # The draws are the same for both: shuffled, so that they do not move together.
    others = np.random.default_rng(_SEED + 1).permutation(_draw_quantiles(theirs, quantile))
    return _to_estimate(value, _draw_quantiles(mine, quantile) / others)


def _to_estimate(value: float, draws: np.ndarray[Any, Any]) -> MetricEstimate:
    tail = (1 - CONFIDENCE) / 2
    low, high = (float(each) for each in np.quantile(draws, (tail, 1 - tail)))
    return MetricEstimate(value, min(low, value), max(high, value))


def _describe(artifact: Artifact, timed: Timed, name: str) -> Mapping[str, Any]:
    energy_j, power_w = read_energy(timed.outcomes[name])
    return {
        "artifact": str(artifact.folder),
        "library_sha256": artifact.manifest.library.sha256,
        "bytes": artifact.manifest.library.bytes,
        "memory_bytes": artifact.manifest.memory_bytes,
        "latency_s": dataclasses.asdict(summarise(timed.samples[name])),
        "energy_j": energy_j,
        "power_w": power_w,
        "first_s": timed.describe_details(name)["first_s"],
        "peak_memory_bytes": timed.describe_details(name)["peak_memory_bytes"],
    }
