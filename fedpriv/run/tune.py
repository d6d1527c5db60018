"""Search settings: on public or synthetic users for free, or on the enrolled users at a price.

On public users Optuna searches, and learns from trial to trial. On the enrolled users the search is
one event of their ledger (`Selection`): it draws a random, secret number of trials and independent
settings for each, and only the best trial leaves this module. See `fedpriv.accounting.selection`.
"""

import itertools
import json
import logging
import math
import random
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import numpy as np
import tomli_w
from rich.console import Console

from fedpriv.accounting.accountants import accountant_named
from fedpriv.accounting.calibration import smallest_noise
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.accounting.selection import TRIAL_BITS, number_of_trials
from fedpriv.data.population import Population, load_population
from fedpriv.engine.released import released_model
from fedpriv.engine.task import Task
from fedpriv.engine.transport import Engine, InProcessTransport
from fedpriv.errors import InvalidValueError, RunError, known_names
from fedpriv.evaluation.held_out import evaluate
from fedpriv.experiment.build import (
    Experiment,
    Method,
    SharedRoads,
    check_measured,
    method_of,
    on_population,
    records_of,
    settings_of,
)
from fedpriv.experiment.config import (
    Config,
    RangeSection,
    TuneSection,
    flattened,
    for_folder,
    load_config,
    method_left_out,
    parse_config,
    plain,
    put,
    tables_of,
)
from fedpriv.experiment.mechanism import Mechanism
from fedpriv.ledger.events import (
    PrivacyBudget,
    Randomness,
    RoundEvent,
    SamplingPolicy,
    Selection,
    SumQueryEvent,
    Trial,
)
from fedpriv.ledger.ledger import ProposedCharge
from fedpriv.ledger.participation import record_path
from fedpriv.measures.figures import ALWAYS, BETTER
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.privacy.sampling import FixedSizeSampling, PoissonSampling
from fedpriv.report.tables import Column, Table, print_table, screen
from fedpriv.run.run import RunSetup
from fedpriv.support.checks import checked_arguments, epsilon_up, plain_numbers, require
from fedpriv.support.disk import with_room, write_atomically
from fedpriv.support.importing import check_installed
from fedpriv.support.logs import silenced
from fedpriv.training.optimizers import ServerOptimizer
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.request import LocalTraining
from fedpriv.training.rounds import RoundResult, ServerState, train

if TYPE_CHECKING:
    import optuna

Settings = Mapping[str, Any]
"""Values by key of an experiment."""

Candidates = RangeSection | list[Any]

_RATE, _LOCAL, _NORM = "server.options.learning_rate", "local.learning_rate", "clipping.norm"
_Q, _ROUNDS = "privacy.sampling_probability", "rounds"
DEFAULT_SPACE: Mapping[str, Candidates] = {
    _RATE: RangeSection(low=0.01, high=1.0),
    _LOCAL: RangeSection(low=0.05, high=1.0),
    _NORM: RangeSection(low=0.05, high=1.0),
    _Q: [0.1, 0.3, 0.6],
    _ROUNDS: [50, 100, 200],
}
# Sections that a trial may not change, except for q: they set users, measures and the budget.
_FIXED = (
    "data", "engine", "name", "output", "run", "seed", "tune", "federation", "trackers", "privacy",
)  # fmt: skip
_MARGIN = 1.0 - 2.0**-30  # a factor of noise multipliers that covers their rounding
_UNLIMITED = PrivacyBudget(math.inf, 0.5, lambda _events, _delta: math.inf)
_HOME = Path("tuning")  # default parent of folders
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tried:
    """A trial on public users."""

    settings: Settings
    score: float | None  # None: the trial failed


