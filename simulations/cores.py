"""Whether the cores of this machine work side by side: `python -m simulations.cores`.

Some operations of local training run in one process, and then in one for each core at once. Cores
that share one unit for arithmetic, as two threads of a core do, take longer together.
"""

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier

import numpy as np
import torch
from threadpoolctl import threadpool_limits

_SECONDS = 1.0
_SHAPES = (2500, 784), (784, 128)


def operations() -> Mapping[str, Callable[[], object]]:
    """What is done, by name; each takes some milliseconds."""
    rows, weights = (np.random.default_rng(0).random(s, np.float32) for s in _SHAPES)
    out, activations = np.empty((len(rows), weights.shape[1]), np.float32), torch.randn(500, 128)

    def counted() -> int:
        count = 0
        for number in range(50_000):
            count += number
        return count

    return {
        "products of matrices": lambda: np.matmul(rows, weights, out=out),
        "ReLU of small tensors": lambda: [torch.relu(activations) for _ in range(500)],
        "Python": counted,
    }


def seconds_of(operation: Callable[[], object]) -> float:
    """Median of what it takes again and again, for a second."""
    seconds: list[float] = []
    while sum(seconds) < _SECONDS:
        began = time.perf_counter()
        operation()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _measure(name: str, together: Barrier, found: "SimpleQueue[float]") -> None:
    torch.set_num_threads(1)
    operation = operations()[name]
    with threadpool_limits(1):
        operation()
        together.wait()
        found.put(seconds_of(operation))


def side_by_side(name: str, processes: int) -> float:
    """Seconds of an operation in so many processes at once, median of them."""
    context = multiprocessing.get_context("spawn")
    together, found = context.Barrier(processes), context.SimpleQueue()
    started = [
        context.Process(target=_measure, args=(name, together, found)) for _ in range(processes)
    ]
    for process in started:
        process.start()
    seconds = [found.get() for _ in started]
    for process in started:
        process.join()
    return float(statistics.median(seconds))


def main() -> None:
    """Measure and print."""
    cores = os.cpu_count() or 1
    for name in operations():
        one, all_of_them = side_by_side(name, 1), side_by_side(name, cores)
        print(
            f"{name:22} {1e3 * one:6.2f} ms in one process, {1e3 * all_of_them:6.2f} ms in each of "
            f"{cores}: {cores * one / all_of_them:.2f} times as much is done"
        )


if __name__ == "__main__":
    main()
