"""Bytes of any length as a stream of checksummed chunks, and back within a declared size."""

import zlib
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from fedpriv.errors import WireError
from fedpriv.wire import federation_pb2 as pb

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
