"""ε on the sixty reference settings, held against every published accountant that is sound there.

Where they are not: dp-accounting's PLD falls below the truth for δ under 1e-8, Opacus' PRV for δ
under 1e-10. Both, and RDP, are asked only where an answer takes a moment.
"""

import math
from functools import cache

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from prv_accountant import PoissonSubsampledGaussianMechanism, PRVAccountant

from fedpriv.accounting import PrivacyLoss, delta, epsilon
from simulations.references import REFERENCES, Reference

named = pytest.mark.parametrize("reference", REFERENCES, ids=str)


@cache
def tight(reference: Reference) -> PrivacyLoss:
    return epsilon([reference.event], reference.delta, accountant="tight")


def sampled(reference: Reference) -> dp_accounting.DpEvent:
    gaussian = dp_accounting.GaussianDpEvent(reference.z)
    return dp_accounting.PoissonSampledDpEvent(reference.q, gaussian)


@named
def test_the_interval_is_finite_and_narrow(reference: Reference) -> None:
    loss = tight(reference)
    assert 0.0 <= loss.epsilon_low <= loss.epsilon < math.inf
    assert loss.epsilon - loss.epsilon_low <= 1e-3 * loss.epsilon + 1e-6


@named
def test_delta_at_epsilon_is_what_was_asked_for(reference: Reference) -> None:
    loss = tight(reference)
    assert delta([reference.event], loss.epsilon) <= reference.delta * (1 + 5e-2)  # as documented
    if loss.epsilon_low > 1e-5:
        assert delta([reference.event], loss.epsilon_low * (1 - 1e-3)) >= reference.delta


@pytest.mark.parametrize("reference", REFERENCES[::3], ids=str)
def test_rdp_is_never_below(reference: Reference) -> None:
    """Published RDP is an upper bound, so it is above our lower end; at q = 1 not by much."""
    accountant = RdpAccountant([1.0 + a / 10 for a in range(1, 100)] + [*range(12, 257)])
    accountant.compose(sampled(reference), reference.rounds)
    published = accountant.get_epsilon(reference.delta)
    assert published >= tight(reference).epsilon_low
    if reference.q == 1.0 and 1.0 < published < 100.0:
        assert published <= 1.3 * tight(reference).epsilon


def spread(reference: Reference) -> float:
    """About the standard deviation of the loss, which says how fine a grid is needed."""
    variance = math.expm1(min(1 / reference.z**2, 50.0))
    return reference.q * math.sqrt(reference.rounds * variance)


@pytest.mark.parametrize(
    "reference",
    [r for r in REFERENCES if r.delta >= 1e-8 and spread(r) < 3.0 and r.z > 0.3],
    ids=str,
)
def test_published_privacy_loss_distributions_are_not_below(reference: Reference) -> None:
    """Their upper bound is above our lower end, and near ours where their grid is fine enough."""
    accountant = PLDAccountant()
    accountant.compose(sampled(reference), reference.rounds)
    published = accountant.get_epsilon(reference.delta)
    loss = tight(reference)
    assert published >= loss.epsilon_low * (1 - 1e-9)
    if reference.q * math.sqrt(math.expm1(1 / reference.z**2)) > 1e-2:
        assert published <= 1.01 * loss.epsilon + 1e-3


SMOOTH = pytest.mark.parametrize(
    "reference",
    [
        r
        for r in REFERENCES
        if r.delta >= 1e-8 and 1e-2 < spread(r) < 3.0 and r.z >= 0.7 and 1 < r.rounds <= 100_000
    ],
    ids=str,
)


@SMOOTH
def test_published_random_variables_agree(reference: Reference) -> None:
    """Their interval (Gopi et al. 2021) meets ours."""
    mechanism = PoissonSubsampledGaussianMechanism(
        sampling_probability=reference.q, noise_multiplier=reference.z
    )
    accountant = PRVAccountant(
        prvs=[mechanism],
        max_self_compositions=[reference.rounds],
        eps_error=0.05,
        delta_error=reference.delta / 100,
    )
    low, _, up = accountant.compute_epsilon(reference.delta, [reference.rounds])
    loss = tight(reference)
    assert low <= loss.epsilon
    assert loss.epsilon_low <= up


# Their code divides by zero at q = 1, and warns where the last order is the best.
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:Optimal order:UserWarning")
@SMOOTH
def test_opacus_is_not_below(reference: Reference) -> None:
    """Its random variables and its RDP are upper bounds."""
    from opacus import accountants  # takes a second, which other processes of pytest-xdist save

    history = [(reference.z, reference.q, reference.rounds)]
    variables, moments = accountants.PRVAccountant(), accountants.RDPAccountant()
    variables.history = moments.history = history
    loss = tight(reference)
    published = variables.get_epsilon(
        reference.delta, eps_error=0.05, delta_error=reference.delta / 100
    )
    assert loss.epsilon_low <= published <= 1.1 * loss.epsilon + 0.1
    alphas = [1.0 + a / 10 for a in range(1, 100)] + [*range(12, 64)]
    assert moments.get_epsilon(reference.delta, alphas=alphas) >= loss.epsilon_low
