"""Which ε should be right when ratios are added, and how much each addition may cost there."""

import math
from dataclasses import dataclass

import numpy as np

from fedpriv.accounting.ratio import RatioSum
from fedpriv.accounting.rounds import Vector

_TOLERANCE, _DEEP_TOLERANCE = 3e-4, 1e-2
"""Share of ε that all additions may cost: for usual δ, and for those below `_DEEP`."""
_DEEP = 1e-12
_DECADES, _APART = 1.7, 0.2
"""Largest distances of the ε that should be right: in the decimal log of δ, relative to ε."""
_LARGEST_DELTA = 0.9
_LEAST_COST = 1.0
"""How much log δ is taken to fall up to an ε at least; δ near 1 falls slowly."""
_GRID = 300


@dataclass(frozen=True)
class Target:
    """One ε at which δ should be right.

    Attributes:
        threshold: R/n at this ε: e^ε where a user is removed, e^{−ε} where one is added.
        sign: 1 where larger sums are worse, −1 where smaller ones are.
        delta: δ.
        steepness: −d log δ/dε.
        cost: how much log δ may rise.
    """

    threshold: float
    sign: int
    delta: float
    steepness: float
    cost: float


def targets_of(ratios: RatioSum, tail: float, additions: int) -> list[Target]:
    """Targets from the standard deviation of log R to where δ is √tail, by threshold.

    Args:
        ratios: all n rounds, roughly.
        tail: probability of losses that are cut off.
        additions: how many additions share what may be lost.
    """
    x, mass = ratios.value / ratios.rounds, ratios.mass / ratios.mass.sum()
    log_x = np.log(x)
    deviation = math.sqrt(float(mass @ np.square(log_x - mass @ log_x)))
    levels = 10.0 ** -np.arange(1.0, -math.log10(tail) / 2 + _DECADES, _DECADES)
    found = []
    for sign in (1, -1):
        largest = max(float(np.max(sign * log_x)), deviation)
        epsilon = largest * np.linspace(0.0, 1.0, _GRID)[:-1] ** 2
        threshold = np.exp(sign * epsilon)
        delta, slope = _curve(x, mass, sign, threshold)
        growth = np.exp(np.arange(0.0, math.log(largest / deviation), _APART))
        at = {1, *np.searchsorted(epsilon, deviation * growth).tolist()}
        at |= {int((delta > level).sum()) for level in levels if level < delta[0]}
        for i in at:
            if i < len(delta) and levels[-1] < delta[i] < _LARGEST_DELTA:
                share = (_TOLERANCE if delta[i] > _DEEP else _DEEP_TOLERANCE) / additions
                steepness = float(slope[i] / delta[i])
                size = max(float(epsilon[i]), deviation)
                cost = share * max(steepness * size, _LEAST_COST)
                found.append(Target(float(threshold[i]), sign, float(delta[i]), steepness, cost))
    return sorted(found, key=lambda target: target.threshold)


def _curve(x: Vector, mass: Vector, sign: int, threshold: Vector) -> tuple[Vector, Vector]:
    """δ and −dδ/dε: of E[(X − e^ε)₊] with the threshold e^ε, or of E[(1 − e^ε·X)₊] with e^{−ε}."""
    gain = np.maximum(sign * (x - threshold[:, None]), 0.0)
    if sign > 0:
        return gain @ mass, threshold * ((gain > 0) @ mass)
    return gain @ mass / threshold, ((gain > 0) @ (mass * x)) / threshold
