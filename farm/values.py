"""Frozen value types shared by the whole coordinator. They hold facts and do nothing.

One module: any layer may use any of them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from device_agent.protocol import FaultSide, Outcome, Status, StrEnum

# The operating point of a board with untouched clocks.
DEFAULT_POINT = "default"
# The commands whose results the store keeps.
BENCH, RUN, EVALUATE, PROGRAM = RESULT_KINDS = ("bench", "run", "evaluate", "program")

# The purpose of a trial: search for candidates, or verify one of the best.
SEARCH_TRIAL = "search"
WINNER_TRIAL = "winner"

# The name of code without a record among the finalists. It has no trace.
UNTUNED = "untuned"
# The columns of a workload in the store, which another farm reads too.
_STORED = ("hash", "name", "flop", "arguments", "target", "pipeline", "module_json")
# The prefix of workload names with float16 arithmetic.
COMPUTED_PREFIX = "fp16_"
# A fused function's name lists its operators; the first match wins.
_KINDS = (
    "depthwise_conv2d", "conv2d", "conv1d", "conv3d", "matmul", "dense", "max_pool2d", "avg_pool2d", "log_softmax",
    "softmax", "layer_norm", "group_norm", "rms_norm",
)  # fmt: skip


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
    """Reached on this machine's loopback. `port` is the agent's; None: as the tracker says.

    `on_demand`: the board is this machine as used by commands such as `farm tune`, each with its own agent; between
    commands there is none.
    """

    kind: ClassVar[str] = "direct"
    port: int | None = None
    on_demand: bool = False


@dataclasses.dataclass(frozen=True)
class Ssh:
    """Reached through an SSH connection.

    `identity_file` is the path of a private key, never the key; `host_key` is the fingerprint of the host's public key
    (`SHA256:…`), empty until first contact. On the board's loopback, `agent_port` is its agent's port and
    `tracker_port` that of the farm's tracker. `meter` is a command there: an external power meter prints its values.
    """

    kind: ClassVar[str] = "ssh"
    host: str
    user: str
    port: int = 22
    identity_file: str = ""
    host_key: str = ""
    agent_port: int = 9090
    tracker_port: int = 9190
    meter: str = ""


@dataclasses.dataclass(frozen=True)
class Virtual:
    """A virtual board that the farm starts on this machine; `seed` selects an individual of the type.

    `faults` harm it from its start, as `device-agent serve --fault`. `live`: its time passes as this machine's does,
    instead of as fast as possible. `meter`: see `Ssh`; the command runs here.
    """

    kind: ClassVar[str] = "virtual"
    seed: int = 0
    faults: tuple[str, ...] = ()
    live: bool = False
    meter: str = ""


# A board's transport. No field is a secret.
Transport = Direct | Ssh | Virtual


class State(StrEnum):
    """What a board is doing, as far as the farm knows."""

    IDLE = "idle"
    LEASED = "leased"
    OFFLINE = "offline"  # unreachable; outranks an open lease


class Health(StrEnum):
    """What a board may be used for."""

    GOOD = "good"  # work
    SUSPECT = "suspect"  # nothing but probes, which decide
    QUARANTINED = "quarantined"  # after repeated faults: probes only, after a cool-down
    MAINTENANCE = "maintenance"  # in an operator's hands
    UNSAFE = "unsafe"  # its clocks could not be restored; unusable until an operator clears it
    RETIRED = "retired"  # kept for its history


@dataclasses.dataclass(frozen=True)
class Standing:
    """Whether a board is reachable, whether it has an open lease, and its health."""

    reachable: bool
    leased: bool
    health: Health

    @property
    def state(self) -> State:
        """The resulting state. A retired board counts as offline, since the farm does not connect to it."""
        if not self.reachable:
            return State.OFFLINE
        if self.leased:
            return State.LEASED
        return State.OFFLINE if self.health is Health.RETIRED else State.IDLE


@dataclasses.dataclass(frozen=True)
class HealthHistory:
    """The part of a board's past that determines its health. Times are seconds on the farm's clock
    (`farm.store.clock`).

    `faults_s` are board-side faults, oldest first; `passes` counts consecutive passed probes; `cooling_since_s` is the
    start of the cool-down; `held`: an operator ordered the quarantine; `cycles_s` are the farm's power cycles, tried
    ones included, oldest first, as far as they count.
    """

    faults_s: tuple[float, ...] = ()
    passes: int = 0
    cooling_since_s: float = 0.0
    held: bool = False
    cycles_s: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class Transition:
    """The effect of an observation: the new standing and history. `reason` is empty only if nothing changed notably."""

    standing: Standing
    history: HealthHistory
    reason: str


class WorkKind(StrEnum):
    """The kind of work that a board is requested for. All but trials is interactive: a person or a script waits."""

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
        """The kind of work that a purpose such as "bench resnet-18" names first; a run by default."""
        return {str(kind): kind for kind in cls}.get(purpose.partition(" ")[0], cls.RUN)


@dataclasses.dataclass(frozen=True)
class BoardRequest:
    """A request for boards: `wanted` of those in `boards`, all of one type, since `waited_s` (s).

    `requested_at` is wall-clock seconds since the epoch, for people. `campaign` is the campaign whose trials they are
    for, or None.
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
    wall-clock seconds since the epoch, for people; expiry uses the farm's clock, `ttl_s` after the last renewal.
    `nonce` is drawn for each lease, because a restored store repeats tokens.
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
    """One run of the golden kernel on a board: the median latency in seconds, and its samples.

    `kernel` names the kernel with its version: times of different ones are not comparable. `at` is wall-clock seconds
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

    The first five fields, `board_type` and `purpose` are its identity, which is unique in the store. An empty
    `board_type` is the campaign's own, if it has only one. `purpose` is SEARCH_TRIAL or WINNER_TRIAL. `build_s` is the
    compiler's time, `held_s` the time in the board's session.
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
        """Whether it is the candidate's result in its campaign: a time, or its own failure, from the search."""
        status = self.outcome.status
        return (
            self.purpose == SEARCH_TRIAL
            and status.fault_side in (None, FaultSide.CANDIDATE)
            and status is not Status.WRONG_RESULT
        )

    @property
    def median_s(self) -> float | None:
        """Median latency sample in seconds; None unless the trial is ok."""
        samples = sorted(self.outcome.latency_s)
        if self.outcome.status.fault_side is not None or not samples:
            return None
        middle = len(samples) // 2
        return samples[middle] if len(samples) % 2 else (samples[middle - 1] + samples[middle]) / 2


