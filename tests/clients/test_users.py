"""A node's users from every kind of source, and what is refused."""

import hashlib
import hmac
import re
import stat
import sys
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.clients.users import (
    enrolled_positions,
    enrolment_toml,
    hosted_users,
    keyed_id,
    load_users,
    make_id_key,
)
from fedpriv.data.population import Population, UserStore, plain_id
from fedpriv.errors import DataError, InvalidValueError

ROWS = {"b": [1.0, 2.0], "a": [3.0], "c": []}


def fields_of(rows: list[float]) -> dict[str, np.ndarray]:
    return {"x": np.array(rows, np.float32).reshape(-1, 1), "y": np.zeros(len(rows), np.int64)}


def as_dict(store: UserStore) -> dict[str, list[float]]:
    users = range(store.population)
    return {store.id_of(user): store.examples_of(user)["x"][:, 0].tolist() for user in users}


def write_each(folder: Path) -> Path:
    folder.mkdir()
    for name, rows in ROWS.items():
        np.savez(folder / f"{name}.npz", **fields_of(rows))
    return folder


def whole_store() -> UserStore:
    offsets = np.array([0, 2, 3, 3])
    return UserStore(fields_of([1.0, 2.0, 3.0]), offsets, ["b", "a", "c"])


def whole_population() -> Population:
    return Population("people", whole_store(), fields_of([9.0]))


def number() -> int:
    return 3


def failing() -> UserStore:
    raise KeyError("secret of a user")


NOT_A_FUNCTION = 3


def test_a_saved_store(tmp_path: Path) -> None:
    whole_store().save(tmp_path / "store")
    store = load_users(str(tmp_path / "store"))
    assert as_dict(store) == ROWS
    assert isinstance(store.fields["x"], np.memmap)


def test_a_folder_of_one_file_per_user(tmp_path: Path) -> None:
    assert as_dict(load_users(str(write_each(tmp_path / "users")))) == ROWS


def test_a_columnar_file_in_any_order(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", **fields_of([1.0, 3.0, 2.0]), user_id=np.array(["b", "a", "b"]))
    store = load_users(str(tmp_path / "all.npz"))
    assert as_dict(store) == {"b": [1.0, 2.0], "a": [3.0]}
    assert set(store.fields) == {"x", "y"}


def test_ids_that_are_numbers_are_strings(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", **fields_of([1.0, 2.0]), user_id=np.array([10, 9]))
    assert as_dict(load_users(str(tmp_path / "all.npz"))) == {"10": [1.0], "9": [2.0]}


@pytest.mark.parametrize("function", ["whole_store", "whole_population"])
def test_a_function_by_import_path(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "some_loader", sys.modules[__name__])
    assert as_dict(load_users(f"some_loader:{function}")) == ROWS


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("some_loader:number", "returned a int; it must return a UserStore or a Population"),
        ("some_loader:failing", "cannot be made: KeyError at "),
        ("some_loader:absent", "cannot be imported"),
        ("some_loader:NOT_A_FUNCTION", "has no function 'NOT_A_FUNCTION'"),
        ("no_such_module:function", "cannot be imported"),
        ("not a module:function", "is not of the form package.module:function"),
        ("no_such_folder", "do not exist; legal are a folder, an .npz file and package.module"),
    ],
)
def test_functions_that_are_refused(path: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "some_loader", sys.modules[__name__])
    with pytest.raises(DataError, match=words) as raised:
        load_users(path)
    assert "secret" not in str(raised.value)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there are no users"):
        load_users(str(tmp_path))


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = write_each(tmp_path / "users")
    (folder / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match=r"notes\.txt is not an \.npz file"):
        load_users(str(folder))


def test_a_folder_in_a_folder_is_refused(tmp_path: Path) -> None:
    (write_each(tmp_path / "users") / "d.npz").mkdir()
    with pytest.raises(DataError, match=r"d\.npz is not an \.npz file"):
        load_users(str(tmp_path / "users"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"x": np.zeros((1, 1), np.float32)}, "the fields are"),
        ({**fields_of([1.0]), "y": np.zeros(2, np.int64)}, "different numbers of rows"),
        ({**fields_of([1.0]), "x": np.zeros((1, 2), np.float32)}, "per row"),
        ({**fields_of([1.0]), "y": np.zeros(1, np.float32)}, "per row"),
        ({**fields_of([1.0]), "y": np.int64(1)}, "not an array whose first axis is the rows"),
    ],
)
def test_a_user_unlike_the_others_is_broken(
    fields: dict[str, np.ndarray], words: str, tmp_path: Path
) -> None:
    folder = write_each(tmp_path / "users")
    np.savez(folder / "d.npz", **fields)
    users = load_users(str(folder))
    assert as_dict(users) == {**ROWS, "d": []}
    (why,) = users.broken.values()
    assert re.search(f"user 'd': .*{words}", why)


