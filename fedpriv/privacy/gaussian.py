"""Gaussian noise as a pure function of a key.

The normals are ordinary floating-point numbers. Adding them to a sum that is itself rounded leaks
through the low-order bits (Mironov 2012, "On significance of the least significant bits for
differential privacy"): (ε, δ) is computed for real-valued noise. Ruling that attack out takes sums
and noise of integers, which this module does not make.
"""

import math

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.entropy import words

# Even, because normals come in pairs; its words and what is made of them stay in a core's cache,
# and in memory that is used again from block to block.
_BLOCK = 1 << 14


def standard_normals(key: bytes, count: int) -> NDArray[np.float64]:
    """Independent standard normals, one for each 64-bit word of the key's stream 0.

    Box and Muller 1958: words 2i and 2i + 1 give normals 2i and 2i + 1, R·cos θ and R·sin θ.

    * R = √(−2 ln u), where u = (w + ½)/2^64 rounded to float64 (53 significant bits, however
      small u is), so the tail is resolved as finely as the middle and ends at
      √(130 ln 2) ≈ 9.4926; a true normal is beyond it with probability 2.3e-21. R = 0 has
      probability 2^-54.
    * θ = 2π·w'/2^64 for the word w' read as a signed integer, to float64 precision.
    * Each normal is within 1e-14 of the real-valued expression in its u and w'.

    The result is a pure function of key and count. The first m normals are the same for every
    count ≥ m and do not depend on the block size, so memory is bounded by the result. CPUs may
    differ in the last digits, as their logarithms and tangents do.

    Args:
        key: 32 secret bytes, used for nothing else.
        count: number of normals, 0 or more.

    Returns:
        float64[count].

    Raises:
        InvalidValueError: the key has not 32 bytes or count is negative.
    """
    if count < 0:
        raise InvalidValueError(f"count is {count}; it must not be negative")
    normals = np.empty(count + count % 2)
    for start in range(0, count, _BLOCK):
        block = normals[start : start + _BLOCK]
        _box_muller(words(key, block.size, start=start), out=block)
    return normals[:count]


def _box_muller(uniform: NDArray[np.uint64], out: NDArray[np.float64]) -> None:
    """Turn an even number of uniform words into as many normals."""
    radius = uniform[0::2] * 2.0**-64
    radius += 2.0**-65
    np.log(radius, out=radius)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    # With t = tan(θ/2), cos θ = (1 − t²)/(1 + t²) and sin θ = 2t/(1 + t²): one tangent for a
    # sine and a cosine, and NumPy's is up to nine times as fast as either.
    tangent = uniform.view(np.int64)[1::2] * (math.pi / 2**64)
    np.tan(tangent, out=tangent)
    square = tangent * tangent
    radius /= 1.0 + square
    np.multiply(radius, 1.0 - square, out=out[0::2])
    tangent *= 2.0
    np.multiply(radius, tangent, out=out[1::2])


def gaussian_noise(key: bytes, count: int, stddev: float) -> NDArray[np.float64]:
    """`stddev` times the standard normals of a key: the noise of one release.

    Args:
        key: 32 secret bytes, used for nothing else.
        count: number of components, 0 or more.
        stddev: standard deviation of each component, ≥ 0, in the units of the sum it is added to;
            0 gives exact zeros.

    Returns:
        float64[count].

    Raises:
        InvalidValueError: stddev is negative, NaN or infinite, or as in `standard_normals`.
    """
    if not 0.0 <= stddev < math.inf:
        raise InvalidValueError(f"stddev is {stddev}; it must be finite and not negative")
    noise = standard_normals(key, count)
    if stddev == 0.0:
        return np.zeros_like(noise)
    noise *= stddev
    return noise
