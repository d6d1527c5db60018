"""The messages between server and nodes: a frozen value for each message, and its codec.

Each constructor raises InvalidValueError for a field that is out of range or does not fit the
others.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError, WireError, known_names
from fedpriv.ledger import Head
from fedpriv.ledger.events import RoundEvent
from fedpriv.ledger.ledger import event_from, event_text
from fedpriv.privacy.clipping import MOST_WEIGHT, Clipping, Indicator
from fedpriv.privacy.gaussian_mechanism import Metric
from fedpriv.privacy.layout import Layout, Tensors, VectorGroup
from fedpriv.privacy.round import PartialSum
from fedpriv.secure_sums.protocol import PUBLIC_BYTES
from fedpriv.support.checks import require
from fedpriv.training.local import ALGORITHMS
from fedpriv.training.optimizers import Parameters
from fedpriv.training.request import CONTROL_PREFIX, LocalTraining, RoundRequest
from fedpriv.wire import codec
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.codec import Checked, Codec, FieldCodec, FieldCodecs, Legal, list_of

VERSION = 1  # of the protocol
SUM = "sum"  # name of the vector that is the sum of users' contributions
_MAX_OPTIONS = 100_000  # of one metric
_LONGEST_OPTIONS = 2**16  # characters of a model's options
_LONGEST_EVENT = 2**22  # characters of a round's event
# Commas and brackets in an event, which bound the work and memory of parsing it: enough for a
# strategy of 100,000 coefficients and MAX_TENSORS vector groups.
_MOST_MARKS = 2**17
_ALGORITHMS: Mapping[str, type[LocalTraining]] = {"": LocalTraining, **ALGORITHMS}
_USERS_OF_32_BITS = 63  # each adds less than 2^25 to a component

Positions = npt.NDArray[np.int64]  # users, as ascending positions in the population
Name = Annotated[str, codec.length(1, codec.MAX_NAME)]
Text = Annotated[str, codec.length(0, codec.MAX_NAME)]
Bytes32 = Annotated[bytes, codec.length(32, 32)]
Certificate = Annotated[bytes, codec.length(1, 2**13)]  # in DER
Signature = Annotated[bytes, codec.length(1, 2**11)]
UInt32 = Annotated[int, codec.below(32)]
Signed = Annotated[int, Legal(lambda n: -(2**63) <= n < 2**63, "fit 64 bits with its sign")]
Epsilon = Annotated[float, Legal(lambda epsilon: epsilon >= 0.0, "be a number, not negative")]
Delta = Annotated[float, Legal(lambda delta: 0.0 <= delta < 1.0, "be in [0, 1)")]


def _check_positions(users: Positions, population: int) -> None:
    """Raise InvalidValueError unless users are ascending positions; make them read-only."""
    if users.ndim != 1 or users.dtype != np.int64 or np.any(users[1:] <= users[:-1]):
        raise InvalidValueError("users are not an ascending vector of int64, each once")
    if users.size and not 0 <= users[0] <= users[-1] < population:
        raise InvalidValueError(f"users are not from 0 to {population - 1}")
    users.flags.writeable = False


@dataclass(frozen=True)
class Hello(Checked):
    """The first message of a node, with its name and the `digest_of` the ids of its users."""

    node: Annotated[Name, Legal(str.isprintable, "have printable ones only")]  # of its certificate
    users_sha256: Bytes32
    version: Annotated[int, Legal(lambda n: n == VERSION, f"be {VERSION}, as here")] = VERSION


def digest_of(user_ids: Iterable[str]) -> bytes:
    """Return the SHA-256 of the sorted ids, as the UTF-8 of a JSON array without spaces."""
    text = json.dumps(sorted(user_ids), separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True)
class TaskDescription(Checked):
    """A task, by the names of its model, its loss and the fields that they read: `build_task`."""

    model: str  # a name, or the import path of a function that returns a model
    options: Mapping[str, object]  # arguments of that function, JSON values
    seed: Annotated[int, codec.below(63)]  # of the model's initial and frozen parameters
    loss: str
    metrics: tuple[str, ...] = ()  # import paths of metrics that are not built in
    inputs: str | tuple[str, ...] = "x"  # fields that the model reads; several are named arguments
    targets: Name = "y"  # the field that the loss reads
    ignore_index: Signed = -100  # the class that is ignored; the default is torch's
    # Names or patterns of parameters that stay with users, that they train, and that are frozen.
    personal: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    adapters: Mapping[str, object] = field(default_factory=dict)  # options of `with_adapters`

    @property
    def imports(self) -> tuple[str, ...]:
        """The import paths of code that runs when the task is built."""
        return tuple(name for name in (self.model, self.loss, *self.metrics) if ":" in name)


@dataclass(frozen=True, eq=False)
class Welcome(Checked):
    """The first message of the server to a node."""

    population_name: Name  # as in the ledger
    population: Annotated[int, Legal(lambda n: 1 <= n < 2**63, "be from 1 to 2^63 - 1")]  # N
    # Positions of the node's users in the population, ascending, in the order of the users' ids
    # sorted by code points.
    users: Positions = field(repr=False)
    task: TaskDescription
    purpose: Text = ""  # of the model
    nodes: "tuple[EnrolledNode, ...]" = ()  # all, if the server need not be trusted

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positions(self.users, self.population)


@dataclass(frozen=True)
class EnrolledNode(Checked):
    """A node of an enrolment, which nodes pin by its digest."""

    name: Name
    fingerprint: Bytes32  # SHA-256 of its certificate in DER
    users: UInt32  # their number


def enrolment_digest(nodes: Iterable[EnrolledNode]) -> str:
    """Return SHA-256 of an enrolment, in hexadecimal, for a node's consent."""
    rows = sorted((node.name, node.fingerprint.hex(), node.users) for node in nodes)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


