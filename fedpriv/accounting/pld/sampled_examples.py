"""The pair of a round that samples examples, when a user with up to k of them is added or removed.

A user has k places, some of them empty, and each place is drawn by its own coin. Given what the
others contribute, a round with the user releases N(v_A, σ²·I) where A is the set of places drawn,
and without the user N(0, σ²·I); v_A is the sum of their clipped gradients, so ‖v_A‖ ≤ |A|·S. By
joint convexity it is no worse than the worst pair

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
(smooth f that approach it have this sign). So E[φ] grows with every entry of G. And
G_AB = ⟨v_A, v_B⟩ ≤ |A|·|B|/z², which is the Gram matrix of the pair in one dimension: on the line
from one to the other all entries grow, and the matrix stays positive semidefinite. A user whose k
gradients are equal and of norm S has this pair, so it is one of a round's own; as it is the worst
at every ε, it is so under adaptive composition (Zhu, Dong & Wang 2022, Theorem 10).

The same argument orders mixtures: whatever moves a component away from 0, towards j' ≥ j, costs no
less. So a larger q (by thinning, Bin(k, q') has Bin(k, q) below it) or k costs no less. And the few
counts j that matter bound all of them: rare ones move outward for an upper bound, to the next count
that is kept or to k, and inward for a lower one, to 0 or the last one that is kept.

The loss is L(x) = log Σ_j w_j·e^{(2jx − j²)/(2z²)}, which increases in x. Removing the user draws x
from P; adding it draws x from Q and has −L.
"""

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from scipy.special import ndtri

from fedpriv.accounting.pld.dominating_pairs import PoissonPair, gaussian_masses
from fedpriv.accounting.pld.lattice import (
    SKETCH_NODES,
    GaussianPair,
    LossLaw,
    Sketch,
    merging_point,
)
from fedpriv.accounting.round_counts import Vector

_LEAST_TAIL = 1e-290
_LEAST_CUT = 1e-140  # of counts, whose square is still a number
_MOST_COUNTS = 1024  # different ones; more are put together in runs
_MOST_STEPS = 60  # of Newton's method; from its starting points a few are enough
_ROUGH = 513  # points of the curve from which it starts


