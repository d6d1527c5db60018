"""Charts of several runs: accuracy against ε, the number of users, and time."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedpriv.errors import DataError, InvalidValueError
from fedpriv.report.charts import Chart
from fedpriv.report.guarantee import (
    about_projection,
    projection_of,
    unit_of,
    users_of,
    with_warnings,
)
from fedpriv.report.records import RunRecord
from fedpriv.report.study_page import line_by_round, line_of, measure_chart, over_seeds, spent
from fedpriv.studies.results import ACCURACY, LOSS, Interval, Measure

_OF_ONE_RUN = ("run", "output", "engine")  # settings that do not distinguish groups of runs
_DERIVED = ("privacy.noise_multiplier",)
_OF_USERS = ("population.as_if", "data.options.users")
_MOST_SETTINGS = 3  # in a legend


@dataclass(frozen=True)
class _Group:
    """Runs whose plans differ at most in seeds."""

    settings: Mapping[str, object]  # by dotted key
    records: Sequence[RunRecord]

    @property
    def users(self) -> int:
        """N, or N′ of the larger population that the users represent."""
        ledger = self.records[0].ledger
        larger = projection_of(ledger)
        return larger.population if larger else users_of(ledger)


def curves(records: Sequence[RunRecord]) -> list[Chart]:
    """Return the charts `by-epsilon`, `by-users` and `by-seconds`.

    Runs that differ only in seeds are one line: the mean, with Student's 95% interval. The second
    chart needs different numbers of users, the third needs the times of all rounds. DataError if a
    run was never evaluated; InvalidValueError if runs have different δ or units.
    """
    for record in records:
        if not any(result.loss is not None for result in record.rounds):
            raise DataError(f"the run in {record.folder} was not measured on held-out rows")
    for name, values in (
        ("delta", {record.delta for record in records}),
        ("unit", {str(unit_of(record.ledger)) for record in records}),
    ):
        if len(values) > 1:
            choices = " and ".join(sorted(map(str, values)))
            sentence = f"{name} is {choices} in these runs; an axis of ε needs one {name}"
            raise InvalidValueError(sentence)
    texts = dict.fromkeys(t for record in records for t in about_projection(record.ledger))
    has_accuracy = all(any(r.accuracy is not None for r in run.rounds) for run in records)
    charts = _charts(_grouped(records), ACCURACY if has_accuracy else LOSS)
    return [with_warnings(chart, [*texts]) for chart in charts]


def _charts(groups: Sequence[_Group], measure: Measure) -> Iterator[Chart]:
    first, runs = groups[0].records[0], [*zip(_names(groups), groups, strict=True)]
    series = [line_by_round(name, group.records, measure, spent) for name, group in runs]
    words = {"unit": unit_of(first.ledger), "delta": first.delta}
    yield measure_chart("runs-epsilon", measure, series, "by-epsilon", None, None, **words)

    if len({group.users for group in groups}) > 1:
        ends: dict[str, dict[int, Interval]] = {}
        for name, group in zip(_names(groups, _OF_USERS), groups, strict=True):
            ends.setdefault(name, {})[group.users] = over_seeds(group.records, measure)[1][-1]
        lines = [
            line_of(name, sorted(line), [line[n] for n in sorted(line)], bars=True)
            for name, line in ends.items()
        ]
        yield measure_chart("runs-users", measure, lines, "by-users")

    rounds = [result for group in groups for run in group.records for result in run.rounds]
    if all(result.simulation_only_seconds is not None for result in rounds):
        series = [line_by_round(name, group.records, measure, _time) for name, group in runs]
        yield measure_chart("runs-seconds", measure, series, "by-seconds")


def _time(record: RunRecord) -> Iterator[float]:
    """Return the seconds from the start of a run to the end of each round."""
    return itertools.accumulate(result.simulation_only_seconds or 0.0 for result in record.rounds)


def _grouped(records: Sequence[RunRecord]) -> list[_Group]:
    groups: dict[str, tuple[dict[str, object], list[RunRecord]]] = {}
    for record in records:
        values = {key: value for key, value in record.settings.items() if value != {}}
        keys = [key for key in values if key.split(".")[0] not in _OF_ONE_RUN]
        settings = {key: values[key] for key in keys if key.split(".")[-1] != "seed"}
        groups.setdefault(repr(sorted(settings.items())), (settings, []))[1].append(record)
    return [_Group(settings, runs) for settings, runs in groups.values()]


def _names(groups: Sequence[_Group], without: Sequence[str] = ()) -> list[str]:
    """Return a name for each group: the settings that vary, or its folder if many vary."""
    keys = dict.fromkeys(key for group in groups for key in group.settings)
    varied = [
        key
        for key in keys
        if key not in (*_DERIVED, *without)
        and len({repr(group.settings.get(key)) for group in groups}) > 1
    ]
    folders = [group.records[0].folder.name for group in groups]
    if len(varied) > _MOST_SETTINGS:
        return folders
    names = [
        ", ".join(f"{key} = {group.settings[key]}" for key in varied if key in group.settings)
        or str(group.settings["name"])
        for group in groups
    ]
    return names if without or len(set(names)) == len(names) else folders
