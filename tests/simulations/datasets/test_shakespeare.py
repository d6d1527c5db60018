"""Tests of Shakespeare's roles: on small made-up texts, and on the real ones where they are."""

import gzip
import json
import os
import string
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.data import load_population
from fedpriv.errors import DataError, InvalidValueError
from simulations.datasets.shakespeare import CHARACTERS, FILE, load_shakespeare_roles

SAID = [
    {"user": "P_FOOL", "train": ["Nay, sir.", "", "~ is\none [mark]!"], "test": ["Ay."]},
    {"user": "P_LORD", "train": ["Oh."], "test": []},
    {"user": "P_KING", "train": ["Speak: what of the war?"], "test": ["So be it", "then."]},
]


def lines(said):
    return gzip.compress("".join(json.dumps(role) + "\n" for role in said).encode())


def slow_windows(texts, length):
    """One character after the other: pairs of a window and what follows each of its characters."""
    text, windows = "\n".join(texts), []
    start = 0
    while start + length + 1 <= len(text):
        windows.append((text[start : start + length], text[start + 1 : start + length + 1]))
        start += length
    return windows


def read_back(fields):
    """Windows as texts."""
    assert {name: field.dtype for name, field in fields.items()} == {"x": np.int64, "y": np.int64}
    x, y = (["".join(CHARACTERS[code] for code in row) for row in fields[name]] for name in "xy")
    return list(zip(x, y, strict=True))


def check(population, said, length, most=None):
    users = population.users
    assert [users.id_of(user) for user in range(users.population)] == [
        role["user"] for role in said
    ]
    for user, role in enumerate(said):
        assert read_back(users.examples_of(user)) == slow_windows(role["train"], length)[:most]
    held_out = [window for role in said for window in slow_windows(role["test"], length)]
    assert read_back(population.test) == held_out
    for fields in (users.fields, population.test):
        assert fields["x"].shape[1:] == fields["y"].shape[1:] == (length,)


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "shakespeare"
    place.mkdir()
    (place / FILE).write_bytes(lines(SAID))
    return place


@pytest.mark.parametrize("length", [1, 2, 3, 5, 12])
def test_roles_are_users_and_windows_touch(folder, length):
    population = load_shakespeare_roles(folder, length)
    check(population, SAID, length)
    assert population.name == "shakespeare-roles: 3 roles"


def test_a_role_that_says_too_little_stays_a_user_without_rows(folder):
    assert load_shakespeare_roles(folder, 5).users.sizes.tolist() == [5, 0, 4]


@pytest.mark.parametrize("most", [1, 2, 4, 100])
def test_large_roles_keep_their_first_windows(folder, most):
    population = load_shakespeare_roles(folder, 5, windows_per_role=most)
    check(population, SAID, 5, most)
    assert population.users.sizes.tolist() == [min(5, most), 0, min(4, most)]


TEXTS = st.lists(st.text(st.sampled_from(CHARACTERS), max_size=9), max_size=4)


@given(
    st.lists(
        st.tuples(st.text(string.ascii_letters, min_size=1), TEXTS),
        min_size=3,
        max_size=3,
        unique_by=lambda t: t[0],
    ),
    st.integers(1, 4),
    st.none() | st.integers(1, 3),
)
def test_the_name_says_how_many_roles_there_are_and_nothing_of_what_they_say(
    tmp_path_factory, roles, length, most
):
    enough = "Speak."
    said = [{"user": name, "train": [enough, *texts], "test": [enough]} for name, texts in roles]
    place = tmp_path_factory.mktemp("shakespeare")
    (place / FILE).write_bytes(lines(said))
    population = load_shakespeare_roles(place, length, most)
    check(population, said, length, most)
    assert population.name == "shakespeare-roles: 3 roles"


def test_codes_are_a_fixed_list_of_what_ascii_prints(folder):
    assert "\n" + "".join(c for c in map(chr, range(128)) if c.isprintable()) == CHARACTERS
    x = load_shakespeare_roles(folder, 3).users.fields["x"]
    assert x[0].tolist() == [CHARACTERS.index(c) for c in "Nay"]


