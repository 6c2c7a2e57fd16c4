"""The programs that a verification works with, shared by all operating points of a workload on a board type.

A candidate is replayed, built, run once on a board and compared with the unscheduled function, which went the same way.
Both get equal seeded inputs, and are built so that each computes the right thing from ordinary weights.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from device_agent.protocol import (
    Engine,
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
from farm.campaign.order import Order, TypeOrder
from farm.crew.coroutines import Loop, Promise, Running, until
from farm.errors import InternalError
from farm.measure.arrays import Arrays, read_arguments
from farm.search import gpus
from farm.search.build.build_pool import BuildResult
from farm.settings import Settings
from farm.values import UNTUNED

# Board type and workload (hash).
Place = tuple[str, str]


class WinnerKey(NamedTuple):
    """What has one winner: a workload (hash) on a board type at an operating point (text in trials and records)."""

    board_type: str
    workload: str
    point: str

    @property
    def place(self) -> Place:
        """What points share."""
        return self.board_type, self.workload


class Replay(NamedTuple):
    """A trace's scheduled function in TVM's JSON; None where there is none, with the reason.

    `lost`: the search died, which is no fault of the trace.
    """

    module_json: str | None
    reason: str = ""
    lost: bool = False


@dataclasses.dataclass(eq=False)
class ReplayWanted(Promise[Replay]):
    """Have the campaign's search replay a trace. Any of `key`'s tasks will do for it."""

    key: WinnerKey
    trace_json: str = dataclasses.field(repr=False)


@dataclasses.dataclass(eq=False)
class BuildWanted(Promise[BuildResult]):
    """Compile a function (TVM's JSON) for a target."""

    module_json: str = dataclasses.field(repr=False)
    target: Mapping[str, Any]
    standalone: bool


@dataclasses.dataclass(eq=False)
class RunWanted(Promise[tuple[Outcome, Arrays]]):
    """Run a program on a board that was given, clocks held at `point`; the answer has its outputs."""

    board: str
    point: OperatingPoint
    spec: RunSpec
    program: bytes = dataclasses.field(repr=False)
    inputs: dict[str, npt.NDArray[np.generic]] = dataclasses.field(repr=False)


@dataclasses.dataclass(eq=False)
class MeasureWanted(Promise[tuple[Outcome, float]]):
    """Time a library on a board that was given, clocks held at `point`.

    The answer says for how many seconds the board was busy with it.
    """

    board: str
    point: OperatingPoint
    spec: MeasureSpec
    library: bytes = dataclasses.field(repr=False)


@dataclasses.dataclass(eq=False)
class ModelWanted(Promise[Any]):
    """Have `job` done in a process of its own, which compiles; the answer is what it returns, or the FarmError that it
    raises, whose message begins with `what` where the process ends or takes too long.
    """

    job: Callable[[], Any] = dataclasses.field(repr=False)
    what: str


Request = ReplayWanted | BuildWanted | RunWanted | MeasureWanted | ModelWanted
Preparing = ReplayWanted | BuildWanted | ModelWanted
R = TypeVar("R", ReplayWanted, BuildWanted, RunWanted, MeasureWanted, ModelWanted)


class Outbox:
    """What is asked for and was not handed over yet, and what is being prepared: replayed or built."""

    def __init__(self) -> None:
        self._waiting: list[Request] = []
        self._preparing: list[Preparing] = []

    @property
    def is_preparing(self) -> bool:
        """Whether a replay, a build or a model was asked for that is not answered."""
        return any(request.answer is None for request in self._preparing)

    def ask(self, request: R) -> R:
        """Have it handed over; returns it, to be awaited."""
        self._waiting.append(request)
        if isinstance(request, Preparing):
            self._preparing.append(request)
        return request

    def hand_over(self, prepare: bool) -> list[Request]:
        """Each request once; those that prepare only with `prepare`."""
        self._preparing = [request for request in self._preparing if request.answer is None]
        waiting, self._waiting = self._waiting, []
        if not prepare:
            self._waiting = [request for request in waiting if isinstance(request, Preparing)]
        return [request for request in waiting if request not in self._waiting]

    def forget(self, board: str) -> None:
        """Nothing is wanted any more of a board that is gone."""
        self._waiting = [
            request for request in self._waiting if isinstance(request, Preparing) or request.board != board
        ]


# Faults that are nobody's, or a board's, are met again this often before a program is given up.
MAX_FAULTS = 4
# A program that was there when so many compilers or boards went down is given up. One more than in a search, since it
# ran well there once.
MAX_LOSSES = 3
# Every candidate was built and run within these deadlines in the search: missing one here means a slow host or board.
_TIMEOUTS = (Status.BUILD_TIMEOUT, Status.RUN_TIMEOUT)


class OutError(Exception):
    """A program is out; `Program.failure` says why. It never leaves `programs`."""


class Failure(NamedTuple):
    """Why a program is out. `status` is the candidate's own fault, None where it is somebody else's."""

    status: Status | None
    message: str


def to_run_spec(settings: Settings, device: str) -> RunSpec:
    """How a program is run once for its output. Unscheduled code is slow: it gets the time that a model gets."""
    return RunSpec(
        Engine.KERNEL,
        device=device,
        limits=Limits(timeout_s=settings.model_timeout_s, memory_bytes=settings.model_memory_bytes),
    )


def to_measure_spec(program: Program, order: Order, of_type: TypeOrder) -> MeasureSpec:
    """How a candidate is timed: as in the search, but with all the time that the order allows."""
    measure = order.measure
    return MeasureSpec(
        arguments=program.arguments,
        number=measure.number,
        repeat=measure.repeat,
        min_repeat_s=measure.min_repeat_s,
        cold_weights=True,
        device=gpus.device_of(of_type.target),
        seed=order.search.seed,
        limits=Limits(timeout_s=measure.timeout_s, memory_bytes=measure.memory_bytes, threads=of_type.threads),
    )


@dataclasses.dataclass(eq=False)
class Program:
    """A candidate, or with no candidate the unscheduled function, of one workload for one board type.

    `key` is one of the tasks that it is for. `library` is what is timed, with its hash and the compiler's time;
    `arguments` are what it takes then. `outputs`, and the time of the run that gave them, are an unscheduled
    function's; of a candidate only the comparison is kept. `checked_on` says which board ran it last.
    """

    key: WinnerKey
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
        """Whether it is known if the program may be used."""
        return self.failure is not None or self.outputs is not None or self.comparison is not None

    def give_up(self, status: Status | None, message: str) -> NoReturn:
        """It is out. Raises OutError."""
        self.failure = Failure(status, message)
        raise OutError

    def judge(self, status: Status, message: str, *, lost: bool = False) -> FaultSide:
        """Return who is to blame for a failure after which the program is tried again; raise OutError where it is out.

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
class CheckWanted(Promise[tuple[Outcome, Arrays]]):
    """A program, built for it, that a board should run once; `is_begun`: one does."""

    program: Program
    binary: bytes = dataclasses.field(repr=False)
    is_begun: bool = False


class Programs:
    """Made when they are first asked for; held until nobody needs them. They are large: libraries and outputs."""

    def __init__(
        self,
        loop: Loop,
        outbox: Outbox,
        workloads: Mapping[Place, Mapping[str, Any]],
        find_target: Callable[[Program], Mapping[str, Any]],
        note_retry: Callable[[Program, FaultSide, str], None],
    ) -> None:
        """`workloads` are rows of the store. `note_retry` gets each failure after which a program is tried again."""
        self._note_retry = note_retry
        self._loop, self._outbox, self._workloads, self._find_target = loop, outbox, workloads, find_target
        self._programs: dict[tuple[str, str, str | None], tuple[Program, Running]] = {}
        self._checks: list[CheckWanted] = []

    def find(self, key: WinnerKey, candidate: str | None, trace_json: str = "") -> Program:
        """The program of a candidate; None: of the unscheduled function. It is prepared from now on."""
        name = (*key.place, candidate)
        if name not in self._programs:
            about = self._workloads[key.place]
            program = Program(key, candidate, trace_json)
            if candidate == UNTUNED:
                program.arguments = tuple(TensorSpec(tuple(shape), dtype) for shape, dtype in about["arguments"])
            reference = program if candidate is None else self.find(key, None)
            self._programs[name] = program, self._loop.start(self._prepare(program, reference))
        return self._programs[name][0]

    def find_check(self, place: Place) -> CheckWanted | None:
        """One that a board may begin now."""
        return next((each for each in self._checks if each.program.key.place == place and not each.is_begun), None)

    def count_checks(self, places: Collection[Place]) -> Counter[str]:
        """By board type, how many of those needed now are made or could be."""
        return Counter(each.program.key.board_type for each in self._checks if each.program.key.place in places)

    def drop(self, place: Place) -> None:
        """Nobody needs those of a workload any more. Answers that come all the same change nothing."""
        for name in [name for name in self._programs if name[:2] == place]:
            self._programs.pop(name)[1].close()

    async def _prepare(self, program: Program, reference: Program) -> None:
        """What happens to a program, until it may be timed or is out. What fails by chance is tried again."""
        try:
            if program is reference:
                module_json = str(self._workloads[program.key.place]["module_json"])
            else:
                module_json = await self._replay(program)
            binary = await self._build(program, module_json)
            await until(lambda: program is reference or reference.outputs is not None)
            outcome, outputs = await self._run(program, binary)
            if program is reference:
                program.outputs = list(outputs.values())
                program.latency_s = statistics.median(outcome.latency_s) if outcome.latency_s else None
                return
            program.comparison = compare(list(outputs.values()), reference.outputs or [])
            if not program.comparison.matches:
                program.give_up(Status.WRONG_RESULT, program.comparison.reason)
        except OutError:
            return

    async def _replay(self, program: Program) -> str:
        """Its scheduled function, in TVM's JSON."""
        if program.trace_json:  # untuned code has none, and takes what its workload takes
            try:
                program.arguments = read_arguments(program.trace_json)
            except InternalError as error:
                program.give_up(None, error.message)
        while True:
            found = await self._outbox.ask(ReplayWanted(program.key, program.trace_json))
            if found.module_json is not None:
                return found.module_json
            if not found.lost:  # not the candidate's fault: it ran once
                program.give_up(None, f"its trace cannot be replayed: {found.reason}")
            self._retry(program, Status.FARM_ERROR, found.reason)

    async def _build(self, program: Program, module_json: str) -> bytes:
        """Compile it for its check, which is returned, and a candidate beside that for being timed.

        For timing, packed weights are taken as packed.
        """
        target = self._find_target(program)
        built: dict[bool, bytes] = {}
        while missing := {True, program.candidate is None} - built.keys():
            asked = {alone: self._outbox.ask(BuildWanted(module_json, target, alone)) for alone in sorted(missing)}
            for standalone, request in asked.items():
                result = await request
                if result.status is not Status.OK or result.library is None:
                    self._retry(program, result.status, result.message, lost=result.died)
                    continue
                built[standalone] = result.library
                if not standalone:
                    program.library, program.sha256, program.build_s = result.library, result.sha256, result.seconds
        return built[True]

    async def _run(self, program: Program, binary: bytes) -> tuple[Outcome, Arrays]:
        """Have a board run it; `remeasurement` chooses the board and the time."""
        while True:
            check = CheckWanted(program, binary)
            self._checks.append(check)
            try:
                outcome, outputs = await check
            finally:
                self._checks.remove(check)
            if outcome.status is Status.OK:
                return outcome, outputs
            self._retry(program, outcome.status, outcome.message, lost=outcome.status is Status.BOARD_LOST)

    def _retry(self, program: Program, status: Status, message: str, *, lost: bool = False) -> None:
        """Note a failure after which a program is tried again. Raises OutError where it is out instead."""
        side = program.judge(status, message, lost=lost)
        self._note_retry(program, side, f"{status}: {message}")
