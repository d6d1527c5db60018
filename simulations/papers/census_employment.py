"""The census task of the DP-SGD slides: logistic regression of employment, private and not.

    FEDPRIV_DATA=FOLDER python -m simulations.papers.census_employment

Nine facts about a person predict whether the person is employed. A person is one record and one
user, so user-level privacy is example-level privacy here: DP-SGD with a step per person. Prints
accuracy, calibration and coefficients with their noise, and writes them as JSON and as a figure.

The file is divided into 20,000 people to train on and 5,766 to test on. Centres and scales of the
columns are public national shares; learning rate, clipping norm and rounds were chosen on
`synthetic_people`. One choice was not private: 60 rounds suffice there, but 90 are used because the
columns of the file depend more on each other.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

import fedpriv
from fedpriv.errors import FedprivError
from fedpriv.report.charts import Axis, Chart, Series, figure
from fedpriv.support.checks import epsilon_up
from fedpriv.training.optimizers import (
    Average,
    OptimizerState,
    Parameters,
    ServerOptimizer,
    Step,
)
from simulations.datasets.files import read_csv
from simulations.datasets.people import find_census
from simulations.papers.results import write_numbers

Floats = npt.NDArray[np.float64]

# The name of each column, and the rough share of people with value 1 among adults of the United
# States in 2000: public knowledge, not computed from the file.
SHARES = {
    "woman": 0.52,
    "married": 0.54,
    "Black": 0.12,
    "Asian": 0.04,
    "degree": 0.30,
    "military": 0.12,
    "citizen": 0.93,
    "disability": 0.19,
    "English": 0.96,
}
TERMS = ("intercept", *SHARES)
COLUMNS = (
    *("sex", "married", "black", "asian", "educ", "militaryservice", "uscitizen"),
    *("disability", "englishability", "employed"),
)
ASSOCIATE = 12  # the least `educ` of a college degree
HELD_OUT = 5_766

EPSILONS = (0.1, 0.5, 1.0, 2.0, 8.0)
DELTA = 1e-6  # a fiftieth of 1/20,000
CLIPPING_NORM = 2.5  # above nearly all gradients, because clipping would bias coefficients
SHOWN = (0.1, 1.0)  # ε in the figure
BINS = 10  # of equal width, of the calibration error

NOTES = (
    "Private rows are means over seeds ± standard deviation; the people are the same under every "
    "seed, so what varies is the noise (and in the last row, who is in a lot).",
    "ECE is the mean distance of predicted and true shares over ten bins; intercept and slope are "
    "of a logistic regression on the predicted log odds, 0 and 1 where they are calibrated.",
    "Each row is priced alone. All of them together, on the same people, cost more.",
)


@dataclass(frozen=True)
class People:
    """Persons: 0 or 1 for each of `SHARES`, x [n, 9], and whether they are employed, y [n]."""

    x: Floats
    y: Floats

    def split(self, held_out: int) -> tuple["People", "People"]:
        """Return people to train on, and `held_out` others, by a permutation of seed 0."""
        order = np.random.RandomState(0).permutation(len(self.y))
        train, test = order[:-held_out], order[-held_out:]
        return People(self.x[train], self.y[train]), People(self.x[test], self.y[test])


def load(file: Path) -> People:
    """Load all people of the census file. In `sex` 1 is a woman; `educ` is the education level."""
    columns = read_csv(file, COLUMNS)
    columns["educ"] = (columns["educ"] >= ASSOCIATE).astype(float)
    y = columns.pop("employed")
    return People(np.stack([*columns.values()], axis=1), y)


def synthetic_people(count: int, seed: int) -> tuple[People, Floats]:
    """Return invented people with the public shares, and the coefficients of their employment.

    Columns are independent, except English, which nearly every citizen speaks.
    """
    draw = np.random.default_rng(seed)
    x = (draw.random((count, len(SHARES))) < [*SHARES.values()]).astype(float)
    names = [*SHARES]
    speaks = np.where(x[:, names.index("citizen")] == 1.0, 0.985, 0.63)
    x[:, names.index("English")] = draw.random(count) < speaks
    effects = np.array([0.3, -0.5, 0.2, -0.2, -0.2, 0.7, -0.2, 0.3, -1.0, 0.5])
    return People(x, (draw.random(count) < predicted(effects, x)).astype(float)), effects


def predicted(coefficients: Floats, x: Floats) -> Floats:
    """Return the probability of employment [n], by an intercept and nine log odds ratios [10]."""
    shares: Floats = 1.0 / (1.0 + np.exp(-(coefficients[0] + x @ coefficients[1:])))
    return shares


def maximum_likelihood(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Return coefficients of the exact fit, intercept first, and their sampling standard errors.

    It uses Newton's method; the errors come from the inverse Fisher information.
    """
    design = np.column_stack([np.ones(len(x)), x])
    coefficients = np.zeros(design.shape[1])
    for _ in range(25):
        p = predicted(coefficients, x)
        information = (design * (p * (1.0 - p))[:, None]).T @ design
        coefficients = coefficients + np.linalg.solve(information, design.T @ (y - p))
    return coefficients, np.sqrt(np.diag(np.linalg.inv(information)))