@dataclass(frozen=True)
class Tuning:
    """The result of a search; a search on users releases nothing else."""

    folder: Path  # of experiment.toml; after a search on users also of the model and the ledger
    settings: Settings  # the best settings; empty if no trial ended
    score: float | None  # of the objective, with the best settings
    tried: tuple[Tried, ...] = ()  # every trial, only on public users
    # The cost of all charges of the ledger, including this search; 0 on public users.
    epsilon: float = 0.0
    arguments: Mapping[str, Any] = field(default_factory=dict)  # for `simulate`; only from `tune`


@checked_arguments
def tune(
    population: Population,
    task: Task,
    mechanism: Mechanism,
    *,
    on: Literal["public", "users"],
    local: LocalTraining | None = None,
    server: ServerOptimizer | None = None,
    space: Mapping[str, Sequence[Any] | tuple[float, float]] | None = None,
    trials: int = 30,
    law: Literal["negative-binomial", "poisson"] = "negative-binomial",
    shape: float = 1.0,
    objective: str = "accuracy",
    better: Literal["larger", "smaller"] | None = None,
    held_out_is_public: bool = False,
    users: int | None = None,
    seed: int | None = None,
    ledger: Path | str | None = None,
    out: Path | str | None = None,
    name: str = "tuning",
    engine: Engine | None = None,
    quiet: bool = False,
) -> Tuning:
    """Search learning rates, clipping norm, q and rounds for `simulate`.

    With `on="public"`, `population` holds people who are not enrolled, such as public or synthetic
    ones; the search costs no privacy, and Optuna runs it (`pip install 'fedpriv[tune]'`). With
    `on="users"`, it holds the enrolled users: the whole search, including the model it finds, costs
    the mechanism's (ε, δ), and is charged before it begins. Settings are then drawn at random,
    since the price holds for trials that do not learn from each other, and the number of trials is
    random and secret. Only the best trial is returned; its model is in the folder.

    >>> import tempfile, numpy as np, torch, fedpriv
    >>> x, y = np.eye(4, dtype=np.float32).repeat(50, 0), np.arange(4).repeat(50)
    >>> people = fedpriv.Population.from_arrays(x, y, np.arange(200), held_out=(x, y))
    >>> mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0))
    >>> mechanism = mechanism.calibrate(epsilon=8.0, delta=1e-3, rounds=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = fedpriv.tune(
    ...         people, fedpriv.Task(torch.nn.Linear(4, 4)), mechanism, on="public",
    ...         local=fedpriv.SGD(1.0, epochs=1), space={"clipping.norm": (0.1, 1.0)}, trials=2,
    ...         seed=0, out=f"{folder}/tuning", quiet=True,
    ...     )
    ...     sorted(found.arguments), 0.1 <= found.settings["clipping.norm"] <= 1.0
    (['local', 'mechanism', 'server'], True)

    Arguments that `simulate` does not have, or that differ:

    * mechanism: calibrated; its (ε, δ) apply to each trial on public users, and to the whole search
      on users.
    * space: by key, a pair (low, high) of numbers, searched on a logarithmic scale, or a list of
      values. Keys are those of a file, such as rounds, privacy.sampling_probability, local.momentum
      and server.options.beta1; by default learning rates, norm, q and rounds.
    * trials: their number; on users the mean number.
    * law, shape: distribution of the number of trials on users.
    * objective: "accuracy", "loss" or the name of a figure of the task, on the held-out rows.
    * better: the better direction of the objective, "larger" or "smaller"; required unless the
      objective is accuracy, loss or a built-in figure.
    * held_out_is_public: True if the held-out rows are public; on users they must be, since trials
      are compared by them.
    * users: on public users, the number N of enrolled users; averages get the noise of theirs.
    * seed: makes the search repeatable; on users the guarantee then does not hold against those who
      know it.
    """
    if on not in ("public", "users"):
        raise InvalidValueError(f"on is {on!r}; it must be 'public' or 'users'")
    if mechanism.epsilon is None or mechanism.rounds is None:
        raise InvalidValueError("the mechanism has no budget; calibrate it, as for simulate")
    section = {
        "trials": trials, "law": law, "shape": shape, "objective": objective, "better": better,
        "users": users, "held_out_is_public": held_out_is_public,
        "space": {key: _values_of(key, part) for key, part in (space or {}).items()},
    }  # fmt: skip
    method = Method(task, mechanism, *method_left_out(mechanism, local, server))
    config = settings_of(name, population, method, engine, ledger, seed=seed, tune=section)
    table, folder = config.model_dump(exclude_none=True), Path(out) if out else None
    search = _Search.of(table, "the search", population, folder, screen(quiet=quiet), task=task)
    tuning = search.on_users() if on == "users" else search.on_public()
    if not tuning.settings:
        return tuning
    chosen = search.configured(tuning.settings)
    delta, enrolled, best = cast(float, mechanism.delta), search.users, chosen.mechanism()
    arguments: dict[str, Any] = {"local": chosen.training(), "server": chosen.server.build()}
    if on == "users":
        best = replace(best, accountant=search.charged["accountant"])
        arguments["ledger"] = search.charged["ledger"]
    arguments["mechanism"] = best.calibrate(
        epsilon=mechanism.epsilon, delta=delta, rounds=chosen.rounds, users=enrolled
    )
    return replace(tuning, arguments=arguments)


