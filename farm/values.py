"""Frozen value types that the whole coordinator shares. They hold facts and do nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from device_agent.protocol import FaultSide, Outcome, Status, StrEnum

# The operating point of a board whose clocks are not set.
DEFAULT_POINT = "default"

# What a trial was for: to find good candidates, or to measure one of the best again and check what it computes.
SEARCH_TRIAL = "search"
WINNER_TRIAL = "winner"

# The name under which code without a record takes part where winners are measured. It has no trace.
UNTUNED = "untuned"


@dataclasses.dataclass(frozen=True)
class Board:
    """One machine that runs an agent. `key` is its name at the tracker: `<board type>/<board name>`."""

    name: str
    board_type: str
    simulated: bool
    description: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def key(self) -> str:
        return f"{self.board_type}/{self.name}"


@dataclasses.dataclass(frozen=True)
class Direct:
    """Reached on this machine's loopback. `port` is the agent's, None where the tracker says it.

    `on_demand`: the board is this machine as commands such as `farm tune` use it, each with an agent of its own; in
    between there is none, which is no fault.
    """

    kind: ClassVar[str] = "direct"
    port: int | None = None
    on_demand: bool = False


@dataclasses.dataclass(frozen=True)
class Ssh:
    """Reached through an SSH connection.

    `identity_file` is the path of a private key, never the key; `host_key` is the fingerprint of the host's public key
    (`SHA256:…`), empty until first contact. On the board's loopback, `agent_port` is where its agent listens and
    `tracker_port` where it finds the farm's tracker.
    """

    kind: ClassVar[str] = "ssh"
    host: str
    user: str
    port: int = 22
    identity_file: str = ""
    host_key: str = ""
    agent_port: int = 9090
    tracker_port: int = 9190


@dataclasses.dataclass(frozen=True)
class Virtual:
    """A virtual board that the farm itself starts on this machine; `seed` tells individuals of one type apart.

    `faults` harm it from its start on, as `device-agent serve --fault` says them. `live`: its time passes as this
    machine's does, instead of as fast as it can be computed.
    """

    kind: ClassVar[str] = "virtual"
    seed: int = 0
    faults: tuple[str, ...] = ()
    live: bool = False


# How a board is reached. None of its fields is a secret.
Transport = Direct | Ssh | Virtual


class State(StrEnum):
    """What a board is doing, as far as the farm can tell."""

    IDLE = "idle"
    LEASED = "leased"
    OFFLINE = "offline"  # cannot be reached; outranks a lease that has not ended yet


class Health(StrEnum):
    """What a board may be used for."""

    GOOD = "good"  # work
    SUSPECT = "suspect"  # nothing but probes, which decide
    QUARANTINED = "quarantined"  # after repeated faults: probes only, after a cool-down
    MAINTENANCE = "maintenance"  # an operator has it
    UNSAFE = "unsafe"  # its clocks could not be restored; nothing until an operator has cleared it
    RETIRED = "retired"  # kept for its history


@dataclasses.dataclass(frozen=True)
class Standing:
    """Whether a board can be reached, whether a lease of it is open, and its health."""

    reachable: bool
    leased: bool
    health: Health

    @property
    def state(self) -> State:
        """Return the state that follows. The services keep no connection to a retired board."""
        if not self.reachable:
            return State.OFFLINE
        if self.leased:
            return State.LEASED
        return State.OFFLINE if self.health is Health.RETIRED else State.IDLE


@dataclasses.dataclass(frozen=True)
class HealthHistory:
    """What of a board's past decides about its health. Times are seconds on the farm's clock (`farm.store.clock`).

    `faults_s` are board-side faults, oldest first; `passes` counts probes passed in a row since the last that did not;
    `cooling_since_s` is when the cool-down began; `held` says that an operator ordered the quarantine; `cycles_s` are
    when the farm cycled its power, or tried to, oldest first, as far as that counts.
    """

    faults_s: tuple[float, ...] = ()
    passes: int = 0
    cooling_since_s: float = 0.0
    held: bool = False
    cycles_s: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Transition:
    """What an observation did: the new standing and history. `reason` is empty only where nothing is worth noting."""

    standing: Standing
    history: HealthHistory
    reason: str


class WorkKind(StrEnum):
    """What a board is wanted for. All but trials is interactive: a person or a script waits for it."""

    RUN = "run"
    BENCH = "bench"
    VERIFY = "verify"
    DEPLOY = "deploy"
    SWEEP = "sweep"
    SCRIPT = "script"
    RESERVED = "reserved"
    TRIALS = "trials"

    @classmethod
    def of(cls, purpose: str) -> WorkKind:
        """The kind of work that a purpose such as "bench resnet-18" names first; what names none is a run."""
        return {str(kind): kind for kind in cls}.get(purpose.partition(" ")[0], cls.RUN)


@dataclasses.dataclass(frozen=True)
class BoardRequest:
    """A request for boards: `wanted` of those in `boards`, all of one type, since `waited_s` (s).

    `requested_at` is wall-clock seconds since the epoch, for people. `campaign` is whose trials they are for, or None.
    """

    id: int
    owner: str
    kind: WorkKind
    purpose: str
    board_type: str
    boards: tuple[str, ...]
    wanted: int
    priority: int
    requested_at: float
    waited_s: float
    campaign: str | None = None


@dataclasses.dataclass(frozen=True)
class Lease:
    """The exclusive right to use a board until it expires.

    Of two leases of one board in one `store` the later has the greater `token`. `acquired_at` and `expires_at` are
    wall-clock seconds since the epoch, for people; expiry itself is judged on the farm's clock, `ttl_s` after the last
    renewal. `nonce` is drawn for each lease: a store that was put back to an earlier state gives tokens twice.
    """

    board: str
    owner: str
    purpose: str
    store: str
    token: int
    ttl_s: float
    acquired_at: float
    expires_at: float
    nonce: str = ""


@dataclasses.dataclass(frozen=True)
class GoldenSample:
    """One run of the golden kernel on a board: the median latency in seconds, and all samples that it was taken from.

    `kernel` names the kernel with its version: times of different ones are never compared. `at` is wall-clock seconds
    since the epoch.
    """

    board: str
    kernel: str
    operating_point: str
    median_s: float
    samples_s: tuple[float, ...]
    simulated: bool
    at: float = 0.0


@dataclasses.dataclass(frozen=True)
class Trial:
    """One candidate measured, or failed, on one board at one operating point.

    The first five fields, `board_type` and `purpose` are its identity: the store refuses a second one. An empty
    `board_type` is the campaign's own, where it has one alone. `purpose` is SEARCH_TRIAL or WINNER_TRIAL. `build_s` is
    the compiler's time, `held_s` the time for which the board's session was busy with it.
    """

    campaign: int
    workload: str
    candidate: str
    operating_point: str
    attempt: int
    outcome: Outcome
    trace_json: str = dataclasses.field(repr=False)
    library_sha256: str | None = None
    build_s: float | None = None
    held_s: float | None = None
    board_type: str = ""
    purpose: str = SEARCH_TRIAL

    @property
    def counts(self) -> bool:
        """Whether it is the candidate's result in its campaign: its time, or its own failure, found in the search."""
        status = self.outcome.status
        return (
            self.purpose == SEARCH_TRIAL
            and status.fault_side in (None, FaultSide.CANDIDATE)
            and status is not Status.WRONG_RESULT
        )

    @property
    def median_s(self) -> float | None:
        """Median latency sample in seconds, or None where the trial is not ok."""
        samples = sorted(self.outcome.latency_s)
        if self.outcome.status.fault_side is not None or not samples:
            return None
        middle = len(samples) // 2
        return samples[middle] if len(samples) % 2 else (samples[middle - 1] + samples[middle]) / 2


