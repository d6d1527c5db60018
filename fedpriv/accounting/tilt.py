"""Where to look for ε or δ: tilt, lattice and window, from a quick cumulant of the loss.

Nothing here has to be exact. A poor choice makes the certified interval wider, never wrong.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from fedpriv.accounting.fft import Window
from fedpriv.accounting.lattice import Lattice
from fedpriv.accounting.pair import Pairs
from fedpriv.accounting.rounds import Direction, Vector

_TAIL = 1e-4
"""Share of δ that may come from losses that are taken to be infinite."""
_TOLERANCE = 2e-4
"""Share of ε that the lattice of the upper bound may cost."""
_CERTAINTY = 10.0
"""Minus the logarithm of the share of δ that may wrap around the window."""
_LEAST_LOG_DELTA = math.log(1e-100)
_LARGEST_SIZE = 1 << 20
_FILLED = 0.9
"""Share of the transform's points that the planned window takes; the rest is for its roughness."""
_GROWTH = 0.03
"""Spacing of far lattice points relative to their distance from the centre."""
_SHARES = (1.0, 0.5, 0.15)
"""Tilts to choose from, relative to the one that gives the best Chernoff bound."""
_LEAST_VARIANCE = 1e-300
"""Instead of 0, which nothing can be measured in."""
_FAINTEST = 31.0
"""Minus the logarithm of how small, for one round, δ may be under the tilt against rounding."""


@dataclass(frozen=True)
class Cumulant:
    """K(w) = Σ_pairs log E[e^{wL}] by the trapezoidal rule, over losses cut off at `tail`.

    Attributes:
        log_mass: [pairs, nodes] log-probability of each node.
        loss: [pairs, nodes] loss of each node, with the sign of the direction.
        centre: [pairs, 1] loss in the middle of the noise.
        count: [pairs] events of each pair.
    """

    log_mass: Vector
    loss: Vector
    centre: Vector
    count: Vector

    def __call__(self, w: float) -> float:
        """K(w) for any real w."""
        exponent = self.log_mass + w * self.loss
        largest = exponent.max(axis=1)
        sums = np.exp(exponent - largest[:, None]).sum(axis=1)
        return float(self.count @ (largest + np.log(sums)))

    def tilted(self, w: float) -> Vector:
        """[pairs, nodes] probabilities of the nodes under the tilt e^{wL}."""
        exponent = self.log_mass + w * self.loss
        weight = np.exp(exponent - exponent.max(axis=1, keepdims=True))
        return np.asarray(weight / weight.sum(axis=1, keepdims=True))

    def stddev(self, w: float) -> float:
        """Standard deviation √K''(w) of the sum under the tilt."""
        weight = self.tilted(w)
        mean = (weight * self.loss).sum(axis=1, keepdims=True)
        variance = float(self.count @ (weight * (self.loss - mean) ** 2).sum(axis=1))
        return math.sqrt(max(variance, _LEAST_VARIANCE))


@dataclass(frozen=True)
class Aim:
    """What is looked for, roughly.

    Attributes:
        epsilon: ε, and log_delta: log δ; one is given and the other a Chernoff bound.
        steepness: about −d log δ / dε.
    """

    epsilon: float
    log_delta: float
    steepness: float


def cumulant(pairs: Pairs, tail: float, direction: Direction) -> Cumulant:
    """The cumulant of these events, seen from one direction."""
    sketches = [pair.sketch(tail, direction) for pair in pairs]
    most = max(len(each.loss) for each in sketches)
    log_mass = np.full((len(sketches), most), -np.inf)
    loss = np.zeros((len(sketches), most))
    for row, each in enumerate(sketches):
        log_mass[row, : len(each.loss)] = each.log_mass
        loss[row, : len(each.loss)] = each.loss
    centre = np.array([[each.centre] for each in sketches])
    count = np.array(list(pairs.values()), dtype=np.float64)
    return Cumulant(log_mass, loss, centre, count)


def aim_at_delta(pairs: Pairs, delta: float, direction: Direction) -> Aim:
    """Aim at the ε that belongs to δ."""
    k = cumulant(pairs, _common(math.log(delta), pairs), direction)
    orders = _orders(k)
    bounds = [(k(w) - math.log(delta) - conversion(w)) / w for w in orders]
    best = int(np.argmin(bounds))
    return Aim(bounds[best], math.log(delta), orders[best])


def aim_at_epsilon(pairs: Pairs, epsilon: float, direction: Direction) -> Aim:
    """Aim at the δ that belongs to ε; δ below 1e-100 is not told from 1e-100."""
    low, high, aim = _LEAST_LOG_DELTA, 0.0, Aim(epsilon, 0.0, 1.0)
    for _ in range(9):
        middle = (low + high) / 2
        k = cumulant(pairs, _common(middle, pairs), direction)
        bound, order = _chernoff(k, epsilon, _LEAST_LOG_DELTA)
        aim = Aim(epsilon, bound, order)
        low, high = (middle, high) if bound > middle else (low, middle)
    return aim


