"""Our engine compared with pfl, a plain PyTorch loop and others, on models that people train.

A row is a work: a model, data and a plan, from `works.WORKS`. Every contestant trains each user
from the same model, clips its update and adds it up; noise is the same for all and left out. Each
has a fresh process, whose first round is reported separately. Then all sums are compared with the
plain loop's, and contestants take turns of a second or one round, stopped while others train.
Figures are medians over the turns. On a CPU they are processor time, in one thread, so that other
work on the machine counts little; if several processes share the users, the slowest one counts.

`make bench-rivals` installs the rivals into a separate environment and runs this:

    python -m simulations.benchmarks.compare --json simulations/results/benchmarks.json
    python -m simulations.benchmarks.compare --device cuda --json cuda.json
    python -m simulations.benchmarks.compare --rows mlp lstm --without flower pfl opacus
"""

import argparse
import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from rich.console import Console

from fedpriv.errors import DataError, FedprivError, InvalidValueError, WorkerError
from fedpriv.flower.ray import switch_off_telemetry
from simulations.benchmarks.arena import Player, Setting, playing
from simulations.benchmarks.contestants import Turn
from simulations.benchmarks.machine import made_by
from simulations.benchmarks.table import (
    ALONE,
    EQUAL,
    FORKED,
    OURS,
    RULE,
    Contest,
    Row,
    figures,
    ratios_text,
    table,
)
from simulations.benchmarks.works import WORKS, Work

_OTHERS = {"dpsgd": ("opacus",)}  # only for the row in which a user is an example
_FLOWER = ("mlp", "cnn", "shakespeare", "softmax")
"""Rows that Flower trains too; its time per user is mostly that of a message."""
_PACKAGES = {"pfl": ("pfl",), "flower": ("flwr", "ray"), "opacus": ("opacus",)}
_SECONDS = 1.0  # of a turn; the first round after a rest is slower than the rounds that follow
_MOST_PROCESSES = 5  # on a GPU, which a single process of a rival does not fill
_UNEQUAL, _EQUAL = "-pareto", "-equal"
LARGE = ("mlp-2000", "cnn-2000")
"""Rows of cohorts that keep a GPU busy; on a CPU, smaller cohorts cost the same per user."""
ON_GPU = ("shakespeare", "softmax", "dpsgd", "mlp-pareto", "transformer-pareto", *LARGE)
ON_CPU = tuple(name for name in WORKS if name not in LARGE and not name.endswith(_EQUAL))
REFERENCE = "reference"
"""Name of the plain loop on the CPU, with which all sums of a GPU are compared."""
_AGREES = {"flower": 1e-2}  # a difference of two models in float32, times the number of users


