"""Chooses the examples of a user that count if examples are drawn: at most k, each in its place.

Adding or removing a user fills or empties only this user's places. If a row can belong to several
users, such as a message to its sender and its receivers, rows are chosen so that each user owns at
most k of those that count, in any places. Neighbours are then two populations with the same rows
and owners, where in one of them all rows of one user are empty. Ownership is assumed to be public
and fixed, as in the fixed-graph definition of Ganesh et al. 2025 (arXiv 2503.03622), and so is the
choice, which depends on nothing else. So adding or removing a user changes at most k places, each
drawn by its own coin, as if no row were shared.

Without that assumption this does not hold: if a user left and its name vanished from all rows, rows
of others would enter the choice, and the places of many users would change.
"""

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.population import ROW_OWNERS, UserStore, check_count, offsets_of
from fedpriv.errors import DataError


def in_places(users: UserStore, examples_per_user: int) -> UserStore:
    """Return a store of k places per user, in the order of users; a place has at most one example.

    If a user has n > k rows, rows ⌊j·n/k⌋ for j < k count. They depend on n alone, not on their
    content or on other users, so adding or removing a user does not change the rows of others.
    `shared_among` chooses among rows with several owners. Rows are copied if some are left out.
    Places have no ids.
    """
    k = check_count("examples_per_user", examples_per_user)
    rows = (shared_among if ROW_OWNERS in users.fields else _evenly_spaced)(users, k)
    counts = np.diff(np.searchsorted(rows, users.offsets))
    is_filled = np.arange(k) < counts[:, np.newaxis]
    fields = users.fields if len(rows) == users.rows else users.take(rows)
    fields = {name: field for name, field in fields.items() if name != ROW_OWNERS}
    return UserStore(fields, offsets_of(is_filled.ravel().astype(np.int64)))


def shared_among(users: UserStore, examples_per_user: int) -> NDArray[np.int64]:
    """Return the rows that count, [rows], ascending; no user owns more than k of them.

    In an order that depends only on the number of rows, a row counts if all its owners have fewer
    than k rows so far (the greedy algorithm of Ganesh et al. 2025).
    """
    ids = np.asarray(users.user_ids)
    order = np.argsort(ids)
    owners: NDArray[np.int64] = order[np.searchsorted(ids, users.fields[ROW_OWNERS], sorter=order)]
    counts, chosen = np.zeros(users.population, np.int64), list[int]()
    for row in np.random.default_rng(0).permutation(users.rows).tolist():
        of_row = owners[row]  # a repeated owner counts once
        if (counts[of_row] < examples_per_user).all():
            counts[of_row] += 1
            chosen.append(row)
    return np.array(sorted(chosen), np.int64)


def refuse_shared(users: UserStore, what: str) -> None:
    """Raise DataError if a row has several owners, in one sentence that begins with `what`."""
    if ROW_OWNERS in users.fields:
        largest = users.fields[ROW_OWNERS].shape[1]
        raise DataError(
            f"{what} and rows have up to {largest} owners; each user's share in such rows is "
            "bounded only if examples are drawn, with sampling.policy 'poisson-examples'"
        )


def _evenly_spaced(users: UserStore, k: int) -> NDArray[np.int64]:
    """Return at most k rows of each user, ascending."""
    counts = np.minimum(users.sizes, k)
    number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    spread = np.repeat(np.maximum(users.sizes, k), counts)  # a user with n ≤ k rows keeps all
    rows: NDArray[np.int64] = np.repeat(users.offsets[:-1], counts) + number * spread // k
    return rows
