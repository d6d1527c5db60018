"""The transport over a Flower grid, with the app that workers run and with broken ones."""

import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import (
    ArrayRecord,
    Context,
    Error,
    Message,
    MessageType,
    RecordDict,
)

from fedpriv.data.population import UserStore
from fedpriv.errors import StoppedError, WorkerError
from fedpriv.experiment.config import parse_config
from fedpriv.flower import messages as flower_messages
from fedpriv.flower.grid import GridTransport, introduced_workers, respond
from fedpriv.privacy.round import PartialSum
from fedpriv.training.request import RoundRequest, Transport
from tests.engine.everyone import torch_threads
from tests.flower.local_grid import App, LocalGrid, app
from tests.server.crowd import TASK, USERS, population, request_to
from tests.training.transport_conformance import TransportConformance

SECRET = "a user's secret"
SECONDS = 300.0
# Ids as Flower gives them, most of which no float64 holds.
FIRST_ID = 2**64 - 1001


@pytest.fixture(scope="module")
def grids() -> Iterator[list[LocalGrid]]:
    """Grids that are closed at the end."""
    made: list[LocalGrid] = []
    yield made
    for grid in made:
        grid.close()


def simulated(
    grids: list[LocalGrid],
    workers: int = 3,
    seconds: float = SECONDS,
    stopping: threading.Event | None = None,
) -> tuple[LocalGrid, GridTransport]:
    """A transport over workers that load the crowd by themselves."""
    grid = LocalGrid({FIRST_ID + k: (app, {}) for k in range(workers)})
    grids.append(grid)
    stopping = stopping or threading.Event()
    shares = introduced(grid, workers, crowd())
    return grid, GridTransport(grid, shares, crowd(), seconds, stopping)


def introduced(grid: LocalGrid, workers: int, work: bytes) -> dict[int, range]:
    people = population()
    return introduced_workers(grid, people.name, people.users, workers, work, threading.Event())


def crowd(loader: str = "tests.server.crowd:population", **options: object) -> bytes:
    table = {
        "name": "crowd",
        "data": {"name": loader, "options": options},
        "model": {"name": TASK.model, "options": dict(TASK.options)},
        "privacy": {"epsilon": 1.0, "delta": 1e-3},
        "engine": {"device": "cpu", "chunk_mebibytes": 32},
    }
    return pickle.dumps(parse_config(table, "crowd"))


def nothing_of(request: RoundRequest) -> np.ndarray:
    return np.zeros(request.clipping.layout.dimension, np.int64)


def total_of(transport: Transport, request: RoundRequest) -> np.ndarray:
    partials = list(transport.collect(request))
    return sum((p.total for p in partials), start=nothing_of(request))


class TestSimulatedWorkers(TransportConformance):
    @pytest.fixture(autouse=True)
    def _made(self, grids: list[LocalGrid]) -> None:
        self._transport = simulated(grids)[1]

    def transport(self) -> Transport:
        return self._transport

    def request(self) -> RoundRequest:
        return request_to(list(range(USERS)))


def test_what_goes_wrong_at_workers_of_a_simulation_is_marked_as_not_private(
    grids: list[LocalGrid], caplog: pytest.LogCaptureFixture
) -> None:
    list(simulated(grids, workers=1)[1].collect(request_to(list(range(USERS)))))
    unfinished = "worker-0: unfinished: training of some users failed or took too long"
    assert f"simulation only, not private: {unfinished}" in caplog.messages


def test_workers_give_what_one_process_gives(grids: list[LocalGrid]) -> None:
    request = request_to(list(range(USERS)))
    parts = pickle.dumps(replace(request, users=request.users[:0])), pickle.dumps(request.users)
    given = flower_messages.content_of(crowd(), *parts)
    with torch_threads(1):  # as many as workers train with, which decides how sums round
        expected = respond(given).total
        for workers in (1, 2, USERS):
            np.testing.assert_array_equal(total_of(simulated(grids, workers)[1], request), expected)


def test_a_round_is_one_message_per_worker(grids: list[LocalGrid]) -> None:
    grid, transport = simulated(grids, workers=3)
    before = len(grid.sent)
    partials = list(transport.collect(request_to([0, 1, 5])))
    sent = [message.metadata.dst_node_id for message in grid.sent[before:]]
    assert sorted(sent) == [FIRST_ID, FIRST_ID + 1, FIRST_ID + 2]
    assert {p.node: p.users for p in partials} == {"worker-0": 2, "worker-1": 0, "worker-2": 1}


def content(change: Callable[[RecordDict], None]) -> App:
    """The worker's app, with a change to what it sends."""

    def answer(message: Message, context: Context) -> Message:
        reply = app(message, context)
        change(reply.content)
        return reply

    return answer


