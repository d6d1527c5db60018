"""Patches against torch's own unfold and fold."""

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional

from fedpriv.engine.layers import Window, added, patches

pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


@settings(deadline=None)
@given(
    st.builds(Window, pairs, pairs, st.tuples(st.integers(0, 2), st.integers(0, 2)), pairs),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.integers(1, 3),
    st.booleans(),
)
def test_patches_are_those_of_unfold_and_sums_of_them_its_gradient(
    window: Window, size: tuple[int, int], channels: int, channels_last: bool
) -> None:
    rows, columns = window.positions(*size)
    assume(rows > 0 and columns > 0)
    generator = torch.Generator().manual_seed(0)
    memory = torch.channels_last if channels_last else torch.contiguous_format
    images = torch.randn(2, channels, *size, generator=generator).contiguous(memory_format=memory)
    images.requires_grad_()
    found = patches(images.detach().permute(0, 2, 3, 1), window)
    given_ = (window.kernel, window.dilation, window.padding, window.stride)
    unfolded = functional.unfold(images, *given_).view(2, channels, -1, rows, columns)
    expected = unfolded.permute(0, 3, 4, 2, 1).flatten(3)
    assert torch.equal(found, expected)
    weights = torch.randn(found.shape, generator=generator)
    (right,) = torch.autograd.grad((expected * weights).sum(), images)
    got = added(weights, window, size).permute(0, 3, 1, 2)
    torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)
