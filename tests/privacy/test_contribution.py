"""What one user adds: groups of an update, metrics, weights and the indicator together."""

import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from fedpriv.errors import InvalidValueError
from fedpriv.experiment.grouping import equal_split, proportional_shares
from fedpriv.privacy.clipping import MOST_WEIGHT, Clipping, Indicator
from fedpriv.privacy.gaussian_mechanism import GaussianQuery, Metric, noise_stddevs, sensitivities
from fedpriv.privacy.layout import Layout, Tensors, VectorGroup, flat, joint, layers, per_layer
from fedpriv.privacy.noise import SeededEntropy
from tests.privacy.exact import (
    LARGEST_SQUARE,
    agree,
    clipped,
    fractions,
    roots_of,
    square,
    squares,
    steps_of,
)

UPDATE = (
    VectorGroup("left", ("a", "b"), 1.3, (0.5, 4.0)),
    VectorGroup("right", ("c",), 0.2, (1.0,)),
)
METRIC = Metric("counts", (4,), radius=2.0)
INDICATOR = Indicator.of(UPDATE)
SHAPES = {"a": (3,), "b": (2, 2), "c": (5,), METRIC.tensor: (4,)}
LAYOUT = Layout((*SHAPES, INDICATOR.tensor), (*SHAPES.values(), (2,)))
GROUPS = (*UPDATE, METRIC.group, INDICATOR.group)
CAP = 10
CLIPPING = Clipping(LAYOUT, GROUPS, INDICATOR, ("left", "right"), CAP)
# Groups whose tensors do not lie side by side, or lie in another order than they are named.
SCATTERED = (
    VectorGroup("left", ("a", "c"), 1.3, (1e-12, 1.0)),
    VectorGroup("right", (METRIC.tensor, "b"), 0.2, (1.0, 1.0)),
)
WHOLE = flat(Layout(tuple(SHAPES), tuple(SHAPES.values())), 0.7)
CLIPPINGS = {
    "mixed": CLIPPING,
    "scattered": Clipping(
        LAYOUT, (*SCATTERED, INDICATOR.group), INDICATOR, ("right",), MOST_WEIGHT
    ),
    "one group": Clipping(Layout(tuple(SHAPES), tuple(SHAPES.values())), WHOLE),
}
NAMES = sorted(CLIPPINGS)
NO_WEIGHTS = [-1, -0.1, 0.5, 1.0000001, math.nan, math.inf, -math.inf, 2**70]


@st.composite
def sent(draw: st.DrawFn) -> dict[str, np.ndarray]:
    """Anything that a user might send, NaN, inf, 1e38 and wrong shapes included."""
    tensors = {}
    for name, shape in SHAPES.items():
        dtype = draw(st.sampled_from([np.float16, np.float32, np.float64]))
        shapes = st.tuples(st.integers(0, 3)) if draw(st.integers(0, 20)) == 0 else st.just(shape)
        # Not `floats(width=16)`, which rejects most constants of the modules that a run imports.
        numbers = draw(hnp.arrays(np.float64, shapes, elements=st.floats(-6e4, 6e4) | st.floats()))
        with np.errstate(over="ignore"):
            tensors[name] = numbers.astype(dtype)
    return tensors


def weight_of(clipping: Clipping, draw: st.DataObject) -> int | None:
    cap = clipping.weight_cap
    return draw.draw(st.none() | st.integers(0, cap) | st.sampled_from([*NO_WEIGHTS, cap + 1]))


def part(clipping: Clipping, vector: np.ndarray, group: VectorGroup) -> np.ndarray:
    return np.concatenate([vector[clipping.layout.slices[tensor]] for tensor in group.tensors])


def scaled(group: VectorGroup, tensors: Tensors) -> list[Fraction]:
    """u = (v_1/α_1, …, v_m/α_m), without rounding."""
    return [
        number / Fraction(scale)
        for tensor, scale in zip(group.tensors, group.scales, strict=True)
        for number in fractions(tensors[tensor].ravel())
    ]


def counts(clipping: Clipping, tensors: Tensors, weight: object) -> bool:
    """Whether a user is counted at all."""
    if weight is not None and not (isinstance(weight, int) and 0 <= weight <= clipping.weight_cap):
        return False
    if any(tensors[name].shape != shape for name, shape in SHAPES.items()):
        return False
    if not all(np.all(np.isfinite(tensor)) for tensor in tensors.values()):
        return False
    return all(
        square(scaled(group, tensors)) < LARGEST_SQUARE
        for group in clipping.groups
        if INDICATOR.tensor not in group.tensors
    )


