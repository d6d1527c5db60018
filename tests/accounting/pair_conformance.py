"""What every pair of Gaussian releases promises, as tests that each pair's test class inherits."""

import itertools
import math
from abc import ABC, abstractmethod

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedpriv.accounting.pld import delta_interval as delta_interval_of
from fedpriv.accounting.pld import epsilon_interval as epsilon_interval_of
from fedpriv.accounting.pld.lattice import (
    ROUNDING,
    Lattice,
    LossAtoms,
    LossLaw,
    LossPair,
    Sketch,
    dominated,
    dominating,
    lattice_points,
)
from fedpriv.accounting.round_counts import Direction

SHAPES = [(1e-6, 1.0), (0.01, 0.5), (0.3, 3.0), (1.0, 1.0)]
# Steps from a hundredth of the loss's standard deviation to far beyond all losses.
cases = st.tuples(
    st.one_of(st.just(1.0), st.floats(-7.0, 0.0).map(lambda e: 10**e)),
    st.floats(math.log(0.2), math.log(50.0)).map(math.exp),
    st.floats(-2.0, 2.0).map(lambda e: 10**e),
    st.floats(1.0, 200.0),
    st.sampled_from([0.03, 0.003]),
    st.sampled_from([1e-6, 1e-14, 1e-25]),
    st.sampled_from(Direction),
)
# Several classes inherit one property, so no example of one may be replayed for another.
many = settings(
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.differing_executors],
)


def spread_of(q: float, z: float) -> float:
    """About the standard deviation of the loss."""
    return min(q * math.sqrt(math.expm1(min(1 / z**2, 25.0))), 10 / z)


def losses(atoms: LossAtoms, lattice: Lattice) -> np.ndarray:
    return atoms.offset + lattice.step * atoms.index


def delta_of(atoms: LossAtoms, lattice: Lattice, epsilon: float) -> float:
    gain = -np.expm1(np.minimum(epsilon - losses(atoms, lattice), 0.0))
    return float(atoms.mass @ gain) + atoms.infinite