def tune_file(
    file: Path,
    assignments: Sequence[str],
    out: Path | None,
    *,
    on: Literal["public", "users"],
    price_only: bool,
) -> Tuning:
    """Search settings for an experiment in a file, print the best, and write them to a folder.

    A search on public users never loads the enrolled users of the section `data`.
    """
    config, source = load_config(file, assignments), str(file)
    # With resolved defaults, which a trial's norm would otherwise change.
    table = config.model_dump(exclude_unset=True, exclude_none=True)
    reasons = {
        "federated_evaluation": "a trial is priced only by its rounds",
        "audit": "a search releases only the best of its trials",
    }
    for name, reason in reasons.items():
        if getattr(config, name) is not None:
            raise InvalidValueError(f"{name} is given; it must be absent, as {reason}")
    if on == "public" and price_only:
        raise InvalidValueError("--price is given with --on public, which costs nothing")
    data = config.simulated_data if on == "users" else (config.tune or TuneSection()).public
    if data is None:
        raise InvalidValueError(
            "tune.public is absent; it must name people who are not enrolled, such as public or "
            "invented ones"
        )
    population = load_population(data.name, data.options)
    assigned_keys = {assignment.partition("=")[0].strip() for assignment in assignments}
    search = _Search.of(table, source, population, out, screen(), assigned_keys)
    return search.on_users(price_only=price_only) if on == "users" else search.on_public()


