"""What `fedpriv join` does: bring a node's users to a server and answer its offers until stopped.

`Membership` keeps a node connected, and `OfferHandler` answers one offer.
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
from urllib.parse import quote

import grpc
import numpy as np

from fedpriv.clients.connection import Backoff, FederationStub, identity_of, persist
from fedpriv.clients.consent import Consent
from fedpriv.clients.journal import Journal
from fedpriv.clients.ledger_check import DISBELIEF, LedgerVerifier, OfferPolicy
from fedpriv.clients.worker import HostSettings, Worker
from fedpriv.errors import FedprivError, InvalidValueError, ModelError, WireError
from fedpriv.privacy.round import PartialSum
from fedpriv.support.logs import expiry, trouble
from fedpriv.wire import Decline, Hello, Proposal, Receipt, RoundOffer, Terms, Vote, Welcome
from fedpriv.wire.naming import NEWER

# Codes of calls of which only the node can mend the cause: its name, or its version. Another
# enrolment mends the rest, and a server that was started with a wrong one must not lose its nodes.
_FINAL = "INVALID_ARGUMENT UNIMPLEMENTED"
_SERVER = "the server"
_DAY_SECONDS = 86_400.0
_LAST_LOOK_SECONDS = 60.0
_LEAST_MARGIN = 0.05  # of the time that an offer leaves, for the upload
_LONGEST_REASON = 400  # characters; a reason may hold the name of a run
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeSettings:
    """How a node takes part."""

    server: str  # HOST:PORT
    host: HostSettings
    certificates: Path | None = None  # folder with ca.pem, node.pem and node.key; or give `node`
    node: str | None = None  # name, for plain text on loopback
    consent: Path | None = None  # TOML file with the node's limits; None: it has none
    verify_ledger: bool = False  # read and check the server's ledger
    state: Path | None = None  # folder of the node's journal; None: in the user's state folder
    trusted: tuple[str, ...] = ()  # import paths of code that the server may have the node run
    once: bool = False  # leave when the run is over, instead of waiting for another
    backoff: Backoff = Backoff()  # noqa: RUF009 - frozen, so sharing it is safe


def join(settings: NodeSettings) -> None:
    """Take part until the run is over, if `once`, or until SIGTERM or SIGINT; in the main thread.

    Guarantees:
        * a signal ends it by an ordinary return, with no process left and nothing half-written;
        * this process neither imports torch nor holds users' data;
        * a lost connection never ends it.

    It raises a FedprivError for settings or users that cannot be used, a server that speaks another
    protocol or refuses the node's name, another process that goes on speaking for the node, and,
    with `once`, for a ledger that cannot be believed at the end. A server that refuses the node for
    another reason, or names a task that the node cannot or must not run, is tried again.
    """

    async def until_stopped() -> None:
        taking_part = asyncio.create_task(take_part(settings))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, taking_part.cancel)
        await asyncio.wait([taking_part])
        if taking_part.cancelled():
            _log.info("stopped")
        else:
            taking_part.result()

    asyncio.run(until_stopped())


async def take_part(settings: NodeSettings) -> None:
    """As `join`, on a running event loop, until its task is cancelled."""
    identity, backoff = identity_of(settings.certificates, settings.node), settings.backoff
    consent = Consent() if settings.consent is None else Consent.load(settings.consent)
    folder = _state_folder(settings.state, identity.node)
    async with FederationStub.open(settings.server, identity) as server:
        with Journal(folder / "journal.sqlite") as journal:
            verifier = LedgerVerifier(server, journal, backoff) if settings.verify_ledger else None
            worker = await Worker.start(settings.host)
            try:
                digests = np.frombuffer(worker.loaded.id_digests, "<i8")
                policy = OfferPolicy(journal, consent, verifier, digests)
                handler = OfferHandler(server, worker, policy, backoff)
                hello = Hello(identity.node, worker.loaded.users_sha256)
                await Membership(settings, hello, handler, identity.certificate_end).last()
            finally:
                await worker.close()


def _state_folder(given: Path | None, node: str) -> Path:
    """The folder of a node's journal, open to its owner only.

    By default it is fedpriv/NODE in $XDG_STATE_HOME or ~/.local/state (XDG Base Directory 0.8).
    """
    folder = given
    if folder is None:
        home = Path(os.environ.get("XDG_STATE_HOME", ""))
        try:
            base = home if home.is_absolute() else Path.home() / ".local" / "state"
        except RuntimeError as error:
            sentence = "there is no home folder to remember in; --state must name a folder"
            raise InvalidValueError(sentence) from error
        folder = base / "fedpriv" / quote(node, safe=" ")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidValueError(f"{folder} cannot be created: {error.strerror}") from error
    return folder


def _task_key(welcome: Welcome) -> tuple[object, ...]:
    """All that decides whether a task is built, and which."""
    return welcome.task, welcome.users.tobytes(), welcome.purpose


class _CannotTakePartError(Exception):
    """The node cannot do, or must not do, what a server welcomes it to."""


class LatestTask:
    """Runs the latest task it was given; the next call raises what a task has raised."""

    def __init__(self) -> None:
        self._key: object = None
        self._task: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """Whether no task is running."""
        return self._task is None or self._task.done()

    async def begin(self, key: object, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Begin a task after the end of an older one; one of the same key goes on instead."""
        if self.idle or key != self._key:
            await self.stop()
            self._key, self._task = key, asyncio.create_task(work())

    async def stop(self) -> None:
        """Cancel what is running, and wait for its end."""
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait([task])
            self._task = None
            if not task.cancelled():
                task.result()


