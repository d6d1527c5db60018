"""Turn a configuration or values into a checked experiment, and values into a configuration."""

import hashlib
import json
import logging
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch

from fedpriv.audit.canaries import check_auditable
from fedpriv.data.columns import Fields
from fedpriv.data.places import in_places, refuse_shared
from fedpriv.data.population import Population, cut_up, load_population
from fedpriv.engine.adapters import with_adapters
from fedpriv.engine.measuring import check_metrics
from fedpriv.engine.reading import population_for, rows_for
from fedpriv.engine.released import check_can_be_released, sha256_of
from fedpriv.engine.roads import Road
from fedpriv.engine.task import LOSSES, HeldOut, Task, running_norms
from fedpriv.engine.task_checks import check_learns, check_targets, check_task
from fedpriv.engine.trainer import SimulationOnlyDropped, blank
from fedpriv.engine.transport import Engine, InProcessTransport, chunk_memory_of, device_named
from fedpriv.errors import DataError, InvalidValueError, ModelError
from fedpriv.evaluation.federated import FederatedEvaluation, UserEvaluation, kept_apart
from fedpriv.evaluation.held_out import check_held_out
from fedpriv.evaluation.personalisation import HeldOutUsers, Personalisation
from fedpriv.experiment.config import Config, local_table, parse_config, plain, tables_of
from fedpriv.experiment.mechanism import AsIf, Mechanism, Numbers, Poisson, given
from fedpriv.experiment.models import build_model
from fedpriv.experiment.trackers import TRACKERS, Callback, Tracker
from fedpriv.ledger.events import PrivacyBudget, RoundEvent, Unit
from fedpriv.measures.metrics import metric, own_metrics
from fedpriv.privacy.gaussian_mechanism import Metric
from fedpriv.privacy.layout import Layout
from fedpriv.privacy.noise import Entropy, OperatingSystemEntropy, SeededEntropy
from fedpriv.privacy.round import RoundAttempt
from fedpriv.privacy.sampling import CanarySampling, ExampleSampling, Sampling
from fedpriv.support.checks import epsilon_up, text_down
from fedpriv.support.importing import Choice, call_imported, import_function, path_of, raised_with
from fedpriv.support.logs import SIMULATION_ONLY, one_line
from fedpriv.training.local import FedRecon
from fedpriv.training.optimizers import ServerOptimizer, try_out
from fedpriv.training.plan import BATCH_NORM_METRIC, RunningStatistics, TrainingPlan
from fedpriv.training.request import LocalTraining
from fedpriv.training.rounds import (
    OnRound,
    ServerState,
    evaluation_run,
    initial_state,
    request_to_nobody,
)

_log = logging.getLogger(__name__)
_TRACKER = Choice[Tracker]("trackers", TRACKERS, Tracker)


@dataclass(frozen=True)
class Method:
    """The training of a model, which the arms of a study may vary."""

    task: Task
    mechanism: Mechanism
    local: LocalTraining
    server: ServerOptimizer
    personalisation: Personalisation | None = None  # the same for all arms
    origin: str = ""  # determines its result besides the plan; by default digests of the task


@dataclass(frozen=True)
class Experiment:
    """All parts of a run, resolved and checked."""

    config: Config  # with run and noise multiplier filled in
    held_out: HeldOut  # rows of users who are not enrolled, to measure the model on
    task: Task
    plan: TrainingPlan
    budget: PrivacyBudget  # shared by all runs of the ledger
    entropy: Entropy  # of cohorts and noise
    device: torch.device
    enrolled: str = ""  # `digest_of_users` of all users who may be drawn
    classes: tuple[str, ...] = ()  # public names of the classes, "" for classes without a name
    initial_loss: float | None = None  # on held-out rows, if any
    evaluation: UserEvaluation | None = None  # queries to users about released models
    personalised: HeldOutUsers | None = None  # users who personalise released models
    trackers: Mapping[str, Tracker] = field(default_factory=dict)  # follow it from start to end
    # Problems found while it is built and while it runs, one sentence each, with a cure.
    notes: list[str] = field(default_factory=list)

    def naming(self, classes: tuple[str, ...]) -> "Experiment":
        """Return the experiment with the names of a population's classes, if any.

        InvalidValueError: the configuration has others.
        """
        names = self.config.evaluation.classes
        if names and classes and names != classes:
            raise InvalidValueError(
                f"evaluation.classes is {list(names)}, and those of the data are {list(classes)}; "
                "leave it out"
            )
        return replace(self, classes=names or classes)

    @property
    def charges(self) -> list[RoundEvent]:
        """The events of all planned rounds and of evaluations by users."""
        evaluation, rounds = self.evaluation, self.plan.rounds
        return [self.plan.event, *([evaluation.events(rounds)] if evaluation else [])]

    @property
    def initial_state(self) -> ServerState:
        """State before the first round."""
        return initial_state(self.plan, self.task.parameters(), self.task.statistics())


