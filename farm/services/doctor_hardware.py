"""The doctor's checks of a board's hardware against its type: clocks, speed, rails, power and throttle evidence.

Every check pins what it needs and releases it. Comparisons are pure functions; results go into `facts` as plain JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from device_agent.protocol import (
    Clocks,
    DomainClocks,
    EnergySpec,
    OperatingPoint,
    Outcome,
    PinReport,
    PinStatus,
    PowerSpec,
    format_hz,
)
from farm.crew import calibration
from farm.errors import BoardUnsafeError, PermanentError
from farm.inventory.board_types import BoardType
from farm.measure.blocking import BlockingSession
from farm.search.codegen import golden
from farm.services.checks import Doubt, Work

# Entries tested of each clock's table, its ends among them: enough to see a driver round, few enough to be quick.
_MOST_POINTS = 6
# A clock that does not follow takes the agent's 5 s; two of them are evidence enough.
_ENOUGH_FAILURES = 2
# The kernel stalls on memory for a part of its time, so it gains less than the clock, but it must gain. A gain beyond
# the clock's own shows that one of both clocks is wrong.
_LEAST_GAIN, _MOST_GAIN = 1.15, 1.15
# Each clock several times in turns, so that another program slows down both.
_TURNS = 3
# Updates of the slowest sensor in a window, and how long to wait for them.
_POWER = EnergySpec(min_updates=8, limit_s=6.0, idle_s=3.0)
_GLANCE = PowerSpec(seconds=0.05, rate_hz=20.0)
# A sensor's period further off than this contradicts its type.
_PERIOD_TOLERANCE = 0.25
_SEND = "Please send this report: the type's file is to be put right, or another release has another table."


@dataclasses.dataclass(frozen=True)
class HardwareChecks:
    """The checks of one board, whose session is the caller's. `before` are its clocks before the first check."""

    session: BlockingSession
    kind: BoardType
    before: Clocks
    require_kernel: Callable[[], golden.GoldenKernel]
    facts: dict[str, Any]

    def plan(self) -> list[tuple[str, Work]]:
        """List all checks in their order; none needs another."""
        return [
            ("clock tables", self._tables),
            ("holding", self._holding),
            ("speed", self._speed),
            ("rails", self._rails),
            ("sensor period", self._period),
            ("power", self._power),
            ("throttling", self._throttling),
            ("restored", self._restored),
        ]

    def _tables(self) -> str | Doubt:
        shown, doubts = [], []
        self.facts["clock_tables_hz"] = {one.name: list(one.available_hz) for one in list_domains(self.before)}
        kind = self.kind
        # The tables that the type names, by clock; of a GPU those of other releases too.
        wanted: dict[str, tuple[Sequence[int], ...]] = {one.name: (one.freqs_hz,) for one in kind.clusters}
        wanted["gpu"] = (kind.gpu.freqs_hz, *kind.gpu.other_freqs_hz) if kind.gpu else ()
        wanted["memory"] = (kind.memory.freqs_hz,) if kind.memory else ()
        wanted = {name: tables for name, tables in wanted.items() if tables and tables[0]}
        for domain in list_domains(self.before):
            tables = wanted.get(domain.name, ())
            if not domain.available_hz:
                doubts.append(f"{domain.name} offers no table")
            elif not tables:
                shown.append(f"{domain.name}: {len(domain.available_hz)} clocks, of which the type says nothing")
            elif difference := compare_tables(domain.available_hz, tables):
                doubts.append(f"{domain.name} {difference}")
            else:
                shown.append(f"{domain.name}: {len(domain.available_hz)} clocks as the type has them")
        doubts += [f"there is no {name}" for name in wanted if name not in {d.name for d in list_domains(self.before)}]
        if not shown and not doubts:
            return Doubt("the board has no clock that can be seen")
        return Doubt("; ".join(doubts + shown), _SEND) if doubts else "; ".join(shown)

    def _holding(self) -> str | Doubt:
        """Pin entries of each table, one clock after another, and read back the result."""
        held: list[dict[str, Any]] = []
        self.facts["held"] = held
        failed, rounded = [], []
        for domain in list_domains(self.before):
            if not domain.available_hz or (domain.cpus and not domain.online):
                continue
            failures = 0
            # Both ends of the table and some entries between them, ascending.
            table = sorted(domain.available_hz)
            count = min(len(table), _MOST_POINTS)
            for hz in (table[round(index * (len(table) - 1) / max(count - 1, 1))] for index in range(count)):
                report = self._pin(plan_point(domain, hz))
                if report.status is PinStatus.UNAVAILABLE:
                    return Doubt(f"no clock can be held: {report.message}", "The board's clock helper does not answer.")
                reached = report.reached or OperatingPoint()
                others = {"gpu": reached.gpu_freq_hz, "memory": reached.memory_freq_hz}
                reached_hz = (reached.cpu_freq_hz if domain.cpus else others).get(domain.name)
                held.append(
                    {"clock": domain.name, "asked_hz": hz, "reached_hz": reached_hz, "took_s": report.took_s}
                    | {"status": str(report.status), "message": report.message, "notes": list(report.notes)}
                )
                if report.status is not PinStatus.OK:
                    failed.append(f"{domain.name} at {format_hz(hz)}: {report.message}")
                    failures += 1
                    if failures == _ENOUGH_FAILURES:
                        break
                elif reached_hz != hz:
                    rounded.append(f"{domain.name}: {format_hz(hz)} becomes {format_hz(reached_hz, 'nothing')}")
            self._unpin()
        if failed:
            raise PermanentError(
                "; ".join(failed), "A limit of the supply, of firmware or of a power mode; see nvpmodel."
            )
        if not held:
            return Doubt("the board offers no clock to hold")
        slowest_s = max(one["took_s"] for one in held)
        summary = f"{len(held)} points held and read back, each within {slowest_s * 1e3:.0f} ms"
        return (
            Doubt(f"{summary}; the driver rounds: {'; '.join(rounded)}", _SEND)
            if rounded
            else f"{summary}, none rounded"
        )

    def _speed(self) -> str | Doubt:
        """Check that a pinned clock is the one that it computes at: the golden kernel at two of them."""
        high = {one.name: max(one.available_hz) for one in self.before.clusters if one.available_hz and one.online}
        low = {
            one.name: min(one.available_hz, key=lambda hz: (abs(hz - high[one.name] / 2), hz))
            for one in self.before.clusters
            if one.name in high
        }
        if not high or low == high:
            return Doubt("it offers no two clocks to compare")
        turns_s: dict[str, list[float]] = {"low": [], "high": []}
        for _ in range(_TURNS):
            for name, point in (("low", low), ("high", high)):
                report = self._pin(OperatingPoint(cpu_freq_hz=dict(point)))
                if report.status is not PinStatus.OK:
                    self._unpin()
                    if report.status is PinStatus.UNAVAILABLE:
                        return Doubt(f"no clock can be held: {report.message}")
                    raise PermanentError(f"not held: {report.message}")
                turns_s[name].append(min(self._run().latency_s))
        self._unpin()
        # Other programs on a board only take time away, and for longer than a turn: the minimum is the kernel's own.
        times_s = {name: min(turns) for name, turns in turns_s.items()}
        clocks, gain = min(high[name] / low[name] for name in high), times_s["low"] / times_s["high"]
        self.facts["speed"] = {
            "low_hz": low, "low_s": times_s["low"], "high_hz": high, "high_s": times_s["high"], "gain": gain,
            "turns_s": turns_s,
        }  # fmt: skip
        said = (
            f"the golden kernel takes {times_s['low'] * 1e3:.2f} ms at {_points(low)} and "
            f"{times_s['high'] * 1e3:.2f} ms at {_points(high)}: {gain:.2f} x as fast at {clocks:.2f} x the clock"
        )
        if gain < min(_LEAST_GAIN, clocks):
            raise PermanentError(said, "The clock that is shown is not the clock that it computes at.")
        if gain > _MOST_GAIN * max(high[name] / low[name] for name in high):
            return Doubt(said, "It gains more than its clock: something else slowed it down at the lower one.")
        return said

    def _rails(self) -> str | Doubt:
        about, power = self.session.description, self.kind.power
        wanted = [rail for chip in power.chips if chip.fitted for rail in chip.rails if rail]
        self.facts["rails"] = {"found": list(about.rails), "type": wanted, "total": list(about.total_rails)}
        missing = [rail for rail in wanted if rail not in about.rails]
        notes = [f"{sensor.rail}: {sensor.note}" for sensor in about.sensors if sensor.note]
        if missing:
            said = f"the type has {', '.join(missing)}, and the board shows {', '.join(about.rails) or 'no rail'}"
            raise PermanentError(
                "; ".join([said, *notes]), "Its sensor may be dead, or its driver not loaded: energy cannot be known."
            )
        if not about.rails:
            return Doubt("neither the type nor the board has a power sensor: energy is unknown, not zero")
        if not about.total_rails:
            return Doubt(f"{', '.join(about.rails)}; none is the total: energy is unknown, not zero")
        said = f"{', '.join(about.rails)}; total: {' + '.join(about.total_rails)}"
        return Doubt(f"{said}; {'; '.join(notes)}") if notes else said

    def _period(self) -> str | Doubt:
        sensors, wanted_s = self.session.description.sensors, self.kind.power.update_period_s
        self.facts["sensors"] = [sensor.to_dict() for sensor in sensors] + [{"type_period_s": wanted_s}]
        if not sensors:
            return "no sensor"
        said = "; ".join(
            f"{one.rail} {f'every {one.update_period_s * 1e3:.4g} ms' if one.update_period_s else 'not seen'}"
            for one in sensors
        )
        seen_s = [sensor.update_period_s for sensor in sensors if sensor.update_period_s]
        if not seen_s:
            return Doubt(f"{said}: the values changed too seldom to tell")
        if wanted_s and any(abs(one_s - wanted_s) > _PERIOD_TOLERANCE * wanted_s for one_s in seen_s):
            return Doubt(f"{said}; the type says {wanted_s * 1e3:.4g} ms", _SEND)
        return said

    def _power(self) -> str | Doubt:
        """Measure power idle, then with one core busy, at the same clocks."""
        if not self.session.description.rails:
            return Doubt("there is no rail to watch")
        high = {one.name: max(one.available_hz) for one in self.before.clusters if one.available_hz and one.online}
        # Another check reports a clock that cannot be pinned; here both windows must only see the same.
        held = bool(high) and self._pin(OperatingPoint(cpu_freq_hz=dict(high))).status is PinStatus.OK
        outcome = self._run(_POWER)
        if held:
            self._unpin()
        energy = outcome.energy
        idle, busy = (energy.idle, energy.busy) if energy is not None else (None, None)
        self.facts["power"] = {"idle": idle.to_dict() if idle else None, "busy": busy.to_dict() if busy else None}
        if idle is None or busy is None or not busy.rails or not idle.rails:
            note = next((window.note for window in (busy, idle) if window is not None and window.note), "")
            raise PermanentError(
                f"the rails gave no value{f': {note}' if note else ''}",
                "Its sensor is dead or its driver has lost it: power and energy are unknown.",
            )
        before, after = (
            {rail.rail: rail for rail in window.rails} | ({"total": window.total} if window.total else {})
            for window in (idle, busy)
        )
        said = "; ".join(
            f"{name} {before[name].power_w:.2f} to {after[name].power_w:.2f} W" for name in before if name in after
        )
        judged = "total" if busy.total is not None and idle.total is not None else next(iter(after))
        if judged not in before or before[judged].power_ci_w[1] >= after[judged].power_ci_w[0]:
            raise PermanentError(f"{judged} does not move with load: {said}", "Its value may be stale.")
        doubts = [text for window in (idle, busy) if (text := window.note)]
        ranges = (("idle", self.kind.power.idle_range_w, idle), ("busy", self.kind.power.busy_range_w, busy))
        for name, bounds, window in ranges:
            drawn_w = window.total.power_w if window.total is not None else None
            if bounds is not None and drawn_w is not None and not bounds[0] <= drawn_w <= bounds[1]:
                doubts.append(f"{name} it draws {drawn_w:.2f} W, others of its type {bounds[0]:g} to {bounds[1]:g} W")
        if doubts:
            return Doubt(f"idle to one core busy: {said}; {'; '.join(dict.fromkeys(doubts))}", _SEND)
        known = "within the type's range" if self.kind.power.idle_range_w else "the type names no range"
        return f"idle to one core busy: {said}; {known}"

    def _throttling(self) -> str | Doubt:
        evidence = self.session.power(_GLANCE).before
        self.facts["evidence"] = evidence.to_dict() if evidence else None
        if evidence is None:
            return Doubt("the board shows no evidence at all")
        lacks = [] if evidence.temperature_c else ["temperatures"]
        lacks += [] if evidence.cpu_max_hz else ["limits of CPU clocks"]
        lacks += [] if evidence.cooling or evidence.alarms else ["cooling devices or over-current alarms"]
        said = (
            f"{len(evidence.temperature_c)} temperatures, {len(evidence.cooling)} cooling devices, "
            f"{f'{len(evidence.alarms)}' if evidence.alarms else 'no'} over-current alarms that can be read"
        )
        active = [name for name, state in evidence.cooling.items() if state > 0]
        if lacks:
            return Doubt(f"{said}: {', '.join(lacks)} cannot be read", "A board that throttles would not be found out.")
        if active:
            return Doubt(f"{said}; slowed down now by {', '.join(active)}", "Let it cool, and check it again.")
        return f"{said}; nothing slows it down"

    def _restored(self) -> str:
        report = self.session.unpin()
        _require_safe(report)
        after = report.clocks
        if after is None:
            raise PermanentError(f"its clocks cannot be read afterwards: {report.message}")
        if changes := find_changes(self.before, after):
            raise PermanentError("; ".join(changes), "On the board: device-agent clocks restore")
        return "limits, governors, cores and power mode are as they were"

    def _pin(self, point: OperatingPoint) -> PinReport:
        """Pin a point; the report has the result. Raises BoardUnsafeError."""
        report = self.session.pin(point)
        _require_safe(report)
        return report

    def _unpin(self) -> None:
        """Release it. Raises PermanentError, BoardUnsafeError."""
        report = self.session.unpin()
        _require_safe(report)
        if report.status not in (PinStatus.OK, PinStatus.UNAVAILABLE):
            raise PermanentError(f"not released: {report.message}", "On the board: device-agent clocks restore")

    def _run(self, energy: EnergySpec | None = None) -> Outcome:
        return calibration.require_right(self.session, self.require_kernel(), energy)


