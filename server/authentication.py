"""Who is calling: where the server listens, how callers are known there, and what each may do.

An interceptor reads nothing of a call, and lets it reach no handler, before its node is known; it
also bounds how often a node may call, and how many calls it may have open.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
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
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedpriv.errors import FedprivError, InvalidValueError, WireError
from fedpriv.experiment.config import FederationSection
from fedpriv.report.records import Trouble
from fedpriv.server.certificates import load_ca, load_certificate
from fedpriv.server.enrolment import (
    MALFORMED,
    CertificateError,
    EnrolledCertificates,
    Enrolment,
)
from fedpriv.server.monitoring import SERVER, STRANGER, Monitor, Sites
from fedpriv.server.traffic import Peer, Traffic, peer_of
from fedpriv.wire.naming import NODE_KEY, Address, check_key, check_node_name, read_key

_log = logging.getLogger(__name__)
NODE: ContextVar[str] = ContextVar("NODE")  # the node that the handler of a call speaks with
_TOO_LONG = "it took too long, the node began another, or the round is over"
_UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
_FAILED = "the server failed; its log says why"
_FLOOD = "callers that are not known call too often"
_STRANGERS = ""  # who shares a rate limit without being a node
_OPEN_CALLS = 16  # of one node; it needs two or three, and some that are lost without a word
# How long a flood waits for its refusals, and how many of them wait: a peer that goes on as soon as
# it is refused makes far fewer calls.
_HELD_SECONDS, _MOST_HELD = 10.0, 2048
_REQUEST_SECONDS = 20.0  # for a request that is one small message

Context: TypeAlias = grpc.aio.ServicerContext
# What gRPC calls: takes the messages of a request as bytes, and the call's context.
RpcMethod = Callable[[AsyncIterable[bytes], Context], Awaitable[object]]
# Names the node behind a call, or raises UnknownPeerError.
Identify = Callable[[Context], str]


class RefusedCallError(Exception):
    """Ends a call with a status and one sentence, which the caller is told."""

    def __init__(self, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class UnknownPeerError(RefusedCallError):
    """The caller may not call, or may no longer; `what` and `why` are for the operator."""

    def __init__(
        self,
        code: grpc.StatusCode,
        sentence: str,
        node: str = STRANGER,
        what: Trouble = Trouble.CALL,
        why: str = "",
    ) -> None:
        super().__init__(code, sentence)
        self.node, self.what, self.why = node, what, why or sentence


def by_certificate(certificates: EnrolledCertificates) -> Identify:
    """The node at which the certificate of the TLS connection is enrolled, as of now."""

    def identify(context: Context) -> str:
        try:
            pem, *_ = context.auth_context().get("x509_pem_cert") or [b""]
            return certificates.node_of(pem, datetime.now(UTC))
        except CertificateError as error:
            sentence, node = f"the certificate is refused: {error}", error.node or STRANGER
            why = f"{sentence}, {error.subject}" if error.subject else sentence
            raise UnknownPeerError(_UNAUTHENTICATED, sentence, node, why=why) from error
        except InvalidValueError as error:
            # Only the operator can mend the file, and only the operator should know its path.
            code, sentence = grpc.StatusCode.UNAVAILABLE, "the server cannot read its enrolment now"
            why = f"all calls are refused: {error}"
            raise UnknownPeerError(code, sentence, SERVER, Trouble.ENROLMENT, why) from error

    return identify


def certificate_end(context: Context) -> datetime | None:
    """When the certificate of a caller that was identified ends; None in plain text."""
    pem, *_ = context.auth_context().get("x509_pem_cert") or [b""]
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc if pem else None


def by_declaration(context: Context) -> str:
    """The node that the caller claims to be: for plain text on one machine."""
    names = [value for key, value in context.invocation_metadata() or () if key == NODE_KEY]
    try:
        if len(names) != 1:
            raise InvalidValueError(f"the call has {len(names)} metadata {NODE_KEY}; one is needed")
        return check_node_name(unquote(str(names[0]), errors="strict"))
    except ValueError as error:
        raise UnknownPeerError(_UNAUTHENTICATED, str(error)) from error


@dataclass(frozen=True)
class Endpoint:
    """An address, and how callers are known there."""

    address: Address
    credentials: grpc.ServerCredentials | None  # of TLS; None: plain text
    identify: Identify
    certificate_end: datetime | None = None


def endpoint_of(section: FederationSection, *, insecure: bool) -> Endpoint:
    """The endpoint that a configuration describes.

    With `insecure` it speaks plain text, where a node is believed to be the one it says: on
    loopback only. Otherwise certificates must be there and usable, and some enrolled.
    """
    address = Address.parse(section.address, "federation.address")
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
    credentials = tls_credentials(Path(section.certificates))
    if not certificates.nodes():
        raise InvalidValueError(
            f"{section.enrolment} enrols no certificate; each node's table must have the key "
            "certificate, with the fingerprint that `fedpriv certs sign` prints"
        )
    shown = load_certificate(Path(section.certificates) / "server.pem")
    end = shown.not_valid_after_utc
    return Endpoint(address, credentials, by_certificate(certificates), end)


def tls_credentials(folder: Path) -> grpc.ServerCredentials:
    """Credentials that show the server's certificate and demand one of every peer.

    It warns of a certificate that is not of the authority beside it: nodes that trust that one
    alone cannot connect.
    """
    authority = load_ca(folder / "ca.pem")
    try:
        ca, certificate = ((folder / name).read_bytes() for name in ("ca.pem", "server.pem"))
        key = read_key(folder / "server.key")
    except OSError as error:
        raise InvalidValueError(f"{error.filename} cannot be read: {error.strerror}") from error
    shown = load_certificate(folder / "server.pem")
    check_key(folder / "server.key", key, shown)
    _check_for_servers(folder / "server.pem", shown)
    try:
        shown.verify_directly_issued_by(authority)
    except (*MALFORMED, InvalidSignature):
        _log.warning(
            "%s is not issued by ca.pem beside it: nodes that trust that one cannot connect",
            folder / "server.pem",
        )
    return grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)


def _check_for_servers(path: Path, certificate: x509.Certificate) -> None:
    """Refuse the certificate of a node, which no node would take for a server's."""
    try:
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return  # for anything
    if not {ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE} & {*usage}:
        raise InvalidValueError(
            f"{path} is not a certificate for a server (extended key usage serverAuth); "
            "`fedpriv certs server` issues one"
        )


