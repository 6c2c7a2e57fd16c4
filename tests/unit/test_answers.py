"""A board's answers are untrusted input: impossible ones are refused."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import tracemalloc
import zipfile
from typing import Any

import numpy as np
import pytest

from device_agent.protocol import (
    Description,
    Energy,
    Evidence,
    OperatingPoint,
    Outcome,
    PinReport,
    PinStatus,
    PowerTrace,
    PowerWindow,
    ProtocolError,
    RailPower,
    Status,
)
from farm.measure.answers import read_answer, read_bytes, read_text
from farm.measure.arrays import HarmfulArraysError, pack_arrays, unpack_arrays
from tests import fuzzing, hostile_board

RAIL = RailPower("VDD_IN", 4.0, (3.9, 4.1), 8.0, (7.8, 8.2), 200, 20)
WINDOW = PowerWindow(100.0, 2.0, (RAIL,), RAIL, "board", 2000)
SEEN = Evidence({"0": 1_479_000_000}, {"0": 1_479_000_000}, 921_600_000, None, {"CPU-therm": 41.5}, {"fan": 0})
OUTCOME = Outcome(
    *(Status.OK, "", (1.5e-3, 1.6e-3), 10, 0.05),
    before=SEEN,
    after=SEEN,
    other_load=0.0,
    point=OperatingPoint(gpu_freq_hz=921_600_000),
    power=WINDOW,
    energy=Energy(WINDOW, WINDOW, 4e-3, (3.9e-3, 4.1e-3), -1e-5, (-2e-5, 1e-5)),
    board="n1",
    agent_version="1",
    started_at=1.7e9,
)
TRACE = PowerTrace(WINDOW, {"VDD_IN": ((-0.1, 4.0), (0.1, 4.1))}, SEEN, SEEN, "n1")
PIN = PinReport(PinStatus.OK, reached=OperatingPoint(cpu_freq_hz={"a57": 1_479_000_000}), took_s=0.1)
ANSWERS = (OUTCOME, TRACE, PIN, hostile_board.DESCRIPTION)


def read(answer: Any, kind: type[Any] = Outcome) -> Any:
    """What the farm makes of an answer of the board n1, which is no simulation."""
    return read_answer(kind, answer if isinstance(answer, str) else json.dumps(answer), "n1", False)


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda each: type(each).__name__)
def test_what_a_board_says_is_read(answer: Any) -> None:
    """An honest answer arrives as it was sent, however much it holds."""
    assert read(answer.to_json(), type(answer)) == answer


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"latency_s": [-1.0]}, "latency_s is -1"),
        ({"latency_s": [1e-3, 0.0]}, "an impossible sample"),
        ({"latency_s": [1e300]}, "latency_s is 1e\\+300"),
        ({"latency_s": [float("nan")]}, "the number nan"),
        ({"latency_s": [float("inf")]}, "the number inf"),
        ({"latency_s": [10**400]}, "JSON"),
        ({"latency_s": [1e-3] * 200_000}, "200000 samples"),
        ({"latency_s": []}, "empty"),
        ({"timing_s": -1.0}, "timing_s is -1"),
        ({"timing_s": 1e308}, "timing_s is 1e\\+308"),
        ({"started_at": -5.0}, "started_at is -5"),
        ({"started_at": 1e308}, "started_at is 1e\\+308"),
        ({"energy": {**OUTCOME.energy.to_dict(), "above_idle_j": 1e308}}, "above_idle_j is"),  # type: ignore[union-attr]
        ({"power": {**WINDOW.to_dict(), "window_s": 1e308}}, "window_s is"),
        ({"status": "build_failed"}, "not for a board to say"),
        ({"status": "board_lost"}, "not for a board to say"),
        ({"board": "n2"}, "'n2', not 'n1'"),
        ({"board": ""}, "not 'n1'"),
        ({"simulated": True}, "simulated"),
        ({"message": "\ud800"}, "no Unicode"),
        ({"message": "x" * 100_000}, "a text of 100000 characters"),
        ({"before": {**SEEN.to_dict(), "temperature_c": {"CPU": 1e9}}}, "temperature_c is 1e\\+09"),
        ({"before": {**SEEN.to_dict(), "cpu_max_hz": {"0": "fast"}}}, "cpu_max_hz.0 must be int"),
        ({"before": {**SEEN.to_dict(), "cooling": {"x": [[[]]]}}}, "cooling.x must be int"),
        ({"energy": {**OUTCOME.energy.to_dict(), "per_call_j": 0.0}}, "per_call_j is zero"),  # type: ignore[union-attr]
        ({"energy": {**OUTCOME.energy.to_dict(), "per_call_j": -1.0}}, "per_call_j is -1"),  # type: ignore[union-attr]
        ({"power": {**WINDOW.to_dict(), "window_s": 0.0}}, "window_s is no window"),
    ],
)
def test_an_outcome_that_cannot_be_is_refused(changes: dict[str, Any], said: str) -> None:
    """Numbers that no run gives, other boards' names, text that is none, statuses that are ours to find."""
    with pytest.raises(ProtocolError, match=said):
        read({**OUTCOME.to_dict(), **changes})


