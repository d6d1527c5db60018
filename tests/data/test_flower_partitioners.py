"""Tests of users that partitioners deal: those of flwr-datasets, and our own of the same form."""

import sys
from collections import Counter

import datasets
import flwr_datasets.partitioner as flower
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.data import from_partitioner
from fedpriv.data.hugging_face import partitioner_named
from fedpriv.errors import DataError, InvalidValueError

ROWS = 120
LABELS = np.arange(ROWS) * 7 % 10
WRITERS = [f"w{row % 9}" for row in range(ROWS)]


def dataset():
    columns = {"value": np.arange(ROWS), "label": LABELS, "writer": WRITERS}
    return datasets.Dataset.from_dict(columns)


class Parts:
    """The form of a partitioner, with given rows in its parts."""

    def __init__(self, *parts):
        self.parts = parts

    @property
    def num_partitions(self):
        return len(self.parts)

    def load_partition(self, partition_id):
        return self.dataset.select(self.parts[partition_id])


MAKERS = {
    "iid": lambda: flower.IidPartitioner(7),
    "dirichlet": lambda: flower.DirichletPartitioner(6, "label", 0.5, min_partition_size=0),
    "natural": lambda: flower.NaturalIdPartitioner("writer"),
    "pathological": lambda: flower.PathologicalPartitioner(10, "label", 2, "deterministic"),
    "linear": lambda: flower.LinearPartitioner(5),
    "inner dirichlet": lambda: flower.InnerDirichletPartitioner([50, 70], "label", 1.0),
}


@pytest.mark.parametrize("name", MAKERS)
def test_users_are_the_parts_of_flowers_partitioners(name):
    store = from_partitioner(dataset(), MAKERS[name](), {"value": "value", "y": "label"})
    alone = MAKERS[name]()
    alone.dataset = dataset()
    assert store.population == alone.num_partitions
    for user in range(store.population):
        part = alone.load_partition(user)
        assert store.examples_of(user)["value"].tolist() == sorted(part["value"][:])
        np.testing.assert_array_equal(
            store.examples_of(user)["y"], LABELS[store.examples_of(user)["value"]]
        )
    assert max(Counter(store.fields["value"].tolist()).values()) == 1


@given(st.lists(st.integers(-1, 4), min_size=1, max_size=30))
@settings(max_examples=25)
def test_each_row_is_its_users_or_nobodys(owners):
    owner = np.array(owners)
    parts = Parts(*(np.flatnonzero(owner == user)[::-1] for user in range(5)))
    rows = datasets.Dataset.from_dict({"value": np.arange(len(owner))})
    store = from_partitioner(rows, parts, {"value": "value"})
    assert store.population == 5
    for user in range(5):
        rows_of_user = np.flatnonzero(owner == user)
        np.testing.assert_array_equal(store.examples_of(user)["value"], rows_of_user)


@pytest.mark.parametrize("parts", [([0, 1], [1, 2]), ([0, 1, 0], [2])])
def test_a_row_with_two_users_is_refused(parts):
    with pytest.raises(DataError, match="'Parts' deals 1 rows twice; it must deal"):
        from_partitioner(dataset(), Parts(*parts), {"value": "value"})


def test_columns_that_are_dealt_are_refused():
    with pytest.raises(DataError, match="'VerticalEvenPartitioner' does not deal whole rows"):
        from_partitioner(dataset(), flower.VerticalEvenPartitioner(2), {"value": "value"})


@pytest.mark.parametrize(
    ("partitioner", "sentence"),
    [
        (flower.DirichletPartitioner(3, "labl", 1.0), "refuses: .*labl"),
        (flower.SizePartitioner([ROWS + 1]), "refuses: "),
        (Parts([ROWS]), "'Parts' refuses: "),
        (object(), "'object' refuses: .* has no attribute 'dataset'"),
    ],
)
def test_what_a_partitioner_refuses_is_one_sentence(partitioner, sentence):
    with pytest.raises(InvalidValueError, match=sentence) as caught:
        from_partitioner(dataset(), partitioner, {"value": "value"})
    assert "\n" not in str(caught.value)


def test_a_partitioner_deals_once_and_a_set_format_does_not_matter():
    partitioner = flower.IidPartitioner(4)
    rows = dataset().with_format("torch", columns=["label"])
    store = from_partitioner(rows, partitioner, {"value": "value"})
    assert store.sizes.tolist() == [30, 30, 30, 30]
    with pytest.raises(InvalidValueError, match="only once"):
        from_partitioner(rows, partitioner, {"value": "value"})


def test_partitioners_by_name():
    made = partitioner_named("IidPartitioner", {"num_partitions": 3})
    assert type(made) is flower.IidPartitioner
    assert made.num_partitions == 3
    path = "flwr_datasets.partitioner:LinearPartitioner"
    assert type(partitioner_named(path, {"num_partitions": 2})) is flower.LinearPartitioner


@pytest.mark.parametrize(
    ("name", "arguments", "error", "sentence"),
    [
        ("IidPartitoner", {}, DataError, "did you mean 'IidPartitioner'"),
        ("mine:Own", {}, DataError, "'mine:Own' cannot be imported"),
        ("IidPartitioner", {"partitions": 3}, InvalidValueError, "did you mean 'num_partitions'"),
        ("IidPartitioner", {}, InvalidValueError, "needs the option 'num_partitions'"),
        (
            "IidPartitioner",
            {"num_partitions": 0},
            InvalidValueError,
            "cannot be made: .*The number of",
        ),
        ("Partitioner", {}, InvalidValueError, "'Partitioner' cannot be made: .*Can't inst"),
    ],
)
def test_names_and_arguments_that_do_not_fit_are_one_sentence(name, arguments, error, sentence):
    with pytest.raises(error, match=sentence):
        partitioner_named(name, arguments)


def test_absent_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr_datasets", None)
    with pytest.raises(InvalidValueError, match=r"pip install 'fedpriv\[flower\]'"):
        partitioner_named("IidPartitioner", {"num_partitions": 3})
