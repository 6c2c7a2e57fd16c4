"""One visit to an operating point: plan the call, read the answer. Pure.

`driven_board` makes the call; `farm.sweep.plan` chooses points.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import numpy as np

from device_agent.protocol import (
    Description,
    EnergySpec,
    Engine,
    Limits,
    Outcome,
    PowerWindow,
    RunSpec,
    StartConditions,
    Status,
)
from farm.errors import PermanentError
from farm.measure.statistics import summarise
from farm.points.grid import GPU, MEMORY
from farm.points.values import Estimate, GridPoint, PointMeasurement

# Share of the window for runs that are timed one by one; the rest is for power.
_TIMED_SHARE = 0.2
# A median's interval needs 5 samples, and gains little beyond some hundred.
_LEAST_RUNS, _MOST_RUNS = 5, 2000
# Runs of seconds average over much by themselves, so few are enough.
_LEAST_SLOW_RUNS, _SLOW_S = 3, 1.0
# Caches and governors settle within this.
_WARMUP_S = 0.1
_MOST_WARMUPS = 20
# The idle baseline varies less than a load, so it needs less of the window.
IDLE_SHARE = 0.4
LEAST_IDLE_S = 2.1  # five values of the slowest known sensor (0.42 s)
# The agent's minimum, and its margin at a window's edges (`device_agent/power/energy.py`).
_LEAST_UPDATES, _EDGE_UPDATES = 3, 2
# The latency guess is an upper bound but for other clocks; a worker that takes five times as long hangs.
_PATIENCE = 5.0
# The least time-out of a visit's worker.
_LEAST_TIMEOUT_S = 30.0
# A board this much hotter than idle leaks more; one that does not cool down in time is measured all the same.
WARM_K = 15.0
_COOLING_S = 20.0
# The first runs of a program show that it works, and its rough latency.
FIRST_RUNS = 3
# Retried, as another visit may succeed; other statuses need another program.
_RETRIED = frozenset({Status.THROTTLED, Status.CLOCK_DRIFTED, Status.NOISY, Status.FARM_ERROR, Status.BOARD_LOST})


@dataclasses.dataclass(frozen=True)
class Window:
    """How long power is sampled, in s: while the model runs, and idle before. Without sensor, `seconds` are timed."""

    seconds: float
    idle_s: float = 0.0
    min_updates: int = 0
    note: str = ""

    @property
    def has_sensor(self) -> bool:
        return self.min_updates > 0

    def to_energy(self) -> EnergySpec | None:
        if not self.has_sensor:
            return None
        return EnergySpec(min_updates=self.min_updates, limit_s=self.seconds, idle_s=self.idle_s)


def plan_window(description: Description, wanted_s: float, usual_period_s: float | None = None) -> Window:
    """Plan a window of `wanted_s`, longer where the board's slowest sensor needs that for enough values.

    `usual_period_s`: the update period of the type's sensors, for a board that could not tell.
    """
    if not description.rails:
        return Window(wanted_s)
    counted = [info for info in description.sensors if info.rail in (description.total_rails or description.rails)]
    periods = [info.update_period_s or usual_period_s for info in counted]
    known = [period_s for period_s in periods if period_s]
    if not known or len(known) < len(periods):
        # The agent then fills the window it is given, and reports the number of values.
        return Window(wanted_s, IDLE_SHARE * wanted_s, _LEAST_UPDATES)
    period_s = max(known)
    least_s = (_LEAST_UPDATES + _EDGE_UPDATES) * period_s
    seconds = max(wanted_s, least_s)
    note = ""
    if seconds > wanted_s:
        note = (
            f"windows last {seconds:.2g} s instead of {wanted_s:.2g} s: "
            f"the power sensor has a new value every {period_s:.2g} s"
        )
    updates = max(_LEAST_UPDATES, math.floor(seconds / period_s) - _EDGE_UPDATES)
    # Idle is constant but for the sensor's own noise: it needs fewer values than a load.
    return Window(seconds, max(IDLE_SHARE * seconds, least_s), updates, note)


def plan_visit(
    window: Window, latency_s: float, threads: int, memory_bytes: int, start_c: float | None = None
) -> RunSpec:
    """Plan the runs of a program at a point where it takes about `latency_s`."""
    timed_s = _TIMED_SHARE * window.seconds if window.has_sensor else window.seconds
    slow = latency_s >= _SLOW_S
    runs = min(_MOST_RUNS, max(_LEAST_SLOW_RUNS if slow else _LEAST_RUNS, math.ceil(timed_s / latency_s)))
    warmup = 0 if slow else min(_MOST_WARMUPS, math.ceil(_WARMUP_S / latency_s))
    timeout_s = max(_LEAST_TIMEOUT_S, _PATIENCE * (runs + warmup) * latency_s)
    return RunSpec(
        Engine.RELAX_VM,
        runs=runs,
        warmup=warmup,
        return_outputs=False,
        limits=Limits(timeout_s=timeout_s, memory_bytes=memory_bytes, threads=threads),
        start=None if start_c is None else StartConditions(max_temperature_c=start_c, deadline_s=_COOLING_S),
        energy=window.to_energy(),
    )


def plan_first_run(threads: int, memory_bytes: int, timeout_s: float) -> RunSpec:
    """Plan a program's first run, for its outputs and a rough latency."""
    limits = Limits(timeout_s=timeout_s, memory_bytes=memory_bytes, threads=threads)
    return RunSpec(Engine.RELAX_VM, runs=FIRST_RUNS, warmup=1, limits=limits)


