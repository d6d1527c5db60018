"""Certified intervals for ε and δ from the cumulant generating function of the privacy loss.

Accounts any multiset of Poisson-subsampled Gaussian rounds under add-or-remove-one by an integral
along a contour (`inversion`) instead of a convolution. There is no lattice of losses: eight digits
cost some thousand sines whatever the number of rounds, and a second where a million rounds all
differ (`chebyshev`). It refuses where rare, huge losses make the integrand fall too slowly.

Every error is bounded and moves the ends of the interval outwards, but for one: with more than 144
different pairs (q, z) the error of interpolating between them is estimated, with a safety factor.
"""

import math
from collections.abc import Mapping

from fedpriv.accounting.answers import DeltaAt, EpsilonAt, Question
from fedpriv.accounting.chebyshev import tiled
from fedpriv.accounting.cumulant import tilt
from fedpriv.accounting.inversion import make_contours
from fedpriv.accounting.loss import Direction
from fedpriv.accounting.panel import Panel, RoundsArray, direct, rounds_array, summary
from fedpriv.accounting.saddle import LEAST_LOG_DELTA, Plan, survey
from fedpriv.errors import InvalidValueError, UnsupportedEventError

Rounds = Mapping[tuple[float, float], float]
"""Number of rounds by (sampling probability q, noise multiplier z), as `events.compose` returns."""

_WIDEST = 1e-3
"""Largest width of an interval, relative to its upper end."""
_LEAST_NOISE, _MOST_NOISE = 0.1, 1e6
_LEAST_PROBABILITY = 1e-12
MOST_DIRECT = 144
"""More pairs than these are interpolated, with an error that is estimated, not proved."""
_TOLERANCE = 1e-8
"""Interpolation error of K that each rectangle may have."""


class ContourUnsuitableError(UnsupportedEventError):
    """The contour does not tell ε or δ to a thousandth; the composition by FFT may."""


def epsilon_interval(rounds: Rounds | RoundsArray, delta: float) -> tuple[float, float]:
    """Interval that holds the least ε for which the rounds are (ε, δ)-DP.

    * No round: [0, 0]. A round without noise: [∞, ∞].
    * Both directions are computed, each along two contours; the worse one is reported.
    * The ends differ by at most a thousandth of the upper one, or by 1e-9; usually by 1e-9 of it.

    Args:
        rounds: numbers of rounds by (q, z), q in (0, 1], z ≥ 0; as arrays where many differ.
        delta: δ in (0, 1).

    Returns:
        (low, up) with 0 ≤ low ≤ true ε ≤ up ≤ ∞.

    Raises:
        InvalidValueError: a value is out of range.
        ContourUnsuitableError: the interval would be wider. This happens where losses are rare and
            huge, z·√(Σq²) < 0.1 and mostly Σq < 1, and for a few rounds with q < 1; it is sure for
            z outside [0.1, 1e6], q < 1e-12 and δ < 1e-270.
    """
    if not 0.0 < delta < 1.0:
        raise InvalidValueError(f"delta is {delta}; it must be in (0, 1)")
    array = rounds if isinstance(rounds, RoundsArray) else rounds_array(rounds)
    if len(array.q) == 0:
        return 0.0, 0.0
    if (array.z == 0.0).any():
        return math.inf, math.inf
    if math.log(delta) < LEAST_LOG_DELTA:
        raise ContourUnsuitableError(f"delta is {delta}; the contour needs at least 1e-270")
    return _worse(array, EpsilonAt(math.log(delta)))


def delta_interval(rounds: Rounds | RoundsArray, epsilon: float) -> tuple[float, float]:
    """Interval that holds the least δ for which the rounds are (ε, δ)-DP.

    * No round: [0, 0]. A round without noise: [0, 1].
    * Both directions are computed, each along two contours; the worse one is reported.
    * The ends differ by at most a thousandth of the upper one, or by 1e-265; usually by 1e-8 of it.

    Args:
        rounds: numbers of rounds by (q, z), q in (0, 1], z ≥ 0; as arrays where many differ.
        epsilon: ε ≥ 0, finite.

    Returns:
        (low, up) with 0 ≤ low ≤ true δ ≤ up ≤ 1.

    Raises:
        InvalidValueError: a value is out of range.
        ContourUnsuitableError: the interval would be wider; see `epsilon_interval`.
    """
    if not 0.0 <= epsilon < math.inf:
        raise InvalidValueError(f"epsilon is {epsilon}; it must be finite and not negative")
    array = rounds if isinstance(rounds, RoundsArray) else rounds_array(rounds)
    if len(array.q) == 0:
        return 0.0, 0.0
    if (array.z == 0.0).any():
        return 0.0, 1.0
    return _worse(array, DeltaAt(epsilon))


def _worse(rounds: RoundsArray, question: Question) -> tuple[float, float]:
    """The answer in the worse direction, or a refusal."""
    low, up = _both(rounds, question) if _within(rounds) else (0.0, question.largest)
    if up - low <= max(_WIDEST * up, question.negligible) and up < math.inf:
        return low, up
    raise ContourUnsuitableError(
        f"the contour only finds [{low:.6g}, {up:.6g}] for {rounds.counts.sum():.6g} rounds; it "
        f"needs a width of at most {_WIDEST:g} of the upper end"
    )


def _within(rounds: RoundsArray) -> bool:
    """Whether all numbers are of a size that floating point can do."""
    z, q = rounds.z, rounds.q
    noise = z.min() >= _LEAST_NOISE and z.max() <= _MOST_NOISE
    return bool(noise and q.min() >= _LEAST_PROBABILITY)


def _both(rounds: RoundsArray, question: Question) -> tuple[float, float]:
    """The answer in the worse direction, as good as can be."""
    rough = direct(rounds) if len(rounds.q) <= MOST_DIRECT else summary(rounds)
    plans = [question.plan(rough, direction) for direction in Direction]

    def error(panel: Panel) -> float:
        tilted = (tilt(survey(panel, p.log_tail, p.direction), p.c) for p in plans)
        return max(float(panel.interpolation_error(t.log_mgf[:, None])[0]) for t in tilted)

    panel = rough if len(rounds.q) <= MOST_DIRECT else tiled(rounds, error, _TOLERANCE)
    low, up = 0.0, 0.0
    for plan in plans:
        ceiling = question.ceiling(panel, plan) if low > 0.0 else question.largest
        if ceiling > low:
            ends = _interval(panel, plan, question)
            low, up = max(low, ends[0]), max(up, min(ends[1], ceiling))
    return low, up


def _interval(panel: Panel, plan: Plan, question: Question) -> tuple[float, float]:
    """The answer in one direction: it is in the interval of every contour."""
    low, up = 0.0, question.largest
    for contour in make_contours(panel, plan):
        ends = question.interval(contour)
        low, up = max(low, ends[0]), min(up, ends[1])
    if low > up:
        raise ContourUnsuitableError(f"two contours contradict each other: {low} > {up}")
    return low, up
