"""Which rows users train on: in lanes as alone, each once a pass, in orders that all are likely."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.engine.schedule import (
    Integers,
    Schedule,
    mask_words,
    random_words,
    steps_of,
)
from fedpriv.training.request import LocalTraining
from tests.engine.plain import batches_of, rows_in_order

KEY, NONE = bytes(range(32)), np.empty(0, np.int64)
few = st.none() | st.integers(1, 9)


def training(**ways: st.SearchStrategy[int]) -> st.SearchStrategy[LocalTraining]:
    fixed = {"learning_rate": st.just(0.1), "batch_size": few}
    return st.builds(LocalTraining, **fixed, max_examples=st.none() | st.integers(1, 30), **ways)


locals_ = training(epochs=st.integers(1, 3)) | training(steps=st.integers(1, 12))
# Pareto sizes among others: most users have few rows, and some have many.
sizes_ = st.integers(1, 40) | st.floats(0.02, 1.0).map(lambda u: int(5 * u**-1.2))
populations = st.lists(st.just(0) | sizes_, min_size=1, max_size=6)


def scheduled(
    sizes: Sequence[int], local: LocalTraining, width: int, beyond: int = 0
) -> tuple[Schedule, list[tuple[int, int, int]]]:
    """The schedule of users with these sizes, and of each its position, first row and size."""
    users, starts = 7 * np.arange(len(sizes)), np.cumsum(sizes) - sizes
    given_to = users, starts, np.array(sizes)
    lanes = len(sizes) + beyond
    found = Schedule.of(*given_to, local, KEY, width, lanes, blank=sum(sizes))
    return found, [*zip(users.tolist(), starts.tolist(), sizes, strict=True)]


def alone(user: tuple[int, int, int], local: LocalTraining) -> list[Integers]:
    """A user's batches; without rows there are none."""
    return [*batches_of(*user, local, KEY)] if user[2] else []


def assert_is_step(
    rows: Integers, real: npt.NDArray[np.bool_], batch: Integers, own: range
) -> None:
    """Slices [K, W] of a step hold a batch in its order, and then rows of the same user."""
    np.testing.assert_array_equal(real.ravel(), np.arange(rows.size) < len(batch))
    np.testing.assert_array_equal(rows.ravel()[: len(batch)], batch)
    assert not own or own.start <= rows.min() <= rows.max() < own.stop


