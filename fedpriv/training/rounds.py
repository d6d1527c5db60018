"""Training: the private rounds of a plan, and checkpoints between them.

A round asks users, releases, steps the server and reports. A checkpoint is the server's state in
one file, bound to its plan and its ledger. It holds only released numbers and no random state, so a
resumed run draws fresh cohorts and fresh noise.
"""

import hashlib
import json
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import reduce
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedpriv.errors import BudgetExceededError, CheckpointError, DeclinedError, StoppedError
from fedpriv.ledger import ChargedRow, Head, Ledger
from fedpriv.ledger.events import NeighbouringRelation, Randomness, SamplingEvent, Unit
from fedpriv.privacy.clipping import UNCLIPPED
from fedpriv.privacy.gaussian_mechanism import CONTRIBUTORS, GaussianMechanism
from fedpriv.privacy.noise import Entropy
from fedpriv.privacy.round import (
    OpenedSum,
    PartialSum,
    PrivacyRecords,
    Release,
    RoundAttempt,
    private_round,
    secure_round,
)
from fedpriv.support.disk import write_atomically
from fedpriv.training.optimizers import OptimizerState, Parameters, stepped
from fedpriv.training.plan import BATCH_NORM_METRIC, TrainingPlan
from fedpriv.training.request import RoundRequest, Transport

CONTRIBUTORS_METRIC = CONTRIBUTORS.name  # number of users whose update counted
_SURE = 3.0  # standard deviations
_NEAR = 0.1  # of the expected number; smaller differences are not reported
EVALUATION_PREFIX = "evaluation/"  # of users' metrics of the model after a round
_FORMAT = "fedpriv checkpoint 4"
_PARTS = ("parameters", "first", "second", "statistics", "control", "mean")  # of a checkpoint
_KEPT = 3  # checkpoints
_MOST_VOID = 3  # void attempts at a round before the run stops; each is charged


@dataclass(frozen=True)
class ServerState:
    """The server's state between two rounds; all of it was released."""

    round: int  # the last released round, from 1; 0 before the first
    parameters: Parameters  # in the order of the plan's layout
    optimizer: OptimizerState
    clipping_norms: tuple[float, ...]  # S_g of each group of the update in the next round
    statistics: Parameters = field(default_factory=dict)  # running statistics, by name
    control: Parameters = field(default_factory=dict)  # control variates, by parameter
    # Mean of the models of the last third of the planned rounds so far; empty before.
    mean: Parameters = field(default_factory=dict)

    @property
    def model(self) -> Parameters:
        """All tensors that training changes, by name: parameters and running statistics."""
        return {**self.parameters, **self.statistics}

    def averaged(self, plan: TrainingPlan) -> Self:
        """Return the state with its model added to the mean, in the last third of the plan.

        The mean is post-processing of releases. It cancels part of their noise (Polyak & Juditsky
        1992; De et al. 2022, arXiv:2204.13650, section 3).
        """
        if (number := self.round - plan.mean_after) < 1:
            return self
        mean = {n: m + (self.model[n] - m) / np.float32(number) for n, m in self.mean.items()}
        return replace(self, mean=mean or self.model)


class Stop(StrEnum):
    """Why training ended."""

    ROUNDS = "all rounds were run"
    BUDGET = "the next round would pass the privacy budget"
    ASKED = "it was asked to stop"
    DECLINED = "too few nodes agreed to the next round"
    TOO_FEW = "too few users count"

    @property
    def may_go_on(self) -> bool:
        """True if more rounds may follow when the run is resumed."""
        return self in (Stop.ASKED, Stop.DECLINED, Stop.TOO_FEW)


