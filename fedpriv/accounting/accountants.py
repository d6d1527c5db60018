"""The accountants, by name, and the analyses of events by policy and relation.

An accountant refuses sampling policies and neighbouring relations that it cannot analyse. To add
one, subclass `Accountant`, list it in `ACCOUNTANTS`, and inherit the conformance suite's tests.

`ANALYSES` gives, for each sampling policy and neighbouring relation, pairs that bound the cost of
events from above and from below. The tightest interval of pairs comes from

* one Gaussian in closed form, if every user takes part in every round;
* an integral along a contour, with some eight digits, for rounds on Poisson samples of users, when
  one is added, removed or replaced, or of up to 24 examples per user;
* the composition of privacy losses by FFT (`pld`), with three digits, for other kinds of events and
  whenever the contour refuses.

The last two share only the definition of the privacy loss, and tests compare them. More than 4,096
different rounds are priced in groups. If an interval is wide, looser bounds replace its upper end
where they are smaller: that of `rdp`, that without sampling, and that with all coins revealed.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache, partial, reduce
from types import MappingProxyType
from typing import cast

import numpy as np

from fedpriv.accounting import contour, gaussian, pld, rdp
from fedpriv.accounting.pld.dominating_pairs import FixedSizePair, ReplacePair, SymmetricPair
from fedpriv.accounting.pld.lattice import GaussianPair, LossPair, Pairs
from fedpriv.accounting.pld.random_allocation import (
    MOST_PARTICIPATIONS,
    SubsetPair,
    allocation_pairs,
)
from fedpriv.accounting.pld.sampled_examples import PoissonPair
from fedpriv.accounting.round_counts import (
    Direction,
    Ends,
    Rounds,
    Vector,
    check_epsilon,
    compose,
    decreasing,
    folded,
    grouped,
)
from fedpriv.accounting.selection import selected_rdp
from fedpriv.errors import InvalidValueError, UnsupportedEventError, known_names
from fedpriv.ledger.events import (
    LEAST_DELTA,
    WITH_STRATEGY,
    EventKind,
    NeighbouringRelation,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
    Selection,
    Unit,
    check_delta,
    kinds_text,
)
from fedpriv.support.checks import check_types, plain_numbers, text_up

ADD_OR_REMOVE, REPLACE = NeighbouringRelation
PairOf = Callable[[float, float], PoissonPair | SymmetricPair]  # from (q, z)

_GROUPS = 4096, 64  # numbers of groups of rounds to try, in order
_LITTLE_NOISE = 0.2  # noise below which rounds can be so rare that δ covers them
_WIDE = 0.1  # relative width from which looser bounds are tried


@dataclass(frozen=True)
class PairBounds:
    """Pairs whose composition costs at least as much as events, and others that cost no more."""

    above: Pairs  # they dominate the events together, even if these are chosen adaptively
    below: Pairs  # the events dominate them; equal to `above` if the bounds are exact
    complete: bool = True  # True if `below` bounds every event, so that both ends are an interval


def bounds_of(events: Iterable[RoundEvent]) -> PairBounds:
    """Return bounds of all events together, whose kinds are in `ANALYSES`, in any order."""
    alike: dict[tuple[EventKind, int | None, Schedule | None], list[RoundEvent]] = {}
    for event in events:
        draw = event.sampling
        key = (draw.policy, draw.relation), draw.examples_per_user, draw.schedule
        alike.setdefault(key, []).append(event)
    bounds = [ANALYSES[key[0]](alike[key]) for key in sorted(alike, key=str)]
    if len(bounds) == 1:  # the usual case; a copy of 100,000 pairs would take time
        return bounds[0]
    above, below = Counter[LossPair](), Counter[LossPair]()
    for bound in bounds:
        above.update(bound.above)
        below.update(bound.below)
    return PairBounds(above, below, all(bound.complete for bound in bounds))


def _pairs(kind: PairOf, events: Iterable[RoundEvent]) -> Pairs:
    """Return one pair for each (q, noise per sensitivity); for q = 1 all kinds are a Gaussian."""
    pairs = ((kind(q, z), count) for (q, z), count in compose(events).items())
    return {PoissonPair(1.0, p.z / p.shift) if p.q == 1.0 else p: count for p, count in pairs}


def _exact(kind: PairOf, events: Sequence[RoundEvent]) -> PairBounds:
    # All users are a Poisson sample with q = 1; `compose` explains rounds within bands.
    pairs = _pairs(kind, events)
    return PairBounds(pairs, pairs)


def _fixed_size(events: Sequence[RoundEvent]) -> PairBounds:
    return PairBounds(_pairs(FixedSizePair, events), _pairs(PoissonPair, events))


def _separated(events: Sequence[RoundEvent]) -> PairBounds:
    """Return one Gaussian for each series; the lower bound has only those of exact sensitivity."""
    exact = [event for event in events if decreasing(event.strategy)]
    above, below = _pairs(PoissonPair, events), _pairs(PoissonPair, exact)
    return PairBounds(above, below, len(exact) == len(events))


def _allocated(events: Sequence[RoundEvent]) -> PairBounds:
    """Return exact bounds for 1 or n participations, and an interval for others.

    The lower bound is a `SubsetPair`, or the sum of all rounds for many participations, or for more
    than two with little noise, since a `SubsetPair` may then drop all of its bins.
    """
    schedule = cast(Schedule, events[0].sampling.schedule)
    n, k = schedule.rounds, schedule.participations
    above, below = Counter[LossPair](), Counter[LossPair]()
    for (_, z), count in compose(events).items():
        pairs = {pair: m * count for pair, m in allocation_pairs(n, k, z).items()}
        above.update(pairs)
        is_small = k <= min(MOST_PARTICIPATIONS, max(2, 800.0 * z * z))
        pair_below = SubsetPair(n, k, z) if is_small else PoissonPair(1.0, z * n**0.5 / k)
        below.update(pairs if k in (1, n) else {pair_below: count})
    return PairBounds(above, below)


def _sampled_examples(events: Sequence[RoundEvent]) -> PairBounds:
    """Return exact bounds: a user's examples may all have the same gradient."""
    return _exact(partial(PoissonPair, examples=events[0].sampling.examples_per_user or 1), events)


