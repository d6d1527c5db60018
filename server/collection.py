"""One attempt at a round: offers to nodes, votes, deadlines, and the answers that are accepted."""

import asyncio
import queue
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from functools import cached_property
from time import monotonic
from typing import TypeVar

from fedpriv import wire
from fedpriv.errors import WireError
from fedpriv.experiment.config import Config
from fedpriv.ledger.events import Randomness
from fedpriv.measures.metrics import own_metrics
from fedpriv.privacy.round import PartialSum, PrivacyRecords
from fedpriv.report.records import Trouble
from fedpriv.secure_sums.parameters import Grid
from fedpriv.server.enrolment import Enrolment
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.request import RoundRequest
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire import naming

_MOST_SIGNATURES = 32  # in an offer, about 2 KB each
# Returns the head of the ledger, signed for a proposal; None in plain text.
SignHead = Callable[[wire.RoundId], wire.SignedHead | None]
Result = TypeVar("Result")
_NOT_AWAITED = "the server is not waiting for an answer of this node"


def task_of(config: Config) -> wire.TaskDescription:
    """Return the description from which nodes build the task."""
    metrics = tuple(own_metrics(config.metrics.report))
    return wire.TaskDescription(**config.model.task, metrics=metrics)


def welcomes(config: Config, enrolment: Enrolment) -> Callable[[str], wire.Welcome]:
    """Return a function from a node's name to the welcome that it receives when it connects."""
    task, name, population = task_of(config), enrolment.population_id, enrolment.population
    section = config.federation
    purpose = section.purpose if section else ""
    nodes = enrolment.enrolled if section and section.secure_sum else ()
    return lambda node: wire.Welcome(
        name, population, enrolment.users_of(node).copy(), task, purpose, nodes
    )


def prices(
    plan: TrainingPlan, records: PrivacyRecords, randomness: Randomness
) -> Callable[[RoundRequest], wire.Price]:
    """Return a function that prices a round; call it in the thread that opened the records."""
    seeded = randomness is Randomness.SEEDED

    def price_of(request: RoundRequest) -> wire.Price:
        norms = tuple(g.clipping_norm for g in request.clipping.groups[: len(plan.groups)])
        event, budget = plan.mechanism_at(norms).event, records.budget
        series = records.open_series(event, plan.run)
        charges = records.ledger.head.count  # before ε: another run may charge in between
        epsilon = records.ledger.epsilon(budget, event if series is None else None)
        part = 0 if series is None else series[0].part
        return wire.Price(event, part, epsilon, budget.delta, charges, seeded)

    return price_of


def flaw_of(partial: PartialSum, drawn: int) -> tuple[Trouble, str] | None:
    """Return a trouble with the sum of a node with so many drawn users, and why, or None."""
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
    """Reasons for which the server ends a connection."""

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

        `deadline` is on the clock of `time.monotonic`; the result is 0 if nobody is waited for.
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

        Unless the sum is secure, they only show nodes that others know the same ledger, so of many
        nodes some are chosen by chance.
        """
        agreed = {n: self._votes[n].countersignature for n in connected if self.agrees(n)}
        signed = sorted(node for node, signature in agreed.items() if signature)
        if self.terms.price.event.secure_sum is None and len(signed) > _MOST_SIGNATURES:
            signed = sorted(secrets.SystemRandom().sample(signed, _MOST_SIGNATURES))
        return tuple(signature for node in signed if (signature := agreed[node]))

    def forget(self, node: str) -> None:
        """Discard the vote of a node, which is asked again."""
        self._votes.pop(node, None)

    def agrees(self, node: str) -> bool | None:
        """Return whether a node agrees; None if it has not voted."""
        vote = self._votes.get(node)
        return None if vote is None else not vote.objection


class Collection:
    """Collects the answers of a cohort's nodes, one per node, until the deadline.

    Used in the event loop, except `results` and `taken`, which another thread uses.

    Guarantees:
        * One answer of a node is accepted, no matter what else it sends in which order. Answers
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
        # Then the nodes of the roster draw their users themselves.
        self.masked = price.event.secure_sum is not None
        manifest, nonce = wire.manifest_of(self._model), ballot.id.nonce
        # To all drawn users; `offer_to` selects those of a node.
        offer = wire.RoundOffer.of(request, seconds, price, manifest, nonce, roster)
        self.offer = replace(offer, fixed_length=fixed_length, head=ballot.head)
        # Node → its drawn users; secret.
        self.drawn = enrolment.drawn(request.users)
        if self.masked:
            self.drawn = {member.node: request.users for member in roster}
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
        left = self.deadline - monotonic()
        if not self._awaits(node) or left <= 0.0:
            return None
        return replace(self.offer, seconds=left, users=self.drawn[node].copy())

    @cached_property
    def model_chunks(self) -> Sequence[bytes]:
        """The model as serialised chunks, which all calls share."""
        return [chunk.SerializeToString() for chunk in wire.chunks(wire.pieces(self._model))]

    def _misfit(self, node: str, answer: wire.RoundAnswer) -> str | None:
        if answer.id != self.offer.id:
            return "the answer is to another round or attempt than the one that is collected"
        if node not in self.drawn:
            return _NOT_AWAITED
        content = answer.content
        if isinstance(content, wire.SummedUpdates | wire.MaskedSum):
            if isinstance(content, wire.MaskedSum) != self.masked:
                return "the sum is masked in a round that is not, or is not in one that is"
            if content.users > self.drawn[node].size:
                return "the sum holds more users than were drawn at the node"
        return None

    def refusal(self, node: str, answer: wire.RoundAnswer) -> str | None:
        """Return why an answer cannot be accepted, in one sentence, or None."""
        return self._misfit(node, answer) or (None if self._awaits(node) else _NOT_AWAITED)

    def counts_already(self, node: str, answer: wire.RoundAnswer) -> bool:
        """Return whether this repeats an answer whose sum was accepted."""
        return node in self._accepted and self._misfit(node, answer) is None

    def tensors(self, content: wire.SummedUpdates | wire.MaskedSum) -> wire.Manifest:
        """Return the manifest of the sum that follows the header of an answer."""
        dimension = self.offer.clipping.layout.dimension
        if isinstance(content, wire.MaskedSum):
            grid = Grid.of(self.offer.price.event, len(self.offer.roster))
            return content.tensors(dimension, grid.dtype)
        return content.tensors(dimension)

    def check_sum(self, partial: PartialSum) -> tuple[Trouble, str] | None:
        """Return a flaw of a sum; WireError if its users cannot have contributed it.

        `add_up` would count such a sum as zero too, but would not inform node and operator.
        """
        if self.masked:  # then nothing is known about it
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
        """Await no answer of other nodes any more."""
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
