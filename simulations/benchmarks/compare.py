"""Users per second beside pfl, Flower on Ray, Opacus and a plain PyTorch loop.

Five works: an MLP and a CNN on 100 users of 50 images, a character transformer on Shakespeare's
roles, softmax regression on 100,000 users, and DP-SGD. Every contestant trains each user from the
same model, clips its update and adds it up; noise is the same for all and left out. First all sums
are compared with the plain loop's, then contestants take turns of a second or one round, each in a
process of its own that is stopped while others train. Figures are medians over the turns. Where
one user trains after another, as in pfl, several processes that share the users are tried as well.

`make bench-rivals` installs the rivals into an environment of their own and runs this:

    python -m simulations.benchmarks.compare --json simulations/results/benchmarks.json
    python -m simulations.benchmarks.compare --device cuda --json cuda.json
    python -m simulations.benchmarks.compare --rows mlp softmax --without flower pfl opacus
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from rich.console import Console

from fedpriv.errors import DataError, FedprivError, InvalidValueError, WorkerError
from fedpriv.server.ray_engine import switch_off_telemetry
from simulations.benchmarks.arena import Player, Setting, playing
from simulations.benchmarks.contestants import CEILING, PRODUCTS_FLOPS, Done, Turn
from simulations.benchmarks.machine import made_by
from simulations.benchmarks.table import OURS, Contest, Row, figures, table
from simulations.benchmarks.works import WORKS, Work

_CONTESTANTS = (OURS, "plain", "pfl", "flower")
_OF_RECORDS = {"dpsgd": ("opacus",)}  # where a user is an example, and for nothing else
_PACKAGES = {"pfl": ("pfl",), "flower": ("flwr", "ray"), "opacus": ("opacus",)}
_SECONDS = 1.0  # a simulation is round after round: the first one after a rest is slower
_AGREE = 1e-4
_MOST_PROCESSES = 5  # on a GPU, which no single one of a rival's fills
LARGE = ("mlp-2000", "cnn-2000")
"""Rows of cohorts that keep a GPU busy; on a CPU a user costs as much in a smaller one."""
REFERENCE = "reference"
"""Name of the plain loop on the CPU, which all sums are compared with."""
_AGREES = {"flower": 1e-2}  # a difference of two models in float32, times the number of users


def settings_of(
    work: str,
    without: Sequence[str],
    device: str,
    threads: int,
    processes: Sequence[int] | None = None,
) -> dict[str, Setting]:
    """Those that can do a work, by name, and with how many processes and threads."""
    found = {}
    for contestant in (*_CONTESTANTS, *_OF_RECORDS.get(work, ()), CEILING):
        tried: Sequence[int] = [1]
        if contestant == "pfl":
            most = _MOST_PROCESSES if device == "cuda" else threads
            tried = processes or range(1, most + 1)
        for count in tried:
            if contestant not in without:
                name = contestant if count == 1 else f"{contestant}-{count}"
                each = max(1, threads // count)
                found[name] = Setting(contestant, work, device, each, count)
    return {**found, REFERENCE: Setting("plain", work, "cpu", threads)}


def compare(name: str, settings: Mapping[str, Setting], repeats: int) -> Row:
    """Measure a work, in so many turns of each contestant.

    WorkerError: the sum of a contestant is another, or its process has ended.
    """
    work = WORKS[name]()
    _say(f"{name}: {len(settings)} contestants prepare, and their sums are compared")
    with playing(settings) as players:
        differences = differences_of(work, players)
        _say(f"{name}: all sums agree; contestants take turns")
        players.pop(REFERENCE).leave()
        users = {c: range(work.users_in_a_turn(settings[c].contestant)) for c in players}
        turns = {c: Turn(some, work.local, _SECONDS) for c, some in users.items()}
        for c, player in players.items():  # the first turn of this size pays for memory
            player.take(turns[c])
        seconds: dict[str, list[float]] = {c: [] for c in players}
        for _ in range(repeats):
            for c, player in players.items():
                seconds[c].append(player.take(turns[c]).seconds)
    contests = [
        Contest(c, len(users[c]), work.flops_of(len(users[c])), seconds[c], differences[c])
        for c in players
        if c != CEILING
    ]
    return Row(work.title, contests, PRODUCTS_FLOPS / statistics.median(seconds[CEILING]))


def differences_of(work: Work, players: Mapping[str, Player]) -> dict[str, float]:
    """Relative differences of sums from the reference's, on batches that have no order."""
    turn = Turn(range(work.sampled), work.without_order())
    done: dict[str, Done] = {name: player.take(turn) for name, player in players.items()}
    expected = done[REFERENCE].total
    differences: dict[str, float] = {}
    for name in players.keys() - {CEILING, REFERENCE}:
        error = np.linalg.norm(done[name].total - expected) / np.linalg.norm(expected)
        differences[name] = float(error)
        if not error <= _AGREES.get(name, _AGREE):
            raise WorkerError(
                f"the sum of {name} differs by {error:.2g} of its norm from the plain loop's; it "
                f"does other work ({work.title})"
            )
    return differences


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def _check(contestants: Collection[str]) -> None:
    needed = {package for name in contestants for package in _PACKAGES.get(name, ())}
    absent = sorted(package for package in needed if find_spec(package) is None)
    if absent:
        raise InvalidValueError(
            f"{' and '.join(absent)} cannot be imported; `make bench-rivals` installs the rivals"
        )


def _measure(given: argparse.Namespace, console: Console) -> None:
    rows: dict[str, Row] = {}
    packages = ["fedpriv", "torch", "numpy", "pfl", "flwr", "ray", "opacus"]
    kept = made_by("benchmarks.compare", packages, given.device, given.threads)
    for name in given.rows:
        settings = settings_of(name, given.without, given.device, given.threads, given.processes)
        _check({setting.contestant for setting in settings.values()})
        try:
            rows[name] = compare(name, settings, given.repeats)
        except DataError as error:
            console.print(f"{name} is left out: {error}")
            continue
        console.print(table([rows[name]]))
        if given.json:  # now, as the next row may take long
            kept["rows"] = figures(rows)
            given.json.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    """Measure, print and, if asked, keep the figures."""
    parser = argparse.ArgumentParser(description="users per second beside other libraries")
    rivals = [name for name in (*_CONTESTANTS, "opacus") if name not in {OURS, "plain"}]
    parser.add_argument("--rows", nargs="+", choices=WORKS, help="by default those of the device")
    parser.add_argument("--without", nargs="+", choices=rivals, default=[])
    parser.add_argument("--repeats", type=int, default=7, help="turns of each contestant")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--processes", nargs="+", type=int, help="of pfl; by default 1, 2, … of it")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    given = parser.parse_args()
    if least := [count for count in given.processes or () if count < 1]:
        parser.error(f"--processes holds {least[0]}; each must be at least 1")
    given.rows = given.rows or [n for n in WORKS if given.device == "cuda" or n not in LARGE]
    switch_off_telemetry()
    try:
        _measure(given, Console())
    except FedprivError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
