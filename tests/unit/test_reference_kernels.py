"""Which board of a type lies about its speed, judged from runs of one candidate on all of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from farm.campaign.engine.reference_kernels import (
    MIN_RUNS,
    ReferenceBook,
    ReferenceRun,
    Rhythm,
    estimate_noise,
    judge_board,
)


def runs(*medians_ms: float, start: float = 0.0) -> list[ReferenceRun]:
    return [ReferenceRun(start + 60.0 * index, median_ms / 1e3) for index, median_ms in enumerate(medians_ms)]


def draw(seed: int, count: int, factor: float = 1.0, noise: float = 0.02) -> list[ReferenceRun]:
    """Runs of a board that takes 10 ms times `factor`."""
    dice = random.Random(seed)
    return runs(*(10.0 * factor * (1 + noise * dice.gauss(0, 1)) for _ in range(count)))


def test_a_slow_board_among_three_is_a_liar() -> None:
    """30 % slower from its first run on: found after three runs, with by how much; it never had a good one."""
    fleet = {"a": runs(10.0, 10.1), "b": runs(9.8), "slow": runs(13.0, 13.1, 12.9)}
    verdict = judge_board("slow", fleet)
    assert verdict.drifting
    assert verdict.ratio == pytest.approx(1.3, abs=0.03)
    assert 1.1 < verdict.low < verdict.ratio
    assert verdict.since is None
    assert verdict.against == "2 other boards of its type"
    assert not judge_board("a", fleet).drifting
    assert not judge_board("b", fleet).suspicious


def test_a_slow_board_is_told_by_its_runs() -> None:
    """What it measured after that is in doubt, and not what it measured before. Three in four are enough: on a busy
    host a slow board's runs scatter, too.
    """
    fleet = {"a": runs(10, 10, 10, 10, 10), "b": runs(10, 10, 10, 10, 10), "c": runs(10, 10, 13, 13, 13)}
    verdict = judge_board("c", fleet)
    assert verdict.drifting
    assert verdict.since == 60.0
    fleet = {"a": runs(10, 10, 10, 10), "b": runs(10, 10, 10, 10), "c": runs(10, 13, 13, 10.5, 13, 13)}
    verdict = judge_board("c", fleet)
    assert verdict.drifting
    assert verdict.since == 0.0
    assert not judge_board("c", fleet | {"c": runs(10, 13, 10, 13)}).drifting


@pytest.mark.parametrize("count", range(1, MIN_RUNS))
def test_a_few_slow_runs_are_suspicious_and_no_more(count: int) -> None:
    """Another client may have used the board for a moment."""
    fleet = {"a": runs(10, 10), "b": runs(10, 10), "c": runs(10, 10, *[13.0] * count)}
    verdict = judge_board("c", fleet)
    assert verdict.suspicious
    assert not verdict.drifting
    fleet["c"] += runs(10.0, start=1000.0)
    assert not judge_board("c", fleet).suspicious


def test_what_is_no_lie() -> None:
    """Individuals of one type are not alike: 8 % is no lie, however sure it is. 13 % slower, among runs that scatter by
    10 %. All boards become slower together. Nor is one without other boards to compare it with.
    """
    fleet = {"a": runs(*[10.0] * 20), "b": runs(*[10.0] * 20), "c": runs(*[10.8] * 20)}
    assert not judge_board("c", fleet).suspicious
    fleet = {"a": runs(10, 11, 9, 10, 11.5), "b": runs(9, 10.5, 10, 11, 9), "c": runs(11.3, 12.8, 11.1)}
    assert not judge_board("c", fleet).drifting
    fleet = {name: runs(10, 10, 10, 13, 13, 13, 13, 13) for name in "abc"}
    assert not any(judge_board(name, fleet).drifting for name in fleet)
    assert not judge_board("a", {"a": fleet["a"]}).suspicious
    assert not judge_board("a", {}).suspicious
    assert not judge_board("a", {"b": runs(1.0)}).suspicious
    assert not judge_board("a", {"a": runs(1.0)}).suspicious


def test_of_two_boards_nobody_knows_which_one_lies() -> None:
    """Unless one of them became slower than it was itself."""
    assert not judge_board("b", {"a": runs(10, 10, 10), "b": runs(13, 13, 13, 13, 13)}).drifting
    changed = {"a": runs(10, 10, 10, 10, 10), "b": runs(10, 10, 13, 13, 13)}
    verdict = judge_board("b", changed)
    assert verdict.drifting
    assert "its own earlier runs" in verdict.against
    assert not judge_board("a", changed).drifting


def test_noise_is_within_boards_and_ignores_one_that_changed() -> None:
    """Levels that differ from board to board are not noise, nor is one run far off."""
    assert estimate_noise([runs(10, 10.2, 9.8, 30.0), runs(20, 20.4, 19.6, 20)]) == pytest.approx(0.03, abs=0.015)
    assert estimate_noise([runs(10)]) == estimate_noise([runs(10, 10, 10)]) == 0.03  # too few to be believed
    assert estimate_noise([runs(*[10] * 20)]) == 0.01


@pytest.mark.parametrize("boards", [3, 4, 8])
def test_honest_fleets_are_left_alone_and_liars_found(boards: int) -> None:
    """Over many fleets of noisy boards that differ by up to 3 %: none is accused wrongly, each drifting is found."""
    for seed in range(60):
        dice = random.Random(seed)
        fleet: dict[str, Sequence[ReferenceRun]] = {
            f"b{index}": draw(100 * seed + index, 8, dice.uniform(0.97, 1.03)) for index in range(boards)
        }
        assert not any(judge_board(name, fleet).drifting for name in fleet), seed
        fleet["b0"] = draw(seed, 5, dice.uniform(0.97, 1.03)) + draw(seed + 7, 5, 1.3)
        assert [name for name in fleet if judge_board(name, fleet).drifting] == ["b0"], seed


def test_reference_kernels_are_measured_now_and_then() -> None:
    """At arrival, then after so many trials or so long, within the share of a board's time; an idle board is not."""
    book = ReferenceBook(Rhythm(every_s=60.0, every_trials=30, share=0.03))
    assert book.is_due("a", 0.0)
    book.note_run("a", ReferenceRun(0.0, 1.0), 0.0, 1.0)
    assert not book.is_due("a", 1000.0)
    book.note_trial("a")
    assert not book.is_due("a", 59.0)
    assert book.is_due("a", 60.0)
    for _ in range(29):
        book.note_trial("a")
    assert not book.is_due("a", 30.0)  # one second in thirty is more than three per cent
    assert book.is_due("a", 34.0)


