"""Nodes that hang, dawdle or send garbage: they hold up nobody for long, and hold no memory."""

import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from fedpriv import wire
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.round import PartialSum
from fedpriv.server import service as service_module
from fedpriv.server.collection import Collection
from fedpriv.server.service import TransferLimits
from fedpriv.training.request import LocalTraining, RoundRequest
from fedpriv.wire import Decline
from fedpriv.wire import federation_pb2 as pb
from tests.server.hostile_nodes import (
    CALLS,
    PREFACE,
    SERVICE,
    called,
    encrypted,
    frame,
    settings,
    uploaded,
)
from tests.server.loopback import (
    PATIENCE,
    Site,
    TestNode,
    clipped,
    nodes,
    sends,
    site,
    summed,
    until,
)

PARAMETERS = {"w": np.zeros((1000, 700), np.float32)}  # three chunks
LAYOUT = Layout.of(PARAMETERS)
MANY = [f"n{number:02}" for number in range(20)]
# Positions are ranks: of "five" 0, of "four" 1, of the silo 22 and 23.
USERS = {"five": ["0"], "four": ["4"], "silo": ["s0", "s1"]} | {name: [name] for name in MANY}
SHORT = TransferLimits(uploads=1, seconds=1.0)
LONG = PATIENCE.model_copy(update={"absent_seconds": 60.0, "deadline_seconds": 60.0})


def request_to(users: list[int]) -> RoundRequest:
    clipping, drawn = Clipping(LAYOUT, flat(LAYOUT, 1.0)), np.array(users, np.int64)
    return RoundRequest(
        "run", 0, 0, PARAMETERS, clipping, LocalTraining(0.5, steps=1), drawn, bytes(32)
    )


def update_of(user: int) -> dict[str, np.ndarray]:
    return {"w": np.full((1000, 700), 1e-4 * (user + 1), np.float32)}


def honest(offer: wire.RoundOffer, request: RoundRequest) -> Iterator[pb.UploadPart]:
    (user,) = request.users.tolist()
    return clipped(offer, update_of(user))


def silent(offer: wire.RoundOffer, request: RoundRequest) -> None:
    return None


def of_users(users: list[int]) -> np.ndarray:
    clipping = request_to([]).clipping
    return sum(
        (clipping.contribution(update_of(u)) for u in users), np.zeros(LAYOUT.dimension, np.int64)
    )


@contextmanager
def collecting(
    made: Site, users: list[int], deadline: float = 60.0
) -> Iterator[tuple[Future[np.ndarray], Collection]]:
    """A round that is collected; its sum, and what the server knows of it unless it is over."""

    def total() -> np.ndarray:
        transport = made.transport(LONG.model_copy(update={"deadline_seconds": deadline}))
        partials = transport.collect(request_to(users))
        return sum((partial.total for partial in partials), np.zeros(LAYOUT.dimension, np.int64))

    service = made.server.service
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(total)
        until(lambda: service.collection is not None or future.done())
        yield future, service.collection


@pytest.fixture
def short(tmp_path: Path) -> Iterator[Site]:
    """A server with one place for uploads, for a second each."""
    with site(tmp_path, USERS, SHORT) as made:
        yield made


@pytest.fixture
def patient(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path, USERS, TransferLimits(uploads=2, seconds=60.0)) as made:
        yield made


class Stalling:
    """Parts of an upload, some of which are held back until the test lets go."""

    def __init__(self, parts: list[pb.UploadPart], sent: int) -> None:
        self._parts, self._sent, self.let_go = parts, sent, threading.Event()

    def __iter__(self) -> Iterator[pb.UploadPart]:
        yield from self._parts[: self._sent]
        self.let_go.wait(60.0)
        yield from self._parts[self._sent :]


@contextmanager
def stalling(
    node: TestNode, parts: list[pb.UploadPart], sent: int
) -> Iterator["grpc.Future[pb.Receipt]"]:
    """An upload that has sent so many parts and then hangs."""
    stall = Stalling(parts, sent)
    try:
        yield node.stub.Upload.future(iter(stall))
    finally:
        stall.let_go.set()


