"""Integers that model or loss cannot compute with are found before a GPU meets them."""

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedpriv.data.population import UserStore
from fedpriv.engine.examples import Chunk
from fedpriv.engine.indices import Indices
from fedpriv.engine.task import Task, called, cross_entropy
from fedpriv.engine.trainer import Trainer
from fedpriv.training.request import LocalTraining
from tests.engine.everyone import request_under
from tests.engine.fake_device import DEVICE, on_device, without_autocast

WORDS, PLACES, CLASSES = 5, (3, 6), 4


class Table(nn.Module):
    """Reads two columns of words, of which each has its own alphabet."""

    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.ModuleList(nn.Embedding(size, CLASSES) for size in PLACES)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        first, second = self.columns
        return first(x[:, 0]) + second(x[:, 1])


def store_of(rows: list[list[tuple[int, int, int]]]) -> UserStore:
    """Users by their rows: two words and a label."""
    table = np.array([row for user in rows for row in user], np.int64).reshape(-1, 3)
    offsets = np.cumsum([0, *map(len, rows)])
    return UserStore({"x": table[:, :2].copy(), "y": table[:, 2].copy()}, offsets)


numbers = st.sampled_from([0, 1, 2, 3, 4, 5, 6, -1, -100, 10**12])
users_ = st.lists(
    st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=3), min_size=1, max_size=5
)


@given(users_)
def test_those_are_refused_for_whom_the_model_raises(
    rows: list[list[tuple[int, int, int]]],
) -> None:
    store, task = store_of(rows), Task(Table(), cross_entropy)
    indices = Indices(task, store)
    for user in range(len(rows)):
        data = {name: torch.tensor(rows) for name, rows in store.examples_of(user).items()}
        try:
            task.losses_of(called(task.model, {}, data["x"]), data["y"])
        except IndexError:
            with pytest.raises(IndexError):
                indices.check(np.array([user]))
            with pytest.raises(IndexError):
                indices.check(np.arange(user + 1))
        else:
            indices.check(np.array([user]))


def test_users_in_range_are_not_tried_and_others_once() -> None:
    rows = [[(2, 2, 3)], [(0, 5, 0)], [(0, 0, -100)], [(0, 6, 0)]]
    indices = Indices(Task(Table(), cross_entropy), store_of(rows))
    assert indices._legal == {"x": (0, min(PLACES) - 1), "y": (0, CLASSES - 1)}
    assert indices.may_ignore
    before = indices._task.model.calls
    indices.check(np.array([0, 2]))  # in range, or ignored
    assert indices._task.model.calls == before
    for _ in range(3):
        indices.check(np.array([0, 1, 2]))
        with pytest.raises(IndexError):
            indices.check(np.arange(4))
    assert indices._task.model.calls == before + 2


@pytest.mark.parametrize("kind", [np.uint8, np.int64])
def test_integers_that_are_numbers_have_no_range(kind: type[np.generic]) -> None:
    fields = {"x": np.full((3, 2), 200, kind), "y": np.array([1.5, 2.0, 3.0], np.float32)}

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x / 255)[:, 0]

    indices = Indices(Task(Scaled(), "mse"), UserStore(fields, np.array([0, 3])))
    assert indices._legal == {}
    indices.check(np.array([0]))


def picky(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss that does not know what is ignored."""
    return -outputs.log_softmax(1).gather(1, targets[:, None])[:, 0]


def test_what_is_ignored_is_legal_only_where_the_loss_can_compute_with_it() -> None:
    store = store_of([[(0, 0, -100)]])
    Indices(Task(Table(), cross_entropy), store).check(np.array([0]))
    with pytest.raises(RuntimeError, match="out of bounds"):
        Indices(Task(Table(), picky), store).check(np.array([0]))


def test_what_was_raised_keeps_no_rows() -> None:
    indices = Indices(Task(Table(), cross_entropy), store_of([[(0, 9, 0)]]))
    kept = weakref.WeakSet[torch.Tensor]()
    honest = indices._task.given

    def given(columns: dict[str, torch.Tensor]) -> object:
        kept.update(columns.values())
        return honest(columns)

    object.__setattr__(indices._task, "given", given)
    for _ in range(2):
        with pytest.raises(IndexError):
            indices.check(np.array([0]))
    gc.collect()
    assert not kept


def test_on_a_device_they_count_as_zero_before_it_is_asked() -> None:
    store = store_of([[(0, 9, 0)], [(0, 0, 7)]])
    task = Task(Table(), cross_entropy)
    request = request_under(task, LocalTraining(0.1, epochs=1), 2, 0.3)
    with without_autocast():
        trainer = Trainer(task, store, None, DEVICE, 2**20, "float32", naming=True)
        for chunk in (Chunk(np.arange(2), (2,)), Chunk(np.zeros(1, np.int64))):
            with on_device(may_wait=True):
                found = trainer.sum_of(request, [chunk])
    assert not found.partial.total.any()
    assert found.dropped is not None
    assert found.dropped.user == 0
    assert "IndexError" in found.dropped.reason
