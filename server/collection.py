"""One attempt at a round: what nodes are told and asked, until when, and whose answer counts."""

import asyncio
import queue
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from time import monotonic
from typing import Self

from fedpriv import wire
from fedpriv.errors import WireError
from fedpriv.experiment.config import Config
from fedpriv.ledger.events import Randomness
from fedpriv.measures.metrics import own_metrics
from fedpriv.privacy.layout import Layout, Tensors
from fedpriv.privacy.round import PartialSum, PrivacyRecords
from fedpriv.report.records import Trouble
from fedpriv.server.enrolment import Enrolment, Hosting, Positions
from fedpriv.training.request import RoundRequest
from fedpriv.training.rounds import TrainingPlan
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire import naming

_NOT_AWAITED = "the server is not waiting for an answer of this node"


def task_of(config: Config) -> wire.TaskDescription:
    """The task by name, for nodes to build."""
    metrics = tuple(own_metrics(config.metrics.report))
    return wire.TaskDescription(**config.model.task, metrics=metrics)


def welcomes(
    config: Config, enrolment: Enrolment, certificate_end: datetime | None = None
) -> Callable[[str], wire.Welcome]:
    """What to tell each node when it connects; the end of the server's certificate, if it has one.

    gRPC does not show a node the server's certificate, and nodes are to warn of its end too.
    """
    task, name, population = task_of(config), enrolment.population_id, enrolment.population
    purpose = config.federation.purpose if config.federation else ""
    end = 0 if certificate_end is None else int(certificate_end.timestamp())
    return lambda node: wire.Welcome(
        name, population, enrolment.users_of(node).copy(), task, purpose, end
    )


def prices(
    plan: TrainingPlan, records: PrivacyRecords, randomness: Randomness
) -> Callable[[RoundRequest], wire.Price]:
    """What a round costs; to be called in the thread that opened the records."""
    seeded = randomness is Randomness.SEEDED

    def price_of(request: RoundRequest) -> wire.Price:
        norms = tuple(g.clipping_norm for g in request.clipping.groups[: len(plan.groups)])
        event, budget = plan.mechanism_at(norms).event, records.budget
        paid = records.open_series(event, plan.run)
        charges = records.ledger.head.count  # before ε: another run may charge in between
        epsilon = records.ledger.epsilon(budget, event if paid is None else None)
        part = 0 if paid is None else paid[0].part
        return wire.Price(event, part, epsilon, budget.delta, charges, seeded)

    return price_of


@dataclass(frozen=True, eq=False)
class RoundTerms:
    """Which attempt at a round nodes are asked to answer, and what an answer may hold."""

    offer: wire.RoundOffer  # to no node yet
    model: Tensors
    expected: Layout  # of sums
    drawn: Mapping[str, Positions]  # by node, the users that were drawn there; secret
    deadline: float  # on the clock of `time.monotonic`

    @classmethod
    def of(cls, request: RoundRequest, hosting: Hosting, price: wire.Price, seconds: float) -> Self:
        """The terms of a request to the nodes that host its users, under a new nonce."""
        model, nonce = wire.model_of(request), secrets.randbits(64)
        offer = wire.RoundOffer.of(request, seconds, price, wire.manifest_of(model), nonce)
        expected, drawn = wire.layout_of_sums(request.clipping), hosting.drawn(request.users)
        return cls(offer, model, expected, drawn, monotonic() + seconds)

    def offer_to(self, node: str) -> wire.RoundOffer | None:
        """What to ask a node of drawn users now; None after the deadline."""
        left, users = self.deadline - monotonic(), self.drawn[node].copy()
        return replace(self.offer, seconds=left, users=users) if left > 0.0 else None

    def misfit(self, node: str, answer: wire.RoundAnswer) -> str | None:
        """Why an answer of a node cannot count, in one sentence, or None."""
        if answer.id != self.offer.id:
            return "the answer is to another round or attempt than the one that is collected"
        if node not in self.drawn:
            return _NOT_AWAITED
        content = answer.content
        if isinstance(content, wire.SummedUpdates) and content.users > self.drawn[node].size:
            return "the sum holds more users than were drawn at the node"
        return None

    def check_sum(self, partial: PartialSum) -> None:
        """Raise WireError for a sum that no users can have contributed.

        `add_up` would count it as zero, but neither the node nor the operator would learn of it.
        """
        clipping, users, weight = self.offer.clipping, partial.users, partial.weight
        if weight > users * clipping.weight_cap:
            raise WireError("the sum claims more weight than its users can have")
        if not clipping.admits(partial.total, users, weight):
            raise WireError("the sum is longer than its users can make it, each clipped")

    def flaw(self, partial: PartialSum) -> tuple[Trouble, str] | None:
        """What the operator should know of a sum that counts, and why."""
        if partial.users and not partial.total.any():
            return Trouble.NOT_FINITE, "all updates of its users are NaN, infinite or zero"
        if partial.users < self.drawn[partial.node].size:
            return Trouble.UNFINISHED, "training of some users failed or took too long"
        return None


