"""The clipping of `fedpriv.privacy.clipping`, batched, for updates that are torch tensors.

On a CPU, rows of users are lent to `Clipping.clip_rows`, the reference. On a GPU the kernels of
`clipping_triton` do the same, or, where there is no Triton, `clip_rows` here in torch. All give the
same integers (`tests/engine/test_clipping.py`, and on a GPU `tests/engine/test_gpu.py`).
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

# How many numbers, in float64, are clipped at a time: once they have left a processor's caches,
# fetching them costs more than the arithmetic. A GPU needs more to be busy.
_NUMBERS = 2**20
_NUMBERS_CUDA = 2**26
_MADE_AT_ONCE = 2**19  # numbers of a matrix that is made from its factors: fewer rows are slower
_ALIGNED = 8  # rows begin where a vector instruction reads a whole cache line
_PASSED_ON = 2**16  # bytes up to which CUDA sends pageable memory along with the command


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on a device; a copy to a GPU does not wait for it."""
    large = tensor.nbytes > _PASSED_ON
    if large and device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def integer_sum(
    updates: Updates, clipping: Clipping, weights: npt.NDArray[np.int64]
) -> torch.Tensor:
    """Sum of the contributions of the first users of a chunk, in steps: int64 [D] on their device.

    There is a weight m for each of them, and each has all tensors of the layout but the indicator.
    Guarantees: what a user adds is `Clipping.contribution` of its tensors, and depends on no other
    user's.
    """
    layout, device, lanes = clipping.layout, _device_of(updates), len(next(iter(updates.values())))
    if device.type == "cuda" and (kernels := kernels_on(device)):
        weighed = to_device(weighing(clipping, weights, lanes), device)
        return sum_by_kernels(kernels, updates, clipping, weighed)
    total = torch.zeros(layout.dimension, dtype=torch.float64, device=device)
    if device.type == "cpu":
        add_contributions(total.numpy(), updates, clipping, weights)
    else:  # all lanes, since the order in which norms are summed depends on their number
        indicator = clipping.indicator.tensor if clipping.indicator else None
        units = np.concatenate([weights, np.zeros(lanes - len(weights), np.int64)])
        for users, rows in rows_of(updates, layout, lanes, indicator):
            clip_rows(rows, clipping, units[users])
            total += rows[: max(0, len(weights) - users.start)].sum(0)
    return total.to(torch.int64)


def add_contributions(
    total: FloatVector, updates: Updates, clipping: Clipping, weights: npt.NDArray[np.int64]
) -> None:
    """Add `integer_sum` on a CPU to whole numbers, [D], which stay below 2^53."""
    layout = clipping.layout
    if layout.dimension > _NUMBERS:  # no user's float64 stay in the caches
        for user, weight in enumerate(weights.tolist()):
            clipping.add_contribution(total, partial(_blocks_of, updates, user), weight)
        return
    indicator = clipping.indicator.tensor if clipping.indicator else None
    for users, rows in rows_of(updates, layout, len(weights), indicator):
        clipping.clip_rows(rows.numpy(), weights[users])
        total += (rows[0] if len(rows) == 1 else rows.sum(0)).numpy()


