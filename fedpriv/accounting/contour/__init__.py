"""Intervals of ε and δ for Poisson-sampled rounds, by an integral in the complex plane.

`privacy_loss` has the loss of one round at nodes, `plan` says where to integrate, `integral` bounds
the integral, `interval` reads off the ends.
"""

from fedpriv.accounting.contour.interval import (
    ContourUnsuitableError,
    delta_interval,
    epsilon_interval,
)

__all__ = ["ContourUnsuitableError", "delta_interval", "epsilon_interval"]
