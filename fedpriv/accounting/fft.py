"""Composition of privacy losses on one lattice by the fast Fourier transform.

The losses are tilted before they are convolved: a loss s gets the weight e^{θs}/E[e^{θL}], which
moves the mass to where δ comes from, so that rounding is small against δ however small δ is. A
transform works on a circle; what wraps around it, and what it rounds, are bounded and returned with
the result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg.blas import dtbsv

from fedpriv.accounting.atoms import ROUNDING, LossAtoms
from fedpriv.accounting.circular import circular_sum
from fedpriv.accounting.rounds import Vector

_NOISE = 1e-4
"""Share of δ that rounding may take before a wider floating-point type is used."""
_LARGEST_SIZE = 1 << 21
"""Size beyond which a transform would take too much memory."""


@dataclass(frozen=True)
class Window:
    """How the line that a composition is computed on becomes a circle.

    Attributes:
        step: distance h of the lattice points.
        tilt: θ > 0, the exponent of the tilt.
        left, right: exponents η of the Chernoff bounds that place the two ends.
        depth: minus the logarithm of the tilted mass that may lie beyond each end.
        margin: how much of `depth` goes below the size of what is looked for.
    """

    step: float
    tilt: float
    left: float
    right: float
    depth: float
    margin: float


@dataclass(frozen=True)
class Composition:
    """The tilted distribution of the sum S of all losses, and how wrong it may be.

    With s_k = start + k·step and K = log E[e^{θS}] over the finite losses, survival[k] is
    e^{θ·s_k − K}·P(S > s_k) and divergence[k] is e^{θ·s_k − K}·E[(1 − e^{s_k − S})_+].

    Attributes:
        start, step, tilt, log_mgf: the lattice, θ and K.
        survival, divergence: [points] as above.
        excess: by how much E[(1 − e^{ε − S})_+] may be above what they say, times e^{θε − K}.
        deficit: by how much it may be below, times e^{θε − K}.
        slack: by how much rounding may have moved S.
        mass_error: relative error that rounding may cause in every probability.
        infinite: at least the probability that S is infinite.
    """

    start: float
    step: float
    tilt: float
    log_mgf: float
    survival: Vector
    divergence: Vector
    excess: float
    deficit: float
    slack: float
    mass_error: float
    infinite: float


def compose_atoms(parts: Sequence[tuple[LossAtoms, int]], window: Window) -> Composition:
    """Distribution of the sum of independent losses, each repeated.

    Args:
        parts: at least one loss, each with its number of rounds; all have the window's step.
        window: where to compute.

    Returns:
        The composition on the window's lattice points; on none if they were more than 2²¹.
    """
    tilt, step = window.tilt, window.step
    logs, weights = zip(*(_tilted(atoms, step, tilt) for atoms, _ in parts), strict=True)
    counts = [count for _, count in parts]
    log_mgf = sum(count * log for count, log in zip(counts, logs, strict=True))
    low = (log_mgf - _log_mgf(parts, step, tilt - window.left) - window.depth) / window.left
    high = (_log_mgf(parts, step, tilt + window.right) - log_mgf + window.depth) / window.right
    size = 1 << (math.ceil((high - low) / step) + 1).bit_length()
    if size > _LARGEST_SIZE:
        return _only_moments(parts, tilt, step, log_mgf)
    scale = _weight_norm(step, tilt)
    tolerance = _NOISE * math.exp(window.margin - window.depth) / scale
    indices = [atoms.index for atoms, _ in parts]
    mass, origin, error = circular_sum(indices, weights, counts, size, tolerance)
    offset = sum(count * atoms.offset for atoms, count in parts)
    first = math.floor((low - offset) / step)
    start = offset + step * first
    survival, divergence = _curves(np.roll(mass, -((first - origin) % size)), step, tilt)
    moved = sum(
        count * float(weight @ atoms.rounding)
        for (atoms, count), weight in zip(parts, weights, strict=True)
    )
    reach = sum(count * abs(atoms.offset) for atoms, count in parts) + abs(start) + step * size
    beyond = math.exp(-window.depth)
    return Composition(
        start=start,
        step=step,
        tilt=tilt,
        log_mgf=log_mgf,
        survival=survival,
        divergence=divergence,
        excess=error * scale + beyond,
        deficit=error * scale + 2 * beyond / (1 + tilt),
        slack=moved + 8 * float(np.finfo(np.float64).eps) * reach,
        # Four roundings for each point of the two recursions of `_curves`, and their factors'.
        mass_error=ROUNDING * sum(counts) + 8 * float(np.finfo(np.float64).eps) * size,
        infinite=_infinite(parts),
    )


def _only_moments(
    parts: Sequence[tuple[LossAtoms, int]], tilt: float, step: float, log_mgf: float
) -> Composition:
    """A composition without points, of which the moment log_mgf is known."""
    slack = sum(count * float(atoms.rounding.max()) for atoms, count in parts)
    none = np.zeros(0)
    error = ROUNDING * sum(count for _, count in parts)
    return Composition(
        0.0, step, tilt, log_mgf, none, none, 0.0, 0.0, slack, error, _infinite(parts)
    )


def _infinite(parts: Sequence[tuple[LossAtoms, int]]) -> float:
    """At least the probability that one of the losses is infinite."""
    return sum(count * atoms.infinite for atoms, count in parts)


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
