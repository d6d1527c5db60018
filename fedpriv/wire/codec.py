"""How a frozen value becomes a protobuf message and back, within limits on what a message holds.

A `Codec` declares both directions at once: value and message have fields of the same names.
"""

from collections.abc import Callable, Iterator, Mapping, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from fedpriv.errors import InvalidValueError, WireError

SERVER_RECEIVES_BYTES = 2**20 + 2**16
"""Longest message that a server takes from a node: a chunk, or the header of an answer."""
NODE_RECEIVES_BYTES = 16 * 2**20
"""Longest message that a node takes from the server: an offer to 2^20 users."""
ENVELOPE_BYTES = 16
"""Room for the tag and length of a message inside another."""
MAX_USERS = 2**20
MAX_NAME = 1024
"""Characters of any text that has no limit of its own."""
MAX_TENSORS = 4096
"""Elements of any list without a limit of its own; checks of `Layout` take time with its square."""

_LONGEST_REASON = 400  # a sentence about hostile input must not be as long as the input

Value = TypeVar("Value")
Kind = TypeVar("Kind", bound=Message)


def parse(kind: type[Kind], data: bytes, most: int) -> Kind:
    """Read a protobuf message; total.

    Args:
        kind: class of the message.
        data: any bytes.
        most: longest legal length, e.g. `SERVER_RECEIVES_BYTES`.

    Raises:
        WireError: the bytes are too long, or are not such a message.
    """
    at_most(f"bytes in a {kind.__name__}", len(data), most)
    try:
        message: Kind = kind.FromString(data)
    except DecodeError as error:
        raise WireError(f"{len(data)} bytes are no {kind.__name__}: {error}") from error
    return message


def at_most(what: str, number: int, most: int) -> None:
    """Raise WireError if there are more than `most`."""
    if number > most:
        raise WireError(f"there are {number} {what}; there may be at most {most}")


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Raise WireError for what one of our constructors, or a field of protobuf, refuses."""
    try:
        yield
    except (InvalidValueError, TypeError, ValueError) as error:
        reason = str(error)
        if len(reason) > _LONGEST_REASON:
            reason = reason[:_LONGEST_REASON] + "…"
        raise WireError(f"{what} is not legal: {reason}") from error


@dataclass(frozen=True)
class Part:
    """How a field that is not the same on both sides is converted.

    Attributes:
        encode: from the value's field to the message's.
        decode: back; total, or raises WireError or ValueError.
        optional: whether None stands for an absent message.
    """

    encode: Callable[..., object]
    decode: Callable[..., object]
    optional: bool = False


@dataclass(frozen=True)
class Codec(Generic[Value, Kind]):
    """Both directions between a frozen value and a protobuf message.

    Attributes:
        value: constructor of the value, by the names of the message's fields.
        message: class of the message.
        what: how errors call it, with its article.
        parts: fields that are not the same on both sides; other lists become tuples.
        limits: of the elements of lists and the characters of texts, where they are not
            `MAX_TENSORS` and `MAX_NAME`.
        check: raises WireError for what else a message must not hold.
        longest: bytes of a message.
    """

    value: Callable[..., Value]
    message: type[Kind]
    what: str
    parts: Mapping[str, Part] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    check: Callable[[Kind], None] = lambda _: None
    longest: int = NODE_RECEIVES_BYTES

    def encode(self, value: Value) -> Kind:
        """The message of a value, which the other side decodes as an equal value.

        Raises:
            WireError: it passes a limit, or a field cannot hold it.
        """
        given: dict[str, object] = {}
        with refusing(self.what):
            for name in self.message.DESCRIPTOR.fields_by_name:
                content, part = getattr(value, name), self.parts.get(name)
                if part is not None and not (part.optional and content is None):
                    content = part.encode(content)
                given[name] = content
            message: Kind = self.message(**given)
        self._check_limits(message)
        return message

    def decode(self, message: Kind) -> Value:
        """The value of a message; total.

        Raises:
            WireError: it is not legal, or passes a limit.
        """
        self._check_limits(message)
        given: dict[str, object] = {}
        with refusing(self.what):
            for name in message.DESCRIPTOR.fields_by_name:
                content, part = getattr(message, name), self.parts.get(name)
                if part is not None:
                    absent = part.optional and not message.HasField(name)
                    given[name] = None if absent else part.decode(content)
                else:
                    repeated = isinstance(content, MutableSequence)
                    given[name] = tuple(content) if repeated else content
            return self.value(**given)

    def _check_limits(self, message: Kind) -> None:
        """Refuse what is too long before any of it is converted."""
        for name in message.DESCRIPTOR.fields_by_name:
            content, most = getattr(message, name), self.limits.get(name)
            texts = content if isinstance(content, MutableSequence) else [content]
            if texts is content:
                at_most(f"{name} in {self.what}", len(content), most or MAX_TENSORS)
                most = MAX_NAME
            if texts and isinstance(texts[0], str):
                longest = max(map(len, texts))
                at_most(f"characters in {name} of {self.what}", longest, most or MAX_NAME)
        self.check(message)
        at_most(f"bytes in {self.what}", message.ByteSize(), self.longest)


def one(codec: Codec[Value, Kind], *, optional: bool = False) -> Part:
    """A message inside another."""
    return Part(codec.encode, codec.decode, optional)


def each(codec: Codec[Value, Kind]) -> Part:
    """A tuple of messages inside another."""
    return Part(lambda vs: [codec.encode(v) for v in vs], lambda ms: tuple(map(codec.decode, ms)))
