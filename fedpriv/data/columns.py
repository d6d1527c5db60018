"""Turns lists, arrays, tensors, frames and torch datasets into arrays that a model can train on.

A frame is any object with named columns, as in pandas, polars and pyarrow. Neither these packages
nor torch are imported.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mode
from typing import Any, Protocol, Self, TypeAlias, TypeGuard, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import DataError, InvalidValueError, known_names

Array: TypeAlias = NDArray[np.generic]
Fields: TypeAlias = Mapping[str, Array]  # by field name; the first axis of each is the rows
Classes: TypeAlias = Sequence[str | int | float | bool]
"""Labels; a label's number is its place in the list, from 0."""
Faults: TypeAlias = dict[int, str]
"""By row number: a sentence that says what is wrong with the row, without its values."""


@runtime_checkable
class _Tensor(Protocol):
    # The part of torch.Tensor that this module uses.
    def detach(self) -> Self: ...
    def cpu(self) -> Self: ...
    def numpy(self) -> Array: ...


@runtime_checkable
class _Dataset(Protocol):
    # A map-style dataset, such as a torch.utils.data.Dataset with a length.
    def __len__(self) -> int: ...
    def __getitem__(self, item: int, /) -> Any: ...


class _Frame(Protocol):
    def __getitem__(self, name: Any, /) -> Any: ...


ColumnLike: TypeAlias = Array | _Tensor | Sequence[object] | _Frame | Mapping[Any, Any]
"""The values of a field, [rows, ...]; a table holds several columns of numbers."""
Rows: TypeAlias = (
    Mapping[str, ColumnLike] | tuple[ColumnLike | Mapping[str, ColumnLike], ColumnLike] | _Dataset
)
"""Rows with all their fields: fields by name, a pair of inputs and targets, or a dataset."""

_NUMBERS = (int, float, np.number, np.bool_)
_NESTED = (list, tuple, np.ndarray, _Tensor)
_MISSING = ("NoneType", "NAType", "NaTType")  # of Python and pandas
_NO_VALUE, _TOO_LARGE = "no value (None or NaN)", "an integer beyond 63 bits"
_TIMES = "{} holds times; give numbers, such as days since a public date"


def columns_of(rows: Rows, what: str = "rows") -> dict[str, ColumnLike]:
    """Return the fields of rows by name; a pair is inputs, named x if they have no names, and y.

    Items of a dataset are such pairs or fields by name; a dataset without items has no fields.
    """
    if isinstance(rows, Mapping):
        return dict(rows)
    if is_frame(rows):
        return {str(name): column for name, column in columns_by_name(rows).items()}
    if not isinstance(rows, tuple | list):
        return _columns_of_items(what, rows)
    if len(rows) != 2:
        kind = f"a {type(rows).__name__} of {len(rows)}"
        raise DataError(f"{what} cannot be read from {kind}; give a pair: inputs and targets")
    inputs, targets = rows
    fields = dict(inputs) if isinstance(inputs, Mapping) else {"x": inputs}
    if "y" in fields:
        raise DataError("an input is named 'y'; only the targets may have that name")
    return {**fields, "y": _only_column(targets)}


def _columns_of_items(what: str, dataset: _Dataset) -> dict[str, ColumnLike]:
    if not isinstance(dataset, _Dataset) or isinstance(dataset, np.ndarray | _Tensor | str):
        raise DataError(
            f"{what} cannot be read from a {type(dataset).__name__}; give a pair of inputs and "
            "targets, fields by name, or a dataset with a length and numbered items"
        )
    tensors = getattr(dataset, "tensors", None)  # of a TensorDataset
    if isinstance(tensors, tuple) and len(tensors) == 2:
        return {"x": tensors[0], "y": tensors[1]}
    items = [_fields_of_item(dataset[number]) for number in range(len(dataset))]
    names = mode(tuple(sorted(item)) for item in items) if items else ()
    return {name: [_plain(item.get(name)) for item in items] for name in names}


def _fields_of_item(item: object) -> Mapping[str, object]:
    if isinstance(item, Mapping):
        return item
    if isinstance(item, tuple | list) and len(item) == 2:
        return {"x": item[0], "y": item[1]}
    kind = f"a {type(item).__name__}" + (f" of {len(item)}" if isinstance(item, tuple) else "")
    raise DataError(f"an item of the dataset is {kind}; it must be a pair (x, y) or a dict")


def _plain(value: object) -> object:
    """Return a value of an item as an array, or as a number if the array has no axes."""
    array = as_numpy(value) if isinstance(value, _NESTED) else None
    return value if array is None else array if array.ndim else array.item()


