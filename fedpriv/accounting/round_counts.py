"""Counting of events as rounds by (q, z), and grouping of many different rounds.

q is the sampling probability and z the noise_stddev per **sensitivity**. For one policy, prices
depend only on these, and on the schedule of a pass.

A round with (q', z'), q' ≥ q and z' ≤ z, costs at least as much as one with (q, z): additional
noise on its output, and noise instead of the output with probability 1 − q/q', turn its pair of
output distributions into that of the other, and post-processing never costs. So moving every round
to the corner (largest q, smallest z) of its group gives an upper bound of ε, and moving it to the
opposite corner a lower one, in both directions and under adaptive composition. The same holds for
all sampling policies, whose pairs have the same form, and for sampled examples
(`sampled_examples`).

A separated series of n rounds adds noise C⁻¹Z that is correlated over rounds, where Z is
independent noise. It is a Gaussian mechanism on C·X, where X are the sums of the rounds, and costs
no more if later rounds depend on earlier releases (Denisov et al. 2022, Theorem 2.1, for lower
triangular C). One user changes row i of X, for each of its rounds i, by a vector u_i of at most one
clipping norm, so it changes C·X by

    ‖Σ_i C[:, i]·u_iᵀ‖² = Σ_ij G_ij·⟨u_i, u_j⟩ ≤ Σ_ij |G_ij|,   G = CᵀC,

with sums over its rounds. Equal u_i reach the bound if G has no negative entry.

A series of Poisson rounds within bands has b groups of users and p ≤ b coefficients. So the rows of
C·X that depend on a user's rounds j₁ < j₂ < … do not overlap: row j + l has c_l·u_j, l < p. Fix the
other users' behaviour, with their coins, and all releases before row j. Then u_j is fixed. The
others' terms in later rows are functions of earlier releases, the same for both neighbours, and can
be subtracted. So rows j to j + p − 1 show ξ·c⊗u_j + Z with the user's coin ξ, against Z without the
user, or against ξ·c⊗u'_j + Z. That is a Poisson-sampled Gaussian round of sensitivity ‖c‖, whose
pair dominates. The rounds of one user compose adaptively, and the others' coins, fixed here, have
the same law for both neighbours (joint convexity). So a series costs as much as k rounds
(q, z/‖c‖), except that the last has only the coefficients that fit (Choquette-Choo et al. 2023,
arXiv 2306.08153, Theorem 4). Group 0 has the most rounds and rows, and reaches this price if all
others contribute nothing and u_j is constant: the price is exact, for coefficients of any sign. A
replaced user stays in its group, and an added user joins a group independently of its data.
"""

import heapq
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple
from enum import IntEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedpriv.ledger.events import MOST_REPEATS, WITH_STRATEGY, RoundEvent, SamplingPolicy
from fedpriv.support.checks import check_range, plain_numbers

Vector = NDArray[np.float64]
Rounds = Mapping[tuple[float, float], int]
"""Number of rounds ≥ 1 by (sampling probability q in (0, 1], noise multiplier z ≥ 0)."""

Ends = tuple[float, float]  # of an interval that contains the true value

_SAME = 2.0**-36  # relative difference of noise multipliers that counts as rounding
_FINE = 5e-4  # a group with a smaller relative difference of variances needs no split
_ULPS = 2.0**-50


class Direction(IntEnum):
    """The neighbour that the mechanism ran on; the value is the sign of the loss."""

    REMOVE = 1  # the population with the user
    ADD = -1  # the population without the user


def compose(events: Iterable[RoundEvent]) -> dict[tuple[float, float], int]:
    """Count events by (q, z), and return the counts in order of (q, z).

    The sensitivity is 1 clipping norm if one user is added or removed, and 2 if one is replaced,
    times that of the strategy of a series. Noise multipliers that differ by less than a part in 2³⁶
    count as the smallest of them: with adaptive clipping norms a constant σ/S is rounded
    differently in each round.

    >>> from fedpriv.accounting.policies import poisson_gaussian
    >>> compose([poisson_gaussian(0.5, 2.0), poisson_gaussian(0.5, 2.0, count=3)])
    {(0.5, 2.0): 4}
    """
    rounds: dict[tuple[float, float], int] = {}
    for event in events:
        q = event.sampling.sampling_probability
        for sensitivity, times in _sensitivities(event):
            key = q, min(event.noise_multiplier / sensitivity, sys.float_info.max)
            rounds[key] = rounds.get(key, 0) + times * event.count
    merged: dict[tuple[float, float], int] = {}
    setting = (0.0, 0.0)
    for (q, z), count in sorted(rounds.items()):
        if q != setting[0] or z > setting[1] * (1.0 + _SAME):
            setting = (q, z)
        merged[setting] = merged.get(setting, 0) + count
    return merged


