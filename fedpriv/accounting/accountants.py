"""Which analysis serves which events, what an accountant is, and every accountant by its name.

An accountant refuses sampling policies and neighbouring relations that it cannot analyse. To add
one, subclass `Accountant`, list it in `ACCOUNTANTS`, and inherit the conformance suite's tests.

`ANALYSES` has, for each sampling policy and neighbouring relation, the pairs that events cost at
most, and those that they cost at least. The tightest interval of pairs is

* one Gaussian in closed form, where every user takes part in every round;
* an integral along a contour for other Poisson-sampled rounds, which gives some eight digits;
* the composition of privacy losses by FFT (`pld`), which gives three, for other kinds of events and
  where the contour refuses.

The last two share nothing but the definition of the privacy loss, and tests compare them. Many
different rounds are priced in groups, first in few; finer ones follow while the interval is wide.
Where it stays wide, a looser bound may be below its upper end, and takes its place.
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from decimal import ROUND_CEILING, Context, Decimal
from enum import StrEnum
from functools import partial, reduce
from itertools import product
from operator import itemgetter
from types import MappingProxyType

import numpy as np
import scipy

from fedpriv.accounting import classical, contour, gaussian, pld, rdp
from fedpriv.accounting.pld.dominating_pairs import FixedSizePair, PoissonPair, ReplacePair
from fedpriv.accounting.pld.lattice import GaussianPair, LossPair, Pairs
from fedpriv.accounting.pld.random_allocation import allocation_pairs
from fedpriv.accounting.pld.sampled_examples import examples_pair
from fedpriv.accounting.round_counts import (
    Ends,
    Rounds,
    Vector,
    check_epsilon,
    compose,
    decreasing,
    folded,
    grouped,
    unsampled_noise_multiplier,
)
from fedpriv.accounting.selection import selected_rdp
from fedpriv.errors import InvalidValueError, UnsupportedEventError, known_names
from fedpriv.ledger.events import (
    LEAST_DELTA,
    EventKind,
    NeighbouringRelation,
    RoundEvent,
    SamplingPolicy,
    Schedule,
    Selection,
    Unit,
    check_delta,
    kinds_text,
)
from fedpriv.support.checks import check_types, plain_numbers

ADD_OR_REMOVE, REPLACE = NeighbouringRelation

_MOST_ORDER = 1e6  # of RDP, a sum of so many terms
_GROUPS = (64, 512, 2048)  # how many groups of rounds are tried, one after another
_NARROW = 2e-4  # an interval of this relative width is not made narrower by finer groups
_WIDE = 0.1  # relative width of intervals that a looser bound may make narrower


@dataclass(frozen=True)
class PairBounds:
    """Pairs whose compositions cost no less than events, and pairs whose cost no more."""

    above: Pairs  # together they dominate the events, adaptively chosen ones included
    below: Pairs  # an observer of the events can tell as much; equal to `above`: exact
    complete: bool = True  # whether `below` has a share in every event: the two are an interval


def bounds_of(events: Iterable[RoundEvent]) -> PairBounds:
    """Bounds of all events together, each of a kind in `ANALYSES`; their order does not matter."""
    kinds: dict[EventKind, list[RoundEvent]] = {}
    for event in events:
        kinds.setdefault((event.sampling.policy, event.sampling.relation), []).append(event)
    bounds = [ANALYSES[kind](alike) for kind, alike in sorted(kinds.items(), key=itemgetter(0))]
    if len(bounds) == 1:  # as it nearly always is; there may be 100,000 pairs
        return bounds[0]
    above, below = Counter[LossPair](), Counter[LossPair]()
    for each in bounds:
        above.update(each.above)
        below.update(each.below)
    return PairBounds(above, below, all(each.complete for each in bounds))


def _pairs(kind: type[GaussianPair], events: Iterable[RoundEvent]) -> Pairs:
    """One pair for each (q, noise per sensitivity); with q = 1 all kinds are one Gaussian."""
    rounds = compose(events).items()
    return {(PoissonPair if q == 1.0 else kind)(q, z): count for (q, z), count in rounds}


def _exact(kind: type[GaussianPair], events: Sequence[RoundEvent]) -> PairBounds:
    """All users are a Poisson sample with q = 1; rounds within bands are as `compose` says."""
    pairs = _pairs(kind, events)
    return PairBounds(pairs, pairs)


def _fixed_size(events: Sequence[RoundEvent]) -> PairBounds:
    return PairBounds(_pairs(FixedSizePair, events), _pairs(PoissonPair, events))


def _separated(events: Sequence[RoundEvent]) -> PairBounds:
    """One Gaussian for each series; from below where its `strategy_sensitivity` is exact."""
    exact = [event for event in events if decreasing(event.strategy)]
    above, below = _pairs(PoissonPair, events), _pairs(PoissonPair, exact)
    return PairBounds(above, below, len(exact) == len(events))


def _allocated(events: Sequence[RoundEvent]) -> PairBounds:
    """Exact for one participation or n; else what the sum of all rounds shows is below."""
    above, below = Counter[LossPair](), Counter[LossPair]()
    for schedule, rounds in _composed_by_schedule(events):
        n, k = schedule.rounds, schedule.participations
        for (_, z), count in rounds.items():
            pairs = {pair: m * count for pair, m in allocation_pairs(n, k, z).items()}
            above.update(pairs)
            below.update(pairs if k in (1, n) else {PoissonPair(1.0, z * n**0.5 / k): count})
    return PairBounds(above, below)


def _composed_by_schedule(events: Iterable[RoundEvent]) -> Iterator[tuple[Schedule, Rounds]]:
    """Each schedule, in order, and, as `compose` counts them, the passes with it."""
    alike: dict[Schedule, list[RoundEvent]] = {}
    for event in events:
        if event.sampling.schedule is None:
            raise AssertionError("these events always have a schedule")
        alike.setdefault(event.sampling.schedule, []).append(event)
    for schedule, some in sorted(alike.items(), key=lambda item: astuple(item[0])):
        yield schedule, compose(some)


def _sampled_examples(events: Sequence[RoundEvent]) -> PairBounds:
    """Exact: a user's examples may all have the same gradient."""
    alike: dict[int, list[RoundEvent]] = {}
    for event in events:
        alike.setdefault(event.sampling.examples_per_user or 1, []).append(event)
    pairs = Counter[LossPair]()
    for k, some in sorted(alike.items()):
        for (q, z), count in compose(some).items():
            pairs[examples_pair(k, q, z)] += count
    return PairBounds(pairs, pairs)


