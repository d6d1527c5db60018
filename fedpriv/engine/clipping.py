"""Clipping and adding up what the users of a chunk send, a few users at a time.

On a CPU `Clipping.clip_rows` clips; on a GPU the function here that does the same in torch.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.engine.task import TorchTensors
from fedpriv.engine.updates import Updates
from fedpriv.privacy.contribution import Clipping
from fedpriv.privacy.groups import VectorGroup
from fedpriv.privacy.layout import Layout

# Numbers of whole updates that exist at a time, in float64: what has left a processor's caches
# before it is clipped costs more than the arithmetic. A GPU needs more to be busy.
_NUMBERS = 2**19
_NUMBERS_CUDA = 2**24
_ALIGNED = 8  # rows begin where a vector instruction reads a whole line of the cache
_COARSE = ~((1 << 29) - 1)
_SHRINK = 1.0 - 2.0**-20


def integer_sum(
    updates: Updates, clipping: Clipping, weights: npt.NDArray[np.int64]
) -> torch.Tensor:
    """Sum of the contributions of the first users of a chunk, in steps: int64[D] on their device.

    Guarantees: what a user adds is `Clipping.contribution` of its tensors, and depends on no other
    user's.

    Args:
        updates: of at least so many users as there are weights, all of the layout but the
            indicator.
        clipping: how contributions are made.
        weights: m of each user, [C].
    """
    layout, device = clipping.layout, _device_of(updates)
    total = torch.zeros(layout.dimension, dtype=torch.float64, device=device)
    written = clipping.indicator.tensor if clipping.indicator else None
    for lanes, rows in _rows(updates, layout, len(weights), written):
        if device.type == "cpu":
            clipping.clip_rows(rows.numpy(), weights[lanes])
        else:
            clip_rows(rows, clipping, weights[lanes])
        total += rows[0] if len(rows) == 1 else rows.sum(0)
    return total.to(torch.int64)


def clip_rows(rows: torch.Tensor, clipping: Clipping, weights: npt.NDArray[np.int64]) -> None:
    """`Clipping.clip_rows` in torch, in place and without waiting for a GPU but for one answer.

    Args:
        rows: [C, D] float64.
        clipping: how contributions are made.
        weights: m of each user, [C].
    """
    written = clipping.indicator.tensor if clipping.indicator else None
    within: dict[str, torch.Tensor] = {}
    finite = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    for group, spans in zip(clipping.groups, clipping.spans, strict=True):
        if group.tensors == (written,):
            continue
        for tensor, scale in zip(group.tensors, group.scales, strict=True):
            if scale != 1.0:
                rows[:, clipping.layout.slices[tensor]] /= scale
        heavy = group.name in clipping.weighted
        units = weights if heavy else np.full_like(weights, clipping.weight_cap)
        pieces = [rows[:, span] for span in spans]
        within[group.name], sound = _clip_group(pieces, group, units, clipping.weight_cap)
        finite &= sound
    if clipping.indicator is not None:
        (step,) = (g.granularity for g in clipping.groups if g.tensors == (written,))
        said = torch.stack([within[name] for name in clipping.indicator.groups], 1).double()
        rows[:, clipping.layout.slices[clipping.indicator.tensor]] = (said - 0.5) / step
    rows.masked_fill_(~finite[:, None], 0.0)


def _clip_group(
    pieces: Sequence[torch.Tensor], group: VectorGroup, units: npt.NDArray[np.int64], whole: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fedpriv.privacy.clipping.clip_rows`: which were within the norm, and which finite."""
    step, bound = group.granularity, group.squared_bound
    norms = _squares(pieces).sqrt() / step
    finite = torch.isfinite(norms)
    norms = norms.masked_fill(~finite, 0.0)
    for piece in pieces:
        piece.masked_fill_(~finite[:, None], 0.0)
    root = math.sqrt(bound)
    within = norms <= root
    coarse = (root / norms.clamp(min=root)).view(torch.int64) & _COARSE
    allowed = norms.new_tensor([float(m * m * bound // whole**2) for m in units.tolist()])
    factors = (coarse.view(torch.float64) * norms.new_tensor(units / whole) / step)[:, None]
    for piece in pieces:
        piece.mul_(factors).trunc_()
    while bool((over := _squares(pieces) > allowed).any()):
        for piece in pieces:
            piece[over] = (piece[over] * _SHRINK).trunc()
    return within & finite, finite


def group_norms(updates: Updates, groups: Iterable[VectorGroup]) -> TorchTensors:
    """L2 norm of each user's scaled part of each group before clipping: name of group → [C].

    Float64; not finite where a component is not.

    Args:
        updates: at least those of the groups.
        groups: the groups.
    """
    asked = tuple(groups)
    names = [tensor for group in asked for tensor in group.tensors]
    layout = Layout(tuple(names), tuple(tuple(updates[name].shape[1:]) for name in names))
    lengths: dict[str, list[torch.Tensor]] = {group.name: [] for group in asked}
    for _, rows in _rows(updates, layout, len(next(iter(updates.values())))):
        for group in asked:
            parts = [
                torch.linalg.vector_norm(rows[:, layout.slices[tensor]], dim=1) / scale
                for tensor, scale in zip(group.tensors, group.scales, strict=True)
            ]
            lengths[group.name].append(torch.linalg.vector_norm(torch.stack(parts), dim=0))
    return {name: torch.cat(some) for name, some in lengths.items()}


def sent(clipping: Clipping) -> tuple[VectorGroup, ...]:
    """The groups that users send: all but that of the indicator, which follows from the others."""
    written = (clipping.indicator.tensor,) if clipping.indicator else ()
    return tuple(group for group in clipping.groups if group.tensors != written)


def lanes_as_rows(updates: Updates, lanes: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """All that so many lanes of a chunk send, as rows of float64: which lanes, and [c, D]."""
    shapes = tuple(tuple(update.shape[1:]) for update in updates.values())
    return _rows(updates, Layout(tuple(updates), shapes), lanes)


def _rows(
    updates: Updates, layout: Layout, users: int, written: str | None = None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """The tensors of a layout as rows [c, D] of float64, for a few users at a time.

    The one that is written after clipping is left as it is. All rows are in the same memory: on a
    CPU, fresh pages cost more than the arithmetic.
    """
    device = _device_of(updates)
    most = _NUMBERS_CUDA if device.type == "cuda" else _NUMBERS
    trained = len(next(iter(updates.values())))
    few = max(1, min(trained, most // max(1, layout.dimension)))
    width = -(-layout.dimension // _ALIGNED) * _ALIGNED
    memory = torch.empty((few, width), dtype=torch.float64, device=device)
    for start in range(0, users, few):
        # As many lanes as ever, whoever is in them: what is made whole is made in one shape.
        lanes = slice(start, min(start + few, trained))
        rows = memory[: lanes.stop - start, : layout.dimension]
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            if name != written:
                place = rows[:, layout.slices[name]].view(len(rows), *shape)
                place.copy_(updates[name][lanes])
        yield slice(start, min(lanes.stop, users)), rows[: users - start]


def _squares(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([torch.linalg.vecdot(piece, piece) for piece in pieces]).sum(0)


def _device_of(updates: Mapping[str, object]) -> torch.device:
    device: torch.device = next(iter(updates.values())).device  # type: ignore[attr-defined]
    return device
