"""Products of matrices, by the library that multiplies faster on this machine.

On x86 torch leaves them to MKL, which uses AVX-512 on Intel's processors alone; NumPy's OpenBLAS
uses it on AMD's too, and is twice as fast there, for one large matrix as for many small ones.

What the users of a chunk learnt, before anybody clips it.

Clipping and adding up what the users of a chunk send, a few users at a time.

On a CPU `Clipping.clip_rows` clips; on a GPU the function here that does the same in torch.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from threadpoolctl import ThreadpoolController

from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, VectorGroup

# OpenBLAS's names of what has AVX-512.
_WIDE = ("SkylakeX", "Cooperlake", "SapphireRapids")
# Multiplications in a product of two matrices that OpenBLAS takes as they lie in memory. More, and
# it rearranges them first, which for a small result costs as much as the product.
_AS_THEY_LIE = 600_000
_SMALL = 4096  # numbers in a result that costs little to add up
_ROWS = 64  # of a product at a time: more are hardly faster, and fewer need no filling up
_has_mkl: Callable[[], bool] = torch.backends.mkl.is_available


def product(
    a: torch.Tensor,
    b: torch.Tensor,
    plus: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[n, k] times [k, m], or [C, n, k] times [C, k, m]; autograd does not see it.

    Args:
        a: the left matrices.
        b: the right ones.
        plus: to be added; of a shape that broadcasts to that of the result.
        out: contiguous, where to write.
    """
    a, b = a.detach(), b.detach()
    if not _for_numpy(a) or a.shape[-1] == 1:  # NumPy is slow with products of single numbers
        return _by_torch(a, b, plus, out)
    if out is None:
        out = a.new_empty((*a.shape[:-1], b.shape[-1]))
    with np.errstate(all="ignore"):  # numbers that are not finite are clipping's to deal with
        np.matmul(_readable(a).numpy(), _readable(b).numpy(), out=out.numpy())
    return out if plus is None else out.add_(plus.detach())


def shared_product(
    rows: torch.Tensor,
    matrix: torch.Tensor,
    plus: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[n, k] times one matrix [k, m] of all rows, each row's product whatever the others are.

    A CPU's library chooses how it multiplies by the number of rows, and rounds accordingly. So it
    is given a fixed number at a time; the last piece overlaps the one before it, or is filled up.

    Args:
        rows: the rows.
        matrix: fastest if contiguous.
        plus: [m], to be added to each row.
        out: contiguous, where to write.
    """
    count, (k, m) = len(rows), matrix.shape
    if out is None:
        out = rows.new_empty((count, m))
    if rows.device.type != "cpu":
        return product(rows, matrix, plus, out=out)
    if count < _ROWS:
        filled = rows.new_zeros((1, _ROWS, k))
        filled[0, :count] = rows
        out.copy_(product(filled, matrix[None])[0, :count])
    else:
        whole = count - count % _ROWS
        for piece in (slice(0, whole), slice(count - _ROWS, count))[: 1 + (whole < count)]:
            shape = ((piece.stop - piece.start) // _ROWS, _ROWS)
            each = matrix.expand(shape[0], k, m)
            product(rows[piece].view(*shape, k), each, out=out[piece].view(*shape, m))
    return out if plus is None else out.add_(plus.detach())


def summed_outer(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Sum over rows of their outer products: [C, n, i] and [C, n, o] give [C, i, o].

    Args:
        left: the left rows.
        right: the right ones.
    """
    (lanes, rows, i), o = left.shape, right.shape[2]
    pieces = _pieces(rows, i * o) if _for_numpy(left) else 1
    left, right = (t.reshape(lanes * pieces, rows // pieces, t.shape[2]) for t in (left, right))
    products = product(left.transpose(1, 2), right)
    return products if pieces == 1 else products.view(lanes, pieces, i, o).sum(1)


@cache
def numpy_is_faster() -> bool:
    """Whether torch multiplies by MKL on another's processor, whose AVX-512 OpenBLAS uses."""
    wide = any(library.get("architecture") in _WIDE for library in _openblas().info())
    return _has_mkl() and wide and "AuthenticAMD" in _vendors()


@contextmanager
def blas_threads(count: int) -> Iterator[None]:
    """Let NumPy multiply with so many threads, in all threads of this process."""
    with _openblas().limit(limits=count):
        yield


def _for_numpy(matrices: torch.Tensor) -> bool:
    """Whether these are multiplied by NumPy."""
    return matrices.device.type == "cpu" and matrices.dtype == torch.float32 and numpy_is_faster()


def _pieces(rows: int, size: int) -> int:
    """Equal pieces, as few as can be, into which rows are cut for results of a size."""
    if size > _SMALL or rows * size <= _AS_THEY_LIE:
        return 1
    least = -(-rows * size // _AS_THEY_LIE)
    return next((n for n in range(least, 2 * least) if rows % n == 0), 1)


def _vendors() -> set[str]:
    """Who made the processors, as Linux says; nobody where there is no Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return {line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")}


@cache
def _openblas() -> ThreadpoolController:
    return ThreadpoolController().select(internal_api="openblas")


def _by_torch(
    a: torch.Tensor, b: torch.Tensor, plus: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    if plus is None:
        return torch.matmul(a, b, out=out)
    added = torch.addmm if a.dim() == 2 else torch.baddbmm
    return added(plus.detach(), a, b, out=out)


def _readable(matrices: torch.Tensor) -> torch.Tensor:
    """The same numbers as BLAS can read them; NumPy multiplies others itself, which is slow."""
    rows, columns = matrices.stride()[-2:]
    n, m = matrices.shape[-2:]
    if (columns == 1 and rows >= m) or (rows == 1 and columns >= n):
        return matrices
    return matrices.contiguous()


TorchTensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class OuterProducts:
    """A matrix of each user, Σ_r left_r right_rᵀ, held as its factors until it is asked for.

    Attributes:
        left: [C, R, out].
        right: [C, R, in].
    """

    left: torch.Tensor
    right: torch.Tensor

    def __len__(self) -> int:
        return len(self.left)

    def __getitem__(self, lanes: slice) -> torch.Tensor:
        """The matrices of some users: [c, out, in]."""
        left, right = self.left[lanes].transpose(1, 2), self.right[lanes]
        return left * right if self.left.shape[1] == 1 else product(left, right)

    @property
    def device(self) -> torch.device:
        """Where the factors are."""
        return self.left.device

    @property
    def shape(self) -> torch.Size:
        """[C, out, in]."""
        return torch.Size((len(self.left), self.left.shape[2], self.right.shape[2]))


Updates = Mapping[str, torch.Tensor | OuterProducts]
"""Name of tensor → [C, *shape], float32, whole or in factors."""


def whole(updates: Updates, lanes: slice = slice(None)) -> TorchTensors:
    """Tensors of some of the users of a chunk: [c, *shape]."""
    return {name: update[lanes] for name, update in updates.items()}


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
