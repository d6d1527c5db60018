"""Sums of independent whole numbers modulo a power of two, by the fast Fourier transform.

Every rounding error is bounded, and the bound is returned with the result. The heaviest atom of
each summand is kept out of its transform, because its rounding would hide the rare large values of
a rarely sampled user.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, rfft

from fedpriv.accounting.rounds import Vector

_SMALLEST = -100.0
"""Logarithm below which a value of a transform is taken to be 0."""
_CHEAP_SIZE = 1 << 14
"""Size up to which the wider type costs nothing that counts."""
_PIECE = 1 << 15
"""How many frequencies are worked on at a time."""


def circular_sum(
    indices: Sequence[NDArray[np.int64]],
    weights: Sequence[Vector],
    counts: Sequence[int],
    size: int,
    tolerance: float,
) -> tuple[Vector, int, float]:
    """Distribution of Σ_i (sum of counts[i] draws of indices[i]) modulo `size`.

    The error follows from ‖transform(x) rounded − exact‖₂ ≤ γ·‖transform(x)‖₂ with the γ of
    `transform_error`, and |a^T − b^T| ≤ T·|a − b| in the unit circle. `size` is a power of two.
    Double precision is left where that misses the tolerance, or for free.

    Returns:
        [size] probabilities, entry k that of origin + k; the origin; a bound on the Euclidean
        norm of their error, to which each adds its own rounding to double precision.
    """
    tops = [int(weight.argmax()) for weight in weights]
    rests = [
        np.where(np.arange(len(w)) == top, 0.0, w) for w, top in zip(weights, tops, strict=True)
    ]
    spread = sum(c * _norm(rest) for c, rest in zip(counts, rests, strict=True))
    coarse = transform_error(np.float64, size) * (1 + spread) > tolerance
    real = np.longdouble if coarse or size <= _CHEAP_SIZE else np.float64
    exponent = np.zeros(size // 2 + 1, dtype=np.result_type(real, np.complex64))
    alive = np.arange(len(exponent))
    spread = summed = 0.0
    for index, weight, rest, top, count in zip(indices, weights, rests, tops, counts, strict=True):
        where = (index - index[top]) % size
        circle = np.bincount(where, weights=rest, minlength=size).astype(np.float64)
        part = rfft(circle.astype(real))[alive]
        large = np.abs(weight[top] + part) > math.exp(_SMALLEST / count)
        alive = alive[large]
        power = _power(real(weight[top]), part[large], count)
        exponent[alive] += power
        spread += count * _norm(circle)
        summed += float(np.abs(power).max(initial=0.0)) + 2 * count * abs(math.log(weight[top]))
    transform = np.zeros_like(exponent)
    transform[alive] = np.exp(exponent[alive])
    mass = irfft(transform, size).astype(np.float64)
    # The factor covers values that rounding moves out of the unit circle.
    gamma, eps = transform_error(real, size), float(np.finfo(real).eps)
    powers = gamma * spread * math.exp(min(700.0, gamma * math.sqrt(size) * spread))
    norm = _norm(mass)
    error = powers + (2 * gamma + 8 * eps * (summed + 1)) * norm + math.exp(_SMALLEST)
    origin = sum(c * int(i[top]) for c, i, top in zip(counts, indices, tops, strict=True))
    return mass, origin, error


def _power(
    constant: np.floating, part: NDArray[np.complexfloating], count: int
) -> NDArray[np.complexfloating]:
    """[frequencies] logarithms of (constant + part)^count, a piece at a time to save memory."""
    power = np.empty_like(part)
    for first in range(0, len(part), _PIECE):
        piece = slice(first, first + _PIECE)
        power[piece] = count * _log_of_sum(constant, part[piece])
    return power


def _norm(x: Vector) -> float:
    """Euclidean norm."""
    return math.sqrt(float(np.square(x).sum()))


def transform_error(real: type[np.floating], size: int) -> float:
    """Relative error in the Euclidean norm of a real transform of 2^t points, t ≥ 1.

    Such a transform is t levels of butterflies (pocketfft merges two into one of radix 4). With the
    unit roundoff u, a level multiplies by factors of modulus 1 that are right to 7u (pocketfft
    multiplies two, whose sines and cosines are right to an ulp), each complex product adds
    √2·2u (Higham 2002, Lemma 3.5), and each sum u relative to its result: below 11u in the norm of
    a level, 11·t·u in all to first order (as in his Theorem 24.2). 16·t·u leaves room for the rest.
    Real input makes a transform's halves mirror images, of which only one is computed; its errors
    are those of the whole one whose roundings are mirrored, too, so the same bound holds.
    """
    return 8 * float(np.finfo(real).eps) * math.log2(size)


def _log_of_sum(
    constant: np.floating, part: NDArray[np.complexfloating]
) -> NDArray[np.complexfloating]:
    """log(constant + part) for constant + part ≠ 0, accurate where `part` is small."""
    a, b = part.real / constant, part.imag / constant
    square = 2 * a + a * a + b * b
    near = np.abs(square) < 0.5
    modulus = np.where(near, 1, np.hypot(1 + a, b))
    log_modulus = np.where(near, np.log1p(np.where(near, square, 0)) / 2, np.log(modulus))
    return np.asarray(np.log(constant) + log_modulus + 1j * np.arctan2(b, 1 + a))
