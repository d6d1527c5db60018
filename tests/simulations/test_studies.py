"""The committed studies and what they are made of: populations and models by import path."""

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from fedpriv.engine.task import Task, find_loss
from fedpriv.studies.study import load_study
from simulations import dealt_mnist, two_scanners
from simulations.small_cnn import small_cnn

STUDIES = [
    "clipping_deep",
    "clipping_digits",
    "clipping_mnist_writers",
    "clipping_mnist_writers_cnn",
    "clipping_shakespeare",
    "clipping_two_scanners",
    "norm_mnist_writers",
    "one_label",
    "users_mnist",
]
ROWS = 400


@pytest.fixture
def mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MNIST's files, made up: as many rows of each part as DIGITS has at least held out."""
    monkeypatch.setenv("FEDPRIV_DATA", str(tmp_path))
    random = np.random.default_rng(0)
    for part in ("train", "t10k"):
        images = random.integers(1, 256, size=(ROWS, 28, 28), dtype=np.uint8)
        for name, array in (("images-idx3", images), ("labels-idx1", images[:, 0, 0] % 10)):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
            path = tmp_path / f"{part}-{name}-ubyte.gz"
            path.write_bytes(gzip.compress(head + array.tobytes(), 1))
    writers = {"train_writer": np.arange(ROWS) % 8, "test_writer": 8 + np.arange(ROWS) % 5}
    np.savez(tmp_path / "mnist_writers.npz", **writers)


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_a_study(name: str) -> None:
    study = load_study(Path(__file__).parents[2] / "simulations" / f"{name}.toml")
    assert study.name == name.replace("_", "-")
    assert study.seeds == tuple(range(5))
    assert len(study.arms) >= 3


def test_a_user_of_two_scanners_has_pixels_of_one(mnist: None) -> None:
    population = two_scanners.people(small_users=20)
    users = population.users
    assert users.population == 28
    for user in range(users.population):
        x = users.examples_of(user)["x"]
        small, large = np.any(x[:, :64]), np.any(x[:, 64:])
        assert (small, large) == (user < 20, user >= 20)
    test = population.test["x"]
    has_small, has_large = np.any(test[:, :64], axis=1), np.any(test[:, 64:], axis=1)
    assert has_small.sum() == has_large.sum() == 360
    assert not np.any(has_small & has_large)


@pytest.mark.parametrize(("pixels", "still"), [(slice(0, 64), "large"), (slice(64, 848), "small")])
def test_a_user_moves_the_weights_of_its_own_scanner(pixels: slice, still: str) -> None:
    task = Task(two_scanners.model(), find_loss("cross-entropy"))
    x = torch.zeros(3, 848)
    x[:, pixels] = 1.0
    task.losses_of(task.model(x), torch.tensor([1, 2, 3])).sum().backward()
    moved = {
        name
        for name, parameter in task.model.named_parameters()
        if parameter.grad is not None and bool(parameter.grad.any())
    }
    assert moved == {"small.weight", "large.weight"} - {f"{still}.weight"}


def test_the_same_images_are_dealt_to_any_number_of_users(mnist: None) -> None:
    few, many = dealt_mnist.people(3), dealt_mnist.people(100)
    assert (few.users.population, many.users.population) == (3, 100)
    assert few.name != many.name
    sums = [np.sort(p.users.fields["x"].sum(axis=(1, 2, 3))) for p in (few, many)]
    np.testing.assert_array_equal(*sums)
    sizes = np.diff(few.users.offsets)
    assert (sizes.min(), sizes.max(), sizes.sum()) == (133, 134, ROWS)


def test_the_small_cnn_has_the_size_that_it_tells() -> None:
    model = small_cnn()
    assert sum(parameter.numel() for parameter in model.parameters()) == 21_802
    assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
