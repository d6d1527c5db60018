"""Metrics that users report beside their updates, and what only a simulation may know.

All metrics are measured at the round's initial parameters, in evaluation mode, on all of a user's
examples that count, `max_examples` of them at most, however often it trains on each; loss, accuracy
and own metrics on those of its targets that the task does not ignore. A user without examples
contributes nothing, and so does one for whom a metric raises or is not finite; it then does not
contribute an update either.

`SimulationOnlyDiagnostics` are true figures, which are not private: they never enter a partial sum.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from types import UnionType
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedpriv.engine.figures import are_right
from fedpriv.engine.layers import BatchedModel
from fedpriv.engine.local_training import Examples, same_for_all
from fedpriv.engine.task import (
    Inputs,
    MetricFunction,
    RoundParameters,
    RunningNorm,
    Task,
    called,
    each_input,
    generator_apart,
    running_norms,
)
from fedpriv.errors import (
    FedprivError,
    InvalidValueError,
    ModelError,
    known_names,
    plain_numbers,
)
from fedpriv.importing import check_options, import_function
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.clipping_torch import TorchTensors, Updates, rows_of
from fedpriv.privacy.gaussian_mechanism import CONTRIBUTORS, METRIC_PREFIX, Metric
from fedpriv.privacy.layout import Layout, VectorGroup, layers, per_layer
from fedpriv.privacy.round import RoundRequest

_UPDATE_NORMS = "update-norms"
_ROWS = 2_000  # of one user that are measured at once
_UPWARD = 1.0 + 2.0**-50  # on radii that are met exactly, for the rounding of the root
_ROUNDING = 1.0 + 2.0**-20  # of float32: a metric at its bound is not clipped


def metric(name: str, **numbers: float | Sequence[float]) -> Metric:
    """A metric with the bounds that follow from a few numbers.

    | name               | a user's vector, and the numbers that bound it                       |
    | ------------------ | -------------------------------------------------------------------- |
    | loss               | mean loss, at most `bound`, which also stands for NaN and infinity   |
    | accuracy           | share of its examples, and positions in them, of the right class     |
    | examples           | number of its examples, at most `cap`                                |
    | label-counts       | examples of each of `classes`; `bound` on the L2 norm                |
    | update-norms:GROUP | per one of `thresholds`, 1 if the group's norm before clipping is    |
    |                    | not above it, else 0                                                 |
    | batch-norm         | how far inputs of normalisations are from their running statistics;  |
    |                    | `channels` of all layers together; `bound` on the L2 norm            |
    | module:function    | mean over its examples of a function of outputs and targets;         |
    |                    | `radius`, and `shape` (a number) and `centre` (zero) if they differ  |

    An unknown name, or a number that is unknown, absent or out of range is an `InvalidValueError`.

    >>> metric("loss", bound=5.0)
    Metric(name='loss', shape=(), centre=2.5, radius=2.5, options=())
    """
    numbers = plain_numbers(numbers)
    kind = _OWN if _is_own(name) else _kind_of(name, {}, "module:function")
    made = partial(kind.make, name)
    check_options(f"metric {name!r}", made, numbers, InvalidValueError, noun="number")
    for number, value in numbers.items():
        _check_number(name, number, value)
    return made(**numbers)


def own_metrics(names: Iterable[str]) -> dict[str, MetricFunction]:
    """Import those metrics that are named "package.module:function", for `Task.metrics`."""
    return {
        name: cast(MetricFunction, import_function(f"metric {name!r}", name, ModelError))
        for name in names
        if _is_own(name)
    }


def _is_own(name: str) -> bool:
    kind, separator, function = name.partition(":")
    return kind != _UPDATE_NORMS and bool(separator and function)


def _check_number(name: str, number: str, value: object) -> None:
    several = number in ("shape", "thresholds")
    if several and not isinstance(value, list | tuple):
        raise InvalidValueError(f"{number} of metric {name!r} is {value!r}; it must be a list")
    kind: type | UnionType = int | float
    least, form = math.ulp(0.0), "a positive number"
    if number in ("channels", "classes", "shape"):
        kind, least, form = int, 1, "a whole number of at least 1"
    elif number == "centre":
        least, form = -sys.float_info.max, "a number"
    for each in cast(Sequence[float], value) if several else [cast(float, value)]:
        if not isinstance(each, kind) or not least <= each < math.inf:
            must = "each must" if several else "it must"
            raise InvalidValueError(f"{number} of metric {name!r} is {value!r}; {must} be {form}")


def _from_zero(name: str, bound: float) -> Metric:
    return Metric(name, centre=bound / 2.0, radius=bound / 2.0)


def _norm_indicators(name: str, thresholds: Sequence[float]) -> Metric:
    if not thresholds:
        raise InvalidValueError(f"metric {name!r} has no thresholds; there must be at least one")
    radius = math.sqrt(len(thresholds)) / 2.0 * _UPWARD
    return Metric(name, (len(thresholds),), 0.5, radius, tuple(map(float, thresholds)))


def _own_metric(name: str, radius: float, centre: float = 0.0, shape: Sequence[int] = ()) -> Metric:
    return Metric(name, tuple(shape), centre, float(radius))


class _Seen(NamedTuple):
    """Examples at the round's parameters."""

    task: Task
    outputs: Tensor  # [n, …]
    moments: Mapping[str, Sequence[Tensor]]  # of each running norm, one for each call
    targets: Tensor  # [n, …]


