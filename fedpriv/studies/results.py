"""What the runs of a study came to: the result of each, means over seeds, and a verdict in words.

The folder of a study holds `study.toml` and, for each run, a run folder in which `result.json` is
written last: a run without it is not finished.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError
from scipy import stats

from fedpriv.errors import DataError, InvalidValueError
from fedpriv.studies.study import RUNS, Cell, Study, Target, load_study

STUDY = "study.toml"
RESULT = "result.json"
ALL_RESULTS = "runs.jsonl"
CONFIDENCE = 0.95
_FEW = 3  # arms that a sentence names; tables have the rest


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and Student's interval mean ± half_width around it.

    The half width is None for a single value, which says nothing about spread, and NaN if a value
    is not finite, such as the loss of a model that diverged.
    """

    mean: float
    half_width: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """t-interval of independent values: x̄ ± t_{(1+c)/2, n−1}·s/√n with c = 95%.

        It covers the true mean with probability c if values are normal. It speaks of other seeds on
        the same users, not of other users.
        """
        count = len(values)
        mean = sum(values) / count  # fsum refuses infinities of both signs
        if count == 1:
            return cls(mean, None, 1)
        variance = sum((value - mean) ** 2 for value in values) / (count - 1)
        quantile = float(stats.t.ppf((1.0 + CONFIDENCE) / 2.0, count - 1))
        return cls(mean, quantile * math.sqrt(variance / count), count)

    @property
    def low(self) -> float | None:
        """Lower end."""
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """Upper end."""
        return None if self.half_width is None else self.mean + self.half_width


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    What begins with `simulation_only` is computed from users' data without noise: no guarantee
    covers it, and it must not be published about real users.
    """

    # JSON has neither infinity nor NaN, which the loss of a model that diverged can be.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", ser_json_inf_nan="strings"
    )

    arm: str
    target_epsilon: float
    delta: float  # of the target, and of `epsilon`
    seed: int
    settings: str  # digest of all settings of the run
    stop: str  # why it ended, in words
    rounds: int  # released
    noise_multiplier: float
    epsilon: float  # of the ledger at the end, an upper bound
    accuracy: float | None  # of the last model on held-out rows; None if targets are not classes
    loss: float  # mean loss of the last model on held-out rows
    evaluations: tuple[tuple[int, float], ...] = ()  # (rounds done, accuracy)
    clipping_norms: Mapping[str, float] = field(default_factory=dict)  # S_g in the last round
    noise_stddevs: Mapping[str, float] = field(default_factory=dict)  # σ_g on the sum, first round
    # Expected cohort over the median time of a round, in one thread beside the study's other runs.
    simulation_only_users_per_second: float = 0.0
    # Means over rounds: share of users clipped by vector group; by layer, the mean L2 norm of
    # updates before clipping, and the norm of the clipped sum over the RMS norm of its noise.
    simulation_only_clipped: Mapping[str, float] = field(default_factory=dict)
    simulation_only_update_norms: Mapping[str, float] = field(default_factory=dict)
    simulation_only_signal_to_noise: Mapping[str, float] = field(default_factory=dict)

    def rounds_to(self, accuracy: float) -> int | None:
        """After how many rounds a measured model first reached an accuracy, if one did."""
        return next((rounds for rounds, found in self.evaluations if found >= accuracy), None)


_RESULT = TypeAdapter(RunResult)


def results_text(results: Iterable[RunResult]) -> str:
    """One JSON object a line; numbers that are not finite are "NaN" or "Infinity"."""
    return "".join(_RESULT.dump_json(result).decode() + "\n" for result in results)


def read_results(path: Path) -> list[RunResult]:
    """What `results_text` wrote into a file; nothing if there is no file."""
    try:
        return [_RESULT.validate_json(line) for line in path.read_bytes().splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, ValidationError) as error:
        reason = error.strerror if isinstance(error, OSError) else error.errors()[0]["msg"]
        raise DataError(f"{path} cannot be read as the result of a run: {reason}") from error


def holds_results_alone(folder: Path) -> bool:
    """Whether the folder of a study holds the results of its runs but not the runs."""
    return (folder / ALL_RESULTS).exists() and not (folder / RUNS).exists()


def finished_runs(study: Study, folder: Path) -> dict[Cell, RunResult]:
    """Results of the finished runs in the folder of a study, in the order of its cells.

    Raises:
        DataError: a result cannot be read, or is of other settings than the study has now.
    """
    alone = holds_results_alone(folder)
    results = read_results(folder / ALL_RESULTS) if alone else []
    kept = {(result.arm, result.target_epsilon, result.seed): result for result in results}
    finished = {}
    for cell in study.cells:
        path = folder / cell.path
        if not alone:
            result = next(iter(read_results(path / RESULT)), None)
        else:
            result = kept.get((cell.arm.name, cell.target.epsilon, cell.seed))
        if result is None:
            continue
        if result.settings != study.digest_of(cell):
            raise DataError(
                f"{path} holds a run of other settings than the study has now; "
                "move it away or choose another folder"
            )
        finished[cell] = result
    return finished


@dataclass(frozen=True)
class RoundsTo:
    """When an arm reached an accuracy; a seed that never did counts as later than all rounds."""

    median: float | None  # over seeds; None if the median seed never did
    reached: int  # seeds that did


@dataclass(frozen=True)
class ArmSummary:
    """One arm at one target, over its finished seeds; as for `RunResult`, where names agree."""

    arm: str
    target: Target
    seeds: tuple[int, ...]  # in the study's order
    accuracy: Interval | None
    loss: Interval
    # This arm minus the baseline, paired over the seeds that both finished; None for the baseline.
    accuracy_difference: Interval | None
    loss_difference: Interval | None
    rounds_to: Mapping[float, RoundsTo]  # by accuracy of the study
    noise_multiplier: float
    epsilon: float  # the largest of all seeds
    simulation_only_users_per_second: float  # median over seeds; tables below are means
    simulation_only_clipped: Mapping[str, float]
    simulation_only_update_norms: Mapping[str, float]
    simulation_only_signal_to_noise: Mapping[str, float]


def summarise(study: Study, runs: Iterable[RunResult]) -> tuple[ArmSummary, ...]:
    """A summary for each arm and target with finished runs: targets in order, arms within."""
    found = {(run.target_epsilon, run.arm, run.seed): run for run in runs}
    summaries = []
    for target in study.targets:
        by_arm = {}
        for arm in study.arms:
            keys = [(target.epsilon, arm.name, seed) for seed in study.seeds]
            by_arm[arm.name] = [found[key] for key in keys if key in found]
        baseline = {run.seed: run for run in by_arm[study.baseline]}
        for name, of_arm in by_arm.items():
            if of_arm:
                others = {} if name == study.baseline else baseline
                summaries.append(_summary(study, target, of_arm, others))
    return tuple(summaries)


def _summary(
    study: Study, target: Target, runs: Sequence[RunResult], baseline: Mapping[int, RunResult]
) -> ArmSummary:
    tables = ("clipped", "update_norms", "signal_to_noise")
    return ArmSummary(
        arm=runs[0].arm,
        target=target,
        seeds=tuple(run.seed for run in runs),
        accuracy=_interval(run.accuracy for run in runs),
        loss=Interval.of([run.loss for run in runs]),
        accuracy_difference=_difference(runs, baseline, "accuracy"),
        loss_difference=_difference(runs, baseline, "loss"),
        rounds_to={
            level: _rounds_to([run.rounds_to(level) for run in runs]) for level in study.accuracies
        },
        noise_multiplier=runs[0].noise_multiplier,
        epsilon=max(run.epsilon for run in runs),
        simulation_only_users_per_second=statistics.median(
            run.simulation_only_users_per_second for run in runs
        ),
        **{
            name: means([getattr(run, name) for run in runs])
            for name in (f"simulation_only_{table}" for table in tables)
        },
    )


def means(tables: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Mean of each entry of tables with equal keys, over those that have a finite number there."""
    found = {}
    for name in tables[0]:
        entries = [table.get(name) for table in tables]
        known = [entry for entry in entries if entry is not None and math.isfinite(entry)]
        found[name] = math.fsum(known) / len(known) if known else math.nan
    return found


