"""The in-process transport: users train together in chunks and are added into a sum."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.data.store import UserStore
from fedpriv.engine.batches import Batches
from fedpriv.engine.chunks import chunks, example_bytes, lane_bytes, lanes_within, metric_bytes
from fedpriv.engine.clipping import clipped_sum
from fedpriv.engine.diagnostics import (
    ChunkDiagnostics,
    SimulationOnlyDiagnostics,
    diagnose_chunk,
    diagnose_round,
)
from fedpriv.engine.layered import train_layers_chunk
from fedpriv.engine.layers import Layers, layers_of
from fedpriv.engine.local import train_chunk
from fedpriv.engine.measuring import Examples, mean_losses, user_metrics
from fedpriv.engine.metric_checks import check_metrics
from fedpriv.engine.schedule import schedule
from fedpriv.engine.seeding import seeded
from fedpriv.engine.start import Start
from fedpriv.engine.task import Task, TorchTensors
from fedpriv.engine.updates import Updates, whole
from fedpriv.errors import InvalidValueError
from fedpriv.federated.transport import PartialSum, RoundRequest, Transport

_log = logging.getLogger(__name__)


def device_named(name: str) -> torch.device:
    """Device of a name: "auto" takes CUDA where there is one.

    Raises:
        InvalidValueError: torch does not know the device, or this machine has none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidValueError(
            f"device is {name!r}, which this machine does not have; legal are auto, cpu and cuda"
        ) from error
    return device


