"""Updates in factors are clipped and summed as the matrices that they stand for."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpriv.engine import updates as module
from fedpriv.engine.clipping import clipped_sum, group_norms
from fedpriv.engine.outer_products import OuterProducts
from fedpriv.engine.updates import Updates, few_lanes, whole
from fedpriv.privacy.contribution import Clipping
from fedpriv.privacy.groups import flat, joint, layers, per_layer
from fedpriv.privacy.layout import Layout

LAYOUT = Layout(("a.weight", "a.bias"), ((3, 4), (3,)))
GROUPS = {
    "flat": flat(LAYOUT, 0.7),
    "per-layer": per_layer(LAYOUT, {"w": ("a.weight",), "b": ("a.bias",)}, {"w": 1.0, "b": 0.1}),
    "joint": joint(LAYOUT, 1.5, {"a.weight": 0.1, "a.bias": 3.0}),
}
rows_ = st.integers(1, 5)


@st.composite
def updates_of_users(draw: st.DrawFn, **limits: float) -> Updates:
    users, rows = draw(st.integers(1, 4)), draw(rows_)
    floats = st.floats(width=32, **limits)
    left, right, bias = (
        torch.from_numpy(draw(hnp.arrays(np.float32, shape, elements=floats)))
        for shape in ((users, rows, 3), (users, rows, 4), (users, 3))
    )
    return {"a.weight": OuterProducts(left, right), "a.bias": bias}


@given(updates_of_users(min_value=-100, max_value=100))
def test_they_are_sums_of_outer_products(updates: Updates) -> None:
    factors = updates["a.weight"]
    assert isinstance(factors, OuterProducts)
    for user, matrix in enumerate(whole(updates)["a.weight"].numpy()):
        left, right = factors.left[user].numpy(), factors.right[user].numpy()
        expected = sum(np.outer(one, other) for one, other in zip(left, right, strict=True))
        np.testing.assert_allclose(matrix, expected, rtol=1e-5, atol=1e-2)


@given(updates_of_users(), st.sampled_from(sorted(GROUPS)), st.sampled_from([1, 20, 40, 10**6]))
def test_a_few_users_at_a_time_give_the_same_sum_and_norms(
    updates: Updates, strategy: str, numbers: int
) -> None:
    clipping = Clipping(LAYOUT, GROUPS[strategy])
    weights = torch.linspace(0.0, 1.0, len(updates["a.bias"]), dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_NUMBERS", numbers)
        pieces = [whole(updates, lanes) for lanes in few_lanes(updates, len(weights))]
        fast = clipped_sum(updates, clipping, weights)
        norms = group_norms(updates, clipping.groups)
    tensors = {name: torch.cat([piece[name] for piece in pieces]) for name in updates}
    assert max(len(piece["a.bias"]) for piece in pieces) <= max(1, numbers // 15)
    np.testing.assert_allclose(fast, clipped_sum(updates, clipping, weights), rtol=1e-12)
    for group, expected in group_norms(tensors, clipping.groups).items():
        np.testing.assert_allclose(norms[group].numpy(), expected.numpy(), rtol=1e-14)


@given(updates_of_users(), st.sampled_from(sorted(GROUPS)))
def test_each_group_of_each_user_stays_within_its_norm(updates: Updates, strategy: str) -> None:
    for user in range(len(updates["a.bias"])):
        one = {
            name: OuterProducts(update.left[user : user + 1], update.right[user : user + 1])
            if isinstance(update, OuterProducts)
            else update[user : user + 1]
            for name, update in updates.items()
        }
        total = clipped_sum(one, Clipping(LAYOUT, GROUPS[strategy])).numpy()
        for group in GROUPS[strategy]:
            part = np.concatenate([total[LAYOUT.slices[t]] for t in group.tensors])
            square = sum((Fraction(float(x)) ** 2 for x in part), Fraction(0))
            assert square <= Fraction(group.clipping_norm) ** 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38])
def test_a_user_whose_products_are_not_finite_is_zero_and_nobody_else(bad: float) -> None:
    torch.manual_seed(0)
    left, right, bias = torch.randn(3, 2, 3), torch.randn(3, 2, 4), torch.randn(3, 3)
    clipping = Clipping(LAYOUT, per_layer(LAYOUT, layers(LAYOUT), {"a": 1.0}))
    others = {"a.weight": OuterProducts(left[[0, 2]], right[[0, 2]]), "a.bias": bias[[0, 2]]}
    expected = clipped_sum(others, clipping)
    left[1], right[1] = 10.0, bad
    total = clipped_sum({"a.weight": OuterProducts(left, right), "a.bias": bias}, clipping)
    assert torch.any(total != 0)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
