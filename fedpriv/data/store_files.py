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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.ids import IdArray, as_id_array
from fedpriv.errors import DataError

_FORMAT = "fedpriv user store"
_VERSION = 1

Columns: TypeAlias = tuple[dict[str, NDArray[np.generic]], NDArray[np.int64], IdArray | None]
"""Fields, offsets and user ids: the arguments of a UserStore."""


def write_store(
    folder: Path,
    fields: Mapping[str, NDArray[np.generic]],
    offsets: NDArray[np.int64],
    user_ids: Sequence[str] | IdArray | None,
) -> None:
    """Write the folder beside its final place, flush it to disk, then rename it.

    Args:
        folder: final place; its parents are made.
        fields: name → array [rows, ...].
        offsets: int64 [N + 1].
        user_ids: [N] ids or None.

    Raises:
        DataError: `folder` exists.
    """
    if folder.exists():
        raise DataError(f"{folder} exists; a saved store is never overwritten")
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.partial")
    partial.mkdir(parents=True)
    description = {"format": _FORMAT, "version": _VERSION, "fields": list(fields)}
    description["user_ids"] = user_ids is not None
    try:
        _write_array(partial / "offsets.npy", offsets)
        if user_ids is not None:
            _write_array(partial / "user_ids.npy", as_id_array(user_ids))
        for name, field in fields.items():
            _write_array(partial / f"field-{name}.npy", field)
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


def read_store(folder: Path, *, mmap: bool) -> Columns:
    """Read what `write_store` wrote; with `mmap`, fields are read-only np.memmap arrays.

    Raises:
        DataError: the folder is absent, not a store, of an unknown version, or damaged.
    """
    description = _read_description(folder)
    names = description.get("fields")
    if not isinstance(names, list) or not all(
        isinstance(n, str) and n.isidentifier() for n in names
    ):
        raise DataError(f"{folder / 'store.json'} names the fields {names!r}; not a list of names")
    fields = {name: _read_array(folder / f"field-{name}.npy", mmap=mmap) for name in names}
    cuts = _read_array(folder / "offsets.npy", mmap=False)
    if cuts.dtype.kind != "i":
        raise DataError(f"{folder / 'offsets.npy'} has dtype {cuts.dtype}; it must be int64")
    offsets: NDArray[np.int64] = cuts.astype(np.int64, copy=False)
    if not description.get("user_ids"):
        return fields, offsets, None
    return fields, offsets, as_id_array(_read_array(folder / "user_ids.npy", mmap=False))


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
    # "x": two fields whose names differ in case only must not share a file.
    with path.open("xb") as file:
        np.save(file, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def _read_array(path: Path, *, mmap: bool) -> NDArray[np.generic]:
    try:
        array: NDArray[np.generic] = np.load(path, mmap_mode="r" if mmap else None)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    return array


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
