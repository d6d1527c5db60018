"""An arm of the suite: a task under one privacy setting, with one tool and seed, and its result.

    python -m simulations.suite.arms ARM FOLDER

trains an arm, given as JSON, and writes its result into a folder.
"""

import hashlib
import json
import math
import os
import resource
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn

import fedpriv
from fedpriv.data.columns import Array
from fedpriv.errors import FedprivError
from fedpriv.evaluation.held_out import evaluate
from fedpriv.privacy.layout import Tensors
from simulations.benchmarks.machine import machine, versions
from simulations.suite.tasks import TASKS, Task, guess


@dataclass(frozen=True)
class Privacy:
    """A privacy setting: the budget, and the population that it holds for."""

    epsilon: float | None = None  # None: nothing, and nothing is clipped
    as_if: int | None = None  # number of users that those of a task stand for

    def delta(self, task: Task) -> float:
        """δ, which is less for more users, as in pfl's benchmarks."""
        return task.delta if self.as_if is None else 1.0 / self.as_if

    def probability(self, task: Task, users: int) -> float:
        """The chance of a user to be drawn."""
        return task.cohort / users if self.as_if is None else task.noise_cohort / self.as_if

    def mechanism(self, task: Task, users: int) -> fedpriv.Mechanism:
        """The mechanism of all rounds, with calibrated noise."""
        mechanism = fedpriv.Mechanism(
            fedpriv.Poisson(self.probability(task, users)),
            fedpriv.Flat(math.inf if self.epsilon is None else task.clipping_norm),
            noise_multiplier=0.0 if self.epsilon is None else None,
            delta=self.delta(task),
            contributors_share=0.0,
            unsafe_no_privacy=self.epsilon is None,
        )
        if self.epsilon is None:
            return mechanism
        return mechanism.calibrate(epsilon=self.epsilon, delta=self.delta(task), rounds=task.rounds)


PRIVACY: Mapping[str, Privacy] = {
    "none": Privacy(),
    "2": Privacy(2.0),
    "8": Privacy(8.0),
    "2-as-if": Privacy(2.0, 1_000_000),
}


@dataclass(frozen=True)
class Arm:
    """One training run: a task, its privacy, a tool and a seed."""

    task: str
    privacy: str
    tool: str
    seed: int
    rounds: int | None = None  # at most so many
    pretraining: int | None = None
    processes: int = 1  # that train users; pfl has one

    @property
    def name(self) -> str:
        """The name of its file."""
        name = f"{self.task}_{self.privacy}_{self.tool}_{self.seed}"
        fewer = self.trained.rounds < TASKS[self.task]().rounds
        return f"{name}_{self.rounds}" if fewer else name

    @property
    def trained(self) -> Task:
        """The task, with as many rounds as are trained."""
        task = TASKS[self.task]()
        rounds, steps = self.rounds or task.rounds, self.pretraining or task.pretraining
        return replace(
            task, rounds=min(rounds, task.rounds), pretraining=min(steps, task.pretraining)
        )

    @property
    def settings(self) -> dict[str, object]:
        """The settings that a result must have to count as the result of this arm."""
        task, privacy = self.trained, PRIVACY[self.privacy]
        numbers = ("clipping_norm", "cohort", "rounds", "pretraining", "loss")
        return {
            **{name: getattr(task, name) for name in numbers},
            "local": {"name": type(task.local).__name__, **asdict(task.local)},
            "server": {"name": type(task.server).__name__, **asdict(task.server)},
            "epsilon": privacy.epsilon,
            "delta": privacy.delta(task),
            "as_if": privacy.as_if,
            "noise_cohort": task.noise_cohort if privacy.as_if else None,
        }

    def finished(self, folder: Path) -> bool:
        """True if a folder has the result of this arm."""
        file = folder / f"{self.name}.json"
        kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return bool(kept.get("settings") == json.loads(json.dumps(self.settings)))


@dataclass(frozen=True)
class Work:
    """The input of a tool."""

    task: Task
    people: fedpriv.Population
    model: nn.Module
    privacy: Privacy
    mechanism: fedpriv.Mechanism
    seed: int
    processes: int


