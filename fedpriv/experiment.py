"""From a configuration to the values that a run is made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.accounting.budget import PrivacyBudget
from fedpriv.accounting.events import RoundEvent
from fedpriv.affording import noise_multiplier, privacy_budget, within
from fedpriv.callbacks import OnRound, find_callbacks, require_tensorboard
from fedpriv.config import Config
from fedpriv.data.population import Population
from fedpriv.data.registry import load_population
from fedpriv.data.store import UserStore
from fedpriv.engine.metric_checks import check_metrics
from fedpriv.engine.metrics import metric
from fedpriv.engine.normalisation import running_norms
from fedpriv.engine.task import Task, check_task
from fedpriv.engine.transport import InProcessTransport, device_named
from fedpriv.errors import InvalidValueError, known_names
from fedpriv.federated.optimizers import FedAdaptive, FedAvg, FedAvgM, SecondMoment, ServerOptimizer
from fedpriv.federated.plan import TrainingPlan
from fedpriv.federated.round import ServerState, initial_state
from fedpriv.federated.statistics import METRIC, RunningStatistics
from fedpriv.federated.transport import LocalTraining
from fedpriv.grouping import grouping_of
from fedpriv.privacy.adaptive import AdaptiveClipping
from fedpriv.privacy.entropy import Entropy, OperatingSystemEntropy, SeededEntropy
from fedpriv.privacy.layout import Layout
from fedpriv.privacy.metrics import Metric
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.privacy.weights import Averaging
from fedpriv.sections import LocalSection, MetricsSection, ServerSection
from fedpriv.tasks import build_task

HeldOut = Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class Experiment:
    """Everything that a run needs, resolved and checked.

    Attributes:
        config: the configuration with run and noise multiplier filled in.
        held_out: rows of no enrolled user, to measure the model on.
        task: model and loss.
        plan: the training plan.
        budget: what all runs of the ledger may spend together.
        entropy: where cohorts and noise come from.
        device: where to train and evaluate.
        on_round: who is told of each released round, by import path.
    """

    config: Config
    held_out: HeldOut
    task: Task
    plan: TrainingPlan
    budget: PrivacyBudget
    entropy: Entropy
    device: torch.device
    on_round: Mapping[str, OnRound] = field(default_factory=dict)

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


@dataclass(frozen=True)
class Enrolled:
    """What a plan needs to know of the enrolled users.

    Attributes:
        name: of the population, as in the ledger.
        users: N, how many.
    """

    name: str
    users: int


def simulated(
    config: Config, run: str, spent: Sequence[RoundEvent] = ()
) -> tuple[Experiment, InProcessTransport]:
    """Load the configured population; the experiment on it, and a transport that trains it here.

    Args and errors as for `build`.
    """
    return on_population(config, run, load_population(config.data.name, config.data.options), spent)


def on_population(
    config: Config, run: str, population: Population, spent: Sequence[RoundEvent] = ()
) -> tuple[Experiment, InProcessTransport]:
    """As `simulated`, where the configured population is loaded already."""
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
    """Build the model, calibrate the noise if asked to, and check that all of it fits.

    Args:
        config: the configuration.
        run: name of the run in the ledger, if the configuration does not say.
        enrolled: whom the plan is for.
        held_out: rows of no enrolled user.
        spent: what the ledger holds already; calibrated noise keeps all of it together within ε.

    Raises:
        FedprivError: something does not fit; the message says what.
    """
    device = device_named(config.engine.device)
    described = config.model
    task = build_task(
        described.name, described.options, described.seed, described.loss, config.metrics.report
    )
    few = {name: column[:4] for name, column in held_out.items()}
    check_task(task, few)
    budget = privacy_budget(config)
    layout = Layout.of(task.parameters())
    grouping = grouping_of(config.clipping, config.noise, layout)
    statistics = _statistics(config.metrics, task)
    adaptive, metrics = config.clipping.adaptive, _metrics(config.metrics, statistics)
    averaging = config.averaging
    plan = TrainingPlan(
        run=config.run or run,
        population=enrolled.name,
        rounds=config.rounds,
        layout=layout,
        groups=grouping.groups,
        noise_shares=grouping.shares,
        noise_multiplier=noise_multiplier(config, budget, spent),
        sampling=PoissonSampling(enrolled.users, config.privacy.sampling_probability),
        local=_local_training(config.local),
        optimizer=_optimizer(config.server),
        description=f"{config.model!r} seed={config.seed}",
        metrics=metrics,
        metrics_share=config.metrics.share if metrics else 0.0,
        adaptive=AdaptiveClipping(**adaptive.model_dump()) if adaptive else None,
        averaging=Averaging(averaging.cap, averaging.total_weight, averaging.floor),
        statistics=statistics,
    )
    check_metrics(task, metrics, plan.mechanism.average.sum_query.clipping, few)
    if config.privacy.noise_multiplier is None:
        plan = within(plan, budget, spent)
    privacy = config.privacy.model_copy(update={"noise_multiplier": plan.noise_multiplier})
    config = config.model_copy(update={"run": plan.run, "privacy": privacy})
    entropy = OperatingSystemEntropy() if config.seed is None else SeededEntropy(config.seed)
    if config.output.tensorboard:
        require_tensorboard()
    on_round = find_callbacks(config.callbacks.on_round)
    return Experiment(config, held_out, task, plan, budget, entropy, device, on_round)


def _metrics(section: MetricsSection, statistics: RunningStatistics | None) -> tuple[Metric, ...]:
    found = []
    for name, numbers in section.report.items():
        if name == METRIC and statistics is not None:
            found.append(metric(name, **{"channels": sum(statistics.channels), **numbers}))
        else:
            found.append(metric(name, **numbers))
    return tuple(found)


def _statistics(section: MetricsSection, task: Task) -> RunningStatistics | None:
    """How running statistics move: by the metric of that name, if it is asked for."""
    layers = running_norms(task.model)
    if METRIC not in section.report or not layers:
        return None
    channels = tuple(layer.channels for layer in layers.values())
    return RunningStatistics(tuple(layers), channels, tuple(e.eps for e in layers.values()))


def _local_training(local: LocalSection) -> LocalTraining:
    return LocalTraining(
        learning_rate=local.learning_rate,
        batch_size=None if local.batch_size == "all" else local.batch_size,
        epochs=local.epochs,
        steps=local.steps,
        momentum=local.momentum,
        proximal=local.proximal,
        max_examples=local.max_examples,
    )


def _optimizer(server: ServerSection) -> ServerOptimizer:
    known = {
        "fedavg": ("learning_rate",),
        "fedavgm": ("learning_rate", "momentum"),
        "fedadagrad": ("learning_rate", "beta1", "tau"),
    }.get(server.optimizer, ("learning_rate", "beta1", "beta2", "tau"))
    for option in server.options:
        if option not in known:
            raise InvalidValueError(
                f"unknown option {option!r} of server optimiser {server.optimizer}; "
                f"{known_names(option, known)}"
            )
    match server.optimizer:
        case "fedavg":
            return FedAvg(**server.options)
        case "fedavgm":
            return FedAvgM(**server.options)
        case rule:
            return FedAdaptive(SecondMoment(rule), **server.options)
