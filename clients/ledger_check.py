"""A node's decision to take part in an offered round, from its consent and the server's ledger.

The check detects a ledger that was set back, rewritten or replaced, a round without a charge or
with a charge that differs from its offer, and an understated ε. It cannot detect a server that lies
about its noise.
"""

import asyncio
import logging
import math
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeVar

import numpy as np
from cryptography import x509
from numpy.typing import NDArray
from scipy.special import betainc

from fedpriv.accounting.accountants import PrivacyLoss, sampling_text
from fedpriv.accounting.accountants import epsilon as priced
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
from fedpriv.ledger.ledger import ChargedRow, ExportedLedger, SeriesBook, paid_events
from fedpriv.wire import Proposal, RoundId, RoundOffer, Terms, Welcome
from fedpriv.wire.naming import binding_of, by_server, certificate_of, issued_by, node_named

# Errors for a ledger that cannot be believed.
DISBELIEF = (UntrustedLedgerError, LedgerError, WireError)
_ROUNDING = 1e-9  # relative error of noise multipliers that were computed in different ways
_UNDERSTATED = 1e-6  # relative error of ε that is accepted
_IMPROBABLE = 1e-9  # probability of the draws of an honest server that are refused
_MOST_OUTSTANDING = 3  # sums of a node without a charge, over all runs of a population
# Policies under which the server draws by chance, and users may be drawn in any number of rounds.
_POLICY = events.SamplingPolicy
_COINS = (_POLICY.POISSON, _POLICY.FIXED_SIZE, _POLICY.BANDED_POISSON)
_DAY = timedelta(days=1)
_TWO_LEDGERS = "the server has shown two ledgers in this run"
_LONGEST_CHECK_SECONDS = 120.0
_log = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Examined:
    """A ledger that has passed `examine`."""

    ledger: ExportedLedger
    delta: float
    # Of all charges, at delta, by the accountant `tight`; inf also if a charge was seeded.
    epsilon: float
    relation: events.NeighbouringRelation  # under which all charges are priced


def examine(
    ledger: ExportedLedger, welcome: Welcome, history: Remembered, delta: float
) -> Examined:
    """Check that a ledger continues the one that the node remembers; return it with its ε.

    UntrustedLedgerError: the ledger is of another population, was replaced, set back or rewritten,
    or cannot be priced.
    """
    name = welcome.population_name
    if ledger.population != name:
        raise UntrustedLedgerError(f"the ledger is not of population {name!r}")
    if history.ledger_id not in (None, ledger.ledger_id):
        now = f"and now has {ledger.ledger_id}: what was spent before is not in it"
        raise UntrustedLedgerError(f"population {name!r} had the ledger {history.ledger_id}, {now}")
    if history.head is not None and not ledger.contains(history.head):
        raise _set_back(history.head)
    loss = _loss(ledger.rows, delta)
    return Examined(ledger, delta, _unless_seeded(ledger.rows, loss), loss.relation)


def _set_back(head: Head) -> UntrustedLedgerError:
    head_text = f"its former head of {head.count} charges with hash {head.hash}"
    return UntrustedLedgerError(
        f"the ledger does not contain {head_text}: it was set back or rewritten"
    )


def confirm(examined: Examined, history: Remembered, offer: Terms | None = None) -> None:
    """Raise UntrustedLedgerError if the server omitted a charge, or understates its offer's price.

    A round is closed when a later round of its run was charged, or was offered to this node. For
    each run in which the node was offered a round, the following must hold:

    * Every closed round was charged, whether or not it included users of the node.
    * If the node took part in an attempt at a closed round, the round was charged by this attempt
      or a later one, which replaced it, as the same part of the offered event. A later attempt may
      instead have charged a new event of the same kind, q and z. A server that charges less
      understates ε.
    * A round that is offered as part of an event that is already charged is the next part of the
      event that its run has charged last.
    * The offer counts all charges that its run made before this attempt. The ε that it states is
      not below the least possible cost, at its δ, of the counted charges and the offered round.

    The last round of a run can be checked only when another follows, because it has no charge if
    another run spent the budget while it was interrupted. `OfferPolicy` bounds the number of such
    sums. Charges that other runs make after the offer are not part of its ε, but they are part of
    `price_with`, by which the node decides.
    """
    charges = _by_round(examined.ledger.rows)
    offered = [(part.run, part.round) for part in history.taken_part]
    if offer is not None:
        offered.append((offer.id.run, offer.id.round))
    newest_round: dict[str, int] = {}  # number of the newest round by run
    for run, number in (*charges, *offered):
        newest_round[run] = max(number, newest_round.get(run, 0))
    for run in dict.fromkeys(run for run, _ in offered):
        # This ends at the first gap, so it takes at most one step per charge.
        for number in range(1, newest_round[run]):
            if (run, number) not in charges:
                raise UntrustedLedgerError(
                    f"round {number} of run {run!r} went on without a charge"
                )
    for part in history.taken_part:
        run, number, event = part.run, part.round, part.event
        rows = charges.get((run, number), [])
        if number < newest_round[run] and not any(_fits(row, part) for row in rows):
            raise UntrustedLedgerError(
                f"attempt {part.attempt} at round {number} of run {run!r} was offered with "
                f"{sampling_text(event.sampling)}, N = {event.sampling.population}, "
                f"z = {event.noise_multiplier}, as part {part.part} of its event; neither it nor "
                "one after it was charged so"
            )
    if offer is not None:
        if offer.price.part:  # it costs nothing more, so it must be paid and unused
            _paid(examined.ledger.rows, offer)
        _check_offered_epsilon(examined, offer)