def test_folder_is_itself_or_its_parent_given_or_in_the_environment(folder, monkeypatch):
    check(load_shakespeare_roles(str(folder.parent), 4), SAID, 4)
    named_in_files = "simulations.datasets.shakespeare:load_shakespeare_roles"
    for named in (folder, folder.parent):
        monkeypatch.setenv("FEDPRIV_DATA", str(named))
        check(load_population(named_in_files, {"length": 4}), SAID, 4)


def test_no_folder_and_an_absent_file_are_one_sentence(folder, monkeypatch):
    monkeypatch.delenv("FEDPRIV_DATA", raising=False)
    with pytest.raises(DataError, match=f"no folder for Shakespeare.*FEDPRIV_DATA.*{FILE}"):
        load_shakespeare_roles()
    (folder / FILE).unlink()
    with pytest.raises(DataError, match=f"{FILE} is absent from .* and .*https://") as caught:
        load_shakespeare_roles(folder)
    assert "\n" not in str(caught.value)


SECRET = "my secret words, which no message may repeat"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no role"),
        (SECRET.encode(), "cannot be read"),
        (lines(SAID)[:-20], "cannot be read"),
        (gzip.compress(b""), "holds no role"),
        (gzip.compress(SECRET.encode()), "cannot be read"),
        (gzip.compress(b'{"user": "\xff"}'), "cannot be read"),
        (
            lines([*SAID, {"user": "P", "train": SECRET, "test": []}]),
            "line 4 must be a JSON object",
        ),
        (lines([{"user": "P", "train": [SECRET, 3], "test": []}]), "line 1 must be a JSON object"),
        (lines([{"user": 3, "train": [SECRET], "test": []}]), "line 1 must be a JSON object"),
        (lines([{"user": "P", "train": [SECRET]}]), "line 1 must be a JSON object"),
        (lines([[SECRET]]), "line 1 must be a JSON object"),
        (lines([{"user": "P", "train": [SECRET + "é"], "test": []}]), "neither a line feed"),
        (lines([{"user": "P", "train": [SECRET + "\t"], "test": []}]), "neither a line feed"),
        (lines([{"user": "P", "train": [SECRET + "\ud800"], "test": []}]), "line 1 must be"),
        (
            lines([{"user": "P", "train": ["one"], "test": [SECRET]}]),
            "no train text of more than 9",
        ),
        (lines([{"user": "P", "train": [SECRET], "test": ["one"]}]), "no test text of more than 9"),
        (lines([SAID[0], SAID[0]]), "occurs twice"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
def test_a_damaged_file_is_named_and_not_quoted(folder, content, message):
    (folder / FILE).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_shakespeare_roles(folder, 2 if message == "occurs twice" else 9)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["length", "windows_per_role"])
@pytest.mark.parametrize("number", [0, -3, 2.5, True, "40"])
def test_numbers_are_whole(folder, name, number):
    with pytest.raises(InvalidValueError, match=f"{name} is"):
        load_shakespeare_roles(folder, **{name: number})


@pytest.fixture(scope="module")
def real_folder():
    beside = Path(__file__).resolve().parents[3].parent / "shared" / "data"
    named = Path(os.environ.get("FEDPRIV_DATA", beside))
    for place in (named, named / "shakespeare"):
        if (place / FILE).is_file():
            return place
    pytest.skip(f"{FILE} is absent: set FEDPRIV_DATA to the folder that holds it")


def test_real_roles_have_the_published_numbers(real_folder):
    """Users and examples as TensorFlow Federated documents them; windows against slow ones."""
    with gzip.open(real_folder / FILE, "rt", encoding="utf-8") as file:
        said = [json.loads(line) for line in file]
    assert [sum(len(role[part]) for role in said) for part in ("train", "test")] == [16_068, 2_356]
    population = load_shakespeare_roles(real_folder, 64)
    assert population.users.population == 715
    check(population, said, 64)


def test_windows_longer_than_any_memory_take_none(folder):
    with pytest.raises(DataError, match=f"no train text of more than {10**12} characters"):
        load_shakespeare_roles(folder, 10**12)
