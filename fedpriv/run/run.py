"""A run in its folder, from its start or resumption to its result.

`opened` opens the folder and its records, and `conduct` runs the rounds, in simulations and in
deployments alike. `fedpriv.run.terminal.execute` shows a run to its user.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import tomli_w
from torch import nn

from fedpriv.accounting.accountants import accountant_named
from fedpriv.accounting.fdp import TradeOff, trade_off
from fedpriv.audit.verdict import AuditResult
from fedpriv.data.columns import read_npz
from fedpriv.data.population import HELD_OUT_USER, check_not_enrolled, load_population
from fedpriv.engine.released import frozen_of, read_released, released, released_model, sha256_of
from fedpriv.engine.task import HeldOut, Task
from fedpriv.errors import (
    BudgetExceededError,
    CheckpointError,
    DataError,
    InvalidValueError,
    RefutedError,
    TooFewUsersError,
)
from fedpriv.evaluation.held_out import Evaluation, evaluate
from fedpriv.experiment.build import Experiment, build, check_budget, digest_of_users, method_of
from fedpriv.experiment.config import Config, FederationSection, flattened, for_folder, load_config
from fedpriv.ledger.events import RoundEvent
from fedpriv.ledger.ledger import Ledger, paid_events
from fedpriv.ledger.participation import record_path
from fedpriv.privacy.layout import Tensors
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.report.records import RunEnd, versions
from fedpriv.report.tables import plural
from fedpriv.run import notes
from fedpriv.run.auditor import Auditor
from fedpriv.run.folder import RunFolder, data_frame, held, read_run, write_charts, write_report
from fedpriv.support.checks import require, text_down, text_up
from fedpriv.support.disk import with_room, write_atomically
from fedpriv.support.logs import one_line
from fedpriv.training.local import ALGORITHMS
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.request import Transport
from fedpriv.training.rounds import (
    Checkpoint,
    Contributors,
    OnRelease,
    OnRound,
    RoundResult,
    ServerState,
    Stop,
    best_round,
    checkpoint_path,
    checkpoints,
    initial_state,
    load_checkpoint,
    own_charges,
    resume,
    save_checkpoint,
    train,
)

if TYPE_CHECKING:
    import pandas as pd

_MEASURED = ("loss", "accuracy", "figures", "held_out_users")  # figures of held-out rows
# Sections that are not part of a plan.
_MAY_CHANGE = ("engine", "federation", "output", "trackers", "tune")
# Sections of a plan that its digest does not cover in full.
_NOT_IN_DIGEST = ("data", "federated_evaluation", "personalisation")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunSetup:
    """The settings and files of a run before its plan exists."""

    config: Config  # of a resumed run, with the noise that it started with
    run: str  # its name in the ledger
    folder: RunFolder
    ledger: Path
    resuming: bool
    keep_going: bool = False  # True: the run continues even if too few users count
    start: Path | None = None  # folder of a run, whose model this run starts from

    @classmethod
    def at(
        cls,
        config: Config,
        out: Path | None,
        *,
        resume: bool,
        home: Path = Path("runs"),
        keep_going: bool = False,
        start: Path | None = None,
    ) -> Self:
        """Start or `resume` the run in `out`, by default a new folder in `home`.

        With `start`, the new run starts from that run's model and charges that run's ledger.
        """
        limit = "--resume needs --out, in Python out=..., the folder of the run to continue"
        require(not resume or out is not None, limit)
        if start is not None:
            config = _charging_for(start, config)
        # A seeded run can be repeated, so its name is the same each time.
        suffix = os.urandom(4).hex() if config.seed is None else f"seed{config.seed}"
        run = config.run or f"{config.name}-{suffix}"
        folder = RunFolder(out or home / run)
        if not resume:
            folder.refuse_run()  # otherwise the charges of that run might seem to exceed the budget
        resuming = resume and folder.plan.exists()
        if resuming:
            first_plan = load_config(folder.plan)
            noise_multiplier = first_plan.privacy.noise_multiplier
            if first_plan.run is None or noise_multiplier is None:
                raise InvalidValueError(
                    f"{folder.plan} is damaged: it must have run and privacy.noise_multiplier"
                )
            run = first_plan.run
            if config.privacy.noise_multiplier is None:
                # A new calibration would give other noise, since the ledger has grown.
                config = config.with_noise(noise_multiplier)
            if config.engine.path == "auto":
                # Timing might now choose another path, whose results differ by rounding.
                config = config.changed(engine={"path": first_plan.engine.path})
            if config.privacy.ledger is None:  # it may be that of the run whose model was the start
                config = config.changed(privacy={"ledger": first_plan.privacy.ledger})
        return cls(config, run, folder, folder.charged(config), resuming, keep_going, start)

    @property
    def spent(self) -> list[RoundEvent]:
        """The events that count in calibration; a resumed run was calibrated when it started."""
        return [] if self.resuming else spent_in(self.ledger)

    def refuse_taken_name(self) -> None:
        """Refuse a new run if its ledger has rounds of another run with this name.

        The charges of the two runs could not be told apart.
        """
        if not self.ledger.exists():
            return
        with Ledger.open(self.ledger) as ledger:
            if own_charges(self.run, ledger.charges()):
                raise InvalidValueError(
                    f"run is {self.run!r}, and {self.ledger} has rounds of this name from another "
                    f"folder; change {'run' if self.config.run else 'name or seed'}, or resume it"
                )

    def on_nodes(
        self, section: FederationSection, population: str, user_ids: Sequence[str]
    ) -> Experiment:
        """Return the experiment on the users of nodes, who have these ids by position."""
        self.refuse_true_figures("on nodes")
        if self.config.training().max_examples is None:
            raise InvalidValueError(
                "local.max_examples is absent; on nodes it must be given, since a user with very "
                "many examples would take the time of all other users of its node"
            )
        (held_out, classes), users = held_out_rows(self.config, section), len(user_ids)
        if HELD_OUT_USER in held_out:
            check_not_enrolled(held_out[HELD_OUT_USER], user_ids)
        method = method_of(self.config)
        experiment = build(self.config, self.run, population, users, held_out, method, self.spent)
        self.refuse_examples(experiment.plan, "on nodes")
        if (seed := self.config.seed) is not None:
            if section.secure_sum is not None:
                raise InvalidValueError(
                    f'seed is {seed} and federation.trust is "none"; it must be absent, since '
                    "nodes draw coins and noise themselves"
                )
            _log.warning("seed is %d: anyone who knows it can compute cohorts and noise", seed)
        return replace(experiment, enrolled=digest_of_users(user_ids)).naming(classes)

    def refuse_true_figures(self, where: str) -> None:
        """Refuse settings that only a simulation in one process supports."""
        config, local = self.config, self.config.local
        if config.output.simulation_only:
            setting, must_be = "output.simulation_only is true", "false"
        elif config.not_whole:
            setting, must_be = config.not_whole
        elif config.population.as_if is not None:
            setting, must_be = f"population.as_if is {config.population.as_if}", "absent"
        elif config.federated_evaluation is not None:
            setting, must_be = "federated_evaluation is given", "absent"
        elif local is not None and local.algorithm not in ALGORITHMS:
            setting, must_be = f"local.algorithm is {local.algorithm!r}", " or ".join(ALGORITHMS)
        else:
            return
        raise InvalidValueError(
            f"{setting}; {where} it must be {must_be}, since only a simulation in one process "
            "supports it"
        )

    def refuse_examples(self, plan: TrainingPlan, where: str) -> None:
        """Refuse a policy that draws users' examples, whatever its name in the file."""
        if plan.sampling.drawn is not plan.sampling.unit:
            raise InvalidValueError(
                f"sampling.policy {self.config.sampling.policy!r} draws examples of users; {where} "
                "it must draw whole users, since only a simulation in one process supports it"
            )

    def write_plan(self, experiment: Experiment) -> None:
        """Create the folder with the resolved plan."""
        self.folder.create()
        # The plan last: a folder that has it holds a run, and must then have the digest too.
        write_atomically(self.folder.plan_digest, f"{experiment.plan.digest}\n".encode())
        write_atomically(self.folder.plan, self._resolved_plan(experiment).encode())

    def write_budget(self, experiment: Experiment) -> None:
        """Write the budget and the ledger of a resumed run into its plan."""
        first_plan, privacy = load_config(self.folder.plan), experiment.config.privacy
        if self.resuming and privacy != first_plan.privacy:
            config = first_plan.model_copy(update={"privacy": privacy})
            plan = self._resolved_plan(replace(experiment, config=config))
            write_atomically(self.folder.plan, plan.encode())

    def _resolved_plan(self, experiment: Experiment) -> str:
        """Return the configuration as TOML for a file in the folder, after a header of facts."""
        plan, facts = experiment.plan, dict[str, object]()
        if self.start:
            source, place = RunFolder(self.start), os.path.relpath(self.start, self.folder.path)
            run, number = load_config(source.plan).run, read_released(source.model)[1]["round"]
            facts["starts from"] = f"round {number} of run {run}, in {place}"
        facts |= {
            "population": plan.population,
            f"enrolled {plural(plan.sampling.unit)}": plan.sampling.population,
            "expected cohort": f"{plan.sampling.expected_cohort_size:g}",
            "parameters": plan.layout.dimension,
            "software": ", ".join(f"{name} {number}" for name, number in versions().items()),
        }
        for query in plan.mechanism.query.events:
            norm, noise = text_up(query.clipping_norm), text_down(query.noise_stddev)
            facts[f"group {query.group}"] = f"clipping norm {norm}, noise stddev {noise}"
        # Names may contain line ends.
        head = "".join(f"# {one_line(f'{name}: {value}')}\n" for name, value in facts.items())
        table = experiment.config.model_dump(exclude_none=True)
        return head + tomli_w.dumps(for_folder(self.folder.path, table))

    def refuse_other_plan(self, experiment: Experiment) -> None:
        """Refuse to resume a run with a plan other than its first one."""
        if not self.resuming:
            return
        path, digest = self.folder.plan_digest, experiment.plan.digest
        old_digest = path.read_text("ascii", "replace").strip() if path.exists() else "unknown"
        changes = _differences(self.folder, experiment.config)
        if old_digest == digest:
            reason = " and ".join(change for change in changes if change.startswith(_NOT_IN_DIGEST))
        else:
            reason = f"{path}: the run began with plan {old_digest[:12]!r}, this is {digest[:12]!r}"
            reason += f" ({' and '.join(changes)})" if changes else ""
        bound = "a run can only be resumed with the plan it began with"
        require(not reason, f"{reason}; {bound}")


