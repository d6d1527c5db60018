"""A federation of real processes to do harm to: where its files lie, and traps in its programs."""

import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedpriv.run.folder import RunFolder
from simulations import loopback
from simulations.loopback import Program

LIMIT = 180.0  # seconds; nothing that works takes as long
CONFIG = """
name = "faults"
rounds = 6
data = { name = "digits", options = { users = 287 } }
model = { name = "softmax" }
local = { learning_rate = 0.5, epochs = 1, max_examples = 20 }
clipping = { norm = 0.5 }
output = { evaluate_every = 100 }
privacy = { sampling_probability = 0.3, epsilon = 100.0, delta = 1e-3, noise_multiplier = 4.0, \
accountant = "rdp" }
federation = { enrolment = "enrolment.toml", absent_seconds = 1.0 }
"""
# More rounds than are run; nobody is waited for who is away.
LONG = ("--set=rounds=5000", "--set=federation.least_nodes=1", "--set=federation.absent_seconds=0")
_PROGRAM = Path(__file__).with_name("trapped.py")


def until(condition: Callable[[], bool], *programs: Program) -> None:
    """Wait for a condition, as long as these programs run."""
    end = time.monotonic() + LIMIT
    while not condition():
        ended = [program for program in programs if program.process.poll() is not None]
        if ended and not condition():
            raise AssertionError(f"{ended[0].output} ended:\n{ended[0].text}")
        if time.monotonic() > end:
            raise AssertionError("\n".join(["too long:", *(p.text for p in programs)]))
        time.sleep(0.01)


@dataclass(frozen=True)
class Traps:
    """The traps of one program."""

    folder: Path

    def arm(self, place: str) -> None:
        """The next process that comes to this place is to wait there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / place).touch()

    def await_caught(self, place: str, program: Program) -> None:
        """Wait until a process waits there."""
        until(self._reached(place).exists, program)

    def free(self, place: str) -> None:
        """Let go on what waits there; a process that was killed there needs it too."""
        self._reached(place).unlink()

    def _reached(self, place: str) -> Path:
        return self.folder / f"{place}.reached"


@dataclass(frozen=True)
class Site:
    """A folder that is laid out, and the port that its server listens on."""

    folder: Path
    port: int

    @classmethod
    def lay_out(cls, folder: Path, *sizes: int) -> "Site":
        """With nodes of so many users, together 287."""
        loopback.lay_out_digits(folder, sizes)
        (folder / "faults.toml").write_text(CONFIG)
        for name in ("server", *(f"node-{number + 1}" for number in range(len(sizes)))):
            (folder / "traps" / name).mkdir(parents=True)
        return cls(folder, free_port())

    @property
    def run(self) -> RunFolder:
        return RunFolder(self.folder / "run")

    @property
    def released(self) -> int:
        """Releases that are in the metrics."""
        return len(list(self.run.read_metrics()))

    def await_releases(self, more: int, *programs: Program) -> None:
        """Wait for so many more, as long as these programs run."""
        least = self.released + more
        until(lambda: self.released >= least, *programs)

    def traps(self, name: str) -> Traps:
        return Traps(self.folder / "traps" / name)

    def server(
        self, *arguments: str, command: tuple[str, ...] = ()
    ) -> AbstractContextManager[Program]:
        """`fedpriv serve` on the site's port; it waits for all nodes, and resumes its run."""
        nodes = len(list((self.folder / "users").iterdir()))
        given = (f"--set=federation.least_nodes={nodes}", "--resume", *arguments)
        file, runs = self.folder / "faults.toml", command or self.command("server")
        return loopback.server(self.folder, file, *given, port=self.port, command=runs)

    def node(self, name: str, *arguments: str, port: int = 0) -> AbstractContextManager[Program]:
        """`fedpriv join`, at another port if one is given."""
        command = self.command(name)
        return loopback.node(self.folder, name, port or self.port, *arguments, command=command)

    def command(self, name: str) -> tuple[str, ...]:
        """What runs as `fedpriv`, with the traps of a program."""
        return (sys.executable, str(_PROGRAM), str(self.traps(name).folder))


def free_port() -> int:
    """A port that no connection takes by itself, unlike those that the system chooses."""
    ports = random.SystemRandom()
    while True:
        port = ports.randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def kill(program: Program) -> None:
    """`kill -9`."""
    program.process.kill()
    program.process.wait()


def await_answers(node: Program, more: int = 2) -> None:
    """Wait until a node has answered so many more rounds."""
    least = node.text.count("answered after") + more
    until(lambda: node.text.count("answered after") >= least, node)


def ask_to_stop(program: Program) -> None:
    """SIGTERM."""
    program.process.terminate()


def ended(program: Program, code: int = 0) -> str:
    """What a program has printed that ends by itself now, with this exit code."""
    assert program.process.wait(LIMIT) == code, program.text
    assert "Traceback" not in program.text, program.text
    return program.text


def refused(program: Program, code: int = 2) -> str:
    """The one sentence of a program that cannot go on."""
    *_, last = ended(program, code).strip().splitlines()
    assert last.startswith("error: "), program.text
    return last


def children_of(program: Program) -> list[int]:
    """Processes that a program has started and that have not ended."""
    found = Path(f"/proc/{program.process.pid}/task").glob("*/children")
    return [int(child) for file in found for child in file.read_text().split()]


def is_gone(pid: int) -> bool:
    """Whether a process is no more, or only waits to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


@contextmanager
def hanging(program: Program) -> Iterator[None]:
    """Let a program hang until the block is left."""
    program.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        program.process.send_signal(signal.SIGCONT)
