"""Tests of what a task makes of tables: integer inputs, targets in a column, and one-hot rows."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import r2_score
from torch import nn
from torch.nn import functional

import fedpriv
from fedpriv.data import Population, UserStore
from fedpriv.engine.reading import population_for, rows_for, users_for
from fedpriv.engine.task import Task
from fedpriv.errors import ModelError

X = np.arange(12).reshape(4, 3)
Y = np.array([0, 1, 2, 1])
ONE_HOT = np.eye(3, dtype=int)[Y]
SEVERAL = np.concatenate([[[1, 1, 0]], ONE_HOT[1:]])


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.scores, self.calls = nn.Embedding(20, 2), nn.Linear(6, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.scores(self.words(x).flatten(1))


def test_integers_are_numbers_where_the_model_takes_no_words() -> None:
    rows = {"x": X, "y": Y}
    for model, kind in ((nn.Linear(3, 3), "f4"), (Words(), "i8"), (nn.Linear(7, 3), "i8")):
        read = rows_for(Task(model), rows)
        assert read["x"].dtype == np.dtype(kind)
        np.testing.assert_array_equal(read["x"], X)
        assert getattr(model, "calls", 0) == 0
    both = {"a": X, "b": X.astype("f4"), "y": Y}
    assert rows_for(Task(nn.Bilinear(3, 3, 3), inputs=("a", "b")), both)["a"] is X


def test_integers_that_are_mapped_from_disk_stay(tmp_path: Path) -> None:
    UserStore({"x": X, "y": Y}, np.array([0, 4])).save(tmp_path / "store")
    fields = UserStore.load(tmp_path / "store").fields
    assert rows_for(Task(nn.Linear(3, 3)), fields)["x"] is fields["x"]


@pytest.mark.parametrize(
    ("loss", "outputs", "flat"),
    [
        ("cross-entropy", nn.Linear(3, 3), True),
        ("cross-entropy", nn.Sequential(nn.Linear(3, 3), nn.Unflatten(1, (3, 1))), False),
        ("mse", nn.Linear(3, 1), False),
        ("mse", nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), True),
        ("binary-cross-entropy", nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), True),
        (nn.L1Loss(reduction="none"), nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), False),
        ("cross-entropy", nn.Linear(7, 3), False),
    ],
)
def test_a_column_of_targets_is_a_list_where_the_outputs_want_one(loss, outputs, flat) -> None:
    rows = {"x": X.astype("f4"), "y": Y[:, None]}
    assert rows_for(Task(outputs, loss), rows)["y"].tolist() == (Y if flat else Y[:, None]).tolist()


def one_hot(y: np.ndarray, held_out: np.ndarray) -> Population:
    x = X.astype("f4")
    return Population.from_arrays(x, y, Y, held_out=(x, held_out))


def test_one_hot_targets_and_whole_numbers_are_classes() -> None:
    users = [0, 1, 1, 2]  # classes of the users' rows, side by side
    for y in (ONE_HOT, ONE_HOT.astype(bool), ONE_HOT.astype(float)):
        read = population_for(Task(nn.Linear(3, 3)), one_hot(y, y))
        assert read.users.fields["y"].tolist() == users
        assert read.test["y"].tolist() == Y.tolist()
    read = population_for(Task(nn.Linear(3, 3)), one_hot(Y.astype(float), Y.astype(float)))
    assert (read.users.fields["y"].tolist(), read.test["y"].dtype) == (users, np.int64)
    halves = Y + np.array([0.5, 0, 0, 0])
    for people, task in (
        (one_hot(ONE_HOT, SEVERAL), Task(nn.Linear(3, 3))),
        (one_hot(ONE_HOT, ONE_HOT), Task(nn.Linear(3, 3), "binary-cross-entropy")),
        (one_hot(ONE_HOT, ONE_HOT), Task(nn.Linear(3, 4))),
        (one_hot(Y.astype(float), halves), Task(nn.Linear(3, 3))),
        (one_hot(Y.astype(float), Y.astype(float)), Task(nn.Linear(3, 1), "mse")),
    ):
        assert population_for(task, people) is people


@pytest.mark.parametrize(
    ("y", "held_out"),
    [
        (SEVERAL, ONE_HOT),
        (np.array([np.inf, 1.0, 2.0, 1.0]), Y.astype(float)),
        (np.array([0.5, 1.0, 2.0, 1.0]), Y.astype(float)),
    ],
)
def test_no_row_of_a_user_decides_how_those_of_others_are_read(y, held_out) -> None:
    """The first row is no class, so that its user fails; all others are read as without it."""
    task = Task(nn.Linear(3, 3))
    fine = np.where(np.isin(np.arange(4), 0).reshape(4, *[1] * (y.ndim - 1)), held_out, y)
    odd, even = (population_for(task, one_hot(rows, held_out)).users for rows in (y, fine))
    assert odd.fields["y"][0] < -(2**30)
    assert odd.fields["y"][1:].tolist() == even.fields["y"][1:].tolist()
    with pytest.raises(IndexError):
        functional.cross_entropy(torch.zeros(1, 3), torch.tensor(odd.fields["y"][:1]))


def test_held_out_numbers_where_the_model_takes_words_are_refused() -> None:
    x = X.astype(np.float32)
    people = Population.from_arrays(x, Y, range(4), held_out=(x, Y))
    assert population_for(Task(Words()), people).test["x"].dtype == np.int64
    people = Population.from_arrays(x, Y, range(4), held_out=(x + 0.5, Y))
    with pytest.raises(ModelError, match="takes whole numbers, and held-out field 'x' has"):
        population_for(Task(Words()), people)


def test_a_node_reads_users_by_types_and_shapes_alone() -> None:
    """A missing number may have made floats of all labels or words: others are read the same."""
    x, task = X.astype("f4"), Task(nn.Linear(3, 3))
    gap = np.array([0, np.nan, 2, 1], np.float32)
    for y in (Y, Y.astype("f4"), ONE_HOT, gap):
        read = users_for(task, {"x": x, "y": y})["y"]
        assert read[[0, 2, 3]].tolist() == Y[[0, 2, 3]].tolist()
        assert (read[1] == 1) is not (y is gap)
        assert read.dtype == np.int64
    shares = np.full((4, 3), 1 / 3, np.float32)
    assert users_for(task, {"x": x, "y": shares})["y"] is shares
    assert users_for(Task(nn.Linear(3, 1), "mse"), {"x": x, "y": gap})["y"] is gap
    words = np.where(np.arange(12).reshape(4, 3) == 4, np.nan, X).astype("f4")
    read = users_for(Task(Words()), {"x": words, "y": Y})["x"]
    assert read[[0, 2, 3]].tolist() == X[[0, 2, 3]].tolist()
    assert read[1, 1] < 0


@pytest.mark.parametrize(
    ("outputs", "loss", "message"),
    [
        (1, "mse", r"classes \['hi', 'lo', 'mid'\] and the loss takes numbers; use cross-entropy"),
        (1, "binary-cross-entropy", "and binary-cross-entropy takes two; use cross-entropy"),
        (2, "cross-entropy", "the model returns 2 scores and targets are the classes"),
    ],
)
def test_classes_that_do_not_fit_the_task_are_refused(outputs, loss, message) -> None:
    people = Population.from_arrays(X, ["lo", "hi", "lo", "mid"], Y)
    with pytest.raises(ModelError, match=message):
        population_for(Task(nn.Linear(3, outputs), loss), people)


def test_one_number_of_a_row_is_measured_against_a_list_of_targets(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    x = generator.integers(-3, 4, (300, 2))
    y = x @ [0.5, -0.25] + 0.1 * generator.standard_normal(300)
    people = Population.from_arrays(x, y, np.arange(300) // 3, held_out=(x, y))
    mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0))
    mechanism = mechanism.calibrate(epsilon=50, delta=1e-3, rounds=5)
    for loss in ("mse", "huber"):
        task = Task(nn.Linear(2, 1), loss, figures={"r2": "r2"})
        run = fedpriv.simulate(
            people,
            task,
            mechanism,
            local=fedpriv.SGD(0.1, epochs=2),
            out=tmp_path / loss,
            engine=fedpriv.Engine("cpu", processes=1),
            quiet=True,
        )
        with torch.no_grad():
            guess = run.model(torch.tensor(x, dtype=torch.float32))[:, 0]
        assert run.figures["r2"] == pytest.approx(r2_score(y, guess), abs=1e-4)
        expected = getattr(nn.functional, f"{loss}_loss")(guess, torch.tensor(y).float())
        assert run.loss == pytest.approx(float(expected), rel=1e-4)
