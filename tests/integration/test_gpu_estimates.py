"""Estimates of kernels from their machine code, against latencies measured on a Jetson TX2: `benchmarks/data/`."""

from __future__ import annotations

import ctypes
import importlib
import pathlib
import statistics
from collections.abc import Iterator
from types import ModuleType

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("gpu_estimates")


@pytest.fixture(scope="module")
def driver(bench: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library: ctypes.CDLL = bench.open_driver(tmp_path_factory.mktemp("gpu"))
    return library


def test_estimates_rank_measured_kernels(bench: ModuleType, driver: ctypes.CDLL) -> None:
    """A quarter of the direct convolutions that no constant is fitted to: the order of FLOPs per second, and errors."""
    held_out = bench.split(bench.read_records())[1][::4]
    found = bench.judge(bench.build_all(held_out), driver)
    assert found["kernels"] == 25
    assert found["rank_of_shares"] > 0.85
    assert found["median_error"] < 0.15


def test_a_best_schedule_is_estimated_faster_than_its_neighbours(bench: ModuleType, driver: ctypes.CDLL) -> None:
    """AutoTVM's best of a workload: no neighbour's estimate is clearly lower, and most are higher."""
    ratios = bench.compare(bench.choose_workloads(bench.read_records())[0], driver)
    assert min(ratios) > 0.9
    assert statistics.median(ratios) > 1.1
