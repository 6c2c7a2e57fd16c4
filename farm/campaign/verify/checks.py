"""Programs of winners-to-be: a candidate replayed and built, run once, and compared with the unscheduled function.

Both run on a board on equal seeded inputs, built so that each computes the right thing from ordinary weights. When this
is done, and what follows, is for `winners` to say.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any, Literal, NamedTuple

import numpy.typing as npt

from device_agent.protocol import Engine, FaultSide, Limits, MeasureSpec, Outcome, RunSpec, Status, TensorSpec
from farm.artifacts.verify import Comparison, compare
from farm.campaign.order import Order, TypeOrder
from farm.errors import InternalError
from farm.measure.arguments import read_arguments
from farm.measure.arrays import Arrays
from farm.search import gpus
from farm.search.build_pool import BuildResult
from farm.settings import Settings

# Faults that are nobody's, or a board's, are met again this often before a program is given up.
MAX_FAULTS = 4
# A program that was there when so many compilers or boards went down is given up. One more than in a search, since it
# ran well there once.
MAX_LOSSES = 3

# What is done with a program next. `timing` is the build that is measured: packed weights are taken as packed.
What = Literal["replay", "timing", "checking", "run"]


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

    `module_json` is what is compiled, `arguments` are what it takes when it is timed. `library` is what is timed, with
    its hash and the compiler's time. `outputs`, and the time of the run that gave them, stay only for an unscheduled
    function; of a candidate only the comparison is kept. `asked` are answers that are awaited, `checked_on` says which
    board ran it last.
    """

    board_type: str
    workload: str
    candidate: str | None
    trace_json: str = ""
    module_json: str | None = None
    arguments: tuple[TensorSpec, ...] = ()
    library: bytes | None = None
    sha256: str | None = None
    build_s: float | None = None
    checking: bytes | None = None
    outputs: list[npt.NDArray[Any]] | None = None
    latency_s: float | None = None
    comparison: Comparison | None = None
    failure: Failure | None = None
    asked: set[What] = dataclasses.field(default_factory=set)
    faults: int = 0
    losses: int = 0
    checked_on: str = ""

    @property
    def place(self) -> tuple[str, str]:
        """Whose program it is: board type and workload."""
        return self.board_type, self.workload

    @property
    def settled(self) -> bool:
        """Whether it is known if the program may be used; the check is what takes longest."""
        if self.failure is not None:
            return True
        if self.candidate is None:
            return self.outputs is not None
        return self.comparison is not None and self.library is not None

    def plan(self) -> list[What]:
        """What can be done now without a board; the caller marks it as asked."""
        if self.settled:
            return []
        if self.module_json is None:
            wanted: list[What] = ["replay"]
        else:
            has_output = self.outputs is not None or self.comparison is not None
            wanted = ["checking"] if self.checking is None and not has_output else []
            if self.candidate is not None and self.library is None:
                wanted.append("timing")
        return [what for what in wanted if what not in self.asked]

    def can_run(self, reference: Program) -> bool:
        """Whether a board may run it now: built, not run yet, and what to compare it with is there."""
        if self.settled or self.checking is None or "run" in self.asked or self.comparison is not None:
            return False
        return self is reference or reference.outputs is not None

    def on_replayed(self, module_json: str | None, message: str) -> None:
        """A trace that fits no more puts a candidate out; that is not its fault, it ran once."""
        if module_json is None:
            self.failure = Failure(None, f"its trace cannot be replayed: {message}")
            return
        if self.trace_json:  # untuned code has none, and takes what its workload takes
            try:
                self.arguments = read_arguments(self.trace_json)
            except InternalError as error:
                self.failure = Failure(None, error.message)
        self.module_json = module_json

    def on_built(self, what: What, result: BuildResult) -> None:
        """A build ended."""
        if result.status is Status.OK and result.library is not None:
            if what == "timing":
                self.library, self.sha256, self.build_s = result.library, result.sha256, result.seconds
            else:
                self.checking = result.library
        elif result.status.fault_side is FaultSide.CANDIDATE:
            self.failure = Failure(result.status, result.message)
        else:
            self.on_fault(f"{result.status}: {result.message}", lost=result.died)

    def on_ran(self, outcome: Outcome, outputs: Arrays, reference: Program) -> None:
        """A run ended; outputs of a candidate are compared with those of the unscheduled function."""
        if outcome.status is Status.OK:
            self.checking = None
            if self is reference:
                self.outputs = list(outputs.values())
                self.latency_s = statistics.median(outcome.latency_s) if outcome.latency_s else None
                return
            comparison = compare(list(outputs.values()), reference.outputs or [])
            self.comparison = comparison
            if not comparison.matches:
                self.failure = Failure(Status.WRONG_RESULT, comparison.reason)
        elif outcome.status.fault_side is FaultSide.CANDIDATE:
            self.failure = Failure(outcome.status, outcome.message)
        else:
            self.on_fault(f"{outcome.status}: {outcome.message}", lost=outcome.status is Status.BOARD_LOST)

    def on_fault(self, message: str, *, lost: bool = False) -> None:
        """Something failed that is not known to be the program's doing: it is tried again until it was often enough.

        `lost`: a process or a board went down under it.
        """
        self.faults += 1
        self.losses += lost
        if self.losses >= MAX_LOSSES:
            self.failure = Failure(None, f"took {self.losses} compilers or boards down: {message}")
        elif self.faults >= MAX_FAULTS:
            self.failure = Failure(None, f"failed {self.faults} times: {message}")
