"""A search for integers that a model or its loss refuses, before they reach a GPU.

Examples are a label that is not a class, and a word beyond an embedding. On a CPU they raise, and
only their user counts as zero. On a GPU they make a kernel fail, after which its process cannot
compute anything. So users with integers that may be refused are first tried on the CPU.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.data.population import UserStore
from fedpriv.engine.arithmetic import generators_apart, plain_arithmetic
from fedpriv.engine.task import Task, called

_CPU = torch.device("cpu")


class Indices:
    """Finds users of a store with integers that the model or the loss refuses in evaluation."""

    def __init__(self, task: Task, users: UserStore) -> None:
        self._task, self._users = task.evaluated(), users
        self._task.model.to(_CPU)
        self._reasons: dict[int, Exception | None] = {}  # of users who were tried; None: accepted
        self._seen, self._suspect = np.zeros((2, users.population), np.bool_)
        fields = ((name, users.fields[name]) for name in task.fields)
        self._zeros = {n: np.zeros((1, *f.shape[1:]), f.dtype) for n, f in fields}

    def largest(self, name: str, limit: int) -> int:
        """Return the largest legal number of a field of integers or bools, at most `limit`.

        No larger number is tried, since a model may need memory in proportion to it.
        """
        if self._zeros[name].dtype.kind == "b":
            return 1
        return _last(partial(self._all_legal, name), min(limit, self._ends(name)[1]))

    def check(self, users: npt.NDArray[np.int64]) -> None:
        """Raise the error of the model or the loss for the first of these users that has one.

        Users must have rows. All rows are tried, even those that do not count in a round.
        """
        for user in self._suspects(users).tolist():
            if user not in self._reasons:
                self._reasons[user] = self._raised(self._users.examples_of(user))
            reason = self._reasons[user]
            if reason is not None:
                # Without the traceback, which would grow each time and keep rows in memory.
                raise reason.with_traceback(None)

    def _suspects(self, users: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the users with an integer outside the legal ranges; each is examined once."""
        newcomers = users[~self._seen[users]]
        if len(newcomers):
            self._suspect[newcomers] = self._beyond(newcomers)
            self._seen[newcomers] = True
        return users[self._suspect[users]]

    def _beyond(self, users: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return whether each user has an integer outside the legal ranges, [n]."""
        starts, ends = self._users.offsets[users], self._users.offsets[users + 1]
        firsts = np.cumsum(ends - starts) - (ends - starts)
        owners = np.arange(len(users)).repeat(ends - starts)  # the user of each row
        rows = np.arange(len(owners)) + (starts - firsts)[owners]
        suspect = np.zeros(len(users), np.bool_)
        for name, (low, high) in self._legal.items():
            field = cast(npt.NDArray[np.integer], self._users.fields[name])
            memory = np.empty((len(rows), *field.shape[1:]), field.dtype)
            self._users.take(rows, {name: memory})
            is_beyond = (memory < low) | (memory > high)
            if name == self._task.targets and self.may_ignore:
                is_beyond &= memory != self._task.ignore_index
            suspect |= np.logical_or.reduceat(is_beyond.reshape(len(rows), -1).any(1), firsts)
        return suspect

    @cached_property
    def _legal(self) -> dict[str, tuple[int, int]]:
        """A range of legal numbers around 0 by field, omitting fields that accept all numbers.

        A number is tried in all places of a field at once, so other numbers may be legal in some
        places, and numbers further from 0 may be legal again.
        """
        ranges = {}
        for name, column in self._zeros.items():
            if np.issubdtype(column.dtype, np.integer):
                ends = self._ends(name)
                low, high = (_last(partial(self._all_legal, name), end) for end in ends)
                if (low, high) != ends:
                    ranges[name] = low, high
        return ranges

    @cached_property
    def may_ignore(self) -> bool:
        """True if the task's `ignore_index` is legal as a target."""
        return self._all_legal(self._task.targets, self._task.ignore_index)

    def _ends(self, name: str) -> tuple[int, int]:
        """Return the least and the largest number of a field's type."""
        limits = np.iinfo(cast("np.dtype[np.integer]", self._zeros[name].dtype))
        return int(limits.min), int(limits.max)

    def _all_legal(self, name: str, number: int) -> bool:
        """Return whether an example with this number in one field and zeros elsewhere works."""
        try:
            column = np.full_like(self._zeros[name], number)
        except OverflowError:
            return False
        return self._raised({**self._zeros, name: column}) is None

    def _raised(self, columns: Mapping[str, npt.NDArray[np.generic]]) -> Exception | None:
        x, y = self._task.given({n: torch.tensor(columns[n]) for n in self._task.fields})
        with plain_arithmetic(_CPU), torch.no_grad(), generators_apart():
            try:
                self._task.losses_of(called(self._task.model, {}, x), y)
            except Exception as error:
                return error
        return None


def _last(is_legal: Callable[[int], bool], end: int) -> int:
    """Return the last number, from 0 towards `end`, before the first that is not legal.

    It tries powers of two first, then bisects between the last two of them.
    """
    sign, size = (-1 if end < 0 else 1), abs(end)
    accepted, refused = 0, size + 1
    while accepted < size:
        candidate = min(2 * accepted or 1, size)
        if not is_legal(sign * candidate):
            refused = candidate
            break
        accepted = candidate
    candidates = range(accepted + 1, refused)
    accepted += bisect_left(candidates, 1, key=lambda number: not is_legal(sign * number))
    return sign * accepted
