"""Named tensors as a header and a stream of bytes: C order, little endian on every machine."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError, WireError
from fedpriv.privacy.layout import Layout, Tensors
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.chunks import CHUNK_BYTES, Assembler
from fedpriv.wire.limits import (
    MAX_COMPONENTS,
    MAX_DIMENSIONS,
    MAX_TENSORS,
    at_most,
    check_names,
    refusing,
)

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
