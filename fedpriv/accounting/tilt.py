"""Where to look for ε or δ: tilt, lattice and window, from a quick cumulant of the loss.

Nothing here has to be exact. A poor choice makes the certified interval wider, never wrong.
"""

import math
from dataclasses import dataclass

import numpy as np

from fedpriv.accounting.fft import Window
from fedpriv.accounting.lattice import Lattice
from fedpriv.accounting.loss import Direction, Rounds, Vector, privacy_loss, sample_range

_NODES = 256
_TAIL = 1e-5
"""Share of δ that may come from losses that are taken to be infinite."""
_TOLERANCE = 2e-4
"""Share of ε that the lattice of the upper bound may cost."""
_CERTAINTY = 14.0
"""Minus the logarithm of the share of δ that may wrap around the window."""
_LEAST_LOG_DELTA = math.log(1e-100)
_LARGEST_SIZE = 1 << 20


@dataclass(frozen=True)
class Cumulant:
    """K(w) = Σ_rounds log E[e^{wL}] by the trapezoidal rule, over losses cut off at `tail`.

    Attributes:
        log_mass: [pairs, nodes] log-probability of each node.
        loss: [pairs, nodes] loss of each node, with the sign of the direction.
        centre: [pairs, 1] loss in the middle of the noise.
        count: [pairs] rounds of each (q, z).
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
        return math.sqrt(float(self.count @ (weight * (self.loss - mean) ** 2).sum(axis=1)))


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


def cumulant(rounds: Rounds, tail: float, direction: Direction) -> Cumulant:
    """The cumulant of these rounds, seen from one direction."""
    log_mass, loss, centre = [], [], []
    for q, z in rounds:
        x = np.linspace(*sample_range(q, z, tail), _NODES)
        removed = privacy_loss(x, q, z)
        density = -(x**2) / (2 * z**2) + (removed if direction is Direction.REMOVE else 0.0)
        peak = density.max()
        log_mass.append(density - peak - math.log(np.exp(density - peak).sum()))
        loss.append(direction * removed)
        centre.append(direction * privacy_loss(np.zeros(1), q, z))
    count = np.array(list(rounds.values()), dtype=np.float64)
    return Cumulant(np.array(log_mass), np.array(loss), np.array(centre), count)


def aim_at_delta(rounds: Rounds, delta: float, direction: Direction) -> Aim:
    """Aim at the ε that belongs to δ."""
    k = cumulant(rounds, _common(math.log(delta), rounds), direction)
    orders = _orders(k)
    bounds = [(k(w) - math.log(delta) - conversion(w)) / w for w in orders]
    best = int(np.argmin(bounds))
    return Aim(bounds[best], math.log(delta), orders[best])


def aim_at_epsilon(rounds: Rounds, epsilon: float, direction: Direction) -> Aim:
    """Aim at the δ that belongs to ε; δ below 1e-100 is not told from 1e-100."""
    low, high, aim = _LEAST_LOG_DELTA, 0.0, Aim(epsilon, 0.0, 1.0)
    for _ in range(9):
        middle = (low + high) / 2
        k = cumulant(rounds, _common(middle, rounds), direction)
        bound, order = _chernoff(k, epsilon, _LEAST_LOG_DELTA)
        aim = Aim(epsilon, bound, order)
        low, high = (middle, high) if bound > middle else (low, middle)
    return aim


def resolve(rounds: Rounds, aim: Aim, direction: Direction) -> tuple[Window, Lattice]:
    """Window and lattice that answer the question within about a thousandth of ε."""
    step = _step(cumulant(rounds, _common(aim.log_delta, rounds), direction), aim)
    tail = _TAIL * math.exp(aim.log_delta) / sum(rounds.values())
    k = cumulant(rounds, tail, direction)
    _, theta = _chernoff(k, aim.epsilon, min(aim.log_delta, _LEAST_LOG_DELTA))
    at, spread = k(theta), k.stddev(theta)
    log_scale = min(0.0, aim.log_delta + theta * aim.epsilon - at)
    depth = _CERTAINTY - log_scale
    etas = [float(u) / spread for u in np.geomspace(1e-3, 1e2, 41)]
    start, left = max(((at - k(theta - eta) - depth) / eta, eta) for eta in etas)
    stop, right = min(((k(theta + eta) - at + depth) / eta, eta) for eta in etas)
    step = max(step, (stop - start) / _LARGEST_SIZE)
    window = Window(step, theta, left, right, depth, _CERTAINTY)
    return window, Lattice(step, max(1.0, 0.1 / ((1 + aim.steepness) * step)), tail)


def _common(log_delta: float, rounds: Rounds) -> float:
    """Tail that leaves out losses which all rounds together show with probability below δ/2.

    A single rare loss can be so large that it spoils any Chernoff bound; left out it shows how
    large the common ones are together.
    """
    return math.exp(log_delta) / (2 * sum(rounds.values()))


def _chernoff(k: Cumulant, epsilon: float, least: float) -> tuple[float, float]:
    """Lowest bound on log δ(ε), but at least `least`, and the smallest tilt that gives it."""
    orders = _orders(k)
    bounds = [max(k(w) - w * epsilon - conversion(w), least) for w in orders]
    best = int(np.argmin(bounds))
    return min(bounds[best], 0.0), orders[best]


def _step(k: Cumulant, aim: Aim) -> float:
    """Largest step whose cost to the upper bound is within the tolerance.

    Spreading a loss u above a lattice point to both neighbours adds the variance u·(h − u), h²/6 on
    average, or u·h near the centre, which is a lattice point; a variance A adds about (θ + 1)·A/2
    to ε.
    """
    spread = k.stddev(aim.steepness)
    weight = k.count[:, None] * k.tilted(aim.steepness)
    distance = np.abs(k.loss - k.centre)
    budget = _TOLERANCE * max(aim.epsilon, 0.1 * spread) * 2 / (1 + aim.steepness)
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
