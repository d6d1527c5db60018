"""Products of matrices, by the library that multiplies faster on this machine.

On x86 torch leaves them to MKL, which uses AVX-512 on Intel's processors only; NumPy's OpenBLAS
also uses it on AMD's and is twice as fast there, for one large matrix as for many small ones.

A matrix's product must not depend on its place among others. OpenBLAS copies matrices to where it
wants them; MKL rounds differently where rows do not begin at multiples of 16 bytes, so it is given
none of these.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch.nn import functional

# OpenBLAS's names of what has AVX-512.
_WIDE = ("SkylakeX", "Cooperlake", "SapphireRapids")
# Multiplications in a product of two matrices that OpenBLAS takes as they lie in memory. More, and
# it rearranges them first, which for a small result costs as much as the product.
_AS_THEY_LIE = 600_000
_SMALL = 4096  # numbers in a result that costs little to add up
_ROWS = 64  # of a product at a time: more are hardly faster, and fewer need no filling up
_ALIGNED = 4  # float32 numbers in 16 bytes
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
    k, m = b.shape[-2:]
    if a.device.type != "cpu" or a.dim() == 2:
        found = torch.matmul(a, b, out=out)
    else:
        # Padding is of zeros, which add nothing to a sum.
        found = torch.bmm(_aligned(a, -k % _ALIGNED), _aligned(b, -m % _ALIGNED, -k % _ALIGNED))
        found = found[:, :, :m] if out is None else out.copy_(found[:, :, :m])
    return found if plus is None else found.add_(plus.detach())


def _aligned(matrices: torch.Tensor, more_columns: int, more_rows: int = 0) -> torch.Tensor:
    """The matrices with so many more columns and rows of zeros, and all their rows aligned."""
    if more_columns or more_rows:
        return functional.pad(matrices, (0, more_columns, 0, more_rows))
    apart, rows, columns = matrices.stride()
    if (rows == 1 and columns % _ALIGNED) or (columns == 1 and rows % _ALIGNED):
        return matrices.clone(memory_format=torch.contiguous_format)
    if apart % _ALIGNED or matrices.data_ptr() % (_ALIGNED * matrices.element_size()):
        # Whether rows or columns lie together also decides how they are multiplied, so that stays.
        return matrices.mT.clone().mT if rows == 1 else matrices.clone()
    return matrices


def _readable(matrices: torch.Tensor) -> torch.Tensor:
    """The same numbers as BLAS can read them; NumPy multiplies others itself, which is slow."""
    rows, columns = matrices.stride()[-2:]
    n, m = matrices.shape[-2:]
    if (columns == 1 and rows >= m) or (rows == 1 and columns >= n):
        return matrices
    return matrices.contiguous()


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
