"""User stores from Hugging Face datasets that name each row's user in a column.

Datasets from files of this machine: nothing is fetched and nothing is written.

Users from the partitioners of the package flwr-datasets, and from any of the same form.

Populations whose users are those of a Hugging Face dataset, or parts of a partitioner.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.arrays import from_arrays
from fedpriv.data.partition import partition
from fedpriv.data.population import Population, UserStore, check_table, check_text
from fedpriv.data.registry import load_population
from fedpriv.errors import DataError, InvalidValueError, known_names
from fedpriv.importing import check_options, import_function

if TYPE_CHECKING:
    from datasets import Dataset
    from pyarrow import Table


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


def open_dataset(path: str | Path) -> "Dataset":
    """Read a dataset into memory.

    Guarantees: no network is asked, and users' data stay out of the package's cache in the home
    folder.

    Args:
        path: one of

            * a folder saved by `Dataset.save_to_disk`, or that of one split in a folder saved by
              `DatasetDict.save_to_disk`, such as "mine/train";
            * a .parquet file, a .csv file with a line of names, or a .jsonl or .json file with an
              object per line;
            * a folder of such files of one kind, which are read in the order of their names.

    Raises:
        DataError: the package datasets is not installed, or the path is none of these.
    """
    place, package = Path(path), datasets_package()
    if not place.exists():
        raise DataError(f"{place} does not exist")
    try:
        if (place / "state.json").is_file():
            return package.load_from_disk(place, keep_in_memory=True)
        if (place / "dataset_dict.json").is_file():
            splits = ", ".join(sorted(str(p) for p in place.iterdir() if p.is_dir()))
            raise DataError(f"{place} holds several splits; name one of them: {splits}")
        files = sorted(place.iterdir()) if place.is_dir() else [place]
        return package.Dataset(_table(files, place))
    except DataError:
        raise
    # Readers raise errors of many classes, and their texts may quote the content.
    except Exception as error:
        raise DataError(
            f"{place} cannot be read ({type(error).__name__}); it must be a whole dataset"
        ) from error


def _table(files: Sequence[Path], place: Path) -> "Table":
    """Rows of all files, one after the other; package datasets brings pyarrow."""
    import pyarrow  # noqa: PLC0415

    readers = _readers()
    kinds = {file.suffix for file in files}
    if len(kinds) != 1 or not kinds <= readers.keys():
        raise DataError(
            f"{place} is no dataset; legal are a folder saved by save_to_disk, and "
            f"{', '.join(readers)} files, one or a folder of one kind"
        )
    read = readers[kinds.pop()]
    return pyarrow.concat_tables([read(file) for file in files], promote_options="permissive")


def _readers() -> Mapping[str, Callable[[Path], "Table"]]:
    from pyarrow import csv, json, parquet  # noqa: PLC0415

    return {
        ".parquet": parquet.read_table,
        ".csv": csv.read_csv,
        ".json": json.read_json,
        ".jsonl": json.read_json,
    }


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
    _check_file_columns(columns)
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


def _check_file_columns(columns: object) -> None:
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
