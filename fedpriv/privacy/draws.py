"""Where cohort and noise of a round come from: fresh keys, or the key of a series of rounds.

A mechanism whose event is one round draws with keys of the round's own, which nobody keeps. A
series of rounds has one key from beginning to end, of which the keys of all of its cohorts are
made, and those of noise that is correlated over its rounds: which rounds a user is in is drawn once
for all of them, and a server that stops in the middle must go on with what it has paid for. The
participation record keeps that key until the series is over. It is as secret as the cohorts beside
it: with it, correlated noise could be subtracted. Independent noise is fresh in a series too, so
that it is not drawn twice even where files are put back to what they were.
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
    """One attempt at one round of one run: what keys are named after."""

    run: str
    round: int  # from 1
    attempt: int  # from 0
    first: bool = False  # whether the run is the first of its ledger

    def purpose(self, stream: str) -> str:
        """Name the draw of a stream: "sampling", "noise", "series" or "local".

        The first run of a ledger, of which there is one, goes unnamed, so that what a seed gives it
        does not depend on what it is called. All others are told apart by their names.
        """
        name = "" if self.first else self.run
        return f"{stream}/{name}/{self.round}/{self.attempt}"


@dataclass(frozen=True)
class SeriesEntropy(Entropy):
    """Keys made of the key of a series, one for each purpose: HMAC-SHA-256 (RFC 2104)."""

    series_key: bytes = field(repr=False)  # 32, secret

    def key(self, purpose: str) -> bytes:
        """Return the 32-byte key of a draw of the series."""
        return hmac.digest(self.series_key, purpose.encode(), "sha256")


class SeriesDraws:
    """All draws of one series of rounds: functions of its key and its mechanism, made once.

    Correlated noise of a round needs that of the rounds before it, lost ones included. What is
    needed of these is kept, and computed again from the key where a server resumes.
    """

    def __init__(self, mechanism: GaussianMechanism, key: bytes) -> None:
        self.mechanism = mechanism
        self.entropy = SeriesEntropy(key)
        self._noises = mechanism.noises
        self._states = {group: noise.start() for group, noise in self._noises.items()}
        self._drawn = 0  # rounds of which the noise was drawn

    def correlated(self, part: int, paid: int) -> Mapping[str, IntegerVector] | None:
        """Noise of a round by vector group, in steps; None where it is independent.

        Each round is asked for once, in the order of rounds. `paid` is the position of the charge
        of the series. Unless it is the first of the ledger, keys are named after it, so that two
        series that began at the same time with one seed have different noise.
        """
        if not self._noises:
            return None
        if part < self._drawn:
            raise LedgerError(f"the noise of round {part} of the series was drawn before")
        drawn, stream = dict[str, IntegerVector](), "noise" if paid == 1 else f"noise-{paid}"
        while self._drawn <= part:
            for group, noise in self._noises.items():
                key = self.entropy.key(f"{stream}/{self._drawn}/{group}")
                self._states[group], drawn[group] = noise.step(self._states[group], key)
            self._drawn += 1
        return drawn

    @cached_property
    def cohorts(self) -> tuple[Users, ...]:
        """The cohort of each round."""
        return self.mechanism.sampling.draw(self.entropy.key("sampling"))


@dataclass(frozen=True)
class Draws:
    """The cohort and the noise of one round, each to be drawn once."""

    entropy: Entropy  # of an event of one round, and of independent noise
    drawn: SeriesDraws | None = None  # of an event of several
    part: int = 0  # which of them it is
    series: int | None = None  # position of the charge that paid for it; None: it pays itself

    @property
    def key_to_keep(self) -> bytes | None:
        """The key of the series that this round begins, if it begins one; a secret."""
        return None if self.drawn is None or self.part else self.drawn.entropy.series_key

    def cohort(self, mechanism: GaussianMechanism, at: RoundAttempt) -> Users:
        """Positions of the users of the cohort, ascending; secret. May be empty."""
        if self.drawn is not None:
            return self.drawn.cohorts[self.part]
        (users,) = mechanism.sampling.draw(self.entropy.key(at.purpose("sampling")))
        return users

    def noise(self, at: RoundAttempt) -> tuple[Entropy, str]:
        """Where the keys of independent noise come from, and the purpose that names it."""
        return self.entropy, at.purpose("noise")
