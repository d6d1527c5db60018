"""Groups of tensors that are clipped together, their clipping norms, and shares of the noise.

Derive a class from `ClippingPolicy` to add a way to clip.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, Self

from fedpriv.errors import InvalidValueError
from fedpriv.privacy import layout as vector_groups
from fedpriv.privacy.gaussian_mechanism import given_shares
from fedpriv.privacy.layout import Layout, Parts, VectorGroup
from fedpriv.support.checks import check_range, check_types, hold_plain_numbers, require

Allocation = Literal["proportional", "dimension"] | Mapping[str, float]
"""The shares of vector groups in the noise: by clipping norm, by dimension, or by given weights."""


def _given(norm: float | None) -> float:
    if norm is None:
        raise InvalidValueError("the clipping norm is absent; Mechanism.for_users gives one")
    return norm


def check_choice(name: str, value: object, *words: str, each: str = "") -> None:
    """Raise unless a value is one of some words or, with `each`, positive numbers by name."""
    if isinstance(value, Mapping) and each:
        for key, number in value.items():
            check_range(f"{name} of {key!r}", number, "(0, inf)")
        return
    numbers = f" or a positive number for each {each}" if each else ""
    legal = " or ".join(map(repr, words))
    valid = isinstance(value, str) and value in words
    require(valid, f"{name} is {value!r}; it must be {legal}{numbers}")


def equal_split(parts: Parts, clipping_norm: float) -> dict[str, float]:
    """Return S_g = S/√G for each part, so that Σ S_g² = S²."""
    return {name: clipping_norm / math.sqrt(len(parts)) for name in parts}


def split_by_dimension(layout: Layout, parts: Parts, clipping_norm: float) -> dict[str, float]:
    """Return S_g = S·√(d_g/D), so that Σ S_g² = S² and all components have the same share."""
    dimensions = {name: sum(layout.sizes[t] for t in tensors) for name, tensors in parts.items()}
    total = layout.dimension
    return {name: clipping_norm * math.sqrt(d / total) for name, d in dimensions.items()}


def scales_by_dimension(layout: Layout) -> dict[str, float]:
    """Return scales α_j ∝ d_j^(−1/4), which minimise the total noise for updates of equal norms.

    At noise multiplier z, tensor j gets noise of energy d_j·(zSα_j)². Users whose tensors all have
    norm v remain unclipped if S² = v²·Σ 1/α_j². The product Σ d_j·α_j² · Σ 1/α_j² is minimal for
    α_j² ∝ 1/√d_j (Cauchy–Schwarz). The scales are normalised to Σ d_j·α_j² = D, so that joint
    clipping adds as much total noise as flat clipping with the same S.
    """
    sizes = {name: max(size, 1) for name, size in layout.sizes.items()}
    energy = math.fsum(math.sqrt(size) for size in sizes.values())
    total = math.fsum(sizes.values())
    return {name: math.sqrt(total / energy) * size**-0.25 for name, size in sizes.items()}


def proportional_shares(groups: tuple[VectorGroup, ...]) -> tuple[float, ...]:
    """Return ω_g = 1/G: all groups have equal shares, so σ_g = z·√G·S_g."""
    return (1.0 / len(groups),) * len(groups)


def dimension_shares(layout: Layout, groups: tuple[VectorGroup, ...]) -> tuple[float, ...]:
    """Return ω_g = d_g/D, so σ_g = z·S_g·√(D/d_g), proportional to the largest RMS component."""
    return tuple(group.dimension(layout) / layout.dimension for group in groups)


@dataclass(frozen=True)
class Grouping:
    """A partition of an update into vector groups, and each group's share ω of the noise budget."""

    groups: tuple[VectorGroup, ...]
    shares: tuple[float, ...]

    @classmethod
    def of(cls, groups: tuple[VectorGroup, ...], layout: Layout, allocation: Allocation) -> Self:
        """Return groups of a layout with the shares that an allocation gives them."""
        if not isinstance(allocation, str):
            return cls(groups, given_shares(groups, allocation))
        if allocation == "dimension":
            return cls(groups, dimension_shares(layout, groups))
        return cls(groups, proportional_shares(groups))


class ClippingPolicy(ABC):
    """A way to clip each user's update (McMahan et al. 2018, section 3)."""

    @abstractmethod
    def grouping(self, layout: Layout, allocation: Allocation) -> Grouping:
        """Return the vector groups of an update and their shares of the noise budget."""


@dataclass(frozen=True)
class Flat(ClippingPolicy):
    """Clips the whole update to one norm S; None: the norm of `Mechanism.for_users`.

    Without noise, S may be infinite, and nothing is clipped.

    >>> Flat(0.5).grouping(Layout(("w", "b"), ((2, 3), (3,))), "proportional").shares
    (1.0,)
    """

    norm: float | None = None

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        if self.norm != math.inf:
            check_range("the clipping norm", self.norm, "(0, inf)?")

    def grouping(self, layout: Layout, allocation: Allocation) -> Grouping:
        """Return one group."""
        norm = vector_groups.NO_CLIPPING if self.norm == math.inf else _given(self.norm)
        return Grouping.of(vector_groups.flat(layout, norm), layout, allocation)


