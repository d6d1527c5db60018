"""Sixty settings of the Poisson-subsampled Gaussian that span those used in practice.

Sampling probabilities are from 1e-5 to 1, noise multipliers from 0.3 to 30, rounds from 1 to
1,000,000 and δ from 1e-5 to 1e-10. Every pair (q, z) occurs twice; rounds and δ cycle through their
values.
"""

from dataclasses import dataclass
from itertools import product

from fedpriv.accounting import poisson_gaussian
from fedpriv.ledger import RoundEvent

_PROBABILITIES = (1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0)
_NOISES = (0.3, 0.7, 1.0, 4.0, 30.0)
_ROUNDS = (1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)
_DELTAS = (1e-5, 1e-6, 1e-8, 1e-10)


@dataclass(frozen=True)
class Reference:
    """Equal rounds, and the δ of ε."""

    q: float  # sampling probability
    z: float  # noise multiplier
    rounds: int
    delta: float

    @property
    def event(self) -> RoundEvent:
        """The rounds as an event."""
        return poisson_gaussian(self.q, self.z, self.rounds)


REFERENCES: tuple[Reference, ...] = tuple(
    Reference(q, z, _ROUNDS[(3 * i + i // 7) % len(_ROUNDS)], _DELTAS[i % len(_DELTAS)])
    for i, (q, z, _) in enumerate(product(_PROBABILITIES, _NOISES, range(2)))
)
"""The settings, by q and then z."""
