"""A census with user-level privacy: `python -m simulations.census`.

Each person of a public sample of the US census is a user: a histogram of education, the mean age,
and quantiles of age and income, all at one (ε, δ). The data are the file FultonPUMS5full.csv of the
Public Use Microdata Sample, in the folder FEDPRIV_DATA or in its subfolder `census_pums`.

The true values are printed next to the released ones because this is a study. A survey does not
release them, and they are not private.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from fedpriv.accounting import ACCOUNTANTS, calibrate_noise_multiplier
from fedpriv.analytics import Answers, Histogram, Mean, Quantiles, Survey, ask
from fedpriv.data import UserStore
from fedpriv.errors import FedprivError
from fedpriv.ledger import PrivacyBudget
from fedpriv.privacy.noise import OperatingSystemEntropy
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.support.checks import epsilon_up
from simulations.datasets.files import read_csv
from simulations.datasets.people import CENSUS_FILE, find_census

COLUMNS = ("age", "educ", "income")
EDUCATION = (
    *("none", "to 4th grade", "5th to 6th grade", "7th to 8th grade", "9th grade", "10th grade"),
    *(
        "11th grade",
        "12th grade, no diploma",
        "high school",
        "college < 1 year",
        "college, no degree",
    ),
    *("associate", "bachelor's", "master's", "professional", "doctorate"),
)
PROBABILITIES = (0.1, 0.25, 0.5, 0.75, 0.9)
INCOMES = tuple(range(0, 200_001, 2_000))


def load(file: Path) -> UserStore:
    """Return one user per person, with the columns age, educ and income."""
    fields = read_csv(file, COLUMNS)
    return UserStore(fields, np.arange(len(fields["age"]) + 1))


def census(people: int, noise_multiplier: float, sampling_probability: float) -> Survey:
    """Return the questions; their ranges were chosen without looking at the answers."""
    return Survey(
        run="census",
        questions=(
            Mean("mean age", "age", low=15, high=100),
            Quantiles("age", "age", range(15, 101), PROBABILITIES),
            Quantiles("income", "income", INCOMES, PROBABILITIES),
            Histogram("education", "educ", range(1, 17)),
        ),
        sampling=PoissonSampling(people, sampling_probability),
        noise_multiplier=noise_multiplier,
    )


def truth(users: UserStore) -> dict[str, np.ndarray]:
    """Return the true answers, without privacy, for this study only."""
    age, educ, income = (users.fields[column].astype(float) for column in COLUMNS)
    return {
        "mean age": age.mean(),
        "age": np.quantile(age, PROBABILITIES, method="inverted_cdf"),
        "income": np.quantile(income, PROBABILITIES, method="inverted_cdf"),
        "education": np.bincount(educ.astype(int), minlength=17)[1:],
    }


def table(answers: Answers, users: UserStore) -> Table:
    """Return a table with the truth, the release and the noise of each answer."""
    labels = {
        "mean age": ("years",),
        "age": tuple(f"{p:.0%} are at most" for p in PROBABILITIES),
        "income": tuple(f"{p:.0%} have at most $" for p in PROBABILITIES),
        "education": EDUCATION,
    }
    grid = Table("", "", "truth (in this study only)", "released", "noise ±", "95% interval")
    for column in grid.columns[2:]:
        column.justify = "right"
    for name, truth_value in truth(users).items():
        answer = answers[name]
        digits = 2 if name == "mean age" else 0
        parts = (truth_value, answer.value, answer.noise_stddev, answer.low, answer.high)
        rows = np.stack([np.atleast_1d(part) for part in parts], axis=1)
        for label, row in zip(labels[name], rows, strict=True):
            exact, value, noise, low, high = (f"{number:,.{digits}f}" for number in row)
            grid.add_row(name, label, exact, value, noise, f"{low} to {high}")
        grid.add_section()
    return grid


def run(arguments: argparse.Namespace, folder: Path) -> None:
    """Ask once, and print the answers and their cost."""
    users = load(find_census(arguments.data))
    q, delta = arguments.sampling_probability, arguments.delta
    z = calibrate_noise_multiplier(arguments.epsilon, delta, 1, q)
    budget = PrivacyBudget(arguments.epsilon, delta, ACCOUNTANTS["tight"].upper_epsilon)
    name = f"census, Fulton County: {users.population} people"
    paths = folder / "ledger.sqlite", folder / "ledger.participation.sqlite"
    with PrivacyRecords.open(*paths, name, budget) as records:
        survey = census(users.population, z, q)
        answers = ask(survey, users, records, OperatingSystemEntropy())
        spent = budget.epsilon_of(records.ledger.spent())
    console = Console()
    console.print(table(answers, users))
    console.print(
        f"{users.population:,} people, each asked with probability {q:g}; z = {z:.4f}. The ledger "
        f"says ε = {epsilon_up(spent)} at δ = {delta:g}, for all that is released together "
        f"(charge {answers.charge_hash[:12]}).\nQuantiles are thresholds: every year of age, every "
        "$2,000 of income.\nThe column 'truth' is not private: it exists only because this is a "
        "study of public data."
    )


def main() -> None:
    """Run with the arguments of the command line; exit with one sentence if that fails."""
    parser = argparse.ArgumentParser(description="a census asked with user-level privacy")
    parser.add_argument("--data", help=f"folder of {CENSUS_FILE}; by default, FEDPRIV_DATA")
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--sampling-probability", type=float, default=1.0)
    parser.add_argument("--out", type=Path, help="keep ledger and record in this folder")
    arguments = parser.parse_args()
    try:
        if arguments.out is None:
            with tempfile.TemporaryDirectory() as folder:
                run(arguments, Path(folder))
        else:
            arguments.out.mkdir(parents=True, exist_ok=True)
            run(arguments, arguments.out)
    except FedprivError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
