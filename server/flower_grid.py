"""The transport over a Flower grid: one message for each node and round, and who the nodes are."""

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from time import monotonic
from typing import Self

import numpy as np
from flwr.app import Array, Message, MessageType
from flwr.serverapp import Grid

from fedpriv.data.population import UserStore
from fedpriv.errors import StoppedError, WireError, WorkerError
from fedpriv.logs import one_line
from fedpriv.privacy.round import PartialSum, RoundRequest, Transport
from fedpriv.server.collection import RoundTerms
from fedpriv.server.enrolment import Enrolment, Hosting
from fedpriv.wire import (
    SERVER_RECEIVES_BYTES,
    Decline,
    Hello,
    Price,
    RoundOffer,
    decode_answer,
    decode_hello,
    digest_of,
    encode_offer,
    manifest_of,
    model_of,
    parse,
)
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.flower import (
    ANSWER,
    HELLO,
    OFFER,
    TROUBLE,
    content_of,
    digest_of_shard,
    header_in,
    packed,
    shard_of,
    tensors_in,
)

_log = logging.getLogger(__name__)
_FIRST_POLL_SECONDS = 0.005
_POLL_GROWTH = 1.2  # so that a reply is noticed within a fifth of the time that it took
_LONGEST_POLL_SECONDS = 0.5
_STOP_CHECK_SECONDS = 0.2
_NODES_CHECK_SECONDS = 2.0
_HELLO_BYTES = 8192
_INTRODUCTION_SECONDS = 60.0
_START_SECONDS = 600.0  # a worker imports torch and loads all users' data

Headers = Mapping[str, bytes]
"""What a node is told beside an offer, by name."""


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
                node, reply = self._queue.get(timeout=min(left, _STOP_CHECK_SECONDS))
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


@dataclass(frozen=True)
class Nodes:
    """The nodes of a grid.

    Attributes:
        hosting: which node hosts which users.
        present: nodes that are there now, name → id on the grid; called at the start of a round.
        headers: what to tell a node beside the offer.
        required: whether all that are asked must answer.
    """

    hosting: Hosting
    present: Callable[[], Mapping[str, int]]
    headers: Callable[[str], Headers]
    required: bool = False


