"""How a trial ended: statuses, whose fault each is, and the outcome with its evidence."""

from __future__ import annotations

import dataclasses

from device_agent.protocol.clocks import OperatingPoint
from device_agent.protocol.messages import Message, StrEnum
from device_agent.protocol.power import Energy, Evidence, PowerWindow


class FaultSide(StrEnum):
    """Who is to blame for a failed trial. Only `CANDIDATE` faults may reach the cost model."""

    CANDIDATE = "candidate"  # counts as a bad schedule
    BOARD = "board"  # re-run elsewhere; the board's health suffers
    FARM = "farm"  # re-run; neither candidate nor board is blamed
    SAMPLE = "sample"  # measure again


class Status(StrEnum):
    """How a trial ended."""

    OK = "ok"
    BUILD_FAILED = "build_failed"  # the compiler refused the candidate
    BUILD_TIMEOUT = "build_timeout"  # the compiler did not finish within its deadline
    LOAD_FAILED = "load_failed"  # the board could not load the library or lacks its entry function
    CRASHED = "crashed"  # the worker died from a signal; `signal` says which
    RUN_TIMEOUT = "run_timeout"  # the worker did not finish within its deadline
    OUT_OF_MEMORY = "out_of_memory"  # the worker hit its address-space limit
    WRONG_RESULT = "wrong_result"  # the output differs from the reference
    NOISY = "noisy"  # the samples spread too far
    CLOCK_DRIFTED = "clock_drifted"  # clocks after differ from clocks before
    THROTTLED = "throttled"  # the board throttled during the trial
    BOARD_LOST = "board_lost"  # the connection to the board ended before an answer came
    FARM_ERROR = "farm_error"  # the farm itself failed

    @property
    def fault_side(self) -> FaultSide | None:
        """The side to blame, or None for `OK`."""
        return _FAULT_SIDE.get(self)


_FAULT_SIDE = {
    Status.BUILD_FAILED: FaultSide.CANDIDATE,
    Status.BUILD_TIMEOUT: FaultSide.CANDIDATE,
    Status.LOAD_FAILED: FaultSide.CANDIDATE,
    Status.CRASHED: FaultSide.CANDIDATE,
    Status.RUN_TIMEOUT: FaultSide.CANDIDATE,
    Status.OUT_OF_MEMORY: FaultSide.CANDIDATE,
    Status.WRONG_RESULT: FaultSide.CANDIDATE,
    Status.NOISY: FaultSide.SAMPLE,
    Status.CLOCK_DRIFTED: FaultSide.SAMPLE,
    Status.THROTTLED: FaultSide.SAMPLE,
    Status.BOARD_LOST: FaultSide.BOARD,
    Status.FARM_ERROR: FaultSide.FARM,
}


@dataclasses.dataclass(frozen=True)
class Layer(Message):
    """One function of a model in one inference, over all its `calls`."""

    name: str
    calls: int
    latency_s: float


@dataclasses.dataclass(frozen=True)
class RunDetails(Message):
    """Details of a model's run.

    `first_s` is the first inference after loading, which warm-up drops; null for emulated code, which has no first-time
    costs. `peak_memory_bytes` is the worker's peak, interpreter and runtime included; null if it is not the board's
    memory. `layers`, if requested, are in the order of their first run, measured by instrumented runs after the timed
    ones. `others_s` are the median latencies of the instances beside the first one. `output` is the first and the last
    kilobyte that the last run of a `Command` wrote; `windows` are the times on the board's clock in s between which its
    energy counts; a virtual board took `stretch` times as long for it as the machine that ran it, as its output has it.
    """

    first_s: float | None
    peak_memory_bytes: int | None = None
    layers: tuple[Layer, ...] = ()
    others_s: tuple[float, ...] = ()
    output: str = ""
    windows: tuple[tuple[float, float], ...] = ()
    stretch: float = 1.0


@dataclasses.dataclass(frozen=True)
class Outcome(Message):
    """How one `measure` or `run_model` call ended, with its evidence.

    `latency_s` has one entry per sample, in order, without warm-up. `timing_s` is the worker's time for timing, warm-up
    included, which separates the farm's overhead. `power` covers the timing, `energy` the requested measurement; both
    are null without a sensor. `point` is the operating point held, null for none. `details` are a model's.
    """

    status: Status
    message: str = ""
    latency_s: tuple[float, ...] = ()
    calls_per_sample: int = 0
    timing_s: float = 0.0
    signal: str | None = None
    before: Evidence | None = None
    after: Evidence | None = None
    other_load: float | None = None  # cores' worth of CPU time that other processes used meanwhile
    point: OperatingPoint | None = None
    power: PowerWindow | None = None
    energy: Energy | None = None
    board: str = ""
    agent_version: str = ""
    simulated: bool = False
    started_at: float = 0.0  # seconds since the epoch, the board's own clock
    details: RunDetails | None = None
