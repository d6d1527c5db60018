"""The released number of users who count, and the decision to end a run if it is too small.

A user counts if its update counts. The update of a user that fails, is absent or returns NaN is
the zero vector. If most updates are zero, a run spends its budget on noise. All of this is
post-processing of released numbers.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from fedpriv.ledger.events import SamplingEvent
from fedpriv.training.rounds import CONTRIBUTORS_METRIC, RoundResult, Stop

_SURE = 3.0  # standard deviations
_NEAR = 0.1  # of the expected number: smaller differences are not reported


@dataclass(frozen=True)
class Contributors:
    """The sum of the counts of some rounds; empty if no round released a count."""

    rounds: int = 0  # number of rounds that released a count
    total: float = 0.0  # sum of the counts
    expected: float = 0.0  # expectation of the total if every user counts
    variance: float = 0.0  # variance of the total, due to noise and to the draws of cohorts

    @classmethod
    def of(cls, results: Iterable[RoundResult], sampling: SamplingEvent) -> Self:
        """Return the sum of the counts of these rounds."""
        found = cls()
        for result in results:
            found = found.with_round(result, sampling)
        return found

    def with_round(self, result: RoundResult, sampling: SamplingEvent) -> Self:
        """Return the sum with the count of one more round.

        For a series of rounds the variance is too large, because correlated noise partly cancels,
        and the draws of different rounds depend on each other.
        """
        count = result.scalar_metrics.get(CONTRIBUTORS_METRIC)
        if count is None:
            return self
        expected = result.expected_cohort_size  # an event does not state the number of examples
        coins = sampling.cohort_variance * expected / sampling.expected_cohort_size
        noise = result.metrics_noise_stddev[CONTRIBUTORS_METRIC] ** 2
        return type(self)(
            self.rounds + 1,
            self.total + count,
            self.expected + expected,
            self.variance + noise + coins,
        )

    def __bool__(self) -> bool:
        return self.rounds > 0

    def __str__(self) -> str:
        """Return the means over rounds, such as "82.3 ± 4.5 of 86.1", or "" without rounds.

        The number after ± is one standard deviation of noise and draws together, so that readers
        can compare the mean with the expected one. If it is as large as the mean, only more rounds
        can show whether users count.
        """
        if not self:
            return ""
        spread = math.sqrt(self.variance) / self.rounds
        places = 0 if spread >= 10.0 else 1
        figures = (self.total / self.rounds, spread, self.expected / self.rounds)
        return "{} ± {} of {}".format(*(f"{figure:,.{places}f}" for figure in figures))

    @property
    def too_few(self) -> bool:
        """Whether fewer than half of the expected users surely count, so that a run must end.

        The total must be three standard deviations below half of the expected total. While that
        limit is negative, this is false. A run in which all users count therefore ends by chance
        only if its total is at least six standard deviations below the expected total.
        """
        margin, half = _SURE * math.sqrt(self.variance), self.expected / 2.0
        return bool(self) and margin <= half and self.total < half - margin

    @property
    def far_off(self) -> bool:
        """Whether the total surely differs from the expected total by more than a tenth of it."""
        margin = _SURE * math.sqrt(self.variance) + _NEAR * self.expected
        return abs(self.total - self.expected) > margin

    def why_ended(self, units: str, done: int, rounds: int) -> str:
        """Return, in one sentence, why a run ended after `done` of `rounds` rounds.

        `units` names what was counted, such as "users".
        """
        return (
            f"{Stop.TOO_FEW}: {self} expected {units} counted in a round, as noised counts say; "
            f"the run ended after {done} of {rounds} rounds, and the rest of its budget is not "
            "spent; look for what fails for all, such as NaN, labels that are no classes of the "
            "model or absent nodes, or go on with --keep-going (in Python keep_going=True)"
        )