def test_a_file_of_a_user_that_cannot_be_read_breaks_this_user(tmp_path: Path) -> None:
    folder = write_each(tmp_path / "users")
    (folder / "d.npz").write_bytes(b"secret")
    users = load_users(str(folder))
    assert as_dict(users) == {**ROWS, "d": []}
    (why,) = users.broken.values()
    assert "d.npz cannot be read" in why
    assert "secret" not in why


def test_pickles_are_not_loaded(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", x=np.array([{}]), user_id=np.array(["a"]))
    with pytest.raises(DataError, match=r"all\.npz cannot be read"):
        load_users(str(tmp_path / "all.npz"))


@pytest.mark.parametrize("content", [b"", b"PK", b"PK\x03\x04" + bytes(50), b"secret,1\n"])
def test_a_damaged_file_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "all.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"all\.npz cannot be read") as raised:
        load_users(str(path))
    assert "secret" not in str(raised.value)


def test_a_plain_array_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "all.npy", np.zeros(3))
    with pytest.raises(DataError, match=r"all\.npy cannot be read"):
        load_users(str(tmp_path / "all.npy"))


def test_a_member_that_is_no_array_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.npz", "w") as file:
        file.writestr("x.npy", b"secret")
    with pytest.raises(DataError, match=r"all\.npz") as raised:
        load_users(str(tmp_path / "all.npz"))
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({}, "no field 'user_id'"),
        ({"user_id": np.array(["a"])}, "has shape .*, not 1 rows"),
        ({"user_id": np.array([0.5, 1.5])}, "all strings or all integers"),
        ({"user_id": np.array([["a", "b"], ["b", "b"]])}, "row 0 belongs to 2 users"),
    ],
)
def test_odd_ids_are_refused(columns: dict[str, np.ndarray], words: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", **fields_of([1.0, 2.0]), **columns)
    with pytest.raises(DataError, match=words) as raised:
        load_users(str(tmp_path / "all.npz"))
    assert "all.npz" in str(raised.value)


def test_a_file_without_rows_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", **fields_of([]), user_id=np.empty(0, np.str_))
    with pytest.raises(DataError, match="at least one"):
        load_users(str(tmp_path / "all.npz"))


@given(st.data())
def test_the_kth_user_by_code_points_is_at_the_kth_position(data: st.DataObject) -> None:
    words = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=4)
    ids = data.draw(st.lists(words.filter(plain_id), min_size=1, max_size=8, unique_by=plain_id))
    size = len(ids)
    distinct = st.lists(st.integers(0, 99), min_size=size, max_size=size, unique=True)
    positions = sorted(data.draw(distinct))
    store = UserStore({"x": np.zeros(0)}, np.zeros(size + 1, np.int64), ids)
    hosted = enrolled_positions(store, np.array(positions))
    by_code_points = sorted(ids, key=lambda text: [ord(character) for character in text])
    expected = dict(zip(by_code_points, positions, strict=True))
    assert hosted.tolist() == [expected[name] for name in ids]


def test_ids_that_are_positions_are_compared_as_strings() -> None:
    store = UserStore({"x": np.zeros(0)}, np.zeros(12, np.int64))
    # "0", "1", "10", "2", …, "9"
    assert enrolled_positions(store, np.arange(11)).tolist() == [0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 2]


@pytest.mark.parametrize("positions", [[], [4], [4, 5], [4, 5, 6, 7]])
def test_there_is_one_position_for_each_user(positions: list[int]) -> None:
    with pytest.raises(InvalidValueError, match=f"there are {len(positions)} positions for 3"):
        enrolled_positions(whole_store(), np.array(positions, np.int64))


def write_ids(path: Path, *ids: str) -> str:
    np.savez(path, **fields_of([1.0] * len(ids)), user_id=np.array(ids))
    return str(path)


@pytest.fixture
def key(tmp_path: Path) -> Path:
    make_id_key(tmp_path / "id.key")
    return tmp_path / "id.key"


def test_a_key_of_ids_is_its_owners_and_never_replaced(key: Path) -> None:
    text = key.read_text()
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert len(bytes.fromhex(text)) == 32
    with pytest.raises(FileExistsError):
        make_id_key(key)
    assert key.read_text() == text


