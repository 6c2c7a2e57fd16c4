"""Who gets a free board next, and which board campaigns have to return for whom. Pure.

`farm.store.queue` keeps entries and usage; `queue_entry` waits.

The shares: interactive work is all but trials. While campaigns wait, it may hold `INTERACTIVE_SHARE` of the boards that
they want, or that share of a single board's time; within its share it goes first. Within each kind every owner weighs
`2 ** priority`: the owner with the fewest boards for its weight is next, then the one with the least recent time, then
the one that waits longest. A campaign's board is asked back after the running trial; interactive work keeps its boards.
With a priority below 0 it takes only boards that no campaign wants.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from farm.values import BoardRequest, WorkKind

INTERACTIVE_SHARE = 2 / 3
# How long a campaign keeps a shared board before it is asked back, in s; some seconds of it open a session and change
# clocks.
TURN_S = 60.0
# Interactive work that used at most this of a single board's time lately need not wait for a turn's end.
_WELL_BELOW = 0.5
# Differences of used time below this are noise, in s.
_LESS_S = 1.0


@dataclasses.dataclass(frozen=True)
class QueueBoard:
    """A usable board: its holder ("": none), for which work (None: none, such as a probe), how long (s)."""

    name: str
    board_type: str
    holder: str = ""
    kind: WorkKind | None = None
    held_s: float = 0.0

    @property
    def is_interactive(self) -> bool:
        """Whether it serves interactive work."""
        return self.kind not in (None, WorkKind.TRIALS)


@dataclasses.dataclass
class QueuePlan:
    """`grants`: whose each free board is. `yields`: who gets each board of trials after its running trial.

    Both map a board to the request's number. `why`: what each request without a board waits for, as far as the queue is
    the reason.
    """

    grants: dict[str, int] = dataclasses.field(default_factory=dict)
    yields: dict[str, int] = dataclasses.field(default_factory=dict)
    why: dict[int, str] = dataclasses.field(default_factory=dict)


def plan_queue(
    requests: Sequence[BoardRequest],
    boards: Sequence[QueueBoard],
    used_s: Mapping[tuple[str, str, WorkKind], float],
    leaving: Iterable[str] = (),
) -> QueuePlan:
    """Plan the free boards, and which ones trials return. Deterministic: the same on every host.

    `boards` are usable ones. `used_s` is the recent time of owners by board and kind of work. `leaving` are boards
    already on their way out, which are returned first.
    """
    plan = QueuePlan()
    for board_type in sorted({request.board_type for request in requests}):
        mine = [request for request in requests if request.board_type == board_type]
        of_type = [board for board in boards if board.board_type == board_type]
        _Sharing(mine, of_type, used_s, frozenset(leaving), plan).share()
    return plan


class _Sharing:
    """The boards of one type while they are shared out."""

    def __init__(
        self,
        requests: Sequence[BoardRequest],
        boards: Sequence[QueueBoard],
        used_s: Mapping[tuple[str, str, WorkKind], float],
        leaving: frozenset[str],
        plan: QueuePlan,
    ) -> None:
        self._plan, self._leaving = plan, leaving
        self._boards = {board.name: board for board in boards}
        self._trials = [each for each in requests if each.kind is WorkKind.TRIALS]
        self._interactive = [each for each in requests if each.kind is not WorkKind.TRIALS]
        self._free = sorted(board.name for board in boards if not board.holder)
        self._left = {each.id: each.wanted for each in requests}
        # The boards that trials want, of which interactive work may have its share.
        self._shared = self._boards.keys() & {name for each in self._trials for name in each.boards}
        self._taken = sum(self._boards[name].is_interactive for name in self._shared)
        self._most = max(1, math.floor(INTERACTIVE_SHARE * len(self._shared) + 1e-9))
        # Each owner's boards and time by kind.
        self._has = Counter((board.holder, board.is_interactive) for board in boards if board.kind is not None)
        self._used: Counter[tuple[str, bool]] = Counter()
        shares: Counter[bool] = Counter()
        for (name, owner, kind), seconds in used_s.items():
            if name in self._boards:
                self._used[owner, kind is not WorkKind.TRIALS] += seconds  # type: ignore[assignment]
                if name in self._shared:
                    shares[kind is not WorkKind.TRIALS] += seconds  # type: ignore[assignment]
        total = shares[True] + shares[False]
        self._share = shares[True] / total if total else 0.0
        self._weights: Counter[str] = Counter()
        for each in self._trials:
            self._weights[each.owner] += 2.0**each.priority  # type: ignore[assignment]

    def share(self) -> None:
        """Serve interactive work within its share, then trials, then give the rest to any that wait."""
        self._serve([each for each in self._interactive if each.priority >= 0], within_share=True)
        self._serve_trials()
        self._serve(self._interactive, within_share=False)
        self._balance_trials()

    # Interactive work

    def _serve(self, requests: Sequence[BoardRequest], within_share: bool) -> None:
        waiting = [each for each in requests if self._left[each.id] > 0]
        while waiting:
            request = min(waiting, key=self._rank)
            if not self._serve_one(request, within_share) or not self._left[request.id]:
                waiting.remove(request)

    def _rank(self, request: BoardRequest) -> tuple[float, float, int, float, int]:
        weight, key = 2.0**request.priority, (request.owner, True)
        used = math.floor(self._used[key] / weight / _LESS_S)
        return self._has[key] / weight, used, -request.priority, -request.waited_s, request.id

    def _serve_one(self, request: BoardRequest, within_share: bool) -> bool:
        free = [name for name in self._free if name in request.boards]
        # Boards that campaigns do not want first.
        others = [each for each in self._interactive if each.id != request.id]
        free.sort(key=lambda name: (name in self._shared, sum(name in each.boards for each in others), name))
        for name in free:
            if not within_share or name not in self._shared or self._has_room(None):
                self._free.remove(name)
                self._plan.grants[name] = request.id
                self._note(request, name)
                return True
        if not within_share:
            return False
        held = [self._boards[name] for name in request.boards if name in self._boards]
        held = [each for each in held if each.kind is WorkKind.TRIALS and each.name not in self._plan.yields]
        held.sort(key=self._rank_yield)
        for board in held:
            if board.name not in self._shared or self._has_room(board):
                self._plan.yields[board.name] = request.id
                self._has[board.holder, False] -= 1
                self._note(request, board.name)
                return True
        if held or free:
            self._plan.why[request.id] = self._describe_share()
        return False

    def _note(self, request: BoardRequest, name: str) -> None:
        self._left[request.id] -= 1
        self._has[request.owner, True] += 1
        self._taken += name in self._shared

    def _has_room(self, held: QueueBoard | None) -> bool:
        """Whether interactive work may have one more of the boards that trials want: a free one, or one of theirs."""
        if self._taken >= self._most:
            return False
        if len(self._shared) > 1 or self._share <= _WELL_BELOW:
            return True
        return self._share < INTERACTIVE_SHARE and (held is None or held.held_s >= TURN_S)

    def _describe_share(self) -> str:
        if self._taken:
            return (
                f"interactive work has {self._taken} of {len(self._shared)} boards that campaigns want too: its share"
            )
        return f"it is the turn of campaigns: interactive work has had {self._share:.0%} of the board's time lately"

    def _rank_yield(self, board: QueueBoard) -> tuple[bool, bool, float, float, str]:
        weight = self._weights[board.holder] or 1.0
        here = board.name in self._leaving
        return not here, board.name in self._shared, -self._has[board.holder, False] / weight, -board.held_s, board.name

    # Trials: requests come from engines, and each engine shares its boards among its campaigns

    def _serve_trials(self) -> None:
        waiting = set(self._weights)
        while waiting:
            owner = min(waiting, key=lambda each: self._rank_trials(each))
            found = next(((name, each) for name in self._free if (each := self._find_trials(owner, name))), None)
            if found is None:
                waiting.remove(owner)
                continue
            name, request = found
            self._free.remove(name)
            self._plan.grants[name] = request.id
            self._left[request.id] -= 1
            self._has[owner, False] += 1

    def _find_trials(self, owner: str, name: str) -> BoardRequest | None:
        """Return an owner's request that a board fits."""
        mine = [each for each in self._trials if each.owner == owner and name in each.boards]
        return min((each for each in mine if self._left[each.id] > 0), key=lambda each: each.id, default=None)

    def _rank_trials(self, owner: str) -> tuple[float, float, float, str]:
        weight = self._weights[owner]
        waited_s = max(each.waited_s for each in self._trials if each.owner == owner)
        used = math.floor(self._used[owner, False] / weight / _LESS_S)
        return self._has[owner, False] / weight, used, -waited_s, owner

    def _balance_trials(self) -> None:
        """Move a board from engines above their share to one below."""
        for owner in sorted(self._weights, key=self._rank_trials):
            held = [each for each in self._boards.values() if each.kind is WorkKind.TRIALS and each.holder != owner]
            held.sort(key=self._rank_yield)
            for board in held:
                request = self._find_trials(owner, board.name)
                if request is not None and board.name not in self._plan.yields and self._is_fairer(owner, board):
                    self._plan.yields[board.name] = request.id
                    self._left[request.id] -= 1
                    self._has[owner, False] += 1
                    self._has[board.holder, False] -= 1

    def _is_fairer(self, owner: str, board: QueueBoard) -> bool:
        """Whether a board of another engine should be this one's: now, or at its turn."""
        mine, theirs = self._weights[owner], self._weights[board.holder] or 1.0
        after, before = (self._has[owner, False] + 1) / mine, self._has[board.holder, False] / theirs
        if not self._weights[board.holder] or after < before - 1e-9:
            return True
        had, others = self._used[owner, False] / mine, self._used[board.holder, False] / theirs
        return after <= before + 1e-9 and had < others - _LESS_S and board.held_s >= TURN_S
