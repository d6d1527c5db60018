"""Canaries: invented users of known update, of whom a secret coin each says whether they are there.

A canary that is there is drawn, clipped, added up and noised like a user. In each round it moves
along a unit vector of its own, which a key determines: ten times as far as clipping allows, in each
vector group of the update. One that is not there is drawn too, and contributes zero.

The directions of a group of d numbers are the rows of orthonormal matrices H·diag(±1), with random
signs of their own for each d of them. H is made of Hadamard matrices along its diagonal, of which
each has a power of two of rows: that of each binary digit of d. So of d canaries no two disturb
each other, how far a release goes along all directions is found without making any, and a direction
is made in a few operations when its canary is drawn.

Directions change from round to round, by random signs at least. What the users of a round have in
common lies along some direction, which would hide a canary with a similar one if it were the same
in all rounds; so it becomes noise that averages out. For the same reason the model does not move
along any canary.
"""

import hmac
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from scipy.linalg import hadamard

from fedpriv.privacy.clipping import Clipping, Flags
from fedpriv.privacy.gaussian_mechanism import METRIC_PREFIX, GaussianMechanism
from fedpriv.privacy.layout import FloatVector, VectorGroup
from fedpriv.privacy.noise import words

Float32Vector = npt.NDArray[np.float32]
Float32Matrix = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]

_NUMBERS = 2**20  # of directions, at a time
_PROBED = 512  # numbers of a release, at most


