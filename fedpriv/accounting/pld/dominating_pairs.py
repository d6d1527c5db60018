"""The pairs of distributions of rounds with Gaussian noise, for each way of sampling users.

With x in units of the sensitivity and r(x) = exp((2x − 1)/(2z²)), a Poisson-sampled round when a
user is added or removed is dominated by P = (1 − q)·N(0, z²) + q·N(1, z²) against Q = N(0, z²)
(Zhu, Dong & Wang 2022, Theorem 11), which is the pair of some round. Its loss is
L(x) = log(1 − q + q·r(x)). If the user is removed, x is drawn from P; if it is added, x is drawn
from Q and the loss is −L.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import erf

from fedpriv.accounting.pld.lattice import SKETCH_NODES, GaussianPair, LossLaw, Sketch, sketched
from fedpriv.accounting.pld.sampled_examples import PoissonPair, gaussian_masses
from fedpriv.accounting.round_counts import Vector


@dataclass(frozen=True)
class SymmetricPair(GaussianPair, LossLaw):
    """A pair whose loss has the same law in both directions; the pair is that law."""

    @property
    def resolution(self) -> float:
        """Approximate relative difference between the masses of a loss near 0, at most q."""
        return self.q

    def centre(self, step: float) -> float:  # noqa: ARG002
        """Return 0, the loss of merged outputs of opposite losses."""
        return 0.0

    def at_least_as_bad(self, tail: float) -> LossLaw:  # noqa: ARG002
        """Return the pair's exact loss."""
        return self

    at_most_as_bad = at_least_as_bad


@dataclass(frozen=True)
class ReplacePair(SymmetricPair):
    """A Poisson-sampled round when one user is replaced by another; the pair of some round.

    The others' random sum and the user's coin have the same law for both neighbours. So for updates
    v and v' of norm at most S = 1 the round compares mixtures over the others' sum of

        P_v = (1 − q)·N(0, σ²) + q·N(v, σ²)   against   P_v',

    and it is no worse than the worst such pair (joint convexity). That is v = −v' of norm 1, at
    every ε: in units of σ, with r_v = e^{⟨v, x⟩ − |v|²/2} for x ~ N(0, I),

        δ(ε) = E[φ(r_v, r_v')],   φ(s, t) = (q·s − q·e^ε·t − (e^ε − 1)·(1 − q))_+,

    which depends on the Gram matrix G of (v, v') alone. Integration by parts (Price 1958) gives its
    derivatives: ½·E[r_v²·φ_ss] ≥ 0 by G_11, likewise by G_22, and E[r_v·r_v'·φ_st] ≤ 0 by G_12, as
    φ is a convex function of q·s − q·e^ε·t (smooth approximations of it have these signs, too). So
    δ increases while both norms increase to 1, and then while ⟨v, v'⟩ decreases to −1, and G stays
    positive semidefinite throughout. Since this pair is the worst at every ε, it is so under
    adaptive composition (Zhu, Dong & Wang 2022, Theorem 10; Lebeda et al. 2024 show the errors that
    are possible without such a pair).

    The loss of (1 − q)·N(0, z²) + q·N(½, z²) against (1 − q)·N(0, z²) + q·N(−½, z²) is odd and
    increasing in the output, so the two directions agree. Outputs here are in units of the clipping
    norm, half the sensitivity, in which the noise is 2z. The error of a loss, relative to that of
    the densities, is q·(r₊ + r₋)/(1 − q + q·r₊) for positive L.
    """

    def span(self, tail: float) -> tuple[float, float]:
        """Return losses with at most `tail` of P and of Q on either side of them."""
        _, high = PoissonPair(self.q, 2 * self.z).law.outputs(tail)
        largest = float(self.loss(np.array([high]))[0])
        return -largest, largest

    def masses(self, edges: Vector) -> Vector:
        """Return masses below, between and above the losses `edges`: [3, edges + 1]."""
        ends = np.concatenate([[-np.inf], self.sample_at(edges), [np.inf]])
        without, with_user, with_other = (
            gaussian_masses(ends[:-1], ends[1:], mean, 2 * self.z) for mean in (0.0, 1.0, -1.0)
        )
        p, q = ((1 - self.q) * without + self.q * shifted for shifted in (with_user, with_other))
        return np.array([p, q, self.q * (with_user - with_other)])

    def sketch(self, tail: float) -> Sketch:
        """Return the loss at evenly spaced outputs."""
        _, high = PoissonPair(self.q, 2 * self.z).law.outputs(tail)
        return sketched(self, self.loss(np.linspace(-high, high, SKETCH_NODES)), 0.0)

    def loss(self, x: Vector) -> Vector:
        """Return the loss of outputs in clipping norms."""
        law = PoissonPair(self.q, 2 * self.z).law
        return law.loss(x) - law.loss(-x)

    def sample_at(self, loss: Vector) -> Vector:
        """Return the inverse of the loss: sinh(x/σ² − L/2) = (1 − q)/q·e^{1/(2σ²)}·sinh(L/2)."""
        variance = (2 * self.z) ** 2
        factor = (1 - self.q) / self.q * math.exp(0.5 / variance)
        return np.asarray(variance * (loss / 2 + np.arcsinh(factor * np.sinh(loss / 2))))


