"""The questions of a survey: what a user contributes to each, and what a release answers.

Each is about one quantity: a column of the users' data, or a function of one user's fields. To add
a question, derive a frozen dataclass from `VectorQuestion`, or from `Question` if the vectors of
users are too long to be written down one by one.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy
from scipy.linalg import toeplitz
from scipy.sparse import csr_array

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.clipping import FloatMatrix, IntegerVector, clip_vectors
from fedpriv.privacy.layout import FloatVector, VectorGroup
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.support.checks import hold_plain_numbers

_log = logging.getLogger(__name__)
_WIDTH = 2.0  # standard deviations to either side of an interval: 95.4% of a normal law
_MOST_THRESHOLDS = 4096
_MOST_CHARACTERS = 1024
# Begins a line of the log for each user of a cohort that fails: their number is no release.
ZEROED = "simulation only, not private: a user counts as zero"

Values: TypeAlias = npt.NDArray[Any]  # numbers or texts
Scalar: TypeAlias = type[np.float64] | type[np.str_]  # which of the two
QuantityFunction: TypeAlias = Callable[[Mapping[str, Values]], object]
"""From the fields of one user, name → array [rows, …], to values; it must look at nothing else."""


@dataclass(frozen=True, eq=False)
class UserValues:
    """What U users hold of one quantity; user u has values[offsets[u] : offsets[u + 1]]."""

    values: Values  # [R] float64, or strings; [R, width] where a question has a width
    offsets: npt.NDArray[np.int64]  # [U + 1]

    def sums(self, weights: Values) -> FloatVector:
        """Sum over each user's values of a number per value: [R] → [U]."""
        columns = np.zeros(len(weights), np.int64)
        return np.asarray(self.spread(weights, columns, 1).toarray())[:, 0]

    def spread(self, weights: Values, columns: npt.NDArray[np.int64], width: int) -> csr_array:
        """Each user's weights added up by column: [R] weights and columns → sparse [U, width]."""
        shape = (len(self.offsets) - 1, width)
        return csr_array((weights.astype(np.float64), columns, self.offsets), shape)


@dataclass(frozen=True, eq=False)
class Answer:
    """The answer to one question; all of it was released.

    About 95 of 100 releases have low ≤ answer without noise and sampling ≤ high: both account for
    the noise, and for the cohort standing for all users.
    """

    question: str
    value: FloatVector  # noised, of the question's shape
    noise_stddev: FloatVector  # in each component, in units of the value
    low: FloatVector
    high: FloatVector


@dataclass(frozen=True)
class Question(ABC):
    """A vector of each user, of which the sum over the cohort is noised and turned into an answer.

    Every question keeps these promises:

    * what a user contributes has an L2 norm of at most `clipping_norm`, whatever it holds;
    * a user without a value that counts contributes the zero vector, and so does NaN;
    * the answer is a function of the released average and of public numbers alone.

    A `VectorQuestion` need not clip, nor keep users apart: that is done for it. Another must, in
    its `total`.
    """

    name: str  # of the question, and of its vector group in the ledger
    # The quantity: a column of the users' store, or a function of one user.
    of: str | QuantityFunction

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        if not self.name or not self.name.isprintable():
            legal = "a name must be printable and not empty"
            raise InvalidValueError(f"a question is named {self.name!r}; {legal}")
        if not isinstance(self.of, str) and not callable(self.of):
            legal = "it must be a column's name or a function of one user's fields"
            raise InvalidValueError(f"question {self.name!r} asks for {self.of!r}; {legal}")
        self._check()
        _ = self.group  # a norm to which nothing can be clipped is refused here

    def _check(self) -> None:  # noqa: B027 - most questions have nothing to add
        """Refuse the fields of a subclass that are out of range."""

    def _refusal(self, found: str) -> InvalidValueError:
        return InvalidValueError(f"question {self.name!r} has {found}")

    @property
    def scalar(self) -> Scalar:
        """Whether the quantity is numbers, or texts."""
        return np.float64

    @property
    def characters(self) -> int:
        """The length to which texts are cut, since one user's could take the memory of all."""
        return _MOST_CHARACTERS

    @property
    def width(self) -> int | None:
        """How many numbers a value consists of, where it is not one number or text."""
        return None

    @property
    @abstractmethod
    def clipping_norm(self) -> float:
        """S, the bound on the L2 norm of a user's vector."""

    @property
    def group(self) -> VectorGroup:
        """The vector group of the question."""
        return VectorGroup.single(self.name, self.clipping_norm)

    @property
    @abstractmethod
    def dimension(self) -> int:
        """Length d of a user's vector."""

    @abstractmethod
    def numbers(self, values: IntegerVector) -> IntegerVector:
        """How many numbers `total` holds at a time for users with so many values: [U] → [U]."""

    @abstractmethod
    def total(self, held: UserValues) -> IntegerVector:
        """Sum of users' vectors, each clipped by itself, in steps of the group: [d]."""

    @abstractmethod
    def answer(self, average: FloatVector, stddev: float, sampling: PoissonSampling) -> Answer:
        """Turn a release into an answer: post-processing.

        The average [d] is the noised sum of the cohort's vectors, divided by qN; `stddev` is that
        of the noise in each of its components.
        """

    def normal_answer(
        self, value: FloatVector, noise_stddev: FloatVector | float, spread: FloatVector | float
    ) -> Answer:
        """Answer whose errors are about normal, from the noise and from sampling (at most)."""
        noise = np.full(value.shape, noise_stddev)
        half = _WIDTH * np.hypot(noise, spread)
        return Answer(self.name, value, noise, np.asarray(value - half), np.asarray(value + half))


