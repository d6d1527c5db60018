"""Grouped and folded rounds: every move is outward, and the ends of intervals stay valid."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting import poisson_gaussian, separated_gaussian
from fedpriv.accounting.accountants import epsilon
from fedpriv.accounting.contour import inversion as contour
from fedpriv.accounting.round_counts import (
    compose,
    folded,
    grouped,
    unsampled_noise_multiplier,
)
from fedpriv.ledger.events import NeighbouringRelation
from tests.accounting.closed_forms import gaussian_delta
from tests.accounting.poisson_rounds import epsilon_interval as pld_interval
from tests.accounting.poisson_rounds import tight_delta, tight_epsilon

ADD_OR_REMOVE = NeighbouringRelation.ADD_OR_REMOVE_ONE


def scattered(n, q=(0.004, 0.02), z=(0.9, 1.6), seed=0):
    rng = np.random.default_rng(seed)
    settings = np.exp(rng.uniform(np.log([q[0], z[0]]), np.log([q[1], z[1]]), (n, 2)))
    return {tuple(setting): int(rng.integers(1, 4)) for setting in settings.tolist()}


@pytest.mark.parametrize("least", [1e-300, 1e-200, 1e-160, 1e155, 1e200, 1e300])
def test_rounds_of_any_noise_fold(least):
    rounds = {(1.0, least): 1, (1.0, 2 * least): 3}
    (((q, z), count),) = folded(rounds).items()
    assert q == 1.0
    assert count >= 1
    assert z / math.sqrt(count) == pytest.approx(least / math.sqrt(1.75), rel=1e-12)
    assert z / math.sqrt(count) <= least / math.sqrt(1.75)


def test_noise_over_a_tiny_strategy_stays_a_number():
    event = separated_gaussian((1e-300,), 2, 1, 1, 1e150, ADD_OR_REMOVE)
    (((_, z), _),) = compose([event]).items()
    assert math.isfinite(z)


class TestGroups:
    @pytest.mark.parametrize("most", [1, 7, 64])
    def test_every_round_moves_to_the_worst_and_to_the_best_corner(self, most):
        rounds = scattered(500)
        above, below = grouped(rounds, most)
        assert len(above) <= most
        assert len(below) <= most
        assert sum(above.values()) == sum(below.values()) == sum(rounds.values())
        # Each sorted order of q and 1/z is dominated, round by round.
        for moved, sign in ((above, 1), (below, -1)):
            for axis in (0, 1):
                values = [
                    np.sort(np.repeat([key[axis] for key in each], list(each.values())))
                    for each in (rounds, moved)
                ]
                outward = sign * (values[1] - values[0]) * (1 if axis == 0 else -1)
                assert (outward >= 0).all()

    def test_few_different_rounds_stay_as_they_are(self):
        rounds = scattered(60)
        assert grouped(rounds, 60) == (rounds, rounds)

    def test_what_can_hardly_be_told_apart_is_one_group(self):
        rounds = scattered(5_000, q=(0.01, 0.01 * (1 + 9e-5)), z=(1.0, 1.0 + 9e-5))
        above, below = grouped(rounds, 64)
        assert len(above) == len(below) == 1

    @pytest.mark.parametrize(
        ("rounds", "delta"),
        [
            (scattered(150), 1e-6),
            (scattered(90, q=(1e-3, 2e-3), z=(0.7, 0.9)), 1e-8),
            (scattered(150, q=(1e-4, 0.5), z=(0.5, 20.0)), 1e-10),
        ],
    )
    def test_intervals_of_groups_hold_those_of_single_rounds(self, rounds, delta):
        try:
            low, up = contour.epsilon_interval(rounds, delta)
        except contour.ContourUnsuitableError:
            low, up = pld_interval(rounds, delta)
        worst, best = grouped(rounds, 20)
        below, above = pld_interval(best, delta)[0], pld_interval(worst, delta)[1]
        assert below <= up
        assert low <= above
        assert above - below < 0.4 * above
        found = tight_epsilon(rounds, delta)
        assert max(found[0], low) <= min(found[1], up) * (1 + 1e-12)

    @settings(max_examples=4, deadline=None)
    @given(seed=st.integers(0, 1000), n=st.sampled_from([70, 300, 1_500]))
    def test_the_sixty_fifth_round_does_not_make_ends_contradict(self, seed, n):
        rounds = scattered(n, seed=seed)
        low, up = tight_epsilon(rounds, 1e-6)
        assert 0.0 < low <= up < math.inf
        assert tight_delta(rounds, up)[0] <= 1e-6 <= tight_delta(rounds, low)[1]


class TestEverybody:
    @pytest.mark.parametrize("accountant", ["tight", "pld"])
    @pytest.mark.parametrize(
        ("z", "count", "delta"),
        [(5e6, 10**6, 1e-5), (0.04, 1, 1e-5), (0.3, 10**5, 1e-8), (1.0, 7, 1e-50)],
    )
    def test_rounds_of_all_users_have_the_closed_form(self, z, count, delta, accountant):
        found = epsilon([poisson_gaussian(1.0, z, count)], delta, accountant)
        mu = math.sqrt(count) / z
        assert gaussian_delta(mu, found.epsilon) <= delta
        assert found.epsilon_low == 0.0 or gaussian_delta(mu, found.epsilon_low) >= delta
        assert found.epsilon - found.epsilon_low <= 1e-8 * (1 + found.epsilon)
        low, up = tight_delta({(1.0, z): count}, found.epsilon)
        assert low <= gaussian_delta(mu, found.epsilon) <= up

    def test_values_from_elsewhere(self):
        tiny = epsilon([poisson_gaussian(1.0, 5e6, 10**6)], 1e-5)
        huge = epsilon([poisson_gaussian(1.0, 0.04)], 1e-5)
        assert tiny.epsilon == pytest.approx(2.51e-4, rel=2e-3)
        assert huge.epsilon == pytest.approx(418, abs=0.6)

    def test_different_rounds_of_all_users_are_one_gaussian(self):
        rounds = {(1.0, 20.0 + i / 7): 1 + i for i in range(300)}
        z = unsampled_noise_multiplier(rounds)
        low, up = tight_epsilon(rounds, 1e-6)
        assert gaussian_delta(1 / z, up) <= 1e-6 <= gaussian_delta(1 / z, low)

    def test_beside_sampled_rounds_they_are_equal_rounds_of_much_noise(self):
        everybody = {(1.0, 0.3 + i / 100): 2 for i in range(50)}
        others = {(0.01, 1.0): 500}
        both = folded({**others, **everybody})
        (((_, z), count),) = ((key, n) for key, n in both.items() if key[0] == 1.0)
        assert z >= 1.0
        assert z / math.sqrt(count) == pytest.approx(
            unsampled_noise_multiplier(everybody), rel=1e-14
        )
        direct = contour.epsilon_interval({**others, **everybody}, 1e-6)
        assert tight_epsilon({**others, **everybody}, 1e-6) == pytest.approx(direct, rel=1e-7)
        assert folded({**others, (1.0, 2.0): 3}) == {**others, (1.0, 2.0): 3}
