"""Metrics that users report beside their updates, and what only a simulation may know.

All metrics are measured at the round's initial parameters, in evaluation mode, on all of a user's
examples that count, `max_examples` of them at most, however often it trains on each; loss, accuracy
and own metrics on those of its targets that the task does not ignore. A user without examples
contributes nothing, and so does one for whom a metric raises or is not finite; it then does not
contribute an update either.

`SimulationOnlyDiagnostics` are true figures, which are not private: they never enter a partial sum.
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

from fedpriv.engine.arithmetic import generator_apart
from fedpriv.engine.task import Inputs, RunningNorm, Task, called, running_norms
from fedpriv.errors import FedprivError, InvalidValueError, ModelError, known_names
from fedpriv.measures.figures import LOSS, Seen, Sums
from fedpriv.measures.metrics import group_of, sums_of
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.clipping_torch import TorchTensors, Updates, rows_of
from fedpriv.privacy.gaussian_mechanism import CONTRIBUTORS, METRIC_PREFIX, Metric
from fedpriv.privacy.layout import Layout, VectorGroup, layers, per_layer
from fedpriv.training.request import RoundRequest

_ROWS = 2_000  # of one user that are measured at once
_ROUNDING = 1.0 + 2.0**-20  # of float32: a metric at its bound is not clipped


@dataclass(frozen=True)
class Measuring:
    """A model at the parameters of a round, in evaluation mode."""

    task: Task
    model: nn.Module
    run: Callable[[Inputs], Tensor]  # its outputs, whose hooks see what its layers are given

    def seen(self, x: Inputs, y: Tensor) -> Seen:
        """Evaluate rows, [n, …]."""
        moments: dict[str, list[Tensor]] = {}
        with ExitStack() as hooks:
            for name, norm in running_norms(self.model).items():
                hook = partial(_record_moments, moments.setdefault(name, []))
                hooks.enter_context(norm.register_forward_pre_hook(hook))
            return self.task.seen(self.run(x), y, moments)


def _record_moments(calls: list[Tensor], layer: nn.Module, inputs: tuple[Tensor]) -> None:
    """Per example the means of x̂ over positions, then those of x̂² − 1: [n, 2·channels]."""
    x = cast(RunningNorm, layer).standardised(inputs[0])
    x = x.reshape(*x.shape[:2], -1)
    calls.append(torch.cat([x.mean(2), x.square().mean(2) - 1.0], 1))


Blocks = Iterable[tuple[Seen, Tensor]]
"""Rows of L users, the same number of each, one user after another, and which count, [L, n]."""


def user_metrics(
    task: Task,
    blocks: Blocks,
    metrics: Sequence[Metric],
    updates: Updates,
    groups: Sequence[VectorGroup],
) -> TorchTensors:
    """What users report beside updates: name of tensor → value − centre, float32 [L, *shape]."""
    sums = {m: sums_of(m, task.metrics) for m in metrics}
    apart = {m for m in metrics if m.name in task.metrics}
    values = _measured(blocks, {m: each for m, each in sums.items() if each}, apart)
    for one in metrics:
        if one not in values:
            of = [group for group in groups if group.name == group_of(one.name)]
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


Key = TypeVar("Key")


@torch.no_grad()
def _measured(
    blocks: Blocks, sums: Mapping[Key, Sums], apart: Collection[Key] = ()
) -> dict[Key, Tensor]:
    """What is computed from rows of each user: float64 [L, *shape] each.

    Those `apart` are the task's own functions, which may mix the rows that they are given.
    """
    totals = dict[Key, Tensor]()
    for seen, exists in blocks if sums else ():
        for key, each in sums.items():
            parts = _by_user(seen, len(exists)) if key in apart else [seen]
            rows = torch.cat([each.of_rows(part) for part in parts])
            rows = torch.where(exists.reshape(-1, 1), rows, 0.0).view(*exists.shape, -1).sum(1)
            totals[key] = totals[key] + rows if key in totals else rows
    return {key: sums[key].finish(total) for key, total in totals.items()}


@torch.no_grad()
def mean_metric(
    measuring: Measuring, fields: Mapping[str, npt.NDArray[np.generic]], metric: Metric
) -> npt.NDArray[np.float64]:
    """A metric of the examples of one user: [1, *shape], or [0, *shape] if there are none.

    An `InvalidValueError` says that it is of updates.
    """
    task, sums = measuring.task, sums_of(metric, measuring.task.metrics)
    if sums is None:
        raise InvalidValueError(f"metric {metric.name!r} is of updates; it must be of examples")

    def blocks() -> Blocks:
        for start in range(0, len(fields[task.targets]), _ROWS):
            rows = slice(start, start + _ROWS)
            x, y = task.given({name: torch.tensor(fields[name][rows]) for name in task.fields})
            yield measuring.seen(x, y), torch.ones((1, len(y)), dtype=torch.bool)

    found = _measured(blocks(), {metric: sums})
    return found[metric].numpy() if found else np.empty((0, *metric.shape))


def _by_user(seen: Seen, users: int) -> Iterator[Seen]:
    """Rows of each of the users."""
    parts = (t.chunk(users) for t in seen[:4])
    yield from (Seen(*each) for each in zip(*parts, strict=True))


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
    measuring = Measuring(task, task.model, partial(called, task.model, {}))
    for one in metrics:
        if shapes.get(one.tensor) != one.shape:
            raise InvalidValueError(
                f"metric {one.name!r} has shape {one.shape}; contributions have "
                f"{shapes.get(one.tensor, 'no place')} for it"
            )
        sums = sums_of(one, task.metrics)
        if sums is None:
            _check_update_norms(one, clipping)
            continue
        try:
            with torch.no_grad(), generator_apart():
                found = sums.finish(sums.of_rows(measuring.seen(x, y)))  # of a user a row
        except FedprivError:
            raise
        except Exception as error:
            raise ModelError(f"metric {one.name!r} cannot be computed: {error}") from error
        if found.shape != (2, *one.shape):
            raise InvalidValueError(
                f"metric {one.name!r} gives shape {list(found.shape)} for 2 users; it must be "
                f"{[2, *one.shape]}"
            )


def _check_update_norms(one: Metric, clipping: Clipping) -> None:
    if one.shape != (len(one.options),):
        raise InvalidValueError(
            f"metric {one.name!r} has shape {one.shape} for {len(one.options)} thresholds; it "
            "must have one component for each"
        )
    group = group_of(one.name)
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


def diagnose_users(blocks: Blocks, tensors: Updates, request: RoundRequest) -> Tensor:
    """A row of figures for each user, [L, k], from what it sends before clipping: float64.

    Columns: whether it contributes; mean loss; per group whether it was clipped; norms of groups;
    norms of layers.
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
