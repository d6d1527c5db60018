"""The flat vector of named tensors, and the vector groups that are clipped together.

Flat, per-layer and joint clipping are three ways to form groups; all later code sees only groups
(McMahan et al. 2018, section 3).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError
from fedpriv.support.checks import check_range, hold_plain_numbers

FloatVector = npt.NDArray[np.float64]
Scalar = TypeVar("Scalar", bound=np.generic)
Tensors = Mapping[str, npt.NDArray[np.generic]]
Parts = Mapping[str, tuple[str, ...]]  # the tensor names of each part, by part name

SMALLEST_CLIPPING_NORM, LARGEST_CLIPPING_NORM = 1e-30, 1e30  # in float32's range
NO_CLIPPING = 2.0**26  # clips nothing that trains, in the steps of norm 1; only without noise
_BITS = 24  # a clipping norm has this many bits in steps: the precision of float32


@dataclass(frozen=True)
class Layout:
    """Names and shapes of the tensors of an update, in the order of the flat vector [D]."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # () is a scalar; a dimension may be 0

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
        """Return the layout of `tensors`, in their order.

        >>> Layout.of({"weight": np.zeros((2, 3)), "bias": np.zeros(2)}).dimension
        8
        """
        return cls(tuple(tensors), tuple(tuple(t.shape) for t in tensors.values()))

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Number of components of each tensor, by name."""
        return {name: prod(shape) for name, shape in zip(self.names, self.shapes, strict=True)}

    @cached_property
    def slices(self) -> dict[str, slice]:
        """Position of each tensor in the flat vector [D], by name."""
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
        """Concatenate `tensors` into a new float64 vector [D]; exact for float16, 32 and 64.

        Raises InvalidValueError if a name, shape or dtype differs from the layout.
        """
        if set(tensors) != set(self.names):
            names = sorted(set(tensors) ^ set(self.names))
            raise InvalidValueError(f"tensors {names} are missing or unknown; known: {self.names}")
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
        """Split a vector [D] into named views of its memory; the inverse of `flatten`."""
        if vector.shape != (self.dimension,):
            raise InvalidValueError(
                f"vector has shape {list(vector.shape)}; it must be [{self.dimension}]"
            )
        return {
            name: vector[self.slices[name]].reshape(shape)
            for name, shape in zip(self.names, self.shapes, strict=True)
        }


def granularity(clipping_norm: float) -> float:
    """Return γ, the largest power of two up to S·2^-24: one step of a contribution.

    >>> granularity(1.5) == granularity(NO_CLIPPING) == 2.0**-24
    True
    """
    clipping_norm = 1.0 if clipping_norm == NO_CLIPPING else clipping_norm
    return math.ldexp(1.0, math.frexp(clipping_norm)[1] - 1 - _BITS)


def squared_bound(clipping_norm: float) -> int:
    """Return B = ⌊(S/γ)²⌋ exactly, from 2^48 to 2^50. If Σaᵢ² ≤ B for integers a, γ·‖a‖₂ ≤ S.

    B of `NO_CLIPPING` is 2^100, which float64 does not bound exactly.
    """
    # The quotient is exact, since γ is a power of two.
    numerator, denominator = (clipping_norm / granularity(clipping_norm)).as_integer_ratio()
    return numerator * numerator // (denominator * denominator)


@dataclass(frozen=True)
class VectorGroup:
    """Tensors v_1…v_m that are clipped together, as one vector u = (v_1/α_1, …, v_m/α_m)."""

    name: str  # the ledger records the group under this name
    tensors: tuple[str, ...]  # their names
    clipping_norm: float  # S_g, the bound on ‖u‖₂
    scales: tuple[float, ...]  # α_j > 0 of each tensor; all 1 unless the group is clipped jointly

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        if not self.tensors:
            raise InvalidValueError(f"group {self.name!r} has no tensors; it must have one")
        norm_range = f"[{SMALLEST_CLIPPING_NORM}, {LARGEST_CLIPPING_NORM}]"
        check_range(f"clipping_norm of group {self.name!r}", self.clipping_norm, norm_range)
        if len(self.scales) != len(self.tensors):
            raise InvalidValueError(
                f"group {self.name!r} has {len(self.scales)} scales for {len(self.tensors)} "
                "tensors; each tensor needs one"
            )
        for tensor, scale in zip(self.tensors, self.scales, strict=True):
            check_range(f"scale of tensor {tensor!r}", scale, "[1e-12, 1e12]")

    @classmethod
    def single(cls, name: str, clipping_norm: float) -> "VectorGroup":
        """Return a group of one tensor, with the same name."""
        return cls(name, (name,), clipping_norm, (1.0,))

    @property
    def granularity(self) -> float:
        """γ_g, the size of one step of a contribution, in the units of u."""
        return granularity(self.clipping_norm)

    @property
    def squared_bound(self) -> int:
        """B_g, the largest sum of squares of one user's integers."""
        return squared_bound(self.clipping_norm)

    def dimension(self, layout: Layout) -> int:
        """Return d_g, the number of components."""
        return sum(layout.sizes[tensor] for tensor in self.tensors)