class GridTransport(Transport):
    """Asks the nodes of the drawn users, each once a round, and takes what comes in time.

    Guarantees, beside those of every transport:

    * a reply counts for the node that was asked, once, if it answers this attempt at this round;
    * of a reply that is an error only the code is logged, and nothing of a node of one user;
    * where nodes are required, a round without all their answers raises, so that it is not charged:
      a worker of a simulation that does not answer lacks the code, or has died, and to go on
      without its users would be another experiment.

    Args:
        grid: carries the messages.
        nodes: which can be asked.
        price_of: what a round costs.
        seconds: from the offer to the deadline.
        stopping: when it is set, the round is abandoned, and every later one.
        fixed: whether every round takes until its deadline.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Nodes,
        price_of: Callable[[RoundRequest], Price],
        seconds: float,
        stopping: threading.Event,
        *,
        fixed: bool = False,
    ) -> None:
        self._grid, self._nodes, self._price_of = grid, nodes, price_of
        self._seconds, self._stopping, self._fixed = seconds, stopping, fixed

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the contribution or sum of each node that answers in time.

        Raises:
            WorkerError: a required node has not answered.
            StoppedError: it was asked to stop.
        """
        terms, present = RoundTerms.of(request, self._nodes.hosting), self._nodes.present()
        model = model_of(request)
        price = self._price_of(request)
        offer = RoundOffer.of(request, self._seconds, price, manifest_of(model), terms.id.nonce)
        tensors, answered = packed(model), 0
        deadline = monotonic() + self._seconds
        with Replies(self._grid, self._stopping) as replies:
            for node, users in terms.drawn.items():
                left = deadline - monotonic()
                if node in present and left > 0.0:
                    of_node = replace(offer, seconds=left, users=users.copy())
                    replies.send(node, self._message(node, present[node], of_node, tensors))
            for node, reply in replies.until(deadline):
                partial = self._counted(terms, node, present[node], reply)
                if partial is not None:
                    answered += 1
                    yield partial
        if self._fixed:
            self._stopping.wait(max(0.0, deadline - monotonic()))
        if self._stopping.is_set():
            raise StoppedError("the server was asked to stop; nothing was charged for this round")
        if self._nodes.required and answered < len(terms.drawn):
            raise WorkerError(
                f"{answered} of {len(terms.drawn)} workers answered in round {request.round}; all "
                "must"
            )

    def _message(self, node: str, node_id: int, offer: RoundOffer, tensors: Array) -> Message:
        headers = {OFFER: encode_offer(offer).SerializeToString(), **self._nodes.headers(node)}
        content = content_of(headers, tensors)
        return Message(content, node_id, MessageType.TRAIN, ttl=offer.seconds)

    def _counted(
        self, terms: RoundTerms, node: str, node_id: int, reply: Message | None
    ) -> PartialSum | None:
        """What a reply adds to the sum; None if it does not count."""
        name = self._nodes.hosting.log_name(node)
        if reply is None:
            return None
        if reply.has_error():
            _log.warning("%s counts as zero: error %d of Flower", name, reply.error.code)
            return None
        try:
            return self._partial(terms, node, node_id, reply)
        except WireError as error:
            _log.warning("an answer of %s is refused: %s", name, one_line(str(error)))
            return None

    def _partial(
        self, terms: RoundTerms, node: str, node_id: int, reply: Message
    ) -> PartialSum | None:
        if reply.metadata.src_node_id != node_id:
            raise WireError("it comes from another node than the one that was asked")
        header = header_in(reply.content, ANSWER, SERVER_RECEIVES_BYTES)
        if header is None:
            raise WireError("it holds no answer")
        answer = decode_answer(parse(pb.Answer, header, SERVER_RECEIVES_BYTES), terms.expected)
        if reason := terms.misfit(node, answer):
            raise WireError(reason)
        if isinstance(answer.content, Decline):
            reason = one_line(answer.content.reason)
            _log.info("%s declines: %s", self._nodes.hosting.log_name(node), reason)
            return None
        (total,) = tensors_in(reply.content, answer.content.tensors).values()
        return answer.content.partial_sum(node, total)


def shards(population: int, workers: int) -> Hosting:
    """Which worker of a simulation hosts which users."""
    numbers = np.empty(population, np.int64)
    for worker in range(workers):
        shard = shard_of(population, worker, workers)
        numbers[shard.start : shard.stop] = worker
    return Hosting([f"worker-{k}" for k in range(workers)], numbers, frozenset())


def simulated_workers(
    grid: Grid,
    population: str,
    users: UserStore,
    workers: int,
    headers: Headers,
    stopping: threading.Event,
) -> dict[str, int]:
    """Wait for the workers of a simulation; name → id on the grid.

    Args:
        grid: of the simulation.
        population: its name.
        users: all of its users, of whom each worker has a share.
        workers: how many there must be.
        headers: say which users the workers are to load.
        stopping: ends the waiting when it is set.

    Raises:
        WorkerError: there are more or fewer workers, or one cannot load the same users' data.
        StoppedError: it was asked to stop.
    """
    end = monotonic() + _INTRODUCTION_SECONDS
    while len(ids := list(grid.get_node_ids())) < workers and monotonic() < end:
        if stopping.wait(_STOP_CHECK_SECONDS):
            raise StoppedError("the simulation was asked to stop")
    if len(ids) != workers:
        raise WorkerError(
            f"there are {len(ids)} workers (SuperNodes); the run is configured for {workers}"
        )
    shares = (shard_of(users.population, k, workers) for k in range(workers))
    expected = {
        f"worker-{k}": digest_of_shard(population, users, share) for k, share in enumerate(shares)
    }
    found: dict[str, int] = {}
    for node_id, hello in _introduced(grid, ids, headers, _START_SECONDS, stopping):
        if isinstance(hello, str):
            raise WorkerError(f"a worker cannot take part: {hello}")
        if expected.get(hello.node) != hello.users_sha256:
            raise WorkerError("a worker has loaded other users, or other data, than the server")
        found[hello.node] = node_id
    if stopping.is_set():
        raise StoppedError("the simulation was asked to stop")
    if found.keys() != expected.keys():
        raise WorkerError(f"{len(found)} of {workers} workers answer; all must")
    return found


