"""Metrics that users report beside their updates, and what only a simulation may know.

| name                | a user's vector                                                  | shape |
| ------------------- | ---------------------------------------------------------------- | ----- |
| loss                | mean loss of its examples, at most the bound                     | ()    |
| accuracy            | share of its examples, and positions in them, of the right class | ()    |
| examples            | number of its examples, at most the cap                          | ()    |
| label-counts        | number of its examples of each class                             | (K,)  |
| update-norms:GROUP  | per threshold, 1 if the group's norm is not above it, else 0     | (k,)  |
| batch-norm          | how far what normalisations see is from their running statistics | (2C,) |
| module:function     | mean over its examples of a function of outputs and targets      | any   |

All are measured at the round's initial parameters, in evaluation mode, on all of a user's examples,
whatever number of them it trains on. A user without examples contributes nothing, and so does one
for whom a metric raises or is not finite; it then does not contribute an update either. A loss that
is not finite counts as the bound, and a target that is no class is in no count.

`SimulationOnlyDiagnostics` are true figures, which are not private: they never enter a partial sum.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.func import functional_call

from fedpriv.engine.batches import Examples
from fedpriv.engine.layers import Layers
from fedpriv.engine.local_training import same_for_all
from fedpriv.engine.task import MetricFunction, RoundParameters, RunningNorm, Task, running_norms
from fedpriv.errors import FedprivError, InvalidValueError, ModelError, known_names
from fedpriv.importing import check_options, import_function
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.clipping_torch import TorchTensors, Updates, rows_of
from fedpriv.privacy.gaussian_mechanism import METRIC_PREFIX, Metric
from fedpriv.privacy.layout import Layout, VectorGroup, layers, per_layer
from fedpriv.privacy.round import RoundRequest

_UPDATE_NORMS = "update-norms"
_UPWARD = 1.0 + 2.0**-50  # on radii that are met exactly, for the rounding of the root
_ROUNDING = 1.0 + 2.0**-20  # of float32: a metric at its bound is not clipped


@dataclass(frozen=True)
class _Seen:
    """Examples at the round's parameters: outputs and targets [n, …], and moments by layer."""

    task: Task
    outputs: torch.Tensor
    targets: torch.Tensor
    moments: Mapping[str, Sequence[torch.Tensor]]


@dataclass(frozen=True)
class _Kind:
    """How a metric is made and computed: a vector per example, summed over a user's, then finished.

    Attributes:
        make: from its name and the numbers that `metric` takes.
        of_examples: vectors of examples, [n, *shape]; None if it is of updates.
        of_users: from the sums over a user's examples [C, *shape] and their numbers [C, 1, …], both
            float64, to the metric of each user [C, *shape].
    """

    make: Callable[..., Metric]
    of_examples: Callable[[_Seen, Metric], torch.Tensor] | None
    of_users: Callable[[torch.Tensor, torch.Tensor, Metric], torch.Tensor]


def metric(name: str, **numbers: float | Sequence[float]) -> Metric:
    """A metric with the bounds that follow from a few numbers.

    | name               | numbers                                                              |
    | ------------------ | -------------------------------------------------------------------- |
    | loss               | `bound`: the largest mean loss that is told apart                    |
    | accuracy           | none                                                                 |
    | examples           | `cap`: the largest number that is told apart                         |
    | label-counts       | `classes`; `bound` on the L2 norm of a user's counts                 |
    | update-norms:GROUP | `thresholds`: norms of the part of that vector group before clipping |
    | batch-norm         | `channels` of all layers together; `bound` on the vector's L2 norm   |
    | module:function    | `radius`, and `shape` (a number) and `centre` (zero) if they differ  |

    >>> metric("loss", bound=5.0)
    Metric(name='loss', shape=(), centre=2.5, radius=2.5, options=())

    Raises:
        InvalidValueError: the name or a number is unknown, absent or out of range.
    """
    make: Callable[..., Metric] = _make_own
    if not _is_own(name):
        make = _kind_of(name, {}, "module:function").make
    check = partial(make, name)
    check_options(f"metric {name!r}", check, numbers, InvalidValueError, noun="number")
    return make(name, **numbers)


