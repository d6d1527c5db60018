"""The tasks of `simulations.defaults`: each has data, a model, ε and δ.

In six tasks users have one row, in the others several. Data are read from the folder FEDPRIV_DATA,
see docs/data.md. Inputs are scaled by public constants, or by statistics of held-out people, which
count as public.
"""

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer
from torch import nn

from fedpriv.data.columns import Array
from fedpriv.data.partition import shards
from fedpriv.data.population import Population, load_population
from fedpriv.experiment.config import spelled_out
from simulations.datasets.cifar import images
from simulations.datasets.files import read_csv
from simulations.datasets.mnist import load_mnist_writers
from simulations.datasets.people import YES_OR_NO, census_facts, find_census
from simulations.datasets.shakespeare import load_shakespeare_roles
from simulations.papers.census_employment import HELD_OUT, load, scaled

Floats = NDArray[np.float32]
_TESTED = 5_000  # held-out people of the census
_ASSOCIATE = 12  # the least educ with a degree


def employment() -> Population:
    """Return 20,000 people as users, with one record of nine facts, to predict employment."""
    people, held_out = load(find_census()).split(HELD_OUT)
    return Population.from_arrays(
        scaled(people.x),
        people.y.astype(np.int64),
        np.arange(len(people.y)),
        held_out=(scaled(held_out.x), held_out.y.astype(np.int64)),
        name="census: employment",
    )


def census(target: str, users: int) -> Population:
    """Return people of the census with one row each, and 5,000 held-out people.

    The target is `income` (above 50,000 dollars), `married`, `age` (centred at 45, in units of 15
    years), or `answers`, which is five of them at once.
    """
    columns = read_csv(find_census(), ["age", "educ", "income", *YES_OR_NO])
    hidden = {"age": (), "income": (), "married": ("married", "divorced")}
    answers = ("employed", "married", "children", "disability", "militaryservice")
    facts = [n for n in YES_OR_NO if n not in hidden.get(target, answers)]
    x = census_facts(columns, facts)
    rich = columns["income"] > 50_000
    if target == "age":
        x = np.hstack([x[:, 7:], rich[:, None]]).astype(np.float32)  # without groups of ages
        y = ((columns["age"] - 45.0) / 15.0).astype(np.float32)[:, None]
    elif target == "answers":
        y = np.stack([columns[name] for name in answers], axis=1).astype(np.float32)
    else:
        y = (rich if target == "income" else columns[target] == 1.0).astype(np.int64)
    order = np.random.default_rng(0).permutation(len(y))
    training, testing = order[:users], order[-_TESTED:]
    return Population.from_arrays(
        x[training], y[training], np.arange(users), held_out=(x[testing], y[testing]), name=target
    )


def tumours() -> Population:
    """Return 426 tumours as users, benign or not; scaled by the 143 held-out ones."""
    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    training, testing = order[143:], order[:143]
    x = ((x - x[testing].mean(0)) / x[testing].std(0)).clip(-5, 5).astype(np.float32)
    return Population.from_arrays(
        x[training],
        y[training],
        np.arange(len(training)),
        held_out=(x[testing], y[testing]),
        name="tumours",
    )


def activities() -> Population:
    """Return five activities of 18 people with a phone and a watch; users are executions.

    Five other people are held out, and the 40 features are scaled by their statistics.
    """
    with np.load(Path(os.environ["FEDPRIV_DATA"]) / "har_phone_watch/har_features.npz") as file:
        x, y, subject, execution = (file[n] for n in ("X", "y", "subject", "execution"))
    public = subject > 18
    x = ((x - x[public].mean(0)) / (x[public].std(0) + 1e-6)).clip(-5, 5).astype(np.float32)
    y = y.astype(np.int64)
    return Population.from_arrays(
        x[~public], y[~public], execution[~public], held_out=(x[public], y[public]), name="har"
    )


