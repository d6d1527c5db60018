"""The clipping function π_S, total and safe under rounding."""

import math
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError

SMALLEST_CLIPPING_NORM = 1e-30
LARGEST_CLIPPING_NORM = 1e30
_ULP = 2.0**-53

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
    peak = float(np.max(np.abs(vector), initial=0.0))
    if not math.isfinite(peak):
        return np.zeros_like(vector)
    if peak == 0.0:
        return vector.copy()
    # Dividing by the peak keeps the squares from over- and underflowing.
    direction = vector.astype(np.float64) / peak
    length = float(np.sqrt(direction @ direction))
    # A dot product of d terms is off by at most d roundings, its root by half of that.
    length *= 1.0 + (vector.size + 8) * _ULP
    if peak * length <= clipping_norm:
        return vector.copy()
    # The last factor covers the roundings of this line and of the division by the peak.
    return _towards_zero(direction * (clipping_norm / length * (1.0 - 8 * _ULP)), vector.dtype)


def _towards_zero(values: npt.NDArray[np.float64], dtype: np.dtype[Scalar]) -> npt.NDArray[Scalar]:
    """Round to `dtype` without increasing any magnitude, so that no norm grows."""
    rounded = values.astype(dtype)
    return np.where(np.abs(rounded) > np.abs(values), np.nextafter(rounded, dtype.type(0)), rounded)
