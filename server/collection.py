"""One attempt at a round: offers to nodes, votes, deadlines, and the answers that are accepted.

In a secure sum the server also relays what nodes send to each other, and opens their sum. See
`fedpriv.secure_sums.protocol` for the steps and for what each protects.
"""

import asyncio
import logging
import math
import queue
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from time import monotonic
from typing import TypeVar

import numpy as np

from fedpriv import wire
from fedpriv.errors import InvalidValueError, WireError
from fedpriv.ledger.events import SecureSum
from fedpriv.privacy.round import OpenedSum, PartialSum
from fedpriv.report.records import Trouble
from fedpriv.secure_sums.parameters import Grid
from fedpriv.secure_sums.protocol import Roster, unmasked
from fedpriv.server.enrolment import Enrolment
from fedpriv.training.request import RoundRequest
from fedpriv.wire import RoundId, Stage, Step, codec, naming
from fedpriv.wire import federation_pb2 as pb

_log = logging.getLogger(__name__)
_MOST_SIGNATURES = 32  # in an offer, about 2 KB each
# Shares of a round's time after which steps end; in between, users train and nodes upload.
_SHARED, _UPLOADED, _SIGNED, _OPENED = 0.125, 0.75, 0.875, 1.0
Items = Mapping[str, bytes]  # by node
# Returns the head of the ledger, signed for a proposal; None in plain text.
SignHead = Callable[[wire.RoundId], wire.SignedHead | None]
Result = TypeVar("Result")
_NOT_AWAITED = "the server is not waiting for an answer of this node"


def flaw_of(partial: PartialSum, drawn: int) -> tuple[Trouble, str] | None:
    """Return a trouble with the sum of a node with `drawn` drawn users, and why, or None."""
    if partial.users and not partial.total.any():
        return Trouble.NOT_FINITE, "all updates of its users are NaN, infinite or zero"
    if partial.users < drawn:
        return Trouble.UNFINISHED, "training of some users failed or took too long"
    return None


async def completed(work: Awaitable[Result]) -> Result:
    """Return the result of work that is done even if this task is cancelled meanwhile."""
    future = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        await asyncio.wait([future])
        raise


class End(StrEnum):
    """The server's reasons to end a connection."""

    RUN_OVER = "the run is over"
    SHUTTING_DOWN = "the server is shutting down"
    NEWER = naming.NEWER


class Connection:
    """One open `Connect` call, with at most one message that waits to be sent: the newest."""

    def __init__(self) -> None:
        self.votes_due = 0  # number of proposals that were sent and not voted on
        self._ready = asyncio.Event()
        self._message: wire.RoundOffer | Ballot | End | None = None

    def tell(self, message: "wire.RoundOffer | Ballot | End") -> None:
        """Send the node a message instead of any that still waits; an end is never replaced."""
        if not isinstance(self._message, End):
            self._message = message
        self._ready.set()

    async def next(self, seconds: float) -> "wire.RoundOffer | Ballot | End | None":
        """Return the next message for the node; None if there is none within these seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ready.wait()
            if not isinstance(self._message, End):
                self._ready.clear()
            return self._message
        return None


class Connections:
    """The connections of nodes, at most one per node; used in the event loop only.

    `changed` is called whenever a node connects or disconnects.
    """

    def __init__(self, changed: Callable[[], None], clock: Callable[[], float] = monotonic) -> None:
        self._changed, self._clock = changed, clock
        self._began = clock()
        self._open: dict[str, Connection] = {}
        self._left: dict[str, float] = {}  # when each node disconnected
        self._end: End | None = None  # set by `end_all`

    def __len__(self) -> int:
        return len(self._open)

    def connect(self, node: str) -> Connection:
        """Return a new connection of a node, which ends an older one."""
        if node in self._open:
            self._open[node].tell(End.NEWER)
        connection = self._open[node] = Connection()
        if self._end is not None:
            connection.tell(self._end)
        self._changed()
        return connection

    def disconnect(self, node: str, connection: Connection) -> None:
        """Remove a connection; does nothing if a newer one has replaced it."""
        if self._open.get(node) is connection:
            del self._open[node]
            self._left[node] = self._clock()
            self._changed()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes that are connected now."""
        return tuple(self._open)

    def of(self, node: str) -> Connection | None:
        """Return the connection of a node, if it has one."""
        return self._open.get(node)

    def away_since(self, node: str) -> float | None:
        """Return when the node left, or when the server started if it never came.

        None if the node is connected.
        """
        return None if node in self._open else self._left.get(node, self._began)

    def seconds_left(self, waiting: Iterable[str], deadline: float, absent: float) -> float:
        """Return how long to wait for nodes: until the deadline, or for `absent` after all left.

        `deadline` is on the clock of `time.monotonic`; the result is 0 if `waiting` is empty.
        """
        since = [self.away_since(node) for node in waiting]
        departures = [time for time in since if time is not None]
        if len(departures) == len(since):
            deadline = min(deadline, max(departures) + absent) if departures else 0.0
        return max(0.0, deadline - monotonic())

    def end_all(self, why: End) -> None:
        """End all present and future connections."""
        self._end = why
        for connection in self._open.values():
            connection.tell(why)


