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
    View,
    decay,
    log_errors,
    log_mgf_along,
    losses,
    support,
    tilt,
    window,
)
from fedpriv.accounting.contour.inversion import (
    USERS,
    contour,
    cumulant_bound,
    plan_at_delta,
    plan_at_epsilon,
)
from fedpriv.accounting.round_counts import Direction, arrays
from tests.accounting.closed_forms import gaussian_delta

LOG_TAIL = -60.0
VIEWS = [*USERS, View(replaced=True), View(examples=3), View(Direction.ADD, 5)]
"""All kinds of pairs, and both directions of examples."""


def setting_of(rounds, view):
    return DirectedRounds(*arrays(rounds), view)


def at_nodes(q, z, view, nodes=256, log_tail=LOG_TAIL):
    """Losses of one pair in a wide window."""
    q, z = np.array([q]), np.array([z])
    return losses(q, z, window(q, z, log_tail, view), view, nodes)


def mixture(q, z, view, of, sign=1):
    """Σ_j Bin(k, q)(j)·of(sign·j/z), for a function of the mean of the output."""
    k = view.examples
    return mpmath.fsum(
        math.comb(k, j) * q**j * (1 - q) ** (k - j) * of(sign * j / z) for j in range(k + 1)
    )


def neighbours(q, z, view, of):
    """The same under P and Q."""
    p, other = mixture(q, z, view, of), mixture(q, z, view, of, -1) if view.replaced else of(0)
    return (p, other) if view.direction is Direction.REMOVE else (other, p)


def exact_log_mgf(q, z, view, w):
    """log E_P[(P/Q)^w] by adaptive quadrature with 40 digits over all outputs."""
    with mpmath.workdps(40):
        q, z, w = mpmath.mpf(q), mpmath.mpf(z), mpmath.mpmathify(w)

        def integrand(y):
            p, other = neighbours(q, z, view, lambda mean: mpmath.npdf(y - mean))
            return p * mpmath.exp(w * mpmath.log(p / other))

        return complex(mpmath.log(mpmath.quad(integrand, list(range(-16, 24, 2)))))


def exact_delta(q, z, view, epsilon):
    """P − e^ε·Q of the outputs with a larger loss, on one side of a root of the monotone loss."""
    side = 1 if view.direction is Direction.REMOVE else -1
    with mpmath.workdps(30):
        q, z = mpmath.mpf(q), mpmath.mpf(z)

        def loss(y):
            p, other = neighbours(q, z, view, lambda mean: mpmath.npdf(y - mean))
            return mpmath.log(p / other) - epsilon

        root, other = mpmath.mpf(-40), mpmath.mpf(40)
        for _ in range(100):
            middle = (root + other) / 2
            root, other = (middle, other) if (loss(middle) < 0) == (side > 0) else (root, middle)
        p, other = neighbours(q, z, view, lambda mean: mpmath.ncdf(side * (mean - root)))
        return float(p - mpmath.exp(epsilon) * other)


