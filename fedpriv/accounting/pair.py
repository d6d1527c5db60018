"""The seam between what happened and the composition by FFT: the privacy loss of a pair.

A pair of distributions (P, Q) compares what an event shows on two neighbours; its loss is
L = log(dP/dQ). Composition needs it on a lattice, as a loss that is at least as bad and as one that
is at most as bad. A pair that has a `LossLaw` gets both from `atoms.dominating` and
`atoms.dominated`, so all that a new one has to know is the mass between given losses.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np

from fedpriv.accounting import atoms
from fedpriv.accounting.atoms import LossAtoms
from fedpriv.accounting.lattice import Lattice, LossLaw
from fedpriv.accounting.rounds import Direction, Vector, folded
from fedpriv.accounting.rounds import grouped as groups_of

LEAST_NOISE, MOST_NOISE = 0.05, 1e6
"""Noise per sensitivity that is computed with."""
LEAST_PROBABILITY = 1e-12
"""Sampling probability that is computed with."""


@dataclass(frozen=True)
class Sketch:
    """A privacy loss at a few nodes, good enough to make plans.

    Attributes:
        log_mass: [nodes] logarithms of probabilities, which sum to about 1.
        loss: [nodes] finite losses, with the sign of the direction.
        centre: the loss near which most mass is, or nearly nothing happens, with that sign.
    """

    log_mass: Vector
    loss: Vector
    centre: float


class LossPair(Protocol):
    """The privacy loss of one pair (P, Q); equal ones are equal and hash alike.

    Compositions of `dominating` losses are at least as bad as those of the pair, and compositions
    of `dominated` ones are at most as bad. What events a pair bounds, and from which side, is the
    business of whoever chooses it.
    """

    @property
    def noiseless(self) -> bool:
        """Whether something is released without noise, so that no finite ε holds."""

    @property
    def setting(self) -> tuple[float, float]:
        """q and z; with a larger q and a smaller z a pair is no better."""

    def at(self, q: float, z: float) -> "LossPair":
        """The pair of the same kind at another setting."""

    def sketch(self, tail: float, direction: Direction) -> Sketch:
        """The loss, roughly, without losses that are rarer than `tail`."""

    def dominating(self, lattice: Lattice, direction: Direction) -> LossAtoms:
        """A loss on the lattice that is at least as bad; its masses and `infinite` sum to 1."""

    def dominated(self, lattice: Lattice, direction: Direction) -> LossAtoms:
        """A loss on the lattice that is at most as bad; no mass at all if nothing is known."""


Pairs = Mapping[LossPair, int]
"""Number of events by the pair whose loss they have."""


@dataclass(frozen=True)
class GaussianPair(ABC):
    """The pair of one release with Gaussian noise, which depends on q and z alone.

    * z below 0.05 has a loss at least as bad that is infinite, and one at most as bad at z = 0.05.
    * Sampling probabilities below 1e-12 and z above 10⁶ are rounded to these for a loss at least
      as bad, and have no mass in one at most as bad.

    Attributes:
        q: how likely a user is to be in the cohort, in (0, 1].
        z: noise_stddev per sensitivity, ≥ 0.
    """

    q: float
    z: float

    @abstractmethod
    def law(self, q: float, z: float) -> LossLaw:
        """The loss at q ≥ 1e-12 and 0.05 ≤ z ≤ 10⁶; it grows in q and falls in z."""

    @abstractmethod
    def rough(self, q: float, z: float, tail: float, direction: Direction) -> Sketch:
        """The same, roughly, without losses that are rarer than `tail`."""

    @property
    def noiseless(self) -> bool:
        """Whether z is 0."""
        return self.z == 0.0

    @property
    def setting(self) -> tuple[float, float]:
        """q and z."""
        return self.q, self.z

    def at(self, q: float, z: float) -> Self:
        """The pair of the same kind at another setting."""
        return replace(self, q=q, z=z)

    def sketch(self, tail: float, direction: Direction) -> Sketch:
        """The loss, roughly, without losses that are rarer than `tail`."""
        return self.rough(*self._computed, tail, direction)

    def dominating(self, lattice: Lattice, direction: Direction) -> LossAtoms:
        """A loss on the lattice that is at least as bad."""
        above = atoms.dominating(self.law(*self._computed), lattice, direction)
        return above if self.z >= LEAST_NOISE else replace(above, infinite=1.0)

    def dominated(self, lattice: Lattice, direction: Direction) -> LossAtoms:
        """A loss on the lattice that is at most as bad."""
        below = atoms.dominated(self.law(*self._computed), lattice, direction)
        inside = self.q >= LEAST_PROBABILITY and self.z <= MOST_NOISE
        return below if inside else replace(below, mass=np.zeros_like(below.mass))

    @property
    def _computed(self) -> tuple[float, float]:
        return max(self.q, LEAST_PROBABILITY), min(max(self.z, LEAST_NOISE), MOST_NOISE)


def grouped(pairs: Pairs, most: int) -> tuple[Pairs, Pairs]:
    """Pairs in at most so many groups of each kind: at least, and at most as bad; see `rounds`."""
    kinds: dict[LossPair, dict[tuple[float, float], int]] = {}
    for pair, count in pairs.items():
        kinds.setdefault(pair.at(1.0, 1.0), {})[pair.setting] = count
    above: dict[LossPair, int] = {}
    below: dict[LossPair, int] = {}
    for kind, each in kinds.items():
        settings = folded(each) if isinstance(kind, GaussianPair) else each
        for found, moved in zip((above, below), groups_of(settings, most), strict=True):
            found.update((kind.at(q, z), count) for (q, z), count in moved.items())
    return above, below
