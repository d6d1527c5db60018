"""How often a node may call: a token bucket for each."""

from collections.abc import Callable
from time import monotonic


class RateLimit:
    """Lets each node call `per_minute` times at once, and as often again in every minute.

    Nodes are those of an enrolment, so there are never more buckets than these.

    Args:
        per_minute: calls, at least 1.
        clock: seconds, never going back.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = monotonic) -> None:
        self._most, self._clock = float(per_minute), clock
        self._left: dict[str, tuple[float, float]] = {}

    def admits(self, node: str) -> bool:
        """Whether the node may call now; if so, the call is counted."""
        now = self._clock()
        left, since = self._left.get(node, (self._most, now))
        left = min(self._most, left + (now - since) * self._most / 60.0)
        admitted = left >= 1.0
        self._left[node] = (left - 1.0 if admitted else left, now)
        return admitted
