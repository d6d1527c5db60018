"""Chooses which examples of a user count if examples are drawn: at most k, each in its own place.

A user that is added or removed fills or empties places of its own. Where a row belongs to several
users at once, such as a message to all who wrote or got it, rows are chosen so that no user owns
more than k of those that count, in whichever place they are. Neighbours are then two populations
with the same rows and owners, in one of which all rows that one user owns are empty: who owns what
is taken to be public and fixed, as in the fixed-graph definition of Ganesh et al. 2025 (arXiv
2503.03622), and so is the choice, which depends on nothing else. So one user more or less changes
at most k places, each drawn by its own coin, as if nothing were shared.

Without that assumption it would not hold: a user that left together with the very mention of its
rows would let others' rows into the choice, and the places of many users would change.
"""

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.population import ROW_OWNERS, UserStore, check_count, offsets_of
from fedpriv.errors import DataError


def in_places(users: UserStore, examples_per_user: int) -> UserStore:
    """Return a store of k places per user, in the order of users; a place has at most one example.

    Of a user with n > k rows, rows ⌊j·n/k⌋ for j < k count. That depends on n alone: not on what is
    in the rows, and not on other users, so that one user more or less changes nobody else's. Of
    rows with several owners `shared_among` chooses. Rows are copied where some are left out. Places
    have no ids.
    """
    k = check_count("examples_per_user", examples_per_user)
    shared = ROW_OWNERS in users.fields
    rows = shared_among(users, k) if shared else _evenly_spaced(users, k)
    taken = np.diff(np.searchsorted(rows, users.offsets))
    filled = np.arange(k) < taken[:, np.newaxis]
    fields = users.fields if len(rows) == users.rows else users.take(rows)
    fields = {name: field for name, field in fields.items() if name != ROW_OWNERS}
    return UserStore(fields, offsets_of(filled.ravel().astype(np.int64)))


def shared_among(users: UserStore, examples_per_user: int) -> NDArray[np.int64]:
    """Return rows that count, ascending, so that no user owns more than k of them: [rows].

    In an order that is fixed for a number of rows, each counts if all of its owners have fewer than
    k yet (the greedy algorithm of Ganesh et al. 2025).
    """
    ids = np.asarray(users.user_ids)
    order = np.argsort(ids)
    owners: NDArray[np.int64] = order[np.searchsorted(ids, users.fields[ROW_OWNERS], sorter=order)]
    own, kept = np.zeros(users.population, np.int64), list[int]()
    for row in np.random.default_rng(0).permutation(users.rows).tolist():
        of_row = owners[row]  # a repeated owner counts once
        if (own[of_row] < examples_per_user).all():
            own[of_row] += 1
            kept.append(row)
    return np.array(sorted(kept), np.int64)


def refuse_shared(users: UserStore, what: str) -> None:
    """Raise DataError if a row has several owners, in one sentence that begins with `what`."""
    if ROW_OWNERS in users.fields:
        most = users.fields[ROW_OWNERS].shape[1]
        raise DataError(
            f"{what} and rows have up to {most} owners; only where examples are drawn, with "
            "sampling.policy 'poisson-examples', is each user's share in such rows bounded"
        )


def _evenly_spaced(users: UserStore, k: int) -> NDArray[np.int64]:
    """Return at most k rows of each user, ascending."""
    taken = np.minimum(users.sizes, k)
    number = np.arange(taken.sum()) - np.repeat(np.cumsum(taken) - taken, taken)
    spread = np.repeat(np.maximum(users.sizes, k), taken)  # a user with n ≤ k rows keeps all
    rows: NDArray[np.int64] = np.repeat(users.offsets[:-1], taken) + number * spread // k
    return rows
