"""CIFAR-10, whose images have no owners: they are divided among users."""

import io
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fedpriv.data.columns import Array, read_npz
from fedpriv.data.partition import dirichlet, iid
from fedpriv.data.population import Population
from simulations.datasets.files import find_file

FILE = "cifar10.npz"
_CLASSES = 10
_SOURCE = "it packs the images of https://www.cs.toronto.edu/~kriz/cifar.html as JPEG"


def load_cifar(
    users: int = 500, alpha: float | None = None, seed: int = 0, folder: str | Path | None = None
) -> Population:
    """Deal half of CIFAR-10, 25,000 images, to users; 5,000 test images are held out.

    Users are those of pfl's benchmark. With 500 users, each has 50 images: at random, or, with
    `alpha`, of classes in shares from a Dirichlet distribution whose ten parameters are all alpha.
    x is float32 [rows, 3, 32, 32], around 0, and y int64 [rows]. The folder (None: FEDPRIV_DATA),
    or its subfolder `cifar10`, holds cifar10.npz: train_jpeg, all files concatenated as uint8,
    train_offsets [25,001], train_labels [25,000], and the same for the test images.
    """
    packed = read_npz(find_file(folder, "CIFAR-10", (FILE,), "cifar10", _SOURCE))
    (x, y), (xt, yt) = (images(packed, part) for part in ("train", "test"))
    owners = iid(len(y), users, seed)
    if alpha is not None:
        # The partition multiplies its parameter by the classes' shares.
        owners = dirichlet(y, users, _CLASSES * alpha, seed)
    partition = "iid" if alpha is None else f"dirichlet {alpha}"
    name = f"cifar10: {users} users, {partition}, seed {seed}"
    return Population.from_arrays(_scaled(x), y, owners, held_out=(_scaled(xt), yt), name=name)


def images(
    packed: Mapping[str, Array], part: str, count: int | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the first images of a part, uint8 [count, 32, 32, 3], and their classes [count]."""
    files, labels = packed[f"{part}_jpeg"].tobytes(), packed[f"{part}_labels"][:count]
    ends = packed[f"{part}_offsets"][: len(labels) + 1]
    pixels = [np.asarray(Image.open(io.BytesIO(files[a:b]))) for a, b in pairwise(ends)]
    return np.stack(pixels), labels.astype(np.int64)


def _scaled(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    scaled: NDArray[np.float32] = pixels.transpose(0, 3, 1, 2).astype(np.float32) / 64.0 - 2.0
    return np.ascontiguousarray(scaled)
