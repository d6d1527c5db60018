"""Adding up what the users of a cohort contribute, many at a time."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from fedpriv.analytics.question import Question
from fedpriv.analytics.records import (
    FloatMatrix,
    Records,
    records_of_column,
    records_of_function,
)
from fedpriv.analytics.survey import Survey
from fedpriv.data.store import UserStore
from fedpriv.federated.transport import PartialSum

_COMPONENTS = 1 << 21  # of the contributions of a chunk, in float64: 16 MiB


def collect(
    survey: Survey, users: UserStore, cohort: npt.NDArray[np.int64]
) -> Iterator[PartialSum]:
    """Yield the sums of clipped contributions of the cohort, in chunks.

    Guarantees:

    * what a user adds to the sum of each question has a norm of at most the question's;
    * a user whose records of one question cannot be used adds zero to that one, whatever it holds,
      and nothing that a user holds, nor a function of a question, raises here;
    * columns are read for many users at once, and only those and the rows that are asked for.

    Args:
        survey: what is asked; it must fit the users, see `Survey.check`.
        users: data of all enrolled users.
        cohort: positions of the users to ask, ascending: [cohort].
    """
    columns = {q.of: users.fields[q.of] for q in survey.questions if isinstance(q.of, str)}
    store = UserStore(columns, users.offsets) if columns else users
    clipping = survey.mechanism.average.sum_query.clipping
    step = max(1, _COMPONENTS // clipping.layout.dimension)
    for number, start in enumerate(range(0, cohort.size, step)):
        chunk = cohort[start : start + step]
        asked = store.subset(chunk) if columns else store
        rows = np.concatenate(
            [
                usable(question.contributions(_records(question, users, asked, chunk)))
                for question in survey.questions
            ],
            axis=1,
        )
        clipping.clip_rows(rows, np.ones(chunk.size, np.int64))
        total = rows.sum(axis=0).astype(np.int64)
        yield PartialSum(f"chunk {number}", chunk.size, total, chunk.size)


def usable(contributions: FloatMatrix) -> FloatMatrix:
    """Contributions [users, d] to one question, zero where they are not finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        finite = np.isfinite(np.sqrt(np.vecdot(contributions, contributions)))
    return contributions if finite.all() else np.where(finite[:, np.newaxis], contributions, 0.0)


def _records(
    question: Question,
    users: UserStore,
    asked: UserStore,
    chunk: npt.NDArray[np.int64],
) -> Records:
    """Records of a chunk: columns from the store of its users, functions from that of all."""
    if isinstance(question.of, str):
        return records_of_column(asked, question.of, question.scalar)
    return records_of_function(users, chunk, question.of, question.scalar)
