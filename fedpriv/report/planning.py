"""Settings that a privacy budget allows: two of the three given, the third found."""

from dataclasses import dataclass

from fedpriv.accounting.accountant import PrivacyLoss
from fedpriv.accounting.accountants import epsilon as epsilon_of
from fedpriv.accounting.calibration import (
    calibrate_noise_multiplier,
    largest_rounds,
    largest_sampling_probability,
)
from fedpriv.accounting.events import poisson_gaussian
from fedpriv.errors import InvalidValueError

_MOST_ROUNDS = 1 << 30


@dataclass(frozen=True)
class Plan:
    """Equal rounds that stay within a privacy budget.

    Attributes:
        found: name of the attribute that was not given.
        rounds: T ≥ 1.
        sampling_probability: q in (0, 1].
        noise_multiplier: z > 0.
        target_epsilon: ε of the budget.
        loss: what the rounds cost at δ of the budget; `loss.epsilon` ≤ `target_epsilon`.
    """

    found: str
    rounds: int
    sampling_probability: float
    noise_multiplier: float
    target_epsilon: float
    loss: PrivacyLoss


def plan_within(
    target_epsilon: float,
    delta: float,
    accountant: str,
    rounds: int | None = None,
    sampling_probability: float | None = None,
    noise_multiplier: float | None = None,
) -> Plan:
    """The smallest noise, the most rounds or the largest sampling within (ε, δ).

    Args:
        target_epsilon: ε > 0.
        delta: δ in (0, 1).
        accountant: a key of `ACCOUNTANTS`.
        rounds: T ≥ 1, or None to find the most.
        sampling_probability: q in (0, 1], or None to find the largest.
        noise_multiplier: z ≥ 0, or None to find the smallest.

    Raises:
        InvalidValueError: not exactly two of the three are given, a value is out of range, or
            nothing, or everything, stays within the budget.
    """
    if rounds is not None and not 1 <= rounds <= _MOST_ROUNDS:
        raise InvalidValueError(f"rounds is {rounds}; it must be from 1 to {_MOST_ROUNDS}")
    q, z = sampling_probability, noise_multiplier
    match rounds, q, z:
        case int(), float(), None:
            found = "noise_multiplier"
            z = calibrate_noise_multiplier(target_epsilon, delta, rounds, q, accountant)
        case int(), None, float():
            found = "sampling_probability"
            q = largest_sampling_probability(target_epsilon, delta, rounds, z, accountant)
        case None, float(), float():
            found = "rounds"
            rounds = _at_least_one_round(target_epsilon, delta, z, q, accountant)
        case _:
            given = [x for x in (rounds, q, z) if x is not None]
            raise InvalidValueError(
                f"{len(given)} of rounds, sampling probability and noise multiplier are given; "
                "exactly two must be, to find the third"
            )
    loss = epsilon_of([poisson_gaussian(q, z, rounds)], delta, accountant)
    return Plan(found, rounds, q, z, target_epsilon, loss)


def _at_least_one_round(
    target_epsilon: float, delta: float, z: float, q: float, accountant: str
) -> int:
    rounds = largest_rounds(target_epsilon, delta, z, q, accountant)
    if rounds == 0:
        raise InvalidValueError(
            f"target_epsilon is {target_epsilon} at delta {delta}; not even one round with noise "
            f"multiplier {z} and sampling probability {q} stays within it"
        )
    return rounds
