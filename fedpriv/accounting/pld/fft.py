"""Composition of privacy losses on one lattice by the fast Fourier transform.

The losses are tilted before they are convolved: a loss s gets the weight e^{θs}/E[e^{θL}], which
moves the mass to the losses that determine δ, so rounding is small compared with any δ. Bounds on
the wrap-around and the rounding of the transform are returned with the result. The heaviest atom of
each loss is not transformed, because its rounding would hide the rare large losses of a rarely
sampled user.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.fft import irfft, rfft
from scipy.linalg.blas import dtbsv

from fedpriv.accounting.pld.lattice import ROUNDING, LossAtoms
from fedpriv.accounting.round_counts import Vector

_EPS = float(np.finfo(np.float64).eps)
_NOISE = 1e-4  # share of δ from which rounding requires a wider floating-point type
_LARGEST_SIZE = 1 << 21  # a larger transform would take too much memory
_UNCERTAIN = 1.0  # largest error of the logarithm of a probability
_SMALLEST = -100.0  # logarithm of values of a transform that count as 0
_CHEAP_SIZE = 1 << 14  # size up to which the wider type costs little
_PIECE = 1 << 15  # frequencies in one array, to save memory


@dataclass(frozen=True)
class FftWindow:
    """The lattice, the tilt and the ends of the circle on which a composition is computed."""

    step: float  # distance h of the lattice points
    tilt: float  # θ > 0
    left: float  # exponents η of the Chernoff bounds that give the two ends
    right: float
    depth: float  # minus the logarithm of the tilted mass beyond each end
    margin: float  # the part of `depth` below the size of the result


@dataclass(frozen=True)
class Composition:
    """The tilted distribution of the sum S of all losses, with bounds on its errors.

    With s_k = start + k·step and K = log E[e^{θS}] over the finite losses, survival[k] is
    e^{θ·s_k − K}·P(S > s_k) and divergence[k] is e^{θ·s_k − K}·E[(1 − e^{s_k − S})_+].
    """

    start: float
    step: float
    tilt: float  # θ
    log_mgf: float  # K
    survival: Vector  # [points]
    divergence: Vector  # [points]
    # Bounds on the true E[(1 − e^{ε − S})_+] minus that of the curves, and on the opposite
    # difference, in units of e^{K − θε}.
    excess: float
    deficit: float
    slack: float  # bound on the error of S by rounding
    mass_error: float  # bound on the relative error of probabilities by rounding
    infinite: float  # upper bound of the probability that S is infinite

    @property
    def losses(self) -> Vector:
        """[points] s_k."""
        return self.start + self.step * np.arange(len(self.divergence), dtype=np.float64)


def compose_atoms(parts: Sequence[tuple[LossAtoms, int]], window: FftWindow) -> Composition:
    """Return the sum of independent losses, each repeated.

    It has only its moment K, and no points, if it would need over 2²¹ points, or if rounding makes
    the window uncertain.
    """
    tilt, step = window.tilt, window.step
    logs, weights = zip(*(_tilted(atoms, step, tilt) for atoms, _ in parts), strict=True)
    counts = [count for _, count in parts]
    log_mgf = sum(count * log for count, log in zip(counts, logs, strict=True))
    mass_error = ROUNDING * sum(counts)
    infinite = sum(count * atoms.infinite for atoms, count in parts)
    low = (log_mgf - _log_mgf(parts, step, tilt - window.left) - window.depth) / window.left
    high = (_log_mgf(parts, step, tilt + window.right) - log_mgf + window.depth) / window.right
    points = (high - low) / step
    uncertain = mass_error + 8 * _EPS * abs(log_mgf)
    if not (0 <= points <= _LARGEST_SIZE - 2 and uncertain < _UNCERTAIN):
        curves = np.zeros(0), np.zeros(0)
        slack = sum(count * float(atoms.rounding.max()) for atoms, count in parts)
        return Composition(0.0, step, tilt, log_mgf, *curves, 0.0, 0.0, slack, mass_error, infinite)
    size = 1 << (math.ceil(points) + 1).bit_length()
    scale = _weight_norm(step, tilt)
    tolerance = _NOISE * math.exp(window.margin - window.depth) / scale
    indices = [atoms.index for atoms, _ in parts]
    mass, origin, error = circular_sum(indices, weights, counts, size, tolerance)
    offset = sum(count * atoms.offset for atoms, count in parts)
    first = math.floor((low - offset) / step)
    start = offset + step * first
    curves = _curves(np.roll(mass, -((first - origin) % size)), step, tilt)
    shifts = (float((w * a.rounding).sum()) for (a, _), w in zip(parts, weights, strict=True))
    shift = sum(count * mean for count, mean in zip(counts, shifts, strict=True))
    reach = sum(count * abs(atoms.offset) for atoms, count in parts) + abs(start) + step * size
    slack, outside = shift + 8 * _EPS * reach, math.exp(-window.depth)
    excess, deficit = error * scale + outside, error * scale + 2 * outside / (1 + tilt)
    # Four roundings for each point of the two recursions of `_curves`, and for their factors.
    mass_error += 8 * _EPS * size
    return Composition(
        start, step, tilt, log_mgf, *curves, excess, deficit, slack, mass_error, infinite
    )


def _tilted(atoms: LossAtoms, step: float, tilt: float) -> tuple[float, Vector]:
    """Return log E[e^{tilt·L}] over the finite atoms, and their tilted masses, which sum to 1."""
    log_mass = np.log(atoms.mass, out=np.full(atoms.mass.shape, -np.inf), where=atoms.mass > 0)
    exponent = log_mass + tilt * (atoms.offset + step * atoms.index)
    largest = float(exponent.max())
    weight = np.exp(exponent - largest)
    total = float(weight.sum())
    return largest + math.log(total), weight / total


def _log_mgf(parts: Sequence[tuple[LossAtoms, int]], step: float, tilt: float) -> float:
    """Return log E[e^{tilt·S}] of the sum S over the finite atoms."""
    return sum(count * _tilted(atoms, step, tilt)[0] for atoms, count in parts)


def _curves(mass: Vector, step: float, tilt: float) -> tuple[Vector, Vector]:
    """Return tilted survival and divergence at lattice points, by recursions from the right.

    P(S > s_k) = P(S > s_{k+1}) + P(S = s_{k+1}), and
    δ(s_k) = (1 − e^{−h})·P(S > s_k) + e^{−h}·δ(s_{k+1}), because P(S > u) is constant on a step.
    All terms are positive.
    """
    decay = math.exp(-tilt * step)
    survival = _recursion(np.append(0.0, decay * mass[:0:-1]), decay)
    divergence = _recursion(-math.expm1(-step) * survival, math.exp(-(1 + tilt) * step))
    return survival[::-1], divergence[::-1]


def _recursion(term: Vector, decay: float) -> Vector:
    """Return y with y[n] = term[n] + decay·y[n − 1], a triangular system with two diagonals."""
    band = np.empty((2, len(term)), order="F")
    band[0], band[1] = 1.0, -decay
    return np.asarray(dtbsv(1, band, term, lower=1, diag=1))


def _weight_norm(step: float, tilt: float) -> float:
    """Return a bound on the Euclidean norm of w(u) = e^{−θu}·(1 − e^{−u}) over points u > 0.

    They are h = `step` apart. w increases and then decreases, so the sum of squares is at most
    ∫w²/h + max w², and w ≤ 1/(1 + θ).
    """
    integral = 2 / (2 * tilt * (2 * tilt + 1) * (2 * tilt + 2))
    return math.sqrt(integral / step + 1 / (1 + tilt) ** 2)


def circular_sum(
    indices: Sequence[NDArray[np.int64]],
    weights: Sequence[Vector],
    counts: Sequence[int],
    size: int,
    tolerance: float,
) -> tuple[Vector, int, float]:
    """Return the distribution of Σ_i (sum of counts[i] draws of indices[i]) modulo `size`.

    `size` is a power of two. The results are probabilities [size], whose entry k belongs to
    origin + k; the origin; and a bound on the Euclidean norm of their error. Each probability has
    in addition its own rounding to double precision. The bound follows from
    ‖rounded transform(x) − transform(x)‖₂ ≤ γ·‖transform(x)‖₂ with the γ of `transform_error`, and
    from |a^T − b^T| ≤ T·|a − b| in the unit circle. A wider type than double precision is used if
    that misses the tolerance, or if the size is small.
    """
    tops = [int(weight.argmax()) for weight in weights]

    def circle(k: int) -> Vector:
        """Return the masses of one draw without the heaviest atom, whose position is 0."""
        rest = np.where(np.arange(len(weights[k])) == tops[k], 0.0, weights[k])
        places = (indices[k] - indices[k][tops[k]]) % size
        return np.bincount(places, rest, size).astype(np.float64)

    spread = sum(count * _norm(circle(k)) for k, count in enumerate(counts))
    is_coarse = transform_error(np.float64, size) * (1 + spread) > tolerance
    real = np.longdouble if is_coarse or size <= _CHEAP_SIZE else np.float64
    exponent = np.zeros(size // 2 + 1, dtype=np.result_type(real, np.complex64))
    nonzero = np.arange(len(exponent))
    size_of_logs = 0.0
    for k, count in enumerate(counts):
        part, heaviest = rfft(circle(k).astype(real))[nonzero], real(weights[k][tops[k]])
        is_large = np.abs(heaviest + part) > math.exp(_SMALLEST / count)
        nonzero, part = nonzero[is_large], part[is_large]
        for first in range(0, len(part), _PIECE):
            piece = slice(first, first + _PIECE)
            part[piece] = count * _log_of_sum(heaviest, part[piece])
        exponent[nonzero] += part
        size_of_logs += float(np.abs(part).max(initial=0.0)) + 2 * count * abs(math.log(heaviest))
    transform = np.zeros_like(exponent)
    transform[nonzero] = np.exp(exponent[nonzero])
    mass = irfft(transform, size).astype(np.float64)
    # The exponential covers values that rounding moves out of the unit circle.
    gamma, eps = transform_error(real, size), float(np.finfo(real).eps)
    powers = gamma * spread * math.exp(min(700.0, gamma * math.sqrt(size) * spread))
    error = powers + (2 * gamma + 8 * eps * (size_of_logs + 1)) * _norm(mass) + math.exp(_SMALLEST)
    origin = sum(c * int(i[top]) for c, i, top in zip(counts, indices, tops, strict=True))
    return mass, origin, error


def _log_of_sum(
    constant: np.floating, part: NDArray[np.complexfloating]
) -> NDArray[np.complexfloating]:
    """Return log(constant + part) for constant + part ≠ 0, accurate for a small `part`."""
    a, b = part.real / constant, part.imag / constant
    square = 2 * a + a * a + b * b
    is_near = np.abs(square) < 0.5
    modulus = np.where(is_near, 1, np.hypot(1 + a, b))
    log_modulus = np.where(is_near, np.log1p(np.where(is_near, square, 0)) / 2, np.log(modulus))
    return np.asarray(np.log(constant) + log_modulus + 1j * np.arctan2(b, 1 + a))


def _norm(x: Vector) -> float:
    """Return the Euclidean norm, without a BLAS product, which may start expensive threads."""
    return math.sqrt(float(np.square(x).sum()))


def transform_error(real: type[np.floating], size: int) -> float:
    """Return the relative error in the Euclidean norm of a real transform of 2^t points, t ≥ 1.

    Such a transform has t levels of butterflies (pocketfft merges two into one of radix 4). With
    the unit roundoff u, a level multiplies by factors of modulus 1 with an error of 7u; each
    complex product adds √2·2u (Higham 2002, Lemma 3.5), and each sum u relative to its result. That
    is below 11u in the norm of a level, and 11·t·u in all to first order (as in his Theorem 24.2);
    16·t·u leaves room for the rest. For real input only one of the mirrored halves is computed,
    with the same bound. The error of an ulp for sines and cosines, two in a factor, is stated by
    pocketfft and not proved here.
    """
    return 8 * float(np.finfo(real).eps) * math.log2(size)
