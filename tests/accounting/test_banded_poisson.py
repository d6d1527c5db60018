"""The price of series of Poisson rounds within bands, against their outputs themselves.

The releases of a series tell as much as the rows of C·X + Z. Where all that differs is one user of
group g, X has v_t in round t = g, g + b, … if its coin of that round shows heads, and 0 elsewhere.
"""

import math
from itertools import product

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant

from fedpriv.accounting.accountants import ACCOUNTANTS
from fedpriv.accounting.policies import (
    banded_poisson_gaussian,
    poisson_gaussian,
    poisson_replace_gaussian,
    separated_gaussian,
)
from fedpriv.ledger.events import NeighbouringRelation

ADD_OR_REMOVE, REPLACE = NeighbouringRelation
TIGHT = ACCOUNTANTS["tight"]


def means(
    strategy: tuple[float, ...],
    rounds: int,
    b: int,
    group: int,
    updates: tuple[float, ...],
    q: float,
) -> list[tuple[float, np.ndarray]]:
    """Probability and mean of the rows of C·X + Z for every outcome of one user's coins."""
    c = np.zeros((rounds, rounds))
    for j, coefficient in enumerate(strategy):
        c += coefficient * np.eye(rounds, k=-j)
    turns = range(group, rounds, b)
    found = []
    for coins in product((0, 1), repeat=len(turns)):
        x = np.zeros(rounds)
        x[list(turns)] = np.multiply(coins, updates[: len(turns)])
        heads = sum(coins)
        found.append((q**heads * (1 - q) ** (len(turns) - heads), c @ x))
    return found


def delta_of(
    first: list[tuple[float, np.ndarray]],
    second: list[tuple[float, np.ndarray]],
    z: float,
    eps: float,
) -> float:
    """max of E_P[(1 − e^ε·Q/P)₊] both ways, by the rectangle rule on a grid."""
    dimensions = len(first[0][1])
    ends = [m for _, mean in (*first, *second) for m in mean]
    axis = np.arange(min(ends) - 7 * z, max(ends) + 7 * z, z / (6 if dimensions == 3 else 20))
    grid = np.meshgrid(*[axis] * dimensions, indexing="ij", sparse=True)
    norm = ((axis[1] - axis[0]) / (z * math.sqrt(2 * math.pi))) ** dimensions

    def density(law: list[tuple[float, np.ndarray]]) -> np.ndarray:
        return sum(
            p * np.exp(-sum((x - m) ** 2 for x, m in zip(grid, mean, strict=True)) / (2 * z * z))
            for p, mean in law
        )

    p, q = density(first), density(second)
    sides = (p - math.exp(eps) * q, q - math.exp(eps) * p)
    return max(float(np.maximum(side, 0.0).sum()) * norm for side in sides)


CASES = [((1.0, 0.6), 3, 2), ((1.0, -0.9), 3, 2), ((1.0, 0.7, 0.5), 3, 3), ((1.0,), 3, 1),
         ((1.0, 0.8), 2, 2), ((1.0,), 2, 1)]  # fmt: skip


@pytest.mark.parametrize(("strategy", "rounds", "b"), CASES)
@pytest.mark.parametrize("eps", [0.0, 0.5, 2.0])
def test_no_group_and_no_updates_of_a_user_who_joins_pass_the_price(
    strategy: tuple[float, ...], rounds: int, b: int, eps: float
) -> None:
    q, z = 0.3, 0.9
    event = banded_poisson_gaussian(strategy, rounds, b, q, z, ADD_OR_REMOVE)
    price = TIGHT.delta([event], eps)
    nobody = [(1.0, np.zeros(rounds))]
    reached = {}
    for group, updates in product(range(b), [(1.0, 1.0, 1.0), (1.0, -1.0, 1.0), (-0.6, 1.0, 0.3)]):
        somebody = means(strategy, rounds, b, group, updates, q)
        reached[group, updates] = delta_of(somebody, nobody, z, eps)
    assert max(reached.values()) <= price * (1 + 1e-3)
    # The first group reaches it, whatever the signs: the price is exact.
    assert reached[0, (1.0, 1.0, 1.0)] == pytest.approx(price, rel=2e-3, abs=1e-6)


