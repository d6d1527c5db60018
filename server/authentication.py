"""How often a node may call: a token bucket for each.

Who calls: an interceptor that lets no call reach a handler before its node is known.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from time import monotonic
from typing import Protocol, TypeAlias, cast
from urllib.parse import unquote

import grpc

from fedpriv.errors import InvalidValueError
from fedpriv.server.certificates import check_node_name
from fedpriv.server.enrolment import CertificateError, EnrolledCertificates, Enrolment
from fedpriv.server.metrics import Monitor, Refusal


class RateLimit:
    """Lets each node call `per_minute` times at once, and as often again in every minute.

    Nodes are those of an enrolment, so there are never more buckets than these.

    Args:
        per_minute: calls, at least 1.
        clock: seconds, never going back.
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


NODE: ContextVar[str] = ContextVar("NODE")
"""The node that the handler of a call speaks with."""
_OPEN_CALLS = 16  # of one node; it needs two or three, and some that are lost without a word
NODE_KEY = "fedpriv-node"
"""Where a node without a certificate says its name, percent-encoded."""

Context: TypeAlias = grpc.aio.ServicerContext
Behaviour = Callable[[object, Context], Awaitable[object]]


class RefusedCallError(Exception):
    """Ends a call with a status and one sentence, which the caller is told.

    Attributes:
        code: what the call ends with.
    """

    def __init__(self, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class UnknownPeerError(RefusedCallError):
    """The caller is not, or no longer, who may call."""

    def __init__(
        self, sentence: str, code: grpc.StatusCode = grpc.StatusCode.UNAUTHENTICATED
    ) -> None:
        super().__init__(code, sentence)


class Identify(Protocol):
    """Names the node behind a call, or raises UnknownPeerError."""

    def __call__(self, context: Context) -> str:
        """Name of the node."""


def certified(certificates: EnrolledCertificates) -> Identify:
    """The node at which the certificate of the TLS connection is enrolled, as of now."""

    def identify(context: Context) -> str:
        held = cast(Mapping[str, list[bytes]], context.auth_context()).get("x509_pem_cert")
        if not held:
            raise UnknownPeerError("the connection shows no certificate")
        try:
            return certificates.node_of(held[0], datetime.now(UTC))
        except CertificateError as error:
            raise UnknownPeerError(f"the certificate is refused: {error}") from error
        except InvalidValueError as error:
            # Only the operator can mend the file, and only the operator should know its path.
            sentence = "the server cannot read its enrolment now"
            raise UnknownPeerError(sentence, grpc.StatusCode.UNAVAILABLE) from error

    return identify


def declared(context: Context) -> str:
    """The node that the caller says it is: for plain text on one machine, where nobody can tell."""
    names = [value for key, value in context.invocation_metadata() or () if key == NODE_KEY]
    try:
        if len(names) != 1:
            raise InvalidValueError(f"the call has {len(names)} metadata {NODE_KEY}; one is needed")
        return check_node_name(unquote(str(names[0]), errors="strict"))
    except ValueError as error:
        raise UnknownPeerError(str(error)) from error


def _begun(behaviour: Behaviour) -> Behaviour:
    """The handler, after headers were sent.

    Sent with the first message, a node that does not read it could not be sent a status any more.
    """

    async def begun(request: object, context: Context) -> object:
        await context.send_initial_metadata(())
        return await behaviour(request, context)

    return begun


def _refusing(behaviour: Behaviour) -> Behaviour:
    """The handler; what it refuses ends the call with a status."""

    async def refusing(request: object, context: Context) -> object:
        try:
            try:
                return await behaviour(request, context)
            except RefusedCallError as error:
                refused = error.code, str(error)
            await _abort(context, *refused)
            return None
        except grpc.aio.InternalError as error:
            # The connection is lost; gRPC would log a traceback of any other error than this.
            raise asyncio.CancelledError from error

    return refusing


async def _abort(context: Context, code: grpc.StatusCode, sentence: str) -> None:
    try:
        await context.abort(code, sentence)
    except grpc.aio.AbortError as error:
        # gRPC keeps it, and raises it again. With a traceback it would keep the call too, and its
        # stream, of which a connection may have few, till Python's collector comes by.
        error.with_traceback(None)


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Checks the caller of every method of every service, then sets `NODE` and hands over.

    Guarantees:
        * No handler is entered by a caller whose certificate is expired, not enrolled or struck
          off, whose node is not enrolled, who calls too often, or has too many calls open.
        * Whatever calls a node leaves open, their number is bounded, and so is their memory.
    """

    def __init__(
        self, identify: Identify, enrolment: Enrolment, rates: RateLimit, monitor: Monitor
    ) -> None:
        self._identify, self._enrolled = identify, frozenset(enrolment.nodes)
        self._rates, self._monitor = rates, monitor
        self._open: Counter[str] = Counter()
        self._ended = monotonic()

    def quiet_for(self) -> float:
        """Seconds since the last call ended; 0 while there is one."""
        return 0.0 if self._open else monotonic() - self._ended

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """The handler of a method, behind the check."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method).rpartition("/")[2]
        given = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                self._guarded(_begun(handler.unary_stream), method), **given
            )
        if handler.stream_unary:
            return grpc.stream_unary_rpc_method_handler(
                self._guarded(handler.stream_unary, method), **given
            )
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                self._guarded(handler.unary_unary, method), **given
            )
        return None  # streams both ways: no method is

    def _guarded(self, behaviour: Behaviour, method: str) -> Behaviour:
        refusing = _refusing(behaviour)

        async def guarded(request: object, context: Context) -> object:
            node = self._admitted(context)
            NODE.set(node)
            began = monotonic()
            self._open[node] += 1
            try:
                return await refusing(request, context)
            finally:
                self._ended = monotonic()
                self._open[node] -= 1
                if not self._open[node]:
                    del self._open[node]
                self._monitor.handled(method, self._ended - began)

        return _refusing(guarded)

    def _admitted(self, context: Context) -> str:
        try:
            node = self._identify(context)
        except UnknownPeerError:
            self._monitor.refused(Refusal.IDENTITY)
            raise
        if node not in self._enrolled:
            self._monitor.refused(Refusal.ENROLMENT)
            raise RefusedCallError(grpc.StatusCode.PERMISSION_DENIED, "the node is not enrolled")
        if not self._rates.admits(node):
            self._monitor.refused(Refusal.RATE)
            raise RefusedCallError(grpc.StatusCode.RESOURCE_EXHAUSTED, "the node calls too often")
        if self._open[node] >= _OPEN_CALLS:
            self._monitor.refused(Refusal.RATE)
            sentence = f"the node has {_OPEN_CALLS} calls open"
            raise RefusedCallError(grpc.StatusCode.RESOURCE_EXHAUSTED, sentence)
        return node