class End(StrEnum):
    """Why a connection is over."""

    RUN_OVER = "the run is over"
    SHUTTING_DOWN = "the server is shutting down"
    NEWER = naming.NEWER


class Connection:
    """One open `Connect` call; of what it is told, only the newest waits, or the end."""

    def __init__(self) -> None:
        self.votes_due = 0  # to proposals that were sent
        self._told = asyncio.Event()
        self._next: wire.RoundOffer | Ballot | End | None = None

    def tell(self, what: "wire.RoundOffer | Ballot | End") -> None:
        """Tell the node of a round or the end; after an end, which stays, nothing else."""
        if not isinstance(self._next, End):
            self._next = what
        self._told.set()

    async def next(self, seconds: float) -> "wire.RoundOffer | Ballot | End | None":
        """What to tell the node next; None if there is nothing within these seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._told.wait()
            if not isinstance(self._next, End):
                self._told.clear()
            return self._next
        return None


class Connections:
    """Which nodes are connected; at most one connection per node. For the event loop alone.

    `changed` is called whenever a node came or went.
    """

    def __init__(self, changed: Callable[[], None], clock: Callable[[], float] = monotonic) -> None:
        self._changed, self._clock = changed, clock
        self._began = clock()
        self._open: dict[str, Connection] = {}
        self._left: dict[str, float] = {}
        self._over: End | None = None

    def __len__(self) -> int:
        return len(self._open)

    def connect(self, node: str) -> Connection:
        """A new connection of a node, which ends an older one."""
        if node in self._open:
            self._open[node].tell(End.NEWER)
        connection = self._open[node] = Connection()
        if self._over is not None:
            connection.tell(self._over)
        self._changed()
        return connection

    def disconnect(self, node: str, connection: Connection) -> None:
        """A connection is over; nothing happens if a newer one took its place."""
        if self._open.get(node) is connection:
            del self._open[node]
            self._left[node] = self._clock()
            self._changed()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes that are connected now."""
        return tuple(self._open)

    def of(self, node: str) -> Connection | None:
        """The connection of a node, if it has one."""
        return self._open.get(node)

    def away_since(self, node: str) -> float | None:
        """When the node left, or the server started if it never came; None if it is connected."""
        return None if node in self._open else self._left.get(node, self._began)

    def end_all(self, why: End) -> None:
        """End all connections, and every one that is still to come."""
        self._over = why
        for connection in self._open.values():
            connection.tell(why)


class Ballot:
    """Votes of nodes on a proposal, which is made before the cohort is drawn. For the event loop.

    Votes follow from nodes' settings and the public ledger, so whether a round begins says nothing
    of users. An enrolled user of a node that does not agree is drawn like any other: the node is
    offered the round, and its users count as zero if it declines. Cohort, denominator, noise and
    charge are as if it had agreed, and zero is within every bound on what a user contributes.
    """

    def __init__(self, terms: wire.Proposal) -> None:
        self.terms = terms  # without a nonce
        self._id = replace(terms.id, nonce=secrets.randbits(64))
        proposal = wire.encode_proposal(replace(terms, id=self._id))
        self.message = pb.FromServer(proposal=proposal)  # to all nodes
        self._objections: dict[str, str] = {}

    def count(self, node: str, vote: wire.Vote) -> None:
        """Count the newest vote of a node; one on another proposal does not count."""
        if vote.id == self._id:
            self._objections[node] = vote.objection

    def forget(self, node: str) -> None:
        """A node is asked anew, or for the first time."""
        self._objections.pop(node, None)

    def agrees(self, node: str) -> bool | None:
        """What a node said; None if it has said nothing yet."""
        objection = self._objections.get(node)
        return None if objection is None else not objection


