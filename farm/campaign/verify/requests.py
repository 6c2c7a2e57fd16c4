"""What a verification of winners asks of those who drive it, who set `answer`. Who decides is `winners`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from device_agent.protocol import MeasureSpec, OperatingPoint, Outcome, RunSpec
from farm.crew.coroutines import Promise
from farm.measure.arrays import Arrays
from farm.search.build.build_pool import BuildResult

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
