"""What a node finds out about a ledger by itself: whether it grows, what it costs, what is missing.

A server that lies about its noise cannot be caught here, nor one that keeps two ledgers and shows
each node its own. What is caught is a ledger that was set back, rewritten or replaced, a round that
went on without a charge or with another than was offered, and an ε that is understated.

Whether a node takes part in an offered round: its limits, and what the ledger says.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import grpc

from fedpriv.accounting.accountant import PrivacyLoss
from fedpriv.accounting.accountants import epsilon as priced
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.clients.connection import Backoff, fetch_ledger, persist
from fedpriv.clients.consent import Consent, misfit
from fedpriv.clients.journal import Diary, TakenPart
from fedpriv.errors import AuditError, LedgerError, UnsupportedEventError, WireError
from fedpriv.ledger.budget import merge_equal
from fedpriv.ledger.events import NeighbouringRelation, RoundEvent, SamplingPolicy
from fedpriv.ledger.export import ExportedLedger
from fedpriv.ledger.ledger import ChargedRow, Head
from fedpriv.wire import RoundOffer, Welcome

_ROUNDING = 1e-9
"""Relative difference by which the same noise may be computed in two ways."""
_UNDERSTATED = 1e-6


@dataclass(frozen=True)
class Examined:
    """A ledger that kept its promises so far.

    Attributes:
        ledger: what was read.
        delta: δ in (0, 1).
        epsilon: ε at δ of all its charges, by the accountant `tight`; may be inf.
        rounds: how many charges there are, repeated attempts included.
        head: the head of its chain.
    """

    ledger: ExportedLedger
    delta: float
    epsilon: float
    rounds: int
    head: Head


def examine(ledger: ExportedLedger, welcome: Welcome, diary: Diary, delta: float) -> Examined:
    """Check that a ledger is the one that the node knows and only grew, price it, and remember it.

    Args:
        ledger: as the server sent it.
        welcome: what the server said when the node connected.
        diary: what the node knows; the head of the ledger is remembered there.
        delta: δ in (0, 1) at which to price.

    Raises:
        AuditError: the ledger is of another population, another one than this population had, does
            not contain its newest head that the node knows, or has charges without an ε.
        InvalidValueError: δ is out of range, or the diary cannot be used.
    """
    name = welcome.population_name
    if ledger.population != name:
        raise AuditError(f"the ledger is not of population {name!r}")
    known = diary.ledger_of(name)
    if known not in (None, ledger.ledger_id):
        raise AuditError(
            f"population {name!r} had the ledger {known}, and now has {ledger.ledger_id}: what was "
            "spent before is not in it"
        )
    head = diary.last_head(ledger.ledger_id)
    if head is not None and not ledger.contains(head):
        raise AuditError(
            f"the ledger does not contain its former head of {head.count} charges with hash "
            f"{head.hash}: it was set back or rewritten"
        )
    spent = _loss(_events(ledger.rows), delta).epsilon
    diary.remember_head(ledger.ledger_id, name, ledger.head)
    return Examined(ledger, delta, spent, len(ledger.rows), ledger.head)


def confirm(examined: Examined, diary: Diary, offer: RoundOffer | None = None) -> None:
    """Check that the server charged what it went on from, and does not understate what it offers.

    A run has gone on from a round when a later one of it was charged, or offered to this node.

    * Every round that a run has gone on from was charged, whether or not users of the node were in
      it, in each run that the node was offered a round of.
    * Of an attempt that the node took part in, the round was charged by this attempt, or a later
      one where it was abandoned, with the N that was offered, at most its q and at least its z.
    * The ε that is offered is not below the least that all charges before this attempt and the
      offered round can cost at its δ.

    The last round of a run can only be checked when another follows: one that the budget did not
    admit has no charge, and rightly so. Where several runs charge a ledger at the same time, a
    charge after the offer was made may look as if ε was understated.

    Args:
        examined: the newest state of the ledger.
        diary: what the node took part in.
        offer: what is offered now; None: nothing.

    Raises:
        AuditError: names the round that was not charged or otherwise than offered, or the ε.
        InvalidValueError: the diary cannot be used.
    """
    taken = diary.taken_part(examined.ledger.population)
    charges = _by_round(examined.ledger.rows)
    offered = [(part.run, part.round) for part in taken]
    if offer is not None:
        offered.append((offer.id.run, offer.id.round))
    reached = _reached([*charges, *offered])
    for run in dict.fromkeys(run for run, _ in offered):
        # Ends at the first gap, so there are no more steps than charges.
        for round_number in range(reached[run]):
            if (run, round_number) not in charges:
                raise AuditError(f"round {round_number} of run {run!r} went on without a charge")
    for part in taken:
        if part.round < reached[part.run]:
            _refuse_other_charge(part, charges[part.run, part.round])
    if offer is not None:
        _refuse_understatement(examined, offer)


def charged_already(examined: Examined, offer: RoundOffer) -> str | None:
    """Why an offer comes after its charge, in one sentence, or None.

    Either the node is late, or the server wants to release a second time on one charge, which could
    be averaged with the first; so nobody should train.
    """
    if _before(examined.ledger.rows, offer) == len(examined.ledger.rows):
        return None
    return (
        f"attempt {offer.id.attempt} at round {offer.id.round} of run {offer.id.run!r}, or one "
        "after it, is charged already"
    )


def price_with(examined: Examined, offer: RoundOffer) -> float:
    """ε at the examined δ of all charges and the offered round, by the accountant `tight`.

    Poisson sampling, one user added or removed.

    Raises:
        AuditError: charges and round have no common ε.
    """
    return _loss([*_events(examined.ledger.rows), _event(offer)], examined.delta).epsilon


def _refuse_other_charge(part: TakenPart, rows: Sequence[ChargedRow]) -> None:
    """Raise AuditError unless a charge of the round fits what was offered."""
    if any(row.attempt >= part.attempt and _fits(row.event, part) for row in rows):
        return
    raise AuditError(
        f"attempt {part.attempt} at round {part.round} of run {part.run!r} was offered with "
        f"q = {part.sampling_probability}, N = {part.population}, z = {part.noise_multiplier}; "
        "neither it nor one after it was charged so"
    )


def _fits(event: RoundEvent, part: TakenPart) -> bool:
    sampling = event.sampling
    return (
        sampling.policy is SamplingPolicy.POISSON
        and sampling.relation is NeighbouringRelation.ADD_OR_REMOVE_ONE
        and sampling.population == part.population
        and sampling.sampling_probability <= part.sampling_probability * (1.0 + _ROUNDING)
        and event.noise_multiplier >= part.noise_multiplier * (1.0 - _ROUNDING)
    )


def _refuse_understatement(examined: Examined, offer: RoundOffer) -> None:
    rows = examined.ledger.rows
    events = [*_events(rows[: _before(rows, offer)]), _event(offer)]
    said, delta = offer.price.epsilon_after, offer.price.delta
    # No finite ε holds at δ = 0, where there is a Gaussian.
    least = _loss(events, delta).epsilon_low if delta > 0.0 else float("inf")
    if not said >= least * (1.0 - _UNDERSTATED):
        raise AuditError(
            f"the server says ε = {said} at δ = {delta}, but charges and offer cost at least "
            f"{least}"
        )


def _before(rows: Sequence[ChargedRow], offer: RoundOffer) -> int:
    """How many charges there were before the offered attempt or a later one at its round."""
    name = offer.id
    for number, row in enumerate(rows):
        if (row.run, row.round) == (name.run, name.round) and row.attempt >= name.attempt:
            return number
    return len(rows)


def _by_round(rows: Iterable[ChargedRow]) -> dict[tuple[str, int], list[ChargedRow]]:
    found: dict[tuple[str, int], list[ChargedRow]] = {}
    for row in rows:
        found.setdefault((row.run, row.round), []).append(row)
    return found


def _reached(rounds: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The last round of each run."""
    last: dict[str, int] = {}
    for run, round_number in rounds:
        last[run] = max(round_number, last.get(run, 0))
    return last


def _events(rows: Iterable[ChargedRow]) -> list[RoundEvent]:
    return [row.event for row in rows]


def _event(offer: RoundOffer) -> RoundEvent:
    price = offer.price
    return poisson_gaussian(
        price.sampling_probability, price.noise_multiplier, population=price.population
    )


def _loss(events: Iterable[RoundEvent], delta: float) -> PrivacyLoss:
    try:
        return priced(merge_equal(events), delta)
    except UnsupportedEventError as error:
        raise AuditError(f"what the ledger charges has no ε: {error}") from error


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
