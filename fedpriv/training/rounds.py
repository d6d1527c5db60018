"""Training: the plan of a run, its private rounds, and the checkpoints between them.

A round asks, releases, steps the server and reports. A checkpoint is the server's state in one
file, bound to its plan and its ledger: released quantities only, and never a random state, so that
a resumed run draws fresh cohorts and fresh noise.
"""

import hashlib
import json
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedpriv.errors import (
    BudgetExceededError,
    CheckpointError,
    DeclinedError,
    InvalidValueError,
    StoppedError,
)
from fedpriv.ledger import ChargedRow, Head, Ledger
from fedpriv.ledger.events import (
    NeighbouringRelation,
    PrivacyBudget,
    Randomness,
    RoundEvent,
    Unit,
)
from fedpriv.privacy.clipping import UNCLIPPED, Clipping, Indicator
from fedpriv.privacy.correlated_noise import Strategy
from fedpriv.privacy.draws import RoundAttempt
from fedpriv.privacy.gaussian_mechanism import (
    CONTRIBUTORS,
    INDEPENDENT,
    Averaging,
    GaussianMechanism,
    Metric,
)
from fedpriv.privacy.layout import Layout, VectorGroup, check_partition
from fedpriv.privacy.noise import Entropy
from fedpriv.privacy.round import PartialSum, PrivacyRecords, Release, private_round
from fedpriv.privacy.sampling import Sampling
from fedpriv.support.checks import is_whole
from fedpriv.support.disk import write_atomically
from fedpriv.training.optimizers import (
    FedAvg,
    OptimizerState,
    Parameters,
    ServerOptimizer,
    stepped,
)
from fedpriv.training.post_processing import AdaptiveClipping, ControlVariates, RunningStatistics
from fedpriv.training.request import LocalTraining, Rates, RoundRequest, Transport

