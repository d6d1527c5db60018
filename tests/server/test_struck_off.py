"""A certificate that is replaced or struck off while its calls are open counts for nothing."""

import queue
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from fedpriv import wire
from fedpriv.server import service
from fedpriv.server.collection import Ballot
from fedpriv.training.request import RoundRequest
from fedpriv.wire import federation_pb2 as pb
from simulations.loopback import issue
from tests.server.hostile_nodes import PATIENCE, SERVICE
from tests.server.loopback import (
    PRICE,
    Site,
    channel_to,
    clipped,
    nodes,
    site,
    strike,
    until,
    write_enrolment,
)
from tests.server.test_answers import collecting, honest, of_users, request_to, silent, update_of

USERS = {"five": ["0"], "four": ["4"], "two": ["5", "6"]}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(service, "_RECHECK_SECONDS", 0.2)
    with site(tmp_path, USERS) as found:
        yield found


def enrolled(made: Site) -> dict[str, dict[str, object]]:
    text = (made.certs / "enrolment.toml").read_text(encoding="utf-8")
    return dict(tomllib.loads(text)["nodes"])


@contextmanager
def stolen(made: Site, node: str) -> Iterator[grpc.Channel]:
    """A channel with a copy of the certificate that a node has now."""
    copy = made.certs / "stolen"
    copy.mkdir()
    for file in (made.certs / "nodes" / node).iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    with channel_to(made.server.address.port, made.certs, copy) as channel:
        yield channel


def replace_certificate(made: Site, node: str) -> None:
    table, issued = enrolled(made), issue(made.certs, node)
    table[node]["certificate"] = issued.fingerprint
    write_enrolment(made.certs, table)


def open_calls(made: Site, node: str) -> int:
    return made.server.service.authentication._open[node]


def test_who_says_hello_after_its_certificate_was_replaced_ends_nobodys_connection(
    made: Site,
) -> None:
    said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with stolen(made, "four") as channel:
        stream = channel.stream_stream(SERVICE + "Connect")(iter(said.get, None), timeout=PATIENCE)
        until(lambda: open_calls(made, "four") == 1)
        replace_certificate(made, "four")
        with nodes(made, {"four": silent}) as there:
            said.put(pb.FromNode(hello=there["four"].hello()).SerializeToString())
            with pytest.raises(grpc.RpcError) as caught:
                next(stream)
            said.put(None)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert made.server.service.connections.of("four") is not None
            assert there["four"].ended == []


def declines(offer: wire.RoundOffer) -> bytes:
    answer = wire.RoundAnswer(offer.id, wire.Decline("by the old certificate"))
    return pb.UploadPart(answer=wire.encode_answer(answer)).SerializeToString()


@pytest.mark.parametrize("part", [declines, lambda _: b"\xff\xff", None])
def test_what_is_answered_after_its_certificate_was_replaced_settles_nobody(
    made: Site, part: Callable[[wire.RoundOffer], bytes] | None
) -> None:
    said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    go, offers = threading.Event(), []

    def later(offer: wire.RoundOffer, request: RoundRequest) -> Iterator[pb.UploadPart]:
        offers.append(offer)
        assert go.wait(PATIENCE)
        return honest(offer, request)

    with stolen(made, "four") as channel, collecting(made, [1]) as (total, _):
        call = channel.stream_unary(SERVICE + "Upload")
        upload = call.future(iter(said.get, None), timeout=PATIENCE)
        until(lambda: open_calls(made, "four") == 1)
        replace_certificate(made, "four")
        with nodes(made, {"four": later}) as there:
            until(lambda: offers)
            whole = [p.SerializeToString() for p in clipped(offers[0], update_of(9))]
            for each in whole if part is None else [part(offers[0])]:
                said.put(each)
            said.put(None)
            assert upload.code() is grpc.StatusCode.UNAUTHENTICATED
            go.set()
            np.testing.assert_array_equal(total.result(30.0), of_users([1]))
            until(lambda: there["four"].receipts == [wire.Receipt(accepted=True)])


@pytest.mark.parametrize("method", ["FetchModel", "FetchLedger"])
def test_a_transfer_to_a_node_struck_off_ends(made: Site, method: str) -> None:
    big = bytes(64 * wire.CHUNK_BYTES)
    made.server.service.model = lambda: big
    made.server.service.ledger = lambda _: (len(big), iter([big.decode()]))
    with made.channel("four") as channel:
        call = channel.unary_stream(SERVICE + method)(b"", timeout=PATIENCE)
        next(call)
        strike(made.certs, "four")
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_certificate_that_is_enrolled_at_another_node_speaks_no_more_for_the_first(
    made: Site,
) -> None:
    with nodes(made, {"four": silent}) as there:
        table = enrolled(made)
        first, second = table["four"], table["five"]
        first["certificate"], second["certificate"] = second["certificate"], first["certificate"]
        write_enrolment(made.certs, table)
        until(lambda: there["four"].ended == [grpc.StatusCode.UNAUTHENTICATED])


def test_a_vote_of_a_node_struck_off_does_not_count(made: Site) -> None:
    running = made.server.service

    def objections() -> Iterator[str]:
        strike(made.certs, "four")
        yield ""

    with nodes(made, {"four": silent}) as there:
        there["four"].objections = objections()
        ballot = Ballot(wire.Proposal.of(request_to([]), PRICE))
        made.server.call(lambda: running.propose(ballot))
        until(lambda: there["four"].ended == [grpc.StatusCode.UNAUTHENTICATED])
    assert running.ballot.agrees("four") is None
