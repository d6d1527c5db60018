"""Bounds on integrals over the privacy loss, from shifting the path of integration.

Let f be the tilted density of y and F(y) = f(y)·e^{itL(y)}, analytic for |Im y| < πz. At y + id,
with θ = d/z and p(y) the probability that the user took part, A(y + id)/A(y) = 1 − p + p·e^{iθ}, so

    log |F(y + id)/f(y)| = d²/2 + s·log |1 − p + p·e^{iθ}| ∓ t·arg(1 − p + p·e^{iθ}).

Where the last term falls, a path through y + i·d(y) bounds the characteristic function; all over an
ellipse around the window, |F| bounds the error of Gauss–Legendre quadrature.
"""

import math
from dataclasses import dataclass

import numpy as np

from fedpriv.accounting.cumulant import Losses, Tilted, log_absent, log_likelihood
from fedpriv.accounting.loss import Vector
from fedpriv.accounting.windows import outside_support

_LARGEST_ANGLE = 2.4
"""θ stays below π, where A may vanish."""
_LARGEST_EXPONENT = 600.0
_TAPER = 16
_RELIED_ON = 0.9
"""The rest covers the quadrature of a smooth integrand, and that the decay is only nearly
monotone between the pairs of a panel."""
_HEIGHTS = np.array([0.15, 0.3, 0.6, 1.2, 2.4, 4.8])
"""Semiaxes of the ellipses in the imaginary direction."""
_POINTS = 65


def decay(tilted: Tilted, t: float) -> Vector:
    """How fast the characteristic functions φ(t) = E[e^{itL}] under the tilt fall.

    By Cauchy's theorem |φ(t)| ≤ ∫ |F(y + i·d(y))|·√(1 + d'²) dy for any d that vanishes at the ends
    of the window. For small t this is 1 − α·t²·E[p²]/z² + α²·t²·(…)/2 when d = α·t·p/z.

    Args:
        tilted: p pairs under a tilt.
        t: > 0.

    Returns:
        [p] numbers b ≥ 0 with |φ(u)| ≤ e^{−b} for **all** u ≥ t: on a fixed path every factor
        e^{−u·arg} falls as u grows.
    """
    given = tilted.losses
    p, z = given.present, given.z
    slope = p * given.absent / z
    gain = (tilted.mass * p**2).sum(axis=1, keepdims=True)
    cost = slope**2 - tilted.order * slope / z * p**2
    cost = (tilted.mass * cost).sum(axis=1, keepdims=True)
    alpha = gain / np.maximum(gain + cost, gain / 4)
    half = (given.high - given.low) / 2
    inside = 1 - given.place**_TAPER
    narrowing = -_TAPER * given.place ** (_TAPER - 1) / half
    outside = outside_support(given)
    best = np.zeros(len(z))
    for share in (1.0, 0.4):
        free = share * alpha * t * p / z**2
        limit = 1 + free / _LARGEST_ANGLE
        angle = free / limit * inside
        bend = share * alpha * t * slope / z / limit**2 * inside + z * free / limit * narrowing
        exponent = (z * angle) ** 2 / 2 + tilted.order * _log_change(p, given.absent, angle)
        exponent += np.log1p(bend**2) / 2 - t * _argument(p, angle)
        exponent = np.minimum(exponent, _LARGEST_EXPONENT)
        near = (tilted.mass * np.expm1(exponent)).sum(axis=1) + outside
        far = (tilted.mass * np.exp(exponent)).sum(axis=1) + outside
        bound = np.where(near > -0.5, np.log1p(np.maximum(near, -0.5)), np.log(far))
        best = np.maximum(best, -_RELIED_ON * bound)
    return best


@dataclass(frozen=True)
class Ellipses:
    """What F is on ellipses in the complex plane, for p pairs, e ellipses and k points on each.

    Attributes:
        log_rho: [e, p] log of the sum of the semiaxes over half the window.
        log_scale: [e, p] log of the bound on the error for no node and |F| = 1.
        gaussian: [e, p, k] log |e^{−(y + id)²/2}|.
        log_modulus: [e, p, k] log |A|.
        argument: [e, p, k] |arg A|.
    """

    log_rho: Vector
    log_scale: Vector
    gaussian: Vector
    log_modulus: Vector
    argument: Vector

    def log_error(self, tilted: Tilted, t: float, nodes: int) -> Vector:
        """Error of Gauss–Legendre quadrature of E[A^{s+iu}] for all |u| ≤ t.

        Args:
            tilted: the p pairs under a tilt; their nodes do not matter.
            t: ≥ 0.
            nodes: number of nodes.

        Returns:
            [p] logarithms of bounds, relative to E[A^s].
        """
        exponent = self.gaussian + tilted.order * self.log_modulus + t * self.argument
        bounds = exponent.max(axis=2) + self.log_scale - 2 * nodes * self.log_rho
        return np.asarray(bounds.min(axis=0) - tilted.log_mgf)


def ellipses(given: Losses, ends: tuple[Vector, Vector]) -> Ellipses:
    """Ellipses with foci at the ends of a window.

    With ρ the sum of the semiaxes over half the window and |F| ≤ m on the ellipse, the error of n
    nodes is at most half·(64/15)·m·ρ^{2 − 2n}/(1 − ρ^{−2}) (Trefethen 2013, Theorem 19.3).

    Args:
        given: p pairs; their window does not matter.
        ends: [p, 1] low and high end of the window.

    Returns:
        The ellipses.
    """
    low, high = ends
    half = (high - low) / 2
    semiaxis = np.minimum(_HEIGHTS[:, None, None], _LARGEST_ANGLE * given.z)
    turn = np.linspace(0.0, math.pi, _POINTS)
    y = (low + high) / 2 + np.hypot(half, semiaxis) * np.cos(turn)
    angle = semiaxis / given.z * np.sin(turn)
    log_r, log_ratio = log_likelihood(y, given.q, given.z)
    present = np.exp(np.log(given.q) + log_r - log_ratio)
    absent = np.exp(log_absent(given.q) - log_ratio)
    log_rho = np.arcsinh(semiaxis / half)[:, :, 0]
    scale = np.log(half[:, 0]) + 2 * log_rho - np.log(-np.expm1(-2 * log_rho))
    return Ellipses(
        log_rho=log_rho,
        # Three such integrals meet in one result and each has a factor 1/√(2π); e³ leaves 16 for a
        # maximum between two points.
        log_scale=scale + math.log(64 / 15) + 3.0,
        gaussian=((given.z * angle) ** 2 - y * y) / 2,
        log_modulus=log_ratio + _log_change(present, absent, angle),
        argument=_argument(present, angle),
    )


def _log_change(present: Vector, absent: Vector, angle: Vector) -> Vector:
    """log |1 − p + p·e^{iθ}|."""
    return np.asarray(np.log1p(-4 * present * absent * np.sin(angle / 2) ** 2) / 2)


def _argument(present: Vector, angle: Vector) -> Vector:
    """arg(1 − p + p·e^{iθ}) in [0, π)."""
    return np.asarray(np.arctan2(present * np.sin(angle), 1 - 2 * present * np.sin(angle / 2) ** 2))
