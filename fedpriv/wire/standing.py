"""The small messages: who connects, whether an answer was taken, and where a federation stands."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from fedpriv.errors import InvalidValueError
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.limits import MAX_NAME, refusing

VERSION = 1
"""Of the protocol."""


@dataclass(frozen=True)
class Hello:
    """A node says who it is.

    Attributes:
        node: its name, from 1 to 1024 printable characters; must be that in its certificate.
        users_sha256: `digest_of` the ids of the users that it holds, 32 bytes.
        version: of the protocol that it speaks.

    Raises:
        InvalidValueError: the name is not legal, the digest has another length, or the version is
            not `VERSION`.
    """

    node: str
    users_sha256: bytes
    version: int = VERSION

    def __post_init__(self) -> None:
        if not (1 <= len(self.node) <= MAX_NAME and self.node.isprintable()):
            raise InvalidValueError(
                f"node is {self.node!r}; it must be from 1 to {MAX_NAME} printable characters"
            )
        if self.version != VERSION:
            raise InvalidValueError(
                f"version of the protocol is {self.version}; this side speaks {VERSION}"
            )
        if len(self.users_sha256) != 32:
            raise InvalidValueError(
                f"users_sha256 has {len(self.users_sha256)} bytes; it must have 32"
            )


def digest_of(user_ids: Iterable[str]) -> bytes:
    """SHA-256 of ids in any order: of the UTF-8 of their JSON array, sorted, without spaces."""
    text = json.dumps(sorted(user_ids), separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True)
class Receipt:
    """Whether the server took an answer.

    Attributes:
        accepted: whether it did.
        reason: why not, at most 1024 characters.

    Raises:
        InvalidValueError: the reason is too long.
    """

    accepted: bool
    reason: str = ""

    def __post_init__(self) -> None:
        if len(self.reason) > MAX_NAME:
            raise InvalidValueError(
                f"a reason has {len(self.reason)} characters; it may have at most {MAX_NAME}"
            )


class RunState(StrEnum):
    """What the server is doing."""

    WAITING = "waiting"
    COLLECTING = "collecting"
    RELEASING = "releasing"
    FINISHED = "finished"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Status:
    """Where a federation stands; nothing of who was drawn.

    Attributes:
        run: name of the run, from 1 to 1024 characters.
        round: number of the next round, from 0.
        rounds: of the plan.
        epsilon: ε ≥ 0 spent at `delta`; may be inf.
        epsilon_limit: ε ≥ 0 of the budget; may be inf.
        delta: δ in [0, 1).
        nodes_enrolled: how many.
        nodes_connected: how many of them are there.
        users_enrolled: N.
        state: what the server is doing.

    Raises:
        InvalidValueError: a field is out of range.
    """

    run: str
    round: int
    rounds: int
    epsilon: float
    epsilon_limit: float
    delta: float
    nodes_enrolled: int
    nodes_connected: int
    users_enrolled: int
    state: RunState

    def __post_init__(self) -> None:
        if not 1 <= len(self.run) <= MAX_NAME:
            raise InvalidValueError(
                f"run has {len(self.run)} characters; legal are 1 to {MAX_NAME}"
            )
        for name in ("round", "rounds", "nodes_enrolled", "nodes_connected", "users_enrolled"):
            if not 0 <= getattr(self, name) < 2**32:
                raise InvalidValueError(
                    f"{name} is {getattr(self, name)}; it must be from 0 to 2^32 - 1"
                )
        if not (self.epsilon >= 0.0 and self.epsilon_limit >= 0.0 and 0.0 <= self.delta < 1.0):
            raise InvalidValueError(
                f"ε is {self.epsilon} of {self.epsilon_limit} at δ = {self.delta}; ε must not be "
                "negative, and δ in [0, 1)"
            )


def encode_hello(hello: Hello) -> pb.Hello:
    """The message of a hello."""
    return pb.Hello(node=hello.node, version=hello.version, users_sha256=hello.users_sha256)


def decode_hello(message: pb.Hello) -> Hello:
    """The hello in a message; total.

    Raises:
        WireError: it is not legal.
    """
    with refusing("a hello"):
        return Hello(message.node, message.users_sha256, message.version)


def encode_receipt(receipt: Receipt) -> pb.Receipt:
    """The message of a receipt.

    Raises:
        WireError: the reason is no Unicode.
    """
    with refusing("a receipt"):
        return pb.Receipt(accepted=receipt.accepted, reason=receipt.reason)


def decode_receipt(message: pb.Receipt) -> Receipt:
    """The receipt in a message; total.

    Raises:
        WireError: it is not legal.
    """
    with refusing("a receipt"):
        return Receipt(message.accepted, message.reason)


def encode_status(status: Status) -> pb.Status:
    """The message of a status.

    Raises:
        WireError: the name of the run is no Unicode.
    """
    with refusing("a status"):
        return pb.Status(**vars(status))


def decode_status(message: pb.Status) -> Status:
    """The status in a message; total.

    Raises:
        WireError: it is not legal.
    """
    with refusing("a status"):
        return Status(
            run=message.run,
            round=message.round,
            rounds=message.rounds,
            epsilon=message.epsilon,
            epsilon_limit=message.epsilon_limit,
            delta=message.delta,
            nodes_enrolled=message.nodes_enrolled,
            nodes_connected=message.nodes_connected,
            users_enrolled=message.users_enrolled,
            state=RunState(message.state),
        )