def simulated(
    config: Config, run: str, spent: Sequence[RoundEvent] = ()
) -> tuple[Experiment, InProcessTransport]:
    """Return the experiment on the configured population, and a transport on this machine."""
    return on_population(config, run, population_of(config), spent)


def digest_of_users(ids: Iterable[object] | None) -> str:
    """Return SHA-256 of users' ids by position; `ids` is None if users have only positions."""
    text = json.dumps(None if ids is None else [str(user) for user in ids])
    return hashlib.sha256(text.encode()).hexdigest()


def population_of(config: Config) -> Population:
    """Load the configured population."""
    data = config.simulated_data
    population = load_population(data.name, data.options)
    return replace(population, succeeds=data.succeeds) if data.succeeds else population


SharedRoads = dict[str | int, tuple[Task, dict[Hashable, Road]]]
"""Decisions how users of one population train, by model; another seed makes another model."""


def on_population(
    config: Config,
    run: str,
    population: Population,
    spent: Sequence[RoundEvent] = (),
    method: Method | None = None,
    roads: SharedRoads | None = None,
) -> tuple[Experiment, InProcessTransport]:
    """Return the same as `simulated`, for a loaded population, and perhaps another method.

    If examples or microbatches are the unit of privacy, each is enrolled separately. If users
    evaluate the model, part of their examples is kept from training, and the charges for that count
    as spent. Runs that share `roads` try the shapes of a model only once.
    """
    model = config.model.model_dump_json() if method is None else id(method.task)
    method = _projected(method or method_of(config), config)
    # The task is stored so that no other object gets its id.
    _, model_roads = ({} if roads is None else roads).setdefault(model, (method.task, {}))
    mechanism, earlier = method.mechanism, spent
    population.users.refuse_broken()
    population = population_for(method.task, records_of(population, mechanism))
    evaluation, population = _evaluation(config, run, population, method)
    if evaluation is not None:
        spent = [*earlier, evaluation.events(config.rounds)]
    _check_succession(population, config.privacy.ledger)
    engine, name, users = config.engine, population.ledger_name, population.users.population
    rows = few_rows(population)
    experiment = build(config, run, name, users, population.test, method, spent, rows)
    if evaluation is not None:
        # A resumed run must keep the same examples from training.
        description = f"{experiment.plan.description} held_out={evaluation.asked.held_out}"
        plan = replace(experiment.plan, description=description)
        experiment = replace(experiment, plan=plan, evaluation=evaluation)
        check_budget(experiment, [*earlier, evaluation.events(1)])
    enrolled = digest_of_users(population.users.user_ids)
    classes = population.public_classes if method.task.targets == "y" else ()
    experiment = replace(experiment, enrolled=enrolled).naming(classes)
    experiment.notes.extend(_notes_on(population))
    event, store = experiment.plan.sampling.event(), population.users
    if (k := event.examples_per_user) is not None:
        store = in_places(store, k)
    places = store.population // users  # per user
    return experiment, InProcessTransport(
        experiment.task,
        store,
        experiment.device,
        chunk_memory_of(engine.chunk_mebibytes, experiment.device),
        on_dropped=_naming_the_first(population, mechanism.unit, places, experiment.notes),
        **engine.model_dump(include={"activations", "processes", "path"}),
        timed=config.seed is None,
        # Few cohorts have more users.
        cohort=math.ceil(event.expected_cohort_size + math.sqrt(event.cohort_variance)),
        most_rows=1 if k is not None or mechanism.unit is Unit.EXAMPLE else mechanism.microbatch,
        roads=model_roads,
    )


