"""Measuring the users of a chunk at the round's parameters, each example once.

The model is the same for all users, so their examples go through it side by side, a block of rows
at a time, however many examples a user has.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.func import functional_call

from fedpriv.data.store import UserStore
from fedpriv.engine.clipping import group_norms
from fedpriv.engine.metric_kinds import (
    BUILT_IN,
    UPDATE_NORMS,
    Evaluated,
    Kind,
    losses,
    mean,
    own_kind,
)
from fedpriv.engine.normalisation import recorded_moments
from fedpriv.engine.task import Task, TorchTensors
from fedpriv.engine.updates import Updates
from fedpriv.errors import InvalidValueError, known_names
from fedpriv.privacy.groups import VectorGroup
from fedpriv.privacy.metrics import Metric

Asked = Sequence[tuple[Kind, Metric]]


@dataclass(frozen=True)
class Examples:
    """All examples of the users of a chunk.

    Attributes:
        store: the users' data.
        users: [C] positions in the store, each of a user with at least one example.
        rows: how many examples are held at once.
        device: where to measure.
    """

    store: UserStore
    users: npt.NDArray[np.int64]
    rows: int
    device: torch.device

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Number of examples of each user: [C]."""
        return self.store.offsets[self.users + 1] - self.store.offsets[self.users]

    def blocks(self, task: Task) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Each example once: whose it is, as numbers [n] below C, inputs and targets [n, …]."""
        ends = np.cumsum(self.sizes)
        firsts = self.store.offsets[self.users] - (ends - self.sizes)
        for start in range(0, int(ends[-1]), self.rows):
            numbers = np.arange(start, min(start + self.rows, int(ends[-1])))
            lanes = np.searchsorted(ends, numbers, side="right")
            fields = self.store.take(firsts[lanes] + numbers)
            x, y = (
                torch.from_numpy(fields[name]).to(self.device)
                for name in (task.inputs, task.targets)
            )
            yield torch.from_numpy(lanes).to(self.device), x, y


def user_metrics(
    task: Task,
    tensors: Mapping[str, torch.Tensor],
    examples: Examples,
    metrics: Sequence[Metric],
    updates: Updates,
    groups: Sequence[VectorGroup],
) -> TorchTensors:
    """What users report beside their updates: name of tensor → value − centre, float32 [C, *shape].

    Args:
        task: the task, with its model in evaluation mode.
        tensors: parameters at the start of the round, frozen parameters and buffers.
        examples: of the users.
        metrics: those asked for.
        updates: of the users, before they are clipped.
        groups: vector groups of the round.
    """
    values: dict[str, torch.Tensor] = {}
    of_examples = [metric for metric in metrics if not _is_of_updates(metric)]
    asked = [(kind_of(task, metric), metric) for metric in of_examples]
    for metric, value in zip(of_examples, measure(task, tensors, examples, asked), strict=True):
        values[metric.tensor] = value
    for metric in metrics:
        if _is_of_updates(metric):
            values[metric.tensor] = _norms_within(metric, updates, groups)
    return {m.tensor: (values[m.tensor] - m.centre).float() for m in metrics}


@torch.no_grad()
def measure(
    task: Task, tensors: Mapping[str, torch.Tensor], examples: Examples, asked: Asked
) -> list[torch.Tensor]:
    """Metrics of each user, of kinds that are computed from examples: float64 [C, *shape] each."""
    count = len(examples.users)
    sums = [
        torch.zeros((count, *metric.shape), dtype=torch.float64, device=examples.device)
        for _, metric in asked
    ]
    if asked:
        for lanes, x, y in examples.blocks(task):
            values = values_of_examples(task, tensors, x, y, asked)
            for total, value in zip(sums, values, strict=True):
                # A sum by index, since a product with zero would spread NaN to other users.
                total.index_add_(0, lanes, value)
    sizes = torch.from_numpy(examples.sizes).to(examples.device, torch.float64)
    return [
        kind.of_users(total, sizes.view(-1, *[1] * len(metric.shape)), metric)
        for total, (kind, metric) in zip(sums, asked, strict=True)
    ]


def mean_losses(
    task: Task, tensors: Mapping[str, torch.Tensor], examples: Examples
) -> torch.Tensor:
    """Mean loss of each user's examples, whatever it is: float64 [C]."""
    (values,) = measure(task, tensors, examples, [(Kind(losses, mean), Metric("loss"))])
    return values


def values_of_examples(
    task: Task,
    tensors: Mapping[str, torch.Tensor],
    x: torch.Tensor,
    y: torch.Tensor,
    asked: Asked,
) -> list[torch.Tensor]:
    """Vectors of each example before they are summed: float64 [n, *shape] each.

    Raises:
        InvalidValueError: a vector has another shape than the metric says.
    """
    with recorded_moments(task.model) as moments:
        outputs = functional_call(task.model, dict(tensors), (x,))
    seen = Evaluated(task, outputs, y, moments)
    values = []
    for kind, metric in asked:
        value = kind.of_examples(seen, metric)
        if value.shape != (len(x), *metric.shape):
            raise InvalidValueError(
                f"metric {metric.name!r} gives shape {list(value.shape)} for {len(x)} examples; "
                f"it must be {[len(x), *metric.shape]}"
            )
        values.append(value.double())
    return values


def kind_of(task: Task, metric: Metric) -> Kind:
    """How a metric is computed from examples.

    Raises:
        InvalidValueError: neither the engine nor the task has such a metric.
    """
    if metric.name in BUILT_IN:
        return BUILT_IN[metric.name]
    if metric.name in task.metrics:
        return own_kind(task.metrics[metric.name])
    known = [*BUILT_IN, f"{UPDATE_NORMS}:GROUP", *task.metrics]
    raise InvalidValueError(f"unknown metric {metric.name!r}; {known_names(metric.name, known)}")


def measured_group(metric: Metric) -> str | None:
    """Name of the vector group whose norms a metric is of; None if it is of examples."""
    kind, separator, group = metric.name.partition(":")
    return group if separator and kind == UPDATE_NORMS else None


def _norms_within(metric: Metric, updates: Updates, groups: Sequence[VectorGroup]) -> torch.Tensor:
    """For each threshold 1 if the norm of a user's scaled part of a group is not above it."""
    (group,) = [group for group in groups if group.name == measured_group(metric)]
    (norms,) = group_norms(updates, [group]).values()
    thresholds = torch.tensor(metric.options, dtype=torch.float64, device=norms.device)
    return (norms[:, None] <= thresholds).double()


def _is_of_updates(metric: Metric) -> bool:
    return measured_group(metric) is not None
