"""From settings to an experiment that is resolved and checked.

`build` reads a configuration, which names everything; `resolve` takes the values themselves, and
`settings_of` is the way back: what a configuration says of values. Both ways meet in `resolve`.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from inspect import signature
from typing import TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.accounting.accountant import Bound
from fedpriv.accounting.registry import accountant_named
from fedpriv.config import ClippedSection, ClippingSection, Config, parse_config
from fedpriv.data.population import Population, UserStore, load_population
from fedpriv.engine.losses import LOSSES
from fedpriv.engine.metrics import check_metrics, metric, own_metrics
from fedpriv.engine.task import Task, check_task, running_norms
from fedpriv.engine.transport import InProcessTransport, device_named
from fedpriv.errors import InvalidValueError
from fedpriv.importing import (
    Function,
    call_imported,
    check_options,
    import_function,
    raised_with,
)
from fedpriv.ledger.budget import PrivacyBudget
from fedpriv.ledger.events import RoundEvent
from fedpriv.mechanism import (
    CLIPPINGS,
    ClippingPolicy,
    Grouped,
    Mechanism,
    Part,
    Poisson,
)
from fedpriv.models import build_model
from fedpriv.privacy.gaussian_mechanism import AdaptiveClipping, Metric
from fedpriv.privacy.layout import Layout
from fedpriv.privacy.noise import Entropy, OperatingSystemEntropy, SeededEntropy
from fedpriv.privacy.query import Averaging
from fedpriv.privacy.round import LocalTraining
from fedpriv.training.optimizers import SERVER_OPTIMIZERS, ServerOptimizer
from fedpriv.training.plan import BATCH_NORM_METRIC, RunningStatistics, TrainingPlan
from fedpriv.training.rounds import OnRound, ServerState, initial_state

HeldOut = Mapping[str, npt.NDArray[np.generic]]
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Enrolled:
    """What a plan needs to know of the enrolled users.

    Attributes:
        name: of the population, as in the ledger.
        users: N, how many.
    """

    name: str
    users: int


@dataclass(frozen=True)
class Experiment:
    """Everything that a run needs, resolved and checked.

    Attributes:
        config: the settings, with run and noise multiplier filled in.
        held_out: rows of no enrolled user, to measure the model on.
        task: model and loss.
        plan: the training plan.
        budget: what all runs of the ledger may spend together.
        entropy: where cohorts and noise come from.
        device: where to train and evaluate.
        on_round: who is told of each released round, by name.
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
    """The experiment that a configuration describes; args and errors as for `resolve`."""
    model = config.model
    return resolve(
        config,
        run,
        enrolled,
        held_out,
        build_task(model.name, model.options, model.seed, model.loss, config.metrics.report),
        mechanism_of(config),
        local_training(config),
        server_optimizer(config),
        f"{model!r} seed={config.seed}",
        spent,
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

    Args:
        config: rounds, seed, engine, output and callbacks; the rest is a record of the values.
        run: name of the run in the ledger, if the configuration does not say.
        enrolled: whom the plan is for.
        held_out: rows of no enrolled user.
        task: model and loss.
        mechanism: without a noise multiplier it is calibrated to its budget and `config.rounds`.
        local: how each user trains.
        optimizer: how the server steps.
        description: binds checkpoints to model and data; see `TrainingPlan`.
        spent: what the ledger holds already; calibrated noise keeps all of it together within ε.

    Raises:
        FedprivError: something does not fit; the message says what.
    """
    device = device_named(config.engine.device)
    few = {name: column[:4] for name, column in held_out.items()}
    check_task(task, few)
    budget = budget_of(mechanism)
    if mechanism.noise_multiplier is None and mechanism.epsilon is not None:
        if not budget.admits(spent):
            raise InvalidValueError(
                f"the ledger holds ε = {budget.epsilon_of(spent):.4g} at delta {budget.delta} "
                f"already; privacy.epsilon is {mechanism.epsilon} and must be larger"
            )
        mechanism = mechanism.calibrate(
            epsilon=mechanism.epsilon, delta=budget.delta, rounds=config.rounds, spent=spent
        )
    layout = Layout.of(task.parameters())
    grouping = mechanism.clipping.grouping(layout, mechanism.allocation)
    statistics = _statistics(mechanism, task)
    metrics = tuple(
        _metric(n, numbers, task, statistics) for n, numbers in mechanism.metrics.items()
    )
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
    """Budget of a mechanism; without limit where there is no privacy to keep.

    Raises:
        InvalidValueError: δ is absent, or the accountant gives no upper bound.
    """
    delta, accountant = mechanism.delta, mechanism.accountant
    if delta is None:
        raise InvalidValueError("delta is absent; it must be in (0, 1), best far below 1/N")
    if accountant_named(accountant).epsilon([], delta).bound is Bound.ESTIMATE:
        raise InvalidValueError(
            f"privacy.accountant is {accountant!r}, whose estimate can be below the truth; "
            "a budget needs an upper bound, such as that of tight"
        )
    limit = mechanism.epsilon
    if limit is None or mechanism.unsafe_no_privacy:
        limit = float("inf")
    return PrivacyBudget(limit, delta, accountant_named(accountant).upper_epsilon)


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
        found = metric(f"task:{name}", **numbers)  # the kind that a function of the task has
        return replace(found, name=name)
    return metric(name, **numbers)


def _statistics(mechanism: Mechanism, task: Task) -> RunningStatistics | None:
    """How running statistics move: by the metric of that name, if it is asked for."""
    layers = running_norms(task.model)
    if BATCH_NORM_METRIC not in mechanism.metrics or not layers:
        return None
    channels = tuple(layer.channels for layer in layers.values())
    return RunningStatistics(tuple(layers), channels, tuple(e.eps for e in layers.values()))


# From a configuration to values.


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
    return Task(build_model(model, options, seed), loss, metrics=own_metrics(metrics))


def mechanism_of(config: Config) -> Mechanism:
    """The mechanism of a configuration, not calibrated yet."""
    privacy, averaging = config.privacy, config.averaging
    adaptive = config.clipping.adaptive
    return Mechanism(
        sampling=Poisson(privacy.sampling_probability),
        clipping=clipping_policy(config.clipping),
        noise_multiplier=privacy.noise_multiplier,
        epsilon=privacy.epsilon,
        delta=privacy.delta,
        allocation=config.noise.allocation,
        adaptive=AdaptiveClipping(**adaptive.model_dump()) if adaptive else None,
        averaging=Averaging(averaging.cap, averaging.total_weight, averaging.floor),
        metrics=config.metrics.report,
        metrics_share=config.metrics.share,
        accountant=privacy.accountant,
        unsafe_no_privacy=privacy.unsafe_no_privacy,
    )


def clipping_policy(section: ClippingSection) -> ClippingPolicy:
    """The policy of a section: one for all tensors, or one for each of its groups."""
    if not section.groups:
        return _clipping(section, section.norm)
    return Grouped({g.name: Part(g.tensors, _clipping(g, g.norm), g.share) for g in section.groups})


def _clipping(section: ClippedSection, norm: float | None) -> ClippingPolicy:
    what = f"clipping {section.strategy!r}"
    known: Mapping[str, Function] = CLIPPINGS
    make = known.get(section.strategy) or import_function(what, section.strategy, InvalidValueError)
    given = {"norm": norm, **{key: getattr(section, key) for key in ("parts", "split", "scales")}}
    taken = {k: v for k, v in given.items() if v is not None and k in signature(make).parameters}
    return _made(what, partial(make, **taken), {}, ClippingPolicy)  # type: ignore[type-abstract]


def local_training(config: Config) -> LocalTraining:
    """Local training of a configuration."""
    local = config.local.model_dump()
    if local["batch_size"] == "all":
        local["batch_size"] = None
    return LocalTraining(**local)


def server_optimizer(config: Config) -> ServerOptimizer:
    """Server optimiser of a configuration."""
    name = config.server.optimizer
    what = f"server optimiser {name}"
    known: Mapping[str, Function] = SERVER_OPTIMIZERS
    make = known.get(name) or import_function(what, name, InvalidValueError)
    return _made(what, make, config.server.options, ServerOptimizer)  # type: ignore[type-abstract]


def _made(what: str, make: Function, options: Mapping[str, object], kind: type[_Made]) -> _Made:
    """What a class named by a configuration makes of its options."""
    check_options(what, make, options, InvalidValueError)
    made = call_imported(what, make, options, InvalidValueError, raised_with)
    if not isinstance(made, kind):
        raise InvalidValueError(f"{what} is a {type(made).__name__}; it must be a {kind.__name__}")
    return made


# From values to a configuration: what is written of a run whose parts were given as objects.


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

    Args:
        name: of the run.
        population: its users.
        task: its model and loss.
        mechanism: its mechanism.
        local: its local training.
        optimizer: its server optimiser.
        others: rounds, seed and whole sections, as in a configuration.

    Raises:
        InvalidValueError: a value is out of range.
    """
    sampling, averaging = mechanism.sampling.of(population.users.population), mechanism.averaging
    allocation = mechanism.allocation
    trained = {f.name: getattr(local, f.name) for f in fields(LocalTraining)}
    metrics = {n: {k: _plain(v) for k, v in m.items()} for n, m in mechanism.metrics.items()}
    table: dict[str, object] = {
        "name": name,
        "data": {"name": population.name},
        "model": {
            "name": path_of(type(task.model)),
            "options": {"parameters": _digest({**task.parameters(), **task.statistics()})},
            "loss": next((n for n, f in LOSSES.items() if f is task.loss), path_of(task.loss)),
        },
        "local": trained | {"batch_size": trained["batch_size"] or "all"},
        "server": {
            "optimizer": _name_of(type(optimizer), SERVER_OPTIMIZERS),
            "options": {k: v for k, v in vars(optimizer).items() if isinstance(v, int | float)},
        },
        "privacy": {
            "sampling_probability": sampling.sampling_probability,
            "delta": mechanism.delta,
            "epsilon": mechanism.epsilon,
            "noise_multiplier": mechanism.noise_multiplier,
            "accountant": mechanism.accountant,
            "unsafe_no_privacy": mechanism.unsafe_no_privacy,
        },
        "clipping": {
            **_clipping_table(mechanism.clipping),
            "adaptive": asdict(mechanism.adaptive) if mechanism.adaptive else None,
        },
        "noise": {"allocation": allocation if isinstance(allocation, str) else dict(allocation)},
        "metrics": {"share": mechanism.metrics_share, "report": metrics},
        "averaging": {
            "weights": "equal" if averaging.cap is None else "examples",
            **asdict(averaging),
        },
    }
    for key, value in others.items():
        section = table.get(key)
        if isinstance(section, dict) and isinstance(value, dict):
            value = section | value  # noqa: PLW2901 - a section is changed key by key
        table[key] = value
    return parse_config(cast("Mapping[str, object]", _without_none(table)), "settings")


def description_of(task: Task, local: LocalTraining, mechanism: Mechanism, seed: int | None) -> str:
    """Whatever of values decides the result and is in no other part of a plan.

    Initial values of trained parameters are left out: a run goes on with those of its checkpoint.
    """
    kinds = [path_of(type(part)) for part in (local, mechanism.sampling)]
    frozen = {name: t.numpy() for name, t in task.constants(torch.device("cpu")).items()}
    moved = task.statistics()
    fixed = _digest({name: t for name, t in frozen.items() if name not in moved})
    return f"{task.model} {fixed} {path_of(task.loss)} {kinds} seed={seed}"


def _clipping_table(policy: ClippingPolicy) -> dict[str, object]:
    if isinstance(policy, Grouped):
        groups = [
            {
                "name": name,
                "tensors": list(part.tensors),
                "share": part.share,
                **_clipping_table(part.clipping),
            }
            for name, part in policy.parts.items()
        ]
        return {"groups": groups}
    keys = ("norm", "parts", "split", "scales")
    given = {key: _plain(getattr(policy, key)) for key in keys if hasattr(policy, key)}
    return {"strategy": _name_of(type(policy), CLIPPINGS), **given}


def _plain(value: object) -> object:
    """A value as TOML can hold it."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, tuple | list) else value


def _without_none(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def _name_of(kind: type, known: Mapping[str, type]) -> str:
    return next((name for name, each in known.items() if each is kind), path_of(kind))


def path_of(thing: object) -> str:
    """Import path of a class or a function, for people to read."""
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    return f"{getattr(thing, '__module__', '?')}:{name}"


def _digest(tensors: HeldOut) -> str:
    """SHA-256 of named arrays."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        digest.update(np.ascontiguousarray(tensor).tobytes())
    return digest.hexdigest()
