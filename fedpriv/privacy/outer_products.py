"""Sums of users' outer products, within an exact bound, without a matrix for each user.

They are what principal components are computed from (Dwork, Talwar, Thakurta and Zhang 2014,
"Analyze Gauss", Algorithm 1; Abadi et al. 2016, arXiv:1607.00133, section 4).

A user's contribution is linear in the outer products of its rows, once these are whole numbers. So
the contributions of a cohort add up to one product of matrices, of which every number is exact.
"""

import math

import numpy as np
import numpy.typing as npt

from fedpriv.privacy.clipping import FloatMatrix, IntegerVector
from fedpriv.privacy.layout import FloatVector, squared_bound

CLIPPING_NORM = 1.0
"""S, of the vector group of the contributions that are added up here."""
# Squares of a user's whole numbers y add up to at most this, see `outer_product_sum`.
_MOST = math.isqrt(2 * squared_bound(CLIPPING_NORM))
KEPT = 1.0 - 2.0**-8
"""What contributions are multiplied by, so that what rounding adds to a norm mostly fits, too."""
# Below √½, and of 24 bits: its product with a whole number of 25 bits is exact.
_ROOT_HALF = math.floor(math.sqrt(0.5) * 2**24) / 2**24


def outer_product_sum(rows: FloatMatrix, offsets: npt.NDArray[np.int64]) -> IntegerVector:
    """Sum over users of their outer products, in steps of `granularity(CLIPPING_NORM)`: [d].

    User u has the rows [offsets[u] : offsets[u + 1]] of D numbers each. Its contribution is the
    symmetric matrix M = Σ x xᵀ over its rows x, divided by its trace if that is above 1, as the
    d = D(D + 1)/2 numbers (M_ii, then √2·M_ij for i < j, row by row), times `KEPT`. Without it,
    their L2 norm is the Frobenius norm of M. Guarantees, for each user by itself:

    * in whole numbers a of steps, Σa² ≤ B = `squared_bound(CLIPPING_NORM)`, exactly, whatever the
      rows are;
    * NaN or ±inf in any row, or squares that float64 does not hold, give the zero vector;
    * what it adds is a function of its own rows, to the last bit.

    Sums over up to 2^28 users are exact.
    """
    # Let y be the rows in steps, whole numbers, t = Σy² over all numbers of a user, and Y = Σ y yᵀ.
    # The user adds a_ij = Y_ij for i < j, and a_ii = trunc(r·Y_ii) with r < √½. So
    #     Σa² ≤ Σ_{i<j} Y_ij² + ½·Σ_i Y_ii² = ½·‖Y‖_F² ≤ ½·(trace Y)² = ½·t²,
    # since Y has no negative eigenvalue. With t ≤ ⌊√(2B)⌋ that is at most B. One user more or less
    # moves the sum by its own a, because nothing else of the sum depends on it.
    users = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))

    def squares(of: FloatMatrix) -> FloatVector:
        """Sum of squares of each user's numbers, its rows one after another: [U]."""
        added = np.bincount(users, np.vecdot(of, of), minlength=len(offsets) - 1)
        return added.astype(np.float64, copy=False)

    with np.errstate(over="ignore", invalid="ignore"):
        traces = squares(rows)
    sound = np.isfinite(traces)
    factors = np.sqrt(KEPT * _MOST / np.maximum(np.where(sound, traces, 1.0), 1.0))
    scaled = np.where(sound[users, np.newaxis], rows, 0.0) * factors[users, np.newaxis]
    whole = np.rint(scaled)
    # Sums of squares of whole numbers are exact up to 2^53, and larger ones do not fall below.
    over = (squares(whole) > _MOST)[users]
    whole[over] = np.trunc(scaled[over])  # no longer than `scaled`
    whole[(squares(whole) > _MOST)[users]] = 0.0  # never, but the bound must not hang on rounding
    # Only the diagonal is rounded again, user by user.
    first = offsets[:-1][np.diff(offsets) > 0]
    diagonals = np.add.reduceat(whole * whole, first, axis=0) if first.size else whole
    products = whole.T @ whole
    above = products[np.triu_indices(rows.shape[1], 1)]
    total = np.concatenate([np.trunc(diagonals * _ROOT_HALF).sum(axis=0), above])
    return total.astype(np.int64)
