"""Certified intervals of ε and δ against closed forms, a contour integral and published values."""

import math
import tracemalloc

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting import ACCOUNTANTS, poisson_gaussian
from fedpriv.accounting import delta as delta_of
from fedpriv.accounting import epsilon as epsilon_of
from fedpriv.accounting.pld import delta_interval as delta_interval_of
from fedpriv.accounting.pld import epsilon_interval as epsilon_interval_of
from fedpriv.accounting.pld import queries
from fedpriv.accounting.pld.dominating_pairs import FixedSizePair, ReplacePair
from fedpriv.accounting.pld.lattice import LossPair
from fedpriv.accounting.pld.sampled_examples import PoissonPair
from fedpriv.errors import InvalidValueError
from tests.accounting import contour_integral
from tests.accounting.closed_forms import gaussian_delta, one_round_delta
from tests.accounting.poisson_rounds import delta_interval, epsilon_interval

Rounds = dict[tuple[float, float], int]


@pytest.mark.parametrize(
    ("q", "z", "delta"),
    [
        (1e-7, 0.2, 1e-8),
        (1e-7, 100.0, 1e-12),
        (1e-3, 0.2, 1e-5),
        (0.01, 1.0, 1e-12),
        (0.01, 10.0, 1e-4),
        (0.3, 0.7, 1e-2),
        (0.5, 0.2, 1e-12),
        (0.999, 3.0, 1e-6),
        (0.01, 1.0, 1e-30),
    ],
)
def test_one_round_has_the_closed_form(q: float, z: float, delta: float) -> None:
    low, up = epsilon_interval({(q, z): 1}, delta)
    assert 0 < low < up < low * 1.001
    assert one_round_delta(q, z, low) >= delta >= one_round_delta(q, z, up)
    below, above = delta_interval({(q, z): 1}, up)
    assert below <= one_round_delta(q, z, up) <= above < 1.05 * below


@pytest.mark.parametrize(
    ("rounds", "delta"),
    [
        ({(1.0, 1.0): 1}, 1e-5),
        ({(1.0, 0.2): 1}, 1e-12),
        ({(1.0, 100.0): 1}, 1e-4),
        ({(1.0, 30.0): 1000}, 1e-9),
        ({(1.0, 100.0): 1_000_000}, 1e-12),
        ({(1.0, 0.2): 1_000_000}, 1e-2),
        ({(1.0, 2.0): 3, (1.0, 5.0): 40, (1.0, 90.0): 500}, 1e-6),
    ],
)
def test_unsampled_rounds_are_one_analytic_gaussian(rounds: Rounds, delta: float) -> None:
    mu = math.sqrt(sum(count / z**2 for (_, z), count in rounds.items()))
    low, up = epsilon_interval(rounds, delta)
    assert 0 < low < up < low * 1.001
    assert gaussian_delta(mu, low) >= delta >= gaussian_delta(mu, up)


# Smooth and rough: many small losses, rare large ones, several (q, z) of very different sizes.
COMPOSITIONS: list[tuple[Rounds, float]] = [
    ({(0.01, 4.0): 10_000}, 1e-5),
    ({(1e-5, 1.0): 1_000_000}, 1e-6),
    ({(5000 / 763_430, 1.0): 5000}, 1e-9),
    ({(0.05, 1.0): 100}, 1e-12),
    ({(0.5, 0.4): 30}, 1e-2),
    ({(1e-3, 0.5): 1000}, 1e-9),
    ({(1e-3, 0.3): 10_000}, 1e-6),
    ({(1e-7, 60.0): 1_000_000}, 1e-12),
    ({(0.01, 1.0): 1000, (0.02, 1.5): 500, (1.0, 50.0): 7}, 1e-5),
    ({(0.02, 12.0): 1140, (1.0, 0.5): 10}, 1e-11),
    ({(1.0, 6.0): 40, (1e-6, 2.0): 100_000, (0.009, 0.6): 1}, 1e-6),
    pytest.param(
        {(0.01 + i / 1000, 1.0 + i / 20): 10 + i for i in range(4)}, 1e-6, marks=pytest.mark.slow
    ),
]


