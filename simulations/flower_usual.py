"""Flower's usual way: a node for each user, FedAvg, and one message per user and round.

The experiment is `flower_overhead.toml`, without noise and without a ledger. Nodes clip as in
fedpriv, so that with zero noise both ways give the same model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from fedpriv.data.population import UserStore
from fedpriv.engine.task import Task
from fedpriv.experiment.build import build_task, population_of
from fedpriv.experiment.config import Config, load_config

WORK = Path(__file__).with_name("flower_overhead.toml")
app = ClientApp()


@dataclass(frozen=True)
class Work:
    """The work of users in a round."""

    config: Config  # the experiment
    task: Task  # model and loss
    users: UserStore  # their data


# As in usual apps of Flower: a process loads the data of its nodes once.
@lru_cache(maxsize=1)
def work_of(users: int) -> Work:
    """Return the experiment with this number of users."""
    config = load_config(WORK, [f"data.options.users={users}"])
    model = config.model
    task = build_task(model.name, model.options, model.seed, model.loss)
    return Work(config, task, population_of(config).users)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the model of a message on the one user of the node, and send it back."""
    user, users = (context.node_config[name] for name in ("partition-id", "num-partitions"))
    work = work_of(int(users))
    model, data = work.task.model, work.users.examples_of(int(user))
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    start = [parameter.detach().clone() for parameter in model.parameters()]
    x, y = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])
    local = work.config.training()
    optimizer = torch.optim.SGD(model.parameters(), lr=local.rate)
    for _ in range(local.epochs or 1):
        optimizer.zero_grad()
        torch.autograd.backward(work.task.losses_of(model(x), y).mean())
        optimizer.step()
    _clip(model, start, work.config.clipping.norm or torch.inf)
    content = RecordDict({"arrays": ArrayRecord(model.state_dict())})
    content["metrics"] = MetricRecord({"num-examples": len(y)})
    return Message(content, reply_to=message)


def _clip(model: torch.nn.Module, start: list[torch.Tensor], norm: float) -> None:
    """Move a model back towards its start until its distance is at most `norm`."""
    with torch.no_grad():
        update = [p - s for p, s in zip(model.parameters(), start, strict=True)]
        moved = torch.linalg.vector_norm(torch.cat([part.ravel() for part in update]))
        scale = torch.clamp(norm / moved, max=1.0)
        for parameter, initial, part in zip(model.parameters(), start, update, strict=True):
            parameter.copy_(initial + scale * part)


def federate(
    grid: Grid, users: int, drawn: int, rounds: int, on_round: Callable[[], None]
) -> ArrayRecord:
    """Train with Flower's FedAvg, at least 2 users per round; return the final model.

    `on_round` is called before the first round and after each round.
    """

    def after(_round: int, _arrays: ArrayRecord) -> None:
        on_round()

    averaging = FedAvg(
        fraction_train=drawn / users,
        fraction_evaluate=0.0,
        min_train_nodes=drawn,
        min_available_nodes=users,
    )
    initial = ArrayRecord(work_of(users).task.model.state_dict())
    result = averaging.start(grid, initial, rounds, evaluate_fn=after)
    return result.arrays
