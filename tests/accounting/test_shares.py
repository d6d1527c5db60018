"""What is left for one more sum query: within the budget, at its edge, whatever the others are."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting.accountants import epsilon
from fedpriv.accounting.calibration import calibrate_noise_multiplier, smallest_query_noise
from fedpriv.accounting.policies import every_user_gaussian, fixed_size_gaussian, poisson_gaussian
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
    (9.0, 1e-5, fixed_size_gaussian(10, 1000, 4.0, 20), "pld"),
]


def joined(others: RoundEvent, z: float, norm: float = 1.0) -> RoundEvent:
    """The round with one more query of noise z·S and clipping norm S."""
    return replace(others, queries=(*others.queries, SumQueryEvent("q", norm, z * norm)))


def price(others: RoundEvent, z: float, delta: float, accountant: str) -> float:
    return epsilon([joined(others, z)], delta, accountant).epsilon


@pytest.mark.parametrize(("target", "delta", "others", "accountant"), ROUNDS)
def test_noise_is_the_smallest_within_the_budget(target, delta, others, accountant):
    z = smallest_query_noise(target, delta, others, accountant)
    assert price(others, z, delta, accountant) <= target
    assert price(others, 0.999 * z, delta, accountant) > target


@settings(max_examples=8, deadline=None)
@given(st.floats(1e-3, 1e3), st.floats(0.6, 20.0))
def test_only_noise_over_norm_matters(norm: float, room: float) -> None:
    others = every_user_gaussian(4.0, ADD_OR_REMOVE)
    target = epsilon([others], 1e-5, "tight").epsilon + room
    z = smallest_query_noise(target, 1e-5, others)
    assert epsilon([joined(others, 1.001 * z, norm)], 1e-5, "tight").epsilon <= target
    assert epsilon([joined(others, 0.999 * z, norm)], 1e-5, "tight").epsilon > target


def test_what_is_left_of_a_calibrated_round_is_its_weight() -> None:
    """Two groups with weights 0.3 and 0.7 of z: given one of them, the other is found again."""
    z = calibrate_noise_multiplier(2.0, 1e-5, 500, 0.02)
    others = poisson_gaussian(0.02, z / math.sqrt(0.7), 500)
    assert smallest_query_noise(2.0, 1e-5, others) == pytest.approx(z / math.sqrt(0.3), rel=2e-3)


def test_a_small_rest_is_met_to_a_thousandth_of_its_own() -> None:
    """Not of the whole round's noise, which the others nearly use up."""
    others = every_user_gaussian(4.0, ADD_OR_REMOVE)
    target = epsilon([others], 1e-5, "tight").epsilon * 1.0001
    z = smallest_query_noise(target, 1e-5, others)
    assert 100.0 < z < 1000.0
    assert price(others, z, 1e-5, "tight") <= target
    assert price(others, 0.999 * z, 1e-5, "tight") > target


class TestRefusals:
    OTHERS = poisson_gaussian(0.01, 1.0, 1000)

    @pytest.mark.parametrize("others", [OTHERS, poisson_gaussian(0.01, 0.0)])
    def test_others_that_pass_the_budget_alone(self, others):
        alone = epsilon([others], 1e-5, "tight").epsilon
        sentence = (
            r"epsilon is 0\.5 at delta 1e-05; the other queries of the round alone "
            f"cost {alone}, which leaves"
        )
        with pytest.raises(InvalidValueError, match=sentence):
            smallest_query_noise(0.5, 1e-5, others)

    def test_others_that_leave_almost_nothing(self):
        target = epsilon([self.OTHERS], 1e-5, "tight").epsilon
        with pytest.raises(
            InvalidValueError, match=r"no noise multiplier up to 100000 stays within it"
        ):
            smallest_query_noise(target, 1e-5, self.OTHERS)

    @pytest.mark.parametrize("target", [0.0, math.nan, math.inf, -1.0])
    def test_illegal_targets(self, target):
        sentence = f"epsilon is {target}"
        with pytest.raises(InvalidValueError, match=sentence):
            smallest_query_noise(target, 1e-5, self.OTHERS)