@dataclass(frozen=True)
class Trained:
    """The output of a tool."""

    tensors: Tensors  # of the last model, by name
    epsilon: float | None  # as it says
    enrolled_epsilon: float | None  # of the enrolled users, if they represent a larger population
    users_sha256: str  # `digest` of the rows that it was given
    wall_seconds: float  # of training alone
    cpu_seconds: float  # of all processes


Tool = Callable[[Work], Trained]


def ours(work: Work) -> Trained:
    """fedpriv, with ledger and checkpoint on disk."""
    task, privacy, store = work.task, work.privacy, work.people.users
    fields = [store.fields[name] for name in ("x", "y")]
    users = digest([f[a:b] for f in fields] for a, b in pairwise(store.offsets.tolist()))
    people = replace(work.people, test={})  # models are measured after the clock has stopped
    if privacy.as_if is not None:
        people = people.as_if(privacy.as_if, task.cohort)
    with tempfile.TemporaryDirectory() as folder:
        run, *seconds = timed(
            lambda: fedpriv.simulate(
                people,
                fedpriv.Task(work.model, task.loss),
                work.mechanism,
                local=task.local,
                server=task.server,
                rounds=task.rounds,
                seed=work.seed,
                out=f"{folder}/run",
                checkpoint_every=task.rounds,
                engine=fedpriv.Engine(processes=work.processes),
                quiet=True,
            )
        )
    epsilon = None if privacy.epsilon is None else run.epsilon
    return Trained(run.state.model, epsilon, run.enrolled_epsilon, users, *seconds)


def digest(users: Iterable[Sequence[Array]]) -> str:
    """SHA-256 of users' rows, user by user."""
    total = hashlib.sha256()
    for fields in users:
        total.update(str([(field.dtype.str, field.shape) for field in fields]).encode())
        for field in fields:
            total.update(np.ascontiguousarray(field).tobytes())
    return total.hexdigest()


def timed(train: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return the result of a call, its wall seconds, and its CPU seconds with ended children."""
    wall, cpu = perf_counter(), sum(os.times()[:4])
    result = train()
    return result, round(perf_counter() - wall, 2), round(sum(os.times()[:4]) - cpu, 2)


def train(arm: Arm, folder: Path, tool: Tool) -> dict[str, object]:
    """Train an arm, and write and return its result."""
    task, privacy = arm.trained, PRIVACY[arm.privacy]
    people = task.population()
    mechanism = privacy.mechanism(task, people.users.population)
    model = task.model(arm.seed, folder, task.pretraining)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    trained = tool(Work(task, people, model, privacy, mechanism, arm.seed, arm.processes))
    last = fedpriv.Task(model, task.loss)
    measured = evaluate(last, people.test, torch.device("cpu"), trained.tensors)
    result: dict[str, object] = {
        **{name: getattr(arm, name) for name in ("task", "privacy", "tool", "seed")},
        "score": task.score(measured.loss, measured.accuracy),
        "loss": measured.loss,
        "guess": guess(task, people),
        **{name: value for name, value in vars(trained).items() if name != "tensors"},
        "noise_multiplier": mechanism.noise_multiplier,
        "peak_mebibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "users": people.users.population,
        "processes": arm.processes,
        "parameters": parameters,
        "declared_rounds": TASKS[arm.task]().rounds,
        "settings": arm.settings,
        "machine": machine("cpu", torch.get_num_threads()),
        "versions": versions(["fedpriv", "torch", "numpy", "pfl"]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{arm.name}.part"
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(part.with_suffix(".json"))
    return result


def main(arm: str, folder: str) -> None:
    """Train the arm in this process, which does nothing else."""
    torch.set_num_threads(1)
    chosen, tool = Arm(**json.loads(arm)), ours
    if chosen.tool == "pfl":
        from simulations.suite.rival import pfl as tool  # noqa: PLC0415 - not installed everywhere
    try:
        train(chosen, Path(folder), tool)
    except FedprivError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
