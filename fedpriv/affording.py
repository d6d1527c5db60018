"""What a configuration may spend, and the least noise that keeps a plan within it."""

from collections.abc import Sequence
from dataclasses import replace

from fedpriv.accounting.accountant import Bound
from fedpriv.accounting.accountants import accountant_named
from fedpriv.accounting.budget import PrivacyBudget
from fedpriv.accounting.calibration import smallest_noise
from fedpriv.accounting.events import RoundEvent, poisson_gaussian
from fedpriv.config import Config
from fedpriv.errors import InvalidValueError
from fedpriv.federated.plan import TrainingPlan


def privacy_budget(config: Config) -> PrivacyBudget:
    """Budget of a configuration; without limit where there is no privacy to keep."""
    privacy = config.privacy
    if accountant_named(privacy.accountant).epsilon([], privacy.delta).bound is Bound.ESTIMATE:
        raise InvalidValueError(
            f"privacy.accountant is {privacy.accountant!r}, whose estimate can be below the truth; "
            "a budget needs an upper bound, such as that of tight"
        )

    limit = privacy.epsilon
    if limit is None or privacy.unsafe_no_privacy:
        limit = float("inf")
    return PrivacyBudget(limit, privacy.delta, accountant_named(privacy.accountant).upper_epsilon)


def noise_multiplier(config: Config, budget: PrivacyBudget, spent: Sequence[RoundEvent]) -> float:
    """Noise multiplier of a configuration, calibrated to ε if it is not given."""
    privacy = config.privacy
    if privacy.noise_multiplier is not None or privacy.epsilon is None:
        return privacy.noise_multiplier or 0.0
    if not budget.admits(spent):
        raise InvalidValueError(
            f"the ledger holds ε = {budget.epsilon_of(spent):.4g} at delta {privacy.delta} "
            f"already; privacy.epsilon is {privacy.epsilon} and must be larger"
        )
    q = privacy.sampling_probability

    def events_of(z: float) -> list[RoundEvent]:
        return [*spent, poisson_gaussian(q, z, config.rounds)]

    return smallest_noise(privacy.epsilon, privacy.delta, events_of, privacy.accountant)


def within(plan: TrainingPlan, budget: PrivacyBudget, spent: Sequence[RoundEvent]) -> TrainingPlan:
    """Plan with the noise raised until all its rounds fit into the budget.

    The event's own noise multiplier may differ from the calibrated one by a rounding, and the
    accountant's last digit with it.
    """
    while not budget.admits([*spent, replace(plan.mechanism.event, count=plan.rounds)]):
        plan = replace(plan, noise_multiplier=plan.noise_multiplier * (1.0 + 1e-4))
    return plan
