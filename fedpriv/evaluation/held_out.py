"""Evaluation on held-out rows: loss, accuracy and the task's figures."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedpriv.data.population import HELD_OUT_USER
from fedpriv.engine.arithmetic import seeded
from fedpriv.engine.task import HeldOut, Task, called, each_input
from fedpriv.errors import ModelError
from fedpriv.measures.figures import (
    ACCURACY,
    LOSS,
    Collected,
    Figure,
    Seen,
    Sums,
    are_classes,
    spread_over_users,
)
from fedpriv.privacy.clipping_torch import TorchTensors
from fedpriv.privacy.layout import Tensors

_ROWS = 500  # evaluated at once; the outputs of more rows would not fit into the caches


@dataclass(frozen=True)
class Evaluation:
    """Measures of a model on held-out rows; figures that could not be computed are NaN."""

    loss: float  # mean over targets that count
    accuracy: float | None  # in [0, 1]; None unless targets are classes
    figures: Mapping[str, float]  # the task's, by name
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
) -> Evaluation:
    """Return loss, accuracy and the task's figures of a model in evaluation mode.

    They are of all held-out rows, or of the rows that `personal` gives: positions [k] and the
    tensors of their user, which replace those of the model. Random numbers that a model draws in
    evaluation are the same each time.
    """
    tensors = {name: tensor.clone() for name, tensor in task.constants(device).items()}
    tensors |= {name: torch.tensor(p, device=device) for name, p in parameters.items()}
    users, owners = np.empty(1), np.zeros(len(rows[task.targets]), np.int64)
    if HELD_OUT_USER in rows:
        users, owners = np.unique(rows[HELD_OUT_USER], return_inverse=True)
    accumulator = _Accumulator(cast(Mapping[str, Figure], task.figures), len(users))
    with _evaluating(task.model), seeded(bytes(32), 0, device):
        tensors = _channels_last(task, tensors, rows, device)
        for piece, personal_tensors in _pieces(len(owners), personal):
            columns = {n: torch.tensor(rows[n][piece], device=device) for n in task.fields}
            x, y = task.given(columns)
            replacements = {n: torch.tensor(t, device=device) for n, t in personal_tensors.items()}
            seen = task.seen(called(task.model, tensors | replacements, x), y)
            accumulator.add(seen, torch.tensor(owners[piece], device=device))
    return accumulator.evaluation(of_users=HELD_OUT_USER in rows)


def check_held_out(task: Task, rows: HeldOut, device: torch.device) -> None:
    """Raise ModelError if a task cannot be evaluated on all held-out rows.

    At its initial parameters, its mean loss and all figures must be finite.
    """
    try:
        initial = evaluate(task, rows, device, task.parameters() | task.statistics())
    except Exception as error:
        raise ModelError(f"the model cannot be evaluated on the held-out rows: {error}") from error
    for name, reason in initial.failed.items():
        raise ModelError(f"figure {name!r} cannot be computed on the held-out rows: {reason}")
    for name, value in {"the mean loss": initial.loss, **initial.figures}.items():
        what = f"figure {name!r}" if name in initial.figures else name
        if not math.isfinite(value):
            raise ModelError(
                f"{what} of the {len(rows[task.targets])} held-out rows is {value} at the initial "
                "parameters; it must be finite, so leave out rows with NaN or infinite numbers"
            )


class _Accumulator:
    """Computes figures of rows that arrive piece by piece, over all rows and for each user.

    A figure that raises is recorded as failed, so that the run keeps its model and other figures.
    """

    def __init__(self, figures: Mapping[str, Figure], users: int) -> None:
        self._figures, self._users = figures, users
        self._summed = {"loss": LOSS, "accuracy": ACCURACY}
        self._summed |= {n: figure for n, figure in figures.items() if isinstance(figure, Sums)}
        self._functions = {n: f for n, f in figures.items() if not isinstance(f, Sums)}
        self._sums, self._parts = dict[str, Tensor](), list[Collected]()
        self._failed: dict[str, str] = {}

    def add(self, seen: Seen, owners: Tensor) -> None:
        """Add rows [n] and the numbers of their users, [n]."""
        if not are_classes(seen):
            self._summed.pop("accuracy", None)
            self._sums.pop("accuracy", None)
        for name in [name for name in self._summed if name not in self._failed]:
            try:
                terms = self._summed[name].of_rows(seen)
            except Exception as error:
                self._failed[name] = str(error)
                continue
            sums = self._sums.setdefault(name, terms.new_zeros((self._users, terms.shape[1])))
            _ = sums.index_add_(0, owners, terms) if len(sums) > 1 else sums.add_(terms.sum(0))
        if self._functions:
            self._parts.append(Collected.of(seen, owners))

    def evaluation(self, *, of_users: bool) -> Evaluation:
        """Return figures of all rows and, if asked, their spread over users."""
        values, by_user = dict[str, float](), dict[str, npt.NDArray[np.float64]]()
        for name, sums in self._sums.items():
            values[name] = float(self._summed[name].finish(sums.sum(0, keepdim=True)))
            by_user[name] = self._summed[name].finish(sums).cpu().numpy()
        for name, function in self._functions.items():
            rows = Collected.joined(self._parts)
            try:
                values[name] = rows.value(function)
            except Exception as error:
                self._failed[name] = str(error)
                continue
            if of_users:
                by_user[name] = rows.by_user(function, self._users)
        figures = {n: math.nan if n in self._failed else values[n] for n in self._figures}
        spreads = {
            name: spread_over_users(figure)
            for name, figure in by_user.items()
            if of_users and name not in self._failed
        }
        accuracy = values.get("accuracy")
        return Evaluation(values["loss"], accuracy, figures, spreads, self._failed)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; afterwards each module gets its former mode back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _pieces(
    rows: int, personal: Iterable[tuple[npt.NDArray[np.int64], Tensors]] | None
) -> Iterator[tuple[npt.NDArray[np.int64], Tensors]]:
    for positions, tensors in [(np.arange(rows), {})] if personal is None else personal:
        for start in range(0, len(positions), _ROWS):
            yield positions[start : start + _ROWS], tensors


def _channels_last(
    task: Task, tensors: TorchTensors, rows: HeldOut, device: torch.device
) -> TorchTensors:
    """Return the tensors, with weights of convolutions channels last: a CPU pools outputs faster.

    They are returned unchanged if the model fails with them, as it may on a view, or if its outputs
    differ.
    """
    weights = {name: t for name, t in tensors.items() if t.dim() == 4}
    if device.type != "cpu" or not weights:
        return tensors
    last = {n: t.clone(memory_format=torch.channels_last) for n, t in weights.items()}
    with suppress(Exception):
        x, _ = task.given({name: torch.tensor(rows[name][:1]) for name in task.fields})
        two = each_input(lambda t: torch.cat([t, t]), x)  # views may succeed on a batch of one only
        actual, expected = (called(task.model, tensors | t, two) for t in (last, {}))
        if torch.allclose(actual, expected, 1e-4, 1e-5, equal_nan=True):
            return tensors | last
    return tensors