@dataclasses.dataclass(frozen=True)
class Record:
    """The best verified trial of a workload for a board type and operating point.

    `max_abs_error` and `max_rel_error` are against the unscheduled function on the same inputs. `evidence` says how it
    was measured again (boards, samples, interval, tie), None where it was not: then `median_s` is a single trial's.
    `origin` says which farm, campaign or file an imported record comes from, None where it was made here.
    """

    workload: str
    workload_name: str
    board_type: str
    operating_point: str
    pipeline: str
    candidate: str
    median_s: float
    flop: float
    max_abs_error: float
    max_rel_error: float
    simulated: bool
    trace_json: str = dataclasses.field(repr=False)
    verified_at: float = 0.0
    evidence: Mapping[str, Any] | None = dataclasses.field(default=None, repr=False)
    origin: Mapping[str, Any] | None = dataclasses.field(default=None, repr=False)

    @property
    def device(self) -> str:
        """What ran it: the processor ("cpu") or the GPU ("gpu") of a board."""
        return "gpu" if is_for_gpu(self.pipeline) else "cpu"


@dataclasses.dataclass(frozen=True)
class ModelDecision:
    """What a model is compiled from, once it was timed itself: from the records, but those that lost in it.

    It holds for the model with these `workloads` (`name_workloads`), on boards of a type at an operating point.
    `refused` has the candidates of the records that are left out, by workload; where a record has another candidate by
    now, it is younger, and nothing was decided about it. `evidence` is the whole final, as reports show it.
    """

    model_sha256: str
    workloads: str
    board_type: str
    operating_point: str
    simulated: bool
    refused: Mapping[str, str]
    evidence: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)
    campaign: int | None = None
    decided_at: float = 0.0


