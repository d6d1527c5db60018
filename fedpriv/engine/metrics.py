"""The kinds of metrics: how each is computed from a user's examples.

Metrics that the engine can compute, and how to ask for them.

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

Measuring the users of a chunk at the round's parameters, each example that counts once.

The model is the same for all users, so their examples go through it side by side, a block of each
user's at a time.

Refusing metrics that cannot be computed, before anybody's data are touched.

What only a simulation may know of a round: figures that are not private.

They never enter a partial sum: whoever simulates asks the in-process transport for them, and gets
them in a type and under names that say what they are.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from fedpriv.engine.sgd import same_for_all
from fedpriv.engine.task import MetricFunction, Start, Task, recorded_moments
from fedpriv.errors import FedprivError, InvalidValueError, ModelError, known_names
from fedpriv.importing import check_options, import_function
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.clipping_torch import TorchTensors, Updates, group_norms, sent
from fedpriv.privacy.layout import Layout, VectorGroup, layers, per_layer
from fedpriv.privacy.mechanism import PREFIX, Metric
from fedpriv.privacy.round import RoundRequest

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


_UPWARD = 1.0 + 2.0**-50  # on radii that are met exactly, for the rounding of the root


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
    make = _maker(name)
    check_options(
        f"metric {name!r}", partial(make, name), numbers, InvalidValueError, noun="number"
    )
    return make(name, **numbers)


def _maker(name: str) -> Callable[..., Metric]:
    """The function below that makes metrics of a name."""
    if name in _MAKERS:
        return _MAKERS[name]
    kind, _, rest = name.partition(":")
    if not rest:
        known = [*_MAKERS, f"{UPDATE_NORMS}:GROUP", "module:function"]
        raise InvalidValueError(f"unknown metric {name!r}; {known_names(name, known)}")
    return _update_norms if kind == UPDATE_NORMS else _own


def _loss(name: str, bound: float) -> Metric:
    _check_positive(name, "bound", bound)
    return Metric(name, centre=bound / 2.0, radius=bound / 2.0)


def _accuracy(name: str) -> Metric:
    return Metric(name, centre=0.5, radius=0.5)


def _examples(name: str, cap: float) -> Metric:
    _check_positive(name, "cap", cap)
    return Metric(name, centre=cap / 2.0, radius=cap / 2.0, options=(float(cap),))


def _label_counts(name: str, classes: float, bound: float) -> Metric:
    _check_positive(name, "bound", bound)
    return Metric(name, (_count(name, "classes", classes),), radius=bound)


def _update_norms(name: str, thresholds: Sequence[float]) -> Metric:
    if not isinstance(thresholds, Sequence) or not thresholds:
        raise InvalidValueError(
            f"thresholds of metric {name!r} are {thresholds!r}; there must be at least one"
        )
    for threshold in thresholds:
        _check_positive(name, "a threshold", threshold)
    radius = math.sqrt(len(thresholds)) / 2.0 * _UPWARD
    return Metric(name, (len(thresholds),), 0.5, radius, tuple(map(float, thresholds)))


def _batch_norm(name: str, channels: float, bound: float) -> Metric:
    _check_positive(name, "bound", bound)
    return Metric(name, (2 * _count(name, "channels", channels),), radius=bound)


def _own(name: str, radius: float, centre: float = 0.0, shape: Sequence[float] = ()) -> Metric:
    _check_positive(name, "radius", radius)
    if not isinstance(shape, Sequence) or not isinstance(centre, int | float):
        raise InvalidValueError(
            f"metric {name!r} has centre {centre!r} and shape {shape!r}; they must be a number and "
            "a list"
        )
    axes = tuple(_count(name, "an axis of the shape", axis) for axis in shape)
    return Metric(name, axes, centre, radius)


_MAKERS: Mapping[str, Callable[..., Metric]] = {
    "loss": _loss,
    "accuracy": _accuracy,
    "examples": _examples,
    "label-counts": _label_counts,
    "batch-norm": _batch_norm,
}


def _check_positive(name: str, what: str, value: object) -> None:
    if not (isinstance(value, int | float) and 0.0 < value < math.inf):
        raise InvalidValueError(
            f"{what} of metric {name!r} is {value!r}; it must be a positive number"
        )


def _count(name: str, what: str, value: float) -> int:
    if not isinstance(value, int) or value < 1:
        raise InvalidValueError(
            f"{what} of metric {name!r} is {value!r}; it must be a whole number of at least 1"
        )
    return value


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


def check_metrics(
    task: Task,
    metrics: Sequence[Metric],
    clipping: Clipping,
    examples: Mapping[str, npt.NDArray[np.generic]],
) -> None:
    """Refuse metrics that cannot be computed before anybody's data are touched.

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
    for one in metrics:
        _check_place(one, clipping)
        if measured_group(one) is not None:
            _check_update_norms(one, clipping)
            continue
        if one.name == "examples" and len(one.options) != 1:
            raise InvalidValueError(
                f"metric 'examples' has options {one.options}; there must be one, the cap"
            )
        kind = kind_of(task, one)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                values_of_examples(Measuring.of(task, {}), x, y, [(kind, one)])
        except FedprivError:
            raise
        except Exception as error:
            raise ModelError(f"metric {one.name!r} cannot be computed: {error}") from error


