"""Trackers follow a run: they are called at its start, after each release, and at its end.

They receive only what may be published: settings, released rounds, and the reason why the run
ended. A tracker that fails is reported once and not called again; the run continues.
"""

import hashlib
import logging
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fedpriv.experiment.config import Config, flattened, with_paths
from fedpriv.support.checks import check_types
from fedpriv.support.importing import check_installed, path_of
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.rounds import OnRound, RoundResult, Stop

if TYPE_CHECKING:
    import mlflow
    import wandb
    from torch.utils.tensorboard import SummaryWriter

_PROJECT = "fedpriv"  # default project of runs; a service's environment variable overrides it
_MLFLOW_KEY = "fedpriv.key"
_MLFLOW_PARAMETERS, _MLFLOW_LENGTH = 100, 6000  # limits: per request, and characters of each
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartedRun:
    """A run before its first round, or before it is resumed."""

    name: str  # in its ledger; in a study it includes the arm and seed
    group: str  # name of the experiment; in a study it includes the arm
    key: str  # unique to the run, and the same when the run is resumed
    folder: Path  # of the run's files
    released: int  # number of rounds that were released before
    settings: Mapping[str, object]  # resolved, under keys "a.b"; see `shown_settings`

    @classmethod
    def of(
        cls, config: Config, plan: TrainingPlan, ledger_id: str, folder: Path, released: int
    ) -> "StartedRun":
        """Return the description of a run; its key hashes ledger and name, together unique.

        `released` is the number of rounds that were released before.
        """
        key = hashlib.sha256(f"{ledger_id}/{plan.run}".encode()).hexdigest()[:16]
        facts = {"population": plan.population, "enrolled": plan.sampling.population}
        facts["parameters"] = plan.layout.dimension
        settings = facts | shown_settings(config)
        return cls(plan.run, config.name, key, folder, released, settings)


@dataclass(frozen=True)
class EndedRun:
    """The end of a run."""

    stop: Stop | None  # None: an error or an interrupt cut the run short; it can be resumed
    last: RoundResult | None  # the last round released since the start or resumption

    def __str__(self) -> str:
        why = self.stop or "it was cut short"
        return f"{self.last.round} of {self.last.rounds} rounds: {why}" if self.last else str(why)


class Tracker(ABC):
    """Base class of trackers. A configuration can name a derived class that takes no arguments.

    If a method raises, the tracker is not called again for that run, and the run continues. The
    next round starts only after `on_round` has returned.
    """

    def on_start(self, run: StartedRun) -> None:  # noqa: B027 - optional
        """Start to follow a run; called before anything is charged."""

    @abstractmethod
    def on_round(self, result: RoundResult) -> None:
        """Record a round; called after each release, in the order of rounds."""

    def on_end(self, run: EndedRun) -> None:  # noqa: B027 - optional
        """Stop following a run; called at its end, even after an error or an interrupt."""


class TensorBoard(Tracker):
    """Writes event files into the folder `tensorboard` of the run."""

    def __init__(self) -> None:
        check_installed("tensorboard")
        self._writer: SummaryWriter

    def on_start(self, run: StartedRun) -> None:
        """Write the settings, and hide earlier events of rounds that run again after a crash."""
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra, and slow

        folder = str(run.folder / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=run.released + 1)
        rows = [f"| {key} | {value} |" for key, value in run.settings.items()]
        self._writer.add_text("settings", "\n".join(["| key | value |", "| --- | --- |", *rows]))

    def on_round(self, result: RoundResult) -> None:
        """Write the scalars of a round."""
        for name, value in result.scalars.items():
            self._writer.add_scalar(name, value, result.round)

    def on_end(self, run: EndedRun) -> None:
        """Write the reason for the end of the run, and close the file."""
        self._writer.add_text("end", str(run))
        self._writer.close()


