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
    Clocks,
    Description,
    DomainClocks,
    Energy,
    EnergySpec,
    Engine,
    Evidence,
    FaultSide,
    Limits,
    MeasureSpec,
    OperatingPoint,
    Outcome,
    PinReport,
    PinStatus,
    PowerSpec,
    PowerTrace,
    PowerWindow,
    ProtocolError,
    RailPower,
    RunSpec,
    SensorInfo,
    StartConditions,
    Status,
    TensorSpec,
)

_finite = st.floats(min_value=0, max_value=1e9, allow_nan=False)
_positive = st.floats(min_value=1e-3, max_value=1e3, allow_nan=False)
_words = st.text(max_size=9)
_freq = st.integers(1, 10**10)
_cpus = st.lists(st.integers(0, 63), max_size=4).map(tuple)
_interval = st.tuples(_finite, _finite)
_evidence = st.builds(
    Evidence,
    cpu_freq_hz=st.dictionaries(st.text(max_size=3), _freq, max_size=3),
    cpu_max_hz=st.dictionaries(st.text(max_size=3), _freq, max_size=3),
    gpu_freq_hz=_freq | st.none(),
    gpu_load=_finite | st.none(),
    memory_freq_hz=_freq | st.none(),
    temperature_c=st.dictionaries(_words, _finite, max_size=3),
    cooling=st.dictionaries(_words, st.integers(0, 9), max_size=2),
    alarms=st.dictionaries(_words, st.integers(0, 9), max_size=2),
    load_1min=_finite | st.none(),
    busy_s=_finite | st.none(),
)
_points = st.builds(
    OperatingPoint,
    power_mode=_words | st.none(),
    cores_online=_cpus.filter(len) | st.none(),
    cpu_freq_hz=st.dictionaries(_words, _freq, max_size=2),
    gpu_freq_hz=_freq | st.none(),
    memory_freq_hz=_freq | st.none(),
    allow_reboot=st.booleans(),
)
_domains = st.builds(
    DomainClocks,
    name=_words,
    min_hz=_freq | st.none(),
    max_hz=_freq | st.none(),
    current_hz=_freq | st.none(),
    governor=_words | st.none(),
    available_hz=st.lists(_freq, max_size=3).map(tuple),
    cpus=_cpus,
    online=_cpus,
    isolated=st.booleans(),
)
_clocks = st.builds(
    Clocks,
    clusters=st.lists(_domains, max_size=2).map(tuple),
    gpu=_domains | st.none(),
    memory=_domains | st.none(),
    power_mode=_words | st.none(),
    power_modes=st.lists(_words, max_size=2).map(tuple),
    holder=_words,
    unsafe=_words,
    notes=st.lists(_words, max_size=2).map(tuple),
)
_reports = st.builds(
    PinReport,
    status=st.sampled_from(PinStatus),
    message=_words,
    reached=_points | st.none(),
    clocks=_clocks | st.none(),
    notes=st.lists(_words, max_size=2).map(tuple),
    took_s=_finite,
)
_rails = st.builds(
    RailPower,
    rail=_words,
    power_w=_finite,
    power_ci_w=_interval,
    energy_j=_finite,
    energy_ci_j=_interval,
    reads=st.integers(0, 10**6),
    updates=st.integers(0, 10**6),
)
_windows = st.builds(
    PowerWindow,
    started_s=_finite,
    window_s=_finite,
    rails=st.lists(_rails, max_size=2).map(tuple),
    total=_rails | st.none(),
    total_scope=_words,
    calls=st.integers(0, 10**6),
    enough=st.booleans(),
    note=_words,
)
_energies = st.builds(
    Energy,
    busy=_windows,
    idle=_windows | st.none(),
    per_call_j=_finite | st.none(),
    per_call_ci_j=_interval | st.none(),
    above_idle_j=_finite | st.none(),
    above_idle_ci_j=_interval | st.none(),
)
_traces = st.builds(
    PowerTrace,
    window=_windows | st.none(),
    samples=st.dictionaries(_words, st.lists(st.tuples(_finite, _finite), max_size=2).map(tuple), max_size=2),
    before=_evidence | st.none(),
    after=_evidence | st.none(),
    board=_words,
    simulated=st.booleans(),
)
_specs = st.builds(
    MeasureSpec,
    arguments=st.just((TensorSpec((2, 3), "float32"),)),
    max_spread=_finite | st.none(),
    limits=st.builds(Limits, timeout_s=_positive, cluster=_words),
    start=st.none() | st.builds(StartConditions, _finite | st.none(), _finite | st.none(), _positive),
    energy=st.none() | st.builds(EnergySpec, st.integers(1, 99), _positive, _finite),
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
    other_load=st.none() | _finite,
    point=st.none() | _points,
    power=st.none() | _windows,
    energy=st.none() | _energies,
    simulated=st.booleans(),
)


@given(_points | _clocks | _reports | _windows | _energies | _traces | _specs | _evidence)
def test_whatever_a_message_holds_survives_the_wire(message: protocol.Message) -> None:
    """Operating points, clocks, reports, power and specs come back equal from their JSON."""
    assert type(message).from_json(message.to_json()) == message


