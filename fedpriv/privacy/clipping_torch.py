"""The clipping of `fedpriv.privacy.clipping`, batched, for updates that are torch tensors.

On a CPU, rows of users are lent to `Clipping.clip_rows`, the reference; on a GPU `clip_rows` here
does the same in torch. Both give the same integers (`tests/engine/test_clipping.py`).
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.privacy.clipping import COARSE, Clipping
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
_NUMBERS_CUDA = 2**25
_ALIGNED = 8  # rows begin where a vector instruction reads a whole cache line


def integer_sum(
    updates: Updates, clipping: Clipping, weights: npt.NDArray[np.int64]
) -> torch.Tensor:
    """Sum of the contributions of the first users of a chunk, in steps: int64 [D] on their device.

    There is a weight m for each of them, and each has all tensors of the layout but the indicator.
    Guarantees: what a user adds is `Clipping.contribution` of its tensors, and depends on no other
    user's.
    """
    layout, device = clipping.layout, _device_of(updates)
    total = torch.zeros(layout.dimension, dtype=torch.float64, device=device)
    indicator = clipping.indicator.tensor if clipping.indicator else None
    for users, rows in rows_of(updates, layout, len(weights), indicator):
        if device.type == "cpu":
            clipping.clip_rows(rows.numpy(), weights[users])
        else:
            clip_rows(rows, clipping, weights[users])
        total += rows[0] if len(rows) == 1 else rows.sum(0)
    return total.to(torch.int64)


def clip_rows(rows: torch.Tensor, clipping: Clipping, weights: npt.NDArray[np.int64]) -> None:
    """`Clipping.clip_rows` in torch: in place, and without waiting for a device."""
    within: dict[str, torch.Tensor] = {}
    sound = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    for group in clipping.sent:
        for tensor, scale in zip(group.tensors, group.scales, strict=True):
            if scale != 1.0:
                rows[:, clipping.layout.slices[tensor]] /= scale
        bound, whole = group.squared_bound, clipping.weight_cap
        limits: float | torch.Tensor = float(bound)
        shares: float | torch.Tensor = 1.0
        if group.name in clipping.weighted:
            of_each = [float(m * m * bound // whole**2) for m in weights.tolist()]
            limits, shares = (_beside(rows, each) for each in (of_each, weights / whole))
        pieces = [rows[:, span] for span in clipping.spans[group.name]]
        within[group.name], part = _clip_group(pieces, group, shares, limits)
        sound &= part
    if clipping.indicator is not None:
        step = clipping.indicator.group.granularity
        said = torch.stack([within[name] for name in clipping.indicator.groups], 1).double()
        rows[:, clipping.layout.slices[clipping.indicator.tensor]] = (said - 0.5) / step
    rows.masked_fill_(~sound[:, None], 0.0)


def _clip_group(
    pieces: Sequence[torch.Tensor],
    group: VectorGroup,
    shares: float | torch.Tensor,
    limits: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fedpriv.privacy.clipping.clip_rows`: which were within the norm, and which are sound.

    What is not sound is left as it is. Weights are shares of the whole, and limits those of
    squares: of each row, [c], or of all.
    """
    step, root = group.granularity, math.sqrt(group.squared_bound)
    norms = torch.linalg.vector_norm(_norms(pieces), dim=0) / step
    coarse = (root / norms.clamp(min=root)).view(torch.int64) & COARSE
    factors = (coarse.view(torch.float64) * shares / step)[:, None]
    for piece in pieces:
        piece.mul_(factors).trunc_()
    sound = torch.isfinite(norms) & (_squares(pieces) <= limits)
    return sound & (norms <= root), sound


def _beside(rows: torch.Tensor, numbers: Sequence[float] | npt.NDArray[np.float64]) -> torch.Tensor:
    """Numbers, one for each row, on the device of the rows, in float64: [c]."""
    memory = torch.from_numpy(np.array(numbers, np.float64))
    if rows.device.type == "cuda":
        memory = memory.pin_memory()
    return memory.to(rows.device, non_blocking=True)


def rows_of(
    updates: Updates, layout: Layout, users: int, indicator: str | None = None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """The tensors of the first users, a few users at a time: which, and their rows [c, D] float64.

    The tensor of the indicator is left as it is. All rows are in the same memory: on a CPU, fresh
    pages cost more than the arithmetic.
    """
    device = _device_of(updates)
    most = _NUMBERS_CUDA if device.type == "cuda" else _NUMBERS
    trained = len(next(iter(updates.values())))
    few = max(1, min(trained, most // max(1, layout.dimension)))
    width = -(-layout.dimension // _ALIGNED) * _ALIGNED
    memory = torch.empty((few, width), dtype=torch.float64, device=device)
    for start in range(0, users, few):
        # How many are copied does not depend on who they are: factors are multiplied in one shape,
        # so that a user's bits do not depend on how many others there are.
        copied = slice(start, min(start + few, trained))
        rows = memory[: copied.stop - start, : layout.dimension]
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            if name != indicator:
                place = rows[:, layout.slices[name]].view(len(rows), *shape)
                place.copy_(updates[name][copied])
        yield slice(start, min(copied.stop, users)), rows[: users - start]


def _norms(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([torch.linalg.vector_norm(piece, dim=1) for piece in pieces])


def _squares(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sums of squares of rows of whole numbers, exact up to 2^50, and larger where they are larger.

    Squares of rounded roots are off by less than a half, so that rounding gives the squares. This
    takes a third of the time of a product and its sum.
    """
    return _norms(pieces).square_().round_().sum(0)


def _device_of(updates: Updates) -> torch.device:
    return next(iter(updates.values())).device
