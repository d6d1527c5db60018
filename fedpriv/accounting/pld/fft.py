"""Composition of privacy losses on one lattice by the fast Fourier transform.

The losses are tilted before they are convolved: a loss s gets the weight e^{θs}/E[e^{θL}], which
moves the mass to where δ comes from, so rounding is small against δ however small δ is. What wraps
around the transform's circle, and what it rounds, are bounded and returned with the result. The
heaviest atom of each loss is kept out of its transform, because its rounding would hide the rare
large values of a rarely sampled user.
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
_NOISE = 1e-4  # share of δ that rounding may take before a wider floating-point type is used
_LARGEST_SIZE = 1 << 21  # a larger transform would take too much memory
_UNCERTAIN = 1.0  # largest error of the logarithm of a probability
_SMALLEST = -100.0  # logarithm below which a value of a transform is taken to be 0
_CHEAP_SIZE = 1 << 14  # size up to which the wider type costs nothing that counts
_PIECE = 1 << 15  # frequencies that are worked on at a time, to save memory


@dataclass(frozen=True)
class FftWindow:
    """How the line that a composition is computed on becomes a circle."""

    step: float  # distance h of the lattice points
    tilt: float  # θ > 0
    left: float  # exponents η of the Chernoff bounds that place the two ends
    right: float
    depth: float  # minus the logarithm of the tilted mass that may lie beyond each end
    margin: float  # how much of `depth` goes below the size of what is looked for


@dataclass(frozen=True)
class Composition:
    """The tilted distribution of the sum S of all losses, and how wrong it may be.

    With s_k = start + k·step and K = log E[e^{θS}] over the finite losses, survival[k] is
    e^{θ·s_k − K}·P(S > s_k) and divergence[k] is e^{θ·s_k − K}·E[(1 − e^{s_k − S})_+].
    """

    start: float
    step: float
    tilt: float  # θ
    log_mgf: float  # K
    survival: Vector  # [points]
    divergence: Vector  # [points]
    excess: float  # E[(1 − e^{ε − S})_+] may be above what they say by this, times e^{K − θε},
    deficit: float  # and below by this
    slack: float  # by how much rounding may have moved S
    mass_error: float  # relative error that rounding may cause in every probability
    infinite: float  # at least the probability that S is infinite

    @property
    def losses(self) -> Vector:
        """[points] s_k."""
        return self.start + self.step * np.arange(len(self.divergence), dtype=np.float64)


def compose_atoms(parts: Sequence[tuple[LossAtoms, int]], window: FftWindow) -> Composition:
    """The sum of independent repeated losses.

    Only its moment where that takes over 2²¹ points, or rounding may move what leaves the window.
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
    moves = (float((w * a.rounding).sum()) for (a, _), w in zip(parts, weights, strict=True))
    moved = sum(count * move for count, move in zip(counts, moves, strict=True))
    reach = sum(count * abs(atoms.offset) for atoms, count in parts) + abs(start) + step * size
    slack, beyond = moved + 8 * _EPS * reach, math.exp(-window.depth)
    excess, deficit = error * scale + beyond, error * scale + 2 * beyond / (1 + tilt)
    # Four roundings for each point of the two recursions of `_curves`, and their factors'.
    mass_error += 8 * _EPS * size
    return Composition(
        start, step, tilt, log_mgf, *curves, excess, deficit, slack, mass_error, infinite
    )


def _tilted(atoms: LossAtoms, step: float, tilt: float) -> tuple[float, Vector]:
    """log E[e^{tilt·L}] over the finite atoms, and their tilted masses, which sum to 1."""
    log_mass = np.log(atoms.mass, out=np.full(atoms.mass.shape, -np.inf), where=atoms.mass > 0)
    exponent = log_mass + tilt * (atoms.offset + step * atoms.index)
    largest = float(exponent.max())
    weight = np.exp(exponent - largest)
    total = float(weight.sum())
    return largest + math.log(total), weight / total


def _log_mgf(parts: Sequence[tuple[LossAtoms, int]], step: float, tilt: float) -> float:
    """log E[e^{tilt·S}] of the sum S over the finite atoms."""
    return sum(count * _tilted(atoms, step, tilt)[0] for atoms, count in parts)