class VectorQuestion(Question):
    """A question for which the vector of each user is written down and clipped.

    Users are asked one by one, so that the vector of one cannot depend on what others hold; nothing
    must be kept from one to the next.
    """

    @property
    def dimension(self) -> int:
        """Length d of a user's vector, found from a user without values.

        InvalidValueError if that user's is not one row of numbers.
        """
        shape = (0,) if self.width is None else (0, self.width)
        blank = UserValues(np.empty(shape, self.scalar), np.zeros(2, np.int64))
        try:
            found = np.asarray(self.contributions(blank))
        except Exception as error:
            raise self._refusal(
                f"contributions that raise {type(error).__name__} of a user without values; they "
                "must be zeros [1, d]"
            ) from error
        if found.dtype.kind not in "biuf" or found.ndim != 2 or len(found) != 1:
            raise self._refusal(
                f"contributions {found.dtype}{list(found.shape)} of a user without values; they "
                "must be numbers [1, d]"
            )
        return len(found[0])

    def numbers(self, values: IntegerVector) -> IntegerVector:
        """A vector for each user, beside its values."""
        return values + self.dimension

    def total(self, held: UserValues) -> IntegerVector:
        """Sum of users' vectors, each asked for and clipped by itself, in steps of the group: [d].

        Nothing raises: a user whose vector does, or is not d numbers, contributes zero.
        """
        vectors = np.zeros((len(held.offsets) - 1, self.dimension))
        for vector, (begin, end) in zip(vectors, pairwise(held.offsets.tolist()), strict=True):
            alone = UserValues(held.values[begin:end].copy(), np.array([0, end - begin]))
            try:
                found = np.asarray(self.contributions(alone), np.float64)
                if found.shape == (1, vector.size):
                    vector[:] = found[0]
                    continue
                reason = f"the shape {list(found.shape)}"
            except Exception as error:  # a failing user counts as zero, whatever the failure
                reason = type(error).__name__  # its text may hold the user's data
            _log.warning("%s: question %r gave %s", ZEROED, self.name, reason)
        return self._clipped_sum(vectors)

    def _clipped_sum(self, vectors: FloatMatrix) -> IntegerVector:
        clip_vectors([vectors], self.clipping_norm)
        total: IntegerVector = vectors.sum(axis=0).astype(np.int64)
        return total

    @abstractmethod
    def contributions(self, held: UserValues) -> FloatMatrix:
        """Vectors of users, before they are clipped: [users, d]; `total` asks for one user's."""


class _AtOnce(VectorQuestion):
    """A question of this module: rows of its contributions are known not to depend on others."""

    def total(self, held: UserValues) -> IntegerVector:
        """Sum of users' vectors, all made at once, in steps of the group: [d]."""
        return self._clipped_sum(self.contributions(held))


def sampling_spread(sampling: PoissonSampling) -> float:
    """Standard deviation of an average over the expected cohort, per unit that each user has.

    The average (1/(qN))·Σ_{i in cohort} c_i varies with the cohort by (1 − q)/(q·N²)·Σ c_i² around
    the average over all users, which is at most this, squared, times max c_i².
    """
    return math.sqrt((1.0 - sampling.sampling_probability) / sampling.expected_cohort_size)


