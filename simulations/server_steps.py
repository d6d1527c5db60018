"""Server steps from papers, compared with today's defaults at the same exact ε.

    FEDPRIV_DATA=FOLDER python -m simulations.server_steps simulations/results/server_steps.json

Six tasks of `simulations.default_tasks`, all at ε = 2, 100 rounds, q = 0.3, the default norm and
local training. Every step only sees releases, so all runs of a task have the same price. Steps:

* `fedadam`: today's default, m/(√v + τ) with v of each coordinate and the rate 0.03 (Reddi et al.
  2021), and the same with the rate that the other tasks choose;
* `warm-up`: the default, with a rate that rises over ten rounds, then falls to zero;
* `lamb`: the default's direction with bias correction, scaled in each tensor to its norm (You et
  al. 2020; Azam et al. 2023, arXiv:2310.00098, use it with per-layer clipping for private speech);
* `less noise`: bias correction, and v less the noise's variance (Tang et al. 2024,
  arXiv:2312.14334);
* `block less noise`: the same with the mean of v over each tensor (as arXiv:2602.19945 averages v
  over blocks);
* `filtered`: DiSK with one gradient (Zhang et al. 2024, arXiv:2410.03883, γ = (1 − κ)/κ and
  κ = 0.7): users train from x + γ·d, where d is the last step, and the default takes its step along
  an exponential average of what they send;
* `scaled`: the default with updates that are clipped, and get their noise, after a division by
  √v + τ (scale-then-privatize, Ganesh et al. 2025, arXiv:2507.01129). v was released, so it costs
  no privacy. Here users take one step on all of their rows, as in
* `one step`: the default with such users.

For each step three rates were tried under one seed. A task uses the rate that is best in the mean
over the five other tasks, so no task chooses its own, and runs it under five other seeds. Each run
has the accuracy of its last model, of the mean of the last third and half of its models, and of
exponential averages. Rows in the file are not run again; all rows take an hour of one core.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpriv.evaluation.held_out import evaluate
from fedpriv.experiment.build import Experiment, SharedRoads, on_population
from fedpriv.experiment.config import parse_config, spelled_out
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.training.optimizers import (
    Array,
    Average,
    CosineDecay,
    FedAdam,
    OptimizerState,
    Parameters,
    RateSchedule,
    ServerOptimizer,
    Step,
)
from fedpriv.training.request import LocalStep, LocalTraining
from fedpriv.training.rounds import train
from simulations.default_tasks import TASKS, population_of

NAMES = ("digits", "activities", "one-digit", "answers", "unequal", "many")
SEVERAL_STEPS = ("activities", "unequal")  # where some users have more than a batch of 32 rows
EPSILON, ROUNDS, CHOSEN_BY, SEEDS = 2.0, 100, 100, range(101, 106)
RATES = {
    "fedadam": (0.01, 0.03, 0.1),
    "warm-up": (0.03, 0.1, 0.2),
    "lamb": (0.02, 0.05, 0.1),
    "less noise": (0.003, 0.01, 0.03),
    "block less noise": (0.003, 0.01, 0.03),
    "filtered": (0.01, 0.03, 0.1),
    "scaled": (0.01, 0.03, 0.1),
    "one step": (0.01, 0.03, 0.1),
}
_USUAL = 0.03  # today's rate of FedAdam
_TAU = FedAdam().tau
_AVERAGE, _MODEL = "average of ", "model "  # before names of tensors in a state
_LEAST_NORM = 0.1  # of a tensor whose step is scaled to it: new biases are zero


@dataclass(frozen=True)
class WarmUp(RateSchedule):
    """A rate that rises linearly to `top` in ten rounds, then falls to zero like a cosine."""

    top: float
    rounds: int

    def at(self, number: int) -> float:
        """Return the rate of a round, from 1."""
        risen = min(1.0, number / 10)
        return risen * CosineDecay(self.top, 0.0, self.rounds).at(number)


@dataclass(frozen=True)
class Lamb(ServerOptimizer):
    """Adam with bias correction, and steps that are scaled to the norm of their tensor."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.99

    def init(self, parameters: Parameters) -> OptimizerState:
        """Return zero moments and the number of rounds so far."""
        return _zeros(parameters)

    def update(self, average: Average, state: OptimizerState, parameters: Parameters) -> Step:
        """Take a step whose length in each tensor is the rate times the tensor's norm."""
        m, v, next_state = _moments(self, average, state)
        moved = {}
        for name, parameter in parameters.items():
            step = m[name] / (np.sqrt(v[name]) + 1e-6)
            length = max(float(np.linalg.norm(parameter)), _LEAST_NORM)
            factor = self.learning_rate * length / max(float(np.linalg.norm(step)), 1e-12)
            moved[name] = (parameter + factor * step).astype(np.float32)
        return moved, next_state


