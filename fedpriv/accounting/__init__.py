"""Accountants: what events cost, as ε at a δ. Reads events of the ledger, knows no mechanism.

>>> from fedpriv.accounting import epsilon, poisson_gaussian
>>> spent = epsilon([poisson_gaussian(q=0.01, noise_multiplier=4.0, count=10_000)], delta=1e-5)
>>> round(spent.low, 6), round(spent.up, 6)
(0.946867, 0.946867)

`accountant` says what an accountant is and `registry` which analysis serves which event:

* Poisson samples, one user added or removed: the exact pair of each round. `tight` prices them in
  closed form where q = 1 (`gaussian`), else along a `contour`, else by `pld`.
* Every user, whole series with correlated noise (whose sensitivity `strategy` knows): Gaussians, in
  closed form.
* Poisson samples with one user replaced, cohorts of a fixed size, shuffled passes, random
  allocation: pairs of `pld.dominating_pairs` and `pld.random_allocation`, where each is proved, by
  `pld`.
* For comparison: moments (`rdp`), zCDP, the CLT, basic and advanced composition (`classical`).

`rounds` counts rounds by setting and groups different ones outward, for all of them. `policies`
makes events, `calibration` turns a budget into a setting, `pricing` prices whole ledgers.

A word has one meaning. A **setting** is (q, z), z the noise per sensitivity; a **pair** is (P, Q),
two distributions that dominate an event on two neighbours; a **loss** is log(dP/dQ), and a **tilt**
of it a weight e^{cL}; an **interval** is two ends that hold the truth. Which parts of an interval
are proved, and which are margins that tests support, is in docs/accounting.md.
"""

from fedpriv.accounting.accountant import Accountant, Bound, PrivacyLoss
from fedpriv.accounting.calibration import (
    calibrate_noise_multiplier,
    largest_clipping_norm,
    largest_number,
    largest_probability,
    largest_rounds,
    largest_sampling_probability,
    largest_share,
    smallest_noise,
    smallest_noise_stddev,
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
from fedpriv.accounting.registry import ACCOUNTANTS, delta, epsilon

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
