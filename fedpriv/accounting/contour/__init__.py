"""Intervals of ε and δ for sampled rounds, by an integral in the complex plane.

`cumulant` computes the loss of one round and bounds on its errors; `inversion` plans the contour,
sums along it and computes the ends.
"""

from fedpriv.accounting.contour.cumulant import View
from fedpriv.accounting.contour.inversion import (
    ContourUnsuitableError,
    Views,
    delta_interval,
    deltas_along,
    epsilon_interval,
)
