"""Integers that a model or its loss cannot compute with, found before a GPU meets them.

Such as a label that is no class, or a word beyond an embedding. On a CPU they raise, and their user
alone counts as zero. On a GPU a kernel finds them, and its process can compute nothing any more. So
users who have integers that are not known to be legal are tried on the CPU.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from fedpriv.data.population import UserStore
from fedpriv.engine.arithmetic import generator_apart, plain_arithmetic
from fedpriv.engine.task import Task, called

_CPU = torch.device("cpu")


class Indices:
    """Knows which users of a store have integers that model or loss, evaluated, refuse."""

    def __init__(self, task: Task, users: UserStore) -> None:
        model = task.model if _on_cpu(task.model) else copy.deepcopy(task.model).to(_CPU)
        self._task, self._users = replace(task, model=model), users
        self._reasons: dict[int, Exception | None] = {}  # by user, of those that were tried
        fields = {name: users.fields[name] for name in task.fields}
        self._seen, self._suspect = np.zeros((2, users.population), np.bool_)
        self._zeros = {n: np.zeros((1, *f.shape[1:]), f.dtype) for n, f in fields.items()}

    def legal(self, name: str, most: int) -> tuple[int, int]:
        """The least and the largest legal number of a field of integers, up to ±most, or of bools.

        No number beyond is tried: a model may need memory in proportion, as for masks of a length.
        """
        if self._zeros[name].dtype.kind == "b":
            return 0, 1
        low, high = (max(-most, min(end, most)) for end in self._ends(name))
        return self._last_legal(name, low), self._last_legal(name, high)

    def check(self, users: npt.NDArray[np.int64]) -> None:
        """Raise what model or loss raise for the rows of the first of these users for whom they do.

        Users have rows, some of which may not count in a round.
        """
        for user in self._odd(users).tolist():
            if user not in self._reasons:
                self._reasons[user] = self._raised(self._users.examples_of(user))
            reason = self._reasons[user]
            if reason is not None:
                raise reason.with_traceback(None)  # which would grow each time, and keep rows

    def _odd(self, users: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Users with an integer that is not known to be legal; each is looked at once."""
        new = users[~self._seen[users]]
        if len(new):
            self._suspect[new] = self._beyond(new)
            self._seen[new] = True
        return users[self._suspect[users]]

    def _beyond(self, users: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which users have an integer that is not known to be legal."""
        starts, ends = self._users.offsets[users], self._users.offsets[users + 1]
        firsts = np.cumsum(ends - starts) - (ends - starts)
        rows = np.arange(len(users)).repeat(ends - starts)  # the user of each row
        rows = np.arange(len(rows)) + (starts - firsts)[rows]
        odd = np.zeros(len(users), np.bool_)
        for name, (least, most) in self._legal.items():
            field = cast(npt.NDArray[np.integer], self._users.fields[name])
            memory = np.empty((len(rows), *field.shape[1:]), field.dtype)
            self._users.take(rows, {name: memory})
            beyond = (memory < least) | (memory > most)
            if name == self._task.targets and self.may_ignore:
                beyond &= memory != self._task.ignore_index
            odd |= np.logical_or.reduceat(beyond.reshape(len(rows), -1).any(1), firsts)
        return odd

    @cached_property
    def _legal(self) -> dict[str, tuple[int, int]]:
        """By field, a range around 0 of legal numbers; a field in which all are legal is absent.

        A number is tried in all places of its field at once, so others may be legal in some places
        of it, and numbers further from 0 may be legal again.
        """
        found = {}
        for name, column in self._zeros.items():
            if np.issubdtype(column.dtype, np.integer):
                ends = self._ends(name)
                least, most = (self._last_legal(name, end) for end in ends)
                if (least, most) != ends:
                    found[name] = least, most
        return found

    @cached_property
    def may_ignore(self) -> bool:
        """Whether targets that do not count are legal."""
        return self._all_legal(self._task.targets, self._task.ignore_index)

    def _ends(self, name: str) -> tuple[int, int]:
        """The least and the largest number of the type of a field."""
        limits = np.iinfo(cast("np.dtype[np.integer]", self._zeros[name].dtype))
        return int(limits.min), int(limits.max)

    def _last_legal(self, name: str, end: int) -> int:
        return _last(partial(self._all_legal, name), end)

    def _all_legal(self, name: str, number: int) -> bool:
        """Whether an example computes that is zero but for one field, which is this number."""
        try:
            column = np.full_like(self._zeros[name], number)
        except OverflowError:
            return False
        return self._raised({**self._zeros, name: column}) is None

    def _raised(self, columns: Mapping[str, npt.NDArray[np.generic]]) -> Exception | None:
        x, y = self._task.given({n: torch.tensor(columns[n]) for n in self._task.fields})
        with plain_arithmetic(_CPU), torch.no_grad(), generator_apart():
            try:
                self._task.losses_of(called(self._task.model, {}, x), y)
            except Exception as error:
                return error
        return None


def _on_cpu(model: nn.Module) -> bool:
    return all(p.device.type == "cpu" for p in model.parameters())


def _last(legal: Callable[[int], bool], end: int) -> int:
    """The last number, from 0 towards an end, before the first that is found to be illegal.

    Powers of two are tried, and then, by bisection, numbers between the last two of them.
    """
    sign, size = (-1 if end < 0 else 1), abs(end)
    known, refused = 0, size + 1
    while known < size:
        tried = min(2 * known or 1, size)
        if not legal(sign * tried):
            refused = tried
            break
        known = tried
    while refused - known > 1:
        tried = (known + refused) // 2
        known, refused = (tried, refused) if legal(sign * tried) else (known, tried)
    return sign * known
