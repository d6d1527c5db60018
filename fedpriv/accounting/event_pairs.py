"""Which pairs bound what events cost, from above and from below: one analysis for each policy."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType

from fedpriv.accounting.allocation import allocation_pairs
from fedpriv.accounting.fixed_size_pair import FixedSizePair
from fedpriv.accounting.pair import GaussianPair, Pairs
from fedpriv.accounting.poisson_pair import PoissonPair
from fedpriv.accounting.replace_pair import ReplacePair
from fedpriv.accounting.shuffled_pair import LargestBatchPair
from fedpriv.accounting.strategy import compose
from fedpriv.ledger.events import NeighbouringRelation, Pair, RoundEvent, SamplingPolicy, Schedule

ADD_OR_REMOVE, REPLACE = NeighbouringRelation


@dataclass(frozen=True)
class PairBounds:
    """Pairs whose compositions cost no less, and pairs whose compositions cost no more.

    Attributes:
        above: together they dominate the events, adaptively chosen ones included.
        below: together they are something that the events may show. Equal to `above`: exact.
        complete: whether `below` has a share in every event, so that the two are an interval.
    """

    above: Pairs
    below: Pairs
    complete: bool


Analysis = Callable[[Sequence[RoundEvent]], PairBounds]
"""What events of one policy and relation, at least one, cost together."""


def bounds_of(events: Iterable[RoundEvent]) -> PairBounds:
    """Bounds of all events together, each of a kind in `ANALYSES`."""
    kinds: dict[Pair, list[RoundEvent]] = {}
    for event in events:
        kinds.setdefault((event.sampling.policy, event.sampling.relation), []).append(event)
    each = (ANALYSES[kind](alike) for kind, alike in kinds.items())
    return reduce(_both, each, _exact({}))


def _both(first: PairBounds, second: PairBounds) -> PairBounds:
    return PairBounds(
        _sum(first.above, second.above),
        _sum(first.below, second.below),
        first.complete and second.complete,
    )


def _sum(first: Pairs, second: Pairs) -> Pairs:
    total = dict(first)
    for pair, count in second.items():
        total[pair] = total.get(pair, 0) + count
    return total


def _exact(pairs: Pairs) -> PairBounds:
    return PairBounds(pairs, pairs, complete=True)


def _of(kind: type[GaussianPair], events: Iterable[RoundEvent]) -> Pairs:
    """One pair for each (q, noise per sensitivity)."""
    return {kind(q, z): count for (q, z), count in compose(events).items()}


def _poisson(events: Sequence[RoundEvent]) -> PairBounds:
    """Poisson samples when a user is added or removed; all users are a sample with q = 1."""
    return _exact(_of(PoissonPair, events))


def _poisson_replaced(events: Sequence[RoundEvent]) -> PairBounds:
    return _exact(_of(ReplacePair, events))


def _fixed_size(events: Sequence[RoundEvent]) -> PairBounds:
    return PairBounds(_of(FixedSizePair, events), _of(PoissonPair, events), complete=True)


def _shuffled(events: Sequence[RoundEvent]) -> PairBounds:
    """At most one Gaussian for each pass, as in every order one batch alone has the user."""
    below: Pairs = {}
    scheduled = _scheduled(events)
    for event, schedule in scheduled:
        relation = event.sampling.relation
        base = 1.0 if relation is ADD_OR_REMOVE else 0.0
        z = event.noise_multiplier / relation.sensitivity
        below = _sum(below, {LargestBatchPair(schedule.rounds, z, base): event.count})
    return PairBounds(_of(PoissonPair, events), below, len(scheduled) == len(events))


def _scheduled(events: Iterable[RoundEvent]) -> list[tuple[RoundEvent, Schedule]]:
    """The events that say how many rounds they had."""
    each = ((event, event.sampling.schedule) for event in events)
    return [(event, schedule) for event, schedule in each if schedule is not None]


def _separated(events: Sequence[RoundEvent]) -> PairBounds:
    """One Gaussian for each series; from below where its sensitivity is exact."""
    exact = [event for event in events if _falls(event.strategy)]
    below = _of(PoissonPair, exact)
    return PairBounds(_of(PoissonPair, events), below, len(exact) == len(events))


def _falls(strategy: tuple[float, ...]) -> bool:
    """Whether coefficients never increase and stay ≥ 0 (see `strategy_sensitivity`)."""
    return all(a >= b for a, b in zip(strategy, (*strategy[1:], 0.0), strict=True))


def _allocated(events: Sequence[RoundEvent]) -> PairBounds:
    """Exact for one participation or n; else what the sum of all rounds shows is below."""
    bounds = _exact({})
    for event, schedule in _scheduled(events):
        n, k, z = schedule.rounds, schedule.participations, event.noise_multiplier
        above: Pairs = {pair: m * event.count for pair, m in allocation_pairs(n, k, z).items()}
        below: Pairs = {PoissonPair(1.0, z * n**0.5 / k): event.count}
        one = PairBounds(above, above if k in (1, n) else below, complete=True)
        bounds = _both(bounds, one)
    return bounds


ANALYSES: Mapping[Pair, Analysis] = MappingProxyType(
    {
        (SamplingPolicy.POISSON, ADD_OR_REMOVE): _poisson,
        (SamplingPolicy.POISSON, REPLACE): _poisson_replaced,
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
"""The analysis of each policy under each relation."""
