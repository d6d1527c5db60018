"""The offer of a round to a node: what is asked of its users, and what it costs them."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError
from fedpriv.federated.transport import LocalTraining, RoundRequest
from fedpriv.privacy.contribution import Clipping
from fedpriv.privacy.layout import Layout
from fedpriv.privacy.metrics import Metric
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.instructions import (
    decode_clipping,
    decode_local,
    decode_metric,
    encode_clipping,
    encode_local,
    encode_metric,
)
from fedpriv.wire.limits import MAX_TENSORS, MAX_USERS, NODE_RECEIVES_BYTES, at_most, refusing
from fedpriv.wire.rounds import (
    Price,
    RoundId,
    decode_price,
    decode_round_id,
    encode_price,
    encode_round_id,
)
from fedpriv.wire.tensors import FLOAT32, Manifest, decode_manifest, encode_manifest

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