def guess_latency_s(known: Iterable[tuple[GridPoint, float]], point: GridPoint) -> float | None:
    """Guess an upper bound of a program's time at `point` from measured points (point, s); None without any.

    As if all of it were limited by the clock, or core count, that fell most.
    """
    guesses = [latency_s * _find_slowdown(there, point) for there, latency_s in known]
    return min(guesses, default=None)


def count_cores(point: GridPoint, threads: int) -> int:
    """Return the number of threads where fewer cores are online than the code is made for."""
    units = sum(domain.units for domain in point.domains if domain.name not in (GPU, MEMORY))
    return max(1, min(threads, units)) if units else threads


def read_temperature_c(zones: dict[str, float] | None) -> float | None:
    """Return the hottest zone."""
    return max(zones.values(), default=None) if zones else None


def to_measurement(
    outcome: Outcome, key: str, at_s: float, board: str, *, needs_total: bool = False, what: str = "the model"
) -> PointMeasurement | None:
    """Convert an outcome to a measurement of its point; None where nothing was timed.

    `needs_total`: the board has a power sensor, so a visit without power is invalid. Raises PermanentError where the
    program is to blame.
    """
    if outcome.status is not Status.OK and outcome.status not in _RETRIED:
        raise PermanentError(f"{what} does not run on {board} at {key}: {outcome.status} {outcome.message}")
    if not outcome.latency_s:
        return None
    summary = summarise(outcome.latency_s)
    busy = outcome.energy.busy if outcome.energy else None
    total = busy.total if busy else None
    invalid = outcome.message or str(outcome.status) if outcome.status is not Status.OK else ""
    if needs_total and total is None and not invalid:
        invalid = f"the power sensor gave no total{f': {busy.note}' if busy and busy.note else ''}"
    after = outcome.after or outcome.before
    energy = outcome.energy
    return PointMeasurement(
        key=key,
        latency=Estimate(summary.median, summary.ci_low, summary.ci_high),
        at_s=at_s,
        latency_p95_s=float(np.quantile(outcome.latency_s, 0.95)),
        power=read_total(busy),
        energy=_to_estimate(energy.per_call_j, energy.per_call_ci_j) if energy else None,
        energy_above_idle=_to_estimate(energy.above_idle_j, energy.above_idle_ci_j) if energy else None,
        rail_power_w={rail.rail: rail.power_w for rail in busy.rails} if busy else {},
        temperature_c=read_temperature_c(after.temperature_c) if after else None,
        throttled=outcome.status is Status.THROTTLED,
        invalid=invalid,
        retry=bool(invalid),
        board=board,
        simulated=outcome.simulated,
        idle_power=read_total(energy.idle if energy else None),
    )


def read_total(window: PowerWindow | None) -> Estimate | None:
    """Return the total power of a window; None without one."""
    total = window.total if window else None
    return _to_estimate(total.power_w, total.power_ci_w) if total else None


def _to_estimate(value: float | None, interval: Sequence[float] | None) -> Estimate | None:
    """Convert an interval; None also where it includes zero: the load may be too small for the sensor."""
    if value is None or interval is None or not value > 0:
        return None
    return Estimate(value, min(max(0.0, interval[0]), value), max(interval[1], value))


def _find_slowdown(there: GridPoint, here: GridPoint) -> float:
    """Return the largest ratio of core counts, and of any clock that matters to the CPU's code; at least 1."""
    cores = [sum(d.units for d in point.domains if d.name not in (GPU, MEMORY)) for point in (there, here)]
    clocks = {domain.name: domain.freq_hz for domain in there.domains if domain.name != GPU}
    ratios = [hz / domain.freq_hz for domain in here.domains if domain.freq_hz and (hz := clocks.get(domain.name))]
    return max([1.0, *ratios, cores[0] / cores[1] if all(cores) else 1.0])
