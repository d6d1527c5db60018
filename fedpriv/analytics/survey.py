"""A survey: its questions, cohort and noise, and the round that asks the questions."""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from fedpriv.privacy.gaussian_mechanism import GaussianMechanism, given_shares
from fedpriv.privacy.layout import FloatVector, Layout
from fedpriv.privacy.noise import Entropy
from fedpriv.privacy.round import PartialSum, PrivacyRecords, RoundAttempt, private_round
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.support.checks import check_types, hold_numbers, is_whole, require

_log = logging.getLogger(__name__)

Positions: TypeAlias = npt.NDArray[np.int64]  # of users in the store
_NUMBERS = 1 << 21  # float64 numbers of a chunk of users: 16 MiB


@dataclass(frozen=True)
class Survey:
    """Questions to one cohort, answered together and charged as one round.

    With q = 1 all users are asked, and there is no sampling error. Questions share the round's
    privacy equally, or in proportion to positive weights by name: a question with share ω and
    clipping norm S has noise of standard deviation z·S/√ω on its sum.
    """

    run: str  # name of the run in the ledger
    questions: Sequence[Question]  # one or more, with different names
    sampling: PoissonSampling
    noise_multiplier: float  # z ≥ 0 of the whole round
    shares: Mapping[str, float] | None = None
    round: int = 1  # number in the run, which may ask repeatedly

    def __post_init__(self) -> None:
        hold_numbers(self)
        check_types(run=(self.run, str), questions=(self.questions, Iterable))
        check_types(shares=(self.shares, Mapping | None))
        check_types(sampling=(self.sampling, PoissonSampling))  # as answers assume
        object.__setattr__(self, "questions", tuple(self.questions))
        check_types(**{f"question {n}": (q, Question) for n, q in enumerate(self.questions, 1)})
        if not self.run.isprintable() or not self.run or "/" in self.run:
            raise InvalidValueError(f"run is {self.run!r}; it must be a printable name without '/'")
        is_number = self.round == 0 or is_whole(self.round)
        require(is_number, f"round is {self.round!r}; it must be a whole number, 0 or more")
        names = [question.name for question in self.questions]
        limit = "there must be one or more, with different names"
        require(0 < len(names) == len(set(names)), f"the questions are {names}; {limit}")
        _ = self.event  # checks the noise and the shares

    @cached_property
    def mechanism(self) -> GaussianMechanism:
        """The mechanism that draws the cohort, noises its sum and names the event."""
        groups = tuple(question.group for question in self.questions)
        names = tuple(group.name for group in groups)
        weights = dict.fromkeys(names, 1.0) if self.shares is None else self.shares
        layout = Layout(names, tuple((question.dimension,) for question in self.questions))
        clipping, shares = Clipping(layout, groups), given_shares(groups, weights)
        return GaussianMechanism.calibrated(self.sampling, clipping, self.noise_multiplier, shares)

    @property
    def event(self) -> RoundEvent:
        """The event that is charged for the survey."""
        return self.mechanism.event

    def answers(self, average: FloatVector) -> tuple[Answer, ...]:
        """Return the answers from an average [D] that `mechanism` released: post-processing."""
        query = self.mechanism.query
        parts, stddevs = query.clipping.layout.unflatten(average), query.tensor_stddevs
        return tuple(
            q.answer(parts[q.name], stddevs[q.name], self.sampling) for q in self.questions
        )

    def check(self, users: UserStore) -> None:
        """Raise DataError or InvalidValueError if the survey does not fit the users."""
        refuse_shared(users, "whole users are asked")
        users.refuse_broken()
        size, enrolled = users.population, self.sampling.population
        message = f"the store holds {size} users; the sampling is for {enrolled}"
        require(size == enrolled, message)
        for question in self.questions:
            if not isinstance(question.of, str):
                continue
            subject = f"question {question.name!r} asks for column {question.of!r}"
            if question.of not in users.fields:
                raise DataError(f"{subject}; {known_names(question.of, users.fields)}")
            field = users.fields[question.of]
            if not _readable(field, question):
                kind = f"{field.dtype}{list(field.shape)}"
                scalar = "one text" if question.scalar is np.str_ else "one number"
                content = scalar if question.width is None else f"{question.width} numbers"
                raise DataError(f"{subject}, which is {kind}; it must hold {content} per row")


@dataclass(frozen=True, eq=False)
class Answers:
    """The released answers of a survey, safe to show; `answers[name]` is one question's answer."""

    answers: tuple[Answer, ...]  # in the order of the questions
    attempt: int  # the successful attempt at the round, from 0
    charge_hash: str  # of the round's row in the ledger

    def __getitem__(self, question: str) -> Answer:
        by_name = {answer.question: answer for answer in self.answers}
        if question in by_name:
            return by_name[question]
        hint = known_names(question, by_name)
        raise InvalidValueError(f"the survey has no question {question!r}; {hint}")


