"""Users trained per second, by the engine and by a plain PyTorch loop, in one process.

Each kind of work has batches of 10, one local epoch and flat clipping:

* mlp: 784–128–10, 100 users of 50 images;
* cnn: the CNN of the DP-SGD tutorials, the same users;
* softmax: regression from 60 numbers to 10 classes, 1,000 users of 10 examples;
* transformer: `CharacterTransformer`, 40 users of 20 texts of 40 characters.

Both sides train, clip and sum; they run in alternation and the medians are printed.

    python -m simulations.throughput [--json FILE] [--activations float32 bfloat16]
    python -m simulations.throughput --device cuda --work mlp cnn --users 2048
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fedpriv.data.population import UserStore
from fedpriv.engine.arithmetic import Activations
from fedpriv.engine.task import Task
from fedpriv.engine.transport import InProcessTransport, chunk_memory_of, device_named
from fedpriv.experiment.models import cnn, mlp, softmax_regression
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, flat
from fedpriv.training.request import LocalTraining, RoundRequest
from simulations.transformer import CharacterTransformer

REPEATS = 7
TURN = 1.0  # seconds; the first round after other work is slower than the rounds that follow
LOCAL = LocalTraining(learning_rate=0.1, batch_size=10, epochs=1)


@dataclass(frozen=True)
class Work:
    """A model, and users of equal size with random examples of a shape.

    Examples are numbers of one of ten classes or, with an `alphabet`, texts in which the next
    character is predicted at each position.
    """

    model: Callable[[], nn.Module]
    users: int
    examples: int
    shape: tuple[int, ...]
    alphabet: int = 0

    @property
    def population(self) -> UserStore:
        """The users."""
        rng = np.random.default_rng(0)
        rows = self.users * self.examples
        offsets = np.arange(0, rows + 1, self.examples)
        if self.alphabet:
            text = rng.integers(0, self.alphabet, (rows, *self.shape))
            return UserStore({"x": text, "y": np.roll(text, -1, 1)}, offsets)
        x = rng.standard_normal((rows, *self.shape), dtype=np.float32)
        return UserStore({"x": x, "y": rng.integers(0, 10, rows)}, offsets)


WORKS = {
    "mlp": Work(mlp, 100, 50, (1, 28, 28)),
    "cnn": Work(cnn, 100, 50, (1, 28, 28)),
    "softmax": Work(partial(softmax_regression, inputs=60), 1_000, 10, (60,)),
    "transformer": Work(CharacterTransformer, 40, 20, (40,), alphabet=96),
}


def plain_round(model: nn.Module, users: UserStore, clipping_norm: float) -> None:
    """Train users in the obvious loop: a fresh copy of the model, SGD, clip, add."""
    start = [p.detach().clone() for p in model.parameters()]
    total = [torch.zeros_like(p) for p in start]
    for user in range(users.population):
        with torch.no_grad():
            for parameter, initial in zip(model.parameters(), start, strict=True):
                parameter.copy_(initial)
        optimizer = torch.optim.SGD(model.parameters(), lr=LOCAL.rate)
        data = users.examples_of(user)
        x, y = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])
        for rows in torch.split(torch.randperm(len(x)), LOCAL.batch_size or len(x)):
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(x[rows]), y[rows]))
            optimizer.step()
        update = [p.detach() - s for p, s in zip(model.parameters(), start, strict=True)]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(u) for u in update]))
        for summed, part in zip(total, update, strict=True):
            summed.add_(part * torch.clamp(clipping_norm / norm, max=1.0))
    with torch.no_grad():
        for parameter, initial in zip(model.parameters(), start, strict=True):
            parameter.copy_(initial)


def engine_round(transport: InProcessTransport, request: RoundRequest) -> None:
    """Do the same work with the engine."""
    total = np.zeros(Layout.of(request.parameters).dimension, np.int64)
    for partial_sum in transport.collect(request):
        total += partial_sum.total


def request_of(task: Task, users: UserStore) -> RoundRequest:
    """Return the request of a round with all users."""
    parameters = task.parameters()
    layout = Layout.of(parameters)
    return RoundRequest(
        run="throughput",
        round=0,
        attempt=0,
        parameters=parameters,
        clipping=Clipping(layout, flat(layout, 1.0)),
        local=LOCAL,
        users=np.arange(users.population),
        local_key=bytes(32),
    )


def measure(rounds: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Return median seconds of each kind of round; kinds take turns of several rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in rounds}
    for repeat in range(REPEATS + 2):
        for name, run in rounds.items():
            times, began = 0, time.perf_counter()
            while times == 0 or time.perf_counter() - began < TURN:
                run()
                times += 1
            if repeat >= 2:
                seconds[name].append((time.perf_counter() - began) / times)
    return {name: statistics.median(times) for name, times in seconds.items()}


def speeds_of(
    work: Work,
    device: torch.device,
    chunk_mebibytes: Sequence[int | None] = (None,),
    activations: Sequence[Activations] = ("float32",),
) -> dict[str, float]:
    """Return users per second of the plain loop, on the CPU, and of the engine."""
    torch.manual_seed(0)
    users, task = work.population, Task(work.model())
    request = request_of(task, users)
    rounds: dict[str, Callable[[], None]] = {
        "plain PyTorch loop": lambda: plain_round(task.model, users, 1.0)
    }
    for mebibytes, kind in itertools.product(chunk_mebibytes, activations):
        memory = chunk_memory_of(mebibytes, device)
        transport = InProcessTransport(task, users, device, memory, activations=kind, timed=True)
        name = f"fedpriv on {device.type}"
        name += "" if mebibytes is None else f", chunks of {mebibytes} MiB"
        name += "" if kind == "float32" else f", {kind}"
        rounds[name] = partial(engine_round, transport, request)
    return {name: work.users / seconds for name, seconds in measure(rounds).items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="users per second of the engine and of a loop")
    parser.add_argument("--work", choices=sorted(WORKS), nargs="+", default=list(WORKS))
    parser.add_argument("--users", type=int, help="instead of those above")
    parser.add_argument("--chunk-mebibytes", type=int, nargs="+", default=[None])
    choices = get_args(Activations)
    parser.add_argument("--activations", nargs="+", choices=choices, default=["float32"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    arguments = parser.parse_args()
    if arguments.users is not None and arguments.users < 1:
        parser.error(f"--users is {arguments.users}; it must be at least 1")
    device = device_named(arguments.device)
    speeds = {}
    for name in arguments.work:
        settings = device, arguments.chunk_mebibytes, arguments.activations
        work = WORKS[name]
        speeds[name] = speeds_of(replace(work, users=arguments.users or work.users), *settings)
        baseline, *_ = speeds[name].values()
        for engine, speed in speeds[name].items():
            print(f"{name:11} {engine:44} {speed:8.0f} users/s   {speed / baseline:5.2f} ×")
    if arguments.json:
        arguments.json.write_text(json.dumps(speeds, indent=2) + "\n")


if __name__ == "__main__":
    main()
