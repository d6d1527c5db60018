"""Each bound that a contour relies on, against slow and exact twins."""

import dataclasses
import math

import mpmath
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedpriv.accounting.contour import inversion
from fedpriv.accounting.contour.cumulant import (
    HEIGHTS,
    LARGEST_ANGLE,
    DirectedRounds,
    decay,
    log_errors,
    log_mgf_along,
    losses,
    support,
    tilt,
    window,
)
from fedpriv.accounting.contour.inversion import (
    contour,
    cumulant_bound,
    plan_at_delta,
    plan_at_epsilon,
)
from fedpriv.accounting.round_counts import Direction, arrays
from tests.accounting.closed_forms import gaussian_delta, poisson_delta

LOG_TAIL = -60.0
DIRECTIONS = list(Direction)


def setting_of(rounds, direction):
    return DirectedRounds(*arrays(rounds), direction)


def at_nodes(q, z, direction, nodes=256, log_tail=LOG_TAIL):
    """Losses of one pair in a wide window."""
    q, z = np.array([q]), np.array([z])
    return losses(q, z, window(q, z, log_tail, direction), direction, nodes)


def exact_log_mgf(q, z, direction, w):
    """log E[e^{wL}] by adaptive quadrature with 40 digits over all outputs."""
    with mpmath.workdps(40):
        q, z, w = mpmath.mpf(q), mpmath.mpf(z), mpmath.mpmathify(w)
        s = 1 + w if direction is Direction.REMOVE else -w

        def integrand(y):
            ratio = 1 - q + q * mpmath.exp(y / z - 1 / (2 * z**2))
            return mpmath.npdf(y) * mpmath.exp(s * mpmath.log(ratio))

        return complex(mpmath.log(mpmath.quad(integrand, list(range(-16, 24, 2)))))


class TestCumulant:
    @pytest.mark.parametrize(
        ("q", "z", "w", "direction"),
        [
            (0.01, 1.0, 5 + 3j, Direction.REMOVE),
            (0.3, 0.7, 2 + 10j, Direction.ADD),
            (1.0, 0.8, 1.5 + 2j, Direction.REMOVE),
            (0.999, 2.0, 7 - 5j, Direction.ADD),
            (1e-3, 3.0, 30 + 80j, Direction.ADD),
        ],
    )
    def test_against_mpmath(self, q, z, w, direction):
        tilted = tilt(at_nodes(q, z, direction), w.real)
        found = log_mgf_along(tilted, w.imag, 2)[0]
        assert found[0] == pytest.approx(exact_log_mgf(q, z, direction, w.real), rel=1e-12)
        # Logarithms may differ by a multiple of 2πi.
        assert np.exp(found[1] - exact_log_mgf(q, z, direction, w)) == pytest.approx(1.0, abs=1e-10)

    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_tiny_sampling_probability_keeps_its_digits(self, direction):
        q, z, c = 1e-7, 2.0, 4.0
        found = float(tilt(at_nodes(q, z, direction), c).log_mgf[0])
        # To second order in q: c·(c + 1)/2·q²·(e^{1/z²} − 1).
        assert found == pytest.approx(c * (c + 1) / 2 * q**2 * math.expm1(1 / z**2), rel=1e-5)

    @settings(max_examples=50, deadline=None)
    @given(q=st.floats(1e-6, 1.0), z=st.floats(0.5, 20.0), order=st.integers(2, 12))
    def test_whole_orders_are_binomial_sums(self, q, z, order):
        terms = [
            math.comb(order, k) * mpmath.mpf(1 - q) ** (order - k) * mpmath.mpf(q) ** k
            * mpmath.exp(mpmath.mpf(k * (k - 1)) / (2 * z**2))
            for k in range(order + 1)
        ]  # fmt: skip
        exact = float(mpmath.log(mpmath.fsum(terms)))
        tilted = tilt(at_nodes(q, z, Direction.REMOVE, nodes=512, log_tail=-800.0), order - 1.0)
        error = order * float(tilted.rounding[0]) + 1e-15
        assert abs(float(tilted.log_mgf[0]) - exact) <= error + 1e-13 * exact

    def test_mean_and_variance_are_derivatives(self):
        given_losses = at_nodes(0.05, 0.9, Direction.REMOVE)
        below, at, above = (tilt(given_losses, c) for c in (2.999, 3.0, 3.001))
        slope = (above.log_mgf - below.log_mgf) / 0.002
        bend = (above.log_mgf - 2 * at.log_mgf + below.log_mgf) / 1e-6
        assert at.mean == pytest.approx(slope, rel=1e-5)
        assert at.variance == pytest.approx(bend, rel=1e-4)


