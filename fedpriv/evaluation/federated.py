"""Federated evaluation: users measure the released model on their own data, and a survey asks them.

Part of each user's examples is kept from training. Now and then, or once at the end, users are
drawn by coins of their own; each computes metrics of the model on what was kept, and their averages
are released with noise, on the ledger of the run.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.analytics import Answer, Survey, VectorQuestion, ask
from fedpriv.analytics.questions import QuantityFunction, UserValues, sampling_spread
from fedpriv.data.columns import Fields
from fedpriv.data.population import UserStore, offsets_of, spread_over
from fedpriv.engine.arithmetic import plain_arithmetic, seeded
from fedpriv.engine.bounds import WithinBounds
from fedpriv.engine.indices import Indices
from fedpriv.engine.kept import KeptModel
from fedpriv.engine.measuring import Measuring, mean_metric
from fedpriv.engine.task import Task, outputs_of
from fedpriv.errors import BudgetExceededError, FedprivError, InvalidValueError, ModelError
from fedpriv.evaluation.personalisation import FineTuning, Personalisation
from fedpriv.ledger.events import RoundEvent, check_query
from fedpriv.privacy.clipping import FloatMatrix
from fedpriv.privacy.gaussian_mechanism import Metric
from fedpriv.privacy.layout import FloatVector, Tensors
from fedpriv.privacy.noise import Entropy
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.support.checks import hold_plain_numbers, is_whole, require
from fedpriv.training.optimizers import Parameters
from fedpriv.training.rounds import EVALUATION_PREFIX, RoundResult

_log = logging.getLogger(__name__)
# A label that is not a class raises for its user there; on a GPU it would end the process.
_CPU = torch.device("cpu")
_KEY = bytes(32)  # of what a model draws in evaluation; no secret
_EXTREMES = (1e30, math.inf, math.nan)  # of users whom the others must not notice
_LARGE = 2**10  # of their integers, where larger ones are legal


@dataclass(frozen=True)
class FederatedEvaluation:
    """What users are asked of the released model, how often, and with how much noise.

    Each query draws its users by coins of its own, and is one more charge on the budget of the run.
    Noise that is calibrated for a run allows for all of them.
    """

    noise_multiplier: float  # z > 0 of each query
    report: Mapping[str, Mapping[str, float | Sequence[float]]] = field(
        default_factory=lambda: {"accuracy": {}}
    )  # metrics of examples: numbers by name, as for `Mechanism.metrics`
    sampling_probability: float = 1.0  # with which each user is asked
    every: int | None = None  # rounds between queries, beside the last; None: after the last alone
    held_out: float = 0.2  # share of each user's examples that is kept from training, in [0, 1)

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        check_query(self.noise_multiplier, self.sampling_probability)
        every, share = self.every, self.held_out
        legal = "a whole number of at least 1"
        require(every is None or is_whole(every), f"every is {every!r}; it must be {legal}")
        proper = isinstance(share, Real) and 0.0 <= share < 1.0
        require(proper, f"held_out is {share!r}; it must be in [0, 1)")


@dataclass(frozen=True)
class Measured(VectorQuestion):
    """The mean over all enrolled users of a metric of a model, each within the metric's ball.

    A user contributes m − centre, clipped to the radius, which is how far one user more or less
    moves the sum; one that has no examples, or whose metric raises or is not finite, is the zero
    vector. The answer has the metric's shape and is unbiased.
    """

    metric: Metric

    @property
    def width(self) -> int | None:
        """A user has one value: a number, or of all components."""
        return math.prod(self.metric.shape) if self.metric.shape else None

    @property
    def clipping_norm(self) -> float:
        """The radius."""
        return self.metric.radius

    @property
    def dimension(self) -> int:
        """Components of the metric."""
        return math.prod(self.metric.shape)

    def contributions(self, held: UserValues) -> FloatMatrix:
        """Values minus the centre: [users, d]."""
        vectors, some = np.zeros((len(held.offsets) - 1, self.dimension)), np.diff(held.offsets) > 0
        values = held.values[held.offsets[:-1][some]].reshape(-1, self.dimension)
        vectors[some] = values - self.metric.centre
        return vectors

    def answer(self, average: FloatVector, stddev: float, sampling: PoissonSampling) -> Answer:
        """The mean: the centre and the average deviation from it."""
        value = self.metric.centre + average.reshape(self.metric.shape)
        return self.normal_answer(value, stddev, self.metric.radius * sampling_spread(sampling))


def questions_about(
    task: Task,
    model: Parameters,
    metrics: Sequence[Metric],
    personal: Callable[[Fields], tuple[Tensors, Fields]] = lambda fields: ({}, fields),
) -> tuple[Measured, ...]:
    """Questions for a survey: what the metrics of a model are on users' own data.

    Args:
        task: whose model gets the parameters; it must remember nothing of users but in buffers.
        model: all tensors that training moves, such as `Run.state.model`.
        metrics: of examples, from `fedpriv.engine.measuring.metric`.
        personal: from a user's examples, tensors of its own in the place of the model's, and those
            examples that it measures them on.
    """
    with plain_arithmetic(_CPU):
        evaluated = task.evaluated()
        begun = {n: t.clone() for n, t in evaluated.constants(_CPU).items()}
        begun |= {n: torch.tensor(t) for n, t in model.items()}
    kept = KeptModel(evaluated.model, begun)

    def values(metric: Metric, fields: Fields) -> npt.NDArray[np.float64]:
        own, measured = personal(fields)
        given = begun | {name: torch.tensor(tensor) for name, tensor in own.items()}
        # A model may keep what it has seen, and draw, in evaluation too; what one user gets must
        # not follow from who was asked before, so each finds the same model and generators.
        with plain_arithmetic(_CPU), seeded(_KEY, 0, _CPU), WithinBounds():
            kept.copy_from(given, given)
            measuring = Measuring(evaluated, kept.model, partial(outputs_of, kept.model))
            try:
                found = mean_metric(measuring, measured, metric)
            finally:
                kept.put_back()
        return found.reshape(len(found), -1) if metric.shape else found

    return tuple(Measured(EVALUATION_PREFIX + m.name, partial(values, m), m) for m in metrics)


def kept_apart(users: UserStore, share: float) -> tuple[UserStore, UserStore]:
    """The users with what they train on, and with what is kept from it, spread over their rows.

    Of a user's rows j = 0, 1, … those are kept at which ⌊(j + 1)·share⌋ steps up. With a share of 0
    both are the same: all rows.
    """
    if share == 0.0:
        return users, users
    kept = spread_over(users.offsets, share)
    before = np.concatenate([[0], np.cumsum(kept)])
    sizes = np.diff(before[users.offsets])

    def part(chosen: npt.NDArray[np.bool_], counts: npt.NDArray[np.int64]) -> UserStore:
        return UserStore(users.take(np.flatnonzero(chosen)), offsets_of(counts), users.user_ids)

    return part(~kept, users.sizes - sizes), part(kept, sizes)


@dataclass(frozen=True)
class UserEvaluation:
    """The queries of a run."""

    asked: FederatedEvaluation
    run: str  # name in the ledger
    # With the examples that are kept from training; with all, where they personalise the model on
    # the others.
    users: UserStore
    task: Task
    metrics: tuple[Metric, ...]
    personalisation: Personalisation | None = None

    def __post_init__(self) -> None:
        if not self.metrics:
            raise InvalidValueError(
                "federated_evaluation.report names no metric; it must name at least one"
            )
        if self.personalisation is None and self.task.personal:
            raise InvalidValueError(
                "federated_evaluation is given with personal parameters, which begin untrained; "
                "personalisation must say how users train them before they measure"
            )
        if self.personalisation is not None and self.asked.held_out == 0.0:
            raise InvalidValueError(
                "held_out of federated_evaluation is 0; it must be positive where users "
                "personalise the model on what is not held out"
            )

    def survey(self, number: int, model: Parameters) -> Survey:
        """What is asked after a round."""
        sampling = PoissonSampling(self.users.population, self.asked.sampling_probability)
        questions = questions_about(self.task, model, self.metrics, self._personal(model))
        return Survey(self.run, questions, sampling, self.asked.noise_multiplier, round=number)

    def _personal(self, model: Parameters) -> Callable[[Fields], tuple[Tensors, Fields]]:
        """How one user makes a model its own on what was not kept, to measure it on what was."""
        if self.personalisation is None:
            return lambda fields: ({}, fields)
        tuning = FineTuning(self.personalisation, self.task, self.users, _CPU)

        def personal(fields: Fields) -> tuple[Tensors, Fields]:
            offsets = offsets_of([len(fields[self.task.targets])])
            one = UserStore({name: fields[name] for name in self.task.fields}, offsets)
            trained, kept = kept_apart(one, self.asked.held_out)
            ((_, own),) = tuning.models(model, trained)
            return own, kept.fields

        return personal

    def events(self, rounds: int) -> RoundEvent:
        """What all queries of a run are charged as."""
        event, every = self.survey(1, self._initial).event, self.asked.every
        return replace(event, count=1 if every is None else -(-rounds // every))

    def check(self, rows: Fields) -> None:
        """Refuse metrics that cannot be computed on a few public rows, or that remember others.

        What two rows give must be the same after a user with extreme data was asked.
        """
        few = {name: column[:2] for name, column in rows.items()}
        for question in questions_about(self.task, self._initial, self.metrics):
            of, name = cast(QuantityFunction, question.of), question.metric.name
            try:
                before = of(few)
            except FedprivError:
                raise
            except Exception as error:
                raise ModelError(
                    f"metric {name!r} of federated_evaluation cannot be computed: {error}"
                ) from error
            for extreme in self._extremes(few):
                with suppress(Exception):  # of a model that refuses such data
                    of(extreme)
            if not np.array_equal(np.asarray(of(few)), np.asarray(before), equal_nan=True):
                raise ModelError(
                    f"metric {name!r} of federated_evaluation gives the same user something else "
                    "after others; what it gives must depend on the user's examples and on "
                    "torch's generators alone, which are seeded for each user"
                )

    def _extremes(self, rows: Fields) -> Iterator[Fields]:
        """Rows of which all numbers are at the ends of what is legal, or not finite."""
        indices = Indices(self.task.evaluated(), self.users)
        for end, number in enumerate(_EXTREMES):
            filled = {name: rows[name].copy() for name in self.task.fields}
            for name, column in filled.items():
                if column.dtype.kind == "f":
                    with np.errstate(over="ignore"):  # of float16
                        column.flat[::2], column.flat[1::2] = number, -number
                elif column.dtype.kind in "biu":
                    column[:] = indices.legal(name, _LARGE)[end % 2]
            yield filled

    @property
    def _initial(self) -> Parameters:
        return self.task.parameters() | self.task.statistics()

    def due(self, number: int, *, last: bool) -> bool:
        """Whether users are asked after a round."""
        return last or (self.asked.every is not None and number % self.asked.every == 0)

    def added(
        self, result: RoundResult, model: Parameters, records: PrivacyRecords, entropy: Entropy
    ) -> RoundResult:
        """The result of a round with what users say of the model after it.

        Guarantees: those of `ask`. Where the budget would be passed, no user is asked, and the
        result stays.
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