@dataclass(frozen=True)
class RoundId(Checked):
    """One attempt at a round of a run."""

    run: Name
    round: UInt32  # from 0
    attempt: UInt32  # from 0; may repeat that of an attempt that was abandoned without a charge
    nonce: Annotated[int, codec.below(64)] = 0  # random, to distinguish the two


@dataclass(frozen=True)
class Price(Checked):
    """The privacy cost of a round, to which a node may consent."""

    event: RoundEvent  # of the round, as the ledger charges it; not a search
    part: UInt32  # index of the round in its event; the charge of round 0 pays for all
    epsilon_after: Epsilon  # of all charges of the ledger and this round, at delta
    delta: Delta
    charges: Annotated[int, codec.below(63)]  # number of charges that epsilon_after includes
    seeded: bool = False  # cohort and noise come from a seed; no ε protects against its holders

    def __post_init__(self) -> None:
        super().__post_init__()
        event, schedule = self.event, self.event.sampling.schedule
        require(event.count == 1, f"the event has count {event.count}; it must be 1")
        require(event.selection is None, "the event is a whole search; it must be one of rounds")
        n = self.event.sampling.population
        require(n < 2**63, f"population is {n}; it must be from 1 to 2^63 - 1")
        rounds = 1 if schedule is None else schedule.rounds
        condition = f"it must be below {rounds}, the rounds of its event"
        require(self.part < rounds, f"part is {self.part}; {condition}")


@dataclass(frozen=True)
class Proposal:
    """The terms of a round, on which all nodes vote before its cohort is drawn."""

    id: RoundId
    clipping: Clipping
    local: LocalTraining
    metrics: tuple[Metric, ...]
    price: Price
    head: "SignedHead | None" = None  # None in plain text

    def __post_init__(self) -> None:
        update_of(self)  # refuses metrics without tensors

    @classmethod
    def of(cls, source: "RoundRequest | Terms", price: Price) -> "Proposal":
        """Return the terms of a request, without nonce and head, or the terms of an offer."""
        terms = source.clipping, source.local, source.metrics, price
        if isinstance(source, RoundRequest):
            return cls(RoundId(source.run, source.round, source.attempt), *terms)
        return cls(source.id, *terms, source.head)