def _hits(seen: _Seen, metric: Metric) -> Tensor:
    _check_classes(seen.targets, metric)
    if seen.outputs.dim() != seen.targets.dim() + 1:
        raise InvalidValueError(
            f"metric {metric.name!r} has outputs with {seen.outputs.dim()} axes for targets with "
            f"{seen.targets.dim()}; it needs one axis more, the scores of the classes"
        )
    hits = are_right(seen.outputs, seen.targets) & _counts(seen)
    return hits.double().reshape(len(hits), -1).mean(1)


def _classes(seen: _Seen, metric: Metric) -> Tensor:
    _check_classes(seen.targets, metric)
    targets = seen.targets.reshape(len(seen.targets), -1, 1)
    # Compared, not indexed: a target that is not a class must not raise, least of all on a GPU.
    found = targets == torch.arange(metric.shape[0], device=targets.device)
    return (found & _counts(seen).view_as(targets)).double().sum(1)


def _counts(seen: _Seen) -> Tensor:
    counts = seen.task.counts(seen.targets)
    return torch.ones_like(seen.targets, dtype=torch.bool) if counts is None else counts


def _check_classes(targets: Tensor, metric: Metric) -> None:
    if targets.dtype.is_floating_point:
        raise InvalidValueError(
            f"metric {metric.name!r} has targets of {targets.dtype}; they must be classes, integers"
        )


def _moments(seen: _Seen, metric: Metric) -> Tensor:
    if not seen.moments:
        raise InvalidValueError(f"metric {metric.name!r} needs a model with batch normalisation")
    for layer, calls in seen.moments.items():
        if len(calls) != 1:
            raise InvalidValueError(
                f"metric {metric.name!r} needs layers that are called once in a forward pass; "
                f"{layer!r} is called {len(calls)} times"
            )
    return torch.cat([calls[0] for calls in seen.moments.values()], 1)


def _mean_in_ball(sums: Tensor, sizes: Tensor, metric: Metric) -> Tensor:
    """Means within centre ± radius; what is not finite is at the upper end.

    Without targets there is no mean but NaN, and such a user contributes nothing.
    """
    low, high = metric.centre - metric.radius, metric.centre + metric.radius
    means = (sums / sizes).nan_to_num(nan=high, posinf=high, neginf=low).clamp(low, high)
    return torch.where(sizes > 0.0, means, math.nan)


