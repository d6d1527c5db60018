"""What the best of K trials costs: against exact small cases, and against dp_accounting."""

import itertools
import math
import secrets

import dp_accounting as dpa
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp
from scipy.stats import poisson

from fedpriv.accounting.accountants import ACCOUNTANTS, RDPAccountant
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.accounting.rdp import DEFAULT_ORDERS, composed_rdp
from fedpriv.accounting.selection import (
    TRIAL_BITS,
    gamma_of,
    number_of_trials,
    selected_rdp,
)
from fedpriv.errors import InvalidValueError, UnsupportedEventError
from fedpriv.ledger.events import RoundEvent, Selection, Trial

RDP = ACCOUNTANTS["rdp"]
SHAPES = (None, 1e-9, 0.5, 1.0, 3.0)


def search(mean: float, shape: float | None, *trials: Trial) -> RoundEvent:
    first = poisson_gaussian(trials[0].sampling_probability, trials[0].noise_multiplier)
    return RoundEvent(first.sampling, first.queries, selection=Selection(trials, mean, shape))


def pmf(mean: float, shape: float | None, most: int) -> np.ndarray:
    """P[K = k] for k = 0, …, most, as Definition 1 of the paper has it."""
    k = np.arange(most + 1)
    if shape is None:
        return np.asarray(poisson.pmf(k, mean))
    gamma = gamma_of(mean, shape)
    chances, product = [0.0], 1.0
    for number in range(1, most + 1):
        product *= (number - 1 + shape) / number
        chances.append((1 - gamma) ** number / math.expm1(-shape * math.log(gamma)) * product)
    return np.array(chances)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [1.5, 5.0, 40.0])
def test_the_law_of_the_number_of_trials_is_that_of_the_paper(mean: float, shape) -> None:
    chances = pmf(mean, shape, 20_000)
    assert chances.sum() == pytest.approx(1.0)
    assert chances @ np.arange(len(chances)) == pytest.approx(mean, rel=1e-9)
    for part in range(0, 2048, 7):
        share = (part + 0.5) / 2048
        k = number_of_trials(int(share * 2**TRIAL_BITS), mean, shape)
        assert k >= (0 if shape is None else 1)
        assert chances[:k].sum() - 1e-9 <= share <= chances[: k + 1].sum() + 1e-9


def test_numbers_of_trials_that_are_rarer_than_any_delta_occur() -> None:
    """The law is not cut off where a δ that is priced could tell."""
    rarest = 2**TRIAL_BITS - 1
    # The geometric law with mean 2: K is above k with chance 2⁻ᵏ.
    assert number_of_trials(rarest - (1 << TRIAL_BITS - 200), 2.0, 1.0) in (200, 201)
    assert number_of_trials(rarest, 2.0, 1.0) == pytest.approx(TRIAL_BITS + 1, abs=1)
    # No trial at all has the chance e⁻¹⁰⁰.
    assert number_of_trials(0, 100.0) == 0 < number_of_trials(1 << TRIAL_BITS - 140, 100.0)


def test_secret_numbers_of_trials_have_the_mean() -> None:
    drawn = [number_of_trials(secrets.randbits(TRIAL_BITS), 5.0, 1.0) for _ in range(4000)]
    # Five standard errors of the geometric law, whose standard deviation is √20.
    assert abs(np.mean(drawn) - 5.0) < 5 * math.sqrt(20.0 / 4000)


def best_of(mean: float, shape: float | None, p: np.ndarray) -> np.ndarray:
    """Law of the best of K draws from p, whose outcomes are in order; first the one of K = 0.

    The best is at most the i-th with chance E[b^K], b being the chance that one draw is.
    """
    below = np.minimum(np.concatenate([[0.0], np.cumsum(p)]), 1.0)
    if shape is None:
        powers = np.exp(mean * (below - 1.0))
    else:
        gamma = gamma_of(mean, shape)
        powers = ((1 - (1 - gamma) * below) ** -shape - 1) / (gamma**-shape - 1)
    return np.concatenate([powers[:1], np.diff(powers)])


def renyi(p: np.ndarray, q: np.ndarray, order: float) -> float:
    kept = p > 0.0
    logs = order * np.log(p[kept]) - (order - 1) * np.log(q[kept])
    return float(logsumexp(logs)) / (order - 1)


ORDERS = (1.1, 1.5, 2.0, 3.0, 5.0, 9.0, 17.0, 33.0, 65.0, 129.0, 1025.0, 8193.0)


def both_ways(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return np.array([max(renyi(p, q, a), renyi(q, p, a)) for a in ORDERS])


def exact_delta(p: np.ndarray, q: np.ndarray, epsilon: float) -> float:
    e = math.exp(epsilon)
    return max(np.maximum(p - e * q, 0).sum(), np.maximum(q - e * p, 0).sum())


def bound_and_truth(p, q, mean: float, shape) -> tuple[np.ndarray, np.ndarray]:
    """The theorem, of the exact divergences of one trial, and the exact ones of the best."""
    bound = selected_rdp(ORDERS, both_ways(p, q), lambda e: exact_delta(p, q, e), mean, shape)
    return bound, both_ways(best_of(mean, shape, p), best_of(mean, shape, q))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mean", [2.0, 10.0, 50.0])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_the_price_holds_for_randomised_response(mean: float, shape, epsilon: float) -> None:
    """One trial answers a question truly with chance e^ε/(1 + e^ε); yes is better than no."""
    true = 1.0 / (1.0 + math.exp(-epsilon))
    bound, truth = bound_and_truth(
        np.array([1 - true, true]), np.array([true, 1 - true]), mean, shape
    )
    assert (truth <= bound * (1 + 1e-9)).all()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_price_holds_for_any_trial(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 5))
    weights = st.lists(st.floats(0.01, 1.0), min_size=size, max_size=size)
    p, q = (np.array(data.draw(weights)) for _ in range(2))
    shape = data.draw(st.sampled_from(SHAPES))
    mean = data.draw(st.floats(1.5, 30.0))
    bound, truth = bound_and_truth(p / p.sum(), q / q.sum(), mean, shape)
    assert (truth <= bound * (1 + 1e-9) + 1e-12).all()


