"""Rows as a task reads them, where its model and loss leave one way only to read them.

What rows alone decide is settled where a population is made, see `fedpriv.data.columns`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedpriv.data.columns import Fields
from fedpriv.data.population import Population
from fedpriv.engine.arithmetic import generator_apart
from fedpriv.engine.task import (
    LOSSES,
    Task,
    binary_cross_entropy,
    called,
    cross_entropy,
    huber,
    squared_error,
)
from fedpriv.errors import ModelError

_NO_CLASS = -(2**31)


def rows_for(task: Task, rows: Fields) -> Fields:
    """Rows whose inputs are float32 if the model takes no integers, and targets [n] if one each.

    Types and shapes alone decide this, with what the model returns for a row of zeros. Inputs that
    are mapped from disk stay, and so do targets [n, 1] where the outputs fit them, or the loss is
    not one of `LOSSES`.
    """
    if not {*task.fields} <= rows.keys():
        return rows
    x, y = rows.get(str(task.inputs)), rows[task.targets]
    if x is not None and x is not y and x.dtype.kind in "iu" and not isinstance(x, np.memmap):
        numbers = {**rows, str(task.inputs): x[:0].astype(np.float32)}
        if outputs_of_zeros(task, rows) is None and outputs_of_zeros(task, numbers) is not None:
            rows = {**rows, str(task.inputs): x.astype(np.float32)}
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
    the population's classes.
    """
    fields, test = population.users.fields, rows_for(task, population.test)
    users = rows_for(task, fields)
    if population.classes and task.targets == "y":
        _check_classes(task, population, outputs_of_zeros(task, users) or ())
    classes = _classes_of(task, test) if test and task.loss is cross_entropy else None
    if classes:
        users, test = ({**r, task.targets: classes(r[task.targets])} for r in (users, test))
    if all(users[name] is fields[name] for name in fields):
        return population
    return replace(population, users=replace(population.users, fields=users), test=test)


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


def _classes_of(task: Task, rows: Fields) -> Callable[[Any], NDArray[np.int64]] | None:
    """Return the function from these rows' targets to classes; None if they are other targets."""
    y, outputs = rows[task.targets], outputs_of_zeros(task, rows) or ()
    read, kinds = (_whole, "f") if y.ndim == 1 else (_one_hot, "biuf")
    fits = len(outputs) == 2 and outputs[1] > 1 and y.shape[1:] in ((), outputs[1:])
    return read if fits and y.dtype.kind in kinds and (read(y) != _NO_CLASS).all() else None


def _one_hot(y: Any) -> NDArray[np.int64]:
    valid = ((y == 0) | (y == 1)).all(1) & (y.sum(1) == 1)
    return np.where(valid, y.argmax(1), _NO_CLASS)


def _whole(y: Any) -> NDArray[np.int64]:
    valid = (np.abs(y) < 2**31) & (y == np.rint(y))
    return np.where(valid, y, _NO_CLASS).astype(np.int64)


def outputs_of_zeros(task: Task, rows: Fields) -> tuple[int, ...] | None:
    """The shape of the model's outputs for a row of zeros like these rows; None if it raises."""
    tensors = {name: torch.from_numpy(p) for name, p in task.parameters().items()}
    try:
        blank = {n: np.zeros((1, *rows[n].shape[1:]), rows[n].dtype) for n in task.fields}
        x, _ = task.given({name: torch.from_numpy(column) for name, column in blank.items()})
        with generator_apart(0), torch.no_grad():
            model = task.apart().model
            return tuple(called(model, tensors | task.constants(torch.device("cpu")), x).shape)
    except Exception:  # of whatever class; `check_task` says what is wrong
        return None
