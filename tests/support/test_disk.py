"""A crash leaves files whole, and what lacks room is written when there is some."""

import errno
import sqlite3
from collections.abc import Callable

import pytest

from fedpriv.errors import LedgerError
from fedpriv.support.disk import lacks_room, with_room, write_atomically


def test_what_cannot_be_written_leaves_the_old_file_and_names_it(tmp_path, monkeypatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*file'"):
        write_atomically(path, b"new")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"old"
    monkeypatch.undo()
    (folder := tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=r"Is a directory: '.*/folder'"):
        write_atomically(folder, b"new")
    assert sorted(tmp_path.iterdir()) == [path, folder]


def no_file() -> None:
    raise OSError(errno.EMFILE, "Too many open files", "metrics.jsonl")


def no_disk() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "round-000001.safetensors")


def no_page() -> None:
    """As SQLite says it, in a file that may not grow."""
    with sqlite3.connect(":memory:") as connection:
        connection.execute("PRAGMA max_page_count = 2")
        try:
            for name in "abc":
                connection.execute(f"CREATE TABLE {name} (x)")
        except sqlite3.Error as error:
            raise LedgerError(f"the ledger cannot be extended: {error}") from error


def no_permission() -> None:
    raise PermissionError(errno.EACCES, "Permission denied", "metrics.jsonl")


def damaged() -> None:
    raise LedgerError("the ledger is broken")


PASSING, STAYING = [no_file, no_disk, no_page], [no_permission, damaged]


@pytest.mark.parametrize("failing", PASSING)
def test_what_lacks_room_is_written_again_until_there_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: Callable[[], None]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)

    def write() -> str:
        if len(waits) < 9:
            failing()
        return "written"

    assert with_room(write) == "written"
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 9


@pytest.mark.parametrize("failing", STAYING)
def test_what_fails_for_another_reason_is_not(failing: Callable[[], None]) -> None:
    with pytest.raises((OSError, LedgerError)) as caught:
        with_room(failing)
    assert not lacks_room(caught.value)
