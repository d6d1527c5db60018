"""The lattice of one round: which points are in use, and where its centre is."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting.lattice import Lattice, _centre, _spaced, lattice_points
from fedpriv.accounting.loss import (
    Direction,
    least_loss,
    merged_loss,
    privacy_loss,
    sample_at,
    sample_range,
)


@settings(max_examples=100, deadline=None)
@given(
    q=st.one_of(st.just(1.0), st.floats(-7.0, 0.0).map(lambda e: 10**e)),
    z=st.floats(math.log(0.2), math.log(100.0)).map(math.exp),
    steps=st.floats(-2.0, 1.0).map(lambda e: 10**e),
    widest=st.floats(1.0, 300.0),
    direction=st.sampled_from(Direction),
)
def test_points_cover_the_losses(
    q: float, z: float, steps: float, widest: float, direction: Direction
) -> None:
    step = steps * q * math.sqrt(math.expm1(min(1 / z**2, 4.0)))
    points = lattice_points(q, z, Lattice(step, widest, 1e-15), direction)
    low, high = privacy_loss(np.array(sample_range(q, z, 1e-15)), q, z)
    assert points.loss[0] <= low
    assert points.loss[-1] >= min(high, 690.0) - step * (widest + 0.03 * len(points.index))
    assert (np.diff(points.index) >= 1).all()
    assert 0 in points.index
    assert points.loss == pytest.approx(points.offset + step * points.index, rel=1e-15)
    assert (points.loss[1:] > least_loss(q)).all()
    assert (points.ratio[1:] > 0).all()
    inside = points.x > -math.inf
    assert inside[1:].all()
    # Far points are few, however fine the step is.
    assert len(points.index) < 2 * (34 + 34 * math.log(1e9)) + 2 * 16384


def test_spacing_is_even_then_proportional_then_even() -> None:
    index = _spaced(10_000, widest=20.0)
    assert list(index[:33]) == list(range(1, 34))
    assert index[-1] >= 10_000
    gaps = np.diff(index)
    assert (gaps <= np.maximum(1, 0.03 * index[1:]) + 1).all()
    assert gaps.max() <= 21
    assert set(gaps[-20:]) == {20}
    assert list(_spaced(3, widest=1.0)) == [1, 2, 3, 4]


def test_spacing_limits_the_number_of_points() -> None:
    index = _spaced(10**9, widest=1.0)
    assert index[-1] >= 10**9
    assert len(index) < 20_000


@pytest.mark.parametrize("q", [1e-5, 0.1])
@pytest.mark.parametrize("z", [0.2, 0.5, 3.0])
def test_the_centre_is_the_mean_of_a_cell_that_holds_nearly_all(q: float, z: float) -> None:
    step = 20 * q / z  # far wider than the bulk of the losses
    centre = _centre(q, z, step)
    low, high = (sample_at(np.array([centre + side * step]), q, z)[0] for side in (-1, 1))
    merged = float(merged_loss(low, high, q, z)[0])
    assert merged == pytest.approx(centre, abs=1e-7 * step)
