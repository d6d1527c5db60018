"""Conversion between frozen values and protobuf messages, and of tensors to checksummed chunks.

A `Codec` declares both directions at once: value and message have fields of the same names. The
annotation of a field declares its legal content, and `Checked` checks it. Limits bound the content
of each message. Named tensors are a stream of chunks, which holds their components in C order,
little-endian on every machine; its receiver knows their layout and type.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import get_annotations
from math import prod
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from fedpriv.errors import InvalidValueError, WireError
from fedpriv.privacy.layout import Layout, Tensors
from fedpriv.wire import federation_pb2 as pb

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

    A node would not know what it consents to. The fields are removed.
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
    """The conversion of a field that differs between value and message; None is omitted."""

    encode: Callable[..., object]
    decode: Callable[..., object]  # total, or raises WireError or ValueError


@dataclass(frozen=True)
class Codec(Generic[Value, Kind]):
    """The conversion between a frozen value and a protobuf message."""

    value: Callable[..., Value]
    message: type[Kind]
    what: str  # name in errors, with an article
    # Codecs of fields that differ and of inner messages. All other lists become tuples.
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
            content, limit = getattr(message, name), self.limits.get(name)
            texts = content if isinstance(content, MutableSequence) else [content]
            if texts is content:
                at_most(f"{name} in {self.what}", len(content), limit or MAX_TENSORS)
                limit = MAX_NAME
            if texts and isinstance(texts[0], str):
                longest_length = max(map(len, texts))
                at_most(f"characters in {name} of {self.what}", longest_length, limit or MAX_NAME)
        self.check(message)
        check_size(self.what, message, NODE_RECEIVES_BYTES)


FieldCodecs = Mapping[str, Codec[Any, Any] | FieldCodec]


def list_of(inner: Codec[Any, Any] | FieldCodec) -> FieldCodec:
    """Return the codec of a tuple of inner messages."""
    return FieldCodec(
        lambda vs: [inner.encode(v) for v in vs], lambda ms: tuple(map(inner.decode, ms))
    )


MAX_DIMENSIONS = 32  # of one tensor; NumPy 1 has no more
MAX_COMPONENTS = 2**30  # of all tensors together
CHUNK_BYTES = 2**18  # in every chunk but the last, which holds the rest

Bytes = bytes | bytearray | memoryview
Number = np.dtype[np.float32] | np.dtype[np.int32] | np.dtype[np.int64]
FLOAT32: Number = np.dtype("<f4")
INT32: Number = np.dtype("<i4")
INT64: Number = np.dtype("<i8")


def chunks(pieces: Iterable[Bytes]) -> Iterator[pb.Chunk]:
    """Cut pieces into chunks, with only one chunk and its pieces in memory; none for no bytes."""
    for number, data in enumerate(_full(pieces)):
        yield pb.Chunk(number=number, data=data, crc32=zlib.crc32(data))


def _full(pieces: Iterable[Bytes]) -> Iterator[bytes]:
    parts: list[memoryview] = []
    room = CHUNK_BYTES
    for piece in pieces:
        view = memoryview(piece)
        while view:
            part, view = view[:room], view[room:]
            parts.append(part)
            room -= len(part)
            if not room:
                yield b"".join(parts)
                parts, room = [], CHUNK_BYTES
    if parts:
        yield b"".join(parts)


class Assembler:
    """Assembles chunks to the bytes that they were cut from.

    Guarantees:
        * It never holds more than the declared size, and uses memory only as bytes arrive.
        * A chunk that is out of order, of the wrong length or damaged raises WireError, and changes
          nothing.
        * `finish` returns exactly the declared number of bytes, which have passed their checksums.

    The checksums detect faults; TLS protects against attackers.
    """

    def __init__(self, size: int, most: int) -> None:
        if size > most:
            raise WireError(f"{size} bytes are to follow; there may be at most {most}")
        try:
            self._bytes = np.empty(size, np.uint8)  # the system provides pages at the first write
        except MemoryError as error:
            raise WireError(f"there is no memory for the {size} bytes") from error
        self._size, self._received, self._chunks = size, 0, 0

    def add(self, chunk: pb.Chunk) -> None:
        """Add the next chunk, or raise WireError."""
        missing_bytes, data = self._size - self._received, chunk.data
        if not missing_bytes:
            raise WireError(f"chunk {chunk.number} follows after all {self._received} bytes")
        if chunk.number != self._chunks:
            raise WireError(f"chunk {chunk.number} came in place of chunk {self._chunks}")
        if len(data) != (size := min(missing_bytes, CHUNK_BYTES)):
            raise WireError(f"chunk {chunk.number} has {len(data)} bytes; it must have {size}")
        if zlib.crc32(data) != chunk.crc32:
            raise WireError(f"chunk {chunk.number} is damaged: its CRC-32 differs")
        self._bytes[self._received : self._received + len(data)] = np.frombuffer(data, np.uint8)
        self._received += len(data)
        self._chunks += 1

    def finish(self) -> npt.NDArray[np.uint8]:
        """Return all bytes, read-only; WireError if some are missing."""
        if self._received < self._size:
            raise WireError(f"the stream ended after {self._received} of {self._size} bytes")
        self._bytes.flags.writeable = False
        return self._bytes


def pieces(tensors: Tensors) -> Iterator[memoryview]:
    """Yield the bytes of tensors of one dtype, at most `CHUNK_BYTES` each, as views if possible."""
    for tensor in tensors.values():
        step = CHUNK_BYTES // tensor.dtype.itemsize
        flat = tensor.reshape(-1) if tensor.flags.c_contiguous else tensor.flat
        for start in range(0, tensor.size, step):
            piece = np.asarray(flat[start : start + step])
            yield piece.astype(piece.dtype.newbyteorder("<"), copy=False).view(np.uint8).data


def _checked_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    at_most("dimensions of a tensor", len(sizes), MAX_DIMENSIONS)
    return tuple(sizes)


def _check_components(message: pb.Layout) -> None:
    # NumPy refuses a shape if the product of its sizes other than zeros is too large.
    shapes = [_checked_sizes(shape.sizes) for shape in message.shapes]
    total = sum(prod(max(size, 1) for size in shape) for shape in shapes)
    at_most("components of tensors", total, MAX_COMPONENTS)


SHAPE = FieldCodec(lambda s: pb.Shape(sizes=_checked_sizes(s)), lambda s: _checked_sizes(s.sizes))
LAYOUT = Codec(Layout, pb.Layout, "a layout", {"shapes": list_of(SHAPE)}, check=_check_components)
