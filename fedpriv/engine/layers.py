"""Models in which each of the users of a chunk has weights of its own.

`BatchedModel` is a copy of a model through which the examples of all users go side by side,
[C·B, …]. A batched layer replaces each trained one: its parameters have an axis in front, one slice
for each of C users, and it is one batched matrix product. Convolutions are products of patches.
Frozen linear layers and convolutions are one product for all users, which saves nothing for a
gradient of theirs.
While all users' weights are the same, as before their first step, one product serves all users;
only the gradients with respect to the weights are per user. These are float32 and so are their
sums, also where activations have fewer bits.

Where it costs less, a `LowRankLinear` replaces a linear layer. A gradient of its weights is a sum
of outer products δ xᵀ, one per example. So a user's weights after some steps are
W₀ + Σ_t a_t·δ_t x_tᵀ over the examples t seen so far, and the layer's output is

    W x + b = W₀ x + b₀ + Σ_t a_t·(x_t·x + 1)·δ_t:

one matrix product for all users of a chunk, and a small correction for each. The result is that of
weights per user up to the rounding of float32.

On x86 torch leaves products to MKL, which uses AVX-512 on Intel's processors only; NumPy's OpenBLAS
also uses it on AMD's and is twice as fast there, for one large matrix as for many small ones. Each
product is made by the library that is faster on this machine. It must not depend on its place among
others: OpenBLAS copies matrices to where it wants them; MKL rounds differently where rows do not
begin at multiples of 16 bytes, so it is given none of these.
"""

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fedpriv.engine.adapters import Adapted
from fedpriv.engine.bounds import WithinBounds
from fedpriv.engine.task import (
    Activations,
    Inputs,
    Task,
    called,
    called_freely,
    lowered,
    outputs_of,
)
from fedpriv.errors import ModelError
from fedpriv.privacy.clipping_torch import TorchTensors

# OpenBLAS's names of what has AVX-512.
_WIDE = ("SkylakeX", "Cooperlake", "SapphireRapids")
# Multiplications in a product of two matrices that OpenBLAS takes as they lie in memory. More, and
# it rearranges them first, which for a small result costs as much as the product.
_AS_THEY_LIE = 600_000
_SMALL = 4096  # numbers in a result that costs little to add up
_ROWS = 64  # of a product at a time: more are hardly faster, and fewer need no filling up
_ALIGNED, _ALIGNED_BYTES = 4, 16  # so many float32 numbers
_RUN = 16  # numbers in a row in memory; copying fewer costs as much
_TOUCHES = 40  # multiplications in the time that it takes to change a weight in memory
_TOLERANCE = 1e-4
_OFF = 1e-2  # of the norm of a gradient
_EACH = 2  # examples of each user that is tried
# Which of the users of `_users_like` are tried together: mixing may show only at an extreme.
_TRIALS = ((0, 1, 2), (4, 3, 0), (3, 4, 0))
_has_mkl: Callable[[], bool] = torch.backends.mkl.is_available
# Functions whose results follow, in type or shape, from what tensors hold.
_DECIDING = frozenset(
    {
        *(getattr(Tensor, f"__{kind}__") for kind in ("array", "bool", "float", "index", "int")),
        *(getattr(Tensor, name) for name in ("item", "numpy", "tolist")),
        *(
            getattr(holder, name)
            for holder in (torch, Tensor)
            for name in ("allclose", "argwhere", "equal", "is_nonzero", "masked_select", "nonzero")
        ),
    }
)


