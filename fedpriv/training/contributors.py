"""Released numbers of users who count, and when a run must end because too few do.

A user counts if its update does: an update that fails, is absent or has NaN is the zero vector. If
most updates are, a run spends its budget on noise. All of this post-processes releases.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Self

from fedpriv.ledger.events import SamplingEvent
from fedpriv.training.rounds import CONTRIBUTORS_METRIC, RoundResult, Stop

_SURE = 3.0  # standard deviations
_NEAR = 0.1  # share of the expected count; smaller differences are not reported


@dataclass(frozen=True)
class Contributors:
    """The counts of some rounds, added up; empty if they were not asked for."""

    rounds: int = 0  # that released a count
    total: float = 0.0  # of all counts
    expected: float = 0.0  # of the total, if every user counts
    variance: float = 0.0  # of the total, by noise and coins

    @classmethod
    def of(cls, results: Iterable[RoundResult], sampling: SamplingEvent) -> Self:
        """Return the counts of these rounds."""
        return reduce(lambda counts, result: counts.with_round(result, sampling), results, cls())

    def with_round(self, result: RoundResult, sampling: SamplingEvent) -> Self:
        """Return these counts and that of one more round.

        In a series the variance is too large: correlated noise cancels, and rounds share users.
        """
        count = result.scalar_metrics.get(CONTRIBUTORS_METRIC)
        if count is None:
            return self
        expected = result.expected_cohort_size  # an event does not say how many examples there are
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
        """Return the means over rounds, as "82.3 ± 4.5 of 86.1", or "" without rounds.

        The number after ± is one standard deviation of noise and coins together. If it is as large
        as the expected count, only more rounds will show whether users count.
        """
        if not self:
            return ""
        spread = math.sqrt(self.variance) / self.rounds
        places = 0 if spread >= 10.0 else 1
        figures = (self.total / self.rounds, spread, self.expected / self.rounds)
        return "{} ± {} of {}".format(*(f"{figure:,.{places}f}" for figure in figures))

    @property
    def too_few(self) -> bool:
        """Whether surely fewer than half of the expected users count, so that a run must end.

        The total is then three standard deviations below half of the expected total, if that limit
        is not negative. So a run in which all users count, and whose noise is large, ends by chance
        only if the total is six standard deviations below the expected total.
        """
        margin, half = _SURE * math.sqrt(self.variance), self.expected / 2.0
        return bool(self) and margin <= half and self.total < half - margin

    @property
    def far_off(self) -> bool:
        """Whether the total surely differs from the expected one by more than a tenth."""
        margin = _SURE * math.sqrt(self.variance) + _NEAR * self.expected
        return abs(self.total - self.expected) > margin

    def why_ended(self, units: str, done: int, rounds: int) -> str:
        """Return one sentence on why a run ended after `done` rounds; it counts `units`."""
        return (
            f"{Stop.TOO_FEW}: {self} expected {units} counted in a round, as noised counts say; "
            f"the run ended after {done} of {rounds} rounds, and the rest of its budget is not "
            "spent; look for what fails for all, such as NaN, labels that are no classes of the "
            "model or absent nodes, or go on with --keep-going (in Python keep_going=True)"
        )
