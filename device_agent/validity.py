"""Whether a measurement may be believed: pure rules over an outcome's own evidence.

A rule that finds fault turns `ok` into `throttled`, `clock_drifted` or `noisy`, in this order, and says why; the
samples stay. Waiting for good conditions before a measurement is in `start.py`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping

from device_agent.protocol import Evidence, Outcome, Status
from device_agent.protocol.texts import format_hz

# A pinned clock reads back within this: the TX2's scaling_cur_freq is a 20 us measurement that jitters by 1 %.
CLOCK_TOLERANCE = 0.03
# Shorter windows say nothing about other load: the kernel counts CPU time in ticks of 10 ms.
MIN_LOAD_WINDOW_S = 0.2


def judge(outcome: Outcome, pinned_hz: Mapping[int, int], max_spread: float | None) -> Outcome:
    """The outcome as it may be believed. `pinned_hz` maps the cores held at a clock to it in Hz; empty: none held."""
    if outcome.status is not Status.OK or outcome.before is None or outcome.after is None:
        return outcome
    rules = (
        (Status.THROTTLED, find_throttling(outcome.before, outcome.after)),
        (Status.CLOCK_DRIFTED, find_drift(outcome.before, outcome.after, pinned_hz)),
        (Status.NOISY, find_noise(outcome.latency_s, max_spread)),
    )
    for status, why in rules:
        if why:
            return dataclasses.replace(outcome, status=status, message=why)
    return outcome


def find_throttling(before: Evidence, after: Evidence) -> str:
    """Which cooling device slowed the board, or which over-current alarm was raised meanwhile; "" for none."""
    for evidence, when in ((before, "before"), (after, "after")):
        active = {name: state for name, state in evidence.cooling.items() if state > 0}
        if active:
            hottest = max(evidence.temperature_c.items(), key=lambda item: item[1], default=None)
            heat = f"; hottest zone {hottest[0]} at {hottest[1]:g} C" if hottest else ""
            return f"the board slowed itself down: {_list(active)} active {when} the measurement{heat}"
    raised = {name: value for name, value in after.alarms.items() if value > before.alarms.get(name, 0)}
    if raised:
        return f"over-current or under-voltage alarm during the measurement: {_list(raised)}"
    return ""


def find_drift(before: Evidence, after: Evidence, pinned_hz: Mapping[int, int]) -> str:
    """Which clock was not where it was held, or which limit somebody moved meanwhile; "" for none."""
    for evidence, when in ((before, "before"), (after, "after")):
        for cpu, wanted in pinned_hz.items():
            measured = evidence.cpu_freq_hz.get(str(cpu))
            # An idle core may read 0 where the clock is measured; an offline one has no file.
            if measured and abs(measured - wanted) > CLOCK_TOLERANCE * wanted:
                return (
                    f"cpu{cpu} ran at {format_hz(measured)} {when} the measurement; it is held at {format_hz(wanted)}"
                )
    for core, limit in before.cpu_max_hz.items():
        if after.cpu_max_hz.get(core, limit) != limit:
            moved = f"from {format_hz(limit)} to {format_hz(after.cpu_max_hz[core])}"
            return f"the upper limit of cpu{core} went {moved} during the measurement"
    for name, first, last in (
        ("GPU", before.gpu_freq_hz, after.gpu_freq_hz),
        ("memory", before.memory_freq_hz, after.memory_freq_hz),
    ):
        if pinned_hz and first and last and abs(first - last) > CLOCK_TOLERANCE * first:
            return f"the {name} clock went from {format_hz(first)} to {format_hz(last)} during the measurement"
    return ""


def find_noise(latency_s: tuple[float, ...], max_spread: float | None) -> str:
    """Whether samples spread further than allowed; "" if not, or with fewer than 3."""
    if max_spread is None or len(latency_s) < 3:
        return ""
    first, median, third = statistics.quantiles(latency_s, n=4, method="inclusive")
    spread = (third - first) / median
    if spread <= max_spread:
        return ""
    return f"samples spread by {spread:.1%} of their median (interquartile range); {max_spread:.1%} is allowed"


def other_load(before: Evidence, after: Evidence, window_s: float, own_cpu_s: float) -> float | None:
    """Cores' worth of CPU time that other processes used in the window; None where it cannot be told."""
    if before.busy_s is None or after.busy_s is None or window_s < MIN_LOAD_WINDOW_S:
        return None
    return max(0.0, (after.busy_s - before.busy_s - own_cpu_s) / window_s)


def _list(states: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in states.items())
