"""The private round of training and analytics: draw, collect, charge, add noise, release.

`private_round` is the only caller of `release`, and `release` is the only caller of the code that
draws noise (`tests/privacy/test_round.py`), except for nodes of a `secure_round`, which draw their
users and shares of the noise. Between the draw and the charge, the round collects the `PartialSum`s
of its users, or a masked sum.

If a mechanism's event is one round, the round draws with its own keys, which are not stored. A
series of rounds has one key throughout. It determines the keys of all cohorts and of noise that is
correlated over the rounds: the rounds of each user are drawn once for the whole series, and a
server that stops in the middle must continue with the series it has paid for. The participation
record keeps that key until the series is over. The key is as secret as the cohorts next to it:
anyone who has it can subtract correlated noise. Independent noise is fresh even within a series, so
that it is never drawn twice, even if files are restored to an earlier state.
"""

import hmac
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import index
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from fedpriv.errors import BudgetExceededError, LedgerError
from fedpriv.ledger.events import PrivacyBudget, Randomness, RoundEvent
from fedpriv.ledger.ledger import Charge, Ledger, OpenSeries, ProposedCharge, event_from, event_text
from fedpriv.ledger.participation import Attempt, ParticipationRecord
from fedpriv.privacy.clipping import Clipping, IntegerVector
from fedpriv.privacy.gaussian_mechanism import GaussianMechanism
from fedpriv.privacy.layout import FloatVector
from fedpriv.privacy.noise import Entropy
from fedpriv.privacy.sampling import Users
from fedpriv.support.disk import with_room

_log = logging.getLogger(__name__)
_NOBODY = np.empty(0, np.int64)


@dataclass(frozen=True)
class RoundAttempt:
    """One attempt at one round of one run; the purposes of keys contain it."""

    run: str
    round: int  # from 1
    attempt: int  # from 0
    first: bool = False  # True if the run made the first charge of its ledger

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
    """Draws one round's cohort and noise, each once."""

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


@dataclass(frozen=True)
class PartialSum:
    """Sum of the clipped contributions of some users of the cohort; secret until it is noised."""

    node: str  # the sender; a second partial sum from the same node in a round is dropped
    users: int  # number of contributions in the sum
    total: IntegerVector  # [D], in steps of each group's granularity
    weight: int  # sum of these users' weights in units of 1/c; c is the clipping's `weight_cap`


def merge_sums(node: str, partials: Iterable[PartialSum], dimension: int) -> PartialSum:
    """Add disjoint partial sums of `dimension` numbers; with none, the sum is zero."""
    total = np.zeros(dimension, np.int64)
    users = weight = 0
    for partial in partials:
        total += partial.total
        users += partial.users
        weight += partial.weight
    return PartialSum(node, users, total, weight)


def add_up(partials: Iterable[PartialSum], clipping: Clipping, users: int) -> PartialSum:
    """Add the valid partial sums of a cohort; `users` is the size of the cohort.

    A partial sum counts as zero if its node already sent one, if it has the wrong shape or is not
    int64, if a group's norm exceeds (its users) × S_g or, for a weighted group, (their weight) ×
    S_g, if its weight is not from 0 to c × (its users), or if it would bring the number of
    contributors above the size of the cohort. Nothing here changes a fixed denominator.
    """
    return merge_sums("cohort", _valid(partials, clipping, users), clipping.layout.dimension)


def _valid(partials: Iterable[PartialSum], clipping: Clipping, users: int) -> Iterator[PartialSum]:
    senders: set[str] = set()
    contributed = 0
    for partial in partials:
        repeated = partial.node in senders
        senders.add(partial.node)
        users_fit = 0 <= partial.users <= users - contributed
        weight_fits = 0 <= partial.weight <= partial.users * clipping.weight_cap
        valid = not repeated and users_fit and weight_fits
        if not valid or not clipping.admits(partial.total, partial.users, partial.weight):
            # A node's name may identify its only user, and who was drawn is secret.
            _log.warning("a partial sum counts as zero: it is not valid")
            continue
        contributed += partial.users
        yield partial