def _curves(mass: Vector, step: float, tilt: float) -> tuple[Vector, Vector]:
    """Tilted survival and divergence at the lattice points, as positive recursions from the right.

    P(S > s_k) = P(S > s_{k+1}) + P(S = s_{k+1}), and
    δ(s_k) = (1 − e^{−h})·P(S > s_k) + e^{−h}·δ(s_{k+1}), because P(S > u) is constant on a step.
    """
    decay = math.exp(-tilt * step)
    survival = _recursion(np.append(0.0, decay * mass[:0:-1]), decay)
    divergence = _recursion(-math.expm1(-step) * survival, math.exp(-(1 + tilt) * step))
    return survival[::-1], divergence[::-1]


def _recursion(term: Vector, decay: float) -> Vector:
    """y with y[n] = term[n] + decay·y[n − 1]: a triangular system with two diagonals."""
    band = np.empty((2, len(term)), order="F")
    band[0], band[1] = 1.0, -decay
    return np.asarray(dtbsv(1, band, term, lower=1, diag=1))


def _weight_norm(step: float, tilt: float) -> float:
    """Bound on the Euclidean norm of w(u) = e^{−θu}·(1 − e^{−u}) over points u > 0 spaced h apart.

    w rises, then falls, so the sum of squares is at most ∫w²/h + max w², and w ≤ 1/(1 + θ).
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
    """Distribution of Σ_i (sum of counts[i] draws of indices[i]) modulo `size`, a power of two.

    Returned are [size] probabilities, entry k that of origin + k; the origin; and a bound on the
    Euclidean norm of their error, to which each adds its own rounding to double precision. It
    follows from ‖transform(x) rounded − exact‖₂ ≤ γ·‖transform(x)‖₂ with the γ of
    `transform_error`, and |a^T − b^T| ≤ T·|a − b| in the unit circle. More than double precision is
    used where that misses the tolerance, or where it is cheap.
    """
    tops = [int(weight.argmax()) for weight in weights]

    def circle(k: int) -> Vector:
        """The masses of one draw but for the heaviest, which is at 0."""
        rest = np.where(np.arange(len(weights[k])) == tops[k], 0.0, weights[k])
        where = (indices[k] - indices[k][tops[k]]) % size
        return np.bincount(where, rest, size).astype(np.float64)

    spread = sum(count * _norm(circle(k)) for k, count in enumerate(counts))
    coarse = transform_error(np.float64, size) * (1 + spread) > tolerance
    real = np.longdouble if coarse or size <= _CHEAP_SIZE else np.float64
    exponent = np.zeros(size // 2 + 1, dtype=np.result_type(real, np.complex64))
    alive = np.arange(len(exponent))
    summed = 0.0
    for k, count in enumerate(counts):
        part, heaviest = rfft(circle(k).astype(real))[alive], real(weights[k][tops[k]])
        large = np.abs(heaviest + part) > math.exp(_SMALLEST / count)
        alive, part = alive[large], part[large]
        for first in range(0, len(part), _PIECE):
            piece = slice(first, first + _PIECE)
            part[piece] = count * _log_of_sum(heaviest, part[piece])
        exponent[alive] += part
        summed += float(np.abs(part).max(initial=0.0)) + 2 * count * abs(math.log(heaviest))
    transform = np.zeros_like(exponent)
    transform[alive] = np.exp(exponent[alive])
    mass = irfft(transform, size).astype(np.float64)
    # The factor covers values that rounding moves out of the unit circle.
    gamma, eps = transform_error(real, size), float(np.finfo(real).eps)
    powers = gamma * spread * math.exp(min(700.0, gamma * math.sqrt(size) * spread))
    error = powers + (2 * gamma + 8 * eps * (summed + 1)) * _norm(mass) + math.exp(_SMALLEST)
    origin = sum(c * int(i[top]) for c, i, top in zip(counts, indices, tops, strict=True))
    return mass, origin, error


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


def _norm(x: Vector) -> float:
    """Euclidean norm, without a product that may wake threads, which costs more."""
    return math.sqrt(float(np.square(x).sum()))


def transform_error(real: type[np.floating], size: int) -> float:
    """Relative error in the Euclidean norm of a real transform of 2^t points, t ≥ 1.

    Such a transform is t levels of butterflies (pocketfft merges two into one of radix 4). With the
    unit roundoff u, a level multiplies by factors of modulus 1 that are right to 7u, each complex
    product adds √2·2u (Higham 2002, Lemma 3.5), and each sum u relative to its result: below 11u in
    the norm of a level, 11·t·u in all to first order (as in his Theorem 24.2); 16·t·u leaves room
    for the rest. Of real input, only one of the mirrored halves is computed; the same bound holds.
    That sines and cosines, two to a factor, are right to an ulp is what pocketfft states of itself;
    it is not proved here.
    """
    return 8 * float(np.finfo(real).eps) * math.log2(size)
