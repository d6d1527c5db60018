"""Whether a node takes part in an offered round: its own limits, and what the ledger tells it.

Verifying catches a ledger that was set back, rewritten or replaced, a round that went on without a
charge or with another than was offered, and an ε that is understated. It cannot catch a server that
lies about its noise, nor one that keeps two ledgers and shows each node its own.
"""

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.accountants import PrivacyLoss
from fedpriv.accounting.accountants import epsilon as priced
from fedpriv.accounting.pricing import weakest_randomness
from fedpriv.clients.connection import Backoff, FederationStub, persist
from fedpriv.clients.consent import Consent, misfit
from fedpriv.clients.journal import Journal, Remembered, RoundSeries, TakenPart
from fedpriv.errors import (
    InvalidValueError,
    LedgerError,
    UnsupportedEventError,
    UntrustedLedgerError,
    WireError,
)
from fedpriv.ledger import Head, events
from fedpriv.ledger.events import NeighbouringRelation, Randomness, RoundEvent, Unit
from fedpriv.ledger.ledger import ChargedRow, ExportedLedger, SeriesBook, paid_events
from fedpriv.wire import Proposal, RoundId, RoundOffer, Terms, Welcome

# Raised when a ledger cannot be believed.
DISBELIEF = (UntrustedLedgerError, LedgerError, WireError)
_ROUNDING = 1e-9  # relative difference by which the same noise may be computed in two ways
_UNDERSTATED = 1e-6  # relative
_DAY = timedelta(days=1)
_LONGEST_CHECK_SECONDS = 120.0
_log = logging.getLogger(__name__)
Found = TypeVar("Found")


@dataclass(frozen=True)
class Examined:
    """A ledger that kept its promises so far."""

    ledger: ExportedLedger
    delta: float
    # At delta, of all its charges, by the accountant `tight`; inf also where one was seeded.
    epsilon: float
    relation: NeighbouringRelation  # under which all its charges are priced


def examine(ledger: ExportedLedger, welcome: Welcome, known: Remembered, delta: float) -> Examined:
    """Check that a ledger is the one that the node knew before it asked and only grew; price it."""
    name = welcome.population_name
    if ledger.population != name:
        raise UntrustedLedgerError(f"the ledger is not of population {name!r}")
    if known.ledger_id not in (None, ledger.ledger_id):
        now = f"and now has {ledger.ledger_id}: what was spent before is not in it"
        raise UntrustedLedgerError(f"population {name!r} had the ledger {known.ledger_id}, {now}")
    head = known.head
    if head is not None and not ledger.contains(head):
        raise _set_back(head)
    loss = _loss(ledger.rows, delta)
    return Examined(ledger, delta, _unless_seeded(ledger.rows, loss), loss.relation)


def _set_back(head: Head) -> UntrustedLedgerError:
    former = f"its former head of {head.count} charges with hash {head.hash}"
    return UntrustedLedgerError(
        f"the ledger does not contain {former}: it was set back or rewritten"
    )


def confirm(examined: Examined, known: Remembered, offer: Terms | None = None) -> None:
    """Check that the server charged each round it went on from, and does not understate its offer.

    A run has gone on from a round when a later one of it was charged, or offered to this node.

    * Every round that a run has gone on from was charged, whether or not users of the node were in
      it, in each run that the node was offered a round of.
    * Of an attempt that the node took part in, the round was charged by this attempt, or a later
      one where it was abandoned, as that part of such an event as was offered, or by a later one as
      a new event of that kind, with its q and its z: who charges less understates ε.
    * A round that is offered as a part of an event that was charged before is the next part of the
      last one that its run has charged.
    * The ε that is offered is not below the least that the charges which the offer counts and the
      offered round can cost at its δ; among them are all that this run made before this attempt.

    The last round of a run can only be checked when another follows: one that the budget did not
    admit, or that was given up, has no charge, and rightly so. What such rounds tell a dishonest
    server is bounded by `Consent.most_rounds_per_day` alone. What other runs charged after the
    offer was made is not in the ε that it says, but in `price_with`, by which the node decides.
    """
    charges: dict[tuple[str, int], list[ChargedRow]] = {}
    for row in examined.ledger.rows:
        charges.setdefault((row.run, row.round), []).append(row)
    taken = known.taken_part
    offered = [(part.run, part.round) for part in taken]
    if offer is not None:
        offered.append((offer.id.run, offer.id.round))
    reached: dict[str, int] = {}
    for run, number in (*charges, *offered):
        reached[run] = max(number, reached.get(run, 0))
    for run in dict.fromkeys(run for run, _ in offered):
        # Ends at the first gap, so there are no more steps than charges.
        for number in range(1, reached[run]):
            if (run, number) not in charges:
                raise UntrustedLedgerError(
                    f"round {number} of run {run!r} went on without a charge"
                )
    attempts: dict[tuple[str, int, int], list[TakenPart]] = {}
    for part in taken:
        attempts.setdefault((part.run, part.round, part.attempt), []).append(part)
    for (run, number, attempt), parts in attempts.items():
        rows = charges.get((run, number), [])
        # Where the offers of an attempt differed, the node has agreed to each.
        charged = any(_fits(row, each) for row in rows for each in parts)
        if number < reached[run] and not charged:
            event, which = parts[-1].event, parts[-1].part
            raise UntrustedLedgerError(
                f"attempt {attempt} at round {number} of run {run!r} was offered with "
                f"{event.sampling.text}, N = {event.sampling.population}, "
                f"z = {event.noise_multiplier}, as part {which} of its event; neither it nor one "
                "after it was charged so"
            )
    if offer is not None:
        _check_offered_part(examined, offer)
        _check_offered_epsilon(examined, offer)