def product(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """[n, k] times [k, m], or [C, n, k] times [C, k, m], in `out`, contiguous, if it is given.

    Autograd does not see it.
    """
    a, b = a.detach(), b.detach()
    if not _for_numpy(a) or a.shape[-1] == 1:  # NumPy is slow with products of single numbers
        return _by_torch(a, b, out)
    if out is None:
        out = a.new_empty((*a.shape[:-1], b.shape[-1]))
    with np.errstate(all="ignore"):  # clipping deals with what is not finite
        np.matmul(_readable(a).numpy(), _readable(b).numpy(), out=out.numpy())
    return out


def shared_product(rows: Tensor, matrix: Tensor, *, out: Tensor) -> None:
    """[n, k] times one matrix [k, m] of all rows, into `out`, contiguous.

    A row's product does not depend on the other rows. A CPU's library chooses how it multiplies by
    the number of rows, and rounds accordingly. So it is given a fixed number at a time; the last
    piece overlaps the one before it, or is filled up.
    """
    count, (k, m) = len(rows), matrix.shape
    if rows.device.type != "cpu":
        product(rows, matrix, out=out)
        return
    matrix = matrix.contiguous()  # is faster
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


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add [C, n, k] times [C, k, m] to [C, n, m], contiguous, where it lies."""
    if _for_numpy(a) or any(size % _ALIGNED for size in (*a.shape[1:], b.shape[2])):
        return total.add_(product(a, b))
    return total.baddbmm_(_aligned(a, 0), _aligned(b, 0))


def summed_outer(left: Tensor, right: Tensor) -> Tensor:
    """Sum over rows of their outer products: [C, n, i] and [C, n, o] give [C, i, o]."""
    (lanes, rows, i), o = left.shape, right.shape[2]
    pieces = _pieces(rows, i * o) if _for_numpy(left) else 1
    left, right = (t.reshape(lanes * pieces, rows // pieces, t.shape[2]) for t in (left, right))
    if pieces == 1:
        return product(left.transpose(1, 2), right)
    return product(left.transpose(1, 2), right).view(lanes, pieces, i, o).sum(1)


@cache
def numpy_is_faster() -> bool:
    """Whether torch multiplies by MKL on an AMD processor, whose AVX-512 OpenBLAS uses."""
    wide = any(library.get("architecture") in _WIDE for library in _openblas().info())
    processors = Path("/proc/cpuinfo")  # on Linux
    by_amd = processors.exists() and "AuthenticAMD" in processors.read_text(errors="replace")
    return wide and by_amd and _has_mkl()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let NumPy multiply in one thread in all threads of this process.

    Threads of OpenBLAS and of torch would each spin on cores that the others need, which takes ten
    times as long as one thread of each.
    """
    with _openblas().limit(limits=1):
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
    # Padding is of zeros, which add nothing to a sum; k needs some where it is contiguous.
    k, m = b.shape[-2:]
    more = -k % _ALIGNED if a.stride(-1) == 1 or b.stride(-1) != 1 else 0
    a, b = _aligned(a, more), _aligned(b, -m % _ALIGNED, more)
    if out is not None and m % _ALIGNED == 0 and out.data_ptr() % _ALIGNED_BYTES == 0:
        return torch.bmm(a, b, out=out)
    found = torch.bmm(a, b)
    return found[:, :, :m] if out is None else out.copy_(found[:, :, :m])


def _aligned(matrices: Tensor, more_columns: int, more_rows: int = 0) -> Tensor:
    """The matrices, padded by so many columns and rows of zeros, with all rows aligned."""
    if more_columns or more_rows:
        return functional.pad(matrices, (0, more_columns, 0, more_rows))
    apart, rows, columns = matrices.stride()
    if (rows == 1 and columns % _ALIGNED) or (columns == 1 and rows % _ALIGNED):
        return matrices.clone(memory_format=torch.contiguous_format)
    if apart % _ALIGNED or matrices.data_ptr() % (_ALIGNED * matrices.element_size()):
        # Row-major or column-major also decides how they are multiplied, so that stays.
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


@dataclass(frozen=True)
class PatchProducts:
    """A convolution's weights of each user, Σ_r gradient_r patch_rᵀ, made when they are asked for.

    So neither patches nor weights of all users are in memory at once.
    """

    images: Tensor  # [C, B, height, width, in]
    gradients: Tensor  # [C, r, out], r = B · rows · columns
    window: Window

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, lanes: slice) -> Tensor:
        """The weights of some users: [c, out, in, kernel height, kernel width]."""
        seen = patches(self.images[lanes].flatten(0, 1), self.window)
        gradients = self.gradients[lanes]
        weights = summed_outer(gradients, seen.view(*gradients.shape[:2], -1))
        return weights.view(len(gradients), -1, *self.window.kernel, self.images.shape[-1]).movedim(
            -1, 2
        )

    @property
    def device(self) -> torch.device:
        """Where the factors are."""
        return self.images.device

    @property
    def shape(self) -> torch.Size:
        """[C, out, in, kernel height, kernel width]."""
        out, channels = self.gradients.shape[2], self.images.shape[-1]
        return torch.Size((len(self.images), out, channels, *self.window.kernel))


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
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
        last = lowered(weight).movedim(2, -1)  # as patches have channels last
        ctx.shape, ctx.shared = last.shape, weight.stride(0) == 0  # all users' weights are one
        matrices = (last[:1] if ctx.shared else last).flatten(2)
        ctx.scratch = kind == "scratch"
        kept = rows if ctx.scratch or ctx.needs_input_grad[1] else None
        ctx.save_for_backward(kept, matrices)
        y = _products(rows, matrices.transpose(1, 2), shared=ctx.shared)
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
        back = _products(gradient, matrices, shared=ctx.shared, out=out) if of_rows else None
        return back, of_weight, biases, None


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
    """Rows [C, n, in] through weights [C, out, in] and biases [C, out] or None: [C, n, out]."""
    return _multiplied(rows, weight, bias, "kept")