def _check_place(one: Metric, clipping: Clipping) -> None:
    layout = clipping.layout
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    if shapes.get(one.tensor) != one.shape:
        raise InvalidValueError(
            f"metric {one.name!r} has shape {one.shape}; contributions have "
            f"{shapes.get(one.tensor, 'no place')} for it"
        )


def _check_update_norms(one: Metric, clipping: Clipping) -> None:
    if one.shape != (len(one.options),):
        raise InvalidValueError(
            f"metric {one.name!r} has shape {one.shape} for {len(one.options)} thresholds; it "
            "must have one component for each"
        )
    group = measured_group(one)
    known = [g.name for g in sent(clipping) if not g.name.startswith(PREFIX)]
    if group not in known:
        raise InvalidValueError(
            f"metric {one.name!r} is of vector group {group!r}; {known_names(str(group), known)}"
        )


_ROUNDING = 1.0 + 2.0**-20  # of float32: a metric at its bound is not clipped


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
        clipped: how many of them were clipped, by vector group.
        loss: sum of their mean losses.
        group_norms: sum of their norms before clipping, by vector group.
        update_norms: sum of the norms of their updates before clipping, by layer.
    """

    users: int
    clipped: Mapping[str, int]
    loss: float
    group_norms: Mapping[str, float]
    update_norms: Mapping[str, float]


def diagnose_chunk(
    tensors: Updates, request: RoundRequest, losses: torch.Tensor, users: int
) -> ChunkDiagnostics:
    """Diagnostics of a chunk.

    Args:
        tensors: what its lanes send, before clipping.
        request: of the round.
        losses: [L] mean loss of each lane's examples.
        users: C, how many of the lanes are users; the first ones.
    """
    groups = sent(request.clipping)
    norms = {name: norm[:users] for name, norm in group_norms(tensors, groups).items()}
    losses = losses[:users]
    finite = torch.isfinite(torch.stack(list(norms.values()))).all(0)
    clipped = {
        group.name: int((norms[group.name][finite] > group.clipping_norm * _ROUNDING).sum())
        for group in groups
    }
    layers = group_norms(tensors, _layers_of(request))
    whole = {name: norm[:users] for name, norm in layers.items()}
    return ChunkDiagnostics(
        int(finite.sum()),
        clipped,
        float(losses[finite].sum()),
        {name: float(norm[finite].sum()) for name, norm in norms.items()},
        {name: float(norm[finite].sum()) for name, norm in whole.items()},
    )


def diagnose_round(
    request: RoundRequest, chunks: Iterable[ChunkDiagnostics]
) -> SimulationOnlyDiagnostics:
    """Diagnostics of a round from those of its chunks."""
    seen = list(chunks)
    users = sum(chunk.users for chunk in seen)
    groups = [group.name for group in sent(request.clipping)]
    share = 1.0 / users if users else math.nan

    def average(sums: Iterable[float]) -> float:
        return share * math.fsum(sums)

    return SimulationOnlyDiagnostics(
        round=request.round,
        attempt=request.attempt,
        simulation_only_cohort_size=request.users.size,
        simulation_only_contributors=users,
        simulation_only_clipped={g: average(chunk.clipped[g] for chunk in seen) for g in groups},
        simulation_only_train_loss=average(chunk.loss for chunk in seen),
        simulation_only_group_norms={
            g: average(chunk.group_norms[g] for chunk in seen) for g in groups
        },
        simulation_only_update_norms={
            layer.name: average(chunk.update_norms[layer.name] for chunk in seen)
            for layer in _layers_of(request)
        },
    )


def _layers_of(request: RoundRequest) -> tuple[VectorGroup, ...]:
    """The layers of the model as groups, in the model's units."""
    layout = Layout.of(request.parameters)
    parts = layers(layout)
    return per_layer(layout, parts, dict.fromkeys(parts, 1.0))
