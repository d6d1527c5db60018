"""Training as a sequence of private rounds: ask, release, step the server, report."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from fedpriv.errors import BudgetExceededError, StoppedError
from fedpriv.privacy.mechanism import UNCLIPPED, ReleasedMetric, released
from fedpriv.privacy.noise import Entropy
from fedpriv.privacy.round import (
    PartialSum,
    PrivacyRecords,
    Release,
    RoundAttempt,
    RoundRequest,
    Transport,
    draw_cohort,
    private_round,
)
from fedpriv.training.optimizers import OptimizerState, Parameters
from fedpriv.training.plan import METRIC, TrainingPlan


@dataclass(frozen=True)
class ServerState:
    """What the server carries from round to round; all of it was released.

    Attributes:
        round: number of the next round, from 0.
        parameters: the model, float32 tensors in the order of the plan's layout.
        optimizer: moments of the server optimiser.
        clipping_norms: S_g of each group of the update in the next round.
        statistics: running statistics of normalisations, float32, by name.
    """

    round: int
    parameters: Parameters
    optimizer: OptimizerState
    clipping_norms: tuple[float, ...]
    statistics: Parameters = field(default_factory=dict)

    @property
    def model(self) -> Parameters:
        """All tensors of the model that training has moved: parameters and running statistics."""
        return {**self.parameters, **self.statistics}


class Stop(StrEnum):
    """Why training ended."""

    ROUNDS = "all rounds were run"
    BUDGET = "the next round would pass the privacy budget"
    ASKED = "it was asked to stop"


@dataclass(frozen=True)
class RoundReport:
    """What a round released; safe to show.

    Attributes:
        round: number of the round, from 0.
        attempt: which attempt at the round succeeded, from 0.
        state: the server's state after the round.
        charge_hash: hash of the round's row in the ledger.
        clipping_norms: S_g of each group of the update in this round.
        metrics: private averages of the users' metrics at the model before the round.
        unclipped: for each group of the update, the noised fraction of users that were not clipped;
            empty unless clipping is adaptive.
    """

    round: int
    attempt: int
    state: ServerState
    charge_hash: str
    clipping_norms: tuple[float, ...]
    metrics: tuple[ReleasedMetric, ...]
    unclipped: tuple[float, ...]


def initial_state(
    plan: TrainingPlan, parameters: Parameters, statistics: Parameters | None = None
) -> ServerState:
    """State before the first round.

    Args:
        plan: the plan of the run.
        parameters: of the model; they must follow the plan's layout.
        statistics: running statistics of the model's normalisations, if it has any.

    Raises:
        InvalidValueError: the statistics are not those that the plan moves.
    """
    statistics = dict(statistics or {})
    if plan.statistics is not None:
        plan.statistics.check(statistics)
    ordered = {
        name: np.asarray(tensor, dtype=np.float32)
        for name, tensor in plan.layout.unflatten(plan.layout.flatten(parameters)).items()
    }
    return ServerState(0, ordered, plan.optimizer.init(ordered), plan.clipping_norms, statistics)


def train(
    plan: TrainingPlan,
    state: ServerState,
    transport: Transport,
    records: PrivacyRecords,
    entropy: Entropy,
) -> Generator[RoundReport, None, Stop]:
    """Run rounds from `state` to the end of the plan, yielding a report after each.

    Each round has the guarantees of `private_round`. Training stops *before* the budget would be
    passed, or when the transport was asked to stop, with nothing charged for the round that did
    not happen.

    Args:
        plan: the plan of the run.
        state: where to start, from `initial_state` or a checkpoint.
        transport: reaches the users.
        records: ledger, participation record and budget.
        entropy: where cohorts and noise come from.

    Returns:
        Why training ended (the value of the generator).
    """
    while state.round < plan.rounds:
        try:
            report = run_round(plan, state, transport, records, entropy)
        except BudgetExceededError:
            return Stop.BUDGET
        except StoppedError:
            return Stop.ASKED
        state = report.state
        yield report
    return Stop.ROUNDS


def run_round(
    plan: TrainingPlan,
    state: ServerState,
    transport: Transport,
    records: PrivacyRecords,
    entropy: Entropy,
) -> RoundReport:
    """One round of `train`.

    Raises:
        BudgetExceededError: the budget would be passed; nothing was charged or released.
    """

    def collect(at: RoundAttempt, users: npt.NDArray[np.int64]) -> Iterator[PartialSum]:
        return transport.collect(_request(plan, state, at, users, entropy))

    mechanism = plan.mechanism_at(state.clipping_norms)
    release = private_round(mechanism, plan.run, state.round, collect, records, entropy)
    return close_round(plan, state, release)


def open_round(
    plan: TrainingPlan, state: ServerState, attempt: int, entropy: Entropy
) -> RoundRequest:
    """What an attempt at the next round asks of a cohort that is drawn here."""
    at = RoundAttempt(plan.run, state.round, attempt)
    users = draw_cohort(plan.mechanism_at(state.clipping_norms), at, entropy)
    return _request(plan, state, at, users, entropy)


def _request(
    plan: TrainingPlan,
    state: ServerState,
    at: RoundAttempt,
    users: npt.NDArray[np.int64],
    entropy: Entropy,
) -> RoundRequest:
    return RoundRequest(
        run=at.run,
        round=at.round,
        attempt=at.attempt,
        parameters=state.parameters,
        clipping=plan.mechanism_at(state.clipping_norms).clipping,
        local=plan.local,
        users=users,
        local_key=entropy.key(at.purpose("local")),
        metrics=plan.metrics,
        statistics=state.statistics,
    )


def close_round(plan: TrainingPlan, state: ServerState, release: Release) -> RoundReport:
    """Step the server by what a round released, and only then move clipping norms.

    All of this is post-processing.

    Args:
        plan: the plan of the run.
        state: the state with which the round was opened.
        release: of the mechanism of that round.
    """
    query = plan.mechanism_at(state.clipping_norms).query
    tensors = query.clipping.layout.unflatten(release.average)
    update = {name: tensors[name] for name in plan.layout.names}
    parameters, optimizer = plan.optimizer.update(update, state.optimizer, state.parameters)
    norms = state.clipping_norms
    unclipped: tuple[float, ...] = ()
    if plan.adaptive is not None:
        unclipped = tuple(float(half) + 0.5 for half in tensors[UNCLIPPED])
        norms = tuple(map(plan.adaptive.step, norms, unclipped))
    metrics = released(plan.metrics, release.average, query)
    statistics = state.statistics
    if plan.statistics is not None:
        (deviation,) = [metric.value for metric in metrics if metric.name == METRIC]
        statistics = plan.statistics.moved(statistics, deviation)
    return RoundReport(
        round=state.round,
        attempt=release.attempt,
        state=ServerState(state.round + 1, parameters, optimizer, norms, statistics),
        charge_hash=release.charge_hash,
        clipping_norms=state.clipping_norms,
        metrics=metrics,
        unclipped=unclipped,
    )