@given(_outcomes)
def test_outcomes_survive_the_wire(outcome: Outcome) -> None:
    """Any outcome survives the way through JSON."""
    assert Outcome.from_json(outcome.to_json()) == outcome


@pytest.mark.parametrize(
    "message",
    [
        MeasureSpec(arguments=()),
        MeasureSpec(arguments=(TensorSpec((1, 3, 224, 224), "float32"), TensorSpec((), "int8")), min_repeat_s=0.1),
        MeasureSpec(arguments=(), limits=Limits(timeout_s=1.5, memory_bytes=1, threads=4), cold_weights=True),
        RunSpec(Engine.ONNXRUNTIME, runs=50, warmup=5, return_outputs=False),
        RunSpec(Engine.KERNEL, energy=EnergySpec(), start=StartConditions(max_temperature_c=40.0)),
        PowerSpec(seconds=0.5, rate_hz=1000.0),
        SensorInfo("POM_5V_IN", "ina3221-iio", update_period_s=0.42, step_w=0.041),
        Description(
            "b", "local", "0", 1, False, "x86_64", "cpu", (0, 1), {"0": (1, 2)}, 5, ("kernel",), {}, (), ("z",)
        ),
    ],
)
def test_every_message_survives_the_wire(message: Any) -> None:
    """Tuples, nested messages and enums come back as they were."""
    assert type(message).from_json(message.to_json()) == message


def test_messages_are_plain_values() -> None:
    """A peer sends only what it means to say. JSON writers drop the point of 1.0; such a value is taken as the float it
    is meant to be. Leave to reboot is no wish of its own. A status without a side could reach the cost model by
    accident. Statuses print and compare as plain text, also on Python 3.10. A message is a value: changing a field
    raises.
    """
    assert MeasureSpec.from_json('{"arguments": []}') == MeasureSpec(arguments=())
    limits = Limits.from_json('{"timeout_s": 3}')
    assert limits.timeout_s == 3.0
    assert type(limits.timeout_s) is float
    assert OperatingPoint().is_empty
    assert OperatingPoint(allow_reboot=True).is_empty
    assert not OperatingPoint(gpu_freq_hz=1).is_empty
    assert Status.OK.fault_side is None
    assert all(isinstance(status.fault_side, FaultSide) for status in Status if status is not Status.OK)
    assert f"{Status.RUN_TIMEOUT}" == "run_timeout"
    assert json.dumps({"status": Status.OK}) == '{"status": "ok"}'
    with pytest.raises(dataclasses.FrozenInstanceError):
        Limits().threads = 3  # type: ignore[misc]


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
        (Outcome, '{"status": "ok", "power_w": {}}', "unknown keys: power_w"),
        (OperatingPoint, '{"cpu_freq_hz": {"a57": 0}}', "frequency of a57 must be a whole number of Hz, not 0"),
        (OperatingPoint, '{"cpu_freq_hz": {"a57": 1.5e9}}', "frequency of a57"),
        (OperatingPoint, '{"cpu_freq_hz": {"a57": true}}', "frequency of a57"),
        (OperatingPoint, '{"gpu_freq_hz": -1}', "frequency of gpu"),
        (OperatingPoint, '{"memory_freq_hz": 1.5}', "memory_freq_hz must be int"),
        (OperatingPoint, '{"cores_online": []}', "at least one CPU"),
        (OperatingPoint, '{"cores_online": [-1]}', "at least one CPU"),
        (OperatingPoint, '{"clock": 1}', "unknown keys: clock"),
        (EnergySpec, '{"min_updates": 0}', "min_updates must be > 0"),
        (EnergySpec, '{"idle_s": -1}', "idle_s"),
        (StartConditions, '{"deadline_s": 0}', "deadline_s must be > 0"),
        (PowerSpec, '{"seconds": 0}', "seconds must be > 0"),
        (PowerSpec, '{"seconds": 3601}', "at most 3600 seconds"),
        (PowerSpec, '{"rate_hz": 20000}', "10000 reads"),
        (PinReport, '{"status": "done"}', "done"),
    ],
)
def test_what_is_no_message_is_refused(kind: Any, text: str, said: str) -> None:
    """Unknown and missing keys, wrong types and impossible values are named."""
    with pytest.raises(ProtocolError, match=said):
        kind.from_json(text)


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


def test_names_on_the_wire_stay() -> None:
    """Functions have the names that agents of other versions serve; another name would hide an agent's version."""
    named = {name: value for name, value in vars(protocol).items() if name.isupper() and isinstance(value, str)}
    assert {name: value for name, value in named.items() if value.startswith("device_agent.")} == {
        "CLAIM": "device_agent.claim",
        "DESCRIBE": "device_agent.describe",
        "MEASURE": "device_agent.measure",
        "RUN_MODEL": "device_agent.run_model",
        "KEEP_PROGRAM": "device_agent.keep_program",
        "RUN_KEPT": "device_agent.run_kept",
        "PIN": "device_agent.pin",
        "UNPIN": "device_agent.unpin",
        "POWER": "device_agent.power",
    }
    assert protocol.FENCE_PREFIX == "fence:"
