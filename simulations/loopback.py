"""A federation on one machine: certificates, users split among nodes, and their processes."""

import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import tomli_w

from fedpriv.data.population import UserStore, load_population
from fedpriv.errors import FedprivError
from fedpriv.server import certificates
from fedpriv.wire.naming import check_node_name

COMMAND = (sys.executable, "-c", "from fedpriv.cli import main; main()")
_LONGEST_START_SECONDS = 120.0
_LONGEST_END_SECONDS = 20.0
LISTENING = re.compile(r"listening on \S+:(\d+)")


def issue(
    folder: Path,
    node: str,
    *,
    begin: datetime | None = None,
    lifetime: timedelta = certificates.YEAR,
) -> certificates.Issued:
    """Request and sign a node's certificate with a new key, on one machine."""
    (folder / "nodes" / check_node_name(node) / "node.key").unlink(missing_ok=True)
    request = certificates.request(folder, node)
    return certificates.sign(folder, request, begin=begin, lifetime=lifetime)


def lay_out(folder: Path, users: UserStore, sizes: Sequence[int]) -> None:
    """Write the files of server and nodes: certs/, enrolment.toml, and each node's users/NODE/.

    Nodes are node-1, node-2, …, with `sizes` users each, which add up to all users of the store.
    Users keep their positions: user i of the store is at position i of the enrolled population.
    """
    certificates.init(folder / "certs", ["localhost", "127.0.0.1"])
    digits = len(str(users.population - 1))
    # Ids of one length have the same order as the numbers.
    ids = [str(user).zfill(digits) for user in range(users.population)]
    parts = np.split(np.arange(users.population), np.cumsum(sizes)[:-1])
    nodes = {}
    for number, part in enumerate(parts, start=1):
        node = f"node-{number}"
        issued = issue(folder / "certs", node)
        part_users = users.subset(part)
        ids_here = [ids[user] for user in part]
        nodes[node] = {"users": ids_here, "certificate": issued.fingerprint}
        UserStore(part_users.fields, part_users.offsets, ids_here).save(folder / "users" / node)
    enrolment = {"population": secrets.token_hex(16), "nodes": nodes}
    (folder / "enrolment.toml").write_text(tomli_w.dumps(enrolment), encoding="utf-8")


def lay_out_digits(folder: Path, sizes: Sequence[int] = (96, 96, 95)) -> None:
    """Call `lay_out` for the 287 users of DIGITS."""
    lay_out(folder, load_population("digits", {"users": 287}).users, sizes)


@dataclass(frozen=True)
class Program:
    """A process of the federation, whose output is in a file."""

    process: subprocess.Popen[bytes]
    output: Path  # standard output and standard error

    @property
    def text(self) -> str:
        """The output so far."""
        return self.output.read_text(encoding="utf-8", errors="replace")

    def await_text(self, pattern: str) -> re.Match[str]:
        """Wait until the output matches; FedprivError if the process ends or takes too long."""
        end = time.monotonic() + _LONGEST_START_SECONDS
        while time.monotonic() < end:
            is_over = self.process.poll() is not None
            if match := re.search(pattern, self.text):
                return match
            if is_over:
                break
            time.sleep(0.02)
        raise FedprivError(f"{self.output} does not say {pattern!r}:\n{self.text}")


def troubles(log: str) -> list[str]:
    """Return warnings, errors and last sentences in a program's output, each once, in order.

    Lines that differ only in numbers count as the same.
    """
    matches = re.findall(r"^(?:\S+Z (WARNING|ERROR) +|(error): )(.+)$", log, re.MULTILINE)
    lines = {
        re.sub(r"\d+", "#", text): f"{(level or end).upper()} {text}"
        for level, end, text in reversed(matches)
    }
    return list(reversed(lines.values()))


@contextmanager
def program(output: Path, *arguments: str, command: Sequence[str] = COMMAND) -> Iterator[Program]:
    """Run a `fedpriv` process, which ends with the context at the latest."""
    with output.open("ab") as file:
        process = subprocess.Popen(
            [*command, *arguments], stdout=file, stderr=subprocess.STDOUT, cwd=output.parent
        )
        try:
            yield Program(process, output)
        finally:
            process.terminate()
            try:
                process.wait(_LONGEST_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def server(
    folder: Path, file: Path, *arguments: str, port: int = 0, command: Sequence[str] = COMMAND
) -> Iterator[Program]:
    """Run `fedpriv serve FILE` in a folder that `lay_out` wrote; its run is in `run`.

    `command` runs instead of `fedpriv`, with the same arguments.
    """
    settings = {
        "address": f"127.0.0.1:{port}",
        "enrolment": str(folder / "enrolment.toml"),
        "certificates": str(folder / "certs" / "server"),
    }
    assignments = [f"--set=federation.{key}={value}" for key, value in settings.items()]
    out = ("--out", str(folder / "run"))
    arguments_of_serve = ("serve", str(file), *assignments, *out, *arguments)
    with program(folder / "server.log", *arguments_of_serve, command=command) as server_program:
        yield server_program


def port_of(serving: Program) -> int:
    """Return the port of a server, once it listens."""
    return int(serving.await_text(LISTENING.pattern)[1])


@contextmanager
def node(
    folder: Path, name: str, port: int, *arguments: str, command: Sequence[str] = COMMAND
) -> Iterator[Program]:
    """Run `fedpriv join` for a node of the folder; `command` as for `server`."""
    with program(
        folder / f"{name}.log",
        "join",
        f"--server=localhost:{port}",
        f"--users={folder / 'users' / name}",
        f"--certificates={folder / 'certs' / 'nodes' / name}",
        f"--state={folder / 'state' / name}",
        *arguments,
        command=command,
    ) as node_program:
        yield node_program


@contextmanager
def nodes(
    folder: Path, names: Sequence[str], port: int, *arguments: str
) -> Iterator[dict[str, Program]]:
    """Run several nodes at once."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(node(folder, name, port, *arguments)) for name in names}