class EnrolledNodes:
    """The enrolled nodes that are on a grid, asked again whenever others are there.

    Guarantees:
        * a node is known by the name that it says, if it holds exactly the users enrolled there;
        * of several with one name, the one that came last counts.

    Args:
        grid: of the run.
        enrolment: where users are.
        least: a round waits until so many are there.
        stopping: ends the waiting when it is set.
    """

    def __init__(
        self, grid: Grid, enrolment: Enrolment, least: int, stopping: threading.Event
    ) -> None:
        self._grid, self._enrolment = grid, enrolment
        self._least, self._stopping = least, stopping
        self._names: dict[int, str | None] = {}

    def __call__(self) -> Mapping[str, int]:
        """Name → id of those that are there now.

        Raises:
            StoppedError: it was asked to stop.
        """
        while len(present := self._present()) < self._least:
            _log.info("waiting for %d nodes; %d are there", self._least, len(present))
            if self._stopping.wait(_NODES_CHECK_SECONDS):
                break
        if self._stopping.is_set():
            raise StoppedError("the server was asked to stop; no node was asked")
        return present

    def _present(self) -> dict[str, int]:
        ids = list(self._grid.get_node_ids())
        self._names = {i: name for i, name in self._names.items() if i in ids}
        strangers = [i for i in ids if i not in self._names]
        said = _introduced(self._grid, strangers, {}, _INTRODUCTION_SECONDS, self._stopping)
        for node_id, hello in said:
            if isinstance(hello, str):  # asked again in the next round
                _log.warning("a node cannot take part now: %s", hello)
            else:
                self._names[node_id] = self._name(hello)
        return {name: node_id for node_id, name in self._names.items() if name is not None}

    def _name(self, hello: Hello) -> str | None:
        enrolled = self._enrolment.users.get(hello.node)
        if enrolled is None or digest_of(enrolled) != hello.users_sha256:
            _log.warning("a node is not enrolled, or holds other users than are enrolled at it")
            return None
        return hello.node


def _introduced(
    grid: Grid, ids: Iterable[int], headers: Headers, seconds: float, stopping: threading.Event
) -> Iterator[tuple[int, Hello | str]]:
    """Id, and what a node says of itself or in one sentence why it cannot, as answers come."""
    with Replies(grid, stopping) as replies:
        for node_id in ids:
            content = content_of(headers)
            message = Message(content, node_id, MessageType.QUERY, ttl=seconds)
            replies.send(str(node_id), message)
        for key, reply in replies.until(monotonic() + seconds):
            yield int(key), _said(reply)


def _said(reply: Message | None) -> Hello | str:
    if reply is None:
        return "its reply cannot be received"
    if reply.has_error():
        return f"error {reply.error.code} of Flower; fedpriv must be installed there"
    try:
        trouble = header_in(reply.content, TROUBLE, _HELLO_BYTES)
        if trouble is not None:
            return one_line(trouble.decode(errors="replace"))
        header = header_in(reply.content, HELLO, _HELLO_BYTES)
        return decode_hello(parse(pb.Hello, header or b"", _HELLO_BYTES))
    except WireError as error:
        return one_line(str(error))
