"""Chunks side by side in threads: the sums of one thread, in the same order."""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedpriv.data.store import UserStore
from fedpriv.engine.chunk_sum import ChunkSum
from fedpriv.engine.chunks import even
from fedpriv.engine.seeding import draws
from fedpriv.engine.task import Task
from fedpriv.engine.threads import in_threads
from fedpriv.engine.trainer import Trainer
from fedpriv.engine.transport import InProcessTransport
from fedpriv.federated.transport import LocalTraining, RoundRequest
from fedpriv.losses import cross_entropy
from tests.engine.everyone import request_under, users_of

SIZES = [3, 8, 8, 8, 1, 5, 8, 8, 2, 8, 8, 6]
RAISING = 4


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@given(st.integers(1, 4), st.integers(0, 12))
def test_results_come_in_the_order_of_the_jobs(workers: int, jobs: int) -> None:
    found = in_threads(range(workers), range(jobs), lambda _, job: job * job)
    assert list(found) == [job * job for job in range(jobs)]


def test_each_worker_does_one_job_at_a_time_in_one_thread_of_torch() -> None:
    together = threading.Barrier(3, timeout=60)
    busy = [threading.Lock() for _ in range(3)]

    def work(worker: threading.Lock, _job: int) -> tuple[bool, int]:
        alone = worker.acquire(blocking=False)
        together.wait()
        worker.release()
        return alone, torch.get_num_threads()

    with torch_threads(5):
        assert list(in_threads(busy, range(9), work)) == [(True, 1)] * 9
        assert torch.get_num_threads() == 5
        seen: list[int] = []
        other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert seen == [5]


def test_python_gives_its_lock_away_sooner_meanwhile() -> None:
    before = sys.getswitchinterval()
    (meanwhile,) = in_threads([0], [0], lambda *_: sys.getswitchinterval())
    assert meanwhile == pytest.approx(1e-4)
    assert sys.getswitchinterval() == before


def test_no_more_jobs_begin_than_are_waited_for() -> None:
    begun: list[int] = []
    found = in_threads(range(2), range(10), lambda _, job: begun.append(job))
    for taken in range(1, 4):
        next(found)
        assert len(begun) <= taken + 2
    found.close()
    assert len(begun) <= 5


def test_what_a_job_raises_is_raised_and_later_jobs_do_not_begin() -> None:
    begun: list[int] = []

    def work(_worker: int, job: int) -> None:
        begun.append(job)
        if job == 1:
            raise MemoryError("too little")

    with torch_threads(3), pytest.raises(MemoryError, match="too little"):
        list(in_threads(range(2), range(10), work))
    assert max(begun) <= 3


@given(st.integers(0, 500), st.integers(1, 60), st.integers(1, 9))
def test_chunks_are_even(users: int, most: int, threads: int) -> None:
    each = even(users, most, threads)
    assert 1 <= each <= most
    count = -(-users // each)
    least = -(-users // most)
    # As many chunks as threads, or as few more as memory asks for.
    assert count <= -(-least // threads) * threads


def make_users() -> UserStore:
    users = users_of(SIZES)
    users.fields["y"][users.rows_of(RAISING)] = 99
    return users


def request_to(task: Task) -> RoundRequest:
    return request_under(task, LocalTraining(0.1, batch_size=4, epochs=2), len(SIZES), 0.3)


def total_of(task: Task, threads: int, memory: int) -> tuple[np.ndarray, list[str]]:
    """The sum of a round, and the names of its parts."""
    transport = InProcessTransport(task, make_users(), torch.device("cpu"), memory)
    with torch_threads(threads):
        parts = list(transport.collect(request_to(task)))
    return sum(part.total for part in parts), [part.node for part in parts]


class OwnWeights(nn.Module):
    """Layers that the engine does not know: users train by vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 3, generator=torch.Generator().manual_seed(0)) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.w)


MODELS = {
    "layers": lambda: nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Linear(8, 3)),
    "vmap": OwnWeights,
}


@pytest.mark.parametrize("memory", [1, 10**9])
@pytest.mark.parametrize("kind", sorted(MODELS))
def test_sums_are_those_of_one_thread(kind: str, memory: int) -> None:
    torch.manual_seed(0)
    task = Task(MODELS[kind](), cross_entropy)
    alone, _ = total_of(task, 1, memory)
    before = torch.random.get_rng_state()
    together, names = total_of(task, 3, memory)
    assert torch.equal(before, torch.random.get_rng_state())
    assert np.any(alone)
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-6)
    numbers = [int(name.split(",")[0].removeprefix("chunk ")) for name in names]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) >= 3
    again, _ = total_of(task, 3, memory)
    np.testing.assert_array_equal(together, again)


def test_as_many_chunks_train_side_by_side_as_there_are_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    together = threading.Barrier(3, timeout=60)
    trainers, threads = set(), set()

    def sums(trainer: Trainer, *given: object) -> list[ChunkSum]:
        if given[3] in {"chunk 0", "chunk 1", "chunk 2"}:
            together.wait()
        trainers.add(id(trainer.task.model))
        threads.add(torch.get_num_threads())
        return []

    monkeypatch.setattr(Trainer, "sums", sums)
    torch.manual_seed(0)
    task = Task(MODELS["layers"](), cross_entropy)
    transport = InProcessTransport(task, make_users(), torch.device("cpu"), 10**9)
    with torch_threads(3):
        assert list(transport.collect(request_to(task))) == []
        assert torch.get_num_threads() == 3
    assert len(trainers) == 3
    assert threads == {1}


def test_users_who_draw_random_numbers_share_no_generator() -> None:
    torch.manual_seed(0)
    task = Task(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)), cross_entropy)
    alone, names = total_of(task, 1, 10**9)
    together, others = total_of(task, 3, 10**9)
    np.testing.assert_array_equal(together, alone)
    assert names == others


@pytest.mark.parametrize(
    ("last", "drawing"), [(nn.Tanh(), False), (nn.Dropout(0.1), True), (nn.Linear(7, 1), True)]
)
def test_draws_is_known_from_one_example_or_feared(last: nn.Module, *, drawing: bool) -> None:
    torch.manual_seed(0)
    task = Task(nn.Sequential(nn.Linear(6, 3), last), cross_entropy)
    before = torch.random.get_rng_state()
    x, y = torch.zeros(1, 6), torch.zeros(1, dtype=torch.int64)
    assert draws(task, task.constants(torch.device("cpu")), x, y) is drawing
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("known", [True, False])
def test_requests_at_the_same_time_do_not_meet_in_a_model(known: bool) -> None:
    middle = nn.Tanh() if known else nn.BatchNorm1d(40)
    task = Task(nn.Sequential(nn.Linear(6, 40), middle.eval(), nn.Linear(40, 3)), cross_entropy)
    transport = InProcessTransport(task, users_of(SIZES), torch.device("cpu"), 10**6)
    request = request_under(task, LocalTraining(0.1, batch_size=2, epochs=4), len(SIZES), 0.3)
    shifted = {name: p + np.float32(0.5) for name, p in request.parameters.items()}
    requests = [request, replace(request, parameters=shifted)]

    def totals(asked: RoundRequest) -> list[list[float]]:
        return [p.total.tolist() for _ in range(20) for p in transport.collect(asked)]

    with torch_threads(1):
        expected = [totals(asked) for asked in requests]
        assert expected[0] != expected[1]
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(totals, requests)) == expected
