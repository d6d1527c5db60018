"""ε and δ by a contour integral against closed forms, the FFT, published values and themselves."""

import itertools
import math
import tracemalloc
from functools import reduce

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting import delta as delta_of
from fedpriv.accounting import epsilon as epsilon_of
from fedpriv.accounting.contour import inversion
from fedpriv.accounting.contour.inversion import (
    ContourUnsuitableError,
    delta_interval,
    epsilon_interval,
)
from fedpriv.accounting.policies import (
    poisson_examples_gaussian,
    poisson_gaussian,
    poisson_replace_gaussian,
)
from fedpriv.accounting.round_counts import compose
from fedpriv.errors import UnsupportedEventError
from fedpriv.ledger.events import RoundEvent
from tests.accounting import poisson_rounds as pld
from tests.accounting.closed_forms import gaussian_delta, one_round_delta
from tests.accounting.poisson_rounds import tight_delta, tight_epsilon

ROUNDS = {(0.02, 0.9): 400, (0.005, 1.7): 3_000, (1.0, 25.0): 4}


def drifting(n, spread, seed=0):
    """n rounds of which no two are alike."""
    rng = np.random.default_rng(seed)
    place = np.linspace(0.0, 1.0, n)
    q = 0.01 * np.exp(spread * (0.7 * np.sin(3 * place) + 0.1 * rng.uniform(-1, 1, n)))
    z = np.exp(spread * (0.5 * place + 0.1 * rng.uniform(-1, 1, n)))
    return by_setting(q, z)


def by_setting(q, z):
    """Number of rounds by (q, z)."""
    rounds = {}
    for setting in zip(q.tolist(), z.tolist(), strict=True):
        rounds[setting] = rounds.get(setting, 0) + 1
    return rounds


class TestClosedForms:
    @settings(max_examples=60, deadline=None)
    @given(
        z=st.floats(0.3, 100.0),
        count=st.integers(1, 10**6),
        log_delta=st.floats(math.log(1e-15), math.log(1e-2)),
    )
    def test_unsampled_rounds_are_one_gaussian(self, z, count, log_delta):
        delta, mu = math.exp(log_delta), math.sqrt(count) / z
        low, up = epsilon_interval({(1.0, z): count}, delta)
        assert up - low <= max(1e-6 * up, 1e-9)
        assert gaussian_delta(mu, up) <= delta
        assert low == 0.0 or gaussian_delta(mu, low) >= delta

    @pytest.mark.parametrize("epsilon", [0.0, 0.5, 4.0, 20.0])
    @pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 5.0])
    def test_delta_of_unsampled_rounds(self, mu, epsilon):
        low, up = delta_interval({(1.0, 10.0 / mu): 100}, epsilon)
        assert low <= gaussian_delta(mu, epsilon) <= up
        assert up - low <= max(1e-6 * up, 1e-99)

    @pytest.mark.parametrize(
        ("q", "z", "delta"),
        [
            (0.5, 1.0, 1e-5),
            (0.5, 1.0, 1e-15),
            (0.9, 0.3, 1e-5),
            (0.1, 10.0, 1e-5),
            (0.1, 10.0, 1e-15),
            (0.01, 30.0, 1e-6),
            (0.999, 3.0, 1e-8),
            (1e-7, 100.0, 1e-12),
        ],
    )
    def test_one_round(self, q, z, delta):
        low, up = epsilon_interval({(q, z): 1}, delta)
        assert 0.0 < low < up <= low * (1 + 1e-6)
        assert one_round_delta(q, z, up) <= delta <= one_round_delta(q, z, low)
        below, above = delta_interval({(q, z): 1}, up)
        assert below <= one_round_delta(q, z, up) <= above <= below * (1 + 1e-4)

    @pytest.mark.parametrize("z", [1.0, 1.0 + 1e-7, 1.0 - 1e-7])
    def test_interval_tells_nearby_noise_apart(self, z):
        low, up = epsilon_interval({(1.0, z): 1}, 1e-5)
        inside = gaussian_delta(1.0, up) <= 1e-5 <= gaussian_delta(1.0, low)
        assert inside == (z == 1.0)


