"""The loss of a pair of discrete distributions, as a law that can be put on a lattice."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import logsumexp

from fedpriv.accounting.lattice import Cells
from fedpriv.accounting.pair import Sketch
from fedpriv.accounting.rounds import Direction, Vector

_NODES = 256


@dataclass(frozen=True, eq=False)
class DiscreteLaw:
    """Outputs with masses under P and Q; the rest of P and Q, if any, is left out.

    Outputs that have no mass under P have the loss −∞, others that have none under Q the loss ∞.

    Attributes:
        p: [outputs] masses under P.
        q: [outputs] masses under Q.
        gap: [outputs] p − q, as exact as is known.
    """

    p: Vector
    q: Vector
    gap: Vector

    @property
    def resolution(self) -> float:
        """1: errors are relative to the masses."""
        return 1.0

    @cached_property
    def loss(self) -> Vector:
        """[outputs] log(p/q)."""
        p, q = self.p, self.q
        rise = np.divide(self.gap, q, out=np.full(q.shape, np.inf), where=q > 0)
        near = np.abs(rise) < 0.5
        log_p = np.log(p, out=np.full(p.shape, -np.inf), where=p > 0)
        log_q = np.log(q, out=np.zeros(q.shape), where=q > 0)
        far = np.where((q == 0) & (p > 0), np.inf, log_p - log_q)
        return np.where(near, np.log1p(np.where(near, rise, 0.0)), far)

    def span(self, tail: float) -> tuple[float, float]:
        """Finite losses that P and Q pass on either side with probability at most about `tail`."""
        finite = np.isfinite(self.loss)
        order = np.argsort(self.loss[finite])
        loss, both = self.loss[finite][order], np.maximum(self.p, self.q)[finite][order]
        below, above = np.cumsum(both), np.cumsum(both[::-1])[::-1]
        first = min(int((below <= tail).sum()), len(loss) - 1)
        last = max(int((above > tail).sum()) - 1, 0)
        return float(loss[first]), float(loss[last])

    def centre(self, step: float) -> float:
        """The loss c such that outputs with a loss in [c − step, c + step] have c together."""
        c = self._commonest
        for _ in range(3):
            near = np.abs(self.loss - c) <= step
            q, gap = float(self.q[near].sum()), float(self.gap[near].sum())
            c = float(np.log1p(gap / q)) if q > 0 and gap > -q else c
        return c

    def cells(self, edges: Vector) -> Cells:
        """Masses below the first of the increasing losses, between neighbours, above the last."""
        at = np.searchsorted(edges, self.loss)
        size = len(edges) + 1
        masses = (self.p, self.q, self.gap)
        p, q, gap = (np.bincount(at, mass, size).astype(np.float64) for mass in masses)
        return Cells(p, q, gap)

    def sketch(self, tail: float, direction: Direction) -> Sketch:
        """Some hundred groups of outputs, without losses that are rarer than `tail`."""
        low, high = self.span(tail)
        cells = self.cells(np.linspace(np.nextafter(low, -np.inf), high, _NODES))
        p, q, gap = (masses[1:-1] for masses in (cells.p, cells.q, cells.gap))
        some = (p > 0) & (q > 0)
        groups = DiscreteLaw(p[some], q[some], gap[some])
        log_mass = np.log(groups.p if direction is Direction.REMOVE else groups.q)
        log_mass -= logsumexp(log_mass)
        return Sketch(log_mass, direction * groups.loss, direction * self._commonest)

    @property
    def _commonest(self) -> float:
        """The finite loss of the output with the largest mass under Q."""
        return float(self.loss[np.argmax(np.where(np.isfinite(self.loss), self.q, -1.0))])
