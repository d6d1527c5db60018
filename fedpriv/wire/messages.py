"""What server and nodes say to each other: a frozen value for each message, and its codec.

In the order of a connection: hello and welcome, the offer of a round with its price, the answer
and its receipt, and the status of the federation. Each `decode_x` is total: it returns a value
that the constructor accepted, or raises WireError. Each `encode_x` raises WireError for a value
that the other side would refuse. Each constructor raises InvalidValueError for a field that is out
of range or does not fit the others.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError, WireError
from fedpriv.privacy.clipping import MOST_WEIGHT, Clipping, Indicator
from fedpriv.privacy.gaussian_mechanism import Metric
from fedpriv.privacy.layout import Layout, Tensors, VectorGroup
from fedpriv.privacy.round import LocalTraining, PartialSum, RoundRequest
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.codec import (
    ENVELOPE_BYTES,
    MAX_NAME,
    MAX_USERS,
    NODE_RECEIVES_BYTES,
    SERVER_RECEIVES_BYTES,
    Codec,
    Part,
    at_most,
    each,
    one,
    refusing,
)
from fedpriv.wire.tensors import (
    FLOAT32,
    INT32,
    INT64,
    LAYOUT,
    Manifest,
    Number,
    check_shape,
    decode_manifest,
    encode_manifest,
    expect_manifest,
)

VERSION = 1
"""Of the protocol."""
MAX_OPTIONS = 100_000
"""Of one metric."""
LONGEST_OPTIONS = 2**16
"""Characters of a model's options."""
_POSITIONS = Part(np.ndarray.tolist, lambda users: np.array(users, np.int64))

Parameters = Mapping[str, npt.NDArray[np.float32]]


def _check(owner: object, name: str, legal: Callable[..., bool], reading: str) -> None:
    value = getattr(owner, name)
    if not legal(value):
        raise InvalidValueError(f"{name} is {value}; it must be {reading}")


def _check_length(what: str, text: str | bytes, least: int, most: int) -> None:
    if not least <= len(text) <= most:
        unit = "characters" if isinstance(text, str) else "bytes"
        raise InvalidValueError(f"{what} has {len(text)} {unit}; legal are {least} to {most}")


def _check_bits(owner: object, bits: int, *names: str) -> None:
    for name in names:
        _check(owner, name, lambda n: 0 <= n < 2**bits, f"from 0 to 2^{bits} - 1")


def _check_population(owner: object) -> None:
    _check(owner, "population", lambda n: 1 <= n < 2**63, "from 1 to 2^63 - 1")


def _check_positions(users: npt.NDArray[np.int64], population: int) -> None:
    """Refuse other than ascending positions in the population, and make them read-only."""
    if users.ndim != 1 or users.dtype != np.int64 or np.any(users[1:] <= users[:-1]):
        raise InvalidValueError("users are not an ascending vector of int64, each once")
    if users.size and not 0 <= users[0] <= users[-1] < population:
        raise InvalidValueError(f"users are not from 0 to {population - 1}")
    users.flags.writeable = False


@dataclass(frozen=True)
class Hello:
    """A node says who it is.

    Attributes:
        node: its name, from 1 to 1024 printable characters; must be that in its certificate.
        users_sha256: `digest_of` the ids of the users that it holds, 32 bytes.
        version: of the protocol that it speaks; must be `VERSION`.
    """

    node: str
    users_sha256: bytes
    version: int = VERSION

    def __post_init__(self) -> None:
        _check_length("node", self.node, 1, MAX_NAME)
        if not self.node.isprintable():
            raise InvalidValueError(f"node is {self.node!r}; all characters must be printable")
        _check(self, "version", lambda version: version == VERSION, f"{VERSION}, of this side")
        _check_length("users_sha256", self.users_sha256, 32, 32)


_HELLO = Codec(Hello, pb.Hello, "a hello")
encode_hello, decode_hello = _HELLO.encode, _HELLO.decode


def digest_of(user_ids: Iterable[str]) -> bytes:
    """SHA-256 of ids in any order: of the UTF-8 of their JSON array, sorted, without spaces."""
    text = json.dumps(sorted(user_ids), separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True)
