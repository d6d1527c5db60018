"""User clipping: what one user adds to a sum, in whole numbers of steps, so that bounds are exact.

`clip_vectors` is the clipping function π_S of McMahan et al. 2018, and `Clipping` applies it to
every vector group of an update. This is the reference; `clipping_torch` batches it.
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

FloatMatrix = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
IntegerVector = npt.NDArray[np.int64]

BlocksOf = Callable[[str], Iterable[npt.NDArray[np.floating]]]
"""From the name of a tensor to its numbers, in blocks of `MOST_IN_BLOCK` at most."""

MOST_IN_BLOCK = 2**16  # numbers that stay in a processor's caches
MOST_WEIGHT = 2**31
UNCLIPPED = "unclipped"  # tensor and vector group of the indicator
COARSE = ~((1 << 29) - 1)  # keeps the first 24 bits of a float64
_BLOCK = 2**13  # numbers whose squares are added up at a time

_log = logging.getLogger(__name__)


def clip_vectors(
    pieces: Sequence[FloatMatrix],
    clipping_norm: float,
    weights: tuple[IntegerVector, int] | None = None,
) -> tuple[Flags, Flags]:
    """Clip the vectors of several users in place, each row by itself.

    With π_S(v) = v·min(1, S/‖v‖), a vector v of weight w = m/c becomes a = trunc(w·π_S(v)/γ), in
    steps of γ = `granularity(S)`. With B = `squared_bound(S)`, for each row:

    * Σaᵢ² ≤ B, or ⌊m²·B/c²⌋ with a weight, in exact arithmetic, for every input;
    * NaN or ±inf anywhere, or a norm whose square float64 does not hold (from 1.34e154 on), gives
      the zero vector. So does a vector that rounding would lengthen beyond B, which takes numbers
      that were chosen to do so;
    * where w = 1 and ‖v‖ ≤ S up to rounding, γ·a differs from v by less than γ per component,
      towards 0; where ‖v‖ is larger, γ·a has the direction of v up to γ per component, and a norm
      of at least S·(1 − 2^-22) − γ·√d;
    * what a row becomes is a function of that row and its weight alone, to the last bit.

    Each piece is [C, d_k] and has contiguous rows; a user's vector is one row of all pieces.
    `weights` are m [C], 0 ≤ m ≤ c, and c; None: every w is 1. Returns two masks [C]: which rows
    were within S, and which are sound, that is, were not zeroed by the second guarantee.
    """
    bound = squared_bound(clipping_norm)
    root, limits = math.sqrt(bound), np.full(len(pieces[0]), float(bound))
    share: float | FloatVector = 1.0
    if weights is not None:
        units, whole = weights
        share = units / whole
        limits = np.array([float(m * m * bound // (whole * whole)) for m in units.tolist()])
    with np.errstate(over="ignore", invalid="ignore"):  # of rows that become zero
        norms, factors = _factors(_squares(pieces), clipping_norm, share)
        for piece in pieces:
            np.multiply(piece, factors[:, np.newaxis], out=piece)
            np.trunc(piece, out=piece)
        # Squares of integers and their sums are exact in float64 up to 2^53, far above all limits,
        # and rounding takes no larger sum below a limit: so the bound holds exactly.
        sound = np.isfinite(norms) & (_squares(pieces) <= limits)
    if not sound.all():
        for piece in pieces:
            piece[~sound] = 0.0
    return sound & (norms <= root), sound


def _factors(
    squares: FloatVector, clipping_norm: float, share: float | FloatVector
) -> tuple[FloatVector, FloatVector]:
    """Norms of vectors in steps, by sums of their squares, and what clips and counts them: [C]."""
    step, root = granularity(clipping_norm), math.sqrt(squared_bound(clipping_norm))
    norms: FloatVector = np.sqrt(squares) / step
    # Factors are rounded down to 24 bits. That outweighs all other rounding errors, so vectors stay
    # within the norm, and norms summed in another order give the same integers.
    ratios = root / np.maximum(norms, root)
    return norms, (ratios.view(np.int64) & COARSE).view(np.float64) * share / step


def _squares(pieces: Sequence[FloatMatrix]) -> FloatVector:
    """Sum of squares of each row, [C]; the bits of a row do not depend on its place."""
    total: FloatVector = np.vecdot(pieces[0], pieces[0])
    for piece in pieces[1:]:
        total += np.vecdot(piece, piece)
    return total


@dataclass(frozen=True)
class Indicator:
    """A tensor that says, group by group, whether a user's part was *not* clipped.

    Each component is +1/2 if the group's part was within its norm, −1/2 if it was clipped, and 0
    for a user that contributes zero. Centring halves the sensitivity.
    """

    tensor: str
    groups: tuple[str, ...]  # one component for each

    @classmethod
    def of(cls, groups: tuple[VectorGroup, ...]) -> "Indicator":
        """The indicator with a component for each of these groups."""
        return cls(UNCLIPPED, tuple(group.name for group in groups))

    @property
    def group(self) -> VectorGroup:
        """Its vector group: G halves have the norm √G/2.

        The factor outweighs the rounding of root and product, so that all halves are within the
        norm; and a half is a whole number of steps, since γ is a power of two below 1.
        """
        norm = math.sqrt(len(self.groups)) / 2.0
        return VectorGroup.single(self.tensor, norm * (1.0 + 2.0**-50))


@dataclass(frozen=True)
class Clipping:
    """How the tensors of one user become its contribution, the integers [D] it adds to a sum.

    Group g is counted in steps of γ_g, its granularity, of the *scaled* tensors u_j = v_j/α_j.
    """

    layout: Layout  # all tensors of a contribution: the update, metrics and the indicator
    groups: tuple[VectorGroup, ...]  # a partition of the tensors
    indicator: Indicator | None = None  # counts what was not clipped, if there is one
    weighted: tuple[str, ...] = ()  # names of groups that are multiplied by the user's weight
    weight_cap: int = 1  # c ≥ 1; a user's weight is m/c for a whole number m from 0 to c

    def __post_init__(self) -> None:
        check_partition(self.layout, self.groups)
        if not 1 <= self.weight_cap <= MOST_WEIGHT:
            raise InvalidValueError(
                f"weight_cap is {self.weight_cap}; it must be from 1 to {MOST_WEIGHT}"
            )
        names = [group.name for group in self.groups]
        for name in (*self.weighted, *(self.indicator.groups if self.indicator else ())):
            if name not in names:
                raise InvalidValueError(f"there is no vector group {name!r}; there are {names}")
        if self.indicator is not None:
            self._check_indicator(self.indicator)

    def _check_indicator(self, indicator: Indicator) -> None:
        count, size = len(indicator.groups), self.layout.sizes.get(indicator.tensor)
        if size != count:
            raise InvalidValueError(
                f"tensor {indicator.tensor!r} has size {size}; it must be the {count} of its groups"
            )
        # Its values are written, not clipped, so its group must be the one that holds all of them.
        (group,) = [g for g in self.groups if indicator.tensor in g.tensors]
        if group != indicator.group or group.name in self.weighted:
            raise InvalidValueError(
                f"the vector group of tensor {indicator.tensor!r} is {group}; it must be "
                f"{indicator.group}, without a weight"
            )

    @cached_property
    def sent(self) -> tuple[VectorGroup, ...]:
        """The groups that users send: all but the indicator's, which follows from the others."""
        own = self.indicator.group.name if self.indicator else None
        return tuple(group for group in self.groups if group.name != own)

    @cached_property
    def spans(self) -> dict[str, tuple[slice, ...]]:
        """Where each group lies in the vector; adjacent tensors share a slice."""
        spans = {}
        for group in self.groups:
            joined: list[slice] = []
            for piece in (self.layout.slices[tensor] for tensor in group.tensors):
                follows = joined and joined[-1].stop == piece.start
                start = joined.pop().start if follows else piece.start
                joined.append(slice(start, piece.stop))
            spans[group.name] = tuple(joined)
        return spans

    def spread(self, numbers: Iterable[float]) -> FloatVector:
        """One number for each group as one for each of its components: [D]."""
        components = np.empty(self.layout.dimension)
        for group, number in zip(self.groups, numbers, strict=True):
            for span in self.spans[group.name]:
                components[span] = number
        return components

    @property
    def steps(self) -> FloatVector:
        """What one step of each component is in the units of users' tensors, α·γ: [D]."""
        steps = self.spread(group.granularity for group in self.groups)
        for group in self.groups:
            for tensor, scale in zip(group.tensors, group.scales, strict=True):
                steps[self.layout.slices[tensor]] *= scale
        return steps

    def contribution(self, tensors: Tensors, weight: int | None = None) -> IntegerVector:
        """What one user adds to the sum, in steps: [D]. It never raises.

        Guarantees: the part of each group g has Σaᵢ² ≤ B_g, its `squared_bound`, and
        Σaᵢ² ≤ (m/c)²·B_g if it is weighted, exactly, whatever the tensors and the weight;
        malformed tensors (missing, unknown or misshapen, not floating point) contribute zero
        everywhere, and so do a component that is not finite, in any group, and a weight m that is
        not a whole number from 0 to c. The indicator is not given; without a weight, m is c.
        """
        indicator, whole = self.indicator, self.weight_cap
        blank = {indicator.tensor: np.zeros(len(indicator.groups))} if indicator else {}
        try:
            units = whole if weight is None else weight
            if not 0 <= units <= whole or units != int(units):
                raise InvalidValueError(f"its weight is not from 0 to {whole}")
            row: FloatMatrix = self.layout.flatten({**tensors, **blank})[np.newaxis]
        except Exception as error:  # whatever it is that was sent; other texts may hold its data
            why = error if isinstance(error, InvalidValueError) else type(error).__name__
            _log.warning("a malformed update counts as zero: %s", why)
            return np.zeros(self.layout.dimension, np.int64)
        self.clip_rows(row, np.array([int(units)]))
        contribution: IntegerVector = row[0].astype(np.int64)
        return contribution

    def clip_rows(self, rows: FloatMatrix, weights: IntegerVector) -> None:
        """Turn the tensors of several users into contributions, in place, each row by itself.

        Guarantees: those of `contribution` for each row; afterwards all numbers are whole, so that
        sums of rows are exact in float64 for up to 2^28 of them. Rows [C, D] are contiguous and in
        the order of the layout, the indicator is overwritten, and weights m [C] are from 0 to c.
        """
        within: dict[str, Flags] = {}
        sound = np.ones(len(rows), np.bool_)
        for group in self.sent:
            for tensor, scale in zip(group.tensors, group.scales, strict=True):
                if scale != 1.0:
                    with np.errstate(over="ignore"):  # an infinite component zeroes the user
                        rows[:, self.layout.slices[tensor]] /= scale
            weighing = (weights, self.weight_cap) if group.name in self.weighted else None
            pieces = [rows[:, span] for span in self.spans[group.name]]
            within[group.name], part = clip_vectors(pieces, group.clipping_norm, weighing)
            sound &= part
        if self.indicator is not None:
            step = self.indicator.group.granularity
            said = np.stack([within[name] for name in self.indicator.groups], axis=1)
            rows[:, self.layout.slices[self.indicator.tensor]] = (said - 0.5) / step
        if not sound.all():
            rows[~sound] = 0.0

    def add_contribution(self, total: FloatVector, blocks_of: BlocksOf, weight: int) -> None:
        """Add the contribution of one user whose tensors come block by block to a sum, [D].

        So a user with a large model is not held in float64 at once. Guarantees: those of
        `clip_rows`, for the blocks of each tensor, of whole numbers `total` that stay below 2^53.
        """
        memory = np.empty(MOST_IN_BLOCK)
        factors, within = dict[str, float](), dict[str, bool]()
        shares = {group.name: 1.0 for group in self.sent}
        shares |= dict.fromkeys(self.weighted, weight / self.weight_cap)
        with np.errstate(over="ignore", invalid="ignore"):
            for group in self.sent:
                blocks = (block for _, block in self._blocks(group, blocks_of, memory))
                squares = np.array([sum(float(np.dot(block, block)) for block in blocks)])
                norms, of_group = _factors(squares, group.clipping_norm, shares[group.name])
                if not np.isfinite(norms[0]):
                    return
                factors[group.name] = float(of_group[0])
                within[group.name] = bool(norms[0] <= math.sqrt(group.squared_bound))
        sound, whole = True, self.weight_cap
        for group in self.sent:
            factor, squared = factors[group.name], 0.0
            for place, block in self._blocks(group, blocks_of, memory):
                np.trunc(np.multiply(block, factor, out=block), out=block)
                squared += float(np.dot(block, block))
                total[place] += block
            heavy = weight if group.name in self.weighted else whole
            sound = sound and squared <= float(heavy * heavy * group.squared_bound // whole**2)
        if not sound:  # take the same numbers away again, which is exact
            for group in self.sent:
                for place, block in self._blocks(group, blocks_of, memory):
                    total[place] -= np.trunc(np.multiply(block, factors[group.name], out=block))
        elif self.indicator is not None:
            said = np.array([within[name] for name in self.indicator.groups]) - 0.5
            place = self.layout.slices[self.indicator.tensor]
            total[place] += said / self.indicator.group.granularity

    def _blocks(
        self, group: VectorGroup, blocks_of: BlocksOf, memory: FloatVector
    ) -> Iterator[tuple[slice, FloatVector]]:
        """Where the blocks of a group lie, and their scaled numbers, in the same memory."""
        for tensor, scale in zip(group.tensors, group.scales, strict=True):
            first = self.layout.slices[tensor].start
            for given in blocks_of(tensor):
                block = memory[: len(given)]
                np.copyto(block, given)
                if scale != 1.0:
                    block /= scale
                yield slice(first, first + len(given)), block
                first += len(given)

    def admits(self, total: IntegerVector, users: int, weight: int) -> bool:
        """Whether `total` can be the sum of the contributions of this many users, of this weight.

        That is, whether it is int64[D] and the norm of each group's part is at most users·S_g, or
        weight/c·S_g where the group is weighted.
        """
        if total.shape != (self.layout.dimension,) or total.dtype != np.int64:
            return False
        for group in self.groups:
            heavy = group.name in self.weighted
            most, whole = (weight, self.weight_cap) if heavy else (users, 1)
            limit = most * most * group.squared_bound // whole**2
            # An honest sum of many users must not fail by rounding; one user's squares are exact.
            slack = 1.0 + 2.0**-30 if limit >= 2**53 else 1.0
            parts = (total[span] for span in self.spans[group.name])
            if not _integer_squares(parts) <= limit * slack:
                return False
        return True


def _integer_squares(parts: Iterable[IntegerVector]) -> float:
    """Sum of squares; exact below 2^53, and otherwise off by less than a part in 2^30."""
    return math.fsum(
        float(np.dot(block, block))
        for part in parts
        for start in range(0, part.size, _BLOCK)
        for block in [part[start : start + _BLOCK].astype(np.float64)]
    )
