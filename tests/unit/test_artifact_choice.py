"""Which record serves a workload that is compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from farm.selection.decision import RecordFit, Records, Relative
from farm.types.states import ModelDecision
from farm.values import DEFAULT_POINT, Record, name_workloads
from tests.stored_workloads import make_record

FAST = "mode=MAXN"


def record(board_type: str, point: str, median_s: float, workload: str = "aaaa") -> Record:
    changes = {"board_type": board_type, "operating_point": point, "workload": workload}
    return make_record(median_s, f"{board_type} {point}", **changes)


def hash_for(target: Mapping[str, Any]) -> str:
    return {4: "aaaa", 6: "bbbb"}[target["num-cores"]]


def found(records: list[Record], point: str = DEFAULT_POINT) -> list[tuple[str, RecordFit]]:
    """The candidates in the order in which they are tried for a Nano, whose relative is an NX with six cores."""
    book = Records(records, "nano", point, [Relative("nx", {"num-cores": 6})])
    return [(choice.record.candidate, choice.fit) for choice in book.find("aaaa", hash_for)]


def test_the_nearest_record_is_taken() -> None:
    """What was measured at the clocks asked for is taken, however fast other clocks are. Another point of the same type
    is nearer than the same point of another type. Nothing was measured at the point asked for: the default is taken,
    not the fastest. Another farm's record at the very clocks serves only where there is none of our own for the
    type. Boards with other cores may have workloads of the same hash; their records do not count.
    """
    assert found([record("nano", FAST, 1.0), record("nano", DEFAULT_POINT, 2.0)]) == [
        (f"nano {DEFAULT_POINT}", RecordFit.EXACT),
        (f"nano {FAST}", RecordFit.OTHER_POINT),
    ]
    assert found([record("nx", DEFAULT_POINT, 1.0, "bbbb"), record("nano", FAST, 2.0)]) == [
        (f"nano {FAST}", RecordFit.OTHER_POINT),
        (f"nx {DEFAULT_POINT}", RecordFit.OTHER_TYPE),
    ]
    wanted = "mode=5W"
    assert found([record("nano", FAST, 1.0), record("nano", DEFAULT_POINT, 2.0)], wanted)[0] == (
        f"nano {DEFAULT_POINT}",
        RecordFit.OTHER_POINT,
    )
    imported = dataclasses.replace(record("nano", DEFAULT_POINT, 1e-9), origin={"store": "other"})
    assert [name for name, _ in found([imported, record("nano", FAST, 2.0)])] == [
        f"nano {FAST}",
        f"nano {DEFAULT_POINT}",
    ]
    assert found([record("xavier", DEFAULT_POINT, 1.0), record("nx", DEFAULT_POINT, 1.0, "cccc")]) == []


def decided(refused: dict[str, str], *workloads: str, point: str = DEFAULT_POINT) -> ModelDecision:
    return ModelDecision("ab", name_workloads(workloads), "nano", point, False, refused)


def served(book: Records, *workloads: str) -> dict[str, str | None]:
    """The candidate that serves each workload of a model; None: what is predicted."""
    refused = book.find_refused(workloads)
    found = {each: next(book.find(each, hash_for, refused.get(each)), None) for each in workloads}
    return {each: choice and choice.record.candidate for each, choice in found.items()}


def test_a_decision_leaves_records_out() -> None:
    """Nor does the next best one; another model that has the same workload takes it all the same. A decision is about
    candidates: another one was not timed in the model. Where there is none, that at the usual clocks stands in. A
    caller that times mixes of records says what is left out.
    """
    records = [record("nano", DEFAULT_POINT, 1.0), record("nano", FAST, 1.0), record("nano", FAST, 1.0, "bbbb")]
    book = Records(records, "nano", decisions=[decided({"aaaa": f"nano {DEFAULT_POINT}"}, "bbbb", "aaaa")])
    assert served(book, "aaaa", "bbbb") == {"aaaa": None, "bbbb": f"nano {FAST}"}
    assert served(book, "aaaa") == {"aaaa": f"nano {DEFAULT_POINT}"}
    book = Records([record("nano", DEFAULT_POINT, 1.0)], "nano", decisions=[decided({"aaaa": "older"}, "aaaa")])
    assert served(book, "aaaa") == {"aaaa": f"nano {DEFAULT_POINT}"}
    usual = decided({"aaaa": f"nano {FAST}"}, "aaaa")
    own = decided({}, "aaaa", point=FAST)
    records = [record("nano", FAST, 1.0)]
    assert served(Records(records, "nano", FAST, decisions=[usual, own]), "aaaa") == {"aaaa": f"nano {FAST}"}
    assert served(Records(records, "nano", FAST, decisions=[usual]), "aaaa") == {"aaaa": None}
    decisions = [decided({"aaaa": f"nano {DEFAULT_POINT}"}, "aaaa")]
    book = Records([record("nano", DEFAULT_POINT, 1.0)], "nano", decisions=decisions, refused={})
    assert served(book, "aaaa") == {"aaaa": f"nano {DEFAULT_POINT}"}