def writers(images: int) -> Population:
    """Return MNIST's writers, each with its first images."""
    all_of = load_mnist_writers()
    starts, ends = all_of.users.offsets[:-1], all_of.users.offsets[1:]
    rows = np.concatenate(
        [np.arange(a, min(b, a + images)) for a, b in zip(starts, ends, strict=True)]
    )
    owner = np.repeat(np.arange(len(starts)), np.minimum(ends - starts, images))
    x, y = (all_of.users.fields[name][rows] for name in ("x", "y"))
    test = all_of.test["x"][:_TESTED], all_of.test["y"][:_TESTED]
    return Population.from_arrays(x, y, owner, held_out=test, name="writers")


def digits_dealt(users: int, deal: str) -> Population:
    """Return MNIST's images at half the width, dealt by "label", or in "unequal" or "equal" parts.

    By label, users have one digit each. Sizes of unequal parts follow Pareto's law with exponent 1.
    Equal parts have 20 images; in the other cases users share 10,000 images.
    """
    writers = load_mnist_writers()
    draw = np.random.default_rng(0)
    rows = draw.permutation(writers.users.rows)[: 20 * users if deal == "equal" else 10_000]
    x, y = (writers.users.fields[name][rows] for name in ("x", "y"))
    if deal == "label":
        owner = shards(y, users, 1, 0)
    elif deal == "equal":
        owner = np.arange(len(y)) % users
    else:
        sizes = 1.0 / draw.permutation(np.arange(1, users + 1))
        parts = np.concatenate(
            [np.arange(users), draw.choice(users, 10_000, p=sizes / sizes.sum())]
        )
        owner = parts[: len(y)]
    test = tuple(writers.test[name][:_TESTED] for name in ("x", "y"))
    return Population.from_arrays(
        _halved(x), y, owner, held_out=(_halved(test[0]), test[1]), name=f"digits by {deal}"
    )


def _halved(images: Array) -> Floats:
    """Return images at half the width: [n, 1, 28, 28] → [n, 1, 14, 14]."""
    halved: Floats = images.reshape(-1, 1, 14, 2, 14, 2).mean((3, 5), dtype=np.float32)
    return halved


def photographs(users: int, rows: int) -> Population:
    """Return CIFAR-10 at half the width, with `rows` images for each user."""
    with np.load(Path(os.environ["FEDPRIV_DATA"]) / "cifar10/cifar10.npz") as file:
        (x, y), (xt, yt) = images(file, "train", users * rows), images(file, "test", 3_000)
    owner = np.arange(users * rows) % users
    return Population.from_arrays(
        _small(x), y, owner, held_out=(_small(xt), yt), name="photographs"
    )


def _small(pixels: NDArray[np.uint8]) -> Floats:
    """Return inputs around 0 at half the width: [n, 32, 32, 3] → [n, 3, 16, 16]."""
    x = pixels.reshape(-1, 16, 2, 16, 2, 3).mean((2, 4), dtype=np.float32)
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2) / np.float32(64.0) - np.float32(2.0))


def small_cnn() -> nn.Module:
    """Return a model with two convolutions on images [B, 3, 16, 16]: 13,402 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(512, 16),
        nn.Tanh(),
        nn.Linear(16, 10),
    )


def speeches(users: int) -> Population:
    """Return texts of some of Shakespeare's roles, in at most eight windows of 16 characters."""
    roles = load_shakespeare_roles(length=16, windows_per_role=8)
    ends = roles.users.offsets
    owner = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
    selected = owner < users
    x, y = (roles.users.fields[name][selected] for name in ("x", "y"))
    test = roles.test["x"][:_TESTED], roles.test["y"][:_TESTED]
    return Population.from_arrays(x, y, owner[selected], held_out=test, name="speeches")


class Recurrent(nn.Module):
    """A map of characters [B, T] to scores [B, 96, T] of the next one: 7,968 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.scores = nn.Embedding(96, 16), nn.Linear(32, 96)
        self.hidden = nn.GRU(16, 32, batch_first=True)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Return the scores at each position."""
        scores: torch.Tensor = self.scores(self.hidden(self.characters(text))[0])
        return scores.transpose(1, 2)