def own_metrics(names: Iterable[str]) -> dict[str, MetricFunction]:
    """Import those metrics that are named "package.module:function", for `Task.metrics`.

    Raises:
        ModelError: a function cannot be imported.
    """
    return {
        name: cast(MetricFunction, import_function(f"metric {name!r}", name, ModelError))
        for name in names
        if _is_own(name)
    }


def _is_own(name: str) -> bool:
    """Whether it is named "package.module:function"."""
    kind, separator, function = name.partition(":")
    return kind != _UPDATE_NORMS and bool(separator and function)


def _make_loss(name: str, bound: float) -> Metric:
    radius = _positive(name, "bound", bound) / 2.0
    return Metric(name, centre=radius, radius=radius)


def _make_accuracy(name: str) -> Metric:
    return Metric(name, centre=0.5, radius=0.5)


def _make_examples(name: str, cap: float) -> Metric:
    radius = _positive(name, "cap", cap) / 2.0
    return Metric(name, centre=radius, radius=radius, options=(float(cap),))


def _make_label_counts(name: str, classes: float, bound: float) -> Metric:
    radius = _positive(name, "bound", bound)
    return Metric(name, (_count(name, "classes", classes),), radius=radius)


def _make_batch_norm(name: str, channels: float, bound: float) -> Metric:
    radius = _positive(name, "bound", bound)
    return Metric(name, (2 * _count(name, "channels", channels),), radius=radius)


def _make_update_norms(name: str, thresholds: Sequence[float]) -> Metric:
    if not isinstance(thresholds, Sequence) or not thresholds:
        raise InvalidValueError(
            f"thresholds of metric {name!r} are {thresholds!r}; there must be at least one"
        )
    options = tuple(float(_positive(name, "a threshold", each)) for each in thresholds)
    return Metric(name, (len(options),), 0.5, math.sqrt(len(options)) / 2.0 * _UPWARD, options)


def _make_own(name: str, radius: float, centre: float = 0.0, shape: Sequence[float] = ()) -> Metric:
    radius = _positive(name, "radius", radius)
    if not isinstance(shape, Sequence) or not isinstance(centre, int | float):
        raise InvalidValueError(
            f"metric {name!r} has centre {centre!r} and shape {shape!r}; they must be a number and "
            "a list"
        )
    axes = tuple(_count(name, "an axis of the shape", axis) for axis in shape)
    return Metric(name, axes, centre, radius)


def _positive(name: str, what: str, value: float) -> float:
    if not (isinstance(value, int | float) and 0.0 < value < math.inf):
        raise InvalidValueError(
            f"{what} of metric {name!r} is {value!r}; it must be a positive number"
        )
    return value


def _count(name: str, what: str, value: float) -> int:
    if not isinstance(value, int) or value < 1:
        raise InvalidValueError(
            f"{what} of metric {name!r} is {value!r}; it must be a whole number of at least 1"
        )
    return value


def _losses(seen: _Seen, _metric: Metric) -> torch.Tensor:
    return seen.task.losses_of(seen.outputs, seen.targets)


def _hits(seen: _Seen, metric: Metric) -> torch.Tensor:
    _check_classes(seen.targets, metric)
    if seen.outputs.dim() != seen.targets.dim() + 1:
        raise InvalidValueError(
            f"metric {metric.name!r} has outputs with {seen.outputs.dim()} axes for targets with "
            f"{seen.targets.dim()}; it needs one axis more, the scores of the classes"
        )
    hits = (seen.outputs.argmax(1) == seen.targets).double()
    return hits.reshape(len(hits), -1).mean(1)


def _ones(seen: _Seen, _metric: Metric) -> torch.Tensor:
    return torch.ones(len(seen.targets), device=seen.targets.device)


def _classes(seen: _Seen, metric: Metric) -> torch.Tensor:
    _check_classes(seen.targets, metric)
    targets = seen.targets.reshape(len(seen.targets), -1, 1)
    # Compared, not indexed: a target that is no class must not raise, least of all on a GPU.
    return (targets == torch.arange(metric.shape[0], device=targets.device)).double().sum(1)


def _check_classes(targets: torch.Tensor, metric: Metric) -> None:
    if targets.dtype.is_floating_point:
        raise InvalidValueError(
            f"metric {metric.name!r} has targets of {targets.dtype}; they must be classes, integers"
        )


