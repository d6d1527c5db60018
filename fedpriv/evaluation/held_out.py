"""Evaluation on held-out rows: loss, accuracy and the task's figures."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedpriv.data.population import HELD_OUT_USER
from fedpriv.engine.arithmetic import seeded
from fedpriv.engine.task import HeldOut, Task, called
from fedpriv.engine.task_checks import about_words
from fedpriv.errors import InvalidValueError, ModelError, known_names
from fedpriv.measures.figures import (
    ACCURACY,
    ALWAYS,
    LOSS,
    Collected,
    Figure,
    Seen,
    Sums,
    are_classes,
    class_name,
    spread_over_users,
)
from fedpriv.privacy.layout import Tensors

_MOST_GROUPS = 50
_ROWS = 500  # evaluated at once; the outputs of more rows would not fit into the caches


@dataclass(frozen=True)
class Evaluation:
    """Measures of a model on held-out rows; figures that could not be computed are NaN."""

    loss: float  # mean over targets that count
    accuracy: float | None  # in [0, 1]; None unless targets are classes
    # The task's figures, by name. For each field of `Task.by`, they include the figures of groups
    # of rows, such as "accuracy by sex: F", and the largest difference between two groups, such as
    # "accuracy by sex: gap".
    figures: Mapping[str, float]
    # `spread_over_users` of each figure, loss and accuracy; empty if rows have no `HELD_OUT_USER`.
    held_out_users: Mapping[str, Mapping[str, float]]
    failed: Mapping[str, str]  # reasons why figures could not be computed, by name


@torch.no_grad()
def evaluate(
    task: Task,
    rows: HeldOut,
    device: torch.device,
    parameters: Tensors,
    personal: Iterable[tuple[npt.NDArray[np.int64], Tensors]] | None = None,
    classes: Sequence[str] = (),
) -> Evaluation:
    """Return loss, accuracy and the task's figures of a model in evaluation mode.

    They cover all held-out rows, or the rows in `personal`: positions [k] and the tensors of their
    user, which replace those of the model. Random numbers that a model draws in evaluation are the
    same each time. `classes` are names of the targets by number, "" if unknown.
    """
    task = task.evaluated()  # a copy, so that the model keeps no data of the rows
    tensors = {name: torch.tensor(p, device=device) for name, p in parameters.items()}
    tensors = task.constants(device) | tensors
    count, partitions = len(rows[task.targets]), dict[str, _Partition]()
    for name in (HELD_OUT_USER, *task.by):
        if name in rows:
            labels, codes = np.unique(rows[name], return_inverse=True)
            if name == task.targets and classes:
                labels = np.array([class_name(label, classes) for label in labels.tolist()])
            partitions[name] = _Partition(labels, torch.from_numpy(codes.ravel()))
    figures = _Figures(cast(Mapping[str, Figure], task.figures), partitions, classes)
    with seeded(bytes(32), 0, device):
        for piece, personal_tensors in _pieces(count, personal):
            columns = {n: torch.tensor(rows[n][piece], device=device) for n in task.fields}
            x, y = task.given(columns)
            replacements = {n: torch.tensor(t, device=device) for n, t in personal_tensors.items()}
            view = task.seen(called(task.model, tensors | replacements, x), y)
            figures.add(view, torch.from_numpy(piece))
    return figures.evaluation()


def check_held_out(task: Task, rows: HeldOut, device: torch.device) -> float:
    """Return the mean loss of all held-out rows; ModelError if a task cannot be evaluated on them.

    At its initial parameters, its mean loss and all figures must be finite. InvalidValueError if
    rows cannot be grouped by a field of `Task.by`.
    """
    for name in task.by:
        if name not in rows:
            raise InvalidValueError(
                f"figures are to be grouped by {name!r}, which the held-out rows do not have; "
                f"{known_names(name, rows)}"
            )
        is_array, values = rows[name].ndim > 1, len(np.unique(rows[name]))
        if is_array or values > _MOST_GROUPS:
            size = f"arrays {list(rows[name].shape[1:])}" if is_array else f"{values} values"
            raise InvalidValueError(
                f"figures are to be grouped by {name!r}, which has {size} in the held-out rows; it "
                f"must have one value in each row, and at most {_MOST_GROUPS} different values"
            )
    try:
        initial = evaluate(task, rows, device, task.parameters() | task.statistics())
    except Exception as error:
        inputs = (n for n in task.fields if n != task.targets and rows[n].dtype.kind in "iu")
        words = {name: torch.tensor(rows[name]) for name in inputs}
        why = f"{error}{about_words(error, words)}"
        raise ModelError(f"the model cannot be evaluated on the held-out rows: {why}") from error
    for name, reason in initial.failed.items():
        raise ModelError(f"figure {name!r} cannot be computed on the held-out rows: {reason}")
    figures = {n: v for n, v in initial.figures.items() if n.partition(": ")[0] in task.figures}
    for name, value in {"the mean loss": initial.loss, **figures}.items():
        label = f"figure {name!r}" if name in figures else name
        if not math.isfinite(value):
            raise ModelError(
                f"{label} of the {len(rows[task.targets])} held-out rows is {value} at the initial "
                "parameters; it must be finite, so leave out rows with NaN or infinite numbers, "
                "and give rows of all classes"
            )
    return initial.loss


@dataclass(frozen=True)
class _Partition:
    """A partition of held-out rows by the values of a field."""

    labels: npt.NDArray[np.generic]  # [P] value of the field in each part
    part_of: Tensor  # [n] number of the part of each row


class _Figures:
    """Computes figures of rows that arrive piece by piece: of all rows, and of each part of them.

    A figure that raises is recorded as failed, so the run keeps its model and other figures.
    """

    def __init__(
        self,
        figures: Mapping[str, Figure],
        partitions: Mapping[str, _Partition],
        classes: Sequence[str],
    ) -> None:
        self._partitions, self._classes = partitions, classes
        self._summed = {"loss": LOSS, "accuracy": ACCURACY}
        self._summed |= {n: figure for n, figure in figures.items() if isinstance(figure, Sums)}
        self._functions = {n: f for n, f in figures.items() if not isinstance(f, Sums)}
        self._totals = dict[str, Tensor]()  # [1, k] of all rows
        self._sums: dict[str, dict[str, Tensor]] = {n: {} for n in partitions}  # [P, k] of parts
        self._collected, self._failed = list[Collected](), dict[str, str]()

    def add(self, view: Seen, rows: Tensor) -> None:
        """Add rows [n] with these numbers."""
        if not are_classes(view):
            self._summed.pop("accuracy", None)
            self._totals.pop("accuracy", None)
        for name in [name for name in self._summed if name not in self._failed]:
            try:
                terms = self._summed[name].of_rows(view)
            except Exception as error:
                self._failed[name] = str(error)
                continue
            self._totals[name] = self._totals.get(name, 0.0) + terms.sum(0, keepdim=True)
            for field, part in self._partitions.items():
                zeros = terms.new_zeros((len(part.labels), terms.shape[1]))
                sums = self._sums[field].setdefault(name, zeros)
                sums.index_add_(0, part.part_of[rows].to(terms.device), terms)
        if self._functions:
            self._collected.append(Collected.of(view, rows))

    def evaluation(self) -> Evaluation:
        """Return figures of all rows, of groups of rows, and their spread over users."""
        whole = dict[str, float]()
        parts: dict[str, dict[str, npt.NDArray[np.float64]]] = {n: {} for n in self._partitions}
        for name, total in self._totals.items():
            finish = self._summed[name].finish
            whole[name] = float(finish(total))
            for field, sums in self._sums.items():
                parts[field][name] = finish(sums[name]).cpu().numpy()
        for name, function in self._functions.items():
            rows = Collected.joined(self._collected)
            try:
                values = rows.values(function, self._classes)
            except Exception as error:
                self._failed[name] = str(error)
                continue
            whole |= {f"{name}: {key}" if key else name: value for key, value in values.items()}
            for field, part in self._partitions.items() if "" in values else ():
                grouped = replace(rows, owners=part.part_of[rows.owners])
                parts[field][name] = grouped.by_user(function, len(part.labels))
        failed = dict.fromkeys(self._failed, math.nan)
        figures = {name: value for name, value in {**whole, **failed}.items() if name not in ALWAYS}
        user_figures = parts.pop(HELD_OUT_USER, {})
        for field, group_figures in parts.items():
            figures |= _by_group(field, self._partitions[field].labels, group_figures)
        spreads = {name: spread_over_users(values) for name, values in user_figures.items()}
        accuracy = whole.get("accuracy")
        return Evaluation(whole["loss"], accuracy, figures, spreads, self._failed)


def _by_group(
    field: str, labels: npt.NDArray[np.generic], values: Mapping[str, npt.NDArray[np.float64]]
) -> Iterator[tuple[str, float]]:
    """Yield finite figures of groups of rows, and their largest difference, by name."""
    for name, numbers in values.items():
        finite = np.isfinite(numbers)
        for label, value in zip(labels[finite], numbers[finite].tolist(), strict=True):
            yield f"{name} by {field}: {label}", value
        if finite.sum() > 1:
            yield f"{name} by {field}: gap", float(np.ptp(numbers[finite]))


def _pieces(
    rows: int, personal: Iterable[tuple[npt.NDArray[np.int64], Tensors]] | None
) -> Iterator[tuple[npt.NDArray[np.int64], Tensors]]:
    for positions, tensors in [(np.arange(rows), {})] if personal is None else personal:
        for start in range(0, len(positions), _ROWS):
            yield positions[start : start + _ROWS], tensors