@dataclass(frozen=True)
class Histogram(_AtOnce):
    """Values of all enrolled users, counted by category.

    A user contributes its counts, scaled down to the clipping norm if they are longer. Where users
    have one value each, 1 is enough, and the answer is unbiased; where they have more, long users
    count for less than they hold. The answer has shape [K], in the order of the categories; noise
    can make a count negative.
    """

    categories: Sequence[int] | Sequence[str]  # K different ones; other values are not counted
    clipping_norm: float = 1.0  # S > 0, in values

    def _check(self) -> None:
        given = np.asarray(self.categories)
        # NumPy makes texts of numbers that stand beside texts.
        alike = given.dtype.kind in "iuU" and given.tolist() == list(self.categories)
        object.__setattr__(self, "categories", tuple(given.tolist()))
        if not alike or not given.size or np.unique(self._given).size < given.size:
            legal = "they must be different, all integers or all strings, and at least one"
            raise self._refusal(f"the categories {self.categories}; {legal}")

    @property
    def scalar(self) -> Scalar:
        """Texts, if the categories are."""
        return np.str_ if isinstance(self.categories[0], str) else np.float64

    @property
    def characters(self) -> int:
        """One more than the longest category, so that a text that is cut is none of them."""
        return max(len(str(category)) for category in self.categories) + 1

    @property
    def _given(self) -> Values:
        return np.asarray(self.categories, dtype=self.scalar)

    def contributions(self, held: UserValues) -> FloatMatrix:
        """Counts of users' values: [users, K]."""
        given, order = self._given, np.argsort(self._given)
        columns = order[np.searchsorted(given, held.values, sorter=order).clip(max=given.size - 1)]
        counted = given[columns] == held.values
        return np.asarray(held.spread(counted, columns, given.size).toarray())

    def answer(self, average: FloatVector, stddev: float, sampling: PoissonSampling) -> Answer:
        """The counts: N times the average."""
        users = float(sampling.population)
        value, noise = users * average, users * stddev
        # A user's count c is from 0 to S, so all c² together are at most S times the sum of c.
        squares = self.clipping_norm * np.maximum(value + _WIDTH * noise, 0.0)
        spread = sampling_spread(sampling) * np.sqrt(users * squares)
        return self.normal_answer(value, noise, spread)


@dataclass(frozen=True)
class Distribution(_AtOnce):
    """The share of all enrolled users whose value is at or below each threshold.

    The m thresholds are finite and rise. A user with several values counts as equal parts of each;
    one without a finite value counts as above all thresholds. The answer has shape [m] and is
    unbiased, hence at times outside [0, 1] or falling.

    The curve is the running sum A·h of the histogram h of the bins between thresholds. Noising h
    and adding up would leave noise that grows as √m. Instead, users contribute their column of the
    square root R of A (R·R = A, lower triangular Toeplitz), and the server multiplies the noised
    sum by R once more. The noise of each share is then less than 1.07 + ln(m)/π times that of a
    single count, 2.4 times for m = 64 (Fichtenberger, Henzinger and Upadhyay 2023,
    arXiv:2202.11205).
    """

    thresholds: Sequence[float]

    def _check(self) -> None:
        object.__setattr__(self, "thresholds", tuple(map(float, self.thresholds)))
        points = np.asarray(self.thresholds)
        rises = bool(np.all(points[1:] > points[:-1]) and np.all(np.isfinite(points)))
        if not (1 <= points.size <= _MOST_THRESHOLDS and rises):
            legal = f"1 to {_MOST_THRESHOLDS} finite ones, each above the one before"
            raise self._refusal(f"{points.size} thresholds; there must be {legal}")

    @cached_property
    def _coefficients(self) -> FloatVector:
        """First column of R: the power series of (1 − x)^(−1/2), as A's is that of 1/(1 − x)."""
        k = np.arange(1.0, len(self.thresholds))
        return np.cumprod(np.concatenate([np.ones(1), (2.0 * k - 1.0) / (2.0 * k)]))

    @cached_property
    def _root(self) -> FloatMatrix:
        return np.asarray(toeplitz(self._coefficients, np.zeros(len(self.thresholds))))

    @property
    def clipping_norm(self) -> float:
        """Norm of the longest column of R, the first; parts of several columns are no longer."""
        return float(np.linalg.norm(self._coefficients))

    def contributions(self, held: UserValues) -> FloatMatrix:
        """Columns of R that belong to users' bins: [users, m]."""
        known = np.isfinite(held.values)
        # NaN is sorted above all thresholds, where the column is zero.
        columns = np.searchsorted(self.thresholds, held.values)
        root = np.vstack([self._root.T, np.zeros(len(self.thresholds))])
        parts = held.spread(known, columns, len(root)) @ root
        return np.asarray(parts / np.maximum(held.sums(known), 1.0)[:, np.newaxis])

    def answer(self, average: FloatVector, stddev: float, sampling: PoissonSampling) -> Answer:
        """The curve: R times the average. Row i of R has the first i + 1 coefficients."""
        value = self._root @ average
        noise = stddev * np.sqrt(np.cumsum(self._coefficients**2))
        # A user's part of each share is from 0 to 1, and so no less than its square.
        most = np.clip(value + _WIDTH * noise, 0.0, 1.0)
        return self.normal_answer(value, noise, sampling_spread(sampling) * np.sqrt(most))


