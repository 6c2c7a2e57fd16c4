"""A simulated board's own clock: who lets it pass, where it begins anew, and what sensors showed at a past moment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from device_agent.worker.plan import OverrunError
from farm.virtual.board import VirtualBoard
from farm.virtual.clocks import Load
from farm.virtual.history import START_S, OwnClock
from farm.virtual.lapse import LapsedTime, LookBack
from farm.virtual.pace import Pace
from farm.virtual.tree import CLOCKS, FAULT, LOAD, PACE, TIME, VirtualTree
from farm.virtual.work import Work, WorkBook
from tests.unit.virtual_boards import board_types, make_board


def make_tree() -> VirtualTree:
    return VirtualTree(VirtualBoard(board_types()["jetson-nano"], 0, OwnClock()))


def find_current(tree: VirtualTree) -> str:
    """The file of the first rail's current."""
    folder = "/sys/bus/i2c/drivers/ina3221x"
    (device,) = tree.names(folder)
    return f"{folder}/{device}/iio:device0/in_current0_input"


def test_time_passes_when_it_is_let() -> None:
    """By as much as was asked for, with everything that happens on the way."""
    tree = make_tree()
    passing = LapsedTime(tree, LookBack(tree))
    assert passing.now_s() == START_S
    tree.write(FAULT, "throttle:3@5")
    assert passing.sleep(6.0) == 6.0
    assert passing.now_s() == START_S + 6
    assert tree.board.throttled
    passing.sleep(3.0)
    assert not tree.board.throttled


@pytest.mark.parametrize(
    "text", ["", "1", "{}", '{"pass_s": -1}', '{"pass_s": "1"}', '{"pass_s": 1e9}', '{"begin": 0}']
)
def test_other_words_are_refused(text: str) -> None:
    """Time neither runs backwards nor for years."""
    tree = make_tree()
    with pytest.raises(OSError, match="not a time to pass"):
        tree.write(TIME, text)
    assert json.loads(tree.read(TIME)) == {"now_s": START_S, "live": False}


def test_nobody_moves_the_time_of_a_live_board() -> None:
    """It passes by itself."""
    board, _ = make_board()
    tree = VirtualTree(board)
    assert json.loads(tree.read(TIME))["live"]
    for text in ('{"pass_s": 1}', '{"begin": true}'):
        with pytest.raises(OSError, match="passes by itself"):
            tree.write(TIME, text)


def test_a_new_beginning_forgets_heat_and_keeps_what_is_held() -> None:
    """Clock, heat and counters are those of a board that was idle for long; limits, loads and faults stay."""
    tree = make_tree()
    board = tree.board
    passing = LapsedTime(tree, LookBack(tree))
    passing.begin()
    cool_c, uptime_s = board.temperature_c, board.uptime_s
    with board.change():
        board.clusters["a57"].clock.set_limits(921_600_000, 921_600_000)
    tree.write(LOAD, '{"cores": 4}')
    passing.sleep(300)
    tree.write(LOAD, "{}")
    tree.write(FAULT, "throttle:30")
    passing.sleep(10)
    assert board.temperature_c > cool_c + 1
    passing.begin()
    assert (passing.now_s(), board.uptime_s, board.busy_core_s) == (START_S, uptime_s, 0.0)
    assert board.temperature_c == pytest.approx(cool_c, abs=1)
    assert board.clusters["a57"].clock.max_hz == 921_600_000
    assert board.throttled
    passing.sleep(20.5)
    assert not board.throttled


def test_sensors_are_read_as_they_were() -> None:
    """The values of a board that was busy for a while are seen when they came, once it is idle again."""
    tree = make_tree()
    path = find_current(tree)
    passing = LapsedTime(tree, LookBack(tree))
    passing.begin()
    live = []
    with tree.board.look_back(START_S):
        idle = tree.read(path)
    tree.board.set_load("kernel", Load(cores=4))
    for _ in range(40):
        passing.sleep(0.05)
        live.append(tree.read(path))
    tree.board.set_load("kernel", None)
    passing.sleep(2)
    files = LookBack(tree)
    with files.review(START_S) as ticker:
        assert files.read(path) == idle
        past = []
        for _ in range(40):
            ticker.sleep(0.05)
            past.append(files.read(path))
    assert past == live
    assert len(set(past)) > 2
    assert files.read(path) == tree.read(path)


