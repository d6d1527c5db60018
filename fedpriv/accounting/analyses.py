"""Which analysis serves which events: from events to dominating pairs, from pairs to intervals.

`ANALYSES` has, for each sampling policy and neighbouring relation, the pairs that events cost at
most, and those that they cost at least. The tightest interval of pairs is

* one Gaussian in closed form, where every user takes part in every round;
* an integral along a contour for other Poisson-sampled rounds, which gives some eight digits;
* the composition of privacy losses by FFT (`pld`), which gives three, for other kinds of events and
  where the contour refuses.

The last two share nothing but the definition of the privacy loss; tests hold them against each
other. Many different rounds are priced in groups, first in few; finer ones follow while the
interval is wide.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from fedpriv.accounting import contour, gaussian, pld
from fedpriv.accounting.gaussian import Ends
from fedpriv.accounting.pld.dominating_pairs import (
    FixedSizePair,
    LargestBatchPair,
    PoissonPair,
    ReplacePair,
)
from fedpriv.accounting.pld.lattice import GaussianPair, LossPair, Pairs
from fedpriv.accounting.pld.random_allocation import allocation_pairs
from fedpriv.accounting.round_counts import (
    Rounds,
    compose,
    decreasing,
    folded,
    grouped,
    unsampled_noise_multiplier,
)
from fedpriv.ledger.events import EventKind, NeighbouringRelation, RoundEvent, SamplingPolicy

ADD_OR_REMOVE, REPLACE = NeighbouringRelation

_GROUPS = (64, 512, 2048)  # how many groups of rounds are tried, one after another
_NARROW = 2e-4  # an interval of this relative width is not made narrower by finer groups


@dataclass(frozen=True)
class PairBounds:
    """Pairs whose compositions cost no less than events, and pairs whose cost no more."""

    above: Pairs  # together they dominate the events, adaptively chosen ones included
    below: Pairs  # an observer of the events can tell as much; equal to `above`: exact
    complete: bool = True  # whether `below` has a share in every event: the two are an interval


def bounds_of(events: Iterable[RoundEvent]) -> PairBounds:
    """Bounds of all events together, each of a kind in `ANALYSES`."""
    kinds: dict[EventKind, list[RoundEvent]] = {}
    for event in events:
        kinds.setdefault((event.sampling.policy, event.sampling.relation), []).append(event)
    bounds = [ANALYSES[kind](alike) for kind, alike in kinds.items()]
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


def _poisson(events: Sequence[RoundEvent]) -> PairBounds:
    """Exact; all users are a Poisson sample with q = 1."""
    pairs = _pairs(PoissonPair, events)
    return PairBounds(pairs, pairs)


def _replaced(events: Sequence[RoundEvent]) -> PairBounds:
    pairs = _pairs(ReplacePair, events)
    return PairBounds(pairs, pairs)


def _fixed_size(events: Sequence[RoundEvent]) -> PairBounds:
    return PairBounds(_pairs(FixedSizePair, events), _pairs(PoissonPair, events))


def _shuffled(events: Sequence[RoundEvent]) -> PairBounds:
    """At most one Gaussian for each pass, as in every order one batch alone has the user."""
    below = Counter[LossPair]()
    complete = True
    for event in events:
        schedule, relation = event.sampling.schedule, event.sampling.relation
        if schedule is None:  # how many batches there were is unknown
            complete = False
        else:
            z = event.noise_multiplier / relation.sensitivity
            base = 1.0 if relation is ADD_OR_REMOVE else 0.0
            below[LargestBatchPair(schedule.rounds, z, base)] += event.count
    return PairBounds(_pairs(PoissonPair, events), below, complete)


def _separated(events: Sequence[RoundEvent]) -> PairBounds:
    """One Gaussian for each series; from below where its `strategy_sensitivity` is exact."""
    exact = [event for event in events if decreasing(event.strategy)]
    above, below = _pairs(PoissonPair, events), _pairs(PoissonPair, exact)
    return PairBounds(above, below, len(exact) == len(events))


def _allocated(events: Sequence[RoundEvent]) -> PairBounds:
    """Exact for one participation or n; else what the sum of all rounds shows is below."""
    above, below = Counter[LossPair](), Counter[LossPair]()
    for event in events:
        if event.sampling.schedule is None:
            raise AssertionError("a random allocation always has a schedule")
        n, k = event.sampling.schedule.rounds, event.sampling.schedule.participations
        z, count = event.noise_multiplier, event.count
        pairs = {pair: m * count for pair, m in allocation_pairs(n, k, z).items()}
        above.update(pairs)
        below.update(pairs if k in (1, n) else {PoissonPair(1.0, z * n**0.5 / k): count})
    return PairBounds(above, below)


ANALYSES: Mapping[EventKind, Callable[[Sequence[RoundEvent]], PairBounds]] = MappingProxyType(
    {
        (SamplingPolicy.POISSON, ADD_OR_REMOVE): _poisson,
        (SamplingPolicy.POISSON, REPLACE): _replaced,
        (SamplingPolicy.EVERY_USER, ADD_OR_REMOVE): _poisson,
        (SamplingPolicy.EVERY_USER, REPLACE): _poisson,
        (SamplingPolicy.FIXED_SIZE, REPLACE): _fixed_size,
        (SamplingPolicy.SHUFFLED, ADD_OR_REMOVE): _shuffled,
        (SamplingPolicy.SHUFFLED, REPLACE): _shuffled,
        (SamplingPolicy.RANDOM_ALLOCATION, ADD_OR_REMOVE): _allocated,
        (SamplingPolicy.SEPARATED, ADD_OR_REMOVE): _separated,
        (SamplingPolicy.SEPARATED, REPLACE): _separated,
    }
)
"""From events of one kind, at least one, to their bounds."""


def poisson_pairs(rounds: Rounds) -> Pairs:
    """The pairs of Poisson-sampled rounds."""
    return {PoissonPair(q, z): count for (q, z), count in rounds.items()}


def epsilon_interval(pairs: Pairs, delta: float) -> Ends:
    """Ends that hold the least ε for which the pairs together are (ε, δ)-DP."""
    along = gaussian.epsilon_interval, contour.epsilon_interval, pld.epsilon_interval
    return _tightest(pairs, delta, *along)


def delta_interval(pairs: Pairs, epsilon: float) -> Ends:
    """Ends that hold the least δ for which the pairs together are (ε, δ)-DP; ε is finite."""
    along = gaussian.delta_interval, contour.delta_interval, pld.delta_interval
    return _tightest(pairs, epsilon, *along)


def _tightest(
    pairs: Pairs,
    at: float,
    closed_form: Callable[[float, float], Ends],
    along_contour: Callable[[Rounds, float], Ends],
    composed: Callable[[Pairs, float], Ends],
) -> Ends:
    """What holds for all groupings together; lower ends leave room for the rounding of `folded`."""
    given = {(pair.q, pair.z): n for pair, n in pairs.items() if isinstance(pair, PoissonPair)}
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
        low, up = composed(poisson_pairs(rounds), at)
    return low if rounds == given else low * (1 - 2.0**-40), up
