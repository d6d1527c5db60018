"""Measuring the users of a chunk at the round's parameters, each example that counts once.

The model is the same for all users, so their examples go through it side by side, a block of each
user's at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call

from fedpriv.engine.batches import Examples
from fedpriv.engine.clipping import group_norms
from fedpriv.engine.descent import same_for_all
from fedpriv.engine.layers import Layers
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
from fedpriv.engine.start import Start
from fedpriv.engine.task import Task, TorchTensors
from fedpriv.engine.updates import Updates
from fedpriv.errors import InvalidValueError, known_names
from fedpriv.privacy.groups import VectorGroup
from fedpriv.privacy.metrics import Metric

Asked = Sequence[tuple[Kind, Metric]]


@dataclass(frozen=True)
class Measuring:
    """The model of a round, ready to be evaluated.

    Attributes:
        task: with its model in evaluation mode.
        model: what computes the outputs; its normalisations are listened to.
        outputs: from inputs [L·W, …] of so many lanes.
    """

    task: Task
    model: nn.Module
    outputs: Callable[[torch.Tensor, int], torch.Tensor]

    @classmethod
    def of(cls, task: Task, tensors: Mapping[str, torch.Tensor]) -> "Measuring":
        """By the model itself, with other tensors in place."""
        return cls(
            task, task.model, lambda x, _lanes: functional_call(task.model, dict(tensors), (x,))
        )

    @classmethod
    def in_layers(cls, task: Task, layers: Layers, start: Start) -> "Measuring":
        """In layers, whose products give a lane the same whatever the number of lanes is."""
        side_by_side = layers.side_by_side()

        def outputs(x: torch.Tensor, lanes: int) -> torch.Tensor:
            own = same_for_all(start.parameters, lanes)
            with side_by_side.corrected({}):
                return side_by_side.outputs(own, start.constants, x, "float32", x.device)

        return cls(task, side_by_side.model, outputs)


def user_metrics(
    measuring: Measuring,
    examples: Examples,
    metrics: Sequence[Metric],
    updates: Updates,
    groups: Sequence[VectorGroup],
) -> TorchTensors:
    """What users report beside their updates: name of tensor → value − centre, float32 [L, *shape].

    Args:
        measuring: the model at the start of the round.
        examples: of the chunk.
        metrics: those asked for.
        updates: of the users, before they are clipped.
        groups: vector groups of the round.
    """
    values: dict[str, torch.Tensor] = {}
    of_examples = [metric for metric in metrics if not _is_of_updates(metric)]
    asked = [(kind_of(measuring.task, metric), metric) for metric in of_examples]
    for metric, value in zip(of_examples, measure(measuring, examples, asked), strict=True):
        values[metric.tensor] = value
    for metric in metrics:
        if _is_of_updates(metric):
            values[metric.tensor] = _norms_within(metric, updates, groups)
    return {m.tensor: (values[m.tensor] - m.centre).float() for m in metrics}


@torch.no_grad()
def measure(measuring: Measuring, examples: Examples, asked: Asked) -> list[torch.Tensor]:
    """Metrics of each lane, of kinds that are computed from examples: float64 [L, *shape] each."""
    if not asked:
        return []
    lanes = examples.lanes
    sums = [
        torch.zeros((lanes, *metric.shape), dtype=torch.float64, device=examples.device)
        for _, metric in asked
    ]
    for block in examples.blocks():
        values = values_of_examples(measuring, block.x, block.y, asked, lanes)
        for total, value in zip(sums, values, strict=True):
            each = value.view(lanes, -1, *value.shape[1:])
            real = block.real.view(*block.real.shape, *[1] * (each.dim() - 2))
            # Not a product with zero, which would keep NaN.
            total.add_(torch.where(real, each, 0.0).sum(1))
    sizes = examples.sizes()
    return [
        kind.of_users(total, sizes.view(-1, *[1] * len(metric.shape)), metric)
        for total, (kind, metric) in zip(sums, asked, strict=True)
    ]


def mean_losses(measuring: Measuring, examples: Examples) -> torch.Tensor:
    """Mean loss of each lane's examples, whatever it is: float64 [L]."""
    (values,) = measure(measuring, examples, [(Kind(losses, mean), Metric("loss"))])
    return values


def values_of_examples(
    measuring: Measuring, x: torch.Tensor, y: torch.Tensor, asked: Asked, lanes: int = 1
) -> list[torch.Tensor]:
    """Vectors of each example before they are summed: float64 [n, *shape] each.

    Raises:
        InvalidValueError: a vector has another shape than the metric says.
    """
    with recorded_moments(measuring.model) as moments:
        outputs = measuring.outputs(x, lanes)
    seen = Evaluated(measuring.task, outputs, y, moments)
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