@dataclass(frozen=True)
class Quantiles(_AtOnce):
    """Quantiles over all enrolled users: the least threshold with a share p of them at or below.

    All are read off one released `Distribution`, made rising by least squares; so ten quantiles
    cost as much as one. Where the curve stays below p, the last threshold is given.

    Error: the share of users at or below the value, and the share below it on the grid of
    thresholds, bracket p up to the noise of the curve at these two places. Noise moves the value
    far where few users are: `low` and `high` hold for each quantile by itself. The answer has shape
    [k]; its noise_stddev is a quarter of the interval that noise alone makes, 0 where that falls on
    one threshold.
    """

    thresholds: Sequence[float]
    probabilities: Sequence[float] = (0.25, 0.5, 0.75)  # k of them, each in (0, 1)

    def _check(self) -> None:
        object.__setattr__(self, "thresholds", self._curve.thresholds)
        object.__setattr__(self, "probabilities", tuple(map(float, self.probabilities)))
        if not self.probabilities or not all(0.0 < p < 1.0 for p in self.probabilities):
            legal = "there must be one or more, each in (0, 1)"
            raise self._refusal(f"the probabilities {self.probabilities}; {legal}")

    @cached_property
    def _curve(self) -> Distribution:
        return Distribution(self.name, self.of, self.thresholds)

    @property
    def clipping_norm(self) -> float:
        """That of the curve."""
        return self._curve.clipping_norm

    def contributions(self, held: UserValues) -> FloatMatrix:
        """Those to the curve: [users, m]."""
        return self._curve.contributions(held)

    def answer(self, average: FloatVector, stddev: float, sampling: PoissonSampling) -> Answer:
        """Where the released curve reaches each probability."""
        curve = self._curve.answer(average, stddev, sampling)
        levels, points = np.array(self.probabilities), np.array(self.thresholds)
        reached = np.searchsorted(
            np.asarray(scipy.optimize.isotonic_regression(curve.value).x), levels
        )
        of_noise = crossings(curve.value, _WIDTH * curve.noise_stddev, levels)
        of_both = crossings(curve.value, curve.high - curve.value, levels)
        value, earliest, latest, low, high = (
            points[np.minimum(places, points.size - 1)] for places in (reached, *of_noise, *of_both)
        )
        spread = latest / (2.0 * _WIDTH) - earliest / (2.0 * _WIDTH)
        return Answer(self.name, value, spread, low, high)