class TestCumulant:
    @pytest.mark.parametrize(
        ("q", "z", "w", "view"),
        [
            (0.01, 1.0, 5 + 3j, View()),
            (0.3, 0.7, 2 + 10j, View(Direction.ADD)),
            (1.0, 0.8, 1.5 + 2j, View()),
            (0.999, 2.0, 7 - 5j, View(Direction.ADD)),
            (1e-3, 3.0, 30 + 80j, View(Direction.ADD)),
            (0.02, 2.0, 3 + 4j, View(replaced=True)),
            (1.0, 3.0, 2 - 1j, View(replaced=True)),
            (0.1, 6.0, 5 + 6j, View(examples=4)),
            (1.0, 9.0, 2 + 3j, View(examples=3)),
            (0.3, 5.0, 4 - 9j, View(Direction.ADD, 5)),
        ],
    )
    def test_against_mpmath(self, q, z, w, view):
        tilted = tilt(at_nodes(q, z, view), w.real)
        found = log_mgf_along(tilted, w.imag, 2)[0]
        assert found[0] == pytest.approx(exact_log_mgf(q, z, view, w.real), rel=1e-12)
        # Logarithms may differ by a multiple of 2πi.
        assert np.exp(found[1] - exact_log_mgf(q, z, view, w)) == pytest.approx(1.0, abs=1e-10)

    @pytest.mark.parametrize("view", USERS)
    def test_tiny_sampling_probability_keeps_its_digits(self, view):
        q, z, c = 1e-7, 2.0, 4.0
        found = float(tilt(at_nodes(q, z, view), c).log_mgf[0])
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
        tilted = tilt(at_nodes(q, z, View(), nodes=512, log_tail=-800.0), order - 1.0)
        error = order * float(tilted.rounding[0]) + 1e-15
        assert abs(float(tilted.log_mgf[0]) - exact) <= error + 1e-13 * exact

    def test_mean_and_variance_are_derivatives(self):
        given_losses = at_nodes(0.05, 0.9, View())
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
        view=st.sampled_from(VIEWS),
    )
    def test_it_is_left_with_at_most_the_tail(self, q, z, log_tail, view):
        low, high = (float(e[0, 0]) for e in window(np.array([q]), np.array([z]), log_tail, view))
        with mpmath.workdps(30):
            outside = [
                mpmath.ncdf(low - j / mpmath.mpf(z)) + mpmath.ncdf(j / mpmath.mpf(z) - high)
                for j in range(view.examples + 1)
            ]
            leave = outside[0]
            if view.direction is Direction.REMOVE:
                leave = mpmath.fsum(
                    math.comb(view.examples, j) * q**j * (1 - q) ** (view.examples - j) * x
                    for j, x in enumerate(outside)
                )
            assert leave <= mpmath.exp(log_tail) * (1 + mpmath.mpf(1e-9))

    @settings(max_examples=40, deadline=None)
    @given(
        q=st.floats(1e-4, 1.0),
        z=st.floats(0.4, 10.0),
        c=st.floats(0.1, 40.0),
        view=st.sampled_from(VIEWS),
    )
    def test_little_mass_is_outside_the_support(self, q, z, c, view):
        everywhere = at_nodes(q, z, view, nodes=768, log_tail=-400.0)
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
        view=st.sampled_from(VIEWS),
    )
    def test_characteristic_function_stays_below_its_bound(self, log_q, z, log_c, log_t, view):
        q, c = np.array([math.exp(log_q)]), math.exp(log_c)
        ends = window(q, np.array([z]), LOG_TAIL, view)
        tilted = tilt(losses(q, np.array([z]), ends, view, 768), c)
        t = math.exp(log_t) / math.sqrt(float(tilted.variance[0]))
        index = np.array([5, 6, 10, 25, 100])
        known = [log_error(tilted, t * u / 5, 768) < -30 for u in index]
        assume(known[0])
        found = log_mgf_along(tilted, t / 5, 101)[0, index[known]].real - tilted.log_mgf[0]
        # Below e^−28 the sum that is compared with is rounding.
        assert min(decay(tilted, t)[0], 28.0) <= -found.max() + 1e-12

    @pytest.mark.parametrize("view", VIEWS)
    @pytest.mark.parametrize(("q", "z", "c"), [(0.01, 2.0, 10.0), (1.0, 1.0, 3.0), (0.2, 0.8, 2.0)])
    def test_bound_is_close_to_the_truth(self, q, z, c, view):
        tilted = tilt(at_nodes(q, z, view), c)
        t = 2.0 / math.sqrt(float(tilted.variance[0]))
        fall = tilted.log_mgf[0] - log_mgf_along(tilted, t, 2)[0, 1].real
        assert 0.3 * fall < decay(tilted, t)[0]

    @pytest.mark.parametrize("view", VIEWS)
    @pytest.mark.parametrize(("q", "z", "c"), [(0.5, 30.0, 3.0), (1.0, 5.0, 1.0), (0.9, 50.0, 9.0)])
    def test_no_bound_is_below_what_the_nodes_leave_out(self, q, z, c, view):
        tilted = tilt(at_nodes(q, z, view), c)
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
        view=st.sampled_from(VIEWS),
    )
    def test_quadrature_error_stays_below_its_bound(self, log_q, z, c, log_t, nodes, view):
        fine = tilt(at_nodes(math.exp(log_q), z, view, nodes=768), c)
        t = math.exp(log_t) / math.sqrt(float(fine.variance[0]))
        assume(log_error(fine, t, 768) < -32)
        coarse = tilt(at_nodes(math.exp(log_q), z, view, nodes=nodes), c)
        exact = np.exp(log_mgf_along(fine, t, 2)[0] - fine.log_mgf[0])
        found = np.exp(log_mgf_along(coarse, t, 2)[0] - fine.log_mgf[0])
        bound = math.exp(min(log_error(fine, t, nodes), 300.0))
        assert np.abs(found - exact).max() <= bound + 1e-11


