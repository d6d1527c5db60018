"""The lattice of one pair: which points are in use."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting.pld.lattice import Lattice, _spaced, lattice_points
from fedpriv.accounting.pld.sampled_examples import PoissonPair
from fedpriv.accounting.round_counts import Direction


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
    law = PoissonPair(q, z).law
    points = lattice_points(law, Lattice(step, widest, 0.03, 1e-15), direction)
    low, high = law.span(1e-15)
    assert points.loss[0] <= low
    assert points.loss[-1] >= min(high, 600.0) - step * (widest + 0.03 * len(points.index))
    assert (np.diff(points.index) >= 1).all()
    assert 0 in points.index
    assert points.loss == pytest.approx(points.offset + step * points.index, rel=1e-15)
    # Far points are few, however fine the step is.
    assert len(points.index) < 2 * (34 + 34 * math.log(1e9)) + 2 * 16384


def test_spacing_is_even_then_proportional_then_even() -> None:
    index = _spaced(10_000, Lattice(1.0, 20.0, 0.03, 0.0))
    assert list(index[:33]) == list(range(1, 34))
    assert index[-1] >= 10_000
    gaps = np.diff(index)
    assert (gaps <= np.maximum(1, 0.03 * index[1:]) + 1).all()
    assert gaps.max() <= 21
    assert set(gaps[-20:]) == {20}
    assert list(_spaced(3, Lattice(1.0, 1.0, 0.03, 0.0))) == [1, 2, 3, 4]


def test_less_growth_means_closer_points() -> None:
    coarse, fine = (_spaced(10**5, Lattice(1.0, 50.0, each, 0.0)) for each in (0.03, 0.003))
    assert len(fine) > 1.2 * len(coarse)
    gaps = np.diff(fine)
    assert (gaps <= np.maximum(1, 0.003 * fine[1:]) + 1).all()


def test_spacing_limits_the_number_of_points() -> None:
    index = _spaced(10**9, Lattice(1.0, 1.0, 0.03, 0.0))
    assert index[-1] >= 10**9
    assert len(index) < 20_000
