"""Rounding of weights to 16 bits, which pipelines do it, and how artifacts name what was computed so."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from farm.artifacts.checking import find_tolerance_factor
from farm.artifacts.compile import find_algorithm
from farm.errors import UsageError
from farm.inventory.board_types import require_board_type
from farm.search import cores
from farm.search.families.dense import step_cycles
from farm.search.graph import half_precision, pipelines

NANO = {"mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a57", "num-cores": 4}
AVX512 = {"mtriple": "x86_64-linux-gnu", "mcpu": "znver4", "num-cores": 2}


def bits(value: int) -> np.ndarray:
    return np.array([value], np.uint32).view(np.float32)


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (0x3F800000, 0x3F80),  # 1
        (0x3F807FFF, 0x3F80),  # below half a step: down
        (0x3F808000, 0x3F80),  # half a step from even: down
        (0x3F818000, 0x3F82),  # half a step from odd: up
        (0x3F808001, 0x3F81),  # above half a step: up
        (0xBF818000, 0xBF82),  # the same below zero
        (0x3FFFFFFF, 0x4000),  # into the next exponent
        (0x80000000, 0x8000),  # minus zero
    ],
)
def test_weights_are_rounded_to_nearest_even(value: int, rounded: int) -> None:
    """Ties go to the number whose last bit is zero."""
    found = half_precision.round_weights(bits(value))
    assert found.view(np.uint16).tolist() == [rounded]


def test_an_error_is_at_most_one_part_in_256() -> None:
    """Eight bits of every number are kept."""
    weights = np.random.default_rng(0).standard_normal(10_000).astype("float32")
    rounded = half_precision.round_weights(weights)
    assert np.abs(rounded.astype("float32") / weights - 1).max() <= 2.0**-8


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 3.4e38])
def test_what_would_be_no_number_is_not_rounded(bad: float) -> None:
    """One weight that cannot be held keeps all of them."""
    assert half_precision.round_weights(np.array([1.0, bad], np.float32)) is None


def test_pipelines_differ_in_their_weights_alone() -> None:
    """Each way to store weights has its pipeline, plain and exact; workloads name that of float32."""
    for name in ("graph/2", "graph/2-exact"):
        plain = pipelines.require_pipeline(name)
        for weights in pipelines.KNOWN[1:]:
            own = pipelines.require_pipeline(f"{name}-{weights}")
            assert own == dataclasses.replace(plain, name=own.name, weights=weights)
            assert own.tuned_as == plain.tuned_as == name
    assert pipelines.exact("graph/2-bf16") == "graph/2-exact-bf16"


def test_a_board_type_stores_weights_as_it_is_told() -> None:
    """float32 changes nothing; GPUs take fp16 alone; unknown words and cores without 16-bit arithmetic are refused."""
    kind = require_board_type("jetson-nano")
    assert pipelines.store_weights(kind, "float32") == kind
    assert pipelines.store_weights(kind, "bf16").pipeline == "graph/2-bf16"
    assert pipelines.store_weights(require_board_type("raspberry-pi-5"), "fp16").pipeline == "graph/2-fp16"
    with pytest.raises(UsageError, match="--weights 'fp8' is unknown"):
        pipelines.store_weights(kind, "fp8")
    with pytest.raises(UsageError, match="cortex-a57 cannot compute in 16 bits"):
        pipelines.store_weights(kind, "fp16")
    with pytest.raises(UsageError, match="gpu/2 cannot store weights as bf16"):
        pipelines.store_weights(kind.model_copy(update={"pipeline": "gpu/2"}), "bf16")
    assert pipelines.store_weights(kind.model_copy(update={"pipeline": "gpu/2"}), "fp16").pipeline == "gpu/2-fp16"


def test_widening_takes_cycles_that_multiply() -> None:
    """One instruction for each vector of weights on Arm, two on x86."""
    nano, zen = (cores.core_of(config) for config in (NANO, AVX512))
    assert step_cycles(nano, 128, 14, 2, halved=True) / step_cycles(nano, 128, 14, 2) == pytest.approx(
        30 / 28, rel=0.01
    )
    assert step_cycles(zen, 512, 14, 2, halved=True) / step_cycles(zen, 512, 14, 2) == pytest.approx(32 / 28)


def test_an_artifact_names_weights_in_16_bits() -> None:
    """The algorithm says so, with any other property, and lets more of rounding pass."""
    names = (
        "bf16_conv2d_add 3x3 8x8x8>8", "bf16_matmul_add 8>8", "matmul_add 8>8", "fp16_winograd4_conv2d 3x3 8x8x8>8",
        "winograd4_conv2d 3x3 8x8x8>8",
    )  # fmt: skip
    found = [find_algorithm(name) for name in names]
    assert found == ["direct, bf16 weights", "bf16 weights", "", "winograd F(4, 3), fp16", "winograd F(4, 3)"]
    assert [find_tolerance_factor([each]) for each in found] == [200.0, 200.0, 1.0, 200.0, 2.0]
