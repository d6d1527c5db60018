"""What a configuration may spend, and the least noise that keeps a plan within it.

From the clipping and noise sections of a configuration to vector groups and their shares.

Tasks by name: what a server describes, its nodes build again.

From a configuration to the values that a run is made of.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.accounting.accountant import Bound
from fedpriv.accounting.calibration import smallest_noise
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.accounting.registry import accountant_named
from fedpriv.config import (
    ClippingSection,
    Config,
    GroupSection,
    LocalSection,
    MetricsSection,
    NoiseSection,
    ServerSection,
)
from fedpriv.data.population import Population, UserStore
from fedpriv.data.registry import load_population
from fedpriv.engine.metrics import check_metrics, metric, own_metrics
from fedpriv.engine.task import Task, check_task, running_norms
from fedpriv.engine.transport import InProcessTransport, device_named
from fedpriv.errors import InvalidValueError, known_names
from fedpriv.ledger.budget import PrivacyBudget
from fedpriv.ledger.events import RoundEvent
from fedpriv.models import build_model, find_loss
from fedpriv.privacy.layout import (
    Layout,
    VectorGroup,
    equal_split,
    flat,
    joint,
    layers,
    per_layer,
    scales_by_dimension,
    split_by_dimension,
)
from fedpriv.privacy.mechanism import AdaptiveClipping, Metric
from fedpriv.privacy.noise import Entropy, OperatingSystemEntropy, SeededEntropy
from fedpriv.privacy.query import Averaging, dimension_shares, given_shares, proportional_shares
from fedpriv.privacy.round import LocalTraining
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.run.callbacks import OnRound, find_callbacks, require_tensorboard
from fedpriv.training.optimizers import FedAdaptive, FedAvg, FedAvgM, SecondMoment, ServerOptimizer
from fedpriv.training.plan import METRIC, RunningStatistics, TrainingPlan
from fedpriv.training.rounds import ServerState, initial_state


def privacy_budget(config: Config) -> PrivacyBudget:
    """Budget of a configuration; without limit where there is no privacy to keep."""
    privacy = config.privacy
    if accountant_named(privacy.accountant).epsilon([], privacy.delta).bound is Bound.ESTIMATE:
        raise InvalidValueError(
            f"privacy.accountant is {privacy.accountant!r}, whose estimate can be below the truth; "
            "a budget needs an upper bound, such as that of tight"
        )

    limit = privacy.epsilon
    if limit is None or privacy.unsafe_no_privacy:
        limit = float("inf")
    return PrivacyBudget(limit, privacy.delta, accountant_named(privacy.accountant).upper_epsilon)


def noise_multiplier(config: Config, budget: PrivacyBudget, spent: Sequence[RoundEvent]) -> float:
    """Noise multiplier of a configuration, calibrated to ε if it is not given."""
    privacy = config.privacy
    if privacy.noise_multiplier is not None or privacy.epsilon is None:
        return privacy.noise_multiplier or 0.0
    if not budget.admits(spent):
        raise InvalidValueError(
            f"the ledger holds ε = {budget.epsilon_of(spent):.4g} at delta {privacy.delta} "
            f"already; privacy.epsilon is {privacy.epsilon} and must be larger"
        )
    q = privacy.sampling_probability

    def events_of(z: float) -> list[RoundEvent]:
        return [*spent, poisson_gaussian(q, z, config.rounds)]

    return smallest_noise(privacy.epsilon, privacy.delta, events_of, privacy.accountant)


def within(plan: TrainingPlan, budget: PrivacyBudget, spent: Sequence[RoundEvent]) -> TrainingPlan:
    """Plan with the noise raised until all its rounds fit into the budget.

    The event's own noise multiplier may differ from the calibrated one by a rounding, and the
    accountant's last digit with it.
    """
    while not budget.admits([*spent, replace(plan.mechanism.event, count=plan.rounds)]):
        plan = replace(plan, noise_multiplier=plan.noise_multiplier * (1.0 + 1e-4))
    return plan


@dataclass(frozen=True)
class Grouping:
    """How an update is clipped and what share of its noise budget each group has.

    Attributes:
        groups: a partition of the layout.
        shares: ω_g > 0 of each group, summing to 1.
    """

    groups: tuple[VectorGroup, ...]
    shares: tuple[float, ...]


def grouping_of(clipping: ClippingSection, noise: NoiseSection, layout: Layout) -> Grouping:
    """Vector groups and their shares.

    Raises:
        InvalidValueError: a tensor is in no group, a group has none, or given norms, scales or
            weights do not name the parts, tensors or groups there are.
    """
    if not clipping.groups:
        groups = _groups_of(clipping, clipping.norm or 0.0, layout)
        return Grouping(groups, _shares(noise, layout, groups))
    parts = _by_pattern(clipping.groups, layout)
    named = {
        section.name: _named(section, _groups_of(section, section.norm, parts[section.name]))
        for section in clipping.groups
    }
    groups = tuple(group for several in named.values() for group in several)
    if clipping.groups[0].share is None:
        return Grouping(groups, _shares(noise, layout, groups))
    if not isinstance(noise.allocation, str):
        raise InvalidValueError(
            "noise.allocation is a table and clipping.groups have shares; only one of them can say"
        )
    total = sum(section.share or 0.0 for section in clipping.groups)
    shares = tuple(
        (section.share or 0.0) / total * share
        for section in clipping.groups
        for share in _within(noise, parts[section.name], named[section.name])
    )
    return Grouping(groups, shares)


def _by_pattern(sections: tuple[GroupSection, ...], layout: Layout) -> dict[str, Layout]:
    """The tensors of each section: a tensor belongs to the first with a pattern that fits it."""
    names: dict[str, list[str]] = {section.name: [] for section in sections}
    for tensor in layout.names:
        fitting = (
            s.name for s in sections if any(fnmatchcase(tensor, pattern) for pattern in s.tensors)
        )
        first = next(fitting, None)
        if first is None:
            raise InvalidValueError(
                f"tensor {tensor!r} fits no pattern of clipping.groups; every tensor must be in "
                'one, and a last group with the pattern "*" takes the rest'
            )
        names[first].append(tensor)
    for section in sections:
        if not names[section.name]:
            raise InvalidValueError(
                f"group {section.name!r} has no tensor that fits {list(section.tensors)} and no "
                f"group before it; the tensors are {list(layout.names)}"
            )
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    return {
        name: Layout(tuple(tensors), tuple(shapes[t] for t in tensors))
        for name, tensors in names.items()
    }


def _named(section: GroupSection, groups: tuple[VectorGroup, ...]) -> tuple[VectorGroup, ...]:
    """The groups with the section's name, before that of the part where there are several."""
    if section.strategy != "per-layer":
        return tuple(replace(group, name=section.name) for group in groups)
    return tuple(replace(group, name=f"{section.name}/{group.name}") for group in groups)