@dataclass(frozen=True)
class LessNoise(ServerOptimizer):
    """Adam with bias correction, and second moments less the variance of the noise."""

    learning_rate: float
    noise: float  # standard deviation of each coordinate of the average
    block: bool  # whether v is averaged over each tensor
    beta1: float = 0.9
    beta2: float = 0.99
    least: float = 0.1  # smallest √v, relative to the noise

    def init(self, parameters: Parameters) -> OptimizerState:
        """Return zero moments and the number of rounds so far."""
        return _zeros(parameters)

    def update(self, average: Average, state: OptimizerState, parameters: Parameters) -> Step:
        """Take a step."""
        m, v, next_state = _moments(self, average, state)
        moved = {}
        for name, parameter in parameters.items():
            square = np.full(parameter.shape, v[name].mean()) if self.block else v[name]
            root = np.sqrt(np.maximum(square - self.noise**2, (self.least * self.noise) ** 2))
            moved[name] = (parameter + self.learning_rate * m[name] / root).astype(np.float32)
        return moved, next_state


@dataclass(frozen=True)
class Filtered(FedAdam):
    """FedAdam along an exponential average of releases; users train from an extrapolated model."""

    kappa: float = field(default=0.7, kw_only=True)

    def init(self, parameters: Parameters) -> OptimizerState:
        """Return FedAdam's state, with the average 0 and the model itself."""
        usual = super().init(parameters)
        zeros = {_AVERAGE + name: np.zeros(p.shape) for name, p in parameters.items()}
        model = {_MODEL + name: p.astype(np.float64) for name, p in parameters.items()}
        return replace(usual, first={**usual.first, **zeros, **model})

    def update(self, average: Average, state: OptimizerState, parameters: Parameters) -> Step:
        """Return the model for users, x + γ·(x − last x), and the state with x."""
        kappa, first = self.kappa, state.first
        smooth = {n: (1 - kappa) * first[_AVERAGE + n] + kappa * average[n] for n in parameters}
        previous = model_of(parameters, state)
        usual = replace(state, first={name: first[name] for name in parameters})
        model, next_state = super().update(smooth, usual, previous)
        ahead = {n: x + (1 - kappa) / kappa * (x - previous[n]) for n, x in model.items()}
        extra = {_AVERAGE + n: g for n, g in smooth.items()} | {
            _MODEL + n: x.astype(np.float64) for n, x in model.items()
        }
        start = {name: x.astype(np.float32) for name, x in ahead.items()}
        return start, replace(next_state, first={**next_state.first, **extra})


def model_of(parameters: Parameters, state: OptimizerState) -> Parameters:
    """Return the model of a state; under `Filtered`, users train from other parameters."""
    return {n: state.first.get(_MODEL + n, p).astype(np.float32) for n, p in parameters.items()}


def scales_of(state: OptimizerState) -> dict[str, Array]:
    """Return 1/(√v + τ) of each coordinate, all divided by their root mean square."""
    raw = {name: 1.0 / (np.sqrt(v) + _TAU) for name, v in state.second.items()}
    size = math.sqrt(np.mean(np.concatenate([s.ravel() for s in raw.values()]) ** 2))
    return {name: s / size for name, s in raw.items()}