def _charging_for(start: Path, config: Config) -> Config:
    """Return the configuration with the ledger of the run whose model the new run starts from."""
    folder, ledger = RunFolder(start), config.privacy.ledger
    if not folder.plan.exists():
        raise InvalidValueError(f"{start} holds no run to start from; {folder.plan.name} is absent")
    old_ledger = folder.charged(load_config(folder.plan)).absolute()
    if ledger and Path(ledger).resolve() != old_ledger.resolve():
        raise InvalidValueError(
            f"privacy.ledger is {ledger}, and the model of {start} was charged to {old_ledger}; "
            "a run that starts from it must charge that ledger too, so leave privacy.ledger out"
        )
    return config.changed(privacy={"ledger": str(old_ledger)})


def _differences(folder: RunFolder, current: Config) -> list[str]:
    """Return differences from a folder's run in settings that a resumed run must keep."""
    tables = (
        config.model_dump(exclude=set(_MAY_CHANGE), exclude_none=True)
        for config in (load_config(folder.plan), current)
    )
    before, after = (flattened(for_folder(folder.path, table)) for table in tables)
    return [
        f"{key} is {after.get(key, 'absent')!s:.40}, was {before.get(key, 'absent')!s:.40}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key, {}) != after.get(key, {})
    ]


def held_out_rows(config: Config, section: FederationSection) -> tuple[HeldOut, tuple[str, ...]]:
    """Return held-out rows, which no enrolled user has, and the public names of their classes.

    They come from `federation.held_out` or else from `data`, if it is given.
    """
    if section.held_out is None:
        population = config.data and load_population(config.data.name, config.data.options)
        return (population.test, population.public_classes) if population else ({}, ())
    rows = read_npz(Path(section.held_out))
    counts = {len(array) for array in rows.values()}
    if len(counts) != 1 or 0 in counts:
        raise DataError(
            f"{section.held_out} holds fields with {sorted(counts)} rows; all need the same "
            "number, at least one"
        )
    return rows, ()