def charged_already(examined: Examined, offer: Terms) -> str | None:
    """Why an offer comes after its charge, in one sentence, or None.

    If the node is not merely late, the server would release twice on one charge.
    """
    if len(_before(examined.ledger.rows, offer)) == len(examined.ledger.rows):
        return None
    what = f"attempt {offer.id.attempt} at round {offer.id.round} of run {offer.id.run!r}"
    return f"{what}, or one after it, is charged already"


def price_with(examined: Examined, offer: Terms) -> float:
    """ε at the examined δ of all charges and the offered round, by the accountant `tight`."""
    rows = examined.ledger.rows
    return _unless_seeded(rows, _loss_with(rows, offer, examined.delta))


def _unless_seeded(rows: Iterable[ChargedRow], loss: PrivacyLoss) -> float:
    """ε against those who may know the seed of a charge."""
    return math.inf if weakest_randomness(rows) is Randomness.SEEDED else loss.epsilon


def _fits(row: ChargedRow, part: TakenPart) -> bool:
    """Whether a charge of the round is by this attempt or a later one, and as it was offered."""
    charged, offered = row.event, part.event
    # A server that lost what it had begun, as by a restore, pays for a later attempt anew.
    anew = row.pays and row.attempt > part.attempt
    return (
        row.attempt >= part.attempt
        and (row.part == part.part or anew)
        and _kind(charged) == _kind(offered)
        and math.isclose(charged.noise_multiplier, offered.noise_multiplier, rel_tol=_ROUNDING)
    )


def _kind(event: RoundEvent) -> tuple[object, ...]:
    """All that decides what an event costs, but z."""
    of = event.sampling
    drawn = (
        of.policy,
        of.sampling_probability,
        of.relation,
        of.population,
        of.schedule,
        of.unit,
        of.examples_per_user,
    )
    return *drawn, event.strategy, event.selection


def _check_offered_part(examined: Examined, offer: Terms) -> None:
    """A part after the first costs nothing more, so it must be one that was paid and not used."""
    if offer.price.part:
        _paid(examined.ledger.rows, offer)


def _paid(rows: Sequence[ChargedRow], offer: Terms) -> ChargedRow:
    """The charge of the event that a round is a later part of."""
    price, at = offer.price, offer.id
    found = SeriesBook(_before(rows, offer)).last_of(at.run)
    if found is None or (found.charge.event, found.part) != (price.event, price.part):
        said = f"round {at.round} of run {at.run!r} is offered as part {price.part} of an event"
        raise UntrustedLedgerError(
            f"{said} that was charged before; no such part is left in the ledger"
        )
    return found.charge


def _check_offered_epsilon(examined: Examined, offer: Terms) -> None:
    said, delta, least = offer.price.epsilon_after, offer.price.delta, float("inf")
    counted, rows = offer.price.charges, examined.ledger.rows
    if counted > len(rows):
        raise UntrustedLedgerError(
            f"the offer counts {counted} charges; the ledger has {len(rows)}"
        )
    for row in _before(rows, offer)[counted:]:
        if row.run == offer.id.run:
            raise UntrustedLedgerError(f"the offer counts {counted} charges and leaves out {row}")
    # No finite ε holds at δ = 0, where there is a Gaussian; ε only grows where δ is smaller.
    if delta > 0.0:
        least = _loss_with(rows[:counted], offer, max(delta, events.LEAST_DELTA)).epsilon_low
    if not said >= least * (1.0 - _UNDERSTATED):
        cost = f"charges and offer cost at least {least}"
        raise UntrustedLedgerError(f"the server says ε = {said} at δ = {delta}, but {cost}")


