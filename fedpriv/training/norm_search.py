"""A quantile of the users' update norms, found by a few private rounds.

Each round asks which share of the users has a norm within each of some thresholds, which narrows
the interval in which the quantile lies.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import scipy

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.gaussian_mechanism import Metric
from fedpriv.privacy.noise import Entropy
from fedpriv.privacy.round import PrivacyRecords, Transport
from fedpriv.training.rounds import RoundResult, ServerState, TrainingPlan, run_round

UPDATE_NORMS_METRIC = "update-norms"  # whether a group's norm is within each threshold
_THRESHOLDS = 20
_SHARE = 0.99  # of a round's privacy; the update, though not used, needs a share of its own
_LEAST, _MOST = 1e-6, 1e6  # norms outside count as these


@dataclass(frozen=True)
class NormQuantile:
    """What is known of a quantile of the norms of one vector group."""

    group: str
    low: float = _LEAST  # of the interval to search next; because of noise, not certain
    high: float = _MOST
    estimate: float = math.nan  # the norm that about the quantile of users stays within
    noise_stddev: float = math.inf  # on the share of users within a threshold

    @property
    def thresholds(self) -> npt.NDArray[np.float64]:
        """What the next round compares norms with."""
        return np.geomspace(self.low, self.high, _THRESHOLDS)

    @property
    def metric(self) -> Metric:
        """What the next round asks users."""
        radius = math.sqrt(_THRESHOLDS) / 2.0
        name = f"{UPDATE_NORMS_METRIC}:{self.group}"
        return Metric(name, (_THRESHOLDS,), 0.5, radius, tuple(self.thresholds.tolist()))

    def narrowed(
        self, within: npt.NDArray[np.float64], noise_stddev: float, quantile: float
    ) -> "NormQuantile":
        """What is known after a round that released the share of users within each threshold."""
        # Shares grow with the threshold, so the nearest growing sequence has less noise.
        shares, thresholds = scipy.optimize.isotonic_regression(within).x, self.thresholds
        nearest = float(np.exp(np.interp(quantile, shares, np.log(thresholds))))
        # Up to two standard deviations the quantile is between these; where it is outside of all
        # thresholds, the next ones reach further by as much as these do.
        reach = self.high / self.low
        ends = np.array([self.low / reach, *thresholds, self.high * reach]).clip(_LEAST, _MOST)
        below, above = np.searchsorted(shares, quantile + np.array([-2.0, 2.0]) * noise_stddev)
        low, high = float(ends[below]), float(ends[above + 1])
        # A threshold may come back from its logarithm a little off.
        return NormQuantile(self.group, low, high, min(max(nearest, low), high), noise_stddev)


def check_quantile(quantile: float) -> None:
    """Raise InvalidValueError unless a quantile is in (0, 1)."""
    if not 0.0 < quantile < 1.0:
        raise InvalidValueError(f"quantile is {quantile}; it must be in (0, 1)")


def find_quantiles(
    plan: TrainingPlan,
    state: ServerState,
    quantile: float,
    transport: Transport,
    records: PrivacyRecords,
    entropy: Entropy,
) -> Iterator[tuple[RoundResult, tuple[NormQuantile, ...]]]:
    """Look for a quantile γ in (0, 1) of the norms of every vector group of a plan's update.

    Yields the result of each of the plan's rounds and what is known after it. Every round is
    charged before it is released; BudgetExceededError where the next would pass the budget. The
    model and its running statistics stay, so the norms are those of the first round of training.
    """
    check_quantile(quantile)
    known = tuple(NormQuantile(group.name) for group in plan.groups)
    fixed = replace(
        plan, metrics=(), metrics_share=0.0, contributors_share=0.0, adaptive=None, statistics=None
    )
    for number in range(plan.rounds):
        metrics = tuple(each.metric for each in known)
        asking = replace(fixed, metrics=metrics, metrics_share=_SHARE)
        _, result = run_round(asking, replace(state, round=number), transport, records, entropy)
        known = tuple(
            each.narrowed(np.array(value), result.metrics_noise_stddev[name], quantile)
            for each, (name, value) in zip(known, result.metrics.items(), strict=True)
        )
        yield result, known
