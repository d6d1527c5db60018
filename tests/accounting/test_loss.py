"""The privacy loss of one round against high-precision arithmetic."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting.pld.sampled_examples import PoissonPair, gaussian_masses

PAIRS = [(q, z) for q in (1e-7, 1e-3, 0.3, 1.0) for z in (0.2, 1.0, 100.0)]


def exact_loss(x: float, q: float, z: float) -> mpmath.mpf:
    with mpmath.workdps(60):
        ratio = mpmath.exp((2 * mpmath.mpf(x) - 1) / (2 * mpmath.mpf(z) ** 2))
        return mpmath.log(1 - mpmath.mpf(q) + mpmath.mpf(q) * ratio)


@pytest.mark.parametrize(("q", "z"), PAIRS)
def test_loss_and_its_inverse_are_accurate(q: float, z: float) -> None:
    x = 0.5 + z * np.array([-6.0, -1.0, -1e-3, 0.0, 1e-6, 1.0, 6.0, 12.0])
    law = PoissonPair(q, z).law
    loss = law.loss(x)
    for each, at in zip(loss, x, strict=True):
        expected = exact_loss(float(at), q, z)
        assert abs(float(each - expected)) <= 1e-14 * q + 1e-14 * abs(float(expected))
    back = law.sample_at(loss)
    least = math.log1p(-q) if q < 1.0 else -math.inf
    rising = loss > least * (1 - 1e-6)  # where the loss is flat the inverse is not defined
    assert back[rising] == pytest.approx(x[rising], abs=1e-6 * z, rel=1e-9)


def test_no_sample_has_a_loss_at_or_below_the_least() -> None:
    x = PoissonPair(0.25, 1.0).law.sample_at(np.array([-1.0, math.log1p(-0.25), 0.0]))
    assert list(x[:2]) == [-math.inf, -math.inf]
    assert x[2] == pytest.approx(0.5)


@settings(max_examples=50, deadline=None)
@given(
    q=st.floats(1e-7, 1.0),
    z=st.floats(0.2, 100.0),
    tail=st.floats(-100.0, -1.0).map(lambda t: 10**t),
)
def test_outputs_leave_out_at_most_the_tail(q: float, z: float, tail: float) -> None:
    low, high = PoissonPair(q, z).law.outputs(tail)
    ends = np.array([-np.inf, low]), np.array([high, np.inf])
    for end in ends:
        absent, present = (gaussian_masses(end[:1], end[1:], mean, z)[0] for mean in (0.0, 1.0))
        assert absent <= tail * (1 + 1e-9)
        assert (1 - q) * absent + q * present <= tail * (1 + 1e-9)


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("z", [0.2, 1.0, 100.0])
def test_masses_of_narrow_cells_are_relatively_accurate(z: float, mean: float) -> None:
    # Cells as narrow as lattices have them; a tenth of what the accountant allows for.
    low = mean + z * np.linspace(-14.0, 20.0, 35)
    for width in (1e-5, 2e-3, 0.06, 1.0, 3.0):
        high = low + width * z
        for mass, a, b in zip(gaussian_masses(low, high, mean, z), low, high, strict=True):
            with mpmath.workdps(150):
                expected = mpmath.ncdf(b, mean, z) - mpmath.ncdf(a, mean, z)
                assert abs(mass / expected - 1) < 1e-13
