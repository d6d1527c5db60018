"""Clipping and summing what the users of a chunk send: `Clipping.contribution` in torch."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fedpriv.engine.outer_products import OuterProducts
from fedpriv.engine.task import TorchTensors
from fedpriv.engine.updates import Updates, few_lanes
from fedpriv.privacy.contribution import Clipping
from fedpriv.privacy.groups import VectorGroup
from fedpriv.privacy.layout import Layout


@dataclass(frozen=True)
class _Run:
    """Tensors of a group that follow each other in the layout and have the same scale.

    A few long vectors cost less than many short ones, each with operations of its own.

    Attributes:
        where: in vectors of whole tensors.
        place: in the layout.
        scale: of all of them.
    """

    where: slice
    place: slice
    scale: float


@dataclass(frozen=True)
class _Parts:
    """What a group consists of.

    Attributes:
        group: the group.
        runs: its tensors that are made whole.
        factored: those that stay factors: name and scale.
    """

    group: VectorGroup
    runs: Sequence[_Run]
    factored: Sequence[tuple[str, float]]

    @classmethod
    def of(cls, group: VectorGroup, layout: Layout, wholes: Layout) -> "_Parts":
        """Of a group in a layout; `wholes`: the tensors that are made whole, in its order."""
        runs: list[_Run] = []
        factored: list[tuple[str, float]] = []
        for tensor, scale in zip(group.tensors, group.scales, strict=True):
            where, place = wholes.slices.get(tensor), layout.slices[tensor]
            if where is None:
                factored.append((tensor, scale))
                continue
            if runs and (runs[-1].place.stop, runs[-1].scale) == (place.start, scale):
                before = runs.pop()
                where = slice(before.where.start, where.stop)
                place = slice(before.place.start, place.stop)
            runs.append(_Run(where, place, scale))
        return cls(group, runs, factored)

    def norms(
        self, vectors: torch.Tensor, bounds: TorchTensors, lanes: slice = slice(None)
    ) -> torch.Tensor:
        """Norm of each user's scaled part [C], from whole tensors [C, D] and norms of the others.

        In float64 the squares of finite float32 numbers cannot overflow: not finite means NaN or
        inf.
        """
        norms: list[torch.Tensor] = [
            torch.linalg.vector_norm(vectors[:, run.where], dim=1) / run.scale for run in self.runs
        ]
        norms += [bounds[name][lanes] / scale for name, scale in self.factored]
        if len(norms) == 1:
            return norms[0]
        length: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
        return length


def clipped_sum(
    updates: Updates, clipping: Clipping, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Sum over users of their clipped contributions, in the units of the scaled tensors.

    Guarantees: each user's part of group g has a norm of at most S_g in the sum, and a user with
    any component that is not finite contributes zero to all groups. Sums over users are float64, or
    float32 for matrices that stay factors; a user of these whose norm is beyond what float32 can
    add up contributes zero as well.

    Args:
        updates: all of the layout but the indicator.
        clipping: how contributions are made.
        weights: [C] in [0, 1], read for weighted groups; None: all are 1.

    Returns:
        [D] float64 on the device of the updates.
    """
    first, layout = next(iter(updates.values())), clipping.layout
    total = torch.zeros(layout.dimension, dtype=torch.float64, device=first.device)
    asked = [name for group in sent(clipping) for name in group.tensors]
    factored = _that_stay(updates, asked)
    bounds = {name: factors.norm_bounds() for name, factors in factored.items()}
    wholes = _layout(updates, [n for n in layout.names if n in asked and n not in factored])
    groups = [_Parts.of(group, layout, wholes) for group in sent(clipping)]
    kept: dict[str, list[torch.Tensor]] = {parts.group.name: [] for parts in groups}
    for lanes, vectors in _in_float64(updates, wholes, len(first), first.device):
        norms = [parts.norms(vectors, bounds, lanes) for parts in groups]
        some = None if weights is None else weights[lanes]
        for name, share in _add_clipped(total, vectors, norms, clipping, groups, some).items():
            kept[name].append(share)
    for parts in groups:
        for name, scale in parts.factored:
            multiplied = torch.cat(kept[parts.group.name])
            sums = factored[name].weighted_sum(multiplied, bounds[name])
            total[layout.slices[name]].add_(sums.flatten(), alpha=1.0 / scale)
    return total


