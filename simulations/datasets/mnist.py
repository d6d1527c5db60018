"""MNIST by its writers."""

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.arrays import from_arrays
from fedpriv.data.columns import Array, Fields, read_npz
from fedpriv.data.population import HELD_OUT_USER, Population, UserStore
from fedpriv.errors import DataError
from simulations.datasets.files import find_file

_TRAIN = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
_TEST = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")
_WRITERS = "mnist_writers.npz"
_WRITER_COLUMN = 2  # of QMNIST's labels
_IDX_DTYPES = {0x08: ">u1", 0x0C: ">i4"}
_MNIST_SOURCE = "MNIST's four idx files are at https://ossci-datasets.s3.amazonaws.com/mnist/"
_QMNIST_SOURCE = "QMNIST's labels are at https://github.com/facebookresearch/qmnist"
_MEAN, _STDDEV = 0.1307, 0.3081


def load_mnist_writers(folder: str | Path | None = None) -> Population:
    """Load MNIST, where each writer of training images is a user: 539 users of 19 to 131 images.

    The test rows are MNIST's 10,000 test images, by 297 other writers. User ids are NIST's numbers
    of writers, from QMNIST (Yadav and Bottou 2019, arXiv:1905.10498).

    The folder (None: FEDPRIV_DATA), or its subfolder `mnist`, holds MNIST's four idx .gz files, and
    mnist_writers.npz (train_writer and test_writer, integers [60000] and [10000]), or QMNIST's
    qmnist-train-labels-idx2-int.gz and qmnist-test-labels-idx2-int.gz. Pixels are scaled to [0, 1],
    less 0.1307, divided by 0.3081: x is float32 [rows, 1, 28, 28].
    """
    place = find_file(folder, "MNIST", _TRAIN[:1], "mnist", _MNIST_SOURCE).parent
    for name in (*_TRAIN, *_TEST):
        if not (place / name).is_file():
            raise DataError(f"{name} is absent from {place}; {_MNIST_SOURCE}")
    images, labels = _read_pair(place, _TRAIN)
    writers = _read_writers(place, "train", len(images))
    grouped = from_arrays({"x": images, "y": labels}, writers)
    x, y = grouped.fields["x"], grouped.fields["y"]
    users = UserStore({"x": _normalised(x), "y": y}, grouped.offsets, grouped.user_ids)
    images, labels = _read_pair(place, _TEST)
    writers = _read_writers(place, "test", len(images))
    name = f"mnist-writers: {users.population} writers"
    test: Fields = {"x": _normalised(images), "y": labels, HELD_OUT_USER: writers}
    return Population(name, users, test)


def _read_pair(place: Path, files: tuple[str, str]) -> tuple[Array, NDArray[np.int64]]:
    images_path, labels_path = (place / name for name in files)
    images, labels = _read_idx(images_path, dimensions=3), _read_idx(labels_path, dimensions=1)
    if images.dtype != np.uint8 or images.shape[1:] != (28, 28):
        kind = f"{images.dtype}{list(images.shape[1:])}"
        raise DataError(f"{images_path} has images {kind}; they must be uint8[28, 28]")
    if len(labels) != len(images):
        raise DataError(f"{labels_path} has {len(labels)} labels for {len(images)} images")
    if labels.size and labels.max() > 9:
        raise DataError(f"{labels_path} has the label {labels.max()}; digits are 0 to 9")
    return images, labels.astype(np.int64)


def _read_idx(path: Path, dimensions: int) -> NDArray[np.integer]:
    try:
        # Two zero bytes, code of the type, number of dimensions, their sizes, values: big-endian.
        content = gzip.decompress(path.read_bytes())
        zeros, code, count, *shape = struct.unpack_from(f">HBB{dimensions}I", content)
        if zeros or count != dimensions:
            raise ValueError("magic number")
        values = np.frombuffer(content, _IDX_DTYPES[code], offset=4 + 4 * dimensions)
        return values.reshape(shape).astype(values.dtype.newbyteorder("="))
    except (OSError, EOFError, zlib.error, struct.error, KeyError, ValueError) as error:
        condition = f"a gzip-compressed idx file of integers in {dimensions} dimensions"
        raise DataError(f"{path} cannot be read; it must be {condition}") from error


def _read_writers(folder: Path, part: str, images: int) -> NDArray[np.int64]:
    """Return the NIST writer of each image, from mnist_writers.npz or else QMNIST's labels."""
    derived, original = folder / _WRITERS, folder / f"qmnist-{part}-labels-idx2-int.gz"
    if derived.is_file():
        writers = read_npz(derived).get(f"{part}_writer")
        if writers is None or writers.ndim != 1 or writers.dtype.kind not in "iu":
            raise DataError(f"{derived} holds no list of integers {part}_writer")
    elif original.is_file():
        columns = _read_idx(original, dimensions=2)
        if columns.shape[1] <= _WRITER_COLUMN:
            columns_text = f"{original} has {columns.shape[1]} columns"
            raise DataError(f"{columns_text}; the writer is column 2 of 8")
        # QMNIST has 50,000 additional test images, after MNIST's.
        writers = columns[: images if part == "test" else None, _WRITER_COLUMN]
    else:
        names = f"{_WRITERS} and {original.name}"
        raise DataError(f"{names} are absent from {folder}; {_QMNIST_SOURCE}")
    if len(writers) != images:
        raise DataError(f"{folder} has {len(writers)} writers for {images} {part} images")
    return writers.astype(np.int64)


def _normalised(pixels: Array) -> NDArray[np.float32]:
    """Return pixels as inputs: uint8 [rows, 28, 28] → float32 [rows, 1, 28, 28]."""
    table = ((np.arange(256) / 255.0 - _MEAN) / _STDDEV).astype(np.float32)
    images: NDArray[np.float32] = table[pixels][:, np.newaxis]
    return images
