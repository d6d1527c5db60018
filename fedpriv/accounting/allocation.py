"""Random allocation: every user is in exactly k rounds of a pass of n, drawn afresh each pass.

For k = 1 the pass is dominated by the pair P = (1/n)·Σ_i N(e_i, z²I) against Q = N(0, z²I), which
is also one of its own (Feldman & Shenfeld 2025, arXiv 2502.08202, Theorem 3.1, for adaptive rounds
and both directions). Its likelihood ratio X under Q is the mean of those of n Gaussian rounds, and

    δ(ε) = E_Q[(X − e^ε)₊] if the user is removed,    δ(ε) = E_Q[(1 − e^ε·X)₊] if it is added.

Both are convex in X, so a pair is at least as bad as another one if its X is above in the convex
order. That is what `ratio` computes from either side. (That such losses can be computed by adding
up ratios is due to Feldman & Shenfeld 2026, arXiv 2602.17284.)

For k > 1, shuffle the rounds in public and cut them into k blocks. One round drawn from each block
is a uniform draw of k rounds, and given the blocks the user is in one round of each, independently.
So k passes with k = 1, one over each block, dominate the pass, by joint convexity. This is
Lemma 3.2 of the paper of 2025, but for blocks that are as equal as can be instead of ⌊n/k⌋ long.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.special import logsumexp

from fedpriv.accounting import atoms
from fedpriv.accounting.atoms import LossAtoms
from fedpriv.accounting.discrete import DiscreteLaw
from fedpriv.accounting.lattice import Lattice
from fedpriv.accounting.pair import LEAST_NOISE, MOST_NOISE, Pairs, Sketch
from fedpriv.accounting.poisson_pair import PoissonPair
from fedpriv.accounting.ratio import RatioSum, Shape, add, merge, one_round, spread
from fedpriv.accounting.ratio_edges import Step, coarse, steps_to
from fedpriv.accounting.rounds import Direction

_TAILS = (1e-40, 1e-120, 1e-290)
"""Probabilities of losses that are cut off; points are dense down to their square roots."""
_LOST = 1e-90
"""More than the probability of all that may underflow."""
_MOST_ROUNDS = 1 << 30
_NODES = 1024
"""Nodes of a sketch: groups of more than a few points would hide how fast tails fall."""


def allocation_pairs(rounds: int, participations: int, noise_multiplier: float) -> Pairs:
    """Pairs that together dominate one pass when a user is added or removed, adaptive or not.

    * k = 1: the pair of the pass, so that its bounds from below are those of the pass, too.
    * k = n: n Gaussian rounds, of which the same is true.
    * Otherwise a pair for each of k blocks of ⌊n/k⌋ or ⌈n/k⌉ rounds. Their bounds from below say
      nothing of the pass.

    >>> sorted(allocation_pairs(11, 3, 1.0).items(), key=lambda item: item[0].rounds)
    [(AllocationPair(rounds=3, z=1.0), 1), (AllocationPair(rounds=4, z=1.0), 2)]

    Args:
        rounds: n ≥ 1, the rounds of the pass.
        participations: k in [1, n], the rounds that each user is in.
        noise_multiplier: z ≥ 0 of each round.

    Returns:
        How many losses there are of each pair.
    """
    size, larger = divmod(rounds, participations)
    counts = {size: participations - larger, size + 1: larger}
    return {_block(n, noise_multiplier): count for n, count in counts.items() if count}


def _block(rounds: int, z: float) -> "AllocationPair | PoissonPair":
    return AllocationPair(rounds, z) if rounds > 1 else PoissonPair(1.0, z)


@dataclass(frozen=True)
class AllocationPair:
    """The pair of a pass of n rounds with every user in exactly one of them.

    * z below 0.05 has a loss at least as bad that is infinite, and one at most as bad at z = 0.05.
    * z above 10⁶ and n above 2³⁰ are rounded to these for a loss at least as bad, and have no mass
      in one at most as bad. (More rounds are no worse: the mean of n ratios is that of the means of
      all but one of them.)
    * A loss at least as bad is infinite with probability 10⁻⁹⁰ or more.

    Attributes:
        rounds: n ≥ 1.
        z: noise_stddev per sensitivity, ≥ 0.
    """

    rounds: int
    z: float

    @property
    def noiseless(self) -> bool:
        """Whether z is 0."""
        return self.z == 0.0

    @property
    def setting(self) -> tuple[float, float]:
        """1 and z."""
        return 1.0, self.z

    def at(self, q: float, z: float) -> "AllocationPair":  # noqa: ARG002
        """The pair of the same kind with other noise."""
        return replace(self, z=z)

    def sketch(self, tail: float, direction: Direction) -> Sketch:
        """The loss, roughly, without losses that are rarer than `tail`."""
        ratios = self._ratios(tail, spread)
        value, mass = coarse(ratios, _NODES)
        loss = np.log(value / ratios.rounds)
        low, high = _law(ratios).span(tail)
        # One node beyond, as ε lies below the first loss that is rarer than δ.
        first = max(0, int((loss < low).sum()) - 1)
        seen = slice(first, int((loss <= high).sum()) + 1)
        log_mass = (np.log(mass) + (loss if direction is Direction.REMOVE else 0.0))[seen]
        centre = float(loss[int(np.searchsorted(np.cumsum(mass), 0.5))])
        return Sketch(log_mass - logsumexp(log_mass), direction * loss[seen], direction * centre)

    def dominating(self, lattice: Lattice, direction: Direction) -> LossAtoms:
        """A loss on the lattice that is at least as bad as that of the pass."""
        ratios = self._ratios(lattice.tail, spread)
        law = _law(ratios)
        above = atoms.dominating(law, lattice, direction)
        if direction is Direction.REMOVE:
            unseen = ratios.infinite / ratios.rounds
        else:
            unseen = float(ratios.mass[ratios.mass * ratios.value == 0.0].sum())
        above = _scaled(replace(above, infinite=above.infinite + unseen), ratios, 1)
        infinite = above.infinite + _LOST if self.z >= LEAST_NOISE else 1.0
        return replace(above, infinite=infinite)

    def dominated(self, lattice: Lattice, direction: Direction) -> LossAtoms:
        """A loss on the lattice that is at most as bad as that of the pass."""
        ratios = self._ratios(lattice.tail, merge)
        below = _scaled(atoms.dominated(_law(ratios), lattice, direction), ratios, -1)
        inside = self.z <= MOST_NOISE and self.rounds <= _MOST_ROUNDS
        return below if inside else replace(below, mass=np.zeros_like(below.mass))

    def _ratios(self, tail: float, shape: Shape) -> RatioSum:
        z = min(max(self.z, LEAST_NOISE), MOST_NOISE)
        cut = next((each for each in _TAILS if math.sqrt(each) <= tail), _TAILS[-1])
        return _sum_of_ratios(min(self.rounds, _MOST_ROUNDS), z, cut, shape)


@lru_cache(maxsize=64)
def _sum_of_ratios(rounds: int, z: float, tail: float, shape: Shape) -> RatioSum:
    """n·X, spread or merged."""
    first, *steps = _steps(rounds, z, tail)
    ratios = one_round(z, first.edges, shape)
    for step in steps:
        other = ratios if step.other is None else one_round(z, step.other, shape)
        ratios = add(ratios, other, step.edges, shape)
    return ratios


@lru_cache(maxsize=64)
def _steps(rounds: int, z: float, tail: float) -> list[Step]:
    return steps_to(rounds, z, tail)


def _law(ratios: RatioSum) -> DiscreteLaw:
    """The loss log X where it is finite."""
    p = ratios.mass * ratios.value / ratios.rounds
    gap = ratios.mass * (ratios.value - ratios.rounds) / ratios.rounds
    some = ratios.mass * ratios.value > 0.0
    return DiscreteLaw(p[some], ratios.mass[some], gap[some])


def _scaled(found: LossAtoms, ratios: RatioSum, sign: int) -> LossAtoms:
    """The atoms with the errors of the ratios on the safe side.

    If X is off by a factor of e^{±v}, then so are its masses under P, and the loss is off by v.
    """
    factor = math.exp(sign * (ratios.mass_error + ratios.value_error))
    rounding = found.rounding + ratios.value_error
    infinite = min(1.0, found.infinite * factor)
    return replace(found, mass=found.mass * factor, rounding=rounding, infinite=infinite)
