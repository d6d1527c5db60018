"""A node's connection to its server: who the node is, and each call, with retries."""

import asyncio
import io
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Self, TypeVar
from urllib.parse import quote, unquote

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import NameOID
from google.protobuf.message import Message

from fedpriv import wire
from fedpriv.errors import InvalidValueError, WireError
from fedpriv.ledger import Head
from fedpriv.privacy.layout import Tensors
from fedpriv.privacy.round import PartialSum
from fedpriv.wire import Receipt, RoundId, RoundOffer, Status, Terms, Vote, Welcome
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.naming import (
    NODE_KEY,
    NODE_URI,
    SERVICE,
    Address,
    check_key,
    check_node_name,
    read_key,
)
from fedpriv.wire.tensors import MAX_COMPONENTS

# Codes of calls that may succeed when they are tried again: RESOURCE_EXHAUSTED is a server that is
# too busy or was called too often, INTERNAL for instance a stream that was reset.
LOST = ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED", "CANCELLED", "INTERNAL", "UNKNOWN"]
LARGEST_LEDGER = 2**28  # bytes of an exported ledger: about half a million rounds
LARGEST_MODEL = 4 * MAX_COMPONENTS + 2**27  # bytes: its components, and names and shapes
# What cryptography raises for a certificate that cannot be parsed.
_MALFORMED = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
)
_LARGEST_EXPONENT = 1000  # 2.0 to a power above 1023 is out of range
_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # an idle node goes on asking
    ("grpc.max_receive_message_length", wire.NODE_RECEIVES_BYTES),
    ("grpc.max_send_message_length", wire.SERVER_RECEIVES_BYTES),
    ("grpc.max_reconnect_backoff_ms", 60_000),
    *wire.UNCOMPRESSED,
)

_log = logging.getLogger(__name__)
Result = TypeVar("Result")
Kind = TypeVar("Kind", bound=Message)


@dataclass(frozen=True)
class Backoff:
    """Exponential back-off with full jitter.

    The n-th wait is uniform on [0, min(cap, base · 2^n)] (M. Brooker, "Exponential Backoff And
    Jitter", AWS Architecture Blog, 2015).
    """

    base: float = 0.5  # seconds
    cap: float = 60.0  # seconds
    draw: Callable[[float, float], float] = random.uniform

    def __post_init__(self) -> None:
        if not 0.0 < self.base <= self.cap < float("inf"):
            legal = "both must be positive and finite, and base not above cap"
            raise InvalidValueError(f"base is {self.base} and cap is {self.cap}; {legal}")

    def wait(self, failures: int = _LARGEST_EXPONENT) -> float:
        """Seconds to wait after so many failures in a row, from 0; else uniform on [0, cap]."""
        return self.draw(0.0, min(self.cap, self.base * 2.0 ** min(failures, _LARGEST_EXPONENT)))


async def persist(call: Callable[[], Awaitable[Result]], backoff: Backoff) -> Result:
    """Repeat a call while it fails as `LOST` says; a time limit is the caller's to set."""
    failures = 0
    while True:
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            if error.code().name not in LOST:
                raise
            _log.info("a call failed (%s); it will be tried again", error.code().name)
        await asyncio.sleep(backoff.wait(failures))
        failures += 1


@dataclass(frozen=True)
class Identity:
    """Who a node is: by its certificate, or by its own word, for plain text on one machine."""

    node: str
    credentials: grpc.ChannelCredentials | None = field(default=None, repr=False)
    certificate_end: datetime | None = None


def identity_of(certificates: Path | None, node: str | None) -> Identity:
    """Who this node is, by its folder with ca.pem, node.pem and node.key, or by a name alone."""
    if (certificates is None) == (node is None):
        given = f"certificates is {certificates} and node is {node!r}"
        raise InvalidValueError(f"{given}; exactly one must be given")
    if certificates is None:
        return Identity(check_node_name(str(node)))
    try:
        ca, certificate = ((certificates / name).read_bytes() for name in ("ca.pem", "node.pem"))
        key = read_key(certificates / "node.key")
    except OSError as error:
        raise InvalidValueError(f"{error.filename} cannot be read: {error.strerror}") from error
    name, end = _name_and_end(certificates / "node.pem", certificate)
    check_key(certificates / "node.key", key, x509.load_pem_x509_certificate(certificate))
    return Identity(name, grpc.ssl_channel_credentials(ca, key, certificate), end)


