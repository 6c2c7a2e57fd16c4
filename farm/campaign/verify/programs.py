"""The programs of a verification, shared by all operating points of a workload on a board type.

A candidate is replayed, built, run once on a board and compared with the unscheduled function, which is built and run
the same way. Both get equal seeded inputs, and take ordinary weights.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy.typing as npt

from device_agent.protocol import (
    EnergySpec,
    FaultSide,
    Limits,
    MeasureSpec,
    OperatingPoint,
    Outcome,
    RunSpec,
    Status,
    TensorSpec,
)
from farm.artifacts.verify import OutputComparison, compare
from farm.campaign.verify.coroutines import Loop, Running, done, until
from farm.crew.held_board import Ended
from farm.errors import InternalError
from farm.measure.arrays import read_arguments
from farm.search import gpus
from farm.search.codegen.build_pool import BuildResult
from farm.types.campaigns import Order, TypeOrder
from farm.values import UNTUNED, Workload

# Board type and workload (hash).
Place = tuple[str, str]
# Faults of boards or of unknown cause are retried this often before a program is given up.
MAX_FAULTS = 4
# A program that was present when this many compilers or boards went down is given up: one more than in a search, since
# it ran well there once.
MAX_LOSSES = 3
# Every candidate was built and run within these deadlines in the search: missing one here means a slow host or board.
_TIMEOUTS = (Status.BUILD_TIMEOUT, Status.RUN_TIMEOUT)


class RecordKey(NamedTuple):
    """The key of a record: a workload (hash) on a board type at an operating point (text in trials and records)."""

    board_type: str
    workload: str
    point: str

    @property
    def place(self) -> Place:
        """The part that points share."""
        return self.board_type, self.workload


class Replay(NamedTuple):
    """A trace's scheduled function in TVM's JSON; None where there is none, with the reason.

    `lost`: the search died, which is no fault of the trace.
    """

    module_json: str | None
    reason: str = ""
    lost: bool = False


class VerificationWorker(Protocol):
    """Carries out what a verification asks for. Answers come as futures; each is of use once."""

    def replay(self, key: RecordKey, trace_json: str) -> Future[Replay]:
        """Have the campaign's search replay a trace. Any of `key`'s tasks will do for it."""

    def build(self, module_json: str, target: Mapping[str, Any], standalone: bool) -> Future[BuildResult]:
        """Compile a function (TVM's JSON) for a target."""

    def run(
        self, board: str, point: OperatingPoint, spec: RunSpec, program: bytes, inputs: Mapping[str, Any]
    ) -> Future[Ended]:
        """Run a program on a lent board with clocks at `point`; the answer has its outcome and outputs."""

    def measure(self, board: str, point: OperatingPoint, spec: MeasureSpec, library: bytes) -> Future[Ended]:
        """Time a library on a lent board with clocks at `point`; the answer has its outcome and the board's time."""

    def compile(self, job: Callable[[], Any], what: str) -> Future[Any]:
        """Run `job`, which compiles, in a process of its own. `what` begins the message of an error of the process."""


class Preparations:
    """Replays, builds and models under way, as a context: one begins once `may_begin`, which all wait for."""

    def __init__(self, may_begin: Callable[[], bool]) -> None:
        self._may_begin = may_begin
        self.count = 0

    async def __aenter__(self) -> None:
        self.count += 1
        try:
            await until(self._may_begin)
        except BaseException:
            self.count -= 1
            raise

    async def __aexit__(self, *_: object) -> None:
        self.count -= 1


class OutError(Exception):
    """A program is out; `Program.failure` says why. It never leaves `programs`."""


class Failure(NamedTuple):
    """Why a program is out. `status` is the candidate's own fault, None for any other."""

    status: Status | None
    message: str


def to_measure_spec(
    order: Order, of_type: TypeOrder, arguments: tuple[TensorSpec, ...], energy: EnergySpec | None = None
) -> MeasureSpec:
    """Return how a candidate is timed: with the order's full time-out, which a search shortens."""
    measure = order.measure
    return MeasureSpec(
        arguments=arguments,
        number=measure.number,
        repeat=measure.repeat,
        min_repeat_s=measure.min_repeat_s,
        cold_weights=True,
        device=gpus.device_of(of_type.target),
        seed=order.search.seed,
        energy=energy,
        limits=Limits(timeout_s=measure.timeout_s, memory_bytes=measure.memory_bytes, threads=of_type.threads),
    )


@dataclasses.dataclass(eq=False)
class Program:
    """A candidate, or with no candidate the unscheduled function, of one workload for one board type.

    `key` is one of its tasks. `library` is the timed code, with its hash and the compiler's time; `arguments` are its
    arguments then. `outputs`, and the time of the run that gave them, are an unscheduled function's; of a candidate
    only the comparison is kept. `checked_on` is the board that ran it last.
    """

    key: RecordKey
    candidate: str | None
    trace_json: str = ""
    arguments: tuple[TensorSpec, ...] = ()
    library: bytes | None = None
    sha256: str | None = None
    build_s: float | None = None
    outputs: list[npt.NDArray[Any]] | None = None
    latency_s: float | None = None
    comparison: OutputComparison | None = None
    failure: Failure | None = None
    faults: int = 0
    losses: int = 0
    checked_on: str = ""

    @property
    def settled(self) -> bool:
        """Whether the check of the program is over."""
        return self.failure is not None or self.outputs is not None or self.comparison is not None

    def give_up(self, status: Status | None, message: str) -> NoReturn:
        """Put it out. Raises OutError."""
        self.failure = Failure(status, message)
        raise OutError

    def judge(self, status: Status, message: str, *, lost: bool = False) -> FaultSide:
        """Return the side of a failure after which the program is tried again; raise OutError where it is out.

        Only a candidate's own fault puts it out at once. An unscheduled function has none: it is correct by definition.
        `lost`: a process or a board went down under it.
        """
        side = status.fault_side or FaultSide.FARM
        if side is FaultSide.CANDIDATE:
            if self.candidate is not None and status not in _TIMEOUTS:
                self.give_up(status, message)
            side = FaultSide.FARM
        self.faults += 1
        self.losses += lost
        if self.losses >= MAX_LOSSES:
            self.give_up(None, f"took {self.losses} compilers or boards down: {status}: {message}")
        if self.faults >= MAX_FAULTS:
            self.give_up(None, f"failed {self.faults} times: {status}: {message}")
        return side


@dataclasses.dataclass(eq=False)
class ProgramCheck:
    """A built program that a board should run once; `is_begun`: a board does. `answer` is there after it."""

    program: Program
    binary: bytes = dataclasses.field(repr=False)
    is_begun: bool = False
    answer: Ended | None = None


class Programs:
    """Programs, made on first request and kept while needed. They are large: libraries and outputs."""

    def __init__(
        self,
        loop: Loop,
        worker: VerificationWorker,
        preparations: Preparations,
        workloads: Mapping[Place, Workload],
        find_target: Callable[[Program], Mapping[str, Any]],
        note_retry: Callable[[Program, FaultSide, str], None],
    ) -> None:
        """`note_retry` gets each failure after which a program is tried again."""
        self._note_retry = note_retry
        self._loop, self._worker, self._preparations = loop, worker, preparations
        self._workloads, self._find_target = workloads, find_target
        self._programs: dict[tuple[str, str, str | None], tuple[Program, Running]] = {}
        self._checks: list[ProgramCheck] = []

    def find(self, key: RecordKey, candidate: str | None, trace_json: str = "") -> Program:
        """Return the program of a candidate (None: of the unscheduled function), and begin to prepare it."""
        name = (*key.place, candidate)
        if name not in self._programs:
            program = Program(key, candidate, trace_json)
            if candidate == UNTUNED:
                program.arguments = tuple(TensorSpec(*each) for each in self._workloads[key.place].arguments)
            reference = program if candidate is None else self.find(key, None)
            self._programs[name] = program, self._loop.start(self._prepare(program, reference))
        return self._programs[name][0]

    def find_check(self, place: Place) -> ProgramCheck | None:
        """Return a check that a board may begin now."""
        return next((each for each in self._checks if each.program.key.place == place and not each.is_begun), None)

    def count_checks(self, places: Collection[Place]) -> Counter[str]:
        """Count, by board type, the checks of programs needed now."""
        return Counter(each.program.key.board_type for each in self._checks if each.program.key.place in places)

    def drop(self, place: Place) -> None:
        """Drop a workload's programs. Late answers change nothing."""
        for name in [name for name in self._programs if name[:2] == place]:
            self._programs.pop(name)[1].close()

    async def _prepare(self, program: Program, reference: Program) -> None:
        """Prepare a program until it may be timed or is out. Failures by chance are tried again."""
        try:
            if program is reference:
                module_json = self._workloads[program.key.place].module_json
            else:
                module_json = await self._replay(program)
            binary = await self._build(program, module_json)
            await until(lambda: program is reference or reference.outputs is not None)
            outcome, outputs = await self._run(program, binary)
            if program is reference:
                program.outputs = outputs
                program.latency_s = statistics.median(outcome.latency_s) if outcome.latency_s else None
                return
            program.comparison = compare(outputs, reference.outputs or [])
            if not program.comparison.matches:
                program.give_up(Status.WRONG_RESULT, program.comparison.reason)
        except OutError:
            return

    async def _replay(self, program: Program) -> str:
        """Return its scheduled function, in TVM's JSON."""
        if program.trace_json:  # untuned code has no trace: it is the workload's function
            try:
                program.arguments = read_arguments(program.trace_json)
            except InternalError as error:
                program.give_up(None, error.message)
        while True:
            async with self._preparations:
                found = await done(self._worker.replay(program.key, program.trace_json))
            if found.module_json is not None:
                return found.module_json
            if not found.lost:  # not the candidate's fault: it ran once
                program.give_up(None, f"its trace cannot be replayed: {found.reason}")
            self._retry(program, Status.FARM_ERROR, found.reason)

    async def _build(self, program: Program, module_json: str) -> bytes:
        """Compile it for its check, which is returned, and a candidate also for being timed.

        The timed build takes packed weights.
        """
        target = self._find_target(program)
        built: dict[bool, bytes] = {}
        while missing := {True, program.candidate is None} - built.keys():
            async with self._preparations:
                asked = {alone: self._worker.build(module_json, target, alone) for alone in sorted(missing)}
                results = {alone: await done(each) for alone, each in asked.items()}
            for standalone, result in results.items():
                if result.status is not Status.OK or result.library is None:
                    self._retry(program, result.status, result.message, lost=result.died)
                    continue
                built[standalone] = result.library
                if not standalone:
                    program.library, program.sha256, program.build_s = result.library, result.sha256, result.seconds
        return built[True]

    async def _run(self, program: Program, binary: bytes) -> tuple[Outcome, list[npt.NDArray[Any]]]:
        """Have a board run it; `verification` chooses the board and the time."""
        while True:
            check = ProgramCheck(program, binary)
            self._checks.append(check)
            try:
                ended = await until(lambda: check.answer)  # noqa: B023  awaited here
            finally:
                self._checks.remove(check)
            outcome: Outcome = ended.result
            if outcome.status is Status.OK:
                return outcome, list(ended.outputs.values())
            self._retry(program, outcome.status, outcome.message, lost=outcome.status is Status.BOARD_LOST)

    def _retry(self, program: Program, status: Status, message: str, *, lost: bool = False) -> None:
        """Note a failure after which a program is tried again. Raises OutError where it is out instead."""
        side = program.judge(status, message, lost=lost)
        self._note_retry(program, side, f"{status}: {message}")
