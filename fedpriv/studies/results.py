"""Means over seeds with their confidence intervals.

What one run of a study came to, as the file that marks it finished.

What the finished runs of a study say of each arm.

Reading the folder of a study, finished or not.

What a study says, in sentences.
"""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError
from scipy import stats

from fedpriv.errors import DataError, InvalidValueError
from fedpriv.studies.study import RUNS, Cell, Study, Target, load_study

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, with Student's interval around it.

    Attributes:
        mean: of the values.
        half_width: the interval is mean ± half_width; None if there is one value only, which says
            nothing of its spread.
        count: number of values.
    """

    mean: float
    half_width: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float], confidence: float = CONFIDENCE) -> Self:
        """t-interval of independent values: x̄ ± t_{(1+c)/2, n−1}·s/√n.

        It covers the true mean with probability `confidence` if values are normal. It speaks of
        other seeds on the same users, not of other users. If a value is not finite, as the loss of
        a model that diverged, the half width is NaN.

        Args:
            values: at least one.
            confidence: c in (0, 1).
        """
        count = len(values)
        mean = sum(values) / count  # fsum refuses infinities of both signs
        if count == 1:
            return cls(mean, None, 1)
        variance = sum((value - mean) ** 2 for value in values) / (count - 1)
        quantile = float(stats.t.ppf((1.0 + confidence) / 2.0, count - 1))
        return cls(mean, quantile * math.sqrt(variance / count), count)

    @property
    def low(self) -> float | None:
        """Lower end."""
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """Upper end."""
        return None if self.half_width is None else self.mean + self.half_width


RESULT = "result.json"
ALL_RESULTS = "runs.jsonl"
SIMULATION_ONLY = "simulation_only.jsonl"


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    What begins with `simulation_only` is computed from users' data without noise: it is for
    simulations, no guarantee covers it, and it must not be published of real users.

    Attributes:
        arm: name of the arm.
        target_epsilon: ε that the noise was calibrated to.
        delta: δ of the target, and of `epsilon`.
        seed: of cohorts, noise, local training and initial parameters.
        settings: digest of all settings of the run.
        stop: why it ended, in words.
        rounds: rounds that it released.
        noise_multiplier: z of a round, calibrated to the target.
        epsilon: ε that its ledger holds in the end, an upper bound.
        accuracy: of the last model on held-out rows, in [0, 1]; None if targets are no classes.
        loss: mean loss of the last model on held-out rows.
        evaluations: (rounds done, accuracy then) each time that the model was measured.
        clipping_norms: S of each vector group of the update in the last round.
        noise_stddevs: σ on the sum of each of these groups in the first round, in its own units.
        simulation_only_users_per_second: expected cohort over the median time of a round, in one
            thread, beside the other runs of the study.
        simulation_only_clipped: share of users clipped in each vector group, mean over rounds.
        simulation_only_update_norms: mean over rounds of the mean L2 norm of users' updates before
            clipping, by layer, in the model's units.
        simulation_only_signal_to_noise: by layer, mean over rounds of the norm of the sum of
            clipped updates over the root mean square norm of the noise on it.
    """

    # JSON has no such numbers, and a model that diverged has a loss that is none.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", ser_json_inf_nan="strings"
    )

    arm: str
    target_epsilon: float
    delta: float
    seed: int
    settings: str
    stop: str
    rounds: int
    noise_multiplier: float
    epsilon: float
    accuracy: float | None
    loss: float
    evaluations: tuple[tuple[int, float], ...] = ()
    clipping_norms: Mapping[str, float] = field(default_factory=dict)
    noise_stddevs: Mapping[str, float] = field(default_factory=dict)
    simulation_only_users_per_second: float = 0.0
    simulation_only_clipped: Mapping[str, float] = field(default_factory=dict)
    simulation_only_update_norms: Mapping[str, float] = field(default_factory=dict)
    simulation_only_signal_to_noise: Mapping[str, float] = field(default_factory=dict)

    def rounds_to(self, accuracy: float) -> int | None:
        """After how many rounds a measured model first had an accuracy; None if none had."""
        return next((rounds for rounds, had in self.evaluations if had >= accuracy), None)

    def to_json(self) -> str:
        """The result as one JSON object; numbers that are not finite are "NaN", "Infinity"."""
        return _ADAPTER.dump_json(self, indent=2).decode() + "\n"


_ADAPTER = TypeAdapter(RunResult)


