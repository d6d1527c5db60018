"""Conversion between frozen values and protobuf messages, with limits on their content.

A `Codec` declares both directions at once: value and message have fields of the same names. The
annotation of a field declares its legal content, and `Checked` checks it.
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
# Options of gRPC for both sides: a small message must not become a very large one. The first
# refuses compressed messages, at a node sometimes too late; the second never decompresses them.
UNCOMPRESSED = (
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.per_message_decompression", 0),
)
_ENVELOPE_BYTES = 16  # for the tag and length of a message inside another
MAX_USERS = 2**20
MAX_NAME = 1024  # characters, the default limit of a text
# Elements, the default limit of a list; checks of `Layout` take time quadratic in it.
MAX_TENSORS = 4096
_LONGEST_REASON = 400  # characters; a sentence about hostile input must not be as long as the input

Value = TypeVar("Value")
Kind = TypeVar("Kind", bound=Message)


def parse(kind: type[Kind], data: bytes, most: int) -> Kind:
    """Parse a protobuf message of at most `most` bytes; WireError for any other bytes."""
    at_most(f"bytes in a {kind.__name__}", len(data), most)
    try:
        message: Kind = kind.FromString(data)
    except DecodeError as error:
        raise WireError(f"{len(data)} bytes are not a message {kind.__name__}: {error}") from error
    return message


def refuse_unknown(message: Message) -> None:
    """Raise WireError if a message, or one inside it at any depth, has fields that are not known.

    Whoever consents to it would not know to what. The fields are removed.
    """
    size = message.ByteSize()
    message.DiscardUnknownFields()
    if message.ByteSize() != size:
        kind = message.DESCRIPTOR.name
        raise WireError(f"a message {kind} has fields that this version of fedpriv does not know")


def at_most(what: str, number: int, most: int) -> None:
    """Raise WireError if `number` is above `most`; `what` names the things in the plural."""
    if number > most:
        raise WireError(f"there are {number} {what}; there may be at most {most}")


def check_size(what: str, message: Message, receives: int) -> None:
    """Raise WireError if a message, inside another, exceeds the limit of its receiver in bytes."""
    at_most(f"bytes in {what}", message.ByteSize(), receives - _ENVELOPE_BYTES)


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn the errors of our constructors and of protobuf's fields into WireError."""
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
    """An annotation of a field with the condition that its content must satisfy."""

    holds: Callable[[Any], bool]
    reading: str  # the condition, after "it must"


def length(least: int, most: int) -> Legal:
    """Return the condition that a text or bytes have a length within these bounds."""
    return Legal(lambda text: least <= len(text) <= most, f"have {least} to {most}")


def below(power: int) -> Legal:
    """Return the condition that an integer is not negative and has at most this many bits."""
    return Legal(lambda number: 0 <= number < 2**power, f"be from 0 to 2^{power} - 1")


class Checked:
    """A base of dataclasses that raise InvalidValueError for a field that violates its `Legal`."""

    def __post_init__(self) -> None:
        for name, annotation in get_annotations(type(self)).items():
            content = getattr(self, name)
            for condition in getattr(annotation, "__metadata__", ()):
                if not condition.holds(content):
                    state = f"is {content}"
                    if isinstance(content, str | bytes):
                        unit = "characters" if isinstance(content, str) else "bytes"
                        state = f"has {len(content)} {unit}"
                    raise InvalidValueError(f"{name} {state}; it must {condition.reading}")


@dataclass(frozen=True)
class FieldCodec:
    """The conversion of a field that differs between value and message; None is left out."""

    encode: Callable[..., object]
    decode: Callable[..., object]  # total, or raises WireError or ValueError


@dataclass(frozen=True)
class Codec(Generic[Value, Kind]):
    """The conversion between a frozen value and a protobuf message."""

    value: Callable[..., Value]
    message: type[Kind]
    what: str  # name in errors, with an article
    # Codecs of fields that differ, and of inner messages; all other lists become tuples.
    fields: "FieldCodecs" = field(default_factory=dict)
    # Limits on elements of lists and characters of texts that are not MAX_TENSORS and MAX_NAME.
    limits: Mapping[str, int] = field(default_factory=dict)
    check: Callable[[Kind], None] = lambda _: None  # raises WireError
    optional: str = ""  # name of the inner message that may be absent, which stands for None

    def encode(self, value: Value) -> Kind:
        """Return the message of a value; WireError if the other side would refuse it."""
        contents: dict[str, object] = {}
        with refusing(self.what):
            for name in self.message.DESCRIPTOR.fields_by_name:
                content, inner = getattr(value, name), self.fields.get(name)
                contents[name] = inner.encode(content) if inner and content is not None else content
            message: Kind = self.message(**contents)
        self._check_limits(message)
        return message

    def decode(self, message: Kind) -> Value:
        """Return the value of a message, or raise WireError."""
        self._check_limits(message)
        contents: dict[str, object] = {}
        with refusing(self.what):
            for name in message.DESCRIPTOR.fields_by_name:
                content, inner = getattr(message, name), self.fields.get(name)
                if name == self.optional and not message.HasField(name):
                    content = None
                elif inner is not None:
                    content = inner.decode(content)
                elif isinstance(content, MutableSequence):
                    content = tuple(content)
                contents[name] = content
            return self.value(**contents)

    def _check_limits(self, message: Kind) -> None:
        """Raise WireError for excessive content before any of it is converted."""
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


def list_of(inner: Codec[Any, Any] | FieldCodec) -> FieldCodec:
    """Return the codec of a tuple of inner messages."""
    return FieldCodec(
        lambda vs: [inner.encode(v) for v in vs], lambda ms: tuple(map(inner.decode, ms))
    )
