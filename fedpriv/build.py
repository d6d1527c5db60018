"""From settings or values to an experiment that is resolved and checked.

`build` takes a configuration, which names everything; `resolve` takes the values themselves, and
`settings_of` is the way back: what a configuration says of values. Both ways meet in `resolve`.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.accounting.accountants import Bound, accountant_named
from fedpriv.config import (
    Config,
    LocalSection,
    ServerSection,
    mechanism_tables,
    parse_config,
    plain,
)
from fedpriv.data.population import Population, UserStore, load_population
from fedpriv.engine.metrics import check_metrics, metric, own_metrics
from fedpriv.engine.task import LOSSES, Task, check_task, running_norms
from fedpriv.engine.transport import InProcessTransport, device_named
from fedpriv.errors import InvalidValueError
from fedpriv.importing import import_function, path_of
from fedpriv.ledger.budget import PrivacyBudget
from fedpriv.ledger.events import RoundEvent
from fedpriv.mechanism import Mechanism
from fedpriv.models import build_model
from fedpriv.privacy.gaussian_mechanism import Metric
from fedpriv.privacy.layout import Layout
from fedpriv.privacy.noise import Entropy, OperatingSystemEntropy, SeededEntropy
from fedpriv.privacy.round import LocalTraining
from fedpriv.training.optimizers import ServerOptimizer
from fedpriv.training.plan import BATCH_NORM_METRIC, RunningStatistics, TrainingPlan
from fedpriv.training.rounds import OnRound, ServerState, initial_state

HeldOut = Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class Enrolled:
    """What a plan needs to know of the enrolled users."""

    name: str  # of the population, as in the ledger
    users: int  # N


@dataclass(frozen=True)
class Experiment:
    """Everything that a run needs, resolved and checked."""

    config: Config  # with run and noise multiplier filled in
    held_out: HeldOut  # rows of no enrolled user, to measure the model on
    task: Task
    plan: TrainingPlan
    budget: PrivacyBudget  # what all runs of the ledger may spend together
    entropy: Entropy  # of cohorts and noise
    device: torch.device
    on_round: Mapping[str, OnRound] = field(default_factory=dict)  # called with each release

    @property
    def initial_state(self) -> ServerState:
        """State before the first round."""
        return initial_state(self.plan, self.task.parameters(), self.task.statistics())

    def in_process(self, users: UserStore) -> InProcessTransport:
        """Transport that trains the enrolled users in this process."""
        engine = self.config.engine
        return InProcessTransport(
            self.task,
            users,
            self.device,
            engine.chunk_mebibytes * 2**20,
            activations=engine.activations,
            processes=engine.processes,
        )


def simulated(
    config: Config, run: str, spent: Sequence[RoundEvent] = ()
) -> tuple[Experiment, InProcessTransport]:
    """The experiment on the configured population, and a transport that trains it here."""
    return on_population(config, run, load_population(config.data.name, config.data.options), spent)


def on_population(
    config: Config, run: str, population: Population, spent: Sequence[RoundEvent] = ()
) -> tuple[Experiment, InProcessTransport]:
    """As `simulated`, where the configured population is already loaded."""
    users = population.users
    enrolled = Enrolled(population.name, users.population)
    experiment = build(config, run, enrolled, population.test, spent)
    return experiment, experiment.in_process(users)


def build(
    config: Config,
    run: str,
    enrolled: Enrolled,
    held_out: HeldOut,
    spent: Sequence[RoundEvent] = (),
) -> Experiment:
    """The experiment that a configuration describes; see `resolve`."""
    model, mechanism, local = config.model, config.mechanism(), config.local.build()
    task = build_task(model.name, model.options, model.seed, model.loss, config.metrics.report)
    description = f"{model!r} {_kinds(local, mechanism)} seed={config.seed}"
    optimizer = config.server.build()
    return resolve(
        config, run, enrolled, held_out, task, mechanism, local, optimizer, description, spent
    )


def resolve(
    config: Config,
    run: str,
    enrolled: Enrolled,
    held_out: HeldOut,
    task: Task,
    mechanism: Mechanism,
    local: LocalTraining,
    optimizer: ServerOptimizer,
    description: str,
    spent: Sequence[RoundEvent] = (),
) -> Experiment:
    """Calibrate the noise if asked to, and check that all parts of a run fit together.

    Of the configuration, rounds, seed, engine, output and callbacks are read; the rest is a record
    of the values. A mechanism without a noise multiplier is calibrated so that `config.rounds` and
    what was `spent` in the ledger stay within its budget together. `run` is the name in the ledger
    if the configuration has none; `description` binds checkpoints to model and data.
    """
    device = device_named(config.engine.device)
    few = {name: column[:4] for name, column in held_out.items()}
    check_task(task, few)
    budget = budget_of(mechanism)
    mechanism = _calibrated(mechanism, budget, config.rounds, spent)
    layout = Layout.of(task.parameters())
    grouping = mechanism.clipping.grouping(layout, mechanism.allocation)
    statistics = _statistics(mechanism, task)
    metrics = tuple(_metric(*named, task, statistics) for named in mechanism.metrics.items())
    plan = TrainingPlan(
        run=config.run or run,
        population=enrolled.name,
        rounds=config.rounds,
        layout=layout,
        groups=grouping.groups,
        noise_shares=grouping.shares,
        noise_multiplier=mechanism.noise_multiplier or 0.0,
        sampling=mechanism.sampling.of(enrolled.users),
        local=local,
        optimizer=optimizer,
        description=description,
        metrics=metrics,
        metrics_share=mechanism.metrics_share if metrics else 0.0,
        adaptive=mechanism.adaptive,
        averaging=mechanism.averaging,
        statistics=statistics,
    )
    check_metrics(task, metrics, plan.mechanism.clipping, few)
    if mechanism.rounds == plan.rounds:
        plan = _within(plan, budget, spent)
    privacy = config.privacy.model_copy(update={"noise_multiplier": plan.noise_multiplier})
    config = config.model_copy(update={"run": plan.run, "privacy": privacy})
    entropy = OperatingSystemEntropy() if config.seed is None else SeededEntropy(config.seed)
    callbacks = {
        path: cast(OnRound, import_function(f"callback {path!r}", path, InvalidValueError))
        for path in config.callbacks.on_round
    }
    return Experiment(config, held_out, task, plan, budget, entropy, device, callbacks)


def budget_of(mechanism: Mechanism) -> PrivacyBudget:
    """Budget of a mechanism; without limit where there is no privacy to keep."""
    delta, accountant = mechanism.delta, accountant_named(mechanism.accountant)
    if delta is None:
        raise InvalidValueError("delta is absent; it must be in (0, 1), best far below 1/N")
    if accountant.epsilon([], delta).bound is Bound.ESTIMATE:
        raise InvalidValueError(
            f"privacy.accountant is {mechanism.accountant!r}, whose estimate can be below the "
            "truth; a budget needs an upper bound, such as that of tight"
        )
    limit = None if mechanism.unsafe_no_privacy else mechanism.epsilon
    return PrivacyBudget(float("inf") if limit is None else limit, delta, accountant.upper_epsilon)


def _calibrated(
    mechanism: Mechanism, budget: PrivacyBudget, rounds: int, spent: Sequence[RoundEvent]
) -> Mechanism:
    """The mechanism with the least noise within the budget, unless its noise is given."""
    if mechanism.noise_multiplier is not None or mechanism.epsilon is None:
        return mechanism
    if not budget.admits(spent):
        raise InvalidValueError(
            f"the ledger holds ε = {budget.epsilon_of(spent):.4g} at delta {budget.delta} "
            f"already; privacy.epsilon is {mechanism.epsilon} and must be larger"
        )
    return mechanism.calibrate(
        epsilon=mechanism.epsilon, delta=budget.delta, rounds=rounds, spent=spent
    )


def _within(plan: TrainingPlan, budget: PrivacyBudget, spent: Sequence[RoundEvent]) -> TrainingPlan:
    """Plan with the noise raised until all its rounds fit into the budget.

    The event's own noise multiplier may differ from the calibrated one by a rounding, and the
    accountant's last digit with it.
    """
    while not budget.admits([*spent, replace(plan.mechanism.event, count=plan.rounds)]):
        plan = replace(plan, noise_multiplier=plan.noise_multiplier * (1.0 + 1e-4))
    return plan


def _metric(
    name: str,
    numbers: Mapping[str, float | Sequence[float]],
    task: Task,
    statistics: RunningStatistics | None,
) -> Metric:
    if name == BATCH_NORM_METRIC and statistics is not None:
        numbers = {"channels": sum(statistics.channels), **numbers}
    if name in task.metrics and ":" not in name:
        return replace(metric(f"task:{name}", **numbers), name=name)  # a function of the task
    return metric(name, **numbers)


def _statistics(mechanism: Mechanism, task: Task) -> RunningStatistics | None:
    """How running statistics move: by the metric of that name, if it is asked for."""
    layers = running_norms(task.model)
    if BATCH_NORM_METRIC not in mechanism.metrics or not layers:
        return None
    channels = tuple(layer.channels for layer in layers.values())
    return RunningStatistics(tuple(layers), channels, tuple(e.eps for e in layers.values()))


def build_task(
    model: str,
    options: Mapping[str, object],
    seed: int,
    loss: str,
    metrics: Iterable[str] = (),
) -> Task:
    """The task of these names, with equal initial and frozen parameters wherever it is built.

    Metrics that are import paths become the task's own. A FedprivError says that a name is unknown
    or what it names cannot be used; an OSError may come from the model's function.
    """
    return Task(build_model(model, options, seed), loss, metrics=own_metrics(metrics))


def settings_of(
    name: str,
    population: Population,
    task: Task,
    mechanism: Mechanism,
    local: LocalTraining,
    optimizer: ServerOptimizer,
    **others: object,
) -> Config:
    """What a configuration says of values; objects without a name have their class's path.

    `others` are rounds, seed and keys of sections, as in a configuration.
    """
    table: dict[str, Any] = {
        "name": name,
        "data": {"name": population.name},
        "model": {
            "name": path_of(type(task.model)),
            "options": {"parameters": _digest({**task.parameters(), **task.statistics()})},
            "loss": next((n for n, f in LOSSES.items() if f is task.loss), path_of(task.loss)),
        },
        "local": LocalSection.of(local),
        "server": ServerSection.of(optimizer),
        **mechanism_tables(mechanism),
    }
    for key, value in others.items():
        table[key] = table[key] | value if isinstance(table.get(key), dict) else value
    return parse_config(plain(table), "settings")


def description_of(task: Task, local: LocalTraining, mechanism: Mechanism, seed: int | None) -> str:
    """Whatever decides the result of values and is in no other part of a plan.

    Initial values of trained parameters are left out: a run goes on with those of its checkpoint.
    """
    frozen = {name: t.numpy() for name, t in task.constants(torch.device("cpu")).items()}
    moved = task.statistics()
    fixed = _digest({name: t for name, t in frozen.items() if name not in moved})
    kinds = _kinds(local, mechanism)
    return f"{task.model} {fixed} {path_of(task.loss)} {kinds} seed={seed}"


def _kinds(local: LocalTraining, mechanism: Mechanism) -> list[str]:
    return [path_of(type(part)) for part in (local, mechanism.sampling)]


def _digest(tensors: HeldOut) -> str:
    """SHA-256 of named arrays."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        digest.update(np.ascontiguousarray(tensor).tobytes())
    return digest.hexdigest()