def quick(message: Message, _context: Context) -> Message:
    """Sends a sum of nobody at once."""
    request = pickle.loads(flower_messages.parts_in(message.content)[1])
    packed = pickle.dumps(PartialSum("", 0, nothing_of(request), 0))
    return Message(flower_messages.content_of(packed), reply_to=message)


def of_another_kind(message: Message, _context: Context) -> Message:
    return Message(flower_messages.content_of(pickle.dumps([1, 2])), reply_to=message)


def raising(_message: Message, _context: Context) -> Message:
    raise RuntimeError(SECRET)


def in_error(message: Message, _context: Context) -> Message:
    return Message(Error(code=2, reason=SECRET), reply_to=message)


def from_elsewhere(message: Message, context: Context) -> Message:
    reply = app(message, context)
    vars(reply.metadata)["_src_node_id"] = FIRST_ID + 1
    return reply


def empty(message: Message, _context: Context) -> Message:
    reply = Message(RecordDict(), reply_to=message)
    vars(reply)["_content"] = None
    return reply


def drop(name: str) -> App:
    return content(lambda records: records.__delitem__(name))


BROKEN: dict[str, App] = {
    "raises": raising,
    "an error": in_error,
    "nothing": empty,
    "from another node": from_elsewhere,
    "no record": drop("fedpriv"),
    "no parts": content(lambda records: records["fedpriv"].update(parts=[])),
    "a record of another kind": content(lambda records: records.update({"fedpriv": ArrayRecord()})),
    "another version": content(lambda records: records["fedpriv"].update({"version": "0.0.0"})),
    "parts that are no bytes": content(lambda records: records["fedpriv"].update(parts=["x"])),
    "a value of another kind": of_another_kind,
}


def counted(transport: Transport, request: RoundRequest) -> dict[str, PartialSum]:
    """What counts of the answers of two workers, one of which does not do its part."""
    partials, found = transport.collect(request), dict[str, PartialSum]()
    with pytest.raises(WorkerError, match="1 of 2 workers answered in round 3"):
        found.update((partial.node, partial) for partial in partials)
    return found


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN)
def test_a_broken_reply_does_not_count_and_ends_the_simulation(
    grids: list[LocalGrid], broken: App, caplog: pytest.LogCaptureFixture
) -> None:
    grid, transport = simulated(grids, workers=2)
    expected = total_of(transport, request_to([4, 5]))
    _, settings = grid.nodes[FIRST_ID]
    grid.nodes[FIRST_ID] = broken, settings
    found = counted(transport, request_to([0, 1, 4, 5]))
    assert found.keys() == {"worker-1"}
    np.testing.assert_array_equal(found["worker-1"].total, expected)
    assert expected.any()
    assert SECRET not in caplog.text


def test_what_a_worker_raises_is_told_by_its_type_alone(
    grids: list[LocalGrid], caplog: pytest.LogCaptureFixture
) -> None:
    transport = replace(simulated(grids, workers=2)[1], work=crowd("tests.server.missing:people"))
    with caplog.at_level("INFO"), pytest.raises(WorkerError, match="0 of 2 workers answered"):
        total_of(transport, request_to([0, 4]))
    assert "worker-0 failed: DataError" in caplog.text
    assert "missing" not in caplog.text


def test_what_comes_after_the_deadline_counts_for_nothing(grids: list[LocalGrid]) -> None:
    release = threading.Event()

    def hangs(message: Message, context: Context) -> Message:
        release.wait()
        return quick(message, context)

    grid, transport = simulated(grids, workers=2, seconds=3.0)
    grid.nodes |= {FIRST_ID: (hangs, {}), FIRST_ID + 1: (quick, {})}
    began = time.monotonic()
    try:
        assert counted(transport, request_to([0, 4])).keys() == {"worker-1"}
        assert time.monotonic() - began >= 3.0
        # Next attempt: the answer to the older one, which comes meanwhile, is not waited for.
        release.set()
        answered = {p.node for p in transport.collect(request_to([0, 4], attempt=1))}
        assert answered == {"worker-0", "worker-1"}
    finally:
        release.set()


def test_a_round_that_is_stopped_is_abandoned(grids: list[LocalGrid]) -> None:
    release, stopping = threading.Event(), threading.Event()

    def hangs(message: Message, context: Context) -> Message:
        stopping.set()
        release.wait()
        return app(message, context)

    grid, transport = simulated(grids, workers=2, stopping=stopping)
    _, settings = grid.nodes[FIRST_ID]
    grid.nodes[FIRST_ID] = hangs, settings
    try:
        for _ in range(2):
            with pytest.raises(StoppedError, match="nothing of the round is released"):
                total_of(transport, request_to([0]))
    finally:
        release.set()


def failing(kind: str) -> object:
    """A loader that says what it must not, in an error of this kind."""
    kinds = {"ValueError": ValueError, "OSError": OSError}
    raise kinds[kind](SECRET)


