"""A run at the server: rounds, evaluation, metrics and checkpoints, in one folder."""

from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass

import numpy as np
from safetensors.numpy import save

from fedpriv.accounting.ledger import Head
from fedpriv.federated.books import Books
from fedpriv.federated.checkpoint import (
    Checkpoint,
    checkpoints,
    resume,
    save_checkpoint,
    write_atomically,
)
from fedpriv.federated.loop import RoundReport, Stop, train
from fedpriv.federated.optimizers import Parameters
from fedpriv.federated.plan import TrainingPlan
from fedpriv.federated.round import ServerState
from fedpriv.federated.transport import Transport
from fedpriv.privacy.entropy import Entropy

from .evaluation import Evaluation
from .folder import RunFolder

Evaluate = Callable[[Parameters], Evaluation]


@dataclass(frozen=True)
class Cadence:
    """How often things are done, in rounds.

    Attributes:
        evaluate: rounds between evaluations; the last round is always evaluated.
        checkpoint: rounds between checkpoints; the last round always has one.
    """

    evaluate: int
    checkpoint: int


@dataclass(frozen=True)
class RoundRow:
    """One line of the metrics: what one release was and cost.

    Attributes:
        round: number of the round, from 0.
        attempt: number of the attempt.
        epsilon: ε of all charges of the ledger so far, at `delta`.
        delta: δ of the budget.
        test_loss: mean loss on held-out rows, if the round was evaluated.
        test_accuracy: accuracy on held-out rows, if there is one.
        simulation_only_seconds: wall time of the round. It depends on who took part and is not
            covered by the guarantee, so it exists in simulations only and is None elsewhere.
        charge: hash of the round's row in the ledger.
        clipping_norms: of the groups of the update in this round, in the plan's order.
        unclipped: noised fraction of users that were not clipped, for each of these groups; empty
            unless clipping is adaptive.
        metrics: private averages by name, at the model before the round; a vector is a list.
        metrics_noise_stddev: standard deviation of the noise in each component of a metric.
    """

    round: int
    attempt: int
    epsilon: float
    delta: float
    test_loss: float | None
    test_accuracy: float | None
    simulation_only_seconds: float | None
    charge: str
    clipping_norms: tuple[float, ...]
    unclipped: tuple[float, ...]
    metrics: Mapping[str, object]
    metrics_noise_stddev: Mapping[str, float]

    @property
    def private_metrics(self) -> tuple[str, ...]:
        """The metrics that are one number, each with its noise, in words."""
        return tuple(
            f"{name} {value:.3g} ± {self.metrics_noise_stddev[name]:.2g}"
            for name, value in self.metrics.items()
            if isinstance(value, float)
        )


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        stop: why.
        state: the server's state at the end.
        evaluation: the last model on held-out rows.
        private_metrics: those of the last round that was run, in words.
    """

    stop: Stop
    state: ServerState
    evaluation: Evaluation
    private_metrics: tuple[str, ...]


def state_to_start_from(
    folder: RunFolder, plan: TrainingPlan, books: Books, initial: ServerState
) -> ServerState:
    """State of the newest checkpoint, or the initial state if there is none.

    Raises:
        CheckpointError: the checkpoint does not fit the plan or the ledger.
    """
    found = checkpoints(folder.checkpoints)
    return resume(found[-1], plan, books.ledger) if found else initial


def conduct(
    folder: RunFolder,
    plan: TrainingPlan,
    state: ServerState,
    transport: Transport,
    books: Books,
    entropy: Entropy,
    evaluate: Evaluate,
    cadence: Cadence,
    clock: Callable[[], float] | None = None,
) -> Generator[RoundRow, None, Outcome]:
    """Run a plan to its end or to the end of its budget, writing everything into a folder.

    A line of metrics is written after each release, and then the checkpoint, before the next round
    begins. So if every round has a checkpoint, a crash leaves at most one round that was charged
    and is in no checkpoint. A run that is resumed repeats the rounds since its last checkpoint as
    new attempts, with new charges.

    Args:
        folder: where to write; exists.
        plan: the plan.
        state: where to start, from `state_to_start_from`.
        transport: reaches the users.
        books: ledger, participation record and budget.
        entropy: where cohorts and noise come from.
        evaluate: measures a released model on rows of no enrolled user.
        cadence: how often to evaluate and to write checkpoints.
        clock: seconds, to time the rounds of a simulation; None in a deployment.

    Yields:
        A row for each round.
    """
    private_metrics: tuple[str, ...] = ()
    rounds = train(plan, state, transport, books, entropy)
    while True:
        began = clock() if clock else 0.0
        try:
            report = next(rounds)
        except StopIteration as end:
            stop: Stop = end.value
            break
        seconds = clock() - began if clock else None
        state = report.state
        due = state.round % cadence.evaluate == 0 or state.round == plan.rounds
        row = _row(report, books, evaluate(state.model) if due else None, seconds)
        folder.append_metrics(asdict(row))
        private_metrics = row.private_metrics
        if state.round % cadence.checkpoint == 0:
            _save(folder, plan, state, books.ledger.head)
        yield row
    _save(folder, plan, state, books.ledger.head)
    tensors = {name: np.ascontiguousarray(p) for name, p in state.model.items()}
    write_atomically(folder.model, save(tensors))
    return Outcome(stop, state, evaluate(state.model), private_metrics)


def _row(
    report: RoundReport, books: Books, evaluation: Evaluation | None, seconds: float | None
) -> RoundRow:
    return RoundRow(
        round=report.round,
        attempt=report.attempt,
        epsilon=books.budget.epsilon_of(books.ledger.spent()),
        delta=books.budget.delta,
        test_loss=evaluation.loss if evaluation else None,
        test_accuracy=evaluation.accuracy if evaluation else None,
        simulation_only_seconds=seconds,
        charge=report.charge_hash,
        clipping_norms=report.clipping_norms,
        unclipped=report.unclipped,
        metrics={metric.name: metric.value.tolist() for metric in report.metrics},
        metrics_noise_stddev={metric.name: metric.noise_stddev for metric in report.metrics},
    )


def _save(folder: RunFolder, plan: TrainingPlan, state: ServerState, head: Head) -> None:
    save_checkpoint(folder.checkpoints, Checkpoint(state, plan.digest, head))