def _sensitivities(event: RoundEvent) -> Iterator[tuple[float, int]]:
    """Yield the rounds of one event: sensitivities in clipping norms, and counts."""
    sampling, schedule, strategy = event.sampling, event.sampling.schedule, event.strategy
    distance = sampling.relation.sensitivity
    if schedule is None or sampling.policy not in WITH_STRATEGY:
        yield distance, 1
    elif sampling.policy is SamplingPolicy.SEPARATED:
        yield distance * strategy_sensitivity(strategy, *astuple(schedule)), 1
    else:
        last_length = schedule.rounds - (schedule.participations - 1) * schedule.separation
        if schedule.participations > 1:
            sensitivity = strategy_sensitivity(strategy, schedule.rounds, 1, 1)
            yield distance * sensitivity, schedule.participations - 1
        yield distance * strategy_sensitivity(strategy[:last_length], last_length, 1, 1), 1


@lru_cache(maxsize=256)
def strategy_sensitivity(
    strategy: tuple[float, ...], rounds: int, participations: int, separation: int
) -> float:
    """Return the sensitivity in clipping norms of C·X for users in at most k rounds, b apart.

    * If the coefficients c, the first column of C, are ≥ 0 and never increase, it is exact: that of
      the rounds 1, 1 + b, 1 + 2b, … (Kalinin & Lampert 2024, Theorem 2); √k for (1,).
    * If there are at most b coefficients, a user's rounds do not overlap, and it is ‖c‖·√k. This is
      exact if the series has all coefficients of the user's last round; else it is an upper bound.
    * Otherwise it is an upper bound: the overlap of rounds that are m participations apart is at
      most the largest of Σ_l |c_l|·|c_{l+d}| for d ≥ m·b.

    It increases with k and n, decreases with b, scales with the strategy, and is rounded up.
    """
    fitting = min(participations, 1 + (rounds - 1) // separation)
    # In units of the largest coefficient, so that squares neither overflow nor underflow.
    unit = max(map(abs, strategy))
    c = np.abs(strategy) / unit
    square = _first_rounds if decreasing(strategy) else _any_rounds
    # Less than 4 roundings of each coefficient's share, all of positive numbers.
    rounding = 2.0**-52 * (4 * len(c) + 100)
    return math.sqrt(square(c, rounds, fitting, separation)) * unit * (1.0 + rounding)


def decreasing(strategy: tuple[float, ...]) -> bool:
    """Return whether coefficients are ≥ 0 and never increase."""
    return all(a >= b for a, b in zip(strategy, (*strategy[1:], 0.0), strict=True))


def _first_rounds(c: Vector, rounds: int, participations: int, separation: int) -> float:
    """Return ‖Σ_i C[:, i]‖² over the k rounds i = 1, 1 + b, …, which fit into n."""
    width = min(separation, len(c))
    blocks = np.pad(c, (0, -len(c) % width)).reshape(-1, width)
    # Each further participation only repeats a period of b rounds.
    repeated = max(0, participations - len(blocks))
    period = blocks.sum(axis=0)
    remaining = participations - repeated
    length = min(rounds - repeated * separation, len(c) + (remaining - 1) * separation)
    column = _shifted_sum(np.pad(c, (0, length))[:length], remaining, separation)
    return float(column @ column) + repeated * float(period @ period)


def _shifted_sum(c: Vector, count: int, separation: int) -> Vector:
    """Return Σ_{j < count} of c shifted right by j·b and truncated, by doubling the count."""
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
    """Return an upper bound of Σ_ij |G_ij| over any k rounds that are at least b apart."""
    overlaps = np.correlate(c, c, "full")[len(c) - 1 :]
    largest = np.maximum.accumulate(overlaps[::-1])[::-1]
    gaps = np.arange(1, 1 + min(participations - 1, (len(c) - 1) // separation))
    pairs = float((participations - gaps) @ largest[gaps * separation])
    return participations * float(overlaps[0]) + 2.0 * pairs


def check_epsilon(epsilon: float) -> None:
    """Raise InvalidValueError unless ε is finite and not negative."""
    check_range("epsilon", plain_numbers(epsilon, "epsilon"), "[0, inf)")


def arrays(rounds: Rounds) -> tuple[Vector, Vector, Vector]:
    """Return q, z and counts: [n] each."""
    settings = np.array(list(rounds), dtype=np.float64).reshape(-1, 2)
    return settings[:, 0], settings[:, 1], np.array(list(rounds.values()), dtype=np.float64)


def unsampled_noise_multiplier(rounds: Rounds) -> float:
    """Return the z of the Gaussian mechanism that all rounds together form without sampling.

    1/z² = Σ count/zᵢ² (Dong, Roth & Su 2019, Section 3). Its cost is exact for q = 1, and else an
    upper bound, since sampling never costs. It is ∞ for no round, 0 if a round has no noise, and
    else has a relative error of at most 2⁻⁵⁰.
    """
    smallest = min((z for _, z in rounds), default=math.inf)
    if smallest in (0.0, math.inf):
        return smallest
    return smallest / math.sqrt(math.fsum(n * (smallest / z) ** 2 for (_, z), n in rounds.items()))


def folded(rounds: Rounds) -> Rounds:
    """Return the rounds, with all rounds of q = 1 replaced by m equal rounds of the same cost.

    All rounds of q = 1 together equal one with noise multiplier z, rounded down. Each of the m new
    rounds has √m·z.
    """
    everybody = {(q, z): n for (q, z), n in rounds.items() if q == 1.0}
    if len(everybody) < 2:
        return rounds
    sampled = {(q, z): n for (q, z), n in rounds.items() if q != 1.0}
    total = unsampled_noise_multiplier(everybody)
    if total == 0.0:
        return {(1.0, 0.0): 1}
    count = max(1, math.ceil(min(1.0 / total / total, MOST_REPEATS)))
    return {**sampled, (1.0, total * math.sqrt(count) * (1 - _ULPS)): count}


def grouped(rounds: Rounds, most: int) -> tuple[Rounds, Rounds]:
    """Return rounds that cost at least as much, and at most as much, in up to `most` groups."""
    if len(rounds) <= most:
        return rounds, rounds
    q, z, counts = arrays(rounds)
    above, below = Counter[tuple[float, float]](), Counter[tuple[float, float]]()
    for members in _boxes(q, z, counts, most):
        count = int(counts[members].sum())
        worst = float(q[members].max()), float(z[members].min())
        best = float(q[members].min()), float(z[members].max())
        above[worst] += count
        below[best] += count
    return above, below


def _boxes(q: Vector, z: Vector, counts: Vector, most: int) -> list[NDArray[np.int64]]:
    """Return the members of each group; boxes with the largest variance are split first.

    The variance of the likelihood ratio of one round is q²·(e^{1/z²} − 1), a product: axes are the
    logarithms of its factors.
    """
    square = np.clip(z**-2.0, 1e-300, 600.0)
    axes = np.stack([2 * np.log(q), square + np.log(-np.expm1(-square))])

    def box(members: NDArray[np.int64]) -> tuple[float, int, int, NDArray[np.int64]]:
        """Return minus the gain of a split, the first member (for ties), the axis, the members."""
        low, high = axes[:, members].min(axis=1), axes[:, members].max(axis=1)
        shares = np.expm1(low - high)  # minus the gain of a split along each axis
        gain = shares.sum() * counts[members].sum() * math.exp(min(high.sum(), 600.0))
        is_narrow = (high - low).max() <= _FINE
        return 0.0 if is_narrow else float(gain), int(members[0]), int(shares.argmin()), members

    boxes = [box(np.arange(len(q)))]
    while len(boxes) < most and boxes[0][0] < 0.0:
        _, _, axis, members = heapq.heappop(boxes)
        values = axes[axis, members]
        is_upper = values > (values.min() + values.max()) / 2
        for half in (members[is_upper], members[~is_upper]):
            heapq.heappush(boxes, box(half))
    return [members for *_, members in boxes]
