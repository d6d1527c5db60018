"""Models in which each of the users of a chunk has weights of its own.

`BatchedModel` is a copy of a model through which the examples of all users go side by side,
[C·B, …]. A batched layer takes the place of each trained one: its parameters have an axis in front,
one slice for each of C users, and it is one batched matrix product. Convolutions are products of
patches. While all users' weights are the same, as before their first step, one product serves all
users; only the gradients by the weights are for each user. These are float32 and so are their sums,
also where activations have fewer bits.

Where it costs less, a `LowRankLinear` takes the place of a linear layer. A gradient of its weights
is a sum of outer products δ xᵀ, one per example. So a user's weights after some steps are
W₀ + Σ_t a_t·δ_t x_tᵀ over the examples t seen so far, and the layer's output is

    W x + b = W₀ x + b₀ + Σ_t a_t·(x_t·x + 1)·δ_t:

one matrix product for all users of a chunk, and a small correction for each. The result is that of
weights per user up to the rounding of float32.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fedpriv.engine.matmul import OuterProducts, product, shared_product, summed_outer
from fedpriv.engine.task import Activations, lowered, outputs_of
from fedpriv.errors import ModelError
from fedpriv.privacy.clipping_torch import TorchTensors

_RUN = 16  # numbers in a row in memory; copying fewer costs as much
_TOUCHES = 40  # multiplications in the time that it takes to change a weight in memory


@dataclass(frozen=True)
class Window:
    """What a convolution looks at, as (height, width) each."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    def positions(self, *size: int) -> tuple[int, int]:
        """How often the window fits into an image of a height and width: (rows, columns)."""
        rows, columns = (
            (size[i] + 2 * self.padding[i] - self.dilation[i] * (self.kernel[i] - 1) - 1)
            // self.stride[i]
            + 1
            for i in (0, 1)
        )
        return rows, columns


def patches(images: torch.Tensor, window: Window) -> torch.Tensor:
    """What the window sees at each position of images [N, height, width, channels].

    Returns [N, rows, columns, kernel height · kernel width · channels] in memory of its own.
    """
    count, height, width, channels = images.shape
    (up, left), (rows, columns) = window.padding, window.positions(height, width)
    padded = functional.pad(images, (0, 0, left, left, up, up)) if up or left else images
    (kh, kw), (down, right), (dy, dx) = window.kernel, window.stride, window.dilation
    n, h, w, c = padded.stride()
    across, further = w * right, w * dx
    if kw * channels < _RUN:  # copied once by columns, which are fewer, to lie in longer runs
        shape = (count, columns, padded.shape[1], kw, channels)
        padded = padded.as_strided(shape, (n, across, h, further, c)).contiguous()
        n, across, h, further, c = padded.stride()
    places = (count, rows, columns, kh, kw, channels)
    seen = padded.as_strided(places, (n, h * down, across, h * dy, further, c))
    memory = images.new_empty((*places[:3], kh * kw * channels))
    memory.view(places).copy_(seen)
    return memory


def added(parts: torch.Tensor, window: Window, size: tuple[int, int]) -> torch.Tensor:
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
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scratch: bool,  # noqa: FBT001
    ) -> torch.Tensor:
        last = lowered(weight).movedim(2, -1)  # as patches have channels last
        ctx.shared, ctx.shape, ctx.scratch = _same(weight), last.shape, scratch
        matrices = (last[:1] if ctx.shared else last).flatten(2)
        ctx.save_for_backward(rows, matrices)
        return _products(rows, matrices.transpose(1, 2), bias, shared=ctx.shared)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, matrices = ctx.saved_tensors
        of_rows, _, of_bias, _ = ctx.needs_input_grad
        of_weight = summed_outer(gradient.float(), rows.float()).view(ctx.shape).movedim(-1, 2)
        back = None
        if of_rows:  # fresh memory of this size would cost as much as the product
            out = rows if ctx.scratch else None
            back = _products(gradient, matrices, out=out, shared=ctx.shared)
        biases = gradient.sum(1, dtype=torch.float32) if of_bias else None
        return back, of_weight, biases, None


