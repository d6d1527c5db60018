"""The transport over a Flower grid: one message for each node and round."""

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from time import monotonic

from flwr.app import Array, Message, MessageType
from flwr.serverapp import Grid

from fedpriv.errors import StoppedError, WireError
from fedpriv.federated.transport import PartialSum, RoundRequest, Transport
from fedpriv.flower import ANSWER, OFFER, content_of, header_in, packed, tensors_in
from fedpriv.logs import one_line
from fedpriv.wire import (
    SERVER_RECEIVES_BYTES,
    Decline,
    Price,
    RoundOffer,
    Welcome,
    decode_answer,
    encode_offer,
    encode_welcome,
    manifest_of,
    model_of,
    parse,
)
from fedpriv.wire import federation_pb2 as pb

from .asked import Asked, Hosting, partial_sum_of
from .replies import Replies

_log = logging.getLogger(__name__)

Headers = Mapping[str, bytes]


def welcome_header(welcome: Welcome) -> bytes:
    """What to tell a node with an offer, by the name `WELCOME`.

    Raises:
        WireError: it passes a limit.
    """
    return bytes(encode_welcome(welcome).SerializeToString())


@dataclass(frozen=True)
class Nodes:
    """Who can be asked.

    Attributes:
        hosting: which node hosts which users.
        present: nodes that are there now, name → id on the grid; called at the start of a round.
        headers: what to tell a node beside the offer.
    """

    hosting: Hosting
    present: Callable[[], Mapping[str, int]]
    headers: Callable[[str], Headers]


class GridTransport(Transport):
    """Asks the nodes of the drawn users, each once a round, and takes what comes in time.

    Guarantees, beside those of every transport:

    * a reply counts for the node that was asked, once, if it answers this attempt at this round;
    * of a reply that is an error only the code is logged, and nothing of a node of one user.

    Args:
        grid: carries the messages; node ids are used as it gives them.
        nodes: who can be asked.
        price_of: what a round costs.
        seconds: from the offer to the deadline.
        stopping: when it is set, the round is abandoned, and every later one.
        fixed: whether every round takes until its deadline.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Nodes,
        price_of: Callable[[RoundRequest], Price],
        seconds: float,
        stopping: threading.Event,
        *,
        fixed: bool = False,
    ) -> None:
        self._grid, self._nodes, self._price_of = grid, nodes, price_of
        self._seconds, self._stopping, self._fixed = seconds, stopping, fixed

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the contribution or sum of each node that answers in time.

        Raises:
            StoppedError: it was asked to stop.
        """
        asked, present = Asked.of(request, self._nodes.hosting), self._nodes.present()
        model = model_of(request)
        price = self._price_of(request)
        manifest, nonce = manifest_of(model), asked.id.nonce
        offer = RoundOffer.of(request, self._seconds, price, manifest, nonce)
        tensors = packed(model)
        deadline = monotonic() + self._seconds
        with Replies(self._grid, self._stopping) as replies:
            for node, users in asked.drawn.items():
                left = deadline - monotonic()
                if node in present and left > 0.0:
                    of_node = replace(offer, seconds=left, users=users.copy())
                    replies.send(node, self._message(node, present[node], of_node, tensors))
            for node, reply in replies.until(deadline):
                partial = self._counted(asked, node, present[node], reply)
                if partial is not None:
                    yield partial
        if self._fixed:
            self._stopping.wait(max(0.0, deadline - monotonic()))
        if self._stopping.is_set():
            raise StoppedError("the server was asked to stop; nothing was charged for this round")

    def _message(self, node: str, node_id: int, offer: RoundOffer, tensors: Array) -> Message:
        headers = {OFFER: encode_offer(offer).SerializeToString(), **self._nodes.headers(node)}
        content = content_of(headers, tensors)
        return Message(content, node_id, MessageType.TRAIN, ttl=offer.seconds)

    def _counted(
        self, asked: Asked, node: str, node_id: int, reply: Message | None
    ) -> PartialSum | None:
        """What a reply adds to the sum; None if it is none that counts."""
        called = self._nodes.hosting.called(node)
        if reply is None:
            return None
        if reply.has_error():
            _log.warning("%s counts as zero: error %d of Flower", called, reply.error.code)
            return None
        try:
            return self._partial(asked, node, node_id, reply)
        except WireError as error:
            _log.warning("an answer of %s is refused: %s", called, one_line(str(error)))
            return None

    def _partial(self, asked: Asked, node: str, node_id: int, reply: Message) -> PartialSum | None:
        if reply.metadata.src_node_id != node_id:
            raise WireError("it comes from another node than the one that was asked")
        header = header_in(reply.content, ANSWER, SERVER_RECEIVES_BYTES)
        if header is None:
            raise WireError("it holds no answer")
        answer = decode_answer(parse(pb.Answer, header, SERVER_RECEIVES_BYTES), asked.expected)
        if reason := asked.misfit(node, answer):
            raise WireError(reason)
        if isinstance(answer.content, Decline):
            reason = one_line(answer.content.reason)
            _log.info("%s declines: %s", self._nodes.hosting.called(node), reason)
            return None
        tensors = tensors_in(reply.content, answer.content.tensors)
        return partial_sum_of(node, answer.content, tensors)
