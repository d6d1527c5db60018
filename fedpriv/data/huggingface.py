"""User stores from Hugging Face datasets that name each row's user in a column."""

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.arrays import from_arrays
from fedpriv.data.store import UserStore
from fedpriv.errors import DataError, known_names

if TYPE_CHECKING:
    from datasets import Dataset

ColumnNames: TypeAlias = Mapping[str, str | Sequence[str]]
"""Field of the store → column of the dataset, or columns of numbers that are its components."""

DEFAULT_COLUMNS: ColumnNames = {"x": "image", "y": "label"}


def from_dataset(
    dataset: "Dataset", user_column: str, columns: ColumnNames = DEFAULT_COLUMNS
) -> UserStore:
    """Group the rows of a dataset by the user that a column names.

    Columns become arrays in memory by the package's own NumPy format, whatever format the dataset
    has: images become integer arrays, numbers of 64-bit floats become float32.

    Args:
        dataset: one split, as `datasets.load_dataset(..., split="train")` returns it.
        user_column: column of the user's id, all strings or all integers, none missing.
        columns: field of the store → column of the dataset; or a list of columns of numbers, such
            as those of a table, which become one field float32 [rows, number of columns].

    Returns:
        Store with users in order of first appearance.

    Raises:
        DataError: the package is not installed, `dataset` is not one split, a column is absent,
            a user id is missing, or the rows of a column differ in shape.
    """
    fields = read_columns(dataset, columns)
    return from_arrays(fields, read_ids(dataset, user_column))


def read_columns(dataset: "Dataset", columns: ColumnNames) -> dict[str, NDArray[np.generic]]:
    """Fields name → array [rows, ...] of a dataset; args and errors as for `from_dataset`."""
    if not isinstance(dataset, datasets_package().Dataset):
        raise DataError(
            f"dataset is a {type(dataset).__name__}; it must be a datasets.Dataset, which is one "
            "split of a DatasetDict and not a stream"
        )
    names = {field: [c] if isinstance(c, str) else [*c] for field, c in columns.items()}
    wanted = sorted({column for listed in names.values() for column in listed})
    _check_columns(dataset, wanted)
    arrays = dataset.select_columns(wanted).with_format("numpy")[:]
    return {
        field: arrays[column] if isinstance(column, str) else _components(field, column, arrays)
        for field, column in columns.items()
    }


def read_ids(dataset: "Dataset", user_column: str) -> Sequence[object]:
    """Ids of the rows' users, as Python values: [rows].

    In NumPy's format one missing id would turn the others into rounded floats.

    Raises:
        DataError: there is no such column.
    """
    _check_columns(dataset, [user_column])
    ids: Sequence[object] = dataset.with_format(None).select_columns([user_column])[:][user_column]
    return ids


def datasets_package() -> ModuleType:
    """The package datasets, which takes a second to import.

    Raises:
        DataError: it is not installed.
    """
    try:
        import datasets  # noqa: PLC0415
    except ImportError as error:
        raise DataError(
            "the package datasets is not installed; pip install 'fedpriv[datasets]'"
        ) from error
    module: ModuleType = datasets
    return module


def _check_columns(dataset: "Dataset", columns: Sequence[str]) -> None:
    for column in columns:
        if column not in dataset.column_names:
            known = known_names(column, dataset.column_names)
            raise DataError(f"the dataset has no column {column!r}; {known}")


def _components(
    field: str, columns: Sequence[str], arrays: Mapping[str, NDArray[np.generic]]
) -> NDArray[np.float32]:
    """Columns of numbers side by side: float32 [rows, columns]."""
    for column in columns:
        if arrays[column].ndim != 1 or arrays[column].dtype.kind not in "biuf":
            raise DataError(
                f"column {column!r} of field {field!r} is no column of numbers, of which alone a "
                "field of several columns can be made"
            )
    if not columns:
        raise DataError(f"field {field!r} is made of no columns; there must be at least one")
    return np.stack([arrays[column] for column in columns], axis=1).astype(np.float32)