def follows(clipping: Clipping, tensors: Tensors, weight: int | None, found: np.ndarray) -> bool:
    """Whether a contribution is the exact one of each group, up to rounding."""
    units = clipping.weight_cap if weight is None else weight
    within, close = {}, set()
    for group in clipping.groups:
        if group.tensors == (INDICATOR.tensor,):
            continue
        vector = scaled(group, tensors)
        share = Fraction(units, clipping.weight_cap) if group.name in clipping.weighted else 1
        ratio = square(vector) / Fraction(group.clipping_norm) ** 2
        within[group.name] = ratio < 1
        close |= {group.name} if abs(ratio - 1) < Fraction(1, 10**12) else set()
        expected = clipped(vector, group.clipping_norm, Fraction(share))
        shortened = ratio > 1 or group.name in close
        if not agree(part(clipping, found, group), expected, shortened=shortened):
            return False
    if clipping.indicator is None:
        return True
    (group,) = [g for g in clipping.groups if g.tensors == (INDICATOR.tensor,)]
    half = Fraction(1, 2) / steps_of(group.clipping_norm)[0]
    said = part(clipping, found, group).tolist()
    return all(
        name in close or a == (half if within[name] else -half)
        for name, a in zip(clipping.indicator.groups, said, strict=True)
    )


def constant(**values: float) -> dict[str, np.ndarray]:
    return {name: np.full(shape, values.get(name, 0.0)) for name, shape in SHAPES.items()}


@given(st.sampled_from(NAMES), sent(), st.data())
@example("scattered", constant(a=1e300), None)  # overflows divided by its scale
@example("scattered", constant(a=1e300, b=np.inf), None)
@example("scattered", constant(a=1e140), None)  # its square overflows divided by its scale
@example("mixed", constant(c=1e200, a=1e-200), None)  # its square overflows
@example("mixed", constant(c=1e150, a=1e-200), None)
@example("one group", constant(a=1e200, c=-1e300), None)
@example("one group", constant(a=1.0, c=np.nan), None)
@example("mixed", constant(a=0.1, c=0.2), None)
def test_equals_the_obvious_way_and_stays_exactly_within_every_bound(
    name: str, tensors: dict[str, np.ndarray], data: st.DataObject | None
) -> None:
    clipping = CLIPPINGS[name]
    weight = weight_of(clipping, data) if data else None
    contribution = clipping.contribution(tensors, weight)
    assert contribution.dtype == np.int64
    assert contribution.shape == (clipping.layout.dimension,)
    if not counts(clipping, tensors, weight):
        np.testing.assert_array_equal(contribution, np.zeros_like(contribution))
        return
    assert follows(clipping, tensors, weight, contribution)
    units = clipping.weight_cap if weight is None else weight
    for group in clipping.groups:
        most = group.squared_bound
        if group.name in clipping.weighted:
            most = units**2 * most // clipping.weight_cap**2
        assert squares(part(clipping, contribution, group)) <= most
    assert clipping.admits(contribution, 1, units)


@given(st.sampled_from(NAMES), st.lists(sent(), min_size=1, max_size=5), st.data())
def test_rows_are_contributions_each_by_itself(
    name: str, people: list[dict[str, np.ndarray]], data: st.DataObject
) -> None:
    clipping = CLIPPINGS[name]
    people = [
        tensors for tensors in people if all(t.shape == SHAPES[n] for n, t in tensors.items())
    ]
    weights = np.array(
        [data.draw(st.integers(0, clipping.weight_cap)) for _ in people], dtype=np.int64
    )
    rows = np.full((len(people), clipping.layout.dimension), np.nan)
    for row, tensors in zip(rows, people, strict=True):
        views = clipping.layout.unflatten(row)
        for tensor, values in tensors.items():
            views[tensor][...] = values
    clipping.clip_rows(rows, weights)
    for row, tensors, weight in zip(rows, people, weights, strict=True):
        expected = clipping.contribution(tensors, int(weight))
        np.testing.assert_array_equal(row, expected)
        assert row.astype(np.int64).tolist() == row.tolist()  # whole numbers


