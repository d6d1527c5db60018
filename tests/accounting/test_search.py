"""The search for the edge of a budget: it ends at the edge, and soon, whatever the price is."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting.calibration import last_within


def search(price, target, start, safest, boldest, *, whole=False):
    """The result, and all settings that were priced, in order."""
    priced: list[float] = []

    def record(setting: float) -> float:
        priced.append(setting)
        return price(setting)

    return last_within(record, target, start, safest, boldest, whole=whole), priced


SHAPES: list[Callable[[float], float]] = [
    lambda x: x,
    math.sqrt,
    lambda x: x**3,
    lambda x: math.expm1(min(x, 700.0)),
    lambda x: math.inf if x > 50.0 else x,
    lambda x: max(0.0, x - 1e-3),
    lambda x: float(x > 0.3),
    lambda x: 1e-300 if x < 7.0 else 1e300,
    math.log1p,
]


class TestReal:
    @settings(max_examples=200, deadline=None)
    @given(
        st.sampled_from(SHAPES),
        st.floats(1e-6, 1e6),
        st.floats(1e-4, 600.0),
        st.booleans(),
    )
    def test_both_sides_of_the_edge_were_priced(self, shape, target, start, noise):
        """Prices that grow in x are searched upwards, prices that fall in z = 1/x downwards."""
        ends = (600.0, 1e-4) if noise else (1e-4, 600.0)
        price = (lambda z: shape(1.0 / z)) if noise else shape
        result, priced = search(price, target, start, *ends)
        fitting = [x for x in priced if price(x) <= target]
        outside = [x for x in priced if price(x) > target]
        if result is None:
            assert not fitting
            assert ends[0] in outside
            return
        assert result == (min if noise else max)(fitting)
        if result != ends[1]:
            nearest = (max if noise else min)(outside)
            assert max(nearest, result) <= 1.001 * min(nearest, result)
        assert len(priced) < 80

    @pytest.mark.parametrize("power", [0.5, 1.0, 1.7])
    @pytest.mark.parametrize("edge", [0.07, 1.0, 3.0, 4e4])
    def test_a_power_needs_few_prices(self, power, edge):
        result, priced = search(lambda z: (edge / z) ** power, 1.0, 1.0, 1e5, 0.05)
        assert edge <= result <= 1.001 * edge
        assert len(priced) <= 12

    def test_the_ends(self):
        assert search(lambda x: x, 10.0, 1.0, 0.1, 5.0)[0] == 5.0
        assert search(lambda x: x, 0.01, 1.0, 0.1, 5.0)[0] is None
        assert search(lambda x: x, 0.1, 1.0, 0.1, 5.0)[0] == pytest.approx(0.1, rel=1e-3)

    def test_a_price_that_equals_the_target_fits_and_one_ulp_more_does_not(self):
        step = [1.0, math.nextafter(1.0, 2.0)]
        result, priced = search(lambda x: step[x > 2.0], 1.0, 1.0, 0.5, 9.0)
        assert 2.0 / 1.001 <= result <= 2.0
        assert min(x for x in priced if x > result) > 2.0

    def test_a_price_that_is_not_a_number_is_outside(self):
        result, _ = search(lambda x: math.nan if x > 3.0 else x, 100.0, 1.0, 0.5, 9.0)
        assert 3.0 / 1.001 <= result <= 3.0


class TestWhole:
    @settings(max_examples=200, deadline=None)
    @given(st.sampled_from(SHAPES), st.floats(1e-6, 1e4), st.integers(1, 500))
    def test_the_next_number_is_beyond(self, shape, target, most):
        result, priced = search(shape, target, 1.0, 1.0, float(most), whole=True)
        expected = max((n for n in range(1, most + 1) if shape(float(n)) <= target), default=None)
        assert result == expected
        assert all(x.is_integer() and 1 <= x <= most for x in priced)
        assert result is None or result in priced
        assert result in (None, most) or result + 1 in priced

    @pytest.mark.parametrize("power", [0.5, 1.0])
    @pytest.mark.parametrize("edge", [1, 17, 123_456, 2**40 + 1])
    def test_a_power_needs_few_prices(self, power, edge):
        result, priced = search(lambda n: (n / edge) ** power, 1.0, 1.0, 1.0, 2.0**50, whole=True)
        assert result == edge
        assert len(priced) <= 30
