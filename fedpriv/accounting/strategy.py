"""How far one user moves what a series of rounds with correlated noise releases.

Noise that is correlated over rounds, C⁻¹Z with fresh noise Z, is a Gaussian mechanism on C·X, where
X are the sums of the n rounds; it costs no more if later rounds depend on earlier releases (Denisov
et al. 2022, Theorem 2.1, for lower triangular C). One user changes the rows of X of the rounds that
it takes part in, row i by a vector u_i of at most one clipping norm, so C·X by

    ‖Σ_i C[:, i]·u_iᵀ‖² = Σ_ij G_ij·⟨u_i, u_j⟩ ≤ Σ_ij |G_ij|,   G = CᵀC,

the sums over its rounds. Equal u_i reach the bound where G has no negative entry. The
schedule of the event says which rounds a user may take part in.
"""

import math
from collections.abc import Iterable
from dataclasses import astuple
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fedpriv.ledger.events import RoundEvent, SamplingPolicy

Vector = npt.NDArray[np.float64]

_SAME = 2.0**-36
"""Relative difference of noise multipliers that is rounding."""


@lru_cache(maxsize=256)
def strategy_sensitivity(
    strategy: tuple[float, ...], rounds: int, participations: int, separation: int
) -> float:
    """Sensitivity in clipping norms of C·X, where a user is in at most k rounds, b apart.

    * Coefficients that are nowhere negative and never increase have the exact value, that of the
      rounds 1, 1 + b, 1 + 2b, … (Kalinin & Lampert 2024, Theorem 2).
    * So have those of at most b coefficients, where a user's rounds do not meet: ‖c‖·√k, as far as
      its last round has all coefficients in the series, and an upper bound elsewhere.
    * Others have an upper bound: rounds that are m participations apart meet with at most the
      largest of Σ_l |c_l|·|c_{l+d}| for d ≥ m·b.
    * Fresh noise, the strategy (1,), has √k.
    * It grows in k and n, falls in b, scales with the strategy, and is rounded up.

    The strategy is the first column c of the lower triangular Toeplitz matrix C, at most n long,
    finite, its first coefficient positive; n ≥ 1, and k and b are in [1, n].
    """
    fitting = min(participations, 1 + (rounds - 1) // separation)
    coefficients = np.array(strategy, dtype=np.float64)
    # In units of the largest, so that squares neither overflow nor vanish.
    unit = float(np.abs(coefficients).max())
    c = np.abs(coefficients) / unit
    decreasing = strategy[-1] >= 0.0 and bool((np.diff(coefficients) <= 0.0).all())
    square = _first_rounds if decreasing else _any_rounds
    # Less than 4 roundings of each coefficient's share, all of positive numbers.
    rounding = 2.0**-52 * (4 * len(c) + 100)
    return math.sqrt(square(c, rounds, fitting, separation)) * unit * (1.0 + rounding)


def _first_rounds(c: Vector, rounds: int, participations: int, separation: int) -> float:
    """‖Σ_i C[:, i]‖² over the rounds i = 1, 1 + b, …: k of them, which fit into n."""
    width = min(separation, len(c))
    blocks = np.pad(c, (0, -len(c) % width)).reshape(-1, width)
    # Each further participation only repeats a period of b rounds.
    repeated = max(0, participations - len(blocks))
    period = blocks.sum(axis=0)
    left = participations - repeated
    length = min(rounds - repeated * separation, len(c) + (left - 1) * separation)
    column = _shifted_sum(np.pad(c, (0, length))[:length], left, separation)
    return float(column @ column) + repeated * float(period @ period)


def _shifted_sum(c: Vector, count: int, separation: int) -> Vector:
    """Σ_{j < count} of c shifted by j·b to the right and cut off, by doubling the count."""
    total, power = np.zeros_like(c), c.copy()
    shift, step = 0, separation
    for bit in reversed(f"{count:b}"):
        if bit == "1":
            total[shift:] += power[: len(c) - shift]
            shift += step
        power[step:] += power[:-step].copy()
        step *= 2
    return total


def _any_rounds(c: Vector, _rounds: int, participations: int, separation: int) -> float:
    """An upper bound on Σ_ij |G_ij| over any k rounds that are at least b apart."""
    meeting = np.correlate(c, c, "full")[len(c) - 1 :]
    largest = np.maximum.accumulate(meeting[::-1])[::-1]
    apart = np.arange(1, 1 + min(participations - 1, (len(c) - 1) // separation))
    pairs = float((participations - apart) @ largest[apart * separation])
    return participations * float(meeting[0]) + 2.0 * pairs


def compose(events: Iterable[RoundEvent]) -> dict[tuple[float, float], int]:
    """Count events by (sampling probability q, noise_stddev per *sensitivity*), in order of both.

    Whatever the order of events, what is computed from the counts is the same to the last bit.

    The second number is the effective noise multiplier z over the sensitivity in clipping norms:
    1 where one user is added or removed, 2 where one is replaced, times that of the strategy where
    there is one. Accountants of one policy depend on nothing else, but for the schedule of a pass.

    Noise multipliers that differ by less than a part in 2³⁶ count as the smallest of them: where
    clipping norms move, the last digits of σ/S do, though it is meant to stay.

    >>> from fedpriv.accounting.policies import poisson_gaussian
    >>> compose([poisson_gaussian(0.5, 2.0), poisson_gaussian(0.5, 2.0, count=3)])
    {(0.5, 2.0): 4}
    """
    rounds: dict[tuple[float, float], int] = {}
    for event in events:
        sampling = event.sampling
        sensitivity = sampling.relation.sensitivity
        if sampling.policy is SamplingPolicy.SEPARATED and sampling.schedule is not None:
            sensitivity *= strategy_sensitivity(event.strategy, *astuple(sampling.schedule))
        key = sampling.sampling_probability, event.noise_multiplier / sensitivity
        rounds[key] = rounds.get(key, 0) + event.count
    return _merged(rounds)


def _merged(rounds: dict[tuple[float, float], int]) -> dict[tuple[float, float], int]:
    """The same rounds in order, with nearly equal ones counted as the worst of them."""
    merged: dict[tuple[float, float], int] = {}
    last = (0.0, 0.0)
    for (q, z), count in sorted(rounds.items()):
        if q != last[0] or z > last[1] * (1.0 + _SAME):
            last = (q, z)
        merged[last] = merged.get(last, 0) + count
    return merged
