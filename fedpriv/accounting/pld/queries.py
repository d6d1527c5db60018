"""Intervals of ε and δ by composition of privacy loss distributions (PLD).

Each pair of a multiset becomes two losses on a lattice, one at least and one at most as bad. They
are composed by a tilted fast Fourier transform, and every error is added on the safe side. The
result is that of the worse direction. Tilt, lattice and window come from a rough cumulant of the
loss: a poor choice makes the interval wider, never wrong.

A run prices the same pairs again and again, each time with more events. So plans for an ε are made
for numbers of events that are powers of two, and the losses of a pair on a lattice are cached. An
answer depends on pairs and δ, or ε, alone.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.special import log1p, logsumexp

from fedpriv.accounting import gaussian, round_counts
from fedpriv.accounting.contour.inversion import conversion
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
from fedpriv.accounting.pld.sampled_examples import PoissonPair
from fedpriv.accounting.round_counts import Direction, Ends, Vector

# Desired widths of intervals: of ε relative to the upper end, of ε in addition, of δ relatively.
_WIDTH, _LEAST_WIDTH, _DELTA_WIDTH = 1e-3, 1e-6, 0.05
# Attempts for a wide interval, the smallest factor of the precision of the next one, and the share
# of the last width above which further attempts are useless.
_TRIES, _FINEST, _PROGRESS = 6, 1 / 64, 0.8
_FAR = 5e-3  # a larger relative width of an interval of ε suggests a misplaced window
# Numbers of different pairs, each with a transform: up to the first they get several attempts, up
# to the second one attempt, and more are grouped.
_REFINED, _GROUPS = 16, 32
_ALLOCATION_GROUPS = 12  # groups of passes of random allocation, which take up to a second each
# The range of noise per sensitivity, and of sampling probabilities, for computations.
_LEAST_NOISE, _MOST_NOISE, _LEAST_PROBABILITY = 0.05, 1e6, 1e-12
_LEAST_POISSON_NOISE = 0.02
_NEGLIGIBLE = PoissonPair(_LEAST_PROBABILITY, _MOST_NOISE)
# Share of δ for losses that count as infinite, relative to ε times the steepness, and at most.
_TAIL, _MOST_TAIL = 1e-4, 1e-3
_TOLERANCE = 2e-4  # share of ε for the lattice of the upper bound
_CERTAINTY = 10.0  # minus the log of the share of δ that may wrap around the window
_LEAST_LOG_DELTA = math.log(1e-100)
_LARGEST_SIZE = 1 << 20
_LARGEST_STEP = 64.0  # of a lattice, which must resolve the losses of one round
_FILLED = 0.9  # share of the transform's points in the planned window
_GROWTH = 0.03  # spacing of far lattice points relative to their distance from the centre
_SHARES = (1.0, 0.5, 0.15)  # tilts to choose from, relative to that of the best Chernoff bound
_FAINTEST = 31.0  # minus the log of the smallest δ of one round under the tilt
_KEPT = 256  # plans in the cache, and losses on their lattices


def epsilon_interval(pairs: Pairs, delta: float) -> Ends:
    """Return an interval (low, up) of the least ε of all these losses together at δ ≥ 1e-60.

    For no event it is [0, 0]. For an event without noise it is [∞, ∞] by convention, even if a user
    is sampled so rarely that δ alone would cover it. If δ is at least the `exposure`, it is [0, 0].
    A loss of one event above 600 counts as infinite, so the upper end is ∞ unless δ covers that,
    and so does any loss for a noise multiplier below 0.02 (0.05 for other policies than Poisson;
    for examples, 0.05 times a user's average number in a cohort). The width is mostly at most
    up/1000 + 1e-6 for up to 16 different pairs.
    """
    z = _closed_form(pairs)
    if z is not None:
        return gaussian.epsilon_interval(delta, z)
    if exposure(pairs) <= delta:
        return 0.0, 0.0
    width, largest = (_WIDTH, _LEAST_WIDTH), _largest_added(pairs)
    ends_of = epsilon_below, epsilon_above
    low, up = _refined(pairs, delta, _aim_at_delta, ends_of, width, _power_of_two, largest)
    is_wide = max(_FAR * up, _LEAST_WIDTH) < up - low < math.inf
    if low == 0.0 or not is_wide:
        return low, up

    # For a large δ the Chernoff bound, and so the window, can be far above ε.
    def aim_at_low(counts: Pairs, _delta: float, direction: Direction) -> _Aim:
        return _aim_at_epsilon(counts, low, direction)

    second = _refined(pairs, delta, aim_at_low, ends_of, width, int, largest)
    return max(low, second[0]), min(up, second[1])


def delta_interval(pairs: Pairs, epsilon: float) -> Ends:
    """Return an interval (low, up) of the least δ of all these losses at a finite ε ≥ 0.

    For no event it is [0, 0], and for an event without noise [0, 1]. Upper ends do not go far below
    1e-100.
    """
    z = _closed_form(pairs)
    if z is not None:
        return gaussian.delta_interval(epsilon, z)
    ends_of, width = (delta_below, delta_above), (_DELTA_WIDTH, 0.0)
    largest = 0.0 if epsilon >= _largest_added(pairs) else 1.0
    low, up = _refined(pairs, epsilon, _aim_at_epsilon, ends_of, width, int, largest)
    return low, min(up, exposure(pairs))


def deltas_above(pairs: Pairs, epsilons: Sequence[float], near: Sequence[float]) -> Vector:
    """Return upper bounds of δ at each ε: [epsilons], tight where δ is between the deltas `near`.

    Every composition bounds δ at all ε; there is one for each delta of `near` and direction, with
    the plan of `epsilon_interval` at that δ.
    """
    z = _closed_form(pairs)
    if z is not None:
        return gaussian.deltas(np.array(epsilons), z * (1 - 4 * 2.0**-52))
    noisy, exposed = _split_by_noise(_few(pairs)[0])
    plan = tuple((pair, _power_of_two(n)) for pair, n in noisy.items())
    worse = np.zeros(len(epsilons))
    for direction in Direction:
        largest = _largest_added(pairs) if direction is Direction.ADD else math.inf
        ups = np.where(np.array(epsilons) < largest, exposure(pairs), 0.0)
        for delta in near if ups.any() else ():
            planned = _planned(plan, delta, _aim_at_delta, direction, 1.0)
            sums = _composed_above(noisy, exposed, *planned, direction)
            ups = np.minimum(ups, [delta_above(sums, epsilon) for epsilon in epsilons])
        worse = np.maximum(worse, ups)
    return worse


def exposure(pairs: Pairs) -> float:
    """Return a bound on the probability that a user takes part in any event; 1 without noise.

    If an event depends on a user with probability s, P = (1 − s)·R + s·A and Q = (1 − s)·R + s·B
    with a common R, so their total variation is at most s. That of adaptive events together is at
    most 1 − Π(1 − s) (coupling), and the divergence at any ε ≥ 0 is at most the total variation.
    """
    if any(pair.z == 0.0 or _share(pair) >= 1.0 for pair in pairs):
        return 1.0
    log_absent = math.fsum(count * math.log1p(-_share(pair)) for pair, count in pairs.items())
    return min(1.0, -math.expm1(log_absent) * (1.0 + 2.0**-30))


def noise_of_sampled(pairs: Pairs, tail: float) -> float:
    """Return the z of a Gaussian that dominates the events, except with a probability `tail`.

    By joint convexity it costs no less to reveal in which events the user takes part. Given these,
    the events are a Gaussian with 1/z² = Σ 1/zᵢ² (Dong, Roth & Su 2019, Section 3). With a bound t
    on the probability that 1/z² is larger than v, the divergence is at most that for v, plus t. A
    Chernoff bound, whose v is increased by a billionth for rounding, gives v.
    """
    z = np.array([p.z / (p.shift if isinstance(p, GaussianPair) else 1.0) for p in pairs])
    if z.min() < 1e-100:
        return 0.0
    share, count = np.array(list(map(_share, pairs))), np.array(list(pairs.values()), np.float64)
    square, weights = (z.min() / z) ** 2, np.geomspace(1e-6, 1e3, 100)
    growth = np.logaddexp(log1p(-share), np.log(share) + weights[:, None] * square)
    bound = float(((growth @ count - math.log(tail)) / weights).min(initial=float(square @ count)))
    return float(z.min()) / math.sqrt(bound * (1.0 + 1e-9))


def _share(pair: LossPair) -> float:
    """Return a bound on the probability that a user takes part in an event."""
    return min(1.0, pair.q * pair.shift) if isinstance(pair, GaussianPair) else 1.0


def _largest_added(pairs: Pairs) -> float:
    """Return an upper bound of the loss of all events when a user is added."""
    total = 0.0
    for pair, count in pairs.items():
        if not isinstance(pair, PoissonPair) or pair.q == 1.0:
            return math.inf
        total -= count * pair.examples * math.log1p(-pair.q)
    return total * (1.0 + 2.0**-30)


def _closed_form(pairs: Pairs) -> float | None:
    """Return the z of the Gaussian that the pairs form, if any; 0 if a pair has no noise."""
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
    most_added: float,
) -> Ends:
    """Return the worse of two directions, each the intersection of attempts.

    Attempts end at a width of width[0]·up + width[1]. `most_added` is an upper bound of the end in
    the direction in which a user is added.
    """
    worst, best = _few(pairs)
    noisy, exposed = _split_by_noise(worst)
    plan_below, plan_above = (
        tuple((pair, planned_for(n)) for pair, n in counts.items()) for counts in (best, noisy)
    )
    # For many pairs a fine lattice would be expensive, and useless for grouped ones.
    tries, precision = (_TRIES, 1.0) if len(pairs) <= _REFINED else (1, 4.0)
    low, up = dict.fromkeys(Direction, 0.0), {Direction.REMOVE: math.inf, Direction.ADD: most_added}
    for _ in range(tries):
        last_gap = max(up.values()) - max(low.values())
        for direction in Direction:
            if up[direction] <= max(low.values()):
                continue
            if best:
                window, lattice = _planned(plan_below, at, aim_at, direction, precision)
                items = [(_at_most_as_bad(pair, lattice, direction), n) for pair, n in best.items()]
                if parts := [(atoms, n) for atoms, n in items if atoms is not None]:
                    below = ends_of[0](compose_atoms(parts, window), at)
                    low[direction] = max(low[direction], below)
            planned = _planned(plan_above, at, aim_at, direction, precision)
            composition = _composed_above(noisy, exposed, *planned, direction)
            up[direction] = min(up[direction], ends_of[1](composition, at))
        gap, limit = max(up.values()) - max(low.values()), width[0] * max(up.values()) + width[1]
        if not limit < gap < min(math.inf, _PROGRESS * last_gap):
            break
        precision *= max(0.4 * limit / gap, _FINEST)
    if not max(low.values()) <= max(up.values()):
        raise AssertionError(f"the ends contradict each other: {low} > {up}")
    return max(low.values()), max(up.values())


def _composed_above(
    noisy: Pairs, exposed: float, window: FftWindow, lattice: Lattice, direction: Direction
) -> Composition:
    parts = [(_at_least_as_bad(pair, lattice, direction), n) for pair, n in noisy.items()]
    composition = compose_atoms(parts, window)
    return replace(composition, infinite=composition.infinite + exposed)


def _power_of_two(n: int) -> int:
    """Return the least power of two that is at least n ≥ 1."""
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
    """Return a loss that is at most as bad; None if there is no such law or it has no mass."""
    law = pair.at_most_as_bad(lattice.tail)
    atoms = None if law is None else dominated(law, lattice, direction)
    return atoms if atoms is not None and atoms.mass.any() else None


def _few(pairs: Pairs) -> tuple[Pairs, Pairs]:
    """Return pairs at least as bad, and pairs at most as bad, in few groups per kind, in range.

    The former may have a larger q and a smaller z, and may keep a z below the range. The latter may
    have a larger z, and omit pairs that would need another change.
    """
    kinds: dict[LossPair, Counter[tuple[float, float]]] = {}
    for pair, count in pairs.items():
        kinds.setdefault(pair.at(1.0, 1.0), Counter())[pair.q, pair.z] += count
    above, below = Counter[LossPair](), Counter[LossPair]()
    for kind, settings in kinds.items():
        rounds = round_counts.folded(settings) if isinstance(kind, GaussianPair) else settings
        limit = _ALLOCATION_GROUPS if isinstance(kind, AllocationPair) else _GROUPS
        groups = round_counts.grouped(rounds, limit)
        for bounds, settings_of in zip((above, below), groups, strict=True):
            for (q, z), count in settings_of.items():
                pair = kind.at(max(q, _LEAST_PROBABILITY), z)
                smallest, largest = _noise_range(pair)
                if bounds is above:
                    bounds[pair.at(pair.q, min(z, largest))] += count
                elif q >= _LEAST_PROBABILITY and z <= largest:
                    bounds[pair.at(pair.q, max(z, smallest))] += count
    return above, below


def _split_by_noise(pairs: Pairs) -> tuple[Pairs, float]:
    """Return the pairs with enough noise, and the `exposure` of the others.

    By joint convexity an event with the share s has H_ε(P‖Q) ≤ (1 − s)·(1 − e^ε)₊ + s at every real
    ε, in both directions and for any noise. That is the curve of a loss which is infinite with
    probability s, and otherwise 0. It dominates the event, and such losses compose to one that is
    infinite with probability 1 − Π(1 − s).
    """
    noisy = {pair: n for pair, n in pairs.items() if pair.z >= _noise_range(pair)[0]}
    others = {pair: n for pair, n in pairs.items() if pair not in noisy}
    return noisy or {_NEGLIGIBLE: 1}, exposure(others)


def _noise_range(pair: LossPair) -> tuple[float, float]:
    """Return the range of z for computations, relative to the expected number of drawn examples."""
    expected = max(1.0, pair.q * pair.shift if isinstance(pair, GaussianPair) else 1.0)
    of_users = isinstance(pair, PoissonPair) and pair.examples == 1
    least = _LEAST_POISSON_NOISE if of_users else _LEAST_NOISE
    return least * expected, _MOST_NOISE * expected


@dataclass(frozen=True)
class _Cumulant:
    """K(w) = Σ_pairs log E[e^{wL}] over the nodes of a sketch of each pair."""

    log_mass: Vector  # [pairs, nodes] log-probability of each node
    loss: Vector  # [pairs, nodes] loss of each node, with the sign of the direction
    middle: Vector  # [pairs, 1] a loss of outputs that reveal nearly nothing
    count: Vector  # [pairs] number of events of each pair

    def __call__(self, w: float) -> float:
        """Return K(w) for any real w."""
        exponent = self.log_mass + w * self.loss  # SciPy's logsumexp takes several times as long
        largest = exponent.max(axis=1, keepdims=True)
        return float(self.count @ (largest[:, 0] + np.log(np.exp(exponent - largest).sum(axis=1))))

    @property
    def largest(self) -> float:
        """The largest modulus of a loss."""
        return float(np.abs(self.loss).max())

    def tilted(self, w: float) -> Vector:
        """Return probabilities of the nodes under the tilt e^{wL}: [pairs, nodes]."""
        exponent = self.log_mass + w * self.loss
        return np.asarray(np.exp(exponent - logsumexp(exponent, axis=1, keepdims=True)))

    def stddev(self, w: float) -> float:
        """Return the standard deviation √K''(w) of the sum under the tilt."""
        weight = self.tilted(w)
        mean = (weight * self.loss).sum(axis=1, keepdims=True)
        variance = float(self.count @ (weight * (self.loss - mean) ** 2).sum(axis=1))
        return math.sqrt(max(variance, 1e-300))


class _Aim(NamedTuple):
    """An approximate answer: ε, log δ, and −d log δ/dε."""

    epsilon: float
    log_delta: float
    steepness: float


def _cumulant(pairs: Pairs, tail: float, direction: Direction, share: float = 1.0) -> _Cumulant:
    """Return the cumulant without losses rarer than `tail`; laws may cut off a share of it."""
    sketches = [pair.at_least_as_bad(share * tail).sketch(tail) for pair in pairs]
    shape = len(sketches), max(len(sketch.loss) for sketch in sketches)
    log_mass, loss = np.full(shape, -np.inf), np.zeros(shape)
    for row, sketch in enumerate(sketches):
        mass = sketch.log_q + sketch.loss if direction is Direction.REMOVE else sketch.log_q
        log_mass[row, : len(mass)] = mass - logsumexp(mass)
        loss[row, : len(mass)] = direction * sketch.loss
    middle = np.array([[direction * sketch.middle] for sketch in sketches])
    return _Cumulant(log_mass, loss, middle, np.array(list(pairs.values()), dtype=np.float64))


def _without_rare(pairs: Pairs, log_delta: float, direction: Direction) -> _Cumulant:
    """Return the cumulant without losses rarer than δ/2 in all rounds, for Chernoff bounds."""
    rare = math.exp(log_delta) / (2 * sum(pairs.values()))
    return _cumulant(pairs, rare, direction, 2 * _MOST_TAIL)  # mostly the laws of the lattice


def _aim_at_delta(pairs: Pairs, delta: float, direction: Direction) -> _Aim:
    """Return the approximate ε at δ."""
    k = _without_rare(pairs, math.log(delta), direction)
    orders = _orders(k)
    bounds = [(k(w) - math.log(delta) - conversion(w)) / w for w in orders]
    best = int(np.argmin(bounds))
    return _Aim(bounds[best], math.log(delta), orders[best])


def _aim_at_epsilon(pairs: Pairs, epsilon: float, direction: Direction) -> _Aim:
    """Return the approximate δ at ε, at least 1e-100."""
    low, high, aim = _LEAST_LOG_DELTA, 0.0, _Aim(epsilon, 0.0, 1.0)
    for _ in range(9):
        middle = (low + high) / 2
        aim = _chernoff(_without_rare(pairs, middle, direction), epsilon, _LEAST_LOG_DELTA)
        low, high = (middle, high) if aim.log_delta > middle else (low, middle)
    return aim


def _chernoff(k: _Cumulant, epsilon: float, least: float) -> _Aim:
    """Return the lowest Chernoff bound of log δ(ε), at least `least`, with its smallest tilt."""
    orders = _orders(k)
    bounds = [max(k(w) - w * epsilon - conversion(w), least) for w in orders]
    best = int(np.argmin(bounds))
    return _Aim(epsilon, min(bounds[best], 0.0), orders[best])


def _resolved(
    pairs: Pairs, aim: _Aim, direction: Direction, precision: float
) -> tuple[FftWindow, Lattice]:
    """Return a window and a lattice for an error of about `precision` thousandths of ε.

    Half of the best tilt, or less, makes rare large losses so much rarer that the window is often
    ten times as narrow; the rounding error is still far below δ.
    """
    step = _step(_without_rare(pairs, aim.log_delta, direction), aim, precision)
    rounds = sum(pairs.values())
    # A share x of δ moves ε by about x/steepness.
    share = min(_TAIL * precision * max(1.0, aim.steepness * aim.epsilon), _MOST_TAIL)
    tail = share * math.exp(aim.log_delta) / rounds
    k = _cumulant(pairs, tail, direction)
    best = _chernoff(k, aim.epsilon, min(aim.log_delta, _LEAST_LOG_DELTA)).steepness
    certainty = _CERTAINTY - math.log(precision)
    faintest = certainty + _FAINTEST - math.log(rounds)
    windows = [_window(k, aim, share * best, certainty) for share in _SHARES]
    windows = [window for window in windows if window.step > 0] or [replace(windows[0], step=step)]
    usable = [window for window in windows if window.depth < faintest] or windows[:1]
    window = min(usable, key=lambda window: window.step)
    size = 2 ** math.ceil(math.log2(min(_LARGEST_SIZE, max(1.0, window.step / step) / _FILLED)))
    window = replace(window, step=min(window.step / (_FILLED * size), _LARGEST_STEP))
    spread = math.sqrt(precision)
    widest = max(1.0, 0.1 * spread / ((1 + aim.steepness) * window.step))
    return window, Lattice(window.step, widest, _GROWTH * spread, tail)


def _window(k: _Cumulant, aim: _Aim, tilt: float, certainty: float) -> FftWindow:
    """Return the window under this tilt; its step is its whole width."""
    at, spread = k(tilt), k.stddev(tilt)
    depth = certainty - min(0.0, aim.log_delta + tilt * aim.epsilon - at)
    etas = [float(u) / spread for u in np.geomspace(1e-3, 1e2, 17)]
    start, left = max(((at - k(tilt - eta) - depth) / eta, eta) for eta in etas)
    stop, right = min(((k(tilt + eta) - at + depth) / eta, eta) for eta in etas)
    return FftWindow(stop - start, tilt, left, right, depth, certainty)


def _step(k: _Cumulant, aim: _Aim, precision: float) -> float:
    """Return roughly the largest step whose cost to the upper bound is within the tolerance.

    A loss at the distance u from a lattice point is spread to its neighbours, which adds the
    variance u·(h − u), h²/6 on average, or u·h near the centre, which is a lattice point. A
    variance A adds about (θ + 1)·A/2 to ε.
    """
    spread = k.stddev(aim.steepness)
    weight = k.count[:, None] * k.tilted(aim.steepness)
    distance = np.abs(k.loss - k.middle)
    budget = _TOLERANCE * precision * max(aim.epsilon, 0.1 * spread) * 2 / (1 + aim.steepness)

    def fits(step: float) -> bool:
        variance = np.where(distance < step, distance * (step - distance), step**2 / 6)
        return float((weight * variance).sum()) <= budget

    high = math.log(min(k.largest / 4, max(0.02 * aim.epsilon, 0.1 * spread)))
    low = high - 14.0
    if fits(math.exp(high)):
        return math.exp(high)
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(math.exp(middle)) else (low, middle)
    return math.exp(low)


def _orders(k: _Cumulant) -> list[float]:
    """Return tilts from where no loss matters to far above the best tilt for a normal loss."""
    normal = 5.0 / k.stddev(0.0)
    low = min(math.exp(-6.0) * normal, 0.05 / k.largest)
    high = math.exp(6.0) * normal
    return [float(w) for w in np.geomspace(low, high, math.ceil(4 * math.log(high / low)))]


def epsilon_above(c: Composition, delta: float) -> float:
    """Return an ε ≥ 0 at which the divergence is surely at most δ."""
    finite = delta - c.infinite
    if finite <= 0:
        return math.inf
    log_mgf = c.log_mgf + c.mass_error
    epsilon = (log_mgf - math.log(finite) - conversion(c.tilt)) / c.tilt
    log_bound = np.log(np.maximum(c.divergence, 0.0) + c.excess) + log_mgf - c.tilt * c.losses
    points = np.flatnonzero(log_bound <= math.log(finite))
    if len(points) > 0:
        k = max(int(points[0]) - 1, 0)
        epsilon = min(epsilon, _crossing(c, k, finite, c.excess, log_mgf))
    return max(0.0, epsilon + c.slack)


def epsilon_below(c: Composition, delta: float) -> float:
    """Return an ε ≥ 0 at which the divergence is surely at least δ, or 0."""
    log_mgf = c.log_mgf - c.mass_error
    bound = np.maximum(c.divergence - c.deficit, 1e-300)
    points = np.flatnonzero(np.log(bound) + log_mgf - c.tilt * c.losses >= math.log(delta))
    if len(points) == 0:
        return 0.0
    k = min(int(points[-1]), len(c.divergence) - 2)
    return max(0.0, _crossing(c, k, delta, -c.deficit, log_mgf) - c.slack)


def _crossing(c: Composition, k: int, delta: float, error: float, log_mgf: float) -> float:
    """Return the ε in [s_k, s_{k+1}] at which divergence + error is δ, or the nearer end."""
    s, survival, divergence = _ends(c, k, log_mgf)
    target = delta - error * _untilt(c, log_mgf, s - c.step)
    share = (target - divergence) / max(survival - divergence, 1e-300)
    if share >= -math.expm1(-c.step):
        return s - c.step
    return s + math.log1p(-max(share, 0.0))


def delta_above(c: Composition, epsilon: float) -> float:
    """Return an upper bound of the divergence at ε."""
    log_mgf = c.log_mgf + c.mass_error
    at = epsilon - c.slack
    chernoff = math.exp(min(0.0, log_mgf - c.tilt * at - conversion(c.tilt)))
    divergence = _divergence(c, at, c.excess, log_mgf)
    finite = chernoff if divergence is None else min(chernoff, divergence)
    return min(1.0, finite + c.infinite)


def delta_below(c: Composition, epsilon: float) -> float:
    """Return a lower bound of the divergence at ε."""
    log_mgf = c.log_mgf - c.mass_error
    divergence = _divergence(c, max(epsilon + c.slack, c.start), -c.deficit, log_mgf)
    return 0.0 if divergence is None else max(0.0, divergence)


def _divergence(c: Composition, epsilon: float, error: float, log_mgf: float) -> float | None:
    """Return E[(1 − e^{ε − S})_+] plus its error, None for ε outside the lattice.

    P(S > u) is constant between lattice points.
    """
    place = (epsilon - c.start) / c.step
    if not 0 <= place < len(c.divergence) - 1:
        return None
    s, survival, at_s = _ends(c, int(place), log_mgf)
    divergence = at_s * math.exp(epsilon - s) - survival * math.expm1(epsilon - s)
    return divergence + error * _untilt(c, log_mgf, epsilon)


def _ends(c: Composition, k: int, log_mgf: float) -> tuple[float, float, float]:
    """Return s = s_{k+1}, P(S > s_k) and the divergence at s, without tilt."""
    s = c.start + c.step * (k + 1)
    survival = float(c.survival[k]) * _untilt(c, log_mgf, s - c.step)
    return s, survival, float(c.divergence[k + 1]) * _untilt(c, log_mgf, s)


def _untilt(c: Composition, log_mgf: float, loss: float) -> float:
    """Return e^{K − θ·loss}, limited to e^700."""
    return math.exp(min(log_mgf - c.tilt * loss, 700.0))
