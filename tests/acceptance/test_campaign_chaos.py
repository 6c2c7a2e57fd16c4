"""A campaign whose processes are killed at more than fifty seeded moments makes exactly the trials of its budget."""

from __future__ import annotations

import functools
import random
import time

import pytest

from tests.acceptance.chaos import Moment, Scene, TrialTable, plan_moments
from tests.acceptance.conftest import Home, Running, wait_until

SEED, BUDGET = 17, 150
# All of it, on a machine that does other things as well.
_PATIENCE_S = 1800.0
_OPERATOR_S = 0.25
# After so many trials a moment whose victim has not come is passed over.
_PASSED_OVER = 8
FLEET = """\
vars: { transport: virtual, time: live }
groups:
  nanos: { vars: { type: jetson-nano }, hosts: { nano: { count: 3 } } }
"""
CAMPAIGN = f"""\
name: chaos
models: tiny-cnn
boards: {{ types: jetson-nano }}
budget: {{ trials: {BUDGET} }}
search: {{ tuner: xgb, warm_start: false }}
measure: {{ repeat: 2, min_repeat: 5ms, verify_top: 1 }}
"""


class Operator:
    """Types what a person would who finds the campaign interrupted, or a board in quarantine."""

    def __init__(self, home: Home, scene: Scene, table: TrialTable) -> None:
        self._home, self._scene, self._table = home, scene, table
        self._typed: dict[str, Running] = {}
        self._next_look = 0.0
        self.resumed = self.cleared = 0

    def look(self) -> None:
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _OPERATOR_S
        self._typed = {name: each for name, each in self._typed.items() if each.process.poll() is None}
        if "resume" not in self._typed and self._scene.find_engine() is None:
            self._typed["resume"] = self._home.start("campaign", "resume", "chaos", "--detach")
            self.resumed += 1
        for name in self._table.list_fallen():
            if name not in self._typed:
                self._typed[name] = self._home.start("board", "release", name, "--why", "it was killed by a test")
                self.cleared += 1


@pytest.mark.timeout(_PATIENCE_S + 60.0)
def test_no_trial_is_lost_and_none_is_made_twice(home: Home) -> None:
    """After any kill trials in the store stay, each candidate counts once, and the campaign ends as planned."""
    (home.path / "fleet.yaml").write_text(FLEET)
    (home.path / "chaos.yaml").write_text(CAMPAIGN)
    assert home.run("fleet", "apply", "fleet.yaml").code == 0
    assert home.run("up").code == 0
    began = time.monotonic()
    started = home.run("campaign", "run", "chaos.yaml", "--detach")
    assert started.code == 0, started.err
    scene, table, chance = Scene(home), TrialTable(home, "chaos"), random.Random(SEED)
    operator = Operator(home, scene, table)
    deadline = began + _PATIENCE_S

    def is_due(moment: Moment) -> bool:
        state = table.state()
        if state == "finished":
            return True
        operator.look()
        if moment.trials == BUDGET and state != "verifying":
            return False
        beyond = table.count() - moment.trials
        # What lives for moments only, as the process that probes a board, is not waited for to the end.
        return beyond >= 0 and (scene.find(moment.victim, chance) is not None or beyond >= _PASSED_OVER)

    def is_over() -> bool:
        if table.state() not in ("finished", "cancelled", "failed"):
            operator.look()
            return False
        return True

    killed = 0
    for moment in plan_moments(SEED, BUDGET):
        wait_until(functools.partial(is_due, moment), f"{moment} after {table.check()}", deadline - time.monotonic())
        before = table.check()
        killed += scene.kill(moment, chance)
        print(f"{time.monotonic() - began:6.1f} s {moment} {before}", flush=True)
        table.check()
    wait_until(is_over, "the campaign to end", deadline - time.monotonic())
    print(f"{time.monotonic() - began:6.1f} s {killed} killed, {operator.resumed} resumed, {operator.cleared} cleared")
    assert killed >= 50
    trials = table.check()
    assert (table.state(), trials.pop("counted")) == ("finished", BUDGET)
    assert sum(trials.values()) <= killed, f"more attempts failed than processes were killed: {trials}"
    # A workload whose candidates do not gain on untuned code has none.
    recorded = {row[0] for row in home.rows("SELECT workload FROM records")}
    assert recorded
    assert recorded <= {row[0] for row in home.rows("SELECT workload FROM trials WHERE counted IS NOT NULL")}
    wait_until(lambda: not scene.is_held(), "the engine to end")
    assert home.run("down").code == 0
    wait_until(lambda: not home.processes(), f"all processes to end: {home.processes()}")
    assert [path.name for path in home.temporary.iterdir() if path.is_dir()] == []
