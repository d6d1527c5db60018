"""Which examples count where rows belong to several users."""

from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

import fedpriv
from fedpriv.analytics import Mean, Survey
from fedpriv.data import from_arrays, from_dataset
from fedpriv.data.places import in_places, shared_among
from fedpriv.data.population import ROW_OWNERS, Population, UserStore, cut_up, load_population
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import DataError, InvalidValueError
from fedpriv.privacy.sampling import PoissonSampling
from tests.run.test_units import run, task

# Owners of each row, of which the first is the user that the row is stored with.
graphs = st.lists(
    st.lists(st.integers(0, 6), min_size=1, max_size=3, unique=True), min_size=1, max_size=30
).filter(lambda rows: any(len(own) > 1 for own in rows))


def store_of(graph: list[list[int]]) -> UserStore:
    rows = np.arange(len(graph))
    return from_arrays({"x": rows[:, None].astype(np.float32), "y": rows % 3}, graph, owners=3)


@given(graphs, st.integers(1, 5))
def test_no_user_owns_more_than_k_and_no_row_that_fits_is_left_out(
    graph: list[list[int]], k: int
) -> None:
    users = store_of(graph)
    # Rows are stored user by user, so their owners are read back.
    owners = [set(own) for own in users.fields[ROW_OWNERS].tolist()]
    assert sorted(map(sorted, owners)) == sorted(sorted(own) for own in graph)
    kept = shared_among(users, k).tolist()
    owned = {user: sum(user in owners[row] for row in kept) for user in range(7)}
    assert max(owned.values()) <= k
    assert len(set(kept)) == len(kept)
    for row in set(range(len(graph))) - set(kept):
        assert any(owned[user] == k for user in owners[row])


@given(graphs, st.integers(1, 5))
def test_places_hold_the_rows_that_count_and_no_others(graph: list[list[int]], k: int) -> None:
    users = store_of(graph)
    found, kept = in_places(users, k), shared_among(users, k)
    assert found.population == users.population * k
    assert ROW_OWNERS not in found.fields
    held = [found.examples_of(place)["x"] for place in range(found.population)]
    assert max(len(rows) for rows in held) == 1
    assert sorted(np.concatenate(held).ravel()) == sorted(users.fields["x"][kept].ravel())
    # At most k of what a user owns, wherever it is.
    owners = dict(
        zip(users.fields["x"].ravel().tolist(), users.fields[ROW_OWNERS].tolist(), strict=True)
    )
    for user in np.asarray(users.user_ids).tolist():
        mine = [rows for rows in held if len(rows) and user in owners[float(rows[0, 0])]]
        assert len(mine) <= k


@given(graphs, st.integers(1, 4), st.integers(0, 6))
def test_what_is_in_rows_decides_on_no_place(graph: list[list[int]], k: int, user: int) -> None:
    """Rows that one user owns have other contents: at most k places have, too."""
    users = store_of(graph)
    theirs = (users.fields[ROW_OWNERS] == user).any(axis=1)
    x = np.where(theirs[:, None], -1.0, users.fields["x"]).astype(np.float32)
    other = UserStore({**users.fields, "x": x}, users.offsets, users.user_ids)
    before, after = in_places(users, k), in_places(other, k)
    assert before.offsets.tolist() == after.offsets.tolist()
    assert (before.fields["x"] != after.fields["x"]).any(axis=1).sum() <= k


@pytest.mark.parametrize(
    "ids",
    [
        [["a", "b"], ["b"], ["c", "a", "c"]],
        np.array([["a", "b"], ["b", "b"], ["c", "a"]]),
        (("a", "b"), ("b",), ("c", "a")),
    ],
)
def test_owners_are_read_from_lists_and_from_columns(ids: object) -> None:
    store = from_arrays({"x": np.array([1, 2, 3])}, ids, owners=2)
    assert list(store.user_ids) == ["a", "b", "c"]
    assert store.fields["x"].tolist() == [1, 2, 3]
    assert store.fields[ROW_OWNERS].tolist() == [["a", "b"], ["b", "b"], ["c", "a"]]


def test_integer_owners_may_be_a_tensor_and_users_may_have_no_row_stored() -> None:
    store = from_arrays({"x": np.arange(2)}, torch.tensor([[7, 9], [7, 8]]), owners=2)
    assert [store.id_of(user) for user in range(3)] == ["7", "9", "8"]
    assert store.sizes.tolist() == [2, 0, 0]


def test_lists_of_one_owner_each_are_no_sharing() -> None:
    store = from_arrays({"x": np.arange(3)}, [["a"], ["b"], ["a", "a"]])
    assert ROW_OWNERS not in store.fields
    assert store.fields["x"].tolist() == [0, 2, 1]


