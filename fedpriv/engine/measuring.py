"""Metrics that users report together with their updates, and figures for simulations only.

All metrics are measured at the round's initial parameters, in evaluation mode, on all of a user's
examples that count (at most `max_examples`), once each. Loss, accuracy and the task's own metrics
skip the targets that the task ignores. A user without examples, or with a metric that raises or is
not finite, contributes neither metrics nor an update.

`SimulationOnlyDiagnostics` are exact figures, which are not private: they never enter a partial
sum.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedpriv.engine.arithmetic import generators_apart
from fedpriv.engine.leftovers import WithinBounds
from fedpriv.engine.task import Inputs, RunningNorm, Task, called, running_norms
from fedpriv.errors import FedprivError, InvalidValueError, ModelError, known_names
from fedpriv.measures.figures import LOSS, Seen, Sums
from fedpriv.measures.metrics import group_of, sums_of
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.clipping_torch import TorchTensors, Updates, rows_of
from fedpriv.privacy.gaussian_mechanism import CONTRIBUTORS, METRIC_PREFIX, Metric
from fedpriv.privacy.layout import Layout, VectorGroup, layers, per_layer
from fedpriv.training.request import RoundRequest

_ROWS = 2_000  # rows of one user that are measured at once
_ROUNDING = 1.0 + 2.0**-20  # error of float32, so that a metric at its bound is not clipped


@dataclass(frozen=True)
class Measuring:
    """A model at the parameters of a round, in evaluation mode."""

    task: Task
    model: nn.Module
    run: Callable[[Inputs], Tensor]  # calls the model, including hooks of its layers

    def seen(self, x: Inputs, y: Tensor) -> Seen:
        """Evaluate rows [n, …]."""
        moments: dict[str, list[Tensor]] = {}
        with ExitStack() as hooks:
            for name, norm in running_norms(self.model).items():
                hook = partial(_record_moments, moments.setdefault(name, []))
                hooks.enter_context(norm.register_forward_pre_hook(hook))
            return self.task.seen(self.run(x), y, moments)


def _record_moments(calls: list[Tensor], layer: nn.Module, inputs: tuple[Tensor]) -> None:
    """Append the means over positions of x̂ and x̂² − 1 per example, [n, 2·channels]."""
    x = cast(RunningNorm, layer).standardised(inputs[0])
    x = x.reshape(*x.shape[:2], -1)
    calls.append(torch.cat([x.mean(2), x.square().mean(2) - 1.0], 1))


Blocks = Iterable[tuple[Seen, Tensor]]
"""Rows of L users, n of each, one user after another, and which rows count, [L, n]."""


def user_metrics(
    task: Task,
    blocks: Blocks,
    metrics: Sequence[Metric],
    updates: Updates,
    groups: Sequence[VectorGroup],
) -> TorchTensors:
    """Return the metrics of L users: name of tensor → value − centre, float32 [L, *shape]."""
    sums = {m: sums_of(m, task.metrics) for m in metrics}
    custom = {m for m in metrics if m.name in task.metrics}
    values = _measured(blocks, {m: of_rows for m, of_rows in sums.items() if of_rows}, custom)
    for metric in metrics:
        if metric not in values:
            measured_groups = [group for group in groups if group.name == group_of(metric.name)]
            (norms,) = group_norms(updates, measured_groups).values()
            is_below = [norms <= threshold for threshold in metric.options]
            values[metric] = torch.stack(is_below, 1).double()
    return {m.tensor: (values[m] - m.centre).float() for m in metrics}


def group_norms(updates: Updates, groups: Sequence[VectorGroup]) -> TorchTensors:
    """Return the L2 norm of each user's scaled part of each group before clipping, [L] by group."""
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
    return {name: torch.cat(parts) for name, parts in norms.items()}


Key = TypeVar("Key")


@torch.no_grad()
def _measured(
    blocks: Blocks, sums: Mapping[Key, Sums], separate: Collection[Key] = ()
) -> dict[Key, Tensor]:
    """Return the value of each of these sums for each user, float64 [L, *shape].

    Keys in `separate` belong to the task's own functions, which get the rows of one user at a time,
    because they may mix them.
    """
    totals = dict[Key, Tensor]()
    for view, real in blocks if sums else ():
        for key, measure in sums.items():
            parts = _by_user(view, len(real)) if key in separate else [view]
            with WithinBounds():
                rows = torch.cat([measure.of_rows(part) for part in parts])
            rows = torch.where(real.reshape(-1, 1), rows, 0.0).view(*real.shape, -1).sum(1)
            totals[key] = totals[key] + rows if key in totals else rows
    return {key: sums[key].finish(total) for key, total in totals.items()}


@torch.no_grad()
def mean_metric(
    measuring: Measuring, fields: Mapping[str, npt.NDArray[np.generic]], metric: Metric
) -> npt.NDArray[np.float64]:
    """Return a metric of one user's examples, [1, *shape], or [0, *shape] if there are none.

    InvalidValueError: it is a metric of updates.
    """
    task, sums = measuring.task, sums_of(metric, measuring.task.metrics)
    if sums is None:
        raise InvalidValueError(f"metric {metric.name!r} is of updates; it must be of examples")

    def blocks() -> Blocks:
        for start in range(0, len(fields[task.targets]), _ROWS):
            rows = slice(start, start + _ROWS)
            x, y = task.given({name: torch.tensor(fields[name][rows]) for name in task.fields})
            yield measuring.seen(x, y), torch.ones((1, len(y)), dtype=torch.bool)

    values = _measured(blocks(), {metric: sums})
    return values[metric].numpy() if values else np.empty((0, *metric.shape))


