"""Whether a node takes part in an offered round: its limits, and what the ledger says."""

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import grpc

from fedpriv.accounting.ledger_lines import ExportedLedger
from fedpriv.errors import AuditError, LedgerError, WireError
from fedpriv.wire import RoundOffer, Welcome

from .audit import Examined, charged_already, confirm, examine, price_with
from .backoff import Backoff, persist
from .consent import Consent, misfit
from .diary import Diary
from .exchange import fetch_ledger

DISBELIEF = (AuditError, LedgerError, WireError)
"""What `Auditor` raises when a ledger cannot be believed."""
_DAY = timedelta(days=1)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Auditor:
    """Reads the server's ledger, as `fedpriv join --verify-ledger` does.

    Attributes:
        channel: to the server.
        diary: what the node knows of the ledger, and took part in.
        consent: says at which δ to price.
        backoff: for a connection that was lost.
    """

    channel: grpc.aio.Channel
    diary: Diary
    consent: Consent
    backoff: Backoff

    async def examined(self, welcome: Welcome, offer: RoundOffer | None = None) -> Examined:
        """Fetch the ledger, check all that can be checked, and remember its head.

        Raises:
            AuditError: it breaks a promise.
            LedgerError: it is no ledger that can be believed.
            WireError: what was sent is not what was declared.
            InvalidValueError: the diary cannot be used.
            grpc.aio.AioRpcError: it cannot be fetched.
        """
        lines = await persist(lambda: fetch_ledger(self.channel), self.backoff)
        # Reading and pricing a long ledger takes seconds, in which the server wants to be heard.
        return await asyncio.to_thread(self._examined, lines, welcome, offer)

    def _examined(
        self, lines: Iterable[str], welcome: Welcome, offer: RoundOffer | None
    ) -> Examined:
        delta = self.consent.delta_for(welcome.population)
        examined = examine(ExportedLedger.read(lines), welcome, self.diary, delta)
        confirm(examined, self.diary, offer)
        return examined

    async def report(self, welcome: Welcome) -> None:
        """Say what the ledger has come to; raises what `examined` raises."""
        examined = await self.examined(welcome)
        _log.info(
            "the ledger holds %d charges: ε = %.6g at δ = %g",
            examined.rounds,
            examined.epsilon,
            examined.delta,
        )


@dataclass(frozen=True)
class Screening:
    """What a node asks of an offer before it takes part.

    Attributes:
        consent: the node's limits.
        diary: counts the rounds of a day.
        auditor: reads the ledger; None: what the server says of ε is taken for true.
    """

    consent: Consent
    diary: Diary
    auditor: Auditor | None

    async def objection(self, welcome: Welcome, offer: RoundOffer) -> str | None:
        """Why the node does not take part, in one sentence that says nothing of users, or None.

        Raises:
            InvalidValueError: the diary cannot be used.
            grpc.aio.AioRpcError: the ledger cannot be fetched.
        """
        if unfit := misfit(welcome, offer):
            return unfit
        epsilon: float | None = None
        if self.auditor is not None:
            try:
                examined = await self.auditor.examined(welcome, offer)
                if late := charged_already(examined, offer):
                    return late
                epsilon = await asyncio.to_thread(price_with, examined, offer)
            except DISBELIEF as error:
                _log.error("the ledger cannot be believed: %.400s", error)
                return "the ledger cannot be believed"
            _log.info("after this round ε would be %.6g at δ = %g", epsilon, examined.delta)
        today = self.diary.rounds_since(datetime.now(UTC) - _DAY)
        return self.consent.objection(offer, today, epsilon)
