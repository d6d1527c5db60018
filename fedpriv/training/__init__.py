"""One round as pure functions, the plan that governs it, and the loop around it."""

from fedpriv.training.fake import FakeTransport
from fedpriv.training.optimizers import (
    FedAdagrad,
    FedAdam,
    FedAvg,
    FedAvgM,
    FedYogi,
    ServerOptimizer,
)
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.rounds import (
    RoundResult,
    ServerState,
    Stop,
    close_round,
    initial_state,
    open_round,
    train,
)

__all__ = [
    "FakeTransport",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedYogi",
    "RoundResult",
    "ServerOptimizer",
    "ServerState",
    "Stop",
    "TrainingPlan",
    "close_round",
    "initial_state",
    "open_round",
    "train",
]
