"""Sensitivity, noise and events of the Gaussian queries."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from fedpriv.errors import InvalidValueError
from fedpriv.experiment.grouping import dimension_shares, proportional_shares, split_by_dimension
from fedpriv.ledger.events import RoundEvent
from fedpriv.privacy import noise
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import (
    MOST_USERS,
    GaussianMechanism,
    GaussianQuery,
    given_shares,
    noise_stddevs,
)
from fedpriv.privacy.layout import Layout, VectorGroup, flat, joint, layers, per_layer
from fedpriv.privacy.noise import (
    LARGEST_STDDEV,
    OperatingSystemEntropy,
    SeededEntropy,
    rounded_gaussian,
)
from fedpriv.privacy.sampling import PoissonSampling
from tests.privacy.exact import squares, steps_of

LAYOUT = Layout(("a.w", "a.b", "c.w"), ((3, 2), (3,), (5,)))
GROUPS = {
    "flat": flat(LAYOUT, 0.7),
    "per-layer": per_layer(LAYOUT, layers(LAYOUT), split_by_dimension(LAYOUT, layers(LAYOUT), 2.0)),
    "joint": joint(LAYOUT, 1.5, {"a.w": 0.1, "a.b": 3.0, "c.w": 1.0}),
    "mixed": (
        VectorGroup("left", ("a.w", "c.w"), 1.3, (0.5, 4.0)),
        VectorGroup("right", ("a.b",), 0.2, (1.0,)),
    ),
}
dtypes = st.sampled_from([np.float16, np.float32, np.float64])


@st.composite
def updates(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Anything that a user might send, NaN, inf, 1e38 and wrong shapes included."""
    update = {}
    for name, shape in zip(LAYOUT.names, LAYOUT.shapes, strict=True):
        dtype = draw(dtypes)
        if draw(st.integers(0, 20)) == 0:
            wrong = (draw(st.integers(0, 3)),)
            update[name] = np.ones(wrong, dtype)
        elif draw(st.integers(0, 20)) > 0:
            elements = st.floats(width=np.dtype(dtype).itemsize * 8)
            update[name] = draw(hnp.arrays(dtype, shape, elements=elements))
    return update


def norms(groups: tuple[VectorGroup, ...]) -> tuple[float, ...]:
    return tuple(group.clipping_norm for group in groups)


def query(groups: tuple[VectorGroup, ...], z: float = 1.7, shares: str = "equal") -> GaussianQuery:
    of = proportional_shares(groups) if shares == "equal" else dimension_shares(LAYOUT, groups)
    return GaussianQuery(Clipping(LAYOUT, groups), noise_stddevs(norms(groups), z, of))


def part(vector: np.ndarray, group: VectorGroup) -> np.ndarray:
    return np.concatenate([vector[LAYOUT.slices[tensor]] for tensor in group.tensors])


def moved(sum_query: GaussianQuery, contribution: np.ndarray) -> Fraction:
    """‖·‖² of a contribution with each group divided by its noise, where equation (1) lives."""
    return sum(
        squares(part(contribution, group))
        * (steps_of(group.clipping_norm)[0] / Fraction(stddev)) ** 2
        for group, stddev in zip(sum_query.clipping.groups, sum_query.noise_stddevs, strict=True)
    )


@given(
    st.sampled_from(sorted(GROUPS)),
    st.sampled_from(["equal", "dimension"]),
    st.floats(1e-3, 1e3),
    updates(),
)
def test_one_user_moves_the_scaled_sum_by_at_most_one_over_z(
    strategy: str, shares: str, z: float, update: dict[str, np.ndarray]
) -> None:
    sum_query = query(GROUPS[strategy], z=z, shares=shares)
    assert moved(sum_query, sum_query.clipping.contribution(update)) <= 1 / Fraction(z) ** 2


