"""Which road users take, alone or side by side, and in which shapes.

Both are settled on public facts alone: the plan, the model, the machine, and the number of users
who are expected. It happens once, before a cohort is drawn, on random rows that are always the
same; no user's data are read.

Side by side, what a user gets is a function of its own rows, whatever the model does
(`engine.lanes`), but for rounding: the instructions that compute a number may depend on its place.
So the shapes are tried: random users must get the same bits in other places, and in each of the
smaller shapes. If not, users go alone.
"""

import hashlib
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
from fedpriv.engine.lanes import MixingError
from fedpriv.engine.schedule import Integers, counted, largest_batch, steps_of
from fedpriv.engine.side_by_side import step_class
from fedpriv.engine.trainer import Chunk, Trainer, fewest, sizes_of
from fedpriv.errors import InvalidValueError, ModelError
from fedpriv.training.local import ALGORITHMS
from fedpriv.training.request import LocalTraining, RoundRequest

_log = logging.getLogger(__name__)

Path = Literal["auto", "alone", "together"]
"""Whether users go alone, or side by side, or whichever is faster."""

_WIDEST = 64  # rows of a slice; a batch of more is several slices
_UNBOUNDED = 16  # rows of a slice where batches are all that a user has, however many
_MOST_SLICES = 64  # of a batch; a user who needs more goes alone
_BUSY, _FEW_LANES = 2**23, 160  # numbers in a slice of all lanes that keep a CPU busy, and lanes
_FEW_NUMBERS, _MANY_LANES = 2**21, 2048  # the same of tiny models, of which most is Python
_BUSY_DEVICE, _DEVICE_LANES = 20_000_000, 256  # the same of a GPU
_FEWEST = 4  # lanes
_UNROLLED = 32  # numbers in two vectors of AVX-512: no loop has a rest where lanes are multiples
_COPIES = 4  # of the weights of each user, at a time
_ACTIVATIONS = 3  # numbers that are held at a time for each that a model computes
_MULTIPLICATIONS = 10_000_000  # in a slice of one user: with more, it goes faster alone
_FAR = 10  # times as many, and no clock is needed to tell
_BATCHES = (1, 1, 1, 1, 2, 2, 4, 8)  # of users whose time is taken
_RATES = (0.05, 1e-4, 1e-8)  # random users have the first of these at which they stay finite
_LARGE = 2**10  # the largest integer of random rows, even where larger ones are legal
_SIZES = (1, 2, 8)  # rows of random users: a model that can be trained can be with one of these
_TRIED_STEPS = 3
_COMPARED, _MOST_TURNS = 64, 4  # users in each shape, in so many orders at most