class TaskDescription:
    """Model and loss by name, as `fedpriv.build.build_task` reads them.

    Attributes:
        model: name of a model, or import path of a function that makes one.
        options: arguments of that function; values that JSON has, so lists and no tuples.
        seed: of the model's initial and frozen parameters, in 63 bits.
        loss: name of a loss, or import path.
        metrics: import paths of the metrics that are not built in.
    """

    model: str
    options: Mapping[str, object]
    seed: int
    loss: str
    metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_bits(self, 63, "seed")

    @property
    def imports(self) -> tuple[str, ...]:
        """The import paths in it: code that building the task runs."""
        return tuple(name for name in (self.model, self.loss, *self.metrics) if ":" in name)


@dataclass(frozen=True, eq=False)
class Welcome:
    """What the server says to a node that has connected.

    Attributes:
        population_name: as in the ledger, from 1 to 1024 characters.
        population: N, the number of enrolled users, at least 1.
        users: positions of the node's users, ascending: the k-th is that of the node's k-th user,
            ids sorted by code points; at most 2^20, read-only.
        task: what is trained.
    """

    population_name: str
    population: int
    users: npt.NDArray[np.int64] = field(repr=False)
    task: TaskDescription

    def __post_init__(self) -> None:
        _check_length("population_name", self.population_name, 1, MAX_NAME)
        _check_population(self)
        _check_positions(self.users, self.population)


def _encode_options(options: Mapping[str, object]) -> str:
    try:
        text = json.dumps(dict(options), allow_nan=False)
    except RecursionError as error:
        raise WireError("the options of a model are nested too deeply") from error
    # Tuples and keys that are numbers would arrive as something else.
    if json.loads(text) != options:
        raise WireError("the options of a model hold values that JSON does not have")
    return text


def _decode_options(text: str) -> dict[str, object]:
    try:
        options = json.loads(text, parse_constant=_refuse_number, parse_float=_finite)
    except RecursionError as error:
        raise WireError("the options of a model are nested too deeply") from error
    if not isinstance(options, dict):
        raise WireError("the options of a model are not a JSON object")
    return options


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse_number(digits)


def _refuse_number(number: str) -> NoReturn:
    raise WireError(f"the options of a model hold {number[:20]}, which is not a JSON number")


_TASK = Codec(
    TaskDescription,
    pb.Task,
    "a task",
    {"options": Part(_encode_options, _decode_options)},
    limits={"options": LONGEST_OPTIONS},
)
_WELCOME = Codec(
    Welcome,
    pb.Welcome,
    "a welcome",
    {"users": _POSITIONS, "task": one(_TASK)},
    limits={"users": MAX_USERS},
    longest=NODE_RECEIVES_BYTES - ENVELOPE_BYTES,
)
encode_welcome, decode_welcome = _WELCOME.encode, _WELCOME.decode


@dataclass(frozen=True)
class RoundId:
    """One attempt at a round of a run.

    Attributes:
        run: name of the run, from 1 to 1024 characters.
        round: number of the round, from 0.
        attempt: number of the attempt at this round, from 0.
        nonce: random, in 64 bits: tells apart two attempts of one number, of which the first was
            abandoned without a charge.
    """

    run: str
    round: int
    attempt: int
    nonce: int = 0

    def __post_init__(self) -> None:
        _check_length("run", self.run, 1, MAX_NAME)
        _check_bits(self, 32, "round", "attempt")
        _check_bits(self, 64, "nonce")


_ROUND_ID = Codec(RoundId, pb.RoundId, "the name of a round")
encode_round_id, decode_round_id = _ROUND_ID.encode, _ROUND_ID.decode


