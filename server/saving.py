"""Writing checkpoints beside the rounds that follow them."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager


class Saving:
    """Writes one thing after another in a thread of its own.

    Guarantees: after `finish`, all that was begun is written, or its error was raised, once.

    Use `saving`.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._written: Future[None] | None = None

    def begin(self, write: Callable[[], None]) -> None:
        """Begin to write, once what was begun before is written; raises what that raised."""
        self.finish()
        self._written = self._pool.submit(write)

    def finish(self) -> None:
        """Wait for what was begun, and raise what it raises."""
        written, self._written = self._written, None
        if written is not None:
            written.result()


@contextmanager
def saving() -> Iterator[Saving]:
    """All that was begun is written when the block is left, however it is left.

    An error of writing is raised then, also where another ends the block: it came first.
    """
    with ThreadPoolExecutor(1, "checkpoint") as pool:
        one = Saving(pool)
        try:
            yield one
        finally:
            one.finish()