@dataclass(frozen=True)
class OfferHandler:
    """How a node answers offers.

    Guarantees:
        * No training begins before the offer was found acceptable, and no sum is sent before its
          offer is in the journal. No offer has two sums, whatever else is lost or restarted.
        * A lost connection is retried until the deadline of the offer, not longer.
        * Nothing that the server sends, and no failure of training, raises here.
        * What is said to the server and logged says nothing of users.
    """

    server: FederationStub
    worker: Worker
    policy: OfferPolicy
    backoff: Backoff

    async def vote(self, welcome: Welcome, proposal: Proposal) -> Vote:
        """Whether the node agrees to a round, whatever its users and earlier answers are."""
        try:
            objection = await self.policy.objection_to_proposal(welcome, proposal)
            if objection is None:
                await self.worker.learn(proposal)
        except ModelError as error:
            _log.error("users cannot train as the server proposes: %.400s", error)
            objection = "the node cannot train as proposed"
        except InvalidValueError as error:
            _log.error("the proposal cannot be checked: %.400s", error)
            objection = "the node cannot check the proposal"
        except grpc.aio.AioRpcError as error:
            objection = f"the ledger cannot be fetched: {error.code().name}"
        return Vote(proposal.id, (objection or "")[:_LONGEST_REASON])

    async def answer(self, welcome: Welcome, offer: RoundOffer, deadline: float) -> None:
        """Answer an offer by its deadline, on the event loop's clock, and log the outcome."""
        what, loop = f"round {offer.id.round} of run {offer.id.run!r}", asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout_at(deadline):
                answer = await self._answer(welcome, offer, deadline)
                receipt = await self._send(offer, answer)
                if not receipt.accepted:  # or the server would wait for another until the deadline
                    await self._send(offer, Decline("the answer was refused"))
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
            if not receipt.accepted:
                _log.warning("%s: the server refuses the answer: %r", what, receipt.reason)
            elif isinstance(answer, Decline):
                _log.info("%s: declined: %s", what, answer.reason)
            else:
                _log.info("%s: answered after %.1f s", what, loop.time() - began)
                if answer.users and not answer.total.any():
                    why = "all updates of the users are NaN, infinite or zero; look at their data"
                    _log.warning("%s: %s", what, why)

    async def _send(self, offer: RoundOffer, answer: PartialSum | Decline) -> Receipt:
        return await persist(lambda: self.server.upload(offer.id, answer), self.backoff)

    async def _answer(
        self, welcome: Welcome, offer: RoundOffer, deadline: float
    ) -> PartialSum | Decline:
        try:
            if objection := await self.policy.objection(welcome, offer):
                return Decline(objection[:_LONGEST_REASON])
            answer = await self._trained(offer, deadline)
            if isinstance(answer, PartialSum) and (late := self.policy.record(welcome, offer)):
                return Decline(late[:_LONGEST_REASON])
        except InvalidValueError as error:
            _log.error("the offer cannot be checked or recorded: %.400s", error)
            return Decline("the node cannot check or record the offer")
        return answer

    async def _trained(self, offer: RoundOffer, deadline: float) -> PartialSum | Decline:
        began = asyncio.get_running_loop().time()
        try:
            tensors = await persist(lambda: self.server.download(offer), self.backoff)
        except WireError as error:
            _log.error("the model did not arrive as it was declared: %s", error)
            return Decline("the model did not arrive as it was declared")
        except grpc.aio.AioRpcError as error:
            # Without an answer, the round would last until its deadline.
            _log.error("the model cannot be fetched: %s (%r)", error.code().name, error.details())
            return Decline("the model cannot be fetched")
        now = asyncio.get_running_loop().time()
        # A sum has up to twice the bytes of the model, and uploads are often the slower way.
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


