"""Products of matrices with weights of each user, and sums of outer products in place of weights.

A user's rows never meet another user's: each lane has a product of its own, in memory that is
aligned as every other lane's, or rows go through one shared matrix in pieces of one size, in which
all places are alike.

A gradient of a linear layer's weights is a sum of outer products δ xᵀ, one for each row x that went
through it. So a user's weights are W₀ + Σ_t a_t·δ_t x_tᵀ after some steps, and the layer gives

    W x + b = W₀ x + b₀ + Σ_t a_t·(x_t·x + 1)·δ_t.

Where a user has few rows, `LowRank` computes that. It never makes the weights: neither a gradient
nor a step touches them, and clipping makes them a block at a time.

On a CPU, NumPy multiplies: its OpenBLAS uses AVX-512 on AMD's processors too, where it knows them,
and multiplies each of many small matrices in the same way.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

# Multiplications in a product of two matrices that OpenBLAS takes as they lie in memory. With more
# it rearranges them first, which for a small result costs as much as the product.
_AS_THEY_LIE = 600_000
_SMALL = 4096  # numbers in a result that costs little to add up
_ROWS = 64  # of a product at a time: more are hardly faster, and fewer need no filling up
_ALIGNED = 16  # float32 numbers in a cache line
_RUN = 16  # numbers in a row in memory; copying fewer costs as much


@cache
def _openblas() -> ThreadpoolController:
    return ThreadpoolController().select(internal_api="openblas")


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let NumPy multiply in one thread in all threads of this process.

    Threads of OpenBLAS and of torch would each spin on cores that the others need, which takes ten
    times as long as one thread of each.
    """
    with _openblas().limit(limits=1):
        yield


