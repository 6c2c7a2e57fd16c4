"""Metrics of any program: what their texts mean, which number an output has, limits on them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from farm.errors import PermanentError, UsageError
from farm.programs.metrics import TIME, Limit, ProgramMetric, read_runs

BENCH = json.dumps([{"n_gen": 0, "avg_ts": 90.5}, {"n_gen": 128, "avg_ts": 12.25}]).encode()
DECODE = ProgramMetric.parse("decode=[?n_gen>`0`].avg_ts | [0], more, tok/s")
LATENCY = ProgramMetric.parse("latency=mean = ([0-9.]+) ms, less, ms")


@pytest.mark.parametrize(
    ("text", "out", "err", "value"),
    [
        ("decode=[?n_gen>`0`].avg_ts | [0], more, tok/s", BENCH, b"", 12.25),
        ("a=[1].ts, more, tok/s", b'load\n{"ts": 1}\nlog: {x}\n{"ts": 2.5}\n', b"", 2.5),
        ("a=max(values[]), less, ms", b'{"values": [1, 4, 2]}', b"", 4.0),
        ("latency=mean = ([0-9.]+) ms, less, ms", b"mean = 7 ms\nmean = 8.5 ms\n", b"mean = 9 ms", 8.5),
        ("latency=mean = ([0-9.]+) ms, less, ms", b"", b"mean = 9 ms\xff", 9.0),
        ("n=^took (\\S+), (?:again, )?, less, s", b"first\ntook 1e-3, , ", b"", 1e-3),
    ],
)
def test_a_metric_is_read_from_an_output(text: str, out: bytes, err: bytes, value: float) -> None:
    """JMESPath reads JSON or JSON lines, a regular expression takes its last match, in stdout before stderr."""
    assert ProgramMetric.parse(text).read(out, err) == value


@pytest.mark.parametrize(
    ("metric", "out", "why"),
    [
        (DECODE, b"Killed: no memory", "decode is missing"),
        (DECODE, b"", "decode is missing"),
        (DECODE, b'[{"n_gen": 1, "avg_ts": NaN}]', "'nan', not a number"),
        (DECODE, b'[{"n_gen": 1, "avg_ts": -2}]', "'-2', not a number"),
        (DECODE, b'[{"n_gen": 1, "avg_ts": true}]', "'True', not a number"),
        (DECODE, b'[{"n_gen": 1, "avg_ts": [3]}]', "not a number"),
        (DECODE, b'[{"n_gen": 1, "avg_ts": 1' + b"0" * 400 + b"}]", "not a number"),
        (LATENCY, b"mean = 1.2.3 ms", "'1.2.3', not a number"),
        (ProgramMetric.parse("a=no_function(x), less, s"), b"{}", "not a number"),
    ],
)
def test_a_missing_number_shows_the_end_of_the_output(metric: ProgramMetric, out: bytes, why: str) -> None:
    """A metric that is missing, no number, or not above 0 is one error, with its name and the output's end."""
    with pytest.raises(PermanentError, match=why) as caught:
        metric.read(out, b"")
    assert out.decode()[-20:] in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "decode",
        "decode=x, more",
        "decode=x, most, s",
        "=x, less, s",
        "a b=x, less, s",
        "time=x, less, s",
        "a=(x, less, s",
        "a=(1)(2), less, s",
    ],
)
def test_a_text_that_is_no_metric_is_refused(text: str) -> None:
    """A bad --metric is one error of usage."""
    with pytest.raises(UsageError, match="--metric"):
        ProgramMetric.parse(text)


@pytest.mark.parametrize(
    ("unit", "value", "seconds", "shown"),
    [
        ("ms", 4.0, 4e-3, "4.00 ms"),
        ("ns", 2e3, 2e-6, "2.00 µs"),
        ("tok/s", 12.5, 0.08, "12.5 tok/s"),
        ("fps", 50.0, 0.02, "50.0 fps"),
        ("Hz", 4.0, 0.25, "4.00 Hz"),
    ],
)
def test_an_objective_is_a_time(unit: str, value: float, seconds: float, shown: str) -> None:
    """Times become seconds, rates the seconds for each thing that they count; both are shown in their own terms."""
    metric = ProgramMetric(
        "a", "x", "less" if unit.endswith("s") and "/" not in unit and unit != "fps" else "more", unit
    )
    metric.require_objective()
    assert metric.to_seconds(value) == pytest.approx(seconds)
    assert metric.format(seconds) == shown


@pytest.mark.parametrize(("unit", "better"), [("MiB", "less"), ("ms", "more"), ("tok/s", "less")])
def test_what_is_no_time_is_no_objective(unit: str, better: str) -> None:
    """Other units, and the wrong direction, are refused."""
    with pytest.raises(UsageError, match="the objective a is in"):
        ProgramMetric("a", "x", better, unit).require_objective()


def test_limits_take_the_unit_of_their_metric() -> None:
    """A limit has the metric's unit, or any of time where that is one."""
    ttft = ProgramMetric("ttft", "x", "less", "ms")
    limit = Limit.parse("ttft=1.5 s", [DECODE, ttft], at_least=False)
    assert (limit.value, str(limit)) == (1500.0, "ttft of at most 1500 ms")
    assert [limit.keeps(value) for value in (1500, 1501)] == [True, False]
    assert Limit.parse("decode=10", [DECODE], at_least=True) == Limit("decode", 10.0, "tok/s", at_least=True)
    for text in ("decode=10 ms", "other=1", "decode", "decode=0", "decode=-1 tok/s", "decode=nan"):
        with pytest.raises(UsageError, match="--at-most"):
            Limit.parse(text, [DECODE, ttft], at_least=False)


def test_each_run_has_its_metrics() -> None:
    """Outputs are stdout and stderr of the runs in turn; the wall time is always there."""
    texts = [b"mean = 2 ms", b"", b"", b"mean = 3 ms"]
    outputs = {f"out_{index:03d}": np.frombuffer(text, np.uint8) for index, text in enumerate(texts)}
    assert read_runs([LATENCY], (0.5, 0.75), outputs) == {"time": [0.5, 0.75], "latency": [2.0, 3.0]}
    assert read_runs([TIME], (0.5,), {}) == {"time": [0.5]}
    with pytest.raises(PermanentError, match="latency is missing"):
        read_runs([LATENCY], (0.5,), {})
