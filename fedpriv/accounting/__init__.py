"""Events, ledger and accountants; knows no mechanism and imports no torch.

>>> from fedpriv.accounting import epsilon, poisson_gaussian
>>> spent = epsilon([poisson_gaussian(q=0.01, noise_multiplier=4.0, count=10_000)], delta=1e-5)
>>> round(spent.low, 6), round(spent.up, 6)
(0.946867, 0.946867)
"""

from fedpriv.accounting.accountant import Accountant, Bound, PrivacyLoss
from fedpriv.accounting.accountants import ACCOUNTANTS, delta, epsilon
from fedpriv.accounting.calibration import (
    calibrate_noise_multiplier,
    largest_number,
    largest_probability,
    largest_rounds,
    largest_sampling_probability,
    smallest_noise,
)
from fedpriv.accounting.policies import (
    every_user_gaussian,
    fixed_size_gaussian,
    poisson_gaussian,
    poisson_replace_gaussian,
    random_allocation_gaussian,
    separated_gaussian,
    shuffled_gaussian,
)
from fedpriv.accounting.shares import largest_clipping_norm, largest_share, smallest_noise_stddev

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "Bound",
    "PrivacyLoss",
    "calibrate_noise_multiplier",
    "delta",
    "epsilon",
    "every_user_gaussian",
    "fixed_size_gaussian",
    "largest_clipping_norm",
    "largest_number",
    "largest_probability",
    "largest_rounds",
    "largest_sampling_probability",
    "largest_share",
    "poisson_gaussian",
    "poisson_replace_gaussian",
    "random_allocation_gaussian",
    "separated_gaussian",
    "shuffled_gaussian",
    "smallest_noise",
    "smallest_noise_stddev",
]
