"""A winner-to-be as a program: what is known of it, how it is run and timed, and when it is given up.

What happens to it is in `programs`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, NoReturn

import numpy.typing as npt

from device_agent.protocol import Engine, FaultSide, Limits, MeasureSpec, RunSpec, Status, TensorSpec
from farm.artifacts.verify import OutputComparison
from farm.campaign.order import Order, TypeOrder
from farm.campaign.verify.requests import WinnerKey
from farm.search import gpus
from farm.settings import Settings

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
