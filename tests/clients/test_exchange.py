"""One call each: what is sent arrives, and what a server sends is believed only when it fits."""

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import grpc
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.clients import connection
from fedpriv.clients.connection import FederationStub, Identity
from fedpriv.errors import WireError
from fedpriv.privacy.layout import Layout
from fedpriv.privacy.round import PartialSum
from fedpriv.wire import (
    CHUNK_BYTES,
    NODE_RECEIVES_BYTES,
    Decline,
    Hello,
    Receipt,
    RoundId,
    RoundOffer,
    RunState,
    Status,
    SummedUpdates,
    Welcome,
    chunks,
    decode_answer,
    pieces,
)
from fedpriv.wire import federation_pb2 as pb
from tests.clients.tiny_server import (
    PATIENCE,
    Said,
    TinyServer,
    ledger_parts,
    make_offer,
    said,
    serving,
)

ID = RoundId("run", 0, 0)
STATUS = Status("run", 1, 5, 0.5, float("inf"), 1e-5, 3, 1, 12, RunState.COLLECTING)
HELLO = Hello("n", bytes(32))
Result = TypeVar("Result")


@asynccontextmanager
async def connected(tiny: TinyServer) -> AsyncIterator[FederationStub]:
    async with (
        serving(tiny) as port,
        FederationStub.open(f"127.0.0.1:{port}", Identity("n")) as stub,
    ):
        yield stub


def ask(tiny: TinyServer, call: Callable[[FederationStub], Awaitable[Result]]) -> Result:
    """What a call to the server returns."""

    async def main() -> Result:
        async with connected(tiny) as stub:
            return await call(stub)

    return asyncio.run(asyncio.wait_for(main(), PATIENCE))


async def heard(stub: FederationStub) -> list[Welcome | RoundOffer]:
    return [message async for message in stub.connect(HELLO, asyncio.Queue())]


def sending(**answers: list[Said] | Said) -> TinyServer:
    """A server with some of its answers replaced."""
    tiny = TinyServer()
    for name, answer in answers.items():
        setattr(tiny, name, answer)
    return tiny


def saying(*messages: Said, welcome: bool = True) -> TinyServer:
    """A server that says this on a connection."""
    tiny = TinyServer()
    tiny.welcome = tiny.welcome if welcome else None
    for message in messages:
        tiny.script.put_nowait(message)
    return tiny


def large_model(megabytes: int) -> tuple[Layout, dict[str, np.ndarray]]:
    """A model in several chunks."""
    rng = np.random.default_rng(0)
    tensors = {"w": rng.standard_normal((megabytes, 250, 1000)).astype(np.float32)}
    return Layout.of(tensors), tensors


# Connect


def test_a_connection_says_hello_and_yields_a_welcome_and_offers_until_the_run_is_over() -> None:
    offers = [make_offer(number)[0] for number in range(3)]
    tiny = saying(said(offers[0]), pb.FromServer(), said(offers[1]), said(offers[2]), None)
    welcome, *rest = ask(tiny, heard)
    assert isinstance(welcome, Welcome)
    assert welcome.population == 100
    np.testing.assert_array_equal(welcome.users, [3])
    assert [offer.id for offer in rest if isinstance(offer, RoundOffer)] == [o.id for o in offers]
    hello = tiny.hellos.get_nowait()
    assert (hello.node, hello.version, hello.users_sha256) == ("n", 1, bytes(32))


OFFER = said(make_offer()[0])
WELCOME = TinyServer().welcome