def as_numpy(column: Any) -> Array:
    """Return a value as a NumPy array, without a copy if possible."""
    if not isinstance(column, _Tensor):
        return np.asarray(column)
    tensor: Any = column.detach().cpu()
    in_numpy = "bfloat16" not in str(tensor.dtype)
    return np.asarray((tensor if in_numpy else tensor.float()).numpy())


def to_array(what: str, column: ColumnLike) -> Array:
    """Read a column as `read_column` does; DataError if a row has a fault."""
    array, faults = read_column(what, column)
    refuse_faults(faults, array)
    return array


def refuse_faults(faults: Faults, rows: Array) -> None:
    """Raise DataError for the first fault, if any."""
    for row in sorted(faults):
        raise DataError(
            f"{faults[row]}, in row {row}; {len(faults)} of {len(rows)} rows have such faults: "
            "repair them, or leave them out, as dropna() of a frame does"
        )


def read_column(what: str, column: ColumnLike, *, gaps: bool = False) -> tuple[Array, Faults]:
    """Turn a column into an array of numbers or of text, [rows, ...], and find its faults.

    Floats become float32, the type of parameters, unsigned integers of more than 8 bits int64, and
    bytes text. Objects may be numbers and booleans, texts, or arrays of one shape. The columns of a
    table become one array float32 [rows, columns], in which missing numbers are NaN. Data are
    copied only if they change. DataError: the column as a whole cannot be read.

    A row has a fault if one of its values is missing, differs from most values in kind or shape, or
    exceeds 63 bits. The array holds another value in its place, so it affects neither the type nor
    the shape of the column. With `gaps`, or if some number is a float, a missing number is NaN and
    not a fault.
    """
    named_columns = columns_by_name(column) if is_frame(column) else column
    if isinstance(named_columns, Mapping):
        return _read_table(what, named_columns)
    refuse_masked(what, column)
    try:
        array = as_numpy(column)
        if array.dtype.kind in "UT" and not isinstance(column, np.ndarray):
            array = np.array(column, object)  # NumPy would turn numbers among text into text
    except (TypeError, ValueError) as error:
        if not isinstance(column, Sequence):
            raise DataError(f"{what} cannot be an array: {error}") from error
        array = np.fromiter(column, object, len(column))
    array, faults = _of_objects(what, array, gaps=gaps) if array.dtype == "O" else (array, Faults())
    match array.dtype.kind:
        case "f":
            with np.errstate(over="ignore"):  # its user will count as zero
                return array.astype(np.float32, copy=False), faults
        case "u" if array.dtype.itemsize > 1:
            large = array > np.uint64(np.iinfo(np.int64).max)
            faults = dict.fromkeys(np.nonzero(large)[0].tolist(), f"{what} has {_TOO_LARGE}")
            return np.where(large, 0, array).astype(np.int64), faults
        case "T":
            return array.astype(np.str_), faults
        case "S":  # as HDF5 holds text
            return np.char.decode(array.astype(np.bytes_), "utf-8", "replace"), faults
        case "M" | "m":
            raise DataError(_TIMES.format(what))
        case kind if kind in "biucU":
            return array.astype(array.dtype.newbyteorder("="), copy=False), faults
    raise DataError(f"{what} has dtype {array.dtype}; give numbers, or text for classes")


def _of_objects(what: str, objects: Array, *, gaps: bool) -> tuple[Array, Faults]:
    """Return objects as numbers, text or arrays, whichever most are, and the faults of others."""
    if objects.ndim == 0:
        value = objects.item()
        cure = "its toarray()" if hasattr(value, "toarray") else "an array, a tensor or a list"
        type_name = type(value).__name__
        raise DataError(f"{what} is a {type_name}; give {cure}, with a value for each row")
    values = objects.ravel().tolist()
    kinds = [_kind_of(value) for value in values]
    valid_kinds = [kind for kind in kinds if isinstance(kind, type | tuple)]
    if values and not valid_kinds:
        if hasattr(values[0], "isoformat"):  # a date, or a time with its zone
            raise DataError(_TIMES.format(what))
        cure = "give numbers, as astype(float) makes, or text for classes"
        raise DataError(f"{what} has {kinds[0]} in all {len(objects)} rows; {cure}")
    usual = mode(valid_kinds) if valid_kinds else float
    faults, valid_place = Faults(), kinds.index(usual) if valid_kinds else 0
    numbers = (value for value, kind in zip(values, kinds, strict=True) if kind is float)
    gaps = usual is float and (gaps or any(isinstance(n, float | np.floating) for n in numbers))
    for place, kind in enumerate(kinds):
        if gaps and kind == _NO_VALUE:
            values[place] = math.nan
        elif kind != usual:
            row = place * len(objects) // len(values)
            pad = "; pad or crop it" if isinstance(kind, tuple) else ""
            faults[row] = f"{what} has {_named(kind)}, where most values are {_named(usual)}{pad}"
            values[place] = values[valid_place]
    if not isinstance(usual, tuple):
        return np.array(values, np.str_ if usual is str else None).reshape(objects.shape), faults
    stacked = np.stack([as_numpy(value) for value in values])
    array, inner_faults = read_column(what, stacked.reshape(*objects.shape, *usual))
    return array, inner_faults | faults