@dataclass(frozen=True)
class _Kind:
    """How a metric is made, and computed: per example, summed over a user's, then finished."""

    make: Callable[..., Metric]  # from its name and the numbers that `metric` takes
    # Vectors of examples, [n, *shape]; None: the metric is of updates.
    of_examples: Callable[[_Seen, Metric], Tensor] | None
    # From sums over a user's examples [C, *shape] and of their weights [C, 1, …], both float64.
    of_users: Callable[[Tensor, Tensor, Metric], Tensor] = lambda sums, sizes, _: sums / sizes
    # From shares of targets that count, [n], to weights; examples without weight are left out.
    weigh: Callable[[Tensor], Tensor] = torch.ones_like


def _losses(seen: _Seen, _metric: Metric) -> Tensor:
    return seen.task.losses_of(seen.outputs, seen.targets)


def _any(shares: Tensor) -> Tensor:
    return (shares > 0.0).to(shares.dtype)


_KINDS = {
    "loss": _Kind(_from_zero, _losses, _mean_in_ball, weigh=torch.clone),
    "accuracy": _Kind(lambda name: _from_zero(name, 1.0), _hits, weigh=torch.clone),
    "examples": _Kind(
        lambda name, cap: replace(_from_zero(name, cap), options=(float(cap),)),
        lambda seen, _: torch.ones(len(seen.targets), device=seen.targets.device),
        lambda sums, _, metric: sums.clamp(max=metric.options[0]),
    ),
    "label-counts": _Kind(
        lambda name, classes, bound: Metric(name, (classes,), radius=float(bound)),
        _classes,
        lambda sums, *_: sums,
    ),
    "batch-norm": _Kind(
        lambda name, channels, bound: Metric(name, (2 * channels,), radius=float(bound)), _moments
    ),
}
_OF_UPDATES = _Kind(_norm_indicators, None)
_OWN = _Kind(_own_metric, None)


def _kind_of(name: str, own: Mapping[str, MetricFunction], *more: str) -> _Kind:
    """The kind of a metric that is built in or the task's own; errors also list `more` names."""
    if _group_of(name):
        return _OF_UPDATES
    if name in _KINDS and name in own:
        raise InvalidValueError(
            f"metric {name!r} is built in; the task's own metric of that name must have another"
        )
    if name in _KINDS:
        return _KINDS[name]
    if name in own:
        measure = own[name]
        return _Kind(_own_metric, lambda seen, _: measure(seen.outputs, seen.targets), weigh=_any)
    known = [*_KINDS, f"{_UPDATE_NORMS}:GROUP", *more, *own]
    raise InvalidValueError(f"unknown metric {name!r}; {known_names(name, known)}")


def _group_of(name: str) -> str:
    """Name of the vector group whose norms a metric is of; "" if it is of examples."""
    kind, _, group = name.partition(":")
    return group if kind == _UPDATE_NORMS else ""


@dataclass(frozen=True)
class Measuring:
    """The model of a round, ready to be evaluated."""

    task: Task  # with its model in evaluation mode
    start: RoundParameters
    # If it keeps users apart: a lane gets the same whatever the number of lanes is.
    batched: BatchedModel | None = None

    def seen(self, x: Inputs, y: Tensor, lanes: int) -> list[_Seen]:
        """Evaluate examples [n, …], the same number of each lane: all at once, or each lane's."""
        batched = self.batched
        if batched and isinstance(x, Tensor):
            own = same_for_all(self.start.parameters, lanes)
            run = partial(batched.outputs, own, self.start.constants)
            return [_Seen(self.task, *_recorded(batched.model, run, x), y)]
        # Other models may not keep lanes apart, so each is evaluated by itself.
        run = partial(called, self.task.model, self.start.parameters | self.start.constants)
        found, each = [], len(y) // lanes
        for first in range(0, len(y), each):
            rows = slice(first, first + each)
            outputs, moments = _recorded(self.task.model, run, each_input(itemgetter(rows), x))
            found.append(_Seen(self.task, outputs, moments, y[rows]))
        return found


