"""Intervals of ε and δ for any pairs of distributions, by composition of losses on a lattice."""

from fedpriv.accounting.pld.queries import delta_interval, epsilon_interval

__all__ = ["delta_interval", "epsilon_interval"]
