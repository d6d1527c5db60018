"""Cutting a cohort into chunks of users that train together."""

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.data.store import UserStore
from fedpriv.engine.layers import Layers
from fedpriv.engine.outer_products import few_rows
from fedpriv.engine.schedule import steps_of, widths_of
from fedpriv.engine.task import Task
from fedpriv.errors import InvalidValueError
from fedpriv.federated.transport import LocalTraining
from fedpriv.privacy.metrics import Metric

_FLOAT = 4  # bytes
_DOUBLE = 8
_COPIES = 3  # parameters of a user: current, gradient, a temporary; velocity is one more
_COPIES_OF_ONE_STEP = 2  # gradient and update
_COPIES_OF_PRODUCTS = 5  # of rows with rows when they are clipped: both sides', and temporaries
_COPIES_OF_METRICS = 2  # the vector and a temporary
_COPIES_OF_ACTIVATIONS = 3  # forward, backward, and one temporary
_PADDED_SHARE = 1.5  # examples of the largest user of a chunk over those of the smallest
_PADDED_EXAMPLES = 8  # below this many, starting another chunk costs more than padding


def blank(users: UserStore) -> Mapping[str, npt.NDArray[np.generic]]:
    """One row of zeros to try a task on; no user's data may decide if a round runs."""
    return {n: np.zeros((1, *f.shape[1:]), f.dtype) for n, f in users.fields.items()}


def sizes_of(users: UserStore, chosen: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Sizes of some users, at a cost that does not grow with the population."""
    return users.offsets[chosen + 1] - users.offsets[chosen]


def lane_bytes(
    task: Task,
    numbers: tuple[int, int],
    local: LocalTraining,
    largest: int,
    layers: Layers | None,
) -> int:
    """Estimate of the memory of one user in a chunk.

    Args:
        task: model and loss.
        numbers: of an example, as of `numbers_per_example`.
        local: how a user trains.
        largest: number of examples of the largest user.
        layers: of the task, where users train in layers.
    """
    activations, inputs = numbers
    parameters = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    sizes = np.array(largest)
    batch, steps = int(widths_of(sizes, local)), int(steps_of(sizes, local))
    factors = products = 0
    if layers is not None:
        for name, layer in layers.low_rank(steps, batch).items():
            parameters -= sum(p.numel() for p in layer.parameters())
            seen = layer.out_features if name == layers.entrance else layer.in_features
            factors += layers.rows[name] * (seen + 2 * layer.out_features)
            rows = layers.rows[name] * steps * batch
            if few_rows(rows, layer.out_features, layer.in_features):
                products += _COPIES_OF_PRODUCTS * rows * rows
    held = steps * batch * (inputs + factors)
    copies = (_COPIES if steps > 1 else _COPIES_OF_ONE_STEP) + (local.momentum > 0.0)
    moving = batch * activations * _COPIES_OF_ACTIVATIONS + parameters * copies
    return _FLOAT * (held + moving) + _DOUBLE * products


def example_bytes(numbers: tuple[int, int]) -> int:
    """Estimate of the memory of one example that is measured and not trained on.

    Args:
        numbers: of an example, as of `numbers_per_example`.
    """
    activations, inputs = numbers
    return _FLOAT * (activations * _COPIES_OF_ACTIVATIONS + inputs)


def metric_bytes(metrics: Sequence[Metric]) -> int:
    """Estimate of the memory of the metrics of one user, or of one example."""
    return _DOUBLE * _COPIES_OF_METRICS * sum(prod(metric.shape) for metric in metrics)


def numbers_per_example(
    task: Task, examples: Mapping[str, npt.NDArray[np.generic]]
) -> tuple[int, int]:
    """Numbers in all activations of an example, and in its inputs.

    Args:
        task: model and loss.
        examples: at least one row of data to measure.
    """
    activations = 0

    def measure(layer: torch.nn.Module, _inputs: object, output: object) -> None:
        nonlocal activations
        if isinstance(output, torch.Tensor):
            activations += output.numel()
            if isinstance(layer, torch.nn.Conv2d):  # what it sees is copied, patch by patch
                activations += output[0, 0].numel() * layer.weight[0].numel()

    leaves = [layer for layer in task.model.modules() if not any(layer.children())]
    hooks = [layer.register_forward_hook(measure) for layer in leaves]
    x = torch.tensor(examples[task.inputs][:1])
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            task.model(x)
    finally:
        for hook in hooks:
            hook.remove()
    return activations, x.numel()


def lanes_within(memory: int, bytes_per_lane: int) -> int:
    """How many users train together within `memory` bytes: at least one.

    Raises:
        InvalidValueError: the memory is not positive.
    """
    if memory < 1:
        raise InvalidValueError(f"chunk memory is {memory} bytes; it must be positive")
    return max(1, memory // max(1, bytes_per_lane))


def even(users: int, most: int, threads: int) -> int:
    """Users in each of the fewest chunks of at most `most` that keep all threads busy alike."""
    rounds = -(-users // (most * threads))
    return max(1, -(-users // max(1, rounds * threads)))


def chunks(
    users: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64], local: LocalTraining, lanes: int
) -> Iterator[npt.NDArray[np.int64]]:
    """Cut users into chunks of at most `lanes` whose padding is small.

    Users with similar batch widths and numbers of steps come together; users without examples
    are left out, since their update is zero.

    Args:
        users: positions of the cohort's users.
        sizes: number of examples of each of these users.
        local: how a user trains.
        lanes: largest number of users in a chunk.
    """
    steps = steps_of(sizes, local)
    order = np.lexsort((widths_of(sizes, local), steps))
    order = order[steps[order] > 0]
    # Widths of a chunk stay alike as well when all batches hold all of a user's examples.
    work = (steps * widths_of(sizes, local))[order]
    start = 0
    while start < len(order):
        most = max(work[start] * _PADDED_SHARE, work[start] + _PADDED_EXAMPLES)
        larger = np.flatnonzero(work[start : start + lanes] > most)
        stop = start + int(larger[0]) if len(larger) else min(start + lanes, len(order))
        yield users[order[start:stop]]
        start = stop