def _blocks_of(updates: Updates, user: int, name: str) -> Iterator[npt.NDArray[np.float32]]:
    """Numbers of one user's tensor, a block at a time."""
    update = updates[name]
    made = getattr(update, "rows", None)  # a matrix of which some rows can be made at a time
    few = max(1, _MADE_AT_ONCE // update.shape[-1]) if made else 1
    places = range(0, update.shape[1] if made else 1, few)
    for place in places:
        part = made(user, slice(place, place + few)) if made else update[user : user + 1]
        numbers = part.reshape(-1).numpy()
        for first in range(0, len(numbers), MOST_IN_BLOCK):
            yield numbers[first : first + MOST_IN_BLOCK]


def weighing(clipping: Clipping, weights: npt.NDArray[np.int64], lanes: int) -> torch.Tensor:
    """What the weights of the first users mean for their lanes, float64 [1 + 2·W, L].

    The first row says whether the lane has a user. Two rows follow for each of the W weighted
    groups: the limit of the sum of squares, and the weight m/c.
    """
    rows, whole = [np.ones(len(weights))], clipping.weight_cap
    for group in clipping.sent:
        if group.name in clipping.weighted:
            bound = group.squared_bound
            limits = [float(m * m * bound // whole**2) for m in weights.tolist()]
            rows += [np.array(limits), weights / whole]
    padded = np.zeros((len(rows), lanes))
    padded[:, : len(weights)] = rows
    return torch.from_numpy(padded)


def sum_by_kernels(
    kernels: ModuleType, updates: Updates, clipping: Clipping, weighed: torch.Tensor
) -> torch.Tensor:
    """`integer_sum` by the kernels of `clipping_triton`, for lanes with what `weighing` gives."""
    layout, device = clipping.layout, _device_of(updates)
    names = [n for n in layout.names if not clipping.indicator or n != clipping.indicator.tensor]
    total = torch.zeros(layout.dimension, dtype=torch.int64, device=device)
    lanes = len(next(iter(updates.values())))
    few = _few(lanes, layout, device)
    with torch.cuda.device(device):
        for start in range(0, lanes, few):
            some = {n: updates[n][start : start + few] for n in names}
            some = {n: t.reshape(len(t), layout.sizes[n]).contiguous() for n, t in some.items()}
            _add_contributions(kernels, total, some, clipping, weighed[:, start : start + few])
    return total


def _add_contributions(
    kernels: ModuleType,
    total: torch.Tensor,
    updates: TorchTensors,
    clipping: Clipping,
    weighed: torch.Tensor,
) -> None:
    """Add what some lanes contribute, of whom all tensors but the indicator are [c, n]."""
    slices, device = clipping.layout.slices, total.device
    present, *of_weights = weighed
    sound, within, whole, each = present > 0.0, TorchTensors(), [], iter(of_weights)
    for group in clipping.sent:
        limits, shares = float(group.squared_bound), 1.0
        if group.name in clipping.weighted:
            limits, shares = next(each), next(each)
        # Scales lie in memory, as Triton takes numbers of Python for float32.
        scales = [
            None if scale == 1.0 else torch.full((), scale, dtype=torch.float64, device=device)
            for scale in group.scales
        ]
        pieces = [(updates[n], scale) for n, scale in zip(group.tensors, scales, strict=True)]
        norms = kernels.squares(pieces).sqrt_() / group.granularity
        factors = _factors(norms, group, shares)
        part = (norms < math.inf) & (kernels.squares(pieces, factors) <= limits)
        within[group.name] = norms <= math.sqrt(group.squared_bound)
        sound &= part
        whole += [
            (total[slices[n]], p, factors) for n, p in zip(group.tensors, pieces, strict=True)
        ]
    for place, piece, factors in whole:
        kernels.add_whole(place, piece, factors, sound)
    if clipping.indicator is not None:
        halves = torch.where(sound[:, None], _halves(clipping.indicator, within), 0.0)
        total[slices[clipping.indicator.tensor]] += halves.sum(0).to(torch.int64)


def _halves(indicator: Indicator, within: TorchTensors) -> torch.Tensor:
    """The indicator, in steps, from which groups were within their norms: [c, groups]."""
    said = torch.stack([within[name] for name in indicator.groups], 1).double()
    return (said - 0.5) / indicator.group.granularity


@cache
def kernels_on(device: torch.device) -> ModuleType | None:
    """The kernels of `clipping_triton`, if they run here and give what the reference gives."""
    if find_spec("triton") is None or not torch.cuda.is_available():
        return None
    rng, layout = np.random.default_rng(0), Layout(("tried",), ((10_000,),))
    clipping = Clipping(layout, flat(layout, 1.0))
    sizes = np.array([[1.0], [1e-3], [0.01]])  # of which only the first is clipped
    tried = (rng.standard_normal((3, 10_000)) * sizes).astype(np.float32)
    expected = sum(clipping.contribution({"tried": each}) for each in tried)
    try:
        from fedpriv.privacy import clipping_triton  # noqa: PLC0415

        on_device = {"tried": torch.from_numpy(tried).to(device)}
        weighed = to_device(weighing(clipping, np.ones(3, np.int64), 3), device)
        found = sum_by_kernels(clipping_triton, on_device, clipping, weighed)
        if np.array_equal(found.cpu().numpy(), expected):
            return clipping_triton
        _log.warning("kernels of Triton clip otherwise than torch, which clips in their place")
    except Exception as error:  # a compiler may be missing, for one
        _log.info("torch clips, as kernels of Triton cannot be used: %s", type(error).__name__)
    return None


def clip_rows(rows: torch.Tensor, clipping: Clipping, weights: npt.NDArray[np.int64]) -> None:
    """`Clipping.clip_rows` in torch: in place, and without waiting for a device."""
    within: dict[str, torch.Tensor] = {}
    sound = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    weighed = iter(to_device(weighing(clipping, weights, len(rows))[1:], rows.device))
    for group in clipping.sent:
        for tensor, scale in zip(group.tensors, group.scales, strict=True):
            if scale != 1.0:
                rows[:, clipping.layout.slices[tensor]] /= scale
        limits: float | torch.Tensor = float(group.squared_bound)
        shares: float | torch.Tensor = 1.0
        if group.name in clipping.weighted:
            limits, shares = next(weighed), next(weighed)
        pieces = [rows[:, span] for span in clipping.spans[group.name]]
        within[group.name], part = _clip_group(pieces, group, shares, limits)
        sound &= part
    if clipping.indicator is not None:
        place = clipping.layout.slices[clipping.indicator.tensor]
        rows[:, place] = _halves(clipping.indicator, within)
    rows.masked_fill_(~sound[:, None], 0.0)


def _clip_group(
    pieces: Sequence[torch.Tensor],
    group: VectorGroup,
    shares: float | torch.Tensor,
    limits: float | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fedpriv.privacy.clipping.clip_vectors`: which were within the norm, and which are sound.

    Rows that are not sound are left as they are. Shares are the weights m/c, and limits those of
    the sums of squares: one for each row, [c], or one for all.
    """
    step, root = group.granularity, math.sqrt(group.squared_bound)
    norms = torch.linalg.vector_norm(_norms(pieces), dim=0) / step
    factors = _factors(norms, group, shares)
    for piece in pieces:
        piece.mul_(factors[:, None]).trunc_()
    sound = torch.isfinite(norms) & (_squares(pieces) <= limits)
    return sound & (norms <= root), sound


def _factors(norms: torch.Tensor, group: VectorGroup, shares: float | torch.Tensor) -> torch.Tensor:
    """The factors that clip vectors of these norms, in steps, and count them in steps: [c]."""
    root = math.sqrt(group.squared_bound)
    coarse = (root / norms.clamp(min=root)).view(torch.int64) & COARSE
    return coarse.view(torch.float64) * shares / group.granularity


def rows_of(
    updates: Updates, layout: Layout, users: int, indicator: str | None = None
) -> Iterator[tuple[slice, torch.Tensor]]:
    """The tensors of the first users, a few users at a time: which, and their rows [c, D] float64.

    The tensor of the indicator is left as it is. All rows are in the same memory: on a CPU, fresh
    pages cost more than the arithmetic.
    """
    device, trained = _device_of(updates), len(next(iter(updates.values())))
    few = _few(trained, layout, device)
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


def _few(lanes: int, layout: Layout, device: torch.device) -> int:
    """How many lanes are clipped at a time, equally many where possible."""
    numbers = _NUMBERS_CUDA if device.type == "cuda" else _NUMBERS
    most = max(1, numbers // max(1, layout.dimension))
    return -(-lanes // -(-lanes // most))


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