def enrolled_as(certificates: Path) -> tuple[str, str]:
    """Name of the node whose folder of certificates it is, and the fingerprint to enrol."""
    path = certificates / "node.pem"
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise InvalidValueError(f"{path} cannot be read: {error.strerror}") from error
    (name, _), certificate = _name_and_end(path, pem), x509.load_pem_x509_certificate(pem)
    return name, certificate.fingerprint(SHA256()).hex()


def _name_and_end(path: Path, pem: bytes) -> tuple[str, datetime]:
    """The name that the server will read, the one URI of ours or the common name; and the end."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        certificate.public_key()  # raises where it is malformed, or of a kind that is not known
        uris = [
            uri
            for extension in certificate.extensions
            if isinstance(extension.value, x509.SubjectAlternativeName)
            for uri in extension.value.get_values_for_type(x509.UniformResourceIdentifier)
            if uri.startswith(NODE_URI)
        ]
        names = [unquote(uri.removeprefix(NODE_URI), errors="strict") for uri in uris]
        if not names:
            common = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
            names = [str(part.value) for part in common]
        if len(names) != 1:
            raise InvalidValueError(f"it has {len(names)} names; it must have one")
        return check_node_name(names[0]), certificate.not_valid_after_utc
    except _MALFORMED as error:
        told = f": {error}" if isinstance(error, InvalidValueError) else ""
        raise InvalidValueError(f"{path} is not the certificate of a node{told}") from error


@dataclass(frozen=True)
class FederationStub:
    """The calls that a server answers; use it as a context manager, or close its channel.

    Each returns a checked value, or raises `WireError` for a malformed message and
    `grpc.aio.AioRpcError` if it fails, e.g. because the connection is lost. It holds no more than
    what was declared and found to be within limits, and ends when its task is cancelled.
    """

    channel: grpc.aio.Channel
    metadata: tuple[tuple[str, str], ...] = ()  # of every call

    @classmethod
    def open(cls, server: str, identity: Identity) -> Self:
        """A stub for HOST:PORT; it connects at the first call, and again when it was lost.

        Guarantees:
            * with a certificate all is TLS, and the server must have one of the same authority for
              its name;
            * without one nothing leaves this machine, whatever the host's name resolves to later;
            * no message exceeds the limits of `fedpriv.wire.codec`;
            * a server that is silent is noticed within 100 seconds, also between calls.
        """
        address = Address.parse(server, "server")
        if address.port == 0:
            raise InvalidValueError(f"server is {server!r}; its port must be from 1 to 65535")
        target = f"dns:///{address}"
        if identity.credentials is not None:
            return cls(grpc.aio.secure_channel(target, identity.credentials, options=_OPTIONS))
        address.check_loopback("server")
        # Plain text, and gRPC looks at each connection again: both its ends are on this machine.
        credentials = grpc.local_channel_credentials(grpc.LocalConnectionType.LOCAL_TCP)
        # A proxy on this machine might forward to another.
        options = (*_OPTIONS, ("grpc.enable_http_proxy", 0))
        channel = grpc.aio.secure_channel(target, credentials, options=options)
        return cls(channel, ((NODE_KEY, quote(identity.node, safe="")),))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    async def connect(
        self, hello: wire.Hello, votes: "asyncio.Queue[Vote]"
    ) -> AsyncGenerator[Welcome | Terms, None]:
        """Yield one welcome, then proposals and offers, until the run is over, and send the votes.

        Messages that are not known yet are skipped.
        """
        welcomed, first = False, pb.FromNode(hello=wire.encode_hello(hello))
        call = self.channel.stream_stream(f"/{SERVICE}/Connect")(metadata=self.metadata)

        async def speak() -> None:
            await call.write(first.SerializeToString())
            while True:
                vote = wire.encode_vote(await votes.get())
                await call.write(pb.FromNode(vote=vote).SerializeToString())

        speaking = asyncio.create_task(speak())
        try:
            async with aclosing(_read(call, pb.FromServer)) as messages:
                async for message in messages:
                    what = message.WhichOneof("what")
                    if what is not None and welcomed == (what == "welcome"):
                        raise WireError("the server must say one welcome first, then what to do")
                    match what:
                        case "welcome":
                            welcomed = True
                            yield wire.decode_welcome(message.welcome)
                        case "proposal":
                            yield wire.decode_proposal(message.proposal)
                        case "offer":
                            yield wire.decode_offer(message.offer)
        finally:
            speaking.cancel()  # if it failed, so did reading
            await asyncio.gather(speaking, return_exceptions=True)
        if not welcomed:
            raise WireError("the server ends the connection without a welcome")

    async def download(self, offer: RoundOffer) -> Tensors:
        """The tensors of an offered round: read-only, of the declared shapes and sizes."""
        receiver, request = wire.Receiver(offer.model), wire.encode_round_id(offer.id)
        async with aclosing(self._responses("Download", request, pb.Chunk)) as chunks:
            async for chunk in chunks:
                receiver.add(chunk)
        return receiver.finish()

    async def upload(self, round_id: RoundId, answer: PartialSum | wire.Decline) -> Receipt:
        """Answer an offer; the server refuses an answer that it has already."""
        header, tensors = answer_of(round_id, answer)
        chunks = (pb.UploadPart(chunk=chunk) for chunk in wire.chunks(wire.pieces(tensors)))
        parts = (p.SerializeToString() for p in chain([pb.UploadPart(answer=header)], chunks))
        data = await self.channel.stream_unary(f"/{SERVICE}/Upload")(parts, metadata=self.metadata)
        return wire.decode_receipt(wire.parse(pb.Receipt, data, wire.NODE_RECEIVES_BYTES))

    async def fetch_ledger(self, known: Head | None = None) -> Iterator[str] | None:
        """The unchecked lines of the public ledger after a head; without one, all of them.

        Bytes that are not ASCII become surrogates. None: it never had the head, the server says.
        """
        request = wire.encode_ledger_request(wire.LedgerRequest(**vars(known) if known else {}))
        async with aclosing(self._responses("FetchLedger", request, pb.LedgerPart)) as parts:
            first = await anext(parts, pb.LedgerPart())
            if known is not None and first.unknown:
                return None
            if first.WhichOneof("part") != "size":
                raise WireError("the server does not say how long its ledger is")
            assembler = wire.Assembler(first.size, LARGEST_LEDGER)
            async for part in parts:
                assembler.add(part.chunk)  # an absent one has no bytes, and is refused
        text = io.BytesIO(assembler.finish().data)
        return io.TextIOWrapper(text, encoding="ascii", errors="surrogateescape", newline="\n")

    async def fetch_model(self) -> bytes:
        """The unchecked file of the newest released model."""
        async with aclosing(
            self._responses("FetchModel", pb.ModelRequest(), pb.ModelPart)
        ) as parts:
            first = await anext(parts, pb.ModelPart())
            if first.WhichOneof("part") != "size":
                raise WireError("the server does not say how long its model is")
            assembler = wire.Assembler(first.size, LARGEST_MODEL)
            async for part in parts:
                assembler.add(part.chunk)
        return assembler.finish().tobytes()

    async def status(self) -> Status:
        """Where the federation stands."""
        call, request = self.channel.unary_unary(f"/{SERVICE}/GetStatus"), pb.StatusRequest()
        data = await call(request.SerializeToString(), metadata=self.metadata)
        return wire.decode_status(wire.parse(pb.Status, data, wire.NODE_RECEIVES_BYTES))

    def _responses(
        self, method: str, request: Message, kind: type[Kind]
    ) -> AsyncGenerator[Kind, None]:
        call = self.channel.unary_stream(f"/{SERVICE}/{method}")
        return _read(call(request.SerializeToString(), metadata=self.metadata), kind)


async def _read(responses: grpc.aio.Call, kind: type[Kind]) -> AsyncGenerator[Kind, None]:
    try:
        async for data in responses:
            yield wire.parse(kind, data, wire.NODE_RECEIVES_BYTES)
    finally:
        responses.cancel()


def answer_of(round_id: RoundId, answer: PartialSum | wire.Decline) -> tuple[pb.Answer, Tensors]:
    """The message of an answer, and the tensors that it declares."""
    if isinstance(answer, wire.Decline):
        return wire.encode_answer(wire.RoundAnswer(round_id, answer)), {}
    summed = wire.SummedUpdates.of(answer)
    return wire.encode_answer(wire.RoundAnswer(round_id, summed)), wire.tensors_of(answer)