@dataclass(frozen=True)
class RoundResult:
    """The release of one round and its cost, as written to the metrics and passed to trackers.

    Among the metrics, `contributors` is the count of users in the cohort whose update counted, and
    metrics whose names begin with `evaluation/` measure the model after the round.
    All fields may be published except `simulation_only_seconds`, the wall time of the round in a
    simulation, which depends on who took part. All others depend on users only through noised
    releases.
    """

    run: str
    rounds: int  # T, the planned number of rounds
    round: int  # from 1
    attempt: int  # the attempt at the round that succeeded, from 0
    charge: str  # hash of the round's charge
    epsilon: float  # of all charges of the ledger so far, at `delta`
    delta: float
    expected_cohort_size: float  # a public constant, the divisor of averages
    clipping_norms: Mapping[str, float]  # by vector group
    # By vector group, the noised fraction of users that were not clipped, if clipping is adaptive.
    unclipped: Mapping[str, float] = field(default_factory=dict)
    # Private averages by name, of the model before the round, and the noise in each component.
    metrics: Mapping[str, object] = field(default_factory=dict)
    metrics_noise_stddev: Mapping[str, float] = field(default_factory=dict)
    loss: float | None = None  # of the new model on held-out rows; None if it was not evaluated
    accuracy: float | None = None  # likewise
    figures: Mapping[str, float] = field(default_factory=dict)  # the task's figures, likewise
    # If held-out rows have users, who are never enrolled: for each figure, and for loss and
    # accuracy, the number of `users`, their `mean`, and the quantiles `q10`, `q50` and `q90`.
    held_out_users: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    simulation_only_seconds: float | None = None
    unit: Unit = Unit.USER  # the unit that (ε, δ) protects
    # The relation between the two populations that (ε, δ) compares.
    relation: NeighbouringRelation = NeighbouringRelation.ADD_OR_REMOVE_ONE
    # N' of a projection: `epsilon` is the cost as if N' users were enrolled; no enrolled user has
    # that guarantee. None: `epsilon` is the enrolled users' guarantee.
    as_if: int | None = None
    # The weakest of all charges so far; if seeded, no ε holds against anyone who knows the seed.
    randomness: Randomness = Randomness.OPERATING_SYSTEM

    @property
    def scalar_metrics(self) -> dict[str, float]:
        """The metrics that are a single number, by name."""
        return {n: float(v) for n, v in self.metrics.items() if isinstance(v, int | float)}

    @property
    def scalars(self) -> dict[str, float]:
        """All released numbers by name, without vectors, for experiment trackers.

        >>> result = RoundResult("run", 9, 1, 0, "5f", 0.25, 1e-5, 8.0, {"u": 0.5}, accuracy=0.9)
        >>> result.scalars
        {'test/accuracy': 0.9, 'privacy/epsilon': 0.25, 'clipping_norm/u': 0.5}
        """
        measures = {"test/loss": self.loss, "test/accuracy": self.accuracy}
        released = {name: value for name, value in measures.items() if value is not None}
        released |= {f"test/{name}": value for name, value in self.figures.items()}
        for name, spread in self.held_out_users.items():
            statistics = {key: value for key, value in spread.items() if key != "users"}
            released |= {f"held_out_users/{name}/{key}": value for key, value in statistics.items()}
        released["privacy/epsilon" if self.as_if is None else "projected/epsilon"] = self.epsilon
        released |= {f"clipping_norm/{name}": norm for name, norm in self.clipping_norms.items()}
        released |= {f"unclipped/{name}": share for name, share in self.unclipped.items()}
        return released | {f"metric/{name}": value for name, value in self.scalar_metrics.items()}

    @property
    def measured(self) -> str:
        """The model's accuracy on held-out rows, or else its loss, as text; "" if it has none."""
        if self.accuracy is not None:
            return f"accuracy {self.accuracy:.2%}"
        return "" if self.loss is None else f"loss {self.loss:.4g}"

    @property
    def metrics_text(self) -> tuple[str, ...]:
        """The metrics that are a single number, each as text with the stddev of its noise.

        The count of contributors is left out, since `Contributors` averages it over rounds.
        """
        return tuple(
            f"{name} {value:.3g} ± {self.metrics_noise_stddev[name]:.2g}"
            for name, value in self.scalar_metrics.items()
            if name != CONTRIBUTORS_METRIC
        )