def ask(survey: Survey, users: UserStore, records: PrivacyRecords, entropy: Entropy) -> Answers:
    """Ask a cohort of the users and return noised answers, with the guarantees of `private_round`.

    One charge covers all answers: adding or removing one user moves the vector of all sums, each
    divided by the standard deviation of its noise, by at most 1/z (McMahan et al. 2018,
    equation (1)). Before the charge, DataError or InvalidValueError if the survey does not fit the
    users.
    """
    survey.check(users)

    def sums(_: RoundAttempt, cohort: Positions) -> Iterator[PartialSum]:
        return collect(survey, users, cohort)

    release = private_round(survey.mechanism, survey.run, survey.round, sums, records, entropy)
    return Answers(survey.answers(release.average), release.attempt, release.charge_hash)


def collect(survey: Survey, users: UserStore, cohort: Positions) -> Iterator[PartialSum]:
    """Yield the sum of the clipped contributions of a cohort [positions, ascending].

    Guarantees:

    * a user's term in the sum of a question has at most the clipping norm of the question;
    * a user whose values for a question are unusable adds zero to its sum;
    * neither a user's data nor the function of a question can raise an error.
    """
    totals = [total_of(question, users, cohort) for question in survey.questions]
    yield PartialSum("cohort", cohort.size, np.concatenate(totals), cohort.size)


def total_of(question: Question, users: UserStore, cohort: Positions) -> IntegerVector:
    """Return the sum of a cohort's contributions to a question, in steps [d], chunk by chunk."""
    total = np.zeros(question.dimension, np.int64)
    numbers = question.numbers(users.offsets[cohort + 1] - users.offsets[cohort])
    ends = np.flatnonzero(np.diff(np.cumsum(numbers) // _NUMBERS)) + 1
    for chunk in np.split(cohort, ends) if cohort.size else ():
        total += _total_of_chunk(question, users, chunk)
    return total


def _total_of_chunk(question: Question, users: UserStore, chunk: Positions) -> IntegerVector:
    try:
        return question.total(held_by(question, users, chunk))
    except MemoryError:  # a function may return more than its user's data
        if chunk.size == 1:
            _log.warning("%s: its values take more memory than is available", ZEROED)
            return np.zeros(question.dimension, np.int64)
    first, second = (_total_of_chunk(question, users, part) for part in np.array_split(chunk, 2))
    return first + second


def held_by(question: Question, users: UserStore, positions: Positions) -> UserValues:
    """Return the values of a question's quantity for some users; none if a function fails."""
    source = question.of
    if isinstance(source, str):
        column = UserStore({source: users.fields[source]}, users.offsets).subset(positions)
        return UserValues(_converted(column.fields[source], question), column.offsets)
    by_user = [_values_of(source, users.examples_of(user), question) for user in positions.tolist()]
    offsets = np.cumsum([0, *map(len, by_user)], dtype=np.int64)
    return UserValues(np.concatenate([_no_values(question), *by_user]), offsets)


def _values_of(
    function: QuantityFunction, fields: Mapping[str, Values], question: Question
) -> Values:
    """Return the values of a function for one user; none if it raises or they are unusable."""
    try:
        values = np.atleast_1d(np.asarray(function(fields)))
        if _readable(values, question):
            return _converted(values, question)
        if values.shape == (0,):
            return _no_values(question)
        reason = f"{values.dtype}{list(values.shape)}"
    except Exception as error:  # a failing user counts as zero, whatever the failure
        reason = type(error).__name__  # the message may hold the user's data
    _log.warning("%s: the function of a question gave %s", ZEROED, reason)
    return _no_values(question)


def _readable(values: Values, question: Question) -> bool:
    kinds, width = "U" if question.scalar is np.str_ else "biuf", question.width
    is_matrix = values.ndim > 1 and math.prod(values.shape[1:]) == width
    return values.dtype.kind in kinds and (values.ndim == 1 if width is None else is_matrix)


def _converted(values: Values, question: Question) -> Values:
    """Return values in the question's type: [R], or [R, width]."""
    if question.width is not None:
        values = values.reshape(len(values), question.width)
    if question.scalar is np.str_:
        return values.astype(f"<U{question.characters}", copy=False)
    with np.errstate(over="ignore"):  # a number beyond the range of float64 becomes infinite
        return values.astype(question.scalar, copy=False)


def _no_values(question: Question) -> Values:
    shape = (0,) if question.width is None else (0, question.width)
    return np.empty(shape, question.scalar)
