"""The work of one board in a sweep: pin a point, run every series there, store the visits.

The conductor decides what comes next; `farm.crew` has the boards.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping

import anyio

from device_agent.protocol import Outcome, Status
from farm.crew import visits
from farm.crew.driven_board import DrivenBoard
from farm.crew.visits import Window
from farm.errors import BoardLostError, PermanentError, TransientError, UsageError
from farm.points.values import GridPoint, PointMeasurement
from farm.programs.metrics import LATENCY, ProgramMetric
from farm.store import Store
from farm.sweep import stored
from farm.sweep.plan.conductor import Conductor, Series, VisitTask
from farm.sweep.run.programs import SweepProgram
from farm.units import format_duration, joule_scale

# Losses in a row that end a board's part in the sweep.
_MAX_LOSSES = 3
# Retries of a visit that the board did not run at all.
_TRIES = 3
# The pause while another client pins the clocks.
_PAUSE_S = 1.0
# How often to look whether another board's visit has led to work for this one.
_LOOK_S = 0.05


@dataclasses.dataclass(frozen=True)
class VisitOrders:
    """The settings of a sweep's visits."""

    sweep: int
    started_at: float
    programs: Mapping[Series, SweepProgram]
    window: Window
    threads: int
    memory_bytes: int
    needs_total: bool
    say: Callable[[str], None]
    progress: Progress
    first_latency_s: Mapping[Series, tuple[GridPoint, float]]


class Progress:
    """Counts a sweep's visits, up to `most`, and estimates the remaining time."""

    def __init__(self, most: int, now: Callable[[], float] = time.monotonic) -> None:
        self._most, self._now = most, now
        self._done, self._began = 0, now()

    def count(self, text: str) -> str:
        """Count a visit; return its line, with the progress."""
        self._done += 1
        most = max(self._most, self._done)
        left_s = (self._now() - self._began) / self._done * (most - self._done)
        left = f", at most {format_duration(left_s)} left" if most > self._done else ""
        return f"visit {self._done} of at most {most}{left}: {text}"