@dataclass(frozen=True)
class _Search:
    """A search, on public or enrolled users."""

    setup: RunSetup
    table: Mapping[str, Any]  # of the experiment
    source: str  # of the table, for messages
    population: Population
    users: int  # number of users that the noise is for
    console: Console
    kept: Set[str]  # keys that are searched only if tune.space names them
    task: Task | None  # None: the task of the experiment
    roads: SharedRoads = field(default_factory=SharedRoads)

    @classmethod
    def of(
        cls,
        table: Mapping[str, Any],
        source: str,
        population: Population,
        out: Path | None,
        console: Console,
        kept: Set[str] = frozenset(),
        task: Task | None = None,
    ) -> Self:
        """Return the search for an experiment; its default clipping norm is for enrolled users."""
        config = parse_config(table, source)
        if (larger := config.population.as_if) is not None:
            raise InvalidValueError(
                f"population.as_if is {larger}; for a search it must be absent; tune.users gives "
                "the number of users that the noise is for"
            )
        mechanism, users = config.mechanism(), config.tune.users if config.tune else None
        users = users or records_of(population, mechanism).users.population
        norm = getattr(mechanism.for_users(users).clipping, "norm", None)
        table = table if norm is None else _with(table, {_NORM: norm})
        setup = RunSetup.at(parse_config(table, source), out, resume=False, home=_HOME)
        outs = setup.folder.path / "experiment.toml", setup.folder.ledger, setup.folder.model
        if any(path.exists() for path in outs):
            raise InvalidValueError(f"{outs[0].parent} holds a search already; take another folder")
        return cls(setup, table, source, population, users, console, kept, task)

    def configured(self, settings: Settings) -> Config:
        """Return the experiment with other settings."""
        return parse_config(_with(self.table, settings), self.source)

    def prepare(
        self, settings: Settings, noise: float | None, run: str
    ) -> tuple[Experiment, InProcessTransport]:
        """Return the experiment with these settings and this noise, calibrated if None."""
        config = self.configured(settings).model_copy(update={"run": run})
        config = config if noise is None else config.with_noise(noise)
        method = method_of(config, self.task) if self.task else None
        return on_population(config, run, self.population, method=method, roads=self.roads)

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """All values of the experiment by key, with defaults of options."""
        config = self.setup.config
        parts = config.mechanism(), config.training(), config.server.build()
        return flattened(config.model_dump() | tables_of(*parts))

    @property
    def charged(self) -> dict[str, str]:
        """The settings with which a run of the same users counts a search on them."""
        return {"ledger": str(self.setup.ledger.resolve()), "accountant": "rdp"}

    @property
    def section(self) -> TuneSection:
        return self.setup.config.tune or TuneSection()

    @property
    def shape(self) -> float | None:
        """The shape of the law of the number of trials; None for Poisson."""
        return None if self.section.law == "poisson" else self.section.shape

    @property
    def sign(self) -> float:
        """The factor by which the largest objective is best: 1 or -1."""
        objective = self.section.objective
        direction = self.section.better or BETTER.get(objective)
        if direction is None:
            raise InvalidValueError(
                "tune.better is absent; it must be larger or smaller, which the name of "
                f"tune.objective {objective!r} does not say"
            )
        return 1.0 if direction == "larger" else -1.0

    @cached_property
    def space(self) -> Mapping[str, Candidates]:
        """Candidates by key; by default around the numbers of the experiment."""
        current = {key: self.values.get(key) for key in DEFAULT_SPACE if key not in self.kept}
        space = self.section.space or {
            key: _with_value(DEFAULT_SPACE[key], value)
            for key, value in current.items()
            if isinstance(value, int | float)
        }
        for key, values in space.items():
            if key.split(".")[0] in _FIXED and key != _Q:
                raise InvalidValueError(f"tune.space has {key}, which no trial may change")
            if values == []:
                raise InvalidValueError(f"tune.space.{key} is empty; it must have a value")
            for value in values if isinstance(values, list) else (values.low, values.high):
                _check_writable(key, value)
                self.configured({key: value})
        return space

    @property
    def priced(self) -> list[str]:
        """The keys that determine the price of a trial."""
        return [key for key in (_Q, _ROUNDS) if key in self.space]

    def on_public(self) -> Tuning:
        """Search on people who are not enrolled; it costs nothing."""
        check_installed("tune", "optuna")
        import optuna  # noqa: PLC0415 - an extra

        section, space = self.section, self.space
        current = {key: self.values.get(key) for key in space}
        base, _ = self.prepare({}, None, "trial")
        ratio = base.plan.sampling.population / (section.users or base.plan.sampling.population)
        if ratio != 1.0 and isinstance(base.plan.sampling, FixedSizeSampling):
            raise InvalidValueError(
                f"tune.users is {section.users} and cohorts have a fixed size, whose noise depends "
                "on the number of users; it must be that of the public ones, "
                f"{base.plan.sampling.population}"
            )
        score, sign = _scorer(section.objective, base), self.sign
        trials, reason = list[Tried](), ""
        folder = self.setup.folder
        folder.create()
        sampler = optuna.samplers.TPESampler(seed=self.setup.config.seed)
        with silenced(logging.INFO):  # Optuna would name its study
            study = optuna.create_study(direction="maximize", sampler=sampler)
            if all(_holds(space[key], value) for key, value in current.items()):
                study.enqueue_trial(current, skip_if_exists=True)
        for number in range(section.trials):
            trial = study.ask()
            settings = {key: _suggested(trial, key, values) for key, values in space.items()}
            result = None
            try:
                experiment, transport = self.prepare(settings, None, f"trial-{number}")
                if ratio != 1.0:
                    noise = experiment.plan.noise_multiplier * ratio
                    experiment, transport = self.prepare(settings, noise, f"trial-{number}")
                result = score(_trained(experiment, transport)[0])
            except Exception as error:  # a failed trial must not stop the others
                reason = f"{type(error).__name__}: {error}"
                _log.warning("trial %d failed: %s", number, reason)
            study.tell(trial, -math.inf if result is None else sign * result)
            trials.append(Tried(settings, result))
            text = "failed" if result is None else f"{section.objective} {result:.4f}"
            self._say(f"trial {number + 1} of {section.trials}: {text}  {_words(settings)}")
        scored = [(sign * trial.score, trial) for trial in trials if trial.score is not None]
        if not scored:
            raise RunError(f"none of {len(trials)} trials ended; the last one raised {reason}")
        best = max(scored, key=itemgetter(0))[1]
        lines = [json.dumps({**trial.settings, "score": trial.score}) for trial in trials]
        write_atomically(folder.path / "trials.jsonl", "\n".join([*lines, ""]).encode())
        tuning = Tuning(folder.path, best.settings, best.score, tuple(trials))
        return self._written(tuning, "no enrolled user's data was read")

    def on_users(self, *, price_only: bool = False) -> Tuning:
        """Search on the enrolled users: print the price, charge it, try, and release the best."""
        setup, privacy = self.setup, self.setup.config.privacy
        self._check_on_users()
        self._check_trials()
        base, _ = self.prepare({}, None, "trial")
        score, sign = _scorer(self.section.objective, base), self.sign
        event, kinds = self._event(setup.spent)
        limit, delta = cast(float, privacy.epsilon), privacy.delta
        budget = PrivacyBudget(limit, delta, accountant_named("rdp").upper_epsilon)
        price = budget.epsilon_of([*setup.spent, event])
        self._print_price(event, budget, price)
        if not price <= limit:
            raise InvalidValueError(
                f"the search would bring ε to {epsilon_up(price)} at delta {delta}; "
                f"privacy.epsilon is {limit} and must be larger, or the noise must be"
            )
        if price_only:
            return Tuning(setup.folder.path, {}, None, epsilon=price)
        run, folder = f"{setup.run}-tune", setup.folder
        folder.create()
        charge, price, randomness = self._charged(run, event, budget, base)
        self._say("charged; the search prints nothing until it ends")
        best = self._best_of(kinds, score, sign)
        if best is None:
            self._say("no trial ended; the charge stays, and nothing is released")
            return Tuning(folder.path, {}, None, epsilon=price)
        settings, best_score, task, state, last_round = best
        result = replace(
            last_round, run=run, epsilon=price, delta=delta, charge=charge, randomness=randomness
        )
        model = released_model(task, state, [result], base.classes)
        with_room(lambda: write_atomically(folder.model, model))
        cost = f"ε = {epsilon_up(price)} at δ = {delta}, the model included"
        return self._written(Tuning(folder.path, settings, best_score, epsilon=price), cost)

    def _check_on_users(self) -> None:
        section = self.section
        if not section.held_out_is_public:
            raise InvalidValueError(
                "tune.held_out_is_public is false; on users it must be true, since trials are "
                "compared on the held-out rows, and comparing them on private rows has no price"
            )
        for key in self.priced:
            if isinstance(self.space[key], RangeSection):
                raise InvalidValueError(
                    f"tune.space.{key} is a range; on users it must be a list, since each value is "
                    "priced before the first trial"
                )

    def _check_trials(self) -> None:
        """Refuse values with which a trial cannot begin, since its charge would be wasted."""
        ends = {k: v if isinstance(v, list) else [v.low, v.high] for k, v in self.space.items()}
        lowest = {key: values[0] for key, values in ends.items()}
        for key, values in ends.items():
            for value in values:
                self._poisson(lowest | {key: value}, 1.0)

    def _poisson(self, settings: Settings, noise: float | None) -> TrainingPlan:
        """Return the plan of a trial, which must use Poisson sampling."""
        plan = self.prepare(settings, noise, "trial")[0].plan
        if not isinstance(plan.sampling, PoissonSampling):
            raise InvalidValueError(
                f"sampling.policy draws {plan.sampling.event().policy} cohorts; a search on "
                "users has an analysis only for poisson"
            )
        return plan

    def _charged(
        self, run: str, event: RoundEvent, budget: PrivacyBudget, first: Experiment
    ) -> tuple[str, float, Randomness]:
        """Charge the search; return the charge's hash, and the ledger's ε and randomness."""
        files = self.setup.ledger, record_path(self.setup.ledger)
        with PrivacyRecords.open(*files, first.plan.population, budget) as records:
            # The cohorts of trials stay secret; any user may be in one.
            users, attempt = first.plan.sampling.population, records.next_attempt(run, 1)
            record = records.participation.record
            commitment = with_room(lambda: record(run, 1, attempt, np.arange(users)))
            randomness = first.entropy.randomness
            proposal = ProposedCharge(run, 1, attempt, randomness, event, commitment)
            charge = records.charge(proposal)
            return charge.hash, records.ledger.epsilon(budget), records.ledger.randomness

    def _event(self, spent: Sequence[RoundEvent]) -> tuple[RoundEvent, Mapping[Any, Trial]]:
        """Return the search as an event, and the trials by their q and rounds.

        One factor scales the noise of all kinds of trials, to the least that fits the budget.
        """
        privacy, trials = self.setup.config.privacy, dict[tuple[Any, ...], Trial]()
        for chosen in itertools.product(*(cast(list[Any], self.space[k]) for k in self.priced)):
            settings = dict(zip(self.priced, chosen, strict=True))
            plan = self._poisson(settings, privacy.noise_multiplier)
            sampling = plan.mechanism.event.sampling
            q, z = sampling.sampling_probability, plan.noise_multiplier
            trials[chosen] = Trial(q, z * _MARGIN, plan.rounds)

        def scaled(scale: float) -> list[Trial]:
            values = trials.values()
            return [replace(t, noise_multiplier=t.noise_multiplier * scale) for t in values]

        def event(scale: float) -> RoundEvent:
            kinds = tuple(dict.fromkeys(scaled(scale)))
            draw = replace(sampling, sampling_probability=kinds[0].sampling_probability)
            # In units of clipping norms, whose steps are 2⁻²⁴ or half of that.
            queries = (SumQueryEvent("update", 1.0, kinds[0].noise_multiplier, 2.0**-24),)
            selection = Selection(kinds, float(self.section.trials), self.shape)
            return RoundEvent(draw, queries, selection=selection)

        scale = 1.0
        if privacy.noise_multiplier is None:
            limit = cast(float, privacy.epsilon)
            scale = smallest_noise(limit, privacy.delta, lambda s: [*spent, event(s)], "rdp")
        return event(scale), dict(zip(trials, scaled(scale), strict=True))

    def _best_of(
        self, kinds: Mapping[Any, Trial], score: "_Score", sign: float
    ) -> tuple[Settings, float, Task, ServerState, RoundResult] | None:
        """Return the best of a random number of independent trials, the first if scores are equal.

        Trials are identically distributed, so their order reveals nothing. A trial that fails
        counts as the worst, since a user's data may be the reason.
        """
        seed, best = self.setup.config.seed, None
        secret = random.SystemRandom() if seed is None else random.Random(seed)
        count = number_of_trials(secret.getrandbits(TRIAL_BITS), self.section.trials, self.shape)
        # Logs and warnings could reveal trials that are not released.
        with silenced(logging.CRITICAL), warnings.catch_warnings(action="ignore"):
            for number in range(count):
                settings = {key: _drawn(secret, values) for key, values in self.space.items()}
                kind = kinds[tuple(settings[key] for key in self.priced)]
                try:
                    noise = kind.noise_multiplier / _MARGIN
                    experiment, transport = self.prepare(settings, noise, f"trial-{number}")
                    _check_kind(experiment, kind)
                    # A full disk must not make a trial count as the worst.
                    state, result = with_room(partial(_trained, experiment, transport))
                    value = score(state)
                except Exception:  # its message may contain users' data
                    continue
                if best is None or sign * value > sign * best[1]:
                    best = settings, value, experiment.task, state, result
        return best

    def _print_price(self, event: RoundEvent, budget: PrivacyBudget, price: float) -> None:
        search = cast(Selection, event.selection)
        events = [poisson_gaussian(*astuple(trial)) for trial in search.trials]
        dearest = max(budget.epsilon_of([rounds]) for rounds in events)
        law = "Poisson" if search.shape is None else f"negative binomial, shape {search.shape:g}"
        self._say(
            f"The search will cost ε = {epsilon_up(price)} at δ = {budget.delta}, with what "
            f"the ledger {self.setup.ledger} holds already and with the model that it finds; one "
            f"trial alone would cost {epsilon_up(dearest)}."
        )
        self._say(
            f"The number of trials is random ({law}, {self.section.trials} on average) and stays "
            "secret, like every trial except the best. The search takes longer with more trials, "
            "so do not publish when it began and ended."
        )
        if self.setup.config.seed is not None:
            effect = "the guarantee does not hold against those who know it"
            self._say(f"warning: seed is given; {effect}", "yellow")

    def _say(self, line: str, style: str | None = None) -> None:
        self.console.print(line, style=style, soft_wrap=True)

    def _written(self, tuning: Tuning, cost: str) -> Tuning:
        """Write an experiment for `fedpriv simulate`, and print the best settings."""
        table = _with(self.table, tuning.settings)
        table.pop("tune", None)
        if tuning.epsilon:  # the charge of the search counts for whatever these users do next
            table.setdefault("privacy", {}).update(self.charged)
        text = tomli_w.dumps(plain(for_folder(tuning.folder, table)))
        with_room(lambda: write_atomically(tuning.folder / "experiment.toml", text.encode()))
        rows = [
            *((key, str(value)) for key, value in tuning.settings.items()),
            (self.section.objective, f"{tuning.score:.4f}"),
            ("what it cost", cost),
            ("folder", str(tuning.folder)),
        ]
        print_table(Table(self.setup.config.name, [Column("", "text")] * 2, rows), self.console)
        return tuning


