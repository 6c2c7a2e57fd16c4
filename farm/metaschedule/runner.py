"""`FarmRunner`: MetaSchedule's runner on leased boards of the farm, several at a time.

A candidate's own fault is an error to MetaSchedule; after a fault of a board or the farm it is measured elsewhere.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from device_agent.protocol import FaultSide, Limits, MeasureSpec, Outcome, TensorSpec
from farm import foreign, units
from farm import settings as farm_settings
from farm.connectivity.services import using_services
from farm.crew.choice import TargetPlan, plan_pool, plan_target
from farm.crew.crew import BoardPool, Crew, Tried, WorkStoppedError, wait_for
from farm.crew.driven_board import DrivenBoard
from farm.crew.leased_site import FleetSite
from farm.errors import UnavailableError, UsageError
from farm.inventory.board_types import require_board_type
from farm.metaschedule.tvm_objects import as_tvm_object, load_for_script
from farm.processes.machine import name_user
from farm.search.tvm_env import host_target, make_target
from farm.store import Store
from farm.store.standing import require_kept
from farm.types.documents import BoardInfo

# How long a script may have no board; `wait=` overrides it.
DEFAULT_WAIT_S = 60.0
# ELF's e_machine, from elf.h.
_ARCHITECTURES = {62: "x86_64", 183: "aarch64"}

T = TypeVar("T")

load_for_script()
import tvm.s_tir.meta_schedule as ms  # noqa: E402

# MetaSchedule commits a batch as soon as it is measured; this is many batches.
_KEPT = 4096


@dataclasses.dataclass(frozen=True)
class MeasuredLately:
    """A valid outcome, the seconds that it kept the board busy, and the board's type."""

    outcome: Outcome
    board_s: float
    board_type: str