def unpaid(rows: Iterable[ChargedRow], taken_part: Iterable[TakenPart]) -> list[TakenPart]:
    """Return the attempts whose sum is outstanding: no charge is left that pays for it.

    A charge pays for one sum of the node: of its own attempt, or of an earlier attempt at the round
    that it replaced. So the number of sums that the node has sent exceeds the number of charges by
    at most the length of this list.
    """
    charges, outstanding = _by_round(rows), []
    # The later an attempt, the fewer charges pay for it.
    for part in sorted(taken_part, key=lambda part: part.attempt, reverse=True):
        round_charges = charges.get((part.run, part.round), [])
        index = next((i for i, row in enumerate(round_charges) if _fits(row, part)), None)
        if index is None:
            outstanding.append(part)
        else:
            del round_charges[index]
    return outstanding


def _by_round(rows: Iterable[ChargedRow]) -> dict[tuple[str, int], list[ChargedRow]]:
    charges: dict[tuple[str, int], list[ChargedRow]] = {}
    for row in rows:
        charges.setdefault((row.run, row.round), []).append(row)
    return charges


def drawn_too_often(
    rows: Sequence[ChargedRow], taken_part: Sequence[TakenPart], users: int
) -> bool:
    """Return whether a node with this many users was asked more often than was charged.

    `taken_part` includes the present offer. A user has one trial in each attempt that was charged
    or is outstanding; with groups that take turns, in the first of each turn. By the event it is
    drawn with probability q there. An honest server's offers to the node in n trials are therefore
    at most a sum S of n independent coins: in a cohort of fixed size, the number of the node's
    users is hypergeometric, which has the law of such a sum (Vatutin and Mikhailov 1982). With mean
    μ, P[S ≥ k] is at most that of the binomial with n trials of probability μ/n, for k ≥ μ + 1
    (Hoeffding 1956), and equal to it if all q are the same; for smaller k, neither is
    improbable. Events whose q is within a factor of two are tested together, so neither many
    different q nor charges at a larger q hide anything. The level is divided among these tests.
    It applies to one check; over T rounds, a false alarm is at most T times as probable. Nothing is
    tested if every user takes part, or if the journal counts (`admit`).
    """
    trials, draws, mean = Counter[int](), Counter[int](), defaultdict[int, float](float)
    chances = [(row.event, row.part) for row in rows]
    chances += [(part.event, part.part) for part in unpaid(rows, taken_part)]
    for event, number in chances:
        sampling = event.sampling
        turn = 1 if sampling.schedule is None else sampling.schedule.separation
        if _tosses_coins(event) and number % turn == 0:
            trials[_binade(sampling)] += users
            mean[_binade(sampling)] += users * sampling.sampling_probability
    for part in taken_part:
        if _tosses_coins(part.event):
            draws[_binade(part.event.sampling)] += part.asked
    level = _IMPROBABLE / max(1, len(draws))
    return any(tail(k, trials[group], mean[group]) < level for group, k in draws.items())


def tail(asked: int, trials: int, mean: float) -> float:
    """Return the probability that a binomial variable of this mean is at least `asked`."""
    if not 0 < asked <= trials:
        return float(asked == 0)
    return float(betainc(asked, trials - asked + 1, min(1.0, mean / trials)))


