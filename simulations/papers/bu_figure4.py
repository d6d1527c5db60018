"""Bu et al. 2020, Figure 4: accuracy with less noise at the same budget, by a tighter analysis.

    python -m simulations.papers.bu_figure4 [--examples 60000] [--epochs 20] [--seeds 1]

NoisySGD (their Algorithm 1) on MNIST, where every example is a user. Three arms share everything
except the noise: σ = 1.3; as in the paper, the σ̃ whose ε by the central limit theorem (CLT) equals
that of σ by the moments accountant (MA); and the σ̃ whose exact cost is this ε. Prints a table, and
writes it, a figure and a JSON file. Data: MNIST's files, in the folder FEDPRIV_DATA.

Sums are divided by the expected size of a lot, not by the realised one, which no accountant covers.
"""

import argparse
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import nn

import fedpriv
from fedpriv.accounting.accountants import poisson_pairs, tightest_epsilon
from fedpriv.accounting.calibration import plan_within
from fedpriv.accounting.rdp import DEFAULT_ORDERS, composed_rdp
from fedpriv.experiment.models import cnn
from fedpriv.report.charts import Axis, Chart, Series, save
from fedpriv.report.tables import Column, Table
from simulations.datasets.mnist import load_mnist_writers
from simulations.papers.claims import epsilon_from_rdp_2016
from simulations.papers.results import mean_of, write_results

EXAMPLES, EPOCHS = 60_000, 20.0


@dataclass(frozen=True)
class Setting:
    """The settings that all arms share; the defaults are the paper's."""

    examples: int = EXAMPLES
    epochs: float = EPOCHS
    lot: int = 256  # expected examples of a round
    sigma: float = 1.3
    delta: float = 1e-5
    learning_rate: float = 0.25
    clipping_norm: float = 1.5

    @property
    def q(self) -> float:
        """Probability of each example to be in a lot."""
        return self.lot / self.examples

    @property
    def rounds(self) -> int:
        """Whole rounds that fit in the epochs."""
        return int(self.epochs / self.q)

    def moments(self, rounds: int) -> float:
        """Return ε of rounds at σ by the paper's method."""
        rdp = composed_rdp({(self.q, self.sigma): rounds}, DEFAULT_ORDERS)
        return epsilon_from_rdp_2016(DEFAULT_ORDERS, rdp, self.delta)

    @cached_property
    def arms(self) -> "tuple[Arm, ...]":
        """σ, and both σ̃, the largest noise first."""
        budget = self.moments(self.rounds), self.delta, self.rounds, self.q
        exact, clt = (
            plan_within(*budget, accountant=name).noise_multiplier for name in ("tight", "gdp")
        )
        title = f"ε = {budget[0]:.3f} by"
        return (
            Arm(f"{title} MA", self.sigma, self.epsilon(self.sigma)),
            Arm(f"{title} exact analysis", exact, self.epsilon(exact)),
            Arm(f"{title} CLT, an estimate", clt, self.epsilon(clt)),
        )

    def epsilon(self, z: float) -> float:
        """Return the upper end of the exact cost of all rounds."""
        return tightest_epsilon(poisson_pairs({(self.q, z): self.rounds}), self.delta)[1]


@dataclass(frozen=True)
class Arm:
    """One noise multiplier."""

    name: str
    noise_multiplier: float
    epsilon: float  # exact cost of all rounds


@dataclass(frozen=True)
class Trained:
    """One run of an arm; tuples have an entry for each evaluation, once per epoch."""

    arm: Arm
    seed: int
    epochs: tuple[float, ...]
    epsilon: tuple[float, ...]  # exact cost so far
    accuracy: tuple[float, ...]  # on held-out rows


def mnist(examples: int) -> fedpriv.Population:
    """Return `examples` of MNIST's training images, each a user; its test images are held out."""
    writers = load_mnist_writers()
    x, y = (writers.users.fields[name] for name in ("x", "y"))
    rows = np.sort(np.random.default_rng(0).permutation(len(x))[:examples])
    held_out = writers.test["x"], writers.test["y"]
    return fedpriv.Population.from_arrays(
        x[rows], y[rows], np.arange(len(rows)), held_out=held_out, name="mnist: examples"
    )


