"""A call that was refused is over: it takes none of the few streams of its connection."""

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import grpc
import pytest

from fedpriv import wire
from fedpriv.server import service
from fedpriv.training.request import RoundRequest
from fedpriv.wire import federation_pb2 as pb
from tests.server.hostile_nodes import CALLS, SERVICE, Outcome, first, one, uploaded
from tests.server.loopback import clipped, nodes, sends, site
from tests.server.test_answers import collecting, update_of

USERS = {"five": ["0"], "four": ["4"]}
STREAMS = dict(service.OPTIONS)["grpc.max_concurrent_streams"]
REFUSED = {
    "Connect": (SERVICE + "Connect", b"", grpc.StatusCode.INVALID_ARGUMENT),
    "Download": (SERVICE + "Download", b"", grpc.StatusCode.INVALID_ARGUMENT),
    "Download of no round": (
        SERVICE + "Download",
        wire.ROUND_ID.encode(wire.RoundId("run", 0, 0, 0)).SerializeToString(),
        grpc.StatusCode.FAILED_PRECONDITION,
    ),
    "FetchLedger": (SERVICE + "FetchLedger", b"\xff", grpc.StatusCode.INVALID_ARGUMENT),
    "FetchModel": (SERVICE + "FetchModel", b"\xff", grpc.StatusCode.INVALID_ARGUMENT),
}
"""A method, a message that it refuses, and how."""


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    """Python's collector, which a quiet server seldom needs, does not tidy up here."""
    gc.disable()
    yield
    gc.enable()


def repeated(call: Callable[[], Outcome]) -> set[Outcome]:
    return {call() for _ in range(3 * STREAMS)}


@pytest.mark.parametrize("refused", REFUSED)
def test_what_a_method_refuses(tmp_path: Path, refused: str) -> None:
    method, message, status = REFUSED[refused]
    with site(tmp_path, USERS) as made, made.channel("four") as channel:
        assert repeated(lambda: first(channel, method, message)) == {status}
        assert isinstance(one(channel, SERVICE + "GetStatus"), bytes)


@pytest.mark.parametrize("name", CALLS)
def test_what_the_guard_refuses(tmp_path: Path, name: str) -> None:
    with (
        site(tmp_path, USERS, calls_per_minute=1) as made,
        made.channel("four") as channel,
    ):
        assert isinstance(one(channel, SERVICE + "GetStatus"), bytes)
        assert repeated(lambda: CALLS[name](channel)) == {grpc.StatusCode.RESOURCE_EXHAUSTED}


def declines(offer: wire.RoundOffer) -> Iterable[pb.UploadPart]:
    return sends(offer, wire.Decline("not today"), {})


def of_no_round(offer: wire.RoundOffer) -> Iterable[pb.UploadPart]:
    other = wire.RoundOffer(**{**vars(offer), "id": wire.RoundId("other", 0, 0, 0)})
    return clipped(other, update_of(4))


def too_large(offer: wire.RoundOffer) -> Iterable[pb.UploadPart]:
    yield from clipped(offer, update_of(4))
    yield pb.UploadPart(chunk=pb.Chunk(data=bytes(1000)))
    yield from clipped(offer, update_of(4))


@pytest.mark.parametrize("answering", [declines, of_no_round, too_large])
def test_answers_that_are_not_read_to_their_end(
    tmp_path: Path, answering: Callable[[wire.RoundOffer], Iterable[pb.UploadPart]]
) -> None:
    outcomes: list[Outcome] = []
    done = threading.Event()

    def repeats(offer: wire.RoundOffer, request: RoundRequest) -> None:
        parts = [part.SerializeToString() for part in answering(offer)]
        with made.channel("four") as channel:
            outcomes.extend(uploaded(channel, parts) for _ in range(3 * STREAMS))
        done.set()

    def waits(offer: wire.RoundOffer, request: RoundRequest) -> Iterable[pb.UploadPart]:
        assert done.wait(60.0)
        return clipped(offer, update_of(0))

    with (
        site(tmp_path, USERS) as made,
        nodes(made, {"four": repeats, "five": waits}),
        collecting(made, [0, 1], deadline=5.0) as (total, _),
    ):
        assert done.wait(60.0)
        total.result(60.0)
    assert len(outcomes) == 3 * STREAMS
    assert all(isinstance(outcome, bytes) for outcome in outcomes)
