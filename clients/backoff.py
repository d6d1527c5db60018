"""Trying again when the connection was lost, so that nodes do not come back all at once."""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import grpc

from fedpriv.errors import InvalidValueError

LOST = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,  # the server has too much to do, or was asked too often
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,  # e.g. a stream that was reset
        grpc.StatusCode.UNKNOWN,
    }
)
"""How a call fails that may succeed when it is tried again."""
_LARGEST_EXPONENT = 1000  # 2.0 to a power above 1023 is out of range
_log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Backoff:
    """Exponential back-off with full jitter.

    The n-th wait is uniform on [0, min(cap, base · 2^n)] (M. Brooker, "Exponential Backoff And
    Jitter", AWS Architecture Blog, 2015).

    Attributes:
        base: longest first wait, in seconds, > 0.
        cap: longest wait, in seconds, at least `base`.
        draw: uniform on an interval.

    Raises:
        InvalidValueError: base or cap is out of range.
    """

    base: float = 0.5
    cap: float = 60.0
    draw: Callable[[float, float], float] = random.uniform

    def __post_init__(self) -> None:
        if not 0.0 < self.base <= self.cap < float("inf"):
            raise InvalidValueError(
                f"base is {self.base} and cap is {self.cap}; both must be positive and finite, and "
                "the cap not the smaller"
            )

    def wait(self, failures: int) -> float:
        """Seconds to wait after so many failures in a row, from 0."""
        longest = self.base * 2.0 ** min(failures, _LARGEST_EXPONENT)
        return self.draw(0.0, min(self.cap, longest))

    def rest(self) -> float:
        """Seconds to wait where nothing failed and nothing is missed: uniform on [0, cap]."""
        return self.draw(0.0, self.cap)


async def persist(call: Callable[[], Awaitable[Result]], backoff: Backoff) -> Result:
    """Repeat a call until it does not fail as `LOST` says; a time limit is the caller's to set.

    Raises:
        grpc.aio.AioRpcError: it failed in another way.
    """
    failures = 0
    while True:
        try:
            return await call()
        except grpc.aio.AioRpcError as error:
            if error.code() not in LOST:
                raise
            _log.info("a call failed (%s); it will be tried again", error.code().name)
        await asyncio.sleep(backoff.wait(failures))
        failures += 1
