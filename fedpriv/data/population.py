"""Users' data as columns: one array per field, the rows of each user together, and offsets.

A `UserStore` holds the rows of all users, in memory or mapped from a folder of .npy files:

    store.json          format, names of the fields, broken users
    offsets.npy         int64 [N + 1]
    user_ids.npy        [N], absent when a user's id is its position
    field-<name>.npy    one per field

A `Population` adds held-out rows and the name under which the privacy ledger knows the users.
"""

import json
import mmap
import secrets
import shutil
import unicodedata
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeAlias

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedpriv.data.columns import (
    Array,
    Classes,
    ColumnLike,
    Fields,
    FrameRows,
    Rows,
    as_numpy,
    categories_of,
    checked_classes,
    columns_by_name,
    columns_of,
    is_frame,
    numbered,
    read_column,
    refuse_masked,
    split_frame,
    to_array,
)
from fedpriv.errors import DataError, InvalidValueError
from fedpriv.support.checks import check_range, check_types, require
from fedpriv.support.disk import sync
from fedpriv.support.importing import call_imported, import_function

if TYPE_CHECKING:
    from fedpriv.data.arrays import Grouped

IdArray: TypeAlias = Array  # user ids, one per user or row, of a string or an integer dtype

HELD_OUT_USER = "held_out_user"
"""The field of held-out rows with the id of each row's user; user stores must not have it."""
ROW_OWNERS = "row_owners"
"""The field with the ids [rows, owners] of all owners of each row in a store.

The row is stored with its first owner; ids are repeated if a row has fewer owners than others.
"""
_COMPARED = 50_000  # rows to compare, of users and held out
_MISSING = {"nan", "None", "<NA>", "NaT"}  # missing ids, as text
_MISSING_NUMBER = np.iinfo(np.int64).min  # NaN, as an integer
_FORMAT = "fedpriv user store, version 1"
_LOADERS = {
    "digits": "fedpriv.data.builtin:load_digits",
    "hugging-face": "fedpriv.data.hugging_face:load_hugging_face",
    "synthetic": "fedpriv.data.builtin:synthetic_population",
}


