"""Runs on simulated users, from Python values or from a file, and `fedpriv plan`."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from fedpriv.accounting.accountants import epsilon as epsilon_of
from fedpriv.accounting.factorisation import relative_errors
from fedpriv.accounting.fdp import trade_off
from fedpriv.accounting.risks import risks_of
from fedpriv.audit.verdict import Audit
from fedpriv.data.population import Population
from fedpriv.engine.measuring import SimulationOnlyDiagnostics
from fedpriv.engine.task import Task
from fedpriv.engine.transport import Engine, InProcessTransport
from fedpriv.evaluation.federated import FederatedEvaluation
from fedpriv.evaluation.personalisation import Personalisation
from fedpriv.experiment.build import (
    Experiment,
    Method,
    on_population,
    population_of,
    records_of,
    refuse_if_few_count,
    settings_of,
    settled,
    simulated,
)
from fedpriv.experiment.config import load_config, method_left_out
from fedpriv.experiment.mechanism import Mechanism
from fedpriv.experiment.trackers import Tracker, named
from fedpriv.ledger.events import NeighbouringRelation, RoundEvent, SamplingPolicy
from fedpriv.privacy.clipping import IntegerVector
from fedpriv.privacy.gaussian_mechanism import INDEPENDENT
from fedpriv.privacy.layout import Layout, layers
from fedpriv.privacy.round import PartialSum
from fedpriv.report.tables import Column, Table, cohort_text, json_text, print_table, screen
from fedpriv.run import notes
from fedpriv.run.run import Run, RunSetup, spent_in
from fedpriv.run.terminal import execute, telling_where
from fedpriv.support.checks import checked_arguments, epsilon_up, text_down, text_up
from fedpriv.support.disk import with_room
from fedpriv.training.optimizers import ServerOptimizer
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.request import LocalTraining, RoundRequest, Transport
from fedpriv.training.rounds import OnRound


@checked_arguments
def simulate(
    population: Population,
    task: Task,
    mechanism: Mechanism,
    *,
    local: LocalTraining | None = None,
    server: ServerOptimizer | None = None,
    federated_evaluation: FederatedEvaluation | None = None,
    personalisation: Personalisation | None = None,
    audit: Audit | None = None,
    rounds: int | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    keep_going: bool = False,
    start: Path | str | None = None,
    name: str = "run",
    seed: int | None = None,
    ledger: Path | str | None = None,
    evaluate_every: int = 1,
    checkpoint_every: int = 1,
    trackers: Sequence[Tracker | OnRound] = (),
    simulation_only: bool = False,
    engine: Engine | None = None,
    quiet: bool = False,
) -> Run:
    """Train a model on a population, under differential privacy for each user, or another unit.

    Terminals and notebooks show the progress. An interrupted run continues with `resume=True` and
    the same arguments; earlier releases stay charged.

    >>> import tempfile, numpy as np, torch, fedpriv
    >>> x, y = np.eye(4, dtype=np.float32).repeat(50, 0), np.arange(4).repeat(50)
    >>> ids = np.arange(200)
    >>> people = fedpriv.Population.from_arrays(x, y, ids, held_out=(x, y))
    >>> mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0))
    >>> mechanism = mechanism.calibrate(epsilon=8.0, delta=1e-3, rounds=2)
    >>> task = fedpriv.Task(torch.nn.Linear(4, 4), loss="cross-entropy")
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = fedpriv.simulate(
    ...         people, task, mechanism, local=fedpriv.SGD(1.0, epochs=1),
    ...         server=fedpriv.FedAvg(), out=f"{folder}/run", quiet=True,
    ...     )
    ...     len(run.rounds), run.epsilon <= 8.0
    (2, True)

    Arguments besides the population and the task:

    * mechanism: with noise, from `Mechanism.calibrate` or `Mechanism.with_noise`. The guarantee
      protects its unit: each user, each example or each microbatch of the population.
    * local: how users train, by default SGD(0.3, batch_size=32, epochs=1); leave it out for other
      units, whose update is one gradient.
    * server: how the server steps, by default FedAdam(0.03) without a clipping norm, and FedAvg()
      with one. All defaults are those of a file, see docs/choosing-settings.md.
    * federated_evaluation: users evaluate released models on examples excluded from training. Its
      queries are charged too; a calibrated mechanism is calibrated again to the remaining budget.
    * personalisation: held-out users personalise released models before they measure them, and so
      do users in a federated evaluation.
    * audit: adds invented users, and bounds ε from below by the run's own releases: `Run.audit`.
    * rounds: T; by default the number that the mechanism was calibrated for.
    * out: folder of the run; by default a new one under runs/.
    * resume: continue the run in `out`, or start it if there is none.
    * keep_going: continue even if too few users count. Otherwise the run is refused before its
      first round, or ends once noised counts of contributors say so; see `Run.warnings`.
    * start: folder of a run; this run starts from its model, and from the state of its server
      optimiser if that has the same class. This run charges the same ledger, and a calibrated
      mechanism is calibrated again to the rest of its ε there.
    * name: begins the name of the run in the ledger.
    * seed: makes the run repeatable; the guarantee then does not hold against those who know it.
    * ledger: a ledger shared by runs on the same users; by default one in the folder of the run.
    * evaluate_every: rounds between evaluations on the held-out rows.
    * checkpoint_every: rounds between checkpoints.
    * trackers: informed when the run starts, after each release and when it ends; functions are
      called with each `RoundResult`.
    * simulation_only: also record true figures of each round, which no guarantee covers.
    * engine: where users train and with how many processes, by default on a GPU if there is one,
      or in as many processes as torch has threads. With processes=1 nothing is forked.
    * quiet: print nothing.
    """
    followers = named(trackers)
    method = Method(task, mechanism, *method_left_out(mechanism, local, server), personalisation)
    output = {"evaluate_every": evaluate_every, "checkpoint_every": checkpoint_every}
    sections = {
        "output": output | {"simulation_only": simulation_only},
        "federated_evaluation": federated_evaluation and asdict(federated_evaluation),
        "audit": audit,
    }
    numbers = {"rounds": rounds, "seed": seed}
    config = settings_of(name, population, method, engine, ledger, **numbers, **sections)
    place, source = (Path(path) if path else None for path in (out, start))
    setup = RunSetup.at(config, place, resume=resume, keep_going=keep_going, start=source)
    if setup.resuming and mechanism.rounds:  # the run keeps the noise that it started with
        noise_multiplier = setup.config.privacy.noise_multiplier
        mechanism = replace(mechanism, noise_multiplier=noise_multiplier, rounds=None)
    elif (federated_evaluation or start) and mechanism.rounds:
        mechanism = replace(mechanism, noise_multiplier=None)
    method = replace(method, mechanism=mechanism)
    console = screen(quiet=quiet)
    events = setup.spent if federated_evaluation or start else ()
    experiment, transport = on_population(setup.config, setup.run, population, events, method)
    return in_process(setup, replace(experiment, trackers=followers), transport, console)


def run_simulation(file: Path, assignments: list[str], out: Path | None, **how: Any) -> Run:
    """Run the experiment of a file in this process, and print its result; see `RunSetup.at`."""
    setup, console = RunSetup.at(load_config(file, assignments), out, **how), screen()
    experiment, transport = simulated(setup.config, setup.run, setup.spent)
    return in_process(setup, experiment, transport, console)


def in_process(
    setup: RunSetup, experiment: Experiment, transport: InProcessTransport, console: Console
) -> Run:
    """Run an experiment in its folder, with users who train in this process."""
    chosen: Transport = transport
    if experiment.config.output.simulation_only:
        append = setup.folder.append_simulation_only
        chosen = ObservedTransport(transport, experiment.plan, append)
    with telling_where(setup, console):
        experiment, road = settled(experiment, transport)
        if not (setup.resuming or setup.keep_going):
            refuse_if_few_count(experiment, transport)
    if road.path == "together":  # otherwise a note says so
        console.print(f"users train {road}")
    return execute(setup, experiment, lambda *_: chosen, console)


class ObservedTransport(Transport):
    """A simulation's transport that also calls `tell` with true figures of each round."""

    def __init__(
        self,
        transport: InProcessTransport,
        plan: TrainingPlan,
        tell: Callable[[Mapping[str, object]], None],
    ) -> None:
        self._diagnosed: list[SimulationOnlyDiagnostics] = []
        self._transport = replace(transport, observer=self._diagnosed.append)
        self._plan, self._tell = plan, tell

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the partial sums of a round, then report its figures."""
        total = np.zeros(request.clipping.layout.dimension, np.int64)
        for partial in self._transport.collect(request):
            total += partial.total
            yield partial
        ratios = _signal_to_noise(self._plan, request, total)
        row = asdict(self._diagnosed.pop()) | {"simulation_only_signal_to_noise": ratios}
        with_room(lambda: self._tell(row))

    def prepare(self, request: RoundRequest) -> None:
        """As the simulation's transport."""
        self._transport.prepare(request)

    def release_resources(self) -> None:
        """As the simulation's transport."""
        self._transport.release_resources()