def _by_user(view: Seen, users: int) -> Iterator[Seen]:
    """Yield the rows of each user."""
    tensors = (t.chunk(users) for t in view[:4])
    yield from (Seen(*parts) for parts in zip(*tensors, strict=True))


def check_metrics(
    task: Task,
    metrics: Sequence[Metric],
    clipping: Clipping,
    examples: Mapping[str, npt.NDArray[np.generic]],
) -> None:
    """Raise InvalidValueError or ModelError if a metric fails on a row of public or blank data.

    Metrics are computed on two equal rows, which detects functions that average over rows.
    """
    rows = {field: np.repeat(examples[field][:1], 2, axis=0) for field in task.fields}
    x, y = task.given({field: torch.from_numpy(column) for field, column in rows.items()})
    shapes = dict(zip(clipping.layout.names, clipping.layout.shapes, strict=True))
    measuring = Measuring(task, task.model, partial(called, task.model, {}))
    for metric in metrics:
        if shapes.get(metric.tensor) != metric.shape:
            raise InvalidValueError(
                f"metric {metric.name!r} has shape {metric.shape}; contributions have "
                f"{shapes.get(metric.tensor, 'no place')} for it"
            )
        sums = sums_of(metric, task.metrics)
        if sums is None:
            _check_update_norms(metric, clipping)
            continue
        try:
            with torch.no_grad(), generators_apart():
                values = sums.finish(sums.of_rows(measuring.seen(x, y)))  # for two users
        except FedprivError:
            raise
        except Exception as error:
            raise ModelError(f"metric {metric.name!r} cannot be computed: {error}") from error
        if values.shape != (2, *metric.shape):
            raise InvalidValueError(
                f"metric {metric.name!r} gives shape {list(values.shape)} for 2 users; it must be "
                f"{[2, *metric.shape]}"
            )


def _check_update_norms(metric: Metric, clipping: Clipping) -> None:
    if metric.shape != (len(metric.options),):
        raise InvalidValueError(
            f"metric {metric.name!r} has shape {metric.shape} for {len(metric.options)} "
            "thresholds; it must have one component for each"
        )
    group = group_of(metric.name)
    names = [g.name for g in clipping.sent if not g.name.startswith(METRIC_PREFIX)]
    if group not in names:
        raise InvalidValueError(
            f"metric {metric.name!r} is of vector group {group!r}; {known_names(group, names)}"
        )


@dataclass(frozen=True)
class SimulationOnlyDiagnostics:
    """Exact figures of one round. Publishing one breaks the guarantee of the users in the round.

    Averages are over the users who contributed: those with examples for whom nothing raised and all
    numbers are finite. They are NaN if there were none. Norms are those before clipping.
    """

    round: int  # from 0
    attempt: int  # from 0
    simulation_only_cohort_size: int  # number of drawn users
    simulation_only_contributors: int  # number of users who contributed
    # The fraction of users who were clipped, by vector group, metrics included.
    simulation_only_clipped: Mapping[str, float]
    # Average of users' mean losses at the round's parameters, in evaluation mode, unbounded.
    simulation_only_train_loss: float
    # Average of users' norms, in the units of the clipping norm, by the same groups.
    simulation_only_group_norms: Mapping[str, float]
    # Average L2 norm of users' updates of a layer, in the model's units, by layer.
    simulation_only_update_norms: Mapping[str, float]


def diagnose_users(blocks: Blocks, tensors: Updates, request: RoundRequest) -> Tensor:
    """Return a row of figures for each user, float64 [L, k], from its contribution before clipping.

    Columns: whether it contributes; mean loss; for each group, whether it was clipped; norms of
    groups; norms of layers.
    """
    groups = _clipped_groups(request)
    norms = torch.stack([*group_norms(tensors, groups).values()], 1)
    bounds = [group.clipping_norm * _ROUNDING for group in groups]
    clipped = torch.stack([norm > bound for norm, bound in zip(norms.T, bounds, strict=True)], 1)
    by_layer = torch.stack([*group_norms(tensors, _layers_of(request)).values()], 1)
    losses = _measured(blocks, {"loss": LOSS})["loss"][:, None]
    contributing = torch.isfinite(norms).all(1, keepdim=True).double()
    return torch.cat([contributing, losses, clipped.double(), norms, by_layer], 1)


def diagnose_round(
    request: RoundRequest, chunks: Sequence[npt.NDArray[np.float64]]
) -> SimulationOnlyDiagnostics:
    """Return the diagnostics of a round from the figures of its chunks, [n, k] each."""
    groups = [group.name for group in _clipped_groups(request)]
    by_layer = [layer.name for layer in _layers_of(request)]
    users = np.concatenate([np.empty((0, 2 + 2 * len(groups) + len(by_layer))), *chunks])
    rows = users[users[:, 0] > 0.0, 1:]
    # Exact sums do not depend on the users' chunks. The loss is NaN if no target counts.
    columns = [column[~np.isnan(column)] for column in rows.T]
    averages = [math.fsum(column) / len(column) if len(column) else math.nan for column in columns]
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
    """Return the groups that may be clipped, without that of contributors, which is always 1."""
    return [group for group in request.clipping.sent if group != CONTRIBUTORS.group]


def _layers_of(request: RoundRequest) -> tuple[VectorGroup, ...]:
    """Return the layers of the model as groups, in the model's units."""
    layout = Layout.of(request.parameters)
    parts = layers(layout)
    return per_layer(layout, parts, dict.fromkeys(parts, 1.0))
