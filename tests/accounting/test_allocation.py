"""Random allocation against closed forms, integrals, another transform and simulation."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy.fft import irfft, rfft
from scipy.integrate import quad
from scipy.special import ndtr
from scipy.stats import beta

from fedpriv.accounting import epsilon as epsilon_of
from fedpriv.accounting import gaussian, random_allocation_gaussian
from fedpriv.accounting.pld import delta_interval as delta_interval_of
from fedpriv.accounting.pld import epsilon_interval as epsilon_interval_of
from fedpriv.accounting.pld import queries
from fedpriv.accounting.pld.lattice import Lattice, dominated, dominating
from fedpriv.accounting.pld.random_allocation import (
    AllocationPair,
    SubsetPair,
    allocation_pairs,
    sum_of_ratios,
)
from fedpriv.accounting.pld.sampled_examples import PoissonPair
from fedpriv.accounting.round_counts import Direction, Vector
from tests.accounting.closed_forms import gaussian_delta
from tests.accounting.pair_conformance import nodes_of

ALARM = 1e-9
"""Probability of a false alarm of one simulated test."""


def call(strike: Vector, z: float) -> Vector:
    """E[(r − K)₊] of the ratio r of one round (Black & Scholes 1973), for any K."""
    d = -np.log(np.maximum(strike, 1e-300)) * z + 0.5 / z
    return np.where(strike > 0, ndtr(d) - strike * ndtr(d - 1 / z), 1 - strike)


def hockey_stick(mean_call: Callable[[float], float], epsilon: float) -> float:
    """δ in the worse direction, from t ↦ E_Q[(X − t)₊]; E[(1 − e^ε·X)₊] follows by parity."""
    remove = mean_call(math.exp(epsilon))
    add = math.exp(epsilon) * (mean_call(math.exp(-epsilon)) - 1 + math.exp(-epsilon))
    return max(remove, add)


def two_rounds(z: float) -> Callable[[float], float]:
    def mean_call(t: float) -> float:
        def inside(g: float) -> float:
            ratio = math.exp(g / z - 0.5 / z**2)
            density = math.exp(-(g**2) / 2) / math.sqrt(2 * math.pi)
            return density * float(call(np.array(2 * t - ratio), z)) / 2

        kink = (math.log(2 * t) + 0.5 / z**2) * z
        at = sorted({-14.0, min(max(kink, -14.0), 40.0), 1 / z, 40.0})
        return sum(quad(inside, a, b, epsabs=0, epsrel=1e-11)[0] for a, b in itertools.pairwise(at))

    return mean_call


def three_rounds(z: float) -> Callable[[float], float]:
    g = np.linspace(-9.0, 9.0 + 2 / z, 1801)
    weight = np.exp(-(g**2) / 2) * (g[1] - g[0]) / math.sqrt(2 * math.pi)
    ratio = np.exp(g / z - 0.5 / z**2)
    both = ratio[:, None] + ratio

    def mean_call(t: float) -> float:
        return float(weight @ call(3 * t - both, z) @ weight) / 3

    return mean_call


def by_even_grid(n: int, z: float, step: float, size: int) -> Callable[[float], float]:
    """All rounds at once on an evenly spaced grid of R, by powers of one transform."""
    edge = step * np.arange(1, size + 1)
    calls = call(np.concatenate([[0.0], edge]), z)
    mass = np.zeros(size)
    mass[1:] = np.diff(calls, 2) / step
    mass[0] = 1 - mass.sum()
    total = irfft(rfft(mass) ** n, size)
    value = step * np.arange(size)

    def mean_call(t: float) -> float:
        return float(total @ np.maximum(value / n - t, 0.0))

    return mean_call


def enclosed(pair: AllocationPair, truth: Callable[[float], float], within: float) -> None:
    for epsilon in (0.1 / pair.z, 1 / pair.z, 2 / pair.z):
        exact = hockey_stick(truth, epsilon)
        low, up = delta_interval_of({pair: 1}, epsilon)
        assert low <= exact * (1 + 1e-9)
        assert up >= exact * (1 - 1e-9)
        assert up - low <= within * exact


@pytest.mark.parametrize("z", [0.3, 1.0, 4.0, 50.0])
@pytest.mark.parametrize(
    ("delta", "within"), [(1e-3, 1.002), (1e-6, 1.0015), (1e-15, 1.05), (1e-60, 1.3)]
)
def test_a_pass_of_one_round_is_a_gaussian(z: float, delta: float, within: float) -> None:
    low, up = epsilon_interval_of({AllocationPair(1, z): 1}, delta)
    assert low <= gaussian.epsilon(delta, z) <= up <= within * low


@pytest.mark.parametrize("z", [0.5, 1.0, 3.0])
def test_two_rounds_are_an_integral(z: float) -> None:
    enclosed(AllocationPair(2, z), two_rounds(z), 0.02)


@pytest.mark.parametrize("z", [0.7, 2.0])
def test_three_rounds_are_a_double_integral(z: float) -> None:
    enclosed(AllocationPair(3, z), three_rounds(z), 0.02)


@pytest.mark.parametrize(("n", "z"), [(20, 1.5), (300, 4.0)])
def test_many_rounds_are_a_power_of_a_transform(n: int, z: float) -> None:
    truth = by_even_grid(n, z, 0.002, 1 << 20)
    pair = AllocationPair(n, z)
    for delta in (3e-3, 1e-5, 1e-9):
        low, up = epsilon_interval_of({pair: 1}, delta)
        assert up <= low * 1.0015 + 1e-6
        # Where the transform errs by less than the interval is wide.
        assert hockey_stick(truth, low) >= delta * (1 - 1e-4)
        assert hockey_stick(truth, up) <= delta * (1 + 1e-4)
    near = AllocationPair(n, 1.01 * z)
    assert hockey_stick(truth, epsilon_interval_of({near: 1}, 1e-5)[1]) > 1.02e-5


def simulated(n: int, z: float, epsilon: float, draws: int, seed: int) -> tuple[float, float]:
    """Clopper and Pearson's interval of δ when a user is removed: heads of coins (1 − e^ε/X)₊."""
    rng = np.random.default_rng(seed)
    heads = 0
    for _ in range(draws // 1000):
        x = rng.standard_normal((1000, n)) * z
        x[:, 0] += 1.0  # which round the user is in makes no difference
        ratio = np.exp((x - 0.5) / z**2).mean(axis=1)
        heads += int((rng.random(1000) < 1 - math.exp(epsilon) / ratio).sum())
    low = float(beta.ppf(ALARM / 2, heads, draws - heads + 1)) if heads else 0.0
    return low, float(beta.isf(ALARM / 2, heads + 1, draws - heads))


@pytest.mark.parametrize(
    ("n", "z", "epsilon", "wrong"),
    [(5, 0.4, 5.0, 0.43), (100, 0.7, 0.5, 0.8)],
)
def test_simulation_agrees_and_tells_other_noise(
    n: int, z: float, epsilon: float, wrong: float
) -> None:
    least, most = simulated(n, z, epsilon, 20_000, 7)
    assert epsilon_interval_of({AllocationPair(n, z): 1}, most)[0] <= epsilon
    assert epsilon_interval_of({AllocationPair(n, z): 1}, least)[1] >= epsilon
    assert epsilon_interval_of({AllocationPair(n, wrong): 1}, least)[1] < epsilon


def test_two_passes_are_the_two_fold_product() -> None:
    # P and Q of one pass of two rounds in cells of (x₁, x₂), and of two passes in pairs of cells.
    z, x = 1.5, np.linspace(-7.0, 8.0, 61)
    near, far = (np.diff(ndtr((x - mean) / z)) for mean in (0.0, 1.0))
    p = ((np.outer(far, near) + np.outer(near, far)) / 2).ravel()
    q = np.outer(near, near).ravel()
    order = np.argsort(p / q)
    groups = np.add.reduceat(np.stack([p, q])[:, order], np.arange(0, len(p), 4), axis=1)
    for epsilon in (0.1, 1.0, 2.5):
        gain = np.outer(groups[0], groups[0]) - math.exp(epsilon) * np.outer(groups[1], groups[1])
        roughly = float(np.maximum(gain, 0.0).sum())
        low, up = delta_interval_of({AllocationPair(2, z): 2}, epsilon)
        assert roughly <= up  # cells show less than outputs, but not much
        assert low <= 1.04 * roughly


@pytest.mark.parametrize(
    ("n", "z", "passes"),
    [
        (2, 0.5, 100),
        (2, 10.0, 1),
        (100, 1.0, 1),
        (100, 1.0, 100),
        pytest.param(1000, 0.5, 1, marks=pytest.mark.slow),
        (10_000, 2.0, 100),
    ],
)
def test_intervals_are_as_narrow_as_asked(n: int, z: float, passes: int) -> None:
    for delta in (1e-5, 1e-9):
        low, up = epsilon_interval_of({AllocationPair(n, z): passes}, delta)
        assert 0 < low < up <= low + 1e-3 * up + 1e-6


def test_more_noise_and_more_rounds_cost_less_and_more_passes_more() -> None:
    def interval(n: int, z: float, passes: int) -> tuple[float, float]:
        return epsilon_interval_of({AllocationPair(n, z): passes}, 1e-6)

    base = interval(50, 1.0, 10)
    assert interval(50, 1.05, 10)[1] < base[0]
    assert interval(53, 1.0, 10)[1] < base[0]
    assert interval(50, 1.0, 11)[0] > base[1]


@pytest.mark.parametrize("step", [0.0, 0.01])
def test_many_different_passes_become_few_outward(step: float) -> None:
    passes = {AllocationPair(100 + i, 2.0 + step * (i % 10)): 1 + i for i in range(100)}
    above, below = queries._few(passes)
    for n, z in {(pair.rounds, pair.z) for pair in (*passes, *above, *below)}:
        worse, given, better = (
            sum(m for pair, m in pairs.items() if pair.q >= 1 / math.sqrt(n) and pair.z <= z)
            for pairs in (above, passes, below)
        )
        assert worse >= given >= better
    for groups in (above, below):
        assert len(groups) <= 12
        assert sum(groups.values()) == sum(passes.values())


def test_each_pass_is_computed_once() -> None:
    passes = {AllocationPair(2 + i, 2.0): 1 for i in range(15)}
    sum_of_ratios.cache_clear()
    low, up = epsilon_interval_of(passes, 1e-6)
    kept = sum_of_ratios.cache_info()
    assert kept.misses == kept.currsize
    assert up < 1.1 * low
    assert up < epsilon_interval_of({AllocationPair(2, 2.0): 15}, 1e-6)[0]
    assert low > epsilon_interval_of({AllocationPair(16, 2.0): 15}, 1e-6)[1]


@pytest.mark.parametrize(("n", "k"), [(1, 1), (7, 1), (7, 7), (7, 3), (12, 4), (1000, 17)])
def test_blocks_are_a_partition_of_the_rounds(n: int, k: int) -> None:
    pairs = allocation_pairs(n, k, 2.0)
    sizes = [pair.rounds if isinstance(pair, AllocationPair) else 1 for pair in pairs]
    assert sum(size * count for size, count in zip(sizes, pairs.values(), strict=True)) == n
    assert sum(pairs.values()) == k
    assert max(sizes) - min(sizes) <= 1
    assert (PoissonPair(1.0, 2.0) in pairs) == (1 in sizes)


def test_two_of_three_rounds_are_below_their_blocks() -> None:
    # P is the mean over all three pairs of rounds, in cells of (x₁, x₂, x₃).
    z, x = 1.0, np.linspace(-6.0, 7.0, 80)
    near, far = (np.diff(ndtr((x - mean) / z)) for mean in (0.0, 1.0))
    q = np.einsum("i,j,k->ijk", near, near, near)
    p = sum(
        np.einsum("i,j,k->ijk", *(far if i != out else near for i in range(3))) for out in range(3)
    )
    for epsilon in (0.5, 1.5, 3.0):
        shown = max(
            float(np.maximum(p / 3 - math.exp(epsilon) * q, 0.0).sum()),
            float(np.maximum(q - math.exp(epsilon) * p / 3, 0.0).sum()),
        )
        _, up = delta_interval_of(allocation_pairs(3, 2, z), epsilon)
        _, by_lemma = delta_interval_of({PoissonPair(1.0, z): 2}, epsilon)
        assert shown <= up < by_lemma


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("n", "z"), [(2, 1.0), (100, 0.5), (1000, 3.0)])
def test_atoms_are_distributions_and_the_sketch_has_their_moments(
    n: int, z: float, direction: Direction
) -> None:
    pair = AllocationPair(n, z)
    low, up = pair.at_most_as_bad(1e-14), pair.at_least_as_bad(1e-14)
    assert low is not None
    mass, rough_loss = nodes_of(up.sketch(1e-14), direction)
    for step in (0.01, 0.3):
        lattice = Lattice(step / z / math.sqrt(n), 20.0, 0.03, 1e-14)
        for atoms in (dominated(low, lattice, direction), dominating(up, lattice, direction)):
            loss = atoms.offset + lattice.step * atoms.index
            assert (atoms.mass >= 0).all()
            assert atoms.mass.sum() + atoms.infinite == pytest.approx(1.0, abs=1e-8)
            assert atoms.mass @ np.exp(-loss) == pytest.approx(1.0, abs=1e-7)
            mean = float(atoms.mass @ loss)
            assert mass @ rough_loss == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize("direction", Direction)