@dataclass(frozen=True, kw_only=True)
class Run(RunEnd):
    """A run that has ended; everything in it is also in its folder."""

    folder: Path  # of plan, ledger, metrics, checkpoints and model
    task: Task = field(repr=False)
    state: ServerState = field(repr=False)  # at the end; all of it was released
    ledger: Path  # other runs may have charged it too
    audit: AuditResult | None  # of this run's releases, if it was audited
    # The round of the best model on held-out rows, by accuracy, else by loss, and its state. The
    # model was chosen by these rows, so its figures on other rows are likely to be worse.
    best: RoundResult | None
    best_state: ServerState | None = field(repr=False)
    # Results of all rounds that led to the model, including those before the run was resumed.
    rounds: tuple[RoundResult, ...] = field(repr=False)

    @property
    def model(self) -> nn.Module:
        """A copy of the task's model with the released parameters and running statistics.

        It is in evaluation mode, in which accuracy was measured: dropout is off.
        """
        return released(self.task, self.state.model)

    @property
    def mean_model(self) -> nn.Module | None:
        """The mean of the models of the last third of the planned rounds; None before it."""
        return released(self.task, self.state.mean) if self.state.mean else None

    @property
    def best_model(self) -> nn.Module | None:
        """The model of the round `best`; None if no model was measured."""
        return released(self.task, self.best_state.model) if self.best_state else None

    def check(self) -> None:
        """Raise RefutedError if the audit refutes the ledger, TooFewUsersError if few count."""
        if self.audit is not None and not self.audit.consistent:
            raise RefutedError(f"the audit of {self.folder} found {self.audit.text}")
        if self.stop is Stop.TOO_FEW:
            raise TooFewUsersError(self.warnings[0])

    def to_pandas(self) -> "pd.DataFrame":
        """Return a row for each round and a column for each released number; needs pandas."""
        return data_frame([{"round": r.round, **r.scalars} for r in self.rounds])

    def trade_off(self) -> TradeOff:
        """Return the trade-off of tests that guess whether one user took part, by the ledger."""
        record = read_run(self.folder)
        return trade_off(record.ledger.events, record.accountant)

    def report(self, out: Path | str | None = None) -> Path:
        """Verify the ledger, and write one HTML page, by default report.html in the folder."""
        return write_report(self.folder, out)

    def draw(self, out: Path | str | None = None) -> list[Path]:
        """Write charts as PNG and SVG, by default into `charts` in the folder; return the files."""
        return write_charts(self.folder, out)


