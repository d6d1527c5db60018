"""Populations that come with fedpriv: DIGITS, dealt to users, and Gaussian classes of any size.

digits.npz holds the test part of "Optical Recognition of Handwritten Digits" (E. Alpaydin and
C. Kaynak 1998, UCI Machine Learning Repository, CC BY 4.0), as scikit-learn does.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpriv.data import partition as partitioners
from fedpriv.data.columns import Array, read_npz
from fedpriv.data.population import Population, UserStore, check_count, offsets_of
from fedpriv.errors import InvalidValueError, known_names
from fedpriv.support.checks import check_types

_DIGITS = Path(__file__).with_name("digits.npz")  # uint8: images [1797, 8, 8] of 0..16, labels
_TEST_EVERY = 5
_CLASS_RADIUS = 4.0
_USER_SHIFT_STDDEV = 0.5
_VALUES_AT_ONCE = 1 << 22


def load_digits(
    users: int = 287,
    seed: int = 0,
    partition: str = "iid",
    alpha: float | None = None,
    shards_per_user: int | None = None,
) -> Population:
    """Deal the training images of DIGITS to synthetic users, about five images each.

    Every fifth of the 1,797 images sorted by digit, from the first, is a test image: 360 images,
    the same for every seed. Their writers are unknown, and may have written training images. The
    partition is "iid", "dirichlet" (with `alpha`) or "shards" (with `shards_per_user`), see
    `fedpriv.data.partition`; x is float32 [rows, 1, 8, 8] in [0, 1] and y int64 [rows] in 0..9.
    """
    settings = {"dirichlet": ("alpha", alpha), "shards": ("shards_per_user", shards_per_user)}
    for needed_by, (name, value) in settings.items():
        if (value is not None) != (partition == needed_by):
            raise InvalidValueError(f"{name} is {value}; it must be given for {needed_by!r} alone")
    digits = read_npz(_DIGITS)
    x = digits["images"].astype(np.float32)[:, np.newaxis] / np.float32(16)
    y = digits["labels"].astype(np.int64)
    test = np.argsort(y, kind="stable")[::_TEST_EVERY]
    train = np.setdiff1d(np.arange(len(y)), test)
    test.sort()
    if alpha is not None:
        description = f"dirichlet alpha {alpha}"
        user_of_row = partitioners.dirichlet(y[train], users, alpha, seed)
    elif shards_per_user is not None:
        description = f"{shards_per_user} shards per user"
        user_of_row = partitioners.shards(y[train], users, shards_per_user, seed)
    elif partition == "iid":
        description, user_of_row = "iid", partitioners.iid(len(train), users, seed)
    else:
        hint = known_names(str(partition), ["iid", "dirichlet", "shards"])
        raise InvalidValueError(f"unknown partition {partition!r}; {hint}")
    store = partitioners.partition({"x": x[train], "y": y[train]}, user_of_row)
    name = f"digits: {users} users, {description}, seed {seed}"
    return Population(name, store, {"x": x[test], "y": y[test]})


def synthetic_population(
    users: int = 1_000,
    examples_per_user: int | Sequence[int] = 10,
    shape: Sequence[int] = (32,),
    *,
    classes: int = 10,
    seed: int = 0,
    test_rows: int = 1_000,
) -> Population:
    """Draw users whose rows are x = m_y + s_u + noise, for tests of scale.

    With d the number of components of x: class means m_k are uniform on the sphere of radius 4 in
    R^d, a user's shift is s_u ~ N(0, 0.25·I_d), the same for all its rows, noise ~ N(0, I_d), and
    labels are uniform. Each test row has its own shift, as if it came from an unseen user.

    A user has `examples_per_user` rows, or a uniform number in (low, high), low ≥ 0. The result is
    fixed by the seed: x float32 [rows, *shape] and y int64 [rows] in 0..classes - 1.
    """
    check_count("users", users)
    check_count("classes", classes)
    check_count("test_rows", test_rows)
    check_types(shape=(shape, Sequence))
    sides = tuple(check_count("each side of shape", side) for side in shape)
    sizes = examples_per_user
    if isinstance(sizes, Sequence) and len(sizes) != 2:
        limit = "a whole number or a pair (low, high)"
        raise InvalidValueError(f"examples_per_user is {sizes!r}; it must be {limit}")
    if isinstance(sizes, Sequence):
        low = check_count("low of examples_per_user", sizes[0], least=0)
        high = check_count("high of examples_per_user", sizes[1], least=max(low, 1))
    else:
        low = high = check_count("examples_per_user", sizes)
    rng = np.random.default_rng(check_count("seed", seed, least=0))
    means = rng.standard_normal((classes, int(np.prod(sides))), dtype=np.float32)
    means *= _CLASS_RADIUS / np.linalg.norm(means, axis=1, keepdims=True)
    offsets = offsets_of(rng.integers(low, high, size=users, endpoint=True))
    store = UserStore(_draw(rng, means, offsets, sides), offsets)
    test = _draw(rng, means, np.arange(test_rows + 1), sides)
    size = f"{low}" if low == high else f"{low} to {high}"
    rows = f"{size} examples of shape {'x'.join(map(str, sides))}, {classes} classes"
    return Population(f"synthetic: {users} users, {rows}, seed {seed}", store, test)


def _draw(
    rng: np.random.Generator,
    means: NDArray[np.float32],
    offsets: NDArray[np.int64],
    shape: tuple[int, ...],
) -> dict[str, Array]:
    rows, width = int(offsets[-1]), means.shape[1]
    y = rng.integers(len(means), size=rows)
    x = np.empty((rows, width), dtype=np.float32)
    first, at_once = 0, max(1, _VALUES_AT_ONCE // width)
    while first < len(offsets) - 1:
        # At least one user, and users with about `at_once` rows: temporary arrays stay small.
        end = int(np.searchsorted(offsets, offsets[first] + at_once))
        last = min(max(end, first + 1), len(offsets) - 1, first + at_once)
        sizes = np.diff(offsets[first : last + 1])
        part = slice(int(offsets[first]), int(offsets[last]))
        shifts = rng.standard_normal((last - first, width), dtype=np.float32)
        rng.standard_normal(out=x[part], dtype=np.float32)
        x[part] += means[y[part]]
        x[part] += np.repeat(shifts * np.float32(_USER_SHIFT_STDDEV), sizes, axis=0)
        first = last
    return {"x": x.reshape(rows, *shape), "y": y}
