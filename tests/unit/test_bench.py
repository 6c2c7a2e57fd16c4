"""How far from the reference each of the programs may be that `farm model bench` times side by side."""

from __future__ import annotations

import pathlib
from types import SimpleNamespace
from typing import Any

import pytest

from farm.artifacts.bench import (
    ENGINES,
    OURS,
    RULE,
    UNTUNED,
    Subject,
    find_greatest_batch,
    find_precision,
    list_algorithms,
    read_batches,
)
from farm.artifacts.checking import find_tolerance_factor
from farm.artifacts.compile import find_algorithm
from farm.artifacts.manifest import WorkloadServed
from farm.errors import UsageError
from tests.unit.artifacts import write

NOT_QUANTISED: Any = SimpleNamespace(source=SimpleNamespace(is_quantised=False))
QUANTISED: Any = SimpleNamespace(source=SimpleNamespace(is_quantised=True))


def compiled(*names: str) -> Any:
    return SimpleNamespace(served=[SimpleNamespace(algorithm=find_algorithm(name)) for name in names])


def test_every_program_is_held_to_what_it_computes_with(tmp_path: pathlib.Path) -> None:
    """Weights in 16 bits are no excuse for what has them in float32, nor Winograd's algorithm for what is direct. What
    runs a quantised model may be a step off, under any names of its functions.
    """
    halved = WorkloadServed(
        hash="0", name="bf16_matmul", flop=1.0, weight=1, algorithm="bf16 weights", source="rule", latency_s=None
    )
    artifact = write(tmp_path / "a", workloads=(halved,))
    done = {RULE: compiled("winograd4_conv2d 3x3", "matmul"), UNTUNED: compiled("conv2d 3x3", "matmul")}
    algorithms = list_algorithms(Subject(NOT_QUANTISED, artifact=artifact), done)
    found = {name: find_tolerance_factor(each) for name, each in algorithms.items()}
    assert found == {OURS: 200.0, RULE: 2.0, UNTUNED: 1.0} | dict.fromkeys(ENGINES, 1.0)
    done = {OURS: compiled("int8_conv2d_quantize 3x3"), UNTUNED: compiled("conv2d 3x3")}
    algorithms = list_algorithms(Subject(QUANTISED), done)
    assert {find_tolerance_factor(each) for each in algorithms.values()} == {500.0}
    assert [find_precision(Subject(each), OURS) for each in (QUANTISED, NOT_QUANTISED)] == ["int8", "float32"]


def test_the_greatest_batch_is_on_a_line_through_the_known_ones() -> None:
    """Of weights of 100 bytes and 10 for each example 90 fit 1,000; a single batch tells none."""
    assert find_greatest_batch({1: 110, 4: 140}, 1000) == 90
    assert find_greatest_batch({1: 110}, 1000) is None
    assert find_greatest_batch({1: 110, 4: 110}, 1000) is None


def test_batches_are_distinct_numbers_in_order() -> None:
    """Nothing stands for the model's own batch; a word, zero and too many are refused by name."""
    assert read_batches("4, 1,2,2") == (1, 2, 4)
    assert read_batches("") == (None,)
    for wrong in ("x", "0", "1,5000", "-1"):
        with pytest.raises(UsageError, match="is no batch size"):
            read_batches(wrong)
