"""The plan of a training run: everything that decides its result and its guarantee."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import numpy as np

from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import PrivacyBudget, RoundEvent
from fedpriv.privacy.clipping import Clipping, Indicator
from fedpriv.privacy.gaussian_mechanism import AdaptiveClipping, Metric, PoissonGaussianMechanism
from fedpriv.privacy.layout import FloatVector, Layout, VectorGroup, check_partition
from fedpriv.privacy.query import Averaging
from fedpriv.privacy.round import LocalTraining
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.training.optimizers import FedAvg, Parameters, ServerOptimizer

BATCH_NORM_METRIC = "batch-norm"  # the metric that moves running statistics
_MOST = 4.0  # a variance grows or shrinks by at most this factor in a round, whatever the noise
_LARGEST_MEAN, _LARGEST_VARIANCE = 1e15, 1e30


@dataclass(frozen=True)
class RunningStatistics:
    """How the server moves the running statistics of batch normalisations.

    With x̂ = (x − μ)/s, s² = v + eps, the metric is the average over users of a = mean x̂ and
    b = mean x̂² − 1, per channel. Moments about the running mean then move by a share β, the
    momentum: they are m₁ = β·a and m₂ = 1 + β·b, and so μ moves by s·m₁ and s² by m₂ − m₁². Where
    all users' moments are those of the running statistics, a = b = 0 and nothing moves. All of this
    is post-processing of what was released.
    """

    layers: tuple[str, ...]  # names, in the order of the model
    channels: tuple[int, ...]  # of each
    eps: tuple[float, ...]  # ≥ 0, of each
    momentum: float = 0.1  # β in (0, 1]

    def __post_init__(self) -> None:
        if not len(self.layers) == len(self.channels) == len(self.eps) > 0:
            found = f"{len(self.channels)} numbers of channels and {len(self.eps)} eps"
            what = f"{len(self.layers)} normalisations have {found}"
            raise InvalidValueError(f"{what}; each of at least one needs both")
        if min(self.channels) < 1 or not all(0.0 <= eps < math.inf for eps in self.eps):
            found = f"channels of normalisations are {self.channels} and their eps {self.eps}"
            raise InvalidValueError(f"{found}; they must be positive and not negative")
        if not 0.0 < self.momentum <= 1.0:
            found = f"momentum of running statistics is {self.momentum}"
            raise InvalidValueError(f"{found}; it must be in (0, 1]")

    @property
    def shape(self) -> tuple[int]:
        """Shape of the metric: for each layer a and then b of its channels."""
        return (2 * sum(self.channels),)

    def moved(self, statistics: Parameters, released: FloatVector) -> dict[str, np.ndarray]:
        """Statistics after a round, by name, given the released metric [2ΣC].

        Guarantees: variances are finite and not negative, means finite, for any released vector;
        s² changes by a factor of at least 1/4 and at most 4.
        """
        after, start = dict[str, np.ndarray](), 0
        for layer, channels, eps in zip(self.layers, self.channels, self.eps, strict=True):
            first, second = released[start : start + 2 * channels].reshape(2, channels)
            start += 2 * channels
            mean_name, var_name = _names(layer)
            square = statistics[var_name].astype(np.float64) + eps
            m1, m2 = self.momentum * first, 1.0 + self.momentum * second
            mean = statistics[mean_name] + np.sqrt(square) * m1
            var = square * np.clip(m2 - m1**2, 1.0 / _MOST, _MOST) - eps
            after[mean_name] = np.clip(mean, -_LARGEST_MEAN, _LARGEST_MEAN).astype(np.float32)
            after[var_name] = np.clip(var, 0.0, _LARGEST_VARIANCE).astype(np.float32)
        return after

    def check(self, statistics: Mapping[str, np.ndarray]) -> None:
        """Raise InvalidValueError unless there are statistics of exactly these layers."""
        sizes = zip(self.layers, self.channels, strict=True)
        wanted = {name: (size,) for layer, size in sizes for name in _names(layer)}
        found = {name: tensor.shape for name, tensor in statistics.items()}
        if found != wanted:
            raise InvalidValueError(f"running statistics are {found}; they must be {wanted}")


def _names(layer: str) -> tuple[str, str]:
    prefix = f"{layer}." if layer else ""
    return f"{prefix}running_mean", f"{prefix}running_var"


@dataclass(frozen=True)
class TrainingPlan:
    """What is trained, on whom, for how long and under which mechanism."""

    run: str  # name in the ledger
    population: str  # name of the enrolled population, as in the ledger
    rounds: int  # T ≥ 1
    layout: Layout  # of the tensors that are trained
    groups: tuple[VectorGroup, ...]  # how an update is clipped at first: a partition of the layout
    noise_shares: tuple[float, ...]  # ω_g: how groups split what metrics and counting leave them
    noise_multiplier: float  # z ≥ 0 of the whole round
    sampling: PoissonSampling
    local: LocalTraining
    optimizer: ServerOptimizer = FedAvg()  # noqa: RUF009 - frozen, so sharing it is safe
    # Whatever else decides the result (model, data, loss, initial parameters), in words or as a
    # digest; it binds checkpoints to the plan.
    description: str = ""
    metrics: tuple[Metric, ...] = ()  # what is released beside the update
    metrics_share: float = 0.0  # of the round's privacy, for all metrics in equal parts
    adaptive: AdaptiveClipping | None = None  # how clipping norms move; None: they stay
    averaging: Averaging = Averaging()  # noqa: RUF009
    statistics: RunningStatistics | None = None  # how running statistics move, if they do

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise InvalidValueError(f"rounds is {self.rounds}; it must be at least 1")
        if not self.run or "/" in self.run:
            raise InvalidValueError(f"run is {self.run!r}; it must be a name without '/'")
        check_partition(self.layout, self.groups)
        if not (0.0 < self.metrics_share < 1.0 if self.metrics else self.metrics_share == 0.0):
            found = f"metrics_share is {self.metrics_share} with {len(self.metrics)} metrics"
            raise InvalidValueError(f"{found}; it must be in (0, 1), or 0 if there are none")
        if not self._update_share > 0.0:
            taken = f"{1.0 - self._update_share:g} of the round's privacy"
            found = f"metrics and the counting of the clipped take {taken}"
            raise InvalidValueError(f"{found}; they must leave some to the update")
        shapes = {metric.name: metric.shape for metric in self.metrics}
        found_shape = shapes.get(BATCH_NORM_METRIC)
        if self.statistics is not None and found_shape != self.statistics.shape:
            needed = f"a metric {BATCH_NORM_METRIC!r} of shape {self.statistics.shape}"
            found = f"the plan has {found_shape or 'none'}"
            raise InvalidValueError(f"running statistics move by {needed}; {found}")
        _ = self.mechanism  # groups, shares and sampling that do not fit are refused here

    @property
    def clipping_norms(self) -> tuple[float, ...]:
        """S_g of each group of the update before the first round."""
        return tuple(group.clipping_norm for group in self.groups)

    @cached_property
    def mechanism(self) -> PoissonGaussianMechanism:
        """The mechanism of the first round."""
        return self.mechanism_at(self.clipping_norms)

    def mechanism_at(self, clipping_norms: tuple[float, ...]) -> PoissonGaussianMechanism:
        """The mechanism of a round with these clipping norms, at the plan's noise multiplier."""
        pairs = zip(self.groups, clipping_norms, strict=True)
        groups = [replace(group, clipping_norm=norm) for group, norm in pairs]
        groups += [metric.group for metric in self.metrics]
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        shapes |= {metric.tensor: metric.shape for metric in self.metrics}
        indicator = Indicator.of(self.groups) if self.adaptive else None
        if indicator is not None:
            groups.append(indicator.group)
            shapes[indicator.tensor] = (len(indicator.groups),)
        averaging = self.averaging
        plain = averaging.cap is None and averaging.floor is None
        weighted = () if plain else tuple(group.name for group in self.groups)
        layout = Layout(tuple(shapes), tuple(shapes.values()))
        clipping = Clipping(layout, tuple(groups), indicator, weighted, averaging.cap or 1)
        return PoissonGaussianMechanism.calibrated(
            self.sampling, clipping, self.noise_multiplier, self.shares, averaging
        )

    def within(self, budget: PrivacyBudget, spent: Sequence[RoundEvent] = ()) -> "TrainingPlan":
        """The plan with the noise raised until all rounds fit beside what was spent.

        Rounding may make a plan that was calibrated to the budget miss it.
        """
        plan = self
        while not budget.admits([*spent, replace(plan.mechanism.event, count=plan.rounds)]):
            plan = replace(plan, noise_multiplier=plan.noise_multiplier * (1.0 + 1e-4))
        return plan

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
    def digest(self) -> str:
        """SHA-256 of the whole plan; equal plans have equal digests."""
        fields = {**asdict(self), "optimizer_class": type(self.optimizer).__name__}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()
