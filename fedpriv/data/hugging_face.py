"""Users from Hugging Face datasets: a column names them, or a partitioner deals rows to them.

A dataset is in local files, which are read without fetching or writing anything; or it has a name
on the Hugging Face hub, and comes from the hub or from the cache of the package `datasets`.
"""

import csv
import hashlib
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np

from fedpriv.data.arrays import from_columns, several_ids
from fedpriv.data.columns import Array, ColumnLike, Fields, read_column, to_array
from fedpriv.data.partition import partition
from fedpriv.data.population import (
    HELD_OUT_USER,
    Population,
    UserStore,
    as_id_array,
    check_not_enrolled,
    numbered_population,
    sharing,
)
from fedpriv.errors import DataError, InvalidValueError, known_names
from fedpriv.support.checks import checked_arguments
from fedpriv.support.importing import call_imported, check_installed, import_function, raised_with

if TYPE_CHECKING:
    from datasets import Dataset
    from flwr_datasets.partitioner import Partitioner
    from pyarrow import Table

ColumnNames: TypeAlias = Mapping[str, str | Sequence[str]]
"""By field of a store: a column of the dataset, or columns of numbers, one for each component."""

DEFAULT_COLUMNS: ColumnNames = {"x": "image", "y": "label"}
_ROW = "fedpriv.row"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def from_dataset(
    dataset: "Dataset",
    user_column: str,
    columns: ColumnNames = DEFAULT_COLUMNS,
    owners: int | None = None,
) -> UserStore:
    """Group the rows of a dataset, which is one split, by the user that a column names.

    Users are in order of first appearance; ids are all strings or all integers. Columns become
    arrays in memory; images become integers. A list of columns of numbers becomes one field float32
    [rows, columns]. The user column may hold lists of up to `owners` ids, see `from_arrays`.
    """
    fields = {field: read_column(*column) for field, column in _columns(dataset, columns).items()}
    return from_columns(fields, _read_ids(dataset, user_column), owners)


def from_partitioner(
    dataset: "Dataset", partitioner: "Partitioner", columns: ColumnNames = DEFAULT_COLUMNS
) -> UserStore:
    """Give part i of a dataset to user i, who may have no rows; rows keep their order.

    No row may be in two parts; rows in no part are left out. The partitioner must not have a
    dataset yet; it gets this one, with an additional column.
    """
    return _dealt(_whole(_columns(dataset, columns)), dataset, partitioner)


@checked_arguments
def load_hugging_face(
    train: str | None = None,
    test: str | None = None,
    *,
    dataset: str | None = None,
    subset: str | None = None,
    revision: str | None = None,
    splits: Sequence[str] = ("train", "test"),
    columns: ColumnNames = DEFAULT_COLUMNS,
    user_column: str | None = None,
    owners: int | None = None,
    partitioner: str | None = None,
    arguments: Mapping[str, object] | None = None,
) -> Population:
    """Load a dataset; a column names the users, or a partitioner deals rows to them.

    Either `train` (users' rows) and `test` (held-out rows) are paths as for `open_dataset`, or
    `dataset` is a name on the hub, as for `fetch_splits`. Images in x, uint8 [rows, height, width]
    or [..., channels], become float32 [rows, channels, height, width] in [0, 1]. Text in y becomes
    classes, as in `Population.from_arrays`. Test rows of an enrolled user are refused, since
    the ledger does not cover figures on them.
    """
    lists = (names if isinstance(names, list) else [names] for names in columns.values())
    names = [name for names in lists for name in names]
    if not all(isinstance(name, str) for name in names):
        raise InvalidValueError(f"columns is {columns!r}; it must map fields to columns")
    if dataset is not None and train is None and test is None:
        rows, held_out = fetch_splits(dataset, splits, subset, revision)
        source = " ".join([dataset, *([subset] if subset else []), splits[0]])
    elif dataset is None and train is not None and test is not None:
        as_written = () if user_column is None else (user_column,)
        rows, held_out = open_dataset(train, as_written), open_dataset(test, as_written)
        source = Path(train).name
    else:
        values = f"dataset is {dataset!r}, train {train!r} and test {test!r}"
        limit = "dataset, a name on the Hugging Face hub, or both paths must be given"
        raise InvalidValueError(f"{values}; either {limit}")
    _check_classes(rows, held_out, names)
    classes = getattr(rows.features.get(str(columns.get("y"))), "names", None)
    if owners is not None and user_column is None:
        raise InvalidValueError(f"owners is {owners}; without user_column it must be absent")
    if user_column is not None and partitioner is None and arguments is None:
        store, how = from_dataset(rows, user_column, columns, owners), user_column
    elif partitioner is not None and user_column is None:
        partitioner_object, how = _described_partitioner(partitioner, arguments or {})
        store = from_partitioner(rows, partitioner_object, columns)
    else:
        values = f"user_column is {user_column!r} and partitioner {partitioner!r}"
        limit = "exactly one must be given, and arguments only with a partitioner"
        raise InvalidValueError(f"{values}; {limit}")
    test_fields = _with_images(_whole(_columns(held_out, columns)))
    if user_column is not None and user_column in held_out.column_names:
        test_fields |= _held_out_owners(store, held_out, user_column)
    name = f"hugging-face: {store.population} users by {how} of {source}{sharing(store)}"
    users = replace(store, fields=_with_images(store.fields))
    return numbered_population(name, users, test_fields, classes)