def _before(rows: Sequence[ChargedRow], offer: Terms) -> Sequence[ChargedRow]:
    at = offer.id
    for number, row in enumerate(rows):
        if (row.run, row.round) == (at.run, at.round) and row.attempt >= at.attempt:
            return rows[:number]
    return rows


def _loss_with(rows: Iterable[ChargedRow], offer: Terms, delta: float) -> PrivacyLoss:
    # What belongs to an event that was charged before costs nothing more.
    more = [offer.price.event] if offer.price.part == 0 else []
    return _loss(rows, delta, *more)


def _loss(rows: Iterable[ChargedRow], delta: float, *more: RoundEvent) -> PrivacyLoss:
    try:
        loss = priced(events.merge_equal([*paid_events(rows), *more]), delta)
    except UnsupportedEventError as error:
        raise UntrustedLedgerError(f"what the ledger charges has no ε: {error}") from error
    except InvalidValueError:  # of the node's δ
        raise
    except (ArithmeticError, IndexError, ValueError, MemoryError) as error:
        # Events may be as extreme as whoever wrote them likes.
        raise UntrustedLedgerError(
            f"what the ledger charges has no ε: {type(error).__name__}"
        ) from error
    if loss.unit is not Unit.USER:
        raise UntrustedLedgerError(
            f"the ledger charges for each {loss.unit}; its ε says nothing of users"
        )
    return loss


def _in_daemon(work: Callable[[], Found]) -> Future[Found]:
    """Work in a thread that an interpreter that ends does not wait for."""
    found = Future[Found]()
    found.set_running_or_notify_cancel()  # from here on nobody can cancel it

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name="ledger check", daemon=True).start()
    return found


@dataclass
class LedgerVerifier:
    """Fetches what is new in the server's ledger, and checks all of it.

    What was verified before is kept in memory, so a node asks for the whole ledger once.
    """

    server: FederationStub
    journal: Journal
    backoff: Backoff
    _verified: ExportedLedger | None = None
    _checking: Future[Any] | None = None  # the newest check

    async def examined(
        self, welcome: Welcome, delta: float, offer: Terms | None = None
    ) -> Examined:
        """The ledger as it is now; raises one of DISBELIEF, or what `within_time` raises."""
        name, old = welcome.population_name, self._verified
        # Before asking: by what another process of the node remembers later, this may look old.
        known = self.journal.remembered(name)
        if old is not None and (old.population != name or known.head is None):
            old = None
        lines = await persist(
            lambda: self.server.fetch_ledger(None if old is None else old.head), self.backoff
        )
        if lines is None:
            raise _set_back(old.head) if old else UntrustedLedgerError("the server sends no ledger")

        def checked() -> Examined:
            found = examine(ExportedLedger.read(lines, old), welcome, known, delta)
            self.journal.remember_head(found.ledger.ledger_id, name, found.ledger.head)
            confirm(found, known, offer)
            return found

        found = await self.within_time(checked)
        self._verified = found.ledger
        return found

    async def within_time(self, check: Callable[[], Found]) -> Found:
        """What a check of the ledger finds; InvalidValueError if it takes too long.

        It takes seconds for a long ledger, in which the connection must stay alive, and may take
        hours for one that was made for that. There is one at a time, and none holds up the end of
        the node.
        """
        try:
            async with asyncio.timeout(_LONGEST_CHECK_SECONDS):
                while self._checking is not None and not self._checking.done():
                    await asyncio.wait([asyncio.wrap_future(self._checking)])
                checking = self._checking = _in_daemon(check)
                return await asyncio.wrap_future(checking)
        except TimeoutError as error:
            seconds = f"{_LONGEST_CHECK_SECONDS:g} seconds"
            raise InvalidValueError(f"the ledger takes more than {seconds} to check") from error

    def series_of(self, offer: RoundOffer) -> RoundSeries | None:
        """The series that an offer belongs to which was checked before; None: it is one round.

        UntrustedLedgerError where it would be the part of a series that is not in the ledger.
        """
        schedule, at = offer.price.event.sampling.schedule, offer.id
        if schedule is None:
            return None
        first: ChargedRow | RoundId = at
        if offer.price.part:
            first = _paid(() if self._verified is None else self._verified.rows, offer)
        return RoundSeries(at.run, first.round, first.attempt, schedule)


