"""The questions of a survey: the contribution of a user, and the answer in a release.

A question is about one quantity: a column of the users' data, or a function of one user's fields.
To add a question, derive a frozen dataclass from `VectorQuestion`, or from `Question` if users'
vectors are too long to store separately.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import scipy
from scipy.linalg import toeplitz
from scipy.sparse import csr_array

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.clipping import FloatMatrix, IntegerVector, clip_vectors
from fedpriv.privacy.layout import FloatVector, VectorGroup
from fedpriv.privacy.outer_products import CLIPPING_NORM, SHRINK, outer_product_sum
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.support.checks import check_types, hold_numbers, is_whole, require

_log = logging.getLogger(__name__)
_WIDTH = 2.0  # half the width of intervals in standard deviations: 95.4% of a normal law
_MOST_THRESHOLDS = 4096
_MOST_INPUTS = 4096  # a matrix of this size takes 128 MiB
_MOST_CHARACTERS = 1024
# Prefix of log lines, one for each user in a cohort that fails; their number is not private.
ZEROED = "simulation only, not private: a user counts as zero"

Values: TypeAlias = npt.NDArray[Any]  # numbers or texts
Scalar: TypeAlias = type[np.float64] | type[np.str_]  # the type of one value
QuantityFunction: TypeAlias = Callable[[Mapping[str, Values]], object]
"""Maps one user's fields, name → array [rows, …], to values; it must not use anything else."""


@dataclass(frozen=True, eq=False)
class UserValues:
    """The values of one quantity for U users; user u has values[offsets[u] : offsets[u + 1]]."""

    values: Values  # [R] float64 or strings; [R, width] if the question has a width
    offsets: npt.NDArray[np.int64]  # [U + 1]

    def sums(self, weights: Values) -> FloatVector:
        """Return the sum of each user's weights: [R] → [U]."""
        columns = np.zeros(len(weights), np.int64)
        return np.asarray(self.spread(weights, columns, 1).toarray())[:, 0]

    def spread(self, weights: Values, columns: npt.NDArray[np.int64], width: int) -> csr_array:
        """Return sums of each user's weights by column: weights and columns [R] → [U, width]."""
        shape = (len(self.offsets) - 1, width)
        return csr_array((weights.astype(np.float64), columns, self.offsets), shape)


@dataclass(frozen=True, eq=False)
class Answer:
    """The answer to one question; all fields are released.

    About 95 of 100 intervals [low, high] contain the answer over all users without noise: they
    account for the noise and for the sampling of the cohort.
    """

    question: str
    value: FloatVector  # noised, of the question's shape
    noise_stddev: FloatVector  # of each component, in units of the value
    low: FloatVector
    high: FloatVector


@dataclass(frozen=True)
class Question(ABC):
    """Defines a vector for each user; the noised sum over a cohort becomes an answer.

    Every question keeps these promises:

    * a user's vector has an L2 norm of at most `clipping_norm`, for any data of the user;
    * a user without a value that counts, or with NaN in its vector, contributes the zero vector;
    * the answer is a function of the released average and of public numbers alone.

    A `VectorQuestion` gets the first two from its base class. Other questions must clip in `total`,
    and keep one user's data from affecting another's vector.
    """

    name: str  # of the question, and of its vector group in the ledger
    of: str | QuantityFunction  # the quantity: a column of the store, or a function of one user

    def __post_init__(self) -> None:
        hold_numbers(self)
        check_types(name=(self.name, str))
        if not self.name or not self.name.isprintable():
            limit = "a name must be printable and not empty"
            raise InvalidValueError(f"a question is named {self.name!r}; {limit}")
        if not isinstance(self.of, str) and not callable(self.of):
            limit = "it must be a column's name or a function of one user's fields"
            raise InvalidValueError(f"question {self.name!r} asks for {self.of!r}; {limit}")
        try:
            self._check()
        except InvalidValueError:
            raise
        except (TypeError, ValueError) as error:
            raise self._refusal(f"a list that cannot be read: {error}") from error
        _ = self.group  # checks the norm

    def _check(self) -> None:  # noqa: B027 - most questions have nothing to add
        """Raise InvalidValueError if a field of the subclass is out of range."""

    def _refusal(self, problem: str) -> InvalidValueError:
        return InvalidValueError(f"question {self.name!r} has {problem}")

    @property
    def scalar(self) -> Scalar:
        """The type of the quantity: numbers or texts."""
        return np.float64

    @property
    def characters(self) -> int:
        """The length at which texts are cut, so that no user can exhaust the memory."""
        return _MOST_CHARACTERS

    @property
    def width(self) -> int | None:
        """Number of numbers in a value; None if a value is one number or text."""
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
        """Return the count of numbers that `total` stores for users with `values` values, [U]."""

    @abstractmethod
    def total(self, users: UserValues) -> IntegerVector:
        """Return the sum of users' separately clipped vectors, in steps of the group: [d]."""

    @abstractmethod
    def answer(self, average: FloatVector, stddev: float, sampling: PoissonSampling) -> Answer:
        """Return the answer in a release; this is post-processing.

        `average` [d] is the noised sum of the cohort's vectors, divided by qN; `stddev` is the
        standard deviation of the noise in each component of it.
        """

    def normal_answer(
        self, value: FloatVector, noise_stddev: FloatVector | float, spread: FloatVector | float
    ) -> Answer:
        """Return an answer with approximately normal errors.

        `noise_stddev` is the standard deviation due to noise, and `spread` a bound on that due to
        sampling.
        """
        noise = np.full(value.shape, noise_stddev)
        half = _WIDTH * np.hypot(noise, spread)
        return Answer(self.name, value, noise, np.asarray(value - half), np.asarray(value + half))


