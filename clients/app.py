"""The Flower ClientApp: answers one message at a time with what the node's users contribute.

Guarantees: no exception leaves it, so that Flower has no text of one to send; what is said to the
server and logged says nothing of users.
"""

import logging

import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedpriv.errors import FedprivError
from fedpriv.federated.transport import PartialSum
from fedpriv.flower import (
    ANSWER,
    HELLO,
    OFFER,
    TROUBLE,
    check_installed,
    content_of,
    header_in,
    packed,
    tensors_in,
)
from fedpriv.wire import (
    NODE_RECEIVES_BYTES,
    Decline,
    RoundOffer,
    decode_offer,
    encode_hello,
    parse,
)
from fedpriv.wire import federation_pb2 as pb

from .exchange import header_of
from .flower_node import introduce, respond

app = ClientApp()
_log = logging.getLogger(__name__)
_LONGEST_TROUBLE = 400  # characters


@app.query()
def say_hello(message: Message, context: Context) -> Message:
    """Say who the node is and which users it holds, or in one sentence why it cannot."""
    try:
        check_installed()
        hello = introduce(message.content, context.node_config)
        headers = {HELLO: encode_hello(hello).SerializeToString()}
    except FedprivError as error:
        headers = {TROUBLE: str(error)[:_LONGEST_TROUBLE].encode(errors="replace")}
    except Exception as error:  # its text may hold users' data
        headers = {TROUBLE: type(error).__name__.encode(errors="replace")}
    return Message(content_of(headers), reply_to=message)


@app.train()
def take_part(message: Message, context: Context) -> Message:
    """Answer an offer; where that fails, decline it, and where there is none, say nothing."""
    try:
        header = header_in(message.content, OFFER, NODE_RECEIVES_BYTES)
        offer = decode_offer(parse(pb.Offer, header or b"", NODE_RECEIVES_BYTES))
    except FedprivError as error:
        _log.error("a message holds no offer: %s", error)
        return Message(content_of({}), reply_to=message)
    try:
        return _reply(message, offer, _trained(message.content, context, offer))
    except Exception as error:  # its text may hold users' data
        _log.error("training failed: %s", type(error).__name__)
        return _reply(message, offer, Decline(f"training failed: {type(error).__name__}"))


def _trained(content: RecordDict, context: Context, offer: RoundOffer) -> PartialSum | Decline:
    tensors = tensors_in(content, offer.model)
    # An offer's model is float32, so nothing is copied.
    request = offer.request({n: t.astype(np.float32, copy=False) for n, t in tensors.items()})
    return respond(content, context.node_config, offer, request)


def _reply(message: Message, offer: RoundOffer, trained: PartialSum | Decline) -> Message:
    answer, tensors = header_of(offer.id, trained)
    headers = {ANSWER: answer.SerializeToString()}
    return Message(content_of(headers, packed(tensors) if tensors else None), reply_to=message)
