"""The messages between machines: protobuf messages, and tensors in checksummed chunks.

For any bytes, every decoder returns a value that our own constructors have accepted, or raises
`WireError`. Its work is bounded by the length of the message and the limits of `codec`, and its
memory by the message or the expected content. A decoder restores the value that was encoded.
"""

# isort: off
# fmt: off
from fedpriv.wire.codec import (
    CHUNK_BYTES, NODE_RECEIVES_BYTES, SERVER_RECEIVES_BYTES, UNCOMPRESSED, Assembler, chunks,
    parse, pieces,
)
from fedpriv.wire.messages import (
    COUNTERSIGNATURE, HEAD, HELLO, LEDGER_REQUEST, OFFER, PROPOSAL, RECEIPT, ROUND_ID, STATUS,
    STEP, SUM, VERSION, VOTE, WELCOME, Countersignature, Decline, EnrolledNode, Hello,
    Price, Proposal, Receipt, RoundAnswer, RoundId, RoundOffer, RunState,
    SignedHead, Stage, Status, Step, SummedUpdates, TaskDescription, Terms, Vote, Welcome,
    decode_answer, digest_of, encode_answer, enrolment_digest, model_of, sum_to_send, update_of,
)
