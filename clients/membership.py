"""One piece of work at a time, the newest.

Answering one offer: object or train, and say so to the server before its deadline.

A node's life with its server: connect, answer offers, come back when the connection was lost.

What `fedpriv join` does: bring a node's users to a server, until it is stopped.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar
from urllib.parse import quote

import grpc

from fedpriv.clients.audit import DISBELIEF, Auditor, Screening
from fedpriv.clients.connection import (
    Backoff,
    Identity,
    connect,
    download,
    identity_of,
    open_channel,
    persist,
    upload,
)
from fedpriv.clients.consent import Consent
from fedpriv.clients.journal import Diary
from fedpriv.clients.messages import Source
from fedpriv.clients.worker import Worker
from fedpriv.errors import FedprivError, InvalidValueError, WireError
from fedpriv.privacy.round import PartialSum
from fedpriv.wire import Decline, Hello, Receipt, RoundId, RoundOffer, Welcome

Key = TypeVar("Key")


class Newest(Generic[Key]):
    """Does the newest work that it was given; older work that is not done is cancelled first.

    Work that raises makes the next call raise the same.
    """

    def __init__(self) -> None:
        self._doing: tuple[Key, asyncio.Task[None]] | None = None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self._doing is None or self._doing[1].done()

    async def begin(self, key: Key, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Begin work, once the older was cancelled and has ended; work under way goes on.

        Args:
            key: names the work.
            work: called if no work of that name is under way.
        """
        if not self.idle and self._doing is not None and self._doing[0] == key:
            return
        await self.stop()
        self._doing = (key, asyncio.create_task(work()))

    async def stop(self) -> None:
        """Cancel what is under way, and wait for its end."""
        if self._doing is None:
            return
        _, task = self._doing
        task.cancel()
        await asyncio.wait([task])
        self._doing = None
        if not task.cancelled():
            task.result()


_LEAST_MARGIN = 0.05  # of the time that an offer leaves, for the upload
_LONGEST_REASON = 400  # characters; a reason may hold the name of a run
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answering:
    """How a node answers offers.

    Guarantees:
        * Nobody trains before the offer was found acceptable and is written down in the diary.
        * A connection that is lost is waited for until the deadline of the offer, not longer.
        * Nothing that the server sends, and no failure of training, raises here.
        * What is said to the server and logged says nothing of users.

    Attributes:
        channel: to the server.
        worker: trains; prepared for the welcome.
        screening: what the node asks of an offer.
        diary: where the node writes down what it takes part in.
        backoff: for a connection that was lost.
    """

    channel: grpc.aio.Channel
    worker: Worker
    screening: Screening
    diary: Diary
    backoff: Backoff

    async def answer(self, welcome: Welcome, offer: RoundOffer, deadline: float) -> None:
        """Answer an offer, and log in one line what came of it.

        Args:
            welcome: what the server said before it.
            offer: what it offers.
            deadline: of the offer, on the clock of the event loop.
        """
        what = f"round {offer.id.round} of run {offer.id.run!r}"
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout_at(deadline):
                answer = await self._answer(welcome, offer, deadline)
                receipt = await self._sent(offer, answer)
                if not receipt.accepted:
                    # One that is not told so would wait for another answer until the deadline.
                    await self._sent(offer, Decline("the answer was refused"))
        except asyncio.CancelledError:
            _log.info("%s: left unfinished", what)
            raise
        except TimeoutError:
            _log.warning("%s: not answered, its deadline has passed", what)
        except grpc.aio.AioRpcError as error:
            _log.warning("%s: not answered: %s (%r)", what, error.code().name, error.details())
        except WireError as error:
            _log.warning("%s: not answered: %s", what, error)
        else:
            seconds = asyncio.get_running_loop().time() - began
            if not receipt.accepted:
                _log.warning("%s: the server refuses the answer: %r", what, receipt.reason)
            elif isinstance(answer, Decline):
                _log.info("%s: declined: %s", what, answer.reason)
            else:
                _log.info("%s: answered after %.1f s", what, seconds)

    async def _sent(self, offer: RoundOffer, answer: PartialSum | Decline) -> Receipt:
        return await persist(lambda: upload(self.channel, offer.id, answer), self.backoff)

    async def _answer(
        self, welcome: Welcome, offer: RoundOffer, deadline: float
    ) -> PartialSum | Decline:
        try:
            objection = await self.screening.objection(welcome, offer)
            if objection is not None:
                return Decline(objection[:_LONGEST_REASON])
            self.diary.record(welcome.population_name, offer, datetime.now(UTC))
        except InvalidValueError as error:
            _log.error("the offer cannot be checked, or not written down: %.400s", error)
            return Decline("the node cannot check the offer, or not write it down")
        return await self._trained(offer, deadline)

    async def _trained(self, offer: RoundOffer, deadline: float) -> PartialSum | Decline:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            tensors = await persist(lambda: download(self.channel, offer), self.backoff)
        except WireError as error:
            _log.error("the model did not arrive as it was declared: %s", error)
            return Decline("the model did not arrive as it was declared")
        except grpc.aio.AioRpcError as error:
            # Without an answer, the round would last until its deadline.
            _log.error("the model cannot be fetched: %s (%r)", error.code().name, error.details())
            return Decline("the model cannot be fetched")
        now = loop.time()
        # A sum has up to twice the bytes of the model, and the way up is often the slower one.
        margin = max(4.0 * (now - began), _LEAST_MARGIN * (deadline - began))
        seconds = max(0.5 * (deadline - now), deadline - now - margin)
        try:
            request = offer.request(tensors)
            del tensors
            trained = await self.worker.train(request, seconds)
        except FedprivError as error:
            # Its text may hold users' data.
            _log.error("training failed: %s", type(error).__name__)
            trained = None
        return Decline("training failed") if trained is None else trained


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