_poisson = partial(_exact, PoissonPair)
ANALYSES: Mapping[EventKind, Callable[[Sequence[RoundEvent]], PairBounds]] = MappingProxyType(
    {
        (SamplingPolicy.POISSON, ADD_OR_REMOVE): _poisson,
        (SamplingPolicy.POISSON, REPLACE): partial(_exact, ReplacePair),
        (SamplingPolicy.EVERY_USER, ADD_OR_REMOVE): _poisson,
        (SamplingPolicy.EVERY_USER, REPLACE): _poisson,
        (SamplingPolicy.FIXED_SIZE, REPLACE): _fixed_size,
        (SamplingPolicy.RANDOM_ALLOCATION, ADD_OR_REMOVE): _allocated,
        (SamplingPolicy.SEPARATED, ADD_OR_REMOVE): _separated,
        (SamplingPolicy.SEPARATED, REPLACE): _separated,
        (SamplingPolicy.BANDED_POISSON, ADD_OR_REMOVE): _poisson,
        (SamplingPolicy.BANDED_POISSON, REPLACE): partial(_exact, ReplacePair),
        (SamplingPolicy.EXAMPLES, ADD_OR_REMOVE): _sampled_examples,
    }
)
"""Functions from events of one kind, drawn in the same way, to their bounds."""

_GAUSSIAN = tuple(kind for kind, bounds in ANALYSES.items() if bounds in (_poisson, _separated))
"""Kinds that cost no more than the Poisson-subsampled Gaussian of `compose`, including q = 1."""


def poisson_pairs(rounds: Rounds) -> Pairs:
    """Return the pairs of Poisson-sampled rounds."""
    return {PoissonPair(q, z): count for (q, z), count in rounds.items()}


