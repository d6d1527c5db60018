"""Rounds counted by (q, z), and moved outward into few groups where many differ.

A round with (q', z'), q' ≥ q and z' ≤ z, costs at least as much as one with (q, z): more noise on
its output, and replacing the output by noise with probability 1 − q/q', turn its pair of output
distributions into that of the other, and post-processing never costs. So moving every round to the
corner (largest q, smallest z) of its group gives an upper bound of ε, and moving it to the opposite
corner a lower one, in both directions and under adaptive composition. The same holds for all
sampling policies, whose pairs have the same form.
"""

import heapq
import math
from collections.abc import Mapping
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InvalidValueError

Vector = NDArray[np.float64]
Rounds = Mapping[tuple[float, float], int]
"""Number of rounds by (sampling probability q, noise multiplier z)."""

_FINE = 1e-4
"""Rounds whose q and z differ by less, relatively, are not told apart once they must be grouped."""
_ULPS = 2.0**-50


class Direction(IntEnum):
    """Which of the two neighbours the mechanism ran on; the value is the sign of the loss."""

    REMOVE = 1
    """On the population with the user; the other neighbour is without."""
    ADD = -1
    """On the population without the user; the other neighbour is with."""


def check_rounds(rounds: Rounds) -> None:
    """Raise InvalidValueError unless every q is in (0, 1], z finite and ≥ 0 and count ≥ 1."""
    for (q, z), count in rounds.items():
        if not 0.0 < q <= 1.0:
            raise InvalidValueError(f"sampling_probability is {q}; it must be in (0, 1]")
        if not (z >= 0.0 and math.isfinite(z)):
            raise InvalidValueError(f"noise_multiplier is {z}; it must be finite and not negative")
        if count < 1:
            raise InvalidValueError(f"count is {count}; it must be at least 1")


def arrays(rounds: Rounds) -> tuple[Vector, Vector, Vector]:
    """[n] q, z and counts."""
    settings = np.array(list(rounds), dtype=np.float64).reshape(-1, 2)
    return settings[:, 0], settings[:, 1], np.array(list(rounds.values()), dtype=np.float64)


def unsampled_noise_multiplier(rounds: Rounds) -> float:
    """The z of the one Gaussian mechanism that the rounds are together if all users take part.

    Gaussian mechanisms compose exactly: 1/z² = Σ count/zᵢ² (Dong, Roth & Su 2019, Section 3). With
    q = 1 its curve is exact; with any q it is an upper bound, as sampling never costs. ∞ for no
    round, 0 if a round has no noise, and else right to 2⁻⁵⁰ of itself.
    """
    check_rounds(rounds)
    least = min((z for _, z in rounds), default=math.inf)
    if least in (0.0, math.inf):
        return least
    return least / math.sqrt(math.fsum(n * (least / z) ** 2 for (_, z), n in rounds.items()))


def folded(rounds: Rounds) -> Rounds:
    """The rounds with those of q = 1 as equal ones of z ≥ 1, if there are several.

    They are one Gaussian together, and so are m of √m times its noise, here rounded down by 2⁻⁴⁹.
    """
    everybody = {(q, z): n for (q, z), n in rounds.items() if q == 1.0}
    if len(everybody) < 2:
        return rounds
    others = {(q, z): n for (q, z), n in rounds.items() if q != 1.0}
    total = unsampled_noise_multiplier(everybody)
    if total == 0.0:
        return {(1.0, 0.0): 1}
    count = math.ceil(1.0 / total**2)
    return {**others, (1.0, total * math.sqrt(count) * (1 - _ULPS)): count}


def grouped(rounds: Rounds, most: int) -> tuple[Rounds, Rounds]:
    """Rounds that cost at least, and rounds that cost at most as much, in up to `most` groups.

    Up to `most` different rounds stay as they are; otherwise each, of z > 0, moves to a corner.
    """
    if len(rounds) <= most:
        return rounds, rounds
    q, z, counts = arrays(rounds)
    above: dict[tuple[float, float], int] = {}
    below: dict[tuple[float, float], int] = {}
    for inside in _boxes(q, z, counts, most):
        count = int(counts[inside].sum())
        worst = float(q[inside].max()), float(z[inside].min())
        best = float(q[inside].min()), float(z[inside].max())
        above[worst] = above.get(worst, 0) + count
        below[best] = below.get(best, 0) + count
    return above, below


def summary(rounds: Rounds, most: int) -> Rounds:
    """Rounds that cost about as much, in up to `most` groups: for plans, not for bounds."""
    if len(rounds) <= most:
        return rounds
    q, z, counts = arrays(rounds)
    typical: dict[tuple[float, float], int] = {}
    for inside in _boxes(q, z, counts, most):
        share = counts[inside] / counts[inside].sum()
        mean = math.sqrt(share @ q[inside] ** 2), math.exp(share @ np.log(z[inside]))
        typical[mean] = typical.get(mean, 0) + int(counts[inside].sum())
    return typical


def _boxes(q: Vector, z: Vector, counts: Vector, most: int) -> list[NDArray[np.int64]]:
    """The members of each group, which are split where that tells most of their variance apart.

    It stops when there are `most` groups, or none is wider than 1e-4 of q and z.
    """
    settings = np.stack([np.log(q), np.log(z)])
    boxes = [_box(settings, counts, np.arange(len(q)))]
    while len(boxes) < most and boxes[0][0] < 0.0:
        _, _, axis, inside = heapq.heappop(boxes)
        values = settings[axis, inside]
        upper = values > (values.min() + values.max()) / 2
        for part in (inside[upper], inside[~upper]):
            heapq.heappush(boxes, _box(settings, counts, part))
    return [inside for *_, inside in boxes]


def _box(
    settings: Vector, counts: Vector, inside: NDArray[np.int64]
) -> tuple[float, int, int, NDArray[np.int64]]:
    """Minus what a split may gain, the first member (to break ties), the axis to split, members."""
    points = settings[:, inside]
    (low_q, low_z), (high_q, high_z) = points.min(axis=1), points.max(axis=1)
    if max(high_q - low_q, high_z - low_z) <= _FINE:
        return 0.0, int(inside[0]), 0, inside
    worst = _log_variance(high_q, low_z)
    better = (low_q, low_z), (high_q, high_z)
    gain = [-math.expm1(_log_variance(*corner) - worst) for corner in better]
    total = float(counts[inside].sum()) * math.exp(min(worst, 600.0))
    return -total * sum(gain), int(inside[0]), int(gain[1] > gain[0]), inside


def _log_variance(log_q: float, log_z: float) -> float:
    """Logarithm of the variance q²·(e^{1/z²} − 1) of the likelihood ratio of one round."""
    square = math.exp(min(-2 * log_z, 600.0))
    growth = square + math.log(-math.expm1(-square)) if square > 1e-300 else -2 * log_z
    return 2 * log_q + growth
