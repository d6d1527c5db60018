"""Rounded Gaussians add up: the law of their sum, of their sampler, and what the bound allows."""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from itertools import pairwise

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpmath import mpf
from scipy import integrate, stats

from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import LEAST_SHARE, RoundEvent, SecureSum
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import GaussianMechanism, rounded_noise
from fedpriv.privacy.layout import Layout, VectorGroup
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.secure_sums.parameters import Grid, share_stddev, share_stddevs

Law = dict[int, mpf]


def reach_of(stddev: float, nodes: int, digits: int) -> int:
    """Beyond it lies less than 10^-digits of either law."""
    return math.ceil(stddev * math.sqrt(nodes * 2 * math.log(10) * digits) + nodes)


def sum_law(stddev: float, means: Sequence[float], digits: int) -> Law:
    """ΣK_i: the convolution of n laws Φ((k + ½ − a)/s) − Φ((k − ½ − a)/s)."""
    nodes, reach = len(means), reach_of(stddev, 1, digits)
    unit = mpf(10) ** (2 * digits)
    # Products of polynomials are products of integers if each coefficient has room.
    room, packed = 8 * digits * nodes, 1
    for mean in means:
        edges = [mpmath.ncdf((mpf(k) - 0.5 - mean) / stddev) for k in range(-reach, reach + 2)]
        one = [int((b - a) * unit) for a, b in pairwise(edges)]
        packed *= sum(number << (room * place) for place, number in enumerate(one))
    mask = (1 << room) - 1
    places = range(2 * reach * nodes + 1)
    return {
        place - reach * nodes: mpf(packed >> (room * place) & mask) / unit**nodes
        for place in places
    }


def rounded_law(stddev: float, nodes: int, digits: int, mean: float = 0.0) -> Law:
    """round(a + G + V), in closed form and without a Fourier series.

    Its probability at k is the density of G + V + U at k − a, U uniform too: the n-th central
    difference of the n-fold integral of the normal density. With I_0 = φ and I_1 = Φ, the integrals
    follow from m·I_{m+1}(x) = x·I_m(x) + I_{m−1}(x).
    """
    spread = mpf(stddev) * mpmath.sqrt(nodes)

    @cache
    def integral(halves: int) -> mpf:
        x = (mpf(halves) / 2 - mean) / spread
        before, at = mpmath.npdf(x), mpmath.ncdf(x)
        for m in range(1, nodes):
            before, at = at, (x * at + before) / m
        return at

    reach = reach_of(stddev, nodes, digits)
    signs = [(-1) ** j * math.comb(nodes, j) for j in range(nodes + 1)]
    return {
        k: spread ** (nodes - 1)
        * mpmath.fsum(sign * integral(2 * k + nodes - 2 * j) for j, sign in enumerate(signs))
        for k in range(-reach, reach + 1)
    }


def total_variation(stddev: float, means: Sequence[float], digits: int) -> mpf:
    with mpmath.workdps(2 * digits + 30):
        summed = sum_law(stddev, means, digits)
        rounded = rounded_law(stddev, len(means), digits, math.fsum(means))
        assert abs(mpmath.fsum(rounded.values()) - 1) < mpf(10) ** (1 - digits)
        assert abs(mpmath.fsum(summed.values()) - 1) < mpf(10) ** (1 - digits)
        places = {*summed, *rounded}
        return mpmath.fsum(abs(summed.get(k, 0) - rounded.get(k, 0)) for k in places) / 2


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_closed_form_is_the_law_of_a_rounded_gaussian_with_uniforms(nodes: int) -> None:
    """P(round(G + V) = k) = E Φ((k + ½ − V)/σ) − Φ((k − ½ − V)/σ), by quadrature over V."""
    spread = 0.8 * math.sqrt(nodes)
    law = rounded_law(0.8, nodes, 20)

    def within(v: float, k: int) -> float:
        return stats.norm.cdf((k + 0.5 - v) / spread) - stats.norm.cdf((k - 0.5 - v) / spread)

    def weighted(v: float, k: int) -> float:
        return within(v, k) * (1.0 if nodes == 2 else 1.0 - abs(v))  # the density of V

    for k in range(-4, 5):
        half = (nodes - 1) / 2
        expected = integrate.quad(weighted, -half, half, (k,), points=[0])[0] if half else 0.0
        assert float(law[k]) == pytest.approx(expected or within(0.0, k), abs=1e-12)


EXACT = [  # s, m, total variation, as two others computed it by convolution
    *((1.0, 2, 2.1e-5), (1.0, 3, 1.1e-6), (1.0, 10, 1.2e-8), (1.0, 30, 3.9e-9)),
    *((0.7, 4, 3.8e-4), (0.7, 20, 7.5e-5), (1.2, 10, 4.9e-12), (0.5, 10, 8.5e-3)),
]