def _add_clipped(
    total: torch.Tensor,
    vectors: torch.Tensor,
    norms: Sequence[torch.Tensor],
    clipping: Clipping,
    groups: Sequence[_Parts],
    weights: torch.Tensor | None,
) -> TorchTensors:
    """Add to total [D] what some users contribute of whole tensors [C, d], which may be written to.

    Returns:
        For each group, what its users' parts are multiplied by, [C]: zero if a user is broken.
    """
    finite = torch.isfinite(torch.stack(list(norms))).all(0)
    if finite.is_cuda or not bool(finite.all()):  # asking a GPU would mean to wait for it
        vectors.masked_fill_(~finite[:, None], 0.0)
    # Squares and roots of D terms are off by less than this share of the norm.
    margin = 1.0 - (clipping.layout.dimension + 16) * 2.0**-52
    whole: TorchTensors = {}
    multiplied: TorchTensors = {}
    for parts, norm in zip(groups, norms, strict=True):
        name = parts.group.name
        factors = (parts.group.clipping_norm * margin / norm).clamp(max=1.0)
        whole[name] = factors == 1.0
        factors = torch.where(finite, factors, 0.0)
        if weights is not None and name in clipping.weighted:
            factors = factors * weights.to(factors)
        for run in parts.runs:
            total[run.place].addmv_(vectors[:, run.where].t(), factors / run.scale)
        multiplied[name] = factors
    if clipping.indicator is not None:
        total[clipping.layout.slices[clipping.indicator.tensor]] += _halves(
            [whole[name] for name in clipping.indicator.groups], finite
        )
    return multiplied


def group_norms(updates: Updates, groups: Iterable[VectorGroup]) -> TorchTensors:
    """L2 norm of each user's scaled part of each group before clipping: name of group → [C].

    Float64; not finite where a component is not.

    Args:
        updates: at least those of the groups.
        groups: the groups.
    """
    first = next(iter(updates.values()))
    asked = tuple(groups)
    layout = _layout(updates, [tensor for group in asked for tensor in group.tensors])
    parts = [_Parts.of(group, layout, layout) for group in asked]
    lengths: dict[str, list[torch.Tensor]] = {group.name: [] for group in asked}
    for _, vectors in _in_float64(updates, layout, len(first), first.device):
        for one in parts:
            lengths[one.group.name].append(one.norms(vectors, {}))
    return {name: torch.cat(some) for name, some in lengths.items()}


def sent(clipping: Clipping) -> tuple[VectorGroup, ...]:
    """The groups that users send: all but that of the indicator, which follows from the others."""
    written = (clipping.indicator.tensor,) if clipping.indicator else ()
    return tuple(group for group in clipping.groups if group.tensors != written)


def _that_stay(updates: Updates, names: Iterable[str]) -> Mapping[str, OuterProducts]:
    """Those of the named that are clipped as factors."""
    found = {}
    for name in names:
        update = updates[name]
        if isinstance(update, OuterProducts) and update.stay_factors:
            found[name] = update
    return found


def _layout(updates: Updates, names: Sequence[str]) -> Layout:
    return Layout(tuple(names), tuple(tuple(updates[name].shape[1:]) for name in names))


def _halves(whole: Sequence[torch.Tensor], finite: torch.Tensor) -> torch.Tensor:
    """Sum over users of ±1/2, + where a group was not clipped: [groups of the indicator]."""
    return torch.where(finite, torch.stack(list(whole)).double() - 0.5, 0.0).sum(1)


def _in_float64(
    updates: Updates, layout: Layout, users: int, device: torch.device
) -> Iterator[tuple[slice, torch.Tensor]]:
    """A few users at a time: which, and their vectors [C, D] of the tensors of a layout.

    All are in the same memory: on a CPU, fresh pages cost more than the arithmetic.
    """
    named = {name: updates[name] for name in layout.names}
    buffer, places = torch.empty(0), {}
    for lanes in few_lanes(named, users):
        count = lanes.stop - lanes.start
        if lanes.start == 0:  # later ones are not more
            buffer = torch.empty((count, layout.dimension), dtype=torch.float64, device=device)
            for name, update in named.items():
                part = buffer[:, layout.slices[name]]
                places[name] = part.view(count, *update.shape[1:])
        for name, place in places.items():
            place[:count].copy_(named[name][lanes])
        yield lanes, buffer[:count]
