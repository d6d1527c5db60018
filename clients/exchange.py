"""What a node asks of the server, one call each; whatever the server sends is checked here.

Guarantees of every function:

* it returns a value that was checked, or raises `WireError` for a peer that talks nonsense, or
  `grpc.aio.AioRpcError` for a call that failed, e.g. because the connection was lost;
* it holds no more than what was declared and found to be within limits;
* a task that is cancelled ends its call.
"""

import io
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import TypeVar

import grpc
import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from fedpriv.errors import WireError
from fedpriv.federated.transport import PartialSum
from fedpriv.privacy.layout import Tensors
from fedpriv.wire import (
    NODE_RECEIVES_BYTES,
    Answer,
    Assembler,
    Decline,
    Hello,
    Receipt,
    Receiver,
    RoundId,
    RoundOffer,
    Status,
    SummedUpdates,
    Welcome,
    chunks,
    decode_offer,
    decode_receipt,
    decode_status,
    decode_welcome,
    encode_answer,
    encode_hello,
    encode_round_id,
    parse,
    pieces,
    tensors_of,
)
from fedpriv.wire import federation_pb2 as pb

LARGEST_LEDGER = 2**28
"""Bytes of an exported ledger that a node fetches: about half a million rounds."""
_SERVICE = "/fedpriv.v1.Federation/"

Kind = TypeVar("Kind", bound=Message)


async def connect(
    channel: grpc.aio.Channel, hello: Hello
) -> AsyncGenerator[Welcome | RoundOffer, None]:
    """Stay connected: yields one welcome, then offers; ends when the run is over.

    What a newer server may say beside these is passed over.

    Raises:
        WireError: a message is malformed or out of its turn.
        grpc.aio.AioRpcError: the server refuses, or the connection was lost.
    """
    welcomed = False
    async with aclosing(_responses(channel, "Connect", encode_hello(hello), pb.FromServer)) as said:
        async for message in said:
            what = message.WhichOneof("what")
            if what is not None and welcomed != (what == "offer"):
                raise WireError("the server must say one welcome first, and then make offers")
            match what:
                case "welcome":
                    welcomed = True
                    yield decode_welcome(message.welcome)
                case "offer":
                    yield decode_offer(message.offer)
    if not welcomed:
        raise WireError("the server ends the connection without a welcome")


async def download(
    channel: grpc.aio.Channel, offer: RoundOffer
) -> dict[str, npt.NDArray[np.float32]]:
    """The tensors of an offered round: read-only, of the declared shapes and sizes.

    Raises:
        WireError: what was sent is not the declared model.
        grpc.aio.AioRpcError: the call failed.
    """
    receiver = Receiver(offer.model)
    request = encode_round_id(offer.id)
    async with aclosing(_responses(channel, "Download", request, pb.Chunk)) as sent:
        async for chunk in sent:
            receiver.add(chunk)
    # An offer's model is float32, so nothing is copied.
    return {name: t.astype(np.float32, copy=False) for name, t in receiver.finish().items()}


async def upload(
    channel: grpc.aio.Channel, round_id: RoundId, answer: PartialSum | Decline
) -> Receipt:
    """Answer an offer; the answer is cut into chunks as they are sent.

    The server takes one answer to an offer, so that a repeated one is refused, and harmless.

    Raises:
        WireError: the receipt is none, or the answer passes a limit.
        grpc.aio.AioRpcError: the call failed; the server may have taken the answer.
    """
    header, tensors = header_of(round_id, answer)
    path = _SERVICE + "Upload"
    call = channel.stream_unary(path, request_serializer=pb.UploadPart.SerializeToString)
    return decode_receipt(_parsed(pb.Receipt, await call(_parts(header, tensors))))


def header_of(round_id: RoundId, answer: PartialSum | Decline) -> tuple[pb.Answer, Tensors]:
    """The message of an answer, and the tensors that it declares, which are read for their digest.

    Raises:
        WireError: it passes a limit.
    """
    tensors: Tensors = {}
    content: SummedUpdates | Decline
    match answer:
        case PartialSum():
            tensors = tensors_of(answer)
            content = SummedUpdates.of(answer)
        case Decline():
            content = answer
    return encode_answer(Answer(round_id, content)), tensors


def _parts(header: pb.Answer, tensors: Tensors) -> Iterator[pb.UploadPart]:
    yield pb.UploadPart(answer=header)
    for chunk in chunks(pieces(tensors)):
        yield pb.UploadPart(chunk=chunk)


async def fetch_ledger(channel: grpc.aio.Channel) -> Iterator[str]:
    """The lines of the public ledger, as they were sent; nothing in them is believed yet.

    Bytes that are not ASCII, of which an export has none, become surrogates.

    Raises:
        WireError: it passes `LARGEST_LEDGER`, or is not what was declared.
        grpc.aio.AioRpcError: the call failed.
    """
    request = pb.LedgerRequest()
    async with aclosing(_responses(channel, "FetchLedger", request, pb.LedgerPart)) as parts:
        first = await anext(parts, pb.LedgerPart())
        if first.WhichOneof("part") != "size":
            raise WireError("the server does not say how long its ledger is")
        assembler = Assembler(first.size, LARGEST_LEDGER)
        async for part in parts:
            assembler.add(part.chunk)  # one that is not there has no bytes, and is refused
    text = io.BytesIO(assembler.finish().data)
    return io.TextIOWrapper(text, encoding="ascii", errors="surrogateescape", newline="\n")


async def status(channel: grpc.aio.Channel) -> Status:
    """Where the federation stands.

    Raises:
        WireError: the status is none.
        grpc.aio.AioRpcError: the call failed.
    """
    call = channel.unary_unary(
        _SERVICE + "GetStatus", request_serializer=pb.StatusRequest.SerializeToString
    )
    return decode_status(_parsed(pb.Status, await call(pb.StatusRequest())))


async def _responses(
    channel: grpc.aio.Channel, method: str, request: Message, kind: type[Kind]
) -> AsyncGenerator[Kind, None]:
    """What the server sends, each message parsed; the call ends when this is closed."""
    call = channel.unary_stream(
        _SERVICE + method, request_serializer=type(request).SerializeToString
    )(request)
    try:
        async for data in call:
            yield _parsed(kind, data)
    finally:
        call.cancel()


def _parsed(kind: type[Kind], data: bytes) -> Kind:
    return parse(kind, data, NODE_RECEIVES_BYTES)