def tightest_epsilon(pairs: Pairs, delta: float) -> Ends:
    """Return an interval of the least ε for which the pairs together are (ε, δ)-DP."""
    interval = contour.epsilon_interval, pld.epsilon_interval
    low, up = _tightest(pairs, delta, *interval)
    if low < (1.0 - _WIDE) * up:
        others, share = _without_little_noise(pairs)
        if others and delta - share >= LEAST_DELTA:  # smaller δ have no certified ends
            low = max(low, _tightest(others, delta, *interval)[0])
            up = min(up, _tightest(others, delta - share, *interval)[1])
        up = min(up, rdp.epsilon_from_rdp(rdp.DEFAULT_ORDERS, _rdp_above(pairs), delta))
        for share in (2.0**-40, 0.5):  # of δ for a user in many rounds
            noise = pld.noise_of_sampled(pairs, share * delta)
            up = min(up, gaussian.epsilon(delta * (1.0 - share), noise))
    return low, up


def tightest_delta(pairs: Pairs, epsilon: float) -> Ends:
    """Return an interval of the least δ for which the pairs are (ε, δ)-DP at a finite ε."""
    interval = contour.delta_interval, pld.delta_interval
    low, up = _tightest(pairs, epsilon, *interval)
    if low < (1.0 - _WIDE) * up:
        others, share = _without_little_noise(pairs)
        if others and share < up:
            ends = _tightest(others, epsilon, *interval)
            low, up = max(low, ends[0]), min(up, (ends[1] + share) * (1.0 + 2.0**-50))
        up = _capped_delta(pairs, epsilon, up)
    return low, up


def tightest_deltas(pairs: Pairs, epsilons: Sequence[float], near: Sequence[float]) -> Vector:
    """Return upper bounds of δ at each ε: [epsilons], tight for δ between the deltas `near`."""
    case, ups = _of_one_kind(pairs), None
    if case is not None and any(pair.q < 1.0 for pair in pairs):
        with suppress(contour.ContourUnsuitableError):
            rounds, _ = grouped(folded(case[1]), _GROUPS[0])
            ups = contour.deltas_along(rounds, epsilons, near, case[2])
    if ups is None:
        ups = pld.deltas_above(pairs, epsilons, near)
    if ups[-1] > (1.0 + _WIDE) * min(near):
        ups = np.array(list(map(partial(_capped_delta, pairs), epsilons, ups)))
    return ups


def _without_little_noise(pairs: Pairs) -> tuple[Pairs, float]:
    """Return the pairs except those with little noise, and the `pld.exposure` of the latter.

    The remaining pairs cost no more at δ, and no less at δ minus the exposure, which counts as an
    infinite loss (see `pld.exposure`).
    """
    rare = {pair: n for pair, n in pairs.items() if pair.z < _LITTLE_NOISE}
    others = {pair: n for pair, n in pairs.items() if pair not in rare}
    return others, pld.exposure(rare) * (1.0 + 2.0**-30)


def _capped_delta(pairs: Pairs, epsilon: float, up: float) -> float:
    """Return the least of an upper bound of δ and two looser ones: by `rdp`, and unsampled."""
    from_rdp = rdp.delta_from_rdp(rdp.DEFAULT_ORDERS, _rdp_above(pairs), epsilon)
    noise = pld.noise_of_sampled(pairs, LEAST_DELTA)
    return min(up, from_rdp, gaussian.delta(epsilon, noise) + LEAST_DELTA)


def _rdp_above(pairs: Pairs) -> Vector:
    """Return bounds of the RDP of all pairs at the default orders."""
    rounds = Counter[tuple[float, float]]()
    for pair, count in pairs.items():
        z = pair.z / (pair.shift if isinstance(pair, GaussianPair) else 1.0)
        of_users = isinstance(pair, PoissonPair) and pair.examples == 1
        rounds[pair.q if of_users else 1.0, z] += count
    return rdp.composed_rdp(rounds, rdp.DEFAULT_ORDERS)


