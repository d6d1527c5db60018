"""The operator's view of each fault: the log of a small federation in which it is provoked.

For every fault a server and two nodes run on loopback, as processes with certificates, until rounds
have been released. Then the fault is provoked, and the run continues for a few rounds if it can.
This prints a table in Markdown: the warnings, the errors and the last sentences of all processes
since the fault, and the outcome of the run.

    python -m simulations.faults --out simulations/results/faults.md
    python -m simulations.faults "certificate struck off" "port taken"
"""

import argparse
import asyncio
import os
import re
import resource
import shutil
import signal
import tempfile
import time
import tomllib
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedpriv.data.population import UserStore
from fedpriv.ledger.ledger import Ledger
from fedpriv.run.folder import RunFolder
from fedpriv.server import certificates
from simulations import faulty_nodes, hostile_peers, loopback
from simulations.faulty_nodes import Behaviour, Network
from simulations.hostile_peers import Target
from simulations.loopback import COMMAND, Program, issue

_CONFIG = """
name = "faults"
rounds = 5000
data = { name = "digits", options = { users = 287 } }
model = { name = "softmax" }
local = { learning_rate = 0.5, epochs = 1, max_examples = 20 }
clipping = { norm = 0.5 }
output = { evaluate_every = 1000 }
federation = { enrolment = "enrolment.toml", deadline_seconds = 4.0, fixed_length = true }
[privacy]
sampling_probability = 0.3
epsilon = 1000.0
delta = 1e-3
noise_multiplier = 4.0
accountant = "rdp"
"""
_FEW_FILES = ("sh", "-c", 'ulimit -Sn 1024 && exec "$@"', "sh", *COMMAND)
_SILENT = 1500  # connections
_PATIENCE = 30.0  # seconds after which a run that does not continue is stopped
_START_SECONDS = 120.0  # the longest start
_LINES = 2  # of one program in the table
_PAGE = """# What an operator sees of each fault
[Deployment](../../docs/deploy.md) says what each line means and what to do. Each fault was
provoked in a federation of a server and two nodes on one machine, after two releases. The second
column has at most the last two warnings and errors of each process since then. It leaves out late
nodes and failed connections if there are other lines. The third column says how the run went on;
each release was charged once unless it says otherwise. Made by

    {command}

"""
_SHORTENED = (
    (r"(127\.0\.0\.1|%5B::1%5D|localhost):\d{4,}", r"\1:PORT"),
    (r"failed to connect to all addresses; last error: \w+: \S+:PORT: ", "… "),
    (r"Failed to connect to remote host: ", ""),
    (r"\b([0-9a-f]{6})[0-9a-f]{58}\b", r"\1…"),  # fingerprints and heads
)
"""Patterns in a line of a log, and their replacements: they differ in each run, or add nothing."""
_USUAL = (
    "late: not connected in the round",
    "late: no answer by the end of the round",
    "… Connection refused",
)
"""Lines of any log when a node or a server is away, whatever the fault."""