MEANS = [0.25, 0.5, -0.375, 0.0, 0.125]  # exact in binary, so that their sum is too


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("stddev", [0.7, 1.0])
def test_noise_that_is_rounded_around_real_numbers_adds_up_too(stddev: float, count: int) -> None:
    """Of one number the law is that of round(a + G) itself; of more it is as close as without a."""
    found = float(total_variation(stddev, MEANS[:count], 20))
    largest = math.exp(-2 * (math.pi * stddev) ** 2 * (count - 1) / count)
    assert found < (largest if count > 1 else 1e-18)
    # It is the sum of the real numbers that counts, not of the whole ones next to them.
    with mpmath.workdps(70):
        summed, other = sum_law(stddev, MEANS[:2], 20), rounded_law(stddev, 2, 20, 0.5)
        assert mpmath.fsum(abs(summed.get(k, 0) - p) for k, p in other.items()) / 2 > 0.05


@pytest.mark.parametrize(("stddev", "nodes", "expected"), EXACT)
def test_total_variation_is_as_small_as_the_proof_says(
    stddev: float, nodes: int, expected: float
) -> None:
    found = float(total_variation(stddev, [0.0] * nodes, 20))
    assert found == pytest.approx(expected, rel=0.03)
    # The largest mixed product of the proof.
    largest = math.exp(-2 * (math.pi * stddev) ** 2 * (nodes - 1) / nodes)
    assert largest / 3 < found < largest
    if stddev >= 1:
        assert found < proved(stddev, nodes)


def proved(stddev: float, nodes: int) -> float:
    """The proof's last line but one, for s ≥ 1."""
    tail = math.exp(-((math.pi * stddev) ** 2))
    aliases = (1 + 2.1 * math.exp(-((math.pi * stddev) ** 2) / 2)) ** (nodes - 2)
    places = nodes + 3 + 8.9 * math.sqrt(nodes) * stddev**2
    return (1.01 * aliases * (nodes - 1) * places + 1) * tail


def rounding_excess(stddev: float, nodes: int) -> float:
    """ln δ₁ of the theorem's last bound."""
    return math.log(20) + 2 * math.log(nodes * stddev) - (math.pi * stddev) ** 2 / 2


@pytest.mark.parametrize("scale", [0.0, 1.0])
@pytest.mark.parametrize(("stddev", "nodes"), [(4.0, 2), (4.0, 3), (4.0, 5), (4.5, 2)])
def test_bound_dominates_the_exact_total_variation(stddev: float, nodes: int, scale: float) -> None:
    """Far below all floats' precision, so in as many digits as it takes."""
    size = 2 * (math.pi * stddev) ** 2 * (nodes - 1) / nodes
    digits = math.ceil(size / math.log(10)) + 12
    found = total_variation(stddev, [scale * mean for mean in MEANS[:nodes]], digits)
    assert 0 < found < mpf(10) ** -60
    assert mpmath.log(found) < rounding_excess(stddev, nodes)
    # The proof gives twice the exponent.
    sharp = math.log(9) + 2 * math.log(nodes * stddev) - (math.pi * stddev) ** 2
    assert mpmath.log(found) < sharp < rounding_excess(stddev, nodes)


@given(st.floats(4, 2.0**40), st.integers(1, 10**6))
def test_the_proofs_last_line_is_below_the_bound(stddev: float, nodes: int) -> None:
    places = nodes + 3 + 8.9 * math.sqrt(nodes) * stddev**2
    factor = 1.01 * 1.003 * (nodes - 1) * places + 1
    assert nodes * math.exp(-((math.pi * stddev) ** 2) / 2) < 1e-3
    assert math.log(factor) <= math.log(9) + 2 * math.log(nodes * stddev)


def test_the_excess_of_allowed_shares_is_below_every_float() -> None:
    """δ′ = (1 + e^ε)·D·T·δ₁ at ε = 100 for 10^10 numbers in each of 10^6 rounds of 10^4 nodes."""
    excess = rounding_excess(LEAST_SHARE, 10_000)
    assert (excess + 100.1 + 16 * math.log(10)) / math.log(10) < -2_000_000


