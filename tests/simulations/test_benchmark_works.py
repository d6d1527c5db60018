"""The works of the benchmark: every contestant of this environment does the same one."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedpriv.data.shakespeare import FILE
from fedpriv.errors import DataError, InvalidValueError
from fedpriv.privacy.layout import Layout, flat
from simulations.benchmarks import contestants
from simulations.benchmarks.compare import LARGE
from simulations.benchmarks.contestants import Turn
from simulations.benchmarks.process import contestant_named
from simulations.benchmarks.roles import roles
from simulations.benchmarks.works import WORKS, Work, flattened

CPU = torch.device("cpu")


def of_first(name: str, users: int) -> Work:
    """A work with its first users alone."""
    work = WORKS[name]()
    offsets = work.offsets[: users + 1]
    return replace(work, x=work.x[: offsets[-1]], y=work.y[: offsets[-1]], offsets=offsets)


def total_of(contestant: str, name: str, work: Work, users: int) -> np.ndarray:
    """Sum of a contestant over the first users."""
    sums = []
    turn = Turn(range(users), work.without_order())
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


@pytest.mark.parametrize("name", sorted({*WORKS} - {*LARGE}))  # of which nothing else is true
def test_our_sums_are_those_of_the_plain_loop(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # For a few users; more are examined, though none would train.
    monkeypatch.setattr(contestants, "chunk_memory_of", lambda *_: 2**23)
    work = of_first(name, 5)
    expected = total_of("plain", name, work, 4)
    assert np.linalg.norm(expected) > 0.0
    error = np.linalg.norm(total_of("fedpriv", name, work, 4) - expected)
    # The loop's updates are differences of parameters that were rounded to float32.
    start = np.linalg.norm(flattened([*work.build().parameters()]))
    # Each number of each of our four users is cut to a whole number of steps.
    layout = Layout(("all",), (expected.shape,))
    cut = 4 * np.sqrt(expected.size) * flat(layout, work.clipping_norm)[0].granularity
    assert error <= 1e-5 * np.linalg.norm(expected) + 4 * 2.0**-24 * start + cut
    # Another user makes another sum: the comparison would notice one.
    other = np.linalg.norm(total_of("fedpriv", name, work, 5) - expected)
    assert other > 1e-2 * np.linalg.norm(expected)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_the_sum_of_opacus_is_that_of_the_plain_loop() -> None:
    work = of_first("dpsgd", 20)
    expected = total_of("plain", "dpsgd", work, 20)
    error = np.linalg.norm(total_of("opacus", "dpsgd", work, 20) - expected)
    assert error <= 1e-5 * np.linalg.norm(expected)
    with pytest.raises(InvalidValueError, match="several examples"):
        total_of("opacus", "mlp", of_first("mlp", 2), 2)


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
    np.testing.assert_allclose(total_of("plain", "softmax", work, 3), expected, atol=1e-6)


def test_settings_without_an_order() -> None:
    softmax, mlp = of_first("softmax", 2), of_first("mlp", 2)
    assert softmax.without_order() == softmax.local
    assert (mlp.without_order().batch_size, mlp.without_order().epochs) == (None, 2)


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
    with pytest.raises(DataError, match="100 roles say enough"):
        roles(users=101)
    (tmp_path / FILE).unlink()
    with pytest.raises(DataError, match="is absent from"):
        roles(users=1)
