"""The pair of a Poisson-subsampled Gaussian round under add-or-remove-one; q = 1 is a Gaussian."""

from dataclasses import dataclass

import numpy as np
from scipy.special import logsumexp

from fedpriv.accounting.lattice import Cells
from fedpriv.accounting.loss import (
    cells,
    merged_loss,
    privacy_loss,
    sample_at,
    sample_range,
)
from fedpriv.accounting.pair import LEAST_NOISE, MOST_NOISE, GaussianPair, Sketch
from fedpriv.accounting.rounds import Direction, Vector

__all__ = ["LEAST_NOISE", "MOST_NOISE", "NODES", "PoissonLaw", "PoissonPair"]

NODES = 256
"""Nodes of a sketch."""


@dataclass(frozen=True)
class PoissonLaw:
    """The loss of (1 − q)·N(0, z²) + q·N(1, z²) against N(0, z²).

    Attributes:
        q: sampling probability in [1e-12, 1].
        z: noise per sensitivity in [0.05, 1e6].
    """

    q: float
    z: float

    @property
    def resolution(self) -> float:
        """Error relative to that of r: its slope is q·r/(1 − q + q·r) ≤ 1 − e^{−|L|} + q."""
        return self.q

    def span(self, tail: float) -> tuple[float, float]:
        """Losses that P and Q pass on either side with probability at most `tail`."""
        ends = np.array(sample_range(self.q, self.z, tail))
        low, high = privacy_loss(ends, self.q, self.z)
        return float(low), float(high)

    def centre(self, step: float) -> float:
        """The loss c such that outputs with a loss in [c − step, c + step] have c together.

        Sections find c roughly, and fixed-point steps exactly where it matters: a cell that holds
        nearly all mass merges into the same point wherever its ends are.
        """
        low, high = privacy_loss(np.array([-8 * self.z, 4 * self.z]), self.q, self.z)
        candidates: Vector = np.linspace(low, high, 33)
        below = self._merged_around(candidates, step) < candidates
        centre = candidates[max(1, int(np.argmax(below))) - 1 :][:1]
        for _ in range(3):
            centre = self._merged_around(centre, step)
        return float(centre[0])

    def cells(self, edges: Vector) -> Cells:
        """Masses below the first of the increasing losses, between neighbours, above the last."""
        x, _ = sample_at(edges, self.q, self.z)
        ends = np.concatenate([[-np.inf], x, [np.inf]])
        absent, present = cells(ends, 0.0, self.z), cells(ends, 1.0, self.z)
        p = (1 - self.q) * absent + self.q * present
        return Cells(p, absent, self.q * (present - absent))

    def _merged_around(self, c: Vector, step: float) -> Vector:
        """What the cells [c − h, c + h] merge into; c itself where it cannot be told."""
        low, high = (sample_at(c + side * step, self.q, self.z)[0] for side in (-1, 1))
        merged = merged_loss(low, high, self.q, self.z)
        return np.where(np.isnan(merged), c, merged)


@dataclass(frozen=True)
class PoissonPair(GaussianPair):
    """A Poisson-subsampled Gaussian round when one user is added or removed.

    Its pair dominates the round and is one of its own, so bounds of its loss are bounds of the
    round (Zhu, Dong & Wang 2022, Theorem 11).
    """

    def law(self, q: float, z: float) -> PoissonLaw:
        """The loss of (1 − q)·N(0, z²) + q·N(1, z²) against N(0, z²)."""
        return PoissonLaw(q, z)

    def rough(self, q: float, z: float, tail: float, direction: Direction) -> Sketch:
        """The loss at evenly spaced outputs."""
        x = np.linspace(*sample_range(q, z, tail), NODES)
        removed = privacy_loss(x, q, z)
        density = -(x**2) / (2 * z**2) + (removed if direction is Direction.REMOVE else 0.0)
        centre = float(privacy_loss(np.zeros(1), q, z)[0])
        return Sketch(density - logsumexp(density), direction * removed, direction * centre)
