"""The folder of a run: its files, and functions that read them and verify the ledger."""

import codecs
import fcntl
import json
import os
import webbrowser
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from fedpriv.accounting.fdp import trade_off
from fedpriv.accounting.pricing import LedgerContent
from fedpriv.accounting.risks import risks_of
from fedpriv.audit.verdict import AuditResult
from fedpriv.errors import DataError, InvalidValueError, LedgerError
from fedpriv.experiment.config import Config, flattened, load_config
from fedpriv.ledger.ledger import Ledger
from fedpriv.ledger.participation import ParticipationRecord, record_path
from fedpriv.report.records import RunEnd, RunRecord, SimulationOnlyRound, SiteTable, Verification
from fedpriv.report.tables import json_text
from fedpriv.studies import read_study
from fedpriv.studies.results import STUDY, holds_results_alone
from fedpriv.support.checks import require
from fedpriv.support.disk import naming, sync, write_atomically
from fedpriv.support.importing import check_installed
from fedpriv.support.logs import SIMULATION_ONLY
from fedpriv.training.rounds import RoundResult

if TYPE_CHECKING:
    import pandas as pd

    from fedpriv.run.run import Run

_Row = TypeVar("_Row")


class _File:
    """The path of a file in the folder of a run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: "RunFolder", _kind: object) -> Path:
        return folder.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """Files of one run."""

    path: Path

    plan = _File("plan.toml")  # the resolved configuration
    plan_digest = _File("plan.sha256")  # of the first plan, the only one to resume with
    ledger = _File("ledger.sqlite")  # unless the run charges a shared one
    metrics = _File("metrics.jsonl")  # one object per release, in the order of release
    simulation_only = _File("simulation_only.jsonl")  # figures that no guarantee covers
    checkpoints = _File("checkpoints")  # of the server's states
    model = _File("model.safetensors")  # after the last round, even if the run was stopped
    mean = _File("mean.safetensors")  # of the models of the last third of all rounds
    best = _File("best.safetensors")  # of the models on held-out rows, if there are any
    measurements = _File("audit.jsonl")  # of an audit: its key, and measurements of releases
    audit = _File("audit.json")  # the result of the audit
    end = _File("run.json")  # why the run ended, and its last figures; absent before the end
    simulation_only_warnings = _File("simulation_only.json")  # warnings that depend on users' data
    sites = _File("sites.json")  # states of nodes, which reveal who took part: only for the owner

    def charged(self, config: Config) -> Path:
        """Return the ledger that a run with this configuration charges."""
        return Path(config.privacy.ledger) if config.privacy.ledger else self.ledger

    def refuse_run(self) -> None:
        """Refuse a folder that holds a run already."""
        if self.plan.exists():
            raise InvalidValueError(
                f"{self.path} holds a run already; resume it, unless all of its rounds were run, "
                "or choose another folder"
            )

    def create(self) -> None:
        """Make the folder, unless it holds a run already."""
        self.refuse_run()
        for path in (self.model, self.path / STUDY):  # of a search, or a study
            if path.exists():
                raise InvalidValueError(f"{path} exists already; choose another folder")
        self.path.mkdir(parents=True, exist_ok=True)

    def append_metrics(self, row: Mapping[str, object]) -> None:
        """Add a line, durably, after ending a line that a crash cut short.

        Numbers that are not finite are the strings "Infinity" and "NaN".
        """
        _append(self.metrics, row, "strings")

    def append_simulation_only(self, row: Mapping[str, object]) -> None:
        """Add a line, durably, readable only by its owner; numbers that are not finite are null."""
        self.simulation_only.touch(0o600)
        _append(self.simulation_only, row, "null")

    def append_measurement(self, row: Mapping[str, object]) -> None:
        """Add a line to the file of an audit, durably; only its owner can read it."""
        self.measurements.touch(0o600)
        _append(self.measurements, row, "constants")

    def read_measurements(self) -> Iterator[dict[str, object]]:
        """Yield the lines of the file of an audit."""
        return _read(self.measurements)

    def read_metrics(self) -> Iterator[dict[str, object]]:
        """Yield rows of all releases, without lines that a crash cut short."""
        return _read(self.metrics)

    def releases(self) -> list[RoundResult]:
        """Return results of all releases, in order."""
        return _rows(RoundResult, self.metrics, "metrics")

    def results(self) -> list[RoundResult]:
        """Return results of the rounds that led to the newest model, in order.

        A resumed run repeats the rounds after its checkpoint, so their first releases are left out.
        """
        results = list[RoundResult]()
        for release in self.releases():
            while results and results[-1].round >= release.round:
                results.pop()
            results.append(release)
        return results

    def collected(self) -> list[SimulationOnlyRound]:
        """Return figures of all collected rounds, released or not."""
        return _rows(SimulationOnlyRound, self.simulation_only, "figures of rounds")

    def read_audit(self) -> AuditResult | None:
        """Return the result of the audit, if the run has ended and was audited."""
        return _read_if_there(AuditResult, self.audit, "an audit")

    def write_end(self, end: RunEnd) -> None:
        """Write how the run ended; see `append_metrics` on numbers that are not finite.

        Warnings that no guarantee covers go to a separate file, which only its owner can read.
        """
        private = [text for text in end.warnings if text.startswith(SIMULATION_ONLY)]
        if private:
            write_atomically(self.simulation_only_warnings, to_json(private, indent=2), 0o600)
        end = replace(end, warnings=tuple(text for text in end.warnings if text not in private))
        write_atomically(self.end, to_json(asdict(end), indent=2, inf_nan_mode="strings"))

    def read_end(self) -> RunEnd | None:
        """Return how the run ended; None if it is under way or was cut short."""
        end = _read_if_there(RunEnd, self.end, "the end of a run")
        path = self.simulation_only_warnings
        private = _read_if_there(tuple[str, ...], path, "warnings") or ()
        return end and replace(end, warnings=(*end.warnings, *private))

    def forget_end(self) -> None:
        """Remove the files on how the run ended, since it continues."""
        for path in (self.end, self.simulation_only_warnings):
            path.unlink(missing_ok=True)

    def write_sites(self, table: SiteTable) -> None:
        """Replace the table of sites; only its owner can ever read it."""
        write_atomically(self.sites, to_json(table, indent=2), 0o600)

    def read_sites(self) -> SiteTable:
        """Return the table of sites; DataError if it is damaged, or the run has none."""
        if not self.sites.exists():
            raise DataError(f"{self.path} has no sites.json; only a run of `fedpriv serve` does")
        return _read_as(SiteTable, self.sites, "the sites of a run of `fedpriv serve`")


@contextmanager
def held(path: Path, what: str) -> Iterator[None]:
    """Lock a file or folder; if another process has locked it, an error begins with `what`."""
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            sentence = f"{what} that another process uses; stop that process first"
            raise InvalidValueError(sentence) from error
        yield
    finally:
        os.close(descriptor)


def data_frame(rows: Sequence[Mapping[str, object]]) -> "pd.DataFrame":
    """Return rows as a table of pandas; InvalidValueError if it is not installed."""
    check_installed("pandas")
    import pandas as pd  # noqa: PLC0415 - an extra

    return pd.DataFrame(rows)


def _append(path: Path, row: object, not_finite: Literal["constants", "null", "strings"]) -> None:
    # Without a buffer, since closing the file might write a part of it.
    with naming(path), path.open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        end = b"" if file.read(1) in (b"", b"\n") else b"\n"
        data = end + to_json(row, inf_nan_mode=not_finite) + b"\n"
        try:
            while data:
                data = data[file.write(data) :]
            os.fsync(file.fileno())
            if not size:
                sync(path.parent)
        except OSError:
            with suppress(OSError):  # readers skip a line that is not whole
                file.truncate(size)
            raise


def _read(path: Path) -> Iterator[dict[str, object]]:
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            # A crash may have cut the line within a character, which is then left out.
            text, _ = codecs.utf_8_decode(line.removesuffix(b"\n"))
            with suppress(json.JSONDecodeError):
                yield json.loads(text)


def _read_as(kind: type[_Row], path: Path, what: str) -> _Row:
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except ValidationError as error:
        raise DataError(f"{path} cannot be read as {what}: {error.errors()[0]['msg']}") from error


def _read_if_there(kind: type[_Row], path: Path, what: str) -> _Row | None:
    return _read_as(kind, path, what) if path.exists() else None


def _rows(kind: type[_Row], path: Path, what: str) -> list[_Row]:
    adapter = TypeAdapter(kind)
    try:
        return [adapter.validate_python(row) for row in _read(path)]
    except ValidationError as error:
        details = error.errors()[0]
        reason = f"{'.'.join(map(str, details['loc']))}: {details['msg']}"
    except UnicodeDecodeError as error:
        reason = str(error)
    raise DataError(f"{path} cannot be read as {what}: {reason}")


def read_run(folder: Path) -> RunRecord:
    """Read a run and check its ledger.

    LedgerError: the hash chain is broken, cohorts do not match their commitments (if the record of
    cohorts can be read), or a release has no charge.
    """
    run = RunFolder(folder)
    if not run.plan.exists():
        sentence = f"{folder} holds no run and no study; {run.plan.name} and {STUDY} are absent"
        raise InvalidValueError(sentence)
    config = load_config(run.plan)
    path = run.charged(config)
    # Before the ledger: a run that is under way charges each round before its release.
    results, releases, collected = run.results(), run.releases(), run.collected()
    with Ledger.open(path) as ledger:
        cohorts = _verified(ledger, record_path(path))
        charges = tuple(ledger.charges())
        content = LedgerContent(path, ledger.ledger_id, ledger.population_name, charges)
        head = ledger.head
    rounds_by_hash = {charge.hash: (charge.run, charge.round) for charge in charges}
    for release in releases:
        if rounds_by_hash.get(release.charge) != (config.run, release.round):
            raise LedgerError(
                f"ledger {path} does not have the charge of round {release.round} of {run.path}; "
                "its ε would leave out a release"
            )
    released = {(result.round, result.attempt) for result in results}
    collected = [row for row in collected if (row.round, row.attempt) in released]
    return RunRecord(
        name=config.run or config.name,
        folder=folder,
        plan=run.plan.read_text(encoding="utf-8"),
        settings=flattened(config.model_dump(exclude_none=True)),
        rounds_planned=config.rounds,
        delta=config.privacy.delta,
        budget=None if config.privacy.unsafe_no_privacy else config.privacy.epsilon,
        accountant=config.privacy.accountant,
        ledger=content,
        verification=Verification(head, cohorts, len({release.charge for release in releases})),
        rounds=tuple(results),
        simulation_only=tuple(collected),
        audit=run.read_audit(),
        end=run.read_end(),
    )


def _verified(ledger: Ledger, participation: Path) -> bool:
    """Verify a ledger; return whether the record of cohorts was readable and verified too."""
    is_readable = os.access(participation, os.R_OK)
    with ParticipationRecord.open(participation) if is_readable else nullcontext() as record:
        ledger.verify(record)
    return is_readable


def summary_json(folder: Path) -> str:
    """Return a run's state or a study's results as one JSON object, and verify their ledgers.

    Numbers that are not finite are the strings "Infinity" and "NaN".
    """
    if (folder / STUDY).exists():
        from fedpriv.report.study_page import results_json  # noqa: PLC0415 - charts start slowly

        return results_json(read_study(folder))
    record = read_run(folder)
    head, last_result = record.verification.head, record.rounds[-1] if record.rounds else None
    state: RunEnd | RoundResult | None = record.end or last_result
    content = {
        "run": record.name,
        "folder": str(folder),
        "ledger": str(record.ledger.path),
        "head": f"{head.count}:{head.hash}",
        "rounds_planned": record.rounds_planned,
        "budget": record.budget,
        "accountant": record.accountant,
        "stop": None,  # unless it has ended
    }
    if record.early_epsilon is None:  # else the ledger's ε is not a bound
        content["risks"] = risks_of(trade_off(record.ledger.events, record.accountant))
    if state:
        names = {field.name for field in fields(RunEnd)} & vars(state).keys()
        content |= {name: vars(state)[name] for name in sorted(names)}
    return json_text(content)


def write_report(folder: Path, out: Path | str | None = None, *, show: bool = False) -> Path:
    """Write the report of a run or a study as one HTML page; `show` opens it in the browser.

    By default the page is report.html in the folder.
    """
    from fedpriv.report import charts, run_page, study_page  # noqa: PLC0415 - charts start slowly

    path = Path(out) if out else folder / "report.html"
    if not (folder / STUDY).exists():
        content = run_page.page_of_run(read_run(folder))
    elif holds_results_alone(folder):
        raise InvalidValueError(
            f"{folder} holds the results of a study without its runs and ledgers, which a page "
            "verifies; --charts draws what results can show"
        )
    else:
        study = read_study(folder)
        runs = {cell: read_run(folder / cell.path) for cell, _ in study.finished}
        content = study_page.page_of_study(study, runs)
    charts.write_page(charts.render(content), path)
    if show:
        webbrowser.open(path.absolute().as_uri())
    return path


def write_charts(folder: Path, out: Path | str | None = None) -> list[Path]:
    """Draw a run or a study as PNG and SVG, by default into its `charts`; return the files."""
    from fedpriv.report import run_page, study_page  # noqa: PLC0415

    to = Path(out) if out else folder / "charts"
    if (folder / STUDY).exists():
        return study_page.write_study_charts(read_study(folder), to)
    return run_page.write_run_charts(read_run(folder), to)


def draw(runs: Iterable["Path | str | Run"], out: Path | str) -> list[Path]:
    """Draw runs together: accuracy against ε, users and time; return the PNG and SVG files.

    * runs: finished or not, as folders or as returned by `simulate`. Runs that differ only in seeds
      share a line, with a band around their mean.
    * out: the folder for `by-epsilon`, `by-users` and `by-seconds`; the last two are left out if
      all runs have the same number of users, or if times of rounds are unknown.

    A FedprivError names runs that cannot share a chart.
    """
    from fedpriv.report.charts import save_all  # noqa: PLC0415 - charts start slowly
    from fedpriv.report.curves import curves  # noqa: PLC0415

    folders = [Path(run) if isinstance(run, Path | str) else run.folder for run in runs]
    require(bool(folders), "there is no run to draw; give at least one")
    return save_all(curves([read_run(folder) for folder in folders]), Path(out))