def test_so_many_rows_add_up_exactly_in_float64() -> None:
    longest = math.isqrt(steps_of(math.nextafter(2.0, 0.0))[1])
    assert 2**28 * longest <= 2**53


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tensor", SHAPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_component_that_is_not_finite_zeroes_everything(
    name: str, tensor: str, bad: float
) -> None:
    clipping = CLIPPINGS[name]
    tensors = constant(a=0.1, b=0.1, c=0.1, **{METRIC.tensor: 0.1})
    assert np.any(clipping.contribution(tensors))
    for place in range(tensors[tensor].size):
        broken = {name: values.copy() for name, values in tensors.items()}
        broken[tensor].flat[place] = bad
        contribution = clipping.contribution(broken)
        np.testing.assert_array_equal(contribution, np.zeros_like(contribution))


@pytest.mark.parametrize(
    "changes",
    [
        {"a": None},
        {"d": np.zeros(1)},
        {"a": np.ones(4)},
        {"a": np.ones((3, 1))},
        {"a": np.ones(3, np.int64)},
        {"a": np.array(["x", "y", "z"])},
        {INDICATOR.tensor: np.full(3, 0.5)},
    ],
    ids=["missing", "unknown", "long", "shape", "integers", "texts", "indicator"],
)
def test_malformed_tensors_count_as_zero_and_are_logged(
    changes: dict[str, np.ndarray | None], caplog: pytest.LogCaptureFixture
) -> None:
    given = {**constant(a=1.0, b=1.0, c=1.0), **changes}
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    if INDICATOR.tensor in changes:
        # What a user says of itself is not asked.
        honest = CLIPPING.contribution(constant(a=1.0, b=1.0, c=1.0))
        np.testing.assert_array_equal(CLIPPING.contribution(tensors), honest)
        return
    np.testing.assert_array_equal(CLIPPING.contribution(tensors), np.zeros(LAYOUT.dimension))
    assert "a malformed update counts as zero" in caplog.text


@pytest.mark.parametrize("sent", [None, [1.0], {1: np.ones(3)}, {"a": [[1.0], [1.0, 2.0]]}])
def test_what_is_no_update_counts_as_zero_and_its_data_are_not_logged(
    sent: object, caplog: pytest.LogCaptureFixture
) -> None:
    given = {**constant(a=1.0, b=1.0, c=1.0), **sent} if isinstance(sent, dict) else sent
    np.testing.assert_array_equal(CLIPPING.contribution(given), np.zeros(LAYOUT.dimension))
    assert "a malformed update counts as zero: " in caplog.text
    assert "1.0" not in caplog.text


integers = st.integers(-(2**25), 2**25) | st.integers(-(2**63), 2**63 - 1)


@given(
    st.sampled_from(NAMES),
    hnp.arrays(np.int64, 18, elements=integers),
    st.integers(0, 5) | st.integers(0, 2**20),
    st.data(),
)
def test_a_total_is_admitted_if_every_group_is_within_what_its_users_can_have(
    name: str, total: np.ndarray, users: int, data: st.DataObject
) -> None:
    clipping = CLIPPINGS[name]
    total = total[: clipping.layout.dimension]
    weight = data.draw(st.integers(0, users * clipping.weight_cap))
    if data.draw(st.booleans()):
        total //= data.draw(st.sampled_from([2**5, 2**10, 2**40]))
    expected = True
    for group in clipping.groups:
        of = squares(part(clipping, total, group))
        if group.name in clipping.weighted:
            most = weight**2 * group.squared_bound // clipping.weight_cap**2
        else:
            most = users**2 * group.squared_bound
        assume(not 2**53 <= most < of < most * (1 + Fraction(1, 2**29)))  # rounding decides
        expected = expected and of <= most
    assert clipping.admits(total, users, weight) is expected


WIDE = Layout(("u", "v"), ((8,), (8,)))
WIDE_GROUPS = (
    VectorGroup("plain", ("u",), 0.7, (3.0,)),
    VectorGroup("heavy", ("v",), math.nextafter(2.0, 0.0), (1.0,)),
)
WIDE_CLIPPING = Clipping(WIDE, WIDE_GROUPS, weighted=("heavy",), weight_cap=7)


def of_square(number: int) -> list[int]:
    """Eight integers whose squares add up to a number."""
    roots = roots_of(number)
    return roots + [0] * (8 - len(roots))


