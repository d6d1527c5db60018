"""What an audit concludes: of mechanisms that do what they charge, and of ones that do not."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from fedpriv.accounting import poisson_gaussian
from fedpriv.audit.canaries import Canaries, Measurement
from fedpriv.audit.verdict import (
    Audit,
    AuditResult,
    GuessCounts,
    conclude,
    noise_fresh,
    noise_level,
)
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import RoundEvent

M, ROUNDS, Q, Z, D = 400, 40, 0.4, 2.0, 300
EVENT = poisson_gaussian(Q, Z, ROUNDS)
KEY = bytes(range(32))
COUNTS = GuessCounts.of(M, EVENT, 1e-3, "tight")


def run(
    seed: int, *, noise: float = 1.0, length: float = 1.0, q: float = Q, twice: bool = False
) -> Iterator[Measurement]:
    """Rounds of a mechanism, or of one with a fault, as an audit measures them."""
    random, there = np.random.default_rng(seed), Canaries(M, KEY).included
    energy = noise**2 * stats.chi2(D).rvs(size=ROUNDS, random_state=random)
    probe = np.zeros(64)
    for number in range(1, ROUNDS + 1):
        moves = there & (random.random(M) < q)
        if not (twice and number % 2 == 0):
            probe = random.normal(size=64)
        scores = length * moves + noise * Z * random.normal(size=M)
        yield Measurement(number, 0, 0, scores, float(energy[number - 1]), D, noise * probe)


def concluded(measured: Iterator[Measurement], charged: RoundEvent = EVENT) -> AuditResult:
    return conclude(Canaries(M, KEY), COUNTS, EVENT, list(measured), [charged], 1e-3, "tight")


@pytest.mark.slow
def test_what_is_right_is_consistent_and_bounded_from_below() -> None:
    found = [concluded(run(seed)) for seed in range(20)]
    assert sum(not each.consistent for each in found) <= 2
    for each in found:
        assert each.epsilon_low <= each.epsilon
        assert (each.canaries, each.rounds) == (M, ROUNDS)
        assert each.included == sum(each.there) == Canaries(M, KEY).included.sum()
        assert len(each.scores) == M
    assert np.median([each.epsilon_low for each in found]) > 0.8
    estimates = [each.epsilon_estimate for each in found]
    assert np.median(estimates) == pytest.approx(found[0].epsilon, rel=0.2)
    low = math.floor(found[0].epsilon_low * 1000) / 1000
    said = f"ε ≥ {low:.3f} at 95% confidence, claimed ≤ {math.ceil(found[0].epsilon * 1e3) / 1e3}"
    assert found[0].text == f"{said}: consistent"


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ({"noise": 0.5}, "the noise is weaker than charged"),
        ({"twice": True}, "noise was used twice"),
        ({"length": 10.0}, "guesses about canaries are right"),
        ({"length": 2.5}, "guesses about canaries are right"),
        ({"q": 1.0}, "guesses about canaries are right"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refuted(fault: dict[str, float], why: str) -> None:
    for seed in range(2):
        found = concluded(run(seed, **fault))
        assert not found.consistent
        assert any(why in each for each in found.refutations)
        assert f": refuted: {found.refutations[0]}" in found.text


def test_a_price_below_the_truth_is_refuted() -> None:
    # Charged as if z were three times as large.
    found = concluded(run(0), replace(EVENT, queries=poisson_gaussian(Q, 3 * Z).queries))
    assert not found.consistent


def test_nothing_measured_refutes_nothing() -> None:
    found = conclude(Canaries(M, KEY), COUNTS, EVENT, [], [], 1e-3, "tight")
    assert found.consistent
    assert (found.rounds, found.epsilon_low, found.epsilon) == (0, 0.0, 0.0)
    assert found.epsilon_estimate is None


def test_p_values_of_noise_are_uniform_where_users_add_nothing() -> None:
    levels = [noise_level(list(run(seed))) for seed in range(200)]
    assert stats.kstest(levels, "uniform").pvalue > 1e-3
    # What users add can only make them larger.
    weaker = [noise_level(list(run(seed, noise=0.98))) for seed in range(20)]
    assert max(weaker) < 0.05
    assert min(noise_level(list(run(seed, noise=1.05))) for seed in range(20)) > 0.5


def test_noise_is_fresh_unless_two_releases_share_it() -> None:
    assert min(noise_fresh(list(run(seed))) for seed in range(20)) > 1e-3
    assert max(noise_fresh(list(run(seed, twice=True))) for seed in range(5)) < 1e-30
    assert noise_fresh([]) == noise_fresh(list(run(0))[:1]) == 1.0


def test_a_single_number_that_comes_twice_is_rounding() -> None:
    # As an audit keeps them, in float32, at which some two of 2,000 are equal.
    numbers = (300.0 + np.random.default_rng(0).normal(size=2_000)).astype(np.float32)
    assert len(np.unique(numbers)) < 2_000
    (one, *_) = run(0)
    assert noise_fresh([replace(one, probe=n[np.newaxis]) for n in numbers.astype(float)]) == 1.0
    pair = [replace(one, probe=np.full(2, 30.0))] * 2
    assert noise_fresh(pair) < 1e-6


def test_too_few_and_too_many_canaries_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="canaries is 19"):
        Audit(19)
    with pytest.raises(InvalidValueError, match="canaries is 100001"):
        Audit(100_001)
    assert Audit(20).canaries == 20
    assert Audit(100_000).canaries == 100_000
