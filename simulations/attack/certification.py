"""A certified lower bound on ε, from the guesses of a test in many independent runs.

Runs are made in two worlds, whose populations differ in one user. A test is a threshold on one
number of a run's releases; it guesses whether the user was present. Let TPR be the rate of the
guess "present" in runs with the user, and FPR its rate in runs without. If a run is (ε, δ)-DP, then
in both directions

    TPR ≤ e^ε·FPR + δ    and    1 − FPR ≤ e^ε·(1 − TPR) + δ,

so ε ≥ max(log((TPR − δ)/FPR), log((1 − FPR − δ)/(1 − TPR))) for every test.

The rates are unknown, but the test is fixed before the runs that certify it. These are independent,
so the numbers of guesses "present" are binomial in each world. The one-sided bounds of Clopper &
Pearson 1934, TPR_low and FPR_high, are each wrong with probability at most α/2, so at least one is
wrong with probability at most α = 1 − confidence, dependent or not. If both hold, both quotients
are smaller with the bounds in place of the rates, so the certified bound is above the true ε with
probability at most α. Both directions use the same two bounds, and only one test is certified, so
no correction for multiple tests is needed.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv

CONFIDENCE = 0.95
Numbers = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ThresholdTest:
    """Guesses that the user was present if a number is above a threshold, or below it."""

    threshold: float
    above: bool

    def guesses(self, numbers: Numbers) -> npt.NDArray[np.bool_]:
        """Return for each run's number whether the test guesses that the user was present."""
        return numbers > self.threshold if self.above else numbers < self.threshold


@dataclass(frozen=True)
class Certificate:
    """The guesses of one test, and the lower bound on ε that follows."""

    epsilon: float  # ≥ 0; the true ε is at least this, up to a probability of 1 − confidence
    hits: int  # guesses that the user was present, in runs with the user
    runs_with: int
    false_alarms: int  # such guesses in runs without the user
    runs_without: int


def least_rate(successes: Counts, runs: int, error: float) -> Numbers:
    """Return Clopper–Pearson rates that are too high with probability at most `error`."""
    bound = betaincinv(np.maximum(successes, 1), runs - np.maximum(successes, 1) + 1, error)
    return np.where(successes == 0, 0.0, bound)


def largest_rate(successes: Counts, runs: int, error: float) -> Numbers:
    """Return Clopper–Pearson rates that are too low with probability at most `error`."""
    return 1.0 - least_rate(runs - successes, runs, error)


def certified(
    hits: Counts,
    runs_with: int,
    false_alarms: Counts,
    runs_without: int,
    delta: float,
    confidence: float = CONFIDENCE,
) -> Numbers:
    """Return lower bounds on ε ≥ 0, each for one test that was fixed before these runs."""
    error = (1.0 - confidence) / 2.0
    hit_rate = least_rate(hits, runs_with, error)
    alarm_rate = largest_rate(false_alarms, runs_without, error)
    with np.errstate(divide="ignore"):
        forward = np.log(np.maximum(hit_rate - delta, 0.0) / alarm_rate)
        backward = np.log(np.maximum(1.0 - alarm_rate - delta, 0.0) / (1.0 - hit_rate))
    bound: Numbers = np.maximum(0.0, np.maximum(forward, backward))
    return bound


def largest_certifiable(runs: int, delta: float) -> float:
    """Return the bound of a test that is right in all of `runs` runs of each world: the maximum."""
    return float(certified(np.array(runs), runs, np.array(0), runs, delta))


def certify(test: ThresholdTest, without: Numbers, with_one: Numbers, delta: float) -> Certificate:
    """Certify a test that was chosen on other runs, from the numbers of these: [runs] each."""
    hits, false_alarms = (int(test.guesses(numbers).sum()) for numbers in (with_one, without))
    sizes = len(with_one), len(without)
    epsilon = certified(np.array(hits), sizes[0], np.array(false_alarms), sizes[1], delta)
    return Certificate(float(epsilon), hits, sizes[0], false_alarms, sizes[1])


def best_test(without: Numbers, with_one: Numbers, delta: float) -> tuple[float, ThresholdTest]:
    """Return the largest bound of a test on these runs, which certifies nothing, and the test.

    All thresholds between two different numbers are tried, on both sides; [runs] each, finite.
    """
    values = np.unique(np.concatenate([without, with_one]))
    cuts = values[:-1] / 2.0 + values[1:] / 2.0
    best = 0.0, ThresholdTest(float(values[-1]), above=True)  # which guesses nothing
    if not len(cuts):
        return best
    for above in (True, False):
        counts = []
        for numbers in (with_one, without):
            counts_below = np.searchsorted(np.sort(numbers), cuts, "right" if above else "left")
            counts.append(len(numbers) - counts_below if above else counts_below)
        bounds = certified(counts[0], len(with_one), counts[1], len(without), delta)
        at = int(np.argmax(bounds))
        if bounds[at] > best[0]:
            best = float(bounds[at]), ThresholdTest(float(cuts[at]), above)
    return best
