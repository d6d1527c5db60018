"""The attack suite: many short runs of a plan in two worlds, and the bound on ε that they certify.

A run is real: it has the plan's engine, clipping, rounds and ledger, with noise and coins of the
operating system, in fresh files. Only its releases are stored. A quarter of the runs of a pair of
populations is for learning directions, a quarter for choosing one distinguisher, threshold and
side, and half certifies only that choice: see `certification`.
"""

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from fedpriv.accounting.accountants import epsilon as epsilon_of
from fedpriv.data.places import in_places
from fedpriv.data.population import ROW_OWNERS, Population, UserStore, check_count
from fedpriv.engine.forks import computing_with
from fedpriv.engine.transport import InProcessTransport, chunk_memory_of
from fedpriv.errors import DataError, InvalidValueError
from fedpriv.experiment.build import Experiment, build, method_of, records_of
from fedpriv.experiment.config import Config, OutputSection
from fedpriv.ledger.events import NeighbouringRelation, PrivacyBudget, Unit
from fedpriv.ledger.ledger import paid_events
from fedpriv.privacy.noise import Entropy, OperatingSystemEntropy
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.privacy.sampling import ExampleSampling
from fedpriv.support.logs import silenced
from fedpriv.training.optimizers import FedAvg
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.request import Transport
from fedpriv.training.rounds import ServerState, train
from simulations.attack.certification import Certificate, Numbers, best_test, certify
from simulations.attack.distinguishers import (
    Distinguisher,
    Enemy,
    Integers,
    OwnUpdate,
    Released,
    ReleaseMoments,
    always,
    learnt_combination,
    learnt_direction,
    loss_on,
)
from simulations.attack.populations import Crowd, KeptPopulation, Pair, UnfitError

_RUN = "attack"  # name of each run in its own ledger
_HELD_OUT_ROWS = 200  # on which losses are measured
_FEWEST_RUNS = 8
# Sections of the plan.
_LEFT_OUT = ("seed", "run", "audit", "federated_evaluation", "personalisation")
_MEMORY = Path("/dev/shm")

Entropies = Callable[[int], Entropy]
"""The source of a run's coins and noise, by its number."""


@dataclass(frozen=True)
class AttackedPlan:
    """The attacked form of a plan: short, with few users, and stepping by the released average."""

    experiment: Experiment
    plan: TrainingPlan  # of each run
    start: ServerState
    budget: PrivacyBudget  # of each run
    crowd: Crowd  # the users from whom populations are made

    @classmethod
    def of(cls, config: Config, population: Population, rounds: int, users: int) -> "AttackedPlan":
        """Return the plan of a configuration over the first `users` users that have rows.

        The noise is calibrated to `rounds` rounds, unless the configuration sets it.
        InvalidValueError if there is no noise; DataError if there are fewer than two users, or rows
        have several owners.
        """
        check_count("rounds", rounds)
        check_count("users", users, least=2)
        left_out = dict.fromkeys(_LEFT_OUT)
        quiet = {"trackers": (), "output": OutputSection()}
        shortened = config.model_copy(update={"rounds": rounds, **left_out, **quiet})
        mechanism = shortened.mechanism()
        records = records_of(population, mechanism).users
        if ROW_OWNERS in records.fields:
            raise DataError("rows have several owners; attacks need rows of one user each")
        chosen = np.flatnonzero(records.sizes)[:users]
        if len(chosen) < 2:
            raise DataError(f"{len(chosen)} users with rows are to be attacked; two are needed")
        name, subset = population.name, records.subset(chosen)
        experiment = build(
            shortened, _RUN, name, len(chosen), population.test, method_of(shortened)
        )
        plan = replace(experiment.plan, optimizer=FedAvg())
        if plan.noise_multiplier == 0.0:
            raise InvalidValueError("the plan has no noise; ε is infinite and cannot be refuted")
        task = experiment.task
        inputs = (task.inputs,) if isinstance(task.inputs, str) else task.inputs
        fields = {field: subset.fields[field] for field in task.fields}
        rows_per_record = None if mechanism.unit is Unit.USER else mechanism.microbatch or 1
        replaced = plan.sampling.event().relation is NeighbouringRelation.REPLACE_ONE
        crowd = Crowd(
            UserStore(fields, subset.offsets), inputs, task.targets, rows_per_record, replaced
        )
        start = replace(experiment, plan=plan).initial_state
        # All runs charge the same events, and pricing them takes longer than a run.
        budget = replace(experiment.budget, price=lru_cache(experiment.budget.price))
        return cls(experiment, plan, start, budget, crowd)

    def transport(self, users: UserStore) -> InProcessTransport:
        """Return a transport to users of this machine."""
        experiment, sampling = self.experiment, self.plan.sampling
        engine = experiment.config.engine
        if isinstance(sampling, ExampleSampling):
            users = in_places(users, sampling.examples_per_user)
        return InProcessTransport(
            experiment.task,
            users,
            experiment.device,
            chunk_memory_of(engine.chunk_mebibytes, experiment.device),
            activations=engine.activations,
            processes=engine.processes or 1,  # training a small cohort is faster than sending it
            path=engine.path,
        )

    def run(self, transport: Transport, entropy: Entropy) -> Released:
        """Run once in fresh files, and return the releases; `ended` names an error if it raised."""
        plan, steps, reason = self.plan, [], ""
        with TemporaryDirectory(dir=_scratch()) as folder:
            files = Path(folder, "ledger.sqlite"), Path(folder, "participation.sqlite")
            with PrivacyRecords.open(*files, plan.population, self.budget) as records:
                rounds = train(plan, self.start, transport, records, entropy)
                while not reason:
                    try:
                        steps.append(next(rounds))
                    except StopIteration as end:
                        reason = str(end.value)
                    except Exception as error:
                        reason = f"{type(error).__name__}: {error}"
                charges = tuple(records.ledger.charges())
        states, results = zip(*steps, strict=True) if steps else ((), ())
        return Released(plan, self.start, states, results, charges, reason)