@dataclass(frozen=True)
class SignedHead(Checked):
    """The head of the server's ledger when it proposed an attempt: `naming.signed_head`."""

    count: Annotated[int, codec.below(63)]  # of charges
    hash: Annotated[str, codec.length(64, 64)]
    certificate: Certificate = field(repr=False)  # of the server
    signature: Signature = field(repr=False)

    @property
    def head(self) -> Head:
        """The head alone."""
        return Head(self.count, self.hash)


@dataclass(frozen=True)
class Vote(Checked):
    """A node's vote on a proposal, which does not depend on users or draws."""

    id: RoundId  # of the proposal
    objection: Text = ""  # one sentence; empty: the node agrees
    countersignature: "Countersignature | None" = None  # if it agrees, and has a certificate


@dataclass(frozen=True)
class Countersignature(Checked):
    """A node's signature of a proposal, with its key for a secure sum."""

    node: Name
    key: Annotated[bytes, codec.length(0, PUBLIC_BYTES)]  # `KeyPair.public`; or empty
    certificate: Certificate = field(repr=False)  # of the node
    signature: Signature = field(repr=False)
    head: SignedHead | None = None  # of its proposal; omitted in a vote


class Stage(IntEnum):
    """The steps of a secure sum, in order; federation.proto says what each sends."""

    SHARE = 1
    AGREE = 2
    SIGN = 3
    OPEN = 4


@dataclass(frozen=True)
class Step(Checked):
    """A node's step in a secure sum, or the server's answer; without content, it is void."""

    id: RoundId
    stage: Stage
    nodes: tuple[str, ...] = ()
    items: Mapping[str, bytes] = field(default_factory=dict)  # by node

    def __bool__(self) -> bool:
        return bool(self.nodes or self.items)


@dataclass(frozen=True, eq=False)
class RoundOffer(Checked):
    """A `RoundRequest` to one node; the tensors of `model` follow separately."""

    id: RoundId
    seconds: Annotated[float, Legal(lambda s: 0.0 < s < math.inf, "be positive and finite")]
    users: Positions  # drawn at the node: ascending, read-only and secret
    clipping: Clipping
    local: LocalTraining
    local_key: Bytes32
    metrics: tuple[Metric, ...]
    price: Price
    roster: tuple[Countersignature, ...] = ()  # of nodes that agreed; in a secure sum, of all
    fixed_length: bool = False  # whether the node waits with its upload until the time is over
    head: SignedHead | None = None  # of the proposal

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positions(self.users, self.price.event.sampling.population)
        names = [member.node for member in self.roster]
        require(names == sorted(set(names)), "the roster is not sorted by distinct names")
        if (secure := self.price.event.secure_sum) is not None:
            nodes = secure.nodes
            require(len(names) >= nodes, f"the roster has {len(names)} nodes; it must be {nodes}")
            require(not self.users.size, "users are given, whom the node must draw itself")
        update_of(self)  # refuses metrics without tensors

    @classmethod
    def of(
        cls,
        request: RoundRequest,
        seconds: float,
        price: Price,
        nonce: int = 0,
        roster: tuple[Countersignature, ...] = (),
    ) -> "RoundOffer":
        """Return the offer to a node that hosts all users of the request; else `replace` them."""
        round_id = RoundId(request.run, request.round, request.attempt, nonce)
        users, clipping, local = request.users.copy(), request.clipping, request.local
        key, metrics = request.local_key, request.metrics
        return cls(round_id, seconds, users, clipping, local, key, metrics, price, roster)

    def model(self, statistics: Layout) -> Layout:
        """Return the layout of `model_of` the request, for a task with these statistics."""
        shapes = update_of(self) | dict(zip(statistics.names, statistics.shapes, strict=True))
        return Layout(tuple(shapes), tuple(shapes.values()))

    def request(self, tensors: Tensors) -> RoundRequest:
        """Return the offered request, given the tensors of `model`."""
        statistics: dict[str, Any] = dict(tensors)
        update = [name for name in tensors if name in self.clipping.layout.names]
        weights = {name: statistics.pop(name) for name in update}
        changes = [name for name in update if name.startswith(CONTROL_PREFIX)]
        control = {name.removeprefix(CONTROL_PREFIX): weights.pop(name) for name in changes}
        attempt, clipping, local = self.id, self.clipping, self.local
        details = self.users, self.local_key, self.metrics, statistics, control
        return RoundRequest(
            attempt.run, attempt.round, attempt.attempt, weights, clipping, local, *details
        )