@dataclass(frozen=True, eq=False, repr=False)
class UserStore:
    """The data of N users. The user at position i, 0 ≤ i < N, owns rows offsets[i]:offsets[i+1].

    Guarantees:
        * Every row is stored with exactly one user, and every user has exactly one position: the
          user is the unit of privacy, so enrolling a user twice would void the guarantee. So no two
          ids read alike (`plain_id`), and no id is empty, as missing ids in files are.
        * If a row belongs to several users, the field `ROW_OWNERS` names all of them; whole users
          are never drawn from such a store.
        * A user may have zero rows. Users who are `broken` have none: they count as zero on a node,
          and a simulation refuses them.
        * Arrays are held, not copied; memory-mapped fields stay memory-mapped.
        * repr shows fields and counts, never a user's id or data.

    Raises:
        DataError: the arrays do not fit these rules; the message says which and where.
    """

    fields: Fields  # names are Python identifiers
    offsets: NDArray[np.int64]  # [N + 1], from 0 to rows, never decreasing; read-only
    # N distinct ids, stored as a read-only array; None: each id is the user's position.
    user_ids: Sequence[str] | IdArray | None = None
    # By position of a user whose rows were left out: a sentence with the reason.
    broken: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        offsets = _checked_offsets(self.offsets, _checked_rows(self.fields)).view()
        offsets.flags.writeable = False
        object.__setattr__(self, "fields", dict(self.fields))
        object.__setattr__(self, "offsets", offsets)
        if self.user_ids is not None:
            object.__setattr__(self, "user_ids", _checked_ids(self.user_ids, self.population))
        if ROW_OWNERS in self.fields:
            _check_owners(self)

    def without(self, faults: Mapping[int, str]) -> Self:
        """Return the store without the rows of users who have a fault; `faults` are by row.

        DataError: there is a fault, and rows have several owners.
        """
        if not faults:
            return self
        broken = dict(self.broken)
        for row in sorted(faults):
            user = int(np.searchsorted(self.offsets, row, "right")) - 1
            place = f"row {row - self.offsets[user]} of user {self.id_of(user)!r}"
            broken.setdefault(user, f"{faults[row]}, in {place}")
        if ROW_OWNERS in self.fields:
            raise DataError(next(iter(broken.values())))
        whole = ~np.isin(np.arange(self.population), [*broken])
        selection = np.repeat(whole, self.sizes)
        fields = {name: column[selection] for name, column in self.fields.items()}
        return replace(self, fields=fields, offsets=offsets_of(self.sizes * whole), broken=broken)

    def refuse_broken(self) -> None:
        """Raise DataError if some user is broken; only a node lets such a user count as zero."""
        for why in self.broken.values():
            raise DataError(
                f"{why}; {len(self.broken)} of {self.population} users have rows with such faults: "
                "repair them, or leave them out, as dropna() of a frame does"
            )

    def __repr__(self) -> str:
        columns = ", ".join(f"{name}: {_per_row(rows)}" for name, rows in self.fields.items())
        return f"UserStore(population={self.population}, rows={self.rows}, fields={{{columns}}})"

    @property
    def population(self) -> int:
        """The number N of users, with or without rows."""
        return len(self.offsets) - 1

    @property
    def rows(self) -> int:
        """The number of rows of all users together."""
        return int(self.offsets[-1])

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The number of rows of each user, [N]; computed at each access."""
        return np.diff(self.offsets)

    def id_of(self, user: int) -> str:
        """Return the id of the user at a position; InvalidValueError if it is not a position."""
        self.rows_of(user)
        return str(user if self.user_ids is None else self.user_ids[user])

    def rows_of(self, user: int) -> slice:
        """Return the rows of the user at a position; InvalidValueError if it is not a position."""
        if check_count("user", user, least=0) >= self.population:
            raise InvalidValueError(f"user is {user}; it must be below {self.population}")
        return slice(int(self.offsets[user]), int(self.offsets[user + 1]))

    def examples_of(self, user: int) -> dict[str, Array]:
        """Return the fields of one user by name, [rows of the user, ...]: views of the store."""
        rows = self.rows_of(user)
        return {name: array[rows] for name, array in self.fields.items()}

    def take(self, rows: NDArray[np.integer], out: Fields | None = None) -> dict[str, Array]:
        """Return a copy of rows by number, of any shape: fields by name [*rows.shape, ...].

        Only these rows of a mapped field are read, and no page stays resident, so memory does not
        grow with the number of reads. `out` has the fields to read, and the arrays to fill.
        """
        _check_positions("rows", rows, self.rows)
        outputs = dict.fromkeys(self.fields) if out is None else out
        return {name: _gather(self.fields[name], rows, into) for name, into in outputs.items()}

    def subset(self, users: NDArray[np.integer] | Sequence[int]) -> "UserStore":
        """Return a store of users at distinct positions, with their ids and copies of rows."""
        positions = np.asarray(users, dtype=None if len(users) else np.int64)
        _check_positions("users", positions, self.population)
        require(positions.ndim == 1, f"users have shape {positions.shape}; they must be a list")
        starts = self.offsets[positions]
        sizes = self.offsets[positions + 1] - starts
        offsets = offsets_of(sizes)
        rows = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], sizes)
        ids = positions if self.user_ids is None else np.asarray(self.user_ids)[positions]
        olds = enumerate(positions.tolist())
        broken = {new: self.broken[old] for new, old in olds if old in self.broken}
        return UserStore(self.take(rows), offsets, ids, broken)

    def save(self, folder: str | Path) -> None:
        """Write the store to a new folder, which appears when all of it is on disk."""
        UserStore.save_parts(folder, [self])

    @staticmethod
    def save_parts(folder: str | Path, parts: Iterable["UserStore"]) -> None:
        """Write the users of several stores into one store, one store after the other.

        Parts are consumed lazily, so a generator can make a population larger than memory. A crash
        leaves a complete store or none. DataError if the folder exists or parts do not match.
        """
        place = Path(folder)
        if place.exists():
            raise DataError(f"{place} exists; a saved store is never overwritten")
        partial = place.with_name(f".{place.name}.{secrets.token_hex(8)}.partial")
        partial.mkdir(parents=True)
        try:
            _write_parts(partial, parts)
            for path in (*partial.iterdir(), partial):
                sync(path)
            partial.rename(place)
            sync(place.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    @classmethod
    def load(cls, folder: str | Path, *, mmap: bool = True) -> Self:
        """Open a saved store; with `mmap`, fields are mapped read-only and read on use."""
        place = Path(folder)
        names, with_ids, broken = _read_description(place / "store.json")
        fields = {name: _read_array(place / f"field-{name}.npy", mapped=mmap) for name in names}
        ids = _read_array(place / "user_ids.npy", mapped=False) if with_ids else None
        return cls(fields, _read_array(place / "offsets.npy", mapped=False), ids, broken)


@dataclass(frozen=True, eq=False)
class Population:
    """Enrolled users, and perhaps held-out rows on which models are evaluated.

    The privacy ledger identifies the population by its name, and the ledger is public. So the name
    contains public facts: N, the number of users, and settings such as names of data sets. It never
    contains a total or a digest of users' data, since guesses could be tested against these. A name
    that stays while the data change is safe: the ledger adds up the charges of both.
    """

    name: str  # one printable line, such as "digits: 287 users, iid, seed 0"
    users: UserStore  # the enrolled users' data; a task names the inputs and targets among them
    # Rows that no enrolled user trains on, with the fields, dtypes and row shapes of `users`. The
    # field `HELD_OUT_USER` may hold the id of each row's user, who is not enrolled.
    test: Fields = field(repr=False, default_factory=dict)
    # The names of the classes in y, in the order of their numbers; None: they have no names.
    classes: tuple[str, ...] | None = None
    classes_given: bool = True  # False: they are all labels in the rows, so they are not public
    # The name of an earlier population, whose ledger continues after users joined or left. Charges
    # of both add up; ε holds for users who stayed, and is larger than needed for others.
    succeeds: str | None = None
    projected: tuple[int, int | None] | None = None  # N' and the cohort of `as_if`

    def __post_init__(self) -> None:
        check_types(name=(self.name, str), users=(self.users, UserStore), test=(self.test, Mapping))
        if self.classes is not None:
            object.__setattr__(self, "classes", checked_classes(self.classes))
        if not self.name.strip() or not self.name.isprintable():
            raise DataError(f"population name {self.name!r} must be one printable line")
        if HELD_OUT_USER in self.users.fields:
            raise DataError(f"users have the field {HELD_OUT_USER!r}; only held-out rows may")
        if self.test:
            self._check_test()
        object.__setattr__(self, "test", dict(self.test))

    def as_if(self, users: int, cohort: int | None = None) -> "Population":
        """Return these users as a simulation of a larger population with `users` users, N'.

        Runs have the noise, the sampling probability and the budget of N' users, but train the
        actual users: in a round, as many as a cohort of N' has, at most all, or about `cohort`. So
        results are projections. (ε, δ) would hold if N' such users took part; it does not hold for
        the actual users, and results also state what does.
        """
        check_range("users of as_if", users, "whole")
        check_range("cohort of as_if", cohort, "whole?")
        return replace(self, projected=(users, cohort))

    @property
    def ledger_name(self) -> str:
        """The name in the ledger: the name of the first of successive populations."""
        return self.succeeds or self.name

    @property
    def copies(self) -> int:
        """The number of held-out rows that users have too; 0 if rows may be equal by chance."""
        if not self.test:
            return 0
        names = sorted(self.users.fields.keys() - {ROW_OWNERS})
        held_out, enrolled = (
            {*zip(*([v.tobytes() for v in fields[n][:_COMPARED]] for n in names), strict=True)}
            for fields in (self.test, self.users.fields)
        )
        copies, rows = len(held_out & enrolled), min(_COMPARED, *map(len, self.test.values()))
        return copies if copies > 0.1 * rows and len(held_out) > 0.9 * rows else 0

    @property
    def public_classes(self) -> tuple[str, ...]:
        """The public names of classes, by number; other classes have an empty name.

        Names are public if they were given. Otherwise those in held-out rows are public, and a
        last empty name stands for further classes that users may have.
        """
        if self.classes is None or self.classes_given:
            return self.classes or ()
        held_out = np.unique(self.test.get("y", np.empty(0))).tolist()
        names = (name if n in held_out else "" for n, name in enumerate(self.classes))
        return (*names, "")

    def _check_test(self) -> None:
        owners = self.test.get(HELD_OUT_USER)
        enrolled = {name: field for name, field in self.users.fields.items() if name != ROW_OWNERS}
        if not self.test.keys() >= enrolled.keys():  # additional fields may group the rows
            fields, names = sorted(self.test.keys() - {HELD_OUT_USER}), sorted(enrolled)
            sentence = f"test rows have the fields {fields}; they must have those of users, {names}"
            raise DataError(sentence)
        for name, array in self.test.items():
            check_types(**{f"test field {name!r}": (array, np.ndarray)})
            refuse_masked(f"test field {name!r}", array)
        if owners is not None:
            ids, users = self.users.user_ids, self.users.population
            check_not_enrolled(owners, range(users) if ids is None else ids)
        counts = {len(array) if array.ndim else 0 for array in self.test.values()}
        if len(counts) != 1 or 0 in counts:
            raise DataError(f"test fields have {sorted(counts)} rows; they must agree, above 0")
        for name, column in enrolled.items():
            check_like(f"test field {name!r}", self.test[name], "the users' is", column)

    @classmethod
    def from_arrays(
        cls,
        x: ColumnLike | Mapping[str, ColumnLike],
        y: ColumnLike,
        user_ids: ColumnLike,
        *,
        held_out: Rows | None = None,
        held_out_users: ColumnLike | None = None,
        owners: int | None = None,
        classes: Classes | None = None,
        name: str = "people",
    ) -> "Population":
        """Return a population of rows in any order, each with the id of its user.

        All columns are arrays, tensors, frames or nested lists, [rows, ...]. Ids must be all
        strings or all integers. Several inputs are columns by name, for a task with these names as
        `inputs`. `held_out` has inputs and targets of rows that belong to no user; without it, only
        private metrics measure models. Its inputs may be columns by name, including columns that
        users lack, for `Task.by`. `held_out_users` are the ids of their users, none of whom may be
        enrolled; with them, models are also measured by user. The name is public, since the ledger
        states it; the number of users is appended.

        Labels in y may be text. They become numbers, in the order of `classes`; by default these
        are the categories of y, or all its texts in order. The default is read from users' data,
        and reveals which labels occur, so give `classes` if that matters. DataError: another field
        holds text, or a column cannot be read. Users with missing or unknown labels, or other
        faults of `read_column`, are `broken`.

        A row may belong to several users, at most `owners`. Then `user_ids` has a list of ids for
        each row, the name says so, and examples can be drawn, but not whole users.

        >>> x, y = np.eye(4), ["no", "yes", "no", "yes"]
        >>> ids = ["ann", "bob", "ann", "eve"]
        >>> people = Population.from_arrays(x, y, ids, held_out=(x, y))
        >>> people.name, people.classes
        ('people: 3 users', ('no', 'yes'))
        """
        from fedpriv.data.arrays import from_arrays  # noqa: PLC0415 - it needs the store

        columns = columns_of((x, y))
        if isinstance(held_out, tuple) and is_frame(x) and is_frame(held_out[0]):
            one, other = ([*columns_by_name(frame)] for frame in (x, held_out[0]))
            if one != other:
                raise DataError(f"held-out columns are {other}, x has {one}; they must agree")
        users = from_arrays(columns, user_ids, owners)
        ordered = categories_of(columns["y"])
        return _with_held_out(name, users, held_out, held_out_users, classes, ordered)

    @classmethod
    def from_grouped(
        cls,
        users: "Grouped",
        *,
        held_out: Rows | None = None,
        held_out_users: ColumnLike | None = None,
        classes: Classes | None = None,
        name: str = "people",
    ) -> "Population":
        """Return a population of users' rows: a table by id, or a list without ids.

        A user's rows, and held-out rows, are a pair of inputs and targets, fields by name, or a
        torch dataset. Everything else is as in `from_arrays`.
        """
        from fedpriv.data.arrays import from_grouped  # noqa: PLC0415 - it needs the store

        return _with_held_out(name, from_grouped(users), held_out, held_out_users, classes)

    @classmethod
    def from_dataset(
        cls,
        dataset: Rows,
        user_ids: ColumnLike,
        *,
        held_out: Rows | None = None,
        held_out_users: ColumnLike | None = None,
        owners: int | None = None,
        classes: Classes | None = None,
        name: str = "people",
    ) -> "Population":
        """Return a population from a `torch.utils.data.Dataset`, with the id of each item's user.

        The dataset has a length. Its items are pairs (x, y), or dicts with fields by name. The
        values of all items have the same shape, and are kept in memory. Everything else is as in
        `from_arrays`.
        """
        from fedpriv.data.arrays import from_arrays  # noqa: PLC0415 - it needs the store

        users = from_arrays(columns_of(dataset, "the dataset"), user_ids, owners)
        return _with_held_out(name, users, held_out, held_out_users, classes)

    @classmethod
    def from_frame(
        cls,
        frame: ColumnLike,
        *,
        y: Hashable | list[Hashable],
        user: Hashable,
        x: Hashable | list[Hashable] = None,
        held_out: ColumnLike | float | None = None,
        seed: int = 0,
        by: Sequence[Hashable] = (),
        classes: Classes | None = None,
        name: str = "people",
    ) -> "Population":
        """Return a population from a frame of pandas, polars or pyarrow, with a row per example.

        * y: the column of targets, or a list of several columns of numbers.
        * user: the column with the id of each row's user.
        * x: a list of columns of numbers or booleans, by default all others, which become one
          input float32 [rows, columns]; or one column, whose values may be arrays.
        * held_out: another frame, of people who are not enrolled; or a share of the users in
          (0, 1), who are drawn with the seed and are then not enrolled.
        * by: columns of held-out rows that group figures, see `Task.by`; by default they are not
          inputs.

        Everything else is as in `from_arrays`. DataError names a column that is absent or holds
        text.
        """
        from fedpriv.data.arrays import from_columns  # noqa: PLC0415 - it needs the store

        if isinstance(held_out, int | float):
            ids = as_id_array(FrameRows.of("the frame", frame, x, y, user, by).ids)
            frame, held_out = split_frame(frame, ids, held_out, seed)
        of_users = [name for name in by if is_frame(frame) and name in columns_by_name(frame)]
        rows, other = FrameRows.of("the frame", frame, x, y, user, of_users), None
        if held_out is not None:
            id_column = user if is_frame(held_out) and user in columns_by_name(held_out) else None
            other = FrameRows.of("the frame held_out", held_out, rows.inputs, y, id_column, by)
        columns = {"x": read_column("x", rows.x), "y": read_column(f"column {y!r}", rows.y)}
        users = from_columns(columns, rows.ids)
        test = None if other is None else ({"x": other.x, **other.groups}, other.y)
        owners = other.ids if other is not None and len(other.ids) else None
        return _with_held_out(name, users, test, owners, classes, categories_of(rows.y))


def _with_held_out(
    name: str,
    users: UserStore,
    rows: Rows | None,
    owners: ColumnLike | None,
    classes: Classes | None,
    categories: Classes | None = None,
) -> Population:
    """Return a population with held-out rows, and the ids of their users if they are known."""
    check_types(name=(name, str))
    columns = {} if rows is None else columns_of(rows, "held-out rows")
    test = {field: to_array(f"held-out field {field!r}", c) for field, c in columns.items()}
    if owners is not None:
        test[HELD_OUT_USER] = as_id_array(as_numpy(owners))
    full_name = f"{name}: {users.population} users{sharing(users)}"
    return numbered_population(full_name, users, test, classes, categories)


def numbered_population(
    name: str,
    users: UserStore,
    test: Fields,
    classes: Classes | None,
    categories: Classes | None = None,
) -> Population:
    """Return a population whose labels are numbered by classes, or by categories without them."""
    public = classes is not None
    with_ids = ROW_OWNERS, HELD_OUT_USER
    fields, rows = (
        {name: column for name, column in columns.items() if name not in with_ids}
        for columns in (users.fields, test)
    )
    fields, rows, names, faults = numbered(fields, rows, classes if public else categories)
    if any(column is not users.fields[field] for field, column in fields.items()):
        users = replace(users, fields={**users.fields, **fields})
    return Population(name, users.without(faults), {**test, **rows}, names, public)


def cut_up(population: Population, rows: int, called: str) -> Population:
    """Return a population in which each piece of `rows` consecutive rows of a user is a record.

    A user's last piece may have fewer rows, and a user without rows has no pieces. Rows are not
    copied. Ids are "user/number", from 0; `called` is added to the population's name.
    """
    users = population.users
    pieces = -(-users.sizes // rows)
    last = np.cumsum(pieces)
    number = np.arange(last[-1]) - np.repeat(last - pieces, pieces)
    starts = np.repeat(users.offsets[:-1], pieces) + rows * number
    ids = np.arange(users.population) if users.user_ids is None else np.asarray(users.user_ids)
    owners = np.repeat(_narrow(np.char.add(ids.astype(np.str_), "/")), pieces)
    ids_of_pieces = np.char.add(owners, _narrow(number.astype(np.str_)))
    fields = {field: column for field, column in users.fields.items() if field != ROW_OWNERS}
    store = UserStore(fields, np.append(starts, users.rows), ids_of_pieces)
    succeeds = population.succeeds and f"{population.succeeds}; {called}"
    return replace(population, name=f"{population.name}; {called}", users=store, succeeds=succeeds)


def sharing(users: UserStore) -> str:
    """Return the end of the population's name if rows have several owners, "" otherwise."""
    if ROW_OWNERS not in users.fields:
        return ""
    owners = users.fields[ROW_OWNERS].shape[1]
    return f"; rows have up to {owners} owners, and who owns which is public"


