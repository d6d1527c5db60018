"""Authentication: where the server listens, how it identifies callers, and what they may do.

The calling node is identified before any part of a call is read or handled. The rate of its calls
and the number of its open calls are limited.

gRPC bounds neither what it stores for a peer that does not read nor the work that small frames
cause. So we bound what a node may send besides the messages that handlers read. A node that sends
more is slowed down but not disconnected, so an honest node loses only time.
"""

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import TypeAlias
from urllib.parse import unquote

import grpc
from cryptography import x509
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from fedpriv.errors import FedprivError, InvalidValueError, WireError
from fedpriv.experiment.config import FederationSection
from fedpriv.report.records import Trouble
from fedpriv.server.certificates import load_ca
from fedpriv.server.enrolment import EnrolledCertificates, Enrolment, UnknownPeerError
from fedpriv.server.monitoring import SERVER, STRANGER, Sites
from fedpriv.wire import naming
from fedpriv.wire.naming import Address

_log = logging.getLogger(__name__)
NODE: ContextVar[str] = ContextVar("NODE")  # the node whose call is being handled
_PEER: ContextVar["Peer"] = ContextVar("PEER")  # the other end of its connection
_TOO_LONG = "it took too long, the node began another, or the round is over"
_FAILED = "the server failed; its log says why"
_OPEN_CALLS = 16  # per node; it needs two or three, and connections lost silently leave some open
_REQUEST_SECONDS = 20.0  # for a request of one small message
# What a node may send that no handler has read: the content of messages, in bytes, and the rest, in
# bytes plus the cost of waking and of each frame. A node may exceed this by one piece per
# connection; the excess drains with time, with bytes read or sent, and with calls.
_MOST_CONTENT, _MOST_REST = 2.0 * 2**20, 32.0 * 2**10
_CONTENT_PER_SECOND, _REST_PER_SECOND = 16.0 * 2**10, 2.0 * 2**10
# On Ethernet, an upload costs 0.02 per byte, and the windows of a download 0.001.
_REST_PER_READ, _REST_PER_SENT, _REST_PER_CALL = 0.05, 0.02, 1024
_MESSAGE_BYTES = 5  # in front of each message

Context: TypeAlias = grpc.aio.ServicerContext
Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]
# Returns the node of a certificate (PEM; empty in plain text) or of a call's metadata, or raises
# UnknownPeerError; InvalidValueError: the enrolment file cannot be used.
Identify = Callable[[bytes, Metadata], str]


