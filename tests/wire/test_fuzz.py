"""Hostile bytes at every decoder: a value or WireError, in little memory."""

from collections.abc import Callable, Iterator, MutableSequence, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from google.protobuf.message import Message

from fedpriv import wire
from fedpriv.accounting.policies import separated_gaussian
from fedpriv.errors import WireError
from fedpriv.ledger import Head, NeighbouringRelation
from fedpriv.wire import Assembler, Decline, RoundAnswer, SummedUpdates
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.codec import LAYOUT as LAYOUT_CODEC
from fedpriv.wire.codec import SERVER_RECEIVES_BYTES, parse, refuse_unknown
from fedpriv.wire.messages import CLIPPING, LOCAL_TRAINING, METRIC
from fedpriv.wire.messages import PRICE as PRICE_CODEC
from tests.wire.examples import (
    PRICE,
    SIGNATURES,
    STEP,
    peak_memory,
    secure_offer,
    secure_welcome,
    small_offer,
    small_welcome,
)

OFFER = wire.OFFER.encode(small_offer())
SERIES = replace(
    PRICE,
    part=7,
    event=separated_gaussian(
        (1.0, 0.5, -0.125), 9, 3, 3, 2.0, NeighbouringRelation.REPLACE_ONE, population=1000
    ),
)
BYTES = b"some bytes"
STATUS = wire.Status("r", 1, 2, 0.5, 1.0, 1e-6, 3, 2, 1000, wire.RunState.WAITING)


def add_chunk(chunk: pb.Chunk) -> None:
    assembler = Assembler(len(BYTES), len(BYTES))
    assembler.add(chunk)
    assert assembler.finish().tobytes() == BYTES


def answer_of(content: SummedUpdates | Decline) -> pb.Answer:
    return wire.encode_answer(RoundAnswer(small_offer().id, content))


def summed(users: int) -> pb.Answer:
    return answer_of(SummedUpdates(users, users))


CASES: dict[str, tuple[Callable[[Message], object], Message]] = {
    "offer": (wire.OFFER.decode, OFFER),
    "clipping": (CLIPPING.decode, OFFER.clipping),
    "layout": (LAYOUT_CODEC.decode, OFFER.clipping.layout),
    "local": (LOCAL_TRAINING.decode, OFFER.local),
    "metric": (METRIC.decode, OFFER.metrics[0]),
    "price": (PRICE_CODEC.decode, PRICE_CODEC.encode(PRICE)),
    "series": (PRICE_CODEC.decode, PRICE_CODEC.encode(SERIES)),
    "round": (wire.ROUND_ID.decode, OFFER.id),
    "one": (wire.decode_answer, summed(1)),
    "sum": (wire.decode_answer, summed(1000)),
    "decline": (wire.decode_answer, answer_of(Decline("too dear"))),
    "chunk": (add_chunk, next(wire.chunks([BYTES]))),
    "hello": (wire.HELLO.decode, wire.HELLO.encode(wire.Hello("node", bytes(32)))),
    "ledger": (
        wire.LEDGER_REQUEST.decode,
        wire.LEDGER_REQUEST.encode(Head(3, "0f" * 32)),
    ),
    "receipt": (wire.RECEIPT.decode, wire.RECEIPT.encode(wire.Receipt(True))),
    "welcome": (wire.WELCOME.decode, wire.WELCOME.encode(small_welcome())),
    "status": (wire.STATUS.decode, wire.STATUS.encode(STATUS)),
    "masked": (wire.decode_answer, answer_of(SummedUpdates(0, 0, masked=True))),
    "secure offer": (wire.OFFER.decode, wire.OFFER.encode(secure_offer())),
    "secure welcome": (wire.WELCOME.decode, wire.WELCOME.encode(secure_welcome())),
    "vote": (wire.VOTE.decode, wire.VOTE.encode(wire.Vote(small_offer().id, "", SIGNATURES[0]))),
    "step": (wire.STEP.decode, wire.STEP.encode(STEP)),
}
INPUTS = 1000  # of each case and each way to disturb it
VARINTS = [b"\xff" * 9 + b"\x01", b"\x80" * 10, bytes(8), b"\x08"]
HOSTILE = {
    float: [float("nan"), float("inf"), -1.0, 0.0, 1e308, 5e-324, 0.5],
    int: [0, 1, 2, -1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1],
    str: ["", "w", "unclipped", "x" * 2000, "\0\n", "é", "{}"],
    bytes: [b"", bytes(31), bytes(32), bytes(33)],
    bool: [True, False],
}