def nodes_of(sketch: Sketch, direction: Direction) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and losses of the nodes, as one direction sees them."""
    log_mass = sketch.log_q + (sketch.loss if direction is Direction.REMOVE else 0.0)
    mass = np.exp(log_mass - log_mass.max())
    return mass / mass.sum(), direction * sketch.loss


class PairConformance(ABC):
    """Inherit as `class TestX(PairConformance)` and give the pair and its exact curve."""

    @abstractmethod
    def pair(self, q: float, z: float) -> LossPair: ...

    def law(self, q: float, z: float) -> LossLaw:
        """The pair's exact loss."""
        return self.pair(q, z).at_least_as_bad(0.0)

    @abstractmethod
    def exact_delta(self, q: float, z: float, epsilon: float, direction: Direction) -> float:
        """E[(1 − e^{ε − L})_+] of one event, by other means."""

    @many
    @given(cases)
    def test_curves_enclose_the_exact_one(
        self, case: tuple[float, float, float, float, float, float, Direction]
    ) -> None:
        q, z, steps, widest, growth, tail, direction = case
        spread = spread_of(q, z)
        lattice = Lattice(steps * spread, widest, growth, tail)
        law = self.law(q, z)
        low, up = dominated(law, lattice, direction), dominating(law, lattice, direction)
        seen = losses(up, lattice)
        between = np.linspace(seen.min(), seen.max(), 7)
        for epsilon in (*seen[:: max(1, len(seen) // 9)], *between, 0.0, spread, -spread):
            exact = self.exact_delta(q, z, float(epsilon), direction)
            allowed = ROUNDING * (2 * q + abs(exact)) + 1e-15 * abs(float(epsilon))
            assert delta_of(low, lattice, float(epsilon)) <= exact + allowed
            assert delta_of(up, lattice, float(epsilon)) >= exact - allowed

    @pytest.mark.parametrize("direction", Direction)
    @pytest.mark.parametrize(("q", "z"), SHAPES)
    def test_mass_and_mean_are_kept(self, q: float, z: float, direction: Direction) -> None:
        lattice = Lattice(0.05 * spread_of(q, z), 10.0, 0.03, 1e-20)
        law = self.law(q, z)
        for atoms in (dominated(law, lattice, direction), dominating(law, lattice, direction)):
            loss = losses(atoms, lattice)
            assert (atoms.mass >= 0).all()
            assert atoms.mass.sum() + atoms.infinite == pytest.approx(1.0, abs=1e-14)
            # E[e^{−L}] − 1 is 0 by far less than the spread of e^{−L}, of the order of q.
            assert abs(float(atoms.mass @ np.expm1(-loss))) <= 2e-12 * q

    @pytest.mark.parametrize("direction", Direction)
    @pytest.mark.parametrize(("q", "z"), [(1e-4, 1.0), (0.1, 0.8), (1.0, 2.0)])
    def test_the_gap_is_second_order_in_the_step(
        self, q: float, z: float, direction: Direction
    ) -> None:
        def variance_gap(step: float) -> float:
            lattice = Lattice(step, 1.0, 0.03, 1e-12)  # all points are in use
            law = self.law(q, z)
            first, second = (
                float(atoms.mass @ losses(atoms, lattice) ** 2)
                for atoms in (
                    dominated(law, lattice, direction),
                    dominating(law, lattice, direction),
                )
            )
            return second - first

        spread = spread_of(q, z)
        gaps = [variance_gap(step * spread) / spread**2 for step in (0.2, 0.1, 0.05)]
        # Up spreads by h²/6 and down gathers by h²/12; a first-order scheme would halve, not
        # quarter. What is at the centre is neither spread nor gathered.
        assert 0 < gaps[0] < 0.4 * 0.2**2
        assert 3.2 < gaps[0] / gaps[1] < 5.0

    @pytest.mark.parametrize("direction", Direction)
    @pytest.mark.parametrize(("q", "z"), SHAPES)
    def test_the_sketch_has_the_moments_of_the_loss(
        self, q: float, z: float, direction: Direction
    ) -> None:
        lattice = Lattice(0.02 * spread_of(q, z), 1.0, 0.01, 1e-20)
        atoms = dominating(self.law(q, z), lattice, direction)
        loss = losses(atoms, lattice)
        mass, rough_loss = nodes_of(self.law(q, z).sketch(1e-20), direction)
        for w in (0.5, 3.0):
            exact = float(atoms.mass @ np.expm1(w * loss))
            rough = float(mass @ np.expm1(w * rough_loss))
            assert rough == pytest.approx(exact, rel=0.02)

    @pytest.mark.parametrize(("q", "z"), SHAPES)
    @pytest.mark.parametrize("tail", [1e-3, 1e-12, 1e-40])
    def test_the_span_leaves_out_at_most_the_tail(self, q: float, z: float, tail: float) -> None:
        law = self.law(q, z)
        cells = law.masses(np.array(law.span(tail)))
        for masses in cells[:2]:
            assert max(masses[0], masses[-1]) <= tail * (1 + 1e-9)

    @pytest.mark.parametrize(("q", "z"), SHAPES)
    def test_cells_are_a_partition(self, q: float, z: float) -> None:
        law = self.law(q, z)
        low, high = law.span(1e-14)
        whole = law.masses(np.linspace(low, high, 300))
        half = law.masses(np.linspace(low, high, 300)[::2])
        for fine, coarse in zip(whole, half, strict=True):
            merged = [fine[0], *(fine[1:-2].reshape(-1, 2).sum(axis=1)), fine[-2] + fine[-1]]
            assert merged == pytest.approx(coarse, rel=1e-11, abs=1e-14 * q)
        p, q_mass, gap = whole
        assert p.sum() == pytest.approx(1.0, abs=1e-14)
        assert q_mass.sum() == pytest.approx(1.0, abs=1e-14)
        assert gap == pytest.approx(p - q_mass, abs=1e-15)

    @pytest.mark.parametrize(
        ("q", "z", "delta"),
        [
            (1e-5, 0.5, 1e-8),
            (1e-3, 1.0, 1e-5),
            (0.1, 0.7, 1e-10),
            (0.5, 5.0, 1e-3),
            (1.0, 2.0, 1e-6),
        ],
    )
    def test_one_event_has_the_exact_epsilon(self, q: float, z: float, delta: float) -> None:
        pairs = {self.pair(q, z): 1}
        low, up = epsilon_interval_of(pairs, delta)
        assert 0 < low < up < low * 1.001 + 1e-6
        at_low, at_up = (
            max(self.exact_delta(q, z, epsilon, direction) for direction in Direction)
            for epsilon in (low, up)
        )
        assert at_low >= delta >= at_up
        below, above = delta_interval_of(pairs, up)
        assert below <= at_up <= above < 1.06 * below

    @pytest.mark.parametrize(("q", "z"), [(0.01, 0.5), (0.3, 1.0), (1.0, 3.0)])
    def test_two_events_are_the_two_fold_sum(self, q: float, z: float) -> None:
        # Brute force: all pairs of thousands of narrow cells, each with its own mean loss.
        law = self.law(q, z)
        low, high = law.span(1e-13)
        far, near = max(-low, high), 1e-3 * spread_of(q, z)
        positive = np.geomspace(near, far, 1000)
        cells = law.masses(np.concatenate([-positive[::-1], np.linspace(-near, near, 9), positive]))
        p, q_mass = cells[:2, (cells[:2] > 0).all(axis=0)]
        for epsilon in (0.0, spread_of(q, z), 4 * spread_of(q, z)):
            gain = np.outer(p, p) - math.exp(epsilon) * np.outer(q_mass, q_mass)
            loss = np.outer(q_mass, q_mass) - math.exp(epsilon) * np.outer(p, p)
            exact = max(float(np.maximum(gain, 0).sum()), float(np.maximum(loss, 0).sum()))
            below, above = delta_interval_of({self.pair(q, z): 2}, epsilon)
            assert below * (1 - 2e-4) <= exact <= above
            assert above < 1.06 * below

    @pytest.mark.parametrize(("q", "z", "rounds"), [(0.05, 1.0, 100), (0.5, 4.0, 30)])
    def test_compositions_agree_with_a_published_library(
        self, q: float, z: float, rounds: int
    ) -> None:
        # The library composes the pair of cells, which is next to the one of outputs.
        law = self.law(q, z)
        cells = law.masses(np.linspace(*law.span(1e-14), 4000))
        upper, lower = (
            {i: math.log(mass) for i, mass in enumerate(masses) if cells[0, i] * cells[1, i] > 0}
            for masses in cells[:2]
        )
        optimistic, pessimistic = (
            privacy_loss_distribution.from_two_probability_mass_functions(
                lower,
                upper,
                value_discretization_interval=5e-5,
                pessimistic_estimate=pessimistic,
                log_mass_truncation_bound=-60,
            )
            .self_compose(rounds)
            .get_epsilon_for_delta(1e-6)
            for pessimistic in (False, True)
        )
        low, up = epsilon_interval_of({self.pair(q, z): rounds}, 1e-6)
        assert optimistic < pessimistic < 1.005 * optimistic
        assert low * (1 - 1e-4) <= pessimistic
        assert optimistic <= up * (1 + 1e-4)

    def test_beyond_the_computed_range_bounds_stay_bounds(self) -> None:
        hardly_any_noise = {self.pair(0.5, 0.01): 1}
        low, up = epsilon_interval_of(hardly_any_noise, 1e-5)
        assert 0.0 < low < up == math.inf
        low, up = delta_interval_of(hardly_any_noise, 3.0)
        exact = max(self.exact_delta(0.5, 0.01, 3.0, direction) for direction in Direction)
        assert 0.0 < low <= exact <= up <= 1.0
        for q, z in ((1e-13, 1.0), (0.5, 2e6)):
            exact = max(self.exact_delta(q, z, 1e-9, direction) for direction in Direction)
            low, up = delta_interval_of({self.pair(q, z): 1}, 1e-9)
            assert low == 0.0
            assert exact <= up < 1.0
            # What is left out below does not take the rest with it.
            both = {self.pair(q, z): 1, self.pair(0.5, 3.0): 1}
            assert epsilon_interval_of(both, 1e-5)[0] > 0.0

    def test_equal_pairs_are_one_key(self) -> None:
        pairs = [self.pair(q, z) for q, z in itertools.product((0.1, 0.2), (1.0, 2.0))]
        assert len({*pairs, *pairs}) == 4
        other = self.pair(0.2, 2.0)
        assert self.pair(0.1, 1.0).at(other.q, other.z) == other
        assert other.at_most_as_bad(1e-9) is other.at_least_as_bad(1e-9)

    def test_the_centre_is_a_lattice_point(self) -> None:
        lattice = Lattice(0.01, 1.0, 0.03, 1e-10)
        law = self.law(0.1, 1.0)
        points = lattice_points(law, lattice, Direction.REMOVE)
        assert np.abs(points.loss - law.centre(0.01)).min() <= 1e-11 * 0.01
