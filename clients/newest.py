"""One piece of work at a time, the newest."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Generic, TypeVar

Key = TypeVar("Key")


class Newest(Generic[Key]):
    """Does the newest work that it was given; older work that is not done is cancelled first.

    Work that raises makes the next call raise the same.
    """

    def __init__(self) -> None:
        self._doing: tuple[Key, asyncio.Task[None]] | None = None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self._doing is None or self._doing[1].done()

    async def begin(self, key: Key, work: Callable[[], Coroutine[None, None, None]]) -> None:
        """Begin work, once the older was cancelled and has ended; work under way goes on.

        Args:
            key: names the work.
            work: called if no work of that name is under way.
        """
        if not self.idle and self._doing is not None and self._doing[0] == key:
            return
        await self.stop()
        self._doing = (key, asyncio.create_task(work()))

    async def stop(self) -> None:
        """Cancel what is under way, and wait for its end."""
        if self._doing is None:
            return
        _, task = self._doing
        task.cancel()
        await asyncio.wait([task])
        self._doing = None
        if not task.cancelled():
            task.result()
