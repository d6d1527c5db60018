"""Chunks on a device that is no CPU: nothing in them waits for it, or is on two devices."""

from dataclasses import replace
from functools import partial
from itertools import cycle
from unittest.mock import patch

import numpy as np
import pytest
import torch

from fedpriv.data.population import UserStore
from fedpriv.engine.measuring import diagnose_users
from fedpriv.engine.roads import Road
from fedpriv.engine.task import Task
from fedpriv.engine.trainer import Trainer, sizes_of
from fedpriv.privacy.clipping_torch import integer_sum
from fedpriv.training.local import FedRecon, Scaffold
from fedpriv.training.request import LocalTraining, RoundRequest
from tests.engine.fake_device import DEVICE, WaitedError, on_device, without_autocast
from tests.isolation import (
    ALONE,
    LOCALS,
    MODELS,
    PERSONAL,
    READERS,
    Plan,
    User,
    request_of,
    store_of,
    task_of,
)

USERS, LANES = 5, 8
TOGETHER = [model for model in MODELS if model not in ALONE and not model.startswith("lstm")]


def fits(model: str, local: LocalTraining) -> bool:
    """Whether an algorithm is for a model with, or without, personal parameters."""
    if isinstance(local, FedRecon):
        return model in PERSONAL
    return not (isinstance(local, Scaffold) and model in PERSONAL)


def chosen() -> list[tuple[str, LocalTraining, str]]:
    """Each model with a local algorithm and a clipping, which take turns."""
    clippings, found = cycle(("flat", "per-layer", "joint", "groups")), []
    for number, model in enumerate(TOGETHER):
        locals_ = [local for local in LOCALS if fits(model, local)]
        found.append((model, locals_[(4 * number + 3) % len(locals_)], next(clippings)))
    return found


def everything() -> list[tuple[str, LocalTraining, str]]:
    """A third of all models with all local algorithms, each of both several times."""
    clippings = {"personal-scale": "per-layer"}  # all that is not personal of it is one tensor
    pairs = [(m, local, clippings.get(m, "groups")) for m in TOGETHER for local in LOCALS]
    return [pair for pair in pairs if fits(pair[0], pair[1])][::3]


def trainer_of(task: Task, users: UserStore) -> Trainer:
    """Decides what depends on values, on the CPU and before a chunk trains."""
    trainer = Trainer(task, users, None, DEVICE, 2**27, "float32", observed=True)
    _ = trainer.alone, trainer.constants
    return trainer


def train(trainer: Trainer, request: RoundRequest, *, together: bool) -> torch.Tensor:
    """All that is done with a chunk up to the sum that is fetched, with true figures."""
    road = Road((LANES,), 4) if together else Road()
    sizes = sizes_of(trainer.users, request.users)
    chunk, *_ = road.chunks(trainer, request.local, request.users, sizes)
    with on_device(may_wait=True):
        start = trainer.begin(request)
    with on_device():
        examples = trainer._examples(request, chunk)
        tensors = trainer._sent(request, start, examples)
        diagnose_users(trainer._blocks(start, examples), tensors, request)
        users = examples.counts[: len(chunk.users)]
        weights = np.minimum(users, request.clipping.weight_cap)
        return integer_sum(tensors, request.clipping, weights)


def check(model: str, local: LocalTraining, clipping: str) -> None:
    users = [User("normal", 6, seed) for seed in range(USERS)]
    plan = Plan(model, clipping, "weights", local, True, True, 0.3)
    with without_autocast():
        trainer = trainer_of(task_of(model), store_of(users, model in READERS))
        with patch("torch.equal", return_value=True):  # the device holds no numbers to compare
            _ = trainer.side_by_side, trainer.measured
        for together in (False, True):
            total = train(trainer, request_of(plan, USERS), together=together)
            assert total.device.type == DEVICE.type
            assert total.dtype == torch.int64


@pytest.mark.parametrize(("model", "local", "clipping"), chosen(), ids=str)
def test_no_chunk_waits_for_its_device(model: str, local: LocalTraining, clipping: str) -> None:
    check(model, local, clipping)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "local", "clipping"), everything(), ids=str)
def test_no_chunk_waits_whatever_is_trained(
    model: str, local: LocalTraining, clipping: str
) -> None:
    check(model, local, clipping)


class Reads(torch.nn.Module):
    """A model that looks at values, which are no user's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(36, 4)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x.flatten(1))
        return y if bool(self.scale == 1.0) else y * self.scale


class Mixes(torch.nn.Module):
    """A model with a tensor that stays where it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scales = torch.nn.Linear(36, 4), torch.ones(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.flatten(1)) * self.scales


@pytest.mark.parametrize(("model", "why"), [(Reads, "cannot be called on"), (Mixes, "on the CPU")])
def test_what_waits_or_mixes_devices_is_noticed(model: type[torch.nn.Module], why: str) -> None:
    plan = Plan("linear", "flat", "equal", LOCALS[1], False, False, 0.3)
    users = store_of([User("normal", 6, seed) for seed in range(USERS)], words=False)
    with without_autocast():
        trainer = trainer_of(Task(model()), users)
        request = replace(request_of(plan, USERS), parameters=trainer.task.parameters())
        with pytest.raises(Exception, match=why):
            train(trainer, request, together=False)


def test_copies_that_wait_are_noticed() -> None:
    with on_device():
        here, there = torch.ones(3), torch.ones(3, device=DEVICE)
        there.copy_(here, non_blocking=True)
        for waits in (
            partial(there.copy_, here),
            there.cpu,
            partial(here.to, DEVICE),
            partial(there.__getitem__, torch.tensor([0, 1])),
        ):
            with pytest.raises(WaitedError):
                waits()
        assert (here.to(DEVICE, non_blocking=True) + there).device.type == DEVICE.type
