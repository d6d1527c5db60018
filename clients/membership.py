"""A node's life with its server: connect, answer offers, come back when the connection was lost."""

import asyncio
import logging
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import grpc

from fedpriv.errors import InvalidValueError, WireError
from fedpriv.wire import Hello, RoundId, RoundOffer, Welcome

from .answering import Answering
from .backoff import Backoff
from .exchange import connect
from .newest import Newest
from .screening import DISBELIEF, Auditor
from .worker import Worker

_FINAL = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""How a server refuses a node for good."""
_NEWER = "newer connection"
_LAST_LOOK_SECONDS = 60.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Terms:
    """What a node brings to a server, and on which terms.

    Attributes:
        server: its address, for the log.
        hello: what the node says of itself.
        trusted: import paths that the server may have the node run.
        auditor: reads the ledger; None: nobody does.
        once: whether the end of a run ends the membership.
        backoff: between two connections.
    """

    server: str
    hello: Hello
    trusted: tuple[str, ...]
    auditor: Auditor | None
    once: bool
    backoff: Backoff


@dataclass(frozen=True)
class _Ended:
    """How a connection ended: whether the server had welcomed, and whether the run is over."""

    welcomed: bool
    over: bool


class Membership:
    """One node at one server.

    Guarantees:
        * The newest offer is answered: one that is still worked on is abandoned for it. Work goes
          on while the connection is lost, and when the same is offered again.
        * Of the code that the server names, only what is trusted is run.
        * A node that lost its connection comes back, waiting as the back-off says, anew after each
          welcome.

    Args:
        channel: to the server.
        worker: the node's users.
        answering: answers an offer.
        terms: all else.
    """

    def __init__(
        self, channel: grpc.aio.Channel, worker: Worker, answering: Answering, terms: Terms
    ) -> None:
        self._channel, self._worker, self._answering = channel, worker, answering
        self._terms = terms
        self._work = Newest[RoundId | None]()
        self._prepared: Welcome | None = None

    async def last(self) -> None:
        """Take part until the run is over, or on and on.

        Raises:
            WireError: the server refuses the node for good, or talks nonsense.
            InvalidValueError: it names code that is not trusted, or options that do not fit.
            ModelError: its task cannot be built.
            DataError: the users cannot be loaded again.
            AuditError, LedgerError: nothing follows, and the ledger cannot be believed.
        """
        failures = 0
        try:
            while True:
                ended = await self._connection()
                if ended.over:
                    await self._finish()
                if ended.over and self._terms.once:
                    return
                failures = 0 if ended.welcomed else failures + 1
                backoff = self._terms.backoff
                await asyncio.sleep(backoff.rest() if ended.over else backoff.wait(failures))
        finally:
            await self._work.stop()

    async def _connection(self) -> _Ended:
        welcomed = False
        try:
            async with aclosing(connect(self._channel, self._terms.hello)) as said:
                async for message in said:
                    match message:
                        case Welcome():
                            await self._welcomed(message)
                            welcomed = True
                        case RoundOffer():
                            await self._offered(message)
        except grpc.aio.AioRpcError as error:
            self._refuse_final(error)
            _log.warning("no connection: %s (%r)", error.code().name, error.details())
            return _Ended(welcomed, over=False)
        return _Ended(welcomed, over=True)

    def _refuse_final(self, error: grpc.aio.AioRpcError) -> None:
        """Raise WireError where trying again cannot help."""
        node, server = self._terms.hello.node, self._terms.server
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.ABORTED and _NEWER in details:
            raise WireError(f"another process speaks for node {node!r} at {server}") from error
        if code in _FINAL:
            raise WireError(f"{server} refuses node {node!r}: {details[:400]!r}") from error

    async def _welcomed(self, welcome: Welcome) -> None:
        for path in welcome.task.imports:
            if path not in self._terms.trusted:
                raise InvalidValueError(
                    f"the server wants to run {path!r}; --trust {path!r} allows it"
                )
        if not _same(welcome, self._prepared):
            await self._work.stop()
            await self._worker.prepare(welcome)
        self._prepared = welcome
        _log.info(
            "connected as %s to %s, with %d of the %d users of the population",
            self._terms.hello.node,
            self._terms.server,
            self._worker.users,
            welcome.population,
        )
        if self._terms.auditor is not None and self._work.idle:
            await self._work.begin(None, partial(self._report, self._terms.auditor, welcome))

    async def _offered(self, offer: RoundOffer) -> None:
        if self._prepared is None:
            raise WireError("the server makes an offer before its welcome")
        deadline = asyncio.get_running_loop().time() + offer.seconds
        answer = partial(self._answering.answer, self._prepared, offer, deadline)
        await self._work.begin(offer.id, answer)

    async def _report(self, auditor: Auditor, welcome: Welcome) -> None:
        try:
            await auditor.report(welcome)
        except DISBELIEF as error:
            _log.error("the ledger cannot be believed: %.400s", error)
        except InvalidValueError as error:
            _log.error("the ledger cannot be checked: %.400s", error)
        except grpc.aio.AioRpcError as error:
            _log.warning("the ledger cannot be fetched: %s", error.code().name)

    async def _finish(self) -> None:
        """The run is over: look at the ledger for the last time."""
        await self._work.stop()
        _log.info("the run is over")
        auditor, welcome = self._terms.auditor, self._prepared
        if auditor is None or welcome is None:
            return
        try:
            async with asyncio.timeout(_LAST_LOOK_SECONDS):
                if self._terms.once:
                    await auditor.report(welcome)
                else:
                    await self._report(auditor, welcome)
        except TimeoutError:
            _log.warning("the ledger cannot be fetched: the server does not answer")


def _same(one: Welcome, other: Welcome | None) -> bool:
    """Whether a task that was prepared for the one welcome serves the other."""
    return other is not None and (one.task, one.users.tobytes()) == (
        other.task,
        other.users.tobytes(),
    )
