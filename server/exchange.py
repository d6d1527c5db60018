"""A secure sum at the server, which relays what nodes send to each other and opens their sum.

See `fedpriv.secure_sums.protocol` for the steps and for what each protects.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

import numpy as np

from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import SecureSum
from fedpriv.privacy.round import OpenedSum
from fedpriv.secure_sums.parameters import Grid
from fedpriv.secure_sums.protocol import Roster, unmasked
from fedpriv.server.collection import Collection
from fedpriv.wire import RoundId, Stage, Step

_log = logging.getLogger(__name__)
# Shares of a round's time after which steps end; in between, users train and nodes upload.
_SHARED, UPLOADED, _SIGNED, _OPENED = 0.125, 0.75, 0.875, 1.0
Items = Mapping[str, bytes]  # by node


class Exchange:
    """What the nodes of a roster have sent, step by step, and the answer to each step.

    Used in the event loop only. A node's first message of a step counts, and a repeated one gets
    the same answer, so that a lost connection does no harm.
    """

    def __init__(self, attempt: RoundId, nodes: Sequence[str], least: int, grace: float) -> None:
        self.attempt, self._nodes = attempt, frozenset(nodes)
        self._least, self._grace = least, grace
        self._sent: dict[Stage, dict[str, Items]] = {stage: {} for stage in Stage}
        self._arrived, self._stopped = asyncio.Event(), False
        self._answers: dict[Stage, Callable[[str], Step]] = {}
        self._answered = {stage: asyncio.Event() for stage in Stage}

    def awaits(self, node: str, step: Step) -> bool:
        """Return whether the node may take this step."""
        return step.id == self.attempt and node in self._nodes

    async def answer_to(self, node: str, step: Step) -> Step:
        """Record a node's step, unless its time is over; return the answer, once there is one."""
        stage = step.stage
        if not self._answered[stage].is_set():
            self._sent[stage].setdefault(node, step.items)
            self._arrived.set()
            await self._answered[stage].wait()
        return self._answers[stage](node)

    async def sent(
        self, stage: Stage, nodes: Sequence[str], seconds: Callable[[Sequence[str]], float]
    ) -> dict[str, Items]:
        """Return what these nodes send in a step, once all have, no time is left, or after `stop`.

        `seconds` returns how long to wait for some nodes if nothing changes. Once as many as must
        not drop out have taken the step, the others have `grace` seconds.
        """
        sent, end = self._sent[stage], math.inf
        while not self._stopped:
            missing = [node for node in nodes if node not in sent]
            if len(nodes) - len(missing) >= self._least:
                end = min(end, monotonic() + self._grace)
            if (left := min(seconds(missing), end - monotonic())) <= 0.0:
                break
            self._arrived.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._arrived.wait()
        return {node: sent[node] for node in nodes if node in sent}

    def wake(self) -> None:
        """Compute anew how long to wait, since a node has come or left."""
        self._arrived.set()

    def stop(self) -> None:
        """Wait for no more steps of nodes."""
        self._stopped = True
        self.wake()

    def answer(
        self,
        stage: Stage,
        nodes: Sequence[str] = (),
        items_of: Callable[[str], Items] | None = None,
    ) -> None:
        """Answer a step to these nodes, with the items of each; to all others, it is void."""

        def answered(node: str) -> Step:
            if node not in nodes:
                return Step(self.attempt, stage)
            return Step(self.attempt, stage, tuple(nodes), items_of(node) if items_of else {})

        self._answers[stage] = answered
        self._answered[stage].set()

    def end(self) -> None:
        """Answer all steps that have no answer: the attempt is void, or over."""
        for stage in Stage:
            if not self._answered[stage].is_set():
                self.answer(stage)


@dataclass(eq=False)
class SecureCollection:
    """One attempt at a round with a secure sum, in the event loop: `collect`, then `open`."""

    secure: SecureSum
    roster: Roster
    collection: Collection  # of the masked sums
    watch: Callable[[], Coroutine[None, None, None]]  # ends the collection when it is time
    # Returns how many seconds to wait for nodes until a deadline of `time.monotonic`.
    left: Callable[[Sequence[str], float], float]
    seconds: float  # of the whole attempt
    grace: float  # how long a step waits for the last d nodes

    def __post_init__(self) -> None:
        self._began, names = monotonic(), self.roster.names
        self._least = len(names) - self.secure.dropouts
        attempt = self.collection.offer.id
        self.exchange = Exchange(attempt, names, self._least, self.grace)
        self._sharers: list[str] = []
        self._survivors: list[str] = []
        self._grid = Grid.of(self.collection.offer.price.event, len(names))
        dimension = self.collection.offer.clipping.layout.dimension
        self._total = np.zeros(dimension, f"u{self._grid.dtype.itemsize}")

    async def collect(self) -> bool:
        """Collect masked sums and signatures; return whether they suffice to open the total."""
        names, exchange = self.roster.names, self.exchange
        to = {name: set(linked) for name, linked in self.roster.neighbours(self.secure).items()}
        sealed = await exchange.sent(Stage.SHARE, names, self._until(_SHARED))
        self._sharers = [name for name in sealed if sealed[name].keys() == to[name]]
        if not self._suffices(self._sharers, "send shares"):
            return False

        def received(node: str) -> Items:
            return {n: sealed[n][node] for n in self._sharers if n in to[node]}

        self.collection.await_only(self._sharers)
        exchange.answer(Stage.SHARE, self._sharers, received)
        self._survivors = sorted(await self._add_uploads())
        if not self._suffices(self._survivors, "upload"):
            return False
        exchange.answer(Stage.AGREE, self._survivors)
        signed = await exchange.sent(Stage.SIGN, self._survivors, self._until(_SIGNED))
        self._signatures = {n: items[n] for n, items in signed.items() if n in items}
        return self._suffices(list(self._signatures), "sign", self.secure.quorum(len(names)))

    async def _add_uploads(self) -> list[str]:
        """Add up the masked sums that arrive in time; return their nodes."""
        arrived, watching = list[str](), asyncio.create_task(self.watch())
        try:
            while (masked := await asyncio.to_thread(self.collection.results.get)) is not None:
                self._total += masked.total.astype(self._total.dtype)
                arrived.append(masked.node)
                self.collection.taken()
        finally:
            watching.cancel()
        return arrived

    def _suffices(self, nodes: Sequence[str], step: str, least: int | None = None) -> bool:
        needed = least or self._least
        if len(nodes) < needed:
            _log.warning("%d nodes %s; the round needs %d", len(nodes), step, needed)
        return len(nodes) >= needed

    async def open(self) -> OpenedSum | None:
        """Return the sum, once nodes have opened it; None if too few do. The round is charged."""
        survivors = self._survivors
        self.exchange.answer(Stage.SIGN, survivors, lambda _: self._signatures)
        shares = await self.exchange.sent(Stage.OPEN, survivors, self._until(_OPENED))
        lists = self.roster, self.secure, self._sharers, survivors
        try:
            total = await asyncio.to_thread(unmasked, self._total, *lists, shares)
        except InvalidValueError as error:
            _log.warning("the sum cannot be opened: %s", error)
            return None
        steps = self._grid.steps(total, self.collection.offer.clipping)
        return OpenedSum(steps, len(survivors))

    def _until(self, share: float) -> Callable[[Sequence[str]], float]:
        """Return how long to wait for nodes if a step ends after this share of the time."""
        deadline = self._began + share * self.seconds
        return lambda waiting: self.left(waiting, deadline)
