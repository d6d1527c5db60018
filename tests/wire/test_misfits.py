"""Messages and values that do not fit are refused, in one sentence, on both sides."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fedpriv import wire
from fedpriv.accounting.policies import (
    poisson_gaussian,
    random_allocation_gaussian,
    separated_gaussian,
)
from fedpriv.errors import InvalidValueError, WireError
from fedpriv.ledger import NeighbouringRelation, Selection, Trial
from fedpriv.ledger.ledger import event_text
from fedpriv.privacy.gaussian_mechanism import Metric
from fedpriv.training.request import LocalTraining
from fedpriv.wire import (
    Decline,
    Hello,
    Receipt,
    RoundAnswer,
    RoundId,
    RunState,
    Status,
    SummedUpdates,
)
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.codec import MAX_USERS
from fedpriv.wire.messages import LOCAL_TRAINING, METRIC
from fedpriv.wire.messages import PRICE as PRICE_CODEC
from tests.wire import examples

ID = RoundId("r", 3, 1)
WELCOME = examples.small_welcome()
PASS = random_allocation_gaussian(3, 1, 1.0, population=1000)
SEARCH = replace(
    poisson_gaussian(0.5, 1.0, population=1000), selection=Selection((Trial(0.5, 1.0, 9),), 2.0)
)


def with_local(message: pb.Offer, **options: object) -> None:
    message.local.options = json.dumps(json.loads(message.local.options) | options)


def altered(change: Callable[[pb.Offer], object]) -> pb.Offer:
    sent = wire.OFFER.encode(examples.small_offer())
    change(sent)
    return sent


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.ClearField("id"), "run has 0 characters"),
        (lambda m: setattr(m, "seconds", float("nan")), "seconds is nan"),
        (lambda m: m.users.append(300), "ascending"),
        (lambda m: m.users.append(1000), "from 0 to 999"),
        (lambda m: m.users.insert(0, -1), "from 0 to 999"),
        (lambda m: m.users.extend([0] * MAX_USERS), "there are 1048578 users"),
        (lambda m: m.ClearField("clipping"), "weight_cap is 0"),
        (lambda m: m.clipping.ClearField("groups"), "vector groups hold 0 tensors"),
        (lambda m: setattr(m.clipping.groups[0], "clipping_norm", 0.0), "clipping_norm of group"),
        (lambda m: m.clipping.groups[0].tensors.append("w"), "vector groups hold 5 tensors"),
        (lambda m: m.clipping.groups[0].scales.append(1.0), "3 scales for 2"),
        (lambda m: m.clipping.weighted.append("x"), "vector group 'x' is unknown"),
        (lambda m: m.clipping.weighted.extend(["update"] * 3), "there are 4 weighted groups"),
        (lambda m: m.clipping.indicator.groups.extend(["x"] * 3), "4 groups of an indicator"),
        (lambda m: setattr(m.clipping.groups[1], "name", "x" * 1025), "1025 characters"),
        (lambda m: with_local(m, steps=1), "exactly one must be given"),
        (lambda m: with_local(m, momentum=1.0), "momentum is 1.0"),
        (lambda m: with_local(m, learning_rate=float("nan")), "not JSON compliant"),
        (lambda m: with_local(m, learning_rate="0.5"), "learning_rate is '0.5'"),
        (lambda m: with_local(m, batch_size=2.5), "batch_size is 2.5"),
        (lambda m: with_local(m, max_examples=2**32), "max_examples is 4294967296"),
        (lambda m: with_local(m, beta1=0.9), "unexpected keyword argument 'beta1'"),
        (lambda m: setattr(m.local, "options", "[1]"), "not a JSON object"),
        (lambda m: setattr(m.local, "algorithm", "adamm"), "algorithm is 'adamm'"),
        (lambda m: setattr(m.local, "algorithm", "fedrecon"), "personal_steps"),
        (lambda m: setattr(m.local, "algorithm", "x" * 1025), "1025 characters"),
        (lambda m: m.metrics.append(m.metrics[0]), "given twice"),
        (lambda m: setattr(m.metrics[0], "name", "loss"), "no tensor of its shape"),
        (lambda m: setattr(m.metrics[0], "radius", -1.0), "clipping_norm"),
        (lambda m: m.metrics[0].options.extend([0.0] * 100_000), "100001 options"),
        (lambda m: setattr(m, "local_key", bytes(31)), "local_key has 31 bytes"),
        (lambda m: m.ClearField("price"), "the event is not one that this fedpriv knows"),
        (lambda m: setattr(m.clipping, "weight_cap", 2**31 + 1), "weight_cap is 2147483649"),
    ],
)  # fmt: skip
def test_offers_that_do_not_fit_are_refused(
    change: Callable[[pb.Offer], object], reason: str
) -> None:
    with pytest.raises(WireError, match=reason):
        wire.OFFER.decode(altered(change))


TEXT = event_text(PASS)
ADD_OR_REMOVE = NeighbouringRelation.ADD_OR_REMOVE_ONE
SERIES = event_text(separated_gaussian((1.0,), 100, 10, 10, 1.0, ADD_OR_REMOVE, population=1000))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is not JSON"),
        ("[]", "not one that this fedpriv knows"),
        ("{}", "a field is absent, unk"),
        ("null", "not one that this fedpriv knows"),
        (TEXT[:-1], "it is not JSON"),
        (TEXT + " ", "in the exact form that a ledger writes"),
        (TEXT.replace(": ", ":"), "in the exact form that a ledger writes"),
        (TEXT.replace("{", '{"more": 1, ', 1), "in the exact form that a ledger writes"),
        (TEXT.replace("{", '{"policy": "poisson", ', 1), "exact form that a ledger writes"),
        (TEXT.replace("random-allocation", "telling"), "a field is absent, unk"),
        (TEXT.replace("random-allocation", "poisson"), "poisson sampling is of one round"),
        (TEXT.replace("add-or-remove-one", "replace-one"), "has no analysis"),
        (TEXT.replace('"rounds": 3', '"rounds": true'), "not one that this fedpriv knows"),
        (TEXT.replace('"rounds": 3', '"rounds": 0'), "the schedule has 0 rounds"),
        (TEXT.replace('"rounds": 3', '"rounds": 4'), "sampling_probability is 0.3"),
        (TEXT.replace('"rounds": 3', '"rounds": null'), "not one that this fedpriv knows"),
        (TEXT.replace('"rounds": 3', '"turns": 3'), "a field is absent, unk"),
        (TEXT.replace("1000", "0"), "population is 0"),
        (TEXT.replace("1000", "1e3"), "population is 1000.0"),
        (TEXT.replace("1000", str(2**63)), "population is 9223372036854775808"),
        (TEXT.replace("1000", "9" * 5000), "not one that this fedpriv knows"),
        (TEXT.replace('"clipping_norm": 1.0', '"clipping_norm": NaN'), "clipping_norm .* is nan"),
        (TEXT.replace('"clipping_norm": 1.0', '"clipping_norm": "1"'), "clipping_norm is '1'"),
        (TEXT.replace('"noise_stddev": 1.0', '"noise_stddev": Infinity'), "noise_stddev .* is inf"),
        (TEXT.replace('"noise_stddev": 1.0', '"noise_stddev": -1.0'), "noise_stddev .* is -1"),
        (TEXT.replace('"strategy": [1.0]', '"strategy": [1.0, 0.5]'), "has fresh noise in every"),
        (TEXT.replace('"strategy": [1.0]', '"strategy": 7'), "a field is absent, unk"),
        (TEXT.replace('"strategy": [1.0]', f'"strategy": [{"[" * 5000}'), "not one that this"),
        (TEXT[:-2] + "], " * 2**17, "commas and brackets in an event; there may be at most 131072"),
        (TEXT.replace('"update"', f'"{"x" * 2**22}"'), "characters in event of a price"),
        (SERIES.replace("[1.0]", "[0.0, 1.0]"), "begins with 0.0"),
        (SERIES.replace("[1.0]", "[1.0, Infinity]"), "all must be finite"),
        (SERIES.replace("[1.0]", f"[1.0{', 1.0' * 100}]"), "has 101 coefficients"),
    ],
)  # fmt: skip
def test_events_that_are_none_are_refused_in_one_sentence(text: str, reason: str) -> None:
    sent = wire.OFFER.encode(examples.small_offer())
    sent.price.event = text
    with pytest.raises(WireError, match=reason) as refused:
        wire.OFFER.decode(sent)
    assert len(str(refused.value)) < 500


def test_a_part_that_the_event_has_not_is_refused() -> None:
    sent = wire.OFFER.encode(examples.small_offer())
    for text, rounds in ((TEXT, 3), (event_text(examples.PRICE.event), 1)):
        sent.price.event, sent.price.part = text, rounds - 1
        assert wire.OFFER.decode(sent).price.part == rounds - 1
        sent.price.part = rounds
        with pytest.raises(WireError, match=f"part is {rounds}"):
            wire.OFFER.decode(sent)


def test_a_search_is_no_round() -> None:
    sent = wire.OFFER.encode(examples.small_offer())
    sent.price.event = event_text(SEARCH)
    with pytest.raises(WireError, match="the event is a whole search"):
        wire.OFFER.decode(sent)


def test_a_strategy_is_sent_up_to_its_largest_length() -> None:
    for size in (100_000, 2**17):
        strategy = tuple(1.0 / n for n in range(3, size + 3))
        event = separated_gaussian(strategy, 2**20, 105, 10_000, 1.0, ADD_OR_REMOVE)
        price = replace(examples.PRICE, event=event, part=2**20 - 1)
        if size == 100_000:
            assert PRICE_CODEC.decode(PRICE_CODEC.encode(price)) == price
        else:
            with pytest.raises(WireError, match="commas and brackets in an event"):
                PRICE_CODEC.encode(price)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.ClearField("sum"), "an answer is empty"),
        (lambda m: m.ClearField("id"), "run has 0 characters"),
        (lambda m: setattr(m.sum, "users", MAX_USERS + 1), "number of users"),
        (lambda m: setattr(m.sum, "weight", 2 * 2**31 + 1), "weight of users"),
        (lambda m: setattr(m.decline, "reason", "x" * 1025), "1025 characters"),
    ],
)
def test_answers_that_do_not_fit_are_refused(
    change: Callable[[pb.Answer], object], reason: str
) -> None:
    sent = wire.encode_answer(RoundAnswer(ID, SummedUpdates(2, 40)))
    assert wire.decode_answer(sent).content.users == 2
    change(sent)
    with pytest.raises(WireError, match=reason):
        wire.decode_answer(sent)


def test_what_the_other_side_would_not_take_is_not_sent() -> None:
    users = np.arange(MAX_USERS + 1)
    offer = replace(examples.small_offer(), price=examples.priced(users=2**40))
    with pytest.raises(WireError, match="1048577 users"):
        wire.OFFER.encode(replace(offer, users=users))
    largest = wire.OFFER.encode(replace(offer, users=users[1:]))
    assert largest.ByteSize() < wire.NODE_RECEIVES_BYTES


def test_a_long_reason_is_cut_and_what_is_no_text_is_refused() -> None:
    offer = altered(lambda m: m.clipping.weighted.append("x" * 100_000))
    with pytest.raises(WireError) as refused:
        wire.OFFER.decode(offer)
    assert len(str(refused.value)) < 500
    for encode in (
        lambda: wire.ROUND_ID.encode(RoundId("\ud800", 0, 0)),
        lambda: wire.RECEIPT.encode(Receipt(False, "\ud800")),
        lambda: wire.encode_answer(RoundAnswer(ID, Decline("\ud800"))),
        lambda: LOCAL_TRAINING.encode(LocalTraining(1.0, epochs=2**32)),
        lambda: METRIC.encode(Metric("m", options=(0.0,) * 100_001)),
        lambda: LOCAL_TRAINING.encode(LocalTraining(1.0, steps=1, max_examples=2**32)),
    ):
        with pytest.raises(WireError):
            encode()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.ClearField("population_name"), "population_name has 0 characters"),
        (lambda m: setattr(m, "population", 2**64 - 1), "population is 18446744073709551615"),
        (lambda m: setattr(m, "population", 300), "from 0 to 299"),
        (lambda m: m.users.append(300), "ascending"),
        (lambda m: m.users.insert(0, -1), "from 0 to 999"),
        (lambda m: m.users.extend([0] * MAX_USERS), "there are 1048578 users"),
        (lambda m: m.ClearField("task"), "not legal"),
        (lambda m: setattr(m.task, "seed", 2**63), "seed is 9223372036854775808"),
        (lambda m: setattr(m.task, "model", "x" * 1025), "1025 characters"),
        (lambda m: setattr(m.task, "loss", "x" * 1025), "1025 characters"),
        (lambda m: m.task.metrics.append("x" * 1025), "1025 characters"),
        (lambda m: m.task.metrics.extend([""] * 4096), "there are 4097 metrics"),
        (lambda m: setattr(m.task, "options", "[1]"), "not a JSON object"),
        (lambda m: setattr(m.task, "options", "{"), "not legal"),
        (lambda m: setattr(m.task, "options", '{"a": NaN}'), "not JSON compliant"),
        (lambda m: setattr(m.task, "options", '{"a": -Infinity}'), "not JSON compliant"),
        (lambda m: setattr(m.task, "options", '{"a": 1e999}'), "not JSON compliant"),
        (lambda m: setattr(m.task, "options", '{"a": %s}' % ("9" * 5000)), "not legal"),
        (lambda m: setattr(m.task, "options", '{"a": %s' % ("[" * 5000)), "too deeply"),
        (lambda m: setattr(m.task, "options", " " * 2**16 + "{}"), "65538 characters"),
    ],
)  # fmt: skip
def test_welcomes_that_do_not_fit_are_refused(
    change: Callable[[pb.Welcome], object], reason: str
) -> None:
    sent = wire.WELCOME.encode(WELCOME)
    change(sent)
    with pytest.raises(WireError, match=reason) as refused:
        wire.WELCOME.decode(sent)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "options",
    [
        {"a": (1, 2)},
        {1: 2},
        {"a": float("nan")},
        {"a": float("inf")},
        {"a": object()},
        {"a": "x" * 2**16},
    ],
    ids=["tuple", "key", "nan", "inf", "object", "long"],
)
def test_options_that_would_arrive_as_others_are_not_sent(options: dict[str, object]) -> None:
    with pytest.raises(WireError):
        wire.WELCOME.encode(replace(WELCOME, task=replace(WELCOME.task, options=options)))


def test_options_that_are_nested_too_deeply_are_not_sent() -> None:
    inner: list[object] = []
    for _ in range(100_000):
        inner = [inner]
    with pytest.raises(WireError, match="too deeply"):
        wire.WELCOME.encode(replace(WELCOME, task=replace(WELCOME.task, options={"a": inner})))


def test_a_welcome_that_a_node_would_not_take_is_not_sent() -> None:
    users = np.arange(MAX_USERS) + 2**62
    everybody = replace(WELCOME, users=users, population=2**63 - 1)
    assert wire.WELCOME.encode(everybody).ByteSize() < wire.NODE_RECEIVES_BYTES
    names = tuple(f"{number:04}{'é' * 1000}" for number in range(4096))
    with pytest.raises(WireError, match="bytes in a welcome"):
        wire.WELCOME.encode(replace(everybody, task=replace(WELCOME.task, metrics=names)))
    with pytest.raises(WireError, match="1048577 users"):
        wire.WELCOME.encode(replace(WELCOME, users=np.arange(MAX_USERS + 1), population=2**40))


@pytest.mark.parametrize(
    "make",
    [
        lambda: RoundId("", 0, 0),
        lambda: RoundId("r", 2**32, 0),
        lambda: RoundId("r", 0, -1),
        lambda: RoundId("r", 0, 0, -1),
        lambda: RoundId("r", 0, 0, 2**64),
        lambda: examples.priced(users=2**63),
        lambda: replace(examples.PRICE, event=replace(examples.PRICE.event, count=2)),
        lambda: replace(examples.PRICE, event=SEARCH),
        lambda: replace(examples.PRICE, part=1),
        lambda: replace(examples.PRICE, event=PASS, part=3),
        lambda: replace(examples.PRICE, event=PASS, part=-1),
        lambda: replace(examples.PRICE, epsilon_after=float("nan")),
        lambda: replace(examples.PRICE, delta=1.0),
        lambda: replace(examples.small_offer(), users=np.array([1], np.int32)),
        lambda: replace(examples.small_offer(), users=np.array([[1]])),
        lambda: replace(examples.small_offer(), seconds=0.0),
        lambda: wire.model_of(replace(examples.small_request(), statistics=examples.PARAMETERS)),
        lambda: SummedUpdates(-1, 0),
        lambda: SummedUpdates(1, -1),
        lambda: SummedUpdates(1, 1, masked=True),
        lambda: Decline("x" * 1025),
        lambda: Hello("", bytes(32)),
        lambda: Hello("a\nb", bytes(32)),
        lambda: Hello("node", bytes(31)),
        lambda: Hello("node", bytes(32), 2),
        lambda: replace(WELCOME, population_name=""),
        lambda: replace(WELCOME, population_name="x" * 1025),
        lambda: replace(WELCOME, population=300),
        lambda: replace(WELCOME, population=2**63),
        lambda: replace(WELCOME, population=0, users=np.zeros(0, np.int64)),
        lambda: replace(WELCOME, users=np.array([1], np.int32)),
        lambda: replace(WELCOME, users=np.array([[1]])),
        lambda: replace(WELCOME, users=np.array([1, 1])),
        lambda: replace(WELCOME.task, seed=-1),
        lambda: replace(WELCOME.task, seed=2**63),
        lambda: replace(WELCOME.task, ignore_index=2**63),
        lambda: replace(WELCOME.task, targets=""),
        lambda: Receipt(False, "x" * 1025),
        lambda: Status("", 0, 1, 0.0, 1.0, 0.0, 1, 1, 1, RunState.WAITING),
        lambda: Status("r", -1, 1, 0.0, 1.0, 0.0, 1, 1, 1, RunState.WAITING),
        lambda: Status("r", 0, 1, float("nan"), 1.0, 0.0, 1, 1, 1, RunState.WAITING),
    ],
)
def test_values_are_legal_or_are_not_made(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidValueError):
        make()


def test_an_unknown_state_and_an_unset_message_are_refused() -> None:
    for decode, kind in (
        (wire.STATUS.decode, pb.Status(run="r", state="asleep")),
        (wire.HELLO.decode, pb.Hello()),
        (PRICE_CODEC.decode, pb.Price()),
        (wire.OFFER.decode, pb.Offer()),
        (wire.WELCOME.decode, pb.Welcome()),
    ):
        with pytest.raises(WireError):
            decode(kind)