BATCH_NORM_METRIC = "batch-norm"  # the metric that moves running statistics
CONTRIBUTORS_METRIC = CONTRIBUTORS.name  # the count of users whose update counted
EVALUATION_PREFIX = "evaluation/"  # begins names of what users say of the model after a round
_MOST_RAISED = 1.01  # as a factor of calibrated noise, which rounding never makes miss by as much
_FORMAT = "fedpriv checkpoint 3"
_PARTS = ("parameters", "first", "second", "statistics", "control")  # of a checkpoint
_KEPT = 3  # checkpoints


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
    sampling: Sampling
    local: LocalTraining
    optimizer: ServerOptimizer = FedAvg()  # noqa: RUF009 - frozen, so sharing it is safe
    # Whatever else decides the result (model, data, loss, initial parameters), in words or as a
    # digest; it binds checkpoints to the plan.
    description: str = ""
    metrics: tuple[Metric, ...] = ()  # what is released beside the update
    metrics_share: float = 0.0  # of the round's privacy, for all metrics in equal parts
    contributors_share: float = 0.0  # likewise, for counting users whose update counts; 0: nobody
    adaptive: AdaptiveClipping | None = None  # how clipping norms move; None: they stay
    averaging: Averaging = Averaging()  # noqa: RUF009
    statistics: RunningStatistics | None = None  # how running statistics move, if they do
    strategy: Strategy = INDEPENDENT  # how noise is correlated over the rounds of a series

    def __post_init__(self) -> None:
        if not is_whole(self.rounds):
            legal = "a whole number of at least 1"
            raise InvalidValueError(f"rounds is {self.rounds}; it must be {legal}")
        if not self.run or "/" in self.run:
            raise InvalidValueError(f"run is {self.run!r}; it must be a name without '/'")
        check_partition(self.layout, self.groups)
        if not (0.0 < self.metrics_share < 1.0 if self.metrics else self.metrics_share == 0.0):
            found = f"metrics_share is {self.metrics_share} with {len(self.metrics)} metrics"
            raise InvalidValueError(f"{found}; it must be in (0, 1), or 0 if there are none")
        if not 0.0 <= self.contributors_share < 1.0:
            found = f"contributors_share is {self.contributors_share}"
            raise InvalidValueError(f"{found}; it must be in [0, 1)")
        if CONTRIBUTORS.name in (metric.name for metric in self.metrics):
            raise InvalidValueError(
                f"a metric is named {CONTRIBUTORS.name!r}; that name is taken by the count of "
                "users whose update counts, which contributors_share asks for"
            )
        if not self._update_share > 0.0:
            taken = f"{1.0 - self._update_share:g} of the round's privacy"
            found = f"metrics, control variates and the counting of the clipped take {taken}"
            raise InvalidValueError(f"{found}; they must leave some to the update")
        shapes = {metric.name: metric.shape for metric in self.metrics}
        found_shape = shapes.get(BATCH_NORM_METRIC)
        if self.statistics is not None and found_shape != self.statistics.shape:
            needed = f"a metric {BATCH_NORM_METRIC!r} of shape {self.statistics.shape}"
            found = f"the plan has {found_shape or 'none'}"
            raise InvalidValueError(f"running statistics move by {needed}; {found}")
        for number in range(1, self.rounds + 1) if self.optimizer.schedules else ():
            self.optimizer.at(number)  # learning rates out of range are refused here
        for number in range(1, self.rounds + 1) if self._local_schedules else ():
            self.local.at(number)
        if self.adaptive is not None and self.sampling.rounds > 1:
            raise InvalidValueError(
                f"clipping norms adapt and {self.sampling.event().policy} sampling charges "
                f"{self.sampling.rounds} rounds at once, by norms that stay; only one can be"
            )
        _ = self.mechanism  # groups, shares and sampling that do not fit are refused here

    @property
    def clipping_norms(self) -> tuple[float, ...]:
        """S_g of each group of the update before the first round."""
        return tuple(group.clipping_norm for group in self.groups)

    @property
    def reported(self) -> tuple[Metric, ...]:
        """What users report beside their update: metrics, and that they contribute, if asked."""
        return (*self.metrics, CONTRIBUTORS) if self.contributors_share else self.metrics

    @cached_property
    def mechanism(self) -> GaussianMechanism:
        """The mechanism of the first round."""
        return self._mechanism(self.clipping_norms)

    @property
    def event(self) -> RoundEvent:
        """What all rounds are charged as, if clipping norms stay: a last pass counts whole."""
        return replace(self.mechanism.event, count=-(-self.rounds // self.sampling.rounds))

    def mechanism_at(self, clipping_norms: tuple[float, ...]) -> GaussianMechanism:
        """The mechanism of a round with these clipping norms, at the plan's noise multiplier."""
        first = clipping_norms == self.clipping_norms
        return self.mechanism if first else self._mechanism(clipping_norms)

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
        plain = averaging.cap is None and averaging.floor is None
        weighted = () if plain else averaged
        layout = Layout(tuple(shapes), tuple(shapes.values()))
        clipping = Clipping(layout, tuple(groups), indicator, weighted, averaging.cap or 1)
        return GaussianMechanism.calibrated(
            self.sampling, clipping, self.noise_multiplier, self.shares, averaging, self.strategy
        )

    def within(self, budget: PrivacyBudget, spent: Sequence[RoundEvent] = ()) -> "TrainingPlan":
        """The plan with the noise raised until all rounds fit beside what was spent.

        Rounding may make a plan that was calibrated to the budget miss it. InvalidValueError where
        that is not why, as if it was calibrated for another number of users.
        """

        def louder(plan: TrainingPlan, factor: float) -> TrainingPlan:
            return replace(plan, noise_multiplier=plan.noise_multiplier * factor)

        def fits(plan: TrainingPlan) -> bool:
            return budget.admits([*spent, plan.event])

        plan = self
        if not fits(plan) and not fits(louder(plan, _MOST_RAISED)):
            cost = budget.epsilon_of([*spent, plan.event])
            raise InvalidValueError(
                f"noise_multiplier is {plan.noise_multiplier:.6g}, at which all rounds with N = "
                f"{plan.sampling.population} cost ε = {cost:.4g}, not the {budget.epsilon} that it "
                "was calibrated for; calibrate must be given the same users and rounds"
            )
        while not fits(plan):
            plan = louder(plan, 1.0 + 1e-4)
        return plan

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """ω of every vector group of a round: of the update, control, metrics, the indicator."""
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
        """What users send beside their update, if the local algorithm has them do so."""
        return self.local.control

    @property
    def _local_schedules(self) -> tuple[Rates, ...]:
        rate = self.local.learning_rate
        return (rate,) if isinstance(rate, Rates) else ()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the whole plan; equal plans have equal digests."""
        parts = (self.optimizer, *self.optimizer.schedules.values(), *self._local_schedules)
        kinds = " ".join(type(part).__name__ for part in parts)
        fields = {**asdict(self), "optimizer_class": kinds}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"), default=_unwritable)
        return hashlib.sha256(text.encode()).hexdigest()


def _unwritable(value: object) -> NoReturn:
    raise InvalidValueError(
        f"the plan has a value of the type {type(value).__name__}, which cannot be written down; "
        "local training, optimisers and schedules must be frozen dataclasses of numbers and texts"
    )


@dataclass(frozen=True)
class ServerState:
    """What the server carries from round to round; all of it was released."""

    round: int  # the last that was released, from 1; 0 before the first
    parameters: Parameters  # in the order of the plan's layout
    optimizer: OptimizerState
    clipping_norms: tuple[float, ...]  # S_g of each group of the update in the next round
    statistics: Parameters = field(default_factory=dict)  # running statistics, by name
    control: Parameters = field(default_factory=dict)  # control variates, by parameter

    @property
    def model(self) -> Parameters:
        """All tensors of the model that training has moved: parameters and running statistics."""
        return {**self.parameters, **self.statistics}


class Stop(StrEnum):
    """Why training ended."""

    ROUNDS = "all rounds were run"
    BUDGET = "the next round would pass the privacy budget"
    ASKED = "it was asked to stop"
    DECLINED = "too few nodes agreed to the next round"
    TOO_FEW = "too few users count"

    @property
    def may_go_on(self) -> bool:
        """Whether more rounds may follow, if somebody resumes the run."""
        return self in (Stop.ASKED, Stop.DECLINED, Stop.TOO_FEW)


@dataclass(frozen=True)
class RoundResult:
    """What one round released and what it cost: a line of the metrics; callbacks are given it.

    Among the metrics, `contributors` is a count, of users of the cohort whose update counted, and
    those that begin with `evaluation/` are of the model after the round.
    All of it may be published but for `simulation_only_seconds`, the wall time of the round in a
    simulation, which depends on who took part. Nothing else depends on users but through the noise.
    """

    run: str
    rounds: int  # T, how many are planned
    round: int  # from 1
    attempt: int  # which attempt at the round succeeded, from 0
    charge: str  # hash of the round's charge
    epsilon: float  # of all charges of the ledger so far, at `delta`
    delta: float
    expected_cohort_size: float  # a public constant, by which averages divide
    clipping_norms: Mapping[str, float]  # by vector group
    # By vector group, the noised fraction of users that were not clipped, if clipping is adaptive.
    unclipped: Mapping[str, float] = field(default_factory=dict)
    # Private averages by name, at the model before the round, and the noise in each component.
    metrics: Mapping[str, object] = field(default_factory=dict)
    metrics_noise_stddev: Mapping[str, float] = field(default_factory=dict)
    loss: float | None = None  # of the new model on held-out rows, where it was evaluated
    accuracy: float | None = None  # likewise
    figures: Mapping[str, float] = field(default_factory=dict)  # likewise, those of the task
    # Likewise, if held-out rows have users, none of whom is enrolled: by figure, loss and accuracy
    # included, the number of `users`, their `mean`, and the quantiles `q10`, `q50` and `q90`.
    held_out_users: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    simulation_only_seconds: float | None = None
    unit: Unit = Unit.USER  # what (ε, δ) protects
    relation: NeighbouringRelation = NeighbouringRelation.ADD_OR_REMOVE_ONE  # what it compares
    # The weakest of all charges so far; if seeded, no ε holds against those who know the seed.
    randomness: Randomness = Randomness.OPERATING_SYSTEM

    @property
    def scalar_metrics(self) -> dict[str, float]:
        """The metrics that are one number."""
        return {n: float(v) for n, v in self.metrics.items() if isinstance(v, int | float)}

    @property
    def scalars(self) -> dict[str, float]:
        """Every released number by name, as experiment trackers take it; no vectors.

        >>> result = RoundResult("run", 9, 1, 0, "5f", 0.25, 1e-5, 8.0, {"u": 0.5}, accuracy=0.9)
        >>> result.scalars
        {'test/accuracy': 0.9, 'privacy/epsilon': 0.25, 'clipping_norm/u': 0.5}
        """
        own = {"test/loss": self.loss, "test/accuracy": self.accuracy}
        released = {name: value for name, value in own.items() if value is not None}
        released |= {f"test/{name}": value for name, value in self.figures.items()}
        for name, over in self.held_out_users.items():
            told = {key: value for key, value in over.items() if key != "users"}
            released |= {f"held_out_users/{name}/{key}": value for key, value in told.items()}
        released["privacy/epsilon"] = self.epsilon
        released |= {f"clipping_norm/{name}": norm for name, norm in self.clipping_norms.items()}
        released |= {f"unclipped/{name}": share for name, share in self.unclipped.items()}
        return released | {f"metric/{name}": value for name, value in self.scalar_metrics.items()}

    @property
    def measured(self) -> str:
        """How good the model is on held-out rows, for people to read; "" if that is unknown."""
        if self.accuracy is not None:
            return f"accuracy {self.accuracy:.2%}"
        return "" if self.loss is None else f"loss {self.loss:.4g}"

    @property
    def metrics_text(self) -> tuple[str, ...]:
        """The metrics that are one number, each with its noise, for people to read.

        Not the count of contributors, which `Contributors` averages over rounds.
        """
        return tuple(
            f"{name} {value:.3g} ± {self.metrics_noise_stddev[name]:.2g}"
            for name, value in self.scalar_metrics.items()
            if name != CONTRIBUTORS_METRIC
        )


def best_round(results: Iterable[RoundResult]) -> RoundResult | None:
    """The round with the best model on held-out rows, by accuracy, or by loss without classes.

    Of equals it is the first; None if no model was measured. To choose is post-processing of what
    all rounds released, so it costs what they cost together.
    """

    def score(result: RoundResult) -> float:
        value = result.accuracy
        if value is None:
            value = math.nan if result.loss is None else -result.loss
        return value if math.isfinite(value) else -math.inf

    best = max(results, key=score, default=None)
    return None if best is None or score(best) == -math.inf else best


OnRound = Callable[[RoundResult], object]  # called after each round; its result is not read
# Called with what a round released, before anything is made of it: mechanism, round, release.
OnRelease = Callable[[GaussianMechanism, int, Release], object]


def initial_state(
    plan: TrainingPlan, parameters: Parameters, statistics: Parameters | None = None
) -> ServerState:
    """State before the first round, with the model's parameters and running statistics."""
    statistics = dict(statistics or {})
    if plan.statistics is not None:
        plan.statistics.check(statistics)
    tensors = plan.layout.unflatten(plan.layout.flatten(parameters))
    ordered = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    control = {name: np.zeros_like(p) for name, p in ordered.items()} if plan.control else {}
    moments = plan.optimizer.init(ordered)
    return ServerState(0, ordered, moments, plan.clipping_norms, statistics, control)


def train(
    plan: TrainingPlan,
    state: ServerState,
    transport: Transport,
    records: PrivacyRecords,
    entropy: Entropy,
    on_release: OnRelease = lambda *_: None,
) -> Generator[tuple[ServerState, RoundResult], None, Stop]:
    """Run rounds from `state` to the end of the plan, yielding state and result after each.

    Each round has the guarantees of `private_round`. Training stops *before* the budget would be
    passed, when the transport was asked to stop, or when too few nodes agreed to the round; only a
    round that was drawn is charged then. The generator returns why training ended.
    """
    while state.round < plan.rounds:
        try:
            state, result = _one_round(plan, state, transport, records, entropy, on_release)
        except BudgetExceededError:
            return Stop.BUDGET
        except StoppedError:
            return Stop.ASKED
        except DeclinedError:
            return Stop.DECLINED
        yield state, result
    return Stop.ROUNDS


def _one_round(
    plan: TrainingPlan,
    state: ServerState,
    transport: Transport,
    records: PrivacyRecords,
    entropy: Entropy,
    on_release: OnRelease,
) -> tuple[ServerState, RoundResult]:
    """Return the state after the next round, and its result."""

    def prepare(at: RoundAttempt) -> None:
        transport.prepare(request_to_nobody(plan, state, at))

    def collect(at: RoundAttempt, users: npt.NDArray[np.int64]) -> Iterator[PartialSum]:
        return transport.collect(round_request(plan, state, at, users, entropy))

    mechanism = plan.mechanism_at(state.clipping_norms)
    number = state.round + 1
    release = private_round(mechanism, plan.run, number, collect, records, entropy, prepare)
    on_release(mechanism, number, release)
    epsilon = records.ledger.epsilon(records.budget)
    after, result = close_round(plan, state, release, epsilon, records.budget.delta)
    return after, replace(result, randomness=records.ledger.randomness)


def round_request(
    plan: TrainingPlan,
    state: ServerState,
    at: RoundAttempt,
    users: npt.NDArray[np.int64],
    entropy: Entropy,
) -> RoundRequest:
    """What an attempt at the next round asks of the users of its cohort."""
    asked = request_to_nobody(plan, state, at)
    return replace(asked, users=users, local_key=entropy.key(at.purpose("local")))


def request_to_nobody(plan: TrainingPlan, state: ServerState, at: RoundAttempt) -> RoundRequest:
    """What a round asks, whoever is drawn."""
    return RoundRequest(
        run=at.run,
        round=at.round,
        attempt=at.attempt,
        parameters=state.parameters,
        clipping=plan.mechanism_at(state.clipping_norms).clipping,
        local=plan.local.at(at.round),
        users=np.empty(0, np.int64),
        local_key=bytes(32),
        metrics=plan.reported,
        statistics=state.statistics,
        control=state.control,
    )


def close_round(
    plan: TrainingPlan, state: ServerState, release: Release, epsilon: float, delta: float
) -> tuple[ServerState, RoundResult]:
    """Step the server by what a round released, and only then move clipping norms: post-processing.

    The round was opened with `state`; all charges so far cost (`epsilon`, `delta`).
    """
    mechanism = plan.mechanism_at(state.clipping_norms)
    query, noise = mechanism.query, mechanism.tensor_stddevs
    tensors = query.clipping.layout.unflatten(release.average)
    update = {name: tensors[name] for name in plan.layout.names}
    stepping = plan.optimizer.at(state.round + 1)
    parameters, optimizer = stepped(stepping, update, state.optimizer, state.parameters)
    norms, unclipped = state.clipping_norms, tuple[float, ...]()
    if plan.adaptive is not None:
        unclipped = tuple(float(half) + 0.5 for half in tensors[UNCLIPPED])
        norms = tuple(map(plan.adaptive.step, norms, unclipped))
    metrics = {metric.name: tensors[metric.tensor] + metric.centre for metric in plan.metrics}
    stddevs = {metric.name: noise[metric.tensor] for metric in plan.metrics}
    if plan.contributors_share:  # a count: the constant that it was divided by is public
        name, tensor, users = CONTRIBUTORS.name, CONTRIBUTORS.tensor, query.denominator
        metrics[name], stddevs[name] = users * tensors[tensor], users * noise[tensor]
    statistics = state.statistics
    if plan.statistics is not None:
        statistics = plan.statistics.moved(statistics, metrics[BATCH_NORM_METRIC])
    control = plan.control.updated(state.control, tensors) if plan.control else state.control
    names = [group.name for group in plan.groups]
    result = RoundResult(
        run=plan.run,
        rounds=plan.rounds,
        round=state.round + 1,
        attempt=release.attempt,
        charge=release.charge_hash,
        epsilon=epsilon,
        delta=delta,
        expected_cohort_size=plan.sampling.expected_cohort_size,
        clipping_norms=dict(zip(names, state.clipping_norms, strict=True)),
        unclipped=dict(zip(names, unclipped, strict=False)),
        metrics={name: value.tolist() for name, value in metrics.items()},
        metrics_noise_stddev=stddevs,
        unit=plan.sampling.unit,
        relation=plan.sampling.event().relation,
    )
    after = ServerState(state.round + 1, parameters, optimizer, norms, statistics, control)
    return after, result


@dataclass(frozen=True)
class Checkpoint:
    """A server state, with the plan and the point of the ledger that it belongs to."""

    state: ServerState
    plan_digest: str
    ledger_head: Head


def save_checkpoint(folder: Path, checkpoint: Checkpoint, best: Checkpoint | None = None) -> Path:
    """Write `round-NNNNNN.safetensors`, named by its last round, atomically.

    The last 3 are kept, and `best`, which is written too if it is not there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = kept = _path_of(folder, checkpoint)
    if best is not None and not (kept := _path_of(folder, best)).exists() and kept != path:
        _write(kept, best)
    _write(path, checkpoint)
    for old in checkpoints(folder)[:-_KEPT]:
        if old != kept:
            old.unlink(missing_ok=True)
    return path


def _path_of(folder: Path, checkpoint: Checkpoint) -> Path:
    return folder / f"round-{checkpoint.state.round:06d}.safetensors"


def _write(path: Path, checkpoint: Checkpoint) -> None:
    state, head = checkpoint.state, checkpoint.ledger_head
    moments = (state.optimizer.first, state.optimizer.second)
    kept = (state.parameters, *moments, state.statistics, state.control)
    tensors = {
        f"{part}/{name}": np.asarray(tensor, order="C")
        for part, named in zip(_PARTS, kept, strict=True)
        for name, tensor in named.items()
    }
    metadata = {
        "format": _FORMAT,
        "round": str(state.round),
        "plan_digest": checkpoint.plan_digest,
        "ledger_count": str(head.count),
        "ledger_hash": head.hash,
        "clipping_norms": " ".join(map(repr, state.clipping_norms)),
    }
    metadata["digest"] = _digest(metadata, tensors)
    write_atomically(path, save(tensors, metadata))


def evaluation_run(run: str) -> str:
    """Under which name a ledger has what users are asked of the models of a run."""
    return f"{run}-evaluation"


def own_charges(run: str, charges: Iterable[ChargedRow]) -> list[ChargedRow]:
    """All that a run charged: its rounds, and what users said of its models."""
    return [row for row in charges if row.run in (run, evaluation_run(run))]


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints of a folder, oldest first."""
    found = folder.glob("round-*.safetensors")
    return sorted(found, key=lambda path: (len(path.name), path.name))  # of a million rounds too


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; CheckpointError if it is absent, damaged or of another format."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if (found := metadata.get("format")) != _FORMAT:
                raise CheckpointError(f"{path} has format {found!r}; it must be {_FORMAT!r}")
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}") from error
    if metadata.pop("digest", None) != _digest(metadata, tensors):
        how = "delete it to resume from the checkpoint before it"
        raise CheckpointError(f"{path} is damaged; {how}")
    parts: dict[str, dict[str, np.ndarray]] = {part: {} for part in _PARTS}
    for key, tensor in tensors.items():
        part, _, name = key.partition("/")
        parts[part][name] = tensor
    parameters, first, second, statistics, control = parts.values()
    norms = tuple(map(float, metadata["clipping_norms"].split()))
    moments = OptimizerState(first, second)
    state = ServerState(int(metadata["round"]), parameters, moments, norms, statistics, control)
    head = Head(int(metadata["ledger_count"]), metadata["ledger_hash"])
    return Checkpoint(state, metadata["plan_digest"], head)


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps(dict(sorted(metadata.items()))).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, tensor.dtype.str, tensor.shape]).encode())
        digest.update(tensor.data)
    return digest.hexdigest()


def resume(path: Path, plan: TrainingPlan, ledger: Ledger) -> ServerState:
    """State to resume from; CheckpointError if it is another plan's or the ledger lacks charges."""
    checkpoint = load_checkpoint(path)
    if checkpoint.plan_digest != plan.digest:
        found = f"{path} belongs to plan {checkpoint.plan_digest[:12]}, not to {plan.digest[:12]}"
        raise CheckpointError(f"{found}; a run can only be resumed with the plan it began with")
    if not ledger.contains_head(checkpoint.ledger_head):
        found = f"{checkpoint.ledger_head.count} charges that the ledger does not hold"
        legal = "a run can only be resumed with its own, complete ledger"
        raise CheckpointError(f"{path} has seen {found}; {legal}")
    state, names = checkpoint.state, plan.layout.names
    parameters = {name: state.parameters[name] for name in names}
    control = {name: state.control[name] for name in names} if plan.control else {}
    return replace(state, parameters=parameters, control=control)
