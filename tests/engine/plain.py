"""The slow obvious way to train users: torch.optim on a fresh copy of the model, one by one."""

import copy
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fedpriv.data.population import UserStore
from fedpriv.engine.arithmetic import generators_apart, seed_generators
from fedpriv.engine.schedule import Integers
from fedpriv.engine.task import Task, outputs_of
from fedpriv.privacy.clipping_torch import TorchTensors
from fedpriv.training.local import AdamW
from fedpriv.training.request import LocalTraining

CPU = torch.device("cpu")
_CHOICE = 2**62  # the place of the word that chooses rows


def batches_of(
    user: int, start: int, size: int, local: LocalTraining, key: bytes
) -> Iterator[Integers]:
    """The rows of each batch of one user, whose rows in the store begin at `start`."""
    rows = rows_in_order(user, start, size, local, key)
    batch, word = local.batch_size or len(rows), _word(int.from_bytes(key[:8], "little"), user)
    of_pass = range(0, len(rows), batch)
    for step in range(local.steps or len(of_pass) * (local.epochs or 0)):
        number, place = divmod(step, len(of_pass))
        if place == 0:
            order = _shuffled(_word(word, number), len(rows))
        yield rows[order[of_pass[place] : of_pass[place] + batch]]


def rows_in_order(user: int, start: int, size: int, local: LocalTraining, key: bytes) -> Integers:
    """The rows of one user that count, in their order in the store."""
    chosen = [*range(size)]
    if local.max_examples is not None and local.max_examples < size:
        word = _word(_word(int.from_bytes(key[:8], "little"), user), _CHOICE)
        chosen = sorted(_shuffled(word, size)[: local.max_examples])
    return start + np.array(chosen, np.int64)


def _shuffled(word: int, count: int) -> list[int]:
    return sorted(range(count), key=lambda number: _word(word, number))


def _word(first: int, number: int) -> int:
    """A word of the sequence of SplitMix64 that begins with one word, in Python's own numbers."""
    word = (first + (number + 1) * 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


def moved(
    task: Task, store: UserStore, users: Sequence[int], local: LocalTraining, key: bytes
) -> TorchTensors:
    """How far users move: [n, *shape] by name."""
    with generators_apart(device=CPU):
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
