"""User stores from Hugging Face datasets that name each row's user in a column."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedpriv.data.arrays import from_arrays
from fedpriv.data.store import UserStore
from fedpriv.errors import DataError, known_names

if TYPE_CHECKING:
    from datasets import Dataset

_DEFAULT_COLUMNS = {"x": "image", "y": "label"}


def from_dataset(
    dataset: "Dataset", user_column: str, columns: Mapping[str, str] = _DEFAULT_COLUMNS
) -> UserStore:
    """Group the rows of a dataset by the user that a column names.

    Columns become arrays in memory by the package's own NumPy format, whatever format the dataset
    has: images become integer arrays, numbers of 64-bit floats become float32.

    Args:
        dataset: one split, as `datasets.load_dataset(..., split="train")` returns it.
        user_column: column of the user's id, all strings or all integers, none missing.
        columns: field of the store → column of the dataset.

    Returns:
        Store with users in order of first appearance.

    Raises:
        DataError: the package is not installed, `dataset` is not one split, a column is absent,
            a user id is missing, or the rows of a column differ in shape.
    """
    try:
        import datasets  # noqa: PLC0415
    except ImportError as error:
        raise DataError(
            "the package datasets is not installed; pip install 'fedpriv[datasets]'"
        ) from error
    if not isinstance(dataset, datasets.Dataset):
        raise DataError(
            f"dataset is a {type(dataset).__name__}; it must be a datasets.Dataset, which is one "
            "split of a DatasetDict and not a stream"
        )
    for column in (user_column, *columns.values()):
        if column not in dataset.column_names:
            known = known_names(column, dataset.column_names)
            raise DataError(f"the dataset has no column {column!r}; {known}")
    # Python values: in NumPy's format one missing id would turn the others into rounded floats.
    user_ids = dataset.with_format(None).select_columns([user_column])[:][user_column]
    arrays = dataset.select_columns(sorted(set(columns.values()))).with_format("numpy")[:]
    return from_arrays({field: arrays[column] for field, column in columns.items()}, user_ids)
