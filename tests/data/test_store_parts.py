"""A store written part by part is the store of all parts."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.data.population import UserStore
from fedpriv.errors import DataError


def store_of(sizes: list[int], first: int = 0, ids: list[str] | None = None) -> UserStore:
    """Users of some sizes whose rows are numbered from `first` on."""
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    rows = np.arange(first, first + offsets[-1])
    return UserStore({"x": np.stack([rows, -rows], 1).astype(np.float32), "y": rows}, offsets, ids)


@settings(max_examples=25)
@given(parts=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5), min_size=1, max_size=5))
def test_parts_are_one_store(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    firsts = np.cumsum([0, *map(sum, parts)]).tolist()
    stores = [store_of(sizes, first) for sizes, first in zip(parts, firsts, strict=False)]
    UserStore.save_parts(folder / "parts", stores)
    store_of([size for sizes in parts for size in sizes]).save(folder / "whole")
    names = sorted(path.name for path in (folder / "whole").iterdir())
    assert sorted(path.name for path in (folder / "parts").iterdir()) == names
    for name in names:
        assert (folder / "parts" / name).read_bytes() == (folder / "whole" / name).read_bytes()


def test_files_are_those_of_numpy(tmp_path: Path) -> None:
    store = store_of([3, 0, 2])
    store.save(tmp_path / "store")
    np.save(tmp_path / "x.npy", store.fields["x"])
    assert (tmp_path / "store" / "field-x.npy").read_bytes() == (tmp_path / "x.npy").read_bytes()


def test_a_part_is_written_before_the_next_is_made(tmp_path: Path) -> None:
    written = []

    def parts() -> Iterator[UserStore]:
        for number in range(3):
            written.append(sum(f.stat().st_size for f in tmp_path.rglob("field-y.npy")))
            yield store_of([1000], 1000 * number)

    UserStore.save_parts(tmp_path / "store", parts())
    assert written[0] == 0
    assert written[1] >= 8_000
    assert written[2] == written[1] + 8_000
    loaded = UserStore.load(tmp_path / "store")
    np.testing.assert_array_equal(loaded.fields["y"], np.arange(3000))


def test_ids_of_parts_of_any_width_are_kept(tmp_path: Path) -> None:
    UserStore.save_parts(
        tmp_path / "store", [store_of([1], 0, ["ann"]), store_of([2, 0], 1, ["johanna", "bo"])]
    )
    loaded = UserStore.load(tmp_path / "store")
    assert [loaded.id_of(user) for user in range(3)] == ["ann", "johanna", "bo"]


def numbered(ids: np.ndarray) -> UserStore:
    return UserStore({"x": np.zeros((1, 2), np.float32), "y": np.zeros(1, int)}, [0, 1], ids)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "no users"),
        ([store_of([1], 0, ["ann"]), store_of([1], 1, ["ann"])], "'ann' occurs twice"),
        ([store_of([1], 0, ["ann"]), store_of([1])], "1 of 2 parts have user ids"),
        ([numbered(np.array([1])), store_of([1], 0, ["1"])], "of one kind"),
        ([numbered(np.array([1])), numbered(np.array([2], np.uint64))], "of one kind"),
        ([store_of([1]), UserStore({"x": np.zeros((1, 2))}, [0, 1])], "have the fields"),
        (
            [UserStore({"x": np.zeros((1, 2))}, [0, 1]), UserStore({"x": np.zeros(1)}, [0, 1])],
            r"field 'x' is float64\[2\] per row in one part, float64\[\] in another",
        ),
    ],
)
def test_parts_that_do_not_fit_leave_nothing(
    tmp_path: Path, parts: list[UserStore], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        UserStore.save_parts(tmp_path / "store", parts)
    assert list(tmp_path.iterdir()) == []


def test_broken_users_stay_broken_in_a_saved_store(tmp_path: Path) -> None:
    parts = [store_of([1, 2]).without({2: "no number"}), store_of([1]).without({0: "no text"})]
    UserStore.save_parts(tmp_path / "store", parts)
    read = UserStore.load(tmp_path / "store")
    expected = {1: "no number, in row 1 of user '1'", 2: "no text, in row 0 of user '0'"}
    assert read.broken == expected
    assert read.sizes.tolist() == [1, 0, 0]
