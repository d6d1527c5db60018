"""The Gaussian mechanism: the release of a round, its sensitivity, its noise and its event.

A query divides sums by public constants (f̃_f of McMahan et al. 2018) or, with a floor, by the
weight of the cohort itself (f̃_c). Several vector groups form one query: equation (1). A mechanism
combines a query with a sampling policy and, for a series of rounds, a noise correlation strategy.

Besides the update, a round may release metrics and the number of clipped users, from which clipping
norms adapt. They are vector groups of the same query, each with a share of the round's privacy.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import LEAST_SHARE, WITH_STRATEGY, RoundEvent, SecureSum, SumQueryEvent
from fedpriv.privacy.clipping import MOST_WEIGHT, Clipping, IntegerVector
from fedpriv.privacy.correlated_noise import BandedStrategy, CorrelatedNoise, Strategy
from fedpriv.privacy.layout import NO_CLIPPING, FloatVector, VectorGroup, check_names
from fedpriv.privacy.noise import LARGEST_STDDEV, Entropy, rounded_gaussian
from fedpriv.privacy.sampling import Sampling
from fedpriv.support.checks import check_range, check_ranges, hold_numbers, plain_numbers, text_down


@dataclass(frozen=True)
class Averaging:
    """Weights and denominator of an average."""

    # None: every user has the weight w = 1. Otherwise c: a user with n examples has the weight
    # w = min(n, c)/c. Without a cap, one user could move an average without bound.
    cap: int | None = None
    # W > 0, a public estimate of the sum of all users' weights. It must not be computed from their
    # data. None if every user has the weight 1, so that W is the number of users.
    total_weight: float | None = None
    # None: the denominator is the constant qW. Otherwise φ in (0, 1]: the denominator is the
    # cohort's own weight, but at least φ·qW, and the sensitivity doubles.
    floor: float | None = None

    def __post_init__(self) -> None:
        hold_numbers(self)
        check_range("cap of the weights", self.cap, f"[1, {MOST_WEIGHT}]?")
        if (self.cap is None) != (self.total_weight is None):
            raise InvalidValueError(
                f"averaging has cap {self.cap} and total_weight {self.total_weight}; it must have "
                "both, a bound on one user's weight and a public estimate of the sum of all "
                "weights, or neither"
            )
        check_ranges(self, total_weight="(0, inf)?", floor="(0, 1]?")


# Shares of a round's privacy per vector group, and the noise that follows from them.


def given_shares(
    groups: tuple[VectorGroup, ...], weights: Mapping[str, float]
) -> tuple[float, ...]:
    """Return ω_g in proportion to positive weights, one per group name."""
    names = [group.name for group in groups]
    check_names("weights and groups", weights, names)
    for name, weight in weights.items():
        check_range(f"weight of group {name!r}", weight, "(0, inf)")
    total = math.fsum(weights.values())
    return tuple(weights[name] / total for name in names)


def sensitivities(clipping: Clipping, least_weight: float | None = None) -> tuple[float, ...]:
    """Return Δ_g, the L2 distance that one user can move each group before noise is added: [G].

    For a sum, Δ_g = S_g. For a weighted group divided by the cohort's own weight, Δ_g is twice S_g
    (see `GaussianQuery._numerator`) plus the effect of rounding to whole steps: at most
    e = ½ + m·√B_g·2^-50 in each component of either of two neighbours, hence 2·e·√d in their
    difference, which is about √d·2^-25 clipping norms. Node sums may exceed their norm by one part
    in 2^30. Here m is `least_weight`, the smallest divisor of weighted groups; None means that they
    are divided by a constant.
    """
    distances = []
    for group in clipping.groups:
        factor = 1.0
        if least_weight is not None and group.name in clipping.weighted:
            rounding = 1.0 + least_weight * math.sqrt(group.squared_bound) * 2.0**-49
            steps = rounding * math.sqrt(group.dimension(clipping.layout))
            factor = (2.0 + steps * group.granularity / group.clipping_norm) * (1.0 + 2.0**-29)
        distances.append(group.clipping_norm * factor)
    return tuple(distances)


def noise_stddevs(
    sensitivities: tuple[float, ...], noise_multiplier: float, shares: tuple[float, ...]
) -> tuple[float, ...]:
    """Return σ_g = z·Δ_g/√ω_g for shares ω_g > 0 that sum to 1: the noise multiplier is z.

    By equation (1) of McMahan et al. 2018, z_eff = (Σ (Δ_g/σ_g)²)^(−1/2) = z·(Σ ω_g)^(−1/2) = z.
    The result is rounded up, so that the effective multiplier is never below z.
    """
    # In 32 bits the rounding up would be lost.
    sensitivities, noise_multiplier, shares = plain_numbers(
        (sensitivities, noise_multiplier, shares)
    )
    check_range("noise_multiplier", noise_multiplier, "[0, inf)")
    sums_to_one = math.isclose(math.fsum(shares), 1.0, rel_tol=1e-9)
    if len(shares) != len(sensitivities) or min(shares) <= 0.0 or not sums_to_one:
        raise InvalidValueError(
            f"noise shares are {shares}; there must be {len(sensitivities)} positive ones that sum "
            "to 1"
        )
    # One part in 2^40 covers rounding here and in the effective multiplier.
    upward = noise_multiplier * (1.0 + 2.0**-40)
    return tuple(
        upward * sensitivity * math.sqrt(math.fsum(shares) / share)
        for sensitivity, share in zip(sensitivities, shares, strict=True)
    )


def rounded_noise(
    key_of: Callable[[str], bytes], clipping: Clipping, stddevs: Sequence[float]
) -> IntegerVector:
    """Return noise K in steps, int64 [D], with the exact law of a rounded normal, by component.

    `key_of` returns a fresh key for a vector group's name, for this draw only; `stddevs` are in
    steps, one for each group.
    """
    stddev_of = dict(zip((group.name for group in clipping.groups), stddevs, strict=True))
    sizes = {group.name: group.dimension(clipping.layout) for group in clipping.groups}
    return _in_place(clipping, lambda g: rounded_gaussian(key_of(g), sizes[g], stddev_of[g]))


def _in_place(clipping: Clipping, vector_of: Callable[[str], IntegerVector]) -> IntegerVector:
    """Return the vectors of all groups [d_g] in the places of their tensors: [D]."""
    vector = np.empty(clipping.layout.dimension, np.int64)
    for group in clipping.groups:
        numbers = vector_of(group.name)
        for span in clipping.spans[group.name]:
            size = span.stop - span.start
            vector[span], numbers = numbers[:size], numbers[size:]
    return vector


@dataclass(frozen=True)
class GaussianQuery:
    """Releases (Σ_{i in cohort} c(v_i) + N(0, σ²))/denominator, group by group.

    Contributions and noise are whole numbers of steps: see `noise`.
    """

    clipping: Clipping  # converts a user's tensors v to its contribution c(v)
    noise_stddevs: tuple[float, ...]  # σ_g ≥ 0 of each group, on the sum, in units of c(v)
    # qN > 0, fixed before the round; 1 releases the sum. It is never the size of the realised
    # cohort, which is private: dividing by that would change every other user's share.
    denominator: float = 1.0
    # qW > 0, for the weighted groups; W is the public sum of the weights of all enrolled users.
    weighted_denominator: float | None = None
    # None: weighted groups are also divided by a constant. Otherwise φ in (0, 1]: they are divided
    # by the cohort's own weight B, but at least by m = φ·qW. If A is their sum, noise is added to
    # m·A/max(m, B).
    floor: float | None = None
    # The increase of each group's sensitivity by the arithmetic of correlated noise; (): none.
    slack: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        hold_numbers(self)
        groups, weighted = self.clipping.groups, self.clipping.weighted
        if self.slack and (len(self.slack) != len(groups) or not min(self.slack) >= 0.0):
            raise InvalidValueError(
                f"slack is {self.slack}; it must have {len(groups)} numbers that are not negative"
            )
        if len(self.noise_stddevs) != len(groups):
            raise InvalidValueError(
                f"{len(self.noise_stddevs)} noise_stddevs are given for {len(groups)} groups"
            )
        check_ranges(self, denominator="(0, inf)", weighted_denominator="(0, inf)?")
        check_ranges(self, floor="(0, 1]?")
        if weighted and self.weighted_denominator is None:
            raise InvalidValueError(
                f"groups {weighted} are weighted; they need weighted_denominator, q times the sum "
                "of all weights"
            )
        if self.floor is not None and not weighted:
            raise InvalidValueError(f"floor is {self.floor} and no group is weighted; one must be")
        _ = self.events  # refuses a σ_g that no ledger would accept
        for group, stddev in zip(groups, self.noise_stddevs, strict=True):
            if stddev and group.clipping_norm == NO_CLIPPING:
                raise InvalidValueError(
                    f"group {group.name!r} is not clipped, so no noise would protect anyone; its "
                    "clipping norm must be finite, or noise_multiplier 0"
                )
            if stddev > LARGEST_STDDEV * group.granularity:
                ratio = text_down(stddev / group.clipping_norm)
                raise InvalidValueError(
                    f"noise_stddev of group {group.name!r} is {ratio} times its clipping norm; "
                    "it must be at most 2^15 times"
                )

    @cached_property
    def events(self) -> tuple[SumQueryEvent, ...]:
        """The events charged for one release, one per group."""
        bounds = sensitivities(self.clipping, self._least_weight)
        if self.slack:
            bounds = tuple(map(_upper_sum, bounds, self.slack))
        return tuple(
            SumQueryEvent(group.name, sensitivity, stddev, group.granularity)
            for group, sensitivity, stddev in zip(
                self.clipping.groups, bounds, self.noise_stddevs, strict=True
            )
        )

    @property
    def divisors(self) -> tuple[float, ...]:
        """Divisor of each group after noise is added: qN, or qW or m if the group is weighted."""
        weighted = self._least_weight or self.weighted_denominator or self.denominator
        return tuple(
            weighted if group.name in self.clipping.weighted else self.denominator
            for group in self.clipping.groups
        )

    @property
    def tensor_stddevs(self) -> dict[str, float]:
        """Standard deviation of fresh noise per component of a released tensor, by tensor name."""
        return {
            tensor: stddev * scale / divisor
            for group, stddev, divisor in zip(
                self.clipping.groups, self.noise_stddevs, self.divisors, strict=True
            )
            for tensor, scale in zip(group.tensors, group.scales, strict=True)
        }

    def noised_average(
        self,
        total: IntegerVector,
        entropy: Entropy,
        purpose: str,
        weight: int = 0,
        correlated: Mapping[str, IntegerVector] | None = None,
    ) -> tuple[FloatVector, tuple[SumQueryEvent, ...]]:
        """Return the noised average [D], in units of the users' tensors, and the events to charge.

        Only `fedpriv.privacy.round.release` may call this: it holds the charge. `total` is the sum
        of the cohort's contributions in steps, int64 [D], and `weight` is the sum of its users'
        m_i, so that B = weight/c. `purpose` names this release and must never name another. Noise
        is independent of all other releases unless `correlated` gives the round's noise in a series
        by group, in steps; `correlated_noise` states its guarantee.
        """
        clipping, dimension = self.clipping, self.clipping.layout.dimension
        if total.shape != (dimension,) or total.dtype != np.int64:
            raise InvalidValueError(
                f"total is {total.dtype}{list(total.shape)}; it must be int64[{dimension}]"
            )
        if weight < 0:
            raise InvalidValueError(f"weight is {weight}; it must not be negative")
        # Sensitivity: adding or removing one user changes the part of group g of a sum by its
        # contribution, whole numbers a with Σa² ≤ B_g, so by at most γ_g·√B_g ≤ S_g = Δ_g, exactly;
        # with a floor, by at most Δ_g of `sensitivities`, see `_numerator`. Divided by σ_g, group
        # by group, all parts together change by at most √(Σ_g (Δ_g/σ_g)²) = 1/z, and in these units
        # the noise is N(0, I): equation (1). If examples are drawn, this holds for each example,
        # and a user with j drawn examples changes all parts together by at most j/z. Rounding noise
        # to whole steps is post-processing, since the numbers it is added to are whole.
        if correlated is not None:
            noised = _in_place(clipping, correlated.__getitem__)
        else:
            pairs = zip(clipping.groups, self.noise_stddevs, strict=True)
            stddevs = [stddev / group.granularity for group, stddev in pairs]
            noised = rounded_noise(lambda g: entropy.key(f"{purpose}/{g}"), clipping, stddevs)
        noised += self._numerator(total, weight)
        return self.averaged(noised), self.events

    def averaged(self, noised: IntegerVector) -> FloatVector:
        """Return the average [D] of a noised sum in steps [D], in units of the users' tensors.

        This is post-processing, since steps and denominators are public.
        """
        average = self.clipping.in_units(noised)
        for group, divisor in zip(self.clipping.groups, self.divisors, strict=True):
            for span in self.clipping.spans[group.name]:
                average[span] /= divisor
        return average

    def _numerator(self, total: IntegerVector, weight: int) -> IntegerVector:
        """Return the numbers to add noise to, in whole steps [D]: A, or with a floor m·A/max(m, B).

        The latter moves by at most 2·S_g plus rounding. Let ‖A‖ ≤ S·B, and add one user (w·c, w)
        with ‖c‖ ≤ S and w ≤ 1. If B + w ≤ m, it moves by w·c. If B ≥ m, it moves by
        m·(w·c·B − w·A)/(B·(B + w)), at most 2·S·w·m/(B + w) ≤ 2·S. If m is between, it moves by
        A·(m/(B + w) − 1) + w·c·m/(B + w), of norm at most S·B·(B + w − m)/(B + w) + S·w ≤
        S·B·w/(B + w) + S·w ≤ 2·S.
        """
        clipping, minimum = self.clipping, self._least_weight
        share = 1.0 if minimum is None else minimum / max(minimum, weight / clipping.weight_cap)
        if share == 1.0:
            return total
        numerator = total.copy()
        for name in clipping.weighted:
            for span in clipping.spans[name]:  # at most m·√B_g steps each
                numerator[span] = np.rint(total[span] * share)
        return numerator

    @property
    def _least_weight(self) -> float | None:
        """m, the smallest divisor of the weighted groups; None without a floor."""
        weight = self.weighted_denominator
        return None if self.floor is None or weight is None else self.floor * weight


def _upper_sum(sensitivity: float, slack: float) -> float:
    """Return the sum, rounded up."""
    return math.nextafter(sensitivity + slack, math.inf)


METRIC_PREFIX = "metrics/"  # starts the names of tensors and vector groups of metrics
# A user adds less than 2^25 steps to a component, and the noise less than 2^45: below 2^63.
MOST_USERS = 2**37
_RARE = 32.0  # −ln of a probability, below 1e-13
_PLAIN = Averaging()
INDEPENDENT = BandedStrategy((1.0,))  # fresh noise in each round


@dataclass(frozen=True)
class GaussianMechanism:
    """The Gaussian mechanism over vector groups, for cohorts that a sampling policy draws.

    It fixes sampling policy, query, noise and neighbouring relation together, so that drawing,
    release and accounting always match. A combination without an analysis cannot be constructed.
    """

    sampling: Sampling  # draws the cohorts
    query: GaussianQuery  # the release; its denominator is the expected cohort size
    strategy: Strategy = INDEPENDENT  # correlates noise over the rounds of a series
    secure_sum: SecureSum | None = None  # set if the nodes draw users and add the noise

    def __post_init__(self) -> None:
        _ = self.event  # refuses a strategy that has no analysis with this sampling
        if self.secure_sum is not None and self.query.floor is not None:
            raise InvalidValueError(
                f"averaging.floor is {self.query.floor} and the server is not trusted; it must be "
                "absent, since the weight of a cohort is secret then"
            )
        if self.sampling.places > MOST_USERS:
            raise InvalidValueError(
                f"population is {self.sampling.places}; sums of more than {MOST_USERS} users "
                "could overflow"
            )
        if self.sampling.drawn is not self.sampling.unit and self.clipping.weighted:
            # Division by the cohort's weight does not give a sum over a user's examples.
            raise InvalidValueError(
                f"groups {self.clipping.weighted} are averaged with weights or a floor; if "
                "examples are drawn, all must have equal weight over a constant denominator"
            )
        if self.query.denominator != self.sampling.expected_cohort_size:
            raise InvalidValueError(
                f"denominator is {self.query.denominator}; it must be the expected cohort size "
                f"{self.sampling.expected_cohort_size}"
            )
        if self.strategy == INDEPENDENT:
            return
        if self.event.sampling.policy not in WITH_STRATEGY:
            raise InvalidValueError(
                f"noise is correlated and sampling is {self.event.sampling.policy}, which has no "
                f"analysis with such noise; it must be {' or '.join(WITH_STRATEGY)}"
            )
        slacks = self.query.slack or (0.0,) * len(self.clipping.groups)
        stddevs, rounds = self.query.noise_stddevs, self.sampling.rounds
        min_slacks = _slacks(self.clipping, stddevs, self.strategy, rounds)
        for minimum, slack in zip(min_slacks, slacks, strict=True):
            if minimum > slack:
                raise InvalidValueError(
                    f"slack is {slack}; the arithmetic of this noise needs {minimum}"
                )

    @classmethod
    def calibrated(
        cls,
        sampling: Sampling,
        clipping: Clipping,
        noise_multiplier: float,
        shares: tuple[float, ...],
        averaging: Averaging = _PLAIN,
        strategy: Strategy = INDEPENDENT,
        secure_sum: SecureSum | None = None,
    ) -> "GaussianMechanism":
        """Return the mechanism whose rounds have the effective noise multiplier z ≥ 0, rounded up.

        The denominators are the expected size and weight of a cohort. `shares` are the ω_g > 0 of
        the vector groups and sum to 1. With a strategy, z refers to the fresh noise of each round.
        For a projection, z applies to a round of the projected population, whose cohort is larger;
        the noise on the sum of the smaller cohort is smaller by the same factor.
        """
        noise_multiplier /= sampling.event().growth
        expected = sampling.expected_cohort_size
        weight = expected
        if averaging.total_weight is not None:
            weight = expected / sampling.population * averaging.total_weight
        minimum = None if averaging.floor is None else averaging.floor * weight
        bounds = sensitivities(clipping, minimum)
        stddevs = noise_stddevs(bounds, noise_multiplier, shares)
        weighted = weight if clipping.weighted else None
        query = GaussianQuery(clipping, stddevs, expected, weighted, averaging.floor)
        if strategy == INDEPENDENT:
            return cls(sampling, query, secure_sum=secure_sum)
        # More noise needs more slack, but by far less than the margin of 2^-10.
        min_slacks = _slacks(clipping, stddevs, strategy, sampling.rounds)
        slack = tuple(extra * (1.0 + 2.0**-10) for extra in min_slacks) if any(min_slacks) else ()
        if slack:
            stddevs = noise_stddevs(tuple(map(_upper_sum, bounds, slack)), noise_multiplier, shares)
        query = replace(query, noise_stddevs=stddevs, slack=slack)
        return cls(sampling, query, strategy, secure_sum)

    @property
    def clipping(self) -> Clipping:
        """The clipping that turns each user's tensors into its contribution."""
        return self.query.clipping

    @cached_property
    def event(self) -> RoundEvent:
        """The event charged for a round or a series of rounds; known before the first round."""
        column = self.strategy.column(self.sampling.rounds)
        return RoundEvent(
            self.sampling.event(), self.query.events, strategy=column, secure_sum=self.secure_sum
        )

    @cached_property
    def noise_growth(self) -> float:
        """Ratio of noise in a release to fresh noise, ‖row of C⁻¹‖ ≥ 1; 1 for independent noise.

        It applies to the last round of a series; earlier rounds have smaller ratios. If nodes add
        the noise, it applies to a round without dropouts: √(n/(n − t − d)).
        """
        if (secure := self.secure_sum) is not None:
            return math.sqrt(secure.nodes / secure.sharing(secure.nodes))
        return float(np.linalg.norm(self.strategy.responses(self.sampling.rounds)[0]))

    def admits(self, noised: IntegerVector, nodes: int) -> bool:
        """Return whether a noised sum [D] of `nodes` honest nodes can be this long.

        The server cannot see how long one node's sum is. If all are honest, this is false with
        probability below 1e-12: the noise of d components of standard deviation s is at most
        s·(√d + √(2L)) long (Laurent & Massart 2000, Lemma 1) for L = 32, and the cohort at most as
        large as this L allows.
        """
        secure, clipping = self.secure_sum, self.clipping
        users = self.sampling.event().largest_cohort(_RARE)
        sharing = secure.sharing(nodes) if secure else nodes
        for group, stddev in zip(clipping.groups, self.query.noise_stddevs, strict=True):
            parts = [noised[span].astype(np.float64) for span in clipping.spans[group.name]]
            length = math.sqrt(math.fsum(float(part @ part) for part in parts))
            root = math.sqrt(group.dimension(clipping.layout))
            share = stddev / group.granularity / math.sqrt(sharing)
            noise = share * math.sqrt(nodes) * (root + math.sqrt(2.0 * _RARE))
            # Each node rounds once, to steps or to coarse steps of up to share/LEAST_SHARE steps.
            noise += nodes * root * max(1.0, share / LEAST_SHARE)
            if length > users * math.sqrt(group.squared_bound) + noise:
                return False
        return True

    @property
    def tensor_stddevs(self) -> dict[str, float]:
        """Bound on the noise standard deviation of a released component, by tensor name."""
        return {n: self.noise_growth * s for n, s in self.query.tensor_stddevs.items()}

    @property
    def noises(self) -> dict[str, CorrelatedNoise]:
        """Correlated noise of a series, by vector group; empty if noise is independent."""
        if self.strategy == INDEPENDENT:
            return {}
        stddevs = self.query.noise_stddevs
        noises = _noises(self.clipping, stddevs, self.strategy, self.sampling.rounds)
        return {group.name: n for group, n in zip(self.clipping.groups, noises, strict=True)}