def test_small_shares_cost_more_than_a_gaussian() -> None:
    """So the least share is not idle: s = 0.35, four nodes, a sum that moves by 1, ε = ½."""
    with mpmath.workdps(60):
        law = sum_law(0.35, [0.0] * 4, 20)
        moved = {k + 1: p for k, p in law.items()}
        growth = mpmath.exp(0.5)
        places = {*law, *moved}
        stick = mpmath.fsum(max(law.get(k, 0) - growth * moved.get(k, 0), 0) for k in places)
    spread = 0.35 * 2
    gaussian = stats.norm.cdf(0.5 / spread - 0.5 * spread) - math.exp(0.5) * stats.norm.cdf(
        -0.5 / spread - 0.5 * spread
    )
    assert float(stick) == pytest.approx(0.424, abs=5e-4)
    assert gaussian == pytest.approx(0.405, abs=5e-4)


def test_shares_of_the_sampler_add_up_to_their_law() -> None:
    """At s = 1, where the law of single integers shows, by a χ² test."""
    count, nodes = 200_000, 3
    clipping = Clipping(Layout(("a",), ((count,),)), (VectorGroup.single("a", 1.0),))
    entropy = SeededEntropy(51)
    shares = [
        rounded_noise(lambda g, i=i: entropy.key(f"{i}/{g}"), clipping, (1.0,))
        for i in range(nodes)
    ]
    total = np.sum(shares, axis=0)
    with mpmath.workdps(50):
        law = {k: float(p) for k, p in sum_law(1.0, [0.0] * nodes, 20).items() if p * count > 20}
    inner = np.array([np.count_nonzero(total == k) for k in law])
    observed = np.append(inner, count - inner.sum())
    expected = count * np.array([*law.values(), 1 - sum(law.values())])
    assert stats.chisquare(observed, expected).pvalue > 1e-6
    # With the shares of one node less it is another law.
    fewer = shares[0] + shares[1]
    wrong = np.array([np.count_nonzero(fewer == k) for k in law])
    assert stats.chisquare(np.append(wrong, count - wrong.sum()), expected).pvalue < 1e-6


def test_shares_of_a_round_are_gaussian_with_the_variance_of_the_event() -> None:
    secure, stddev, count = SecureSum(12, 2, 3), 2.0**14, 100_000
    share = share_stddev(stddev, 12, secure)
    clipping = Clipping(Layout(("a",), ((count,),)), (VectorGroup.single("a", 1.0),))
    entropy = SeededEntropy(52)
    least = sum(
        rounded_noise(lambda g, i=i: entropy.key(f"{i}/{g}"), clipping, (share,))
        for i in range(12 - 2 - 3)
    )
    assert stats.kstest(least / stddev, "norm").pvalue > 1e-6
    assert stats.kstest(least / (stddev * 1.1), "norm").pvalue < 1e-6