def settings_of(
    work: str,
    without: Sequence[str],
    device: str,
    threads: int,
    processes: Sequence[int] | None = None,
) -> dict[str, Setting]:
    """Return the contestants that can do a work, by name, with their processes and threads."""
    own_threads = threads if device == "cuda" else 1
    settings = {name: Setting(name, work, device, own_threads) for name in (OURS, "plain")}
    if device == "cpu":
        settings |= {name: Setting(name, work, device, 1) for name in (RULE, ALONE)}
        if threads > 1:
            settings[FORKED] = Setting(OURS, work, device, threads)
    if work.endswith(_UNEQUAL):
        settings[EQUAL] = Setting(OURS, work.removesuffix(_UNEQUAL) + _EQUAL, device, own_threads)
    process_count = _MOST_PROCESSES if device == "cuda" else threads
    for count in processes or range(1, process_count + 1):
        name = "pfl" if count == 1 else f"pfl-{count}"
        threads_each = max(1, threads // count) if device == "cuda" else 1
        settings[name] = Setting("pfl", work, device, threads_each, count)
    rivals = (*_OTHERS.get(work, ()), *(["flower"] if work in _FLOWER else []))
    settings |= {name: Setting(name, work, device, threads) for name in rivals}
    settings = {
        name: setting for name, setting in settings.items() if setting.contestant not in without
    }
    return (
        settings if device == "cpu" else {**settings, REFERENCE: Setting("plain", work, "cpu", 1)}
    )


def compare(name: str, settings: Mapping[str, Setting], repeats: int) -> Row:
    """Measure a work, in `repeats` turns of each contestant.

    WorkerError: the sum of a contestant differs, or its process has ended.
    """
    work = WORKS[name]()
    _say(f"{name}: {len(settings)} contestants train a first round, and their sums are compared")
    with playing(settings) as players:
        users = {c: range(work.users_in_a_turn(settings[c].contestant)) for c in players}
        turns = {c: Turn(chosen, work.local, _SECONDS) for c, chosen in users.items()}
        first = {c: p.take(replace(turns[c], seconds=0.0)) for c, p in players.items()}
        differences = differences_of(work, {c: p for c, p in players.items() if c != EQUAL})
        _say(f"{name}: all sums agree; contestants take turns")
        if REFERENCE in players:
            players.pop(REFERENCE).leave()
        seconds: dict[str, list[float]] = {c: [] for c in players}
        for _ in range(repeats):
            for c, player in players.items():
                seconds[c].append(player.take(turns[c]).seconds)
    contests = [
        Contest(
            c,
            len(users[c]),
            first[c].prepared,
            first[c].seconds,
            seconds[c],
            differences.get(c, 0.0),
            first[c].mebibytes,
            first[c].logged,
        )
        for c in players
    ]
    return Row(work.title, contests)


def differences_of(work: Work, players: Mapping[str, Player]) -> dict[str, float]:
    """Return relative differences from the reference's sum, for users whose rows are alike."""
    answers = {
        name: player.take(Turn(work.checked, work.local)) for name, player in players.items()
    }
    reference = (answers.pop(REFERENCE) if REFERENCE in answers else answers["plain"]).total
    differences: dict[str, float] = {}
    for name, answer in answers.items():
        error = np.linalg.norm(answer.total - reference) / np.linalg.norm(reference)
        differences[name] = float(error)
        if not error <= max(work.tolerance, _AGREES.get(name, 0.0)):
            raise WorkerError(
                f"the sum of {name} differs by {error:.2g} of its norm from the plain loop's; it "
                f"does other work ({work.title})"
            )
    return differences


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _check(contestants: Collection[str]) -> None:
    packages = {package for name in contestants for package in _PACKAGES.get(name, ())}
    missing = sorted(package for package in packages if find_spec(package) is None)
    if missing:
        raise InvalidValueError(
            f"{' and '.join(missing)} cannot be imported; `make bench-rivals` installs the rivals"
        )


def _measure(options: argparse.Namespace, console: Console) -> None:
    failed = list[str]()
    for name in options.rows:
        settings = settings_of(
            name, options.without, options.device, options.threads, options.processes
        )
        _check({setting.contestant for setting in settings.values()})
        try:
            row = compare(name, settings, options.repeats)
        except (DataError, WorkerError) as error:  # other rows are still measured
            console.print(f"{name} is left out: {error}")
            failed += [name] if isinstance(error, WorkerError) else []
            continue
        console.print(table([row]))
        console.print(f"{name}: {ratios_text(row)}")
        if options.json:  # now, because the next row may take long
            keep(options.json, name, row, options.device, options.threads)
    if failed:
        raise WorkerError(f"not all contestants did the work of {' and '.join(failed)}")


def keep(file: Path, name: str, row: Row, device: str, threads: int) -> None:
    """Write a row into a file, in place of the same row of an earlier run; keep other rows."""
    rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    packages = ["fedpriv", "torch", "numpy", "pfl", "flwr", "ray", "opacus"]
    rows[name] = figures(row) | made_by("benchmarks.compare", packages, device, threads)
    content = {work: rows[work] for work in WORKS if work in rows}
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Measure, print and, if requested, write the figures."""
    parser = argparse.ArgumentParser(description="users per second of several libraries")
    parser.add_argument("--rows", nargs="+", choices=WORKS, help="by default those of the device")
    parser.add_argument("--without", nargs="+", choices=(*_PACKAGES, RULE, ALONE), default=[])
    parser.add_argument("--repeats", type=int, default=5, help="turns of each contestant")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--processes", nargs="+", type=int, help="of pfl; by default 1, 2, …")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="number to use")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    if invalid := [count for count in options.processes or () if count < 1]:
        parser.error(f"--processes holds {invalid[0]}; each must be at least 1")
    options.rows = options.rows or (ON_GPU if options.device == "cuda" else ON_CPU)
    switch_off_telemetry()
    try:
        _measure(options, Console())
    except FedprivError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
