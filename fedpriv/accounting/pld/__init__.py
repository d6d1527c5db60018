"""Intervals of ε and δ for any pairs, by composing their losses on a lattice.

`lattice` puts a loss on a lattice from either side, `dominating_pairs` and `random_allocation` have
the losses of events, `fft` composes, `queries` chooses the lattice and finds the ends.
"""

from fedpriv.accounting.pld.queries import delta_interval, epsilon_interval

__all__ = ["delta_interval", "epsilon_interval"]
