"""Products of matrices with weights of each user, and sums of outer products instead of weights.

Rows of two users never affect each other. Either each lane has its own product, in memory with the
same alignment for all lanes; or rows are multiplied by one shared matrix in pieces of equal size,
whose places are all equivalent.

The gradient of a linear layer's weights is a sum of outer products δ xᵀ, one for each row x that
went through the layer. So after some steps a user's weights are W₀ + Σ_t a_t·δ_t x_tᵀ, and the
layer computes

    W x + b = W₀ x + b₀ + Σ_t a_t·(x_t·x + 1)·δ_t.

If a user has few rows, `LowRank` computes the right-hand side. It never computes the weights:
gradients and steps do not need them, and clipping computes them one block at a time.

On a CPU, NumPy multiplies. Its OpenBLAS also uses AVX-512 on AMD's processors, if it knows them,
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

_ROWS = 64  # of a product at a time; more are hardly faster, and would need more padding
_ALIGNED = 16  # float32 numbers in a cache line


@cache
def _openblas() -> ThreadpoolController:
    return ThreadpoolController().select(internal_api="openblas")


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Restrict NumPy's products to one thread, in all threads of this process.

    Otherwise threads of OpenBLAS and torch compete for cores, which takes ten times as long.
    """
    with _openblas().limit(limits=1):
        yield


