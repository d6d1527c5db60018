"""Clipping and summing lanes: exactly what `Clipping.contribution` says of each user."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpriv.engine.measuring import group_norms
from fedpriv.engine.products import OuterProducts
from fedpriv.experiment.grouping import equal_split
from fedpriv.privacy import clipping_torch as module
from fedpriv.privacy.clipping import Clipping, Indicator
from fedpriv.privacy.clipping_torch import clip_rows, integer_sum
from fedpriv.privacy.layout import Layout, VectorGroup, flat, joint, layers, per_layer

LAYOUT = Layout(("a.w", "a.b", "c.w"), ((2, 3), (3,), (4,)))
GROUPS = {
    "flat": flat(LAYOUT, 0.7),
    "per-layer": per_layer(LAYOUT, layers(LAYOUT), equal_split(layers(LAYOUT), 2.0)),
    "joint": joint(LAYOUT, 1.5, {"a.w": 0.1, "a.b": 3.0, "c.w": 1.0}),
}
CAP = 4
floats = st.floats(width=32)
lanes_ = hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.just(13)), elements=floats)
weights_ = st.lists(st.integers(0, CAP), min_size=4, max_size=4)


def as_updates(lanes: np.ndarray) -> dict[str, torch.Tensor]:
    return {
        name: torch.tensor(lanes[:, LAYOUT.slices[name]]).unflatten(1, shape)
        for name, shape in zip(LAYOUT.names, LAYOUT.shapes, strict=True)
    }


def clipping_of(groups: tuple[VectorGroup, ...], weighted: int) -> Clipping:
    """Clipping that counts who was clipped, and weights the first groups."""
    indicator = Indicator.of(groups)
    layout = Layout((*LAYOUT.names, indicator.tensor), (*LAYOUT.shapes, (len(groups),)))
    names = tuple(group.name for group in groups)[:weighted]
    return Clipping(layout, (*groups, indicator.group), indicator, names, CAP)


def one_by_one(clipping: Clipping, lanes: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return sum(
        clipping.contribution(LAYOUT.unflatten(lane), weight)
        for lane, weight in zip(lanes, weights.tolist(), strict=True)
    )


@given(st.sampled_from(sorted(GROUPS)), lanes_, weights_, st.integers(0, 2), st.booleans())
@example("flat", np.full((1, 13), 3.4e38, np.float32), [1] * 4, 0, True)
@example("joint", np.full((2, 13), 3.4e38, np.float32), [4] * 4, 1, True)
@example("flat", np.full((1, 13), 1e-45, np.float32), [4] * 4, 0, False)
@example("flat", np.array([[np.nan] + [1.0] * 12] * 2, np.float32), [4] * 4, 1, True)
@example("per-layer", np.array([[1.0] * 12 + [-np.inf]], np.float32), [3] * 4, 2, True)
def test_a_sum_is_that_of_contributions_to_the_last_step(
    strategy: str, lanes: np.ndarray, weights: list[int], weighted: int, few: bool
) -> None:
    clipping = clipping_of(GROUPS[strategy], weighted)
    given_weights = np.array(weights[: len(lanes)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_NUMBERS", 30 if few else 10**6)
        total = integer_sum(as_updates(lanes), clipping, given_weights)
    assert total.dtype == torch.int64
    np.testing.assert_array_equal(total.numpy(), one_by_one(clipping, lanes, given_weights))


def test_in_torch_what_the_first_sum_of_squares_misses_counts_as_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest, calls = module._norms, []
    clipping = Clipping(LAYOUT, flat(LAYOUT, 1.0))
    for missed in (1.0 - 2.0**-21, 0.5):
        calls.clear()

        def less_at_first(pieces: Sequence[torch.Tensor], missed: float = missed) -> torch.Tensor:
            calls.append(len(pieces))
            return honest(pieces) * (math.sqrt(missed) if len(calls) == 1 else 1.0)

        monkeypatch.setattr(module, "_norms", less_at_first)
        rows = torch.full((1, 13), 0.2778, dtype=torch.float64)  # √13 of them are a little above 1
        clip_rows(rows, clipping, np.ones(1, np.int64))
        assert len(calls) == 2
        assert not rows.any()


@given(st.sampled_from(sorted(GROUPS)), lanes_, weights_, st.integers(0, 2))
@example("flat", np.array([[np.nan] + [1.0] * 12] * 2, np.float32), [4] * 4, 1)
def test_torch_clips_as_numpy_does(
    strategy: str, lanes: np.ndarray, weights: list[int], weighted: int
) -> None:
    clipping = clipping_of(GROUPS[strategy], weighted)
    units = np.array(weights[: len(lanes)])
    rows = np.zeros((len(lanes), clipping.layout.dimension))
    rows[:, :13] = lanes
    found = torch.from_numpy(rows.copy())
    clipping.clip_rows(rows, units)
    clip_rows(found, clipping, units)
    np.testing.assert_array_equal(found.numpy(), rows)


def test_lanes_beyond_the_users_are_not_summed() -> None:
    clipping = clipping_of(GROUPS["flat"], 0)
    lanes = np.random.default_rng(0).standard_normal((5, 13)).astype(np.float32)
    lanes[3:] = np.nan
    expected = one_by_one(clipping, lanes[:3], np.full(3, CAP))
    total = integer_sum(as_updates(lanes), clipping, np.full(3, CAP))
    np.testing.assert_array_equal(total.numpy(), expected)


def test_norms_of_groups_are_those_of_the_scaled_parts() -> None:
    lanes = np.random.default_rng(0).standard_normal((3, 13)).astype(np.float32)
    for strategy, groups in GROUPS.items():
        clipping = clipping_of(groups, 0)
        assert clipping.sent == groups
        norms = group_norms(as_updates(lanes), clipping.sent)
        for group in groups:
            parts = [
                lanes[:, LAYOUT.slices[tensor]] / scale
                for tensor, scale in zip(group.tensors, group.scales, strict=True)
            ]
            expected = np.linalg.norm(np.concatenate(parts, axis=1, dtype=np.float64), axis=1)
            found = norms[group.name].numpy()
            np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=strategy)


def test_a_tensor_that_is_missing_is_no_memory_of_others() -> None:
    lanes = as_updates(np.ones((2, 13), np.float32))
    del lanes["a.b"]
    for groups in GROUPS.values():
        with pytest.raises(KeyError, match=r"a\.b"):
            integer_sum(lanes, Clipping(LAYOUT, groups), np.ones(2, np.int64))


def test_tensors_come_in_any_order_and_others_are_left_out() -> None:
    lanes = as_updates(np.random.default_rng(0).standard_normal((3, 13)).astype(np.float32))
    for groups in GROUPS.values():
        clipping = Clipping(LAYOUT, groups)
        expected = integer_sum(lanes, clipping, np.ones(3, np.int64))
        mixed = {"other": torch.full((3, 2), torch.nan), **dict(reversed(lanes.items()))}
        assert torch.equal(integer_sum(mixed, clipping, np.ones(3, np.int64)), expected)


def test_scalars_and_empty_tensors_have_their_place() -> None:
    layout = Layout(("scalar", "empty"), ((), (0, 3)))
    tensors = {"scalar": torch.tensor([3.0, 0.5]), "empty": torch.zeros(2, 0, 3)}
    clipping = Clipping(layout, flat(layout, 1.0))
    total = integer_sum(tensors, clipping, np.ones(2, np.int64))
    np.testing.assert_allclose(clipping.in_units(total.numpy()), [1.5], rtol=1e-6)


@st.composite
def factors(draw: st.DrawFn) -> OuterProducts:
    users, rows = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    left, right = (
        torch.from_numpy(draw(hnp.arrays(np.float32, shape, elements=floats)))
        for shape in ((users, rows, 2), (users, rows, 3))
    )
    return OuterProducts(left, right, 1, [rows] * users)


@given(factors())
@example(OuterProducts(torch.full((2, 1, 2), 10.0), torch.full((2, 1, 3), 1e38), 1, [1, 1]))
def test_factors_are_clipped_as_the_matrices_that_they_stand_for(update: OuterProducts) -> None:
    users = len(update)
    assert update.shape == (users, 2, 3)
    rest = {"a.b": torch.zeros(users, 3), "c.w": torch.ones(users, 4)}
    clipping, ones = Clipping(LAYOUT, GROUPS["per-layer"]), np.ones(users, np.int64)
    matrices = update[:]
    with np.errstate(all="ignore"):
        exact = np.einsum("cro,cri->coi", update.left.double(), update.right.double())
        small = np.abs(exact).max() < 1e30
    if small:
        scale = float(update.left.double().abs().sum() * update.right.double().abs().sum())
        np.testing.assert_allclose(matrices.numpy(), exact, atol=1e-5 * max(scale, 1e-30))
    found = integer_sum({"a.w": update, **rest}, clipping, ones)
    assert torch.equal(found, integer_sum({"a.w": matrices, **rest}, clipping, ones))


@given(
    hnp.arrays(
        np.int64,
        st.tuples(st.integers(1, 5), st.integers(1, 9)),
        elements=st.integers(-(2**25), 2**25),
    ),
    st.integers(1, 9),
)
def test_squares_of_whole_numbers_are_exact_up_to_any_bound(whole: np.ndarray, at: int) -> None:
    pieces = [
        torch.from_numpy(each.astype(np.float64))
        for each in np.split(whole, [at % whole.shape[1]], 1)
    ]
    found = module._squares(pieces)
    for row, square in zip(whole.tolist(), found.tolist(), strict=True):
        exact = sum(number * number for number in row)
        assert square == exact if exact <= 2**50 else square > 2**50
