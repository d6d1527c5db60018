"""The cost of privacy for larger models: speed, memory and checkpoints with privacy and without.

    python -m simulations.benchmarks.large_models simulations/results/large_models.json

Models are adapters of a transformer of 0.9 M and of one of 85 M parameters, whose other parameters
are frozen, and a ResNet-18 with group normalisation, all of whose 11 M parameters are trained.
Users train a model in batches of the same size: in whole rounds of `fedpriv.simulate`, with
clipping, exact noise, the ledger and checkpoints on disk, and in a plain loop over users without
clipping and noise. Both run in one thread, each in its own process, and take turns of one round.
Figures are the median of processor time over the turns, so that other work on the machine counts
little, and the peak memory of each process. A checkpoint holds the trained tensors, their mean and
the server optimiser's state.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from simulations.benchmarks.models import resnet18

LENGTH, ALPHABET, RATE = 64, 96, 0.1
Turn = Callable[[float], None]
"""Reports the end of a turn with the MiB of a checkpoint, and waits for the next turn."""
Arrays = tuple[NDArray[Any], NDArray[np.int64]]


def adapters(width: int, blocks: int) -> nn.Module:
    """Return a character transformer with adapters of rank 4 in all of its blocks to train."""
    from fedpriv.engine.adapters import with_adapters  # noqa: PLC0415 - each process its own
    from simulations.transformer import CharacterTransformer  # noqa: PLC0415

    model = CharacterTransformer(length=LENGTH, width=width, blocks=blocks, heads=4)
    return with_adapters(model, 4, 8, ["blocks.*"])


def texts(rows: int) -> Arrays:
    """Return random characters and the characters that follow: [rows, 64] each."""
    x, y = np.random.default_rng(0).integers(0, ALPHABET, (2, rows, LENGTH))
    return x, y


def images(rows: int) -> Arrays:
    """Return random images [rows, 3, 32, 32] and classes [rows]."""
    draw = np.random.default_rng(0)
    return draw.normal(size=(rows, 3, 32, 32)).astype(np.float32), draw.integers(0, 10, rows)


@dataclass(frozen=True)
class Contest:
    """A model and the users who train it."""

    build: Callable[[], nn.Module]
    rows_of: Callable[[int], Arrays]
    users: int
    examples: int  # of each user
    batch: int
    rounds: int = 5  # turns, after one that does not count, in which shapes are tried


CONTESTS = {
    "adapters": Contest(partial(adapters, 128, 4), texts, 100, 20, 10),
    "large adapters": Contest(partial(adapters, 768, 12), texts, 6, 4, 2),
    "resnet-18": Contest(resnet18, images, 4, 50, 10, 4),
    "tiny": Contest(partial(adapters, 16, 1), texts, 5, 4, 2, 2),  # for tests
}


def private(contest: Contest, model: nn.Module, turn: Turn) -> None:
    """Run rounds of `fedpriv.simulate`, with all users in each."""
    import fedpriv  # noqa: PLC0415

    rounds, (x, y) = contest.rounds + 1, contest.rows_of(contest.users * contest.examples)
    batch, owner = (x[: contest.batch], y[: contest.batch]), np.arange(len(x)) // contest.examples
    people = fedpriv.Population.from_arrays(x, y, owner, held_out=batch)
    mechanism = fedpriv.Mechanism.poisson(q=1.0, clipping=fedpriv.Flat(0.1))

    with tempfile.TemporaryDirectory() as folder:

        def report(_: object) -> None:
            files = [*Path(folder).glob("run/checkpoints/*")]
            turn(max((file.stat().st_size for file in files), default=0) / 2**20)

        fedpriv.simulate(
            people,
            fedpriv.Task(model),
            mechanism.calibrate(epsilon=8.0, delta=1e-3, rounds=rounds),
            local=fedpriv.SGD(RATE, batch_size=contest.batch, epochs=1),
            server=fedpriv.FedAvg(1.0),
            out=f"{folder}/run",
            trackers=[report],
            evaluate_every=rounds,
            quiet=True,
        )


def plain(contest: Contest, model: nn.Module, turn: Turn) -> None:
    """Run the obvious loop: SGD on a user's batches, add its update, start again."""
    x, y = map(torch.from_numpy, contest.rows_of(contest.users * contest.examples))
    trained = [p for p in model.parameters() if p.requires_grad]
    for _ in range(contest.rounds + 1):
        start = [p.detach().clone() for p in trained]
        total = [torch.zeros_like(p) for p in start]
        for user in range(contest.users):
            optimizer = torch.optim.SGD(trained, lr=RATE)
            order = user * contest.examples + torch.randperm(contest.examples)
            for batch in torch.split(order, contest.batch):
                optimizer.zero_grad()
                torch.autograd.backward(functional.cross_entropy(model(x[batch]), y[batch]))
                optimizer.step()
            with torch.no_grad():
                for p, s, t in zip(trained, start, total, strict=True):
                    t.add_(p - s)
                    p.copy_(s)
        with torch.no_grad():
            for p, t in zip(trained, total, strict=True):
                p.add_(t, alpha=1.0 / contest.users)
        turn(0.0)


