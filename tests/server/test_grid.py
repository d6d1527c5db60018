"""The transport over a Flower grid, with the app that nodes run and with hostile ones."""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    RecordDict,
)
from transport_conformance import TransportConformance

from fedpriv import wire
from fedpriv.build import build_task
from fedpriv.clients.flower_app import respond
from fedpriv.clients.training import Host, NodeTrainer
from fedpriv.data.population import UserStore
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import DataError, StoppedError, WireError, WorkerError
from fedpriv.privacy.round import RoundRequest, Transport, add_up
from fedpriv.server.enrolment import Enrolment, Hosting
from fedpriv.server.flower_runs import (
    EnrolledNodes,
    GridTransport,
    hosting_of_workers,
    simulated_workers,
)
from fedpriv.wire import Decline, SummedUpdates, Welcome, flower_messages
from fedpriv.wire import federation_pb2 as pb
from tests.engine.everyone import torch_threads
from tests.server.crowd import PRICE, TASK, USERS, population, request_to
from tests.server.local_grid import App, LocalGrid, app
from tests.wire.examples import covering

SECRET = "a user's secret"
SECONDS = 300.0
# Ids as Flower gives them, most of which no float64 holds.
FIRST_ID = 2**64 - 1001


def price_of(request: RoundRequest) -> wire.Price:
    return replace(PRICE, event=covering(PRICE.event, request.clipping))


@pytest.fixture(scope="module")
def grids() -> Iterator[list[LocalGrid]]:
    """Grids that are closed at the end."""
    made: list[LocalGrid] = []
    yield made
    for grid in made:
        grid.close()


def simulated(grids: list[LocalGrid], workers: int = 3) -> tuple[LocalGrid, Transport]:
    """A transport over workers that load the crowd by themselves."""
    settings = [{"partition-id": k, "num-partitions": workers} for k in range(workers)]
    grid = LocalGrid({FIRST_ID + k: (app, config) for k, config in enumerate(settings)})
    grids.append(grid)
    loaded = {flower_messages.SIMULATED: crowd()}
    present = introduced(grid, workers, loaded)
    empty = Welcome("crowd", USERS, np.empty(0, np.int64), TASK)
    headers = loaded | {flower_messages.WELCOME: header(empty)}
    never = threading.Event()
    return grid, GridTransport(
        grid,
        hosting_of_workers(USERS, workers),
        lambda: present,
        lambda _: headers,
        price_of,
        SECONDS,
        never,
        required=True,
    )


def header(welcome: Welcome) -> bytes:
    return wire.encode_welcome(welcome).SerializeToString()


def introduced(grid: LocalGrid, workers: int, loaded: Mapping[str, bytes]) -> dict[str, int]:
    people = population()
    return simulated_workers(grid, people.name, people.users, workers, loaded, threading.Event())


def crowd(**options: object) -> bytes:
    return flower_messages.Simulated("tests.server.crowd:population", options, "cpu", 32).encode()