def test_a_keyed_id_is_the_hmac_of_one_form_of_the_identifier() -> None:
    key = bytes(range(32))
    expected = hmac.new(key, "straße é".casefold().encode(), hashlib.sha256).hexdigest()
    for same in ("straße é", " STRASSE \u00c9\n", "Straße e\u0301"):
        assert keyed_id(same, key) == expected
    assert keyed_id("strasse e", key) != expected
    assert keyed_id("straße é", bytes(32)) != expected
    for illegal in ("", "  ", "a\x00b"):
        with pytest.raises(InvalidValueError, match="an id must be one printable line"):
            keyed_id(illegal, key)


def test_two_sites_with_one_key_give_a_person_one_id(key: Path, tmp_path: Path) -> None:
    one = hosted_users(write_ids(tmp_path / "a.npz", "A-12", "B-7"), key)
    two = hosted_users(write_ids(tmp_path / "b.npz", "c-3", " a-12 "), key)
    ids = [{store.id_of(user) for user in range(2)} for store in (one, two)]
    assert len(ids[0] & ids[1]) == 1
    assert all(len(bytes.fromhex(each)) == 32 for each in ids[0] | ids[1])
    assert one.fields["x"].tolist() == [[1.0], [1.0]]


def test_of_one_site_no_two_users_have_one_keyed_id(key: Path, tmp_path: Path) -> None:
    source = write_ids(tmp_path / "a.npz", "ann", "bob", "Ann")
    with pytest.raises(DataError, match=r"'ann' and 'Ann' of .* have one identifier but for case"):
        hosted_users(source, key)
    UserStore(fields_of([1.0]), np.array([0, 1])).save(tmp_path / "store")
    with pytest.raises(DataError, match="have no ids; keyed ids are made of them"):
        hosted_users(str(tmp_path / "store"), key)


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [("ab" * 32, 0o644, "mode 0644"), ("ab" * 31, 0o600, "holds no key")],
)
def test_a_key_that_others_can_read_or_that_is_none_is_refused(
    text: str, mode: int, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "k"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(InvalidValueError, match=words) as caught:
        hosted_users("unread", path)
    assert "abab" not in str(caught.value)
    with pytest.raises(InvalidValueError, match="cannot be read"):
        hosted_users("unread", tmp_path / "absent")


def test_an_enrolment_is_printed_for_each_node(tmp_path: Path) -> None:
    sources = [write_ids(tmp_path / "a.npz", "b", "a"), write_ids(tmp_path / "b.npz", "c")]
    text = enrolment_toml(sources, [("one", "ab" * 32), ("two", None)], None)
    assert text.startswith(
        "# one: users 2, of whom without examples 0; examples 2\n# two: users 1,"
    )
    assert tomllib.loads(text) == {
        "nodes": {"one": {"users": ["a", "b"], "certificate": "ab" * 32}, "two": {"users": ["c"]}}
    }


def test_users_who_cannot_be_enrolled_are_found_before(tmp_path: Path) -> None:
    a, b = write_ids(tmp_path / "a.npz", "x", "y"), write_ids(tmp_path / "b.npz", "z", "y")
    with pytest.raises(DataError, match=r"'y' is in .*b\.npz' and in .*a\.npz', as one of 1"):
        enrolment_toml([a, b], [("one", None), ("two", None)], None)
    composed, two = (write_ids(tmp_path / f"{n}.npz", u) for n, u in (("d", "é"), ("e", "e\u0301")))
    with pytest.raises(DataError, match="as one of 1 users of both"):
        enrolment_toml([composed, two], [("one", None), ("two", None)], None)
    with pytest.raises(InvalidValueError, match="node 'one' is given twice"):
        enrolment_toml([a, b], [("one", None), ("one", None)], None)
    spaced = write_ids(tmp_path / "c.npz", "x ")
    with pytest.raises(InvalidValueError, match="c\\.npz' is 'x '"):
        enrolment_toml([spaced], [("one", None)], None)


def test_an_enrolment_logs_why_a_user_counts_as_zero(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_each(tmp_path / "users")
    np.savez(folder / "d.npz", x=np.zeros((1, 1), np.float32))
    toml = enrolment_toml([str(folder)], [("north", None)], None)
    assert "d" in tomllib.loads(toml)["nodes"]["north"]["users"]
    assert "count as zero: 1;" in caplog.text
    assert "user 'd': the fields are ['x']" in caplog.text
