"""One contestant at a time: each in a process of its own, stopped while it is not its turn."""

import multiprocessing
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

from fedpriv.errors import WorkerError
from simulations.benchmarks.contestants import Done, Turn
from simulations.benchmarks.machine import environment

_LONGEST_END = 60.0  # seconds; Ray takes a few


@dataclass(frozen=True)
class Setting:
    """What a contestant's process is started with.

    Attributes:
        contestant: its name.
        work: name of the work.
        device: "cpu" or "cuda".
        threads: of torch.
    """

    contestant: str
    work: str
    device: str
    threads: int


@dataclass(frozen=True)
class Player:
    """A contestant that has prepared and waits, stopped, for its turns."""

    name: str
    process: subprocess.Popen[bytes]
    pipe: Connection

    def take(self, turn: Turn) -> Done:
        """Let it train while all others are stopped.

        Raises:
            WorkerError: its process has ended.
        """
        self.process.send_signal(signal.SIGCONT)
        try:
            self.pipe.send(turn)
            done = self.pipe.recv()
        except (EOFError, OSError) as error:
            raise WorkerError(f"the process of {self.name} has ended; see above why") from error
        self.process.send_signal(signal.SIGSTOP)
        if not isinstance(done, Done):
            raise WorkerError(f"{self.name} sent a {type(done).__name__}; it must send a Done")
        return done

    def leave(self) -> None:
        """End the process, also one that is stopped."""
        self.process.send_signal(signal.SIGCONT)
        self.pipe.close()
        try:
            self.process.wait(_LONGEST_END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextmanager
def playing(settings: list[Setting]) -> Iterator[dict[str, Player]]:
    """Players by name, one process each, which end with the block."""
    players: dict[str, Player] = {}
    try:
        for setting in settings:
            players[setting.contestant] = _started(setting)
        yield players
    finally:
        for player in players.values():
            player.leave()


def _started(setting: Setting) -> Player:
    # A new interpreter: pfl works in none that multiprocessing has started.
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        end = theirs.fileno()
        arguments = [setting.contestant, setting.work, setting.device, str(setting.threads)]
        command = [sys.executable, "-m", "simulations.benchmarks.process", *arguments, str(end)]
        process = subprocess.Popen(command, pass_fds=[end], env=environment())
    return Player(setting.contestant, process, ours)
