"""What is captured is replayed with other users; CUDA itself is played by a recorder here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from fedpriv.engine.graphs import Graphs
from fedpriv.engine.local_training import Batches
from fedpriv.engine.task import RoundParameters
from fedpriv.privacy.clipping_torch import Updates
from fedpriv.privacy.round import LocalTraining

CPU = torch.device("cpu")
LOCAL = LocalTraining(0.1, epochs=1)


class Recorder:
    """In the place of `torch.cuda`: a graph does again what was done while it was captured."""

    def __init__(self) -> None:
        self.captured: list[Recorder.CUDAGraph] = []
        self.free, self.waited, self.last = 10, 0, lambda: None
        self.pools: list[object] = []

    class CUDAGraph:
        def __init__(self) -> None:
            self.replay: Callable[[], None] = lambda: None

        def pool(self) -> tuple[int, int]:
            return (0, 1)

    class Stream:
        def __init__(self, *_: object) -> None: ...

        def wait_stream(self, _: object) -> None: ...

    def stream(self, _: object) -> nullcontext[None]:
        return nullcontext()

    def current_stream(self, *_: object) -> Stream:
        return self.Stream()

    @contextmanager
    def graph(self, graph: CUDAGraph, pool: object, *_: object, **__: object) -> Iterator[None]:
        self.pools.append(pool)
        yield
        graph.replay = self.last
        self.captured.append(graph)

    def mem_get_info(self, _: object) -> tuple[int, int]:
        return self.free, 100

    def synchronize(self, _: object) -> None:
        self.waited += 1

    def memory_reserved(self, _: object) -> int:
        return 0

    memory_allocated = memory_reserved


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr("fedpriv.engine.graphs.torch.cuda", recorder)
    return recorder


class Sums:
    """Local training that gives the sum of all that it reads, each in its own digit."""

    def __init__(self, cuda: Recorder, *, breaks: bool = False) -> None:
        self.cuda, self.breaks, self.calls = cuda, breaks, 0

    def __call__(self, start: RoundParameters, batches: Batches) -> Updates:
        self.calls += 1
        if self.breaks and self.calls == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        found = torch.zeros(1)

        def compute() -> None:
            x = batches.x
            inputs = [*x.values()] if isinstance(x, dict) else [x]
            all_ = [*start.parameters.values(), *start.control.values(), *start.constants.values()]
            read = [*all_, *inputs, batches.y, batches.weights]
            found.copy_(sum(10.0**place * tensor.sum() for place, tensor in enumerate(read)))

        self.cuda.last = compute
        compute()
        return {"w": found}


FROZEN = torch.full((1,), 3.0)


def given(digit: float, *, named: bool = False) -> tuple[RoundParameters, Batches]:
    """A start and batches that hold this digit, but for what is frozen."""
    one = lambda: torch.full((1,), digit)  # noqa: E731
    constants = {"frozen": FROZEN, "mean": one()}
    start = RoundParameters({"w": one()}, constants, {"w": one()})
    return start, Batches({"a": one(), "b": one()} if named else one(), one(), one(), padded=False)


def result(found: Updates) -> float:
    return float(found["w"][0:1])


@pytest.mark.parametrize("named", [False, True])
def test_a_replay_reads_what_is_given(cuda: Recorder, named: bool) -> None:
    graphs, train = Graphs(CPU, {"frozen": FROZEN}, 1), Sums(cuda)
    first = given(1.0, named=named)
    for digit, calls in ((1.0, 1), (2.0, 3), (5.0, 3), (4.0, 3)):
        start, batches = first if digit == 1.0 else given(digit, named=named)
        found = graphs.trained(train, LOCAL, "shape", start, batches)
        assert result(found) == result(Sums(cuda)(start, batches))
        assert train.calls == calls  # captured with the second, after a chunk that is thrown away
    assert len(cuda.captured) == 1
    for start, batches in (first, given(1.0, named=named)):  # nothing given was written to
        assert result(Sums(cuda)(start, batches)) == result(Sums(cuda)(*given(1.0, named=named)))
    assert float(FROZEN) == 3.0


def trained(graphs: Graphs, train: Sums, local: LocalTraining, shape: Any, digit: float) -> None:
    start, batches = given(digit)
    found = graphs.trained(train, local, shape, start, batches)
    assert result(found) == result(Sums(train.cuda)(start, batches))


def test_each_shape_and_algorithm_is_captured_by_itself(cuda: Recorder) -> None:
    graphs, train = Graphs(CPU, {"frozen": FROZEN}, 1), Sums(cuda)
    for local, shape in ((LOCAL, 1), (LOCAL, 2), (LocalTraining(0.2, epochs=1), 1)):
        before = len(cuda.captured)
        for digit in (1.0, 2.0, 3.0):
            trained(graphs, train, local, shape, digit)
        assert len(cuda.captured) == before + 1


def test_graphs_are_dropped_where_memory_is_short(cuda: Recorder) -> None:
    graphs, train = Graphs(CPU, {"frozen": FROZEN}, memory=5), Sums(cuda)
    for free, kept in ((5, 1), (5, 2), (4, 1)):
        cuda.free = free
        for digit in (1.0, 2.0, 3.0):
            trained(graphs, train, LOCAL, free * 10 + kept, digit)
        assert len(graphs._captured) == kept
    assert cuda.waited == 1  # for those that may be under way
    assert cuda.pools == [None, (0, 1), None]  # which ended with them


def test_what_cannot_be_captured_trains_as_before(cuda: Recorder) -> None:
    graphs, train = Graphs(CPU, {"frozen": FROZEN}, 1), Sums(cuda, breaks=True)
    for digit in (1.0, 2.0, 3.0):
        trained(graphs, train, LOCAL, "shape", digit)
    assert not cuda.captured
    assert train.calls == 4  # it is tried once
