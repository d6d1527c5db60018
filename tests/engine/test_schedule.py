"""Every user sees its own examples, once per epoch, in a fresh order."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedpriv.engine.chunks import chunks
from fedpriv.engine.schedule import Schedule, schedule
from fedpriv.federated.transport import LocalTraining

KEY = bytes(range(32))
locals_ = st.builds(
    LocalTraining,
    learning_rate=st.just(0.1),
    batch_size=st.none() | st.integers(1, 8),
    epochs=st.integers(1, 3),
)
sizes_ = st.lists(st.integers(1, 20), min_size=1, max_size=6)


@given(sizes_, locals_)
def test_each_epoch_holds_each_example_once(sizes: list[int], local: LocalTraining) -> None:
    starts = [0, *np.cumsum(sizes)[:-1].tolist()]
    plan = _schedule(range(len(sizes)), starts, sizes, local)
    for lane, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        rows, weights = plan.rows[lane], plan.weights[lane]
        assert rows.min() >= start
        assert rows.max() < start + size
        seen = rows[weights > 0]
        per_epoch = seen.reshape(local.epochs, size)
        for epoch in per_epoch:
            assert sorted(epoch.tolist()) == list(range(start, start + size))
        width = min(local.batch_size or size, size)
        steps = math.ceil(size / width) * local.epochs
        counts = weights.sum(1)[:steps]
        assert np.all(counts[: size // width] == width)
        assert np.all(weights[steps:] == 0)


@given(st.integers(1, 20), st.integers(1, 8), st.integers(1, 12))
def test_steps_are_counted_across_passes(size: int, batch: int, steps: int) -> None:
    local = LocalTraining(0.1, batch_size=batch, steps=steps)
    plan = _schedule([3], [0], [size], local)
    assert plan.weights.shape[1] == steps
    per_pass = math.ceil(size / min(batch, size))
    for first in range(0, steps - per_pass + 1, per_pass):
        block = slice(first, first + per_pass)
        seen = plan.rows[0, block][plan.weights[0, block] > 0]
        assert sorted(seen.tolist()) == list(range(size))


def test_orders_depend_on_key_and_user_alone() -> None:
    local = LocalTraining(0.1, batch_size=4, epochs=1)
    together = _schedule([5, 9], [0, 30], [30, 30], local)
    alone = _schedule([9], [30], [30], local)
    np.testing.assert_array_equal(together.rows[1], alone.rows[0])
    other_user = _schedule([5], [30], [30], local)
    other_key = _schedule([9], [30], [30], local, bytes(32))
    assert not np.array_equal(alone.rows, other_user.rows)
    assert not np.array_equal(alone.rows, other_key.rows)


@pytest.mark.parametrize(
    ("users", "passes"), [(range(7200), 1), (range(0, 7200 * 2**32, 2**32), 1), (range(72), 100)]
)
def test_all_orders_are_equally_likely(users: Sequence[int], passes: int) -> None:
    local = LocalTraining(0.1, batch_size=3, steps=passes)
    count = len(users)
    rows = _schedule(users, [0] * count, [3] * count, local).rows.reshape(-1, 3)
    _assert_uniform(rows @ [9, 3, 1])


def test_orders_of_neighbours_and_of_passes_are_independent() -> None:
    local = LocalTraining(0.1, batch_size=3, steps=2)
    rows = _schedule(range(7200), [0] * 7200, [3] * 7200, local).rows.reshape(7200, 2, 3)
    orders = rows @ [9, 3, 1]
    _assert_uniform(orders[:, 0] * 27 + orders[:, 1])
    _assert_uniform(orders[::2, 0] * 27 + orders[1::2, 0])


@given(st.lists(st.integers(0, 40), min_size=1, max_size=40), st.integers(1, 9), locals_)
def test_chunks_partition_the_users_that_have_examples(
    sizes: list[int], lanes: int, local: LocalTraining
) -> None:
    users = np.arange(len(sizes)) * 3
    cut = list(chunks(users, np.array(sizes), local, lanes))
    assert all(1 <= len(chunk) <= lanes for chunk in cut)
    together = [user for chunk in cut for user in chunk.tolist()]
    assert sorted(together) == [3 * i for i, size in enumerate(sizes) if size > 0]


@pytest.mark.parametrize("empty", [[], [0, 0]])
def test_no_examples_make_no_chunks(empty: list[int]) -> None:
    local = LocalTraining(0.1, epochs=1)
    users = np.arange(len(empty))
    assert list(chunks(users, np.array(empty, np.int64), local, 4)) == []


def test_chunks_hold_users_of_similar_work() -> None:
    local = LocalTraining(0.1, batch_size=10, epochs=1)
    sizes = np.array([10, 1000, 20, 990, 15, 1010])
    cut = [sorted(sizes[chunk].tolist()) for chunk in chunks(np.arange(6), sizes, local, 10)]
    assert [990, 1000, 1010] in cut


def _schedule(
    users: Sequence[int],
    starts: Sequence[int],
    sizes: Sequence[int],
    local: LocalTraining,
    key: bytes = KEY,
) -> Schedule:
    return schedule(np.array(users), np.array(starts), np.array(sizes), local, key)


def _assert_uniform(kinds: NDArray[np.int64]) -> None:
    """Chi-square with 5 or 35 degrees of freedom: probability 1e-6 of more than these."""
    _, counts = np.unique(kinds, return_counts=True)
    expected = counts.mean()
    assert ((counts - expected) ** 2 / expected).sum() < {6: 35.89, 36: 89.95}[len(counts)]
