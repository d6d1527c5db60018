"""Results of a study: one per run, means over seeds, and a verdict in words."""

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError
from scipy.special import stdtrit

from fedpriv.errors import DataError, InvalidValueError
from fedpriv.studies.study import RUNS, Cell, Study, Target, load_study

STUDY = "study.toml"
RESULT = "result.json"  # the last file that a run writes; without it the run is not finished
ALL_RESULTS = "runs.jsonl"
CONFIDENCE = 0.95
_MOST_ARMS = 3  # arms that a sentence names; tables have all


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and Student's interval mean ± half_width around it."""

    mean: float
    half_width: float | None  # None for a single value; infinite or NaN if values diverge
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Return the t-interval of independent values: x̄ ± t_{(1+c)/2, n−1}·s/√n with c = 95%.

        It covers the true mean with probability c if values are normal. It applies to other seeds
        with the same users, not to other users.
        """
        count = len(values)
        mean = sum(values) / count  # fsum would refuse infinities of both signs
        if count == 1:
            return cls(mean, None, 1)
        deviations = [value - mean for value in values]
        variance = sum(d * d for d in deviations) / (count - 1)  # d**2 would raise on overflow
        quantile = float(stdtrit(count - 1, (1.0 + CONFIDENCE) / 2.0))  # of Student's t
        return cls(mean, quantile * math.sqrt(variance / count), count)

    @property
    def low(self) -> float | None:
        """Lower end; None for a single value."""
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """Upper end; None for a single value."""
        return None if self.half_width is None else self.mean + self.half_width


@dataclass(frozen=True)
class RunResult:
    """The result of a finished run.

    Fields that begin with `simulation_only` are computed from users' data without noise. No
    guarantee covers them, and those of real users must not be published.
    """

    # The loss of a diverged model can be infinity or NaN, which JSON does not have as numbers.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", ser_json_inf_nan="strings"
    )

    arm: str
    target_epsilon: float
    delta: float  # of the target and of `epsilon`
    seed: int
    settings: str  # digest of all settings of the run
    stop: str  # reason why it ended
    rounds: int  # number of released rounds
    noise_multiplier: float
    epsilon: float  # of the ledger at the end, an upper bound
    accuracy: float | None  # of the last model on held-out rows; None if targets are not classes
    loss: float  # mean loss of the last model on held-out rows
    evaluations: tuple[tuple[int, float], ...] = ()  # (rounds done, accuracy)
    figures: Mapping[str, float] = field(default_factory=dict)  # the task's, of the last model
    # `users`, `mean`, `q10`, `q50` and `q90` of each figure of the last model over held-out users.
    held_out_users: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    clipping_norms: Mapping[str, float] = field(default_factory=dict)  # S_g in the last round
    noise_stddevs: Mapping[str, float] = field(default_factory=dict)  # σ_g on the sum, first round
    as_if: int | None = None  # N' of a projection, for which `epsilon` would hold
    # Expected cohort over the median time of a round, in one thread, while other runs may run.
    simulation_only_users_per_second: float = 0.0
    # Means over rounds: share of clipped users by vector group; by layer, the mean L2 norm of
    # updates before clipping, and the norm of the clipped sum over the RMS norm of its noise.
    simulation_only_clipped: Mapping[str, float] = field(default_factory=dict)
    simulation_only_update_norms: Mapping[str, float] = field(default_factory=dict)
    simulation_only_signal_to_noise: Mapping[str, float] = field(default_factory=dict)

    def rounds_to(self, accuracy: float) -> int | None:
        """Return the first evaluated round with at least this accuracy, or None."""
        return next((rounds for rounds, value in self.evaluations if value >= accuracy), None)


_RESULT = TypeAdapter(RunResult)


def results_text(results: Iterable[RunResult]) -> str:
    """Return one JSON object per line; numbers that are not finite are strings such as "NaN"."""
    return "".join(_RESULT.dump_json(result).decode() + "\n" for result in results)


def read_results(path: Path) -> list[RunResult]:
    """Return the results in a file, empty if it is absent; DataError if it is damaged."""
    try:
        return [_RESULT.validate_json(line) for line in path.read_bytes().splitlines()]
    except FileNotFoundError:
        return []
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise DataError(f"{path} cannot be read as the result of a run: {reason}") from error


def holds_results_alone(folder: Path) -> bool:
    """Return whether a study's folder has the results of its runs but not the runs."""
    return (folder / ALL_RESULTS).exists() and not (folder / RUNS).exists()


