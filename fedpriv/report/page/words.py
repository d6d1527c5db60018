"""What an ε rests on, in sentences for readers who did not write the paper."""

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context

from fedpriv.accounting.accountant import Bound, PrivacyLoss
from fedpriv.accounting.pricing import (
    Arithmetic,
    LedgerContent,
    weakest_arithmetic,
    weakest_randomness,
)
from fedpriv.ledger.events import NeighbouringRelation, Randomness, SamplingPolicy
from fedpriv.report.tables import format_epsilon

_RELATIONS = {
    NeighbouringRelation.ADD_OR_REMOVE_ONE: (
        "Two populations are compared that differ in one user: all of that user's data are there, "
        "or none."
    ),
    NeighbouringRelation.REPLACE_ONE: (
        "Two populations of the same size are compared that differ in one user: all of that user's "
        "data are replaced by somebody else's."
    ),
}
_POLICIES = {
    SamplingPolicy.POISSON: "each enrolled user joins the cohort of a round independently",
    SamplingPolicy.EVERY_USER: "all enrolled users are in every cohort",
    SamplingPolicy.FIXED_SIZE: "cohorts have a fixed size and are drawn afresh for each round",
    SamplingPolicy.SHUFFLED: "users are shuffled into disjoint batches, pass by pass",
    SamplingPolicy.RANDOM_ALLOCATION: "each user is in a random choice of the rounds of a pass",
    SamplingPolicy.SEPARATED: "each user is in few rounds of a series, well apart",
}
_ARITHMETICS = {
    Arithmetic.EXACT: (
        "What users contribute is whole numbers of steps, added up without rounding, and the noise "
        "has exactly the law of a rounded normal: the statement is over what the program does."
    ),
    Arithmetic.FLOATING_POINT: (
        "Noise was added to floating-point numbers, whose gaps can in principle be exploited "
        "(Mironov 2012)."
    ),
}
_UP = Context(prec=3, rounding=ROUND_CEILING)


@dataclass(frozen=True)
class Assumption:
    """One thing that an ε rests on.

    Attributes:
        term: its name.
        text: what it means here.
    """

    term: str
    text: str


def assumptions(loss: PrivacyLoss, ledger: LedgerContent) -> list[Assumption]:
    """What the ε of a ledger with at least one charge rests on.

    Args:
        loss: what the ledger costs.
        ledger: the ledger.
    """
    return [
        Assumption("ε", _epsilon(loss)),
        Assumption("Unit of privacy", "A user, with all of their data in all rounds."),
        Assumption("Neighbouring relation", f"{loss.relation}. {_RELATIONS[loss.relation]}"),
        Assumption("Sampling", _sampling(ledger)),
        Assumption("δ", _delta(loss.delta, users_of(ledger))),
        Assumption("Accountant", _accountant(loss)),
        Assumption(
            "What was released",
            "Everything that a round gives away: the noised average, hence the model after each "
            "round, private metrics and clipping norms. Accuracy is measured on rows of no "
            "enrolled user, of which the statement says nothing.",
        ),
        Assumption("Randomness", _randomness(ledger)),
        Assumption("Arithmetic", _ARITHMETICS[weakest_arithmetic(ledger.charges)]),
    ]


def warnings(delta: float, ledger: LedgerContent) -> list[str]:
    """What a reader must know before believing the ε of a ledger."""
    found = []
    if weakest_randomness(ledger.charges) is Randomness.SEEDED:
        found.append(
            "This ledger has seeded randomness. Whoever knows the seed can subtract the noise, so "
            "the figures below are those of an experiment, and no guarantee to anybody."
        )
    users = users_of(ledger)
    if users and delta >= 1.0 / users:
        found.append(
            f"δ is {delta:g}, which is not below 1/N = {1.0 / users:.3g}: publishing one random "
            "user's data whole would satisfy it."
        )
    return found


def users_of(ledger: LedgerContent) -> int:
    """N, the most users that a charge says are enrolled; 0 without charges."""
    return max((row.event.sampling.population for row in ledger.charges), default=0)


def _epsilon(loss: PrivacyLoss) -> str:
    if math.isinf(loss.epsilon):
        return "No finite ε is proven: the releases guarantee nothing to anybody."
    factor = _UP.create_decimal_from_float(math.exp(min(loss.epsilon, 700.0)))
    return (
        f"ε = {format_epsilon(loss.epsilon)}: whatever can come out of the releases is at most "
        f"e^ε = {factor:,} times as likely under one population as under the other, up to δ."
    )


def _sampling(ledger: LedgerContent) -> str:
    events = [row.event.sampling for row in ledger.charges]
    parts = []
    for policy in dict.fromkeys(event.policy for event in events):
        of_one = [event for event in events if event.policy is policy]
        probabilities = {event.sampling_probability for event in of_one}
        enrolled = {event.population for event in of_one}
        text = f"{policy}: {_POLICIES[policy]}, with probability q = {_range(probabilities)}"
        if policy is SamplingPolicy.EVERY_USER:
            text = f"{policy}: {_POLICIES[policy]}"
        parts.append(f"{text}; N = {_range(enrolled)} users are enrolled")
    return f"{'. '.join(parts)}. Who took part is taken to stay secret."


def _delta(delta: float, users: int) -> str:
    return (
        f"δ = {delta:g}, which should be below 1/N = {1.0 / users:.3g}: by so much a probability "
        "may be beyond the bound of ε. All pairs of ε and δ hold at once, a smaller ε with a "
        "larger δ."
    )


def _accountant(loss: PrivacyLoss) -> str:
    if loss.bound is Bound.ESTIMATE:
        return f"{loss.accountant} gives an estimate, which can be below the truth: no guarantee."
    low = math.floor(loss.epsilon_low * 1000) / 1000 if math.isfinite(loss.epsilon) else 0.0
    known = (
        f"the true ε lies between {low:.3f} and {format_epsilon(loss.epsilon)}"
        if low > 0.0
        else "the true ε is at most this"
    )
    return f"{loss.accountant} gives ε as {_article(loss.bound)} {loss.bound}: {known}."


def _randomness(ledger: LedgerContent) -> str:
    if weakest_randomness(ledger.charges) is Randomness.SEEDED:
        return "Seeded: reproducible, and no guarantee for anybody who may know the seed."
    return "Cohorts and noise come from the operating system's cryptographic generator."


def _range(values: set[float] | set[int]) -> str:
    low, high = min(values), max(values)
    return _plain(low) if low == high else f"{_plain(low)} to {_plain(high)}"


def _plain(value: float) -> str:
    """A count in full, another number to six digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"
