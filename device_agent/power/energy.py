"""Energy from samples, with intervals that cover what the sensor cannot see.

A sensor's value is taken as the mean of, or one sample from, the update period before it was refreshed; which of both
no driver says. Intervals cover quantisation, that delay, variation between updates and missed updates, not the chip's
and the shunt's own calibration (about 1 %), nor a sensor that samples in step with a load that repeats.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from device_agent.power.calibrate import estimate_period, group_by_chip, smallest_difference
from device_agent.power.sampler import Array, RailTrace, Trace
from device_agent.power.sensors import DEAD, PowerSensors
from device_agent.protocol import Energy, EnergySpec, PowerWindow, RailPower, SensorInfo

# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom.
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
# Batches longer than one update tell slow beats between sensor and load; fewer batches than this say too little.
_BATCH_SIZES, _MIN_BATCHES = (2, 4, 8), 16


Mask = NDArray[np.bool_]
# A longer pause, in periods, means that updates were missed.
_LONG = 1.5
# Drivers cut the product of voltage and current to whole mW.
_UNIT_W = 1e-3
# For a sensor of unknown step: the largest of the known boards at 5 V (AGX Orin, 2 mOhm).
_UNKNOWN_STEP_W = 0.1
# Fewer updates do not show the variation: the interval is then at least half the value.
MIN_UPDATES = 3
_FEW = 0.5
# A window loses the updates at its two edges.
_EDGE_UPDATES = 2
# A sensor that fails more often is not trusted in between either.
_BAD_SHARE = 0.25
# Prefix of the note on a rail that failed during the window.
_GONE = "answered"


def t_95(degrees: int) -> float:
    """Two-sided 95 % quantile of Student's t; `degrees` of freedom >= 1. Accurate to 0.5 %."""
    return _T_95[degrees - 1] if degrees <= len(_T_95) else 1.96 + 2.6 / degrees


def scatter(values: Array) -> float:
    """Standard deviation of one value around the local level, for two or more `values` in order of time.

    From differences of neighbours (von Neumann), so that a slow change does not count; and the same over batches, so
    that correlated neighbours do not hide variation.
    """
    worst = float(np.mean(np.diff(values) ** 2)) / 2
    for size in _BATCH_SIZES:
        batches = values.size // size
        if batches < _MIN_BATCHES:
            break
        means = values[: batches * size].reshape(batches, size).mean(axis=1)
        worst = max(worst, size * float(np.mean(np.diff(means) ** 2)) / 2)
    return math.sqrt(worst)