def finished_runs(study: Study, folder: Path) -> dict[Cell, RunResult]:
    """Return results of the finished runs in a study's folder, in the order of its cells.

    DataError if a result is damaged, or its settings differ from those of the study.
    """
    if holds_results_alone(folder):
        rows = {(r.arm, r.target_epsilon, r.seed): r for r in read_results(folder / ALL_RESULTS)}
        results = {c: rows.get((c.arm.name, c.target.epsilon, c.seed)) for c in study.cells}
    else:
        files = {cell: folder / cell.path / RESULT for cell in study.cells}
        results = {cell: next(iter(read_results(file)), None) for cell, file in files.items()}
    finished = {cell: result for cell, result in results.items() if result is not None}
    for cell, result in finished.items():
        if result.settings != study.digest_of(cell, folder):
            problem = f"{folder / cell.path} holds a run with settings that differ from the study's"
            raise DataError(f"{problem}; move it away or choose another folder")
    return finished


@dataclass(frozen=True)
class RoundsTo:
    """Rounds until an arm reached an accuracy; infinite for a seed that never did."""

    median: float | None  # over seeds; None if infinite
    reached: int  # number of seeds that reached it


@dataclass(frozen=True)
class ArmSummary:
    """One arm at one target, over its finished seeds; `RunResult` explains the fields."""

    arm: str
    target: Target
    seeds: tuple[int, ...]  # in the study's order
    accuracy: Interval | None
    loss: Interval
    # This arm minus the baseline, paired over the seeds that both finished; None without any.
    accuracy_difference: Interval | None
    loss_difference: Interval | None
    rounds_to: Mapping[float, RoundsTo]  # by accuracy of the study
    noise_multiplier: float
    epsilon: float  # the largest of all seeds
    as_if: int | None  # N' of a projection, for which `epsilon` would hold
    simulation_only_users_per_second: float  # median over seeds; tables below are means
    simulation_only_clipped: Mapping[str, float]
    simulation_only_update_norms: Mapping[str, float]
    simulation_only_signal_to_noise: Mapping[str, float]
    # Figures of the task on held-out rows, and the mean and quantiles of figures over their users,
    # as "accuracy of held-out users: mean".
    figures: Mapping[str, Interval] = field(default_factory=dict)


def summarise(study: Study, runs: Iterable[RunResult]) -> tuple[ArmSummary, ...]:
    """Return summaries of arms with finished runs, for each target in the order of the arms."""
    by_arm: dict[tuple[float, str], dict[int, RunResult]] = {}
    for run in runs:
        by_arm.setdefault((run.target_epsilon, run.arm), {})[run.seed] = run
    summaries = []
    for target, arm in itertools.product(study.targets, study.arms):
        by_seed = by_arm.get((target.epsilon, arm.name), {})
        arm_runs = [by_seed[seed] for seed in study.seeds if seed in by_seed]
        is_baseline = arm.name == study.baseline
        baseline = {} if is_baseline else by_arm.get((target.epsilon, study.baseline), {})
        summaries += [_summary(study, target, arm_runs, baseline)] if arm_runs else []
    return tuple(summaries)


def _summary(
    study: Study, target: Target, runs: Sequence[RunResult], baseline: Mapping[int, RunResult]
) -> ArmSummary:
    pairs = [(run, baseline[run.seed]) for run in runs if run.seed in baseline]
    speeds = [run.simulation_only_users_per_second for run in runs]
    accuracies = [(a.accuracy, b.accuracy) for a, b in pairs]
    figures = [_figures(run) for run in runs]
    tables = [f"simulation_only_{name}" for name in ("clipped", "update_norms", "signal_to_noise")]
    return ArmSummary(
        arm=runs[0].arm,
        target=target,
        seeds=tuple(run.seed for run in runs),
        accuracy=_interval(run.accuracy for run in runs),
        loss=Interval.of([run.loss for run in runs]),
        accuracy_difference=_interval(
            None if a is None or b is None else a - b for a, b in accuracies
        ),
        loss_difference=_interval(a.loss - b.loss for a, b in pairs),
        rounds_to={level: _rounds_to(runs, level) for level in study.accuracies},
        noise_multiplier=runs[0].noise_multiplier,
        epsilon=max(run.epsilon for run in runs),
        as_if=runs[0].as_if,
        simulation_only_users_per_second=statistics.median(speeds),
        figures={
            name: Interval.of([run_figures.get(name, math.nan) for run_figures in figures])
            for name in dict.fromkeys(itertools.chain.from_iterable(figures))
        },
        **{name: means([getattr(run, name) for run in runs]) for name in tables},
    )