def convolved(images: Tensor, weight: Tensor, bias: Tensor | None, window: Window) -> Tensor:
    """Images [C·B, height, width, in] through a window: [C·B, rows, columns, out]."""
    seen = _patched(images, window)
    rows = seen.view(len(weight), -1, seen.shape[-1])
    return _multiplied(rows, weight, bias, "scratch").view(*seen.shape[:3], -1)


def _products(rows: Tensor, matrices: Tensor, *, shared: bool, out: Tensor | None = None) -> Tensor:
    """[C, n, i] times [C, i, o], or [1, i, o] if shared: [C, n, o], in `out` if given."""
    if out is None:  # never a view, of which autograd forbids changes
        out = rows.new_empty((*rows.shape[:2], matrices.shape[2]))
    if not shared:
        return product(rows, matrices, out=out)
    shared_product(rows.flatten(0, 1), matrices[0], out=out.flatten(0, 1))
    return out


class BatchedLayer(nn.Module):
    """A layer with parameters of each user, which are put in before each forward pass."""

    own: tuple[Tensor, Tensor | None] = (torch.empty(0), None)  # weight and bias, [C, …] each
    low_rank: "LowRankLinear | OnceConv2d | None" = None  # what replaces them
    examples = 0  # C·B, how many go through the model


class BatchedLinear(BatchedLayer):
    """`torch.nn.Linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """[C·B, …, in] → [C·B, …, out]."""
        if self.low_rank is not None:
            return self.low_rank(x)
        rows = lowered(x).reshape(len(self.own[0]), -1, x.shape[-1])
        return multiplied(rows, *self.own).view(*x.shape[:-1], -1)


class BatchedConv2d(BatchedLayer):
    """`torch.nn.Conv2d` in one group; images lie channels last in memory, which is faster."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        if isinstance(layer.padding, str) or layer.padding_mode != "zeros" or layer.groups != 1:
            raise ModelError("only a convolution in one group with zeros around can be a product")
        self.window = Window(layer.kernel_size, layer.stride, layer.padding, layer.dilation)

    def forward(self, x: Tensor) -> Tensor:
        """[C·B, in, height, width] → [C·B, out, rows, columns]."""
        if self.low_rank is not None:
            return self.low_rank(x)
        images = lowered(x.permute(0, 2, 3, 1))
        return convolved(images, *self.own, self.window).permute(0, 3, 1, 2)


class BatchedEmbedding(BatchedLayer):
    """`torch.nn.Embedding`; alike if words are the same for all examples, as positions are."""

    def __init__(self, layer: nn.Embedding, *, alike: bool) -> None:
        super().__init__()
        self.padding, self.alike = layer.padding_idx, alike

    def forward(self, x: Tensor) -> Tensor:
        """Words [C·B, …], or [1, …] or [positions] if alike → [C·B, …, d]."""
        weight, _ = self.own
        users, _, width = weight.shape
        if self.alike:
            words = x[0] if x.dim() > 1 and len(x) == 1 else x
            x = words.expand(self.examples, *words.shape)
        # Unlike sums of offsets and numbers, neither way reaches into another user's slice.
        words = x.reshape(users, -1)
        if weight.device.type == "cpu":
            y = weight.gather(1, words.unsqueeze(-1).expand(-1, -1, width))
        else:  # a GPU would add up gradients of that in another order each time
            y = weight[torch.arange(users, device=weight.device)[:, None], words]
        y = y.view(*x.shape, width)
        if self.padding is None:
            return y
        return torch.where((x == self.padding)[..., None], y.detach(), y)