@dataclass(frozen=True)
class Training:
    """The public settings of training."""

    sampling_probability: float
    rounds: int
    learning_rate: float

    @property
    def burn_in(self) -> int:
        """Rounds whose model is left out of the average."""
        return self.rounds // 3


EVERYBODY = Training(1.0, 90, 4.0)
LOTS = Training(0.1, 300, 4.0)
SETTINGS = (*((epsilon, EVERYBODY) for epsilon in EPSILONS), (1.0, LOTS))

_CENTRES = np.array([*SHARES.values()])
# Half way between 0/1 columns, in which few people determine rare columns, and columns of equal
# variance, in which the gradients of these few would be clipped.
_SCALES = (_CENTRES * (1.0 - _CENTRES)) ** -0.25


def scaled(x: Floats) -> npt.NDArray[np.float32]:
    """Return the columns in the form of the private model's inputs."""
    columns: Floats = (x - _CENTRES) * _SCALES
    return columns.astype(np.float32)


@dataclass(frozen=True)
class TailAverage(ServerOptimizer):
    """Gradient descent that adds up its iterates after a burn-in: post-processing of releases.

    The mean of many noisy models is far less noisy than the last of them, and costs nothing. The
    state holds the sum of the iterates, `first`, and the number of rounds so far, `second`.
    """

    learning_rate: float
    burn_in: int

    def init(self, parameters: Parameters) -> OptimizerState:
        """Return empty sums."""
        nothing = {name: np.zeros(p.shape) for name, p in parameters.items()}
        return OptimizerState(nothing, nothing)

    def update(self, average: Average, state: OptimizerState, parameters: Parameters) -> Step:
        """Take one step along the average."""
        rate = self.learning_rate
        moved = {n: (p + rate * average[n]).astype(np.float32) for n, p in parameters.items()}
        rounds = {name: count + 1.0 for name, count in state.second.items()}
        total = {n: s + moved[n] * (rounds[n] > self.burn_in) for n, s in state.first.items()}
        return moved, OptimizerState(total, rounds)


def log_loss(outputs: Tensor, employed: Tensor) -> Tensor:
    """Return the negative log likelihood of each person [B], of scores [B, 1]."""
    return functional.binary_cross_entropy_with_logits(outputs[:, 0], employed, reduction="none")


@dataclass(frozen=True)
class Released:
    """The release of one private run, and its price."""

    coefficients: Floats  # [10] of the 0/1 columns, intercept first
    epsilon: float  # of its ledger
    noise_multiplier: float