@dataclass(frozen=True)
class Price:
    """What a round costs the users, for a node to consent to or not.

    Attributes:
        sampling_probability: q in (0, 1].
        population: N, the number of enrolled users, at least 1.
        noise_multiplier: z ≥ 0 of the whole round.
        epsilon_after: ε ≥ 0 at `delta` of all charges of the ledger and this round; may be inf.
        delta: δ in [0, 1).
    """

    sampling_probability: float
    population: int
    noise_multiplier: float
    epsilon_after: float
    delta: float

    def __post_init__(self) -> None:
        _check(self, "sampling_probability", lambda q: 0.0 < q <= 1.0, "in (0, 1]")
        _check_population(self)
        _check(self, "noise_multiplier", lambda z: 0.0 <= z < math.inf, "finite and not negative")
        _check(self, "epsilon_after", lambda epsilon: epsilon >= 0.0, "a number, not negative")
        _check(self, "delta", lambda delta: 0.0 <= delta < 1.0, "in [0, 1)")


@dataclass(frozen=True, eq=False)
class RoundOffer:
    """A `RoundRequest` to one node; the tensors of the model follow separately.

    Attributes:
        id: which round.
        seconds: until the deadline, > 0.
        users: the drawn users of the node, positions in the enrolled population, ascending;
            secret, and read-only.
        clipping: as in the request.
        local: as in the request.
        local_key: as in the request, 32 bytes.
        metrics: as in the request.
        price: what the round costs.
        model: what follows: float32, the update's tensors as `clipping` orders them, then running
            statistics.
    """

    id: RoundId
    seconds: float
    users: npt.NDArray[np.int64]
    clipping: Clipping
    local: LocalTraining
    local_key: bytes
    metrics: tuple[Metric, ...]
    price: Price
    model: Manifest

    def __post_init__(self) -> None:
        _check(self, "seconds", lambda seconds: 0.0 < seconds < math.inf, "positive and finite")
        _check_length("local_key", self.local_key, 32, 32)
        _check_positions(self.users, self.price.population)
        layout = self.clipping.layout
        shapes = dict(zip(layout.names, layout.shapes, strict=True))
        for metric in self.metrics:
            if shapes.pop(metric.tensor, None) != metric.shape:
                raise InvalidValueError(
                    f"metric {metric.name!r} is given twice, or has no tensor of its shape"
                )
        if self.clipping.indicator is not None:
            shapes.pop(self.clipping.indicator.tensor, None)
        model = self.model.layout
        first = list(zip(model.names, model.shapes, strict=True))[: len(shapes)]
        if not shapes or first != list(shapes.items()):
            raise InvalidValueError("the model does not begin with the tensors of the update")
        if self.model.dtype != FLOAT32:
            raise InvalidValueError(f"the model is {self.model.dtype}; it must be {FLOAT32}")

    @classmethod
    def of(
        cls, request: RoundRequest, seconds: float, price: Price, model: Manifest, nonce: int = 0
    ) -> "RoundOffer":
        """The offer of a request to a node that hosts all of its users.

        For a node that hosts some, `dataclasses.replace` the users. The model is that of
        `manifest_of(model_of(request))`, the same for all nodes.
        """
        return cls(
            RoundId(request.run, request.round, request.attempt, nonce),
            seconds,
            request.users.copy(),
            request.clipping,
            request.local,
            request.local_key,
            request.metrics,
            price,
            model,
        )

    def request(self, tensors: Parameters) -> RoundRequest:
        """The request that was offered.

        Raises:
            InvalidValueError: the tensors are not those of `model`.
        """
        if Layout.of(tensors) != self.model.layout:
            raise InvalidValueError("the tensors are not those of the offered model")
        update = set(self.clipping.layout.names)
        return RoundRequest(
            self.id.run,
            self.id.round,
            self.id.attempt,
            {name: tensor for name, tensor in tensors.items() if name in update},
            self.clipping,
            self.local,
            self.users,
            self.local_key,
            self.metrics,
            {name: tensor for name, tensor in tensors.items() if name not in update},
        )


def model_of(request: RoundRequest) -> Parameters:
    """The tensors that follow the offer of a request: parameters, then running statistics."""
    both = sorted(set(request.parameters) & set(request.statistics))
    if both:
        raise InvalidValueError(f"{both} are parameters and statistics; each must be one")
    return {**request.parameters, **request.statistics}