class TestOtherAccountants:
    @pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-9, 1e-15])
    @pytest.mark.parametrize(
        "rounds",
        [
            {(0.01, 4.0): 10_000},
            {(0.5, 1.0): 20},
            {(0.001, 1.0): 10_000},
            {(0.001, 0.5): 1_000_000},
            {(0.01, 0.3): 10_000},
            {(1e-4, 0.6): 100_000},
            {(1e-7, 100.0): 1_000_000},
            {(0.99, 0.3): 1_000_000},
            {(0.01, 1.0): 100},
            {(1.0, 20.0): 10, (0.02, 1.0): 300, (0.001, 0.8): 5_000},
        ],
    )
    def test_interval_overlaps_with_that_of_the_fft(self, rounds, delta):
        low, up = epsilon_interval(rounds, delta)
        below, above = pld.epsilon_interval(rounds, delta)
        assert up - low <= max(1e-6 * up, 1e-9)
        assert max(low, below) <= min(up, above)

    @pytest.mark.parametrize(
        ("q", "z", "count", "delta", "published"),
        [
            (0.01, 4.0, 10_000, 1e-5, 0.94687),
            (5_000 / 763_430, 1.0, 5_000, 1e-9, 3.8988),
            (1e-5, 1.0, 1_000_000, 1e-6, 0.0452),
            (256 / 60_000, 1.3, round(15 * 60_000 / 256), 1e-5, 0.8645),
            (256 / 60_000, 0.5, round(100 * 60_000 / 256), 1e-5, 28.0460),
        ],
    )
    def test_published_value(self, q, z, count, delta, published):
        low, up = epsilon_interval({(q, z): count}, delta)
        digit = 10.0 ** -len(str(published).split(".")[1])
        assert low - 0.6 * digit <= published <= up + 0.6 * digit


class TestOneMeaning:
    def test_order_does_not_matter(self):
        reversed_ = dict(reversed(ROUNDS.items()))
        intervals = [epsilon_interval(r, 1e-6) for r in (ROUNDS, reversed_)]
        lows, ups = zip(*intervals, strict=True)
        assert max(lows) <= min(ups)
        assert max(ups) - min(lows) <= 1e-7 * max(ups)

    def test_an_answer_does_not_depend_on_what_was_asked_before(self):
        series = [{(0.02, 0.9): count} for count in range(380, 400)]
        answers = [epsilon_interval(rounds, 1e-6) for rounds in series]
        for kept in (inversion._kept_along, inversion._moments):
            assert kept.cache_info().hits > 0
            kept.cache_clear()
        alone = [epsilon_interval(rounds, 1e-6) for rounds in reversed(series)]
        assert answers == alone[::-1]

    def test_rounds_come_from_events(self):
        events = [poisson_gaussian(q, z, count) for (q, z), count in ROUNDS.items()]
        low, up = epsilon_interval(compose(events), 1e-6)
        assert (low, up) == pytest.approx(epsilon_interval(ROUNDS, 1e-6), rel=1e-12)

    @settings(max_examples=25, deadline=None)
    @given(log_q=st.floats(-5, 0), z=st.floats(0.6, 8.0), share=st.floats(1.0, 6.0))
    def test_delta_at_epsilon_is_delta(self, log_q, z, share):
        q = math.exp(log_q)
        rounds = {(q, z): math.ceil(math.exp(share) / (q * min(z, 1.0)) ** 2)}
        low, up = epsilon_interval(rounds, 1e-6)
        assert delta_interval(rounds, low)[1] >= 1e-6
        assert delta_interval(rounds, up)[0] <= 1e-6

    def test_delta_falls_with_epsilon_and_epsilon_with_delta(self):
        deltas = [delta_interval(ROUNDS, e) for e in np.linspace(0.0, 12.0, 25)]
        assert all(a[0] > b[1] for a, b in itertools.pairwise(deltas))
        epsilons = [epsilon_interval(ROUNDS, d) for d in np.geomspace(1e-2, 1e-15, 14)]
        assert all(a[1] < b[0] for a, b in itertools.pairwise(epsilons))

    @pytest.mark.parametrize("worse", [(0.0201, 0.9, 400), (0.02, 0.899, 400), (0.02, 0.9, 401)])
    def test_more_of_anything_is_worse(self, worse):
        q, z, count = worse
        _, up = epsilon_interval({(0.02, 0.9): 400}, 1e-6)
        low, _ = epsilon_interval({(q, z): count}, 1e-6)
        assert up < low


