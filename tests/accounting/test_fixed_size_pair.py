"""Cohorts of a fixed size: the symmetric pair, and that no population costs more."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from fedpriv.accounting.pld import delta_interval as delta_interval_of
from fedpriv.accounting.pld import epsilon_interval as epsilon_interval_of
from fedpriv.accounting.pld.dominating_pairs import FixedSizePair
from fedpriv.accounting.pld.sampled_examples import PoissonPair
from fedpriv.accounting.round_counts import Direction
from tests.accounting.pair_conformance import PairConformance
from tests.accounting.test_poisson_pair import poisson_delta

# Where the user, the one that replaces it and somebody else lie, in units of the sensitivity.
TRIPLES = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.5, -0.5, 0.0), (1.0, 0.3, 0.0), (0.2, -0.7, 0.1)]


def fixed_size_delta(q: float, z: float, epsilon: float) -> float:
    """That of removing from a Poisson sample at ε ≥ 0, and the mirror image at ε < 0."""
    if epsilon >= 0:
        return poisson_delta(q, z, epsilon, Direction.REMOVE)
    mirrored = poisson_delta(q, z, -epsilon, Direction.REMOVE)
    return -math.expm1(epsilon) + math.exp(epsilon) * mirrored


class TestFixedSizePair(PairConformance):
    def pair(self, q: float, z: float) -> FixedSizePair:
        return FixedSizePair(q, z)

    def exact_delta(self, q: float, z: float, epsilon: float, direction: Direction) -> float:
        assert direction in Direction  # both agree
        return fixed_size_delta(q, z, epsilon)


def densities(
    triple: tuple[float, float, float], q: float, z: float, x: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    user, new, somebody = (norm.pdf(x, at, z) for at in triple)
    return (1 - q) * somebody + q * user, (1 - q) * somebody + q * new


def divergence(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    return float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum())


@pytest.mark.parametrize("triple", TRIPLES)
@pytest.mark.parametrize(("q", "z"), [(0.01, 0.5), (0.3, 0.6), (0.9, 2.0)])
def test_no_placement_costs_more(triple: tuple[float, float, float], q: float, z: float) -> None:
    x = np.linspace(-2 - 12 * z, 2 + 12 * z, 60_001)
    p, other = densities(triple, q, z, x)
    for epsilon in (-2.0, -0.3, -0.01, 0.0, 0.01, 0.3, 2.0):
        cost = divergence(p, other, epsilon) * (x[1] - x[0])
        assert cost <= fixed_size_delta(q, z, epsilon) + 1e-7


def test_one_placement_costs_as_much_at_positive_epsilon_and_another_at_negative() -> None:
    x = np.linspace(-9.0, 10.0, 60_001)
    for triple, epsilon in ((TRIPLES[0], 0.3), (TRIPLES[1], -0.3)):
        cost = divergence(*densities(triple, 0.2, 0.7, x), epsilon) * (x[1] - x[0])
        assert cost == pytest.approx(fixed_size_delta(0.2, 0.7, epsilon), abs=1e-7)


@pytest.mark.parametrize("placements", list(itertools.product(TRIPLES[:3], repeat=2)))
def test_two_rounds_with_any_placements_cost_no_more(
    placements: tuple[tuple[float, float, float], tuple[float, float, float]],
) -> None:
    q, z = 0.3, 0.8
    x = np.linspace(-7.0, 8.0, 1201)
    step = x[1] - x[0]
    (p, o), (p_next, o_next) = (densities(triple, q, z, x) for triple in placements)
    for epsilon in (0.1, 0.8):
        _, above = delta_interval_of({FixedSizePair(q, z): 2}, epsilon)
        cost = divergence(np.outer(p, p_next), np.outer(o, o_next), epsilon) * step**2
        assert cost <= above + 1e-7


def test_every_population_of_four_stays_below_and_one_reaches_the_bound() -> None:
    # From first principles: cohorts of 2 of 4 users with updates ±S, noise 1.3·S.
    x = np.linspace(-15.0, 15.0, 30_001)
    below, above = delta_interval_of({FixedSizePair(0.5, 0.65): 1}, 0.5)
    worst = 0.0
    for others in itertools.product((-1, 1), repeat=3):
        for user, new in ((-1, 1), (1, -1)):
            p, p_new = (
                sum(norm.pdf(x, sum(pair), 1.3) for pair in itertools.combinations((*others, u), 2))
                / 6
                for u in (user, new)
            )
            worst = max(worst, divergence(p, p_new, 0.5) * (x[1] - x[0]))
    assert below - 1e-6 <= worst <= above + 1e-6


@pytest.mark.parametrize(("q", "z"), [(1e-9, 0.05), (0.01, 1.0), (0.5, 100.0), (1.0, 1.0)])
def test_the_rest_at_zero_is_not_negative(q: float, z: float) -> None:
    pair = FixedSizePair(q, z)
    p, q_mass, _ = pair.masses(np.zeros(1) + 1e-300)
    rest = 1 - float(p[1]) - float(q_mass[1])
    at_zero = pair.masses(np.array([-1e-300, 1e-300]))[:2, 1]
    assert at_zero == pytest.approx(rest, abs=1e-14)
    assert (at_zero >= 0).all()


def test_a_cohort_of_all_users_is_one_gaussian() -> None:
    whole = epsilon_interval_of({FixedSizePair(1.0, 2.0): 9}, 1e-6)
    gaussian = epsilon_interval_of({PoissonPair(1.0, 2.0): 9}, 1e-6)
    assert whole == pytest.approx(gaussian, rel=5e-4)
    assert max(whole[0], gaussian[0]) <= min(whole[1], gaussian[1])


@pytest.mark.parametrize(("q", "z", "rounds"), [(0.01, 0.5, 1000), (0.2, 2.0, 30)])
def test_both_ends_are_far_below_the_moments(q: float, z: float, rounds: int) -> None:
    low, _ = epsilon_interval_of({PoissonPair(q, z): rounds}, 1e-5)
    _, up = epsilon_interval_of({FixedSizePair(q, z): rounds}, 1e-5)
    assert low < up < 1.12 * low