def _of_one_kind(pairs: Pairs) -> tuple[PoissonPair | ReplacePair, Rounds, contour.Views] | None:
    """Return the one kind of all pairs if it has a contour, its rounds by (q, z), and its views.

    Gaussian rounds are of every kind.
    """
    kinds, users = {_kind_of(pair) for pair in pairs}, (PoissonPair, 1)
    if len(kinds) > 1 and all(pair.q == 1.0 for pair in pairs if _kind_of(pair) == users):
        kinds.discard(users)
    of_pairs, examples = kinds.pop() if len(kinds) == 1 else (None, 0)
    if of_pairs is ReplacePair:
        kind: PoissonPair | ReplacePair = ReplacePair(1.0, 1.0)
        views: contour.Views = (contour.View(replaced=True),)
    elif of_pairs is PoissonPair:
        kind = PoissonPair(1.0, 1.0, examples)
        views = [contour.View(direction, examples) for direction in Direction]
    else:
        return None
    rounds = Counter[tuple[float, float]]()
    for pair, count in pairs.items():
        scale = 1.0 if _kind_of(pair) == (of_pairs, examples) else kind.shift
        rounds[pair.q, pair.z * scale] += count
    return kind, rounds, views


def _kind_of(pair: LossPair) -> tuple[type[LossPair], int]:
    return type(pair), getattr(pair, "examples", 1)


def _tightest(
    pairs: Pairs,
    at: float,
    along_contour: Callable[[Rounds, float, contour.Views], Ends],
    composed: Callable[[Pairs, float], Ends],
) -> Ends:
    """Return an interval by the first method and grouping that suits the pairs."""
    case = _of_one_kind(pairs)
    if case is None or any(pair.z == 0.0 for pair in pairs) or all(pair.q == 1.0 for pair in pairs):
        return composed(pairs, at)
    kind, settings, views = case
    rounds = folded(settings)
    for limit in _GROUPS:
        above, below = grouped(rounds, limit)
        with suppress(contour.ContourUnsuitableError):
            low, up = along_contour(above, at, views)
            if below is not above:
                low, _ = along_contour(below, at, views)
            break
    else:
        low, up = composed({kind.at(q, z): n for (q, z), n in rounds.items()}, at)
    return low if rounds == settings else low * (1 - 2.0**-40), up  # for the rounding of `folded`


# Factor of lower ends, since `compose` may take noise to be smaller by a part in 2³⁶.
_BELOW = 1.0 - 2.0**-30


class Bound(StrEnum):
    """The kind of statement that an ε makes, in words for readers."""

    UPPER = "upper bound"  # the true ε is at most this value
    INTERVAL = "interval"  # the true ε is at most this value and at least `epsilon_low`
    ESTIMATE = "estimate"  # near the true ε for many rounds; it can be below: no guarantee


@dataclass(frozen=True)
class PrivacyLoss:
    """The cost of events together: the least ε at δ, bounded or estimated."""

    epsilon_low: float  # the true ε is at least this, unless `bound` is an estimate; 0 if unknown
    epsilon: float  # to report: the true ε is at most this, with the same exception; ∞ if unproven
    delta: float  # in [1e-60, 1)
    accountant: str  # name in `ACCOUNTANTS`
    relation: NeighbouringRelation  # of the two compared populations
    unit: Unit  # the populations differ in one of these
    bound: Bound  # kind of statement
    assumptions: str  # one sentence for readers


class Accountant(ABC):
    """Prices events; all its numbers are on the safe side, unless tagged as estimates.

    Every accountant keeps these promises; the conformance suite tests each:

    * No events cost ε = 0 and δ = 0 exactly; a round without noise costs ε = ∞.
    * ε decreases with the noise multiplier and δ, and increases with the sampling probability and
      the number of rounds: exactly for a formula, up to the width for an interval, since plans for
      its ends differ. The upper end of a larger cost is never below the lower end of a smaller one.
    * Events of two relations or units are refused: an ε compares one kind of neighbours.
    * ε does not depend on the order of events, on the way equal events are counted, or on the split
      of a round's noise among its queries, as long as the noise multiplier is the same.

    An argument out of range raises `InvalidValueError`; an event that the accountant cannot analyse
    raises `UnsupportedEventError`.
    """

    name: str  # in `ACCOUNTANTS`

    @abstractmethod
    def epsilon(self, events: Iterable[RoundEvent], delta: float) -> PrivacyLoss:
        """Return the cost of the events together, in any order, at δ in [1e-60, 1)."""

    def upper_epsilon(self, events: Iterable[RoundEvent], delta: float) -> float:
        """Return the ε of the events at δ, for `PrivacyBudget`."""
        return self.epsilon(events, delta).epsilon

    @abstractmethod
    def delta(self, events: Iterable[RoundEvent], epsilon: float) -> float:
        """Return a δ in [0, 1] for which the events together are (ε, δ)-DP; ε ≥ 0 is finite."""

    def deltas(
        self, events: Iterable[RoundEvent], epsilons: Sequence[float], near: Sequence[float]
    ) -> Vector:
        """Return `delta` at each ε, ascending: [epsilons].

        Bounds may be looser where δ is outside the range of the deltas `near`.
        """
        del near
        events = tuple(events)
        return np.array([self.delta(events, epsilon) for epsilon in epsilons])


