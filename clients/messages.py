"""What the two processes of a node say to each other, and how.

The main process talks to the server and never imports torch; the training process holds the users'
data and the model.

| message        | answers                                                                        |
|----------------|--------------------------------------------------------------------------------|
| `Source`       | `Loaded`                                                                       |
| `Welcome`      | None: the task can be trained                                                  |
| `RoundRequest` | `Ready`, any number of them; then None: all of the node's users of it are done |
| `OneByOne`     | the same, one for each user in their order                                     |

A `FedprivError` is an answer too, and the last one. Any other failure ends the training process.
"""

import pickle
import socket
import struct
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.round import PartialSum, RoundRequest


@dataclass(frozen=True)
class Source:
    """Which users a node hosts, and how it trains them.

    Attributes:
        users: where the users' data are, as `fedpriv.clients.training.load_users` reads it.
        device: where to train, as `fedpriv.engine.transport.device_named` reads it.
        chunk_mebibytes: memory that a chunk of users may take, roughly; it decides how many train
            together.
        memory_mebibytes: address space that training may take besides what each process has taken
            once data and model are loaded (Linux); None: without limit.
        seconds: longest for one round; None: until its deadline.
        activations: of the model while users train, as `InProcessTransport` has them.
        processes: how many train side by side, likewise.
    """

    users: str
    device: str = "auto"
    chunk_mebibytes: int = 128
    memory_mebibytes: int | None = None
    seconds: float | None = None
    activations: str = "float32"
    processes: int | None = None

    def __post_init__(self) -> None:
        for name in ("chunk_mebibytes", "memory_mebibytes", "seconds", "processes"):
            number = getattr(self, name)
            if number is not None and not number > 0:
                raise InvalidValueError(f"{name} is {number}; it must be positive")


@dataclass(frozen=True)
class Loaded:
    """Which users a training process holds.

    Attributes:
        users: how many, at least 1.
        users_sha256: `fedpriv.wire.digest_of` of their ids.
    """

    users: int
    users_sha256: bytes


@dataclass(frozen=True)
class Ready:
    """Some users of a round that are done.

    Attributes:
        users: their positions in the population, including those that failed.
        partials: their sums; none where all failed.
    """

    users: npt.NDArray[np.int64]
    partials: list[PartialSum]


@dataclass(frozen=True)
class OneByOne:
    """Train the users of a request one after the other; the node has all of them."""

    request: RoundRequest


def send(channel: socket.socket, value: object) -> None:
    """Send a value to a process that is trusted; arrays in it are not copied.

    Raises:
        OSError: the other end is closed.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [memoryview(head), *(buffer.raw() for buffer in buffers)]
    channel.sendall(struct.pack("=Q", len(parts)))
    channel.sendall(struct.pack(f"={len(parts)}Q", *(part.nbytes for part in parts)))
    for part in parts:
        channel.sendall(part)


def receive(channel: socket.socket) -> object:
    """Receive what a trusted process sent, each array in memory of its own.

    Raises:
        EOFError: the other end is closed.
        OSError: this end is.
    """
    (count,) = struct.unpack("=Q", _exactly(channel, 8))
    sizes = struct.unpack(f"={count}Q", _exactly(channel, 8 * count))
    head, *buffers = [_exactly(channel, size) for size in sizes]
    return pickle.loads(head, buffers=buffers)


def _exactly(channel: socket.socket, size: int) -> memoryview:
    data = np.empty(size, np.uint8).data
    rest = data
    while rest:
        received = channel.recv_into(rest)
        if received == 0:
            raise EOFError("the other process has closed its end")
        rest = rest[received:]
    return data