class VectorQuestion(Question):
    """A question that stores each user's vector, and clips it.

    `contributions` is called for one user at a time, so that no user's vector depends on others'
    data; it must not keep anything between calls.
    """

    @property
    def dimension(self) -> int:
        """Length d of a user's vector: that of a user without values.

        InvalidValueError if its contributions are not one row of numbers.
        """
        shape = (0,) if self.width is None else (0, self.width)
        blank = UserValues(np.empty(shape, self.scalar), np.zeros(2, np.int64))
        try:
            vectors = np.asarray(self.contributions(blank))
        except Exception as error:
            raise self._refusal(
                f"contributions that raise {type(error).__name__} of a user without values; they "
                "must be zeros [1, d]"
            ) from error
        if vectors.dtype.kind not in "biuf" or vectors.ndim != 2 or len(vectors) != 1:
            raise self._refusal(
                f"contributions {vectors.dtype}{list(vectors.shape)} of a user without values; "
                "they must be numbers [1, d]"
            )
        return len(vectors[0])

    def numbers(self, values: IntegerVector) -> IntegerVector:
        """Return the count of numbers stored for each user: its values and its vector."""
        return values + self.dimension

    def total(self, users: UserValues) -> IntegerVector:
        """Return the sum of users' vectors, computed and clipped separately, in steps: [d].

        A user whose vector raises an error or is not d numbers contributes zero.
        """
        vectors = np.zeros((len(users.offsets) - 1, self.dimension))
        for vector, (begin, end) in zip(vectors, pairwise(users.offsets.tolist()), strict=True):
            alone = UserValues(users.values[begin:end].copy(), np.array([0, end - begin]))
            try:
                contribution = np.asarray(self.contributions(alone), np.float64)
                if contribution.shape == (1, vector.size):
                    vector[:] = contribution[0]
                    continue
                reason = f"the shape {list(contribution.shape)}"
            except Exception as error:  # a failing user counts as zero, whatever the failure
                reason = type(error).__name__  # the message may hold the user's data
            _log.warning("%s: question %r gave %s", ZEROED, self.name, reason)
        return self._clipped_sum(vectors)

    def _clipped_sum(self, vectors: FloatMatrix) -> IntegerVector:
        clip_vectors([vectors], self.clipping_norm)
        total: IntegerVector = vectors.sum(axis=0).astype(np.int64)
        return total

    @abstractmethod
    def contributions(self, users: UserValues) -> FloatMatrix:
        """Return users' vectors before clipping, [users, d]; `total` passes one user at a time."""


class _AtOnce(VectorQuestion):
    """A question of this module, whose contributions keep users apart, computed all at once."""

    def total(self, users: UserValues) -> IntegerVector:
        """Return the sum of users' clipped vectors, in steps of the group: [d]."""
        return self._clipped_sum(self.contributions(users))