@pytest.mark.parametrize(
    ("tiny", "reason"),
    [
        (lambda: saying(OFFER, welcome=False), "one welcome first"),
        (lambda: saying(WELCOME), "one welcome first"),
        (lambda: saying(None, welcome=False), "without a welcome"),
        (lambda: saying(b"\xff\xff\xff"), "not a message FromServer"),
        (lambda: saying(pb.FromServer(offer=pb.Offer())), "not legal"),
        (lambda: saying(pb.FromServer(welcome=pb.Welcome()), welcome=False), "not legal"),
    ],
)
def test_nonsense_on_a_connection_is_refused(tiny: Callable[[], TinyServer], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        ask(tiny(), heard)


def test_a_message_beyond_the_limit_is_not_read() -> None:
    tiny = saying(bytes(NODE_RECEIVES_BYTES + 1))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        ask(tiny, heard)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_connection_that_is_cancelled_ends_at_the_server_too() -> None:
    async def main() -> None:
        tiny = TinyServer()
        async with connected(tiny) as stub:
            task = asyncio.create_task(heard(stub))
            await tiny.hellos.get()
            await asyncio.sleep(0.0)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            while tiny.connected:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


# Download


@pytest.mark.parametrize("megabytes", [1, 5])
def test_a_model_arrives_as_it_is(megabytes: int) -> None:
    layout, tensors = large_model(megabytes)
    tiny = sending(model=list(chunks(pieces(tensors))))
    model = ask(tiny, lambda stub: stub.download(ID, layout))
    assert list(model) == ["w"]
    assert model["w"].dtype == np.float32
    np.testing.assert_array_equal(model["w"], tensors["w"])
    assert not model["w"].flags.writeable


def hostile_models() -> dict[str, list[Said]]:
    _, tensors = large_model(3)
    good = list(chunks(pieces(tensors)))
    short = pb.Chunk(number=2, data=good[2].data[:-1], crc32=good[2].crc32)
    damaged = pb.Chunk(number=0, data=good[0].data, crc32=good[0].crc32 ^ 1)
    return {
        "ended after": list(good[:2]),
        "follows after all": [*good, pb.Chunk(number=3, data=b"x")],
        "came in place": [good[1], good[0]],
        "must have": [*good[:2], short],
        "CRC-32": [damaged],
        "not a message Chunk": [b"\xff\xff"],
    }


@pytest.mark.parametrize("reason", hostile_models())
def test_what_is_not_the_declared_model_is_refused(reason: str) -> None:
    layout, _ = large_model(3)
    tiny = sending(model=hostile_models()[reason])
    with pytest.raises(WireError, match=reason):
        ask(tiny, lambda stub: stub.download(ID, layout))


def test_a_model_takes_no_more_memory_than_was_declared() -> None:
    """A server that sends on and on is not listened to."""
    layout = make_offer()[0].model(Layout((), ()))
    tiny = sending(model=[chunk for _ in range(64) for chunk in make_offer()[1]])
    with pytest.raises(WireError, match="follows after all"):
        ask(tiny, lambda stub: stub.download(ID, layout))


# Upload


def uploaded(answer: PartialSum | Decline) -> tuple[pb.Answer, bytes, Receipt]:
    async def main() -> tuple[pb.Answer, bytes, Receipt]:
        tiny = TinyServer()
        async with connected(tiny) as stub:
            receipt = await stub.upload(ID, answer)
        return *tiny.answers.get_nowait(), receipt

    return asyncio.run(asyncio.wait_for(main(), PATIENCE))


@pytest.mark.parametrize(("users", "dtype"), [(1, "<i4"), (63, "<i4"), (64, "<i8")])
def test_a_sum_arrives_bit_by_bit_and_without_a_name(users: int, dtype: str) -> None:
    total = np.linspace(-(2**24), 2**24, 15).astype(np.int64) * users
    header, data, receipt = uploaded(PartialSum("not said", users, total, 2 * users))
    answer = decode_answer(header)
    assert answer.id == ID
    assert answer.content == SummedUpdates(users, 2 * users)
    assert data == total.astype(dtype).tobytes()
    assert b"not said" not in header.SerializeToString()
    assert receipt == Receipt(accepted=True)


def test_a_decline_says_why() -> None:
    header, data, _ = uploaded(Decline("too little noise"))
    assert header.decline.reason == "too little noise"
    assert data == b""


def test_a_large_sum_is_cut_into_chunks_as_it_is_sent() -> None:
    total = np.zeros(48 * 250 * 1000, np.int64)
    size, most = total.nbytes, 8 * CHUNK_BYTES

    async def main() -> tuple[int, int]:
        tiny = TinyServer()
        tiny.keeps = False
        async with connected(tiny) as stub:
            tracemalloc.start()
            try:
                await stub.upload(ID, PartialSum("", 64, total, 64))
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
        return tiny.received, peak

    received, peak = asyncio.run(asyncio.wait_for(main(), PATIENCE))
    assert received == size
    assert peak < most


def test_a_server_may_refuse_before_it_has_heard_all() -> None:
    refusal = Receipt(accepted=False, reason="the round is over")
    tiny = sending(receipts=[said(refusal)])
    tiny.listens = False
    large = PartialSum("", 1, np.zeros(20 * 250 * 1000, np.int64), 1)
    receipt = ask(tiny, lambda stub: stub.upload(ID, large))
    assert receipt == refusal


@pytest.mark.parametrize("receipt", [b"\xff\xff", pb.Receipt(reason="x" * 2000)])
def test_a_receipt_that_is_none_is_refused(receipt: Said) -> None:
    tiny = sending(receipts=[receipt])
    with pytest.raises(WireError, match=r"Receipt|receipt|reason"):
        ask(tiny, lambda stub: stub.upload(ID, Decline("no")))


def test_a_call_that_fails_says_how() -> None:
    tiny = sending(receipts=[(grpc.StatusCode.UNAVAILABLE, "later")])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        ask(tiny, lambda stub: stub.upload(ID, Decline("no")))
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, "later")


