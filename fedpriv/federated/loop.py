"""The training loop: sample, collect, charge, release, report."""

from collections.abc import Generator
from dataclasses import dataclass
from enum import StrEnum

from fedpriv.errors import BudgetExceededError, StoppedError
from fedpriv.federated.books import Books
from fedpriv.federated.plan import TrainingPlan
from fedpriv.federated.round import (
    ServerState,
    close_round,
    mechanism_of,
    open_round,
    sum_round,
)
from fedpriv.federated.transport import Transport
from fedpriv.privacy.entropy import Entropy
from fedpriv.privacy.metrics import ReleasedMetric


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


def train(
    plan: TrainingPlan,
    state: ServerState,
    transport: Transport,
    books: Books,
    entropy: Entropy,
) -> Generator[RoundReport, None, Stop]:
    """Run rounds from `state` to the end of the plan, yielding a report after each.

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
            report = run_round(plan, state, transport, books, entropy)
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
    books: Books,
    entropy: Entropy,
) -> RoundReport:
    """One round, with the arguments and guarantees of `train`.

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
    return RoundReport(
        round=request.round,
        attempt=attempt,
        state=release.state,
        charge_hash=charge.hash,
        clipping_norms=state.clipping_norms,
        metrics=release.metrics,
        unclipped=release.unclipped,
    )