@pytest.mark.parametrize(("strategy", "rounds", "b"), CASES[:3])
@pytest.mark.parametrize("eps", [0.0, 1.0])
def test_nor_do_those_of_a_user_who_is_replaced(
    strategy: tuple[float, ...], rounds: int, b: int, eps: float
) -> None:
    q, z = 0.3, 1.5
    event = banded_poisson_gaussian(strategy, rounds, b, q, z, REPLACE)
    price = TIGHT.delta([event], eps)
    reached = [
        delta_of(*(means(strategy, rounds, b, 0, each, q) for each in pair), z, eps)
        for pair in (((1.0, 1.0, 1.0), (-1.0, -1.0, -1.0)), ((1.0, 1.0, 1.0), (-1.0, 1.0, 0.0)))
    ]
    assert max(reached) <= price * (1 + 1e-3)
    assert reached[0] == pytest.approx(price, rel=2e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("strategy", "rounds", "b", "q", "z"),
    [((1.0, 0.5, 0.375), 500, 4, 0.02, 1.0), ((1.0, 0.9), 101, 2, 0.1, 3.0)],
)
def test_is_what_dp_accounting_composes_of_the_same_pairs(
    strategy: tuple[float, ...], rounds: int, b: int, q: float, z: float
) -> None:
    last = rounds - (-(-rounds // b) - 1) * b
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    for norm, count in (
        (np.linalg.norm(strategy), -(-rounds // b) - 1),
        (np.linalg.norm(strategy[:last]), 1),
    ):
        gaussian = dp_accounting.GaussianDpEvent(z / norm)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(q, gaussian), count)
    event = banded_poisson_gaussian(strategy, rounds, b, q, z, ADD_OR_REMOVE)
    loss = TIGHT.epsilon([event], 1e-6)
    assert loss.epsilon == pytest.approx(accountant.get_epsilon(1e-6), rel=2e-3)


def test_without_sampling_it_is_a_separated_series() -> None:
    strategy = (1.0, 0.5, 0.25)
    for relation in NeighbouringRelation:
        certain = banded_poisson_gaussian(strategy, 11, 4, 1.0, 5.0, relation)
        separated = separated_gaussian(strategy, 11, 3, 4, 5.0, relation)
        loss, expected = (TIGHT.epsilon([each], 1e-6) for each in (certain, separated))
        assert loss.epsilon == pytest.approx(expected.epsilon, rel=1e-8)
        assert loss.epsilon_low == pytest.approx(expected.epsilon_low, rel=1e-8)


def test_with_fresh_noise_and_one_group_it_is_poisson_sampling() -> None:
    alike = [
        (banded_poisson_gaussian((1.0,), 50, 1, 0.1, 2.0, ADD_OR_REMOVE), poisson_gaussian),
        (banded_poisson_gaussian((1.0,), 50, 1, 0.1, 2.0, REPLACE), poisson_replace_gaussian),
    ]
    for event, rounds in alike:
        loss, expected = (TIGHT.epsilon([each], 1e-6) for each in (event, rounds(0.1, 2.0, 50)))
        assert loss.epsilon == pytest.approx(expected.epsilon, rel=1e-8)
        assert loss.epsilon_low == pytest.approx(expected.epsilon_low, rel=1e-8)


def test_more_groups_and_rarer_coins_cost_less_and_longer_columns_more() -> None:
    def price(strategy: tuple[float, ...], groups: int, q: float) -> float:
        event = banded_poisson_gaussian(strategy, 100, groups, q, 1.0, ADD_OR_REMOVE)
        return TIGHT.epsilon([event], 1e-6).epsilon

    middle = price((1.0, 0.5), 4, 0.1)
    assert price((1.0, 0.5), 5, 0.1) < middle < price((1.0, 0.5), 3, 0.1)
    assert price((1.0, 0.5), 4, 0.09) < middle < price((1.0, 0.6), 4, 0.1)