def _signal_to_noise(
    plan: TrainingPlan, request: RoundRequest, total: IntegerVector
) -> dict[str, float]:
    """Return the ratio of the norm of summed clipped updates to their noise's RMS norm, by layer.

    Both are in the model's units for any kind of clipping; `total` [D] counts steps.
    """
    norms = tuple(group.clipping_norm for group in request.clipping.groups[: len(plan.groups)])
    mechanism = plan.mechanism_at(norms)
    stddevs = mechanism.tensor_stddevs
    signal = mechanism.clipping.layout.unflatten(mechanism.query.averaged(total))
    ratios = {}
    for layer, tensors in layers(Layout.of(request.parameters)).items():
        energy = math.fsum(signal[name].size * stddevs[name] ** 2 for name in tensors)
        power = math.fsum(float(np.square(signal[name]).sum()) for name in tensors)
        ratios[layer] = math.sqrt(power / energy) if energy else math.inf
    return ratios


def show_allocation(file: Path, assignments: list[str], *, as_json: bool = False) -> None:
    """Print the release of a round and the cost of all rounds of an experiment; spend nothing."""
    config = load_config(file, assignments)
    population, ledger = population_of(config), config.privacy.ledger
    name = records_of(population, config.mechanism()).ledger_name
    spent_before = spent_in(Path(ledger), name) if ledger else []
    experiment, _ = on_population(config, "plan", population, spent_before)
    plan, console = experiment.plan, screen()
    groups = [*_groups(plan)]
    if as_json:
        loss = epsilon_of(experiment.charges, config.privacy.delta, config.privacy.accountant)
        content = {
            "rounds": plan.rounds,
            "noise_multiplier": plan.noise_multiplier,
            "users": plan.sampling.population,
            "expected_cohort_size": plan.sampling.expected_cohort_size,
            "epsilon": loss.epsilon,
            "projected_epsilon": _projected(experiment),
            "delta": config.privacy.delta,
            "assumptions": loss.assumptions,
            "risks": risks_of(trade_off(experiment.charges, config.privacy.accountant)),
            "groups": groups,
        }
        print(json_text(content))  # noqa: T201
        return
    at_once = plan.sampling.rounds
    charge = f"{at_once} rounds to a charge" if at_once > 1 else "one charge"
    title = f"One round: {len(plan.shares)} vector groups, one sample, {charge}"
    names = ("group", "tensors", "d", "S", "σ", "share", "signal/noise")
    texts: Sequence[Callable[[Any], str]]
    texts = (str, ", ".join, "{:,}".format, text_up, text_down, "{:.1%}".format, "{:.3g}".format)
    columns = [Column(name, "text" if i < 2 else "number") for i, name in enumerate(names)]
    cells = ((*zip(texts, group.values(), strict=True),) for group in groups)
    rows = [[text(value) for text, value in row] for row in cells]
    print_table(Table(title, columns, rows), console)
    for note in notes.of_settings(experiment):
        console.print(f"warning: {note}", style="yellow")
    for line in (*_facts(experiment, spent_before), "Nothing was spent."):
        console.print(line)