CONTESTANTS = {"fedpriv": private, "plain": plain}


def contend(name: str, model_name: str, end: int) -> None:
    """Train round after round, each when a message comes from the other end of a pipe."""
    torch.set_num_threads(1)
    with Connection(end) as pipe:
        began = time.process_time()

        def turn(checkpoint: float) -> None:
            nonlocal began
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
            pipe.send((time.process_time() - began, memory / 1024, checkpoint))
            pipe.recv()
            began = time.process_time()

        CONTESTANTS[name](CONTESTS[model_name], CONTESTS[model_name].build(), turn)


def measured(model_name: str) -> dict[str, Any]:
    """Return seconds of the rounds except the first, peak memories, and the checkpoint's size."""
    contest, pipes, processes = CONTESTS[model_name], dict[str, Connection](), []
    for name in CONTESTANTS:
        parent_end, child_end = Pipe()
        with child_end:
            module = "simulations.benchmarks.large_models"
            command = [
                sys.executable,
                "-m",
                module,
                "contend",
                name,
                model_name,
                str(child_end.fileno()),
            ]
            processes.append(subprocess.Popen(command, pass_fds=[child_end.fileno()]))
        pipes[name] = parent_end
        parent_end.poll(None)  # its first round, before the other begins
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    memory, checkpoint = dict.fromkeys(pipes, 0.0), dict.fromkeys(pipes, 0.0)
    for number in range(contest.rounds + 1):
        for name, pipe in pipes.items():
            took, memory[name], checkpoint[name] = pipe.recv()
            if number:
                seconds[name].append(took)
            pipe.send(None)
            if number < contest.rounds:
                pipe.poll(None)  # until its next round is done
    for process in processes:
        process.wait()
    model = contest.build()
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(trained),
        "users": contest.users,
        "users per second": contest.users / median(seconds["fedpriv"]),
        "processor seconds of each round": seconds,
        "peak MiB": memory,
        "MiB of a checkpoint": checkpoint["fedpriv"],
        "MiB of the trained tensors": sum(trained) * 4 / 2**20,
        "throughput over plain": median(seconds["plain"]) / median(seconds["fedpriv"]),
        "memory over plain": memory["fedpriv"] / memory["plain"],
    }


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description="private rounds against a plain loop")
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", nargs="+", choices=CONTESTS, default=list(CONTESTS)[:3])
    options = parser.parse_args()
    from simulations.benchmarks.machine import made_by  # noqa: PLC0415

    content = made_by("benchmarks.large_models", ["fedpriv", "torch", "numpy"])
    rows = {name: measured(name) for name in options.model}
    for name, row in rows.items():
        ratios = row["throughput over plain"], row["memory over plain"]
        print(f"{name}: throughput {ratios[0]:.2f}, memory {ratios[1]:.2f} of a plain loop")
    content["models"] = rows
    options.file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["contend"]:
        contend(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