_Score = Callable[[ServerState], float]


def _trained(
    experiment: Experiment, transport: InProcessTransport
) -> tuple[ServerState, RoundResult]:
    """Train to the last round, with separate, temporary records."""
    plan, entropy = experiment.plan, experiment.entropy
    if isinstance(entropy, SeededEntropy):  # each trial is its ledger's first run: no name
        entropy = SeededEntropy(int.from_bytes(entropy.key(plan.run)))
    with tempfile.TemporaryDirectory() as folder:
        ledger = Path(folder) / "ledger.sqlite"
        with PrivacyRecords.open(
            ledger, record_path(ledger), plan.population, _UNLIMITED
        ) as records:
            rounds = train(plan, experiment.initial_state, transport, records, entropy)
            return deque(rounds, maxlen=1).pop()


def _scorer(objective: str, first: Experiment) -> _Score:
    """Return the function that scores a trial with a finite number."""
    task, users = first.task, first.personalised
    check_measured(first)
    names = [*ALWAYS, *task.figures]
    if objective not in names:
        choices = known_names(objective, names)
        raise InvalidValueError(f"tune.objective is {objective!r}; {choices}")

    def measured(state: ServerState) -> object:
        if users is not None and task.personal:
            figures = users.evaluate(state.model)
        else:
            figures = evaluate(task, first.held_out, first.device, state.model)
        return {**vars(figures), **figures.figures}.get(objective)

    def score(state: ServerState) -> float:
        value = measured(state)
        if not (isinstance(value, float) and math.isfinite(value)):
            raise RunError(f"the score is {value}; it must be one finite number")
        return value

    if not isinstance(measured(first.initial_state), float):
        sentence = f"tune.objective is {objective!r}, which is not one number; it must be one"
        raise InvalidValueError(sentence)

    return score


