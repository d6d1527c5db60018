"""Gauss–Legendre quadrature of many nodes, to nearly all digits of a float."""

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.loss import Vector

_Floats = NDArray[np.float64 | np.longdouble]


@cache
def gauss_legendre(nodes: int) -> tuple[Vector, Vector]:
    """Nodes on [−1, 1] and the logarithms of their weights.

    Roots of the Legendre polynomial P between 0 and 1, the others by symmetry: a first guess, two
    steps in double precision, one in the widest floating-point type; weights are
    2/((1 − x²)·P′(x)²). Routines in double precision lose up to nine digits of the weights near
    the ends, and their dense matrices start threads.

    Args:
        nodes: n ≥ 2.

    Returns:
        [n] places, increasing, and [n] logarithms.
    """
    place: _Floats = _about(nodes)
    for _ in range(2):
        place, _ = _nearer(place, nodes)
    place, slope = _nearer(place.astype(np.longdouble), nodes)
    log_weight = np.log(2 / ((1 - place**2) * slope**2))
    return _mirrored(-place, place, nodes), _mirrored(log_weight, log_weight, nodes)


def _about(degree: int) -> Vector:
    """The roots from 0 on, to a hundredth of their distances; increasing.

    cos(j/(n + ½)) for the zeros j of the Bessel function J₀ (DLMF 18.16(ii)), by the first terms
    of McMahon's expansion (DLMF 10.21(vi)).
    """
    b = math.pi * (np.arange(degree // 2, 0, -1) - 0.25)
    angles = (b + 1 / (8 * b) - 124 / (3 * (8 * b) ** 3)) / (degree + 0.5)
    return np.cos(np.append([math.pi / 2], angles) if degree % 2 else angles)


def _nearer(x: _Floats, degree: int) -> tuple[_Floats, _Floats]:
    """Places near roots, by a step of third order, and the derivative there.

    The second derivative follows from Legendre's equation, (1 − x²)P″ = 2xP′ − n(n + 1)P.
    """
    value, slope = _legendre(x, degree)
    bend = (2 * x * slope - degree * (degree + 1) * value) / (1 - x**2)
    newton = value / slope
    step = -newton * (1 + newton * bend / (2 * slope))
    return x + step, slope + step * bend


def _legendre(x: _Floats, degree: int) -> tuple[_Floats, _Floats]:
    """The Legendre polynomial of a degree and its derivative inside (−1, 1)."""
    before, value, product = np.ones_like(x), x.copy(), np.empty_like(x)
    k = np.arange(1, degree, dtype=x.dtype)
    for share in k / (k + 1):
        # P of degree k + 1 is x·P_k + (x·P_k − P_{k−1})·k/(k + 1), made where P_{k−1} was.
        np.multiply(x, value, out=product)
        np.subtract(product, before, out=before)
        before *= share
        before += product
        before, value = value, before
    return value, degree * (x * value - before) / (x**2 - 1)


def _mirrored(below: _Floats, above: _Floats, nodes: int) -> Vector:
    """All nodes' values from those at roots below 0, given from 0 on, and at others."""
    whole = np.concatenate([below[::-1][: nodes // 2], above])
    return np.asarray(whole, dtype=np.float64)
