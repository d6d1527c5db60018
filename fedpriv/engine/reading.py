"""Rows as a task reads them, where its model and loss leave one way only to read them.

What rows alone decide is settled where a population is made, see `fedpriv.data.columns`.
"""

from dataclasses import replace
from typing import cast

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
        if _outputs(task, rows) is None and _outputs(task, numbers) is not None:
            rows = {**rows, str(task.inputs): x.astype(np.float32)}
    if y.shape[1:] == (1,) and task.loss in LOSSES.values():
        axes = 2 if task.loss is cross_entropy else 1
        if len(_outputs(task, rows) or ()) == axes:
            rows = {**rows, task.targets: y[:, 0]}
    return rows


def population_for(task: Task, population: Population) -> Population:
    """A population as a task reads it: `rows_for`, and targets of cross-entropy as classes.

    They may be one-hot, or whole numbers in floats, in all rows: that is a property of users' data,
    so this is for simulations. ModelError if loss or outputs do not fit the population's classes.
    """
    fields, test = population.users.fields, rows_for(task, population.test)
    users = rows_for(task, fields)
    if population.classes and task.targets == "y":
        _check_classes(task, population, _outputs(task, users) or ())
    if task.loss is cross_entropy:
        one, other = _with_classes(task, users), _with_classes(task, test) if test else test
        users, test = (users, test) if one is None or other is None else (one, other)
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


def _with_classes(task: Task, rows: Fields) -> Fields | None:
    """Rows with classes for targets that are one-hot or whole floats; None for other targets."""
    y = cast("NDArray[np.float32] | None", rows.get(task.targets))
    if y is None or y.dtype.kind not in ("f" if y.ndim == 1 else "biuf"):
        return None
    outputs = _outputs(task, rows) or ()
    if len(outputs) != 2 or outputs[1] < 2:
        return None
    if y.shape[1:] == outputs[1:] and ((y == 0) | (y == 1)).all() and (y.sum(1) == 1).all():
        return {**rows, task.targets: y.argmax(1)}
    if y.ndim == 1 and (np.abs(y) < 2**31).all() and (y == np.rint(y)).all():
        return {**rows, task.targets: y.astype(np.int64)}
    return None


def _outputs(task: Task, rows: Fields) -> tuple[int, ...] | None:
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
