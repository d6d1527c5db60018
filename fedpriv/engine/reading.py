"""Rows as a task reads them, where its model and loss leave one way only to read them.

What rows alone decide is settled where a population is made, see `fedpriv.data.columns`.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from fedpriv.data.columns import Array, Fields
from fedpriv.data.population import Population
from fedpriv.engine.arithmetic import generator_apart
from fedpriv.engine.task import LOSSES, Task, called, cross_entropy, huber, squared_error
from fedpriv.errors import ModelError


def rows_for(task: Task, rows: Fields) -> Fields:
    """Rows whose inputs are float32 if the model takes no integers, and targets [n] if one each.

    Types and shapes alone decide this, with what the model returns for a row of zeros. Inputs that
    are mapped from disk stay, and so do targets [n, 1] where the outputs fit them, or the loss is
    not one of `LOSSES`.
    """
    if not {*task.fields} <= rows.keys():
        return rows
    blank = {name: np.zeros((1, *rows[name].shape[1:]), rows[name].dtype) for name in task.fields}
    changed, y = dict(rows), rows[task.targets]
    if isinstance(task.inputs, str) and task.inputs != task.targets:
        x = rows[task.inputs]
        if x.dtype.kind in "iu" and not isinstance(x, np.memmap) and _outputs(task, blank) is None:
            floats = {**blank, task.inputs: blank[task.inputs].astype(np.float32)}
            if _outputs(task, floats) is not None:
                blank, changed[task.inputs] = floats, x.astype(np.float32)
    if y.shape[1:] == (1,) and task.loss in LOSSES.values():
        axes = 2 if task.loss is cross_entropy else 1
        if len(_outputs(task, blank) or ()) == axes:
            changed[task.targets] = y[:, 0]
    return changed


def population_for(task: Task, population: Population) -> Population:
    """A population as a task reads it: `rows_for`, and one-hot targets of cross-entropy as classes.

    Targets are one-hot if the model has an output for each column and all rows are 0 but for one 1:
    that is a property of users' data, so this is for simulations. ModelError if the loss is of
    numbers and the targets were text.
    """
    numbers = task.loss in (squared_error, huber)
    if numbers and task.targets == "y" and population.classes and not population.classes_given:
        raise ModelError(
            f"targets are the classes {list(population.classes)} and the loss is of numbers; use "
            "cross-entropy, or binary-cross-entropy for two classes"
        )
    fields = population.users.fields
    users, test = rows_for(task, fields), rows_for(task, population.test)
    if task.loss is cross_entropy and all(_one_hot(task, rows) for rows in (users, test) if rows):
        users, test = (
            {**rows, task.targets: rows[task.targets].argmax(1)} if rows else rows
            for rows in (users, test)
        )
    if all(users[name] is fields[name] for name in fields):
        return population
    return replace(population, users=replace(population.users, fields=users), test=test)


def _one_hot(task: Task, rows: Fields) -> bool:
    y = rows.get(task.targets)
    if y is None or y.ndim != 2 or y.shape[1] < 2 or y.dtype.kind not in "biuf":
        return False
    blank = {name: np.zeros((1, *rows[name].shape[1:]), rows[name].dtype) for name in task.fields}
    if _outputs(task, blank) != (1, y.shape[1]):
        return False
    return bool(((y == 0) | (y == 1)).all() and (y.sum(1) == 1).all())


def _outputs(task: Task, rows: Mapping[str, Array]) -> tuple[int, ...] | None:
    """The shape of the model's outputs; None if it raises."""
    tensors = {name: torch.from_numpy(p) for name, p in task.parameters().items()}
    try:
        x, _ = task.given({name: torch.tensor(column) for name, column in rows.items()})
        with generator_apart(0), torch.no_grad():
            model = task.apart().model
            return tuple(called(model, tensors | task.constants(torch.device("cpu")), x).shape)
    except Exception:  # of whatever class; `check_task` says what is wrong
        return None