@pytest.mark.parametrize("strategy", sorted(GROUPS))
def test_some_user_moves_it_by_nearly_that(strategy: str) -> None:
    sum_query = query(GROUPS[strategy], z=1.7)
    long = {n: np.full(s, 1e6) for n, s in zip(LAYOUT.names, LAYOUT.shapes, strict=True)}
    found = moved(sum_query, sum_query.clipping.contribution(long))
    assert found >= (1 - Fraction(1, 2**18)) / Fraction(1.7) ** 2


@given(st.sampled_from(sorted(GROUPS)), updates())
def test_each_group_stays_within_its_bound(strategy: str, update: dict[str, np.ndarray]) -> None:
    sum_query = query(GROUPS[strategy])
    contribution = sum_query.clipping.contribution(update)
    for group in sum_query.clipping.groups:
        assert squares(part(contribution, group)) <= steps_of(group.clipping_norm)[1]
    assert sum_query.clipping.admits(contribution, 1, 1)


def test_a_bad_component_in_one_group_zeroes_all_groups() -> None:
    update = {name: np.ones(shape) for name, shape in zip(LAYOUT.names, LAYOUT.shapes, strict=True)}
    sum_query = query(GROUPS["mixed"])
    assert np.all(sum_query.clipping.contribution(update) != 0)
    update["a.b"][0] = np.nan
    np.testing.assert_array_equal(
        sum_query.clipping.contribution(update), np.zeros(LAYOUT.dimension)
    )


def test_joint_clipping_by_hand() -> None:
    layout = Layout(("x", "y"), ((1,), (1,)))
    sum_query = GaussianQuery(Clipping(layout, joint(layout, 1.0, {"x": 10.0, "y": 0.1})), (0.0,))
    # u = (30/10, 0.4/0.1) = (3, 4) has norm 5, so it is scaled by 1/5; steps are 2^-24.
    contribution = sum_query.clipping.contribution({"x": np.array([30.0]), "y": np.array([0.4])})
    np.testing.assert_allclose(contribution, [0.6 * 2**24, 0.8 * 2**24], rtol=2.0**-22)
    released, _ = sum_query.noised_average(contribution, OperatingSystemEntropy(), "test")
    assert released.tolist() == [
        int(contribution[0]) * 10.0 * 2.0**-24,
        int(contribution[1]) * (0.1 * 2.0**-24),
    ]
    np.testing.assert_allclose(released, [6.0, 0.08], rtol=2.0**-22)


def test_joint_clipping_halves_the_variance_of_the_papers_example() -> None:
    # v_1 bounded by 100, v_2 by 1, and only one of them not zero for any user: with the bounds as
    # scales and S = 1 nobody is clipped, and each tensor has half the variance of separate
    # clipping at the same z (McMahan et al. 2018, section 3).
    layout = Layout(("v1", "v2"), ((4,), (4,)))
    z = 2.0
    together = joint(layout, 1.0, {"v1": 100.0, "v2": 1.0})
    apart = per_layer(layout, {"v1": ("v1",), "v2": ("v2",)}, {"v1": 100.0, "v2": 1.0})
    (stddev,) = noise_stddevs(norms(together), z, (1.0,))
    first, second = noise_stddevs(norms(apart), z, proportional_shares(apart))
    assert (stddev * 100.0) ** 2 == pytest.approx(first**2 / 2)
    assert (stddev * 1.0) ** 2 == pytest.approx(second**2 / 2)
    user = {"v1": np.array([100.0, 0, 0, 0]), "v2": np.zeros(4)}
    clipping = Clipping(layout, together)
    assert clipping.contribution(user).tolist() == [2**24, 0, 0, 0, 0, 0, 0, 0]