class Collection:
    """Answers of a cohort's nodes, each counted once, until the deadline.

    For the event loop, except `results` and `taken`, which another thread uses.

    Guarantees:
        * A node's answer counts once, whatever it sends again and in whatever order; a node
          whose users were not drawn, and another round or attempt, is refused.
        * No more sums are in memory than may be transferred at once, whoever cancels a call.
        * Nothing counts after the end.
    """

    def __init__(
        self, request: RoundRequest, price: wire.Price, enrolment: Enrolment, seconds: float
    ) -> None:
        self.terms = RoundTerms.of(request, enrolment.hosting, price, seconds)
        self.changed = asyncio.Event()
        self.results: queue.SimpleQueue[PartialSum | None] = queue.SimpleQueue()
        self._taken, self._loop = asyncio.Semaphore(0), asyncio.get_running_loop()
        self._waiting, self._over = dict.fromkeys(self.terms.drawn), False
        self._counted = set[str]()  # nodes with a sum

    @property
    def waiting(self) -> tuple[str, ...]:
        """Nodes that are asked and have not answered."""
        return tuple(self._waiting)

    def offer_to(self, node: str) -> wire.RoundOffer | None:
        """What to ask a node now; None if it is not asked, or has answered."""
        asked = node in self._waiting and not self._over
        return self.terms.offer_to(node) if asked else None

    @property
    def over(self) -> bool:
        """Whether nothing counts any more."""
        return self._over

    @cached_property
    def model_chunks(self) -> Sequence[bytes]:
        """The model as serialised chunks, which all calls share."""
        return [chunk.SerializeToString() for chunk in wire.chunks(wire.pieces(self.terms.model))]

    def refusal(self, node: str, answer: wire.RoundAnswer) -> str | None:
        """Why an answer cannot count, in one sentence; None if it can."""
        late = _NOT_AWAITED if node not in self._waiting or self._over else None
        return self.terms.misfit(node, answer) or late

    def counts_already(self, node: str, answer: wire.RoundAnswer) -> bool:
        """Whether a node sends its answer again, of which a sum counts."""
        return node in self._counted and self.terms.misfit(node, answer) is None

    def settle(self, node: str, partial: PartialSum | None) -> bool:
        """Count what a node sent, or that it sends nothing; False if it came too late.

        `until_taken` must be awaited after each sum that counts.
        """
        if node not in self._waiting or self._over:
            return False
        del self._waiting[node]
        self.changed.set()
        if partial is not None:
            self._counted.add(node)
            self.results.put(partial)
        return True

    async def until_taken(self) -> None:
        """Wait until a sum was taken; who is cancelled meanwhile waits all the same."""
        taking = asyncio.ensure_future(self._taken.acquire())
        try:
            await asyncio.shield(taking)
        except asyncio.CancelledError:
            await asyncio.wait([taking])
            raise

    def taken(self) -> None:
        """The other thread has added what it last read from `results`."""
        self._loop.call_soon_threadsafe(self._taken.release)

    def seconds_left(self, connections: Connections, absent: float, *, fixed: bool) -> float:
        """How long to wait if nothing changes; 0 if the round can end.

        A node that is not connected is waited for `absent` seconds; if `fixed`, the deadline is
        waited for whatever happens.
        """
        end, away = self.terms.deadline, [connections.away_since(node) for node in self._waiting]
        gone = [since for since in away if since is not None]
        if not fixed and len(gone) == len(away):
            end = min(end, max(gone) + absent) if gone else 0.0
        return max(0.0, end - monotonic())

    def finish(self) -> None:
        """Count nothing more; idempotent."""
        if not self._over:
            self._over = True
            self.results.put(None)

    def abandon(self) -> None:
        """Finish, and drop what no thread will take any more."""
        self.finish()
        while not self.results.empty():
            if self.results.get() is not None:
                self._taken.release()