@dataclass(frozen=True)
class IntervalAccountant(Accountant):
    """Intervals for every policy, by default by composition of privacy losses (`pld`).

    `epsilon` is only an upper bound if the lower end leaves out an event: a separated series with
    an inexact sensitivity. `delta` is the upper end of an interval, and at least 1e-60 unless there
    are no events.
    """

    name: str = "pld"
    epsilon_interval: Callable[[Pairs, float], Ends] = pld.epsilon_interval  # of ε at δ
    delta_interval: Callable[[Pairs, float], Ends] = pld.delta_interval  # of δ at ε
    # Upper ends of δ at each of several ε.
    deltas_above: Callable[[Pairs, Sequence[float], Sequence[float]], Vector] = pld.deltas_above

    def epsilon(self, events: Iterable[RoundEvent], delta: float) -> PrivacyLoss:
        """Return an interval of ε, or an upper bound."""
        check_delta(delta)
        events = _checked(events, self.name, tuple(ANALYSES))
        bounds = bounds_of(events)
        low, up = _kept_ends(self.epsilon_interval, tuple(bounds.above.items()), delta)
        if bounds.below is not bounds.above and bounds.below != bounds.above:
            low, _ = _kept_ends(self.epsilon_interval, tuple(bounds.below.items()), delta)
        kind = Bound.INTERVAL if bounds.complete else Bound.UPPER
        return _loss(events, (float(low) * _BELOW, float(up)), delta, self.name, kind)

    def upper_epsilon(self, events: Iterable[RoundEvent], delta: float) -> float:
        """Return the upper end of `epsilon`, in less time if lower bounds have other pairs."""
        check_delta(delta)
        above = bounds_of(_checked(events, self.name, tuple(ANALYSES))).above
        return float(_kept_ends(self.epsilon_interval, tuple(above.items()), delta)[1])

    def delta(self, events: Iterable[RoundEvent], epsilon: float) -> float:
        """Return the upper end of an interval of δ."""
        check_epsilon(epsilon)
        above = bounds_of(_checked(events, self.name, tuple(ANALYSES))).above
        return max(self.delta_interval(above, epsilon)[1], LEAST_DELTA) if above else 0.0

    def deltas(
        self, events: Iterable[RoundEvent], epsilons: Sequence[float], near: Sequence[float]
    ) -> Vector:
        """Return upper ends of δ at each ε, from few compositions: [epsilons]."""
        above = bounds_of(_checked(events, self.name, tuple(ANALYSES))).above
        if not above:
            return np.zeros(len(epsilons))
        return np.maximum(self.deltas_above(above, epsilons, near), LEAST_DELTA)


@lru_cache(maxsize=8)  # a run prices its planned rounds several times
def _kept_ends(
    interval: Callable[[Pairs, float], Ends], pairs: tuple[tuple[LossPair, int], ...], delta: float
) -> Ends:
    return interval(dict(pairs), delta)


