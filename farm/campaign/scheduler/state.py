"""The fleet scheduler's state between two calls. Immutable: changes make new values.

Its size is bounded by the fleet and its queued work, not by the number of trials.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

from farm.campaign.scheduler.priority import WorkloadState
from farm.campaign.scheduler.values import Decision, Phase, ScheduledCampaign, SchedulerSettings, Status, TaskKey
from farm.types.campaigns import Budget
from farm.values import DEFAULT_POINT

K = TypeVar("K", int, str)
V = TypeVar("V")

# With some thousand entries (a thousand boards, twice as many jobs) the list of shards and one shard are about equally
# long, and both are copied in under a microsecond.
_SHARDS = 64


def _shard_of(key: int | str) -> int:
    """Return a key's shard. Not `hash`: that of a text differs from process to process, and decisions must not."""
    return key % _SHARDS if isinstance(key, int) else zlib.crc32(key.encode()) % _SHARDS


class _Shards(Generic[K, V]):
    """Lookup, common to a table and its edit."""

    __slots__ = ("_shards", "_size")

    _shards: Sequence[dict[K, V]]
    _size: int

    def __getitem__(self, key: K) -> V:
        return self._shards[_shard_of(key)][key]

    def __contains__(self, key: K) -> bool:
        return key in self._shards[_shard_of(key)]

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[K]:
        """Iterate over the present keys in ascending order, regardless of the order of insertion."""
        return iter(sorted(key for shard in self._shards for key in shard))

    def find(self, key: K) -> V | None:
        """Return a key's value, None where there is none."""
        return self._shards[_shard_of(key)].get(key)

    def values(self) -> list[V]:
        """Return the present values in the order of their keys."""
        return [self[key] for key in self]


class Table(_Shards[K, V]):
    """An immutable map. `edit()` begins a changed copy."""

    __slots__ = ()

    _shards: tuple[dict[K, V], ...]

    def __init__(self, shards: tuple[dict[K, V], ...] | None = None, size: int = 0) -> None:
        # Empty shards may be one object: an edit copies a shard before it writes to it.
        empty: dict[K, V] = {}
        self._shards = (empty,) * _SHARDS if shards is None else shards
        self._size = size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self._shards == other._shards

    __hash__ = None  # type: ignore[assignment]

    def edit(self) -> TableEdit[K, V]:
        """Begin a changed copy; this table stays as it is."""
        return TableEdit(self._shards, self._size)


class TableEdit(_Shards[K, V]):
    """A table while it is being changed. It belongs to one function; `freeze()` ends it."""

    __slots__ = ("_base", "_owned")

    _shards: list[dict[K, V]]

    def __init__(self, shards: tuple[dict[K, V], ...], size: int) -> None:
        self._base: tuple[dict[K, V], ...] = shards
        self._shards = list(shards)
        self._owned: set[int] = set()
        self._size = size

    def __setitem__(self, key: K, value: V) -> None:
        shard = self._writable(_shard_of(key))
        self._size += key not in shard
        shard[key] = value

    def pop(self, key: K) -> V:
        """Remove an entry. Raises KeyError where there is none."""
        value = self._writable(_shard_of(key)).pop(key)
        self._size -= 1
        return value

    def freeze(self) -> Table[K, V]:
        """Return the table; this edit must not be used afterwards."""
        return Table(tuple(self._shards) if self._owned else self._base, self._size)

    def _writable(self, index: int) -> dict[K, V]:
        if index not in self._owned:
            self._owned.add(index)
            self._shards[index] = self._shards[index].copy()
        return self._shards[index]


Record = TypeVar("Record")


def change(record: Record, **changes: object) -> Record:
    """Return a copy of a dataclass with other values.

    It is five times as fast as `dataclasses.replace`, and a trial needs some twenty copies. It does not run
    `__post_init__`, which none of these records has.
    """
    copy: Record = object.__new__(type(record))
    copy.__dict__.update(record.__dict__)
    copy.__dict__.update(changes)
    return copy


class PoolKey(NamedTuple):
    """The key of boards that differ in their clocks alone."""

    board_type: str
    labels: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Pool:
    """The boards of one key, and each participant's use of their time.

    `idle` are boards without work, `room` busy boards with an empty queue, both by operating point, the longest waiting
    first. `used` is board time divided by weight, by owner, campaign and lane. Accounts are per pool, so that use of
    plentiful boards does not count against scarce ones. `is_host`: its board is the machine that searches and builds.
    """

    boards: int = 0
    lanes: tuple[int, ...] = ()
    idle: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    room: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    owner_used: Mapping[str, float] = dataclasses.field(default_factory=dict)
    campaign_used: Mapping[str, float] = dataclasses.field(default_factory=dict)
    lane_used: Mapping[int, float] = dataclasses.field(default_factory=dict)
    straggler_check_s: float = 0.0
    is_host: bool = False


