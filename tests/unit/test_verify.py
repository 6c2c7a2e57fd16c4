"""Comparing outputs: what counts as the same result."""

from __future__ import annotations

import math

import numpy as np
import pytest

from farm.artifacts.verify import compare

ONES = np.ones((2, 3), "float32")


def test_equal_arrays_match_and_errors_are_relative() -> None:
    """No difference is no error. Nothing equals nothing. A zero in the reference does not blow a rounding error up."""
    result = compare([ONES], [ONES])
    assert (result.matches, result.max_abs_error, result.max_rel_error, result.reason) == (True, 0.0, 0.0, "")
    assert compare([np.ones((0, 3), "float32")], [np.ones((0, 3), "float32")]).matches
    reference = np.array([0.0, 1000.0], "float32")
    result = compare([reference + np.array([0.01, 0.0], "float32")], [reference])
    assert result.matches
    assert result.max_abs_error == pytest.approx(0.01)
    assert result.max_rel_error == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("dtype", "difference", "matches"),
    [
        ("float32", 5e-5, True),
        ("float32", 5e-4, False),
        ("float64", 5e-9, True),
        ("float64", 5e-8, False),
        ("float16", 1e-2, True),
        ("float16", 5e-2, False),
        ("int32", 0, True),
        ("int32", 1, False),
        ("bool", 0, True),
    ],
)
def test_the_tolerance_is_the_types(dtype: str, difference: float, matches: bool) -> None:
    """Rounding is forgiven as far as the reference's type rounds; integers not at all."""
    reference = np.ones(4, dtype)
    output = reference.copy()
    output[2] += np.asarray(difference, dtype)
    assert compare([output], [reference]).matches is matches


def test_probabilities_differ_by_what_their_logits_do() -> None:
    """Rounding errors of logits of up to 20 are no wrong result, neither where all is certain nor where nothing is."""
    logits = np.linspace(-20, 20, 41)
    sigmoid = 1 / (1 + np.exp(-logits))
    rounded = 1 / (1 + np.exp(-logits * (1 + 5e-5)))
    assert compare([rounded.astype("float32")], [sigmoid.astype("float32")]).matches
    nothing = np.array([2e-8, 3e-8], "float32")
    assert compare([nothing + np.float32(9e-8)], [nothing]).matches


def test_wrong_probabilities_are_wrong() -> None:
    """A class that is likelier by a hundredth, one that is found where none is, and what is no probability."""
    wanted = np.array([0.7, 0.2, 0.1], "float32")
    assert not compare([wanted + np.array([0.01, -0.01, 0], "float32")], [wanted]).matches
    nothing = np.array([2e-8, 3e-8], "float32")
    assert not compare([nothing + np.float32(1e-6)], [nothing]).matches
    assert not compare([-nothing * np.float32(1.01)], [-nothing]).matches


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_matches_a_number(bad: float) -> None:
    """NaN or infinity where the reference has a number is a wrong result."""
    output = ONES.copy()
    output[0, 0] = bad
    result = compare([output], [ONES])
    assert not result.matches
    assert "not finite" in result.reason


@pytest.mark.parametrize(
    ("output", "wanted", "matches"),
    [
        (math.nan, math.nan, True),
        (math.inf, math.inf, True),
        (math.nan, math.inf, False),
        (math.inf, -math.inf, False),
        (math.inf, math.nan, False),
        (0.0, math.nan, False),
    ],
)
def test_what_is_not_finite_must_be_the_same(output: float, wanted: float, matches: bool) -> None:
    """NaN is no infinity, and an infinity not the other one; the numbers beside them are compared as ever."""
    for dtype in ("float16", "float32", "float64"):
        pair = [np.array([each, 2.0], dtype) for each in (output, wanted)]
        assert compare(pair[:1], pair[1:]).matches is matches
        assert not compare([pair[1] + np.array([0, 1], dtype)], pair[1:]).matches


def test_integers_beyond_2_to_the_53_must_be_equal() -> None:
    """Neighbours that float64 does not tell apart differ, as do the ends of a type, and an integer of another type."""
    for dtype, value in (("int64", 2**53), ("int64", 2**63 - 2), ("uint64", 2**64 - 2), ("int64", -(2**63))):
        wanted = np.array([value], dtype)
        assert compare([wanted], [wanted]).matches
        assert not compare([wanted + np.array([1], dtype)], [wanted]).matches
    assert not compare([np.array([-(2**63)])], [np.array([2**63 - 1])]).matches
    assert "int32" in compare([np.ones(1, "int32")], [np.ones(1, "int64")]).reason


def test_wrong_outputs_are_found_and_named() -> None:
    """A missing output, or one of another shape, is a wrong result and named. One wrong output among right ones is
    found and named. Rounded from float32 they may be; two steps are a wrong result, and so is one for other
    integers.
    """
    assert "2 expected" in compare([ONES], [ONES, ONES]).reason
    assert "shape" in compare([ONES.T], [ONES]).reason
    result = compare([ONES, 2 * ONES], [ONES, ONES])
    assert not result.matches
    assert result.reason.startswith("output 1")
    assert result.max_rel_error == 1.0
    steps = np.array([[0, 1], [100, 255]], "uint8")
    assert compare([steps + np.array([[1, 0], [0, 0]], "uint8")], [steps]).matches
    assert not compare([steps + np.array([[2, 0], [0, 0]], "uint8")], [steps]).matches
    assert not compare([steps.astype("int32") + 1], [steps.astype("int32")]).matches


def test_bytes_of_an_8_bit_model_may_differ_as_its_floats() -> None:
    """An algorithm's factor, and the reference's spread, hold for outputs in 8 bits, too."""
    wanted, found = np.array([-128, 40], np.int8), np.array([-126, 40], np.int8)
    assert not compare([found], [wanted]).matches
    assert compare([found], [wanted], 500.0).matches
    assert compare([found], [wanted], 1.0, [np.array([-127, 40], np.int8)]).matches
    assert not compare([found.astype(np.int32)], [wanted.astype(np.int32)], 500.0).matches


def test_amplified_rounding_excuses_no_more_than_a_tenth_of_the_peak() -> None:
    """Where the reference differs from itself by as much as it is large, a comparison proves nothing."""
    wanted = np.linspace(-1, 1, 11, dtype="float32")
    near, far = wanted + np.float32(0.05), wanted + np.float32(0.5)
    assert compare([near], [wanted], again=[wanted + np.float32(0.02)]).matches
    assert not compare([far], [wanted], again=[wanted + np.float32(0.9)]).matches
    levels = np.arange(100, 200, dtype="uint8")
    assert compare([levels + np.uint8(8)], [levels], again=[levels + np.uint8(3)]).matches
    assert not compare([levels + np.uint8(50)], [levels], again=[levels + np.uint8(50)]).matches