# Users 0 to 3 are at a silo, 4 and 5 at nodes of their own, 6 at one that always fails.
HOSTED = {"silo": [0, 1, 2, 3], "four": [4], "five": [5], "six": [6]}
POPULATION_ID = "5f" * 16
ENROLMENT = Enrolment(
    POPULATION_ID, {node: [str(u) for u in users] for node, users in HOSTED.items()}
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data of each node."""
    made = tmp_path_factory.mktemp("users")
    users = population().users
    for node, own in HOSTED.items():
        part = users.subset(np.array(own))
        type(part)(part.fields, part.offsets, [str(u) for u in own]).save(made / node)
    return made


def at_node(own: list[int]) -> InProcessTransport:
    """What a node with these users of the population trains with."""
    task, users = build_task(**vars(TASK)), population().users.subset(np.array(own))
    cpu, hosted = torch.device("cpu"), np.array(own)
    return InProcessTransport(
        task, users, cpu, 2**27, hosted, processes=1, limited=True, timed=False
    )


@contextmanager
def enrolled(
    folder: Path,
    apps: Mapping[str, App] | None = None,
    seconds: float = SECONDS,
    stopping: threading.Event | None = None,
) -> Iterator[tuple[LocalGrid, GridTransport]]:
    """A transport over nodes that hold their own users; some may answer by other apps."""
    stopping = stopping or threading.Event()
    ids = {node: FIRST_ID + k for k, node in enumerate(HOSTED)}
    grid = LocalGrid(
        {
            ids[node]: (
                only_trains_with((apps or {}).get(node, app)),
                {"node": node, "users": str(folder / node), "device": "cpu", "processes": 1},
            )
            for node in HOSTED
        }
    )

    def headers(node: str) -> dict[str, bytes]:
        users = ENROLMENT.users_of(node).copy()
        return {flower_messages.WELCOME: header(Welcome(POPULATION_ID, USERS, users, TASK))}

    present = EnrolledNodes(grid, ENROLMENT, 0, stopping)
    try:
        yield (
            grid,
            GridTransport(grid, ENROLMENT.hosting, present, headers, price_of, seconds, stopping),
        )
    finally:
        grid.close()


def only_trains_with(training: App) -> App:
    """Says who it is as every node does, and answers offers as an app does."""

    def answer(message: Message, context: Context) -> Message:
        queried = message.metadata.message_type == "query"
        return (app if queried else training)(message, context)

    return answer


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


@pytest.fixture(scope="module", autouse=True)
def _lasting_trainers() -> Iterator[None]:
    """Nodes build their trainer once, not for each message, which takes most of a round."""
    build, built = Host.trainer, {}

    def trainer(host: Host, welcome: Welcome) -> NodeTrainer:
        if host.settings not in built:
            built[host.settings] = build(host, welcome)
        return built[host.settings]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Host, "trainer", trainer)
        yield


class TestEnrolledNodes(TransportConformance):
    @pytest.fixture(autouse=True)
    def _made(self, folder: Path) -> Iterator[None]:
        with enrolled(folder) as (_, self._transport):
            yield

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


def test_workers_and_nodes_give_what_one_process_gives(
    folder: Path, grids: list[LocalGrid]
) -> None:
    welcome = header(Welcome("crowd", USERS, np.empty(0, np.int64), TASK))
    request = request_to(list(range(USERS)))
    settings = {"partition-id": 0, "num-partitions": 1}
    given = flower_messages.content_of(
        {flower_messages.SIMULATED: crowd(), flower_messages.WELCOME: welcome}
    )
    with torch_threads(1):  # as many as nodes train with, which decides how sums round
        expected = respond(given, settings, None, request).total
        for workers in (1, 2, USERS):
            np.testing.assert_array_equal(total_of(simulated(grids, workers)[1], request), expected)
    # How users train, and so how sums round, follows from how many a node has.
    expected = sum(total_of(at_node(own), request) for own in HOSTED.values())
    with enrolled(folder) as (grid, transport):
        np.testing.assert_array_equal(total_of(transport, request), expected)
        answers, settings = grid.nodes[FIRST_ID]
        grid.nodes[FIRST_ID] = answers, {**settings, "processes": 2}
        np.testing.assert_array_equal(total_of(transport, request), expected)


def test_a_node_trains_with_the_activations_of_its_settings(folder: Path) -> None:
    request = request_to(HOSTED["silo"])
    with enrolled(folder) as (grid, transport):
        exact = total_of(transport, request)
        answers, settings = grid.nodes[FIRST_ID]
        grid.nodes[FIRST_ID] = answers, {**settings, "activations": "bfloat16"}
        rounded = total_of(transport, request)
    size = np.linalg.norm(exact)
    assert 1e-4 * size < np.linalg.norm(rounded - exact) < 2e-2 * size


def test_a_round_is_one_message_per_node_with_drawn_users(grids: list[LocalGrid]) -> None:
    grid, transport = simulated(grids, workers=3)
    before = len(grid.sent)
    total_of(transport, request_to([0, 1, 5]))
    sent = [message.metadata.dst_node_id for message in grid.sent[before:]]
    assert sent == [FIRST_ID, FIRST_ID + 2]


def answering(change: Callable[[wire.RoundAnswer], wire.RoundAnswer], **headers: object) -> App:
    """The node's app, with a change to the header of its answer."""

    def answer(message: Message, context: Context) -> Message:
        reply = app(message, context)
        record = reply.content["fedpriv"]
        said = pb.Answer.FromString(record["answer"])
        offer = wire.decode_offer(pb.Offer.FromString(message.content["fedpriv"]["offer"]))
        known = wire.decode_answer(said, wire.layout_of_sums(offer.clipping))
        record["answer"] = wire.encode_answer(change(known)).SerializeToString()
        for name, value in headers.items():
            record[name] = value
        return reply

    return answer


def content(change: Callable[[RecordDict], None]) -> App:
    """The node's app, with a change to what it sends."""

    def answer(message: Message, context: Context) -> Message:
        reply = app(message, context)
        change(reply.content)
        return reply

    return answer


def with_tensors(data: bytes) -> App:
    def change(records: RecordDict) -> None:
        array = Array(dtype="float64", shape=(1,), stype="numpy.ndarray", data=data)
        records["fedpriv.tensors"] = ArrayRecord({"fedpriv": array})

    return content(change)


def summing(change: Callable[[np.ndarray], np.ndarray], users: int = 1, weight: int = 1) -> App:
    """Sends zeros, changed, as the sum of so many users."""

    def answer(message: Message, _context: Context) -> Message:
        offer = wire.decode_offer(pb.Offer.FromString(message.content["fedpriv"]["offer"]))
        total = change(np.zeros(offer.clipping.layout.dimension, np.int64))
        header = SummedUpdates(users, weight, wire.manifest_of({"sum": total}))
        said = wire.encode_answer(wire.RoundAnswer(offer.id, header)).SerializeToString()
        packed = flower_messages.packed({"sum": total})
        return Message(
            flower_messages.content_of({flower_messages.ANSWER: said}, packed), reply_to=message
        )

    return answer


def updating(message: Message, _context: Context) -> Message:
    """Sends one user's update as it is, not clipped."""
    offer = wire.decode_offer(pb.Offer.FromString(message.content["fedpriv"]["offer"]))
    layout = offer.clipping.layout
    update = layout.unflatten(np.ones(layout.dimension, np.float32))
    header = SummedUpdates(1, 1, wire.manifest_of(update))
    said = wire.encode_answer(wire.RoundAnswer(offer.id, header)).SerializeToString()
    content = flower_messages.content_of(
        {flower_messages.ANSWER: said}, flower_messages.packed(update)
    )
    return Message(content, reply_to=message)


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


def other_id(**fields: object) -> App:
    return answering(lambda a: replace(a, id=replace(a.id, **fields)))


HOSTILE: dict[str, App] = {
    "raises": raising,
    "an error": in_error,
    "nothing": empty,
    "from another node": from_elsewhere,
    "no record": drop("fedpriv"),
    "no tensors": drop("fedpriv.tensors"),
    "records of other kinds": content(
        lambda records: records.update(
            {"fedpriv": ArrayRecord(), "fedpriv.tensors": ConfigRecord()}
        )
    ),
    "another version": answering(lambda a: a, version="0.0.0"),
    "a header that is no bytes": answering(lambda a: a, answer=SECRET),
    "a header that is no message": answering(lambda a: a, answer=b"\xff" * 9),
    "a header that is long": answering(lambda a: a, answer=bytes(2**22)),
    "another round": other_id(round=4),
    "another attempt": other_id(attempt=1),
    "another run": other_id(run="other"),
    "declines": answering(lambda a: replace(a, content=Decline("not\ntoday"))),
    "an update": updating,
    "a sum of floats": summing(lambda total: total.astype(np.float32)),
    "short tensors": with_tensors(bytes(7)),
    "long tensors": with_tensors(bytes(10**6)),
    "damaged tensors": with_tensors(bytes(27 * 8)),
    "a longer sum": summing(lambda total: np.append(total, 0)),
    "more users than drawn": summing(lambda total: total, users=5),
}


@pytest.fixture(scope="module")
def of_others(folder: Path) -> np.ndarray:
    """The sum of the users who are not at the silo."""
    with enrolled(folder) as (_, transport):
        return total_of(transport, request_to([4, 5]))


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_reply_counts_as_zero_and_harms_nobody(
    folder: Path, of_others: np.ndarray, hostile: App, caplog: pytest.LogCaptureFixture
) -> None:
    request = request_to([0, 1, 4, 5])
    with enrolled(folder, {"silo": hostile}) as (_, transport):
        total = total_of(transport, request)
    np.testing.assert_array_equal(total, of_others)
    assert total.any()
    assert SECRET not in caplog.text


@pytest.mark.parametrize("hostile", [in_error, raising, summing(lambda total: total, users=2)])
def test_nothing_names_a_node_of_one_user(
    folder: Path, hostile: App, caplog: pytest.LogCaptureFixture
) -> None:
    with enrolled(folder, {"four": hostile}) as (_, transport):
        assert not total_of(transport, request_to([4])).any()
    assert "a node of one user" in caplog.text
    assert "four" not in caplog.text


def of_squares(squares: int) -> Callable[[np.ndarray], np.ndarray]:
    """Makes integers of zeros whose squares add up to so much."""

    def change(total: np.ndarray) -> np.ndarray:
        left = squares
        for place in range(total.size):
            total[place] = math.isqrt(left)
            left -= int(total[place]) ** 2
        assert left == 0
        return total

    return change


(GROUP,) = request_to([]).clipping.groups
BOUND = GROUP.squared_bound


@pytest.mark.parametrize(
    ("answer", "counts"),
    [
        (summing(of_squares(BOUND)), True),
        (summing(of_squares(BOUND + 1)), False),
        (summing(of_squares(BOUND), weight=0), True),  # no group is weighted
        (summing(of_squares(BOUND), weight=2), False),
        (summing(of_squares(1), users=0, weight=0), False),
        (summing(lambda total: total + 2**62), False),
        (summing(lambda total: np.full_like(total, -(2**63))), False),
    ],
    ids=["B", "B + 1", "no weight", "more weight than c", "of nobody", "2^62", "-2^63"],
)
def test_a_sum_of_one_user_counts_if_one_user_can_have_it(
    folder: Path, answer: App, *, counts: bool
) -> None:
    request = request_to([4, 5])
    with enrolled(folder, {"four": answer}) as (_, transport):
        partials = {partial.node: partial for partial in transport.collect(request)}
    assert ("four" in partials) == counts
    total = add_up(partials.values(), request.clipping, 2).total
    expected = partials["five"].total + (partials["four"].total if counts else 0)
    np.testing.assert_array_equal(total, expected)
    assert not counts or partials["four"].total.any()


@pytest.mark.parametrize("squares", [4 * BOUND, 4 * BOUND + 2**30])
def test_a_sum_of_two_users_is_at_most_twice_as_long(folder: Path, squares: int) -> None:
    request = request_to([0, 1, 4])
    with enrolled(folder, {"silo": summing(of_squares(squares), 2, 2)}) as (_, transport):
        partials = {partial.node: partial for partial in transport.collect(request)}
    total = add_up(partials.values(), request.clipping, 3).total
    counts = squares == 4 * BOUND
    expected = partials["four"].total + (partials["silo"].total if counts else 0)
    np.testing.assert_array_equal(total, expected)


def test_a_node_declines_an_offer_that_does_not_bound_the_work_of_a_user(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    request = request_to([0, 1])
    endless = replace(request, local=replace(request.local, max_examples=None))
    with enrolled(folder) as (_, transport), caplog.at_level("INFO"):
        assert list(transport.collect(endless)) == []
    assert "silo: declined: local.max_examples is absent" in caplog.text


def test_what_comes_after_the_deadline_counts_for_nothing(folder: Path) -> None:
    release, quick = threading.Event(), summing(lambda total: total)

    def hangs(message: Message, context: Context) -> Message:
        release.wait()
        return quick(message, context)

    began = time.monotonic()
    try:
        with enrolled(folder, {"silo": hangs, "four": quick}, seconds=3.0) as (_, transport):
            rounds = transport.collect(request_to([0, 4]))
            assert [partial.node for partial in rounds] == ["four"]
            assert time.monotonic() - began >= 3.0
            # Next attempt: the answer to the older one, which comes meanwhile, is not waited for.
            release.set()
            answered = {p.node for p in transport.collect(request_to([0, 4], attempt=1))}
            assert answered == {"silo", "four"}
    finally:
        release.set()


def test_a_round_that_is_stopped_is_abandoned(folder: Path) -> None:
    release, stopping = threading.Event(), threading.Event()

    def hangs(message: Message, context: Context) -> Message:
        stopping.set()
        release.wait()
        return app(message, context)

    try:
        with enrolled(folder, {"silo": hangs}, stopping=stopping) as (_, transport):
            with pytest.raises(StoppedError, match="nothing of the round is released"):
                total_of(transport, request_to([0]))
            with pytest.raises(StoppedError, match="no node was asked"):
                total_of(transport, request_to([0]))
            release.set()
    finally:
        release.set()


def test_a_node_that_is_absent_counts_as_zero_until_it_is_there(folder: Path) -> None:
    with enrolled(folder) as (grid, transport):
        silo = grid.nodes.pop(FIRST_ID)
        assert not total_of(transport, request_to([0, 1])).any()
        grid.nodes[7] = silo
        assert total_of(transport, request_to([0, 1])).any()


def test_the_newest_of_one_name_counts_and_strangers_do_not(folder: Path) -> None:
    with enrolled(folder) as (grid, _):
        hello = grid.nodes[FIRST_ID]
        stolen = {"node": "silo", "users": str(folder / "four")}
        unknown = {"node": "nobody", "users": str(folder / "four")}
        broken = {"node": "silo", "users": str(folder / "none")}
        grid.nodes |= {5: hello, 6: (app, stolen), 7: (app, unknown), 8: (app, broken)}
        grid.nodes |= {9: (raising, {}), 10: (app, {"partition-id": 0, "num-partitions": 1})}
        present = EnrolledNodes(grid, ENROLMENT, 4, threading.Event())()
        assert present.keys() == set(HOSTED)
        assert present["silo"] in {5, FIRST_ID}
        asked = len(grid.sent)
        assert EnrolledNodes(grid, ENROLMENT, 4, threading.Event())().keys() == set(HOSTED)
        assert len(grid.sent) == 2 * asked


def test_nodes_are_asked_once_who_they_are(folder: Path) -> None:
    with enrolled(folder) as (grid, _):
        nodes = EnrolledNodes(grid, ENROLMENT, 4, threading.Event())
        first = nodes()
        asked = len(grid.sent)
        grid.nodes[5] = grid.nodes.pop(FIRST_ID)
        second = nodes()
        assert len(grid.sent) == asked + 1
        assert second == {**first, "silo": 5}


def test_nodes_that_do_not_say_who_they_are_are_counted_in_the_log(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    def hangs(message: Message, context: Context) -> Message:
        release.wait()
        return app(message, context)

    with enrolled(folder) as (grid, _):
        known = EnrolledNodes(grid, ENROLMENT, 4, threading.Event())
        before = known()
        assert "who they are" not in caplog.text
        monkeypatch.setattr("fedpriv.server.flower_runs._INTRODUCTION_SECONDS", 0.5)
        grid.nodes |= {5: (hangs, {}), 6: (hangs, {})}
        try:
            assert known() == before
        finally:
            release.set()
    sentence = "2 of the nodes cannot take part now: they have not said who they are within 0.5 s"
    assert sentence in caplog.text


def failing(kind: str) -> object:
    """A loader that says what it must not, in an error of this kind."""
    kinds = {"ValueError": ValueError, "OSError": OSError, "DataError": DataError}
    raise kinds[kind](SECRET)


def value_error() -> object:
    return failing("ValueError")


def os_error() -> object:
    return failing("OSError")


def data_error() -> object:
    return failing("DataError")


def trouble_of(settings: Mapping[str, object], headers: Mapping[str, bytes]) -> str:
    """What a node says to whoever asks who it is, where it cannot say so."""
    grid = LocalGrid({FIRST_ID: (app, settings)})
    try:
        question = Message(flower_messages.content_of(headers), FIRST_ID, MessageType.QUERY)
        (reply,) = grid.send_and_receive([question], timeout=SECONDS)
    finally:
        grid.close()
    return reply.content["fedpriv"][flower_messages.TROUBLE].decode()


@pytest.mark.parametrize("loader", ["value_error", "os_error", "data_error"])
def test_what_a_loader_at_a_node_says_stays_there(
    loader: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "node_loaders", sys.modules[__name__])
    said = trouble_of({"node": "a", "users": f"node_loaders:{loader}"}, {})
    assert said == "the node's users cannot be loaded; its log says where"
    assert "the users cannot be loaded: DataError at " in caplog.text
    assert SECRET not in caplog.text


def test_no_user_of_a_node_is_named_to_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, width in [("adam", 1), ("eve", 2)]:
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((1, width)))
    assert "cannot be loaded" in (said := trouble_of({"users": str(tmp_path)}, {}))
    assert "eve" not in said + caplog.text


@pytest.mark.parametrize(("kind", "words"), [("ValueError", "ValueError at"), ("OSError", "OSErr")])
def test_what_a_loader_of_a_simulation_says_stays_at_the_worker(
    kind: str, words: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "node_loaders", sys.modules[__name__])
    loads = flower_messages.Simulated("node_loaders:failing", {"kind": kind}, "cpu", 32).encode()
    said = trouble_of({"partition-id": 0, "num-partitions": 1}, {flower_messages.SIMULATED: loads})
    assert words in said
    assert SECRET not in said + caplog.text


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"device": "none"}, "device is 'none'"),
        ({"chunk-mebibytes": 0}, "chunk-mebibytes is 0; it must be a whole number of at least 1"),
        ({"processes": 0}, "processes is 0; it must be a whole number of at least 1"),
        ({"processes": "two"}, "processes is 'two'"),
        ({"processes": True}, "processes is True"),
    ],
)
def test_settings_that_are_not_legal_are_told(setting: dict[str, object], words: str) -> None:
    assert words in trouble_of({"users": "no_such_folder", **setting}, {})


