"""Bu et al. 2020, Table 2, on similar data: prediction of an income over $50,000.

    FEDPRIV_DATA=FOLDER python -m simulations.papers.census_income

The paper trains on Adult, an extract of the census of 1994. This is its set-up (network, noise,
learning rate, clipping, epochs, expected size of a lot) on people of Fulton County in the census
of 2000. **The data are different**, so the paper's accuracy cannot be compared with ours, but the
gap between private and non-private networks can.
"""

import argparse
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import fedpriv
from fedpriv.errors import FedprivError
from fedpriv.support.checks import epsilon_up
from simulations.datasets.files import read_csv
from simulations.datasets.people import INCOME, YES_OR_NO, census_facts, find_census
from simulations.papers.results import write_numbers

COLUMNS = ("income", "age", "educ", *YES_OR_NO)
# Section 4.1 of the paper; its probability is 256/29,305.
LOT, NOISE_MULTIPLIER, CLIPPING_NORM, LEARNING_RATE, DELTA = 256, 0.55, 1.0, 0.15, 1e-5
EPOCHS, EPOCHS_WITHOUT_PRIVACY = 18, 20
PAPER = {"private network": "84.0%", "network without privacy": "84.5%"}

NOTES = (
    "Columns are those of Adult in kind: 14 facts about a person, coded as 0 and 1.",
    "The ε that the paper prints for its own run by the central limit theorem is 10.20, which is "
    "no bound (python -m simulations.papers.bu).",
    "Here fewer people take part, so lots of the same size are a larger share of them, and the "
    "same noise costs more.",
)


@dataclass(frozen=True)
class People:
    """One-hot facts x [n, 47] and whether the income is above the limit, y [n]."""

    x: npt.NDArray[np.float32]
    y: npt.NDArray[np.int64]

    @classmethod
    def of(cls, columns: Mapping[str, npt.NDArray[np.float64]]) -> "People":
        """Return the people in the census's columns by name."""
        return cls(census_facts(columns), (columns["income"] > INCOME).astype(np.int64))

    def split(self, seed: int) -> tuple["People", "People"]:
        """Return nine tenths to train on and a random tenth to test on, as in the paper."""
        order = np.random.default_rng(seed).permutation(len(self.y))
        test, train = np.split(order, [len(order) // 10])
        return People(self.x[train], self.y[train]), People(self.x[test], self.y[test])


def network(inputs: int, seed: int) -> nn.Module:
    """Return a network with one hidden layer of 16 ReLUs."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, 2))


def mechanism_of_paper(q: float) -> fedpriv.Mechanism:
    """Return clipping and noise of the paper, with a budget that they do not reach."""
    clipping = fedpriv.Flat(CLIPPING_NORM)
    mechanism = fedpriv.Mechanism.poisson(q=q, clipping=clipping, contributors_share=0.0)
    return mechanism.with_noise(NOISE_MULTIPLIER, epsilon=50.0, delta=DELTA)


def without_privacy(q: float) -> fedpriv.Mechanism:
    """Return no noise, and a norm that clips nobody; it also sets the rounding of gradients."""
    sampling, clipping = fedpriv.Poisson(q), fedpriv.Flat(64.0)
    return fedpriv.Mechanism(
        sampling, clipping, noise_multiplier=0.0, delta=DELTA, unsafe_no_privacy=True
    )


@dataclass(frozen=True)
class Outcome:
    """Accuracy of one run on held-out people, and its cost by the ledger."""

    accuracy: float
    epsilon: float | None  # None: there was no noise


def train(people: People, seed: int, epochs: int, *, private: bool) -> Outcome:
    """Run NoisySGD of the paper, or the same without clipping and noise."""
    train_on, test = people.split(seed)
    users = len(train_on.y)
    q = LOT / users
    rounds = round(epochs / q)
    mechanism = mechanism_of_paper(q) if private else without_privacy(q)
    population = fedpriv.Population.from_arrays(
        train_on.x, train_on.y, np.arange(users), held_out=(test.x, test.y), name="census"
    )
    with tempfile.TemporaryDirectory() as folder:
        run = fedpriv.simulate(
            population,
            fedpriv.Task(network(people.x.shape[1], seed)),
            mechanism,
            # The step size is the server's, so the gradient itself is clipped and noised.
            local=fedpriv.SGD(1.0, steps=1),
            server=fedpriv.FedAvg(LEARNING_RATE),
            rounds=rounds,
            out=Path(folder) / "run",
            seed=seed,
            evaluate_every=rounds,
            checkpoint_every=rounds,
            quiet=True,
        )
        return Outcome(run.accuracy or 0.0, run.epsilon if private else None)


def study(people: People, seeds: int) -> dict[str, list[Outcome]]:
    """Return the outcomes of each network by seed."""
    arms = {"private network": (EPOCHS, True)}
    arms |= {"network without privacy": (EPOCHS_WITHOUT_PRIVACY, False)}
    return {
        name: [train(people, seed, epochs, private=private) for seed in range(seeds)]
        for name, (epochs, private) in arms.items()
    }


def income_table(outcomes_by_arm: Mapping[str, list[Outcome]], share: float) -> Table:
    """Return a table of accuracies next to those of the paper, on other data."""
    table = Table(title=f"Over $50,000 a year: σ = {NOISE_MULTIPLIER}, R = 1, δ = {DELTA:g}")
    for column in ("", "Adult, in the paper", "this census", "exact ε here"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("nobody does", "", f"{1.0 - share:.1%}", "")
    for name, outcomes in outcomes_by_arm.items():
        accuracy = np.array([outcome.accuracy for outcome in outcomes])
        deviation = f" ± {accuracy.std(ddof=1):.1%}" if len(outcomes) > 1 else ""
        prices = [outcome.epsilon for outcome in outcomes if outcome.epsilon is not None]
        epsilon = epsilon_up(max(prices)) if prices else "∞"
        table.add_row(name, PAPER[name], f"{accuracy.mean():.1%}{deviation}", epsilon)
    return table


def main() -> None:
    """Print the table and write its numbers."""
    parser = argparse.ArgumentParser(description="Bu et al. 2020, Table 2, on another census")
    parser.add_argument("--data", help="folder of the census file; by default, FEDPRIV_DATA")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("simulations/results"))
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error(f"--seeds is {arguments.seeds}; it must be at least 1")
    try:
        people = People.of(read_csv(find_census(arguments.data), COLUMNS))
    except FedprivError as error:
        parser.error(str(error))
    outcomes_by_arm = study(people, arguments.seeds)
    console = Console()
    console.print(income_table(outcomes_by_arm, float(people.y.mean())))
    for note in NOTES:
        console.print(f"* {note}", highlight=False)
    numbers = {
        name: [asdict(outcome) for outcome in outcomes]
        for name, outcomes in outcomes_by_arm.items()
    }
    content = {"share": float(people.y.mean()), "networks": numbers}
    write_numbers(content, arguments.folder, "census_income")


if __name__ == "__main__":
    main()
