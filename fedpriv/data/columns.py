"""Columns as people have them, turned into arrays that a model can train on.

They come from lists, arrays, tensors, frames, torch datasets and .npz files. A frame is anything
with named columns, as in pandas, polars and pyarrow; neither these packages nor torch are imported.
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias, TypeGuard, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import DataError, InvalidValueError, known_names

Array: TypeAlias = NDArray[np.generic]
Fields: TypeAlias = Mapping[str, Array]  # by field name; the first axis of each is the rows
Classes: TypeAlias = Sequence[str | int | float | bool]
"""Labels in the order of their numbers, from 0."""


@runtime_checkable
class _Tensor(Protocol):
    # As much of torch.Tensor as is used here.
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


ColumnLike: TypeAlias = (
    Array | _Tensor | Sequence[object] | _Frame
)  # values of a field, [rows, ...]
Rows: TypeAlias = (
    Mapping[str, ColumnLike] | tuple[ColumnLike | Mapping[str, ColumnLike], ColumnLike] | _Dataset
)
"""Rows with all of their fields: by name, as a pair of inputs and targets, or as a dataset."""

_NUMBERS = (int, float, np.number, np.bool_)
_NESTED = (list, tuple, np.ndarray, _Tensor)
_MISSING = ("NoneType", "NAType", "NaTType")  # of Python and pandas


def columns_of(rows: Rows, what: str = "rows") -> dict[str, ColumnLike]:
    """The fields of rows, by name: those of a pair are its inputs, x unless named, and y.

    The items of a dataset are such pairs, or have fields by name; without items there is no field.
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
    named = dict(inputs) if isinstance(inputs, Mapping) else {"x": inputs}
    if "y" in named:
        raise DataError("an input is named 'y'; it must have another name than the targets")
    return {**named, "y": _only_column(targets)}


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
    names = sorted(items[0]) if items else []
    for number, item in enumerate(items):
        if sorted(item) != names:
            problem = f"item {number} of the dataset has the fields {sorted(item)}"
            raise DataError(f"{problem}; others have {names}")
    return {name: _stacked(f"field {name!r}", [item[name] for item in items]) for name in names}


def _fields_of_item(item: object) -> Mapping[str, object]:
    if isinstance(item, Mapping):
        return item
    if isinstance(item, tuple | list) and len(item) == 2:
        return {"x": item[0], "y": item[1]}
    kind = f"a {type(item).__name__}" + (f" of {len(item)}" if isinstance(item, tuple) else "")
    raise DataError(f"an item of the dataset is {kind}; it must be a pair (x, y) or a dict")


def _stacked(what: str, values: list[Any]) -> ColumnLike:
    """Values of items as one column; those of more than one number must be alike in shape."""
    arrays = [as_numpy(value) for value in values]
    for number, array in enumerate(arrays):
        if array.shape != arrays[0].shape:
            raise DataError(
                f"{what} has shape {list(array.shape)} in row {number} and "
                f"{list(arrays[0].shape)} in row 0; rows must have one shape, so pad or crop them"
            )
    return np.stack(arrays) if arrays[0].ndim else [array.item() for array in arrays]


def as_numpy(column: Any) -> Array:
    """An array or tensor without a copy where possible, anything else as NumPy takes it."""
    return column.detach().cpu().numpy() if isinstance(column, _Tensor) else np.asarray(column)


def to_array(what: str, column: ColumnLike) -> Array:
    """Turn a column into an array of numbers or of text, [rows, ...].

    Floats become float32, as parameters are, and unsigned integers of more than 8 bits int64. What
    fits already is not copied. Objects may be numbers and booleans, texts, or arrays of one shape.
    The columns of a frame become one array, see `matrix`. DataError names what cannot train.
    """
    if is_frame(column):
        return matrix(what, columns_by_name(column))
    refuse_masked(what, column)
    try:
        array = as_numpy(column)
        if array.dtype.kind in "UT" and not isinstance(column, np.ndarray):
            array = np.array(column, object)  # NumPy would turn numbers among texts into text
    except (TypeError, ValueError) as error:
        raise DataError(f"{what} cannot be an array: {error}") from error
    if array.dtype.kind == "O":
        array = _of_objects(what, array)
    match array.dtype.kind:
        case "f":
            return array.astype(np.float32, copy=False)
        case "u" if array.dtype.itemsize > 1:
            if array.size and array.max() > np.iinfo(np.int64).max:
                raise DataError(f"{what} holds an integer beyond 63 bits; use smaller numbers")
            return array.astype(np.int64)
        case "T":
            return array.astype(np.str_)
        case "M" | "m":
            raise DataError(f"{what} holds times; give numbers, such as days since a public date")
        case kind if kind in "biucUS":
            return array.astype(array.dtype.newbyteorder("="), copy=False)
    raise DataError(f"{what} has dtype {array.dtype}; give numbers, or text for classes")