def train(
    people: People, held_out: People, mechanism: fedpriv.Mechanism, training: Training, seed: int
) -> Released:
    """Train by DP-SGD, one gradient step for each person and round."""
    columns = scaled(people.x), people.y.astype(np.float32), np.arange(len(people.y))
    test_rows = scaled(held_out.x), held_out.y.astype(np.float32)
    population = fedpriv.Population.from_arrays(*columns, held_out=test_rows, name="census")
    model = nn.Linear(len(SHARES), 1)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    with tempfile.TemporaryDirectory() as folder:
        run = fedpriv.simulate(
            population,
            fedpriv.Task(model, loss=log_loss),
            mechanism,
            local=fedpriv.SGD(1.0, steps=1),
            server=TailAverage(training.learning_rate, training.burn_in),
            rounds=training.rounds,
            out=Path(folder) / "run",
            seed=seed,
            evaluate_every=training.rounds,
            checkpoint_every=training.rounds,
            quiet=True,
        )
        total, epsilon = run.state.optimizer.first, run.epsilon
    averaged = training.rounds - training.burn_in
    slopes = total["weight"][0] / averaged * _SCALES
    intercept = total["bias"] / averaged - slopes @ _CENTRES
    z = mechanism.noise_multiplier or 0.0
    return Released(np.concatenate([intercept, slopes]), epsilon, z)


def mechanism(training: Training, epsilon: float) -> fedpriv.Mechanism:
    """Return a mechanism with which all rounds cost at most ε."""
    clipping = fedpriv.Flat(CLIPPING_NORM)
    poisson = fedpriv.Mechanism.poisson(
        q=training.sampling_probability, clipping=clipping, contributors_share=0.0
    )
    return poisson.calibrate(epsilon=epsilon, delta=DELTA, rounds=training.rounds)


@dataclass(frozen=True)
class Quality:
    """The quality of probabilities on people who were not in training."""

    accuracy: float
    log_loss: float
    calibration_error: float  # mean distance of predicted and true shares, over bins
    # Logistic regression of y on the predicted log odds; 0 and 1 if predictions are calibrated. A
    # slope below 1 means that predictions are too extreme.
    calibration_intercept: float
    calibration_slope: float

    @classmethod
    def of(cls, p: Floats, y: Floats) -> "Quality":
        """Return the quality of probabilities p [n] of y = 1."""
        surprise = -np.log(np.where(y == 1.0, p, 1.0 - p)).mean()
        bins = reliability(p, y)
        error = sum(
            n * abs(predicted_share - true_share) for n, predicted_share, true_share in bins
        ) / len(y)
        (intercept, slope), _ = maximum_likelihood(np.log(p / (1.0 - p))[:, None], y)
        right = ((p > 0.5) == y).mean()
        return cls(*(float(figure) for figure in (right, surprise, error, intercept, slope)))


def reliability(p: Floats, y: Floats) -> list[tuple[int, float, float]]:
    """Return number of people, mean p and mean y of each bin of equal width with people in it."""
    places = np.minimum((p * BINS).astype(int), BINS - 1)
    members = [places == place for place in range(BINS)]
    return [(int(b.sum()), float(p[b].mean()), float(y[b].mean())) for b in members if b.any()]


@dataclass(frozen=True)
class Row:
    """Private fits at one ε, an entry for each seed."""

    epsilon: float  # the target
    training: Training
    released: list[Released]
    quality: list[Quality]

    @property
    def coefficients(self) -> Floats:
        """Coefficients [seeds, 10]."""
        return np.array([release.coefficients for release in self.released])

    @property
    def noise(self) -> Floats:
        """Standard deviation of each coefficient over seeds: [10]."""
        stddev: Floats = self.coefficients.std(axis=0, ddof=1)
        return stddev

    @property
    def name(self) -> str:
        """A name for readers."""
        lots = self.training.sampling_probability < 1.0
        return f"ε = {self.epsilon:g}{', lots' if lots else ''}"


