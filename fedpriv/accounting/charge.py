"""The two ends of a charge: what a ledger is asked to charge, and the receipt it gives."""

import re
import threading
from dataclasses import dataclass, field

from fedpriv.accounting.events import Randomness, RoundEvent
from fedpriv.errors import InvalidValueError, LedgerError


@dataclass(frozen=True)
class ProposedCharge:
    """What a ledger is asked to charge before anything is released.

    Attributes:
        run: name of the run; printable and not empty.
        round: number of the round, from 0.
        attempt: number of the attempt at this round, from 0.
        randomness: where cohort and noise come from.
        event: the one round to charge; its count is 1.
        cohort_commitment: SHA-256, 64 hexadecimal digits, from `ParticipationRecord.record`.

    Raises:
        InvalidValueError: a field is out of range.
    """

    run: str
    round: int
    attempt: int
    randomness: Randomness
    event: RoundEvent
    cohort_commitment: str

    def __post_init__(self) -> None:
        if not (self.run and self.run.isprintable()):
            raise InvalidValueError(f"run is {self.run!r}; it must be printable and not empty")
        if self.round < 0 or self.attempt < 0:
            raise InvalidValueError(
                f"round {self.round}, attempt {self.attempt}: both must be at least 0"
            )
        if self.event.count != 1:
            raise InvalidValueError(
                f"the event has count {self.event.count}; each round is charged by itself"
            )
        if not re.fullmatch("[0-9a-f]{64}", self.cohort_commitment):
            raise InvalidValueError(
                f"cohort_commitment is {self.cohort_commitment!r}; it must be 64 lower-case "
                "hexadecimal digits"
            )


@dataclass(frozen=True)
class Charge:
    """Receipt for one charge, good for one release.

    Copies share the one release: `copy`, `replace` and threads cannot double it, and it cannot
    be pickled.

    Attributes:
        run: name of the run.
        round: number of the round.
        attempt: number of the attempt.
        event: what was charged and may be released.
        hash: digest of the charge in the ledger.
    """

    run: str
    round: int
    attempt: int
    event: RoundEvent
    hash: str
    _used: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def redeem(self) -> RoundEvent:
        """The event to release, once.

        Raises:
            LedgerError: the receipt was redeemed before.
        """
        if not self._used.acquire(blocking=False):
            raise LedgerError(
                f"the charge of run {self.run}, round {self.round}, attempt {self.attempt} was "
                "redeemed before: two releases on one charge could be averaged, which removes "
                "noise that the ledger counts on"
            )
        return self.event
