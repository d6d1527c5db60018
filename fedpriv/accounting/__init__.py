"""Events, ledger and accountants; knows no mechanism and imports no torch.

>>> from fedpriv.accounting import epsilon, poisson_gaussian
>>> spent = epsilon([poisson_gaussian(q=0.01, noise_multiplier=4.0, count=10_000)], delta=1e-5)
>>> spent.epsilon_low <= 0.94687 <= spent.epsilon
True
"""

from fedpriv.accounting.accountant import Accountant, Bound, PrivacyLoss
from fedpriv.accounting.accountants import ACCOUNTANTS, delta, epsilon
from fedpriv.accounting.budget import PrivacyBudget
from fedpriv.accounting.calibration import (
    calibrate_noise_multiplier,
    largest_rounds,
    largest_sampling_probability,
)
from fedpriv.accounting.events import (
    NeighbouringRelation,
    Randomness,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    SumQueryEvent,
    poisson_gaussian,
)
from fedpriv.accounting.ledger import Charge, ChargedRow, Head, Ledger, ProposedCharge
from fedpriv.accounting.participation import ParticipationRecord
from fedpriv.accounting.policies import (
    every_user_gaussian,
    fixed_size_gaussian,
    shuffled_gaussian,
)

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "Bound",
    "Charge",
    "ChargedRow",
    "Head",
    "Ledger",
    "NeighbouringRelation",
    "ParticipationRecord",
    "PrivacyBudget",
    "PrivacyLoss",
    "ProposedCharge",
    "Randomness",
    "RoundEvent",
    "SamplingEvent",
    "SamplingPolicy",
    "SumQueryEvent",
    "calibrate_noise_multiplier",
    "delta",
    "epsilon",
    "every_user_gaussian",
    "fixed_size_gaussian",
    "largest_rounds",
    "largest_sampling_probability",
    "poisson_gaussian",
    "shuffled_gaussian",
]
