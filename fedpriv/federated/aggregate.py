"""Adding up partial sums that may be wrong in every way."""

import logging
from collections.abc import Iterable

import numpy as np

from fedpriv.federated.transport import PartialSum
from fedpriv.privacy.layout import FloatVector
from fedpriv.privacy.query import GaussianSumQuery

_log = logging.getLogger(__name__)


def add_up(partials: Iterable[PartialSum], query: GaussianSumQuery, users: int) -> FloatVector:
    """Sum the partial sums that can be believed: [D], in the units of the scaled update.

    A partial sum counts as zero when its node was heard before, when it has the wrong shape or a
    component that is not finite, when a group's norm passes (users in it) × S_g, or when more
    users would have contributed than are in the cohort. Nothing here changes the denominator.

    Args:
        partials: in any order.
        query: the query that the sums are of.
        users: size of the cohort.
    """
    total = np.zeros(query.layout.dimension)
    heard: set[str] = set()
    contributed = 0
    for partial in partials:
        known = partial.node in heard
        heard.add(partial.node)
        fits = 0 <= partial.users <= users - contributed
        if known or not fits or not query.admits(partial.total, partial.users):
            _log.warning("a partial sum of node %s counts as zero: it is not valid", partial.node)
            continue
        contributed += partial.users
        total += partial.total
    return total
