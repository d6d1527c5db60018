"""The pair of a Poisson-subsampled Gaussian round when one user is replaced.

In both worlds the others contribute the same random sum and the user tosses the same coin, so for
updates v and v' of norm at most S = 1 the round compares mixtures over the others' sum of

    P_v = (1 − q)·N(0, σ²) + q·N(v, σ²)   against   P_v',

and it is no worse than the worst such pair (joint convexity). That is v = −v' of norm 1, at every
ε: in units of σ, with r_v = e^{⟨v, x⟩ − |v|²/2} for x ~ N(0, I),

    δ(ε) = E[φ(r_v, r_v')],   φ(s, t) = (q·s − q·e^ε·t − (e^ε − 1)·(1 − q))_+,

which depends on the Gram matrix G of (v, v') alone. Integration by parts (Price 1958) gives its
derivatives: ½·E[r_v²·φ_ss] ≥ 0 by G_11, likewise by G_22, and E[r_v·r_v'·φ_st] ≤ 0 by G_12, as φ is
a convex function of q·s − q·e^ε·t (smooth ones that approach it have these signs, too). So δ grows
when both norms grow to 1 and then when ⟨v, v'⟩ falls to −1, and G stays positive semidefinite all
the way. The worst pair is a round's own where all others contribute nothing, so it is tight, and as
it is the worst one at every ε it is so under adaptive composition (Zhu, Dong & Wang 2022, Theorem
10; Lebeda et al. 2024 show what goes wrong without one).
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp

from fedpriv.accounting.lattice import Cells
from fedpriv.accounting.loss import cells, privacy_loss, sample_range
from fedpriv.accounting.pair import GaussianPair, Sketch
from fedpriv.accounting.rounds import Direction, Vector

_NODES = 256


@dataclass(frozen=True)
class ReplaceLaw:
    """The loss of (1 − q)·N(0, z²) + q·N(½, z²) against (1 − q)·N(0, z²) + q·N(−½, z²).

    It is odd and increasing in the output, so the two directions agree. Outputs here are in units
    of the clipping norm, half the sensitivity, where the noise is 2z.

    Attributes:
        q: sampling probability in [1e-12, 1].
        z: noise per sensitivity in [0.05, 1e6].
    """

    q: float
    z: float

    @property
    def resolution(self) -> float:
        """Error relative to that of the densities: q·(r₊ + r₋)/(1 − q + q·r₊) for positive L."""
        return self.q

    def span(self, tail: float) -> tuple[float, float]:
        """Losses that P and Q pass on either side with probability at most `tail`."""
        _, high = sample_range(self.q, self._noise, tail)
        largest = float(self.loss(np.array([high]))[0])
        return -largest, largest

    def centre(self, step: float) -> float:  # noqa: ARG002
        """0, where outputs of opposite losses merge."""
        return 0.0

    def cells(self, edges: Vector) -> Cells:
        """Masses below the first of the increasing losses, between neighbours, above the last."""
        ends = np.concatenate([[-np.inf], self.sample_at(edges), [np.inf]])
        absent, present, other = (cells(ends, mean, self._noise) for mean in (0.0, 1.0, -1.0))
        common = (1 - self.q) * absent
        gap = self.q * (present - other)
        return Cells(common + self.q * present, common + self.q * other, gap)

    def loss(self, x: Vector) -> Vector:
        """Loss of outputs, in clipping norms."""
        return privacy_loss(x, self.q, self._noise) - privacy_loss(-x, self.q, self._noise)

    def sample_at(self, loss: Vector) -> Vector:
        """The inverse of the loss: sinh(x/σ² − L/2) = (1 − q)/q·e^{1/(2σ²)}·sinh(L/2)."""
        variance = self._noise**2
        factor = (1 - self.q) / self.q * math.exp(0.5 / variance)
        return np.asarray(variance * (loss / 2 + np.arcsinh(factor * np.sinh(loss / 2))))

    @property
    def _noise(self) -> float:
        return 2 * self.z


@dataclass(frozen=True)
class ReplacePair(GaussianPair):
    """A Poisson-subsampled Gaussian round when one user is replaced by another.

    Its pair dominates the round, as the head of this module proves, and is one of its own.
    """

    def law(self, q: float, z: float) -> ReplaceLaw:
        """The loss of updates that are opposite, of the size of the clipping norm."""
        return ReplaceLaw(q, z)

    def rough(self, q: float, z: float, tail: float, direction: Direction) -> Sketch:  # noqa: ARG002
        """The loss at evenly spaced outputs; the same in both directions."""
        noise = 2 * z
        _, high = sample_range(q, noise, tail)
        x = np.linspace(-high, high, _NODES)
        density = -(x**2) / (2 * noise**2) + privacy_loss(x, q, noise)
        return Sketch(density - logsumexp(density), ReplaceLaw(q, z).loss(x), 0.0)