def _noises(
    clipping: Clipping, stddevs: tuple[float, ...], strategy: Strategy, rounds: int
) -> list[CorrelatedNoise]:
    """Return the correlated noise of each vector group over a series of rounds."""
    return [
        CorrelatedNoise(
            strategy, group.dimension(clipping.layout), stddev / group.granularity, rounds
        )
        for group, stddev in zip(clipping.groups, stddevs, strict=True)
    ]


def _slacks(
    clipping: Clipping, stddevs: tuple[float, ...], strategy: Strategy, rounds: int
) -> tuple[float, ...]:
    """Return how much the noise's arithmetic raises each group's sensitivity, in units of c(v)."""
    noises = _noises(clipping, stddevs, strategy, rounds)
    return tuple(
        noise.sensitivity_inflation * group.granularity
        for noise, group in zip(noises, clipping.groups, strict=True)
    )


@dataclass(frozen=True)
class Metric:
    """A vector m of each user whose average over the cohort is released.

    A user contributes m − centre, clipped to the radius. The noise is proportional to the radius,
    so a tight ball around the values that occur keeps it small. The average divides by the expected
    cohort size and is unbiased; a cohort that is larger or smaller than expected moves it away from
    the centre or towards it.
    """

    name: str  # e.g. "accuracy"; the users' host knows how to compute it
    shape: tuple[int, ...] = ()  # shape of the vector; () is a number
    centre: float = 0.0  # subtracted from every component before clipping, added to the average
    radius: float = 1.0  # bound on the L2 norm of m − centre
    options: tuple[float, ...] = ()  # more numbers that the computation needs, e.g. thresholds

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable():
            raise InvalidValueError(
                f"name of a metric is {self.name!r}; it must be printable and not empty"
            )
        if not math.isfinite(self.centre) or not all(map(math.isfinite, self.options)):
            raise InvalidValueError(
                f"metric {self.name!r} has centre {self.centre} and options {self.options}; they "
                "must be finite"
            )
        _ = self.group  # raises if the radius is not a valid clipping norm

    @property
    def tensor(self) -> str:
        """Name of the metric's tensor in a contribution, and of its vector group."""
        return METRIC_PREFIX + self.name

    @property
    def group(self) -> VectorGroup:
        """The metric's vector group."""
        return VectorGroup.single(self.tensor, self.radius)


# A user whose update counts adds 1. A dropped or absent user is the zero vector, here as in all
# groups, and adds 0. So one user moves the sum by at most 1, the radius, and the bound is exact,
# since 1 is a whole number of steps. The round releases this count over the constant expected
# cohort size. The fraction of drawn users would be a ratio to the size of the cohort, which is
# secret too. Adding +½ for a counted and −½ for a dropped user would halve the noise, but a broken
# update would then have to add something, and an absent node would count as half of its users.
CONTRIBUTORS = Metric("contributors")
