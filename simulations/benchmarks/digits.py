"""Time of the parts of `fedpriv simulate digits`: start, training, ledger, and everything else.

    python -m simulations.benchmarks.digits --json simulations/results/digits_time.json

Each run has a fresh process, in one thread; figures are medians of processor time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

START, ALL, ELSE = "start", "all", "all that is not start, training and ledger"
TRIALS, TRAINING, LEDGER, PRICES = "trials before the first round", "training", "ledger", "prices"


@contextmanager
def watched(parts: dict[str, float], starts: dict[str, float]) -> Iterator[None]:
    """Add functions' times to `parts`, and the start of the first round to `starts`."""
    from fedpriv.engine import transport  # noqa: PLC0415 - importing it is part of the start
    from fedpriv.engine.trainer import Trainer  # noqa: PLC0415
    from fedpriv.ledger.ledger import Ledger  # noqa: PLC0415
    from fedpriv.ledger.participation import ParticipationRecord  # noqa: PLC0415
    from fedpriv.privacy.round import PrivacyRecords  # noqa: PLC0415

    functions = (
        (transport, "road_of", TRIALS),
        (transport.InProcessTransport, "prepare", TRIALS),
        (Trainer, "sum_of", TRAINING),
        (PrivacyRecords, "next_attempt", LEDGER),
        (ParticipationRecord, "record", LEDGER),
        (Ledger, "charge", LEDGER),
        (ParticipationRecord, "keep_head", LEDGER),
        (PrivacyRecords, "refuse_if_beyond", PRICES),
        (Ledger, "epsilon", PRICES),
    )
    nested = False

    def timed(part: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*positional: Any, **keywords: Any) -> Any:
            nonlocal nested
            began, outermost, nested = time.process_time(), not nested, True
            if name == "prepare":
                starts.setdefault(START, began - parts.get(TRIALS, 0.0))
            try:
                return function(*positional, **keywords)
            finally:
                if outermost:
                    parts[part] = parts.get(part, 0.0) + time.process_time() - began
                    nested = False

        return call

    with ExitStack() as stack:
        for owner, name, part in functions:
            stack.enter_context(patch.object(owner, name, timed(part, name, getattr(owner, name))))
        yield


def once() -> dict[str, float]:
    """Run in this process; return the seconds of each part since its start."""
    from fedpriv.cli import main  # noqa: PLC0415

    parts, starts = dict[str, float](), dict[str, float]()
    with tempfile.TemporaryDirectory() as folder, watched(parts, starts):
        command = ["fedpriv", "simulate", "digits", "--out", f"{folder}/run"]
        with patch.object(sys, "argv", command), ExitStack() as stack:
            stack.enter_context(patch.object(sys, "stdout", sys.stderr))
            try:
                main()
            except SystemExit as end:
                if end.code:
                    raise
    return {START: starts[START], **parts, ALL: time.process_time()}


def apart() -> dict[str, float]:
    """Run in a new process with one thread; return the seconds of each part."""
    process = subprocess.run(
        [sys.executable, "-m", "simulations.benchmarks.digits", "--once"],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    parts: dict[str, float] = json.loads(process.stdout.splitlines()[-1])
    return parts


def shares(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the median share of each part in the time of a run."""
    medians = {
        part: median(run[part] / run[ALL] for run in runs) for part in runs[0] if part != ALL
    }
    parts = START, TRAINING, LEDGER
    return medians | {ELSE: median(1 - sum(run[p] for p in parts) / run[ALL] for run in runs)}


def main() -> None:
    """Measure, print and, if requested, write the figures."""
    parser = argparse.ArgumentParser(description="time of the parts of a small run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--once", action="store_true", help="one run in this process, as JSON")
    options = parser.parse_args()
    if options.once:
        print(json.dumps(once()))
        return
    from simulations.benchmarks.machine import made_by  # noqa: PLC0415

    runs = [apart() for _ in range(options.repeats)]
    parts = shares(runs)
    for part, share in parts.items():
        print(f"{part:44} {share:6.1%}")
    if options.json:
        content = made_by("benchmarks.digits", ["fedpriv", "torch", "numpy"])
        content |= {"shares": parts, "processor seconds": runs}
        options.json.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
