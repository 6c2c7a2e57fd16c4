"""Messages survive the wire, and what is no message is refused with its reason."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from device_agent import protocol
from device_agent.protocol import (
    Description,
    Engine,
    Evidence,
    FaultSide,
    Limits,
    MeasureSpec,
    Outcome,
    ProtocolError,
    RunSpec,
    Status,
    TensorSpec,
)

_finite = st.floats(min_value=0, max_value=1e9, allow_nan=False)
_evidence = st.builds(
    Evidence,
    cpu_freq_hz=st.dictionaries(st.text(max_size=3), st.integers(0, 10**10) | st.none(), max_size=3),
    temperature_c=st.dictionaries(st.text(max_size=9), _finite | st.none(), max_size=3),
    load_1min=_finite | st.none(),
)
_outcomes = st.builds(
    Outcome,
    status=st.sampled_from(Status),
    message=st.text(max_size=40),
    latency_s=st.lists(_finite, max_size=5).map(tuple),
    calls_per_sample=st.integers(0, 10**6),
    timing_s=_finite,
    signal=st.none() | st.sampled_from(["SIGSEGV", "SIGABRT"]),
    before=st.none() | _evidence,
    after=st.none() | _evidence,
    power_w=st.none() | st.dictionaries(st.text(max_size=5), _finite, max_size=2),
)


@given(_outcomes)
def test_outcomes_survive_the_wire(outcome: Outcome) -> None:
    """Whatever an outcome holds, reading its JSON gives the same outcome."""
    assert Outcome.from_json(outcome.to_json()) == outcome


@pytest.mark.parametrize(
    "message",
    [
        MeasureSpec(arguments=()),
        MeasureSpec(arguments=(TensorSpec((1, 3, 224, 224), "float32"), TensorSpec((), "int8")), min_repeat_s=0.1),
        MeasureSpec(arguments=(), limits=Limits(timeout_s=1.5, memory_bytes=1, threads=4), flush_cache=True),
        RunSpec(Engine.ONNXRUNTIME, runs=50, warmup=5, return_outputs=False),
        Description(
            "b", "local", "0", 1, False, "x86_64", "cpu", (0, 1), {"0": [1, 2]}, 5, ("kernel",), {}, (), ("z",)
        ),
    ],
)
def test_every_message_survives_the_wire(message: Any) -> None:
    """Tuples, nested messages and enums come back as they were."""
    assert type(message).from_json(message.to_json()) == message


def test_keys_with_defaults_may_be_left_out() -> None:
    """A peer sends only what it means to say."""
    assert MeasureSpec.from_json('{"arguments": []}') == MeasureSpec(arguments=())


def test_a_whole_number_is_a_float_too() -> None:
    """JSON writers drop the point of 1.0; such a value is taken as the float it is meant to be."""
    limits = Limits.from_json('{"timeout_s": 3}')
    assert limits.timeout_s == 3.0
    assert type(limits.timeout_s) is float


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (MeasureSpec, "nonsense", "not JSON"),
        (MeasureSpec, "[]", "must be a JSON object"),
        (MeasureSpec, "{}", "lacks arguments"),
        (MeasureSpec, '{"arguments": [], "colour": 1}', "unknown keys: colour"),
        (MeasureSpec, '{"arguments": 3}', "must be a list"),
        (MeasureSpec, '{"arguments": [{"shape": [1]}]}', "TensorSpec lacks dtype"),
        (MeasureSpec, '{"arguments": [{"shape": ["1"], "dtype": "int8"}]}', "shape must be int"),
        (MeasureSpec, '{"arguments": [], "number": true}', "number must be int"),
        (MeasureSpec, '{"arguments": [], "number": 0}', "number must be > 0"),
        (MeasureSpec, '{"arguments": [], "repeat": -1}', "repeat must be > 0"),
        (MeasureSpec, '{"arguments": [], "min_repeat_s": -1}', "min_repeat_s"),
        (MeasureSpec, '{"arguments": [], "device": "cuda"}', "not served"),
        (RunSpec, '{"engine": "abacus"}', "abacus"),
        (RunSpec, '{"engine": "kernel", "warmup": -1}', "warmup"),
        (Limits, '{"timeout_s": 0}', "timeout_s must be > 0"),
        (Limits, '{"threads": -1}', "threads"),
        (Outcome, '{"status": "fine"}', "fine"),
    ],
)
def test_what_is_no_message_is_refused(kind: Any, text: str, said: str) -> None:
    """Unknown and missing keys, wrong types and impossible values are named."""
    with pytest.raises(ProtocolError, match=said):
        kind.from_json(text)


def test_every_status_but_ok_blames_one_side() -> None:
    """A status without a side could reach the cost model by accident."""
    assert Status.OK.fault_side is None
    assert all(isinstance(status.fault_side, FaultSide) for status in Status if status is not Status.OK)


def test_statuses_are_their_own_text() -> None:
    """Statuses print and compare as plain text, also on Python 3.10."""
    assert f"{Status.RUN_TIMEOUT}" == "run_timeout"
    assert json.dumps({"status": Status.OK}) == '{"status": "ok"}'


def test_messages_cannot_be_changed() -> None:
    """A message is a value: changing a field raises."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Limits().threads = 3  # type: ignore[misc]


@given(st.text(max_size=50), st.binary(max_size=200))
def test_frames_survive_the_wire(message: str, payload: bytes) -> None:
    """A frame gives back its text and its bytes."""
    assert protocol.unpack_frame(protocol.pack_frame(message, payload)) == (message, payload)


@pytest.mark.parametrize("cut", [0, 3, 5, 9])
def test_a_short_frame_is_refused(cut: int) -> None:
    """A frame that was cut off raises instead of giving half a message."""
    with pytest.raises(ProtocolError, match="frame"):
        protocol.unpack_frame(protocol.pack_frame("a message", b"")[:cut])


def test_a_frame_that_is_no_text_is_refused() -> None:
    """A header followed by something other than UTF-8 raises."""
    with pytest.raises(ProtocolError, match="UTF-8"):
        protocol.unpack_frame(b"\x02\x00\x00\x00\xff\xfe")