def test_nesting_without_end_is_refused() -> None:
    """Neither Python's reader nor the farm's goes down with it."""
    for text in ("[" * 100_000, '{"before":' * 40 + "1" + "}" * 40):
        with pytest.raises(ProtocolError, match="nested too deeply"):
            read(text)


def test_an_answer_has_to_be_what_was_asked_for() -> None:
    """A number is no text and no bytes, and is not made one."""
    for wrong in (None, 10**12, 1.0, object(), b"{}"):
        with pytest.raises(ProtocolError, match="instead of text"):
            read_text(wrong)
    for wrong in (None, 10**12, "x"):
        with pytest.raises(ProtocolError, match="instead of bytes"):
            read_bytes(wrong)


def test_fuzz_whatever_a_board_answers_is_refused_or_can_be() -> None:
    """Mutated answers end in a ProtocolError or in finite, positive figures of this board; in nothing else."""
    read_so_far = 0
    for rng in fuzzing.each(600):
        answer = rng.choice(ANSWERS)
        value: Any = json.loads(answer.to_json())
        for _ in range(rng.choice((1, 1, 2, 5))):
            value = fuzzing.mutate_value(value, rng)
        text = json.dumps(value)
        if rng.random() < 0.2:
            text = fuzzing.mutate_bytes(text.encode(), rng).decode(errors="replace")
        try:
            got = read(text, type(answer))
        except ProtocolError:
            continue
        read_so_far += 1
        json.dumps(got.to_dict(), allow_nan=False).encode()
        if isinstance(got, Outcome):
            assert got.board == "n1"
            assert all(0 < sample < math.inf for sample in got.latency_s)
    assert read_so_far > 20, "the mutations leave nothing to read"


def npz(method: int = zipfile.ZIP_DEFLATED, **members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return buffer.getvalue()


def stored(**members: bytes) -> bytes:
    return npz(zipfile.ZIP_STORED, **members)


def test_arrays_travel_in_order_and_bitwise() -> None:
    """Names, order, dtypes and values survive."""
    arrays = {
        "z": np.arange(6, dtype="int8").reshape(2, 3),
        "a": np.array(np.nan, "float16"),
        "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "m": np.zeros((0, 2)),
    }
    back = unpack_arrays(pack_arrays(arrays))
    assert list(back) == list(arrays)
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name], array)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"PK\x03\x04 cut short", "cannot be read"),
        (npz(a=bytes(100_000)), "with compression 8"),
        (pack_arrays({f"a{at}": np.zeros(0) for at in range(1025)}), "more than 1024 arrays"),
        (pack_arrays({"a": np.zeros(4)}).replace(b"(4,)", b"(9,)"), "wrong checksum"),
        (stored(a=b"\x93NUMPY\x01\x00\x37\x00{'descr': '<f8', 'fortran_order': False, 'shape': (9,)}"), "of shape"),
        (stored(a=b"no array"), "cannot be read"),
        (pack_arrays({"a": np.zeros(4)})[:-1], "no end"),
        (pack_arrays({"a": np.zeros(4)})[:60], "bytes where"),
    ],
)
def test_what_are_no_arrays_is_refused(data: bytes, said: str) -> None:
    """Cut archives, and those that promise more than they hold."""
    with pytest.raises(ProtocolError, match=said):
        unpack_arrays(data)


def test_a_small_answer_does_not_become_a_big_one() -> None:
    """Members that lie in each other, or are named many times, are refused as an attack before memory is taken."""
    for data in (hostile_board.nested_npz(64, 1 << 18), hostile_board.repeated_npz(1000, 1 << 16)):
        tracemalloc.start()
        try:
            with pytest.raises(HarmfulArraysError):
                unpack_arrays(data)
            assert tracemalloc.get_traced_memory()[1] < 2 * len(data)
        finally:
            tracemalloc.stop()


def test_arrays_of_one_name_are_an_attack() -> None:
    """A reader that takes the last one holds the others meanwhile."""
    data = pack_arrays({"a": np.zeros(4), "b": np.ones(4)}).replace(b"b.npy", b"a.npy")
    with pytest.raises(HarmfulArraysError, match="two arrays called 'a'"):
        unpack_arrays(data)


def test_fuzz_mutated_arrays_are_refused_or_are_arrays() -> None:
    """No garbage raises anything else, or makes more of itself than it brought."""
    whole = pack_arrays({"a": np.arange(60.0).reshape(3, 20), "b": np.ones(7, "int8")})
    for rng in fuzzing.each(300):
        data = fuzzing.mutate_bytes(whole, rng)
        try:
            arrays = unpack_arrays(data)
        except ProtocolError:
            continue
        assert sum(array.nbytes for array in arrays.values()) <= len(data)


def test_a_description_has_to_be_of_the_board_that_was_asked() -> None:
    """A board cannot pass for another one, nor may its lists hold what they should not."""
    about = dataclasses.replace(hostile_board.DESCRIPTION, name="n2")
    with pytest.raises(ProtocolError, match="'n2', not 'n1'"):
        read(about.to_json(), Description)
    for wrong in ({"cpu_freq_range_hz": {"0": [1]}}, {"cores_online": [-1]}, {"engine_versions": {"x": {}}}):
        with pytest.raises(ProtocolError):
            read({**hostile_board.DESCRIPTION.to_dict(), **wrong}, Description)