def fetch_splits(
    name: str, splits: Sequence[str], subset: str | None, revision: str | None
) -> tuple["Dataset", "Dataset"]:
    """Return two splits of one revision of a dataset on the hub: users' rows and held-out rows.

    A dataset that was loaded before is read from the cache, even if the hub cannot be reached or
    HF_HUB_OFFLINE=1 forbids it. The cache belongs to the package; HF_HOME moves it. Splits may be
    slices, such as "train[:90%]"; `subset` is one of the dataset's configurations, `revision` a
    commit, tag or branch. A dataset's own code is never run.
    """
    package = _package("datasets", "datasets")
    if not _HUB_NAME.fullmatch(name):
        raise InvalidValueError(f"dataset is {name!r}; it must be a name such as 'ylecun/mnist'")
    if isinstance(splits, str) or len(splits) != 2 or not all(isinstance(s, str) for s in splits):
        raise InvalidValueError(f"splits is {splits!r}; it must be a pair of names")
    if Path(name).exists():  # the package would read it instead
        raise DataError(f"dataset {name!r} is also a file here; give paths as train and test")
    what = f"dataset {name!r} of the Hugging Face hub"
    try:
        builder = package.load_dataset_builder(name, subset, revision=revision)
    except Exception as error:  # of any class; its text cannot quote data, as none were read
        sentence = " ".join(str(error).split()) or type(error).__name__
        cache = package.config.HF_DATASETS_CACHE
        raise DataError(
            f"{what} is not in the cache {cache} and cannot be reached: {sentence}"
        ) from error
    try:
        builder.download_and_prepare()
    except Exception as error:
        raise DataError(f"{what} cannot be fetched or read ({type(error).__name__})") from error
    try:
        rows, held_out = builder.as_dataset(split=list(splits))
    except Exception as error:
        names = ", ".join(builder.info.splits or ())
        raise DataError(f"{what} has no splits {list(splits)}; known names: {names}") from error
    return rows, held_out


def open_dataset(path: str | Path, texts: Sequence[str] = ()) -> "Dataset":
    """Read a dataset into memory, without the network or the package's cache in the home folder.

    The path is a folder saved by `Dataset.save_to_disk` (or that of one split of a `DatasetDict`),
    a .parquet file, a .csv file with a line of names, a .jsonl or .json file with an object per
    line, or a folder of such files of one kind, which are read in order of name. The columns
    `texts` of .csv files are read as text, not as numbers: ids 1 and 01 differ. In JSON files, text
    in these columns is not read as times.
    """
    place, package = Path(path), _package("datasets", "datasets")
    if not place.exists():
        raise DataError(f"{place} does not exist; give a name on the Hugging Face hub as dataset")
    if (place / "dataset_dict.json").is_file():
        splits = ", ".join(sorted(str(p) for p in place.iterdir() if p.is_dir()))
        raise DataError(f"{place} holds several splits; name one of them: {splits}")
    try:
        if (place / "state.json").is_file():
            return package.load_from_disk(place, keep_in_memory=True)
        return package.Dataset(_table_of_files(place, texts))
    except DataError:
        raise
    # Readers raise errors of any class, and their texts may quote the content.
    except Exception as error:
        raise DataError(f"{place} cannot be read ({type(error).__name__})") from error


def partitioner_named(name: str, arguments: Mapping[str, object]) -> "Partitioner":
    """Make a partitioner by class name in `flwr_datasets.partitioner`, or "module:function"."""
    what = f"partitioner {name!r}"
    if ":" not in name:
        _package("flwr_datasets", "flower")
        name = f"flwr_datasets.partitioner:{name}"
    make = import_function(what, name, DataError)
    return cast("Partitioner", call_imported(what, make, arguments, InvalidValueError, raised_with))


