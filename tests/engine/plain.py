"""The slow obvious way to train users: torch.optim on a fresh copy of the model, one by one."""

import copy
from collections.abc import Sequence

import torch

from fedpriv.data.population import UserStore
from fedpriv.engine.arithmetic import generators_apart, seed_generators
from fedpriv.engine.schedule import batches_of
from fedpriv.engine.task import Task, outputs_of
from fedpriv.privacy.clipping_torch import TorchTensors
from fedpriv.training.local import AdamW
from fedpriv.training.request import LocalTraining

CPU = torch.device("cpu")


def moved(
    task: Task, store: UserStore, users: Sequence[int], local: LocalTraining, key: bytes
) -> TorchTensors:
    """How far users move: [n, *shape] by name."""
    with generators_apart(CPU):
        each = [_moved(task, store, user, local, key) for user in users]
    return {name: torch.stack([own[name] for own in each]) for name in each[0]}


def _moved(
    task: Task, store: UserStore, user: int, local: LocalTraining, key: bytes
) -> TorchTensors:
    model, rows = copy.deepcopy(task.model), store.rows_of(user)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    start = {name: p.detach().clone() for name, p in trained.items()}
    if isinstance(local, AdamW):
        betas, decay = (local.beta1, local.beta2), local.weight_decay
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(
            trained.values(), local.rate, betas, local.epsilon, decay
        )
    else:
        optimizer = torch.optim.SGD(trained.values(), local.rate, local.momentum)
    seed_generators(key, user, CPU)
    for batch in batches_of(user, rows.start, rows.stop - rows.start, local, key):
        columns = {name: torch.from_numpy(column) for name, column in store.take(batch).items()}
        x, y = task.given(columns)
        losses = task.losses_of(outputs_of(model, x), y)
        drift = sum(((p - start[name]) ** 2).sum() for name, p in trained.items())
        optimizer.zero_grad()
        (losses.sum() / task.shares(y).sum() + local.proximal / 2 * drift).backward()
        optimizer.step()
    return {name: p.detach() - start[name] for name, p in trained.items()}
