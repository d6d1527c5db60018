"""Intervals of Poisson-sampled rounds by (q, z), from the composition of their privacy losses."""

from fedpriv.accounting import pld
from fedpriv.accounting.pld.dominating_pairs import PoissonPair
from fedpriv.accounting.pld.lattice import Pairs
from fedpriv.accounting.round_counts import Rounds


def poisson_pairs(rounds: Rounds) -> Pairs:
    return {PoissonPair(q, z): count for (q, z), count in rounds.items()}


def epsilon_interval(rounds: Rounds, delta: float) -> tuple[float, float]:
    return pld.epsilon_interval(poisson_pairs(rounds), delta)


def delta_interval(rounds: Rounds, epsilon: float) -> tuple[float, float]:
    return pld.delta_interval(poisson_pairs(rounds), epsilon)
