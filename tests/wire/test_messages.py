"""Messages: every value survives the wire, and the bytes are those of the format."""

import hashlib
import json
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpriv import wire
from fedpriv.errors import WireError
from fedpriv.privacy.clipping import MOST_WEIGHT, Clipping
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.round import PartialSum
from fedpriv.training.local import SGD
from fedpriv.training.optimizers import PolynomialDecay
from fedpriv.training.request import LocalTraining, RoundRequest
from fedpriv.wire import (
    Hello,
    Price,
    Receipt,
    RoundAnswer,
    RoundId,
    RoundOffer,
    Status,
    SummedUpdates,
    Welcome,
)
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.codec import INT32, INT64, parse
from fedpriv.wire.messages import LOCAL_TRAINING, model_of
from fedpriv.wire.messages import PRICE as PRICE_CODEC
from tests.wire import examples, stub

ID = RoundId("r", 3, 1)
MOST = 2**24
quick = settings(max_examples=100, deadline=None)


@quick
@given(examples.round_ids, examples.prices(), examples.hellos, examples.receipts, examples.statuses)
def test_small_messages_survive(
    name: RoundId, price: Price, hello: Hello, receipt: Receipt, status: Status
) -> None:
    def again(message: object) -> object:
        return parse(type(message), message.SerializeToString(), MOST)

    assert wire.ROUND_ID.decode(again(wire.ROUND_ID.encode(name))) == name
    assert PRICE_CODEC.decode(again(PRICE_CODEC.encode(price))) == price
    assert wire.HELLO.decode(again(wire.HELLO.encode(hello))) == hello
    assert wire.RECEIPT.decode(again(wire.RECEIPT.encode(receipt))) == receipt
    assert wire.STATUS.decode(again(wire.STATUS.encode(status))) == status


@quick
@given(examples.offers())
def test_offers_survive(offer: RoundOffer) -> None:
    data = wire.OFFER.encode(offer).SerializeToString()
    decoded = wire.OFFER.decode(parse(pb.Offer, data, MOST))
    assert examples.same(decoded, offer)
    assert not decoded.users.flags.writeable


@quick
@given(examples.welcomes)
def test_welcomes_survive(welcome: Welcome) -> None:
    data = wire.WELCOME.encode(welcome).SerializeToString()
    decoded = wire.WELCOME.decode(parse(pb.Welcome, data, MOST))
    assert examples.same(decoded, welcome)
    # True is 1 and 1 is 1.0 when compared, but not for whoever builds the task.
    assert repr(decoded.task.options) == repr(welcome.task.options)
    assert not decoded.users.flags.writeable


def test_a_task_names_what_whoever_builds_it_must_import() -> None:
    task = examples.small_welcome().task
    assert task.imports == ("mine:net", "mine:recall")
    assert replace(task, model="softmax", metrics=()).imports == ()
    assert replace(task, model="softmax", loss="a.b:c").imports == ("a.b:c", "mine:recall")


def test_ids_in_any_order_have_the_digest_of_the_format() -> None:
    text = b'["7f3a","\\u00e9"]'
    assert wire.digest_of(["é", "7f3a"]) == hashlib.sha256(text).digest()
    assert wire.digest_of([]) == hashlib.sha256(b"[]").digest()
    assert wire.digest_of(["a", "b"]) != wire.digest_of(['a","b'])


@quick
@given(examples.requests())
def test_a_node_gets_the_request_that_the_server_made(request: RoundRequest) -> None:
    model = wire.model_of(request)
    offer = RoundOffer.of(request, 1.0, examples.priced(users=2**40))
    offered = wire.OFFER.decode(parse(pb.Offer, wire.OFFER.encode(offer).SerializeToString(), MOST))
    layout = offered.model(Layout.of(request.statistics))
    arrived = stub.received(layout, wire.chunks(wire.pieces(model)))
    assert examples.same(offered.request(arrived), request)


def test_a_request_with_control_variates_survives() -> None:
    request = examples.request_with_control()
    model = model_of(request)
    assert list(model) == ["w", "b", "control/w", "control/b", *request.statistics]
    offer = RoundOffer.of(request, 60.0, examples.PRICE)
    found = wire.OFFER.decode(wire.OFFER.encode(offer)).request(model)
    assert examples.same(found, request)
    assert list(found.control) == ["w", "b"]
    assert offer.model(Layout.of(request.statistics)) == Layout.of(model)


