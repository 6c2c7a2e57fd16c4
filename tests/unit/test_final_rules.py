"""What a model's final decides: mixes that take part, what is taken, and what a sentence says of it."""

from __future__ import annotations

import dataclasses

import pytest

from farm.artifacts.contenders import PREDICTED, RECORDED, RecordPart
from farm.campaign.verify import final_rules
from farm.selection.tie import Round

ALL = [RECORDED, PREDICTED, "mixed 1", "mixed 2"]


def part(name: str, seconds: float, differs: bool = True) -> RecordPart:
    return RecordPart(name, f"conv2d {name}", f"candidate {name}", seconds, differs)


def rounds(count: int = 8, **latencies: float) -> list[Round]:
    names = {"mixed_1": "mixed 1", "mixed_2": "mixed 2"}
    return [
        Round(
            number,
            "nano-1",
            {
                names.get(name, name): value * (1 + 0.002 * ((number * (at + 3)) % 5))
                for at, (name, value) in enumerate(latencies.items())
            },
        )
        for number in range(count)
    ]


def test_records_are_taken_where_they_gain() -> None:
    """However good the records are one by one. The gain is over the prediction, with an interval that leaves no room
    for none. A record that loses within the model spoils it for the others.
    """
    verdict = final_rules.decide(rounds(recorded=7.73, predicted=7.51), [RECORDED, PREDICTED], last=False)
    assert (verdict.taken, verdict.gain) == (PREDICTED, None)
    verdict = final_rules.decide(rounds(recorded=7.0, predicted=7.5), [RECORDED, PREDICTED], last=False)
    assert verdict.taken == RECORDED
    assert 1.0 < verdict.gain.low < verdict.gain.value == pytest.approx(7.5 / 7.0, rel=0.01)
    verdict = final_rules.decide(rounds(recorded=7.5, predicted=7.5, mixed_1=7.0, mixed_2=8.0), ALL, last=True)
    assert verdict.taken == "mixed 1"


def test_what_cannot_be_told_apart_is_looked_at_again_and_then_the_prediction_stays() -> None:
    """At first more rounds may tell; at the last look nothing that was tried is taken for nothing."""
    noisy = [
        Round(number, "b", {RECORDED: 7.0 + 0.9 * (number % 3), PREDICTED: 7.5 + 0.7 * (number % 2)})
        for number in range(8)
    ]
    assert final_rules.decide(noisy, [RECORDED, PREDICTED], last=False) is None
    last = final_rules.decide(noisy, [RECORDED, PREDICTED], last=True)
    assert last.taken == PREDICTED


def test_heavy_functions_are_left_out_by_different_mixes() -> None:
    """Each function whose code differs is left out by one mix; others, and those without a record, by none."""
    parts = [part("a", 4.0), part("b", 3.0), part("c", 2.0), part("d", 1.0), part("e", 9.0, differs=False)]
    mixes = final_rules.plan_mixes(parts, seconds=4.0)
    assert sorted(map(sorted, mixes.values())) == [["a"], ["b"], ["c", "d"]]
    assert mixes["mixed 1"] == {"a": "candidate a"}


@pytest.mark.parametrize(("count", "seconds", "expected"), [(1, 1.0, 0), (2, 1.0, 2), (5, 14.0, 2), (5, 60.0, 0)])
def test_there_are_as_many_mixes_as_time_is_for(count: int, seconds: float, expected: int) -> None:
    """A model that takes a minute to compile is decided as a whole; one function is no mix."""
    parts = [part(str(number), 1.0) for number in range(count)]
    assert len(final_rules.plan_mixes(parts, seconds)) == expected


def test_mixes_that_gain_alone_are_joined() -> None:
    """Those that are surely faster than all records; not where it is one, or all: that is the prediction."""
    mixes = {"mixed 1": {"a": "ca"}, "mixed 2": {"b": "cb"}, "mixed 3": {"c": "cc"}}
    latencies = {"recorded": 8.0, "mixed_1": 7.5, "mixed_2": 7.6}
    found = [Round(each.number, "b", {**each.latency_s, "mixed 3": 8.4}) for each in rounds(**latencies)]
    assert final_rules.join_mixes(found, mixes) == {"a": "ca", "b": "cb"}
    one = [Round(each.number, "b", {**each.latency_s, "mixed 2": 8.4}) for each in found]
    assert final_rules.join_mixes(one, mixes) is None
    all_ = [Round(each.number, "b", {**each.latency_s, "mixed 3": 7.0}) for each in found]
    assert final_rules.join_mixes(all_, mixes) is None


def test_within_the_model_each_function_says_whether_its_record_gains() -> None:
    """One mix keeps what surely gains there, one leaves out what surely loses; what was not seen there does neither."""
    parts = [dataclasses.replace(part(name, 1.0), function=f"fused_{name}") for name in "abcd"]
    parts.append(part("e", 1.0, differs=False))
    seen = {
        "fused_a": rounds(recorded=0.90, predicted=1.0),
        "fused_b": rounds(recorded=1.10, predicted=1.0),
        "fused_c": rounds(recorded=1.0, predicted=1.0),
    }
    ratios = final_rules.compare_in_place(parts, seen)
    assert {name: ratio.value for name, ratio in ratios.items()} == pytest.approx(
        {"a": 0.9, "b": 1.1, "c": 1.0}, rel=0.01
    )
    keeps_what_gains = {name: f"candidate {name}" for name in "bcd"}
    mixes = final_rules.mix_in_place(parts, ratios, seconds=4.0)
    assert list(mixes.values()) == [keeps_what_gains, {"b": "candidate b"}]
    assert list(final_rules.mix_in_place(parts, ratios, seconds=60.0).values()) == [keeps_what_gains]
    assert final_rules.mix_in_place(parts, dict.fromkeys("abcd", ratios["a"]), seconds=4.0) == {}
    assert final_rules.mix_in_place(parts, dict.fromkeys("abcd", ratios["b"]), seconds=4.0) == {}