@dataclass(frozen=True)
class Directions:
    """Unit vectors of d numbers, one for each of m canaries: functions of a key.

    Guarantees: each has length 1, and those of canaries b·d, …, b·d + d − 1 are orthogonal for
    every b, up to rounding. A direction is along one piece of the numbers, of half of them mostly.
    """

    key: bytes = field(repr=False)
    canaries: int  # m
    dimension: int  # d

    def rows(self, canaries: Positions, span: slice = slice(None)) -> Float32Matrix:
        """Numbers of a span of the directions of some canaries: [c, numbers of the span]."""
        start, stop, _ = span.indices(self.dimension)
        directions = np.zeros((len(canaries), stop - start), np.float32)
        for direction, canary in zip(directions, canaries.tolist(), strict=True):
            block, row = divmod(canary, self.dimension)
            (piece,) = (piece for piece in self._pieces if piece.start <= row < piece.stop)
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first >= last:
                continue
            left, right = _hadamard_factors(piece.stop - piece.start)
            one, other = divmod(row - piece.start, len(right))
            # Only those rows of the matrix [left, right] that hold numbers of the span.
            width, skipped = len(right), first - piece.start
            held = slice(skipped // width, -(-(last - piece.start) // width))
            numbers = (left[one, held, np.newaxis] * right[other]).ravel()
            numbers = numbers[skipped % width :][: last - first]
            direction[first - start : last - start] = numbers * self._signs[block, first:last]
        return directions

    def along(self, vector: FloatVector) -> FloatVector:
        """How far a vector [d] goes along each direction: [m]."""
        found, at_once = list[Float32Matrix](), max(1, _NUMBERS // self.dimension)
        for first in range(0, len(self._signs), at_once):
            signed = np.multiply(self._signs[first : first + at_once], vector, dtype=np.float32)
            for piece in self._pieces:
                left, right = _hadamard_factors(piece.stop - piece.start)
                square = signed[:, piece].reshape(-1, len(left), len(right))
                signed[:, piece] = (left @ square @ right).reshape(len(signed), -1)
            found.append(signed)
        return np.concatenate(found).ravel()[: self.canaries].astype(np.float64)

    @cached_property
    def _pieces(self) -> tuple[slice, ...]:
        """Powers of two that add up to d, the largest first, as slices of its numbers."""
        powers = (1 << each for each in reversed(range(self.dimension.bit_length())))
        sizes = [power for power in powers if self.dimension & power]
        ends = accumulate(sizes)
        return tuple(slice(end - size, end) for size, end in zip(sizes, ends, strict=True))

    @cached_property
    def _signs(self) -> Float32Matrix:
        """Random signs of each block: [blocks, d]."""
        blocks, each = -(-self.canaries // self.dimension), -(-self.dimension // 64)
        drawn = words(self.key, blocks * each)
        return _signs(drawn).reshape(blocks, -1)[:, : self.dimension]


@cache
def _hadamard_factors(size: int) -> tuple[Float32Matrix, Float32Matrix]:
    """Two symmetric orthonormal matrices: their Kronecker product is Hadamard's over √size."""
    power = size.bit_length() - 1
    sides = (1 << power // 2, 1 << power - power // 2)
    left, right = ((hadamard(side) / math.sqrt(side)).astype(np.float32) for side in sides)
    return left, right


def _signs(drawn: npt.NDArray[np.uint64]) -> Float32Vector:
    """64 signs of each word."""
    bits = np.unpackbits(drawn.view(np.uint8))
    return np.multiply(bits, 2.0, dtype=np.float32) - np.float32(1.0)


@dataclass(frozen=True)
class Canaries:
    """The canaries of a run: who is there, and where each of them goes in each round."""

    count: int  # m
    key: bytes = field(repr=False)  # 32 secret bytes
    # Whether directions stay the same but for a sign, as noise that is correlated over rounds asks.
    steady: bool = False

    @cached_property
    def included(self) -> Flags:
        """Who is there: a fair coin each, [m]."""
        return self._coins("included") > 0.0

    def signs(self, round_number: int, attempt: int) -> FloatVector:
        """Which way along its direction each canary goes in a round: ±1 [m]."""
        return self._coins(f"signs/{round_number}/{attempt}").astype(np.float64)

    def directions(
        self, group: VectorGroup, dimension: int, round_number: int, attempt: int
    ) -> Directions:
        """The directions of a vector group in a round."""
        of = "" if self.steady else f"/{round_number}/{attempt}"
        return Directions(self._key(f"directions/{group.name}{of}"), self.count, dimension)

    def _coins(self, purpose: str) -> Float32Vector:
        return _signs(words(self._key(purpose), -(-self.count // 64)))[: self.count]

    def _key(self, purpose: str) -> bytes:
        return hmac.digest(self.key, purpose.encode(), "sha256")


def audited_groups(clipping: Clipping) -> Iterator[VectorGroup]:
    """The vector groups in which canaries move: of the update, and of control variates.

    Metrics and counts are mostly single numbers, along which all users of a round go together.
    """
    for group in clipping.sent:
        if not group.tensors[0].startswith(METRIC_PREFIX):
            yield group


@dataclass(frozen=True)
class Measurement:
    """What an audit reads from one release: nothing but a function of it and of the canaries."""

    round: int  # from 1
    attempt: int
    part: int  # of its event, from 0
    # How far the release goes along each canary's move, in units of what a canary that was drawn
    # adds to it: [m].
    scores: FloatVector
    energy: float  # Σ_g ‖R_g‖²/σ_g² of the sums R_g that were released
    dimension: int  # how many numbers that adds up
    probe: FloatVector  # some of the numbers R_g/σ_g, always the same ones
    drawn: Flags | None = None  # which canaries were, where that is no secret: [m]


@dataclass(frozen=True)
class Past:
    """Sums of all releases so far, over the standard deviations of their noise, by vector group."""

    releases: int = 0
    sums: Mapping[str, FloatVector] = field(default_factory=dict)

    def removed_from(self, name: str, release: FloatVector) -> FloatVector:
        """A release [d] of a group without what it has in common with those before.

        Their sum has the squared length t²·h² + t·d if t users' sums of length h go one way, each
        beside unit noise; the latter is no direction of theirs.
        """
        before = self.sums.get(name)
        if before is None or not (length := float(before @ before)):
            return release
        share = max(0.0, 1.0 - self.releases * len(before) / length)
        return release - before * (share * float(release @ before) / length)

    def with_release(self, name: str, release: FloatVector) -> FloatVector:
        """The sum of a group with one more release."""
        before = self.sums.get(name)
        return release if before is None else before + release


def measure(
    canaries: Canaries,
    mechanism: GaussianMechanism,
    average: FloatVector,
    at: tuple[int, int, int],
    past: Past,
) -> tuple[Measurement, Past]:
    """Measure a release [D] at a round, attempt and part of its event.

    In units of its noise, group g of the release is ±u_g·S_g/σ_g for a canary that was drawn, with
    its direction u_g, beside noise and the users' own sum, which have the variance v_g along any
    direction. The score adds up projections on u_g with the weights (S_g/σ_g)/v_g, by which it is
    1 for a canary that was drawn, 0 for others, and varies least. With noise alone that is z².
    """
    clipping, query = mechanism.clipping, mechanism.query
    layout, (number, attempt, part) = clipping.layout, at
    stddevs = {
        group.name: stddev
        for group, stddev in zip(clipping.groups, query.noise_stddevs, strict=True)
    }
    unit = clipping.spread(group.granularity / stddevs[group.name] for group in clipping.groups)
    released = average * clipping.spread(query.divisors) / clipping.steps * unit
    scores, squared, sums = np.zeros(canaries.count), 0.0, dict[str, FloatVector]()
    for group in audited_groups(clipping):
        found = np.concatenate([released[layout.slices[tensor]] for tensor in group.tensors])
        sums[group.name] = past.with_release(group.name, found)
        found, ratio = (
            past.removed_from(group.name, found),
            group.clipping_norm / stddevs[group.name],
        )
        weight = ratio / max(1.0, float(found @ found) / len(found))
        scores += weight * canaries.directions(group, len(found), number, attempt).along(found)
        squared += ratio * weight
    measured = Measurement(
        round=number,
        attempt=attempt,
        part=part,
        scores=scores * canaries.signs(number, attempt) / squared,
        energy=float(released @ released),
        dimension=released.size,
        probe=released[:: -(-released.size // _PROBED)],
    )
    return measured, Past(past.releases + 1, sums)
