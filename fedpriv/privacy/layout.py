"""Named tensors as one flat vector, in one fixed order."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError

FloatVector = npt.NDArray[np.float64]
Scalar = TypeVar("Scalar", bound=np.generic)
Tensors = Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the tensors of an update, in the order of the flat vector.

    Attributes:
        names: tensor names, each once.
        shapes: one shape per name; () is a scalar and a dimension may be 0.

    Raises:
        InvalidValueError: a name occurs twice, or names and shapes differ in number.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes):
            raise InvalidValueError(
                f"{len(self.names)} names have {len(self.shapes)} shapes; each needs one"
            )
        for name, count in Counter(self.names).items():
            if count > 1:
                raise InvalidValueError(f"tensor {name!r} is named twice; names must be unique")

    @classmethod
    def of(cls, tensors: Tensors) -> "Layout":
        """Layout of `tensors`, in their order.

        >>> Layout.of({"weight": np.zeros((2, 3)), "bias": np.zeros(2)}).dimension
        8
        """
        return cls(tuple(tensors), tuple(tuple(t.shape) for t in tensors.values()))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Number of components of each tensor."""
        return {name: prod(shape) for name, shape in zip(self.names, self.shapes, strict=True)}

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Where each tensor lies in the flat vector."""
        slices, start = {}, 0
        for name, size in self.sizes.items():
            slices[name] = slice(start, start + size)
            start += size
        return slices

    @property
    def dimension(self) -> int:
        """Length D of the flat vector."""
        return sum(self.sizes.values())

    def flatten(self, tensors: Tensors) -> FloatVector:
        """Concatenate `tensors` to a float64 vector [D]; exact for float16, 32 and 64.

        Takes no memory but the vector.

        Raises:
            InvalidValueError: a tensor is missing, unknown, not a float, or of another shape.
        """
        if set(tensors) != set(self.names):
            odd = sorted(set(tensors) ^ set(self.names))
            raise InvalidValueError(f"tensors {odd} are missing or unknown; legal is {self.names}")
        vector = np.empty(self.dimension)
        for name, view in self.unflatten(vector).items():
            tensor = np.asarray(tensors[name])
            if tensor.shape != view.shape or not np.issubdtype(tensor.dtype, np.floating):
                raise InvalidValueError(
                    f"tensor {name!r} is {tensor.dtype}{list(tensor.shape)}; "
                    f"it must be floating point of shape {list(view.shape)}"
                )
            view[...] = tensor
        return vector

    def unflatten(self, vector: npt.NDArray[Scalar]) -> dict[str, npt.NDArray[Scalar]]:
        """Split a vector [D] into named views of it; inverse of `flatten`.

        Raises:
            InvalidValueError: the vector has another length.
        """
        if vector.shape != (self.dimension,):
            raise InvalidValueError(
                f"vector has shape {list(vector.shape)}; it must be [{self.dimension}]"
            )
        return {
            name: vector[self.slices[name]].reshape(shape)
            for name, shape in zip(self.names, self.shapes, strict=True)
        }
