"""What is captured is replayed with other users; CUDA itself is played by a recorder here."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedpriv.engine import trainer
from fedpriv.engine.arithmetic import plain_arithmetic
from fedpriv.engine.examples import Chunk, Examples, held_on
from fedpriv.engine.graphs import Compute, Graphs
from fedpriv.engine.roads import Road
from fedpriv.engine.task import RoundParameters
from fedpriv.engine.trainer import Trainer, sizes_of
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.clipping_torch import TorchTensors, Updates, integer_sum
from fedpriv.privacy.layout import Layout, flat
from fedpriv.training.request import LocalTraining, RoundRequest
from tests.isolation import (
    LOCALS,
    READERS,
    Plan,
    User,
    request_of,
    store_of,
    task_of,
)

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

    def __call__(self, start: RoundParameters, given: TorchTensors) -> Updates:
        self.calls += 1
        if self.breaks and self.calls == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        found = torch.zeros(1)

        def compute() -> None:
            all_ = [*start.parameters.values(), *start.control.values(), *start.constants.values()]
            read = [*all_, *given.values()]
            found.copy_(sum(10.0**place * tensor.sum() for place, tensor in enumerate(read)))

        self.cuda.last = compute
        compute()
        return {"w": found}


FROZEN = torch.full((1,), 3.0)


def given(digit: float) -> tuple[RoundParameters, TorchTensors]:
    """A start and what batches are made of, that hold this digit, but for what is frozen."""
    one = lambda: torch.full((1,), digit)  # noqa: E731
    constants = {"frozen": FROZEN, "mean": one()}
    start = RoundParameters({"w": one()}, constants, {"w": one()})
    return start, {"a": one(), "b": one()}


def result(found: Updates) -> float:
    return float(found["w"][0:1])


def test_a_replay_reads_what_is_given(cuda: Recorder) -> None:
    graphs, train = Graphs(CPU, {"frozen": FROZEN}, 1), Sums(cuda)
    first = given(1.0)
    for digit, calls in ((1.0, 1), (2.0, 3), (5.0, 3), (4.0, 3)):
        start, batches = first if digit == 1.0 else given(digit)
        found = graphs.computed(train, LOCAL, "shape", start, batches)
        assert result(found) == result(Sums(cuda)(start, batches))
        assert train.calls == calls  # captured with the second, after a chunk that is thrown away
    assert len(cuda.captured) == 1
    for start, batches in (first, given(1.0)):  # nothing given was written to
        assert result(Sums(cuda)(start, batches)) == result(Sums(cuda)(*given(1.0)))
    assert float(FROZEN) == 3.0


def trained(graphs: Graphs, train: Sums, local: LocalTraining, shape: Any, digit: float) -> None:
    start, batches = given(digit)
    found = graphs.computed(train, local, shape, start, batches)
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


USERS = 70
LIMITED = LocalTraining(learning_rate=0.1, batch_size=3, epochs=2, max_examples=5)


class Replays(Graphs):
    """In the place of graphs: what computed the first chunk of a shape computes all others.

    It holds all that a graph would hold of that chunk.
    """

    def __init__(self) -> None:
        self.first: dict[Any, Compute] = {}
        self.replayed, self._captured = 0, {}
        self._clipping, self.steady = None, False

    def clear(self) -> None:
        self.first.clear()

    def computed(
        self,
        compute: Compute,
        local: LocalTraining,
        shape: Hashable,
        start: RoundParameters,
        given: TorchTensors,
    ) -> Updates:
        key = shape, local
        self.replayed += key in self.first
        return self.first.setdefault(key, compute)(start, given)


def sum_by_reference(
    _: object, updates: Updates, clipping: Clipping, weighed: torch.Tensor
) -> torch.Tensor:
    """In the place of kernels: whole weights as those who are weighed have them."""
    users = int(weighed[0].sum())
    units = [np.full(users, clipping.weight_cap)]
    units += [torch.round(share * clipping.weight_cap).numpy() for share in weighed[2::2]]
    return integer_sum(updates, clipping, units[-1][:users].astype(np.int64))


# Each kind of model once on the device and once not, and all for the one that trains fastest.
REPLAYED = [("mlp", LOCALS[0], True), ("mlp", LOCALS[1], False), ("mlp", LIMITED, True)]
REPLAYED += [(model, LOCALS[0], True) for model in ("cnn", "transformer", "own")]
REPLAYED += [(model, LIMITED, False) for model in ("cnn", "transformer", "own")]


def sum_of_chunks(trained: Trainer, request: RoundRequest, users: Sequence[int]) -> np.ndarray:
    """What a GPU's trainer adds up of some users, to which their examples are given."""
    total = np.zeros(request.clipping.layout.dimension, np.int64)
    start = trained.begin(request)
    for chunk in chunks_of(trained, request, users):
        examples = trained._examples(request, chunk)
        examples = replace(examples, resident=trained.resident)
        examples = replace(examples, made_of=examples.given(measured=True))
        weights = np.minimum(examples.counts, request.clipping.weight_cap)
        given = request, start, examples
        with plain_arithmetic(CPU):
            found = trained._total(*given, weights)
            if found is None:
                found = integer_sum(trained._sent(*given), request.clipping, weights)
        total += found.numpy()
    return total