def best_round(results: Iterable[RoundResult]) -> RoundResult | None:
    """Return the round with the highest held-out accuracy or, without accuracies, the lowest loss.

    A tie goes to the earliest round; None if no model was measured. The choice is post-processing
    of the releases of all rounds, so its cost is that of all rounds together.
    """

    def score(result: RoundResult) -> float:
        value = result.accuracy
        if value is None:
            value = math.nan if result.loss is None else -result.loss
        return value if math.isfinite(value) else -math.inf

    best = max(results, key=score, default=None)
    return None if best is None or score(best) == -math.inf else best


@dataclass(frozen=True)
class Contributors:
    """The number of users who counted in some rounds; empty if no round released a count.

    A user counts if its update counts. The update of a user that fails, is absent or returns NaN is
    the zero vector. If most updates are zero, a run spends its budget on noise. All of this is
    post-processing of released numbers.
    """

    rounds: int = 0  # number of rounds that released a count
    total: float = 0.0  # sum of the counts
    expected: float = 0.0  # expectation of the total if every user counts
    variance: float = 0.0  # variance of the total, due to noise and to the draws of cohorts

    @classmethod
    def of(cls, results: Iterable[RoundResult], sampling: SamplingEvent) -> Self:
        """Return the sum of the counts of these rounds."""
        return reduce(lambda counts, result: counts.with_round(result, sampling), results, cls())

    def with_round(self, result: RoundResult, sampling: SamplingEvent) -> Self:
        """Return the sum with one more round's count.

        For a series of rounds the variance is too large, because correlated noise partly cancels,
        and the draws of different rounds depend on each other.
        """
        count = result.scalar_metrics.get(CONTRIBUTORS_METRIC)
        if count is None:
            return self
        expected = result.expected_cohort_size  # an event does not state the number of examples
        coins = sampling.cohort_variance * expected / sampling.expected_cohort_size
        noise = result.metrics_noise_stddev[CONTRIBUTORS_METRIC] ** 2
        return type(self)(
            self.rounds + 1,
            self.total + count,
            self.expected + expected,
            self.variance + noise + coins,
        )

    def __bool__(self) -> bool:
        return self.rounds > 0

    def __str__(self) -> str:
        """Return the means over rounds, such as "82.3 ± 4.5 of 86.1", or "" without rounds.

        The number after ± is one standard deviation of noise and draws together, so that readers
        can compare the mean with the expected one. If it is as large as the mean, only more rounds
        can show whether users count.
        """
        if not self:
            return ""
        spread = math.sqrt(self.variance) / self.rounds
        places = 0 if spread >= 10.0 else 1
        figures = (self.total / self.rounds, spread, self.expected / self.rounds)
        return "{} ± {} of {}".format(*(f"{figure:,.{places}f}" for figure in figures))

    @property
    def too_few(self) -> bool:
        """True if surely fewer than half of the expected users count, so that a run must end.

        The total must be three standard deviations below half of the expected total. While that
        limit is negative, this is false. A run in which all users count therefore ends by chance
        only if its total is at least six standard deviations below the expected total.
        """
        margin, half = _SURE * math.sqrt(self.variance), self.expected / 2.0
        return bool(self) and margin <= half and self.total < half - margin

    @property
    def far_off(self) -> bool:
        """True if the total surely differs from the expected total by more than a tenth."""
        margin = _SURE * math.sqrt(self.variance) + _NEAR * self.expected
        return abs(self.total - self.expected) > margin

    def why_ended(self, units: str, done: int, rounds: int) -> str:
        """Return, in one sentence, why a run ended after `done` of `rounds` rounds.

        `units` names what was counted, such as "users".
        """
        return (
            f"{Stop.TOO_FEW}: {self} expected {units} counted in a round, by noised counts; "
            f"the run ended after {done} of {rounds} rounds, and the rest of its budget is not "
            "spent; look for a common cause, such as NaN, labels that are not classes of the "
            "model or absent nodes, or continue with --keep-going (in Python keep_going=True)"
        )


OnRound = Callable[[RoundResult], object]  # called after each round; its result is ignored
# Called with mechanism, round number and release, before the release is used.
OnRelease = Callable[[GaussianMechanism, int, Release], object]


