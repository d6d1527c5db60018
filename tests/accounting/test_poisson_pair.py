"""The Poisson-subsampled Gaussian under add-or-remove-one, against its closed form."""

import mpmath
import numpy as np
import pytest

from fedpriv.accounting.pld.lattice import Lattice, dominated, dominating
from fedpriv.accounting.pld.sampled_examples import PoissonPair
from fedpriv.accounting.round_counts import Direction
from tests.accounting.closed_forms import poisson_delta
from tests.accounting.pair_conformance import PairConformance, delta_of, losses


class TestPoissonPair(PairConformance):
    def pair(self, q: float, z: float) -> PoissonPair:
        return PoissonPair(q, z)

    def exact_delta(self, q: float, z: float, epsilon: float, direction: Direction) -> float:
        return float(poisson_delta(q, z, epsilon, direction))


def test_smallest_masses_are_relatively_accurate() -> None:
    q, z, lattice = 1e-3, 1.0, Lattice(1e-4, 100.0, 0.03, 1e-40)
    low = dominated(PoissonPair(q, z).law, lattice, Direction.REMOVE)
    up = dominating(PoissonPair(q, z).law, lattice, Direction.REMOVE)
    for epsilon in (0.1, 1.0, 3.0, 5.0):
        exact = float(poisson_delta(q, z, epsilon, Direction.REMOVE))  # down to 1e-27
        assert exact * 0.97 < delta_of(low, lattice, epsilon) < exact
        assert exact < delta_of(up, lattice, epsilon) < exact * 1.03


def test_jumps_far_apart_leave_the_bulk_in_one_atom() -> None:
    # At z = 0.25 the user is seen or not: a step far above the bulk's width must not blur it.
    q, z, lattice = 1e-4, 0.25, Lattice(0.1, 1.0, 0.03, 1e-14)
    atoms = dominated(PoissonPair(q, z).law, lattice, Direction.REMOVE)
    assert atoms.mass.max() > 1 - 2 * q
    assert -q < losses(atoms, lattice)[atoms.mass.argmax()] < 0.0


@pytest.mark.parametrize("q", [1e-5, 0.1])
@pytest.mark.parametrize("z", [0.2, 0.5, 3.0])
def test_the_centre_is_the_mean_of_a_cell_that_holds_nearly_all(q: float, z: float) -> None:
    step = 20 * q / z  # far wider than the bulk of the losses
    law = PoissonPair(q, z).law
    centre = law.centre(step)
    low, high = law.sample_at(centre + step * np.array([-1.0, 1.0])).tolist()
    absent, present = (mpmath.ncdf(high, m, z) - mpmath.ncdf(low, m, z) for m in (0, 1))
    merged = float(mpmath.log(1 - q + q * present / absent))
    assert merged == pytest.approx(centre, abs=1e-7 * step)
