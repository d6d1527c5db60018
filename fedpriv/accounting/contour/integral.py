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

from fedpriv.accounting.contour.cumulant import (
    EPS,
    ComplexVector,
    Losses,
    Tilted,
    log_likelihood_ratio,
    log_mgf_along,
    losses,
    power,
    support,
    tilt,
)
from fedpriv.accounting.contour.saddle_point import (
    CERTAINTY,
    LARGEST_ANGLE,
    ContourPlan,
    DirectedRounds,
    decay,
    turned,
)
from fedpriv.accounting.round_counts import Direction, Vector

# Semiaxes of ellipses in the imaginary direction, cut where A could vanish.
_HEIGHTS = (0.2, 0.5, 1.2, 2.4, 4.8)
_SIZES = (24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024, 1536, 3072)
_INTERVALS = 96  # where peaks of a density are looked for in a window
# Multiplications that a contour may cost; beyond, a convolution is faster.
_WORK, _WORK_PER_SETTING, _MOST_WORK = 2e7, 1e6, 8e7
_PART = 128  # settings that are treated together


@dataclass(frozen=True)
class Contour:
    """Everything that is needed to bound δ at any ε; tightly near the ε of the plan."""

    plan: ContourPlan
    cumulant: ComplexVector  # [points] K
    error: Vector  # [points] bounds on the errors of e^K, relative to its modulus
    fall: float  # |e^{K(c + it)}| ≤ e^{K(c) − fall} for all t beyond the last point
    further: float  # a bound above K at the further tilt
    dropped: float  # bound on the part of δ from losses outside the windows

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
        """[points] the points w, and their terms of the sum over both signs of t."""
        step = 2 * math.pi / self.plan.period
        times = step * np.arange(len(self.cumulant))
        w: ComplexVector = np.asarray(self.plan.c + 1j * times, np.complex128)
        angle = self.cumulant.imag - times * epsilon
        terms: ComplexVector = np.exp(self.cumulant.real - self.cumulant[0].real + 1j * angle)
        terms *= (step / math.pi) / (w * (w + 1))
        terms[0] /= 2
        return w, terms


def contour(rounds: DirectedRounds, plan: ContourPlan) -> Contour | None:
    """The sums over all rounds along a planned contour; None where they would cost too much."""
    if not math.isfinite(plan.last):
        return None
    last = math.ceil(plan.last)
    step = 2 * math.pi / plan.period
    parts = _parts(rounds, plan, step * last)
    allowed = min(_WORK + _WORK_PER_SETTING * len(rounds.q), _MOST_WORK)
    if parts is None or (last + 1) * sum(float(part.nodes.sum()) for part in parts) > allowed:
        return None
    cumulant = np.zeros(last + 1, dtype=np.complex128)
    error, fall, further = np.zeros(last + 1), 0.0, 0.0
    for part in parts:
        counts, tilted = part.rounds.counts, tilt(part.losses(), plan.c)
        values = log_mgf_along(tilted, step, last + 1)
        wrong = part.relative_error(tilted, part.log_error)[:, None]
        wrong = wrong + tilted.rounding[:, None] * step * np.arange(last + 1)
        wrong /= np.exp(np.maximum(values.real - tilted.log_mgf[:, None], -600.0))
        cumulant += counts @ values
        # |Π(φ + e) − Πφ| ≤ Π(|φ| + |e|) − Π|φ| for the errors e of the characteristic functions φ.
        error += counts @ np.log1p(wrong) + len(rounds.q) * EPS * (counts @ np.abs(values))
        fall += part.rounds.sum(decay(tilted, step * last))
        further += part.cumulant_bound(tilt(tilted.losses, plan.further))
    further += len(rounds.q) * EPS * abs(further)
    return Contour(plan, cumulant, error, fall, further, rounds.number * math.exp(plan.log_tail))


def cumulant_bound(rounds: DirectedRounds, plan: ContourPlan) -> float:
    """A bound above K(c), where c is that of the plan; ∞ where it would cost too much."""
    parts = _parts(rounds, replace(plan, further=plan.c), 0.0)
    if parts is None:
        return math.inf
    bound = sum(part.cumulant_bound(tilt(part.losses(), plan.c)) for part in parts)
    return bound + len(rounds.q) * EPS * abs(bound)


@dataclass(frozen=True)
class _Part:
    """Some of the settings, with nodes that are enough for them and what bounds their error."""

    rounds: DirectedRounds
    low: Vector  # [p, 1] ends of the window
    high: Vector
    nodes: Vector  # [p] numbers of nodes
    log_rho: Vector  # [p] as in `_log_errors`, and its bounds along the contour
    log_error: Vector
    further_error: Vector  # the same at the further tilt, where Im w = 0

    def losses(self) -> Losses:
        """The losses at the nodes."""
        rounds, nodes = self.rounds, int(self.nodes.max())
        return losses(rounds.q, rounds.z, (self.low, self.high), rounds.direction, nodes)

    def relative_error(self, tilted: Tilted, log_error: Vector) -> Vector:
        """[p] bounds on the errors of E[e^{wL}] over E[e^{cL}], with the rounding of the latter."""
        error = log_error - 2 * int(self.nodes.max()) * self.log_rho - tilted.log_mgf
        rounding = tilted.rounding * abs(tilted.order)
        return 3 * np.exp(np.minimum(error, 600.0)) + tilted.losses.beyond_cut + rounding

    def cumulant_bound(self, tilted: Tilted) -> float:
        """A bound above the sum of the cumulants at the further tilt."""
        values = tilted.log_mgf + self.relative_error(tilted, self.further_error)
        return self.rounds.sum(values + len(values) * EPS * np.abs(values))


