"""A node's connection to its server: the node's identity, the calls, and retries."""

import asyncio
import io
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Self, TypeVar
from urllib.parse import quote

import grpc
import numpy as np
import numpy.typing as npt
from cryptography import x509
from google.protobuf.message import Message

from fedpriv import wire
from fedpriv.errors import InvalidValueError, WireError
from fedpriv.ledger import Head
from fedpriv.privacy.layout import Layout, Tensors
from fedpriv.privacy.round import PartialSum
from fedpriv.secure_sums.protocol import MaskedVector
from fedpriv.wire import Receipt, RoundId, Status, Terms, Vote, Welcome, codec, naming
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.codec import MAX_COMPONENTS
from fedpriv.wire.naming import SERVICE, Address

# Codes of failed calls that may succeed later. RESOURCE_EXHAUSTED comes from a server that is busy
# or was called too often, INTERNAL for instance from a stream that was reset.
LOST = ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED", "CANCELLED", "INTERNAL", "UNKNOWN"]
LARGEST_LEDGER = 2**28  # bytes of an exported ledger: about half a million rounds
LARGEST_MODEL = 4 * MAX_COMPONENTS + 2**27  # bytes of components, names and shapes
_LARGEST_EXPONENT = 1000  # 2.0 to a power above 1023 is out of range
_OPTIONS = (
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # no limit: an idle node continues to ping
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

    def wait(self, failures: int = _LARGEST_EXPONENT) -> float:
        """Draw seconds to wait after `failures` failures in a row; by default, up to `cap`."""
        return self.draw(0.0, min(self.cap, self.base * 2.0 ** min(failures, _LARGEST_EXPONENT)))


async def persist(call: Callable[[], Awaitable[Result]], backoff: Backoff) -> Result:
    """Repeat a call while it fails with a code of `LOST`, without a time limit."""
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
    """The identity of a node: its certificate, or only a name, for plain text on one machine."""

    node: str
    credentials: grpc.ChannelCredentials | None = field(default=None, repr=False)
    certificate: x509.Certificate | None = None
    key: bytes = field(default=b"", repr=False)  # of the certificate, in PEM
    authorities: Sequence[x509.Certificate] = ()  # that issue certificates of servers and nodes


def identity_of(certificates: Path | None, node: str | None) -> Identity:
    """Return a node's identity from a folder with ca.pem, node.pem and node.key, or from a name.

    InvalidValueError: the files are unusable or do not fit together, or the name is invalid.
    """
    if (certificates is None) == (node is None):
        arguments = f"--certificates is {certificates} and --node is {node!r}"
        raise InvalidValueError(f"{arguments}; exactly one must be given")
    if certificates is None:
        return Identity(naming.check_node_name(str(node)))
    ca, path = certificates / "ca.pem", certificates / "node.pem"
    authorities, key = naming.load_authorities(ca), naming.read_key(certificates / "node.key")
    certificate = naming.load_certificate(path)
    naming.check_key(certificates / "node.key", key, certificate)
    credentials = grpc.ssl_channel_credentials(naming.read_file(ca), key, naming.read_file(path))
    node = naming.node_named(certificate, path)
    return Identity(node, credentials, certificate, key, authorities)


def enrolled_as(certificates: Path) -> tuple[str, str]:
    """Return the name of the node with this folder of certificates, and the fingerprint to enrol.

    InvalidValueError: the folder's node.pem is not the certificate of a node.
    """
    path = certificates / "node.pem"
    certificate = naming.load_certificate(path)
    return naming.node_named(certificate, path), naming.fingerprint_of(certificate)


@dataclass(frozen=True)
class FederationStub:
    """The calls to a server; use it as a context manager, or close its channel.

    Each call returns a checked value, or raises `WireError` for a malformed message and
    `grpc.aio.AioRpcError` if it fails, e.g. because the connection is lost. It holds at most the
    declared number of bytes, which is checked against a limit, and ends if its task is cancelled.
    """

    channel: grpc.aio.Channel
    metadata: tuple[tuple[str, str], ...] = ()  # of every call

    @classmethod
    def open(cls, server: str, identity: Identity) -> Self:
        """Return a stub for HOST:PORT; it connects at the first call, and again after a loss.

        InvalidValueError: the address is invalid, or is not loopback and there is no certificate.

        Guarantees:
            * with a certificate, all traffic is TLS, and the server must have a certificate from
              the same authority for its host name;
            * without one, no data leave this machine, even if the host name resolves to another
              address later;
            * no message exceeds the limits of `fedpriv.wire.codec`;
            * a silent server is noticed within 100 seconds, also between calls.
        """
        address = Address.parse(server, "server")
        if address.port == 0:
            raise InvalidValueError(f"server is {server!r}; its port must be from 1 to 65535")
        target = f"dns:///{address}"
        if identity.credentials is not None:
            return cls(grpc.aio.secure_channel(target, identity.credentials, options=_OPTIONS))
        address.check_loopback("server")
        # Plain text, but gRPC checks that both ends of each connection are on this machine.
        credentials = grpc.local_channel_credentials(grpc.LocalConnectionType.LOCAL_TCP)
        # A proxy on this machine might forward to another.
        options = (*_OPTIONS, ("grpc.enable_http_proxy", 0))
        channel = grpc.aio.secure_channel(target, credentials, options=options)
        return cls(channel, ((naming.NODE_KEY, quote(identity.node, safe="")),))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()

    async def connect(
        self, hello: wire.Hello, votes: "asyncio.Queue[Vote]"
    ) -> AsyncGenerator[Welcome | Terms, None]:
        """Yield one welcome, then proposals and offers, until the run is over; send the votes.

        Messages of unknown kinds are skipped. WireError: one of a known kind has an unknown field.
        """
        welcomed, hello_message = False, pb.FromNode(hello=wire.HELLO.encode(hello))
        call = self.channel.stream_stream(f"/{SERVICE}/Connect")(metadata=self.metadata)

        async def send() -> None:
            await call.write(hello_message.SerializeToString())
            while True:
                vote = wire.VOTE.encode(await votes.get())
                await call.write(pb.FromNode(vote=vote).SerializeToString())
                votes.task_done()

        sender = asyncio.create_task(send())
        try:
            async with aclosing(_read(call, pb.FromServer)) as messages:
                async for message in messages:
                    kind = message.WhichOneof("what")
                    if kind is not None and welcomed == (kind == "welcome"):
                        raise WireError("the server must say one welcome first, then what to do")
                    if kind is not None:
                        codec.refuse_unknown(message)
                    match kind:
                        case "welcome":
                            welcomed = True
                            yield wire.WELCOME.decode(message.welcome)
                        case "proposal":
                            yield wire.PROPOSAL.decode(message.proposal)
                        case "offer":
                            yield wire.OFFER.decode(message.offer)
        finally:
            sender.cancel()  # if it failed, so did reading
            await asyncio.gather(sender, return_exceptions=True)
        if not welcomed:
            raise WireError("the server ends the connection without a welcome")

    async def download(self, round_id: RoundId, model: Layout) -> Tensors:
        """Return the tensors of an offered round, float32 and read-only."""
        size, request = codec.FLOAT32.itemsize * model.dimension, wire.ROUND_ID.encode(round_id)
        assembler = wire.Assembler(size, size)
        async with aclosing(self._responses("Download", request, pb.Chunk)) as chunks:
            async for chunk in chunks:
                assembler.add(chunk)
        vector = assembler.finish().view(codec.FLOAT32)
        return model.unflatten(vector.astype(np.float32, copy=False))

    async def upload(self, round_id: RoundId, answer: PartialSum | wire.Decline) -> Receipt:
        """Answer an offer, and return the server's receipt."""
        if isinstance(answer, wire.Decline):
            return await self._upload(wire.RoundAnswer(round_id, answer), {})
        header, tensors = wire.sum_to_send(answer)
        return await self._upload(wire.RoundAnswer(round_id, header), tensors)

    async def upload_masked(self, round_id: RoundId, masked: MaskedVector) -> Receipt:
        """Send a masked sum [D], and return the server's receipt."""
        header, signed = wire.SummedUpdates(0, 0, masked=True), f"i{masked.itemsize}"
        answer = wire.RoundAnswer(round_id, header)
        return await self._upload(answer, {wire.SUM: masked.view(signed)})

    async def exchange(self, step: wire.Step) -> wire.Step:
        """Take a step of a secure sum, and return the server's answer, once there is one."""
        call, request = self.channel.unary_unary(f"/{SERVICE}/Exchange"), wire.STEP.encode(step)
        data = await call(request.SerializeToString(), metadata=self.metadata)
        return wire.STEP.decode(wire.parse(pb.Step, data, wire.NODE_RECEIVES_BYTES))

    async def _upload(self, answer: wire.RoundAnswer, tensors: Tensors) -> Receipt:
        header = wire.encode_answer(answer)
        chunks = (pb.UploadPart(chunk=chunk) for chunk in wire.chunks(wire.pieces(tensors)))
        parts = (p.SerializeToString() for p in chain([pb.UploadPart(answer=header)], chunks))
        data = await self.channel.stream_unary(f"/{SERVICE}/Upload")(parts, metadata=self.metadata)
        return wire.RECEIPT.decode(wire.parse(pb.Receipt, data, wire.NODE_RECEIVES_BYTES))

    async def fetch_ledger(self, head: Head | None = None) -> Iterator[str] | None:
        """Return the unchecked lines of the public ledger after a head; without one, all of them.

        Bytes that are not ASCII become surrogates. None: according to the server, its ledger never
        had the head.
        """
        request = wire.LEDGER_REQUEST.encode(head) if head else pb.LedgerRequest()
        content = await self._file("ledger", request, LARGEST_LEDGER)
        if content is None:
            return None
        text = io.BytesIO(content.data)
        return io.TextIOWrapper(text, encoding="ascii", errors="surrogateescape", newline="\n")

    async def fetch_model(self) -> bytes:
        """Return the unchecked file of the newest released model."""
        content = await self._file("model", pb.ModelRequest(), LARGEST_MODEL)
        if content is None:
            raise WireError("the server does not know its model")
        return content.tobytes()

    async def status(self) -> Status:
        """Return the status of the federation."""
        call, request = self.channel.unary_unary(f"/{SERVICE}/GetStatus"), pb.StatusRequest()
        data = await call(request.SerializeToString(), metadata=self.metadata)
        return wire.STATUS.decode(wire.parse(pb.Status, data, wire.NODE_RECEIVES_BYTES))

    async def _file(self, what: str, request: Message, most: int) -> npt.NDArray[np.uint8] | None:
        """Return the bytes of a file of at most `most` bytes; None if the server lacks it.

        WireError: the size is not as declared.
        """
        async with aclosing(self._responses(f"Fetch{what.title()}", request, pb.FilePart)) as parts:
            first_part = await anext(parts, pb.FilePart())
            if first_part.unknown:
                return None
            if first_part.WhichOneof("part") != "size":
                raise WireError(f"the server does not say how long its {what} is")
            assembler = wire.Assembler(first_part.size, most)
            async for part in parts:
                assembler.add(part.chunk)  # an absent chunk is empty, and is refused
            return assembler.finish()

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
