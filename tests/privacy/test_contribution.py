"""What one user adds: groups of an update, metrics, weights and the indicator together."""

import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.adaptive import indicator_group, indicator_of
from fedpriv.privacy.allocation import noise_stddevs, proportional_shares
from fedpriv.privacy.contribution import Clipping, Indicator
from fedpriv.privacy.entropy import SeededEntropy
from fedpriv.privacy.groups import VectorGroup, equal_split, flat, joint, layers, per_layer
from fedpriv.privacy.layout import Layout, Tensors
from fedpriv.privacy.metrics import Metric
from fedpriv.privacy.query import GaussianSumQuery

UPDATE = (
    VectorGroup("left", ("a", "b"), 1.3, (0.5, 4.0)),
    VectorGroup("right", ("c",), 0.2, (1.0,)),
)
METRIC = Metric("counts", (4,), radius=2.0)
INDICATOR = indicator_of(UPDATE)
SHAPES = {"a": (3,), "b": (2, 2), "c": (5,), METRIC.tensor: (4,)}
LAYOUT = Layout((*SHAPES, INDICATOR.tensor), (*SHAPES.values(), (2,)))
GROUPS = (*UPDATE, METRIC.group, indicator_group(INDICATOR))
CLIPPING = Clipping(LAYOUT, GROUPS, INDICATOR, ("left", "right"))
# Groups whose tensors do not lie side by side, or lie in another order than they are named.
SCATTERED = (
    VectorGroup("left", ("a", "c"), 1.3, (1e-12, 1.0)),
    VectorGroup("right", (METRIC.tensor, "b"), 0.2, (1.0, 1.0)),
)
WHOLE = flat(Layout(tuple(SHAPES), tuple(SHAPES.values())), 0.7)
CLIPPINGS = {
    "mixed": CLIPPING,
    "scattered": Clipping(LAYOUT, (*SCATTERED, indicator_group(INDICATOR)), INDICATOR, ("right",)),
    "one group": Clipping(Layout(tuple(SHAPES), tuple(SHAPES.values())), WHOLE),
}
weights = st.one_of(st.floats(0.0, 1.0), st.floats())


