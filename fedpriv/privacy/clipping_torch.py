"""The clipping of `fedpriv.privacy.clipping`, batched, for updates that are torch tensors.

On a CPU, rows of users are lent to `Clipping.clip_rows`, the reference; on a GPU `clip_rows` here
does the same in torch. Both give the same integers (`tests/engine/test_clipping.py`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.privacy.clipping import COARSE, SHRINK, Clipping
from fedpriv.privacy.layout import Layout, VectorGroup

TorchTensors = dict[str, torch.Tensor]


class BatchedTensor(Protocol):
    """A tensor of each of C users, [C, *shape], in memory or made when it is asked for."""

    def __len__(self) -> int:
        """C."""

    def __getitem__(self, users: slice, /) -> torch.Tensor:
        """The tensors of some users: [c, *shape]."""

    @property
    def shape(self) -> torch.Size:
        """[C, *shape]."""

    @property
    def device(self) -> torch.device:
        """Where they are."""


Updates = Mapping[str, BatchedTensor]
"""Name of tensor → [C, *shape], float32: what the users of a chunk learnt, before clipping."""

# Numbers of updates in float64 at a time: what has left a processor's caches before it is clipped
# costs more than the arithmetic. A GPU needs more to be busy.
_NUMBERS = 2**19
_NUMBERS_CUDA = 2**24
_ALIGNED = 8  # rows begin where a vector instruction reads a whole cache line


def whole(updates: Updates, lanes: slice = slice(None)) -> TorchTensors:
    """Tensors of some users of a chunk: [c, *shape]."""
    return {name: update[lanes] for name, update in updates.items()}


def integer_sum(
    updates: Updates, clipping: Clipping, weights: npt.NDArray[np.int64]
) -> torch.Tensor:
    """Sum of the contributions of the first users of a chunk, in steps: int64[D] on their device.

    Guarantees: what a user adds is `Clipping.contribution` of its tensors, and depends on no other
    user's.

    Args:
        updates: of at least as many users as there are weights; all tensors of the layout but the
            indicator.
        clipping: how users are clipped.
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
    """`Clipping.clip_rows` in torch: in place, waiting for a GPU only to learn when to stop.

    Args:
        rows: [C, D] float64.
        clipping: how users are clipped.
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
    coarse = (root / norms.clamp(min=root)).view(torch.int64) & COARSE
    allowed = norms.new_tensor([float(m * m * bound // whole**2) for m in units.tolist()])
    factors = (coarse.view(torch.float64) * norms.new_tensor(units / whole) / step)[:, None]
    for piece in pieces:
        piece.mul_(factors).trunc_()
    while bool((over := _squares(pieces) > allowed).any()):
        for piece in pieces:
            piece[over] = (piece[over] * SHRINK).trunc()
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
    """The groups that users send: all but the indicator's, which follows from the others."""
    written = (clipping.indicator.tensor,) if clipping.indicator else ()
    return tuple(group for group in clipping.groups if group.tensors != written)


def lanes_as_rows(updates: Updates, lanes: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """All that the first lanes of a chunk send, as rows of float64: which lanes, and [c, D]."""
    shapes = tuple(tuple(update.shape[1:]) for update in updates.values())
    return _rows(updates, Layout(tuple(updates), shapes), lanes)


def _rows(
    updates: Updates, layout: Layout, users: int, written: str | None = None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """The tensors of a layout as rows [c, D] of float64, for a few users at a time.

    The tensor that is written after clipping is left as it is. All rows are in the same memory: on
    a CPU, fresh pages cost more than the arithmetic.
    """
    device = _device_of(updates)
    most = _NUMBERS_CUDA if device.type == "cuda" else _NUMBERS
    trained = len(next(iter(updates.values())))
    few = max(1, min(trained, most // max(1, layout.dimension)))
    width = -(-layout.dimension // _ALIGNED) * _ALIGNED
    memory = torch.empty((few, width), dtype=torch.float64, device=device)
    for start in range(0, users, few):
        # The number of lanes does not depend on who is in them: factors are multiplied in one
        # shape, so that a user's bits do not depend on how many others there are.
        lanes = slice(start, min(start + few, trained))
        rows = memory[: lanes.stop - start, : layout.dimension]
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            if name != written:
                place = rows[:, layout.slices[name]].view(len(rows), *shape)
                place.copy_(updates[name][lanes])
        yield slice(start, min(lanes.stop, users)), rows[: users - start]


def _squares(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([torch.linalg.vecdot(piece, piece) for piece in pieces]).sum(0)


def _device_of(updates: Updates) -> torch.device:
    return next(iter(updates.values())).device
