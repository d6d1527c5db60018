"""Federated evaluation: a survey asks users how good the released model is on their own data.

Part of each user's examples is held out from training. Every few rounds, or once at the end, a
fresh Poisson sample of users computes metrics of the model on held-out examples. Their averages are
released with noise, and charged to the ledger of the run.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.analytics import Answer, Survey, VectorQuestion, ask
from fedpriv.analytics.questions import QuantityFunction, UserValues, sampling_spread
from fedpriv.data.columns import Fields
from fedpriv.data.population import UserStore, offsets_of, spread_over
from fedpriv.engine.arithmetic import plain_arithmetic, seeded
from fedpriv.engine.descent import AloneModel
from fedpriv.engine.indices import Indices
from fedpriv.engine.measuring import Measuring, mean_metric
from fedpriv.engine.task import RoundParameters, Task, outputs_of
from fedpriv.errors import BudgetExceededError, FedprivError, InvalidValueError, ModelError
from fedpriv.evaluation.personalisation import FineTuning, Personalisation
from fedpriv.ledger.events import RoundEvent, check_query
from fedpriv.privacy.clipping import FloatMatrix
from fedpriv.privacy.gaussian_mechanism import Metric
from fedpriv.privacy.layout import FloatVector, Tensors
from fedpriv.privacy.noise import Entropy
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.support.checks import check_ranges, hold_plain_numbers, require
from fedpriv.training.optimizers import Parameters
from fedpriv.training.rounds import EVALUATION_PREFIX, RoundResult

_log = logging.getLogger(__name__)
# A label that is not a class raises an error on a CPU; on a GPU it would end the process.
_CPU = torch.device("cpu")
_KEY = bytes(32)  # public, for random numbers that a model draws in evaluation
_LARGE = 2**10  # the largest integer in data of a user that must not affect other users
_EXTREMES = (1e30, math.inf, math.nan)  # numbers in such data


@dataclass(frozen=True)
class FederatedEvaluation:
    """The queries of a run: the metrics that users report, the rounds, and the noise.

    Each query draws a fresh Poisson sample of users and adds a charge to the budget of the run.
    Noise that is calibrated for a run allows for all queries.
    """

    noise_multiplier: float  # z > 0 of each query
    report: Mapping[str, Mapping[str, float | Sequence[float]]] = field(
        default_factory=lambda: {"accuracy": {}}
    )  # metrics of examples: options by name, as for `Mechanism.metrics`
    sampling_probability: float = 1.0  # of each user in a query
    every: int | None = None  # rounds between queries, besides one at the end; None: only that
    held_out: float = 0.2  # share of each user's examples that is not trained on, in [0, 1)

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        check_query(self.noise_multiplier, self.sampling_probability)
        check_ranges(self, every="whole?", held_out="[0, 1)")


@dataclass(frozen=True)
class Measured(VectorQuestion):
    """The mean over all enrolled users of a metric of a model, each clipped to the metric's ball.

    A user contributes m − centre, clipped to the radius, which is the sensitivity of the sum. A
    user contributes zero if it has no examples, or if its metric raises or is not finite. The
    answer has the metric's shape and is unbiased.
    """

    metric: Metric

    @property
    def width(self) -> int | None:
        """Number of components of a user's value; None if it is a scalar."""
        return math.prod(self.metric.shape) if self.metric.shape else None

    @property
    def clipping_norm(self) -> float:
        """The radius."""
        return self.metric.radius

    @property
    def dimension(self) -> int:
        """Number of components of the metric."""
        return math.prod(self.metric.shape)

    def contributions(self, users: UserValues) -> FloatMatrix:
        """Return values minus the centre, [users, d]; zero for users without a value."""
        starts, has_value = users.offsets[:-1], np.diff(users.offsets) > 0
        vectors = np.zeros((len(starts), self.dimension))
        values = users.values[starts[has_value]].reshape(-1, self.dimension)
        vectors[has_value] = values - self.metric.centre
        return vectors

    def answer(self, average: FloatVector, stddev: float, sampling: PoissonSampling) -> Answer:
        """Return the mean: the centre plus the average deviation from it."""
        value = self.metric.centre + average.reshape(self.metric.shape)
        return self.normal_answer(value, stddev, self.metric.radius * sampling_spread(sampling))


def questions_about(
    task: Task,
    model: Parameters,
    metrics: Sequence[Metric],
    personal: Callable[[Fields], tuple[Tensors, Fields]] = lambda fields: ({}, fields),
) -> tuple[Measured, ...]:
    """Return questions for a survey: the metrics of a model on users' own data.

    Args:
        task: whose model gets the parameters; the model may keep state only in buffers.
        model: all tensors that training moves, such as `Run.state.model`.
        metrics: of examples, from `fedpriv.measures.metric`.
        personal: maps a user's examples to its personal tensors, which replace those of the model,
            and to the examples to measure.
    """
    with plain_arithmetic(_CPU):
        alone = AloneModel(task, _CPU)
        shared = task.constants(_CPU) | {n: torch.tensor(t) for n, t in model.items()}

    def values(metric: Metric, fields: Fields) -> npt.NDArray[np.float64]:
        personal_tensors, examples = personal(fields)
        tensors = shared | {n: torch.tensor(t) for n, t in personal_tensors.items()}
        # In evaluation too, a model may draw random numbers and change its buffers. A user's result
        # must not depend on earlier users, so each gets the same model and the same seed.
        with (
            plain_arithmetic(_CPU),
            seeded(_KEY, 0, _CPU),
            alone.begun(RoundParameters(tensors, {}), training=False) as evaluated,
        ):
            measuring = Measuring(task, evaluated, partial(outputs_of, evaluated))
            value = mean_metric(measuring, examples, metric)
        return value.reshape(len(value), -1) if metric.shape else value

    return tuple(Measured(EVALUATION_PREFIX + m.name, partial(values, m), m) for m in metrics)