def product(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Multiply [n, k] by [k, m], or [L, n, k] by [L, k, m]; into a contiguous `out`, if given.

    Autograd ignores the product.
    """
    a, b = a.detach(), b.detach()
    if a.device.type != "cpu" or a.dtype != torch.float32:
        return torch.matmul(a, b, out=out)
    if out is None:
        out = a.new_empty((*a.shape[:-1], b.shape[-1]))
    if a.shape[-1] == 1:  # BLAS does not help here
        return torch.mul(a, b, out=out)
    with np.errstate(all="ignore"):  # clipping handles numbers that are not finite
        np.matmul(_readable(a).numpy(), _readable(b).numpy(), out=out.numpy())
    return out


@cache
def _place_matters() -> bool:
    """Return whether BLAS rounds a row according to its place among others, as with AVX2."""
    rng = np.random.default_rng(0)
    row, matrix = (rng.random(shape, np.float32) for shape in (256, (256, 256)))
    with one_blas_thread():
        products = np.tile(row, (_ROWS, 1)) @ matrix
    return bool((products != products[0]).any())


def _readable(matrices: Tensor) -> Tensor:
    """Return matrices in a layout that BLAS can read; for others, NumPy's own product is slow."""
    rows, columns = matrices.stride()[-2:]
    n, m = matrices.shape[-2:]
    if (columns == 1 and rows >= m) or (rows == 1 and columns >= n):
        return matrices
    return matrices.contiguous()


def _multiply(rows: Tensor, matrices: Tensor, out: Tensor | None = None) -> Tensor:
    """Multiply [L, n, k] by [L, k, m], or by [1, k, m] for all lanes; into `out` if given.

    The result of a lane does not depend on other lanes. BLAS chooses its algorithm, and so its
    rounding, by the number of rows. So one matrix gets a fixed number of rows at a time, from
    several lanes if it treats all places alike. The last piece overlaps the previous one, or is
    padded.
    """
    (lanes, n, k), m = rows.shape, matrices.shape[2]
    if out is None:  # not a view, since autograd forbids changes of views
        out = rows.new_empty((lanes, n, m))
    if len(matrices) == lanes:
        return product(rows, matrices, out=out)
    on_cpu = rows.device.type == "cpu"
    matrix = matrices[0].contiguous()  # for speed
    if on_cpu and _place_matters():
        return product(rows, matrix.expand(lanes, k, m), out=out)
    rows, results, count = rows.reshape(-1, k), out.view(-1, m), lanes * n
    if not on_cpu:
        product(rows, matrix, out=results)
    elif count < _ROWS:
        padded = rows.new_zeros((1, _ROWS, k))
        padded[0, :count] = rows
        results.copy_(product(padded, matrix[None])[0, :count])
    else:
        whole = count - count % _ROWS
        for piece in (slice(0, whole), slice(count - _ROWS, count))[: 1 + (whole < count)]:
            shape = ((piece.stop - piece.start) // _ROWS, _ROWS)
            product(
                rows[piece].view(*shape, k),
                matrix.expand(shape[0], k, m),
                out=results[piece].view(*shape, m),
            )
    return out


@dataclass(frozen=True)
class OuterProducts:
    """A matrix of each user, Σ_r left_r right_rᵀ, which is computed from its factors on demand.

    Products of a fixed number of rows are added in order. So the zeros after a user's own rows,
    whose number depends on other users, change no bit.
    """

    left: Tensor  # [L, R, out]
    right: Tensor  # [L, R, in]
    block: int  # rows of a product; R is a multiple of it
    ends: Sequence[int]  # [L] number of rows of each user, after which there are zeros

    def __len__(self) -> int:
        return len(self.left)

    def __getitem__(self, lanes: slice) -> Tensor:
        """Return the matrices of some users, [l, out, in]."""
        left, right = self.left[lanes].mT, self.right[lanes]
        total = product(left[..., : self.block], right[:, : self.block])
        for first in range(self.block, max(self.ends[lanes], default=0), self.block):
            rows = slice(first, first + self.block)
            total += product(left[..., rows], right[:, rows])
        return total

    @property
    def device(self) -> torch.device:
        """Device of the factors."""
        return self.left.device

    @property
    def shape(self) -> torch.Size:
        """[L, out, in]."""
        return torch.Size((len(self.left), self.left.shape[2], self.right.shape[2]))


@dataclass(frozen=True)
class Window:
    """The window of a convolution; all fields are (height, width)."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def args(self) -> tuple[tuple[int, ...], ...]:
        """Stride, padding and dilation, as torch's convolutions take them."""
        return self.stride, self.padding, self.dilation

    def positions(self, *size: int) -> tuple[int, int]:
        """Return how often the window fits into an image of (height, width), as (rows, columns)."""
        axes = zip(size, self.kernel, *self.args, strict=True)
        rows, columns = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in axes)
        return rows, columns


def patches(images: Tensor, window: Window) -> Tensor:
    """Return the patches of images [N, height, width, channels] at each position of the window.

    The result is [N, rows, columns, kernel height · kernel width · channels], in new memory.
    """
    count, height, width, channels = images.shape
    (up, left), (rows, columns) = window.padding, window.positions(height, width)
    padded = functional.pad(images, (0, 0, left, left, up, up)) if up or left else images
    (kh, kw), (down, right), (dy, dx) = window.kernel, window.stride, window.dilation
    n, h, w, c = padded.stride()
    places = (count, rows, columns, kh, kw, channels)
    view = padded.as_strided(places, (n, h * down, w * right, h * dy, w * dx, c))
    memory = images.new_empty((*places[:3], kh * kw * channels))
    memory.view(places).copy_(view)
    return memory


def added(parts: Tensor, window: Window, size: tuple[int, int]) -> Tensor:
    """Return images of (height, width) as sums of patches, in float32: the adjoint of `patches`."""
    (height, width), (up, left), (dy, dx) = size, window.padding, window.dilation
    (kh, kw), (down, right) = window.kernel, window.stride
    parts = parts.view(*parts.shape[:3], kh, kw, -1)
    shape = len(parts), height + 2 * up, width + 2 * left, parts.shape[-1]
    total = parts.new_zeros(shape, dtype=torch.float32)
    n, h, w, c = total.stride()
    # After this many positions down, and to the right, the window does not overlap with itself.
    rows, columns = -(-(dy * (kh - 1) + 1) // down), -(-(dx * (kw - 1) + 1) // right)
    steps = (n, h * down * rows, w * right * columns, h * dy, w * dx, c)
    for row, column in itertools.product(range(rows), range(columns)):
        part = parts[:, row::rows, column::columns]
        if part.numel():
            offset = row * h * down + column * w * right
            total.as_strided(part.shape, steps, offset).add_(part)
    return total[:, up : up + height, left : left + width].to(parts.dtype)


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Any:
        channels_last = lowered(weight).movedim(2, -1)  # like patches
        ctx.shape, ctx.scratch = channels_last.shape, kind == "scratch"
        # Weights that all lanes share have a stride of 0.
        matrices = (channels_last[:1] if weight.stride(0) == 0 else channels_last).flatten(2)
        ctx.save_for_backward(rows if ctx.scratch or ctx.needs_input_grad[1] else None, matrices)
        y = _multiply(rows, matrices.transpose(1, 2))
        return y if bias is None else y.add_(bias[:, None].to(y.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrices = ctx.saved_tensors
        needs_rows, needs_weight, needs_bias, _ = ctx.needs_input_grad
        by_weight = None
        if needs_weight:
            summed = product(gradient.float().transpose(1, 2), rows.float())
            by_weight = summed.view(ctx.shape).movedim(-1, 2)
        by_bias = gradient.sum(1, dtype=torch.float32) if needs_bias else None
        out = rows if ctx.scratch else None  # fresh memory would take as long as the product
        return _multiply(gradient, matrices, out) if needs_rows else None, by_weight, by_bias, None


class _Patched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, window: Window) -> Tensor:
        ctx.window, ctx.size = window, images.shape[1:3]
        return patches(images, window)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return added(gradient, ctx.window, ctx.size), None


_multiplied: Callable[[Tensor, Tensor, Tensor | None, str], Tensor] = _Multiplied.apply
_patched: Callable[[Tensor, Window], Tensor] = _Patched.apply


def multiplied(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply weights [L, out, in] and biases [L, out] or None to rows [L, n, in]: [L, n, out]."""
    return _multiplied(lowered(rows), weight, bias, "kept")


def convolved(images: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
    """Convolve images [L·B, height, width, in] to [L·B, rows, columns, out].

    Weights are [L, out, in, kernel height, kernel width] and biases [L, out] or None.
    """
    patched = _patched(lowered(images), window)
    rows = patched.view(len(weight), -1, patched.shape[-1])
    return _multiplied(rows, weight, bias, "scratch").view(*patched.shape[:3], -1)


def lowered(x: Tensor) -> Tensor:
    """Convert a tensor to the dtype of products in the current forward pass."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class LowRank:
    """A linear layer of L users: W₀, and the plain steps of each user on few rows.

    It stores the rows that go through it, and the gradients of the losses by its outputs. Autograd
    must differentiate by `probe` too, so that the backward pass reaches the layer.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        lanes: int,
        rows: int,
        rate: float,
        block: int,
    ) -> None:
        """Reserve memory for `rows` rows of each user in all steps.

        `block`: rows of a product, which affects the rounding of sums.
        """
        self._block, rows = block, -(-rows // block) * block
        self._ends = [0] * lanes
        self.probe = weight.new_zeros((), requires_grad=True)
        self._weight, self._bias, self._rate = weight, bias, rate
        self._inputs, self._steps = (
            _aligned_zeros(weight, lanes, rows, width) for width in reversed(weight.shape)
        )
        self._learnt = self._used = 0  # rows of a user in earlier steps, and including this step
        self._lanes = lanes
        self._present: Tensor | None = None

    def begin(self, lanes: int, present: Tensor | None) -> None:
        """Begin a slice of the first l users; `present` [l] marks users with rows; None: all."""
        self._lanes, self._present = lanes, present

    def end_step(self) -> None:
        """Apply the step that the rows since the last step determine."""
        self._learnt = self._used

    def __call__(self, x: Tensor) -> Tensor:
        """Map [l·B, …, in] to [l·B, …, out]."""
        return _through(self, self.probe, x).view(*x.shape[:-1], -1)

    def outputs(self, x: Tensor) -> tuple[Tensor, slice]:
        """Return outputs [l, r, out] in new memory, and the slice in which the rows are stored."""
        rows = x.detach().reshape(self._lanes, -1, x.shape[-1])
        factor, matrix = lowered(rows), lowered(self._weight)
        with torch.autocast(rows.device.type, enabled=False):
            y = _multiply(factor, matrix.t()[None])
            if self._bias is not None:
                y += self._bias.to(y.dtype)
            if self._learnt:
                inner = product(rows.float(), self._earlier(self._inputs).transpose(1, 2))
                if self._bias is not None:  # in float32, since fewer bits could lose it
                    inner += 1.0
                y += product(inner, self._earlier(self._steps))
        return y, self._store(rows)

    def backward(self, gradient: Tensor, place: slice, *, by_inputs: bool) -> Tensor | None:
        """Store the gradient of the losses by outputs; on request, return that by inputs."""
        self._steps[: self._lanes, place] = self._of_present(gradient) * -self._rate
        if not by_inputs:
            return None
        y = _multiply(gradient, self._weight.to(gradient.dtype)[None]).float()
        if self._learnt:
            inner = product(gradient.float(), self._earlier(self._steps).transpose(1, 2))
            y += product(inner, self._earlier(self._inputs))
        return y

    def updates(self) -> list[Tensor | OuterProducts]:
        """Return the changes of each user's weights, [L, out, in], and bias, [L, out], if any."""
        weight = OuterProducts(self._steps, self._inputs, self._block, self._ends)
        if self._bias is None:
            return [weight]
        first, *others = (part.sum(1) for part in torch.split(self._steps, self._block, 1))
        return [weight, sum(others, first)]

    def _earlier(self, rows: Tensor) -> Tensor:
        return rows[: self._lanes, : self._learnt]

    def _store(self, rows: Tensor) -> slice:
        place = slice(self._used, self._used + rows.shape[1])
        self._inputs[: self._lanes, place] = self._of_present(rows)
        self._used = place.stop
        self._ends[: self._lanes] = [place.stop] * self._lanes
        return place

    def _of_present(self, rows: Tensor) -> Tensor:
        """Return rows [l, r, *] with zeros for absent users, whose rows may be NaN."""
        present = self._present
        return rows if present is None else torch.where(present[:, None, None], rows, 0.0)


def _aligned_zeros(like: Tensor, lanes: int, rows: int, width: int) -> Tensor:
    """Return zeros [L, rows, width]; all rows begin at cache lines."""
    return like.new_zeros((lanes, rows, -(-width // _ALIGNED) * _ALIGNED))[:, :, :width]


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
        result = ctx.layer.backward(gradient, ctx.place, by_inputs=by_inputs)
        return None, None, None if result is None else result.view(ctx.shape)


_through: Callable[..., Tensor] = _Through.apply

OWN_FUNCTIONS = (_Multiplied, _Patched, _Through)
"""Functions of this module with their own gradients, which keep users apart."""
