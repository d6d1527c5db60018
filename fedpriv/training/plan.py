"""The plan of a training run, and optional post-processing.

A plan states everything that determines a run: rounds, sampling, clipping, noise, local training
and the server's optimiser. Clipping norms and the running statistics of batch normalisations may
move after a release; both are post-processing of released numbers.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import NoReturn

import numpy as np

from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import PrivacyBudget, RoundEvent, SecureSum
from fedpriv.privacy.clipping import Clipping, Indicator
from fedpriv.privacy.correlated_noise import Strategy
from fedpriv.privacy.gaussian_mechanism import (
    CONTRIBUTORS,
    INDEPENDENT,
    Averaging,
    GaussianMechanism,
    Metric,
)
from fedpriv.privacy.layout import FloatVector, Layout, VectorGroup, check_partition
from fedpriv.privacy.sampling import Sampling
from fedpriv.support.checks import check_ranges, epsilon_up, hold_numbers, require, text_down
from fedpriv.training.optimizers import FedAvg, Parameters, ServerOptimizer, schedules_of
from fedpriv.training.request import ControlVariates, LocalTraining

BATCH_NORM_METRIC = "batch-norm"  # the metric that moves running statistics
_MOST_RAISED = 1.01  # factor of calibrated noise; rounding makes it miss the budget by less
_SMALLEST_NORM, _LARGEST_NORM = 1e-12, 1e12
_MOST_CHANGE = 4.0  # largest factor by which a round changes a variance, for any noise
_LARGEST_MEAN, _LARGEST_VARIANCE = 1e15, 1e30


@dataclass(frozen=True)
class AdaptiveClipping:
    """Moves each clipping norm so that a fraction of users, the quantile, is not clipped.

    After a round with norm S and private fraction b of unclipped users, the next norm is
    S·exp(−η·(b − γ)) (Andrew et al. 2019, Algorithm 1). The round itself clips and adds noise with
    the norm before it moves.
    """

    quantile: float = 0.5  # γ in (0, 1)
    learning_rate: float = 0.2  # η in (0, 10]; a round changes a norm by at most about e^η
    share: float = 0.02  # ω in (0, 1), share of the round's privacy that counts clipped users

    def __post_init__(self) -> None:
        hold_numbers(self)
        ranges = {"quantile": "(0, 1)", "share": "(0, 1)", "learning_rate": "(0, 10]"}
        check_ranges(self, " of adaptive clipping", **ranges)

    def step(self, norm: float, unclipped: float) -> float:
        """Return the next clipping norm, from the noised fraction of unclipped users.

        A fraction outside [0, 1] is moved to the nearer end.
        """
        fraction = min(max(unclipped, 0.0), 1.0)
        next_norm = norm * math.exp(-self.learning_rate * (fraction - self.quantile))
        return min(max(next_norm, _SMALLEST_NORM), _LARGEST_NORM)


@dataclass(frozen=True)
class RunningStatistics:
    """The server's update rule for running statistics of batch normalisation.

    With x̂ = (x − μ)/s and s² = v + eps, the metric is the average over users of a = mean x̂ and
    b = mean x̂² − 1, per channel. The moments about the running mean move by a share β, the
    momentum, to m₁ = β·a and m₂ = 1 + β·b. Therefore s·m₁ is added to μ, and s² is multiplied by
    m₂ − m₁². If all users' moments equal the running statistics, a = b = 0 and nothing moves. All
    of this is post-processing of released numbers.
    """

    layers: tuple[str, ...]  # names, in the order of the model
    channels: tuple[int, ...]  # of each layer
    eps: tuple[float, ...]  # ≥ 0, of each layer
    momentum: float = 0.1  # β in (0, 1]

    def __post_init__(self) -> None:
        check_ranges(self, " of running statistics", momentum="(0, 1]")

    @property
    def shape(self) -> tuple[int]:
        """Shape of the metric, which holds a and then b of all channels, layer by layer."""
        return (2 * sum(self.channels),)

    def moved(self, statistics: Parameters, released: FloatVector) -> dict[str, np.ndarray]:
        """Return the statistics after a round, by name, given the released metric [2ΣC].

        Guarantees for any released vector: means are finite, and variances are finite and not
        negative; s² changes by a factor of at least 1/4 and at most 4.
        """
        moved, start = dict[str, np.ndarray](), 0
        for layer, channels, eps in zip(self.layers, self.channels, self.eps, strict=True):
            first, second = released[start : start + 2 * channels].reshape(2, channels)
            start += 2 * channels
            mean_name, var_name = _names(layer)
            square = statistics[var_name].astype(np.float64) + eps
            m1, m2 = self.momentum * first, 1.0 + self.momentum * second
            mean = statistics[mean_name] + np.sqrt(square) * m1
            var = square * np.clip(m2 - m1**2, 1.0 / _MOST_CHANGE, _MOST_CHANGE) - eps
            moved[mean_name] = np.clip(mean, -_LARGEST_MEAN, _LARGEST_MEAN).astype(np.float32)
            moved[var_name] = np.clip(var, 0.0, _LARGEST_VARIANCE).astype(np.float32)
        return moved

    def check(self, statistics: Mapping[str, np.ndarray]) -> None:
        """Raise InvalidValueError unless the statistics are those of exactly these layers."""
        sizes = zip(self.layers, self.channels, strict=True)
        expected = {name: (size,) for layer, size in sizes for name in _names(layer)}
        shapes = {name: tensor.shape for name, tensor in statistics.items()}
        require(shapes == expected, f"running statistics are {shapes}; they must be {expected}")


def _names(layer: str) -> tuple[str, str]:
    prefix = f"{layer}." if layer else ""
    return f"{prefix}running_mean", f"{prefix}running_var"


@dataclass(frozen=True)
class TrainingPlan:
    """The model, users, number of rounds and mechanism of a training run."""

    run: str  # name in the ledger
    population: str  # name of the enrolled population, as in the ledger
    rounds: int  # T ≥ 1
    layout: Layout  # of the trained tensors
    groups: tuple[VectorGroup, ...]  # a partition of the layout, with the initial clipping norms
    noise_shares: tuple[float, ...]  # ω_g of each group, of the privacy that goes to the update
    noise_multiplier: float  # z ≥ 0 of the whole round
    sampling: Sampling
    local: LocalTraining
    optimizer: ServerOptimizer = FedAvg()  # noqa: RUF009 - frozen, so sharing it is safe
    # Everything else that determines the result (model, data, loss, initial parameters), in words
    # or as a digest; it binds checkpoints to the plan.
    description: str = ""
    metrics: tuple[Metric, ...] = ()  # released with the update
    metrics_share: float = 0.0  # of the round's privacy, split equally among all metrics
    contributors_share: float = 0.0  # of the round's privacy, to count contributors; 0: no count
    adaptive: AdaptiveClipping | None = None  # moves clipping norms; None: they are constant
    averaging: Averaging = Averaging()  # noqa: RUF009
    statistics: RunningStatistics | None = None  # moves running statistics, if there are any
    strategy: Strategy = INDEPENDENT  # correlates noise over the rounds of a series
    secure_sum: SecureSum | None = None  # set if the server need not be trusted
    simulated_dropout: float = 0.0  # probability that a simulated node drops out of a round

    def __post_init__(self) -> None:
        check_ranges(self, rounds="whole", contributors_share="[0, 1)")
        if not self.run or "/" in self.run:
            raise InvalidValueError(f"run is {self.run!r}; it must be a name without '/'")
        check_partition(self.layout, self.groups)
        if not (0.0 < self.metrics_share < 1.0 if self.metrics else self.metrics_share == 0.0):
            problem = f"metrics_share is {self.metrics_share} with {len(self.metrics)} metrics"
            raise InvalidValueError(f"{problem}; it must be in (0, 1), or 0 if there are none")
        if CONTRIBUTORS.name in (metric.name for metric in self.metrics):
            raise InvalidValueError(
                f"a metric is named {CONTRIBUTORS.name!r}; that name is reserved for the count of "
                "users whose update counts, which contributors_share enables"
            )
        if not self._update_share > 0.0:
            share = f"{1.0 - self._update_share:g} of the round's privacy"
            problem = f"metrics, control variates and counts of clipped users take {share}"
            raise InvalidValueError(f"{problem}; they must leave some to the update")
        shapes = {metric.name: metric.shape for metric in self.metrics}
        metric_shape = shapes.get(BATCH_NORM_METRIC)
        if self.statistics is not None and metric_shape != self.statistics.shape:
            required = f"a metric {BATCH_NORM_METRIC!r} of shape {self.statistics.shape}"
            problem = f"the plan has {metric_shape or 'none'}"
            raise InvalidValueError(f"running statistics move by {required}; {problem}")
        for settings in (self.optimizer, self.local):
            for number in range(1, self.rounds + 1) if schedules_of(settings) else ():
                settings.at(number)  # raises if a learning rate is out of range
        if self.adaptive is not None and self.sampling.rounds > 1:
            raise InvalidValueError(
                f"clipping norms adapt and {self.sampling.event().policy} sampling charges "
                f"{self.sampling.rounds} rounds at once, at constant norms; they exclude each other"
            )
        _ = self.mechanism  # raises if groups, shares and sampling do not match

    @property
    def clipping_norms(self) -> tuple[float, ...]:
        """S_g of each group of the update before the first round."""
        return tuple(group.clipping_norm for group in self.groups)

    @property
    def mean_after(self) -> int:
        """The round after which models are averaged: the last third of all rounds."""
        return self.rounds - self.rounds // 3

    @property
    def reported(self) -> tuple[Metric, ...]:
        """The metrics that users report, including the count of contributors if it has a share."""
        return (*self.metrics, CONTRIBUTORS) if self.contributors_share else self.metrics

    @cached_property
    def mechanism(self) -> GaussianMechanism:
        """The mechanism of the first round."""
        return self._mechanism(self.clipping_norms)

    @property
    def event(self) -> RoundEvent:
        """The event of all rounds together, if clipping norms are constant.

        A pass or series of rounds that is cut short at the end is charged in full.
        """
        return replace(self.mechanism.event, count=-(-self.rounds // self.sampling.rounds))

    def mechanism_at(self, clipping_norms: tuple[float, ...]) -> GaussianMechanism:
        """Return the mechanism for these clipping norms, with the plan's noise multiplier."""
        is_first = clipping_norms == self.clipping_norms
        return self.mechanism if is_first else self._mechanism(clipping_norms)

    def _mechanism(self, clipping_norms: tuple[float, ...]) -> GaussianMechanism:
        pairs = zip(self.groups, clipping_norms, strict=True)
        groups = [replace(group, clipping_norm=norm) for group, norm in pairs]
        shapes = dict(zip(self.layout.names, self.layout.shapes, strict=True))
        if self.control is not None:
            groups.append(self.control.group(self.layout))
            shapes |= dict(zip(groups[-1].tensors, self.layout.shapes, strict=True))
        averaged = tuple(group.name for group in groups)
        groups += [metric.group for metric in self.reported]
        shapes |= {metric.tensor: metric.shape for metric in self.reported}
        indicator = Indicator.of(self.groups) if self.adaptive else None
        if indicator is not None:
            groups.append(indicator.group)
            shapes[indicator.tensor] = (len(indicator.groups),)
        averaging = self.averaging
        is_plain = averaging.cap is None and averaging.floor is None
        weighted = () if is_plain else averaged
        layout = Layout(tuple(shapes), tuple(shapes.values()))
        clipping = Clipping(layout, tuple(groups), indicator, weighted, averaging.cap or 1)
        kind = averaging, self.strategy, self.secure_sum
        return GaussianMechanism.calibrated(
            self.sampling, clipping, self.noise_multiplier, self.shares, *kind
        )

    def within(self, budget: PrivacyBudget, spent: Sequence[RoundEvent] = ()) -> "TrainingPlan":
        """Return the plan with just enough more noise that all rounds fit the unspent budget.

        A plan that was calibrated to the budget may miss it by rounding. InvalidValueError: it
        misses the budget by more, for example because it was calibrated for other users.
        """

        def louder(plan: TrainingPlan, factor: float) -> TrainingPlan:
            return replace(plan, noise_multiplier=plan.noise_multiplier * factor)

        def fits(plan: TrainingPlan) -> bool:
            return budget.admits([*spent, plan.event])

        plan = self
        if not fits(plan) and not fits(louder(plan, _MOST_RAISED)):
            cost = budget.epsilon_of([*spent, plan.event])
            raise InvalidValueError(
                f"noise_multiplier is {text_down(plan.noise_multiplier)}, at which all rounds with "
                f"N = {plan.sampling.population} cost ε = {epsilon_up(cost)}, not the "
                f"{budget.epsilon} that it was calibrated for; calibrate must be given the same "
                "users and rounds"
            )
        while not fits(plan):
            plan = louder(plan, 1.0 + 1e-4)
        return plan

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """ω of each vector group of a round: update, control variates, metrics and indicator."""
        metrics = (self.metrics_share / max(1, len(self.metrics)),) * len(self.metrics)
        contributors = (self.contributors_share,) if self.contributors_share else ()
        counting = (*contributors, *((self.adaptive.share,) if self.adaptive else ()))
        control = (self.control.share,) if self.control else ()
        update = (self._update_share * share for share in self.noise_shares)
        return (*update, *control, *metrics, *counting)

    @property
    def _update_share(self) -> float:
        counting = self.contributors_share + (self.adaptive.share if self.adaptive else 0.0)
        return 1.0 - self.metrics_share - counting - (self.control.share if self.control else 0.0)

    @property
    def control(self) -> ControlVariates | None:
        """The control variates that users send with their update, or None."""
        return self.local.control

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the whole plan; equal plans have equal digests."""
        schedules = (*schedules_of(self.optimizer).values(), *schedules_of(self.local).values())
        kinds = " ".join(type(part).__name__ for part in (self.optimizer, *schedules))
        fields = {**asdict(self), "optimizer_class": kinds}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=_unwritable)
        return hashlib.sha256(text.encode()).hexdigest()


def _unwritable(value: object) -> NoReturn:
    raise InvalidValueError(
        f"the plan has a value of the type {type(value).__name__}, which cannot be written down; "
        "local training, optimisers and schedules must be frozen dataclasses of numbers and texts"
    )