class Membership:
    """One node at one server.

    Guarantees:
        * The latest offer is answered; work on an older one is abandoned for it. Work goes on while
          the connection is lost, and when the same is offered again.
        * Of the code that the server names, only what is trusted is run. No task is built for a
          purpose, or with a model, that the node does not consent to; it votes against each round.
        * However much the server proposes and reads nothing, one vote waits for it.
        * A node that lost its connection comes back, waiting as the back-off says, anew after each
          welcome; not so if a newer connection of the node ends two of its own in a row.
        * A certificate that ends within 30 days, its own or the server's, is warned of at once and
          daily.
    """

    def __init__(
        self,
        settings: NodeSettings,
        hello: Hello,
        handler: OfferHandler,
        certificate_end: datetime | None = None,
    ) -> None:
        self._settings, self._hello, self._handler = settings, hello, handler
        self._work, self._voting = LatestTask(), LatestTask()
        self._ends: dict[str, datetime] = {}  # of certificates
        if certificate_end is not None:
            self._ends[hello.node] = certificate_end
        self._prepared: Welcome | None = None
        self._trouble = ""  # why the node is not connected; empty: it is
        self._objection = ""  # to the last round that was proposed
        self._replaced = 0  # connections in a row that a newer one of the node has ended

    async def last(self) -> None:
        """Take part until the run is over, if `once`, or forever; raises what `join` raises."""
        failures, backoff = 0, self._settings.backoff
        warning = asyncio.create_task(self._warn_daily())
        try:
            while True:
                welcomed, over = await self._connection()
                if over:
                    await self._finish()
                if over and self._settings.once:
                    return
                failures = 0 if welcomed else failures + 1
                await asyncio.sleep(backoff.wait() if over else backoff.wait(failures))
        finally:
            warning.cancel()
            await self._work.stop()
            await self._voting.stop()

    async def _warn_daily(self) -> None:
        while True:
            for whose in self._ends:
                self._warn_of_end(whose)
            await asyncio.sleep(_DAY_SECONDS)

    def _warn_of_end(self, whose: str) -> None:
        if why := expiry(self._ends[whose], datetime.now(UTC)):
            trouble(_log, whose, "certificate", why)

    async def _connection(self) -> tuple[bool, bool]:
        """Stay connected; whether the server had welcomed, and whether the run is over."""
        welcomed, votes = False, asyncio.Queue[Vote]()
        replaced, self._replaced = self._replaced, 0
        try:
            async with aclosing(self._handler.server.connect(self._hello, votes)) as messages:
                async for message in messages:
                    if isinstance(message, Welcome):
                        await self._welcomed(message)
                        welcomed, self._trouble = True, ""
                    elif self._prepared is not None:
                        await self._begin(self._prepared, message, votes)
        except grpc.aio.AioRpcError as error:
            self._check_recoverable(error, replaced)
            why = f"no connection: {error.code().name} ({error.details()!r})"
            if self._replaced:
                _log.info(why)
            else:
                self._warn(why)
            return welcomed, False
        except _CannotTakePartError as error:
            self._warn(str(error))
            return False, False
        finally:
            await self._voting.stop()  # its vote belongs to this connection
        return welcomed, True

    async def _begin(self, welcome: Welcome, said: Terms, votes: "asyncio.Queue[Vote]") -> None:
        if isinstance(said, Proposal):
            await self._voting.begin(said.id, partial(self._vote, welcome, said, votes))
        else:
            deadline = asyncio.get_running_loop().time() + said.seconds
            answer = partial(self._handler.answer, welcome, said, deadline)
            await self._work.begin(said.id, answer)

    async def _vote(
        self, welcome: Welcome, proposal: Proposal, votes: "asyncio.Queue[Vote]"
    ) -> None:
        vote = await self._handler.vote(welcome, proposal)
        if vote.objection:
            level = logging.DEBUG if vote.objection == self._objection else logging.INFO
            what = vote.id.round, vote.id.run, vote.objection
            _log.log(level, "round %d of run %r: not agreed to: %s", *what)
        self._objection = vote.objection
        while not votes.empty():  # of a round that is over; a server may read none of them
            votes.get_nowait()
        votes.put_nowait(vote)

    def _warn(self, trouble: str) -> None:
        """Log why the node does not take part, once as long as the reason is the same."""
        _log.log(logging.DEBUG if trouble == self._trouble else logging.WARNING, trouble)
        self._trouble = trouble

    def _check_recoverable(self, error: grpc.aio.AioRpcError, replaced: int) -> None:
        node, server = self._hello.node, self._settings.server
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.ABORTED and NEWER in details:
            self._replaced = replaced + 1
            if replaced:  # the first may be one that had the node's certificate before
                raise WireError(f"another process speaks for node {node!r} at {server}") from error
        if code.name in _FINAL.split():
            raise WireError(f"{server} refuses node {node!r}: {details[:400]!r}") from error

    async def _welcomed(self, welcome: Welcome) -> None:
        for path in welcome.task.imports:
            if path not in self._settings.trusted:
                allow = f"--trust {path!r} allows it"
                raise _CannotTakePartError(f"the server wants to run {path!r}; {allow}")
        worker, old = self._handler.worker, self._prepared
        if old is None or _task_key(old) != _task_key(welcome):
            await self._work.stop()
            self._prepared = None
            if objection := self._handler.policy.consent.objection_to_task(welcome):
                _log.warning("no task is built: %s", objection)
            else:
                await self._build(welcome)
        self._prepared = welcome
        where = f"{self._hello.node} to {self._settings.server}"
        hosted = f"{worker.loaded.users} of the {welcome.population} users of the population"
        _log.info("connected as %s, with %s", where, hosted)
        end = datetime.fromtimestamp(welcome.certificate_end, UTC)
        if welcome.certificate_end and end != self._ends.get(_SERVER):
            self._ends[_SERVER] = end
            self._warn_of_end(_SERVER)
        if self._settings.verify_ledger and self._work.idle:
            await self._work.begin(None, partial(self._report, welcome))

    async def _build(self, welcome: Welcome) -> None:
        _log.info("building the task with model %r", welcome.task.model)
        try:
            await self._handler.worker.prepare(welcome)
        except FedprivError as error:
            raise _CannotTakePartError(f"the server's task cannot be run: {error}") from error

    async def _report(self, welcome: Welcome) -> None:
        try:
            await self._handler.policy.report(welcome)
        except DISBELIEF as error:
            _log.error("the ledger cannot be believed: %.400s", error)
        except InvalidValueError as error:
            _log.error("the ledger cannot be checked: %.400s", error)
        except grpc.aio.AioRpcError as error:
            _log.warning("the ledger cannot be fetched: %s", error.code().name)

    async def _finish(self) -> None:
        await self._work.stop()
        _log.info("the run is over")
        if self._prepared is None or not self._settings.verify_ledger:
            return
        # A node that leaves fails if the ledger cannot be believed; one that stays logs it.
        report = self._handler.policy.report if self._settings.once else self._report
        try:
            async with asyncio.timeout(_LAST_LOOK_SECONDS):
                await report(self._prepared)
        except TimeoutError:
            _log.warning("the ledger cannot be fetched: the server does not answer")
