"""What a node's two processes say to each other, and how.

The main process talks to the server and never imports torch; the training process holds the users'
data and the model. Each message has one answer:

| message                           | answer                                                     |
|-----------------------------------|------------------------------------------------------------|
| `Source`                          | `Loaded`                                                   |
| `Welcome`                         | None: the task can be trained                              |
| `RoundRequest`                    | `Trained`, or None where there is nothing to send          |
| positions of users, int64 vector  | the same for these users of the request before             |

A `FedprivError` is an answer too. Any other failure ends the training process.
"""

import pickle
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError
from fedpriv.federated.transport import PartialSum


@dataclass(frozen=True)
class Source:
    """Whom a node hosts, and within what it trains them.

    Attributes:
        users: where the users' data are, as `clients.users.load_users` reads it.
        device: where to train, as `fedpriv.engine.device_named` reads it.
        chunk_mebibytes: memory that a chunk of users may take, roughly; it decides how many train
            together.
        memory_mebibytes: address space that training may take beside what the process has taken
            once data and model are loaded (Linux); None: without limit.
        seconds: longest for one round; None: until its deadline.
        activations: of the model while users train, as `InProcessTransport` has them.

    Raises:
        InvalidValueError: a number is not positive.
    """

    users: str
    device: str = "auto"
    chunk_mebibytes: int = 128
    memory_mebibytes: int | None = None
    seconds: float | None = None
    activations: str = "float32"

    def __post_init__(self) -> None:
        for name in ("chunk_mebibytes", "memory_mebibytes", "seconds"):
            number = getattr(self, name)
            if number is not None and not number > 0:
                raise InvalidValueError(f"{name} is {number}; it must be positive")


@dataclass(frozen=True)
class Loaded:
    """Which users a training process holds.

    Attributes:
        users: how many, at least 1.
        users_sha256: `fedpriv.wire.digest_of` their ids.
    """

    users: int
    users_sha256: bytes


@dataclass(frozen=True, eq=False)
class OneUser:
    """The answer of a node with one user, for the server to clip.

    Attributes:
        weight: of the user, in [0, 1]; secret.
        tensors: as `InProcessTransport.raw_update` returns them.
    """

    weight: float
    tensors: Mapping[str, npt.NDArray[np.float32]]


Trained: TypeAlias = OneUser | PartialSum
"""What a node sends: its one user's tensors, or the sum over its users."""


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
