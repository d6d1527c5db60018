"""From a configuration to the values that a run is made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fedpriv.accounting.accountant import Bound
from fedpriv.accounting.accountants import accountant_named
from fedpriv.accounting.budget import PrivacyBudget
from fedpriv.accounting.calibration import calibrate_noise_multiplier
from fedpriv.accounting.events import RoundEvent
from fedpriv.config import ClippingSection, Config, LocalSection, ServerSection
from fedpriv.data.population import Population
from fedpriv.data.registry import load_population
from fedpriv.engine.task import Task, check_task
from fedpriv.engine.transport import InProcessTransport, device_named
from fedpriv.errors import InvalidValueError, known_names
from fedpriv.federated.optimizers import FedAdaptive, FedAvg, FedAvgM, SecondMoment, ServerOptimizer
from fedpriv.federated.plan import TrainingPlan
from fedpriv.federated.round import ServerState, initial_state
from fedpriv.federated.transport import LocalTraining
from fedpriv.losses import find_loss
from fedpriv.models import build_model
from fedpriv.privacy.allocation import dimension_shares, given_shares, proportional_shares
from fedpriv.privacy.entropy import Entropy, OperatingSystemEntropy, SeededEntropy
from fedpriv.privacy.groups import (
    VectorGroup,
    equal_split,
    flat,
    joint,
    layers,
    per_layer,
    scales_by_dimension,
    split_by_dimension,
)
from fedpriv.privacy.layout import Layout
from fedpriv.privacy.sampling import PoissonSampling


@dataclass(frozen=True)
class Experiment:
    """Everything that a run needs, resolved and checked.

    Attributes:
        config: the configuration with run and noise multiplier filled in.
        population: enrolled users and held-out rows.
        task: model and loss.
        plan: the training plan.
        budget: what all runs of the ledger may spend together.
        entropy: where cohorts and noise come from.
        device: where to train and evaluate.
    """

    config: Config
    population: Population
    task: Task
    plan: TrainingPlan
    budget: PrivacyBudget
    entropy: Entropy
    device: torch.device

    @property
    def initial_state(self) -> ServerState:
        """State before the first round."""
        return initial_state(self.plan, self.task.parameters())

    @property
    def transport(self) -> InProcessTransport:
        """Transport that trains the population in this process."""
        memory = self.config.engine.chunk_mebibytes * 2**20
        return InProcessTransport(self.task, self.population.users, self.device, memory)


def build(config: Config, run: str) -> Experiment:
    """Load data and model, calibrate the noise if asked to, and check that all of it fits.

    Args:
        config: the configuration.
        run: name of the run in the ledger, if the configuration does not say.

    Raises:
        FedprivError: something does not fit; the message says what.
    """
    device = device_named(config.engine.device)
    population = load_population(config.data.name, config.data.options)
    model = build_model(config.model.name, config.model.options, config.model.seed)
    task = Task(model, find_loss(config.model.loss))
    check_task(task, {name: column[:4] for name, column in population.test.items()})
    budget = privacy_budget(config)
    layout = Layout.of(task.parameters())
    groups = vector_groups(config.clipping, layout)
    plan = TrainingPlan(
        run=config.run or run,
        population=population.name,
        rounds=config.rounds,
        layout=layout,
        groups=groups,
        noise_shares=_noise_shares(config, layout, groups),
        noise_multiplier=_noise_multiplier(config),
        sampling=PoissonSampling(population.users.population, config.privacy.sampling_probability),
        local=_local_training(config.local),
        optimizer=_optimizer(config.server),
        description=f"{config.model!r} seed={config.seed}",
    )
    if config.privacy.noise_multiplier is None:
        plan = _within(plan, budget)
    privacy = config.privacy.model_copy(update={"noise_multiplier": plan.noise_multiplier})
    config = config.model_copy(update={"run": plan.run, "privacy": privacy})
    entropy = OperatingSystemEntropy() if config.seed is None else SeededEntropy(config.seed)
    return Experiment(config, population, task, plan, budget, entropy, device)


def privacy_budget(config: Config) -> PrivacyBudget:
    """Budget of a configuration; without limit where there is no privacy to keep."""
    privacy = config.privacy
    accountant = accountant_named(privacy.accountant)
    if accountant.epsilon([], privacy.delta).bound is Bound.ESTIMATE:
        raise InvalidValueError(
            f"privacy.accountant is {privacy.accountant!r}, whose estimate can be below the truth; "
            "a budget needs an upper bound, such as that of pld"
        )

    def loss(events: Sequence[RoundEvent], delta: float) -> float:
        return accountant.epsilon(events, delta).epsilon

    limit = privacy.epsilon
    if limit is None or privacy.unsafe_no_privacy:
        limit = float("inf")
    return PrivacyBudget(limit, privacy.delta, loss)


def vector_groups(clipping: ClippingSection, layout: Layout) -> tuple[VectorGroup, ...]:
    """Vector groups of a clipping section.

    Raises:
        InvalidValueError: given norms or scales do not name the parts or tensors there are.
    """
    match clipping.strategy:
        case "flat":
            return flat(layout, clipping.norm)
        case "per-layer":
            parts = (
                layers(layout)
                if clipping.parts == "layer"
                else {name: (name,) for name in layout.names}
            )
            match clipping.split:
                case "equal":
                    norms: Mapping[str, float] = equal_split(parts, clipping.norm)
                case "dimension":
                    norms = split_by_dimension(layout, parts, clipping.norm)
                case given:
                    norms = given
            return per_layer(layout, parts, norms)
        case "joint":
            scales = clipping.scales
            return joint(
                layout,
                clipping.norm,
                scales_by_dimension(layout) if scales == "dimension" else scales,
            )


def _noise_multiplier(config: Config) -> float:
    """Noise multiplier of a configuration, calibrated to ε if it is not given."""
    privacy = config.privacy
    if privacy.noise_multiplier is not None or privacy.epsilon is None:
        return privacy.noise_multiplier or 0.0
    return calibrate_noise_multiplier(
        privacy.epsilon,
        privacy.delta,
        config.rounds,
        privacy.sampling_probability,
        privacy.accountant,
    )


def _within(plan: TrainingPlan, budget: PrivacyBudget) -> TrainingPlan:
    """Plan with the noise raised until all its rounds fit into the budget.

    The event's own noise multiplier may differ from the calibrated one by a rounding, and the
    accountant's last digit with it.
    """
    while not budget.admits([replace(plan.mechanism.event, count=plan.rounds)]):
        plan = replace(plan, noise_multiplier=plan.noise_multiplier * (1.0 + 1e-4))
    return plan


def _noise_shares(
    config: Config, layout: Layout, groups: tuple[VectorGroup, ...]
) -> tuple[float, ...]:
    match config.noise.allocation:
        case "proportional":
            return proportional_shares(groups)
        case "dimension":
            return dimension_shares(layout, groups)
        case weights:
            return given_shares(groups, weights)


def _local_training(local: LocalSection) -> LocalTraining:
    return LocalTraining(
        learning_rate=local.learning_rate,
        batch_size=None if local.batch_size == "all" else local.batch_size,
        epochs=local.epochs,
        steps=local.steps,
        momentum=local.momentum,
        proximal=local.proximal,
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