def test_more_rounds_than_computed_are_fewer_rounds_above_and_nothing_below(
    direction: Direction,
) -> None:
    lattice, pair = Lattice(0.1, 1.0, 0.03, 1e-10), AllocationPair((1 << 30) + 1, 1.0)
    assert pair.at_most_as_bad(lattice.tail) is None
    above = dominating(pair.at_least_as_bad(lattice.tail), lattice, direction)
    assert above.mass.sum() + above.infinite == pytest.approx(1.0, abs=2e-3)
    law = AllocationPair(5, 1.0).at_least_as_bad(lattice.tail)
    assert dominating(law, lattice, direction).infinite >= 1e-90


def test_beyond_the_computed_noise_bounds_stay_bounds() -> None:
    assert AllocationPair(5, 1.0).at(0.5, 2.0) == AllocationPair(4, 2.0)
    low, up = epsilon_interval_of({AllocationPair(5, 0.01): 1}, 1e-5)
    assert 0.0 < low < up == math.inf
    low, up = delta_interval_of({AllocationPair(5, 2e6): 1}, 1e-9)
    assert low == 0.0
    assert gaussian.delta(1e-9, 2e6) / 10 < up < 1e-3


def of_subsets(n: int, k: int, z: float, epsilon: float, *, add: bool) -> float:
    """δ of one pass in which a user's updates are all equal, on a grid of all outputs."""
    x = np.linspace(-8 * z, 1 + 8 * z, 121)
    weight = np.exp(-(x**2) / (2 * z**2))
    weight /= weight.sum()
    ratio = np.exp((x - 0.5) / z**2)
    mass, total = np.ones(()), np.zeros(())
    for _ in range(n):
        mass = np.multiply.outer(mass, weight)
    for chosen in itertools.combinations(range(n), k):
        term = np.ones(())
        for i in range(n):
            term = np.multiply.outer(term, ratio if i in chosen else np.ones_like(x))
        total = total + term / math.comb(n, k)
    gain = 1 - math.exp(epsilon) * total if add else total - math.exp(epsilon)
    return float((mass * np.maximum(gain, 0.0)).sum())


