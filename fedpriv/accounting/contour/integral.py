"""δ(ε) from the cumulant generating function of the privacy loss, by an integral along a contour.

For the loss S of all rounds together, K(w) = log E[e^{wS}] and any c > 0,

    δ(ε) = E[(1 − e^{ε − S})₊] = (1/2π) ∫ e^{K(w) − wε}/(w(w + 1)) dt,   w = c + it,

(Alghamdi et al. 2023, Theorem 3.1). By Poisson's summation formula the trapezoidal rule with step
2π/P gives Σ_k e^{kcP}·δ(ε + kP) over all integers k. The terms k ≠ 0 are its error; they are
positive and bounded here.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from fedpriv.accounting.contour.plan import CERTAINTY, LARGEST_ANGLE, Plan, Setting, decay, turned
from fedpriv.accounting.contour.privacy_loss import (
    EPS,
    ComplexVector,
    Losses,
    Tilted,
    log_likelihood,
    log_mgf_along,
    losses,
    power,
    support,
    tilt,
)
from fedpriv.accounting.round_counts import Direction, Vector

_HEIGHTS = (0.2, 0.5, 1.2, 2.4, 4.8)
"""Semiaxes of ellipses in the imaginary direction, cut where A could vanish."""
_SIZES = (24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024, 1536, 3072)
_INTERVALS = 96
"""Where peaks of a density are looked for in a window."""
_WORK, _WORK_PER_PAIR, _MOST_WORK = 2e7, 1e6, 8e7
"""Multiplications that a contour may cost; beyond, a convolution is faster."""
_PART = 128
"""Pairs that are treated together."""


@dataclass(frozen=True)
class Contour:
    """Everything that is needed to bound δ at any ε; tightly near the ε of the plan.

    Attributes:
        plan: the points, where `last` is whole.
        cumulant: [last + 1] K at the points.
        error: [last + 1] bounds on the errors of e^K, relative to its modulus.
        fall: b with |e^{K(c + it)}| ≤ e^{K(c) − b} for all t beyond the last point.
        further: a bound above K at the further tilt.
        dropped: bound on the part of δ from losses outside the windows.
    """

    plan: Plan
    cumulant: ComplexVector
    error: Vector
    fall: float
    further: float
    dropped: float

    def log_scale(self, epsilon: float) -> float:
        """K(c) − cε, whose exponential is the unit of the other results."""
        return float(self.cumulant[0].real) - self.plan.c * epsilon

    def value(self, epsilon: float) -> tuple[float, float]:
        """δ(ε) and −dδ(ε)/dε without their errors, in units of e^{K(c) − cε}."""
        w, terms = self._terms(epsilon)
        return float(terms.sum().real), float((w * terms).sum().real)

    def bounds(self, epsilon: float) -> tuple[float, float]:
        """Lower and upper bound on δ(ε) of the losses inside the windows, in the same units."""
        plan, scale = self.plan, self.log_scale(epsilon)
        w, terms = self._terms(epsilon)
        rounding = EPS * (16 + 4 * np.abs(self.cumulant.imag) + 4 * w.imag * abs(epsilon))
        size = 4 * EPS * (1.0 + abs(self.cumulant[0].real) + abs(plan.c * epsilon))
        value = float(terms.sum().real)
        growth = np.expm1(np.minimum(self.error + rounding, 600.0))
        wrong = float(np.abs(terms) @ growth) + size * abs(value)
        # Σ_{t > stop} |term|·2π/P ≤ sup|φ| ∫ dt/t², and both signs of t count.
        wrong += math.exp(-self.fall) / (math.pi * float(w[-1].imag))
        # k < 0: δ ≤ 1. k > 0: δ(u) ≤ e^{K(c') − c'u}. Both are geometric series.
        gap = plan.further - plan.c
        left = math.exp(min(-plan.c * plan.period - scale, 700.0))
        right = self.further - plan.further * epsilon - scale - gap * plan.period
        aliases = left / -math.expm1(-plan.c * plan.period)
        aliases += math.exp(min(right, 700.0)) / -math.expm1(-gap * plan.period)
        return value - wrong - aliases, value + wrong

    def _terms(self, epsilon: float) -> tuple[ComplexVector, ComplexVector]:
        """[last + 1] the points w, and their terms of the sum over both signs of t."""
        step = 2 * math.pi / self.plan.period
        times = step * np.arange(len(self.cumulant))
        w: ComplexVector = np.asarray(self.plan.c + 1j * times, np.complex128)
        angle = self.cumulant.imag - times * epsilon
        terms: ComplexVector = np.exp(self.cumulant.real - self.cumulant[0].real + 1j * angle)
        terms *= (step / math.pi) / (w * (w + 1))
        terms[0] /= 2
        return w, terms


def contour(setting: Setting, plan: Plan) -> Contour | None:
    """The sums over all rounds along a planned contour; None where they would cost too much."""
    if not math.isfinite(plan.last):
        return None
    last = math.ceil(plan.last)
    step = 2 * math.pi / plan.period
    stop = step * last
    quadrature = _quadrature(setting, plan, stop)
    if quadrature is None or (last + 1) * float(quadrature.nodes.sum()) > _allowed(setting):
        return None
    cumulant = np.zeros(last + 1, dtype=np.complex128)
    error, fall, further = np.zeros(last + 1), 0.0, 0.0
    for part in quadrature.parts():
        given, counts = part.losses(), part.setting.counts
        tilted, beyond = tilt(given, plan.c), tilt(given, plan.further)
        values = log_mgf_along(tilted, step, last + 1)
        wrong = part.relative_error(tilted, stop)[:, None]
        wrong = wrong + tilted.rounding[:, None] * step * np.arange(last + 1)
        wrong /= np.exp(np.maximum(values.real - tilted.log_mgf[:, None], -600.0))
        cumulant += counts @ values
        # |Π(φ + e) − Πφ| ≤ Π(|φ| + |e|) − Π|φ| for the errors e of the characteristic functions φ.
        error += counts @ np.log1p(wrong) + len(setting.q) * EPS * (counts @ np.abs(values))
        fall += float(counts @ decay(tilted, stop))
        further += float(counts @ (beyond.log_mgf + part.relative_error(beyond, 0.0)))
    dropped = setting.rounds * math.exp(plan.log_tail)
    return Contour(plan, cumulant, error, fall, further * (1 + 4 * EPS), dropped)


def cumulant_bound(setting: Setting, plan: Plan) -> float:
    """A bound above K(c), where c is that of the plan; ∞ where it would cost too much."""
    quadrature = _quadrature(setting, replace(plan, further=plan.c), 0.0)
    if quadrature is None:
        return math.inf
    bound = 0.0
    for part in quadrature.parts():
        tilted = tilt(part.losses(), plan.c)
        values = tilted.log_mgf + part.relative_error(tilted, 0.0)
        bound += part.setting.sum(values + len(setting.q) * EPS * np.abs(values))
    return bound


def _allowed(setting: Setting) -> float:
    """Multiplications that may be spent on these rounds."""
    return min(_WORK + _WORK_PER_PAIR * len(setting.q), _MOST_WORK)


@dataclass(frozen=True)
class _Quadrature:
    """Nodes that are enough for each pair, and what bounds their error.

    Let F be the tilted density times e^{itL} and |F| ≤ m on the ellipse around the window whose
    semiaxes add up to ρ times half of it. Then the error of n Gauss–Legendre nodes is at most
    half·(64/15)·m·ρ^{2 − 2n}/(1 − ρ^{−2}) (Trefethen 2013, Theorem 19.3).

    Attributes:
        setting: the rounds.
        low, high: [p, 1] ends of the window.
        semiaxis: [p] of the ellipse, in the imaginary direction.
        nodes: [p] numbers of nodes.
        peaks: [p, k] bounds on log f between neighbours of k + 1 outputs, f being the density under
            the tilt, but for 1/E[A^s], and
        present: [p, k] on the probability there that the user took part.
    """

    setting: Setting
    low: Vector
    high: Vector
    semiaxis: Vector
    nodes: Vector
    peaks: Vector
    present: Vector

    def parts(self) -> list["_Quadrature"]:
        """A few pairs each, which need about as many nodes."""
        order = np.argsort(self.nodes, kind="stable")
        found = []
        for start in range(0, len(order), _PART):
            at = order[start : start + _PART]
            setting = self.setting
            some = replace(setting, q=setting.q[at], z=setting.z[at], counts=setting.counts[at])
            arrays = (self.low, self.high, self.semiaxis, self.nodes, self.peaks, self.present)
            found.append(_Quadrature(some, *(array[at] for array in arrays)))
        return found

    def losses(self) -> Losses:
        """The losses at the nodes."""
        setting = self.setting
        ends, nodes = (self.low, self.high), int(self.nodes.max())
        return losses(setting.q, setting.z, ends, setting.direction, nodes)

    def log_error(self, c: float, t: float) -> tuple[Vector, Vector]:
        """[p] log ρ of the ellipse, and a bound on log(error of n nodes)·ρ^{2n} up to Im w = t.

        At u + id, with θ = d/z, |A(u + id)| ≤ A(u) and 0 ≤ arg A(u + id) ≤ arg(1 − p + p·e^{iθ}),
        which grows with p and so with u. Where s < 0, |A(u + id)/A(u)| counts, which falls with
        p up to ½, and grows from there on.
        """
        half = (self.high - self.low)[:, 0] / 2
        angle = (self.semiaxis / self.setting.z)[:, None]
        exponent = self.peaks
        if t > 0.0:
            exponent = exponent + t * turned(self.present, 1 - self.present, angle)[1]
        if self.setting.direction is Direction.ADD:
            coin = np.minimum(self.present, 0.5)
            exponent = exponent - c * turned(coin, 1 - coin, angle)[0]
        log_rho = np.arcsinh(self.semiaxis / half)
        scale = np.log(half) + 2 * log_rho - np.log(-np.expm1(-2 * log_rho)) + math.log(64 / 15)
        return log_rho, exponent.max(axis=1) + self.semiaxis**2 / 2 + scale

    def relative_error(self, tilted: Tilted, t: float) -> Vector:
        """[p] bounds on the errors of E[e^{wL}], |Im w| ≤ t, over E[e^{cL}]; rounding for t = 0."""
        c = tilted.order - 1 if self.setting.direction is Direction.REMOVE else -tilted.order
        peaks = _peaks(self.setting, self.low, self.high, c)[0]
        log_rho, error = replace(self, peaks=peaks).log_error(c, t)
        error -= 2 * int(self.nodes.max()) * log_rho + tilted.log_mgf
        rounding = tilted.rounding * abs(tilted.order)
        return 3 * np.exp(np.minimum(error, 600.0)) + tilted.losses.beyond_cut + rounding


def _quadrature(setting: Setting, plan: Plan, stop: float) -> _Quadrature | None:
    """Enough nodes for a contour up to imaginary part `stop`; None where they would be too many."""
    rough = setting.survey(plan.log_tail)
    low, high = support(rough, (plan.c, plan.further))
    peaks, present = _peaks(setting, low, high, plan.c)
    unknown = np.zeros(len(low))
    log_mgf = tilt(rough, plan.c).log_mgf
    best = _Quadrature(setting, low, high, unknown, unknown, peaks, present)
    least, chosen = np.full(len(low), np.inf), np.empty(len(low))
    for height in _HEIGHTS:
        semiaxis = np.minimum(height, LARGEST_ANGLE * setting.z)
        log_rho, error = replace(best, semiaxis=semiaxis).log_error(plan.c, stop)
        needed = (error - log_mgf + CERTAINTY + math.log(setting.rounds)) / (2 * log_rho)
        chosen = np.where(needed < least, semiaxis, chosen)
        least = np.minimum(needed, least)
    if not least.max() < _SIZES[-1]:
        return None
    nodes = np.array(_SIZES, np.float64)[np.searchsorted(_SIZES, least, side="right")]
    return replace(best, semiaxis=chosen, nodes=nodes)


def _peaks(setting: Setting, low: Vector, high: Vector, c: float) -> tuple[Vector, Vector]:
    """[p, k] `peaks` and `present` of a quadrature, for an ellipse up to the largest height.

    (log f)'' ≥ −1 + min(s, 0)·p(1 − p)/z² bounds log f between two outputs.
    """
    q, z = setting.q[:, None], setting.z[:, None]
    half = (high - low) / 2
    beyond = np.hypot(half, np.minimum(_HEIGHTS[-1], LARGEST_ANGLE * z)) - half
    y = (low - beyond) + (high - low + 2 * beyond) * np.linspace(0.0, 1.0, _INTERVALS + 1)
    log_r, log_ratio = log_likelihood(y, q, z)
    log_f = power(setting.direction, c) * log_ratio - y * y / 2 - math.log(2 * math.pi) / 2
    spacing = y[:, 1:2] - y[:, :1]
    present = np.exp(np.log(q) + log_r - log_ratio)[:, 1:]
    bend: float | Vector = 1.0
    if setting.direction is Direction.ADD:
        coin = np.minimum(present, 0.5)
        bend = 1.0 + c / z**2 * coin * (1 - coin)
    return np.maximum(log_f[:, 1:], log_f[:, :-1]) + bend * spacing**2 / 8, present
