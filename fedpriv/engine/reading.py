"""Converts rows to the types and shapes that a task takes, if its model and loss allow only one.

Conversions that depend on rows alone belong to `fedpriv.data.columns`.
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
_EXACT = 2**24  # float32 holds every whole number up to it


def rows_for(task: Task, rows: Fields) -> Fields:
    """Return rows with inputs of the type that the model takes, and targets [n] for [n, 1].

    Only types, shapes and the model's outputs for a row of zeros decide. Integers become int64 or
    float32, and floats int64, if the model refuses their type and takes this one. Inputs that are
    mapped from disk do not change, nor do targets [n, 1] if the outputs fit them or the loss is not
    in `LOSSES`.
    """
    if not {*task.fields} <= rows.keys():
        return rows
    x, y = rows.get(str(task.inputs)), rows[task.targets]
    if x is not None and x is not y and x.dtype.kind in "iuf" and not isinstance(x, np.memmap):
        readers = [_whole] if x.dtype.kind == "f" else [_as(np.int64), _as(np.float32)]
        for reader in readers if outputs_of_zeros(task, rows) is None else ():
            if outputs_of_zeros(task, {**rows, str(task.inputs): reader(x[:0])}) is not None:
                rows = {**rows, str(task.inputs): reader(x)}
                break
    if y.shape[1:] == (1,) and task.loss in LOSSES.values():
        axes = 2 if task.loss is cross_entropy else 1
        if len(outputs_of_zeros(task, rows) or ()) == axes:
            rows = {**rows, task.targets: y[:, 0]}
    return rows


def population_for(task: Task, population: Population) -> Population:
    """Return a population as a task reads it: `rows_for`, and targets of cross-entropy as classes.

    Only held-out targets decide whether targets are one-hot, or whole numbers in floats, because
    the rows of a user must not affect how others' are read. Any other target of a user becomes a
    class that no model has, so the user counts as zero. ModelError: loss or outputs do not fit the
    population's classes, or the model takes whole numbers and a held-out row has others.
    """
    fields, test = population.users.fields, rows_for(task, population.test)
    users, x = rows_for(task, fields), str(task.inputs)
    if test.get(x) is not population.test.get(x) and (test[x] == _NO_CLASS).any():
        raise ModelError(
            f"the model takes whole numbers, and held-out field {x!r} has others, or too large ones"
        )
    if population.classes and task.targets == "y":
        _check_classes(task, population, outputs_of_zeros(task, users) or ())
    reader = _reader(task, test) if test else None
    if reader and (reader(test[task.targets]) != _NO_CLASS).all():
        users, test = ({**r, task.targets: reader(r[task.targets])} for r in (users, test))
    if all(users[name] is fields[name] for name in fields):
        return population
    return replace(population, users=replace(population.users, fields=users), test=test)


def users_for(task: Task, fields: Fields) -> Fields:
    """Return users' fields as a task reads them without held-out rows, as on a node.

    Only types and shapes decide. A missing label may have turned all classes into floats, and with
    cross-entropy, floats [n] must be classes. Floats [n, K] are shares of classes, and stay.
    """
    users = rows_for(task, fields)
    reader = _reader(task, users)
    if reader is None or (users[task.targets].dtype.kind == "f" and users[task.targets].ndim > 1):
        return users
    return {**users, task.targets: reader(users[task.targets])}


def _check_classes(task: Task, population: Population, outputs: tuple[int, ...]) -> None:
    names = list(population.classes or ())
    if task.loss in (squared_error, huber) and not population.classes_given:
        raise ModelError(
            f"targets are the classes {names} and the loss takes numbers; use cross-entropy, or "
            "binary-cross-entropy for two classes"
        )
    if task.loss is binary_cross_entropy and len(names) > 2:
        raise ModelError(
            f"targets are the classes {names} and binary-cross-entropy takes two; use "
            "cross-entropy, and a model with a score for each class"
        )
    if task.loss is cross_entropy and len(outputs) > 1 and 1 < outputs[1] < len(names):
        raise ModelError(
            f"the model returns {outputs[1]} scores and targets are the classes {names}; it must "
            "return a score for each"
        )


def _reader(task: Task, rows: Fields) -> Callable[[Any], NDArray[np.int64]] | None:
    """Return a function that turns targets into classes, if their type and shape may need it."""
    if task.loss is not cross_entropy or not {*task.fields} <= rows.keys():
        return None
    y, outputs = rows[task.targets], outputs_of_zeros(task, rows) or ()
    reader, kinds = (_whole, "f") if y.ndim == 1 else (_one_hot, "biuf")
    fits = len(outputs) == 2 and outputs[1] > 1 and y.shape[1:] in ((), outputs[1:])
    return reader if fits and y.dtype.kind in kinds else None


def _one_hot(y: Any) -> NDArray[np.int64]:
    valid = ((y == 0) | (y == 1)).all(1) & (y.sum(1) == 1)
    return np.where(valid, y.argmax(1), _NO_CLASS)


def _whole(numbers: Any) -> NDArray[np.int64]:
    valid = (np.abs(numbers) <= _EXACT) & (numbers == np.rint(numbers))
    return np.where(valid, numbers, _NO_CLASS).astype(np.int64)


def _as(kind: type) -> Callable[[Any], NDArray[Any]]:
    return lambda integers: cast(NDArray[Any], integers.astype(kind))


def outputs_of_zeros(task: Task, rows: Fields) -> tuple[int, ...] | None:
    """Return the shape of the model's outputs for a row of zeros like these; None if it raises."""
    tensors = {name: torch.from_numpy(p) for name, p in task.parameters().items()}
    tensors |= task.constants(torch.device("cpu"))
    try:
        blank = {n: np.zeros((1, *rows[n].shape[1:]), rows[n].dtype) for n in task.fields}
        x, _ = task.given({name: torch.from_numpy(column) for name, column in blank.items()})
        with generators_apart(0), torch.no_grad():
            return tuple(called_apart(task.apart().model, tensors, x).shape)
    except Exception:  # of any class; `check_task` reports the error
        return None