class BatchedAffine(BatchedLayer):
    """`torch.nn.GroupNorm` or `torch.nn.LayerNorm`: `bare` without weight and bias, then these."""

    def __init__(self, layer: nn.GroupNorm | nn.LayerNorm) -> None:
        super().__init__()
        self.bare, self.channels_first = copy.deepcopy(layer), isinstance(layer, nn.GroupNorm)
        for name in ("weight", "bias"):
            self.bare.register_parameter(name, None)

    def forward(self, x: Tensor) -> Tensor:
        """[C·B, …] → same shape."""
        x, (weight, bias) = self.bare(x), self.own
        users, *shape = weight.shape
        rest = [1] * (x.dim() - 1 - len(shape))
        inner = (users, 1, *shape, *rest) if self.channels_first else (users, 1, *rest, *shape)
        y = x.view(users, -1, *x.shape[1:]) * weight.view(inner)
        return (y if bias is None else y + bias.view(inner)).view_as(x)


def batched_layer(layer: nn.Module, *, alike: bool = False) -> BatchedLayer:
    """The layer with parameters of each user; a `ModelError` for layers of an unknown kind."""
    # Not of a subclass, which may do something else.
    if type(layer) is nn.Linear:
        return BatchedLinear()
    if type(layer) is nn.Conv2d:
        return BatchedConv2d(layer)
    if type(layer) is nn.Embedding and layer.max_norm is None and not layer.scale_grad_by_freq:
        return BatchedEmbedding(layer, alike=alike)
    if type(layer) is nn.GroupNorm or type(layer) is nn.LayerNorm:
        return BatchedAffine(layer)
    raise ModelError(f"a layer of type {type(layer).__name__} cannot have weights for each user")