@st.composite
def sent(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Anything that a user might send, NaN, inf, 1e38 and wrong shapes included."""
    tensors = {}
    for name, shape in SHAPES.items():
        dtype = draw(st.sampled_from([np.float32, np.float64]))
        shapes = st.tuples(st.integers(0, 3)) if draw(st.integers(0, 20)) == 0 else st.just(shape)
        width = np.dtype(dtype).itemsize * 8
        tensors[name] = draw(hnp.arrays(dtype, shapes, elements=st.floats(width=width)))
    return tensors


def part(vector: np.ndarray, group: VectorGroup) -> np.ndarray:
    return np.concatenate([vector[LAYOUT.slices[tensor]] for tensor in group.tensors])


def obvious(clipping: Clipping, tensors: Tensors, weight: float) -> np.ndarray:
    """The contribution tensor by tensor in as many arrays as it takes; NaN if it is close to S."""
    slices = clipping.layout.slices
    vector, whole = np.zeros(clipping.layout.dimension), {}
    if not 0.0 <= weight <= 1.0 or any(tensors[n].shape != s for n, s in SHAPES.items()):
        return vector
    if not all(np.all(np.isfinite(tensor)) for tensor in tensors.values()):
        return vector
    for group in clipping.groups:
        if group.tensors == (INDICATOR.tensor,):
            continue
        wide = [tensors[name].astype(np.float64).ravel() for name in group.tensors]
        with np.errstate(over="ignore"):
            part = np.concatenate([w / a for w, a in zip(wide, group.scales, strict=True)])
        peak = float(np.max(np.abs(part), initial=0.0)) or 1.0
        if math.isinf(peak):
            part, whole[group.name] = np.zeros_like(part), False
        else:
            length = math.hypot(*(part / peak))
            ratio = length * (peak / group.clipping_norm)
            if abs(ratio - 1.0) < 1e-12:
                return np.full_like(vector, np.nan)
            whole[group.name] = ratio < 1.0
            part = part if ratio < 1.0 else part / peak * (group.clipping_norm / length)
        part = part * weight if group.name in clipping.weighted else part
        for name in group.tensors:
            size = clipping.layout.sizes[name]
            vector[slices[name]], part = part[:size], part[size:]
    if clipping.indicator is not None:
        said = [0.5 if whole[name] else -0.5 for name in clipping.indicator.groups]
        vector[slices[INDICATOR.tensor]] = said
    return vector


def constant(**values: float) -> dict[str, np.ndarray]:
    return {name: np.full(shape, values.get(name, 0.0)) for name, shape in SHAPES.items()}


@given(st.sampled_from(sorted(CLIPPINGS)), sent(), weights)
@example("scattered", constant(a=1e300), 0.5)  # overflows divided by its scale
@example("scattered", constant(a=1e300, b=np.inf), 0.5)
@example("mixed", constant(c=1e200, a=1e-200), 0.5)  # its square overflows
@example("one group", constant(a=1e200, c=-1e300), 1.0)
@example("one group", constant(a=1.0, c=np.nan), 1.0)
def test_equals_the_obvious_way_and_stays_exactly_within_every_norm(
    name: str, tensors: dict[str, np.ndarray], weight: float
) -> None:
    clipping = CLIPPINGS[name]
    contribution = clipping.contribution(tensors, weight)
    expected = obvious(clipping, tensors, weight)
    if not np.any(np.isnan(expected)):
        np.testing.assert_allclose(contribution, expected, rtol=1e-14, atol=1e-290)
    for group in clipping.groups:
        square = sum(Fraction(float(x)) ** 2 for x in part(contribution, group))
        assert square <= Fraction(group.clipping_norm) ** 2
    assert clipping.admits(contribution, 1)


@given(
    st.sampled_from(sorted(CLIPPINGS)),
    hnp.arrays(np.float64, 18, elements=st.floats(-1.0, 1.0) | st.floats()),
    st.integers(0, 5),
)
def test_a_total_is_admitted_if_every_group_is_within_its_norms(
    name: str, total: np.ndarray, users: int
) -> None:
    clipping = CLIPPINGS[name]
    total = total[: clipping.layout.dimension]
    expected = bool(np.all(np.isfinite(total)))
    if expected:
        for group in clipping.groups:
            square = sum(Fraction(float(x)) ** 2 for x in part(total, group))
            most = (users * Fraction(group.clipping_norm)) ** 2
            if most < square < most * (1 + Fraction(1, 10**12)) + Fraction(1, 10**300):
                return  # rounding and underflow decide
            expected = expected and square <= most
    assert clipping.admits(total, users) is expected


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_no_number_of_users_sums_to_what_is_not_finite(bad: float) -> None:
    total = np.zeros(LAYOUT.dimension)
    total[3] = bad
    assert not CLIPPING.admits(total, 10**308)


@pytest.mark.parametrize("name", sorted(CLIPPINGS))
def test_parts_are_the_positions_of_each_groups_tensors_in_their_order(name: str) -> None:
    clipping = CLIPPINGS[name]
    positions = np.arange(clipping.layout.dimension)
    for group, indices in clipping.parts:
        np.testing.assert_array_equal(indices, part(positions, group))
        assert indices.dtype == np.int64
    assert tuple(group for group, _ in clipping.parts) == clipping.groups


LARGE = Layout(("0.weight", "0.bias", "2.weight", "2.bias"), ((700, 400), (700,), (10, 700), (10,)))
STRATEGIES = {
    "flat": flat(LARGE, 1.0),
    "per layer": per_layer(LARGE, layers(LARGE), equal_split(layers(LARGE), 1.0)),
    "joint": joint(LARGE, 1.0, dict(zip(LARGE.names, (0.5, 2.0, 3.0, 1.0), strict=True))),
}


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.parametrize("size", [1e-4, 1.0, np.nan])
def test_large_updates_take_no_memory_but_the_vector(strategy: str, size: float) -> None:
    rng = np.random.default_rng(0)
    tensors = {
        name: (size * rng.standard_normal(shape[::-1])).astype(np.float32).T
        for name, shape in zip(LARGE.names, LARGE.shapes, strict=True)
    }
    clipping = Clipping(LARGE, STRATEGIES[strategy])
    tracemalloc.start()
    try:
        contribution = clipping.contribution(tensors)
        made = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        held = tracemalloc.get_traced_memory()[0]
        assert clipping.admits(contribution, 1)
        taken = tracemalloc.get_traced_memory()[1] - held
    finally:
        tracemalloc.stop()
    assert made < contribution.nbytes + 2**16
    assert taken < 2**16
    for group in clipping.groups:
        slow = np.concatenate(
            [
                tensors[name].astype(np.longdouble).ravel() / scale
                for name, scale in zip(group.tensors, group.scales, strict=True)
            ]
        )
        slow = np.zeros_like(slow) if np.isnan(size) else slow
        slow *= min(1.0, group.clipping_norm / (float(np.sqrt(np.sum(slow**2))) or 1.0))
        found = np.concatenate([contribution[LARGE.slices[name]] for name in group.tensors])
        np.testing.assert_allclose(found, slow.astype(np.float64), rtol=1e-9)


@given(sent(), weights)
def test_any_user_moves_all_groups_together_by_at_most_one_over_z(
    tensors: dict[str, np.ndarray], weight: float
) -> None:
    z = 1.7
    stddevs = noise_stddevs(GROUPS, z, proportional_shares(GROUPS))
    contribution = CLIPPING.contribution(tensors, weight)
    moved = [part(contribution, g) / s for g, s in zip(GROUPS, stddevs, strict=True)]
    assert np.all(np.isfinite(contribution))
    assert float(np.linalg.norm(np.concatenate(moved))) <= 1.0 / z
    assert CLIPPING.admits(contribution, 1)


def test_the_indicator_says_what_was_not_clipped() -> None:
    small = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    large = {**small, "c": np.full(5, 0.1)}
    np.testing.assert_array_equal(CLIPPING.contribution(small)[-2:], [0.5, 0.5])
    np.testing.assert_array_equal(CLIPPING.contribution(large)[-2:], [0.5, -0.5])
    broken = {**large, METRIC.tensor: np.full(4, np.nan)}
    np.testing.assert_array_equal(CLIPPING.contribution(broken), np.zeros(LAYOUT.dimension))


def test_weights_scale_the_update_after_clipping_and_nothing_else() -> None:
    tensors = {name: np.full(shape, 0.3) for name, shape in SHAPES.items()}
    whole, tenth = CLIPPING.contribution(tensors), CLIPPING.contribution(tensors, 0.1)
    end = LAYOUT.slices["c"].stop
    np.testing.assert_allclose(tenth[:end], 0.1 * whole[:end])
    np.testing.assert_array_equal(tenth[end:], whole[end:])
    assert np.linalg.norm(part(whole, UPDATE[1])) == pytest.approx(0.2)


@pytest.mark.parametrize("weight", [-0.1, 1.0000001, math.nan, math.inf])
def test_a_weight_that_is_none_counts_as_zero(weight: float) -> None:
    tensors = {name: np.ones(shape) for name, shape in SHAPES.items()}
    np.testing.assert_array_equal(
        CLIPPING.contribution(tensors, weight), np.zeros(LAYOUT.dimension)
    )


@pytest.mark.parametrize(
    ("groups", "indicator", "weighted", "message"),
    [
        (GROUPS, INDICATOR, ("middle",), "no vector group 'middle'"),
        (GROUPS, Indicator("unclipped", ("left",)), (), "has size 2; it must be the 1"),
        (GROUPS, INDICATOR, ("unclipped",), "is weighted"),
        (
            (*GROUPS[:3], VectorGroup("unclipped", ("unclipped",), 0.7, (1.0,))),
            INDICATOR,
            (),
            "norm of at least 0.707",
        ),
        (
            (UPDATE[0], VectorGroup("right", ("c", "unclipped"), 1.0, (1.0, 1.0)), METRIC.group),
            INDICATOR,
            (),
            "must be alone",
        ),
    ],
    ids=["no group", "size", "weighted", "norm", "shared"],
)
def test_what_does_not_fit_is_refused(
    groups: tuple[VectorGroup, ...],
    indicator: Indicator,
    weighted: tuple[str, ...],
    message: str,
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        Clipping(LAYOUT, groups, indicator, weighted)


def test_the_noise_of_every_group_has_its_scale_and_no_other() -> None:
    metric, indicator = Metric("m", (20_000,)), Indicator("unclipped", ("update",))
    update = VectorGroup("update", ("w",), 0.3, (2.0,))
    groups = (update, metric.group, indicator_group(indicator))
    layout = Layout(("w", metric.tensor, "unclipped"), ((20_000,), (20_000,), (1,)))
    stddevs = noise_stddevs(groups, 1.1, (0.6, 0.3, 0.1))
    query = GaussianSumQuery(Clipping(layout, groups, indicator), stddevs)
    zero, found = np.zeros(layout.dimension), []
    for attempt in range(2000):
        one = Clipping(Layout(("unclipped",), ((1,),)), groups[2:], None)
        alone = GaussianSumQuery(one, stddevs[2:])
        found.append(alone.release(np.zeros(1), SeededEntropy(5), f"noise/{attempt}")[0])
    released, _ = query.release(zero, SeededEntropy(5), "noise")
    parts = (released[:20_000], released[20_000:40_000], np.concatenate(found))
    # σ_g = z·S_g/√ω_g, times α; written out by hand.
    expected = (
        2.0 * 1.1 * 0.3 / math.sqrt(0.6),
        1.1 * 1.0 / math.sqrt(0.3),
        1.1 * 0.5 / math.sqrt(0.1),
    )
    for noise, stddev in zip(parts, expected, strict=True):
        assert stats.kstest(noise / stddev, "norm").pvalue > 1e-6
        for wrong in (2 / 3, 3 / 2):
            assert stats.kstest(noise / (wrong * stddev), "norm").pvalue < 1e-6


def test_a_query_charges_every_group_of_a_contribution() -> None:
    stddevs = noise_stddevs(GROUPS, 2.0, proportional_shares(GROUPS))
    events = GaussianSumQuery(CLIPPING, stddevs).events
    assert [event.group for event in events] == ["left", "right", "metrics/counts", "unclipped"]
    total = math.fsum((event.clipping_norm / event.noise_stddev) ** 2 for event in events)
    assert total**-0.5 == pytest.approx(2.0)