class Allowance:
    """Bounds what the connections of one node may send besides messages that handlers read."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock, self._since = clock, clock()
        self._content = self._rest = 0.0  # what has not drained yet

    def received(self, content: int, rest: int) -> None:
        """Count a piece: bytes of content, and the cost of the rest."""
        self.pause()  # time that passed before it does not drain it
        self._content += content
        self._rest += rest

    def read(self, size: int) -> None:
        """Record that a handler has read a message of `size` bytes."""
        self._drain(size + _MESSAGE_BYTES, _REST_PER_READ * size)

    def sent(self, size: int) -> None:
        """Record that the peer has accepted `size` bytes, for which it may grant new windows."""
        self._drain(0.0, _REST_PER_SENT * size)

    def called(self) -> None:
        """Record that a call was admitted."""
        self._drain(0.0, _REST_PER_CALL)

    def pause(self) -> float:
        """Return the seconds until the node may send more, if nothing else is drained."""
        now = self._clock()
        seconds, self._since = now - self._since, now
        self._drain(_CONTENT_PER_SECOND * seconds, _REST_PER_SECOND * seconds)
        content = (self._content - _MOST_CONTENT) / _CONTENT_PER_SECOND
        return max(0.0, content, (self._rest - _MOST_REST) / _REST_PER_SECOND)

    def _drain(self, content: float, rest: float) -> None:
        self._content = max(0.0, self._content - content)
        self._rest = max(0.0, self._rest - rest)


@dataclass(frozen=True, eq=False)
class Peer:
    """The other end of a connection."""

    node: str = STRANGER  # the node of the certificate
    certificate: bytes = b""  # PEM, as TLS has checked it; empty in plain text
    allowance: Allowance = field(default_factory=Allowance)


class RefusedCallError(Exception):
    """Ends a call with a status and one sentence, both of which are sent to the caller."""

    def __init__(self, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


def by_certificate(certificates: EnrolledCertificates) -> Identify:
    """Return a function that identifies the node at which the TLS certificate is enrolled now."""
    return lambda certificate, _: certificates.node_of(certificate, datetime.now(UTC))


def by_declaration(_: bytes, metadata: Metadata) -> str:
    """Return the node that the caller claims to be; for plain text on one machine.

    UnknownPeerError: the call names no node, or an invalid name.
    """
    name = dict(metadata).get(naming.NODE_KEY, "")
    try:
        return naming.check_node_name(unquote(str(name), errors="strict"))
    except ValueError as error:
        raise UnknownPeerError(str(error)) from error


@dataclass(frozen=True)
class Endpoint:
    """An address, and how the server identifies the callers that connect to it."""

    address: Address
    tls: ssl.SSLContext | None  # None: plain text
    identify: Identify
    certificate: x509.Certificate | None = None  # of the server
    key: bytes = field(default=b"", repr=False)  # of the certificate, in PEM


def endpoint_of(section: FederationSection, *, insecure: bool) -> Endpoint:
    """Return the endpoint that a configuration describes.

    With `insecure`, the endpoint speaks plain text and believes the name that a node states; it
    must be a loopback address. Otherwise the server's certificates must be usable, and the
    certificate of at least one node must be enrolled. InvalidValueError if a condition fails.
    """
    address = Address.parse(section.address, "federation.address")
    if section.enrolment is None:
        raise InvalidValueError("federation.enrolment is absent; a server must have it")
    if insecure and section.secure_sum is not None:
        raise InvalidValueError(
            'federation.trust is "none" and --insecure is given; nodes sign their keys with '
            "certificates, so that --insecure must be left out"
        )
    if insecure:
        address.check_loopback("federation.address")
        _log.warning("plain text: any process on this machine can claim to be any node")
        return Endpoint(address, None, by_declaration)
    if section.certificates is None:
        raise InvalidValueError(
            "federation.certificates is absent; it must be a folder with ca.pem, server.pem "
            "and server.key, as `fedpriv certs init` makes it, or --insecure be given"
        )
    certificates = EnrolledCertificates(Path(section.enrolment))
    folder = Path(section.certificates)
    tls = tls_context(folder)
    if not certificates.nodes():
        raise InvalidValueError(
            f"{section.enrolment} enrols no certificate; each node's table must have the key "
            "certificate, with the fingerprint that `fedpriv certs sign` prints"
        )
    certificate = naming.load_certificate(folder / "server.pem")
    key = naming.read_key(folder / "server.key")
    return Endpoint(address, tls, by_certificate(certificates), certificate, key)


def tls_context(folder: Path) -> ssl.SSLContext:
    """Return TLS that presents the server's certificate and requires one from every peer.

    InvalidValueError: a file is missing or malformed, the key does not fit the certificate, or the
    certificate is not for a server. If the authority in the same folder did not issue the
    certificate, a warning is logged, because nodes that trust only that authority cannot connect.
    """
    ca, certificate, key = [folder / n for n in ("ca.pem", "server.pem", "server.key")]
    authority, loaded = load_ca(ca), naming.load_certificate(certificate)
    naming.check_key(key, naming.read_key(key), loaded)
    if not naming.for_servers(loaded):
        raise InvalidValueError(
            f"{certificate} is not a certificate for a server (extended key usage serverAuth); "
            "`fedpriv certs server` issues one"
        )
    if not naming.issued_by([authority], loaded):
        _log.warning(
            "%s is not issued by ca.pem beside it: nodes that trust that one cannot connect",
            certificate,
        )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Older versions renegotiate and keep sessions, which costs time and memory.
    tls.minimum_version, tls.verify_mode = ssl.TLSVersion.TLSv1_3, ssl.CERT_REQUIRED
    tls.num_tickets = 0  # for sessions
    tls.set_alpn_protocols(["h2"])
    tls.load_cert_chain(certificate, key)
    tls.load_verify_locations(ca)
    return tls


class RateLimit:
    """A token bucket per node that holds `per_minute` calls and refills within a minute.

    Only enrolled nodes have buckets, so their number is bounded.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = monotonic) -> None:
        self._capacity, self._clock = float(per_minute), clock
        self._buckets: dict[str, tuple[float, float]] = {}  # calls left, and when that was computed

    def admits(self, node: str) -> bool:
        """Return whether the node may call now; if so, the call is counted."""
        now = self._clock()
        calls_left, since = self._buckets.get(node, (self._capacity, now))
        calls_left = min(self._capacity, calls_left + (now - since) * self._capacity / 60.0)
        admitted = calls_left >= 1.0
        self._buckets[node] = (calls_left - 1.0 if admitted else calls_left, now)
        return admitted

    def grant(self, node: str, calls: int) -> None:
        """Let the node make extra calls that the server has asked for."""
        if node in self._buckets:
            calls_left, since = self._buckets[node]
            self._buckets[node] = (min(self._capacity, calls_left + calls), since)