ANALYSES: Mapping[EventKind, Callable[[Sequence[RoundEvent]], PairBounds]] = MappingProxyType(
    {
        (SamplingPolicy.POISSON, ADD_OR_REMOVE): partial(_exact, PoissonPair),
        (SamplingPolicy.POISSON, REPLACE): partial(_exact, ReplacePair),
        (SamplingPolicy.EVERY_USER, ADD_OR_REMOVE): partial(_exact, PoissonPair),
        (SamplingPolicy.EVERY_USER, REPLACE): partial(_exact, PoissonPair),
        (SamplingPolicy.FIXED_SIZE, REPLACE): _fixed_size,
        (SamplingPolicy.RANDOM_ALLOCATION, ADD_OR_REMOVE): _allocated,
        (SamplingPolicy.SEPARATED, ADD_OR_REMOVE): _separated,
        (SamplingPolicy.SEPARATED, REPLACE): _separated,
        (SamplingPolicy.BANDED_POISSON, ADD_OR_REMOVE): partial(_exact, PoissonPair),
        (SamplingPolicy.BANDED_POISSON, REPLACE): partial(_exact, ReplacePair),
        (SamplingPolicy.EXAMPLES, ADD_OR_REMOVE): _sampled_examples,
    }
)
"""From events of one kind, at least one, to their bounds."""


def poisson_pairs(rounds: Rounds) -> Pairs:
    """The pairs of Poisson-sampled rounds."""
    return {PoissonPair(q, z): count for (q, z), count in rounds.items()}


def tightest_epsilon(pairs: Pairs, delta: float) -> Ends:
    """Ends that hold the least ε for which the pairs together are (ε, δ)-DP."""
    along = gaussian.epsilon_interval, contour.epsilon_interval, pld.epsilon_interval
    return _capped(pairs, delta, _tightest(pairs, delta, *along), along[0], rdp.epsilon_from_rdp)