def _of_objects(what: str, objects: Array) -> Array:
    """Objects as numbers, or as text if all are; DataError if some are missing or neither."""
    if objects.ndim == 0:
        value = objects.item()
        cure = "its toarray()" if hasattr(value, "toarray") else "an array, a tensor or a list"
        type_name = type(value).__name__
        raise DataError(f"{what} is a {type_name}; give {cure}, with a value for each row")
    values = objects.ravel().tolist()
    rows = np.repeat(np.arange(len(objects)), len(values) // max(len(objects), 1))
    missing = [_is_missing(value) for value in values]
    _refuse_missing_rows(what, np.unique(rows[missing]).size, len(objects))
    if values and all(isinstance(value, _NESTED) for value in values):
        return to_array(what, _stacked(what, values))
    if all(isinstance(value, str) for value in values):
        return np.array(objects.tolist(), np.str_)
    for row, value in zip(rows.tolist(), values, strict=True):
        if not isinstance(value, _NUMBERS):
            kind = type(value).__name__
            raise DataError(f"{what} has a value of the type {kind} in row {row}; give numbers")
    numbers = np.array(objects.tolist())
    if numbers.dtype.kind == "O":
        raise DataError(f"{what} holds an integer beyond 64 bits; use smaller numbers")
    return numbers


def _is_missing(value: object) -> bool:
    return type(value).__name__ in _MISSING or (isinstance(value, float) and math.isnan(value))


def refuse_masked(what: str, column: object) -> None:
    """Raise DataError for values of which some may be missing, which are numbers all the same."""
    if np.ma.isMaskedArray(column):
        raise DataError(f"{what} is a masked array; fill what is missing, or leave out these rows")


def refuse_missing(what: str, array: Array) -> None:
    """Raise DataError if numbers are NaN, as missing ones of a frame are."""
    if array.dtype.kind == "f" and array.size:
        missing = np.isnan(cast(NDArray[np.floating[Any]], array)).reshape(len(array), -1).any(1)
        _refuse_missing_rows(what, int(missing.sum()), len(array))


def _refuse_missing_rows(what: str, missing: int, rows: int) -> None:
    if missing:
        raise DataError(
            f"{what} has no value (None or NaN) in {missing} of {rows} rows; leave out these rows, "
            "as dropna() of a frame does, or fill them in"
        )


def is_frame(table: object) -> TypeGuard[_Frame]:
    """Whether something has named columns, as frames of pandas, polars and pyarrow have."""
    named = hasattr(table, "columns") or hasattr(table, "column_names")
    if not named or not hasattr(table, "__getitem__") or isinstance(table, Mapping):
        return False
    # A dataset of torch may have any attributes.
    return not any(kind.__module__.startswith("torch.utils.data") for kind in type(table).__mro__)


def columns_by_name(frame: _Frame) -> dict[Hashable, ColumnLike]:
    """The columns of a frame, in their order; DataError if two have one name."""
    listed = getattr(frame, "column_names", None)
    names = list(getattr(frame, "columns", ()) if listed is None else listed)
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"two columns are named {name!r}; each must have its own name")
    return {name: frame[name] for name in names}


def _only_column(targets: ColumnLike) -> ColumnLike:
    """The column of a frame that has one alone; anything else as it is."""
    columns = list(columns_by_name(targets).values()) if is_frame(targets) else []
    return columns[0] if len(columns) == 1 else targets