@dataclass(frozen=True)
class FixedSizePair(SymmetricPair):
    """A round on m of N users, drawn without replacement, when one is replaced; q is m/N.

    Fix the other m − 1 users of a cohort with the user in question, and the substitute that
    completes the cohort if the user is not in it. Given these, and γ = m/N, the round compares
    (1 − γ)·R + γ·P with (1 − γ)·R + γ·P', where any two of the three Gaussians are at most one
    sensitivity, 2S, apart. By advanced joint convexity (Balle, Barthe & Gaboardi 2018, Theorem 2),
    for α' = 1 + γ·(α − 1) and β = α'/α, its hockey-stick divergence at α' ≥ 1 is at most

        γ·((1 − β)·H_α(P‖R) + β·H_α(P‖P')) ≤ γ·H_α(N(1, z²)‖N(0, z²)),

    which is the divergence of a Poisson sample when a user is removed. The relation is symmetric,
    so at ε < 0 the curve is at most the mirror image 1 − e^ε + e^ε·δ(−ε) of that at −ε. The loss
    here has both halves and the rest at 0. It is an upper bound under composition (Zhu, Dong & Wang
    2022, Theorem 10), but not the loss of any round, which has one half. Rounds in which all others
    and the new user contribute −S, and the old one +S, have the Poisson pair, a lower bound.

    An output with loss −l < 0 has e^l times the probability under Q that it has under P, so the
    masses under P and Q of mirrored intervals are exchanged.
    """

    def span(self, tail: float) -> tuple[float, float]:
        """Return losses with at most `tail` of P and of Q on either side of them."""
        _, high = PoissonPair(self.q, self.z).law.span(tail)
        return -high, high

    def masses(self, edges: Vector) -> Vector:
        """Return masses below, between and above the losses `edges`: [3, edges + 1]."""
        p, q, gap = self._positive(-edges[::-1])[:, ::-1]
        masses: Vector = self._positive(edges) + np.array([q, p, -gap])
        # P(L = 0) = 1 − P(L > 0) − Q(L > 0) = (1 − q)·(2Φ(1/(2z)) − 1) ≥ 0.
        at_zero = (1 - self.q) * float(erf(math.sqrt(0.125) / self.z))
        masses[:2, np.searchsorted(edges, 0.0)] += at_zero
        return masses

    def sketch(self, tail: float) -> Sketch:
        """Return the loss at evenly spaced outputs and at 0."""
        law = PoissonPair(self.q, self.z).law
        x = np.linspace(0.5, max(law.outputs(tail)[1], 0.5 + self.z), SKETCH_NODES // 2)[1:]
        loss = law.loss(x)
        return sketched(self, np.concatenate([-loss[::-1], loss]), 0.0)

    def _positive(self, edges: Vector) -> Vector:
        """Return the masses of positive losses: [3, edges + 1]."""
        return PoissonPair(self.q, self.z).law.masses(np.append(0.0, np.maximum(edges, 0.0)))[:, 1:]