class Recent:
    """The last outcomes by their samples, which are unique to a run. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_samples: OrderedDict[tuple[float, ...], MeasuredLately] = OrderedDict()
        # The board type of the newest runner; "" before there is one.
        self.board_type = ""

    def add(self, measured: MeasuredLately) -> None:
        """Remember an outcome."""
        with self._lock:
            self._by_samples[tuple(measured.outcome.latency_s)] = measured
            if len(self._by_samples) > _KEPT:
                self._by_samples.popitem(last=False)

    def find(self, samples_s: Sequence[float]) -> MeasuredLately | None:
        """Return the outcome with exactly these samples; None where no FarmRunner made them."""
        with self._lock:
            return self._by_samples.get(tuple(samples_s))


recent = Recent()


@as_tvm_object
class FarmFuture(ms.runner.PyRunnerFuture):
    """One candidate's result, as MetaSchedule's future."""

    def __init__(self, work: Future[Tried], board_type: str) -> None:
        super().__init__()
        self._work, self._board_type = work, board_type

    def done(self) -> bool:
        return self._work.done()

    def result(self) -> Any:
        """Wait for the result. Raises UnavailableError where there is no board."""
        found = await_boards(self._work)
        outcome = found.outcome
        if outcome.status.fault_side is None:
            recent.add(MeasuredLately(outcome, found.board_s, self._board_type))
            return ms.runner.RunnerResult(list(outcome.latency_s), None)
        return ms.runner.RunnerResult(None, explain(outcome, found.tried))


def await_boards(future: Future[T]) -> T:
    """Return a reply of boards; all their calls, and the wait for a board, have deadlines.

    Raises UnavailableError where there is no board or the runner was closed.
    """
    try:
        return wait_for(future)
    except WorkStoppedError:
        raise UnavailableError("the runner was closed before this was measured") from None


def explain(outcome: Outcome, tried: Sequence[str]) -> str:
    """Describe a candidate without a time for MetaSchedule: whose fault it was, and the message."""
    text = f"{outcome.status}: {outcome.message}" if outcome.message else str(outcome.status)
    if outcome.status.fault_side is FaultSide.CANDIDATE:
        return f"FarmRunner: {text}"
    where = ", ".join(dict.fromkeys(tried))
    return f"FarmRunner: not the candidate's fault; measured {len(tried)} times (on {where}), the last: {text}"


@as_tvm_object
class FarmRunner(ms.runner.PyRunner):
    """Measures candidates on boards of the farm; pass it to `tune_*` as `runner=`.

    `board_type` chooses the boards, `board` a single one, `boards` limits their number (default: all free ones of the
    type). `number`, `repeat`, `min_repeat_ms` and `timeout_sec` are per candidate (default: `FARM_MEASURE_…`). `wait`
    limits how long there may be work but no board, in seconds or as `"10m"`.

    Boards are leased until `close`, the end of a `with` block, or the end of the script.
    """

    def __init__(
        self,
        board_type: str | None = None,
        *,
        board: str | None = None,
        boards: int | None = None,
        number: int | None = None,
        repeat: int | None = None,
        min_repeat_ms: float | None = None,
        timeout_sec: float | None = None,
        wait: float | str = DEFAULT_WAIT_S,
        note: Callable[[str], None] | None = None,
    ) -> None:
        """Start leasing boards, and the farm's services if none run; `note` receives messages for people.

        Raises UsageError for invalid arguments, UnavailableError and DeadlineError where the services do not start.
        """
        super().__init__()
        self._pid = os.getpid()
        settings = farm_settings.load()
        wait_s = _to_seconds(wait)
        if boards is not None and boards < 1:
            raise UsageError(f"boards must be at least 1, not {boards}")
        note = _once(note or _say)
        with Store(settings.store_location) as store:
            rows = store.boards.fetch()
        board_type = board_type or _find_type(rows, board)
        self.board_type = board_type
        self._type = require_board_type(board_type)
        pool = plan_pool(rows, board_type, board)
        for row in rows:
            if row.name in pool:
                require_kept(row)
        self._spec = _plan_spec(settings, number, repeat, min_repeat_ms, timeout_sec)
        self._plan: TargetPlan | None = None
        with contextlib.ExitStack() as stack:
            services = stack.enter_context(using_services(settings, pool, note))
            purpose = f"script {Path(sys.argv[0]).name or 'python'} of {name_user()}"

            def open_site(own: Store) -> FleetSite:
                return FleetSite(services, own, board_type, board, purpose, wait_s, note)

            self._crew = stack.enter_context(Crew(settings, note))
            self._boards = BoardPool(self._crew, open_site, min(boards or len(pool), len(pool)), note)
            self._stack = stack.pop_all()
        recent.board_type = board_type
        atexit.register(self.close)

    @property
    def target(self) -> Any:
        """The target of these boards' code, for `tune_*`; waits for the first board. Raises UnavailableError.

        For a virtual board without a described core it is this machine's with the board's number of cores.
        """
        plan = self._require_plan()
        return make_target(host_target(plan.cores) if plan.config is None else plan.config)

    def run(self, runner_inputs: Sequence[Any]) -> list[Any]:
        """Measure for MetaSchedule: return a future per `RunnerInput`, in order. Raises UnavailableError."""
        threads, description = self._require_plan().threads, self._description
        futures = []
        for each in runner_inputs:
            if str(each.device_type) != "cpu":
                raise UsageError(f"the farm's boards run CPU code only, not {each.device_type}")
            spec = dataclasses.replace(
                self._spec,
                arguments=tuple(_to_argument(about) for about in each.args_info),
                limits=dataclasses.replace(self._spec.limits, threads=threads),
            )
            if (path := Path(str(each.artifact_path))).suffix != ".so":
                raise UsageError(
                    f"a FarmRunner measures linked libraries, not {path.name}",
                    "Pass FarmBuilder() to `tune_*` as well.",
                )
            library = path.read_bytes()
            require_runnable(library, description)
            work = self._boards.run(functools.partial(DrivenBoard.measure, spec=spec, library=library))
            futures.append(FarmFuture(self._crew.start(work), self.board_type))
        return futures

    def close(self) -> None:
        """Give the boards back. Safe to call twice."""
        if os.getpid() != self._pid:  # a fork of the script ends: its parent still needs them
            return
        atexit.unregister(self.close)
        self._stack.close()

    def _require_plan(self) -> TargetPlan:
        if self._plan is None:
            self._description = await_boards(self._crew.start(self._boards.describe()))
            self._plan = plan_target(self._type, self._description, len(os.sched_getaffinity(0)))
        return self._plan


def _find_type(rows: Sequence[BoardInfo], board: str | None) -> str:
    """Return the type of a named board. Raises UsageError."""
    if board is None:
        raise UsageError("no boards named: pass FarmRunner(board_type=…) or FarmRunner(board=…)")
    for row in rows:
        if row.name == board:
            return str(row.board_type)
    raise UsageError(f"there is no board {board!r}", "See `farm board list`.")


def _plan_spec(
    settings: farm_settings.Settings,
    number: int | None,
    repeat: int | None,
    min_repeat_ms: float | None,
    timeout_sec: float | None,
) -> MeasureSpec:
    """Return how candidates are measured, without their arguments. Raises UsageError."""
    for name, value in (("number", number), ("repeat", repeat), ("timeout_sec", timeout_sec)):
        if value is not None and not value > 0:
            raise UsageError(f"{name} must be above 0, not {value}")
    if min_repeat_ms is not None and not min_repeat_ms >= 0:
        raise UsageError(f"min_repeat_ms must be >= 0, not {min_repeat_ms}")
    return MeasureSpec(
        arguments=(),
        number=number or settings.measure_number,
        repeat=repeat or settings.measure_repeat,
        min_repeat_s=settings.measure_min_repeat_s if min_repeat_ms is None else min_repeat_ms / 1e3,
        seed=settings.seed,
        limits=Limits(timeout_s=timeout_sec or settings.measure_timeout_s, memory_bytes=settings.measure_memory_bytes),
    )


def require_runnable(library: bytes, description: Mapping[str, Any]) -> None:
    """Raise UsageError for code of another architecture, with which every candidate would fail."""
    architecture = _ARCHITECTURES.get(int.from_bytes(library[18:20], "little"))
    wanted = str(description["architecture"])
    if library[:4] == b"\x7fELF" and architecture is not None and architecture != wanted:
        raise UsageError(
            f"candidates are built for {architecture}, but {description['name']} is {wanted}",
            "Tune for the boards' own target: FarmRunner's `target`.",
        )


def _to_argument(about: Any) -> TensorSpec:
    if not isinstance(about, ms.arg_info.TensorInfo):
        raise UsageError(f"the farm fills tensor arguments only, not {about}")
    return TensorSpec(tuple(int(size) for size in about.shape), str(about.dtype))


def _to_seconds(wait: float | str) -> float:
    try:
        seconds = units.parse_duration_s(wait) if isinstance(wait, str) else float(wait)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"wait={wait!r} is not a duration", f"Examples: {units.DURATION_EXAMPLES}.")
    return seconds


def _once(note: Callable[[str], None]) -> Callable[[str], None]:
    """Drop repeated messages, as when several boards are awaited."""
    said = [""]

    def say(text: str) -> None:
        if text != said[0]:
            said[0] = text
            note(text)

    return say


def _say(text: str) -> None:
    print(f"farm: {foreign.show_controls(text)}", file=sys.stderr, flush=True)
