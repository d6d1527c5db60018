"""The keys that draw the cohort and noise of a round: fresh ones, or those of a series of rounds.

If a mechanism's event is one round, the round draws with its own keys, which are not stored. A
series of rounds has one key throughout. It determines the keys of all cohorts and of noise that is
correlated over the rounds: the rounds of each user are drawn once for the whole series, and a
server that stops in the middle must continue with the series it has paid for. The participation
record keeps that key until the series is over. The key is as secret as the cohorts next to it:
anyone who has it can subtract correlated noise. Independent noise is fresh even within a series, so
that it is never drawn twice, even if files are restored to an earlier state.
"""

import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from fedpriv.errors import LedgerError
from fedpriv.privacy.clipping import IntegerVector
from fedpriv.privacy.gaussian_mechanism import GaussianMechanism
from fedpriv.privacy.noise import Entropy
from fedpriv.privacy.sampling import Users


@dataclass(frozen=True)
class RoundAttempt:
    """One attempt at one round of one run; the purposes of keys contain it."""

    run: str
    round: int  # from 1
    attempt: int  # from 0
    first: bool = False  # whether the run made the first charge of its ledger

    def purpose(self, stream: str) -> str:
        """Return the purpose of a draw from a stream: "sampling", "noise", "series" or "local".

        The purpose omits the name of a ledger's first run, so that its seeded draws do not depend
        on that name. There is only one first run; the names of all others keep purposes distinct.
        """
        name = "" if self.first else self.run
        return f"{stream}/{name}/{self.round}/{self.attempt}"


@dataclass(frozen=True)
class SeriesEntropy(Entropy):
    """Derives keys from the key of a series, one per purpose: HMAC-SHA-256 (RFC 2104)."""

    series_key: bytes = field(repr=False)  # 32 bytes, secret

    def key(self, purpose: str) -> bytes:
        """Return the 32-byte key of a draw of the series."""
        return hmac.digest(self.series_key, purpose.encode(), "sha256")


class SeriesDraws:
    """All draws of one series of rounds, functions of its key and mechanism, computed once.

    Correlated noise of a round depends on the noise of all earlier rounds, lost ones included. This
    object keeps the state it needs; a server that resumes recomputes it from the key.
    """

    def __init__(self, mechanism: GaussianMechanism, key: bytes) -> None:
        self.mechanism = mechanism
        self.entropy = SeriesEntropy(key)
        self._noises = mechanism.noises
        self._states = {group: noise.start() for group, noise in self._noises.items()}
        self._drawn = 0  # number of rounds whose noise was drawn

    def correlated_noise(self, part: int, payment: int) -> Mapping[str, IntegerVector] | None:
        """Return a round's noise by vector group, in steps int64 [d_g]; None if it is independent.

        Each round may be requested once, in order; LedgerError otherwise. `payment` is the position
        of the charge of the series. Unless it is the first of the ledger, the purposes of keys
        contain it, so that two series that began at once with one seed have different noise.
        """
        if not self._noises:
            return None
        if part < self._drawn:
            raise LedgerError(f"the noise of round {part} of the series was drawn before")
        steps, stream = dict[str, IntegerVector](), "noise" if payment == 1 else f"noise-{payment}"
        while self._drawn <= part:
            for group, noise in self._noises.items():
                key = self.entropy.key(f"{stream}/{self._drawn}/{group}")
                self._states[group], steps[group] = noise.step(self._states[group], key)
            self._drawn += 1
        return steps

    @cached_property
    def cohorts(self) -> tuple[Users, ...]:
        """The cohort of each round; secret."""
        return self.mechanism.sampling.draw(self.entropy.key("sampling"))


@dataclass(frozen=True)
class Draws:
    """Draws the cohort and the noise of one round, each once."""

    entropy: Entropy  # keys of an event of one round, and of independent noise
    series_draws: SeriesDraws | None = None  # set if the event spans several rounds
    part: int = 0  # index of the round in its event
    series: int | None = None  # position of the charge that paid; None if this round pays

    @property
    def new_series_key(self) -> bytes | None:
        """The secret key of the series that this round begins, or None."""
        return None if self.part or not self.series_draws else self.series_draws.entropy.series_key

    def cohort(self, mechanism: GaussianMechanism, at: RoundAttempt) -> Users:
        """Return the cohort's positions in the population, ascending int64 [cohort]; secret."""
        if self.series_draws is not None:
            return self.series_draws.cohorts[self.part]
        (users,) = mechanism.sampling.draw(self.entropy.key(at.purpose("sampling")))
        return users

    def noise(self, at: RoundAttempt) -> tuple[Entropy, str]:
        """Return the source of keys for independent noise, and the purpose of its draw."""
        return self.entropy, at.purpose("noise")
