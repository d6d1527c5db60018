"""Intervals of ε and δ for any pairs of distributions, by composition of losses on a lattice."""

from fedpriv.accounting.pld.queries import (
    delta_interval,
    deltas_above,
    epsilon_interval,
    exposure,
    noise_of_sampled,
)
