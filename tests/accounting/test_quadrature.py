"""Gauss–Legendre nodes and weights against high precision and exact integrals."""

import mpmath
import numpy as np
import pytest

from fedpriv.accounting.contour.cumulant import gauss_legendre


@pytest.mark.parametrize("nodes", [2, 4, 6, 32, 96, 192, 384, 1536])
def test_nodes_and_weights_are_right_to_nearly_all_digits(nodes: int) -> None:
    place, log_weight = gauss_legendre(nodes)
    assert np.all(np.diff(place) > 0)
    for index in {0, 1, nodes // 3, nodes - 1}:
        with mpmath.workdps(40):
            x, slope = mpmath.mpf(float(place[index])), mpmath.mpf(0)
            for _ in range(4):
                before, value = mpmath.mpf(1), x
                for k in range(2, nodes + 1):
                    before, value = value, ((2 * k - 1) * x * value - (k - 1) * before) / k
                slope = nodes * (x * value - before) / (x**2 - 1)
                x -= value / slope
            exact = mpmath.log(2 / ((1 - x**2) * slope**2))
            assert abs(float(x) - place[index]) <= 2.0**-53
            # As much as `Tilted.rounding` allows for.
            allowed = (60 + nodes / 32) * 2.0**-52 / float(1 - x * x)
            assert abs(float(exact) - log_weight[index]) <= allowed


@pytest.mark.parametrize("nodes", [6, 64, 384])
def test_polynomials_are_integrated_exactly(nodes: int) -> None:
    place, log_weight = gauss_legendre(nodes)
    for degree in (0, 2, 2 * nodes - 2):
        integral = float(np.exp(log_weight) @ place**degree)
        assert integral == pytest.approx(2.0 / (degree + 1), rel=1e-12)
    assert abs(float(np.exp(log_weight) @ place ** (2 * nodes - 1))) < 1e-15