def sampling_spread(sampling: PoissonSampling) -> float:
    """Return the standard deviation that sampling adds to an average of contributions of size 1.

    The average (1/(qN))·Σ_{i in cohort} c_i has the variance (1 − q)/(q·N²)·Σ c_i² around the
    average over all users, which is at most the square of the result times max c_i².
    """
    return math.sqrt((1.0 - sampling.sampling_probability) / sampling.expected_cohort_size)


@dataclass(frozen=True)
class Histogram(_AtOnce):
    """Values of all enrolled users, counted by category.

    A user contributes its vector of counts, clipped to the clipping norm. If users have one value
    each, a norm of 1 suffices and the answer is unbiased; otherwise users with many values are
    undercounted. The answer has shape [K], in the order of the categories; noise can make counts
    negative.
    """

    categories: Sequence[int] | Sequence[str]  # K different ones; other values do not count
    clipping_norm: float = 1.0  # S > 0, in values

    def _check(self) -> None:
        array = np.asarray(self.categories)
        # NumPy converts numbers next to text into text.
        uniform = array.dtype.kind in "iuU" and array.tolist() == list(self.categories)
        object.__setattr__(self, "categories", tuple(array.tolist()))
        if not uniform or not array.size or np.unique(self._array).size < array.size:
            limit = "they must be different, all integers or all strings, and at least one"
            raise self._refusal(f"the categories {self.categories}; {limit}")

    @property
    def scalar(self) -> Scalar:
        """The type of the categories."""
        return np.str_ if isinstance(self.categories[0], str) else np.float64

    @property
    def characters(self) -> int:
        """One more than the longest category, so that no text cut here equals a category."""
        return max(len(str(category)) for category in self.categories) + 1

    @property
    def _array(self) -> Values:
        return np.asarray(self.categories, dtype=self.scalar)

    def contributions(self, users: UserValues) -> FloatMatrix:
        """Return the counts of users' values: [users, K]."""
        categories, order = self._array, np.argsort(self._array)
        places = np.searchsorted(categories, users.values, sorter=order)
        columns = order[places.clip(max=categories.size - 1)]
        matches = categories[columns] == users.values
        return np.asarray(users.spread(matches, columns, categories.size).toarray())

    def answer(self, average: FloatVector, stddev: float, sampling: PoissonSampling) -> Answer:
        """Return the counts: N times the average."""
        users = float(sampling.population)
        value, noise = users * average, users * stddev
        # A user's count c is from 0 to S, so the sum of all c² is at most S times the sum of c.
        squares = self.clipping_norm * np.maximum(value + _WIDTH * noise, 0.0)
        spread = sampling_spread(sampling) * np.sqrt(users * squares)
        return self.normal_answer(value, noise, spread)