def _described_partitioner(name: str, arguments: Mapping[str, object]) -> tuple["Partitioner", str]:
    """Return a partitioner, and a description of its settings for the population's name."""
    text = json.dumps(arguments, sort_keys=True, default=repr)
    if len(text) > 200:  # some partitioners take a list with an entry per user
        text = f"arguments of SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"
    return partitioner_named(name, arguments), f"{name} with {text}" if arguments else name


def _package(name: str, extra: str) -> ModuleType:
    check_installed(extra, name)
    return importlib.import_module(name)


def _table_of_files(place: Path, texts: Sequence[str]) -> "Table":
    """Read a file, or all files of a folder; the package datasets depends on pyarrow."""
    import pyarrow  # noqa: PLC0415
    from pyarrow import parquet  # noqa: PLC0415

    readers: dict[str, Callable[[Path], Table]] = {
        ".json": partial(_read_json, texts=texts),
        ".jsonl": partial(_read_json, texts=texts),
        ".parquet": parquet.read_table,
        ".csv": partial(_read_csv, texts=texts),
    }
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    kinds = {file.suffix for file in files}
    if len(kinds) != 1 or not kinds <= readers.keys():
        limit = f"a folder saved by save_to_disk, or {', '.join(readers)} files of one kind"
        raise DataError(f"{place} is not a dataset; it must be {limit}")
    reader = readers[kinds.pop()]
    return pyarrow.concat_tables([reader(file) for file in files], promote_options="permissive")


def _read_json(file: Path, texts: Sequence[str]) -> "Table":
    """Read a file; texts in the columns `texts` are not read as times."""
    import pyarrow  # noqa: PLC0415
    from pyarrow import json  # noqa: PLC0415

    table = json.read_json(file)
    types = {name: table.schema.field(name).type for name in texts if name in table.schema.names}
    times = [name for name, kind in types.items() if pyarrow.types.is_timestamp(kind)]
    as_written = pyarrow.schema([(name, pyarrow.string()) for name in times])
    options = json.ParseOptions(explicit_schema=as_written)
    return json.read_json(file, parse_options=options) if times else table


def _read_csv(file: Path, texts: Sequence[str]) -> "Table":
    """Read a file, with the columns `texts` as text; DataError names the line of a fault."""
    import pyarrow  # noqa: PLC0415
    from pyarrow import csv as arrow  # noqa: PLC0415

    try:
        table = arrow.read_csv(file)
        # Text that is not UTF-8 is binary.
        readable = not any(map(pyarrow.types.is_binary, table.schema.types))
        _check_header(file, table.schema.names)
    except ValueError:  # from pyarrow, or because names are not text
        readable = False
    if not readable:
        raise DataError(f"{file} cannot be read: {_fault_of_csv(file)}")
    types = {name: table.schema.field(name).type for name in texts if name in table.schema.names}
    # Fractions stay numbers, and are refused as ids: 1.0 here would be 1 in another file.
    names = [name for name, kind in types.items() if not pyarrow.types.is_floating(kind)]
    as_written = arrow.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string()))
    return arrow.read_csv(file, convert_options=as_written) if names else table


def _check_header(file: Path, names: list[str]) -> None:
    """Raise DataError if the first line of a file does not look like names between commas."""
    if len(names) == 1 and (mark := next((m for m in ";\t|" if m in names[0]), None)):
        raise DataError(
            f"{file} has {mark!r} between its values; write commas, and numbers with a decimal "
            "point, as pd.read_csv(file, sep=';', decimal=',').to_csv(new, index=False) does"
        )
    numbers = [name for name in names if re.fullmatch(r"[-+]?\d*\.?\d+(e[-+]?\d+)?", name)]
    if numbers == names and (len({*names}) < len(names) or any("." in name for name in names)):
        raise DataError(f"{file} has numbers in line 1; its first line must name the columns")


