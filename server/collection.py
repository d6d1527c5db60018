"""What one attempt at a round asks of the nodes, and which of their answers can count.

Which nodes are connected, and what each is to be told next.

One attempt at a round while its answers come in: who is asked, who answered, and until when.
"""

import asyncio
import queue
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from time import monotonic
from typing import Self

from fedpriv.privacy.layout import Layout, Tensors
from fedpriv.privacy.round import PartialSum, RoundRequest
from fedpriv.server.enrolment import Enrolment, Hosting, Positions
from fedpriv.wire import (
    Answer,
    Price,
    RoundId,
    RoundOffer,
    SummedUpdates,
    chunks,
    layout_of_sums,
    manifest_of,
    model_of,
    pieces,
)


@dataclass(frozen=True, eq=False)
class Asked:
    """What is asked, and of whom.

    Attributes:
        id: which attempt at which round.
        expected: layout that sums must have.
        drawn: by node, the users that were drawn there; secret.
    """

    id: RoundId
    expected: Layout
    drawn: Mapping[str, Positions]

    @classmethod
    def of(cls, request: RoundRequest, hosting: Hosting) -> Self:
        """What a request asks of the nodes that host its users, under a new nonce."""
        return cls(
            RoundId(request.run, request.round, request.attempt, secrets.randbits(64)),
            layout_of_sums(request.clipping),
            hosting.drawn(request.users),
        )

    def misfit(self, node: str, answer: Answer) -> str | None:
        """Why an answer of a node cannot count, in one sentence, or None."""
        if answer.id != self.id:
            return "the answer is to another round or attempt than the one that is collected"
        if node not in self.drawn:
            return "no answer of this node is waited for"
        content = answer.content
        if isinstance(content, SummedUpdates) and content.users > self.drawn[node].size:
            return "the sum holds more users than were drawn at the node"
        return None


def partial_sum_of(node: str, content: SummedUpdates, tensors: Tensors) -> PartialSum:
    """What a node sent.

    Args:
        node: who sent it.
        content: the header.
        tensors: those that it declares.
    """
    (total,) = tensors.values()
    return content.partial_sum(node, total)


class End(StrEnum):
    """Why a connection is over."""

    RUN_OVER = "the run is over"
    SHUTTING_DOWN = "the server is shutting down"
    NEWER = "newer connection of the same node"


