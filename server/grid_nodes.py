"""Who is who on a Flower grid: nodes say which users they hold, and are believed if it fits."""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from time import monotonic

import numpy as np
from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from fedpriv.data.store import UserStore
from fedpriv.errors import StoppedError, WireError, WorkerError
from fedpriv.flower import HELLO, TROUBLE, content_of, digest_of_shard, header_in, shard_of
from fedpriv.logs import one_line
from fedpriv.wire import Hello, decode_hello, digest_of, parse
from fedpriv.wire import federation_pb2 as pb

from .asked import Hosting
from .enrolment import Enrolment
from .grid import Headers
from .replies import Replies

_log = logging.getLogger(__name__)
_HELLO_BYTES = 8192
_POLL_SECONDS = 0.1
_REST_SECONDS = 2.0
_INTRODUCTION_SECONDS = 60.0
_START_SECONDS = 600.0  # a worker imports torch and loads all users' data


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
        headers: say whom the workers are to load.
        stopping: ends the waiting when it is set.

    Raises:
        WorkerError: there are more or fewer workers, or one cannot load the same users' data.
        StoppedError: it was asked to stop.
    """
    ids = _await_workers(grid, workers, stopping)
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
        * of several with one name the one counts that came last.

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
            _log.info("waiting for %d nodes; there are %d", self._least, len(present))
            if self._stopping.wait(_REST_SECONDS):
                break
        if self._stopping.is_set():
            raise StoppedError("the server was asked to stop; nobody was asked")
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


def _await_workers(grid: Grid, workers: int, stopping: threading.Event) -> list[int]:
    end = monotonic() + _INTRODUCTION_SECONDS
    while len(ids := list(grid.get_node_ids())) < workers and monotonic() < end:
        if stopping.is_set():
            raise StoppedError("the simulation was asked to stop")
        time.sleep(_POLL_SECONDS)
    if len(ids) != workers:
        raise WorkerError(
            f"there are {len(ids)} workers (SuperNodes); the run is configured for {workers}"
        )
    return ids


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
        return f"error {reply.error.code} of Flower; the code of fedpriv must be installed there"
    try:
        trouble = header_in(reply.content, TROUBLE, _HELLO_BYTES)
        if trouble is not None:
            return one_line(trouble.decode(errors="replace"))
        header = header_in(reply.content, HELLO, _HELLO_BYTES)
        return decode_hello(parse(pb.Hello, header or b"", _HELLO_BYTES))
    except WireError as error:
        return one_line(str(error))