@given(populations, locals_, st.integers(1, 12), st.integers(0, 2), st.integers(0, 9))
def test_users_in_lanes_train_on_the_batches_that_they_have_alone(
    sizes: list[int], local: LocalTraining, width: int, beyond: int, first: int
) -> None:
    schedule, users = scheduled(sizes, local, width, beyond)
    steps_of_lane = steps_of(schedule.counts, local)
    lanes, steps, slices = len(sizes) + beyond, int(steps_of_lane.max()) + 1, schedule.slices
    rows, real = schedule.rows(0, steps, lanes)
    assert rows.shape == real.shape == (lanes, steps * slices, width)
    apart = [each.reshape(lanes, steps, slices, width) for each in (rows, real)]
    measured = schedule.in_order(0, max(sizes))
    for lane, user in enumerate(users):
        batches, (_, start, size) = alone(user, local), user
        assert steps_of_lane[lane] == len(batches)
        batches += [NONE] * (steps - len(batches))
        for *step, batch in zip(apart[0][lane], apart[1][lane], batches, strict=True):
            assert_is_step(*step, batch, range(start, start + size))
        in_order = rows_in_order(*user, local, KEY)
        np.testing.assert_array_equal(measured[0][lane][measured[1][lane]], in_order)
    for each, counts in ((rows, real), measured):
        assert not counts[len(sizes) :].any()
        assert np.all(each[len(sizes) :] == sum(sizes))
    # In later steps, and in fewer lanes, they are the same.
    first, some = min(first, steps - 1), max(1, lanes // 2)
    for whole, part in zip((rows, real), schedule.rows(first, steps - first, some), strict=True):
        np.testing.assert_array_equal(part, whole[:some, first * slices :])


def test_a_user_of_many_rows_has_its_batches_in_any_lane_among_any_others() -> None:
    sizes, local = [100_000, 500, 17, 5, 100_000, 0], LocalTraining(0.1, batch_size=64, epochs=2)
    schedule, users = scheduled(sizes, local, 16)
    many = [alone(user, local) for user in users]
    last = len(many[0]) // 2  # of a pass, with what is left of the rows
    for first in (0, last - 1, len(many[0]) - 1):
        rows, real = (t.reshape(-1, 2, 4, 16) for t in schedule.rows(first, 2, len(users)))
        for lane, (_, start, size) in enumerate(users):
            for step in range(2):
                batch = [*many[lane], NONE, *[NONE] * len(many[0])][first + step]
                assert_is_step(
                    rows[lane, step], real[lane, step], batch, range(start, start + size)
                )


@given(sizes_, locals_, st.integers(0, 2**40), st.integers(0, 2**40))
def test_each_pass_holds_each_row_that_counts_once(
    size: int, local: LocalTraining, user: int, start: int
) -> None:
    count = min(size, local.max_examples or size)
    batch = min(count, local.batch_size or count)
    of_pass = -(-count // batch)
    counting = rows_in_order(user, start, size, local, KEY)
    assert counting.tolist() == sorted({*counting.tolist()})
    assert len(counting) == count
    assert {*counting.tolist()} <= {*range(start, start + size)}
    batches = [*batches_of(user, start, size, local, KEY)]
    assert len(batches) == (local.steps or of_pass * (local.epochs or 0))
    for first in range(0, len(batches), of_pass):
        some = batches[first : first + of_pass]
        assert all(len(each) == batch for each in some[: count // batch])
        seen = np.concatenate(some)
        assert len({*seen.tolist()}) == len(seen)
        if len(some) == of_pass:
            np.testing.assert_array_equal(np.sort(seen), counting)
    moved = [each - start for each in batches]  # where its rows lie decides nothing
    for one, other in zip(moved, batches_of(user, 0, size, local, KEY), strict=True):
        np.testing.assert_array_equal(one, other)


def test_which_rows_count_is_drawn_anew_for_each_user_and_round() -> None:
    local = LocalTraining(0.1, epochs=1, max_examples=5)
    drawn = [
        tuple(rows_in_order(user, 0, 50, local, bytes([key]) * 32).tolist())
        for user in range(20)
        for key in range(20)
    ]
    assert len({*drawn}) > 390  # of 2 million
    counts = np.bincount(np.array(drawn).ravel(), minlength=50)
    # 400 users take 5 of 50: 40 times each, and each square of deviation is about 36.
    assert ((counts - 40.0) ** 2 / 36.0).sum() < 120.0  # 50 degrees of freedom, probability 1e-7


@pytest.mark.parametrize(
    ("users", "passes"), [(range(7200), 1), (range(0, 7200 * 2**32, 2**32), 1), (range(72), 100)]
)
def test_all_orders_are_equally_likely(users: Sequence[int], passes: int) -> None:
    assert_uniform(orders(users, passes).ravel())


def test_orders_of_neighbours_of_passes_and_of_rounds_are_independent() -> None:
    one, other = orders(range(7200), 2), orders(range(7200), 1, bytes(32))
    assert_uniform(one[:, 0] * 27 + one[:, 1])
    assert_uniform(one[::2, 0] * 27 + one[1::2, 0])
    assert_uniform(one[:, 0] * 27 + other[:, 0])


def orders(users: Sequence[int], passes: int, key: bytes = KEY) -> Integers:
    """A number for the order of three rows in each pass of each user."""
    local, zeros = LocalTraining(0.1, batch_size=3, steps=passes), np.zeros(len(users), np.int64)
    given_to = np.array(users), zeros, zeros + 3
    schedule = Schedule.of(*given_to, local, key, 3, len(users))
    numbers: Integers = schedule.rows(0, passes, len(users))[0] @ np.array([9, 3, 1])
    return numbers


def assert_uniform(kinds: Integers) -> None:
    """Chi-square with 5 or 35 degrees of freedom: probability 1e-6 of more than these."""
    _, counts = np.unique(kinds, return_counts=True)
    expected = counts.mean()
    assert ((counts - expected) ** 2 / expected).sum() < {6: 35.89, 36: 89.95}[len(counts)]


def test_words_are_those_of_splitmix64() -> None:
    # The first outputs from this state, as https://rosettacode.org/wiki/Pseudo-random_numbers/
    # Splitmix64 gives them.
    known = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    (found,) = random_words(torch.tensor([1234567]), 0, 5).numpy().view(np.uint64).tolist()
    assert found == known


def test_a_model_draws_by_other_words_in_each_lane_step_and_slice() -> None:
    words = torch.arange(4)
    drawn = [mask_words(words, step, number) for step in range(50) for number in range(5)]
    assert len({*torch.cat(drawn).tolist()}) == 1000
    assert torch.equal(mask_words(words[1:3], 7, 2), mask_words(words, 7, 2)[1:3])