def _fault_of_csv(file: Path) -> str:
    """Return the line and kind of the first fault in a file, without quoting the file."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return f"line {number} is not UTF-8; save the file with that encoding"
    with file.open(encoding="utf-8", newline="") as text:
        rows = csv.reader(text)
        names = next(rows, [])
        _check_header(file, names)
        for row in rows:
            if row and len(row) != len(names):
                problem = f"line {rows.line_num} has {len(row)} values, line 1 has {len(names)}"
                return f"{problem} names; quote values with commas in them"
    return "it is not a table of values between commas"


def _columns(dataset: "Dataset", columns: ColumnNames) -> dict[str, tuple[str, ColumnLike]]:
    """Return by field a description for messages, and its column, or its columns as a table."""
    if not isinstance(dataset, _package("datasets", "datasets").Dataset):
        kind = f"dataset is a {type(dataset).__name__}"
        raise DataError(f"{kind}; it must be a datasets.Dataset, which is one split, not a stream")
    lists = [[column] if isinstance(column, str) else column for column in columns.values()]
    arrays = _select(dataset, {name for names in lists for name in names}, "numpy")
    return {
        field: (f"column {column!r}", arrays[column])
        if isinstance(column, str)
        else (f"field {field!r}", {name: arrays[name] for name in column})
        for field, column in columns.items()
    }


def _whole(columns: Mapping[str, tuple[str, ColumnLike]]) -> dict[str, Array]:
    return {field: to_array(*column) for field, column in columns.items()}


def _read_ids(dataset: "Dataset", user_column: str) -> Any:
    # In NumPy's format, a missing id would turn the others into rounded floats.
    return _select(dataset, {user_column}, None)[user_column]


def _select(dataset: "Dataset", columns: set[str], form: str | None) -> dict[str, Any]:
    for column in sorted(columns):
        if column not in dataset.column_names:
            hint = known_names(column, dataset.column_names)
            raise DataError(f"the dataset has no column {column!r}; {hint}")
    return cast(dict[str, Any], dataset.with_format(form).select_columns(sorted(columns))[:])


def _dealt(fields: Fields, dataset: "Dataset", partitioner: "Partitioner") -> UserStore:
    what = f"partitioner {type(partitioner).__name__!r}"
    try:
        numbers = np.arange(len(dataset))
        partitioner.dataset = dataset.with_format(None).add_column(_ROW, numbers)
        parts = [partitioner.load_partition(user) for user in range(partitioner.num_partitions)]
    except Exception as error:
        sentence = " ".join(str(error).split())
        raise InvalidValueError(f"{what} refuses: {sentence or type(error).__name__}") from error
    if not all(_ROW in part.column_names for part in parts):
        raise DataError(f"{what} does not deal whole rows; users must differ in rows")
    rows = [np.asarray(part[_ROW][:], np.int64) for part in parts]
    numbers, counts = np.unique(np.concatenate(rows), return_counts=True)
    if repeated := np.count_nonzero(counts > 1):
        raise DataError(f"{what} deals {repeated} rows twice; it must deal a row at most once")
    user_of_row = np.zeros(len(dataset), np.int64)
    owners = np.repeat(np.arange(len(rows)), [len(part) for part in rows])
    user_of_row[np.concatenate(rows)] = owners
    if len(numbers) < len(dataset):
        fields = {name: field[numbers] for name, field in fields.items()}
    return partition(fields, user_of_row[numbers], np.arange(len(rows)))


def _check_classes(rows: "Dataset", held_out: "Dataset", columns: Sequence[Any]) -> None:
    """Raise DataError if the splits number the classes of a column differently."""
    for column in columns:
        one, other = (getattr(d.features.get(column), "names", None) for d in (rows, held_out))
        if one is not None and other is not None and one != other:
            problem = f"column {column!r} numbers other classes in test than in train"
            raise DataError(f"{problem}; both must have the same list of classes")


def _held_out_owners(users: UserStore, held_out: "Dataset", user_column: str) -> Fields:
    """Return the owners of held-out rows, for figures by user; DataError if one is enrolled.

    If rows have several owners, there are no figures by user.
    """
    ids = _read_ids(held_out, user_column)
    several = several_ids(ids)
    if several:
        ids = [owner for row in ids for owner in row or [None]]
    owners, enrolled = as_id_array(ids), map(users.id_of, range(users.population))
    check_not_enrolled(owners, enrolled)
    return {} if several else {HELD_OUT_USER: owners}


def _with_images(fields: Fields) -> dict[str, Array]:
    """Return the fields; images in x become float32 with the channels first."""
    x = fields.get("x")
    if x is None or x.dtype != np.uint8 or x.ndim not in (3, 4):
        return dict(fields)
    pixels = x[:, np.newaxis] if x.ndim == 3 else np.moveaxis(x, -1, 1)
    return {**fields, "x": np.ascontiguousarray(pixels, np.float32) / np.float32(255)}