class FrozenLayer(nn.Module):
    """A frozen linear layer or convolution: one product for the examples of all users.

    Unlike the layer itself it gives an example the same whatever the examples beside it are.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # By their names in the model, by which constants are put in.
        self.weight, self.bias = layer.weight, layer.bias  # type: ignore[assignment]
        self.product = batched_layer(layer)

    def forward(self, x: Tensor) -> Tensor:
        """As of the layer."""
        weight, *bias = (
            p.as_strided((1, *p.shape), (0, *p.stride()))
            for p in (self.weight, self.bias)
            if p is not None
        )
        self.product.own = weight, bias[0] if bias else None
        outputs: Tensor = self.product(x)
        return outputs


class BatchedAdapted(nn.Module):
    """An `Adapted` linear layer, in one pass over its inputs and its outputs."""

    def __init__(self, base: FrozenLayer, a: BatchedLinear, b: BatchedLinear, scale: float) -> None:
        super().__init__()
        # By its name in the model, by which constants are put in.
        self.base, self.lora_A, self.lora_B, self.scale = base, a, b, scale

    def forward(self, x: Tensor) -> Tensor:
        """[C·B, …, in] → [C·B, …, out]."""
        a, b = self.lora_A, self.lora_B
        if a.low_rank or b.low_rank or torch.is_autocast_enabled(x.device.type):
            outputs: Tensor = self.lora_B(self.scale * self.lora_A(x))
            outputs += self.base(x)
            return outputs
        rows, shape = x.reshape(len(a.own[0]), -1, x.shape[-1]), x.shape[:-1]
        base = self.base.weight, self.base.bias
        return _adapted(rows, a.own[0], b.own[0], *base, self.scale).view(*shape, -1)


class _Adapted(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        a: Tensor,
        b: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
    ) -> Tensor:
        inner = product(rows, a.transpose(1, 2)).mul_(scale)
        ctx.save_for_backward(rows, inner, a, b, weight)
        ctx.scale = scale
        y = _products(rows, weight.t()[None], shared=True)
        if bias is not None:
            y += bias
        return _add_product(y, inner, b.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, inner, a, b, weight = ctx.saved_tensors
        of_b = summed_outer(inner, gradient).transpose(1, 2)  # twice as fast as the other way
        of_inner = product(gradient, b).mul_(ctx.scale)
        of_a = summed_outer(of_inner, rows)
        if not ctx.needs_input_grad[0]:
            return None, of_a, of_b, None, None, None
        back = _products(gradient, weight[None], shared=True)
        return _add_product(back, of_inner, a), of_a, of_b, None, None, None


_adapted: Callable[..., Tensor] = _Adapted.apply


class LowRankLinear:
    """A `torch.nn.Linear` with shared parameters, corrected for each of C users in S steps.

    It is called once in each step, and remembers its inputs and the losses' gradients with respect
    to its outputs: r rows of each user in a step. Autograd must differentiate by `probe` too, so
    that its backward pass reaches the layer. Examples are those of all steps, [C, S, W, …].
    """

    def __init__(self, examples: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        self.probe = weight.new_zeros((), requires_grad=True)
        self._weight, self._bias, self._examples = weight, bias, examples
        self._entering = torch.empty(0), 0  # examples of this step, and their version
        self._seen, self._rows = 0, 0  # rows of a user in the steps so far, and in this one
        self._inputs = self._gradients = torch.empty(0)  # [C, S·r, in] and [C, S·r, out]
        self._coefficients = torch.empty(0)  # of the rows seen, [C, 1, n]

    def __call__(self, x: Tensor) -> Tensor:
        """[C·B, …, in] → [C·B, …, out]."""
        return _through(self, self.probe, x).view(*x.shape[:-1], -1)

    def expect(self, x: Tensor) -> None:
        """Begin a step in which these examples enter the model, [C·W, …]."""
        self._entering = x, x._version

    def outputs(self, x: Tensor) -> Tensor:
        """Outputs [C, r, out] for x, in memory of their own; autograd does not see it."""
        rows = x.detach().reshape(len(self._examples), -1, x.shape[-1])
        factor, matrix = lowered(rows), lowered(self._weight)
        self._remember(x, rows)
        with torch.autocast(rows.device.type, enabled=False):
            y = _products(factor, matrix.t()[None], shared=True)
            if self._bias is not None:
                y += self._bias.to(y.dtype)
            if not self._seen:
                return y
            inner = product(rows.float(), self._inputs[:, : self._seen].transpose(1, 2))
            if self._bias is not None:  # lost in fewer bits beside products of long rows
                inner += 1.0
            return y.add_(self._corrections(inner, self._gradients))

    def backward(self, gradient: Tensor, *, by_inputs: bool) -> Tensor | None:
        """Remember the losses' gradient by outputs, [C, r, out]; that by inputs, if asked for."""
        gradient = gradient.contiguous()
        self._now(self._gradients).copy_(gradient)
        if not by_inputs:
            return None
        y = _products(gradient, self._weight.to(gradient.dtype)[None], shared=True).float()
        if self._seen:
            inner = product(gradient.float(), self._gradients[:, : self._seen].transpose(1, 2))
            y += self._corrections(inner, self._inputs)
        return y

    def learn(self, coefficients: Tensor) -> None:
        """End a step, after which the coefficients of all steps are these, [C, S]."""
        self._seen += self._rows
        self._coefficients = coefficients.repeat_interleave(self._rows, 1)[:, None, : self._seen]

    def updates(self) -> list[Tensor | OuterProducts]:
        """Each user's weights (and bias) minus the shared ones: [C, out, in], [C, out]."""
        scaled = self._gradients.mul_(self._coefficients.transpose(1, 2))
        weight = OuterProducts(scaled, self._inputs)
        return [weight] if self._bias is None else [weight, scaled.sum(1)]

    def _remember(self, x: Tensor, rows: Tensor) -> None:
        """Keep the inputs of a step, without a copy if they are the examples as they entered."""
        entering, version = self._entering
        entered = x.data_ptr() == entering.data_ptr() and x.numel() == entering.numel()
        entered &= x._version == version and x.dtype == self._weight.dtype and x.is_contiguous()
        if not self._seen:
            users, self._rows, width = rows.shape
            shape = users, self._rows * self._examples.shape[1]
            self._gradients = self._weight.new_zeros((*shape, len(self._weight)))
            kept = self._examples if entered else self._weight.new_empty((*shape, width))
            self._inputs = kept.view(*shape, width)
        shared = self._inputs.data_ptr() == self._examples.data_ptr()
        if shared and not entered:
            self._inputs = self._inputs.clone()
        if not entered or not shared:
            self._now(self._inputs).copy_(rows)

    def _now(self, memory: Tensor) -> Tensor:
        return memory[:, self._seen : self._seen + self._rows]

    def _corrections(self, inner: Tensor, factors: Tensor) -> Tensor:
        """Products [C, r, n] with the rows seen, times coefficients and factors [C, n, *]."""
        return product(inner.mul_(self._coefficients), factors[:, : self._seen])


