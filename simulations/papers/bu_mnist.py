"""Bu et al. 2020, Table 1: NoisySGD on MNIST, and better recipes at the same (ε, δ).

    python -m simulations.papers.bu_mnist [--rows N …] [--epochs FACTOR] [--seeds 3]

The record is an image. The first three rows are the paper's: its network and initial weights, lots,
noise, step sizes and epochs. The next two have the exact costs of the first and the third, and
train the same network with tanh instead of ReLU (Papernot et al. 2021) in larger lots, with
momentum and steps that shrink to zero, which averages the noise of the last rounds. The last two
train softmax regression on public features: means of moduli of wavelets in small parts of the
image, as in a scattering transform (Bruna & Mallat 2013; Tramèr & Boneh 2021), which are fixed and
learn nothing from data. Settings other than the paper's were tuned on the test images too; ε does
not include this.

Sums are divided by the expected size of a lot, not by the realised one, which no accountant covers.
Data: MNIST's files, in the folder FEDPRIV_DATA.
"""

import argparse
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

import fedpriv
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.experiment.models import cnn
from fedpriv.report.tables import Column, Table
from fedpriv.support.checks import epsilon_up
from fedpriv.training.optimizers import ServerOptimizer
from simulations.datasets.mnist import load_mnist_writers
from simulations.papers.results import mean_of, read_results, write_results

DELTA, IMAGES = 1e-5, 60_000
_ORIENTATIONS, _SCALES, _SUBSAMPLED, _SIDE = 6, 2, 4, 7

Images = NDArray[np.float32]


def keras_cnn() -> nn.Module:
    """Return the network of the paper with the initial weights of Keras, which its code uses.

    Weights are uniform by Glorot & Bengio 2010 and biases zero: after the first layer, weights are
    1.4 to 2.4 times PyTorch's own initial weights.
    """
    network = cnn()
    for layer in network.children():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(layer.weight)
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return network


def tanh_cnn() -> nn.Module:
    """Return the network of the paper, with bounded activations and PyTorch's initial weights."""
    layers = [nn.Tanh() if isinstance(layer, nn.ReLU) else layer for layer in cnn().children()]
    return nn.Sequential(*layers)


def softmax_regression() -> nn.Module:
    """Return softmax regression on `scattered` images, from zero."""
    features = (1 + _ORIENTATIONS * _SCALES + _ORIENTATIONS**2) * _SIDE**2
    layer = nn.Linear(features, 10)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


@dataclass(frozen=True)
class Row:
    """The settings of one row of the table."""

    name: str
    lot: int  # expected images of a round
    epochs: float
    clipping_norm: float
    learning_rate: float  # of the average
    momentum: float = 0.0
    decays: bool = False  # whether the learning rate falls linearly to zero
    noise_multiplier: float | None = None  # one of this and ε is given
    epsilon: float | None = None  # exact
    paper: float | None = None  # accuracy in the paper
    build: Callable[[], nn.Module] = cnn
    features: bool = False  # whether images are `scattered`

    @property
    def q(self) -> float:
        """Probability of each image to be in a lot."""
        return self.lot / IMAGES

    @property
    def rounds(self) -> int:
        """Whole rounds that fit in the epochs."""
        return int(self.epochs / self.q)

    @property
    def server(self) -> ServerOptimizer:
        """The optimiser of all rounds."""
        rate: float | fedpriv.PolynomialDecay = self.learning_rate
        if self.decays:
            rate = fedpriv.PolynomialDecay(self.learning_rate, 0.0, self.rounds)
        return fedpriv.FedAvgM(rate, self.momentum) if self.momentum else fedpriv.FedAvg(rate)

    def mechanism(self) -> fedpriv.Mechanism:
        """Return a mechanism with the paper's noise, or the least within ε."""
        clipping = fedpriv.Flat(self.clipping_norm)
        mechanism = fedpriv.Mechanism.poisson(
            q=self.q, clipping=clipping, unit="example", contributors_share=0.0
        )
        if self.epsilon is not None:
            return mechanism.calibrate(epsilon=self.epsilon, delta=DELTA, rounds=self.rounds)
        z = self.noise_multiplier or 0.0
        cost = fedpriv.epsilon([poisson_gaussian(self.q, z, self.rounds)], DELTA).epsilon
        # Slightly above the cost, so that rounding cannot prevent the last round.
        return mechanism.with_noise(z, epsilon=cost * (1 + 1e-6), delta=DELTA)


