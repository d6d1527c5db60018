"""`fedpriv join`: connect a node and its users to a server, and answer offers until stopped.

`Membership` keeps a node connected, and `OfferHandler` answers one offer.
"""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from urllib.parse import quote

import grpc
import numpy as np

from fedpriv import wire
from fedpriv.clients.connection import Backoff, FederationStub, identity_of, persist
from fedpriv.clients.consent import Consent, review_of, unlike
from fedpriv.clients.journal import Journal
from fedpriv.clients.ledger_check import DISBELIEF, LedgerVerifier, OfferPolicy
from fedpriv.clients.secure import SecureSums
from fedpriv.clients.worker import HostSettings, Worker, memory_limiter
from fedpriv.errors import FedprivError, InvalidValueError, ModelError, WireError
from fedpriv.privacy.round import PartialSum
from fedpriv.support.logs import expiry, trouble
from fedpriv.wire import Decline, Hello, Proposal, RoundOffer, Terms, Vote, Welcome
from fedpriv.wire.naming import NEWER, binding_of, countersigned

_DAY_SECONDS = 86_400.0
_LAST_CHECK_SECONDS = 60.0
_LONGEST_VOTE_SECONDS = 10.0  # until a vote is sent
_LEAST_MARGIN = 0.05  # share of an offer's time that is reserved for the upload
_NO_MEMORY = "it takes more memory than the node may use"
_LONGEST_REASON = 400  # characters; a reason may hold the name of a run
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeSettings:
    """Settings of a node."""

    server: str  # HOST:PORT
    host: HostSettings
    certificates: Path | None = None  # folder with ca.pem, node.pem and node.key; or give `node`
    node: str | None = None  # name, for plain text on loopback
    consent: Path | None = None  # TOML file with the node's limits; None: no limits
    verify_ledger: bool = False  # whether to read and check the server's ledger
    state: Path | None = None  # folder of the node's journal; None: in the user's state folder
    trusted: tuple[str, ...] = ()  # import paths of code that the server may make the node run
    once: bool = False  # whether to leave when the run is over, instead of waiting for another
    # Address space that this process may take beyond what it and tensors of the task do; None: no
    # limit. The limit is that of the whole process, and is set on Linux only.
    own_mebibytes: int | None = None
    backoff: Backoff = Backoff()  # noqa: RUF009 - frozen, so sharing it is safe


def join(settings: NodeSettings) -> None:
    """Take part until SIGTERM or SIGINT, or with `once` until the run is over; in the main thread.

    Guarantees:
        * after a signal it returns normally, with no process left and no file half-written;
        * this process neither imports torch nor holds users' data;
        * a lost connection never ends it.

    FedprivError: settings or users are unusable, a message of the server is malformed or has fields
    that this version does not know, another process repeatedly connects as the same node, or, with
    `once`, the ledger cannot be believed at the end. If the server refuses a call for any reason,
    or names a task that the node cannot or must not run, the node tries again.
    """
    asyncio.run(_until_stopped(take_part(settings)))


def review(settings: NodeSettings) -> None:
    """Print the first task that the server proposes and its hash, vote "under review", and leave.

    No task is built, whatever the consent says. Signals and errors as for `join`.
    """
    asyncio.run(_until_stopped(show_review(settings)))


async def show_review(settings: NodeSettings) -> None:
    """Print a task for review like `review`, in a running event loop."""
    identity, failures = identity_of(settings.certificates, settings.node), 0
    memory_limiter(settings.own_mebibytes)(0)
    worker = await Worker.start(settings.host)  # the server welcomes a node with its users only
    await worker.close()
    hello = Hello(identity.node, worker.loaded.users_sha256)
    async with FederationStub.open(settings.server, identity) as server:
        while (text := await _first_review(server, hello)) is None:
            await asyncio.sleep(settings.backoff.wait(failures))
            failures += 1
    print(text)  # noqa: T201


