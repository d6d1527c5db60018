"""The content of messages on Flower's runtime, and their exchange.

A message to an app's mod has two parts, a serialised clipping of `fedpriv.wire` and numbers of
users, and its answer holds the bytes of a sum. A simulation and its workers, which run on one
cluster of Ray, trust each other and send pickled values: the `Config`, then the worker's share of
the population, or the request of a round and the users of the request who are in the share. Both
sides must run the same version of fedpriv.
"""

import hashlib
import json
import queue
import threading
from collections.abc import Generator, Iterable
from time import monotonic
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from fedpriv import __version__
from fedpriv.data.population import UserStore
from fedpriv.errors import WireError
from fedpriv.privacy.clipping import Clipping, IntegerVector
from fedpriv.wire import NODE_RECEIVES_BYTES, parse
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.codec import MAX_NAME
from fedpriv.wire.messages import CLIPPING

if TYPE_CHECKING:
    from flwr.serverapp import Grid  # which nodes do not use

RECORD = "fedpriv"  # name of the record with the version and parts of a message
ARRAY = RECORD + ".array"  # name of the record with a sum
_VERSION, _PARTS = "version", "parts"
_RAW = "bytes"  # a format that Flower does not decode
_FIRST_POLL_SECONDS = 0.005
_POLL_GROWTH = 1.2  # a reply is noticed after at most a fifth of the time that it took
_LONGEST_POLL_SECONDS = 0.5
_STOP_CHECK_SECONDS = 0.2

Reply = tuple[int, Message | str]  # the node that was asked, and its reply or why there is none


def digest_of_shard(population: str, users: UserStore, shard: range) -> bytes:
    """Return 32 bytes by which the server checks that a worker has loaded the same users.

    They depend on the population's name and on the ids, fields and rows of the shard's users. Only
    workers and the server may see a digest, because it lets its readers test guesses of the data.
    """
    fields = sorted(users.fields.items())
    kinds = [(name, field.dtype.str, field.shape[1:]) for name, field in fields]
    digest = hashlib.sha256(json.dumps([population, kinds]).encode())
    for user in shard:
        rows = users.rows_of(user)
        digest.update(json.dumps([users.id_of(user), rows.stop - rows.start]).encode())
        for _, field in fields:
            digest.update(field[rows].tobytes())
    return digest.digest()


def content_of(*parts: bytes) -> RecordDict:
    """Return the content of a message of some parts."""
    return RecordDict({RECORD: ConfigRecord({_VERSION: __version__, _PARTS: [*parts]})})


def parts_in(content: RecordDict) -> list[bytes]:
    """Return the parts of a message; WireError: it is not from this version of fedpriv."""
    record = content.get(RECORD)
    if not isinstance(record, ConfigRecord):
        raise WireError("a message holds no record of fedpriv")
    version, parts = str(record.get(_VERSION)), record.get(_PARTS)
    if version != __version__:
        versions = f"{version[:MAX_NAME]!r}, this side {__version__!r}; both must be the same"
        raise WireError(f"the other side runs fedpriv {versions}")
    if not isinstance(parts, list) or not all(isinstance(part, bytes) for part in parts):
        raise WireError("the parts of a message are not bytes")
    return cast(list[bytes], parts)


def asking(clipping: Clipping, users: npt.NDArray[np.int64]) -> RecordDict:
    """Return the content of a message to an app's mod, with the users to train and the clipping."""
    encoded = CLIPPING.encode(clipping).SerializeToString()
    return content_of(encoded, users.astype("<i8").tobytes())


def asked(content: RecordDict) -> tuple[Clipping, npt.NDArray[np.int64]]:
    """Return the clipping and the distinct users in a message of `asking`, or raise WireError."""
    parts = parts_in(content)
    if len(parts) != 2 or len(parts[1]) % 8:
        raise WireError("a message does not say whom to train and how to clip")
    numbers = np.frombuffer(parts[1], "<i8").astype(np.int64)
    if np.unique(numbers).size < numbers.size:
        raise WireError("a message asks for a user twice")
    return CLIPPING.decode(parse(pb.Clipping, parts[0], NODE_RECEIVES_BYTES)), numbers


def summed(total: IntegerVector) -> RecordDict:
    """Return the content of an answer with the sum [D] of contributions."""
    content, data = content_of(), total.astype("<i8").tobytes()
    array = Array(dtype="uint8", shape=(len(data),), stype=_RAW, data=data)
    content[ARRAY] = ArrayRecord({RECORD: array})
    return content


def sum_in(content: RecordDict, dimension: int) -> IntegerVector:
    """Return the sum [D] in an answer of `summed`, or raise WireError."""
    parts_in(content)  # raises if the answer is from another version
    arrays = content.get(ARRAY)
    array = arrays.get(RECORD) if isinstance(arrays, ArrayRecord) else None
    data = b"" if array is None else array.data
    if len(data) != 8 * dimension:
        raise WireError(f"a sum has {len(data)} bytes; it must have {8 * dimension}")
    return np.frombuffer(data, "<i8").astype(np.int64)


def _trouble(reply: Message, node: int) -> str:
    if reply.has_error():
        return f"error {reply.error.code} of Flower"
    if reply.metadata.src_node_id != node:
        return "it comes from another node than the one that was asked"
    return "" if reply.has_content() else "it holds nothing"


def exchange(
    grid: "Grid", messages: Iterable[Message], deadline: float, stopping: threading.Event
) -> Generator[Reply, None, None]:
    """Send messages to different nodes, and yield each reply as it arrives.

    A message that the grid does not accept, for instance to a node that has left, has no reply.
    Each other message has at most one reply, with content, even if a node sends several, and none
    after the deadline (on the clock of `time.monotonic`) or the stop. A thread waits for each
    reply, because a pull of several messages waits for the slowest of them: a node that dies during
    its upload would delay it for minutes, regardless of its timeout. These are daemon threads, so
    they do not keep the process alive if Flower blocks them.
    """
    over, replies = threading.Event(), queue.SimpleQueue[Reply]()

    def await_reply(node: int, message_id: str) -> None:
        pause = _FIRST_POLL_SECONDS
        while not over.is_set():
            try:
                for reply in grid.pull_messages([message_id]):
                    if reply.metadata.reply_to_message_id == message_id:
                        replies.put((node, _trouble(reply, node) or reply))
                        return
            except Exception as error:  # the connection failed, or the reply is malformed
                replies.put((node, f"its reply cannot be received: {type(error).__name__}"))
                return
            over.wait(pause)
            pause = min(_POLL_GROWTH * pause, _LONGEST_POLL_SECONDS)

    outstanding = 0
    try:
        for message in messages:
            node = message.metadata.dst_node_id
            # One at a time, because a grid may omit the ids of messages that it does not accept.
            for message_id in filter(None, grid.push_messages([message])):
                threading.Thread(target=await_reply, args=(node, message_id), daemon=True).start()
                outstanding += 1
        while outstanding and not stopping.is_set() and (wait := deadline - monotonic()) > 0.0:
            try:
                reply = replies.get(timeout=min(wait, _STOP_CHECK_SECONDS))
            except queue.Empty:
                continue
            outstanding -= 1
            yield reply
    finally:
        over.set()