def half_width_95(values: Array) -> float:
    """Half the 95 % interval from one value's scatter, by Student's t for that many `values` (two or more)."""
    # Differences share values: two thirds of the usual degrees of freedom (von Neumann's estimator).
    return t_95(max(1, 2 * (values.size - 1) // 3)) * scatter(values)


@dataclasses.dataclass(frozen=True)
class Series:
    """A rail's updates: `values_w[i]` stands for the `period_s` before `ends_s[i]`."""

    ends_s: Array
    values_w: Array
    period_s: float

    @property
    def centres_s(self) -> Array:
        return self.ends_s - self.period_s / 2


def reconstruct(rail: RailTrace, period_s: float, alive: bool) -> Series:
    """Reconstruct the updates behind a trace: those that changed the value, and those that did not.

    A chip without any change contributes one value only: it may be stale.
    """
    new = rail.changed.copy()
    new[0] = True
    times, values = rail.times_s[new], rail.values_w[new]
    # A read sees an update late, by up to the reads' spacing.
    seen_late_s = np.where(rail.changed[new], times - rail.since_s[new], period_s)
    ends = times - np.minimum(seen_late_s, period_s) / 2
    if not alive:
        return Series(ends, values, period_s)
    # If reads are sparser than updates, each read is an update.
    spacing_s = max(period_s, rail.spacing_s)
    last_s = max(float(rail.times_s[-1]), float(ends[-1]))
    gaps = np.diff(np.append(ends, last_s))
    times_seen = np.maximum(1, np.round(gaps / spacing_s).astype(int))
    times_seen[-1] = 1 + int(gaps[-1] / spacing_s)
    step = gaps / times_seen
    step[-1] = spacing_s
    index = np.repeat(np.arange(ends.size), times_seen)
    nth = np.arange(index.size) - np.repeat(np.cumsum(times_seen) - times_seen, times_seen)
    all_ends = ends[index] + nth * step[index]
    keep = np.ones(all_ends.size, dtype=bool)
    holes = np.flatnonzero(rail.times_s - rail.since_s > _LONG * spacing_s)
    for hole in holes:  # without reads the updates are unknown
        keep &= ~((nth > 0) & (all_ends > rail.since_s[hole]) & (all_ends < rail.times_s[hole] - spacing_s))
    return Series(all_ends[keep], values[index][keep], period_s)


def estimate(series: Series, inside: Mask, low_s: float, high_s: float) -> tuple[float, float]:
    """The integral in J between two times, and half its 95 % interval without quantisation.

    Uses updates inside the window, the first and last extended to its edges. Updates across an edge belong partly to
    the outside; they bound the error at the edge.
    """
    length_s = high_s - low_s
    if not inside.any():
        points = np.unique(np.concatenate([[low_s, high_s], np.clip(series.centres_s, low_s, high_s)]))
        levels = np.interp(points, series.centres_s, series.values_w)
        near = (series.ends_s > low_s) & (series.ends_s - series.period_s < high_s)
        seen = series.values_w[near] if near.any() else levels
        return float(np.trapezoid(levels, points)), float(np.ptp(seen)) * length_s
    centres, values = series.centres_s[inside], series.values_w[inside]
    energy_j = float(
        np.trapezoid(values, centres) + values[0] * (centres[0] - low_s) + values[-1] * (high_s - centres[-1])
    )
    edges_j = (
        _edge(series, series.ends_s - series.period_s < low_s, low_s, values[0], centres[0] - low_s, -1),
        _edge(series, series.ends_s > high_s, high_s, values[-1], high_s - centres[-1], 0),
    )
    pauses = np.diff(centres)
    long = pauses > _LONG * series.period_s
    missed_j = float(((pauses - series.period_s)[long] * np.abs(np.diff(values)[long])).sum()) / 2
    varied_j = 0.0
    if values.size > 1:
        varied_j = half_width_95(values) * (length_s * max(series.period_s, length_s / values.size)) ** 0.5
    return energy_j, float((varied_j**2 + edges_j[0] ** 2 + edges_j[1] ** 2) ** 0.5) + missed_j


def _edge(series: Series, outside: Mask, edge_s: float, value_w: float, zone_s: float, nearest: int) -> float:
    """Bound the error in J at an edge: the stretch up to the first whole update, times how far the update across the
    edge differs from it (0 without one).
    """
    distance_s = np.abs(series.centres_s - edge_s)
    straddling = outside & (distance_s <= series.period_s)
    if not straddling.any():
        return 0.0
    differing = np.abs(series.values_w[straddling] - value_w)
    return float(zone_s * differing[nearest])


def integrate(
    trace: Trace,
    start_s: float,
    end_s: float,
    sensors: PowerSensors,
    infos: Sequence[SensorInfo] = (),
    *,
    calls: int = 0,
    min_updates: int = 0,
    steady: bool = False,
) -> PowerWindow | None:
    """Power and energy between two times of the board's monotonic clock; None without a sensor.

    A rail without values in the window is left out, and so is a total with such a rail. `enough` covers the rails of
    the total, or all rails without one. The trace should extend `plan_margin` beyond the window, unless the load is
    `steady` throughout: then only updates inside the window count. Raises ValueError for an empty window.
    """
    if not end_s > start_s:
        raise ValueError(f"the window from {start_s} to {end_s} s is empty")
    if not sensors.rails:
        return None
    known = {info.rail: info for info in infos or sensors.infos}
    chips = group_by_chip(trace.rails)
    estimate_chip = functools.cache(lambda chip: estimate_period(chips[chip]))
    alive = {chip: any(rail.changed.any() for rail in rails) for chip, rails in chips.items()}
    powers: dict[str, RailPower] = {}
    notes: dict[str, str] = {}
    for rail in trace.rails:
        info = known.get(rail.rail) or SensorInfo(rail.rail, rail.driver)
        period_s = info.update_period_s or estimate_chip(rail.chip) or rail.longest_period_s
        power, note = _integrate_rail(rail, start_s, end_s, period_s, info.step_w, alive[rail.chip], steady)
        if sensors.is_always_on(rail.rail) and rail.zero_s(end_s) >= min(end_s - start_s, MIN_UPDATES * period_s) > 0:
            power, note = None, DEAD
        if power is not None:
            powers[rail.rail] = power
        if note:
            notes[rail.rail] = note
    whole = [name for name in sensors.total_rails if name in powers and not notes.get(name, "").startswith(_GONE)]
    total = _sum([powers[name] for name in whole]) if whole and len(whole) == len(sensors.total_rails) else None
    judged = sensors.total_rails or sensors.rails
    wanted = max(min_updates, MIN_UPDATES)
    for name in judged:
        updates = powers[name].updates if name in powers else 0
        if updates < wanted and not notes.get(name):
            notes[name] = f"{updates} updates where {wanted} are needed"
    enough = all(name in powers and powers[name].updates >= wanted and _is_sound(powers[name]) for name in judged)
    return PowerWindow(
        started_s=start_s,
        window_s=end_s - start_s,
        rails=tuple(powers.values()),
        total=total,
        total_scope=sensors.total_scope if total is not None else "",
        calls=calls,
        enough=enough and (total is not None or not sensors.total_rails),
        note="; ".join(filter(None, [sensors.note, *(f"{name}: {text}" for name, text in notes.items())])),
    )


def _integrate_rail(
    rail: RailTrace, start_s: float, end_s: float, period_s: float, step_w: float | None, alive: bool, steady: bool
) -> tuple[RailPower | None, str]:
    """One rail's power in the window, None without values; and its problem."""
    bad = int(((rail.bad_s >= start_s) & (rail.bad_s <= end_s)).sum())
    reads = rail.count_reads(start_s, end_s)
    if not reads:
        return None, rail.problem or "no value in this window"
    # A sensor that has gone away leaves the part before.
    patience_s = 2 * max(period_s, rail.spacing_s)
    first_s, last_s = float(rail.times_s[0]), float(rail.times_s[-1])
    low_s = start_s if first_s <= start_s + patience_s else first_s
    high_s = end_s if last_s >= end_s - patience_s else last_s
    if low_s >= high_s:  # a single moment has no duration
        return None, rail.problem or "a single value in this window"
    note = ""
    if (low_s, high_s) != (start_s, end_s):
        why = f" ({rail.problem})" if rail.problem else ""
        note = f"{_GONE} for {high_s - low_s:.2f} of {end_s - start_s:.2f} s only{why}"
    series = reconstruct(rail, period_s, alive)
    inside = (series.ends_s - series.period_s >= low_s) & (series.ends_s <= high_s)
    updates = int(inside.sum())
    expected = int((high_s - low_s) / period_s) if alive else updates
    resolution_w = _resolution_w(rail, step_w)
    length_s = high_s - low_s
    if steady and updates >= MIN_UPDATES:
        energy_j, spread_j = _extend(series, inside, length_s)
    else:
        energy_j, spread_j = estimate(series, inside, low_s, high_s)
    half_j = (resolution_w / 2 + _UNIT_W) * length_s + spread_j
    if updates < MIN_UPDATES:
        half_j = max(half_j, _FEW * abs(energy_j) + resolution_w * length_s)
    if bad > _BAD_SHARE * (reads + bad) and not note:
        note = f"{bad} of {reads + bad} reads were bad ({rail.problem})"
    if not alive and not note:
        note = "its value never changed: constant, or stale"
    interval_j = (min(max(energy_j - half_j, 0.0), energy_j), energy_j + half_j)
    power = RailPower(
        rail=rail.rail,
        power_w=energy_j / length_s,
        power_ci_w=(interval_j[0] / length_s, interval_j[1] / length_s),
        energy_j=energy_j,
        energy_ci_j=interval_j,
        reads=reads,
        updates=max(updates, 1),
        gaps=max(0, expected - _EDGE_UPDATES - updates),
        bad_reads=bad,
    )
    return power, note


def _extend(series: Series, inside: Mask, length_s: float) -> tuple[float, float]:
    """As `estimate`, over `length_s` of a constant load with the updates `inside`."""
    whole = Series(series.ends_s[inside], series.values_w[inside], series.period_s)
    first_s, last_s = float(whole.ends_s[0] - whole.period_s), float(whole.ends_s[-1])
    energy_j, spread_j = estimate(whole, np.ones(whole.ends_s.size, dtype=bool), first_s, last_s)
    stretch = length_s / (last_s - first_s)
    return energy_j * stretch, spread_j * stretch


def _is_sound(power: RailPower) -> bool:
    """Whether most reads were good."""
    return power.bad_reads <= _BAD_SHARE * (power.reads + power.bad_reads)


def _resolution_w(rail: RailTrace, step_w: float | None) -> float:
    """The step between values: from the hardware, the calibration, or this trace."""
    found = [step for step in (rail.resolution_w, step_w) if step]
    return max(found) if found else smallest_difference(rail.values_w) or _UNKNOWN_STEP_W


def _sum(rails: Sequence[RailPower], shares: Sequence[float] = ()) -> RailPower:
    """Sum rails read together; or one rail's windows, which have these shares of their time.

    Errors may be correlated, so intervals add.
    """
    if len(rails) == 1:
        return rails[0]
    weights, count = (shares, sum) if shares else ([1.0] * len(rails), min)
    weighted = list(zip(rails, weights, strict=True))
    return RailPower(
        rail="+".join(dict.fromkeys(rail.rail for rail in rails)),
        power_w=sum(rail.power_w * weight for rail, weight in weighted),
        power_ci_w=(
            sum(rail.power_ci_w[0] * weight for rail, weight in weighted),
            sum(rail.power_ci_w[1] * weight for rail, weight in weighted),
        ),
        energy_j=sum(rail.energy_j for rail in rails),
        energy_ci_j=(sum(rail.energy_ci_j[0] for rail in rails), sum(rail.energy_ci_j[1] for rail in rails)),
        reads=count(rail.reads for rail in rails),
        updates=count(rail.updates for rail in rails),
        gaps=max(rail.gaps for rail in rails),
        bad_reads=sum(rail.bad_reads for rail in rails),
    )


def join(windows: Sequence[PowerWindow], calls: int, min_updates: int) -> PowerWindow:
    """Join windows of one trace, between which something else went on: their energies and intervals add."""
    first, length_s = windows[0], sum(window.window_s for window in windows)
    if len(windows) == 1:
        return dataclasses.replace(first, calls=calls)
    shares = [window.window_s / length_s for window in windows]
    named = [{rail.rail: rail for rail in window.rails} for window in windows]
    rails = [_sum([each[name] for each in named], shares) for name in named[0] if all(name in each for each in named)]
    totals = [window.total for window in windows if window.total is not None]
    total = _sum(totals, shares) if len(totals) == len(windows) else None
    enough = all(rail.updates >= max(min_updates, MIN_UPDATES) for rail in ([total] if total else rails))
    note = "; ".join(dict.fromkeys(window.note for window in windows if window.note and not enough))
    scope = first.total_scope if total else ""
    return PowerWindow(first.started_s, length_s, tuple(rails), total, scope, calls, enough and bool(rails), note)


def energy_per_call(busy: PowerWindow, idle: PowerWindow | None, calls: int) -> Energy:
    """Energy of one of `calls` calls that filled `busy`, and above `idle`, taken at the same clocks.

    Errors of both windows add: half a step at two levels is a bound, not a deviation.
    """
    if busy.total is None or calls < 1:
        return Energy(busy, idle)
    low_j, high_j = busy.total.energy_ci_j
    energy = Energy(busy, idle, busy.total.energy_j / calls, (low_j / calls, high_j / calls))
    if idle is None or idle.total is None or idle.total_scope != busy.total_scope:
        return energy
    length_s = busy.window_s
    idle_low_w, idle_high_w = idle.total.power_ci_w
    return dataclasses.replace(
        energy,
        above_idle_j=(busy.total.energy_j - idle.total.power_w * length_s) / calls,
        above_idle_ci_j=((low_j - idle_high_w * length_s) / calls, (high_j - idle_low_w * length_s) / calls),
    )


def plan_window(infos: Sequence[SensorInfo], spec: EnergySpec, total_rails: Sequence[str] = ()) -> float:
    """How long in s to repeat a kernel until the slowest rail (of the total, if named) has enough updates.

    At most `spec.limit_s`, which also applies to an unknown period.
    """
    periods = [info.update_period_s for info in infos if not total_rails or info.rail in total_rails]
    known = [period for period in periods if period is not None]
    if not periods or len(known) < len(periods):
        return spec.limit_s
    return min(spec.limit_s, (max(spec.min_updates, MIN_UPDATES) + _EDGE_UPDATES) * max(known))


def plan_idle(infos: Sequence[SensorInfo], wanted_s: float) -> float:
    """How long the idle baseline lasts: `wanted_s`, or longer for the slowest sensor."""
    return max(
        wanted_s, (MIN_UPDATES + _EDGE_UPDATES) * max((info.update_period_s or 0.0 for info in infos), default=0.0)
    )


def plan_margin(infos: Sequence[SensorInfo]) -> float:
    """How long in s to sample before and after a window, to see the update after each edge."""
    return 1.5 * max((info.update_period_s or 0.0 for info in infos), default=0.0)
