"""The plan of a training run: everything that decides its result and its guarantee."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from fedpriv.errors import InvalidValueError
from fedpriv.federated.optimizers import FedAvg, ServerOptimizer
from fedpriv.federated.statistics import METRIC, RunningStatistics
from fedpriv.federated.transport import LocalTraining
from fedpriv.privacy.adaptive import AdaptiveClipping, indicator_group, indicator_of
from fedpriv.privacy.allocation import noise_stddevs
from fedpriv.privacy.contribution import Clipping, Indicator
from fedpriv.privacy.floored import FlooredAverageQuery, sensitivity
from fedpriv.privacy.groups import VectorGroup, check_partition
from fedpriv.privacy.layout import Layout
from fedpriv.privacy.mechanism import PoissonGaussianMechanism
from fedpriv.privacy.metrics import Metric
from fedpriv.privacy.query import GaussianAverageQuery, GaussianSumQuery
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.privacy.weights import Averaging


@dataclass(frozen=True)
class TrainingPlan:
    """What is trained, on whom, for how long and under which mechanism.

    Attributes:
        run: name of the run in the ledger.
        population: name of the enrolled population, as in the ledger.
        rounds: T ≥ 1.
        layout: tensors that are trained.
        groups: how each user's update is clipped, at first; a partition of the layout.
        noise_shares: ω_g > 0 of each group, summing to 1: how they split what metrics and the
            counting of the clipped leave them.
        noise_multiplier: z ≥ 0 of the whole round.
        sampling: who is enrolled and how a cohort is drawn.
        local: how each user trains.
        optimizer: how the server steps.
        description: whatever else decides the result (model, data, loss, initial parameters), in
            words or as a digest; it binds checkpoints to the plan.
        metrics: what is released beside the update.
        metrics_share: share in (0, 1) of the round's privacy that all metrics get, in equal parts;
            0 if there are none.
        adaptive: how the groups' clipping norms move; None: they stay.
        averaging: how much each user counts, and what sums are divided by.
        statistics: how running statistics of normalisations move; None: there are none, or they
            stay.

    Raises:
        InvalidValueError: a field is out of range or fields do not fit together.
    """

    run: str
    population: str
    rounds: int
    layout: Layout
    groups: tuple[VectorGroup, ...]
    noise_shares: tuple[float, ...]
    noise_multiplier: float
    sampling: PoissonSampling
    local: LocalTraining
    optimizer: ServerOptimizer = FedAvg()  # noqa: RUF009 - frozen, so sharing it is safe
    description: str = ""
    metrics: tuple[Metric, ...] = ()
    metrics_share: float = 0.0
    adaptive: AdaptiveClipping | None = None
    averaging: Averaging = Averaging()  # noqa: RUF009
    statistics: RunningStatistics | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise InvalidValueError(f"rounds is {self.rounds}; it must be at least 1")
        if not self.run or "/" in self.run:
            raise InvalidValueError(f"run is {self.run!r}; it must be a name without '/'")
        check_partition(self.layout, self.groups)
        if not (0.0 < self.metrics_share < 1.0 if self.metrics else self.metrics_share == 0.0):
            raise InvalidValueError(
                f"metrics_share is {self.metrics_share} with {len(self.metrics)} metrics; it must "
                "be in (0, 1), or 0 if there are none"
            )
        if not self._update_share > 0.0:
            raise InvalidValueError(
                f"metrics and the counting of the clipped take {1.0 - self._update_share:g} of the "
                "round's privacy; they must leave some to the update"
            )
        shapes = {metric.name: metric.shape for metric in self.metrics}
        if self.statistics is not None and shapes.get(METRIC) != self.statistics.shape:
            raise InvalidValueError(
                f"running statistics move by a metric {METRIC!r} of shape {self.statistics.shape}; "
                f"the plan has {shapes.get(METRIC, 'none')}"
            )
        _ = self.mechanism  # groups, shares and sampling that do not fit are refused here

    @property
    def clipping_norms(self) -> tuple[float, ...]:
        """S_g of each group of the update before the first round."""
        return tuple(group.clipping_norm for group in self.groups)

    @cached_property
    def mechanism(self) -> PoissonGaussianMechanism:
        """The mechanism of the first round, and of every round if clipping norms stay."""
        return self._mechanism_at(self.clipping_norms)

    def mechanism_at(self, clipping_norms: tuple[float, ...]) -> PoissonGaussianMechanism:
        """The mechanism of a round in which the groups of the update have these clipping norms.

        Its noise multiplier is that of the plan, whatever the norms.
        """
        first = clipping_norms == self.clipping_norms
        return self.mechanism if first else self._mechanism_at(clipping_norms)

    def _mechanism_at(self, clipping_norms: tuple[float, ...]) -> PoissonGaussianMechanism:
        clipping = self._clipping(clipping_norms)
        stddevs = noise_stddevs(clipping.groups, self.noise_multiplier, self.shares)
        expected, averaging = self.sampling.expected_cohort_size, self.averaging
        weight = self.sampling.sampling_probability * (
            averaging.total_weight or float(self.sampling.population)
        )
        if averaging.floor is None:
            weighted = weight if clipping.weighted else None
            query = GaussianAverageQuery(GaussianSumQuery(clipping, stddevs), expected, weighted)
            return PoissonGaussianMechanism(self.sampling, query)
        floor = averaging.floor * weight
        wider = tuple(
            sensitivity(group, clipping.layout, floor) * stddev
            if group.name in clipping.weighted
            else stddev
            for group, stddev in zip(clipping.groups, stddevs, strict=True)
        )
        sums = GaussianSumQuery(clipping, wider)
        average = GaussianAverageQuery(sums, expected, floor)
        return PoissonGaussianMechanism(self.sampling, FlooredAverageQuery(average))

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """ω of every vector group of a round: those of the update, metrics, the indicator."""
        metrics = (self.metrics_share / max(1, len(self.metrics)),) * len(self.metrics)
        counting = (self.adaptive.share,) if self.adaptive else ()
        return (*(self._update_share * share for share in self.noise_shares), *metrics, *counting)

    @property
    def _update_share(self) -> float:
        return 1.0 - self.metrics_share - (self.adaptive.share if self.adaptive else 0.0)

    @cached_property
    def _indicator(self) -> Indicator | None:
        return indicator_of(self.groups) if self.adaptive else None

    def _clipping(self, clipping_norms: tuple[float, ...]) -> Clipping:
        update = tuple(
            replace(group, clipping_norm=norm)
            for group, norm in zip(self.groups, clipping_norms, strict=True)
        )
        side = tuple(metric.group for metric in self.metrics)
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        shapes |= {metric.tensor: metric.shape for metric in self.metrics}
        if self._indicator is not None:
            side = (*side, indicator_group(self._indicator))
            shapes[self._indicator.tensor] = (len(self._indicator.groups),)
        averaging = self.averaging
        plain = averaging.cap is None and averaging.floor is None
        weighted = () if plain else tuple(group.name for group in self.groups)
        layout = Layout(tuple(shapes), tuple(shapes.values()))
        cap = averaging.cap or 1
        return Clipping(layout, (*update, *side), self._indicator, weighted, cap)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the whole plan; equal plans have equal digests."""
        text = json.dumps(self._as_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def _as_json(self) -> Mapping[str, object]:
        optimizer = type(self.optimizer).__name__
        return {**dataclasses.asdict(self), "optimizer_class": optimizer}
