"""From a privacy budget to the noise, the number of rounds or the sampling that it allows."""

import math

from fedpriv.accounting.accountants import accountant_named
from fedpriv.accounting.events import poisson_gaussian
from fedpriv.errors import InvalidValueError

_LEAST_NOISE, _MOST_NOISE = 0.05, 1e5
_PRECISION = 1.0005
_MOST_ROUNDS = 1 << 30
_LEAST_PROBABILITY = 1e-12


def calibrate_noise_multiplier(
    target_epsilon: float,
    delta: float,
    rounds: int,
    sampling_probability: float,
    accountant: str = "pld",
) -> float:
    """The smallest noise multiplier whose rounds stay within (ε, δ).

    * The accountant prices the result at ε(z) ≤ target_epsilon, always.
    * A noise multiplier smaller by a thousandth is priced above it, unless the result is 0.05, the
      smallest that is returned.

    Args:
        target_epsilon: ε > 0.
        delta: δ in (0, 1).
        rounds: T ≥ 1, all alike.
        sampling_probability: q in (0, 1].
        accountant: a key of `ACCOUNTANTS`.

    Returns:
        z, the noise standard deviation on a sum in units of its clipping norm.

    Raises:
        InvalidValueError: an argument is out of range, or no z up to 1e5 is enough.
    """

    def fits(z: float) -> bool:
        event = poisson_gaussian(sampling_probability, z, rounds)
        return pricing.epsilon([event], delta).epsilon <= target_epsilon

    _check_target(target_epsilon)
    pricing = accountant_named(accountant)
    high = 1.0
    while not fits(high):
        if high >= _MOST_NOISE:
            raise InvalidValueError(
                f"target_epsilon is {target_epsilon} at delta {delta}; no noise multiplier up to "
                f"{_MOST_NOISE:g} reaches it in {rounds} rounds with sampling probability "
                f"{sampling_probability}"
            )
        high = min(2.0 * high, _MOST_NOISE)
    low = high / 2.0
    while low > _LEAST_NOISE and fits(low):
        low, high = low / 2.0, low
    low = max(low, _LEAST_NOISE)
    if fits(low):
        return low
    while high > _PRECISION * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def largest_rounds(
    target_epsilon: float,
    delta: float,
    noise_multiplier: float,
    sampling_probability: float,
    accountant: str = "pld",
) -> int:
    """The largest number of equal rounds that stays within (ε, δ); 0 if not even one does.

    Args:
        target_epsilon: ε > 0.
        delta: δ in (0, 1).
        noise_multiplier: z ≥ 0.
        sampling_probability: q in (0, 1].
        accountant: a key of `ACCOUNTANTS`.

    Returns:
        T ≥ 0, which the accountant prices at ε(T) ≤ target_epsilon, and T + 1 above it.

    Raises:
        InvalidValueError: an argument is out of range, or more than 2³⁰ rounds fit.
    """

    def fits(rounds: int) -> bool:
        event = poisson_gaussian(sampling_probability, noise_multiplier, rounds)
        return pricing.epsilon([event], delta).epsilon <= target_epsilon

    _check_target(target_epsilon)
    pricing = accountant_named(accountant)
    low, high = 0, 1
    while fits(high):
        if high >= _MOST_ROUNDS:
            raise InvalidValueError(
                f"target_epsilon is {target_epsilon} at delta {delta}; more than {_MOST_ROUNDS} "
                f"rounds with noise multiplier {noise_multiplier} and sampling probability "
                f"{sampling_probability} stay within it"
            )
        low, high = high, 2 * high
    while high > low + 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_sampling_probability(
    target_epsilon: float,
    delta: float,
    rounds: int,
    noise_multiplier: float,
    accountant: str = "pld",
) -> float:
    """The largest sampling probability whose rounds stay within (ε, δ).

    * The accountant prices the result at ε(q) ≤ target_epsilon, always.
    * A sampling probability larger by a thousandth is priced above it.

    Args:
        target_epsilon: ε > 0.
        delta: δ in (0, 1).
        rounds: T ≥ 1, all alike.
        noise_multiplier: z ≥ 0.
        accountant: a key of `ACCOUNTANTS`.

    Returns:
        q in [1e-12, 1).

    Raises:
        InvalidValueError: an argument is out of range, q = 1 stays within (ε, δ), so that sampling
            is no limit, or not even q = 1e-12 does.
    """

    def fits(q: float) -> bool:
        event = poisson_gaussian(q, noise_multiplier, rounds)
        return pricing.epsilon([event], delta).epsilon <= target_epsilon

    _check_target(target_epsilon)
    pricing = accountant_named(accountant)
    low, high = _LEAST_PROBABILITY, 1.0
    if fits(high):
        raise InvalidValueError(
            f"target_epsilon is {target_epsilon} at delta {delta}; {rounds} rounds with noise "
            f"multiplier {noise_multiplier} stay within it with every sampling probability up to 1"
        )
    if not fits(low):
        raise InvalidValueError(
            f"target_epsilon is {target_epsilon} at delta {delta}; {rounds} rounds with noise "
            f"multiplier {noise_multiplier} pass it with every sampling probability from {low:g} on"
        )
    while high > _PRECISION * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _check_target(target_epsilon: float) -> None:
    if not 0.0 < target_epsilon < math.inf:
        raise InvalidValueError(
            f"target_epsilon is {target_epsilon}; it must be positive and finite"
        )