def _kind_of(value: object) -> type | tuple[int, ...] | str:
    """Return float for any number, str for text, an array's shape, or a fault."""
    if type(value).__name__ in _MISSING or (isinstance(value, float) and math.isnan(value)):
        return _NO_VALUE
    if isinstance(value, int | np.integer) and not -(2**63) <= int(value) < 2**63:
        return _TOO_LARGE
    if isinstance(value, (str, *_NUMBERS)):
        return str if isinstance(value, str) else float
    if isinstance(value, _NESTED):
        try:
            return as_numpy(value).shape
        except (TypeError, ValueError):
            return "lists of different lengths"
    return f"a value of the type {type(value).__name__}"


def _named(kind: type | tuple[int, ...] | str) -> str:
    names: dict[object, str] = {float: "numbers", str: "text"}
    return names.get(kind) or (f"arrays {[*kind]}" if isinstance(kind, tuple) else str(kind))


def refuse_masked(what: str, column: object) -> None:
    """Raise DataError for a masked array, since its missing values are numbers in memory."""
    if np.ma.isMaskedArray(column):
        raise DataError(f"{what} is a masked array; fill missing values, or leave out these rows")


def refuse_missing(what: str, array: Array) -> None:
    """Raise DataError if numbers are infinite or NaN, as missing numbers of a frame are."""
    if array.dtype.kind == "f":
        rows, *others = np.nonzero(~np.isfinite(cast(NDArray[np.floating[Any]], array)))
        if len(rows) and array.shape[1:] > (1,):
            what = f"column {others[0][0]} of {what}" if array.ndim == 2 else what
        refuse_faults(dict.fromkeys(rows.tolist(), f"{what} has {_NO_VALUE}, or infinity"), array)


def is_frame(table: object) -> TypeGuard[_Frame]:
    """Return whether an object has named columns, as frames of pandas, polars and pyarrow do."""
    has_names = hasattr(table, "columns") or hasattr(table, "column_names")
    if not has_names or not hasattr(table, "__getitem__") or isinstance(table, Mapping):
        return False
    # A torch dataset may have any attributes.
    return not any(kind.__module__.startswith("torch.utils.data") for kind in type(table).__mro__)


def columns_by_name(frame: _Frame) -> dict[Hashable, ColumnLike]:
    """Return the columns of a frame in order; DataError if two have the same name."""
    column_names = getattr(frame, "column_names", None)
    names = list(getattr(frame, "columns", ()) if column_names is None else column_names)
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"two columns are named {name!r}; each must have its own name")
    return {name: frame[name] for name in names}


def _only_column(targets: ColumnLike) -> ColumnLike:
    """Return the column of a frame with a single one, and anything else unchanged."""
    columns = list(columns_by_name(targets).values()) if is_frame(targets) else []
    return columns[0] if len(columns) == 1 else targets


def _read_table(what: str, columns: Mapping[Hashable, ColumnLike]) -> tuple[Array, Faults]:
    """Read columns of numbers or booleans, [rows]; DataError names those of text or categories."""
    if not columns:
        raise DataError(f"{what} has no columns; it must have at least one")
    pairs = {n: read_column(f"column {n!r}", column, gaps=True) for n, column in columns.items()}
    arrays = {name: array for name, (array, _) in pairs.items()}
    texts = [
        name
        for name, array in arrays.items()
        if array.dtype.kind in "US" or categories_of(columns[name]) is not None
    ]
    if texts:
        raise DataError(_about_text(texts, arrays[texts[0]]))
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind == "c":
            shape = f"{array.dtype}{list(array.shape[1:])}"
            raise DataError(f"column {name!r} of {what} has {shape} per row; it must be one number")
    faults = {row: why for _, faulty in pairs.values() for row, why in faulty.items()}
    return np.stack([*arrays.values()], axis=1).astype(np.float32), faults


