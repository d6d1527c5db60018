"""The node's app, with traps; a bundle names it in the place of `fedpriv.clients.flower_app`.

The node-config names a folder of traps, as those of `sites.Traps`. A file in it that is called
"HARM in round N" is moved to "HARM in round N.reached" when the offer of this round comes, and the
harm is done.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedpriv.wire import (
    NODE_RECEIVES_BYTES,
    RoundAnswer,
    RoundOffer,
    SummedUpdates,
    decode_offer,
    encode_answer,
    manifest_of,
    parse,
)
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.flower_messages import ANSWER, OFFER, content_of, packed

app = ClientApp()


@app.query()
def say_hello(message: Message, context: Context) -> Message:
    return honest(message, context)


def honest(message: Message, context: Context) -> Message:
    from fedpriv.clients.flower_app import app as known  # it takes seconds, for which no harm waits

    return known(message, context)


@app.train()
def answer_offer(message: Message, context: Context) -> Message:
    traps, offer = Path(str(context.node_config["traps"])), offer_in(message)
    for name, harm in HARMS.items():
        trap = traps / f"{name} in round {offer.id.round}"
        if trap.exists():
            reached = trap.rename(f"{trap}.reached")
            if (reply := harm(message, reached)) is not None:
                return reply
    return honest(message, context)


def offer_in(message: Message) -> RoundOffer:
    header = message.content["fedpriv"][OFFER]
    return decode_offer(parse(pb.Offer, header, NODE_RECEIVES_BYTES))


def raises(_message: Message, _reached: Path) -> None:
    raise RuntimeError("a user's secret")


def exits(_message: Message, _reached: Path) -> None:
    os._exit(1)


def waits(_message: Message, reached: Path) -> None:
    """Go on when the file is gone."""
    while reached.exists():
        time.sleep(0.01)


def summing(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Message, Path], Message]:
    """Sends a sum, changed."""

    def answer(message: Message, _reached: Path) -> Message:
        offer = offer_in(message)
        total, users = change(np.ones(offer.clipping.layout.dimension, np.int64)), len(offer.users)
        summed = SummedUpdates(users, users, manifest_of({"sum": total}))
        said = encode_answer(RoundAnswer(offer.id, summed)).SerializeToString()
        return Message(content_of({ANSWER: said}, packed({"sum": total})), reply_to=message)

    return answer


HARMS = {
    "waits": waits,
    "raises": raises,
    "exits": exits,
    "sends too much": summing(lambda total: total * 2**40),
}
