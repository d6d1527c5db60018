"""Products of matrices are the same from either library."""

import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_info

from fedpriv.engine import layers
from fedpriv.engine.layers import one_blas_thread, product, shared_product, summed_outer

SIZES = st.integers(1, 6)
AS_THEY_LIE = ("rows", "columns", "every other", "repeated")


@pytest.fixture(params=["numpy", "torch"], autouse=True, scope="module")
def library(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "numpy_is_faster", lambda: request.param == "numpy")
        yield request.param


def drawn(seed: int, shape: tuple[int, ...], lie: str) -> torch.Tensor:
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


def by_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The slow obvious twin, in float64."""
    return (a.double()[..., :, :, None] * b.double()[..., None, :, :]).sum(-2)


@given(
    lanes=st.none() | st.integers(1, 4),
    sizes=st.tuples(SIZES, SIZES, SIZES),
    lie=st.tuples(st.sampled_from(AS_THEY_LIE), st.sampled_from(AS_THEY_LIE)),
    into=st.booleans(),
)
def test_product_is_the_sum_of_products(
    lanes: int | None, sizes: tuple[int, int, int], lie: tuple[str, str], into: bool
) -> None:
    (n, k, m), front = sizes, () if lanes is None else (lanes,)
    a, b = drawn(0, (*front, n, k), lie[0]), drawn(1, (*front, k, m), lie[1])
    out = torch.full((*front, n, m), torch.nan) if into else None
    found = product(a, b, out=out)
    torch.testing.assert_close(found.double(), by_sums(a, b), rtol=1e-5, atol=1e-5)
    if out is not None:
        assert found.data_ptr() == out.data_ptr()


@given(
    st.tuples(*[st.integers(1, 70)] * 3),
    st.tuples(st.booleans(), st.booleans()),
    st.integers(0, 9),
    st.integers(0, 7),
)
def test_a_product_has_the_same_bits_in_every_place(
    library: str, sizes: tuple[int, int, int], turned: tuple[bool, bool], lane: int, offset: int
) -> None:
    assume_used(library)
    n, k, m = sizes
    a = drawn(0, (10, n, k), "columns" if turned[0] else "rows")
    b = drawn(1, (10, k, m), "columns" if turned[1] else "rows")
    everyone = product(a, b)
    alone = product(moved(a[lane : lane + 1], offset), moved(b[lane : lane + 1], 0))
    assert torch.equal(alone[0], everyone[lane])
    order = torch.randperm(10, generator=torch.Generator().manual_seed(lane))
    assert torch.equal(product(moved(a[order], 0), moved(b[order], offset)), everyone[order])


def assume_used(library: str) -> None:
    kernels = {each.get("architecture") for each in threadpool_info()}
    if library == "numpy" and not kernels & set(layers._WIDE):
        pytest.skip("OpenBLAS has no AVX-512 here, so the engine leaves products to torch")


def moved(matrices: torch.Tensor, numbers: int) -> torch.Tensor:
    """A copy that begins so many numbers after aligned memory and lies as the original does."""
    turned = matrices.stride(-1) != 1
    matrices = matrices.mT if turned else matrices
    copy = torch.empty(matrices.numel() + numbers)[numbers:].view(matrices.shape)
    copy.copy_(matrices)
    return copy.mT if turned else copy


@given(st.integers(1, 200), st.integers(1, 100), st.integers(1, 70), st.integers(1, 150))
def test_a_row_through_a_shared_matrix_has_the_same_bits_in_every_place(
    library: str, count: int, k: int, m: int, others: int
) -> None:
    assume_used(library)
    rows, matrix = drawn(0, (count, k), "rows"), drawn(1, (k, m), "rows")
    together = through(rows, matrix)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(k))
    assert torch.equal(through(rows[order], matrix), together[order])
    beside = torch.cat([drawn(2, (others, k), "rows"), rows])
    assert torch.equal(through(beside, matrix)[others:], together)
    torch.testing.assert_close(together.double(), by_sums(rows, matrix), rtol=1e-5, atol=1e-4)


def through(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Rows through one matrix of all of them."""
    out = torch.empty(len(rows), matrix.shape[1])
    shared_product(rows, matrix, out=out)
    return out


@given(st.integers(1, 3), st.integers(0, 40), SIZES, SIZES, st.sampled_from([1, 10, 50, 10**6]))
def test_sums_of_outer_products_are_those_of_pieces(
    lanes: int, rows: int, i: int, o: int, at_once: int
) -> None:
    left, right = drawn(0, (lanes, rows, i), "rows"), drawn(1, (lanes, rows, o), "rows")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "_AS_THEY_LIE", at_once)
        found = summed_outer(left, right)
    torch.testing.assert_close(
        found.double(), by_sums(left.mT, right), rtol=1e-5, atol=1e-5, check_stride=False
    )


@pytest.mark.parametrize(
    ("rows", "size", "pieces"),
    [(1960, 16 * 64, 4), (250, 32 * 256, 1), (100, 1024, 1), (1997, 1024, 1), (1998, 1024, 6)],
)
def test_long_rows_of_small_results_are_cut_evenly(rows: int, size: int, pieces: int) -> None:
    assert layers._pieces(rows, size) == pieces
    assert rows % pieces == 0


def test_one_matrix_may_be_repeated_for_all_lanes() -> None:
    a, b = drawn(0, (3, 4, 5), "rows"), drawn(1, (1, 5, 2), "rows").expand(3, 5, 2)
    torch.testing.assert_close(product(a, b).double(), by_sums(a, b), rtol=1e-5, atol=1e-5)


def test_autograd_does_not_see_it() -> None:
    a = torch.ones(2, 2, requires_grad=True)
    assert not product(a, a).requires_grad


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_what_is_not_finite_stays_with_its_lane_and_nothing_is_said(value: float) -> None:
    a = torch.ones(2, 3, 4)
    a[0, 0, 0] = value
    b = torch.full((2, 4, 5), 2.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = product(a, b)
    assert not torch.isfinite(found[0, 0]).any()
    torch.testing.assert_close(found[1], torch.full((3, 5), 8.0))
    torch.testing.assert_close(found[0, 1:], torch.full((2, 5), 8.0))


def test_numpy_has_one_thread_and_those_before_again() -> None:
    def threads() -> set[int]:
        return {
            int(pool["num_threads"])
            for pool in threadpool_info()
            if pool["internal_api"] == "openblas"
        }

    before = threads()
    with one_blas_thread():
        assert threads() <= {1}
    assert threads() == before
