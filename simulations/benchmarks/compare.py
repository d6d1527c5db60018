"""Users per second beside pfl, Flower on Ray, Opacus and a plain PyTorch loop.

Five works: an MLP and a CNN on 100 users of 50 images, a character transformer on Shakespeare's
roles, softmax regression on 100,000 users, and DP-SGD. Every contestant trains each user from the
same model, clips its update and adds it up; noise is the same for all and left out. First all sums
are compared with the plain loop's, then contestants take turns of a second or one round, each in a
process of its own that is stopped while others train. Figures are medians over the turns.

`make bench-rivals` installs the rivals into an environment of their own and runs this:

    python -m simulations.benchmarks.compare --json simulations/results/benchmarks.json
    python -m simulations.benchmarks.compare --rows mlp softmax --without flower pfl opacus
"""

import argparse
import json
import os
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from rich.console import Console

from fedpriv.errors import DataError, FedprivError, InvalidValueError, WorkerError
from fedpriv.server.ray_engine import switch_off_telemetry
from simulations.benchmarks.arena import Player, Setting, playing
from simulations.benchmarks.contestants import CEILING, PRODUCTS_FLOPS, Done, Turn
from simulations.benchmarks.machine import machine, versions
from simulations.benchmarks.table import OURS, Contest, Row, figures, table
from simulations.benchmarks.works import WORKS, Work

_CONTESTANTS = (OURS, "plain", "pfl", "flower")
_OF_RECORDS = {"dpsgd": ("opacus",)}  # where a user is an example, and for nothing else
_PACKAGES = {"pfl": ("pfl",), "flower": ("flwr", "ray"), "opacus": ("opacus",)}
_SECONDS = 1.0  # a simulation is round after round: the first one after a rest is slower
_AGREE = 1e-4
_AGREES = {"flower": 1e-2}  # a difference of two models in float32, times the number of users


def contestants_at(work: str, without: Sequence[str]) -> list[str]:
    """Names of those that can do a work."""
    names = (*_CONTESTANTS, *_OF_RECORDS.get(work, ()))
    return [name for name in names if name not in without]


def compare(name: str, contestants: Sequence[str], repeats: int, device: str, threads: int) -> Row:
    """Measure a work.

    Args:
        name: of the work.
        contestants: names; ours and the plain loop among them.
        repeats: turns of each.
        device: "cpu" or "cuda".
        threads: of torch, in each process.

    Raises:
        DataError: the work's data are absent.
        WorkerError: the sum of a contestant is another, or its process has ended.
    """
    work = WORKS[name]()
    settings = [Setting(c, name, device, threads) for c in (*contestants, CEILING)]
    with playing(settings) as players:
        differences = differences_of(work, players)
        turns = {c: Turn(work.users_in_a_turn(c), work.local, _SECONDS) for c in players}
        for player in players.values():  # the first turn of this size pays for memory
            player.take(turns[player.name])
        seconds: dict[str, list[float]] = {c: [] for c in players}
        for _ in range(repeats):
            for player in players.values():
                seconds[player.name].append(player.take(turns[player.name]).seconds)
    contests = [
        Contest(c, turns[c].users, work.flops_of(turns[c].users), seconds[c], differences[c])
        for c in contestants
    ]
    return Row(work.title, contests, PRODUCTS_FLOPS / statistics.median(seconds[CEILING]))


def differences_of(work: Work, players: Mapping[str, Player]) -> dict[str, float]:
    """Relative differences of sums from the plain loop's, on batches that have no order."""
    turn = Turn(work.sampled, work.without_order())
    done: dict[str, Done] = {name: player.take(turn) for name, player in players.items()}
    expected = done["plain"].total
    differences: dict[str, float] = {}
    for name in players.keys() - {CEILING}:
        error = np.linalg.norm(done[name].total - expected) / np.linalg.norm(expected)
        differences[name] = float(error)
        if not error <= _AGREES.get(name, _AGREE):
            raise WorkerError(
                f"the sum of {name} differs by {error:.2g} of its norm from the plain loop's; it "
                f"does other work ({work.title})"
            )
    return differences


def _check(contestants: Sequence[str]) -> None:
    needed = {package for name in contestants for package in _PACKAGES.get(name, ())}
    absent = sorted(package for package in needed if find_spec(package) is None)
    if absent:
        raise InvalidValueError(
            f"{' and '.join(absent)} cannot be imported; `make bench-rivals` installs the rivals"
        )


def _measure(given: argparse.Namespace, console: Console) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for name in given.rows:
        contestants = contestants_at(name, given.without)
        _check(contestants)
        try:
            rows[name] = compare(name, contestants, given.repeats, given.device, given.threads)
        except DataError as error:
            console.print(f"{name} is left out: {error}")
            continue
        console.print(table([rows[name]]))
    return rows


def main() -> None:
    """Measure, print and, if asked, keep the figures."""
    parser = argparse.ArgumentParser(description="users per second beside other libraries")
    rivals = [name for name in (*_CONTESTANTS, "opacus") if name not in {OURS, "plain"}]
    parser.add_argument("--rows", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--without", nargs="+", choices=rivals, default=[])
    parser.add_argument("--repeats", type=int, default=7, help="turns of each contestant")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    given = parser.parse_args()
    switch_off_telemetry()
    try:
        rows = _measure(given, Console())
    except FedprivError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if given.json:
        command = ["python", "-m", "simulations.benchmarks.compare", *sys.argv[1:]]
        packages = ["fedpriv", "torch", "numpy", "pfl", "flwr", "ray", "opacus"]
        kept = {
            "command": shlex.join(command),
            "machine": machine(given.device, given.threads),
            "versions": versions(packages),
            "rows": figures(rows),
        }
        given.json.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
