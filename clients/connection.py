"""A node's connection to its server: who the node is, a channel, and each call, with retries.

The functions `connect`, `download`, `upload`, `fetch_ledger` and `status` return a checked value,
or raise `WireError` for a malformed message, or `grpc.aio.AioRpcError` for a call that failed, e.g.
because the connection was lost. They hold no more than what was declared and found to be within
limits, and a task that is cancelled ends its call.
"""

import asyncio
import io
import ipaddress
import logging
import random
import re
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, unquote

import grpc
import numpy as np
import numpy.typing as npt
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.x509.oid import NameOID
from google.protobuf.message import Message

from fedpriv.errors import InvalidValueError, WireError
from fedpriv.privacy.layout import Tensors
from fedpriv.privacy.round import PartialSum
from fedpriv.wire import (
    NODE_RECEIVES_BYTES,
    SERVER_RECEIVES_BYTES,
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

LOST = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,  # the server has too much to do, or was asked too often
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,  # e.g. a stream that was reset
        grpc.StatusCode.UNKNOWN,
    }
)
"""How a call fails that may succeed when it is tried again."""
LARGEST_LEDGER = 2**28  # bytes of an exported ledger: about half a million rounds
_METADATA_KEY = "fedpriv-node"  # of a plain-text call, with the node's name percent-encoded
_LARGEST_EXPONENT = 1000  # 2.0 to a power above 1023 is out of range
_URI = "fedpriv:node:"
_ADDRESS = re.compile(r"(?:\[(?P<six>[^\[\]]+)\]|(?P<host>[^:\[\]/\s]+)):(?P<port>[0-9]{1,5})")
_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # an idle node goes on asking
    ("grpc.max_receive_message_length", NODE_RECEIVES_BYTES),
    ("grpc.max_send_message_length", SERVER_RECEIVES_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 60_000),
)
_SERVICE = "/fedpriv.v1.Federation/"

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
            raise InvalidValueError(
                f"base is {self.base} and cap is {self.cap}; both must be positive and finite, and "
                "base not above cap"
            )

    def wait(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row, from 0."""
        longest = self.base * 2.0 ** min(failures, _LARGEST_EXPONENT)
        return self.draw(0.0, min(self.cap, longest))

    def rest(self) -> float:
        """Seconds to wait where nothing failed: uniform on [0, cap]."""
        return self.draw(0.0, self.cap)


async def persist(call: Callable[[], Awaitable[Result]], backoff: Backoff) -> Result:
    """Repeat a call while it fails as `LOST` says; a time limit is the caller's to set."""
    failures = 0
    while True:
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            if error.code() not in LOST:
                raise
            _log.info("a call failed (%s); it will be tried again", error.code().name)
        await asyncio.sleep(backoff.wait(failures))
        failures += 1


@dataclass(frozen=True)
class Certified:
    """A node with a certificate, which names it, and its key; `ca` signs the server's; all PEM."""

    node: str
    ca: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class Named:
    """A node that proves nothing, for plain text on one machine."""

    node: str


Identity = Certified | Named


def identity_of(certificates: Path | None, node: str | None) -> Identity:
    """Who this node is, by its folder with ca.pem, node.pem and node.key, or by a name alone."""
    if (certificates is None) == (node is None):
        raise InvalidValueError(
            f"certificates is {certificates} and node is {node!r}; exactly one must be given"
        )
    if certificates is None:
        return Named(_legal(str(node)))
    try:
        ca, certificate, key = (
            (certificates / name).read_bytes() for name in ("ca.pem", "node.pem", "node.key")
        )
    except OSError as error:
        raise InvalidValueError(f"{error.filename} cannot be read: {error.strerror}") from error
    return Certified(_name_in(certificates / "node.pem", certificate), ca, certificate, key)


def _name_in(path: Path, pem: bytes) -> str:
    """The name that the server will read: the one URI of ours, else the common name."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        alternatives = [
            extension.value.get_values_for_type(x509.UniformResourceIdentifier)
            for extension in certificate.extensions
            if isinstance(extension.value, x509.SubjectAlternativeName)
        ]
        uris = [uri for values in alternatives for uri in values if uri.startswith(_URI)]
        names = [unquote(uri.removeprefix(_URI), errors="strict") for uri in uris] or [
            str(part.value)
            for part in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        ]
        if len(names) != 1:
            raise ValueError(f"it has {len(names)} names; it must have one")
        return _legal(names[0])
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.DuplicateExtension) as error:
        raise InvalidValueError(f"{path} is not the certificate of a node: {error}") from error


def _legal(node: str) -> str:
    """The name, if a server could know it; it becomes the name of a folder."""
    legal = node.isprintable() and node == node.strip() and "/" not in node and node[:1] != "."
    if not (legal and 1 <= len(node.encode()) <= 64):
        raise InvalidValueError(
            f"the name of a node is {node!r}; it must be 1 to 64 bytes of printable text without "
            "'/', a leading '.', or spaces at either end"
        )
    return node


def open_channel(server: str, identity: Identity) -> grpc.aio.Channel:
    """A channel to HOST:PORT; it connects at the first call, and again when it was lost.

    Guarantees:
        * with a certificate all is TLS, and the server must have one of the same authority for its
          name;
        * without one nothing leaves this machine, whatever the name of the host resolves to later;
        * no message exceeds the limits of `fedpriv.wire.tensors`;
        * a server that is silent is noticed within 100 seconds, also between calls.

    Raises:
        InvalidValueError: the address is not legal, or it is not this machine and there is no TLS.
    """
    host, port = _address(server)
    target = f"dns:///{f'[{host}]' if ':' in host else host}:{port}"
    if isinstance(identity, Certified):
        credentials = grpc.ssl_channel_credentials(identity.ca, identity.key, identity.certificate)
        return grpc.aio.secure_channel(target, credentials, options=_OPTIONS)
    _check_loopback(host, port)
    # Plain text, and gRPC looks at each connection again: both its ends are on this machine.
    credentials = grpc.local_channel_credentials(grpc.LocalConnectionType.LOCAL_TCP)
    naming = [kind(identity.node) for kind in (_NamingUnary, _NamingResponses, _NamingRequests)]
    # A proxy on this machine might forward to another.
    options = (*_OPTIONS, ("grpc.enable_http_proxy", 0))
    return grpc.aio.secure_channel(target, credentials, options=options, interceptors=naming)


def _address(server: str) -> tuple[str, int]:
    match = _ADDRESS.fullmatch(server)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        raise InvalidValueError(
            f"server is {server!r}; it must be HOST:PORT with a port from 1 to 65535, as in "
            "fl.example.org:7443 or [::1]:7443"
        )
    if match["six"] is None:
        return match["host"], int(match["port"])
    try:
        return str(ipaddress.IPv6Address(match["six"])), int(match["port"])
    except ValueError as error:
        raise InvalidValueError(f"server is {server!r}, but {error}") from error


def _check_loopback(host: str, port: int) -> None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise InvalidValueError(f"host {host!r} cannot be resolved: {error}") from error
    for *_, address in found:
        if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
            raise InvalidValueError(
                f"host {host!r} is {address[0]}, perhaps another machine; without certificates it "
                "must be this one, as in localhost:7443"
            )


@dataclass(frozen=True)
class _Naming:
    """Adds the node's name to the metadata of calls of one kind."""

    node: str

    async def intercept(
        self,
        go_on: Callable[[grpc.aio.ClientCallDetails, object], Awaitable[object]],
        details: grpc.aio.ClientCallDetails,
        request: object,
    ) -> object:
        """Called like gRPC's interceptors of any kind."""
        metadata = details.metadata or grpc.aio.Metadata()
        metadata.add(_METADATA_KEY, quote(self.node, safe=""))
        return await go_on(details._replace(metadata=metadata), request)


@grpc.aio.UnaryUnaryClientInterceptor.register
class _NamingUnary(_Naming):
    intercept_unary_unary = _Naming.intercept


@grpc.aio.UnaryStreamClientInterceptor.register
class _NamingResponses(_Naming):
    intercept_unary_stream = _Naming.intercept


@grpc.aio.StreamUnaryClientInterceptor.register
class _NamingRequests(_Naming):
    intercept_stream_unary = _Naming.intercept


async def connect(
    channel: grpc.aio.Channel, hello: Hello
) -> AsyncGenerator[Welcome | RoundOffer, None]:
    """Yield one welcome, then offers, until the run is over; ignore messages of newer servers."""
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
    """The tensors of an offered round: read-only, of the declared shapes and sizes."""
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
    """Answer an offer, chunk by chunk.

    If the call fails, the server may have the answer; a repeated one is refused, and harmless.
    """
    header, tensors = answer_of(round_id, answer)
    path = _SERVICE + "Upload"
    call = channel.stream_unary(path, request_serializer=pb.UploadPart.SerializeToString)
    return decode_receipt(_parsed(pb.Receipt, await call(_parts(header, tensors))))


def answer_of(round_id: RoundId, answer: PartialSum | Decline) -> tuple[pb.Answer, Tensors]:
    """The message of an answer, and the tensors that it declares."""
    if isinstance(answer, Decline):
        return encode_answer(Answer(round_id, answer)), {}
    return encode_answer(Answer(round_id, SummedUpdates.of(answer))), tensors_of(answer)


def _parts(header: pb.Answer, tensors: Tensors) -> Iterator[pb.UploadPart]:
    yield pb.UploadPart(answer=header)
    for chunk in chunks(pieces(tensors)):
        yield pb.UploadPart(chunk=chunk)


async def fetch_ledger(channel: grpc.aio.Channel) -> Iterator[str]:
    """The unchecked lines of the public ledger; bytes that are not ASCII become surrogates."""
    request = pb.LedgerRequest()
    async with aclosing(_responses(channel, "FetchLedger", request, pb.LedgerPart)) as parts:
        first = await anext(parts, pb.LedgerPart())
        if first.WhichOneof("part") != "size":
            raise WireError("the server does not say how long its ledger is")
        assembler = Assembler(first.size, LARGEST_LEDGER)
        async for part in parts:
            assembler.add(part.chunk)  # an absent one has no bytes, and is refused
    text = io.BytesIO(assembler.finish().data)
    return io.TextIOWrapper(text, encoding="ascii", errors="surrogateescape", newline="\n")


async def status(channel: grpc.aio.Channel) -> Status:
    """Where the federation stands."""
    call = channel.unary_unary(
        _SERVICE + "GetStatus", request_serializer=pb.StatusRequest.SerializeToString
    )
    return decode_status(_parsed(pb.Status, await call(pb.StatusRequest())))


async def _responses(
    channel: grpc.aio.Channel, method: str, request: Message, kind: type[Kind]
) -> AsyncGenerator[Kind, None]:
    """Parsed messages of the server; the call ends when this is closed."""
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
