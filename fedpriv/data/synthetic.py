"""Synthetic populations of any size: Gaussian classes, shifted a little for every user."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.columns import Array
from fedpriv.data.population import Population, UserStore, check_count, offsets_of
from fedpriv.errors import InvalidValueError

_CLASS_RADIUS = 4.0
_USER_SHIFT_STDDEV = 0.5
_VALUES_AT_ONCE = 1 << 22


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
    labels are uniform. Each test row has a shift of its own, as if it came from an unseen user.

    A user has `examples_per_user` rows, or a uniform number in (low, high), low ≥ 0. The result is
    fixed by the seed: x float32 [rows, *shape] and y int64 [rows] in 0..classes - 1.
    """
    check_count("users", users)
    check_count("classes", classes)
    check_count("test_rows", test_rows)
    if isinstance(shape, str) or not isinstance(shape, Sequence):
        raise InvalidValueError(f"shape is {shape!r}; it must be a list of whole numbers")
    sides = tuple(check_count("each side of shape", side) for side in shape)
    size = examples_per_user
    if isinstance(size, Sequence) and (isinstance(size, str) or len(size) != 2):
        legal = "a whole number or a pair (low, high)"
        raise InvalidValueError(f"examples_per_user is {size!r}; it must be {legal}")
    if isinstance(size, Sequence):
        low = check_count("low of examples_per_user", size[0], least=0)
        high = check_count("high of examples_per_user", size[1], least=max(low, 1))
    else:
        low = high = check_count("examples_per_user", size)
    rng = np.random.default_rng(check_count("seed", seed, least=0))
    means = rng.standard_normal((classes, int(np.prod(sides))), dtype=np.float32)
    means *= _CLASS_RADIUS / np.linalg.norm(means, axis=1, keepdims=True)
    offsets = offsets_of(rng.integers(low, high, size=users, endpoint=True))
    store = UserStore(_draw(rng, means, offsets, sides), offsets)
    test = _draw(rng, means, np.arange(test_rows + 1), sides)
    each = f"{low}" if low == high else f"{low} to {high}"
    rows = f"{each} examples of shape {'x'.join(map(str, sides))}, {classes} classes"
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