@pytest.mark.parametrize("shape", [0.5, 1.0, 2.0])
def test_the_price_is_near_where_it_is_worst(shape: float) -> None:
    """The second best outcome is e^ε times as likely with the user, the best e^−ε times as likely.

    Whoever sees the second best then knows that the best was not met in all of K trials: of the
    (2 + η)·ε that the theorem says at large orders, nearly all can be seen.
    """
    epsilon, best, second = 0.5, 1e-3, 1e-7
    e = math.exp(epsilon)
    p = np.array([1 - best - second * e, second * e, best])
    q = np.array([1 - best * e - second, second, best * e])
    bound, truth = bound_and_truth(p, q, 1e6, shape)
    assert truth[-1] > 0.9 * (2 + shape) * epsilon
    assert truth[-1] <= bound[-1] < 1.1 * (2 + shape) * epsilon


def test_too_small_a_price_would_be_noticed() -> None:
    """Without the term of the number of trials, the exact cases refute the formula."""
    true = 1.0 / (1.0 + math.exp(-1.0))
    p, q = np.array([1 - true, true]), np.array([true, 1 - true])
    truth = bound_and_truth(p, q, 10.0, None)[1]
    assert (truth > both_ways(p, q)).any()


@pytest.mark.parametrize(("mean", "shape"), [*itertools.product([3.0, 30.0], SHAPES)])
def test_dp_accounting_agrees(mean: float, shape) -> None:
    q, z, rounds = 0.1, 2.0, 50
    orders = [a for a in DEFAULT_ORDERS if a.is_integer() and a <= 512]
    other = RdpAccountant(orders)
    rounds_event = dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(z))
    other.compose(
        RepeatAndSelectDpEvent(
            dpa.SelfComposedDpEvent(rounds_event, rounds),
            mean,
            math.inf if shape is None else shape,
        )
    )
    other.compose(dpa.SelfComposedDpEvent(rounds_event, 7))
    ours = RDPAccountant(tuple(orders))
    events = [search(mean, shape, Trial(q, z, rounds)), poisson_gaussian(q, z, 7)]
    found = ours.epsilon(events, 1e-5).epsilon
    assert found == pytest.approx(other.get_epsilon(1e-5), rel=1e-6)


def test_a_search_costs_as_its_dearest_trial_does_and_adds_up() -> None:
    cheap, dear = Trial(0.1, 3.0, 20), Trial(0.2, 2.0, 50)

    def price(*events: RoundEvent) -> float:
        return RDP.epsilon(events, 1e-5).epsilon

    assert price(search(10.0, 1.0, cheap, dear)) == price(search(10.0, 1.0, dear))
    assert price(search(10.0, 1.0, cheap)) < price(search(10.0, 1.0, dear))
    assert price(search(10.0, 1.0, dear)) > price(poisson_gaussian(0.2, 2.0, 50))
    twice = price(search(10.0, 1.0, cheap), search(10.0, 1.0, cheap))
    assert price(search(10.0, 1.0, cheap)) < twice < 2 * price(search(10.0, 1.0, cheap)) + 1e-9
    rdp = composed_rdp({(0.1, 3.0): 20}, DEFAULT_ORDERS)
    assert (RDP._rdp([search(10.0, 1.0, cheap)]) > rdp).all()


@pytest.mark.parametrize("name", [name for name in ACCOUNTANTS if name != "rdp"])
def test_other_accountants_refuse_a_search(name: str) -> None:
    events = [poisson_gaussian(0.1, 2.0), search(10.0, 1.0, Trial(0.1, 3.0, 20))]
    with pytest.raises(UnsupportedEventError, match="must be 'rdp' on a ledger"):
        ACCOUNTANTS[name].epsilon(events, 1e-5)
    with pytest.raises(UnsupportedEventError, match="best of several trials"):
        ACCOUNTANTS[name].delta(events, 1.0)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda: Trial(0.0, 1.0, 1), "sampling_probability is 0"),
        (lambda: Trial(0.1, 0.0, 1), "noise_multiplier is 0"),
        (lambda: Trial(0.1, 1.0, 0), "rounds of a trial is 0"),
        (lambda: Trial(0.1, 1.0, (1 << 53) + 1), "it must be a whole number from 1 to 2"),
        (lambda: Selection((), 5.0), "has 0 kinds"),
        (lambda: Selection((Trial(0.1, 1.0, 1),) * 2, 5.0), "all must differ"),
        (lambda: Selection((Trial(0.1, 1.0, 1),), 0.5), "mean number of trials is 0.5"),
        (lambda: Selection((Trial(0.1, 1.0, 1),), 1.0, 1.0), "above 1 with a shape"),
        (lambda: Selection((Trial(0.1, 1.0, 1),), 5.0, -0.5), "the shape is -0.5"),
    ],
)
def test_what_has_no_price_cannot_be_constructed(wrong, why: str) -> None:
    with pytest.raises(InvalidValueError, match=why):
        wrong()


def test_the_round_of_a_search_is_that_of_its_first_trial() -> None:
    event = poisson_gaussian(0.1, 2.0)
    for trial in (Trial(0.2, 2.0, 5), Trial(0.1, 1.0, 5)):
        with pytest.raises(InvalidValueError, match="of its first trial"):
            RoundEvent(event.sampling, event.queries, selection=Selection((trial,), 5.0))