def test_an_answer_does_not_depend_on_what_was_asked_before() -> None:
    series = [{(0.01, 0.5): count} for count in range(13, 19)]
    answers = [epsilon_interval(rounds, 1e-6) for rounds in series]
    for kept in (queries._planned, queries._at_least_as_bad, queries._at_most_as_bad):
        assert kept.cache_info().hits > 0
        kept.cache_clear()
    alone = [epsilon_interval(rounds, 1e-6) for rounds in reversed(series)]
    assert answers == alone[::-1]


@pytest.mark.parametrize(("rounds", "delta"), COMPOSITIONS)
def test_compositions_agree_with_a_contour_integral(rounds: Rounds, delta: float) -> None:
    low, up = epsilon_interval(rounds, delta)
    assert 0 < low < up < low * 1.0015
    for epsilon, above in ((low, True), (up, False)):
        worst = max(
            contour_integral.delta_of(rounds, epsilon, delta, add=add) for add in (False, True)
        )
        assert (worst >= delta * (1 - 1e-6)) if above else (worst <= delta * (1 + 1e-6))
        below, beyond = delta_interval(rounds, epsilon)
        assert below * (1 - 1e-6) <= worst <= beyond * (1 + 1e-6)
        assert beyond < 1.06 * below


@settings(max_examples=3, deadline=None)
@given(
    rounds=st.dictionaries(
        st.tuples(
            st.one_of(st.just(1.0), st.floats(-6.0, 0.0).map(lambda e: 10**e)),
            st.floats(math.log(0.4), math.log(20.0)).map(math.exp),
        ),
        st.floats(0.0, 5.0).map(lambda e: int(10**e)),
        min_size=1,
        max_size=3,
    ),
    delta=st.floats(-12.0, -2.0).map(lambda e: 10**e),
)
def test_intervals_hold_for_any_rounds(rounds: Rounds, delta: float) -> None:
    low, up = epsilon_interval(rounds, delta)
    assert 0 <= low <= up < math.inf
    for epsilon in (low, up):
        below, above = delta_interval(rounds, epsilon)
        assert 0 <= below <= above <= 1
        if epsilon > 0:
            try:
                worst = max(
                    contour_integral.delta_of(rounds, epsilon, delta, add=add)
                    for add in (False, True)
                )
            except ArithmeticError:
                continue  # rare jumps only: the twin cannot tell
            assert below * (1 - 1e-5) <= worst <= above * (1 + 1e-5)


@pytest.mark.parametrize(
    ("q", "z", "rounds", "delta", "published"),
    [
        (0.01, 4.0, 10_000, 1e-5, 0.94687),
        (1e-5, 1.0, 1_000_000, 1e-6, 0.0452),
        (5000 / 763_430, 1.0, 5000, 1e-9, 3.8988),
        # The six settings of Bu et al. 2020, Table 1, with T = epochs/q.
        (256 / 60_000, 1.3, round(15 * 60_000 / 256), 1e-5, 0.8645),
        (256 / 60_000, 1.1, round(60 * 60_000 / 256), 1e-5, 2.3817),
        (256 / 60_000, 0.7, round(45 * 60_000 / 256), 1e-5, 5.6397),
        (256 / 60_000, 0.6, round(62 * 60_000 / 256), 1e-5, 10.9499),
        (256 / 60_000, 0.55, round(68 * 60_000 / 256), 1e-5, 15.7163),
        (256 / 60_000, 0.5, round(100 * 60_000 / 256), 1e-5, 28.0460),
    ],
)
def test_known_values(q: float, z: float, rounds: int, delta: float, published: float) -> None:
    digits = 10.0 ** -(len(str(published)) - str(published).index(".") - 1)
    low, up = epsilon_interval({(q, z): rounds}, delta)
    assert low - digits < published < up + digits
    assert up < low * 1.001
    wrong, _ = epsilon_interval({(q, 0.99 * z): rounds}, delta)
    assert published < wrong  # an interval for slightly less noise does not hold the value


