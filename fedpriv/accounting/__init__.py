"""Accountants: the cost of events as ε at a δ. They read events and know no mechanism.

>>> from fedpriv.accounting import epsilon, poisson_gaussian
>>> spent = epsilon([poisson_gaussian(q=0.01, noise_multiplier=4.0, count=10_000)], delta=1e-5)
>>> round(spent.epsilon_low, 6), round(spent.epsilon, 6)
(0.946867, 0.946867)

`accountants` defines and lists accountants, and chooses how to price events: as one Gaussian in
closed form (`gaussian`), along a contour (`contour`) or by FFT (`pld`), from the pairs that
docs/accounting.md lists by policy; `round_counts` counts rounds by setting. Moments (`rdp`)
and the CLT (in `gaussian`) are for comparison. `policies` makes events, `factorisation` finds
strategies for correlated noise, `fdp` bounds the power of tests on releases, `calibration` turns a
budget into a setting, and `pricing` prices ledgers.

A **setting** is (q, z), where z is the noise per sensitivity. A **pair** is (P, Q), two
distributions that dominate an event on two neighbours. A **loss** is log(dP/dQ), and its **tilt** a
weight e^{cL}. An **interval** has two ends, with the truth between them. docs/accounting.md says
which parts of an interval are proved, and which are margins supported by tests.
"""

from fedpriv.accounting.accountants import (
    ACCOUNTANTS,
    Accountant,
    Bound,
    PrivacyLoss,
    delta,
    epsilon,
)
from fedpriv.accounting.calibration import calibrate_noise_multiplier
from fedpriv.accounting.fdp import TradeOff, trade_off
from fedpriv.accounting.policies import (
    banded_poisson_gaussian,
    every_user_gaussian,
    fixed_size_gaussian,
    poisson_examples_gaussian,
    poisson_gaussian,
    poisson_replace_gaussian,
    random_allocation_gaussian,
    separated_gaussian,
)

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "Bound",
    "PrivacyLoss",
    "TradeOff",
    "banded_poisson_gaussian",
    "calibrate_noise_multiplier",
    "delta",
    "epsilon",
    "every_user_gaussian",
    "fixed_size_gaussian",
    "poisson_examples_gaussian",
    "poisson_gaussian",
    "poisson_replace_gaussian",
    "random_allocation_gaussian",
    "separated_gaussian",
    "trade_off",
]