def load_population(name: str, options: Mapping[str, object]) -> Population:
    """Load a population by a loader's name or "package.module:function"; the function is run.

    Options are keyword arguments, checked against the function's signature first. For an error that
    is not fedpriv's own, only type and line are reported, because its text may hold users' data.
    """
    what = f"population {name!r}"
    loader = import_function(what, name, DataError, _LOADERS)
    population = call_imported(what, loader, options, DataError)
    if not isinstance(population, Population):
        raise DataError(f"{name} must return a Population, not {type(population).__name__}")
    return population


def check_count(name: str, value: object, least: int = 1) -> int:
    """Return `value` as an int; InvalidValueError unless it is a whole number ≥ `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        limit = f"a whole number of at least {least}"
        raise InvalidValueError(f"{name} is {value!r}; it must be {limit}")
    return int(value)


def check_like(what: str, rows: Array, others: str, like: Array) -> None:
    """Raise DataError unless the rows of two arrays fit into the same field."""
    # Types rather than dtypes, because strings of different widths fit each other.
    kind, other = ((a.dtype.type, a.dtype.isnative, a.shape[1:]) for a in (rows, like))
    if kind != other:
        kinds = f"{what} is {_per_row(rows)} per row; {others} {_per_row(like)}"
        raise DataError(f"{kinds}; give both one dtype and shape, as by np.asarray(x, np.float32)")


def offsets_of(sizes: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the offsets [N + 1] of users with these numbers of rows [N]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def spread_over(offsets: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """Return whether each row belongs to a share of its user's rows, spread evenly: [rows].

    Row j of a user, from 0, belongs to it if ⌊(j + 1)·share⌋ > ⌊j·share⌋.
    """
    number = np.arange(offsets[-1]) - np.repeat(offsets[:-1], np.diff(offsets))
    return np.floor((number + 1) * share) > np.floor(number * share)


def as_id_array(ids: Sequence[object] | Array) -> IdArray:
    """Turn user ids [n] into an array of strings or of integers; DataError if they are neither.

    NumPy would merge or split users: it converts mixed, missing (None, NaN, masked), float and bool
    ids, and drops null characters at the ends of strings.
    """
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes | Set | Mapping):
        kind = f"user ids are of the type {type(ids).__name__}"
        raise DataError(f"{kind}; they must be a list, one id per row")
    if isinstance(ids, np.ndarray) and ids.ndim != 1:
        raise DataError(f"user ids have shape {ids.shape}; they must be one-dimensional")
    if isinstance(ids, np.ndarray) and ids.dtype.kind in "iuU" and not np.ma.isMaskedArray(ids):
        return ids
    values = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    for position, value in enumerate(values):
        if not isinstance(value, str) and str(value) in _MISSING:
            raise _missing(position, value)
    kinds = str if values and isinstance(values[0], str) else (int, np.integer)
    for position, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, kinds):
            place = f"user id number {position} is {value!r}"
            raise DataError(f"{place}; ids must be all strings or all integers")
        if isinstance(value, str) and value.endswith("\0"):
            raise DataError(f"user id number {position} is {value!r}; it must not end in a null")
    array = np.array(values) if values else np.empty(0, dtype=np.str_)
    if array.dtype.kind not in "iuU":
        raise DataError("user ids hold an integer beyond 64 bits; write such ids as strings")
    return array


def ids_of_rows(ids: Sequence[object] | Array) -> IdArray:
    """Return `as_id_array` of the owners of rows; DataError if one was made of a missing id."""
    array = as_id_array(ids)
    missing = (
        np.isin(array, list(_MISSING)) if array.dtype.kind == "U" else array == _MISSING_NUMBER
    )
    if missing.any():
        raise _missing(int(missing.argmax()), array[missing][0])
    return array


def _missing(position: int, value: object) -> DataError:
    place = f"user id number {position} is {value}, which stands for a missing id"
    return DataError(f"{place}; leave out rows without an id, since they would become one user")


def plain_id(user: object) -> str:
    """Return an id as people read it: in Unicode form NFC, without spaces at its ends."""
    return unicodedata.normalize("NFC", str(user)).strip()


def check_not_enrolled(owners: Sequence[object] | Array, enrolled: Iterable[object]) -> None:
    """Raise DataError if an owner of held-out rows is enrolled; ids are compared by `plain_id`.

    No guarantee covers figures of an enrolled user.
    """
    if common := {*map(plain_id, np.unique(as_id_array(owners)))} & {*map(plain_id, enrolled)}:
        count = f"held-out rows name {len(common)} of the enrolled users"
        raise DataError(f"{count}; they must not belong to an enrolled user")


def _narrow(texts: NDArray[np.str_]) -> NDArray[np.str_]:
    """Return the strings in an array as wide as the longest of them."""
    narrow: NDArray[np.str_] = texts.astype(f"U{np.char.str_len(texts).max(initial=1)}")
    return narrow


def _checked_ids(ids: Sequence[str] | IdArray, users: int) -> IdArray:
    array = as_id_array(ids).view()
    if len(array) != users:
        raise DataError(f"there are {len(array)} user ids for {users} users; they must agree")
    distinct, counts = np.unique(array, return_counts=True)
    if len(distinct) < users:
        repeated = str(distinct[counts > 1][0])
        raise DataError(f"user id {repeated!r} occurs twice; each user must occur once")
    if array.dtype.kind == "U":
        _check_read_apart(array.tolist())
    array.flags.writeable = False
    return array


def _check_read_apart(ids: list[str]) -> None:
    """Raise DataError if an id is empty, or if two ids read alike."""
    plains = [*map(plain_id, ids)]
    if "" in plains:
        blank = ids[plains.index("")]
        raise DataError(f"user id {blank!r} is empty; every row must name its user")
    if plains == ids:  # ids are distinct
        return
    first: dict[str, str] = {}
    for form, user in zip(plains, ids, strict=True):
        if (previous := first.setdefault(form, user)) != user:
            pair = f"user ids {previous!r} and {user!r} differ in spaces or Unicode's form alone"
            raise DataError(f"{pair}; each user must occur once")


def _check_owners(users: UserStore) -> None:
    """Raise DataError unless each row names enrolled users, first the one that stores it."""
    owners, ids = users.fields[ROW_OWNERS], users.user_ids
    if owners.ndim != 2 or owners.shape[1] < 2 or ids is None:
        shape = owners.shape
        raise DataError(f"field {ROW_OWNERS!r} has shape {shape}, not ids of several users per row")
    if not np.isin(owners, ids).all():
        raise DataError(f"field {ROW_OWNERS!r} names a user who is not enrolled; all must be")
    if (owners[:, 0] != np.repeat(np.asarray(ids), users.sizes)).any():
        raise DataError(f"field {ROW_OWNERS!r} must first name the user with whom a row is stored")


def _checked_rows(fields: Fields) -> int:
    for name, column in fields.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise DataError(f"field name {name!r} is not a Python identifier")
        if not isinstance(column, np.ndarray) or column.ndim == 0:
            raise DataError(f"field {name!r} is a {type(column).__name__}, not an array of rows")
        refuse_masked(f"field {name!r}", column)
        if column.dtype.hasobject:
            raise DataError(f"field {name!r} has dtype {column.dtype}, not of numbers or strings")
    rows = {len(column) for column in fields.values()}
    if not rows:
        raise DataError("a user store has no field; it needs at least one")
    if len(rows) > 1:
        counts = ", ".join(f"{name} {len(column)}" for name, column in fields.items())
        raise DataError(f"fields have different numbers of rows ({counts}); they must agree")
    return rows.pop()


def _checked_offsets(offsets: Array, rows: int) -> NDArray[np.int64]:
    array = np.asarray(offsets)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        shape = array.shape
        raise DataError(f"offsets have dtype {array.dtype} and shape {shape}, not [N + 1] integers")
    if array.size < 2:
        raise DataError("a user store has no users; it needs at least one")
    cuts: NDArray[np.int64] = array.astype(np.int64, copy=False)
    if cuts[0] != 0 or cuts[-1] != rows:
        raise DataError(f"offsets run from {cuts[0]} to {cuts[-1]}; they must run from 0 to {rows}")
    falls = np.flatnonzero(cuts[1:] < cuts[:-1])
    if falls.size:
        raise DataError(f"offsets decrease after user {falls[0]}; they must never decrease")
    return cuts


def _check_positions(name: str, positions: NDArray[np.integer], end: int) -> None:
    # NumPy would read -1 as the last row, which belongs to another user.
    if positions.dtype.kind not in "iu":
        raise InvalidValueError(f"{name} have dtype {positions.dtype}; they must be integers")
    if positions.size and not (positions.min() >= 0 and positions.max() < end):
        interval = f"[{positions.min()}, {positions.max()}]"
        raise InvalidValueError(f"{name} lie in {interval}; they must lie in [0, {end})")


def _per_row(rows: Array) -> str:
    return f"{rows.dtype}{list(rows.shape[1:])}"


def _gather(column: Array, rows: NDArray[np.integer], out: Array | None) -> Array:
    """Return a copy of legal rows of a field; pages of a mapped field do not stay resident."""
    mapping = column.base if isinstance(column, np.memmap) and column.mode == "r" else None
    if isinstance(mapping, mmap.mmap) and rows.size and column.strides[0]:
        _read_ahead(mapping, column.offset % mmap.ALLOCATIONGRANULARITY, column.strides[0], rows)
    # Rows are legal; with mode "raise" NumPy would buffer the output.
    gathered: Array = np.take(np.asarray(column), rows, axis=0, out=out, mode="clip")
    if isinstance(mapping, mmap.mmap):
        mapping.madvise(mmap.MADV_DONTNEED)
    return gathered


def _read_ahead(mapping: mmap.mmap, start: int, size: int, rows: NDArray[np.integer]) -> None:
    """Request the pages of all rows at once; otherwise there would be a wait for each page."""
    ordered = np.sort(rows.astype(np.int64), axis=None)
    pages = (start + ordered * size) // mmap.PAGESIZE
    ends = (start + (ordered + 1) * size - 1) // mmap.PAGESIZE + 1
    gaps = np.flatnonzero(pages[1:] > ends[:-1])
    firsts = pages[np.append(0, gaps + 1)] * mmap.PAGESIZE
    lengths = ends[np.append(gaps, -1)] * mmap.PAGESIZE - firsts
    for first, length in zip(firsts.tolist(), lengths.tolist(), strict=True):
        mapping.madvise(mmap.MADV_WILLNEED, first, length)


def _write_parts(folder: Path, parts: Iterable[UserStore]) -> None:
    """Write all files of a store; one part is in memory at a time."""
    forms, files = dict[str, Array](), dict[str, BinaryIO]()
    sizes, ids, broken = list[NDArray[np.int64]](), list[IdArray](), dict[int, str]()
    with ExitStack() as opened:
        for part in parts:
            for name, column in part.fields.items() if not sizes else ():
                forms[name] = np.empty((0, *column.shape[1:]), column.dtype)
                # Mode "x": two fields whose names differ only in case must not share a file.
                files[name] = opened.enter_context((folder / f"field-{name}.npy").open("xb"))
                _write_header(files[name], forms[name], 0)
            if part.fields.keys() != forms.keys():
                raise DataError(f"parts have the fields {list(forms)} and {list(part.fields)}")
            for name, column in part.fields.items():
                if (one := _per_row(forms[name])) != (other := _per_row(column)):
                    sentence = f"field {name!r} is {one} per row in one part, {other} in another"
                    raise DataError(sentence)
                np.ascontiguousarray(column).tofile(files[name])
            first_user = sum(map(len, sizes))
            broken |= {first_user + user: why for user, why in part.broken.items()}
            sizes.append(part.sizes)
            ids += [] if part.user_ids is None else [as_id_array(part.user_ids)]
        if not sizes:
            raise DataError("a user store has no users; it needs at least one")
        offsets = offsets_of(np.concatenate(sizes))
        for name, file in files.items():
            _write_header(file, forms[name], int(offsets[-1]))
    np.save(folder / "offsets.npy", offsets)
    if ids:
        np.save(folder / "user_ids.npy", _joined_ids(ids, len(sizes), len(offsets) - 1))
    facts = {"format": _FORMAT, "fields": [*forms], "user_ids": bool(ids), "broken": broken}
    (folder / "store.json").write_text(json.dumps(facts, indent=1))


def _write_header(file: BinaryIO, like: Array, rows: int) -> None:
    """Write the header of an .npy file; its length is the same for any number of rows."""
    header = npy.header_data_from_array_1_0(like) | {"shape": (rows, *like.shape[1:])}
    file.seek(0)
    npy.write_array_header_1_0(file, header)


def _joined_ids(ids: list[IdArray], parts: int, users: int) -> IdArray:
    if len(ids) < parts:
        raise DataError(f"{len(ids)} of {parts} parts have user ids; all must have them, or none")
    # NumPy would turn 1 and "1" into strings, and signed and unsigned integers into floats.
    kinds = {part.dtype.kind: str(part.dtype) for part in ids}
    if len(kinds) > 1:
        raise DataError(f"parts have user ids of {' and '.join(kinds.values())}, not of one kind")
    return _checked_ids(np.concatenate(ids), users)


def _read_description(path: Path) -> tuple[list[str], bool, dict[int, str]]:
    """Return the names of the fields, whether users have ids, and reasons of broken users."""
    if not path.is_file():
        raise DataError(f"{path.parent} is not a saved user store: it has no store.json")
    try:
        facts = json.loads(path.read_text())
        version, names = facts["format"], [*map(str, facts["fields"])]
        broken = {int(user): str(why) for user, why in facts["broken"].items()}
        with_ids = bool(facts["user_ids"])
    except (ValueError, TypeError, KeyError, AttributeError):
        version = None
    if version != _FORMAT or not all(name.isidentifier() for name in names):
        raise DataError(f"{path} has the format {version!r}; this program reads {_FORMAT!r}")
    return names, with_ids, broken


def _read_array(path: Path, *, mapped: bool) -> NDArray[Any]:
    try:
        array: NDArray[Any] = np.load(path, mmap_mode="r" if mapped else None)
    except (ValueError, EOFError) as error:  # NumPy's text may quote the content
        raise DataError(f"{path} cannot be read as an array of numbers or strings") from error
    if isinstance(array.base, mmap.mmap):
        # Users of a cohort are scattered; otherwise each read would load unused pages nearby.
        array.base.madvise(mmap.MADV_RANDOM)
    return array
