"""CIFAR-10, dealt to users, from a made-up file."""

import io

import numpy as np
import pytest
from PIL import Image

from simulations.datasets.cifar import load_cifar


@pytest.fixture
def folder(tmp_path):
    """A hundred grey training images of which each tells its class, and ten test images."""
    arrays = {}
    for part, count in (("train", 100), ("test", 10)):
        labels = np.arange(count) % 10
        files = []
        for label in labels:
            file = io.BytesIO()
            Image.fromarray(np.full((32, 32, 3), 20 * label, np.uint8)).save(file, "JPEG")
            files.append(np.frombuffer(file.getvalue(), np.uint8))
        arrays |= {
            f"{part}_jpeg": np.concatenate(files),
            f"{part}_offsets": np.cumsum([0, *map(len, files)]),
            f"{part}_labels": labels.astype(np.uint8),
        }
    np.savez(tmp_path / "cifar10.npz", **arrays)
    return tmp_path


def test_images_stay_with_their_classes(folder) -> None:
    people = load_cifar(users=10, folder=folder)
    x, y = people.users.fields["x"], people.users.fields["y"]
    assert x.shape == (100, 3, 32, 32)
    assert people.users.sizes.tolist() == [10] * 10
    np.testing.assert_allclose(x[:, 0, 0, 0], 20 * y / 64.0 - 2.0, atol=0.05)
    np.testing.assert_array_equal(people.test["y"], np.arange(10))


def test_a_small_alpha_gives_users_few_classes(folder) -> None:
    def classes(**options):
        users = load_cifar(users=10, folder=folder, **options).users
        parts = np.split(users.fields["y"], users.offsets[1:-1])
        return np.mean([len(np.unique(part)) for part in parts])

    assert classes(alpha=0.1) < 4.5
    assert classes() > 5.5
