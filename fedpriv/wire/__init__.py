"""The messages between machines: protobuf messages, and tensors in checksummed chunks.

For any bytes, every decoder returns a value that our own constructors have accepted, or raises
`WireError`. Its work is bounded by the length of the message and the limits of `codec`, and its
memory by the message or the expected content. A decoder restores the value that was encoded.
"""

# isort: off
# fmt: off
from fedpriv.wire.codec import (
    NODE_RECEIVES_BYTES, SERVER_RECEIVES_BYTES, UNCOMPRESSED, parse,
)
from fedpriv.wire.messages import (
    VERSION, Decline, Hello, LedgerRequest, Price, Proposal, Receipt, RoundAnswer, RoundId,
    RoundOffer, RunState, Status, SummedUpdates, TaskDescription, Terms, Vote, Welcome,
    decode_answer, decode_hello, decode_ledger_request, decode_offer, decode_proposal,
    decode_receipt, decode_round_id, decode_status, decode_vote, decode_welcome, digest_of,
    encode_answer, encode_hello, encode_ledger_request, encode_offer, encode_proposal,
    encode_receipt, encode_round_id, encode_status, encode_vote, encode_welcome, layout_of_sums,
    model_of, tensors_of,
)
from fedpriv.wire.tensors import (
    CHUNK_BYTES, Assembler, Manifest, Receiver, chunks, manifest_of, pieces,
)

__all__ = [
    "CHUNK_BYTES", "NODE_RECEIVES_BYTES", "SERVER_RECEIVES_BYTES", "UNCOMPRESSED", "VERSION",
    "Assembler", "Decline", "Hello", "LedgerRequest", "Manifest", "Price", "Proposal", "Receipt",
    "Receiver", "RoundAnswer", "RoundId", "RoundOffer", "RunState", "Status", "SummedUpdates",
    "TaskDescription", "Terms", "Vote", "Welcome", "chunks", "decode_answer", "decode_hello",
    "decode_ledger_request", "decode_offer", "decode_proposal", "decode_receipt", "decode_round_id",
    "decode_status", "decode_vote", "decode_welcome", "digest_of", "encode_answer", "encode_hello",
    "encode_ledger_request", "encode_offer", "encode_proposal", "encode_receipt", "encode_round_id",
    "encode_status", "encode_vote", "encode_welcome", "layout_of_sums", "manifest_of", "model_of",
    "parse", "pieces", "tensors_of",
]
