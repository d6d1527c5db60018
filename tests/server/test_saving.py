"""Checkpoints are written beside the next round, and are there before its charge."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from federation import CONSTANT, PARAMETERS, constant_update, make_plan, open_books

from fedpriv.federated.books import Books
from fedpriv.federated.checkpoint import checkpoints, load_checkpoint
from fedpriv.federated.fake import FakeTransport
from fedpriv.federated.round import initial_state
from fedpriv.federated.transport import RoundRequest, Transport
from fedpriv.privacy.entropy import OperatingSystemEntropy
from fedpriv.privacy.layout import Tensors
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.server import run
from fedpriv.server.evaluation import Evaluation
from fedpriv.server.folder import RunFolder
from fedpriv.server.run import Cadence, RoundRow, conduct
from fedpriv.server.saving import saving


class Disk:
    """Where things are written in their order; some must wait, or fail."""

    def __init__(self) -> None:
        self.written: list[int] = []
        self.let_go = threading.Event()

    def writing(self, number: int, *, waits: bool = False) -> Callable[[], None]:
        def write() -> None:
            if waits:
                assert self.let_go.wait(60.0)
            self.written.append(number)

        return write


def fails() -> None:
    raise OSError("the disk is full")


def test_what_is_begun_is_written_meanwhile_and_is_there_after_finish() -> None:
    disk = Disk()
    with saving() as one:
        one.begin(disk.writing(1, waits=True))
        assert disk.written == []
        disk.let_go.set()
        one.finish()
        assert disk.written == [1]
        one.finish()
        assert disk.written == [1]


def test_one_thing_is_written_after_another() -> None:
    disk = Disk()
    disk.let_go.set()
    with saving() as one:
        for number in range(20):
            one.begin(disk.writing(number, waits=number % 2 == 0))
    assert disk.written == list(range(20))


def test_an_error_of_writing_is_raised_once_by_whatever_waits_for_it() -> None:
    disk = Disk()
    with saving() as one:
        one.begin(fails)
        with pytest.raises(OSError, match="full"):
            one.finish()
        one.begin(fails)
        with pytest.raises(OSError, match="full"):
            one.begin(disk.writing(1))
        one.begin(disk.writing(2))
    assert disk.written == [2]
    with pytest.raises(OSError, match="full"), saving() as one:
        one.begin(fails)


def test_a_block_that_another_error_ends_ends_once_all_is_written() -> None:
    disk = Disk()

    def begins_and_fails(write: Callable[[], None]) -> None:
        with saving() as one:
            one.begin(write)
            disk.let_go.set()
            raise KeyError

    with pytest.raises(KeyError):
        begins_and_fails(disk.writing(1, waits=True))
    assert disk.written == [1]
    with pytest.raises(OSError, match="full") as caught:
        begins_and_fails(fails)
    assert isinstance(caught.value.__context__, KeyError)


def conducted(
    folder: Path, books: Books, every: int = 1, transport: Transport = CONSTANT
) -> Iterator[RoundRow]:
    plan = make_plan(sampling=PoissonSampling(20, 1.0))
    return conduct(
        RunFolder(folder),
        plan,
        initial_state(plan, PARAMETERS),
        transport,
        books,
        OperatingSystemEntropy(),
        lambda _: Evaluation(0.0, None),
        Cadence(5, every),
    )


def test_without_a_clock_no_round_is_timed(tmp_path: Path) -> None:
    # How long a round took says how many users were drawn.
    with open_books(tmp_path) as books:
        rows = list(conducted(tmp_path, books))
    assert [row.simulation_only_seconds for row in rows] == [None] * 5
    for row in RunFolder(tmp_path).read_metrics():
        assert row["simulation_only_seconds"] is None


def newest(folder: Path) -> int:
    """Rounds in the newest checkpoint, 0 if there is none."""
    found = checkpoints(RunFolder(folder).checkpoints)
    return load_checkpoint(found[-1]).state.round if found else 0


@pytest.mark.parametrize("every", [1, 2])
def test_at_a_charge_every_earlier_round_that_is_to_have_a_checkpoint_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    saved_when_charged = []
    charge = Books.charge

    def spy(books: Books, name: str, round_number: int, *others: object) -> object:
        saved_when_charged.append(newest(tmp_path))
        return charge(books, name, round_number, *others)

    monkeypatch.setattr(Books, "charge", spy)
    with open_books(tmp_path) as books:
        assert len(list(conducted(tmp_path, books, every))) == 5
        head = books.ledger.head
    assert saved_when_charged == [number - number % every for number in range(5)]
    last = load_checkpoint(checkpoints(RunFolder(tmp_path).checkpoints)[-1])
    assert (last.state.round, last.ledger_head) == (5, head)


def test_users_of_the_next_round_are_asked_while_a_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    save = run.save_checkpoint

    def when_asked(*arguments: object) -> object:
        assert asked.wait(60.0)
        return save(*arguments)

    def update_of(request: RoundRequest, user: int) -> Tensors:
        if request.round == 1:
            asked.set()
        return constant_update(request, user)

    monkeypatch.setattr(run, "save_checkpoint", when_asked)
    with open_books(tmp_path) as books:
        rows = conducted(tmp_path, books, transport=FakeTransport(update_of))
        next(rows)
        assert newest(tmp_path) == 0
        next(rows)
    assert newest(tmp_path) >= 1


def test_a_checkpoint_that_cannot_be_written_ends_the_run_before_the_next_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "save_checkpoint", lambda *_: fails())
    with open_books(tmp_path) as books:
        rows = conducted(tmp_path, books)
        assert next(rows).round == 0
        with pytest.raises(OSError, match="full"):
            next(rows)
        assert books.ledger.head.count == 1
