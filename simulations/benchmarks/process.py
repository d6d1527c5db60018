"""The process of a contestant; `arena` starts it with an end of a pipe."""

import logging
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Protocol

import torch

from fedpriv.engine.arithmetic import tf32
from simulations.benchmarks.contestants import Contestant, Done, Train, Turn, fedpriv, plain
from simulations.benchmarks.works import WORKS

Clock = Callable[[], Mapping[int, float]]
"""Returns the seconds so far of each process that computes, by its number."""


def of_wall() -> dict[int, float]:
    """Return wall time, as if there were one process."""
    return {0: perf_counter()}


def of_processors() -> dict[int, float]:
    """Return processor time of this process (0) and of each of its forks."""
    forks = [child.pid for child in multiprocessing.active_children() if child.pid]
    # Linux's clock number of the processor time of all threads of another process.
    return {0: time.process_time()} | {pid: time.clock_gettime(~pid << 3 | 2) for pid in forks}


def between(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Return the seconds of this process plus those of the slowest fork, for which it waits."""
    took = {pid: seconds - before.get(pid, 0.0) for pid, seconds in after.items()}
    return took.pop(0) + max(took.values(), default=0.0)


def serve(pipe: "Pipe", train: Train, prepared: float = 0.0, clock: Clock = of_wall) -> None:
    """Train each turn that comes from the pipe, until the other end is closed."""
    while True:
        try:
            turn = pipe.recv()
        except EOFError:
            return
        seconds, began, rounds = 0.0, perf_counter(), 0
        while rounds == 0 or perf_counter() - began < turn.seconds:
            clock_before = clock()
            total = train(turn)
            seconds += between(clock_before, clock())
            rounds += 1
        pipe.send(Done(seconds / rounds, total, prepared))


class Pipe(Protocol):
    """A pipe from which turns come, until EOFError, and to which results go."""

    def recv(self) -> Turn:
        """Return the next turn."""

    def send(self, done: Done, /) -> None:
        """Send the result of a turn."""


class _Recorder:
    """An end of a pipe that adds the process's memory and our engine's log to each result."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lines = pipe, _Lines()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forget the peak
        self._held = _mebibytes("VmRSS")

    def recv(self) -> Turn:
        """Return the next turn."""
        turn: Turn = self._pipe.recv()
        return turn

    def send(self, done: Done) -> None:
        """Send the result, with memory and log."""
        growth = _mebibytes("VmHWM") - self._held
        self._pipe.send(replace(done, mebibytes=growth, logged=self._lines.text))


class _Lines(logging.Handler):
    """Collects the log of our engine."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.text = ""
        engine = logging.getLogger("fedpriv.engine")
        engine.setLevel(logging.INFO)
        engine.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.text += f"{record.getMessage()}\n"


def _mebibytes(kind: str) -> float:
    """Return this process's memory: "VmRSS" now, "VmHWM" at its peak; 0 if it is unknown."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(kind))


def contestant_named(name: str, work: str) -> Contestant:
    """Return the contestant of a name; no library of other rivals is imported."""
    makers: dict[str, Callable[[], Contestant]] = {
        "fedpriv": lambda: fedpriv,
        "rule": lambda: partial(fedpriv, timed=False),
        "alone": lambda: partial(fedpriv, path="alone"),
        "together": lambda: partial(fedpriv, path="together"),
        "plain": lambda: plain,
        "pfl": _pfl,
        "opacus": _opacus,
        "flower": partial(_flower, work),
    }
    return makers[name]()


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
    """Prepare, then take turns.

    Other work on the machine counts little in processor time, which Ray's workers do not report.
    """
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    contestant = contestant_named(name, work)
    clock = of_processors if device == "cpu" and name != "flower" else of_wall
    trained = WORKS[work]()
    import_module("torch._dynamo")  # otherwise torch imports it at the first gradient
    # Otherwise only some contestants would round to TF32, and sums would differ.
    with Connection(int(end)) as pipe, tf32(allowed=False):
        recorder, clock_before = _Recorder(pipe), clock()

        def use(train: Train) -> None:
            serve(recorder, train, between(clock_before, clock()), clock)

        contestant(trained, torch.device(device), use)


if __name__ == "__main__":
    main(*sys.argv[1:])