@dataclass(frozen=True)
class Study:
    """The exact fit and all private ones."""

    test: People
    exact: Floats  # [10] coefficients by maximum likelihood
    stderr: Floats  # [10] their sampling standard errors
    rows: list[Row]

    @classmethod
    def of(
        cls, train_on: People, test: People, settings: Sequence[tuple[float, Training]], seeds: int
    ) -> "Study":
        """Fit exactly, and privately at each (ε, training) with several seeds."""
        exact, stderr = maximum_likelihood(train_on.x, train_on.y)
        rows = []
        for epsilon, training in settings:
            chosen = mechanism(training, epsilon)
            runs = [train(train_on, test, chosen, training, seed) for seed in range(seeds)]
            quality = [Quality.of(predicted(run.coefficients, test.x), test.y) for run in runs]
            rows.append(Row(epsilon, training, runs, quality))
        return cls(test, exact, stderr, rows)

    @property
    def exact_quality(self) -> Quality:
        """The quality of the exact fit."""
        return Quality.of(predicted(self.exact, self.test.x), self.test.y)

    @property
    def drawn(self) -> list[Row]:
        """The rows in the figure."""
        return [r for r in self.rows if r.epsilon in SHOWN and r.training == EVERYBODY]

    def noise_ratio(self, row: Row) -> float:
        """Return privacy noise over sampling error, root mean square without the intercept."""
        ratios = row.noise[1:] / self.stderr[1:]
        return float(np.sqrt(np.square(ratios).mean()))


