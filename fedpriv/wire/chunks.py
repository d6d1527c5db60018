"""Bytes of any length as a stream of checksummed chunks, and back within a declared size."""

import hashlib
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError, WireError
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.limits import refusing

CHUNK_BYTES = 2**20
"""Data in every chunk but the last, which has what is left."""

Bytes = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Content:
    """Bytes that follow in chunks.

    Attributes:
        size: how many.
        sha256: of all of them, 32 bytes.

    Raises:
        InvalidValueError: the size is negative, or the digest has another length.
    """

    size: int
    sha256: bytes

    def __post_init__(self) -> None:
        if self.size < 0:
            raise InvalidValueError(f"size is {self.size}; it must not be negative")
        if len(self.sha256) != 32:
            raise InvalidValueError(f"sha256 has {len(self.sha256)} bytes; it must have 32")


def content_of(pieces: Iterable[Bytes]) -> Content:
    """Size and digest of the pieces one after the other, which are read once."""
    digest, size = hashlib.sha256(), 0
    for piece in pieces:
        digest.update(piece)
        size += len(piece)
    return Content(size, digest.digest())


def encode_content(content: Content) -> pb.Content:
    """The message of a content.

    Raises:
        WireError: the size passes 64 bits.
    """
    with refusing("a content"):
        return pb.Content(size=content.size, sha256=content.sha256)


def decode_content(message: pb.Content) -> Content:
    """The content of a message; total.

    Raises:
        WireError: the digest is none.
    """
    with refusing("a content"):
        return Content(message.size, message.sha256)


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
    """Puts the chunks of a content together.

    Guarantees:

    * it holds never more than the declared size, and takes memory as bytes arrive;
    * a chunk out of its turn (gap, repetition, beyond the end), of another length than it must
      have, or damaged is refused as it comes, and changes nothing;
    * `finish` returns only bytes of the declared size and digest.

    SHA-256 is most of the cost of a chunk, CRC-32 a fifth of it and the copy little. All three let
    other threads run, so several assemblers, each in a thread, work at the same time.

    Args:
        content: what was declared.
        most: the largest size to accept, in bytes.

    Raises:
        WireError: the size is larger, or there is no memory for it.
    """

    def __init__(self, content: Content, most: int) -> None:
        if content.size > most:
            raise WireError(f"a content has {content.size} bytes; it may have at most {most}")
        try:
            # Pages are taken when they are written, not here.
            self._bytes = np.empty(content.size, np.uint8)
        except MemoryError as error:
            raise WireError(f"there is no memory for the {content.size} bytes") from error
        self._content, self._received, self._chunks = content, 0, 0
        self._digest = hashlib.sha256()

    def add(self, chunk: pb.Chunk) -> None:
        """Take the next chunk.

        Raises:
            WireError: it is not the next one, has the wrong length, or its checksum differs.
        """
        left = self._content.size - self._received
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
        self._digest.update(data)
        self._received += len(data)
        self._chunks += 1

    def finish(self) -> npt.NDArray[np.uint8]:
        """All bytes, read-only.

        Raises:
            WireError: some are missing, or their SHA-256 is not the declared one.
        """
        if self._received < self._content.size:
            raise WireError(
                f"the stream ended after {self._received} of {self._content.size} bytes"
            )
        if self._digest.digest() != self._content.sha256:
            raise WireError(f"the SHA-256 of the {self._received} bytes is not the declared one")
        self._bytes.flags.writeable = False
        return self._bytes
