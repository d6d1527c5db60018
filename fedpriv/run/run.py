"""A run in its folder, from its start or resumption to its result.

`opened` opens the folder and its records, and `conduct` runs the rounds, in simulations and in
deployments alike. `fedpriv.run.terminal.execute` shows a run to its user.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import tomli_w
from torch import nn

from fedpriv.accounting.fdp import TradeOff, trade_off
from fedpriv.audit import AuditResult
from fedpriv.data.files import read_npz
from fedpriv.data.population import HELD_OUT_USER, check_not_enrolled, load_population
from fedpriv.engine.released import (
    frozen_of,
    read_released,
    released,
    released_model,
    sha256_of,
)
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
from fedpriv.experiment.build import Experiment, build, check_budget
from fedpriv.experiment.config import Config, FederationSection, for_folder, load_config
from fedpriv.ledger.events import RoundEvent
from fedpriv.ledger.ledger import Ledger, paid_events
from fedpriv.ledger.participation import digest_of_users, record_path
from fedpriv.privacy.layout import Tensors
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.report.records import RunEnd, versions
from fedpriv.report.tables import plural
from fedpriv.run import notes
from fedpriv.run.auditor import Auditor
from fedpriv.run.folder import RunFolder, data_frame, read_run, write_charts, write_report
from fedpriv.support.disk import with_room, write_atomically
from fedpriv.support.logs import one_line
from fedpriv.training.contributors import Contributors
from fedpriv.training.local import ALGORITHMS
from fedpriv.training.request import Transport
from fedpriv.training.rounds import (
    Checkpoint,
    OnRelease,
    OnRound,
    RoundResult,
    ServerState,
    Stop,
    TrainingPlan,
    best_round,
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

_MEASURED = ("loss", "accuracy", "figures", "held_out_users")  # on held-out rows
# Sections that are no part of a plan.
_MAY_CHANGE = ("callbacks", "engine", "federation", "output", "trackers", "tune")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunSetup:
    """What is known of a run before its plan is made."""

    config: Config  # of a resumed run, with the noise that it started with
    run: str  # its name in the ledger
    folder: RunFolder
    ledger: Path
    resuming: bool
    keep_going: bool = False  # whether it goes on though too few users count
    start: Path | None = None  # folder of the run whose model it starts from

    @classmethod
    def of(
        cls,
        file: Path,
        assignments: list[str],
        out: Path | None,
        *,
        resume: bool,
        keep_going: bool = False,
        start: Path | None = None,
    ) -> Self:
        """Read an experiment, with "a.b=value" overrides; see `at`."""
        config = load_config(file, assignments)
        return cls.at(config, out, resume=resume, keep_going=keep_going, start=start)

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

        With `start`, it starts from that run's model and charges that run's ledger.
        """
        if start is not None:
            config = _charging_for(start, config)
        # A seeded run can be repeated, so its name is the same each time.
        suffix = os.urandom(4).hex() if config.seed is None else f"seed{config.seed}"
        run = config.run or f"{config.name}-{suffix}"
        folder = RunFolder(out or home / run)
        ledger = Path(config.privacy.ledger) if config.privacy.ledger else folder.ledger
        if not resume:
            folder.refuse_run()  # before its charges are taken for too little budget
        resuming = resume and folder.plan.exists()
        if resuming:
            begun = load_config(folder.plan)
            noise_multiplier = begun.privacy.noise_multiplier
            if begun.run is None or noise_multiplier is None:
                raise InvalidValueError(
                    f"{folder.plan} is damaged: a plan that was begun has run and "
                    "privacy.noise_multiplier"
                )
            run = begun.run
            if config.privacy.noise_multiplier is None:
                # Calibrated again the noise would differ, as the ledger has grown since.
                config = config.with_noise(noise_multiplier)
            if config.engine.path == "auto":
                # By the clock it could be another now, and results differ by rounding.
                engine = config.engine.model_copy(update={"path": begun.engine.path})
                config = config.model_copy(update={"engine": engine})
        return cls(config, run, folder, ledger, resuming, keep_going, start)

    @property
    def spent(self) -> list[RoundEvent]:
        """What the noise is calibrated beside; a resumed run was calibrated when it started."""
        return [] if self.resuming else spent_in(self.ledger)

    def refuse_taken_name(self) -> None:
        """Refuse a new run if its ledger has rounds of another by this name.

        What either has charged could not be told from what the other has.
        """
        if self.ledger.exists():
            with Ledger.open(self.ledger) as ledger:
                taken = bool(own_charges(self.run, ledger.charges()))
            if taken:
                raise InvalidValueError(
                    f"run is {self.run!r}, of which {self.ledger} holds rounds of another folder; "
                    "it must have another name or seed, or be resumed in that folder"
                )

    def on_nodes(
        self, section: FederationSection, population: str, user_ids: Sequence[str]
    ) -> Experiment:
        """The experiment on a population whose users, by position, are at nodes."""
        self.refuse_true_figures("on nodes")
        if self.config.training().max_examples is None:
            raise InvalidValueError(
                "local.max_examples is absent; on nodes it must be given, since a user with very "
                "many examples would take the time of all others of its node"
            )
        held_out, users = held_out_rows(self.config, section), len(user_ids)
        if HELD_OUT_USER in held_out:
            check_not_enrolled(held_out[HELD_OUT_USER], user_ids)
        experiment = build(self.config, self.run, population, users, held_out, self.spent)
        self.refuse_examples(experiment.plan, "on nodes")
        if (seed := self.config.seed) is not None:
            known = "whoever knows it can compute who is drawn, and the noise"
            _log.warning("seed is %d: %s", seed, known)
        return replace(experiment, enrolled=digest_of_users(user_ids))

    def refuse_true_figures(self, where: str) -> None:
        """Refuse what only a simulation in one process can know or do."""
        if self.config.output.simulation_only:
            raise InvalidValueError(
                f"output.simulation_only is true; {where} it must be false, since only a "
                "simulation in one process has figures that are not private"
            )
        if not self.config.whole_users:
            drawn, must_be = self.config.not_whole
            raise InvalidValueError(
                f"{drawn}; {where} it must be {must_be}, since only a simulation in one process "
                "has the data of all users"
            )
        if self.config.federated_evaluation is not None:
            raise InvalidValueError(
                f"federated_evaluation is given; {where} it must be absent, since surveys reach "
                "users only where they train in the process of fedpriv simulate"
            )
        local = self.config.local
        if local is not None and local.algorithm not in ALGORITHMS:
            raise InvalidValueError(
                f"local.algorithm is {local.algorithm!r}; {where} it must be one of "
                f"{', '.join(ALGORITHMS)}, since others are not known there"
            )

    def refuse_examples(self, plan: TrainingPlan, where: str) -> None:
        """Refuse a policy that draws examples of users, whatever its name in the file."""
        if plan.sampling.drawn is not plan.sampling.unit:
            raise InvalidValueError(
                f"sampling.policy {self.config.sampling.policy!r} draws examples of users; {where} "
                "it must draw whole users, since only a simulation in one process has the data of "
                "all users"
            )

    def write_plan(self, experiment: Experiment) -> None:
        """Make the folder with the resolved plan; of a resumed run, refuse another plan."""
        if self.resuming:
            self.refuse_other_plan(experiment)
            return
        self.folder.create()
        # The plan last: a folder that has it holds a run, and then has the digest too.
        write_atomically(self.folder.plan_digest, f"{experiment.plan.digest}\n".encode())
        plan = _resolved_plan(experiment, self.folder.path)
        write_atomically(self.folder.plan, plan.encode())

    def write_budget(self, experiment: Experiment) -> None:
        """Write the budget and the ledger that a resumed run goes on with into its plan."""
        begun, privacy = load_config(self.folder.plan), experiment.config.privacy
        if self.resuming and privacy != begun.privacy:
            config = begun.model_copy(update={"privacy": privacy})
            plan = _resolved_plan(replace(experiment, config=config), self.folder.path)
            write_atomically(self.folder.plan, plan.encode())

    def refuse_other_plan(self, experiment: Experiment) -> None:
        """Refuse to resume with another plan than the run began with, however far it has come."""
        path, plan = self.folder.plan_digest, experiment.plan
        begun = path.read_text("ascii", "replace").strip() if path.exists() else "unknown"
        if self.resuming and begun != plan.digest:
            others = _differences(load_config(self.folder.plan), experiment.config)
            told = f" ({' and '.join(others)})" if others else ""
            raise InvalidValueError(
                f"by {path} the run began with plan {begun[:12]!r}, this is {plan.digest[:12]!r}"
                f"{told}; a run can only be resumed with the plan it began with"
            )