def read_result(folder: Path) -> RunResult | None:
    """The result in the folder of a run; None if the run is not finished.

    Raises:
        DataError: there is a file that holds no result.
    """
    path = folder / RESULT
    try:
        return _ADAPTER.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise _unreadable(path, error) from error


def read_all_results(folder: Path) -> list[RunResult]:
    """The results in the one file of a study that holds those of all runs; none without it.

    Raises:
        DataError: a line of it is no result.
    """
    path = folder / ALL_RESULTS
    try:
        lines = path.read_bytes().splitlines()
        return [_ADAPTER.validate_json(line) for line in lines]
    except FileNotFoundError:
        return []
    except (OSError, ValidationError) as error:
        raise _unreadable(path, error) from error


def all_results(results: Iterable[RunResult]) -> str:
    """Results as one file, a line each, which `read_all_results` reads as equal ones."""
    return "".join(_ADAPTER.dump_json(result).decode() + "\n" for result in results)


def _unreadable(path: Path, error: OSError | ValidationError) -> DataError:
    reason = error.strerror if isinstance(error, OSError) else str(error.errors()[0]["msg"])
    return DataError(f"{path} cannot be read as the result of a run: {reason}")


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write one JSON object a line; numbers that are not finite are null."""
    lines = (json.dumps(finite(row), allow_nan=False) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")


def read_rows(path: Path) -> Iterator[dict[str, object]]:
    """Rows of a file of one JSON object a line; none if there is no such file."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def finite(value: object) -> object:
    """A value of JSON with null for numbers that are not finite."""
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class RoundsTo:
    """When an arm reached an accuracy.

    Attributes:
        median: over seeds, of the first round with it; a seed that never had it counts as later
            than all rounds. None if the median seed never had it.
        reached: seeds that had it.
    """

    median: float | None
    reached: int


@dataclass(frozen=True)
class ArmSummary:
    """One arm at one target, over its finished seeds.

    Attributes:
        arm: name of the arm.
        target: what its runs might cost.
        seeds: those that are finished, in the study's order.
        accuracy: on held-out rows; None if targets are no classes.
        loss: on held-out rows.
        accuracy_difference: this arm minus the baseline, over the seeds that both finished: paired.
            None for the baseline itself, without such seeds, or without accuracy.
        loss_difference: likewise.
        rounds_to: by accuracy of the study.
        noise_multiplier: z, calibrated to the target; the same for all seeds.
        epsilon: the largest ε that a run's ledger holds.
        simulation_only_users_per_second: median over seeds, in one thread.
        simulation_only_clipped: by vector group, mean over seeds; no guarantee covers it.
        simulation_only_update_norms: by layer, mean over seeds; no guarantee covers it.
        simulation_only_signal_to_noise: by layer, mean over seeds; no guarantee covers it.
    """

    arm: str
    target: Target
    seeds: tuple[int, ...]
    accuracy: Interval | None
    loss: Interval
    accuracy_difference: Interval | None
    loss_difference: Interval | None
    rounds_to: Mapping[float, RoundsTo]
    noise_multiplier: float
    epsilon: float
    simulation_only_users_per_second: float
    simulation_only_clipped: Mapping[str, float]
    simulation_only_update_norms: Mapping[str, float]
    simulation_only_signal_to_noise: Mapping[str, float]


def summarise(study: Study, runs: Iterable[RunResult]) -> tuple[ArmSummary, ...]:
    """A summary for each arm and target with finished runs: targets in order, arms within."""
    found = {(run.target_epsilon, run.arm, run.seed): run for run in runs}
    summaries = []
    for target in study.targets:
        by_arm = {
            arm.name: [
                run for seed in study.seeds if (run := found.get((target.epsilon, arm.name, seed)))
            ]
            for arm in study.arms
        }
        baseline = by_arm[study.baseline]
        for name, of_arm in by_arm.items():
            if of_arm:
                others = [] if name == study.baseline else baseline
                summaries.append(_summary(study, target, of_arm, others))
    return tuple(summaries)


