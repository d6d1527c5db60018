"""A small task, and requests to everyone of a population under any clipping."""

from collections.abc import Sequence

import torch
from torch import nn

from fedpriv.engine.task import Task
from fedpriv.federated.plan import TrainingPlan
from fedpriv.federated.round import initial_state, open_round
from fedpriv.federated.transport import LocalTraining, RoundRequest
from fedpriv.losses import cross_entropy
from fedpriv.privacy.adaptive import AdaptiveClipping
from fedpriv.privacy.entropy import SeededEntropy
from fedpriv.privacy.groups import flat, joint, layers, per_layer, scales_by_dimension
from fedpriv.privacy.layout import Layout
from fedpriv.privacy.metrics import Metric
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.privacy.weights import Averaging


def make_task() -> Task:
    torch.manual_seed(0)
    return Task(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), cross_entropy)


def request_to_all(
    users: int,
    local: LocalTraining,
    strategy: str,
    metrics: Sequence[Metric],
    averaging: Averaging,
    *,
    norm: float = 0.2,
    adaptive: bool = True,
) -> RoundRequest:
    """The request of a plan's first round, whose coins all fall the same way."""
    parameters = make_task().parameters()
    layout = Layout.of(parameters)
    groups = {
        "flat": lambda: flat(layout, norm),
        "per-layer": lambda: per_layer(layout, layers(layout), {"0": norm / 4, "2": norm * 1.5}),
        "joint": lambda: joint(layout, norm, scales_by_dimension(layout)),
    }[strategy]()
    plan = TrainingPlan(
        run="run",
        population="people",
        rounds=1,
        layout=layout,
        groups=groups,
        noise_shares=(1.0 / len(groups),) * len(groups),
        noise_multiplier=1.0,
        sampling=PoissonSampling(users, 1.0),
        local=local,
        metrics=tuple(metrics),
        metrics_share=0.1 if metrics else 0.0,
        adaptive=AdaptiveClipping() if adaptive else None,
        averaging=averaging,
    )
    return open_round(plan, initial_state(plan, parameters), 0, SeededEntropy(0))