def tightest_delta(pairs: Pairs, epsilon: float) -> Ends:
    """Ends that hold the least δ for which the pairs together are (ε, δ)-DP; ε is finite."""
    along = gaussian.delta_interval, contour.delta_interval, pld.delta_interval
    return _capped(pairs, epsilon, _tightest(pairs, epsilon, *along), along[0], rdp.delta_from_rdp)


def _capped(
    pairs: Pairs,
    at: float,
    ends: Ends,
    closed_form: Callable[[float, float], Ends],
    converted: Callable[[Sequence[float], Vector, float], float],
) -> Ends:
    """The ends; if they are far apart, the upper one at most as by `rdp`, or without sampling."""
    low, up = ends
    if low >= (1.0 - _WIDE) * up:
        return ends
    everybody, sampled = Counter[tuple[float, float]](), Counter[tuple[float, float]]()
    for pair, count in pairs.items():
        unsampled = 1.0, pair.z / (pair.shift if isinstance(pair, GaussianPair) else 1.0)
        everybody[unsampled] += count
        sampled[(pair.q, pair.z) if isinstance(pair, PoissonPair) else unsampled] += count
    moments = rdp.composed_rdp(sampled, rdp.DEFAULT_ORDERS)
    without_sampling = closed_form(at, unsampled_noise_multiplier(everybody))[1]
    return low, min(up, without_sampling, converted(rdp.DEFAULT_ORDERS, moments, at))


def _tightest(
    pairs: Pairs,
    at: float,
    closed_form: Callable[[float, float], Ends],
    along_contour: Callable[[Rounds, float], Ends],
    composed: Callable[[Pairs, float], Ends],
) -> Ends:
    """What holds for all groupings together; lower ends leave room for the rounding of `folded`."""
    given = {(pair.q, pair.z): n for pair, n in pairs.items() if type(pair) is PoissonPair}
    if len(given) < len(pairs):
        return composed(pairs, at)
    z = unsampled_noise_multiplier(given)
    if z == 0.0 or all(q == 1.0 for q, _ in given):
        return closed_form(at, z)
    rounds, low, up = folded(given), 0.0, math.inf
    for most in _GROUPS:
        above, below = grouped(rounds, most)
        try:
            ends = along_contour(above, at)
            low = max(low, ends[0] if below == above else along_contour(below, at)[0])
            up = min(up, ends[1])
        except contour.ContourUnsuitableError:
            break
        if len(rounds) <= most or up - low <= _NARROW * up:
            break
    if math.isinf(up):
        low, up = composed(pairs if rounds is given else poisson_pairs(rounds), at)
    return low if rounds == given else low * (1 - 2.0**-40), up


# Keeps lower ends below, though `compose` counts noise that is smaller by up to a part in 2³⁶.
_BELOW = 1.0 - 2.0**-30
_LOG_LEAST, _LOG_MOST = math.log(1e-300), math.log1p(-1e-12)
_FINE = 1e-7  # relative, of log δ

_GAUSSIAN = tuple(
    kind
    for kind in ANALYSES
    if kind[0] in (SamplingPolicy.EVERY_USER, SamplingPolicy.SEPARATED)
    or kind in product((SamplingPolicy.POISSON, SamplingPolicy.BANDED_POISSON), [ADD_OR_REMOVE])
)
"""What costs no more than the Poisson-subsampled Gaussian of `compose`, q = 1 included."""


class Bound(StrEnum):
    """What kind of statement an ε is, in words for readers."""

    UPPER = "upper bound"  # the true ε is at most this
    INTERVAL = "interval"  # the true ε is at most this and at least `epsilon_low`
    ESTIMATE = "estimate"  # near the true ε for many rounds; it can be below: no guarantee


@dataclass(frozen=True)
class PrivacyLoss:
    """What events cost together, for the least ε that holds at δ."""

    epsilon_low: float  # of a bound, the true ε is at least this; 0 where it cannot be told
    epsilon: float  # of a bound, the true ε is at most this: the number to report. ∞: not proven
    delta: float  # in [1e-60, 1)
    accountant: str  # its name in `ACCOUNTANTS`
    relation: NeighbouringRelation  # which two populations are compared
    unit: Unit  # in what they differ
    bound: Bound  # what kind of statement `epsilon` is
    assumptions: str  # one sentence for readers

    @property
    def low(self) -> float:
        """Short for `epsilon_low`."""
        return self.epsilon_low

    @property
    def up(self) -> float:
        """Short for `epsilon`."""
        return self.epsilon


