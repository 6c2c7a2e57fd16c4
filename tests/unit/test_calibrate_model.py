"""Constants of a core's model from certificates: what is fitted, what is refused, what the overlay must be."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import pytest

from device_agent.protocol import CountedSegment
from farm.errors import UsageError
from farm.inventory.core_types import find_core_type, load_core_types
from farm.services.calibrate_model import PricedRun, calibrate

CORE = find_core_type("cortex-a57", "aarch64")
# Cycles, waits and lines of its longest lane, those of all, lanes: in the pipes, in the second cache, of memory.
COUNTED = {
    ("pipes", 1): CountedSegment(9e6, 1_000, 100, 9e6, 1_000, 100, 1),
    ("cache", 1): CountedSegment(1e6, 400_000, 100, 1e6, 400_000, 100, 1),
    ("cache", 4): CountedSegment(1e6, 400_000, 100, 4e6, 1_600_000, 400, 4),
    ("memory", 4): CountedSegment(1e5, 60_000, 60_000, 4e5, 240_000, 240_000, 4),
}


def write_report(path: pathlib.Path, wait_cycles: float, crowding: float, **changes: Any) -> pathlib.Path:
    """A certificate of a board with these constants."""
    assert CORE is not None
    runs = []
    for (name, threads), segment in COUNTED.items():
        run = PricedRun(name, threads, 1.0, 1.479e9, (segment,))
        about = {"program": name, "threads": threads, "hz": run.hz, "segments": [dataclasses.astuple(segment)]}
        runs.append(about | {"measured_s": run.price_s(CORE, wait_cycles, crowding)})
    document = {"schema": "tvm-farm certificate 1", "board_type": "jetson-nano", "at": "now", "simulated": False}
    path.write_text(json.dumps(document | {"facts": {"prices": {"core": "cortex-a57", "runs": runs}}} | changes))
    return path


@pytest.mark.parametrize(("wait_cycles", "crowding"), [(4.5, 0.0), (19.0, 1.25), (40.0, 0.3)])
def test_constants_are_found(tmp_path: pathlib.Path, wait_cycles: float, crowding: float) -> None:
    """From what was counted and what it took, to the grid's digit; two reports of it say the same."""
    reports = [write_report(tmp_path / f"{n}.json", wait_cycles, crowding) for n in range(2)]
    [fitted] = calibrate(reports)
    assert fitted.constants is not None
    assert fitted.constants.after == pytest.approx((wait_cycles, crowding))
    assert fitted.constants.errors_after[1] < 1e-9
    assert fitted.constants.runs == 2 * len(COUNTED)


def test_what_differs_takes_the_types_place(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of several boards where it is not what the type says, in the overlay and from there in the type."""
    reports = []
    for number, pipes in enumerate((1.9, 2.0, 7.0)):
        found = {"fma_pipes": pipes, "load_pipes": 1.1, "l2_bytes": 1 << 20}
        core = {"core": "cortex-a57", "found": {name: {"value": value} for name, value in found.items()}}
        reports.append(write_report(tmp_path / f"{number}.json", 4, 0, facts={"core": core}))
    [fitted] = calibrate(reports)
    assert (fitted.measured, fitted.constants) == ({"fma_pipes": 2.0, "l2_bytes": 1 << 20}, None)
    monkeypatch.setenv("FARM_CORE_TYPES", str(fitted.write(tmp_path / "overlay").parent))
    load_core_types.cache_clear()
    try:
        changed = find_core_type("cortex-a57", "aarch64")
        assert changed is not None
        assert CORE is not None
        assert (changed.fma_pipes, changed.l2_bytes, changed.load_pipes) == (2.0, 1 << 20, CORE.load_pipes)
        assert changed.pipeline == CORE.pipeline
    finally:
        load_core_types.cache_clear()


def test_what_is_no_report_is_refused(tmp_path: pathlib.Path) -> None:
    """By what is wrong with it: other files, reports without prices, real and simulated boards in one."""
    other = tmp_path / "other.json"
    other.write_text("{}")
    for path, said in ((other, "no report"), (tmp_path / "none", "cannot be read"), (tmp_path, "cannot be read")):
        with pytest.raises(UsageError, match=said):
            calibrate([path])
    with pytest.raises(UsageError, match="says nothing of the board's core"):
        calibrate([write_report(tmp_path / "bare.json", 4, 0, facts={})])
    for name, value, said in (
        ("l2_bytes", 1 << 40, "cores have"),
        ("fma_pipes", float("nan"), "cores"),
        ("x", 1, "'x'"),
    ):
        core = {"core": "cortex-a57", "found": {name: {"value": value}}}
        with pytest.raises(UsageError, match=f"cannot be: .*{said}"):
            calibrate([write_report(tmp_path / "impossible.json", 4, 0, facts={"core": core})])
    real, made = write_report(tmp_path / "a.json", 4, 0), write_report(tmp_path / "b.json", 4, 0, simulated=True)
    with pytest.raises(UsageError, match="simulated"):
        calibrate([real, made])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("cortex-a57", "name: cortex-a57\nsources: [x]\nwait_cycles: -1\ncrowding: 0\n", "wait_cycles"),
        ("cortex-a58", "name: cortex-a58\nsources: [x]\nwait_cycles: 1\ncrowding: 0\n", "one of"),
        ("cortex-a57", "name: cortex-a57\nsources: [x]\nwait_cycles: 1\ncrowding: 0\ndispatch: 9\n", "unknown key"),
        ("zen", "name: zen\nsources: [x]\nmeasured: {l1_bytes: 99}\n", "cores have 4096"),
        ("zen", "name: zen\nsources: [x]\nmeasured: {lane_fma: 1}\n", "nothing that a core is asked"),
        ("zen", "name: zen\nsources: [x]\ncrowding: 0.5\n", "crowding cannot be used: .* zen has no pipeline"),
    ],
)
def test_wrong_overlays_are_refused(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, said: str
) -> None:
    """Only what a board may be asked, and only what a core can have."""
    (tmp_path / f"{name}.yaml").write_text(text)
    monkeypatch.setenv("FARM_CORE_TYPES", str(tmp_path))
    load_core_types.cache_clear()
    try:
        with pytest.raises(UsageError, match=said):
            load_core_types()
    finally:
        load_core_types.cache_clear()