Terms = Proposal | RoundOffer  # a node consents to the fields that both have


def update_of(terms: Terms) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of the update by name: all but metrics and the indicator.

    InvalidValueError: a metric has no tensor of its own, of its shape.
    """
    layout, indicator = terms.clipping.layout, terms.clipping.indicator
    shapes = dict(zip(layout.names, layout.shapes, strict=True))
    for metric in terms.metrics:
        unfit = f"metric {metric.name!r} is given twice, or has no tensor of its shape"
        require(shapes.pop(metric.tensor, None) == metric.shape, unfit)
    if indicator is not None:
        shapes.pop(indicator.tensor, None)
    return shapes


def model_of(request: RoundRequest) -> Parameters:
    """Return the tensors that follow an offer: parameters, control variates, running statistics.

    InvalidValueError: a name occurs among parameters and statistics.
    """
    if shared := sorted(set(request.parameters) & set(request.statistics)):
        raise InvalidValueError(f"{shared} are parameters and statistics; each must be one")
    control = {CONTROL_PREFIX + name: c for name, c in request.control.items()}
    tensors = {**request.parameters, **control, **request.statistics}
    return {name: tensor.astype(np.float32, copy=False) for name, tensor in tensors.items()}


@dataclass(frozen=True)
class SummedUpdates:
    """The header of a `PartialSum`, whose total follows; both numbers are secret."""

    users: int  # number of contributions in the sum, at most 2^20
    weight: int  # sum of their weights, in units of 1/c
    masked: bool = False  # then both numbers are 0 and say nothing

    def __post_init__(self) -> None:
        if not 0 <= self.users <= codec.MAX_USERS:
            raise InvalidValueError(f"the number of users is not from 0 to {codec.MAX_USERS}")
        if not 0 <= self.weight <= self.users * MOST_WEIGHT:
            raise InvalidValueError("the weight of users is negative or too large for their number")
        if self.masked and self.users:
            raise InvalidValueError("the sum is masked and says how many users it holds")

    @property
    def dtype(self) -> codec.Number:
        """Type of an unmasked sum: 32 bits if there are few enough users."""
        return codec.INT32 if self.users <= _USERS_OF_32_BITS else codec.INT64


def sum_to_send(partial: PartialSum) -> tuple[SummedUpdates, Tensors]:
    """Return the header of a partial sum, without its node, and its total, as it is sent."""
    header = SummedUpdates(partial.users, partial.weight)
    return header, {SUM: partial.total.astype(header.dtype, copy=False)}


@dataclass(frozen=True)
class Decline(Checked):
    """The node does not take part, and its users count as zero; the reason names no user."""

    reason: Text


@dataclass(frozen=True)
class RoundAnswer:
    """A node's answer to the offer of a round."""

    id: RoundId
    content: SummedUpdates | Decline


@dataclass(frozen=True)
class Receipt(Checked):
    """The server's receipt for an answer: accepted, or the reason why not."""

    accepted: bool
    reason: Text = ""


class RunState(StrEnum):
    """The present activity of a server."""

    WAITING = "waiting"
    COLLECTING = "collecting"
    RELEASING = "releasing"
    FINISHED = "finished"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Status(Checked):
    """The progress of a federation, which reveals nothing about who was drawn."""

    run: Name
    round: UInt32  # the newest one that is being collected or was released, from 1; 0: none
    rounds: UInt32  # of the plan
    epsilon: Epsilon  # spent, at delta
    epsilon_limit: Epsilon
    delta: Delta
    nodes_enrolled: UInt32
    nodes_connected: UInt32
    users_enrolled: UInt32
    state: RunState


