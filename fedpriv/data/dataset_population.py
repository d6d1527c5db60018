"""Populations whose users are those of a Hugging Face dataset, or parts of a partitioner."""

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.checks import check_table, check_text
from fedpriv.data.dataset_files import open_dataset
from fedpriv.data.flower_partitioners import from_partitioner, partitioner_named, redeal
from fedpriv.data.huggingface import (
    DEFAULT_COLUMNS,
    ColumnNames,
    from_dataset,
    read_columns,
    read_ids,
)
from fedpriv.data.population import Population
from fedpriv.data.registry import load_population
from fedpriv.data.store import UserStore
from fedpriv.errors import DataError, InvalidValueError

if TYPE_CHECKING:
    from datasets import Dataset

_Fields = Mapping[str, NDArray[np.generic]]
_LONGEST_ARGUMENTS = 200  # characters; some partitioners take a list with an entry per user


def load_hugging_face(
    train: str,
    test: str,
    *,
    columns: ColumnNames = DEFAULT_COLUMNS,
    user_column: str | None = None,
    partitioner: str | None = None,
    arguments: Mapping[str, object] | None = None,
) -> Population:
    """Load a dataset from this machine, its users named by a column or dealt by a partitioner.

    The field x of images, uint8 [rows, height, width] or [..., channels], becomes float32
    [rows, channels, height, width] in [0, 1].

    Args:
        train: users' rows, see `open_dataset` for what it may be.
        test: held-out rows, likewise, with the same columns.
        columns: as for `from_dataset`.
        user_column: column of the user's id.
        partitioner: see `partitioner_named`; one of the two must be given.
        arguments: of the partitioner.

    Raises:
        DataError: a dataset cannot be read or does not hold what is asked for, a field is text,
            or a test row is of an enrolled user, on whom a figure would pass by the ledger.
        InvalidValueError: a setting is out of range, missing, or would have no effect.
    """
    _check_columns(columns)
    rows = open_dataset(check_text("train", train))
    held_out = open_dataset(check_text("test", test))
    if isinstance(user_column, str) and partitioner is None and arguments is None:
        store = from_dataset(rows, user_column, columns)
        _check_apart(store, held_out, user_column)
        how = user_column
    elif isinstance(partitioner, str) and user_column is None:
        given = check_table("arguments", arguments)
        store = from_partitioner(rows, partitioner_named(partitioner, given), columns)
        how = _dealing(partitioner, given)
    else:
        raise InvalidValueError(
            f"user_column is {user_column!r} and partitioner {partitioner!r}; exactly one must be "
            "given, as text, and arguments with a partitioner only"
        )
    users = UserStore(_as_inputs(store.fields), store.offsets, store.user_ids)
    name = f"hugging-face: {users.population} users by {how} of {train}"
    return Population(name, users, _as_inputs(read_columns(held_out, columns)))


def load_redealt(
    population: str,
    partitioner: str,
    arguments: Mapping[str, object] | None = None,
    options: Mapping[str, object] | None = None,
) -> Population:
    """Load another population by name, and deal its users' rows to other users.

    Args:
        population: name of the other, as for `load_population`; its held-out rows are kept.
        partitioner: see `partitioner_named`; its columns are the fields with one value per row.
        arguments: of the partitioner.
        options: of the other population.

    Raises:
        DataError: there is no such population or partitioner, or parts are no rows.
        InvalidValueError: an option or argument is refused.
    """
    given = check_table("arguments", arguments)
    made = partitioner_named(check_text("partitioner", partitioner), given)
    base = load_population(check_text("population", population), check_table("options", options))
    users = redeal(base.users, made)
    how = f"{users.population} users by {_dealing(partitioner, given)}"
    return Population(f"{base.name}; dealt to {how}", users, base.test)


def _check_columns(columns: object) -> None:
    listed = columns.values() if isinstance(columns, Mapping) else [None]
    names = [name for c in listed for name in (c if isinstance(c, list) else [c])]
    if not all(isinstance(name, str) for name in names):
        raise InvalidValueError(
            f"columns is {columns!r}; it must be a table: field → column, or list of columns"
        )


def _check_apart(users: UserStore, held_out: "Dataset", user_column: str) -> None:
    if user_column not in held_out.column_names:
        return
    enrolled = {users.id_of(user) for user in range(users.population)}
    both = {str(user) for user in read_ids(held_out, user_column)} & enrolled
    if both:
        raise DataError(
            f"{len(both)} users have rows in train and in test; held-out rows must be of nobody "
            "who is enrolled"
        )


def _as_inputs(fields: _Fields) -> dict[str, NDArray[np.generic]]:
    for name, field in fields.items():
        if field.dtype.kind not in "biuf":
            raise DataError(f"field {name!r} has dtype {field.dtype}; a model needs numbers")
    x = fields.get("x")
    if x is None or x.dtype != np.uint8 or x.ndim not in (3, 4):
        return dict(fields)
    pixels = x[:, np.newaxis] if x.ndim == 3 else np.moveaxis(x, -1, 1)
    return {**fields, "x": np.ascontiguousarray(pixels, np.float32) / np.float32(255)}


def _dealing(partitioner: str, arguments: Mapping[str, object]) -> str:
    """How rows are dealt, in words for the population's name; settings alone, which are public."""
    if not arguments:
        return partitioner
    text = json.dumps(arguments, sort_keys=True, default=repr)
    if len(text) > _LONGEST_ARGUMENTS:
        text = f"arguments of SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return f"{partitioner} with {text}"
