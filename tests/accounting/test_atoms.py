"""One round on a lattice: at most as bad, the truth, at least as bad."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting.atoms import ROUNDING, LossAtoms, dominated, dominating
from fedpriv.accounting.lattice import Lattice, lattice_points
from fedpriv.accounting.loss import Direction


def exact_delta(q: float, z: float, epsilon: float, direction: Direction) -> float:
    """E[(1 − e^{ε − L})_+] of one round in closed form, at 60 digits."""
    with mpmath.workdps(60):
        q, z, e = mpmath.mpf(q), mpmath.mpf(z), mpmath.mpf(epsilon)
        rise = (mpmath.exp(direction * e) - 1 + q) / q
        if rise <= 0:  # every loss is on one side of ε
            return float(1 - mpmath.exp(e)) if direction is Direction.REMOVE else 0.0
        x = z**2 * mpmath.log(rise) + mpmath.mpf(1) / 2
        if direction is Direction.REMOVE:
            absent, present = mpmath.ncdf(-x / z), mpmath.ncdf((1 - x) / z)
            return float((1 - q) * absent + q * present - mpmath.exp(e) * absent)
        absent, present = mpmath.ncdf(x / z), mpmath.ncdf((x - 1) / z)
        return float(absent - mpmath.exp(e) * ((1 - q) * absent + q * present))


def losses(atoms: LossAtoms, lattice: Lattice) -> np.ndarray:
    return atoms.offset + lattice.step * atoms.index


def delta_of(atoms: LossAtoms, lattice: Lattice, epsilon: float) -> float:
    gain = -np.expm1(np.minimum(epsilon - losses(atoms, lattice), 0.0))
    return float(atoms.mass @ gain) + atoms.infinite


# Steps from a hundredth of the loss's standard deviation to far beyond all losses.
rounds_on_lattices = st.tuples(
    st.one_of(st.just(1.0), st.floats(-7.0, 0.0).map(lambda e: 10**e)),
    st.floats(math.log(0.2), math.log(50.0)).map(math.exp),
    st.floats(-2.0, 2.0).map(lambda e: 10**e),
    st.floats(1.0, 200.0),
    st.sampled_from([1e-6, 1e-14, 1e-25]),
    st.sampled_from(Direction),
)


@settings(max_examples=150, deadline=None)
@given(rounds_on_lattices)
def test_curves_enclose_the_exact_one(
    case: tuple[float, float, float, float, float, Direction],
) -> None:
    q, z, steps, widest, tail, direction = case
    stddev = q * math.sqrt(math.expm1(min(1 / z**2, 25.0)))
    lattice = Lattice(steps * min(stddev, 10 / z), widest, tail)
    points = lattice_points(q, z, lattice, direction)
    low, up = (make(q, z, points, direction) for make in (dominated, dominating))
    seen = losses(up, lattice)
    between = np.linspace(seen.min(), seen.max(), 9)
    for epsilon in (*seen[:: max(1, len(seen) // 12)], *between, 0.0, stddev, -stddev):
        exact = exact_delta(q, z, float(epsilon), direction)
        allowed = ROUNDING * (2 * q + abs(exact)) + 1e-15 * abs(float(epsilon))
        assert delta_of(low, lattice, float(epsilon)) <= exact + allowed
        assert delta_of(up, lattice, float(epsilon)) >= exact - allowed


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("q", "z"), [(1e-6, 1.0), (0.01, 0.5), (0.3, 3.0), (1.0, 1.0)])
def test_mass_and_mean_are_kept(q: float, z: float, direction: Direction) -> None:
    lattice = Lattice(0.05 * q * math.sqrt(math.expm1(1 / z**2)), 10.0, 1e-20)
    points = lattice_points(q, z, lattice, direction)
    for atoms in (dominated(q, z, points, direction), dominating(q, z, points, direction)):
        loss = losses(atoms, lattice)
        assert (atoms.mass >= 0).all()
        assert atoms.mass.sum() + atoms.infinite == pytest.approx(1.0, abs=1e-14)
        # E[e^{−L}] − 1 is 0 by far less than the spread of e^{−L}, of the order of q.
        assert abs(float(atoms.mass @ np.expm1(-loss))) <= 1e-12 * q


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("q", "z"), [(1e-4, 1.0), (0.1, 0.8), (1.0, 2.0)])
def test_the_gap_is_second_order_in_the_step(q: float, z: float, direction: Direction) -> None:
    def variance_gap(step: float) -> float:
        lattice = Lattice(step, 1.0, 1e-20)
        points = lattice_points(q, z, lattice, direction)
        first, second = (
            float(atoms.mass @ losses(atoms, lattice) ** 2)
            for atoms in (dominated(q, z, points, direction), dominating(q, z, points, direction))
        )
        return second - first

    stddev = q * math.sqrt(math.expm1(1 / z**2))
    gaps = [variance_gap(step * stddev) / stddev**2 for step in (0.1, 0.05, 0.025)]
    # Up spreads by h²/6 and down gathers by h²/12; a first-order scheme would halve, not quarter.
    assert 0.2 * 0.1**2 < gaps[0] < 0.4 * 0.1**2
    assert 3.2 < gaps[0] / gaps[1] < 5.0


def test_smallest_masses_are_relatively_accurate() -> None:
    q, z, tail = 1e-3, 1.0, 1e-40
    lattice = Lattice(1e-4, 100.0, tail)
    points = lattice_points(q, z, lattice, Direction.REMOVE)
    low, up = (make(q, z, points, Direction.REMOVE) for make in (dominated, dominating))
    for epsilon in (0.1, 1.0, 3.0, 5.0):
        exact = exact_delta(q, z, epsilon, Direction.REMOVE)  # down to 1e-27
        assert exact * 0.97 < delta_of(low, lattice, epsilon) < exact
        assert exact < delta_of(up, lattice, epsilon) < exact * 1.03


def test_jumps_far_apart_leave_the_bulk_in_one_atom() -> None:
    # At z = 0.25 the user is seen or not: a step far above the bulk's width must not blur it.
    q, z = 1e-4, 0.25
    lattice = Lattice(0.1, 1.0, 1e-14)
    points = lattice_points(q, z, lattice, Direction.REMOVE)
    atoms = dominated(q, z, points, Direction.REMOVE)
    assert atoms.mass.max() > 1 - 2 * q
    assert -q < losses(atoms, lattice)[atoms.mass.argmax()] < 0.0
