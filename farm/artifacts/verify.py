"""Compare outputs with a reference. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

# Reordered sums differ by rounding: for float32 and up to some ten thousand terms by 1e-5 of the largest value (Higham,
# Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2: the error of recursive summation grows with n u,
# u = 6e-8). Ten times that still detects a wrong weight.
_TOLERANCE = {"float64": 1e-8, "float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}

# Two orders of summation may be this much nearer to each other than to a third.
_SPREAD = 4.0

# Largest error, relative to the peak, that a model's amplified rounding excuses: beyond it a comparison proves nothing.
_MOST_EXCUSED = 0.1
_BYTES = (np.uint8, np.int8)
# Sigmoid and Softmax propagate the rounding of logits up to z: p (1 - p) z per unit of error. Where all probabilities
# are near 0, engines approximate the exponential to some parts in 10^7 of 1 (ONNX Runtime: 1.4e-7), a ten-thousandth of
# this floor.
_LEAST_OF_PROBABILITIES = 5e-3


@dataclasses.dataclass(frozen=True)
class OutputComparison:
    """The result of a comparison; errors are relative to the reference's peak, so that zeros do not inflate them.

    Values from 0 to 1 may be probabilities; their errors are relative to the effect of their logits.
    `rms_rel_error` is the root mean square over one output, of the worst output.
    """

    matches: bool
    max_abs_error: float
    max_rel_error: float
    reason: str = ""
    rms_rel_error: float = 0.0


def find_worst(comparisons: Iterable[OutputComparison]) -> OutputComparison:
    """Combine comparisons into the largest errors and the first reason; an empty sequence matches."""
    worst = OutputComparison(True, 0.0, 0.0)
    for one in comparisons:
        worst = OutputComparison(
            worst.matches and one.matches,
            max(worst.max_abs_error, one.max_abs_error),
            max(worst.max_rel_error, one.max_rel_error),
            worst.reason or one.reason,
            max(worst.rms_rel_error, one.rms_rel_error),
        )
    return worst


def compare(
    outputs: Sequence[npt.NDArray[Any]],
    reference: Sequence[npt.NDArray[Any]],
    factor: float = 1.0,
    again: Sequence[npt.NDArray[Any]] | None = None,
) -> OutputComparison:
    """Compare arrays pairwise; floats must agree within `factor` times their type's tolerance.

    `again` is the reference with its operations in another order, on inputs that differ by rounding. Where a model
    amplifies rounding so far that the two differ by more than the tolerance, four times their difference is allowed,
    at most a tenth of the peak.

    Integers must be of equal type and value, 8-bit ones within a step or as floats. NaN matches only NaN, an infinity
    only one of the same sign.
    """
    if len(outputs) != len(reference):
        return _mismatch(f"{len(outputs)} outputs, {len(reference)} expected")
    pairs = enumerate(zip(outputs, reference, again or reference, strict=True))
    return find_worst(_compare_one(*arrays, f"output {index}", factor) for index, arrays in pairs)


def _compare_one(
    output: npt.NDArray[Any], wanted: npt.NDArray[Any], other: npt.NDArray[Any], name: str, factor: float
) -> OutputComparison:
    if output.shape != wanted.shape:
        return _mismatch(f"{name} has shape {output.shape}, not {wanted.shape}")
    if wanted.size == 0:
        return OutputComparison(True, 0.0, 0.0)
    if wanted.dtype.kind in "biu":
        return _compare_integers(output, wanted, other, name, factor)
    a, b = output.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(np.isfinite(a), finite):
        return _mismatch(f"{name} is not finite where the reference is, or the reverse")
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return _mismatch(f"{name} has another value where the reference is NaN or infinite")
    off = np.where(finite, a, 0.0) - np.where(finite, b, 0.0)
    peak = _find_scale(b[finite])
    tolerance = factor * _TOLERANCE.get(str(wanted.dtype), 0.0)
    spread = np.abs(np.where(finite, other.astype(np.float64), 0.0) - np.where(finite, b, 0.0)).max()
    if np.isfinite(spread) and peak > 0:
        tolerance = max(tolerance, min(_SPREAD * float(spread) / peak, _MOST_EXCUSED))
    return _judge(name, off, peak, tolerance)


def _compare_integers(
    output: npt.NDArray[Any], wanted: npt.NDArray[Any], other: npt.NDArray[Any], name: str, factor: float
) -> OutputComparison:
    if output.dtype != wanted.dtype:
        return _mismatch(f"{name} is {output.dtype}, not {wanted.dtype}")
    # Modulo 2^64, so that no difference overflows.
    high, low = np.maximum(output, wanted).astype(np.uint64), np.minimum(output, wanted).astype(np.uint64)
    peak = float(np.max(np.abs(wanted.astype(np.float64))))
    tolerance = 0.0
    if wanted.dtype in _BYTES:
        # Rounded from float32, whose last digit may fall on either side of a half.
        spread = float(np.abs(wanted.astype(np.float64) - other.astype(np.float64)).max())
        tolerance = max(1.0, min(_SPREAD * spread, _MOST_EXCUSED * peak), factor * _TOLERANCE["float32"] * peak) / max(
            peak, 1.0
        )
    return _judge(name, (high - low).astype(np.float64), peak, tolerance)


def _judge(name: str, off: npt.NDArray[np.float64], peak: float, tolerance: float) -> OutputComparison:
    error, rms = float(np.max(np.abs(off))), float(np.sqrt(np.mean(off**2)))
    relative, rms = (error / peak, rms / peak) if peak > 0 else (error, rms)
    matches = relative <= tolerance
    reason = "" if matches else f"{name} differs by {relative:.1e} of its peak"
    return OutputComparison(matches, error, relative, reason, rms)


def _find_scale(values: npt.NDArray[Any]) -> float:
    """Return the peak; for possible probabilities the scale of their errors, if larger."""
    peak = float(np.max(np.abs(values), initial=0.0))
    if values.size == 0 or values.min() < 0 or peak > 1:
        return peak
    inside = values[(values > 0) & (values < 1)]
    if inside.size == 0:
        return peak
    logit = float(np.max(np.abs(np.log(inside) - np.log1p(-inside))))
    return max(peak, logit * float(np.max(inside * (1 - inside))), _LEAST_OF_PROBABILITIES)


def _mismatch(reason: str) -> OutputComparison:
    return OutputComparison(False, float("inf"), float("inf"), reason, float("inf"))
