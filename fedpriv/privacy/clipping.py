"""The clipping function π_S, total and safe under rounding."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError

SMALLEST_CLIPPING_NORM = 1e-30
LARGEST_CLIPPING_NORM = 1e30
_ULP = 2.0**-53
_SMALL = 2.0**-600
_BLOCK = 2**13  # numbers

Scalar = TypeVar("Scalar", bound=np.floating)


def check_clipping_norm(clipping_norm: float, owner: str) -> None:
    """Raise InvalidValueError unless the norm is one that float32 engines can clip to."""
    if not SMALLEST_CLIPPING_NORM <= clipping_norm <= LARGEST_CLIPPING_NORM:
        raise InvalidValueError(
            f"clipping_norm of {owner} is {clipping_norm}; it must be positive, "
            f"from {SMALLEST_CLIPPING_NORM} to {LARGEST_CLIPPING_NORM}"
        )


def clip(vector: npt.NDArray[Scalar], clipping_norm: float) -> npt.NDArray[Scalar]:
    """Scale `vector` to an L2 norm of at most `clipping_norm`: π_S(v) = v·min(1, S/‖v‖).

    Args:
        vector: [d] float16, float32 or float64; any values.
        clipping_norm: S, in the units of the vector.

    Returns:
        A new vector [d] of the same dtype. Guarantees, with exact real arithmetic on the left:

        * ‖result‖₂ ≤ S for every input;
        * NaN or ±inf anywhere gives the zero vector;
        * the zero vector and the empty vector are returned as they are;
        * a vector whose norm is below S by more than rounding is returned unchanged;
        * the direction is kept up to the rounding of the dtype, which is towards zero.

    Raises:
        InvalidValueError: S is outside [1e-30, 1e30].
    """
    check_clipping_norm(clipping_norm, "a vector")
    wide = vector.astype(np.float64)
    if clip_in_place((wide,), clipping_norm) <= clipping_norm:
        return vector.copy()
    return _towards_zero(wide, vector.dtype)


def clip_in_place(
    parts: Sequence[npt.NDArray[np.float64]], clipping_norm: float, weight: float = 1.0
) -> float:
    """Clip one vector that lies in several arrays, and weight it: v becomes w·π_S(v).

    Guarantees: those of `clip`, for the arrays as one vector, before the weight; then no component
    grows. One pass takes the norm; where there is something to do, one clips and one weights. No
    memory is taken.

    Args:
        parts: the arrays; any values; overwritten.
        clipping_norm: S, legal for `check_clipping_norm`.
        weight: w in [0, 1].

    Returns:
        A bound on the norm before clipping, above it by no more than rounding: at most S if and
        only if the vector was not clipped; inf or NaN if a component is not finite, and also
        where squares overflow.
    """
    bound = length = _upper_norm(parts)
    if not math.isfinite(bound):
        # Of finite numbers, some are so large that their squares overflow; times a power of two,
        # which is exact where it matters, they do not.
        _multiply(parts, _SMALL)
        length = _upper_norm(parts)
    if not math.isfinite(length):
        for part in parts:
            part.fill(0.0)
    elif bound > clipping_norm:
        # The last factor covers the roundings of this line and of the product.
        _multiply(parts, clipping_norm / length * (1.0 - 8 * _ULP))
    # A product with a number of at most 1 never rounds to a larger one.
    _multiply(parts, weight)
    return bound


def norm_of(parts: Iterable[npt.NDArray[np.float64]]) -> float:
    """L2 norm of arrays as one vector: [d] each; total.

    Not finite if a component is not, and also where squares overflow, from 1e154 on. Off by at most
    half as many roundings as there are components, and 4, if it is more than 1e-140; below, squares
    underflow and it may be too small.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return math.hypot(*(float(np.linalg.norm(block)) for block in _blocks(parts)))


def _blocks(parts: Iterable[npt.NDArray[np.float64]]) -> Iterator[npt.NDArray[np.float64]]:
    """Pieces for which BLAS wakes no threads: they wait for more work, in the way of training."""
    for part in parts:
        for start in range(0, part.size, _BLOCK):
            yield part[start : start + _BLOCK]


def _upper_norm(parts: Sequence[npt.NDArray[np.float64]]) -> float:
    """`norm_of`, with all that its roundings may have taken."""
    return norm_of(parts) * (1.0 + (sum(part.size for part in parts) + 8) * _ULP)


def _multiply(parts: Sequence[npt.NDArray[np.float64]], factor: float) -> None:
    if factor != 1.0:
        for part in parts:
            np.multiply(part, factor, out=part)


def _towards_zero(values: npt.NDArray[np.float64], dtype: np.dtype[Scalar]) -> npt.NDArray[Scalar]:
    """Round to `dtype` without increasing any magnitude, so that no norm grows."""
    rounded = values.astype(dtype)
    return np.where(np.abs(rounded) > np.abs(values), np.nextafter(rounded, dtype.type(0)), rounded)
