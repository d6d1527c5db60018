"""The tasks of the suite: users, a model, and how the users train it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from fedpriv import SGD, FedAdam, FedAvg, Population, with_adapters
from fedpriv.engine.arithmetic import generators_apart
from fedpriv.experiment.build import population_of
from fedpriv.experiment.bundled import experiment_file
from fedpriv.experiment.config import load_config
from fedpriv.experiment.models import build_model
from simulations.benchmarks.models import WORDS, cifar_cnn, language_lstm, language_transformer
from simulations.benchmarks.roles import data_folder
from simulations.datasets.cifar import load_cifar
from simulations.datasets.shakespeare import load_speakers
from simulations.finetuning import plays_of, reader

ROOT = Path(__file__).parents[2]
_LENGTH = 20  # words of a window, as of a sentence in pfl's benchmarks


@dataclass(frozen=True)
class Task:
    """Users, a model, and how the users train it."""

    title: str
    population: Callable[[], Population]
    # From a seed, a folder that caches slow results, and the number of pre-training steps.
    model: Callable[[int, Path, int], nn.Module]
    local: SGD  # in epochs, the word that pfl has
    server: FedAvg | FedAdam
    clipping_norm: float
    cohort: int  # expected users of a round
    rounds: int
    delta: float
    loss: str = "cross-entropy"
    noise_cohort: int = 1_000  # of a million users
    seeds: int = 1
    pretraining: int = 0  # steps, without privacy, on public text
    points: float | None = None  # of regressions: how many points a target of 1 is

    def score(self, loss: float, accuracy: float | None) -> float:
        """Accuracy on held-out rows, or the root of the mean squared error in points."""
        if self.points is not None:
            return float(self.points * np.sqrt(loss))
        assert accuracy is not None
        return accuracy


def guess(task: Task, people: Population) -> float:
    """Return the score of always answering with the users' commonest label or mean target.

    That is not private; it says what a model without inputs would reach.
    """
    y, test = people.users.fields["y"], people.test["y"]
    if task.points is not None:
        return task.score(float(np.square(test.astype(float) - y.mean(dtype=float)).mean()), None)
    labels, counts = np.unique(y, return_counts=True)
    return float(np.mean(test == labels[counts.argmax()]))


def _of_file(title: str, name: str, cohort: int, delta: float, **changes: Any) -> Task:
    """A small task, of an experiment's file."""
    config: Any = load_config(experiment_file(Path(name), ROOT))
    local = config.local.build()
    if local.steps and local.batch_size is None:
        local = SGD(local.learning_rate, epochs=local.steps)
    return replace(
        Task(
            title,
            partial(population_of, config),
            lambda seed, *_: build_model(config.model.name, config.model.options, seed),
            local,
            config.server.build(),
            config.clipping.norm,
            cohort,
            config.rounds,
            delta,
            config.model.loss,
            seeds=3,
        ),
        **changes,
    )


def _seeded(build: Callable[[], nn.Module], seed: int, *_: object) -> nn.Module:
    with generators_apart(seed):
        return build()


def _cifar(title: str, alpha: float | None) -> Task:
    """A task of pfl's benchmark, https://github.com/apple/pfl-research, image_classification."""
    return Task(
        title,
        partial(load_cifar, alpha=alpha),
        partial(_seeded, cifar_cnn),
        SGD(0.1, batch_size=10, epochs=1),
        FedAvg(1.0),
        clipping_norm=0.4,
        cohort=50,
        rounds=1_500,
        delta=1e-4,
    )


def _words(title: str, build: Callable[[], nn.Module]) -> Task:
    """pfl's StackOverflow, with smaller cohorts and server steps, since there are few users."""
    return Task(
        title,
        partial(load_speakers, WORDS, _LENGTH),
        partial(_seeded, build),
        SGD(0.3, batch_size=16, epochs=1),
        FedAdam(0.03, tau=0.01),
        clipping_norm=1.0,
        cohort=50,
        rounds=2_000,
        delta=1e-4,
        noise_cohort=5_000,
    )


def _adapters() -> Task:
    return Task(
        "Shakespeare: next character, adapters",
        lambda: plays_of(data_folder()).population,
        lambda seed, folder, steps: with_adapters(
            reader(data_folder(), folder, steps), 8, 16.0, ["blocks.*"], seed=seed
        ),
        SGD(1.0, batch_size=8, epochs=1),
        FedAvg(1.0),
        clipping_norm=0.6,
        cohort=30,
        rounds=20,
        delta=1e-3,
        pretraining=3_000,
    )


TASKS: Mapping[str, Callable[[], Task]] = {
    "digits": lambda: _of_file("DIGITS", "digits", 86, 1e-4),
    "mnist": lambda: _of_file(
        *("MNIST by writer", "simulations/mnist_writers.toml", 108, 1e-4),
        rounds=40,
    ),
    "har": lambda: _of_file("HAR: activities", "simulations/har.toml", 18, 1e-3),
    # The file's steps are so long that training oscillates where nothing is clipped.
    "census": lambda: _of_file(
        *("census: employed", "simulations/census_employment.toml", 1_000, 1e-6),
        local=SGD(0.3, epochs=1),
        server=FedAdam(0.1),
        clipping_norm=0.3,
        rounds=50,
    ),
    "parkinsons": lambda: _of_file(
        *("Parkinsons: severity", "simulations/parkinsons.toml", 34, 1e-3), points=10.0
    ),
    "cifar-iid": lambda: _cifar("CIFAR-10", None),
    "cifar-dirichlet": lambda: _cifar("CIFAR-10, Dirichlet 0.1", 0.1),
    "lstm": lambda: _words("Shakespeare: next word, LSTM", partial(language_lstm, tied=True)),
    "transformer": lambda: _words(
        "Shakespeare: next word, transformer", partial(language_transformer, _LENGTH, tied=True)
    ),
    "adapters": _adapters,
}