def _moments(seen: _Seen, metric: Metric) -> torch.Tensor:
    if not seen.moments:
        raise InvalidValueError(f"metric {metric.name!r} needs a model with batch normalisation")
    for layer, calls in seen.moments.items():
        if len(calls) != 1:
            raise InvalidValueError(
                f"metric {metric.name!r} needs layers that are called once in a forward pass; "
                f"{layer!r} is called {len(calls)} times"
            )
    return torch.cat([calls[0] for calls in seen.moments.values()], 1)


def _mean(sums: torch.Tensor, sizes: torch.Tensor, _metric: Metric) -> torch.Tensor:
    return sums / sizes


def _sum(sums: torch.Tensor, _sizes: torch.Tensor, _metric: Metric) -> torch.Tensor:
    return sums


def _within_ball(sums: torch.Tensor, sizes: torch.Tensor, metric: Metric) -> torch.Tensor:
    """Means within centre ± radius; what is not finite is at the upper end."""
    low, high = metric.centre - metric.radius, metric.centre + metric.radius
    return (sums / sizes).nan_to_num(nan=high, posinf=high, neginf=low).clamp(low, high)


def _capped(sums: torch.Tensor, _sizes: torch.Tensor, metric: Metric) -> torch.Tensor:
    return sums.clamp(max=metric.options[0])


_KINDS = {
    "loss": _Kind(_make_loss, _losses, _within_ball),
    "accuracy": _Kind(_make_accuracy, _hits, _mean),
    "examples": _Kind(_make_examples, _ones, _capped),
    "label-counts": _Kind(_make_label_counts, _classes, _sum),
    "batch-norm": _Kind(_make_batch_norm, _moments, _mean),
    _UPDATE_NORMS: _Kind(_make_update_norms, None, _sum),
}


def _kind_of(name: str, own: Mapping[str, MetricFunction], *more: str) -> _Kind:
    """Of a metric that is built in or among the own ones; others are refused, naming `more`."""
    if name in _KINDS and name != _UPDATE_NORMS:
        return _KINDS[name]
    if _group_of(name) is not None:
        return _KINDS[_UPDATE_NORMS]
    if name in own:
        function = own[name]
        return _Kind(_make_own, lambda seen, _: function(seen.outputs, seen.targets), _mean)
    built_in = [kind for kind in _KINDS if kind != _UPDATE_NORMS]
    known = [*built_in, f"{_UPDATE_NORMS}:GROUP", *more, *own]
    raise InvalidValueError(f"unknown metric {name!r}; {known_names(name, known)}")


def _group_of(name: str) -> str | None:
    """Name of the vector group whose norms a metric is of; None if it is of examples."""
    kind, _, group = name.partition(":")
    return group if group and kind == _UPDATE_NORMS else None


@dataclass(frozen=True)
class Measuring:
    """The model of a round, ready to be evaluated.

    Attributes:
        task: with its model in evaluation mode.
        start: the model at the start of the round.
        layers: of the task, if users are separable: their products give a lane the same whatever
            the number of lanes is; None: the model itself is called.
    """

    task: Task
    start: RoundParameters
    layers: Layers | None = None

    def seen(self, x: torch.Tensor, y: torch.Tensor, lanes: int) -> _Seen:
        """Evaluate examples [n, …], the same number of each lane."""
        start = self.start
        if self.layers is None:
            with _recorded_moments(self.task.model) as moments:
                tensors = start.parameters | start.constants
                outputs = functional_call(self.task.model, tensors, (x,))
        else:
            batched = self.layers.batched()
            own = same_for_all(start.parameters, lanes)
            with _recorded_moments(batched.model) as moments, batched.corrected({}):
                outputs = batched.outputs(own, start.constants, x, "float32", x.device)
        return _Seen(self.task, outputs, y, moments)