def _charging_for(start: Path, config: Config) -> Config:
    """The configuration with the ledger of the run whose model is started from."""
    folder, given = RunFolder(start), config.privacy.ledger
    if not folder.plan.exists():
        raise InvalidValueError(f"{start} holds no run to start from; {folder.plan.name} is absent")
    shared = load_config(folder.plan).privacy.ledger
    paid = (Path(shared) if shared else folder.ledger).absolute()
    if given and Path(given).resolve() != paid.resolve():
        raise InvalidValueError(
            f"privacy.ledger is {given}, and the model of {start} was charged to {paid}; a run "
            "that starts from it must charge that ledger too, so leave privacy.ledger out"
        )
    privacy = config.privacy.model_copy(update={"ledger": str(paid)})
    return config.model_copy(update={"privacy": privacy})


def _differences(begun: Config, now: Config) -> list[str]:
    """Which values of two experiments differ, but for what a resumed run may change."""
    was, given = (_leaves(each.model_dump(exclude=set(_MAY_CHANGE))) for each in (begun, now))
    return [
        f"{key} is {given.get(key, 'absent')!s:.40}, was {was.get(key, 'absent')!s:.40}"
        for key in sorted(was.keys() | given.keys())
        if was.get(key) != given.get(key)
    ]


def _leaves(table: object, key: str = "") -> dict[str, object]:
    """Values of a table, by their keys from the top; what is None is absent."""
    if not isinstance(table, Mapping):
        return {} if table is None else {key: table}
    parts = (_leaves(value, f"{key}.{name}" if key else name) for name, value in table.items())
    return {name: value for part in parts for name, value in part.items()}