def check_partition(layout: Layout, groups: tuple[VectorGroup, ...]) -> None:
    """Raise InvalidValueError unless every tensor is in exactly one group and names are unique."""
    counts = Counter(tensor for group in groups for tensor in group.tensors)
    for tensor in layout.names:
        if counts[tensor] != 1:
            raise InvalidValueError(
                f"tensor {tensor!r} is in {counts[tensor]} vector groups; it must be in one"
            )
    unknown = sorted(set(counts) - set(layout.names))
    if unknown:
        raise InvalidValueError(f"vector groups name {unknown}; the tensors are {layout.names}")
    if len({group.name for group in groups}) != len(groups):
        raise InvalidValueError(f"names of vector groups {[g.name for g in groups]} are not unique")


# Ways to form groups.


def flat(layout: Layout, clipping_norm: float) -> tuple[VectorGroup, ...]:
    """Return one group that holds every tensor."""
    return joint(layout, clipping_norm, dict.fromkeys(layout.names, 1.0))


def joint(
    layout: Layout, clipping_norm: float, scales: Mapping[str, float]
) -> tuple[VectorGroup, ...]:
    """Return one group that holds every tensor j, in units of its scale α_j > 0."""
    check_names("scales and tensors", scales, layout.names)
    ordered = tuple(scales[name] for name in layout.names)
    return (VectorGroup("update", layout.names, clipping_norm, ordered),)


def per_layer(
    layout: Layout, parts: Parts, clipping_norms: Mapping[str, float]
) -> tuple[VectorGroup, ...]:
    """Return one group per part, such as the parts from `layers`, each with a clipping norm."""
    check_names("clipping norms and parts", clipping_norms, parts)
    groups = tuple(
        VectorGroup(name, tensors, clipping_norms[name], (1.0,) * len(tensors))
        for name, tensors in parts.items()
    )
    check_partition(layout, groups)
    return groups


def layers(layout: Layout) -> dict[str, tuple[str, ...]]:
    """Group tensor names by layer, the part of the name before the last dot.

    >>> layers(Layout(("fc.weight", "fc.bias", "scale"), ((2, 2), (2,), ())))
    {'fc': ('fc.weight', 'fc.bias'), 'scale': ('scale',)}
    """
    by_layer: dict[str, tuple[str, ...]] = {}
    for name in layout.names:
        layer = name.rpartition(".")[0] or name
        by_layer[layer] = (*by_layer.get(layer, ()), name)
    return by_layer


def check_names(what: str, values: Mapping[str, object], names: Iterable[str]) -> None:
    """Raise InvalidValueError unless the keys of `values` are exactly these names."""
    unexpected = sorted(set(values) ^ set(names))
    if unexpected:
        raise InvalidValueError(f"{what} differ in {unexpected}; each of {list(names)} needs one")