def _check_groups(message: pb.Clipping) -> None:
    groups, tensors = len(message.groups), len(message.layout.names)
    grouped = sum(len(group.tensors) for group in message.groups)
    if grouped != tensors:
        raise WireError(f"vector groups hold {grouped} tensors; it must be all {tensors}, once")
    at_most("weighted groups", len(message.weighted), groups)
    at_most("groups of an indicator", len(message.indicator.groups), groups)


_NONE_IS_ZERO = Part(lambda number: number or 0, lambda number: number or None)
PRICE = Codec(Price, pb.Price, "a price")
CLIPPING = Codec(
    Clipping,
    pb.Clipping,
    "a clipping",
    {
        "layout": one(LAYOUT),
        "groups": each(Codec(VectorGroup, pb.VectorGroup, "a vector group")),
        "indicator": one(Codec(Indicator, pb.Indicator, "an indicator"), optional=True),
    },
    check=_check_groups,
)
LOCAL_TRAINING = Codec(
    LocalTraining,
    pb.LocalTraining,
    "local training",
    dict.fromkeys(("batch_size", "epochs", "steps", "max_examples"), _NONE_IS_ZERO),
)
METRIC = Codec(
    Metric,
    pb.Metric,
    "a metric",
    {"shape": Part(lambda shape: pb.Shape(sizes=shape), lambda shape: tuple(shape.sizes))},
    limits={"options": MAX_OPTIONS},
    check=lambda message: check_shape(message.shape),
)
_OFFER = Codec(
    RoundOffer,
    pb.Offer,
    "an offer",
    {
        "id": one(_ROUND_ID),
        "users": _POSITIONS,
        "clipping": one(CLIPPING),
        "local": one(LOCAL_TRAINING),
        "metrics": each(METRIC),
        "price": one(PRICE),
        "model": Part(encode_manifest, decode_manifest),
    },
    limits={"users": MAX_USERS},
    longest=NODE_RECEIVES_BYTES - ENVELOPE_BYTES,
)
encode_offer, decode_offer = _OFFER.encode, _OFFER.decode


SUM = "sum"
"""Name of the one vector that users' contributions add up to."""
_USERS_OF_32_BITS = 63  # each adds less than 2^25 to a component


@dataclass(frozen=True)
class SummedUpdates:
    """The header of a `PartialSum`, whose total follows.

    Attributes:
        users: how many contributions it holds, at most 2^20; secret.
        weight: sum of their weights, in units of 1/c; secret.
        tensors: what follows: one vector of integers named `SUM`.
    """

    users: int
    weight: int
    tensors: Manifest

    def __post_init__(self) -> None:
        if not 0 <= self.users <= MAX_USERS:
            raise InvalidValueError(f"the number of users is not from 0 to {MAX_USERS}")
        if not 0 <= self.weight <= self.users * MOST_WEIGHT:
            raise InvalidValueError(
                "the weight of users is negative, or too large for their number"
            )

    @classmethod
    def of(cls, partial: PartialSum) -> "SummedUpdates":
        """The header of a partial sum; a certificate, not the header, says of which node."""
        layout = Layout((SUM,), (partial.total.shape,))
        return cls(partial.users, partial.weight, Manifest(layout, _dtype_of(partial)))

    def partial_sum(self, node: str, total: npt.NDArray[np.generic]) -> PartialSum:
        """The partial sum of a node.

        Raises:
            InvalidValueError: the total, [D], is not what `tensors` declares.
        """
        if (total.shape,) != self.tensors.layout.shapes or total.dtype != self.tensors.dtype:
            raise InvalidValueError(
                f"total is {total.dtype}{list(total.shape)}; it must be {self.tensors.dtype}"
                f"{list(self.tensors.layout.shapes[0])}"
            )
        return PartialSum(node, self.users, total.astype(np.int64, copy=False), self.weight)


def tensors_of(partial: PartialSum) -> Tensors:
    """What is sent of a partial sum: its total, in 32 bits where users are few enough."""
    return {SUM: partial.total.astype(_dtype_of(partial), copy=False)}


def _dtype_of(partial: PartialSum) -> Number:
    return INT32 if partial.users <= _USERS_OF_32_BITS else INT64


