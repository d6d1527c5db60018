"""A survey: what is asked of whom, how much noise answers get, and the round that asks it."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fedpriv.analytics.questions import (
    ZEROED,
    Answer,
    QuantityFunction,
    Question,
    UserValues,
    Values,
)
from fedpriv.data.places import refuse_shared
from fedpriv.data.population import UserStore
from fedpriv.errors import DataError, InvalidValueError, known_names
from fedpriv.ledger.events import RoundEvent
from fedpriv.privacy.clipping import Clipping, IntegerVector
from fedpriv.privacy.draws import RoundAttempt
from fedpriv.privacy.gaussian_mechanism import GaussianMechanism, given_shares
from fedpriv.privacy.layout import FloatVector, Layout
from fedpriv.privacy.noise import Entropy
from fedpriv.privacy.round import PartialSum, PrivacyRecords, private_round
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.support.checks import check_types, hold_plain_numbers, is_whole

_log = logging.getLogger(__name__)

Positions: TypeAlias = npt.NDArray[np.int64]  # of users in the store
_NUMBERS = 1 << 21  # of the users of a chunk, in float64: 16 MiB


@dataclass(frozen=True)
class Survey:
    """Questions that are asked of one cohort, answered together and charged as one round.

    With q = 1 all users are asked, and no error is due to sampling. Questions share the round's
    privacy equally, or in proportion to positive weights by name: one with the share ω has noise
    σ = z·S/√ω on its sum.
    """

    run: str  # name of the run in the ledger
    questions: Sequence[Question]  # one or more, of different names
    sampling: PoissonSampling
    noise_multiplier: float  # z ≥ 0 of the whole round
    shares: Mapping[str, float] | None = None
    round: int = 1  # of the run, where it asks repeatedly

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        check_types(sampling=(self.sampling, PoissonSampling))  # answers are of such cohorts alone
        object.__setattr__(self, "questions", tuple(self.questions))
        if not self.run.isprintable() or not self.run or "/" in self.run:
            raise InvalidValueError(f"run is {self.run!r}; it must be a printable name without '/'")
        if self.round != 0 and not is_whole(self.round):
            raise InvalidValueError(
                f"round is {self.round!r}; it must be a whole number, 0 or more"
            )
        names = [question.name for question in self.questions]
        if not names or len(set(names)) < len(names):
            legal = "there must be one or more, of different names"
            raise InvalidValueError(f"the questions are {names}; {legal}")
        _ = self.event  # noise and shares that do not fit are refused here

    @cached_property
    def mechanism(self) -> GaussianMechanism:
        """Draws the cohort, noises its sum and names the event."""
        groups = tuple(question.group for question in self.questions)
        names = tuple(group.name for group in groups)
        weights = dict.fromkeys(names, 1.0) if self.shares is None else self.shares
        layout = Layout(names, tuple((question.dimension,) for question in self.questions))
        clipping, shares = Clipping(layout, groups), given_shares(groups, weights)
        return GaussianMechanism.calibrated(self.sampling, clipping, self.noise_multiplier, shares)

    @property
    def event(self) -> RoundEvent:
        """What asking is charged as, known before any user is asked."""
        return self.mechanism.event

    def answers(self, average: FloatVector) -> tuple[Answer, ...]:
        """The answers in an average [D] that `mechanism` released: post-processing."""
        query = self.mechanism.query
        parts, stddevs = query.clipping.layout.unflatten(average), query.tensor_stddevs
        return tuple(
            q.answer(parts[q.name], stddevs[q.name], self.sampling) for q in self.questions
        )

    def check(self, users: UserStore) -> None:
        """Raise DataError or InvalidValueError if the survey does not fit the users."""
        refuse_shared(users, "whole users are asked")
        held, enrolled = users.population, self.sampling.population
        if held != enrolled:
            raise InvalidValueError(f"the store holds {held} users; the sampling is of {enrolled}")
        for question in self.questions:
            if not isinstance(question.of, str):
                continue
            asking = f"question {question.name!r} asks for column {question.of!r}"
            if question.of not in users.fields:
                raise DataError(f"{asking}; {known_names(question.of, users.fields)}")
            field = users.fields[question.of]
            if not _readable(field, question):
                found = f"{field.dtype}{list(field.shape)}"
                one = "one text" if question.scalar is np.str_ else "one number"
                needed = one if question.width is None else f"{question.width} numbers"
                raise DataError(f"{asking}, which is {found}; it must hold {needed} per row")


@dataclass(frozen=True, eq=False)
class Answers:
    """What one survey released; safe to show. `answers[name]` is the answer to one question."""

    answers: tuple[Answer, ...]  # one per question, in their order
    attempt: int  # which attempt at the round succeeded, from 0
    charge_hash: str  # of the round's row in the ledger

    def __getitem__(self, question: str) -> Answer:
        by_name = {answer.question: answer for answer in self.answers}
        if question in by_name:
            return by_name[question]
        known = known_names(question, by_name)
        raise InvalidValueError(f"the survey has no question {question!r}; {known}")


def ask(survey: Survey, users: UserStore, records: PrivacyRecords, entropy: Entropy) -> Answers:
    """Ask all enrolled users and release noised answers, with the guarantees of `private_round`.

    One charge covers all answers: one user more or less moves the sums of all questions, each
    divided by its σ, by at most 1/z together (McMahan et al. 2018, equation (1)). Users whose
    number or columns do not fit are refused first.
    """
    survey.check(users)

    def collected(_: RoundAttempt, cohort: Positions) -> Iterator[PartialSum]:
        return collect(survey, users, cohort)

    release = private_round(survey.mechanism, survey.run, survey.round, collected, records, entropy)
    return Answers(survey.answers(release.average), release.attempt, release.charge_hash)


def collect(survey: Survey, users: UserStore, cohort: Positions) -> Iterator[PartialSum]:
    """Yield the sum of the clipped contributions of a cohort [positions, ascending].

    Guarantees:

    * what a user adds to the sum of each question has a norm of at most the question's;
    * a user whose values of one question cannot be used adds zero to that one, whatever it holds,
      and nothing that a user holds, nor a function of a question, raises here.
    """
    totals = [total_of(question, users, cohort) for question in survey.questions]
    yield PartialSum("cohort", cohort.size, np.concatenate(totals), cohort.size)


def total_of(question: Question, users: UserStore, cohort: Positions) -> IntegerVector:
    """Sum of what a cohort contributes to a question, in steps [d], a chunk of users at a time."""
    total = np.zeros(question.dimension, np.int64)
    numbers = question.numbers(users.offsets[cohort + 1] - users.offsets[cohort])
    ends = np.flatnonzero(np.diff(np.cumsum(numbers) // _NUMBERS)) + 1
    for chunk in np.split(cohort, ends) if cohort.size else ():
        total += _total_of_chunk(question, users, chunk)
    return total


def _total_of_chunk(question: Question, users: UserStore, chunk: Positions) -> IntegerVector:
    try:
        return question.total(held_by(question, users, chunk))
    except MemoryError:  # a function may give more than its user holds
        if chunk.size == 1:
            _log.warning("%s: its values take more memory than there is", ZEROED)
            return np.zeros(question.dimension, np.int64)
    first, second = (_total_of_chunk(question, users, part) for part in np.array_split(chunk, 2))
    return first + second


def held_by(question: Question, users: UserStore, positions: Positions) -> UserValues:
    """What some users hold of the quantity of a question; nothing where a function fails."""
    of = question.of
    if isinstance(of, str):
        asked = UserStore({of: users.fields[of]}, users.offsets).subset(positions)
        return UserValues(_converted(asked.fields[of], question), asked.offsets)
    returned = [_returned(of, users.examples_of(user), question) for user in positions.tolist()]
    offsets = np.cumsum([0, *map(len, returned)], dtype=np.int64)
    return UserValues(np.concatenate([_nothing(question), *returned]), offsets)


def _returned(
    function: QuantityFunction, fields: Mapping[str, Values], question: Question
) -> Values:
    """What a function returns for one user; nothing if it raises or that is of no use."""
    try:
        values = np.atleast_1d(np.asarray(function(fields)))
        if _readable(values, question):
            return _converted(values, question)
        if values.shape == (0,):
            return _nothing(question)
        reason = f"{values.dtype}{list(values.shape)}"
    except Exception as error:  # a failing user counts as zero, whatever the failure
        reason = type(error).__name__  # its text may hold the user's data
    _log.warning("%s: the function of a question gave %s", ZEROED, reason)
    return _nothing(question)


def _readable(values: Values, question: Question) -> bool:
    kinds = "U" if question.scalar is np.str_ else "biuf"
    wide = values.ndim > 1 and math.prod(values.shape[1:]) == question.width
    return values.dtype.kind in kinds and (values.ndim == 1 if question.width is None else wide)


def _converted(values: Values, question: Question) -> Values:
    """Values as the question reads them: [R], or [R, width]."""
    if question.width is not None:
        values = values.reshape(len(values), question.width)
    if question.scalar is np.str_:
        return values.astype(f"<U{question.characters}", copy=False)
    with np.errstate(over="ignore"):  # a number beyond the range of float64 becomes infinite
        return values.astype(question.scalar, copy=False)


def _nothing(question: Question) -> Values:
    shape = (0,) if question.width is None else (0, question.width)
    return np.empty(shape, question.scalar)