def _resolved_plan(experiment: Experiment, folder: Path) -> str:
    """Configuration as it was run, for a file in the folder, under a head of facts."""
    plan = experiment.plan
    facts = {
        "population": plan.population,
        f"enrolled {plural(plan.sampling.unit)}": plan.sampling.population,
        "expected cohort": f"{plan.sampling.expected_cohort_size:g}",
        "parameters": plan.layout.dimension,
        "software": ", ".join(f"{name} {number}" for name, number in versions().items()),
    }
    for query in plan.mechanism.query.events:
        stated = f"clipping norm {query.clipping_norm:g}, noise stddev {query.noise_stddev:g}"
        facts[f"group {query.group}"] = stated
    # Names may hold ends of lines.
    head = "".join(f"# {one_line(f'{name}: {value}')}\n" for name, value in facts.items())
    table = experiment.config.model_dump(exclude_none=True)
    return head + tomli_w.dumps(for_folder(folder, table))


def held_out_rows(config: Config, section: FederationSection) -> HeldOut:
    """Rows of no enrolled user: those of `federation.held_out`, else of `data`, if there is any."""
    if section.held_out is None:
        data = config.data
        return {} if data is None else load_population(data.name, data.options).test
    rows = read_npz(Path(section.held_out))
    counts = {len(array) for array in rows.values()}
    if len(counts) != 1 or 0 in counts:
        raise DataError(
            f"{section.held_out} holds fields with {sorted(counts)} rows; all need the same "
            "number, at least one"
        )
    return rows