async def _first_review(server: FederationStub, hello: Hello) -> str | None:
    """Return the review of the first proposal of a connection; None if it ends before."""
    votes, welcome = asyncio.Queue[Vote](), None
    try:
        async with aclosing(server.connect(hello, votes)) as messages:
            async for message in messages:
                if isinstance(message, Welcome):
                    welcome = message
                elif isinstance(message, Proposal) and welcome is not None:
                    votes.put_nowait(Vote(message.id, "under review"))
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_LONGEST_VOTE_SECONDS):
                            await votes.join()
                    return review_of(welcome, message)
    except grpc.aio.AioRpcError as error:
        _log.warning("no connection: %s (%r)", error.code().name, error.details())
    return None


async def _until_stopped(work: Coroutine[None, None, None]) -> None:
    """Do work until it ends, or SIGTERM or SIGINT cancel it."""
    task = asyncio.create_task(work)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await asyncio.wait([task])
    if task.cancelled():
        _log.info("stopped")
    else:
        task.result()


async def take_part(settings: NodeSettings) -> None:
    """Take part like `join`, in a running event loop, until the task is cancelled."""
    identity, backoff = identity_of(settings.certificates, settings.node), settings.backoff
    consent = Consent() if settings.consent is None else Consent.load(settings.consent)
    allow = memory_limiter(settings.own_mebibytes)
    allow(0)
    folder = _state_folder(settings.state, identity.node)
    async with FederationStub.open(settings.server, identity) as server:
        with Journal(folder / "journal.sqlite") as journal:
            verifier = LedgerVerifier(server, journal, backoff) if settings.verify_ledger else None
            worker = await Worker.start(settings.host)
            if worker.loaded.broken:
                counts = worker.loaded.broken, worker.loaded.users
                _log.warning("%d of %d users count as zero: fedpriv enrol says why", *counts)
            try:
                digests = np.frombuffer(worker.loaded.id_digests, "<i8")
                policy = OfferPolicy(journal, consent, verifier, digests, identity.authorities)
                secure = SecureSums(server, worker, policy, identity, backoff)
                handler = OfferHandler(server, worker, policy, backoff, secure)
                hello = Hello(identity.node, worker.loaded.users_sha256)
                await Membership(settings, hello, handler, allow).last()
            finally:
                await worker.close()


def _state_folder(folder: Path | None, node: str) -> Path:
    """Create the folder of a node's journal, with access for its owner only, and return it.

    The default is fedpriv/NODE in $XDG_STATE_HOME or ~/.local/state (XDG Base Directory 0.8).
    """
    if folder is None:
        home = Path(os.environ.get("XDG_STATE_HOME", ""))
        try:
            base = home if home.is_absolute() else Path.home() / ".local" / "state"
        except RuntimeError as error:
            sentence = "there is no home folder for the journal; --state must name a folder"
            raise InvalidValueError(sentence) from error
        folder = base / "fedpriv" / quote(node, safe=" ")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidValueError(f"{folder} cannot be created: {error.strerror}") from error
    return folder


def _task_key(welcome: Welcome) -> tuple[object, ...]:
    """Return the parts of a welcome that determine whether a task is built, and which."""
    return welcome.task, welcome.users.tobytes(), welcome.purpose


class _CannotTakePartError(Exception):
    """The node cannot or must not run the task of the server."""


