"""Training the users of a chunk, and summing what they contribute."""

import copy
import logging
import threading
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.data.store import UserStore
from fedpriv.engine.batches import Batches
from fedpriv.engine.chunk_sum import ChunkSum
from fedpriv.engine.chunks import (
    blank,
    example_bytes,
    lane_bytes,
    lanes_within,
    metric_bytes,
    numbers_per_example,
    sizes_of,
)
from fedpriv.engine.clipping import clipped_sum
from fedpriv.engine.diagnostics import ChunkDiagnostics, diagnose_chunk
from fedpriv.engine.layers import Layers
from fedpriv.engine.learning import check_learning, learn
from fedpriv.engine.measuring import Examples, mean_losses, user_metrics
from fedpriv.engine.memory import keep_freed_memory
from fedpriv.engine.precision import Activations
from fedpriv.engine.qualifying import layers_of
from fedpriv.engine.schedule import schedule
from fedpriv.engine.seeding import draws, seeded
from fedpriv.engine.start import Start
from fedpriv.engine.task import Task, TorchTensors
from fedpriv.engine.updates import Updates
from fedpriv.federated.transport import RoundRequest

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trainer:
    """Trains chunks of users of a store, one chunk at a time.

    Attributes:
        task: model and loss.
        evaluated: the same in evaluation mode.
        layers: of the task, where users train in layers.
        constants: frozen parameters and buffers, on the device.
        users: their data.
        hosted: positions in the enrolled population of the store's users; None if they are those
            in the store.
        device: where to train.
        memory: bytes that a chunk may take, roughly.
        activations: of the model while users train.
        draws: whether training draws random numbers.
        observed: whether an observer is told of the users.
    """

    task: Task
    evaluated: Task
    layers: Layers | None
    constants: TorchTensors
    users: UserStore
    hosted: npt.NDArray[np.int64] | None
    device: torch.device
    memory: int
    activations: Activations
    draws: bool
    observed: bool
    # Held while a chunk trains: the models know the parameters of its users only.
    _one_chunk: threading.Lock = field(
        default_factory=threading.Lock, init=False, repr=False, compare=False
    )

    @classmethod
    def of(
        cls,
        task: Task,
        users: UserStore,
        hosted: npt.NDArray[np.int64] | None,
        device: torch.device,
        memory: int,
        activations: Activations,
        *,
        observed: bool,
    ) -> "Trainer":
        """Look at a task once for all chunks; arguments as the attributes.

        Raises:
            ModelError: the model cannot be trained with such activations on a row of zeros.
        """
        keep_freed_memory()
        constants = task.constants(device)
        row = blank(users)
        x, y = (torch.from_numpy(row[name]) for name in (task.inputs, task.targets))
        layers = layers_of(task, x, y)
        if activations != "float32":
            check_learning(task, layers, constants, row, device, activations)
        drawn, given = draws(task, constants, x, y), (users, hosted, device, memory, activations)
        return cls(task, task.evaluated(), layers, constants, *given, drawn, observed)

    def twin(self) -> "Trainer":
        """Another for the same users, with models of its own of the same tensors.

        The two may work at the same time, unless training draws random numbers.
        """
        models = self.task.model, self.evaluated.model
        shared = {id(t): t for m in models for t in (*m.parameters(), *m.buffers())}
        known = self.layers and replace(self.layers)  # without the copies that it keeps
        (model, evaluated), layers = copy.deepcopy((models, known), shared)
        return replace(
            self,
            task=replace(self.task, model=model),
            evaluated=replace(self.evaluated, model=evaluated),
            layers=layers,
        )

    def lanes(self, request: RoundRequest) -> int:
        """How many users the memory of a chunk is enough for."""
        one = lane_bytes(self.task, self._numbers, request.local, self._largest, self.layers)
        return lanes_within(self.memory, one + metric_bytes(request.metrics))

    def sums(
        self,
        request: RoundRequest,
        start: Start,
        chunk: npt.NDArray[np.int64],
        node: str,
    ) -> list[ChunkSum]:
        """Sum of the clipped contributions of a chunk.

        If training fails, users train one by one, each with a sum of its own, and one for whom it
        fails then counts as zero.

        Args:
            request: of the round.
            start: what users start from.
            chunk: positions of users in the store.
            node: name of the sum.

        Raises:
            MemoryError: there is too little memory, on a GPU `torch.OutOfMemoryError`.
        """
        try:
            return [self._sum(request, start, chunk, node)]
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if len(chunk) == 1:
                # The text of the error may hold the user's data.
                _log.warning("a user counts as zero: training raised %s", type(error).__name__)
                return []
            found: list[ChunkSum] = []
            for lane in range(len(chunk)):
                one = chunk[lane : lane + 1]
                found += self.sums(request, start, one, f"{node}, lane {lane}")
            return found

    def sent(
        self,
        request: RoundRequest,
        start: Start,
        chunk: npt.NDArray[np.int64],
    ) -> Updates:
        """Updates and metrics of the users of a chunk, before they are clipped."""
        with self._one_chunk:
            updates = self._train(request, start, chunk)
            if not request.metrics:
                return updates
            examples = self._examples(request, chunk)
            given = (self.evaluated, start.tensors, examples, request.metrics)
            return {**updates, **user_metrics(*given, updates, request.clipping.groups)}

    def _sum(
        self,
        request: RoundRequest,
        start: Start,
        chunk: npt.NDArray[np.int64],
        node: str,
    ) -> ChunkSum:
        tensors = self.sent(request, start, chunk)
        diagnostics: tuple[ChunkDiagnostics, ...] = ()
        if self.observed:
            losses = mean_losses(self.evaluated, start.tensors, self._examples(request, chunk))
            diagnostics = (diagnose_chunk(tensors, request, losses),)
        shares = request.weighting.of(sizes_of(self.users, chunk))
        weights = torch.from_numpy(shares).to(self.device, non_blocking=True)
        total = clipped_sum(tensors, request.clipping, weights)
        return ChunkSum(node, len(chunk), total, float(shares.sum()), diagnostics)

    def _train(
        self,
        request: RoundRequest,
        start: Start,
        chunk: npt.NDArray[np.int64],
    ) -> Updates:
        """Updates of the users of a chunk."""
        enrolled = chunk if self.hosted is None else self.hosted[chunk]
        starts, sizes = self.users.offsets[chunk], sizes_of(self.users, chunk)
        plan = schedule(enrolled, starts, sizes, request.local, request.local_key)
        fields = self.users.take(plan.rows)
        x, y = fields[self.task.inputs], fields[self.task.targets]
        batches = Batches.of(plan, x, y, self.device)
        first = int(enrolled[0])
        with seeded(request.local_key, first, self.device) if self.draws else nullcontext():
            return learn(self.task, self.layers, start, batches, request.local, self.activations)

    def _examples(self, request: RoundRequest, chunk: npt.NDArray[np.int64]) -> Examples:
        """All examples of the users of a chunk, to be measured within the memory of a chunk."""
        one = example_bytes(self._numbers) + metric_bytes(request.metrics)
        return Examples(self.users, chunk, lanes_within(self.memory, one), self.device)

    @cached_property
    def _largest(self) -> int:
        return int(self.users.sizes.max())

    @cached_property
    def _numbers(self) -> tuple[int, int]:
        return numbers_per_example(self.task, blank(self.users))