@dataclass(frozen=True)
class Run:
    """A run that has ended; everything in it is also in its folder.

    Accuracy, mean loss and figures are those of the last model on the held-out rows, if there are
    any. They are no private statements, and the guarantee does not cover the rows.
    """

    folder: Path  # of plan, ledger, metrics, checkpoints and model
    task: Task
    stop: Stop  # why it ended
    state: ServerState  # at the end, all of it released
    # Of all charges of the ledger at the end, with `delta`; the budget, where the run ended early
    # because of what it released, as the charges are no bound then.
    epsilon: float
    delta: float  # that of the budget
    ledger: Path  # which other runs may have charged too
    accuracy: float | None  # None if targets are not classes
    loss: float | None
    figures: Mapping[str, float] = field(default_factory=dict)  # those of the task, by name
    # If held-out rows have users: `users`, `mean`, `q10`, `q50`, `q90` over them, by figure.
    held_out_users: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    audit: AuditResult | None = None  # what it found in its own releases, if it was asked to
    # What its owner should know, in a sentence each, with the cure; the first says why the run
    # ended if `stop` is `Stop.TOO_FEW`. Those that say "simulation only" are not private.
    warnings: tuple[str, ...] = ()
    # The round of the best model on held-out rows, by accuracy, else by loss, and its state. As the
    # rows chose the model, its figures there are likely to be better than on others.
    best: RoundResult | None = None
    best_state: ServerState | None = None

    @cached_property
    def rounds(self) -> tuple[RoundResult, ...]:
        """The result of each round that led to the model, those before a resumption included."""
        results = RunFolder(self.folder).results()
        return tuple(each for each in results if each.round <= self.state.round)

    @property
    def model(self) -> nn.Module:
        """A copy of the task's model with the released parameters and running statistics.

        It is in evaluation mode, in which accuracy was measured: dropout is off.
        """
        return released(self.task, self.state.model)

    @property
    def best_model(self) -> nn.Module | None:
        """As `model`, of the round `best`; None if no model was measured."""
        return released(self.task, self.best_state.model) if self.best_state else None

    def check(self) -> None:
        """Raise RefutedError if the audit refutes the ledger, TooFewUsersError if few count."""
        if self.audit is not None and not self.audit.consistent:
            raise RefutedError(f"the audit of {self.folder} found {self.audit.text}")
        if self.stop is Stop.TOO_FEW:
            raise TooFewUsersError(self.warnings[0])

    def to_pandas(self) -> "pd.DataFrame":
        """One row a round, one column for every released number; pandas must be installed."""
        return data_frame([{"round": each.round, **each.scalars} for each in self.rounds])

    def trade_off(self) -> TradeOff:
        """How well any test can tell from all charges of the ledger whether one user took part."""
        record = read_run(self.folder)
        return trade_off(record.ledger.events, record.accountant)

    def report(self, out: Path | str | None = None) -> Path:
        """Verify the ledger, and write one HTML page, by default report.html in the folder."""
        return write_report(self.folder, Path(out) if out else None)

    def draw(self, out: Path | str | None = None) -> list[Path]:
        """Write charts as PNG and SVG, by default into `charts` in the folder; return the files."""
        return write_charts(self.folder, Path(out) if out else self.folder / "charts")


Hosted = Callable[[Experiment, PrivacyRecords], Transport]
"""Makes the transport to the users of an experiment, once its records are open."""
Follow = Callable[[Experiment, int, Callable[[OnRound], Run]], Run]
"""Shows a run: gets the number of released rounds, and what runs it with an observer."""


def _state_after(source: Path, experiment: Experiment) -> ServerState:
    """The state before the first round of a run that starts from another's model.

    Parameters and running statistics are those of the other's end, and so is the server optimiser's
    state if the optimiser has the same name. InvalidValueError if the models differ.
    """
    folder, plan, begun = RunFolder(source), experiment.plan, experiment.initial_state
    _, release = read_released(folder.model)
    if not (found := checkpoints(folder.checkpoints)):
        raise InvalidValueError(f"{source} holds no checkpoint, from which a run could start")
    state = load_checkpoint(found[-1]).state
    ours, theirs = ({n: [*t.shape] for n, t in each.model.items()} for each in (begun, state))
    for name in {**ours, **theirs}:
        if ours.get(name) != theirs.get(name):
            there, here = theirs.get(name, "absent"), ours.get(name, "absent")
            raise InvalidValueError(
                f"trained tensor {name!r} is {there} in {source} and {here} in the run that starts "
                "from it; both must train the same tensors, of the same shapes"
            )
    if release["frozen"]["sha256"] != sha256_of(frozen_of(experiment.task)):
        raise InvalidValueError(
            f"what is frozen in the model differs from what is frozen in that of {source}; a run "
            "that starts from it must have the same"
        )
    statistics = {name: state.statistics[name] for name in begun.statistics}
    state_before = initial_state(plan, state.parameters, statistics)
    same = load_config(folder.plan).server.optimizer == experiment.config.server.optimizer
    return replace(state_before, optimizer=state.optimizer) if same else state_before