def _head_of(count: int, hash: str) -> Head | None:  # noqa: A002 - as the message names it
    """Return the head after which records are requested; None: all records."""
    require(count < 2**63, f"count is {count}; it must be below 2^63")
    return Head(count, hash) if hash else None


def _encode_options(options: Mapping[str, object]) -> str:
    text = json.dumps(dict(options), allow_nan=False)
    if json.loads(text) != options:  # JSON changes tuples, and keys that are numbers
        raise ValueError("the options hold values that JSON does not have")
    return text


def _decode_options(text: str) -> dict[str, object]:
    options = json.loads(text)
    if not isinstance(options, dict):
        raise ValueError("the options are not a JSON object")
    json.dumps(options, allow_nan=False)  # refuses NaN and infinity, which `loads` accepts
    return options


def _check_groups(message: pb.Clipping) -> None:
    groups, tensors = len(message.groups), len(message.layout.names)
    grouped = sum(len(group.tensors) for group in message.groups)
    if grouped != tensors:
        raise WireError(f"vector groups hold {grouped} tensors; it must be all {tensors}, once")
    codec.at_most("weighted groups", len(message.weighted), groups)
    codec.at_most("groups of an indicator", len(message.indicator.groups), groups)


def _spelled_out(local: LocalTraining) -> Any:
    """Return the message's fields of local training; WireError if nodes lack the algorithm."""
    names = [name for name, kind in _ALGORITHMS.items() if kind is type(local)]
    if not names:
        unknown = f"local training is {type(local).__name__}, which nodes do not know"
        raise WireError(f"{unknown}; known names: {', '.join(ALGORITHMS)}")
    with codec.refusing("local training"):
        return SimpleNamespace(
            algorithm=names[0], options={**vars(local), "learning_rate": local.rate}
        )


def _local_training(algorithm: str, options: Mapping[str, Any]) -> LocalTraining:
    """Return local training from a message's fields; ValueError if they are inconsistent."""
    if algorithm not in _ALGORITHMS:
        hint = known_names(algorithm, ALGORITHMS)
        raise InvalidValueError(f"algorithm is {algorithm!r}; {hint}")
    return _ALGORITHMS[algorithm](**options)


def _bounded(options: Mapping[str, object]) -> dict[str, object]:
    for name, number in options.items():
        if isinstance(number, int) and number >= 2**32:
            raise ValueError(f"{name} is {number}; it must be below 2^32")
    return dict(options)


def _checked_marks(text: str) -> str:
    codec.at_most("commas and brackets in an event", sum(map(text.count, ",[{")), _MOST_MARKS)
    return text