def _projected(experiment: Experiment) -> float | None:
    """Return the ε of all rounds for the projected population; None without a projection."""
    if experiment.plan.sampling.event().projection is None:
        return None
    return experiment.budget.epsilon_of(experiment.charges)


def _facts(experiment: Experiment, spent_before: Sequence[RoundEvent]) -> Iterator[str]:
    """Yield lines on a round's draw and noise, and on the cost of the run.

    Events that a shared ledger held before have a separate line.
    """
    plan, config = experiment.plan, experiment.config
    sampling, weight, privacy = plan.sampling, plan.averaging.total_weight, config.privacy
    scope = "the larger population" if sampling.event().projection else "the whole round"
    yield (
        f"z = {text_down(plan.noise_multiplier)} of {scope}, "
        f"{cohort_text(sampling.event())}, expected cohort {sampling.expected_cohort_size:g}"
    )
    subject, events = f"{plan.rounds} rounds", experiment.charges
    if sampling.rounds > 1:
        subject += f", charged as {plan.event.count} of {sampling.rounds},"
    if experiment.evaluation:
        subject += " and the evaluation"
    loss = epsilon_of(events, privacy.delta, privacy.accountant)
    cost = f"ε = {epsilon_up(loss.epsilon)} at δ = {privacy.delta}"
    yield f"{subject} cost {cost}: {loss.assumptions}"
    if (projected := _projected(experiment)) is not None:
        yield f"As a projection, as if that many were enrolled: ε = {epsilon_up(projected)}."
    yield risks_of(trade_off(events, privacy.accountant)).text(loss.unit)
    if spent_before:
        total = epsilon_of([*spent_before, *events], privacy.delta, privacy.accountant)
        yield f"With what {privacy.ledger} holds, that is ε = {epsilon_up(total.epsilon)}."
    unit = sampling.drawn
    moves = f"{unit} moves the sum of a group"
    if loss.relation is NeighbouringRelation.REPLACE_ONE:
        moves = f"{unit} more or less moves the sum of a group, one that is replaced twice that"
    yield (
        f"S is how far one {moves}, σ the noise on it. Signal/noise "
        "compares the most that an expected cohort can add up to with the norm of the noise."
    )
    if plan.strategy != INDEPENDENT:
        yield _about_strategy(plan)
    if weight is not None:
        yield (
            f"The weights of all enrolled users are taken to add up to {weight:g} × the largest "
            "weight, a public constant."
        )