_CEILING = Context(prec=400, rounding=ROUND_CEILING)  # no float has more digits before its point


def format_epsilon(epsilon: float) -> str:
    """ε to three decimals, below 0.001 to three digits, rounded up: never below what is true.

    >>> format_epsilon(1.9991), format_epsilon(0.0), format_epsilon(1e306), format_epsilon(math.inf)
    ('2.000', '0.000', '∞', '∞')
    >>> format_epsilon(1.2341e-9)
    '1.24e-9'
    """
    written = repr(float(epsilon))  # the shortest text that is read as this float
    if 0.0 < epsilon < 0.001:
        up = Context(prec=3, rounding=ROUND_CEILING)
        return f"{up.create_decimal(written):.2e}"
    if math.isinf(epsilon * 1000):
        return "∞"
    return str(Decimal(written).quantize(Decimal("0.001"), context=_CEILING))


class Accountant(ABC):
    """Prices events; all its numbers are on the safe side, unless they are tagged as estimates.

    Every accountant keeps these promises; the conformance suite tests each:

    * No events cost ε = 0 and δ = 0 exactly; a round without noise costs ε = ∞.
    * ε falls in the noise multiplier and in δ, and grows in the sampling probability and in the
      number of rounds: a formula's exactly, an interval's up to its width, as ends come from plans
      that differ. What costs more never has an upper end below the lower end of what costs less.
    * Events of two relations or units are refused: an ε compares one kind of neighbours.
    * Neither the order of events, nor how equal events are counted, nor how a round's noise is
      split among its queries changes ε, as long as its noise multiplier is the same.

    An argument out of range raises `InvalidValueError`, and events that the accountant has no
    analysis of `UnsupportedEventError`.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Name in `ACCOUNTANTS`."""

    @abstractmethod
    def epsilon(self, events: Iterable[RoundEvent], delta: float) -> PrivacyLoss:
        """What the events, in any order, cost together at δ in [1e-60, 1)."""

    def upper_epsilon(self, events: Iterable[RoundEvent], delta: float) -> float:
        """ε that the events cost at δ, as `PrivacyBudget` asks for it."""
        return self.epsilon(events, delta).epsilon

    @abstractmethod
    def delta(self, events: Iterable[RoundEvent], epsilon: float) -> float:
        """A δ in [0, 1] for which the events together are (ε, δ)-DP; ε ≥ 0 is finite."""


@dataclass(frozen=True)
class IntervalAccountant(Accountant):
    """Intervals of every policy, by default by composing privacy losses (`pld`).

    Its `epsilon` is an upper bound alone where an event has no share in the lower end: separated
    series whose sensitivity is known from above alone. Its `delta` is the upper end of an interval,
    at least 1e-60 where there is an event.
    """

    name: str = "pld"
    epsilon_interval: Callable[[Pairs, float], Ends] = pld.epsilon_interval  # of ε at δ
    delta_interval: Callable[[Pairs, float], Ends] = pld.delta_interval  # of δ at ε

    def epsilon(self, events: Iterable[RoundEvent], delta: float) -> PrivacyLoss:
        """An interval of ε, or its upper end alone."""
        check_delta(delta)
        events = _checked(events, self.name, tuple(ANALYSES))
        bounds = bounds_of(events)
        low, up = self.epsilon_interval(bounds.above, delta)
        if bounds.below is not bounds.above and bounds.below != bounds.above:
            low, _ = self.epsilon_interval(bounds.below, delta)
        kind = Bound.INTERVAL if bounds.complete else Bound.UPPER
        return _loss(events, (float(low) * _BELOW, float(up)), delta, self.name, kind)

    def delta(self, events: Iterable[RoundEvent], epsilon: float) -> float:
        """The upper end of an interval of δ."""
        check_epsilon(epsilon)
        above = bounds_of(_checked(events, self.name, tuple(ANALYSES))).above
        return max(self.delta_interval(above, epsilon)[1], LEAST_DELTA) if above else 0.0