def list_domains(clocks: Clocks) -> list[DomainClocks]:
    """List every clock of a board: its clusters', the GPU's, the memory's."""
    return [*clocks.clusters, *filter(None, (clocks.gpu, clocks.memory))]


def compare_tables(found_hz: Sequence[int], tables_hz: Sequence[Sequence[int]]) -> str:
    """Describe how a table differs from the first of the possible ones, "" where it equals one of them."""
    if set(found_hz) in [set(table) for table in tables_hz]:
        return ""
    lacks, more = sorted(set(tables_hz[0]) - set(found_hz)), sorted(set(found_hz) - set(tables_hz[0]))
    parts = [f"lacks {', '.join(map(format_hz, lacks))}"] if lacks else []
    return " and ".join(parts + ([f"has {', '.join(map(format_hz, more))} besides"] if more else []))


def plan_point(domain: DomainClocks, hz: int) -> OperatingPoint:
    """Return the point that pins one clock and leaves the others alone."""
    if domain.cpus:
        return OperatingPoint(cpu_freq_hz={domain.name: hz})
    return OperatingPoint(gpu_freq_hz=hz) if domain.name == "gpu" else OperatingPoint(memory_freq_hz=hz)


def find_changes(before: Clocks, after: Clocks) -> list[str]:
    """List all differences that pinning a clock may leave; empty where there are none."""
    then = {domain.name: domain for domain in list_domains(before)}
    changes = []
    for domain in list_domains(after):
        was = then.pop(domain.name, None)
        for field in ("min_hz", "max_hz", "governor", "online"):
            if was is not None and getattr(was, field) != getattr(domain, field):
                changes.append(f"{field} of {domain.name} was {getattr(was, field)} and is {getattr(domain, field)}")
    changes += [f"{name} is gone" for name in then]
    if before.power_mode != after.power_mode:
        changes.append(f"the power mode was {before.power_mode} and is {after.power_mode}")
    if after.holder:
        changes.append(f"{after.holder} still holds clocks")
    return changes


def _require_safe(report: PinReport) -> None:
    if report.status is PinStatus.UNSAFE:
        raise BoardUnsafeError(
            f"its clocks could not be restored: {report.message}",
            "Look at it; then, on the board: device-agent clocks restore",
        )


def _points(point: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {format_hz(hz)}" for name, hz in point.items())
