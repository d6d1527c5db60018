"""A study for other programs: JSON of the arms, CSV of arms and of runs."""

import csv
import io
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict

from fedpriv.report.machine_readable import number
from fedpriv.studies import ArmSummary, Interval, ReadStudy, RunResult
from fedpriv.studies.results import verdict


def results_json(read: ReadStudy) -> str:
    """One JSON object: the study's name, seeds, baseline and verdict, and a row for each arm.

    Means have the ends of their 95% intervals beside them; null where one seed has none.
    """
    study = read.study
    content = {
        "name": study.name,
        "baseline": study.baseline,
        "seeds": list(study.seeds),
        "missing_runs": read.missing,
        "verdict": list(verdict(study, read.arms)),
        "arms": [_arm(arm) for arm in read.arms],
    }
    return json.dumps(_plain(content), indent=2, allow_nan=False) + "\n"


def results_csv(read: ReadStudy) -> str:
    """The arms as a table; entries of inner tables have columns of their own, a.b."""
    return _csv(_flat(_arm(arm)) for arm in read.arms)


def runs_csv(read: ReadStudy) -> str:
    """The finished runs as a table."""
    return _csv(_flat(_run(run)) for run in read.runs)


def _arm(arm: ArmSummary) -> dict[str, object]:
    row = asdict(arm)
    row["target"] = asdict(arm.target)
    for name in ("accuracy", "loss", "accuracy_difference", "loss_difference"):
        row[name] = _interval(getattr(arm, name))
    row["rounds_to"] = {f"{level:g}": asdict(found) for level, found in arm.rounds_to.items()}
    row["seeds"] = len(arm.seeds)
    return row


def _run(run: RunResult) -> dict[str, object]:
    row = asdict(run)
    del row["evaluations"]
    return row


def _interval(interval: Interval | None) -> dict[str, object]:
    """Ends are null where there is no interval."""
    if interval is None:
        return {"mean": None, "low": None, "high": None}
    return {"mean": interval.mean, "low": interval.low, "high": interval.high}


def _flat(row: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _csv(rows: Iterable[Mapping[str, object]]) -> str:
    """Rows with the columns of any of them, in the order they come."""
    found = list(rows)
    columns = dict.fromkeys(column for row in found for column in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(found)
    return text.getvalue()


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return None if math.isnan(value) else number(value)
    return value
