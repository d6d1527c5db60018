"""What audits find: in runs that do what they charge, and in runs that leak more.

    python -m simulations.audits [--runs 100] [--faults NAME ...] [--mnist 3] [--figure FILE]

Each run trains DIGITS by its plan (ε = 2, δ = 1e-3) with 1,000 canaries, from the operating
system's entropy. A fault is a change of the program such as a programmer could make; the charge
stays that of a program without it. The last row is MNIST by writer at ε = 10 with 5,000 canaries,
which needs a folder named by FEDPRIV_DATA. What is in the folder of results is not made again.
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
    """A model of DIGITS with enough layers for a fault that adds up over them."""
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
    """What the audit of one run found."""

    fault: str
    epsilon: float  # claimed
    epsilon_low: float
    epsilon_estimate: float | None
    by_guesses: bool  # refuted by guesses about canaries
    by_noise: bool  # refuted by a test of the noise

    @classmethod
    def of(cls, fault: str, found: AuditResult) -> "Audited":
        """The part of a result that is kept."""
        guesses = any("guesses" in each for each in found.refutations)
        noise = any("noise" in each for each in found.refutations)
        low, estimate = found.epsilon_low, found.epsilon_estimate
        return cls(fault, found.epsilon, low, estimate, guesses, noise)


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
    """A run on DIGITS with the fault of this name."""
    fault, settings = FAULTS[name]
    return Audited.of(name, audited(DIGITS, ["audit.canaries=1000", *settings], fault))


def of_mnist(_name: str) -> Audited:
    """A run on MNIST by writer."""
    found = audited(MNIST, ["audit.canaries=5000", "privacy.epsilon=10.0"])
    return Audited.of(ON_MNIST, found)


def table_of(found: Sequence[Audited]) -> Table:
    """A row for each fault."""
    rows = []
    for name in dict.fromkeys(each.fault for each in found):
        runs = [each for each in found if each.fault == name]
        lows = sorted(each.epsilon_low for each in runs)
        estimates = [each.epsilon_estimate or 0.0 for each in runs]
        refuted = sum(each.by_guesses or each.by_noise for each in runs)
        rows.append(
            (
                name,
                str(len(runs)),
                f"{runs[0].epsilon:.3f}",
                f"{statistics.median(lows):.3f}",
                f"{lows[0]:.2f} to {lows[-1]:.2f}",
                f"{statistics.median(estimates):.2f}",
                str(sum(each.by_guesses for each in runs)),
                str(sum(each.by_noise for each in runs)),
                str(refuted),
            )
        )
    names = "runs, claimed, median ε_low, ε_low, estimate, by guesses, by noise, refuted"
    columns = [Column("fault", "text"), *map(Column, names.split(", "))]
    return Table("DIGITS with 1,000 canaries, MNIST by writer with 5,000", columns, rows)


def chart_of(found: AuditResult) -> Chart:
    """Scores of canaries in one run."""
    scores, there = np.array(found.scores), np.array(found.there)
    ends = np.histogram_bin_edges(scores, bins=40)
    middles = ((ends[1:] + ends[:-1]) / 2.0).tolist()
    series = [
        Series(name, middles, np.histogram(scores[chosen], ends)[0].tolist(), dashed=dashed)
        for name, chosen, dashed in (
            ("canaries that were there", there, False),
            ("canaries that were not", ~there, True),
        )
    ]
    return Chart(
        "audit",
        "How surely canaries are told apart in one run on MNIST by writer",
        f"{found.canaries:,} canaries at ε = 10: {found.text}.",
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
    given = parser.parse_args(arguments)
    found = [Audited(**row) for row in read_results(given.folder, "audits")]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, mp_context=context) as pool:
        asked = {**dict.fromkeys(given.faults, given.runs), ON_MNIST: given.mnist}
        for name, runs in asked.items():
            missing = runs - sum(each.fault == name for each in found)
            found += pool.map(of_mnist if name == ON_MNIST else of_digits, [name] * missing)
            write_numbers([asdict(each) for each in found], given.folder, "audits")
    write_results(table_of(found), [asdict(each) for each in found], given.folder, "audits")
    if given.figure is not None:
        shown = audited(MNIST, ["audit.canaries=5000", "privacy.epsilon=10.0"])
        figure(chart_of(shown)).save(given.figure, scale_factor=2)


if __name__ == "__main__":
    main()