@given(
    st.floats(1e-3, 1e3),
    st.lists(st.tuples(st.floats(1e-6, 1e6), st.floats(1e-3, 1e3)), min_size=1, max_size=6),
)
def test_any_allocation_keeps_the_effective_noise_multiplier(
    z: float, groups_and_weights: list[tuple[float, float]]
) -> None:
    groups = tuple(
        VectorGroup(f"g{i}", (f"t{i}",), norm, (1.0,))
        for i, (norm, _) in enumerate(groups_and_weights)
    )
    layout = Layout(tuple(f"t{i}" for i in range(len(groups))), tuple((2,) for _ in groups))
    weights = {f"g{i}": weight for i, (_, weight) in enumerate(groups_and_weights)}
    for shares in (
        proportional_shares(groups),
        dimension_shares(layout, groups),
        given_shares(groups, weights),
    ):
        stddevs = noise_stddevs(norms(groups), z, shares)
        moved = sum(
            (Fraction(group.clipping_norm) / Fraction(stddev)) ** 2
            for group, stddev in zip(groups, stddevs, strict=True)
        )
        assert Fraction(z) ** 2 <= 1 / moved <= Fraction(z * (1 + 1e-9)) ** 2
        if all(d <= 2**15 * g.clipping_norm for g, d in zip(groups, stddevs, strict=True)):
            sum_query = GaussianQuery(Clipping(layout, groups), stddevs)
            mechanism = GaussianMechanism(
                PoissonSampling(10, 0.5), replace(sum_query, denominator=5.0)
            )
            assert z <= mechanism.event.noise_multiplier <= z * (1 + 1e-9)


def test_allocations_by_hand() -> None:
    groups = GROUPS["mixed"]  # dimensions 11 and 3 of 14, norms 1.3 and 0.2
    assert noise_stddevs(norms(groups), 2.0, proportional_shares(groups)) == pytest.approx(
        (2.0 * math.sqrt(2) * 1.3, 2.0 * math.sqrt(2) * 0.2)
    )
    assert noise_stddevs(norms(groups), 2.0, dimension_shares(LAYOUT, groups)) == pytest.approx(
        (2.0 * 1.3 * math.sqrt(14 / 11), 2.0 * 0.2 * math.sqrt(14 / 3))
    )
    assert given_shares(groups, {"left": 3.0, "right": 1.0}) == (0.75, 0.25)


@pytest.mark.parametrize(
    ("weights", "message"),
    [({"left": 1.0}, "right"), ({"left": 1.0, "right": 0.0}, "weight of group 'right' is 0.0")],
)
def test_bad_weights_are_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        given_shares(GROUPS["mixed"], weights)


@pytest.mark.parametrize("z", [-1.0, math.nan, math.inf])
def test_bad_noise_multipliers_are_refused(z: float) -> None:
    with pytest.raises(InvalidValueError, match="noise_multiplier is"):
        noise_stddevs(norms(GROUPS["flat"]), z, (1.0,))


@pytest.mark.parametrize("shares", [(0.5,), (0.5, 0.6), (0.0, 1.0), (1.5, -0.5)])
def test_bad_shares_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(InvalidValueError, match="noise shares are"):
        noise_stddevs(norms(GROUPS["mixed"]), 1.0, shares)


@pytest.mark.parametrize("strategy", sorted(GROUPS))
def test_noise_of_each_tensor_has_its_scale_and_no_other(strategy: str) -> None:
    layout = Layout(LAYOUT.names, ((1000, 5), (5000,), (5000,)))
    groups = GROUPS[strategy]
    sum_query = GaussianQuery(
        Clipping(layout, groups), noise_stddevs(norms(groups), 1.1, proportional_shares(groups))
    )
    released, _ = sum_query.noised_average(
        np.zeros(layout.dimension, np.int64), SeededEntropy(7), "noise/0"
    )
    for group, stddev in zip(groups, sum_query.noise_stddevs, strict=True):
        for tensor, scale in zip(group.tensors, group.scales, strict=True):
            found = released[layout.slices[tensor]]
            expected = stddev * scale
            assert stats.kstest(found / expected, "norm").pvalue > 1e-6
            for wrong in (2 / 3, 0.8, 1.25, 3 / 2):
                assert stats.kstest(found / (wrong * expected), "norm").pvalue < 1e-6
            # Whole steps, of which σ is millions: few of them twice.
            steps = np.unique(found / (scale * group.granularity))
            np.testing.assert_allclose(steps, np.rint(steps), rtol=1e-15)
            assert steps.size > 0.99 * found.size


