"""The choice of a road: whether users train alone or side by side, and in which shapes.

The choice depends only on public facts: the plan, the model, the machine and the expected number of
users. It is made once, before a cohort is drawn, with random rows that are always the same, and
without users' data.

Side by side, a user's update is a function of the user's own rows for any model (`engine.lanes`),
except for rounding: the instructions that compute a number may depend on its place. So the shapes
are tried: random users must get the same bits in other places, and in each smaller shape.
Otherwise, users train alone.
"""

import hashlib
import itertools
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from fedpriv.data.population import UserStore
from fedpriv.engine.examples import Chunk, fewest
from fedpriv.engine.indices import Indices
from fedpriv.engine.lanes import MixingError
from fedpriv.engine.schedule import Integers, counted, largest_batch, steps_of
from fedpriv.engine.side_by_side import step_class
from fedpriv.engine.trainer import Trainer, sizes_of
from fedpriv.errors import InvalidValueError, ModelError
from fedpriv.training.local import ALGORITHMS
from fedpriv.training.request import LocalTraining, RoundRequest

_log = logging.getLogger(__name__)

Path = Literal["auto", "alone", "together"]
"""How users train: alone, side by side ("together"), or in the faster of these ways ("auto")."""

_WIDEST = 64  # rows of a slice; a larger batch has several slices
_UNBOUNDED = 16  # rows of a slice if batches hold all rows of a user, without a known bound
_MOST_SLICES = 64  # of a batch; a user who needs more trains alone
_BUSY, _FEW_LANES = 2**23, 160  # numbers in a slice of all lanes that keep a CPU busy; most lanes
_FEW_NUMBERS, _MANY_LANES = 2**21, 2048  # the same for tiny models, where Python dominates
_BUSY_DEVICE, _DEVICE_LANES = 20_000_000, 256  # the same for a GPU, but the least lanes
_FEWEST = 4  # lanes
_UNROLLED = 32  # numbers in two AVX-512 vectors; loops over multiples have no remainder
_COPIES = 4  # of each user's weights in memory at a time
_ACTIVATIONS = 3  # numbers in memory at a time for each number that a model computes
# For a slice of one user, in layers that learn with weights; with more, users are faster alone.
_MULTIPLICATIONS = 10_000_000
_FAR = 10  # users with more than this multiple of it, in all layers, train alone without a trial
_GAIN = 1.3  # measured speedup that side by side must have, since lanes rest if sizes differ
_BATCHES = (1, 1, 1, 1, 2, 2, 4, 8)  # numbers of batches of the users whose time is measured
_RATES = (0.05, 1e-4, 1e-8)  # random users get the first rate at which they remain finite
_LARGE = 2**10  # the largest integer in random rows, even if larger ones are legal
_SIZES = (1, 2, 8)  # rows of random users; any model that can be trained works with one of these
_TRIED_STEPS = 3
_COMPARED, _MOST_TURNS = 64, 4  # users to compare in each shape, and the most orders of them


