"""Who is calling: where the server listens, how callers are known there, and what each may do.

An interceptor lets no call reach a handler before its node is known; it also bounds how often a
node may call, and how many calls it may have open.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import TypeAlias
from urllib.parse import unquote

import grpc

from fedpriv.config import FederationSection
from fedpriv.errors import InvalidValueError, WireError
from fedpriv.server.certificates import load_ca
from fedpriv.server.enrolment import CertificateError, EnrolledCertificates, Enrolment
from fedpriv.server.monitoring import Monitor
from fedpriv.wire.naming import NODE_KEY, Address, check_node_name

_log = logging.getLogger(__name__)
NODE: ContextVar[str] = ContextVar("NODE")  # the node that the handler of a call speaks with
_TOO_LONG = "it took too long, the node began another, or the round is over"
_UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
_OPEN_CALLS = 16  # of one node; it needs two or three, and some that are lost without a word

Context: TypeAlias = grpc.aio.ServicerContext
# A handler's implementation: takes the request, or an iterator of them, and the call's context.
Method = Callable[[object, Context], Awaitable[object]]
# Names the node behind a call, or raises UnknownPeerError.
Identify = Callable[[Context], str]


class RefusedCallError(Exception):
    """Ends a call with a status and one sentence, which the caller is told."""

    def __init__(self, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class UnknownPeerError(RefusedCallError):
    """The caller may not call, or may no longer."""


def by_certificate(certificates: EnrolledCertificates) -> Identify:
    """The node at which the certificate of the TLS connection is enrolled, as of now."""

    def identify(context: Context) -> str:
        try:
            pem, *_ = context.auth_context().get("x509_pem_cert") or [b""]
            return certificates.node_of(pem, datetime.now(UTC))
        except CertificateError as error:
            sentence = f"the certificate is refused: {error}"
            raise UnknownPeerError(_UNAUTHENTICATED, sentence) from error
        except InvalidValueError as error:
            # Only the operator can mend the file, and only the operator should know its path.
            sentence = "the server cannot read its enrolment now"
            raise UnknownPeerError(grpc.StatusCode.UNAVAILABLE, sentence) from error

    return identify


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
            "certificate, with the fingerprint that `fedpriv certs issue` prints"
        )
    return Endpoint(address, credentials, by_certificate(certificates))


def tls_credentials(folder: Path) -> grpc.ServerCredentials:
    """Credentials that show the server's certificate and demand one of every peer."""
    load_ca(folder / "ca.pem")
    names = ("ca.pem", "server.pem", "server.key")
    try:
        ca, certificate, key = ((folder / name).read_bytes() for name in names)
    except OSError as error:
        raise InvalidValueError(f"{error.filename} cannot be read: {error.strerror}") from error
    return grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)


class RateLimit:
    """A token bucket per node: `per_minute` calls at once, and as many again in every minute.

    Nodes are those of an enrolment, so the number of buckets is bounded.
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


@dataclass(eq=False)
class Authentication(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Checks the caller of every method of every service, then sets `NODE` and hands over.

    Guarantees:
        * No handler is entered by a caller whose certificate is expired, not enrolled or struck
          off, whose node is not enrolled, who calls too often, or has too many calls open.
        * However many calls a node leaves open, their number and their memory are bounded.
        * What a handler refuses, cannot parse or waits too long for ends its call with a status.
    """

    identify: Identify
    enrolment: Enrolment
    rates: RateLimit
    monitor: Monitor
    _open: Counter[str] = field(default_factory=Counter)
    _ended: float = field(default_factory=monotonic)

    def idle_seconds(self) -> float:
        """Seconds since the last call ended; 0 while one is open."""
        return 0.0 if self._open else monotonic() - self._ended

    def known(self, context: Context) -> str:
        """The node that calls; UnknownPeerError if it may not take part, or may no longer."""
        try:
            return self.identify(context)
        except UnknownPeerError:
            self.monitor.add("refused_calls", 1, "identity")
            raise

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """The handler of a method, behind the check."""
        handler = await continuation(handler_call_details)
        name = str(handler_call_details.method).rpartition("/")[2]
        for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            if method := getattr(handler, kind, None):
                checked = self._checked(method, name, streaming=kind.endswith("_stream"))
                return handler._replace(**{kind: checked})
        return None

    def _checked(self, method: Method, name: str, *, streaming: bool) -> Method:
        async def checked(request: object, context: Context) -> object:
            began, node = monotonic(), None
            try:
                try:
                    node = self._admitted(context)
                    self._open[node] += 1
                    NODE.set(node)
                    if streaming:
                        # Sent with the first message instead, a node that does not read it could
                        # not be sent a status.
                        await context.send_initial_metadata(())
                    return await method(request, context)
                except RefusedCallError as error:
                    refused = error.code, str(error)
                except WireError as error:
                    refused = grpc.StatusCode.INVALID_ARGUMENT, str(error)
                except TimeoutError:
                    refused = grpc.StatusCode.DEADLINE_EXCEEDED, _TOO_LONG
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

    def _admitted(self, context: Context) -> str:
        node, code = self.known(context), grpc.StatusCode
        if node not in self.enrolment.users:
            self.monitor.add("refused_calls", 1, "enrolment")
            raise RefusedCallError(code.PERMISSION_DENIED, "the node is not enrolled")
        busy = f"the node has {_OPEN_CALLS} calls open" if self._open[node] >= _OPEN_CALLS else None
        if not self.rates.admits(node):
            busy = "the node calls too often"
        if busy:
            self.monitor.add("refused_calls", 1, "rate")
            raise RefusedCallError(code.RESOURCE_EXHAUSTED, busy)
        return node


async def _abort(context: Context, code: grpc.StatusCode, sentence: str) -> None:
    try:
        await context.abort(code, sentence)
    except grpc.aio.AbortError as error:
        # gRPC keeps it and raises it again. With a traceback it would keep the call too, and its
        # stream, of which a connection may have few, until Python's collector runs.
        error.with_traceback(None)
