"""Metrics of any program: what their texts mean, which number an output has, limits on them."""

from __future__ import annotations

import numpy as np
import pytest

from farm.errors import PermanentError, UsageError
from farm.programs.metrics import TIME, Limit, ProgramMetric, read_runs

BENCH = b'[{"n_gen": 0, "avg_ts": 90.5}, {"n_gen": 128, "avg_ts": %s}]'
DECODE = ProgramMetric.parse("decode=[?n_gen>`0`].avg_ts | [0], more, tok/s")
LATENCY = ProgramMetric.parse("latency=mean = ([0-9.]+) ms, less, ms")


@pytest.mark.parametrize(
    ("metric", "out", "err", "value"),
    [
        (DECODE, BENCH % b"12.25", b"", 12.25),
        (ProgramMetric.parse("a=[1].ts, more, fps"), b'load\n{"ts": 1}\nlog: {x}\n{"ts": 2.5}\n', b"", 2.5),
        (ProgramMetric.parse("a=max(values[]), less, ms"), b'{"values": [1, 4, 2]}', b"", 4.0),
        (LATENCY, b"mean = 7 ms\nmean = 8.5 ms\n", b"mean = 9 ms", 8.5),
        (LATENCY, b"", b"mean = 9 ms\xff", 9.0),
        (ProgramMetric.parse("n=^took (\\S+), (?:again, )?, less, s"), b"first\ntook 1e-3, , ", b"", 1e-3),
    ],
)
def test_a_metric_is_read_from_an_output(metric: ProgramMetric, out: bytes, err: bytes, value: float) -> None:
    """JMESPath reads JSON or JSON lines, a regular expression takes its last match, in stdout before stderr."""
    assert metric.read(out, err) == value


@pytest.mark.parametrize(
    ("metric", "out", "why"),
    [
        *((DECODE, text, "decode is missing") for text in (b"Killed: no memory", b"")),
        *((DECODE, BENCH % b, "not a number above 0") for b in (b"NaN", b"-2", b"true", b"[3]", b"1" + b"0" * 400)),
        (LATENCY, b"mean = 1.2.3 ms", "'1.2.3', not a number"),
        (ProgramMetric.parse("a=no_function(x), less, s"), b"{}", "not a number"),
    ],
)
def test_a_missing_number_shows_the_end_of_the_output(metric: ProgramMetric, out: bytes, why: str) -> None:
    """A metric that is missing, no number, or not above 0 is one error, with its name and the output's end."""
    with pytest.raises(PermanentError, match=why) as caught:
        metric.read(out, b"")
    assert out.decode()[-20:] in caught.value.hint


def test_a_text_that_is_no_metric_is_refused() -> None:
    """A bad --metric is one error of usage, as is an objective that is no time, or better the other way."""
    for text in (
        "a",
        "a=x, more",
        "a=x, most, s",
        "=x, less, s",
        "time=x, less, s",
        "a=(x, less, s",
        "a=(1)(2), less, s",
    ):
        with pytest.raises(UsageError, match="--metric"):
            ProgramMetric.parse(text)
    for unit, better in (("MiB", "less"), ("ms", "more"), ("tok/s", "less")):
        with pytest.raises(UsageError, match="the objective a is in"):
            ProgramMetric("a", "x", better, unit).require_objective()


@pytest.mark.parametrize(
    ("metric", "value", "seconds", "shown", "per"),
    [
        (TIME, 1.5, 1.5, "1.50 s", "run"),
        (ProgramMetric("a", "x", "less", "ns"), 2e3, 2e-6, "2.00 µs", "a"),
        (DECODE, 12.5, 0.08, "12.5 tok/s", "tok"),
        (ProgramMetric("a", "x", "more", "fps"), 50.0, 0.02, "50.0 fps", "frame"),
    ],
)
def test_an_objective_is_a_time(metric: ProgramMetric, value: float, seconds: float, shown: str, per: str) -> None:
    """Times become seconds, rates the seconds for each thing that they count; both are shown in their own terms."""
    metric.require_objective()
    assert metric.to_seconds(value) == pytest.approx(seconds)
    assert (metric.format(seconds), metric.per) == (shown, per)


def test_limits_take_the_unit_of_their_metric() -> None:
    """A limit has the metric's unit, or any of time where that is one."""
    limit = Limit.parse("latency=1.5 s", [DECODE, LATENCY], at_least=False)
    assert str(limit) == "latency of at most 1500 ms"
    assert [limit.keeps(value) for value in (1500, 1501)] == [True, False]
    assert Limit.parse("decode=10", [DECODE], at_least=True) == Limit("decode", 10.0, "tok/s", at_least=True)
    for text in ("decode=10 ms", "other=1", "decode", "decode=0", "decode=-1 tok/s", "decode=nan"):
        with pytest.raises(UsageError, match="--at-most"):
            Limit.parse(text, [DECODE, LATENCY], at_least=False)


def test_each_run_has_its_metrics() -> None:
    """Outputs are stdout and stderr of the runs in turn; wall times are the board's, others are stretched to its."""
    texts = [b"mean = 2 ms", b"", b"", b"mean = 3 ms"]
    outputs = {f"out_{index:03d}": np.frombuffer(text, np.uint8) for index, text in enumerate(texts)}
    assert read_runs([LATENCY], (0.5, 0.75), outputs, 2.0) == {"time": [0.5, 0.75], "latency": [4.0, 6.0]}
    assert read_runs([TIME], (0.5,), {}) == {"time": [0.5]}
    with pytest.raises(PermanentError, match="latency is missing"):
        read_runs([LATENCY], (0.5,), {})
