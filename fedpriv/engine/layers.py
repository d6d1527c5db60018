"""Convolution as a matrix product: the patches of images, and back.

Products of examples with a matrix for each user, and what they give back.

While all users' weights are the same, as before their first step, the products with them are one
for all users; only the gradients by the weights are for each user. They are float32 and so are
their sums, also where activations have fewer bits.

Layers with weights for each of the users of a chunk.

Each stands in for a layer of torch and computes with parameters that have an axis in front, one
slice for each of C users. Its input holds the examples of all users side by side, [C·B, …]; each
user's go through that user's slice, in one batched matrix product.

A model whose trained layers are known, and copies of it that train many users at once.
"""

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from fedpriv.engine.matmul import product, shared_product, summed_outer
from fedpriv.engine.task import Activations, lowered, outputs_of
from fedpriv.errors import ModelError
from fedpriv.privacy.clipping_torch import TorchTensors

_RUN = 16  # numbers in a row in memory; copying fewer costs as much


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

    @property
    def apart(self) -> tuple[int, int]:
        """How many positions further down, and to the right, the window meets other pixels only."""
        down, right = (
            -(-(d * (k - 1) + 1) // s)
            for k, s, d in zip(self.kernel, self.stride, self.dilation, strict=True)
        )
        return down, right


def patches(
    images: torch.Tensor, window: Window, memory: torch.Tensor | None = None
) -> torch.Tensor:
    """What the window sees at each position.

    Args:
        images: [N, height, width, channels]; fastest if contiguous.
        window: the window.
        memory: contiguous, where to write if it has the shape of the result; fresh memory costs
            more.

    Returns:
        [N, rows, columns, kernel height · kernel width · channels], contiguous, and no view of the
        images.
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
    if memory is None or memory.shape != (*places[:3], kh * kw * channels):
        memory = images.new_empty((*places[:3], kh * kw * channels))
    memory.view(places).copy_(seen)
    return memory


def added(parts: torch.Tensor, window: Window, size: tuple[int, int]) -> torch.Tensor:
    """Images of a size, each the sum of the patches that are given for its positions.

    The adjoint of `patches`.

    Args:
        parts: [N, rows, columns, kernel height · kernel width · channels].
        window: the window.
        size: height and width of the images.

    Returns:
        [N, height, width, channels], of the type of the parts; added up in float32.
    """
    (height, width), (up, left), (dy, dx) = size, window.padding, window.dilation
    parts = parts.view(*parts.shape[:3], *window.kernel, -1)
    shape = len(parts), height + 2 * up, width + 2 * left, parts.shape[-1]
    total = parts.new_zeros(shape, dtype=torch.float32)
    n, h, w, c = total.stride()
    down, right = h * window.stride[0], w * window.stride[1]
    rows, columns = window.apart
    steps = (n, down * rows, right * columns, h * dy, w * dx, c)
    for row, column in itertools.product(range(rows), range(columns)):  # none of these overlap
        part = parts[:, row::rows, column::columns]
        if part.numel():
            total.as_strided(part.shape, steps, row * down + column * right).add_(part)
    return total[:, up : up + height, left : left + width].to(parts.dtype)


class Context(Protocol):
    """What autograd keeps from a forward pass to the backward one, as torch does not declare it.

    Attributes:
        shared: whether all users' weights are the same.
    """

    @property
    def saved_tensors(self) -> tuple[torch.Tensor, ...]:
        """What `save_for_backward` was given."""
        ...

    @property
    def needs_input_grad(self) -> tuple[bool, ...]:
        """For each argument of the forward pass."""
        ...

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Keep tensors that nobody writes to."""
        ...

    shared: bool


def multiplied(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Rows through a linear layer of each user.

    Args:
        x: [C·B, …, in].
        weight: [C, out, in].
        bias: [C, out].

    Returns:
        [C·B, …, out].
    """
    rows = lowered(x).reshape(len(weight), prod(x.shape[:-1]) // len(weight), x.shape[-1])
    y = _multiply(rows, weight, bias)
    return y.view(*x.shape[:-1], -1)


def convolved(
    images: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    window: Window,
    spare: list[torch.Tensor],
) -> torch.Tensor:
    """Images through a convolution of each user.

    Args:
        images: [C·B, height, width, in].
        weight: [C, out, in, kernel height, kernel width].
        bias: [C, out].
        window: of the convolution.
        spare: memory of earlier passes that are over, to be used again.

    Returns:
        [C·B, rows, columns, out].
    """
    return _convolve(lowered(images), weight, bias, window, spare)


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.shared = _same(weight)
        matrices = lowered(weight[:1] if ctx.shared else weight)
        ctx.save_for_backward(rows, matrices)
        return _products(rows, matrices.transpose(1, 2), bias, shared=ctx.shared)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, matrices = ctx.saved_tensors
        of_rows, _, of_bias = ctx.needs_input_grad
        return (
            _products(gradient, matrices, shared=ctx.shared) if of_rows else None,
            summed_outer(gradient.float(), rows.float()),
            gradient.sum(1, dtype=torch.float32) if of_bias else None,
        )


class _OfConvolution(Context, Protocol):
    seen: torch.Tensor
    spare: list[torch.Tensor]
    window: Window
    size: tuple[int, int]
    last: torch.Size


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _OfConvolution,
        images: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        window: Window,
        spare: list[torch.Tensor],
    ) -> torch.Tensor:
        last = lowered(weight).movedim(2, -1)  # as patches have channels last
        ctx.shared = _same(weight)
        matrices = (last[:1] if ctx.shared else last).flatten(2)
        seen = patches(images, window, spare.pop() if spare else None)
        ctx.save_for_backward(matrices)
        # Not saved as tensors are: the backward pass writes to the patches.
        ctx.seen, ctx.spare = seen, spare
        ctx.window, ctx.size = window, (images.shape[1], images.shape[2])
        ctx.last = last.shape
        y = seen.new_empty((*seen.shape[:3], len(weight[0])))
        rows, of_rows = (t.view(len(weight), -1, t.shape[-1]) for t in (seen, y))
        _products(rows, matrices.transpose(1, 2), bias, out=of_rows, shared=ctx.shared)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: _OfConvolution, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (matrices,) = ctx.saved_tensors
        seen, shape = ctx.seen, ctx.last
        of_images, _, biased, *_ = ctx.needs_input_grad
        rows = seen.view(shape[0], -1, seen.shape[-1])
        lanes = gradient.reshape(*rows.shape[:2], -1)
        products = summed_outer(lanes.float(), rows.float())
        of_weight = products.view(shape).movedim(-1, 2)
        images = None
        if of_images:
            _products(lanes, matrices, out=rows, shared=ctx.shared)
            images = added(seen, ctx.window, ctx.size)
        ctx.spare.append(seen)
        of_bias = lanes.sum(1, dtype=torch.float32) if biased else None
        return images, of_weight, of_bias, None, None


_multiply: Callable[..., torch.Tensor] = _Multiplied.apply
_convolve: Callable[..., torch.Tensor] = _Convolved.apply


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

    Never a view: autograd lets nobody change those that a function of ours gives.
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


@dataclass
class Current:
    """What the layers of one model compute with in the step in progress.

    To name it costs less than to put each tensor into its layer, as `functional_call` does.

    Attributes:
        parameters: of each user, [C, *shape], by name in the model.
        examples: C·B, how many there are.
    """

    parameters: TorchTensors = field(default_factory=dict)
    examples: int = 0


@dataclass(frozen=True)
class Held:
    """Where a layer finds its weight, and its bias if it has one."""

    current: Current
    names: tuple[str, ...]

    @property
    def weight(self) -> torch.Tensor:
        """[C, …]."""
        return self.current.parameters[self.names[0]]

    @property
    def bias(self) -> torch.Tensor | None:
        """[C, …], or None."""
        return self.current.parameters[self.names[1]] if len(self.names) > 1 else None


class LanesLinear(nn.Module):
    """`torch.nn.Linear`."""

    def __init__(self, held: Held) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[C·B, …, in] → [C·B, …, out]."""
        return multiplied(x, self.held.weight, self.held.bias)


class LanesConv2d(nn.Module):
    """`torch.nn.Conv2d` in one group; images lie channels last in memory, which is faster."""

    def __init__(self, layer: nn.Conv2d, held: Held) -> None:
        super().__init__()
        if isinstance(layer.padding, str) or layer.padding_mode != "zeros" or layer.groups != 1:
            raise ModelError("only a convolution in one group with zeros around can be a product")
        (kh, kw), (sh, sw) = layer.kernel_size, layer.stride
        (ph, pw), (dh, dw) = layer.padding, layer.dilation
        self.window = Window((kh, kw), (sh, sw), (ph, pw), (dh, dw))
        self.held = held
        self._spare: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[C·B, in, height, width] → [C·B, out, rows, columns]."""
        images = x.permute(0, 2, 3, 1)
        y = convolved(images, self.held.weight, self.held.bias, self.window, self._spare)
        return y.permute(0, 3, 1, 2)


class LanesEmbedding(nn.Module):
    """`torch.nn.Embedding`."""

    def __init__(self, layer: nn.Embedding, held: Held) -> None:
        super().__init__()
        self.held, self.padding = held, layer.padding_idx

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[C·B, …] numbers of words → [C·B, …, d]."""
        weight = self.held.weight
        lanes, _, width = weight.shape
        # Unlike a sum of offsets and numbers, this cannot reach into another user's slice.
        words = x.reshape(lanes, -1, 1).expand(-1, -1, width)
        y = weight.gather(1, words).view(*x.shape, width)
        return _constant_at(self.padding, x, y)


class LanesSharedEmbedding(nn.Module):
    """`torch.nn.Embedding` of what is the same for all examples, such as places in a text."""

    def __init__(self, layer: nn.Embedding, held: Held) -> None:
        super().__init__()
        self.held, self.padding = held, layer.padding_idx

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[…] or [1, …] numbers of words, for each example alike → [C·B, …, d]."""
        weight = self.held.weight
        lanes, _, width = weight.shape
        words = x[0] if x.dim() > 1 and len(x) == 1 else x
        y = weight.index_select(1, words.flatten()).view(lanes, 1, *words.shape, width)
        y = _constant_at(self.padding, words, y)
        each = self.held.current.examples // lanes
        return y.expand(-1, each, *y.shape[2:]).flatten(0, 1)


class LanesAffine(nn.Module):
    """A normalisation with weight and bias: the layer without them, then each user's own.

    Args:
        held: weight and bias.
        bare: the layer without weight and bias.
        channels_first: whether weights are of the axis after the first, and not of the last ones.
    """

    def __init__(self, held: Held, bare: nn.Module, *, channels_first: bool) -> None:
        super().__init__()
        self.held, self.bare, self.channels_first = held, bare, channels_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[C·B, …] → same shape."""
        x, weight, bias = self.bare(x), self.held.weight, self.held.bias
        lanes, *shape = weight.shape
        rest = x.dim() - 1 - len(shape)
        inner = (*shape, *[1] * rest) if self.channels_first else (*[1] * rest, *shape)
        y = x.view(lanes, -1, *x.shape[1:]) * weight.view(lanes, 1, *inner)
        if bias is not None:
            y = y + bias.view(lanes, 1, *inner)
        return y.view_as(x)


def stand_in(layer: nn.Module, held: Held, *, alike: bool = False) -> nn.Module:
    """The layer with parameters for each user.

    Args:
        layer: the layer.
        held: where it finds them.
        alike: whether it sees the same for all examples.

    Raises:
        ModelError: there is no such.
    """
    kind = type(layer)  # a subclass may do something else
    if isinstance(layer, nn.Linear) and kind is nn.Linear:
        return LanesLinear(held)
    if isinstance(layer, nn.Conv2d) and kind is nn.Conv2d:
        return LanesConv2d(layer, held)
    if isinstance(layer, nn.Embedding) and kind is nn.Embedding and layer.max_norm is None:
        return LanesSharedEmbedding(layer, held) if alike else LanesEmbedding(layer, held)
    if isinstance(layer, nn.GroupNorm) and kind is nn.GroupNorm:
        bare = nn.GroupNorm(layer.num_groups, layer.num_channels, layer.eps, affine=False)
        return LanesAffine(held, bare, channels_first=True)
    if isinstance(layer, nn.LayerNorm) and kind is nn.LayerNorm:
        shape = list(layer.normalized_shape)
        plain = nn.LayerNorm(shape, layer.eps, elementwise_affine=False)
        return LanesAffine(held, plain, channels_first=False)
    raise ModelError(f"a layer of type {kind.__name__} cannot have weights for each user")


def _constant_at(padding: int | None, words: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What words [*] are embedded to, [… *, d], without a gradient where they are padding."""
    return y if padding is None else torch.where((words == padding)[..., None], y.detach(), y)


_TOUCHES = 40  # multiplications in the time that it takes to change a weight in memory


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
        """Linear layers for which low-rank corrections cost less than weights for each user.

        Args:
            steps: of each user.
            batch: examples in each step.
        """
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

    def side_by_side(self, low_rank: Iterable[str] = ()) -> "SideBySide":
        """A copy of the model for many users, the same one each time: for one thread.

        Args:
            low_rank: names of layers that get low-rank corrections.
        """
        names = frozenset(low_rank)
        if names not in self._copies:
            self._copies[names] = SideBySide(self, names)
        return self._copies[names]

    @cached_property
    def _copies(self) -> dict[frozenset[str], "SideBySide"]:
        return {}

    @cached_property
    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.model.named_parameters()}


class SideBySide:
    """A copy of a model that the examples of many users go through side by side.

    All other tensors than those of trained layers are shared with the model.

    Attributes:
        model: the copy.
    """

    def __init__(self, layers: Layers, low_rank: Iterable[str]) -> None:
        """Copy.

        Args:
            layers: of the model.
            low_rank: names of linear layers that get corrections in place of weights for each user.
        """
        self._current = Current()
        self._slots = {name: _Slot() for name in low_rank}
        memo: dict[int, object] = {
            id(t): t for t in (*layers.model.parameters(), *layers.model.buffers())
        }
        for name, layer in layers.trained.items():
            held = Held(self._current, layers.parameters(name))
            other = stand_in(layer, held, alike=name in layers.alike)
            memo[id(layer)] = self._slots.get(name, other)
        self.model: nn.Module = copy.deepcopy(layers.model, memo)

    @contextmanager
    def corrected(self, by: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]) -> Iterator[None]:
        """Use these in place of the layers of their names, and let go of all tensors after it."""
        for name, layer in by.items():
            self._slots[name].layer = layer
        try:
            yield
        finally:
            self._current.parameters = {}
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
        """Outputs for all examples.

        Args:
            own: parameters of each user, [C, *shape].
            constants: frozen parameters and buffers.
            x: [C·B, …] examples; on the device "meta" if they enter by a layer that has them.
            activations: of the model.
            device: where it computes.
        """
        self._current.parameters, self._current.examples = own, len(x)
        return outputs_of(self.model, constants, x, activations, device)


class _Slot(nn.Module):
    """Where a low-rank layer is put in while it is needed."""

    layer: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layer is None:
            raise RuntimeError("a layer with low-rank corrections was called before it had any")
        return self.layer(x)
