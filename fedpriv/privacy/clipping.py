"""The clipping function π_S, into whole numbers of steps, so that its bound is exact."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError

SMALLEST_CLIPPING_NORM = 1e-30
LARGEST_CLIPPING_NORM = 1e30

FloatMatrix = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

_BITS = 24  # of a clipping norm, in steps; as many as float32 has
_COARSE = ~((1 << 29) - 1)  # keeps the first 24 bits of a float64
_SHRINK = 1.0 - 2.0**-20


def check_clipping_norm(clipping_norm: float, owner: str) -> None:
    """Raise InvalidValueError unless the norm is one that float32 engines can clip to."""
    if not SMALLEST_CLIPPING_NORM <= clipping_norm <= LARGEST_CLIPPING_NORM:
        raise InvalidValueError(
            f"clipping_norm of {owner} is {clipping_norm}; it must be positive, "
            f"from {SMALLEST_CLIPPING_NORM} to {LARGEST_CLIPPING_NORM}"
        )


def granularity(clipping_norm: float) -> float:
    """γ, the largest power of two that is at most S·2^-24: the step of what users contribute.

    >>> granularity(1.5) == 2.0**-24
    True
    """
    return math.ldexp(1.0, math.frexp(clipping_norm)[1] - 1 - _BITS)


def squared_bound(clipping_norm: float) -> int:
    """B = ⌊(S/γ)²⌋, exactly; from 2^48 to 2^50. Integers a with Σaᵢ² ≤ B have γ·‖a‖₂ ≤ S."""
    # The quotient is exact, since γ is a power of two.
    above, below = (clipping_norm / granularity(clipping_norm)).as_integer_ratio()
    return above * above // (below * below)


def clip(vector: npt.NDArray[np.floating], clipping_norm: float) -> npt.NDArray[np.int64]:
    """π_S(v) = v·min(1, S/‖v‖) in steps, a = trunc(π_S(v)/γ).

    Args:
        vector: [d]; any values.
        clipping_norm: S, in the units of the vector.

    Returns:
        int64[d], in steps of `granularity(S)`. Guarantees:

        * Σaᵢ² ≤ `squared_bound(S)`, in exact arithmetic, for every input;
        * NaN or ±inf anywhere, or a norm whose square float64 does not hold (from 1.34e154 on),
          gives the zero vector;
        * where ‖v‖ ≤ S up to rounding, γ·a differs from v by less than γ per component, towards 0;
        * otherwise γ·a has the direction of v up to 2γ per component, and a norm of at least
          S·(1 − 2^-19) − 2γ·√d.

    Raises:
        InvalidValueError: S is outside [1e-30, 1e30].
    """
    check_clipping_norm(clipping_norm, "a vector")
    row: FloatMatrix = vector.astype(np.float64)[np.newaxis]
    clip_rows([row], clipping_norm)
    clipped: npt.NDArray[np.int64] = row[0].astype(np.int64)
    return clipped


def clip_rows(
    pieces: Sequence[FloatMatrix],
    clipping_norm: float,
    weights: tuple[npt.NDArray[np.int64], int] | None = None,
) -> tuple[Flags, Flags]:
    """Clip vectors of several users in place, each row by itself: v becomes trunc(w·π_S(v)/γ).

    Guarantees: those of `clip` for each row; with a weight w = m/c, Σaᵢ² ≤ ⌊m²·B/c²⌋. What a row
    becomes is a function of that row and its weight alone, to the last bit.

    Args:
        pieces: [C, d_k] each, contiguous rows; together a user's vector lies in one row of each.
        clipping_norm: S, legal for `check_clipping_norm`.
        weights: m [C], 0 ≤ m ≤ c, and c; None: all are 1.

    Returns:
        Which rows were within S, and which were finite: [C] each. Others are zero.
    """
    step, bound = granularity(clipping_norm), squared_bound(clipping_norm)
    with np.errstate(over="ignore", invalid="ignore"):
        norms = np.sqrt(_squares(pieces)) / step
    finite = np.isfinite(norms)
    if not finite.all():
        for piece in pieces:
            piece[~finite] = 0.0
        norms[~finite] = 0.0
    within = norms <= math.sqrt(bound)
    # Fewer bits, towards zero: what is off by rounding is mostly within the norm, then, and a norm
    # that is added up in another order gives the same integers.
    shares = _coarse(math.sqrt(bound) / np.maximum(norms, math.sqrt(bound)))
    limits = np.full(len(norms), float(bound))
    if weights is not None:
        units, whole = weights
        shares = shares * (units / whole)
        limits = np.array([float(m * m * bound // (whole * whole)) for m in units.tolist()])
    factors = (shares / step)[:, np.newaxis]
    for piece in pieces:
        np.multiply(piece, factors, out=piece)
        np.trunc(piece, out=piece)
    # Squares of integers and their sums are exact in float64 up to 2^53, far above all limits, and
    # what is more than that is not rounded to below a limit.
    while (over := _squares(pieces) > limits).any():
        for piece in pieces:
            piece[over] = np.trunc(piece[over] * _SHRINK)
    return within & finite, finite


def _squares(pieces: Sequence[FloatMatrix]) -> npt.NDArray[np.float64]:
    """Sum of squares of each row: [C]. A row by itself, in whatever place it is."""
    total: npt.NDArray[np.float64] = np.vecdot(pieces[0], pieces[0])
    for piece in pieces[1:]:
        total += np.vecdot(piece, piece)
    return total


def _coarse(numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Positive numbers with the first 24 bits alone, hence no larger."""
    return (numbers.view(np.int64) & _COARSE).view(np.float64)