@dataclass(frozen=True)
class _Terms:
    """Terms of an attempt's charge, as in `ProposedCharge`; known before its cohort is drawn."""

    event: RoundEvent
    randomness: Randomness
    part: int = 0
    series: int | None = None

    @property
    def text(self) -> str:
        """The terms as JSON."""
        return json.dumps(vars(self) | {"event": event_text(self.event)})

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a `text`."""
        fields = json.loads(text)
        return cls(**fields | {"event": event_from(fields["event"])})

    def charge(self, place: Attempt, commitment: str) -> ProposedCharge:
        """Return the charge of an attempt with this commitment to its cohort."""
        return ProposedCharge(*place, cohort_commitment=commitment, **vars(self))


@dataclass(frozen=True)
class PrivacyRecords:
    """The records of all releases about a population, and the budget that limits them."""

    ledger: Ledger  # all charges; public
    participation: ParticipationRecord  # all cohorts; secret and never exported
    budget: PrivacyBudget  # limit on all runs of the ledger together
    # Draws of the current series, by its key, so that they are computed once.
    _series_draws: dict[bytes, SeriesDraws] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    @contextmanager
    def open(
        cls,
        ledger: Path,
        participation: Path,
        population: str,
        budget: PrivacyBudget,
        *,
        resuming: bool = False,
    ) -> Iterator[Self]:
        """Open or create ledger and participation record, and close both on exit.

        Raises LedgerError if one of them is missing, if both are missing when a run is resumed, or
        if the ledger lacks a charge that the record has seen.
        """
        # The record is checked first, since the ledger is created first.
        if (participation.exists() or resuming) and not ledger.exists():
            raise LedgerError(f"ledger {ledger} is missing; restore it from a backup")
        with Ledger.open_or_create(ledger, population) as opened:
            if (opened.head.count or resuming) and not participation.exists():
                raise LedgerError(
                    f"participation record {participation} is missing; restore it from a backup"
                )
            with ParticipationRecord.open_or_create(participation) as record:
                seen_head = record.ledger_head
                if seen_head is not None and not opened.contains_head(seen_head):
                    raise LedgerError(
                        f"ledger {ledger} lacks charges that {participation} has seen, up to head "
                        f"{seen_head.count}:{seen_head.hash}: it was set back or replaced"
                    )
                record.keep_head(opened.head)
                yield cls(opened, record, budget)

    def refuse_if_beyond(self, event: RoundEvent, what: str) -> None:
        """Raise BudgetExceededError before users are asked; `charge` checks again, atomically."""
        if not self.ledger.epsilon(self.budget, event) <= self.budget.epsilon:
            raise BudgetExceededError(
                f"{what} would pass the budget of ε = {self.budget.epsilon} at "
                f"δ = {self.budget.delta}; no user was asked and nothing charged"
            )

    def charge(self, proposed: ProposedCharge) -> Charge:
        """Charge an attempt within the budget, and record the ledger's new head."""
        charge = with_room(lambda: self.ledger.charge(proposed, self.budget))
        commitment = proposed.cohort_commitment
        with_room(lambda: self.participation.keep_head(self.ledger.head, commitment))
        return charge

    def settle(self, run: str) -> None:
        """Charge attempts that the run drew but did not charge, for example because it was killed.

        Raises BudgetExceededError if other runs have spent the budget that this needs: the run is
        over.
        """
        for number, attempt, commitment, text in self.participation.drawn(run):
            if not self.ledger.has_charge(run, number, attempt):
                _log.warning("run %r drew round %d uncharged; it is charged now", run, number)
                terms, paid = _Terms.parse(text), self.ledger.open_series(run)
                if paid is None or (paid.part, paid.charge.position) != (terms.part, terms.series):
                    terms = replace(terms, part=0, series=None)  # another process took its part
                self.charge(terms.charge((run, number, attempt), commitment))

    def open_series(self, event: RoundEvent, run: str) -> tuple[OpenSeries, bytes] | None:
        """Return the unfinished series of this event that the run has paid for, and its key."""
        series = self.ledger.open_series(run)
        if series is None or series.charge.event != event:
            return None
        # Use the first cohort that was charged: another process may have begun the same attempt.
        key = self.participation.series_key(series.charge.cohort_commitment)
        return None if key is None else (series, key)

    def next_draws(self, mechanism: GaussianMechanism, run: str, entropy: Entropy) -> Draws | None:
        """Return the draws of the next round of the series the run has paid for, or None.

        A round that was charged is never drawn again, even if it released nothing.
        """
        continued = self.open_series(mechanism.event, run)
        if continued is None:
            unfinished = self.ledger.open_series(run)
            if unfinished is not None and unfinished.charge.event == mechanism.event:
                _log.warning(
                    "the key of the series that run %r was in is lost, or belongs to another copy "
                    "of the participation record; the series is over and the run charges a new one",
                    run,
                )
            return None
        series, key = continued
        return Draws(entropy, self._draws(mechanism, key), series.part, series.charge.position)

    def new_draws(self, mechanism: GaussianMechanism, at: RoundAttempt, entropy: Entropy) -> Draws:
        """Return the draws of the first round of an event, with a new key if it is a series."""
        if mechanism.sampling.rounds == 1:
            return Draws(entropy)
        return Draws(entropy, self._draws(mechanism, entropy.key(at.purpose("series"))))

    def _draws(self, mechanism: GaussianMechanism, key: bytes) -> SeriesDraws:
        if key not in self._series_draws:
            self._series_draws.clear()
            self._series_draws[key] = SeriesDraws(mechanism, key)
        return self._series_draws[key]

    def is_first(self, run: str) -> bool:
        """Return whether a run made the first charge or, before any, is the only one with cohorts.

        Once there is a charge, this is true for exactly one run of the ledger, for ever.
        """
        first = self.ledger.first_run
        return first == run if first else not self.participation.has_other_runs(run)

    def next_attempt(self, run: str, round_number: int) -> int:
        """Return the first attempt at a round that has neither a charge nor a recorded cohort."""
        return max(
            self.ledger.next_attempt(run, round_number),
            self.participation.next_attempt(run, round_number),
        )