@dataclass(eq=False)
class Authentication:
    """Checks the caller of every method, then sets `NODE` and calls the handler: `handler`.

    If a request is one message, gRPC reads it before any of our code runs, and buffers as many
    bytes as the message claims to have. So all requests are streams to gRPC, which our code reads.

    Guarantees:
        * No handler is called, and no byte of a request is read, if the caller's certificate has
          expired, is not enrolled or was struck off, or if its node is not enrolled, calls too
          often or has too many calls open.
        * The number and the memory of the calls that a node leaves open are bounded.
        * If a handler refuses a call, cannot parse it, times out or fails, the call ends with a
          status. In case of a failure, the caller learns no more than that.
    """

    identify: Identify
    enrolment: Enrolment
    rates: RateLimit
    peers: dict[str, Peer] = field(default_factory=dict)  # by gRPC's names; kept by the front
    _open: Counter[str] = field(default_factory=Counter)
    _last_end: float = field(default_factory=monotonic)  # when the last call ended

    def __post_init__(self) -> None:
        self.sites = Sites(self.enrolment)

    def idle_seconds(self) -> float:
        """Return the seconds since the last call ended; 0 while a call is open."""
        return 0.0 if self._open else monotonic() - self._last_end

    @staticmethod
    def peer_certificate() -> x509.Certificate | None:
        """Return the certificate of the caller that is being handled; None in plain text."""
        certificate = _PEER.get().certificate
        return x509.load_pem_x509_certificate(certificate) if certificate else None

    def known(self, certificate: bytes, metadata: Metadata = ()) -> str:
        """Return the node of a caller; RefusedCallError, reported to the operator, if none."""
        try:
            return self.identify(certificate, metadata)
        except UnknownPeerError as error:
            code, sentence = grpc.StatusCode.UNAUTHENTICATED, str(error)
            self.sites.trouble(error.node or STRANGER, Trouble.CALL, sentence + error.subject)
        except InvalidValueError as error:
            # Only the operator can repair the file, and only the operator should see its path.
            code, sentence = grpc.StatusCode.UNAVAILABLE, "the server cannot read its enrolment now"
            self.sites.trouble(SERVER, Trouble.ENROLMENT, f"all calls are refused: {error}")
        raise RefusedCallError(code, sentence)

    def slowed(self, peer: Peer) -> None:
        """Record that a peer sends more than its allowance."""
        reason = "it sends too much that is no message; it is slowed"
        self.sites.trouble(peer.node, Trouble.CALL, reason)

    def check(self, context: Context) -> None:
        """Raise RefusedCallError unless an admitted caller still identifies as the same node."""
        node, metadata = NODE.get(), context.invocation_metadata() or ()
        if self.known(_PEER.get().certificate, metadata) != node:
            sentence = "the certificate is enrolled at another node now"
            raise RefusedCallError(grpc.StatusCode.UNAUTHENTICATED, sentence)

    def handler(
        self,
        method: MethodDescriptor,
        answer: Callable[..., Awaitable[object]],
        parse: Callable[[bytes], object],
        serialise: Callable[[Message], bytes],
    ) -> grpc.RpcMethodHandler:
        """Return a handler of a method that checks the caller, and then calls `answer`.

        `answer` gets the request, parsed by `parse`, and the context. WireError in `parse` ends the
        call; gRPC would log a traceback for each malformed request.
        """

        async def checked(messages: AsyncIterable[bytes], context: Context) -> object:
            node = None
            try:
                try:
                    if (peer := self.peers.get(context.peer())) is None:
                        raise asyncio.CancelledError  # its connection is over
                    node = self._admitted(peer, context)
                    self._open[node] += 1
                    NODE.set(node)
                    _PEER.set(peer)
                    peer.allowance.called()
                    if method.server_streaming:
                        # If these came with the first message, a node that does not read that
                        # message could not be sent a status.
                        await context.send_initial_metadata(())
                    request = self._messages(messages, peer, parse)
                    if method.client_streaming:
                        return await answer(request, context)
                    return await answer(await _only(request), context)
                except RefusedCallError as error:
                    refusal = error.code, str(error)
                except WireError as error:
                    refusal = grpc.StatusCode.INVALID_ARGUMENT, str(error)
                except TimeoutError:
                    refusal = grpc.StatusCode.DEADLINE_EXCEEDED, _TOO_LONG
                except (grpc.aio.InternalError, grpc.aio.AbortError):
                    raise
                except Exception as error:  # gRPC would send the caller its text, with paths
                    sentence = f": {error}" if isinstance(error, FedprivError) else ""
                    _log.exception("a call of %s failed%s", method.name, sentence)
                    refusal = grpc.StatusCode.INTERNAL, _FAILED
                await _abort(context, *refusal)
                return None
            except grpc.aio.InternalError as error:
                # The connection is lost; gRPC logs a traceback of every error except this one.
                raise asyncio.CancelledError from error
            finally:
                if node is not None:
                    self._last_end = monotonic()
                    self._open -= Counter([node])  # keeps positive numbers only

        if method.server_streaming:
            return grpc.stream_stream_rpc_method_handler(checked, None, serialise)
        return grpc.stream_unary_rpc_method_handler(checked, None, serialise)

    async def _messages(
        self, messages: AsyncIterable[bytes], peer: Peer, parse: Callable[[bytes], object]
    ) -> AsyncGenerator[object, None]:
        # Unless it is closed, a stream that is not read to its end lives until garbage collection.
        async with aclosing(aiter(messages)) as received:  # type: ignore[type-var]
            async for message in received:
                peer.allowance.read(len(message))
                yield parse(message)

    def _admitted(self, peer: Peer, context: Context) -> str:
        """Return the calling node if it may make this call; RefusedCallError otherwise."""
        code = grpc.StatusCode
        node = self.known(peer.certificate, context.invocation_metadata() or ())
        if node not in self.enrolment.users:
            self.sites.trouble(STRANGER, Trouble.CALL, f"node {node!r} is not enrolled")
            raise RefusedCallError(code.PERMISSION_DENIED, "the node is not enrolled")
        if not self.rates.admits(node):
            excess = "the node calls too often"
        elif self._open[node] >= _OPEN_CALLS:
            excess = f"the node has {_OPEN_CALLS} calls open"
        else:
            return node
        self.sites.trouble(node, Trouble.CALL, excess)
        raise RefusedCallError(code.RESOURCE_EXHAUSTED, excess)


async def _only(request: AsyncGenerator[object, None]) -> object:
    """Return the only message of a request; WireError if there is none."""
    async with aclosing(request), asyncio.timeout(_REQUEST_SECONDS):
        async for message in request:
            return message
    raise WireError("the call has no message; it must have one")


async def _abort(context: Context, code: grpc.StatusCode, sentence: str) -> None:
    try:
        await context.abort(code, sentence)
    except grpc.aio.AbortError as error:
        # gRPC keeps this error and raises it again. Its traceback would keep the call alive until
        # garbage collection, and with it a stream, while a connection may have only a few.
        error.with_traceback(None)
