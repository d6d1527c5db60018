"""Products of examples with a matrix for each user, and what they give back.

While all users' weights are the same, as before their first step, the products with them are one
for all users; only the gradients by the weights are for each user. They are float32 and so are
their sums, also where activations have fewer bits.
"""

from math import prod

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from fedpriv.engine.matmul import product
from fedpriv.engine.patches import Window, added, patches
from fedpriv.engine.precision import lowered


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
    y: torch.Tensor = _Multiplied.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
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
    y: torch.Tensor = _Convolved.apply(  # type: ignore[no-untyped-call]
        lowered(images), weight, bias, window, spare
    )
    return y


class _Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        matrices = lowered(weight[:1] if _same(weight) else weight)
        ctx.save_for_backward(rows, matrices)
        return _products(rows, matrices.transpose(1, 2), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, matrices = ctx.saved_tensors  # type: ignore[attr-defined]
        of_rows, _, of_bias = ctx.needs_input_grad  # type: ignore[attr-defined]
        return (
            _products(gradient, matrices) if of_rows else None,
            product(gradient.transpose(1, 2).float(), rows.float()),
            gradient.sum(1, dtype=torch.float32) if of_bias else None,
        )


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        images: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        window: Window,
        spare: list[torch.Tensor],
    ) -> torch.Tensor:
        last = lowered(weight).movedim(2, -1)  # as patches have channels last
        matrices = (last[:1] if _same(weight) else last).flatten(2)
        seen = patches(images, window, spare.pop() if spare else None)
        ctx.save_for_backward(matrices)
        # Not saved as tensors are: the backward pass writes to the patches.
        ctx.seen, ctx.spare = seen, spare  # type: ignore[attr-defined]
        ctx.window, ctx.size = window, images.shape[1:3]  # type: ignore[attr-defined]
        ctx.last = last.shape  # type: ignore[attr-defined]
        y = _products(seen.view(len(weight), -1, seen.shape[-1]), matrices.transpose(1, 2), bias)
        return y.view(*seen.shape[:3], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (matrices,) = ctx.saved_tensors  # type: ignore[attr-defined]
        seen: torch.Tensor = ctx.seen  # type: ignore[attr-defined]
        shape: torch.Size = ctx.last  # type: ignore[attr-defined]
        of_images, _, of_bias, *_ = ctx.needs_input_grad  # type: ignore[attr-defined]
        rows = seen.view(shape[0], -1, seen.shape[-1])
        lanes = gradient.reshape(*rows.shape[:2], -1)
        products = product(lanes.transpose(1, 2).float(), rows.float())
        of_weight = products.view(shape).movedim(-1, 2)
        images = None
        if of_images:
            _products(lanes, matrices, out=rows)
            images = added(seen, ctx.window, ctx.size)  # type: ignore[attr-defined]
        ctx.spare.append(seen)  # type: ignore[attr-defined]
        of_bias = lanes.sum(1, dtype=torch.float32) if of_bias else None
        return images, of_weight, of_bias, None, None


def _same(parameter: torch.Tensor) -> bool:
    """Whether all users' are one in memory."""
    return len(parameter) == 1 or parameter.stride(0) == 0


def _products(
    rows: torch.Tensor,
    matrices: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[C, n, i] times [C, i, o] or [1, i, o], plus [C, o]: [C, n, o], in `out` if given."""
    shift = None if bias is None else bias[:, None].to(rows.dtype)
    if len(matrices) == len(rows):
        return product(rows, matrices, shift, out=out)
    flat, into = rows.flatten(0, 1), None if out is None else out.flatten(0, 1)
    y = product(flat, matrices[0], None if shift is None else shift[0], out=into)
    return y.view(*rows.shape[:2], -1)