def _groups_of(
    section: ClippingSection | GroupSection, norm: float, layout: Layout
) -> tuple[VectorGroup, ...]:
    match section.strategy:
        case "flat":
            return flat(layout, norm)
        case "per-layer":
            parts = (
                layers(layout)
                if section.parts == "layer"
                else {name: (name,) for name in layout.names}
            )
            match section.split:
                case "equal":
                    norms: Mapping[str, float] = equal_split(parts, norm)
                case "dimension":
                    norms = split_by_dimension(layout, parts, norm)
                case given:
                    norms = given
            return per_layer(layout, parts, norms)
        case "joint":
            scales = section.scales
            return joint(
                layout, norm, scales_by_dimension(layout) if scales == "dimension" else scales
            )


def _shares(
    noise: NoiseSection, layout: Layout, groups: tuple[VectorGroup, ...]
) -> tuple[float, ...]:
    if isinstance(noise.allocation, str):
        return _within(noise, layout, groups)
    return given_shares(groups, noise.allocation)


def _within(
    noise: NoiseSection, layout: Layout, groups: tuple[VectorGroup, ...]
) -> tuple[float, ...]:
    if noise.allocation == "dimension":
        return dimension_shares(layout, groups)
    return proportional_shares(groups)


def build_task(
    model: str,
    options: Mapping[str, object],
    seed: int,
    loss: str,
    metrics: Iterable[str] = (),
) -> Task:
    """The task of these names, with equal initial and frozen parameters wherever it is built.

    Args:
        model: one of `MODELS`, or the import path of a function that returns a module.
        options: arguments of that function.
        seed: of the parameters.
        loss: one of `LOSSES`, or an import path.
        metrics: names of metrics; those that are import paths become the task's own.

    Raises:
        ModelError: a name is unknown, or what it names cannot be used.
        InvalidValueError: an option does not fit.
        OSError: the model's function raises it.
    """
    return Task(build_model(model, options, seed), find_loss(loss), metrics=own_metrics(metrics))


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
    check_metrics(task, metrics, plan.mechanism.clipping, few)
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
