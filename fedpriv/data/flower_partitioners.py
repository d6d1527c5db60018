"""Users from the partitioners of the package flwr-datasets, and from any of the same form."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.huggingface import DEFAULT_COLUMNS, ColumnNames, datasets_package, read_columns
from fedpriv.data.partition import partition
from fedpriv.data.store import UserStore
from fedpriv.errors import DataError, InvalidValueError
from fedpriv.importing import check_options, import_function

if TYPE_CHECKING:
    from datasets import Dataset

_ROW = "fedpriv.row"
_FLOWER = "flwr_datasets.partitioner"


class Partitioner(Protocol):
    """What is asked of a partitioner; those of `flwr_datasets.partitioner` have this form.

    Attributes:
        dataset: assigned once, before anything is asked.
        num_partitions: number of parts.
    """

    dataset: "Dataset"

    @property
    def num_partitions(self) -> int: ...  # noqa: D102

    def load_partition(self, partition_id: int) -> "Dataset":
        """Rows of the part with a number from 0 to below `num_partitions`."""


def from_partitioner(
    dataset: "Dataset", partitioner: Partitioner, columns: ColumnNames = DEFAULT_COLUMNS
) -> UserStore:
    """Make a user of each part of a dataset.

    Guarantees:
        * User i is part i; a part without rows is a user without rows.
        * No row has two users. A row in no part is left out.
        * A user's rows keep their order in the dataset.

    Args:
        dataset: one split, as `datasets.load_dataset(..., split="train")` returns it.
        partitioner: one that has no dataset yet; it is given this one, with a column more.
        columns: as for `from_dataset`.

    Raises:
        DataError: the package datasets is not installed, `dataset` is not one split, a column is
            absent or has rows of different shapes, a row is in two parts, or parts are no rows.
        InvalidValueError: the partitioner refuses the dataset.
    """
    return _dealt(read_columns(dataset, columns), dataset, partitioner)


def redeal(store: UserStore, partitioner: Partitioner) -> UserStore:
    """Deal the rows of a store to other users; guarantees and errors as for `from_partitioner`.

    Args:
        store: whose users are dropped.
        partitioner: one that has no dataset yet; its columns are the store's fields with one
            value per row, such as y.
    """
    flat = {name: field for name, field in store.fields.items() if field.ndim == 1}
    dataset = datasets_package().Dataset.from_dict(flat)
    if not flat:
        raise DataError("no field of the store has one value per row, for a partitioner to read")
    return _dealt(store.fields, dataset, partitioner)


def partitioner_named(name: str, arguments: Mapping[str, object]) -> Partitioner:
    """Make a partitioner from its name, for configuration files.

    Args:
        name: a class of `flwr_datasets.partitioner`, such as "DirichletPartitioner", or
            "package.module:function" for a function or class that makes a `Partitioner`.
        arguments: of the class or function, by name.

    Raises:
        DataError: there is no such class or function, or flwr-datasets is not installed.
        InvalidValueError: an argument is unknown or missing, or its value is refused.
    """
    what = f"partitioner {name!r}"
    if ":" in name:
        make = import_function(what, name, DataError)
    else:
        try:
            import flwr_datasets  # noqa: F401, PLC0415
        except ImportError as error:
            raise DataError(
                "the package flwr-datasets is not installed; pip install 'fedpriv[flower]'"
            ) from error
        make = import_function(what, f"{_FLOWER}:{name}", DataError)
    check_options(what, make, arguments, InvalidValueError, noun="argument")
    with _refusals(what):
        return cast(Partitioner, make(**arguments))


def _dealt(
    fields: Mapping[str, NDArray[np.generic]], dataset: "Dataset", partitioner: Partitioner
) -> UserStore:
    what = f"partitioner {type(partitioner).__name__!r}"
    with _refusals(what):
        numbers = np.arange(len(dataset))
        partitioner.dataset = dataset.with_format(None).add_column(_ROW, numbers)
        users = partitioner.num_partitions
    times = np.zeros(len(dataset), np.int64)
    user_of_row = np.zeros(len(dataset), np.int64)
    for user in range(users):
        rows = _rows_of(user, partitioner, what)
        np.add.at(times, rows, 1)
        user_of_row[rows] = user
    if times.max(initial=0) > 1:
        raise DataError(
            f"{what} gives {np.count_nonzero(times > 1)} rows to two users or twice to one; a row "
            "must have one user"
        )
    if not times.all():
        fields = {name: field[times > 0] for name, field in fields.items()}
    return partition(fields, user_of_row[times > 0], np.arange(users))


def _rows_of(user: int, partitioner: Partitioner, what: str) -> NDArray[np.int64]:
    """Numbers of the rows in a user's part."""
    with _refusals(what):
        part = partitioner.load_partition(user)
    if _ROW not in part.column_names:
        raise DataError(
            f"{what} does not deal whole rows; users must differ in rows, not in columns"
        )
    return np.asarray(part[_ROW][:], np.int64)


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Turn whatever is raised, of classes that no partitioner promises, into one sentence."""
    try:
        yield
    except Exception as error:
        sentence = " ".join(str(error).split())
        raise InvalidValueError(f"{what} refuses: {sentence or type(error).__name__}") from error