@dataclass(frozen=True)
class InProcessTransport(Transport):
    """Trains the users of a store in this process.

    Each chunk is one partial sum; no update outlives its chunk. If a chunk fails, its users are
    trained one by one, and those that fail contribute zero.

    Attributes:
        task: model and loss.
        users: the enrolled users' data.
        device: where to train.
        chunk_memory: bytes that a chunk of users may take, roughly; it decides how many users
            train together. Chunks that fit a processor's caches are fastest.
        hosted: positions in the enrolled population of the store's users, if the store holds a
            part of it; None if position i of the store is user i.
        observer: called at the end of each round with figures that are not private; None, as in
            every deployment, computes none.
    """

    task: Task
    users: UserStore
    device: torch.device
    chunk_memory: int
    hosted: npt.NDArray[np.int64] | None = None
    observer: Callable[[SimulationOnlyDiagnostics], None] | None = None

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the sum of the clipped contributions of each chunk.

        Raises:
            InvalidValueError: a metric is unknown or does not fit.
            ModelError: a metric cannot be computed on a row of zeros.
        """
        seen: list[ChunkDiagnostics] = []
        # One behind: a GPU works on the next chunk while the sum of the last one is awaited.
        last: _ChunkSum | None = None
        for chunk in self._sums(request):
            seen.extend(chunk.diagnostics)
            if last is not None:
                yield last.partial
            last = chunk
        if last is not None:
            yield last.partial
        if self.observer is not None:
            self.observer(diagnose_round(request, seen))

    def raw_update(self, request: RoundRequest) -> tuple[dict[str, npt.NDArray[np.float32]], float]:
        """Train the one user of the store for someone else to clip.

        `request.clipping.contribution` of what is returned is what `collect` yields, up to the
        rounding of its sums.

        Returns:
            The user's tensors as training left them, unclipped, also where they are not finite:
            update and metrics minus their centres, all of the clipping's layout but the indicator,
            in its order. And the user's weight.

        Raises:
            InvalidValueError: the store has several users, its user is not in the request or has
                no examples, or a metric is unknown or does not fit.
            ModelError: a metric cannot be computed on a row of zeros.
            Exception: whatever training raises; its text may hold the user's data.
        """
        if self.users.population != 1:
            raise InvalidValueError(
                f"the store has {self.users.population} users; only one can send a raw update"
            )
        users = self._positions(request.users)
        if not np.any(self._sizes(users)):
            raise InvalidValueError("the user is not in the request, or has no examples")
        tensors = whole(self._sent(request, self._start(request), users))
        (weight,) = request.weighting.of(self._sizes(users)).tolist()
        asked = request.clipping.indicator
        names = [n for n in request.clipping.layout.names if asked is None or n != asked.tensor]
        return {name: tensors[name][0].cpu().numpy() for name in names}, weight

    def _start(self, request: RoundRequest) -> Start:
        if request.metrics:
            check_metrics(self.task, request.metrics, request.clipping, self._blank)
        return Start.of(request, self._constants, self.device)

    def _sums(self, request: RoundRequest) -> Iterator["_ChunkSum"]:
        start = self._start(request)
        users = self._positions(request.users)
        sizes, lanes = self._sizes(users), self._lanes(request)
        for number, chunk in enumerate(chunks(users, sizes, request.local, lanes)):
            yield from self._sums_of_chunk(request, start, chunk, f"chunk {number}")

    def _sums_of_chunk(
        self, request: RoundRequest, start: Start, chunk: npt.NDArray[np.int64], node: str
    ) -> Iterator["_ChunkSum"]:
        try:
            found = self._contribute(request, start, chunk, node)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if len(chunk) == 1:
                # The text of the error may hold the user's data.
                _log.warning("a user counts as zero: training raised %s", type(error).__name__)
                return
            for lane in range(len(chunk)):
                one = chunk[lane : lane + 1]
                yield from self._sums_of_chunk(request, start, one, f"{node}, lane {lane}")
        else:
            yield found

    def _contribute(
        self, request: RoundRequest, start: Start, chunk: npt.NDArray[np.int64], node: str
    ) -> "_ChunkSum":
        """Sum of what the users of a chunk contribute, and what an observer is told of them."""
        tensors = self._sent(request, start, chunk)
        diagnostics: tuple[ChunkDiagnostics, ...] = ()
        if self.observer is not None:
            losses = mean_losses(self._evaluated, start.tensors, self._examples(request, chunk))
            diagnostics = (diagnose_chunk(tensors, request, losses),)
        shares = request.weighting.of(self._sizes(chunk))
        weights = torch.from_numpy(shares).to(self.device, non_blocking=True)
        total = clipped_sum(tensors, request.clipping, weights)
        return _ChunkSum(node, len(chunk), total, float(shares.sum()), diagnostics)

    def _sent(self, request: RoundRequest, start: Start, chunk: npt.NDArray[np.int64]) -> Updates:
        """Updates and metrics of the users of a chunk, before they are clipped."""
        updates = self._train(request, start, chunk)
        if not request.metrics:
            return updates
        examples = self._examples(request, chunk)
        given = (self._evaluated, start.tensors, examples, request.metrics)
        return {**updates, **user_metrics(*given, updates, request.clipping.groups)}

    def _train(self, request: RoundRequest, start: Start, chunk: npt.NDArray[np.int64]) -> Updates:
        """Updates of the users of a chunk."""
        enrolled = chunk if self.hosted is None else self.hosted[chunk]
        starts, sizes = self.users.offsets[chunk], self._sizes(chunk)
        plan = schedule(enrolled, starts, sizes, request.local, request.local_key)
        # In memory the steps come first, so that a step is one piece of it.
        fields = self.users.take(plan.rows.swapaxes(0, 1))
        x, y = fields[self.task.inputs], fields[self.task.targets]
        batches = Batches.of(plan, x, y, self.device)
        with seeded(request.local_key, int(enrolled[0]), self.device):
            given = (self.task, start.parameters, start.constants, batches, request.local)
            if self._layers is not None:
                return train_layers_chunk(self._layers, *given)
            return train_chunk(*given)

    def _positions(self, users: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Positions in the store of those users that are in it."""
        if self.hosted is None:
            return users[(users >= 0) & (users < self.users.population)]
        return np.flatnonzero(np.isin(self.hosted, users))

    def _sizes(self, users: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Sizes of some users, at a cost that does not grow with the population."""
        return self.users.offsets[users + 1] - self.users.offsets[users]

    @cached_property
    def _largest(self) -> int:
        return int(self.users.sizes.max())

    @cached_property
    def _layers(self) -> Layers | None:
        blank = (self._blank[name] for name in (self.task.inputs, self.task.targets))
        return layers_of(self.task, *map(torch.from_numpy, blank))

    @cached_property
    def _blank(self) -> Mapping[str, npt.NDArray[np.generic]]:
        """One row of zeros to measure the model on; no user's data may decide if a round runs."""
        return {n: np.zeros((1, *f.shape[1:]), f.dtype) for n, f in self.users.fields.items()}

    @cached_property
    def _evaluated(self) -> Task:
        return self.task.evaluated()

    @cached_property
    def _example_bytes(self) -> int:
        return example_bytes(self.task, self._blank)

    def _examples(self, request: RoundRequest, chunk: npt.NDArray[np.int64]) -> Examples:
        """All examples of the users of a chunk, to be measured within the memory of a chunk."""
        one = self._example_bytes + metric_bytes(request.metrics)
        return Examples(self.users, chunk, lanes_within(self.chunk_memory, one), self.device)

    @cached_property
    def _constants(self) -> TorchTensors:
        return self.task.constants(self.device)

    def _lanes(self, request: RoundRequest) -> int:
        """How many users train at once."""
        one = lane_bytes(self.task, self._blank, request.local, self._largest, self._layers)
        return lanes_within(self.chunk_memory, one + metric_bytes(request.metrics))


@dataclass(frozen=True)
class _ChunkSum:
    """A partial sum that the device may still be working on; attributes as of `PartialSum`."""

    node: str
    users: int
    total: torch.Tensor
    weight: float
    diagnostics: tuple[ChunkDiagnostics, ...]

    @property
    def partial(self) -> PartialSum:
        """The partial sum, once the device is ready."""
        return PartialSum(self.node, self.users, self.total.cpu().numpy(), self.weight)