WORKERS = {FIRST_ID + k: (app, {"partition-id": k, "num-partitions": 2}) for k in range(2)}


@pytest.mark.parametrize(
    ("nodes", "loads", "sentence"),
    [
        ({**WORKERS, FIRST_ID: (raising, {})}, crowd(), "error 2 of Flower"),
        (WORKERS, crowd().replace(b"crowd:", b"missing:"), "cannot be imported"),
        (WORKERS, flower_messages.Simulated("digits", {}, "cpu", 32).encode(), "other users"),
        (WORKERS, crowd(pixel=0.5), "other data"),
        (WORKERS, crowd(moved=1), "other data"),
        ({**WORKERS, 5: (app, {})}, crowd(), "3 workers .* configured for 2"),
        ({**WORKERS, FIRST_ID: WORKERS[FIRST_ID + 1]}, crowd(), "1 of 2 workers answer"),
        ({**WORKERS, FIRST_ID: (app, {"partition-id": 2})}, crowd(), "partition-id is 2"),
        (WORKERS, b"{}", "a population is not legal"),
    ],
    ids=[
        "no code",
        "no module",
        "other users",
        "other pixel",
        "other cut",
        "too many",
        "one twice",
        "no share",
        "nothing",
    ],
)
def test_a_simulation_begins_with_all_of_its_workers(
    nodes: dict[int, tuple[App, Mapping[str, object]]], loads: bytes, sentence: str
) -> None:
    grid = LocalGrid(nodes)
    try:
        with pytest.raises(WorkerError, match=sentence):
            introduced(grid, 2, {flower_messages.SIMULATED: loads})
    finally:
        grid.close()


