"""Intervals of ε and δ for Poisson-sampled rounds, by an integral in the complex plane.

`cumulant` computes the loss of one round and bounds on its errors; `inversion` plans the contour,
sums along it and computes the ends.
"""

from fedpriv.accounting.contour.inversion import (
    ContourUnsuitableError,
    delta_interval,
    deltas_along,
    epsilon_interval,
)

__all__ = ["ContourUnsuitableError", "delta_interval", "deltas_along", "epsilon_interval"]
