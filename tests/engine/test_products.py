"""Products of matrices, patches of images and learning without weights, against NumPy's float64."""

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info
from torch import Tensor
from torch.nn import functional

from fedpriv.engine import products as module
from fedpriv.engine.products import (
    LowRank,
    Window,
    _multiply,
    added,
    convolved,
    multiplied,
    one_blas_thread,
    patches,
    product,
)

Layer = Callable[[Tensor, Tensor, Tensor | None], Tensor]
SIZES, USERS = st.integers(1, 6), 3
AS_THEY_LIE = ("rows", "columns", "every other", "repeated")
lies = st.sampled_from(AS_THEY_LIE)
pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


def drawn(seed: int, shape: tuple[int, ...], lie: str = "rows") -> Tensor:
    """Random matrices of a shape that lie in memory in a way."""
    generator = torch.Generator().manual_seed(seed)
    *lanes, n, m = shape
    if lie == "columns":
        return torch.randn((*lanes, m, n), generator=generator).transpose(-1, -2)
    if lie == "every other":
        return torch.randn((*lanes, n, 2 * m), generator=generator)[..., ::2]
    if lie == "repeated":
        return torch.randn((*lanes, 1, 1), generator=generator).expand(shape)
    return torch.randn(shape, generator=generator)


def exact(a: Tensor, b: Tensor) -> Tensor:
    """A product in float64."""
    return torch.from_numpy(a.detach().double().numpy() @ b.detach().double().numpy())


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4, check_stride=False)


@given(st.integers(1, 4), st.tuples(st.integers(1, 70), SIZES, SIZES), lies, lies, st.booleans())
def test_rows_are_multiplied_by_matrices_of_their_lane_or_of_all(
    lanes: int, sizes: tuple[int, int, int], lie: str, other: str, shared: bool
) -> None:
    n, k, m = sizes
    rows = drawn(0, (lanes, n, k), lie)
    matrices = drawn(1, (1 if shared else lanes, k, m), other)
    given_memory = torch.full((lanes, n, m), torch.nan)
    assert_close(_multiply(rows, matrices), exact(rows, matrices))
    found = _multiply(rows, matrices, given_memory)
    assert found is given_memory
    assert_close(found, exact(rows, matrices))
    assert_close(product(rows, matrices.expand(lanes, k, m)), exact(rows, matrices))


