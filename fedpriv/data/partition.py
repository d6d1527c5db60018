"""Partitions of rows among users: pure functions of the labels and an explicit seed.

Every partitioner returns int64 [rows], the user of each row, such that every row has one user in
[0, users) and **every user has at least one row**. The seed fixes the result; it protects nothing.
A setting out of range raises InvalidValueError. docs/data.md plots what each one deals.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.columns import Array, Fields, refuse_masked
from fedpriv.data.population import IdArray, UserStore, check_count, offsets_of
from fedpriv.errors import DataError, InvalidValueError
from fedpriv.support.checks import check_range, plain_numbers


def iid(rows: int, users: int, seed: int) -> NDArray[np.int64]:
    """Deal rows to users (at most `rows`) at random; sizes differ by at most one."""
    _check_enough(rows, check_count("users", users), "users")
    return _generator(seed).permutation(np.arange(rows, dtype=np.int64) % users)


def dirichlet(labels: Array, users: int, alpha: float, seed: int) -> NDArray[np.int64]:
    """Give every user its own mixture of labels, drawn from a Dirichlet distribution.

    The variant is that of Hsu, Qi and Brown (2019, arXiv:1909.06335): user u draws a mixture
    q_u ~ Dir(α·p), p being the labels' shares in all rows, and then its rows one by one with labels
    from q_u, without replacement. Sizes differ by at most one. A label that is used up is dropped
    from q_u and the rest renormalised; when all of q_u is used up, the user takes remaining rows in
    proportion to their labels. α → ∞ gives every user the shares p, α → 0 one label; with K equally
    frequent labels, α = K makes all mixtures equally likely.
    """
    check_count("users", users)
    alpha = plain_numbers(alpha, "alpha")
    check_range("alpha", alpha, "(0, inf)")
    _check_labels(labels, users, "users")
    rng = _generator(seed)
    label_of_row, remaining = np.unique(labels, return_inverse=True, return_counts=True)[1:]
    shares = remaining / len(labels)
    counts = np.empty((users, len(remaining)), dtype=np.int64)
    for user, size in enumerate(_even_sizes(len(labels), users)):
        counts[user] = _draw_labels(rng, rng.dirichlet(alpha * shares), remaining, int(size))
        remaining = remaining - counts[user]
    user_of_row = np.empty(len(labels), dtype=np.int64)
    for label in range(len(remaining)):
        rows = rng.permutation(np.flatnonzero(label_of_row == label))
        user_of_row[rows] = np.repeat(np.arange(users), counts[:, label])
    return user_of_row


def shards(labels: Array, users: int, shards_per_user: int, seed: int) -> NDArray[np.int64]:
    """Give every user a few contiguous pieces of the rows sorted by label.

    The "pathological" partition of McMahan et al. (2017, arXiv:1602.05629, section 3): sort the
    rows by label (stably), cut them into users × shards_per_user (≤ rows) shards whose sizes differ
    by at most one, and deal the shards at random.
    """
    total = check_count("users", users) * check_count("shards_per_user", shards_per_user)
    _check_labels(labels, total, "shards (users × shards_per_user)")
    owner = _generator(seed).permutation(np.arange(total, dtype=np.int64) // shards_per_user)
    user_of_row = np.empty(len(labels), dtype=np.int64)
    user_of_row[np.argsort(labels, kind="stable")] = np.repeat(
        owner, _even_sizes(len(labels), total)
    )
    return user_of_row


def number_ids(ids: IdArray) -> tuple[IdArray, NDArray[np.int64]]:
    """Return distinct ids in order of first appearance [users], and each row's position [rows]."""
    distinct, first, position = np.unique(ids, return_index=True, return_inverse=True)
    appearance = np.argsort(first)
    return distinct[appearance], np.argsort(appearance)[position]


def partition(
    fields: Fields,
    user_of_row: NDArray[np.integer],
    user_ids: Sequence[str] | IdArray | None = None,
) -> UserStore:
    """Group rows by user; each user's rows keep their order.

    `user_of_row` [rows] holds positions in `user_ids`; without ids, there are max + 1 users. A user
    whose position does not occur has no rows. Rows that are grouped already are not copied.
    """
    refuse_masked("user_of_row", user_of_row)
    owners = np.asarray(user_of_row)
    if owners.ndim != 1 or owners.dtype.kind not in "iu" or (owners.size and owners.min() < 0):
        raise DataError("user_of_row must be a list of integers ≥ 0, one per row")
    users = int(owners.max()) + 1 if owners.size else 0
    if user_ids is not None and len(user_ids) < users:
        raise DataError(f"user_of_row names user {users - 1}, but there are {len(user_ids)} ids")
    for name, field in fields.items():
        if np.shape(field)[:1] != owners.shape:
            raise DataError(f"field {name!r} has shape {np.shape(field)}, not {owners.size} rows")
        refuse_masked(f"field {name!r}", field)
    sizes = np.bincount(owners, minlength=users if user_ids is None else len(user_ids))
    if np.any(owners[1:] < owners[:-1]):
        order = np.argsort(owners, kind="stable")
        fields = {name: np.asarray(field)[order] for name, field in fields.items()}
    return UserStore(fields, offsets_of(sizes), user_ids)


def _draw_labels(
    rng: np.random.Generator, mixture: NDArray[np.float64], remaining: NDArray[np.int64], size: int
) -> NDArray[np.int64]:
    # Draws beyond the rows of a label are repeated among the other labels. The distribution is that
    # of single draws without the labels that are used up.
    counts = np.zeros_like(remaining)
    while (shortage := size - int(counts.sum())) > 0:
        available = remaining - counts
        weights = np.where(available > 0, mixture, 0.0)
        if not weights.sum() > 0.0:
            weights = available.astype(np.float64)
        counts += np.minimum(rng.multinomial(shortage, weights / weights.sum()), available)
    return counts


def _even_sizes(rows: int, parts: int) -> NDArray[np.int64]:
    return np.diff(np.arange(parts + 1, dtype=np.int64) * rows // parts)


def _generator(seed: int) -> np.random.Generator:
    return np.random.default_rng(check_count("seed", seed, least=0))


def _check_labels(labels: Array, parts: int, what: str) -> None:
    if np.ndim(labels) != 1:
        raise InvalidValueError(f"labels have shape {np.shape(labels)}, not one label per row")
    _check_enough(len(labels), parts, what)


def _check_enough(rows: int, parts: int, what: str) -> None:
    if check_count("rows", rows) < parts:
        raise InvalidValueError(f"there are {parts} {what} for {rows} rows; each needs a row")
