"""Choose the boards of a fleet for a run, and the target of its code. Pure.

Rows are those of `store.boards.fetch`. `leased_site` takes the board.
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from farm import units
from farm.emulation import runs_own_code
from farm.errors import BoardUnsafeError, UnavailableError, UsageError
from farm.gpu.code import plan_gpu, require_emulated
from farm.inventory.board_types import BoardType
from farm.search import gpus
from farm.store.standing import find_cause, unknown_board
from farm.types.documents import BoardInfo
from farm.values import Health, State, is_for_gpu

# Only an operator changes these.
_OPERATORS = (Health.MAINTENANCE, Health.UNSAFE, Health.RETIRED)


@dataclasses.dataclass(frozen=True)
class BoardChoice:
    """Boards that can be taken now, the first one first, and why each other one cannot."""

    free: tuple[str, ...]
    reasons: Mapping[str, str]

    @property
    def text(self) -> str:
        """The reasons in one line."""
        return "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())

    def without(self, reasons: Mapping[str, str]) -> BoardChoice:
        """Return the choice without some of the boards, for these reasons."""
        return BoardChoice(tuple(name for name in self.free if name not in reasons), {**self.reasons, **reasons})


@dataclasses.dataclass(frozen=True)
class TargetPlan:
    """The compile target: TVM's target (None: this host's, with `cores` cores), and the number of threads."""

    config: Mapping[str, Any] | None
    cores: int
    threads: int

    @property
    def is_for_host(self) -> bool:
        """Whether the code runs on this host."""
        return self.config is None or gpus.is_virtual(self.config)


def plan_pool(
    rows: Sequence[BoardInfo], board_type: str, name: str | None, *, simulated: bool | None = None
) -> tuple[str, ...]:
    """Return the boards that a run may ever use: `name` alone, or all of a type, in the order of their names.

    Figures of real and simulated boards never mix: `simulated` selects the kind, None: real ones where there are any.
    Raises UsageError where there is none.
    """
    if name is not None:
        known = {row.name: row for row in rows}
        if name not in known:
            raise unknown_board(name, known)
        if known[name].board_type != board_type:
            raise UsageError(
                f"board {name!r} is a {known[name].board_type}, not a {board_type}",
                "Leave --board-type out, or give the board's own.",
            )
        return (name,)
    mine = [row for row in rows if row.board_type == board_type]
    if not mine:
        there = ", ".join(sorted({row.board_type for row in rows})) or "none"
        raise UsageError(
            f"no board of type {board_type!r} is registered",
            f"Registered types: {there}. `farm board add NAME --board-type {board_type} --ssh USER@HOST` adds one.",
        )
    if simulated is None:
        simulated = all(row.simulated for row in mine)
    pool = tuple(sorted(row.name for row in mine if row.simulated == simulated))
    if not pool:
        raise UsageError(
            f"no {'simulated' if simulated else 'real'} board of type {board_type!r} is registered",
            f"`farm board add NAME --virtual {board_type}` adds one." if simulated else "`farm board list` shows them.",
        )
    return pool


def find_left_out(rows: Sequence[BoardInfo], board_type: str, pool: Sequence[str]) -> str:
    """Explain which boards of the type `plan_pool` left out, and why; "" where none."""
    mine = [row for row in rows if row.board_type == board_type]
    chosen = [row for row in mine if row.name in pool]
    others = sorted(row.name for row in mine if chosen and row.simulated != chosen[0].simulated)
    if not others:
        return ""
    used, left = ("simulated", "real") if chosen[0].simulated else ("real", "simulated")
    count = f"{len(others)} {left} board{'s' * (len(others) > 1)}"
    hint = "; --board NAME uses one, `boards: {simulated: true}` in a campaign file all of them"
    how = "" if chosen[0].simulated else hint
    shown = units.name_some(others)
    return f"{count} of type {board_type} left out ({shown}): {pool[0]} is {used}, and figures of both never mix{how}"


def plan_place(
    rows: Sequence[BoardInfo],
    board_type: BoardType,
    name: str | None,
    host_cores: int,
    *,
    simulated: bool | None = None,
) -> tuple[tuple[str, ...], bool, TargetPlan]:
    """Return the boards of `plan_pool`, whether they are simulated, and the target of their code.

    Raises UsageError where the type has no fixed target, and what `plan_pool` and `require_usable` raise.
    """
    require_fixed_target(board_type)
    pool = plan_pool(rows, board_type.name, name, simulated=simulated)
    require_usable(rows, pool, board_type.name)
    mine = [row for row in rows if row.name in pool]
    about = next((row for row in mine if row.description), mine[0])
    target = plan_target(board_type, describe(about, board_type), host_cores)
    return pool, all(row.simulated for row in mine), target


def require_power(rows: Sequence[BoardInfo], board_type: BoardType, needing: str) -> None:
    """Raise UsageError for boards without a power sensor's total, where something (`needing`) needs it."""
    if not needing:
        return
    lacking = [
        row.name
        for row in rows
        if not (row.description.get("total_rails") if row.description else board_type.power.total)
    ]
    if lacking:
        raise UsageError(
            f"{units.name_some(lacking)} ({board_type.name}) {'has' if len(lacking) == 1 else 'have'} no known power "
            f"sensor, which {needing} needs",
            "Choose other boards. `farm up` looks for sensors.",
        )


