"""Matrices of many users as sums of outer products, which are clipped and added up as such."""

import os
from dataclasses import dataclass

import torch

from fedpriv.engine.matmul import product

_ROUNDING = 2.0**-24  # of float32, relative
_UNDERFLOW = 2.0**-149  # at most so much is lost of what is too small for float32
_LONGEST = 2**13  # sums of more terms could be off by more than 0.1%
_LARGEST = 1e30  # of rows' norms multiplied; sums over many users are finite
# What libraries under torch read from the environment, by values that ask for nothing coarser.
_EXACT = {
    "NVIDIA_TF32_OVERRIDE": "0",
    "ONEDNN_DEFAULT_FPMATH_MODE": "STRICT",
    "DNNL_DEFAULT_FPMATH_MODE": "STRICT",
}
_PASSES = 20  # multiplications in the time that clipping takes for a number of a whole matrix


@dataclass(frozen=True)
class OuterProducts:
    """A matrix of each user, Σ_r left_r right_rᵀ, held as its factors.

    Attributes:
        left: [C, R, out].
        right: [C, R, in].
        products: right_q · right_r for q ≥ r, as float32 gives them, if they are known; [C, R, R],
            of which the rest may be anything.
    """

    left: torch.Tensor
    right: torch.Tensor
    products: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.left)

    def __getitem__(self, lanes: slice) -> torch.Tensor:
        """The matrices of some users: [c, out, in]."""
        return product(self.left[lanes].transpose(1, 2), self.right[lanes])

    @property
    def device(self) -> torch.device:
        """Where the factors are."""
        return self.left.device

    @property
    def shape(self) -> torch.Size:
        """[C, out, in]."""
        return torch.Size((len(self.left), self.left.shape[2], self.right.shape[2]))

    @property
    def stay_factors(self) -> bool:
        """Whether clipping them as factors costs less than as matrices, and is as exact."""
        return few_rows(self.left.shape[1], self.left.shape[2], self.right.shape[2])

    def norm_bounds(self) -> torch.Tensor:
        """At least each matrix's norm, and that of what `weighted_sum` adds for it: [C] float64.

        ‖Σ l_r x_rᵀ‖² = Σ_qr (l_q·l_r)(x_q·x_r), in float32 products of rows and float64 sums. A sum
        of k products is off by at most γ = k·2⁻²⁴ of the norms of its rows, whatever its order
        (Higham, Accuracy and Stability of Numerical Algorithms, section 3.1), and that much is
        added. Not finite where a factor is not, or where rows are too long to be added up in
        float32.
        """
        (_, rows, out), width = self.left.shape, self.right.shape[2]
        of_right = product(self.right, self.right.mT) if self.products is None else self.products
        x, y = of_right.double(), product(self.left, self.left.mT).double()
        a, b = _lengths(x, width), _lengths(y, out)
        lengths = (a * b).sum(1)
        error = _share(out) * (1.0 + _share(width)) * lengths**2
        error += _share(width) * (a[:, None] @ y.abs() @ a[:, :, None])[:, 0, 0]
        squares: torch.Tensor = torch.linalg.vecdot(_diagonals(x), _diagonals(y))
        squares += 2.0 * torch.linalg.vecdot(x.tril(-1).flatten(1), y.flatten(1))
        norms = (squares.clamp(min=0.0) + error).sqrt() + _share(rows) * lengths
        return norms.masked_fill(lengths > _LARGEST, torch.inf)

    def weighted_sum(self, weights: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
        """Sum over users of their matrices times weights: [out, in] float64, added up in float32.

        Args:
            weights: [C] float64; a user whose weight is zero adds nothing.
            bounds: from `norm_bounds`.
        """
        away = weights == 0.0
        # What is added up has norms of 1 at most, so nothing is too large or small for float32.
        unit = (weights * bounds).masked_fill(away, 0.0).max().clamp(min=1e-300)
        # Only weights of matrices without any length to speak of are beyond float32.
        relative = (weights / unit).clamp(max=1e38).float()
        left, right = self.left * relative[:, None, None], self.right
        if away.is_cuda or bool(away.any()):  # zero times what is not finite is not zero
            left, right = (t.masked_fill(away[:, None, None], 0.0) for t in (left, right))
        return product(left.flatten(0, 1).t(), right.flatten(0, 1)).double() * unit


def few_rows(rows: int, out: int, width: int) -> bool:
    """Whether sums of so many outer products are clipped best as factors, without the sums."""
    cheap = rows * rows * (out + width) <= out * width * (rows + _PASSES)
    return cheap and max(rows, out, width) <= _LONGEST and _rounding_is_known()


def _rounding_is_known() -> bool:
    """Whether products of float32 are not asked to be coarser, when no bound would hold."""
    if any(os.environ.get(name, exact) != exact for name, exact in _EXACT.items()):
        return False
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # they are, by newer settings of torch, for some devices
        return False


def _share(terms: int) -> float:
    """γ of a sum of so many products, and of a few roundings besides."""
    return (terms + 8) * _ROUNDING * 1.001


def _lengths(products: torch.Tensor, terms: int) -> torch.Tensor:
    """At least the norms of rows, [C, R], from their products with themselves [C, R, R].

    Also of rows whose squares are too small for float32.
    """
    squares = (1.0 + _share(terms)) * _diagonals(products)
    return (squares + terms * _UNDERFLOW / _ROUNDING).sqrt()


def _diagonals(matrices: torch.Tensor) -> torch.Tensor:
    return matrices.diagonal(dim1=1, dim2=2)
