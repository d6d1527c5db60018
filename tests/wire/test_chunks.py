"""Chunks: cut as by slicing, put together only when every byte is the declared one."""

import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.errors import WireError
from fedpriv.wire import CHUNK_BYTES, Assembler, chunks
from fedpriv.wire import federation_pb2 as pb
from tests.wire.examples import peak_memory

DATA = np.random.default_rng(0).bytes(5 * CHUNK_BYTES // 2)
lengths = st.sampled_from([0, 1, 1000, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2_500_000])


def assembled(stream: list[pb.Chunk], size: int = len(DATA)) -> bytes:
    assembler = Assembler(size, size)
    for chunk in stream:
        assembler.add(chunk)
    return assembler.finish().tobytes()


@settings(max_examples=25, deadline=None)
@given(st.lists(lengths, max_size=4))
def test_pieces_of_any_length_are_cut_as_if_they_were_one(pieces: list[int]) -> None:
    data = [bytes([i + 1]) * length for i, length in enumerate(pieces)]
    whole = b"".join(data)
    stream = list(chunks(data))
    cut = [whole[start : start + CHUNK_BYTES] for start in range(0, len(whole), CHUNK_BYTES)]
    assert [chunk.data for chunk in stream] == cut
    assert [chunk.number for chunk in stream] == list(range(len(cut)))
    assert [chunk.crc32 for chunk in stream] == [zlib.crc32(part) for part in cut]
    assert assembled(stream, len(whole)) == whole


def test_assemblers_in_threads_have_nothing_in_common() -> None:
    data = [np.random.default_rng(seed).bytes(2 * CHUNK_BYTES + seed) for seed in range(4)]
    streams = [list(chunks([one])) for one in data]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(assembled, streams, map(len, data))) == data


def test_what_is_put_together_is_read_only() -> None:
    assembler = Assembler(3, 3)
    assembler.add(next(chunks([b"abc"])))
    with pytest.raises(ValueError, match="read-only"):
        assembler.finish()[0] = 1


def damaged(chunk: pb.Chunk, **changes: object) -> pb.Chunk:
    copy = pb.Chunk()
    copy.CopyFrom(chunk)
    for name, value in changes.items():
        setattr(copy, name, value)
    return copy


def relabelled(chunk: pb.Chunk, data: bytes) -> pb.Chunk:
    return pb.Chunk(number=chunk.number, data=data, crc32=zlib.crc32(data))


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (lambda s: s[2], "chunk 2 came in place of chunk 1"),
        (lambda s: s[0], "chunk 0 came in place of chunk 1"),
        (lambda s: damaged(s[1], crc32=s[1].crc32 ^ 1), "CRC-32"),
        (lambda s: damaged(s[1], data=b"x" + s[1].data[1:]), "CRC-32"),
        (lambda s: relabelled(s[1], s[1].data[:-1]), "it must have 262144"),
        (lambda s: relabelled(s[1], s[1].data + b"x"), "it must have 262144"),
        (lambda s: relabelled(s[1], b""), "it must have 262144"),
    ],
    ids=["gap", "repetition", "checksum", "bit", "short", "long", "empty"],
)
def test_a_wrong_chunk_is_refused_as_it_comes_and_changes_nothing(
    second: Callable[[list[pb.Chunk]], pb.Chunk], reason: str
) -> None:
    stream = list(chunks([DATA]))
    assembler = Assembler(len(DATA), len(DATA))
    assembler.add(stream[0])
    with pytest.raises(WireError, match=reason):
        assembler.add(second(stream))
    for chunk in stream[1:]:
        assembler.add(chunk)
    assert assembler.finish().tobytes() == DATA


def test_nothing_follows_the_end() -> None:
    stream = list(chunks([DATA]))
    with pytest.raises(WireError, match="chunk 3 follows after all"):
        assembled([*stream, damaged(stream[2], number=3)])
    with pytest.raises(WireError, match="follows after all 0 bytes"):
        assembled(stream[:1], 0)
    assert assembled([], 0) == b""


def test_a_stream_that_ends_early_is_refused() -> None:
    stream = list(chunks([DATA]))
    with pytest.raises(WireError, match="ended after 524288 of 655360 bytes"):
        assembled(stream[:2])


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_other_stream_is_believed(data: st.DataObject) -> None:
    """Lost, repeated, reordered and damaged chunks; whoever can make checksums is up to TLS."""
    stream = list(chunks([DATA]))
    chosen = data.draw(st.lists(st.sampled_from(range(3)), max_size=5))
    altered = [damaged(stream[i]) for i in chosen]
    if altered and data.draw(st.booleans()):
        part = data.draw(st.sampled_from(altered))
        part.data = data.draw(st.binary(max_size=10))
    if [chunk.data for chunk in altered] == [chunk.data for chunk in stream]:
        assert assembled(altered) == DATA
    else:
        with pytest.raises(WireError):
            assembled(altered)


def test_a_larger_size_than_agreed_is_refused_before_memory_is_taken() -> None:
    with peak_memory() as peak, pytest.raises(WireError, match="may be at most 1000"):
        Assembler(2**63, 1000)
    assert peak() < 2**20
    with pytest.raises(WireError, match="no memory"):
        Assembler(2**62, 2**62)


def test_cutting_and_assembling_hold_little_beside_the_declared_bytes() -> None:
    size = 48 * 2**20
    piece = bytes(3 * 2**20 + 1)

    def pieces() -> Iterator[bytes]:
        left = size
        while left:
            yield piece[:left]
            left -= min(left, len(piece))

    with peak_memory() as peak:
        assert sum(len(chunk.data) for chunk in chunks(pieces())) == size
    assert peak() < 8 * 2**20
    with peak_memory() as peak:
        assembler = Assembler(size, size)
        for chunk in chunks(pieces()):
            assembler.add(chunk)
        assert assembler.finish().nbytes == size
    assert peak() < size + 8 * 2**20
