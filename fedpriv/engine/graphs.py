"""The training of chunks on a GPU as CUDA graphs.

Chunks of one shape run the same sequence of kernels, and launching many of them from Python takes
longer than running them. So the first chunk of a shape is computed as on any device, the second is
captured as a graph, and later ones replay the graph, which launches its kernels together. A graph
computes the sum of a chunk if the clipping is that of the previous round, and otherwise the updates
of users. Its kernels are the same, so its results are equal to the last bit. `engine.roads` checks
this for the updates of random users in the first chunks of a shape, and `tests/engine/test_gpu.py`
for sums.
"""

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch

from fedpriv.engine.task import RoundParameters
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.clipping_torch import TorchTensors, Updates
from fedpriv.training.request import LocalTraining

_log = logging.getLogger(__name__)

Compute = Callable[[RoundParameters, TorchTensors], Updates]
"""Computes updates from the start of a round and the tensors of a chunk, always the same way."""


class Graphs:
    """Computes chunks on a GPU, and captures the computation of each shape as a graph.

    The settings of the local algorithm are constants of a graph, so graphs are dropped when these
    change.
    """

    def __init__(self, device: torch.device, constants: TorchTensors, memory: int) -> None:
        """`constants` are never overwritten; graphs are dropped if less than `memory` is free."""
        self._device, self._constants, self._memory = device, constants, memory
        self._local: LocalTraining | None = None
        self._clipping: Clipping | None = None  # of the present round
        self.steady = False  # whether the clipping is that of the previous round
        self._seen: set[Hashable] = set()  # shapes in which users have trained
        self._captured: dict[Hashable, _Graph | None] = {}  # None: it cannot be captured
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None  # memory shared by all graphs, as they are never replayed at once

    def begin(self, clipping: Clipping) -> None:
        """Begin a round. Graphs of sums serve only while the clipping remains the same."""
        steady = clipping == self._clipping
        if self.steady and not steady:
            self.clear()
        self._clipping, self.steady = clipping, steady

    def may_capture(self, shape: Hashable) -> bool:
        """Return False if capturing this shape has failed before."""
        return self._captured.get(shape, shape) is not None

    def computed(
        self,
        compute: Compute,
        local: LocalTraining,
        shape: Hashable,
        start: RoundParameters,
        inputs: TorchTensors,
    ) -> Updates:
        """Return the result of `compute`, in memory that the next call overwrites.

        `compute` must run the same kernels for every chunk of a shape while `local` is the same.
        """
        if local != self._local:
            self.clear()
            self._local = local
        if shape not in self._seen:
            self._seen.add(shape)
            return compute(start, inputs)
        if shape not in self._captured:
            if self._free() < self._memory:
                self._drop()
            self._captured[shape] = self._capture(compute, start, inputs)
        graph = self._captured[shape]
        return compute(start, inputs) if graph is None else graph.replayed(start, inputs)

    def clear(self) -> None:
        """Drop all graphs, and free their memory."""
        self._seen.clear()
        self._drop()

    def _drop(self) -> None:
        if any(self._captured.values()):
            torch.cuda.synchronize(self._device)  # a replay may still be running
        self._captured.clear()
        self._pool = None  # a pool ends with its last graph

    def _free(self) -> int:
        free, _ = torch.cuda.mem_get_info(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        return free + reserved - torch.cuda.memory_allocated(self._device)

    def _capture(
        self, compute: Compute, start: RoundParameters, inputs: TorchTensors
    ) -> "_Graph | None":
        try:
            # This also makes the present stream current again if a capture fails.
            with torch.cuda.stream(torch.cuda.current_stream(self._device)):
                memory = self._stream, self._pool
                graph = _Graph(compute, start, inputs, self._constants, *memory)
        except Exception as error:  # a model may do things that cannot be captured
            _log.info("a shape is not captured: %s", type(error).__name__)
            return None
        self._pool = graph.pool
        return graph


class _Graph:
    """The captured computation of one shape, on buffers for its inputs."""

    def __init__(
        self,
        compute: Compute,
        start: RoundParameters,
        inputs: TorchTensors,
        constants: TorchTensors,
        stream: Any,
        pool: Any,
    ) -> None:
        changing = {n: t for n, t in start.constants.items() if constants.get(n) is not t}
        self._changing = {n: t.clone() for n, t in changing.items()}
        self._start = RoundParameters(
            {n: t.clone() for n, t in start.parameters.items()},
            start.constants | self._changing,
            {n: t.clone() for n, t in start.control.items()},
            start.personal,
        )
        self._copied = start  # the start whose numbers `_start` has
        self._inputs = {name: tensor.clone() for name, tensor in inputs.items()}
        # A first run, in which libraries initialise themselves on the stream.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute(self._start, self._inputs)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(self._graph, pool, stream, capture_error_mode="thread_local"):
            self._updates = compute(self._start, self._inputs)

    @property
    def pool(self) -> Any:
        """Memory of the graph, which graphs that are never replayed at once can share."""
        return self._graph.pool()

    def replayed(self, start: RoundParameters, inputs: TorchTensors) -> Updates:
        """Return the updates for these inputs, in memory that the next call overwrites."""
        copies = [(self._inputs, inputs)]
        if start is not self._copied:
            self._copied = start
            copies += [
                (self._start.parameters, start.parameters),
                (self._start.control, start.control),
                (self._changing, start.constants),
            ]
        for buffers, tensors in copies:
            for name, buffer in buffers.items():
                buffer.copy_(tensors[name])
        self._graph.replay()
        return self._updates
