"""A user store as a folder of .npy files that is either whole or not there.

    store.json          format, version, names of the fields
    offsets.npy         int64 [N + 1]
    user_ids.npy        [N], absent when a user's id is the position
    field-<name>.npy    one per field

Version 1 is the only version; a reader refuses every version it does not know.
"""

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.growing import GrowingArray
from fedpriv.data.ids import IdArray, as_id_array, first_duplicate
from fedpriv.errors import DataError

_FORMAT = "fedpriv user store"
_VERSION = 1

Columns: TypeAlias = tuple[
    Mapping[str, NDArray[np.generic]], NDArray[np.int64], Sequence[str] | IdArray | None
]
"""Fields, offsets and user ids: the arguments of a UserStore."""


def write_store(folder: Path, parts: Iterable[Columns]) -> None:
    """Write parts, one after another, beside the final place, flush to disk, then rename.

    Of the fields, one part is in memory at a time.

    Args:
        folder: final place; its parents are made.
        parts: users of each part with their rows, as of a UserStore.

    Raises:
        DataError: `folder` exists, there is no part, fields differ among parts, or an id occurs
            twice or in some parts alone.
    """
    if folder.exists():
        raise DataError(f"{folder} exists; a saved store is never overwritten")
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.partial")
    partial.mkdir(parents=True)
    try:
        description = {"format": _FORMAT, "version": _VERSION} | _write_parts(partial, parts)
        with (partial / "store.json").open("x") as file:
            json.dump(description, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _flush_folder(partial)
        partial.rename(folder)
        _flush_folder(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_parts(folder: Path, parts: Iterable[Columns]) -> dict[str, object]:
    """Write all arrays; returns what the description says of them."""
    columns: dict[str, GrowingArray] = {}
    sizes: list[NDArray[np.int64]] = []
    ids: list[IdArray | None] = []
    with ExitStack() as files:
        for fields, offsets, user_ids in parts:
            if not sizes:
                # "x": two fields whose names differ in case only must not share a file.
                columns = {
                    name: files.enter_context(GrowingArray.create(folder / f"field-{name}.npy"))
                    for name in fields
                }
            if fields.keys() != columns.keys():
                raise DataError(f"parts have the fields {list(columns)} and {list(fields)}")
            for name, field in fields.items():
                columns[name].append(field)
            sizes.append(np.diff(offsets))
            ids.append(None if user_ids is None else as_id_array(user_ids))
    if not sizes:
        raise DataError("a user store has no users; it needs at least one")
    _write_array(folder / "offsets.npy", np.cumsum(np.concatenate([np.zeros(1, np.int64), *sizes])))
    known = [part for part in ids if part is not None]
    if known:
        _write_array(folder / "user_ids.npy", _together(known, len(ids)))
    return {"fields": list(columns), "user_ids": bool(known)}


def _together(ids: list[IdArray], parts: int) -> IdArray:
    if len(ids) < parts:
        raise DataError(f"{len(ids)} of {parts} parts have user ids; all must have them, or none")
    # 1 and "1" must not meet, and NumPy makes floats of signed and unsigned integers.
    if len({part.dtype.kind for part in ids}) > 1:
        kinds = sorted({str(part.dtype) for part in ids})
        raise DataError(f"parts have user ids of {' and '.join(kinds)}; they must be of one kind")
    together = np.concatenate(ids)
    twice = first_duplicate(together)
    if twice is not None:
        raise DataError(f"user id {twice!r} occurs twice; a user must have one place in the store")
    return together


def read_store(folder: Path, *, mapped: bool) -> Columns:
    """Read what `write_store` wrote; with `mapped`, fields are read-only np.memmap arrays.

    Raises:
        DataError: the folder is absent, not a store, of an unknown version, or damaged.
    """
    description = _read_description(folder)
    names = description.get("fields")
    if not isinstance(names, list) or not all(
        isinstance(n, str) and n.isidentifier() for n in names
    ):
        raise DataError(f"{folder / 'store.json'} names the fields {names!r}; not a list of names")
    fields = {name: _read_array(folder / f"field-{name}.npy", mapped=mapped) for name in names}
    cuts = _read_array(folder / "offsets.npy", mapped=False)
    if cuts.dtype.kind != "i":
        raise DataError(f"{folder / 'offsets.npy'} has dtype {cuts.dtype}; it must be int64")
    offsets: NDArray[np.int64] = cuts.astype(np.int64, copy=False)
    if not description.get("user_ids"):
        return fields, offsets, None
    return fields, offsets, as_id_array(_read_array(folder / "user_ids.npy", mapped=False))


def _read_description(folder: Path) -> dict[str, object]:
    path = folder / "store.json"
    if not path.is_file():
        raise DataError(f"{folder} is not a saved user store: it has no store.json")
    try:
        description = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(description, dict) or description.get("format") != _FORMAT:
        raise DataError(f"{path} does not describe a user store")
    version = description.get("version")
    if version != _VERSION:
        raise DataError(f"{path} has version {version!r}; this program reads version {_VERSION}")
    return description


def _write_array(path: Path, array: NDArray[np.generic]) -> None:
    with GrowingArray.create(path) as file:
        file.append(array)


def _read_array(path: Path, *, mapped: bool) -> NDArray[np.generic]:
    try:
        array: NDArray[np.generic] = np.load(path, mmap_mode="r" if mapped else None)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataError(f"{path} cannot be read: {reason}") from error
    except (ValueError, EOFError) as error:  # NumPy's text may quote the content
        raise DataError(f"{path} cannot be read as an array of numbers or strings") from error
    return array


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
