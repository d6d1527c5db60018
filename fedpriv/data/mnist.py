"""MNIST with its writers as users, the natural unit of privacy."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.arrays import from_arrays
from fedpriv.data.mnist_files import (
    TEST_IMAGES,
    TEST_LABELS,
    TRAIN_IMAGES,
    TRAIN_LABELS,
    find_mnist,
    read_idx,
    read_train_writers,
)
from fedpriv.data.population import Population
from fedpriv.data.store import UserStore
from fedpriv.errors import DataError

_MEAN, _STDDEV = 0.1307, 0.3081


def load_mnist_writers(folder: str | Path | None = None) -> Population:
    """Load MNIST, each training writer a user: 539 users of 19 to 131 images.

    The test rows are MNIST's 10,000 test images; their 297 writers are none of the users. Writers
    are NIST's numbers as QMNIST publishes them (Yadav and Bottou 2019, arXiv:1905.10498).

    Args:
        folder: holds the files, or a folder `mnist` with them; None means the environment
            variable FEDPRIV_DATA. Files: MNIST's four idx .gz files under their usual names, and
            mnist_writers.npz (train_writer, integers [60000]) or
            qmnist-train-labels-idx2-int.gz.

    Returns:
        Population with x float32 [rows, 1, 28, 28], pixels scaled to [0, 1], less 0.1307, divided
        by 0.3081, and y int64 [rows] in 0..9. User ids are the writers' numbers.

    Raises:
        DataError: a file is absent, damaged, or does not fit the others.
    """
    place = find_mnist(folder)
    images, labels = _read_pair(place / TRAIN_IMAGES, place / TRAIN_LABELS)
    writers = read_train_writers(place)
    if len(writers) != len(images):
        raise DataError(
            f"{place} has writers for {len(writers)} training images; there are {len(images)}"
        )
    grouped = from_arrays({"x": images, "y": labels}, writers)
    x, y = grouped.fields["x"], grouped.fields["y"]
    users = UserStore({"x": _normalised(x), "y": y}, grouped.offsets, grouped.user_ids)
    test_images, test_labels = _read_pair(place / TEST_IMAGES, place / TEST_LABELS)
    return Population(
        name=f"mnist-writers: {users.population} writers",
        users=users,
        test={"x": _normalised(test_images), "y": test_labels},
    )


def _read_pair(
    images_path: Path, labels_path: Path
) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    images, labels = read_idx(images_path, dimensions=3), read_idx(labels_path, dimensions=1)
    if images.dtype != np.uint8 or images.shape[1:] != (28, 28):
        raise DataError(
            f"{images_path} has images {images.dtype}{list(images.shape[1:])}; "
            "they must be uint8[28, 28]"
        )
    if len(labels) != len(images):
        raise DataError(f"{labels_path} has {len(labels)} labels for {len(images)} images")
    if labels.size and labels.max() > 9:
        raise DataError(f"{labels_path} has the label {labels.max()}; digits are 0 to 9")
    return images, labels.astype(np.int64)


def _normalised(pixels: NDArray[np.generic]) -> NDArray[np.float32]:
    """uint8 [rows, 28, 28] → float32 [rows, 1, 28, 28]."""
    table = ((np.arange(256) / 255.0 - _MEAN) / _STDDEV).astype(np.float32)
    images: NDArray[np.float32] = table[pixels][:, np.newaxis]
    return images