def quiet(made: Site, calls: int) -> None:
    """Wait until no calls are open but those of nodes that are connected."""
    open_calls = made.server.service.authentication._open
    until(lambda: sum(made.server.call(lambda: dict(open_calls)).values()) == calls)


@pytest.mark.parametrize("sent", [0, 1, 2], ids=["no header", "a header", "a chunk"])
def test_who_hangs_in_an_upload_holds_up_others_no_longer_than_a_transfer_may_take(
    short: Site, sent: int
) -> None:
    """There is one place; with or without it, who hangs lets others pass, and ends by itself."""
    with (
        nodes(short, {"four": silent, "five": silent}) as made,
        collecting(short, [0, 1], deadline=4.0) as (total, it),
    ):
        parts = list(clipped(it.offer_to("four"), update_of(1)))
        with stalling(made["four"], parts, sent) as hangs:
            until(lambda: short.server.service.authentication._open["four"] == 2)
            receipt = wire.RECEIPT.decode(made["five"].stub.Upload(honest_parts(it, "five", 0)))
            assert receipt.accepted
            np.testing.assert_array_equal(total.result(30.0), of_users([0]))
            ended = wire.RECEIPT.decode(hangs.result(30.0))
        assert not ended.accepted
        assert "took too long" in ended.reason
        quiet(short, 2)


def honest_parts(it: Collection, node: str, user: int) -> Iterator[pb.UploadPart]:
    return clipped(it.offer_to(node), update_of(user))


def test_who_hung_may_try_again_before_the_deadline(short: Site) -> None:
    with (
        nodes(short, {"four": silent}) as made,
        collecting(short, [1]) as (total, it),
    ):
        parts = list(honest_parts(it, "four", 1))
        with stalling(made["four"], parts, 2) as hangs:
            assert not wire.RECEIPT.decode(hangs.result(30.0)).accepted
        assert wire.RECEIPT.decode(made["four"].stub.Upload(iter(parts))).accepted
        np.testing.assert_array_equal(total.result(30.0), of_users([1]))


def test_a_newer_answer_of_a_node_ends_the_older_one(patient: Site) -> None:
    with (
        nodes(patient, {"four": silent}) as made,
        collecting(patient, [1]) as (total, it),
    ):
        parts = list(honest_parts(it, "four", 1))
        with (
            stalling(made["four"], parts, 0) as first,
            stalling(made["four"], parts, 2) as second,
        ):
            assert not wire.RECEIPT.decode(first.result(30.0)).accepted
            assert wire.RECEIPT.decode(made["four"].stub.Upload(iter(parts))).accepted
            assert not wire.RECEIPT.decode(second.result(30.0)).accepted
        np.testing.assert_array_equal(total.result(30.0), of_users([1]))


def test_when_a_round_ends_all_that_belongs_to_it_ends(patient: Site) -> None:
    """Two hold places, one waits for one, one has sent no header; nobody may use their memory."""
    names = MANY[:4]
    with (
        nodes(patient, dict.fromkeys(names, silent)) as made,
        collecting(patient, [2, 3, 4, 5], deadline=3.0) as (total, it),
    ):
        parts = {name: list(honest_parts(it, name, 0)) for name in names}
        with (
            stalling(made[names[0]], parts[names[0]], 2) as a,
            stalling(made[names[1]], parts[names[1]], 1) as b,
            stalling(made[names[2]], parts[names[2]], 1) as c,
            stalling(made[names[3]], parts[names[3]], 0) as d,
        ):
            assert not np.any(total.result(30.0))
            for call in (a, b, c, d):
                assert not wire.RECEIPT.decode(call.result(30.0)).accepted
        quiet(patient, 4)


