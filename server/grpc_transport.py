"""The transport over gRPC: offers a round to the nodes of the drawn users and yields what comes."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from fedpriv.errors import StoppedError
from fedpriv.federated.transport import PartialSum, RoundRequest, Transport
from fedpriv.wire import Price, RunState

from .collecting import Collecting
from .enrolment import Enrolment
from .listening import Listening

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Patience:
    """How long nodes are waited for.

    Attributes:
        deadline: seconds from the offer to the end of a round.
        absent: seconds that a node is waited for that is not connected.
        fixed: whether every round takes until its deadline.
        nodes: a round begins when at least so many are connected.
    """

    deadline: float
    absent: float
    fixed: bool
    nodes: int


class GrpcTransport(Transport):
    """Asks nodes that are connected, from the thread of the training loop.

    Args:
        listening: the running server.
        enrolment: where users are.
        price_of: what a round costs.
        patience: how long to wait.
    """

    def __init__(
        self,
        listening: Listening,
        enrolment: Enrolment,
        price_of: Callable[[RoundRequest], Price],
        patience: Patience,
    ) -> None:
        self._listening, self._enrolment = listening, enrolment
        self._price_of, self._patience = price_of, patience
        self._stopping = threading.Event()
        self._collecting: Collecting | None = None

    def stop(self) -> None:
        """Abandon the round that is collected, and every later one; safe in a signal handler."""
        self._stopping.set()
        self._listening.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._listening.service.arrivals.set()
        if self._collecting is not None:
            self._collecting.finish()

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the contribution or sum of each node that answers in time.

        Raises:
            StoppedError: `stop` was called; what came was forgotten.
        """
        self._await_nodes()
        price = self._price_of(request)
        collecting = self._listening.call(lambda: self._open(request, price))
        watch = asyncio.run_coroutine_threadsafe(self._watch(collecting), self._listening.loop)
        try:
            while (partial := collecting.results.get()) is not None:
                yield partial
                collecting.taken()
        finally:
            watch.cancel()
            self._listening.call(lambda: self._close(collecting))
        if self._stopping.is_set():
            raise StoppedError("the server was asked to stop; nothing was charged for this round")

    def _await_nodes(self) -> None:
        """Wait until enough nodes are connected; which ones are drawn does not matter."""
        service, least = self._listening.service, self._patience.nodes

        async def enough() -> None:
            while service.roster.connected < least and not self._stopping.is_set():
                service.arrivals.clear()
                await service.arrivals.wait()

        if service.roster.connected < least:
            _log.info("waiting for %d nodes; connected are %d", least, service.roster.connected)
            asyncio.run_coroutine_threadsafe(enough(), self._listening.loop).result()
        if self._stopping.is_set():
            raise StoppedError("the server was asked to stop; nobody was asked")

    def _open(self, request: RoundRequest, price: Price) -> Collecting:
        service = self._listening.service
        collecting = Collecting(request, price, self._enrolment, self._patience.deadline)
        self._collecting = service.collecting = collecting
        service.publish(replace(service.status, round=request.round, state=RunState.COLLECTING))
        for node in collecting.waiting:
            connection, offer = service.roster.connection_of(node), collecting.offer_to(node)
            if connection is not None and offer is not None:
                connection.offer(offer)
        if self._stopping.is_set():
            collecting.finish()
        return collecting

    async def _watch(self, collecting: Collecting) -> None:
        """End the round when it can end."""
        patience, roster = self._patience, self._listening.service.roster
        try:
            while left := collecting.seconds_left(roster, patience.absent, fixed=patience.fixed):
                collecting.changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await collecting.changed.wait()
        finally:
            collecting.finish()

    def _close(self, collecting: Collecting) -> None:
        service = self._listening.service
        collecting.abandon()
        self._collecting = None
        service.forget_round()
        service.publish(replace(service.status, state=RunState.RELEASING))
