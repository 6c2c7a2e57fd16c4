"""How long one measurement may run. Pure; times in seconds.

When the call that carries it counts as stuck is in `farm.crew.board_calls`.
"""

from __future__ import annotations

# A candidate so much slower than the best so far is worth no more than that it is slow. Wide enough for the first
# trials of a search, whose best is far from what it ends with.
SLOWER = 15.0
# A busy board may take so long to read its sensors, and to start a candidate's threads and touch its memory.
RUN_FLOOR_S = 2.0
# Samples that were made long take that long however fast a candidate is; where other programs take the processor from
# it, so many times longer. A candidate must not be blamed for that.
_STARVED = 5.0
# The agent lengthens a sample that is too short by this margin (`device_agent/timing.py`), in a second round as a rule.
_GROWTH_MARGIN = 1.2
# What it calls before it counts: its warm-up, and one call of the evaluator's own per sample.
_CALLS_BESIDE = 1
# Loading is the board's file system and linker, which know nothing of how fast a candidate is.
LOAD_S = 10.0


def plan_run_timeout_s(
    best_s: float | None, samples: int, min_repeat_s: float, limit_s: float, number: int = 1
) -> float:
    """How long a candidate may run, given the best latency so far of its workload there; `limit_s` where none is known.

    `samples` of `number` calls are taken, each made as long as `min_repeat_s`. A candidate up to `SLOWER` times the
    best is timed in full. Never below `RUN_FLOOR_S`, never above `limit_s`.
    """
    if best_s is None:
        return limit_s
    slow_s = SLOWER * best_s
    wanted_s = RUN_FLOOR_S + samples * (number + _CALLS_BESIDE) * slow_s
    if number * best_s < min_repeat_s:  # samples of good candidates are made longer, in a second round
        wanted_s += samples * (_STARVED * _GROWTH_MARGIN * min_repeat_s + _CALLS_BESIDE * slow_s)
    return min(limit_s, wanted_s)
