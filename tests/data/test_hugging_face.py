"""Tests of stores from Hugging Face datasets, made in memory."""

import sys

import datasets
import numpy as np
import pytest

from fedpriv.data import from_dataset
from fedpriv.errors import DataError, InvalidValueError

IMAGES = np.arange(4 * 5 * 5, dtype=np.uint8).reshape(4, 5, 5)


@pytest.fixture
def dataset():
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "label": datasets.ClassLabel(num_classes=3),
            "writer": datasets.Value("string"),
            "number": datasets.Value("int64"),
            "height": datasets.Value("float32"),
            "ragged": datasets.List(datasets.Value("int64")),
            "gap": datasets.Value("int64"),
        }
    )
    columns = {
        "image": list(IMAGES),
        "label": [0, 2, 1, 2],
        "writer": ["f01", "f00", "f01", "f02"],
        "number": [2**60 + 1, 2**60, 2**60 + 1, 5],
        "height": [1.5, 2.5, 3.5, 4.5],
        "ragged": [[1], [1, 2], [], [3]],
        "gap": [1, None, 2, 3],
    }
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.mark.parametrize("form", [None, "torch", "numpy"])
def test_rows_are_grouped_by_the_user_column(dataset, form):
    store = from_dataset(dataset.with_format(form), "writer")
    assert [store.id_of(user) for user in range(3)] == ["f01", "f00", "f02"]
    np.testing.assert_array_equal(store.examples_of(0)["x"], IMAGES[[0, 2]])
    assert store.fields["x"].dtype == np.uint8
    assert store.fields["y"].tolist() == [0, 1, 2, 2]
    assert store.sizes.tolist() == [2, 1, 1]


def test_large_integer_ids_are_exact_and_columns_can_be_chosen(dataset):
    store = from_dataset(dataset, "number", {"x": "height", "again": "height", "y": "label"})
    assert [store.id_of(u) for u in range(3)] == [str(2**60 + 1), str(2**60), "5"]
    assert store.fields["x"].tolist() == [1.5, 3.5, 2.5, 4.5]
    assert store.fields["again"].tolist() == [1.5, 3.5, 2.5, 4.5]


@pytest.mark.parametrize(
    ("user_column", "columns", "message"),
    [
        ("writers", {"x": "height"}, "no column 'writers'"),
        ("writer", {"x": "heigth"}, "no column 'heigth'"),
        ("writer", {"x": "?"}, "no column '\\?'"),
        ("gap", {"x": "height"}, "number 1 is None"),
        ("height", {"x": "label"}, "number 0 is 1.5"),
        ("writer", {"x": "ragged"}, r"'ragged' has arrays \[0\].* row 1 of user 'f01'; 2 of 3"),
        ("writer", {}, "no field"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(dataset, user_column, columns, message):
    with pytest.raises(DataError, match=message):
        from_dataset(dataset, user_column, columns).refuse_broken()


def test_splits_and_streams_are_refused(dataset):
    for other in (datasets.DatasetDict(train=dataset), dataset.to_iterable_dataset(), [1]):
        with pytest.raises(DataError, match=f"dataset is a {type(other).__name__}"):
            from_dataset(other, "writer")


def test_absent_package_says_how_to_install_it(dataset, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InvalidValueError, match=r"pip install 'fedpriv\[datasets\]'"):
        from_dataset(dataset, "writer")