@given(st.floats(2.0**15, 2.0**40), st.integers(2, 500), st.integers(0, 498), st.integers(0, 250))
def test_shares_have_the_variance_of_the_event_rounded_up(
    stddev: float, nodes: int, colluding: int, dropouts: int
) -> None:
    colluding = min(colluding, nodes - 2)
    dropouts = min(dropouts, nodes - (nodes + colluding) // 2 - 1)
    secure = SecureSum(nodes, colluding, dropouts)
    sharing = nodes - colluding - dropouts
    share = Fraction(share_stddev(stddev, nodes, secure))
    assert sharing * share**2 >= Fraction(stddev) ** 2
    below = Fraction(math.nextafter(math.nextafter(float(share), 0.0), 0.0))
    assert sharing * below**2 < Fraction(stddev) ** 2


def test_small_shares_are_refused() -> None:
    secure = SecureSum(5, 1, 0)
    assert share_stddev(2.0**11, 5, secure) == 2.0**10
    for stddev in (math.nextafter(2.0**11, 0.0), 0.0, math.inf, math.nan):
        with pytest.raises(
            InvalidValueError, match=r"if 4 nodes share it.* finite and at least 2048"
        ):
            share_stddev(stddev, 5, secure)
    # What an event of this noise allows, a node accepts.
    for nodes in range(2, 60):
        assert share_stddev(LEAST_SHARE * math.sqrt(nodes), nodes, SecureSum(nodes)) >= LEAST_SHARE


# Grids.


def event_of(users: int, z: float, secure: SecureSum, q: float = 1.0) -> RoundEvent:
    """Two groups, with shares of the noise of 0.9 and 0.1."""
    mechanism = GaussianMechanism.calibrated(
        PoissonSampling(users, q), TWO_GROUPS, z, (0.9, 0.1), secure_sum=secure
    )
    return mechanism.event


TWO_GROUPS = Clipping(
    Layout(("a", "b", "c"), ((3,), (4,), (5,))),
    (VectorGroup("outer", ("a", "c"), 1.0, (1.0, 1.0)), VectorGroup.single("b", 1.999)),
)


@given(
    st.integers(1, 10**8), st.floats(0.01, 30.0), st.integers(2, 1000), st.integers(0, 300),
    st.floats(1e-3, 1.0),
)  # fmt: skip
def test_every_honest_total_fits_and_every_share_has_enough_steps(
    users: int, z: float, nodes: int, more: int, q: float
) -> None:
    event = event_of(users, z, SecureSum(nodes, nodes // 10, nodes // 10), q)
    grid = Grid.of(event, nodes + more)
    shares = share_stddevs(event, nodes + more)
    steps = [Fraction(share) / 2**shift for share, shift in zip(shares, grid.shifts, strict=True)]
    for query, step, shift in zip(event.queries, steps, grid.shifts, strict=True):
        noise = stats.norm.isf(1e-46) * math.sqrt(nodes + more) * float(step)
        room = 2.0 ** (31 if grid.dtype == np.int32 else 63) - 1 - noise - (nodes + more) / 2
        cohort = room / math.ldexp(query.clipping_norm / query.granularity, -shift)
        assert stats.binom.sf(math.floor(cohort), users, q) < 1e-30
        assert grid.dtype == np.int64 or 2**10 <= step < 2**11
    if grid.dtype == np.int64:
        assert grid.shifts == (0, 0)


@pytest.mark.parametrize(("z", "nodes"), [(0.5, 3), (1.0, 100), (8.0, 30)])
def test_sums_of_users_that_would_not_fit_have_64_bits(z: float, nodes: int) -> None:
    secure = SecureSum(nodes, 1, 0)
    few, many = 1, 2**37
    while many - few > 1:
        users = (few + many) // 2
        fits = Grid.of(event_of(users, z, secure), nodes).dtype == np.int32
        few, many = (users, many) if fits else (few, users)
    event = event_of(few, z, secure)
    grid, shares = Grid.of(event, nodes), share_stddevs(event, nodes)
    worst = max(
        few * query.clipping_norm / query.granularity / 2**shift
        + 16 * math.sqrt(nodes) * s / 2**shift
        for query, s, shift in zip(event.queries, shares, grid.shifts, strict=True)
    )
    assert 0.99 * 2**31 < worst < 2**31


def test_a_noised_sum_is_rounded_around_the_exact_one() -> None:
    """Each number is round(a′ + η/2^b) with a′ = (a + ½)/2^b, in fractions, with ties too."""
    grid, generator = Grid((3, 7), np.dtype(np.int32)), np.random.default_rng(1)
    for _ in range(300):
        exact = generator.integers(-(2**12), 2**12, 12)
        noise = [Fraction(int(n), 64) for n in generator.integers(-(2**16), 2**16, 12)]
        noised = np.array(
            [int(a) + math.floor(n + Fraction(1, 2)) for a, n in zip(exact, noise, strict=True)]
        )
        found = grid.rounded(noised, TWO_GROUPS)
        assert found.dtype == np.int32
        units = [2**3] * 3 + [2**7] * 4 + [2**3] * 5  # a, c; b
        expected = [
            math.floor((int(a) + Fraction(1, 2) + n) / unit + Fraction(1, 2))
            for a, n, unit in zip(exact, noise, units, strict=True)
        ]
        assert found.tolist() == expected
        assert grid.steps(found, TWO_GROUPS).tolist() == [
            n * unit for n, unit in zip(expected, units, strict=True)
        ]
    plain = np.arange(12) - 6
    fine = Grid((0, 0), np.dtype(np.int64))
    np.testing.assert_array_equal(fine.rounded(plain.copy(), TWO_GROUPS), plain)
    np.testing.assert_array_equal(fine.steps(plain, TWO_GROUPS), plain)


def test_a_grid_costs_no_accuracy() -> None:
    """Rounding to the coarsest grid moves the noise of 100 nodes by less than 10^-3 of itself."""
    nodes, count = 100, 1000
    clipping = Clipping(Layout(("a",), ((count,),)), (VectorGroup.single("a", 1.0),))
    mechanism = GaussianMechanism.calibrated(
        PoissonSampling(1000, 0.1), clipping, 1.0, (1.0,), secure_sum=SecureSum(nodes, 10, 10)
    )
    grid, shares = Grid.of(mechanism.event, nodes), share_stddevs(mechanism.event, nodes)
    assert grid.dtype == np.int32
    entropy, total, coarse = SeededEntropy(53), np.zeros(count, np.int64), 0
    for node in range(nodes):
        noise = rounded_noise(lambda g, i=node: entropy.key(f"{i}/{g}"), clipping, shares)
        total += noise
        coarse = coarse + grid.rounded(noise.copy(), clipping)
    moved = grid.steps(coarse, clipping) - total
    assert np.std(moved) < 1e-3 * np.std(total)
    assert abs(np.mean(moved)) < 1e-3 * np.std(total)
