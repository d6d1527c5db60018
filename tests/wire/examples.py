"""Legal values of every message, drawn by hypothesis, and small ones by hand."""

import math
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.experiment.grouping import proportional_shares
from fedpriv.ledger.events import (
    ANALYSED,
    MOST_EXAMPLES,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
    SecureSum,
    SumQueryEvent,
    Unit,
)
from fedpriv.privacy.clipping import MOST_WEIGHT, Clipping, Indicator
from fedpriv.privacy.gaussian_mechanism import GaussianQuery, Metric, noise_stddevs, sensitivities
from fedpriv.privacy.layout import Layout, VectorGroup, flat
from fedpriv.training.local import AdamW, FedRecon, Scaffold
from fedpriv.training.request import LocalTraining, RoundRequest
from fedpriv.wire import (
    Countersignature,
    Decline,
    EnrolledNode,
    Hello,
    Price,
    Receipt,
    RoundAnswer,
    RoundId,
    RoundOffer,
    RunState,
    SignedHead,
    Stage,
    Status,
    Step,
    SummedUpdates,
    TaskDescription,
    Welcome,
)

LAYOUT = Layout(("w", "b"), ((2, 2), (3,)))
PARAMETERS = {
    "w": np.array([[1.0, np.nan], [np.inf, -0.0]], np.float32),
    "b": np.arange(3, dtype=np.float32),
}
STATISTICS = {"bn.running_mean": np.ones(2, np.float32)}


def priced(q: float = 0.5, z: float = 1.0, users: int = 1000, **said: float) -> Price:
    """The price of a Poisson round, after which ε is 2 at δ = 1e-6 if nothing else is said."""
    event = poisson_gaussian(q, z, population=users)
    return Price(event, 0, **{"epsilon_after": 2.0, "delta": 1e-6, "charges": 0} | said)


def covering(event: RoundEvent, clipping: Clipping) -> RoundEvent:
    """The event with the queries that its noise multiplier makes of a clipping."""
    z, shares = event.noise_multiplier, proportional_shares(clipping.groups)
    stddevs = noise_stddevs(sensitivities(clipping), z, shares)
    return replace(event, queries=GaussianQuery(clipping, stddevs, 1.0, 1.0).events)


PRICE = priced()

# Code points that UTF-8 cannot say are no text on the wire.
characters = st.characters(codec="utf-8")
words = st.text(characters, min_size=1, max_size=8)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
positive = st.floats(1e-12, 1e12)
counts = st.none() | st.integers(1, 2**32 - 1)
uints = st.integers(0, 2**32 - 1)
losses = st.floats(0.0, allow_nan=False)
below_one = st.floats(0.0, 1.0, exclude_max=True)
finite = st.floats(allow_nan=False, allow_infinity=False)

round_ids = st.builds(RoundId, words, uints, uints, st.integers(0, 2**64 - 1))


