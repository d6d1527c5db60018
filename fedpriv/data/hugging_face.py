"""Users from Hugging Face datasets: named by a column, or dealt by a partitioner.

Datasets are read from files of this machine; nothing is fetched and nothing is written.
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
from fedpriv.data.population import Fields, Population, UserStore, load_population
from fedpriv.errors import DataError, InvalidValueError, known_names
from fedpriv.importing import check_options, import_function

if TYPE_CHECKING:
    from datasets import Dataset
    from pyarrow import Table

ColumnNames: TypeAlias = Mapping[str, str | Sequence[str]]
"""Field of the store → column of the dataset, or columns of numbers that are its components."""

DEFAULT_COLUMNS: ColumnNames = {"x": "image", "y": "label"}
_ROW = "fedpriv.row"
_FLOWER = "flwr_datasets.partitioner"
_LONGEST_ARGUMENTS = 200  # characters; some partitioners take a list with an entry per user


class Partitioner(Protocol):
    """Deals rows of a dataset into parts; those of `flwr_datasets.partitioner` have this form."""

    dataset: "Dataset"  # assigned once, before anything is asked

    @property
    def num_partitions(self) -> int: ...  # noqa: D102

    def load_partition(self, partition_id: int) -> "Dataset":
        """Rows of the part with a number from 0 to below `num_partitions`."""


def from_dataset(
    dataset: "Dataset", user_column: str, columns: ColumnNames = DEFAULT_COLUMNS
) -> UserStore:
    """Group the rows of a dataset by the user that a column names.

    Users come in order of first appearance. Columns become arrays in memory by the package's own
    NumPy format: images become integer arrays, and 64-bit floats become float32.

    Args:
        dataset: one split, as `datasets.load_dataset(..., split="train")` returns it.
        user_column: column of the user's id, all strings or all integers, none missing.
        columns: field of the store → column of the dataset; or a list of columns of numbers, such
            as those of a table, which become one field float32 [rows, number of columns].
    """
    return from_arrays(_read_columns(dataset, columns), _read_ids(dataset, user_column))


def from_partitioner(
    dataset: "Dataset", partitioner: Partitioner, columns: ColumnNames = DEFAULT_COLUMNS
) -> UserStore:
    """Make a user of each part of a dataset; its rows keep their order.

    User i is part i, which may be empty. No row has two users, and a row in no part is left out.
    The partitioner must have no dataset yet; it is assigned this one, with a column more.
    """
    return _dealt(_read_columns(dataset, columns), dataset, partitioner)


def redeal(store: UserStore, partitioner: Partitioner) -> UserStore:
    """Deal the rows of a store to other users, as `from_partitioner` does.

    The partitioner's columns are the store's fields with one value per row, such as y.
    """
    flat = {name: field for name, field in store.fields.items() if field.ndim == 1}
    dataset = _datasets().Dataset.from_dict(flat)
    if not flat:
        raise DataError("no field of the store has one value per row, for a partitioner to read")
    return _dealt(store.fields, dataset, partitioner)


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

    `train` (users' rows) and `test` (held-out rows) are paths as for `open_dataset`, `columns` and
    `user_column` are as for `from_dataset`, `partitioner` and its `arguments` as for
    `partitioner_named`. The field x of images, uint8 [rows, height, width] or [..., channels],
    becomes float32 [rows, channels, height, width] in [0, 1]. Test rows of an enrolled user are
    refused: a figure measured on them would escape the ledger.
    """
    _check_columns_option(columns)
    rows = open_dataset(_text("train", train))
    held_out = open_dataset(_text("test", test))
    if isinstance(user_column, str) and partitioner is None and arguments is None:
        store, how = from_dataset(rows, user_column, columns), user_column
        _check_apart(store, held_out, user_column)
    elif isinstance(partitioner, str) and user_column is None:
        made, how = _described_partitioner(partitioner, arguments)
        store = from_partitioner(rows, made, columns)
    else:
        raise InvalidValueError(
            f"user_column is {user_column!r} and partitioner {partitioner!r}; exactly one must be "
            "given, as text, and arguments with a partitioner only"
        )
    users = UserStore(_as_inputs(store.fields), store.offsets, store.user_ids)
    name = f"hugging-face: {users.population} users by {how} of {train}"
    return Population(name, users, _as_inputs(_read_columns(held_out, columns)))


