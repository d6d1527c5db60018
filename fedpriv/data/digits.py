"""DIGITS: 1,797 handwritten digits of 8 × 8 pixels, embedded in scikit-learn."""

import numpy as np
from numpy.typing import NDArray

from fedpriv.data import partition as partitioners
from fedpriv.data.population import Population
from fedpriv.errors import InvalidValueError, known_names

_TEST_EVERY = 5


def load_digits(
    users: int = 287,
    seed: int = 0,
    partition: str = "iid",
    alpha: float | None = None,
    shards_per_user: int | None = None,
) -> Population:
    """Deal the training images of DIGITS to synthetic users, about five images each.

    Of the images sorted (stably) by digit every fifth, from the first, is a test image, 360 in all
    and the same for every seed; the 1,437 others are dealt. DIGITS does not say who wrote an image,
    so a test image may be by a writer whose other images train.

    The partition is "iid", "dirichlet" (with `alpha`) or "shards" (with `shards_per_user`), see
    `fedpriv.data.partition`; x is float32 [rows, 1, 8, 8] in [0, 1] and y int64 [rows] in 0..9.
    InvalidValueError if a setting is out of range, missing, or would have no effect.
    """
    from sklearn.datasets import load_digits as load_embedded  # noqa: PLC0415

    pixels, digits = load_embedded(return_X_y=True)
    rows = {
        "x": (pixels / 16.0).astype(np.float32).reshape(-1, 1, 8, 8),
        "y": digits.astype(np.int64),
    }
    is_test = np.zeros(len(digits), dtype=bool)
    is_test[np.argsort(digits, kind="stable")[::_TEST_EVERY]] = True
    train = {name: array[~is_test] for name, array in rows.items()}
    how, user_of_row = _deal(train["y"], users, seed, partition, alpha, shards_per_user)
    return Population(
        name=f"digits: {users} users, {how}, seed {seed}",
        users=partitioners.partition(train, user_of_row),
        test={name: array[is_test] for name, array in rows.items()},
    )


def _deal(
    labels: NDArray[np.generic],
    users: int,
    seed: int,
    partition: str,
    alpha: float | None,
    shards_per_user: int | None,
) -> tuple[str, NDArray[np.int64]]:
    """How the rows are dealt, for the population's name, and the user of each row."""
    for name, value, needed_by in (
        ("alpha", alpha, "dirichlet"),
        ("shards_per_user", shards_per_user, "shards"),
    ):
        if (value is not None) != (partition == needed_by):
            raise InvalidValueError(
                f"{name} is {value} with partition {partition!r}; "
                f"it must be given for {needed_by!r} and for nothing else"
            )
    if alpha is not None:
        return f"dirichlet alpha {alpha}", partitioners.dirichlet(labels, users, alpha, seed)
    if shards_per_user is not None:
        dealt = partitioners.shards(labels, users, shards_per_user, seed)
        return f"{shards_per_user} shards per user", dealt
    if partition != "iid":
        legal = known_names(str(partition), ["iid", "dirichlet", "shards"])
        raise InvalidValueError(f"unknown partition {partition!r}; {legal}")
    return "iid", partitioners.iid(len(labels), users, seed)