def kept_apart(users: UserStore, share: float) -> tuple[UserStore, UserStore]:
    """Return the users twice: with the rows to train on, and with the held-out rows.

    Row j = 0, 1, … of a user is held out if ⌊(j + 1)·share⌋ > ⌊j·share⌋, so these rows are spread
    evenly. With a share of 0 both results have all rows.
    """
    if share == 0.0:
        return users, users
    held_out = spread_over(users.offsets, share)
    cumulative = np.concatenate([[0], np.cumsum(held_out)])
    sizes = np.diff(cumulative[users.offsets])

    def part(rows: npt.NDArray[np.bool_], counts: npt.NDArray[np.int64]) -> UserStore:
        return UserStore(users.take(np.flatnonzero(rows)), offsets_of(counts), users.user_ids)

    return part(~held_out, users.sizes - sizes), part(held_out, sizes)


@dataclass(frozen=True)
class UserEvaluation:
    """The queries of one run."""

    asked: FederatedEvaluation
    run: str  # name in the ledger
    # Users with their held-out examples, or with all if they personalise the model.
    users: UserStore
    task: Task
    metrics: tuple[Metric, ...]
    personalisation: Personalisation | None = None

    def __post_init__(self) -> None:
        message = "federated_evaluation.report names no metric; it must name at least one"
        require(bool(self.metrics), message)
        if self.personalisation is None and self.task.personal:
            raise InvalidValueError(
                "federated_evaluation is given with personal parameters, which begin untrained; "
                "personalisation must say how users train them before they measure"
            )
        if self.personalisation is not None and self.asked.held_out == 0.0:
            raise InvalidValueError(
                "held_out of federated_evaluation is 0; it must be positive, since users "
                "personalise the model on the other examples"
            )

    def survey(self, number: int, model: Parameters) -> Survey:
        """Return the survey after a round; rounds are numbered from 1."""
        sampling = PoissonSampling(self.users.population, self.asked.sampling_probability)
        questions = questions_about(self.task, model, self.metrics, self._personal(model))
        return Survey(self.run, questions, sampling, self.asked.noise_multiplier, round=number)

    def _personal(self, model: Parameters) -> Callable[[Fields], tuple[Tensors, Fields]]:
        """Return a function of a user's examples: its personal tensors and held-out examples."""
        if self.personalisation is None:
            return lambda fields: ({}, fields)
        tuning = FineTuning(self.personalisation, self.task, self.users, _CPU)

        def personal(fields: Fields) -> tuple[Tensors, Fields]:
            offsets = offsets_of([len(fields[self.task.targets])])
            user = UserStore({name: fields[name] for name in self.task.fields}, offsets)
            training, held_out = kept_apart(user, self.asked.held_out)
            ((_, tensors),) = tuning.models(model, training)
            return tensors, held_out.fields

        return personal

    def events(self, rounds: int) -> RoundEvent:
        """Return the event that is charged for all queries of a run of this many rounds."""
        event, every = self.survey(1, self._initial).event, self.asked.every
        return replace(event, count=1 if every is None else -(-rounds // every))

    def check(self, rows: Fields) -> None:
        """Raise ModelError unless metrics of two public rows exist and depend on these rows alone.

        They must be the same after users with extreme numbers were measured.
        """
        public = {name: rows[name][:2] for name in self.task.fields}
        indices = Indices(self.task, self.users)
        discrete = [n for n, column in public.items() if column.dtype.kind in "biu"]
        for question in questions_about(self.task, self._initial, self.metrics):
            measure, name = cast(QuantityFunction, question.of), question.metric.name
            try:
                first = measure(public)
            except FedprivError:
                raise
            except Exception as error:
                raise ModelError(
                    f"metric {name!r} of federated_evaluation cannot be computed: {error}"
                ) from error
            # The search, too, shows the model other data.
            limits = {n: indices.largest(n, _LARGE) for n in discrete}
            for number in _EXTREMES:
                with suppress(Exception), np.errstate(over="ignore"):  # a model may refuse them
                    measure({n: np.full_like(c, limits.get(n, number)) for n, c in public.items()})
            if not np.array_equal(np.asarray(measure(public)), np.asarray(first), equal_nan=True):
                raise ModelError(
                    f"metric {name!r} of federated_evaluation gives the same user another value "
                    "after others; it must depend only on the user's examples and on torch's "
                    "generators, which are seeded for each user"
                )

    @property
    def _initial(self) -> Parameters:
        return self.task.parameters() | self.task.statistics()

    def due(self, number: int, *, last: bool) -> bool:
        """Return whether to query users after a round."""
        return last or (self.asked.every is not None and number % self.asked.every == 0)

    def added(
        self, result: RoundResult, model: Parameters, records: PrivacyRecords, entropy: Entropy
    ) -> RoundResult:
        """Return the result of a round with the metrics that users report after it.

        Guarantees: those of `ask`. If the query would exceed the budget, no user is asked, and the
        result is returned unchanged.
        """
        survey = self.survey(result.round, model)
        try:
            answers = ask(survey, self.users, records, entropy).answers
        except BudgetExceededError as error:
            _log.warning("the model is not evaluated: %s", error)
            return result
        values = {answer.question: answer.value.tolist() for answer in answers}
        noise = {a.question: float(a.noise_stddev.max()) for a in answers}
        return replace(
            result,
            metrics={**result.metrics, **values},
            metrics_noise_stddev={**result.metrics_noise_stddev, **noise},
            epsilon=records.ledger.epsilon(records.budget),
        )
