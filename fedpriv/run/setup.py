"""How a run starts or resumes: its name, folder and settings, and which settings are refused."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import tomli_w

from fedpriv.build import Enrolled, Experiment, HeldOut, build
from fedpriv.config import Config, FederationSection, load_config
from fedpriv.data.files import read_npz
from fedpriv.data.population import load_population
from fedpriv.errors import DataError, InvalidValueError
from fedpriv.ledger.events import RoundEvent
from fedpriv.ledger.ledger import Ledger
from fedpriv.local import ALGORITHMS
from fedpriv.report.records import versions
from fedpriv.run.folder import RunFolder
from fedpriv.training.checkpoint import write_atomically
from fedpriv.training.plan import TrainingPlan


@dataclass(frozen=True)
class RunSetup:
    """What is known of a run before its plan is made."""

    config: Config  # of a resumed run, with the noise that it started with
    run: str  # its name in the ledger
    folder: RunFolder
    ledger: Path
    resuming: bool

    @classmethod
    def of(cls, file: Path, assignments: list[str], out: Path | None, *, resume: bool) -> Self:
        """Read an experiment, with "a.b=value" overrides; by default `out` is new, under runs/.

        With `resume`, the run in `out` is resumed, or started if there is none.
        """
        return cls.at(load_config(file, assignments), out, resume=resume)

    @classmethod
    def at(cls, config: Config, out: Path | None, *, resume: bool) -> Self:
        """As `of`, for settings that have been read already."""
        # A seeded run can be repeated, so its name is the same each time.
        suffix = os.urandom(4).hex() if config.seed is None else f"seed{config.seed}"
        run = config.run or f"{config.name}-{suffix}"
        folder = RunFolder(out or Path("runs") / run)
        ledger = Path(config.privacy.ledger) if config.privacy.ledger else folder.ledger
        resuming = resume and folder.plan.exists()
        if resuming:
            run, config = _as_begun(folder, config)
        return cls(config, run, folder, ledger, resuming)

    @property
    def spent(self) -> list[RoundEvent]:
        """What the noise is calibrated beside; a resumed run was calibrated when it started."""
        if self.resuming or not self.ledger.exists():
            return []
        with Ledger.open(self.ledger) as ledger:
            return ledger.spent()

    def on_nodes(self, section: FederationSection, users: Enrolled) -> Experiment:
        """The experiment with these users, who are at nodes."""
        self.refuse_true_figures("on nodes")
        if self.config.local.max_examples is None:
            raise InvalidValueError(
                "local.max_examples is absent; on nodes it must be given, since a user with very "
                "many examples would take the time of all others of its node"
            )
        held_out = held_out_rows(self.config, section)
        return build(self.config, self.run, users, held_out, self.spent)

    def refuse_true_figures(self, where: str) -> None:
        """Refuse what only a simulation in one process can know or do."""
        if self.config.output.simulation_only:
            raise InvalidValueError(
                f"output.simulation_only is true; {where} it must be false, since only a "
                "simulation in one process has figures that are not private"
            )
        if self.config.local.algorithm not in ALGORITHMS:
            raise InvalidValueError(
                f"local.algorithm is {self.config.local.algorithm!r}; {where} it must be one of "
                f"{', '.join(ALGORITHMS)}, since others are not known there"
            )

    def write_plan(self, experiment: Experiment) -> None:
        """Make the folder with the resolved plan; of a resumed run, refuse another plan."""
        if self.resuming:
            self.refuse_other_plan(experiment.plan)
            return
        self.folder.create()
        # The plan last: a folder that has it holds a run, and then has the digest too.
        write_atomically(self.folder.plan_digest, f"{experiment.plan.digest}\n".encode())
        write_atomically(self.folder.plan, _resolved_plan(experiment).encode())

    def refuse_other_plan(self, plan: TrainingPlan) -> None:
        """Refuse to resume with another plan than the run began with, however far it has come."""
        path = self.folder.plan_digest
        begun = path.read_text("ascii", "replace").strip() if path.exists() else "unknown"
        if self.resuming and begun != plan.digest:
            raise InvalidValueError(
                f"by {path} the run began with plan {begun[:12]!r}, this is {plan.digest[:12]!r}; "
                "a run can only be resumed with the plan it began with"
            )


def _as_begun(folder: RunFolder, config: Config) -> tuple[str, Config]:
    """Name of a folder's run, and the configuration with the noise that the run began with.

    Calibrated again the noise would differ, as the ledger has grown since.
    """
    begun = load_config(folder.plan)
    noise_multiplier = begun.privacy.noise_multiplier
    if begun.run is None or noise_multiplier is None:
        raise InvalidValueError(
            f"{folder.plan} is damaged: a plan that was begun has run and privacy.noise_multiplier"
        )
    if config.privacy.noise_multiplier is not None:
        return begun.run, config
    return begun.run, config.with_noise(noise_multiplier)


def _resolved_plan(experiment: Experiment) -> str:
    """Configuration as it was run, under a head of facts; it can be run again."""
    plan = experiment.plan
    facts = {
        "population": plan.population,
        "enrolled users": plan.sampling.population,
        "expected cohort": f"{plan.sampling.expected_cohort_size:g}",
        "parameters": plan.layout.dimension,
        "software": ", ".join(f"{name} {number}" for name, number in versions().items()),
    }
    for query in plan.mechanism.query.events:
        stated = f"clipping norm {query.clipping_norm:g}, noise stddev {query.noise_stddev:g}"
        facts[f"group {query.group}"] = stated
    head = "".join(f"# {name}: {value}\n" for name, value in facts.items())
    return head + tomli_w.dumps(experiment.config.model_dump(exclude_none=True))


def held_out_rows(config: Config, section: FederationSection) -> HeldOut:
    """Rows of no enrolled user: those of `federation.held_out`, or of the configured data."""
    if section.held_out is None:
        return load_population(config.data.name, config.data.options).test
    rows = read_npz(Path(section.held_out))
    counts = {len(array) for array in rows.values()}
    if len(counts) != 1 or 0 in counts:
        raise DataError(
            f"{section.held_out} holds fields with {sorted(counts)} rows; all need the same "
            "number, at least one"
        )
    return rows