@dataclass(frozen=True)
class RDPAccountant(Accountant):
    """Upper bounds by the moments accountant (`rdp`), at the best of the orders α in (1, 10⁶].

    The only one that prices searches: `Selection`s, of which each trial costs as much as the
    dearest.
    """

    name: str = field(default="rdp", init=False)
    orders: tuple[float, ...] = rdp.DEFAULT_ORDERS

    def __post_init__(self) -> None:
        wrong = [order for order in self.orders if not 1.0 < order <= _MOST_ORDER]
        if wrong or not self.orders:
            raise InvalidValueError(
                f"orders are {wrong or self.orders}; there must be one or more, each above 1 and "
                f"at most {_MOST_ORDER:g}"
            )

    def epsilon(self, events: Iterable[RoundEvent], delta: float) -> PrivacyLoss:
        """The least ε over the orders."""
        check_delta(delta)
        events = _checked(events, self.name, _GAUSSIAN)
        up = rdp.epsilon_from_rdp(self.orders, self._rdp(events), delta) if events else 0.0
        return _loss(events, (0.0, up), delta, self.name, Bound.UPPER)

    def delta(self, events: Iterable[RoundEvent], epsilon: float) -> float:
        """The least δ over the orders."""
        check_epsilon(epsilon)
        events = _checked(events, self.name, _GAUSSIAN)
        return rdp.delta_from_rdp(self.orders, self._rdp(events), epsilon) if events else 0.0

    def _rdp(self, events: Sequence[RoundEvent]) -> Vector:
        """[orders] RDP of all events together."""
        total = rdp.composed_rdp(compose(e for e in events if not e.selection), self.orders)
        searches = Counter[Selection]()
        for each in events:
            if each.selection is not None:
                searches[each.selection] += each.count
        for search, count in sorted(searches.items(), key=repr):  # in any order that is always one
            total = total + count * self._selected(search)
        return total

    def _selected(self, search: Selection) -> Vector:
        """[orders] RDP of the best of K trials."""
        each = [{(t.sampling_probability, t.noise_multiplier): t.rounds} for t in search.trials]
        most = reduce(np.maximum, [rdp.composed_rdp(rounds, self.orders) for rounds in each])
        deltas = partial(rdp.delta_from_rdp, self.orders, most)
        return selected_rdp(self.orders, most, deltas, search.mean, search.shape)


@dataclass(frozen=True)
class ClassicalAccountant(Accountant):
    """One formula for ε."""

    name: str = "zcdp"
    # ε of rounds at δ; falls as δ grows.
    price: Callable[[Rounds, float], float] = lambda rounds, delta: classical.zcdp_epsilon(
        classical.zcdp_rho(rounds), delta
    )
    bound: Bound = Bound.UPPER

    def epsilon(self, events: Iterable[RoundEvent], delta: float) -> PrivacyLoss:
        """What the formula says at δ."""
        check_delta(delta)
        events = tuple(events)
        rounds = gaussian_rounds(events, self.name)
        up = self.price(rounds, delta) if events else 0.0
        return _loss(events, (0.0, up), delta, self.name, self.bound)

    def delta(self, events: Iterable[RoundEvent], epsilon: float) -> float:
        """The least δ in [1e-300, 1], up to a millionth of log δ, at which ε is not exceeded."""
        check_epsilon(epsilon)
        rounds = gaussian_rounds(events, self.name)
        if not rounds:
            return 0.0

        def excess(log_delta: float) -> float:
            """Above 0 if and only if ε is exceeded, else below."""
            over = self.price(rounds, math.exp(log_delta)) - epsilon
            return over if over > 0.0 else min(over, -math.ulp(0.0))

        if any(z == 0.0 for _, z in rounds) or excess(_LOG_MOST) > 0.0:
            return 1.0
        if excess(_LOG_LEAST) <= 0.0:
            return math.exp(_LOG_LEAST)
        found = scipy.optimize.brentq(
            excess, _LOG_LEAST, _LOG_MOST, xtol=_FINE**2, rtol=_FINE, maxiter=10_000
        )
        while excess(found) > 0.0:  # the root lies within the tolerance, on either side
            found = min(found * (1 - _FINE) + _FINE**2, _LOG_MOST)
        return math.exp(found)


def gaussian_rounds(events: Iterable[RoundEvent], name: str) -> Rounds:
    """Rounds of one Gaussian each that cost at least as much, if each event is of such a kind."""
    return compose(_checked(events, name, _GAUSSIAN))


