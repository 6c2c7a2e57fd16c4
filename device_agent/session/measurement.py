"""The session side of one measurement: start conditions, power sampling, and the verdict on its samples.

`worker/worker.py` runs the worker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from device_agent.errors import BadPointError, SensorError
from device_agent.platforms.board_time import BoardTime
from device_agent.platforms.evidence import Sensors
from device_agent.power import energy
from device_agent.power.sampler import Trace
from device_agent.power.sensors import PowerSensors
from device_agent.protocol import (
    Energy,
    EnergySpec,
    Evidence,
    MeasureSpec,
    Outcome,
    PowerWindow,
    RunSpec,
    SensorInfo,
    StartConditions,
    Status,
)
from device_agent.protocol.texts import format_hz
from device_agent.session.board import Board
from device_agent.worker.plan import Phases, Plan

# Fast enough to miss little of sensors that refresh every 6.6 ms, at <= 2 % of a core.
RATE_HZ = 100.0


# Tolerance for a pinned clock: the TX2's scaling_cur_freq is a 20 us measurement that jitters by 1 %.
CLOCK_TOLERANCE = 0.03
# Shorter windows do not show other load: the kernel counts CPU time in ticks of 10 ms.
MIN_LOAD_WINDOW_S = 0.2
# Load is CPU time between two reads; the kernel counts it in ticks of 10 ms.
_LOOK_S = 0.25


class Observer:
    """Samples every rail beside a worker. `infos` describe the sensors as measured at the agent's start."""

    def __init__(
        self, sensors: PowerSensors, infos: tuple[SensorInfo, ...], time: BoardTime, rate_hz: float = RATE_HZ
    ) -> None:
        self._sensors = sensors
        self._infos = infos
        self._time = time
        self._rate_hz = rate_hz
        self._trace: Trace | None = None

    def plan_window(self, spec: EnergySpec) -> tuple[float, float, float]:
        """Seconds to idle, to repeat the kernel, and to run it before that; 0 without a sensor."""
        if not self._sensors.rails:
            return 0.0, 0.0, 0.0
        idle_s = energy.plan_idle(self._infos, spec.idle_s) if spec.idle_s else 0.0
        busy_s = energy.plan_window(self._infos, spec, self._sensors.total_rails)
        return idle_s, busy_s, energy.plan_margin(self._infos)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Sample during the block. Does nothing without sensors."""
        self._trace = None
        if not self._sensors.rails:
            yield
            return
        watch = self._time.make_watch(self._sensors, self._rate_hz)
        watch.start()
        try:
            yield
        finally:
            # A hung driver keeps its thread; this measurement then has no power.
            with contextlib.suppress(SensorError):
                watch.stop()
                self._trace = watch.trace()

    def read_power(self, phases: Phases) -> PowerWindow | None:
        """Power while the samples were taken; None without a sensor or any value."""
        return self._window(phases.timing_start_s, phases.timing_end_s)

    def read_energy(
        self, phases: Phases, spec: EnergySpec, windows: Sequence[tuple[float, float]] = (), runs: int = 0
    ) -> Energy | None:
        """Energy per call over the requested window, or of a program's runs over theirs; None without a sensor."""
        if windows:  # a program's load is not steady
            parts = [self._window(start_s, end_s, min_updates=spec.min_updates) for start_s, end_s in windows]
            known = [part for part in parts if part is not None]
            busy = energy.join(known, runs, spec.min_updates) if len(known) == len(parts) else None
        else:
            times_s = phases.busy_start_s, phases.busy_end_s
            busy = self._window(*times_s, round(phases.busy_calls), spec.min_updates, steady=True)
        if busy is None:
            return None
        idle = self._window(phases.idle_start_s, phases.idle_end_s, steady=True)
        return energy.energy_per_call(busy, idle, busy.calls)

    def _window(
        self, start_s: float, end_s: float, calls: int = 0, min_updates: int = 0, *, steady: bool = False
    ) -> PowerWindow | None:
        if self._trace is None or not end_s > start_s > 0:
            return None
        sensors, infos = self._sensors, self._infos
        return energy.integrate(
            self._trace, start_s, end_s, sensors, infos, calls=calls, min_updates=min_updates, steady=steady
        )


def judge(outcome: Outcome, pinned_hz: Mapping[int, int], max_spread: float | None) -> Outcome:
    """Judge the outcome by its evidence. `pinned_hz` maps held cores to Hz."""
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
    """Which cooling device slowed the board, or which over-current alarm was raised; "" for none."""
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
    """Which clock left its held value, or which limit changed; "" for none."""
    for evidence, when in ((before, "before"), (after, "after")):
        for cpu, wanted in pinned_hz.items():
            measured = evidence.cpu_freq_hz.get(str(cpu))
            # A measured clock may read 0 on an idle core; an offline core has no file.
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
    """Describe samples that spread further than allowed; "" if they do not, or with fewer than 3."""
    if max_spread is None or len(latency_s) < 3:
        return ""
    first, median, third = statistics.quantiles(latency_s, n=4, method="inclusive")
    spread = (third - first) / median
    if spread <= max_spread:
        return ""
    return f"samples spread by {spread:.1%} of their median (interquartile range); {max_spread:.1%} is allowed"