@pytest.mark.parametrize(("n", "k"), [(2, 1), (3, 2), (3, 1), (3, 3), (2, 2)])
@pytest.mark.parametrize("z", [0.5, 1.0, 3.0])
def test_the_pair_of_subsets_is_just_below_a_pass_of_equal_updates(
    n: int, k: int, z: float
) -> None:
    law = SubsetPair(n, k, z).at_most_as_bad(1e-20)
    assert law is not None
    for epsilon in (0.0, 0.3, 1.0, 3.0):
        removed = float(np.maximum(law.p - math.exp(epsilon) * law.q, 0.0).sum())
        added = float(np.maximum(law.q - math.exp(epsilon) * law.p, 0.0).sum())
        for found, add in ((removed, False), (added, True)):
            exact = of_subsets(n, k, z, epsilon, add=add)
            assert found <= exact * (1 + 5e-3) + 1e-5  # the grid's error
            assert found >= exact * (0.98 if k == 1 else 0.5) - 1e-5


@pytest.mark.parametrize("n", [3, 4, 31, 500])
def test_all_rounds_are_one_gaussian_that_the_pair_of_subsets_is_below(n: int) -> None:
    k, z = min(n, 32), 5.0
    law = SubsetPair(n, k, z).at_most_as_bad(1e-20)
    assert law is not None
    assert law.p.sum() <= 1.0
    assert law.q.sum() <= 1.0
    assert law.p.sum() == pytest.approx(1.0, abs=1e-8)
    assert law.q.sum() == pytest.approx(1.0, abs=1e-8)
    for epsilon in (0.0, 0.5, 1.0):
        found = float(np.maximum(law.p - math.exp(epsilon) * law.q, 0.0).sum())
        exact = float(gaussian_delta(k / math.sqrt(n) / z, epsilon))
        if n == k:
            assert exact * 0.9 <= found <= exact
        else:  # what the sum of all rounds shows
            assert found >= exact * 0.99