@dataclass
class Scene:
    """A federation in a folder."""

    folder: Path  # laid out
    stack: ExitStack  # ends its processes
    programs: dict[str, Program] = field(default_factory=dict)
    _seen: dict[str, int] = field(default_factory=dict)

    @classmethod
    def lay_out(cls, folder: Path, stack: ExitStack) -> "Scene":
        """Write certificates, users, an enrolment and an experiment into an empty folder."""
        loopback.lay_out_digits(folder, (144, 143))
        (folder / "faults.toml").write_text(_CONFIG, encoding="utf-8")
        return cls(folder, stack)

    @property
    def run(self) -> RunFolder:
        """The run of the server."""
        return RunFolder(self.folder / "run")

    @property
    def port(self) -> int:
        """The port on which the server listened when it last started."""
        *_, last = loopback.LISTENING.finditer(self.server.text)
        return int(last[1])

    @property
    def server(self) -> Program:
        """The server that was started last, except additional ones that a fault starts."""
        return self.programs["server"]

    def serve(self, *options: str, command: tuple[str, ...] = COMMAND) -> None:
        """Start the server, or resume its run on the port that nodes use."""
        port = self.port if "server" in self.programs else 0
        self.programs["server"] = self.one_more_server(*options, command=command, port=port)

    def one_more_server(
        self, *options: str, command: tuple[str, ...] = COMMAND, port: int = 0
    ) -> Program:
        """Start a server, by default of the same run, and wait until it listens or ends."""
        file = self.folder / "faults.toml"
        serving = loopback.server(
            self.folder, file, "--resume", *options, port=port, command=command
        )
        log = self.folder / "server.log"
        starts = len(loopback.LISTENING.findall(log.read_text())) if log.exists() else 0
        program = self.stack.enter_context(serving)
        listens = loopback.LISTENING.findall
        self._until(lambda: len(listens(program.text)) > starts, program, _START_SECONDS)
        return program

    def join(self, name: str, *options: str, port: int | None = None) -> None:
        """Start a node, and wait for its first output; later options override earlier ones."""
        words = self._words(name)
        joining = loopback.node(self.folder, name, port or self.port, "--processes=1", *options)
        node = self.programs[name] = self.stack.enter_context(joining)
        self._until(lambda: self._words(name) > words, node, _START_SECONDS)

    def _words(self, name: str) -> int:
        return len(self.programs[name].text) if name in self.programs else 0

    def begin(self, *options: str, command: tuple[str, ...] = COMMAND) -> None:
        """Start the server and both nodes; logs count from the second release on."""
        self.serve(*options, command=command)
        with ThreadPoolExecutor() as pool:
            list(pool.map(self.join, ("node-1", "node-2")))
        self.go_on(seconds=_START_SECONDS)
        self.mark()

    def mark(self) -> None:
        """Count only logs from now on."""
        self._seen = {name: len(program.text) for name, program in self.programs.items()}

    def go_on(self, count: int = 2, seconds: float = _PATIENCE) -> None:
        """Wait for `count` releases, for the server's end, or for at most `seconds`."""
        target = self.released + count
        self._until(lambda: self.released >= target, self.server, seconds)

    def _until(
        self, condition: Callable[[], bool], program: Program, seconds: float = _PATIENCE
    ) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and program.process.poll() is None and not condition():
            time.sleep(0.02)

    def await_trouble(self, name: str = "server") -> None:
        """Wait until a program has logged a trouble, or ended."""
        self._until(lambda: bool(self._troubles(name)), self.programs[name])

    @property
    def released(self) -> int:
        """The number of releases in the metrics."""
        return len(list(self.run.read_metrics()))

    def end(self, name: str) -> None:
        """Stop a program by SIGTERM, and wait."""
        self.programs[name].process.terminate()
        self.programs[name].process.wait()

    def kill(self, name: str) -> None:
        """End a program by `kill -9`."""
        self.programs[name].process.kill()
        self.programs[name].process.wait()

    def certificate(self, name: str) -> Path:
        """Return the folder of a node's certificate."""
        return self.folder / "certs" / "nodes" / name

    def enrol(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Edit the enrolment."""
        path = self.folder / "enrolment.toml"
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        change(table)
        path.with_suffix(".new").write_text(tomli_w.dumps(table), encoding="utf-8")
        path.with_suffix(".new").replace(path)

    def answer(self, name: str, behaviour: Behaviour) -> None:
        """Stop a node's process, and take part in its place with this behaviour."""
        self.end(name)
        self.mark()
        asyncio.run(faulty_nodes.take_part(self.folder, name, self.port, behaviour))
        self.go_on()

    def harm(self, kind: Callable[[Target], Awaitable[None]], peers: int, seconds: float) -> None:
        """Run hostile peers during the run, with a certificate that is not enrolled."""
        target = Target(self.port, issue(self.folder / "certs", "stranger").folder)

        async def all_of_them() -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await asyncio.gather(
                        *(hostile_peers.until_shut_out(kind(target)) for _ in range(peers))
                    )

        asyncio.run(all_of_them())
        self.go_on()

    def _troubles(self, name: str) -> list[str]:
        text = self.programs[name].text[self._seen.get(name, 0) :]
        return loopback.troubles(shortened(text.replace(str(self.folder), "…")))

    def row(self) -> tuple[str, str]:
        """End the run; return the operator's view and the outcome."""
        lines_seen = []
        for name in self.programs:
            lines = self._troubles(name)
            lines_seen += [f"{name}: `{line.replace('|', '/')}`" for line in lines[-_LINES:]]
        lines_seen = telling(lines_seen)
        code = self.server.process.poll()
        self.end("server")
        outcome = "goes on" if code is None else f"ends with exit code {code}"
        charges = 0
        if self.run.ledger.exists():
            with Ledger.open(self.run.ledger) as ledger:
                charges = len(list(ledger.charges()))
        if charges != self.released:
            outcome += f"; {self.released} released, {charges} charged"
        return "<br>".join(lines_seen) or "nothing", outcome


def telling(lines: list[str]) -> list[str]:
    """Return the lines that are specific to a fault, or all lines if none is."""
    return [line for line in lines if not any(usual in line for usual in _USUAL)] or lines


def shortened(text: str) -> str:
    """Return lines of a log in the form of the table."""
    for pattern, replacement in _SHORTENED:
        text = re.sub(pattern, replacement, text)
    return text


def _silent_connections(scene: Scene) -> None:
    scene.begin(command=_FEW_FILES)
    scene.harm(hostile_peers.silent, _SILENT, 5.0)


def _bad_answer(behaviour: Behaviour) -> Callable[[Scene], None]:
    def provoke(scene: Scene) -> None:
        scene.begin()
        scene.answer("node-2", behaviour)

    return provoke


def _hostile(
    kind: Callable[[Target], Awaitable[None]], peers: int, seconds: float
) -> Callable[[Scene], None]:
    def provoke(scene: Scene) -> None:
        scene.begin()
        scene.harm(kind, peers, seconds)

    return provoke


def _struck_off(scene: Scene) -> None:
    scene.begin()
    scene.enrol(lambda table: table["nodes"]["node-2"].pop("certificate"))
    scene.await_trouble("node-2")
    scene.go_on()


def _valid(begin: timedelta, days: int) -> Callable[[Scene], None]:
    """Provoke: a node joins with a certificate that is valid for `days` after `begin` from now."""

    def provoke(scene: Scene) -> None:
        scene.begin()
        scene.end("node-2")
        scene.mark()
        certs, since = scene.folder / "certs", datetime.now(UTC) + begin
        issued = issue(certs, "node-2", begin=since, lifetime=timedelta(days=days))
        scene.enrol(lambda table: table["nodes"]["node-2"].update(certificate=issued.fingerprint))
        scene.join("node-2")
        scene.await_trouble("node-2")
        scene.go_on()

    return provoke


def _rejoins(
    *options: str, prepare: Callable[[Path], None] = lambda _: None
) -> Callable[[Scene], None]:
    """Provoke: a node joins again with other options, in which "…" stands for the folder."""

    def provoke(scene: Scene) -> None:
        scene.begin()
        scene.end("node-2")
        scene.mark()
        prepare(scene.folder)
        scene.join("node-2", *(option.replace("…", str(scene.folder)) for option in options))
        scene.await_trouble("node-2")
        scene.go_on()

    return provoke


def _other_authority(folder: Path) -> None:
    certificates.init(folder / "other", ["localhost"])
    issue(folder / "other", "node-2")


def _open_key(folder: Path) -> None:
    (folder / "certs" / "nodes" / "node-2" / "node.key").chmod(0o666)


def _not_finite(folder: Path) -> None:
    users = UserStore.load(folder / "users" / "node-2")
    x = np.full_like(users.fields["x"], np.nan)
    ids = [users.id_of(user) for user in range(users.population)]
    UserStore({**users.fields, "x": x}, users.offsets, ids).save(folder / "users" / "nan")


def _consent(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "consent.toml").write_text(text, encoding="utf-8")

    return write


def _copied_certificate(scene: Scene) -> None:
    scene.begin()
    joining = loopback.node(scene.folder, "node-2", scene.port, f"--state={scene.folder / 'copy'}")
    scene.stack.enter_context(joining)
    scene.await_trouble("node-2")
    scene.go_on()


def _half_an_enrolment(scene: Scene) -> None:
    scene.begin()
    path = scene.folder / "enrolment.toml"
    content = path.read_text(encoding="utf-8")
    path.write_text(content[: len(content) // 2], encoding="utf-8")
    time.sleep(8.0)
    path.write_text(content, encoding="utf-8")
    scene.go_on()


def _partition(scene: Scene) -> None:
    scene.begin()
    scene.end("node-2")
    with Network(scene.port) as network:
        scene.join("node-2", port=network.port)
        scene.go_on(3)
        scene.mark()
        network.cut()
        scene.go_on(4)


def _all_decline(scene: Scene) -> None:
    scene.begin()
    for name in ("node-1", "node-2"):
        scene.end(name)
    scene.mark()
    _consent("least_noise_multiplier = 100.0")(scene.folder)
    for name in ("node-1", "node-2"):
        scene.join(name, f"--consent={scene.folder / 'consent.toml'}")
    scene.go_on(6)


def _node_hangs(scene: Scene) -> None:
    scene.begin()
    hanging = scene.programs["node-2"].process.pid
    os.kill(hanging, signal.SIGSTOP)
    scene.go_on()
    os.kill(hanging, signal.SIGCONT)
    scene.go_on()


def _ledger_changes(change: Callable[[RunFolder, Path], None]) -> Callable[[Scene], None]:
    """Provoke: the server restarts with a changed ledger; `change` gets a copy of an older one."""

    def provoke(scene: Scene) -> None:
        scene.begin()
        scene.end("server")
        copy = scene.folder / "kept.sqlite"
        shutil.copy(scene.run.ledger, copy)
        scene.serve()
        scene.go_on()
        scene.end("server")
        change(scene.run, copy)
        scene.mark()
        scene.serve()

    return provoke


def _set_back(run: RunFolder, copy: Path) -> None:
    shutil.copy(copy, run.ledger)


def _deleted(run: RunFolder, _copy: Path) -> None:
    run.ledger.unlink()


def _other_population(scene: Scene) -> None:
    scene.begin()
    scene.end("server")
    scene.mark()
    scene.enrol(lambda table: table.update(population="0" * 32))
    scene.serve()


def _disk_full(scene: Scene) -> None:
    """Provoke: the metrics are on a full disk for some seconds."""
    scene.begin()
    metrics = scene.run.metrics
    copy, full_disk = metrics.with_suffix(".kept"), metrics.with_suffix(".full")
    os.link(metrics, copy)
    full_disk.symlink_to("/dev/full")
    full_disk.replace(metrics)
    scene.await_trouble()
    copy.replace(metrics)
    scene.go_on()


def _port_taken(scene: Scene) -> None:
    scene.begin()
    scene.one_more_server(f"--out={scene.folder / 'other'}", port=scene.port)


def _same_folder(scene: Scene) -> None:
    scene.begin()
    scene.one_more_server()


def _shared_ledger(scene: Scene) -> None:
    shared = f"--set=privacy.ledger={scene.folder / 'run' / 'ledger.sqlite'}"
    scene.begin(shared)
    for name in ("node-1", "node-2"):
        scene.end(name)
    scene.mark()
    scene.join("node-1")
    second = scene.one_more_server(shared, "--set=name=other", f"--out={scene.folder / 'other'}")
    scene.join("node-2")  # at the other server
    scene.go_on(4)
    second.process.terminate()
    second.process.wait()


def _killed(scene: Scene) -> None:
    scene.begin()
    scene.kill("server")
    scene.serve()
    scene.go_on(3)


FAULTS: dict[str, Callable[[Scene], None]] = {
    "1,500 connections that say nothing, `ulimit -n 1024`": _silent_connections,
    "20 TLS handshakes of one byte a second": _hostile(hostile_peers.slow_handshake, 20, 15.0),
    "certificate not enrolled, 8 messages of 2 GiB": _hostile(hostile_peers.declares_much, 1, 4.0),
    "compressed message that inflates to 700 MiB": _hostile(hostile_peers.sends_bomb, 2, 10.0),
    "calls without end by a certificate that is not enrolled": _hostile(
        hostile_peers.floods, 10, 5.0
    ),
    "certificate struck off": _struck_off,
    "certificate expired": _valid(timedelta(days=-2), 1),
    "certificate that expires in 10 days": _valid(timedelta(hours=-1), 10),
    "certificate of another authority": _rejoins(
        "--certificates=…/other/nodes/node-2", prepare=_other_authority
    ),
    "key of mode 0666": _rejoins(prepare=_open_key),
    "copied certificate": _copied_certificate,
    "other users than are enrolled": _rejoins("--users=…/users/node-1"),
    "enrolment half written": _half_an_enrolment,
    "enrolment of another population": _other_population,
    "site whose data are NaN": _rejoins("--users=…/users/nan", prepare=_not_finite),
    "sum longer than its users allow": _bad_answer(faulty_nodes.too_long),
    "sum of another shape": _bad_answer(faulty_nodes.misshapen),
    "malformed answer": _bad_answer(faulty_nodes.malformed),
    "answer of an earlier round": _bad_answer(faulty_nodes.replayed),
    "late answer": _bad_answer(faulty_nodes.late),
    "node killed while it trains": _bad_answer(faulty_nodes.killed),
    "node that vanishes while it uploads": _bad_answer(faulty_nodes.vanishing),
    "node that hangs": _node_hangs,
    "network cut": _partition,
    "all nodes decline": _all_decline,
    "a node's limit of rounds reached": _rejoins(
        "--consent=…/consent.toml", prepare=_consent("most_rounds_per_day = 1")
    ),
    "ledger set back": _ledger_changes(_set_back),
    "ledger missing": _ledger_changes(_deleted),
    "disk full for a while": _disk_full,
    "port taken": _port_taken,
    "two servers on one run": _same_folder,
    "two runs that share a ledger": _shared_ledger,
    "server killed and started again": _killed,
}


def provoked(name: str) -> tuple[str, str]:
    """Provoke a fault; return the operator's view and the outcome of the run."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        scene = Scene.lay_out(Path(folder), stack)
        FAULTS[name](scene)
        return scene.row()


def main() -> None:
    """Provoke faults, and print or write the table."""
    parser = argparse.ArgumentParser(description="the operator's view of each fault")
    parser.add_argument("faults", nargs="*", choices=[*FAULTS, []], metavar="FAULT")
    parser.add_argument("--at-once", type=int, default=1, help="number of parallel federations")
    parser.add_argument("--out", type=Path, help="page to write")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows = ["| fault | what the operator saw | the run |", "| --- | --- | --- |"]
    names = options.faults or list(FAULTS)
    with ThreadPoolExecutor(options.at_once) as pool:
        for name, cells in zip(names, pool.map(provoked, names), strict=True):
            rows.append("| " + " | ".join((name, *cells)) + " |")
            print(rows[-1], flush=True)
    if options.out:
        command = "python -m simulations.faults --out simulations/results/faults.md"
        options.out.write_text(_PAGE.format(command=command) + "\n".join(rows) + "\n", "utf-8")


if __name__ == "__main__":
    main()
