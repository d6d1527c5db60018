"""Abadi et al. 2016, MNIST: 1,000 hidden units, on 60 private components or on all pixels.

    python -m simulations.papers.abadi_mnist [--epochs FACTOR] [--both FACTOR] [--rows N …]

Network, lots of 600, δ, ε and noise on the components are those of the paper (section 5.2,
arXiv:1607.00133). Its noise on gradients, σ = 8, 4 and 2, was chosen with an older analysis, and
allows hundreds of epochs until ε is spent. Here the epochs are given, and the noise is the least
that keeps components and rounds together within ε, exactly; steps have momentum and fall to zero.
The second arm has no query, so its rounds may spend all of ε. It has eleven times as many
parameters, so both arms can be compared at fewer epochs. The record is an image. Data: MNIST's
files, in the folder FEDPRIV_DATA.
"""

import argparse
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

import fedpriv
from fedpriv.accounting import ACCOUNTANTS
from fedpriv.analytics import PrincipalComponents, SecondMoments, Survey, ask
from fedpriv.data.columns import Fields
from fedpriv.experiment.build import records_of
from fedpriv.experiment.config import load_config
from fedpriv.experiment.models import mlp
from fedpriv.ledger import PrivacyBudget
from fedpriv.ledger.events import RoundEvent, Unit
from fedpriv.ledger.participation import record_path
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.report.tables import Column, Table
from fedpriv.run.folder import RunFolder
from fedpriv.support.checks import epsilon_up
from simulations.papers.bu_mnist import mnist
from simulations.papers.results import mean_of, read_results, write_results

DELTA, HIDDEN = 1e-5, 1000


@dataclass(frozen=True)
class Setting:
    """The settings at one ε."""

    epsilon: float
    epochs: float
    components: int
    component_noise: float  # z of their query, in which every image is asked
    learning_rate: float  # of the average, in the first round
    paper: float  # accuracy in the paper, on components
    q: float = 0.01
    clipping_norm: float = 1.0
    momentum: float = 0.9

    @property
    def rounds(self) -> int:
        """Whole rounds that fit in the epochs."""
        return max(1, int(self.epochs / self.q))


SETTINGS = (
    Setting(0.5, 10, 60, 16.0, 0.2, 0.90),
    Setting(2.0, 15, 60, 7.0, 0.3, 0.95),
    Setting(8.0, 20, 60, 4.0, 0.3, 0.97),
)


@dataclass(frozen=True)
class Found:
    """Results of an arm under some seeds."""

    setting: Setting
    components: int | None  # None is all pixels
    noise_multiplier: float  # of rounds
    epsilon: float  # of a run's ledger, including the query
    here: tuple[float, ...]  # accuracies

    @classmethod
    def read(cls, row: dict[str, Any]) -> Self:
        """Return the results with this `asdict`, read from JSON."""
        setting, accuracies = Setting(**row["setting"]), tuple(row["here"])
        return cls(**row | {"setting": setting, "here": accuracies})

    @property
    def key(self) -> tuple[Setting, int | None]:
        """The identity of a row."""
        return self.setting, self.components


def projected(
    setting: Setting,
    people: fedpriv.Population,
    mechanism: fedpriv.Mechanism,
    seed: int,
    ledger: Path,
) -> tuple[fedpriv.Population, list[RoundEvent]]:
    """Return the people projected on the components of their images, and the charged events."""
    images = records_of(people, mechanism)
    inputs = math.prod(people.test["x"].shape[1:])
    everybody = PoissonSampling(images.users.population, 1.0, Unit.EXAMPLE)
    question = SecondMoments("components", "x", inputs)
    survey = Survey("components", (question,), everybody, setting.component_noise)
    budget = PrivacyBudget(setting.epsilon, DELTA, ACCOUNTANTS["tight"].upper_epsilon)
    with PrivacyRecords.open(ledger, record_path(ledger), images.name, budget) as records:
        (answer,) = ask(survey, images.users, records, SeededEntropy(seed)).answers
    directions = PrincipalComponents.of(answer, setting.components).directions

    def along(rows: Fields) -> Fields:
        x = rows["x"].reshape(-1, inputs).astype(np.float64) @ directions
        return {**rows, "x": x.astype(np.float32)}

    users = replace(people.users, fields=along(people.users.fields))
    return replace(people, users=users, test=along(people.test)), [survey.event]


