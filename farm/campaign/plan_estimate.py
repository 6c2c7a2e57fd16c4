"""Estimate what a budget pays for: trials, board types, time; and the time of verification after the trials. Pure
arithmetic.

All limits grow in proportion to the trials, so the first to be reached follows by division. Unknown here: workloads
that stop early, and the scheduler's preferences among workloads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from farm.campaign.spec import BudgetSpec
from farm.selection.rounds import LEAST_ROUNDS
from farm.selection.tie import LOOKS
from farm.types.campaigns import Order, WorkloadOrder

# Measurements for verification per trial of the search: with 64 trials of a task, three candidates and the incumbent
# can be measured eight times.
SHARE = 0.5
# The longest window in which a finalist's energy is sampled; the sensors of Nano and TX2 need all of it.
WINDOW_S = 10.0
# Board time of a trial besides its samples, until trials say better.
_HELD_S = 0.5
# Of one task: its reference and candidates are replayed, compiled and run once. 7 tasks of a small CNN took 18 s, 22 of
# squeezenet1.1 27 s (two cores of an Intel server, which was the board too); the slowest host seen takes twice as long,
# and a budget of time must hold there as well.
CHECK_S = 3.0
# Of one model: load it, compile each function as recorded and as predicted, time the programs in turns. That CNN with
# 7 functions took 23 s there, squeezenet1.1 with 22 functions 60 s.
_FINAL_START_S = 5.0
_FINAL_FUNCTION_S = 3.0
_FINAL_TIMING_S = 9.0
# The search has at least this part of a wall clock: without trials there is nothing to verify.
_LEAST_SEARCH = 1 / 3
_HOUR_S = 3600.0
# 0.1 hours must pay for 360 trials of a second, not for 359.99999.
_ROUNDING = 1e-9
NO_BOARDS = "no board can be used"


@dataclasses.dataclass(frozen=True)
class Allowance:
    """One task's finalists: `candidates` of the search, beside the baseline; `looks` are the rounds after which they
    are compared (see `tie.TieRule`).
    """

    top: int
    looks: tuple[int, ...]

    @property
    def most(self) -> int:
        """The most measurements it can take."""
        return self.looks[-1] * (self.top + 1)

    @property
    def usual(self) -> int:
        """The measurements it takes where the first look decides."""
        return self.looks[0] * (self.top + 1)


def plan_allowance(trials: float, top: int, looks: Sequence[int]) -> Allowance:
    """Plan the verification of a task after this many trials; `top` and `looks` are as ordered."""
    allowed = SHARE * trials
    fewer = max(1, min(top, int(allowed // looks[0]) - 1))
    kept = tuple(look for look in looks if look * (fewer + 1) <= allowed)
    return Allowance(fewer, kept or (LEAST_ROUNDS,))


def leave_room(limit: float | None) -> float | None:
    """Return the search's part of a budget of board seconds or joules; the rest is for verification."""
    return None if limit is None else limit / (1 + SHARE)


def estimate_final_s(functions: int) -> float:
    """Estimate compiling and timing of a model with this many tuned functions."""
    return _FINAL_START_S + _FINAL_FUNCTION_S * functions + _FINAL_TIMING_S


def leave_time(wall_clock_s: float | None, fixed_s: float, least_winners_s: float) -> float | None:
    """Return the search's part of a wall clock.

    `fixed_s` are checks and finals, `least_winners_s` the fewest measurements of finalists, which also get a share of
    the search's part.
    """
    if wall_clock_s is None:
        return None
    left_s = wall_clock_s - fixed_s
    return max(_LEAST_SEARCH * wall_clock_s, min(left_s / (1 + SHARE), left_s - least_winners_s))