class Ballot:
    """Votes of nodes on a proposal, made before the cohort is drawn; used in the event loop only.

    Votes depend on nodes' settings and the public ledger, so whether a round begins reveals nothing
    about users. Users of a node that does not agree are drawn like all others: the node is offered
    the round, and its users count as zero if it declines. Cohort, denominator, noise and charge are
    the same as if it had agreed, and zero satisfies every bound on a user's contribution.
    """

    def __init__(self, terms: wire.Proposal, signed_head: SignHead = lambda _: None) -> None:
        self.terms = terms  # without nonce and head
        self.id = replace(terms.id, nonce=secrets.randbits(64))
        self.head = signed_head(self.id)
        proposal = wire.PROPOSAL.encode(replace(terms, id=self.id, head=self.head))
        self.message = pb.FromServer(proposal=proposal)  # to all nodes
        self._votes: dict[str, wire.Vote] = {}

    def count(self, node: str, vote: wire.Vote) -> None:
        """Record the newest vote of a node, unless it is on another proposal."""
        if vote.id == self.id:
            self._votes[node] = vote

    def roster(self, connected: Sequence[str]) -> tuple[wire.Countersignature, ...]:
        """Return the signatures of the connected nodes that agree, sorted by name.

        Unless the sum is secure, they only show nodes that others know the same ledger, so a random
        sample of many signatures is enough.
        """
        agreed = {n: self._votes[n].countersignature for n in connected if self.agrees(n)}
        signed = sorted(node for node, signature in agreed.items() if signature)
        if self.terms.price.event.secure_sum is None and len(signed) > _MOST_SIGNATURES:
            signed = sorted(secrets.SystemRandom().sample(signed, _MOST_SIGNATURES))
        return tuple(signature for node in signed if (signature := agreed[node]))

    def forget(self, node: str) -> None:
        """Discard the vote of a node that is asked again."""
        self._votes.pop(node, None)

    def agrees(self, node: str) -> bool | None:
        """Return whether a node agrees; None if it has not voted."""
        vote = self._votes.get(node)
        return None if vote is None else not vote.objection


