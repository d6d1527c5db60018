"""What one user adds to a sum: its tensors, clipped group by group, and whether they were."""

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.clipping import clip_in_place, norm_of
from fedpriv.privacy.groups import VectorGroup, check_partition
from fedpriv.privacy.layout import FloatVector, Layout, Tensors

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Indicator:
    """A tensor that says of some groups whether a user's part was *not* clipped.

    Each component is +1/2 if the group's part was within its norm, −1/2 if it was clipped, and 0
    for a user that contributes nothing. Centred like this, one user moves it by half as much.

    Attributes:
        tensor: its name in the layout; its shape is [number of groups].
        groups: names of the groups, in order.
    """

    tensor: str
    groups: tuple[str, ...]


@dataclass(frozen=True)
class Clipping:
    """How the tensors of one user become the vector [D] that it adds to a sum.

    Vectors are float64 and in the units of the *scaled* tensors u_j = v_j/α_j.

    Attributes:
        layout: all tensors of a contribution: the update, metrics and the indicator.
        groups: a partition of the tensors.
        indicator: where whether groups were clipped is written; None if nobody asks.
        weighted: names of the groups whose parts are multiplied by the user's weight.

    Raises:
        InvalidValueError: groups are no partition, or a name is not that of a group.
    """

    layout: Layout
    groups: tuple[VectorGroup, ...]
    indicator: Indicator | None = None
    weighted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_partition(self.layout, self.groups)
        names = [group.name for group in self.groups]
        asked = self.indicator.groups if self.indicator else ()
        for name in (*self.weighted, *asked):
            if name not in names:
                raise InvalidValueError(f"there is no vector group {name!r}; there are {names}")
        if self.indicator is not None:
            self._check_indicator(self.indicator)

    def _check_indicator(self, indicator: Indicator) -> None:
        """It is written after clipping, so its group must be wide enough for any of its values."""
        count, size = len(indicator.groups), self.layout.sizes.get(indicator.tensor)
        if size != count:
            raise InvalidValueError(
                f"tensor {indicator.tensor!r} has size {size}; it must be the {count} of its groups"
            )
        (group,) = [g for g in self.groups if indicator.tensor in g.tensors]
        if group.tensors != (indicator.tensor,) or group.scales != (1.0,):
            raise InvalidValueError(
                f"tensor {indicator.tensor!r} shares group {group.name!r} or has a scale; it must "
                "be alone and have none"
            )
        if group.name in self.weighted or 4.0 * group.clipping_norm**2 < count:
            raise InvalidValueError(
                f"group {group.name!r} is weighted or has clipping_norm {group.clipping_norm}; it "
                f"must have no weight and a norm of at least {math.sqrt(count) / 2}"
            )

    def contribution(self, tensors: Tensors, weight: float = 1.0) -> FloatVector:
        """What one user adds to the sum: [D]; total.

        Guarantees: the part of each group g has a norm of at most S_g whatever the tensors and the
        weight; malformed tensors (missing, unknown or misshapen, not floating point) contribute
        zero everywhere, and so do one component that is not finite, in any group, and a weight
        outside [0, 1].

        Takes no memory but the vector. One pass copies the tensors and one takes the norms; scales,
        clipping and weighting cost another each, where there is something to do.

        Args:
            tensors: all tensors of the layout but the indicator.
            weight: w of the user.
        """
        if not 0.0 <= weight <= 1.0:
            _log.warning("a user counts as zero: its weight is not from 0 to 1")
            return np.zeros(self.layout.dimension)
        complete = {**tensors, **self._unknown}
        try:
            vector = self.layout.flatten(complete)
        except InvalidValueError as error:
            _log.warning("a malformed update counts as zero: %s", error)
            return np.zeros(self.layout.dimension)
        self._divide_by_scales(vector)
        whole, finite = {}, True
        for group, slices in zip(self.groups, self.spans, strict=True):
            weighs = weight if group.name in self.weighted else 1.0
            norm = clip_in_place([vector[s] for s in slices], group.clipping_norm, weighs)
            whole[group.name] = norm <= group.clipping_norm
            finite = finite and math.isfinite(norm)
        # Squares and quotients of finite numbers may overflow too: that is for their group alone.
        if not finite and not all(map(_finite, complete.values())):
            vector.fill(0.0)
            return vector
        if self.indicator is not None:
            said = [0.5 if whole[name] else -0.5 for name in self.indicator.groups]
            vector[self.layout.slices[self.indicator.tensor]] = said
        return vector

    def _divide_by_scales(self, vector: FloatVector) -> None:
        """Make the units of a vector [D] those of contributions, in place."""
        with np.errstate(over="ignore"):
            for group in self.groups:
                for tensor, scale in zip(group.tensors, group.scales, strict=True):
                    if scale != 1.0:
                        vector[self.layout.slices[tensor]] /= scale

    def multiply_by_scales(self, vector: FloatVector) -> None:
        """Make the units of a vector [D] those of the users' tensors, in place."""
        for group in self.groups:
            for tensor, scale in zip(group.tensors, group.scales, strict=True):
                if scale != 1.0:
                    vector[self.layout.slices[tensor]] *= scale

    def admits(self, total: FloatVector, users: int) -> bool:
        """Whether `total` can be a sum of `users` contributions: shape, finite, norm ≤ users·S.

        The norm is compared up to rounding. One pass takes it; no memory is taken.
        """
        if total.shape != (self.layout.dimension,):
            return False
        # A sum of contributions may exceed its bound by the rounding of the additions. The norm of
        # what is not finite is not finite either, so it is below no bound.
        slack = 1.0 + (users + 8) * 2.0**-53
        return all(
            norm_of(total[s] for s in slices) <= users * group.clipping_norm * slack < math.inf
            for group, slices in zip(self.groups, self.spans, strict=True)
        )

    @property
    def parts(self) -> Iterator[tuple[VectorGroup, npt.NDArray[np.int64]]]:
        """Each group with its positions in the vector."""
        for group, slices in zip(self.groups, self.spans, strict=True):
            yield group, np.concatenate([np.arange(s.start, s.stop) for s in slices])

    @cached_property
    def spans(self) -> tuple[tuple[slice, ...], ...]:
        """Where each group lies in the vector, its tensors in order.

        Tensors that follow each other share a slice.
        """
        return tuple(
            _joined(self.layout.slices[tensor] for tensor in group.tensors) for group in self.groups
        )

    @property
    def scales(self) -> FloatVector:
        """α of each component of the vector: [D]."""
        scales = np.ones(self.layout.dimension)
        for group in self.groups:
            for tensor, scale in zip(group.tensors, group.scales, strict=True):
                scales[self.layout.slices[tensor]] = scale
        return scales

    @cached_property
    def _unknown(self) -> dict[str, FloatVector]:
        """The indicator before anything was clipped."""
        asked = self.indicator
        return {asked.tensor: np.zeros(len(asked.groups))} if asked else {}


def _joined(slices: Iterable[slice]) -> tuple[slice, ...]:
    """The same positions in the same order, in as few slices as can be."""
    joined: list[slice] = []
    for piece in slices:
        start = joined.pop().start if joined and joined[-1].stop == piece.start else piece.start
        joined.append(slice(start, piece.stop))
    return tuple(joined)


def _finite(tensor: npt.NDArray[np.generic]) -> bool:
    """Whether all components are finite: if the largest and the smallest are; NaN is both."""
    ends = np.max(tensor, initial=0.0), np.min(tensor, initial=0.0)
    return bool(np.all(np.isfinite(ends)))