def initial_state(
    plan: TrainingPlan, parameters: Parameters, statistics: Parameters | None = None
) -> ServerState:
    """Return the state before the first round, for a model's parameters and running statistics.

    InvalidValueError: the running statistics are not those of the plan's layers.
    """
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
    """Run rounds from `state` to the end of the plan, and yield state and result after each.

    Each round has the guarantees of `private_round`. Training stops *before* it would exceed the
    budget, when the transport was asked to stop, or when too few nodes agreed to the round; in
    these cases the round is charged only if it was drawn. The generator returns the reason why
    training ended.
    """

    def prepare(at: RoundAttempt) -> None:
        transport.prepare(request_to_nobody(plan, state, at))

    def collect(at: RoundAttempt, users: npt.NDArray[np.int64]) -> Iterator[PartialSum]:
        return transport.collect(round_request(plan, state, at, users, entropy))

    def collect_masked(at: RoundAttempt) -> Callable[[], OpenedSum | None]:
        request = round_request(plan, state, at, np.empty(0, np.int64), entropy)
        return transport.collect_masked(request, mechanism, plan.simulated_dropout)

    while state.round < plan.rounds:
        mechanism, number = plan.mechanism_at(state.clipping_norms), state.round + 1
        args, shared = (mechanism, plan.run, number), (records, entropy, prepare)
        try:
            if plan.secure_sum is None:
                release: Release | None = private_round(*args, collect, *shared)
            else:
                attempts = (secure_round(*args, collect_masked, *shared) for _ in range(_MOST_VOID))
                release = next(filter(None, attempts), None)
        except BudgetExceededError:
            return Stop.BUDGET
        except StoppedError:
            return Stop.ASKED
        except DeclinedError:
            return Stop.DECLINED
        if release is None:  # all attempts were void
            return Stop.DECLINED
        on_release(mechanism, number, release)
        epsilon = records.ledger.epsilon(records.budget)
        state, result = close_round(plan, state, release, epsilon, records.budget.delta)
        yield state, replace(result, randomness=records.ledger.randomness)
    return Stop.ROUNDS


def round_request(
    plan: TrainingPlan,
    state: ServerState,
    at: RoundAttempt,
    users: npt.NDArray[np.int64],
    entropy: Entropy,
) -> RoundRequest:
    """Return the request that an attempt at the next round sends to its cohort."""
    request = request_to_nobody(plan, state, at)
    return replace(request, users=users, local_key=entropy.key(at.purpose("local")))


def request_to_nobody(plan: TrainingPlan, state: ServerState, at: RoundAttempt) -> RoundRequest:
    """Return the part of a round's request that does not depend on its cohort; it has no users."""
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
    """Return the server's state after a release, and the round's result: post-processing.

    `state` is the state before the round; the result has its clipping norms. All charges so far
    cost (`epsilon`, `delta`).
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
    if plan.contributors_share:  # the average becomes a count; its divisor is public
        name, tensor, users = CONTRIBUTORS.name, CONTRIBUTORS.tensor, query.denominator
        metrics[name], stddevs[name] = users * tensors[tensor], users * noise[tensor]
    statistics = state.statistics
    if plan.statistics is not None:
        statistics = plan.statistics.moved(statistics, metrics[BATCH_NORM_METRIC])
    control = plan.control.updated(state.control, tensors) if plan.control else state.control
    names, sampling = [group.name for group in plan.groups], plan.sampling.event()
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
        relation=sampling.relation,
        as_if=sampling.projection.population if sampling.projection else None,
    )
    next_state = ServerState(
        state.round + 1, parameters, optimizer, norms, statistics, control, state.mean
    )
    return next_state.averaged(plan), result


@dataclass(frozen=True)
class Checkpoint:
    """A server state, with the digest of its plan and the head of its ledger."""

    state: ServerState
    plan_digest: str
    ledger_head: Head


def save_checkpoint(folder: Path, checkpoint: Checkpoint, best: Checkpoint | None = None) -> Path:
    """Write `round-NNNNNN.safetensors`, named after its last round, atomically; return its path.

    The folder keeps the last 3 checkpoints and `best`, which is also written if it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = checkpoint_path(folder, checkpoint.state.round)
    best_path = checkpoint_path(folder, best.state.round) if best else path
    if best and not (best_path == path or best_path.exists()):
        _write(best_path, best)
    _write(path, checkpoint)
    for older_path in checkpoints(folder)[:-_KEPT]:
        if older_path != best_path:
            older_path.unlink(missing_ok=True)
    return path


