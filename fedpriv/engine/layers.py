"""Models in which each of the users of a chunk has weights of its own.

`BatchedModel` is a copy of a model through which the examples of all users go side by side,
[C·B, …]. A batched layer takes the place of each trained one: its parameters have an axis in front,
one slice for each of C users, and it is one batched matrix product. Convolutions are products of
patches. While all users' weights are the same, as before their first step, the products with them
are one for all users; only the gradients by the weights are for each user. These are float32 and so
are their sums, also where activations have fewer bits.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fedpriv.engine.matmul import product, shared_product, summed_outer
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

    def positions(self, height: int, width: int) -> tuple[int, int]:
        """How often the window fits into an image: (rows, columns)."""
        rows, columns = (
            (size + 2 * p - d * (k - 1) - 1) // s + 1
            for size, k, s, p, d in zip(
                (height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )
        return rows, columns


def patches(images: torch.Tensor, window: Window) -> torch.Tensor:
    """What the window sees at each position of images [N, height, width, channels].

    Returns:
        [N, rows, columns, kernel height · kernel width · channels], contiguous, and no view of the
        images, which are best contiguous.
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
    """Images of a size, each the sum of the patches at its positions: the adjoint of `patches`.

    Returns:
        [N, height, width, channels], of the type of the parts; added up in float32.
    """
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
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.shared = _same(weight)
        matrices = lowered(weight[:1] if ctx.shared else weight)
        ctx.save_for_backward(rows, matrices)
        return _products(rows, matrices.transpose(1, 2), bias, shared=ctx.shared)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, matrices = ctx.saved_tensors
        of_rows, _, of_bias = ctx.needs_input_grad
        return (
            _products(gradient, matrices, shared=ctx.shared) if of_rows else None,
            summed_outer(gradient.float(), rows.float()),
            gradient.sum(1, dtype=torch.float32) if of_bias else None,
        )


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        images: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        window: Window,
    ) -> torch.Tensor:
        last = lowered(weight).movedim(2, -1)  # as patches have channels last
        ctx.shared = _same(weight)
        matrices = (last[:1] if ctx.shared else last).flatten(2)
        seen = patches(images, window)
        ctx.save_for_backward(matrices)
        ctx.seen = seen  # not saved as tensors are: the backward pass writes to the patches
        ctx.window, ctx.size, ctx.last = window, images.shape[1:3], last.shape
        y = seen.new_empty((*seen.shape[:3], len(weight[0])))
        rows, of_rows = (t.view(len(weight), -1, t.shape[-1]) for t in (seen, y))
        _products(rows, matrices.transpose(1, 2), bias, out=of_rows, shared=ctx.shared)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (matrices,) = ctx.saved_tensors
        seen, shape = ctx.seen, ctx.last
        of_images, _, biased, _ = ctx.needs_input_grad
        rows = seen.view(shape[0], -1, seen.shape[-1])
        gradient = gradient.reshape(*rows.shape[:2], -1)
        of_weight = summed_outer(gradient.float(), rows.float()).view(shape).movedim(-1, 2)
        images = None
        if of_images:
            _products(gradient, matrices, out=rows, shared=ctx.shared)
            images = added(seen, ctx.window, ctx.size)
        return images, of_weight, gradient.sum(1, dtype=torch.float32) if biased else None, None


multiplied: Callable[..., torch.Tensor] = _Multiplied.apply
"""Rows [C, n, in] through weights [C, out, in] and biases [C, out] or None: [C, n, out]."""

convolved: Callable[..., torch.Tensor] = _Convolved.apply
"""Images [C·B, height, width, in] through weights [C, out, in, *kernel], biases [C, out] or None,
in a window: [C·B, rows, columns, out]."""


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
    """A layer with parameters of each user.

    Attributes:
        own: its weight and, if it has one, its bias, [C, …] each; given before each forward pass.
        examples: C·B, how many go through the model.
    """

    own: Sequence[torch.Tensor] = ()
    examples: int = 0

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
    """`torch.nn.Embedding`.

    Args:
        layer: the layer.
        alike: whether words are the same for all examples, such as places in a text.
    """

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
        """What words [*] are embedded to, [… *, d], without a gradient where they are padding."""
        if self.padding is None:
            return y
        return torch.where((words == self.padding)[..., None], y.detach(), y)


class BatchedAffine(BatchedLayer):
    """A normalisation with weight and bias: the layer without them, then each user's own.

    Args:
        bare: the layer without weight and bias.
        channels_first: whether weights are of the axis after the first, and not of the last ones.
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
    """The layer with parameters of each user; alike: it sees the same for all examples.

    Raises:
        ModelError: layers of this kind are not known.
    """
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


@dataclass(frozen=True)
class Layers:
    """All layers of a model that hold what it trains.

    Attributes:
        model: the model.
        trained: the layers by name.
        rows: for linear layers that alone hold their parameters and are called once in a forward
            pass, how many rows of an example go through them.
        alike: names of embeddings of what is the same for all examples.
        entrance: name of the linear layer, among those of `rows`, by which alone examples enter the
            model, as they are; None if there is none.
    """

    model: nn.Module
    trained: Mapping[str, nn.Module]
    rows: Mapping[str, int]
    alike: frozenset[str] = frozenset()
    entrance: str | None = None

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

    @contextmanager
    def corrected(self, by: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]) -> Iterator[None]:
        """Use these in place of the layers of their names, and let go of all tensors after it."""
        for name, layer in by.items():
            self._slots[name].layer = layer
        try:
            yield
        finally:
            for batched, _ in self._batched:
                batched.own = ()
            for slot in self._slots.values():
                slot.layer = None

    def outputs(
        self,
        own: TorchTensors,
        constants: TorchTensors,
        x: torch.Tensor,
        activations: Activations,
        device: torch.device,
    ) -> torch.Tensor:
        """Outputs for examples [C·B, …] by each user's own parameters, [C, *shape].

        Examples are on the device "meta" if they enter by a layer that has them.
        """
        # Costs less than putting tensors into modules, as `functional_call` does.
        for layer, names in self._batched:
            layer.own, layer.examples = [own[name] for name in names], len(x)
        return outputs_of(self.model, constants, x, activations, device)


class _Slot(nn.Module):
    """Where a low-rank layer is put in while it is needed."""

    layer: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer is None:
            raise RuntimeError("a layer with low-rank corrections was called before it had any")
        return self.layer(x)