# Takes an attempt and its cohort's positions, and yields the partial sums of its users.
Collect = Callable[[RoundAttempt, npt.NDArray[np.int64]], Iterable[PartialSum]]


@dataclass(frozen=True)
class Release:
    """The public result of one round."""

    attempt: int  # the attempt that succeeded, from 0
    average: FloatVector  # [D], noised
    charge_hash: str  # hash of the round's charge in the ledger
    part: int = 0  # index of the round in its event, from 0


def private_round(
    mechanism: GaussianMechanism,
    run: str,
    number: int,
    collect: Collect,
    records: PrivacyRecords,
    entropy: Entropy,
    prepare: Callable[[RoundAttempt], object] = lambda _: None,
) -> Release:
    """Run a round of a mechanism: draw the cohort, collect sums, charge, add noise and release.

    If the mechanism's event is a series of rounds, the first round charges the whole series. The
    others are recorded once each, without cost; a round that may have released anything is never
    drawn again.

    Guarantees:

    * `prepare` is called before the cohort is drawn, and can end the round only then: after the
      draw the round is charged, for every answer and every exception, since both depend on who was
      drawn. If a process is killed there, the attempt is charged before the run draws again;
    * the charge is durable in the ledger before any noise is drawn;
    * the cohort is recorded before it is asked, and the charge commits to it;
    * if the round would exceed the budget, BudgetExceededError is raised: no user is asked, nothing
      is charged and nothing is released;
    * an empty cohort is charged and released like any other;
    * a round that was interrupted or is repeated is a new attempt with a fresh cohort, fresh noise
      and a new charge;
    * if the records are invalid or cannot be written, LedgerError is raised and nothing is
      released; if the disk is full, the round waits for space.
    """
    event, number = mechanism.event, index(number)
    records.settle(run)
    at = RoundAttempt(run, number, records.next_attempt(run, number), records.is_first(run))
    draws = records.next_draws(mechanism, run, entropy)
    if draws is None:
        records.refuse_if_beyond(event, f"run {run}, round {number}")
    prepare(at)
    draws = draws or records.new_draws(mechanism, at, entropy)
    terms = _Terms(event, entropy.randomness, draws.part, draws.series)
    place, record = (run, number, at.attempt), records.participation.record
    commitment, series_and_terms = None, (draws.new_series_key, terms.text)
    try:
        users = draw_cohort(mechanism, at, draws)
        commitment = with_room(lambda: record(*place, users, *series_and_terms))
        cohort = add_up(collect(at, users), mechanism.clipping, users.size)
    finally:  # charge after every exception
        commitment = commitment or with_room(lambda: record(*place, _NOBODY, *series_and_terms))
        charge = records.charge(terms.charge(place, commitment))
    at = replace(at, first=records.is_first(run))  # another run may have charged first meanwhile
    average = release(mechanism, at, cohort, charge, draws)
    if 1 < mechanism.sampling.rounds == draws.part + 1:
        with_room(lambda: records.participation.forget_series(run))  # the series is over
    return Release(at.attempt, average, charge.hash, draws.part)


def draw_cohort(
    mechanism: GaussianMechanism, at: RoundAttempt, draws: Draws
) -> npt.NDArray[np.int64]:
    """Return a cohort's positions in the population, ascending int64 [cohort]; secret."""
    return draws.cohort(mechanism, at)