@contextmanager
def _recorded_moments(model: nn.Module) -> Iterator[Mapping[str, list[torch.Tensor]]]:
    """Record, in forward passes inside, the moments of the inputs of running norms.

    Yields:
        Name of each layer, in the order of the model → for each call [n, 2·channels]: per example
        the means of x̂ over positions, then those of x̂² − 1.
    """
    norms = running_norms(model)
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in norms}

    def record(name: str, layer: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        if isinstance(layer, RunningNorm):
            x = layer.standardised(inputs[0])
            x = x.reshape(*x.shape[:2], -1)
            seen[name].append(torch.cat([x.mean(2), x.square().mean(2) - 1.0], 1))

    handles = [
        layer.register_forward_pre_hook(partial(record, name)) for name, layer in norms.items()
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def user_metrics(
    measuring: Measuring,
    examples: Examples,
    metrics: Sequence[Metric],
    updates: Updates,
    groups: Sequence[VectorGroup],
) -> TorchTensors:
    """What users report beside their updates: name of tensor → value − centre, float32 [L, *shape].

    Updates are those before clipping, groups the vector groups of the round.
    """
    kinds = {m: _kind_of(m.name, measuring.task.metrics) for m in metrics}
    values = _measured(measuring, examples, {m: k for m, k in kinds.items() if k.of_examples})
    for one in metrics:
        if one not in values:
            (group,) = [group for group in groups if group.name == _group_of(one.name)]
            (norms,) = group_norms(updates, [group]).values()
            thresholds = torch.tensor(one.options, dtype=torch.float64, device=norms.device)
            values[one] = (norms[:, None] <= thresholds).double()
    return {m.tensor: (values[m] - m.centre).float() for m in metrics}


def group_norms(updates: Updates, groups: Iterable[VectorGroup]) -> TorchTensors:
    """L2 norm of each user's scaled part of each group before clipping: float64 [C] by group."""
    asked = tuple(groups)
    names = [tensor for group in asked for tensor in group.tensors]
    layout = Layout(tuple(names), tuple(tuple(updates[name].shape[1:]) for name in names))
    lengths: dict[str, list[torch.Tensor]] = {group.name: [] for group in asked}
    for _, rows in rows_of(updates, layout, len(next(iter(updates.values())))):
        for group in asked:
            parts = [
                torch.linalg.vector_norm(rows[:, layout.slices[tensor]], dim=1) / scale
                for tensor, scale in zip(group.tensors, group.scales, strict=True)
            ]
            lengths[group.name].append(torch.linalg.vector_norm(torch.stack(parts), dim=0))
    return {name: torch.cat(some) for name, some in lengths.items()}


def mean_losses(measuring: Measuring, examples: Examples) -> torch.Tensor:
    """Mean loss of each lane's examples, without a bound: float64 [L]."""
    loss = {Metric("loss"): _Kind(_make_loss, _losses, _mean)}
    return _measured(measuring, examples, loss)[Metric("loss")]


@torch.no_grad()
def _measured(
    measuring: Measuring, examples: Examples, kinds: Mapping[Metric, _Kind]
) -> dict[Metric, torch.Tensor]:
    """Metrics of each lane that are computed from examples: float64 [L, *shape] each."""
    if not kinds:
        return {}
    lanes = examples.lanes
    sums = {
        metric: torch.zeros((lanes, *metric.shape), dtype=torch.float64, device=examples.device)
        for metric in kinds
    }
    for block in examples.blocks():
        seen = measuring.seen(block.x, block.y, lanes)
        for metric, kind in kinds.items():
            value = _of_examples(seen, metric, kind)
            each = value.view(lanes, -1, *value.shape[1:])
            real = block.real.view(*block.real.shape, *[1] * (each.dim() - 2))
            # Not a product with zero, which would keep NaN.
            sums[metric].add_(torch.where(real, each, 0.0).sum(1))
    sizes = examples.sizes()
    return {
        metric: kind.of_users(sums[metric], sizes.view(-1, *[1] * len(metric.shape)), metric)
        for metric, kind in kinds.items()
    }


def _of_examples(seen: _Seen, metric: Metric, kind: _Kind) -> torch.Tensor:
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
    """Refuse metrics that cannot be computed, before any user's data are touched.

    Args:
        task: the task.
        metrics: those that a round asks for.
        clipping: how contributions of a round are made.
        examples: at least one row of public, held-out or blank data.

    Raises:
        InvalidValueError: a metric is unknown, or its shape or options do not fit.
        ModelError: a metric cannot be computed.
    """
    # Two rows: a function that averages over them is found out.
    x, y = (
        torch.from_numpy(np.repeat(examples[field][:1], 2, axis=0))
        for field in (task.inputs, task.targets)
    )
    places = dict(zip(clipping.layout.names, clipping.layout.shapes, strict=True))
    measuring = Measuring(task, RoundParameters({}, {}))
    for one in metrics:
        if places.get(one.tensor) != one.shape:
            raise InvalidValueError(
                f"metric {one.name!r} has shape {one.shape}; contributions have "
                f"{places.get(one.tensor, 'no place')} for it"
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
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                _of_examples(measuring.seen(x, y, 1), one, kind)
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
            f"metric {one.name!r} is of vector group {group!r}; {known_names(str(group), known)}"
        )


@dataclass(frozen=True)
class SimulationOnlyDiagnostics:
    """True figures of one round. Publishing one breaks the guarantee of the users in it.

    Averages are over the users that contributed: those with examples for whom nothing raised and
    all is finite. They are NaN if there were none.

    Attributes:
        round: number of the round, from 0.
        attempt: number of the attempt, from 0.
        simulation_only_cohort_size: users that were drawn.
        simulation_only_contributors: users that contributed.
        simulation_only_clipped: for each vector group that users send, metrics included, the
            fraction of users that were clipped.
        simulation_only_train_loss: average of users' mean losses at the parameters before the
            round, in evaluation mode, without a bound.
        simulation_only_group_norms: for each of these groups, the average of users' norms before
            clipping, in the units of its clipping norm.
        simulation_only_update_norms: for each layer of the model, the average L2 norm of users'
            updates of its tensors before clipping, in the model's units.
    """

    round: int
    attempt: int
    simulation_only_cohort_size: int
    simulation_only_contributors: int
    simulation_only_clipped: Mapping[str, float]
    simulation_only_train_loss: float
    simulation_only_group_norms: Mapping[str, float]
    simulation_only_update_norms: Mapping[str, float]


@dataclass(frozen=True)
class ChunkDiagnostics:
    """Sums over the users of a chunk that contribute.

    Attributes:
        users: their number.
        loss: of their mean losses.
        clipped: of 1 for each that was clipped, by vector group.
        group_norms: of their norms before clipping, by vector group.
        update_norms: of the norms of their updates before clipping, by layer.
    """

    users: int
    loss: float
    clipped: Mapping[str, float]
    group_norms: Mapping[str, float]
    update_norms: Mapping[str, float]


def diagnose_chunk(
    tensors: Updates, request: RoundRequest, losses: torch.Tensor, users: int
) -> ChunkDiagnostics:
    """Diagnostics of the first C lanes, which are users, from what all send before clipping.

    Losses are the mean losses of the lanes' examples, [L].
    """
    groups = request.clipping.sent
    norms = {name: norm[:users] for name, norm in group_norms(tensors, groups).items()}
    layers = group_norms(tensors, _layers_of(request))
    finite = torch.isfinite(torch.stack(list(norms.values()))).all(0)
    bounds = {group.name: group.clipping_norm * _ROUNDING for group in groups}

    def summed(values: TorchTensors) -> dict[str, float]:
        return {name: float(value[:users][finite].sum()) for name, value in values.items()}

    return ChunkDiagnostics(
        int(finite.sum()),
        summed({"": losses})[""],
        summed({name: (norm > bounds[name]).double() for name, norm in norms.items()}),
        summed(norms),
        summed(layers),
    )


def diagnose_round(
    request: RoundRequest, chunks: Sequence[ChunkDiagnostics]
) -> SimulationOnlyDiagnostics:
    """Diagnostics of a round from those of its chunks."""
    users = sum(chunk.users for chunk in chunks)
    share = 1.0 / users if users else math.nan
    groups = [group.name for group in request.clipping.sent]
    layers = [layer.name for layer in _layers_of(request)]

    def averages(names: Sequence[str], sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return {name: share * math.fsum(each[name] for each in sums) for name in names}

    return SimulationOnlyDiagnostics(
        round=request.round,
        attempt=request.attempt,
        simulation_only_cohort_size=request.users.size,
        simulation_only_contributors=users,
        simulation_only_clipped=averages(groups, [chunk.clipped for chunk in chunks]),
        simulation_only_train_loss=share * math.fsum(chunk.loss for chunk in chunks),
        simulation_only_group_norms=averages(groups, [chunk.group_norms for chunk in chunks]),
        simulation_only_update_norms=averages(layers, [chunk.update_norms for chunk in chunks]),
    )


def _layers_of(request: RoundRequest) -> tuple[VectorGroup, ...]:
    """The layers of the model as groups, in the model's units."""
    layout = Layout.of(request.parameters)
    parts = layers(layout)
    return per_layer(layout, parts, dict.fromkeys(parts, 1.0))
