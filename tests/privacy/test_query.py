"""Sensitivity, noise and events of the Gaussian queries."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.allocation import (
    dimension_shares,
    given_shares,
    noise_stddevs,
    proportional_shares,
)
from fedpriv.privacy.contribution import Clipping
from fedpriv.privacy.entropy import OperatingSystemEntropy, SeededEntropy
from fedpriv.privacy.gaussian import gaussian_noise
from fedpriv.privacy.groups import VectorGroup, flat, joint, layers, per_layer, split_by_dimension
from fedpriv.privacy.layout import Layout
from fedpriv.privacy.mechanism import PoissonGaussianMechanism
from fedpriv.privacy.query import GaussianAverageQuery, GaussianSumQuery
from fedpriv.privacy.sampling import PoissonSampling

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


def query(
    groups: tuple[VectorGroup, ...], z: float = 1.7, shares: str = "equal"
) -> GaussianSumQuery:
    of = proportional_shares(groups) if shares == "equal" else dimension_shares(LAYOUT, groups)
    return GaussianSumQuery(Clipping(LAYOUT, groups), noise_stddevs(groups, z, of))


def scaled_by_noise(sum_query: GaussianSumQuery, vector: np.ndarray) -> np.ndarray:
    """The vector with each group divided by its noise, where equation (1) lives."""
    scaled = vector.copy()
    for group, stddev in zip(sum_query.clipping.groups, sum_query.noise_stddevs, strict=True):
        for tensor in group.tensors:
            scaled[LAYOUT.slices[tensor]] /= stddev
    return scaled


@given(st.sampled_from(sorted(GROUPS)), st.sampled_from(["equal", "dimension"]), updates())
def test_one_user_moves_the_scaled_sum_by_at_most_one_over_z(
    strategy: str, shares: str, update: dict[str, np.ndarray]
) -> None:
    sum_query = query(GROUPS[strategy], z=1.7, shares=shares)
    moved = scaled_by_noise(sum_query, sum_query.clipping.contribution(update))
    assert np.all(np.isfinite(moved))
    assert float(np.linalg.norm(moved)) <= 1.0 / 1.7


@given(st.sampled_from(sorted(GROUPS)), updates())
def test_each_group_stays_within_its_norm(strategy: str, update: dict[str, np.ndarray]) -> None:
    sum_query = query(GROUPS[strategy])
    contribution = sum_query.clipping.contribution(update)
    for group in sum_query.clipping.groups:
        part = np.concatenate([contribution[LAYOUT.slices[t]] for t in group.tensors])
        assert float(np.linalg.norm(part)) <= group.clipping_norm * (1 + 1e-15)
    assert sum_query.clipping.admits(contribution, 1)


def test_a_bad_component_in_one_group_zeroes_all_groups() -> None:
    update = {name: np.ones(shape) for name, shape in zip(LAYOUT.names, LAYOUT.shapes, strict=True)}
    sum_query = query(GROUPS["mixed"])
    assert np.all(sum_query.clipping.contribution(update) != 0.0)
    update["a.b"][0] = np.nan
    np.testing.assert_array_equal(
        sum_query.clipping.contribution(update), np.zeros(LAYOUT.dimension)
    )


def test_joint_clipping_by_hand() -> None:
    layout = Layout(("x", "y"), ((1,), (1,)))
    sum_query = GaussianSumQuery(
        Clipping(layout, joint(layout, 1.0, {"x": 10.0, "y": 0.1})), (0.0,)
    )
    # u = (30/10, 0.4/0.1) = (3, 4) has norm 5, so it is scaled by 1/5.
    contribution = sum_query.clipping.contribution({"x": np.array([30.0]), "y": np.array([0.4])})
    np.testing.assert_allclose(contribution, [0.6, 0.8])
    released, _ = sum_query.release(contribution, OperatingSystemEntropy(), "test")
    np.testing.assert_allclose(released, [6.0, 0.08])


def test_joint_clipping_halves_the_variance_of_the_papers_example() -> None:
    # v_1 bounded by 100, v_2 by 1, and only one of them not zero for any user: with the bounds as
    # scales and S = 1 nobody is clipped, and each tensor has half the variance of separate
    # clipping at the same z (McMahan et al. 2018, section 3).
    layout = Layout(("v1", "v2"), ((4,), (4,)))
    z = 2.0
    together = joint(layout, 1.0, {"v1": 100.0, "v2": 1.0})
    apart = per_layer(layout, {"v1": ("v1",), "v2": ("v2",)}, {"v1": 100.0, "v2": 1.0})
    (stddev,) = noise_stddevs(together, z, (1.0,))
    first, second = noise_stddevs(apart, z, proportional_shares(apart))
    assert (stddev * 100.0) ** 2 == pytest.approx(first**2 / 2)
    assert (stddev * 1.0) ** 2 == pytest.approx(second**2 / 2)
    user = {"v1": np.array([100.0, 0, 0, 0]), "v2": np.zeros(4)}
    np.testing.assert_allclose(Clipping(layout, together).contribution(user)[:4], [1.0, 0, 0, 0])


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
        sum_query = GaussianSumQuery(Clipping(layout, groups), noise_stddevs(groups, z, shares))
        mechanism = PoissonGaussianMechanism.of(PoissonSampling(10, 0.5), sum_query)
        effective = mechanism.event.noise_multiplier
        assert z <= effective <= z * (1 + 1e-9)


def test_allocations_by_hand() -> None:
    groups = GROUPS["mixed"]  # dimensions 11 and 3 of 14, norms 1.3 and 0.2
    assert noise_stddevs(groups, 2.0, proportional_shares(groups)) == pytest.approx(
        (2.0 * math.sqrt(2) * 1.3, 2.0 * math.sqrt(2) * 0.2)
    )
    assert noise_stddevs(groups, 2.0, dimension_shares(LAYOUT, groups)) == pytest.approx(
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
        noise_stddevs(GROUPS["flat"], z, (1.0,))


@pytest.mark.parametrize("shares", [(0.5,), (0.5, 0.6), (0.0, 1.0), (1.5, -0.5)])
def test_bad_shares_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(InvalidValueError, match="noise shares are"):
        noise_stddevs(GROUPS["mixed"], 1.0, shares)


@pytest.mark.parametrize("strategy", sorted(GROUPS))
def test_noise_of_each_tensor_has_its_scale_and_no_other(strategy: str) -> None:
    layout = Layout(LAYOUT.names, ((1000, 5), (5000,), (5000,)))
    groups = GROUPS[strategy]
    sum_query = GaussianSumQuery(
        Clipping(layout, groups), noise_stddevs(groups, 1.1, proportional_shares(groups))
    )
    released, _ = sum_query.release(np.zeros(layout.dimension), SeededEntropy(7), "noise/0")
    for group, stddev in zip(groups, sum_query.noise_stddevs, strict=True):
        for tensor, scale in zip(group.tensors, group.scales, strict=True):
            noise = released[layout.slices[tensor]]
            expected = stddev * scale
            assert stats.kstest(noise / expected, "norm").pvalue > 1e-6
            for wrong in (2 / 3, 0.8, 1.25, 3 / 2):
                assert stats.kstest(noise / (wrong * expected), "norm").pvalue < 1e-6
    values, counts = np.unique(released, return_counts=True)
    assert len(values) == layout.dimension
    assert counts.max() == 1


def test_noise_is_fresh_for_each_purpose_and_group_and_pure_in_them() -> None:
    layout = Layout(("x", "y"), ((50,), (50,)))
    groups = per_layer(layout, {"x": ("x",), "y": ("y",)}, {"x": 1.0, "y": 1.0})
    sum_query = GaussianSumQuery(Clipping(layout, groups), (1.0, 1.0))
    zero = np.zeros(100)
    first, _ = sum_query.release(zero, SeededEntropy(1), "noise/0")
    again, _ = sum_query.release(zero, SeededEntropy(1), "noise/0")
    other, _ = sum_query.release(zero, SeededEntropy(1), "noise/1")
    np.testing.assert_array_equal(first, again)
    assert not np.any(first == other)
    assert not np.any(first[:50] == first[50:])
    np.testing.assert_array_equal(zero, np.zeros(100))
    system = [sum_query.release(zero, OperatingSystemEntropy(), "same")[0] for _ in range(2)]
    assert not np.any(system[0] == system[1])


def test_average_divides_by_the_constant_and_releases_events() -> None:
    groups = GROUPS["mixed"]
    sum_query = GaussianSumQuery(Clipping(LAYOUT, groups), (0.0, 0.0))
    total = np.arange(float(LAYOUT.dimension))
    average, events = GaussianAverageQuery(sum_query, 4.0).release(
        total, OperatingSystemEntropy(), "test"
    )
    np.testing.assert_allclose(average, total * sum_query.clipping.scales / 4.0)
    assert [(e.group, e.clipping_norm, e.noise_stddev) for e in events] == [
        ("left", 1.3, 0.0),
        ("right", 0.2, 0.0),
    ]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("strategy", sorted(GROUPS))
def test_a_release_is_what_it_is_for_each_component_by_itself(
    strategy: str, weighted: bool
) -> None:
    groups = GROUPS[strategy]
    names = (groups[0].name,) if weighted else ()
    sum_query = GaussianSumQuery(
        Clipping(LAYOUT, groups, weighted=names),
        noise_stddevs(groups, 1.3, proportional_shares(groups)),
    )
    average_query = GaussianAverageQuery(sum_query, 4.0, 2.5 if weighted else None)
    total = np.linspace(-3.0, 5.0, LAYOUT.dimension)
    before = total.copy()
    average, _ = average_query.release(total, SeededEntropy(3), "noise/0")
    np.testing.assert_array_equal(total, before)
    slices = LAYOUT.slices
    for group, stddev in zip(groups, sum_query.noise_stddevs, strict=True):
        divisor = 2.5 if group.name in names else 4.0
        key = SeededEntropy(3).key(f"noise/0/{group.name}")
        noise = iter(gaussian_noise(key, group.dimension(LAYOUT), stddev).tolist())
        for tensor, scale in zip(group.tensors, group.scales, strict=True):
            expected = [(x + next(noise)) * scale / divisor for x in total[slices[tensor]].tolist()]
            assert average[slices[tensor]].tolist() == expected
            assert set(average_query.noise_stddevs[slices[tensor]]) == {stddev * scale / divisor}
            assert average_query.tensor_stddevs[tensor] == stddev * scale / divisor


def test_an_empty_cohort_still_releases_noise() -> None:
    sum_query = query(GROUPS["flat"])
    mechanism = PoissonGaussianMechanism.of(PoissonSampling(100, 0.1), sum_query)
    average, event = mechanism.release(
        np.zeros(LAYOUT.dimension), OperatingSystemEntropy(), "noise"
    )
    assert np.all(average != 0.0)
    assert event == mechanism.event


@pytest.mark.parametrize("denominator", [0.0, -1.0, math.nan, math.inf])
def test_bad_denominators_are_refused(denominator: float) -> None:
    with pytest.raises(InvalidValueError, match="denominator is"):
        GaussianAverageQuery(query(GROUPS["flat"]), denominator)


def test_a_denominator_that_is_not_the_expected_cohort_size_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="expected cohort size"):
        PoissonGaussianMechanism(
            PoissonSampling(100, 0.1), GaussianAverageQuery(query(GROUPS["flat"]), 11.0)
        )


@pytest.mark.parametrize(
    ("total", "users", "admitted"),
    [
        (np.zeros(14), 0, True),
        (np.full(14, 0.7 / math.sqrt(14)), 1, True),
        (np.full(14, 0.71 / math.sqrt(14)), 1, False),
        (np.full(14, 0.71 / math.sqrt(14)), 2, True),
        (np.full(14, 1e-9), 0, False),
        (np.full(14, np.nan), 5, False),
        (np.zeros(13), 1, False),
        (np.zeros((14, 1)), 1, False),
    ],
)
def test_admits_only_what_that_many_users_can_sum_to(
    total: np.ndarray, users: int, admitted: bool
) -> None:
    assert query(GROUPS["flat"]).clipping.admits(total, users) is admitted