def test_only_the_rate_of_a_round_and_what_nodes_know_are_sent() -> None:
    falling = SGD(PolynomialDecay(0.5, 0.1, rounds=4), epochs=1)
    sent = json.loads(LOCAL_TRAINING.encode(falling.at(3)).options)
    assert sent["learning_rate"] == pytest.approx(0.3)
    with pytest.raises(WireError, match="a step needs a number"):
        LOCAL_TRAINING.encode(falling)

    class Mine(LocalTraining):
        def direction(self, step):
            return step.gradient.sign(), ()

    with pytest.raises(WireError, match="is Mine, which nodes do not know"):
        LOCAL_TRAINING.encode(Mine(0.1, epochs=1))


@quick
@given(examples.answers())
def test_answers_survive(answer: RoundAnswer) -> None:
    message = parse(pb.Answer, wire.encode_answer(answer).SerializeToString(), MOST)
    assert wire.decode_answer(message) == answer


def received(partial: PartialSum) -> PartialSum:
    """A partial sum of the node, after the wire."""
    header, tensors = wire.sum_to_send(partial)
    message = wire.encode_answer(RoundAnswer(ID, header)).SerializeToString()
    content = wire.decode_answer(parse(pb.Answer, message, MOST)).content
    layout = Layout((wire.SUM,), (partial.total.shape,))
    (total,) = stub.received(layout, wire.chunks(wire.pieces(tensors)), content.dtype).values()
    return PartialSum("node", content.users, total.astype(np.int64), content.weight)


@quick
@given(st.data(), st.integers(0, 200) | st.integers(0, 2**20), st.integers(0, 5))
def test_a_partial_sum_survives(data: st.DataObject, users: int, size: int) -> None:
    most = users * (2**25 - 1)
    total = data.draw(hnp.arrays(np.int64, size, elements=st.integers(-most, most)))
    weight = data.draw(st.integers(0, users * MOST_WEIGHT))
    again = received(PartialSum("node", users, total, weight))
    assert (again.node, again.users, again.weight) == ("node", users, weight)
    assert again.total.dtype == np.int64
    np.testing.assert_array_equal(again.total, total)


def test_sums_take_32_bits_where_so_few_users_cannot_pass_them() -> None:
    # A user with the largest bound, B < 2^50, may put all of it into one component.
    alone = Layout(("w",), ((1,),))
    for norm in (2.0 - 2.0**-52, 1.0, 1e-30, 1e30):
        clipping = Clipping(alone, flat(alone, norm))
        (most,) = clipping.contribution({"w": np.array([1e31])})
        for users, dtype in ((63, INT32), (64, INT64)):
            full = PartialSum("node", users, np.array([-most * users]), users)
            assert SummedUpdates(users, users).dtype == dtype
            assert received(full).total.tolist() == [-most * users]


def message(number: int, payload: bytes) -> bytes:
    """A field of known length as the protobuf encoding writes it: tag, length, payload."""
    size = len(payload)
    assert size < 2**14
    length = [size] if size < 128 else [size & 127 | 128, size >> 7]
    return bytes([number << 3 | 2, *length]) + payload


def double(number: int, value: float) -> bytes:
    return bytes([number << 3 | 1]) + struct.pack("<d", value)