def test_a_worker_that_does_not_answer_ends_the_simulation(grids: list[LocalGrid]) -> None:
    grid, transport = simulated(grids, workers=2)
    grid.nodes[FIRST_ID + 1] = (raising, {})
    assert total_of(transport, request_to([0])).any()
    with pytest.raises(WorkerError, match="1 of 2 workers answered in round 3"):
        total_of(transport, request_to([0, 6]))


def test_the_sum_of_nobody_is_from_workers_without_drawn_users(grids: list[LocalGrid]) -> None:
    _, transport = simulated(grids, workers=2)
    assert list(transport.collect(request_to([]))) == []


@pytest.mark.parametrize(("users", "workers"), [(7, 3), (7, 7), (5, 1), (1000, 7)])
def test_shards_are_even_and_hold_everybody_once(users: int, workers: int) -> None:
    shares = [flower_messages.shard_of(users, k, workers) for k in range(workers)]
    assert [user for share in shares for user in share] == list(range(users))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    hosting: Hosting = hosting_of_workers(users, workers)
    for k, share in enumerate(shares):
        np.testing.assert_array_equal(np.flatnonzero(hosting.numbers == k), share)


IDS = [f"u{user}" for user in range(4)]


def people(
    x: object = 0.0, moved: int = 0, ids: Sequence[str] = IDS, dtype: type = np.float32
) -> UserStore:
    """Four users of three rows; the first row of the third user is x."""
    rows = np.zeros((12, 2), dtype)
    rows[6] = x
    return UserStore({"x": rows, "y": np.arange(12)}, np.array([0, 3, 6 + moved, 9, 12]), ids)


def test_what_a_worker_says_of_its_share_changes_with_all_that_it_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    monkeypatch.setattr(flower_messages, "_BYTES_AT_ONCE", 0)
    in_small_parts = [people(), people(x=1.0)]
    assert (
        len({flower_messages.digest_of_shard("people", users, share) for users in in_small_parts})
        == 2
    )


def test_an_option_without_a_place_in_json_is_refused() -> None:
    with pytest.raises(WireError, match="options of a population"):
        flower_messages.Simulated("digits", {"users": float("nan")}, "cpu", 32).encode()
