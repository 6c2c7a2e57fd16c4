"""Decide which workload gets the next trials. Pure: state in, decision out; running them is the engine's business."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

# Weights of the two guesses about a workload's next gain, and how much of its operator family's best speed it is
# expected to reach: alpha and beta of Ansor's task scheduler (Zheng et al., OSDI 2020, section 6).
_ALPHA, _BETA = 0.2, 2.0
# Rounds over which the recent gain is averaged. One lucky round early on must not hold the scheduler for long: with
# Ansor's three, half of a small budget went to whichever workload had started worst.
_WINDOW = 1

# A workload below this share of the model's FLOP starts with one trial: its first schedule is usually its last.
_LIGHT_SHARE = 0.002


@dataclasses.dataclass(frozen=True)
class WorkloadState:
    """What is known of one workload. `asked` counts every trial given to it, finished or not.

    `best_s` holds the best latency so far (seconds) after each finished round, oldest first; empty before the first
    good trial. `weight` is calls per inference.
    """

    kind: str
    weight: float
    flop: float
    asked: int = 0
    best_s: tuple[float, ...] = ()
    exhausted: bool = False


@dataclasses.dataclass(frozen=True)
class PrioritySettings:
    """Every workload gets one trial first. `warmup` are given to each that matters before gains are compared, where
    there are enough of them; at most `batch` at a time after that.
    """

    warmup: int = 4
    batch: int = 8


def decide_next(states: Sequence[WorkloadState], remaining: int, settings: PrioritySettings) -> tuple[int, int] | None:
    """The index of the workload to search next and how many trials to give it, or None where nothing is left to do."""
    open_ = [i for i, state in enumerate(states) if not state.exhausted]
    if remaining <= 0 or not open_:
        return None
    heaviness = [state.flop * state.weight for state in states]
    # What has no trial is in no model's total, whatever else is known of the model.
    if fresh := [i for i in open_ if states[i].asked == 0]:
        return max(fresh, key=lambda i: heaviness[i]), 1
    light = _LIGHT_SHARE * sum(heaviness)
    young = [i for i in open_ if states[i].asked < settings.warmup and heaviness[i] >= light]
    if young and remaining >= 2 * settings.warmup * len(young):
        chosen = max(young, key=lambda i: heaviness[i])
        return chosen, settings.warmup - states[chosen].asked
    # Too few for a warm-up of all: from the first trial on all compete. Who had few gets few, so that one bad first
    # schedule does not take what is left.
    speeds: dict[str, float] = {}
    for state in states:
        if state.best_s and state.flop > 0:
            speeds[state.kind] = max(state.flop / state.best_s[-1], speeds.get(state.kind, 0.0))
    gains = {i: _expected_gain(states[i], speeds.get(states[i].kind)) for i in open_}
    best = max(open_, key=lambda i: gains[i])
    return best, min(remaining, settings.batch, max(1, states[best].asked))


def _expected_gain(state: WorkloadState, speed: float | None) -> float:
    """Seconds of model latency that one more round is expected to save; `speed` is the best of its kind (FLOP/s)."""
    if not state.best_s:
        # Untuned code does about 1e9 operations in a second. Nothing has worked yet, so nothing is known to be lost by
        # waiting; more tries make it less promising.
        return state.weight * state.flop / 1e9 / (1 + state.asked)
    latency = state.best_s[-1]
    window = min(_WINDOW, len(state.best_s) - 1)
    recent = (state.best_s[-1 - window] - latency) / window if window else 0.0
    optimistic = latency / max(1, state.asked)
    if speed and state.flop > 0:
        similar = latency - state.flop / (_BETA * speed)
        optimistic = min(optimistic, similar) if similar > 0 else 0.0
    return state.weight * (_ALPHA * recent + (1 - _ALPHA) * optimistic)
