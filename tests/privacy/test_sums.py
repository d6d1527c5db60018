"""Every way in which a partial sum can be wrong counts as zero."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import flat, layers, per_layer
from fedpriv.privacy.round import PartialSum, add_up
from tests.training.federation import LAYOUT

CLIPPING = Clipping(LAYOUT, flat(LAYOUT, 1.0))
D = LAYOUT.dimension
LONGEST = math.isqrt(2**48 // D)
"""Of each component, if all are as long."""
GOOD = PartialSum("good", 2, np.full(D, 2 * LONGEST - 9), 2)
# "w" is weighted, up to 4 quarters; "b" is not.
PARTS = per_layer(LAYOUT, layers(LAYOUT), {"w": 1.0, "b": 1.0})
WEIGHTED = Clipping(LAYOUT, PARTS, weighted=("w",), weight_cap=4)


def test_good_sums_add_up() -> None:
    other = PartialSum("other", 1, np.full(D, -3), 1)
    added = add_up([GOOD, other], CLIPPING, 3)
    assert added.total.dtype == np.int64
    assert added.total.tolist() == [2 * LONGEST - 12] * D
    assert added.weight == 3


@pytest.mark.parametrize(
    "bad",
    [
        PartialSum("good", 1, np.full(D, 1), 1),
        PartialSum("bad", 1, np.full(D, np.nan), 1),
        PartialSum("bad", 1, np.full(D, np.inf), 1),
        PartialSum("bad", 1, np.full(D, 1.0), 1),
        PartialSum("bad", 1, np.zeros(D, np.int32), 1),
        PartialSum("bad", 1, np.full(D, LONGEST + 1), 1),
        PartialSum("bad", 1, np.full(D, 2**63 - 1), 1),
        PartialSum("bad", 1, np.full(D, -(2**63)), 1),
        PartialSum("bad", 1, np.append(np.zeros(D - 1, np.int64), 2**24 + 1), 1),
        PartialSum("bad", 1, np.full(D - 1, 1), 1),
        PartialSum("bad", 1, np.full((D, 1), 1), 1),
        PartialSum("bad", 0, np.full(D, 1), 0),
        PartialSum("bad", -1, np.full(D, 1), 0),
        PartialSum("bad", -1, np.full(D, 1), -1),
        PartialSum("bad", 9, np.full(D, 1), 9),
        PartialSum("bad", 1, np.full(D, 1), 2),
        PartialSum("bad", 1, np.full(D, 1), -1),
    ],
    ids=[
        "duplicate",
        "nan",
        "inf",
        "floats",
        "int32",
        "huge",
        "overflow",
        "negative overflow",
        "one huge",
        "short",
        "shape",
        "nobody",
        "negative",
        "negative weight and users",
        "too many",
        "too heavy",
        "negative weight",
    ],
)
def test_bad_sums_count_as_zero(bad: PartialSum, caplog: pytest.LogCaptureFixture) -> None:
    added = add_up([GOOD, bad], CLIPPING, 10)
    np.testing.assert_array_equal(added.total, GOOD.total)
    assert added.weight == GOOD.weight
    (message,) = caplog.messages
    assert bad.node not in message


def test_a_node_that_was_refused_is_not_heard_again() -> None:
    bad = PartialSum("node", 1, np.full(D, LONGEST + 1), 1)
    again = PartialSum("node", 1, np.full(D, 1), 1)
    assert not np.any(add_up([bad, again], CLIPPING, 10).total)


def test_more_users_than_are_in_the_cohort_do_not_count_together() -> None:
    sums = [PartialSum(f"node {i}", 2, np.full(D, 1), 2) for i in range(4)]
    added = add_up(sums, CLIPPING, 7)
    assert added.total.tolist() == [3] * D
    assert added.weight == 6


def of(w: int, b: int) -> np.ndarray:
    return np.array([w, 0, 0, 0, b, 0, 0])


@pytest.mark.parametrize(
    ("total", "users", "weight", "counts"),
    [
        (of(2**24, 2**24), 1, 4, True),
        (of(2**24, 0), 1, 3, False),
        (of(3 * 2**22, 2**24), 1, 3, True),
        (of(3 * 2**22 + 1, 2**24), 1, 3, False),
        (of(1, 2**24), 1, 0, False),
        (of(0, 2**24), 1, 0, True),
        (of(0, 2**24 + 1), 1, 0, False),
        (of(0, 2**24 + 1), 2, 0, True),
        (of(2**25, 2**25), 2, 8, True),
        (of(0, 0), 2, 9, False),
        (of(0, 0), 2, -1, False),
    ],
)
def test_weighted_groups_are_held_to_the_weight_and_others_to_the_users(
    total: np.ndarray, users: int, weight: int, counts: bool
) -> None:
    added = add_up([PartialSum("node", users, total, weight)], WEIGHTED, 2)
    np.testing.assert_array_equal(added.total, total if counts else np.zeros_like(total))
    assert added.weight == (weight if counts else 0)


tensors = st.fixed_dictionaries(
    {"w": hnp.arrays(np.float32, (2, 2)), "b": hnp.arrays(np.float64, 3)}
)


@given(st.lists(st.tuples(tensors, st.integers(0, 4), st.integers(0, 2)), max_size=8))
def test_what_users_contribute_adds_up_whichever_nodes_they_are_at(
    people: list[tuple[dict[str, np.ndarray], int, int]],
) -> None:
    alone = [(WEIGHTED.contribution(update, weight), weight) for update, weight, _ in people]
    nodes = []
    for name in range(3):
        here = [one for one, (*_, node) in zip(alone, people, strict=True) if node == name]
        total = sum((one for one, _ in here), np.zeros(D, np.int64))
        nodes.append(PartialSum(str(name), len(here), total, sum(weight for _, weight in here)))
    added = add_up(nodes, WEIGHTED, len(people))
    assert added.total.tolist() == sum((one for one, _ in alone), np.zeros(D, np.int64)).tolist()
    assert added.weight == sum(weight for _, weight in alone)


def test_no_sums_are_zero() -> None:
    nothing = add_up([], CLIPPING, 0)
    np.testing.assert_array_equal(nothing.total, np.zeros(D, np.int64))
    assert nothing.total.dtype == np.int64
    assert nothing.weight == 0