def name_workloads(hashes: Iterable[str]) -> str:
    """The name of a model's workloads taken together: with it goes its target, graph pipeline and every shape."""
    return hashlib.sha256(" ".join(sorted(hashes)).encode()).hexdigest()


def is_for_gpu(pipeline: str) -> bool:
    """Whether code of a graph pipeline is for boards' GPUs: those pipelines are called so."""
    return pipeline.startswith("gpu/")


def read_pipeline(pipeline: str) -> tuple[bool, str | None]:
    """Whether a graph pipeline is an exact one, and how it stores weights (None: as the model has them), as `--weights`
    takes it: its name says so.
    """
    found = re.fullmatch(r"[^-]+(-exact)?(?:-(bf16(?:-all)?|fp16))?", pipeline)
    return (bool(found[1]), found[2]) if found else (False, None)


class CampaignState(StrEnum):
    """How it stands with a campaign over a fleet."""

    SUBMITTED = "submitted"  # in the store; no engine has begun with it
    RUNNING = "running"
    CONNECTING = "connecting"  # boards that it may use are being brought within reach
    WAITING = "waiting"  # no board that it may use is there
    PAUSED = "paused"  # as an operator wanted
    VERIFYING = "verifying"  # the search is over; winners are measured again
    INTERRUPTED = "interrupted"  # its engine was killed or told to end; it can be resumed
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def over(self) -> bool:
        """Whether nothing can come of it any more."""
        return self in (CampaignState.FINISHED, CampaignState.CANCELLED, CampaignState.FAILED)


@dataclasses.dataclass(frozen=True)
class FleetCampaign:
    """A campaign over a fleet, as the store has it.

    `order` is what was ordered, `budget` what it may use now, `progress` how far its engine has come (None: not begun),
    all plain data. `wanted` is what operators want of it: `run`, `pause` or `cancel`. `engine` names the process that
    carries it out, None where none does. `started_at` is when it was submitted; both times are wall-clock seconds
    since the epoch.
    """

    id: int
    name: str
    owner: str
    command: str
    state: CampaignState
    reason: str
    wanted: str
    order: Mapping[str, Any] = dataclasses.field(repr=False)
    budget: Mapping[str, Any]
    progress: Mapping[str, Any] | None = dataclasses.field(repr=False)
    engine: Mapping[str, Any] | None
    started_at: float
    finished_at: float | None

    @property
    def over(self) -> bool:
        """Whether nothing can come of it any more."""
        return self.state.over