class Collection:
    """Collects the answers of a cohort's nodes, one per node, until the deadline.

    Used in the event loop, except `results` and `taken`, which another thread uses.

    Guarantees:
        * One answer of a node is accepted, no matter what else it sends and when. Answers
          from nodes without drawn users, and to other rounds or attempts, are refused.
        * Memory holds at most as many sums as may be transferred at once, even if calls are
          cancelled.
        * No answer is accepted after the end.
    """

    def __init__(
        self,
        request: RoundRequest,
        ballot: Ballot,
        roster: tuple[wire.Countersignature, ...],
        enrolment: Enrolment,
        seconds: float,
        *,
        fixed_length: bool = False,
    ) -> None:
        self._model, price = wire.model_of(request), ballot.terms.price
        # If true, the nodes of the roster draw their users themselves.
        self.masked = price.event.secure_sum is not None
        # To all drawn users; `offer_to` selects those of a node.
        seconds *= _UPLOADED if self.masked else 1.0
        offer = wire.RoundOffer.of(request, seconds, price, ballot.id.nonce, roster)
        self.offer = replace(offer, fixed_length=fixed_length, head=ballot.head)
        # Node → its drawn users; secret.
        nobody = {member.node: request.users for member in roster}
        self.drawn = nobody if self.masked else enrolment.drawn(request.users)
        self.deadline = monotonic() + seconds
        self.changed, self.over = asyncio.Event(), False
        self.results: queue.SimpleQueue[PartialSum | None] = queue.SimpleQueue()
        self._taken, self._loop = asyncio.Semaphore(0), asyncio.get_running_loop()
        self._waiting = dict.fromkeys(self.drawn)
        self._accepted = set[str]()  # nodes whose sum was accepted

    @property
    def waiting(self) -> tuple[str, ...]:
        """Nodes with drawn users that have not answered."""
        return tuple(self._waiting)

    def _awaits(self, node: str) -> bool:
        return node in self._waiting and not self.over

    def offer_to(self, node: str) -> wire.RoundOffer | None:
        """Return the offer to send to a node now; None if no answer of it is awaited."""
        seconds_left = self.deadline - monotonic()
        if not self._awaits(node) or seconds_left <= 0.0:
            return None
        return replace(self.offer, seconds=seconds_left, users=self.drawn[node].copy())

    @cached_property
    def model_chunks(self) -> Sequence[bytes]:
        """The model as serialised chunks, which all calls share."""
        return [chunk.SerializeToString() for chunk in wire.chunks(wire.pieces(self._model))]

    def _misfit(self, node: str, answer: wire.RoundAnswer) -> str | None:
        if answer.id != self.offer.id:
            return "the answer is to another round or attempt than the current one"
        if node not in self.drawn:
            return _NOT_AWAITED
        content = answer.content
        if isinstance(content, wire.SummedUpdates):
            if content.masked != self.masked:
                return "only one of the sum and the round is masked; both or neither must be"
            if content.users > self.drawn[node].size:
                return "the sum holds more users than were drawn at the node"
        return None

    def refusal(self, node: str, answer: wire.RoundAnswer) -> str | None:
        """Return why an answer cannot be accepted, in one sentence, or None."""
        return self._misfit(node, answer) or (None if self._awaits(node) else _NOT_AWAITED)

    def counts_already(self, node: str, answer: wire.RoundAnswer) -> bool:
        """Return whether this repeats an answer whose sum was accepted."""
        return node in self._accepted and self._misfit(node, answer) is None

    def assembler(self, content: wire.SummedUpdates) -> wire.Assembler:
        """Return an assembler of the sum that follows the header of an answer."""
        size = self._dtype_of(content).itemsize * self.offer.clipping.layout.dimension
        return wire.Assembler(size, size)

    def _dtype_of(self, content: wire.SummedUpdates) -> codec.Number:
        if not content.masked:
            return content.dtype
        return Grid.of(self.offer.price.event, len(self.offer.roster)).dtype.newbyteorder("<")

    async def assembled(
        self, node: str, content: wire.SummedUpdates, assembler: wire.Assembler
    ) -> tuple[PartialSum, tuple[Trouble, str] | None]:
        """Return a node's sum and its flaw, if any; errors as for `check_sum`."""

        def checked() -> tuple[PartialSum, tuple[Trouble, str] | None]:
            total = assembler.finish().view(self._dtype_of(content)).astype(np.int64, copy=False)
            partial = PartialSum(node, content.users, total, content.weight)
            return partial, self.check_sum(partial)

        return await completed(asyncio.to_thread(checked))  # it holds memory until it ends

    def check_sum(self, partial: PartialSum) -> tuple[Trouble, str] | None:
        """Return a flaw of a sum; WireError if its users cannot have contributed it.

        `add_up` would count such a sum as zero too, but would not inform node and operator.
        """
        if self.masked:  # then nothing can be checked
            return None
        clipping, users, weight = self.offer.clipping, partial.users, partial.weight
        if weight > users * clipping.weight_cap:
            raise WireError("the sum claims more weight than its users can have")
        if not clipping.admits(partial.total, users, weight):
            raise WireError("the sum is longer than its users can make it, each clipped")
        return flaw_of(partial, self.drawn[partial.node].size)

    def settle(self, node: str, partial: PartialSum | None) -> bool:
        """Accept a node's sum, or None for a node without one; return False if it is too late.

        After each accepted sum, `until_taken` must be awaited.
        """
        if not self._awaits(node):
            return False
        del self._waiting[node]
        self.changed.set()
        if partial is not None:
            self._accepted.add(node)
            self.results.put(partial)
        return True

    async def until_taken(self) -> None:
        """Wait until the other thread has taken a sum, even if this task is cancelled meanwhile."""
        await completed(self._taken.acquire())

    def taken(self) -> None:
        """Report, from the other thread, that it has added the sum it last read from `results`."""
        self._loop.call_soon_threadsafe(self._taken.release)

    def seconds_left(self, connections: Connections, absent: float, *, fixed: bool) -> float:
        """Return how long to wait if nothing changes, in seconds; 0 if the round can end.

        The round waits for a disconnected node for `absent` seconds. If `fixed`, it always lasts
        until the deadline.
        """
        if fixed:
            return max(0.0, self.deadline - monotonic())
        return connections.seconds_left(self._waiting, self.deadline, absent)

    def await_only(self, nodes: Iterable[str]) -> None:
        """Stop waiting for answers of other nodes."""
        self._waiting = dict.fromkeys(sorted(set(nodes) & self._waiting.keys()))
        self.changed.set()

    def finish(self) -> None:
        """Accept no more answers; idempotent."""
        if not self.over:
            self.over = True
            self.results.put(None)

    def abandon(self) -> None:
        """Finish, and drop the sums that were not taken."""
        self.finish()
        while not self.results.empty():
            if self.results.get() is not None:
                self._taken.release()