def _tosses_coins(event: events.RoundEvent) -> bool:
    return event.sampling.policy in _COINS and event.secure_sum is None


def _binade(sampling: events.SamplingEvent) -> int:
    return math.frexp(sampling.sampling_probability)[1]


def charged_already(examined: Examined, offer: Terms) -> str | None:
    """Return a sentence if the attempt of an offer, or a later one, is charged; else None.

    In that case the node is late, or the server would release twice on one charge.
    """
    if len(_before(examined.ledger.rows, offer)) == len(examined.ledger.rows):
        return None
    attempt = f"attempt {offer.id.attempt} at round {offer.id.round} of run {offer.id.run!r}"
    return f"{attempt}, or one after it, is charged already"


def price_with(examined: Examined, offer: Terms) -> float:
    """Return ε of all charges and the offered round, at the examined δ, by the accountant `tight`.

    It is infinite if a charge was seeded. UntrustedLedgerError: the charges cannot be priced.
    """
    rows = examined.ledger.rows
    return _unless_seeded(rows, _loss_with(rows, offer, examined.delta))


def _unless_seeded(rows: Iterable[ChargedRow], loss: PrivacyLoss) -> float:
    seeded = any(row.randomness is events.Randomness.SEEDED for row in rows)
    return math.inf if seeded else loss.epsilon


def _fits(row: ChargedRow, part: TakenPart) -> bool:
    """Return whether a charge pays for an offer: by the same attempt or a later one, as offered."""
    charge, offer = row.event, part.event
    if (row.attempt, row.part, charge) == (part.attempt, part.part, offer):
        return True  # the usual case, without copies
    # A server that lost its progress, such as after a restore, pays again for a later attempt.
    pays_anew = row.pays and row.attempt > part.attempt
    return (
        row.attempt >= part.attempt
        and (row.part == part.part or pays_anew)
        and _kind(charge) == _kind(offer)
        and math.isclose(charge.noise_multiplier, offer.noise_multiplier, rel_tol=_ROUNDING)
    )


def _kind(event: events.RoundEvent) -> tuple[object, ...]:
    """Return everything that determines the cost of an event, except z."""
    return replace(event.sampling, canaries=0), event.strategy, event.selection


def _paid(rows: Sequence[ChargedRow], offer: Terms) -> ChargedRow:
    """Return the charge that paid for the offered later part of an event.

    UntrustedLedgerError: there is none, or the part was used before.
    """
    price, round_id = offer.price, offer.id
    series = SeriesBook(_before(rows, offer)).last_of(round_id.run)
    if series is None or (series.charge.event, series.part) != (price.event, price.part):
        offered = f"round {round_id.round} of run {round_id.run!r} is offered as part {price.part}"
        raise UntrustedLedgerError(
            f"{offered} of an event that was charged before; no such part is left in the ledger"
        )
    return series.charge


def _check_offered_epsilon(examined: Examined, offer: Terms) -> None:
    """Raise UntrustedLedgerError if the offer omits charges of its run or understates ε."""
    epsilon, delta, minimum = offer.price.epsilon_after, offer.price.delta, float("inf")
    charges, rows = offer.price.charges, examined.ledger.rows
    if offer.head is not None and not examined.ledger.contains(offer.head.head):
        raise UntrustedLedgerError(f"the ledger does not contain the proposed {offer.head.head}")
    if charges > len(rows):
        raise UntrustedLedgerError(
            f"the offer counts {charges} charges; the ledger has {len(rows)}"
        )
    for row in _before(rows, offer)[charges:]:
        if row.run == offer.id.run:
            raise UntrustedLedgerError(f"the offer counts {charges} charges and leaves out {row}")
    # At δ = 0, the Gaussian mechanism has no finite ε. A smaller δ only increases ε.
    if delta > 0.0:
        minimum = _loss_with(rows[:charges], offer, max(delta, events.LEAST_DELTA)).epsilon_low
    if not epsilon >= minimum * (1.0 - _UNDERSTATED):
        cost = f"charges and offer cost at least {minimum}"
        raise UntrustedLedgerError(f"the server says ε = {epsilon} at δ = {delta}, but {cost}")


def _before(rows: Sequence[ChargedRow], offer: Terms) -> Sequence[ChargedRow]:
    """Return the charges before the first one of the offered attempt or a later attempt."""
    attempt = offer.id
    for number, row in enumerate(rows):
        same_round = (row.run, row.round) == (attempt.run, attempt.round)
        if same_round and row.attempt >= attempt.attempt:
            return rows[:number]
    return rows


