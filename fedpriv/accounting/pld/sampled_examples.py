"""The pair of a round that samples examples, when a user with up to k of them is added or removed.

A user has k places, some of them empty, and each place is drawn by its own coin. Given the others'
contributions, a round with the user releases N(v_A, σ²·I), where A is the set of places drawn, and
without the user N(0, σ²·I); v_A is the sum of their clipped gradients, so ‖v_A‖ ≤ |A|·S. By joint
convexity the round is no worse than the worst pair

    P_v = Σ_A π(A)·N(v_A, σ²·I)   against   Q = N(0, σ²·I),   |A| ~ Bin(k, q),

and in both directions, at every ε, that is the pair in one dimension with v_A = |A|·S: in units of
S, with z = σ/S,

    P = Σ_j Bin(k, q)(j)·N(j, z²)   against   Q = N(0, z²)

(Choquette-Choo et al. 2024, arXiv 2310.15526, Corollary 4.7, on mixtures of Gaussians; Charles et
al. 2024, arXiv 2407.07737, on this sampling). Proof: in units of σ, with
r_A = e^{⟨v_A, x⟩ − |v_A|²/2} for x ~ N(0, I), both hockey-stick divergences are E[φ(r)],
φ(r) = f(Σ_A π(A)·r_A), for the convex functions f(s) = (s − e^ε)_+ and f(s) = (1 − e^ε·s)_+. They
depend on the Gram matrix G of the v_A alone, and integration by parts (Price 1958) gives their
derivatives: ½·E[r_A²·φ_AA] by G_AA and E[r_A·r_B·φ_AB] by G_AB, where φ_AB = π(A)·π(B)·f'' ≥ 0
(smooth approximations of f have this sign). So E[φ] increases with every entry of G. And
G_AB = ⟨v_A, v_B⟩ ≤ |A|·|B|/z², which is the Gram matrix of the pair in one dimension: on the line
from one to the other all entries increase, and the matrix stays positive semidefinite. A user whose
k gradients are equal and of norm S has this pair, so it is the pair of some round. Since it is the
worst at every ε, it is so under adaptive composition (Zhu, Dong & Wang 2022, Theorem 10).

The same argument orders mixtures: moving a component away from 0, towards j' ≥ j, costs no less. So
a larger q (by thinning, Bin(k, q') has Bin(k, q) below it) or k costs no less. And a few likely
counts j bound all of them: for an upper bound rare counts move outward, to the next likely count or
to k, and for a lower bound inward, to 0 or to the last likely count.

The loss is L(x) = log Σ_j w_j·e^{(2jx − j²)/(2z²)}, which increases in x. If the user is removed, x
is drawn from P; if it is added, x is drawn from Q and the loss is −L.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr, ndtri

from fedpriv.accounting.pld.lattice import SKETCH_NODES, DiscreteLaw, GaussianPair, Sketch
from fedpriv.accounting.round_counts import Vector

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(6)
_LEAST_TAIL = 1e-290
_LEAST_CUT = 1e-140  # of counts; its square does not underflow
_MOST_COUNTS = 1024  # different counts; more are grouped in runs
_MOST_STEPS = 60  # of Newton's method; a few suffice from its starting points
_ROUGH = 513  # points of the curve for its starting points


def gaussian_masses(low: Vector, high: Vector, mean: float, z: float) -> Vector:
    """Return the probabilities of [low, high] under N(mean, z²), with a small relative error.

    Narrow intervals are integrated by Gauss's rule with 6 nodes, whose error is below 1e-15 if the
    density changes by less than a factor of √e; differences of distribution functions would cancel.
    """
    low, high = (np.clip(end, mean - 1e3 * z, mean + 1e3 * z) for end in (low, high))
    middle, half = ((low + high) / 2 - mean) / z, (high - low) / (2 * z)
    is_narrow = 2 * half * np.maximum(np.abs(middle), 1.0) < 0.5
    masses = np.empty(is_narrow.shape)
    nodes = middle[is_narrow] + half[is_narrow] * _NODES[:, None]
    density = (_WEIGHTS[:, None] * np.exp(-(nodes**2) / 2)).sum(axis=0) / math.sqrt(2 * math.pi)
    masses[is_narrow] = half[is_narrow] * density
    a, b = ((end[~is_narrow] - mean) / z for end in (low, high))
    masses[~is_narrow] = np.where(a > 0, ndtr(-a) - ndtr(-b), ndtr(b) - ndtr(a))
    return masses


@lru_cache(maxsize=64)
def binomial(trials: int, q: float) -> Vector:
    """Return Bin(k, q)(j) for j = 0, …, k and q in (0, 1): [k + 1], to some k roundings.

    Ratios of neighbours are multiplied from the mode on, so that nothing cancels.
    """
    mode = min(trials, int((trials + 1) * q))
    j = np.arange(trials)
    with np.errstate(under="ignore"):
        up = (trials - j) / (j + 1) * (q / (1 - q))  # from j to j + 1
        above = np.cumprod(up[mode:])
        below = np.cumprod(1 / up[:mode][::-1])[::-1]
        weights = np.concatenate([below, [1.0], above])
        weights /= weights.sum()
    weights.flags.writeable = False
    return weights


@dataclass(frozen=True, eq=False)
class MixtureLaw:
    """The loss of Σ_j w_j·N(j, z²) against N(0, z²), for counts j ≥ 0, at least one positive."""

    counts: Vector  # [n] ascending
    weights: Vector  # [n] positive, with the sum 1
    z: float

    @property
    def resolution(self) -> float:
        """The weight of positive counts, which bounds the difference between P and Q."""
        return float(self.weights[self.counts > 0].sum())

    @property
    def least(self) -> float:
        """Infimum of the loss: log w_0."""
        if self.counts[0] > 0:
            return -math.inf
        rest = float(self.weights[1:].sum())
        return math.log1p(-rest) if rest < 0.5 else math.log(self.weights[0])

    def loss(self, x: Vector) -> Vector:
        """Return L(x), with a small relative error for tiny w_j, j > 0."""
        exponent = self._exponents(x)
        loss = _log_sum(exponent + np.log(self.weights)[:, None])[0]
        near = np.flatnonzero(np.abs(loss) < 0.5)
        loss[near] = np.log1p(self.weights @ np.expm1(exponent[:, near]))
        return loss

    def sample_at(self, loss: Vector) -> Vector:
        """Return the inverse of the loss: x with L(x) = loss, or −∞ if there is none.

        Newton's method solves log Σ_{j>0} w_j·e^{(2jx − j²)/(2z²)} = log(e^loss − w_0), whose left
        side is convex with slopes of at least 1/z².
        """
        gap = -np.expm1(np.minimum(self.least - loss, 0.0))
        x, exists = np.full(loss.shape, -np.inf), gap > 0
        if not exists.any():
            return x
        goal = loss[exists] + np.log(gap[exists])
        rough = np.linspace(*self.outputs(_LEAST_TAIL), _ROUGH)
        value, slope = self._log_positive(rough)
        low, high = (np.minimum(goal - value[0], 0.0), np.maximum(goal - value[-1], 0.0))
        root = np.interp(goal, value, rough) + low / slope[0] + high / slope[-1]
        for _ in range(_MOST_STEPS):
            value, slope = self._log_positive(root)
            residual = goal - value
            root = root + residual / slope
            if (np.abs(residual) <= 1e-14 * (1.0 + np.abs(goal))).all():
                break
        x[exists] = root
        return x

    def span(self, tail: float) -> tuple[float, float]:
        """Return losses with at most `tail` of P and of Q on either side of them."""
        low, high = self.loss(np.array(self.outputs(tail)))
        return float(low), float(high)

    def centre(self, step: float) -> float:
        """Return the centre that `LossLaw` defines, by a coarse search and fixed-point steps.

        An interval with nearly all of the mass merges into the same point for any ends, so the
        result is exact if nearly all mass is in one.
        """
        first, last = self.loss(np.array([-8.0, 4.0]) * self.z)
        candidates: Vector = np.linspace(first, last, 33)
        below = self._merged_around(candidates, step) < candidates
        centre = candidates[max(1, int(np.argmax(below))) - 1 :][:1]
        for _ in range(3):
            centre = self._merged_around(centre, step)
        return float(centre[0])

    def masses(self, edges: Vector) -> Vector:
        """Return masses below, between and above the losses `edges`: [3, edges + 1]."""
        ends = np.concatenate([[-np.inf], self.sample_at(edges), [np.inf]])
        return self._masses_of(ends[:-1], ends[1:])

    def sketch(self, tail: float) -> Sketch:
        """Return the loss at evenly spaced outputs."""
        x = np.linspace(*self.outputs(tail), SKETCH_NODES)
        middle = float(self.loss(np.zeros(1))[0])
        return Sketch(-(x**2) / (2 * self.z**2), self.loss(x), middle)

    def _exponents(self, x: Vector) -> Vector:
        """Return (2jx − j²)/(2z²): [n, outputs]."""
        j = self.counts[:, None]
        return np.asarray(j * (x - j / 2) / self.z**2)

    def _log_positive(self, x: Vector) -> tuple[Vector, Vector]:
        """Return value and slope of log Σ_{j>0} w_j·e^{(2jx − j²)/(2z²)}."""
        positive = self.counts > 0
        exponent = self._exponents(x)[positive] + np.log(self.weights[positive])[:, None]
        value, share = _log_sum(exponent)
        return value, self.counts[positive] @ share / self.z**2

    def outputs(self, tail: float) -> tuple[float, float]:
        """Return an interval of x with at most `tail` of P and of Q on either side of it.

        Each of n components of P above 0 has at most tail/(2n) above the upper end. The interval
        contains the first of them, even if all are rarer than the tail.
        """
        tail = max(tail, _LEAST_TAIL)
        absent = -float(ndtri(min(0.5, tail / 2)))
        positive = self.counts > 0
        counts, share = self.counts[positive], tail / (2 * positive.sum() * self.weights[positive])
        ends = counts[share < 1.0] - self.z * ndtri(np.maximum(share[share < 1.0], _LEAST_TAIL))
        first = float(counts[0])
        return -self.z * absent, max(self.z * absent, float(ends.max(initial=first)))

    def _masses_of(self, low: Vector, high: Vector) -> Vector:
        """Return masses of intervals of x under P and Q, and P − Q: [3, intervals]."""
        absent = gaussian_masses(low, high, 0.0, self.z)
        p, gap = np.zeros(low.shape), np.zeros(low.shape)
        for count, weight in zip(self.counts, self.weights, strict=True):
            present = gaussian_masses(low, high, float(count), self.z)
            p += weight * present
            gap += weight * (present - absent)
        return np.array([p, absent, gap])

    def _merged_around(self, c: Vector, step: float) -> Vector:
        """Return the loss of the merged outputs of [c − h, c + h]; c if these have no mass."""
        low, high = (self.sample_at(c + side * step) for side in (-1, 1))
        merged = DiscreteLaw(*self._masses_of(low, high))
        return np.where((merged.p > 0) & (merged.q > 0), merged.loss, c)


def _log_sum(exponent: Vector) -> tuple[Vector, Vector]:
    """Return log Σ_n e^exponent of exponents [n, outputs], and the share of each term."""
    largest = exponent.max(axis=0)
    share = np.exp(exponent - largest)
    total = share.sum(axis=0)
    return largest + np.log(total), share / total


@dataclass(frozen=True)
class PoissonPair(GaussianPair):
    """A round on a Poisson sample of users, or of examples, when one user is added or removed.

    The user has up to k examples. q is the sampling probability of an example, and z is relative to
    the clipping norm of one. For k = 1 examples are users.
    """

    examples: int = 1  # k

    @property
    def shift(self) -> float:
        """Distance k by which a user moves the sum if all its examples are drawn."""
        return float(self.examples)

    def at_most_as_bad(self, tail: float) -> MixtureLaw:
        """Return a loss with few counts j: rare counts, and those of a run, move inward."""
        return self._laws(tail)[0]

    def at_least_as_bad(self, tail: float) -> MixtureLaw:
        """Return a loss with few counts j: rare counts, and those of a run, move outward."""
        return self._laws(tail)[1]

    def _laws(self, tail: float) -> tuple[MixtureLaw, MixtureLaw]:
        # If losses down to log w_0 are common, e^ε times the cut matters, so the cut is squared.
        weights, cut = self.law.weights, max(tail, _LEAST_CUT) ** 2
        first = int(np.searchsorted(np.cumsum(weights), cut, side="right"))
        last = len(weights) - 1 - int(np.searchsorted(np.cumsum(weights[::-1]), cut, side="right"))
        last = max(last, min(1, len(weights) - 1))  # a lower bound needs a positive count
        if (first, last) == (0, len(weights) - 1) and len(weights) <= _MOST_COUNTS:
            return self.law, self.law
        # Counts of a run differ by far less than the standard deviation of all counts.
        starts = np.arange(first, last + 1, -(-(last + 1 - first) // _MOST_COUNTS))
        ends, runs = np.append(starts[1:] - 1, last), np.add.reduceat(weights[: last + 1], starts)
        under, over = float(weights[:first].sum()), float(weights[last + 1 :].sum())
        counts = self.law.counts[starts]
        below = _mixture([0.0, *counts], [under, *runs[:-1], runs[-1] + over], self.z)
        counts = self.law.counts[ends]
        above = _mixture([*counts, self.law.counts[-1]], [runs[0] + under, *runs[1:], over], self.z)
        return below, above

    @cached_property
    def law(self) -> MixtureLaw:
        """The exact loss."""
        k, q = self.examples, self.q
        if q == 1.0:
            return MixtureLaw(np.array([float(k)]), np.ones(1), self.z)
        return _mixture(np.arange(k + 1.0), binomial(k, q), self.z)


def _mixture(counts: ArrayLike, weights: ArrayLike, z: float) -> MixtureLaw:
    """Return the law of the counts with positive weights."""
    j, w = np.asarray(counts, np.float64), np.asarray(weights, np.float64)
    return MixtureLaw(j[w > 0], w[w > 0], z)
