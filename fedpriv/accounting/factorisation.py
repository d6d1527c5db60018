"""Strategies for correlated noise over a series of rounds, optimised for the models' errors.

If X are the sums of n rounds, C⁻¹(C·X + Z) is released, and the models are A times that: model t is
Σ_{s ≤ t} Σ_{r ≤ s} β^{s−r}·x_r for SGD with momentum β, by default 0. So their noise is A·C⁻¹·Z. At
a given price the noise Z is proportional to the sensitivity of C, so the error is

    sens(C)·‖row of A·C⁻¹‖   (Denisov et al. 2022; Choquette-Choo et al. 2023, arXiv 2306.08153).

**Every strategy is private at the noise it is charged with:** the accountant computes the
sensitivity in its price from the coefficients (`round_counts.strategy_sensitivity`) and does not
use this module. A failed search costs accuracy, never privacy.

All matrices are lower triangular Toeplitz, so products and inverses are those of power series, by
FFT: an objective and its gradient take O(n·log n).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np
import scipy
from scipy import fft

from fedpriv.accounting.round_counts import Vector, decreasing, strategy_sensitivity
from fedpriv.ledger.events import Schedule
from fedpriv.support.checks import check_range, is_whole, require

GRID = 2.0**-20
"""Bands are multiples of this, so that noise can be drawn in whole numbers."""
_FASTEST = 0.5  # 1 − θ of the fastest buffer at the start of a search
_MOST_LOGIT = math.log(2.0**24)  # keeps θ in about [2⁻²⁴, 1 − 2⁻²⁴]
_STEPS = 3000  # evaluations of an objective
_UNIT = 0.01  # of coefficients: the first step of a search has about this size
_FAR = 1e3  # replaces the logarithm of an error that overflows


class Objective(StrEnum):
    """The error of the n models to minimise."""

    MEAN = "mean"  # root mean square over rounds
    LARGEST = "largest"  # of the worst round, which is the last


@dataclass(frozen=True)
class Errors:
    """Standard deviations of the noise in each coordinate of the models, or ratios of them."""

    mean: float  # root mean square over rounds
    largest: float  # over rounds


class Buffers(NamedTuple):
    """A strategy c_0 = 1, c_j = Σ_i w_i·θ_i^{j−1}, for a noise generator with d buffers (BLT).

    Coefficients are ≥ 0 and never increase, so their sensitivity is exact (Dvijotham et al. 2024,
    arXiv 2404.16706; McMahan et al. 2024, arXiv 2408.08868).
    """

    decays: tuple[float, ...]  # [d] θ in [0, 1), decreasing
    weights: tuple[float, ...]  # [d] w ≥ 0, with a sum of at most 1

    def coefficients(self, rounds: int) -> tuple[float, ...]:
        """Return the n coefficients for a series of n rounds, accurate to a few ulps."""
        powers = np.array(self.decays)[:, None] ** np.arange(rounds - 1)
        c = np.append(1.0, np.array(self.weights) @ powers)
        # If θ is near 1, rounding could make a coefficient larger than the one before.
        return tuple(np.minimum.accumulate(c).tolist())


def errors(strategy: tuple[float, ...], schedule: Schedule, momentum: float = 0.0) -> Errors:
    """Return errors of the models in clipping norms, if a series is μ-GDP with μ = 1.

    The noise then has a standard deviation of one sensitivity. For other μ, errors are 1/μ times as
    large.

    >>> round(errors((1.0,), Schedule(rounds=100)).largest, 9)
    10.0
    """
    n = schedule.rounds
    sensitivity = strategy_sensitivity(strategy, n, schedule.participations, schedule.separation)
    c = np.append(strategy[:n], np.zeros(max(0, n - len(strategy))))
    column, _ = _noise_column(_inverse(c), momentum)
    squares = np.cumsum(column**2)  # row t of A·C⁻¹ is (u_t, …, u_0)
    return Errors(sensitivity * math.sqrt(squares.mean()), sensitivity * math.sqrt(squares.max()))


def relative_errors(
    strategy: tuple[float, ...], schedule: Schedule, momentum: float = 0.0
) -> Errors:
    """Return errors relative to those of independent noise at the same price."""
    correlated = errors(strategy, schedule, momentum)
    independent = errors((1.0,), schedule, momentum)
    return Errors(correlated.mean / independent.mean, correlated.largest / independent.largest)


def optimal_bands(
    schedule: Schedule,
    bands: int | None = None,
    objective: Objective = Objective.MEAN,
    momentum: float = 0.0,
) -> tuple[float, ...]:
    """Return the best strategy of at most p = `bands` bands, rounded to multiples of 2⁻²⁰.

    The default p is b, or n for one participation. A search for more than b bands starts from the
    result for p = b, so it never increases the error. Deterministic.

    >>> plan = Schedule(rounds=500, participations=5, separation=100)
    >>> round(relative_errors(optimal_bands(plan), plan).mean, 3)
    0.194
    """
    n = schedule.rounds
    separation = n if _fitting(schedule) == 1 else schedule.separation
    p = separation if bands is None else bands
    limit = f"it must be a whole number from 1 to the {n} rounds of the schedule"
    require(is_whole(p, n), f"bands is {p!r}; {limit}")
    loss = _loss_of(schedule, objective, momentum)
    # A user's columns do not overlap, so the sensitivity is exact for coefficients of any sign.
    _, c = _minimised(loss, _square_root(min(p, separation)) / _UNIT)
    c = c / c[0]
    if p > separation or not decreasing(tuple(c.tolist())):
        c = _decreasing_bands(loss, np.append(c, np.zeros(p - len(c))))
    return rounded_bands(tuple(c.tolist()))


def rounded_bands(strategy: tuple[float, ...]) -> tuple[float, ...]:
    """Return a strategy that never increases, divided by c_0 and rounded to multiples of 2⁻²⁰.

    Rounding keeps the order, so the sensitivity stays exact. Zeros at the end are left out.
    """
    c = np.rint(np.array(strategy) / strategy[0] / GRID) * GRID
    return tuple(c[: np.flatnonzero(c)[-1] + 1].tolist())


def optimal_buffers(
    schedule: Schedule,
    buffers: int = 4,
    objective: Objective = Objective.MEAN,
    momentum: float = 0.0,
) -> Buffers:
    """Return the best strategy found with at most d = `buffers` buffers, 1 to 8.

    Deterministic.

    >>> plan = Schedule(rounds=500, participations=5, separation=100)
    >>> round(relative_errors(optimal_buffers(plan).coefficients(500), plan).mean, 3)
    0.202
    """
    n, k, b = schedule.rounds, _fitting(schedule), schedule.separation
    require(is_whole(buffers, 8), f"buffers is {buffers!r}; it must be a whole number from 1 to 8")
    loss = _loss_of(schedule, objective, momentum)
    if n == 1:
        return Buffers((0.0,), (0.0,))
    slowest = dict.fromkeys([1.0 / n, 1.0 / math.sqrt(n * b), 1.0 / b] if k > 1 else [1.0 / n])
    optima = [_search_buffers(loss, n, buffers, gap) for gap in slowest]
    _, buffers_found = min(optima, key=lambda optimum: optimum[0])
    return buffers_found


def _fitting(schedule: Schedule) -> int:
    """Return the number of participations that fit into the rounds."""
    return min(schedule.participations, 1 + (schedule.rounds - 1) // schedule.separation)


LossAndGradient = Callable[[Vector], tuple[float, Vector]]


def _loss_of(schedule: Schedule, objective: Objective, momentum: float) -> LossAndGradient:
    """Return the function from at most n coefficients to log(error²) and its gradient."""
    n, k, b = schedule.rounds, _fitting(schedule), schedule.separation
    check_range("momentum", momentum, "[0, 1)")
    weights = np.ones(n)
    if objective is Objective.MEAN:  # A·C⁻¹ has u_r in n − r columns
        weights = np.arange(n, 0, -1) / n

    def loss(c: Vector) -> tuple[float, Vector]:
        inverse = _inverse(np.append(c, np.zeros(n - len(c))))
        column, noise = _noise_column(inverse, momentum)
        square = float(column**2 @ weights)
        by_noise = np.cumsum((2 * column * weights)[::-1])[::-1]
        # noise = C⁻¹m, so its derivative by c_l is −C⁻¹·noise, shifted down by l rows.
        adjoint = _product(inverse, by_noise[::-1])
        by_error = -_product(adjoint, noise)[::-1][: len(c)]
        sensitivity, by_sensitivity = _square_sensitivity(c, n, k, b)
        gradient = by_error / square + by_sensitivity / sensitivity
        return float(np.log(square * sensitivity)), gradient

    return loss


def _noise_column(inverse: Vector, momentum: float) -> tuple[Vector, Vector]:
    """Return the first column u of A·C⁻¹, and y = C⁻¹·(β^r)_r, whose prefix sums are u."""
    noise = inverse
    if momentum > 0.0:
        noise = _product(inverse, momentum ** np.arange(len(inverse), dtype=np.float64))
    return np.cumsum(noise), noise


def _square_sensitivity(c: Vector, n: int, k: int, b: int) -> tuple[float, Vector]:
    """Return ‖Σ_{j < k} C[:, j·b]‖² and its gradient.

    It is the squared sensitivity if c ≥ 0 never increases, or columns b apart do not overlap.
    """

    def windows(rows: Vector) -> Vector:
        """Return for each row the sum of the k rows up to it."""
        total = np.cumsum(rows, axis=0)
        total[k:] -= total[:-k].copy()
        return total

    blocks = np.append(c, np.zeros(n - len(c) + -n % b)).reshape(-1, b)
    column = windows(blocks).reshape(-1)
    column[n:] = 0.0
    gradient = 2 * windows(column.reshape(-1, b)[::-1])[::-1].reshape(-1)
    return float(column @ column), gradient[: len(c)]


def _decreasing_bands(loss: LossAndGradient, start: Vector) -> Vector:
    """Return bands that never increase, by a search over their decreases ≥ 0.

    It begins at the non-increasing bands nearest to `start`.
    """
    nearest = np.maximum(scipy.optimize.isotonic_regression(start, increasing=False).x, 0.0)
    unit = -np.diff(_square_root(len(start)), append=0.0)  # gives decreases similar sizes

    def bands(decreases: Vector) -> Vector:
        return np.cumsum((unit * decreases)[::-1])[::-1]

    def of_decreases(decreases: Vector) -> tuple[float, Vector]:
        value, gradient = loss(bands(decreases))
        return value, unit * np.cumsum(gradient)

    first_decreases = -np.diff(nearest, append=0.0) / unit
    _, decreases = _minimised(of_decreases, first_decreases, [(0.0, None)] * len(start))
    return np.asarray(np.minimum.accumulate(bands(decreases)))


def _search_buffers(
    loss: LossAndGradient, n: int, buffers: int, slowest: float
) -> tuple[float, Buffers]:
    """Return the loss and the buffers of a local optimum.

    The search is over logits of θ and over log(w/(1 − Σ w)), which keeps Σ w below 1.
    """
    gaps = np.geomspace(_FASTEST, min(slowest, _FASTEST), buffers)
    powers = (1.0 - gaps) ** np.arange(n - 1)[:, None]
    w, _ = scipy.optimize.nnls(powers, _square_root(n)[1:])
    w = np.maximum(w, 1e-4)
    w *= min(1.0, 0.9 / w.sum())
    start = np.append(np.log((1.0 - gaps) / gaps), np.log(w / (1.0 - w.sum())))

    def decays_and_weights(x: Vector) -> tuple[Vector, Vector]:
        largest = max(0.0, x[buffers:].max())
        weights, rest = np.exp(x[buffers:] - largest), math.exp(-largest)
        return 1.0 / (1.0 + np.exp(-x[:buffers])), weights / (rest + weights.sum())

    def of_parameters(x: Vector) -> tuple[float, Vector]:
        theta, w = decays_and_weights(x)
        powers = theta[:, None] ** np.arange(n - 1)
        value, gradient = loss(np.append(1.0, w @ powers))
        by_w = powers @ gradient[1:]
        by_theta = w * ((powers[:, :-1] * np.arange(1, n - 1)) @ gradient[2:])
        return value, np.append(by_theta * theta * (1.0 - theta), w * (by_w - w @ by_w))

    bounds = [(-_MOST_LOGIT, _MOST_LOGIT)] * buffers + [(-50.0, 50.0)] * buffers
    value, x = _minimised(of_parameters, start, bounds)
    theta, w = decays_and_weights(x)
    order = np.argsort(-theta, kind="stable")
    w *= min(1.0, (1.0 - 2.0**-50) / math.fsum(w))
    return value, Buffers(tuple(theta[order].tolist()), tuple(w[order].tolist()))


def _minimised(
    loss: LossAndGradient,
    start: Vector,
    bounds: Sequence[tuple[float | None, float | None]] | None = None,
) -> tuple[float, Vector]:
    """Return the smallest loss of a local search, and its argument."""

    def finite(x: Vector) -> tuple[float, Vector]:
        # If an inverse overflows or the first coefficient is 0, a large loss turns the search back.
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            value, gradient = loss(x)
        if math.isfinite(value) and np.isfinite(gradient).all():
            return value, gradient
        return _FAR, np.zeros(len(x))

    minimum = scipy.optimize.minimize(
        finite, start, jac=True, method="L-BFGS-B", bounds=bounds,
        options={"maxiter": _STEPS, "maxfun": _STEPS, "maxcor": 30, "ftol": 1e-14, "gtol": 1e-10},
    )  # fmt: skip
    return float(minimum.fun), np.asarray(minimum.x)


def _square_root(length: int) -> Vector:
    """Return binom(2j, j)/4^j, the coefficients of the square root of the matrix of prefix sums.

    They are optimal for the largest error of one participation (Fichtenberger, Henzinger & Upadhyay
    2023; Dvijotham et al. 2024), and the start of searches.
    """
    j = np.arange(1, length)
    return np.append(1.0, np.cumprod((2 * j - 1) / (2 * j)))


def _product(a: Vector, b: Vector) -> Vector:
    """Return the product of two power series of n coefficients, to n coefficients."""
    size = fft.next_fast_len(2 * len(a) - 1, real=True)
    return np.asarray(fft.irfft(fft.rfft(a, size) * fft.rfft(b, size), size)[: len(a)])


def _inverse(c: Vector) -> Vector:
    """Return the power series 1/c, with as many coefficients as c, by Newton's x ← x·(2 − c·x)."""
    x = np.array([1.0 / c[0]])
    while len(x) < len(c):
        length = min(2 * len(x), len(c))
        x = np.append(x, np.zeros(length - len(x)))
        correction = -_product(c[:length], x)
        correction[0] += 2.0
        x = _product(x, correction)
    return x
