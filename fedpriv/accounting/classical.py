"""The classical accountants, to see beside the exact answer.

All but the CLT give upper bounds, and loose ones; the CLT's estimate can be below the truth.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from fedpriv.accounting import composition, gdp, zcdp
from fedpriv.accounting.accountant import (
    Accountant,
    Bound,
    PrivacyLoss,
    check_delta,
    check_epsilon,
    checked,
)
from fedpriv.accounting.rounds import Rounds
from fedpriv.ledger.events import RoundEvent

_LOG_LEAST, _LOG_MOST = math.log(1e-300), math.log1p(-1e-12)
_PRECISION = 1e-6


@dataclass(frozen=True)
class ClassicalAccountant(Accountant):
    """An accountant that is one formula for ε.

    Attributes:
        name: its name in `ACCOUNTANTS`.
        bound: what kind of statement the formula makes.
        price: ε of rounds at δ; falls as δ grows.
    """

    name: str = ""
    bound: Bound = Bound.UPPER
    price: Callable[[Rounds, float], float] = composition.basic_epsilon

    def epsilon(self, events: Iterable[RoundEvent], delta: float) -> PrivacyLoss:
        """What the formula says at δ."""
        check_delta(delta)
        priced = checked(events, self.name)
        rounds = priced.rounds()
        up = self.price(rounds, delta) if rounds else 0.0
        return priced.loss(0.0, up, delta, self.name, self.bound)

    def delta(self, events: Iterable[RoundEvent], epsilon: float) -> float:
        """The least δ, up to a millionth of log δ, at which the formula's ε is no more than this.

        Between 1e-300 and 1; 1 if there is none.
        """
        check_epsilon(epsilon)
        rounds = checked(events, self.name).rounds()
        if not rounds:
            return 0.0
        low, high = _LOG_LEAST, _LOG_MOST
        noiseless = any(z == 0.0 for _, z in rounds)
        if noiseless or self.price(rounds, math.exp(high)) > epsilon:
            return 1.0
        while high - low > _PRECISION * abs(high) + _PRECISION**2:
            middle = (low + high) / 2
            if self.price(rounds, math.exp(middle)) > epsilon:
                low = middle
            else:
                high = middle
        return math.exp(high)


def _zcdp_epsilon(rounds: Rounds, delta: float) -> float:
    return zcdp.epsilon(zcdp.rho(rounds), delta)


CLASSICAL = (
    ClassicalAccountant("gdp", Bound.ESTIMATE, gdp.clt_epsilon),
    ClassicalAccountant("zcdp", Bound.UPPER, _zcdp_epsilon),
    ClassicalAccountant("advanced", Bound.UPPER, composition.advanced_epsilon),
    ClassicalAccountant("basic", Bound.UPPER, composition.basic_epsilon),
)
"""μ-GDP by the CLT (Bu et al. 2020), zCDP without amplification (Bun & Steinke 2016), and advanced
and basic composition with amplification (Dwork & Roth 2014)."""
