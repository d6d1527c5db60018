"""The quick cumulant and the choices made from it; what they cost is tested with the intervals."""

import math

import mpmath
import numpy as np
import pytest

from fedpriv.accounting.contour.inversion import conversion
from fedpriv.accounting.pld.queries import (
    _aim_at_delta,
    _aim_at_epsilon,
    _cumulant,
    _resolved,
)
from fedpriv.accounting.pld.sampled_examples import PoissonPair
from fedpriv.accounting.round_counts import Direction

CASES = [((0.01, 1.0), 2.5, Direction.REMOVE), ((0.3, 2.0), 4.0, Direction.ADD)]


@pytest.mark.parametrize(("pair", "w", "direction"), CASES)
def test_cumulant_is_the_log_moment(
    pair: tuple[float, float], w: float, direction: Direction
) -> None:
    q, z = pair

    def moment(x: mpmath.mpf) -> mpmath.mpf:
        density = 1 - q + q * mpmath.exp((2 * x - 1) / (2 * z**2))
        return mpmath.npdf(x, 0, z) * density ** (1 + w if direction is Direction.REMOVE else -w)

    exact = mpmath.log(mpmath.quad(moment, np.linspace(-15 * z, 4 + 15 * z, 20)))
    assert _cumulant({PoissonPair(*pair): 7}, 1e-30, direction)(w) == pytest.approx(
        7 * float(exact), rel=1e-6
    )


def test_stddev_is_the_curvature_of_the_cumulant() -> None:
    k = _cumulant({PoissonPair(0.1, 1.0): 30, PoissonPair(0.5, 4.0): 2}, 1e-20, Direction.REMOVE)
    for w in (0.0, 1.0, 6.0):
        curvature = (k(w + 1e-3) - 2 * k(w) + k(w - 1e-3)) / 1e-6
        assert k.stddev(w) ** 2 == pytest.approx(curvature, rel=1e-4)


@pytest.mark.parametrize("direction", Direction)
def test_aims_at_epsilon_and_delta_meet(direction: Direction) -> None:
    rounds = {PoissonPair(0.01, 1.0): 1000}
    aim = _aim_at_delta(rounds, 1e-6, direction)
    back = _aim_at_epsilon(rounds, aim.epsilon, direction)
    assert back.log_delta == pytest.approx(math.log(1e-6), abs=0.7)
    assert back.steepness == pytest.approx(aim.steepness, rel=0.5)


@pytest.mark.parametrize("direction", Direction)
def test_the_step_follows_the_spread_of_one_round_and_not_their_number(
    direction: Direction,
) -> None:
    for q, z in ((1e-4, 1.0), (0.01, 2.0)):
        stddev = q * math.sqrt(math.expm1(1 / z**2))
        for count in (10_000, 1_000_000):
            rounds = {PoissonPair(q, z): count}
            aim = _aim_at_delta(rounds, 1e-6, direction)
            window, lattice = _resolved(rounds, aim, direction, 1.0)
            assert 0.005 * stddev < lattice.step == window.step < 0.2 * stddev


def test_more_precision_is_finer_in_every_respect() -> None:
    rounds = {PoissonPair(0.001, 0.7): 100}
    aim = _aim_at_delta(rounds, 1e-7, Direction.REMOVE)
    (rough, coarse), (window, lattice) = (
        _resolved(rounds, aim, Direction.REMOVE, precision) for precision in (1.0, 0.01)
    )
    assert lattice.step < coarse.step / 4
    assert lattice.growth == pytest.approx(coarse.growth / 10)
    assert lattice.tail == pytest.approx(coarse.tail / 100)
    assert window.margin == pytest.approx(rough.margin + math.log(100))


def test_a_tilt_below_the_best_narrows_the_window_of_rare_large_losses() -> None:
    rounds = {PoissonPair(1e-5, 0.6): 1_000_000}
    aim = _aim_at_delta(rounds, 1e-8, Direction.REMOVE)
    window, lattice = _resolved(rounds, aim, Direction.REMOVE, 1.0)
    assert window.tilt < 0.6 * aim.steepness
    # Among the losses of the sum that are likely enough to count, none is cut off.
    k = _cumulant(rounds, lattice.tail, Direction.REMOVE)
    beyond = k(window.tilt + window.right) - k(window.tilt)
    assert beyond + window.depth > 0


def test_conversion_is_the_largest_gain_over_a_plain_moment_bound() -> None:
    # (1 − e^{ε − L})_+ ≤ e^{w(L − ε) − c(w)}, with equality somewhere.
    for w in (0.01, 1.0, 50.0):
        gap = np.linspace(1e-4, 200.0 / w, 200_001)
        ratio = -np.expm1(-gap) * np.exp(-w * gap)
        assert math.log(float(ratio.max())) == pytest.approx(-conversion(w), abs=1e-3)
        assert math.log(float(ratio.max())) <= -conversion(w) + 1e-12
