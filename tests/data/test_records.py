"""A population cut into records: examples, or microbatches of one user."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.data.places import in_places
from fedpriv.data.population import Population, UserStore, cut_up, offsets_of
from fedpriv.errors import DataError


def population(sizes: list[int], ids: list[str] | None = None) -> Population:
    rows = sum(sizes)
    fields = {"x": np.arange(rows, dtype=np.float32), "y": np.arange(rows)}
    test = {name: np.zeros(1, column.dtype) for name, column in fields.items()}
    return Population("people: some", UserStore(fields, offsets_of(sizes), ids), test)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any), st.integers(1, 10))
def test_every_row_is_in_one_record_of_its_own_user(sizes: list[int], rows: int) -> None:
    people = population(sizes)
    found = cut_up(people, rows, "pieces").users
    expected: dict[str, list[int]] = {}
    for user in range(len(sizes)):
        own = people.users.examples_of(user)["y"].tolist()
        for number in range(0, len(own), rows):
            expected[f"{user}/{number // rows}"] = own[number : number + rows]
    given_ids = [found.id_of(record) for record in range(found.population)]
    held = [found.examples_of(record)["y"].tolist() for record in range(found.population)]
    assert dict(zip(given_ids, held, strict=True)) == expected
    assert len(given_ids) == len(expected)


def test_rows_are_not_copied_and_the_name_says_what_records_are() -> None:
    people = population([3, 0, 2], ["ann", "bob", "eve/1"])
    found = cut_up(people, 2, "unit microbatch of 2")
    assert found.name == "people: some; unit microbatch of 2"
    assert list(found.users.user_ids) == ["ann/0", "ann/1", "eve/1/0"]
    for name, column in people.users.fields.items():
        assert np.shares_memory(found.users.fields[name], column)
    assert found.test is not None
    assert found.test.keys() == people.test.keys()


def test_rows_of_a_saved_store_stay_on_disk(tmp_path: Path) -> None:
    people = population([300] * 4)
    people.users.save(tmp_path / "store")
    mapped = Population(people.name, UserStore.load(tmp_path / "store"), people.test)
    found = cut_up(mapped, 1, "examples").users
    assert isinstance(found.fields["x"], np.memmap)
    assert found.population == 1200


def test_ids_take_no_more_room_than_the_longest() -> None:
    ids = np.asarray(cut_up(population([50] * 30), 1, "examples").users.user_ids)
    assert ids.dtype == np.dtype(f"U{len('29/49')}")


def test_a_population_without_rows_has_no_records() -> None:
    with pytest.raises(DataError, match="no users"):
        cut_up(population([0, 0]), 1, "examples")


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8), st.integers(1, 9))
def test_a_user_has_k_places_for_rows_of_its_own_evenly_spaced(sizes: list[int], k: int) -> None:
    users = population(sizes).users
    found = in_places(users, k)
    assert found.population == k * len(sizes)
    for user, size in enumerate(sizes):
        own = users.examples_of(user)["y"].tolist()
        held = [found.examples_of(user * k + place)["y"].tolist() for place in range(k)]
        chosen = own if size <= k else [own[j * size // k] for j in range(k)]
        assert held == [[row] for row in chosen] + [[]] * (k - len(chosen))
        assert len(set(chosen)) == len(chosen) == min(size, k)


@given(st.lists(st.integers(0, 12), min_size=2, max_size=6), st.integers(1, 9), st.data())
def test_who_else_is_there_decides_on_nobodys_places(
    sizes: list[int], k: int, data: st.DataObject
) -> None:
    gone = data.draw(st.integers(0, len(sizes) - 1))
    users, rest = population(sizes).users, [user for user in range(len(sizes)) if user != gone]
    whole, without = in_places(users, k), in_places(users.subset(rest), k)
    for there, user in enumerate(rest):
        for place in range(k):
            before, after = (
                store.examples_of(position * k + place)["y"].tolist()
                for store, position in ((whole, user), (without, there))
            )
            assert before == after


def test_places_copy_rows_only_where_some_are_left_out() -> None:
    users = population([3, 0, 2]).users
    assert np.shares_memory(in_places(users, 3).fields["x"], users.fields["x"])
    assert len(in_places(users, 2).fields["x"]) == 4
