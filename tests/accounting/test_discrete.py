"""Pairs of discrete distributions as laws."""

import math

import numpy as np
import pytest

from fedpriv.accounting.pld.lattice import DiscreteLaw, Lattice, dominated, dominating
from fedpriv.accounting.round_counts import Direction
from tests.accounting.pair_conformance import nodes_of

P = np.array([0.1, 0.5, 1e-9, 0.4 - 1e-9])
Q = np.array([0.2, 0.5 - 1e-12, 1e-12, 0.3])
LAW = DiscreteLaw(P, Q, np.array([-0.1, 1e-12, 1e-9 - 1e-12, 0.1 - 1e-9]))


def test_losses_near_zero_keep_their_digits() -> None:
    assert LAW.loss[0] == pytest.approx(-math.log(2))
    assert LAW.loss[1] == pytest.approx(2e-12, rel=1e-9)
    assert LAW.loss[2] == pytest.approx(math.log(1000))


def test_cells_hold_the_outputs_between_losses() -> None:
    p, q, gap = LAW.masses(np.array([-1.0, 0.0, 1.0]))
    assert p == pytest.approx([0.0, 0.1, 0.9, 1e-9], abs=1e-8)
    assert p[3] == 1e-9
    assert q == pytest.approx([0.0, 0.2, 0.8, 1e-12], abs=1e-11)
    assert gap == pytest.approx([0.0, -0.1, 0.1, 1e-9], abs=1e-8)


def test_the_span_leaves_out_at_most_the_tail() -> None:
    assert LAW.span(1e-10) == pytest.approx((-math.log(2), math.log(1000)))
    assert LAW.span(1e-8) == pytest.approx((-math.log(2), math.log(4 / 3)), rel=1e-7)
    low, high = LAW.span(0.25)
    assert low > -0.1
    assert high == pytest.approx(math.log(4 / 3), rel=1e-7)


def test_the_centre_is_what_its_surroundings_merge_into() -> None:
    centre = LAW.centre(0.5)
    near = np.abs(LAW.loss - centre) <= 0.5
    assert near.sum() == 2
    assert centre == pytest.approx(math.log(P[near].sum() / Q[near].sum()))


@pytest.mark.parametrize("direction", Direction)
def test_the_sketch_is_a_coarse_version(direction: Direction) -> None:
    sketch = LAW.sketch(1e-20)
    mass, loss = nodes_of(sketch, direction)
    masses = P if direction is Direction.REMOVE else Q
    mean = float(masses @ LAW.loss) * direction
    assert float(mass @ loss) == pytest.approx(mean, abs=0.05)
    assert sketch.middle == pytest.approx(0.0, abs=1e-11)


@pytest.mark.parametrize("direction", Direction)
def test_outputs_of_one_side_alone_have_infinite_losses(direction: Direction) -> None:
    p, q = np.array([0.0, 0.6, 0.4, 0.0]), np.array([0.3, 0.7, 0.0, 0.0])
    law = DiscreteLaw(p, q, p - q)
    finite = math.log(6 / 7)
    assert list(law.loss) == [-math.inf, pytest.approx(finite), math.inf, -math.inf]
    assert law.span(1e-9) == pytest.approx((finite, finite))
    assert law.centre(0.1) == pytest.approx(finite)
    assert law.sketch(1e-9).middle == pytest.approx(finite)
    lattice = Lattice(0.01, 1.0, 0.03, 1e-9)
    above = dominating(law, lattice, direction)
    assert above.infinite == pytest.approx(0.4 if direction is Direction.REMOVE else 0.3)
    below = dominated(law, lattice, direction)
    assert below.mass.sum() <= 0.7 + 1e-12
