"""Products with weights that all users share, against the same weights copied for each user."""

from collections.abc import Callable

import pytest
import torch

from fedpriv.engine.layers import Window, convolved, multiplied
from fedpriv.engine.task import lowered

Layer = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
USERS = 3


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return multiplied(lowered(x), weight, bias)


def convolution(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return convolved(lowered(x), weight, bias, Window((2, 3), (1, 2), (1, 0), (1, 1)))


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("layer", "inputs", "weight"),
    [(linear, (USERS, 10, 4), (2, 4)), (convolution, (6, 5, 7, 4), (2, 4, 2, 3))],
)
def test_shared_weights_have_a_gradient_of_each_user(
    layer: Layer, inputs: tuple[int, ...], weight: tuple[int, ...], biased: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(inputs, generator=generator).requires_grad_()
    one = [torch.randn(weight, generator=generator), torch.randn(weight[0], generator=generator)]
    found = []
    for shared in (True, False):
        each = [p.expand(USERS, *p.shape) for p in one[: 1 + biased]]
        given = [(p if shared else p.clone(memory_format=torch.contiguous_format)) for p in each]
        leaves = [p.detach().requires_grad_() for p in given]
        y = layer(x, leaves[0], leaves[1] if biased else None)
        weights = torch.arange(y.numel()).view_as(y).cos()
        found.append([y, *torch.autograd.grad((y * weights).sum(), [x, *leaves])])
    for in_one, apart in zip(*found, strict=True):
        torch.testing.assert_close(in_one, apart, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found[0][2][0], found[0][2][1])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("layer", "inputs", "weight"),
    [(linear, (USERS, 4, 4), (1, 4)), (convolution, (6, 3, 3, 1), (1, 1, 2, 3))],
)
def test_gradients_of_bfloat16_are_added_up_in_float32(
    layer: Layer, inputs: tuple[int, ...], weight: tuple[int, ...], shared: bool
) -> None:
    one = torch.ones(USERS, *weight)
    leaves = [one[:1].expand(USERS, *weight) if shared else one, torch.ones(USERS, 1)]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    found = []
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = layer(torch.ones(inputs), *leaves)
        assert y.dtype == (torch.bfloat16 if enabled else torch.float32)
        # Each user's first gradient is 1 and the others 2⁻⁹: 8 bits cannot hold their sum.
        gradient = torch.full((USERS, y.numel() // USERS), 2.0**-9)
        gradient[:, 0] = 1.0
        found.append(torch.autograd.grad(y, leaves, gradient.view_as(y).to(y.dtype)))
    for rounded, exact in zip(*found, strict=True):
        assert rounded.dtype == torch.float32
        assert torch.equal(rounded, exact)
        assert not torch.equal(exact, exact.bfloat16())