class TestWindows:
    @settings(max_examples=60, deadline=None)
    @given(
        q=st.floats(1e-7, 1.0),
        z=st.floats(0.3, 50.0),
        log_tail=st.floats(-300.0, -3.0),
        direction=st.sampled_from(DIRECTIONS),
    )
    def test_it_is_left_with_at_most_the_tail(self, q, z, log_tail, direction):
        low, high = (
            float(e[0, 0]) for e in window(np.array([q]), np.array([z]), log_tail, direction)
        )
        with mpmath.workdps(30):
            shift = 1 / mpmath.mpf(z)
            absent = mpmath.ncdf(low) + mpmath.ncdf(-high)
            present = mpmath.ncdf(low - shift) + mpmath.ncdf(shift - high)
            leave = absent if direction is Direction.ADD else (1 - q) * absent + q * present
            assert leave <= mpmath.exp(log_tail) * (1 + mpmath.mpf(1e-9))

    @settings(max_examples=40, deadline=None)
    @given(
        q=st.floats(1e-4, 1.0),
        z=st.floats(0.4, 10.0),
        c=st.floats(0.1, 40.0),
        direction=st.sampled_from(DIRECTIONS),
    )
    def test_little_mass_is_outside_the_support(self, q, z, c, direction):
        everywhere = at_nodes(q, z, direction, nodes=768, log_tail=-400.0)
        low, high = support(everywhere, (c,))
        mass = tilt(everywhere, c).mass
        outside = mass[(everywhere.y < low) | (everywhere.y > high)].sum()
        assert outside <= everywhere.beyond_cut[0]


class TestShiftedPaths:
    @settings(max_examples=150, deadline=None)
    @given(
        log_q=st.floats(math.log(1e-6), 0.0),
        z=st.floats(0.3, 20.0),
        log_c=st.floats(-2.0, 5.0),
        log_t=st.floats(-4.0, 4.0),
        direction=st.sampled_from(DIRECTIONS),
    )
    def test_characteristic_function_stays_below_its_bound(self, log_q, z, log_c, log_t, direction):
        q, c = np.array([math.exp(log_q)]), math.exp(log_c)
        ends = window(q, np.array([z]), LOG_TAIL, direction)
        tilted = tilt(losses(q, np.array([z]), ends, direction, 768), c)
        t = math.exp(log_t) / math.sqrt(float(tilted.variance[0]))
        index = np.array([5, 6, 10, 25, 100])
        known = [log_error(tilted, t * u / 5, 768) < -30 for u in index]
        assume(known[0])
        found = log_mgf_along(tilted, t / 5, 101)[0, index[known]].real - tilted.log_mgf[0]
        # Below e^−28 the sum that is compared with is rounding.
        assert min(decay(tilted, t)[0], 28.0) <= -found.max() + 1e-12

    @pytest.mark.parametrize("direction", DIRECTIONS)
    @pytest.mark.parametrize(("q", "z", "c"), [(0.01, 2.0, 10.0), (1.0, 1.0, 3.0), (0.2, 0.8, 2.0)])
    def test_bound_is_close_to_the_truth(self, q, z, c, direction):
        tilted = tilt(at_nodes(q, z, direction), c)
        t = 2.0 / math.sqrt(float(tilted.variance[0]))
        fall = tilted.log_mgf[0] - log_mgf_along(tilted, t, 2)[0, 1].real
        assert 0.4 * fall < decay(tilted, t)[0]

    @pytest.mark.parametrize("direction", DIRECTIONS)
    @pytest.mark.parametrize(("q", "z", "c"), [(0.5, 30.0, 3.0), (1.0, 5.0, 1.0), (0.9, 50.0, 9.0)])
    def test_no_bound_is_below_what_the_nodes_leave_out(self, q, z, c, direction):
        tilted = tilt(at_nodes(q, z, direction), c)
        for t in (3.0, 10.0, 30.0, 100.0, 1000.0):
            bound = decay(tilted, t / math.sqrt(float(tilted.variance[0])))
            assert math.exp(-bound[0]) >= tilted.losses.beyond_cut[0]

    @settings(max_examples=80, deadline=None)
    @given(
        log_q=st.floats(math.log(1e-5), 0.0),
        z=st.floats(0.3, 20.0),
        c=st.floats(0.1, 50.0),
        log_t=st.floats(-3.0, 3.5),
        nodes=st.sampled_from([12, 20, 32, 48, 64]),
        direction=st.sampled_from(DIRECTIONS),
    )
    def test_quadrature_error_stays_below_its_bound(self, log_q, z, c, log_t, nodes, direction):
        fine = tilt(at_nodes(math.exp(log_q), z, direction, nodes=768), c)
        t = math.exp(log_t) / math.sqrt(float(fine.variance[0]))
        assume(log_error(fine, t, 768) < -32)
        coarse = tilt(at_nodes(math.exp(log_q), z, direction, nodes=nodes), c)
        exact = np.exp(log_mgf_along(fine, t, 2)[0] - fine.log_mgf[0])
        found = np.exp(log_mgf_along(coarse, t, 2)[0] - fine.log_mgf[0])
        bound = math.exp(min(log_error(fine, t, nodes), 300.0))
        assert np.abs(found - exact).max() <= bound + 1e-11


