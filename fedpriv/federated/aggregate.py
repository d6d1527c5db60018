"""Adding up partial sums that may be wrong in every way."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedpriv.federated.transport import PartialSum
from fedpriv.privacy.contribution import Clipping, IntegerVector

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CohortSum:
    """What a cohort sent; secret until it is noised.

    Attributes:
        total: int64[D] sum of contributions, in steps.
        weight: sum of the weights of the users in it, in units of 1/c.
    """

    total: IntegerVector
    weight: int


def add_up(partials: Iterable[PartialSum], clipping: Clipping, users: int) -> CohortSum:
    """Sum the partial sums that can be believed.

    A partial sum counts as zero when its node was heard before, when it has the wrong shape or is
    not of integers, when a group's norm passes (users in it) × S_g or, if the group is weighted,
    (their weight) × S_g, when its weight is not from 0 to c × its users, or when more users would
    have contributed than are in the cohort. Nothing here changes a fixed denominator, and what is
    logged names no node. Takes memory for one total; each partial sum is read twice.

    Args:
        partials: in any order.
        clipping: how contributions were made.
        users: size of the cohort.
    """
    total, weight = np.zeros(clipping.layout.dimension, np.int64), 0
    heard: set[str] = set()
    contributed = 0
    for partial in partials:
        known = partial.node in heard
        heard.add(partial.node)
        fits = 0 <= partial.users <= users - contributed
        weighs = 0 <= partial.weight <= partial.users * clipping.weight_cap
        believed = not known and fits and weighs
        if not believed or not clipping.admits(partial.total, partial.users, partial.weight):
            # The name of a node may be that of its one user, and that it was drawn is secret.
            _log.warning("a partial sum counts as zero: it is not valid")
            continue
        contributed += partial.users
        weight += partial.weight
        total += partial.total
    return CohortSum(total, weight)


def merged(node: str, partials: Iterable[PartialSum], dimension: int) -> PartialSum:
    """The partial sum of a node that found several of its own.

    Args:
        node: its name.
        partials: disjoint, over `dimension` numbers each; there may be none.
        dimension: D.
    """
    total = np.zeros(dimension, np.int64)
    users = weight = 0
    for partial in partials:
        total += partial.total
        users += partial.users
        weight += partial.weight
    return PartialSum(node, users, total, weight)
