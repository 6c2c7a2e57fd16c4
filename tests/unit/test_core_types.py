"""Overlays of core types: the folder that FARM_CORE_TYPES names."""

from __future__ import annotations

import pathlib

import pytest

from farm.errors import UsageError
from farm.inventory.core_types import find_core_type, load_core_types
from farm.virtual.emulated.pipeline import load_core


def test_an_overlay_replaces_figures(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures and constants of the overlay, here as version 0.2 wrote it, replace the type's, for the emulator, too."""
    plain = find_core_type("cortex-a57", "aarch64")
    assert plain.pipeline is not None
    (tmp_path / "cortex-a57.yaml").write_text(
        "# Written by `farm board calibrate-model`; FARM_CORE_TYPES names the folder of such files.\n"
        'name: "cortex-a57"\nsources: ["report of a jetson-nano, now"]\nwait_cycles: 26.0\n'
        'measured: {"fma_pipes": 2.0, "l2_bytes": 1048576.0}\n'
    )
    monkeypatch.setenv("FARM_CORE_TYPES", str(tmp_path))
    load_core_types.cache_clear()
    try:
        changed, emulated = find_core_type("cortex-a57", "aarch64"), load_core("cortex-a57")
    finally:
        load_core_types.cache_clear()
    assert (changed.fma_pipes, changed.l2_bytes, changed.load_pipes) == (2.0, 1 << 20, plain.load_pipes)
    assert changed.sources[-1] == "report of a jetson-nano, now"
    assert emulated["wait_cycles"] == 26.0
    assert changed.pipeline == plain.pipeline.model_copy(update={"wait_cycles": 26.0})


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("cortex-a57", "name: cortex-a57\nsources: [x]\nwait_cycles: -1\ncrowding: 0\n", "wait_cycles"),
        ("cortex-a58", "name: cortex-a58\nsources: [x]\nwait_cycles: 1\ncrowding: 0\n", "one of"),
        ("cortex-a57", "name: cortex-a57\nsources: [x]\nwait_cycles: 1\ncrowding: 0\ndispatch: 9\n", "unknown key"),
        ("zen", "name: zen\nsources: [x]\nmeasured: {l1_bytes: 99}\n", "cores have 4096"),
        ("zen", "name: zen\nsources: [x]\nmeasured: {lane_fma: 1}\n", "not a figure of a core"),
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