@dataclass(eq=False)
class OfferPolicy:
    """What a node asks of a round; without the ledger, the server's word on ε counts.

    Guarantees:
        * An offer is held to all that the proposal of its round was held to: it has the same terms
          in the same connection and is the first since the node agreed, or all is checked again.
        * One journal is of one population, unless the consent names those that it may be of.
        * No more sums are agreed to in a day than the consent says, whatever other processes of the
          node agree to.
        * With the ledger, no user is in more rounds of a series than was charged, or sooner again,
          whatever position a welcome gives it.
        * What is said to a proposal of an honest server depends on no user, draw or earlier answer.
    """

    journal: Journal
    consent: Consent
    verifier: LedgerVerifier | None
    id_digests: NDArray[np.int64]  # of the node's users, the k-th of whom has its k-th position
    _agreed: tuple[Welcome, Proposal] | None = None
    _checking: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def objection_to_proposal(self, welcome: Welcome, proposal: Proposal) -> str | None:
        """Why the node does not agree, in one sentence that says nothing of users, or None."""
        async with self._checking:
            self._agreed = None
            if objection := await self._objection_to_terms(welcome, proposal):
                return objection
            # Now, and not when users are drawn: of which populations it has a part is not secret.
            self.journal.remember_population(welcome.population_name)
            self._agreed = (welcome, Proposal.of(proposal, proposal.price))
        # Were no answer ever left for a day, rounds without this node would be charged in vain.
        return self.consent.objection_today(0)

    async def objection(self, welcome: Welcome, offer: RoundOffer) -> str | None:
        """Why the node does not take part, in one sentence that says nothing of users, or None."""
        async with self._checking:
            agreed, self._agreed = self._agreed, None
            known = agreed == (welcome, Proposal.of(offer, offer.price))
            if not known and (objection := await self._objection_to_terms(welcome, offer)):
                return objection
        if unfit := misfit(welcome, offer):
            return unfit
        if self.journal.answered(welcome.population_name, offer):
            return "this offer was answered before"
        now = datetime.now(UTC)
        return self._objection_at(now, welcome) or self._objection_to_users(welcome, offer)

    def record(self, welcome: Welcome, offer: RoundOffer) -> str | None:
        """Record that an offer is answered with a sum, or say why it must not be."""
        now, name = datetime.now(UTC), welcome.population_name
        return self.journal.record(name, offer, now, partial(self._objection_at, now, welcome))

    def _objection_at(self, now: datetime, welcome: Welcome) -> str | None:
        """Why the node gives no sum now, by all that it has given."""
        today = self.journal.answers_since(now - _DAY)
        return self._objection_to_population(welcome) or self.consent.objection_today(today)

    def _objection_to_population(self, welcome: Welcome) -> str | None:
        known = self.journal.populations()
        return self.consent.objection_to_population(welcome.population_name, known)

    def _objection_to_users(self, welcome: Welcome, offer: RoundOffer) -> str | None:
        """Why a series cannot ask these users, after which nobody is asked more than was charged.

        This part of what was charged a node can see for itself, and need not believe.
        """
        try:
            series = None if self.verifier is None else self.verifier.series_of(offer)
        except UntrustedLedgerError as error:
            _log.error("the ledger cannot be believed: %.400s", error)
            return "the ledger cannot be believed"
        if series is None:
            return None
        name, part = welcome.population_name, offer.price.part
        # Not positions: a dishonest server would give a user another one in each connection.
        asked = self.id_digests[np.searchsorted(welcome.users, offer.users)]
        if self.journal.admit(name, series, part, asked):
            return None
        _log.error("the server asks users more often than it has charged: %s", series)
        return "users would take part more often, or sooner again, than the event says"

    async def _objection_to_terms(self, welcome: Welcome, offer: Terms) -> str | None:
        if unfit := (
            misfit(welcome, offer)
            or self.consent.objection_to_task(welcome)
            or self.consent.objection_to_run(offer.id.run)
            or self._objection_to_population(welcome)
        ):
            return unfit
        epsilon: float | None = None
        if self.verifier is not None:
            try:
                delta = self.consent.delta_for(welcome.population)
                examined = await self.verifier.examined(welcome, delta, offer)
                if late := charged_already(examined, offer):
                    return late
                epsilon = await self.verifier.within_time(partial(price_with, examined, offer))
            except DISBELIEF as error:
                _log.error("the ledger cannot be believed: %.400s", error)
                return "the ledger cannot be believed"
            of = epsilon, examined.delta, offer.price.event.sampling.relation
            _log.info("after this round ε would be %.6g at δ = %g, for %s neighbours", *of)
        return self.consent.objection(offer, epsilon)

    async def report(self, welcome: Welcome) -> None:
        """Check the ledger, if the node does, and log what it has come to."""
        if self.verifier is None:
            return
        if other := self._objection_to_population(welcome):
            _log.warning("the ledger is not read: %s", other)
            return
        # The server ends a call for the ledger when the node makes another.
        async with self._checking:
            found = await self.verifier.examined(
                welcome, self.consent.delta_for(welcome.population)
            )
        held = len(found.ledger.rows), found.epsilon, found.delta, found.relation
        _log.info("the ledger holds %d charges: ε = %.6g at δ = %g, for %s neighbours", *held)
