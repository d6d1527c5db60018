"""What audits find: in runs that do what they charge, and in runs that leak more.

    python -m simulations.audits [--runs 100] [--faults NAME ...] [--mnist 3] [--figure FILE]

Each run trains DIGITS by its plan (ε = 2, δ = 1e-3) with 1,000 canaries, from the operating
system's entropy. A fault is a change of the program such as a programmer could make; the charge
stays that of a program without it. The last row is MNIST by writer at ε = 10 with 5,000 canaries,
which needs a folder named by FEDPRIV_DATA.
"""

import argparse
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from torch import nn

from fedpriv.audit import AuditResult
from fedpriv.build import simulated
from fedpriv.config import load_config
from fedpriv.ledger.events import RoundEvent, SamplingEvent
from fedpriv.privacy import gaussian_mechanism
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.noise import rounded_gaussian
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.report.charts import Axis, Chart, Series, figure
from fedpriv.report.tables import Column, Table
from fedpriv.run.run import RunSetup, run_rounds
from simulations.papers.results import write_results

HERE = Path(__file__).parent
QUIET = ("output.evaluate_every=1000", "output.checkpoint_every=1000", "engine.processes=1")
DIGITS, MNIST = HERE / "digits.toml", HERE / "mnist_writers.toml"
LAYERS = ("model={name='simulations.audits:four_layers'}", "clipping.strategy=per-layer")
Fault = Callable[[], AbstractContextManager[object]]


def four_layers() -> nn.Module:
    """A model of DIGITS with enough layers for a fault that adds up over them."""
    widths = (64, 48, 48, 48, 10)
    layers = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(widths)]
    return nn.Sequential(nn.Flatten(), *layers[:-1], layers[-1][0])


@contextmanager
def halved_noise() -> Iterator[None]:
    """Noise of half the standard deviation."""

    def weak(key: bytes, count: int, stddev: float) -> np.ndarray:
        return rounded_gaussian(key, count, stddev / 2.0)

    with patch.object(gaussian_mechanism, "rounded_gaussian", weak):
        yield


@contextmanager
def noise_used_twice() -> Iterator[None]:
    """Each group's noise of a round again in the next one."""
    kept = dict[int, np.ndarray]()

    def again(key: bytes, count: int, stddev: float) -> np.ndarray:
        if count in kept:
            return kept.pop(count)
        kept[count] = rounded_gaussian(key, count, stddev)
        return kept[count]

    with patch.object(gaussian_mechanism, "rounded_gaussian", again):
        yield


@contextmanager
def no_clipping() -> Iterator[None]:
    """Updates rounded to whole steps as they are."""

    def rounded(clipping: Clipping, rows: np.ndarray, _weights: np.ndarray) -> None:
        np.rint(np.divide(rows, clipping.steps, out=rows), out=rows)

    with patch.object(Clipping, "clip_rows", rounded):
        yield


@contextmanager
def bound_as_if_joint() -> Iterator[None]:
    """Noise for the norm of one tensor, priced as if it were that of the whole update."""

    def of_one(
        moved: tuple[float, ...], noise_multiplier: float, _shares: object
    ) -> tuple[float, ...]:
        return tuple(noise_multiplier * each for each in moved)

    def least(event: RoundEvent) -> float:
        return min(query.noise_stddev / query.clipping_norm for query in event.queries)

    with (
        patch.object(gaussian_mechanism, "noise_stddevs", of_one),
        patch.object(RoundEvent, "noise_multiplier", property(least)),
    ):
        yield


@contextmanager
def half_of_q_charged() -> Iterator[None]:
    """Users who join twice as often as is charged."""
    stated = PoissonSampling.event

    def half(sampling: PoissonSampling) -> SamplingEvent:
        event = stated(sampling)
        return replace(event, sampling_probability=event.sampling_probability / 2.0)

    with patch.object(PoissonSampling, "event", half):
        yield


FAULTS: Mapping[str, tuple[Fault, tuple[str, ...]]] = {
    "none": (nullcontext, ()),
    "noise halved": (halved_noise, ()),
    "clipping left out": (no_clipping, ()),
    "a layer's bound as if of all": (bound_as_if_joint, LAYERS),
    "noise used twice": (noise_used_twice, ()),
    "charged at half of q": (half_of_q_charged, ()),
}


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


def audited(file: Path, settings: Sequence[str], fault: Fault = nullcontext) -> AuditResult:
    """Run a plan and its audit, with a fault."""
    torch.set_num_threads(1)
    with fault(), tempfile.TemporaryDirectory() as folder:
        config = load_config(file, [*QUIET, *settings])
        setup = RunSetup.at(config, Path(folder) / "run", resume=False)
        experiment, transport = simulated(config, setup.run)
        run = run_rounds(
            setup,
            experiment,
            lambda *_: transport,
            lambda _experiment, _first, rounds: rounds(lambda _result: None),
            None,
        )
    assert run.audit is not None
    return run.audit


def of_digits(name: str) -> Audited:
    """A run on DIGITS with the fault of this name."""
    fault, settings = FAULTS[name]
    return Audited.of(name, audited(DIGITS, ["audit.canaries=1000", *settings], fault))


def of_mnist(_number: int) -> Audited:
    """A run on MNIST by writer."""
    found = audited(MNIST, ["audit.canaries=5000", "privacy.epsilon=10.0"])
    return Audited.of("none, MNIST at ε = 10", found)


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
    return Table("DIGITS, 1,000 canaries, δ = 1e-3", columns, rows)


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
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, mp_context=context) as pool:
        found = list(pool.map(of_mnist, range(given.mnist)))
        for name in given.faults:
            found += pool.map(of_digits, [name] * given.runs)
            write_results(table_of(found), [asdict(each) for each in found], given.folder, "audits")
    if given.figure is not None:
        shown = audited(MNIST, ["audit.canaries=5000", "privacy.epsilon=10.0"])
        figure(chart_of(shown)).save(given.figure, scale_factor=2)


if __name__ == "__main__":
    main()
