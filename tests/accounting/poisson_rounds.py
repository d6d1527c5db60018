"""Intervals of Poisson-sampled rounds by (q, z): by composing their losses, and the tightest."""

from fedpriv.accounting import accountants, pld
from fedpriv.accounting.accountants import poisson_pairs
from fedpriv.accounting.round_counts import Rounds


def epsilon_interval(rounds: Rounds, delta: float) -> tuple[float, float]:
    return pld.epsilon_interval(poisson_pairs(rounds), delta)


def delta_interval(rounds: Rounds, epsilon: float) -> tuple[float, float]:
    return pld.delta_interval(poisson_pairs(rounds), epsilon)


def tight_epsilon(rounds: Rounds, delta: float) -> tuple[float, float]:
    return accountants.tightest_epsilon(poisson_pairs(rounds), delta)


def tight_delta(rounds: Rounds, epsilon: float) -> tuple[float, float]:
    return accountants.tightest_delta(poisson_pairs(rounds), epsilon)
