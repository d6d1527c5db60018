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
from fedpriv.engine.batches import Examples, Integers, Rung, counted, schedule
from fedpriv.engine.chunks import (
    Chunk,
    ChunkSum,
    Footprint,
    blank,
    filled,
    lanes_for,
    most_lanes,
    most_users,
    sizes_of,
)
from fedpriv.engine.clipping import integer_sum
from fedpriv.engine.diagnostics import ChunkDiagnostics, diagnose_chunk
from fedpriv.engine.layered import train_layers_chunk
from fedpriv.engine.layers import Layers
from fedpriv.engine.local import train_alone, train_chunk
from fedpriv.engine.measuring import Measuring, mean_losses, user_metrics
from fedpriv.engine.precision import Activations, plain_arithmetic
from fedpriv.engine.qualifying import layers_of
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
        measured: of the evaluated task, likewise.
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
    measured: Layers | None
    constants: TorchTensors
    users: UserStore
    hosted: Integers | None
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
        """Look at a task once for all chunks; arguments as the attributes."""
        row, evaluated = blank(users), task.evaluated()
        with plain_arithmetic(device):
            constants = task.constants(device)
            x, y = (torch.from_numpy(row[name]) for name in (task.inputs, task.targets))
            drawn = draws(task, constants, x, y)
            layers = None if drawn else layers_of(task, x, y)
            measured = None if layers is None else layers_of(evaluated, x, y)
        given = (constants, users, hosted, device, memory, activations)
        return cls(task, evaluated, layers, measured, *given, drawn, observed)

    def twin(self) -> "Trainer":
        """Another for the same users, with models of its own of the same tensors."""
        models = self.task.model, self.evaluated.model
        shared = {id(t): t for m in models for t in (*m.parameters(), *m.buffers())}
        # Without the copies that they keep.
        known = [layers and replace(layers) for layers in (self.layers, self.measured)]
        (model, evaluated), (layers, measured) = copy.deepcopy((models, known), shared)
        return replace(
            self,
            task=replace(self.task, model=model),
            evaluated=replace(self.evaluated, model=evaluated),
            layers=layers,
            measured=measured,
        )

    def most_lanes(self, request: RoundRequest, rung: Rung) -> int:
        """How many users of a rung train together at most; who they are does not matter."""
        task, local = self.task, request.local
        given = (task, self.layers, local, request.metrics, rung)
        return most_lanes(*given, self._footprint, self.memory)

    def lanes_for(self, users: int, rung: Rung) -> int:
        """How many lanes so many users of a rung need at least."""
        return lanes_for(users, rung, self._footprint)

    def filled(self, rung: Rung) -> int:
        """The number of users of a rung of which multiples need no blank lanes."""
        return filled(rung, self._footprint)

    def most_users(self, lanes: int, rung: Rung) -> int:
        """How many users of a rung so many lanes are enough for."""
        return most_users(lanes, rung, self._footprint)

    def sums(self, request: RoundRequest, start: Start, chunk: Chunk) -> list[ChunkSum]:
        """Sum of the contributions of a chunk.

        If training fails, half of the users train in the same shape, with blanks beside them, and
        then the other half; one for whom it fails alone counts as zero. So it is also where there
        is too little memory.

        Args:
            request: of the round.
            start: what users start from.
            chunk: the users.
        """
        try:
            return [self._sum(request, start, chunk)]
        except Exception as error:
            if len(chunk.users) == 1:
                # The text of the error may hold the user's data.
                _log.warning("a user counts as zero: training raised %s", type(error).__name__)
                return []
        half = len(chunk.users) // 2
        return [
            found
            for number, users in enumerate((chunk.users[:half], chunk.users[half:]))
            for found in self.sums(
                request, start, replace(chunk, name=f"{chunk.name}.{number}", users=users)
            )
        ]

    def sent(self, request: RoundRequest, start: Start, chunk: Chunk) -> Updates:
        """Updates and metrics of the lanes of a chunk, before they are clipped."""
        return self._sent(request, start, chunk, self._examples(request, chunk))

    def _sent(
        self, request: RoundRequest, start: Start, chunk: Chunk, examples: Examples
    ) -> Updates:
        with self._one_chunk, plain_arithmetic(self.device):
            updates = self._train(request, start, chunk, examples)
            if not request.metrics:
                return updates
            given = (self._measuring(start), examples, request.metrics)
            return {**updates, **user_metrics(*given, updates, request.clipping.groups)}

    def _sum(self, request: RoundRequest, start: Start, chunk: Chunk) -> ChunkSum:
        examples = self._examples(request, chunk)
        tensors = self._sent(request, start, chunk, examples)
        diagnostics: tuple[ChunkDiagnostics, ...] = ()
        if self.observed:
            losses = mean_losses(self._measuring(start), examples)
            diagnostics = (diagnose_chunk(tensors, request, losses, len(chunk.users)),)
        weights = np.minimum(examples.counts, request.clipping.weight_cap)
        total = integer_sum(tensors, request.clipping, weights)
        return ChunkSum(chunk.name, len(chunk.users), total, int(weights.sum()), diagnostics)

    def _train(
        self, request: RoundRequest, start: Start, chunk: Chunk, examples: Examples
    ) -> Updates:
        """Updates of the lanes of a chunk."""
        given = (self.task, start.parameters, start.constants)
        training = (examples.batches(), request.local, self.activations)
        if not chunk.together:
            (user,) = examples.users.tolist()
            seed = seeded(request.local_key, user, self.device) if self.draws else nullcontext()
            with seed:
                return {**train_alone(*given, *training)}
        if self.layers is None:
            return {**train_chunk(*given, *training)}
        low_rank = self.layers.low_rank(chunk.rung.steps, chunk.rung.width)
        return train_layers_chunk(self.layers, *given, *training, low_rank)

    def _measuring(self, start: Start) -> Measuring:
        if self.measured is None:
            return Measuring.of(self.evaluated, start.tensors)
        return Measuring.in_layers(self.evaluated, self.measured, start)

    def _examples(self, request: RoundRequest, chunk: Chunk) -> Examples:
        enrolled = chunk.users if self.hosted is None else self.hosted[chunk.users]
        starts, sizes = self.users.offsets[chunk.users], sizes_of(self.users, chunk.users)
        local = request.local
        plan = schedule(enrolled, starts, sizes, local, request.local_key, chunk.rung)
        counts = counted(sizes, local)
        where = (self.users, self.device, plan, self.task)
        return Examples(chunk.rung, chunk.lanes, enrolled, counts, *where)

    @cached_property
    def _footprint(self) -> Footprint:
        return Footprint.of(self.task, blank(self.users))
