"""One round as pure functions, the plan that governs it, and the loop around it.

Read `rounds`. Nothing here can weaken the guarantee: users are reached and sums
released by `fedpriv.privacy` alone.
"""

from fedpriv.training.optimizers import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi
from fedpriv.training.rounds import (
    RoundResult,
    ServerState,
    Stop,
    TrainingPlan,
    initial_state,
    train,
)

__all__ = [
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedYogi",
    "RoundResult",
    "ServerState",
    "Stop",
    "TrainingPlan",
    "initial_state",
    "train",
]
