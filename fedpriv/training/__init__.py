"""One round as pure functions, the plan that governs it, and the loop around it."""

from fedpriv.training.fake import FakeTransport
from fedpriv.training.optimizers import FedAdaptive, FedAvg, FedAvgM, SecondMoment, ServerOptimizer
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.rounds import (
    RoundReport,
    ServerState,
    Stop,
    close_round,
    initial_state,
    open_round,
    train,
)

__all__ = [
    "FakeTransport",
    "FedAdaptive",
    "FedAvg",
    "FedAvgM",
    "RoundReport",
    "SecondMoment",
    "ServerOptimizer",
    "ServerState",
    "Stop",
    "TrainingPlan",
    "close_round",
    "initial_state",
    "open_round",
    "train",
]