def test_noise_is_fresh_for_each_purpose_and_group_and_pure_in_them() -> None:
    layout = Layout(("x", "y"), ((50,), (50,)))
    groups = per_layer(layout, {"x": ("x",), "y": ("y",)}, {"x": 1.0, "y": 1.0})
    # So loud that two alike among a few hundred are as good as impossible.
    sum_query = GaussianQuery(Clipping(layout, groups), (2.0**15, 2.0**15))
    zero = np.zeros(100, np.int64)
    first, _ = sum_query.noised_average(zero, SeededEntropy(1), "noise/0")
    again, _ = sum_query.noised_average(zero, SeededEntropy(1), "noise/0")
    other, _ = sum_query.noised_average(zero, SeededEntropy(1), "noise/1")
    np.testing.assert_array_equal(first, again)
    assert not np.any(first == other)
    assert not np.any(first[:50] == first[50:])
    np.testing.assert_array_equal(zero, np.zeros(100))
    system = [sum_query.noised_average(zero, OperatingSystemEntropy(), "same")[0] for _ in range(2)]
    assert not np.any(system[0] == system[1])


def test_average_divides_by_the_constant_and_releases_events() -> None:
    groups = GROUPS["mixed"]
    sum_query = GaussianQuery(Clipping(LAYOUT, groups), (0.0, 0.0))
    total = np.arange(LAYOUT.dimension) * 2**20
    average, events = replace(sum_query, denominator=4.0).noised_average(
        total, OperatingSystemEntropy(), "test"
    )
    np.testing.assert_allclose(average, sum_query.clipping.in_units(total) / 4.0, rtol=1e-15)
    assert [(e.group, e.clipping_norm, e.noise_stddev, e.granularity) for e in events] == [
        ("left", 1.3, 0.0, 2.0**-24),
        ("right", 0.2, 0.0, 2.0**-27),
    ]
    assert events == sum_query.events


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("strategy", sorted(GROUPS))
def test_a_release_is_what_it_is_for_each_component_by_itself(
    strategy: str, weighted: bool
) -> None:
    groups = GROUPS[strategy]
    names = (groups[0].name,) if weighted else ()
    average_query = GaussianQuery(
        Clipping(LAYOUT, groups, weighted=names),
        noise_stddevs(norms(groups), 1.3, proportional_shares(groups)),
        4.0,
        2.5 if weighted else None,
    )
    total = np.linspace(-3e9, 5e9, LAYOUT.dimension).astype(np.int64)
    before = total.copy()
    average, _ = average_query.noised_average(total, SeededEntropy(3), "noise/0")
    np.testing.assert_array_equal(total, before)
    slices = LAYOUT.slices
    for group, stddev in zip(groups, average_query.noise_stddevs, strict=True):
        divisor = 2.5 if group.name in names else 4.0
        key = SeededEntropy(3).key(f"noise/0/{group.name}")
        step = float(steps_of(group.clipping_norm)[0])
        drawn = iter(rounded_gaussian(key, group.dimension(LAYOUT), stddev / step).tolist())
        for tensor, scale in zip(group.tensors, group.scales, strict=True):
            expected = [
                (a + next(drawn)) * (scale * step) / divisor for a in total[slices[tensor]].tolist()
            ]
            assert average[slices[tensor]].tolist() == expected
            assert average_query.tensor_stddevs[tensor] == stddev * scale / divisor


def test_two_sums_that_differ_by_one_step_differ_by_one_step_when_noised() -> None:
    # No digit of a release is the sum's alone, or the noise's alone.
    sum_query = query(GROUPS["flat"])
    total = np.arange(LAYOUT.dimension) * 12_345_678
    one, other = (
        sum_query.noised_average(total + more, SeededEntropy(2), "noise")[0] for more in (0, 1)
    )
    step = sum_query.clipping.in_units(np.ones(one.size))
    np.testing.assert_array_equal(other - one, step)


