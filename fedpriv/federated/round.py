"""One round as two pure functions: open it, and close it with what the users returned.

Between the two lie the transport, which fills the partial sums, and the ledger, which charges the
round's event. `close_round` cannot be called without the receipt of that charge.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpriv.accounting.ledger import Charge
from fedpriv.errors import LedgerError
from fedpriv.federated.aggregate import add_up
from fedpriv.federated.optimizers import OptimizerState, Parameters
from fedpriv.federated.plan import TrainingPlan
from fedpriv.federated.transport import PartialSum, RoundRequest
from fedpriv.privacy.entropy import Entropy
from fedpriv.privacy.layout import FloatVector


@dataclass(frozen=True)
class ServerState:
    """What the server carries from round to round; all of it was released.

    Attributes:
        round: number of the next round, from 0.
        parameters: the model, float32 tensors in the order of the plan's layout.
        optimizer: moments of the server optimiser.
    """

    round: int
    parameters: Parameters
    optimizer: OptimizerState


def initial_state(plan: TrainingPlan, parameters: Parameters) -> ServerState:
    """State before the first round; `parameters` must follow the plan's layout."""
    ordered = {
        name: np.asarray(tensor, dtype=np.float32)
        for name, tensor in plan.layout.unflatten(plan.layout.flatten(parameters)).items()
    }
    return ServerState(0, ordered, plan.optimizer.init(ordered))


def open_round(
    plan: TrainingPlan, state: ServerState, attempt: int, entropy: Entropy
) -> RoundRequest:
    """Draw the cohort and say what its users are to do.

    Sampling, noise and local training take keys for different purposes, so they are separate
    streams; a new attempt at a round has new ones.
    """
    return RoundRequest(
        run=plan.run,
        round=state.round,
        attempt=attempt,
        parameters=state.parameters,
        groups=plan.groups,
        local=plan.local,
        users=_cohort(plan, state, attempt, entropy),
        local_key=entropy.key(_purpose("local", plan, state.round, attempt)),
    )


def sum_round(
    plan: TrainingPlan, request: RoundRequest, partials: Iterable[PartialSum]
) -> FloatVector:
    """Total of the partial sums that can be believed: [D]; secret until it is noised."""
    return add_up(partials, plan.mechanism.query.sum_query, request.users.size)


def close_round(
    plan: TrainingPlan,
    state: ServerState,
    total: FloatVector,
    charge: Charge,
    entropy: Entropy,
) -> ServerState:
    """Noise the total once, average it over the fixed denominator and step the server.

    Args:
        plan: the plan of the run.
        state: the state with which the round was opened.
        total: [D] from `sum_round`.
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
    if charge.event != plan.mechanism.event:
        raise LedgerError(f"the event charged is {charge.event}, not {plan.mechanism.event}")
    charged = charge.redeem()
    purpose = _purpose("noise", plan, state.round, charge.attempt)
    average, realised = plan.mechanism.release(total, entropy, purpose)
    if realised != charged:
        raise LedgerError(f"the event realised is {realised}, not the one charged, {charged}")
    parameters, optimizer = plan.optimizer.update(
        plan.layout.unflatten(average), state.optimizer, state.parameters
    )
    return ServerState(state.round + 1, parameters, optimizer)


def _cohort(
    plan: TrainingPlan, state: ServerState, attempt: int, entropy: Entropy
) -> npt.NDArray[np.int64]:
    return plan.mechanism.draw_cohort(entropy, _purpose("sampling", plan, state.round, attempt))


def _purpose(stream: str, plan: TrainingPlan, round_number: int, attempt: int) -> str:
    return f"{stream}/{plan.run}/{round_number}/{attempt}"