def mutated(valid: bytes, rng: np.random.Generator) -> Iterator[bytes]:
    """Valid bytes with some flipped, overwritten, cut, doubled, or with hostile numbers; noise."""
    yield b""
    while True:
        data = bytearray(valid)
        for _ in range(int(rng.integers(1, 4))):
            at, to = sorted(rng.integers(0, len(data) + 1, 2).tolist())
            match int(rng.integers(7)):
                case 0 if at < len(data):
                    data[at] ^= 1 << int(rng.integers(8))
                case 1 if at < len(data):
                    data[at] = int(rng.integers(256))
                case 2:
                    del data[at:to]
                case 3:
                    data[to:to] = data[at:to]
                case 4:
                    data[at:at] = VARINTS[int(rng.integers(len(VARINTS)))]
                case 5:
                    data[at : at + 8] = rng.bytes(8)
                case 6 if rng.random() < 0.2:
                    data = bytearray(rng.bytes(int(rng.integers(200))))
        yield bytes(data)


def disturbed(valid: Message, rng: np.random.Generator) -> Iterator[bytes]:
    """Well-formed messages with some fields cleared, repeated, reordered or of hostile values."""
    while True:
        copy = type(valid)()
        copy.CopyFrom(valid)
        for _ in range(int(rng.integers(1, 3))):
            disturb(copy, rng)
        yield copy.SerializeToString()


def disturb(message: Message, rng: np.random.Generator) -> None:
    fields = list(message.DESCRIPTOR.fields)
    if not fields:
        return
    field = fields[int(rng.integers(len(fields)))]
    value = getattr(message, field.name)
    if rng.random() < 0.1:
        message.ClearField(field.name)
    elif field.is_repeated:
        scramble(value, rng)
    elif isinstance(value, Message):
        disturb(value, rng)
    else:
        with suppress(ValueError):  # a number that the field cannot hold
            setattr(message, field.name, choice(HOSTILE[type(value)], rng))


def scramble(values: MutableSequence[object], rng: np.random.Generator) -> None:
    """Change a repeated field: an element of it, its order, or how many there are."""
    if not values:
        return
    one = choice(values, rng)
    match int(rng.integers(4)):
        case 0:
            values.reverse()
        case 1:
            values.extend([one] * int(rng.integers(1, 40)))
        case 2:
            del values[int(rng.integers(len(values)))]
        case _ if isinstance(one, Message):
            disturb(one, rng)
        case _:
            with suppress(ValueError):
                values[int(rng.integers(len(values)))] = choice(HOSTILE[type(one)], rng)


def choice(values: Sequence[object], rng: np.random.Generator) -> object:
    return values[int(rng.integers(len(values)))]


def refused(decode: Callable[[Message], object], kind: type[Message], data: bytes) -> bool:
    """Whether bytes are refused, in a short sentence; other errors than WireError fail the test."""
    try:
        decode(parse(kind, data, SERVER_RECEIVES_BYTES))
    except WireError as error:
        return len(str(error)) < 1000
    return False


@pytest.mark.parametrize("case", CASES)
def test_any_bytes_give_a_value_or_a_wire_error(case: str) -> None:
    decode, message = CASES[case]
    valid = message.SerializeToString()
    assert not refused(decode, type(message), valid)
    rng = np.random.default_rng([ord(letter) for letter in case])
    for inputs in (mutated(valid, rng), disturbed(message, rng)):
        with peak_memory() as peak:
            turned_away = [refused(decode, type(message), next(inputs)) for _ in range(INPUTS)]
        # Were all refused at once, by protobuf say, the decoders would not have been tried.
        assert INPUTS // 50 < sum(turned_away) < INPUTS * 49 // 50
        assert peak() < 2**22