def _parts(rounds: DirectedRounds, plan: ContourPlan, stop: float) -> list[_Part] | None:
    """Enough nodes for a contour up to imaginary part `stop`, in parts that need about as many.

    None where they would be too many.
    """
    rough = rounds.survey(plan.log_tail)
    low, high = support(rough, (plan.c, plan.further))
    log_mgf = tilt(rough, plan.c).log_mgf
    semiaxes = np.minimum(np.array(_HEIGHTS)[:, None], LARGEST_ANGLE * rounds.z)
    log_rho, error = _log_errors(rounds, low, high, plan.c, stop, semiaxes)
    needed = (error - log_mgf + CERTAINTY + math.log(rounds.number)) / (2 * log_rho)
    best = needed.argmin(axis=0), np.arange(len(low))
    if not needed[best].max() < _SIZES[-1]:
        return None
    nodes = np.array(_SIZES, np.float64)[np.searchsorted(_SIZES, needed[best], side="right")]
    _, further = _log_errors(rounds, low, high, plan.further, 0.0, semiaxes[best][None])
    order, found = np.argsort(nodes, kind="stable"), []
    arrays = (low, high, nodes, log_rho[best], error[best], further[0])
    for start in range(0, len(order), _PART):
        at = order[start : start + _PART]
        some = DirectedRounds(rounds.q[at], rounds.z[at], rounds.counts[at], rounds.direction)
        found.append(_Part(some, *(array[at] for array in arrays)))
    return found


def _log_errors(
    rounds: DirectedRounds, low: Vector, high: Vector, c: float, t: float, semiaxes: Vector
) -> tuple[Vector, Vector]:
    """[k, p] log ρ of ellipses, and bounds on log(error of n nodes)·ρ^{2n} up to Im w = t.

    Let F be the tilted density, but for 1/E[A^s], times e^{itL}, and |F| ≤ m on the ellipse around
    a window whose semiaxes add up to ρ times half of it. Then the error of n Gauss–Legendre nodes
    is at most half·(64/15)·m·ρ^{2 − 2n}/(1 − ρ^{−2}) (Trefethen 2013, Theorem 19.3).

    At u + id, with θ = d/z, |A(u + id)| ≤ A(u) and 0 ≤ arg A(u + id) ≤ arg(1 − p + p·e^{iθ}),
    which grows with p and so with u. Where s < 0, |A(u + id)/A(u)| counts, which falls with p up
    to ½, and grows from there on.
    """
    log_f, present = _peaks(rounds, low, high, c)
    coin = np.minimum(present, 0.5)
    half = (high - low)[:, 0] / 2
    log_rho = np.arcsinh(semiaxes / half)
    error = semiaxes**2 / 2 + 2 * log_rho - np.log(-np.expm1(-2 * log_rho))
    error += np.log(half) + math.log(64 / 15)
    for k, semiaxis in enumerate(semiaxes):
        angle, exponent = (semiaxis / rounds.z)[:, None], log_f
        if t > 0.0:
            exponent = exponent + t * turned(present, 1 - present, angle)[1]
        if rounds.direction is Direction.ADD:
            exponent = exponent - c * turned(coin, 1 - coin, angle)[0]
        error[k] += exponent.max(axis=1)
    return log_rho, error


def _peaks(rounds: DirectedRounds, low: Vector, high: Vector, c: float) -> tuple[Vector, Vector]:
    """[p, k] bounds between neighbours of k + 1 outputs, for an ellipse up to the largest height.

    They are on log f, f being the tilted density but for 1/E[A^s], and on the probability that the
    user took part. (log f)'' ≥ −1 + min(s, 0)·p(1 − p)/z² bounds log f between two outputs.
    """
    q, z = rounds.q[:, None], rounds.z[:, None]
    half = (high - low) / 2
    beyond = np.hypot(half, np.minimum(_HEIGHTS[-1], LARGEST_ANGLE * z)) - half
    y = (low - beyond) + (high - low + 2 * beyond) * np.linspace(0.0, 1.0, _INTERVALS + 1)
    log_r = (y - 0.5 / z) / z
    log_ratio = log_likelihood_ratio(log_r, q)
    log_f = power(rounds.direction, c) * log_ratio - y * y / 2 - math.log(2 * math.pi) / 2
    present = np.exp(np.log(q) + log_r - log_ratio)[:, 1:]
    bend: float | Vector = 1.0
    if rounds.direction is Direction.ADD:
        coin = np.minimum(present, 0.5)
        bend = 1.0 + c / z**2 * coin * (1 - coin)
    spacing = y[:, 1:2] - y[:, :1]
    return np.maximum(log_f[:, 1:], log_f[:, :-1]) + bend * spacing**2 / 8, present
