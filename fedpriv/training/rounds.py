"""Training as a sequence of private rounds: ask, release, step the server, report."""

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from fedpriv.errors import BudgetExceededError, DeclinedError, StoppedError
from fedpriv.privacy.clipping import UNCLIPPED
from fedpriv.privacy.noise import Entropy
from fedpriv.privacy.round import (
    PartialSum,
    PrivacyRecords,
    Release,
    RoundAttempt,
    RoundRequest,
    Transport,
    private_round,
)
from fedpriv.training.optimizers import OptimizerState, Parameters
from fedpriv.training.plan import BATCH_NORM_METRIC, TrainingPlan


@dataclass(frozen=True)
class ServerState:
    """What the server carries from round to round; all of it was released."""

    round: int  # number of the next round, from 0
    parameters: Parameters  # in the order of the plan's layout
    optimizer: OptimizerState
    clipping_norms: tuple[float, ...]  # S_g of each group of the update in the next round
    statistics: Parameters = field(default_factory=dict)  # running statistics, by name

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


@dataclass(frozen=True)
class RoundResult:
    """What one round released and what it cost: a line of the metrics; callbacks are given it.

    All of it may be published but for `simulation_only_seconds`, the wall time of the round in a
    simulation, which depends on who took part. Nothing else depends on users but through the noise.
    """

    run: str
    rounds: int  # T, how many are planned
    round: int  # from 0
    attempt: int  # which attempt at the round succeeded, from 0
    charge: str  # hash of the round's charge
    epsilon: float  # of all charges of the ledger so far, at `delta`
    delta: float
    clipping_norms: Mapping[str, float]  # by vector group
    # By vector group, the noised fraction of users that were not clipped, if clipping is adaptive.
    unclipped: Mapping[str, float] = field(default_factory=dict)
    # Private averages by name, at the model before the round, and the noise in each component.
    metrics: Mapping[str, object] = field(default_factory=dict)
    metrics_noise_stddev: Mapping[str, float] = field(default_factory=dict)
    loss: float | None = None  # of the new model on held-out rows, where it was evaluated
    accuracy: float | None = None  # likewise
    simulation_only_seconds: float | None = None

    @property
    def number(self) -> int:
        """Rounds released so far, this one included."""
        return self.round + 1

    @property
    def scalar_metrics(self) -> dict[str, float]:
        """The metrics that are one number."""
        return {n: float(v) for n, v in self.metrics.items() if isinstance(v, int | float)}

    @property
    def scalars(self) -> dict[str, float]:
        """Every released number by name, as experiment trackers take it; no vectors.

        >>> result = RoundResult("run", 9, 0, 0, "5f", 0.25, 1e-5, {"update": 0.5}, accuracy=0.9)
        >>> result.scalars
        {'test/accuracy': 0.9, 'privacy/epsilon': 0.25, 'clipping_norm/update': 0.5}
        """
        own = {"test/loss": self.loss, "test/accuracy": self.accuracy}
        released = {name: value for name, value in own.items() if value is not None}
        released["privacy/epsilon"] = self.epsilon
        released |= {f"clipping_norm/{name}": norm for name, norm in self.clipping_norms.items()}
        released |= {f"unclipped/{name}": share for name, share in self.unclipped.items()}
        return released | {f"metric/{name}": value for name, value in self.scalar_metrics.items()}

    @property
    def metrics_text(self) -> tuple[str, ...]:
        """The metrics that are one number, each with its noise, for people to read."""
        return tuple(
            f"{name} {value:.3g} ± {self.metrics_noise_stddev[name]:.2g}"
            for name, value in self.scalar_metrics.items()
        )


OnRound = Callable[[RoundResult], object]  # called after each round; its result is not read


def initial_state(
    plan: TrainingPlan, parameters: Parameters, statistics: Parameters | None = None
) -> ServerState:
    """State before the first round, with the model's parameters and running statistics."""
    statistics = dict(statistics or {})
    if plan.statistics is not None:
        plan.statistics.check(statistics)
    tensors = plan.layout.unflatten(plan.layout.flatten(parameters))
    ordered = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    return ServerState(0, ordered, plan.optimizer.init(ordered), plan.clipping_norms, statistics)


