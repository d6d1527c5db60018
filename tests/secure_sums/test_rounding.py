"""Rounded Gaussians add up: the law of their sum, of their sampler, and what the bound allows."""

import math
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
from fedpriv.ledger.events import LEAST_SHARE, SecureSum
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import rounded_noise
from fedpriv.privacy.layout import Layout, VectorGroup
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.secure_sums.parameters import excess_delta, rounding_excess, share_stddev

Law = dict[int, mpf]


def reach_of(stddev: float, nodes: int, digits: int) -> int:
    """Beyond it lies less than 10^-digits of either law."""
    return math.ceil(stddev * math.sqrt(nodes * 2 * math.log(10) * digits) + nodes)


def sum_law(stddev: float, nodes: int, digits: int) -> Law:
    """ΣK_i: the convolution of n laws Φ((k + ½)/s) − Φ((k − ½)/s)."""
    reach = reach_of(stddev, 1, digits)
    unit = mpf(10) ** (2 * digits)
    edges = [mpmath.ncdf((mpf(k) - 0.5) / stddev) for k in range(-reach, reach + 2)]
    one = [int((b - a) * unit) for a, b in pairwise(edges)]
    # Products of polynomials are products of integers if each coefficient has room.
    room = 8 * digits * nodes
    packed = sum(number << (room * place) for place, number in enumerate(one)) ** nodes
    mask = (1 << room) - 1
    places = range(2 * reach * nodes + 1)
    return {
        place - reach * nodes: mpf(packed >> (room * place) & mask) / unit**nodes
        for place in places
    }


def rounded_law(stddev: float, nodes: int, digits: int) -> Law:
    """round(G + V), in closed form and without a Fourier series.

    Its probability at k is the density of G + V + U at k, U uniform too: the n-th central
    difference of the n-fold integral of the normal density. With I_0 = φ and I_1 = Φ, the integrals
    follow from m·I_{m+1}(x) = x·I_m(x) + I_{m−1}(x).
    """
    spread = mpf(stddev) * mpmath.sqrt(nodes)

    @cache
    def integral(halves: int) -> mpf:
        x = mpf(halves) / 2 / spread
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


def total_variation(stddev: float, nodes: int, digits: int) -> mpf:
    with mpmath.workdps(2 * digits + 30):
        summed, rounded = sum_law(stddev, nodes, digits), rounded_law(stddev, nodes, digits)
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


@pytest.mark.parametrize(("stddev", "nodes", "expected"), EXACT)
def test_total_variation_is_as_small_as_the_proof_says(
    stddev: float, nodes: int, expected: float
) -> None:
    found = float(total_variation(stddev, nodes, 20))
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


@pytest.mark.parametrize(("stddev", "nodes"), [(4.0, 2), (4.0, 3), (4.0, 5), (4.5, 2)])
def test_bound_dominates_the_exact_total_variation(stddev: float, nodes: int) -> None:
    """Far below all floats' precision, so in as many digits as it takes."""
    size = 2 * (math.pi * stddev) ** 2 * (nodes - 1) / nodes
    digits = math.ceil(size / math.log(10)) + 12
    found = total_variation(stddev, nodes, digits)
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
    bound = math.log(20) + 2 * math.log(nodes * stddev) - (math.pi * stddev) ** 2 / 2
    assert rounding_excess(stddev, nodes) == pytest.approx(bound, rel=1e-12)


def test_the_excess_of_allowed_shares_is_below_every_float() -> None:
    excess = rounding_excess(LEAST_SHARE, 10_000)
    delta = excess_delta(excess, 100.0, 10**10, 10**6)
    assert delta / math.log(10) < -2_000_000
    assert delta == pytest.approx(excess + 100 + 16 * math.log(10), rel=1e-12)
    assert excess_delta(-3.0, 0.0, 5, 7) == pytest.approx(math.log(2 * 5 * 7) - 3)


def test_small_shares_cost_more_than_a_gaussian() -> None:
    """So the least share is not idle: s = 0.35, four nodes, a sum that moves by 1, ε = ½."""
    with mpmath.workdps(60):
        law = sum_law(0.35, 4, 20)
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
        law = {k: float(p) for k, p in sum_law(1.0, nodes, 20).items() if p * count > 20}
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
    for stddev in (3.9, math.inf, math.nan):
        with pytest.raises(InvalidValueError, match="it must be finite and at least 4"):
            rounding_excess(stddev, 5)
    with pytest.raises(InvalidValueError, match="there are 0 nodes; there must be at least one"):
        rounding_excess(5.0, 0)
