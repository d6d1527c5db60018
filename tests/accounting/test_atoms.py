"""Losses put on a lattice, at most as bad and at least as bad, for any discrete pair."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting.pld.lattice import DiscreteLaw, Lattice, dominated, dominating
from fedpriv.accounting.round_counts import Direction
from tests.accounting.pair_conformance import delta_of, losses

outputs = st.lists(
    st.tuples(st.floats(-12.0, 0.0).map(math.exp), st.floats(-6.0, 6.0)), min_size=2, max_size=30
)


def discrete(raw: list[tuple[float, float]]) -> DiscreteLaw:
    """Masses under Q, and rough losses, made into two distributions."""
    q, loss = (np.array(column) for column in zip(*raw, strict=True))
    q = q / q.sum()
    p = q * np.exp(loss)
    p = p / p.sum()
    return DiscreteLaw(p, q, p - q)


def exact_delta(law: DiscreteLaw, epsilon: float, direction: Direction) -> float:
    p, q = (law.p, law.q) if direction is Direction.REMOVE else (law.q, law.p)
    return float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum())


@settings(max_examples=200, deadline=None)
@given(
    raw=outputs,
    step=st.floats(-5.0, 1.0).map(math.exp),
    direction=st.sampled_from(Direction),
    epsilons=st.lists(st.floats(-8.0, 8.0), min_size=3, max_size=3),
)
def test_curves_enclose_the_exact_one(
    raw: list[tuple[float, float]], step: float, direction: Direction, epsilons: list[float]
) -> None:
    law, lattice = discrete(raw), Lattice(step, 1.0, 0.03, 1e-20)
    low, up = (make(law, lattice, direction) for make in (dominated, dominating))
    assert (low.mass >= 0).all()
    assert low.infinite == 0.0
    assert low.mass.sum() <= 1 + 1e-12
    assert (up.mass >= 0).all()
    assert up.mass.sum() + up.infinite == pytest.approx(1.0, abs=1e-12)
    for epsilon in (*epsilons, *losses(up, lattice)[::5], 0.0):
        exact = exact_delta(law, float(epsilon), direction)
        assert delta_of(low, lattice, float(epsilon)) <= exact + 1e-12
        assert delta_of(up, lattice, float(epsilon)) >= exact - 1e-12


@settings(max_examples=60, deadline=None)
@given(raw=outputs, step=st.floats(-4.0, 1.0).map(math.exp), direction=st.sampled_from(Direction))
def test_two_fold_sums_enclose_the_exact_one(
    raw: list[tuple[float, float]], step: float, direction: Direction
) -> None:
    # Curves that enclose do so under composition, too.
    law, lattice = discrete(raw), Lattice(step, 1.0, 0.03, 1e-20)
    p, q = np.outer(law.p, law.p).ravel(), np.outer(law.q, law.q).ravel()
    both = DiscreteLaw(p, q, p - q)
    low, up = (make(law, lattice, direction) for make in (dominated, dominating))
    for epsilon in (-3.0, -0.1, 0.0, 0.4, 2.0, 7.0):
        exact = exact_delta(both, epsilon, direction)
        below, above = (
            sum(
                a * b * -math.expm1(min(epsilon - s - t, 0.0))
                for a, s in zip(atoms.mass, losses(atoms, lattice), strict=True)
                for b, t in zip(atoms.mass, losses(atoms, lattice), strict=True)
                if a * b > 1e-16
            )
            for atoms in (low, up)
        )
        assert below <= exact + 1e-11
        assert above + 1 - (1 - up.infinite) ** 2 >= exact - 1e-11


@pytest.mark.parametrize("direction", Direction)
def test_outputs_on_lattice_points_stay_there(direction: Direction) -> None:
    # Randomised response: losses ±1, and the step is ½.
    high = math.e / (1 + math.e)
    p, q = np.array([high, 1 - high]), np.array([1 - high, high])
    atoms = dominating(DiscreteLaw(p, q, p - q), Lattice(0.5, 1.0, 0.03, 1e-20), direction)
    loss = atoms.offset + 0.5 * atoms.index
    for value, mass in ((1.0, high), (-1.0, 1 - high)):
        assert atoms.mass[np.abs(loss - value) < 1e-9].sum() == pytest.approx(mass, abs=1e-9)
