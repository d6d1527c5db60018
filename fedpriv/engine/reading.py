"""Rows as a task reads them, where its model and loss leave one way only to read them.

What rows alone decide is settled where a population is made, see `fedpriv.data.columns`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from fedpriv.data.columns import Fields
from fedpriv.data.population import Population
from fedpriv.engine.arithmetic import generators_apart
from fedpriv.engine.task import (
    LOSSES,
    Task,
    binary_cross_entropy,
    called_apart,
    cross_entropy,
    huber,
    squared_error,
)
from fedpriv.errors import ModelError

_NO_CLASS = -(2**31)
_EXACT = 2**24  # up to which float32 holds every whole number


def rows_for(task: Task, rows: Fields) -> Fields:
    """Rows whose inputs are of the type that the model takes, and targets [n] if one each.

    Types and shapes alone decide this, with what the model returns for a row of zeros. Integers
    become int64 or float32, and floats int64, if the model takes these alone. Inputs that are
    mapped from disk stay, and so do targets [n, 1] where the outputs fit them, or the loss is not
    one of `LOSSES`.
    """
    if not {*task.fields} <= rows.keys():
        return rows
    x, y = rows.get(str(task.inputs)), rows[task.targets]
    if x is not None and x is not y and x.dtype.kind in "iuf" and not isinstance(x, np.memmap):
        tried = [_whole] if x.dtype.kind == "f" else [_as(np.int64), _as(np.float32)]
        for read in tried if outputs_of_zeros(task, rows) is None else ():
            if outputs_of_zeros(task, {**rows, str(task.inputs): read(x[:0])}) is not None:
                rows = {**rows, str(task.inputs): read(x)}
                break
    if y.shape[1:] == (1,) and task.loss in LOSSES.values():
        axes = 2 if task.loss is cross_entropy else 1
        if len(outputs_of_zeros(task, rows) or ()) == axes:
            rows = {**rows, task.targets: y[:, 0]}
    return rows


def population_for(task: Task, population: Population) -> Population:
    """Return a population as a task reads it: `rows_for`, and targets of cross-entropy as classes.

    Held-out targets alone decide whether targets are one-hot, or whole numbers in floats, since no
    user's rows may decide how those of others are read. A user's row that is none becomes a class
    that no model has, so that this user counts as zero. ModelError if loss or outputs do not fit
    the population's classes, or the model takes whole numbers and held-out rows have others.
    """
    fields, test = population.users.fields, rows_for(task, population.test)
    users, x = rows_for(task, fields), str(task.inputs)
    if test.get(x) is not population.test.get(x) and (test[x] == _NO_CLASS).any():
        raise ModelError(
            f"the model takes whole numbers, and held-out field {x!r} has numbers between these"
        )
    if population.classes and task.targets == "y":
        _check_classes(task, population, outputs_of_zeros(task, users) or ())
    read = _reader(task, test) if test else None
    if read and (read(test[task.targets]) != _NO_CLASS).all():
        users, test = ({**r, task.targets: read(r[task.targets])} for r in (users, test))
    if all(users[name] is fields[name] for name in fields):
        return population
    return replace(population, users=replace(population.users, fields=users), test=test)


def users_for(task: Task, fields: Fields) -> Fields:
    """Return users' fields as a task reads them where nothing is held out, as at a node.

    Types and shapes alone decide: a missing label may have made floats of the classes of all users,
    and with cross-entropy they can be nothing else. Shares of classes in floats stay.
    """
    users = rows_for(task, fields)
    read = _reader(task, users)
    if read is None or (users[task.targets].dtype.kind == "f" and users[task.targets].ndim > 1):
        return users
    return {**users, task.targets: read(users[task.targets])}


def _check_classes(task: Task, population: Population, outputs: tuple[int, ...]) -> None:
    names = list(population.classes or ())
    if task.loss in (squared_error, huber) and not population.classes_given:
        raise ModelError(
            f"targets are the classes {names} and the loss is of numbers; use cross-entropy, or "
            "binary-cross-entropy for two classes"
        )
    if task.loss is binary_cross_entropy and len(names) > 2:
        raise ModelError(
            f"targets are the classes {names} and the loss is binary-cross-entropy, for two; use "
            "cross-entropy, and a model with a score of each class"
        )
    if task.loss is cross_entropy and len(outputs) > 1 and 1 < outputs[1] < len(names):
        raise ModelError(
            f"the model returns {outputs[1]} scores and targets are the classes {names}; it must "
            "return a score of each"
        )


def _reader(task: Task, rows: Fields) -> Callable[[Any], NDArray[np.int64]] | None:
    """Return the function from targets to classes if their type and shape may need it."""
    if task.loss is not cross_entropy or not {*task.fields} <= rows.keys():
        return None
    y, outputs = rows[task.targets], outputs_of_zeros(task, rows) or ()
    read, kinds = (_whole, "f") if y.ndim == 1 else (_one_hot, "biuf")
    fits = len(outputs) == 2 and outputs[1] > 1 and y.shape[1:] in ((), outputs[1:])
    return read if fits and y.dtype.kind in kinds else None


def _one_hot(y: Any) -> NDArray[np.int64]:
    valid = ((y == 0) | (y == 1)).all(1) & (y.sum(1) == 1)
    return np.where(valid, y.argmax(1), _NO_CLASS)


def _whole(numbers: Any) -> NDArray[np.int64]:
    valid = (np.abs(numbers) <= _EXACT) & (numbers == np.rint(numbers))
    return np.where(valid, numbers, _NO_CLASS).astype(np.int64)


def _as(kind: type) -> Callable[[Any], NDArray[Any]]:
    return lambda integers: cast(NDArray[Any], integers.astype(kind))


def outputs_of_zeros(task: Task, rows: Fields) -> tuple[int, ...] | None:
    """The shape of the model's outputs for a row of zeros like these rows; None if it raises."""
    tensors = {name: torch.from_numpy(p) for name, p in task.parameters().items()}
    tensors |= task.constants(torch.device("cpu"))
    try:
        blank = {n: np.zeros((1, *rows[n].shape[1:]), rows[n].dtype) for n in task.fields}
        x, _ = task.given({name: torch.from_numpy(column) for name, column in blank.items()})
        with generators_apart(0), torch.no_grad():
            model = task.apart().model
            return tuple(
                called_apart(model, tensors | task.constants(torch.device("cpu")), x).shape
            )
    except Exception:  # of whatever class; `check_task` says what is wrong
        return None