_JSON = FieldCodec(_encode_options, _decode_options)
_POSITIONS = FieldCodec(np.ndarray.tolist, lambda users: np.array(users, np.int64))
HELLO = Codec(Hello, pb.Hello, "a hello")
_INPUTS = FieldCodec(
    lambda names: [names] if isinstance(names, str) else list(names),
    lambda names: names[0] if len(names) == 1 else tuple(names),
)
_TASK_FIELDS: FieldCodecs = {"options": _JSON, "inputs": _INPUTS, "adapters": _JSON}
TASK = Codec(TaskDescription, pb.Task, "a task", _TASK_FIELDS, {"options": _LONGEST_OPTIONS})
_ENROLLED = Codec(EnrolledNode, pb.EnrolledNode, "an enrolled node")
_WELCOME_FIELDS: FieldCodecs = {"users": _POSITIONS, "task": TASK, "nodes": list_of(_ENROLLED)}
WELCOME = Codec(Welcome, pb.Welcome, "a welcome", _WELCOME_FIELDS, {"users": codec.MAX_USERS})
LEDGER_REQUEST = Codec(_head_of, pb.LedgerRequest, "a request for the ledger")
ROUND_ID = Codec(RoundId, pb.RoundId, "the name of a round")
_EVENT = FieldCodec(
    lambda event: _checked_marks(event_text(event)), lambda text: event_from(_checked_marks(text))
)
PRICE = Codec(Price, pb.Price, "a price", {"event": _EVENT}, {"event": _LONGEST_EVENT})
_CLIPPING_FIELDS: FieldCodecs = {
    "layout": codec.LAYOUT,
    "groups": list_of(Codec(VectorGroup, pb.VectorGroup, "a vector group")),
    "indicator": Codec(Indicator, pb.Indicator, "an indicator"),
}
CLIPPING = Codec(
    Clipping, pb.Clipping, "a clipping", _CLIPPING_FIELDS, {}, _check_groups, "indicator"
)
_BOUNDED = FieldCodec(
    lambda options: _encode_options(_bounded(options)), lambda text: _bounded(_decode_options(text))
)
_LOCAL = Codec(_local_training, pb.LocalTraining, "local training", {"options": _BOUNDED})
LOCAL_TRAINING = FieldCodec(lambda local: _LOCAL.encode(_spelled_out(local)), _LOCAL.decode)
METRIC = Codec(Metric, pb.Metric, "a metric", {"shape": codec.SHAPE}, {"options": _MAX_OPTIONS})
HEAD = Codec(SignedHead, pb.SignedHead, "a signed head")
COUNTERSIGNATURE = Codec(
    Countersignature, pb.Countersignature, "a countersignature", {"head": HEAD}, optional="head"
)
_OFFER_FIELDS: FieldCodecs = {
    "id": ROUND_ID,
    "users": _POSITIONS,
    "clipping": CLIPPING,
    "local": LOCAL_TRAINING,
    "metrics": list_of(METRIC),
    "price": PRICE,
    "roster": list_of(COUNTERSIGNATURE),
    "head": HEAD,
}
OFFER = Codec(
    RoundOffer, pb.Offer, "an offer", _OFFER_FIELDS, {"users": codec.MAX_USERS}, optional="head"
)
PROPOSAL = Codec(Proposal, pb.Proposal, "a proposal", _OFFER_FIELDS, optional="head")
_VOTE_FIELDS: FieldCodecs = {"id": ROUND_ID, "countersignature": COUNTERSIGNATURE}
VOTE = Codec(Vote, pb.Vote, "a vote", _VOTE_FIELDS, optional="countersignature")
_ITEMS = FieldCodec(
    lambda items: [pb.Item(node=node, content=items[node]) for node in sorted(items)],
    lambda items: {item.node: item.content for item in items},
)
_STEP_FIELDS: FieldCodecs = {"id": ROUND_ID, "stage": FieldCodec(int, Stage), "items": _ITEMS}
STEP = Codec(Step, pb.Step, "a step", _STEP_FIELDS)
_CONTENTS: Mapping[str, Codec[Any, Any]] = {
    "sum": Codec(SummedUpdates, pb.PartialSum, "a sum"),
    "decline": Codec(Decline, pb.Decline, "a decline"),
}
RECEIPT = Codec(Receipt, pb.Receipt, "a receipt")
STATUS = Codec(Status, pb.Status, "a status", {"state": FieldCodec(str, RunState)})


def encode_answer(answer: RoundAnswer) -> pb.Answer:
    """Return the message of an answer; WireError if it exceeds a limit."""
    message = pb.Answer(id=ROUND_ID.encode(answer.id))
    name = next(name for name, inner in _CONTENTS.items() if inner.value is type(answer.content))
    getattr(message, name).CopyFrom(_CONTENTS[name].encode(answer.content))
    codec.check_size("an answer", message, codec.SERVER_RECEIVES_BYTES)
    return message


def decode_answer(message: pb.Answer) -> RoundAnswer:
    """Return the answer in a message, or raise WireError."""
    name = message.WhichOneof("what")
    if name is None:
        raise WireError("an answer is empty; it must be a sum or a decline")
    content = _CONTENTS[name].decode(getattr(message, name))
    return RoundAnswer(ROUND_ID.decode(message.id), content)