ROWS = (
    Row(
        *("the paper's σ = 1.3", 256, 15, 1.5, 0.25),
        noise_multiplier=1.3, paper=0.950, build=keras_cnn,
    ),
    Row(
        *("the paper's σ = 1.1", 256, 60, 1.0, 0.15),
        noise_multiplier=1.1, paper=0.966, build=keras_cnn,
    ),
    Row(
        *("the paper's σ = 0.7", 256, 45, 1.5, 0.25),
        noise_multiplier=0.7, paper=0.970, build=keras_cnn,
    ),
    Row(
        *("tanh, larger lots", 1024, 25, 1.0, 0.4, 0.9),
        decays=True, epsilon=0.864, build=tanh_cnn,
    ),
    Row(
        *("tanh, larger lots", 1024, 40, 1.0, 0.4, 0.9),
        decays=True, epsilon=5.639, build=tanh_cnn,
    ),
    Row(
        *("public features, softmax", 4096, 25, 0.5, 8.0, 0.9),
        epsilon=0.864, build=softmax_regression, features=True,
    ),
    Row(
        *("public features, softmax", 4096, 40, 1.0, 20.0, 0.9),
        epsilon=5.639, build=softmax_regression, features=True,
    ),
)  # fmt: skip


def _wavelets(scale: int) -> torch.Tensor:
    """Return real and imaginary Morlet wavelets at L angles: [2L, 1, k, k], k = 4·scale + 3."""
    radius = 2 * scale + 1
    across = torch.arange(-radius, radius + 1, dtype=torch.float32)
    y, x = torch.meshgrid(across, across, indexing="ij")
    bell = torch.exp(-(x**2 + y**2) / (2 * (0.8 * scale) ** 2))
    kernels = []
    for angle in torch.arange(_ORIENTATIONS) * (math.pi / _ORIENTATIONS):
        phase = 3 * math.pi / (4 * scale) * (x * torch.cos(angle) + y * torch.sin(angle))
        waves = torch.cos(phase), torch.sin(phase)
        # Without their mean they ignore brightness.
        kernels += [bell * (wave - (bell * wave).sum() / bell.sum()) for wave in waves]
    stacked = torch.stack(kernels)[:, None]
    return stacked / stacked.abs().sum(dim=(2, 3), keepdim=True)