class Exchange:
    """The messages of the nodes of a roster, step by step, and the answer to each step.

    Used in the event loop only. A node's first message of a step counts, and a repeated one gets
    the same answer, so that a lost connection does no harm.
    """

    def __init__(self, attempt: RoundId, nodes: Sequence[str], least: int, grace: float) -> None:
        self.attempt, self._nodes = attempt, frozenset(nodes)
        self._least, self._grace = least, grace
        self._sent: dict[Stage, dict[str, Items]] = {stage: {} for stage in Stage}
        self._arrived, self._stopped = asyncio.Event(), False
        self._answers: dict[Stage, Callable[[str], Step]] = {}
        self._answered = {stage: asyncio.Event() for stage in Stage}

    def awaits(self, node: str, step: Step) -> bool:
        """Return whether the node may take this step."""
        return step.id == self.attempt and node in self._nodes

    async def answer_to(self, node: str, step: Step) -> Step:
        """Record a node's step, unless its time is over; return the answer, once there is one."""
        stage = step.stage
        if not self._answered[stage].is_set():
            self._sent[stage].setdefault(node, step.items)
            self._arrived.set()
            await self._answered[stage].wait()
        return self._answers[stage](node)

    async def sent(
        self, stage: Stage, nodes: Sequence[str], seconds: Callable[[Sequence[str]], float]
    ) -> dict[str, Items]:
        """Return what these nodes sent in a step: when all have, when time is up, or after `stop`.

        `seconds` returns how long to wait for some nodes if nothing changes. Once the least number
        of nodes have taken the step, the others have `grace` seconds.
        """
        items_by_node, grace_end = self._sent[stage], math.inf
        while not self._stopped:
            missing_nodes = [node for node in nodes if node not in items_by_node]
            if len(nodes) - len(missing_nodes) >= self._least:
                grace_end = min(grace_end, monotonic() + self._grace)
            if (seconds_left := min(seconds(missing_nodes), grace_end - monotonic())) <= 0.0:
                break
            self._arrived.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds_left):
                    await self._arrived.wait()
        return {node: items_by_node[node] for node in nodes if node in items_by_node}

    def wake(self) -> None:
        """Recompute how long to wait, because a node has come or left."""
        self._arrived.set()

    def stop(self) -> None:
        """Stop waiting for steps of nodes."""
        self._stopped = True
        self.wake()

    def answer(
        self,
        stage: Stage,
        nodes: Sequence[str] = (),
        items_of: Callable[[str], Items] | None = None,
    ) -> None:
        """Answer a step to these nodes, with the items of each; to all others, it is void."""

        def answered(node: str) -> Step:
            if node not in nodes:
                return Step(self.attempt, stage)
            return Step(self.attempt, stage, tuple(nodes), items_of(node) if items_of else {})

        self._answers[stage] = answered
        self._answered[stage].set()

    def end(self) -> None:
        """Answer all steps that have no answer: the attempt is void, or over."""
        for stage in Stage:
            if not self._answered[stage].is_set():
                self.answer(stage)


