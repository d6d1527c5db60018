"""How a frozen value becomes a protobuf message and back, within limits on what a message holds.

A `Codec` declares both directions at once: value and message have fields of the same names. What a
field of a value may hold stands in its annotation, and `Checked` holds the value to it.
"""

from collections.abc import Callable, Iterator, Mapping, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import get_annotations
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from fedpriv.errors import InvalidValueError, WireError

SERVER_RECEIVES_BYTES = 2**20 + 2**16  # of one message: the header of an answer, or a chunk
NODE_RECEIVES_BYTES = 16 * 2**20  # of one message: an offer to 2^20 users
# Options of gRPC for both sides: a small message must not become a very large one. By the first,
# what is compressed is refused, at a node sometimes too late; by the second, it is never inflated.
UNCOMPRESSED = (
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
)
_ENVELOPE_BYTES = 16  # for the tag and length of a message inside another
MAX_USERS = 2**20
MAX_NAME = 1024  # characters of any text that has no limit of its own
# Elements of any list without a limit of its own; checks of `Layout` take time with its square.
MAX_TENSORS = 4096
_LONGEST_REASON = 400  # a sentence about hostile input must not be as long as the input

Value = TypeVar("Value")
Kind = TypeVar("Kind", bound=Message)


def parse(kind: type[Kind], data: bytes, most: int) -> Kind:
    """Read a protobuf message of at most `most` bytes; total: other bytes raise WireError."""
    at_most(f"bytes in a {kind.__name__}", len(data), most)
    try:
        message: Kind = kind.FromString(data)
    except DecodeError as error:
        raise WireError(f"{len(data)} bytes are not a message {kind.__name__}: {error}") from error
    return message


def at_most(what: str, number: int, most: int) -> None:
    """Raise WireError if there are more than `most`."""
    if number > most:
        raise WireError(f"there are {number} {what}; there may be at most {most}")


def check_size(what: str, message: Message, receives: int) -> None:
    """Raise WireError for a message that is too large to be received, inside another."""
    at_most(f"bytes in {what}", message.ByteSize(), receives - _ENVELOPE_BYTES)


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Raise WireError for what one of our constructors, or a field of protobuf, refuses."""
    try:
        yield
    except RecursionError as error:
        raise WireError(f"{what} is nested too deeply") from error
    except (InvalidValueError, TypeError, ValueError) as error:
        reason = str(error)
        if len(reason) > _LONGEST_REASON:
            reason = reason[:_LONGEST_REASON] + "…"
        raise WireError(f"{what} is not legal: {reason}") from error


@dataclass(frozen=True)
class Legal:
    """What a field may hold, as an annotation of it."""

    holds: Callable[[Any], bool]
    reading: str  # what it must be or have


def length(least: int, most: int) -> Legal:
    """Texts and bytes of a length within these bounds."""
    return Legal(lambda text: least <= len(text) <= most, f"have {least} to {most}")


def below(power: int) -> Legal:
    """Integers from 0 of at most this many bits."""
    return Legal(lambda number: 0 <= number < 2**power, f"be from 0 to 2^{power} - 1")


class Checked:
    """A base of dataclasses that raise InvalidValueError for a field unlike its annotation."""

    def __post_init__(self) -> None:
        for name, annotation in get_annotations(type(self)).items():
            content = getattr(self, name)
            for legal in getattr(annotation, "__metadata__", ()):
                if not legal.holds(content):
                    found = f"is {content}"
                    if isinstance(content, str | bytes):
                        unit = "characters" if isinstance(content, str) else "bytes"
                        found = f"has {len(content)} {unit}"
                    raise InvalidValueError(f"{name} {found}; it must {legal.reading}")


@dataclass(frozen=True)
class FieldCodec:
    """How a field that differs between value and message is converted; None is left out."""

    encode: Callable[..., object]
    decode: Callable[..., object]  # total, or raises WireError or ValueError


@dataclass(frozen=True)
class Codec(Generic[Value, Kind]):
    """Both directions between a frozen value and a protobuf message."""

    value: Callable[..., Value]
    message: type[Kind]
    what: str  # in errors, with its article
    # Of what differs, and of messages inside this one; other lists become tuples.
    fields: "FieldCodecs" = field(default_factory=dict)
    # Of the elements of lists and the characters of texts, where not MAX_TENSORS and MAX_NAME.
    limits: Mapping[str, int] = field(default_factory=dict)
    check: Callable[[Kind], None] = lambda _: None  # raises WireError
    optional: str = ""  # the message inside that may be absent: None

    def encode(self, value: Value) -> Kind:
        """The message of a value; WireError if the other side would not decode an equal value."""
        contents: dict[str, object] = {}
        with refusing(self.what):
            for name in self.message.DESCRIPTOR.fields_by_name:
                content, own = getattr(value, name), self.fields.get(name)
                contents[name] = own.encode(content) if own and content is not None else content
            message: Kind = self.message(**contents)
        self._check_limits(message)
        return message

    def decode(self, message: Kind) -> Value:
        """The value of a message; total, or WireError."""
        self._check_limits(message)
        contents: dict[str, object] = {}
        with refusing(self.what):
            for name in message.DESCRIPTOR.fields_by_name:
                content, own = getattr(message, name), self.fields.get(name)
                if name == self.optional and not message.HasField(name):
                    content = None
                elif own is not None:
                    content = own.decode(content)
                elif isinstance(content, MutableSequence):
                    content = tuple(content)
                contents[name] = content
            return self.value(**contents)

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
        check_size(self.what, message, NODE_RECEIVES_BYTES)


FieldCodecs = Mapping[str, Codec[Any, Any] | FieldCodec]


def each(inner: Codec[Any, Any] | FieldCodec) -> FieldCodec:
    """A tuple of messages inside another."""
    return FieldCodec(
        lambda vs: [inner.encode(v) for v in vs], lambda ms: tuple(map(inner.decode, ms))
    )
