"""Metrics that users report next to updates: names, bounds, and computation from users' rows."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from fedpriv.errors import InvalidValueError, ModelError, known_names
from fedpriv.measures.figures import Seen, Sums, hits, losses, per_row
from fedpriv.privacy.gaussian_mechanism import Metric
from fedpriv.support.checks import check_range, plain_numbers, require
from fedpriv.support.importing import check_options, import_function

MetricFunction = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs and targets [n, …] to one vector for each example, [n, *shape]."""

_UPDATE_NORMS = "update-norms"
_UPWARD = 1.0 + 2.0**-50  # covers the rounding of a root, for radii that vectors can reach


def metric(name: str, **numbers: float | Sequence[float]) -> Metric:
    """Return a metric with bounds that follow from a few numbers.

    | name               | a user's vector, and the numbers that bound it                       |
    | ------------------ | -------------------------------------------------------------------- |
    | loss               | mean loss, at most `bound`, which also stands for NaN and infinity   |
    | accuracy           | share of its examples, and positions in them, classified correctly   |
    | examples           | number of its examples, at most `cap`                                |
    | label-counts       | examples of each of `classes`; `bound` on the L2 norm                |
    | update-norms:GROUP | for each of `thresholds`, 1 if the group's norm before clipping is   |
    |                    | not above it, else 0                                                 |
    | batch-norm         | distances of normalised inputs from their running statistics;        |
    |                    | `channels` of all layers together; `bound` on the L2 norm            |
    | module:function    | mean over its examples of a function of outputs and targets;         |
    |                    | `radius`, and `shape` (a number) and `centre` (zero) if they differ  |

    InvalidValueError if the name is unknown, or a number is unknown, absent or out of range.

    >>> metric("loss", bound=5.0)
    Metric(name='loss', shape=(), centre=2.5, radius=2.5, options=())
    """
    numbers = plain_numbers(numbers)
    make = partial(_own_metric if _is_own(name) else _factory(name), name)
    check_options(f"metric {name!r}", make, numbers, InvalidValueError)
    for number, value in numbers.items():
        _check_number(name, number, value)
    return make(**numbers)


def own_metrics(names: Iterable[str]) -> dict[str, MetricFunction]:
    """Import and return metrics named "package.module:function", by name, for `Task.metrics`."""
    return {
        name: cast(MetricFunction, import_function(f"metric {name!r}", name, ModelError))
        for name in names
        if _is_own(name)
    }


def _is_own(name: str) -> bool:
    kind, separator, function = name.partition(":")
    return kind != _UPDATE_NORMS and bool(separator and function)


def _check_number(name: str, number: str, value: object) -> None:
    is_list = number in ("shape", "thresholds")
    if is_list and not isinstance(value, list | tuple):
        raise InvalidValueError(f"{number} of metric {name!r} is {value!r}; it must be a list")
    is_whole = number in ("channels", "classes", "shape")
    legal = "whole" if is_whole else "(-inf, inf)" if number == "centre" else "(0, inf)"
    for element in cast(Sequence[float], value) if is_list else [value]:
        check_range(f"{number} of metric {name!r}", element, legal)


def _from_zero(name: str, bound: float) -> Metric:
    return Metric(name, centre=bound / 2.0, radius=bound / 2.0)


def _norm_indicators(name: str, thresholds: Sequence[float]) -> Metric:
    require(bool(thresholds), f"metric {name!r} has no thresholds; there must be at least one")
    radius = math.sqrt(len(thresholds)) / 2.0 * _UPWARD
    return Metric(name, (len(thresholds),), 0.5, radius, tuple(map(float, thresholds)))


def _own_metric(name: str, radius: float, centre: float = 0.0, shape: Sequence[int] = ()) -> Metric:
    return Metric(name, tuple(shape), centre, float(radius))


def group_of(name: str) -> str:
    """Return the vector group whose update norms a metric measures; "" for metrics of examples."""
    kind, _, group = name.partition(":")
    return group if kind == _UPDATE_NORMS else ""


def sums_of(metric: Metric, task_metrics: Mapping[str, MetricFunction]) -> Sums | None:
    """Return how to compute a metric, [U, *shape], from users' rows; None if it measures updates.

    `task_metrics` are the task's own metrics by name. InvalidValueError if the name is unknown.
    """
    name = metric.name
    if group_of(name):
        return None
    if name in _OF_EXAMPLES:
        limit = "the task's own metric of that name must have another"
        require(name not in task_metrics, f"metric {name!r} is built in; {limit}")
        return _OF_EXAMPLES[name][1](metric)
    if name in task_metrics:
        return _of_function(task_metrics[name], metric)
    hint = known_names(name, [*_OF_EXAMPLES, f"{_UPDATE_NORMS}:GROUP", *task_metrics])
    raise InvalidValueError(f"unknown metric {name!r}; {hint}")