@dataclass(eq=False)
class SecureCollection:
    """One attempt at a round with a secure sum, in the event loop: `collect`, then `open`."""

    secure: SecureSum
    roster: Roster
    collection: Collection  # of the masked sums
    watch: Callable[[], Coroutine[None, None, None]]  # ends the collection when it is time
    connections: Connections
    seconds: float  # of the whole attempt
    absent: float  # how long a step waits for the last d nodes, and for nodes that have all left

    def __post_init__(self) -> None:
        self._began, names = monotonic(), self.roster.names
        self._least = len(names) - self.secure.dropouts
        self.exchange = Exchange(self.collection.offer.id, names, self._least, self.absent)
        self._sharers: list[str] = []
        self._survivors: list[str] = []
        self._grid = Grid.of(self.collection.offer.price.event, len(names))
        dimension = self.collection.offer.clipping.layout.dimension
        self._total = np.zeros(dimension, f"u{self._grid.dtype.itemsize}")

    async def collect(self) -> bool:
        """Collect masked sums and signatures; return whether they suffice to open the total."""
        names, exchange = self.roster.names, self.exchange
        to = {name: set(linked) for name, linked in self.roster.neighbours(self.secure).items()}
        sealed = await exchange.sent(Stage.SHARE, names, self._until(_SHARED))
        self._sharers = [name for name in sealed if sealed[name].keys() == to[name]]
        if not self._suffices(self._sharers, "send shares"):
            return False

        def received(node: str) -> Items:
            return {n: sealed[n][node] for n in self._sharers if n in to[node]}

        self.collection.await_only(self._sharers)
        exchange.answer(Stage.SHARE, self._sharers, received)
        self._survivors = sorted(await self._add_uploads())
        if not self._suffices(self._survivors, "upload"):
            return False
        exchange.answer(Stage.AGREE, self._survivors)
        signed = await exchange.sent(Stage.SIGN, self._survivors, self._until(_SIGNED))
        self._signatures = {n: items[n] for n, items in signed.items() if n in items}
        return self._suffices(list(self._signatures), "sign", self.secure.quorum(len(names)))

    async def _add_uploads(self) -> list[str]:
        """Add up the masked sums that arrive in time; return their nodes."""
        arrived, watching = list[str](), asyncio.create_task(self.watch())
        try:
            while (masked := await asyncio.to_thread(self.collection.results.get)) is not None:
                self._total += masked.total.astype(self._total.dtype)
                arrived.append(masked.node)
                self.collection.taken()
        finally:
            watching.cancel()
        return arrived

    def _suffices(self, nodes: Sequence[str], step: str, least: int | None = None) -> bool:
        required = least or self._least
        if len(nodes) < required:
            _log.warning("%d nodes %s; the round needs %d", len(nodes), step, required)
        return len(nodes) >= required

    async def open(self) -> OpenedSum | None:
        """Return the sum once nodes have opened it; None if too few do. Charge the round first."""
        survivors = self._survivors
        self.exchange.answer(Stage.SIGN, survivors, lambda _: self._signatures)
        shares = await self.exchange.sent(Stage.OPEN, survivors, self._until(_OPENED))
        lists = self.roster, self.secure, self._sharers, survivors
        try:
            total = await asyncio.to_thread(unmasked, self._total, *lists, shares)
        except InvalidValueError as error:
            _log.warning("the sum cannot be opened: %s", error)
            return None
        steps = self._grid.steps(total, self.collection.offer.clipping)
        return OpenedSum(steps, len(survivors))

    def _until(self, share: float) -> Callable[[Sequence[str]], float]:
        """Return how long to wait for nodes if a step ends after this share of the time."""
        deadline = self._began + share * self.seconds
        return lambda waiting: self.connections.seconds_left(waiting, deadline, self.absent)