class OnceConv2d:
    """A `torch.nn.Conv2d` with shared parameters in the only step of C users, float32 on a CPU.

    torch convolves all images at once; weights of each user follow from what is remembered. It is
    used as a `LowRankLinear`.
    """

    def __init__(self, users: int, window: Window, weight: Tensor, bias: Tensor | None) -> None:
        self.probe = weight.new_zeros((), requires_grad=True)
        self._users, self._window, self._bias = users, window, bias
        self._weight = weight.contiguous(memory_format=torch.channels_last)
        self._images = self._gradients = torch.empty(
            0
        )  # [C·B, in, h, w], [C·B, out, rows, columns]
        self._coefficients = torch.empty(0)  # [C, 1]
        self._version = 0  # of the images when they were convolved

    def __call__(self, x: Tensor) -> Tensor:
        """[C·B, in, height, width] → [C·B, out, rows, columns]."""
        return _through(self, self.probe, x)

    def outputs(self, x: Tensor) -> Tensor:
        """Outputs for x, in memory of their own; autograd does not see it."""
        self._images = _channels_last(x.detach())
        self._version = self._images._version
        stride, padding, dilation = self._window.args
        y = functional.conv2d(self._images, self._weight, self._bias, stride, padding, dilation)
        self._gradients = y.new_zeros(()).expand(y.shape)  # until there are some
        return y

    def backward(self, gradient: Tensor, *, by_inputs: bool) -> Tensor | None:
        """Remember the losses' gradient by outputs; that by inputs, if asked for."""
        if self._images._version != self._version:  # as autograd has it
            raise ModelError("the input of a convolution was changed in place before its gradient")
        self._gradients = _channels_last(gradient)
        if not by_inputs:
            return None
        stride, padding, dilation = self._window.args
        factors = self._gradients, self._images, self._weight, None, stride, padding, dilation
        back: Tensor
        back, _, _ = torch.ops.aten.convolution_backward(
            *factors, transposed=False, output_padding=(0, 0), groups=1,
            output_mask=(True, False, False),
        )  # fmt: skip
        return back

    def learn(self, coefficients: Tensor) -> None:
        """End the step, whose coefficients are these, [C, 1]."""
        self._coefficients = coefficients

    def updates(self) -> list[Tensor | PatchProducts]:
        """Each user's weights (and bias) minus the shared ones."""
        images, gradients = (t.permute(0, 2, 3, 1) for t in (self._images, self._gradients))
        images = images.view(self._users, -1, *images.shape[1:])
        scaled = gradients.reshape(self._users, -1, gradients.shape[-1])
        scaled = scaled * self._coefficients[:, :, None]
        weight = PatchProducts(images, scaled, self._window)
        return [weight] if self._bias is None else [weight, scaled.sum(1)]

    def expect(self, x: Tensor) -> None:
        """Begin the step."""


