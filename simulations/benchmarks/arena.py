"""Turns of contestants, each in its own processes, which are stopped between turns."""

import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import numpy as np

from fedpriv.errors import WorkerError
from simulations.benchmarks.contestants import Done, Turn
from simulations.benchmarks.machine import environment

_LONGEST_END = 60.0  # seconds; Ray takes a few


@dataclass(frozen=True)
class Setting:
    """The arguments with which a contestant is started."""

    contestant: str  # its name
    work: str  # name of the work
    device: str  # "cpu" or "cuda"
    threads: int  # of torch, in each process
    processes: int = 1  # which share the users of a turn


@dataclass(frozen=True)
class Process:
    """A process of a contestant, stopped until it must train."""

    name: str  # of the contestant
    process: subprocess.Popen[bytes]
    pipe: Connection

    def begin(self, turn: Turn) -> None:
        """Continue the process, and let it train."""
        self.process.send_signal(signal.SIGCONT)
        try:
            self.pipe.send(turn)
        except OSError as error:
            raise self._ended() from error

    def end(self) -> Done:
        """Wait for the end of a turn, and stop the process."""
        try:
            answer = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        self.process.send_signal(signal.SIGSTOP)
        if not isinstance(answer, Done):
            raise WorkerError(f"{self.name} sent a {type(answer).__name__}; it must send a Done")
        return answer

    def leave(self) -> None:
        """End the process, even if it is stopped."""
        self.process.send_signal(signal.SIGCONT)
        self.pipe.close()
        try:
            self.process.wait(_LONGEST_END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _ended(self) -> WorkerError:
        return WorkerError(f"the process of {self.name} has ended; see its output above")


@dataclass(frozen=True)
class Player:
    """A contestant that has prepared and waits, stopped, for its turns."""

    processes: Sequence[Process]

    def take(self, turn: Turn) -> Done:
        """Let it train while all others are stopped.

        Several processes train an equal share of the users each, and the slowest one determines the
        time of a round: sending models and adding up sums is free for them.
        """
        for process, users in zip(self.processes, self._shares(turn.users), strict=True):
            process.begin(replace(turn, users=users))
        answers = [process.end() for process in self.processes]
        slowest = max(answers, key=lambda answer: answer.seconds)
        return replace(slowest, total=np.sum([answer.total for answer in answers], 0))

    def leave(self) -> None:
        """End the processes, even if they are stopped."""
        for process in self.processes:
            process.leave()

    def _shares(self, users: range) -> Iterator[range]:
        count, processes = len(users), len(self.processes)
        for number in range(processes):
            yield users[count * number // processes : count * (number + 1) // processes]


@contextmanager
def playing(settings: Mapping[str, Setting]) -> Iterator[dict[str, Player]]:
    """Yield players by the names of their settings; their processes end with the context."""
    started: dict[str, list[Process]] = {name: [] for name in settings}
    try:
        for name, setting in settings.items():
            for _ in range(setting.processes):
                started[name].append(_started(name, setting))
        yield {name: Player(processes) for name, processes in started.items()}
    finally:
        for processes in started.values():
            Player(processes).leave()


def _started(name: str, setting: Setting) -> Process:
    # A new interpreter, because pfl does not work in one that multiprocessing started.
    parent_end, child_end = multiprocessing.Pipe()
    with child_end:
        end = child_end.fileno()
        arguments = [setting.contestant, setting.work, setting.device, str(setting.threads)]
        command = [sys.executable, "-m", "simulations.benchmarks.process", *arguments, str(end)]
        process = subprocess.Popen(command, pass_fds=[end], env=environment(setting.device))
    return Process(name, process, parent_end)