def _figures(run: RunResult) -> dict[str, float]:
    of_users = {
        f"{name} of held-out users: {label}": spread[key]
        for name, spread in run.held_out_users.items()
        for key, label in (("mean", "mean"), ("q10", "10%"), ("q50", "50%"), ("q90", "90%"))
    }
    return {**run.figures, **of_users}


def means(tables: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Return the mean of each entry over the tables in which it is finite, or NaN."""
    by_name = {}
    for name in tables[0]:
        entries = [table.get(name) for table in tables]
        numbers = [entry for entry in entries if entry is not None and math.isfinite(entry)]
        by_name[name] = math.fsum(numbers) / len(numbers) if numbers else math.nan
    return by_name


def _interval(values: Iterable[float | None]) -> Interval | None:
    numbers = [value for value in values if value is not None]
    return Interval.of(numbers) if numbers else None


def _rounds_to(runs: Sequence[RunResult], accuracy: float) -> RoundsTo:
    rounds = [run.rounds_to(accuracy) for run in runs]
    median = statistics.median(math.inf if number is None else number for number in rounds)
    return RoundsTo(median if math.isfinite(median) else None, len(rounds) - rounds.count(None))


@dataclass(frozen=True)
class Measure:
    """A measure of models: an attribute of runs, rounds and arms, and its format in reports."""

    name: str
    scale: float  # factor in reports
    unit: str  # of a difference
    better: str  # comparative, as "higher"
    best: str  # superlative
    sign: float  # of an improvement
    shown: str  # format of a value
    digits: str  # format of a mean or difference in a table
    half_digits: str  # format of a half width in a table
    points: str  # unit after a difference in words

    def end(self, arm: ArmSummary) -> Interval | None:
        """Return the scaled mean over seeds of the last models."""
        return self._scaled(getattr(arm, self.name))

    def difference(self, arm: ArmSummary) -> Interval | None:
        """Return the scaled mean of paired differences from the baseline; None without any."""
        return self._scaled(getattr(arm, f"{self.name}_difference"))

    def text(self, interval: Interval, sign: str = "") -> str:
        """Return a scaled mean ± half width; the sign is "+" for a difference."""
        half = interval.half_width
        around = "" if half is None else f" ± {half:{self.half_digits}}"
        return f"{interval.mean:{sign}{self.digits}}{around}"

    def superlative(self, mean: float) -> str:
        """Return the best mean in words."""
        return f"the {self.best} {self.name}, {self.shown.format(mean)}"

    def _scaled(self, interval: Interval | None) -> Interval | None:
        if interval is None:
            return None
        half_width = interval.half_width and self.scale * interval.half_width
        return replace(interval, mean=self.scale * interval.mean, half_width=half_width)


ACCURACY = Measure(
    "accuracy", 100.0, "points", "higher", "highest", 1.0, "{:.2f}%", ".2f", ".2f", " points"
)
LOSS = Measure("loss", 1.0, "unit of the loss", "lower", "lowest", -1.0, "{:.4g}", ".4g", ".2g", "")


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
        """Summaries of all targets and arms with a finished run."""
        return summarise(self.study, self.runs)


def read_study(folder: str | Path) -> ReadStudy:
    """Read and return the study in a folder, from `runs.jsonl` if it has no runs.

    InvalidValueError if it holds no study; DataError as for `finished_runs`.
    """
    folder = Path(folder)
    if not (file := folder / STUDY).exists():
        raise InvalidValueError(f"{folder} holds no study; {STUDY} is absent")
    study = load_study(file)
    return ReadStudy(folder, study, tuple(finished_runs(study, folder).items()))


def verdict(study: Study, arms: Sequence[ArmSummary]) -> tuple[str, ...]:
    """Return for each target a text: the best arm, and the arms that differ from the baseline.

    An arm is better or worse if the interval of its paired differences excludes zero. Arms that
    share fewer than two seeds with the baseline are left out, and so are targets without other
    arms; if no arm shares two, the text names the best arm without an interval. Each interval is
    for a single arm: one of twenty equal arms is expected to seem different.
    """
    texts = []
    for target in study.targets:
        sentences = _comparison([arm for arm in arms if arm.target == target], study.baseline)
        texts += [f"At ε = {target.epsilon:g}, {sentences}"] if sentences else []
    return tuple(texts)


def _comparison(arms: Sequence[ArmSummary], baseline: str) -> str:
    """Return sentences about arms at one target, on accuracy or, without classes, on loss."""
    if not arms:
        return ""
    measure = measure_of(arms)
    differences = {arm.arm: measure.difference(arm) for arm in arms}
    gaps = {arm: gap for arm, gap in differences.items() if gap and gap.half_width is not None}
    if not gaps:
        best = best_of(arms, measure)
        if len(arms) < 2 or best is None:
            return ""
        chance = f"fewer than two seeds shared with {baseline}: no interval, so chance may decide"
        return f"{best} has {measure.superlative(_ranked(arms, measure)[best])} ({chance})."
    compared = [arm for arm in arms if arm.arm in {*gaps, baseline}]
    ranked, best = _ranked(compared, measure), best_of(compared, measure)
    verdicts = {arm: _verdict_of(gap, measure.sign) for arm, gap in gaps.items()}
    texts = {arm: measure.text(gap, "+") + measure.points for arm, gap in gaps.items()}
    text = "no arm has a finite loss."
    if best is not None:
        text = f"{best}, the baseline, has {measure.superlative(ranked[best])}."
    if best in gaps:
        versus = f"{verdicts[best]} than {baseline} by {texts[best].lstrip('+-')}"
        if verdicts[best] not in {"better", "worse"}:
            versus = f"but is not significantly different from {baseline}: {texts[best]}"
        seeds = f"a {CONFIDENCE:.0%} interval over {gaps[best].count} seeds"
        text = f"{best} has {measure.superlative(ranked[best])}, {versus} ({seeds})."
    parts = []
    for word in ("better", "worse", "not told apart", "not finite"):
        alike = [arm for arm in ranked if arm != best and verdicts.get(arm) == word]
        names = ", ".join(f"{arm} ({texts[arm]})" for arm in alike[:_MOST_ARMS])
        rest = f" and {len(alike) - _MOST_ARMS} more" if len(alike) > _MOST_ARMS else ""
        parts += [f"{word}: {names}{rest}"] if alike else []
    against = f" Against {baseline}, with {CONFIDENCE:.0%} intervals, {'; '.join(parts)}."
    return text + against if parts else text


def measure_of(arms: Sequence[ArmSummary]) -> Measure:
    """Return accuracy, or loss if an arm has no accuracy."""
    return ACCURACY if all(arm.accuracy is not None for arm in arms) else LOSS


def best_of(arms: Sequence[ArmSummary], measure: Measure) -> str | None:
    """Return the arm with the best mean; None if no mean is finite."""
    ranked = _ranked(arms, measure).items()
    return next((arm for arm, mean in ranked if math.isfinite(mean)), None)


def _ranked(arms: Sequence[ArmSummary], measure: Measure) -> dict[str, float]:
    """Return means by arm, the best first."""
    means = {arm.arm: end.mean for arm in arms if (end := measure.end(arm))}
    order = sorted(means, key=lambda arm: (math.isnan(means[arm]), -measure.sign * means[arm]))
    return {arm: means[arm] for arm in order}


def _verdict_of(gap: Interval, sign: float) -> str:
    if gap.half_width is None or not math.isfinite(gap.half_width):
        return "not finite"
    if not abs(gap.mean) > gap.half_width:
        return "not told apart"
    return "better" if sign * gap.mean > 0.0 else "worse"
