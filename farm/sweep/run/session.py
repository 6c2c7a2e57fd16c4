"""A sweep while it runs: boards, programs, their work, and the store's row, which is closed at the end.

`runner` chooses the sweep, its grid and goal.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from device_agent.protocol import Description, Status
from farm.artifacts.make import list_candidates
from farm.crew import visits
from farm.crew.choice import TargetPlan, plan_target
from farm.crew.crew import open_crew
from farm.crew.driven_board import DrivenBoard
from farm.errors import BoardUnsafeError, FarmError, PermanentError, TransientError, UnavailableError, UsageError
from farm.inventory.board_types import BoardType
from farm.models.source import ModelSource
from farm.points.grid import Coupling, GridRequest, leave_out, plan_grid
from farm.points.values import Estimate, Goal, Grid, GridPoint
from farm.processes.jobs import compile_in_subprocess
from farm.programs.order import ProgramOrder
from farm.search import gpus
from farm.settings import Settings
from farm.store import Store
from farm.sweep.plan import adaptive, order
from farm.sweep.plan.conductor import Conductor, RoundConductor, Series
from farm.sweep.plan.order import SweepOrder, SweepPlace, count_visits
from farm.sweep.run import programs
from farm.sweep.run.programs import SweepProgram, SweepRecipe
from farm.sweep.run.visitor import Progress, Visitor, VisitOrders
from farm.values import DEFAULT_POINT
from farm.version import __version__

# One more board of the type per this many points: each has to measure the anchor, too.
_POINTS_PER_BOARD = 4
_LOOK_S = 0.2
# How long to wait for a sensor whose driver loads late, and between two looks.
_SENSOR_WAIT_S, _SENSOR_PAUSE_S = 10.0, 2.0

Say = Callable[[str], None]


class SweepSession:
    """The boards of a running sweep, and their programs."""

    def __init__(
        self,
        wanted: SweepOrder,
        where: SweepPlace,
        board_type: BoardType,
        source: ModelSource | ProgramOrder,
        settings: Settings,
        store: Store,
        say: Say,
        made: Sequence[SweepProgram] = (),
    ) -> None:
        self._made = programs.list_programs(source, wanted.device) if isinstance(source, ProgramOrder) else made
        self._wanted, self._where, self._source = wanted, where, source
        self._type = gpus.require_device(board_type, wanted.device)
        self._settings, self._store, self._say = settings, store, say
        self._stack = contextlib.ExitStack()
        self._began = time.monotonic()
        self.programs: dict[Series, SweepProgram] = {}
        self.notes: list[str] = []
        self.first: DrivenBoard
        self._recipe: SweepRecipe | None = None

    def __enter__(self) -> SweepSession:
        purpose = f"sweep {self._source.name}"
        with self._stack:
            self._crew, self._add_more = self._stack.enter_context(
                open_crew(
                    self._settings, self._store, self._type, self._where.name, self._where.wait_s, purpose, self._say
                )
            )
            self._stack = self._stack.pop_all()
        self.first = self._crew.boards[0]
        return self

    def __exit__(self, *about: Any) -> None:
        self._stack.__exit__(*about)

    def connect(self, needs_power: bool = False) -> Description:
        """Return the first board's description; sensors that its type has may come seconds after it has started."""
        description = self._crew.call(self.first.open())
        until_s = time.monotonic() + _SENSOR_WAIT_S
        while needs_power and self._type.power.total and not description.total_rails and time.monotonic() < until_s:
            if order.explain_lost_rails(description.to_dict()):
                break
            self._say(f"waiting up to {_SENSOR_WAIT_S:g} s for the power sensor of {self.first.name}")
            time.sleep(_SENSOR_PAUSE_S)
            self.first.close()  # an agent looks for sensors before each session
            description = self._crew.call(self.first.open())
        return description

    def read_released_idle(self, description: Description) -> tuple[Estimate | None, str]:
        """Return the idle power with clocks as the board governs them, before any is pinned; or None, and why."""
        if not description.total_rails:
            return None, order.explain_lost_rails(description.to_dict())
        return self._crew.call(
            self.first.read_power(max(visits.LEAST_IDLE_S, visits.IDLE_SHARE * self._wanted.window_s))
        )

    def plan_grid(self, description: Description) -> tuple[Grid, list[str]]:
        """Return the board's grid after a trial; where nothing can be pinned there is one point."""
        coupling = Coupling.of(self._type)
        grid, notes = order.plan_order(self._wanted, description.clocks, coupling)
        # One point of each power mode: only the board knows for certain which of them need a reboot.
        tried = {each.point.power_mode: each for each in reversed(grid.points) if not each.point.is_empty}
        for point in reversed(tried.values()):
            try:
                self._crew.call(self.first.pin(point.point))
            except UnavailableError as error:
                if self._wanted.names_values:
                    raise UsageError(
                        error.message,
                        "Leave the clocks out to measure the board as it is, or run a clock helper there.",
                    ) from error
                notes.append(f"{error.message}; the board is measured as it is")
                return plan_grid(description.clocks, GridRequest(), coupling), notes
            except UsageError as error:
                smaller = leave_out(grid, point.key)
                if smaller is grid or self._wanted.names_modes or point.point.power_mode is None:
                    raise
                grid = smaller
                notes.append(f"power mode {point.point.power_mode} is left out: {error.message}")
        return grid, notes

    def require_grid(self, grid: Grid, description: Description) -> None:
        """Refuse a board that lacks points of a grid. Raises UsageError."""
        found, _ = order.plan_order(self._wanted, description.clocks, Coupling.of(self._type))
        if lost := {point.key for point in grid.points} - {point.key for point in found.points} - {DEFAULT_POINT}:
            raise UsageError(
                f"{description.name} does not have all points of this sweep: {sorted(lost)[0]}", "Begin a new sweep."
            )

    def prepare(self, description: Description, has_power: bool) -> list[str]:
        """Plan how the board is measured, with a total power in every visit or without; return messages about it."""
        target = plan_target(self._type, description.to_dict(), len(os.sched_getaffinity(0)))
        if target.config is not None:
            gpus.prepare_boards(target.config, self._settings)
        # The target of a GPU has one thread, which starts its kernels.
        self._threads = len(description.cores_online) if self._wanted.program else target.threads
        self._target = target
        self._window = visits.plan_window(description, self._wanted.window_s, self._type.power.update_period_s)
        self._needs_total = has_power
        self._simulated = description.simulated
        self.compile(target, description.simulated)
        self.programs = {program.series: program for program in self._made}
        return [note for note in (self._window.note, *dict.fromkeys(each.note for each in self._made)) if note]

    def compile(self, target: TargetPlan, simulated: bool) -> None:
        """Compile, unless programs were passed in or exist for this target. Raises what `compile_all` raises."""
        made_for = None if self._recipe is None else (self._recipe.target, self._recipe.simulated)
        if (self._made and self._recipe is None) or made_for == (target, simulated):
            return
        assert isinstance(self._source, ModelSource)  # a program is made already
        self._say(f"compiling {self._source.name}: {', '.join(self._wanted.variants)}")
        self._settings.share_linker_cache()
        self._recipe = SweepRecipe(
            self._source,
            self._wanted.shapes,
            self._type,
            target,
            simulated,
            list_candidates(self._source.sha256, self._type, simulated, self._store),
            self._settings.seed,
        )
        job = functools.partial(self._recipe.compile_all, self._wanted.variants, self._wanted.batches)
        self._made = compile_in_subprocess(job, self._source.name, say=self._say)

    def environment(self, description: Description) -> dict[str, Any]:
        """Describe the environment of the figures."""
        return {
            "tvm-farm": __version__,
            "agent": description.agent_version,
            "cpu": description.cpu_model,
            "cores": len(description.cores_online),
            "architecture": description.architecture,
            "engines": ", ".join(f"{name} {version}" for name, version in description.engine_versions.items()),
            "target": dict(self._target.config) if self._target.config else f"this host, {self._target.cores} cores",
            "threads": self._threads,
            "window_s": self._window.seconds,
            "idle_s": self._window.idle_s,
            "sensors": [
                f"{info.rail}: {info.driver}"
                + (f", every {info.update_period_s * 1e3:.3g} ms" if info.update_period_s else "")
                for info in description.sensors
            ],
            "total": "+".join(description.total_rails) or None,
            "ambient_c": None,
        }

    def sweep(self, sweep: int, started_at: float, grid: Grid, goal: Goal, before: dict[Series, Any]) -> None:
        """Measure until nothing is left; the store's row is closed at any end."""
        settings = adaptive.PlannerSettings(self._wanted.exhaustive, self._wanted.budget_points, self._wanted.seed)
        conductor = Conductor(grid, goal, settings, self._wanted.series, before)
        visitor: list[Visitor] = []
        try:
            first = self._run_first(conductor.anchor)
            numbers: dict[Series, int] = {}  # the highest of each series' visits
            for row in self._store.sweeps.fetch_points(sweep):
                series = (row.variant, row.batch)
                numbers[series] = max(numbers.get(series, 0), row.visit)
            orders = VisitOrders(
                sweep=sweep,
                started_at=started_at,
                programs=self.programs,
                window=self._window,
                threads=self._threads,
                memory_bytes=self._settings.model_memory_bytes,
                needs_total=self._needs_total,
                say=self._say,
                progress=Progress(count_visits(self._wanted, grid) - sum(map(len, before.values()))),
                first_latency_s=first,
            )
            if self._where.name is None:
                self._add_more((self._where.boards or max(1, len(grid) // _POINTS_PER_BOARD)) - 1)
            boards = [board.name for board in self._crew.boards]
            if len(boards) > 1 and self._simulated:  # they share the points in rounds
                conductor = RoundConductor(conductor.grid, goal, settings, conductor.series, before, boards)
            self._wait(orders, conductor, numbers, visitor)
        except BaseException as error:
            may_resume = isinstance(error, KeyboardInterrupt | TransientError | UnavailableError)
            # A full store refuses this too; the first error is the one to report.
            with contextlib.suppress(FarmError):
                state = "interrupted" if may_resume else "failed"
                self._store.sweeps.finish(sweep, state, self._summarise(conductor, visitor))
            if may_resume:
                self._say(f"`farm sweep run --resume {sweep}` goes on from here")
            raise
        state = "voided" if conductor.void else "finished"
        self._store.sweeps.finish(sweep, state, self._summarise(conductor, visitor))

    def _run_first(self, anchor: GridPoint) -> dict[Series, tuple[GridPoint, float]]:
        """Run every program once at the anchor: to check it, to compare all variants, and for a rough latency."""
        found: dict[Series, tuple[GridPoint, float]] = {}
        outputs: dict[Series, list[Any]] = {}
        settings = self._settings
        threads = visits.count_cores(anchor, self._threads)
        spec = visits.plan_first_run(threads, settings.model_memory_bytes, settings.model_timeout_s)
        self._crew.call(self.first.pin(anchor.point))
        for series, program in self.programs.items():
            own = program.fit(spec if program.command is None else dataclasses.replace(spec, runs=1, warmup=0))
            outcome, arrays = self._crew.call(self.first.run(own, program.library, program.inputs))
            if not outcome.latency_s or outcome.status is Status.CRASHED:
                why = f"{outcome.status} {outcome.message}"
                hint = f"FARM_MODEL_TIMEOUT_S={4 * settings.model_timeout_s:g} gives its first run more time."
                late = outcome.status is Status.RUN_TIMEOUT
                raise PermanentError(f"{program.title} does not run on {self.first.name}: {why}", hint if late else "")
            program.read(outcome, arrays)
            # A program takes longer than what is measured between two of its lines.
            found[series] = (anchor, max(*outcome.latency_s, outcome.timing_s if program.command else 0.0))
            if program.command is None:
                outputs[series] = list(arrays.values())
        for text in programs.require_equal_outputs(outputs):
            self.notes.append(text)
            self._say(text)
        return found

    def _wait(
        self, orders: VisitOrders, conductor: Conductor, numbers: dict[Series, int], visitors: list[Visitor]
    ) -> None:
        """Run all boards and wait. A lost board leaves its work to the others. Raises the last loss."""
        working: dict[Future[None], DrivenBoard] = {}
        for board in self._crew.boards:
            visitor = Visitor(orders, conductor, numbers, self._crew.store)
            visitors.append(visitor)
            working[self._crew.start(visitor.work(board, opened=board is self.first))] = board
        lost: FarmError | None = None
        finished = 0
        while working:
            for future in concurrent.futures.wait(working, _LOOK_S, concurrent.futures.FIRST_COMPLETED).done:
                board = working.pop(future)
                error = future.exception()
                if error is None:
                    finished += 1
                elif isinstance(error, TransientError | UnavailableError) and not isinstance(error, BoardUnsafeError):
                    lost = error
                    self._say(f"going on without {board.name}: {error.message}")
                else:
                    raise error
        if lost is not None and not finished:
            raise lost

    def _summarise(self, conductor: Conductor, visitors: Sequence[Visitor]) -> dict[str, Any]:
        return {
            "reason": conductor.void or conductor.reason,
            "merged": [dataclasses.asdict(merge) for merge in conductor.grid.merged],
            "points": [point.key for point in conductor.grid.points],
            "notes": [*self.notes, *conductor.notes],
            "boards": [board.name for board in self._crew.boards],
            "cost": {
                "seconds": time.monotonic() - self._began,
                "measuring_s": sum(visitor.measuring_s for visitor in visitors),
                "running_s": sum(visitor.running_s for visitor in visitors),
                "pinning_s": sum(visitor.pinning_s for visitor in visitors),
            },
        }