Hosted = Callable[[Experiment, PrivacyRecords], Transport]
"""Makes the transport to an experiment's users, once its records are open."""
Follow = Callable[[Experiment, int, Callable[[OnRound], Run]], Run]
"""Shows a run, given the number of released rounds and a function that runs it with an observer."""


def _state_after(source: Path, experiment: Experiment) -> ServerState:
    """Return the state before the first round of a run that starts from another run's model.

    It has that run's final parameters and running statistics, and the state of its server optimiser
    if both optimisers have the same name. InvalidValueError: the models differ.
    """
    folder, plan, fresh = RunFolder(source), experiment.plan, experiment.initial_state
    _, release = read_released(folder.model)
    if not (paths := checkpoints(folder.checkpoints)):
        raise InvalidValueError(f"{source} holds no checkpoint for a run to start from")
    state = load_checkpoint(paths[-1]).state
    shapes, source_shapes = ({n: [*t.shape] for n, t in s.model.items()} for s in (fresh, state))
    for name in {**shapes, **source_shapes}:
        if shapes.get(name) != source_shapes.get(name):
            source_shape, shape = source_shapes.get(name, "absent"), shapes.get(name, "absent")
            raise InvalidValueError(
                f"trained tensor {name!r} is {source_shape} in {source} and {shape} in the run "
                "that starts from it; both must train the same tensors, of the same shapes"
            )
    if release["frozen"]["sha256"] != sha256_of(frozen_of(experiment.task)):
        raise InvalidValueError(
            f"frozen tensors of the model differ from those of {source}; a run that starts from it "
            "must have the same"
        )
    statistics = {name: state.statistics[name] for name in fresh.statistics}
    state_before = initial_state(plan, state.parameters, statistics)
    is_same = load_config(folder.plan).server.optimizer == experiment.config.server.optimizer
    return replace(state_before, optimizer=state.optimizer) if is_same else state_before