def checkpoint_path(folder: Path, number: int) -> Path:
    """Return the path of the checkpoint after a round."""
    return folder / f"round-{number:06d}.safetensors"


def _write(path: Path, checkpoint: Checkpoint) -> None:
    state, head = checkpoint.state, checkpoint.ledger_head
    moments = (state.optimizer.first, state.optimizer.second)
    parts = (state.parameters, *moments, state.statistics, state.control, state.mean)
    tensors = {
        f"{part}/{name}": np.asarray(tensor, order="C")
        for part, part_tensors in zip(_PARTS, parts, strict=True)
        for name, tensor in part_tensors.items()
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
    """Return the name under which a ledger charges users' evaluations of a run's models."""
    return f"{run}-evaluation"


def own_charges(run: str, charges: Iterable[ChargedRow]) -> list[ChargedRow]:
    """Return all charges of a run: for its rounds, and for evaluations of its models."""
    return [row for row in charges if row.run in (run, evaluation_run(run))]


def checkpoints(folder: Path) -> list[Path]:
    """Return the paths of a folder's checkpoints, oldest first."""
    paths = folder.glob("round-*.safetensors")
    return sorted(paths, key=lambda path: (len(path.name), path.name))  # names grow at 10⁶ rounds


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; CheckpointError if it is absent or damaged, or has another format."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if (file_format := metadata.get("format")) != _FORMAT:
                raise CheckpointError(f"{path} has format {file_format!r}; it must be {_FORMAT!r}")
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as a checkpoint: {error}") from error
    if metadata.pop("digest", None) != _digest(metadata, tensors):
        advice = "delete it to resume from the checkpoint before it"
        raise CheckpointError(f"{path} is damaged; {advice}")
    parts: dict[str, dict[str, np.ndarray]] = {part: {} for part in _PARTS}
    for key, tensor in tensors.items():
        part, _, name = key.partition("/")
        parts[part][name] = tensor
    parameters, first, second, statistics, control, mean = parts.values()
    norms = tuple(map(float, metadata["clipping_norms"].split()))
    moments = OptimizerState(first, second)
    number = int(metadata["round"])
    state = ServerState(number, parameters, moments, norms, statistics, control, mean)
    head = Head(int(metadata["ledger_count"]), metadata["ledger_hash"])
    return Checkpoint(state, metadata["plan_digest"], head)


def _digest(metadata: Mapping[str, str], tensors: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps(dict(sorted(metadata.items()))).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, tensor.dtype.str, tensor.shape]).encode())
        digest.update(tensor.data)
    return digest.hexdigest()


def resume(path: Path, plan: TrainingPlan, ledger: Ledger) -> ServerState:
    """Return the state to resume from.

    CheckpointError: the checkpoint cannot be read or belongs to another plan, or the ledger lacks
    charges that it has seen.
    """
    checkpoint = load_checkpoint(path)
    if checkpoint.plan_digest != plan.digest:
        problem = f"{path} belongs to plan {checkpoint.plan_digest[:12]}, not to {plan.digest[:12]}"
        raise CheckpointError(f"{problem}; a run can only be resumed with the plan it began with")
    if not ledger.contains_head(checkpoint.ledger_head):
        problem = f"{checkpoint.ledger_head.count} charges that the ledger does not hold"
        limit = "a run can only be resumed with its own, complete ledger"
        raise CheckpointError(f"{path} has seen {problem}; {limit}")
    state, names = checkpoint.state, plan.layout.names
    parameters = {name: state.parameters[name] for name in names}
    control = {name: state.control[name] for name in names} if plan.control else {}
    return replace(state, parameters=parameters, control=control)
