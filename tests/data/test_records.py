"""A population cut into records: examples, or microbatches of one user."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

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