@pytest.mark.parametrize("place_matters", [True, False])
def test_rows_go_through_one_matrix_whether_their_place_matters_or_not(
    place_matters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_place_matters", lambda: place_matters)
    for lanes in (2, 30):
        rows, matrix = drawn(0, (lanes, 5, 40)), drawn(1, (1, 40, 30))
        assert_close(_multiply(rows, matrix), exact(rows, matrix))


@given(
    st.tuples(*[st.integers(1, 70)] * 3), st.tuples(lies, lies), st.integers(0, 9), st.booleans()
)
def test_a_product_has_the_same_bits_in_every_place(
    sizes: tuple[int, int, int], lie: tuple[str, str], lane: int, shared: bool
) -> None:
    n, k, m = sizes
    a, b = drawn(0, (10, n, k), lie[0]), drawn(1, (1 if shared else 10, k, m), lie[1])
    everyone, order = _multiply(a, b), torch.randperm(10)
    turned = _multiply(a[order].contiguous(), b if shared else b[order].contiguous())
    plain = _multiply(a.contiguous(), b if shared else b.contiguous())
    assert torch.equal(turned, plain[order])
    few = _multiply(a[lane:][:3], b if shared else b[lane:][:3])
    assert len(few) == 1 or torch.equal(few, everyone[lane:][:3])


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_what_is_not_finite_stays_with_its_lane_and_nothing_is_said(value: float) -> None:
    a = torch.ones(2, 3, 4)
    a[0, 0, 0] = value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = product(a, torch.full((2, 4, 5), 2.0))
    assert not torch.isfinite(found[0, 0]).any()
    torch.testing.assert_close(found[1], torch.full((3, 5), 8.0))
    torch.testing.assert_close(found[0, 1:], torch.full((2, 5), 8.0))


def test_numpy_has_one_thread_and_those_before_again() -> None:
    def threads() -> set[int]:
        pools = threadpool_info()
        return {int(p["num_threads"]) for p in pools if p["internal_api"] == "openblas"}

    before = threads()
    with one_blas_thread():
        assert threads() <= {1}
    assert threads() == before


# Layers of users.


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return convolved(x, weight, bias, Window((2, 3), (1, 2), (1, 0), (1, 1)))


LAYERS = [(multiplied, (USERS, 10, 4), (2, 4)), (convolution, (6, 5, 7, 4), (2, 4, 2, 3))]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("layer", "inputs", "weight"), LAYERS)
def test_shared_weights_have_a_gradient_of_each_user(
    layer: Layer, inputs: tuple[int, ...], weight: tuple[int, ...], biased: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(inputs, generator=generator).requires_grad_()
    one = [torch.randn(weight, generator=generator), torch.randn(weight[0], generator=generator)]
    found = []
    for shared in (True, False):
        each = [p.expand(USERS, *p.shape) for p in one[: 1 + biased]]
        leaves = [(p if shared else p.clone().contiguous()).detach() for p in each]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        y = layer(x, leaves[0], leaves[1] if biased else None)
        weights = torch.arange(y.numel()).view_as(y).cos()
        found.append([y, *torch.autograd.grad((y * weights).sum(), [x, *leaves])])
    for in_one, apart in zip(*found, strict=True):
        torch.testing.assert_close(in_one, apart, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found[0][2][0], found[0][2][1])


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    ("layer", "inputs", "weight"),
    [(multiplied, (USERS, 4, 4), (1, 4)), (convolution, (6, 3, 3, 1), (1, 1, 2, 3))],
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
    for rounded, true in zip(*found, strict=True):
        assert rounded.dtype == torch.float32
        assert torch.equal(rounded, true)
        assert not torch.equal(true, true.bfloat16())


@settings(max_examples=30)
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


# Learning without weights.


@given(
    st.integers(1, 3),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
    st.integers(0, 2**30),
    st.booleans(),
    st.integers(1, 3),
)
def test_a_layer_without_weights_learns_as_one_with_them(
    lanes: int, calls: list[int], seed: int, biased: bool, block: int
) -> None:
    """Steps in each of which it is called a few times; from step to step, fewer users go on."""
    rng = np.random.default_rng(seed)
    w, b, rate = rng.standard_normal((4, 5)), rng.standard_normal(4) * biased, 0.1
    weight, bias = (torch.from_numpy(array).float() for array in (w, b))
    layer = LowRank(weight, bias if biased else None, lanes, 2 * sum(calls), rate, block)
    own_w, own_b = np.stack([w] * lanes), np.stack([b] * lanes)
    for step, times in enumerate(calls):
        users = max(1, lanes - step)
        absent = rng.random(users) < 0.3
        present = None if not absent.any() else torch.from_numpy(~absent)
        layer.begin(users, present)
        given_, outputs, inputs = [], [], []
        for _ in range(times):
            x = rng.standard_normal((users, 2, 5))
            x[absent] = np.nan
            leaf = torch.from_numpy(x).float().flatten(0, 1).requires_grad_()
            outputs.append(layer(leaf).view(users, 2, 4))
            given_.append(x)
            inputs.append(leaf)
        way = rng.standard_normal((times, users, 2, 4))
        total = sum(
            (y * torch.from_numpy(g).float()).sum() for y, g in zip(outputs, way, strict=True)
        )
        _, *back = torch.autograd.grad(total, (layer.probe, *inputs), allow_unused=True)
        layer.end_step()
        before = own_w[:users].copy()
        for x, y, g, own in zip(given_, outputs, way, back, strict=True):
            here = np.einsum("uoi,uri->uro", before, x) + own_b[:users, None]
            np.testing.assert_allclose(y.detach()[~absent], here[~absent], atol=1e-4)
            by_inputs = np.einsum("uoi,uro->uri", before, g)
            np.testing.assert_allclose(own.view(users, 2, 5), by_inputs, atol=1e-4)
        for x, g in zip(given_, way, strict=True):
            own_w[:users][~absent] -= rate * np.einsum("uro,uri->uoi", g, x)[~absent]
        own_b[:users][~absent] -= rate * biased * way.sum((0, 2))[~absent]
    moved, *of_bias = layer.updates()
    assert moved.shape == (lanes, 4, 5)
    np.testing.assert_allclose(moved[:], own_w - w, atol=1e-4)
    np.testing.assert_allclose(moved[lanes - 1 :][0], (own_w - w)[-1], atol=1e-4)
    for update in of_bias:
        np.testing.assert_allclose(update, own_b - b, atol=1e-4)
    assert len(of_bias) == biased
