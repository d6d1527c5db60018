"""The private round, once, for training and for analytics: draw, collect, charge, noise, release.

`private_round` is the only caller of `release`, and `release` the only caller of what draws noise
(`tests/privacy/test_round.py`). Between drawing and charging, `PartialSum`s of its users come back.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import index
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from fedpriv.errors import BudgetExceededError, LedgerError
from fedpriv.ledger.events import PrivacyBudget, Randomness, RoundEvent
from fedpriv.ledger.ledger import Charge, Ledger, OpenSeries, ProposedCharge
from fedpriv.ledger.participation import ParticipationRecord
from fedpriv.privacy.clipping import Clipping, IntegerVector
from fedpriv.privacy.draws import Draws, RoundAttempt, SeriesDraws
from fedpriv.privacy.gaussian_mechanism import GaussianMechanism
from fedpriv.privacy.layout import FloatVector
from fedpriv.privacy.noise import Entropy
from fedpriv.support.disk import with_room

_log = logging.getLogger(__name__)
_NOBODY = np.empty(0, np.int64)


@dataclass(frozen=True)
class PartialSum:
    """Sum of the clipped contributions of some users of the cohort; secret until it is noised."""

    node: str  # the sender; a second partial sum of the same node in a round is dropped
    users: int  # how many contributions it holds
    total: IntegerVector  # [D], in steps of each group's granularity
    weight: int  # sum of these users' weights in units of 1/c, c the clipping's `weight_cap`


def merged(node: str, partials: Iterable[PartialSum], dimension: int) -> PartialSum:
    """One partial sum of disjoint ones over `dimension` numbers; there may be none."""
    total = np.zeros(dimension, np.int64)
    users = weight = 0
    for partial in partials:
        total += partial.total
        users += partial.users
        weight += partial.weight
    return PartialSum(node, users, total, weight)


def add_up(partials: Iterable[PartialSum], clipping: Clipping, users: int) -> PartialSum:
    """Sum the partial sums of a cohort of so many users, as far as they can be believed.

    A partial sum counts as zero if its node was heard before, if it has the wrong shape or is not
    of integers, if a group's norm passes (users in it) × S_g or, if the group is weighted, (their
    weight) × S_g, if its weight is not from 0 to c × its users, or if more users would have
    contributed than are in the cohort. Nothing here changes a fixed denominator.
    """
    return merged("cohort", _believed(partials, clipping, users), clipping.layout.dimension)


def _believed(
    partials: Iterable[PartialSum], clipping: Clipping, users: int
) -> Iterator[PartialSum]:
    heard: set[str] = set()
    contributed = 0
    for partial in partials:
        known = partial.node in heard
        heard.add(partial.node)
        fits = 0 <= partial.users <= users - contributed
        weighs = 0 <= partial.weight <= partial.users * clipping.weight_cap
        believed = not known and fits and weighs
        if not believed or not clipping.admits(partial.total, partial.users, partial.weight):
            # The name of a node may be that of its one user, and that it was drawn is secret.
            _log.warning("a partial sum counts as zero: it is not valid")
            continue
        contributed += partial.users
        yield partial


@dataclass(frozen=True)
class PrivacyRecords:
    """What all releases about a population are recorded in, and limited by."""

    ledger: Ledger  # what was spent; public
    participation: ParticipationRecord  # who took part; secret, and never exported
    budget: PrivacyBudget  # what all runs of the ledger may spend together
    # Draws of the series that is under way, by its key, so that they are computed once.
    _drawn: dict[bytes, SeriesDraws] = field(default_factory=dict, init=False, repr=False)
    # Runs whose last attempt was charged here, so that no search for others is needed.
    _settled: set[str] = field(default_factory=set, init=False, repr=False)

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
        """Open ledger and participation record, or create both, and close them in the end.

        LedgerError if one of them is missing, or both when a run is resumed, and if the ledger
        lacks a charge on which something was released, as far as the record knows.
        """
        # The record is asked first, since the ledger is created first.
        if (participation.exists() or resuming) and not ledger.exists():
            raise LedgerError(f"ledger {ledger} is missing; restore it from a backup")
        with Ledger.open_or_create(ledger, population) as opened:
            if (opened.head.count or resuming) and not participation.exists():
                raise LedgerError(
                    f"participation record {participation} is missing; restore it from a backup"
                )
            with ParticipationRecord.open_or_create(participation) as record:
                kept = record.ledger_head
                if kept is not None and not opened.contains_head(kept):
                    raise LedgerError(
                        f"ledger {ledger} lacks charges that {participation} has seen, up to head "
                        f"{kept.count}:{kept.hash}: it was set back or replaced"
                    )
                record.keep_head(opened.head)
                yield cls(opened, record, budget)

    def refuse_if_beyond(self, event: RoundEvent, what: str) -> None:
        """Raise BudgetExceededError before users are asked; the charge asks again, atomically."""
        if not self.ledger.epsilon(self.budget, event) <= self.budget.epsilon:
            raise BudgetExceededError(
                f"{what} would pass the budget of ε = {self.budget.epsilon} at "
                f"δ = {self.budget.delta}; no user was asked and nothing charged"
            )

    def charge(self, proposed: ProposedCharge) -> Charge:
        """Charge an attempt within the budget, and keep the head that the ledger has with it."""
        charge = with_room(lambda: self.ledger.charge(proposed, self.budget))
        with_room(lambda: self.participation.keep_head(self.ledger.head))
        self._settled.add(proposed.run)
        return charge

    def settle(self, event: RoundEvent, run: str, randomness: Randomness) -> None:
        """Charge what the run has drawn and was ended, as by a kill, before it could charge.

        Raises BudgetExceededError where other runs have spent what it takes: the run is over.
        """
        if run in self._settled:
            self._settled.remove(run)  # until its next charge
            return
        try:
            for number, attempt, commitment in self.participation.attempts(run):
                if attempt >= self.ledger.next_attempt(run, number):
                    _log.warning("run %r had drawn round %d, which is charged now", run, number)
                    paid = self._paid(event, run, commitment)
                    self.charge(
                        ProposedCharge(run, number, attempt, randomness, event, commitment, *paid)
                    )
        finally:
            self._settled.discard(run)

    def _paid(self, event: RoundEvent, run: str, commitment: str) -> tuple[int, int | None]:
        """Which part of an event the cohort was drawn for, and the charge that paid for it."""
        left = self.ledger.open_series(run)
        begins = self.participation.series_key(commitment) is not None
        if left is None or begins or left.paid.event != event:
            return 0, None
        return left.part, left.paid.position

    def open_series(self, event: RoundEvent, run: str) -> tuple[OpenSeries, bytes] | None:
        """The series of an event that the run has paid for and goes on with, and its secret key."""
        found = self.ledger.open_series(run)
        if found is None or found.paid.event != event:
            return None
        # By the first cohort that was charged: another process may have begun the same attempt.
        key = self.participation.series_key(found.paid.cohort_commitment)
        return None if key is None else (found, key)

    def under_way(self, mechanism: GaussianMechanism, run: str, entropy: Entropy) -> Draws | None:
        """Draws of the next round of a series that the run has paid for, if there is one.

        A round that was charged is never drawn again, even if nothing of it was released.
        """
        found = self.open_series(mechanism.event, run)
        if found is None:
            left = self.ledger.open_series(run)
            if left is not None and left.paid.event == mechanism.event:
                _log.warning(
                    "the key of the series that run %r was in is lost, or of another copy of the "
                    "participation record; the series is over, and the run charges a new one",
                    run,
                )
            return None
        series, key = found
        return Draws(entropy, self._draws(mechanism, key), series.part, series.paid.position)

    def begun(self, mechanism: GaussianMechanism, at: RoundAttempt, entropy: Entropy) -> Draws:
        """Draws of the first round of an event; the key of a series is kept with its cohort."""
        if mechanism.sampling.rounds == 1:
            return Draws(entropy)
        return Draws(entropy, self._draws(mechanism, entropy.key(at.purpose("series"))))

    def _draws(self, mechanism: GaussianMechanism, key: bytes) -> SeriesDraws:
        if key not in self._drawn:
            self._drawn.clear()
            self._drawn[key] = SeriesDraws(mechanism, key)
        return self._drawn[key]

    def is_first(self, run: str) -> bool:
        """Whether a run made the first charge or, while there is none, alone has asked cohorts.

        Once there is a charge, this is true of exactly one run of the ledger, for ever.
        """
        first = self.ledger.first_run
        return first == run if first else not self.participation.has_other_than(run)

    def next_attempt(self, run: str, round_number: int) -> int:
        """The first attempt at a round that was neither charged nor has asked a cohort."""
        return max(
            self.ledger.next_attempt(run, round_number),
            self.participation.next_attempt(run, round_number),
        )


# From an attempt and its cohort, positions in the population, to the partial sums of its users.
Collect = Callable[[RoundAttempt, npt.NDArray[np.int64]], Iterable[PartialSum]]


@dataclass(frozen=True)
class Release:
    """What one round made public."""

    attempt: int  # which attempt at the round succeeded, from 0
    average: FloatVector  # [D], noised
    charge_hash: str  # of the round's row in the ledger
    part: int = 0  # which round of its event it was, from 0


def private_round(
    mechanism: GaussianMechanism,
    run: str,
    number: int,
    collect: Collect,
    records: PrivacyRecords,
    entropy: Entropy,
    prepare: Callable[[RoundAttempt], object] = lambda _: None,
) -> Release:
    """Run a round of a mechanism: draw the cohort, collect its sums, charge, noise and release.

    Where the mechanism's event is a series of rounds, the first charges it whole and the others are
    written down at no price, each once: what one of them released, or may have, is not drawn again.

    Guarantees:

    * `prepare` is called before the cohort is drawn, and can end the round only then: from the draw
      on the round is charged, whoever answers and whatever is raised, since that depends on who was
      drawn. An attempt of a process that was killed there is charged before the run draws again;
    * the charge is durable in the ledger before any noise is drawn;
    * the cohort is recorded before it is asked, and the charge commits to it;
    * where the budget would be passed, BudgetExceededError: no user is asked, nothing is charged
      and nothing released;
    * an empty cohort is charged and released like any other;
    * a round that was interrupted or is repeated is a new attempt: fresh cohort, noise and charge;
    * where the records cannot be believed or written, LedgerError, and nothing is released; where
      there is no room to write, the round waits for it.
    """
    event, number = mechanism.event, index(number)
    records.settle(event, run, entropy.randomness)
    at = RoundAttempt(run, number, records.next_attempt(run, number), records.is_first(run))
    draws = records.under_way(mechanism, run, entropy)
    if draws is None:
        records.refuse_if_beyond(event, f"run {run}, round {number}")
    prepare(at)
    draws = draws or records.begun(mechanism, at, entropy)
    place, record = (run, number, at.attempt), records.participation.record
    commitment, key = None, draws.key_to_keep
    try:
        users = draw_cohort(mechanism, at, draws)
        commitment = with_room(lambda: record(*place, users, key))
        cohort = add_up(collect(at, users), mechanism.clipping, users.size)
    finally:  # whatever was raised, by whom and where
        commitment = commitment or with_room(lambda: record(*place, _NOBODY, key))
        paid = draws.part, draws.series
        charge = records.charge(
            ProposedCharge(run, number, at.attempt, entropy.randomness, event, commitment, *paid)
        )
    at = replace(at, first=records.is_first(run))  # others may have charged first in the meantime
    average = release(mechanism, at, cohort, charge, draws)
    if 1 < mechanism.sampling.rounds == draws.part + 1:
        with_room(lambda: records.participation.forget_series(run))  # it is over
    return Release(at.attempt, average, charge.hash, draws.part)


def draw_cohort(
    mechanism: GaussianMechanism, at: RoundAttempt, draws: Draws
) -> npt.NDArray[np.int64]:
    """Positions of the users of a cohort, ascending; secret. May be empty."""
    return draws.cohort(mechanism, at)


def release(
    mechanism: GaussianMechanism,
    at: RoundAttempt,
    cohort: PartialSum,
    charge: Charge,
    draws: Draws,
) -> FloatVector:
    """Noise a cohort's sum once and average it: [D].

    The charge is the ledger's receipt for exactly this, and is used up by this call. LedgerError if
    it is none, of another run, round, attempt, event or part of it, or was used before; nothing is
    released.
    """
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
    if charge.part != draws.part:
        raise LedgerError(f"the charge is for part {charge.part} of its event, not {draws.part}")
    charged = charge.redeem()
    source, purpose = draws.noise(at)
    drawn = draws.drawn
    correlated = None if drawn is None else drawn.correlated(draws.part, charge.paid)
    average, queries = mechanism.query.noised_average(
        cohort.total, source, purpose, cohort.weight, correlated
    )
    realised = replace(mechanism.event, queries=queries)
    if realised != charged:
        raise LedgerError(f"the event realised is {realised}, not the one charged, {charged}")
    return average