@dataclass(frozen=True)
class Scaled(FedAdam):
    """FedAdam that first divides averages of scaled updates by their scales."""

    def update(self, average: Average, state: OptimizerState, parameters: Parameters) -> Step:
        """Take a step."""
        unscaled = {name: average[name] / s for name, s in scales_of(state).items()}
        return super().update(unscaled, state, parameters)


@dataclass(frozen=True)
class ScaledStep(LocalTraining):
    """One step on all rows, along the gradient times the round's scales, by shape of the tensor."""

    scales: dict[tuple[int, ...], Tensor] = field(default_factory=dict, compare=False)

    def set(self, state: OptimizerState) -> None:
        """Set the scales of the next round; no two tensors may have the same shape."""
        scales = {s.shape: torch.from_numpy(s).float() for s in scales_of(state).values()}
        assert len(scales) == len(state.second)
        self.scales.update(scales)

    def direction(self, step: LocalStep) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the gradient times the scales."""
        return step.gradient * self.scales[tuple(step.gradient.shape[1:])], ()


def _zeros(parameters: Parameters) -> OptimizerState:
    zeros = {name: np.zeros(p.shape) for name, p in parameters.items()}
    return OptimizerState(zeros | {"rounds": np.zeros(1)}, dict(zeros))


def _moments(
    optimizer: Any, average: Average, state: OptimizerState
) -> tuple[dict[str, Array], dict[str, Array], OptimizerState]:
    """Return m and v with bias correction, and the state after this round."""
    rounds = state.first["rounds"] + 1
    beta1, beta2 = optimizer.beta1, optimizer.beta2
    m = {n: beta1 * state.first[n] + (1 - beta1) * average[n] for n in average}
    v = {n: beta2 * state.second[n] + (1 - beta2) * average[n] ** 2 for n in average}
    number = float(rounds[0])
    corrected = (
        {n: m[n] / (1 - beta1**number) for n in m},
        {n: v[n] / (1 - beta2**number) for n in v},
    )
    return *corrected, OptimizerState(m | {"rounds": rounds}, v)


def optimizer_of(step: str, rate: float, noise: float) -> ServerOptimizer:
    """Return the optimiser of a step at a rate."""
    if step == "lamb":
        return Lamb(rate)
    if step in ("less noise", "block less noise"):
        return LessNoise(rate, noise, block=step.startswith("block"))
    if step in ("filtered", "scaled"):
        return Filtered(rate) if step == "filtered" else Scaled(rate)
    return FedAdam(WarmUp(rate, ROUNDS) if step == "warm-up" else rate)


@lru_cache(maxsize=2)
def experiment_of(task: str, seed: int) -> tuple[Experiment, Any]:
    """Return the experiment of a task with the defaults, and its transport."""
    table: dict[str, object] = {
        "name": task,
        "seed": seed,
        "rounds": ROUNDS,
        **spelled_out({"data": TASKS[task].data}),
        "model": TASKS[task].model | {"seed": seed},
        "local": {"learning_rate": 0.3, "batch_size": 32, "epochs": 1},
        "privacy": {"sampling_probability": 0.3, "epsilon": EPSILON, "delta": TASKS[task].delta},
        "engine": {"processes": 1},
    }
    config = parse_config(table, task)
    return on_population(config, task, population_of(task), roads=SharedRoads())


def accuracies(task: str, step: str, rate: float, seed: int) -> dict[str, float]:
    """Return the accuracy of the last model and of means of models on held-out rows, in percent."""
    experiment, transport = experiment_of(task, seed)
    stddevs, state = experiment.plan.mechanism.query.tensor_stddevs, experiment.initial_state
    noise = max(stddevs[name] for name in state.parameters)
    plan = replace(experiment.plan, optimizer=optimizer_of(step, rate, noise))
    state = replace(state, optimizer=plan.optimizer.init(state.parameters))
    scaled = ScaledStep(experiment.plan.local.learning_rate, steps=1)
    scaled.set(state.optimizer)
    if step in ("scaled", "one step"):
        plan = replace(plan, local=scaled)
    models: list[Mapping[str, Array]] = []
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder) / "ledger.sqlite", Path(folder) / "participation.sqlite"
        with PrivacyRecords.open(*paths, task, experiment.budget) as records:
            for next_state, _ in train(plan, state, transport, records, experiment.entropy):
                if step == "scaled":
                    scaled.set(next_state.optimizer)
                trained = model_of(next_state.parameters, next_state.optimizer)
                models.append({n: t.astype(np.float64) for n, t in trained.items()})
    kinds = {
        "last": models[-1],
        "third": _mean(models[-(ROUNDS // 3) :]),
        "half": _mean(models[-(ROUNDS // 2) :]),
    }
    for decay in (0.8, 0.9):
        mean = models[0]
        for model in models[1:]:
            mean = {n: decay * mean[n] + (1.0 - decay) * model[n] for n in mean}
        kinds[f"ema {decay:g}"] = mean
    reached = {}
    for name, tensors in kinds.items():
        model = {n: t.astype(np.float32) for n, t in tensors.items()}
        figures = evaluate(experiment.task, experiment.held_out, experiment.device, model)
        assert figures.accuracy is not None
        reached[name] = round(100.0 * figures.accuracy, 2)
    return reached


def _mean(models: list[Mapping[str, Array]]) -> dict[str, Array]:
    return {name: np.mean([model[name] for model in models], axis=0) for name in models[0]}


class Results:
    """The rows of a file, with the accuracies of each run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []

    def reached(self, task: str, step: str, rate: float, seed: int) -> dict[str, float]:
        """Return the accuracies of a run; do the run and write them if they are missing."""
        if step == "one step" and task not in SEVERAL_STEPS:
            step = "fedadam"  # the same step for this task
        key = {"task": task, "step": step, "rate": rate, "seed": seed}
        for row in self.rows:
            if row.items() >= key.items():
                return dict(row["reached"])
        reached = accuracies(task, step, rate, seed)
        self.rows.append({**key, "reached": reached})
        text = ",\n".join(map(json.dumps, self.rows))
        self.path.write_text(f"[\n{text}\n]\n", encoding="utf-8")
        return reached

    def rate_for(self, task: str, step: str) -> float:
        """Return the rate that is best in the mean over the other tasks."""

        def others(rate: float) -> float:
            runs = (self.reached(name, step, rate, CHOSEN_BY) for name in NAMES if name != task)
            return float(np.mean([run["last"] for run in runs]))

        return max(RATES[step], key=others)


