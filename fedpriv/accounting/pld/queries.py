"""Intervals of ε and δ by composing privacy loss distributions (PLD).

Any multiset of pairs is put on a lattice as losses that are at least, and at most as bad, composed
by a tilted fast Fourier transform, and read off with every error on the safe side. The worse of the
two directions is reported. Tilt, lattice and window come from a quick cumulant of the loss, which
need not be exact: a poor choice makes the interval wider, never wrong.

A run prices the same pairs again and again, each time with more events. So the plan for an ε is
that of numbers of events that are powers of two, and what a pair is on a lattice is kept. An answer
is a function of pairs and δ, or ε, alone.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

from fedpriv.accounting import gaussian, round_counts
from fedpriv.accounting.contour.inversion import conversion
from fedpriv.accounting.pld.dominating_pairs import PoissonPair
from fedpriv.accounting.pld.fft import Composition, FftWindow, compose_atoms
from fedpriv.accounting.pld.lattice import (
    GaussianPair,
    Lattice,
    LossAtoms,
    LossPair,
    Pairs,
    dominated,
    dominating,
)
from fedpriv.accounting.pld.random_allocation import AllocationPair
from fedpriv.accounting.round_counts import Direction, Ends, Vector

# How wide an interval of ε should be, relative to its upper end and in addition, and one of δ.
_WIDTH, _LEAST_WIDTH, _DELTA_WIDTH = 1e-3, 1e-6, 0.05
# How often a wide interval is computed again, how much finer at most each time, and the share of
# the last width above which finer lattices do not help.
_TRIES, _FINEST, _PROGRESS = 6, 1 / 64, 0.8
_FAR = 0.1  # relative width of an interval of ε whose windows may have missed it
# Numbers of different pairs, each of which needs a transform: up to the first they are composed
# again where that helps, up to the second once, and more are grouped.
_REFINED, _GROUPS = 16, 32
_ALLOCATION_GROUPS = 12  # passes of random allocation, of which each takes up to some seconds
# Noise per sensitivity, and sampling probability, that is computed with.
_LEAST_NOISE, _MOST_NOISE, _LEAST_PROBABILITY = 0.05, 1e6, 1e-12
_NEXT_TO_NOTHING = PoissonPair(_LEAST_PROBABILITY, _MOST_NOISE)
_TAIL = 1e-4  # share of δ that may come from losses that are taken to be infinite
_TOLERANCE = 2e-4  # share of ε that the lattice of the upper bound may cost
_CERTAINTY = 10.0  # minus the log of the share of δ that may wrap around the window
_LEAST_LOG_DELTA = math.log(1e-100)
_LARGEST_SIZE = 1 << 20
_LARGEST_STEP = 64.0  # of a lattice, whose points must tell the losses of one round apart
_FILLED = 0.9  # share of the transform's points that the planned window takes
_GROWTH = 0.03  # spacing of far lattice points relative to their distance from the centre
_SHARES = (1.0, 0.5, 0.15)  # tilts to choose from, relative to that of the best Chernoff bound
_FAINTEST = 31.0  # minus the log of how small one round's δ may be under the tilt
_KEPT = 256  # plans, and losses on the lattices of plans


def epsilon_interval(pairs: Pairs, delta: float) -> Ends:
    """Interval (low, up) that holds the least ε of all these losses together at δ ≥ 1e-60.

    No event: [0, 0]. An event without noise: [∞, ∞], by convention even where a user is so rarely
    sampled that δ alone would cover it. Below a noise multiplier of 0.05, of examples 0.05 times
    how many a user has in a cohort on average, whoever is sampled counts as seen: the upper end is
    ∞ unless δ covers that. The width is mostly at most up/1000 + 1e-6 for up to 16 different pairs.
    """
    z = _closed_form(pairs)
    if z is not None:
        return gaussian.epsilon_interval(delta, z)
    width = _WIDTH, _LEAST_WIDTH
    ends_of = epsilon_below, epsilon_above
    low, up = _refined(pairs, delta, _aim_at_delta, ends_of, width, _power_of_two)
    missed = max(_FAR * up, _LEAST_WIDTH) < up - low < math.inf
    if low == 0.0 or not missed:
        return low, up

    # The Chernoff bound of a large δ can be far above its ε, and the window with it.
    def aim_at_low(some: Pairs, _delta: float, direction: Direction) -> _Aim:
        return _aim_at_epsilon(some, low, direction)

    again = _refined(pairs, delta, aim_at_low, ends_of, width, int)
    return max(low, again[0]), min(up, again[1])


def delta_interval(pairs: Pairs, epsilon: float) -> Ends:
    """Interval (low, up) that holds the least δ of all these losses together at a finite ε ≥ 0.

    No event: [0, 0]. An event without noise: [0, 1]. Upper ends do not go far below 1e-100.
    """
    z = _closed_form(pairs)
    if z is not None:
        return gaussian.delta_interval(epsilon, z)
    width = _DELTA_WIDTH, 0.0
    return _refined(pairs, epsilon, _aim_at_epsilon, (delta_below, delta_above), width, int)


def _closed_form(pairs: Pairs) -> float | None:
    """The z of the one Gaussian that the pairs are, 0 if one has no noise; None otherwise."""
    if any(pair.z == 0.0 for pair in pairs):
        return 0.0
    rounds = Counter[tuple[float, float]]()
    for pair, count in pairs.items():
        if not (isinstance(pair, GaussianPair) and pair.q == 1.0):
            return None
        rounds[1.0, pair.z / pair.shift] += count
    return round_counts.unsampled_noise_multiplier(rounds)


def _refined(
    pairs: Pairs,
    at: float,
    aim_at: "Callable[[Pairs, float, Direction], _Aim]",
    ends_of: tuple[Callable[[Composition, float], float], Callable[[Composition, float], float]],
    width: tuple[float, float],
    planned_for: Callable[[int], int],
) -> Ends:
    """The interval of all tries together, until it is at most width[0]·up + width[1] wide."""
    worst, best = _few(pairs)
    noisy, near, seen = _split_by_noise(worst)
    rough_below, rough_above = (
        tuple((pair, planned_for(n)) for pair, n in each.items()) for each in (near, noisy)
    )
    # For many pairs a fine lattice would cost much, and not help where they are grouped.
    tries, precision = (_TRIES, 1.0) if len(pairs) <= _REFINED else (1, 4.0)
    low, up = 0.0, math.inf
    for _ in range(tries):
        last, below, above = up - low, 0.0, 0.0
        for direction in Direction:
            window, lattice = _planned(rough_below, at, aim_at, direction, precision)
            least = [(_at_most_as_bad(pair, lattice, direction), n) for pair, n in best.items()]
            known = [(atoms, n) for atoms, n in least if atoms is not None]
            if known:
                below = max(below, ends_of[0](compose_atoms(known, window), at))
            window, lattice = _planned(rough_above, at, aim_at, direction, precision)
            most = [(_at_least_as_bad(pair, lattice, direction), n) for pair, n in noisy.items()]
            composition = compose_atoms(most, window)
            composition = replace(composition, infinite=composition.infinite + seen)
            above = max(above, ends_of[1](composition, at))
        low, up = max(low, below), min(up, above)
        allowed = width[0] * up + width[1]
        if not allowed < up - low < min(math.inf, _PROGRESS * last):
            break
        precision *= max(0.4 * allowed / (up - low), _FINEST)
    if not low <= up:
        raise AssertionError(f"the ends contradict each other: {low} > {up}")
    return low, up


def _power_of_two(n: int) -> int:
    """The least that is not below n ≥ 1."""
    return 1 << (n - 1).bit_length()


@lru_cache(maxsize=_KEPT)
def _planned(
    pairs: tuple[tuple[LossPair, int], ...],
    at: float,
    aim_at: "Callable[[Pairs, float, Direction], _Aim]",
    direction: Direction,
    precision: float,
) -> tuple[FftWindow, Lattice]:
    counts = dict(pairs)
    return _resolved(counts, aim_at(counts, at, direction), direction, precision)


@lru_cache(maxsize=_KEPT)
def _at_least_as_bad(pair: LossPair, lattice: Lattice, direction: Direction) -> LossAtoms:
    return dominating(pair.at_least_as_bad(lattice.tail), lattice, direction)


@lru_cache(maxsize=_KEPT)
def _at_most_as_bad(pair: LossPair, lattice: Lattice, direction: Direction) -> LossAtoms | None:
    """None where no loss is known."""
    law = pair.at_most_as_bad(lattice.tail)
    atoms = None if law is None else dominated(law, lattice, direction)
    return atoms if atoms is not None and atoms.mass.any() else None


def _few(pairs: Pairs) -> tuple[Pairs, Pairs]:
    """At least, and at most as bad pairs, in few groups of each kind and in the computed range.

    To get there, q may grow and z fall for the former, of which some stay below the range of z, and
    z grow for the latter, which lack pairs that would have to move otherwise.
    """
    kinds: dict[LossPair, Counter[tuple[float, float]]] = {}
    for pair, count in pairs.items():
        kinds.setdefault(pair.at(1.0, 1.0), Counter())[pair.q, pair.z] += count
    above, below = Counter[LossPair](), Counter[LossPair]()
    for kind, settings in kinds.items():
        rounds = round_counts.folded(settings) if isinstance(kind, GaussianPair) else settings
        most = _ALLOCATION_GROUPS if isinstance(kind, AllocationPair) else _GROUPS
        groups = round_counts.grouped(rounds, most)
        for found, moved in zip((above, below), groups, strict=True):
            for (q, z), count in moved.items():
                pair = kind.at(max(q, _LEAST_PROBABILITY), z)
                near, far = _noise_range(pair)
                if found is above:
                    found[pair.at(pair.q, min(z, far))] += count
                elif q >= _LEAST_PROBABILITY and z <= far:
                    found[pair.at(pair.q, max(z, near))] += count
    return above, below


def _split_by_noise(pairs: Pairs) -> tuple[Pairs, Pairs, float]:
    """Pairs with enough noise; all pairs, with noise raised to enough; and what the rest may show.

    The last is a bound on the chance that a user is sampled in any round with too little noise.
    Where a user matters with probability s, P = (1 − s)·R + s·A and Q = (1 − s)·R + s·B with one R.
    By joint convexity H_ε(P‖Q) ≤ (1 − s)·(1 − e^ε)_+ + s at every real ε, in both directions and
    however little noise there is: that is the curve of a loss which is infinite with probability s
    and else 0. It dominates the round, and such losses compose to at most the sum of their s.
    """
    noisy, near, seen = dict[LossPair, int](), Counter[LossPair](), 0.0
    for pair, count in pairs.items():
        limit = _noise_range(pair)[0]
        near[pair.at(pair.q, max(pair.z, limit))] += count
        if pair.z >= limit:
            noisy[pair] = count
        else:
            seen += count * (pair.q * pair.shift if isinstance(pair, GaussianPair) else 1.0)
    return noisy or {_NEXT_TO_NOTHING: 1}, near, min(1.0, seen * (1.0 + 2.0**-30))


def _noise_range(pair: LossPair) -> tuple[float, float]:
    """Noise whose losses are in the computed range, relative to what is usually drawn."""
    usual = max(1.0, pair.q * pair.shift if isinstance(pair, GaussianPair) else 1.0)
    return _LEAST_NOISE * usual, _MOST_NOISE * usual


@dataclass(frozen=True)
class _Cumulant:
    """K(w) = Σ_pairs log E[e^{wL}] over the nodes of a sketch of each pair."""

    log_mass: Vector  # [pairs, nodes] log-probability of each node
    loss: Vector  # [pairs, nodes] loss of each node, with the sign of the direction
    middle: Vector  # [pairs, 1] the loss near which nearly nothing happens
    count: Vector  # [pairs] events of each pair

    def __call__(self, w: float) -> float:
        """K(w) for any real w."""
        exponent = self.log_mass + w * self.loss  # SciPy's logsumexp takes several times as long
        largest = exponent.max(axis=1, keepdims=True)
        return float(self.count @ (largest[:, 0] + np.log(np.exp(exponent - largest).sum(axis=1))))

    @property
    def largest(self) -> float:
        """The largest loss, in modulus."""
        return float(np.abs(self.loss).max())

    def tilted(self, w: float) -> Vector:
        """[pairs, nodes] probabilities of the nodes under the tilt e^{wL}."""
        exponent = self.log_mass + w * self.loss
        return np.asarray(np.exp(exponent - logsumexp(exponent, axis=1, keepdims=True)))

    def stddev(self, w: float) -> float:
        """Standard deviation √K''(w) of the sum under the tilt."""
        weight = self.tilted(w)
        mean = (weight * self.loss).sum(axis=1, keepdims=True)
        variance = float(self.count @ (weight * (self.loss - mean) ** 2).sum(axis=1))
        return math.sqrt(max(variance, 1e-300))


class _Aim(NamedTuple):
    """What is looked for, roughly: ε, log δ, and −d log δ/dε."""

    epsilon: float
    log_delta: float
    steepness: float


def _cumulant(pairs: Pairs, tail: float, direction: Direction) -> _Cumulant:
    """The cumulant of these events, seen from one direction."""
    sketches = [pair.at_least_as_bad(tail).sketch(tail) for pair in pairs]
    shape = len(sketches), max(len(each.loss) for each in sketches)
    log_mass, loss = np.full(shape, -np.inf), np.zeros(shape)
    for row, each in enumerate(sketches):
        mass = each.log_q + each.loss if direction is Direction.REMOVE else each.log_q
        log_mass[row, : len(mass)] = mass - logsumexp(mass)
        loss[row, : len(mass)] = direction * each.loss
    middle = np.array([[direction * each.middle] for each in sketches])
    return _Cumulant(log_mass, loss, middle, np.array(list(pairs.values()), dtype=np.float64))


def _common(pairs: Pairs, log_delta: float, direction: Direction) -> _Cumulant:
    """The cumulant without losses rarer than δ/2 in all rounds, which spoil Chernoff bounds."""
    return _cumulant(pairs, math.exp(log_delta) / (2 * sum(pairs.values())), direction)


def _aim_at_delta(pairs: Pairs, delta: float, direction: Direction) -> _Aim:
    """Aim at the ε that belongs to δ."""
    k = _common(pairs, math.log(delta), direction)
    orders = _orders(k)
    bounds = [(k(w) - math.log(delta) - conversion(w)) / w for w in orders]
    best = int(np.argmin(bounds))
    return _Aim(bounds[best], math.log(delta), orders[best])


def _aim_at_epsilon(pairs: Pairs, epsilon: float, direction: Direction) -> _Aim:
    """Aim at the δ that belongs to ε; δ below 1e-100 is not told from 1e-100."""
    low, high, aim = _LEAST_LOG_DELTA, 0.0, _Aim(epsilon, 0.0, 1.0)
    for _ in range(9):
        middle = (low + high) / 2
        aim = _chernoff(_common(pairs, middle, direction), epsilon, _LEAST_LOG_DELTA)
        low, high = (middle, high) if aim.log_delta > middle else (low, middle)
    return aim


def _chernoff(k: _Cumulant, epsilon: float, least: float) -> _Aim:
    """Lowest bound on log δ(ε), but at least `least`, and the smallest tilt that gives it."""
    orders = _orders(k)
    bounds = [max(k(w) - w * epsilon - conversion(w), least) for w in orders]
    best = int(np.argmin(bounds))
    return _Aim(epsilon, min(bounds[best], 0.0), orders[best])


def _resolved(
    pairs: Pairs, aim: _Aim, direction: Direction, precision: float
) -> tuple[FftWindow, Lattice]:
    """The window and lattice that answer the question within about `precision` thousandths of ε.

    Half of the best tilt, or less, makes rare large losses so much rarer in the window that it is
    often ten times as narrow; what rounding then costs is still far below δ.
    """
    step = _step(_common(pairs, aim.log_delta, direction), aim, precision)
    rounds = sum(pairs.values())
    tail = _TAIL * precision * math.exp(aim.log_delta) / rounds
    k = _cumulant(pairs, tail, direction)
    best = _chernoff(k, aim.epsilon, min(aim.log_delta, _LEAST_LOG_DELTA)).steepness
    certainty = _CERTAINTY - math.log(precision)
    faintest = certainty + _FAINTEST - math.log(rounds)
    windows = [_window(k, aim, share * best, certainty) for share in _SHARES]
    windows = [each for each in windows if each.step > 0] or [replace(windows[0], step=step)]
    usable = [each for each in windows if each.depth < faintest] or windows[:1]
    window = min(usable, key=lambda each: each.step)
    size = 2 ** math.ceil(math.log2(min(_LARGEST_SIZE, max(1.0, window.step / step) / _FILLED)))
    window = replace(window, step=min(window.step / (_FILLED * size), _LARGEST_STEP))
    spread = math.sqrt(precision)
    widest = max(1.0, 0.1 * spread / ((1 + aim.steepness) * window.step))
    return window, Lattice(window.step, widest, _GROWTH * spread, tail)


def _window(k: _Cumulant, aim: _Aim, tilt: float, certainty: float) -> FftWindow:
    """The window under this tilt, with its whole width for a step."""
    at, spread = k(tilt), k.stddev(tilt)
    depth = certainty - min(0.0, aim.log_delta + tilt * aim.epsilon - at)
    etas = [float(u) / spread for u in np.geomspace(1e-3, 1e2, 17)]
    start, left = max(((at - k(tilt - eta) - depth) / eta, eta) for eta in etas)
    stop, right = min(((k(tilt + eta) - at + depth) / eta, eta) for eta in etas)
    return FftWindow(stop - start, tilt, left, right, depth, certainty)


def _step(k: _Cumulant, aim: _Aim, precision: float) -> float:
    """About the largest step whose cost to the upper bound is within the tolerance.

    Spreading a loss u above a lattice point to its neighbours adds the variance u·(h − u), h²/6 on
    average, or u·h near the centre, a lattice point; a variance A adds about (θ + 1)·A/2 to ε.
    """
    spread = k.stddev(aim.steepness)
    weight = k.count[:, None] * k.tilted(aim.steepness)
    distance = np.abs(k.loss - k.middle)
    budget = _TOLERANCE * precision * max(aim.epsilon, 0.1 * spread) * 2 / (1 + aim.steepness)

    def fits(step: float) -> bool:
        added = np.where(distance < step, distance * (step - distance), step**2 / 6)
        return float((weight * added).sum()) <= budget

    high = math.log(min(k.largest / 4, max(0.02 * aim.epsilon, 0.1 * spread)))
    low = high - 14.0
    if fits(math.exp(high)):
        return math.exp(high)
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(math.exp(middle)) else (low, middle)
    return math.exp(low)


def _orders(k: _Cumulant) -> list[float]:
    """Tilts from where the largest loss hardly counts to far beyond the best for a normal loss."""
    usual = 5.0 / k.stddev(0.0)
    low = min(math.exp(-6.0) * usual, 0.05 / k.largest)
    high = math.exp(6.0) * usual
    return [float(w) for w in np.geomspace(low, high, math.ceil(4 * math.log(high / low)))]


def epsilon_above(c: Composition, delta: float) -> float:
    """An ε ≥ 0 at which the divergence is surely at most δ."""
    finite = delta - c.infinite
    if finite <= 0:
        return math.inf
    log_mgf = c.log_mgf + c.mass_error
    epsilon = (log_mgf - math.log(finite) - conversion(c.tilt)) / c.tilt
    surely = np.log(np.maximum(c.divergence, 0.0) + c.excess) + log_mgf - c.tilt * c.losses
    good = np.flatnonzero(surely <= math.log(finite))
    if len(good) > 0:
        k = max(int(good[0]) - 1, 0)
        epsilon = min(epsilon, _crossing(c, k, finite, c.excess, log_mgf))
    return max(0.0, epsilon + c.slack)


def epsilon_below(c: Composition, delta: float) -> float:
    """An ε ≥ 0 at which the divergence is surely at least δ, or 0."""
    log_mgf = c.log_mgf - c.mass_error
    sure = np.maximum(c.divergence - c.deficit, 1e-300)
    good = np.flatnonzero(np.log(sure) + log_mgf - c.tilt * c.losses >= math.log(delta))
    if len(good) == 0:
        return 0.0
    k = min(int(good[-1]), len(c.divergence) - 2)
    return max(0.0, _crossing(c, k, delta, -c.deficit, log_mgf) - c.slack)


def _crossing(c: Composition, k: int, delta: float, error: float, log_mgf: float) -> float:
    """The ε in [s_k, s_{k+1}] where the divergence is δ less its error, or the nearer end."""
    s, survival, divergence = _ends(c, k, log_mgf)
    target = delta - error * _untilt(c, log_mgf, s - c.step)
    share = (target - divergence) / max(survival - divergence, 1e-300)
    if share >= -math.expm1(-c.step):
        return s - c.step
    return s + math.log1p(-max(share, 0.0))


def delta_above(c: Composition, epsilon: float) -> float:
    """A bound that the divergence at ε surely does not pass."""
    log_mgf = c.log_mgf + c.mass_error
    at = epsilon - c.slack
    finite = math.exp(min(0.0, log_mgf - c.tilt * at - conversion(c.tilt)))
    found = _divergence(c, at, c.excess, log_mgf)
    return min(1.0, (finite if found is None else min(finite, found)) + c.infinite)


def delta_below(c: Composition, epsilon: float) -> float:
    """A bound that the divergence at ε surely passes."""
    log_mgf = c.log_mgf - c.mass_error
    found = _divergence(c, max(epsilon + c.slack, c.start), -c.deficit, log_mgf)
    return 0.0 if found is None else max(0.0, found)


def _divergence(c: Composition, epsilon: float, error: float, log_mgf: float) -> float | None:
    """E[(1 − e^{ε − S})_+] and its error; P(S > u) is constant between lattice points."""
    place = (epsilon - c.start) / c.step
    if not 0 <= place < len(c.divergence) - 1:
        return None
    s, survival, divergence = _ends(c, int(place), log_mgf)
    found = divergence * math.exp(epsilon - s) - survival * math.expm1(epsilon - s)
    return found + error * _untilt(c, log_mgf, epsilon)


def _ends(c: Composition, k: int, log_mgf: float) -> tuple[float, float, float]:
    """s = s_{k+1}, P(S > s_k) and the divergence at s, without tilt."""
    s = c.start + c.step * (k + 1)
    survival = float(c.survival[k]) * _untilt(c, log_mgf, s - c.step)
    return s, survival, float(c.divergence[k + 1]) * _untilt(c, log_mgf, s)


def _untilt(c: Composition, log_mgf: float, loss: float) -> float:
    """e^{K − θ·loss}, or a number too large to matter."""
    return math.exp(min(log_mgf - c.tilt * loss, 700.0))
