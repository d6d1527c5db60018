"""Canaries: invented users with known updates, each included in the run or not by a secret coin.

An included canary is drawn, clipped, added up and noised like a user. In each round it moves along
its own unit vector, which a key determines: ten times as far as clipping allows, in each vector
group of the update. An excluded canary is also drawn, but contributes zero.

The directions of a group of d numbers are the rows of orthonormal matrices H·diag(±1), with fresh
random signs for every d directions. H is block diagonal; its blocks are Hadamard matrices, and
their sizes are the powers of two that add up to d. So no two of d canaries interfere, the
projections of a release on all directions are computed without storing a direction, and a direction
takes a few operations when its canary is drawn.

Directions change from round to round, at least by random signs. The common part of the users'
updates could hide a canary with a similar direction in all rounds; with changing directions it
becomes noise that averages out. For the same reason, the model does not move along any canary.

The evidence that a canary is included is its log-likelihood ratio Λ, given its scores in all rounds
and public facts. By the Neyman–Pearson lemma, no other statistic separates included canaries
better. For the rounds of one event it is

* if each of a user's k examples joins each round by a coin (k = 1 if users do),
  Σ_t log Σ_j Bin(k, q)(j)·exp((2·j·s_t − j²)/(2·v_t));
* if a user is in exactly k of n rounds, every set of k equally likely,
  log(e_k(w_1, …, w_n)/(n choose k)) with w_t = exp((2·s_t − 1)/(2·v_t)) and the elementary
  symmetric polynomial e_k;
* if a user's rounds are public, x·y − ‖x‖²/2 in units of the noise. Here x = C·π are the
  canary's moves in its rounds π, and y = C·s are its scores after the strategy C, which leaves
  fresh noise (Choquette-Choo et al. 2023).

v_t is the variance of the scores of a round: z² plus the contribution of the users.
"""

import hmac
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt
from scipy.linalg import hadamard, toeplitz
from scipy.special import gammaln, logsumexp, xlog1py, xlogy

from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import (
    NeighbouringRelation,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
)
from fedpriv.privacy.clipping import Clipping, Flags, FloatMatrix
from fedpriv.privacy.gaussian_mechanism import METRIC_PREFIX, GaussianMechanism
from fedpriv.privacy.layout import FloatVector, VectorGroup
from fedpriv.privacy.noise import words

Float32Vector = npt.NDArray[np.float32]
Float32Matrix = npt.NDArray[np.float32]
Positions = npt.NDArray[np.int64]
Signs = Callable[[int, int], FloatVector]
"""Maps a round and an attempt to the signs of the canaries' moves, ±1 [m]."""

_NUMBERS = 2**20  # in the vectors that are projected at a time
_PROBE_NUMBERS = 512  # most numbers in a probe
_LEAST_LOG_CHANCE = -40.0  # less likely numbers of a user's drawn examples are omitted


