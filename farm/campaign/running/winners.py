"""Turn the best candidates of a campaign into records: check what they compute, measure them again, decide.

Driven from outside and never waits: `step` says what is wanted, `on_…` takes the answers. What happened is written to the
store as it happens, so that after a restart nothing that is there is done again. Programs and their checks are in
`winner_check`, who is measured when and for how long in `winner_round`, who has won in `tie`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from device_agent.protocol import Outcome
from farm.campaign.running.order import Order
from farm.campaign.running.winner_requests import Request, Token, WinnerKey
from farm.measure.session import Arrays
from farm.search.build_pool import BuildResult
from farm.settings import Settings
from farm.store import Store


@dataclasses.dataclass(frozen=True)
class WinnersVerdict:
    """What came of a campaign's winners, so far.

    `records` are new ones, `held` those that stayed with the candidate they had, `ties` how many of both were told from
    their rivals by nothing but the tie rule. `rejected` counts candidates whose output was wrong, `undecided` says why a
    task has no winner, `contradictions` where boards disagree.
    """

    records: int = 0
    held: int = 0
    ties: int = 0
    rejected: int = 0
    undecided: Mapping[WinnerKey, str] = dataclasses.field(default_factory=dict)
    contradictions: tuple[str, ...] = ()

    def to_document(self) -> dict[str, Any]:
        """Plain data, for the store."""
        raise NotImplementedError


class Verification:
    """The winners of one campaign. Not thread-safe.

    Tasks are verified once they are added. Every request is answered once, in any order; an answer to what is not asked
    any more is late and changes nothing. Boards are its own from `give` to `take`.
    """

    def __init__(self, campaign: int, order: Order, store: Store, settings: Settings) -> None:
        """Read from the store what was done already."""
        raise NotImplementedError

    def add(self, tasks: Iterable[WinnerKey] | None = None) -> None:
        """Verify these tasks, whose search is over (None: all of the order's). Those added before change nothing."""
        raise NotImplementedError

    def wants(self) -> Mapping[str, int]:
        """How many boards of each type it can use now; types that it needs none of are missing."""
        raise NotImplementedError

    def expect(self, boards: Mapping[str, int]) -> None:
        """How many boards of each type it may count on getting, sooner or later, those it has included.

        Where two are, a task waits for the second one for some minutes; where nothing was said, it counts on what it has.
        """
        raise NotImplementedError

    def give(self, board: str, board_type: str, simulated: bool) -> None:
        """A board may be used, until `take`."""
        raise NotImplementedError

    def take(self, board: str) -> None:
        """A board is gone, or wanted back. What it was doing is planned anew; its answers would be late."""
        raise NotImplementedError

    def spare(self) -> list[str]:
        """Boards that were given and have nothing to do now: they may be taken without loss."""
        raise NotImplementedError

    def step(self, now_s: float) -> list[Request]:
        """What is to be done now; each is asked for once. `now_s` is monotonic."""
        raise NotImplementedError

    def on_replayed(self, token: Token, module_json: str | None, message: str = "") -> None:
        """The scheduled function, or None where the trace fits its workload no more."""
        raise NotImplementedError

    def on_built(self, token: Token, result: BuildResult) -> None:
        """A build ended, well or not."""
        raise NotImplementedError

    def on_ran(self, token: Token, outcome: Outcome, outputs: Arrays) -> None:
        """A run ended, well or not."""
        raise NotImplementedError

    def on_measured(self, token: Token, outcome: Outcome, board_s: float) -> None:
        """A measurement ended, well or not; for `board_s` seconds the board was busy with it."""
        raise NotImplementedError

    def on_failed(self, token: Token, message: str) -> None:
        """What was asked could not be done, by nobody's fault (a search that died): asked again, a few times."""
        raise NotImplementedError

    @property
    def done(self) -> bool:
        """Whether every task that was added has a winner, or none for good."""
        raise NotImplementedError

    @property
    def verdict(self) -> WinnersVerdict:
        """What came of it so far; raises nothing."""
        raise NotImplementedError
