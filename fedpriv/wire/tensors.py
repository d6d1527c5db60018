"""Bytes as a stream of checksummed chunks, and named tensors as a header and such a stream.

The stream holds the components of tensors in C order, little-endian on every machine.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError, WireError
from fedpriv.privacy.layout import Layout, Tensors
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.codec import Codec, FieldCodec, FieldCodecs, at_most, list_of

MAX_DIMENSIONS = 32  # of one tensor; NumPy 1 has no more
MAX_COMPONENTS = 2**30  # of all tensors together
CHUNK_BYTES = 2**18  # in every chunk but the last, which holds the rest

Bytes = bytes | bytearray | memoryview
Number = np.dtype[np.float32] | np.dtype[np.int32] | np.dtype[np.int64]
FLOAT32: Number = np.dtype("<f4")
INT32: Number = np.dtype("<i4")
INT64: Number = np.dtype("<i8")
_ON_WIRE = {FLOAT32: pb.FLOAT32, INT32: pb.INT32, INT64: pb.INT64}
_NAMED = {number: dtype for dtype, number in _ON_WIRE.items()}
_LEGAL = ", ".join(map(str, _ON_WIRE))


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
        left, data = self._size - self._received, chunk.data
        if not left:
            raise WireError(f"chunk {chunk.number} follows after all {self._received} bytes")
        if chunk.number != self._chunks:
            raise WireError(f"chunk {chunk.number} came in place of chunk {self._chunks}")
        if len(data) != (size := min(left, CHUNK_BYTES)):
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


@dataclass(frozen=True)
class Manifest:
    """The tensors of a stream, in its order; all have one dtype, which must be one of three."""

    layout: Layout
    dtype: Number

    def __post_init__(self) -> None:
        if self.dtype not in _ON_WIRE:
            raise InvalidValueError(f"dtype is {self.dtype}; legal are {_LEGAL}")

    @property
    def size(self) -> int:
        """Bytes of the stream."""
        return self.layout.dimension * self.dtype.itemsize


def manifest_of(tensors: Tensors) -> Manifest:
    """Return the manifest of tensors; InvalidValueError unless all have the same legal dtype."""
    dtypes = {tensor.dtype.newbyteorder("<") for tensor in tensors.values()}
    for dtype in _ON_WIRE:
        if dtypes == {dtype}:
            return Manifest(Layout.of(tensors), dtype)
    names = ", ".join(sorted(map(str, dtypes))) or "none"
    raise InvalidValueError(f"dtypes of tensors are {names}; all must be one of {_LEGAL}")


def pieces(tensors: Tensors) -> Iterator[memoryview]:
    """Yield the bytes of tensors of one dtype, at most `CHUNK_BYTES` each, as views if possible."""
    for tensor in tensors.values():
        step = CHUNK_BYTES // tensor.dtype.itemsize
        flat = tensor.reshape(-1) if tensor.flags.c_contiguous else tensor.flat
        for start in range(0, tensor.size, step):
            piece = np.asarray(flat[start : start + step])
            yield piece.astype(piece.dtype.newbyteorder("<"), copy=False).view(np.uint8).data


class Receiver:
    """Assembles tensors from chunks, with the guarantees of `Assembler`."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._assembler = Assembler(manifest.size, manifest.size)
        self.add = self._assembler.add

    def finish(self) -> dict[str, npt.NDArray[np.generic]]:
        """Return the tensors in the manifest's order, read-only, in this machine's byte order.

        WireError: bytes are missing.
        """
        vector = self._assembler.finish().view(self._manifest.dtype)
        native = vector.astype(vector.dtype.newbyteorder("="), copy=False)
        native.flags.writeable = False
        return self._manifest.layout.unflatten(native)


def _checked_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    at_most("dimensions of a tensor", len(sizes), MAX_DIMENSIONS)
    return tuple(sizes)


def _check_components(message: pb.Layout) -> None:
    # NumPy refuses a shape if the product of its sizes other than zeros is too large.
    shapes = [_checked_sizes(shape.sizes) for shape in message.shapes]
    total = sum(prod(max(size, 1) for size in shape) for shape in shapes)
    at_most("components of tensors", total, MAX_COMPONENTS)


def _dtype_numbered(number: pb.DType) -> Number:
    if number not in _NAMED:
        raise WireError(f"dtype is number {number}; legal are {sorted(_NAMED)}")
    return _NAMED[number]


def _manifest(layout: Layout, dtype: Number, size: int) -> Manifest:
    manifest = Manifest(layout, dtype)
    if size != manifest.size:
        raise WireError(f"the tensors have {manifest.size} bytes, not {size}")
    return manifest


SHAPE = FieldCodec(lambda s: pb.Shape(sizes=_checked_sizes(s)), lambda s: _checked_sizes(s.sizes))
LAYOUT = Codec(Layout, pb.Layout, "a layout", {"shapes": list_of(SHAPE)}, check=_check_components)
_DECLARED: FieldCodecs = {
    "layout": LAYOUT,
    "dtype": FieldCodec(_ON_WIRE.__getitem__, _dtype_numbered),
}
MANIFEST = Codec(_manifest, pb.Tensors, "a manifest of tensors", _DECLARED)