def _about_text(names: Sequence[Hashable], first: Array) -> str:
    """Return why columns cannot be inputs of a model, and a cure."""
    if (point := _numbers_as_text(first)) is not None:
        cure = "decimal=',' of pd.read_csv" if point == "," else f"df[{names[0]!r}].astype(float)"
        return f"column {names[0]!r} holds numbers as text; turn it into numbers, as {cure} does"
    subject = f"column {names[0]!r} holds" if len(names) == 1 else f"columns {names} hold"
    return (
        f"{subject} text or categories; a model needs numbers, as "
        f"pd.get_dummies(df, columns={names}) makes, or codes of categories for an embedding"
    )


def _numbers_as_text(texts: Array) -> str | None:
    """Return the decimal mark if all texts are numbers, "." by default; None otherwise."""
    distinct = np.unique(texts).astype(np.str_).tolist() if texts.dtype.kind in "US" else []
    try:
        for text in distinct:
            float(text.replace(",", "."))
    except ValueError:
        return None
    return ("," if any("," in text for text in distinct) else ".") if distinct else None


def categories_of(column: object) -> list[Any] | None:
    """Return the categories of a categorical column in order; None for other columns."""
    chunks = column.unify_dictionaries().chunks if hasattr(column, "unify_dictionaries") else []
    dictionary = getattr(chunks[0] if chunks else column, "dictionary", None)  # of pyarrow
    categories = getattr(getattr(column, "dtype", None), "categories", dictionary)
    if categories is None or not hasattr(categories, "__iter__"):
        return None
    return [category for category in as_numpy(categories).tolist() if str(category).strip()]


@dataclass(frozen=True)
class FrameRows:
    """The columns of a frame before they are read: inputs, targets and ids of users."""

    x: ColumnLike  # a table of columns, or one column of arrays
    y: ColumnLike  # a column, or a table of several
    ids: Array  # [rows]; [0] if the frame does not name users
    inputs: Hashable | list[Hashable]  # names of the columns of x
    groups: Mapping[str, ColumnLike]  # columns by which figures are grouped

    @classmethod
    def of(
        cls,
        what: str,
        frame: object,
        x: Hashable | list[Hashable],
        y: Hashable | list[Hashable],
        user: Hashable,
        by: Sequence[Hashable] = (),
    ) -> Self:
        """Find the columns that `Population.from_frame` names; `user` may be None."""
        if not is_frame(frame):
            kind = f"{what} is a {type(frame).__name__}"
            raise DataError(f"{kind}; it must be a table with named columns, as pandas has")
        columns = columns_by_name(frame)
        reserved = [*_listed(y), *([] if user is None else [user])]
        inputs = [name for name in columns if name not in (*reserved, *by)] if x is None else x
        for name in (*_listed(inputs), *reserved, *by):
            if name not in columns:
                hint = known_names(str(name), map(str, columns))
                raise DataError(f"{what} has no column {name!r}; {hint}")
            if name in reserved and name in _listed(inputs):
                raise DataError(f"column {name!r} is an input and y or user; it must be only one")
            if name in by and str(name) in ("x", "y") and name != y:
                raise DataError(f"by names a column {name!r}; its name must not be 'x' or 'y'")
        ids = np.empty(0, np.int64) if user is None else as_numpy(columns[user])
        values: ColumnLike = {name: columns[name] for name in _listed(inputs)}
        if not isinstance(inputs, list):
            array = as_numpy(columns[inputs])
            if array.ndim > 1 or any(isinstance(value, _NESTED) for value in array.tolist()):
                values = columns[inputs]
        groups = {str(name): columns[name] for name in by}
        targets = {name: columns[name] for name in y} if isinstance(y, list) else columns[y]
        return cls(values, targets, ids, inputs, groups)


def split_frame(frame: Any, ids: Array, share: float, seed: int) -> tuple[Any, Any]:
    """Return the rows of enrolled users, and those of a share of users in (0, 1), drawn by seed."""
    distinct = np.unique(ids)
    count = round(share * len(distinct))
    if not 0 < count < len(distinct):
        raise InvalidValueError(
            f"held_out is {share!r}, {count} of {len(distinct)} users; it must be a share in "
            "(0, 1) that leaves a user on each side"
        )
    is_held_out = np.isin(ids, np.random.default_rng(seed).permutation(distinct)[:count])
    select = frame.loc.__getitem__ if hasattr(frame, "loc") else frame.filter
    return select(~is_held_out), select(is_held_out)


def _listed(names: Hashable | list[Hashable]) -> list[Hashable]:
    return names if isinstance(names, list) else [names]