def _check_kind(experiment: Experiment, kind: Trial) -> None:
    """Refuse a trial that differs from the priced one."""
    event, rounds = experiment.plan.mechanism.event, experiment.plan.rounds
    planned = event.sampling.sampling_probability, rounds
    priced = kind.sampling_probability, kind.rounds
    is_poisson = event.sampling.policy is SamplingPolicy.POISSON
    if not is_poisson or planned != priced or not event.noise_multiplier >= kind.noise_multiplier:
        raise InvalidValueError("a trial differs from the charged ones")


def _suggested(trial: "optuna.Trial", key: str, values: Candidates) -> Any:
    if isinstance(values, list):
        return trial.suggest_categorical(key, values)
    suggest: Any = trial.suggest_int if values.whole else trial.suggest_float
    return suggest(key, values.low, values.high, log=True)


def _drawn(secret: random.Random, values: Candidates) -> Any:
    if isinstance(values, list):
        return secret.choice(values)
    value = math.exp(secret.uniform(math.log(values.low), math.log(values.high)))
    value = min(max(value, values.low), values.high)
    return round(value) if values.whole else value


def _values_of(key: object, values: object) -> object:
    """Return candidates, a pair or a list, in the form of the configuration."""
    numbers = plain_numbers(values)
    require(isinstance(key, str), f"space has {key!r}, which is not a key; it must be text")
    if isinstance(numbers, tuple):
        if len(numbers) == 2 and all(type(number) in (int, float) for number in numbers):
            return {"low": numbers[0], "high": numbers[1]}
    elif isinstance(values, Sequence | np.ndarray) and not isinstance(values, str | bytes):
        for value in values:
            _check_writable(str(key), value)
        return list(values)
    raise InvalidValueError(
        f"space has {values!r} for {key}; it must be a pair (low, high) of numbers or a list"
    )


def _check_writable(key: str, value: object) -> None:
    """Refuse a value that a search cannot write to its files, since its result would be lost."""
    table = plain({key: value})
    try:
        json.dumps(table)
        tomli_w.dumps(table)
    except (TypeError, ValueError):
        types = "its values must be numbers, text, true or false"
        raise InvalidValueError(f"tune.space.{key} has {value!r}; {types}") from None


def _holds(values: Candidates, value: Any) -> bool:
    if isinstance(values, list):
        return value in values
    return isinstance(value, int | float) and values.low <= value <= values.high


def _with_value(values: Candidates, value: float) -> Candidates:
    """Return the candidates extended to include a value."""
    if _holds(values, value) or value <= 0.0:
        return values
    if isinstance(values, list):
        return [*values, value]
    return RangeSection(low=min(values.low, value), high=max(values.high, value))


def _words(settings: Settings) -> str:
    return ", ".join(
        f"{key} = {value:.3g}" if isinstance(value, float) else f"{key} = {value}"
        for key, value in settings.items()
    )


def _with(table: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Return a copy of an experiment's table with new values."""
    copy = deepcopy(dict(table))
    for key, value in settings.items():
        put(copy, key.split("."), value)
    return copy
