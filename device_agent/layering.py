"""What each function of a model takes: TVM's virtual machine tells before and after each call.

A run that is watched takes longer, between its calls; what the calls themselves take is nearly what it is otherwise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from device_agent.protocol import Layer

# Runs that are watched, of a program that runs so often; the median of each function's sums is told.
_RUNS = 5
# No model has more functions; a name is shown to people.
_MOST, _MOST_NAME = 2000, 200
# What the machine itself calls: shapes checked, memory handed out.
_OWN = ("vm.",)

# By function in the order of first calls: calls in one inference, and what they take together, in s or in whatever.
Profile = Mapping[str, tuple[int, float]]


def profile(machine: Any, run: Callable[[], Any], runs: int = _RUNS) -> Profile:
    """Watch `machine` while `run` runs it, no more often than `runs`."""
    began: list[float] = []
    sums: list[dict[str, tuple[int, float]]] = []

    def watch(_function: Any, name: str, before_run: bool, *_: Any) -> None:
        now = time.perf_counter()
        if before_run:
            began.append(time.perf_counter())
            return
        took = now - began.pop()
        if not began and not name.startswith(_OWN):  # what it calls in turn is its own
            calls, before = sums[-1].get(name, (0, 0.0))
            sums[-1][name] = calls + 1, before + took

    machine.set_instrument(watch)
    for _ in range(min(_RUNS, runs)):
        sums.append({})
        run()
    return {
        name: (calls, statistics.median(each[name][1] for each in sums if name in each))
        for name, (calls, _) in sums[-1].items()
    }


def to_layers(found: Profile, latency_s: float, host_s: float) -> tuple[Layer, ...]:
    """A profile as it is told: what took `host_s` here takes the board `latency_s`."""
    scale = latency_s / host_s if host_s > 0 else 1.0
    rows: Sequence[tuple[str, tuple[int, float]]] = list(found.items())[:_MOST]
    return tuple(Layer(name[:_MOST_NAME], calls, took * scale) for name, (calls, took) in rows)
