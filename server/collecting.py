"""One attempt at a round while its answers come in: who is asked, who answered, and until when."""

import asyncio
import queue
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from time import monotonic

from fedpriv.federated.transport import PartialSum, RoundRequest
from fedpriv.wire import Answer, Price, RoundOffer, chunks, manifest_of, model_of, pieces

from .asked import Asked
from .enrolment import Enrolment
from .roster import Roster

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
