"""The pair of a Gaussian round on m of N users, drawn without replacement, when one is replaced.

Draw the m − 1 others of the cohort that has the user, and the one that is there in its place in the
cohort that has not: given both, and γ = m/N, the round compares (1 − γ)·R + γ·P with
(1 − γ)·R + γ·P', three Gaussians of which any two lie at most one sensitivity, 2S, apart. By
advanced joint convexity (Balle, Barthe & Gaboardi 2018, Theorem 2), for α' = 1 + γ·(α − 1) and
β = α'/α, its hockey-stick divergence at α' ≥ 1 is at most

    γ·((1 − β)·H_α(P‖R) + β·H_α(P‖P')) ≤ γ·H_α(N(1, z²)‖N(0, z²)),

which is that of (1 − γ)·N(0, z²) + γ·N(1, z²) against N(0, z²), of removing a user from a Poisson
sample (Zhu, Dong & Wang 2022, Theorem 11). Neighbours are so in either order, so at ε < 0 the curve
is at most the mirror image 1 − e^ε + e^ε·δ(−ε) of that at −ε. The loss here has both halves; it is
an upper bound under composition (Theorem 10 there), but no round's own: one round has the one half
or the other. Rounds in which all others and the new user contribute −S, and the old one +S, have
the Poisson pair, which bounds from below.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import erf, logsumexp

from fedpriv.accounting.lattice import Cells
from fedpriv.accounting.loss import privacy_loss, sample_range
from fedpriv.accounting.pair import GaussianPair, Sketch
from fedpriv.accounting.poisson_pair import PoissonLaw
from fedpriv.accounting.rounds import Direction, Vector

_NODES = 128


@dataclass(frozen=True)
class FixedSizeLaw:
    """A loss with the positive half of `PoissonLaw`, its mirror image, and the rest at 0.

    An output with loss −l < 0 has e^l times the probability under Q that it has under P, so the
    masses under P and Q of mirrored cells are exchanged. What is at 0 is
    1 − P(L > 0) − Q(L > 0) = (1 − q)·(2Φ(1/(2z)) − 1) ≥ 0.

    Attributes:
        q: m/N in [1e-12, 1].
        z: noise per sensitivity in [0.05, 1e6].
    """

    q: float
    z: float

    @property
    def resolution(self) -> float:
        """That of the Poisson pair."""
        return self.q

    @property
    def at_zero(self) -> float:
        """Probability of the loss 0."""
        return (1 - self.q) * float(erf(math.sqrt(0.125) / self.z))

    def span(self, tail: float) -> tuple[float, float]:
        """Losses that P and Q pass on either side with probability at most `tail`."""
        _, high = self._half.span(tail)
        return -high, high

    def centre(self, step: float) -> float:  # noqa: ARG002
        """0, where outputs of opposite losses merge."""
        return 0.0

    def cells(self, edges: Vector) -> Cells:
        """Masses below the first of the increasing losses, between neighbours, above the last."""
        right = self._positive(edges)
        left = self._positive(-edges[::-1])
        p, q = right.p + left.q[::-1], right.q + left.p[::-1]
        zero = int(np.searchsorted(edges, 0.0))
        p[zero] += self.at_zero
        q[zero] += self.at_zero
        return Cells(p, q, right.gap - left.gap[::-1])

    def _positive(self, edges: Vector) -> Cells:
        """[edges + 1] masses of the positive losses."""
        half = self._half.cells(np.concatenate([np.zeros(1), np.maximum(edges, 0.0)]))
        return Cells(half.p[1:], half.q[1:], half.gap[1:])

    @property
    def _half(self) -> PoissonLaw:
        return PoissonLaw(self.q, self.z)


@dataclass(frozen=True)
class FixedSizePair(GaussianPair):
    """A Gaussian round on m of N users when one is replaced, from above; here q is m/N."""

    def law(self, q: float, z: float) -> FixedSizeLaw:
        """The symmetric loss of the worst round in either order."""
        return FixedSizeLaw(q, z)

    def rough(self, q: float, z: float, tail: float, direction: Direction) -> Sketch:  # noqa: ARG002
        """The loss at evenly spaced outputs and at 0; the same in both directions."""
        _, high = sample_range(q, z, tail)
        width = max(high - 0.5, z) / _NODES
        x: Vector = 0.5 + width * (np.arange(_NODES, dtype=np.float64) + 0.5)
        loss = privacy_loss(x, q, z)
        density = -(x**2) / (2 * z**2) + math.log(width / (z * math.sqrt(2 * math.pi)))
        zero = FixedSizeLaw(q, z).at_zero
        at_zero = math.log(zero) if zero > 0 else -math.inf
        log_mass = np.concatenate([density + loss, density, [at_zero]])
        losses = np.concatenate([loss, -loss, np.zeros(1)])
        return Sketch(log_mass - logsumexp(log_mass), losses, 0.0)