class TestManyDifferentRounds:
    @pytest.mark.parametrize("n", [400, 2_000])
    def test_a_few_kinds_given_one_by_one(self, n):
        rng = np.random.default_rng(1)
        kinds = [(0.004, 0.7), (0.01, 1.0), (0.02, 1.1), (0.05, 2.5), (0.008, 1.6)]
        chosen = [kinds[i] for i in rng.integers(0, len(kinds), n)]
        # Distances of 1e-9 make all rounds different without a change of ε that can be seen.
        q = np.array([k[0] for k in chosen]) * (1 + 1e-9 * rng.uniform(-1, 1, n))
        z = np.array([k[1] for k in chosen])
        below, above = epsilon_interval({k: chosen.count(k) for k in kinds}, 1e-6)
        for interval, width in ((epsilon_interval, 1e-5), (tight_epsilon, 1e-5)):
            low, up = interval(by_setting(q, z), 1e-6)
            assert up - low < width * up
            assert max(low, below) * (1 - 1e-7) <= min(up, above) * (1 + 1e-7)

    @pytest.mark.parametrize(
        ("n", "spread", "delta"), [(20_000, 0.3, 1e-5), (20_000, 1.5, 1e-8), (10_000, 2.0, 1e-6)]
    )
    def test_drifting_rounds_are_between_coarser_ones(self, n, spread, delta):
        rounds = drifting(n, spread)
        q, z = (np.array(values) for values in zip(*rounds, strict=True))
        q *= math.sqrt(2_000 / n)
        low, up = tight_epsilon(by_setting(q, z), delta)
        assert up - low < 0.05 * up
        for worse in (True, False):
            sharpen = np.ceil if worse else np.floor
            coarse_q = np.exp(sharpen(np.log(q) * 20) / 20)
            coarse_z = np.exp(-sharpen(-np.log(z) * 20) / 20)
            below, above = epsilon_interval(by_setting(coarse_q, coarse_z), delta)
            assert below > up if worse else above < low

    @pytest.mark.parametrize(
        ("noise", "q", "delta", "step"),
        [
            ((0.3, 0.4), 0.002, 1e-6, 1e-3),
            ((0.5, 0.8), 0.02, 1e-6, 5e-4),
            ((0.8, 3.0), 0.1, 1e-5, 5e-4),
        ],
    )
    def test_different_rounds_are_between_both_ends_of_dp_accounting(self, noise, q, delta, step):
        rng = np.random.default_rng(0)
        probabilities, z = q * np.exp(rng.normal(0.0, 0.5, 60)), rng.uniform(*noise, 60)
        low, up = tight_epsilon(by_setting(probabilities, z), delta)
        ends = []
        for pessimistic in (False, True):
            rounds = [
                privacy_loss_distribution.from_gaussian_mechanism(
                    float(one),
                    sampling_prob=float(chance),
                    value_discretization_interval=step,
                    pessimistic_estimate=pessimistic,
                    use_connect_dots=pessimistic,
                )
                for chance, one in zip(probabilities, z, strict=True)
            ]
            ends.append(reduce(lambda all_, one: all_.compose(one), rounds))
        below, above = (losses.get_epsilon_for_delta(delta) for losses in ends)
        assert low <= above * (1 + 1e-6)
        assert up >= below * (1 - 1e-6)
        assert up - low < 0.02 * up

    @pytest.mark.parametrize("z", [0.2, 0.4])
    def test_many_rounds_of_little_noise_agree_with_the_composition_of_few_kinds(self, z):
        kinds = [(0.002, z), (0.004, 1.1 * z), (0.001, 0.95 * z)]
        q, noises = (np.repeat([kind[i] for kind in kinds], 300) for i in (0, 1))
        q = q * (1 + 1e-9 * np.random.default_rng(4).uniform(-1, 1, 900))
        low, up = tight_epsilon(by_setting(q, noises), 1e-5)
        assert up - low <= 2e-3 * up
        below, above = pld.epsilon_interval(dict.fromkeys(kinds, 300), 1e-5)
        assert max(low, below) <= min(up, above) * (1 + 1e-7)
        below, above = tight_delta(by_setting(q, noises), up)
        assert below <= 1e-5 * (1 + 1e-7)
        assert above >= pld.delta_interval(dict.fromkeys(kinds, 300), up)[0] * (1 - 1e-5)

    @pytest.mark.parametrize(
        ("n", "z", "width"), [(3000, 0.3, 1e-4), (3000, 0.5, 1e-4), (19283, 0.18, 0.17)]
    )
    def test_thousands_of_rounds_of_little_noise_have_a_narrow_interval(self, n, z, width):
        rng = np.random.default_rng(0)
        q = 0.002 * np.exp(0.5 * rng.standard_normal(n))
        low, up = tight_epsilon(by_setting(q, z * rng.uniform(0.9, 1.1, n)), 1e-6)
        assert up - low <= width * up
        least, _ = epsilon_interval({(float(q.mean()), 1.1 * z): n}, 1e-6)
        _, most = epsilon_interval({(float(np.sqrt((q**2).mean())) * 1.2, 0.9 * z): n}, 1e-6)
        assert least < up
        assert low < most

    def test_order_does_not_matter(self):
        rounds = drifting(4_000, 1.0)
        mixed = np.random.default_rng(2).permutation(len(rounds))
        other = {setting: rounds[setting] for setting in np.array(list(rounds))[mixed].tolist()
                 for setting in [tuple(setting)]}  # fmt: skip
        assert tight_epsilon(rounds, 1e-6) == pytest.approx(tight_epsilon(other, 1e-6), rel=1e-6)

    @pytest.mark.slow
    def test_memory_stays_small(self):
        rounds = drifting(50_000, 0.3)
        tracemalloc.start()
        tight_epsilon(rounds, 1e-6)
        assert tracemalloc.get_traced_memory()[1] < 300 * 2**20
        tracemalloc.stop()


