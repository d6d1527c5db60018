"""The torch clip-and-sum against the NumPy query, and its bound in exact arithmetic."""

from fractions import Fraction

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpriv.engine.clipping import clipped_sum, group_norms, sent
from fedpriv.privacy.adaptive import indicator_group, indicator_of
from fedpriv.privacy.contribution import Clipping
from fedpriv.privacy.groups import VectorGroup, equal_split, flat, joint, layers, per_layer
from fedpriv.privacy.layout import Layout

LAYOUT = Layout(("a.w", "a.b", "c.w"), ((2, 3), (3,), (4,)))
GROUPS = {
    "flat": flat(LAYOUT, 0.7),
    "per-layer": per_layer(LAYOUT, layers(LAYOUT), equal_split(layers(LAYOUT), 2.0)),
    "joint": joint(LAYOUT, 1.5, {"a.w": 0.1, "a.b": 3.0, "c.w": 1.0}),
}
floats = st.floats(width=32)
lanes_ = hnp.arrays(np.float32, st.tuples(st.integers(1, 4), st.just(13)), elements=floats)


def as_updates(lanes: np.ndarray) -> dict[str, torch.Tensor]:
    return {
        name: torch.tensor(lanes[:, LAYOUT.slices[name]]).unflatten(1, shape)
        for name, shape in zip(LAYOUT.names, LAYOUT.shapes, strict=True)
    }


@given(st.sampled_from(sorted(GROUPS)), lanes_)
def test_equals_the_query(strategy: str, lanes: np.ndarray) -> None:
    groups = GROUPS[strategy]
    query = Clipping(LAYOUT, groups)
    expected = sum(
        query.contribution({k: v.astype(np.float32) for k, v in LAYOUT.unflatten(lane).items()})
        for lane in lanes
    )
    total = clipped_sum(as_updates(lanes), Clipping(LAYOUT, groups)).numpy()
    np.testing.assert_allclose(total, expected, rtol=1e-12, atol=1e-12)


@given(st.sampled_from(sorted(GROUPS)), hnp.arrays(np.float32, (1, 13), elements=floats))
@example("flat", np.full((1, 13), 3.4e38, np.float32))
@example("joint", np.full((1, 13), 3.4e38, np.float32))
@example("flat", np.full((1, 13), 1e-45, np.float32))
@example("flat", np.array([[np.nan] + [1.0] * 12], np.float32))
@example("per-layer", np.array([[1.0] * 12 + [-np.inf]], np.float32))
def test_each_group_of_each_user_stays_within_its_norm(strategy: str, lanes: np.ndarray) -> None:
    groups = GROUPS[strategy]
    total = clipped_sum(as_updates(lanes), Clipping(LAYOUT, groups)).numpy()
    for group in groups:
        part = np.concatenate([total[LAYOUT.slices[t]] for t in group.tensors])
        square = sum((Fraction(float(x)) ** 2 for x in part), Fraction(0))
        assert square <= Fraction(group.clipping_norm) ** 2


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_component_zeroes_the_user_in_all_groups_and_nobody_else(bad: float) -> None:
    lanes = np.ones((3, 13), np.float32)
    lanes[1, 7] = bad
    good = clipped_sum(as_updates(lanes[[0, 2]]), Clipping(LAYOUT, GROUPS["per-layer"]))
    assert torch.equal(clipped_sum(as_updates(lanes), Clipping(LAYOUT, GROUPS["per-layer"])), good)


def test_blocks_of_columns_cover_long_tensors() -> None:
    layout = Layout(("w",), ((40_000,),))
    rng = np.random.default_rng(0)
    lanes = rng.standard_normal((3, 40_000)).astype(np.float32)
    total = clipped_sum({"w": torch.from_numpy(lanes)}, Clipping(layout, flat(layout, 5.0))).numpy()
    exact = lanes.astype(np.float64)
    expected = (exact * (5.0 / np.linalg.norm(exact, axis=1, keepdims=True))).sum(0)
    np.testing.assert_allclose(total, expected, rtol=1e-9, atol=1e-12)


