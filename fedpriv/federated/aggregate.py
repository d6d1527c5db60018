"""Adding up partial sums that may be wrong in every way."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedpriv.federated.transport import PartialSum
from fedpriv.privacy.contribution import Clipping
from fedpriv.privacy.layout import FloatVector

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CohortSum:
    """What a cohort sent; secret until it is noised.

    Attributes:
        total: [D] sum of contributions, in the units of the scaled tensors.
        weight: sum of the weights of the users in it.
    """

    total: FloatVector
    weight: float


def add_up(partials: Iterable[PartialSum], clipping: Clipping, users: int) -> CohortSum:
    """Sum the partial sums that can be believed.

    A partial sum counts as zero when its node was heard before, when it has the wrong shape or a
    component that is not finite, when a group's norm passes (users in it) × S_g, when its weight is
    not from 0 to its users, or when more users would have contributed than are in the cohort.
    Nothing here changes a fixed denominator, and what is logged names no node. Takes memory for one
    total; each partial sum is read twice.

    Args:
        partials: in any order.
        clipping: how contributions were made.
        users: size of the cohort.
    """
    total, weight = np.zeros(clipping.layout.dimension), 0.0
    heard: set[str] = set()
    contributed = 0
    for partial in partials:
        known = partial.node in heard
        heard.add(partial.node)
        fits = 0 <= partial.users <= users - contributed
        weighs = float(partial.users if partial.weight is None else partial.weight)
        believed = not known and fits and 0.0 <= weighs <= partial.users
        if not believed or not clipping.admits(partial.total, partial.users):
            # The name of a node may be that of its one user, and that it was drawn is secret.
            _log.warning("a partial sum counts as zero: it is not valid")
            continue
        contributed += partial.users
        weight += weighs
        total += partial.total
    return CohortSum(total, weight)