def _loss_with(rows: Iterable[ChargedRow], offer: Terms, delta: float) -> PrivacyLoss:
    # A later part of an event was paid with the first.
    new_events = [offer.price.event] if offer.price.part == 0 else []
    return _loss(rows, delta, *new_events)


def _loss(rows: Iterable[ChargedRow], delta: float, *new_events: events.RoundEvent) -> PrivacyLoss:
    try:
        loss = priced(events.merge_equal([*paid_events(rows), *new_events]), delta)
    except UnsupportedEventError as error:
        raise UntrustedLedgerError(f"what the ledger charges has no ε: {error}") from error
    except InvalidValueError:  # the node's own δ is wrong
        raise
    except (ArithmeticError, IndexError, ValueError, MemoryError) as error:
        # A dishonest server may write arbitrarily extreme events.
        raise UntrustedLedgerError(
            f"what the ledger charges has no ε: {type(error).__name__}"
        ) from error
    if loss.unit is not events.Unit.USER:
        raise UntrustedLedgerError(
            f"the ledger charges for each {loss.unit}; its ε says nothing of users"
        )
    return loss


def _in_daemon(work: Callable[[], Result]) -> Future[Result]:
    """Run `work` in a daemon thread, for which the interpreter does not wait at its end."""
    future = Future[Result]()
    future.set_running_or_notify_cancel()  # so that it cannot be cancelled

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="ledger check", daemon=True).start()
    return future


@dataclass
class LedgerVerifier:
    """Fetches new records of the server's ledger, and checks the whole ledger.

    The verified ledger is kept in memory, so the node fetches each record once.
    """

    server: FederationStub
    journal: Journal
    backoff: Backoff
    _verified: ExportedLedger | None = None
    _checking: Future[Any] | None = None  # the newest check

    async def examined(
        self, welcome: Welcome, delta: float, offer: Terms | None = None
    ) -> Examined:
        """Fetch and check the ledger, also against an offer; one of DISBELIEF if it is not honest.

        InvalidValueError as for `within_time`; AioRpcError if the ledger cannot be fetched.
        """
        name, copy = welcome.population_name, self._verified
        # Before the call: another process of the node may remember a newer head meanwhile.
        history = self.journal.remembered(name)
        if copy is not None and (copy.population != name or history.head is None):
            copy = None
        lines = await persist(
            lambda: self.server.fetch_ledger(None if copy is None else copy.head), self.backoff
        )
        if lines is None:
            raise _set_back(copy.head) if copy else UntrustedLedgerError("the server has no ledger")

        def check() -> Examined:
            examined = examine(ExportedLedger.read(lines, copy), welcome, history, delta)
            self.journal.remember_head(examined.ledger.ledger_id, name, examined.ledger.head)
            confirm(examined, history, offer)
            outstanding = unpaid(examined.ledger.rows, history.taken_part)
            paid_parts = [p for p in history.taken_part if not p.charged and p not in outstanding]
            self.journal.settle(name, paid_parts)
            return examined

        examined = await self.within_time(check)
        self._verified = examined.ledger
        return examined

    async def within_time(self, check: Callable[[], Result]) -> Result:
        """Return the result of a check of the ledger; InvalidValueError if it takes too long.

        A check of a long ledger takes seconds, and the event loop must keep the connection alive
        meanwhile; a malicious ledger could take hours. Checks run one at a time, and do not delay
        the end of the node.
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

    async def drawn_too_often(self, population_name: str, offer: RoundOffer, users: int) -> bool:
        """Return whether the node's users are drawn too often; InvalidValueError as above."""
        rows, price = () if self._verified is None else self._verified.rows, offer.price
        key = offer.id.run, offer.id.round, offer.id.attempt
        part = TakenPart(*key, price.event, price.part, offer.users.size)

        parts = self.journal.remembered(population_name).taken_part
        return await self.within_time(partial(drawn_too_often, rows, (*parts, part), users))

    def series_of(self, offer: RoundOffer) -> RoundSeries | None:
        """Return the series to which a checked offer belongs; None if its event is one round.

        UntrustedLedgerError: the offer is a later part of a series that the ledger does not have.
        """
        schedule = offer.price.event.sampling.schedule
        if schedule is None:
            return None
        first_attempt: ChargedRow | RoundId = offer.id
        if offer.price.part:
            first_attempt = _paid(() if self._verified is None else self._verified.rows, offer)
        return RoundSeries(offer.id.run, first_attempt.round, first_attempt.attempt, schedule)