@dataclass(frozen=True)
class Distribution(_AtOnce):
    """The share of all enrolled users whose value is at or below each threshold.

    The m thresholds are finite and increasing. Each of a user's n values counts as 1/n; a user
    without a finite value counts as above all thresholds. The answer has shape [m]. It is unbiased,
    so it may leave [0, 1] or decrease.

    The curve is the running sum A·h of the histogram h of the bins between thresholds. The running
    sum of a noised h would have noise that grows as √m. Instead, users contribute columns of the
    square root R of A (R·R = A, lower triangular Toeplitz), and the server multiplies the noised
    sum by R. The noise of each share is then less than 1.07 + ln(m)/π times that of a single count,
    2.4 times for m = 64 (Fichtenberger, Henzinger and Upadhyay 2023, arXiv:2202.11205).
    """

    thresholds: Sequence[float]

    def _check(self) -> None:
        object.__setattr__(self, "thresholds", tuple(map(float, self.thresholds)))
        points = np.asarray(self.thresholds)
        increasing = bool(np.all(points[1:] > points[:-1]) and np.all(np.isfinite(points)))
        if not (1 <= points.size <= _MOST_THRESHOLDS and increasing):
            limit = f"1 to {_MOST_THRESHOLDS} finite ones, each above the previous one"
            raise self._refusal(f"{points.size} thresholds; there must be {limit}")

    @cached_property
    def _coefficients(self) -> FloatVector:
        """First column of R: the power series of (1 − x)^(−1/2), since A has that of 1/(1 − x)."""
        k = np.arange(1.0, len(self.thresholds))
        return np.cumprod(np.concatenate([np.ones(1), (2.0 * k - 1.0) / (2.0 * k)]))

    @cached_property
    def _root(self) -> FloatMatrix:
        return np.asarray(toeplitz(self._coefficients, np.zeros(len(self.thresholds))))

    @property
    def clipping_norm(self) -> float:
        """Norm of the first column of R, the longest; averages of columns are no longer."""
        return float(np.linalg.norm(self._coefficients))

    def contributions(self, users: UserValues) -> FloatMatrix:
        """Return averages of the columns of R for the bins of users' values: [users, m]."""
        finite = np.isfinite(users.values)
        # NaN is sorted above all thresholds, where the column is zero.
        columns = np.searchsorted(self.thresholds, users.values)
        root = np.vstack([self._root.T, np.zeros(len(self.thresholds))])
        sums = users.spread(finite, columns, len(root)) @ root
        return np.asarray(sums / np.maximum(users.sums(finite), 1.0)[:, np.newaxis])

    def answer(self, average: FloatVector, stddev: float, sampling: PoissonSampling) -> Answer:
        """Return the curve: R times the average. Row i of R has the first i + 1 coefficients."""
        value = self._root @ average
        noise = stddev * np.sqrt(np.cumsum(self._coefficients**2))
        # A user's term in each share is from 0 to 1, so its square is no larger.
        limit = np.clip(value + _WIDTH * noise, 0.0, 1.0)
        return self.normal_answer(value, noise, sampling_spread(sampling) * np.sqrt(limit))


@dataclass(frozen=True)
class Quantiles(_AtOnce):
    """Quantiles over all enrolled users: the smallest threshold with a share p at or below it.

    All are computed from one released `Distribution`, made increasing by least squares, so ten
    quantiles cost as much as one. If the curve stays below p, the quantile is the last threshold.

    Error: the share of users at or below the value, and the share at or below the threshold before
    it, bracket p up to the noise of the curve at these two places. Noise moves the value far where
    few users have values. `low` and `high` hold for each quantile separately. The answer has shape
    [k]. Its noise_stddev is a quarter of the interval due to noise alone; 0 if that is a single
    threshold.
    """

    thresholds: Sequence[float]
    probabilities: Sequence[float] = (0.25, 0.5, 0.75)  # k of them, each in (0, 1)

    def _check(self) -> None:
        object.__setattr__(self, "thresholds", self._curve.thresholds)
        object.__setattr__(self, "probabilities", tuple(map(float, self.probabilities)))
        if not self.probabilities or not all(0.0 < p < 1.0 for p in self.probabilities):
            limit = "there must be one or more, each in (0, 1)"
            raise self._refusal(f"the probabilities {self.probabilities}; {limit}")

    @cached_property
    def _curve(self) -> Distribution:
        return Distribution(self.name, self.of, self.thresholds)

    @property
    def clipping_norm(self) -> float:
        """The norm of the curve."""
        return self._curve.clipping_norm

    def contributions(self, users: UserValues) -> FloatMatrix:
        """Return the contributions to the curve: [users, m]."""
        return self._curve.contributions(users)

    def answer(self, average: FloatVector, stddev: float, sampling: PoissonSampling) -> Answer:
        """Return the thresholds at which the released curve reaches the probabilities."""
        curve = self._curve.answer(average, stddev, sampling)
        levels, points = np.array(self.probabilities), np.array(self.thresholds)
        increasing = np.asarray(scipy.optimize.isotonic_regression(curve.value).x)
        places = (
            np.searchsorted(increasing, levels),
            *crossings(curve.value, _WIDTH * curve.noise_stddev, levels),
            *crossings(curve.value, curve.high - curve.value, levels),
        )
        value, noise_low, noise_high, low, high = (
            points[np.minimum(place, points.size - 1)] for place in places
        )
        stddev_of_noise = noise_high / (2.0 * _WIDTH) - noise_low / (2.0 * _WIDTH)
        return Answer(self.name, value, stddev_of_noise, low, high)


