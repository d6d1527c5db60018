"""One object per round: it knows how the cohort is drawn, what is released, and the event of both.

Beside the update, a round may release metrics, and how many users were clipped, by which clipping
norms adapt. They are vector groups of the same query, with shares of the round's privacy.
"""

import math
from dataclasses import dataclass

from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import RoundEvent
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import VectorGroup
from fedpriv.privacy.query import Averaging, GaussianQuery, noise_stddevs, sensitivities
from fedpriv.privacy.sampling import PoissonSampling

METRIC_PREFIX = "metrics/"  # begins the names of tensors and vector groups of metrics
# A user adds less than 2^25 steps to a component, and the noise less than 2^45: below 2^63.
MOST_USERS = 2**37
_SMALLEST_NORM, _LARGEST_NORM = 1e-12, 1e12
_PLAIN = Averaging()


@dataclass(frozen=True)
class PoissonGaussianMechanism:
    """The Poisson-subsampled Gaussian mechanism over vector groups.

    Sampling policy, query and neighbouring relation are fixed together here, so that what is
    drawn, what is released and what is accounted cannot come apart.
    """

    sampling: PoissonSampling  # who may be in a cohort, and with what probability
    query: GaussianQuery  # what is released; its denominator is the expected cohort size

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
    def calibrated(
        cls,
        sampling: PoissonSampling,
        clipping: Clipping,
        noise_multiplier: float,
        shares: tuple[float, ...],
        averaging: Averaging = _PLAIN,
    ) -> "PoissonGaussianMechanism":
        """The mechanism whose rounds have an effective noise multiplier z ≥ 0, rounded up.

        The denominators are the expected size and weight of a cohort; `shares` are ω_g > 0 of each
        vector group, summing to 1.
        """
        total = averaging.total_weight or float(sampling.population)
        weight = sampling.sampling_probability * total
        least = None if averaging.floor is None else averaging.floor * weight
        stddevs = noise_stddevs(sensitivities(clipping, least), noise_multiplier, shares)
        weighted = weight if clipping.weighted else None
        expected = sampling.expected_cohort_size
        return cls(sampling, GaussianQuery(clipping, stddevs, expected, weighted, averaging.floor))

    @property
    def clipping(self) -> Clipping:
        """What each user of the cohort contributes."""
        return self.query.clipping

    @property
    def event(self) -> RoundEvent:
        """What one round is charged as; known before the round."""
        return RoundEvent(self.sampling.event(), self.query.events)


@dataclass(frozen=True)
class Metric:
    """A vector m of each user, of which the average over the cohort is released.

    What a user contributes is m − centre, clipped to the radius. The tighter the ball around the
    values that occur, the smaller the noise: it is proportional to the radius. The average is over
    the expected cohort, and unbiased; a larger or smaller cohort moves it away from the centre or
    towards it.
    """

    name: str  # e.g. "accuracy"; the host of the users knows how to compute it
    shape: tuple[int, ...] = ()  # of the vector; () is a number
    centre: float = 0.0  # subtracted from every component before clipping, added to the average
    radius: float = 1.0  # bound on the L2 norm of m − centre
    options: tuple[float, ...] = ()  # further numbers that computing it takes, e.g. thresholds

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable():
            raise InvalidValueError(
                f"a metric is named {self.name!r}; a name must be printable and not empty"
            )
        if not math.isfinite(self.centre) or not all(map(math.isfinite, self.options)):
            raise InvalidValueError(
                f"metric {self.name!r} has centre {self.centre} and options {self.options}; they "
                "must be finite"
            )
        _ = self.group  # a radius to which nothing can be clipped is refused here

    @property
    def tensor(self) -> str:
        """Name of its tensor in a contribution, and of its vector group."""
        return METRIC_PREFIX + self.name

    @property
    def group(self) -> VectorGroup:
        """Its vector group."""
        return VectorGroup.single(self.tensor, self.radius)


@dataclass(frozen=True)
class AdaptiveClipping:
    """Moves each clipping norm so that a share of the users, the quantile, is not clipped.

    After a round with norm S and private fraction b of users that were not clipped, the next norm
    is S·exp(−η·(b − γ)) (Andrew et al. 2019, Algorithm 1). What a round clips with and adds noise
    for is the norm before it moves.
    """

    quantile: float = 0.5  # γ in (0, 1)
    learning_rate: float = 0.2  # η in (0, 10]; a round changes a norm by at most about e^η
    share: float = 0.02  # ω in (0, 1), of the round's privacy, for counting the clipped

    def __post_init__(self) -> None:
        for name in ("quantile", "share"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise InvalidValueError(
                    f"{name} of adaptive clipping is {getattr(self, name)}; it must be in (0, 1)"
                )
        if not 0.0 < self.learning_rate <= 10.0:
            raise InvalidValueError(
                f"learning_rate of adaptive clipping is {self.learning_rate}; it must be in (0, 10]"
            )

    def step(self, norm: float, unclipped: float) -> float:
        """The next clipping norm, from the noised fraction of users that were not clipped.

        What noise puts outside [0, 1] counts as the nearer end.
        """
        fraction = min(max(unclipped, 0.0), 1.0)
        moved = norm * math.exp(-self.learning_rate * (fraction - self.quantile))
        return min(max(moved, _SMALLEST_NORM), _LARGEST_NORM)