def trouble_of(work: bytes) -> str:
    """What a worker says when it is asked what it has loaded and cannot tell."""
    grid = LocalGrid({FIRST_ID: (app, {})})
    try:
        content = flower_messages.content_of(work, pickle.dumps(range(1)))
        question = Message(content, FIRST_ID, MessageType.QUERY)
        (reply,) = grid.send_and_receive([question], timeout=SECONDS)
    finally:
        grid.close()
    return pickle.loads(flower_messages.parts_in(reply.content)[0])


@pytest.mark.parametrize(("kind", "words"), [("ValueError", "ValueError at"), ("OSError", "OSErr")])
def test_what_a_loader_of_a_simulation_says_stays_at_the_worker(
    kind: str, words: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "node_loaders", sys.modules[__name__])
    work = crowd("node_loaders:failing", kind=kind)
    said = trouble_of(work)
    assert words in said
    assert SECRET not in said + caplog.text


WORKERS = {FIRST_ID + k: (app, {}) for k in range(2)}


@pytest.mark.parametrize(
    ("nodes", "loads", "sentence"),
    [
        ({**WORKERS, FIRST_ID: (raising, {})}, crowd(), "error 2 of Flower"),
        (WORKERS, crowd("tests.server.missing:population"), "cannot be imported"),
        (WORKERS, crowd("digits"), "other users"),
        (WORKERS, crowd(pixel=0.5), "other data"),
        (WORKERS, crowd(moved=1), "other data"),
        ({**WORKERS, 5: (app, {})}, crowd(), "3 workers .* configured for 2"),
        (WORKERS, b"", "a worker cannot take part: EOFError"),
    ],
    ids=[
        "no code",
        "no module",
        "other users",
        "other pixel",
        "other cut",
        "too many",
        "nothing",
    ],
)
def test_a_simulation_begins_with_all_of_its_workers(
    nodes: dict[int, tuple[App, Mapping[str, object]]], loads: bytes, sentence: str
) -> None:
    grid = LocalGrid(nodes)
    try:
        with pytest.raises(WorkerError, match=sentence):
            introduced(grid, 2, loads)
    finally:
        grid.close()


def test_a_worker_that_does_not_answer_ends_the_simulation(grids: list[LocalGrid]) -> None:
    grid, transport = simulated(grids, workers=2)
    grid.nodes[FIRST_ID + 1] = (raising, {})
    with pytest.raises(WorkerError, match="1 of 2 workers answered in round 3"):
        total_of(transport, request_to([0, 6]))


def test_the_sum_of_nobody_is_zero(grids: list[LocalGrid]) -> None:
    _, transport = simulated(grids, workers=2)
    partials = list(transport.collect(request_to([])))
    assert [partial.users for partial in partials] == [0, 0]
    assert not any(partial.total.any() for partial in partials)


@pytest.mark.parametrize("workers", [1, 3, USERS])
def test_shares_are_even_and_hold_everybody_once(grids: list[LocalGrid], workers: int) -> None:
    shares = simulated(grids, workers)[1].shares.values()
    assert [user for share in shares for user in share] == list(range(USERS))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


IDS = [f"u{user}" for user in range(4)]


def people(
    x: object = 0.0, moved: int = 0, ids: Sequence[str] = IDS, dtype: type = np.float32
) -> UserStore:
    """Four users of three rows; the first row of the third user is x."""
    rows = np.zeros((12, 2), dtype)
    rows[6] = x
    return UserStore({"x": rows, "y": np.arange(12)}, np.array([0, 3, 6 + moved, 9, 12]), ids)


def test_what_a_worker_says_of_its_share_changes_with_all_that_it_trains_on(
    tmp_path: Path,
) -> None:
    share = range(1, 3)
    said = flower_messages.digest_of_shard("people", people(), share)
    plain, swapped = people(), [*IDS[:1], *IDS[2:0:-1], *IDS[3:]]
    others = [
        ("others", plain),
        ("people", people(x=1.0)),
        ("people", people(moved=1)),
        ("people", people(ids=swapped)),
        ("people", people(dtype=np.int32)),
        ("people", UserStore({"x": plain.fields["x"]}, plain.offsets, IDS)),
        ("people", UserStore({**plain.fields, "z": np.ones(12)}, plain.offsets, IDS)),
    ]
    assert len(said) == 32
    assert len({said, *(flower_messages.digest_of_shard(*other, share) for other in others)}) == 8
    beyond = people(ids=["other", *IDS[1:]])
    assert flower_messages.digest_of_shard("people", beyond, share) == said
    plain.save(tmp_path / "people")
    assert (
        flower_messages.digest_of_shard("people", UserStore.load(tmp_path / "people"), share)
        == said
    )
