"""How much a message may hold, and how what passes that is refused.

Bytes of any length as a stream of checksummed chunks, and back within a declared size.

Named tensors as a header and a stream of bytes: C order, little endian on every machine.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError, Message

from fedpriv.errors import InvalidValueError, WireError
from fedpriv.privacy.layout import Layout, Tensors
from fedpriv.wire import federation_pb2 as pb

SERVER_RECEIVES_BYTES = 2**20 + 2**16
"""Longest message that a server takes from a node: a chunk, or the header of an answer."""
NODE_RECEIVES_BYTES = 16 * 2**20
"""Longest message that a node takes from the server: an offer to 2^20 users."""
MAX_USERS = 2**20
MAX_TENSORS = 4096  # the checks of `Layout` and `Clipping` take time with its square
MAX_DIMENSIONS = 32  # of one tensor; NumPy 1 has no more
MAX_COMPONENTS = 2**30  # of all tensors together
MAX_OPTIONS = 100_000  # of one metric
MAX_NAME = 1024  # characters

_LONGEST_REASON = 400  # a sentence about hostile input must not be as long as the input

Kind = TypeVar("Kind", bound=Message)


def parse(kind: type[Kind], data: bytes, most: int) -> Kind:
    """Read a protobuf message; total.

    Args:
        kind: class of the message.
        data: any bytes.
        most: longest legal length, e.g. `SERVER_RECEIVES_BYTES`.

    Raises:
        WireError: the bytes are too long, or no such message.
    """
    at_most(f"bytes of a {kind.__name__}", len(data), most)
    try:
        message: Kind = kind.FromString(data)
    except DecodeError as error:
        raise WireError(f"{len(data)} bytes are no {kind.__name__}: {error}") from error
    return message


def at_most(what: str, number: int, most: int) -> None:
    """Raise WireError if there are more than `most`."""
    if number > most:
        raise WireError(f"there are {number} {what}; there may be at most {most}")


def check_names(what: str, names: Iterable[str]) -> None:
    """Raise WireError if a name is longer than `MAX_NAME` characters."""
    for name in names:
        at_most(f"characters in the name of a {what}", len(name), MAX_NAME)


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Raise as WireError what a constructor of ours refuses, or a field of protobuf cannot hold."""
    try:
        yield
    except (InvalidValueError, TypeError, ValueError) as error:
        reason = str(error)
        if len(reason) > _LONGEST_REASON:
            reason = reason[:_LONGEST_REASON] + "…"
        raise WireError(f"{what} is not legal: {reason}") from error


CHUNK_BYTES = 2**20
"""Data in every chunk but the last, which has what is left."""

Bytes = bytes | bytearray | memoryview


