"""Principal components of users' records: a question, and the directions in its answer."""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np

from fedpriv.analytics.questions import Answer, Question, UserValues, sampling_spread
from fedpriv.errors import InvalidValueError
from fedpriv.privacy.clipping import FloatMatrix, IntegerVector
from fedpriv.privacy.layout import FloatVector
from fedpriv.privacy.outer_products import CLIPPING_NORM, SHRINK, outer_product_sum
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.support.checks import is_whole, require

_MOST_INPUTS = 4096  # for which a matrix takes 128 MiB


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
        """The Frobenius norm of x xᵀ, 1, which bounds that of a mean of such matrices."""
        return CLIPPING_NORM

    @property
    def dimension(self) -> int:
        """D(D + 1)/2, the free numbers of a symmetric matrix."""
        return self.inputs * (self.inputs + 1) // 2

    def numbers(self, values: IntegerVector) -> IntegerVector:
        """Return the size of the records; outer products are never stored one by one."""
        return values * self.inputs

    def total(self, users: UserValues) -> IntegerVector:
        """Return the sum of users' mean outer products, each within norm 1: [d]."""
        return outer_product_sum(*self._scaled(users))

    def _scaled(self, users: UserValues) -> tuple[FloatMatrix, IntegerVector]:
        """Return users' records [R, D], of length 1/√n if a user has n, and offsets [U + 1]."""
        largest = np.abs(users.values).max(axis=1, initial=0.0)
        is_record = np.isfinite(largest) & (largest > 0.0)
        counts = users.sums(is_record)
        of_user = np.repeat(counts, np.diff(users.offsets))[is_record]
        # The division by the largest number keeps squares from overflow and underflow.
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

    def _matrix(self, diagonal: FloatVector, above: FloatVector | float) -> FloatMatrix:
        """Return the symmetric matrix [D, D] that a contribution of these two parts encodes."""
        matrix = np.zeros((self.inputs, self.inputs))
        matrix[np.triu_indices(self.inputs, 1)] = above / (math.sqrt(2.0) * SHRINK)
        matrix += matrix.T
        np.fill_diagonal(matrix, diagonal / SHRINK)
        return matrix


@dataclass(frozen=True, eq=False)
class PrincipalComponents:
    """Directions in which records vary most around zero, from released second moments alone.

    By Weyl's inequality the noise moves no eigenvalue further than its norm, which is `noise_norm`
    on average. A direction whose moment is not well above it is mostly noise.
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
