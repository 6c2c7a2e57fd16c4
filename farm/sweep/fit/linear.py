"""Many small triangular systems at once, in NumPy's own loops.

LAPACK would do them one by one, each with threads that wait for each other: where other programs use the cores a
decision then takes seconds instead of milliseconds.
"""

from __future__ import annotations

import numpy as np
from scipy.linalg import solve_triangular

from farm.sweep.fit.terms import Floats

# From this size on LAPACK is faster even so.
_LARGE = 96


def factor_many(matrices: Floats) -> Floats:
    """Lower Cholesky factors of symmetric positive definite matrices, shape (count, n, n). Raises LinAlgError."""
    size = matrices.shape[-1]
    if size >= _LARGE:
        return np.asarray(np.linalg.cholesky(matrices), dtype=np.float64)
    factors = np.tril(matrices)
    for column in range(size):
        rest = factors[:, column:, column]
        rest -= np.einsum("bik,bk->bi", factors[:, column:, :column], factors[:, column, :column])
        if not np.all(rest[:, 0] > 0):
            raise np.linalg.LinAlgError("a covariance is not positive definite")
        rest /= np.sqrt(rest[:, :1])
    return np.asarray(factors)


def halve_many(factors: Floats, right: Floats) -> Floats:
    """factor^-1 right for each factor; shapes (count, n, n) and (count, n, m), result as `right`."""
    if factors.shape[-1] >= _LARGE:
        solved = [solve_triangular(factor, each, lower=True) for factor, each in zip(factors, right, strict=True)]
        return np.stack(solved)
    result = np.array(right, dtype=np.float64)
    for row in range(factors.shape[-1]):
        result[:, row] -= np.einsum("bk,bkm->bm", factors[:, row, :row], result[:, :row])
        result[:, row] /= factors[:, row, row, None]
    return result