@dataclass(frozen=True)
class Directions:
    """Unit vectors of d numbers, one for each of m canaries: functions of a key.

    Guarantees: each has length 1, and those of canaries b·d, …, b·d + d − 1 are orthogonal for
    every b, up to rounding. A direction is zero outside one block of H, which usually has at least
    half of the d numbers.
    """

    key: bytes = field(repr=False)
    canaries: int  # m
    dimension: int  # d

    def rows(self, canaries: Positions) -> Float32Matrix:
        """Return the directions of some canaries: [c, d]."""
        directions = np.zeros((len(canaries), self.dimension), np.float32)
        for direction, canary in zip(directions, canaries.tolist(), strict=True):
            block, row = divmod(canary, self.dimension)
            (piece,) = (piece for piece in self._pieces if piece.start <= row < piece.stop)
            left, right = _hadamard_factors(piece.stop - piece.start)
            left_row, right_row = divmod(row - piece.start, len(right))
            numbers = np.outer(left[left_row], right[right_row]).ravel()
            direction[piece] = numbers * self._signs[block, piece]
        return directions

    def along(self, vector: FloatVector) -> FloatVector:
        """Return the projections of a vector [d] on all directions: [m]."""
        projections, at_once = list[Float32Matrix](), max(1, _NUMBERS // self.dimension)
        for first in range(0, len(self._signs), at_once):
            signed = np.multiply(self._signs[first : first + at_once], vector, dtype=np.float32)
            for piece in self._pieces:
                left, right = _hadamard_factors(piece.stop - piece.start)
                square = signed[:, piece].reshape(-1, len(left), len(right))
                signed[:, piece] = (left @ square @ right).reshape(len(signed), -1)
            projections.append(signed)
        return np.concatenate(projections).ravel()[: self.canaries].astype(np.float64)

    @cached_property
    def _pieces(self) -> tuple[slice, ...]:
        """Blocks of H, as slices of the d numbers: powers of two, the largest first."""
        powers = (1 << digit for digit in reversed(range(self.dimension.bit_length())))
        sizes = [power for power in powers if self.dimension & power]
        ends = accumulate(sizes)
        return tuple(slice(end - size, end) for size, end in zip(sizes, ends, strict=True))

    @cached_property
    def _signs(self) -> Float32Matrix:
        """Random signs of each block of d canaries: [blocks, d]."""
        blocks, block_words = -(-self.canaries // self.dimension), -(-self.dimension // 64)
        signs = _signs(words(self.key, blocks * block_words))
        return signs.reshape(blocks, -1)[:, : self.dimension]


@cache
def _hadamard_factors(size: int) -> tuple[Float32Matrix, Float32Matrix]:
    """Return two matrices whose Kronecker product is the Hadamard matrix, divided by √size."""
    power = size.bit_length() - 1
    sides = (1 << power // 2, 1 << power - power // 2)
    left, right = ((hadamard(side) / math.sqrt(side)).astype(np.float32) for side in sides)
    return left, right


def _signs(random_words: npt.NDArray[np.uint64]) -> Float32Vector:
    """Return 64 signs for each word."""
    bits = np.unpackbits(random_words.view(np.uint8))
    return np.multiply(bits, 2.0, dtype=np.float32) - np.float32(1.0)


@dataclass(frozen=True)
class Canaries:
    """The canaries of a run: their inclusion, and their directions in each round."""

    count: int  # m
    key: bytes = field(repr=False)  # 32 secret bytes
    # Whether directions stay the same in all rounds except for their signs; noise that is
    # correlated over rounds requires this.
    steady: bool = False

    @cached_property
    def included(self) -> Flags:
        """True for each canary that is included, by fair coins: [m]."""
        return self._coins("included") > 0.0

    def signs(self, round_number: int, attempt: int) -> FloatVector:
        """Return the signs of the canaries' moves along their directions in a round: ±1 [m]."""
        return self._coins(f"signs/{round_number}/{attempt}").astype(np.float64)

    def directions(
        self, group: VectorGroup, dimension: int, round_number: int, attempt: int
    ) -> Directions:
        """Return the directions of a vector group of d = `dimension` numbers in a round."""
        suffix = "" if self.steady else f"/{round_number}/{attempt}"
        return Directions(self._key(f"directions/{group.name}{suffix}"), self.count, dimension)

    def _coins(self, purpose: str) -> Float32Vector:
        return _signs(words(self._key(purpose), -(-self.count // 64)))[: self.count]

    def _key(self, purpose: str) -> bytes:
        return hmac.digest(self.key, purpose.encode(), "sha256")


def audited_groups(clipping: Clipping) -> Iterator[VectorGroup]:
    """Yield the vector groups in which canaries move: of the update, and of control variates.

    Metrics and counts are mostly single numbers, which all users of a round move together.
    """
    for group in clipping.sent:
        if not group.tensors[0].startswith(METRIC_PREFIX):
            yield group


@dataclass(frozen=True)
class Measurement:
    """Measurements of one release: functions of the release and the canaries alone."""

    round: int  # from 1
    attempt: int
    part: int  # place of the round in its event, from 0
    # Projections of the release on the canaries' moves, in units of the term that a drawn and
    # included canary adds to the release: [m].
    scores: FloatVector
    energy: float  # Σ_g ‖R_g‖²/σ_g² of the released sums R_g
    dimension: int  # number of squares in this sum
    probe: FloatVector  # the numbers R_g/σ_g at fixed places
    drawn: Flags | None = None  # whether each canary was drawn, if that is public: [m]


@dataclass(frozen=True)
class Past:
    """Sums of all releases so far, in units of the noise's standard deviation, by vector group."""

    releases: int = 0
    sums: Mapping[str, FloatVector] = field(default_factory=dict)

    def removed_from(self, name: str, release: FloatVector) -> FloatVector:
        """Return a release [d] of a group without the common direction of earlier releases.

        If t users' sums have length h and the same direction, each with unit noise, the sum of t
        releases has the squared length t²·h² + t·d. The second term, due to noise, is discounted.
        """
        total = self.sums.get(name)
        if total is None or not (squared_length := float(total @ total)):
            return release
        share = max(0.0, 1.0 - self.releases * len(total) / squared_length)
        return release - total * (share * float(release @ total) / squared_length)

    def with_release(self, name: str, release: FloatVector) -> FloatVector:
        """Return the sum [d] of a group's releases, including one more release [d]."""
        return release + self.sums.get(name, 0.0)


def measure(
    canaries: Canaries,
    mechanism: GaussianMechanism,
    average: FloatVector,
    at: tuple[int, int, int],
    past: Past,
) -> tuple[Measurement, Past]:
    """Measure a release [D] at a round, attempt and part of its event, given the past releases.

    In units of its noise, group g of a release contains ±u_g·S_g/σ_g for an included canary that
    was drawn, with direction u_g. Noise and the users' sum have variance v_g along any direction.
    The score adds up projections on u_g with weights proportional to (S_g/σ_g)/v_g. They minimise
    the variance, which is z² with noise alone, for a mean score of 1 if the canary is included and
    drawn, and 0 otherwise. Returns the measurement, and the past with this release.
    """
    clipping, query = mechanism.clipping, mechanism.query
    layout, (number, attempt, part) = clipping.layout, at
    names = [group.name for group in clipping.groups]
    stddevs = dict(zip(names, query.noise_stddevs, strict=True))
    released = average.copy()
    for tensor, stddev in query.tensor_stddevs.items():
        released[layout.slices[tensor]] /= stddev
    scores, squared, sums = np.zeros(canaries.count), 0.0, dict[str, FloatVector]()
    for group in audited_groups(clipping):
        vector = np.concatenate([released[layout.slices[tensor]] for tensor in group.tensors])
        sums[group.name] = past.with_release(group.name, vector)
        vector = past.removed_from(group.name, vector)
        ratio = group.clipping_norm / stddevs[group.name]
        weight = ratio / max(1.0, float(vector @ vector) / len(vector))
        scores += weight * canaries.directions(group, len(vector), number, attempt).along(vector)
        squared += ratio * weight
    measurement = Measurement(
        round=number,
        attempt=attempt,
        part=part,
        scores=scores * canaries.signs(number, attempt) / squared,
        energy=float(released @ released),
        dimension=released.size,
        probe=released[:: -(-released.size // _PROBE_NUMBERS)],
    )
    return measurement, Past(past.releases + 1, sums)


def check_auditable(sampling: SamplingEvent) -> None:
    """Raise InvalidValueError if there is no likelihood ratio for the rounds of an event."""
    if sampling.relation is NeighbouringRelation.REPLACE_ONE:
        raise InvalidValueError(
            f"audit is given and neighbours are {sampling.relation}; they must be "
            f"{NeighbouringRelation.ADD_OR_REMOVE_ONE}, since a canary is included or not"
        )
    if sampling.policy is SamplingPolicy.BANDED_POISSON:
        raise InvalidValueError(
            f"audit is given and sampling.policy is {str(sampling.policy)!r}; it must be another, "
            "since only the server knows in which group a canary tosses its coins"
        )


def log_likelihood_ratios(
    event: RoundEvent, measurements: Sequence[Measurement], signs: Signs
) -> FloatVector:
    """Return Λ of each canary, [m], from measurements of rounds of one plan's event, in order.

    A round that was charged but not released has no measurement and adds nothing; if noise is
    correlated, the other rounds of its series do not either.
    """
    sampling, schedule = event.sampling, event.sampling.schedule
    ratios = np.zeros(len(measurements[0].scores) if measurements else 0)
    for series in _series(measurements):
        scores = np.array([m.scores for m in series])
        if schedule is None:
            q, k = sampling.sampling_probability, sampling.examples_per_user or 1
            ratios += _by_coins(scores, q, k)
        elif sampling.policy is SamplingPolicy.RANDOM_ALLOCATION:
            ratios += _by_allocation(scores, schedule)
        elif len(event.strategy) == 1 or [m.part for m in series] == list(range(len(series))):
            turns = np.array([m.drawn for m in series], dtype=np.float64)
            directions = np.array([signs(m.round, m.attempt) for m in series])
            ratios += _by_turns(scores * directions, turns * directions, event.strategy)
    return ratios


def _series(measurements: Sequence[Measurement]) -> Iterator[list[Measurement]]:
    """Yield the rounds of each event; within one, their parts increase."""
    rounds: list[Measurement] = []
    for measurement in measurements:
        if rounds and measurement.part <= rounds[-1].part:
            yield rounds
            rounds = []
        rounds.append(measurement)
    if rounds:
        yield rounds


def _variances(scores: FloatMatrix) -> FloatMatrix:
    """Return the variance of the scores of each round: [n, m] → [n, 1]."""
    return np.asarray(np.maximum(np.mean(scores**2, axis=1, keepdims=True), 1e-12))


def _by_coins(scores: FloatMatrix, q: float, k: int) -> FloatVector:
    counts = np.arange(k + 1)
    log_binomials = gammaln(k + 1) - gammaln(counts + 1) - gammaln(k - counts + 1)
    log_chances = log_binomials + xlogy(counts, q) + xlog1py(k - counts, -q)
    likely = log_chances > _LEAST_LOG_CHANCE
    v, terms = _variances(scores), []
    for j, log_chance in zip(counts[likely], log_chances[likely], strict=True):
        terms.append(log_chance + (2.0 * j * scores - j**2) / (2.0 * v))
    return np.asarray(logsumexp(terms, axis=0).sum(axis=0))


def _by_allocation(scores: FloatMatrix, schedule: Schedule) -> FloatVector:
    n, k = schedule.rounds, schedule.participations
    weights = np.zeros((n, scores.shape[1]))  # 0 for missing rounds, which give no evidence
    weights[: len(scores)] = (2.0 * scores - 1.0) / (2.0 * _variances(scores))
    sums = np.full((k + 1, scores.shape[1]), -math.inf)
    sums[0] = 0.0
    for weight in weights:
        sums[1:] = np.logaddexp(sums[1:], sums[:-1] + weight)
    return np.asarray(sums[k] - (gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)))


def _by_turns(scores: FloatMatrix, moves: FloatMatrix, strategy: tuple[float, ...]) -> FloatVector:
    column = np.zeros(len(scores))
    column[: len(strategy)] = strategy[: len(scores)]
    matrix = toeplitz(column, np.zeros(len(scores)))
    x, y = matrix @ moves, matrix @ scores
    return np.asarray((x * (y - x / 2.0) / _variances(y)).sum(axis=0))