def crossings(
    curve: FloatVector, margin: FloatVector, levels: FloatVector
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the first and last places [k] at which an increasing curve may reach levels [k].

    `curve` [m] differs from the true curve by up to `margin` [m]. If the true curve first reaches
    level p at place t, then a first place above t needs an error below −margin at t, and a last
    place below t needs an error of margin or more at t − 1. The place is m if the curve stays
    below.
    """
    may_reach = curve + margin >= levels[:, np.newaxis]
    may_miss = curve - margin < levels[:, np.newaxis]
    first = np.where(may_reach.any(1), may_reach.argmax(1), curve.size)
    last = np.where(may_miss.any(1), curve.size - may_miss[:, ::-1].argmax(1), 0)
    return first, last


@dataclass(frozen=True)
class _Ranged(_AtOnce):
    """A question about values that are clipped to [low, high]."""

    low: float
    high: float

    def _check(self) -> None:
        if not -math.inf < self.low < self.high < math.inf:
            limit = "low must be below high and both finite"
            raise self._refusal(f"low {self.low} and high {self.high}; {limit}")


@dataclass(frozen=True)
class Mean(_Ranged):
    """The mean over all enrolled users of their values, each clipped to [low, high].

    A user contributes its value minus the centre of the range; the centre replaces an absent value.
    The denominator is the constant qN and not a noisy count of users with a value, so the answer,
    of shape (), is unbiased, unlike a ratio. A narrow range needs little noise.
    """

    @property
    def _centre(self) -> float:
        return self.low + (self.high - self.low) / 2.0

    @property
    def clipping_norm(self) -> float:
        """Half the range."""
        return max(self.high - self._centre, self._centre - self.low)

    def contributions(self, users: UserValues) -> FloatMatrix:
        """Return means of users' finite values minus the centre, 0 without a value: [users, 1]."""
        finite = np.isfinite(users.values)
        clipped = np.clip(np.where(finite, users.values, self._centre), self.low, self.high)
        sums = users.sums(clipped - self._centre)
        return (sums / np.maximum(users.sums(finite), 1.0))[:, np.newaxis]

    def answer(self, average: FloatVector, stddev: float, sampling: PoissonSampling) -> Answer:
        """Return the mean: the centre plus the average deviation from it."""
        value = self._centre + average.reshape(())
        return self.normal_answer(value, stddev, self.clipping_norm * sampling_spread(sampling))


@dataclass(frozen=True)
class Sum(_Ranged):
    """The sum over all enrolled users of their totals, each clipped to [low, high].

    With low = 0 and high = 1 and a quantity of zeros and ones, it counts users. The answer has
    shape () and is unbiased; a user without a value adds nothing.
    """

    @property
    def clipping_norm(self) -> float:
        """The larger of |low| and |high|."""
        return max(abs(self.low), abs(self.high))

    def contributions(self, users: UserValues) -> FloatMatrix:
        """Return totals of users: [users, 1]."""
        finite = np.isfinite(users.values)
        totals = np.clip(users.sums(np.where(finite, users.values, 0.0)), self.low, self.high)
        return np.where(users.sums(finite) > 0.0, totals, 0.0)[:, np.newaxis]

    def answer(self, average: FloatVector, stddev: float, sampling: PoissonSampling) -> Answer:
        """Return the sum: N times the average."""
        users = float(sampling.population)
        spread = users * self.clipping_norm * sampling_spread(sampling)
        return self.normal_answer(users * average.reshape(()), users * stddev, spread)


@dataclass(frozen=True)
class SecondMoments(Question):
    """The mean over all enrolled users of x xᵀ, for records x divided by their lengths: [D, D].

    A record is a row of D numbers in any shape, such as an image. Rows of zeros and rows with NaN
    or infinity do not count. A user contributes the mean of the outer products of its n records,
    and zero if it has none (Abadi et al. 2016, section 4, where each record is a user). The answer
    is a symmetric matrix. It is unbiased except for the rounding of records, in steps of
    0.0002·√n. The noise is isotropic: off the diagonal it is √½ times that on the diagonal.
    `PrincipalComponents.of` returns the directions.
    """

    inputs: int  # D, from 1 to 4096

    def _check(self) -> None:
        if not is_whole(self.inputs, _MOST_INPUTS):
            raise self._refusal(f"{self.inputs} inputs; there must be 1 to {_MOST_INPUTS}")

    @property
    def width(self) -> int:
        """Length D of a record."""
        return self.inputs

    @property
    def clipping_norm(self) -> float:
        """The Frobenius norm of x xᵀ, 1, which bounds that of means of such matrices."""
        return CLIPPING_NORM

    @property
    def dimension(self) -> int:
        """D(D + 1)/2, the number of free entries of a symmetric matrix."""
        return self.inputs * (self.inputs + 1) // 2

    def numbers(self, values: IntegerVector) -> IntegerVector:
        """Return the size of the records; outer products are never stored separately."""
        return values * self.inputs

    def total(self, users: UserValues) -> IntegerVector:
        """Return the sum of users' mean outer products, each within norm 1: [d]."""
        return outer_product_sum(*self._scaled(users))

    def _scaled(self, users: UserValues) -> tuple[FloatMatrix, IntegerVector]:
        """Return users' records [R, D], of length 1/√n for n records, and offsets [U + 1]."""
        largest = np.abs(users.values).max(axis=1, initial=0.0)
        is_record = np.isfinite(largest) & (largest > 0.0)
        counts = users.sums(is_record)
        of_user = np.repeat(counts, np.diff(users.offsets))[is_record]
        # Division by the largest number prevents overflow and underflow of squares.
        rows = users.values[is_record] / largest[is_record, np.newaxis]
        rows /= np.sqrt(np.vecdot(rows, rows) * of_user)[:, np.newaxis]
        return rows, np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def answer(self, average: FloatVector, stddev: float, sampling: PoissonSampling) -> Answer:
        """Return the matrix that the average encodes."""
        value = self._matrix(average[: self.inputs], average[self.inputs :])
        noise = self._matrix(np.full(self.inputs, stddev), stddev)
        # A user's matrix M has M_ij² ≤ M_ii·M_jj ≤ M_ii, since M_jj ≤ 1.
        limit = np.clip(np.diag(value + 2.0 * noise), 0.0, 1.0)
        spread = sampling_spread(sampling) * np.sqrt(np.minimum(limit, limit[:, np.newaxis]))
        return self.normal_answer(value, noise, spread)

    def _matrix(self, diagonal: FloatVector, upper: FloatVector | float) -> FloatMatrix:
        """Return the symmetric matrix [D, D] that a contribution of these two parts encodes."""
        matrix = np.zeros((self.inputs, self.inputs))
        matrix[np.triu_indices(self.inputs, 1)] = upper / (math.sqrt(2.0) * SHRINK)
        matrix += matrix.T
        np.fill_diagonal(matrix, diagonal / SHRINK)
        return matrix


@dataclass(frozen=True, eq=False)
class PrincipalComponents:
    """Directions in which records vary most around zero, from released second moments alone.

    By Weyl's inequality, noise moves no eigenvalue by more than its norm, which is `noise_norm` on
    average. A direction whose moment is not well above it is mostly noise.
    """

    directions: FloatMatrix  # [D, k], orthonormal columns, the largest moment first
    moments: FloatVector  # [k], eigenvalues: mean square of unit records along each direction
    noise_norm: float  # expected spectral norm of the noise, in units of the moments

    @classmethod
    def of(cls, answer: Answer, components: int) -> Self:
        """Return the first k = `components` components of an answer to `SecondMoments`.

        This is post-processing: more components, or further calls, cost no privacy.
        InvalidValueError if the answer is not a square matrix or k is not from 1 to D.
        """
        matrix = answer.value
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise InvalidValueError(
                f"the answer to {answer.question!r} has shape {list(matrix.shape)}; it must be a "
                "square matrix, as SecondMoments gives it"
            )
        limit = f"it must be from 1 to {len(matrix)}, the inputs"
        require(1 <= components <= len(matrix), f"components is {components}; {limit}")
        moments, directions = np.linalg.eigh(matrix)
        # Noise of s on the diagonal and s/√2 off it is a Gaussian orthogonal ensemble, whose norm
        # is about √(2D)·s for large D.
        noise_norm = math.sqrt(2.0 * len(matrix)) * float(answer.noise_stddev[0, 0])
        largest = slice(None, -components - 1, -1)
        return cls(np.ascontiguousarray(directions[:, largest]), moments[largest], noise_norm)
