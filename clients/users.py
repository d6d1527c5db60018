"""The users of a node: read from a folder, from one file, or from a function by import path."""

import pkgutil
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.arrays import from_arrays, from_grouped
from fedpriv.data.npz import read_npz
from fedpriv.data.population import Population
from fedpriv.data.store import UserStore
from fedpriv.errors import DataError, FedprivError, InvalidValueError

IDS = "user_id"
"""Name of the column of a columnar file that says whose a row is."""


def load_users(source: str) -> UserStore:
    """Read the users that a node hosts.

    Guarantees: nothing is unpickled, and no message holds a user's data. One may name a user, and
    a fedpriv error that a function raises passes as it is; both are for who runs the node alone.

    Args:
        source: one of

            * a folder saved by `UserStore.save`; its fields are mapped, not read;
            * a folder with one file ID.npz per user, holding the fields; a user may have zero rows;
            * one .npz file, holding the fields and `user_id`, the id of each row's user, in any
              order;
            * "package.module:function" of a function without arguments that returns a `UserStore`,
              or a `Population`, whose users are taken. Naming a function runs it.

            What exists as a file or folder is read as such.

    Raises:
        DataError: there is no such source, or it does not hold users.
        InvalidValueError: the loader refuses a setting of its own.
    """
    try:
        if Path(source).exists():
            return _from_files(Path(source))
    except OSError as error:
        raise DataError(f"users {source!r} cannot be read: {error.strerror}") from error
    if ":" in source:
        return _from_function(source)
    raise DataError(
        f"users {source!r} do not exist; legal are a folder, an .npz file and "
        "package.module:function"
    )


def enrolled_positions(store: UserStore, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where in the enrolled population each user of a store is: int64 [N].

    Ids are compared as strings by code points: the store's k-th in this order is at the k-th of
    the positions.

    Args:
        store: of N users, in any order.
        positions: [N], ascending.

    Raises:
        InvalidValueError: there are more or fewer positions than users.
    """
    if len(positions) != store.population:
        raise InvalidValueError(
            f"there are {len(positions)} positions for {store.population} users; the users that "
            "are enrolled at this node must be those that it holds"
        )
    ids = [store.id_of(user) for user in range(store.population)]
    enrolled = np.empty(store.population, np.int64)
    enrolled[sorted(range(len(ids)), key=ids.__getitem__)] = positions
    return enrolled


def _from_files(path: Path) -> UserStore:
    if not path.is_dir():
        return _columns(path)
    return UserStore.load(path) if (path / "store.json").exists() else _one_file_each(path)


def _one_file_each(folder: Path) -> UserStore:
    files = sorted(folder.iterdir())
    for path in files:
        if path.suffix != ".npz" or not path.is_file():
            raise DataError(f"{path} is no .npz file; a folder of users holds one ID.npz per user")
    try:
        return from_grouped((path.stem, read_npz(path)) for path in files)
    except DataError as error:
        raise DataError(f"{folder}: {error}") from error


def _columns(path: Path) -> UserStore:
    fields = read_npz(path)
    if IDS not in fields:
        raise DataError(f"{path} has no field {IDS!r}, the id of each row's user")
    ids = fields.pop(IDS)
    try:
        return from_arrays(fields, ids)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _from_function(path: str) -> UserStore:
    try:
        function = pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise DataError(f"users {path!r} cannot be imported: {error}") from error
    except Exception as error:  # raised by the module itself, or the path has no legal form
        raise DataError(f"users {path!r} cannot be imported: {type(error).__name__}") from error
    if not callable(function):
        raise DataError(f"users {path!r} are no function; it must return a UserStore")
    try:
        loaded = function()
    except FedprivError:
        raise
    except Exception as error:  # its text may hold users' data
        raise DataError(f"users {path!r}: the function raised {type(error).__name__}") from error
    users = loaded.users if isinstance(loaded, Population) else loaded
    if not isinstance(users, UserStore):
        raise DataError(
            f"{path} returned a {type(users).__name__}; it must return a UserStore or a Population"
        )
    return users