def matrix(what: str, columns: Mapping[Hashable, ColumnLike]) -> NDArray[np.float32]:
    """Columns of numbers or booleans, [rows] each, as float32 [rows, columns].

    Missing numbers are NaN. DataError names the columns that hold text or categories.
    """
    if not columns:
        raise DataError(f"{what} is made of no columns; there must be at least one")
    arrays = {name: to_array(f"column {name!r}", column) for name, column in columns.items()}
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
    return np.stack([*arrays.values()], axis=1).astype(np.float32)


def _about_text(names: Sequence[Hashable], first: Array) -> str:
    """Why columns cannot be inputs of a model, and what to do."""
    if (point := _numbers_as_text(first)) is not None:
        how = "decimal=',' of pd.read_csv" if point == "," else f"df[{names[0]!r}].astype(float)"
        return f"column {names[0]!r} holds numbers as text; turn it into numbers, as {how} does"
    which = f"column {names[0]!r} holds" if len(names) == 1 else f"columns {names} hold"
    return (
        f"{which} text or categories; a model needs numbers, as "
        f"pd.get_dummies(df, columns={names}) makes, or codes of categories for an embedding"
    )


def _numbers_as_text(texts: Array) -> str | None:
    """The decimal mark if all texts are numbers, "." where there is none; None if they are not."""
    distinct = np.unique(texts).astype(np.str_).tolist() if texts.dtype.kind in "US" else []
    try:
        for text in distinct:
            float(text.replace(",", "."))
    except ValueError:
        return None
    return ("," if any("," in text for text in distinct) else ".") if distinct else None


def categories_of(column: object) -> list[Any] | None:
    """The categories of a categorical column, in their order; None for any other column."""
    kinds = getattr(getattr(column, "dtype", None), "categories", None)
    return None if kinds is None or not hasattr(kinds, "__iter__") else list(kinds)


@dataclass(frozen=True)
class FrameRows:
    """Inputs, targets and ids of users in the rows of a frame."""

    x: Array  # [rows, columns] float32, or values of one column [rows, ...]
    y: Array  # [rows], or [rows, columns] of several
    ids: Array  # [rows]; [0] if the frame does not name users
    inputs: Hashable | list[Hashable]  # names of the columns of x
    categories: list[Any] | None  # of y, if it is categorical
    groups: Mapping[str, Array]  # columns by which figures are grouped: [rows] each

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
        """Read a frame, see `Population.from_frame`; without `user` its users have no names."""
        if not is_frame(frame):
            kind = f"{what} is a {type(frame).__name__}"
            raise DataError(f"{kind}; it must be a table with named columns, as of pandas")
        columns = columns_by_name(frame)
        others = [*_listed(y), *([] if user is None else [user])]
        inputs = [name for name in columns if name not in (*others, *by)] if x is None else x
        for name in (*_listed(inputs), *others, *by):
            if name not in columns:
                known = known_names(str(name), map(str, columns))
                raise DataError(f"{what} has no column {name!r}; {known}")
            if name in others and name in _listed(inputs):
                raise DataError(f"column {name!r} is an input and y or user; it must be one")
        ids = np.empty(0, np.int64) if user is None else as_numpy(columns[user])
        missing = sum(map(_is_missing, ids.tolist()))
        _refuse_missing_rows(f"column {user!r}, which names users,", missing, len(ids))
        targets, values = _named(columns, y), _named(columns, inputs)
        if values.ndim == 1:
            values = matrix("x", {name: columns[name] for name in _listed(inputs)})
        categories = None if isinstance(y, list) else categories_of(columns[y])
        groups = {str(name): to_array(f"column {name!r}", columns[name]) for name in by}
        return cls(values, targets, ids, inputs, categories, groups)

    def split(self, share: float, seed: int) -> tuple[Self, Self]:
        """Rows of most users, and rows of a share of them in (0, 1) that the seed draws."""
        distinct = np.unique(self.ids)
        drawn = round(share * len(distinct))
        if not 0 < drawn < len(distinct):
            raise InvalidValueError(
                f"held_out is {share!r}, {drawn} of {len(distinct)} users; it must be a share in "
                "(0, 1) that leaves a user on each side"
            )
        apart = np.isin(self.ids, np.random.default_rng(seed).permutation(distinct)[:drawn])
        kept, drawn_rows = (
            replace(self, x=self.x[rows], y=self.y[rows], ids=self.ids[rows], groups=groups)
            for rows in (~apart, apart)
            for groups in [{name: column[rows] for name, column in self.groups.items()}]
        )
        return kept, drawn_rows