class Visitor:
    """Runs one board until nothing is left for it.

    `numbers` counts the visits of each series over all boards; all of them share one thread and its store.
    """

    def __init__(self, orders: VisitOrders, conductor: Conductor, numbers: dict[Series, int], store: Store) -> None:
        self._orders, self._conductor, self._numbers, self._store = orders, conductor, numbers, store
        self._idle_c: dict[str, float | None] = {}
        self._before_s = max((visit.at_s for each in conductor.visits.values() for visit in each), default=0.0)
        self.measuring_s = self.pinning_s = self.running_s = 0.0

    async def work(self, board: DrivenBoard, opened: bool) -> None:
        """Run until the sweep ends. Raises the error that ends the board's part. `opened`: there is a session."""
        if not opened:
            await board.open()
        try:
            await self._work(board)
        finally:
            self._conductor.leave(board.name)

    async def _work(self, board: DrivenBoard) -> None:
        losses = 0
        while True:
            name = board.name
            while not (found := self._conductor.find_next(name)):
                await anyio.sleep(_LOOK_S)
            [task] = found
            if task is None:
                return
            try:
                await self._carry_out(task, board)
                losses = 0
            except TransientError as error:
                losses += 1
                if losses >= _MAX_LOSSES:
                    raise
                self._orders.say(f"{name}: {error.message}; trying again")
                await self._find_again(board, error)
            finally:
                self._conductor.done(name)

    async def _find_again(self, board: DrivenBoard, error: TransientError) -> None:
        if not isinstance(error, BoardLostError):
            await anyio.sleep(_PAUSE_S)
            return
        before = board.name
        await board.open()
        if board.name != before:
            self._conductor.leave(before)
            self._orders.say(f"going on with {board.name}, the anchor first")

    async def _carry_out(self, task: VisitTask, board: DrivenBoard) -> None:
        if board.name not in self._idle_c:
            self._idle_c[board.name] = await board.read_temperature_c()
        began = time.monotonic()
        try:
            report = await board.pin(task.point.point)
        except UsageError as error:
            # The board lists these clocks and yet refuses them: mostly a power mode that needs a reboot.
            if not self._conductor.refuse(task.point, error.message):
                raise
            self._orders.say(self._conductor.notes[-1])
            return
        self.pinning_s += time.monotonic() - began
        if report.reached is not None and self._conductor.merge(task.point, report.reached):
            self._orders.say(f"{task.point.key}: the board makes another point of it, so it is left out")
            return
        for series in task.series:
            await self._visit(series, task.point, board)

    async def _visit(self, series: Series, point: GridPoint, board: DrivenBoard) -> None:
        """Measure once; store the result at once. Raises PermanentError for a bad program."""
        for _ in range(_TRIES):
            at_s = time.time() - self._orders.started_at
            simulated_s = self._before_s + self.measuring_s
            began = time.monotonic()
            outcome, metrics = await self._run(series, point, board)
            self.running_s += time.monotonic() - began
            # How long the board was observed: timing, the idle baseline, the window.
            self.measuring_s += outcome.timing_s
            if energy := outcome.energy:
                self.measuring_s += energy.busy.window_s + (energy.idle.window_s if energy.idle else 0.0)
            if outcome.simulated:  # a simulated board's drift is in its own time
                at_s = simulated_s
            program = self._orders.programs[series]
            measurement = visits.to_measurement(
                outcome, point.key, at_s, board.name, needs_total=self._orders.needs_total, what=program.title
            )
            if measurement is not None:
                self._keep(series, program.convert(measurement, metrics), outcome)
                return
            self._orders.say(f"{point.key} on {board.name}: {outcome.message or outcome.status}; again")
        raise PermanentError(
            f"{board.name} does not run {program.title} at {point.key}: {outcome.status} {outcome.message}"
        )

    async def _run(self, series: Series, point: GridPoint, board: DrivenBoard) -> tuple[Outcome, dict[str, float]]:
        orders = self._orders
        program = orders.programs[series]
        # The latencies of a program are a metric's; the first run was timed.
        timed = [] if program.command else self._conductor.known_latencies(series)
        known = [*timed, orders.first_latency_s[series]]
        latency_s = visits.guess_latency_s(known, point)
        assert latency_s is not None  # the first run is always known
        threads = visits.count_cores(point, orders.threads)
        idle_c = self._idle_c[board.name]
        start_c = None if idle_c is None else idle_c + visits.WARM_K
        spec = visits.plan_visit(orders.window, latency_s, threads, orders.memory_bytes, start_c)
        spec = program.fit(spec)
        outcome, outputs = await board.run(spec, program.library, program.inputs)
        if outcome.status is Status.NOISY and not outcome.latency_s:  # the board was too warm to begin
            orders.say(f"{point.key} on {board.name}: {outcome.message}; measured all the same")
            outcome, outputs = await board.run(dataclasses.replace(spec, start=None), program.library, program.inputs)
        return program.read(outcome, outputs)

    def _keep(self, series: Series, measurement: PointMeasurement, outcome: Outcome) -> None:
        number = self._numbers[series] = self._numbers.get(series, 0) + 1
        variant, batch = series
        self._store.sweeps.add_point(
            self._orders.sweep,
            variant=variant,
            batch=batch,
            key=measurement.key,
            visit=number,
            board=measurement.board,
            measurement=stored.measurement_to_dict(measurement),
            outcome=outcome.to_dict(),
        )
        self._conductor.add(series, measurement)
        metric = self._orders.programs[series].metrics[0]
        self._orders.say(self._orders.progress.count(describe_visit(series, measurement, metric)))


def describe_visit(series: Series, measurement: PointMeasurement, metric: ProgramMetric = LATENCY) -> str:
    """Describe a visit in one line."""
    variant, batch = series
    name = f"{variant} x{batch}" if batch > 1 else variant
    words = [f"{measurement.key}: {name} {metric.format(measurement.latency.value)}"]
    if measurement.power is not None:
        words.append(f"{measurement.power.value:.3g} W")
    if measurement.energy is not None:
        words.append(joule_scale([measurement.energy.value]).text(measurement.energy.value))
    text = ", ".join(words)
    return f"{text}; does not count: {measurement.invalid}" if measurement.invalid else text
