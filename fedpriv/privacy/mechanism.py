"""One object per round: it draws the cohort, knows the query and names the event."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpriv.accounting.events import RoundEvent
from fedpriv.errors import InvalidValueError
from fedpriv.privacy.contribution import IntegerVector
from fedpriv.privacy.entropy import Entropy
from fedpriv.privacy.floored import FlooredAverageQuery
from fedpriv.privacy.layout import FloatVector
from fedpriv.privacy.query import GaussianAverageQuery, GaussianSumQuery
from fedpriv.privacy.sampling import PoissonSampling

MOST_USERS = 2**37
"""A user adds less than 2^25 steps to a component, and the noise less than 2^45: below 2^63."""


@dataclass(frozen=True)
class PoissonGaussianMechanism:
    """The Poisson-subsampled Gaussian mechanism over vector groups.

    Sampling policy, query and neighbouring relation are fixed together here, so that what is
    drawn, what is released and what is accounted cannot come apart.

    Attributes:
        sampling: who may be in a cohort, and with what probability.
        query: the average query; its denominator is the expected cohort size.

    Raises:
        InvalidValueError: the denominator is not the expected cohort size, or there are so many
            users that a sum could overflow.
    """

    sampling: PoissonSampling
    query: GaussianAverageQuery | FlooredAverageQuery

    def __post_init__(self) -> None:
        if self.sampling.population > MOST_USERS:
            raise InvalidValueError(
                f"population is {self.sampling.population}; sums of more than {MOST_USERS} users "
                "could overflow"
            )
        if self.query.denominator != self.sampling.expected_cohort_size:
            raise InvalidValueError(
                f"denominator is {self.query.denominator}; it must be the expected cohort size "
                f"{self.sampling.expected_cohort_size}"
            )

    @classmethod
    def of(
        cls, sampling: PoissonSampling, sum_query: GaussianSumQuery
    ) -> "PoissonGaussianMechanism":
        """Mechanism whose average is over the expected cohort size of `sampling`."""
        return cls(sampling, GaussianAverageQuery(sum_query, sampling.expected_cohort_size))

    @property
    def average(self) -> GaussianAverageQuery:
        """The query that the noise and the denominators are those of."""
        query = self.query
        return query.average if isinstance(query, FlooredAverageQuery) else query

    @property
    def event(self) -> RoundEvent:
        """What one round is charged as; known before the round."""
        return RoundEvent(self.sampling.event(), self.query.events)

    def draw_cohort(self, entropy: Entropy, purpose: str) -> npt.NDArray[np.int64]:
        """Positions of the users of one cohort, ascending; secret. May be empty."""
        return self.sampling.draw(entropy.key(purpose))

    def release(
        self, total: IntegerVector, entropy: Entropy, purpose: str, weight: int = 0
    ) -> tuple[FloatVector, RoundEvent]:
        """Noised average [D] of the cohort whose contributions sum to `total`, with its event.

        An empty cohort releases like any other: its total is zero.

        Args:
            total: [D] sum of the contributions, in steps.
            entropy: where the noise comes from.
            purpose: names this release; must never be used for another.
            weight: of the users in the total, in units of 1/c; read by a floored average only.
        """
        if isinstance(self.query, FlooredAverageQuery):
            average, queries = self.query.release(total, weight, entropy, purpose)
        else:
            average, queries = self.query.release(total, entropy, purpose)
        return average, RoundEvent(self.sampling.event(), queries)