def load_redealt(
    population: str,
    partitioner: str,
    arguments: Mapping[str, object] | None = None,
    options: Mapping[str, object] | None = None,
) -> Population:
    """Load another population with `options`, and `redeal` its users; held-out rows are kept."""
    made, how = _described_partitioner(_text("partitioner", partitioner), arguments)
    base = load_population(_text("population", population), _table("options", options))
    users = redeal(base.users, made)
    name = f"{base.name}; dealt to {users.population} users by {how}"
    return Population(name, users, base.test)


def open_dataset(path: str | Path) -> "Dataset":
    """Read a dataset into memory, without the network or the package's cache in the home folder.

    The path is one of:
        * a folder saved by `Dataset.save_to_disk`, or that of one split in a folder saved by
          `DatasetDict.save_to_disk`, such as "mine/train";
        * a .parquet file, a .csv file with a line of names, or a .jsonl or .json file with an
          object per line;
        * a folder of such files of one kind, which are read in the order of their names.
    """
    place, package = Path(path), _datasets()
    if not place.exists():
        raise DataError(f"{place} does not exist")
    try:
        if (place / "state.json").is_file():
            return package.load_from_disk(place, keep_in_memory=True)
        if (place / "dataset_dict.json").is_file():
            splits = ", ".join(sorted(str(p) for p in place.iterdir() if p.is_dir()))
            raise DataError(f"{place} holds several splits; name one of them: {splits}")
        return package.Dataset(_table_of_files(place))
    except DataError:
        raise
    # Readers raise errors of many classes, and their texts may quote the content.
    except Exception as error:
        raise DataError(
            f"{place} cannot be read ({type(error).__name__}); it must be a whole dataset"
        ) from error


def partitioner_named(name: str, arguments: Mapping[str, object]) -> Partitioner:
    """Make a partitioner with keyword arguments.

    The name is a class of `flwr_datasets.partitioner`, such as "DirichletPartitioner", or
    "package.module:function" of a function or class that makes a `Partitioner`.
    """
    what = f"partitioner {name!r}"
    if ":" not in name:
        try:
            import flwr_datasets  # noqa: F401, PLC0415
        except ImportError as error:
            raise DataError(
                "the package flwr-datasets is not installed; pip install 'fedpriv[flower]'"
            ) from error
        name = f"{_FLOWER}:{name}"
    make = import_function(what, name, DataError)
    check_options(what, make, arguments, InvalidValueError, noun="argument")
    with _refusals(what):
        return cast(Partitioner, make(**arguments))


def _datasets() -> ModuleType:
    """The package datasets, which takes a second to import."""
    try:
        import datasets  # noqa: PLC0415
    except ImportError as error:
        raise DataError(
            "the package datasets is not installed; pip install 'fedpriv[datasets]'"
        ) from error
    return cast(ModuleType, datasets)


def _read_columns(dataset: "Dataset", columns: ColumnNames) -> dict[str, NDArray[np.generic]]:
    if not isinstance(dataset, _datasets().Dataset):
        raise DataError(
            f"dataset is a {type(dataset).__name__}; it must be a datasets.Dataset, which is one "
            "split of a DatasetDict and not a stream"
        )
    named = [[column] if isinstance(column, str) else column for column in columns.values()]
    wanted = sorted({name for names in named for name in names})
    _check_columns(dataset, wanted)
    arrays = dataset.select_columns(wanted).with_format("numpy")[:]
    return {
        field: arrays[column] if isinstance(column, str) else _components(field, column, arrays)
        for field, column in columns.items()
    }


def _read_ids(dataset: "Dataset", user_column: str) -> Sequence[object]:
    """Ids of the rows' users [rows], as Python values.

    In NumPy's format one missing id would turn the others into rounded floats.
    """
    _check_columns(dataset, [user_column])
    ids: Sequence[object] = dataset.with_format(None).select_columns([user_column])[:][user_column]
    return ids


def _check_columns(dataset: "Dataset", columns: Sequence[str]) -> None:
    for column in columns:
        if column not in dataset.column_names:
            known = known_names(column, dataset.column_names)
            raise DataError(f"the dataset has no column {column!r}; {known}")


