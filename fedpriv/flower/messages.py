"""What messages on Flower's runtime hold, and how they are exchanged.

Their content is records. Headers are serialised messages of `fedpriv.wire`; the tensors that one of
them declares follow as bytes, as `fedpriv.wire.pieces` gives them. Both sides must run the same
version of fedpriv.
"""

import hashlib
import json
import queue
import threading
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedpriv import __version__
from fedpriv.data.population import UserStore
from fedpriv.errors import WireError
from fedpriv.privacy.clipping import Clipping, IntegerVector
from fedpriv.privacy.layout import Layout, Tensors
from fedpriv.wire import NODE_RECEIVES_BYTES, Manifest, Receiver, chunks, parse, pieces
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.codec import MAX_NAME, at_most, refusing
from fedpriv.wire.messages import CLIPPING, SUM

if TYPE_CHECKING:
    from flwr.serverapp import Grid  # nodes have no use for it

CLIPPED, USERS = "clipping", "users"  # headers: a clipping, and numbers of users at the node
OFFER, ANSWER, HELLO, TASK = "offer", "answer", "hello", "task"  # headers: wire messages
SIMULATED, TROUBLE = "simulated", "trouble"  # headers: a `Simulated`, and why a worker cannot join
RECORD = "fedpriv"  # name of the record of headers
TENSORS = RECORD + ".tensors"  # and of that of tensors
_VERSION = "version"
_RAW = "bytes"  # neither side lets Flower read the tensors by itself
_BYTES_AT_ONCE = 2**24
_FIRST_POLL_SECONDS = 0.005
_POLL_GROWTH = 1.2  # so that a reply is noticed within a fifth of the time that it took
_LONGEST_POLL_SECONDS = 0.5
_STOP_CHECK_SECONDS = 0.2

Reply = tuple[str, Message | str]  # key of a message; its reply, or why there is none


@dataclass(frozen=True)
class Simulated:
    """A population that every worker of a simulation can load by itself."""

    name: str  # as `fedpriv.data.population.load_population` reads it
    options: Mapping[str, object]  # of the loader
    device: str
    chunk_mebibytes: int | None  # memory that a chunk of users may take, roughly
    activations: str = "float32"
    path: Literal["auto", "alone", "together"] = "auto"  # as `engine.path`

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
    content = RecordDict({RECORD: ConfigRecord({_VERSION: __version__, **headers})})
    if tensors is not None:
        content[TENSORS] = ArrayRecord({RECORD: tensors})
    return content


def header_in(content: RecordDict, name: str, most: int) -> bytes | None:
    """The header of a name in a message of this version of fedpriv, if there is one; total."""
    record = content.get(RECORD)
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
    arrays = content.get(TENSORS)
    array = arrays.get(RECORD) if isinstance(arrays, ArrayRecord) else None
    if array is None:
        raise WireError("the tensors of a message are missing")
    at_most("bytes of tensors", len(array.data), manifest.size)
    receiver = Receiver(manifest)
    for chunk in chunks([array.data]):
        receiver.add(chunk)
    return receiver.finish()


def asking(clipping: Clipping, users: npt.NDArray[np.int64]) -> RecordDict:
    """The content of a message for the mod of an app: whom to train, and how to clip each."""
    said = CLIPPING.encode(clipping).SerializeToString()
    return content_of({CLIPPED: said, USERS: users.astype("<i8").tobytes()})


def asked(content: RecordDict) -> tuple[Clipping, npt.NDArray[np.int64]]:
    """What a message asks for, each user once; total, or raises WireError."""
    said = header_in(content, CLIPPED, NODE_RECEIVES_BYTES)
    users = header_in(content, USERS, NODE_RECEIVES_BYTES)
    if said is None or users is None or len(users) % 8:
        raise WireError("a message does not say whom to train and how to clip")
    numbers = np.frombuffer(users, "<i8").astype(np.int64)
    if np.unique(numbers).size < numbers.size:
        raise WireError("a message asks for a user twice")
    return CLIPPING.decode(parse(pb.Clipping, said, NODE_RECEIVES_BYTES)), numbers


def summed(total: IntegerVector) -> RecordDict:
    """The content of an answer that is the sum [D] of contributions."""
    return content_of({}, packed({SUM: total}))


def sum_in(content: RecordDict, dimension: int) -> IntegerVector:
    """The sum of such an answer; total, or raises WireError."""
    header_in(content, SUM, 0)  # of another version, it is refused
    manifest = Manifest(Layout((SUM,), ((dimension,),)), np.dtype("<i8"))
    return tensors_in(content, manifest)[SUM].astype(np.int64, copy=False)


def _trouble(reply: Message) -> str:
    if reply.has_error():
        return f"error {reply.error.code} of Flower"
    return "" if reply.has_content() else "it holds nothing"


def exchange(
    grid: "Grid",
    messages: Iterable[tuple[str, Message]],
    deadline: float,
    stopping: threading.Event,
) -> Generator[Reply, None, None]:
    """Send messages by key, and yield the reply to each as it comes.

    A message that the grid does not take, as for a node that has gone, has no reply; the others
    have one at most, with content, whatever their nodes send again, and none after the deadline
    (on the clock of `time.monotonic`) or the stop. Each reply has a thread of its own: a pull for
    several messages waits for the slowest, and a node that dies in mid-upload holds it for minutes,
    whatever its timeout. A thread that Flower holds up does not keep the process alive.
    """
    over, replies = threading.Event(), queue.SimpleQueue[Reply]()

    def await_reply(key: str, message_id: str) -> None:
        pause = _FIRST_POLL_SECONDS
        while not over.is_set():
            try:
                for reply in grid.pull_messages([message_id]):
                    if reply.metadata.reply_to_message_id == message_id:
                        replies.put((key, _trouble(reply) or reply))
                        return
            except Exception as error:  # of the connection, or of bytes that are not a message
                replies.put((key, f"its reply cannot be received: {type(error).__name__}"))
                return
            over.wait(pause)
            pause = min(_POLL_GROWTH * pause, _LONGEST_POLL_SECONDS)

    outstanding = 0
    try:
        for key, message in messages:
            # A grid may leave out the ids of messages that it does not take: so one at a time.
            for message_id in filter(None, grid.push_messages([message])):
                threading.Thread(target=await_reply, args=(key, message_id), daemon=True).start()
                outstanding += 1
        while outstanding and not stopping.is_set() and (left := deadline - monotonic()) > 0.0:
            try:
                reply = replies.get(timeout=min(left, _STOP_CHECK_SECONDS))
            except queue.Empty:
                continue
            outstanding -= 1
            yield reply
    finally:
        over.set()
