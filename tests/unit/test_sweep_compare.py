"""Two sweeps compared: what is put side by side, with which intervals, and what is refused."""

from __future__ import annotations

import json

import pytest

from farm.errors import UsageError
from farm.sweep.export import compare
from tests.unit import sweep_documents


def test_equal_sweeps_do_not_differ() -> None:
    """A sweep against itself: every ratio is 1 and within its interval, at every point and series."""
    document = sweep_documents.nano()
    pairs = compare.compare_sweeps(document, document)
    assert [pair.one["variant"] for pair in pairs] == ["tuned", "untuned"]
    for pair in pairs:
        assert len(pair.points) == 15
        assert [best.label for best in pair.bests] == ["fastest", "least energy", "pick"]
        for point in (*pair.points, *pair.bests):
            assert all(ratio is not None and ratio.value == 1 and ratio.is_one for ratio in point.ratios.values())


def test_before_and_after_tuning_are_compared_across_variants() -> None:
    """Sweeps of one series each are compared under any names; the ratio is the second's over the first's."""
    before, after = sweep_documents.nano(variants=("untuned",)), sweep_documents.nano(variants=("tuned",))
    (pair,) = compare.compare_sweeps(before, after)
    summary = pair.summarise("latency")
    assert summary is not None
    assert summary["least"] <= summary["mean"] <= summary["greatest"]
    assert summary["mean"] == pytest.approx(0.43, abs=0.02)
    ratio = pair.points[0].ratios["latency"]
    assert ratio.high < 1
    assert not ratio.is_one


def test_predictions_and_spoilt_points_are_left_out() -> None:
    """Only points that both measured are compared; the others are counted."""
    few, all_ = sweep_documents.nano(every=3, variants=("tuned",)), sweep_documents.nano(variants=("tuned",))
    all_["series"][0]["rows"][0] |= {"throttled": True, "invalid": "throttled"}
    (pair,) = compare.compare_sweeps(few, all_)
    assert pair.points[0].label == "a57=403.2MHz"
    assert (len(pair.points), pair.left_out) == (5, 1 + 9)


def test_boards_of_different_types_are_compared_at_their_best() -> None:
    """With no operating point in common there is still the fastest, the least energy and the pick of each."""
    nano, tx2 = sweep_documents.nano(variants=("tuned",)), sweep_documents.tx2()
    nano["board"]["simulated"] = False
    (pair,) = compare.compare_sweeps(nano, tx2)
    assert pair.points == ()
    assert len(pair.bests) == 3
    assert pair.bests[0].one["key"] != pair.bests[0].other["key"]
    assert pair.summarise("latency") is None


def test_what_cannot_be_compared_is_refused() -> None:
    """The refusal names both sweeps; with `mixed` the document says that it is mixed. Series of other variants, with
    several of them, leave open which belong together.
    """
    simulated, real = sweep_documents.nano(), sweep_documents.nano()
    real |= {"sweep": 4, "board": real["board"] | {"simulated": False}}
    with pytest.raises(UsageError, match="sweep 3 is of a simulated board, sweep 4 of a real one"):
        compare.compare_sweeps(simulated, real)
    pairs = compare.compare_sweeps(simulated, real, mixed=True)
    assert compare.comparison_to_dict(simulated, real, pairs)["mixed"] is True
    one, other = sweep_documents.nano(variants=("tuned",)), sweep_documents.nano(variants=("untuned", "untuned"))
    with pytest.raises(UsageError, match="no series in common"):
        compare.compare_sweeps(one, other)


def test_without_a_sensor_there_is_no_ratio_of_power() -> None:
    """Null, never 1 or 0, and the comparison of latency stands."""
    document = sweep_documents.nano(sensor=False)
    pairs = compare.compare_sweeps(document, document)
    content = json.loads(json.dumps(compare.comparison_to_dict(document, document, pairs), allow_nan=False))
    ratios = content["series"][0]["points"][0]["ratios"]
    assert ratios["power"] is None
    assert ratios["energy"] is None
    assert ratios["latency"]["differs"] is False
    assert content["series"][0]["mean"]["energy"] is None


def test_an_interval_down_to_zero_is_open_above() -> None:
    """JSON has no infinity: an upper end that nothing is known of is null."""
    document = sweep_documents.nano(variants=("tuned",))
    document["series"][0]["rows"][0]["energy_j"]["low"] = 0.0
    pairs = compare.compare_sweeps(document, document)
    content = json.loads(json.dumps(compare.comparison_to_dict(document, document, pairs), allow_nan=False))
    assert content["series"][0]["points"][0]["ratios"]["energy"]["high"] is None