def test_a_sensor_that_fails_for_a_while_failed_then() -> None:
    """Looked back at, errors come and go with the fault."""
    tree = make_tree()
    path = find_current(tree)
    passing = LapsedTime(tree, LookBack(tree))
    tree.write(FAULT, "sensor_error@2")
    tree.write(FAULT, "clear@3")
    passing.sleep(5)
    files = LookBack(tree)
    failed = []
    with files.review(START_S) as ticker:
        for turn in range(50):
            try:
                files.read(path)
            except OSError:
                failed.append(turn)
            ticker.sleep(0.1)
    assert failed in (list(range(20, 30)), list(range(21, 31)), list(range(20, 31)), list(range(21, 30)))


class Counted(VirtualTree):
    """A Nano whose questions are counted: across a socket each costs as much as all that is worked out for it."""

    def __init__(self) -> None:
        super().__init__(make_tree().board)
        self.asked: list[str] = []
        self.questions: list[list[str]] = []

    def read(self, path: str) -> str:
        if self.board._moment_s is None:
            self.asked.append(path)
        return super().read(path)

    def past(self, path: str, at_s: float) -> list[list[Any]]:
        self.asked.append(f"past {path}")
        return super().past(path, at_s)

    def past_many(self, paths: Sequence[str], at_s: float) -> list[list[list[Any]] | None]:
        self.questions.append(list(paths))
        return super().past_many(paths, at_s)


def test_what_was_read_together_is_asked_for_together_the_next_time() -> None:
    """A board's rails cost one question from their second review on, and show what they did."""
    tree = Counted()
    rails = [find_current(tree).replace("current0", f"current{index}") for index in range(3)]
    LapsedTime(tree, LookBack(tree)).sleep(10)
    files = LookBack(tree)
    seen = []
    for _ in range(2):
        with files.review(START_S) as ticker:
            shown = []
            for _ in range(20):
                shown.append([files.read(rail) for rail in rails])
                ticker.sleep(0.2)
        seen.append(shown)
    assert tree.questions == [[rails[0]], [rails[1]], [rails[2]], rails]
    assert seen[0] == seen[1]


def test_one_question_tells_all_of_a_sensors_past() -> None:
    """However many values it has had."""
    tree = Counted()
    path = find_current(tree)
    LapsedTime(tree, LookBack(tree)).sleep(10)
    files = LookBack(tree)
    with files.review(START_S) as ticker:
        for _ in range(100):
            files.read(path)
            ticker.sleep(0.1)
    assert tree.asked == [f"past {path}"]


def test_a_worker_asks_for_time_and_clocks_as_it_lets_time_pass(tmp_path: Path) -> None:
    """It is alone on the board: after the first time, what it was answered is what there is."""
    tree = Counted()
    WorkBook(tmp_path).keep("k", Work(0.1, 0.0))
    passing = LapsedTime(tree, LookBack(tree)).own()
    pace = Pace(tree, passing, "", 1, 100.0, tmp_path, "k")
    pace.begin()
    times_s = []
    for _ in range(10):
        pace.take(lambda calls: 0.1, 1)
        times_s.append(passing.now_s())
    assert times_s == sorted(set(times_s))
    assert passing.now_s() == LapsedTime(tree, LookBack(tree)).now_s()
    assert tree.asked.count(TIME) == 1  # the one just before
    assert [tree.asked.count(path) for path in (PACE, CLOCKS)] == [1, 12]


def test_what_takes_the_board_too_long_is_an_overrun_at_once(tmp_path: Path) -> None:
    """A call that takes seconds on the board is not waited for to be found too long."""
    tree = make_tree()
    WorkBook(tmp_path).keep("k", Work(1.0, 0.0))
    pace = Pace(tree, LapsedTime(tree, LookBack(tree)), "", 1, 10.0, tmp_path, "k")
    pace.begin()
    ran = []

    def run(calls: int) -> float:
        ran.append(calls)
        return 1.0

    pace.take(run, 1)
    with pytest.raises(OverrunError, match="10 s"):
        pace.take(run, 1)
    assert ran == [1]