class Connection:
    """One open `Connect` call; of offers, only the newest waits."""

    def __init__(self) -> None:
        self._told = asyncio.Event()
        self._offer: RoundOffer | None = None
        self._end: End | None = None

    def offer(self, offer: RoundOffer) -> None:
        """Tell the node of a round, in place of one that it was not told of yet."""
        self._offer = offer
        self._told.set()

    def end(self, why: End) -> None:
        """End the connection, once what waits is told no more; the first reason stays."""
        self._end = self._end or why
        self._told.set()

    async def next(self, seconds: float) -> RoundOffer | End | None:
        """What to tell next; None if that is nothing for so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await self._told.wait()
        except TimeoutError:
            return None
        if self._end is not None:
            return self._end
        self._told.clear()
        offer, self._offer = self._offer, None
        return offer


class Roster:
    """Who is connected; at most one connection per node. Used on the server's event loop alone.

    Args:
        changed: called whenever a node came or went.
        clock: seconds, never going back.
    """

    def __init__(self, changed: Callable[[], None], clock: Callable[[], float] = monotonic) -> None:
        self._changed, self._clock = changed, clock
        self._began = clock()
        self._connections: dict[str, Connection] = {}
        self._left: dict[str, float] = {}
        self._over: End | None = None

    @property
    def connected(self) -> int:
        """How many nodes are connected."""
        return len(self._connections)

    def connect(self, node: str) -> Connection:
        """A new connection of a node, which ends an older one."""
        if node in self._connections:
            self._connections[node].end(End.NEWER)
        connection = self._connections[node] = Connection()
        if self._over is not None:
            connection.end(self._over)
        self._changed()
        return connection

    def disconnect(self, node: str, connection: Connection) -> None:
        """A connection is over; nothing happens if a newer one took its place."""
        if self._connections.get(node) is connection:
            del self._connections[node]
            self._left[node] = self._clock()
            self._changed()

    def connection_of(self, node: str) -> Connection | None:
        """The connection of a node; None if it has none."""
        return self._connections.get(node)

    def away_since(self, node: str) -> float | None:
        """When the node went, or when the server began if it never came; None if it is there."""
        return None if node in self._connections else self._left.get(node, self._began)

    def end_all(self, why: End) -> None:
        """End all connections, and every one that is still to come."""
        self._over = why
        for connection in self._connections.values():
            connection.end(why)


_KEPT_BYTES = 2**26  # of a model; to serialise a larger one costs less than to hold it twice


class Collecting:
    """Answers of a cohort's nodes, each counted once, until the deadline.

    Used on the server's event loop, but for `results` and `taken`, which another thread reads.

    Guarantees:
        * A node's answer counts once, whatever it sends again and in whatever order; a node
          whose users were not drawn, or another round or attempt, is refused.
        * Nothing counts after the end.

    Args:
        request: of the whole round.
        price: what it costs.
        enrolment: where the users are.
        seconds: until the deadline.
    """

    def __init__(
        self, request: RoundRequest, price: Price, enrolment: Enrolment, seconds: float
    ) -> None:
        self.asked = Asked.of(request, enrolment.hosting)
        self.deadline = monotonic() + seconds
        self.changed = asyncio.Event()
        self.results: queue.SimpleQueue[PartialSum | None] = queue.SimpleQueue()
        self._taken = asyncio.Semaphore(0)
        self._loop = asyncio.get_running_loop()
        self._model = model_of(request)
        nonce = self.asked.id.nonce
        self._offer = RoundOffer.of(request, seconds, price, manifest_of(self._model), nonce)
        self._waiting = dict(self.asked.drawn)
        self._over = False

    @property
    def waiting(self) -> tuple[str, ...]:
        """Nodes that are asked and have not answered."""
        return tuple(self._waiting)

    def offer_to(self, node: str) -> RoundOffer | None:
        """What to ask a node now; None if it is not asked, or has answered."""
        left = self.deadline - monotonic()
        if node not in self._waiting or left <= 0.0 or self._over:
            return None
        return replace(self._offer, seconds=left, users=self._waiting[node].copy())

    def model_chunks(self) -> Iterable[bytes]:
        """The model as serialised chunks; calls share them, unless the model is large."""
        return self._kept if self._offer.model.size <= _KEPT_BYTES else self._serialised()

    @cached_property
    def _kept(self) -> list[bytes]:
        return list(self._serialised())

    def _serialised(self) -> Iterator[bytes]:
        return (chunk.SerializeToString() for chunk in chunks(pieces(self._model)))

    def refusal(self, node: str, answer: Answer) -> str | None:
        """Why an answer cannot count, in one sentence; None if it can."""
        if reason := self.asked.misfit(node, answer):
            return reason
        if node not in self._waiting or self._over:
            return "no answer of this node is waited for"
        return None

    async def settle(self, node: str, partial: PartialSum | None) -> bool:
        """Count what a node sent, or that it sends nothing; False if it came too late.

        Returns once the sum was taken, so that memory is held for no more answers than have turns.
        """
        if node not in self._waiting or self._over:
            return False
        del self._waiting[node]
        if partial is not None:
            self.results.put(partial)
        self.changed.set()
        if partial is not None:
            await self._taken.acquire()
        return True

    def taken(self) -> None:
        """Another thread has added what it read last from `results`."""
        self._loop.call_soon_threadsafe(self._taken.release)

    def seconds_left(self, roster: Roster, absent: float, *, fixed: bool) -> float:
        """How long to wait if nothing changes; 0 if the round can end.

        Args:
            roster: who is connected.
            absent: how long a node is waited for that is not.
            fixed: wait for the deadline whatever happens.
        """
        now, end = monotonic(), self.deadline
        if not self._waiting and not fixed:
            return 0.0
        away = [roster.away_since(node) for node in self._waiting]
        if not fixed:
            gone = [since for since in away if since is not None]
            if len(gone) == len(away):
                end = min(end, max(gone) + absent)
        return max(0.0, end - now)

    def finish(self) -> None:
        """Count nothing more; again changes nothing."""
        if not self._over:
            self._over = True
            self.results.put(None)

    def abandon(self) -> None:
        """Finish, and let go of what nobody will take any more."""
        self.finish()
        while not self.results.empty():
            if self.results.get() is not None:
                self._taken.release()
