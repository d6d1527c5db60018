"""What the finished runs of a study say of each arm."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedpriv.studies.intervals import Interval
from fedpriv.studies.results import RunResult
from fedpriv.studies.study import Study, Target


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
