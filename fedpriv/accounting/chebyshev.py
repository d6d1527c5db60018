"""Sums over many different rounds, by interpolation.

The cumulant of a round is a smooth function of log q and log z, so a polynomial through its values
at Chebyshev points of a rectangle has it to many digits. A sum over a million rounds becomes a
weighted sum over these points, with weights that do not depend on the function. Where one rectangle
is not enough it is cut in two.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.polynomial.chebyshev import chebvander
from numpy.typing import NDArray

from fedpriv.accounting.loss import Vector
from fedpriv.accounting.panel import Check, Panel, RoundsArray, direct, merge

_NODES = 10
"""Chebyshev points per variable."""
_CHUNK = 1 << 16
_NARROW = 1e-6
"""A variable that varies by less than this, relative to itself, has two nodes."""
_LEAST_HALF = 1e-12
_MOST_TILES = 64
_Z_FACTOR = 3.0
"""How much faster cumulants vary with log z than with log q, roughly."""


@dataclass(frozen=True)
class _Axis:
    """Interpolation in one variable, log q or log z.

    Attributes:
        centre: the variable is centre + half·x with x in [−1, 1].
        half: see there.
        nodes: [k] increasing Chebyshev points x, with both ends.
        probes: [k − 1] points in between, where the node polynomial is largest.
        basis: [k, k] from values at the nodes to Chebyshev coefficients.
    """

    centre: float
    half: float
    nodes: Vector
    probes: Vector
    basis: Vector

    def place(self, variable: Vector) -> Vector:
        """[n] the x of n values of the variable."""
        return np.asarray(np.clip((variable - self.centre) / self.half, -1.0, 1.0))

    def at(self, x: Vector) -> Vector:
        """[n] e^variable at n places x."""
        return np.asarray(np.exp(self.centre + self.half * x))

    def polynomials(self, x: Vector) -> Vector:
        """[n, k] Chebyshev polynomials at n places."""
        return np.asarray(chebvander(x, len(self.nodes) - 1), dtype=np.float64)

    def cell(self, x: Vector) -> NDArray[np.int64]:
        """[n] index of the node below each place."""
        index = np.searchsorted(self.nodes, x, side="right") - 1
        return np.clip(index, 0, len(self.nodes) - 2)


def tiled(rounds: RoundsArray, error: Callable[[Panel], float], tolerance: float) -> Panel:
    """A panel of rectangles, each with Chebyshev points or, where that is fewer, its rounds.

    Args:
        rounds: any number of rounds.
        error: what `interpolation_error` says about the functions that matter.
        tolerance: largest error per rectangle; with more than 64 rectangles it is given up.

    Returns:
        The panel.
    """
    waiting, done = [rounds], []
    while waiting:
        part = waiting.pop()
        if len(part.q) <= (_NODES + 1) ** 2:
            done.append(direct(part))
            continue
        panel = interpolated(part)
        if error(panel) <= tolerance or len(waiting) + len(done) >= _MOST_TILES:
            done.append(panel)
        else:
            waiting.extend(_halves(part))
    return merge(done)


def interpolated(rounds: RoundsArray) -> Panel:
    """A panel of Chebyshev points in one rectangle, and probes between them.

    What is interpolated is the function divided by q², which varies less.

    Args:
        rounds: any number of rounds.

    Returns:
        The panel.
    """
    axes = _axis(np.log(rounds.q)), _axis(np.log(rounds.z))
    k, m = (len(axis.nodes) for axis in axes)
    moments, cells = np.zeros((k, m)), np.zeros((k - 1) * (m - 1))
    for start in range(0, len(rounds.q), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        q, counts = rounds.q[chunk], rounds.counts[chunk]
        x, y = axes[0].place(np.log(q)), axes[1].place(np.log(rounds.z[chunk]))
        moments += axes[0].polynomials(x).T @ ((counts * q**2)[:, None] * axes[1].polynomials(y))
        cells += np.bincount(axes[0].cell(x) * (m - 1) + axes[1].cell(y), counts, len(cells))
    q, z = np.meshgrid(*(axis.at(axis.nodes) for axis in axes), indexing="ij")
    node_q, node_z = np.minimum(q.ravel(), 1.0), z.ravel()
    probe_q, probe_z, share = _probes(axes)
    scale = float(rounds.counts @ rounds.q**2)
    residual = np.hstack([share / node_q**2, np.diag(-1 / probe_q**2)])
    corner = (np.arange(k - 1)[:, None] * m + np.arange(m - 1)).ravel()
    weight = (axes[0].basis.T @ moments @ axes[1].basis).ravel() / node_q**2
    pairs = len(node_q) + len(probe_q)
    return Panel(
        q=np.concatenate([node_q, probe_q]),
        z=np.concatenate([node_z, probe_z]),
        weight=np.concatenate([weight, np.zeros(len(probe_q))]),
        rounds=float(rounds.counts.sum()),
        count=cells,
        corners=corner[:, None] + np.array([0, 1, m, m + 1]),
        widest_q=np.full(pairs, node_q.max()),
        widest_z=np.full(pairs, node_z.min()),
        checks=(Check(slice(0, pairs), residual, scale),),
    )


def _axis(variable: Vector) -> _Axis:
    low, high = float(variable.min()), float(variable.max())
    k = _NODES if high - low > _NARROW else 2
    angle = np.pi / (k - 1) * np.arange(k)
    x = -np.cos(angle)
    probes = -np.cos(angle[:-1] + np.pi / (2 * k - 2))
    half = max((high - low) / 2, _LEAST_HALF)
    return _Axis((low + high) / 2, half, x, probes, np.linalg.inv(chebvander(x, k - 1)))


def _probes(axes: tuple[_Axis, _Axis]) -> tuple[Vector, Vector, Vector]:
    """[r] q and [r] z of probes along both diagonals, and [r, nodes] their interpolation."""
    lengths = [len(axis.probes) for axis in axes]
    index = np.arange(2 * max(lengths))
    other = np.where(index < max(lengths), index, -1 - index)
    x, y = axes[0].probes[index % lengths[0]], axes[1].probes[other % lengths[1]]
    first, second = axes[0].polynomials(x) @ axes[0].basis, axes[1].polynomials(y) @ axes[1].basis
    share = first[:, :, None] * second[:, None, :]
    return np.minimum(axes[0].at(x), 1.0), axes[1].at(y), share.reshape(len(index), -1)


def _halves(rounds: RoundsArray) -> list[RoundsArray]:
    """The rounds in the two halves of their rectangle."""
    log_q, log_z = np.log(rounds.q), np.log(rounds.z)
    wide = np.ptp(log_q) > _Z_FACTOR * np.ptp(log_z)
    variable = log_q if wide else log_z
    low = variable < (variable.min() + variable.max()) / 2
    return [rounds.part(low), rounds.part(~low)]
