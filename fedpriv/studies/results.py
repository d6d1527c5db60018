"""What the runs of a study came to: a result of each, means over seeds, a verdict in words."""

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
RESULT = "result.json"  # written last into the folder of a run: without it a run is not finished
ALL_RESULTS = "runs.jsonl"
CONFIDENCE = 0.95
_FEW = 3  # arms that a sentence names; tables have the rest


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and Student's interval mean ± half_width around it."""

    mean: float
    half_width: float | None  # None of a single value; infinite or NaN if values diverge
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
        gaps = [value - mean for value in values]
        variance = sum(gap * gap for gap in gaps) / (count - 1)  # a power raises if it is too large
        quantile = float(stdtrit(count - 1, (1.0 + CONFIDENCE) / 2.0))  # of Student's t
        return cls(mean, quantile * math.sqrt(variance / count), count)

    @property
    def low(self) -> float | None:
        """Lower end, None of a single value."""
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """Upper end, None of a single value."""
        return None if self.half_width is None else self.mean + self.half_width


@dataclass(frozen=True)
class RunResult:
    """A finished run.

    What begins with `simulation_only` is computed from users' data without noise: no guarantee
    covers it, and it must not be published of real users.
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
    figures: Mapping[str, float] = field(default_factory=dict)  # of the last model, of the task
    # Likewise, by figure `users`, `mean`, `q10`, `q50` and `q90` over users of held-out rows.
    held_out_users: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
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
    """What `results_text` wrote; nothing if there is no file."""
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
    """Results of the finished runs in the folder of a study, in the order of its cells."""
    if holds_results_alone(folder):
        kept = {(r.arm, r.target_epsilon, r.seed): r for r in read_results(folder / ALL_RESULTS)}
        found = {c: kept.get((c.arm.name, c.target.epsilon, c.seed)) for c in study.cells}
    else:
        files = {cell: folder / cell.path / RESULT for cell in study.cells}
        found = {cell: next(iter(read_results(file)), None) for cell, file in files.items()}
    finished = {cell: result for cell, result in found.items() if result is not None}
    for cell, result in finished.items():
        if result.settings != study.digest_of(cell):
            held = f"{folder / cell.path} holds a run of other settings than the study has now"
            raise DataError(f"{held}; move it away or choose another folder")
    return finished


@dataclass(frozen=True)
class RoundsTo:
    """When an arm reached an accuracy; a seed that never did counts as later than all rounds."""

    median: float | None  # over seeds; None if the median seed never did
    reached: int  # seeds that did


@dataclass(frozen=True)
class ArmSummary:
    """One arm at one target, over its finished seeds; names are those of `RunResult`."""

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
    # Figures of the task on held-out rows, and the mean and quantiles of figures over their users,
    # as "accuracy of held-out users: mean".
    figures: Mapping[str, Interval] = field(default_factory=dict)


def summarise(study: Study, runs: Iterable[RunResult]) -> tuple[ArmSummary, ...]:
    """A summary for each arm and target with finished runs: targets in order, arms within."""
    found: dict[tuple[float, str], dict[int, RunResult]] = {}
    for run in runs:
        found.setdefault((run.target_epsilon, run.arm), {})[run.seed] = run
    summaries = []
    for target, arm in itertools.product(study.targets, study.arms):
        by_seed = found.get((target.epsilon, arm.name), {})
        own = [by_seed[seed] for seed in study.seeds if seed in by_seed]
        is_baseline = arm.name == study.baseline
        others = {} if is_baseline else found.get((target.epsilon, study.baseline), {})
        summaries += [_summary(study, target, own, others)] if own else []
    return tuple(summaries)


def _summary(
    study: Study, target: Target, runs: Sequence[RunResult], baseline: Mapping[int, RunResult]
) -> ArmSummary:
    pairs = [(run, baseline[run.seed]) for run in runs if run.seed in baseline]
    speeds = [run.simulation_only_users_per_second for run in runs]
    both = [(a.accuracy, b.accuracy) for a, b in pairs]
    figures = [_figures(run) for run in runs]
    tables = [f"simulation_only_{name}" for name in ("clipped", "update_norms", "signal_to_noise")]
    return ArmSummary(
        arm=runs[0].arm,
        target=target,
        seeds=tuple(run.seed for run in runs),
        accuracy=_interval(run.accuracy for run in runs),
        loss=Interval.of([run.loss for run in runs]),
        accuracy_difference=_interval(None if a is None or b is None else a - b for a, b in both),
        loss_difference=_interval(a.loss - b.loss for a, b in pairs),
        rounds_to={level: _rounds_to(runs, level) for level in study.accuracies},
        noise_multiplier=runs[0].noise_multiplier,
        epsilon=max(run.epsilon for run in runs),
        simulation_only_users_per_second=statistics.median(speeds),
        figures={
            name: Interval.of([found.get(name, math.nan) for found in figures])
            for name in dict.fromkeys(itertools.chain.from_iterable(figures))
        },
        **{name: means([getattr(run, name) for run in runs]) for name in tables},
    )


def _figures(run: RunResult) -> dict[str, float]:
    of_users = {
        f"{name} of held-out users: {label}": over[key]
        for name, over in run.held_out_users.items()
        for key, label in (("mean", "mean"), ("q10", "10%"), ("q50", "50%"), ("q90", "90%"))
    }
    return {**run.figures, **of_users}


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


def _rounds_to(runs: Sequence[RunResult], accuracy: float) -> RoundsTo:
    rounds = [run.rounds_to(accuracy) for run in runs]
    median = statistics.median(math.inf if number is None else number for number in rounds)
    return RoundsTo(median if math.isfinite(median) else None, len(rounds) - rounds.count(None))


@dataclass(frozen=True)
class Measure:
    """How good a model is: an attribute of runs, rounds and arms, which reports multiply."""

    name: str
    scale: float
    unit: str  # of a difference
    better: str
    best: str
    sign: float  # of a difference to the better
    shown: str  # format of a value
    digits: str  # format of a mean or difference in a table
    half_digits: str  # and of what is ± around it
    points: str  # after a difference in words

    def end(self, arm: ArmSummary) -> Interval | None:
        """Mean over seeds at the end, scaled."""
        return self._scaled(getattr(arm, self.name))

    def difference(self, arm: ArmSummary) -> Interval | None:
        """Mean paired difference from the baseline at the end, scaled; None without one."""
        return self._scaled(getattr(arm, f"{self.name}_difference"))

    def text(self, found: Interval, sign: str = "") -> str:
        """A scaled mean, and what is ± around it; the sign "+" is that of a difference."""
        around = "" if found.half_width is None else f" ± {found.half_width:{self.half_digits}}"
        return f"{found.mean:{sign}{self.digits}}{around}"

    def superlative(self, mean: float) -> str:
        """The best mean in words."""
        return f"the {self.best} {self.name}, {self.shown.format(mean)}"

    def _scaled(self, found: Interval | None) -> Interval | None:
        if found is None:
            return None
        half_width = found.half_width and self.scale * found.half_width
        return replace(found, mean=self.scale * found.mean, half_width=half_width)


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
        """A summary for each target and arm with a finished run."""
        return summarise(self.study, self.runs)


def read_study(folder: Path) -> ReadStudy:
    """Read the folder of a study, from `runs.jsonl` if it is kept without its runs."""
    file = folder / STUDY
    if not file.exists():
        raise InvalidValueError(f"{folder} holds no study; {STUDY} is absent")
    study = load_study(file)
    return ReadStudy(folder, study, tuple(finished_runs(study, folder).items()))


def verdict(study: Study, arms: Sequence[ArmSummary]) -> tuple[str, ...]:
    """For each target, which arm is best, and which arms are better or worse than the baseline.

    An arm is if the interval of its paired differences excludes zero. Arms that share fewer than
    two seeds with the baseline are left out, and so are targets with no other arms; where no arm
    shares two, the best is named without an interval. Each interval
    is for one arm alone: of twenty equal arms, one is expected to seem different.
    """
    said = []
    for target in study.targets:
        sentences = _compared([arm for arm in arms if arm.target == target], study.baseline)
        said += [f"At ε = {target.epsilon:g}, {sentences}"] if sentences else []
    return tuple(said)


def _compared(arms: Sequence[ArmSummary], baseline: str) -> str:
    """Sentences about arms at one target, in accuracy, or in loss if targets are not classes."""
    if not arms:
        return ""
    measure = measure_of(arms)
    gaps = {arm.arm: measure.difference(arm) for arm in arms}
    known = {arm: gap for arm, gap in gaps.items() if gap and gap.half_width is not None}
    if not known:
        return _without_interval(arms, gaps, measure, baseline)
    found = [arm for arm in arms if arm.arm in {*known, baseline}]
    ranked, best = _ranked(found, measure), best_of(found, measure)
    told = {arm: _told(gap, measure.sign) for arm, gap in known.items()}
    texts = {arm: _text(gap, measure) for arm, gap in known.items()}
    said = "no arm has a finite loss."
    if best is not None:
        said = f"{best}, the baseline, has {measure.superlative(ranked[best])}."
    if best in known:
        gap = f"{told[best]} than {baseline} by {texts[best].lstrip('+-')}"
        if told[best] not in {"better", "worse"}:
            gap = f"but is not significantly different from {baseline}: {texts[best]}"
        seeds = f"a {CONFIDENCE:.0%} interval over {known[best].count} seeds"
        said = f"{best} has {measure.superlative(ranked[best])}, {gap} ({seeds})."
    parts = []
    for word in ("better", "worse", "not told apart", "not finite"):
        alike = [arm for arm in ranked if arm != best and told.get(arm) == word]
        named = ", ".join(f"{arm} ({texts[arm]})" for arm in alike[:_FEW])
        more = f" and {len(alike) - _FEW} more" if len(alike) > _FEW else ""
        parts += [f"{word}: {named}{more}"] if alike else []
    against = f" Against {baseline}, with {CONFIDENCE:.0%} intervals, {'; '.join(parts)}."
    return said + against if parts else said


def measure_of(arms: Sequence[ArmSummary]) -> Measure:
    """Accuracy, or loss if an arm has no accuracy."""
    return ACCURACY if all(arm.accuracy is not None for arm in arms) else LOSS


def best_of(arms: Sequence[ArmSummary], measure: Measure) -> str | None:
    """The arm with the best mean; None if none is finite."""
    ranked = _ranked(arms, measure).items()
    return next((arm for arm, mean in ranked if math.isfinite(mean)), None)


def _ranked(arms: Sequence[ArmSummary], measure: Measure) -> dict[str, float]:
    """Means by arm, the best first."""
    means = {arm.arm: end.mean for arm in arms if (end := measure.end(arm))}
    order = sorted(means, key=lambda arm: (math.isnan(means[arm]), -measure.sign * means[arm]))
    return {arm: means[arm] for arm in order}


def _without_interval(
    arms: Sequence[ArmSummary],
    gaps: Mapping[str, Interval | None],
    measure: Measure,
    baseline: str,
) -> str:
    """Which arm is best by what no interval says is more than chance; empty of a single arm."""
    best = best_of(arms, measure)
    if len(arms) < 2 or best is None:
        return ""
    said = f"{best} has {measure.superlative(_ranked(arms, measure)[best])}"
    if (gap := gaps.get(best)) is not None:
        said += f", {abs(gap.mean):{measure.digits}}{measure.points} from {baseline}"
    shared = "one seed" if any(gaps.values()) else f"no seed shared with {baseline}"
    return f"{said} ({shared}: no interval, so chance may have decided)."


def _told(gap: Interval, sign: float) -> str:
    if gap.half_width is None or not math.isfinite(gap.half_width):
        return "not finite"
    if not abs(gap.mean) > gap.half_width:
        return "not told apart"
    return "better" if sign * gap.mean > 0.0 else "worse"


def _text(gap: Interval, measure: Measure) -> str:
    return measure.text(gap, "+") + measure.points