class LatestTask:
    """Runs the latest task only; if a task raises, the next call raises the same error."""

    def __init__(self) -> None:
        self._key: object = None
        self._task: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """True if no task is running."""
        return self._task is None or self._task.done()

    async def begin(self, key: object, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Stop an older task and begin this one, unless one with the same key is running."""
        if self.idle or key != self._key:
            await self.stop()
            self._key, self._task = key, asyncio.create_task(work())

    async def stop(self) -> None:
        """Cancel the running task, and wait for its end."""
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.wait([task])
            self._task = None
            if not task.cancelled():
                task.result()


@dataclass(frozen=True)
class OfferHandler:
    """Votes on proposals and answers offers.

    Guarantees:
        * Training begins only after the offer was accepted, and a sum is sent only after its offer
          was recorded in the journal. No attempt is answered with two sums, even after a restart.
        * After a lost connection, calls are repeated until the deadline of the offer.
        * No message of the server, and no failure of training, raises an exception here.
        * Messages to the server and lines of the log reveal nothing about users.
    """

    server: FederationStub
    worker: Worker
    policy: OfferPolicy
    backoff: Backoff
    secure: SecureSums

    async def vote(self, welcome: Welcome, proposal: Proposal) -> Vote:
        """Return the node's vote on a round; it does not depend on users or earlier answers."""
        signature = None
        try:
            objection = await self.policy.objection_to_proposal(welcome, proposal)
            objection = objection or unlike(self.worker.built, proposal)
            if objection is None:
                await self.worker.learn(proposal)
                if proposal.price.event.secure_sum is not None or proposal.head is not None:
                    signature = self._countersignature(welcome, proposal)
        except ModelError as error:
            _log.error("users cannot train as the server proposes: %.400s", error)
            objection = "the node cannot train as proposed"
        except (InvalidValueError, MemoryError) as error:
            _log.error("the proposal cannot be checked: %.400s", str(error) or _NO_MEMORY)
            objection = "the node cannot check the proposal"
        except grpc.aio.AioRpcError as error:
            objection = f"the ledger cannot be fetched: {error.code().name}"
        return Vote(proposal.id, (objection or "")[:_LONGEST_REASON], signature)

    def _countersignature(self, welcome: Welcome, proposal: Proposal) -> wire.Countersignature:
        """Return the node's signature of a proposal; InvalidValueError: it has no certificate."""
        event, identity, key = proposal.price.event, self.secure.identity, b""
        if identity.certificate is None:
            raise InvalidValueError("the node has no certificate to sign its vote with")
        binding = binding_of(welcome.population_name, proposal.id, event, proposal.head)
        if event.secure_sum is not None:
            key = self.secure.fresh_key(event.secure_sum, binding)
        return countersigned(identity.node, key, binding, identity.certificate, identity.key)

    async def answer(self, welcome: Welcome, offer: RoundOffer, deadline: float) -> None:
        """Answer an offer, or take part in its secure sum, and log the outcome.

        The deadline, on the event loop's clock, is that of the upload.
        """
        name, loop = f"round {offer.id.round} of run {offer.id.run!r}", asyncio.get_running_loop()
        began, secure = loop.time(), offer.price.event.secure_sum is not None
        with _logged(name):
            # The steps of a secure sum after the upload take a third of the time before it.
            async with asyncio.timeout_at(deadline + secure * offer.seconds):
                if (answer := await self._answer(welcome, offer, deadline)) is None:
                    _log.info("%s: answered with a masked sum", name)
                    return
                receipt = await self._send(offer, answer)
                if not receipt.accepted:  # so that the server does not wait for another answer
                    await self._send(offer, Decline("the answer was refused"))
            if not receipt.accepted:
                _log.warning("%s: the server refuses the answer: %r", name, receipt.reason)
            elif isinstance(answer, Decline):
                _log.info("%s: declined: %s", name, answer.reason)
            else:
                _log.info("%s: answered after %.1f s", name, loop.time() - began)

    async def _send(self, offer: RoundOffer, answer: PartialSum | Decline) -> wire.Receipt:
        return await persist(lambda: self.server.upload(offer.id, answer), self.backoff)

    async def _answer(
        self, welcome: Welcome, offer: RoundOffer, deadline: float
    ) -> PartialSum | Decline | None:
        """Return the answer to send; None if the node has taken part in a secure sum."""
        try:
            objection = await self.policy.objection(welcome, offer)
            if objection := objection or unlike(self.worker.built, offer):
                return Decline(objection[:_LONGEST_REASON])
            if offer.price.event.secure_sum is not None:
                await self.secure.take_part(welcome, offer, deadline)
                return None
            self.policy.countersigned(welcome, offer)
            answer = await self._trained(offer, deadline)
            if isinstance(answer, PartialSum) and (objection := self.policy.record(welcome, offer)):
                return Decline(objection[:_LONGEST_REASON])
        except (InvalidValueError, *DISBELIEF, MemoryError) as error:
            _log.error("the offer cannot be checked or recorded: %.400s", str(error) or _NO_MEMORY)
            return Decline("the node cannot check or record the offer")
        return answer

    async def _trained(self, offer: RoundOffer, deadline: float) -> PartialSum | Decline:
        began = asyncio.get_running_loop().time()
        model = offer.model(self.worker.built.statistics)
        try:
            tensors = await persist(lambda: self.server.download(offer.id, model), self.backoff)
        except WireError as error:
            _log.error("the model did not arrive as it was declared: %s", error)
            return Decline("the model did not arrive as it was declared")
        except grpc.aio.AioRpcError as error:
            # An answer is needed, or the round would last until its deadline.
            _log.error("the model cannot be fetched: %s (%r)", error.code().name, error.details())
            return Decline("the model cannot be fetched")
        now = asyncio.get_running_loop().time()
        # A sum has up to twice the bytes of the model, and uploads are often slower than downloads.
        margin = max(4.0 * (now - began), _LEAST_MARGIN * (deadline - began))
        seconds = max(0.5 * (deadline - now), deadline - now - margin)
        try:
            request = offer.request(tensors)
            del tensors
            partial_sum = await self.worker.train(request, seconds)
        except FedprivError as error:
            # The text of the error may contain users' data.
            _log.error("training failed: %s", type(error).__name__)
            partial_sum = None
        return Decline("training failed") if partial_sum is None else partial_sum


@contextmanager
def _logged(round_name: str) -> Iterator[None]:
    """Log why a round is not answered; of these errors, only a cancellation is raised."""
    try:
        yield
    except asyncio.CancelledError:
        _log.info("%s: left unfinished", round_name)
        raise
    except TimeoutError:
        _log.warning("%s: not answered, its deadline has passed", round_name)
    except grpc.aio.AioRpcError as error:
        _log.warning("%s: not answered: %s (%r)", round_name, error.code().name, error.details())
    except (FedprivError, MemoryError) as error:
        _log.warning("%s: not answered: %.400s", round_name, str(error) or _NO_MEMORY)


class Membership:
    """One node at one server.

    Guarantees:
        * The latest offer is answered, and work on older ones is abandoned. Work continues while
          the connection is lost, or if the same offer arrives again.
        * Only trusted code that the server names is run. If the node does not consent to a purpose
          or model, no task is built, and the node votes against each round. If the consent names
          tasks by their hash, a task is built once a round with such a hash is proposed or offered.
        * At most one vote waits to be sent, even if the server sends proposals and reads no votes.
        * After a lost connection, the node connects again with exponential back-off, which each
          welcome resets; unless newer connections of the node end two of its own in a row.
        * If the node's certificate is not valid yet, or expires within 30 days, a warning is logged
          at once and daily.
    """

    def __init__(
        self,
        settings: NodeSettings,
        hello: Hello,
        handler: OfferHandler,
        allow: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Call `allow` with the number of components of the tensors of each task that is built."""
        self._settings, self._hello, self._handler = settings, hello, handler
        self._work, self._voting = LatestTask(), LatestTask()
        self._allow = allow
        self._prepared: Welcome | None = None
        self._built: object = None  # `_task_key` of the task that the worker has built
        self._trouble = ""  # why the node is not connected; empty: it is
        self._objection = ""  # to the last proposed round
        self._replaced = 0  # successive connections that a newer one of the node has ended

    async def last(self) -> None:
        """Take part forever, or with `once` until the run is over; errors as for `join`."""
        failures, backoff = 0, self._settings.backoff
        warning = asyncio.create_task(self._warn_daily())
        try:
            while True:
                welcomed, over = await self._connection()
                if over:
                    await self._work.stop()
                    _log.info("the run is over")
                    if self._prepared is not None and self._settings.verify_ledger:
                        await self._report(self._prepared, _LAST_CHECK_SECONDS)
                if over and self._settings.once:
                    return
                failures = 0 if welcomed else failures + 1
                await asyncio.sleep(backoff.wait() if over else backoff.wait(failures))
        finally:
            warning.cancel()
            await self._work.stop()
            await self._voting.stop()

    async def _warn_daily(self) -> None:
        while (certificate := self._handler.secure.identity.certificate) is not None:
            begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
            if reason := expiry(end, datetime.now(UTC), begin):
                trouble(_log, self._hello.node, "certificate", reason)
            await asyncio.sleep(_DAY_SECONDS)

    async def _connection(self) -> tuple[bool, bool]:
        """Stay connected; return whether the node was welcomed, and whether the run is over."""
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
            reason = f"no connection: {error.code().name} ({error.details()!r})"
            if self._replaced:
                _log.info(reason)
            else:
                self._warn(reason)
            return welcomed, False
        except _CannotTakePartError as error:
            self._warn(str(error))
            return False, False
        finally:
            await self._voting.stop()  # its vote belongs to this connection
        return welcomed, True

    async def _begin(self, welcome: Welcome, terms: Terms, votes: "asyncio.Queue[Vote]") -> None:
        if not self._handler.policy.consent.objection_to_settings(welcome, terms):
            await self._build(welcome)
        if isinstance(terms, Proposal):
            await self._voting.begin(terms.id, partial(self._vote, welcome, terms, votes))
        else:
            deadline = asyncio.get_running_loop().time() + terms.seconds
            answer = partial(self._handler.answer, welcome, terms, deadline)
            await self._work.begin(terms.id, answer)

    async def _vote(
        self, welcome: Welcome, proposal: Proposal, votes: "asyncio.Queue[Vote]"
    ) -> None:
        vote = await self._handler.vote(welcome, proposal)
        if vote.objection:
            level = logging.DEBUG if vote.objection == self._objection else logging.INFO
            details = vote.id.round, vote.id.run, vote.objection
            _log.log(level, "round %d of run %r: not agreed to: %s", *details)
        self._objection = vote.objection
        while not votes.empty():  # older votes, which the server has not read
            votes.get_nowait()
            votes.task_done()
        votes.put_nowait(vote)

    def _warn(self, trouble: str) -> None:
        """Log why the node does not take part; as a warning only if the reason is new."""
        _log.log(logging.DEBUG if trouble == self._trouble else logging.WARNING, trouble)
        self._trouble = trouble

    def _check_recoverable(self, error: grpc.aio.AioRpcError, replaced: int) -> None:
        node, server = self._hello.node, self._settings.server
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.ABORTED and NEWER in details:
            self._replaced = replaced + 1
            if replaced:  # the first may be by a process that had the node's certificate before
                raise WireError(f"another process speaks for node {node!r} at {server}") from error

    async def _welcomed(self, welcome: Welcome) -> None:
        for path in welcome.task.imports:
            if path not in self._settings.trusted:
                allow = f"--trust {path!r} allows it"
                raise _CannotTakePartError(f"the server wants to run {path!r}; {allow}")
        worker, previous_welcome = self._handler.worker, self._prepared
        if previous_welcome is None or _task_key(previous_welcome) != _task_key(welcome):
            await self._work.stop()
            self._prepared = self._built = None
            if objection := self._handler.policy.consent.objection_to_task(welcome):
                _log.warning("no task is built: %s", objection)
            elif self._handler.policy.consent.tasks is None:
                await self._build(welcome)
        self._prepared = welcome
        names = f"{self._hello.node} to {self._settings.server}"
        users = f"{worker.loaded.users} of the {welcome.population} users of the population"
        _log.info("connected as %s, with %s", names, users)
        if self._settings.verify_ledger and self._work.idle:
            await self._work.begin(None, partial(self._report, welcome))

    async def _build(self, welcome: Welcome) -> None:
        """Build the task of a welcome, unless it is built or the node does not consent to it."""
        if self._built == _task_key(welcome) or (
            self._handler.policy.consent.objection_to_task(welcome)
        ):
            return
        _log.info("building the task with model %r", welcome.task.model)
        try:
            await self._handler.worker.prepare(welcome)
        except FedprivError as error:
            raise _CannotTakePartError(f"the server's task cannot be run: {error}") from error
        self._built, built = _task_key(welcome), self._handler.worker.built
        self._allow(built.parameters.dimension + built.statistics.dimension)

    async def _report(self, welcome: Welcome, seconds: float | None = None) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._handler.policy.report(welcome)
        except DISBELIEF as error:
            if seconds is not None and self._settings.once:
                raise  # a node that leaves fails, and one that stays logs it
            _log.error("the ledger cannot be believed: %.400s", error)
        except (InvalidValueError, MemoryError) as error:
            _log.error("the ledger cannot be checked: %.400s", str(error) or _NO_MEMORY)
        except TimeoutError:
            _log.warning("the ledger cannot be fetched: the server does not answer")
        except grpc.aio.AioRpcError as error:
            _log.warning("the ledger cannot be fetched: %s", error.code().name)