@pytest.mark.parametrize("weight", range(8))
def test_of_one_user_the_bound_is_admitted_and_one_more_is_not(weight: int) -> None:
    plain = WIDE_GROUPS[0].squared_bound
    heavy = weight**2 * WIDE_GROUPS[1].squared_bound // 49
    for more, other in ((0, 0), (1, 0), (0, 1)):
        total = np.array(of_square(plain + more) + of_square(heavy + other), np.int64)
        assert (squares(total[:8]), squares(total[8:])) == (plain + more, heavy + other)
        assert WIDE_CLIPPING.admits(total, 1, weight) is (more == other == 0)


def test_users_without_weight_add_zero_to_weighted_groups() -> None:
    total = np.zeros(16, np.int64)
    total[8] = 1
    assert not WIDE_CLIPPING.admits(total, 1000, 0)
    assert WIDE_CLIPPING.admits(np.zeros(16, np.int64), 1000, 0)
    total[8], total[0] = 0, 1
    assert WIDE_CLIPPING.admits(total, 1000, 0)
    assert not WIDE_CLIPPING.admits(total, 0, 0)


@pytest.mark.parametrize("users", [1, 2, 10, 999, 1000])
@pytest.mark.parametrize("alike", [True, False])
def test_honest_sums_of_many_are_admitted(users: int, alike: bool) -> None:
    rng = np.random.default_rng(users)
    total, all_weights = np.zeros(16, np.int64), 0
    direction = rng.standard_normal((2, 8))
    for _ in range(users):
        u, v = direction if alike else rng.standard_normal((2, 8))
        weight = 7 if alike else int(rng.integers(0, 8))
        total += WIDE_CLIPPING.contribution({"u": u * 1e3, "v": v * 1e3}, weight)
        all_weights += weight
    assert WIDE_CLIPPING.admits(total, users, all_weights)
    if alike:  # they are as long as can be, up to truncation
        assert not WIDE_CLIPPING.admits(total + total // (500 * users) + 16, users - 1, all_weights)
        longer = total + total // 2**18 + 16
        assert not WIDE_CLIPPING.admits(longer, users, all_weights)


def test_sums_of_the_longest_integers_are_admitted_for_any_number_of_users() -> None:
    plain, heavy = (of_square(group.squared_bound) for group in WIDE_GROUPS)
    one = np.array(plain + heavy, np.int64)
    for users in (*range(1, 300), 2**10 - 1, 2**20 + 1, 2**37):
        assert WIDE_CLIPPING.admits(users * one, users, 7 * users)
        assert not WIDE_CLIPPING.admits(users * one + (users // 8 + 1), users, 7 * users)


@pytest.mark.parametrize(
    "total",
    [
        np.zeros(16),
        np.zeros(16, np.int32),
        np.zeros(16, np.uint64),
        np.zeros(16, object),
        np.zeros(15, np.int64),
        np.zeros(17, np.int64),
        np.zeros((16, 1), np.int64),
        np.zeros((), np.int64),
        np.full(16, np.nan),
    ],
    ids=lambda total: f"{total.dtype}{list(total.shape)}",
)
def test_totals_of_another_type_or_shape_are_not_admitted(total: np.ndarray) -> None:
    assert WIDE_CLIPPING.admits(np.zeros(16, np.int64), 5, 5)
    assert not WIDE_CLIPPING.admits(total, 5, 5)


@pytest.mark.parametrize("value", [2**62, 2**63 - 1, -(2**63)])
def test_no_number_of_users_sums_to_what_overflows(value: int) -> None:
    total = np.zeros(16, np.int64)
    total[3] = value
    assert not WIDE_CLIPPING.admits(total, 2**36, 0)
    total[:8] = value
    assert not WIDE_CLIPPING.admits(total, 2**37, 0)


@pytest.mark.parametrize("name", NAMES)
def test_spans_are_the_positions_of_each_groups_tensors_in_their_order(name: str) -> None:
    clipping = CLIPPINGS[name]
    positions = np.arange(clipping.layout.dimension)
    for group in clipping.groups:
        found = np.concatenate([positions[span] for span in clipping.spans[group.name]])
        np.testing.assert_array_equal(found, part(clipping, positions, group))
    assert len(CLIPPINGS["one group"].spans["update"]) == 1


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_a_component_is_its_scale_times_that_of_its_group(name: str) -> None:
    clipping = CLIPPINGS[name]
    one = clipping.in_units(np.ones(clipping.layout.dimension))
    for group in clipping.groups:
        step = float(steps_of(group.clipping_norm)[0])
        for tensor, scale in zip(group.tensors, group.scales, strict=True):
            found = one[clipping.layout.slices[tensor]]
            assert found.tolist() == [scale * step] * clipping.layout.sizes[tensor]


LARGE = Layout(("0.weight", "0.bias", "2.weight", "2.bias"), ((700, 400), (700,), (10, 700), (10,)))
STRATEGIES = {
    "flat": flat(LARGE, 1.0),
    "per layer": per_layer(LARGE, layers(LARGE), equal_split(layers(LARGE), 1.0)),
    "joint": joint(LARGE, 1.0, dict(zip(LARGE.names, (0.5, 2.0, 3.0, 1.0), strict=True))),
}


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.parametrize("size", [1e-4, 1.0, np.nan])
def test_large_updates_take_little_memory_but_the_vector(strategy: str, size: float) -> None:
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
        assert clipping.admits(contribution, 1, 1)
        taken = tracemalloc.get_traced_memory()[1] - held
    finally:
        tracemalloc.stop()
    assert made < 2 * contribution.nbytes + 2**16  # as floats and as integers
    assert taken < 2**18
    if np.isnan(size):
        np.testing.assert_array_equal(contribution, np.zeros_like(contribution))
        return
    for group in clipping.groups:
        slow = np.concatenate(
            [
                tensors[name].astype(np.float64).ravel() / scale
                for name, scale in zip(group.tensors, group.scales, strict=True)
            ]
        )
        slow *= min(1.0, group.clipping_norm / float(np.linalg.norm(slow))) / group.granularity
        found = part(clipping, contribution, group)
        assert np.all(np.abs(found - slow) <= 1.0 + np.abs(slow) * 2.0**-22)
        assert np.all(np.abs(found) <= np.abs(slow) * (1.0 + 2.0**-50))


@given(sent(), st.integers(0, CAP), st.floats(1e-3, 1e3))
def test_any_user_moves_all_groups_together_by_at_most_one_over_z(
    tensors: dict[str, np.ndarray], weight: int, z: float
) -> None:
    stddevs = noise_stddevs(sensitivities(CLIPPING), z, proportional_shares(GROUPS))
    contribution = CLIPPING.contribution(tensors, weight)
    moved = sum(
        squares(part(CLIPPING, contribution, group))
        * (Fraction(group.granularity) / Fraction(stddev)) ** 2
        for group, stddev in zip(GROUPS, stddevs, strict=True)
    )
    assert moved <= 1 / Fraction(z) ** 2


def test_the_indicator_says_what_was_not_clipped() -> None:
    step = Fraction(GROUPS[-1].granularity)
    for c, weight, said in (
        (0.0, None, [0.5, 0.5]),
        (0.1, None, [0.5, -0.5]),
        (0.1, 1, [0.5, -0.5]),
        (0.1, 0, [0.5, -0.5]),
        (math.nan, None, [0.0, 0.0]),
    ):
        found = CLIPPING.contribution(constant(c=c), weight)[-2:]
        assert [int(a) * step for a in found] == said
    broken = {**constant(c=0.1), METRIC.tensor: np.full(4, np.nan)}
    np.testing.assert_array_equal(CLIPPING.contribution(broken), np.zeros(LAYOUT.dimension))


@given(st.integers(1, 100), st.sampled_from([-8, -1, 1, 8]))
@example(11, 1)
@example(14, 1)
@example(2000, -1)
def test_the_indicator_is_exact_and_within_the_bound_of_its_group_and_no_other_is_taken(
    count: int, places: int
) -> None:
    names = tuple(f"g{i}" for i in range(count))
    groups = tuple(VectorGroup.single(name, 1.0) for name in names)
    layout = Layout((*names, "said"), ((1,),) * count + ((count,),))
    indicator = Indicator("said", names)
    own = indicator.group
    clipping = Clipping(layout, (*groups, own), indicator)
    found = clipping.contribution({name: np.zeros(1) for name in names})[-count:]
    assert squares(found) <= own.squared_bound
    assert {int(a) * Fraction(own.granularity) for a in found} == {Fraction(1, 2)}
    norm = own.clipping_norm
    for _ in range(abs(places)):
        norm = math.nextafter(norm, math.copysign(math.inf, places))
    with pytest.raises(InvalidValueError, match="the vector group of tensor 'said' is"):
        Clipping(layout, (*groups, VectorGroup.single("said", norm)), indicator)


def test_weights_scale_the_update_after_clipping_and_nothing_else() -> None:
    tensors = constant(a=0.3, b=0.3, c=0.3, **{METRIC.tensor: 0.3})
    whole, tenth = CLIPPING.contribution(tensors), CLIPPING.contribution(tensors, 1)
    np.testing.assert_array_equal(CLIPPING.contribution(tensors, CAP), whole)
    end = LAYOUT.slices["c"].stop
    assert np.all(np.abs(tenth[:end] - whole[:end] / 10) <= 1.0)
    np.testing.assert_array_equal(tenth[end:], whole[end:])
    right = part(CLIPPING, whole, UPDATE[1]) * UPDATE[1].granularity
    assert np.linalg.norm(right) == pytest.approx(0.2)
    none = CLIPPING.contribution(tensors, 0)
    np.testing.assert_array_equal(none[:end], np.zeros(end))
    np.testing.assert_array_equal(none[end:], whole[end:])


@pytest.mark.parametrize("weight", [*NO_WEIGHTS, CAP + 1])
def test_a_weight_that_is_none_counts_as_zero(
    weight: float, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = constant(a=1.0, b=1.0, c=1.0)
    np.testing.assert_array_equal(
        CLIPPING.contribution(tensors, weight), np.zeros(LAYOUT.dimension)
    )
    assert "its weight is not a whole number from 0 to 10" in caplog.text


@pytest.mark.parametrize("weight", ["1", np.ones(2), np.ones(1), {}])
def test_a_weight_that_is_no_number_counts_as_zero(weight: object) -> None:
    found = CLIPPING.contribution(constant(a=1.0, b=1.0, c=1.0), weight)
    np.testing.assert_array_equal(found, np.zeros(LAYOUT.dimension))


@pytest.mark.parametrize("cap", [0, -1, MOST_WEIGHT + 1])
def test_a_cap_of_weights_that_is_none_is_refused(cap: int) -> None:
    with pytest.raises(InvalidValueError, match=f"weight_cap is {cap}"):
        Clipping(LAYOUT, GROUPS, INDICATOR, ("left",), cap)


@pytest.mark.parametrize(
    ("groups", "indicator", "weighted", "message"),
    [
        (GROUPS, INDICATOR, ("middle",), "vector group 'middle' is unknown"),
        (GROUPS, Indicator("unclipped", ("left",)), (), "has size 2"),
        (GROUPS, INDICATOR, ("unclipped",), "without a weight"),
        (
            (*GROUPS[:3], VectorGroup("unclipped", ("unclipped",), 0.7, (1.0,))),
            INDICATOR,
            (),
            "it must be VectorGroup",
        ),
        (
            (UPDATE[0], VectorGroup("right", ("c", "unclipped"), 1.0, (1.0, 1.0)), METRIC.group),
            INDICATOR,
            (),
            "it must be VectorGroup",
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
    groups = (update, metric.group, indicator.group)
    layout = Layout(("w", metric.tensor, "unclipped"), ((20_000,), (20_000,), (1,)))
    clipping = Clipping(layout, groups, indicator)
    stddevs = noise_stddevs(sensitivities(clipping), 1.1, (0.6, 0.3, 0.1))
    query = GaussianQuery(clipping, stddevs)
    zero, found = np.zeros(layout.dimension, np.int64), []
    for attempt in range(2000):
        one = Clipping(Layout(("unclipped",), ((1,),)), groups[2:], None)
        alone = GaussianQuery(one, stddevs[2:])
        found.append(
            alone.noised_average(np.zeros(1, np.int64), SeededEntropy(5), f"noise/{attempt}")[0]
        )
    released, _ = query.noised_average(zero, SeededEntropy(5), "noise")
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
    stddevs = noise_stddevs(sensitivities(CLIPPING), 2.0, proportional_shares(GROUPS))
    events = GaussianQuery(CLIPPING, stddevs, weighted_denominator=1.0).events
    assert [event.group for event in events] == ["left", "right", "metrics/counts", "unclipped"]
    total = math.fsum((event.clipping_norm / event.noise_stddev) ** 2 for event in events)
    assert total**-0.5 == pytest.approx(2.0)
