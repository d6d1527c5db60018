"""Which examples each user trains on, step by step."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpriv.federated.transport import LocalTraining

_GOLDEN = 0x9E3779B97F4A7C15  # odd, near 2⁶⁴ over the golden ratio


@dataclass(frozen=True)
class Schedule:
    """Steps of a chunk of C users, padded to rectangles.

    Attributes:
        rows: [C, S, B] rows of the user store; padding repeats a row of the same user.
        weights: [C, S, B] 1 for an example, 0 for padding.
    """

    rows: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float32]


def widths_of(sizes: npt.NDArray[np.int64], local: LocalTraining) -> npt.NDArray[np.int64]:
    """Examples in a full step of users with so many examples, int64 of the same shape."""
    return sizes if local.batch_size is None else np.minimum(sizes, local.batch_size)


def steps_of(sizes: npt.NDArray[np.int64], local: LocalTraining) -> npt.NDArray[np.int64]:
    """Number of steps of users with so many examples, int64; 0 for a user without any."""
    if local.steps is not None:
        return np.where(sizes > 0, local.steps, 0)
    return (local.epochs or 0) * _divided(sizes, np.maximum(widths_of(sizes, local), 1))


def schedule(
    users: npt.NDArray[np.int64],
    starts: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int64],
    local: LocalTraining,
    local_key: bytes,
) -> Schedule:
    """Steps of a chunk of users, each with at least one example.

    A user's examples are shuffled for each pass over them. Their order depends on the key and the
    user alone, so it is the same in every chunk, order and engine.

    Args:
        users: position of each user in the population.
        starts: first row of each user in the store.
        sizes: number of rows of each user.
        local: how a user trains.
        local_key: 32 bytes of this round.
    """
    widths, steps = widths_of(sizes, local), steps_of(sizes, local)
    per_pass = _divided(sizes, widths)
    passes = _divided(steps, per_pass)
    lanes = np.repeat(np.arange(len(sizes)), passes)
    numbers = _counted(passes)
    keys = _mixed(_keys_of(users, local_key)[lanes] + _spread(numbers))
    drawn, places = _shuffled(keys, sizes[lanes])
    lanes, numbers = (np.repeat(each, sizes[lanes]) for each in (lanes, numbers))
    step = numbers * per_pass[lanes] + places // widths[lanes]
    taken = step < steps[lanes]  # the last pass may end early
    at = lanes[taken], step[taken], (places % widths[lanes])[taken]
    shape = len(sizes), int(steps.max()), int(widths.max())
    rows = np.broadcast_to(starts[:, None, None], shape).copy()
    rows[at] += drawn[taken]
    weights = np.zeros(shape, np.float32)
    weights[at] = 1.0
    return Schedule(rows, weights)


def _shuffled(
    keys: npt.NDArray[np.uint64], sizes: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Shuffles of n_i things for each key: which thing, and at which place, one after another."""
    passes, places = np.repeat(np.arange(len(sizes)), sizes), _counted(sizes)
    dice = _mixed(keys[passes] + _spread(places))
    if np.all(sizes == sizes[0]):  # many short sorts take less than a long one
        return np.argsort(dice.reshape(len(sizes), -1), axis=1, kind="stable").ravel(), places
    drawn = np.argsort(dice, kind="stable")
    order = drawn[np.argsort(passes[drawn], kind="stable")]
    return places[order], places


def _keys_of(users: npt.NDArray[np.int64], local_key: bytes) -> npt.NDArray[np.uint64]:
    """A word for each user in one round; needs to be reproducible, not to be secret."""
    key = np.frombuffer(local_key[:8], "<u8").astype(np.uint64)
    return _mixed(key + _spread(users))


def _spread(numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """The Weyl sequence of SplitMix64 (Steele, Lea & Flood 2014) at these places."""
    return (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64: each bit of a result depends on all bits of its word."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _counted(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """0, 1, … up to each length, one after another."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)


def _divided(above: npt.NDArray[np.int64], below: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Quotients, rounded up."""
    return -(-above // below)
