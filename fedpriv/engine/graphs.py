"""What is done with a chunk, as CUDA graphs.

In one shape it is the same sequence of kernels for every chunk of users, and many of them take less
time than Python takes to launch them. So the first chunk of a shape is computed as on any device,
the second is captured, and from then on the graph is replayed, which launches its kernels together.
A graph makes the sum of a chunk if it is to be clipped as in the round before, and else what users
learn. They are the same kernels, so a user gets the same to the last bit. That random users learn
the same is checked by `engine.roads`, which compares what they get in the first chunks of a
shape; that sums are the same is tested (`tests/engine/test_gpu.py`).
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
"""What comes of a start and of what a chunk is made of, with kernels in one order."""


class Graphs:
    """Computes chunks on a GPU, and captures the computation of each shape as a graph.

    Settings of the local algorithm are constants of a graph, so graphs last as long as they do.
    """

    def __init__(self, device: torch.device, constants: TorchTensors, memory: int) -> None:
        """`constants` are never written to; graphs are dropped if less than `memory` is free."""
        self._device, self._constants, self._memory = device, constants, memory
        self._local: LocalTraining | None = None
        self._clipping: Clipping | None = None  # of the last round
        self.steady = False  # whether it is that of the round before
        self._seen: set[Hashable] = set()  # shapes in which users have trained
        self._captured: dict[Hashable, _Graph | None] = {}  # None: it cannot be captured
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None  # of memory, shared by all graphs: none is replayed during another

    def begin(self, clipping: Clipping) -> None:
        """Begin a round. Graphs of sums serve only rounds that clip as the last one did."""
        steady = clipping == self._clipping
        if self.steady and not steady:
            self.clear()
        self._clipping, self.steady = clipping, steady

    def may_capture(self, shape: Hashable) -> bool:
        """Whether capturing this shape has not failed yet."""
        return self._captured.get(shape, shape) is not None

    def computed(
        self,
        compute: Compute,
        local: LocalTraining,
        shape: Hashable,
        start: RoundParameters,
        given: TorchTensors,
    ) -> Updates:
        """What `compute` returns, in memory that the next call overwrites.

        It must do the same with every chunk of a shape, as long as `local` is the same.
        """
        if local != self._local:
            self.clear()
            self._local = local
        if shape not in self._seen:
            self._seen.add(shape)
            return compute(start, given)
        if shape not in self._captured:
            if self._free() < self._memory:
                self._drop()
            self._captured[shape] = self._capture(compute, start, given)
        graph = self._captured[shape]
        return compute(start, given) if graph is None else graph.replayed(start, given)

    def clear(self) -> None:
        """Forget what was captured, and free its memory."""
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
        self, compute: Compute, start: RoundParameters, given: TorchTensors
    ) -> "_Graph | None":
        try:
            # This also makes the present stream current again if a capture fails.
            with torch.cuda.stream(torch.cuda.current_stream(self._device)):
                where = self._stream, self._pool
                graph = _Graph(compute, start, given, self._constants, *where)
        except Exception as error:  # a model may do what cannot be captured
            _log.info("a shape is not captured: %s", type(error).__name__)
            return None
        self._pool = graph.pool
        return graph


class _Graph:
    """The captured computation of one shape, on what its input buffers hold."""

    def __init__(
        self,
        compute: Compute,
        start: RoundParameters,
        given: TorchTensors,
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
        self._held = start  # whose numbers `_start` has
        self._given = {name: tensor.clone() for name, tensor in given.items()}
        # Once before capturing, so that libraries have prepared what they need on the stream.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute(self._start, self._given)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile.
        with torch.cuda.graph(self._graph, pool, stream, capture_error_mode="thread_local"):
            self._found = compute(self._start, self._given)

    @property
    def pool(self) -> Any:
        """Its memory, which graphs can share that are never replayed at the same time."""
        return self._graph.pool()

    def replayed(self, start: RoundParameters, given: TorchTensors) -> Updates:
        """What this start and what is given lead to."""
        changed = [(self._given, given)]
        if start is not self._held:
            self._held = start
            changed += [
                (self._start.parameters, start.parameters),
                (self._start.control, start.control),
                (self._changing, start.constants),
            ]
        for own, others in changed:
            for name, tensor in own.items():
                tensor.copy_(others[name])
        self._graph.replay()
        return self._found
