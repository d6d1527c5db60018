"""The examples of users, gathered on the device where they train."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedpriv.data.population import UserStore
from fedpriv.engine.schedule import Integers, Schedule, largest_batch, rounded_up, steps_of
from fedpriv.engine.task import Inputs, Task, each_input
from fedpriv.privacy.clipping_torch import TorchTensors, to_device

_STEPS, _ORDER = "steps.", "order."  # prefixes of rows for training, and for measuring
_ROWS, _REAL, _WORDS = "rows", "real", "words"
_WINDOW = 2**22  # numbers of examples that are gathered at once on a CPU
_MEASURED = 2_000  # rows of a user alone that are measured at once


@dataclass(frozen=True)
class Chunk:
    """Users who train side by side, those with the most slices first, or one who trains alone."""

    users: Integers  # [n] positions in the store
    shapes: tuple[int, ...] = ()  # numbers of lanes, largest first; empty: the user trains alone
    width: int = 1  # W, rows of a slice
    lean: tuple[int, ...] = ()  # layers that learn without weights
    cost: int = 0  # rows in all slices of all lanes

    @property
    def lanes(self) -> int:
        """L, the number of lanes at the beginning."""
        return fewest(self.shapes, len(self.users))


def fewest(shapes: Sequence[int], users: int) -> int:
    """Return the smallest number of lanes in `shapes`, largest first, that holds all users."""
    return next((lanes for lanes in reversed(shapes) if lanes >= users), 1)


@dataclass(frozen=True)
class Batches:
    """Slices of W rows in L lanes, K slices per step; users are in the first lanes."""

    x: Inputs  # [L, T, W, …] each; T is the number of steps times K
    y: Tensor  # [L, T, W, …] targets
    real: Tensor  # [L, T, W] 1 for rows that count, 0 for padding of slices and lanes

    def shares(self, task: Task, slices: int) -> Tensor:
        """Return the weight of each row in the mean over its batch, [L, T, W]."""
        lanes, _, width = self.real.shape
        real = self.real.view(lanes, -1, slices, width)
        total = (real * task.shares(self.y, axes=3).view_as(real)).sum((2, 3), keepdim=True)
        return (real / torch.where(total > 0.0, total, 1.0)).flatten(1, 2)


@dataclass(frozen=True)
class Examples:
    """The examples of n users in L ≥ n lanes, or of a user alone, in one lane."""

    chunk: Chunk
    users: Integers  # [n] positions in the enrolled population
    schedule: Schedule
    store: UserStore
    device: torch.device
    task: Task  # which defines the fields to read
    resident: TorchTensors | None = None  # the store's fields, if they are `held_on` the device
    # The result of `given`, perhaps for another chunk of the same shape; if set, it replaces these.
    made_of: TorchTensors = field(default_factory=dict)

    @property
    def lanes(self) -> int:
        """L."""
        return len(self.schedule.words)

    @property
    def counts(self) -> Integers:
        """Number of rows of each user that count, [n]."""
        return self.schedule.counts[: len(self.users)]

    @property
    def shape(self) -> tuple[int, ...]:
        """The numbers that determine which kernels a GPU runs."""
        schedule, order = self.schedule, self.made_of.get(_ORDER + _REAL)
        blocks = 0 if order is None else order.shape[1]
        steps = len(self.slices), schedule.slices, schedule.width
        return self.lanes, *steps, blocks, int(self.rests)

    @property
    def steps(self) -> int:
        """The largest number of steps of a user."""
        return int(steps_of(self.counts, self.schedule.local).max())

    @cached_property
    def slices(self) -> list[Integers]:
        """Number of slices in which each user has rows, [n] for each step."""
        steps, longest = steps_of(self.counts, self.schedule.local), self.steps
        slices = -(-largest_batch(self.counts, self.schedule.local) // self.schedule.width)
        if self.device.type == "cuda":  # each number of steps is captured, so few must occur
            longest = rounded_up(longest)
        return [np.where(steps > step, slices, 0) for step in range(longest)]

    @property
    def used(self) -> list[list[int]]:
        """Number of lanes that are needed in each slice of each step."""
        if self.device.type != "cpu":  # all lanes, since their kernels are captured
            return [[self.lanes] * self.schedule.slices for _ in self.slices]
        return [
            [
                fewest(self.chunk.shapes, int((slices > number).sum()))
                for number in range(int(slices.max()))
            ]
            for slices in self.slices
        ]

    @cached_property
    def rests(self) -> bool:
        """True if a user has fewer steps, or fewer slices in a step, than its lane provides."""
        return any(slices.min() < self.schedule.slices for slices in self.slices)

    def given(self, *, measured: bool) -> TorchTensors:
        """Return the tensors on the device that determine all batches.

        `measured`: whether to include the rows that are measured.
        """
        width, tables = self.schedule.width, {}
        tables[_STEPS] = self.schedule.rows(0, len(self.slices), self.lanes)
        if measured:
            tables[_ORDER] = self.schedule.in_order(0, -(-int(self.counts.max()) // width) * width)
        tensors = {_WORDS: torch.from_numpy(self.schedule.words)}
        for part, (rows, real) in tables.items():
            tensors[part + _REAL] = torch.from_numpy(real).float()
            if self.resident is not None:
                tensors[part + _ROWS] = torch.from_numpy(rows)
            else:
                tensors |= {part + name: column for name, column in self.gathered(rows).items()}
        return {name: to_device(tensor, self.device) for name, tensor in tensors.items()}

    def windows(self, lanes: list[int]) -> Iterator[Batches]:
        """Yield all slices, some steps at a time; `lanes` is the number needed in each step."""
        if self.made_of:
            yield self._from_given(_STEPS)
            return
        first = 0
        while first < len(lanes):
            per_lane = self.schedule.slices * self.schedule.width
            fields = (self.store.fields[name] for name in self.task.fields)
            per_row = sum(math.prod(column.shape[1:]) for column in fields)
            numbers = lanes[first] * per_lane * per_row
            steps = max(1, min(_WINDOW // max(1, numbers), len(lanes) - first))
            yield self._batches(*self.schedule.rows(first, steps, lanes[first]))
            first += steps

    def batches(self) -> Iterator[tuple[Inputs, Tensor]]:
        """Yield x and y of each step of the only user, [b, …], without rows that fill slices."""
        for rows in self.schedule.batches():
            columns = self._columns(rows[np.newaxis])
            yield self.task.given({name: column[0] for name, column in columns.items()})

    def blocks(self) -> Iterator[tuple[Inputs, Tensor, Tensor]]:
        """Yield each row to measure once: x and y [L·W, …], and which rows are real [L, W]."""
        batches, limit = self._from_given(_ORDER) if self.made_of else None, int(self.counts.max())
        together = bool(self.chunk.shapes)
        width = self.schedule.width if together else min(_MEASURED, limit)
        for first in range(0, batches.y.shape[1] if batches else limit, width):
            # Side by side, the size of one user must not change the shape of others.
            size = width if together else min(width, limit - first)
            part = batches or self._batches(*self.schedule.in_order(first, size))
            start = first if batches else 0

            def rows(t: Tensor, start: int = start) -> Tensor:
                return t[:, start : start + width].flatten(0, 1)

            yield each_input(rows, part.x), rows(part.y), part.real[:, start : start + width] > 0.0

    @property
    def words(self) -> Tensor:
        """A random word of each lane, [L], on the device."""
        return self.made_of.get(_WORDS, torch.from_numpy(self.schedule.words))

    def _from_given(self, part: str) -> Batches:
        tensors = {n.removeprefix(part): t for n, t in self.made_of.items() if n.startswith(part)}
        columns = tensors if self.resident is None else self._selected(tensors[_ROWS])
        return Batches(*self.task.given(columns), tensors[_REAL])

    def _batches(self, rows: Integers, real: npt.NDArray[np.bool_]) -> Batches:
        is_real = to_device(torch.from_numpy(real).float(), self.device)
        return Batches(*self.task.given(self._columns(rows)), is_real)

    def _columns(self, rows: Integers) -> TorchTensors:
        """Return the fields of rows [L, …] on the device."""
        if self.resident is None:
            return {n: to_device(t, self.device) for n, t in self.gathered(rows).items()}
        return self._selected(to_device(torch.from_numpy(rows), self.device))

    def _selected(self, rows: Tensor) -> TorchTensors:
        """Return the resident fields of rows of any shape."""
        shape, rows = rows.shape, rows.flatten()
        return {
            name: column.index_select(0, rows).view(*shape, *column.shape[1:])
            for name, column in (self.resident or {}).items()
        }

    def gathered(self, rows: Integers) -> TorchTensors:
        """Return the fields of rows [L, …] on the CPU, with zeros in lanes without users."""
        columns, users, pinned = TorchTensors(), len(self.users), self.device.type == "cuda"
        for name in self.task.fields:
            column = self.store.fields[name]
            shape = *rows.shape, *column.shape[1:]
            dtype = torch.from_numpy(np.empty(0, column.dtype)).dtype
            columns[name] = torch.empty(shape, dtype=dtype, pin_memory=pinned)
            columns[name][users:].zero_()
        self.store.take(rows[:users], {name: t[:users].numpy() for name, t in columns.items()})
        return columns


def lent(columns: Mapping[str, npt.NDArray[np.generic]]) -> TorchTensors:
    """Return fields [rows, …] as tensors in the same memory, which must not be written to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about arrays that are read-only
        return {name: torch.from_numpy(column) for name, column in columns.items()}


def held_on(device: torch.device, columns: Mapping[str, npt.NDArray[np.generic]]) -> TorchTensors:
    """Return a copy of fields on a device, [rows + 1, …], with zeros in the last row."""
    copies = {}
    for name, column in columns.items():
        dtype = torch.from_numpy(np.empty(0, column.dtype)).dtype
        copies[name] = torch.zeros((len(column) + 1, *column.shape[1:]), dtype=dtype, device=device)
        copies[name][:-1] = torch.from_numpy(np.ascontiguousarray(column))
    return copies