def require_fixed_target(board_type: BoardType) -> None:
    """Raise UsageError for a type that stands for the local machine."""
    if board_type.target is None:
        raise UsageError(
            f"board type {board_type.name!r} has no fixed target: it stands for the local machine",
            "Leave --board out to use this machine; register a board elsewhere as another type.",
        )


def describe(row: BoardInfo, board_type: BoardType) -> Mapping[str, Any]:
    """Return the board's last description; for a board that never connected, one from its type."""
    if row.description:
        return row.description
    return describe_type(board_type, row.name, row.simulated)


def describe_type(board_type: BoardType, name: str, simulated: bool) -> Mapping[str, Any]:
    """Return what a board of a type would say of itself, for one that never connected."""
    # A virtual board runs this machine's code unless it is emulated; a real one has its type's target.
    kind = board_type.target.mtriple.partition("-")[0] if board_type.target else platform.machine()
    architecture = platform.machine() if simulated and not runs_own_code(board_type) else kind
    return {"name": name, "simulated": simulated, "architecture": architecture}


def plan_choice(rows: Sequence[BoardInfo], pool: Sequence[str]) -> BoardChoice:
    """Return which boards of the pool can be taken now."""
    known = {row.name: row for row in rows}
    reasons = {name: find_reason(known.get(name)) for name in pool}
    return BoardChoice(
        tuple(name for name, reason in reasons.items() if not reason),
        {name: reason for name, reason in reasons.items() if reason},
    )


def find_blocked(rows: Sequence[BoardInfo], pool: Sequence[str]) -> str:
    """Explain why the pool stays unusable until an operator acts; "" where it may not."""
    needing = [row for row in rows if row.name in pool and row.health in _OPERATORS]
    if len(needing) < len(pool):
        return ""
    return "; ".join(f"{row.name}: {row.health}: {row.health_reason}" for row in needing)


def require_usable(rows: Sequence[BoardInfo], pool: Sequence[str], board_type: str) -> None:
    """Raise UnavailableError, or BoardUnsafeError, where an operator has to act before a board can be taken."""
    if hopeless := find_blocked(rows, pool):
        unsafe = all(row.health == Health.UNSAFE for row in rows if row.name in pool)
        raise (BoardUnsafeError if unsafe else UnavailableError)(
            f"no {board_type} can be used: {hopeless}",
            "`farm board release` or `farm board release` puts one back in service.",
        )


def find_reason(row: BoardInfo | None) -> str:
    """Explain why a board cannot be taken now; "" where it can."""
    if row is None:
        return "it was removed"
    if row.state == State.LEASED:
        return str(row.state_reason)
    return find_unusable(row)


def find_unusable(row: BoardInfo | None) -> str:
    """Explain why a board must not be used, by any holder; "" where it may."""
    if row is None:
        return "it was removed"
    cause = find_cause(row)
    return "" if cause is None else f"{cause.what}: {cause.why}"


def plan_target(board_type: BoardType, description: Mapping[str, Any], host_cores: int) -> TargetPlan:
    """Return the target for a board with this description: its processor, or its GPU (`gpus.require_device`).

    A simulated board that runs its host's code gets this host's target with the board's cores. Raises UnavailableError
    where a real board is of another architecture than its type,
    CodeRefusedError for a virtual GPU that is not emulated.
    """
    plan = _plan_processor(board_type, description, host_cores)
    if not is_for_gpu(board_type.pipeline):
        return plan
    # The double of a virtual board's GPU is a library of this machine, also where the board's own code is emulated. The
    # processor only starts kernels, so it makes no difference which one it is.
    simulated = plan.config is None or bool(description.get("simulated"))
    host = {"kind": "llvm", "mtriple": f"{platform.machine()}-linux-gnu"} if simulated else plan.config
    gpu = plan_gpu(board_type)
    if simulated:
        require_emulated(gpu.arch)
    config = gpus.to_config(board_type.name, gpu, host or {}, simulated=simulated)
    return TargetPlan(config, 1, 1)


def _plan_processor(board_type: BoardType, description: Mapping[str, Any], host_cores: int) -> TargetPlan:
    target = board_type.target
    if target is None:
        return TargetPlan(None, host_cores, host_cores)
    architecture = str(description["architecture"])
    if target.mtriple.partition("-")[0] == architecture:
        return TargetPlan(target.to_tvm(), target.num_cores, target.num_cores)
    if not description["simulated"]:
        raise UnavailableError(
            f"board {description['name']!r} is {architecture}, which a {board_type.name} ({target.mtriple}) is not",
            "It may be registered as the wrong type; `farm doctor` says what it is.",
        )
    return TargetPlan(None, target.num_cores, min(target.num_cores, host_cores))
