"""Sums of likelihood ratios, against exact fractions, closed forms and plain enumeration."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import ndtr

from fedpriv.accounting.pld.random_allocation import (
    RatioSum,
    Shape,
    add,
    coarse,
    merge,
    one_round,
    spread,
    sum_of_ratios,
)
from fedpriv.accounting.round_counts import Vector

Law = list[tuple[Fraction, Fraction]]
few = settings(max_examples=40, deadline=None)
values = st.floats(1e-3, 50.0)
laws = st.dictionaries(values, st.floats(1e-9, 1.0), min_size=1, max_size=12).map(
    lambda law: sorted(law.items())
)
edges_of = st.lists(values, min_size=2, max_size=9, unique=True).map(sorted)


def ratios(law: list[tuple[float, float]]) -> RatioSum:
    value, mass = (np.array(column) for column in zip(*law, strict=True))
    return RatioSum(1, value, mass, 0.0, 0.0, 0.0)


def exact(law: list[tuple[float, float]]) -> Law:
    return [(Fraction(value), Fraction(mass)) for value, mass in law]


def call(law: Law, threshold: Fraction) -> Fraction:
    """E[(X − t)₊], which is what the convex order compares, with the mass and the mean."""
    return sum((mass * max(value - threshold, Fraction(0)) for value, mass in law), Fraction(0))


def exact_bins(law: Law, edges: Vector) -> list[Law]:
    ends = [Fraction(float(edge)) for edge in edges]
    bins: list[Law] = [[] for _ in ends]
    for value, mass in law:
        bins[sum(end <= value for end in ends) - 1].append((value, mass))
    return bins


@pytest.mark.parametrize("shape", [spread, merge])
@few
@given(first=laws, second=laws, edges=edges_of)
def test_a_sum_is_on_the_stated_side_of_the_exact_one(
    shape: Shape,
    first: list[tuple[float, float]],
    second: list[tuple[float, float]],
    edges: list[float],
) -> None:
    found = add(ratios(first), ratios(second), np.log(edges), shape)
    pairs = itertools.product(exact(first), exact(second))
    whole = [(a + b, p * q) for (a, p), (b, q) in pairs]
    total = exact(list(zip(found.value.tolist(), found.mass.tolist(), strict=True)))
    factor = 1 + Fraction(4 * (found.mass_error + found.value_error))
    for threshold in (Fraction(0), *(Fraction(x) for x in edges), *(value for value, _ in whole)):
        above = call(total, threshold) + Fraction(found.infinite)
        truth = call(whole, threshold)
        slack = Fraction(found.value_error) * 4 * sum(mass * value for value, mass in whole)
        if shape is spread:
            assert above * factor + slack >= truth
        else:
            assert above <= truth * factor + slack
    mean = sum(mass * value for value, mass in whole)
    kept = call(total, Fraction(0)) + Fraction(found.infinite)
    assert abs(kept / mean - 1) <= 4 * (found.mass_error + found.value_error)
    mass = sum(q for _, q in whole)
    assert abs(sum(q for _, q in total) / mass - 1) <= 4 * found.mass_error


@few
@given(law=laws, edges=edges_of)
def test_merged_points_are_the_exact_means_within_the_errors(
    law: list[tuple[float, float]], edges: list[float]
) -> None:
    found = add(ratios(law), ratios(law), np.log(edges), merge)
    whole = [(a + b, p * q) for (a, p), (b, q) in itertools.product(exact(law), repeat=2)]
    bins = exact_bins(whole, add(ratios(law), ratios(law), np.log(edges), spread).value)
    bins = [one for one in bins if one]
    if len(bins) == len(found.mass):  # no value is so near an edge that it is rounded across it
        for value, mass, one in zip(found.value, found.mass, bins, strict=True):
            q = sum(m for _, m in one)
            mean = sum(v * m for v, m in one) / q
            assert abs(Fraction(float(mass)) / q - 1) <= found.mass_error
            assert abs(Fraction(float(value)) / mean - 1) <= found.value_error


@pytest.mark.parametrize("reach", [1e-9, 1e-3, 3.0, 480.0])
def test_values_at_edges_and_next_to_them_are_on_the_right_side(reach: float) -> None:
    zero, log_edges = ratios([(0.0, 1.0)]), np.linspace(-reach, reach, 301)
    edge = add(zero, zero, log_edges, spread).value
    assert edge[0] == 0.0
    assert edge[1:] == pytest.approx(np.exp(log_edges), rel=max(1e-15, reach / 2**15))
    inner = edge[1:]
    value = np.array([0.0, *np.nextafter(inner, 0.0), *inner, *np.nextafter(inner, np.inf), 1e220])
    found = add(RatioSum(1, value, np.ones(len(value)), 0.0, 0.0, 0.0), zero, log_edges, merge)
    # The number of values from each edge on and below the next: 0 and one, three, and one more.
    assert found.mass.tolist() == [2.0, *[3.0] * 300, 3.0]


@pytest.mark.parametrize("shape", [spread, merge])
def test_doubling_is_adding_an_equal_one(shape: Shape) -> None:
    edges = np.linspace(-3.0, 3.0, 700)
    one = one_round(1.0, edges, shape)
    other = RatioSum(1, one.value, one.mass, one.infinite, one.value_error, one.mass_error)
    doubled = add(one, one, edges, shape)
    added = add(one, other, edges, shape)
    assert doubled.value == pytest.approx(added.value, rel=1e-13)
    assert doubled.mass == pytest.approx(added.mass, rel=1e-13)
    assert doubled.rounds == 2
    assert doubled.infinite == pytest.approx(added.infinite, rel=1e-13)


def test_spread_and_merge_by_hand() -> None:
    edge, within = np.array([0.0, 1.0, 3.0]), np.array([0.5, 0.25, 0.25])
    excess = np.array([0.1, 0.4, 1.0])
    value, mass, infinite = spread(edge, within, excess)
    assert value.tolist() == [0.0, 1.0, 3.0]
    assert mass == pytest.approx([0.4, 0.15, 0.45])
    assert infinite == 1.0
    value, mass, infinite = merge(edge, within, excess)
    assert value == pytest.approx([0.2, 2.6, 7.0])
    assert mass == pytest.approx([0.5, 0.25, 0.25])
    assert infinite == 0.0


@pytest.mark.parametrize("z", [0.05, 0.3, 1.0, 20.0, 1e6])
def test_one_round_encloses_the_closed_form(z: float) -> None:
    # E[(r − t)₊] of a lognormal r with mean 1 (Black & Scholes 1973).
    edges = np.linspace(-8.0, 8.0, 41) / z
    low, up = (one_round(z, edges, shape) for shape in (merge, spread))
    gaps = []
    for log_t in np.linspace(-6.0, 5.0, 23) / z:
        d = -log_t * z + 0.5 / z
        exact_call = ndtr(d) - math.exp(log_t) * ndtr(d - 1 / z)
        below, above = (
            float(ratio.mass @ np.maximum(ratio.value - math.exp(log_t), 0.0)) + ratio.infinite
            for ratio in (low, up)
        )
        allowed = 1e-11 * exact_call + 1e-15
        assert below - allowed <= exact_call <= above + allowed
        gaps.append((above - below) * z)
    assert max(gaps) > 1e-8
    for ratio in (low, up):
        assert ratio.mass.sum() == pytest.approx(1.0, abs=1e-13)
        assert ratio.mass @ ratio.value + ratio.infinite == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(("n", "z"), [(1, 1.0), (7, 0.5), (64, 3.0), (1000, 1.0)])
@pytest.mark.parametrize("shape", [spread, merge])
def test_mass_and_mean_survive_all_additions(n: int, z: float, shape: Shape) -> None:
    total = sum_of_ratios(n, z, 1e-40, shape)
    assert total.rounds == n
    assert (np.diff(total.value) > 0).all()
    assert (total.mass >= 0).all()
    assert total.mass.sum() == pytest.approx(1.0, abs=1e-14 * n)
    assert total.mass @ total.value + total.infinite == pytest.approx(n, rel=1e-11)
    assert total.infinite <= 1e-25 * n
    assert total.mass_error < 1e-11 * n
    assert total.value_error < 1e-9


def test_the_coarse_law_keeps_mass_and_mean() -> None:
    one = one_round(1.0, np.linspace(-10.0, 10.0, 1000), merge)
    value, mass = coarse(one, 50)
    assert len(value) <= 50
    assert mass.sum() == pytest.approx(one.mass.sum(), rel=1e-12)
    assert mass @ value == pytest.approx(one.mass @ one.value, rel=1e-12)
