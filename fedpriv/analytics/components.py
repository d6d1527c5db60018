"""Principal components of users' records: a question, and what is read off its answer."""

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
from fedpriv.support.checks import is_whole

_MOST_INPUTS = 4096  # a matrix of 128 MiB


@dataclass(frozen=True)
class SecondMoments(Question):
    """The mean over all enrolled users of x xᵀ, x being a record divided by its length: [D, D].

    A record is a row of D numbers in any shape, such as an image. Zeros, and a row with NaN or
    infinity, are no record. A user contributes the mean of the outer products of its n records, and
    zero if it has none (Abadi et al. 2016, section 4, where each record is a user). The answer is a
    symmetric matrix; it is unbiased but for the rounding of records, in steps of 0.0002·√n. Noise
    is as large in every direction: beside the diagonal it is √½ of that on it.
    `PrincipalComponents.of` reads off the directions.
    """

    inputs: int  # D, from 1 to 4096

    def _check(self) -> None:
        if not is_whole(self.inputs, _MOST_INPUTS):
            raise self._refusal(f"{self.inputs} inputs; there must be 1 to {_MOST_INPUTS}")

    @property
    def width(self) -> int:
        """A record has D numbers."""
        return self.inputs

    @property
    def clipping_norm(self) -> float:
        """1: the Frobenius norm of x xᵀ, and the most that of a mean of such."""
        return CLIPPING_NORM

    @property
    def dimension(self) -> int:
        """D(D + 1)/2: the matrix is symmetric."""
        return self.inputs * (self.inputs + 1) // 2

    def numbers(self, values: IntegerVector) -> IntegerVector:
        """The records alone: outer products are added up without being written down."""
        return values * self.inputs

    def total(self, held: UserValues) -> IntegerVector:
        """Sum of users' mean outer products, each within norm 1: [d]."""
        return outer_product_sum(*self._scaled(held))

    def _scaled(self, held: UserValues) -> tuple[FloatMatrix, IntegerVector]:
        """Records of length 1/√n, n being how many a user has, and which are whose."""
        largest = np.abs(held.values).max(axis=1, initial=0.0)
        counted = np.isfinite(largest) & (largest > 0.0)
        counts = held.sums(counted)
        of_user = np.repeat(counts, np.diff(held.offsets))[counted]
        # Divided by the largest number first, squares neither overflow nor vanish.
        rows = held.values[counted] / largest[counted, np.newaxis]
        rows /= np.sqrt(np.vecdot(rows, rows) * of_user)[:, np.newaxis]
        return rows, np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    def answer(self, average: FloatVector, stddev: float, sampling: PoissonSampling) -> Answer:
        """The matrix in the average."""
        value = self._matrix(average[: self.inputs], average[self.inputs :])
        noise = self._matrix(np.full(self.inputs, stddev), stddev)
        # Of a user's matrix M, M_ij² ≤ M_ii·M_jj ≤ M_ii, as no M_jj is above 1.
        most = np.clip(np.diag(value + 2.0 * noise), 0.0, 1.0)
        spread = sampling_spread(sampling) * np.sqrt(np.minimum(most, most[:, np.newaxis]))
        return self.normal_answer(value, noise, spread)

    def _matrix(self, diagonal: FloatVector, above: FloatVector | float) -> FloatMatrix:
        """The symmetric matrix whose contribution these two parts are: [D, D]."""
        matrix = np.zeros((self.inputs, self.inputs))
        matrix[np.triu_indices(self.inputs, 1)] = above / (math.sqrt(2.0) * SHRINK)
        matrix += matrix.T
        np.fill_diagonal(matrix, diagonal / SHRINK)
        return matrix


@dataclass(frozen=True, eq=False)
class PrincipalComponents:
    """Directions in which records vary most around zero, from released second moments alone.

    By Weyl's inequality noise moves no eigenvalue further than its own norm, `noise_norm` on
    average. A direction whose moment is not well above that says little about the records.
    """

    directions: FloatMatrix  # [D, k], orthonormal columns, the largest moment first
    moments: FloatVector  # [k], eigenvalues: mean square of unit records along each
    noise_norm: float  # of the noise, in units of the moments

    @classmethod
    def of(cls, answer: Answer, components: int) -> Self:
        """The first k components of an answer to `SecondMoments`; any k costs the same.

        They are post-processing: as many may be tried as one likes.
        """
        matrix = answer.value
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise InvalidValueError(
                f"the answer to {answer.question!r} has shape {list(matrix.shape)}; it must be a "
                "square matrix, as SecondMoments gives it"
            )
        if not 1 <= components <= len(matrix):
            raise InvalidValueError(
                f"components is {components}; it must be from 1 to {len(matrix)}, the inputs"
            )
        moments, directions = np.linalg.eigh(matrix)
        # Noise of s on the diagonal and s/√2 beside it: a Gaussian orthogonal ensemble, whose norm
        # is about √(2D)·s for large D.
        noise_norm = math.sqrt(2.0 * len(matrix)) * float(answer.noise_stddev[0, 0])
        chosen = slice(None, -components - 1, -1)
        return cls(np.ascontiguousarray(directions[:, chosen]), moments[chosen], noise_norm)
