"""The plan of a run, the functions that run one round, and the loop over rounds.

Start with `plan` and `rounds`. Nothing here can weaken the guarantee: only `fedpriv.privacy` draws
users and releases sums.
"""

from fedpriv.training.optimizers import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.rounds import RoundResult, ServerState, Stop, initial_state, train

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
