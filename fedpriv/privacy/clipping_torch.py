"""Batched clipping of torch tensors, equivalent to `fedpriv.privacy.clipping`.

On a CPU, the rows of several users go to `Clipping.clip_rows`, the reference. On a GPU the kernels
of `clipping_triton` do the work or, without Triton, `clip_rows` of this module. All give the same
integers (`tests/engine/test_clipping.py`, and on a GPU `tests/engine/test_gpu.py`).
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from types import ModuleType
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.privacy.clipping import COARSE, MOST_IN_BLOCK, Clipping, Indicator
from fedpriv.privacy.layout import FloatVector, Layout, VectorGroup, flat

_log = logging.getLogger(__name__)

TorchTensors = dict[str, torch.Tensor]


class BatchedTensor(Protocol):
    """One tensor per user for C users, [C, *shape], in memory or computed on access."""

    def __len__(self) -> int:
        """Return C, the number of users."""

    def __getitem__(self, users: slice, /) -> torch.Tensor:
        """Return the tensors of a slice of users: [c, *shape]."""

    @property
    def shape(self) -> torch.Size:
        """[C, *shape]."""

    @property
    def device(self) -> torch.device:
        """Device that holds the tensors."""


Updates = Mapping[str, BatchedTensor]
"""Unclipped updates of the users of a chunk: tensor name → float32 [C, *shape]."""

# Number of float64 numbers clipped at a time. Fetching numbers that have left a processor's
# caches costs more than the arithmetic; a GPU needs more numbers to be busy.
_NUMBERS = 2**20
_NUMBERS_CUDA = 2**26
_ALIGNED = 8  # rows start where a vector instruction reads a whole cache line
_PASSED_ON = 2**16  # up to this many bytes CUDA sends pageable memory along with the command


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on a device; a copy to a GPU is asynchronous."""
    is_large = tensor.nbytes > _PASSED_ON
    if is_large and device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def integer_sum(
    updates: Updates, clipping: Clipping, weights: npt.NDArray[np.int64]
) -> torch.Tensor:
    """Sum the contributions of the first users of a chunk, in steps: int64 [D] on their device.

    `weights` has one m for each of these users. `updates` has all tensors of the layout except the
    indicator. Guarantees: each user adds `Clipping.contribution` of its tensors, which does not
    depend on other users.
    """
    layout, device, lanes = clipping.layout, _device_of(updates), len(next(iter(updates.values())))
    if device.type == "cuda" and (kernels := kernels_on(device)):
        per_lane = to_device(lane_weights(clipping, weights, lanes), device)
        return sum_by_kernels(kernels, updates, clipping, per_lane)
    total = torch.zeros(layout.dimension, dtype=torch.float64, device=device)
    if device.type == "cpu":
        add_contributions(total.numpy(), updates, clipping, weights)
    else:  # all lanes, since the number of lanes determines the order of the sums in norms
        indicator = clipping.indicator.tensor if clipping.indicator else None
        units = np.concatenate([weights, np.zeros(lanes - len(weights), np.int64)])
        for users, rows in rows_of(updates, layout, lanes, indicator):
            clip_rows(rows, clipping, units[users])
            total += rows[: max(0, len(weights) - users.start)].sum(0)
    return total.to(torch.int64)


def add_contributions(
    total: FloatVector, updates: Updates, clipping: Clipping, weights: npt.NDArray[np.int64]
) -> None:
    """Add `integer_sum` to `total` on a CPU: float64 [D], whole numbers that stay below 2^53."""
    layout = clipping.layout
    if layout.dimension > _NUMBERS:  # even one user in float64 exceeds the caches
        for user, weight in enumerate(weights.tolist()):
            clipping.add_contribution(total, partial(_blocks_of, updates, user), weight)
        return
    indicator = clipping.indicator.tensor if clipping.indicator else None
    for users, rows in rows_of(updates, layout, len(weights), indicator):
        clipping.clip_rows(rows.numpy(), weights[users])
        total += (rows[0] if len(rows) == 1 else rows.sum(0)).numpy()


def _blocks_of(updates: Updates, user: int, name: str) -> Iterator[npt.NDArray[np.float32]]:
    """Yield the numbers of one user's tensor, block by block."""
    numbers = updates[name][user : user + 1].reshape(-1).numpy()
    for start in range(0, len(numbers), MOST_IN_BLOCK):
        yield numbers[start : start + MOST_IN_BLOCK]