@pytest.mark.parametrize(
    ("q", "z", "rounds", "delta", "interval"),
    [
        (0.01, 1.0, 1000, 1e-6, 1e-4),
        pytest.param(1e-3, 0.5, 1000, 1e-7, 1e-4, marks=pytest.mark.slow),
        (0.5, 0.3, 100, 1e-3, 1e-3),
    ],
)
def test_a_published_library_agrees(
    q: float, z: float, rounds: int, delta: float, interval: float
) -> None:
    low, up = epsilon_interval({(q, z): rounds}, delta)
    optimistic, pessimistic = (
        privacy_loss_distribution.from_gaussian_mechanism(
            z,
            sampling_prob=q,
            value_discretization_interval=interval,
            pessimistic_estimate=pessimistic,
            log_mass_truncation_bound=-60,
        )
        .self_compose(rounds)
        .get_epsilon_for_delta(delta)
        for pessimistic in (False, True)
    )
    assert low <= pessimistic * (1 + 1e-9)
    assert optimistic * (1 - 1e-9) <= up
    assert up == pytest.approx(pessimistic, rel=2e-3)


def test_a_single_rare_loss_is_the_hardest() -> None:
    # δ is a hundred-thousandth of the chance to be sampled.
    q, z, delta = 1e-7, 0.5, 1e-12
    low, up = epsilon_interval({(q, z): 1}, delta)
    assert 0 < low < up < low * 1.001 + 1e-6
    assert one_round_delta(q, z, low) >= delta >= one_round_delta(q, z, up)


# The widest on a lattice that is planned for smooth losses: a few rare ones, or many tiny ones.
WIDE = [
    (1e-5, 0.3, 100, 1e-10),
    (1e-5, 0.6, 1, 1e-8),
    (1e-5, 0.6, 100, 1e-5),
    (1e-5, 0.6, 10_000, 1e-5),
    (1e-5, 0.6, 1_000_000, 1e-10),
    (1e-5, 0.6, 1_000_000, 1e-8),
    (1e-5, 1.0, 100, 1e-8),
    (1e-5, 1.0, 10_000, 1e-10),
    (1e-4, 0.6, 1, 1e-5),
    (1e-4, 0.6, 1_000_000, 1e-10),
    (1e-4, 1.0, 100, 1e-5),
    (1e-3, 1.0, 1, 1e-5),
    (0.5, 0.05, 3, 0.5),
]


@pytest.mark.parametrize(("q", "z", "rounds", "delta"), WIDE)
def test_intervals_are_narrow_where_losses_are_rare(
    q: float, z: float, rounds: int, delta: float
) -> None:
    low, up = epsilon_interval({(q, z): rounds}, delta)
    assert 0 < low < up <= low + 1e-3 * up + 1e-6
    if rounds == 1:
        assert one_round_delta(q, z, low) >= delta >= one_round_delta(q, z, up)


@settings(max_examples=12, deadline=None)
@given(
    q=st.floats(-5.0, 0.0).map(lambda e: 10**e),
    z=st.floats(math.log(0.3), math.log(30.0)).map(math.exp),
    rounds=st.floats(0.0, 6.0).map(lambda e: int(10**e)),
    delta=st.floats(-10.0, -5.0).map(lambda e: 10**e),
)
def test_intervals_are_as_narrow_as_promised(q: float, z: float, rounds: int, delta: float) -> None:
    low, up = epsilon_interval({(q, z): rounds}, delta)
    assert up - low <= 1e-3 * up + 1e-6


def test_pairs_of_any_kind_compose() -> None:
    # All certain, so that together they are one Gaussian.
    pairs = {ReplacePair(1.0, 2.0): 3, PoissonPair(1.0, 5.0): 40, PoissonPair(1.0, 90.0): 500}
    mu = math.sqrt(3 / 2.0**2 + 40 / 5.0**2 + 500 / 90.0**2)
    low, up = epsilon_interval_of(pairs, 1e-6)
    assert 0 < low < up < low * 1.001
    assert gaussian_delta(mu, low) >= 1e-6 >= gaussian_delta(mu, up)
    below, above = delta_interval_of(pairs, 2.0)
    assert below <= gaussian_delta(mu, 2.0) <= above < 1.06 * below


ABSURD: list[Rounds] = [
    {(1e-320, 1.0): 1 << 30},
    {(1e-12, 1e6): 1 << 30},
    {(1e-3, 1.0): 10**12},
    {(1.0, 0.3): 10**15},
]


