"""The examples of users who train together, gathered on the device where they train."""

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

_STEPS, _ORDER = "steps.", "order."  # what users train on, and what they measure
_ROWS, _REAL, _WORDS = "rows", "real", "words"
_WINDOW = 2**22  # numbers of examples that are gathered at once on a CPU
_MEASURED = 2_000  # rows of a user who goes alone that are measured at once


@dataclass(frozen=True)
class Batches:
    """Slices of W rows of L lanes, K for each of some steps; the first lanes are users."""

    x: Inputs  # [L, T, W, …] each, T steps of K slices
    y: Tensor  # [L, T, W, …] targets
    real: Tensor  # [L, T, W] 1 for rows that count, 0 for what fills slices and lanes

    def shares(self, task: Task, slices: int) -> Tensor:
        """The share of each row in the mean over its batch, [L, T, W]."""
        lanes, _, width = self.real.shape
        real = self.real.view(lanes, -1, slices, width)
        counted = (real * task.shares(self.y, axes=3).view_as(real)).sum((2, 3), keepdim=True)
        return (real / torch.where(counted > 0.0, counted, 1.0)).flatten(1, 2)


@dataclass(frozen=True)
class Examples:
    """The examples of n users in L ≥ n lanes."""

    users: int  # n
    schedule: Schedule
    store: UserStore
    device: torch.device
    task: Task  # says which fields it reads
    resident: TorchTensors | None = None  # the store's fields, if they are `held_on` the device
    # What users of the same shape were `given`, whose examples these are instead.
    made_of: TorchTensors = field(default_factory=dict)

    @property
    def lanes(self) -> int:
        """L."""
        return len(self.schedule.words)

    @property
    def counts(self) -> Integers:
        """How many rows of each user count, [n]."""
        return self.schedule.counts[: self.users]

    @property
    def shape(self) -> tuple[int, ...]:
        """What decides, of a GPU's kernels, which ones run."""
        schedule, measured = self.schedule, self.made_of.get(_ORDER + _REAL)
        blocks = 0 if measured is None else measured.shape[1]
        steps = len(self.slices), schedule.slices, schedule.width
        return self.lanes, *steps, blocks, int(self.rests)

    @cached_property
    def slices(self) -> list[Integers]:
        """For each step, in how many slices of it users have rows: [n]."""
        steps = steps_of(self.counts, self.schedule.local)
        slices, most = largest_batch(self.counts, self.schedule.local), int(steps.max())
        slices = -(-slices // self.schedule.width)
        if self.device.type == "cuda":  # of few numbers of steps, each of which is captured
            most = rounded_up(most)
        return [np.where(steps > step, slices, 0) for step in range(most)]

    @cached_property
    def rests(self) -> bool:
        """Whether users have fewer steps, or slices in a step, than there are."""
        return any(slices.min() < self.schedule.slices for slices in self.slices)

    def given(self, *, measured: bool) -> TorchTensors:
        """What all is made of, on the device; with or without what is measured."""
        width, drawn = self.schedule.width, {}
        drawn[_STEPS] = self.schedule.rows(0, len(self.slices), self.lanes)
        if measured:
            drawn[_ORDER] = self.schedule.in_order(0, -(-int(self.counts.max()) // width) * width)
        given = {_WORDS: torch.from_numpy(self.schedule.words)}
        for part, (rows, real) in drawn.items():
            given[part + _REAL] = torch.from_numpy(real).float()
            if self.resident is not None:
                given[part + _ROWS] = torch.from_numpy(rows)
            else:
                given |= {part + name: column for name, column in self._gathered(rows).items()}
        return {name: to_device(tensor, self.device) for name, tensor in given.items()}

    def windows(self, lanes: list[int]) -> Iterator[Batches]:
        """All slices, some steps at a time; `lanes` says how many are needed in each step."""
        if self.made_of:
            yield self._given(_STEPS)
            return
        first = 0
        while first < len(lanes):
            of_lane = self.schedule.slices * self.schedule.width * numbers_of(self.store, self.task)
            room = _WINDOW // max(1, lanes[first] * of_lane)
            steps = max(1, min(room, len(lanes) - first))
            yield self._batches(*self.schedule.rows(first, steps, lanes[first]))
            first += steps

    def blocks(self) -> Iterator[tuple[Inputs, Tensor, Tensor]]:
        """All that is measured, each row once: x and y [L·W, …], and which are real [L, W]."""
        width, whole = self.schedule.width, self._given(_ORDER) if self.made_of else None
        for first in range(0, whole.y.shape[1] if whole else int(self.counts.max()), width):
            part = whole or self._batches(*self.schedule.in_order(first, width))
            start = first if whole else 0

            def rows(t: Tensor, start: int = start) -> Tensor:
                return t[:, start : start + width].flatten(0, 1)

            yield each_input(rows, part.x), rows(part.y), part.real[:, start : start + width] > 0.0

    @property
    def words(self) -> Tensor:
        """A random word of each lane, [L], on the device."""
        own = self.made_of.get(_WORDS)
        return torch.from_numpy(self.schedule.words) if own is None else own

    def _given(self, part: str) -> Batches:
        held, columns = self.made_of, TorchTensors()
        for name in self.task.fields:
            if self.resident is None:
                columns[name] = held[part + name]
            else:
                rows, column = held[part + _ROWS], self.resident[name]
                taken = column.index_select(0, rows.flatten())
                columns[name] = taken.view(*rows.shape, *column.shape[1:])
        return Batches(*self.task.given(columns), held[part + _REAL])

    def _batches(self, rows: Integers, real: npt.NDArray[np.bool_]) -> Batches:
        columns = self.task.given(self._gathered(rows))
        return Batches(*columns, torch.from_numpy(real).float())

    def _gathered(self, rows: Integers) -> TorchTensors:
        return gathered(self.store, self.task, rows, self.device, self.users)


@dataclass(frozen=True)
class OwnExamples:
    """The examples of a user who goes alone."""

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
        """How many rows count: [1]."""
        return counted(np.array([self.rows.stop - self.rows.start]), self.local)

    @property
    def steps(self) -> int:
        """How many steps the user takes."""
        return int(steps_of(self.counts, self.local)[0])

    def batches(self) -> Iterator[tuple[Inputs, Tensor]]:
        """x and y of each step, [b, …]."""
        batches = batches_of(*self._drawn)
        if self.resident is not None:  # or all rows of the user are read anew for each pass
            for rows in batches:
                yield self.task.given(self._columns(rows))
            return
        largest = int(largest_batch(self.counts, self.local)[0])
        at_once = max(1, _WINDOW // max(1, largest * numbers_of(self.store, self.task)))
        while some := [*itertools.islice(batches, at_once)]:
            columns, lengths = self._columns(np.concatenate(some)), [*map(len, some)]
            parts = {n: torch.split(t, lengths) for n, t in columns.items()}
            for number in range(len(some)):
                yield self.task.given({n: of_steps[number] for n, of_steps in parts.items()})

    def blocks(self) -> Iterator[tuple[Inputs, Tensor, Tensor]]:
        """All that is measured, each row once: x and y [n, …], and which are real [1, n]."""
        rows = rows_in_order(*self._drawn)
        for first in range(0, len(rows), _MEASURED):
            some = rows[first : first + _MEASURED]
            x, y = self.task.given(self._columns(some))
            yield x, y, torch.ones((1, len(some)), dtype=torch.bool, device=self.device)

    @property
    def _drawn(self) -> tuple[int, int, int, LocalTraining, bytes]:
        first, size = self.rows.start, self.rows.stop - self.rows.start
        return self.user, first, size, self.local, self.key

    def _columns(self, rows: Integers) -> TorchTensors:
        if self.resident is not None:
            chosen = to_device(torch.from_numpy(rows), self.device)
            return {name: column.index_select(0, chosen) for name, column in self.resident.items()}
        taken = gathered(self.store, self.task, rows, self.device, len(rows))
        return {name: column.to(self.device, non_blocking=True) for name, column in taken.items()}


def numbers_of(store: UserStore, task: Task) -> int:
    """How many numbers a row has that a task reads."""
    fields = (store.fields[name] for name in task.fields)
    return sum(math.prod(column.shape[1:]) for column in fields)


def gathered(
    store: UserStore, task: Task, rows: Integers, device: torch.device, users: int
) -> TorchTensors:
    """Fields of rows [l, …] in torch's memory on the CPU, zero behind the first users."""
    held, some = TorchTensors(), rows[:users]
    for name in task.fields:
        column, pinned = store.fields[name], device.type == "cuda"
        kind = torch.from_numpy(np.empty(0, column.dtype)).dtype
        held[name] = torch.empty((*rows.shape, *column.shape[1:]), dtype=kind, pin_memory=pinned)
        held[name][users:].zero_()
    store.take(some, {name: tensor[:users].numpy() for name, tensor in held.items()})
    return held


def held_on(device: torch.device, columns: Mapping[str, npt.NDArray[np.generic]]) -> TorchTensors:
    """Fields [rows + 1, …] on a device, of which the last row is zero."""
    held = {}
    for name, column in columns.items():
        kind = torch.from_numpy(np.empty(0, column.dtype)).dtype
        held[name] = torch.zeros((len(column) + 1, *column.shape[1:]), dtype=kind, device=device)
        held[name][:-1] = torch.from_numpy(np.ascontiguousarray(column))
    return held


def lent(columns: Mapping[str, npt.NDArray[np.generic]]) -> TorchTensors:
    """Fields [rows, …] in the memory where they are, which nothing writes to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # some cannot be written to
        return {name: torch.from_numpy(column) for name, column in columns.items()}
