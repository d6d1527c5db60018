"""Clipping and summing what the users of a chunk send: `Clipping.contribution` in torch."""

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch

from fedpriv.engine.task import TorchTensors
from fedpriv.engine.updates import Updates, few_lanes
from fedpriv.privacy.contribution import Clipping
from fedpriv.privacy.groups import VectorGroup


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
    for lanes, tensors in _in_float64(updates):
        _add_clipped(total, tensors, clipping, None if weights is None else weights[lanes])
    return total


def _add_clipped(
    total: torch.Tensor, tensors: TorchTensors, clipping: Clipping, weights: torch.Tensor | None
) -> None:
    """Add what some users contribute to total [D]; their tensors [C, d] may be written to."""
    layout = clipping.layout
    norms = {name: torch.linalg.vector_norm(lane, dim=1) for name, lane in tensors.items()}
    # In float64 the squares of finite float32 numbers cannot overflow: not finite means NaN or inf.
    finite = torch.isfinite(torch.stack(list(norms.values()))).all(0)
    if finite.is_cuda or not bool(finite.all()):  # asking a GPU would mean to wait for it
        for lane in tensors.values():
            lane.masked_fill_(~finite[:, None], 0.0)
    lengths = _lengths(norms, sent(clipping))
    # Squares and roots of D terms are off by less than this share of the norm.
    margin = 1.0 - (layout.dimension + 16) * 2.0**-52
    whole: TorchTensors = {}
    for group in sent(clipping):
        factors = (group.clipping_norm * margin / lengths[group.name]).clamp(max=1.0)
        whole[group.name] = factors == 1.0
        factors = torch.where(finite, factors, 0.0)
        if weights is not None and group.name in clipping.weighted:
            factors = factors * weights.to(factors)
        for tensor, scale in zip(group.tensors, group.scales, strict=True):
            total[layout.slices[tensor]].addmv_(tensors[tensor].t(), factors / scale)
    if clipping.indicator is not None:
        total[layout.slices[clipping.indicator.tensor]] += _halves(
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
    named = {tensor for group in asked for tensor in group.tensors}
    norms: dict[str, list[torch.Tensor]] = {name: [] for name in named}
    for _, tensors in _in_float64({name: updates[name] for name in updates if name in named}):
        for name, lane in tensors.items():
            norms[name].append(torch.linalg.vector_norm(lane, dim=1))
    return _lengths({name: torch.cat(parts) for name, parts in norms.items()}, asked)


def sent(clipping: Clipping) -> tuple[VectorGroup, ...]:
    """The groups that users send: all but that of the indicator, which follows from the others."""
    written = (clipping.indicator.tensor,) if clipping.indicator else ()
    return tuple(group for group in clipping.groups if group.tensors != written)


def _lengths(norms: TorchTensors, groups: Iterable[VectorGroup]) -> TorchTensors:
    """Norms [C] of groups from the norms [C] of their tensors."""
    lengths: TorchTensors = {}
    for group in groups:
        scaled = [norms[t] / scale for t, scale in zip(group.tensors, group.scales, strict=True)]
        lengths[group.name] = torch.linalg.vector_norm(torch.stack(scaled), dim=0)
    return lengths


def _halves(whole: Sequence[torch.Tensor], finite: torch.Tensor) -> torch.Tensor:
    """Sum over users of ±1/2, + where a group was not clipped: [groups of the indicator]."""
    return torch.where(finite, torch.stack(list(whole)).double() - 0.5, 0.0).sum(1)


def _in_float64(updates: Updates) -> Iterator[tuple[slice, TorchTensors]]:
    """A few users at a time: which, and their tensors as [C, d].

    All are in the same memory: on a CPU, fresh pages cost more than the arithmetic.
    """
    buffer = torch.empty((0, 0), dtype=torch.float64, device=next(iter(updates.values())).device)
    for lanes, tensors in few_lanes(updates):
        count = len(next(iter(tensors.values())))
        widths = [prod(tensor.shape[1:]) for tensor in tensors.values()]
        if not len(buffer):
            buffer = buffer.new_empty((count, sum(widths)))
        parts = torch.split(buffer[:count], widths, dim=1)
        yield (
            lanes,
            {
                name: _filled(part, tensor)
                for part, (name, tensor) in zip(parts, tensors.items(), strict=True)
            },
        )


def _filled(part: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Part [C, d] of a buffer, with the numbers of a tensor [C, *shape] in their order."""
    part.view(tensor.shape).copy_(tensor)
    return part