def resolve(
    pairs: Pairs, aim: Aim, direction: Direction, precision: float
) -> tuple[Window, Lattice]:
    """Window and lattice that answer the question within about `precision` thousandths of ε.

    Half of the best tilt, or less, makes rare large losses so much rarer in the window that it is
    often ten times as narrow; what rounding then costs is still far below δ.
    """
    step = _step(cumulant(pairs, _common(aim.log_delta, pairs), direction), aim, precision)
    tail = _TAIL * precision * math.exp(aim.log_delta) / sum(pairs.values())
    k = cumulant(pairs, tail, direction)
    _, best = _chernoff(k, aim.epsilon, min(aim.log_delta, _LEAST_LOG_DELTA))
    certainty = _CERTAINTY - math.log(precision)
    faintest = certainty + _FAINTEST - math.log(sum(pairs.values()))
    windows = [_window(k, aim, share * best, certainty) for share in _SHARES]
    usable = [each for each in windows if each[1].depth < faintest] or windows[:1]
    width, window = min(usable, key=lambda each: each[0])
    size = 2 ** math.ceil(math.log2(min(_LARGEST_SIZE, max(1.0, width / step) / _FILLED)))
    window = replace(window, step=width / (_FILLED * size))
    spread = math.sqrt(precision)
    widest = max(1.0, 0.1 * spread / ((1 + aim.steepness) * window.step))
    return window, Lattice(window.step, widest, _GROWTH * spread, tail)


def _window(k: Cumulant, aim: Aim, tilt: float, certainty: float) -> tuple[float, Window]:
    """Width of the window under this tilt, and the window, but for its step."""
    at, spread = k(tilt), k.stddev(tilt)
    depth = certainty - min(0.0, aim.log_delta + tilt * aim.epsilon - at)
    etas = [float(u) / spread for u in np.geomspace(1e-3, 1e2, 17)]
    start, left = max(((at - k(tilt - eta) - depth) / eta, eta) for eta in etas)
    stop, right = min(((k(tilt + eta) - at + depth) / eta, eta) for eta in etas)
    return stop - start, Window(1.0, tilt, left, right, depth, certainty)


def _common(log_delta: float, pairs: Pairs) -> float:
    """Tail that leaves out losses which all rounds together show with probability below δ/2.

    A single rare loss can be so large that it spoils any Chernoff bound; left out it shows how
    large the common ones are together.
    """
    return math.exp(log_delta) / (2 * sum(pairs.values()))


def _chernoff(k: Cumulant, epsilon: float, least: float) -> tuple[float, float]:
    """Lowest bound on log δ(ε), but at least `least`, and the smallest tilt that gives it."""
    orders = _orders(k)
    bounds = [max(k(w) - w * epsilon - conversion(w), least) for w in orders]
    best = int(np.argmin(bounds))
    return min(bounds[best], 0.0), orders[best]


def _step(k: Cumulant, aim: Aim, precision: float) -> float:
    """Largest step whose cost to the upper bound is within the tolerance.

    Spreading a loss u above a lattice point to both neighbours adds the variance u·(h − u), h²/6 on
    average, or u·h near the centre, which is a lattice point; a variance A adds about (θ + 1)·A/2
    to ε.
    """
    spread = k.stddev(aim.steepness)
    weight = k.count[:, None] * k.tilted(aim.steepness)
    distance = np.abs(k.loss - k.centre)
    budget = _TOLERANCE * precision * max(aim.epsilon, 0.1 * spread) * 2 / (1 + aim.steepness)
    largest = float(np.abs(k.loss).max()) / 4
    high = math.log(min(largest, max(0.02 * aim.epsilon, 0.1 * spread)))
    low = high - 14.0
    if _added_variance(weight, distance, math.exp(high)) <= budget:
        return math.exp(high)
    for _ in range(12):
        middle = (low + high) / 2
        if _added_variance(weight, distance, math.exp(middle)) <= budget:
            low = middle
        else:
            high = middle
    return math.exp(low)


def _added_variance(weight: Vector, distance: Vector, step: float) -> float:
    """Variance that a lattice of this step adds to the sum under the tilt."""
    near = distance < step
    return float((weight * np.where(near, distance * (step - distance), step**2 / 6)).sum())


def _orders(k: Cumulant) -> list[float]:
    """Tilts from where the largest loss hardly counts to far beyond the best for a normal loss."""
    usual = 5.0 / k.stddev(0.0)
    low = min(math.exp(-6.0) * usual, 0.05 / float(np.abs(k.loss).max()))
    high = math.exp(6.0) * usual
    return [float(w) for w in np.geomspace(low, high, math.ceil(4 * math.log(high / low)))]


def conversion(w: float) -> float:
    """c(w) in δ ≤ exp(K(w) − w·ε − c(w)) (Canonne, Kamath & Steinke 2020, Proposition 12)."""
    return math.log1p(w) + w * math.log1p(1 / w)