def _recorded(
    model: nn.Module, run: Callable[[Inputs], Tensor], x: Inputs
) -> tuple[Tensor, dict[str, list[Tensor]]]:
    """Outputs for x, and what its running norms were given meanwhile."""
    moments: dict[str, list[Tensor]] = {}
    with ExitStack() as hooks:
        for name, norm in running_norms(model).items():
            hook = partial(_record_moments, moments.setdefault(name, []))
            hooks.enter_context(norm.register_forward_pre_hook(hook))
        return run(x), moments


def _record_moments(calls: list[Tensor], layer: nn.Module, inputs: tuple[Tensor]) -> None:
    """Per example the means of x̂ over positions, then those of x̂² − 1: [n, 2·channels]."""
    x = cast(RunningNorm, layer).standardised(inputs[0])
    x = x.reshape(*x.shape[:2], -1)
    calls.append(torch.cat([x.mean(2), x.square().mean(2) - 1.0], 1))


def user_metrics(
    measuring: Measuring,
    examples: Examples,
    metrics: Sequence[Metric],
    updates: Updates,
    groups: Sequence[VectorGroup],
) -> TorchTensors:
    """What users report beside updates: name of tensor → value − centre, float32 [L, *shape]."""
    kinds = {m: _kind_of(m.name, measuring.task.metrics) for m in metrics}
    values = _measured(measuring, examples, {m: k for m, k in kinds.items() if k.of_examples})
    for one in metrics:
        if one not in values:
            of = [group for group in groups if group.name == _group_of(one.name)]
            (norms,) = group_norms(updates, of).values()
            values[one] = torch.stack([norms <= each for each in one.options], 1).double()
    return {m.tensor: (values[m] - m.centre).float() for m in metrics}


def group_norms(updates: Updates, groups: Sequence[VectorGroup]) -> TorchTensors:
    """L2 norm of each user's scaled part of each group before clipping: float64 [C] by group."""
    names = [tensor for group in groups for tensor in group.tensors]
    layout = Layout(tuple(names), tuple(tuple(updates[name].shape[1:]) for name in names))
    norms: dict[str, list[Tensor]] = {group.name: [] for group in groups}
    for _, rows in rows_of(updates, layout, len(next(iter(updates.values())))):
        for group in groups:
            parts = [
                torch.linalg.vector_norm(rows[:, layout.slices[tensor]], dim=1) / scale
                for tensor, scale in zip(group.tensors, group.scales, strict=True)
            ]
            norms[group.name].append(torch.linalg.vector_norm(torch.stack(parts), dim=0))
    return {name: torch.cat(some) for name, some in norms.items()}


@torch.no_grad()
def _measured(
    measuring: Measuring, examples: Examples, kinds: Mapping[Metric, _Kind]
) -> dict[Metric, Tensor]:
    """Metrics of each lane that are computed from examples: float64 [L, *shape] each."""
    if not kinds:
        return {}
    lanes, device = examples.lanes, examples.device
    sums = {m: torch.zeros((lanes, *m.shape), dtype=torch.float64, device=device) for m in kinds}
    sizes = {m: torch.zeros(lanes, dtype=torch.float64, device=device) for m in kinds}
    for x, y, exists in examples.blocks():
        seen = measuring.seen(x, y, lanes)
        shares = measuring.task.shares(y, kind=torch.float64)
        for one, kind in kinds.items():
            parts = _by_lane(seen, lanes) if one.name in measuring.task.metrics else seen
            value = torch.cat([_of_examples(part, one, kind) for part in parts])
            each = value.view(lanes, -1, *value.shape[1:])
            weights = torch.where(exists, kind.weigh(shares).view_as(exists), 0.0)
            sizes[one].add_(weights.sum(1))
            real = (weights > 0.0).view(*exists.shape, *[1] * (each.dim() - 2))
            # Not a product with zero, which would keep NaN.
            sums[one].add_(torch.where(real, each, 0.0).sum(1))
    return {
        m: kind.of_users(sums[m], sizes[m].view(-1, *[1] * len(m.shape)), m)
        for m, kind in kinds.items()
    }


