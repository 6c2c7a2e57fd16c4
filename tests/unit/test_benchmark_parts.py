"""What benchmarks judge by: models that ONNX Runtime runs, kernels measured elsewhere."""

from __future__ import annotations

import collections
import importlib
import math
import pathlib
from types import ModuleType

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(request.param)


@pytest.mark.parametrize("part", ["_small_models"], indirect=True)
def test_thirty_small_models_run(part: ModuleType) -> None:
    """ONNX Runtime runs every one of them, and its outputs vary."""
    assert len(part.MODELS) == 30
    part.check()


@pytest.mark.parametrize("part", ["_small_models"], indirect=True)
def test_small_models_are_functions_of_their_seed(part: ModuleType) -> None:
    """The same seed gives the same bytes, another one others."""
    model = part.MODELS["quantised"]
    assert model.build(1) == model.build(1) != model.build(2)


@pytest.mark.parametrize("part", ["_autotvm"], indirect=True)
def test_measured_kernels_are_whole(part: ModuleType) -> None:
    """The tiles of each record make up its result and its reduction; a kernel's blocks are theirs."""
    records = part.read_records()
    assert collections.Counter((each.board, each.operator) for each in records) == {
        ("jetson-tx2", "direct"): 133,
        ("jetson-tx2", "depthwise"): 9,
        ("jetson-nano", "direct"): 20,
        ("jetson-nano", "depthwise"): 18,
        ("gtx-1080-ti", "direct"): 24,
    }
    for each in records:
        tiles = {name: math.prod(numbers) for name, numbers in each.knobs.items() if name.startswith("tile")}
        result = dict(zip(("tile_f", "tile_y", "tile_x"), (each.filters, *each.result), strict=True))
        window = dict(zip(("tile_rc", "tile_ry", "tile_rx"), (each.channels, *each.window), strict=True))
        assert tiles == (result if each.operator == "depthwise" else result | window)
        kernel = part.make_kernel(each)
        assert kernel.grid == tuple(each.knobs[f"tile_{axis}"][0] for axis in "xyf")
        assert kernel.block == tuple(each.knobs[f"tile_{axis}"][2] for axis in "xyf")
