"""Examples of users as tensors: the rows of their schedules, in lanes and alone, however read."""

from dataclasses import replace
from itertools import chain
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedpriv.data.population import UserStore
from fedpriv.engine import examples as module
from fedpriv.engine.examples import Batches, Chunk, Examples, held_on
from fedpriv.engine.schedule import Schedule
from fedpriv.engine.task import Task
from fedpriv.engine.trainer import Trainer
from fedpriv.training.request import LocalTraining
from tests.engine.everyone import request_under
from tests.engine.plain import batches_of, rows_in_order

KEY, CPU = bytes(range(32)), torch.device("cpu")
TASK = Task(torch.nn.Linear(1, 1))
locals_ = st.builds(
    LocalTraining,
    learning_rate=st.just(0.1),
    batch_size=st.none() | st.integers(1, 9),
    steps=st.integers(1, 9),
    max_examples=st.none() | st.integers(1, 12),
)
populations = st.lists(st.integers(1, 30), min_size=1, max_size=5)


def store_of(sizes: list[int]) -> UserStore:
    """Users whose inputs are the numbers of rows from 1, and targets the same below zero."""
    numbers = np.arange(1, sum(sizes) + 1)
    fields = {"x": numbers[:, None].astype(np.float32), "y": -numbers}
    return UserStore(fields, np.cumsum([0, *sizes]))


def examples_of(sizes: list[int], local: LocalTraining, width: int, lanes: int) -> Examples:
    store = store_of(sizes)
    given_to = np.arange(len(sizes)), store.offsets[:-1], store.sizes, local, KEY
    schedule = Schedule.of(*given_to, width, lanes, store.rows)
    chunk = Chunk(np.arange(len(sizes)), (lanes,), width)
    return Examples(chunk, chunk.users, schedule, store, CPU, TASK)


def numbers_of(x: Tensor, y: Tensor) -> list[int]:
    """The numbers of rows, which inputs and targets agree on."""
    assert torch.equal(x[..., 0].long(), -y.long())
    return (x[..., 0].long() - 1).flatten().tolist()


@given(populations, locals_, st.integers(1, 8), st.sampled_from(["read", "given", "resident"]))
def test_lanes_hold_the_batches_of_their_users_and_lanes_beyond_are_blank(
    sizes: list[int], local: LocalTraining, width: int, kind: str
) -> None:
    users, examples = len(sizes), examples_of(sizes, local, width, len(sizes) + 2)
    store, steps = examples.store, len(examples.slices)
    if kind == "resident":
        examples = replace(examples, resident=held_on(CPU, store.fields))
    if kind != "read":
        examples = replace(examples, made_of=examples.given(measured=True))
    with patch.object(module, "_WINDOW", 40):  # so few numbers are gathered at once
        windows = [*examples.windows([examples.lanes] * steps)]
    x, y, real = (
        torch.cat([getattr(window, name) for window in windows], 1) for name in ("x", "y", "real")
    )
    assert not any(t[users:].any() for t in (x, y, real))
    for user, size in enumerate(sizes):
        expected = [*batches_of(user, int(store.offsets[user]), size, local, KEY)]
        taken = numbers_of(x[user][real[user] > 0], y[user][real[user] > 0])
        assert taken == np.concatenate(expected).tolist()
        assert [int(slices[user]) for slices in examples.slices if slices[user]] == [
            -(-len(expected[0]) // width)
        ] * len(expected)
    seen: list[list[int]] = [[] for _ in range(examples.lanes)]
    for x, y, exists in examples.blocks():
        for lane, own in enumerate(exists):
            place = slice(lane * width, (lane + 1) * width)
            seen[lane] += numbers_of(x[place][own], y[place][own])
    starts = store.offsets.tolist()
    in_order = [rows_in_order(u, starts[u], n, local, KEY).tolist() for u, n in enumerate(sizes)]
    assert seen == [*in_order, [], []]


@given(
    populations,
    locals_,
    st.sampled_from([1, 40, 2**22]),
    st.sampled_from(["in place", "read", "held"]),
)
def test_a_user_who_goes_alone_has_its_batches(
    sizes: list[int], local: LocalTraining, window: int, kind: str
) -> None:
    store, user = store_of(sizes), len(sizes) - 1
    trainer = Trainer(TASK, store, None, CPU, 2**20, "float32")
    own = trainer._examples(request_under(TASK, local, len(sizes), 1.0), Chunk(np.array([user])))
    assert own.resident is not None
    if kind != "in place":  # from files that are mapped, or on a GPU
        held = held_on(CPU, store.fields) if kind == "held" else None
        own = replace(own, resident=held)
    given_to = user, int(store.offsets[user]), sizes[user], local, KEY
    with patch.object(module, "_WINDOW", window), patch.object(module, "_MEASURED", window):
        found = [numbers_of(x, y) for x, y in own.batches()]
        measured = [(numbers_of(x, y), exists) for x, y, exists in own.blocks()]
    assert found == [batch.tolist() for batch in batches_of(*given_to)]
    assert len(found) == own.steps
    rows_measured = [*chain.from_iterable(rows for rows, _ in measured)]
    assert rows_measured == rows_in_order(*given_to).tolist()
    assert all(exists.shape == (1, len(rows)) and bool(exists.all()) for rows, exists in measured)


@pytest.mark.parametrize("slices", [1, 2])
def test_losses_by_their_shares_are_the_mean_over_targets_that_count(slices: int) -> None:
    rng = torch.Generator().manual_seed(0)
    y = torch.randint(0, 3, (2, 6, 4, 2), generator=rng)  # of two users, 6 slices of 4 rows
    y[torch.rand(y.shape, generator=rng) < 0.3] = -100
    y[0, :2], y[1, 4] = -100, -100
    real = torch.arange(4) < torch.tensor([[4, 1, 4, 0, 4, 4], [4, 4, 2, 0, 0, 0]])[..., None]
    outputs = torch.randn((2, 6, 4, 3, 2), generator=rng)
    shares = Batches(outputs, y, real.float()).shares(TASK, slices)
    losses = TASK.losses_of(outputs.flatten(0, 2), y.flatten(0, 2)).view(y.shape[:3])
    for user in range(2):
        for first in range(0, 6, slices):
            step = user, slice(first, first + slices)
            rows, targets = outputs[step][real[step]], y[step][real[step]]
            mean = cross_entropy(rows, targets, reduction="mean").nan_to_num()
            torch.testing.assert_close((losses[step] * shares[step]).sum(), mean)