def log_error(tilted, t, nodes):
    """Log of the bound on the quadrature error of one pair, by the best ellipse."""
    at = tilted.losses
    setting = DirectedRounds(at.q[:, 0], at.z[:, 0], np.ones(1), at.view)
    c = tilted.powers[0] - 1 if at.view.direction is Direction.REMOVE else -tilted.powers[0]
    semiaxes = np.minimum(np.array(HEIGHTS), LARGEST_ANGLE * setting.z / at.view.examples)[:, None]
    log_rho, error = log_errors(setting, at.low, at.high, c, t, semiaxes)
    return float((error - 2 * nodes * log_rho - tilted.log_mgf).min())


def absolute_bounds(contour, epsilon):
    """Bounds on δ(ε)."""
    unit = math.exp(contour.log_scale(np.array(epsilon)))
    low, up = contour.bounds(np.array(epsilon))
    return low * unit, up * unit


class TestContours:
    @pytest.mark.parametrize("view", VIEWS)
    @pytest.mark.parametrize(
        ("q", "z", "epsilon"),
        [(0.5, 4.0, 0.5), (0.1, 10.0, 0.04), (0.95, 2.0, 1.5), (0.3, 6.0, 0.2)],
    )
    def test_each_direction_of_one_round(self, q, z, epsilon, view):
        setting = setting_of({(q, z): 1}, view)
        found = contour(setting, plan_at_epsilon(setting, epsilon))
        exact = exact_delta(q, z, view, epsilon)
        low, up = absolute_bounds(found, epsilon)
        assert low <= exact <= up + found.dropped
        assert up - low <= 1e-5 * up

    @pytest.mark.parametrize("view", VIEWS)
    def test_value_depends_neither_on_the_contour_nor_on_the_step(self, view):
        setting = setting_of({(0.01, 1.0): 2_000, (0.05, 2.0): 100}, view)
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

    @pytest.mark.parametrize("view", VIEWS)
    def test_careless_plans_widen_the_interval_and_keep_the_truth(self, view):
        distance = 2 if view.replaced else view.examples
        setting = setting_of({(1.0, 20.0 * distance): 100}, view)
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
        setting = setting_of({(1.0, 20.0): 100}, View(Direction.ADD))
        found = contour(setting, plan_at_delta(setting, math.log(1e-5)))
        for epsilon in (0.0, 0.5, 1.5, 2.5, 3.5):
            low, up = absolute_bounds(found, epsilon)
            assert low <= gaussian_delta(0.5, epsilon) <= up + found.dropped

    def test_what_the_windows_leave_out_counts_against_the_upper_end(self):
        setting = setting_of({(1.0, 20.0): 100}, View())
        found = contour(setting, plan_at_delta(setting, math.log(1e-5)))
        assert 0.0 < found.dropped < 1e-8 * 1e-5
        more = dataclasses.replace(found, dropped=1e-8)
        (low, up), (same, higher) = (inversion._epsilon_ends(c, 1e-5) for c in (found, more))
        assert same == pytest.approx(low, rel=1e-9)
        assert gaussian_delta(0.5, higher) <= 1e-5 - 1e-8 < gaussian_delta(0.5, up) <= 1e-5
        everything = dataclasses.replace(found, dropped=1e-5)
        assert inversion._epsilon_ends(everything, 1e-5)[1] == math.inf

    def test_cumulant_bound_is_just_above_the_cumulant(self):
        setting = setting_of({(0.02, 1.0): 500}, View(Direction.ADD))
        plan = plan_at_delta(setting, math.log(1e-6))
        exact = 500 * exact_log_mgf(0.02, 1.0, View(Direction.ADD), plan.c).real
        assert exact <= cumulant_bound(setting, plan) <= exact * (1 + 1e-6)


class TestPowers:
    """Cumulants along a line by matrix products, against one exponential for each term."""

    @settings(max_examples=40, deadline=None)
    @given(
        log_q=st.floats(math.log(1e-9), 0.0),
        z=st.floats(0.3, 50.0),
        c=st.floats(0.5, 30.0),
        terms=st.integers(1, 700),
        view=st.sampled_from(VIEWS),
    )
    def test_powers_keep_the_digits_that_they_promise(self, log_q, z, c, terms, view):
        tilted = tilt(at_nodes(math.exp(log_q), z, view, nodes=96), c)
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
        ends = window(q, z, LOG_TAIL, View())
        all_ = log_mgf_along(tilt(losses(q, z, ends, View(), 96), 3.0), 0.3, 50)
        for i in range(4):
            one = tuple(end[i : i + 1] for end in ends)
            alone = losses(q[i : i + 1], z[i : i + 1], one, View(), 96)
            assert all_[i] == pytest.approx(log_mgf_along(tilt(alone, 3.0), 0.3, 50)[0], rel=1e-12)