def state_to_start_from(
    folder: RunFolder, experiment: Experiment, records: PrivacyRecords
) -> ServerState:
    """Return the state of the newest checkpoint, or the initial one.

    CheckpointError: the checkpoint does not fit the plan and the ledger, or checkpoints are lost.
    Otherwise an untrained model would replace the trained one, or rounds would be charged again.
    """
    plan, output = experiment.plan, experiment.config.output
    if paths := checkpoints(folder.checkpoints):
        return resume(paths[-1], plan, records.ledger)
    first_output = load_config(folder.plan).output
    due_round = max(output.checkpoint_every, first_output.checkpoint_every)
    late = [row for row in own_charges(plan.run, records.ledger.charges()) if row.round > due_round]
    if late or folder.model.exists():
        reason = f"charged round {late[0].round}" if late else f"made {folder.model}"
        raise CheckpointError(
            f"{folder.checkpoints} holds no checkpoint, and the run that {reason} had one; restore "
            "it, or start another run"
        )
    return experiment.initial_state


def conduct(
    folder: RunFolder,
    experiment: Experiment,
    state: ServerState,
    transport: Transport,
    records: PrivacyRecords,
    *observers: OnRound,
    clock: Callable[[], float] | None = None,
    auditor: Auditor | None = None,
    keep_going: bool = False,
) -> Run:
    """Run an experiment to its end or to the end of its budget, and write everything into a folder.

    The run ends early if its releases show that too few users count, unless `keep_going`. After
    each release it writes the metrics, then the checkpoint, and then calls the observers. So if
    every round has a checkpoint, a crash loses at most one charged round. A resumed run repeats the
    rounds since its last checkpoint as new attempts, with new charges. If the disk is full, the run
    waits. `clock` returns the seconds that time a simulation's rounds; None in a deployment.
    """
    plan, sampling = experiment.plan, experiment.plan.sampling.event()
    output, evaluation = experiment.config.output, experiment.evaluation
    models = _Models(folder, experiment, records)
    _settle(experiment, records)
    folder.forget_end()
    if keep_going:  # the round that stated the budget is no longer the last one
        _restate(folder, state.round, records.ledger.epsilon(records.budget))
    observed: tuple[OnRelease, ...] = (auditor.observe,) if auditor else ()
    rounds = train(plan, state, transport, records, experiment.entropy, *observed)
    counted = Contributors.of(folder.results()[: state.round], sampling)
    # The number of users' examples is an estimate, which may be far too large.
    watched = plan.sampling.drawn is plan.sampling.unit and not keep_going
    while True:
        if watched and counted.too_few:
            stop = Stop.TOO_FEW
            break
        began = clock() if clock else 0.0
        try:
            state, result = next(rounds)
        except StopIteration as end:
            stop = end.value
            break
        result = replace(result, simulation_only_seconds=clock() - began if clock else None)
        if state.round % output.evaluate_every == 0 or state.round == plan.rounds:
            result = replace(result, **models.measured(state))
            models.consider(result, state)
        if evaluation and evaluation.due(state.round, last=state.round == plan.rounds):
            result = evaluation.added(result, state.model, records, experiment.entropy)
        with_room(partial(folder.append_metrics, asdict(result)))
        counted = counted.with_round(result, sampling)
        if state.round % output.checkpoint_every == 0:
            models.keep(state)
        for observe in observers:
            observe(result)
    models.keep(state)
    if models.last is not state:
        figures, results = models.measured(state), folder.results()
        if results:
            models.consider(replace(results[-1], **figures), state)
    transport.release_resources()
    return models.ended(stop, state, auditor, counted)


