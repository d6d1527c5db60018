"""The examples of users, gathered on the device where they train."""

import itertools
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedpriv.data.population import UserStore
from fedpriv.engine.schedule import (
    Integers,
    Schedule,
    batches_of,
    counted,
    largest_batch,
    rounded_up,
    rows_in_order,
    steps_of,
)
from fedpriv.engine.task import Inputs, Task, each_input
from fedpriv.privacy.clipping_torch import TorchTensors, to_device
from fedpriv.training.request import LocalTraining

_STEPS, _ORDER = "steps.", "order."  # prefixes of rows for training, and for measuring
_ROWS, _REAL, _WORDS = "rows", "real", "words"
_WINDOW = 2**22  # numbers of examples that are gathered at once on a CPU
_MEASURED = 2_000  # rows of a user alone that are measured at once


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
    """The examples of n users in L ≥ n lanes."""

    users: int  # n
    schedule: Schedule
    store: UserStore
    device: torch.device
    task: Task  # which defines the fields to read
    resident: TorchTensors | None = None  # the store's fields, if they are `held_on` the device
    # The result of `given`, perhaps for other users of the same shape; if set, it replaces these.
    made_of: TorchTensors = field(default_factory=dict)

    @property
    def lanes(self) -> int:
        """L."""
        return len(self.schedule.words)

    @property
    def counts(self) -> Integers:
        """Number of rows of each user that count, [n]."""
        return self.schedule.counts[: self.users]

    @property
    def shape(self) -> tuple[int, ...]:
        """The numbers that determine which kernels of a GPU run."""
        schedule, measured = self.schedule, self.made_of.get(_ORDER + _REAL)
        blocks = 0 if measured is None else measured.shape[1]
        steps = len(self.slices), schedule.slices, schedule.width
        return self.lanes, *steps, blocks, int(self.rests)

    @cached_property
    def slices(self) -> list[Integers]:
        """Number of slices in which each user has rows, [n] for each step."""
        steps = steps_of(self.counts, self.schedule.local)
        slices, longest = largest_batch(self.counts, self.schedule.local), int(steps.max())
        slices = -(-slices // self.schedule.width)
        if self.device.type == "cuda":  # each number of steps is captured, so few must occur
            longest = rounded_up(longest)
        return [np.where(steps > step, slices, 0) for step in range(longest)]

    @cached_property
    def rests(self) -> bool:
        """Whether a user has fewer steps, or fewer slices in a step, than their lane provides."""
        return any(slices.min() < self.schedule.slices for slices in self.slices)

    def given(self, *, measured: bool) -> TorchTensors:
        """Return the tensors on the device from which all batches follow.

        `measured`: whether to include the rows that are measured.
        """
        width, drawn = self.schedule.width, {}
        drawn[_STEPS] = self.schedule.rows(0, len(self.slices), self.lanes)
        if measured:
            drawn[_ORDER] = self.schedule.in_order(0, -(-int(self.counts.max()) // width) * width)
        tensors = {_WORDS: torch.from_numpy(self.schedule.words)}
        for part, (rows, real) in drawn.items():
            tensors[part + _REAL] = torch.from_numpy(real).float()
            if self.resident is not None:
                tensors[part + _ROWS] = torch.from_numpy(rows)
            else:
                tensors |= {part + name: column for name, column in self._gathered(rows).items()}
        return {name: to_device(tensor, self.device) for name, tensor in tensors.items()}

    def windows(self, lanes: list[int]) -> Iterator[Batches]:
        """Yield all slices, some steps at a time; `lanes` are the lanes needed in each step."""
        if self.made_of:
            yield self._from_given(_STEPS)
            return
        first = 0
        while first < len(lanes):
            per_lane = self.schedule.slices * self.schedule.width
            numbers = lanes[first] * per_lane * numbers_of(self.store, self.task)
            steps = max(1, min(_WINDOW // max(1, numbers), len(lanes) - first))
            yield self._batches(*self.schedule.rows(first, steps, lanes[first]))
            first += steps

    def blocks(self) -> Iterator[tuple[Inputs, Tensor, Tensor]]:
        """Yield each row to measure once: x and y [L·W, …], and which rows are real [L, W]."""
        width, whole = self.schedule.width, self._from_given(_ORDER) if self.made_of else None
        for first in range(0, whole.y.shape[1] if whole else int(self.counts.max()), width):
            part = whole or self._batches(*self.schedule.in_order(first, width))
            start = first if whole else 0

            def rows(t: Tensor, start: int = start) -> Tensor:
                return t[:, start : start + width].flatten(0, 1)

            yield each_input(rows, part.x), rows(part.y), part.real[:, start : start + width] > 0.0

    @property
    def words(self) -> Tensor:
        """A random word of each lane, [L], on the device."""
        words = self.made_of.get(_WORDS)
        return torch.from_numpy(self.schedule.words) if words is None else words

    def _from_given(self, part: str) -> Batches:
        given, columns = self.made_of, TorchTensors()
        for name in self.task.fields:
            if self.resident is None:
                columns[name] = given[part + name]
            else:
                rows, column = given[part + _ROWS], self.resident[name]
                selected = column.index_select(0, rows.flatten())
                columns[name] = selected.view(*rows.shape, *column.shape[1:])
        return Batches(*self.task.given(columns), given[part + _REAL])

    def _batches(self, rows: Integers, real: npt.NDArray[np.bool_]) -> Batches:
        columns = self.task.given(self._gathered(rows))
        return Batches(*columns, torch.from_numpy(real).float())

    def _gathered(self, rows: Integers) -> TorchTensors:
        return gathered(self.store, self.task, rows, self.device, self.users)


@dataclass(frozen=True)
class OwnExamples:
    """The examples of a user who trains alone."""

    lanes: ClassVar[int] = 1

    user: int  # position in the enrolled population
    local: LocalTraining
    key: bytes  # of the round
    rows: slice  # in the store
    store: UserStore
    device: torch.device
    task: Task
    resident: TorchTensors | None = None  # the store's fields on the device

    @property
    def counts(self) -> Integers:
        """Number of rows that count, [1]."""
        return counted(np.array([self.rows.stop - self.rows.start]), self.local)

    @property
    def steps(self) -> int:
        """Number of steps of the user."""
        return int(steps_of(self.counts, self.local)[0])

    def batches(self) -> Iterator[tuple[Inputs, Tensor]]:
        """Yield x and y of each step, [b, …]."""
        batches = batches_of(*self._drawn)
        if self.resident is not None:
            for rows in batches:
                yield self.task.given(self._columns(rows))
            return
        # Read the rows of several batches at once.
        largest = int(largest_batch(self.counts, self.local)[0])
        at_once = max(1, _WINDOW // max(1, largest * numbers_of(self.store, self.task)))
        while group := [*itertools.islice(batches, at_once)]:
            columns, lengths = self._columns(np.concatenate(group)), [*map(len, group)]
            parts = {n: torch.split(t, lengths) for n, t in columns.items()}
            for number in range(len(group)):
                yield self.task.given({n: batch[number] for n, batch in parts.items()})

    def blocks(self) -> Iterator[tuple[Inputs, Tensor, Tensor]]:
        """Yield each row to measure once: x and y [n, …], and which rows are real [1, n]."""
        rows = rows_in_order(*self._drawn)
        for first in range(0, len(rows), _MEASURED):
            block = rows[first : first + _MEASURED]
            x, y = self.task.given(self._columns(block))
            yield x, y, torch.ones((1, len(block)), dtype=torch.bool, device=self.device)

    @property
    def _drawn(self) -> tuple[int, int, int, LocalTraining, bytes]:
        first, size = self.rows.start, self.rows.stop - self.rows.start
        return self.user, first, size, self.local, self.key

    def _columns(self, rows: Integers) -> TorchTensors:
        if self.resident is not None:
            indices = to_device(torch.from_numpy(rows), self.device)
            return {name: column.index_select(0, indices) for name, column in self.resident.items()}
        columns = gathered(self.store, self.task, rows, self.device, len(rows))
        return {name: column.to(self.device, non_blocking=True) for name, column in columns.items()}


def numbers_of(store: UserStore, task: Task) -> int:
    """Return how many numbers a task reads from one row."""
    fields = (store.fields[name] for name in task.fields)
    return sum(math.prod(column.shape[1:]) for column in fields)


def gathered(
    store: UserStore, task: Task, rows: Integers, device: torch.device, users: int
) -> TorchTensors:
    """Return the fields of rows [l, …] on the CPU, with zeros after the first `users` lanes."""
    columns = TorchTensors()
    for name in task.fields:
        column, pinned = store.fields[name], device.type == "cuda"
        kind = torch.from_numpy(np.empty(0, column.dtype)).dtype
        columns[name] = torch.empty((*rows.shape, *column.shape[1:]), dtype=kind, pin_memory=pinned)
        columns[name][users:].zero_()
    store.take(rows[:users], {name: tensor[:users].numpy() for name, tensor in columns.items()})
    return columns


def held_on(device: torch.device, columns: Mapping[str, npt.NDArray[np.generic]]) -> TorchTensors:
    """Return a copy of fields on a device, [rows + 1, …], with zeros in the last row."""
    copies = {}
    for name, column in columns.items():
        kind = torch.from_numpy(np.empty(0, column.dtype)).dtype
        copies[name] = torch.zeros((len(column) + 1, *column.shape[1:]), dtype=kind, device=device)
        copies[name][:-1] = torch.from_numpy(np.ascontiguousarray(column))
    return copies


def lent(columns: Mapping[str, npt.NDArray[np.generic]]) -> TorchTensors:
    """Return fields [rows, …] as tensors in the same memory, which must not be written to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about arrays that are read-only
        return {name: torch.from_numpy(column) for name, column in columns.items()}
