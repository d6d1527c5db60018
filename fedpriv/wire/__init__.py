"""The messages between machines: protobuf messages, and tensors in checksummed chunks.

For any bytes, every decoder returns a value that our own constructors have accepted, or raises
`WireError`. Its work is bounded by the length of the message and the limits of `codec`, and its
memory by the message or the expected content. A decoder restores the value that was encoded.
"""

# isort: off
# fmt: off
from fedpriv.wire.codec import NODE_RECEIVES_BYTES, SERVER_RECEIVES_BYTES, UNCOMPRESSED, parse
from fedpriv.wire.messages import (
    COUNTERSIGNATURE, HEAD, HELLO, LEDGER_REQUEST, OFFER, PROPOSAL, RECEIPT, ROUND_ID, STATUS,
    STEP, SUM, VERSION, VOTE, WELCOME, Countersignature, Decline, EnrolledNode, Hello,
    LedgerRequest, MaskedSum, Price, Proposal, Receipt, RoundAnswer, RoundId, RoundOffer,
    RunState, SignedHead, Stage, Status, Step, SummedUpdates, TaskDescription, Terms, Vote,
    Welcome, decode_answer, digest_of, encode_answer, enrolment_digest, model_of, sum_to_send,
)
from fedpriv.wire.tensors import (
    CHUNK_BYTES, Assembler, Manifest, Receiver, chunks, manifest_of, pieces,
)

__all__ = [
    "CHUNK_BYTES", "COUNTERSIGNATURE", "HEAD", "HELLO", "LEDGER_REQUEST", "NODE_RECEIVES_BYTES",
    "OFFER", "PROPOSAL", "RECEIPT", "ROUND_ID", "SERVER_RECEIVES_BYTES", "STATUS", "STEP",
    "SUM", "UNCOMPRESSED", "VERSION", "VOTE", "WELCOME", "Assembler", "Countersignature",
    "Decline", "EnrolledNode", "Hello", "LedgerRequest", "Manifest", "MaskedSum", "Price",
    "Proposal", "Receipt", "Receiver", "RoundAnswer", "RoundId", "RoundOffer", "RunState",
    "SignedHead", "Stage", "Status", "Step", "SummedUpdates", "TaskDescription", "Terms",
    "Vote", "Welcome", "chunks", "decode_answer", "digest_of", "encode_answer",
    "enrolment_digest", "manifest_of", "model_of", "parse", "pieces", "sum_to_send",
]
