"""δ(ε) from the cumulant generating function of the privacy loss, by an integral along a contour.

For the loss S of all rounds together, K(w) = log E[e^{wS}] and any c > 0,

    δ(ε) = E[(1 − e^{ε − S})₊] = (1/2π) ∫ e^{K(w) − wε}/(w(w + 1)) dt,   w = c + it,

(Alghamdi et al. 2023, Theorem 3.1). By Poisson's summation formula the
trapezoidal rule with step 2π/P gives Σ_k e^{kcP}·δ(ε + kP) over all integers k. The terms k ≠ 0 are
its error; they are positive and bounded here.
"""

import math
from dataclasses import dataclass

import numpy as np

from fedpriv.accounting.cumulant import (
    EPS,
    ComplexVector,
    Losses,
    Tilted,
    log_mgf_along,
    losses,
    tilt,
)
from fedpriv.accounting.loss import Vector
from fedpriv.accounting.panel import Panel
from fedpriv.accounting.saddle import CERTAINTY, Plan, fitted, survey
from fedpriv.accounting.shifted import Ellipses, decay, ellipses
from fedpriv.accounting.windows import outside_support, support

_SIZES = (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536)
_SECOND = 0.85
"""Where the second contour crosses the real axis, relative to the first."""
_WORK, _WORK_PER_PAIR, _LARGEST_WORK = 2e6, 7e4, 3e7
"""Sines that one contour may cost; beyond, a convolution is faster."""


@dataclass(frozen=True)
class Contour:
    """Everything that is needed to bound δ at any ε.

    Attributes:
        c: real part of the contour.
        epsilon: ε for which it was planned; bounds are valid for any other.
        period: P.
        cumulant: [m + 1] K(c + i·2πj/P).
        error: [m + 1] bounds on the errors of e^K, relative to its modulus.
        log_tail: log of the bound on the rest of the sum, relative to e^{K(c) − cε}.
        further: a tilt > c, and
        further_cumulant: a bound above K there.
        dropped: bound on the part of δ from losses outside the windows.
    """

    c: float
    epsilon: float
    period: float
    cumulant: ComplexVector
    error: Vector
    log_tail: float
    further: float
    further_cumulant: float
    dropped: float

    def log_scale(self, epsilon: float) -> float:
        """K(c) − cε, whose exponential is the unit of the other results."""
        return float(self.cumulant[0].real) - self.c * epsilon

    def value(self, epsilon: float) -> tuple[float, float, float]:
        """The sum without its errors.

        Args:
            epsilon: any ε.

        Returns:
            δ(ε), −dδ(ε)/dε and a bound on the error of the first that comes from those of K, all
            in units of e^{K(c) − cε}.
        """
        step = 2 * math.pi / self.period
        t = step * np.arange(len(self.cumulant))
        w = self.c + 1j * t
        angle = self.cumulant.imag - t * epsilon
        terms = np.exp(self.cumulant.real - self.cumulant[0].real + 1j * angle) / (w * (w + 1))
        terms[0] /= 2
        rounding = EPS * (16 + 4 * np.abs(self.cumulant.imag) + 4 * t * abs(epsilon))
        wrong = np.abs(terms) @ np.expm1(np.minimum(self.error + rounding, 30.0))
        scale = step / math.pi
        return (
            scale * float(terms.sum().real),
            scale * float((w * terms).sum().real),
            scale * float(wrong),
        )

    def bounds(self, epsilon: float) -> tuple[float, float]:
        """Lower and upper bound on δ(ε) of the losses inside the windows.

        Args:
            epsilon: any ε.

        Returns:
            The bounds, in units of e^{K(c) − cε}.
        """
        value, _, wrong = self.value(epsilon)
        size = 1.0 + abs(self.cumulant[0].real) + abs(self.c * epsilon)
        wrong += math.exp(self.log_tail) + 4 * EPS * size * abs(value)
        scale, gap = self.log_scale(epsilon), self.further - self.c
        # k < 0: δ ≤ 1. k > 0: δ(u) ≤ e^{K(c') − c'u}. Both are geometric series.
        left = math.exp(min(-self.c * self.period - scale, 700.0))
        left /= -math.expm1(-self.c * self.period)
        right = self.further_cumulant - self.further * epsilon - scale - gap * self.period
        right = math.exp(min(right, 700.0))
        right /= -math.expm1(-gap * self.period)
        return float(value - wrong - left - right), float(value + wrong)