class _Patched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: torch.Tensor, window: Window) -> torch.Tensor:
        ctx.window, ctx.size = window, images.shape[1:3]
        return patches(images, window)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return added(gradient, ctx.window, ctx.size), None


def multiplied(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, scratch: bool = False
) -> torch.Tensor:
    """Rows [C, n, in] through weights [C, out, in] and biases [C, out] or None: [C, n, out].

    Weights may also be of patches, [C, out, channels, *kernel]. The backward pass may write to rows
    that are `scratch`.
    """
    y: torch.Tensor = _Multiplied.apply(rows, weight, bias, scratch)
    return y


def convolved(
    images: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, window: Window
) -> torch.Tensor:
    """Images [C·B, height, width, in] through a window: [C·B, rows, columns, out]."""
    seen: torch.Tensor = _Patched.apply(images, window)
    rows = seen.view(len(weight), -1, seen.shape[-1])
    return multiplied(rows, weight, bias, scratch=True).view(*seen.shape[:3], -1)


def _same(parameter: torch.Tensor) -> bool:
    """Whether all users' are one in memory."""
    return parameter.stride(0) == 0


def _products(
    rows: torch.Tensor,
    matrices: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    shared: bool,
) -> torch.Tensor:
    """[C, n, i] times [C, i, o], or [1, i, o] if shared, plus [C, o]: [C, n, o], in `out` if given.

    Never a view, as autograd forbids changes to views that a function of ours returns.
    """
    shift = None if bias is None else bias[:, None].to(rows.dtype)
    if out is None:
        out = rows.new_empty((*rows.shape[:2], matrices.shape[2]))
    if not shared:
        return product(rows, matrices, shift, out=out)
    flat, into = rows.flatten(0, 1), out.flatten(0, 1)
    shift = None if shift is None else shift[0]
    shared_product(flat, matrices[0].contiguous(), shift, out=into)
    return out


class BatchedLayer(nn.Module):
    """A layer with parameters of each user, given before each forward pass."""

    own: Sequence[torch.Tensor] = ()  # weight and, if it has one, bias, [C, …] each
    examples: int = 0  # C·B, how many go through the model

    @property
    def weight(self) -> torch.Tensor:
        """[C, …]."""
        return self.own[0]

    @property
    def bias(self) -> torch.Tensor | None:
        """[C, …], or None."""
        return self.own[1] if len(self.own) > 1 else None


class BatchedLinear(BatchedLayer):
    """`torch.nn.Linear`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[C·B, …, in] → [C·B, …, out]."""
        rows = lowered(x).reshape(len(self.weight), -1, x.shape[-1])
        return multiplied(rows, self.weight, self.bias).view(*x.shape[:-1], -1)


class BatchedConv2d(BatchedLayer):
    """`torch.nn.Conv2d` in one group; images lie channels last in memory, which is faster."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__()
        if isinstance(layer.padding, str) or layer.padding_mode != "zeros" or layer.groups != 1:
            raise ModelError("only a convolution in one group with zeros around can be a product")
        (kh, kw), (sh, sw) = layer.kernel_size, layer.stride
        (ph, pw), (dh, dw) = layer.padding, layer.dilation
        self.window = Window((kh, kw), (sh, sw), (ph, pw), (dh, dw))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[C·B, in, height, width] → [C·B, out, rows, columns]."""
        images = lowered(x.permute(0, 2, 3, 1))
        return convolved(images, self.weight, self.bias, self.window).permute(0, 3, 1, 2)