@dataclasses.dataclass(frozen=True)
class BoardEntry:
    """A board at hand. `point` is where its clocks are, or will be once its measurement has begun. One that `yields`
    gets no more work.
    """

    name: str
    pool: PoolKey
    point: str = DEFAULT_POINT
    running: int | None = None
    waiting: int | None = None
    yields: bool = False


@dataclasses.dataclass(frozen=True)
class LaneEntry:
    """The tasks of a campaign for one board type at one operating point, and their jobs on the way to boards.

    `again` are built jobs that were tried before, `ready` those that were not. `searching` are requested candidates.
    `boards` is its fair share of boards. Times are running means; None before the first.
    """

    number: int
    campaign: str
    board_type: str
    point: str
    tasks: tuple[int, ...]
    to_build: tuple[int, ...] = ()
    ready: tuple[int, ...] = ()
    again: tuple[int, ...] = ()
    building: int = 0
    searching: int = 0
    waiting: int = 0
    boards: float = 0.0
    dry: bool = False
    search_s: float | None = None
    build_s: float | None = None
    measure_s: float | None = None
    planned: int = 0
    wants: bool = False

    @property
    def ahead(self) -> int:
        """Count the candidates queued before the boards."""
        return self.searching + len(self.to_build) + self.building + len(self.ready) + len(self.again)


@dataclasses.dataclass(frozen=True)
class TaskEntry:
    """A workload on one board type at one operating point.

    `open` are requested trials without a result. `ended` is why it is searched no further; `closed`: its jobs are
    dropped too. `state.exhausted`: nothing may be requested now, because it ended or its search works.
    """

    number: int
    key: TaskKey
    lane: int
    state: WorkloadState
    counted: int = 0
    open: int = 0
    since_best: int = 0
    ended: str = ""
    closed: bool = False
    search_losses: int = 0
    best_s: float | None = None
    in_round: int = 0
    banned: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class CampaignEntry:
    """A campaign and its use. `on_board` are its measurements at boards; `faulty` the boards that failed since the last
    trial that counted.
    """

    spec: ScheduledCampaign
    budget: Budget
    status: Status
    began_s: float
    reason: str = ""
    lanes: tuple[int, ...] = ()
    counted: int = 0
    open: int = 0
    on_board: int = 0
    board_s: float = 0.0
    energy_j: float = 0.0
    since_best: int = 0
    pause_began_s: float = 0.0
    pauses_s: float = 0.0
    faults_in_a_row: int = 0
    faulty: frozenset[str] = frozenset()

    @property
    def weight(self) -> float:
        """Its part of its owner's share, against the owner's other campaigns."""
        return float(2.0**self.spec.priority)

    @property
    def ends_s(self) -> float | None:
        """When its wall clock is over; None without a limit."""
        limit = self.budget.wall_clock_s
        return None if limit is None else self.began_s + self.pauses_s + limit

    def may_measure(self, limit_s: float) -> bool:
        """Whether one more measurement of at most `limit_s` fits into its board time."""
        return self.budget.board_s is None or self.board_s + (self.on_board + 1) * limit_s <= self.budget.board_s


@dataclasses.dataclass(frozen=True)
class RequestEntry:
    """Candidates requested of a search. `count` shrinks with the budget."""

    number: int
    task: int
    count: int
    asked_s: float


@dataclasses.dataclass(frozen=True)
class JobEntry:
    """A candidate from proposal to result; `stage` is where it is.

    `lost_on` are the boards that were lost under it, once for each time; `avoid` all boards that did not finish it.
    """

    number: int
    task: int
    candidate: str
    stage: str
    since_s: float
    attempts: int = 0
    lost_on: tuple[str, ...] = ()
    avoid: tuple[str, ...] = ()
    assignments: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Assignment:
    """A job at a board. `started_s` None: it waits there. `charged_s` was charged to the accounts for it."""

    number: int
    job: int
    board: str
    charged_s: float
    started_s: float | None


@dataclasses.dataclass(frozen=True)
class FleetState:
    """Everything that a decision depends on. Begin with `FleetState(Settings(...))`.

    `phase` is what a host that is a board itself does (`dispatch`); `reserved`: verification measures on it.
    """

    settings: SchedulerSettings
    boards: Table[str, BoardEntry] = dataclasses.field(default_factory=Table)
    pools: Mapping[PoolKey, Pool] = dataclasses.field(default_factory=dict)
    campaigns: Mapping[str, CampaignEntry] = dataclasses.field(default_factory=dict)
    lanes: Mapping[int, LaneEntry] = dataclasses.field(default_factory=dict)
    tasks: Table[int, TaskEntry] = dataclasses.field(default_factory=Table)
    requests: Table[int, RequestEntry] = dataclasses.field(default_factory=Table)
    jobs: Table[int, JobEntry] = dataclasses.field(default_factory=Table)
    assignments: Table[int, Assignment] = dataclasses.field(default_factory=Table)
    owner_board_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    building: int = 0
    next_number: int = 1
    stale: bool = False
    phase: Phase = Phase.FIRST
    reserved: bool = False
    pending: tuple[Decision, ...] = ()
