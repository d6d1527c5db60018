"""Clipping and summing what the users of a chunk send: `Clipping.contribution` in torch."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fedpriv.engine.task import TorchTensors
from fedpriv.engine.updates import Updates, few_lanes
from fedpriv.privacy.contribution import Clipping
from fedpriv.privacy.groups import VectorGroup
from fedpriv.privacy.layout import Layout


@dataclass(frozen=True)
class _Run:
    """Tensors of a group that follow each other in the layout and have the same scale.

    A few long vectors cost less than many short ones, each with operations of its own.
    """

    where: slice
    scale: float


def clipped_sum(
    updates: Updates, clipping: Clipping, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum over users of their clipped contributions, in the units of the scaled tensors.

    Guarantees: each user's part of group g has a norm of at most S_g in the sum, and a user with
    any component that is not finite contributes zero to all groups.

    Args:
        updates: all of the layout but the indicator.
        clipping: how contributions are made.
        weights: [C] in [0, 1], read for weighted groups; None: all are 1.

    Returns:
        [D] float64 on the device of the updates.
    """
    device = next(iter(updates.values())).device
    total = torch.zeros(clipping.layout.dimension, dtype=torch.float64, device=device)
    groups = [(group, _runs(clipping.layout, group)) for group in sent(clipping)]
    names = [tensor for group, _ in groups for tensor in group.tensors]
    for lanes, vectors in _in_float64({n: updates[n] for n in names}, clipping.layout):
        _add_clipped(total, vectors, clipping, groups, None if weights is None else weights[lanes])
    return total


def _add_clipped(
    total: torch.Tensor,
    vectors: torch.Tensor,
    clipping: Clipping,
    groups: Sequence[tuple[VectorGroup, Sequence[_Run]]],
    weights: torch.Tensor | None,
) -> None:
    """Add what some users contribute to total [D]; their vectors [C, D] may be written to."""
    norms = [_norms(vectors, runs) for _, runs in groups]
    # In float64 the squares of finite float32 numbers cannot overflow: not finite means NaN or inf.
    finite = torch.isfinite(torch.cat(norms)).all(0)
    if finite.is_cuda or not bool(finite.all()):  # asking a GPU would mean to wait for it
        vectors.masked_fill_(~finite[:, None], 0.0)
    # Squares and roots of D terms are off by less than this share of the norm.
    margin = 1.0 - (clipping.layout.dimension + 16) * 2.0**-52
    whole: TorchTensors = {}
    for (group, runs), norm in zip(groups, norms, strict=True):
        factors = (group.clipping_norm * margin / _length(norm, runs)).clamp(max=1.0)
        whole[group.name] = factors == 1.0
        factors = torch.where(finite, factors, 0.0)
        if weights is not None and group.name in clipping.weighted:
            factors = factors * weights.to(factors)
        for run in runs:
            total[run.where].addmv_(vectors[:, run.where].t(), factors / run.scale)
    if clipping.indicator is not None:
        total[clipping.layout.slices[clipping.indicator.tensor]] += _halves(
            [whole[name] for name in clipping.indicator.groups], finite
        )


def group_norms(updates: Updates, groups: Iterable[VectorGroup]) -> TorchTensors:
    """L2 norm of each user's scaled part of each group before clipping: name of group → [C].

    Float64; not finite where a component is not.

    Args:
        updates: at least those of the groups.
        groups: the groups.
    """
    asked = tuple(groups)
    names = tuple(tensor for group in asked for tensor in group.tensors)
    layout = Layout(names, tuple(tuple(updates[name].shape[1:]) for name in names))
    lengths: dict[str, list[torch.Tensor]] = {group.name: [] for group in asked}
    runs = {group.name: _runs(layout, group) for group in asked}
    for _, vectors in _in_float64({name: updates[name] for name in names}, layout):
        for name, parts in lengths.items():
            parts.append(_length(_norms(vectors, runs[name]), runs[name]))
    return {name: torch.cat(parts) for name, parts in lengths.items()}


def sent(clipping: Clipping) -> tuple[VectorGroup, ...]:
    """The groups that users send: all but that of the indicator, which follows from the others."""
    written = (clipping.indicator.tensor,) if clipping.indicator else ()
    return tuple(group for group in clipping.groups if group.tensors != written)


def _runs(layout: Layout, group: VectorGroup) -> list[_Run]:
    """A group's place in the vectors of a layout."""
    runs: list[_Run] = []
    for tensor, scale in zip(group.tensors, group.scales, strict=True):
        place = layout.slices[tensor]
        if runs and (runs[-1].where.stop, runs[-1].scale) == (place.start, scale):
            place = slice(runs.pop().where.start, place.stop)
        runs.append(_Run(place, scale))
    return runs


def _norms(vectors: torch.Tensor, runs: Sequence[_Run]) -> torch.Tensor:
    """Norms of runs of each user's vector, before they are scaled: [runs, C]."""
    return torch.stack([torch.linalg.vector_norm(vectors[:, run.where], dim=1) for run in runs])


def _length(norms: torch.Tensor, runs: Sequence[_Run]) -> torch.Tensor:
    """Norms [C] of a group from those of its runs [runs, C]."""
    scaled: list[torch.Tensor] = [norm / run.scale for norm, run in zip(norms, runs, strict=True)]
    if len(scaled) == 1:
        return scaled[0]
    length: torch.Tensor = torch.linalg.vector_norm(torch.stack(scaled), dim=0)
    return length


def _halves(whole: Sequence[torch.Tensor], finite: torch.Tensor) -> torch.Tensor:
    """Sum over users of ±1/2, + where a group was not clipped: [groups of the indicator]."""
    return torch.where(finite, torch.stack(list(whole)).double() - 0.5, 0.0).sum(1)


def _in_float64(updates: Updates, layout: Layout) -> Iterator[tuple[slice, torch.Tensor]]:
    """A few users at a time: which, and their vectors [C, D] in the order of a layout.

    All are in the same memory: on a CPU, fresh pages cost more than the arithmetic. What the layout
    has beyond the updates holds anything, and may not be read.
    """
    places: dict[str, torch.Tensor] = {}
    buffer = torch.empty(0)
    for lanes in few_lanes(updates):
        count = lanes.stop - lanes.start
        if not places:  # later ones are not more
            device = next(iter(updates.values())).device
            buffer = torch.empty((count, layout.dimension), dtype=torch.float64, device=device)
            for name, update in updates.items():
                part = buffer[:, layout.slices[name]]
                places[name] = part.view(count, *update.shape[1:])
        for name, place in places.items():
            place[:count].copy_(updates[name][lanes])
        yield lanes, buffer[:count]