def numbered(
    users: Fields, test: Fields, classes: Classes | None
) -> tuple[dict[str, Array], dict[str, Array], tuple[str, ...] | None, Faults]:
    """Return users' and held-out fields as numbers, the names of classes in y, and users' faults.

    The number of a label is its place in `classes`, by default the sorted list of all texts in both
    fields y. If classes are texts and labels are integers, labels do not change, and the texts are
    their names. A user's label is a fault if it is missing (empty text is), outside the list, or a
    fraction although held-out labels are whole. DataError names a field with other text, or a
    held-out field with missing values or labels outside the list.
    """
    for place, fields in (("", users), ("held-out ", test)):
        for name, field in fields.items():
            if name not in users:  # it groups held-out rows, and is not an input
                continue
            what = f"{place}field {name!r}"
            if name != "y" and field.dtype.kind in "US":
                raise DataError(f"{what} holds text; give numbers, such as places in a public list")
            if place:  # a user with missing numbers counts as zero
                refuse_missing(what, field)
    users, test, faults = dict(users), dict(test), Faults()
    labels = [fields["y"] for fields in (users, test) if "y" in users.keys() & fields.keys()]
    texts = [column for column in labels if column.dtype.kind in "US"]
    if classes is None and texts:
        classes = [text for text in np.unique(np.concatenate(texts)).tolist() if text.strip()]
        if _numbers_as_text(np.array(classes)) is not None:
            raise DataError(
                "field 'y' holds numbers as text; turn them into numbers, as astype(float) does, "
                "or give classes, a list of these texts, if they are names"
            )
    names = None if classes is None else checked_classes(classes)
    if labels and labels[0].dtype.kind == "f":
        users["y"], faults = _as_held_out(labels[0], labels[-1])
    if classes is not None and labels:
        users["y"], label_faults = _places(users["y"], classes)
        faults = label_faults | faults
    if classes is not None and len(labels) > 1:
        test["y"], label_faults = _places(test["y"], classes)
        refuse_faults(label_faults, test["y"])
    return users, test, names, faults


def _as_held_out(labels: Any, held_out: Array) -> tuple[Array, Faults]:
    """Return float labels, in the type of held-out labels if those are whole, and faults."""
    whole = held_out.dtype.kind in "biu"  # float32 holds every whole number up to 2²⁴
    kind, largest = (held_out.dtype, 2**24) if whole else (labels.dtype, math.inf)
    with np.errstate(invalid="ignore"):
        array = labels.astype(kind, copy=False)
    rows = np.nonzero((array != labels) | (np.abs(labels) > largest))[0]
    other = ", or a fraction or a number beyond 24 bits, while held-out labels are whole"
    return array, dict.fromkeys(rows.tolist(), f"field 'y' has {_NO_VALUE}{other if whole else ''}")


def checked_classes(classes: object) -> tuple[str, ...]:
    """Return the names of classes; DataError unless they are a list of distinct names."""
    if isinstance(classes, str) or not isinstance(classes, Sequence | np.ndarray):
        raise DataError(f"classes are {classes!r}; they must be a list of labels")
    names = tuple(map(str, classes))
    if not names or len({name.strip() for name in names}) < len(names):
        raise DataError(
            f"classes are {list(names)}; there must be at least one, each once, and two must not "
            "differ only in spaces at their ends, which str.strip() of labels removes"
        )
    return names


def _places(labels: Array, classes: Classes) -> tuple[Array, Faults]:
    """Return the places of labels among the classes, 0 for faulty labels, and the faults.

    If classes are texts, numbers are places already; a task may ignore negative numbers.
    """
    why = f"field 'y' has no label, or one that is none of the classes {[*classes]}"
    if labels.dtype.kind not in "US" and all(isinstance(label, str) for label in classes):
        is_beyond = cast(NDArray[np.int64], labels) >= len(classes)
        return labels, dict.fromkeys(np.nonzero(is_beyond)[0].tolist(), f"{why}, numbered from 0")
    distinct, inverse = np.unique(labels, return_inverse=True)
    place_of = {label: place for place, label in enumerate(classes)}
    place_by_label = np.array([place_of.get(label, -1) for label in distinct.tolist()], np.int64)
    places = place_by_label[inverse].reshape(labels.shape)
    return places.clip(min=0), dict.fromkeys(np.nonzero(places < 0)[0].tolist(), why)


def read_npz(path: Path) -> dict[str, Array]:
    """Read all arrays of a file by name, without unpickling; errors quote no content."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = dict(file.items())
    # NumPy and zipfile raise errors of many classes, and their texts may quote the content.
    except Exception as error:
        raise DataError(f"{path} cannot be read as an .npz file of numbers or strings") from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            raise DataError(f"{name!r} in {path} is not an array whose first axis is the rows")
    return arrays
