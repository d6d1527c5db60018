"""Tests of populations from datasets on this machine."""

import json
import socket
import sys
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.data import load_population
from fedpriv.data.hugging_face import _described_partitioner, open_dataset
from fedpriv.errors import DataError, InvalidValueError

ROWS, HELD_OUT = 40, 12
PIXELS = np.random.default_rng(5).integers(0, 256, (ROWS + HELD_OUT, 6, 5), dtype=np.uint8)
WRITERS = [f"w{row % 8}" for row in range(ROWS)] + [f"v{row}" for row in range(HELD_OUT)]
COLUMNS = {"x": ["a", "b"], "y": "label"}
DIRICHLET = {"num_partitions": 4, "partition_by": "label", "alpha": 1.0, "min_partition_size": 1}


def rows():
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "colours": datasets.Image(),
            "label": datasets.ClassLabel(num_classes=3),
            "writer": datasets.Value("string"),
            "a": datasets.Value("int64"),
            "b": datasets.Value("float64"),
        }
    )
    count = ROWS + HELD_OUT
    columns = {
        "image": list(PIXELS),
        "colours": list(np.stack([PIXELS, PIXELS // 2, 255 - PIXELS], axis=-1)),
        "label": np.arange(count) % 3,
        "writer": WRITERS,
        "a": np.arange(count),
        "b": np.arange(count) / 8,
    }
    return datasets.Dataset.from_dict(columns, features=features)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The same rows in every form that is read."""
    place = tmp_path_factory.mktemp("datasets")
    both = rows()
    splits = {"train": both.select(range(ROWS)), "test": both.select(range(ROWS, len(both)))}
    datasets.DatasetDict(splits).save_to_disk(place / "saved")
    (place / "parts").mkdir()
    for name, split in splits.items():
        flat = split.select_columns(["label", "writer", "a", "b"])
        flat.to_csv(place / f"{name}.csv")
        flat.to_json(place / f"{name}.jsonl")
        split.to_parquet(place / f"{name}.parquet")
    splits["train"].select(range(25)).to_parquet(place / "parts" / "0.parquet")
    splits["train"].select(range(25, ROWS)).to_parquet(place / "parts" / "1.parquet")
    return place


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Whoever looks up a host, or opens a connection, fails the test."""

    def refuse(*args, **kwargs):
        raise AssertionError("something was looked up in a network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def options(place, train="saved/train", test="saved/test", **more):
    return {"train": str(place / train), "test": str(place / test), **more}


@pytest.mark.parametrize("train", ["saved/train", "train.parquet", "parts"])
def test_users_are_those_of_the_column(place, train):
    population = load_population("hugging-face", options(place, train, user_column="writer"))
    users = population.users
    assert [users.id_of(user) for user in range(8)] == [f"w{user}" for user in range(8)]
    for user in range(8):
        mine = users.examples_of(user)
        assert mine["y"].tolist() == [row % 3 for row in range(user, ROWS, 8)]
        np.testing.assert_array_equal(
            mine["x"], PIXELS[user:ROWS:8, None].astype(np.float32) / np.float32(255)
        )
    assert population.test["x"].shape == (HELD_OUT, 1, 6, 5)
    assert population.test["x"].dtype == np.float32
    assert population.name == f"hugging-face: 8 users by writer of {Path(train).name}"


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_columns_of_a_table_become_one_field(place, kind):
    files = options(place, f"train.{kind}", f"test.{kind}")
    given = {"user_column": "writer", "columns": COLUMNS}
    population = load_population("hugging-face", {**files, **given})
    x = population.users.examples_of(3)["x"]
    assert x.dtype == np.float32
    np.testing.assert_array_equal(x, [[row, row / 8] for row in range(3, ROWS, 8)])
    assert population.test["x"].shape == (HELD_OUT, 2)


def test_colours_are_channels_first(place):
    given = {"user_column": "writer", "columns": {"x": "colours", "y": "label"}}
    population = load_population("hugging-face", options(place, **given))
    x = population.users.fields["x"]
    assert x.shape == (ROWS, 3, 6, 5)
    np.testing.assert_allclose(x[:, 0] + x[:, 2], 1.0, atol=1e-6)
    assert (x[:, 1] <= x[:, 0]).all()


def test_a_partitioner_makes_users_as_it_does_alone(place):
    from flwr_datasets.partitioner import DirichletPartitioner

    given = {"partitioner": "DirichletPartitioner", "arguments": DIRICHLET}
    population = load_population("hugging-face", options(place, **given))
    alone = DirichletPartitioner(**DIRICHLET)
    alone.dataset = rows().select(range(ROWS))
    assert population.users.population == 4
    for user in range(4):
        part = sorted(alone.load_partition(user)["a"][:])
        np.testing.assert_array_equal(
            population.users.examples_of(user)["x"][:, 0] * 255, PIXELS[part]
        )


FOUR = {"partitioner": "IidPartitioner", "arguments": {"num_partitions": 4}}


@settings(max_examples=8, deadline=None)
@given(
    more=st.text("abcd", max_size=9),
    prefix=st.text(min_size=1),
    seed=st.integers(0, 2**32),
)
def test_the_name_says_nothing_of_users(tmp_path_factory, more, prefix, seed):
    place, rng = tmp_path_factory.getbasetemp(), np.random.default_rng(seed)
    for split, ids in (("train", [prefix + end for end in f"abcd{more}"]), ("test", ["nobody"])):
        columns = {"a": rng.random(len(ids)), "y": rng.integers(0, 3, len(ids)), "writer": ids}
        datasets.Dataset.from_dict(columns).to_parquet(place / f"{split}.parquet")
    files = options(place, "train.parquet", "test.parquet", columns={"x": ["a"], "y": "y"})
    train = "of train.parquet"

    by_writer = load_population("hugging-face", {**files, "user_column": "writer"})
    assert by_writer.name == f"hugging-face: 4 users by writer {train}"
    dealt = load_population("hugging-face", {**files, **FOUR})
    four = 'IidPartitioner with {"num_partitions": 4}'
    assert dealt.name == f"hugging-face: 4 users by {four} {train}"


def test_the_name_changes_with_settings(place):
    def named(arguments, partitioner="SizePartitioner"):
        given = {"partitioner": partitioner, "arguments": arguments}
        return load_population("hugging-face", options(place, **given)).name

    sizes = [[1] * ROWS, [2] * (ROWS // 2), [ROWS - 3, 3], [3, ROWS - 3]]
    names = [named({"partition_sizes": each}) for each in sizes]
    assert len({*names, named({"num_partitions": 2}, "IidPartitioner")}) == 5
    assert f'SizePartitioner with {{"partition_sizes": [{ROWS - 3}, 3]}}' in names[2]


def test_long_arguments_are_named_by_their_digest():
    sizes = [[3] * 479, [2, 4, *[3] * 477]]
    one, other = (
        _described_partitioner("SizePartitioner", {"partition_sizes": each})[1] for each in sizes
    )
    assert one != other
    assert max(len(one), len(other)) < 200


def test_nothing_is_left_behind(place, monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    before = sorted(place.rglob("*"))
    for path in ("saved/train", "train.csv", "train.jsonl", "train.parquet", "parts"):
        assert len(open_dataset(place / path)) == ROWS
    assert list(tmp_path.iterdir()) == []
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ({}, InvalidValueError, "user_column is None and partitioner None"),
        ({"user_column": "writer", "partitioner": "IidPartitioner"}, InvalidValueError, "exactly"),
        ({"user_column": "writer", "arguments": {}}, InvalidValueError, "exactly one"),
        ({"user_column": 3}, InvalidValueError, "user_column is of the type int"),
        (
            {"partitioner": "IidPartitioner", "arguments": 3},
            InvalidValueError,
            "arguments is of the type int; it must be",
        ),
        ({"user_column": "writr"}, DataError, "no column 'writr'"),
        (
            {"user_column": "writer", "columns": "x"},
            InvalidValueError,
            "columns is of the type str",
        ),
        ({"user_column": "writer", "columns": {"x": [3]}}, InvalidValueError, "columns is "),
        ({"user_column": "writer", "columns": {"x": []}}, DataError, "'x' has no columns"),
        ({"user_column": "writer", "columns": {"x": ["writer"]}}, DataError, "'writer' holds text"),
        (
            {"user_column": "writer", "columns": {"x": "writer"}},
            DataError,
            "'x' holds text; give n",
        ),
        (
            {"user_column": "writer", "train": 3},
            InvalidValueError,
            "train is of the type int; it must be of",
        ),
    ],
)
def test_options_that_do_not_fit_are_one_sentence(place, given, error, sentence):
    with pytest.raises(error, match=sentence):
        load_population("hugging-face", {**options(place), **given})


def test_users_of_held_out_rows_are_kept_for_figures_by_user(place):
    people = load_population("hugging-face", options(place, user_column="writer"))
    owners = people.test["held_out_user"]
    assert len(owners) == len(people.test["y"])
    assert not {*owners.tolist()} & {people.users.id_of(n) for n in range(people.users.population)}


def test_classes_that_are_numbered_otherwise_in_test_are_refused(tmp_path):
    for name, classes in (("train", ["cat", "dog"]), ("test", ["dog", "cat"])):
        label = datasets.ClassLabel(names=classes)
        table = {"a": [1.0, 2.0], "b": ["cat", "dog"], "who": [f"{name} 0", f"{name} 1"]}
        rows = datasets.Dataset.from_dict(table).cast_column("b", label)
        rows.save_to_disk(tmp_path / name)
    with pytest.raises(DataError, match="column 'b' numbers other classes in test than in train"):
        load_population("hugging-face", options(tmp_path, "train", "test", **IDS))


IDS = {"columns": {"x": ["a"], "y": "b"}, "user_column": "who"}


def of_csv(folder, train, test):
    for name, ids in (("train", train), ("test", test)):
        lines = ["who,a,b", *(f"{user},1,2" for user in ids)]
        (folder / f"{name}.csv").write_text("\n".join(lines))
    return load_population("hugging-face", options(folder, "train.csv", "test.csv", **IDS))


def test_ids_in_a_csv_file_are_as_they_are_written(tmp_path):
    people = of_csv(tmp_path, ["007", "7", "007"], ["x1"])
    assert people.users.user_ids.tolist() == ["007", "7"]
    assert people.users.sizes.tolist() == [2, 1]


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_an_empty_cell_is_a_missing_number_or_a_missing_label_of_its_user(tmp_path, ending):
    table = pd.DataFrame({"who": ["ann", "bob", "eve"], "a": [1, None, 3], "b": ["x", "y", ""]})
    for name, rows in (("train", table), ("test", table[:1].assign(who="x1"))):
        path = tmp_path / f"{name}.{ending}"
        rows.to_csv(path, index=False) if ending == "csv" else rows.to_parquet(path)
    files = options(tmp_path, f"train.{ending}", f"test.{ending}", **IDS)
    people = load_population("hugging-face", files)
    np.testing.assert_array_equal(people.users.fields["x"], [[1], [np.nan]])
    assert (people.classes, [*people.users.broken]) == (("x", "y"), [2])


@pytest.mark.parametrize(
    ("train", "test", "sentence"),
    [
        (["007", "7"], ["007", "x1"], "^held-out rows name 1 of the enrolled users"),
        (["ann"], ["ann ", "bob"], "^held-out rows name 1 of the enrolled users"),
        (["1.0", "2"], ["x1"], "^user id number 0 is 1.0"),
        (["1", ""], ["x1"], "^user id '' is empty"),
        (["1", " 1"], ["x1"], "^user ids '1' and ' 1' differ in spaces"),
    ],
)
def test_ids_in_csv_files_that_are_one_persons_are_refused(tmp_path, train, test, sentence):
    with pytest.raises(DataError, match=sentence):
        of_csv(tmp_path, train, test)


def test_ids_in_a_json_file_that_read_as_times_are_texts(tmp_path):
    for part, ids in {"train": ["2020-01-01", "2020-01-01T00:00:00"], "test": ["x"]}.items():
        rows = [{"who": each, "x": [0.5], "y": 0} for each in ids]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{part}.jsonl").write_text(text)
    columns = {"user_column": "who", "columns": {"x": "x", "y": "y"}}
    given = options(tmp_path, "train.jsonl", "test.jsonl", **columns)
    people = load_population("hugging-face", given)
    assert people.users.user_ids.tolist() == ["2020-01-01", "2020-01-01T00:00:00"]


def test_held_out_rows_of_the_enrolled_are_refused(place):
    files = options(place, test="saved/train", user_column="writer")
    with pytest.raises(DataError, match=r"^held-out rows name 8 of the enrolled users") as got:
        load_population("hugging-face", files)
    assert "w0" not in str(got.value)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("absent.csv", None, "absent.csv does not exist"),
        ("notes.txt", "a,b", r"notes.txt is not a dataset; it must be .*\.parquet"),
        ("bad.csv", "a,b\n1,2\nsecret,3,4\n", r"bad.csv .* line 3 has 3 values, line 1 has 2 n"),
        ("bad.csv", 'a,b\n"secret\nx",2\n1,2,3\n', r"line 4 has 3 values"),
        ("bad.csv", "a,b\n1,2\nsecret\xe9,3\n".encode("latin-1"), "line 3 is not UTF-8; save"),
        ("bad.csv", "\xe9,b\n1,2\n".encode("latin-1"), "line 1 is not UTF-8; save"),
        (
            "bad.csv",
            "a;b\n1,5;2,5\n",
            "bad.csv has ';' between its values; .*decimal=','",
        ),
        ("bad.csv", "a;b\n1;2\n", "bad.csv has ';' between its values; write commas"),
        ("bad.csv", "5.1,3.5,0\n4.9,3,0\n", "bad.csv has numbers in line 1; its first line must"),
        ("bad.csv", "1,1,0\n4,3,0\n", "bad.csv has numbers in line 1; its first line must"),
        ("bad.csv", "", "bad.csv cannot be read: it is not a table"),
        ("bad.json", '{"secret"', r"bad.json cannot be read \(ArrowInvalid\)"),
        ("bad.parquet", "secret", r"bad.parquet cannot be read \(ArrowInvalid\)"),
    ],
)
def test_files_that_hold_no_dataset_are_one_sentence(tmp_path, name, content, sentence):
    if content is not None:
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=sentence) as got:
        open_dataset(tmp_path / name)
    assert "secret" not in str(got.value)


def test_folders_that_hold_no_dataset_are_one_sentence(place, tmp_path):
    with pytest.raises(
        DataError, match=r"several splits; name one of them: .*saved/test, .*/train"
    ):
        open_dataset(place / "saved")
    for folder in (tmp_path, place):  # nothing, and files of several kinds
        with pytest.raises(DataError, match="is not a dataset; it must be a folder saved by"):
            open_dataset(folder)


def test_absent_package_says_how_to_install_it(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InvalidValueError, match=r"pip install 'fedpriv\[datasets\]'"):
        load_population("hugging-face", options(place, user_column="writer"))
