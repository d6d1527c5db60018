"""Rounds of a large federation with hostile peers, and the same rounds without them.

There are three processes. `fedpriv serve` starts with a limit of 1,024 open files, as under
systemd. A process with all nodes, each with its own connection and certificate, answers every offer
with an update that was made before. A process of hostile peers has equal numbers of each kind: they
hold connections that say nothing; begin TLS and send a byte a second; declare messages of 2 GiB and
send as much of them as the server takes; send less than 1 MiB that inflates to 700 MiB; flood the
server with calls; and send pings, settings, headers, resets or an endless header as fast as the
server takes them, and read its answers or not. Peers that speak TLS have certificates of the
authority: half are struck off, and half are enrolled, for nodes of one user that never answer. A
peer that is shut out comes again after a second. Rounds that are not released are lost; a server
that takes more than 8 GiB is stopped.

All processes share the machine, so the computations of hostile peers count as harm, too. A round
lasts from the previous release to its own; the first is left out.

    python -m simulations.hostile_load --json simulations/results/hostile_load.json
    python -m simulations.hostile_load --rounds 5
    python -m simulations.hostile_load --hostile 64 --kinds "pings, unread" "resets, read"
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path

import tomli_w

from fedpriv.errors import WorkerError
from fedpriv.ledger.ledger import Ledger
from fedpriv.run.folder import RunFolder
from simulations import loopback
from simulations.benchmarks.machine import command
from simulations.federation_load import allow_open_files
from simulations.hostile_peers import KINDS, Target, harass
from simulations.load_nodes import Seen, connected
from simulations.load_server import peak_bytes
from simulations.load_site import Site
from simulations.loopback import issue

_OPEN_FILES = 1024  # of the server, when it starts
_COMMAND = ("sh", "-c", f'ulimit -Sn {_OPEN_FILES} && exec "$@"', "sh", *loopback.COMMAND)
_STRANGERS = 8  # certificates of hostile peers; every other one is enrolled
_POLL_SECONDS = 0.02
_MEBIBYTE = 2**20
_TOO_MUCH = 8 * 2**30  # bytes; a server that takes more is ended, before the machine fails


@dataclass(frozen=True)
class Load:
    """The settings of a measurement."""

    nodes: int  # connected nodes, each with one user
    sampled: int  # nodes in a round on average
    hidden: int  # width of the model, which has 75 · hidden + 10 parameters
    rounds: int  # at least 2
    hostile: int  # peers
    kinds: list[str]  # of hostile peers
    patience: float  # seconds, after which rounds that are not released are lost


@dataclass(frozen=True)
class Found:
    """The measurements of one run."""

    seconds: list[float]  # of each round but the first
    released: int  # rounds
    charged: int  # rounds
    answered: int  # answers of nodes that were accepted
    empty: int  # rounds that were charged although nobody answered
    lost: int  # connections of nodes that were lost, and answers that could not be sent
    peak_mebibytes: float  # of the server's memory
    begun: dict[str, int]  # how often hostile peers began, by their kind
    ended: int | None  # exit code of the server, if it ended before the last round was seen
    log: list[str]  # of the server, its warnings and errors, each once


def measure(load: Load) -> tuple[Found, Found]:
    """Run all rounds without hostile peers, then with them."""
    allow_open_files(load.nodes + load.hostile)
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder) / "certs", load.nodes, load.hidden)
        site.issue()
        strangers = [f"stranger-{number}" for number in range(_STRANGERS)]
        issued = {name: issue(site.folder, name) for name in strangers}
        enrolled = {name: issued[name].fingerprint for name in strangers[::2]}
        _enrol(site.enrolment, enrolled)
        folders = [certificate.folder for certificate in issued.values()]
        return _run(load, site, []), _run(load, site, folders)


def _enrol(path: Path, fingerprints: dict[str, str]) -> None:
    """Add nodes to an enrolment, each with one user of the same name."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    table["nodes"] |= {n: {"users": [n], "certificate": f} for n, f in fingerprints.items()}
    path.write_text(tomli_w.dumps(table), encoding="utf-8")


def _run(load: Load, site: Site, strangers: list[Path]) -> Found:
    folder = site.folder / ("hostile" if strangers else "quiet")
    folder.mkdir()
    file, run = folder / "experiment.toml", RunFolder(folder / "run")
    file.write_text(tomli_w.dumps(_experiment(load, site)), encoding="utf-8")
    arguments = ("serve", str(file), "--out", str(run.path), "--exit", "--keep-going")
    with loopback.program(folder / "server.log", *arguments, command=_COMMAND) as server:
        port = loopback.port_of(server)
        hostile = _hostile([Target(port, folder_of_peer) for folder_of_peer in strangers], load)
        with hostile if strangers else nullcontext([0] * len(load.kinds)) as starts:
            moments, record, peak = asyncio.run(_rounds(load, site, port, server, run))
            exit_code = server.process.poll()
            counts = dict(zip(load.kinds, starts[:], strict=True))
    with Ledger.open(run.ledger) as ledger:
        charges = len(list(ledger.charges()))
    return Found(
        seconds=[b - a for a, b in pairwise(moments)],
        released=len(moments),
        charged=charges,
        answered=record.answered,
        empty=server.text.count("no drawn user contributed"),
        lost=record.lost,
        peak_mebibytes=peak / _MEBIBYTE,
        begun=counts,
        ended=exit_code,
        log=loopback.troubles(server.text),
    )