def log_error(tilted, t, nodes):
    """Log of the bound on the quadrature error of one pair, by the best ellipse."""
    at = tilted.losses
    setting = DirectedRounds(at.q[:, 0], at.z[:, 0], np.ones(1), at.direction)
    c = tilted.order - 1 if at.direction is Direction.REMOVE else -tilted.order
    semiaxes = np.minimum(np.array(HEIGHTS), LARGEST_ANGLE * setting.z)[:, None]
    log_rho, error = log_errors(setting, at.low, at.high, c, t, semiaxes)
    return float((error - 2 * nodes * log_rho - tilted.log_mgf).min())


def absolute_bounds(contour, epsilon):
    """Bounds on δ(ε)."""
    unit = math.exp(contour.log_scale(epsilon))
    low, up = contour.bounds(epsilon)
    return low * unit, up * unit


class TestContours:
    @pytest.mark.parametrize("direction", DIRECTIONS)
    @pytest.mark.parametrize(
        ("q", "z", "epsilon"),
        [(0.5, 4.0, 0.5), (0.1, 10.0, 0.04), (0.95, 2.0, 1.5), (0.3, 6.0, 0.2)],
    )
    def test_each_direction_of_one_round(self, q, z, epsilon, direction):
        setting = setting_of({(q, z): 1}, direction)
        found = contour(setting, plan_at_epsilon(setting, epsilon))
        exact = poisson_delta(q, z, epsilon, direction)
        low, up = absolute_bounds(found, epsilon)
        assert low <= exact <= up + found.dropped
        assert up - low <= 1e-5 * up

    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_value_depends_neither_on_the_contour_nor_on_the_step(self, direction):
        setting = setting_of({(0.01, 1.0): 2_000, (0.05, 2.0): 100}, direction)
        plan = plan_at_delta(setting, math.log(1e-7))
        lows, ups = [], []
        for factor in (0.7, 0.8, 0.9, 1.0):
            for finer in (1.0, 1.2, 1.7):
                other = dataclasses.replace(
                    plan, c=factor * plan.c, period=finer * plan.period / factor
                )
                low, up = absolute_bounds(contour(setting, other), plan.epsilon)
                lows.append(low)
                ups.append(up)
        assert max(lows) <= min(ups)
        assert max(ups) - min(lows) <= 1e-6 * max(ups)

    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_careless_plans_widen_the_interval_and_keep_the_truth(self, direction):
        setting = setting_of({(1.0, 20.0): 100}, direction)
        plan = plan_at_delta(setting, math.log(1e-5))
        exact = gaussian_delta(0.5, plan.epsilon)
        widths = []
        for shorter in (1.0, 0.6, 0.5, 0.4):
            other = dataclasses.replace(plan, stop=shorter * plan.stop)
            found = contour(setting, other)
            low, up = absolute_bounds(found, plan.epsilon)
            assert low <= exact <= up + found.dropped
            widths.append((up - low) / up)
        assert widths == sorted(widths)
        assert widths[0] < 1e-8
        assert widths[-1] > 1e-3

    def test_bounds_hold_at_any_epsilon(self):
        setting = setting_of({(1.0, 20.0): 100}, Direction.ADD)
        found = contour(setting, plan_at_delta(setting, math.log(1e-5)))
        for epsilon in (0.0, 0.5, 1.5, 2.5, 3.5):
            low, up = absolute_bounds(found, epsilon)
            assert low <= gaussian_delta(0.5, epsilon) <= up + found.dropped

    def test_what_the_windows_leave_out_counts_against_the_upper_end(self):
        setting = setting_of({(1.0, 20.0): 100}, Direction.REMOVE)
        found = contour(setting, plan_at_delta(setting, math.log(1e-5)))
        assert 0.0 < found.dropped < 1e-8 * 1e-5
        more = dataclasses.replace(found, dropped=1e-8)
        (low, up), (same, higher) = (
            inversion._epsilon_ends(c, math.log(1e-5)) for c in (found, more)
        )
        assert same == pytest.approx(low, rel=1e-9)
        assert gaussian_delta(0.5, higher) <= 1e-5 - 1e-8 < gaussian_delta(0.5, up) <= 1e-5
        everything = dataclasses.replace(found, dropped=1e-5)
        assert inversion._epsilon_ends(everything, math.log(1e-5))[1] == math.inf

    def test_cumulant_bound_is_just_above_the_cumulant(self):
        setting = setting_of({(0.02, 1.0): 500}, Direction.ADD)
        plan = plan_at_delta(setting, math.log(1e-6))
        exact = 500 * exact_log_mgf(0.02, 1.0, Direction.ADD, plan.c).real
        assert exact <= cumulant_bound(setting, plan) <= exact * (1 + 1e-6)