def _components(field: str, columns: Sequence[str], arrays: Fields) -> NDArray[np.float32]:
    """Columns of numbers side by side: float32 [rows, columns]."""
    for column in columns:
        if arrays[column].ndim != 1 or arrays[column].dtype.kind not in "biuf":
            raise DataError(
                f"column {column!r} is not a column of numbers, as field {field!r} with several "
                "columns needs"
            )
    if not columns:
        raise DataError(f"field {field!r} is made of no columns; there must be at least one")
    return np.stack([arrays[column] for column in columns], axis=1).astype(np.float32)


def _table_of_files(place: Path) -> "Table":
    """Rows of a file, or of all files of a folder; the package datasets brings pyarrow."""
    import pyarrow  # noqa: PLC0415
    from pyarrow import csv, json, parquet  # noqa: PLC0415

    readers: dict[str, Callable[[Path], Table]] = {
        ".parquet": parquet.read_table,
        ".csv": csv.read_csv,
        ".json": json.read_json,
        ".jsonl": json.read_json,
    }
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    kinds = {file.suffix for file in files}
    if len(kinds) != 1 or not kinds <= readers.keys():
        raise DataError(
            f"{place} is not a dataset; legal are a folder saved by save_to_disk, and "
            f"{', '.join(readers)} files, one or a folder of one kind"
        )
    read = readers[kinds.pop()]
    return pyarrow.concat_tables([read(file) for file in files], promote_options="permissive")


def _dealt(fields: Fields, dataset: "Dataset", partitioner: Partitioner) -> UserStore:
    what = f"partitioner {type(partitioner).__name__!r}"
    with _refusals(what):
        numbers = np.arange(len(dataset))
        partitioner.dataset = dataset.with_format(None).add_column(_ROW, numbers)
        users = partitioner.num_partitions
    times = np.zeros(len(dataset), np.int64)
    user_of_row = np.zeros(len(dataset), np.int64)
    for user in range(users):
        with _refusals(what):
            part = partitioner.load_partition(user)
        if _ROW not in part.column_names:
            raise DataError(
                f"{what} does not deal whole rows; users must differ in rows, not in columns"
            )
        rows = np.asarray(part[_ROW][:], np.int64)
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


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    """Turn whatever a partitioner raises, of any class, into one sentence."""
    try:
        yield
    except Exception as error:
        sentence = " ".join(str(error).split())
        raise InvalidValueError(f"{what} refuses: {sentence or type(error).__name__}") from error


def _described_partitioner(
    name: str, arguments: Mapping[str, object] | None
) -> tuple[Partitioner, str]:
    """A partitioner, and its settings for the population's name; they alone are public."""
    given = _table("arguments", arguments)
    made = partitioner_named(name, given)
    if not given:
        return made, name
    text = json.dumps(given, sort_keys=True, default=repr)
    if len(text) > _LONGEST_ARGUMENTS:
        text = f"arguments of SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return made, f"{name} with {text}"


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidValueError(f"{name} is {value!r}; it must be text")
    return value


def _table(name: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping | None):
        raise InvalidValueError(f"{name} is {value!r}; it must be a table")
    return value or {}


def _check_columns_option(columns: object) -> None:
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
    both = {str(user) for user in _read_ids(held_out, user_column)} & enrolled
    if both:
        raise DataError(
            f"{len(both)} users have rows in train and in test; held-out rows must be of nobody "
            "who is enrolled"
        )


def _as_inputs(fields: Fields) -> dict[str, NDArray[np.generic]]:
    """Fields of numbers; images as float32 with the channels first."""
    for name, field in fields.items():
        if field.dtype.kind not in "biuf":
            raise DataError(f"field {name!r} has dtype {field.dtype}; a model needs numbers")
    x = fields.get("x")
    if x is None or x.dtype != np.uint8 or x.ndim not in (3, 4):
        return dict(fields)
    pixels = x[:, np.newaxis] if x.ndim == 3 else np.moveaxis(x, -1, 1)
    return {**fields, "x": np.ascontiguousarray(pixels, np.float32) / np.float32(255)}
