"""The distinguishers of two worlds: each is one number of a run's releases. The list is fixed.

Each distinguisher is a function of a run's releases, and of everything that an enemy may know
without them: the plan, both populations, and releases of other runs. The server steps by the
released average itself (FedAvg with rate 1), so the difference of two successive models is that
average; any other optimiser computes its steps only from these averages.

The duration of a run is not among them. The wall time of a simulation is not released, and depends
on who was drawn; in a deployment `fixed_length` makes all rounds equally long.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import logsumexp
from scipy.stats import binom

from fedpriv.engine.task import HeldOut, Task
from fedpriv.evaluation.held_out import evaluate
from fedpriv.ledger.ledger import ChargedRow
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.round import RoundAttempt, add_up
from fedpriv.training.optimizers import Parameters
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.request import Transport
from fedpriv.training.rounds import RoundResult, ServerState, round_request

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
_LARGEST = 1e300  # replaces a number that is not finite


@dataclass(frozen=True)
class Released:
    """Everything that one run made public."""

    plan: TrainingPlan
    start: ServerState
    states: tuple[ServerState, ...]  # after each round that was released
    results: tuple[RoundResult, ...]  # of each
    charges: tuple[ChargedRow, ...]  # of the ledger
    ended: str  # the reason for the end, or the type of the error

    @cached_property
    def averages(self) -> Floats:
        """Released averages of updates, in standard deviations of their noise: [T, D].

        T is the number of rounds of the plan; rounds that were not released are 0.
        """
        averages, state = np.zeros((self.plan.rounds, self.plan.layout.dimension)), self.start
        for row, next_state in zip(averages, self.states, strict=False):
            moved = _moved(next_state.parameters, state.parameters)
            row[:] = self.plan.layout.flatten(moved) / average_stddevs(self.plan, state)
            state = next_state
        return averages

    @property
    def numbers(self) -> Floats:
        """All numbers that each round released, side by side: [T, K ≥ D], the averages first."""
        plan, state = self.plan, self.start
        optimizer_numbers = sum(
            tensor.size for tensor in (*state.statistics.values(), *state.control.values())
        )
        metric_numbers = sum(math.prod(metric.shape) for metric in plan.reported)
        count_numbers = len(plan.groups) if plan.adaptive else 0
        numbers = np.zeros(
            (
                plan.rounds,
                plan.layout.dimension + optimizer_numbers + metric_numbers + count_numbers,
            )
        )
        rounds = zip(numbers, self.averages, self.states, self.results, strict=False)
        for row, average, next_state, result in rounds:
            statistics = _moved(next_state.statistics, state.statistics)
            control = _moved(next_state.control, state.control)
            parts = *statistics.values(), *control.values(), *result.metrics.values()
            values = [np.ravel(np.asarray(part, np.float64)) for part in parts]
            row[:] = np.concatenate([average, *values, [*result.unclipped.values()]])
            state = next_state
        return np.nan_to_num(numbers, nan=_LARGEST)

    def mean_of(self, number_of: Callable[[RoundResult], float]) -> float:
        """Return the mean over released rounds of a number of each; 0 if there are none."""
        return math.fsum(map(number_of, self.results)) / max(1, len(self.results))


def _moved(end: Parameters, start: Parameters) -> dict[str, Floats]:
    return {name: end[name].astype(np.float64) - start[name] for name in end}


def average_stddevs(plan: TrainingPlan, state: ServerState) -> Floats:
    """Return the noise's standard deviations on the average of the round after a state: [D]."""
    stddevs = plan.mechanism_at(state.clipping_norms).tensor_stddevs
    sizes = plan.layout.sizes
    return np.repeat([stddevs[name] for name in sizes], [*sizes.values()])


@dataclass(frozen=True)
class Distinguisher:
    """A number of a run's releases, by which two worlds may be told apart."""

    name: str
    of: Callable[[Released], float]

    def __call__(self, released: Released) -> float:
        """Return the number; it is finite, whatever was released."""
        number = float(self.of(released))
        return number if math.isfinite(number) else _LARGEST


