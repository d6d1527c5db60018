"""The kinds of metrics: how each is computed from a user's examples."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from fedpriv.engine.task import MetricFunction, Task
from fedpriv.errors import InvalidValueError, ModelError
from fedpriv.importing import import_function
from fedpriv.privacy.metrics import Metric

UPDATE_NORMS = "update-norms"
"""Kind that is computed from updates; all others are computed from examples."""


@dataclass(frozen=True)
class Evaluated:
    """Some examples at the parameters of the round.

    Attributes:
        task: model in evaluation mode, and loss.
        outputs: [n, …] of the model.
        targets: [n, …].
        moments: of each normalisation with running statistics, from `recorded_moments`.
    """

    task: Task
    outputs: torch.Tensor
    targets: torch.Tensor
    moments: Mapping[str, Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Kind:
    """How a metric is computed: a vector per example, summed over each user's, then finished.

    Attributes:
        of_examples: vectors of examples, [n, *shape].
        of_users: from the sums over a user's examples [C, *shape] and their numbers [C, 1, …], both
            float64, to the metric of each user [C, *shape].
    """

    of_examples: Callable[[Evaluated, Metric], torch.Tensor]
    of_users: Callable[[torch.Tensor, torch.Tensor, Metric], torch.Tensor]


def losses(seen: Evaluated, _metric: Metric) -> torch.Tensor:
    """Loss of each example: [n]."""
    return seen.task.losses_of(seen.outputs, seen.targets)


def mean(sums: torch.Tensor, sizes: torch.Tensor, _metric: Metric) -> torch.Tensor:
    """Mean over each user's examples."""
    return sums / sizes


def _hits(seen: Evaluated, metric: Metric) -> torch.Tensor:
    _check_classes(seen.targets, metric)
    if seen.outputs.dim() != seen.targets.dim() + 1:
        raise InvalidValueError(
            f"metric {metric.name!r} has outputs with {seen.outputs.dim()} axes for targets with "
            f"{seen.targets.dim()}; it needs one axis more, the scores of the classes"
        )
    hits = (seen.outputs.argmax(1) == seen.targets).double()
    return hits.reshape(len(hits), -1).mean(1)


def _ones(seen: Evaluated, _metric: Metric) -> torch.Tensor:
    return torch.ones(len(seen.targets), device=seen.targets.device)


def _classes(seen: Evaluated, metric: Metric) -> torch.Tensor:
    _check_classes(seen.targets, metric)
    targets = seen.targets.reshape(len(seen.targets), -1, 1)
    # Compared, not indexed: a target that is no class must not raise, least of all on a GPU.
    return (targets == torch.arange(metric.shape[0], device=targets.device)).double().sum(1)


def _check_classes(targets: torch.Tensor, metric: Metric) -> None:
    if targets.dtype.is_floating_point:
        raise InvalidValueError(
            f"metric {metric.name!r} has targets of {targets.dtype}; they must be classes, integers"
        )


def _moments(seen: Evaluated, metric: Metric) -> torch.Tensor:
    if not seen.moments:
        raise InvalidValueError(f"metric {metric.name!r} needs a model with batch normalisation")
    for layer, calls in seen.moments.items():
        if len(calls) != 1:
            raise InvalidValueError(
                f"metric {metric.name!r} needs layers that are called once in a forward pass; "
                f"{layer!r} is called {len(calls)} times"
            )
    return torch.cat([calls[0] for calls in seen.moments.values()], 1)


def _sum(sums: torch.Tensor, _sizes: torch.Tensor, _metric: Metric) -> torch.Tensor:
    return sums


def _within_ball(sums: torch.Tensor, sizes: torch.Tensor, metric: Metric) -> torch.Tensor:
    """Means within centre ± radius; what is not finite is at the upper end."""
    low, high = metric.centre - metric.radius, metric.centre + metric.radius
    return (sums / sizes).nan_to_num(nan=high, posinf=high, neginf=low).clamp(low, high)


def _capped(sums: torch.Tensor, _sizes: torch.Tensor, metric: Metric) -> torch.Tensor:
    return sums.clamp(max=metric.options[0])


BUILT_IN: Mapping[str, Kind] = {
    "loss": Kind(losses, _within_ball),
    "accuracy": Kind(_hits, mean),
    "examples": Kind(_ones, _capped),
    "label-counts": Kind(_classes, _sum),
    "batch-norm": Kind(_moments, mean),
}
"""Kinds that are computed from examples, by name."""


def own_kind(function: MetricFunction) -> Kind:
    """The kind of a function of outputs and targets, averaged over a user's examples."""
    return Kind(lambda seen, _metric: function(seen.outputs, seen.targets), mean)


def own_metrics(names: Iterable[str]) -> dict[str, MetricFunction]:
    """Import those metrics that are named "package.module:function", for `Task.metrics`.

    Raises:
        ModelError: a function cannot be imported.
    """
    found: dict[str, MetricFunction] = {}
    for name in names:
        module, separator, _ = name.partition(":")
        if separator and module != UPDATE_NORMS:
            imported = import_function(f"metric {name!r}", name, ModelError)
            found[name] = cast(MetricFunction, imported)
    return found