def _notes_on(population: Population) -> Iterator[str]:
    if copies := population.copies:
        yield (
            f"{SIMULATION_ONLY}: {copies} held-out rows are also rows of users, so figures flatter "
            "the model, and users' rows are treated as public: hold out rows of other people"
        )
    if population.classes and not population.classes_given:
        yield (
            "classes are numbered by the labels of all users, so one user with another label would "
            "change the numbers, which ε does not cover: give classes=[...], a public list"
        )


def _projected(method: Method, config: Config) -> Method:
    """Return the method for the larger population that the users represent, if any."""
    if (larger := config.population.as_if) is None:
        return method
    for name in ("audit", "federated_evaluation"):
        if getattr(config, name) is not None:
            raise InvalidValueError(
                f"as_if is {larger} and {name} is given; it must be absent, since it would need "
                "the users of the larger population"
            )
    if not isinstance(policy := method.mechanism.sampling, Poisson):
        kind = type(policy).__name__
        raise InvalidValueError(f"as_if is {larger} and sampling is {kind}; it must be Poisson")
    as_if = AsIf(policy, larger, config.population.cohort)
    return replace(method, mechanism=replace(method.mechanism, sampling=as_if))


def settled(experiment: Experiment, transport: InProcessTransport) -> tuple[Experiment, Road]:
    """Return the experiment with its users' path, for the files of the run, and their road.

    ModelError or InvalidValueError if they cannot train.
    """
    at, config = RoundAttempt(experiment.plan.run, 1, 0), experiment.config
    road = transport.road(request_to_nobody(experiment.plan, experiment.initial_state, at))
    if road.path == "alone" != config.engine.path:
        cure = "" if "engine.path" in road.why else "; docs/isolation.md says which models can"
        experiment.notes.append(f"users train {road}{cure}")
    return replace(experiment, config=config.changed(engine={"path": road.path})), road


def refuse_if_few_count(experiment: Experiment, transport: InProcessTransport) -> None:
    """Refuse a simulation in which most users would count as zero; a DataError names a reason.

    A few users train for one pass without a charge, so users' data decide whether a *simulation*
    takes place. Deployments never do this.
    """
    plan, at = experiment.plan, RoundAttempt(experiment.plan.run, 1, 0)
    request = request_to_nobody(plan, experiment.initial_state, at)
    whole = plan.sampling.drawn is plan.sampling.unit  # not places of a user, some of them empty
    cure = "nothing is charged: repair data or settings, or give --keep-going, or keep_going=True"
    empty, everyone = int((transport.users.sizes == 0).sum()), transport.users.population
    if whole and 2 * empty > everyone:
        raise DataError(f"{SIMULATION_ONLY}: {empty} of {everyone} users have no rows; {cure}")
    if request.local.epochs:
        request = replace(request, local=replace(request.local, epochs=1))
    flaws = transport.simulation_only_look(request)
    zeros = [flaw for flaw in flaws if flaw]
    if 2 * len(zeros) > len(flaws):
        user, why = transport.users.id_of(zeros[0].user), one_line(zeros[0].reason).rstrip(".")
        name = f"{plan.sampling.unit} {user}" if whole else f"an example of a {plan.sampling.unit}"
        raise DataError(
            f"{SIMULATION_ONLY}: {len(zeros)} of the {len(flaws)} that were tried before the first "
            f"round count as zero, such as {name}, as {why}; {cure}"
        )


def _evaluation(
    config: Config, run: str, population: Population, method: Method
) -> tuple[UserEvaluation | None, Population]:
    """Return how users evaluate models, if they do, and the population with only training data."""
    if (section := config.federated_evaluation) is None:
        return None, population
    asked, task = FederatedEvaluation(**section.model_dump()), method.task
    metrics = tuple(_metric(*item, task, None) for item in asked.report.items())
    training, held_out = kept_apart(population.users, asked.held_out)
    personalisation, name = method.personalisation, evaluation_run(config.run or run)
    users = population.users if personalisation else held_out
    evaluation = UserEvaluation(asked, name, users, task, metrics, personalisation)
    evaluation.check(few_rows(population))
    return evaluation, replace(population, users=training)


