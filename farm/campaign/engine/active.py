"""The engine's data on one running campaign, beside the scheduler's entry of it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from device_agent.protocol import FaultSide, MeasureSpec, Outcome, TensorSpec
from farm.campaign.scheduler.state import CampaignEntry, Job, Lane
from farm.campaign.verify import programs
from farm.inventory.board_types import require_board_type
from farm.points.values import format_clocks
from farm.search import gpus
from farm.types.campaigns import Budget, Order

# A candidate this much slower than the best so far need not be timed exactly. The first trials of a search are far from
# its final best.
SLOWER = 15.0
# A busy board takes this long to read its sensors, start a candidate's threads and touch its memory.
RUN_FLOOR_S = 2.0
# Load on the host stretches long samples up to this factor. A candidate must not be blamed for that.
_STARVED = 5.0
# The agent lengthens a short sample by this margin (`device_agent/worker/timing.py`), usually in a second round.
_GROWTH_MARGIN = 1.2
# Calls before timing starts: the warm-up, and one call of the evaluator's own per sample.
_CALLS_BESIDE = 1
# Loading depends on the board's file system and linker, not on the candidate.
LOAD_S = 10.0
# Points kept of the curve of latency over trials; beyond that every second one is dropped.
_HISTORY = 200


def plan_run_timeout_s(
    best_s: float | None, samples: int, min_repeat_s: float, limit_s: float, number: int = 1
) -> float:
    """Plan a candidate's time-out from the best latency so far of its workload there; `limit_s` where there is none.

    `samples` of `number` calls are taken, each at least `min_repeat_s` long. A candidate up to `SLOWER` times the best
    is timed in full. The result is at least `RUN_FLOOR_S` and at most `limit_s`.
    """
    if best_s is None:
        return limit_s
    slow_s = SLOWER * best_s
    wanted_s = RUN_FLOOR_S + samples * (number + _CALLS_BESIDE) * slow_s
    if number * best_s < min_repeat_s:  # samples of fast candidates are lengthened in a second round
        wanted_s += samples * (_STARVED * _GROWTH_MARGIN * min_repeat_s + _CALLS_BESIDE * slow_s)
    return min(limit_s, wanted_s)


@dataclasses.dataclass(eq=False)
class Active:
    """One campaign under way. `id` is its number in the store."""

    id: int
    campaign: CampaignEntry
    attempts: dict[tuple[str, str, str, str], int] = dataclasses.field(default_factory=dict)
    # The latest power of each board.
    power_w: dict[str, float] = dataclasses.field(default_factory=dict)
    # How long a counted trial held a board on average.
    trial_s: float | None = None
    # Counted trials and wall clock (s) at the first report with trials: start-up is left out of the pace.
    pace_from: tuple[int, float] | None = None
    # How long earlier engines' searches worked.
    searched_s: float = 0.0
    faults: dict[str, int] = dataclasses.field(default_factory=lambda: {f"{side}_faults": 0 for side in FaultSide})
    history: list[tuple[int, dict[str, float]]] = dataclasses.field(default_factory=list)
    history_step: int = 1
    warm: dict[str, str] = dataclasses.field(default_factory=dict)
    # The clocks that candidates ran at, by board type and point.
    clocks: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    # The command that watches it; its death pauses the campaign once.
    process: Mapping[str, Any] | None = None

    # Latencies of records by board type, point and workload; they count once verification has `decided`.
    recorded: Mapping[tuple[str, str, str], float] = dataclasses.field(default_factory=dict)
    decided: bool = False

    # The limits that were heard of last. Since when it has no board (monotonic, s), and what was noted of that.
    budget: Budget | None = None
    alone_since: float | None = None
    absence: tuple[str, str] | None = None

    @property
    def order(self) -> Order:
        return self.campaign.order

    @property
    def name(self) -> str:
        return self.campaign.name

    def find_energy_j(self, board: str, outcome: Outcome, board_s: float) -> float:
        """Return the energy that a measurement took: the board's power in it times the time held.

        Without a reading, the power is the board's latest, or before one its type's idle power.
        """
        if outcome.power is not None and outcome.power.total is not None:
            self.power_w[board] = outcome.power.total.power_w
        return board_s * self.power_w.get(board, self._idle_w)

    @functools.cached_property
    def _idle_w(self) -> float:
        """The greatest idle power of its board types, in W."""
        ranges = (require_board_type(each.board_type).power.idle_range_w or (0.0, 0.0) for each in self.order.types)
        return max(sum(each) / 2 for each in ranges)

    def next_attempt(self, job: Job) -> int:
        """Return the number of a candidate's next attempt, from 1. `forget` removes the entry.

        A candidate that was given up keeps its entry: a restarted search may propose it again.
        """
        key = _to_attempts_key(job)
        self.attempts[key] = self.attempts.get(key, 0) + 1
        return self.attempts[key]

    def forget(self, job: Job) -> None:
        """Drop the entry of a candidate that is concluded: its attempts are counted in the store."""
        self.attempts.pop(_to_attempts_key(job), None)

    def count_fault(self, side: FaultSide) -> None:
        self.faults[f"{side}_faults"] += 1

    def note_clocks(self, lane: Lane, outcome: Outcome) -> None:
        """Keep the board's clocks in a lane's trial."""
        place = (lane.board_type, lane.point)
        if place not in self.clocks:
            clusters = {
                each.name: each.cpus for each in require_board_type(lane.board_type).clusters if not each.isolated
            }
            self.clocks[place] = format_clocks(outcome, clusters, on_gpu=gpus.is_gpu(lane.of_type.target))

    def note_history(self, counted: int, latencies: Mapping[str, float]) -> None:
        """Append a point to the latency curve, in bounded space."""
        if latencies and (not self.history or counted >= self.history[-1][0] + self.history_step):
            self.history.append((counted, dict(latencies)))
            if len(self.history) > _HISTORY:
                self.history = self.history[::2]
                self.history_step *= 2


def _to_attempts_key(job: Job) -> tuple[str, str, str, str]:
    task = job.task.key
    return task.board_type, task.workload, task.point, job.candidate.hash


def to_measure_spec(job: Job, best_s: float | None) -> MeasureSpec:
    """Return how to time a candidate; its time-out follows the best of its task so far (s)."""
    of_type, order = job.task.lane.of_type, job.task.lane.campaign.order
    spec = programs.to_measure_spec(order, of_type, tuple(TensorSpec(*each) for each in job.candidate.arguments))
    timeout_s = plan_run_timeout_s(best_s, spec.repeat, spec.min_repeat_s, spec.limits.timeout_s)
    limits = dataclasses.replace(spec.limits, timeout_s=timeout_s, load_timeout_s=LOAD_S)
    return dataclasses.replace(spec, limits=limits)
