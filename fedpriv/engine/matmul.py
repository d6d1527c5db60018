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
from torch import Tensor
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


def product(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """[n, k] times [k, m], or [C, n, k] times [C, k, m], in `out`, contiguous, if it is given.

    Autograd does not see it.
    """
    a, b = a.detach(), b.detach()
    if not _for_numpy(a) or a.shape[-1] == 1:  # NumPy is slow with products of single numbers
        return _by_torch(a, b, out)
    if out is None:
        out = a.new_empty((*a.shape[:-1], b.shape[-1]))
    with np.errstate(all="ignore"):  # numbers that are not finite are clipping's to deal with
        np.matmul(_readable(a).numpy(), _readable(b).numpy(), out=out.numpy())
    return out


def shared_product(rows: Tensor, matrix: Tensor, *, out: Tensor) -> None:
    """[n, k] times one matrix [k, m] of all rows, into `out`, contiguous.

    A row's product does not depend on the other rows. A CPU's library chooses how it multiplies by
    the number of rows, and rounds accordingly. So it is given a fixed number at a time; the last
    piece overlaps the one before it, or is filled up. Fastest if the matrix is contiguous.
    """
    count, (k, m) = len(rows), matrix.shape
    if rows.device.type != "cpu":
        product(rows, matrix, out=out)
    elif count < _ROWS:
        filled = rows.new_zeros((1, _ROWS, k))
        filled[0, :count] = rows
        out.copy_(product(filled, matrix[None])[0, :count])
    else:
        whole = count - count % _ROWS
        for piece in (slice(0, whole), slice(count - _ROWS, count))[: 1 + (whole < count)]:
            shape = ((piece.stop - piece.start) // _ROWS, _ROWS)
            each = matrix.expand(shape[0], k, m)
            product(rows[piece].view(*shape, k), each, out=out[piece].view(*shape, m))


def summed_outer(left: Tensor, right: Tensor) -> Tensor:
    """Sum over rows of their outer products: [C, n, i] and [C, n, o] give [C, i, o]."""
    (lanes, rows, i), o = left.shape, right.shape[2]
    pieces = _pieces(rows, i * o) if _for_numpy(left) else 1
    left, right = (t.reshape(lanes * pieces, rows // pieces, t.shape[2]) for t in (left, right))
    products = product(left.transpose(1, 2), right)
    return products if pieces == 1 else products.view(lanes, pieces, i, o).sum(1)


@cache
def numpy_is_faster() -> bool:
    """Whether torch multiplies by MKL on an AMD processor, whose AVX-512 OpenBLAS uses."""
    wide = any(library.get("architecture") in _WIDE for library in _openblas().info())
    processors = Path("/proc/cpuinfo")  # on Linux
    by_amd = processors.exists() and "AuthenticAMD" in processors.read_text(errors="replace")
    return wide and by_amd and _has_mkl()


@contextmanager
def blas_threads(count: int) -> Iterator[None]:
    """Let NumPy multiply with so many threads, in all threads of this process."""
    with _openblas().limit(limits=count):
        yield


def _for_numpy(matrices: Tensor) -> bool:
    return matrices.device.type == "cpu" and matrices.dtype == torch.float32 and numpy_is_faster()


def _pieces(rows: int, size: int) -> int:
    """Equal pieces, as few as can be, into which rows are cut for results of a size."""
    if size > _SMALL or rows * size <= _AS_THEY_LIE:
        return 1
    least = -(-rows * size // _AS_THEY_LIE)
    return next((n for n in range(least, 2 * least) if rows % n == 0), 1)


@cache
def _openblas() -> ThreadpoolController:
    return ThreadpoolController().select(internal_api="openblas")


def _by_torch(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    if a.device.type != "cpu" or a.dim() == 2:
        return torch.matmul(a, b, out=out)
    # Padding is of zeros, which add nothing to a sum.
    k, m = b.shape[-2:]
    found = torch.bmm(_aligned(a, -k % _ALIGNED), _aligned(b, -m % _ALIGNED, -k % _ALIGNED))
    return found[:, :, :m] if out is None else out.copy_(found[:, :, :m])


def _aligned(matrices: Tensor, more_columns: int, more_rows: int = 0) -> Tensor:
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


def _readable(matrices: Tensor) -> Tensor:
    """The same numbers as BLAS can read them; NumPy multiplies others itself, which is slow."""
    rows, columns = matrices.stride()[-2:]
    n, m = matrices.shape[-2:]
    if (columns == 1 and rows >= m) or (rows == 1 and columns >= n):
        return matrices
    return matrices.contiguous()


@dataclass(frozen=True)
class OuterProducts:
    """A matrix of each user, Σ_r left_r right_rᵀ, held as its factors until it is asked for."""

    left: Tensor  # [C, R, out]
    right: Tensor  # [C, R, in]

    def __len__(self) -> int:
        return len(self.left)

    def __getitem__(self, lanes: slice) -> Tensor:
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
