"""A gate's conditions, and baseline files of version 0.2."""

from __future__ import annotations

import json
import pathlib

import pytest

from farm.errors import UsageError
from farm.gate import dismiss, find_worst, read_baseline, read_conditions

# As version 0.2 wrote it.
BASELINE = {
    "format": "tvm-farm baseline",
    "version": 1,
    "entries": [
        {
            "model": "mlp",
            "board_type": "jetson-nano",
            "simulated": True,
            "device": "cpu",
            "operating_point": "default",
            "artifact": "baseline.artifacts/mlp-jetson-nano-cpu-simulated",
            "library_sha256": "0" * 64,
            "latency_s": 3.5e-05,
            "created_at": 1764000000.0,
        }
    ],
}


def test_old_baselines_are_read(tmp_path: pathlib.Path) -> None:
    """Every field is as it was; what is no baseline is refused with a way to make one."""
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps(BASELINE))
    [entry] = read_baseline(path).entries
    assert entry.key == ("mlp", "jetson-nano", True, "cpu", "default")
    for text in ("[]", "{", '{"format": "other"}'):
        path.write_text(text)
        with pytest.raises(UsageError):
            read_baseline(path)


def test_conditions_are_read_once_each() -> None:
    """In SI units, or as a part of the baseline's."""
    found = read_conditions(["latency > 5%", "latency>5 %", "p99 > 40 ms", "size > 2 MiB"])
    assert [(each.condition, each.is_change, each.limit) for each in found] == [
        ("latency > 5 %", True, 0.05),
        ("p99 > 40 ms", False, 0.04),
        ("size > 2 MiB", False, 2 << 20),
    ]


def test_scores_are_bounded_below() -> None:
    """A sign makes a change in points against the baseline, none a share of the examples; `>` is refused."""
    found = read_conditions(["top1 < -0.5 %", "map50 < 70%", "top5 < +1 %"])
    assert [(each.condition, each.is_change, each.limit) for each in found] == [
        ("top1 < -0.5 %", True, -0.005),
        ("map50 < 70 %", False, 0.7),
        ("top5 < +1 %", True, 0.01),
    ]
    for text in ("top1 > 1 %", "top1 < 5 ms", "latency < 5 %", "latency > -5 %", "error < 5 %"):
        with pytest.raises(UsageError):
            read_conditions([text])


@pytest.mark.parametrize(
    ("verdicts", "worst"), [([], "pass"), (["pass", "undecided"], "undecided"), (["undecided", "fail", "pass"], "fail")]
)
def test_the_worst_verdict_counts(verdicts: list[str], worst: str) -> None:
    """One condition that holds fails all."""
    assert find_worst(verdicts) == worst


@pytest.mark.parametrize(("metric", "verdict"), [("latency", "undecided"), ("energy", "undecided"), ("size", "fail")])
def test_doubtful_latencies_decide_nothing(metric: str, verdict: str) -> None:
    """A gate on a busy board neither passes nor fails by what it timed; sizes count as before."""
    assert dismiss({"metric": metric, "verdict": "fail"}) == {"metric": metric, "verdict": verdict}