def _checked(
    events: Iterable[RoundEvent], name: str, legal: Sequence[EventKind]
) -> tuple[RoundEvent, ...]:
    """The events, if each is of a legal kind and all have one relation and unit."""
    kept = tuple(events)
    for sampling in (event.sampling for event in kept):
        if (sampling.policy, sampling.relation) not in legal:
            raise UnsupportedEventError(
                f"the {name} accountant has no analysis of {sampling.policy} sampling with "
                f"{sampling.relation} neighbours; legal is: {kinds_text(legal)}"
            )
    if name != "rdp" and any(event.selection is not None for event in kept):
        raise UnsupportedEventError(
            f"the {name} accountant has no analysis of the best of several trials; rdp has one, so "
            "privacy.accountant must be 'rdp' on a ledger that paid for a search"
        )
    for kind in ("relation", "unit"):
        found = dict.fromkeys(getattr(event.sampling, kind) for event in kept)
        if len(found) > 1:
            raise UnsupportedEventError(
                f"events with {' and with '.join(found)} neighbours cannot be added up; "
                "an ε compares one kind of neighbours"
            )
    return kept


def _loss(
    events: Sequence[RoundEvent], ends: Ends, delta: float, name: str, bound: Bound
) -> PrivacyLoss:
    """A loss, with the sentence that says what was assumed."""
    low, up = ends
    if not low <= up:
        raise AssertionError(f"the ends contradict each other: {low} > {up}")
    relation = events[0].sampling.relation if events else ADD_OR_REMOVE
    unit = events[0].sampling.unit if events else Unit.USER
    used = " and ".join(dict.fromkeys(event.sampling.policy for event in events)) or "no"
    article = "an" if bound[0] in "aeiou" else "a"
    sentence = (
        f"{unit.title()}-level differential privacy for {relation} neighbours, {used} sampling and "
        f"Gaussian noise on clipped sums; the {name} accountant gives ε as {article} {bound}."
    )
    if any(event.noise_multiplier == 0.0 for event in events):
        sentence = "No differential privacy: a sum was released without noise."
    return PrivacyLoss(low, up, delta, name, relation, unit, bound, sentence)


_ALL = (
    IntervalAccountant("tight", tightest_epsilon, tightest_delta),
    IntervalAccountant(),
    RDPAccountant(),
    ClassicalAccountant("gdp", classical.clt_epsilon, Bound.ESTIMATE),
    ClassicalAccountant(),
)
ACCOUNTANTS: Mapping[str, Accountant] = MappingProxyType({each.name: each for each in _ALL})
"""Every accountant by its name, the default first."""


def accountant_named(name: str) -> Accountant:
    """The accountant of this name."""
    check_types(accountant=(name, str))
    if name not in ACCOUNTANTS:
        raise InvalidValueError(f"unknown accountant {name!r}; {known_names(name, ACCOUNTANTS)}")
    return ACCOUNTANTS[name]


def epsilon(events: Iterable[RoundEvent], delta: float, accountant: str = "tight") -> PrivacyLoss:
    """What the events, in any order, cost together at δ in [1e-60, 1), by one of `ACCOUNTANTS`.

    Raises InvalidValueError if δ is out of range or there is no such accountant, and
    UnsupportedEventError if it has no analysis of one of the events.

    >>> from fedpriv.accounting.policies import poisson_gaussian
    >>> loss = epsilon([poisson_gaussian(q=0.01, noise_multiplier=4.0, count=10_000)], delta=1e-5)
    >>> round(loss.low, 6), round(loss.up, 6)
    (0.946867, 0.946867)
    """
    number = plain_numbers(delta, "delta")
    return accountant_named(accountant).epsilon(_listed(events), number)


def delta(events: Iterable[RoundEvent], epsilon: float, accountant: str = "tight") -> float:
    """A δ for which the events together are (ε, δ)-DP; ε ≥ 0 is finite. Raises as `epsilon`."""
    number = plain_numbers(epsilon, "epsilon")
    return accountant_named(accountant).delta(_listed(events), number)


def _listed(events: Iterable[RoundEvent]) -> tuple[RoundEvent, ...]:
    check_types(events=(events, Iterable))
    found = tuple(events)
    for event in found:
        check_types(**{"an event": (event, RoundEvent)})
    return found