@dataclasses.dataclass(frozen=True)
class Record:
    """The best verified trial of a workload for a board type and operating point.

    `max_abs_error` and `max_rel_error` are against the unscheduled function on the same inputs. `evidence` describes
    its verification (boards, samples, interval, tie), None without one: then `median_s` is a single trial's. `origin`
    names the farm, campaign or file of an imported record, None for one made here.
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
    def objective(self) -> str:
        """What its finalists were chosen by: latency, energy, edp or period."""
        return str((self.evidence or {}).get("objective", "latency"))

    @property
    def energy_j(self) -> float | None:
        """Its energy in J a call; None where latency decided."""
        return (self.evidence or {}).get("energy_j")

    @property
    def device(self) -> str:
        """What ran it: the board's CPU ("cpu") or GPU ("gpu")."""
        return "gpu" if is_for_gpu(self.pipeline) else "cpu"


@dataclasses.dataclass(frozen=True)
class Workload:
    """One tunable function.

    `hash` identifies it over models, processes and machines: function, target and graph pipeline. `weight` is the
    number of calls per inference; in a campaign it holds for `board_type` and all models. `flop` is per call, as TVM
    estimates it (0 where it cannot). `arguments` are shapes with types. `module_json` is the unscheduled function with
    canonical names in TVM's JSON. `function` is TVM's name for it in this model.
    """

    hash: str
    name: str
    flop: float
    weight: float
    arguments: tuple[tuple[tuple[int, ...], str], ...]
    module_json: str = dataclasses.field(repr=False)
    target: Mapping[str, Any]
    pipeline: str
    function: str = dataclasses.field(default="", compare=False)
    board_type: str = ""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Workload:
        """Read a stored row, of a campaign or of none. Raises TypeError or ValueError for an invalid one."""
        arguments = tuple((tuple(shape), dtype) for shape, dtype in row["arguments"])
        return cls(**{"weight": 1, **row, "arguments": arguments})

    def to_row(self) -> dict[str, Any]:
        """Return the stored columns: those that no model or campaign determines."""
        return {name: getattr(self, name) for name in _STORED}

    @property
    def kind(self) -> str:
        """The dominant operator, such as `conv2d`, `dense` or `softmax`; `--ops` chooses by it."""
        return operator_kind(self.name)


def operator_kind(name: str) -> str:
    """Return the dominant operator of a workload's name; a matrix product is `dense`, as TVM's users call it."""
    fused = name.partition(" ")[0].removeprefix(COMPUTED_PREFIX)
    for kind in _KINDS:
        if kind in fused:
            return "dense" if kind == "matmul" else kind
    return fused.removeprefix("fused_").split("_")[0].rstrip("0123456789")


def name_workloads(hashes: Iterable[str]) -> str:
    """The name of a model's workloads together, which covers target, graph pipeline and every shape."""
    return hashlib.sha256(" ".join(sorted(hashes)).encode()).hexdigest()


def is_for_gpu(pipeline: str) -> bool:
    """Whether a graph pipeline's code is for GPUs, by its name."""
    return pipeline.startswith("gpu/")


def read_pipeline(pipeline: str) -> tuple[bool, str | None]:
    """Whether a graph pipeline is exact, and its weight type as for `--weights` (None: the model's), by its name."""
    found = re.fullmatch(r"[^-]+(-exact)?(?:-(bf16(?:-all)?|fp16))?", pipeline)
    return (bool(found[1]), found[2]) if found else (False, None)