def chunks(pieces: Iterable[Bytes]) -> Iterator[pb.Chunk]:
    """Cut pieces, one after the other, into chunks of `CHUNK_BYTES`; no bytes give no chunk.

    Holds one chunk beside the pieces that it spans.

    Args:
        pieces: of any lengths; a piece must stay unchanged until the next chunk was yielded.
    """
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
    """Puts chunks together.

    Guarantees:

    * it holds never more than the declared size, and takes memory as bytes arrive;
    * a chunk out of its turn (gap, repetition, beyond the end), of another length than it must
      have, or damaged is refused as it comes, and changes nothing;
    * `finish` returns only as many bytes as were declared, all of which passed their checksums.

    The checksums are against faults; against people there is TLS. Checksum and copy let other
    threads run, so several assemblers, each in a thread, work at the same time.

    Args:
        size: what was declared, in bytes.
        most: the largest size to accept, in bytes.

    Raises:
        WireError: the size is larger, or there is no memory for it.
    """

    def __init__(self, size: int, most: int) -> None:
        if size > most:
            raise WireError(f"{size} bytes are to follow; there may be at most {most}")
        try:
            # Pages are taken when they are written, not here.
            self._bytes = np.empty(size, np.uint8)
        except MemoryError as error:
            raise WireError(f"there is no memory for the {size} bytes") from error
        self._size, self._received, self._chunks = size, 0, 0

    def add(self, chunk: pb.Chunk) -> None:
        """Take the next chunk.

        Raises:
            WireError: it is not the next one, has the wrong length, or its checksum differs.
        """
        left = self._size - self._received
        if not left:
            raise WireError(f"chunk {chunk.number} follows after all {self._received} bytes")
        if chunk.number != self._chunks:
            raise WireError(f"chunk {chunk.number} came in place of chunk {self._chunks}")
        data = chunk.data
        if len(data) != min(left, CHUNK_BYTES):
            raise WireError(
                f"chunk {chunk.number} has {len(data)} bytes; it must have {min(left, CHUNK_BYTES)}"
            )
        if zlib.crc32(data) != chunk.crc32:
            raise WireError(f"chunk {chunk.number} is damaged: its CRC-32 differs")
        self._bytes[self._received : self._received + len(data)] = np.frombuffer(data, np.uint8)
        self._received += len(data)
        self._chunks += 1

    def finish(self) -> npt.NDArray[np.uint8]:
        """All bytes, read-only.

        Raises:
            WireError: some are missing.
        """
        if self._received < self._size:
            raise WireError(f"the stream ended after {self._received} of {self._size} bytes")
        self._bytes.flags.writeable = False
        return self._bytes


Number = np.dtype[np.float32] | np.dtype[np.int32] | np.dtype[np.int64]

FLOAT32: Number = np.dtype("<f4")
INT32: Number = np.dtype("<i4")
INT64: Number = np.dtype("<i8")
_ON_WIRE = {FLOAT32: pb.FLOAT32, INT32: pb.INT32, INT64: pb.INT64}
_NAMED = {number: dtype for dtype, number in _ON_WIRE.items()}
_LEGAL = tuple(map(str, _ON_WIRE))


@dataclass(frozen=True)
class Manifest:
    """What a stream of tensors holds.

    Attributes:
        layout: names and shapes, in the order of the stream.
        dtype: of all components, `FLOAT32`, `INT32` or `INT64`.

    Raises:
        InvalidValueError: the dtype is another.
    """

    layout: Layout
    dtype: Number

    def __post_init__(self) -> None:
        if self.dtype not in _ON_WIRE:
            raise InvalidValueError(f"dtype is {self.dtype}; legal are {', '.join(_LEGAL)}")

    @property
    def size(self) -> int:
        """Bytes of the stream."""
        return self.layout.dimension * self.dtype.itemsize


def manifest_of(tensors: Tensors) -> Manifest:
    """The header of tensors, in their order.

    Args:
        tensors: all float32, all int32 or all int64; any values, NaN and ±inf too.

    Raises:
        InvalidValueError: there are none, or their dtypes are others.
    """
    dtypes = {tensor.dtype.newbyteorder("<") for tensor in tensors.values()}
    for dtype in _ON_WIRE:
        if dtypes == {dtype}:
            return Manifest(Layout.of(tensors), dtype)
    found = ", ".join(sorted(map(str, dtypes))) or "none"
    raise InvalidValueError(
        f"dtypes of tensors are {found}; all must be one of {', '.join(_LEGAL)}"
    )


def pieces(tensors: Tensors) -> Iterator[memoryview]:
    """Bytes of tensors of one dtype, at most `CHUNK_BYTES` at once, as views where they can be."""
    for tensor in tensors.values():
        step = CHUNK_BYTES // tensor.dtype.itemsize
        flat = tensor.reshape(-1) if tensor.flags.c_contiguous else tensor.flat
        for start in range(0, tensor.size, step):
            piece = np.asarray(flat[start : start + step])
            yield piece.astype(piece.dtype.newbyteorder("<"), copy=False).view(np.uint8).data