@lru_cache(maxsize=64)
def binomial(trials: int, q: float) -> Vector:
    """Bin(k, q)(j) for j = 0, …, k: [k + 1], right to some k roundings; q in (0, 1).

    By ratios of neighbours from the mode on, so that nothing cancels; what underflows is 0.
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
class MixtureLaw(LossLaw):
    """The loss of Σ_j w_j·N(j, z²) against N(0, z²), for some counts j ≥ 0, not 0 alone."""

    counts: Vector  # [n] ascending
    weights: Vector  # [n] positive, of sum 1
    z: float

    @property
    def resolution(self) -> float:
        """P and Q differ by at most the share that is not at 0."""
        return float(self.weights[self.counts > 0].sum())

    @property
    def least(self) -> float:
        """The infimum of the loss: log w_0."""
        if self.counts[0] > 0:
            return -math.inf
        rest = float(self.weights[1:].sum())
        return math.log1p(-rest) if rest < 0.5 else math.log(self.weights[0])

    def loss(self, x: Vector) -> Vector:
        """L(x), accurate relative to its size for tiny w_j, j > 0."""
        exponent = self._exponents(x)
        found = _log_sum(exponent + np.log(self.weights)[:, None])[0]
        near = np.flatnonzero(np.abs(found) < 0.5)
        found[near] = np.log1p(self.weights @ np.expm1(exponent[:, near]))
        return found

    def sample_at(self, loss: Vector) -> Vector:
        """The inverse of the loss: x with L(x) = loss, −∞ where there is none.

        It solves log Σ_{j>0} w_j·e^{(2jx − j²)/(2z²)} = log(e^loss − w_0), whose left side is
        convex with slopes from 1/z² on, by Newton's method.
        """
        gap = -np.expm1(np.minimum(self.least - loss, 0.0))
        x, some = np.full(loss.shape, -np.inf), gap > 0
        if not some.any():
            return x
        goal = loss[some] + np.log(gap[some])
        rough = np.linspace(*self._range(_LEAST_TAIL), _ROUGH)
        value, slope = self._rise(rough)
        low, high = (np.minimum(goal - value[0], 0.0), np.maximum(goal - value[-1], 0.0))
        at = np.interp(goal, value, rough) + low / slope[0] + high / slope[-1]
        for _ in range(_MOST_STEPS):
            value, slope = self._rise(at)
            missing = goal - value
            at = at + missing / slope
            if (np.abs(missing) <= 1e-14 * (1.0 + np.abs(goal))).all():
                break
        x[some] = at
        return x

    def span(self, tail: float) -> tuple[float, float]:
        """Losses that P and Q pass on either side with probability at most `tail`."""
        low, high = self.loss(np.array(self._range(tail)))
        return float(low), float(high)

    def centre(self, step: float) -> float:
        """As `merging_point` finds it."""
        ends = self.loss(np.array([-8.0, 4.0]) * self.z)
        return merging_point(ends, lambda c: self._merged_around(c, step))

    def masses(self, edges: Vector) -> Vector:
        """[3, edges + 1] below the first of the [edges] losses, between them, and above."""
        ends = np.concatenate([[-np.inf], self.sample_at(edges), [np.inf]])
        return self._masses_of(ends[:-1], ends[1:])

    def sketch(self, tail: float) -> Sketch:
        """The loss at evenly spaced outputs."""
        x = np.linspace(*self._range(tail), SKETCH_NODES)
        middle = float(self.loss(np.zeros(1))[0])
        return Sketch(-(x**2) / (2 * self.z**2), self.loss(x), middle)

    def _exponents(self, x: Vector) -> Vector:
        """[n, outputs] (2jx − j²)/(2z²)."""
        j = self.counts[:, None]
        return np.asarray(j * (x - j / 2) / self.z**2)

    def _rise(self, x: Vector) -> tuple[Vector, Vector]:
        """Value and slope of log Σ_{j>0} w_j·e^{(2jx − j²)/(2z²)}."""
        some = self.counts > 0
        exponent = self._exponents(x)[some] + np.log(self.weights[some])[:, None]
        value, share = _log_sum(exponent)
        return value, self.counts[some] @ share / self.z**2

    def _range(self, tail: float) -> tuple[float, float]:
        """An interval of x that P and Q both leave with probability at most `tail` on either side.

        P passes its end with at most tail/n by each component; one above 0 is inside, even where
        all of these are rarer than the tail.
        """
        tail = max(tail, _LEAST_TAIL)
        absent = -float(ndtri(min(0.5, tail / 2)))
        share = tail / (2 * len(self.weights) * self.weights)
        some = share < 1.0
        ends = self.counts[some] - self.z * ndtri(np.maximum(share[some], _LEAST_TAIL))
        first = float(self.counts[self.counts > 0][0])
        return -self.z * absent, max(self.z * absent, float(ends.max(initial=first)))

    def _masses_of(self, low: Vector, high: Vector) -> Vector:
        """[3, intervals] masses under P and Q of intervals of x, and P − Q."""
        absent = gaussian_masses(low, high, 0.0, self.z)
        p, gap = np.zeros(low.shape), np.zeros(low.shape)
        for count, weight in zip(self.counts, self.weights, strict=True):
            present = gaussian_masses(low, high, float(count), self.z)
            p += weight * present
            gap += weight * (present - absent)
        return np.array([p, absent, gap])

    def _merged_around(self, c: Vector, step: float) -> Vector:
        """What the outputs of [c − h, c + h] merge into; c itself where it cannot be told."""
        low, high = (self.sample_at(c + side * step) for side in (-1, 1))
        p, q, gap = self._masses_of(low, high)
        filled = (p > 0) & (q > 0)
        # Where the loss is far from 0 nothing cancels.
        far = np.log(np.where(filled, p, 1.0)) - np.log(np.where(filled, q, 1.0))
        near = filled & (np.abs(far) < 0.5)
        merged = np.where(
            near, np.log1p(np.divide(gap, q, out=np.zeros(gap.shape), where=near)), far
        )
        return np.where(filled, merged, c)


def _log_sum(exponent: Vector) -> tuple[Vector, Vector]:
    """log Σ_n e^exponent of [n, outputs], and the share [n, outputs] of each."""
    largest = exponent.max(axis=0)
    share = np.exp(exponent - largest)
    total = share.sum(axis=0)
    return largest + np.log(total), share / total


@dataclass(frozen=True)
class ExamplesPair(GaussianPair):
    """A round on Poisson-sampled examples, when a user with up to k of them is added or removed.

    q is the chance of each example, and z relative to the clipping norm of one.
    """

    examples: int = field(kw_only=True)  # k ≥ 1

    @property
    def shift(self) -> float:
        """A user whose examples are all drawn moves the sum by k."""
        return float(self.examples)

    @property
    def resolution(self) -> float:
        """The masses of a loss near 0 differ by at most about the chance that any is drawn."""
        return self._law.resolution

    def at_most_as_bad(self, tail: float) -> LossLaw:
        """Rare counts j, and those of a run, are moved inward, so that few are left."""
        return self._laws(tail)[0]

    def at_least_as_bad(self, tail: float) -> LossLaw:
        """Rare counts j, and those of a run, are moved outward, so that few are left."""
        return self._laws(tail)[1]

    def _laws(self, tail: float) -> tuple[LossLaw, LossLaw]:
        # Where a loss of −log w_0 or less would be common, e^ε times the cut matters: its square.
        weights, cut = self._law.weights, max(tail, _LEAST_CUT) ** 2
        first = int(np.searchsorted(np.cumsum(weights), cut, side="right"))
        last = len(weights) - 1 - int(np.searchsorted(np.cumsum(weights[::-1]), cut, side="right"))
        last = max(last, 1)  # a count above 0 tells something, however rare
        if (first, last) == (0, len(weights) - 1) and len(weights) <= _MOST_COUNTS:
            return self, self
        # A run of counts is told from its neighbours by far less than they spread.
        starts = np.arange(first, last + 1, -(-(last + 1 - first) // _MOST_COUNTS))
        ends, kept = np.append(starts[1:] - 1, last), np.add.reduceat(weights[: last + 1], starts)
        under, over = float(weights[:first].sum()), float(weights[last + 1 :].sum())
        counts = self._law.counts[starts]
        below = _mixture([0.0, *counts], [under, *kept[:-1], kept[-1] + over], self.z)
        counts = self._law.counts[ends]
        above = _mixture(
            [*counts, self._law.counts[-1]], [kept[0] + under, *kept[1:], over], self.z
        )
        return below, above

    def span(self, tail: float) -> tuple[float, float]:
        """Losses that P and Q pass on either side with probability at most `tail`."""
        return self._law.span(tail)

    def centre(self, step: float) -> float:
        """The loss that outputs around it merge into."""
        return self._law.centre(step)

    def masses(self, edges: Vector) -> Vector:
        """[3, edges + 1] below the first of the [edges] losses, between them, and above."""
        return self._law.masses(edges)

    def sketch(self, tail: float) -> Sketch:
        """The loss at evenly spaced outputs."""
        return self._law.sketch(tail)

    @cached_property
    def _law(self) -> MixtureLaw:
        k, q = self.examples, self.q
        if q == 1.0:
            return MixtureLaw(np.array([float(k)]), np.ones(1), self.z)
        return _mixture(np.arange(k + 1.0), binomial(k, q), self.z)


def _mixture(
    counts: "Vector | list[float]", weights: "Vector | list[float]", z: float
) -> MixtureLaw:
    """The law of counts, without those of no weight."""
    j, w = np.asarray(counts, np.float64), np.asarray(weights, np.float64)
    return MixtureLaw(j[w > 0], w[w > 0], z)


def examples_pair(examples: int, q: float, z: float) -> PoissonPair | ExamplesPair:
    """The pair of a round with up to k examples of a user; that of a plain one where it is one."""
    if q == 1.0:
        return PoissonPair(1.0, z / examples)
    return PoissonPair(q, z) if examples == 1 else ExamplesPair(q, z, examples=examples)