@dataclass(eq=False)
class OfferPolicy:
    """Decides whether a node takes part; without a verifier, it believes the server's ε.

    Guarantees:
        * An offer passes all checks of proposals. They are repeated, unless the offer has the same
          terms in the same connection, and is the first since the node agreed to the proposal.
        * A journal belongs to one population, unless the consent names several.
        * The node sends one sum for an attempt, and no more in a day than the consent allows, even
          if several processes of the node run at once.
        * With a verifier, the node never has more than three sums without a charge in the ledger.
        * With a verifier, no user takes part in more rounds of a series than were charged, or again
          too soon, and the node's users are not drawn more often than the charged sampling
          explains, no matter which positions the server assigns to users.
        * If the server has a certificate, it signs the head of the ledger in each proposal, and the
          node sends no sum if a node of the roster was shown another head. After that, the node
          takes no more part in the run, and its journal holds both signatures of the server.
        * The vote on a proposal of an honest server does not depend on users, draws or earlier
          answers. Reasons that depend on these are given only in answers to offers.
    """

    journal: Journal
    consent: Consent
    verifier: LedgerVerifier | None
    id_digests: NDArray[np.int64]  # of the node's users, in the order of their positions
    authorities: Sequence[x509.Certificate] = ()  # none in plain text
    _agreed: tuple[Welcome, Proposal] | None = None
    _knowing: str = ""  # names of nodes in the last log line
    _checking: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def objection_to_proposal(self, welcome: Welcome, proposal: Proposal) -> str | None:
        """Return why the node votes against a proposal, in one sentence about no user, or None.

        InvalidValueError: the journal or the ledger cannot be checked; AioRpcError: it cannot be
        fetched.
        """
        async with self._checking:
            self._agreed = None
            if objection := await self._objection_to_terms(welcome, proposal):
                return objection
            # Before users are drawn: which populations the node belongs to is not secret.
            self.journal.remember_population(welcome.population_name)
            self._agreed = (welcome, proposal)
        # A node that consents to no sum at all must not make up the least number of nodes.
        return self.consent.objection_today(0)

    async def objection(self, welcome: Welcome, offer: RoundOffer) -> str | None:
        """Return why the node declines an offer, in one sentence about no user, or None.

        Errors as for `objection_to_proposal`.
        """
        async with self._checking:
            agreed, self._agreed = self._agreed, None
            checked = agreed == (welcome, Proposal.of(offer, offer.price))
            if not checked and (objection := await self._objection_to_terms(welcome, offer)):
                return objection
        if unfit := misfit(welcome, offer):
            return unfit
        if self.journal.answered(welcome.population_name, offer.id):
            return "this attempt was answered before"
        if objection := self._objection_at(datetime.now(UTC), welcome):
            return objection
        if self.verifier is not None:
            draws = welcome.population_name, offer, self.id_digests.size
            if await self.verifier.drawn_too_often(*draws):
                _log.error("the server draws users more often than it has charged for")
                return "users are drawn more often than the charged sampling probability explains"
        return self._objection_to_users(welcome, offer)

    def countersigned(self, welcome: Welcome, offer: RoundOffer) -> dict[str, x509.Certificate]:
        """Return the certificates of the roster's nodes, which were shown the same head, by name.

        UntrustedLedgerError: a node was shown another head. InvalidValueError: a countersignature
        is not of this attempt, or not by a certificate of the node.
        """
        name, attempt, certificates = welcome.population_name, offer.id, {}
        for other in offer.roster:
            binding = binding_of(name, attempt, offer.price.event, other.head)
            certificate, node = certificate_of(other, binding), f"node {other.node!r}"
            issued = not self.authorities or issued_by(self.authorities, certificate)
            if not issued or node_named(certificate, node) != other.node:
                raise InvalidValueError(f"{node} has not signed by a certificate of its own")
            mine, theirs = offer.head, other.head
            if mine != theirs:
                signed = theirs and by_server(theirs, name, attempt, self.authorities)
                if mine is None or theirs is None or not signed or mine.head == theirs.head:
                    raise InvalidValueError(f"{node} has signed what nobody has proposed")
                self.journal.record_equivocation(name, attempt, mine, other)
                heads = mine.head, node, theirs.head
                _log.error("two ledgers: the server shows this node %s and %s %s", *heads)
                raise UntrustedLedgerError(_TWO_LEDGERS)
            certificates[other.node] = certificate
        if (node_names := ", ".join(certificates) or "none") != self._knowing:
            _log.info("nodes that know this ledger: %.400s", node_names)
            self._knowing = node_names
        return certificates

    def record(self, welcome: Welcome, offer: RoundOffer) -> str | None:
        """Record that an offer is answered with a sum; return why it must not be, or None."""
        now, name = datetime.now(UTC), welcome.population_name
        return self.journal.record(name, offer, now, partial(self._objection_at, now, welcome))

    def _objection_at(self, now: datetime, welcome: Welcome) -> str | None:
        """Return why the node sends no sum now, given the sums it has sent, or None."""
        today = self.journal.answers_since(now - _DAY)
        if reason := self._objection_to_population(welcome) or self.consent.objection_today(today):
            return reason
        outstanding = self.journal.outstanding(welcome.population_name)
        if self.verifier is None or outstanding < _MOST_OUTSTANDING:
            return None
        return f"the ledger has no charge for {outstanding} sums of the node; it sends no more"

    def _objection_to_population(self, welcome: Welcome) -> str | None:
        names = self.journal.populations()
        return self.consent.objection_to_population(welcome.population_name, names)

    def _objection_to_users(self, welcome: Welcome, offer: RoundOffer) -> str | None:
        """Record that a series asks these users; return why it must not ask them, or None.

        Thus the node itself checks that no user takes part more often than was charged.
        """
        series = None if self.verifier is None else self.verifier.series_of(offer)
        if series is None:
            return None
        name, part = welcome.population_name, offer.price.part
        # Not positions: a dishonest server could give users other positions in each connection.
        users = self.id_digests[np.searchsorted(welcome.users, offer.users)]
        if self.journal.admit(name, series, part, users):
            return None
        _log.error("the server asks users more often than it has charged: %s", series)
        return "users would take part more often, or sooner again, than the event says"

    async def _objection_to_terms(self, welcome: Welcome, offer: Terms) -> str | None:
        if unfit := (
            self._objection_to_head(welcome, offer)
            or misfit(welcome, offer)
            or self.consent.objection_to_task(welcome)
            or self.consent.objection_to_settings(welcome, offer)
            or self._objection_to_population(welcome)
            or self.consent.objection_to_nodes(welcome, offer)
        ):
            return unfit
        epsilon: float | None = None
        if self.verifier is not None:
            try:
                delta = self.consent.delta_for(welcome.population)
                examined = await self.verifier.examined(welcome, delta, offer)
                if reason := charged_already(examined, offer):
                    return reason
                epsilon = await self.verifier.within_time(partial(price_with, examined, offer))
            except DISBELIEF as error:
                _log.error("the ledger cannot be believed: %.400s", error)
                return "the ledger cannot be believed"
            price = epsilon, examined.delta, offer.price.event.sampling.relation
            _log.info("after this round ε would be %.6g at δ = %g, for %s neighbours", *price)
        return self.consent.objection(offer, epsilon)

    def _objection_to_head(self, welcome: Welcome, terms: Terms) -> str | None:
        name, head = welcome.population_name, terms.head
        if self.journal.equivocated(name, terms.id.run):
            return _TWO_LEDGERS
        if not self.authorities or (head is None and self.verifier is None):
            return None
        if head is None or not by_server(head, name, terms.id, self.authorities):
            return "the server has not signed the head of its ledger"
        return None

    async def examined(self, welcome: Welcome) -> Examined | None:
        """Check the ledger, if there is a verifier; errors as for `LedgerVerifier.examined`."""
        if self.verifier is None:
            return None
        # One call at a time: the server ends a call for the ledger when the node makes another.
        async with self._checking:
            return await self.verifier.examined(welcome, self.consent.delta_for(welcome.population))

    async def report(self, welcome: Welcome) -> None:
        """Check the ledger and log its ε, if there is a verifier; errors as `examined`."""
        if objection := self._objection_to_population(welcome):
            _log.warning("the ledger is not read: %s", objection)
        elif (examined := await self.examined(welcome)) is not None:
            words = len(examined.ledger.rows), examined.epsilon, examined.delta, examined.relation
            _log.info("the ledger holds %d charges: ε = %.6g at δ = %g, for %s neighbours", *words)
