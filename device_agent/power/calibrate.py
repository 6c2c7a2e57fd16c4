"""Measure how often each sensor refreshes its value, and its step between values.

Data sheets, drivers and device trees disagree about both, so no table is used.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable

import numpy as np

from device_agent.power.sampler import Array, Collector, RailTrace
from device_agent.power.sensors import DEAD, PowerSensors
from device_agent.protocol import SensorInfo

# Fast enough for the 6.6 ms of the chip's power-on setting.
_RATE_HZ = 1000.0
# How often to check for enough changes.
_LOOK_S = 0.25
# Changes of each chip that end the measurement early.
_ENOUGH_CHANGES = 60
# A period needs this share of all intervals (about) as long, and most others whole multiples of it. Shorter intervals
# come from reads during a refresh.
_SUPPORT, _MULTIPLES = 0.3, 0.7
_MIN_INTERVALS = 3
# A period no longer than its uncertainty would explain every interval.
_SHARP = 0.2
_CANDIDATES = 41
# So many changes sharpen a period, if their phases agree by this much (1: all equal).
_PHASES, _IN_PHASE = 256, 0.7
# Sensors' clocks are steady to this fraction of the period.
_JITTER = 0.05
# Fewer distinct values do not show the step.
_MIN_VALUES = 4
# Below one kernel unit (1 mW, 1 mA) a difference is rounding.
_UNIT = 0.9e-3


def measure_sensors(
    sensors: PowerSensors,
    limit_s: float = 2.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[SensorInfo, ...]:
    """Watch every sensor for up to `limit_s`; store the result in `sensors.infos` and return it.

    A sensor whose every read fails is left out, with the reason in its note.
    """
    if not sensors.rails:
        return sensors.infos
    collector = Collector(sensors, _RATE_HZ, clock)
    currents: dict[str, set[float]] = {name: set() for name in sensors.rails}
    end_s, look_s = clock() + limit_s, clock() + _LOOK_S
    while (now_s := clock()) < end_s:
        if now_s >= look_s:
            look_s += _LOOK_S
            chips = group_by_chip(collector.trace().rails).values()
            if all(sum(rail.change_s.size for rail in rails) >= _ENOUGH_CHANGES for rails in chips):
                break
        next_s = min(collector.next_s(), end_s)
        if next_s > now_s:
            sleep(next_s - now_s)
        for name in collector.read():
            if (current_a := sensors.rail(name).read_current_a()) is not None:
                currents[name].add(round(current_a, 6))
    traces = {rail.rail: rail for rail in collector.trace().rails}
    periods = {chip: estimate_period(rails) for chip, rails in group_by_chip(traces.values()).items()}
    # A counter's first read gives no value and no problem.
    bad = [rail for rail in traces.values() if rail.problem and not rail.reads]
    failed = {rail.rail: rail.problem.removeprefix(f"{rail.rail}: ") for rail in bad}
    zero = (rail for rail in traces.values() if rail.reads and not (rail.values_w > 0).any())
    failed |= {rail.rail: DEAD for rail in zero if sensors.is_always_on(rail.rail)}
    sensors.infos = tuple(
        dataclasses.replace(
            info,
            update_period_s=info.update_period_s or periods[traces[info.rail].chip],
            step_w=_find_step(traces[info.rail], currents[info.rail]),
            note=f"no energy: {failed[info.rail]}" if info.rail in failed else info.note,
        )
        if info.rail in traces
        else info
        for info in sensors.infos
    )
    sensors.leave_out(failed)
    return sensors.infos


def estimate_period(rails: Iterable[RailTrace]) -> float | None:
    """The update period in s of rails refreshed together; None if too few values changed.

    Equal consecutive values hide a refresh, so intervals between changes are multiples of the period. The period is the
    smallest interval that enough others equal or are multiples of.
    """
    lengths, doubts, starts = [], [], []
    rails = list(rails)
    for rail in rails:
        times = rail.change_s
        widths = rail.times_s[rail.changed] - rail.since_s[rail.changed]
        lengths.append(np.diff(times))
        doubts.append((widths[1:] + widths[:-1]) / 2)
        starts.append(times[:-1])
    length, doubt, start = (np.concatenate(parts) if parts else np.empty(0) for parts in (lengths, doubts, starts))
    if length.size < _MIN_INTERVALS:
        return None
    for candidate in np.unique(np.quantile(length, np.linspace(0, 1, _CANDIDATES), method="higher")):
        for period in (candidate, candidate / 2, candidate / 3):
            if (found := _explain(period, length, doubt, start)) is not None:
                return _sharpen(found, max((rail.change_s for rail in rails), key=len))
    return None


def _explain(period: float, length: Array, doubt: Array, start: Array) -> float | None:
    """The mean period over the intervals that agree with it; None if too few do."""
    slack = np.minimum(doubt + _JITTER * period, 0.5 * period)
    alike = np.abs(length - period) <= doubt + _JITTER * period
    times = np.maximum(1.0, np.round(length / period))
    agree = (np.abs(length - times * period) <= slack) & (length > 0.5 * period)
    supported = alike.sum() >= _SUPPORT * length.size
    explains = agree.all() and doubt.max() <= _SHARP * period
    # Half a period explains everything that the period does.
    if not (supported or explains) or np.gcd.reduce(times[agree].astype(int)) > 1:
        return None
    if agree.sum() < max(_MIN_INTERVALS, _MULTIPLES * length.size):
        return None
    # Rails of one chip share their intervals: require two distinct times.
    if np.ptp(start[agree]) < 0.5 * period:
        return None
    return float(length[agree].sum() / times[agree].sum())


def _sharpen(period: float, change_s: Array) -> float:
    """Sharpen `period`: changes whole periods apart have one phase over the whole trace."""
    change_s = change_s[:_PHASES] - change_s[0]
    turns = change_s[-1] / period
    offsets = np.arange(-_JITTER * 2, _JITTER * 2, 1 / (8 * turns))
    phases = np.exp(2j * np.pi * np.outer(1 / (period * (1 + offsets)), change_s))
    agreement = np.abs(phases.mean(axis=1))
    best = int(agreement.argmax())
    return float(period * (1 + offsets[best])) if agreement[best] > _IN_PHASE else period


def _find_step(trace: RailTrace, currents_a: set[float]) -> float | None:
    """The smallest difference between values in W; None for too few values.

    A product of voltage and current takes many close values; then the current's step is the true one.
    """
    if trace.values_w.size == 0:
        return None
    step_w = smallest_difference(trace.values_w)
    step_a = smallest_difference(np.array(sorted(currents_a)))
    if step_a is not None and (current_a := np.median(sorted(currents_a))) > 0:
        return max(step_w or 0.0, step_a * float(np.median(trace.values_w)) / float(current_a))
    return step_w


def smallest_difference(values: Array) -> float | None:
    """The smallest difference between neighbouring `values`; None for fewer than four."""
    distinct = np.unique(np.round(values, 6))
    differences = np.diff(distinct)
    differences = differences[differences > _UNIT]
    return float(differences.min()) if differences.size >= _MIN_VALUES - 1 else None


def group_by_chip(rails: Iterable[RailTrace]) -> dict[str, list[RailTrace]]:
    """Return the rails of each chip."""
    chips: dict[str, list[RailTrace]] = {}
    for rail in rails:
        chips.setdefault(rail.chip, []).append(rail)
    return chips
