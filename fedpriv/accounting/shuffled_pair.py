"""A lower bound of what a pass over shuffled batches costs: the largest sum of all batches.

Let every user but one contribute −S, and that one +S. If it is missing, or contributes −S instead,
the sum of its batch falls by a sensitivity. In units of that, and measured from what a batch of the
others would show, the n releases of a pass have the means (b + 1)·e_t against b·e_t with a random
batch t: b = 1 where a user is added or removed, and leaves its place empty, b = 0 where it is
replaced. Their maximum y has the distribution functions

    Φ((y − b − 1)/z)·Φ(y/z)^{n − 1}   and   Φ((y − b)/z)·Φ(y/z)^{n − 1},

which, as those of a function of the releases, cannot cost more than the pass (Chua et al. 2024,
arXiv 2403.17673; for many passes, arXiv 2411.04205).
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.special import log_ndtr, ndtri_exp

from fedpriv.accounting import atoms
from fedpriv.accounting.atoms import LossAtoms
from fedpriv.accounting.discrete import DiscreteLaw
from fedpriv.accounting.lattice import Lattice
from fedpriv.accounting.pair import LEAST_NOISE, MOST_NOISE, Sketch
from fedpriv.accounting.rounds import Direction, Vector

_CELLS = 1 << 13
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(6)
_LOG_TAIL = -100.0
"""Logarithm of the probability of the outputs below the first cell, about."""
_RANGE = 14.0
"""How many standard deviations beyond the largest mean the last cell ends."""


@dataclass(frozen=True)
class LargestBatchPair:
    """The largest sum of the batches of a pass, with every user but one at −S.

    What `dominating` returns is at least as bad as this pair, so it says nothing of a pass.

    Attributes:
        batches: n ≥ 1.
        z: noise_stddev per sensitivity, ≥ 0; below 0.05 it is taken to be that.
        base: b, 1 where a user is added or removed, 0 where it is replaced.
    """

    batches: int
    z: float
    base: float

    @property
    def noiseless(self) -> bool:
        """Whether z is 0."""
        return self.z == 0.0

    @property
    def setting(self) -> tuple[float, float]:
        """1 and z."""
        return 1.0, self.z

    def at(self, q: float, z: float) -> "LargestBatchPair":  # noqa: ARG002
        """The pair of the same kind with other noise."""
        return replace(self, z=z)

    def sketch(self, tail: float, direction: Direction) -> Sketch:
        """The loss, roughly, without losses that are rarer than `tail`."""
        return self._law.sketch(tail, direction)

    def dominating(self, lattice: Lattice, direction: Direction) -> LossAtoms:
        """A loss on the lattice that is at least as bad as that of the largest sum."""
        return atoms.dominating(self._law, lattice, direction)

    def dominated(self, lattice: Lattice, direction: Direction) -> LossAtoms:
        """A loss on the lattice that is at most as bad as that of the pass."""
        below = atoms.dominated(self._law, lattice, direction)
        return below if self.z <= MOST_NOISE else replace(below, mass=np.zeros_like(below.mass))

    @property
    def _law(self) -> DiscreteLaw:
        return _law(self.batches, min(max(self.z, LEAST_NOISE), MOST_NOISE), self.base)


@lru_cache(maxsize=64)
def _law(batches: int, z: float, base: float) -> DiscreteLaw:
    """The largest sum, told to within one of some thousand cells."""
    low = z * float(ndtri_exp(_LOG_TAIL / batches))
    high = base + 1 + _RANGE * z
    edges = np.linspace(low, high, _CELLS + 1)
    p, q = (_masses(edges, batches, mean, z) for mean in (base + 1, base))
    some = (p > 0) & (q > 0)
    return DiscreteLaw(p[some], q[some], (p - q)[some])


def _masses(edges: Vector, batches: int, mean: float, z: float) -> Vector:
    """[cells] probabilities of the maximum of N(mean, z²) and n − 1 times N(0, z²).

    Cells are narrow, and the density is a sum of two positive terms, so that Gauss's rule leaves
    no error that counts.
    """
    half = (edges[1:] - edges[:-1]) / 2
    y = (edges[1:] + edges[:-1]) / 2 + half * _NODES[:, None]
    a, b = (y - mean) / z, y / z
    own = -(a**2) / 2 + (batches - 1) * log_ndtr(b)
    density = np.exp(own)
    if batches > 1:
        others = -(b**2) / 2 + (batches - 2) * log_ndtr(b) + log_ndtr(a) + math.log(batches - 1)
        density += np.exp(others)
    total = (_WEIGHTS[:, None] * density).sum(axis=0)
    return np.asarray(half * total / (z * math.sqrt(2 * math.pi)))
