"""Energy from samples, with intervals that cover what the sensor cannot see.

A sensor's value is taken as the mean of, or one sample from, the update period before it was refreshed; which of both
no driver says. Intervals cover quantisation, that delay, variation between updates and missed updates, not the chip's
and the shunt's own calibration (about 1 %), nor a sensor that samples in step with a load that repeats.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from device_agent.power.calibrate import estimate_period, smallest_difference
from device_agent.power.sensors import PowerSensors
from device_agent.power.trace import RailTrace, Trace
from device_agent.power.updates import Mask, Series, estimate, reconstruct
from device_agent.protocol import Energy, EnergySpec, PowerWindow, RailPower, SensorInfo

# Drivers cut the product of voltage and current to whole mW.
_UNIT_W = 1e-3
# Where nothing tells a sensor's step: the largest of the known boards at 5 V (AGX Orin, 2 mOhm).
_UNKNOWN_STEP_W = 0.1
# Fewer updates tell nothing of the variation between them: the interval is then half the value at least.
MIN_UPDATES = 3
_FEW = 0.5
# A window loses the updates at its two edges, which partly belong to what was before and after.
_EDGE_UPDATES = 2
# A sensor that errs more often than this is not to be believed in between either.
_BAD_SHARE = 0.25
# How the note begins on a rail that did not last for the whole window.
_GONE = "answered"


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
    """Power and energy between two moments of the board's monotonic clock; None without a sensor.

    A rail that gave no value in the window is left out, and so is the total of such a rail. `enough` looks at the rails
    of the total where there is one, else at all. The trace should reach `plan_margin` beyond the window on both sides,
    or else the load is `steady`, the same all through the window: then updates that lie in it as a whole stand for it,
    and what was before and after it does not matter. Raises ValueError for a window that is empty.
    """
    if not end_s > start_s:
        raise ValueError(f"the window from {start_s} to {end_s} s is empty")
    if not sensors.rails:
        return None
    known = {info.rail: info for info in infos or sensors.infos}
    chips: dict[str, list[RailTrace]] = {}
    for rail in trace.rails:
        chips.setdefault(rail.chip, []).append(rail)
    estimate_chip = functools.cache(lambda chip: estimate_period(chips[chip]))
    alive = {chip: any(rail.changed.any() for rail in rails) for chip, rails in chips.items()}
    powers: dict[str, RailPower] = {}
    notes: dict[str, str] = {}
    for rail in trace.rails:
        info = known.get(rail.rail) or SensorInfo(rail.rail, rail.driver)
        period_s = info.update_period_s or estimate_chip(rail.chip) or rail.longest_period_s
        power, note = _integrate_rail(rail, start_s, end_s, period_s, info.step_w, alive[rail.chip], steady)
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
    """One rail's power in the window, None where it gave no value; and what is wrong with it."""
    bad = int(((rail.bad_s >= start_s) & (rail.bad_s <= end_s)).sum())
    reads = rail.count_reads(start_s, end_s)
    if not reads:
        return None, rail.problem or "no value in this window"
    # What was not read is not known: a sensor that has gone away leaves the part before.
    patience_s = 2 * max(period_s, rail.spacing_s)
    first_s, last_s = float(rail.times_s[0]), float(rail.times_s[-1])
    low_s = start_s if first_s <= start_s + patience_s else first_s
    high_s = end_s if last_s >= end_s - patience_s else last_s
    if low_s >= high_s:  # one moment is no stretch of time
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
    """As `estimate`, over `length_s` of a load that is everywhere what the updates `inside` say."""
    whole = Series(series.ends_s[inside], series.values_w[inside], series.period_s)
    first_s, last_s = float(whole.ends_s[0] - whole.period_s), float(whole.ends_s[-1])
    energy_j, spread_j = estimate(whole, np.ones(whole.ends_s.size, dtype=bool), first_s, last_s)
    stretch = length_s / (last_s - first_s)
    return energy_j * stretch, spread_j * stretch


def _is_sound(power: RailPower) -> bool:
    """Whether most reads were good."""
    return power.bad_reads <= _BAD_SHARE * (power.reads + power.bad_reads)


def _resolution_w(rail: RailTrace, step_w: float | None) -> float:
    """How far apart neighbouring values lie: what the hardware says, what was measured, what this trace shows."""
    found = [step for step in (rail.resolution_w, step_w) if step]
    if not found:
        found = [step for step in (smallest_difference(rail.values_w),) if step]
    return max(found, default=_UNKNOWN_STEP_W)


def _sum(rails: list[RailPower]) -> RailPower:
    """Rails read together as one. Their errors may have one cause, so their intervals add."""
    if len(rails) == 1:
        return rails[0]
    return RailPower(
        rail="+".join(rail.rail for rail in rails),
        power_w=sum(rail.power_w for rail in rails),
        power_ci_w=(sum(rail.power_ci_w[0] for rail in rails), sum(rail.power_ci_w[1] for rail in rails)),
        energy_j=sum(rail.energy_j for rail in rails),
        energy_ci_j=(sum(rail.energy_ci_j[0] for rail in rails), sum(rail.energy_ci_j[1] for rail in rails)),
        reads=min(rail.reads for rail in rails),
        updates=min(rail.updates for rail in rails),
        gaps=max(rail.gaps for rail in rails),
        bad_reads=sum(rail.bad_reads for rail in rails),
    )


def energy_per_call(busy: PowerWindow, idle: PowerWindow | None, calls: int) -> Energy:
    """Energy of one of `calls` calls that filled `busy`, as it is and above `idle`, which was taken at the same clocks.

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
    """How long in s a kernel must be repeated until the slowest rail (of the total, if named) has given enough updates.

    `spec.limit_s` at most, and where a period is not known.
    """
    periods = [info.update_period_s for info in infos if not total_rails or info.rail in total_rails]
    known = [period for period in periods if period is not None]
    if not periods or len(known) < len(periods):
        return spec.limit_s
    return min(spec.limit_s, (max(spec.min_updates, MIN_UPDATES) + _EDGE_UPDATES) * max(known))


def plan_idle(infos: Sequence[SensorInfo], wanted_s: float) -> float:
    """How long to be idle for a baseline of `wanted_s`: longer where the slowest sensor has few values in that time."""
    return max(
        wanted_s, (MIN_UPDATES + _EDGE_UPDATES) * max((info.update_period_s or 0.0 for info in infos), default=0.0)
    )


def plan_margin(infos: Sequence[SensorInfo]) -> float:
    """How long in s sampling should go on before and after a window: until the update after its edge has been seen."""
    return 1.5 * max((info.update_period_s or 0.0 for info in infos), default=0.0)