@pytest.mark.parametrize("rounds", ABSURD)
def test_absurd_rounds_are_priced_in_bounded_memory(rounds: Rounds) -> None:
    limit = 500 * 2**20
    tracemalloc.start()
    try:
        low, up = epsilon_interval(rounds, 1e-100)
        assert 0 <= low <= up
        for epsilon in (0.0, 1e308):
            below, above = delta_interval(rounds, epsilon)
            assert 0 <= below <= above <= 1
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("epsilon", [1e9, 1e300, 1.7e308])
def test_an_absurd_epsilon_has_next_to_no_delta(epsilon: float) -> None:
    below, above = delta_interval({(0.01, 1.0): 100, (1.0, 3.0): 4}, epsilon)
    assert below == 0.0
    assert above < 1e-99


@pytest.mark.parametrize("count", [10**8, 1 << 53, 1 << 106])
@pytest.mark.parametrize("z", [0.05, 0.5])
def test_as_many_rounds_as_can_be_cost_more_than_their_mean_loss(count: int, z: float) -> None:
    low, up = epsilon_interval_of({PoissonPair(0.5, z): count}, 1e-6)
    most, mean = count / (2 * z**2), quad_mean_loss(0.5, z)
    assert 0.0 <= low <= 1.2 * most
    # By the central limit theorem a loss below its mean has about half the probability.
    assert 0.999 * count * mean <= up < math.inf


def quad_mean_loss(q: float, z: float) -> float:
    """E[L] if the user is removed, by the trapezoidal rule."""
    x = np.linspace(-12 * z, 1 + 12 * z, 4001)
    ratio = np.exp(np.minimum((x - 0.5) / z**2, 600.0))
    density = np.exp(-(x**2) / (2 * z**2)) * (1 - q)
    density += np.exp(-((x - 1) ** 2) / (2 * z**2)) * q
    loss = np.log(1 - q + q * ratio)
    return float(density @ loss) * float(x[1] - x[0]) / (z * math.sqrt(2 * math.pi))


def test_no_round_costs_nothing() -> None:
    assert epsilon_interval({}, 1e-5) == (0.0, 0.0)
    assert delta_interval({}, 0.0) == (0.0, 0.0)


def test_a_round_without_noise_has_no_epsilon() -> None:
    rounds = {(0.01, 1.0): 100, (1e-9, 0.0): 1}
    assert epsilon_interval(rounds, 1e-2) == (math.inf, math.inf)
    assert delta_interval(rounds, 5.0) == (0.0, 1.0)


def test_hardly_any_noise_has_a_lower_end_only() -> None:
    low, up = epsilon_interval({(0.9, 0.01): 1}, 1e-5)
    assert up == math.inf
    assert 200.0 < low <= 1 / (2 * 0.01**2)
    assert delta_interval({(1.0, 0.01): 1}, 1.0)[1] == 1.0


@pytest.mark.parametrize("z", [1e-3, 0.01, 0.019])
@pytest.mark.parametrize("q", [1e-9, 1e-4, 0.2])
def test_who_is_sampled_counts_as_seen_where_there_is_hardly_any_noise(q: float, z: float) -> None:
    for epsilon in (0.0, 0.1, 3.0, 80.0):
        low, up = delta_interval({(q, z): 1}, epsilon)
        exact = one_round_delta(q, z, epsilon)
        assert low <= exact <= up <= 2.01 * q
        assert epsilon_interval({(q, z): 1}, up * 1.01)[1] <= epsilon + 1e-6
    assert epsilon_interval({(q, z): 1}, q / 2)[1] == math.inf


@pytest.mark.parametrize(
    ("pair", "share"),
    [
        (PoissonPair(1e-7, 1e-3), 1e-7),
        (ReplacePair(1e-7, 1e-3), 1e-7),
        (FixedSizePair(1e-7, 1e-3), 1e-7),
        (PoissonPair(1e-8, 1e-3, examples=10), 1e-7),
    ],
)
def test_rounds_with_hardly_any_noise_add_the_chance_of_being_sampled(
    pair: LossPair, share: float
) -> None:
    others, seen = {PoissonPair(0.01, 1.0): 1000}, -math.expm1(100 * math.log1p(-share))
    low, up = epsilon_interval_of({**others, pair: 100}, 2e-5)
    # A release that shows each user with that chance, and nothing else.
    assert low <= epsilon_interval_of(others, 2e-5 - seen)[1] * (1 + 1e-3)
    assert up >= epsilon_interval_of(others, (2e-5 - seen) / (1 - seen))[0]
    assert up <= 1.05 * epsilon_interval_of(others, 2e-5 - 2 * seen)[1]
    assert delta_interval_of({**others, pair: 100}, 50.0)[1] >= seen


