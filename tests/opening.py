"""Requests of a round without a ledger, for tests of what users are asked."""

from fedpriv.privacy.noise import Entropy
from fedpriv.privacy.round import Draws, RoundAttempt, draw_cohort
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.request import RoundRequest
from fedpriv.training.rounds import ServerState, round_request


def open_round(
    plan: TrainingPlan, state: ServerState, attempt: int, entropy: Entropy
) -> RoundRequest:
    """What an attempt at the next round asks of a cohort that is drawn here."""
    at = RoundAttempt(plan.run, state.round + 1, attempt, first=True)
    users = draw_cohort(plan.mechanism_at(state.clipping_norms), at, Draws(entropy))
    return round_request(plan, state, at, users, entropy)
