"""What the two processes of a node say to each other over a socket.

The main process talks to the server and never imports torch; the training process holds the users'
data and the model.

| message        | answers                                                                        |
|----------------|--------------------------------------------------------------------------------|
| `HostSettings` | `Loaded`                                                                       |
| `Welcome`      | None: the task can be trained                                                  |
| `RoundRequest` | `Ready`, any number of them; then None: all of the node's users of it are done |
| `OneByOne`     | the same, one for each user in order                                           |

A `FedprivError` is an answer too, and the last one. Any other failure ends the training process.
"""

import pickle
from dataclasses import dataclass
from io import BufferedRWPair

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.round import PartialSum, RoundRequest


@dataclass(frozen=True)
class HostSettings:
    """Which users a node hosts, and how it trains them."""

    users: str  # as `fedpriv.clients.training.load_users` reads it
    device: str = "auto"  # as `fedpriv.engine.transport.device_named` reads it
    chunk_mebibytes: int = 128  # roughly what users who train together may take
    # Address space for training, besides what each process has taken once data and model are
    # loaded (Linux); None: no limit.
    memory_mebibytes: int | None = None
    seconds: float | None = None  # longest for one round; None: until its deadline
    activations: str = "float32"  # of the model while users train
    processes: int | None = None  # that train side by side; None: one for each thread

    def __post_init__(self) -> None:
        for name in ("chunk_mebibytes", "memory_mebibytes", "seconds", "processes"):
            number = getattr(self, name)
            if number is not None and not number > 0:
                raise InvalidValueError(f"{name} is {number}; it must be positive")


@dataclass(frozen=True)
class Loaded:
    """Which users a training process holds, at least one."""

    users: int
    users_sha256: bytes  # `fedpriv.wire.digest_of` of their ids


@dataclass(frozen=True)
class Ready:
    """Some users of a round who are done: their positions, with those who failed, and their sum."""

    users: npt.NDArray[np.int64]
    partial: PartialSum


@dataclass(frozen=True)
class OneByOne:
    """Train the users of a request one after the other; the node has all of them."""

    request: RoundRequest


def send(channel: BufferedRWPair, value: object) -> None:
    """Send a value to a trusted process; arrays in it are not copied."""
    pickle.dump(value, channel, protocol=5)
    channel.flush()


def receive(channel: BufferedRWPair) -> object:
    """Receive what a trusted process sent; EOFError if it has closed its end."""
    try:
        value: object = pickle.load(channel)
    except pickle.UnpicklingError as error:
        raise EOFError("the other process has closed its end within a message") from error
    return value
