"""Tests of MNIST by writer: on small made-up files, and on the real ones where they are."""

import gzip
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.data.population import HELD_OUT_USER
from fedpriv.errors import DataError
from simulations.datasets.mnist import load_mnist_writers

NAMES = {
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
}
WRITERS = np.array([300, 7, 300, 7, 7, 12], dtype=np.int16)
HELD_OUT = np.array([4001, 4000, 4001], dtype=np.int16)
RNG = np.random.default_rng(0)
TRAIN = RNG.integers(0, 256, size=(6, 28, 28), dtype=np.uint8), np.array([5, 0, 4, 1, 9, 2], "u1")
TEST = RNG.integers(0, 256, size=(3, 28, 28), dtype=np.uint8), np.array([7, 2, 1], "u1")


def idx(array, code=0x08, dtype=">u1"):
    head = bytes([0, 0, code, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return gzip.compress(head + array.astype(dtype).tobytes())


def write_images(folder, train, test=TEST):
    for part, (images, labels) in (("train", train), ("t10k", test)):
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(idx(images))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(idx(labels))


def write_writers(folder, writers=WRITERS):
    np.savez(folder / "mnist_writers.npz", train_writer=writers, test_writer=HELD_OUT)


def write_qmnist(folder):
    # Of the test part, QMNIST has more images than MNIST.
    for part, writers in (("train", WRITERS), ("test", [*HELD_OUT, 5000, 5001])):
        columns = np.zeros((len(writers), 8), np.int32)
        columns[:, 2] = writers
        (folder / f"qmnist-{part}-labels-idx2-int.gz").write_bytes(idx(columns, 0x0C, ">i4"))


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "mnist"
    place.mkdir()
    write_images(place, TRAIN)
    write_writers(place)
    return place


def check_made_up(population):
    users = population.users
    assert population.name == "mnist-writers: 3 writers"
    assert [users.id_of(user) for user in range(3)] == ["300", "7", "12"]
    for user, writer in enumerate([300, 7, 12]):
        mine = [row for row in range(6) if WRITERS[row] == writer]
        expected = (TRAIN[0][mine] / 255.0 - 0.1307) / 0.3081
        np.testing.assert_allclose(users.examples_of(user)["x"][:, 0], expected, atol=1e-6)
        assert users.examples_of(user)["y"].tolist() == TRAIN[1][mine].tolist()
    for rows in (users.fields, population.test):
        assert (rows["x"].dtype, rows["y"].dtype) == (np.float32, np.int64)
        assert rows["x"].shape[1:] == (1, 28, 28)
    expected = (TEST[0] / 255.0 - 0.1307) / 0.3081
    np.testing.assert_allclose(population.test["x"][:, 0], expected, atol=1e-6)
    assert population.test["y"].tolist() == [7, 2, 1]
    assert population.test[HELD_OUT_USER].tolist() == HELD_OUT.tolist()


def test_writers_are_users(folder):
    check_made_up(load_mnist_writers(folder))


@given(st.integers(0, 2**32), st.lists(st.integers(0, 2), max_size=9), st.integers(0, 600))
def test_the_name_says_how_many_writers_there_are_and_nothing_of_their_images(
    tmp_path_factory, seed, more, first
):
    place, rng = tmp_path_factory.mktemp("mnist"), np.random.default_rng(seed)
    writers = first + np.array([0, 1, 2, *more])
    images = rng.integers(0, 256, (len(writers), 28, 28), np.uint8)
    write_images(place, (images, rng.integers(0, 10, len(writers), np.uint8)))
    write_writers(place, writers)
    assert load_mnist_writers(place).name == "mnist-writers: 3 writers"


def test_folder_is_itself_or_its_parent_given_or_in_the_environment(folder, monkeypatch):
    check_made_up(load_mnist_writers(str(folder.parent)))
    monkeypatch.setenv("FEDPRIV_DATA", str(folder))
    check_made_up(load_mnist_writers())
    monkeypatch.setenv("FEDPRIV_DATA", str(folder.parent))
    check_made_up(load_mnist_writers())


def test_writers_of_qmnist_serve_where_the_derived_file_is_absent(folder):
    (folder / "mnist_writers.npz").unlink()
    write_qmnist(folder)
    check_made_up(load_mnist_writers(folder))


def test_no_folder_is_one_sentence(monkeypatch):
    monkeypatch.delenv("FEDPRIV_DATA", raising=False)
    with pytest.raises(DataError, match="give folder= or set FEDPRIV_DATA"):
        load_mnist_writers()
    with pytest.raises(DataError, match="folder is 3"):
        load_mnist_writers(3)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_an_absent_file_is_named_with_the_places_and_the_source(folder, name):
    (folder / name).unlink()
    with pytest.raises(DataError) as caught:
        load_mnist_writers(folder)
    message = str(caught.value)
    assert message.startswith(f"{name} is absent from {folder}")
    assert "https://" in message
    assert "\n" not in message


def test_absent_writers_are_named_with_their_source(folder):
    (folder / "mnist_writers.npz").unlink()
    with pytest.raises(DataError, match=r"^mnist_writers.npz and qmnist-train-labels.* absent"):
        load_mnist_writers(folder)
    write_qmnist(folder)
    (folder / "qmnist-test-labels-idx2-int.gz").unlink()
    with pytest.raises(DataError, match=r"^mnist_writers.npz and qmnist-test-labels.* absent"):
        load_mnist_writers(folder)


TRAIN_IMAGES = "train-images-idx3-ubyte.gz"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (TRAIN_IMAGES, b"", "cannot be read"),
        (TRAIN_IMAGES, b"no gzip", "cannot be read"),
        (TRAIN_IMAGES, idx(TRAIN[0])[:-20], "cannot be read"),
        (TRAIN_IMAGES, gzip.compress(b"\0\0"), "cannot be read"),
        (TRAIN_IMAGES, idx(TRAIN[1]), "integers in 3 dimensions"),
        (TRAIN_IMAGES, idx(TRAIN[0], code=0x0D), "cannot be read"),
        (TRAIN_IMAGES, gzip.compress(b"\0\0\x08\x03\0\0"), "cannot be read"),
        (TRAIN_IMAGES, gzip.compress(gzip.decompress(idx(TRAIN[0])) + b"\0"), "cannot be read"),
        (TRAIN_IMAGES, gzip.compress(gzip.decompress(idx(TRAIN[0]))[:-1]), "cannot be read"),
        (TRAIN_IMAGES, idx(TRAIN[0][:, :27]), r"uint8\[27, 28\]"),
        (TRAIN_IMAGES, idx(TRAIN[0], 0x0C, ">i4"), r"int32\[28, 28\]"),
        ("train-labels-idx1-ubyte.gz", idx(TRAIN[1][:5]), "5 labels for 6 images"),
        ("t10k-labels-idx1-ubyte.gz", idx(np.array([1, 10, 2])), "the label 10"),
        ("mnist_writers.npz", b"no zip", "cannot be read"),
        ("mnist_writers.npz", b"PK\x03\x04 cut short", "cannot be read"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
def test_a_damaged_file_is_named(folder, name, content, message):
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_mnist_writers(folder)
    assert str(folder / name) in str(caught.value)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"train_writer": WRITERS[:5]}, "has 5 writers for 6 train images"),
        ({"train_writer": WRITERS, "test_writer": WRITERS}, "has 6 writers for 3 test images"),
        ({"train_writer": WRITERS}, "no list of integers test_writer"),
        ({"train_writer": WRITERS.astype(float)}, "no list of integers train_writer"),
        ({"test_writer": WRITERS}, "no list of integers train_writer"),
    ],
)
def test_writers_that_do_not_fit_are_refused(folder, arrays, message):
    np.savez(folder / "mnist_writers.npz", **arrays)
    with pytest.raises(DataError, match=message):
        load_mnist_writers(folder)


