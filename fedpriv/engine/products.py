"""Products of examples with a matrix for each user, and what they give back.

While all users' weights are the same, as before their first step, the products with them are one
for all users; only the gradients by the weights are for each user. They are float32 and so are
their sums, also where activations have fewer bits.
"""

from collections.abc import Callable
from math import prod
from typing import Protocol

import torch
from torch.autograd.function import once_differentiable

from fedpriv.engine.matmul import product, shared_product, summed_outer
from fedpriv.engine.patches import Window, added, patches
from fedpriv.engine.precision import lowered


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