def crossings(
    curve: FloatVector, margin: FloatVector, levels: FloatVector
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The first and the last place [k] where a rising curve [m] may reach each level [k].

    The curve is known up to errors of the margin [m]. If the true curve first reaches level p at
    place t, then a result after t takes an error below −margin at t, and one before t takes an
    error of margin or more at t − 1. The place is m where the curve stays below.
    """
    reached = curve + margin >= levels[:, np.newaxis]
    below = curve - margin < levels[:, np.newaxis]
    first = np.where(reached.any(1), reached.argmax(1), curve.size)
    last = np.where(below.any(1), curve.size - below[:, ::-1].argmax(1), 0)
    return first, last


@dataclass(frozen=True)
class _Ranged(_AtOnce):
    """A question about values that are clipped to [low, high]."""

    low: float
    high: float

    def _check(self) -> None:
        if not -math.inf < self.low < self.high < math.inf:
            legal = "low must be below high and both finite"
            raise self._refusal(f"low {self.low} and high {self.high}; {legal}")

    @property
    def _centre(self) -> float:
        return self.low + (self.high - self.low) / 2.0

    @property
    def _radius(self) -> float:
        return max(self.high - self._centre, self._centre - self.low)

    def _deviations(self, held: UserValues) -> FloatVector:
        """Mean over each user's finite values, clipped, minus the centre; 0 without one: [U]."""
        known = np.isfinite(held.values)
        clipped = np.clip(np.where(known, held.values, self._centre), self.low, self.high)
        return held.sums(clipped - self._centre) / np.maximum(held.sums(known), 1.0)


@dataclass(frozen=True)
class Mean(_Ranged):
    """The mean over all enrolled users of their values, each clipped to [low, high].

    A user contributes its value minus the middle of the range, and without a value counts as one
    there. The denominator is the constant qN, never a noisy count of those who have a value: the
    answer, of shape (), is unbiased, which a ratio is not. A narrow range has little noise.
    """

    @property
    def clipping_norm(self) -> float:
        """Half the range."""
        return self._radius

    def contributions(self, held: UserValues) -> FloatMatrix:
        """Values minus the centre: [users, 1]."""
        return self._deviations(held)[:, np.newaxis]

    def answer(self, average: FloatVector, stddev: float, sampling: PoissonSampling) -> Answer:
        """The mean: the centre and the average deviation from it."""
        value = self._centre + average.reshape(())
        return self.normal_answer(value, stddev, self._radius * sampling_spread(sampling))


@dataclass(frozen=True)
class Sum(_Ranged):
    """The sum over all enrolled users of their totals, each clipped to [low, high].

    Of a column or function of zeros and ones with low = 0 and high = 1 it is a count of users. The
    answer has shape () and is unbiased; a user without a value adds nothing.
    """

    @property
    def clipping_norm(self) -> float:
        """The larger of |low| and |high|."""
        return max(abs(self.low), abs(self.high))

    def contributions(self, held: UserValues) -> FloatMatrix:
        """Totals of users: [users, 1]."""
        known = np.isfinite(held.values)
        totals = np.clip(held.sums(np.where(known, held.values, 0.0)), self.low, self.high)
        return np.where(held.sums(known) > 0.0, totals, 0.0)[:, np.newaxis]

    def answer(self, average: FloatVector, stddev: float, sampling: PoissonSampling) -> Answer:
        """The sum: N times the average."""
        users = float(sampling.population)
        spread = users * self.clipping_norm * sampling_spread(sampling)
        return self.normal_answer(users * average.reshape(()), users * stddev, spread)


@dataclass(frozen=True)
class Variance(_Ranged):
    """The variance over all users of their values, clipped to [low, high]: mean square − mean².

    A user contributes (t, t²), t being its value in units of half the range from the centre, and
    without a value counts as one there. The answer has shape () and is unbiased, hence at times
    negative. It is not linear in the release: noise_stddev takes the released mean for the true
    one, and the interval the cohort's part of the error to first order.
    """

    @property
    def clipping_norm(self) -> float:
        """√2, without a unit, as |t| ≤ 1."""
        return math.sqrt(2.0)

    def contributions(self, held: UserValues) -> FloatMatrix:
        """Scaled values and their squares: [users, 2]."""
        scaled = self._deviations(held) / self._radius
        return np.stack([scaled, scaled * scaled], axis=1)

    def answer(self, average: FloatVector, stddev: float, sampling: PoissonSampling) -> Answer:
        """The variance, freed of what the noise and the cohort add to the squared mean.

        With averages a of t and b of t², E[a²] is the squared mean plus σ² of the noise plus
        (1 − q)/(qN) times the mean square, of which b is an unbiased estimate.
        """
        first, second = average.tolist()
        spread, unit = sampling_spread(sampling), self._radius**2
        grown = 1.0 + spread**2
        variance = second * grown - first**2 + stddev**2
        # Var(a²) of a = m + e is 4m²σ² + 2σ⁴ for normal e.
        of_noise = math.hypot(stddev * grown, 2.0 * first * stddev, math.sqrt(2.0) * stddev**2)
        # One user moves b − a² by t² − 2at to first order, with |t| ≤ 1.
        of_cohort = spread * (1.0 + 2.0 * abs(first))
        return self.normal_answer(np.asarray(unit * variance), unit * of_noise, unit * of_cohort)
