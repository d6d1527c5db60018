"""Tests of datasets by their name on the Hugging Face hub: fetched, from the cache, or neither."""

import io
import json
import os
import subprocess
import sys

import datasets
import pytest

from fedpriv.data import load_population
from fedpriv.errors import DataError, InvalidValueError
from tests.data.loopback_hub import hub

NAME = "someone/digits"
USERS = {"user_column": "writer", "columns": {"x": ["a", "b"], "y": "label"}}
EXPERIMENT = """
name = "hub"
rounds = 2
data = {{ name = "hugging-face", options = {{ dataset = "{name}", user_column = "writer", \
columns = {{ x = ["a", "b"], y = "label" }} }} }}
model = {{ name = "softmax", options = {{ inputs = 2, classes = 3 }} }}
local = {{ learning_rate = 0.1, steps = 1 }}
clipping = {{ norm = 1.0 }}
privacy = {{ sampling_probability = 0.5, epsilon = 5.0, delta = 1e-3 }}
"""
LOAD = """
import json, sys
from fedpriv.data import load_population
from fedpriv.errors import FedprivError
for options in json.loads(sys.argv[1]):
    try:
        made = load_population("hugging-face", options)
        ids = [made.users.id_of(user) for user in range(made.users.population)]
        x = made.users.examples_of(1)["x"].tolist()
        print(json.dumps([made.name, ids, x, made.test["y"].tolist()]))
    except FedprivError as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


def parquet(writers):
    rows = range(len(writers))
    columns = {"a": [1.0 * row for row in rows], "b": [0.5 * row for row in rows]}
    columns |= {"label": [row % 3 for row in rows], "writer": writers}
    file = io.BytesIO()
    datasets.Dataset.from_dict(columns).to_parquet(file)
    return file.getvalue()


def loaded(home, *options, **environment):
    """What a new process makes of options, without any cache or setting of this one."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, json.dumps(options)],
        cwd=home,
        env={**kept, "HF_HOME": str(home / "hf"), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


GIVEN = {"dataset": NAME, **USERS}
OFFLINE = {
    "whole": GIVEN,
    "slices": {**GIVEN, "splits": ["train[:3]", "test[:2]"]},
    "absent": {**GIVEN, "dataset": "someone/nothing"},
    "split": {**GIVEN, "splits": ["train", "tset"]},
    "subset": {**GIVEN, "subset": "big"},
    "same": {**GIVEN, "splits": ["train", "train[:10%]"]},
}


@pytest.fixture(scope="module")
def fetched(tmp_path_factory):
    """A home whose cache has what was fetched, and what was made of it."""
    home = tmp_path_factory.mktemp("home")
    files = {
        "README.md": b"# Digits\n",
        "data/train-00000-of-00001.parquet": parquet([f"w{row % 4}" for row in range(20)]),
        "data/test-00000-of-00001.parquet": parquet(["v"] * 5),
    }
    with hub(NAME, files) as address:
        found = loaded(home, GIVEN, HF_ENDPOINT=address)
    return home, found


@pytest.fixture(scope="module")
def offline(fetched):
    """What is made of each of `OFFLINE` in that home."""
    made = loaded(fetched[0], *OFFLINE.values(), HF_HUB_OFFLINE="1")
    return dict(zip(OFFLINE, made, strict=True))


EXPECTED = [
    f"hugging-face: 4 users by writer of {NAME} train",
    ["w0", "w1", "w2", "w3"],
    [[row, row / 2] for row in (1, 5, 9, 13, 17)],
    [0, 1, 2, 0, 1],
]


def test_a_name_is_fetched_where_the_hub_is_reached(fetched):
    assert fetched[1] == [EXPECTED]


def test_what_was_fetched_once_is_read_from_the_cache(offline):
    assert offline["whole"] == EXPECTED
    name, *_, labels = offline["slices"]
    assert name == f"hugging-face: 3 users by writer of {NAME} train[:3]"
    assert labels == [0, 1]


def test_what_is_neither_reached_nor_cached_is_one_sentence(fetched, offline):
    home, _ = fetched
    absent, split, subset, same = (offline[n] for n in ("absent", "split", "subset", "same"))
    assert {absent[0], split[0], subset[0], same[0]} == {"DataError"}
    assert absent[1].startswith(
        "dataset 'someone/nothing' of the Hugging Face hub is not in the cache "
        f"{home / 'hf' / 'datasets'} and cannot be reached: "
    )
    assert split[1].endswith("has no splits ['train', 'tset']; known names: train, test")
    assert "'big'" in subset[1]
    assert same[1].startswith("held-out rows name 2 of the enrolled users; they must not")
    assert not any("\n" in each[1] for each in (absent, split, subset, same))


@pytest.mark.slow
def test_the_command_line_ends_with_that_sentence_and_code_2(tmp_path):
    (tmp_path / "hub.toml").write_text(EXPERIMENT.format(name="someone/nothing"))
    done = subprocess.run(
        [sys.executable, "-m", "fedpriv", "simulate", "hub.toml", "--out", "run"],
        cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: dataset 'someone/nothing' of the Hugging Face hub is")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "dataset is None, train None and test None"),
        ({"dataset": NAME, "train": "a"}, "either dataset, a name on the Hugging Face hub, or"),
        ({"train": "train.csv"}, "train 'train.csv' and test None; either dataset"),
        ({"dataset": 3}, "dataset is of the type int"),
        ({"dataset": "a/b/c"}, "dataset is 'a/b/c'"),
        ({"dataset": "hf://a/b"}, "dataset is 'hf://a/b'"),
        ({"dataset": NAME, "splits": "train"}, "splits is 'train'"),
        ({"dataset": NAME, "splits": ["train"]}, r"splits is \['train'\]"),
        ({"dataset": NAME, "splits": ["train", 3]}, r"splits is \['train', 3\]"),
        ({"dataset": NAME, "subset": 3}, "subset is of the type int"),
        ({"dataset": NAME, "revision": 3}, "revision is of the type int"),
    ],
)
def test_options_that_do_not_fit_are_one_sentence(given, sentence):
    with pytest.raises((InvalidValueError, DataError), match=sentence):
        load_population("hugging-face", {**given, **USERS})


def test_a_folder_of_the_same_name_is_not_read_by_chance(tmp_path, monkeypatch):
    (tmp_path / "someone" / "digits").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="'someone/digits' is also a file here"):
        load_population("hugging-face", {"dataset": NAME, **USERS})
