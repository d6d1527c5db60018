"""DIGITS, images of handwritten digits, dealt to synthetic users.

digits.npz holds the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and
C. Kaynak 1998, UCI Machine Learning Repository, CC BY 4.0), as scikit-learn has it, too.
"""

from pathlib import Path

import numpy as np

from fedpriv.data import partition as partitioners
from fedpriv.data.columns import read_npz
from fedpriv.data.population import Population
from fedpriv.errors import InvalidValueError, known_names

_DIGITS = Path(__file__).with_name("digits.npz")  # uint8: images [1797, 8, 8] of 0..16, labels
_TEST_EVERY = 5


def load_digits(
    users: int = 287,
    seed: int = 0,
    partition: str = "iid",
    alpha: float | None = None,
    shards_per_user: int | None = None,
) -> Population:
    """Deal the training images of DIGITS to synthetic users, about five images each.

    Of the 1,797 images sorted by digit every fifth, from the first, is a test image, 360 in all and
    the same for every seed; its writer is unknown, and may have written images that train. The
    partition is "iid", "dirichlet" (with `alpha`) or "shards" (with `shards_per_user`), see
    `fedpriv.data.partition`; x is float32 [rows, 1, 8, 8] in [0, 1] and y int64 [rows] in 0..9.
    """
    given = {"dirichlet": ("alpha", alpha), "shards": ("shards_per_user", shards_per_user)}
    for needed_by, (name, value) in given.items():
        if (value is not None) != (partition == needed_by):
            raise InvalidValueError(f"{name} is {value}; it must be given for {needed_by!r} alone")
    digits = read_npz(_DIGITS)
    x = digits["images"].astype(np.float32)[:, np.newaxis] / np.float32(16)
    y = digits["labels"].astype(np.int64)
    test = np.argsort(y, kind="stable")[::_TEST_EVERY]
    train = np.setdiff1d(np.arange(len(y)), test)
    test.sort()
    if alpha is not None:
        how = f"dirichlet alpha {alpha}"
        user_of_row = partitioners.dirichlet(y[train], users, alpha, seed)
    elif shards_per_user is not None:
        how = f"{shards_per_user} shards per user"
        user_of_row = partitioners.shards(y[train], users, shards_per_user, seed)
    elif partition == "iid":
        how, user_of_row = "iid", partitioners.iid(len(train), users, seed)
    else:
        legal = known_names(str(partition), ["iid", "dirichlet", "shards"])
        raise InvalidValueError(f"unknown partition {partition!r}; {legal}")
    store = partitioners.partition({"x": x[train], "y": y[train]}, user_of_row)
    name = f"digits: {users} users, {how}, seed {seed}"
    return Population(name, store, {"x": x[test], "y": y[test]})