@dataclass(frozen=True)
class Road:
    """The way in which users of a round train."""

    shapes: tuple[int, ...] = ()  # numbers of lanes, largest first; empty: users train alone
    width: int = 1  # rows of a slice
    why: str = ""  # the reason why users train alone

    @property
    def path(self) -> Path:
        """The road's name in settings, engine.path."""
        return "together" if self.shapes else "alone"

    def __str__(self) -> str:
        if not self.shapes:
            return f"one after another, {self.why}"
        return f"side by side, {self.shapes[0]} at a time; engine.path = 'alone' changes it"

    def chunks(
        self,
        trainer: Trainer,
        local: LocalTraining,
        users: Integers,
        sizes: Integers,
        processes: int = 1,
    ) -> list[Chunk]:
        """Return chunks of all users that have rows, the slowest chunks first.

        `sizes` [n] are the users' numbers of rows. A user's update does not depend on the chunk.
        """
        counts = counted(sizes, local)
        users, counts = users[counts > 0], counts[counts > 0]
        steps, slices = steps_of(counts, local), -(-largest_batch(counts, local) // self.width)
        chunks = []
        for way, places in self._in_ways(trainer, local, steps, slices):
            if way is None:
                costs = (largest_batch(counts, local) * steps).tolist()
                chunks += [Chunk(users[n : n + 1], cost=costs[n]) for n in places.tolist()]
                continue
            order = places[np.lexsort((slices[places], steps[places]))][::-1]
            for part in _dealt(order, self.shapes, processes):
                rows = int((steps[part] * slices[part]).max()) * self.width
                cost = rows * fewest(self.shapes, len(part))
                chunks.append(Chunk(users[part], self.shapes, self.width, way, cost))
        return sorted(chunks, key=lambda chunk: -chunk.cost)

    def way(
        self, trainer: Trainer, local: LocalTraining, steps: int, slices: int
    ) -> tuple[int, ...] | None:
        """Return the layers that learn without weights, for a user with these steps and slices.

        `slices` is their number per step. None: the user trains alone, because it has too many
        slices, or too many steps for layers that could learn without weights in fewer: lanes save
        little time if each step changes all weights of such layers.
        """
        if not self.shapes or slices > _MOST_SLICES:
            return None
        model = trainer.side_by_side
        lean = model.lean(local, steps, slices, self.width)
        outgrown = slices == 1 and not lean and model.lean(local, 1, 1, self.width)
        return None if outgrown else lean

    def _in_ways(
        self, trainer: Trainer, local: LocalTraining, steps: Integers, slices: Integers
    ) -> Iterator[tuple[tuple[int, ...] | None, Integers]]:
        """Yield each `way`, and the indices of its users; it depends on each user's own numbers."""
        kinds, kind_of = np.unique(np.stack([steps, slices], 1), axis=0, return_inverse=True)
        ways: dict[tuple[tuple[int, ...] | None, int], list[int]] = {}
        for kind, (user_steps, user_slices) in enumerate(kinds.tolist()):
            way = self.way(trainer, local, user_steps, user_slices)
            ways.setdefault((way, step_class(user_steps) if way else 0), []).append(kind)
        for (way, _), members in ways.items():
            yield way, np.flatnonzero(np.isin(kind_of.ravel(), members))


def _dealt(order: Integers, shapes: Sequence[int], processes: int) -> Iterator[Integers]:
    """Deal users in this order to processes, at most `shapes[0]` to each."""
    capacity = shapes[0] * processes
    for group in np.array_split(order, -(-len(order) // capacity)):
        parts = min(processes, -(-len(group) // shapes[-1]))
        yield from (group[part::parts] for part in range(parts))


def road_of(
    trainer: Trainer,
    request: RoundRequest,
    path: Path,
    users: int,
    rows: int | None,
    *,
    timed: bool,
) -> Road:
    """Return the road for rounds like this request.

    `users` is the expected number in a process, and `rows` the largest number of a user. `timed`:
    whether to measure which road is faster, instead of following a fixed rule. ModelError: the
    model cannot be trained, training a user twice gives two results, or `path` is "together" and
    users cannot train side by side.
    """
    trials = _Trials(trainer, request)
    trials.check()
    if path == "alone":
        return Road(why="as engine.path says")
    try:
        road = _widest(trials, users, rows)
        if path == "auto" and not _is_faster(trials, road, rows, timed=timed):
            return Road(why="which is as fast here, or faster; engine.path = 'together' changes it")
        agreeing = trials.agreeing(road, rows)
    except Exception as error:  # side by side only: training alone has been tried
        agreeing, why = (), str(error)
    else:
        why = "their places would decide how their numbers are rounded"
    if agreeing:
        return replace(road, shapes=agreeing)
    if path == "together":
        raise ModelError(f"engine.path is 'together' and users cannot go side by side: {why}")
    return Road(why=f"as they cannot go side by side: {why}")


def _widest(trials: "_Trials", users: int, rows: int | None) -> Road:
    """Return a road with all shapes to try; MixingError says why there are none."""
    trainer, local = trials.trainer, trials.request.local
    if type(local) not in (LocalTraining, *ALGORITHMS.values()):
        raise MixingError(f"{type(local).__name__} is not known to keep users apart")
    model, _ = trainer.side_by_side, trainer.measured
    width = _UNBOUNDED if rows is None else min(rows, _UNBOUNDED)
    if local.batch_size is not None:
        width = min(local.batch_size, _WIDEST, rows or _WIDEST)
    lanes = _most_lanes(trainer, trials.request, width, users)
    # Lanes that fill all chunks evenly, in multiples without a remainder of a loop, since other
    # instructions would compute it.
    multiple = _UNROLLED // math.gcd(_UNROLLED, *(width * size for size in model.rounded))
    lanes = -(-users // -(-users // lanes))
    shapes = list[int]()
    while lanes >= _FEWEST or not shapes:
        shapes.append(-(-lanes // multiple) * multiple)
        lanes = -(-lanes * 2 // 3)
    shapes = [*dict.fromkeys(shapes)]
    if shapes[0] < 2:
        one = "one of them fills the memory of a chunk"
        raise MixingError("each process trains one user" if users < 2 else one)
    return Road(tuple(shapes), width)


def _most_lanes(trainer: Trainer, request: RoundRequest, width: int, users: int) -> int:
    """Return the largest useful number of lanes, given the machine, its memory and the users."""
    model, local = trainer.side_by_side, request.local
    per_slice = max(1, width * model.numbers)
    if trainer.device.type == "cpu":
        few, many = min(_BUSY // per_slice, _FEW_LANES), min(_FEW_NUMBERS // per_slice, _MANY_LANES)
        limit = max(few, many)
    else:
        limit = min(max(_BUSY_DEVICE // per_slice, _DEVICE_LANES), _MANY_LANES)
    unused = {key for number in _lean(trainer, local, width) for key in model.layers[number].keys}
    weights = sum(p.numel() for n, p in trainer.task.trainable().items() if n not in unused)
    metrics = sum(math.prod(metric.shape) for metric in request.measured)
    numbers = weights * (_COPIES + local.memories) + per_slice * _ACTIVATIONS + 4 * metrics
    return max(1, min(limit, users, trainer.memory // (4 * max(1, numbers))))


def _is_faster(trials: "_Trials", road: Road, rows: int | None, *, timed: bool) -> bool:
    """Return whether users train clearly faster side by side."""
    trainer, lean = trials.trainer, _lean(trials.trainer, trials.request.local, road.width)
    layers = trainer.side_by_side.layers
    products = [layer.rows * layer.shape.numel() * road.width for layer in layers]
    is_small = sum(products) <= _FAR * _MULTIPLICATIONS
    if timed and is_small:
        return _GAIN * trials.seconds(road, rows) < trials.seconds(Road(), rows)
    with_weights = sum(count for n, count in enumerate(products) if n not in lean)
    return trainer.device.type != "cpu" or (is_small and with_weights <= _MULTIPLICATIONS)


def _lean(trainer: Trainer, local: LocalTraining, width: int) -> tuple[int, ...]:
    """Return the layers that learn without weights for users with one batch in each epoch."""
    return trainer.side_by_side.lean(local, local.steps or local.epochs or 1, 1, width)


class _Trials:
    """Random users, always the same, who train for a few steps as a request says."""

    def __init__(self, trainer: Trainer, request: RoundRequest) -> None:
        self.trainer, local = trainer, request.local
        if local.steps is not None and local.steps > _TRIED_STEPS:
            with suppress(InvalidValueError):  # from an algorithm that needs more steps
                local = replace(local, steps=_TRIED_STEPS)
        self.request = replace(request, local=local, local_key=bytes(32))
        self._start = trainer.begin(request)
        self._store = users = trainer.users  # replaced by random users
        indices = Indices(trainer.task, users)
        whole = [name for name in trainer.task.fields if users.fields[name].dtype.kind not in "fc"]
        self._largest = {name: indices.largest(name, _LARGE) for name in whole}

    def check(self) -> None:
        """Raise ModelError if the model cannot be trained, or gives a user different results."""
        failure: Exception | None = None
        # Random numbers need not be legal, but zeros are.
        for rows, zeros in itertools.product(_SIZES, (False, True)):
            self._invent([rows], zeros=zeros)
            try:
                user = np.zeros(1, np.int64)
                first, second = (self._digests(Road(), user) for _ in range(2))
            except Exception as error:
                failure = failure or error
                continue
            if first != second:
                raise ModelError(
                    "training the same user twice gives two results; what a user gets must "
                    "follow from its rows and the generators of torch, NumPy and Python, which "
                    "are seeded for each user"
                )
            return
        kind = self.trainer.activations
        sentence = f"a user cannot be trained with {kind} activations: {failure}"
        raise ModelError(sentence) from failure

    def _invent_batches(self, users: int, batches: Sequence[int], rows: int | None) -> None:
        """Invent users with these numbers of batches, repeatedly, and with at most `rows` rows."""
        local = self.request.local
        # A few slices stand for a larger batch, whose invented rows could fill the memory.
        size = min(local.batch_size or rows or _UNBOUNDED, 4 * _WIDEST)
        limit = min(local.max_examples or math.inf, rows or math.inf)
        sizes = [int(min(batches[user % len(batches)] * size, limit)) for user in range(users)]
        for zeros in (False, True):
            self._invent(sizes, zeros=zeros)
            with suppress(Exception):
                self._digests(Road(), np.zeros(1, np.int64))
                return

    def agreeing(self, road: Road, rows: int | None) -> tuple[int, ...]:
        """Return the shapes in which users get the same bits as in the largest, for any neighbours.

        If the largest shape fails, there are none.
        """
        self._invent_batches(2 * road.shapes[0], [2], rows)
        agreeing, count = list[int](), road.shapes[0]
        largest, halves = replace(road, shapes=(count,)), np.split(np.arange(2 * count), 2)
        expected = self._digests(largest, halves[0]) | self._digests(largest, halves[1])
        for lanes in road.shapes:
            shape, even = replace(road, shapes=(lanes,)), np.arange(lanes) % 2 == 0
            turns = max(1, min(_MOST_TURNS, _COMPARED // lanes))
            trials = []
            for turn in range(turns):
                shift = turn * lanes // (turns + 1) + 1
                first, second = (np.roll(half[:lanes], shift) for half in halves)
                trials.append(self._digests(shape, np.where(even, first, second)))
            if all(trial[user] == expected[user] for trial in trials for user in trial):
                agreeing.append(lanes)
            elif not agreeing:
                return ()
        return tuple(agreeing)

    def seconds(self, road: Road, rows: int | None) -> float:
        """Return the seconds per user on a road, for users with different numbers of batches."""
        count = max(len(_BATCHES), *road.shapes) if road.shapes else len(_BATCHES)
        self._invent_batches(count, _BATCHES, rows)
        users, times = np.arange(count), list[float]()
        sizes = sizes_of(self._store, users)
        for _ in range(2):
            start = time.process_time()
            for chunk in road.chunks(self.trainer, self.request.local, users, sizes):
                self.trainer.sent(self.request, self._start, chunk, self._store)
            times.append((time.process_time() - start) / count)
        return min(times)

    def _chunks(self, road: Road, users: Integers) -> list[Chunk]:
        """Return chunks of users in this order, side by side or one after another."""
        if not road.shapes:
            return [Chunk(user) for user in np.split(users, len(users))]
        local = self.request.local
        counts = counted(sizes_of(self._store, users[:1]), local)
        (steps,), (rows,) = steps_of(counts, local).tolist(), largest_batch(counts, local).tolist()
        way = road.way(self.trainer, local, steps, -(-rows // road.width))
        return [Chunk(users, road.shapes, road.width, way or ())]

    def _digests(self, road: Road, users: Integers) -> dict[int, bytes]:
        """Return a SHA-256 digest of each user's contribution; the users train in this order."""
        digests = {}
        for chunk in self._chunks(road, users):
            updates = self.trainer.sent(self.request, self._start, chunk, self._store)
            for lane, user in enumerate(chunk.users.tolist()):
                parts = (tensor[lane : lane + 1].cpu() for tensor in updates.values())
                numbers = (p.nan_to_num(torch.nan, torch.inf, -torch.inf).numpy() for p in parts)
                digests[user] = hashlib.sha256(b"".join(n.tobytes() for n in numbers)).digest()
        return digests

    def _invent(self, sizes: Sequence[int], *, zeros: bool = False) -> None:
        """Invent users of these sizes, and choose a rate at which the first remains finite."""
        trainer, rows, fields = self.trainer, sum(sizes), {}
        for seed, name in enumerate(trainer.task.fields):
            rng, column = np.random.default_rng(seed), trainer.users.fields[name]
            fields[name] = np.zeros((rows, *column.shape[1:]), column.dtype)
            if zeros:
                continue
            if column.dtype.kind in "fc":
                fields[name][:] = rng.random(fields[name].shape, np.float32)
            else:  # if possible, neither 0, which often means a blank, nor a large number
                largest = self._largest[name]
                low, high = (1, (largest + 1) // 2) if largest > 1 else (0, largest)
                fields[name][:] = rng.integers(low, high, fields[name].shape, endpoint=True)
        self._store = UserStore(fields, np.cumsum([0, *sizes]))
        for rate in _RATES:
            local = replace(self.request.local, learning_rate=rate)
            self.request = replace(self.request, local=local)
            try:
                chunk = Chunk(np.zeros(1, np.int64))
                update = trainer.sent(self.request, self._start, chunk, self._store)
            except Exception:  # another rate would not help
                return
            if all(bool(torch.isfinite(update[name][:]).all()) for name in self.request.parameters):
                return
