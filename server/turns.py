"""Turns: how many transfers there are at once, whatever the number of nodes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Newest:
    """Lets one task of each node go on, the newest. Used on the server's event loop alone."""

    def __init__(self) -> None:
        self._limits: dict[str, asyncio.Timeout] = {}

    @asynccontextmanager
    async def only(self, node: str, until: float | None = None) -> AsyncIterator[None]:
        """End an older task of the node, and go on until a newer one comes.

        A node that lost its connection and came back must not wait for what is left of the old one.

        Args:
            node: whose task it is.
            until: when it ends at the latest, as `time.monotonic` says.

        Raises:
            TimeoutError: a newer one came, the time is up, or `end_all` was called.
        """
        async with asyncio.timeout_at(until) as limit:
            if node in self._limits:
                _end(self._limits[node])
            self._limits[node] = limit
            try:
                yield
            finally:
                if self._limits.get(node) is limit:
                    del self._limits[node]

    def excuse(self, node: str) -> None:
        """Let the task of a node, which is the caller, go on whatever happens."""
        self._limits.pop(node).reschedule(None)

    def end_all(self) -> None:
        """End all tasks but those that are excused."""
        for limit in self._limits.values():
            _end(limit)


class Turns:
    """Bounds how many tasks do something at once, each for a bounded time, one per node.

    Used on the server's event loop alone.

    Args:
        places: how many at once, at least 1.
        seconds: the longest that one may hold its place.
    """

    def __init__(self, places: int, seconds: float) -> None:
        self._places, self._seconds = asyncio.Semaphore(places), seconds
        self._newest = Newest()

    @asynccontextmanager
    async def turn(self, node: str, until: float | None = None) -> AsyncIterator[None]:
        """Wait for a place and hold it; a turn that the node has already ends.

        Args and errors as for `Newest.only`, and:

        Raises:
            TimeoutError: it was held for too long.
        """
        async with (
            self._newest.only(node, until),
            self._places,
            asyncio.timeout(self._seconds),
        ):
            yield

    def end_all(self) -> None:
        """End all turns, and all that are waited for."""
        self._newest.end_all()


def _end(limit: asyncio.Timeout) -> None:
    if not limit.expired():
        limit.reschedule(0.0)  # a time that has passed: at once