def noisy_sgd(
    setting: Setting,
    arm: Arm,
    people: fedpriv.Population,
    task: fedpriv.Task,
    seed: int,
    folder: Path,
    *,
    quiet: bool = False,
) -> fedpriv.Run:
    """Train on examples with the noise of an arm, and evaluate after each epoch."""
    clipping = fedpriv.Flat(setting.clipping_norm)
    mechanism = fedpriv.Mechanism.poisson(q=setting.q, clipping=clipping, contributors_share=0.0)
    # Slightly above the cost, so that rounding cannot prevent the last round.
    budget = arm.epsilon * (1 + 1e-6)
    return fedpriv.simulate(
        people,
        task,
        mechanism.with_noise(arm.noise_multiplier, epsilon=budget, delta=setting.delta),
        local=fedpriv.SGD(1.0, steps=1),  # the update is minus the gradient of the one example
        server=fedpriv.FedAvg(setting.learning_rate),
        rounds=setting.rounds,
        out=folder,
        name="noisy-sgd",  # one name for all arms: keys of draws depend on it
        seed=seed,
        evaluate_every=max(1, round(1 / setting.q)),
        checkpoint_every=setting.rounds,
        quiet=quiet,
    )


def train(
    setting: Setting,
    people: fedpriv.Population,
    build: Callable[[], nn.Module],
    seeds: int,
    *,
    quiet: bool = False,
) -> list[Trained]:
    """Train all arms.

    All arms of a seed start with the same model, and draw the same lots and the same noise up to
    its scale, so that their differences vary less than the accuracies themselves.
    """
    trained = []
    for seed, arm in product(range(seeds), setting.arms):
        with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(seed)
            task = fedpriv.Task(build(), loss="cross-entropy")
            run = noisy_sgd(setting, arm, people, task, seed, Path(folder) / "run", quiet=quiet)
            evaluations = [result for result in run.rounds if result.accuracy is not None]
        epochs = tuple(result.round * setting.q for result in evaluations)
        accuracy = tuple(result.accuracy or 0.0 for result in evaluations)
        spent = tuple(result.epsilon for result in evaluations)
        trained.append(Trained(arm, seed, epochs, spent, accuracy))
    return trained


def results_table(setting: Setting, runs: Sequence[Trained]) -> Table:
    """Return a table with a row for each arm: its cost and its accuracy."""
    rows = []
    last = {(run.arm, run.seed): run.accuracy[-1] for run in runs}
    seeds = sorted({run.seed for run in runs})
    for arm in setting.arms:
        accuracy = [last[arm, seed] for seed in seeds]
        gained = [last[arm, seed] - last[setting.arms[0], seed] for seed in seeds]
        noise, cost = f"{arm.noise_multiplier:.4f}", f"{math.ceil(1e4 * arm.epsilon) / 1e4:.4f}"
        rows.append((arm.name, noise, cost, mean_of(accuracy), mean_of(gained, "+")))
    columns = [Column("arm", "text"), Column("σ"), Column("ε, exactly")]
    columns += [Column("accuracy"), Column("more than the first, same seeds")]
    title = f"{setting.examples:,} examples, lots of {setting.lot}, {setting.epochs:g} epochs"
    caption = f"Bu et al. 2020, Figure 4: {title}, δ = {setting.delta:g}"
    return Table(caption, columns, rows)


def figure(setting: Setting, runs: Sequence[Trained]) -> Chart:
    """Return a chart of accuracy over epochs, in means over seeds."""
    series = []
    for arm in setting.arms:
        curves = np.array([run.accuracy for run in runs if run.arm == arm])
        epochs = next(run.epochs for run in runs if run.arm == arm)
        name = f"σ = {arm.noise_multiplier:.3f}: {arm.name}; really {arm.epsilon:.3f}"
        series.append(Series(name, epochs, curves.mean(axis=0).tolist()))
    return Chart(
        "bu_figure4",
        "Less noise at what is said to be the same ε",
        f"Bu et al. 2020, Figure 4, on {setting.examples:,} examples of MNIST; means of the seeds. "
        "The arm of the CLT costs more than it is said to.",
        Axis("epochs", "count", from_zero=True),
        Axis("accuracy on held-out images", "share"),
        series,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train all arms; print and write the table, the figure and the numbers."""
    parser = argparse.ArgumentParser(description="Figure 4 of Bu et al. 2020")
    parser.add_argument("--examples", type=int, default=EXAMPLES)
    parser.add_argument("--epochs", type=float, default=EPOCHS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=Path("simulations/results"))
    options = parser.parse_args(arguments)
    setting = Setting(options.examples, options.epochs)
    runs = train(setting, mnist(setting.examples), cnn, options.seeds)
    content = {"setting": asdict(setting), "runs": [asdict(run) for run in runs]}
    write_results(results_table(setting, runs), content, options.folder, "bu_figure4")
    for path in save(figure(setting, runs), options.folder, ["png"]):
        print(path)


if __name__ == "__main__":
    main()