def replaced(q: float, z: float, count: int = 1) -> RoundEvent:
    return poisson_replace_gaussian(q, z, count)


def examples(q: float, z: float, count: int = 1) -> RoundEvent:
    return poisson_examples_gaussian(q, 5, 4 * z, count)


@pytest.mark.parametrize("make", [replaced, examples])
class TestOtherKindsOfPairs:
    @pytest.mark.parametrize(
        ("settings", "delta"),
        [
            ([(0.01, 1.0, 1000), (0.3, 4.0, 20), (0.002, 0.7, 5000)], 1e-6),
            ([(0.2, 0.6, 3), (0.9, 3.0, 40), (1.0, 2.0, 2)], 1e-3),
            ([(1e-4, 2.0, 200_000), (0.05, 8.0, 3000)], 1e-12),
            ([(0.5, 0.4, 30)], 0.3),
        ],
    )
    def test_intervals_are_inside_those_of_the_fft(self, make, settings, delta):
        events = [make(*setting) for setting in settings]
        along, composed = (epsilon_of(events, delta, name) for name in ("tight", "pld"))
        assert along.epsilon <= along.epsilon_low * (1 + 1e-6)
        assert composed.epsilon_low <= along.epsilon
        assert along.epsilon_low <= composed.epsilon
        at = delta_of(events, along.epsilon)
        assert at <= delta * (1 + 1e-6)

    def test_thousands_of_different_rounds_cost_what_close_ones_cost(self, make):
        rng = np.random.default_rng(5)
        few = [(0.01, 1.0), (0.0103, 1.02), (0.0097, 0.96)]
        near = 1 + 1e-7 * rng.uniform(-1, 1, (600, 2))
        many = [make(q * a, z * b) for (q, z), (a, b) in zip(few * 200, near, strict=True)]
        found = epsilon_of(many, 1e-6)
        same = epsilon_of([make(q, z, 200) for q, z in few], 1e-6, "pld")
        assert found.epsilon <= found.epsilon_low * (1 + 1e-5)
        assert same.epsilon_low * (1 - 1e-5) <= found.epsilon
        assert found.epsilon_low <= same.epsilon * (1 + 1e-5)


class TestEdges:
    def test_no_round_costs_nothing(self):
        assert epsilon_interval({}, 1e-5) == (0.0, 0.0)
        assert delta_interval({}, 0.0) == (0.0, 0.0)

    def test_no_noise_costs_everything(self):
        assert tight_epsilon({(0.1, 1.0): 5, (1e-6, 0.0): 1}, 1e-5) == (math.inf, math.inf)
        assert tight_delta({(0.1, 1.0): 5, (1e-6, 0.0): 1}, 3.0) == (0.0, 1.0)

    def test_a_delta_beyond_that_of_epsilon_zero_costs_nothing(self):
        at_zero, _ = delta_interval({(1e-4, 5.0): 10_000}, 0.0)
        assert epsilon_interval({(1e-4, 5.0): 10_000}, 1.001 * at_zero) == (0.0, 0.0)
        low, up = epsilon_interval({(1e-4, 5.0): 10_000}, 0.999 * at_zero)
        assert 0.0 < low <= up

    def test_a_delta_too_small_for_a_float_is_0(self):
        low, up = delta_interval({(0.01, 4.0): 100}, 50.0)
        assert low == 0.0
        assert 0.0 < up <= 1.01e-100

    @pytest.mark.parametrize(
        ("rounds", "delta"),
        [
            ({(1e-7, 0.3): 1_000_000}, 1e-5),
            ({(0.01, 1.0): 1}, 1e-5),
            ({(0.1, 0.019): 100}, 1e-5),
            ({(0.1, 2e6): 100}, 1e-5),
            ({(1e-13, 1.0): 100}, 1e-5),
            ({(0.1, 1.0): 100}, 1e-280),
        ],
    )
    def test_refusal(self, rounds, delta):
        with pytest.raises(ContourUnsuitableError, match="the contour"):
            epsilon_interval(rounds, delta)
        assert issubclass(ContourUnsuitableError, UnsupportedEventError)