@pytest.mark.parametrize(
    "total",
    [
        np.zeros(LAYOUT.dimension),
        np.zeros(LAYOUT.dimension, np.float32),
        np.zeros(LAYOUT.dimension, np.int32),
        np.zeros(LAYOUT.dimension, np.uint64),
        np.zeros(LAYOUT.dimension - 1, np.int64),
        np.zeros((LAYOUT.dimension, 1), np.int64),
    ],
    ids=lambda total: f"{total.dtype}{list(total.shape)}",
)
def test_only_integers_of_the_right_shape_are_released(total: np.ndarray) -> None:
    sum_query = query(GROUPS["mixed"])
    for of in (sum_query, replace(sum_query, denominator=4.0)):
        with pytest.raises(InvalidValueError, match=r"total is .*; it must be int64\[14\]"):
            of.noised_average(total, OperatingSystemEntropy(), "test")


@given(st.floats(1e-30, 1e30), st.floats(0.0, 4.0))
@example(1.0, 1.0)
@example(1.9999999999999998, 2.0)
def test_noise_of_up_to_two_to_the_15_norms_is_legal_and_twice_that_never_is(
    norm: float, ratio: float
) -> None:
    clipping = Clipping(Layout(("x",), ((2,),)), flat(Layout(("x",), ((2,),)), norm))
    stddev = ratio * 2.0**15 * norm
    most = Fraction(LARGEST_STDDEV) * steps_of(norm)[0]
    assert Fraction(2**15) * Fraction(norm) <= most <= Fraction(2**16) * Fraction(norm)
    if Fraction(stddev) <= most:
        sums = GaussianQuery(clipping, (stddev,))
        released, _ = sums.noised_average(np.zeros(2, np.int64), SeededEntropy(0), "noise")
        assert np.all(np.isfinite(released))
    else:
        with pytest.raises(InvalidValueError, match=r"it must be at most 2\^15 times"):
            GaussianQuery(clipping, (stddev,))


@pytest.mark.parametrize("stddevs", [(), (1.0,), (1.0, 1.0, 1.0)])
def test_noise_is_given_for_each_group(stddevs: tuple[float, ...]) -> None:
    with pytest.raises(InvalidValueError, match=f"{len(stddevs)} noise_stddevs are given for 2"):
        GaussianQuery(Clipping(LAYOUT, GROUPS["mixed"]), stddevs)


@pytest.mark.parametrize("stddev", [-1.0, math.nan, math.inf])
def test_noise_that_no_ledger_would_accept_is_refused(stddev: float) -> None:
    with pytest.raises(InvalidValueError, match="noise_stddev of group 'left' is"):
        GaussianQuery(Clipping(LAYOUT, GROUPS["mixed"]), (stddev, 1.0))


def test_sums_of_most_users_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = math.nextafter(2.0, 0.0)  # of all norms, the one with the longest contributions
    layout = Layout(("x",), ((2,),))
    group = flat(layout, norm)
    longest = math.isqrt(max(steps_of(norm)[1], steps_of(1.0)[1]))
    total = MOST_USERS * longest
    assert total + 2**45 < 2**63
    sums = GaussianQuery(Clipping(layout, group), (LARGEST_STDDEV * group[0].granularity,))
    mechanism = GaussianMechanism(
        PoissonSampling(MOST_USERS, 1.0), replace(sums, denominator=float(MOST_USERS))
    )
    for sign, second in ((1, 0), (-1, 2**63)):
        # The largest noise there is but for a chance of 2^-64, in the same direction.
        given = np.array([0, second], np.uint64)
        monkeypatch.setattr(noise, "words", lambda *_, given=given, **__: given)
        most = int(rounded_gaussian(SeededEntropy(0).key("noise/update"), 1, LARGEST_STDDEV)[0])
        assert 9 * 2**40 < sign * most < 2**45
        sums_up = np.array([sign * total, 0])
        average, _ = mechanism.query.noised_average(sums_up, SeededEntropy(0), "noise")
        expected = (sign * total + most) * group[0].granularity / MOST_USERS
        assert average[0] == pytest.approx(expected, rel=1e-15)


