"""Which examples each user trains on, step by step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpriv.federated.transport import LocalTraining


@dataclass(frozen=True)
class Schedule:
    """Steps of a chunk of C users, padded to rectangles.

    Attributes:
        rows: [C, S, B] rows of the user store; padding repeats a row of the same user.
        weights: [C, S, B] 1 for an example, 0 for padding.
    """

    rows: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]


def steps_of(size: int, local: LocalTraining) -> int:
    """Number of steps of a user with `size` examples; 0 for a user without any."""
    if size == 0:
        return 0
    if local.steps is not None:
        return local.steps
    return (local.epochs or 0) * math.ceil(size / (local.batch_size or size))


def schedule(
    users: Sequence[int],
    starts: Sequence[int],
    sizes: Sequence[int],
    local: LocalTraining,
    local_key: bytes,
) -> Schedule:
    """Steps of a chunk of users, each with at least one example.

    The order of a user's examples depends on the key and the user alone, so it is the same in
    every chunk, order and engine.

    Args:
        users: position of each user in the population.
        starts: first row of each user in the store.
        sizes: number of rows of each user.
        local: how a user trains.
        local_key: 32 bytes of this round.
    """
    batches = [
        start + _batches(size, local, _generator(local_key, user))
        for user, start, size in zip(users, starts, sizes, strict=True)
    ]
    steps = max(len(b) for b in batches)
    width = max(b.shape[1] for b in batches)
    rows = np.repeat(np.asarray(starts, np.int64), steps * width).reshape(-1, steps, width)
    weights = np.zeros(rows.shape, np.float32)
    for lane, (batch, start) in enumerate(zip(batches, starts, strict=True)):
        real = batch >= start
        s, b = batch.shape
        rows[lane, :s, :b] = np.where(real, batch, start)
        weights[lane, :s, :b] = real
    return Schedule(rows, weights)


def _batches(
    size: int, local: LocalTraining, generator: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Examples of each step [S, B] of one user, from 0; negative where a batch is not full."""
    width = min(local.batch_size or size, size)
    per_pass = math.ceil(size / width)
    steps = steps_of(size, local)
    passes = math.ceil(steps / per_pass)
    # Far below any row after the user's first row is added.
    rows = np.full((passes, per_pass * width), np.iinfo(np.int64).min // 2)
    for order in rows:
        order[:size] = generator.permutation(size)
    return rows.reshape(passes * per_pass, width)[:steps]


def _generator(local_key: bytes, user: int) -> np.random.Generator:
    """Generator of one user in one round; needs to be reproducible, not to be secret."""
    words = np.array([int.from_bytes(local_key[:8], "little"), user], np.uint64)
    return np.random.Generator(np.random.Philox(key=words))
