"""Shapes that follow from a user's own size, and rows that follow from its own key."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.utils._pytree import tree_leaves

from fedpriv.data.population import UserStore
from fedpriv.engine import local_training
from fedpriv.engine.local_training import (
    BatchRows,
    BatchSchedule,
    Examples,
    Rung,
    by_rung,
    held_on,
    ladder,
    schedule,
)
from fedpriv.engine.task import Task, cross_entropy
from fedpriv.privacy.round import LocalTraining

KEY = bytes(range(32))
CPU = torch.device("cpu")
locals_ = st.builds(
    LocalTraining,
    learning_rate=st.just(0.1),
    batch_size=st.none() | st.integers(1, 8),
    epochs=st.integers(1, 3),
    max_examples=st.none() | st.integers(1, 30),
)
stepping = st.builds(
    LocalTraining,
    learning_rate=st.just(0.1),
    batch_size=st.none() | st.integers(1, 8),
    steps=st.integers(1, 12),
    max_examples=st.none() | st.integers(1, 30),
)
sizes_ = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(st.integers(0, 10**7))
def test_the_ladder_is_climbed_by_at_most_a_quarter(number: int) -> None:
    (found,) = ladder(np.array([number])).tolist()
    assert number <= found <= number * 5 / 4
    assert ladder(np.array([found])).tolist() == [found]
    rungs = {*range(9), *(k * 2**e for k in (5, 6, 7, 8) for e in range(1, 23))}
    assert found in rungs
    assert found == min(rung for rung in rungs if rung >= number)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), locals_ | stepping, st.booleans())
def test_a_rung_is_a_function_of_the_users_own_size(
    sizes: list[int], local: LocalTraining, measured: bool
) -> None:
    seen: list[int] = []
    work = []
    for rung, users in by_rung(np.array(sizes), local, measured=measured):
        work.append(rung.steps * rung.width)
        for user in users.tolist():
            assert [(rung, [0])] == [
                (alone, which.tolist())
                for alone, which in by_rung(np.array([sizes[user]]), local, measured=measured)
            ]
        seen += users.tolist()
    assert sorted(seen) == [user for user, size in enumerate(sizes) if size]
    assert work == sorted(work)


@given(st.integers(1, 2000), locals_ | stepping)
def test_a_rung_has_room_for_the_user_and_little_more(size: int, local: LocalTraining) -> None:
    ((rung, _),) = by_rung(np.array([size]), local, measured=True)
    count = min(size, local.max_examples or size)
    width = min(count, local.batch_size or count)
    batches = math.ceil(count / width)
    steps = local.steps or batches * local.epochs
    assert width <= rung.width <= width * 5 / 4
    assert steps <= rung.steps <= steps * 5 / 4
    assert batches <= rung.blocks <= batches * 5 / 4
    assert rung.padded or rung.steps == steps
    ((plain, _),) = by_rung(np.array([size]), local, measured=False)
    assert (plain.steps, plain.width, plain.blocks) == (rung.steps, rung.width, 0)


def test_users_of_other_sizes_share_a_rung_where_only_steps_count() -> None:
    local = LocalTraining(0.1, batch_size=4, steps=3)
    (one,) = by_rung(np.array([4, 400, 9]), local, measured=False)
    assert one[0] == Rung(3, 4, 0, padded=False)
    assert len(list(by_rung(np.array([4, 400, 9]), local, measured=True))) == 3


@pytest.mark.parametrize("empty", [[], [0, 0]])
def test_users_without_examples_are_on_no_rung(empty: list[int]) -> None:
    local = LocalTraining(0.1, epochs=1)
    assert list(by_rung(np.array(empty, np.int64), local, measured=True)) == []


@given(sizes_, locals_)
def test_each_epoch_holds_each_example_once(sizes: list[int], local: LocalTraining) -> None:
    for size, plan in _schedules(sizes, local):
        rows, weights = plan.rows[0], plan.weights[0]
        count = min(size, local.max_examples or size)
        assert 0 <= rows.min() <= rows.max() < size
        seen = rows[weights > 0].reshape(local.epochs, count)
        for epoch in seen:
            assert len(set(epoch.tolist())) == count
            assert sorted(epoch.tolist()) == sorted(seen[0].tolist())
        width = min(local.batch_size or count, count)
        steps = math.ceil(count / width) * local.epochs
        counts = weights.sum(1)[:steps]
        assert np.all(counts[: count // width] == width)
        assert np.all(weights[steps:] == 0)


@given(st.integers(1, 30), stepping)
def test_steps_are_counted_across_passes(size: int, local: LocalTraining) -> None:
    ((_, plan),) = _schedules([size], local)
    assert plan.weights.shape[1] == local.steps
    count = min(size, local.max_examples or size)
    per_pass = math.ceil(count / min(local.batch_size or count, count))
    for first in range(0, local.steps - per_pass + 1, per_pass):
        block = slice(first, first + per_pass)
        seen = plan.rows[0, block][plan.weights[0, block] > 0]
        assert len(set(seen.tolist())) == len(seen) == count


@given(sizes_, locals_ | stepping)
def test_what_is_measured_is_what_counts_each_example_once(
    sizes: list[int], local: LocalTraining
) -> None:
    for size, plan in _schedules(sizes, local):
        count = min(size, local.max_examples or size)
        chosen = plan.chosen[0]
        assert len(set(chosen[:count].tolist())) == count
        assert set(chosen[count:].tolist()) <= set(chosen[:count].tolist())
        trained = set(plan.rows[0][plan.weights[0] > 0].tolist())
        assert trained <= set(chosen.tolist())


def test_which_examples_count_is_drawn_anew_for_each_user_and_round() -> None:
    local = LocalTraining(0.1, epochs=1, max_examples=5)
    chosen = {
        (user, key): tuple(_schedule([user], [0], [50], local, bytes([key]) * 32).chosen[0])
        for user in range(20)
        for key in range(20)
    }
    assert len(set(chosen.values())) > 390  # of 2 million
    counts = np.bincount(np.array(list(chosen.values())).ravel(), minlength=50)
    # 400 users take 5 of 50: 40 times each, and each square of deviation is about 36.
    assert ((counts - 40.0) ** 2 / 36.0).sum() < 120.0  # 50 degrees of freedom, probability 1e-7


def test_orders_depend_on_key_and_user_alone() -> None:
    local = LocalTraining(0.1, batch_size=4, epochs=1)
    together = _schedule([5, 9], [0, 30], [30, 30], local)
    alone = _schedule([9], [30], [30], local)
    np.testing.assert_array_equal(together.rows[1], alone.rows[0])
    other_user = _schedule([5], [30], [30], local)
    other_key = _schedule([9], [30], [30], local, bytes(32))
    assert not np.array_equal(alone.rows, other_user.rows)
    assert not np.array_equal(alone.rows, other_key.rows)


@given(st.lists(st.integers(17, 20), min_size=1, max_size=8), st.integers(1, 30))
def test_nobody_elses_size_changes_what_a_user_trains_on(sizes: list[int], cap: int) -> None:
    local = LocalTraining(0.1, batch_size=20, epochs=2, max_examples=cap)
    users = np.arange(len(sizes)) * 7
    starts = np.cumsum(sizes) - sizes
    for rung, some in by_rung(np.array(sizes), local, measured=True):
        given_sizes = np.array(sizes)[some]
        together = in_numpy(schedule(users[some], starts[some], given_sizes, local, KEY, rung))
        for lane, user in enumerate(some.tolist()):
            one = np.array([user])
            alone = schedule(users[one], starts[one], np.array(sizes)[one], local, KEY, rung)
            alone = in_numpy(alone)
            for name in ("rows", "weights", "chosen"):
                np.testing.assert_array_equal(
                    getattr(together, name)[lane], getattr(alone, name)[0]
                )


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


@given(sizes_, locals_ | stepping, st.booleans())
def test_torch_draws_the_rows_that_numpy_draws(
    sizes: list[int], local: LocalTraining, measured: bool
) -> None:
    given_sizes, users = np.array(sizes), np.arange(len(sizes)) * 7
    starts = np.cumsum(sizes) - sizes
    on_gpu = lambda _: (torch, torch.arange, torch.take_along_dim)  # noqa: E731
    for rung, some in by_rung(given_sizes, local, measured=measured):
        lanes = users[some], starts[some], given_sizes[some]
        plan = schedule(*lanes, local, KEY, rung, len(some) + 2, sum(sizes))
        expected = plan.rows(plan.words, plan.among)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(local_training, "_library_of", on_gpu)
            patch.setattr(local_training, "_own", lambda tensor: tensor)
            found = plan.rows(plan.words, plan.among)
        for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@pytest.mark.parametrize("held", [False, True])
def test_lanes_beyond_the_users_are_blank_and_blocks_hold_each_example_once(held: bool) -> None:
    numbers = np.arange(1, 26)
    store = UserStore({"x": numbers * 1.0, "y": -numbers}, np.array([0, 7, 14, 25]))
    local = LocalTraining(0.1, batch_size=3, epochs=1)
    users, sizes = np.array([1, 0]), np.array([7, 7])
    ((rung, _),) = by_rung(sizes, local, measured=True)
    starts = store.offsets[users]
    plan = schedule(users, starts, sizes, local, KEY, rung, 4, store.rows)
    task = Task(torch.nn.Linear(1, 1), cross_entropy)
    resident = held_on(CPU, store.fields) if held else None
    examples = Examples(rung, 4, users, store, CPU, plan, task, resident)
    batches = examples.batches()
    assert batches.weights.shape == (4, 3, 3)
    for tensor in (batches.x, batches.y, batches.weights):
        assert torch.all(tensor[2:] == 0)
        assert tensor.data_ptr() % 64 == 0  # arithmetic may depend on it
    assert torch.all(batches.y[:2] == -batches.x[:2])
    seen: list[list[float]] = [[], [], [], []]
    for x, y, real in examples.blocks():
        assert torch.equal(y.double(), -x)
        for lane in range(4):
            seen[lane] += x.view(4, 3)[lane][real[lane]].tolist()
    assert seen == [list(map(float, range(8, 15))), list(map(float, range(1, 8))), [], []]


def _schedules(sizes: Sequence[int], local: LocalTraining) -> list[tuple[int, Any]]:
    return [(size, _schedule([3 * i], [0], [size], local)) for i, size in enumerate(sizes)]


def _schedule(
    users: Sequence[int],
    starts: Sequence[int],
    sizes: Sequence[int],
    local: LocalTraining,
    key: bytes = KEY,
) -> Any:
    ((rung, _),) = by_rung(np.array(sizes), local, measured=True)
    given_to = np.array(users), np.array(starts), np.array(sizes)
    return in_numpy(schedule(*given_to, local, key, rung))


def in_numpy(plan: BatchSchedule) -> Any:
    rows = plan.rows(plan.words, plan.among)
    blocks = {name: torch.cat(getattr(rows, name), 1) for name in ("chosen", "exists")}
    return BatchRows(*map(np.asarray, rows._replace(**blocks)))


def _assert_uniform(kinds: NDArray[np.int64]) -> None:
    """Chi-square with 5 or 35 degrees of freedom: probability 1e-6 of more than these."""
    _, counts = np.unique(kinds, return_counts=True)
    expected = counts.mean()
    assert ((counts - expected) ** 2 / expected).sum() < {6: 35.89, 36: 89.95}[len(counts)]