class BatchedEmbedding(BatchedLayer):
    """`torch.nn.Embedding`; alike if words are the same for all examples, as places in a text."""

    def __init__(self, layer: nn.Embedding, *, alike: bool) -> None:
        super().__init__()
        self.padding, self.alike = layer.padding_idx, alike

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Words [C·B, …], or [1, …] or [places] if alike → [C·B, …, d]."""
        users, _, width = self.weight.shape
        if self.alike:
            words = x[0] if x.dim() > 1 and len(x) == 1 else x
            y = self.weight.index_select(1, words.flatten()).view(users, 1, *words.shape, width)
            y = self._constant_at_padding(words, y)
            return y.expand(-1, self.examples // users, *y.shape[2:]).flatten(0, 1)
        # Unlike a sum of offsets and numbers, this cannot reach into another user's slice.
        places = x.reshape(users, -1, 1).expand(-1, -1, width)
        return self._constant_at_padding(x, self.weight.gather(1, places).view(*x.shape, width))

    def _constant_at_padding(self, words: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Embeddings [… *, d] of words [*], without a gradient where they are padding."""
        if self.padding is None:
            return y
        return torch.where((words == self.padding)[..., None], y.detach(), y)


class BatchedAffine(BatchedLayer):
    """A normalisation: `bare` without weight and bias, then each user's own.

    Weights are of the axis after the first if `channels_first`, else of the last axes.
    """

    def __init__(self, bare: nn.Module, *, channels_first: bool) -> None:
        super().__init__()
        self.bare, self.channels_first = bare, channels_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[C·B, …] → same shape."""
        x = self.bare(x)
        users, *shape = self.weight.shape
        rest = x.dim() - 1 - len(shape)
        inner = (*shape, *[1] * rest) if self.channels_first else (*[1] * rest, *shape)
        y = x.view(users, -1, *x.shape[1:]) * self.weight.view(users, 1, *inner)
        if self.bias is not None:
            y = y + self.bias.view(users, 1, *inner)
        return y.view_as(x)


def batched_layer(layer: nn.Module, *, alike: bool = False) -> BatchedLayer:
    """The layer with parameters of each user; a `ModelError` for layers of an unknown kind."""
    kind = type(layer)  # a subclass may do something else
    if kind is nn.Linear:
        return BatchedLinear()
    if isinstance(layer, nn.Conv2d) and kind is nn.Conv2d:
        return BatchedConv2d(layer)
    if isinstance(layer, nn.Embedding) and kind is nn.Embedding and layer.max_norm is None:
        return BatchedEmbedding(layer, alike=alike)
    if isinstance(layer, nn.GroupNorm) and kind is nn.GroupNorm:
        bare = nn.GroupNorm(layer.num_groups, layer.num_channels, layer.eps, affine=False)
        return BatchedAffine(bare, channels_first=True)
    if isinstance(layer, nn.LayerNorm) and kind is nn.LayerNorm:
        shape = list(layer.normalized_shape)
        plain = nn.LayerNorm(shape, layer.eps, elementwise_affine=False)
        return BatchedAffine(plain, channels_first=False)
    raise ModelError(f"a layer of type {kind.__name__} cannot have weights for each user")


class LowRankLinear:
    """A `torch.nn.Linear` with shared parameters, corrected for each of C users in S steps.

    It is called once in each step. It remembers its inputs and the losses' gradients by its
    outputs, which the backward pass hands to it.

    Args:
        weight: [out, in] shared by all users.
        bias: [out] shared by all users, or None.
        batches: [C, S, W, …] all examples that enter the model.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, batches: torch.Tensor
    ) -> None:
        # To be differentiated by, so that autograd's backward pass reaches the layer.
        self.probe = weight.new_zeros((), requires_grad=True)
        self.gradient: torch.Tensor | None = None  # by the outputs of this step, [C, r, out]
        self._weight, self._bias, self._batches = weight, bias, batches
        self._rows = 0  # r, of a user in a step
        self._seen = 0  # rows of a user in the steps so far
        self._inputs = self._gradients = torch.empty(0)  # [C, S·r, in] and [C, S·r, out]
        self._coefficients = torch.empty(0)  # of the rows seen, [C, 1, n]
        self._entering = (torch.empty(0), 0)  # examples of this step, and their version
        self._as_entered = False  # whether inputs are the examples, where they lie

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[C·B, …, in] → [C·B, …, out]."""
        return _through(self, self.probe, x).view(*x.shape[:-1], -1)

    def expect(self, x: torch.Tensor) -> None:
        """Begin a step in which these examples enter the model, [C·W, …]."""
        self._entering = (x, x._version)

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs [C, r, out] for x, in memory of their own; autograd does not see it."""
        rows = x.detach().reshape(len(self._batches), -1, x.shape[-1])
        self._remember(x, rows)
        flat, matrix = lowered(rows).flatten(0, 1), lowered(self._weight)
        shift = None if self._bias is None else self._bias.to(matrix.dtype)
        y = flat.new_empty((*rows.shape[:2], len(matrix)))
        with torch.autocast(rows.device.type, enabled=False):
            shared_product(flat, matrix.t().contiguous(), shift, out=y.flatten(0, 1))
            if not self._seen:
                return y
            inner = product(rows.float(), self._inputs[:, : self._seen].transpose(1, 2))
            if self._bias is not None:  # lost in fewer bits beside products of long rows
                inner += 1.0
            return y.add_(self._corrections(inner, self._gradients))  # never a view

    def by_inputs(self, gradient: torch.Tensor) -> torch.Tensor:
        """The losses' gradient by its inputs [C, r, in], from that by its outputs [C, r, out]."""
        weight = self._weight.to(gradient.dtype)
        y = shared_product(gradient.flatten(0, 1), weight).float().view(*gradient.shape[:2], -1)
        if self._seen:
            inner = product(gradient.float(), self._gradients[:, : self._seen].transpose(1, 2))
            y += self._corrections(inner, self._inputs)
        return y

    def learn(self, coefficients: torch.Tensor) -> None:
        """End a step, after which the coefficients of all steps are these, [C, S]."""
        now = self._gradients[:, self._seen : self._seen + self._rows]
        if self.gradient is None:  # no loss depends on what it gave
            now.zero_()
        else:
            now.copy_(self.gradient)
        self._seen += self._rows
        self.gradient = None
        self._coefficients = coefficients.repeat_interleave(self._rows, 1)[:, None, : self._seen]

    def updates(self) -> list[torch.Tensor | OuterProducts]:
        """Each user's weights (and bias) minus the shared ones: [C, out, in], [C, out]."""
        scaled = self._gradients.mul_(self._coefficients.transpose(1, 2))
        weight = OuterProducts(scaled, self._inputs)
        return [weight] if self._bias is None else [weight, scaled.sum(1)]

    def _remember(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep the inputs of a step; no copy of them if they are the examples as they are."""
        examples, version = self._entering
        entered = x.data_ptr() == examples.data_ptr() and x.is_contiguous()
        entered &= x.dtype == self._weight.dtype and x._version == version
        entered &= x.numel() == examples.numel()
        if not self._seen:
            users, self._rows, width = rows.shape
            shape = users, self._rows * self._batches.shape[1]
            self._gradients = self._weight.new_empty((*shape, len(self._weight)))
            self._as_entered = entered
            self._inputs = (
                self._batches.view(*shape, width)
                if entered
                else self._weight.new_empty((*shape, width))
            )
        elif self._as_entered and not entered:
            self._inputs, self._as_entered = self._inputs.clone(), False
        if not self._as_entered:
            self._inputs[:, self._seen : self._seen + self._rows] = rows

    def _corrections(self, inner: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """Products [C, r, n] with the rows seen, times coefficients and factors [C, n, *]."""
        return product(inner.mul_(self._coefficients), factors[:, : self._seen])


class _Through(torch.autograd.Function):
    """Through a layer, which gets the gradient by its outputs before anything changes that."""

    @staticmethod
    def forward(
        ctx: Any, layer: LowRankLinear, _probe: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        return layer.outputs(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = gradient.contiguous()
        ctx.layer.gradient = gradient
        if not ctx.needs_input_grad[2]:
            return None, None, None
        return None, None, ctx.layer.by_inputs(gradient).view(ctx.shape)


_through: Callable[..., torch.Tensor] = _Through.apply


@dataclass(frozen=True)
class Layers:
    """All layers of a model that hold what it trains."""

    model: nn.Module
    trained: Mapping[str, nn.Module]  # the layers by name
    # Of linear layers that alone hold their parameters and are called once in a forward pass: how
    # many rows of an example go through them.
    rows: Mapping[str, int]
    alike: frozenset[str] = frozenset()  # embeddings of what is the same for all examples

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

    def corrections(
        self, names: Iterable[str], shared: TorchTensors, batches: torch.Tensor
    ) -> dict[str, LowRankLinear]:
        """Corrections to the shared parameters of some layers, for examples [C, S, W, …]."""
        found = {}
        for name in names:
            weight, *bias = (shared[key] for key in self.parameters(name))
            found[name] = LowRankLinear(weight, bias[0] if bias else None, batches)
        return found

    def parameters(self, name: str) -> tuple[str, ...]:
        """Names in the model of a layer's parameters; of those that two share, the first one's."""
        own = self.trained[name].parameters(recurse=False)
        return tuple(self._names[id(parameter)] for parameter in own)

    def batched(self, low_rank: Iterable[str] = ()) -> "BatchedModel":
        """A copy for many users, the same each time, with slots for layers that get corrections."""
        names = frozenset(low_rank)
        if names not in self._copies:
            self._copies[names] = BatchedModel(self, names)
        return self._copies[names]

    @cached_property
    def _copies(self) -> dict[frozenset[str], "BatchedModel"]:
        return {}

    @cached_property
    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.model.named_parameters()}


class BatchedModel:
    """A copy of a model through which the examples of many users go side by side.

    All tensors but those of trained layers are shared with the model. Linear layers named in
    `low_rank` get corrections in place of weights for each user.
    """

    def __init__(self, layers: Layers, low_rank: Iterable[str]) -> None:
        self._slots = {name: _Slot() for name in low_rank}
        self._batched: list[tuple[BatchedLayer, tuple[str, ...]]] = []
        memo: dict[int, object] = {
            id(t): t for t in (*layers.model.parameters(), *layers.model.buffers())
        }
        for name, layer in layers.trained.items():
            if name in self._slots:
                memo[id(layer)] = self._slots[name]
            else:
                batched = batched_layer(layer, alike=name in layers.alike)
                memo[id(layer)] = batched
                self._batched.append((batched, layers.parameters(name)))
        self.model: nn.Module = copy.deepcopy(layers.model, memo)

    def outputs(
        self,
        own: TorchTensors,
        constants: TorchTensors,
        x: torch.Tensor,
        activations: Activations = "float32",
        low_rank: Mapping[str, LowRankLinear] | None = None,
    ) -> torch.Tensor:
        """Outputs for examples [C·B, …] by each user's own parameters, [C, *shape].

        Afterwards the copy knows no user's parameters any more.
        """
        # Costs less than putting tensors into modules, as `functional_call` does.
        for layer, names in self._batched:
            layer.own, layer.examples = [own[name] for name in names], len(x)
        for name, correction in (low_rank or {}).items():
            self._slots[name].layer = correction
        try:
            return outputs_of(self.model, constants, x, activations)
        finally:
            for layer, _ in self._batched:
                layer.own = ()
            for slot in self._slots.values():
                slot.layer = None


class _Slot(nn.Module):
    """Holds a low-rank layer during a forward pass."""

    layer: LowRankLinear | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer is None:
            raise RuntimeError("a layer with low-rank corrections was called before it had any")
        return self.layer(x)