def test_a_part_that_is_garbage_counts_as_zero_at_once_and_fills_no_log(
    patient: Site, caplog: pytest.LogCaptureFixture
) -> None:
    garbage = [b"\xff\xff", b"\x0a\xff", b"\x12\x05" + b"\xff" * 5]
    with caplog.at_level(logging.INFO), nodes(patient, {"four": silent, "five": silent}) as made:
        for number, part in enumerate(garbage):
            with collecting(patient, [0, 1]) as (total, it):
                valid = [p.SerializeToString() for p in honest_parts(it, "four", 1)]
                parts = [valid[0], part] if number else [part]
                outcome = uploaded(made["four"].channel, parts)
                assert not wire.RECEIPT.decode(pb.Receipt.FromString(outcome)).accepted
                assert it.waiting == ("five",)
                receipt = made["five"].stub.Upload(honest_parts(it, "five", 0))
                assert wire.RECEIPT.decode(receipt).accepted
                np.testing.assert_array_equal(total.result(30.0), of_users([0]))
    said = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert len(said) == 1  # one a minute
    assert said[0].startswith("a node of one user: answer refused: ")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    "method",
    [
        *(SERVICE + name for name in CALLS if name not in ("Upload", "Check")),
    ],
)
@pytest.mark.parametrize("request_bytes", [b"\xff\xff", b"\x0a" * 9000, b"\x0a\x02a"])
def test_a_request_that_is_garbage_is_refused_in_one_sentence_and_fills_no_log(
    patient: Site, caplog: pytest.LogCaptureFixture, method: str, request_bytes: bytes
) -> None:
    with (
        caplog.at_level(logging.INFO),
        patient.channel("four") as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        list(channel.unary_stream(method)(request_bytes, timeout=30.0))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "\n" not in caught.value.details()
    assert not caplog.records


def test_an_answer_whose_connection_broke_may_be_sent_again(patient: Site) -> None:
    with (
        nodes(patient, {"four": silent}) as made,
        collecting(patient, [1]) as (total, it),
    ):
        header, chunk, *_ = [p.SerializeToString() for p in honest_parts(it, "four", 1)]
        data = b"\0" + len(chunk).to_bytes(4, "big") + chunk
        for number in range(20):
            with encrypted(patient.server.address.port, patient.certs, "four") as connection:
                connection.sendall(PREFACE + settings())
                connection.sendall(called(SERVICE + "Upload", header, last=False))
                connection.sendall(frame(0, 0, 1, data[:9000]))
                if number % 2:
                    until(lambda: patient.server.service.authentication._open["four"] == 2)
            quiet(patient, 1)
            assert it.waiting == ("four",)
        assert wire.RECEIPT.decode(made["four"].stub.Upload(honest_parts(it, "four", 1))).accepted
        np.testing.assert_array_equal(total.result(30.0), of_users([1]))


def test_an_answer_that_counts_may_be_sent_again_and_counts_once(
    patient: Site, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        nodes(patient, {"four": silent, "five": silent}) as made,
        collecting(patient, [0, 1]) as (total, it),
    ):
        answers = {n: [*honest_parts(it, n, user)] for n, user in (("four", 1), ("five", 0))}
        for node in ("four", "four", "five"):
            receipt = made[node].stub.Upload(iter(answers[node]))
            assert wire.RECEIPT.decode(receipt).accepted
        np.testing.assert_array_equal(total.result(30.0), of_users([0, 1]))
    assert "refused" not in caplog.text


def zero_window(method: str, message: bytes) -> bytes:
    """A call whose caller reads not one byte of what it asks for."""
    return PREFACE + settings(window=0) + called(SERVICE + method, message)


def test_who_downloads_and_never_reads_holds_up_others_no_longer_than_a_transfer_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(service_module, "_DOWNLOADS", 1)
    with (
        site(tmp_path, USERS, SHORT) as short,
        nodes(short, {"four": silent, "five": honest}) as made,
    ):
        made["five"].answering = silent
        with collecting(short, [0, 1], deadline=15.0) as (total, it):
            call = zero_window("Download", wire.ROUND_ID.encode(it.offer.id).SerializeToString())
            port, certs = short.server.address.port, short.certs
            with encrypted(port, certs, "four") as connection:
                connection.sendall(call)
                until(lambda: short.server.service.authentication._open["four"] == 2)
                offer = it.offer_to("five")
                model = made["five"].download(offer)
                np.testing.assert_array_equal(model["w"], PARAMETERS["w"])
                made["five"].stub.Upload(clipped(offer, update_of(0)))
            # The turn is over; the call is, as soon as the node's connection is.
            quiet(short, 2)
            made["four"].stub.Upload(sends(it.offer_to("four"), Decline("no"), {}))
            np.testing.assert_array_equal(total.result(30.0), of_users([0]))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_who_connects_and_never_reads_is_replaced_by_its_next_connection(
    short: Site, caplog: pytest.LogCaptureFixture
) -> None:
    said = wire.HELLO.encode(wire.Hello("four", wire.digest_of(["4"])))
    hello = pb.FromNode(hello=said).SerializeToString()
    with encrypted(short.server.address.port, short.certs, "four") as connection:
        connection.sendall(zero_window("Connect", hello))
        until(lambda: len(short.server.service.connections) == 1)
        with nodes(short, {"four": honest}), collecting(short, [1]) as (total, _):
            np.testing.assert_array_equal(total.result(30.0), of_users([1]))
    quiet(short, 0)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_no_more_sums_are_in_memory_than_there_are_places(
    patient: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, open_now, most, alive = threading.Lock(), [0], [0], [0]

    class Counted(wire.Assembler):
        """Open from its first chunk to its last; a thread that is done may hold it a bit longer."""

        def __init__(self, size: int, limit: int) -> None:
            super().__init__(size, limit)
            with lock:
                alive[0] += 1
                open_now[0] += 1
                most[0] = max(most[0], open_now[0])

        def finish(self) -> np.ndarray:
            with lock:
                open_now[0] -= 1
            return super().finish()

        def __del__(self) -> None:
            with lock:
                alive[0] -= 1

    monkeypatch.setattr(wire, "Assembler", Counted)
    users = list(range(2, 22))
    with (
        nodes(patient, dict.fromkeys(MANY, honest)) as made,
        collecting(patient, users) as (total, _),
    ):
        np.testing.assert_array_equal(total.result(60.0), of_users(users))
        until(lambda: all(node.receipts for node in made.values()))
        assert all(node.receipts[0].accepted for node in made.values())
    assert most[0] == 2
    until(lambda: alive[0] == 0)


def test_what_nodes_say_names_no_user_and_forges_no_line(
    patient: Site, caplog: pytest.LogCaptureFixture
) -> None:
    reason = "too dear\nFORGED: a line\r\x1b[2J\u2028\x85\0"

    def declines(offer: wire.RoundOffer, request: RoundRequest) -> Iterator[pb.UploadPart]:
        return sends(offer, Decline(reason), {})

    def too_many(offer: wire.RoundOffer, request: RoundRequest) -> Iterator[pb.UploadPart]:
        return summed(offer, PartialSum("", 3, np.zeros(LAYOUT.dimension, np.int64), 3))

    with (
        nodes(patient, {"four": declines, "silo": too_many}) as made,
        caplog.at_level(logging.INFO, "fedpriv.server"),
        collecting(patient, [1, 22, 23], deadline=2.0) as (total, _),
    ):
        assert not np.any(total.result(30.0))
        assert made["four"].receipts == [wire.Receipt(accepted=True)]
    said = sorted(record.getMessage() for record in caplog.records)
    assert said == [
        r"a node of one user: declined: too dear\nFORGED: a line\r\x1b[2J\u2028\x85\x00",
        "no drawn user contributed to round 0; it is charged",
        "silo: answer refused: the sum holds more users than were drawn at the node",
        "silo: late: no answer by the end of the round",
    ]
