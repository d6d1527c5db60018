"""Which round, and what it costs: values and messages.

What an offer tells users to do, as messages: clip, train and measure.

A node's answer to an offer: the sum of its users' contributions, or that it declines.

The offer of a round to a node: what is asked of its users, and what it costs them.

The small messages: who connects, whether an answer was taken, and where a federation stands.

What a node takes part in: its place in the population, and the task.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError, WireError
from fedpriv.privacy.clipping import MOST_WEIGHT, Clipping, Indicator
from fedpriv.privacy.layout import Layout, Tensors, VectorGroup
from fedpriv.privacy.mechanism import Metric
from fedpriv.privacy.round import LocalTraining, PartialSum, RoundRequest
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.tensors import (
    FLOAT32,
    INT32,
    INT64,
    MAX_DIMENSIONS,
    MAX_NAME,
    MAX_OPTIONS,
    MAX_TENSORS,
    MAX_USERS,
    NODE_RECEIVES_BYTES,
    SERVER_RECEIVES_BYTES,
    Manifest,
    Number,
    at_most,
    check_names,
    decode_layout,
    decode_manifest,
    encode_layout,
    encode_manifest,
    expect_manifest,
    refusing,
)


@dataclass(frozen=True)
class RoundId:
    """One attempt at a round of a run.

    Attributes:
        run: name of the run, from 1 to 1024 characters.
        round: number of the round, from 0.
        attempt: number of the attempt at this round, from 0.
        nonce: random, in 64 bits: tells apart two attempts of one number, of which the first was
            abandoned without a charge.

    Raises:
        InvalidValueError: the name is empty or too long, or a number has too many bits.
    """

    run: str
    round: int
    attempt: int
    nonce: int = 0

    def __post_init__(self) -> None:
        if not 1 <= len(self.run) <= MAX_NAME:
            raise InvalidValueError(
                f"run has {len(self.run)} characters; legal are 1 to {MAX_NAME}"
            )
        for name, number in (("round", self.round), ("attempt", self.attempt)):
            if not 0 <= number < 2**32:
                raise InvalidValueError(f"{name} is {number}; it must be from 0 to 2^32 - 1")
        if not 0 <= self.nonce < 2**64:
            raise InvalidValueError(f"nonce is {self.nonce}; it must be from 0 to 2^64 - 1")


@dataclass(frozen=True)
class Price:
    """What a round costs the users, for a node to consent to or not.

    Attributes:
        sampling_probability: q in (0, 1].
        population: N, the number of enrolled users, at least 1.
        noise_multiplier: z ≥ 0 of the whole round.
        epsilon_after: ε ≥ 0 at `delta` of all charges of the ledger and this round; may be inf.
        delta: δ in [0, 1).

    Raises:
        InvalidValueError: a number is out of range.
    """

    sampling_probability: float
    population: int
    noise_multiplier: float
    epsilon_after: float
    delta: float

    def __post_init__(self) -> None:
        if not 0.0 < self.sampling_probability <= 1.0:
            raise InvalidValueError(
                f"sampling_probability is {self.sampling_probability}; it must be in (0, 1]"
            )
        if not 1 <= self.population < 2**63:
            raise InvalidValueError(f"population is {self.population}; it must be at least 1")
        if not 0.0 <= self.noise_multiplier < float("inf"):
            raise InvalidValueError(
                f"noise_multiplier is {self.noise_multiplier}; it must be finite and not negative"
            )
        if not self.epsilon_after >= 0.0:
            raise InvalidValueError(
                f"epsilon_after is {self.epsilon_after}; it must not be negative"
            )
        if not 0.0 <= self.delta < 1.0:
            raise InvalidValueError(f"delta is {self.delta}; it must be in [0, 1)")


def encode_round_id(round_id: RoundId) -> pb.RoundId:
    """The message of a round's identity.

    Raises:
        WireError: the name is no Unicode.
    """
    with refusing("the name of a round"):
        return pb.RoundId(**vars(round_id))


def decode_round_id(message: pb.RoundId) -> RoundId:
    """The round's identity in a message; total.

    Raises:
        WireError: it is not legal.
    """
    with refusing("the name of a round"):
        return RoundId(message.run, message.round, message.attempt, message.nonce)


def encode_price(price: Price) -> pb.Price:
    """The message of a price."""
    return pb.Price(
        sampling_probability=price.sampling_probability,
        population=price.population,
        noise_multiplier=price.noise_multiplier,
        epsilon_after=price.epsilon_after,
        delta=price.delta,
    )


def decode_price(message: pb.Price) -> Price:
    """The price in a message; total.

    Raises:
        WireError: it is not legal.
    """
    with refusing("a price"):
        return Price(
            message.sampling_probability,
            message.population,
            message.noise_multiplier,
            message.epsilon_after,
            message.delta,
        )


def encode_clipping(clipping: Clipping) -> pb.Clipping:
    """The message of a clipping.

    Raises:
        WireError: it passes a limit.
    """
    asked = clipping.indicator
    with refusing("a clipping"):
        indicator = pb.Indicator(tensor=asked.tensor, groups=asked.groups) if asked else None
        message = pb.Clipping(
            layout=encode_layout(clipping.layout),
            groups=[
                pb.VectorGroup(
                    name=group.name,
                    tensors=group.tensors,
                    clipping_norm=group.clipping_norm,
                    scales=group.scales,
                )
                for group in clipping.groups
            ],
            indicator=indicator,
            weighted=clipping.weighted,
            weight_cap=clipping.weight_cap,
        )
    _check_clipping(message)
    return message


def decode_clipping(message: pb.Clipping) -> Clipping:
    """The clipping of a message; total.

    Raises:
        WireError: it is not legal, or passes a limit.
    """
    layout = decode_layout(message.layout)
    _check_clipping(message)
    with refusing("a clipping"):
        groups = tuple(
            VectorGroup(g.name, tuple(g.tensors), g.clipping_norm, tuple(g.scales))
            for g in message.groups
        )
        asked = message.indicator
        indicator = Indicator(asked.tensor, tuple(asked.groups))
        given = indicator if message.HasField("indicator") else None
        weighted, cap = tuple(message.weighted), message.weight_cap
        return Clipping(layout, groups, given, weighted, cap)


def _check_clipping(message: pb.Clipping) -> None:
    groups, tensors = len(message.groups), len(message.layout.names)
    at_most("vector groups", groups, MAX_TENSORS)
    grouped = sum(len(group.tensors) for group in message.groups)
    if grouped != tensors:
        raise WireError(f"vector groups hold {grouped} tensors; it must be all {tensors}, once")
    at_most("groups with weights", len(message.weighted), groups)
    at_most("groups of an indicator", len(message.indicator.groups), groups)
    check_names("vector group", (group.name for group in message.groups))


def encode_local(local: LocalTraining) -> pb.LocalTraining:
    """The message of local training.

    Raises:
        WireError: a number passes 32 bits.
    """
    with refusing("local training"):
        return pb.LocalTraining(
            learning_rate=local.learning_rate,
            batch_size=local.batch_size or 0,
            epochs=local.epochs or 0,
            steps=local.steps or 0,
            momentum=local.momentum,
            proximal=local.proximal,
            max_examples=local.max_examples or 0,
        )


def decode_local(message: pb.LocalTraining) -> LocalTraining:
    """The local training of a message; total.

    Raises:
        WireError: it is not legal.
    """
    with refusing("local training"):
        return LocalTraining(
            learning_rate=message.learning_rate,
            batch_size=message.batch_size or None,
            epochs=message.epochs or None,
            steps=message.steps or None,
            momentum=message.momentum,
            proximal=message.proximal,
            max_examples=message.max_examples or None,
        )


def encode_metric(metric: Metric) -> pb.Metric:
    """The message of a metric.

    Raises:
        WireError: it passes a limit.
    """
    with refusing("a metric"):
        message = pb.Metric(
            name=metric.name,
            shape=pb.Shape(sizes=metric.shape),
            centre=metric.centre,
            radius=metric.radius,
            options=metric.options,
        )
    _check_metric(message)
    return message


def decode_metric(message: pb.Metric) -> Metric:
    """The metric of a message; total.

    Raises:
        WireError: it is not legal, or passes a limit.
    """
    _check_metric(message)
    with refusing("a metric"):
        return Metric(
            message.name,
            tuple(message.shape.sizes),
            message.centre,
            message.radius,
            tuple(message.options),
        )


def _check_metric(message: pb.Metric) -> None:
    check_names("metric", [message.name])
    at_most("dimensions of a metric", len(message.shape.sizes), MAX_DIMENSIONS)
    at_most("options of a metric", len(message.options), MAX_OPTIONS)


SUM = "sum"
"""Name of the one vector that users' contributions add up to."""
_USERS_OF_32_BITS = 63  # each adds less than 2^25 to a component
LONGEST_ANSWER = SERVER_RECEIVES_BYTES - 16  # leaves room for the tag and length of an UploadPart