# FetchLedger


@pytest.mark.parametrize("size", [0, 5, 3 * CHUNK_BYTES + 17])
def test_a_ledger_arrives_line_by_line(size: int) -> None:
    data = (b'{"a": 1}\n' * (size // 9 + 1))[:size]
    tiny = sending(ledger=ledger_parts(data))
    lines = list(ask(tiny, FederationStub.fetch_ledger))
    assert "".join(lines).encode() == data
    assert all(line.endswith("\n") for line in lines[:-1])
    assert all(line.count("\n") <= 1 for line in lines)


def test_bytes_that_are_no_text_reach_whoever_reads_the_lines() -> None:
    data = bytes(range(256)) + b"\r\n\r" + "ä\u2028\n".encode()
    tiny = sending(ledger=ledger_parts(data))
    text = "".join(ask(tiny, FederationStub.fetch_ledger))
    assert text.encode("ascii", "surrogateescape") == data


def declared(size: int) -> pb.FilePart:
    return pb.FilePart(size=size)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([], "how long its ledger is"),
        (ledger_parts(b"x")[1:], "how long its ledger is"),
        ([declared(connection.LARGEST_LEDGER + 1)], "may be at most"),
        ([declared(2**64 - 1)], "may be at most"),
        ([declared(9)], "ended after 0 of 9"),
        ([*ledger_parts(b"xy"), ledger_parts(b"z")[1]], "follows after all"),
        ([ledger_parts(b"xy")[0], pb.FilePart()], "has 0 bytes"),
        ([b"\xff"], "not a message FilePart"),
    ],
)
def test_what_is_not_the_declared_ledger_is_refused(parts: list[Said], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        ask(sending(ledger=parts), FederationStub.fetch_ledger)


# FetchModel


def model_parts(data: bytes) -> list[Said]:
    return [pb.FilePart(size=len(data)), *(pb.FilePart(chunk=c) for c in chunks([data]))]


def test_a_released_model_arrives_as_it_is() -> None:
    data = bytes(range(256)) * 5000
    assert ask(sending(released=model_parts(data)), FederationStub.fetch_model) == data


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([], "how long its model is"),
        (model_parts(b"x")[1:], "how long its model is"),
        ([pb.FilePart(unknown=True)], "does not know its model"),
        ([pb.FilePart(size=connection.LARGEST_MODEL + 1)], "may be at most"),
        ([pb.FilePart(size=9)], "ended after 0 of 9"),
        ([*model_parts(b"xy"), model_parts(b"z")[1]], "follows after all"),
        ([b"\xff"], "not a message FilePart"),
    ],
)
def test_what_is_not_the_declared_released_model_is_refused(parts: list[Said], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        ask(sending(released=parts), FederationStub.fetch_model)


# GetStatus


def test_a_status_arrives_as_it_is() -> None:
    assert ask(sending(status=said(STATUS)), FederationStub.status) == STATUS


@pytest.mark.parametrize("status", [b"\xff", pb.Status(), pb.Status(run="r", state="odd")])
def test_a_status_that_is_none_is_refused(status: Said) -> None:
    with pytest.raises(WireError, match=r"Status|status"):
        ask(sending(status=status), FederationStub.status)


# All of them


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=60), min_size=1, max_size=4))
def test_whatever_a_server_sends_is_a_value_or_a_wire_error(data: list[bytes]) -> None:
    async def main() -> None:
        tiny = saying(*data, None, welcome=False)
        tiny.model, tiny.ledger, tiny.status = list(data), list(data), data[0]
        tiny.receipts = [data[0]]
        layout = make_offer()[0].model(Layout((), ()))
        async with connected(tiny) as stub:
            for call in (
                lambda: heard(stub),
                lambda: stub.download(ID, layout),
                stub.fetch_ledger,
                stub.status,
                lambda: stub.upload(ID, Decline("no")),
            ):
                with suppress(WireError):
                    await call()

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
