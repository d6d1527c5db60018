"""Which nodes are connected, and what each is to be told next."""

import asyncio
from collections.abc import Callable
from enum import StrEnum
from time import monotonic

from fedpriv.wire import RoundOffer


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