@pytest.mark.parametrize(
    ("rounds", "k", "z", "passes", "width"),
    [(20, 2, 1.0, 50, 0.05), (100, 3, 2.0, 10, 0.01), (20, 19, 5.0, 3, 0.05)],
)
def test_several_participations_have_a_narrow_interval(
    rounds: int, k: int, z: float, passes: int, width: float
) -> None:
    loss = epsilon_of([random_allocation_gaussian(rounds, k, z, passes)], 1e-5)
    assert 0.0 < loss.epsilon_low <= loss.epsilon <= loss.epsilon_low * (1 + width)
    # One round fewer shows less.
    assert (
        epsilon_of([random_allocation_gaussian(rounds, k - 1, z, passes)], 1e-5).epsilon_low
        < loss.epsilon
    )


@pytest.mark.parametrize(
    ("n", "k", "z"), [(16, 8, 0.063), (24, 12, 0.077), (129, 30, 0.0757), (71, 23, 0.006)]
)
def test_participations_with_little_noise_have_bounds(n: int, k: int, z: float) -> None:
    """Hardly any output is likely enough under both neighbours to be in a bin."""
    loss = epsilon_of([random_allocation_gaussian(n, k, z)], 1e-5)
    of_sums = gaussian.epsilon(1e-5, z * n**0.5 / k)
    revealed = gaussian.epsilon(1e-5, z / k**0.5)
    assert 0.99 * of_sums < loss.epsilon_low < loss.epsilon <= revealed * 1.01
