"""What machines say to each other: protobuf messages, and tensors in checksummed chunks.

Guarantees of every decoder here, whatever the bytes:

* it returns a value that our own constructors accepted, or raises `WireError`, and nothing else;
* its work is bounded by the length of the message and the limits of `fedpriv.wire.limits`;
* what it holds is bounded by the message, or by the content it was told to expect.

Whatever an encoder returns, the decoder of the other side reads as an equal value.
"""

from fedpriv.wire.answers import (
    Answer,
    Decline,
    SummedUpdates,
    decode_answer,
    encode_answer,
    layout_of_sums,
    tensors_of,
)
from fedpriv.wire.chunks import (
    CHUNK_BYTES,
    Assembler,
    chunks,
)
from fedpriv.wire.limits import NODE_RECEIVES_BYTES, SERVER_RECEIVES_BYTES, parse
from fedpriv.wire.offers import RoundOffer, decode_offer, encode_offer, model_of
from fedpriv.wire.rounds import (
    Price,
    RoundId,
    decode_price,
    decode_round_id,
    encode_price,
    encode_round_id,
)
from fedpriv.wire.standing import (
    VERSION,
    Hello,
    Receipt,
    RunState,
    Status,
    decode_hello,
    decode_receipt,
    decode_status,
    digest_of,
    encode_hello,
    encode_receipt,
    encode_status,
)
from fedpriv.wire.tensors import Manifest, Receiver, manifest_of, pieces
from fedpriv.wire.welcome import TaskDescription, Welcome, decode_welcome, encode_welcome

__all__ = [
    "CHUNK_BYTES",
    "NODE_RECEIVES_BYTES",
    "SERVER_RECEIVES_BYTES",
    "VERSION",
    "Answer",
    "Assembler",
    "Decline",
    "Hello",
    "Manifest",
    "Price",
    "Receipt",
    "Receiver",
    "RoundId",
    "RoundOffer",
    "RunState",
    "Status",
    "SummedUpdates",
    "TaskDescription",
    "Welcome",
    "chunks",
    "decode_answer",
    "decode_hello",
    "decode_offer",
    "decode_price",
    "decode_receipt",
    "decode_round_id",
    "decode_status",
    "decode_welcome",
    "digest_of",
    "encode_answer",
    "encode_hello",
    "encode_offer",
    "encode_price",
    "encode_receipt",
    "encode_round_id",
    "encode_status",
    "encode_welcome",
    "layout_of_sums",
    "manifest_of",
    "model_of",
    "parse",
    "pieces",
    "tensors_of",
]