def chunks_of(trained: Trainer, request: RoundRequest, users: Sequence[int]) -> list[Chunk]:
    chosen = np.array(users)
    sizes = sizes_of(trained.users, chosen)
    return Road((32,), 4).chunks(trained, request.local, chosen, sizes)


@pytest.mark.parametrize(("model", "local", "resident"), REPLAYED, ids=str)
def test_a_replay_gives_what_a_chunk_gives(
    model: str, local: LocalTraining, resident: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "kernels_on", lambda _: trainer)
    monkeypatch.setattr(trainer, "sum_by_kernels", sum_by_reference)
    sizes = np.random.default_rng(0).choice([3, 11], USERS)
    users = [User("normal", int(n), i) for i, n in enumerate(sizes)]
    store = store_of(users, words=model in READERS)
    plain = Trainer(task_of(model), store, None, CPU, 2**21, "float32")
    replaying, replays = replace(plain), Replays()
    held = held_on(CPU, {name: store.fields[name] for name in plain.task.fields})
    vars(replaying).update(graphs=replays, resident=held if resident else None)
    request = request_of(Plan(model, "per-layer", "weights", local, True, True, 0.3), USERS)
    other = request_of(Plan(model, "per-layer", "weights", local, True, True, 0.2), USERS)
    seen = set[bool]()
    for asked in (request, replace(request, local_key=bytes(32)), other, other, request):
        for some in (range(USERS), range(3)):
            expected = plain.sum_of(asked, chunks_of(plain, asked, some)).partial.total
            with monkeypatch.context() as patch:
                patch.setattr(Examples, "used", property(in_all_lanes))
                found = sum_of_chunks(replaying, asked, some)
            np.testing.assert_array_equal(found, expected)
            assert found.any()
        seen |= {Clipping in map(type, shape) for shape, _ in replays.first}
    assert replays.replayed
    assert seen == {True, False}  # of sums, and of updates


def in_all_lanes(examples: Examples) -> list[list[int]]:
    """As on a GPU."""
    return [[examples.lanes] * examples.schedule.slices for _ in examples.slices]


def test_sums_are_replayed_while_clipping_is_the_same(cuda: Recorder) -> None:
    graphs, train = Graphs(CPU, {"frozen": FROZEN}, 1), Sums(cuda)
    layout, found = Layout(("w",), ((1,),)), []
    one, other = (Clipping(layout, flat(layout, norm)) for norm in (0.3, 0.2))
    for clipping in (one, one, one, other, one, one):
        graphs.begin(clipping)
        found.append((graphs.steady, len(graphs._captured)))
        for digit in (1.0, 2.0, 3.0):
            trained(graphs, train, LOCAL, (clipping, graphs.steady), digit)
    kept = [0, 1, 2, 0, 1, 2]  # those of sums end with their clipping, and all others with them
    steady = [False, True, True, False, False, True]
    assert found == list(zip(steady, kept, strict=True))
