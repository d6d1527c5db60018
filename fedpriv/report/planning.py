"""Settings that a privacy budget allows: some are given, one is found."""

from dataclasses import dataclass, replace

from fedpriv.accounting.accountant import PrivacyLoss
from fedpriv.accounting.accountants import epsilon as epsilon_of
from fedpriv.accounting.calibration import largest_number, largest_probability, smallest_noise
from fedpriv.accounting.shares import smallest_noise_stddev
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import (
    NeighbouringRelation,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    SumQueryEvent,
)

_MOST_ROUNDS = 1 << 30
_ONE_MORE = "one more"


@dataclass(frozen=True)
class Sampled:
    """How users are sampled, and between which populations ε compares.

    Attributes:
        policy: poisson, every-user or fixed-size.
        relation: the neighbouring relation.
        population: N ≥ 1; read by fixed-size sampling, of m = q·N users.

    Raises:
        InvalidValueError: the policy is of passes, or a fixed size has no population.
    """

    policy: SamplingPolicy = SamplingPolicy.POISSON
    relation: NeighbouringRelation = NeighbouringRelation.ADD_OR_REMOVE_ONE
    population: int | None = None

    def __post_init__(self) -> None:
        legal = (SamplingPolicy.POISSON, SamplingPolicy.EVERY_USER, SamplingPolicy.FIXED_SIZE)
        if self.policy not in legal:
            raise InvalidValueError(
                f"{self.policy} sampling is of whole passes; legal is: {', '.join(legal)}"
            )
        if self.policy is SamplingPolicy.FIXED_SIZE and self.population is None:
            raise InvalidValueError(
                "fixed-size sampling has no population; it must be given, and the cohort is q·N"
            )

    def event(self, q: float, z: float, rounds: int) -> RoundEvent:
        """Equal rounds of one sum query."""
        sampling = SamplingEvent(self.policy, q, self.population or 1, self.relation)
        return RoundEvent(sampling, (SumQueryEvent("update", 1.0, z),), rounds)


@dataclass(frozen=True)
class Plan:
    """Equal rounds that stay within a privacy budget.

    Attributes:
        found: name of the attribute that was not given.
        sampled: how users are sampled.
        rounds: T ≥ 1.
        sampling_probability: q in (0, 1].
        noise_multiplier: z > 0 of the round, without the one more query.
        target_epsilon: ε of the budget.
        loss: what the rounds cost at δ of the budget; `loss.epsilon` ≤ `target_epsilon`.
        share: ω of one more sum query per round, the largest that fits; None if it was not asked.
        share_noise_multiplier: its noise over its clipping norm, σ/S.
    """

    found: str
    sampled: Sampled
    rounds: int
    sampling_probability: float
    noise_multiplier: float
    target_epsilon: float
    loss: PrivacyLoss
    share: float | None = None
    share_noise_multiplier: float | None = None


def plan_within(
    target_epsilon: float,
    delta: float,
    accountant: str,
    rounds: int | None = None,
    sampling_probability: float | None = None,
    noise_multiplier: float | None = None,
    sampled: Sampled = Sampled(),
) -> Plan:
    """The smallest noise, the most rounds, the largest sampling or share within (ε, δ).

    Args:
        target_epsilon: ε > 0.
        delta: δ in (0, 1).
        accountant: a key of `ACCOUNTANTS`.
        rounds: T ≥ 1, or None to find the most.
        sampling_probability: q in (0, 1], or None to find the largest; every user takes part with
            1, and it may be left out.
        noise_multiplier: z ≥ 0, or None to find the smallest.
        sampled: how users are sampled.

    Returns:
        The plan. With all three given: what share one more sum query of every round may have.

    Raises:
        InvalidValueError: fewer than two of the three are given, a value is out of range, or
            nothing, or everything, stays within the budget.
    """
    if rounds is not None and not 1 <= rounds <= _MOST_ROUNDS:
        raise InvalidValueError(f"rounds is {rounds}; it must be from 1 to {_MOST_ROUNDS}")
    q, z = sampling_probability, noise_multiplier
    if sampled.policy is SamplingPolicy.EVERY_USER:
        q = q or 1.0
    budget = target_epsilon, delta
    match rounds, q, z:
        case int(), float(), None:
            given_q, given_rounds = q, rounds
            found = "noise_multiplier"
            z = smallest_noise(
                *budget, lambda z: [sampled.event(given_q, z, given_rounds)], accountant
            )
        case int(), None, float():
            found = "sampling_probability"
            q = _largest_sampling(budget, sampled, rounds, z, accountant)
        case None, float(), float():
            found = "rounds"
            rounds = _most_rounds(budget, sampled, q, z, accountant)
        case int(), float(), float():
            return _with_share(budget, sampled.event(q, z, rounds), accountant, sampled)
        case _:
            given = [x for x in (rounds, q, z) if x is not None]
            raise InvalidValueError(
                f"{len(given)} of rounds, sampling probability and noise multiplier are given; "
                "two must be, to find the third, or all, to find the share of one more query"
            )
    loss = epsilon_of([sampled.event(q, z, rounds)], delta, accountant)
    return Plan(found, sampled, rounds, q, z, target_epsilon, loss)


def _largest_sampling(
    budget: tuple[float, float], sampled: Sampled, rounds: int, z: float, accountant: str
) -> float:
    population = sampled.population
    if sampled.policy is not SamplingPolicy.FIXED_SIZE or population is None:
        return largest_probability(*budget, lambda q: [sampled.event(q, z, rounds)], accountant)
    size = largest_number(
        *budget, lambda m: [sampled.event(m / population, z, rounds)], population, accountant
    )
    if size == 0:
        raise InvalidValueError(
            f"target_epsilon is {budget[0]} at delta {budget[1]}; not even a cohort of one user "
            f"stays within it in {rounds} rounds with noise multiplier {z}"
        )
    return size / population


def _most_rounds(
    budget: tuple[float, float], sampled: Sampled, q: float, z: float, accountant: str
) -> int:
    rounds = largest_number(
        *budget, lambda number: [sampled.event(q, z, number)], _MOST_ROUNDS + 1, accountant
    )
    if not 0 < rounds <= _MOST_ROUNDS:
        number = "not even one round" if rounds == 0 else f"more than {_MOST_ROUNDS} rounds"
        verb = "stays" if rounds == 0 else "stay"
        raise InvalidValueError(
            f"target_epsilon is {budget[0]} at delta {budget[1]}; {number} with noise multiplier "
            f"{z} and sampling probability {q} {verb} within it"
        )
    return rounds


def _with_share(
    budget: tuple[float, float], others: RoundEvent, accountant: str, sampled: Sampled
) -> Plan:
    z_g = smallest_noise_stddev(*budget, others, 1.0, accountant)
    query = SumQueryEvent(_ONE_MORE, 1.0, z_g)
    joined = replace(others, queries=(*others.queries, query))
    return Plan(
        found="share",
        sampled=sampled,
        rounds=others.count,
        sampling_probability=others.sampling.sampling_probability,
        noise_multiplier=others.noise_multiplier,
        target_epsilon=budget[0],
        loss=epsilon_of([joined], budget[1], accountant),
        share=(joined.noise_multiplier / z_g) ** 2,
        share_noise_multiplier=z_g,
    )
