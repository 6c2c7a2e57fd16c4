"""Models timed in turns: how often each runs, and when its energy is read."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from device_agent.protocol import EnergySpec, Engine, Evidence, Limits, Outcome, RunSpec, Status
from farm.artifacts import timing
from farm.artifacts.timing import Variant
from farm.errors import PermanentError

LIMITS = Limits(timeout_s=10.0, memory_bytes=1 << 30)
VARIANTS = [
    Variant("ours", Engine.RELAX_VM, b"ours", {}, needed=True),
    Variant("untuned", Engine.RELAX_VM, b"untuned", {}, baseline=True),
]


class Board:
    def __init__(self, broken: tuple[bytes, ...] = ()) -> None:
        self.asked: list[tuple[bytes, RunSpec]] = []
        self._broken = broken

    def run(self, spec: RunSpec, program: bytes, inputs: dict[str, Any]) -> tuple[Outcome, dict[str, Any]]:
        self.asked.append((program, spec))
        if program in self._broken:
            return Outcome(Status.CRASHED, "no such operator"), {}
        return Outcome(Status.OK, latency_s=(1e-3,) * spec.runs), {"out": np.zeros(1)}

    def specs(self, program: bytes) -> list[RunSpec]:
        return [spec for asked, spec in self.asked if asked == program]


@pytest.mark.parametrize(
    ("slow", "other_load", "said"),
    [
        (0, 0.1, ""),
        (1, 0.1, ""),
        (8, 0.1, "equal runs of ours differ too much: the load average was 9.0, one run in ten took over 5.00 times"),
        (0, 1.6, "the board was too busy: other processes used 1.6 cores, the load average was 9.0"),
    ],
)
def test_latencies_of_a_busy_board_are_doubted(slow: int, other_load: float, said: str) -> None:
    """With the load that the board saw and the scatter of the runs; one slow run of forty is no reason."""
    latencies = (1e-3,) * (40 - slow) + ((5e-3 if slow > 1 else 2e-3),) * slow
    outcome = Outcome(Status.OK, latency_s=latencies, other_load=other_load, after=Evidence(load_1min=9.0))
    turns = timing.Turns(VARIANTS, 40, LIMITS)
    turns.take(0, VARIANTS[0], outcome, {"out": np.zeros(1)})
    assert turns.timed.find_doubt().startswith(said)
    assert bool(turns.timed.find_doubt()) is bool(said)


@pytest.mark.parametrize("runs", [60, 8, 100])
def test_runs_are_spread_over_all_rounds_and_a_baselines_over_three(runs: int) -> None:
    """A spell of load hits one round of many; slow code takes few turns, spread as far as the others'."""
    board = Board()
    timed = timing.Turns(VARIANTS, runs, LIMITS).run_all(board.run)
    ours, untuned = board.specs(b"ours"), board.specs(b"untuned")
    assert (len(ours), len(untuned)) == (timing.ROUNDS, timing.BASELINE_ROUNDS)
    assert len(timed.samples["ours"]) == runs
    assert len(timed.samples["untuned"]) == min(runs, timing.BASELINE_RUNS)
    assert Counter(spec.warmup for spec in untuned) == {timing.BASELINE_WARMUP_RUNS: 3}
    order = [program for program, _ in board.asked]
    first, *_, last = [index for index, program in enumerate(order) if program == b"untuned"]
    assert (first, last > len(order) / 2) == (1, True)


def test_few_runs_and_one_energy_window() -> None:
    """Turns without a run are left out. Its window takes seconds; reports show that of the last turn."""
    board = Board()
    timed = timing.Turns(VARIANTS, 2, LIMITS, energy=EnergySpec()).run_all(board.run)
    assert {name: len(samples) for name, samples in timed.samples.items()} == {"ours": 2, "untuned": 2}
    assert [bool(spec.energy) for spec in board.specs(b"ours")] == [False, True]
    board = Board()
    energy = EnergySpec()
    timing.Turns(VARIANTS, 16, LIMITS, energy=energy).run_all(board.run)
    for program in (b"ours", b"untuned"):
        *before, last = board.specs(program)
        assert last.energy == energy
        assert not any(spec.energy for spec in before)


def test_what_does_not_run_is_left_out_and_what_is_needed_ends_it() -> None:
    """Its reason is kept, and it is not tried again."""
    board = Board(broken=(b"untuned",))
    timed = timing.Turns(VARIANTS, 16, LIMITS).run_all(board.run)
    assert timed.missing["untuned"].endswith("no such operator")
    assert len(board.specs(b"untuned")) == 1
    with pytest.raises(PermanentError, match="ours model does not run"):
        timing.Turns(VARIANTS, 16, LIMITS).run_all(Board(broken=(b"ours",)).run)
