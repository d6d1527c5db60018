"""Audits of runs that do what they charge, and of runs that leak more.

    python -m simulations.audits [--runs 100] [--faults NAME ...] [--mnist 3] [--figure FILE]

Each run trains DIGITS by its plan (ε = 2, δ = 1e-3) with 1,000 canaries, from the operating
system's entropy. A fault is a change of the program that a programmer could make by mistake; the
charge stays that of a correct program. The last row is MNIST by writer at ε = 10 with 5,000
canaries, which needs the folder in FEDPRIV_DATA. Runs in the folder of results are not repeated.
"""

import argparse
import multiprocessing
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import nn

from fedpriv.audit.verdict import AuditResult
from fedpriv.experiment.build import simulated
from fedpriv.experiment.bundled import experiment_file
from fedpriv.experiment.config import load_config
from fedpriv.report.charts import Axis, Chart, Series, figure
from fedpriv.report.tables import Column, Table
from fedpriv.run.run import RunSetup
from fedpriv.run.terminal import execute
from simulations import broken_engines
from simulations.broken_engines import Broken
from simulations.papers.results import read_results, write_numbers, write_results

HERE = Path(__file__).parent
QUIET = ("output.evaluate_every=1000", "output.checkpoint_every=1000", "engine.processes=1")
DIGITS, MNIST = experiment_file(Path("digits")), HERE / "mnist_writers.toml"
LAYERS = ("model={name='simulations.audits:four_layers'}", "clipping.strategy=per-layer")


def four_layers() -> nn.Module:
    """Return a model of DIGITS with enough layers for a fault that grows with their number."""
    widths = (64, 48, 48, 48, 10)
    layers = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(widths)]
    return nn.Sequential(nn.Flatten(), *layers[:-1], layers[-1][0])


FAULTS: Mapping[str, tuple[Broken, tuple[str, ...]]] = {
    "none": (nullcontext, ()),
    "noise halved": (broken_engines.halved_noise, ()),
    "clipping left out": (broken_engines.no_clipping, ()),
    "a layer's bound as if of all": (broken_engines.bound_as_if_joint, LAYERS),
    "noise used twice": (broken_engines.noise_used_twice, ()),
    "charged at half of q": (broken_engines.half_of_q_charged, ()),
}
ON_MNIST = "none, MNIST at ε = 10"


@dataclass(frozen=True)
class Audited:
    """The result of the audit of one run."""

    fault: str
    epsilon: float  # claimed
    epsilon_low: float
    epsilon_estimate: float | None
    by_guesses: bool  # refuted by guesses about canaries
    by_noise: bool  # refuted by a test of the noise

    @classmethod
    def of(cls, fault: str, result: AuditResult) -> "Audited":
        """Return the part of a result that is stored."""
        guesses = any("guesses" in sentence for sentence in result.refutations)
        noise = any("noise" in sentence for sentence in result.refutations)
        low, estimate = result.epsilon_low, result.epsilon_estimate
        return cls(fault, result.epsilon, low, estimate, guesses, noise)


def audited(file: Path, settings: Sequence[str], fault: Broken = nullcontext) -> AuditResult:
    """Run a plan and its audit, with a fault."""
    torch.set_num_threads(1)
    with fault(), tempfile.TemporaryDirectory() as folder:
        config = load_config(file, [*QUIET, *settings])
        setup = RunSetup.at(config, Path(folder) / "run", resume=False)
        experiment, transport = simulated(config, setup.run)
        run = execute(
            setup,
            experiment,
            lambda *_: transport,
            Console(quiet=True),
            lambda _experiment, _first, rounds: rounds(lambda _result: None),
            None,
        )
    assert run.audit is not None
    return run.audit


def of_digits(name: str) -> Audited:
    """Audit a run on DIGITS with the fault of this name."""
    fault, settings = FAULTS[name]
    return Audited.of(name, audited(DIGITS, ["audit.canaries=1000", *settings], fault))


def of_mnist(_name: str) -> Audited:
    """Audit a run on MNIST by writer."""
    result = audited(MNIST, ["audit.canaries=5000", "privacy.epsilon=10.0"])
    return Audited.of(ON_MNIST, result)


def table_of(audits: Sequence[Audited]) -> Table:
    """Return a table with a row for each fault."""
    rows = []
    for name in dict.fromkeys(audit.fault for audit in audits):
        runs = [audit for audit in audits if audit.fault == name]
        lows = sorted(audit.epsilon_low for audit in runs)
        estimates = [audit.epsilon_estimate or 0.0 for audit in runs]
        refuted = sum(audit.by_guesses or audit.by_noise for audit in runs)
        rows.append(
            (
                name,
                str(len(runs)),
                f"{runs[0].epsilon:.3f}",
                f"{statistics.median(lows):.3f}",
                f"{lows[0]:.2f} to {lows[-1]:.2f}",
                f"{statistics.median(estimates):.2f}",
                str(sum(audit.by_guesses for audit in runs)),
                str(sum(audit.by_noise for audit in runs)),
                str(refuted),
            )
        )
    names = "runs, claimed, median ε_low, ε_low, estimate, by guesses, by noise, refuted"
    columns = [Column("fault", "text"), *map(Column, names.split(", "))]
    return Table("DIGITS with 1,000 canaries, MNIST by writer with 5,000", columns, rows)


def chart_of(result: AuditResult) -> Chart:
    """Return a chart of the scores of canaries in one run."""
    scores, present = np.array(result.scores), np.array(result.there)
    ends = np.histogram_bin_edges(scores, bins=40)
    middles = ((ends[1:] + ends[:-1]) / 2.0).tolist()
    series = [
        Series(name, middles, np.histogram(scores[chosen], ends)[0].tolist(), dashed=dashed)
        for name, chosen, dashed in (
            ("canaries that were there", present, False),
            ("canaries that were not", ~present, True),
        )
    ]
    return Chart(
        "audit",
        "How surely canaries are told apart in one run on MNIST by writer",
        f"{result.canaries:,} canaries at ε = 10: {result.text}.",
        Axis("score", "log-likelihood ratio"),
        Axis("canaries", "count", from_zero=True),
        series,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print, and write the results."""
    parser = argparse.ArgumentParser(description="what audits find")
    parser.add_argument("--runs", type=int, default=100, help="of each fault")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--mnist", type=int, default=3, help="runs on MNIST by writer")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--figure", type=Path, help="draw the scores of one more run on MNIST")
    parser.add_argument("--folder", type=Path, default=HERE / "results")
    options = parser.parse_args(arguments)
    audits = [Audited(**row) for row in read_results(options.folder, "audits")]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.workers, mp_context=context) as pool:
        planned = {**dict.fromkeys(options.faults, options.runs), ON_MNIST: options.mnist}
        for name, runs in planned.items():
            count = runs - sum(audit.fault == name for audit in audits)
            audits += pool.map(of_mnist if name == ON_MNIST else of_digits, [name] * count)
            write_numbers([asdict(audit) for audit in audits], options.folder, "audits")
    write_results(table_of(audits), [asdict(audit) for audit in audits], options.folder, "audits")
    if options.figure is not None:
        result = audited(MNIST, ["audit.canaries=5000", "privacy.epsilon=10.0"])
        figure(chart_of(result)).save(options.figure, scale_factor=2)


if __name__ == "__main__":
    main()
