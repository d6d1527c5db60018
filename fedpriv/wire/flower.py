"""What a message on Flower's runtime holds: our own protobuf messages, and tensors, as records.

Headers are serialised messages of `fedpriv.wire`; the tensors that one of them declares follow as
bytes, as `fedpriv.wire.pieces` gives them. Both sides must run the same version of fedpriv.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedpriv import __version__
from fedpriv.data.population import UserStore
from fedpriv.errors import WireError
from fedpriv.privacy.layout import Tensors
from fedpriv.wire import Manifest, Receiver, chunks, pieces
from fedpriv.wire.codec import MAX_NAME, at_most, refusing

OFFER, ANSWER, HELLO, WELCOME = "offer", "answer", "hello", "welcome"  # headers: wire messages
SIMULATED, TROUBLE = "simulated", "trouble"  # headers: a `Simulated`, and why a node cannot join
_RECORD = "fedpriv"
_VERSION = "version"
_RAW = "bytes"  # neither side lets Flower read the tensors by itself
_BYTES_AT_ONCE = 2**24


@dataclass(frozen=True)
class Simulated:
    """A population that every worker of a simulation can load by itself."""

    name: str  # as `fedpriv.data.population.load_population` reads it
    options: Mapping[str, object]  # of the loader
    device: str
    chunk_mebibytes: int  # memory that a chunk of users may take, roughly
    activations: str = "float32"

    def encode(self) -> bytes:
        """The header; raises WireError for an option that JSON does not have."""
        with refusing("the options of a population"):
            return json.dumps(vars(self), allow_nan=False).encode()

    @classmethod
    def decode(cls, header: bytes) -> Self:
        """The population of a header; raises WireError for any other header."""
        with refusing("a population"):
            return cls(**json.loads(header))


def shard_of(population: int, worker: int, workers: int) -> range:
    """Positions of the users at a worker, counted from 0, of a simulation: even shares in order."""
    return range(population * worker // workers, population * (worker + 1) // workers)


def digest_of_shard(population: str, users: UserStore, shard: range) -> bytes:
    """What a worker of a simulation says of its users, so that all load the same: 32 bytes.

    Any other population, ids, fields, rows or numbers of rows of the shard's users give another
    digest. Guesses of users' data can be tested against it: it is for workers and server alone.
    """
    fields, ids = sorted(users.fields.items()), [users.id_of(user) for user in shard]
    cuts = users.offsets[shard.start : shard.stop + 1].tolist()
    kinds = [(name, field.dtype.str, field.shape[1:]) for name, field in fields]
    said = (population, ids, [cut - cuts[0] for cut in cuts], kinds)
    digest = hashlib.sha256(json.dumps(said).encode())
    row_bytes = sum(field.nbytes for _, field in fields) // max(1, users.rows)
    at_once = 1 + _BYTES_AT_ONCE // (1 + row_bytes)
    for first in range(cuts[0], cuts[-1], at_once):
        rows = users.take(np.arange(first, min(first + at_once, cuts[-1])))
        for name, _ in fields:
            digest.update(rows[name].tobytes())
    return digest.digest()


def packed(tensors: Tensors) -> Array:
    """Tensors as the bytes that their manifest declares; several messages may share them."""
    data = b"".join(pieces(tensors))
    return Array(dtype="uint8", shape=(len(data),), stype=_RAW, data=data)


def content_of(headers: Mapping[str, bytes], tensors: Array | None = None) -> RecordDict:
    """The content of a message: serialised messages by name, and the tensors that one declares."""
    content = RecordDict({_RECORD: ConfigRecord({_VERSION: __version__, **headers})})
    if tensors is not None:
        content[_RECORD + ".tensors"] = ArrayRecord({_RECORD: tensors})
    return content


def header_in(content: RecordDict, name: str, most: int) -> bytes | None:
    """The header of a name in a message of this version of fedpriv, if there is one; total."""
    record = content.get(_RECORD)
    if not isinstance(record, ConfigRecord):
        raise WireError("a message holds no record of fedpriv")
    version = str(record.get(_VERSION))
    if version != __version__:
        both = f"{version[:MAX_NAME]!r}, this side {__version__!r}; both must be the same"
        raise WireError(f"the other side runs fedpriv {both}")
    header = record.get(name)
    if header is None:
        return None
    if not isinstance(header, bytes):
        raise WireError(f"header {name!r} holds no bytes")
    at_most(f"bytes in header {name!r}", len(header), most)
    return header


def tensors_in(content: RecordDict, manifest: Manifest) -> dict[str, npt.NDArray[np.generic]]:
    """The tensors that a header has declared, read-only; total, or raises WireError."""
    arrays = content.get(_RECORD + ".tensors")
    array = arrays.get(_RECORD) if isinstance(arrays, ArrayRecord) else None
    if array is None:
        raise WireError("the tensors of a message are missing")
    at_most("bytes of tensors", len(array.data), manifest.size)
    receiver = Receiver(manifest)
    for chunk in chunks([array.data]):
        receiver.add(chunk)
    return receiver.finish()
