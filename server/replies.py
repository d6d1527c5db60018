"""Replies to messages on a Flower grid, as they come."""

import logging
import queue
import threading
from collections.abc import Iterator
from time import monotonic
from typing import Self

from flwr.app import Message
from flwr.serverapp import Grid

_log = logging.getLogger(__name__)
_FIRST_POLL_SECONDS = 0.005
_POLL_GROWTH = 1.2  # so that a reply is noticed within a fifth of the time that it took
_LONGEST_POLL_SECONDS = 0.5
_SLICE_SECONDS = 0.2  # after which a stop is noticed


class Replies:
    """Sends messages, and waits for the reply to each in a thread of its own.

    A pull for several messages waits for the slowest, and a node that dies in mid-upload holds it
    for minutes, whatever its timeout.

    Guarantees:
        * each message that was sent has one reply at most, whatever its node sends again;
        * there is none after the deadline, the end of the block, or the stop;
        * threads end with the block; one that Flower holds up does not keep the process alive.

    Args:
        grid: carries the messages.
        stopping: ends the waiting when it is set.
    """

    def __init__(self, grid: Grid, stopping: threading.Event) -> None:
        self._grid, self._stopping = grid, stopping
        self._over = threading.Event()
        self._queue: queue.SimpleQueue[tuple[str, Message | None]] = queue.SimpleQueue()
        self._outstanding = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def send(self, node: str, message: Message) -> bool:
        """Send a message; False if the grid does not take it, as for a node that has gone."""
        # A grid may leave out the ids of messages that it does not take: so one at a time.
        message_id: str | None = next(iter(self._grid.push_messages([message])), None)
        if message_id is None:
            return False
        self._outstanding += 1
        threading.Thread(target=self._await, args=(node, message_id), daemon=True).start()
        return True

    def until(self, deadline: float) -> Iterator[tuple[str, Message | None]]:
        """Node and reply of each message that is answered; None for one that cannot be received.

        Args:
            deadline: on the clock of `time.monotonic`.
        """
        while self._outstanding and not self._stopping.is_set():
            left = deadline - monotonic()
            if left <= 0.0:
                return
            try:
                node, reply = self._queue.get(timeout=min(left, _SLICE_SECONDS))
            except queue.Empty:
                continue
            self._outstanding -= 1
            yield node, reply

    def _await(self, node: str, message_id: str) -> None:
        pause = _FIRST_POLL_SECONDS
        while not self._over.is_set():
            try:
                for reply in self._grid.pull_messages([message_id]):
                    if reply.metadata.reply_to_message_id == message_id:
                        self._queue.put((node, reply))
                        return
            except Exception as error:  # of the connection, or of bytes that are no message
                _log.warning("a reply cannot be received: %s", type(error).__name__)
                self._queue.put((node, None))
                return
            self._over.wait(pause)
            pause = min(_POLL_GROWTH * pause, _LONGEST_POLL_SECONDS)
