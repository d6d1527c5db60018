"""Bytes per second and server memory of a deployment, compared with a bare gRPC stream.

There are three processes on loopback: the server of `fedpriv serve`, a bare gRPC server, and all
nodes, each with its own connection and certificate. In a round the sampled nodes fetch the model
and send updates, which the server checks and adds up; every sum is compared with the known one.
Between rounds the same nodes move the same bytes, with the same number of streams and in the same
directions, through the bare server. That is grpc.aio over the same mutual TLS with messages of
1 MiB, and does nothing with them. The nodes are only a load: they send data that were made before,
and discard what they receive. A last round asks all nodes.

Ratios omit the first round and the first bare exchange, which pay for memory that is new to their
processes; the file has all.

    python -m simulations.federation_load --json simulations/results/federation_load.json
    python -m simulations.federation_load --nodes 1 --sampled 1 --parameters 268435456 --rounds 1
"""

import argparse
import asyncio
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import numpy as np

from fedpriv.errors import InvalidValueError, WorkerError
from fedpriv.server.service import TransferLimits
from simulations.benchmarks.machine import command
from simulations.load_nodes import BareNodes, connected
from simulations.load_server import Done, Round, serve, serve_bare
from simulations.load_site import Site

_MEBIBYTE = 2**20
_UPDATES_BYTES = 256 * _MEBIBYTE  # of updates in transfer, the default of a configuration
_POLL_SECONDS = 0.002
_LONGEST_TRANSFER = 600.0
_DESCRIPTORS = 100  # in addition to connections

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Load:
    """The settings of a measurement."""

    nodes: int  # connected nodes
    sampled: int  # nodes in each round except the last
    parameters: int  # of the model, at least 1000
    rounds: int  # of the sampled nodes, at least 1


@dataclass(frozen=True)
class Found:
    """The measurements; lists have one number per round."""

    seconds: list[float]  # of rounds of the sampled
    bare_seconds: list[float]  # of the bare exchanges of the same bytes
    connected: list[int]  # nodes at the end of each round, the last one too
    peak_mebibytes: float  # of the server's memory, rounds of the sampled
    seconds_of_all: float  # of the round that asks all nodes
    peak_mebibytes_of_all: float  # of the server's memory, with that round


def measure(load: Load) -> Found:
    """Run all rounds."""
    allow_open_files(load.nodes + load.sampled)
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder) / "certs", load.nodes, load.parameters)
        site.issue()
        limits = TransferLimits.within(_UPDATES_BYTES, load.parameters, _LONGEST_TRANSFER)
        with _process(serve, site, limits) as server, _process(serve_bare, site) as bare:
            return asyncio.run(_rounds(load, site, server, bare))


def allow_open_files(connections: int) -> None:
    """Let this process, and its children, have this number of connections at once."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needs = connections + _DESCRIPTORS
    if hard != resource.RLIM_INFINITY and hard < needs:
        raise InvalidValueError(
            f"{hard} files may be open at once; {connections} connections need {needs} (ulimit -n)"
        )
    if soft != resource.RLIM_INFINITY and soft < needs:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needs, hard))


@contextmanager
def _process(target: Callable[..., None], *args: object) -> Iterator[Connection]:
    """Run a process, which ends with the context; its first argument is an end of the pipe."""
    context = multiprocessing.get_context("spawn")
    parent_end, child_end = context.Pipe()
    process = context.Process(target=target, args=(child_end, *args), daemon=True)
    process.start()
    child_end.close()
    try:
        yield parent_end
    finally:
        parent_end.close()
        process.join()


async def _rounds(load: Load, site: Site, server: Connection, bare: Connection) -> Found:
    port, bare_port = await _received(server, int), await _received(bare, int)
    cohort, everybody = site.cohort(load.sampled), site.cohort(load.nodes)
    bare_nodes = BareNodes(site, cohort, bare_port)
    answers: list[Done] = []
    bare_seconds: list[float] = []

    async def ask(cohort: list[int]) -> None:
        total = site.folder / "total.npy"
        server.send(Round(len(answers), cohort, total))
        answers.append(await _received(server, Done))
        if not np.array_equal(np.load(total, mmap_mode="r"), site.sum_of(cohort)):
            raise WorkerError("the server's sum is not the sum of the contributions")

    await bare_nodes.exchange()  # connects
    async with connected(site, port):
        for _ in range(load.rounds):
            await ask(cohort)
            began = time.perf_counter()
            await bare_nodes.exchange()
            bare_seconds.append(time.perf_counter() - began)
        await bare_nodes.close()
        await ask(everybody)
    *sampled, last = answers
    return Found(
        seconds=[d.seconds for d in sampled],
        bare_seconds=bare_seconds,
        connected=[d.connected for d in answers],
        peak_mebibytes=sampled[-1].peak / _MEBIBYTE,
        seconds_of_all=last.seconds,
        peak_mebibytes_of_all=last.peak / _MEBIBYTE,
    )


async def _received(pipe: Connection, kind: type[Kind]) -> Kind:
    """Return the next object from a pipe; unlike in a thread, the wait can be cancelled."""
    while not pipe.poll():
        await asyncio.sleep(_POLL_SECONDS)
    thing = pipe.recv()
    if not isinstance(thing, kind):
        raise TypeError(f"a process sent {type(thing)} in place of {kind}")
    return thing


def summary(load: Load, result: Found) -> dict[str, float]:
    """Return a summary in a few numbers; medians leave out the first of several rounds."""
    size = load.sampled * 2 * 4 * load.parameters
    speeds = [size / s for s in result.seconds[1:] or result.seconds]
    bare_speeds = [size / s for s in result.bare_seconds[1:] or result.bare_seconds]
    return {
        "megabytes per second": statistics.median(speeds) / 1e6,
        "megabytes per second of a bare stream": statistics.median(bare_speeds) / 1e6,
        "ratio": statistics.median(speeds) / statistics.median(bare_speeds),
        "server's peak memory in MiB": result.peak_mebibytes,
        "the same with all nodes sampled": result.peak_mebibytes_of_all,
        "the same over the bytes of the model": (
            result.peak_mebibytes_of_all * _MEBIBYTE / (4 * load.parameters)
        ),
        "connected nodes": min(result.connected),
    }


def main() -> None:
    """Measure, print and, if requested, write the numbers."""
    parser = argparse.ArgumentParser(description="load on a deployment, and on bare gRPC")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--sampled", type=int, default=200)
    parser.add_argument("--parameters", type=int, default=1_200_000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    load = Load(options.nodes, options.sampled, options.parameters, options.rounds)
    result = measure(load)
    numbers = summary(load, result)
    for name, value in numbers.items():
        print(f"{name}: {value:.4g}")
    if options.json:
        content = {"command": command("federation_load"), "load": asdict(load), "summary": numbers}
        content |= asdict(result)
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
