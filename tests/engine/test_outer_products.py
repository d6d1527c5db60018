"""Matrices in factors: norms are never taken to be less, and sums are those of the matrices."""

import subprocess
import sys
from fractions import Fraction
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpriv.engine.clipping import clipped_sum
from fedpriv.engine.outer_products import OuterProducts, few_rows
from fedpriv.privacy.contribution import Clipping
from fedpriv.privacy.groups import flat, joint, per_layer
from fedpriv.privacy.layout import Layout
from tests.engine.everyone import assert_close

floats = st.floats(width=32, min_value=-(2.0**60), max_value=2.0**60)
shapes = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))


@st.composite
def one_user(draw: st.DrawFn) -> OuterProducts:
    """Rows of any lengths, some of which are drawn to undo others."""
    rows, out, width = draw(shapes)
    left, right = (
        draw(hnp.arrays(np.float32, (rows, size), elements=floats)) for size in (out, width)
    )
    if draw(st.booleans()):
        left, right = np.concatenate([left, -left]), np.concatenate([right, right])
    return OuterProducts(torch.from_numpy(left)[None], torch.from_numpy(right)[None])


def exact_square(factors: OuterProducts) -> Fraction:
    """Of the norm of the one user's matrix, without any rounding."""
    left, right = (
        [[Fraction(float(number)) for number in row] for row in rows[0]]
        for rows in (factors.left, factors.right)
    )
    return sum(
        (
            sum((one[i] * other[j] for one, other in zip(left, right, strict=True)), Fraction(0))
            ** 2
            for i, j in np.ndindex(len(left[0]), len(right[0]))
        ),
        Fraction(0),
    )


def of_users(users: int, rows: int, out: int, width: int, scale: float = 1.0) -> OuterProducts:
    generator = torch.Generator().manual_seed(rows)
    left = torch.randn(users, rows, out, generator=generator) * scale
    # As pixels are: no number is negative, so rows' products do not cancel.
    return OuterProducts(left, torch.rand(users, rows, width, generator=generator))


@given(one_user())
@example(OuterProducts(torch.full((1, 1, 1), 1e20), torch.full((1, 1, 1), 1e-30)))
@example(OuterProducts(torch.full((1, 1, 1), 1e18), torch.full((1, 1, 3), 1e-24)))
def test_no_norm_is_taken_to_be_less_than_it_is(factors: OuterProducts) -> None:
    (bound,) = factors.norm_bounds().tolist()
    assert not np.isfinite(bound) or Fraction(bound) ** 2 >= exact_square(factors)


# A clipping norm over a scale is 1e-42 at least; quotients far below that lose their digits.
@given(one_user(), st.floats(1e-200, 1.0))
def test_nor_less_than_that_of_what_is_added(factors: OuterProducts, share: float) -> None:
    bounds = factors.norm_bounds()
    if torch.isfinite(bounds).all():
        added = factors.weighted_sum(share / bounds, bounds)
        square = sum((Fraction(float(x)) ** 2 for x in added.flatten()), Fraction(0))
        assert square <= Fraction(share) ** 2 * (1 + Fraction(1, 2**50))


@pytest.mark.parametrize(("rows", "out", "width"), [(1, 10, 784), (50, 128, 784), (60, 30, 100)])
def test_bounds_are_close_to_norms(rows: int, out: int, width: int) -> None:
    factors = of_users(4, rows, out, width)
    exact = factors.left.double().mT @ factors.right.double()
    norms = torch.linalg.matrix_norm(exact)
    bounds = factors.norm_bounds()
    assert torch.all(bounds >= norms)
    assert torch.all(bounds <= norms * 1.0005)


def test_products_that_are_known_are_used_and_what_is_above_the_diagonal_is_not() -> None:
    factors = of_users(3, 7, 5, 9)
    products = factors.right @ factors.right.mT
    unread = torch.full_like(products, torch.nan).triu(1)
    known = OuterProducts(factors.left, factors.right, products.tril() + unread)
    torch.testing.assert_close(known.norm_bounds(), factors.norm_bounds(), rtol=1e-5, atol=0.0)
    others = OuterProducts(factors.left, factors.right, 4.0 * products)
    torch.testing.assert_close(others.norm_bounds(), 2.0 * factors.norm_bounds())


