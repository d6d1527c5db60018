"""Sums of users' outer products, with an exact bound, but without a matrix for each user.

Principal components are computed from these sums (Dwork, Talwar, Thakurta and Zhang 2014,
"Analyze Gauss", Algorithm 1; Abadi et al. 2016, arXiv:1607.00133, section 4).

Once a user's rows are whole numbers, its contribution is linear in their outer products. So the
contributions of a cohort add up to one matrix product, and every number in it is exact.
"""

import math

import numpy as np
import numpy.typing as npt

from fedpriv.privacy.clipping import FloatMatrix, IntegerVector
from fedpriv.privacy.layout import FloatVector, squared_bound

CLIPPING_NORM = 1.0
"""S of the vector group whose contributions this module adds up."""
# Bound on the sum of squares of a user's whole numbers y, see `outer_product_sum`.
_MOST = math.isqrt(2 * squared_bound(CLIPPING_NORM))
SHRINK = 1.0 - 2.0**-8
"""Factor on contributions that leaves room for the norm that rounding usually adds."""
# Below √½ and 24 bits long, so its product with a 25-bit whole number is exact.
_ROOT_HALF = math.floor(math.sqrt(0.5) * 2**24) / 2**24


def outer_product_sum(rows: FloatMatrix, offsets: npt.NDArray[np.int64]) -> IntegerVector:
    """Return the sum of users' outer products, in steps of `granularity(CLIPPING_NORM)`: [d].

    User u has the rows [offsets[u] : offsets[u + 1]] of D numbers each. Its contribution is the
    symmetric matrix M = Σ x xᵀ over its rows x, divided by its trace if that is above 1, written as
    the d = D(D + 1)/2 numbers (M_ii, then √2·M_ij for i < j, row by row) times `SHRINK`. Before
    that factor, their L2 norm is the Frobenius norm of M. Guarantees for each user:

    * in whole numbers a of steps, Σa² ≤ B = `squared_bound(CLIPPING_NORM)`, exactly, for all rows;
    * NaN or ±inf in any row, or squares that overflow float64, give the zero vector;
    * the contribution depends on the user's own rows alone, to the last bit.

    Sums over up to 2^28 users are exact.
    """
    # Let y be a user's rows in steps, as whole numbers, t = Σy² over all of them, and Y = Σ y yᵀ.
    # The user adds a_ij = Y_ij for i < j, and a_ii = trunc(r·Y_ii) with r < √½. So
    #     Σa² ≤ Σ_{i<j} Y_ij² + ½·Σ_i Y_ii² = ½·‖Y‖_F² ≤ ½·(trace Y)² = ½·t²,
    # since Y has no negative eigenvalue. With t ≤ ⌊√(2B)⌋ this is at most B. Adding or removing one
    # user moves the sum by its own a, because nothing else in the sum depends on that user.
    users = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))

    def squares(numbers: FloatMatrix) -> FloatVector:
        """Return the sum of squares of each user's numbers, row after row: [U]."""
        sums = np.bincount(users, np.vecdot(numbers, numbers), minlength=len(offsets) - 1)
        return sums.astype(np.float64, copy=False)

    with np.errstate(over="ignore", invalid="ignore"):
        traces = squares(rows)
    sound = np.isfinite(traces)
    factors = np.sqrt(SHRINK * _MOST / np.maximum(np.where(sound, traces, 1.0), 1.0))
    scaled = np.where(sound[users, np.newaxis], rows, 0.0) * factors[users, np.newaxis]
    integers = np.rint(scaled)
    # Sums of squares of whole numbers are exact up to 2^53, and larger ones stay above it.
    too_long = (squares(integers) > _MOST)[users]
    integers[too_long] = np.trunc(scaled[too_long])  # the norm is at most that of `scaled`
    integers[(squares(integers) > _MOST)[users]] = 0.0  # never, but do not rely on rounding
    # Only the diagonal is rounded again, for each user.
    starts = offsets[:-1][np.diff(offsets) > 0]
    diagonals = np.add.reduceat(integers * integers, starts, axis=0) if starts.size else integers
    products = integers.T @ integers
    off_diagonal = products[np.triu_indices(rows.shape[1], 1)]
    total = np.concatenate([np.trunc(diagonals * _ROOT_HALF).sum(axis=0), off_diagonal])
    return total.astype(np.int64)