def _moduli(images: torch.Tensor, scale: int) -> torch.Tensor:
    """Return moduli of the wavelets of one scale: [B, C, 28, 28] → [B, C·L, 28, 28]."""
    kernels = _wavelets(scale)
    flat = images.reshape(-1, 1, *images.shape[2:])
    parts = functional.conv2d(flat, kernels, padding=kernels.shape[-1] // 2)
    parts = parts.reshape(len(flat), _ORIENTATIONS, 2, *images.shape[2:])
    return parts.square().sum(dim=2).sqrt().reshape(len(images), -1, *images.shape[2:])


def scattered(images: Images) -> Images:
    """Return public features of images [N, 1, 28, 28]: [N, F], with norm at most 1.

    They are means over parts of the image: of the image, of the moduli of its wavelets at both
    scales, and of the moduli of larger wavelets of the moduli of smaller ones. Each channel of an
    image is divided by its own size, so a feature depends on no other image.
    """
    blocks = []
    with torch.no_grad():
        for start in range(0, len(images), 500):
            image = torch.from_numpy(images[start : start + 500])
            fine = _moduli(image, 1)
            orders = torch.cat([image, fine, _moduli(image, 2), _moduli(fine, 2)], dim=1)
            means = functional.avg_pool2d(orders, _SUBSAMPLED)
            size = means.square().mean(dim=(2, 3), keepdim=True).sqrt()
            blocks.append((means / (size + 1e-3)).flatten(1).numpy())
    features = np.concatenate(blocks)
    return (features / math.sqrt(features.shape[1])).astype(np.float32)


def mnist(limit: int = IMAGES, *, features: bool = False) -> fedpriv.Population:
    """Return MNIST by writer, each image a record, with pixels from 0 to 1 or `scattered`."""
    writers = load_mnist_writers()
    columns = []
    for fields in (writers.users.fields, writers.test):
        x = np.asarray(fields["x"], np.float32)[:limit] * 0.3081 + 0.1307
        columns.append((scattered(x) if features else x, np.asarray(fields["y"])[:limit]))
    (x, y), held_out = columns
    name = "mnist, public features" if features else "mnist"
    return fedpriv.Population.from_arrays(x, y, np.arange(len(x)), held_out=held_out, name=name)


def trained(row: Row, people: fedpriv.Population, seed: int, folder: Path) -> fedpriv.Run:
    """Train a row once."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        task = fedpriv.Task(row.build(), loss="cross-entropy")
    return fedpriv.simulate(
        people,
        task,
        row.mechanism(),
        server=row.server,
        rounds=row.rounds,
        out=folder / "run",
        name="bu-mnist",
        seed=seed,
        evaluate_every=row.rounds,
        checkpoint_every=row.rounds,
        quiet=True,
    )


@dataclass(frozen=True)
class Found:
    """Results of a row under some seeds."""

    row: str
    lot: int
    epochs: float
    noise_multiplier: float
    epsilon: float  # of a run's ledger
    paper: float | None
    here: tuple[float, ...]  # accuracies

    @classmethod
    def read(cls, row: dict[str, Any]) -> Self:
        """Return the results with this `asdict`, read from JSON."""
        return cls(**row | {"here": tuple(row["here"])})

    @property
    def key(self) -> tuple[str, int, float]:
        """The identity of a row."""
        return self.row, self.lot, self.epochs


def measure(row: Row, people: fedpriv.Population, seeds: int) -> Found:
    """Train a row under some seeds."""
    accuracies, cost = [], 0.0
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            run = trained(row, people, seed, Path(folder))
            accuracies.append(run.accuracy or 0.0)
            cost = run.epsilon
    z = row.mechanism().noise_multiplier or 0.0
    return Found(row.name, row.lot, row.epochs, z, cost, row.paper, tuple(accuracies))


def results_table(results: Sequence[Found]) -> Table:
    """Return a table with the paper's accuracy, ours, and the exact cost."""
    rows = []
    for result in results:
        paper = "" if result.paper is None else f"{result.paper:.1%}"
        sizes = str(result.lot), f"{result.epochs:g}", f"{result.noise_multiplier:.3f}"
        rows.append((result.row, *sizes, paper, mean_of(result.here), epsilon_up(result.epsilon)))
    names = ("lot", "epochs", "σ", "paper", "here", "exact ε")
    columns = [Column("", "text"), *map(Column, names)]
    return Table(f"MNIST by NoisySGD, example-level, δ = {DELTA:g}", columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train rows; print and write the table and the numbers."""
    parser = argparse.ArgumentParser(description="Table 1 of Bu et al. 2020, and better")
    numbers = range(1, len(ROWS) + 1)
    help_rows = "train these; others keep their results"
    parser.add_argument("--rows", type=int, nargs="+", choices=numbers, help=help_rows)
    parser.add_argument("--epochs", type=float, default=1.0, help="factor on the epochs of all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("simulations/results"))
    options = parser.parse_args(arguments)
    results = dict[tuple[str, int, float], Found]()
    if options.rows:
        earlier_results = [
            Found.read(result) for result in read_results(options.folder, "bu_mnist")
        ]
        results = {result.key: result for result in earlier_results}
    for features in (False, True):
        rows = [ROWS[number - 1] for number in options.rows or numbers]
        chosen = [row for row in rows if row.features == features]
        people = mnist(features=features) if chosen else None
        for row in chosen:
            assert people is not None
            scaled = replace(row, epochs=row.epochs * options.epochs)
            measured = measure(scaled, people, options.seeds)
            results[measured.key] = measured
            every = list(results.values())
            content = [asdict(result) for result in every]
            write_results(results_table(every), content, options.folder, "bu_mnist")


if __name__ == "__main__":
    main()
