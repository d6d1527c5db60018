"""Layers with weights for each of the users of a chunk.

Each stands in for a layer of torch and computes with parameters that have an axis in front, one
slice for each of C users. Its input holds the examples of all users side by side, [C·B, …]; each
user's go through that user's slice, in one batched matrix product.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from fedpriv.engine.patches import Window
from fedpriv.engine.products import convolved, multiplied
from fedpriv.engine.task import TorchTensors
from fedpriv.errors import ModelError


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