def _about_strategy(plan: TrainingPlan) -> str:
    """Return a line on the gain from correlated noise, and on the memory it takes."""
    event, vectors = plan.mechanism.event, plan.strategy.vectors_kept
    assert event.sampling.schedule is not None
    schedule = replace(event.sampling.schedule, participations=1)
    if event.sampling.policy is SamplingPolicy.SEPARATED:
        schedule = event.sampling.schedule
    errors = relative_errors(event.strategy, schedule)
    return (
        f"Noise is correlated over {plan.sampling.rounds} rounds: in the models it is "
        f"{errors.mean:.2f} times (root mean square) and {errors.largest:.2f} times (last round) "
        "as large as independent noise under this sampling at the same ε. It is up to "
        f"{plan.mechanism.noise_growth:.2f} × σ in one round. The server keeps {vectors} "
        f"{'vector' if vectors == 1 else 'vectors'} of "
        f"{plan.mechanism.clipping.layout.dimension:,} numbers for it."
    )


def _groups(plan: TrainingPlan) -> Iterator[dict[str, Any]]:
    """Yield numbers of each vector group of the first round, in the order of the ledger."""
    mechanism = plan.mechanism
    groups, queries = mechanism.clipping.groups, mechanism.event.queries
    rows = zip(groups, queries, plan.shares, mechanism.query.divisors, strict=True)
    for group, query, share, users in rows:
        dimension = group.dimension(mechanism.clipping.layout)
        noise = query.noise_stddev * mechanism.noise_growth * math.sqrt(dimension)
        yield {
            "name": group.name,
            "tensors": [tensor for tensor in group.tensors if tensor != group.name],
            "dimension": dimension,
            "clipping_norm": query.clipping_norm,
            "noise_stddev": query.noise_stddev,
            "share": share,
            # If all users of an expected cohort contribute their maximum in one direction.
            "signal_to_noise": users * group.clipping_norm / noise if noise else math.inf,
        }
