"""Speed and tightness of ε, compared with dp-accounting's PLD accountant, on sixty settings.

Every setting and accountant runs in its own process with one thread, which imports, then measures
the time of one answer and the memory that it adds. dp-accounting has its default grid of 1e-4, or
the coarsest of 1e-4, 2.5e-5, … with which its ε is at most 1e-3·ε + 1e-6 above ours; the time of
coarser ones does not count. If its ε is below the lower end of ours, it is wrong, not tight.

    python -m simulations.accounting_speed [--limit SECONDS] [--json FILE]
"""

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypedDict

import numpy as np
from rich.console import Console
from rich.table import Table

from fedpriv.accounting import epsilon, poisson_gaussian
from simulations.references import REFERENCES, Reference

_GRID = 1e-4
_MEBIBYTE = 1 << 10
"""In kibibytes, the operating system's unit of resident memory."""


class Answer(TypedDict):
    """The answer of one process; if it was stopped, ends are inf and seconds are the limit."""

    low: float
    up: float
    seconds: float
    mebibytes: float


def tight(reference: Reference, _grid: float) -> tuple[float, float]:
    """Return the interval of the accountant `tight`."""
    loss = epsilon([reference.event], reference.delta, accountant="tight")
    return loss.epsilon_low, loss.epsilon


def published(reference: Reference, grid: float) -> tuple[float, float]:
    """Return dp-accounting's upper bound; it has no lower one."""
    import dp_accounting  # noqa: PLC0415 - it takes seconds, and memory that is not ours
    from dp_accounting.pld import PLDAccountant  # noqa: PLC0415

    event = dp_accounting.GaussianDpEvent(reference.z)
    accountant = PLDAccountant(value_discretization_interval=grid)
    sampled = dp_accounting.PoissonSampledDpEvent(reference.q, event)
    accountant.compose(sampled, reference.rounds)
    return 0.0, float(accountant.get_epsilon(reference.delta))


ACCOUNTANTS: dict[str, Callable[[Reference, float], tuple[float, float]]] = {
    "fedpriv": tight,
    "dp-accounting": published,
}


def measured(name: str, index: int, target: float) -> Answer:
    """Return one answer, timed after an easy first one that does all imports.

    Grids are refined until ε is about as tight as the target, or tighter.
    """
    ACCOUNTANTS[name](Reference(0.5, 5.0, 1, 1e-3), _GRID)
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grid = _GRID
    while True:
        start = time.perf_counter()
        low, up = ACCOUNTANTS[name](REFERENCES[index], grid)
        seconds = time.perf_counter() - start
        if up <= _about(target):
            break
        grid /= 4.0
    added = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before
    return Answer(low=low, up=up, seconds=seconds, mebibytes=added / _MEBIBYTE)


def _about(epsilon: float) -> float:
    """Return the largest ε that still counts as equally tight."""
    return epsilon * (1 + 1e-3) + 1e-6


def in_process(name: str, index: int, target: float, limit: float) -> Answer:
    """Like `measured`, in a new process, which is stopped after `limit` seconds."""
    command = [sys.executable, "-m", "simulations.accounting_speed"]
    command += ["--one", name, str(index), str(target)]
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        finished = subprocess.run(
            command,
            capture_output=True,
            check=True,
            timeout=limit,
            env={**os.environ, **one_thread},
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return Answer(low=0.0, up=math.inf, seconds=limit, mebibytes=math.inf)
    answer: Answer = json.loads(finished.stdout)
    return answer


def seconds_of_different_rounds(count: int) -> float:
    """Return the time to compute ε of different rounds, q and z within a factor of 4 and 2."""
    rng = np.random.default_rng(0)
    probabilities = np.exp(rng.uniform(math.log(0.005), math.log(0.02), count)).tolist()
    noises = np.exp(rng.uniform(math.log(0.8), math.log(1.6), count)).tolist()
    events = [poisson_gaussian(q, z) for q, z in zip(probabilities, noises, strict=True)]
    start = time.perf_counter()
    epsilon(events, 1e-6)
    return time.perf_counter() - start


def table_of(rows: list[tuple[Reference, Answer, Answer]]) -> Table:
    """Return a table with one line per setting."""
    table = Table(title="ε, and the milliseconds it takes")
    for column in ("q", "z", "rounds", "δ", "fedpriv", "ms", "MiB", "dp-accounting", "ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for reference, own, other in rows:
        finished = math.isfinite(other["up"])
        table.add_row(
            f"{reference.q:g}",
            f"{reference.z:g}",
            f"{reference.rounds:g}",
            f"{reference.delta:g}",
            f"{own['up']:.6g}",
            f"{1e3 * own['seconds']:.1f}",
            f"{own['mebibytes']:.0f}",
            f"{other['up']:.6g}" if finished else "none",
            f"{1e3 * other['seconds']:.1f}" if finished else f"> {1e3 * other['seconds']:.0f}",
        )
    return table


def summary(rows: list[tuple[Reference, Answer, Answer]]) -> dict[str, float]:
    """Return a summary of the table in a few numbers."""
    own_answers, other_answers = [row[1] for row in rows], [row[2] for row in rows]
    pairs = [*zip(own_answers, other_answers, strict=True)]
    bounds = [(a, b) for a, b in pairs if b["up"] >= a["low"]]
    as_tight = [(a, b) for a, b in bounds if b["up"] <= _about(a["up"])]
    ratios = [b["seconds"] / a["seconds"] for a, b in as_tight]
    looser = sum(a["up"] > _about(b["up"]) for a, b in bounds)
    widths = [(a["up"] - a["low"]) / (1e-3 * a["up"] + 1e-6) for a in own_answers]
    return {
        "settings": len(rows),
        "median seconds": statistics.median(a["seconds"] for a in own_answers),
        "largest seconds": max(a["seconds"] for a in own_answers),
        "largest MiB": max(a["mebibytes"] for a in own_answers),
        "largest width over 1e-3·ε + 1e-6": max(widths),
        "settings in which ours is at least as tight": len(rows) - looser,
        "settings in which dp-accounting is below the truth": len(rows) - len(bounds),
        "settings in which dp-accounting is as tight": len(as_tight),
        "there, median of its time over ours": statistics.median(ratios),
        "there, least of its time over ours": min(ratios),
        "there, settings in which it is faster": sum(ratio < 1.0 for ratio in ratios),
        "settings that dp-accounting did not finish": sum(
            math.isinf(b["up"]) for b in other_answers
        ),
    }


def main() -> None:
    """Measure, print and, if requested, write the numbers."""
    parser = argparse.ArgumentParser(description="time and tightness of accountants")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one answer")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        name, setting, target = arguments.one
        print(json.dumps(measured(name, int(setting), float(target))))
        return
    rows = []
    for index, reference in enumerate(REFERENCES):
        own = in_process("fedpriv", index, math.inf, arguments.limit)
        other = in_process("dp-accounting", index, own["up"], arguments.limit)
        rows.append((reference, own, other))
    console, numbers = Console(), summary(rows)
    for count in (2_000, 100_000):
        numbers[f"seconds for {count:,} different rounds"] = seconds_of_different_rounds(count)
    console.print(table_of(rows))
    for name, value in numbers.items():
        console.print(f"{name}: {value:.4g}", highlight=False)
    if arguments.json:
        settings = [
            {"setting": str(r), "fedpriv": own, "dp-accounting": other} for r, own, other in rows
        ]
        arguments.json.write_text(
            json.dumps({"summary": numbers, "settings": settings}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