class Receiver:
    """Puts tensors together from chunks, with the guarantees of `Assembler`.

    Args:
        manifest: what was declared and found legal.

    Raises:
        WireError: there is no memory for the tensors.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._assembler = Assembler(manifest.size, manifest.size)

    def add(self, chunk: pb.Chunk) -> None:
        """Take the next chunk.

        Raises:
            WireError: it is refused by `Assembler.add`.
        """
        self._assembler.add(chunk)

    def finish(self) -> dict[str, npt.NDArray[np.generic]]:
        """The tensors, in the order of the manifest, read-only and in this machine's byte order.

        Raises:
            WireError: the stream is not complete, or not the declared one.
        """
        vector = self._assembler.finish().view(self._manifest.dtype)
        native = vector.astype(vector.dtype.newbyteorder("="), copy=False)
        native.flags.writeable = False
        return self._manifest.layout.unflatten(native)


def encode_layout(layout: Layout) -> pb.Layout:
    """The message of a layout.

    Raises:
        WireError: it passes a limit.
    """
    with refusing("a layout"):
        shapes = [pb.Shape(sizes=shape) for shape in layout.shapes]
        message = pb.Layout(names=layout.names, shapes=shapes)
    _check_layout(message)
    return message


def decode_layout(message: pb.Layout) -> Layout:
    """The layout of a message; total.

    Raises:
        WireError: it is not legal, or passes a limit.
    """
    _check_layout(message)
    with refusing("a layout"):
        return Layout(tuple(message.names), _shapes(message))


def _check_layout(message: pb.Layout) -> None:
    at_most("tensors", max(len(message.names), len(message.shapes)), MAX_TENSORS)
    check_names("tensor", message.names)
    components = 0
    for shape in message.shapes:
        at_most("dimensions of a tensor", len(shape.sizes), MAX_DIMENSIONS)
        # NumPy refuses a shape whose product without zeros is too large, even if one is there.
        components += prod(max(size, 1) for size in shape.sizes)
    at_most("components of tensors", components, MAX_COMPONENTS)


def _shapes(message: pb.Layout) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(shape.sizes) for shape in message.shapes)


def encode_manifest(manifest: Manifest) -> pb.Tensors:
    """The message of a manifest.

    Raises:
        WireError: it passes a limit.
    """
    return pb.Tensors(
        layout=encode_layout(manifest.layout),
        dtype=_ON_WIRE[manifest.dtype],
        size=manifest.size,
    )


def decode_manifest(message: pb.Tensors) -> Manifest:
    """The manifest of a message whose layout is not known yet; total.

    Raises:
        WireError: it is not legal, or passes a limit.
    """
    return _manifest(message, decode_layout(message.layout))


def expect_manifest(message: pb.Tensors, layout: Layout, dtypes: Sequence[Number]) -> Manifest:
    """The manifest of a message that must have this layout and one of these dtypes; total.

    Raises:
        WireError: names, shapes, their order, dtype or size are others.
    """
    names = message.layout.names
    if len(names) != len(layout.names) or tuple(names) != layout.names:
        odd = set(names).symmetric_difference(layout.names)
        raise WireError(f"{len(odd)} tensors are missing or unknown, or their order is another")
    at_most("shapes", len(message.layout.shapes), len(layout.shapes))
    if _shapes(message.layout) != layout.shapes:
        raise WireError("the shapes of the tensors are not those that were asked for")
    manifest = _manifest(message, layout)
    if manifest.dtype not in dtypes:
        legal = " or ".join(map(str, dtypes))
        raise WireError(f"the tensors are {manifest.dtype}; they must be {legal}")
    return manifest


def _manifest(message: pb.Tensors, layout: Layout) -> Manifest:
    dtype = _NAMED.get(message.dtype)
    if dtype is None:
        raise WireError(f"dtype is number {message.dtype}; legal are {sorted(_NAMED)}")
    with refusing("a header of tensors"):
        manifest = Manifest(layout, dtype)
    if message.size != manifest.size:
        raise WireError(f"the tensors have {manifest.size} bytes, not {message.size}")
    return manifest