def layout_of_sums(clipping: Clipping) -> Layout:
    """Layout that the sums of a round have."""
    return Layout((SUM,), ((clipping.layout.dimension,),))


@dataclass(frozen=True)
class Decline:
    """The node does not take part; its users count as zero.

    Attributes:
        reason: for the operator's log, at most 1024 characters; must say nothing of users.
    """

    reason: str

    def __post_init__(self) -> None:
        _check_length("reason", self.reason, 0, MAX_NAME)


@dataclass(frozen=True)
class Answer:
    """What a node says to an offer.

    Attributes:
        id: which round it was offered.
        content: what it sends.
    """

    id: RoundId
    content: SummedUpdates | Decline


def encode_answer(answer: Answer) -> pb.Answer:
    """The message of an answer; raises WireError if it passes a limit."""
    message = pb.Answer(id=encode_round_id(answer.id))
    match answer.content:
        case SummedUpdates(users, weight, tensors):
            manifest = encode_manifest(tensors)
            message.sum.CopyFrom(pb.PartialSum(users=users, weight=weight, tensors=manifest))
        case Decline() as decline:
            message.decline.CopyFrom(_DECLINE.encode(decline))
    at_most("bytes in an answer", message.ByteSize(), SERVER_RECEIVES_BYTES - ENVELOPE_BYTES)
    return message


def decode_answer(message: pb.Answer, expected: Layout) -> Answer:
    """The answer in a message from a node; total, or raises WireError.

    The expected layout is that of a sum of the round, from `layout_of_sums`.
    """
    round_id = decode_round_id(message.id)
    match message.WhichOneof("what"):
        case "sum":
            total = message.sum
            manifest = expect_manifest(total.tensors, expected, (INT32, INT64))
            with refusing("an answer"):
                return Answer(round_id, SummedUpdates(total.users, total.weight, manifest))
        case "decline":
            return Answer(round_id, _DECLINE.decode(message.decline))
        case _:
            raise WireError("an answer is empty; it must be a sum or a decline")


@dataclass(frozen=True)
class Receipt:
    """Whether the server took an answer.

    Attributes:
        accepted: whether it did.
        reason: why not, at most 1024 characters.
    """

    accepted: bool
    reason: str = ""

    def __post_init__(self) -> None:
        _check_length("reason", self.reason, 0, MAX_NAME)


_DECLINE = Codec(Decline, pb.Decline, "a decline")
_RECEIPT = Codec(Receipt, pb.Receipt, "a receipt")
encode_receipt, decode_receipt = _RECEIPT.encode, _RECEIPT.decode


class RunState(StrEnum):
    """What the server is doing."""

    WAITING = "waiting"
    COLLECTING = "collecting"
    RELEASING = "releasing"
    FINISHED = "finished"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Status:
    """Where a federation stands; nothing about who was drawn.

    Attributes:
        run: name of the run, from 1 to 1024 characters.
        round: number of the next round, from 0.
        rounds: of the plan.
        epsilon: ε ≥ 0 spent at `delta`; may be inf.
        epsilon_limit: ε ≥ 0 of the budget; may be inf.
        delta: δ in [0, 1).
        nodes_enrolled: how many.
        nodes_connected: how many of them are connected.
        users_enrolled: N.
        state: what the server is doing.
    """

    run: str
    round: int
    rounds: int
    epsilon: float
    epsilon_limit: float
    delta: float
    nodes_enrolled: int
    nodes_connected: int
    users_enrolled: int
    state: RunState

    def __post_init__(self) -> None:
        _check_length("run", self.run, 1, MAX_NAME)
        _check_bits(self, 32, "round", "rounds", "nodes_enrolled", "nodes_connected")
        _check_bits(self, 32, "users_enrolled")
        for name in ("epsilon", "epsilon_limit"):
            _check(self, name, lambda epsilon: epsilon >= 0.0, "a number, not negative")
        _check(self, "delta", lambda delta: 0.0 <= delta < 1.0, "in [0, 1)")


_STATUS = Codec(Status, pb.Status, "a status", {"state": Part(str, RunState)})
encode_status, decode_status = _STATUS.encode, _STATUS.decode
