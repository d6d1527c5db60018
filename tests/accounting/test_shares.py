"""What is left for one more sum query: within the budget, at its edge, whatever the others are."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting.calibration import (
    calibrate_noise_multiplier,
    largest_clipping_norm,
    largest_share,
    smallest_noise_stddev,
)
from fedpriv.accounting.policies import (
    every_user_gaussian,
    fixed_size_gaussian,
    poisson_gaussian,
    shuffled_gaussian,
)
from fedpriv.accounting.registry import epsilon
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import NeighbouringRelation, RoundEvent, SumQueryEvent

ADD_OR_REMOVE = NeighbouringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighbouringRelation.REPLACE_ONE
THREE_GROUPS = RoundEvent(
    poisson_gaussian(0.01, 1.0).sampling,
    (SumQueryEvent("a", 1.0, 3.0), SumQueryEvent("b", 0.1, 0.2), SumQueryEvent("c", 5.0, 40.0)),
    count=1000,
)
ROUNDS = [
    (2.0, 1e-6, poisson_gaussian(0.01, 1.5, 1000), "tight"),
    (2.0, 1e-6, poisson_gaussian(0.01, 1.5, 1000), "pld"),
    (1.0, 1e-5, THREE_GROUPS, "tight"),
    (1.0, 1e-5, THREE_GROUPS, "rdp"),
    (6.0, 1e-5, every_user_gaussian(4.0, REPLACE, 3), "tight"),
    (9.0, 1e-5, fixed_size_gaussian(10, 1000, 4.0, 20), "rdp"),
    (3.0, 1e-5, shuffled_gaussian(9.0, ADD_OR_REMOVE, 20), "tight"),
]


def price(others: RoundEvent, query: SumQueryEvent, delta: float, accountant: str) -> float:
    joined = replace(others, queries=(*others.queries, query))
    return epsilon([joined], delta, accountant).epsilon


@pytest.mark.parametrize(("target", "delta", "others", "accountant"), ROUNDS)
class TestGuarantees:
    def test_noise_is_the_smallest_within_the_budget(self, target, delta, others, accountant):
        norm = 0.3
        sigma = smallest_noise_stddev(target, delta, others, norm, accountant)
        assert price(others, SumQueryEvent("q", norm, sigma), delta, accountant) <= target
        assert price(others, SumQueryEvent("q", norm, 0.999 * sigma), delta, accountant) > target

    def test_clipping_norm_is_the_largest_within_the_budget(
        self, target, delta, others, accountant
    ):
        sigma = 7.0
        norm = largest_clipping_norm(target, delta, others, sigma, accountant)
        assert price(others, SumQueryEvent("q", norm, sigma), delta, accountant) <= target
        assert price(others, SumQueryEvent("q", norm / 0.999, sigma), delta, accountant) > target

    def test_share_is_the_weight_of_the_noise(self, target, delta, others, accountant):
        """σ_g = z·S_g/√ω_g for every group of the whole round, and the weights add up to 1."""
        share = largest_share(target, delta, others, accountant)
        norm = 2.0
        sigma = smallest_noise_stddev(target, delta, others, norm, accountant)
        whole = replace(others, queries=(*others.queries, SumQueryEvent("q", norm, sigma)))
        z = whole.noise_multiplier
        assert sigma == pytest.approx(z * norm / math.sqrt(share), rel=1e-12)
        rest = [(z * q.clipping_norm / q.noise_stddev) ** 2 for q in others.queries]
        assert share + math.fsum(rest) == pytest.approx(1.0, rel=1e-12)


def test_what_is_left_of_a_calibrated_round_is_its_weight() -> None:
    """Two groups with weights 0.3 and 0.7 of z: given one of them, the other is found again."""
    z = calibrate_noise_multiplier(2.0, 1e-5, 500, 0.02)
    others = poisson_gaussian(0.02, z / math.sqrt(0.7), 500)
    assert largest_share(2.0, 1e-5, others) == pytest.approx(0.3, rel=3e-3)
    sigma = smallest_noise_stddev(2.0, 1e-5, others, clipping_norm=4.0)
    assert sigma == pytest.approx(4.0 * z / math.sqrt(0.3), rel=2e-3)
    assert largest_clipping_norm(2.0, 1e-5, others, sigma) == pytest.approx(4.0, rel=2e-3)


@settings(max_examples=8, deadline=None)
@given(st.floats(1e-3, 1e3), st.floats(0.6, 20.0))
def test_only_noise_over_norm_matters(norm: float, room: float) -> None:
    others = every_user_gaussian(4.0, ADD_OR_REMOVE)
    target = epsilon([others], 1e-5, "tight").epsilon + room
    sigma = smallest_noise_stddev(target, 1e-5, others, norm)
    assert sigma / norm == pytest.approx(smallest_noise_stddev(target, 1e-5, others, 1.0), rel=1e-3)


def test_a_small_rest_is_met_to_a_thousandth_of_its_own() -> None:
    """Not of the whole round's noise, which the others nearly use up."""
    others = every_user_gaussian(4.0, ADD_OR_REMOVE)
    target = epsilon([others], 1e-5, "tight").epsilon * 1.0001
    sigma = smallest_noise_stddev(target, 1e-5, others, 1.0)
    assert 100.0 < sigma < 1000.0
    assert price(others, SumQueryEvent("q", 1.0, sigma), 1e-5, "tight") <= target
    assert price(others, SumQueryEvent("q", 1.0, 0.999 * sigma), 1e-5, "tight") > target


class TestRefusals:
    OTHERS = poisson_gaussian(0.01, 1.0, 1000)

    @pytest.mark.parametrize("others", [OTHERS, poisson_gaussian(0.01, 0.0)])
    def test_others_that_pass_the_budget_alone(self, others):
        alone = epsilon([others], 1e-5, "tight").epsilon
        with pytest.raises(
            InvalidValueError, match=r"target_epsilon is 0\.5 at delta 1e-05; the o"
        ):
            smallest_noise_stddev(0.5, 1e-5, others, 1.0)
        with pytest.raises(InvalidValueError, match=f"alone cost {alone}, which leaves"):
            largest_share(0.5, 1e-5, others)

    def test_others_that_leave_almost_nothing(self):
        target = epsilon([self.OTHERS], 1e-5, "tight").epsilon
        with pytest.raises(InvalidValueError, match=r"no noise multiplier up to 100000 reaches it"):
            largest_clipping_norm(target, 1e-5, self.OTHERS, 1.0)

    @pytest.mark.parametrize("norm", [0.0, -1.0, math.inf, math.nan])
    def test_illegal_clipping_norms(self, norm):
        with pytest.raises(InvalidValueError, match=f"clipping_norm .* is {norm}"):
            smallest_noise_stddev(9.0, 1e-5, self.OTHERS, norm)

    @pytest.mark.parametrize("sigma", [0.0, -1.0, math.inf, math.nan])
    def test_illegal_noise(self, sigma):
        with pytest.raises(
            InvalidValueError, match=f"noise_stddev is {sigma}; it must be positive"
        ):
            largest_clipping_norm(9.0, 1e-5, self.OTHERS, sigma)

    @pytest.mark.parametrize("target", [0.0, math.nan, math.inf, -1.0])
    def test_illegal_targets(self, target):
        with pytest.raises(
            InvalidValueError, match=f"target_epsilon is {target}; it must be posit"
        ):
            largest_share(target, 1e-5, self.OTHERS)