@dataclass(frozen=True)
class SummedUpdates:
    """The header of a `PartialSum`, whose total follows.

    Attributes:
        users: how many contributions it holds, at most 2^20; secret.
        weight: sum of their weights, in units of 1/c; secret.
        tensors: what follows: one vector of integers named `SUM`.

    Raises:
        InvalidValueError: a number is out of range.
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
        """The header of a partial sum; its node is not in it, since a certificate says which."""
        layout = Layout((SUM,), (partial.total.shape,))
        return cls(partial.users, partial.weight, Manifest(layout, _dtype_of(partial)))

    def partial_sum(self, node: str, total: npt.NDArray[np.generic]) -> PartialSum:
        """The partial sum of a node.

        Args:
            node: whom the certificate of the connection names.
            total: [D], as a `Receiver` of `tensors` returns it by the name `SUM`.

        Raises:
            InvalidValueError: the total has another shape or dtype.
        """
        if (total.shape,) != self.tensors.layout.shapes or total.dtype != self.tensors.dtype:
            raise InvalidValueError(
                f"total is {total.dtype}{list(total.shape)}; it must be {self.tensors.dtype}"
                f"{list(self.tensors.layout.shapes[0])}"
            )
        return PartialSum(node, self.users, total.astype(np.int64, copy=False), self.weight)


def tensors_of(partial: PartialSum) -> Tensors:
    """What is sent of a partial sum: its total, in 32 bits where so few users cannot pass them."""
    return {SUM: partial.total.astype(_dtype_of(partial), copy=False)}


def _dtype_of(partial: PartialSum) -> Number:
    return INT32 if partial.users <= _USERS_OF_32_BITS else INT64


@dataclass(frozen=True)
class Decline:
    """The node does not take part; its users count as zero.

    Attributes:
        reason: for the operator's log, at most 1024 characters; must say nothing of users.

    Raises:
        InvalidValueError: the reason is too long.
    """

    reason: str

    def __post_init__(self) -> None:
        if len(self.reason) > MAX_NAME:
            raise InvalidValueError(
                f"a reason has {len(self.reason)} characters; it may have at most {MAX_NAME}"
            )


@dataclass(frozen=True)
class Answer:
    """What a node says to an offer.

    Attributes:
        id: which round it was offered.
        content: what it sends.
    """

    id: RoundId
    content: SummedUpdates | Decline


def layout_of_sums(clipping: Clipping) -> Layout:
    """Layout that the sums of a round have."""
    return Layout((SUM,), ((clipping.layout.dimension,),))


def encode_answer(answer: Answer) -> pb.Answer:
    """The message of an answer.

    Raises:
        WireError: it passes a limit.
    """
    message = pb.Answer(id=encode_round_id(answer.id))
    with refusing("an answer"):
        match answer.content:
            case SummedUpdates(users, weight, tensors):
                manifest = encode_manifest(tensors)
                total = pb.PartialSum(users=users, weight=weight, tensors=manifest)
                message.sum.CopyFrom(total)
            case Decline(reason):
                message.decline.CopyFrom(pb.Decline(reason=reason))
    at_most("bytes in an answer", message.ByteSize(), LONGEST_ANSWER)
    return message


def decode_answer(message: pb.Answer, expected: Layout) -> Answer:
    """The answer in a message; total.

    Args:
        message: from a node.
        expected: layout of a sum of the round that is being collected, from `layout_of_sums`.

    Raises:
        WireError: it is not legal, or its tensors are not those that were asked for.
    """
    round_id = decode_round_id(message.id)
    with refusing("an answer"):
        match message.WhichOneof("what"):
            case "sum":
                total = message.sum
                manifest = expect_manifest(total.tensors, expected, (INT32, INT64))
                return Answer(round_id, SummedUpdates(total.users, total.weight, manifest))
            case "decline":
                return Answer(round_id, Decline(message.decline.reason))
            case _:
                raise WireError("an answer is empty; it must be a sum or a decline")


LONGEST_OFFER = NODE_RECEIVES_BYTES - 16  # leaves room for the tag and length of a FromServer
Parameters = Mapping[str, npt.NDArray[np.float32]]


@dataclass(frozen=True, eq=False)
class RoundOffer:
    """A `RoundRequest` to one node, whose tensors follow by themselves.

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

    Raises:
        InvalidValueError: a field is out of range, or fields do not fit together.
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
        if not 0.0 < self.seconds < float("inf"):
            raise InvalidValueError(f"seconds is {self.seconds}; it must be positive and finite")
        if len(self.local_key) != 32:
            raise InvalidValueError(f"local_key has {len(self.local_key)} bytes; it must have 32")
        self._check_users()
        self._check_metrics()
        self._check_model()
        self.users.flags.writeable = False

    def _check_users(self) -> None:
        users = self.users
        if users.ndim != 1 or users.dtype != np.int64 or np.any(users[1:] <= users[:-1]):
            raise InvalidValueError("users are no ascending vector of int64, each once")
        if users.size and not 0 <= users[0] <= users[-1] < self.price.population:
            raise InvalidValueError(f"users are not from 0 to {self.price.population - 1}")

    def _check_metrics(self) -> None:
        layout = self.clipping.layout
        shapes = dict(zip(layout.names, layout.shapes, strict=True))
        for metric in self.metrics:
            if shapes.pop(metric.tensor, None) != metric.shape:
                raise InvalidValueError(
                    f"metric {metric.name!r} is given twice, or has no tensor of its shape"
                )

    def _check_model(self) -> None:
        parameters = self._parameters
        given = self.model.layout
        shapes = dict(zip(given.names[: len(parameters)], given.shapes, strict=False))
        if not parameters or list(shapes.items()) != list(parameters.items()):
            raise InvalidValueError("the model does not begin with the tensors of the update")
        if self.model.dtype != FLOAT32:
            raise InvalidValueError(f"the model is {self.model.dtype}; it must be {FLOAT32}")

    @property
    def _parameters(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the update's tensors."""
        layout, asked = self.clipping.layout, self.clipping.indicator
        others = {metric.tensor for metric in self.metrics} | {asked.tensor if asked else None}
        shapes = zip(layout.names, layout.shapes, strict=True)
        return {name: shape for name, shape in shapes if name not in others}

    @classmethod
    def of(
        cls, request: RoundRequest, seconds: float, price: Price, model: Manifest, nonce: int = 0
    ) -> "RoundOffer":
        """The offer of a request to a node that hosts all of its users.

        For a node that hosts some, `dataclasses.replace` the users.

        Args:
            request: of the whole round.
            seconds: until the deadline.
            price: what the round costs.
            model: `manifest_of(model_of(request))`, the same for all nodes.
            nonce: of the attempt.

        Raises:
            InvalidValueError: fields are out of range, or do not fit together.
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

        Args:
            tensors: the model, as a `Receiver` of `model` returns it.

        Raises:
            InvalidValueError: they are not the tensors of the model.
        """
        if Layout.of(tensors) != self.model.layout:
            raise InvalidValueError("the tensors are not those of the offered model")
        parameters = {name: tensors[name] for name in self._parameters}
        return RoundRequest(
            self.id.run,
            self.id.round,
            self.id.attempt,
            parameters,
            self.clipping,
            self.local,
            self.users,
            self.local_key,
            self.metrics,
            {name: tensor for name, tensor in tensors.items() if name not in parameters},
        )


def model_of(request: RoundRequest) -> Parameters:
    """The tensors that follow the offer of a request: parameters, then running statistics.

    Raises:
        InvalidValueError: a statistic has the name of a parameter.
    """
    both = sorted(set(request.parameters) & set(request.statistics))
    if both:
        raise InvalidValueError(f"{both} are parameters and statistics; each must be one")
    return {**request.parameters, **request.statistics}


def encode_offer(offer: RoundOffer) -> pb.Offer:
    """The message of an offer.

    Raises:
        WireError: it passes a limit.
    """
    with refusing("an offer"):
        message = pb.Offer(
            id=encode_round_id(offer.id),
            seconds=offer.seconds,
            users=offer.users.tolist(),
            clipping=encode_clipping(offer.clipping),
            local=encode_local(offer.local),
            metrics=map(encode_metric, offer.metrics),
            local_key=offer.local_key,
            price=encode_price(offer.price),
            model=encode_manifest(offer.model),
        )
    _check_offer(message)
    return message


def decode_offer(message: pb.Offer) -> RoundOffer:
    """The offer in a message; total.

    Raises:
        WireError: it is not legal, or passes a limit.
    """
    _check_offer(message)
    parts = (
        decode_clipping(message.clipping),
        decode_local(message.local),
        message.local_key,
        tuple(map(decode_metric, message.metrics)),
        decode_price(message.price),
        decode_manifest(message.model),
    )
    with refusing("an offer"):
        users = np.array(message.users, np.int64)
        return RoundOffer(decode_round_id(message.id), message.seconds, users, *parts)


def _check_offer(message: pb.Offer) -> None:
    at_most("users in an offer", len(message.users), MAX_USERS)
    at_most("metrics in an offer", len(message.metrics), MAX_TENSORS)
    at_most("bytes in an offer", message.ByteSize(), LONGEST_OFFER)


VERSION = 1
"""Of the protocol."""


@dataclass(frozen=True)
class Hello:
    """A node says who it is.

    Attributes:
        node: its name, from 1 to 1024 printable characters; must be that in its certificate.
        users_sha256: `digest_of` the ids of the users that it holds, 32 bytes.
        version: of the protocol that it speaks.

    Raises:
        InvalidValueError: the name is not legal, the digest has another length, or the version is
            not `VERSION`.
    """

    node: str
    users_sha256: bytes
    version: int = VERSION

    def __post_init__(self) -> None:
        if not (1 <= len(self.node) <= MAX_NAME and self.node.isprintable()):
            raise InvalidValueError(
                f"node is {self.node!r}; it must be from 1 to {MAX_NAME} printable characters"
            )
        if self.version != VERSION:
            raise InvalidValueError(
                f"version of the protocol is {self.version}; this side speaks {VERSION}"
            )
        if len(self.users_sha256) != 32:
            raise InvalidValueError(
                f"users_sha256 has {len(self.users_sha256)} bytes; it must have 32"
            )


def digest_of(user_ids: Iterable[str]) -> bytes:
    """SHA-256 of ids in any order: of the UTF-8 of their JSON array, sorted, without spaces."""
    text = json.dumps(sorted(user_ids), separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True)
class Receipt:
    """Whether the server took an answer.

    Attributes:
        accepted: whether it did.
        reason: why not, at most 1024 characters.

    Raises:
        InvalidValueError: the reason is too long.
    """

    accepted: bool
    reason: str = ""

    def __post_init__(self) -> None:
        if len(self.reason) > MAX_NAME:
            raise InvalidValueError(
                f"a reason has {len(self.reason)} characters; it may have at most {MAX_NAME}"
            )


class RunState(StrEnum):
    """What the server is doing."""

    WAITING = "waiting"
    COLLECTING = "collecting"
    RELEASING = "releasing"
    FINISHED = "finished"
    STOPPED = "stopped"


@dataclass(frozen=True)
class Status:
    """Where a federation stands; nothing of who was drawn.

    Attributes:
        run: name of the run, from 1 to 1024 characters.
        round: number of the next round, from 0.
        rounds: of the plan.
        epsilon: ε ≥ 0 spent at `delta`; may be inf.
        epsilon_limit: ε ≥ 0 of the budget; may be inf.
        delta: δ in [0, 1).
        nodes_enrolled: how many.
        nodes_connected: how many of them are there.
        users_enrolled: N.
        state: what the server is doing.

    Raises:
        InvalidValueError: a field is out of range.
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
        if not 1 <= len(self.run) <= MAX_NAME:
            raise InvalidValueError(
                f"run has {len(self.run)} characters; legal are 1 to {MAX_NAME}"
            )
        for name in ("round", "rounds", "nodes_enrolled", "nodes_connected", "users_enrolled"):
            if not 0 <= getattr(self, name) < 2**32:
                raise InvalidValueError(
                    f"{name} is {getattr(self, name)}; it must be from 0 to 2^32 - 1"
                )
        if not (self.epsilon >= 0.0 and self.epsilon_limit >= 0.0 and 0.0 <= self.delta < 1.0):
            raise InvalidValueError(
                f"ε is {self.epsilon} of {self.epsilon_limit} at δ = {self.delta}; ε must not be "
                "negative, and δ in [0, 1)"
            )


def encode_hello(hello: Hello) -> pb.Hello:
    """The message of a hello."""
    return pb.Hello(node=hello.node, version=hello.version, users_sha256=hello.users_sha256)


def decode_hello(message: pb.Hello) -> Hello:
    """The hello in a message; total.

    Raises:
        WireError: it is not legal.
    """
    with refusing("a hello"):
        return Hello(message.node, message.users_sha256, message.version)


def encode_receipt(receipt: Receipt) -> pb.Receipt:
    """The message of a receipt.

    Raises:
        WireError: the reason is no Unicode.
    """
    with refusing("a receipt"):
        return pb.Receipt(accepted=receipt.accepted, reason=receipt.reason)


def decode_receipt(message: pb.Receipt) -> Receipt:
    """The receipt in a message; total.

    Raises:
        WireError: it is not legal.
    """
    with refusing("a receipt"):
        return Receipt(message.accepted, message.reason)


def encode_status(status: Status) -> pb.Status:
    """The message of a status.

    Raises:
        WireError: the name of the run is no Unicode.
    """
    with refusing("a status"):
        return pb.Status(**vars(status))


def decode_status(message: pb.Status) -> Status:
    """The status in a message; total.

    Raises:
        WireError: it is not legal.
    """
    with refusing("a status"):
        return Status(
            run=message.run,
            round=message.round,
            rounds=message.rounds,
            epsilon=message.epsilon,
            epsilon_limit=message.epsilon_limit,
            delta=message.delta,
            nodes_enrolled=message.nodes_enrolled,
            nodes_connected=message.nodes_connected,
            users_enrolled=message.users_enrolled,
            state=RunState(message.state),
        )


LONGEST_OPTIONS = 2**16  # characters
LONGEST_WELCOME = NODE_RECEIVES_BYTES - 16  # leaves room for the tag and length of a FromServer


@dataclass(frozen=True)
class TaskDescription:
    """Model and loss by name, as `fedpriv.build.build_task` reads them.

    Attributes:
        model: name of a model, or import path of a function that makes one.
        options: arguments of that function; values that JSON has, so lists and no tuples.
        seed: of the model's initial and frozen parameters, in 63 bits.
        loss: name of a loss, or import path.
        metrics: import paths of the metrics that are not built in.

    Raises:
        InvalidValueError: the seed is out of range.
    """

    model: str
    options: Mapping[str, object]
    seed: int
    loss: str
    metrics: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise InvalidValueError(f"seed is {self.seed}; it must be from 0 to 2^63 - 1")

    @property
    def imports(self) -> tuple[str, ...]:
        """The import paths in it: code that whoever builds the task runs."""
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

    Raises:
        InvalidValueError: a field is out of range.
    """

    population_name: str
    population: int
    users: npt.NDArray[np.int64] = field(repr=False)
    task: TaskDescription

    def __post_init__(self) -> None:
        if not 1 <= len(self.population_name) <= MAX_NAME:
            raise InvalidValueError(
                f"population_name has {len(self.population_name)} characters; legal are 1 to "
                f"{MAX_NAME}"
            )
        if not 1 <= self.population < 2**63:
            raise InvalidValueError(f"population is {self.population}; it must be at least 1")
        users = self.users
        if users.ndim != 1 or users.dtype != np.int64 or np.any(users[1:] <= users[:-1]):
            raise InvalidValueError("users are no ascending vector of int64, each once")
        if users.size and not 0 <= users[0] <= users[-1] < self.population:
            raise InvalidValueError(f"users are not from 0 to {self.population - 1}")
        users.flags.writeable = False


def encode_welcome(welcome: Welcome) -> pb.Welcome:
    """The message of a welcome.

    Raises:
        WireError: it passes a limit, or an option has no place in JSON.
    """
    task = welcome.task
    with refusing("a welcome"):
        message = pb.Welcome(
            population_name=welcome.population_name,
            population=welcome.population,
            users=welcome.users.tolist(),
            task=pb.Task(
                model=task.model,
                options=_text_of(task.options),
                seed=task.seed,
                loss=task.loss,
                metrics=task.metrics,
            ),
        )
    _check(message)
    at_most("bytes in a welcome", message.ByteSize(), LONGEST_WELCOME)
    return message


def decode_welcome(message: pb.Welcome) -> Welcome:
    """The welcome in a message; total.

    Raises:
        WireError: it is not legal, or passes a limit.
    """
    _check(message)
    task = message.task
    with refusing("a welcome"):
        described = TaskDescription(
            task.model, _options(task.options), task.seed, task.loss, tuple(task.metrics)
        )
        users = np.array(message.users, np.int64)
        return Welcome(message.population_name, message.population, users, described)


def _check(message: pb.Welcome) -> None:
    task = message.task
    at_most("users in a welcome", len(message.users), MAX_USERS)
    at_most("metrics in a welcome", len(task.metrics), MAX_TENSORS)
    at_most("characters in the options of a model", len(task.options), LONGEST_OPTIONS)
    check_names("model, loss or metric", (task.model, task.loss, *task.metrics))


def _text_of(options: Mapping[str, object]) -> str:
    try:
        text = json.dumps(dict(options), allow_nan=False)
    except RecursionError as error:
        raise WireError("the options of a model are nested too deeply") from error
    # Tuples and keys that are numbers would arrive as something else.
    if json.loads(text) != options:
        raise WireError("the options of a model hold what JSON has no place for")
    return text


def _options(text: str) -> dict[str, object]:
    try:
        options = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise WireError("the options of a model are nested too deeply") from error
    if not isinstance(options, dict):
        raise WireError("the options of a model are no JSON object")
    return options


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse(digits)


def _refuse(number: str) -> NoReturn:
    raise WireError(f"the options of a model hold {number[:20]}, which is no number of JSON")
