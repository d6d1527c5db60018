"""The command of the suite; see the package."""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from simulations.benchmarks.machine import environment
from simulations.suite.arms import PRIVACY, Arm
from simulations.suite.report import TOOLS, write
from simulations.suite.tasks import TASKS


def arms_of(given: argparse.Namespace) -> Iterator[Arm]:
    """The arms that the command asks for, task by task."""
    for task in given.tasks or TASKS:
        for seed in range(given.seeds or TASKS[task]().seeds):
            for privacy in given.privacy:
                for tool in given.tools:
                    processes = given.processes if tool == "fedpriv" else 1
                    yield Arm(task, privacy, tool, seed, given.rounds, given.pretraining, processes)


def main() -> int:
    """Train what is not yet finished, one arm after another, and write table and figure."""
    parser = argparse.ArgumentParser(prog="simulations.suite", description="the suite of tasks")
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}")
    parser.add_argument("--out", type=Path, default=Path("build/suite"))
    parser.add_argument("--privacy", nargs="+", choices=PRIVACY, default=[*PRIVACY])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=TOOLS)
    parser.add_argument("--seeds", type=int, help="how many; by default those of the task")
    parser.add_argument("--rounds", type=int, help="at most so many")
    parser.add_argument("--pretraining", type=int, help="at most so many steps")
    parser.add_argument("--processes", type=int, default=1, help="of fedpriv; pfl has one")
    given = parser.parse_args()
    for name in ("seeds", "rounds", "pretraining", "processes"):
        if (number := getattr(given, name)) is not None and number < 1:
            parser.error(f"--{name} is {number}; it must be at least 1")
    if unknown := [task for task in given.tasks if task not in TASKS]:
        parser.error(f"unknown task {unknown[0]!r}; tasks are {', '.join(TASKS)}")
    if "pfl" in given.tools and find_spec("pfl") is None:
        given.tools = [tool for tool in given.tools if tool != "pfl"]
        print("pfl is not installed here, so its arms are left out: use `make suite`")
    failed, arms = 0, given.out / "arms"
    for arm in arms_of(given):
        if arm.finished(arms):
            print(f"{arm.name}: finished before")
            continue
        command = [sys.executable, "-m", "simulations.suite.arms", json.dumps(asdict(arm))]
        ended = subprocess.run([*command, str(arms)], env=environment(), check=False)
        if ended.returncode:
            failed += 1
            print(f"{arm.name}: failed", file=sys.stderr)
            continue
        result = json.loads((arms / f"{arm.name}.json").read_text(encoding="utf-8"))
        print(f"{arm.name}: {result['score']:.4g} in {result['cpu_seconds']:g} s", flush=True)
    write(given.out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