def _check_succession(population: Population, ledger: str | None) -> None:
    """Refuse a population that succeeds another without a ledger to continue."""
    if population.succeeds and not Path(ledger or "?").is_file():
        raise InvalidValueError(
            f"the population succeeds {population.succeeds!r} and privacy.ledger is {ledger}; it "
            "must be the ledger of that population"
        )


def few_rows(population: Population) -> Fields:
    """Return rows to try a task on: held-out rows or one of zeros, never an enrolled user's."""
    return {n: column[:4] for n, column in population.test.items()} or blank(population.users)


def _naming_the_first(
    population: Population, unit: Unit, places: int, notes: list[str]
) -> Callable[[SimulationOnlyDropped], None]:
    """Log and note the first user, or record of another unit, that counts as zero in a simulation.

    If users have several places, the record is an example of a user.
    """
    reported = list[SimulationOnlyDropped]()
    what = str(unit) if places == 1 else f"an example of {unit}"

    def warn(dropped: SimulationOnlyDropped) -> None:
        if not reported:
            reported.append(dropped)
            user = population.users.id_of(dropped.user // places)
            notes.append(
                f"{SIMULATION_ONLY}: {what} {user} counts as zero: "
                f"{one_line(dropped.reason)}; others are not named"
            )
            _log.warning("%s", notes[-1])

    return warn


def records_of(population: Population, mechanism: Mechanism) -> Population:
    """Return the population of the records that the mechanism protects."""
    if mechanism.unit is Unit.USER:
        if not isinstance(
            mechanism.sampling.of(population.users.population, mechanism.unit), ExampleSampling
        ):
            refuse_shared(population.users, "whole users are drawn")
        return population
    size = f" of {mechanism.microbatch}" if mechanism.microbatch else ""
    return cut_up(population, mechanism.microbatch or 1, f"unit {mechanism.unit}{size}")


def build(
    config: Config,
    run: str,
    population: str,
    users: int,
    held_out: HeldOut,
    method: Method,
    spent: Sequence[RoundEvent] = (),
    few: Fields | None = None,
) -> Experiment:
    """Calibrate the noise if it is not set, and check that all parts of a run fit together.

    Besides the method, the configuration only decides rounds, seed, engine, output and trackers.
    `population` and, if the configuration has none, `run` are the names in the ledger; `users` is
    N. The task is tried on a few rows, by default held-out ones; without any, only nodes check it,
    and metrics are not allowed. Calibration keeps all rounds, together with those in `spent`,
    within the budget.
    """
    held_out = rows_for(method.task, held_out)
    _check_personal(method)
    device, mechanism = device_named(config.engine.device), method.mechanism.for_users(users)
    method = replace(method, mechanism=mechanism)
    if few is None:
        few = {name: column[:4] for name, column in held_out.items()}
    notes = list[str]()
    personalised, rows, loss = _measured_by(method, held_out, few, device, notes)
    budget = mechanism.budget
    strategy = mechanism.noise.strategy(mechanism.sampling.of(users, mechanism.unit).event())
    mechanism = replace(mechanism, noise=given(strategy))
    mechanism = _calibrated(mechanism, config.rounds, users, spent)
    plan = _plan(config, run, population, users, replace(method, mechanism=mechanism))
    _check_described(plan)
    try_out(plan.optimizer, method.task.parameters())
    check_can_be_released(method.task)
    if plan.metrics:
        check_metrics(method.task, plan.metrics, plan.mechanism.clipping, few)
    if mechanism.rounds == plan.rounds:
        plan = plan.within(budget, spent)
    config = config.with_noise(plan.noise_multiplier, mechanism.noise)
    config = config.changed(clipping={"norm": getattr(mechanism.clipping, "norm", None)})
    return Experiment(
        config=config.model_copy(update={"run": plan.run}),
        held_out=rows,
        initial_loss=loss,
        task=method.task,
        plan=plan,
        budget=budget,
        entropy=OperatingSystemEntropy() if config.seed is None else SeededEntropy(config.seed),
        device=device,
        personalised=personalised,
        trackers=_trackers(config),
        notes=notes,
    )


def _trackers(config: Config) -> dict[str, Tracker]:
    followers = dict[str, Tracker]()
    for path in config.trackers:
        value = ":" in path and import_function(f"trackers {path!r}", path, InvalidValueError)
        if value and not isinstance(value, type):
            followers[path] = Callback(cast(OnRound, value))
        else:
            followers[path] = _TRACKER.build(path, {}, {})
    return followers


def _measured_by(
    method: Method, held_out: HeldOut, few: Fields, device: torch.device, notes: list[str]
) -> tuple[HeldOutUsers | None, HeldOut, float | None]:
    """Return the users who personalise models, if any, the rows to measure, and the initial loss.

    Notes get the problems that are likely to cost accuracy.
    """
    if not few and method.mechanism.metrics:
        raise InvalidValueError(
            "metrics.report asks for metrics; they are checked on held-out rows, so "
            "federation.held_out or data must be given"
        )
    if few:
        if held_out:
            check_targets(method.task, held_out)
        check_task(method.task, few, apart=method.mechanism.unit is not Unit.USER)
    personalisation, personalised = method.personalisation, None
    if personalisation is not None:
        personalised = HeldOutUsers(personalisation, method.task, held_out, device)
        held_out = personalised.rows
    loss = check_held_out(method.task, held_out, device) if held_out else None
    y = held_out.get(method.task.targets, np.empty(0))
    if y.dtype.kind in "biu" and y.ndim == 1 and len(y) > 1 and (y == y[0]).all():
        notes.append(
            f"all {len(y)} held-out targets are {y[0]}, so figures say little: hold out rows of "
            "all classes (a file may be sorted by class)"
        )
    if few:
        clipping = method.mechanism.clipping.grouping(
            Layout.of(method.task.parameters()), method.mechanism.allocation
        )
        norm = math.hypot(*(group.clipping_norm for group in clipping.groups))
        notes += check_learns(method.task, held_out, few, method.local, norm)
    return personalised, held_out, loss


def _plan(config: Config, run: str, population: str, users: int, method: Method) -> TrainingPlan:
    """Return the plan of a run."""
    mechanism, layout = method.mechanism, Layout.of(method.task.parameters())
    kinds = [path_of(type(part)) for part in (method.local, mechanism.sampling)]
    grouping = mechanism.clipping.grouping(layout, mechanism.allocation)
    sampling = _audited(config, mechanism, mechanism.sampling.of(users, mechanism.unit))
    statistics = _statistics(mechanism, method.task)
    metrics = tuple(_metric(*item, method.task, statistics) for item in mechanism.metrics.items())
    return TrainingPlan(
        run=config.run or run,
        population=population,
        rounds=config.rounds,
        layout=layout,
        groups=grouping.groups,
        noise_shares=grouping.shares,
        noise_multiplier=mechanism.noise_multiplier or 0.0,
        sampling=sampling,
        local=method.local,
        optimizer=method.server,
        description=f"{method.origin or _origin(method.task)} {kinds} seed={config.seed}",
        metrics=metrics,
        metrics_share=mechanism.metrics_share if metrics else 0.0,
        contributors_share=mechanism.contributors_share,
        adaptive=mechanism.adaptive,
        averaging=mechanism.averaging,
        statistics=statistics,
        strategy=mechanism.noise.strategy(sampling.event()),
        secure_sum=config.federation.secure_sum if config.federation else None,
        simulated_dropout=config.federation.simulated_dropout if config.federation else 0.0,
    )


def _check_described(plan: TrainingPlan) -> None:
    """Refuse a plan that cannot be serialised, or whose requests cannot be distinguished."""
    _ = plan.digest
    try:
        hash(plan.local)
    except TypeError as error:
        kind = type(plan.local).__name__
        raise InvalidValueError(f"{kind} has a field of an {error}; use tuples") from error


def _audited(config: Config, mechanism: Mechanism, sampling: Sampling) -> Sampling:
    """Return the sampling of cohorts, which also draws canaries if there is an audit."""
    if config.audit is None:
        return sampling
    check_auditable(sampling.event())
    if mechanism.averaging.floor is not None:
        raise InvalidValueError(
            f"audit is given and averaging.floor is {mechanism.averaging.floor}; it must be "
            "absent, since averages would include the canaries"
        )
    if mechanism.noise_multiplier == 0.0:
        raise InvalidValueError(
            "audit is given and there is no noise, so there is no claim that it could refute"
        )
    return CanarySampling(sampling, config.audit.canaries)


def _check_personal(method: Method) -> None:
    """Refuse settings that do not fit personal parameters, or their absence."""
    local, personal, kind = method.local, method.task.personal, type(method.local).__name__
    if isinstance(local, FedRecon) and not personal:
        raise InvalidValueError(
            f"local training is {kind} and the task has no personal parameters; model.personal, "
            "in Python Task(personal=...), must name some"
        )
    if not personal:
        return
    if local.control is not None:
        raise InvalidValueError(
            f"the task has personal parameters and local training is {kind}, whose control "
            "variates need updates of all parameters; it must be another"
        )
    for name in method.mechanism.metrics:
        if name in ("loss", "accuracy", *method.task.metrics):
            raise InvalidValueError(
                f"metrics.report asks for {name!r}, which users measure at the start of a round, "
                "with personal parameters untrained; it must be left out (federated_evaluation "
                "with personalisation measures trained ones)"
            )


def check_measured(experiment: Experiment) -> None:
    """Refuse an experiment without figures on held-out rows."""
    if not experiment.held_out:
        raise InvalidValueError(
            "the population has no held-out rows, so nothing would be measured; it must have some"
        )
    if experiment.task.personal and experiment.personalised is None:
        raise InvalidValueError(
            "the model has personal parameters, which begin untrained, so nothing would be "
            "measured; personalisation must say how held-out users train them"
        )


def check_budget(experiment: Experiment, spent: Sequence[RoundEvent]) -> None:
    """Refuse an experiment whose budget does not pay for one more round."""
    plan, budget = experiment.plan, experiment.budget
    cost = budget.epsilon_of([*spent, plan.mechanism.event])
    if not cost <= budget.epsilon:
        raise InvalidValueError(
            f"the first round would bring ε to {epsilon_up(cost)} at delta {budget.delta}, "
            f"with noise multiplier {text_down(plan.noise_multiplier)}; privacy.epsilon is "
            f"{budget.epsilon} and must be larger, or the noise must be"
        )


def method_of(config: Config, task: Task | None = None) -> Method:
    """Return the training of a configuration's model, or of a given task."""
    report = config.federated_evaluation.report if config.federated_evaluation else {}
    metrics, figures = [*config.metrics.report, *report], config.evaluation.figures
    by, how = config.evaluation.by, None
    if (section := config.personalisation) is not None:
        how = Personalisation(section.local.build(), section.parameters, section.share)
    origin = "" if task else repr(config.model)
    task = task or build_task(**config.model.task, metrics=metrics, figures=figures, by=by)
    return Method(task, config.mechanism(), config.training(), config.server.build(), how, origin)


def _calibrated(
    mechanism: Mechanism, rounds: int, users: int, spent: Sequence[RoundEvent]
) -> Mechanism:
    """Return the mechanism with the least noise within the budget, unless its noise is set."""
    epsilon, budget = mechanism.epsilon, mechanism.budget
    if mechanism.noise_multiplier is not None or epsilon is None:
        return mechanism
    if not budget.admits(spent):
        raise InvalidValueError(
            f"the ledger and evaluations bring ε to {epsilon_up(budget.epsilon_of(spent))} at "
            f"delta {budget.delta} without a round; privacy.epsilon is {epsilon} and must be "
            "larger, or federated_evaluation.noise_multiplier must be"
        )
    return mechanism.calibrate(
        epsilon=epsilon, delta=budget.delta, rounds=rounds, users=users, spent=spent
    )


def _metric(name: str, numbers: Numbers, task: Task, norms: RunningStatistics | None) -> Metric:
    if name == BATCH_NORM_METRIC and norms is not None:
        numbers = {"channels": sum(norms.channels), **numbers}
    if name in task.metrics and ":" not in name:
        return replace(metric(f"task:{name}", **numbers), name=name)  # a function of the task
    return metric(name, **numbers)


def _statistics(mechanism: Mechanism, task: Task) -> RunningStatistics | None:
    """Return how to update running statistics, if the metric for this is reported."""
    layers = running_norms(task.model)
    if BATCH_NORM_METRIC not in mechanism.metrics or not layers:
        return None
    channels, eps = zip(*((layer.channels, layer.eps) for layer in layers.values()), strict=True)
    return RunningStatistics(tuple(layers), channels, eps)


def build_task(
    model: str,
    options: Mapping[str, object],
    seed: int,
    loss: str,
    metrics: Iterable[str] = (),
    adapters: Mapping[str, object] = MappingProxyType({}),
    **others: Any,
) -> Task:
    """Build a task from names, with the same initial and frozen parameters everywhere.

    Metrics that are import paths become the task's own; `adapters` are options of `with_adapters`,
    which draws from the same seed, and `others` further fields of `Task`. The model's function may
    raise an OSError.
    """
    module = build_model(model, options, seed)
    if adapters:
        adapt = partial(with_adapters, module, seed=seed)
        module = call_imported("model.adapters", adapt, adapters, ModelError, raised_with)
    return Task(module, loss, metrics=own_metrics(metrics), **others)


def settings_of(
    name: str,
    population: Population,
    method: Method,
    engine: Engine | None = None,
    ledger: Path | str | None = None,
    **others: object,
) -> Config:
    """Return the configuration of values; `others` are rounds, seed and further sections.

    It contains names of layers and functions, and digests of tensors, but no code.
    """
    task, mechanism = method.task, method.mechanism
    if mechanism.noise_multiplier is None:
        raise InvalidValueError(
            "the mechanism has no noise_multiplier; calibrate(epsilon=..., delta=..., rounds=...) "
            "returns one that has"
        )
    if others.get("rounds") is None and mechanism.rounds is None:
        raise InvalidValueError("rounds is absent; the mechanism was not calibrated for a number")
    if mechanism.delta is None:
        raise InvalidValueError("the mechanism has no delta; it must be in (0, 1)")
    tensors = {**task.parameters(), **task.statistics()}
    how = method.personalisation
    same = ("inputs", "targets", "ignore_index", "personal", "trained", "frozen")
    table: dict[str, Any] = {
        "name": name,
        "rounds": mechanism.rounds,
        "data": {"name": population.name, "succeeds": population.succeeds},
        "population": dict(zip(("as_if", "cohort"), population.projected or (), strict=False)),
        "model": {
            "name": path_of(type(task.model)),
            "options": {
                "origin": hashlib.sha256(_origin(task).encode()).hexdigest(),
                "parameters": sha256_of({name: torch.tensor(p) for name, p in tensors.items()}),
                "figures": sorted((*task.figures, *task.by)),
            },
            "loss": next((n for n, f in LOSSES.items() if f is task.loss), path_of(task.loss)),
            **{key: getattr(task, key) for key in same},
        },
        "engine": asdict(engine or Engine()),
        "personalisation": how and {**vars(how), "local": local_table(how.local)},
        **tables_of(mechanism, method.local, method.server),
    }
    table["privacy"]["ledger"] = ledger and str(ledger)
    return parse_config(plain(table) | plain(others), "settings")


def begun_in_python(config: Config) -> bool:
    """Return whether `settings_of` made a configuration, so that its model cannot be built."""
    return config.model.options.keys() == {"origin", "parameters", "figures"}


def _origin(task: Task) -> str:
    """Return text that determines the result of a task besides plan and trained parameters."""
    statistics, constants = task.statistics(), task.constants(torch.device("cpu")).items()
    frozen = {name: tensor for name, tensor in constants if name not in statistics}
    fields = f"{task.inputs} {task.targets} {task.ignore_index} {task.personal}"
    return f"{task.model} {sha256_of(frozen)} {path_of(task.loss)} {fields}"
