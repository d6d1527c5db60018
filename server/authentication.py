"""Who is calling: an interceptor that lets no call reach a handler before its node is known.

It also bounds how often a node may call, and how many calls it may have open.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from time import monotonic
from typing import TypeAlias
from urllib.parse import unquote

import grpc

from fedpriv.errors import InvalidValueError, WireError
from fedpriv.server.enrolment import (
    CertificateError,
    EnrolledCertificates,
    Enrolment,
    check_node_name,
)
from fedpriv.server.monitoring import Monitor, Refusal

NODE: ContextVar[str] = ContextVar("NODE")  # the node that the handler of a call speaks with
NODE_KEY = "fedpriv-node"  # metadata with a node's name, percent-encoded, in plain text
_TOO_LONG = "it took too long, the node began another, or the round is over"
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


def _unknown(sentence: str) -> UnknownPeerError:
    return UnknownPeerError(grpc.StatusCode.UNAUTHENTICATED, sentence)


def by_certificate(certificates: EnrolledCertificates) -> Identify:
    """The node at which the certificate of the TLS connection is enrolled, as of now."""

    def identify(context: Context) -> str:
        shown = context.auth_context().get("x509_pem_cert")
        if not shown:
            raise _unknown("the connection shows no certificate")
        try:
            return certificates.node_of(shown[0], datetime.now(UTC))
        except CertificateError as error:
            raise _unknown(f"the certificate is refused: {error}") from error
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
        raise _unknown(str(error)) from error


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


class Authentication(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Checks the caller of every method of every service, then sets `NODE` and hands over.

    Guarantees:
        * No handler is entered by a caller whose certificate is expired, not enrolled or struck
          off, whose node is not enrolled, who calls too often, or has too many calls open.
        * However many calls a node leaves open, their number and their memory are bounded.
        * What a handler refuses, cannot parse or waits too long for ends its call with a status.
    """

    def __init__(
        self, identify: Identify, enrolment: Enrolment, rates: RateLimit, monitor: Monitor
    ) -> None:
        self._identify, self._enrolled = identify, frozenset(enrolment.nodes)
        self._rates, self._monitor = rates, monitor
        self._open: Counter[str] = Counter()
        self._ended = monotonic()

    def idle_seconds(self) -> float:
        """Seconds since the last call ended; 0 while one is open."""
        return 0.0 if self._open else monotonic() - self._ended

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """The handler of a method, behind the check."""
        handler = await continuation(handler_call_details)
        name = str(handler_call_details.method).rpartition("/")[2]
        for kind in ("unary_unary", "unary_stream", "stream_unary"):  # no method streams both ways
            if method := getattr(handler, kind, None):
                checked = self._checked(method, name, streaming=kind == "unary_stream")
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
                    self._end_call(node, name, began)

        return checked

    def _end_call(self, node: str, name: str, began: float) -> None:
        self._ended = monotonic()
        self._open[node] -= 1
        if not self._open[node]:
            del self._open[node]
        self._monitor.handled(name, self._ended - began)

    def _admitted(self, context: Context) -> str:
        try:
            node = self._identify(context)
        except UnknownPeerError:
            self._monitor.refused(Refusal.IDENTITY)
            raise
        if node not in self._enrolled:
            self._monitor.refused(Refusal.ENROLMENT)
            raise RefusedCallError(grpc.StatusCode.PERMISSION_DENIED, "the node is not enrolled")
        busy = f"the node has {_OPEN_CALLS} calls open" if self._open[node] >= _OPEN_CALLS else None
        if not self._rates.admits(node):
            busy = "the node calls too often"
        if busy:
            self._monitor.refused(Refusal.RATE)
            raise RefusedCallError(grpc.StatusCode.RESOURCE_EXHAUSTED, busy)
        return node


async def _abort(context: Context, code: grpc.StatusCode, sentence: str) -> None:
    try:
        await context.abort(code, sentence)
    except grpc.aio.AbortError as error:
        # gRPC keeps it and raises it again. With a traceback it would keep the call too, and its
        # stream, of which a connection may have few, until Python's collector runs.
        error.with_traceback(None)