def _listed(names: Hashable | list[Hashable]) -> list[Hashable]:
    return names if isinstance(names, list) else [names]


def _named(columns: Mapping[Hashable, ColumnLike], names: Hashable | list[Hashable]) -> Array:
    """Several columns as a matrix, or one as it is."""
    if isinstance(names, list):
        return matrix(f"a field of {names}", {name: columns[name] for name in names})
    return to_array(f"column {names!r}", columns[names])


def numbered(
    users: Fields, test: Fields, classes: Classes | None
) -> tuple[dict[str, Array], dict[str, Array], tuple[str, ...] | None]:
    """Users' and held-out fields as numbers, and the names of the classes in y, if it has names.

    Labels are numbered by their places in `classes`, by default in the sorted list of all texts in
    both; integers stay where classes are texts, which are then their names. DataError names a field
    with other text, with missing values, or with a label that is not in the list.
    """
    for place, fields in (("", users), ("held-out ", test)):
        for name, field in fields.items():
            if name not in users:  # by which held-out rows are grouped, not trained
                continue
            what = f"{place}field {name!r}"
            if name != "y" and field.dtype.kind in "US":
                raise DataError(f"{what} holds text; give numbers, such as places in a public list")
            if place:  # a user without some numbers counts as zero, and nobody else does
                refuse_missing(what, field)
    labels = [fields["y"] for fields in (users, test) if "y" in fields]
    texts = [each for each in labels if each.dtype.kind in "US"]
    if classes is None:
        if not texts:
            return dict(users), dict(test), None
        if _numbers_as_text(np.concatenate(texts)) is not None:
            raise DataError(
                "field 'y' holds numbers as text; turn them into numbers, as astype(float) does, "
                "or give classes, a list of these texts, if they are names"
            )
        classes = np.unique(np.concatenate(texts)).tolist()
    names = checked_classes(classes)
    if not texts and all(isinstance(label, str) for label in classes):
        return dict(users), dict(test), names
    place_of = {label: place for place, label in enumerate(classes)}
    new_users, new_test = dict(users), dict(test)
    for fields in (new_users, new_test):
        if "y" in fields:
            fields["y"] = _places("field 'y'", fields["y"], place_of)
    return new_users, new_test, names


def checked_classes(classes: object) -> tuple[str, ...]:
    """The names of classes; DataError unless they are a list of distinct ones."""
    if isinstance(classes, str) or not isinstance(classes, Sequence | np.ndarray):
        raise DataError(f"classes are {classes!r}; they must be a list of labels")
    names = tuple(map(str, classes))
    if not names or len({name.strip() for name in names}) < len(names):
        raise DataError(
            f"classes are {list(names)}; there must be at least one, each once, and not again with "
            "other spaces at its ends, which str.strip() of labels takes away"
        )
    return names


def _places(what: str, labels: Array, place_of: Mapping[Any, int]) -> NDArray[np.int64]:
    distinct, inverse = np.unique(labels, return_inverse=True)
    for label in distinct.tolist():
        if label not in place_of:
            rows = np.flatnonzero((labels == label).reshape(len(labels), -1).any(1))
            raise DataError(
                f"{what} has a label in row {rows[0]} that is none of the classes "
                f"{list(place_of)}; add it to them, or leave out such rows"
            )
    places = np.array([place_of[label] for label in distinct.tolist()], np.int64)
    return places[inverse].reshape(labels.shape)


def read_npz(path: Path) -> dict[str, Array]:
    """Read all arrays of a file into memory, by name; nothing is unpickled or quoted in errors."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = dict(file.items())
    # NumPy and zipfile raise many kinds of errors, and their text may quote the content.
    except Exception as error:
        raise DataError(f"{path} cannot be read as an .npz file of numbers or strings") from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            raise DataError(f"{name!r} in {path} is not an array whose first axis is the rows")
    return arrays