class TestPowers:
    """Cumulants along a line by matrix products, against one exponential for each term."""

    @settings(max_examples=40, deadline=None)
    @given(
        log_q=st.floats(math.log(1e-9), 0.0),
        z=st.floats(0.3, 50.0),
        c=st.floats(0.5, 30.0),
        terms=st.integers(1, 700),
        direction=st.sampled_from(DIRECTIONS),
    )
    def test_powers_keep_the_digits_that_they_promise(self, log_q, z, c, terms, direction):
        tilted = tilt(at_nodes(math.exp(log_q), z, direction, nodes=96), c)
        step = 8.0 / terms / math.sqrt(float(tilted.variance[0]))
        found = log_mgf_along(tilted, step, terms)[0] - tilted.log_mgf[0]
        loss = tilted.loss[0] + tilted.mean[0]
        times = np.linspace(0.0, step * (terms - 1), min(terms, 40))
        index = np.round(times / step).astype(int)
        slow = [(np.expm1(1j * step * j * loss) * tilted.mass[0]).sum() for j in index]
        error = np.abs(np.expm1(found[index]) - slow)
        assert (error <= 2 * tilted.rounding[0] * step * index + 1e-15 * np.abs(slow)).all()

    def test_pairs_do_not_mix(self):
        q, z = np.array([0.01, 0.5, 1.0, 1e-4]), np.array([0.8, 3.0, 10.0, 0.6])
        ends = window(q, z, LOG_TAIL, Direction.REMOVE)
        all_ = log_mgf_along(tilt(losses(q, z, ends, Direction.REMOVE, 96), 3.0), 0.3, 50)
        for i in range(4):
            one = tuple(end[i : i + 1] for end in ends)
            alone = losses(q[i : i + 1], z[i : i + 1], one, Direction.REMOVE, 96)
            assert all_[i] == pytest.approx(log_mgf_along(tilt(alone, 3.0), 0.3, 50)[0], rel=1e-12)
