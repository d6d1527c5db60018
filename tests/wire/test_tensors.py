"""Tensors on the wire: bit by bit the same, in one byte order, of the expected names and shapes."""

import struct
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpriv.errors import WireError
from fedpriv.privacy.layout import Layout
from fedpriv.wire import chunks, pieces
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.codec import LAYOUT as LAYOUT_CODEC
from fedpriv.wire.codec import (
    MAX_COMPONENTS,
    MAX_TENSORS,
)
from tests.wire.examples import float32s, peak_memory, shapes, words
from tests.wire.stub import received


def sent_and_received(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    (dtype,) = {tensor.dtype.newbyteorder("<") for tensor in tensors.values()}
    return received(Layout.of(tensors), chunks(pieces(tensors)), dtype)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.dictionaries(words, shapes, min_size=1, max_size=5))
def test_any_float32_tensors_arrive_bit_by_bit(
    data: st.DataObject, named: dict[str, tuple[int, ...]]
) -> None:
    sent = {name: data.draw(float32s(shape)) for name, shape in named.items()}
    got = sent_and_received(sent)
    assert list(got) == list(sent)
    for name, tensor in sent.items():
        assert got[name].dtype == np.float32
        assert got[name].shape == tensor.shape
        assert got[name].tobytes() == tensor.tobytes()
        assert not got[name].flags.writeable


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from([np.int32, np.int64]), st.integers(0, 9))
def test_any_vector_of_integers_arrives(data: st.DataObject, dtype: type, size: int) -> None:
    total = data.draw(hnp.arrays(dtype, size))
    got = sent_and_received({"sum": total})["sum"]
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, total)


def test_bytes_are_little_endian_in_c_order_whatever_the_memory() -> None:
    tensor = np.arange(6, dtype=np.float32).reshape(2, 3)
    expected = struct.pack("<6f", *range(6))
    strided = np.repeat(tensor, 2, axis=1)[:, ::2]
    for given_as in (tensor, tensor.astype(">f4"), np.asfortranarray(tensor), strided):
        assert b"".join(pieces({"w": given_as})) == expected
    for dtype, code in (("i4", "<3i"), ("i8", "<3q")):
        for order in "<>":
            sent = {"sum": np.array([1, -2, 2**31 - 1], order + dtype)}
            assert b"".join(pieces(sent)) == struct.pack(code, 1, -2, 2**31 - 1)


def test_tens_of_megabytes_stream_without_a_copy_of_the_whole() -> None:
    size = 2**20
    large = {"w": np.ones((12, size), np.float32), "t": np.ones((2, size), np.float32).T}
    total = 14 * 4 * size
    with peak_memory() as peak:
        got = sent_and_received(large)
    assert peak() < total + 8 * 2**20
    assert all(np.array_equal(got[name], large[name]) for name in large)


@pytest.mark.parametrize(
    ("names", "sizes", "reason"),
    [
        (["w", "w"], [[1], [1]], "named twice"),
        (["w"], [], "1 names have 0 shapes"),
        (["w"] * (MAX_TENSORS + 1), [], "there are 4097 names"),
        ([], [[]] * (MAX_TENSORS + 1), "there are 4097 shapes"),
        (["w" * 1025], [[1]], "1025 characters"),
        (["w"], [[1] * 33], "33 dimensions"),
        (["w"], [[2**64 - 1] * 32], "components"),
        (["w"], [[0, MAX_COMPONENTS + 1]], "components"),
        (["w", "b"], [[MAX_COMPONENTS], [1]], "components"),
    ],
    ids=["twice", "shapes", "names", "empty", "long", "deep", "huge", "none", "sum"],
)
def test_hostile_layouts_are_refused(names: list[str], sizes: list[list[int]], reason: str) -> None:
    message = pb.Layout(names=names, shapes=[pb.Shape(sizes=size) for size in sizes])
    with pytest.raises(WireError, match=reason):
        LAYOUT_CODEC.decode(message)


def test_layouts_at_the_limits_pass_both_ways_and_beyond_them_neither() -> None:
    most = Layout(tuple(map(str, range(MAX_TENSORS))), ((1,),) * MAX_TENSORS)
    assert LAYOUT_CODEC.decode(LAYOUT_CODEC.encode(most)) == most
    widest = Layout(("w",), ((MAX_COMPONENTS,),))
    assert LAYOUT_CODEC.decode(LAYOUT_CODEC.encode(widest)) == widest
    for beyond in (Layout(("w",), ((MAX_COMPONENTS + 1,),)), Layout(("w",), ((2**64,),))):
        with pytest.raises(WireError):
            LAYOUT_CODEC.encode(beyond)
