"""Sums of likelihood ratios of Gaussian rounds, once too spread out and once too narrow.

Let R = r₁ + … + r_n with r = exp((x − 1/2)/z²) and independent x ~ N(0, z²): the likelihood ratio
of N(1, z²) against N(0, z²) under the latter, so E[r] = 1. For a convex function f, E[f(R)] grows
when R grows in the convex order, that is when mass moves apart and keeps its mean, and shrinks when
parts of it are merged into their means (Shaked & Shanthikumar 2007, Section 3.A). Sums of
independent variables keep the order (Theorem 3.A.12). So `spread` and `merge` put R on few points
again after every addition, without losing sight of what is above and what is below it. Both errors
are second order in the distance of the points.

Nothing is subtracted, so the smallest masses are right, too. What rounding does is bounded: an
addition adds at most u·(2c + 16) to both errors of a sum, where u = 2⁻⁵³ and c is the largest
number of terms that one cell has. Terms of a cell that are off by as much only move its mean.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fedpriv.accounting.loss import cells
from fedpriv.accounting.rounds import Vector

_ULP = 2.0**-53
_PAIRS_AT_ONCE = 1 << 17
_MASS_ERROR, _VALUE_ERROR = 1e-12, 3e-12
"""Relative errors of the cells of one round, and of their means."""


@dataclass(frozen=True)
class RatioSum:
    """A variable that is close to the sum of the ratios of some rounds.

    There is a variable above R in the convex order (`spread`), or below (`merge`), whose quotient
    with this one is within e^{±value_error}, while the masses are within e^{±mass_error}.

    Attributes:
        rounds: the number of rounds n.
        value: [points] increasing values ≥ 0.
        mass: [points] their probabilities under N(0, z²).
        infinite: part of the mean that is at infinite values: n times a probability under P.
        value_error, mass_error: as above.
    """

    rounds: int
    value: Vector
    mass: Vector
    infinite: float
    value_error: float
    mass_error: float


@dataclass(frozen=True)
class Binned:
    """A distribution on [0, ∞), known by its cells between increasing edges and above the last.

    Attributes:
        edge: [cells] the lower end of each cell; the first is 0.
        mass: [cells] probabilities.
        excess: [cells] Σ mass·(value − edge) ≥ 0 over each cell.
    """

    edge: Vector
    mass: Vector
    excess: Vector


Shape = Callable[[Binned], tuple[Vector, Vector, float]]
"""Values, masses and the infinite part of the mean that stand for cells: `spread` or `merge`."""


def spread(binned: Binned) -> tuple[Vector, Vector, float]:
    """The cells' masses moved to their ends, which is above them in the convex order.

    What is above the last edge moves to it and to infinity.
    """
    moved = np.minimum(binned.excess[:-1] / np.diff(binned.edge), binned.mass[:-1])
    mass = binned.mass.copy()
    mass[1:] += moved
    mass[:-1] -= moved
    return binned.edge, mass, float(binned.excess[-1])


def merge(binned: Binned) -> tuple[Vector, Vector, float]:
    """The cells' masses moved to their means, which is below them in the convex order."""
    some = binned.mass > 0
    mass = binned.mass[some]
    return binned.edge[some] + binned.excess[some] / mass, mass, 0.0


def one_round(z: float, log_edges: Vector, shape: Shape) -> RatioSum:
    """The ratio of one round.

    Args:
        z: noise multiplier in [0.05, 1e6].
        log_edges: [edges] increasing logarithms of the edges above 0, within ±500.
        shape: `spread` or `merge`.
    """
    log_edges, edge = _distinct(log_edges)
    x = np.concatenate([[-np.inf], z**2 * log_edges + 0.5, [np.inf]])
    absent, present = cells(x, 0.0, z), cells(x, 1.0, z)
    binned = Binned(edge, absent, np.maximum(present - edge * absent, 0.0))
    value, mass, infinite = shape(binned)
    return RatioSum(1, value, mass, infinite, _VALUE_ERROR, _MASS_ERROR)


def add(first: RatioSum, second: RatioSum, log_edges: Vector, shape: Shape) -> RatioSum:
    """The sum of two independent ones, of further rounds.

    Args:
        first: one summand.
        second: the other; if it is the same object, half of the work is enough.
        log_edges: [edges] increasing logarithms of the edges above 0.
        shape: what both were made with.
    """
    _, edge = _distinct(log_edges)
    size = len(edge)
    mass, excess, terms = np.zeros(size), np.zeros(size), np.zeros(size, np.int64)
    rows = max(1, _PAIRS_AT_ONCE // len(second.value))
    for start in range(0, len(first.value), rows):
        here = slice(start, start + rows)
        values, weights = second.value, second.mass
        if first is second:
            values, weights = values[start:], weights[start:].copy()
            weights[rows:] *= 2  # what is left of this block of rows is its mirror image
        value = (first.value[here, None] + values).ravel()
        weight = (first.mass[here, None] * weights).ravel()
        cell = np.searchsorted(edge, value, side="right") - 1
        mass += np.bincount(cell, weight, size)
        excess += np.bincount(cell, weight * (value - edge[cell]), size)
        terms += np.bincount(cell, minlength=size)
    value, mass, infinite = shape(Binned(edge, mass, excess))
    rounding = _ULP * (2 * float(terms.max()) + 16)
    return RatioSum(
        first.rounds + second.rounds,
        value,
        mass,
        first.infinite + second.infinite + infinite,
        max(first.value_error, second.value_error) + rounding,
        first.mass_error + second.mass_error + rounding,
    )


def _distinct(log_edges: Vector) -> tuple[Vector, Vector]:
    """Logarithms of edges that rounding leaves apart, and 0 and these edges."""
    edge, first = np.unique(np.exp(log_edges), return_index=True)
    return log_edges[first], np.concatenate([[0.0], edge])