def _interval(values: Iterable[float | None]) -> Interval | None:
    known = [value for value in values if value is not None]
    return Interval.of(known) if known else None


def _difference(
    runs: Iterable[RunResult], baseline: Mapping[int, RunResult], measure: str
) -> Interval | None:
    """Interval of the differences seed by seed."""
    pairs = [(run, baseline[run.seed]) for run in runs if run.seed in baseline]
    values = [(getattr(run, measure), getattr(other, measure)) for run, other in pairs]
    return _interval(a - b for a, b in values if a is not None and b is not None)


def _rounds_to(rounds: Sequence[int | None]) -> RoundsTo:
    median = statistics.median(math.inf if number is None else number for number in rounds)
    reached = sum(number is not None for number in rounds)
    return RoundsTo(median if math.isfinite(median) else None, reached)


@dataclass(frozen=True)
class ReadStudy:
    """A study and its finished runs, in the order of the study's cells."""

    folder: Path
    study: Study
    finished: tuple[tuple[Cell, RunResult], ...]

    @property
    def runs(self) -> tuple[RunResult, ...]:
        """Results of the finished runs."""
        return tuple(result for _, result in self.finished)

    @property
    def missing(self) -> int:
        """Number of runs that are not finished."""
        return len(self.study.cells) - len(self.finished)

    @cached_property
    def arms(self) -> tuple[ArmSummary, ...]:
        """A summary for each target and arm with a finished run."""
        return summarise(self.study, self.runs)