def release(
    mechanism: GaussianMechanism,
    at: RoundAttempt,
    cohort: PartialSum,
    charge: Charge,
    draws: Draws,
) -> FloatVector:
    """Add noise to a cohort's sum once and return the average: float64 [D].

    `charge` is the ledger's receipt for exactly this release, and this call uses it up. Raises
    LedgerError and releases nothing if it is not a receipt, if it is for a different run, round,
    attempt, event or part, or if it was used before.
    """
    charged_event = _redeemed(charge, mechanism, at, draws.part)
    source, purpose = draws.noise(at)
    series = draws.series_draws
    correlated = None if series is None else series.correlated_noise(draws.part, charge.payment)
    average, queries = mechanism.query.noised_average(
        cohort.total, source, purpose, cohort.weight, correlated
    )
    realised = replace(mechanism.event, queries=queries)
    if realised != charged_event:
        raise LedgerError(f"the event realised is {realised}, not the one charged, {charged_event}")
    return average


def _redeemed(
    charge: Charge, mechanism: GaussianMechanism, at: RoundAttempt, part: int
) -> RoundEvent:
    """Use up the receipt of a release and return its event; LedgerError if they do not match."""
    if not isinstance(charge, Charge):
        raise LedgerError(f"a release needs a charge of the ledger, not {charge!r}")
    if (charge.run, charge.round, charge.attempt) != (at.run, at.round, at.attempt):
        raise LedgerError(
            f"the charge is for attempt {charge.attempt} at round {charge.round} of run "
            f"{charge.run!r}; the release is of attempt {at.attempt} at round {at.round} of run "
            f"{at.run!r}"
        )
    if charge.event != mechanism.event:
        raise LedgerError(f"the event charged is {charge.event}, not {mechanism.event}")
    if charge.part != part:
        raise LedgerError(f"the charge is for part {charge.part} of its event, not {part}")
    return charge.redeem()


@dataclass(frozen=True)
class OpenedSum:
    """The noised sum of a round, opened by its nodes."""

    total: IntegerVector  # [D], in steps of each group's granularity
    nodes: int  # number of nodes whose sums and shares of the noise are in it


# Takes an attempt to the nodes, and returns a function that opens their masked sum, or returns None
# if too few nodes are left. The function is called once, after the charge.
CollectMasked = Callable[[RoundAttempt], Callable[[], OpenedSum | None]]


def secure_round(
    mechanism: GaussianMechanism,
    run: str,
    number: int,
    collect: CollectMasked,
    records: PrivacyRecords,
    entropy: Entropy,
    prepare: Callable[[RoundAttempt], object] = lambda _: None,
) -> Release | None:
    """Run a round whose nodes draw their users and add the noise; None: the attempt is void.

    Sensitivity is that of `GaussianQuery.noised_average`. The noise is the sum of the nodes'
    rounded shares; honest nodes contribute at least n − t − d of them: `fedpriv.secure_sums`.

    Guarantees:

    * those of `private_round` on `prepare`, the charge, the budget and repeated rounds;
    * the participation record holds an empty cohort, since the server does not learn the cohort;
    * the charge is durable before nodes are asked to open the sum; until then, what the server
      holds is masked;
    * an attempt is void if too few nodes are left, or if the sum is longer than honest nodes can
      make it; it is charged once and releases nothing.
    """
    event, number = mechanism.event, index(number)
    records.settle(run)
    at = RoundAttempt(run, number, records.next_attempt(run, number), records.is_first(run))
    records.refuse_if_beyond(event, f"run {run}, round {number}")
    prepare(at)
    place, terms = (run, number, at.attempt), _Terms(event, entropy.randomness)
    commitment = with_room(lambda: records.participation.record(*place, _NOBODY, terms=terms.text))
    try:
        open_sum = collect(at)
    finally:  # charge after every exception, since nodes have drawn users
        charge = records.charge(terms.charge(place, commitment))
    _redeemed(charge, mechanism, at, 0)
    opened = open_sum()
    if opened is None:
        _log.warning(
            "attempt %d at round %d of run %r is void: too few nodes are left", *place[::-1]
        )
        return None
    if not mechanism.admits(opened.total, opened.nodes):
        _log.error(
            "attempt %d at round %d of run %r is void: its sum is longer than honest nodes can "
            "make it, so a node lied",
            *place[::-1],
        )
        return None
    return Release(at.attempt, mechanism.query.averaged(opened.total), charge.hash)
