"""What is offered for the workloads of whole models: the real compiler and assembler for Nano (sm_53) and TX2 (sm_62).

Twenty plans of each, on both: `benchmarks/gpu_schedules.py`.
"""

from __future__ import annotations

import importlib
import pathlib

import pytest

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("board", "model", "every"),
    [
        ("jetson-nano", "squeezenet1.1", 1),
        ("jetson-nano", "resnet18", 1),
        ("jetson-nano", "mobilenet_v2", 1),
        ("jetson-tx2", "squeezenet1.1", 4),
    ],
)
def test_the_default_of_every_workload_is_taken(
    board: str, model: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By TVM, by the CUDA compiler and by ptxas; no kernel is over a limit of the board's GPU."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    found = importlib.import_module("gpu_schedules").try_model(model, board, plans=1, every=every)
    assert found["plans"] == {"taken": found["workloads"]}, found["reasons"]
    assert found["workloads"] >= 5