def lane_weights(clipping: Clipping, weights: npt.NDArray[np.int64], lanes: int) -> torch.Tensor:
    """Return the weights of the first users per lane, as float64 [1 + 2·W, L].

    The first row is 1 if the lane has a user and 0 otherwise. Two rows follow for each of the W
    weighted groups: the limit on the sum of squares, and the weight m/c.
    """
    rows, cap = [np.ones(len(weights))], clipping.weight_cap
    for group in clipping.sent:
        if group.name in clipping.weighted:
            bound = group.squared_bound
            limits = [float(m * m * bound // cap**2) for m in weights.tolist()]
            rows += [np.array(limits), weights / cap]
    padded = np.zeros((len(rows), lanes))
    padded[:, : len(weights)] = rows
    return torch.from_numpy(padded)


def sum_by_kernels(
    kernels: ModuleType, updates: Updates, clipping: Clipping, per_lane: torch.Tensor
) -> torch.Tensor:
    """Compute `integer_sum` with the kernels of `clipping_triton`, from `lane_weights`."""
    layout, device = clipping.layout, _device_of(updates)
    names = [n for n in layout.names if not clipping.indicator or n != clipping.indicator.tensor]
    total = torch.zeros(layout.dimension, dtype=torch.int64, device=device)
    lanes = len(next(iter(updates.values())))
    size = _batch_size(lanes, layout, device)
    with torch.cuda.device(device):
        for start in range(0, lanes, size):
            batch = {n: updates[n][start : start + size] for n in names}
            batch = {n: t.reshape(len(t), layout.sizes[n]).contiguous() for n, t in batch.items()}
            _add_contributions(kernels, total, batch, clipping, per_lane[:, start : start + size])
    return total


def _add_contributions(
    kernels: ModuleType,
    total: torch.Tensor,
    updates: TorchTensors,
    clipping: Clipping,
    per_lane: torch.Tensor,
) -> None:
    """Add the contributions of some lanes; each tensor except the indicator is [c, n]."""
    slices, device = clipping.layout.slices, total.device
    has_user, *weight_rows = per_lane
    sound, unclipped, clipped, rows = has_user > 0.0, TorchTensors(), [], iter(weight_rows)
    for group in clipping.sent:
        limits, shares = float(group.squared_bound), 1.0
        if group.name in clipping.weighted:
            limits, shares = next(rows), next(rows)
        # Scales are tensors, since Triton treats Python numbers as float32.
        scales = [
            None if scale == 1.0 else torch.full((), scale, dtype=torch.float64, device=device)
            for scale in group.scales
        ]
        pieces = [(updates[n], scale) for n, scale in zip(group.tensors, scales, strict=True)]
        norms = kernels.squares(pieces).sqrt_() / group.granularity
        factors = _factors(norms, group, shares)
        group_sound = (norms < math.inf) & (kernels.squares(pieces, factors) <= limits)
        unclipped[group.name] = norms <= math.sqrt(group.squared_bound)
        sound &= group_sound
        clipped += [
            (total[slices[n]], p, factors) for n, p in zip(group.tensors, pieces, strict=True)
        ]
    for target, piece, factors in clipped:
        kernels.add_whole(target, piece, factors, sound)
    if clipping.indicator is not None:
        halves = torch.where(sound[:, None], _halves(clipping.indicator, unclipped), 0.0)
        total[slices[clipping.indicator.tensor]] += halves.sum(0).to(torch.int64)


def _halves(indicator: Indicator, unclipped: TorchTensors) -> torch.Tensor:
    """Return the indicator in steps from masks of the unclipped groups: [c, groups]."""
    flags = torch.stack([unclipped[name] for name in indicator.groups], 1).double()
    return (flags - 0.5) / indicator.group.granularity


@cache
def kernels_on(device: torch.device) -> ModuleType | None:
    """Return the kernels of `clipping_triton` if they run here and agree with the reference."""
    if find_spec("triton") is None or not torch.cuda.is_available():
        return None
    rng, layout = np.random.default_rng(0), Layout(("tried",), ((10_000,),))
    clipping = Clipping(layout, flat(layout, 1.0))
    sizes = np.array([[1.0], [1e-3], [0.01]])  # only the first user is clipped
    examples = (rng.standard_normal((3, 10_000)) * sizes).astype(np.float32)
    expected = sum(clipping.contribution({"tried": tensors}) for tensors in examples)
    try:
        from fedpriv.privacy import clipping_triton  # noqa: PLC0415

        on_device = {"tried": torch.from_numpy(examples).to(device)}
        per_lane = to_device(lane_weights(clipping, np.ones(3, np.int64), 3), device)
        result = sum_by_kernels(clipping_triton, on_device, clipping, per_lane)
        if np.array_equal(result.cpu().numpy(), expected):
            return clipping_triton
        _log.warning("the Triton kernels disagree with the reference, so torch clips instead")
    except Exception as error:  # for example, a compiler may be missing
        _log.info("torch clips, since the Triton kernels cannot be used: %s", type(error).__name__)
    return None


def clip_rows(rows: torch.Tensor, clipping: Clipping, weights: npt.NDArray[np.int64]) -> None:
    """Do what `Clipping.clip_rows` does, in torch: in place, without waiting for a device."""
    unclipped: dict[str, torch.Tensor] = {}
    sound = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    per_lane = iter(to_device(lane_weights(clipping, weights, len(rows))[1:], rows.device))
    for group in clipping.sent:
        for tensor, scale in zip(group.tensors, group.scales, strict=True):
            if scale != 1.0:
                rows[:, clipping.layout.slices[tensor]] /= scale
        limits: float | torch.Tensor = float(group.squared_bound)
        shares: float | torch.Tensor = 1.0
        if group.name in clipping.weighted:
            limits, shares = next(per_lane), next(per_lane)
        pieces = [rows[:, span] for span in clipping.spans[group.name]]
        unclipped[group.name], group_sound = _clip_group(pieces, group, shares, limits)
        sound &= group_sound
    if clipping.indicator is not None:
        span = clipping.layout.slices[clipping.indicator.tensor]
        rows[:, span] = _halves(clipping.indicator, unclipped)
    rows.masked_fill_(~sound[:, None], 0.0)


def _clip_group(
    pieces: Sequence[torch.Tensor],
    group: VectorGroup,
    shares: float | torch.Tensor,
    limits: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Clip like `fedpriv.privacy.clipping.clip_vectors` and return masks: within norm, sound.

    Unlike that function, it does not zero unsound rows. `shares` are the weights m/c and `limits`
    bound the sums of squares: one for each row, [c], or one for all.
    """
    step, root = group.granularity, math.sqrt(group.squared_bound)
    norms = torch.linalg.vector_norm(_norms(pieces), dim=0) / step
    factors = _factors(norms, group, shares)
    for piece in pieces:
        piece.mul_(factors[:, None]).trunc_()
    sound = torch.isfinite(norms) & (_squares(pieces) <= limits)
    return sound & (norms <= root), sound


def _factors(norms: torch.Tensor, group: VectorGroup, shares: float | torch.Tensor) -> torch.Tensor:
    """Return the factors that clip vectors of these norms in steps and convert them to steps."""
    root = math.sqrt(group.squared_bound)
    coarse = (root / norms.clamp(min=root)).view(torch.int64) & COARSE
    return coarse.view(torch.float64) * shares / group.granularity


def rows_of(
    updates: Updates, layout: Layout, users: int, indicator: str | None = None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the tensors of the first users in batches: a slice of users, and float64 [c, D].

    The indicator's tensor is not written. All batches share the same memory: on a CPU, fresh pages
    cost more than the arithmetic.
    """
    device, lanes = _device_of(updates), len(next(iter(updates.values())))
    size = _batch_size(lanes, layout, device)
    width = -(-layout.dimension // _ALIGNED) * _ALIGNED
    memory = torch.empty((size, width), dtype=torch.float64, device=device)
    for start in range(0, users, size):
        # The number of copied lanes is independent of the number of users: factors are multiplied
        # in one shape, so that a user's bits do not depend on the number of other users.
        copied = slice(start, min(start + size, lanes))
        rows = memory[: copied.stop - start, : layout.dimension]
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            if name != indicator:
                target = rows[:, layout.slices[name]].view(len(rows), *shape)
                target.copy_(updates[name][copied])
        yield slice(start, min(copied.stop, users)), rows[: users - start]


def _batch_size(lanes: int, layout: Layout, device: torch.device) -> int:
    """Return the number of lanes to clip at a time; it makes batches as equal as possible."""
    numbers = _NUMBERS_CUDA if device.type == "cuda" else _NUMBERS
    largest = max(1, numbers // max(1, layout.dimension))
    return -(-lanes // -(-lanes // largest))


def _norms(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([torch.linalg.vector_norm(piece, dim=1) for piece in pieces])


def _squares(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return each row's sum of squared whole numbers, exactly up to 2^50.

    If the true sum is above 2^50, the result is above 2^50 too. Squares of rounded roots are off by
    less than a half, so rounding gives the exact squares. This takes a third of the time of a
    product and its sum.
    """
    return _norms(pieces).square_().round_().sum(0)


def _device_of(updates: Updates) -> torch.device:
    return next(iter(updates.values())).device