def train(
    plan: TrainingPlan,
    state: ServerState,
    transport: Transport,
    records: PrivacyRecords,
    entropy: Entropy,
) -> Generator[tuple[ServerState, RoundResult], None, Stop]:
    """Run rounds from `state` to the end of the plan, yielding state and result after each.

    Each round has the guarantees of `private_round`. Training stops *before* the budget would be
    passed, when the transport was asked to stop, or when too few nodes agreed to the round, with
    nothing charged for the round that did not happen. The generator returns why training ended.
    """
    while state.round < plan.rounds:
        try:
            state, result = run_round(plan, state, transport, records, entropy)
        except BudgetExceededError:
            return Stop.BUDGET
        except StoppedError:
            return Stop.ASKED
        except DeclinedError:
            return Stop.DECLINED
        yield state, result
    return Stop.ROUNDS


def run_round(
    plan: TrainingPlan,
    state: ServerState,
    transport: Transport,
    records: PrivacyRecords,
    entropy: Entropy,
) -> tuple[ServerState, RoundResult]:
    """One round of `train`: the state after it, and its result."""

    def prepare(at: RoundAttempt) -> None:
        transport.prepare(_request_to_nobody(plan, state, at))

    def collect(at: RoundAttempt, users: npt.NDArray[np.int64]) -> Iterator[PartialSum]:
        return transport.collect(round_request(plan, state, at, users, entropy))

    mechanism = plan.mechanism_at(state.clipping_norms)
    release = private_round(mechanism, plan.run, state.round, collect, records, entropy, prepare)
    epsilon = records.ledger.epsilon(records.budget)
    return close_round(plan, state, release, epsilon, records.budget.delta)


def round_request(
    plan: TrainingPlan,
    state: ServerState,
    at: RoundAttempt,
    users: npt.NDArray[np.int64],
    entropy: Entropy,
) -> RoundRequest:
    """What an attempt at the next round asks of the users of its cohort."""
    asked = _request_to_nobody(plan, state, at)
    return replace(asked, users=users, local_key=entropy.key(at.purpose("local")))


def _request_to_nobody(plan: TrainingPlan, state: ServerState, at: RoundAttempt) -> RoundRequest:
    return RoundRequest(
        run=at.run,
        round=at.round,
        attempt=at.attempt,
        parameters=state.parameters,
        clipping=plan.mechanism_at(state.clipping_norms).clipping,
        local=plan.local,
        users=np.empty(0, np.int64),
        local_key=bytes(32),
        metrics=plan.metrics,
        statistics=state.statistics,
    )


def close_round(
    plan: TrainingPlan, state: ServerState, release: Release, epsilon: float, delta: float
) -> tuple[ServerState, RoundResult]:
    """Step the server by what a round released, and only then move clipping norms: post-processing.

    The round was opened with `state`; all charges so far cost (`epsilon`, `delta`).
    """
    query = plan.mechanism_at(state.clipping_norms).query
    tensors = query.clipping.layout.unflatten(release.average)
    update = {name: tensors[name] for name in plan.layout.names}
    parameters, optimizer = plan.optimizer.update(update, state.optimizer, state.parameters)
    norms, unclipped = state.clipping_norms, tuple[float, ...]()
    if plan.adaptive is not None:
        unclipped = tuple(float(half) + 0.5 for half in tensors[UNCLIPPED])
        norms = tuple(map(plan.adaptive.step, norms, unclipped))
    metrics = {metric.name: tensors[metric.tensor] + metric.centre for metric in plan.metrics}
    statistics = state.statistics
    if plan.statistics is not None:
        statistics = plan.statistics.moved(statistics, metrics[BATCH_NORM_METRIC])
    names = [group.name for group in plan.groups]
    result = RoundResult(
        run=plan.run,
        rounds=plan.rounds,
        round=state.round,
        attempt=release.attempt,
        charge=release.charge_hash,
        epsilon=epsilon,
        delta=delta,
        clipping_norms=dict(zip(names, state.clipping_norms, strict=True)),
        unclipped=dict(zip(names, unclipped, strict=False)),
        metrics={name: value.tolist() for name, value in metrics.items()},
        metrics_noise_stddev={m.name: query.tensor_stddevs[m.tensor] for m in plan.metrics},
    )
    return ServerState(state.round + 1, parameters, optimizer, norms, statistics), result