def test_a_first_run_that_came_to_nothing_is_made_again_soon() -> None:
    """Without one a board is neither judged nor a witness."""
    book = ReferenceBook(Rhythm(settling_s=5.0))
    book.note_run("a", None, 0.0, 1.0)
    book.note_trial("a")
    assert not book.is_due("a", 4.0)
    assert book.is_due("a", 5.0)


def test_a_slow_run_is_looked_into_soon() -> None:
    """Ten runs, some seconds apart and without waiting for trials; then the usual rhythm goes on."""
    book = ReferenceBook(Rhythm(settling_s=5.0))
    for name in "ab":
        book.note_run(name, ReferenceRun(0.0, 1.0), 0.0, 1.0)
    for count in range(1, 11):
        at = 5.0 * count
        book.note_run("c", ReferenceRun(at, 1.12 + 0.01 * (at % 2)), at, 1.0)
        assert not book.is_due("c", at + 4.9)
        assert book.is_due("c", at + 5.0) == (count < 10)
        assert book.find_drifting("c") is None


def test_others_of_its_type_run_beside_a_slow_board() -> None:
    """Four of them, each as often as it did, so that runs of one time are compared. A good run ends it."""
    book = ReferenceBook(Rhythm(settling_s=5.0))
    for name in "abcdef":
        book.note_run(name, ReferenceRun(0.0, 1.0), 0.0, 1.0)
    book.note_run("f", ReferenceRun(10.0, 1.3), 10.0, 1.0)
    assert [name for name in "abcdef" if book.is_due(name, 15.0)] == ["a", "b", "c", "d", "f"]
    for name in "abc":
        book.note_run(name, ReferenceRun(15.0, 1.0), 15.0, 1.0)
    assert [name for name in "abcdef" if book.is_due(name, 20.0)] == ["d", "f"]
    book.note_run("f", ReferenceRun(20.0, 1.0), 20.0, 1.0)
    assert not book.is_due("d", 30.0)
    assert not book.is_due("f", 30.0)


def test_what_makes_all_boards_slow_is_nobodys_lie() -> None:
    """The first one to be slow is looked into, and by then the others are."""
    book, names = ReferenceBook(Rhythm(settling_s=5.0)), "abcd"
    for name in names:
        book.note_run(name, ReferenceRun(0.0, 1.0), 0.0, 1.0)
    for at in range(100, 200):
        for name in names:
            if book.is_due(name, at) or (at, name) == (100, "c"):
                book.note_run(name, ReferenceRun(at, 1.3), at, 1.0)
        assert not any(book.find_drifting(name) for name in names)


def test_what_is_relied_on_is_looked_at_once_more() -> None:
    """A board that has measured since its last run makes another one at once; one that was slow then goes on."""
    book = ReferenceBook(Rhythm(settling_s=5.0))
    for name in "abc":
        book.note_run(name, ReferenceRun(0.0, 1.0), 0.0, 1.0)
    for name in "bc":
        book.note_trial(name)
    for name in "abc":
        book.ask(name)
    assert [name for name in "abc" if book.is_due(name, 1.0) and book.is_settling(name)] == ["b", "c"]
    book.note_run("b", ReferenceRun(2.0, 1.0), 2.0, 1.0)
    book.note_run("c", ReferenceRun(2.0, 1.3), 2.0, 1.0)
    assert [name for name in "abc" if book.is_settling(name)] == ["c"]
    book.note_run("c", ReferenceRun(7.0, 1.0), 7.0, 1.0)
    assert not book.is_settling("c")


def test_a_liar_has_to_prove_itself() -> None:
    """Its runs are forgotten; three new ones that are not slow clear it, slow ones do not."""
    book = ReferenceBook(Rhythm())
    for name, median_s in (("a", 1.0), ("b", 1.0), ("c", 1.3)):
        for at in range(MIN_RUNS):
            book.note_run(name, ReferenceRun(float(at), median_s), float(at), 0.1)
    assert book.find_drifting("c") is not None
    book.doubt("c")
    for at in range(MIN_RUNS):
        assert book.find_drifting("c") is None
        assert book.needs_proof("c")
        assert book.is_due("c", 0.0)
        book.note_run("c", ReferenceRun(10.0 + at, 1.12), 10.0 + at, 0.1)
    assert book.find_drifting("c") is not None
    book.doubt("c")
    for at in range(MIN_RUNS):
        book.note_run("c", ReferenceRun(20.0 + at, 1.0), 20.0 + at, 0.1)
        assert book.find_drifting("c") is None
    assert not book.needs_proof("c")