@dataclasses.dataclass(frozen=True)
class LaneEstimate:
    """Trials of one board type at one operating point: `jobs` workloads share `boards` that have the point.

    `held_s` is how long a trial holds a board, `host_core_s` its cost in search and build. `alone`: the host is the
    board, and only measures meanwhile. `check_s` is checking the finalists of one workload, `finals_s` compiling and
    timing the models after that. `power_w` is a board's idle power, 0 where it is unknown; `window_s` is a
    finalist's window of energy.
    """

    board_type: str
    jobs: int
    boards: frozenset[str]
    held_s: float
    host_core_s: float
    alone: bool = False
    check_s: float = 0.0
    finals_s: float = 0.0
    power_w: float = 0.0
    window_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class CampaignEstimate:
    """The estimate for a budget. `trials` by lane, then at most `winners` measurements of finalists; `limit` is the
    limit reached first; `energy_j` is what the boards use at idle power, 0 where that is unknown.

    `boards_s` and `host_s` are the search's time where only boards or only the host are the bottleneck, `alone_s` this
    machine's as a board, `winners_s` that of verification, `finals_s` that of compiling and timing models; `eta_s` is
    their sum.
    """

    trials: tuple[int, ...]
    winners: tuple[int, ...]
    board_hours: tuple[float, ...]
    eta_s: float | None
    boards_s: float
    host_s: float
    alone_s: float
    winners_s: float
    finals_s: float
    limit: str
    energy_j: float = 0.0

    @property
    def trials_s(self) -> float:
        """Return the seconds of the trials: the slower of boards and host, then this machine as a board."""
        return max(self.boards_s, self.host_s) + self.alone_s


def estimate(
    lanes: Sequence[LaneEstimate], budget: BudgetSpec, host_cores: int, verify_top: int = 3
) -> CampaignEstimate:
    """Spread the budget evenly over the workloads and points of the lanes that have boards.

    `verify_top` candidates of each workload are verified, as far as the budget's share allows.
    """
    open_jobs = sum(lane.jobs for lane in lanes if lane.boards)
    if not open_jobs:
        nothing = (0,) * len(lanes)
        return CampaignEstimate(nothing, nothing, (0.0,) * len(lanes), None, 0.0, 0.0, 0.0, 0.0, 0.0, NO_BOARDS)
    shares = [lane.jobs / open_jobs if lane.boards else 0.0 for lane in lanes]
    boards_s, host_s, alone_s = _spend(lanes, shares, host_cores)
    held_s = sum(share * lane.held_s for share, lane in zip(shares, lanes, strict=True))
    held_j = sum(share * lane.held_s * lane.power_w for share, lane in zip(shares, lanes, strict=True))
    finals_s = sum(lane.finals_s for lane in lanes if lane.boards)
    least = [2 * LEAST_ROUNDS * lane.jobs for lane in lanes]
    least_s, _, least_alone_s = _spend(lanes, least, host_cores)
    checks_s = sum(lane.jobs * lane.check_s for lane in lanes if lane.boards)
    wall_clock_s = leave_time(budget.wall_clock, checks_s + finals_s, least_s + least_alone_s)
    limit, total = min(
        _read_limits(budget, wall_clock_s, open_jobs, held_s, held_j, max(boards_s, host_s) + alone_s),
        key=lambda each: each[1],
    )
    trials = _spread(math.floor(total * (1 + _ROUNDING)), shares)
    boards_s, host_s, alone_s = _spend(lanes, trials, host_cores)
    # A workload without a trial has no finalist.
    winners = [
        min(n, lane.jobs) * plan_allowance(n / lane.jobs, verify_top, LOOKS).most if n else 0
        for n, lane in zip(trials, lanes, strict=True)
    ]
    longer = [dataclasses.replace(lane, held_s=lane.held_s + lane.window_s) for lane in lanes]
    winners_s, _, winners_alone_s = _spend(longer, winners, host_cores)
    winners_s += winners_alone_s + sum(min(n, lane.jobs) * lane.check_s for n, lane in zip(trials, lanes, strict=True))
    held = [
        (n + more) * lane.held_s + more * lane.window_s for n, more, lane in zip(trials, winners, lanes, strict=True)
    ]
    return CampaignEstimate(
        trials=tuple(trials),
        winners=tuple(winners),
        board_hours=tuple(each / _HOUR_S for each in held),
        energy_j=sum(each * lane.power_w for each, lane in zip(held, lanes, strict=True)),
        eta_s=max(boards_s, host_s) + alone_s + winners_s + finals_s,
        boards_s=boards_s,
        host_s=host_s,
        alone_s=alone_s,
        winners_s=winners_s,
        finals_s=finals_s,
        limit=limit,
    )