def trained(
    setting: Setting,
    people: fedpriv.Population,
    seed: int,
    folder: Path,
    *,
    private_components: bool,
    hidden: int = HIDDEN,
) -> fedpriv.Run:
    """Train one arm once."""
    clipping = fedpriv.Flat(setting.clipping_norm)
    mechanism = fedpriv.Mechanism.poisson(
        q=setting.q, clipping=clipping, unit="example", contributors_share=0.0
    )
    ledger, spent = folder.with_name(f"{folder.name}.sqlite"), list[RoundEvent]()
    if private_components:
        people, spent = projected(setting, people, mechanism, seed, ledger)
    inputs = math.prod(people.test["x"].shape[1:])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        task = fedpriv.Task(mlp(inputs, hidden), loss="cross-entropy")
    rate = fedpriv.PolynomialDecay(setting.learning_rate, 0.0, setting.rounds)
    return fedpriv.simulate(
        people,
        task,
        mechanism.calibrate(
            epsilon=setting.epsilon, delta=DELTA, rounds=setting.rounds, spent=spent
        ),
        server=fedpriv.FedAvgM(rate, setting.momentum),
        ledger=ledger,
        out=folder,
        name="abadi-mnist",
        seed=seed,
        evaluate_every=setting.rounds,
        checkpoint_every=setting.rounds,
        quiet=True,
    )


def measure(
    setting: Setting,
    people: fedpriv.Population,
    seeds: int,
    *,
    private_components: bool,
    hidden: int = HIDDEN,
) -> Found:
    """Train one arm under some seeds."""
    accuracies, noise, cost = [], 0.0, 0.0
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            run = trained(
                setting,
                people,
                seed,
                Path(folder) / "run",
                private_components=private_components,
                hidden=hidden,
            )
            accuracies.append(run.accuracy or 0.0)
            noise = load_config(RunFolder(run.folder).plan).privacy.noise_multiplier or 0.0
            cost = run.epsilon
    components = setting.components if private_components else None
    return Found(setting, components, noise, cost, tuple(accuracies))


def results_table(results: Sequence[Found]) -> Table:
    """Return a table with the paper's accuracy, ours, and the exact cost."""
    rows = []
    for result in results:
        setting = result.setting
        private = result.components is not None
        query = f"{setting.component_noise:g}" if private else ""
        inputs = f"{result.components} components" if private else "all pixels"
        paper = f"{setting.paper:.0%}" if private else ""
        noise = f"{result.noise_multiplier:.3f}"
        sizes = f"{setting.epsilon:g}", f"{setting.epochs:g}", query, noise
        rows.append((inputs, *sizes, paper, mean_of(result.here), epsilon_up(result.epsilon)))
    names = "ε", "epochs", "σ of the query", "σ", "paper", "here", "exact ε"
    columns = [Column("inputs", "text"), *map(Column, names)]
    return Table(f"MNIST by the network of Abadi et al. 2016, δ = {DELTA:g}", columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train all; print and write the table and the numbers."""
    parser = argparse.ArgumentParser(description="MNIST as in Abadi et al. 2016")
    parser.add_argument("--epochs", type=float, default=1.0, help="factor, on components")
    parser.add_argument("--both", type=float, default=1.0, help="factor, when both compete")
    help_rows = "train these of the table; others keep their results"
    parser.add_argument("--rows", type=int, nargs="+", help=help_rows)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("simulations/results"))
    options = parser.parse_args(arguments)
    arms = dict.fromkeys([(options.epochs, True), (options.both, True), (options.both, False)])
    rows = list(product(arms, SETTINGS))
    results = dict[tuple[Setting, int | None], Found]()
    if options.rows:
        if not set(options.rows) <= set(range(1, len(rows) + 1)):
            parser.error(f"--rows is {options.rows}; each must be from 1 to {len(rows)}")
        rows = [rows[number - 1] for number in options.rows]
        earlier_results = [
            Found.read(result) for result in read_results(options.folder, "abadi_mnist")
        ]
        results = {result.key: result for result in earlier_results}
    people = mnist()
    for (factor, components), setting in rows:
        scaled = replace(setting, epochs=setting.epochs * factor)
        measured = measure(scaled, people, options.seeds, private_components=components)
        results[measured.key] = measured
        every = list(results.values())
        content = [asdict(result) for result in every]
        write_results(results_table(every), content, options.folder, "abadi_mnist")


if __name__ == "__main__":
    main()