class RateLimit:
    """A token bucket per node: `per_minute` calls at once, and as many again in every minute.

    Nodes are those of an enrolment, and all other callers together are one more, so the number of
    buckets is bounded.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = monotonic) -> None:
        self._most, self._clock = float(per_minute), clock
        self._left: dict[str, tuple[float, float]] = {}

    def admits(self, node: str) -> bool:
        """Whether the node may call now; if so, the call is counted."""
        now = self._clock()
        left, since = self._left.get(node, (self._most, now))
        left = min(self._most, left + (now - since) * self._most / 60.0)
        admitted = left >= 1.0
        self._left[node] = (left - 1.0 if admitted else left, now)
        return admitted

    def grant(self, node: str, calls: int) -> None:
        """Do not count so many calls, for which the server has asked."""
        if node in self._left:
            left, since = self._left[node]
            self._left[node] = (min(self._most, left + calls), since)


@dataclass(eq=False)
class Authentication(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Checks the caller of every method of every service, then sets `NODE` and hands over.

    gRPC reads a request that is one message before any of our code runs, and holds what came of it
    however long it is said to be. So to gRPC all requests are streams, which only we read.

    Guarantees:
        * No handler is entered, and nothing of a request is read, for a caller whose certificate
          is expired, not enrolled or struck off, whose node is not enrolled, who calls too often,
          or has too many calls open.
        * However many calls a node leaves open, their number and their memory are bounded.
        * Callers that are not known, once they call too often, learn so after a pause.
        * What a handler refuses, cannot parse, waits too long for or fails at ends its call with a
          status; of a failure, the caller is told nothing more.
    """

    identify: Identify
    enrolment: Enrolment
    rates: RateLimit
    monitor: Monitor
    traffic: Traffic = field(default_factory=Traffic)
    _open: Counter[str] = field(default_factory=Counter)
    _held: int = 0  # refusals
    _ended: float = field(default_factory=monotonic)

    def __post_init__(self) -> None:
        self.sites = Sites(self.enrolment.hosting, self.monitor)

    def idle_seconds(self) -> float:
        """Seconds since the last call ended; 0 while one is open."""
        return 0.0 if self._open else monotonic() - self._ended

    def known(self, context: Context) -> str:
        """The node that calls; UnknownPeerError if it may not take part, or may no longer."""
        try:
            return self.identify(context)
        except UnknownPeerError as error:
            self.monitor.add("refused_calls", 1, "identity")
            self.sites.trouble(error.node, error.what, error.why)
            raise

    def check(self, context: Context) -> None:
        """UnknownPeerError unless the caller of a call that was let in is its node still."""
        if self.known(context) != (node := NODE.get()):
            sentence = "the certificate is enrolled at another node now"
            raise UnknownPeerError(_UNAUTHENTICATED, sentence, node)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """The handler of a method, behind the check; to gRPC it takes a stream of bytes."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        checked = self._checked(handler, str(handler_call_details.method).rpartition("/")[2])
        streams = handler.response_streaming
        kind = "stream_stream" if streams else "stream_unary"
        made = getattr(grpc, f"{kind}_rpc_method_handler")
        return made(checked, None, handler.response_serializer)

    def _checked(self, handler: grpc.RpcMethodHandler, name: str) -> RpcMethod:
        method = (handler.unary_unary or handler.unary_stream) or (
            handler.stream_unary or handler.stream_stream
        )

        async def checked(messages: AsyncIterable[bytes], context: Context) -> object:
            began, node = monotonic(), None
            try:
                try:
                    node = self._admitted(context)
                    self._open[node] += 1
                    NODE.set(node)
                    peer = peer_of(context.peer())
                    self.traffic.called(peer)
                    if handler.response_streaming:
                        # Sent with the first message instead, a node that does not read it could
                        # not be sent a status.
                        await context.send_initial_metadata(())
                    request = self._messages(messages, peer, handler.request_deserializer)
                    if handler.request_streaming:
                        return await method(request, context)
                    return await method(await _only(request), context)
                except RefusedCallError as error:
                    refused = await self._held_back(error)
                except WireError as error:
                    refused = grpc.StatusCode.INVALID_ARGUMENT, str(error)
                except TimeoutError:
                    refused = grpc.StatusCode.DEADLINE_EXCEEDED, _TOO_LONG
                except (grpc.aio.InternalError, grpc.aio.AbortError):
                    raise
                except Exception as error:  # gRPC would tell the caller all of it, paths too
                    told = f": {error}" if isinstance(error, FedprivError) else ""
                    _log.exception("a call of %s failed%s", name, told)
                    refused = grpc.StatusCode.INTERNAL, _FAILED
                await _abort(context, *refused)
                return None
            except grpc.aio.InternalError as error:
                # The connection is lost; gRPC would log a traceback of any other error than this.
                raise asyncio.CancelledError from error
            finally:
                if node is not None:
                    self._ended = monotonic()
                    self._open[node] -= 1
                    if not self._open[node]:
                        del self._open[node]
                    self.monitor.handled(name, self._ended - began)

        return checked

    async def _messages(
        self,
        messages: AsyncIterable[bytes],
        peer: Peer,
        parse: Callable[[bytes], object] | None,
    ) -> AsyncGenerator[object, None]:
        # Neither read to its end nor closed, a stream would be kept until Python's collector runs.
        async with aclosing(aiter(messages)) as received:  # type: ignore[type-var]
            async for message in received:
                self.traffic.read(peer, len(message))
                yield message if parse is None else parse(message)

    async def _held_back(self, error: RefusedCallError) -> tuple[grpc.StatusCode, str]:
        """How a call is refused, after a pause if it is one of a flood."""
        if not isinstance(error, UnknownPeerError) or self.rates.admits(_STRANGERS):
            return error.code, str(error)
        if self._held < _MOST_HELD:
            self._held += 1
            try:
                await asyncio.sleep(_HELD_SECONDS)
            finally:
                self._held -= 1
        return grpc.StatusCode.RESOURCE_EXHAUSTED, _FLOOD

    def _admitted(self, context: Context) -> str:
        code, node = grpc.StatusCode, self.known(context)
        if node not in self.enrolment.users:
            self.monitor.add("refused_calls", 1, "enrolment")
            self.sites.trouble(STRANGER, Trouble.CALL, f"node {node!r} is not enrolled")
            raise RefusedCallError(code.PERMISSION_DENIED, "the node is not enrolled")
        busy = f"the node has {_OPEN_CALLS} calls open" if self._open[node] >= _OPEN_CALLS else None
        if not self.rates.admits(node):
            busy = "the node calls too often"
        if busy:
            self.monitor.add("refused_calls", 1, "rate")
            self.sites.trouble(node, Trouble.CALL, busy)
            raise RefusedCallError(code.RESOURCE_EXHAUSTED, busy)
        return node


async def _only(request: AsyncGenerator[object, None]) -> object:
    """The one message of a request."""
    async with aclosing(request), asyncio.timeout(_REQUEST_SECONDS):
        async for message in request:
            return message
    raise WireError("the call has no message; it must have one")


async def _abort(context: Context, code: grpc.StatusCode, sentence: str) -> None:
    try:
        await context.abort(code, sentence)
    except grpc.aio.AbortError as error:
        # gRPC keeps it and raises it again. With a traceback it would keep the call too, and its
        # stream, of which a connection may have few, until Python's collector runs.
        error.with_traceback(None)