def state_to_start_from(
    folder: RunFolder,
    plan: TrainingPlan,
    records: PrivacyRecords,
    initial: ServerState,
    checkpoint_every: int,
) -> ServerState:
    """State of the newest checkpoint, or the initial state; it must fit the plan and the ledger.

    CheckpointError too if checkpoints are lost: an untrained model would replace the run's, or pay
    again for rounds that it has.
    """
    if found := checkpoints(folder.checkpoints):
        return resume(found[-1], plan, records.ledger)
    begun = load_config(folder.plan).output.checkpoint_every
    reached = _reached(folder, plan, records, max(checkpoint_every, begun))
    sign = f"made {folder.model}" if folder.model.exists() else reached
    if sign is not None:
        raise CheckpointError(
            f"{folder.checkpoints} holds no checkpoint, and the run that {sign} had one; restore "
            "it, or start another run"
        )
    return initial


def _reached(
    folder: RunFolder, plan: TrainingPlan, records: PrivacyRecords, checkpoint_every: int
) -> str | None:
    """A sign that the run was further than its first checkpoint, if there is one."""
    for release in folder.releases():
        if release.round > checkpoint_every:
            return f"released round {release.round} in {folder.metrics}"
    for row in records.ledger.charges():
        if row.run == plan.run and row.round > checkpoint_every:
            return f"charged round {row.round} in its ledger"
    return None


def conduct(
    folder: RunFolder,
    experiment: Experiment,
    state: ServerState,
    transport: Transport,
    records: PrivacyRecords,
    on_round: OnRound,
    clock: Callable[[], float] | None = None,
    auditor: Auditor | None = None,
    *,
    keep_going: bool = False,
) -> Run:
    """Run an experiment to its end or to the end of its budget, writing everything into a folder.

    It ends before that if too few users count, by what was released, unless it is to keep going.

    After each release its metrics are written, then the checkpoint, then `on_round` is called. So
    if every round has a checkpoint, a crash leaves at most one charged round in none. A resumed run
    repeats the rounds since its last checkpoint as new attempts, with new charges. Where there is
    no room to write, the run waits for it. `clock` gives the seconds that time the rounds of a
    simulation; it is None in a deployment.
    """
    plan, output = experiment.plan, experiment.config.output
    evaluation, best = experiment.evaluation, _Best(folder)

    def at_present() -> Checkpoint:
        return Checkpoint(state, plan.digest, records.ledger.head)

    def keep() -> None:
        checkpoint = at_present()
        with_room(lambda: save_checkpoint(folder.checkpoints, checkpoint, best.checkpoint))

    _settle(experiment, state, records)
    observed: tuple[OnRelease, ...] = (auditor.observe,) if auditor else ()
    rounds = train(plan, state, transport, records, experiment.entropy, *observed)
    latest, figures = None, dict[str, Any]()
    folder.forget_end()
    if keep_going:  # what said the budget is a round in the middle now
        _restate(folder, state.round, records.ledger.epsilon(records.budget))
    sampling = plan.sampling.event()
    counted = Contributors.of(folder.results()[: state.round], sampling)
    # How many examples users have is an estimate, which may be far too large.
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
        seconds = clock() - began if clock else None
        result = replace(result, simulation_only_seconds=seconds)
        if state.round % output.evaluate_every == 0 or state.round == plan.rounds:
            latest, figures = state, _measured(experiment, state.model)
            result = replace(result, **figures)
            best.consider(result, at_present())
        if evaluation and evaluation.due(state.round, last=state.round == plan.rounds):
            result = evaluation.added(result, state.model, records, experiment.entropy)
        with_room(partial(folder.append_metrics, asdict(result)))
        counted = counted.with_round(result, sampling)
        if state.round % output.checkpoint_every == 0:
            keep()
        on_round(result)
    keep()
    if latest is not state:
        figures, results = _measured(experiment, state.model), folder.results()
        best.consider(replace(results[-1], **figures) if results else None, at_present())
    transport.release_resources()
    return _ended(folder, experiment, stop, state, records, auditor, figures, counted, best)


