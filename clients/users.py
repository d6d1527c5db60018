"""The users that a node hosts: their data, and the ids by which they are enrolled.

If the sites share a key, which the server must not have, a user's id is the HMAC-SHA256 (RFC 2104)
of an identifier that several sites know, such as an insurance number: `keyed_id`. A person at two
sites then has one id, so an enrolment refuses the second. Neither the sites nor the server learn
who the users of another site are.
"""

import hmac
import logging
import re
import secrets
import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import tomli_w
from numpy.typing import NDArray

from fedpriv.data.arrays import from_arrays, from_readers
from fedpriv.data.columns import read_npz
from fedpriv.data.population import Population, UserStore, plain_id
from fedpriv.errors import DataError, InvalidValueError
from fedpriv.support.importing import call_imported, import_function, raised_at
from fedpriv.wire.naming import check_user_id, read_key

_log = logging.getLogger(__name__)

_IDS = "user_id"
_KEY = re.compile(r"[0-9a-f]{64}\n?")


def load_users(source: str) -> UserStore:
    """Read the users that a node hosts; DataError if that is not possible.

    No data are unpickled. A user with rows that cannot be read is `broken` and counts as zero; all
    others count. Errors contain no user's data, but may name a user, and a FedprivError of a
    function passes unchanged, so only the node's operator should see them.

    The source is one of:
        * a folder saved by `UserStore.save`; its fields are mapped into memory, not read;
        * a folder with a file ID.npz of fields for each user, who may have zero rows;
        * an .npz file of fields and `user_id`, the id of each row's user, in any order;
        * if no such file exists, "package.module:function". The function is called without
          arguments and returns a `UserStore`, or a `Population` whose users are used.
    """
    path = Path(source)
    try:
        if not is_file(source):
            return _from_function(source)
        return UserStore.load(path) if (path / "store.json").exists() else _from_files(path)
    except OSError as error:
        raise DataError(f"users {source!r} cannot be read: {error.strerror}") from error


def is_file(source: str) -> bool:
    """Return whether a source of users is a folder or file; DataError if it does not exist."""
    if not (exists := Path(source).exists()) and ":" not in source:
        choices = "a folder, an .npz file and package.module:function"
        raise DataError(f"users {source!r} do not exist; legal are {choices}")
    return exists


def _from_files(path: Path) -> UserStore:
    fields = None if path.is_dir() else read_npz(path)
    try:
        if fields is not None:
            if _IDS not in fields:
                raise DataError(f"there is no field {_IDS!r}, the id of each row's user")
            ids = fields.pop(_IDS)
            return from_arrays(fields, ids)
        files = sorted(path.iterdir())
        for file in files:
            if file.suffix != ".npz" or not file.is_file():
                raise DataError(f"{file.name} is not an .npz file")
        return from_readers((file.stem, partial(read_npz, file)) for file in files)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _from_function(path: str) -> UserStore:
    source = f"users {path!r}"
    function = import_function(source, path, DataError)
    try:
        loaded = call_imported(source, function, {}, DataError)
    except (OSError, MemoryError) as error:  # the text of the error may contain users' data
        raise DataError(f"{source} cannot be made: {raised_at(error)}") from error
    if isinstance(loaded, Population) and loaded.classes and not loaded.classes_given:
        raise DataError(
            f"{path} numbers its classes by the labels of this node's own users, and other nodes "
            "may do it differently; give classes=[...], a public list that all nodes share"
        )
    users = loaded.users if isinstance(loaded, Population) else loaded
    if not isinstance(users, UserStore):
        returned = f"{path} returned a {type(users).__name__}"
        raise DataError(f"{returned}; it must return a UserStore or a Population")
    return users