def decode_task(message: pb.Task) -> wire.Welcome:
    return wire.WELCOME.decode(pb.Welcome(population_name="p", population=1, task=message))


def nested(kind: type[Message], field: str, count: int) -> bytes:
    """So many empty elements of a repeated field: two bytes each."""
    return bytes([kind.DESCRIPTOR.fields_by_name[field].number << 3 | 2, 0]) * count


@pytest.mark.parametrize(
    ("decode", "kind", "field"),
    [
        (LAYOUT_CODEC.decode, pb.Layout, "names"),
        (LAYOUT_CODEC.decode, pb.Layout, "shapes"),
        (CLIPPING.decode, pb.Clipping, "groups"),
        (CLIPPING.decode, pb.Clipping, "weighted"),
        (wire.OFFER.decode, pb.Offer, "metrics"),
        (decode_task, pb.Task, "metrics"),
    ],
)
def test_a_message_full_of_empty_elements_is_refused_in_little_memory(
    decode: Callable[[Message], object], kind: type[Message], field: str
) -> None:
    data = nested(kind, field, SERVER_RECEIVES_BYTES // 2)
    with peak_memory() as peak:
        assert refused(decode, kind, data)
    assert peak() < 2**22


@pytest.mark.parametrize("options", ["[" * 2**16, "[]," * 2**15, "[" + "{}," * 21840 + "0]"])
def test_options_full_of_empty_values_are_refused_in_little_memory(options: str) -> None:
    data = pb.Task(model="m", options=options, loss="l").SerializeToString()
    with peak_memory() as peak:
        assert refused(decode_task, pb.Task, data)
    assert peak() < 2**22


@pytest.mark.parametrize("event", ["[" * 2**22, "[]," * 2**20, "{" * 2**21, "0.5," * 2**20])
def test_events_full_of_empty_values_are_refused_in_little_memory(event: str) -> None:
    message = pb.Price(event=event, delta=0.5)
    with peak_memory() as peak, pytest.raises(WireError, match="commas and brackets"):
        PRICE_CODEC.decode(message)
    assert peak() < 2**24


def test_too_long_a_message_is_refused_unread() -> None:
    with pytest.raises(WireError, match="1114113 bytes in a Layout"):
        parse(pb.Layout, bytes(SERVER_RECEIVES_BYTES + 1), SERVER_RECEIVES_BYTES)


def test_deep_groups_of_unknown_fields_are_refused() -> None:
    with pytest.raises(WireError, match="not a message Offer"):
        parse(pb.Offer, b"\x7b" * 100_000, SERVER_RECEIVES_BYTES)


def messages_in(message: Message) -> Iterator[Message]:
    """A message, and all that are in it."""
    yield message
    for field, content in message.ListFields():
        if field.message_type is not None:
            for inner in content if isinstance(content, MutableSequence) else [content]:
                yield from messages_in(inner)


def test_a_field_that_is_not_known_is_refused_wherever_it_is() -> None:
    offer = small_offer()
    for message in (
        wire.OFFER.encode(offer),
        wire.PROPOSAL.encode(wire.Proposal.of(offer, offer.price)),
        wire.WELCOME.encode(small_welcome()),
    ):
        refuse_unknown(message)
        data, kinds = message.SerializeToString(), set[str]()
        for number in range(len([*messages_in(message)])):
            altered = type(message).FromString(data)
            inner = [*messages_in(altered)][number]
            inner.MergeFromString(b"\xc0\x3e\x01")  # field 1000
            kinds.add(inner.DESCRIPTOR.name)
            with pytest.raises(WireError, match="has fields that this version"):
                refuse_unknown(altered)
        assert kinds >= ({"Task"} if "Welcome" in kinds else {"Price", "Shape", "VectorGroup"})