class _Best:
    """The best of a run's models, by held-out rows; a resumed run knows it by its checkpoints."""

    def __init__(self, folder: RunFolder) -> None:
        kept = {path.stem: path for path in checkpoints(folder.checkpoints)}
        named = {f"round-{result.round:06d}": result for result in folder.results()}
        self.round = best_round(result for stem, result in named.items() if stem in kept)
        number = self.round.round if self.round else None
        path = None if number is None else kept[f"round-{number:06d}"]
        self.checkpoint = load_checkpoint(path) if path else None

    def consider(self, result: RoundResult | None, checkpoint: Checkpoint) -> None:
        """Remember a round and its checkpoint if its model is better than all before."""
        rounds = [each for each in (self.round, result) if each]
        if result and best_round(rounds) is result:
            self.round, self.checkpoint = result, checkpoint

    def write(self, folder: RunFolder, experiment: Experiment) -> None:
        """Write the model, if one was measured; the choice depends on all rounds and costs them."""
        if self.round and self.checkpoint:
            last = folder.results()[-1]
            stated = replace(self.round, epsilon=last.epsilon, randomness=last.randomness)
            about = [stated], experiment.classes
            model = released_model(experiment.task, self.checkpoint.state, *about)
            with_room(lambda: write_atomically(folder.best, model))


def _settle(experiment: Experiment, state: ServerState, records: PrivacyRecords) -> None:
    """Charge what the run had drawn when it was killed; without the budget, nothing more is."""
    plan, evaluation = experiment.plan, experiment.evaluation
    drawn = {plan.run: plan.mechanism_at(state.clipping_norms).event}
    if evaluation:
        drawn[evaluation.run] = evaluation.events(1)
    for run, event in drawn.items():
        with suppress(BudgetExceededError):
            records.settle(event, run, experiment.entropy.randomness)


def _guaranteed(
    plan: TrainingPlan, stop: Stop, state: ServerState, records: PrivacyRecords
) -> float:
    """The ε of a run: what the ledger's charges cost, or the budget of a run that ended early."""
    early = stop is Stop.TOO_FEW and state.round < plan.rounds
    return records.budget.epsilon if early else records.ledger.epsilon(records.budget)


def _write_model(
    folder: RunFolder,
    experiment: Experiment,
    stop: Stop,
    state: ServerState,
    records: PrivacyRecords,
) -> None:
    """Write the released model, after its last round's line states the final cost of the run."""
    plan, results = experiment.plan, folder.results()
    # Later rounds may have led nowhere, where a resumed run could repeat none of them.
    if stop is Stop.TOO_FEW or (results and results[-1].round > state.round):
        _restate(folder, state.round, _guaranteed(plan, stop, state, records))
    model = released_model(experiment.task, state, folder.results(), experiment.classes)
    with_room(lambda: write_atomically(folder.model, model))


def _restate(folder: RunFolder, number: int, epsilon: float) -> None:
    """Write down once more what a round released, if the run costs another ε by now."""
    for own in folder.results():
        if own.round == number and own.epsilon != epsilon:
            with_room(partial(folder.append_metrics, asdict(replace(own, epsilon=epsilon))))


