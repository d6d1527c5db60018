"""The process of a contestant; `arena` starts it with an end of a pipe."""

import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from time import perf_counter

import torch

from fedpriv.engine.task import tf32
from simulations.benchmarks.contestants import (
    CEILING,
    Contestant,
    Done,
    Train,
    fedpriv,
    plain,
    products,
)
from simulations.benchmarks.works import WORKS


def serve(pipe: Connection, train: Train) -> None:
    """Train whenever the other end of the pipe says so, and for so long, until it is closed."""
    while True:
        try:
            turn = pipe.recv()
        except EOFError:
            return
        rounds, began = 0, perf_counter()
        while rounds == 0 or perf_counter() - began < turn.seconds:
            total = train(turn)
            rounds += 1
        pipe.send(Done((perf_counter() - began) / rounds, total))


def contestant_named(name: str, work: str) -> Contestant:
    """Contestant of a name; of the rivals' libraries only its own is imported."""
    named: dict[str, Callable[[], Contestant]] = {
        "fedpriv": lambda: fedpriv,
        "plain": lambda: plain,
        CEILING: lambda: products,
        "pfl": _pfl,
        "opacus": _opacus,
        "flower": partial(_flower, work),
    }
    return named[name]()


def _pfl() -> Contestant:
    from simulations.benchmarks.rival_pfl import pfl  # noqa: PLC0415

    return pfl


def _opacus() -> Contestant:
    from simulations.benchmarks.rival_opacus import opacus  # noqa: PLC0415

    return opacus


def _flower(work: str) -> Contestant:
    from simulations.benchmarks.rival_flower import flower  # noqa: PLC0415

    return partial(flower, work)


def main(name: str, work: str, device: str, threads: str, end: str) -> None:
    """Prepare, then take turns."""
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    contestant = contestant_named(name, work)
    # Only some would round to TF32, and sums would differ.
    with Connection(int(end)) as pipe, tf32(allowed=False):
        contestant(WORKS[work](), torch.device(device), partial(serve, pipe))


if __name__ == "__main__":
    main(*sys.argv[1:])