def _scratch() -> Path | None:
    """Return a folder in which charges do not wait for a disk, unless TMPDIR is set."""
    return _MEMORY if "TMPDIR" not in os.environ and os.access(_MEMORY, os.W_OK) else None


@dataclass(frozen=True)
class Finding:
    """The result of the runs of one pair of populations."""

    population: KeptPopulation
    ledger_epsilon: float = 0.0  # ε of the events that one run charged, at the plan's δ
    certificate: Certificate | None = None  # None: the population does not fit the plan
    distinguisher: str = ""  # the certified one
    unfit: str = ""  # the reason why the population does not fit

    @property
    def refuted(self) -> bool:
        """True if the certified bound contradicts the ledger."""
        certificate = self.certificate
        return certificate is not None and certificate.epsilon > self.ledger_epsilon

    @property
    def verdict(self) -> str:
        """The verdict in a word, or the reason why there is none."""
        if self.certificate is None:
            return f"skipped: {self.unfit}"
        return "refuted" if self.refuted else "consistent"


def attack(
    target: AttackedPlan,
    population: KeptPopulation,
    runs: int,
    *,
    entropies: Entropies = lambda _: OperatingSystemEntropy(),
    on_run: Callable[[], object] = lambda: None,
) -> Finding:
    """Attack a plan with a pair of populations, by `runs` runs in each of the two worlds.

    `on_run` is called after each run. InvalidValueError if there are fewer than 8 runs, or if runs
    without the user do not release all rounds, because then the plan cannot be attacked.
    """
    if runs < _FEWEST_RUNS:
        raise InvalidValueError(f"runs is {runs}; it must be at least {_FEWEST_RUNS}")
    try:
        pair = population.pair(target.crowd)
    except UnfitError as error:
        return Finding(population, unfit=str(error))
    places, honest = _places(target, pair), target.transport(pair.with_one)
    worlds = target.transport(pair.without), pair.carried(honest, places[-1])
    enemy = Enemy(target.plan, target.start, worlds[1], places)
    delta, certifying_runs, numbered = target.budget.delta, certifying(runs), count()
    quarter = (runs - certifying_runs) // 2

    def released(world: Transport, runs: int) -> Iterator[Released]:
        for number in islice(numbered, runs):
            yield target.run(world, entropies(number))
            on_run()

    def numbers_of(distinguisher: Distinguisher, world: Transport) -> Numbers:
        return np.array([distinguisher(run) for run in released(world, certifying_runs)])

    # Thousands of runs train users that fail on purpose. In models this small, several threads
    # would only wait for each other.
    with silenced(logging.WARNING), computing_with(1):
        (trial,) = released(worlds[0], 1)
        if len(trial.results) < target.plan.rounds:
            raise InvalidValueError(f"a run ends after {len(trial.results)} rounds: {trial.ended}")
        moments = [ReleaseMoments.of(released(world, quarter), enemy) for world in worlds]
        every = _distinguishers(target, pair, enemy, moments[0], moments[1])
        columns = [
            np.array(
                [
                    [distinguisher(run) for distinguisher in every]
                    for run in released(world, quarter)
                ]
            ).T
            for world in worlds
        ]
        tests = [
            best_test(without_user, with_user, delta)
            for without_user, with_user in zip(*columns, strict=True)
        ]
        chosen = max(range(len(every)), key=lambda at: tests[at][0])
        final = [numbers_of(every[chosen], world) for world in worlds]
    for world in worlds:
        world.release_resources()
    ledger = epsilon_of(paid_events(trial.charges), delta).epsilon
    certificate = certify(tests[chosen][1], final[0], final[1], delta)
    return Finding(population, ledger, certificate, every[chosen].name)


def certifying(runs: int) -> int:
    """Return how many of the runs of each world certify the choice of the other runs."""
    return runs - 2 * (runs // 4)


def _places(target: AttackedPlan, pair: Pair) -> Integers:
    """Return the places of each user in the world with the special user, the last: [N', k]."""
    sampling, users = target.plan.sampling, pair.with_one.population
    per_user = sampling.places // sampling.population
    return np.arange(users * per_user).reshape(users, per_user)


def _distinguishers(
    target: AttackedPlan,
    pair: Pair,
    enemy: Enemy,
    without: ReleaseMoments,
    with_one: ReleaseMoments,
) -> tuple[Distinguisher, ...]:
    """Return all distinguishers of a plan, given releases of runs in both worlds."""
    plan, task, rows_held_out = target.plan, target.experiment.task, target.experiment.held_out
    centre = without.mean[:, : plan.layout.dimension]
    distinguishers = [
        Distinguisher("own update", OwnUpdate(enemy, centre)),
        learnt_combination(enemy, without, with_one),
        learnt_direction(without, with_one),
    ]
    first_rows = {name: column[:_HELD_OUT_ROWS] for name, column in rows_held_out.items()}
    last = pair.with_one.examples_of(pair.with_one.population - 1)
    for rows_name, rows in {"held-out rows": first_rows, "the user's rows": last}.items():
        if not task.personal and len(rows.get(task.targets, ())):
            distinguishers.append(loss_on(rows_name, task, rows))
    return (*distinguishers, *always(plan))
