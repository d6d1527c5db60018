"""Noise that is correlated over rounds (DP-FTRL), in whole steps and constant memory.

This module treats one vector group, in steps. X_t is the whole-number sum of round t of n. C is the
lower triangular Toeplitz matrix of a strategy; its first column is (1, c_1, c_2, …) with c_j ≥ 0.
Z_t are fresh real normals of standard deviation s. A matrix mechanism releases Y = C·X + Z; then
C⁻¹·Y is X with noise C⁻¹·Z, which largely cancels in sums over rounds (Denisov et al. 2022). A
round here releases X_t + N_t with

    N_t = ⌊Z_t − f_t + ½⌋,   f_t = Σ_{j ≥ 1} c_j·N_{t−j} + r_t,

where r_t is an arithmetic error that the earlier N determine, at most r in each component. The
noise never sees data and is whole.

**Privacy: this release is as private as Y.** Let R_t = X_t + N_t. Since X_t is whole, it can move
into the rounding, and N_{t−j} = R_{t−j} − X_{t−j} can be substituted into f_t:

    R_t = ⌊μ_t + Z_t − Σ_{j ≥ 1} c_j·R_{t−j} + ½⌋,   μ_t = (C·X)_t − r_t.

So R is a function of the outputs μ_t + Z_t, one after the other. Earlier releases determine X_t,
since users compute with the released values and all other randomness is held fixed. Together with
X_t they determine N_t, r_t and μ_t. For two neighbouring populations and *the same* earlier
releases let D be the difference of X: the means differ by Δ_t = (C·D)_t − (r_t − r'_t). Over all
rounds

    √(Σ_t ‖Δ_t‖²) ≤ S' = S + 2r·√(n·d),

where S bounds ‖C·D‖, as the accountant does for all participation patterns, and d is the
dimension. Outputs whose means differ by at most S', even adaptively, reveal no more than one
Gaussian of sensitivity S'. Let one more output bring Σ‖Δ_t‖² to S'² exactly. The privacy loss is
Σ_t ⟨Δ_t, Z_t⟩/s² + S'²/(2s²). Given the earlier outputs, ⟨Δ_t, Z_t⟩ is N(0, s²·‖Δ_t‖²), so, from
the last round backwards, E exp(iλ·Σ⟨Δ_t, Z_t⟩) = exp(−λ²·s²·S'²/2): the loss has the law of that
one Gaussian. (With r = 0 this is Denisov et al. 2022, Theorem 2.1.) Several groups are further
components, each in units of its own s. A round that releases nothing counts with X_t = 0.

**Bands**: c_j = a_j/2^20 with few whole numbers a_j. F = Σ a_j·N_{t−j} is exact in 64 bits, so
r = 0. With w = ⌊F/2^20 + ½⌋, N_t = ⌊Z_t + (w − F/2^20) + ½⌋ − w: a normal rounded at an offset in
[−½, ½].

**Buffers** (BLT; Dvijotham et al. 2024, McMahan et al. 2024): c_j = Σ_i w_i·θ_i^(j−1), computed
with buffers B_i ← θ_i·B_i + N_t; f_t = Σ_i w_i·B_i before that update. In float64 with unit
roundoff v = 2^-53, while no B_i leaves [−M_i, M_i], the product and the sum are off by at most
v·M_i each, and later rounds shrink this error by θ_i: B_i is off by at most 2v·m_i·M_i with
m_i = min(n, 1/(1 − θ_i)). Each term of the sum over b buffers is rounded at most b times, which
moves f_t by at most 2b·v·Σ_i w_i·M_i. So

    r = 2v·Σ_i w_i·M_i·(m_i + b).

f_t minus the nearest whole number is exact, and Z_t is rounded at that offset.

**Bounds** M on |N| and M_i on |B_i| are set in advance so that no run exceeds them: C·N = Z + e
with |e| ≤ ½ + r ≤ 1, so N = g∗Z + g∗e, where g is the first column of C⁻¹, and
M = 32·s·‖g‖₂ + ‖g‖₁ over n rounds; M_i likewise. A normal exceeds 32 standard deviations with
probability 1e-224. A strategy and an s are refused if values within these bounds could exceed 64
bits, or if r could exceed ½.

Every round still checks its bounds, and the run ends if one is exceeded. Consider a run that
continues with exact arithmetic instead: its |r_t| is always at most r, so all of the above holds
for it, and the two runs differ with probability below 1e-200.
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import NoiseError
from fedpriv.privacy.noise import LARGEST_STDDEV, rounded_gaussian
from fedpriv.support.checks import check_ranges, require

IntegerVector = NDArray[np.int64]
Vector = NDArray[np.float64]
Memory = tuple[NDArray[Any], ...]

_BITS = 20
COEFFICIENT_STEP = 2.0**-_BITS
"""Coefficients of a banded strategy are whole multiples of this."""

_MAX_DEVIATIONS = 32.0  # bound on normals, in standard deviations
_UNIT_ROUNDOFF = 2.0**-53
_COLUMN_UNIT = 1 << 128
_CHUNK = 1 << 14  # components; a few vectors of this length fit in a core's cache


@dataclass(frozen=True)
class BandedStrategy:
    """The first column of C is (1, c_1, …, c_{p−1}, 0, …); the memory is the last p − 1 vectors.

    Arithmetic is exact and adds nothing to the sensitivity. (1,) is independent noise.
    """

    coefficients: tuple[float, ...]  # c_0 = 1, then multiples of 2^-20 in [0, 1]

    def __post_init__(self) -> None:
        c = self.coefficients
        require(c[:1] == (1.0,), f"the coefficients begin with {c[:1]}; they must begin with 1")
        for j, value in enumerate(c):
            # NaN fails every comparison.
            valid = 0.0 <= value <= 1.0 and (value / COEFFICIENT_STEP).is_integer()
            limit = "it must be a whole multiple of 2^-20 from 0 to 1"
            require(valid, f"coefficient {j} is {value}; {limit}")

    @property
    def vectors_kept(self) -> int:
        """Maximum number of vectors in a state, with 8 bytes for each of d components."""
        return len(self.column(len(self.coefficients))) - 1

    def column(self, rounds: int) -> tuple[float, ...]:
        """Return the first column of C for n ≥ 1 rounds, without trailing zeros."""
        column = self.coefficients[:rounds]
        while column[-1] == 0.0:
            column = column[:-1]
        return column

    def responses(self, rounds: int) -> list[Vector]:
        """Return the first column g of C⁻¹ [n], to the precision of float64."""
        backwards = np.array(self.column(rounds)[:0:-1])
        order = backwards.size
        g = np.zeros(order + rounds)
        g[order] = 1.0
        for t in range(order + 1, order + rounds):
            g[t] = -(backwards @ g[t - order : t])
        return [g[order:]]

    def error(self, bounds: Vector, _rounds: int) -> float:
        """Return r, the error bound of `carry_over`: 0 if F cannot overflow, otherwise infinity.

        F and ½ together must stay below 2^63, in units of 2^-20.
        """
        return 0.0 if sum(self._multipliers) * float(bounds[0]) <= 2.0**62 else math.inf

    def initial_memory(self, _dimension: int) -> Memory:
        """Return the memory before the first round: empty."""
        return ()

    def carry_over(self, memory: Memory, dimension: int) -> tuple[IntegerVector, Vector]:
        """Return w, the whole number nearest to f_t, and w − f_t, each [d].

        `memory` holds the noise N of earlier rounds, newest first.
        """
        rounded, offsets = np.empty(dimension, np.int64), np.empty(dimension)
        for start in range(0, dimension, _CHUNK):
            part = slice(start, start + _CHUNK)
            total = np.zeros_like(rounded[part])
            product = np.empty_like(total)
            for multiplier, noise in zip(self._multipliers, memory, strict=False):
                np.multiply(noise[part], multiplier, out=product)
                total += product
            np.right_shift(total + (1 << _BITS - 1), _BITS, out=rounded[part])
            np.subtract(rounded[part] << _BITS, total, out=total)
            np.multiply(total, COEFFICIENT_STEP, out=offsets[part])
        return rounded, offsets

    def next_memory(self, memory: Memory, noise: IntegerVector) -> Memory:
        """Return the memory after a round with this noise."""
        return (noise, *memory)[: self.vectors_kept]

    @cached_property
    def _multipliers(self) -> list[int]:
        """The multipliers a_1, …, a_{p−1}."""
        return [int(c / COEFFICIENT_STEP) for c in self.coefficients[1 : self.vectors_kept + 1]]


@dataclass(frozen=True)
class BufferedStrategy:
    """The first column of C is 1, then c_j = Σ_i w_i·θ_i^(j−1): buffered linear Toeplitz (BLT).

    The memory is one vector per decay, for any number of rounds.
    """

    decays: tuple[float, ...]  # θ_i in [0, 1)
    weights: tuple[float, ...]  # w_i in [0, 1], one for each decay

    def __post_init__(self) -> None:
        d, w = len(self.decays), len(self.weights)
        limit = "their numbers must be equal, and at least 1"
        require(d == w > 0, f"{d} decays are given and {w} weights; {limit}")
        for decay in self.decays:
            require(0.0 <= decay < 1.0, f"a decay is {decay}; it must be in [0, 1)")
        for weight in self.weights:
            require(0.0 <= weight <= 1.0, f"a weight is {weight}; it must be from 0 to 1")

    @property
    def vectors_kept(self) -> int:
        """Number of vectors in a state, with 8 bytes for each of d components."""
        return len(self.decays)

    def column(self, rounds: int) -> tuple[float, ...]:
        """Return the first column of C for n ≥ 1 rounds, without trailing zeros.

        Coefficient j is rounded up, by less than b·j/2^128 plus one part in 2^52, so that no bound
        on the sensitivity is below that of C. Coefficients never increase if the weights add up to
        at most 1.
        """
        ratios = [decay.as_integer_ratio() for decay in self.decays]
        terms = [math.ceil(Fraction(weight) * _COLUMN_UNIT) for weight in self.weights]
        column = [1.0]
        for _ in range(rounds - 1):
            column.append(_rounded_up(sum(terms)))
            terms = [-(-term * top // low) for term, (top, low) in zip(terms, ratios, strict=True)]
        while column[-1] == 0.0:
            column.pop()
        return tuple(column)

    def responses(self, rounds: int) -> list[Vector]:
        """Return the first columns [n] of C⁻¹ and of the maps from Z to each buffer."""
        decays, weights = np.array(self.decays), np.array(self.weights)
        buffers = np.zeros((rounds + 1, decays.size))
        g = np.zeros(rounds)
        for t in range(rounds):
            g[t] = float(t == 0) - weights @ buffers[t]
            buffers[t + 1] = decays * buffers[t] + g[t]
        return [g, *buffers[1:].T]

    def error(self, bounds: Vector, rounds: int) -> float:
        """Return r, the error bound of `carry_over`, from `bounds` on |N| and on each |B_i|."""
        if not bounds[0] <= 2.0**53:  # float64 would round N
            return math.inf
        terms = (
            weight * bound * (min(rounds, 1.0 / (1.0 - decay)) + self.vectors_kept)
            for weight, bound, decay in zip(self.weights, bounds[1:], self.decays, strict=True)
        )
        return 2.0 * _UNIT_ROUNDOFF * float(sum(terms)) * (1.0 + 2.0**-40)  # for rounding here

    def initial_memory(self, dimension: int) -> Memory:
        """Return the buffers before the first round: zeros [d]."""
        return tuple(np.zeros(dimension) for _ in self.decays)

    def carry_over(self, memory: Memory, _dimension: int) -> tuple[IntegerVector, Vector]:
        """Return w, the whole number nearest to f_t, and w − f_t, each [d]; `memory` is B."""
        total = self.weights[0] * memory[0]
        for weight, buffer in zip(self.weights[1:], memory[1:], strict=True):
            total += weight * buffer
        rounded = np.rint(total)
        return rounded.astype(np.int64), np.subtract(rounded, total, out=total)

    def next_memory(self, memory: Memory, noise: IntegerVector) -> Memory:
        """Return the buffers after a round with this noise."""
        pairs = zip(self.decays, memory, strict=True)
        return tuple(decay * buffer + noise for decay, buffer in pairs)


Strategy = BandedStrategy | BufferedStrategy


@dataclass(frozen=True, eq=False)
class NoiseState:
    """The state between two rounds of a series: constant in size, and secret like the noise.

    Arrays are never written to again, so states may share them.
    """

    rounds_drawn: int
    memory: Memory = field(repr=False)  # noise of the last rounds, newest first, or buffers


@dataclass(frozen=True)
class CorrelatedNoise:
    """The noise N_t of all rounds of a series for one vector group, a function of keys only.

    Each round has one key and one sum. If anything about a round may have been released, the round
    must not be repeated, with its own key or another; the series continues with the next round.
    """

    strategy: Strategy
    dimension: int  # d ≥ 1, of the group
    stddev: float  # s ≥ 0, of the fresh normals Z, in steps
    rounds: int  # n ≥ 1, the most rounds that can be drawn

    def __post_init__(self) -> None:
        check_ranges(self, " of noise", dimension="whole", rounds="whole")
        limit = f"it must be from 0 to 2^{math.log2(LARGEST_STDDEV):.0f}"
        require(0.0 <= self.stddev <= LARGEST_STDDEV, f"stddev is {self.stddev} steps; {limit}")
        setting = f"stddev is {self.stddev} steps in {self.rounds} rounds"
        limit = "for exact arithmetic with this strategy, both must be smaller"
        require(self._error <= 0.5, f"{setting}; {limit}")

    @property
    def sensitivity_inflation(self) -> float:
        """2r·√(n·d), what arithmetic adds to the L2 sensitivity of C·X, in steps; 0 for bands.

        It may instead be added to √B, the bound on one contribution in steps, before √B is
        multiplied by the strategy's sensitivity, since that is at least c_0 = 1.
        """
        spread = math.sqrt(self.rounds * self.dimension)
        return 2.0 * self._error * spread * (1.0 + 2.0**-40)

    def start(self) -> NoiseState:
        """Return the state before the first round."""
        return NoiseState(0, self.strategy.initial_memory(self.dimension))

    def step(self, state: NoiseState, key: bytes) -> tuple[NoiseState, IntegerVector]:
        """Return the state after the next round, and that round's noise N_t, read-only int64 [d].

        The 32-byte key determines Z_t. It stays secret for ever and has no other use.
        """
        t = state.rounds_drawn
        require(t < self.rounds, f"{t} rounds were drawn; there must be no more")
        rounded, offsets = self.strategy.carry_over(state.memory, self.dimension)
        noise = rounded_gaussian(key, self.dimension, self.stddev, offsets)
        noise -= rounded
        noise.flags.writeable = False
        memory = self.strategy.next_memory(state.memory, noise)
        self._check(noise, memory)
        return NoiseState(t + 1, memory), noise

    @cached_property
    def _bounds(self) -> Vector:
        """M on |N|, then M_i on each |B_i|; not finite if the noise grows without bound."""
        with np.errstate(over="ignore", invalid="ignore"):
            responses = np.array(self.strategy.responses(self.rounds))
            lengths = np.sqrt(np.square(responses).sum(axis=1))
            bounds: Vector = _MAX_DEVIATIONS * self.stddev * lengths + np.abs(responses).sum(axis=1)
        return bounds

    @cached_property
    def _error(self) -> float:
        return self.strategy.error(self._bounds, self.rounds)

    def _check(self, noise: IntegerVector, memory: Memory) -> None:
        """Raise NoiseError if a value exceeds the bound that exact arithmetic depends on."""
        # Earlier rounds checked their own N.
        vectors = [noise, *(() if isinstance(self.strategy, BandedStrategy) else memory)]
        for vector, bound in zip(vectors, self._bounds, strict=True):
            if not max(vector.max(), -vector.min()) <= bound:
                raise NoiseError(f"noise exceeds its bound of {bound:.6g} steps")


def _rounded_up(units: int) -> float:
    """Return the smallest float64 that is at least this many `_COLUMN_UNIT`s."""
    nearest = units / _COLUMN_UNIT
    too_small = Fraction(nearest) * _COLUMN_UNIT < units
    return math.nextafter(nearest, math.inf) if too_small else nearest