def _ended(
    folder: RunFolder,
    experiment: Experiment,
    stop: Stop,
    state: ServerState,
    records: PrivacyRecords,
    auditor: Auditor | None,
    figures: Mapping[str, Any],
    counted: Contributors,
    best: _Best,
) -> Run:
    """Write the models and the end of a run into its folder, and return the run."""
    plan, privacy, charges = experiment.plan, experiment.config.privacy, records.ledger.charges()
    _write_model(folder, experiment, stop, state, records)
    best.write(folder, experiment)
    if plan.sampling.rounds > 1 and not records.ledger.open_series(plan.run):
        with_room(lambda: records.participation.forget_series(plan.run))  # of one that was killed
    # Canaries are in the rounds alone, not in what is asked between them.
    of_rounds = (row for row in charges if row.run == plan.run)
    charged = records.ledger.epsilon(records.budget)
    facts: dict[str, Any] = {
        "stop": stop,
        "epsilon": _guaranteed(plan, stop, state, records),
        "delta": records.budget.delta,
        "warnings": notes.of_run(
            experiment, stop, counted, folder.results(), charged, figures["loss"]
        ),
    }
    with_room(partial(folder.write_end, RunEnd(round=state.round, **facts, **figures)))
    return Run(
        folder=folder.path,
        task=experiment.task,
        state=state,
        ledger=Path(privacy.ledger) if privacy.ledger else folder.ledger,
        audit=auditor.conclude(paid_events(of_rounds)) if auditor else None,
        **facts,
        best=best.round,
        best_state=best.checkpoint.state if best.checkpoint else None,
        **figures,
    )


def _measured(experiment: Experiment, model: Tensors) -> dict[str, Any]:
    """What a model is worth on held-out rows, as it is and as their users make it their own.

    What was spent must not be lost for a figure that cannot be computed.
    """
    task, users = experiment.task, experiment.personalised
    general, personal = dict[str, Any](), dict[str, Any]()
    if experiment.held_out and not task.personal:
        general = _figures(evaluate(task, experiment.held_out, experiment.device, model))
    if users is not None:
        try:
            personal = _figures(users.evaluate(model))
        except Exception as error:
            _log.warning("held-out users cannot personalise the model: %s", error)
    if task.personal or not personal:
        return general or personal or {"loss": None, "accuracy": None}
    own = {"accuracy": personal["accuracy"], "loss": personal["loss"], **personal["figures"]}
    more = {name: value for name, value in own.items() if value is not None}
    for key, found in (("figures", more), ("held_out_users", personal["held_out_users"])):
        general[key] = general[key] | {f"personalised_{n}": value for n, value in found.items()}
    return general


def _figures(found: Evaluation) -> dict[str, Any]:
    for name, reason in found.failed.items():
        _log.warning("figure %s cannot be computed: %s", name, reason)
    return {name: getattr(found, name) for name in _MEASURED}


@contextmanager
def opened(setup: RunSetup, experiment: Experiment) -> Iterator[tuple[PrivacyRecords, ServerState]]:
    """Open the folder and the records of a run, and find the state to start or to go on from."""
    folder, plan, before = setup.folder, experiment.plan, None
    if setup.resuming:
        setup.refuse_other_plan(experiment)
    else:
        check_budget(experiment, spent_in(setup.ledger, plan.population))
        setup.refuse_taken_name()
        before = _state_after(setup.start, experiment) if setup.start else None
        folder.create()
    files, budget = (setup.ledger, record_path(setup.ledger)), experiment.budget
    with (
        folder.held(),
        PrivacyRecords.open(*files, plan.population, budget, resuming=setup.resuming) as records,
    ):
        records.participation.bind(setup.run, experiment.enrolled)
        if before:  # before the plan, as a folder with a plan is resumed from its checkpoints
            begun = Checkpoint(before, plan.digest, records.ledger.head)
            save_checkpoint(folder.checkpoints, begun)
        # After ledger and record were created: a run that is resumed without them has lost them.
        setup.write_plan(experiment)
        start, every = experiment.initial_state, experiment.config.output.checkpoint_every
        state = state_to_start_from(folder, plan, records, start, every)
        folder.results()  # what is damaged is refused before users are asked
        setup.write_budget(experiment)  # after the ledger was found to be the run's
        yield records, state


def spent_in(ledger: Path, population: str | None = None) -> list[RoundEvent]:
    """What a ledger holds, if there is one; LedgerError if it is of another population."""
    if not ledger.exists():
        return []
    opened = Ledger.open_or_create(ledger, population) if population else Ledger.open(ledger)
    with opened as found:
        return found.spent()