def test_the_sum_is_that_of_the_matrices() -> None:
    factors = of_users(6, 7, 5, 9)
    weights = torch.linspace(0.0, 2.0, 6, dtype=torch.float64)
    expected = torch.einsum("c,cri,crj->ij", weights.float(), factors.left, factors.right)
    found = factors.weighted_sum(weights, factors.norm_bounds())
    torch.testing.assert_close(found.float(), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_user_without_weight_adds_nothing(side: str, bad: float) -> None:
    factors = of_users(3, 4, 5, 6)
    weights = torch.tensor([0.5, 0.0, 1.0], dtype=torch.float64)
    expected = factors.weighted_sum(weights, factors.norm_bounds())
    getattr(factors, side)[1, 2] = bad
    bounds = factors.norm_bounds()
    assert torch.isfinite(expected).all()
    assert torch.isfinite(bounds).tolist() == [True, False, True]
    assert torch.equal(factors.weighted_sum(weights, bounds), expected)


LAYOUT = Layout(("a", "b.weight", "c", "d.weight", "e"), ((2,), (5, 9), (3,), (4, 8), (7,)))
GROUPS = {
    "flat": flat(LAYOUT, 2.0),
    "per-layer": per_layer(
        LAYOUT, {"x": ("c", "b.weight"), "y": ("a", "e", "d.weight")}, {"x": 1.0, "y": 1e-3}
    ),
    "alone": per_layer(
        LAYOUT, {name: (name,) for name in LAYOUT.names}, dict.fromkeys(LAYOUT.names, 0.3)
    ),
    "joint": joint(LAYOUT, 1.5, {n: 10.0**i for i, n in enumerate(LAYOUT.names, start=-2)}),
}


@pytest.mark.parametrize("strategy", sorted(GROUPS))
@pytest.mark.parametrize("norm", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_clipped_sums_are_those_of_wholes(strategy: str, norm: float, scale: float) -> None:
    factors = {
        "b.weight": of_users(6, 2, 5, 9, scale),
        "d.weight": of_users(6, 3, 4, 8, scale),
    }
    assert all(one.stay_factors for one in factors.values())
    others = {n: torch.randn(6, prod(LAYOUT.shapes[LAYOUT.names.index(n)])) for n in "ace"}
    groups = tuple(type(g)(g.name, g.tensors, norm, g.scales) for g in GROUPS[strategy])
    clipping = Clipping(LAYOUT, groups, weighted=(groups[0].name,))
    weights = torch.linspace(0.0, 1.0, 6, dtype=torch.float64)
    found = clipped_sum({**others, **factors}, clipping, weights)
    wholes = {**others, **{name: one[:] for name, one in factors.items()}}
    expected = clipped_sum(wholes, clipping, weights)
    for place in LAYOUT.slices.values():
        assert_close(found[place].numpy(), expected[place].numpy(), 1e-5)


@given(st.integers(0, 5))
def test_users_are_clipped_each_for_itself(user: int) -> None:
    layout = Layout(("w",), ((5, 9),))
    factors, clipping = of_users(6, 3, 5, 9), Clipping(layout, flat(layout, 0.5))
    one = OuterProducts(factors.left[user, None], factors.right[user, None])
    alone = clipped_sum({"w": one}, clipping)
    assert 0.499 < float(alone.norm()) <= 0.5
    rest = [other for other in range(6) if other != user]
    without = clipped_sum({"w": OuterProducts(factors.left[rest], factors.right[rest])}, clipping)
    together = clipped_sum({"w": factors}, clipping)
    assert_close((together - without).numpy(), alone.numpy())


def test_many_rows_are_made_a_matrix() -> None:
    assert few_rows(50, 128, 784)
    assert few_rows(1, 10, 784)
    assert not few_rows(50, 10, 128)
    assert not few_rows(1, 10, 2**20)  # whose bound would be far from the norm


COARSER = [
    'torch.set_float32_matmul_precision("medium")',
    "torch.backends.cuda.matmul.allow_tf32 = True",
    'torch.backends.cuda.matmul.fp32_precision = "tf32"',
    'torch.backends.fp32_precision = "tf32"',
]


@pytest.mark.parametrize("setting", COARSER)
def test_products_that_may_be_coarse_are_made_a_matrix(setting: str) -> None:
    # Of the whole process, and they cannot all be taken back.
    asked = "print(few_rows(50, 128, 784))"
    code = f"import torch; from {few_rows.__module__} import few_rows; {asked}; {setting}; {asked}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "False"]


@pytest.mark.parametrize(
    ("name", "value", "exact"),
    [
        ("NVIDIA_TF32_OVERRIDE", "1", False),
        ("NVIDIA_TF32_OVERRIDE", "0", True),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "BF16", False),
        ("DNNL_DEFAULT_FPMATH_MODE", "ANY", False),
        ("DNNL_DEFAULT_FPMATH_MODE", "STRICT", True),
    ],
)
def test_so_are_those_that_the_environment_makes_coarse(
    name: str, value: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert few_rows(50, 128, 784) == exact


def test_users_with_norms_beyond_float32_count_as_zero() -> None:
    layout = Layout(("w",), ((5, 9),))
    clipping = Clipping(layout, flat(layout, 0.5))
    huge, factors = of_users(2, 3, 5, 9, 1e31), of_users(2, 3, 5, 9)
    assert not clipped_sum({"w": huge}, clipping).any()
    left, right = (torch.cat([getattr(huge, n), getattr(factors, n)]) for n in ("left", "right"))
    together = clipped_sum({"w": OuterProducts(left, right)}, clipping)
    assert torch.equal(together, clipped_sum({"w": factors}, clipping))