@dataclass(frozen=True)
class RDPAccountant(Accountant):
    """Upper bounds by the moments accountant (`rdp`), at the best of the orders α in (1, 10⁶].

    Only this accountant prices searches: `Selection`s, in which every trial is priced like the most
    expensive one.
    """

    name: str = field(default="rdp", init=False)
    orders: tuple[float, ...] = rdp.DEFAULT_ORDERS

    def epsilon(self, events: Iterable[RoundEvent], delta: float) -> PrivacyLoss:
        """Return the least ε over the orders."""
        check_delta(delta)
        events = _checked(events, self.name, _GAUSSIAN)
        up = rdp.epsilon_from_rdp(self.orders, self._rdp(events), delta) if events else 0.0
        return _loss(events, (0.0, up), delta, self.name, Bound.UPPER)

    def delta(self, events: Iterable[RoundEvent], epsilon: float) -> float:
        """Return the least δ over the orders."""
        check_epsilon(epsilon)
        events = _checked(events, self.name, _GAUSSIAN)
        return rdp.delta_from_rdp(self.orders, self._rdp(events), epsilon) if events else 0.0

    def _rdp(self, events: Sequence[RoundEvent]) -> Vector:
        """Return the RDP of all events together: [orders]."""
        total = rdp.composed_rdp(compose(e for e in events if not e.selection), self.orders)
        searches = Counter[Selection]()
        for event in events:
            if event.selection is not None:
                searches[event.selection] += event.count
        for search, count in sorted(searches.items(), key=repr):  # a fixed order of summation
            total = total + count * self._selected(search)
        return total

    def _selected(self, search: Selection) -> Vector:
        """Return the RDP of the best of K trials: [orders]."""
        trials = [{(t.sampling_probability, t.noise_multiplier): t.rounds} for t in search.trials]
        of_trial = reduce(np.maximum, [rdp.composed_rdp(rounds, self.orders) for rounds in trials])
        deltas = partial(rdp.delta_from_rdp, self.orders, of_trial)
        return selected_rdp(self.orders, of_trial, deltas, search.mean, search.shape)


@dataclass(frozen=True)
class CLTAccountant(Accountant):
    """The central limit theorem's estimate (Bu et al. 2020), which can be below the truth."""

    name: str = field(default="gdp", init=False)

    def epsilon(self, events: Iterable[RoundEvent], delta: float) -> PrivacyLoss:
        """Return the ε of the Gaussian mechanism that the rounds converge to."""
        check_delta(delta)
        events = _checked(events, self.name, _GAUSSIAN)
        up = gaussian.epsilon(delta, gaussian.clt_noise(compose(events)))
        return _loss(events, (0.0, up), delta, self.name, Bound.ESTIMATE)

    def delta(self, events: Iterable[RoundEvent], epsilon: float) -> float:
        """Return the δ of the Gaussian mechanism that the rounds converge to."""
        check_epsilon(epsilon)
        return gaussian.delta(epsilon, gaussian.clt_noise(gaussian_rounds(events, self.name)))


def gaussian_rounds(events: Iterable[RoundEvent], name: str) -> Rounds:
    """Return Poisson-subsampled Gaussian rounds that cost at least as much as the events.

    UnsupportedEventError, with the `name` of an accountant, if an event has no such bound.
    """
    return compose(_checked(events, name, _GAUSSIAN))


def _checked(
    events: Iterable[RoundEvent], name: str, kinds: Sequence[EventKind]
) -> tuple[RoundEvent, ...]:
    """Return the events; UnsupportedEventError unless of these kinds, one relation and one unit."""
    check_types(events=(events, Iterable))
    events = tuple(events)
    for event in events:
        check_types(**{"an event": (event, RoundEvent)})
        sampling = event.sampling
        if (sampling.policy, sampling.relation) not in kinds:
            raise UnsupportedEventError(
                f"the {name} accountant has no analysis of {sampling.policy} sampling with "
                f"{sampling.relation} neighbours; allowed: {kinds_text(kinds)}"
            )
    if name != "rdp" and any(event.selection is not None for event in events):
        raise UnsupportedEventError(
            f"the {name} accountant has no analysis of the best of several trials; rdp has one, so "
            "privacy.accountant must be 'rdp' on a ledger that paid for a search"
        )
    for kind in ("relation", "unit"):
        values = dict.fromkeys(getattr(event.sampling, kind) for event in events)
        if len(values) > 1:
            raise UnsupportedEventError(
                f"events with {' and with '.join(values)} neighbours cannot be added up; "
                "an ε compares one kind of neighbours"
            )
    return events


def trust_text(events: Iterable[RoundEvent]) -> str:
    """Return in words against whom the events protect."""
    kinds = dict.fromkeys(event.secure_sum for event in events)
    return " and ".join(str(kind) if kind else "the server is trusted" for kind in kinds)


