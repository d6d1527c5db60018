import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.layout import Layout

shapes = st.lists(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4), max_size=4)


@given(shapes, st.sampled_from([np.float16, np.float32, np.float64]), st.data())
def test_flatten_and_unflatten_are_inverse(
    shapes: list[tuple[int, ...]], dtype: type, data: st.DataObject
) -> None:
    tensors = {
        f"t{i}": data.draw(hnp.arrays(dtype, shape, elements={"allow_nan": False}))
        for i, shape in enumerate(shapes)
    }
    layout = Layout.of(tensors)
    vector = layout.flatten(tensors)
    assert vector.dtype == np.float64
    assert vector.shape == (layout.dimension,) == (sum(t.size for t in tensors.values()),)
    back = layout.unflatten(vector)
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(back[name], tensor)


def test_order_is_of_the_layout_not_of_the_mapping() -> None:
    layout = Layout(("a", "b"), ((1,), (2,)))
    vector = layout.flatten({"b": np.array([2.0, 3.0]), "a": np.array([1.0])})
    np.testing.assert_array_equal(vector, [1.0, 2.0, 3.0])


def test_components_are_in_c_order_whatever_the_memory() -> None:
    layout, square = Layout(("w",), ((2, 3),)), np.arange(6.0).reshape(2, 3)
    strided = np.repeat(square, 2, axis=1)[:, ::2]
    for tensor in (square, np.asfortranarray(square), strided, square.astype(">f4")):
        vector = layout.flatten({"w": tensor})
        np.testing.assert_array_equal(vector, np.arange(6.0))
        assert vector.dtype == np.float64


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": np.zeros(2)}, "'b'"),
        ({"a": np.zeros(2), "b": np.zeros(1), "c": np.zeros(1)}, "'c'"),
        ({"a": np.zeros(3), "b": np.zeros(1)}, r"'a' is float64\[3\].* shape \[2\]"),
        ({"a": np.zeros(2, np.int64), "b": np.zeros(1)}, "int64"),
        ({"a": np.zeros(2), "b": np.array(["x"])}, "'b'"),
    ],
)
def test_malformed_tensors_are_named(tensors: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        Layout(("a", "b"), ((2,), (1,))).flatten(tensors)


def test_bad_layouts_and_vectors_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="'a' is named twice"):
        Layout(("a", "a"), ((1,), (1,)))
    with pytest.raises(InvalidValueError, match="1 names have 2 shapes"):
        Layout(("a",), ((1,), (1,)))
    with pytest.raises(InvalidValueError, match=r"\[3\]; it must be \[2\]"):
        Layout(("a",), ((2,),)).unflatten(np.zeros(3))