@torch.no_grad()
def mean_metric(
    measuring: Measuring, fields: Mapping[str, npt.NDArray[np.generic]], metric: Metric
) -> npt.NDArray[np.float64]:
    """A metric of the examples of one user: [1, *shape], or [0, *shape] if there are none.

    An `InvalidValueError` says that it is of updates.
    """
    kind = _kind_of(metric.name, measuring.task.metrics)
    if kind.of_examples is None:
        raise InvalidValueError(f"metric {metric.name!r} is of updates; it must be of examples")
    task, shape = measuring.task, metric.shape
    examples = len(fields[task.targets])
    total = torch.zeros((min(1, examples), *shape), dtype=torch.float64)
    size = torch.zeros((len(total), *[1] * len(shape)), dtype=torch.float64)
    for start in range(0, examples, _ROWS):
        rows = slice(start, start + _ROWS)
        x, y = task.given({name: torch.tensor(fields[name][rows]) for name in task.fields})
        weights = kind.weigh(task.shares(y, kind=torch.float64))
        (seen,) = measuring.seen(x, y, 1)
        each = _of_examples(seen, metric, kind)
        real = (weights > 0.0).view(-1, *[1] * len(shape))
        total += torch.where(real, each, 0.0).sum(0)
        size += weights.sum()
    return kind.of_users(total, size, metric).numpy()