def test_qmnist_without_the_writer_column_is_refused(folder):
    (folder / "mnist_writers.npz").unlink()
    path = folder / "qmnist-train-labels-idx2-int.gz"
    path.write_bytes(idx(np.zeros((6, 2), np.int32), 0x0C, ">i4"))
    with pytest.raises(DataError, match="2 columns; the writer is column 2 of 8"):
        load_mnist_writers(folder)


@pytest.fixture(scope="module")
def real_folder():
    beside = Path(__file__).resolve().parents[3].parent / "shared" / "data"
    named = Path(os.environ.get("FEDPRIV_DATA", beside))
    for place in (named, named / "mnist"):
        if (place / TRAIN_IMAGES).is_file():
            return place
    pytest.skip("MNIST is absent: set FEDPRIV_DATA to the folder that holds its files")


@pytest.fixture(scope="module")
def real(real_folder):
    return load_mnist_writers(real_folder)


def test_real_mnist_has_the_published_shape(real):
    """Numbers of writers and images as QMNIST's labels give them; pixel mean and deviation."""
    users = real.users
    assert real.name == "mnist-writers: 539 writers"
    assert (users.population, users.rows, len(real.test["y"])) == (539, 60_000, 10_000)
    assert (users.sizes.min(), np.median(users.sizes), users.sizes.max()) == (19, 116, 131)
    # Published counts of the digits 0 to 9 in the training set.
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert np.bincount(users.fields["y"]).tolist() == counts
    assert abs(float(users.fields["x"].mean())) < 1e-3
    assert abs(float(users.fields["x"].std()) - 1.0) < 1e-3


def test_real_test_images_are_by_unseen_writers(real, real_folder):
    if not (real_folder / "mnist_writers.npz").is_file():
        pytest.skip("mnist_writers.npz, which names the test writers, is absent")
    with np.load(real_folder / "mnist_writers.npz") as arrays:
        test_writers = set(map(str, arrays["test_writer"].tolist()))
    enrolled = {real.users.id_of(user) for user in range(real.users.population)}
    assert len(test_writers) == 297
    assert not enrolled & test_writers


def test_real_writers_are_those_of_qmnist(real, real_folder, tmp_path):
    for name in NAMES | {f"qmnist-{part}-labels-idx2-int.gz" for part in ("train", "test")}:
        if not (real_folder / name).is_file():
            pytest.skip(f"{name} is absent")
        shutil.copyfile(real_folder / name, tmp_path / name)
    other = load_mnist_writers(tmp_path)
    np.testing.assert_array_equal(other.test[HELD_OUT_USER], real.test[HELD_OUT_USER])
    other = other.users
    np.testing.assert_array_equal(other.user_ids, real.users.user_ids)
    np.testing.assert_array_equal(other.offsets, real.users.offsets)
    np.testing.assert_array_equal(other.fields["y"], real.users.fields["y"])