@dataclass(frozen=True)
class Joining:
    """A node that wants to take part.

    Attributes:
        server: HOST:PORT.
        users: where the users' data are, as `clients.users.load_users` reads it.
        certificates: folder with ca.pem, node.pem and node.key; None: plain text, on loopback.
        node: name of the node, where there are no certificates.
        consent: TOML file with the limits of the node; None: it has none.
        verify_ledger: read and check the server's ledger before and after taking part.
        state: folder in which the node remembers; None: one of its own in the user's state folder.
        trusted: import paths of models, losses and metrics that the server may have the node run.
        device: where to train.
        memory_mebibytes: that training may take; None: without limit.
        seconds: longest for one round; None: until its deadline.
        activations: of the model while users train, as `InProcessTransport` has them.
        processes: how many train side by side, likewise.
        once: leave when the run is over, instead of waiting for another.
        backoff: how long to wait when the connection was lost.
    """

    server: str
    users: str
    certificates: Path | None = None
    node: str | None = None
    consent: Path | None = None
    verify_ledger: bool = False
    state: Path | None = None
    trusted: tuple[str, ...] = ()
    device: str = "auto"
    memory_mebibytes: int | None = None
    seconds: float | None = None
    activations: str = "float32"
    processes: int | None = None
    once: bool = False
    backoff: Backoff = Backoff()  # noqa: RUF009 - frozen, so sharing it is safe


def join(joining: Joining) -> None:
    """Take part until the run is over, if `once`, or until SIGTERM or SIGINT; in the main thread.

    Guarantees:

    * a signal ends it by an ordinary return, with no process left and nothing half-written;
    * this process neither imports torch nor holds users' data;
    * a lost connection never ends it.

    Raises:
        InvalidValueError: a setting is not legal, a file of the node's cannot be used, or the
            server names code that is not trusted.
        DataError: the users cannot be loaded.
        ModelError: the task cannot be built.
        WireError: the server refuses the node for good, or talks nonsense.
        AuditError, LedgerError: with `once`, the ledger cannot be believed at the end.
    """
    asyncio.run(_until_stopped(joining))


async def _until_stopped(joining: Joining) -> None:
    taking_part = asyncio.create_task(take_part(joining))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, taking_part.cancel)
    await asyncio.wait([taking_part])
    if taking_part.cancelled():
        _log.info("stopped")
    else:
        taking_part.result()


async def take_part(joining: Joining) -> None:
    """As `join`, for a running event loop; it ends when its task is cancelled."""
    identity = identity_of(joining.certificates, joining.node)
    consent = Consent() if joining.consent is None else Consent.load(joining.consent)
    source = _source(joining)
    folder = _state_folder(joining.state, identity.node)
    async with open_channel(joining.server, identity) as channel:
        with Diary.open(folder / "diary.sqlite") as diary:
            worker = await Worker.start(source)
            try:
                await _membership(joining, identity, channel, worker, consent, diary).last()
            finally:
                await worker.close()


def _source(joining: Joining) -> Source:
    return Source(
        joining.users,
        device=joining.device,
        memory_mebibytes=joining.memory_mebibytes,
        seconds=joining.seconds,
        activations=joining.activations,
        processes=joining.processes,
    )


def _membership(
    joining: Joining,
    identity: Identity,
    channel: grpc.aio.Channel,
    worker: Worker,
    consent: Consent,
    diary: Diary,
) -> Membership:
    backoff = joining.backoff
    auditor = Auditor(channel, diary, consent, backoff) if joining.verify_ledger else None
    screening = Screening(consent, diary, auditor)
    hello = Hello(identity.node, worker.users_sha256)
    terms = Terms(joining.server, hello, joining.trusted, auditor, joining.once, backoff)
    return Membership(channel, worker, Answering(channel, worker, screening, diary, backoff), terms)


def _state_folder(given: Path | None, node: str) -> Path:
    """The folder in which a node remembers, open to its owner only.

    By default it is fedpriv/NODE, percent-encoded, in $XDG_STATE_HOME or ~/.local/state (XDG Base
    Directory Specification 0.8).
    """
    home = os.environ.get("XDG_STATE_HOME", "")
    base = Path(home) if Path(home).is_absolute() else Path.home() / ".local" / "state"
    folder = given or base / "fedpriv" / quote(node, safe=" ")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidValueError(f"{folder} cannot be made: {error.strerror}") from error
    return folder