def table(results: Results) -> list[str]:
    """Return a row for each step and mean: the gain over today's default, by task."""
    usual = {
        task: [results.reached(task, "fedadam", _USUAL, seed)["last"] for seed in SEEDS]
        for task in NAMES
    }
    lines = ["| step, model | " + " | ".join(NAMES) + " |"]
    accuracy = (f"{np.mean(usual[task]):.1f}" for task in NAMES)
    lines.append("| default, last: accuracy | " + " | ".join(accuracy) + " |")
    for title, step in {"default": "fedadam", **dict(zip(RATES, RATES, strict=True))}.items():
        for kind in ("last", "third", "half", "ema 0.8", "ema 0.9"):
            gains = []
            for task in NAMES:
                rate = _USUAL if title == "default" else results.rate_for(task, step)
                runs = [results.reached(task, step, rate, seed)[kind] for seed in SEEDS]
                gain = np.subtract(runs, usual[task])
                error = gain.std(ddof=1) / math.sqrt(len(gain))
                gains.append(f"{gain.mean():+.1f} ± {error:.1f}")
            lines.append(f"| {title}, {kind} | " + " | ".join(gains) + " |")
    return lines


def main() -> None:
    """Do the runs that the file lacks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("file", type=Path)
    print(*table(Results(parser.parse_args().file)), sep="\n")


if __name__ == "__main__":
    main()