def _experiment(load: Load, site: Site) -> dict[str, object]:
    model = {"inputs": 64, "hidden": load.hidden, "classes": 10}
    return {
        "name": "load",
        "rounds": load.rounds,
        "data": {"name": "digits", "options": {"users": 287}},
        "model": {"name": "mlp", "options": model},
        "local": {"learning_rate": 0.1, "epochs": 1, "max_examples": 10},
        "clipping": {"norm": 1.0},
        "output": {"evaluate_every": 10_000},
        "privacy": {
            "sampling_probability": load.sampled / load.nodes,
            "epsilon": 1000.0,
            "delta": 1e-5,
            "noise_multiplier": 1.0,
            "accountant": "rdp",
        },
        "federation": {
            "address": "127.0.0.1:0",
            "enrolment": str(site.enrolment),
            "certificates": str(site.folder / "server"),
            "least_nodes": load.nodes,
            "absent_seconds": 1.0,
        },
    }


@contextmanager
def _hostile(targets: list[Target], load: Load) -> Iterator["SynchronizedArray[int]"]:
    """Run `load.hostile` peers; the context begins when all of them have begun."""
    context = multiprocessing.get_context("spawn")
    starts = context.Array("L", len(load.kinds))
    arguments = targets, load.kinds, load.hostile, starts
    process = context.Process(target=harass, args=arguments, daemon=True)
    process.start()
    try:
        while sum(starts[:]) < load.hostile:
            if process.exitcode is not None:
                raise WorkerError("the process of hostile peers ended")
            time.sleep(_POLL_SECONDS)
        yield starts
    finally:
        process.kill()
        process.join()


async def _rounds(
    load: Load, site: Site, port: int, server: loopback.Program, run: RunFolder
) -> tuple[list[float], Seen, int]:
    """Return the release times of rounds, the nodes' record, and the server's peak bytes."""
    moments: list[float] = []
    record, peak = Seen(), 0
    with suppress(TimeoutError):
        async with asyncio.timeout(load.patience), connected(site, port, record):
            while len(moments) < load.rounds and peak < _TOO_MUCH:
                is_over = server.process.poll() is not None
                with suppress(RuntimeError, OSError):  # it is ending
                    peak = peak_bytes(server.process.pid)
                if run.metrics.exists():
                    released = run.metrics.read_bytes().count(b"\n") - len(moments)
                    moments += [time.perf_counter()] * released
                if is_over:
                    break
                await asyncio.sleep(_POLL_SECONDS)
    return moments, record, peak


def summary(load: Load, quiet: Found, hostile: Found) -> dict[str, float]:
    """Return a summary in a few numbers."""
    medians = [statistics.median(result.seconds or [float("inf")]) for result in (quiet, hostile)]
    return {
        "rounds lost without hostile peers": load.rounds - quiet.released,
        "rounds lost": load.rounds - hostile.released,
        "rounds charged empty": hostile.empty,
        "connections of nodes lost": hostile.lost,
        "server's peak memory in MiB without hostile peers": quiet.peak_mebibytes,
        "server's peak memory in MiB": hostile.peak_mebibytes,
        "median seconds of a round without hostile peers": medians[0],
        "median seconds of a round": medians[1],
        "ratio": medians[1] / medians[0],
    }


def main() -> None:
    """Measure, print and, if requested, write the numbers."""
    parser = argparse.ArgumentParser(description="rounds with hostile peers, and without")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--sampled", type=int, default=200)
    parser.add_argument("--hidden", type=int, default=16_000, help="1.2 million parameters")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--hostile", type=int, default=500)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS])
    parser.add_argument("--patience", type=float, default=1800.0, help="seconds of all rounds")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = vars(parser.parse_args())
    path = options.pop("json")
    load = Load(**options)
    quiet, hostile = measure(load)
    numbers = summary(load, quiet, hostile)
    for name, value in numbers.items():
        print(f"{name}: {value:.4g}")
    for line in hostile.log:
        print(line)
    if path:
        content = {"command": command("hostile_load"), "load": asdict(load), "summary": numbers}
        results = {"without": asdict(quiet), "with": asdict(hostile)}
        path.write_text(json.dumps(content | results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
