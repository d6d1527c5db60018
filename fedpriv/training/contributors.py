"""How many users count, as rounds release it, and when a run must end since too few do.

A user counts if its update does: one that fails, is absent or gives NaN is the zero vector. If most
are, a run spends its budget on noise. All of this is post-processing of what was released.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from fedpriv.ledger.events import SamplingEvent
from fedpriv.training.rounds import CONTRIBUTORS_METRIC, RoundResult, Stop

_SURE = 3.0  # standard deviations
_NEAR = 0.1  # of what is expected: a difference that is not spoken of


@dataclass(frozen=True)
class Contributors:
    """The counts of some rounds, added up; empty if they were not asked for."""

    rounds: int = 0  # that released a count
    total: float = 0.0  # of all counts
    expected: float = 0.0  # of the total, if every user counts
    variance: float = 0.0  # of the total, by noise and coins

    @classmethod
    def of(cls, results: Iterable[RoundResult], sampling: SamplingEvent) -> Self:
        """The counts of these rounds."""
        found = cls()
        for result in results:
            found = found.with_round(result, sampling)
        return found

    def with_round(self, result: RoundResult, sampling: SamplingEvent) -> Self:
        """Those with the count of one more round.

        Over a series the variance is too large, as noise that is correlated cancels, and so does
        who was in other rounds.
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
        """The means over rounds, as "82.3 ± 4.5 of 86.1", or "" without rounds.

        What follows ± is one standard deviation of noise and coins together, so that the figure can
        be held against the expected one; if it is as large, only more rounds will tell.
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

        The total is then three standard deviations below half of what is expected. Nothing is
        concluded while that would be a negative number: so a run in which all users count, and
        whose noise is large, ends by chance only where the total is six below what is expected.
        """
        margin, half = _SURE * math.sqrt(self.variance), self.expected / 2.0
        return bool(self) and margin <= half and self.total < half - margin

    @property
    def far_off(self) -> bool:
        """Whether the total is surely another than expected, by more than a tenth."""
        margin = _SURE * math.sqrt(self.variance) + _NEAR * self.expected
        return abs(self.total - self.expected) > margin

    def why_ended(self, units: str, done: int, rounds: int) -> str:
        """In one sentence, why a run ended after so many rounds; `units` are what is counted."""
        return (
            f"{Stop.TOO_FEW}: {self} expected {units} counted in a round, as noised counts say; "
            f"the run ended after {done} of {rounds} rounds, and the rest of its budget is not "
            "spent; look for what fails for all, such as NaN, labels that are no classes of the "
            "model or absent nodes, or go on with --keep-going (in Python keep_going=True)"
        )