def _factory(name: str) -> Callable[..., Metric]:
    """Return the function that makes a metric from its name and numbers."""
    if group_of(name):
        return _norm_indicators
    if name in _OF_EXAMPLES:
        return _OF_EXAMPLES[name][0]
    hint = known_names(name, [*_OF_EXAMPLES, f"{_UPDATE_NORMS}:GROUP", "module:function"])
    raise InvalidValueError(f"unknown metric {name!r}; {hint}")


def _in_ball(of_rows: Callable[[Seen], Tensor]) -> Callable[[Metric], Sums]:
    """Return sums for a mean within centre ± radius; NaN and ∞ become the upper end.

    A user without targets has a mean of NaN, and contributes nothing.
    """

    def sums(metric: Metric) -> Sums:
        low, high = metric.centre - metric.radius, metric.centre + metric.radius

        def finish(sums: Tensor) -> Tensor:
            total, size = sums.unbind(1)
            means = (total / size).nan_to_num(nan=high, posinf=high, neginf=low).clamp(low, high)
            return torch.where(size > 0.0, means, math.nan)

        return Sums(of_rows, finish)

    return sums


def _examples(metric: Metric) -> Sums:
    message = f"metric 'examples' has options {metric.options}; it must have one, the cap"
    require(len(metric.options) == 1, message)

    def ones(view: Seen) -> Tensor:
        return torch.ones((len(view.targets), 1), dtype=torch.float64, device=view.targets.device)

    return Sums(ones, lambda sums: sums[:, 0].clamp(max=metric.options[0]))


def _label_counts(metric: Metric) -> Sums:
    def classes(view: Seen) -> Tensor:
        if view.targets.dtype.is_floating_point:
            raise InvalidValueError(
                f"metric 'label-counts' has targets of {view.targets.dtype}; they must be classes, "
                "as integers"
            )
        targets = view.targets.reshape(len(view.targets), -1, 1)
        # A comparison ignores a target that is not a class; as an index it would raise, and on a
        # GPU end the process.
        is_class = targets == torch.arange(metric.shape[0], device=targets.device)
        return (is_class & view.counts.view_as(targets)).double().sum(1)

    return Sums(classes, lambda sums: sums)


def _batch_norm(metric: Metric) -> Sums:
    def moments(view: Seen) -> Tensor:
        message = "metric 'batch-norm' needs a model with batch normalisation"
        require(bool(view.moments), message)
        for layer, calls in view.moments.items():
            if len(calls) != 1:
                raise InvalidValueError(
                    f"metric 'batch-norm' needs layers that are called once in a forward pass; "
                    f"{layer!r} is called {len(calls)} times"
                )
        return torch.cat([calls[0] for calls in view.moments.values()], 1)

    return _mean_over(moments, metric)


def _of_function(function: MetricFunction, metric: Metric) -> Sums:
    """Return sums for a task's own metric: its mean over examples with a target that counts."""

    def values(view: Seen) -> Tensor:
        return function(view.outputs, view.targets)

    return _mean_over(values, metric, lambda view: view.counts.reshape(len(view.counts), -1).any(1))


def _mean_over(
    vectors: Callable[[Seen], Tensor],
    metric: Metric,
    weigh: Callable[[Seen], Tensor] = lambda view: torch.ones_like(view.losses, dtype=torch.bool),
) -> Sums:
    """Return sums for the mean of vectors [n, *shape] over the rows that `weigh` counts."""

    def of_rows(view: Seen) -> Tensor:
        values, expected = vectors(view), (len(view.targets), *metric.shape)
        if values.shape != expected:
            raise InvalidValueError(
                f"metric {metric.name!r} gives shape {list(values.shape)} for {expected[0]} "
                f"examples; it must be {list(expected)}"
            )
        return per_row(values.reshape(len(values), -1), weigh(view))

    def finish(sums: Tensor) -> Tensor:
        return (sums[:, :-1] / sums[:, -1:]).reshape(-1, *metric.shape)

    return Sums(of_rows, finish)


_OF_EXAMPLES: Mapping[str, tuple[Callable[..., Metric], Callable[[Metric], Sums]]] = {
    "loss": (_from_zero, _in_ball(losses)),
    "accuracy": (lambda name: _from_zero(name, 1.0), _in_ball(hits)),
    "examples": (
        lambda name, cap: replace(_from_zero(name, cap), options=(float(cap),)),
        _examples,
    ),
    "label-counts": (
        lambda name, classes, bound: Metric(name, (classes,), radius=float(bound)),
        _label_counts,
    ),
    "batch-norm": (
        lambda name, channels, bound: Metric(name, (2 * channels,), radius=float(bound)),
        _batch_norm,
    ),
}
"""Functions from names and numbers to metrics of examples, and from metrics to sums."""