def _by_lane(seen: Sequence[_Seen], lanes: int) -> Iterator[_Seen]:
    """What a task's own metrics are given, of which nothing says that they keep lanes apart."""
    for some in seen:
        parts = (t.chunk(lanes // len(seen)) for t in (some.outputs, some.targets))
        for outputs, targets in zip(*parts, strict=True):
            yield _Seen(some.task, outputs, {}, targets)


def _of_examples(seen: _Seen, metric: Metric, kind: _Kind) -> Tensor:
    """Vectors of each example before they are summed: float64 [n, *shape]."""
    assert kind.of_examples is not None
    value, shape = kind.of_examples(seen, metric), (len(seen.targets), *metric.shape)
    if value.shape != shape:
        raise InvalidValueError(
            f"metric {metric.name!r} gives shape {list(value.shape)} for {shape[0]} examples; "
            f"it must be {list(shape)}"
        )
    return value.double()


def check_metrics(
    task: Task,
    metrics: Sequence[Metric],
    clipping: Clipping,
    examples: Mapping[str, npt.NDArray[np.generic]],
) -> None:
    """Refuse metrics that cannot be computed on a row of public or blank data."""
    # Two rows: a function that averages over them is found out.
    rows = {field: np.repeat(examples[field][:1], 2, axis=0) for field in task.fields}
    x, y = task.given({field: torch.from_numpy(column) for field, column in rows.items()})
    shapes = dict(zip(clipping.layout.names, clipping.layout.shapes, strict=True))
    measuring = Measuring(task, RoundParameters({}, {}))
    for one in metrics:
        if shapes.get(one.tensor) != one.shape:
            raise InvalidValueError(
                f"metric {one.name!r} has shape {one.shape}; contributions have "
                f"{shapes.get(one.tensor, 'no place')} for it"
            )
        kind = _kind_of(one.name, task.metrics)
        if kind.of_examples is None:
            _check_update_norms(one, clipping)
            continue
        if one.name == "examples" and len(one.options) != 1:
            raise InvalidValueError(
                f"metric 'examples' has options {one.options}; there must be one, the cap"
            )
        try:
            with torch.no_grad(), generator_apart():
                (seen,) = measuring.seen(x, y, 1)
                _of_examples(seen, one, kind)
        except FedprivError:
            raise
        except Exception as error:
            raise ModelError(f"metric {one.name!r} cannot be computed: {error}") from error


def _check_update_norms(one: Metric, clipping: Clipping) -> None:
    if one.shape != (len(one.options),):
        raise InvalidValueError(
            f"metric {one.name!r} has shape {one.shape} for {len(one.options)} thresholds; it "
            "must have one component for each"
        )
    group = _group_of(one.name)
    known = [g.name for g in clipping.sent if not g.name.startswith(METRIC_PREFIX)]
    if group not in known:
        raise InvalidValueError(
            f"metric {one.name!r} is of vector group {group!r}; {known_names(group, known)}"
        )


@dataclass(frozen=True)
class SimulationOnlyDiagnostics:
    """True figures of one round. Publishing one breaks the guarantee of the users in it.

    Averages are over the users that contributed: those with examples for whom nothing raised and
    all is finite. They are NaN if there were none. Norms are before clipping.
    """

    round: int  # from 0
    attempt: int  # from 0
    simulation_only_cohort_size: int  # users that were drawn
    simulation_only_contributors: int  # users that contributed
    # By vector group that users send, metrics included: the fraction of users that were clipped.
    simulation_only_clipped: Mapping[str, float]
    # Average of users' mean losses at the round's parameters, in evaluation mode, without a bound.
    simulation_only_train_loss: float
    # By these groups: the average of users' norms, in the units of the clipping norm.
    simulation_only_group_norms: Mapping[str, float]
    # By layer: the average L2 norm of users' updates of its tensors, in the model's units.
    simulation_only_update_norms: Mapping[str, float]


def diagnose_chunk(
    measuring: Measuring, examples: Examples, tensors: Updates, request: RoundRequest
) -> Tensor:
    """A row of figures for each user of a chunk, from what it sends before clipping: float64.

    Columns: whether it contributes; mean loss; per group whether it was clipped; norms of groups;
    norms of layers.
    """
    groups = _clipped_groups(request)
    norms = torch.stack([*group_norms(tensors, groups).values()], 1)
    bounds = [group.clipping_norm * _ROUNDING for group in groups]
    clipped = torch.stack([norm > bound for norm, bound in zip(norms.T, bounds, strict=True)], 1)
    by_layer = torch.stack([*group_norms(tensors, _layers_of(request)).values()], 1)
    loss = Metric("loss")
    without_bound = _Kind(_own_metric, _losses, weigh=torch.clone)
    losses = _measured(measuring, examples, {loss: without_bound})[loss][:, None]
    contributing = torch.isfinite(norms).all(1, keepdim=True).double()
    rows = torch.cat([contributing, losses, clipped.double(), norms, by_layer], 1)
    return rows[: len(examples.users)]


def diagnose_round(
    request: RoundRequest, chunks: Sequence[npt.NDArray[np.float64]]
) -> SimulationOnlyDiagnostics:
    """Diagnostics of a round from those of its chunks."""
    groups = [group.name for group in _clipped_groups(request)]
    by_layer = [layer.name for layer in _layers_of(request)]
    users = np.concatenate([np.empty((0, 2 + 2 * len(groups) + len(by_layer))), *chunks])
    rows = users[users[:, 0] > 0.0, 1:]
    # Exact sums, whatever chunks users were in.
    known = [column[~np.isnan(column)] for column in rows.T]  # no loss where no target counts
    averages = [math.fsum(some) / len(some) if len(some) else math.nan for some in known]
    (loss,), clipped, norms, lengths = np.split(averages, np.cumsum([1, *[len(groups)] * 2]))
    return SimulationOnlyDiagnostics(
        round=request.round,
        attempt=request.attempt,
        simulation_only_cohort_size=request.users.size,
        simulation_only_contributors=len(rows),
        simulation_only_clipped=dict(zip(groups, clipped.tolist(), strict=True)),
        simulation_only_train_loss=float(loss),
        simulation_only_group_norms=dict(zip(groups, norms.tolist(), strict=True)),
        simulation_only_update_norms=dict(zip(by_layer, lengths.tolist(), strict=True)),
    )


def _clipped_groups(request: RoundRequest) -> list[VectorGroup]:
    """Groups that may be clipped: that a user contributes is always 1."""
    return [group for group in request.clipping.sent if group != CONTRIBUTORS.group]


def _layers_of(request: RoundRequest) -> tuple[VectorGroup, ...]:
    """The layers of the model as groups, in the model's units."""
    layout = Layout.of(request.parameters)
    parts = layers(layout)
    return per_layer(layout, parts, dict.fromkeys(parts, 1.0))