@pytest.mark.parametrize(
    ("ids", "owners", "message"),
    [
        (
            [["a"], ["a", "b"]],
            None,
            "row 1 belongs to 2 users",
        ),
        (np.array([[1, 2], [3, 3]]), None, "row 0 belongs to 2 users"),
        ([["a"], ["a", "b", "c"]], 2, "row 1 belongs to 3 users and owners is 2"),
        ([["a", "b"]], 1, "row 0 belongs to 2 users and owners is 1"),
        ([["a", "b"], []], 2, "row 1 has no user id"),
        ([["a", None], ["b"]], 2, "user id number 1 is None"),
    ],
)
def test_rows_of_several_users_are_refused_unless_owners_bounds_them(
    ids: object, owners: int | None, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        from_arrays({"x": np.arange(2)[: len(ids)]}, ids, owners=owners)


def test_owners_is_at_least_one_and_its_field_is_reserved() -> None:
    with pytest.raises(InvalidValueError, match="owners is 0"):
        from_arrays({"x": np.arange(1)}, ["a"], owners=0)
    with pytest.raises(DataError, match="a field is named 'row_owners'"):
        from_arrays({ROW_OWNERS: np.arange(1)}, ["a"])


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        (np.array([["a", "z"], ["b", "b"]]), "names a user who is not enrolled"),
        (np.array([["b", "a"], ["b", "b"]]), "must first name the user with whom a row is stored"),
        (np.array(["a", "b"]), r"has shape \(2,\), not ids of several users per row"),
    ],
)
def test_a_store_whose_owners_do_not_fit_is_refused(owners: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        UserStore({"x": np.arange(2), ROW_OWNERS: owners}, np.array([0, 1, 2]), ["a", "b"])


def test_owners_are_saved(tmp_path: Path) -> None:
    store_of([[0, 1], [2], [2, 0, 1]]).save(tmp_path / "store")
    assert in_places(UserStore.load(tmp_path / "store"), 1).population == 3


def letters() -> Population:
    """Messages, each of a sender and some who got it; rows tell the classes apart."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 60)
    x = (np.eye(3)[y] + rng.normal(0.0, 0.3, (60, 3))).astype(np.float32)
    ids = [rng.choice(12, rng.integers(1, 4), replace=False).tolist() for _ in range(60)]
    return Population.from_arrays(x, y, ids, held_out=(x, y), owners=3)


def test_examples_of_several_users_are_trained_on_and_the_name_says_so(tmp_path: Path) -> None:
    people = letters()
    assert people.name == (
        "people: 12 users; rows have up to 3 owners, and who owns which is public"
    )
    mechanism = fedpriv.Mechanism.poisson(0.5, fedpriv.Flat(1.0), examples_per_user=4)
    mechanism = mechanism.calibrate(epsilon=8.0, delta=1e-2, rounds=2)
    found = run(people, mechanism, tmp_path / "run", rounds=2)
    assert len(found.rounds) == 2


def test_whole_users_are_neither_trained_nor_asked(tmp_path: Path) -> None:
    people = letters()
    whole = fedpriv.Mechanism.poisson(0.5, fedpriv.Flat(1.0))
    whole = whole.calibrate(epsilon=8.0, delta=1e-2, rounds=2)
    sentence = "whole users are drawn and rows have up to 3 owners; each user's share in such rows"
    with pytest.raises(DataError, match=sentence):
        run(people, whole, tmp_path / "run", rounds=2, local=fedpriv.SGD(1.0, epochs=1))
    assert not (tmp_path / "run").exists()
    with pytest.raises(DataError, match="whole users train and rows have up to 3 owners"):
        InProcessTransport(task(), people.users, torch.device("cpu"), 2**20)
    survey = Survey("s", (Mean("y", of="y", low=0.0, high=2.0),), PoissonSampling(12, 1.0), 1.0)
    with pytest.raises(DataError, match="whole users are asked and rows have up to 3 owners"):
        survey.check(people.users)


def test_examples_alone_have_no_owners() -> None:
    assert ROW_OWNERS not in cut_up(letters(), 1, "unit example").users.fields


def test_a_column_of_a_dataset_may_hold_lists(tmp_path: Path) -> None:
    rows = {"image": [[0.0], [1.0], [2.0]], "label": [0, 1, 0], "who": [["a", "b"], ["b"], ["c"]]}
    dataset = Dataset.from_dict(rows)
    with pytest.raises(DataError, match="row 0 belongs to 2 users"):
        from_dataset(dataset, "who")
    store = from_dataset(dataset, "who", owners=2)
    assert store.fields[ROW_OWNERS].tolist() == [["a", "b"], ["b", "b"], ["c", "c"]]
    dataset.save_to_disk(tmp_path / "train")
    Dataset.from_dict({**rows, "who": [["d"], ["e", "d"], ["f"]]}).save_to_disk(tmp_path / "test")
    options = {"train": str(tmp_path / "train"), "test": str(tmp_path / "test")}
    given = {**options, "user_column": "who", "owners": 2}
    people = load_population("hugging-face", given)
    assert people.users.population == 3
    assert people.name.endswith("rows have up to 2 owners, and who owns which is public")
    Dataset.from_dict({**rows, "who": [["d"], ["e", "a"], ["f"]]}).save_to_disk(tmp_path / "more")
    with pytest.raises(DataError, match="held-out rows name 1 of the enrolled users"):
        load_population("hugging-face", {**given, "test": str(tmp_path / "more")})
    with pytest.raises(InvalidValueError, match="owners is 2"):
        load_population("hugging-face", {**options, "owners": 2})


@pytest.mark.parametrize(
    ("owners", "found"),
    [
        ([[1.0], [9.0], [8.0]], "0 is 1.0"),  # who would be the enrolled 1
        ([[9], [None], [8]], "1 is None"),
        ([[9], None, [8]], "1 is None"),
        ([[9], [], [8]], "1 is None"),
    ],
)
def test_owners_of_held_out_rows_are_ids_or_refused(
    tmp_path: Path, owners: list[object], found: str
) -> None:
    rows = {"image": [[0.0], [1.0], [2.0]], "label": [0, 1, 0]}
    for name, who in (("train", [[1, 2], [2], [3]]), ("test", owners)):
        Dataset.from_dict({**rows, "who": who}).save_to_disk(tmp_path / name)
    options = {"train": str(tmp_path / "train"), "test": str(tmp_path / "test")}
    with pytest.raises(
        DataError, match=rf"^user id number {found}(; ids must be all|, which stands)"
    ):
        load_population("hugging-face", {**options, "user_column": "who", "owners": 2})