def enrolled_positions(store: UserStore, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position in the enrolled population of each user of a store, int64 [N].

    `positions` has one entry per user, in the order of the ids, sorted by code points.
    InvalidValueError: there are more or fewer positions than users.
    """
    if len(positions) != store.population:
        counts = f"there are {len(positions)} positions for {store.population} users"
        raise InvalidValueError(f"{counts}; the users enrolled at a node must be those it holds")
    ids = [store.id_of(user) for user in range(store.population)]
    enrolled = np.empty(store.population, np.int64)
    enrolled[sorted(range(len(ids)), key=ids.__getitem__)] = positions
    return enrolled


def make_id_key(path: Path) -> None:
    """Write a random key of 32 bytes to a new file with mode 0600.

    OSError: the file exists or cannot be written.
    """
    path.touch(mode=0o600, exist_ok=False)
    path.write_text(f"{secrets.token_hex(32)}\n", encoding="ascii")


def _id_key(path: Path) -> bytes:
    """Return the key in a file; InvalidValueError if there is none, or others can read it."""
    text = read_key(path).decode("ascii", "replace")
    if not _KEY.fullmatch(text):
        raise InvalidValueError(f"{path} holds no key of `fedpriv id-key`, 64 hexadecimal digits")
    return bytes.fromhex(text)


def keyed_id(identifier: str, key: bytes) -> str:
    """Return the HMAC-SHA256 of an identifier, as 64 hexadecimal digits.

    The identifier is first trimmed, case-folded and normalised to NFC, then encoded as UTF-8.
    InvalidValueError: it is empty or not one printable line.
    """
    folded = unicodedata.normalize("NFC", plain_id(identifier).casefold())
    folded = check_user_id(folded, "an identifier")
    return hmac.digest(key, folded.encode(), "sha256").hex()


def hosted_users(source: str, id_key: Path | None) -> UserStore:
    """Return the users of `load_users`, with keyed ids if the file of a key is given.

    DataError: the users cannot be read, have no ids, or two of their identifiers are equivalent.
    InvalidValueError: the key or an identifier is invalid.
    """
    if id_key is None:
        return load_users(source)
    key, users = _id_key(id_key), load_users(source)
    if users.user_ids is None:
        raise DataError(f"users {source!r} have no ids; keyed ids are made of them")
    identifier_of: dict[str, str] = {}
    for identifier in map(str, users.user_ids):
        twin = identifier_of.setdefault(keyed_id(identifier, key), identifier)
        if twin != identifier:
            pair = f"users {twin!r} and {identifier!r} of {source!r} have one identifier"
            raise DataError(f"{pair} but for case, spaces or Unicode form; each must occur once")
    return replace(users, user_ids=[*identifier_of])


def enrolment_toml(
    sources: Sequence[str], nodes: Sequence[tuple[str, str | None]], id_key: Path | None
) -> str:
    """Return the tables of the server's enrolment for nodes that host the users of these sources.

    `nodes` holds the name of each node, and the fingerprint of its certificate if it has one. The
    log names a user who is broken.
    FedprivError: an id is invalid, or a user is in two of the sources.
    """
    tables: dict[str, dict[str, object]] = {}
    source_of: dict[str, str] = {}  # by id, in the form that `plain_id` returns
    for source, (node, fingerprint) in zip(sources, nodes, strict=True):
        if node in tables:
            raise InvalidValueError(f"node {node!r} is given twice; each of the data is of its own")
        users = hosted_users(source, id_key)
        for reason in [*users.broken.values()][:1]:
            _log.warning("users of %s who count as zero: %d; %s", source, len(users.broken), reason)
        ids = [users.id_of(user) for user in range(users.population)]
        for user in ids:
            check_user_id(user, f"a user of {source!r}")
        if shared := [user for user in ids if plain_id(user) in source_of]:
            example = f"{shared[0]!r} is in {source!r} and in {source_of[plain_id(shared[0])]!r}"
            raise DataError(
                f"{example}, as one of {len(shared)} users of both; each must be enrolled once"
            )
        source_of |= dict.fromkeys(map(plain_id, ids), source)
        tables[node] = {"users": sorted(ids)}
        if fingerprint is not None:
            tables[node]["certificate"] = fingerprint
    return tomli_w.dumps({"nodes": tables})
