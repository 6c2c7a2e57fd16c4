"""Who does what for a verification right now: the boards it was given, and requests that are not answered yet."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from farm.campaign.verify.checks import Program, What
from farm.campaign.verify.requests import Token
from farm.campaign.verify.rounds import RoundRun
from farm.campaign.verify.task import WinnerTask


class Asked(NamedTuple):
    """What a token stands for: `what` is done with a program, or where None, it is measured in a round of a task.

    `board` is empty where none is needed.
    """

    program: Program
    what: What | None
    board: str = ""
    task: WinnerTask | None = None
    run: RoundRun | None = None


@dataclasses.dataclass(eq=False)
class Held:
    """A board that was given. It does one thing at a time: a program's check, or a round of a task.

    `point` is the operating point that it was last asked to hold.
    """

    name: str
    board_type: str
    program: Program | None = None
    task: WinnerTask | None = None
    run: RoundRun | None = None
    point: str = ""

    @property
    def is_free(self) -> bool:
        return self.program is None and self.run is None

    def release(self, run: RoundRun) -> None:
        """A round may be over: then the board is free."""
        if self.run is run and run.is_over:
            self.task = self.run = None


class Ledger:
    """Boards by name, and what was asked by token."""

    def __init__(self, prefix: str) -> None:
        """`prefix` begins all tokens."""
        self._prefix = prefix
        self._numbers = itertools.count(1)
        self._boards: dict[str, Held] = {}
        self._asked: dict[Token, Asked] = {}

    def __iter__(self) -> Iterator[Held]:
        return iter(self._boards.values())

    @property
    def is_preparing(self) -> bool:
        """Whether a trace is being replayed or a program built."""
        return any(asked.what not in (None, "run") for asked in self._asked.values())

    def give(self, board: str, board_type: str) -> None:
        """A board is there; nothing changes where it was."""
        self._boards.setdefault(board, Held(board, board_type))

    def take(self, board: str) -> None:
        """A board is gone: what was asked of it may be asked of another one."""
        held = self._boards.pop(board, None)
        for token in [token for token, asked in self._asked.items() if asked.board == board]:
            self.close(token)
        if held is not None and held.task is not None and held.run is not None:
            held.task.contest.abandon(held.run)

    def find_names(self, board_type: str) -> set[str]:
        """The boards of a type that are there."""
        return {held.name for held in self if held.board_type == board_type}

    def ask(self, asked: Asked) -> Token:
        """Something is asked from now on; returns its token."""
        token = f"{self._prefix}{next(self._numbers)}"
        self._asked[token] = asked
        if asked.what is not None:
            asked.program.asked.add(asked.what)
        return token

    def find(self, token: Token) -> Asked | None:
        """What is asked; None for what is not asked any more."""
        return self._asked.get(token)

    def close(self, token: Token) -> Asked | None:
        """What was asked, which is over now; None where it was already. A board that checked a program is free."""
        asked = self._asked.pop(token, None)
        if asked is not None and asked.what is not None:
            asked.program.asked.discard(asked.what)
            held = self._boards.get(asked.board)
            if held is not None and held.program is asked.program:
                held.program = None
        return asked

    def release(self, asked: Asked) -> None:
        """A measurement was answered: its board is free where the round is over."""
        held = self._boards.get(asked.board)
        if held is not None and asked.run is not None:
            held.release(asked.run)

    def wind_up(self, task: WinnerTask) -> None:
        """A task has ended. What a board was given it still measures; its answers let go of the board."""
        for held in self:
            if held.task is task and held.run is not None:
                held.run.left.clear()
                held.release(held.run)