class _Models:
    """The last and the best model of a run on held-out rows, their checkpoints, and its end.

    A resumed run finds its best model among its checkpoints.
    """

    def __init__(self, folder: RunFolder, experiment: Experiment, records: PrivacyRecords) -> None:
        self._folder, self._experiment, self._records = folder, experiment, records
        self.last, self.figures = cast(ServerState | None, None), dict[str, Any]()
        path_of = partial(checkpoint_path, folder.checkpoints)
        self.round = best_round(r for r in folder.results() if path_of(r.round).exists())
        self.checkpoint = load_checkpoint(path_of(self.round.round)) if self.round else None

    def _at(self, state: ServerState) -> Checkpoint:
        return Checkpoint(state, self._experiment.plan.digest, self._records.ledger.head)

    def keep(self, state: ServerState) -> None:
        """Write the checkpoint of a state, and the best one."""
        checkpoint = self._at(state)
        with_room(lambda: save_checkpoint(self._folder.checkpoints, checkpoint, self.checkpoint))

    def measured(self, state: ServerState) -> dict[str, Any]:
        """Measure the model of a state, and return its figures."""
        self.last, self.figures = state, _measured(self._experiment, state.model)
        return self.figures

    def consider(self, result: RoundResult, state: ServerState) -> None:
        """Remember a round and its state if its model is better than all earlier ones."""
        rounds = [self.round, result] if self.round else [result]
        if best_round(rounds) is result:
            self.round, self.checkpoint = result, self._at(state)

    def write_best(self) -> None:
        """Write the best model, if one was measured.

        Its ε is that of all rounds, since the choice depends on all of them.
        """
        if self.round and self.checkpoint:
            last = self._folder.results()[-1]
            result = replace(self.round, epsilon=last.epsilon, randomness=last.randomness)
            self._write(self._folder.best, self.checkpoint.state, [result])

    def write_mean(self, state: ServerState) -> dict[str, Any]:
        """Write the mean of the last models, if there is one yet, and return its figures."""
        if not state.mean:
            return {}
        averaged = replace(state, parameters=state.mean, statistics={})
        self._write(self._folder.mean, averaged, self._folder.results())
        return _measured(self._experiment, state.mean)

    def _write(self, path: Path, state: ServerState, results: Sequence[RoundResult]) -> None:
        """Write the model of a state into a file, with the results of these rounds."""
        model = released_model(self._experiment.task, state, results, self._experiment.classes)
        with_room(lambda: write_atomically(path, model))

    def ended(
        self, stop: Stop, state: ServerState, auditor: Auditor | None, counted: Contributors
    ) -> Run:
        """Write the models and the end of the run into its folder, and return the run."""
        folder, experiment, records = self._folder, self._experiment, self._records
        plan, cost = experiment.plan, records.ledger.epsilon(records.budget)
        early = stop is Stop.TOO_FEW and state.round < plan.rounds
        epsilon, results = records.budget.epsilon if early else cost, folder.results()
        # Releases after a checkpoint are lost if the resumed run could repeat none of them.
        if stop is Stop.TOO_FEW or (results and results[-1].round > state.round):
            _restate(folder, state.round, epsilon)
        results = folder.results()
        self._write(folder.model, state, results)
        self.write_best()
        mean = self.write_mean(state)
        if plan.sampling.rounds > 1 and not records.ledger.open_series(plan.run):
            with_room(lambda: records.participation.forget_series(plan.run))  # of a killed run
        # Canaries take part in rounds, not in the queries between them.
        of_rounds = (row for row in records.ledger.charges() if row.run == plan.run)
        larger, enrolled_epsilon = plan.sampling.event().projection, None
        if larger is not None:
            accountant = accountant_named(experiment.config.privacy.accountant)
            events, delta = records.ledger.spent(), records.budget.delta
            enrolled_epsilon = accountant.upper_epsilon(events, delta)
        warnings = notes.of_run(experiment, stop, counted, results, cost, self.figures["loss"])
        end = RunEnd(
            stop=stop,
            round=state.round,
            epsilon=epsilon,
            delta=records.budget.delta,
            warnings=tuple(warnings),
            mean_accuracy=mean.get("accuracy"),
            mean_loss=mean.get("loss"),
            as_if=larger.population if larger else None,
            enrolled_epsilon=enrolled_epsilon,
            **self.figures,
        )
        with_room(partial(folder.write_end, end))
        return Run(
            **vars(end),
            folder=folder.path,
            task=experiment.task,
            state=state,
            ledger=folder.charged(experiment.config),
            audit=auditor.conclude(paid_events(of_rounds)) if auditor else None,
            best=self.round,
            best_state=self.checkpoint.state if self.checkpoint else None,
            rounds=tuple(result for result in results if result.round <= state.round),
        )