def _loss(
    events: Sequence[RoundEvent], ends: Ends, delta: float, name: str, bound: Bound
) -> PrivacyLoss:
    """Return a loss with a sentence on its assumptions."""
    low, up = ends
    if not low <= up:
        raise AssertionError(f"the ends contradict each other: {low} > {up}")
    relation = events[0].sampling.relation if events else ADD_OR_REMOVE
    unit = events[0].sampling.unit if events else Unit.USER
    policies = " and ".join(dict.fromkeys(event.sampling.policy for event in events)) or "no"
    article = "an" if bound[0] in "aeiou" else "a"
    sentence = (
        f"{unit.title()}-level differential privacy for {relation} neighbours, {policies} sampling "
        f"and Gaussian noise on clipped sums; the {name} accountant gives ε as {article} {bound}; "
        f"{trust_text(events)}."
    )
    if any(event.noise_multiplier == 0.0 for event in events):
        sentence = "No differential privacy: a sum was released without noise."
    return PrivacyLoss(low, up, delta, name, relation, unit, bound, sentence)


_ALL = (
    IntervalAccountant("tight", tightest_epsilon, tightest_delta, tightest_deltas),
    IntervalAccountant(),
    RDPAccountant(),
    CLTAccountant(),
)
ACCOUNTANTS: Mapping[str, Accountant] = MappingProxyType({item.name: item for item in _ALL})
"""All accountants by name, the default first."""


def accountant_named(name: str) -> Accountant:
    """Return the accountant with this name; InvalidValueError if there is none."""
    check_types(accountant=(name, str))
    if name not in ACCOUNTANTS:
        raise InvalidValueError(f"unknown accountant {name!r}; {known_names(name, ACCOUNTANTS)}")
    return ACCOUNTANTS[name]


def epsilon(events: Iterable[RoundEvent], delta: float, accountant: str = "tight") -> PrivacyLoss:
    """Return the cost of the events together at δ in [1e-60, 1), by one of `ACCOUNTANTS`.

    Their order does not matter. Raises InvalidValueError if δ is out of range or there is no such
    accountant, and UnsupportedEventError if it cannot analyse one of the events.

    >>> from fedpriv.accounting.policies import poisson_gaussian
    >>> loss = epsilon([poisson_gaussian(q=0.01, noise_multiplier=4.0, count=10_000)], delta=1e-5)
    >>> round(loss.epsilon_low, 6), round(loss.epsilon, 6)
    (0.946867, 0.946867)
    """
    return accountant_named(accountant).epsilon(events, plain_numbers(delta, "delta"))


def delta(events: Iterable[RoundEvent], epsilon: float, accountant: str = "tight") -> float:
    """Return a δ for which the events together are (ε, δ)-DP at a finite ε ≥ 0.

    Raises the errors of `epsilon`.
    """
    return accountant_named(accountant).delta(events, plain_numbers(epsilon, "epsilon"))


def sampling_text(sampling: SamplingEvent) -> str:
    """Return a short description of how cohorts are drawn.

    >>> from fedpriv.accounting.policies import poisson_gaussian
    >>> sampling_text(poisson_gaussian(0.3, 1.0, 10).sampling)
    'q = 0.3'
    """
    policy, q, schedule = sampling.policy, sampling.sampling_probability, sampling.schedule
    if policy in (SamplingPolicy.POISSON, SamplingPolicy.EXAMPLES):
        return f"q = {text_up(q)}"
    if policy is SamplingPolicy.FIXED_SIZE:
        return f"{policy} cohorts, m = {sampling.expected_cohort_size:.0f}"
    if policy is SamplingPolicy.RANDOM_ALLOCATION and schedule is not None:
        return f"{policy} to {schedule.participations} of {schedule.rounds} rounds"
    if policy in WITH_STRATEGY and schedule is not None:
        chance = "" if q == 1.0 else f", q = {text_up(q)}"
        turns = f"{schedule.separation} groups in turn{chance}"
        return f"{policy}, {turns}, {schedule.rounds} rounds at once"
    return str(policy)
