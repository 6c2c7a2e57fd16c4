"""Decide which workload gets the next trials. Pure: state in, decision out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

# Alpha and beta of Ansor's task scheduler (Zheng et al., OSDI 2020, section 6): weights of the two estimates of a
# workload's next gain, and the share of its operator family's best speed that it should reach.
_ALPHA, _BETA = 0.2, 2.0
# Rounds over which the recent gain is averaged. With Ansor's three, half of a small budget went to whichever workload
# had started worst.
_WINDOW = 1

# A workload below this share of the model's FLOP starts with one trial: its first schedule is usually its last.
_LIGHT_SHARE = 0.002


@dataclasses.dataclass(eq=False)
class WorkloadState:
    """The search state of one workload. `asked` counts every trial requested, finished or not.

    `rounds_s` holds the best latency (s) after each finished round, oldest first; empty before the first good trial.
    `weight` is calls per inference.
    """

    kind: str
    weight: float
    flop: float
    asked: int = 0
    rounds_s: tuple[float, ...] = ()
    exhausted: bool = False


@dataclasses.dataclass(frozen=True)
class PrioritySettings:
    """Every workload gets one trial first. Then `warmup` go to each that matters, where there are enough, before gains
    are compared; at most `batch` at a time after that, and `most` in all.
    """

    warmup: int = 4
    batch: int = 8
    most: int = 10**9


def decide_next(states: Sequence[WorkloadState], remaining: int, settings: PrioritySettings) -> tuple[int, int] | None:
    """Return the index of the next workload and its number of trials; None where nothing is left to do."""
    open_ = [i for i, state in enumerate(states) if not state.exhausted and state.asked < settings.most]
    if remaining <= 0 or not open_:
        return None
    heaviness = [state.flop * state.weight for state in states]
    # A workload without a trial leaves every total of its models open.
    if fresh := [i for i in open_ if states[i].asked == 0]:
        return max(fresh, key=lambda i: heaviness[i]), 1
    light = _LIGHT_SHARE * sum(heaviness)
    young = [i for i in open_ if states[i].asked < settings.warmup and heaviness[i] >= light]
    if young and remaining >= 2 * settings.warmup * len(young):
        chosen = max(young, key=lambda i: heaviness[i])
        return chosen, min(settings.warmup, settings.most) - states[chosen].asked
    # Too few for a warm-up of all: all compete from the first trial on. A workload with few trials gets few, so that
    # one bad first schedule does not take the rest.
    speeds: dict[str, float] = {}
    for state in states:
        if state.rounds_s and state.flop > 0:
            speeds[state.kind] = max(state.flop / state.rounds_s[-1], speeds.get(state.kind, 0.0))
    gains = {i: _expected_gain(states[i], speeds.get(states[i].kind)) for i in open_}
    best = max(open_, key=lambda i: gains[i])
    return best, min(remaining, settings.batch, max(1, states[best].asked), settings.most - states[best].asked)


def _expected_gain(state: WorkloadState, speed: float | None) -> float:
    """Estimate the seconds of model latency that one more round saves; `speed` is the best of its kind (FLOP/s)."""
    if not state.rounds_s:
        # Untuned code does about 1e9 operations per second. Without a good trial nothing is known to be lost by
        # waiting; more tries make it less promising.
        return state.weight * state.flop / 1e9 / (1 + state.asked)
    latency = state.rounds_s[-1]
    window = min(_WINDOW, len(state.rounds_s) - 1)
    recent = (state.rounds_s[-1 - window] - latency) / window if window else 0.0
    optimistic = latency / max(1, state.asked)
    if speed and state.flop > 0:
        similar = latency - state.flop / (_BETA * speed)
        optimistic = min(optimistic, similar) if similar > 0 else 0.0
    return state.weight * (_ALPHA * recent + (1 - _ALPHA) * optimistic)