@dataclass(frozen=True)
class PerLayer(ClippingPolicy):
    """Clips each layer, or each tensor, to its own norm S_g, with Σ S_g² = S².

    The norms are equal or ∝ √dimension. If `split` gives S_g by name, S is ignored.
    """

    norm: float | None = None
    parts: Literal["layer", "tensor"] = "layer"
    split: Literal["equal", "dimension"] | Mapping[str, float] = "equal"

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        check_choice("parts", self.parts, "layer", "tensor")
        check_choice("split", self.split, "equal", "dimension", each="part")
        if isinstance(self.split, str):
            check_range("the clipping norm", self.norm, "(0, inf)?")

    def grouping(self, layout: Layout, allocation: Allocation) -> Grouping:
        """Return a group for each part."""
        parts: Mapping[str, tuple[str, ...]] = {name: (name,) for name in layout.names}
        if self.parts == "layer":
            parts = vector_groups.layers(layout)
        norms = self.split
        if norms == "equal":
            norms = equal_split(parts, _given(self.norm))
        elif norms == "dimension":
            norms = split_by_dimension(layout, parts, _given(self.norm))
        return Grouping.of(vector_groups.per_layer(layout, parts, norms), layout, allocation)


@dataclass(frozen=True)
class Joint(ClippingPolicy):
    """Clips the whole update to one norm S, with each tensor in units of its scale α."""

    norm: float | None = None  # S, of the scaled update
    scales: Literal["dimension"] | Mapping[str, float] = "dimension"  # α ∝ dimension^(−1/4), or α

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        check_range("the clipping norm", self.norm, "(0, inf)?")
        check_choice("scales", self.scales, "dimension", each="tensor")

    def grouping(self, layout: Layout, allocation: Allocation) -> Grouping:
        """Return one group."""
        scales, norm = self.scales, _given(self.norm)
        if scales == "dimension":
            scales = scales_by_dimension(layout)
        return Grouping.of(vector_groups.joint(layout, norm, scales), layout, allocation)


@dataclass(frozen=True)
class Part:
    """Some tensors of a model, and the clipping policy for them."""

    tensors: Sequence[str]  # globs over parameter names, such as "conv*" or "*.bias"
    clipping: ClippingPolicy
    share: float | None = None  # their weight in the noise budget; for all parts, or none

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        if isinstance(self.tensors, str):  # each of its letters would be a pattern
            raise InvalidValueError(f"tensors are {self.tensors!r}; they must be a list of globs")
        check_types(tensors=(self.tensors, Sequence), clipping=(self.clipping, ClippingPolicy))
        for glob in self.tensors:
            check_types(**{"one of tensors": (glob, str)})


@dataclass(frozen=True)
class Grouped(ClippingPolicy):
    """Clips parts of a model by their own policies; a tensor is in the first part that matches.

    >>> parts = {"conv": Part(["conv*"], Joint(0.3)), "rest": Part(["*"], Flat(0.5))}
    >>> layout = Layout(("conv.weight", "fc.weight", "fc.bias"), ((4, 4), (2, 4), (2,)))
    >>> [group.name for group in Grouped(parts).grouping(layout, "proportional").groups]
    ['conv', 'rest']
    """

    parts: Mapping[str, Part]

    def __post_init__(self) -> None:
        check_types(parts=(self.parts, Mapping))
        for name, part in self.parts.items():
            check_types(**{"a name of parts": (name, str), f"part {name!r}": (part, Part)})

    def grouping(self, layout: Layout, allocation: Allocation) -> Grouping:
        """Return the groups of all parts, named after their part."""
        weights = [part.share for part in self.parts.values() if part.share is not None]
        if weights and len(weights) < len(self.parts):
            raise InvalidValueError("some groups have a share; all must have one, or none")
        if weights and not isinstance(allocation, str):
            raise InvalidValueError(
                "noise.allocation is a table and clipping.groups have shares; only one may be given"
            )
        inner = allocation if isinstance(allocation, str) else "proportional"
        layouts = self._layouts(layout)
        groupings = {n: p.clipping.grouping(layouts[n], inner) for n, p in self.parts.items()}
        groups = tuple(
            replace(group, name=name if group.name == "update" else f"{name}/{group.name}")
            for name, grouping in groupings.items()
            for group in grouping.groups
        )
        if not weights:
            return Grouping.of(groups, layout, allocation)
        shares = tuple(
            weight / sum(weights) * share
            for weight, grouping in zip(weights, groupings.values(), strict=True)
            for share in grouping.shares
        )
        return Grouping(groups, shares)

    def _layouts(self, layout: Layout) -> dict[str, Layout]:
        """Return the tensors of each part."""
        rest, layouts = dict(zip(layout.names, layout.shapes, strict=True)), {}
        for name, part in self.parts.items():
            fit = [t for t in rest if any(fnmatchcase(t, pattern) for pattern in part.tensors)]
            if not fit:
                raise InvalidValueError(
                    f"group {name!r} has no tensor that fits {list(part.tensors)} but no earlier "
                    f"group; the tensors are {list(layout.names)}"
                )
            layouts[name] = Layout(tuple(fit), tuple(rest.pop(tensor) for tensor in fit))
        if rest:
            raise InvalidValueError(
                f"tensor {next(iter(rest))!r} fits no pattern of clipping.groups; every tensor "
                'must be in one, and a last group with the pattern "*" takes the rest'
            )
        return layouts


CLIPPINGS: dict[str, type[ClippingPolicy]] = {"flat": Flat, "per-layer": PerLayer, "joint": Joint}
"""The values of clipping.strategy in a configuration."""