def test_the_bytes_of_an_offer_are_those_of_the_format() -> None:
    """Written by hand after the encoding's specification; other bytes are another format."""
    offer = examples.small_offer()
    w, b, none, one = (
        message(2, message(1, bytes(s)) if s else b"") for s in [(2, 2), (3,), (), (1,)]
    )
    names = [message(1, name) for name in (b"w", b"b", b"metrics/accuracy", b"unclipped")]
    update = message(1, b"update") + message(2, b"w") + message(2, b"b") + double(3, 1.0)
    accuracy = message(1, b"metrics/accuracy") + message(2, b"metrics/accuracy") + double(3, 0.5)
    half = 0.5 * (1 + 2.0**-50)
    counting = message(1, b"unclipped") + message(2, b"unclipped") + double(3, half)
    scale = struct.pack("<d", 1.0)
    layout = message(1, b"".join(names) + w + b + none + one)
    groups = [
        message(2, update + message(4, 2 * scale)),
        message(2, accuracy + message(4, scale)),
        message(2, counting + message(4, scale)),
    ]
    indicator = message(3, message(1, b"unclipped") + message(2, b"update"))
    clipping = layout + b"".join(groups) + indicator + message(4, b"update") + b"\x28\x14"
    event = (
        b'{"policy": "poisson", "sampling_probability": 0.5, "population": 1000, '
        b'"relation": "add-or-remove-one", "schedule": null, "strategy": [1.0], "sum_queries": '
        b'[{"group": "update", "clipping_norm": 1.0, "noise_stddev": 1.0, "granularity": null}]}'
    )
    local = (
        b'{"learning_rate": 0.25, "batch_size": 10, "epochs": 2, "steps": null, "momentum": 0.0, '
        b'"proximal": 0.0, "max_examples": 100}'
    )
    price = double(4, 2.0) + double(5, 1e-6) + message(7, event)
    metric = message(1, b"accuracy") + message(2, b"") + double(3, 0.5) + double(4, 0.5)
    written = [
        message(1, message(1, b"r") + b"\x10\x03\x18\x01"),
        double(2, 60.0),
        message(3, b"\x01\xac\x02"),
        message(4, clipping),
        message(5, message(2, local)),
        message(6, metric + message(5, scale)),
        message(7, bytes(range(32))),
        message(8, price),
    ]
    assert wire.OFFER.encode(offer).SerializeToString(deterministic=True) == b"".join(written)
    assert examples.same(wire.OFFER.decode(parse(pb.Offer, b"".join(written), MOST)), offer)


def test_the_bytes_of_a_hello_and_a_welcome_are_those_of_the_format() -> None:
    digest = bytes(range(32))
    hello = message(1, b"node") + b"\x10\x01" + message(3, digest)
    assert wire.HELLO.encode(Hello("node", digest)).SerializeToString(deterministic=True) == hello
    assert wire.HELLO.decode(parse(pb.Hello, hello, MOST)) == Hello("node", digest)
    options = message(2, b'{"sizes": [2, 3]}')
    task = message(1, b"mine:net") + options + b"\x18\x07" + message(4, b"cross-entropy")
    written = message(1, b"people") + b"\x10\xe8\x07" + message(3, b"\x01\xac\x02")
    task += message(5, b"mine:recall") + message(6, b"x") + message(7, b"y")
    written += message(4, task + b"\x40\xc7\x01" + message(12, b"{}"))
    welcome = examples.small_welcome()
    assert wire.WELCOME.encode(welcome).SerializeToString(deterministic=True) == written
    assert examples.same(wire.WELCOME.decode(parse(pb.Welcome, written, MOST)), welcome)


def test_messages_of_secure_sums_are_restored() -> None:
    offer, welcome = examples.secure_offer(), examples.secure_welcome()
    assert examples.same(wire.OFFER.decode(wire.OFFER.encode(offer)), offer)
    assert examples.same(wire.WELCOME.decode(wire.WELCOME.encode(welcome)), welcome)
    vote = wire.Vote(ID, "", examples.SIGNATURES[1])
    assert wire.VOTE.decode(wire.VOTE.encode(vote)) == vote
    assert wire.STEP.decode(wire.STEP.encode(examples.STEP)) == examples.STEP
    masked = RoundAnswer(ID, SummedUpdates(0, 0, masked=True))
    assert wire.decode_answer(wire.encode_answer(masked)) == masked


def test_an_enrolment_has_one_digest_and_each_change_another() -> None:
    nodes = examples.secure_welcome().nodes
    first, *others = nodes
    digest = wire.enrolment_digest(nodes)
    assert wire.enrolment_digest(nodes[::-1]) == digest
    for changed in (
        replace(first, name="n9"),
        replace(first, fingerprint=bytes(31) + b"1"),
        replace(first, users=301),
    ):
        assert wire.enrolment_digest([changed, *others]) != digest
    assert wire.enrolment_digest(others) != digest


def test_the_bytes_of_an_answer_and_a_chunk_are_those_of_the_format() -> None:
    total = message(2, b"\x08\x05\x10\xac\x02")
    answer = RoundAnswer(ID, SummedUpdates(5, 300))
    written = message(1, message(1, b"r") + b"\x10\x03\x18\x01") + total
    assert wire.encode_answer(answer).SerializeToString(deterministic=True) == written
    (chunk,) = wire.chunks([b"123456789"])
    # 0xCBF43926 is the check value of CRC-32/ISO-HDLC in every catalogue of CRCs.
    check = b"\x1d" + struct.pack("<I", 0xCBF43926)
    assert chunk.SerializeToString(deterministic=True) == message(2, b"123456789") + check