@dataclass(frozen=True)
class Enemy:
    """An enemy who knows all data, and runs the engine on single users to learn what each adds."""

    plan: TrainingPlan
    start: ServerState
    transport: Transport  # to the population with the user
    places: Integers  # [N', k], of each stored user; the last user is the one that differs

    def added(self, state: ServerState, places: Integers) -> Floats:
        """Return the mean contribution of a user's places in the round after a state: [D].

        Like all averages, it is in standard deviations of the noise.
        """
        plan = self.plan
        at = RoundAttempt(plan.run, state.round + 1, 0)
        request = round_request(plan, state, at, places, SeededEntropy(0))
        clipping = request.clipping
        try:
            total = add_up(self.transport.collect(request), clipping, len(places)).total
        except Exception:  # if the engine raises for the user, the ends of runs reveal it
            return np.zeros(plan.layout.dimension)
        query = plan.mechanism_at(state.clipping_norms).query
        tensors = clipping.layout.unflatten(query.averaged(total))
        update = {name: tensors[name] for name in plan.layout.names}
        return plan.layout.flatten(update) / average_stddevs(plan, state) / len(places)

    @cached_property
    def first(self) -> Floats:
        """The mean contribution of each user's places in the first round: [N', D]."""
        return np.array([self.added(self.start, places) for places in self.places])

    def seen(self, released: Released) -> Floats:
        """Return each round's projections on users' first contributions, and norm: [T·(N' + 1)]."""
        along = released.averages @ self.first.T
        norms = np.linalg.norm(released.averages, axis=1, keepdims=True)
        return np.hstack([along, norms]).ravel()


@dataclass(frozen=True)
class ReleaseMoments:
    """Moments of the releases of several runs of one world."""

    mean: Floats  # of their `numbers`: [T, K]
    variance: Floats  # likewise
    seen: Floats  # by an enemy, in each run: [runs, F]

    @classmethod
    def of(cls, runs: Iterable[Released], enemy: Enemy) -> "ReleaseMoments":
        """Compute the moments of at least one run, with one run in memory (Welford 1962)."""
        vectors, mean, squares = list[Floats](), np.zeros(()), np.zeros(())
        for released in runs:
            vectors.append(enemy.seen(released))
            away = released.numbers - mean
            mean = mean + away / len(vectors)
            squares = squares + away * (released.numbers - mean)
        return cls(mean, squares / len(vectors), np.array(vectors))


@dataclass(frozen=True)
class OwnUpdate:
    """The likelihood ratio of the releases with and without the user.

    The enemy knows the contribution c of the user at each released model, and the contributions C
    of others at the first. A cohort holds the user j times with probability P(j), binomial over its
    k places. So a round that released r, whose mean without the user is m, adds
    log Σ_j P(j)·exp(j·⟨w, r − m⟩ − j²·⟨w, c⟩/2) with w = Σ⁻¹c. This is the likelihood ratio if the
    sum of others is normal with the covariance of their coins, Σ − I = k·q·(1 − q)·CᵀC.
    """

    enemy: Enemy
    centre: Floats  # m: [T, D]

    def __call__(self, released: Released) -> float:
        """Return the logarithm of the ratio over all rounds."""
        enemy, state = self.enemy, released.start
        log_ratio, j = 0.0, np.arange(enemy.places.shape[1] + 1)
        rounds = zip(self.centre, released.averages, released.states, strict=False)
        for centre, average, next_state in rounds:
            first = state is released.start
            update = enemy.first[-1] if first else enemy.added(state, enemy.places[-1])
            direction = update - self._others.T @ np.linalg.solve(
                self._inner, self._others @ update
            )
            signal, square = float(direction @ (average - centre)), float(direction @ update)
            log_ratio += float(logsumexp(self._log_drawn + j * signal - j**2 * square / 2.0))
            state = next_state
        return log_ratio

    @cached_property
    def _others(self) -> Floats:
        """√(k·q·(1 − q))·C: [N' − 1, D]."""
        q, k = self._probability, self.enemy.places.shape[1]
        return math.sqrt(k * q * (1.0 - q)) * self.enemy.first[:-1]

    @cached_property
    def _inner(self) -> Floats:
        """The matrix that remains to be inverted, by the Woodbury identity."""
        return np.eye(len(self._others)) + self._others @ self._others.T

    @cached_property
    def _log_drawn(self) -> Floats:
        """log P(j) for j from 0 to k."""
        k = self.enemy.places.shape[1]
        logs: Floats = binom.logpmf(np.arange(k + 1), k, self._probability)
        return logs

    @property
    def _probability(self) -> float:
        return float(self.enemy.plan.sampling.event().sampling_probability)


