"""One round as two pure functions: open it, and close it with what the users returned.

Between the two lie the transport, which fills the partial sums, and the ledger, which charges the
round's event. `close_round` cannot be called without the receipt of that charge.

The training loop: sample, collect, charge, release, report.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from fedpriv.errors import BudgetExceededError, LedgerError, StoppedError
from fedpriv.ledger.ledger import Charge
from fedpriv.privacy.layout import FloatVector
from fedpriv.privacy.mechanism import TENSOR, PoissonGaussianMechanism, ReleasedMetric, released
from fedpriv.privacy.noise import Entropy
from fedpriv.privacy.round import Books, CohortSum, PartialSum, RoundRequest, Transport, add_up
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


@dataclass(frozen=True)
class Release:
    """What one round made public.

    Attributes:
        state: of the server after the round.
        metrics: private averages of the users' metrics at the model before the round.
        unclipped: for each group of the update, the noised fraction of users that were not clipped;
            empty unless clipping is adaptive.
    """

    state: ServerState
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


def mechanism_of(plan: TrainingPlan, state: ServerState) -> PoissonGaussianMechanism:
    """The mechanism of the next round; what it is charged as is known before its cohort is."""
    return plan.mechanism_at(state.clipping_norms)


def open_round(
    plan: TrainingPlan, state: ServerState, attempt: int, entropy: Entropy
) -> RoundRequest:
    """Draw the cohort and say what its users are to do.

    Sampling, noise and local training take keys for different purposes, so they are separate
    streams; a new attempt at a round has new ones.
    """
    mechanism = mechanism_of(plan, state)
    return RoundRequest(
        run=plan.run,
        round=state.round,
        attempt=attempt,
        parameters=state.parameters,
        clipping=mechanism.average.sum_query.clipping,
        local=plan.local,
        users=mechanism.draw_cohort(entropy, _purpose("sampling", plan, state.round, attempt)),
        local_key=entropy.key(_purpose("local", plan, state.round, attempt)),
        metrics=plan.metrics,
        statistics=state.statistics,
    )


def sum_round(request: RoundRequest, partials: Iterable[PartialSum]) -> CohortSum:
    """Total of the partial sums that can be believed; secret until it is noised."""
    return add_up(partials, request.clipping, request.users.size)


def close_round(
    plan: TrainingPlan,
    state: ServerState,
    total: CohortSum,
    charge: Charge,
    entropy: Entropy,
) -> Release:
    """Noise the total once, average it, step the server and only then move the clipping norms.

    Args:
        plan: the plan of the run.
        state: the state with which the round was opened.
        total: from `sum_round`.
        charge: the ledger's receipt for this round; used up by this call.
        entropy: where the noise comes from.

    Raises:
        LedgerError: the charge is of another run, round or event, or was used before; then
            nothing is released.
    """
    if (charge.run, charge.round) != (plan.run, state.round):
        raise LedgerError(
            f"the charge is for round {charge.round} of run {charge.run!r}; "
            f"the release is of round {state.round} of run {plan.run!r}"
        )
    mechanism = mechanism_of(plan, state)
    if charge.event != mechanism.event:
        raise LedgerError(f"the event charged is {charge.event}, not {mechanism.event}")
    charged = charge.redeem()
    purpose = _purpose("noise", plan, state.round, charge.attempt)
    average, realised = mechanism.release(total.total, entropy, purpose, total.weight)
    if realised != charged:
        raise LedgerError(f"the event realised is {realised}, not the one charged, {charged}")
    return _stepped(plan, state, average, mechanism)


def _stepped(
    plan: TrainingPlan,
    state: ServerState,
    average: FloatVector,
    mechanism: PoissonGaussianMechanism,
) -> Release:
    """Everything after the noise: post-processing."""
    tensors = mechanism.average.sum_query.clipping.layout.unflatten(average)
    update = {name: tensors[name] for name in plan.layout.names}
    parameters, optimizer = plan.optimizer.update(update, state.optimizer, state.parameters)
    norms = state.clipping_norms
    unclipped: tuple[float, ...] = ()
    if plan.adaptive is not None:
        unclipped = tuple(float(half) + 0.5 for half in tensors[TENSOR])
        norms = tuple(map(plan.adaptive.step, norms, unclipped))
    metrics = released(plan.metrics, average, mechanism.average)
    statistics = state.statistics
    if plan.statistics is not None:
        (deviation,) = [metric.value for metric in metrics if metric.name == METRIC]
        statistics = plan.statistics.moved(statistics, deviation)
    after = ServerState(state.round + 1, parameters, optimizer, norms, statistics)
    return Release(after, metrics, unclipped)


def _purpose(stream: str, plan: TrainingPlan, round_number: int, attempt: int) -> str:
    return f"{stream}/{plan.run}/{round_number}/{attempt}"


class Stop(StrEnum):
    """Why training ended."""

    ROUNDS = "all rounds were run"
    BUDGET = "the next round would pass the privacy budget"
    ASKED = "it was asked to stop"


@dataclass(frozen=True)
class RoundResult:
    """What one round released and what it cost: a line of the metrics; callbacks are given it.

    All of it may be published but for `simulation_only_seconds`. Nothing else depends on users but
    through the noise.

    Attributes:
        run: name of the run.
        rounds: T, how many are planned.
        round: number of the round, from 0.
        attempt: which attempt at the round succeeded, from 0.
        charge: hash of the round's row in the ledger.
        epsilon: ε of all charges of the ledger so far, at `delta`.
        delta: δ of the budget.
        clipping_norms: S of each vector group of the update in this round.
        unclipped: by vector group, the noised fraction of users that were not clipped; empty unless
            clipping is adaptive.
        metrics: private averages by name, at the model before the round; a vector is a list.
        metrics_noise_stddev: standard deviation of the noise in each component of a metric.
        loss: mean loss of the new model on held-out rows, if it was evaluated.
        accuracy: its accuracy on held-out rows, if there is one.
        simulation_only_seconds: wall time of the round in a simulation; None elsewhere. It depends
            on who took part, and no guarantee covers it.
    """

    run: str
    rounds: int
    round: int
    attempt: int
    charge: str
    epsilon: float
    delta: float
    clipping_norms: Mapping[str, float]
    unclipped: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, object] = field(default_factory=dict)
    metrics_noise_stddev: Mapping[str, float] = field(default_factory=dict)
    loss: float | None = None
    accuracy: float | None = None
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
        tables: tuple[tuple[str, Mapping[str, float | None]], ...] = (
            ("test", {"loss": self.loss, "accuracy": self.accuracy}),
            ("privacy", {"epsilon": self.epsilon}),
            ("clipping_norm", self.clipping_norms),
            ("unclipped", self.unclipped),
            ("metric", self.scalar_metrics),
        )
        return {
            f"{table}/{name}": float(value)
            for table, values in tables
            for name, value in values.items()
            if value is not None
        }

    @property
    def metrics_text(self) -> tuple[str, ...]:
        """The metrics that are one number, each with its noise, for people to read."""
        return tuple(
            f"{name} {value:.3g} ± {self.metrics_noise_stddev[name]:.2g}"
            for name, value in self.scalar_metrics.items()
        )


OnRound = Callable[[RoundResult], object]
"""Is called after each round; what it returns is not read."""


def train(
    plan: TrainingPlan,
    state: ServerState,
    transport: Transport,
    books: Books,
    entropy: Entropy,
) -> Generator[tuple[ServerState, RoundResult], None, Stop]:
    """Run rounds from `state` to the end of the plan, yielding state and result after each.

    Guarantees:

    * every release was durable in the ledger before its noise was drawn;
    * training stops *before* the budget would be passed, with nothing charged for the round that
      did not happen, and the same holds when the transport says that it was asked to stop;
    * an empty cohort releases and is charged like any other;
    * a round that was interrupted is run again as a new attempt: fresh cohort, noise and charge.

    Args:
        plan: the plan of the run.
        state: where to begin, from `initial_state` or a checkpoint.
        transport: reaches the users.
        books: ledger, participation record and budget.
        entropy: where cohorts and noise come from.

    Returns:
        Why training ended (the value of the generator).
    """
    while state.round < plan.rounds:
        try:
            state, result = run_round(plan, state, transport, books, entropy)
        except BudgetExceededError:
            return Stop.BUDGET
        except StoppedError:
            return Stop.ASKED
        yield state, result
    return Stop.ROUNDS


def run_round(
    plan: TrainingPlan,
    state: ServerState,
    transport: Transport,
    books: Books,
    entropy: Entropy,
) -> tuple[ServerState, RoundResult]:
    """One round, with the arguments and guarantees of `train`: the state after it, and its result.

    Raises:
        BudgetExceededError: the budget would be passed; nothing was charged or released.
    """
    event = mechanism_of(plan, state).event
    attempt = books.next_attempt(plan.run, state.round)
    books.refuse_if_beyond(event, f"run {plan.run}, round {state.round}")
    request = open_round(plan, state, attempt, entropy)
    commitment = books.record(plan.run, state.round, attempt, request.users)
    total = sum_round(request, transport.collect(request))
    charge = books.charge(plan.run, state.round, attempt, commitment, event, entropy.randomness)
    release = close_round(plan, state, total, charge, entropy)
    names = [group.name for group in plan.groups]
    result = RoundResult(
        run=plan.run,
        rounds=plan.rounds,
        round=request.round,
        attempt=attempt,
        charge=charge.hash,
        epsilon=books.budget.epsilon_of(books.ledger.spent()),
        delta=books.budget.delta,
        clipping_norms=dict(zip(names, state.clipping_norms, strict=True)),
        unclipped=dict(zip(names, release.unclipped, strict=False)),
        metrics={metric.name: metric.value.tolist() for metric in release.metrics},
        metrics_noise_stddev={metric.name: metric.noise_stddev for metric in release.metrics},
    )
    return release.state, result