def product(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """[n, k] times [k, m], or [L, n, k] times [L, k, m], in `out`, contiguous, if it is given.

    Autograd does not see it.
    """
    a, b = a.detach(), b.detach()
    if a.device.type != "cpu" or a.dtype != torch.float32:
        return torch.matmul(a, b, out=out)
    if out is None:
        out = a.new_empty((*a.shape[:-1], b.shape[-1]))
    if a.shape[-1] == 1:  # no product of matrices for BLAS
        return torch.mul(a, b, out=out)
    with np.errstate(all="ignore"):  # clipping deals with what is not finite
        np.matmul(_readable(a).numpy(), _readable(b).numpy(), out=out.numpy())
    return out


@cache
def _place_matters() -> bool:
    """Whether this processor's library rounds a row by its place among other rows: AVX2's does."""
    rng = np.random.default_rng(0)
    row, matrix = (rng.random(shape, np.float32) for shape in (256, (256, 256)))
    with one_blas_thread():
        found = np.tile(row, (_ROWS, 1)) @ matrix
    return bool((found != found[0]).any())


def shared_product(rows: Tensor, matrix: Tensor, *, out: Tensor) -> None:
    """[L, n, k] times one matrix [k, m] of all lanes, into `out`, contiguous.

    What a lane gets does not depend on other lanes. A CPU's library chooses how it multiplies by
    the number of rows, and rounds accordingly. So it is given a fixed number at a time, of several
    lanes where it treats all of them alike; the last piece overlaps the one before it, or is filled
    up.
    """
    (lanes, n, k), m = rows.shape, matrix.shape[1]
    matrix = matrix.contiguous()  # is faster
    if rows.device.type == "cpu" and _place_matters():
        product(rows, matrix.expand(lanes, k, m), out=out)
        return
    rows, out, count = rows.reshape(-1, k), out.view(-1, m), lanes * n
    if rows.device.type != "cpu":
        product(rows, matrix, out=out)
        return
    if count < _ROWS:
        filled = rows.new_zeros((1, _ROWS, k))
        filled[0, :count] = rows
        out.copy_(product(filled, matrix[None])[0, :count])
        return
    whole = count - count % _ROWS
    for piece in (slice(0, whole), slice(count - _ROWS, count))[: 1 + (whole < count)]:
        shape = ((piece.stop - piece.start) // _ROWS, _ROWS)
        each = matrix.expand(shape[0], k, m)
        product(rows[piece].view(*shape, k), each, out=out[piece].view(*shape, m))


def summed_outer(left: Tensor, right: Tensor) -> Tensor:
    """Sum over rows of their outer products: [L, n, i] and [L, n, o] give [L, i, o]."""
    (lanes, rows, i), o = left.shape, right.shape[2]
    pieces = _pieces(rows, i * o) if left.device.type == "cpu" else 1
    left, right = (t.reshape(lanes * pieces, rows // pieces, t.shape[2]) for t in (left, right))
    if pieces == 1:
        return product(left.transpose(1, 2), right)
    return product(left.transpose(1, 2), right).view(lanes, pieces, i, o).sum(1)


def _pieces(rows: int, size: int) -> int:
    """Equal pieces, as few as can be, into which rows are cut for results of a size."""
    if size > _SMALL or rows * size <= _AS_THEY_LIE:
        return 1
    least = -(-rows * size // _AS_THEY_LIE)
    return next((n for n in range(least, 2 * least) if rows % n == 0), 1)


def _readable(matrices: Tensor) -> Tensor:
    """The same numbers as BLAS can read them; NumPy multiplies others itself, which is slow."""
    rows, columns = matrices.stride()[-2:]
    n, m = matrices.shape[-2:]
    if (columns == 1 and rows >= m) or (rows == 1 and columns >= n):
        return matrices
    return matrices.contiguous()


def _multiply(rows: Tensor, matrices: Tensor, out: Tensor | None = None) -> Tensor:
    """[L, n, i] times [L, i, o], or [1, i, o] of all lanes: [L, n, o], in `out` if given."""
    if out is None:  # never a view, of which autograd forbids changes
        out = rows.new_empty((*rows.shape[:2], matrices.shape[2]))
    if len(rows) == 1:  # of a user who goes alone, for whom torch is as good
        return torch.matmul(rows.detach(), matrices, out=out)
    if len(matrices) == len(rows):
        return product(rows, matrices, out=out)
    shared_product(rows, matrices[0], out=out)
    return out


@dataclass(frozen=True)
class OuterProducts:
    """A matrix of each user, Σ_r left_r right_rᵀ, held as its factors until it is asked for.

    Products of a fixed number of rows are added in order. So rows of zeros behind a user's own, of
    which there are as many as others have rows, change no bit.
    """

    left: Tensor  # [L, R, out]
    right: Tensor  # [L, R, in]
    block: int  # rows of a product, of which R is a multiple
    ends: Sequence[int]  # [L] behind so many rows, a user has zeros

    def __len__(self) -> int:
        return len(self.left)

    def __getitem__(self, lanes: slice) -> Tensor:
        """The matrices of some users: [l, out, in]."""
        most = max(self.ends[lanes], default=0)
        return self._summed(self.left[lanes].transpose(1, 2), self.right[lanes], most)

    def rows(self, user: int, rows: slice) -> Tensor:
        """Rows of the matrix of one user: [r, in]."""
        return self._summed(self.left[user, :, rows].t(), self.right[user], self.ends[user])

    def _summed(self, left: Tensor, right: Tensor, rows: int) -> Tensor:
        found = product(left[..., : self.block], right[..., : self.block, :])
        for first in range(self.block, rows, self.block):
            some = slice(first, first + self.block)
            found += product(left[..., some], right[..., some, :])
        return found

    @property
    def device(self) -> torch.device:
        """Where the factors are."""
        return self.left.device

    @property
    def shape(self) -> torch.Size:
        """[L, out, in]."""
        return torch.Size((len(self.left), self.left.shape[2], self.right.shape[2]))


@dataclass(frozen=True)
class Window:
    """What a convolution looks at, as (height, width) each."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def args(self) -> tuple[tuple[int, ...], ...]:
        """Stride, padding and dilation, as torch's convolutions take them."""
        return self.stride, self.padding, self.dilation

    def positions(self, *size: int) -> tuple[int, int]:
        """How often the window fits into an image of a height and width: (rows, columns)."""
        axes = zip(size, self.kernel, *self.args, strict=True)
        rows, columns = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes)
        return rows, columns


def patches(images: Tensor, window: Window) -> Tensor:
    """What the window sees at each position of images [N, height, width, channels].

    Returns [N, rows, columns, kernel height · kernel width · channels] in memory of its own.
    """
    count, height, width, channels = images.shape
    (up, left), (rows, columns) = window.padding, window.positions(height, width)
    padded = functional.pad(images, (0, 0, left, left, up, up)) if up or left else images
    (kh, kw), (down, right), (dy, dx) = window.kernel, window.stride, window.dilation
    n, h, w, c = padded.stride()
    across, further = w * right, w * dx
    if kw * channels < _RUN:  # one more copy, by columns, gives longer runs
        shape = (count, columns, padded.shape[1], kw, channels)
        padded = padded.as_strided(shape, (n, across, h, further, c)).contiguous()
        n, across, h, further, c = padded.stride()
    places = (count, rows, columns, kh, kw, channels)
    seen = padded.as_strided(places, (n, h * down, across, h * dy, further, c))
    memory = images.new_empty((*places[:3], kh * kw * channels))
    memory.view(places).copy_(seen)
    return memory


def added(parts: Tensor, window: Window, size: tuple[int, int]) -> Tensor:
    """Images of a size, each the sum of its patches, in float32: the adjoint of `patches`."""
    (height, width), (up, left), (dy, dx) = size, window.padding, window.dilation
    (kh, kw), (down, right) = window.kernel, window.stride
    parts = parts.view(*parts.shape[:3], kh, kw, -1)
    shape = len(parts), height + 2 * up, width + 2 * left, parts.shape[-1]
    total = parts.new_zeros(shape, dtype=torch.float32)
    n, h, w, c = total.stride()
    # So many positions further down, and to the right, the window meets other pixels only.
    rows, columns = -(-(dy * (kh - 1) + 1) // down), -(-(dx * (kw - 1) + 1) // right)
    steps = (n, h * down * rows, w * right * columns, h * dy, w * dx, c)
    for row, column in itertools.product(range(rows), range(columns)):  # none of these overlap
        part = parts[:, row::rows, column::columns]
        if part.numel():
            offset = row * h * down + column * w * right
            total.as_strided(part.shape, steps, offset).add_(part)
    return total[:, up : up + height, left : left + width].to(parts.dtype)


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Any:
        last = lowered(weight).movedim(2, -1)  # as patches have channels last
        ctx.shape, ctx.scratch = last.shape, kind == "scratch"
        # Weights that all lanes share have a stride of 0.
        matrices = (last[:1] if weight.stride(0) == 0 else last).flatten(2)
        ctx.save_for_backward(rows if ctx.scratch or ctx.needs_input_grad[1] else None, matrices)
        y = _multiply(rows, matrices.transpose(1, 2))
        return y if bias is None else y.add_(bias[:, None].to(y.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrices = ctx.saved_tensors
        of_rows, of_weights, of_bias, _ = ctx.needs_input_grad
        of_weight = None
        if of_weights:
            of_weight = summed_outer(gradient.float(), rows.float()).view(ctx.shape).movedim(-1, 2)
        biases = gradient.sum(1, dtype=torch.float32) if of_bias else None
        out = rows if ctx.scratch else None  # fresh memory would cost as much as the product
        return _multiply(gradient, matrices, out) if of_rows else None, of_weight, biases, None


class _Patched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, window: Window) -> Tensor:
        ctx.window, ctx.size = window, images.shape[1:3]
        return patches(images, window)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return added(gradient, ctx.window, ctx.size), None


class _Paired(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        return product(left, right)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (left, right), (of_left, of_right) = ctx.saved_tensors, ctx.needs_input_grad
        return (
            product(gradient, right.mT) if of_left else None,
            product(left.mT, gradient) if of_right else None,
        )


_multiplied: Callable[[Tensor, Tensor, Tensor | None, str], Tensor] = _Multiplied.apply
_paired: Callable[[Tensor, Tensor], Tensor] = _Paired.apply
_patched: Callable[[Tensor, Window], Tensor] = _Patched.apply


def multiplied(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Rows [L, n, in] through weights [L, out, in] and biases [L, out] or None: [L, n, out]."""
    return _multiplied(lowered(rows), weight, bias, "kept")


def paired(left: Tensor, right: Tensor) -> Tensor:
    """Matrices [N, …, n, k] times as many [N, …, k, m], each by itself."""
    one, other = (lowered(t).reshape(-1, *t.shape[-2:]) for t in (left, right))
    return _paired(one, other).view(*left.shape[:-1], right.shape[-1])


def convolved(images: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
    """Images [L·B, height, width, in] through a window: [L·B, rows, columns, out].

    Weights are [L, out, in, kernel height, kernel width] and biases [L, out] or None.
    """
    seen = _patched(lowered(images), window)
    rows = seen.view(len(weight), -1, seen.shape[-1])
    return _multiplied(rows, weight, bias, "scratch").view(*seen.shape[:3], -1)


def lowered(x: Tensor) -> Tensor:
    """A tensor in the type that products have in the forward pass under way."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class LowRank:
    """A linear layer of L users: W₀, and what each has learnt from few rows by plain steps.

    It remembers the rows that go through it, and the losses' gradients with respect to what it
    gives for them. Autograd must differentiate by `probe` too, so that the backward pass reaches
    it. In a step it may be called any number of times.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        lanes: int,
        rows: int,
        rate: float,
        block: int | None = None,
    ) -> None:
        """So many `rows` of each user are expected in all steps; it takes more, too.

        What they add up to is rounded as products of so many rows in a `block` are; None: of all.
        """
        self._block, rows = block, rows if block is None else -(-rows // block) * block
        self._ends = [0] * lanes
        self.probe = weight.new_zeros((), requires_grad=True)
        self._weight, self._bias, self._rate = weight, bias, rate
        self._inputs, self._ways = (
            _aligned_zeros(weight, lanes, rows, width) for width in reversed(weight.shape)
        )
        self._seen = self._used = 0  # rows of a user in the steps before, and with those of this
        self._lanes, self._present = lanes, weight.new_ones(0)

    def begin(self, lanes: int, present: Tensor | None) -> None:
        """Let the first l users go through, those who are `present`, [l]; None: all."""
        self._lanes, self._present = lanes, self._present[:0] if present is None else present

    def end_step(self) -> None:
        """Have learnt from the rows of this step."""
        self._seen = self._used

    def __call__(self, x: Tensor) -> Tensor:
        """[l·B, …, in] → [l·B, …, out]."""
        return _through(self, self.probe, x).view(*x.shape[:-1], -1)

    def outputs(self, x: Tensor) -> tuple[Tensor, slice]:
        """Outputs [l, r, out], in memory of their own, and the place of rows among a user's."""
        rows = x.detach().reshape(self._lanes, -1, x.shape[-1])
        factor, matrix = lowered(rows), lowered(self._weight)
        with torch.autocast(rows.device.type, enabled=False):
            y = _multiply(factor, matrix.t()[None])
            if self._bias is not None:
                y += self._bias.to(y.dtype)
            if self._seen:
                inner = product(rows.float(), self._before(self._inputs).transpose(1, 2))
                if self._bias is not None:  # lost in fewer bits beside products of long rows
                    inner += 1.0
                y += product(inner, self._before(self._ways))
        return y, self._remember(rows)

    def backward(self, gradient: Tensor, place: slice, *, by_inputs: bool) -> Tensor | None:
        """Remember the losses' gradient by outputs; that by inputs, if asked for."""
        self._ways[: self._lanes, place] = self._of_present(gradient) * -self._rate
        if not by_inputs:
            return None
        y = _multiply(gradient, self._weight.to(gradient.dtype)[None]).float()
        if self._seen:
            inner = product(gradient.float(), self._before(self._ways).transpose(1, 2))
            y += product(inner, self._before(self._inputs))
        return y

    def updates(self) -> list[Tensor | OuterProducts]:
        """Each user's weights (and bias) minus the shared ones: [L, out, in], [L, out]."""
        rows = self._ways.shape[1]
        block = self._block or rows
        weight = OuterProducts(self._ways, self._inputs, block, self._ends)
        if self._bias is None:
            return [weight]
        first, *others = (some.sum(1) for some in torch.split(self._ways, block, 1))
        return [weight, sum(others, first)]

    def _before(self, rows: Tensor) -> Tensor:
        return rows[: self._lanes, : self._seen]

    def _remember(self, rows: Tensor) -> slice:
        place = slice(self._used, self._used + rows.shape[1])
        if place.stop > self._inputs.shape[1]:
            self._inputs, self._ways = (
                _aligned_zeros(held, len(held), 2 * place.stop, held.shape[2], held)
                for held in (self._inputs, self._ways)
            )
        self._inputs[: self._lanes, place] = self._of_present(rows)
        self._used = place.stop
        self._ends[: self._lanes] = [place.stop] * self._lanes
        return place

    def _of_present(self, rows: Tensor) -> Tensor:
        """Rows [l, r, *], zero where a user is not present: there they may be NaN."""
        if not len(self._present):
            return rows
        return torch.where(self._present[:, None, None], rows, 0.0)


def _aligned_zeros(
    like: Tensor, lanes: int, rows: int, width: int, first: Tensor | None = None
) -> Tensor:
    """Zeros [L, rows, width], behind the `first` rows, in which all rows begin at cache lines."""
    memory = like.new_zeros((lanes, rows, -(-width // _ALIGNED) * _ALIGNED))[:, :, :width]
    if first is not None:
        memory[:, : first.shape[1]] = first
    return memory


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: LowRank, _probe: Tensor, x: Tensor) -> Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        y, ctx.place = layer.outputs(x)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        by_inputs = ctx.needs_input_grad[2]
        back = ctx.layer.backward(gradient, ctx.place, by_inputs=by_inputs)
        return None, None, None if back is None else back.view(ctx.shape)


_through: Callable[..., Tensor] = _Through.apply

OWN_FUNCTIONS = (_Multiplied, _Paired, _Patched, _Through)
"""Functions with gradients of their own, which keep users apart."""
