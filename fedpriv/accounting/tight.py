"""The tightest certified intervals: along a contour where that works, else by composing PLDs.

The two methods share nothing but the definition of the privacy loss, and the tests hold them
against each other. The contour gives some eight digits, the PLD three.

With more than 144 different pairs (q, z) the contour interpolates, and one term of its error is
estimated instead of proved (`chebyshev`): no certificate, so there the PLD serves too.
"""

from fedpriv.accounting import contour, pld
from fedpriv.accounting.contour import MOST_DIRECT, ContourUnsuitableError
from fedpriv.accounting.loss import Rounds


def epsilon_interval(rounds: Rounds, delta: float) -> tuple[float, float]:
    """Interval that holds the least ε for which the rounds are (ε, δ)-DP.

    Args:
        rounds: number of rounds by (q, z), q in (0, 1], z ≥ 0.
        delta: δ in (0, 1).

    Returns:
        (low, up) with 0 ≤ low ≤ true ε ≤ up ≤ ∞.
    """
    if len(rounds) > MOST_DIRECT:
        return pld.epsilon_interval(rounds, delta)
    try:
        return contour.epsilon_interval(rounds, delta)
    except ContourUnsuitableError:
        return pld.epsilon_interval(rounds, delta)


def delta_interval(rounds: Rounds, epsilon: float) -> tuple[float, float]:
    """Interval that holds the least δ for which the rounds are (ε, δ)-DP.

    Args:
        rounds: number of rounds by (q, z), q in (0, 1], z ≥ 0.
        epsilon: ε ≥ 0, finite.

    Returns:
        (low, up) with 0 ≤ low ≤ true δ ≤ up ≤ 1.
    """
    if len(rounds) > MOST_DIRECT:
        return pld.delta_interval(rounds, epsilon)
    try:
        return contour.delta_interval(rounds, epsilon)
    except ContourUnsuitableError:
        return pld.delta_interval(rounds, epsilon)
