"""What nodes are told: the task, their users, the price of a round, the status and the ledger."""

import io
import threading
from collections.abc import Callable
from pathlib import Path

from fedpriv.config import Config
from fedpriv.engine.metrics import own_metrics
from fedpriv.ledger.ledger import Head, Ledger
from fedpriv.privacy.round import PrivacyRecords, RoundRequest
from fedpriv.server.enrolment import Enrolment
from fedpriv.training.plan import TrainingPlan
from fedpriv.wire import Price, RunState, Status, TaskDescription, Welcome


def task_of(config: Config) -> TaskDescription:
    """The task by name, for nodes to build."""
    model = config.model
    metrics = tuple(own_metrics(config.metrics.report))
    return TaskDescription(model.name, model.options, model.seed, model.loss, metrics)


def welcomes(config: Config, enrolment: Enrolment) -> Callable[[str], Welcome]:
    """What to tell each node when it connects."""
    task = task_of(config)

    def welcome_of(node: str) -> Welcome:
        users = enrolment.users_of(node).copy()
        return Welcome(enrolment.population_id, enrolment.population, users, task)

    return welcome_of


def prices(plan: TrainingPlan, records: PrivacyRecords) -> Callable[[RoundRequest], Price]:
    """What a round costs; to be called in the thread that opened the records."""

    def price_of(request: RoundRequest) -> Price:
        norms = tuple(g.clipping_norm for g in request.clipping.groups[: len(plan.groups)])
        event = plan.mechanism_at(norms).event
        return Price(
            plan.sampling.sampling_probability,
            plan.sampling.population,
            event.noise_multiplier,
            records.ledger.epsilon(records.budget, event),
            records.budget.delta,
        )

    return price_of


def status_at_start(plan: TrainingPlan, records: PrivacyRecords, enrolment: Enrolment) -> Status:
    """Where a run stands before any round is collected."""
    return Status(
        run=plan.run,
        round=0,
        rounds=plan.rounds,
        epsilon=records.ledger.epsilon(records.budget),
        epsilon_limit=records.budget.epsilon,
        delta=records.budget.delta,
        nodes_enrolled=len(enrolment.nodes),
        nodes_connected=0,
        users_enrolled=enrolment.population,
        state=RunState.WAITING,
    )


class LedgerLines:
    """The public ledger as `fedpriv ledger export` writes it, read again when it has grown."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._known: tuple[Head, bytes] | None = None

    def __call__(self) -> bytes:
        """All lines; may be called in any thread.

        Raises:
            LedgerError: the ledger cannot be opened or verified.
        """
        with self._lock, Ledger.open(self._path) as ledger:
            head = ledger.head
            if self._known is None or self._known[0] != head:
                lines = io.StringIO()
                ledger.export(lines)
                self._known = (head, lines.getvalue().encode())
            return self._known[1]
