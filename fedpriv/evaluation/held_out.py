"""How good a model is on held-out rows: loss, accuracy and the task's figures."""

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

_ROWS = 500  # that are evaluated at once; outputs of more would leave the caches


@dataclass(frozen=True)
class Evaluation:
    """A model on held-out rows; figures that could not be computed are NaN."""

    loss: float  # mean over targets that count
    accuracy: float | None  # in [0, 1]; None unless targets are classes
    figures: Mapping[str, float]  # those of the task, by name
    # Where rows have a `HELD_OUT_USER`: `spread_over_users` of each figure, loss and accuracy too.
    held_out_users: Mapping[str, Mapping[str, float]]
    failed: Mapping[str, str]  # by figure, why it could not be computed


@torch.no_grad()
def evaluate(
    task: Task,
    rows: HeldOut,
    device: torch.device,
    parameters: Tensors,
    personal: Iterable[tuple[npt.NDArray[np.int64], Tensors]] | None = None,
) -> Evaluation:
    """Loss, accuracy and the task's figures of a model without dropout, over all held-out rows.

    Or over the rows [k] that `personal` names, with tensors of their user in the model's place.
    What a model draws in evaluation too is the same each time.
    """
    tensors = {name: tensor.clone() for name, tensor in task.constants(device).items()}
    tensors |= {name: torch.tensor(p, device=device) for name, p in parameters.items()}
    users, owners = np.empty(1), np.zeros(len(rows[task.targets]), np.int64)
    if HELD_OUT_USER in rows:
        users, owners = np.unique(rows[HELD_OUT_USER], return_inverse=True)
    measured = _Measured(cast(Mapping[str, Figure], task.figures), len(users))
    with _evaluating(task.model), seeded(bytes(32), 0, device):
        tensors = _channels_last(task, tensors, rows, device)
        for piece, replaced in _pieces(len(owners), personal):
            columns = {n: torch.tensor(rows[n][piece], device=device) for n in task.fields}
            x, y = task.given(columns)
            put_in = tensors | {n: torch.tensor(p, device=device) for n, p in replaced.items()}
            seen = task.seen(called(task.model, put_in, x), y)
            measured.add(seen, torch.tensor(owners[piece], device=device))
    return measured.evaluation(of_users=HELD_OUT_USER in rows)


def check_held_out(task: Task, rows: HeldOut, device: torch.device) -> None:
    """Refuse a task that cannot be evaluated on all held-out rows.

    At its initial parameters, its mean loss and all figures must be finite.
    """
    try:
        found = evaluate(task, rows, device, task.parameters() | task.statistics())
    except Exception as error:
        raise ModelError(f"the model cannot be evaluated on the held-out rows: {error}") from error
    for name, reason in found.failed.items():
        raise ModelError(f"figure {name!r} cannot be computed on the held-out rows: {reason}")
    for name, value in {"the mean loss": found.loss, **found.figures}.items():
        what = f"figure {name!r}" if name in found.figures else name
        if not math.isfinite(value):
            raise ModelError(
                f"{what} of the {len(rows[task.targets])} held-out rows is {value} at the initial "
                "parameters; it must be finite, so leave out rows with NaN or infinite numbers"
            )


class _Measured:
    """Figures of rows that are seen piece by piece, of all and of each of some users.

    A figure that raises costs nothing else: a run must not lose what it has spent.
    """

    def __init__(self, figures: Mapping[str, Figure], users: int) -> None:
        self._figures, self._users = figures, users
        self._summed = {"loss": LOSS, "accuracy": ACCURACY}
        self._summed |= {name: each for name, each in figures.items() if isinstance(each, Sums)}
        self._functions = {n: each for n, each in figures.items() if not isinstance(each, Sums)}
        self._sums, self._parts = dict[str, Tensor](), list[Collected]()
        self._failed: dict[str, str] = {}

    def add(self, seen: Seen, owners: Tensor) -> None:
        """Take in rows and the number of each one's user."""
        if not are_classes(seen):
            self._summed.pop("accuracy", None)
            self._sums.pop("accuracy", None)
        for name in [name for name in self._summed if name not in self._failed]:
            try:
                found = self._summed[name].of_rows(seen)
            except Exception as error:
                self._failed[name] = str(error)
                continue
            into = self._sums.setdefault(name, found.new_zeros((self._users, found.shape[1])))
            _ = into.index_add_(0, owners, found) if len(into) > 1 else into.add_(found.sum(0))
        if self._functions:
            self._parts.append(Collected.of(seen, owners))

    def evaluation(self, *, of_users: bool) -> Evaluation:
        """The figures of all rows, and how they differ among users."""
        values, by_user = dict[str, float](), dict[str, npt.NDArray[np.float64]]()
        for name, total in self._sums.items():
            values[name] = float(self._summed[name].finish(total.sum(0, keepdim=True)))
            by_user[name] = self._summed[name].finish(total).cpu().numpy()
        collected = [Collected.joined(self._parts)] if self._functions else []
        for name, function in self._functions.items():
            try:
                values[name] = collected[0].value(function)
            except Exception as error:
                self._failed[name] = str(error)
                continue
            if of_users:
                by_user[name] = collected[0].by_user(function, self._users)
        known = {n: math.nan if n in self._failed else values[n] for n in self._figures}
        told = {n: each for n, each in by_user.items() if of_users and n not in self._failed}
        spreads = {name: spread_over_users(each) for name, each in told.items()}
        accuracy = values.get("accuracy")
        return Evaluation(values["loss"], accuracy, known, spreads, self._failed)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and each part of it back into its own mode."""
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
    for some, own in [(np.arange(rows), {})] if personal is None else personal:
        for start in range(0, len(some), _ROWS):
            yield some[start : start + _ROWS], own


def _channels_last(
    task: Task, tensors: TorchTensors, rows: HeldOut, device: torch.device
) -> TorchTensors:
    """The tensors, with weights of convolutions channels last: a CPU pools their outputs faster.

    They stay as they are where the model then fails, as it may on a view, or gives something else.
    """
    weights = {name: t for name, t in tensors.items() if t.dim() == 4}
    if device.type != "cpu" or not weights:
        return tensors
    last = {n: t.clone(memory_format=torch.channels_last) for n, t in weights.items()}
    with suppress(Exception):
        x, _ = task.given({name: torch.tensor(rows[name][:1]) for name in task.fields})
        two = each_input(lambda t: torch.cat([t, t]), x)  # of one alone, more views can be taken
        found, expected = (called(task.model, tensors | each, two) for each in (last, {}))
        if torch.allclose(found, expected, 1e-4, 1e-5, equal_nan=True):
            return tensors | last
    return tensors
