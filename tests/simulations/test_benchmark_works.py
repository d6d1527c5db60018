"""The works of the benchmark: every contestant of this environment does the same one."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedpriv.errors import DataError, InvalidValueError
from simulations.benchmarks.compare import ON_CPU
from simulations.benchmarks.contestants import Turn
from simulations.benchmarks.process import contestant_named
from simulations.benchmarks.roles import roles
from simulations.benchmarks.works import WORKS, Work, pareto
from simulations.datasets.shakespeare import FILE

CPU = torch.device("cpu")
ATTENDING = ("attention", "attention-untied")


def of_first(name: str, users: int) -> Work:
    """A work with its first users alone, and a copy of each."""
    work = WORKS[name]()
    fields = {field: tensor[: work.offsets[users]] for field, tensor in work.fields.items()}
    few = replace(work, fields=fields, offsets=work.offsets[: users + 1], copies=0)
    return few.with_copies(users)


def total_of(contestant: str, name: str, work: Work, users: range) -> np.ndarray:
    """Sum of a contestant over some users."""
    sums = []
    turn = Turn(users, work.local)
    contestant_named(contestant, name)(work, CPU, lambda train: sums.append(train(turn)))
    return sums[0]


@pytest.fixture(autouse=True)
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roles that say from 65 to 362 different characters, one more, and one too little."""
    monkeypatch.setenv("FEDPRIV_DATA", str(tmp_path))
    letters = "".join(map(chr, range(32, 127)))
    said = {f"P_{i:03}": (letters * 4)[: 65 + 3 * i] for i in range(99)}
    said |= {"SILENT": "Oh.", "TALKER": letters * 50}
    with gzip.open(tmp_path / FILE, "wt", encoding="ascii") as file:
        for user, text in said.items():
            role = {"user": user, "train": [text], "test": [letters]}
            file.write(json.dumps(role) + "\n")


# Sums of models that draw masks never agree so well.
@pytest.mark.parametrize("name", sorted({*ON_CPU} - {"cifar", "mlp-dropout", *ATTENDING}))
def test_our_sums_are_those_of_the_plain_loop(name: str) -> None:
    work = of_first(name, 2)
    expected = total_of("plain", name, work, work.checked[:1])
    # Another user makes another sum, which the comparison would notice.
    one, two = (total_of("alone", name, work, some) for some in (work.checked[:1], work.checked))
    assert differ(one, expected) <= work.tolerance < differ(two, expected)


def differ(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_the_sum_of_opacus_is_that_of_the_plain_loop() -> None:
    work = of_first("dpsgd", 20)
    expected = total_of("plain", "dpsgd", work, range(20))
    assert differ(total_of("opacus", "dpsgd", work, range(20)), expected) <= 1e-5
    with pytest.raises(InvalidValueError, match="several examples"):
        total_of("opacus", "mlp", of_first("mlp", 2), range(2))


def test_copies_have_as_many_rows_all_like_the_first() -> None:
    work = of_first("mlp-pareto", 3)
    assert (work.users, [*work.checked]) == (3, [3, 4, 5])
    for user in range(3):
        (x, y), (own, labels) = work.examples_of(3 + user), work.examples_of(user)
        assert len(x) == len(own) >= 5
        assert all(torch.equal(row, own[0]) for row in x)
        assert {*y.tolist()} == {int(labels[0])}


def test_unequal_users_have_as_many_rows_as_equal_ones() -> None:
    sizes, alike = pareto(300), WORKS["mlp-equal"]()
    assert (min(sizes), max(sizes)) == (5, 500)
    assert np.median(sizes) < np.mean(sizes) / 2
    assert np.ptp(np.diff(alike.offsets)) == 1
    assert sum(np.diff(alike.offsets)[: alike.users]) == sum(sizes)


@pytest.mark.parametrize("clipping_norm", [1e-3, 1e3])
def test_the_plain_loop_by_hand(clipping_norm: float) -> None:
    """Softmax regression from zero: one step of −rate × mean of (1/10 − one hot) xᵀ, clipped."""
    work = replace(of_first("softmax", 3), clipping_norm=clipping_norm)
    expected = np.zeros(330)
    for user in range(3):
        x, y = (tensor.numpy() for tensor in work.examples_of(user))
        slope = 0.1 - np.eye(10)[y]
        update = -0.1 * np.concatenate([(slope.T @ x).ravel(), slope.sum(0)]) / len(x)
        expected += update * min(1.0, clipping_norm / np.linalg.norm(update))
    np.testing.assert_allclose(total_of("plain", "softmax", work, range(3)), expected, atol=1e-6)


def test_operations_by_hand() -> None:
    forward = 2 * (784 * 128 + 128 * 10)
    gradients = forward + 2 * 128 * 10  # by all weights, and by the hidden layer
    assert of_first("mlp", 3).flops_of(3) == 3 * 50 * (forward + gradients)


def test_roles_are_pieces_of_what_each_says(tmp_path: Path) -> None:
    x, y, offsets = roles(users=100)
    assert np.diff(offsets).tolist()[:3] == [1, 1, 1]
    assert np.diff(offsets).tolist()[-2:] == [5, 64]
    assert x.shape == y.shape == (offsets[-1], 64)
    assert torch.equal(x[:, 1:], y[:, :-1])
    for user in (98, 99):
        rows = slice(int(offsets[user]), int(offsets[user + 1]))
        assert torch.equal(x[rows].flatten()[1:], y[rows].flatten()[:-1])
    assert len(roles(users=30)[2]) == 31
    with pytest.raises(DataError, match="100 roles have enough text"):
        roles(users=101)
    (tmp_path / FILE).unlink()
    with pytest.raises(DataError, match="is absent from"):
        roles(users=1)