def learnt_direction(without: ReleaseMoments, with_one: ReleaseMoments) -> Distinguisher:
    """Return the projection on the difference of means, each component over its variance.

    It finds unexpected leaks if they are large: a direction of so many numbers is mostly noise.
    """
    variance = (without.variance + with_one.variance) / 2.0
    direction = (with_one.mean - without.mean) / np.where(variance > 0.0, variance, 1.0)
    return Distinguisher(
        "learnt direction", lambda released: float(np.vdot(direction, released.numbers))
    )


def learnt_combination(
    enemy: Enemy, without: ReleaseMoments, with_one: ReleaseMoments
) -> Distinguisher:
    """Return the linear discriminant (Fisher 1936) of an enemy's view: users' updates, and norms.

    It finds users that change the contributions of others. The pooled covariance is shrunk towards
    its diagonal, more so for fewer runs.
    """
    runs, size = without.seen.shape
    pooled = (np.cov(without.seen, rowvar=False) + np.cov(with_one.seen, rowvar=False)) / 2.0
    share = min(1.0, size / (4.0 * runs))
    diagonal = np.diag(np.maximum(np.diag(pooled), 1e-12))
    difference = with_one.seen.mean(0) - without.seen.mean(0)
    direction = np.linalg.solve(
        (1.0 - share) * pooled + share * diagonal + 1e-9 * diagonal, difference
    )
    return Distinguisher(
        "learnt combination", lambda released: float(direction @ enemy.seen(released))
    )


def loss_on(rows_name: str, task: Task, rows: HeldOut) -> Distinguisher:
    """Return the mean loss of the last model on some rows."""

    def loss(released: Released) -> float:
        last = released.states[-1] if released.states else released.start
        try:
            return evaluate(task, rows, torch.device("cpu"), last.model).loss
        except Exception:  # no model can be evaluated on these rows
            return 0.0

    return Distinguisher(f"loss on {rows_name}", loss)


def always(plan: TrainingPlan) -> tuple[Distinguisher, ...]:
    """Return the distinguishers of a plan that need neither a model nor other runs."""
    distinguishers = [
        Distinguisher("norm of updates", lambda r: float(np.linalg.norm(r.averages))),
        Distinguisher("rounds released", lambda r: len(r.results)),
        Distinguisher("charges", lambda r: len(r.charges)),
        Distinguisher("attempts", lambda r: sum(row.attempt for row in r.charges)),
    ]
    distinguishers += [
        _mean_of(metric.name, "scalar_metrics", metric.name)
        for metric in plan.reported
        if metric.shape == ()
    ]
    for group in plan.groups if plan.adaptive else ():
        distinguishers.append(_mean_of(f"unclipped of {group.name}", "unclipped", group.name))
        distinguishers.append(
            _mean_of(f"clipping norm of {group.name}", "clipping_norms", group.name)
        )
    return tuple(distinguishers)


def _mean_of(name: str, table: str, entry: str) -> Distinguisher:
    """Return the mean over rounds of an entry in one of a result's tables of numbers."""
    return Distinguisher(name, lambda run: run.mean_of(lambda r: getattr(r, table)[entry]))