@dataclass(frozen=True)
class Task:
    """Data, model, ε and δ of an experiment."""

    title: str  # in the table of docs/choosing-settings.md
    users: int  # N
    data: str | dict[str, object]
    model: dict[str, object]
    epsilon: float
    delta: float


def _mlp(inputs: int, hidden: int, classes: int, **sections: object) -> dict[str, object]:
    options = {"inputs": inputs, "hidden": hidden, "classes": classes}
    return {"name": "mlp", "options": options, **sections}


def _linear(inputs: int, classes: int, **options: object) -> dict[str, object]:
    return {"name": "softmax", "options": {"inputs": inputs, "classes": classes}, **options}


def _here(function: str, **options: object) -> dict[str, object]:
    return {"name": f"simulations.default_tasks:{function}", "options": options}


_LOGIT = {"loss": "binary-cross-entropy"}
TASKS = {
    # Users of one row.
    "employment": Task(
        "census: employed?, logistic regression",
        20000,
        _here("employment"),
        _linear(9, 2),
        1.0,
        1e-5,
    ),
    "income": Task(
        "census: income above $50,000?, one logit",
        20000,
        _here("census", target="income", users=20_000),
        _linear(47, 1, **_LOGIT),
        1.0,
        1e-5,
    ),
    "age": Task(
        "census: age, MLP (R²)",
        5000,
        _here("census", target="age", users=5_000),
        _mlp(41, 16, 1, loss="mse"),
        2.0,
        1e-5,
    ),
    "answers": Task(
        "census: five answers, MLP",
        5000,
        _here("census", target="answers", users=5_000),
        _mlp(37, 16, 5, **_LOGIT),
        4.0,
        1e-5,
    ),
    "married": Task(
        "census: married?, logistic regression",
        1000,
        _here("census", target="married", users=1_000),
        _linear(43, 2),
        2.0,
        1e-4,
    ),
    "tumours": Task(
        "breast cancer, one logit", 426, _here("tumours"), _linear(30, 1, **_LOGIT), 4.0, 1e-3
    ),
    # Users of several rows.
    "digits": Task(
        "DIGITS, softmax regression",
        287,
        {"name": "digits", "options": {"users": 287}},
        _linear(64, 10),
        2.0,
        1e-3,
    ),
    "activities": Task(
        "activities by execution, MLP", 175, _here("activities"), _mlp(40, 32, 5), 8.0, 1e-3
    ),
    "one-digit": Task(
        "MNIST, one digit a user, softmax regression",
        500,
        _here("digits_dealt", users=500, deal="label"),
        _linear(196, 10),
        4.0,
        1e-3,
    ),
    "many": Task(
        "MNIST, 20 images a user, softmax regression",
        3000,
        _here("digits_dealt", users=3_000, deal="equal"),
        _linear(196, 10),
        2.0,
        1e-5,
    ),
    "unequal": Task(
        "MNIST, unequal users, MLP",
        300,
        _here("digits_dealt", users=300, deal="unequal"),
        _mlp(196, 32, 10),
        8.0,
        1e-3,
    ),
    "writers": Task(
        "MNIST by writer, MLP", 539, _here("writers", images=40), _mlp(784, 64, 10), 8.0, 1e-3
    ),
    "photographs": Task(
        "CIFAR-10, CNN",
        500,
        _here("photographs", users=500, rows=10),
        {"name": "simulations.default_tasks:small_cnn"},
        8.0,
        1e-3,
    ),
    "speeches": Task(
        "Shakespeare's roles, GRU",
        250,
        _here("speeches", users=250),
        {"name": "simulations.default_tasks:Recurrent"},
        8.0,
        1e-3,
    ),
}


@lru_cache(maxsize=1)
def population_of(task: str) -> Population:
    """Return the users of a task."""
    data = spelled_out({"data": TASKS[task].data})["data"]
    assert isinstance(data, dict)
    return load_population(data["name"], data.get("options", {}))