def with_indicator(groups: tuple[VectorGroup, ...], weighted: int) -> Clipping:
    """Clipping that counts who was clipped, and weights the first groups."""
    indicator = indicator_of(groups)
    layout = Layout((*LAYOUT.names, indicator.tensor), (*LAYOUT.shapes, (len(groups),)))
    names = tuple(group.name for group in groups)[:weighted]
    return Clipping(layout, (*groups, indicator_group(indicator)), indicator, names)


weights_ = st.lists(st.floats(0.0, 1.0), min_size=4, max_size=4)


@given(st.sampled_from(sorted(GROUPS)), lanes_, weights_, st.integers(0, 2))
@example("flat", np.full((2, 13), np.nan, np.float32), [1.0] * 4, 1)
@example("per-layer", np.zeros((2, 13), np.float32), [0.0] * 4, 2)
def test_weights_and_the_indicator_equal_the_query(
    strategy: str, lanes: np.ndarray, weights: list[float], weighted: int
) -> None:
    clipping = with_indicator(GROUPS[strategy], weighted)
    given_weights = np.array(weights[: len(lanes)])
    tensors = as_updates(lanes)
    norms = group_norms(tensors, GROUPS[strategy])
    for group in GROUPS[strategy]:
        # Whether a part of exactly this norm is clipped is a matter of rounding.
        ratio = norms[group.name].numpy() / group.clipping_norm
        hypothesis.assume(not np.any(np.abs(ratio - 1.0) < 1e-9))
    expected = sum(
        clipping.contribution(
            {k: v.astype(np.float32) for k, v in LAYOUT.unflatten(lane).items()}, weight
        )
        for lane, weight in zip(lanes, given_weights, strict=True)
    )
    total = clipped_sum(tensors, clipping, torch.from_numpy(given_weights)).numpy()
    np.testing.assert_allclose(total, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("length", "said"), [(4.99, 0.5), (5.0, -0.5), (5.01, -0.5), (0.0, 0.5)])
def test_the_indicator_says_whole_only_of_what_is_sent_unchanged(
    length: float, said: float
) -> None:
    clipping = with_indicator(flat(LAYOUT, 5.0), 0)
    lanes = np.zeros((1, 13), np.float32)
    lanes[0, :2] = np.array([0.6, 0.8]) * length
    total = clipped_sum(as_updates(lanes), clipping).numpy()
    contribution = clipping.contribution(
        {k: v.astype(np.float32) for k, v in LAYOUT.unflatten(lanes[0]).items()}
    )
    assert total[-1] == contribution[-1] == said


def test_norms_of_groups_are_those_of_the_scaled_parts() -> None:
    lanes = np.random.default_rng(0).standard_normal((3, 13)).astype(np.float32)
    for strategy, groups in GROUPS.items():
        clipping = with_indicator(groups, 0)
        assert sent(clipping) == groups
        norms = group_norms(as_updates(lanes), sent(clipping))
        query = Clipping(LAYOUT, groups)
        for group, indices in query.parts:
            expected = np.linalg.norm((lanes / query.scales)[:, indices], axis=1)
            np.testing.assert_allclose(norms[group.name].numpy(), expected, err_msg=strategy)


def test_a_tensor_that_is_missing_is_no_memory_of_others() -> None:
    lanes = as_updates(np.ones((2, 13), np.float32))
    del lanes["a.b"]
    for groups in GROUPS.values():
        with pytest.raises(KeyError, match=r"a\.b"):
            clipped_sum(lanes, Clipping(LAYOUT, groups))


def test_tensors_come_in_any_order_and_others_are_left_out() -> None:
    lanes = as_updates(np.random.default_rng(0).standard_normal((3, 13)).astype(np.float32))
    for groups in GROUPS.values():
        expected = clipped_sum(lanes, Clipping(LAYOUT, groups))
        mixed = {"other": torch.full((3, 2), torch.nan), **dict(reversed(lanes.items()))}
        assert torch.equal(clipped_sum(mixed, Clipping(LAYOUT, groups)), expected)


def test_scalars_and_empty_tensors_have_their_place() -> None:
    layout = Layout(("scalar", "empty"), ((), (0, 3)))
    tensors = {"scalar": torch.tensor([3.0, 0.5]), "empty": torch.zeros(2, 0, 3)}
    total = clipped_sum(tensors, Clipping(layout, flat(layout, 1.0)))
    np.testing.assert_allclose(total.numpy(), [1.5])