@dataclass(frozen=True)
class Road:
    """How users of a round go."""

    shapes: tuple[int, ...] = ()  # numbers of lanes, largest first; none: they go alone
    width: int = 1  # rows of a slice
    why: str = ""  # they go alone

    @property
    def path(self) -> Path:
        """What it is called in settings."""
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
        """All users that have rows, in chunks, those that take longest first.

        In which chunk a user is decides nothing of what it gets. `sizes` are their rows, [n].
        """
        counts = counted(sizes, local)
        users, counts = users[counts > 0], counts[counts > 0]
        steps, slices = steps_of(counts, local), -(-largest_batch(counts, local) // self.width)
        chunks = []
        for way, places in self._in_ways(trainer, local, steps, slices):
            if way is None:
                work = (counts * steps)[places].tolist()
                lone = zip(np.split(users[places], len(places)), work, strict=True)
                chunks += [Chunk(user, cost=cost) for user, cost in lone]
                continue
            order = places[np.lexsort((slices[places], steps[places]))][::-1]
            for some in _dealt(order, self.shapes, processes):
                work = int((steps[some] * slices[some]).max()) * self.width
                cost = work * fewest(self.shapes, len(some))
                chunks.append(Chunk(users[some], self.shapes, self.width, way, cost))
        return sorted(chunks, key=lambda chunk: -chunk.cost)

    def way(
        self, trainer: Trainer, local: LocalTraining, steps: int, slices: int
    ) -> tuple[int, ...] | None:
        """Which layers learn without weights for a user with so many steps, and slices in each.

        None: it goes alone. It has too many slices, or too many steps for layers that in few steps
        learn so, and lanes pay little where each step changes all of their weights.
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
        """Users who go in the same way, which follows from their own numbers."""
        shapes, of_user = np.unique(np.stack([steps, slices], 1), axis=0, return_inverse=True)
        ways: dict[tuple[tuple[int, ...] | None, int], list[int]] = {}
        for number, (step, part) in enumerate(shapes.tolist()):
            way = self.way(trainer, local, step, part)
            ways.setdefault((way, step_class(step) if way else 0), []).append(number)
        for (way, _), numbers in ways.items():
            yield way, np.flatnonzero(np.isin(of_user.ravel(), numbers))


def _dealt(order: Integers, shapes: Sequence[int], processes: int) -> Iterator[Integers]:
    """Users in their order, dealt out to processes, none of which gets more than lanes hold."""
    together = shapes[0] * processes
    for some in np.array_split(order, -(-len(order) // together)):
        parts = min(processes, -(-len(some) // shapes[-1]))
        yield from (some[part::parts] for part in range(parts))


def road_of(
    trainer: Trainer,
    request: RoundRequest,
    path: Path,
    users: int,
    rows: int | None,
    *,
    timed: bool,
) -> Road:
    """The road for such rounds, with so many users in a process, who have at most so many rows.

    ModelError if the model cannot be trained, if training a user twice gives two results, or if
    users shall go side by side and cannot. `timed`: whether a clock decides, or a fixed rule.
    """
    trials = _Trials(trainer, request)
    trials.refuse()
    if path == "alone":
        return Road(why="as engine.path says")
    try:
        road = _widest(trials, users, rows)
        if path == "auto" and not _is_faster(trials, road, rows, timed=timed):
            return Road(why="which is faster here; engine.path = 'together' changes it")
        agreeing = trials.agreeing(road, rows)
    except Exception as error:  # alone it was tried before
        agreeing, why = (), str(error)
    else:
        why = "their places would decide how their numbers are rounded"
    if agreeing:
        return replace(road, shapes=agreeing)
    if path == "together":
        raise ModelError(f"engine.path is 'together' and users cannot go side by side: {why}")
    return Road(why=f"as they cannot go side by side: {why}")


def _widest(trials: "_Trials", users: int, rows: int | None) -> Road:
    """All shapes in which users would go side by side; MixingError says why there are none."""
    trainer, local = trials.trainer, trials.request.local
    if type(local) not in (LocalTraining, *ALGORITHMS.values()):
        raise MixingError(f"{type(local).__name__} is not known to keep users apart")
    model, _ = trainer.side_by_side, trainer.measured
    width = _UNBOUNDED if rows is None else min(rows, _UNBOUNDED)
    if local.batch_size is not None:
        width = min(local.batch_size, _WIDEST, rows or _WIDEST)
    most = _most_lanes(trainer, trials.request, width, users)
    # As many as fill all chunks; and no loop has a rest, which other instructions would compute.
    multiple = _UNROLLED // math.gcd(_UNROLLED, *(width * size for size in model.rounded))
    most = -(-users // -(-users // most))
    shapes = list[int]()
    while most >= _FEWEST or not shapes:
        shapes.append(-(-most // multiple) * multiple)
        most = -(-most * 2 // 3)
    shapes = [*dict.fromkeys(shapes)]
    if shapes[0] < 2:
        raise MixingError("one of them fills the memory of a chunk")
    return Road(tuple(shapes), width)


def _most_lanes(trainer: Trainer, request: RoundRequest, width: int, users: int) -> int:
    """How many users go side by side: as many as pay, as memory holds, and as there are."""
    model, local = trainer.side_by_side, request.local
    of_slice = max(1, width * model.numbers)
    if trainer.device.type == "cpu":
        few, many = min(_BUSY // of_slice, _FEW_LANES), min(_FEW_NUMBERS // of_slice, _MANY_LANES)
        most = max(few, many)
    else:
        most = min(max(_BUSY_DEVICE // of_slice, _DEVICE_LANES), _MANY_LANES)
    way = Road((1,), width).way(trainer, local, local.steps or local.epochs or 1, 1)
    without = {key for number in way or () for key in model.layers[number].keys}
    weights = sum(p.numel() for n, p in trainer.task.trainable().items() if n not in without)
    metrics = sum(math.prod(metric.shape) for metric in request.measured)
    numbers = weights * (_COPIES + local.memories) + of_slice * _ACTIVATIONS + 4 * metrics
    return max(1, min(most, users, trainer.memory // (4 * max(1, numbers))))


def _is_faster(trials: "_Trials", road: Road, rows: int | None, *, timed: bool) -> bool:
    """Whether users go faster side by side."""
    model = trials.trainer.side_by_side
    done = sum(layer.rows * layer.shape.numel() for layer in model.layers) * road.width
    if timed and done <= _FAR * _MULTIPLICATIONS:
        return trials.seconds(road, rows) < trials.seconds(Road(), rows)
    return trials.trainer.device.type != "cpu" or done <= _MULTIPLICATIONS


class _Trials:
    """Random users of a trainer, always the same, who train as a request says, for a few steps."""

    def __init__(self, trainer: Trainer, request: RoundRequest) -> None:
        self.trainer, local = trainer, request.local
        if local.steps is not None and local.steps > _TRIED_STEPS:
            with suppress(InvalidValueError):  # of an algorithm that needs more
                local = replace(local, steps=_TRIED_STEPS)
        self.request = replace(request, local=local, local_key=bytes(32))
        self._start = trainer.begin(request)
        self._store = trainer.users  # until users are invented

    def refuse(self) -> None:
        """Refuse a model that cannot be trained, or that gives a user something else each time."""
        failed: Exception | None = None
        for rows in _SIZES:
            for zeros in (False, True):  # random numbers need not be legal, but zeros are
                self._invent([rows], zeros=zeros)
                try:
                    first = np.zeros(1, np.int64)
                    one, other = (self._digests(Road(), first) for _ in range(2))
                except Exception as error:
                    failed = failed or error
                    continue
                if one != other:
                    raise ModelError(
                        "training the same user twice gives two results; what a user gets must "
                        "follow from its rows and the generators of torch, NumPy and Python, which "
                        "are seeded for each user"
                    )
                return
        kind = self.trainer.activations
        raise ModelError(f"a user cannot be trained with {kind} activations: {failed}") from failed

    def _have(self, users: int, batches: Sequence[int], rows: int | None) -> None:
        """Have so many users of so many batches, again and again, if they may have as many rows."""
        local = self.request.local
        each = local.batch_size or rows or _UNBOUNDED
        most = min(local.max_examples or math.inf, rows or math.inf)
        sizes = [int(min(batches[user % len(batches)] * each, most)) for user in range(users)]
        for zeros in (False, True):
            self._invent(sizes, zeros=zeros)
            with suppress(Exception):
                self._digests(Road(), np.zeros(1, np.int64))
                return

    def agreeing(self, road: Road, rows: int | None) -> tuple[int, ...]:
        """Those shapes in which users get what they get in the largest, whoever is beside them."""
        self._have(2 * road.shapes[0], [2], rows)
        found, most = list[int](), road.shapes[0]
        largest, halves = replace(road, shapes=(most,)), (np.arange(most), np.arange(most) + most)
        expected = self._digests(largest, halves[0]) | self._digests(largest, halves[1])
        for lanes in road.shapes:
            shape, even = replace(road, shapes=(lanes,)), np.arange(lanes) % 2 == 0
            turns = max(1, min(_MOST_TURNS, _COMPARED // lanes))
            tried = []
            for turn in range(turns):
                by = turn * lanes // (turns + 1) + 1
                some, others = (np.roll(half[:lanes], by) for half in halves)
                tried.append(self._digests(shape, np.where(even, some, others)))
            if all(one[user] == expected[user] for one in tried for user in one):
                found.append(lanes)
            elif not found:
                return ()
        return tuple(found)

    def seconds(self, road: Road, rows: int | None) -> float:
        """Seconds that a user takes on a road, among users as different as people are."""
        count = max(len(_BATCHES), *road.shapes) if road.shapes else len(_BATCHES)
        self._have(count, _BATCHES, rows)
        users, times = np.arange(count), list[float]()
        sizes = sizes_of(self._store, users)
        for _ in range(2):
            began = time.process_time()
            for chunk in road.chunks(self.trainer, self.request.local, users, sizes):
                self.trainer.sent(self.request, self._start, chunk, self._store)
            times.append((time.process_time() - began) / count)
        return min(times)

    def _chunks(self, road: Road, users: Integers) -> list[Chunk]:
        """Users in this order, side by side or one after another."""
        if not road.shapes:
            return [Chunk(user) for user in np.split(users, len(users))]
        local, counts = (
            self.request.local,
            counted(sizes_of(self._store, users[:1]), self.request.local),
        )
        (steps,), (rows,) = steps_of(counts, local).tolist(), largest_batch(counts, local).tolist()
        way = road.way(self.trainer, local, steps, -(-rows // road.width))
        return [Chunk(users, road.shapes, road.width, way or ())]

    def _digests(self, road: Road, users: Integers) -> dict[int, bytes]:
        """Digests of all bits that users send, who go in this order."""
        found = {}
        for chunk in self._chunks(road, users):
            sent = self.trainer.sent(self.request, self._start, chunk, self._store)
            for lane, user in enumerate(chunk.users.tolist()):
                digest = hashlib.sha256()
                for update in sent.values():
                    own = update[lane : lane + 1].nan_to_num(torch.nan, torch.inf, -torch.inf)
                    digest.update(own.cpu().contiguous().numpy().tobytes())
                found[user] = digest.digest()
        return found

    def _invent(self, sizes: Sequence[int], *, zeros: bool = False) -> None:
        """Have users of these sizes, at a learning rate at which the first stays finite."""
        trainer, rows, fields = self.trainer, sum(sizes), {}
        for seed, name in enumerate(trainer.task.fields):
            rng, column = np.random.default_rng(seed), trainer.users.fields[name]
            fields[name] = np.zeros((rows, *column.shape[1:]), column.dtype)
            if zeros:
                continue
            if column.dtype.kind in "fc":
                fields[name][:] = rng.random(fields[name].shape, np.float32)
            else:  # neither 0, which often is a blank, nor too large, where others are legal
                _, most = trainer.indices.legal(name, _LARGE)
                low, high = (1, (most + 1) // 2) if most > 1 else (0, most)
                fields[name][:] = rng.integers(low, high, fields[name].shape, endpoint=True)
        self._store = UserStore(fields, np.cumsum([0, *sizes]))
        for rate in _RATES:
            local = replace(self.request.local, learning_rate=rate)
            self.request = replace(self.request, local=local)
            try:
                (chunk,) = self._chunks(Road(), np.zeros(1, np.int64))
                moved = trainer.moved(self.request, self._start, chunk, self._store)
            except Exception:  # no other rate would help
                return
            if all(bool(torch.isfinite(update[:1]).all()) for update in moved.values()):
                return