def _channels_last(images: Tensor) -> Tensor:
    """Images [N, channels, height, width] that lie channels last, by strides that say so."""
    last = images.permute(0, 2, 3, 1).contiguous()
    # One channel lies first and last: only strides tell torch which.
    return last.flatten().view(last.shape).permute(0, 3, 1, 2)


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: LowRankLinear | OnceConv2d, _probe: Tensor, x: Tensor) -> Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        return layer.outputs(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        back = ctx.layer.backward(gradient, by_inputs=ctx.needs_input_grad[2])
        return None, None, None if back is None else back.view(ctx.shape)


_through: Callable[..., Tensor] = _Through.apply


@dataclass(frozen=True)
class BatchedModel:
    """A copy of a model for many users, with the tensors of the model but for trained layers."""

    model: nn.Module  # the copy
    trained: Mapping[str, nn.Module]  # by name, the layers that hold what the model trains
    batched: Mapping[str, BatchedLayer]  # what replaces them in the copy
    keys: Mapping[str, tuple[str, ...]]  # names of their parameters in the model
    # Of linear layers that alone hold their parameters and are called once in a forward pass: how
    # many rows of an example go through them.
    rows: Mapping[str, int]
    once: tuple[str, ...]  # convolutions of which the same is true
    held: Mapping[str, Tensor]  # by name, what the copy holds itself: those of the model

    def low_rank(self, steps: int, batch: int) -> dict[str, nn.Linear]:
        """Linear layers for which low-rank corrections cost less than weights for each user."""
        found = {}
        for name, rows in self.rows.items():
            layer = self.trained[name]
            if isinstance(layer, nn.Linear):
                n, i, o = rows * steps * batch, layer.in_features, layer.out_features
                # Products of all rows with each other, against weights that change in each step.
                if n * n * (i + o) <= _TOUCHES * steps * i * o:
                    found[name] = layer
        return found

    def once_convolved(self, users: int, parameters: TorchTensors) -> dict[str, OnceConv2d]:
        """Convolutions for the only step of so many users."""
        found = {}
        for name in self.once:
            layer = self.batched[name]
            assert isinstance(layer, BatchedConv2d)
            weight, *bias = (parameters[key] for key in self.keys[name])
            found[name] = OnceConv2d(users, layer.window, weight, bias[0] if bias else None)
        return found

    def outputs(
        self,
        own: TorchTensors,
        constants: TorchTensors,
        x: Tensor,
        activations: Activations = "float32",
        low_rank: Mapping[str, LowRankLinear | OnceConv2d] = MappingProxyType({}),
    ) -> Tensor:
        """Outputs for examples [C·B, …] by each user's own parameters, [C, *shape]."""
        # Costs less than putting tensors into modules, as `functional_call` does. So does leaving
        # those where they are that are there already.
        constants = {
            name: tensor
            for name, tensor in constants.items()
            if tensor.data_ptr() != self.held[name].data_ptr()
        }
        for name, layer in self.batched.items():
            layer.low_rank, layer.examples = low_rank.get(name), len(x)
            if layer.low_rank is None:
                weight, *bias = (own[key] for key in self.keys[name])
                layer.own = weight, bias[0] if bias else None
        try:
            return outputs_of(self.model, constants, x, activations, called_freely)
        finally:  # the copy must not keep a user's parameters
            for layer in self.batched.values():
                layer.own, layer.low_rank = BatchedLayer.own, None


def batched_model(task: Task, x: Inputs, y: Tensor) -> BatchedModel | None:
    """The model of a task for many users, if it keeps them apart in all that it trains, or None.

    It is tried with random users, whose examples are like one input [1, …] and target. What a user
    gets must be what it would get alone, the same to the last bit whatever examples are beside its
    own. So there is none if a trained layer is of an unknown kind or is trained in part, if the
    model does anything with a trained layer but call it, if it has several inputs, if model or loss
    mix examples, or if values of examples decide what it does next, which would then be done to all
    users. Nor is there one where `WithinBounds` is needed: in it every function of torch is slower.
    """
    if isinstance(x, dict):
        return None
    trained = {}
    try:
        for name, layer in task.model.named_modules():
            required = [p.requires_grad for p in layer.parameters(recurse=False)]
            if any(required):
                batched_layer(layer)
                trained[name] = layer
                if not all(required):
                    return None
        inputs, targets = _users_like(x), _users_like(y)
        with torch.no_grad():
            model = _copied(task.model, trained, torch.cat(inputs[:2]))
        if not _same_gradients(task, model, inputs, targets):
            return None
        with torch.no_grad():
            with WithinBounds() as bounds:
                outputs = called_freely(task.model, {}, inputs[0].as_subclass(_OfExamples))
            task.losses_of(outputs, targets[0])
            for users in _TRIALS:
                chosen = [inputs[u] for u in users], [targets[u] for u in users]
                if bounds.needed or not _separate(task, model, *chosen):
                    return None
    except Exception:  # whatever the model does with its layers, it does not only call them
        return None
    return model


def _copied(model: nn.Module, trained: Mapping[str, nn.Module], x: Tensor) -> BatchedModel:
    """A copy for many users, by what inputs of layers are for few and for more examples."""
    shapes = _input_shapes(model, trained, x)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    keys = {n: tuple(names[id(p)] for p in e.parameters(recurse=False)) for n, e in trained.items()}
    holders = Counter(key for some in keys.values() for key in some)
    called_once = {
        name: seen[0][:-1].numel() // _EACH
        for name, seen in shapes.items()
        if len(seen) == 2 and all(holders[key] == 1 for key in keys[name])
    }
    rows = {name: n for name, n in called_once.items() if type(trained[name]) is nn.Linear}
    once = tuple(name for name in called_once if type(trained[name]) is nn.Conv2d)
    batched = {n: batched_layer(e, alike=len({*shapes[n]}) == 1) for n, e in trained.items()}
    memo: dict[int, object] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    memo |= {id(trained[name]): layer for name, layer in batched.items()}
    for layer in model.modules():
        if isinstance(layer, Adapted):
            a, b = (memo.get(id(part)) for part in (layer.lora_A, layer.lora_B))
            frozen = isinstance(layer.base, nn.Linear) and id(layer.base) not in memo
            if frozen and isinstance(a, BatchedLinear) and isinstance(b, BatchedLinear):
                memo[id(layer)] = BatchedAdapted(FrozenLayer(layer.base), a, b, layer.scale)
        elif id(layer) not in memo and isinstance(layer, nn.Linear | nn.Conv2d):
            with suppress(ModelError):  # an unusual one stays as it is
                memo[id(layer)] = FrozenLayer(layer)
    copied = copy.deepcopy(model, memo)
    held = {**dict(copied.named_parameters()), **dict(copied.named_buffers())}
    return BatchedModel(copied, trained, batched, keys, rows, once, held)


def _input_shapes(
    model: nn.Module, trained: Mapping[str, nn.Module], x: Tensor
) -> dict[str, list[torch.Size]]:
    """Shapes of what each layer is given, call by call, for `_EACH` examples and then one more."""
    shapes: dict[str, list[torch.Size]] = {name: [] for name in trained}
    with ExitStack() as hooks:
        for name, layer in trained.items():

            def note(_: nn.Module, inputs: tuple[Tensor], name: str = name) -> None:
                shapes[name].append(inputs[0].shape)

            hooks.enter_context(layer.register_forward_pre_hook(note))
        for count in (_EACH, _EACH + 1):
            model(x[:count])
    return shapes


class _OfExamples(Tensor):
    """A tensor of examples, or computed from them, whose values must decide nothing."""

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """What torch calls in place of each of its functions."""
        places = args[1] if function is Tensor.__getitem__ else ()
        places = places if isinstance(places, tuple) else (places,)
        masked = any(isinstance(place, cls) and place.dtype == torch.bool for place in places)
        if masked or function in _DECIDING:
            raise ModelError("values of examples decide what the model does")
        plainly: Callable[..., Any] = super().__torch_function__
        return plainly(function, types, args, kwargs)


def _same_gradients(task: Task, model: BatchedModel, x: list[Tensor], y: list[Tensor]) -> bool:
    """Whether the first two users get the gradients that the model itself gives each.

    So a hook of a layer, which its copy lacks, is noticed. By their norms: where a rounding decides
    on which side of a kink a number is, some components differ.
    """
    one, other = _two_sets(task)
    both = {name: torch.stack([p, other[name]]).requires_grad_() for name, p in one.items()}
    outputs = model.outputs(both, {}, torch.cat(x[:2]))
    together = _gradients(task.losses_of(outputs, torch.cat(y[:2])), both)
    for user, own in enumerate((one, other)):
        leaves = {name: p.requires_grad_() for name, p in own.items()}
        alone = _gradients(task.losses_of(called(task.model, leaves, x[user]), y[user]), leaves)
        least = _TOLERANCE * max(float(g.norm()) for g in alone.values())
        for name, gradient in alone.items():
            off = float((together[name][user] - gradient).norm())
            if not off <= _OFF * float(gradient.norm()) + least:
                return False
    return True


def _gradients(losses: Tensor, parameters: TorchTensors) -> TorchTensors:
    found = torch.autograd.grad(losses.sum(), [*parameters.values()], materialize_grads=True)
    return dict(zip(parameters, found, strict=True))


def _two_sets(task: Task) -> tuple[TorchTensors, TorchTensors]:
    """The task's parameters, and others near them."""
    generator = torch.Generator().manual_seed(0)
    one = {name: p.clone() for name, p in task.trainable().items()}  # which may be of inference
    return one, {n: p + torch.randn(p.shape, generator=generator) / 8 for n, p in one.items()}


def _separate(task: Task, model: BatchedModel, x: list[Tensor], y: list[Tensor]) -> bool:
    """Whether the first of three users gets what it gets alone, beside the second and the third."""
    one, other = _two_sets(task)
    both = {name: torch.stack([p, other[name]]) for name, p in one.items()}
    each = [called(task.model, own, x[user]) for user, own in enumerate((one, other))]
    together, beside = (model.outputs(both, {}, torch.cat([x[0], second])) for second in x[1:])
    if together.shape != (alone := torch.cat(each)).shape:
        return False
    losses, losses_beside = (
        task.losses_of(outputs, torch.cat([y[0], second]))[:_EACH]
        for outputs, second in zip((together, beside), y[1:], strict=True)
    )
    close = bool((together - alone).abs().max() <= _TOLERANCE * alone.abs().max())
    same = torch.equal(together[:_EACH], beside[:_EACH]) and torch.equal(losses, losses_beside)
    return close and same


def _users_like(example: Tensor) -> list[Tensor]:
    """Examples of several users, [2, …] each, for an example [1, …]: random, zeros, ones."""
    generator = torch.Generator().manual_seed(1)
    shape = (_EACH, *example.shape[1:])
    if example.is_floating_point():
        drawn = [torch.randn(shape, generator=generator) for _ in range(3)]
    else:
        drawn = [torch.randint(2, shape, generator=generator) for _ in range(3)]
    return [e.to(example.dtype) for e in (*drawn, torch.zeros(shape), torch.ones(shape))]