@st.composite
def events(draw: st.DrawFn) -> RoundEvent:
    """An event of each policy."""
    policy, relation = draw(st.sampled_from(ANALYSED))
    users, probability, schedule = draw(st.integers(2**40, 2**63 - 1)), 1.0, None
    strategy, k, unit = (1.0,), None, draw(st.sampled_from(Unit))
    match policy:
        case SamplingPolicy.POISSON:
            probability = draw(st.floats(0.0, 1.0, exclude_min=True))
        case SamplingPolicy.EXAMPLES:
            probability = draw(st.floats(0.0, 1.0, exclude_min=True))
            k = draw(st.integers(1, MOST_EXAMPLES))
            unit = Unit.USER
        case SamplingPolicy.BANDED_POISSON:
            n, b = draw(uints) + 1, draw(st.integers(1, 1000))
            schedule = Schedule(n, -(-n // min(n, b)), min(n, b))
            probability = draw(st.floats(0.0, 1.0, exclude_min=True))
            strategy = (draw(positive), *draw(st.lists(finite, max_size=min(n, b, 6) - 1)))
        case SamplingPolicy.FIXED_SIZE:
            probability = draw(st.integers(1, 2**40)) / users
        case SamplingPolicy.RANDOM_ALLOCATION | SamplingPolicy.SEPARATED:
            n, times, b = draw(uints) + 1, draw(st.integers(1, 1000)), draw(st.integers(1, 1000))
            separated = policy is SamplingPolicy.SEPARATED
            schedule = Schedule(n, min(n, times), min(n, b) if separated else 1)
            probability = 1.0 if separated else schedule.participations / n
            more = draw(st.lists(finite, max_size=min(n - 1, 5)))
            strategy = (draw(positive), *more) if separated else strategy
    audited = policy is not SamplingPolicy.FIXED_SIZE
    canaries = draw(st.just(0) | st.integers(1, 10**6)) if audited else 0
    sampling = SamplingEvent(policy, probability, users, relation, schedule, unit, k, canaries)
    queries = st.builds(SumQueryEvent, words, positive, losses.filter(math.isfinite))
    return RoundEvent(sampling, tuple(draw(st.lists(queries, min_size=1, max_size=3))), 1, strategy)


@st.composite
def prices(draw: st.DrawFn) -> Price:
    """A price of each part."""
    event = draw(events())
    schedule = event.sampling.schedule
    part = draw(st.integers(0, 0 if schedule is None else schedule.rounds - 1))
    charges = draw(st.integers(0, 2**63 - 1))
    return Price(event, part, draw(losses), draw(below_one), charges, draw(st.booleans()))


digests = st.binary(min_size=32, max_size=32)
hellos = st.builds(
    Hello,
    st.text(st.characters(codec="ascii", min_codepoint=32, max_codepoint=126), min_size=1),
    digests,
)
receipts = st.builds(Receipt, st.booleans(), st.text(characters, max_size=20))
statuses = st.builds(
    Status,
    words,
    uints,
    uints,
    losses,
    losses,
    below_one,
    uints,
    uints,
    uints,
    st.sampled_from(RunState),
)


def make_local(kind: type[LocalTraining], passes: bool, number: int, *rest, **others):
    others["epochs" if passes else "steps"] = number
    if kind is Scaffold:  # on all examples at once
        return Scaffold(rest[0], **{**others, "momentum": 0.0}, control_norm=0.7, control_rate=0.2)
    if kind is FedRecon:  # some of the steps
        steps = {"epochs": None, "steps": 2 + number % 100}
        return FedRecon(*rest, **{**others, **steps}, personal_steps=1, personal_rate=0.5)
    if kind is AdamW:
        return AdamW(*rest, **{**others, "momentum": 0.0}, weight_decay=0.3, beta1=0.7)
    return kind(*rest, **others)


locals_ = st.builds(
    make_local,
    st.sampled_from([LocalTraining, AdamW, Scaffold, FedRecon]),
    st.booleans(),
    st.integers(1, 2**32 - 1),
    positive,
    counts,
    momentum=below_one,
    proximal=st.floats(0.0, 1e300),
    max_examples=counts,
)
metrics = st.builds(
    Metric,
    st.text(
        st.characters(codec="ascii", min_codepoint=33, max_codepoint=126), min_size=1, max_size=8
    ),
    shapes,
    finite,
    st.floats(1e-30, 1e30),
    st.lists(finite, max_size=3).map(tuple),
)
users = st.lists(st.integers(0, 2**40 - 1), unique=True, max_size=20).map(
    lambda drawn: np.array(sorted(drawn), np.int64)
)
options = st.dictionaries(
    words,
    st.recursive(
        st.none() | st.booleans() | st.integers() | finite | st.text(characters, max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
        max_leaves=5,
    ),
    max_size=3,
)
tasks = st.builds(
    TaskDescription,
    words,
    options,
    st.integers(0, 2**63 - 1),
    words,
    st.lists(words, max_size=3).map(tuple),
    words | st.lists(words, min_size=2, max_size=3).map(tuple),
    words,
    st.integers(-(2**63), 2**63 - 1),
    *[st.lists(words, max_size=2).map(tuple)] * 3,
    st.fixed_dictionaries({}, optional={"rank": st.integers(), "layers": st.lists(words)}),
)
welcomes = st.builds(Welcome, words, st.integers(2**40, 2**63 - 1), users, tasks)


@st.composite
def clippings(draw: st.DrawFn, measured: tuple[Metric, ...] = ()) -> Clipping:
    """One or more groups of an update, those of metrics, and perhaps an indicator."""
    names = draw(st.lists(words, unique=True, min_size=1, max_size=5))
    names = [name for name in names if not name.startswith(("metrics/", "unclipped"))] or ["w"]
    parts = draw(st.lists(st.integers(0, 2), min_size=len(names), max_size=len(names)))
    groups = []
    for part in sorted(set(parts)):
        tensors = tuple(n for n, p in zip(names, parts, strict=True) if p == part)
        scales = tuple(draw(positive) for _ in tensors)
        groups.append(VectorGroup(f"group {part}", tensors, draw(positive), scales))
    update = [group.name for group in groups]
    shapes_of = {name: draw(shapes) for name in names}
    for metric in measured:
        shapes_of[metric.tensor] = metric.shape
        groups.append(metric.group)
    indicator = None
    if draw(st.booleans()):
        indicator = Indicator("unclipped", tuple(update))
        shapes_of["unclipped"] = (len(update),)
        groups.append(indicator.group)
    weighted = tuple(draw(st.lists(st.sampled_from(update), unique=True)))
    layout = Layout(tuple(shapes_of), tuple(shapes_of.values()))
    cap = draw(st.integers(1, MOST_WEIGHT))
    return Clipping(layout, tuple(groups), indicator, weighted, cap)


def float32s(shape: tuple[int, ...]) -> st.SearchStrategy[np.ndarray]:
    """Any float32 tensor: NaN of every payload and ±inf too."""
    return hnp.arrays(np.uint32, shape).map(lambda bits: bits.view(np.float32))


@st.composite
def requests(draw: st.DrawFn) -> RoundRequest:
    measured = tuple(draw(st.lists(metrics, max_size=2, unique_by=lambda metric: metric.name)))
    clipping = draw(clippings(measured))
    others = {metric.tensor for metric in measured} | {"unclipped"}
    sizes = dict(zip(clipping.layout.names, clipping.layout.shapes, strict=True))
    wanted = {name: shape for name, shape in sizes.items() if name not in others}
    name = draw(round_ids)
    return RoundRequest(
        name.run,
        name.round,
        name.attempt,
        {tensor: draw(float32s(shape)) for tensor, shape in wanted.items()},
        clipping,
        draw(locals_),
        draw(users),
        draw(digests),
        measured,
        draw(st.sampled_from([{}, {f"{name.run} running": np.ones(2, np.float32)}])),
    )


@st.composite
def offers(draw: st.DrawFn) -> RoundOffer:
    request = draw(requests())
    return RoundOffer.of(request, draw(positive), draw(prices()))


@st.composite
def answers(draw: st.DrawFn) -> RoundAnswer:
    """An answer to a round."""
    number = draw(st.integers(0, 2**20))
    total = SummedUpdates(number, draw(st.integers(0, number * MOST_WEIGHT)))
    decline = Decline(draw(st.text(characters, max_size=20)))
    return RoundAnswer(draw(round_ids), draw(st.sampled_from([total, decline])))


def small_request() -> RoundRequest:
    measured = (Metric("accuracy", (), 0.5, 0.5, (1.0,)),)
    layout = Layout(("w", "b", "metrics/accuracy", "unclipped"), ((2, 2), (3,), (), (1,)))
    indicator = Indicator("unclipped", ("update",))
    groups = (*flat(LAYOUT, 1.0), measured[0].group, indicator.group)
    clipping = Clipping(layout, groups, indicator, ("update",), 20)
    local = LocalTraining(0.25, batch_size=10, epochs=2, max_examples=100)
    drawn = np.array([1, 300], np.int64)
    return RoundRequest(
        "r", 3, 1, PARAMETERS, clipping, local, drawn, bytes(range(32)), measured, STATISTICS
    )


def request_with_control() -> RoundRequest:
    """A request whose users send control variates."""
    local = Scaffold(0.25, epochs=2, control_norm=0.5, max_examples=100)
    group = local.control.group(LAYOUT)
    layout = Layout((*LAYOUT.names, *group.tensors), LAYOUT.shapes * 2)
    clipping = Clipping(layout, (*flat(LAYOUT, 1.0), group))
    control = {name: 3.0 * p for name, p in PARAMETERS.items()}
    drawn = np.array([1, 300], np.int64)
    key = bytes(range(32))
    return RoundRequest("r", 3, 1, PARAMETERS, clipping, local, drawn, key, (), STATISTICS, control)


def small_offer() -> RoundOffer:
    request = small_request()
    return RoundOffer.of(request, 60.0, PRICE)


def small_welcome() -> Welcome:
    task = TaskDescription("mine:net", {"sizes": [2, 3]}, 7, "cross-entropy", ("mine:recall",))
    return Welcome("people", 1000, np.array([1, 300], np.int64), task)


HEAD = SignedHead(7, "5f" * 32, b"certificate of a server", b"its signature")
SIGNATURES = tuple(
    Countersignature(f"n{i}", bytes([i]) * 96, b"certificate", b"signature", HEAD) for i in range(3)
)
STEP = Step(RoundId("run", 3, 1, 7), Stage.SHARE, ("a", "b"), {"a": b"sealed", "c": bytes(9)})


def secure_offer() -> RoundOffer:
    """An offer of a secure sum."""
    secure = SecureSum(3, 1, 0)
    query = replace(PRICE.event.queries[0], granularity=2.0**-60)
    event = replace(PRICE.event, queries=(query,), secure_sum=secure)
    request = replace(small_request(), users=np.empty(0, np.int64))
    price = replace(PRICE, event=event)
    offer = RoundOffer.of(request, 60.0, price, 5, SIGNATURES)
    return replace(offer, fixed_length=True, head=HEAD)


def secure_welcome() -> Welcome:
    """A welcome with the enrolment."""
    nodes = tuple(EnrolledNode(f"n{i}", bytes([i]) * 32, 300 + i) for i in range(3))
    return replace(small_welcome(), users=np.array([1, 300]), nodes=nodes)


@contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Gives a function that says the most bytes that Python and NumPy held inside the block."""
    peak = 0
    tracemalloc.start()
    try:
        yield lambda: peak
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


Compared = RoundOffer | RoundRequest | Welcome


def same(one: Compared, other: Compared) -> bool:
    """Equality field by field and bit by bit."""
    return type(one) is type(other) and all(
        _same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one)
    )


def _same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray):
        one, other = np.asarray(one), np.asarray(other)
        return (one.shape, one.dtype, one.tobytes()) == (other.shape, other.dtype, other.tobytes())
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[name], other[name]) for name in one)
    return one == other