def other_load(before: Evidence, after: Evidence, window_s: float, own_cpu_s: float) -> float | None:
    """CPU time of other processes in the window, in cores; None if unknown."""
    if before.busy_s is None or after.busy_s is None or window_s < MIN_LOAD_WINDOW_S:
        return None
    return max(0.0, (after.busy_s - before.busy_s - own_cpu_s) / window_s)


def _list(states: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in states.items())


def wait(
    conditions: StartConditions,
    sensors: Sensors,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> str:
    """Wait until every condition holds; return "", or at the deadline the one that does not.

    A board without thermal zones, or without /proc/stat, cannot check its condition: it answers at once.
    """
    deadline = clock() + conditions.deadline_s
    looked, busy_s = clock(), sensors.read_busy_s()
    while True:
        problem = ""
        if conditions.max_temperature_c is not None:
            zones = sensors.read_temperatures()
            if not zones:
                return "start condition max_temperature_c: this board has no thermal zone that can be read"
            hottest = max(zones, key=lambda zone: zones[zone])
            if zones[hottest] > conditions.max_temperature_c:
                problem = f"{hottest} is at {zones[hottest]:g} C, above {conditions.max_temperature_c:g} C"
        if conditions.max_load is not None and not problem:
            if busy_s is None:
                return "start condition max_load: this board does not say how busy it is"
            sleep(_LOOK_S)
            now, busy_now_s = clock(), sensors.read_busy_s()
            load = ((busy_now_s or 0.0) - busy_s) / max(now - looked, 1e-6)
            looked, busy_s = now, busy_now_s
            if load > conditions.max_load:
                problem = f"other processes use {load:.2f} cores, more than {conditions.max_load:g}"
        if not problem:
            return ""
        if clock() >= deadline:
            return f"start condition not met within {conditions.deadline_s:g} s: {problem}"
        if "cores" not in problem:
            sleep(_LOOK_S)


class Measurement:
    """Everything around one worker. `refusal` is the outcome if the worker may not start."""

    def __init__(self, board: Board, spec: MeasureSpec | RunSpec, content: tuple[bytes, ...]) -> None:
        """Wait for the start conditions and make the plan. Never raises for missing hardware.

        `content` is the payload beside `spec`.
        """
        self._board = board
        self._spec = spec
        self._content = content
        self._observer = Observer(board.power, board.sensor_infos, board.time)
        self.beside = self._observer.beside
        board.open_meter()
        self.refusal = self._find_refusal()
        self.plan = Plan(board.evidence, board.marks)
        if self.refusal is None:
            self._lay_out()

    def _find_refusal(self) -> Outcome | None:
        if reason := self._board.unsafe():
            return Outcome(Status.CLOCK_DRIFTED, f"the board is unsafe: {reason}")
        if moved := self._board.reassert():
            return Outcome(Status.CLOCK_DRIFTED, f"the operating point does not hold: {moved}")
        time, start = self._board.time, self._spec.start
        if start is not None and (problem := wait(start, self._board.evidence, time.now_s, time.sleep)):
            return Outcome(Status.NOISY, problem)
        return None

    def _lay_out(self) -> None:
        try:
            cpus = self._board.place(self._spec.limits.cluster)
        except BadPointError as error:
            self.refusal = Outcome(Status.FARM_ERROR, str(error))
            return
        self.plan.time = self._board.time.own()
        if not self._board.tree.simulated:
            self.plan.cpus = cpus
        if self._spec.energy is not None:
            windows = self._observer.plan_window(self._spec.energy)
            self.plan.idle_s, self.plan.busy_s, self.plan.margin_s = windows
        limit_s = self._spec.limits.timeout_s + self.plan.extra_s
        self.plan.emulator = self._board.find_emulator(self._spec, self._content[0])
        self.plan.pace = self._board.pace(self._spec, self._content, self.plan.time, limit_s)

    def finish(self, outcome: Outcome) -> Outcome:
        """Complete the outcome with power, energy and the board's name, and judge it."""
        phases = self._board.marks.read()
        if outcome.status is Status.OK and outcome.before is not None and outcome.after is not None:
            window_s = max(phases.timing_end_s, phases.busy_end_s) - phases.timing_start_s
            spec, windows = self._spec.energy, outcome.details.windows if outcome.details else ()
            load = None
            if not self._board.tree.simulated:  # a virtual board's CPU time is the host's
                load = other_load(outcome.before, outcome.after, window_s, phases.cpu_s)
            outcome = dataclasses.replace(
                outcome,
                other_load=load,
                power=self._observer.read_power(phases),
                energy=self._observer.read_energy(phases, spec, windows, len(outcome.latency_s)) if spec else None,
            )
        outcome = dataclasses.replace(outcome, point=self._board.point)
        return self._board.sign(judge(outcome, self._board.pinned_hz(), self._spec.max_spread))