class WandB(Tracker):
    """Sends runs to Weights & Biases, to the project WANDB_PROJECT or "fedpriv".

    It sends nothing about the machine: no output, no load and no code.
    """

    def __init__(self) -> None:
        check_installed("wandb")
        self._run: wandb.Run

    def on_start(self, run: StartedRun) -> None:
        """Create a W&B run with the run's name, grouped by experiment or arm, or resume it."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb  # noqa: PLC0415 - an extra, and slow

        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            disable_job_creation=True,
            host=_PROJECT,  # instead of the machine's name
            silent=not sys.stderr.isatty(),  # otherwise it would write between lines of a log
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", _PROJECT),
            name=run.name,
            group=run.group,
            id=run.key,
            resume="allow",
            reinit="create_new",  # does not affect a run that the caller has open
            dir=os.environ.get("WANDB_DIR", str(run.folder)),
            config=dict(run.settings),
            settings=settings,
        )
        self._run.define_metric("*", step_metric="round")  # repeated rounds may go back

    def on_round(self, result: RoundResult) -> None:
        """Send the scalars of a round."""
        self._run.log({"round": result.round, **result.scalars})

    def on_end(self, run: EndedRun) -> None:
        """Send the reason for the end; a run that was cut short is marked as failed."""
        self._run.summary["end"] = str(run)
        self._run.finish(exit_code=0 if run.stop else 1)


class MLflow(Tracker):
    """Sends runs to MLflow at MLFLOW_TRACKING_URI.

    The experiment is MLFLOW_EXPERIMENT_NAME or "fedpriv". A run that the caller has open in MLflow
    is not affected.
    """

    def __init__(self) -> None:
        check_installed("mlflow")
        self._client: mlflow.MlflowClient
        self._run = ""

    def on_start(self, run: StartedRun) -> None:
        """Create an MLflow run with the run's name and its settings as parameters, or resume it."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient  # noqa: PLC0415 - an extra, and slow
        from mlflow.entities import Param  # noqa: PLC0415

        client = self._client = MlflowClient()
        experiment = _mlflow_experiment(client)
        runs = client.search_runs([experiment], f"tags.`{_MLFLOW_KEY}` = '{run.key}'")
        if runs:
            self._run = runs[0].info.run_id
            client.update_run(self._run, status="RUNNING")
            return
        tags = {_MLFLOW_KEY: run.key, "fedpriv.group": run.group}
        self._run = client.create_run(experiment, run_name=run.name, tags=tags).info.run_id
        settings = [Param(k, str(v)[:_MLFLOW_LENGTH]) for k, v in run.settings.items()]
        for first in range(0, len(settings), _MLFLOW_PARAMETERS):
            client.log_batch(self._run, params=settings[first : first + _MLFLOW_PARAMETERS])

    def on_round(self, result: RoundResult) -> None:
        """Send the scalars of a round."""
        from mlflow.entities import Metric  # noqa: PLC0415

        now = time.time_ns() // 10**6
        metrics = [Metric(name, v, now, result.round) for name, v in result.scalars.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def on_end(self, run: EndedRun) -> None:
        """Send the reason for the end; a run that was cut short is marked as killed."""
        self._client.set_tag(self._run, "fedpriv.end", str(run))
        self._client.set_terminated(self._run, "FINISHED" if run.stop else "KILLED")


TRACKERS: Mapping[str, type[Tracker]] = {  # by name
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
}


@dataclass(frozen=True)
class Callback(Tracker):
    """A function that is called with the result of each round."""

    function: OnRound

    def on_round(self, result: RoundResult) -> None:
        """Call the function."""
        self.function(result)


class Followers:
    """The trackers that follow one run, by name; one that raises is reported and dropped."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers, self._last = dict(trackers), cast(RoundResult | None, None)

    def start(self, run: StartedRun) -> None:
        """Tell the trackers that the run starts."""
        self._tell("at the start", lambda tracker: tracker.on_start(run))

    def released(self, result: RoundResult) -> None:
        """Pass a round's result, without its duration, to all trackers."""
        self._last = public = replace(result, simulation_only_seconds=None)
        self._tell(f"in round {result.round}", lambda tracker: tracker.on_round(public))

    def end(self, stop: Stop | None) -> None:
        """Tell the trackers the reason for the end; None if the run was cut short."""
        self._tell("at the end", lambda tracker: tracker.on_end(EndedRun(stop, self._last)))

    def _tell(self, when: str, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # must not end a run that has spent budget
                problem = f"{type(error).__name__} {when}: {' '.join(str(error).split())}"
                effect = "the run goes on without it, and metrics.jsonl has every round"
                _log.warning("tracker %s raised %s; %s", name, problem, effect)
                del self._trackers[name]


def named(trackers: Sequence[Tracker | OnRound]) -> dict[str, Tracker]:
    """Return trackers, and functions as trackers, under distinct names.

    InvalidValueError: one of them is neither.
    """
    check_types(trackers=(trackers, Sequence))
    followers = dict[str, Tracker]()
    for number, tracker in enumerate(trackers):
        kind = Tracker if isinstance(tracker, type) else Tracker | Callable
        check_types(**{f"trackers[{number}]": (tracker, kind)})
        name = f"{number}: {path_of(tracker)}"
        followers[name] = tracker if isinstance(tracker, Tracker) else Callback(tracker)
    return followers


def shown_settings(config: Config) -> dict[str, object]:
    """Return settings under keys "a.b", without those that describe machines.

    The result omits trackers, the sections federation and tune, the folders of paths, and the
    options of your own data functions, which may hold anything.
    """
    table: dict[str, Any] = config.model_dump(
        exclude_none=True, exclude={"trackers", "federation", "tune"}
    )
    table = with_paths(table, os.path.basename)
    if data := table.get("data"):
        names = (data["name"], data["options"].get("population", ""))
        if any(":" in str(name) for name in names):
            table["data"] = {"name": data["name"]}
    return flattened(table)


def _mlflow_experiment(client: "mlflow.MlflowClient") -> str:
    """Return the id of the experiment, which is created if absent."""
    from mlflow.exceptions import MlflowException  # noqa: PLC0415

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
    try:
        return str(client.create_experiment(name))
    except MlflowException:
        if experiment := client.get_experiment_by_name(name):
            return str(experiment.experiment_id)
        raise
