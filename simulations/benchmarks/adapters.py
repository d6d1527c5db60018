"""What privacy costs in fine-tuning adapters: memory and speed against the same without it.

    python -m simulations.benchmarks.adapters --json simulations/results/adapters.json

Users train the same adapters of the same frozen transformer, in batches of the same size: by whole
rounds of `fedpriv.simulate`, with clipping, exact noise, the ledger and checkpoints on disk, and by
a plain loop over users that clips nothing and adds no noise. Both run in one thread, each in a
process of its own that waits while the other has its turn: a round each. Of each the figures are
the median of processor time over the turns, so that other work on the machine counts little, and
the largest memory that its process ever had.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

USERS, EXAMPLES, LENGTH, ALPHABET, BATCH, RATE = 100, 20, 64, 96, 10, 0.1
Step = Callable[[], None]
"""Waits for a turn, and tells how long the last one took."""


def model_of(width: int, blocks: int) -> nn.Module:
    """A character transformer, of which adapters of rank 4 in all of its blocks are trained."""
    from fedpriv.engine.adapters import with_adapters  # noqa: PLC0415 - each process its own
    from simulations.transformer import CharacterTransformer  # noqa: PLC0415

    model = CharacterTransformer(length=LENGTH, width=width, blocks=blocks, heads=4)
    return with_adapters(model, 4, 8, ["blocks.*"])


def texts() -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Random characters and those that follow: of each user as many windows."""
    x, y = np.random.default_rng(0).integers(0, ALPHABET, (2, USERS * EXAMPLES, LENGTH))
    return x, y


def private(model: nn.Module, rounds: int, turn: Step) -> None:
    """Rounds of `fedpriv.simulate`, with all users in each."""
    import fedpriv  # noqa: PLC0415

    x, y = texts()
    few = x[:EXAMPLES], y[:EXAMPLES]
    people = fedpriv.Population.from_arrays(
        x, y, np.repeat(np.arange(USERS), EXAMPLES), held_out=few
    )
    mechanism = fedpriv.Mechanism.poisson(q=1.0, clipping=fedpriv.Flat(0.1))
    with tempfile.TemporaryDirectory() as folder:
        fedpriv.simulate(
            people,
            fedpriv.Task(model),
            mechanism.calibrate(epsilon=8.0, delta=1e-3, rounds=rounds),
            local=fedpriv.SGD(RATE, batch_size=BATCH, epochs=1),
            server=fedpriv.FedAvg(1.0),
            out=f"{folder}/run",
            trackers=[lambda _: turn()],
            evaluate_every=rounds,
            quiet=True,
        )


def plain(model: nn.Module, rounds: int, turn: Step) -> None:
    """The loop that one would write: SGD on a user's batches, add what it moved, start again."""
    x, y = map(torch.from_numpy, texts())
    trained = [p for p in model.parameters() if p.requires_grad]
    for _ in range(rounds):
        start = [p.detach().clone() for p in trained]
        total = [torch.zeros_like(p) for p in start]
        for user in range(USERS):
            optimizer = torch.optim.SGD(trained, lr=RATE)
            order = user * EXAMPLES + torch.randperm(EXAMPLES)
            for batch in torch.split(order, BATCH):
                optimizer.zero_grad()
                torch.autograd.backward(functional.cross_entropy(model(x[batch]), y[batch]))
                optimizer.step()
            with torch.no_grad():
                for p, s, t in zip(trained, start, total, strict=True):
                    t.add_(p - s)
                    p.copy_(s)
        with torch.no_grad():
            for p, t in zip(trained, total, strict=True):
                p.add_(t, alpha=1.0 / USERS)
        turn()


CONTESTANTS = {"fedpriv": private, "plain": plain}


def contend(name: str, width: int, blocks: int, rounds: int, end: int) -> None:
    """Train round after round, each when the other end of a pipe says so."""
    torch.set_num_threads(1)
    with Connection(end) as pipe:
        began = time.process_time()

        def turn() -> None:
            nonlocal began
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux
            pipe.send((time.process_time() - began, memory / 1024))
            pipe.recv()
            began = time.process_time()

        CONTESTANTS[name](model_of(width, blocks), rounds, turn)


def measured(
    width: int, blocks: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds of the rounds but the first, which tries shapes, and peak memory of each."""
    pipes, processes = dict[str, Connection](), list[subprocess.Popen[bytes]]()
    for name in CONTESTANTS:
        ours, theirs = Pipe()
        with theirs:
            given = [name, *map(str, (width, blocks, rounds, theirs.fileno()))]
            command = [sys.executable, "-m", "simulations.benchmarks.adapters", "contend", *given]
            processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()]))
        pipes[name] = ours
        ours.poll(None)  # its first round, before the other begins
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    memory = dict.fromkeys(pipes, 0.0)
    for number in range(rounds):
        for name, pipe in pipes.items():
            took, memory[name] = pipe.recv()
            if number:
                seconds[name].append(took)
            pipe.send(None)
            if number + 1 < rounds:
                pipe.poll(None)  # until its next round is done
    for process in processes:
        process.wait()
    return seconds, memory


def main() -> None:
    """Measure, print and keep the figures."""
    parser = argparse.ArgumentParser(description="adapters: private rounds against a plain loop")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument(
        "--rounds", type=int, default=8, help="turns, and one more that is left out"
    )
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    from simulations.benchmarks.machine import made_by  # noqa: PLC0415

    seconds, memory = measured(given.width, given.blocks, given.rounds + 1)
    ratios = {
        "throughput": median(seconds["plain"]) / median(seconds["fedpriv"]),
        "memory": memory["fedpriv"] / memory["plain"],
    }
    print(f"throughput {ratios['throughput']:.2f}, memory {ratios['memory']:.2f} of a plain loop")
    if given.json:
        model = model_of(given.width, given.blocks)
        sizes = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        }
        kept = made_by("benchmarks.adapters", ["fedpriv", "torch", "numpy"]) | {
            "model": sizes,
            "users": USERS,
            "processor seconds of each round": seconds,
            "peak MiB": memory,
            "fedpriv over plain": ratios,
        }
        given.json.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["contend"]:
        contend(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        main()