def test_one_rare_round_with_hardly_any_noise_does_not_spoil_the_price_of_others() -> None:
    events = [poisson_gaussian(0.01, 1.0, 1000)]
    rare = [*events, poisson_gaussian(1e-9, 0.0199, 1000)]
    less = [*events, poisson_gaussian(1e-9, 0.0201, 1000)]
    for name in ("tight", "pld"):
        up = epsilon_of(rare, 1e-5, name).epsilon
        assert (
            epsilon_of(less, 1e-5, name).epsilon_low
            <= up
            <= 1.02 * epsilon_of(less, 1e-5, name).epsilon
        )
        assert up < epsilon_of(rare, 1e-5, "rdp").epsilon


@pytest.mark.parametrize("delta", [1e-60, 1e-2, 0.999])
@pytest.mark.parametrize(
    ("q", "z"), [(1e-300, 1.0), (1e-9, 1e9), (1.0, 1e12), (1.0 - 1e-16, 0.05), (0.3, 0.05)]
)
def test_extreme_rounds_have_valid_intervals(q: float, z: float, delta: float) -> None:
    for count in (1, 1000):
        low, up = epsilon_interval({(q, z): count}, delta)
        if delta == 1e-60 and z == 0.05 and count == 1000:
            assert low < up == math.inf  # of 1,000 rounds one shows what floats cannot hold
            continue
        assert 0 <= low <= up < math.inf
        below, above = delta_interval({(q, z): count}, up)
        assert below <= delta * (1 + 1e-9)
        assert 0 <= below <= above <= 1
    if z >= 1e9:
        assert up < 1e-3


@pytest.mark.parametrize("z", [0.05, 0.06, 0.3])
@pytest.mark.parametrize("delta", [1e-60, 1e-55, 1e-40])
@pytest.mark.parametrize("q", [0.3, 0.999])
def test_masses_too_small_for_a_float_count_as_infinite_losses(
    q: float, z: float, delta: float
) -> None:
    low, up = epsilon_interval({(q, z): 1}, delta)
    assert 0.0 < low <= up < math.inf
    assert one_round_delta(q, z, up) <= delta <= one_round_delta(q, z, low)


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_a_delta_below_what_floats_can_tell_is_refused(accountant: str) -> None:
    for delta in (9e-61, 1e-300, 5e-324):
        with pytest.raises(InvalidValueError, match="below 1e-60 no accountant can tell it from 0"):
            epsilon_of([poisson_gaussian(0.1, 1.0)], delta, accountant)
    assert epsilon_of([poisson_gaussian(0.1, 1.0)], 1e-60, accountant).epsilon < 200.0
    assert delta_of([poisson_gaussian(0.1, 1.0, 3)], 500.0, "tight") == 1e-60


def test_delta_of_certain_and_impossible_losses() -> None:
    below, above = delta_interval({(1.0, 0.1): 100}, 0.0)
    assert 1 - 2e-4 < below <= above == 1.0
    below, above = delta_interval({(0.01, 1.0): 10}, 500.0)
    assert 0.0 <= below <= above < 1e-99
    # All that adding a user can show in 10 rounds is 10·log(1/(1 − q)).
    below, above = delta_interval({(0.5, 1.0): 1}, 0.0)
    assert below <= one_round_delta(0.5, 1.0, 1e-30) <= above < 1.01 * below


def test_splitting_rounds_changes_nothing_but_the_order_of_sums() -> None:
    whole = epsilon_interval({(0.01, 1.0): 1000, (0.1, 3.0): 50}, 1e-6)
    turned = epsilon_interval({(0.1, 3.0): 50, (0.01, 1.0): 1000}, 1e-6)
    assert turned == pytest.approx(whole, rel=1e-12)
