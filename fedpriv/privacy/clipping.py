"""User clipping: it turns one user's update into whole numbers of steps, with exact bounds.

`clip_vectors` is the clipping function π_S of McMahan et al. 2018, and `Clipping` applies it to
every vector group of an update. This is the reference implementation; `clipping_torch` batches it.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.layout import (
    FloatVector,
    Layout,
    Tensors,
    VectorGroup,
    check_partition,
    granularity,
    squared_bound,
)
from fedpriv.support.checks import check_ranges

FloatMatrix = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
IntegerVector = npt.NDArray[np.int64]

BlocksOf = Callable[[str], Iterable[npt.NDArray[np.floating]]]
"""Maps a tensor name to the tensor's numbers, in blocks of at most `MOST_IN_BLOCK`."""

MOST_IN_BLOCK = 2**16  # this many float64 numbers fit in a processor's caches
MOST_WEIGHT = 2**31
UNCLIPPED = "unclipped"  # name of the indicator's tensor and vector group
COARSE = ~((1 << 29) - 1)  # mask that keeps the first 24 bits of a float64 significand
_BLOCK = 2**13  # numbers per block when squares are summed

_log = logging.getLogger(__name__)


def clip_vectors(
    pieces: Sequence[FloatMatrix],
    clipping_norm: float,
    weights: tuple[IntegerVector, int] | None = None,
) -> tuple[Flags, Flags]:
    """Clip the vectors of several users in place, each row independently.

    With π_S(v) = v·min(1, S/‖v‖), a vector v of weight w = m/c becomes a = trunc(w·π_S(v)/γ), in
    steps of γ = `granularity(S)`. With B = `squared_bound(S)`, each row has these guarantees:

    * Σaᵢ² ≤ B, or ⌊m²·B/c²⌋ with a weight, in exact arithmetic, for every input;
    * a row becomes the zero vector if it contains NaN or ±inf, if its squared norm overflows
      float64 (from a norm of 1.34e154 on), or if rounding would lengthen it beyond B, which only
      happens to numbers chosen for that purpose;
    * if w = 1 and ‖v‖ ≤ S up to rounding, γ·a differs from v by less than γ per component, towards
      0; if ‖v‖ is larger, γ·a has the direction of v up to γ per component, and a norm of at least
      S·(1 − 2^-22) − γ·√d;
    * the result depends on the row and its weight alone, to the last bit.

    Each piece is [C, d_k] and has contiguous rows; row i of all pieces together is the vector of
    user i. `weights` holds m [C] with 0 ≤ m ≤ c, and c; None means that every w is 1. Returns two
    masks [C]: which rows were within S, and which are sound, that is, not zeroed by the second
    guarantee.
    """
    bound = squared_bound(clipping_norm)
    root, limits = math.sqrt(bound), np.full(len(pieces[0]), float(bound))
    share: float | FloatVector = 1.0
    if weights is not None:
        units, cap = weights
        share = units / cap
        limits = np.array([float(m * m * bound // (cap * cap)) for m in units.tolist()])
    with np.errstate(over="ignore", invalid="ignore"):  # in rows that become zero
        norms, factors = _factors(_squares(pieces), clipping_norm, share)
        for piece in pieces:
            np.multiply(piece, factors[:, np.newaxis], out=piece)
            np.trunc(piece, out=piece)
        # Squares of integers and their sums are exact in float64 up to 2^53, far above all limits,
        # and rounding takes no larger sum below a limit, so the bound holds exactly.
        sound = np.isfinite(norms) & (_squares(pieces) <= limits)
    if not sound.all():
        for piece in pieces:
            piece[~sound] = 0.0
    return sound & (norms <= root), sound


def _factors(
    squares: FloatVector, clipping_norm: float, share: float | FloatVector
) -> tuple[FloatVector, FloatVector]:
    """Return norms in steps, and the factors that clip vectors and convert them to steps: [C]."""
    step, root = granularity(clipping_norm), math.sqrt(squared_bound(clipping_norm))
    norms: FloatVector = np.sqrt(squares) / step
    # Factors are rounded down to 24 bits. This outweighs all other rounding errors, so vectors stay
    # within the norm, and norms summed in a different order give the same integers.
    ratios = root / np.maximum(norms, root)
    return norms, (ratios.view(np.int64) & COARSE).view(np.float64) * share / step


def _squares(pieces: Sequence[FloatMatrix]) -> FloatVector:
    """Return the sum of squares of each row, [C]; its bits do not depend on the row's position."""
    total: FloatVector = np.vecdot(pieces[0], pieces[0])
    for piece in pieces[1:]:
        total += np.vecdot(piece, piece)
    return total


@dataclass(frozen=True)
class Indicator:
    """A tensor that states, for each group, whether a user's part was *not* clipped.

    A component is +1/2 if the group's part was within its norm, −1/2 if it was clipped, and 0 if
    the user contributes zero. Centring around 0 halves the sensitivity.
    """

    tensor: str
    groups: tuple[str, ...]  # names of the groups, one component for each

    @classmethod
    def of(cls, groups: tuple[VectorGroup, ...]) -> "Indicator":
        """Return the indicator with one component for each of these groups."""
        return cls(UNCLIPPED, tuple(group.name for group in groups))

    @property
    def group(self) -> VectorGroup:
        """The vector group of its G halves, whose norm is √G/2.

        The factor outweighs the rounding of the root and the product, so that the vector is always
        within the norm. A half is a whole number of steps, since γ is a power of two below 1.
        """
        norm = math.sqrt(len(self.groups)) / 2.0
        return VectorGroup.single(self.tensor, norm * (1.0 + 2.0**-50))


@dataclass(frozen=True)
class Clipping:
    """Converts the tensors of one user to its contribution, the integers [D] it adds to a sum.

    Group g counts in steps of γ_g, its granularity, of the *scaled* tensors u_j = v_j/α_j.
    """

    layout: Layout  # all tensors of a contribution: update, metrics and indicator
    groups: tuple[VectorGroup, ...]  # a partition of the tensors
    indicator: Indicator | None = None  # reports which groups were not clipped
    weighted: tuple[str, ...] = ()  # names of the groups multiplied by the user's weight
    weight_cap: int = 1  # c ≥ 1; a user's weight is m/c with a whole number m from 0 to c

    def __post_init__(self) -> None:
        check_partition(self.layout, self.groups)
        check_ranges(self, weight_cap=f"[1, {MOST_WEIGHT}]")
        names = [group.name for group in self.groups]
        for name in (*self.weighted, *(self.indicator.groups if self.indicator else ())):
            if name not in names:
                raise InvalidValueError(f"vector group {name!r} is unknown; the groups are {names}")
        if self.indicator is not None:
            self._check_indicator(self.indicator)

    def _check_indicator(self, indicator: Indicator) -> None:
        count, size = len(indicator.groups), self.layout.sizes.get(indicator.tensor)
        if size != count:
            raise InvalidValueError(
                f"tensor {indicator.tensor!r} has size {size}; it must be {count}, one per group"
            )
        # Its values are written, not clipped, so its group's norm must admit all of them.
        (group,) = [g for g in self.groups if indicator.tensor in g.tensors]
        if group != indicator.group or group.name in self.weighted:
            raise InvalidValueError(
                f"the vector group of tensor {indicator.tensor!r} is {group}; it must be "
                f"{indicator.group}, without a weight"
            )

    @cached_property
    def sent(self) -> tuple[VectorGroup, ...]:
        """The groups that users send: all except the indicator's, which follows from the others."""
        indicator_group = self.indicator.group.name if self.indicator else None
        return tuple(group for group in self.groups if group.name != indicator_group)

    @cached_property
    def spans(self) -> dict[str, tuple[slice, ...]]:
        """Slices of each group in the vector [D], by group name; adjacent tensors share a slice."""
        spans = {}
        for group in self.groups:
            group_slices: list[slice] = []
            for piece in (self.layout.slices[tensor] for tensor in group.tensors):
                adjacent = group_slices and group_slices[-1].stop == piece.start
                start = group_slices.pop().start if adjacent else piece.start
                group_slices.append(slice(start, piece.stop))
            spans[group.name] = tuple(group_slices)
        return spans

    def in_units(self, vector: FloatVector | IntegerVector) -> FloatVector:
        """Return a vector [D] of steps, α·γ each, in the units of users' tensors."""
        numbers = vector.astype(np.float64)
        for group in self.groups:
            for tensor, scale in zip(group.tensors, group.scales, strict=True):
                numbers[self.layout.slices[tensor]] *= group.granularity * scale
        return numbers

    def contribution(self, tensors: Tensors, weight: int | None = None) -> IntegerVector:
        """Return what one user adds to the sum, in steps: int64 [D]. It never raises.

        Guarantees: the part of each group g has Σaᵢ² ≤ B_g, its `squared_bound`, and
        Σaᵢ² ≤ (m/c)²·B_g if the group is weighted, exactly, for all tensors and weights;
        malformed tensors (missing, unknown, misshapen or not floating point) contribute zero in
        all groups, and so do a non-finite component in any group and a weight m that is not a
        whole number from 0 to c. `tensors` must not include the indicator; without a weight, m is
        c.
        """
        indicator, cap = self.indicator, self.weight_cap
        indicator_tensor = {indicator.tensor: np.zeros(len(indicator.groups))} if indicator else {}
        try:
            units = cap if weight is None else weight
            if not 0 <= units <= cap or units != int(units):
                raise InvalidValueError(f"its weight is not a whole number from 0 to {cap}")
            row: FloatMatrix = self.layout.flatten({**tensors, **indicator_tensor})[np.newaxis]
        except Exception as error:  # the text of a foreign error may contain user data
            reason = error if isinstance(error, InvalidValueError) else type(error).__name__
            _log.warning("a malformed update counts as zero: %s", reason)
            return np.zeros(self.layout.dimension, np.int64)
        self.clip_rows(row, np.array([int(units)]))
        contribution: IntegerVector = row[0].astype(np.int64)
        return contribution

    def clip_rows(self, rows: FloatMatrix, weights: IntegerVector) -> None:
        """Convert the tensors of several users to contributions, in place, each row independently.

        Guarantees: those of `contribution` for each row; afterwards all numbers are whole, so that
        sums of up to 2^28 rows are exact in float64. Rows [C, D] are contiguous and in the order of
        the layout, the indicator is overwritten, and weights m [C] are from 0 to c.
        """
        unclipped: dict[str, Flags] = {}
        sound = np.ones(len(rows), np.bool_)
        for group in self.sent:
            for tensor, scale in zip(group.tensors, group.scales, strict=True):
                if scale != 1.0:
                    with np.errstate(over="ignore"):  # an infinite component zeroes the user
                        rows[:, self.layout.slices[tensor]] /= scale
            weighting = (weights, self.weight_cap) if group.name in self.weighted else None
            pieces = [rows[:, span] for span in self.spans[group.name]]
            unclipped[group.name], is_sound = clip_vectors(pieces, group.clipping_norm, weighting)
            sound &= is_sound
        if self.indicator is not None:
            step = self.indicator.group.granularity
            flags = np.stack([unclipped[name] for name in self.indicator.groups], axis=1)
            rows[:, self.layout.slices[self.indicator.tensor]] = (flags - 0.5) / step
        if not sound.all():
            rows[~sound] = 0.0

    def add_contribution(self, total: FloatVector, blocks_of: BlocksOf, weight: int) -> None:
        """Add one user's contribution, read block by block, to `total`: float64 [D].

        It avoids holding all of a large model in float64. Guarantees: those of `clip_rows` for the
        user's tensors, as long as the whole numbers in `total` stay below 2^53.
        """
        memory = np.empty(MOST_IN_BLOCK)
        factors, unclipped = dict[str, float](), dict[str, bool]()
        shares = {group.name: 1.0 for group in self.sent}
        shares |= dict.fromkeys(self.weighted, weight / self.weight_cap)
        with np.errstate(over="ignore", invalid="ignore"):
            for group in self.sent:
                blocks = (block for _, block in self._blocks(group, blocks_of, memory))
                squares = np.array([sum(float(np.dot(block, block)) for block in blocks)])
                norms, group_factors = _factors(squares, group.clipping_norm, shares[group.name])
                if not np.isfinite(norms[0]):
                    return
                factors[group.name] = float(group_factors[0])
                unclipped[group.name] = bool(norms[0] <= math.sqrt(group.squared_bound))
        sound, cap = True, self.weight_cap
        for group in self.sent:
            factor, squared = factors[group.name], 0.0
            for span, block in self._blocks(group, blocks_of, memory):
                np.trunc(np.multiply(block, factor, out=block), out=block)
                squared += float(np.dot(block, block))
                total[span] += block
            units = weight if group.name in self.weighted else cap
            sound = sound and squared <= float(units * units * group.squared_bound // cap**2)
        if not sound:  # subtract the same numbers again, which is exact
            for group in self.sent:
                for span, block in self._blocks(group, blocks_of, memory):
                    total[span] -= np.trunc(np.multiply(block, factors[group.name], out=block))
        elif self.indicator is not None:
            halves = np.array([unclipped[name] for name in self.indicator.groups]) - 0.5
            span = self.layout.slices[self.indicator.tensor]
            total[span] += halves / self.indicator.group.granularity

    def _blocks(
        self, group: VectorGroup, blocks_of: BlocksOf, memory: FloatVector
    ) -> Iterator[tuple[slice, FloatVector]]:
        """Yield the slice of each block of a group, and its scaled numbers in `memory`."""
        for tensor, scale in zip(group.tensors, group.scales, strict=True):
            start = self.layout.slices[tensor].start
            for numbers in blocks_of(tensor):
                block = memory[: len(numbers)]
                np.copyto(block, numbers)
                if scale != 1.0:
                    block /= scale
                yield slice(start, start + len(numbers)), block
                start += len(numbers)

    def admits(self, total: IntegerVector, users: int, weight: int) -> bool:
        """Return whether `total` can be the sum of contributions of this many users and weight.

        It must be int64 [D], and the norm of each group's part at most users·S_g, or weight/c·S_g
        if the group is weighted.
        """
        if total.shape != (self.layout.dimension,) or total.dtype != np.int64:
            return False
        for group in self.groups:
            weighted = group.name in self.weighted
            units, cap = (weight, self.weight_cap) if weighted else (users, 1)
            limit = units * units * group.squared_bound // cap**2
            # Rounding must not reject an honest sum of many users; one user's squares are exact.
            slack = 1.0 + 2.0**-30 if limit >= 2**53 else 1.0
            parts = (total[span] for span in self.spans[group.name])
            if not _integer_squares(parts) <= limit * slack:
                return False
        return True


def _integer_squares(parts: Iterable[IntegerVector]) -> float:
    """Return the sum of squares: exact below 2^53, otherwise within one part in 2^30."""
    return math.fsum(
        float(np.dot(block, block))
        for part in parts
        for start in range(0, part.size, _BLOCK)
        for block in [part[start : start + _BLOCK].astype(np.float64)]
    )