def means(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each entry of tables with equal keys, over those that have a finite number there."""
    means = {}
    for name in tables[0]:
        known = [table[name] for table in tables if math.isfinite(table.get(name, math.nan))]
        means[name] = math.fsum(known) / len(known) if known else math.nan
    return means


def _summary(
    study: Study, target: Target, runs: Sequence[RunResult], baseline: Sequence[RunResult]
) -> ArmSummary:
    first = runs[0]
    return ArmSummary(
        arm=first.arm,
        target=target,
        seeds=tuple(run.seed for run in runs),
        accuracy=_interval([run.accuracy for run in runs]),
        loss=Interval.of([run.loss for run in runs]),
        accuracy_difference=_difference(runs, baseline, lambda run: run.accuracy),
        loss_difference=_difference(runs, baseline, lambda run: run.loss),
        rounds_to={
            level: _rounds_to([run.rounds_to(level) for run in runs]) for level in study.accuracies
        },
        noise_multiplier=first.noise_multiplier,
        epsilon=max(run.epsilon for run in runs),
        simulation_only_users_per_second=statistics.median(
            run.simulation_only_users_per_second for run in runs
        ),
        simulation_only_clipped=means([run.simulation_only_clipped for run in runs]),
        simulation_only_update_norms=means([run.simulation_only_update_norms for run in runs]),
        simulation_only_signal_to_noise=means(
            [run.simulation_only_signal_to_noise for run in runs]
        ),
    )


def _interval(values: Sequence[float | None]) -> Interval | None:
    known = [value for value in values if value is not None]
    return Interval.of(known) if known else None


def _difference(
    runs: Iterable[RunResult],
    baseline: Iterable[RunResult],
    measure: Callable[[RunResult], float | None],
) -> Interval | None:
    """Interval of the differences seed by seed."""
    against = {run.seed: measure(run) for run in baseline}
    pairs = [(measure(run), against.get(run.seed)) for run in runs]
    return _interval([a - b for a, b in pairs if a is not None and b is not None])


def _rounds_to(rounds: Sequence[int | None]) -> RoundsTo:
    median = statistics.median(math.inf if number is None else number for number in rounds)
    reached = sum(number is not None for number in rounds)
    return RoundsTo(median if math.isfinite(median) else None, reached)


STUDY = "study.toml"


@dataclass(frozen=True)
class ReadStudy:
    """A study and the runs of it that are finished.

    Attributes:
        folder: where it lies.
        study: what was asked.
        finished: the results there are, in the order of the study's cells.
    """

    folder: Path
    study: Study
    finished: tuple[tuple[Cell, RunResult], ...]

    @property
    def runs(self) -> tuple[RunResult, ...]:
        """The results there are."""
        return tuple(result for _, result in self.finished)

    @property
    def missing(self) -> int:
        """Number of runs that are not finished."""
        return len(self.study.cells) - len(self.finished)

    @cached_property
    def arms(self) -> tuple[ArmSummary, ...]:
        """A summary for each target and arm with a finished run."""
        return summarise(self.study, self.runs)

    def run_folder(self, cell: Cell) -> Path:
        """The folder of a run: that of `fedpriv simulate`, and a few files more."""
        return self.folder / cell.path


def read_study(folder: Path) -> ReadStudy:
    """Read the folder of a study; runs that are not finished are left out.

    A folder without its runs, as it is kept beside code, is read from the file of all results.

    Raises:
        InvalidValueError: the folder holds no study.
        DataError: a result cannot be read, or is of other settings than the study has now.
    """
    file = folder / STUDY
    if not file.exists():
        raise InvalidValueError(f"{folder} holds no study; {STUDY} is absent")
    study = load_study(file)
    finished = []
    if holds_results_alone(folder):
        kept = {(r.arm, r.target_epsilon, r.seed): r for r in read_all_results(folder)}
        results = [kept.get((c.arm.name, c.target.epsilon, c.seed)) for c in study.cells]
    else:
        results = [read_result(folder / cell.path) for cell in study.cells]
    for cell, result in zip(study.cells, results, strict=True):
        if result is not None:
            finished.append((cell, _of_settings(folder / cell.path, result, study, cell)))
    return ReadStudy(folder, study, tuple(finished))


def holds_results_alone(folder: Path) -> bool:
    """Whether the folder of a study holds the results of its runs and not the runs."""
    return (folder / ALL_RESULTS).exists() and not (folder / RUNS).exists()


def finished_result(folder: Path, study: Study, cell: Cell) -> RunResult | None:
    """The result of a run; None if it is not finished.

    Raises:
        DataError: the result cannot be read, or is of other settings.
    """
    path = folder / cell.path
    result = read_result(path)
    return None if result is None else _of_settings(path, result, study, cell)


def _of_settings(path: Path, result: RunResult, study: Study, cell: Cell) -> RunResult:
    if result.settings != study.digest_of(cell):
        raise DataError(
            f"{path} holds a run of other settings than the study has now; "
            "move it away or choose another folder"
        )
    return result


_FEW = 3  # arms that a sentence names; tables have the rest


@dataclass(frozen=True)
class _Standing:
    """An arm beside the baseline, in accuracy or, if targets are no classes, in loss.

    Attributes:
        arm: its name.
        in_points: whether this is accuracy.
        end: mean over seeds.
        difference: from the baseline; None of the baseline, and where nothing can be said.
    """

    arm: str
    in_points: bool
    end: Interval
    difference: Interval | None

    @property
    def goodness(self) -> float:
        """The larger the better."""
        return self.end.mean if self.in_points else -self.end.mean

    @property
    def told(self) -> str:
        """How it stands; nothing is told of an interval that is not finite, as if diverged."""
        if self.difference is None:
            return ""
        gain = self.difference.mean if self.in_points else -self.difference.mean
        if abs(gain) > (self.difference.half_width or 0.0):
            return "better" if gain > 0.0 else "worse"
        return "not told apart"

    def gap(self, sign: str = "") -> str:
        """The difference with its interval; without a sign, its size."""
        if self.difference is None:
            return ""
        mean, half = self.difference.mean, self.difference.half_width or 0.0
        mean = mean if sign else abs(mean)
        if self.in_points:
            return f"{100.0 * mean:{sign}.2f} ± {100.0 * half:.2f} points"
        return f"{mean:{sign}.4f} ± {half:.4f}"


def verdict(study: Study, arms: Sequence[ArmSummary]) -> tuple[str, ...]:
    """For each target, which arm is best, and which arms are better or worse than the baseline.

    They are where the interval of their paired differences leaves zero out. Arms that cannot be
    told, as they share one seed with the baseline or none, are left out, and so are targets with
    no others. Each interval is for one arm alone: among twenty arms that are all alike, one is
    expected to leave zero out.
    """
    said = []
    for target in study.targets:
        standings = _standings(study, [arm for arm in arms if arm.target == target])
        if any(each.difference for each in standings):
            said.append(f"At ε = {target.epsilon:g}, {_sentences(standings, study.baseline)}")
    return tuple(said)


def _standings(study: Study, arms: Sequence[ArmSummary]) -> list[_Standing]:
    """The baseline, and the arms that can be compared with it."""
    in_points = any(arm.accuracy_difference for arm in arms)
    found = []
    for arm in arms:
        difference = arm.accuracy_difference if in_points else arm.loss_difference
        end = arm.accuracy if in_points else arm.loss
        known = difference is not None and difference.half_width is not None
        if end is not None and (known or arm.arm == study.baseline):
            found.append(_Standing(arm.arm, in_points, end, difference))
    return found


def _sentences(standings: Sequence[_Standing], baseline: str) -> str:
    finite = [each for each in standings if math.isfinite(each.goodness)]
    best = max(finite, key=lambda each: each.goodness, default=None)
    said = [_best(best, baseline) if best else "no arm has a finite loss."]
    others = [each for each in standings if each is not best and each.difference]
    parts = [
        f"{word}: {_listed([each for each in others if each.told == word])}"
        for word in ("better", "worse", "not told apart")
        if any(each.told == word for each in others)
    ]
    if parts:
        said.append(f"Against {baseline}, with {CONFIDENCE:.0%} intervals, {'; '.join(parts)}.")
    return " ".join(said)


def _best(best: _Standing, baseline: str) -> str:
    if best.in_points:
        end = f"has the highest accuracy, {best.end.mean:.2%}"
    else:
        end = f"has the lowest loss, {best.end.mean:.4g}"
    if best.difference is None:
        return f"{best.arm}, the baseline, {end}."
    if best.told == "not told apart":
        told = f"but cannot be told from {baseline}: {best.gap('+')}"
    else:
        told = f"{best.told} than {baseline} by {best.gap()}"
    certainty = f"a {CONFIDENCE:.0%} interval over {best.difference.count} seeds"
    return f"{best.arm} {end}, {told} ({certainty})."


def _listed(standings: Sequence[_Standing]) -> str:
    """The best of some arms with their differences, and how many more there are."""
    ordered = sorted(standings, key=lambda each: -each.goodness)
    named = [f"{each.arm} ({each.gap('+')})" for each in ordered[:_FEW]]
    more = f" and {len(ordered) - _FEW} more" if len(ordered) > _FEW else ""
    return f"{', '.join(named)}{more}"
