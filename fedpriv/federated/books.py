"""Where rounds are written down, before they ask and release: ledger, participation, budget."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from fedpriv.accounting.budget import PrivacyBudget
from fedpriv.accounting.events import Randomness, RoundEvent
from fedpriv.accounting.ledger import Charge, Ledger, ProposedCharge
from fedpriv.accounting.participation import ParticipationRecord
from fedpriv.errors import BudgetExceededError


@dataclass(frozen=True)
class Books:
    """Where a run is written down.

    Attributes:
        ledger: what was spent; public.
        participation: who took part; secret, and never exported.
        budget: what may be spent by all runs of the ledger together.
    """

    ledger: Ledger
    participation: ParticipationRecord
    budget: PrivacyBudget

    @classmethod
    @contextmanager
    def open(
        cls, ledger: Path, participation: Path, population: str, budget: PrivacyBudget
    ) -> Iterator[Self]:
        """Open or create ledger and participation record, and close them in the end.

        Raises:
            LedgerError: one cannot be opened or created, or is of another population.
        """
        with (
            Ledger.open_or_create(ledger, population) as opened,
            ParticipationRecord.open_or_create(participation) as record,
        ):
            yield cls(opened, record, budget)

    def refuse_if_beyond(self, event: RoundEvent, what: str) -> None:
        """Ask the budget before users are bothered; `charge` asks again, atomically.

        Args:
            event: what would be charged.
            what: how messages call it.

        Raises:
            BudgetExceededError: the budget would be passed.
        """
        if not self.ledger.admits(event, self.budget):
            raise BudgetExceededError(
                f"{what} would pass the budget of ε = {self.budget.epsilon} at "
                f"δ = {self.budget.delta}; nobody was asked and nothing charged"
            )

    def next_attempt(self, run: str, round_number: int) -> int:
        """The first attempt at a round that nobody was asked for yet, and none after it.

        One that was given up keeps its number, charged or not: an answer to it that comes late must
        not count for the cohort of another.
        """
        return max(
            self.ledger.next_attempt(run, round_number),
            self.participation.next_attempt(run, round_number),
        )

    def record(
        self, run: str, round_number: int, attempt: int, users: npt.NDArray[np.int64]
    ) -> str:
        """Write down a cohort before it is asked, durably; returns the commitment to it.

        Args:
            run: name of the run.
            round_number: from 0.
            attempt: from `next_attempt`.
            users: the cohort, positions in the population.

        Raises:
            LedgerError: the cohort cannot be written.
        """
        return self.participation.record(run, round_number, attempt, users)

    def charge(
        self,
        run: str,
        round_number: int,
        attempt: int,
        commitment: str,
        event: RoundEvent,
        randomness: Randomness,
    ) -> Charge:
        """Charge a round; the charge is durable on return.

        Args:
            run: name of the run.
            round_number: from 0.
            attempt: from `next_attempt`.
            commitment: to its cohort, from `record`.
            event: what is about to be released.
            randomness: where cohort and noise come from.

        Raises:
            BudgetExceededError: the budget would be passed; nothing was charged.
            LedgerError: the books cannot be believed or written; nothing was charged.
        """
        proposed = ProposedCharge(run, round_number, attempt, randomness, event, commitment)
        return self.ledger.charge(proposed, self.budget)