def test_so_many_users_that_sums_could_overflow_are_refused() -> None:
    sampling = PoissonSampling(MOST_USERS + 1, 0.5)
    with pytest.raises(InvalidValueError, match=f"population is {MOST_USERS + 1}; sums of more"):
        GaussianMechanism(sampling, query(GROUPS["flat"]))


def test_an_empty_cohort_still_releases_noise() -> None:
    sum_query = query(GROUPS["flat"])
    mechanism = GaussianMechanism(PoissonSampling(100, 0.1), replace(sum_query, denominator=10.0))
    average, queries = mechanism.query.noised_average(
        np.zeros(LAYOUT.dimension, np.int64), OperatingSystemEntropy(), "noise"
    )
    assert np.all(average != 0.0)
    assert queries == mechanism.event.queries


@pytest.mark.parametrize("denominator", [0.0, -1.0, math.nan, math.inf])
def test_bad_denominators_are_refused(denominator: float) -> None:
    with pytest.raises(InvalidValueError, match="denominator is"):
        replace(query(GROUPS["flat"]), denominator=denominator)
    weighted = Clipping(LAYOUT, GROUPS["flat"], weighted=("update",))
    with pytest.raises(InvalidValueError, match="denominator is"):
        GaussianQuery(weighted, (1.0,), 4.0, denominator)


@pytest.mark.parametrize("floor", [0.0, -0.5, 1.5, math.nan])
def test_bad_floors_are_refused(floor: float) -> None:
    weighted = Clipping(LAYOUT, GROUPS["flat"], weighted=("update",))
    with pytest.raises(InvalidValueError, match="floor is"):
        GaussianQuery(weighted, (1.0,), 4.0, 2.0, floor)


def test_weighted_groups_need_a_denominator_of_their_own() -> None:
    clipping = Clipping(LAYOUT, GROUPS["mixed"], weighted=("left",))
    with pytest.raises(InvalidValueError, match=r"groups \('left',\) are weighted"):
        GaussianQuery(clipping, (1.0, 1.0), 4.0)


def test_a_denominator_that_is_not_the_expected_cohort_size_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="expected cohort size"):
        GaussianMechanism(
            PoissonSampling(100, 0.1), replace(query(GROUPS["flat"]), denominator=11.0)
        )


LONGEST = math.isqrt(steps_of(0.7)[1] // 14)


@pytest.mark.parametrize(
    ("total", "users", "admitted"),
    [
        (np.zeros(14, np.int64), 0, True),
        (np.full(14, LONGEST), 1, True),
        (np.full(14, LONGEST + 1), 1, False),
        (np.full(14, LONGEST + 1), 2, True),
        (np.full(14, 1), 0, False),
        (np.full(14, 2**63 - 1), 5, False),
        (np.zeros(14), 1, False),
        (np.zeros(13, np.int64), 1, False),
        (np.zeros((14, 1), np.int64), 1, False),
    ],
)
def test_admits_only_what_that_many_users_can_sum_to(
    total: np.ndarray, users: int, admitted: bool
) -> None:
    assert query(GROUPS["flat"]).clipping.admits(total, users, users) is admitted


@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_noise_is_rounded_up_whatever_numbers_are_given(kind: type[np.floating]) -> None:
    """In fewer bits, what covers the roundings would be lost."""
    groups = tuple(replace(g, clipping_norm=kind(g.clipping_norm)) for g in GROUPS["mixed"])
    for z in np.linspace(0.3, 3.0, 50).astype(kind):
        stddevs = noise_stddevs(norms(groups), z, (kind(0.25), kind(0.75)))
        events = GaussianQuery(Clipping(LAYOUT, groups), stddevs).events
        assert RoundEvent(PoissonSampling(10, 0.5).event(), events).noise_multiplier >= float(z)
