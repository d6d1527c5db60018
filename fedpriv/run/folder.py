"""The folder of a run: where each file lies, and the one rule for writing metrics."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from fedpriv.errors import DataError, InvalidValueError
from fedpriv.studies.results import SIMULATION_ONLY, finite
from fedpriv.training.checkpoint import naming
from fedpriv.training.rounds import RoundResult

_RESULTS = TypeAdapter(list[RoundResult])


def reason(error: ValidationError | UnicodeDecodeError) -> str:
    """What is wrong with a line, in few words."""
    if isinstance(error, UnicodeDecodeError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


@dataclass(frozen=True)
class RunFolder:
    """Files of one run.

    Attributes:
        path: the folder.
    """

    path: Path

    @property
    def plan(self) -> Path:
        """The resolved configuration."""
        return self.path / "plan.toml"

    @property
    def plan_digest(self) -> Path:
        """Digest of the plan that the run began with, to which resuming it is bound."""
        return self.path / "plan.sha256"

    @property
    def ledger(self) -> Path:
        """The ledger, unless the run charges a shared one."""
        return self.path / "ledger.sqlite"

    def participation_of(self, ledger: Path) -> Path:
        """Who took part, beside the ledger that commits to it; readable by its owner only."""
        return ledger.with_suffix(".participation.sqlite")

    @property
    def metrics(self) -> Path:
        """One JSON object per release, in the order of release."""
        return self.path / "metrics.jsonl"

    @property
    def simulation_only(self) -> Path:
        """One JSON object per round of a simulation, of figures that no guarantee covers."""
        return self.path / SIMULATION_ONLY

    @property
    def checkpoints(self) -> Path:
        """Folder of the server's states."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """The model after the last round."""
        return self.path / "model.safetensors"

    @property
    def tensorboard(self) -> Path:
        """Folder of event files, if they were asked for."""
        return self.path / "tensorboard"

    def create(self) -> None:
        """Make the folder.

        Raises:
            InvalidValueError: it holds a run already, or cannot be made.
        """
        if self.plan.exists():
            raise InvalidValueError(
                f"{self.path} holds a run already; resume it or choose another folder"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidValueError(f"{self.path} cannot be made: {error.strerror}") from error

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep other processes from the run until the block is left, or this process ends.

        Two that went on with one run would write over each other's checkpoints.

        Raises:
            InvalidValueError: another process holds it.
        """
        with self.plan.open("r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise InvalidValueError(
                    f"{self.path} holds a run that another process is at; stop that one first"
                ) from error
            yield

    def append_metrics(self, row: Mapping[str, object]) -> None:
        """Add a line; a line that a crash cut short is ended first."""
        self._append(self.metrics, row)

    def append_simulation_only(self, row: Mapping[str, object]) -> None:
        """Add a line; numbers that are not finite are null."""
        self._append(self.simulation_only, finite(row))

    def _append(self, path: Path, row: object) -> None:
        with naming(path), path.open("a+b") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            if file.read(1) not in (b"", b"\n"):
                file.write(b"\n")
            file.write(json.dumps(row).encode() + b"\n")

    def read_metrics(self) -> Iterator[dict[str, object]]:
        """Rows of all releases; lines that a crash cut short are left out."""
        return self._read(self.metrics)

    def results(self) -> list[RoundResult]:
        """Results of all rounds, of the last attempt at each, in order.

        Raises:
            DataError: a line cannot be read.
        """
        try:
            rows = _RESULTS.validate_python(list(self.read_metrics()))
        except (ValidationError, UnicodeDecodeError) as error:
            raise DataError(f"{self.metrics} cannot be read as metrics: {reason(error)}") from error
        last = {row.round: row for row in rows}
        return [last[number] for number in sorted(last)]

    def read_simulation_only(self) -> Iterator[dict[str, object]]:
        """Rows of all rounds that were collected, released or not; likewise."""
        return self._read(self.simulation_only)

    def _read(self, path: Path) -> Iterator[dict[str, object]]:
        if not path.exists():
            return
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