def _read_limits(
    budget: BudgetSpec, wall_clock_s: float | None, jobs: int, held_s: float, held_j: float, wall_s: float
) -> list[tuple[str, float]]:
    """Return how many trials each limit allows. `held_s`, `held_j` and `wall_s` are of one average trial;
    `wall_clock_s` is the search's part.
    """
    limits: list[tuple[str, float]] = []
    if budget.trials is not None:
        limits.append(("trials", budget.trials))
    if budget.per_workload is not None:
        limits.append(("per_workload", budget.per_workload * jobs))
    if budget.board_hours is not None:
        limits.append(("board_hours", (leave_room(budget.board_hours * _HOUR_S) or 0.0) / held_s))
    if budget.joules is not None and held_j:
        limits.append(("joules", (leave_room(budget.joules) or 0.0) / held_j))
    if wall_clock_s is not None:
        limits.append(("wall_clock", wall_clock_s / wall_s))
    return limits


def _spend(lanes: Sequence[LaneEstimate], trials: Sequence[float], host_cores: int) -> tuple[float, float, float]:
    """Return the least seconds of boards and of host for these trials, and the seconds that they take in turn."""
    host_s = sum(n * lane.host_core_s for n, lane in zip(trials, lanes, strict=True)) / host_cores
    per_type: Mapping[str, list[tuple[float, LaneEstimate]]] = {lane.board_type: [] for lane in lanes}
    boards_s = alone_s = 0.0
    for n, lane in zip(trials, lanes, strict=True):
        if not lane.boards:
            continue
        if lane.alone:
            alone_s += n * lane.held_s
            continue
        # Neither the boards of the point nor all boards of the type for all points can be faster.
        boards_s = max(boards_s, n * lane.held_s / len(lane.boards))
        per_type[lane.board_type].append((n * lane.held_s, lane))
    for parts in per_type.values():
        boards = frozenset(name for _, lane in parts for name in lane.boards)
        if boards:
            boards_s = max(boards_s, sum(seconds for seconds, _ in parts) / len(boards))
    return boards_s, host_s, alone_s


def _spread(total: int, shares: Sequence[float]) -> list[int]:
    """Split `total` into integers nearest to the shares: the largest remainders are rounded up."""
    exact = [total * share for share in shares]
    parts = [math.floor(each) for each in exact]
    by_remainder = sorted(range(len(shares)), key=lambda index: (parts[index] - exact[index], index))
    for index in [each for each in by_remainder if shares[each] > 0][: total - sum(parts)]:
        parts[index] += 1
    return parts


def list_final_s(order: Order) -> Iterator[float]:
    """List how long the final of each model takes on each board type at each operating point."""
    for of_type in order.types:
        for model in order.models:
            if count := count_functions(of_type.workloads, model.name):
                yield from [estimate_final_s(count)] * len(of_type.points)


def find_final_s(order: Order, model: str, board_type: str) -> float:
    """Estimate the final of a model on a board type at one operating point."""
    of_type = next(each for each in order.types if each.board_type == board_type)
    return estimate_final_s(count_functions(of_type.workloads, model))


def count_functions(workloads: Sequence[WorkloadOrder], model: str) -> int:
    """Count the tuned functions of a model."""
    return sum(model in each.models for each in workloads)


def count_tasks(order: Order) -> int:
    """Count an order's workloads on each board type at each operating point."""
    return sum(len(of_type.workloads) * len(of_type.points) for of_type in order.types)


def leave_search_s(order: Order, wall_clock_s: float | None) -> float | None:
    """Return the search's part of an order's wall clock."""
    tasks, measure = count_tasks(order), order.measure
    held_s = measure.repeat * measure.min_repeat_s + _HELD_S
    # A finalist and the baseline.
    least_s = tasks * 2 * LEAST_ROUNDS * held_s
    return leave_time(wall_clock_s, tasks * CHECK_S + sum(list_final_s(order)), least_s)