def read_study(folder: Path) -> ReadStudy:
    """Read the folder of a study, from `runs.jsonl` if it is kept without its runs.

    Raises:
        InvalidValueError: the folder holds no study.
        DataError: a result cannot be read, or is of other settings than the study has now.
    """
    file = folder / STUDY
    if not file.exists():
        raise InvalidValueError(f"{folder} holds no study; {STUDY} is absent")
    study = load_study(file)
    return ReadStudy(folder, study, tuple(finished_runs(study, folder).items()))


class _Standing(NamedTuple):
    """An arm beside the baseline, in accuracy, or in loss if targets are not classes."""

    arm: str
    score: float  # the larger the better
    end: str
    told: str = ""  # whether it is better; empty for the baseline
    gap: str = ""  # difference from the baseline with its interval
    seeds: int = 0


def verdict(study: Study, arms: Sequence[ArmSummary]) -> tuple[str, ...]:
    """For each target, which arm is best, and which arms are better or worse than the baseline.

    They are where the interval of their paired differences leaves zero out. Arms that share less
    than two seeds with the baseline are left out, and so are targets with no other arms. Each
    interval is for one arm alone: of twenty arms that are all alike, one is expected to seem
    different.
    """
    said = []
    for target in study.targets:
        of_target = [arm for arm in arms if arm.target == target]
        in_points = any(arm.accuracy_difference for arm in of_target)
        found = [_standing(arm, study.baseline, in_points=in_points) for arm in of_target]
        standings = [each for each in found if each is not None]
        if any(each.told for each in standings):
            said.append(f"At ε = {target.epsilon:g}, {_sentences(standings, study.baseline)}")
    return tuple(said)


def _standing(arm: ArmSummary, baseline: str, *, in_points: bool) -> _Standing | None:
    """None if nothing can be said of the arm."""
    end = arm.accuracy if in_points else arm.loss
    difference = arm.accuracy_difference if in_points else arm.loss_difference
    if end is None:
        return None
    score = end.mean if in_points else -end.mean
    text = f"highest accuracy, {end.mean:.2%}" if in_points else f"lowest loss, {end.mean:.4g}"
    if difference is None or difference.half_width is None:
        return _Standing(arm.arm, score, text) if arm.arm == baseline else None
    mean, half = difference.mean, difference.half_width
    told = "not told apart"  # nor is an interval with NaN
    if abs(mean) > half:
        told = "better" if (mean > 0.0) == in_points else "worse"
    gap = f"{mean:+.4f} ± {half:.4f}"
    if in_points:
        gap = f"{100.0 * mean:+.2f} ± {100.0 * half:.2f} points"
    return _Standing(arm.arm, score, text, told, gap, difference.count)


def _sentences(standings: Sequence[_Standing], baseline: str) -> str:
    ranked = sorted(standings, key=lambda each: (math.isnan(each.score), -each.score))
    best = next((each for each in ranked if math.isfinite(each.score)), None)
    said = _best(best, baseline) if best else "no arm has a finite loss."
    parts = []
    for word in ("better", "worse", "not told apart"):
        alike = [
            f"{each.arm} ({each.gap})" for each in ranked if each is not best and each.told == word
        ]
        more = f" and {len(alike) - _FEW} more" if len(alike) > _FEW else ""
        if alike:
            parts.append(f"{word}: {', '.join(alike[:_FEW])}{more}")
    if not parts:
        return said
    return f"{said} Against {baseline}, with {CONFIDENCE:.0%} intervals, {'; '.join(parts)}."


def _best(best: _Standing, baseline: str) -> str:
    if not best.told:
        return f"{best.arm}, the baseline, has the {best.end}."
    told = f"{best.told} than {baseline} by {best.gap.lstrip('+-')}"
    if best.told == "not told apart":
        told = f"but cannot be told from {baseline}: {best.gap}"
    certainty = f"a {CONFIDENCE:.0%} interval over {best.seeds} seeds"
    return f"{best.arm} has the {best.end}, {told} ({certainty})."
