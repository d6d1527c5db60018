"""Intervals of ε and δ for any pairs, by composing their losses on a lattice.

`lattice` puts a loss on a lattice from either side, `sampling` and `random_allocation` know the
losses of events, `fft` composes, `interval` chooses the lattice and reads off the ends.
"""

from fedpriv.accounting.pld.interval import delta_interval, epsilon_interval

__all__ = ["delta_interval", "epsilon_interval"]
