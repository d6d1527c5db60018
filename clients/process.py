"""The training process of a node, as its main process sees it."""

import asyncio
import atexit
import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from typing import TypeVar

from fedpriv.errors import FedprivError

from .messages import receive, send

_T = TypeVar("_T")

_FOR_THE_PARENT = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1  # of prctl(2)


class Process:
    """A spawned process that answers messages, one message at a time.

    Guarantees:
        * It ends with the process that made it, even if that is killed; on Linux also with the
          thread that made it, which should be that of the event loop.
        * SIGINT and SIGTERM do not reach it: a terminal sends them to all processes of a group.
        * It writes nothing of what ended it, since such a text may hold users' data.
        * A message that is cancelled or has no answer is its last: it is killed at once.
        * After `gone` nothing is left of it; what it has forked is about to end.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._channel, theirs = socket.socketpair()
        self._process = context.Process(target=_enter, args=(theirs, os.getpid()))
        # A thread of its own: one that waits for a process that hangs is missed by nobody else.
        self._thread = ThreadPoolExecutor(1, "training")
        self._gone: Future[None] | None = None
        with theirs, _blocked_signals():
            self._process.start()
        # Otherwise an interpreter that ends would wait for the process.
        atexit.register(self._process.kill)

    @property
    def alive(self) -> bool:
        """Whether it runs and was not told to end."""
        return self._gone is None and self._process.is_alive()

    async def ask(self, message: object) -> object:
        """Send a message and wait for its first answer.

        Raises:
            FedprivError: it is the answer.
            ChildProcessError: the process has ended.
        """
        return await self._said(self._exchange, message)

    async def listen(self) -> object:
        """Wait for the next answer to a message that has several.

        Raises:
            FedprivError: it is the answer.
            ChildProcessError: the process has ended.
        """
        return await self._said(receive, self._channel)

    async def _said(self, what: Callable[[_T], object], given: _T) -> object:
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(self._thread, what, given)
        except (OSError, EOFError):
            self.kill()
            await self.gone()
            raise ChildProcessError(
                f"the training process ended with exit code {self._process.exitcode}"
            ) from None
        except BaseException:
            self.kill()
            raise
        if isinstance(answer, FedprivError):
            raise answer
        return answer

    def kill(self) -> None:
        """End the process at once; a call after the first does nothing."""
        if self._gone is None:
            atexit.unregister(self._process.kill)
            self._process.kill()
            with suppress(OSError):  # wakes the thread, even if someone else holds the other end
                self._channel.shutdown(socket.SHUT_RDWR)
            self._gone = self._thread.submit(self._reap)
            self._thread.shutdown(wait=False)

    async def gone(self) -> None:
        """Wait until a process that was killed is no more."""
        if self._gone is not None:
            await asyncio.shield(asyncio.wrap_future(self._gone))

    def _exchange(self, message: object) -> object:
        send(self._channel, message)
        return receive(self._channel)

    def _reap(self) -> None:
        self._process.join()
        self._channel.close()


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Keep signals from a process that is started meanwhile, until it ignores them by itself."""
    resource_tracker.ensure_running()  # otherwise it is started meanwhile, and unblocks them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _enter(channel: socket.socket, parent: int) -> None:
    """What the process does."""
    for number in _FOR_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    _end_with(parent)
    from .training import serve  # noqa: PLC0415 - only this process may load torch

    try:
        serve(channel)
    except EOFError:  # nobody asks any more
        sys.exit(0)
    except BaseException:  # a traceback may hold users' data
        sys.exit(1)


def _end_with(parent: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it had ended before
            os._exit(0)
    threading.Thread(target=_exit_after_parent, daemon=True).start()


def _exit_after_parent() -> None:
    """Wait for the end of file on a pipe that only the parent holds, then exit."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(0)