def quality_table(study: Study) -> Table:
    """Return a table with the quality and the cost of each fit."""
    table = Table(title=f"Employed or not: {len(study.test.y):,} people held out, δ = {DELTA:g}")
    for column in ("", "exact ε", "z", "accuracy", "log loss", "ECE", "intercept", "slope"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    share = float(study.test.y.mean())
    entropy = -share * np.log(share) - (1.0 - share) * np.log(1.0 - share)
    table.add_row("everybody is employed", "", "", f"{share:.2%}", f"{entropy:.4f}")
    exact = asdict(study.exact_quality)
    table.add_row("maximum likelihood", "∞", "0", *(shown(k, v) for k, v in exact.items()))
    for row in study.rows:
        spent = epsilon_up(max(run.epsilon for run in row.released))
        figures = [asdict(quality) for quality in row.quality]
        columns = {key: np.array([quality[key] for quality in figures]) for key in exact}
        cells = (f"{shown(k, c.mean())} ± {shown(k, c.std(ddof=1))}" for k, c in columns.items())
        table.add_row(row.name, spent, f"{row.released[0].noise_multiplier:.2f}", *cells)
    return table


def shown(quantity: str, value: float) -> str:
    """Return a field of `Quality` with a suitable number of digits."""
    match quantity:
        case "accuracy":
            return f"{value:.2%}"
        case "calibration_intercept" | "calibration_slope":
            return f"{value:.2f}"
        case _:
            return f"{value:.4f}"


def coefficient_table(study: Study) -> Table:
    """Return a table of log odds ratios with their sampling error, and private ones with noise."""
    table = Table(title="Coefficients: exact ± sampling error; mean of the seeds ± privacy noise")
    table.add_column("")
    for column in ("exact", *(row.name for row in study.rows)):
        table.add_column(column, justify="right", no_wrap=True)
    fits = [(study.exact, study.stderr)]
    fits += [(row.coefficients.mean(axis=0), row.noise) for row in study.rows]
    for place, term in enumerate(TERMS):
        table.add_row(term, *(f"{mean[place]:+.2f} ± {sd[place]:.2f}" for mean, sd in fits))
    ratios = (f"{study.noise_ratio(row):.2f}" for row in study.rows)
    table.add_row("noise over sampling error", "", *ratios)
    return table


def coefficient_chart(study: Study) -> Chart:
    """Return a chart of all coefficients except the intercept, with 95% intervals."""
    places = np.arange(1, len(TERMS))
    fits = [("maximum likelihood ± 1.96 sampling errors", study.exact, study.stderr)]
    for row in study.drawn:
        name = f"{row.name}: mean of the seeds ± 1.96 standard deviations of the noise"
        fits.append((name, row.coefficients.mean(axis=0), row.noise))
    series = []
    for number, (name, mean, sd) in enumerate(fits):
        aside = 0.2 * (number - (len(fits) - 1) / 2)
        y, half_width = mean[1:], 1.96 * sd[1:]
        ends = (y - half_width).tolist(), (y + half_width).tolist()
        x = (places + aside).tolist()
        series.append(Series(name, x, y.tolist(), *ends, joined=False, bars=True, colour=number))
    ticks = tuple((float(place), TERMS[place]) for place in places)
    return Chart(
        "coefficients",
        "Who is employed: exact and private coefficients, with 95% intervals",
        f"How much each fact adds to the log odds; δ = {DELTA:g}.",
        Axis("what is true of a person", ends=(0.5, len(TERMS) - 0.5), ticks=ticks),
        Axis("coefficient", "log odds"),
        series,
    )


def reliability_chart(study: Study) -> Chart:
    """Return a chart of true against predicted shares of employed people."""
    y, unit_range = study.test.y, (0.0, 1.0)
    fits = [("maximum likelihood", study.exact[None])]
    fits += [(f"{row.name}, all seeds", row.coefficients) for row in study.drawn]
    series = [
        Series("perfect calibration", unit_range, unit_range, dashed=True, marked=False, colour=7)
    ]
    for number, (name, coefficients) in enumerate(fits):
        p = np.concatenate([predicted(vector, study.test.x) for vector in coefficients])
        bins = reliability(p, np.tile(y, len(coefficients)))
        _, predicted_shares, true_shares = zip(
            *(b for b in bins if b[0] >= 0.01 * len(p)), strict=True
        )
        series.append(Series(name, predicted_shares, true_shares, colour=number))
    return Chart(
        "reliability",
        "Calibration on people who were held out",
        f"Bins of width {1 / BINS:g} that at least 1% of people are in. Below the diagonal, "
        "too many people are said to be employed.",
        Axis("predicted share of employed people", ends=unit_range),
        Axis("true share", ends=unit_range),
        series,
    )


def record(study: Study) -> dict[str, object]:
    """Return all numbers of the study, for a file."""
    exact = {"coefficients": study.exact.tolist(), "standard_errors": study.stderr.tolist()}
    private = [
        {
            "epsilon": row.epsilon,
            "delta": DELTA,
            **asdict(row.training),
            "noise_multiplier": row.released[0].noise_multiplier,
            "epsilon_of_ledger": [run.epsilon for run in row.released],
            "coefficients": row.coefficients.tolist(),
            "noise": row.noise.tolist(),
            "quality": [asdict(quality) for quality in row.quality],
        }
        for row in study.rows
    ]
    return {
        "terms": TERMS,
        "clipping_norm": CLIPPING_NORM,
        "exact": exact | {"quality": asdict(study.exact_quality)},
        "private": private,
    }


def main() -> None:
    """Print the tables and write the numbers and the figure."""
    parser = argparse.ArgumentParser(description="who is employed: private logistic regression")
    parser.add_argument("--data", help="folder of the census file; by default, FEDPRIV_DATA")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--folder", type=Path, default=Path("simulations/results"))
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error(
            f"--seeds is {arguments.seeds}; it must be at least 2 for a standard deviation"
        )
    try:
        people = load(find_census(arguments.data))
    except FedprivError as error:
        parser.error(str(error))
    study = Study.of(*people.split(HELD_OUT), SETTINGS, arguments.seeds)
    console = Console()
    console.print(quality_table(study))
    console.print(coefficient_table(study))
    for note in NOTES:
        console.print(f"* {note}", highlight=False)
    write_numbers(record(study), arguments.folder, "census_employment")
    picture = figure(coefficient_chart(study), reliability_chart(study))
    picture.save(arguments.folder / "census_employment.png", scale_factor=2)


if __name__ == "__main__":
    main()