def make_contours(panel: Panel, plan: Plan) -> tuple[Contour, ...]:
    """Two contours as planned, at different c and with different steps, each enough by itself.

    Args:
        panel: the rounds.
        plan: made for them or a summary of them.

    Returns:
        The contours, or none where they would be too long.
    """
    if math.isinf(plan.stop):
        return ()
    rough = survey(panel, plan.log_tail, plan.direction)
    plan = fitted(panel, rough, plan)
    tilts = plan.c, _SECOND * plan.c
    grid = _grid(panel, rough, plan, tilts, plan.stop, plan.terms)
    if grid is None:
        return ()
    further = tilt(grid.losses, plan.further)
    bound = panel.sum_above(further.log_mgf, grid.relative_error(further, 0.0))
    return tuple(_contour(panel, plan, grid, c, bound) for c in tilts)


def cumulant_bound(panel: Panel, plan: Plan) -> float:
    """A bound above K(c), where c is that of the plan; ∞ where it would cost too much."""
    rough = survey(panel, plan.log_tail, plan.direction)
    grid = _grid(panel, rough, plan, (plan.c,), 0.0, 1.0)
    if grid is None:
        return math.inf
    tilted = tilt(grid.losses, plan.c)
    return panel.sum_above(tilted.log_mgf, grid.relative_error(tilted, 0.0))


@dataclass(frozen=True)
class _Grid:
    """Losses at enough nodes, and what bounds their quadrature."""

    losses: Losses
    ellipses: Ellipses

    def relative_error(self, tilted: Tilted, t: float) -> Vector:
        """[p] bounds on the errors of E[e^{wL}], |Im w| ≤ t, over E[e^{cL}]; rounding for t = 0."""
        quadrature = self.ellipses.log_error(tilted, t, len(self.losses.place))
        rounding = tilted.rounding * abs(tilted.order)
        return _exp(quadrature) + outside_support(self.losses) + rounding


def _grid(
    panel: Panel, rough: Losses, plan: Plan, tilts: tuple[float, ...], stop: float, terms: float
) -> _Grid | None:
    """Losses at as many nodes as so many times up to `stop` need; None where that is too many."""
    if math.isinf(terms):
        return None
    ends = support(rough, (*tilts, plan.further))
    around = ellipses(rough, ends)
    tilted = tilt(rough, plan.c)
    wanted = -CERTAINTY - math.log(panel.rounds)
    pairs = len(panel.q)
    allowed = min(_WORK + _WORK_PER_PAIR * pairs, _LARGEST_WORK)
    for nodes in _SIZES:
        if terms * nodes * pairs > allowed:
            return None
        if around.log_error(tilted, stop, nodes).max() < wanted:
            return _Grid(losses(panel.q, panel.z, ends, plan.direction, nodes), around)
    return None


def _contour(panel: Panel, plan: Plan, grid: _Grid, c: float, further_cumulant: float) -> Contour:
    """The contour through c; the further left, the longer the period."""
    tilted = tilt(grid.losses, c)
    period = plan.period * plan.c / c
    times = np.arange(math.ceil(plan.stop * period / (2 * math.pi)) + 1.0) * (2 * math.pi / period)
    values = log_mgf_along(tilted, times)
    # |Π(φ + e) − Πφ| ≤ Π(|φ| + |e|) − Π|φ| for the errors e of the characteristic functions φ.
    wrong = grid.relative_error(tilted, times[-1])[:, None] + tilted.rounding[:, None] * times
    size = np.exp(np.maximum(values.real - tilted.log_mgf[:, None], -600.0))
    error = np.abs(panel.weight) @ np.log1p(wrong / size) + panel.interpolation_error(values)
    error += len(panel.q) * EPS * (np.abs(panel.weight) @ np.abs(values))
    return Contour(
        c=c,
        epsilon=plan.epsilon,
        period=period,
        cumulant=panel.weight @ values,
        error=error,
        # Σ_{t > stop} |term|·2π/P ≤ sup|φ| ∫ dt/t², and both signs of t count.
        log_tail=-panel.least(decay(tilted, times[-1])) - math.log(math.pi * float(times[-1])),
        further=plan.further,
        further_cumulant=further_cumulant,
        dropped=panel.rounds * math.exp(plan.log_tail),
    )


def _exp(x: Vector) -> Vector:
    """e^x, or a number too large to matter."""
    return np.asarray(np.exp(np.minimum(x, 600.0)))