def _settle(experiment: Experiment, records: PrivacyRecords) -> None:
    """Charge the round and the query that a killed run had drawn, where the budget allows."""
    evaluation = experiment.evaluation
    for run in (experiment.plan.run, *([evaluation.run] if evaluation else [])):
        with suppress(BudgetExceededError):
            records.settle(run)


def _restate(folder: RunFolder, number: int, epsilon: float) -> None:
    """Write a round's result again if its run's ε has changed since."""
    for result in folder.results():
        if result.round == number and result.epsilon != epsilon:
            with_room(partial(folder.append_metrics, asdict(replace(result, epsilon=epsilon))))


def _measured(experiment: Experiment, model: Tensors) -> dict[str, Any]:
    """Return figures of a model on held-out rows, also after their users personalise it.

    A figure that cannot be computed is only logged, so that it does not end a run.
    """
    task, users, classes = experiment.task, experiment.personalised, experiment.classes
    general, personal = dict[str, Any](), dict[str, Any]()
    if experiment.held_out and not task.personal:
        rows, device = experiment.held_out, experiment.device
        general = _figures(evaluate(task, rows, device, model, classes=classes))
    if users is not None:
        try:
            personal = _figures(users.evaluate(model, classes))
        except Exception as error:
            _log.warning("held-out users cannot personalise the model: %s", error)
    if task.personal or not personal:
        return general or personal or {"loss": None, "accuracy": None}
    values = {"accuracy": personal["accuracy"], "loss": personal["loss"], **personal["figures"]}
    numbers = {name: value for name, value in values.items() if value is not None}
    for key, figures in (("figures", numbers), ("held_out_users", personal["held_out_users"])):
        general[key] = general[key] | {f"personalised_{n}": value for n, value in figures.items()}
    return general


def _figures(evaluation: Evaluation) -> dict[str, Any]:
    for name, reason in evaluation.failed.items():
        _log.warning("figure %s cannot be computed: %s", name, reason)
    return {name: getattr(evaluation, name) for name in _MEASURED}


@contextmanager
def opened(setup: RunSetup, experiment: Experiment) -> Iterator[tuple[PrivacyRecords, ServerState]]:
    """Open the folder and records of a run; yield the records and the state to start from."""
    folder, plan, start_state = setup.folder, experiment.plan, None
    if setup.resuming:
        setup.refuse_other_plan(experiment)
    else:
        check_budget(experiment, spent_in(setup.ledger, plan.population))
        setup.refuse_taken_name()
        start_state = _state_after(setup.start, experiment) if setup.start else None
        folder.create()
    files, budget = (setup.ledger, record_path(setup.ledger)), experiment.budget
    with (
        held(folder.path, f"{folder.path} holds a run"),
        PrivacyRecords.open(*files, plan.population, budget, resuming=setup.resuming) as records,
    ):
        records.participation.bind(setup.run, experiment.enrolled)
        if start_state:  # before the plan, as a folder with a plan is resumed from its checkpoints
            checkpoint = Checkpoint(start_state, plan.digest, records.ledger.head)
            save_checkpoint(folder.checkpoints, checkpoint)
        # After ledger and record were created: a run that is resumed without them has lost them.
        if not setup.resuming:
            setup.write_plan(experiment)
        state = state_to_start_from(folder, experiment, records)
        folder.results()  # damaged metrics are refused before users are asked
        setup.write_budget(experiment)  # after the check that the ledger is the run's
        yield records, state


def spent_in(ledger: Path, population: str | None = None) -> list[RoundEvent]:
    """Return the events of a ledger, if it exists; LedgerError if its population differs."""
    if not ledger.exists():
        return []
    with Ledger.open_or_create(ledger, population) if population else Ledger.open(ledger) as opened:
        return opened.spent()
