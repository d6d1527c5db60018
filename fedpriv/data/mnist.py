"""MNIST with its writers as users, the natural unit of privacy."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.arrays import from_arrays
from fedpriv.data.files import find_folder, read_npz
from fedpriv.data.population import Population, UserStore
from fedpriv.errors import DataError

_TRAIN = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
_TEST = ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz")
_WRITERS = "mnist_writers.npz"
_QMNIST_LABELS = "qmnist-train-labels-idx2-int.gz"
_WRITER_COLUMN = 2  # of QMNIST's labels
_IDX_DTYPES = {0x08: ">u1", 0x0C: ">i4"}
_MNIST_SOURCE = "MNIST's four idx files are at https://ossci-datasets.s3.amazonaws.com/mnist/"
_QMNIST_SOURCE = f"{_QMNIST_LABELS} is at https://github.com/facebookresearch/qmnist"
_MEAN, _STDDEV = 0.1307, 0.3081


def load_mnist_writers(folder: str | Path | None = None) -> Population:
    """Load MNIST, each training writer a user: 539 users of 19 to 131 images.

    The test rows are MNIST's 10,000 test images; their 297 writers are none of the users. Writers
    are NIST's numbers as QMNIST publishes them (Yadav and Bottou 2019, arXiv:1905.10498); they are
    the user ids.

    The folder, or one `mnist` in it, holds MNIST's four idx .gz files under their usual names, and
    mnist_writers.npz (train_writer, integers [60000]) or qmnist-train-labels-idx2-int.gz; None
    means the environment variable FEDPRIV_DATA. Pixels are scaled to [0, 1], less 0.1307, divided
    by 0.3081: x is float32 [rows, 1, 28, 28], y int64 [rows] in 0..9.
    """
    place = find_folder(folder, "MNIST", _TRAIN[0], _MNIST_SOURCE)
    for name in (*_TRAIN, *_TEST):
        if not (place / name).is_file():
            raise DataError(f"{name} is absent from {place}; {_MNIST_SOURCE}")
    images, labels = _read_pair(place, _TRAIN)
    writers = _read_train_writers(place)
    if len(writers) != len(images):
        raise DataError(
            f"{place} has writers for {len(writers)} training images; there are {len(images)}"
        )
    grouped = from_arrays({"x": images, "y": labels}, writers)
    x, y = grouped.fields["x"], grouped.fields["y"]
    users = UserStore({"x": _normalised(x), "y": y}, grouped.offsets, grouped.user_ids)
    test_images, test_labels = _read_pair(place, _TEST)
    return Population(
        name=f"mnist-writers: {users.population} writers",
        users=users,
        test={"x": _normalised(test_images), "y": test_labels},
    )


def _read_pair(
    place: Path, files: tuple[str, str]
) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    images_path, labels_path = (place / name for name in files)
    images, labels = _read_idx(images_path, dimensions=3), _read_idx(labels_path, dimensions=1)
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


def _read_idx(path: Path, dimensions: int) -> NDArray[np.integer]:
    """Read a gzip-compressed idx file of bytes or of 32-bit integers.

    The format: two zero bytes, a type code (0x08 unsigned byte, 0x0C int), the number of
    dimensions, each dimension as a big-endian 32-bit integer, then the values, big-endian.
    """
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    dtype = _IDX_DTYPES.get(content[2]) if content[:2] == b"\0\0" and len(content) > 3 else None
    if dtype is None or content[3] != dimensions:
        raise DataError(
            f"{path} has the magic number 0x{content[:4].hex()}; "
            f"it must be 0x00000{0x800 + dimensions:x} (bytes) or 0x00000{0xC00 + dimensions:x}"
        )
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise DataError(f"{path} ends within its header of {start} bytes")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if len(content) - start != size:
        raise DataError(
            f"{path} has {len(content) - start} bytes of values; its header says {size}"
        )
    values = np.frombuffer(content, dtype=dtype, offset=start).reshape(shape)
    return values.astype(values.dtype.newbyteorder("="))


def _read_train_writers(folder: Path) -> NDArray[np.integer]:
    """NIST writer of each training image, from mnist_writers.npz or else from QMNIST's labels."""
    derived, original = folder / _WRITERS, folder / _QMNIST_LABELS
    if derived.is_file():
        writers = read_npz(derived).get("train_writer")
        if writers is None or writers.ndim != 1 or writers.dtype.kind not in "iu":
            raise DataError(f"{derived} holds no list of integers train_writer")
        return writers.astype(np.int64)
    if not original.is_file():
        raise DataError(
            f"{_WRITERS} and {_QMNIST_LABELS} are absent from {folder}; {_QMNIST_SOURCE}"
        )
    columns = _read_idx(original, dimensions=2)
    if columns.shape[1] <= _WRITER_COLUMN:
        raise DataError(f"{original} has {columns.shape[1]} columns; the writer is column 2 of 8")
    return columns[:, _WRITER_COLUMN]


def _normalised(pixels: NDArray[np.generic]) -> NDArray[np.float32]:
    """uint8 [rows, 28, 28] → float32 [rows, 1, 28, 28]."""
    table = ((np.arange(256) / 255.0 - _MEAN) / _STDDEV).astype(np.float32)
    images: NDArray[np.float32] = table[pixels][:, np.newaxis]
    return images
