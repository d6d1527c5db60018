"""The transport over gRPC: what every transport must do, over TLS, and what a network adds."""

import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import pytest
import torch

from fedpriv import wire
from fedpriv.clients.training import Host
from fedpriv.clients.worker import HostSettings
from fedpriv.data.population import UserStore
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import StoppedError
from fedpriv.experiment.build import build_task
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.round import PartialSum, add_up
from fedpriv.server import service
from fedpriv.server.collection import End
from fedpriv.training.request import LocalTraining, RoundRequest, Transport
from fedpriv.wire import Decline, SummedUpdates, TaskDescription
from fedpriv.wire import federation_pb2 as pb
from tests.engine import words
from tests.engine.everyone import request_under
from tests.server.loopback import (
    LEDGER,
    MODEL,
    PATIENCE,
    Answering,
    Site,
    TestNode,
    clipped,
    nodes,
    sends,
    site,
    strike,
    summed,
    until,
)
from tests.training.transport_conformance import TransportConformance

PARAMETERS = {"w": np.ones((300, 1000), np.float32), "b": np.zeros(7, np.float32)}
LAYOUT = Layout.of(PARAMETERS)
# Users 0 to 3 are at a silo, 4 and 5 at nodes of their own, 6 at one that always fails.
USERS = {"silo": ["0", "1", "2", "3"], "four": ["4"], "five": ["5"], "six": ["6"]}


def request_to(users: list[int], norm: float = 1.0, attempt: int = 0) -> RoundRequest:
    clipping = Clipping(LAYOUT, flat(LAYOUT, norm))
    drawn = np.array(users, np.int64)
    local = LocalTraining(0.5, steps=1)
    return RoundRequest("run", 3, attempt, PARAMETERS, clipping, local, drawn, bytes(32))


def update_of(user: int, request: RoundRequest) -> dict[str, np.ndarray]:
    """An update that depends on the user and on the model that came."""
    rng = np.random.default_rng(user)
    counted = {m.tensor: np.ones(()) for m in request.metrics}
    return counted | {
        name: (rng.standard_normal(p.shape) * 10.0**-user + 0.0 * p).astype(np.float32)
        for name, p in request.parameters.items()
    }


def of_one(offer: wire.RoundOffer, request: RoundRequest) -> Iterator[pb.UploadPart]:
    (user,) = request.users.tolist()
    return clipped(offer, update_of(user, request))


def of_several(offer: wire.RoundOffer, request: RoundRequest) -> Iterator[pb.UploadPart]:
    return clipped(offer, *(update_of(user, request) for user in request.users.tolist()))


def fails(offer: wire.RoundOffer, request: RoundRequest) -> Iterator[pb.UploadPart]:
    del request
    return sends(offer, Decline("training failed"), {})


ANSWERS = {"silo": of_several, "four": of_one, "five": of_one, "six": fails}


def of_users(users: list[int]) -> np.ndarray:
    """The obvious sum of the contributions of users."""
    request = request_to(users)
    return sum(
        (request.clipping.contribution(update_of(user, request)) for user in users if user != 6),
        start=np.zeros(LAYOUT.dimension, np.int64),
    )


def collected(transport: Transport, request: RoundRequest) -> np.ndarray:
    partials = list(transport.collect(request))
    return sum((p.total for p in partials), start=np.zeros(LAYOUT.dimension, np.int64))


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("site"), USERS) as made, nodes(made, ANSWERS):
        yield made


class TestGrpcTransport(TransportConformance):
    @pytest.fixture(autouse=True)
    def _over_grpc(self, federation: Site) -> None:
        self.federation = federation

    def transport(self) -> Transport:
        return self.federation.transport()

    def request(self) -> RoundRequest:
        return request_to([0, 1, 2, 3, 4, 5, 6])

    def test_only_nodes_of_drawn_users_answer_for_them(self) -> None:
        for drawn in ([0, 5], [4], [1, 2], [0, 1, 2, 3, 4, 5, 6]):
            total = collected(self.transport(), request_to(drawn))
            np.testing.assert_array_equal(total, of_users(drawn))


COLUMNS, ROWS = words.columns_of(14), {"a": range(5), "b": range(5, 8), "c": range(8, 14)}


def worded(*ids: str) -> UserStore:
    """Users whose examples have two inputs."""
    rows = [row for name in ids for row in ROWS[name]]
    ends = np.cumsum([0, *(len(ROWS[name]) for name in ids)])
    return UserStore({name: column[rows] for name, column in COLUMNS.items()}, ends, list(ids))


def of_silo() -> UserStore:
    return worded("a", "b")


def of_one_user() -> UserStore:
    return worded("c")


def masked() -> torch.nn.Module:
    return words.Masked()


def test_a_model_with_several_inputs_is_trained_as_in_process(tmp_path: Path) -> None:
    """Nodes learn the inputs from their welcome, and read them from their own users."""
    here = "tests.server.test_grpc_transport"
    task = TaskDescription(f"{here}:masked", {}, 5, "cross-entropy", inputs=words.NAMES)
    users = {"silo": ["a", "b"], "one": ["c"]}
    sources = {"silo": f"{here}:of_silo", "one": f"{here}:of_one_user"}
    connected: dict[str, TestNode] = {}

    def trained(node: str) -> Answering:
        def answer(offer: wire.RoundOffer, request: RoundRequest) -> Iterator[pb.UploadPart]:
            trainer = Host.of(HostSettings(sources[node], "cpu", processes=1)).trainer(
                connected[node].welcome
            )
            return summed(offer, trainer.answer(request))

        return answer

    with site(tmp_path, users, task=task) as made:
        ids = np.concatenate([made.enrolment.users_of(node) for node in users])
        built = build_task(**vars(task))
        local = LocalTraining(0.5, batch_size=2, epochs=2, max_examples=9)
        request = replace(request_under(built, local, 10, 0.5), users=np.sort(ids))
        with nodes(made, {node: trained(node) for node in users}) as opened:
            connected |= opened
            partials = list(made.transport().collect(request))
    assert sum(partial.users for partial in partials) == 3
    engines = [
        InProcessTransport(
            built,
            worded(*names),
            torch.device("cpu"),
            2**27,
            hosted=made.enrolment.users_of(node),
            processes=1,
            limited=True,
        )
        for node, names in users.items()
    ]
    expected = [add_up(engine.collect(request), request.clipping, 3) for engine in engines]
    assert all(cohort.total.any() for cohort in expected)
    found = add_up(partials, request.clipping, 3)
    np.testing.assert_array_equal(found.total, sum(cohort.total for cohort in expected))
    assert found.users == sum(cohort.users for cohort in expected)
    assert found.weight == sum(cohort.weight for cohort in expected)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path, USERS) as made:
        yield made


def nothing(total: np.ndarray) -> bool:
    return not np.any(total)


def test_a_node_that_is_not_connected_counts_as_zero(alone: Site) -> None:
    with nodes(alone, {"four": of_one}):
        total = collected(alone.transport(), request_to([4, 5]))
    np.testing.assert_array_equal(total, of_users([4]))


def test_a_node_that_comes_during_the_round_is_asked(alone: Site) -> None:
    transport = alone.transport(PATIENCE.model_copy(update={"absent_seconds": 20.0}))
    late: list[TestNode] = []

    def comes(offer: wire.RoundOffer, request: RoundRequest) -> Iterator[pb.UploadPart]:
        late.append(TestNode(alone, "five", of_one))
        return of_one(offer, request)

    with nodes(alone, {"four": comes}):
        total = collected(transport, request_to([4, 5]))
    late[0].close()
    np.testing.assert_array_equal(total, of_users([4, 5]))


def test_a_node_that_hangs_is_waited_for_until_the_deadline(alone: Site) -> None:
    hang = threading.Event()

    def hangs(offer: wire.RoundOffer, request: RoundRequest) -> Iterator[pb.UploadPart]:
        hang.wait(60.0)
        return of_one(offer, request)

    with nodes(alone, {"four": hangs, "five": of_one}) as made:
        transport = alone.transport(PATIENCE.model_copy(update={"deadline_seconds": 1.0}))
        total = collected(transport, request_to([4, 5]))
        hang.set()
        until(lambda: made["four"].receipts)
        (receipt,) = made["four"].receipts
    np.testing.assert_array_equal(total, of_users([5]))
    assert not receipt.accepted
    assert receipt.reason == "no round is collected"


def test_an_answer_counts_once_however_often_it_is_sent(alone: Site) -> None:
    with nodes(alone, {"four": of_one, "silo": of_several}) as made:
        stub, kept = made["four"].stub, []

        def twice(offer: wire.RoundOffer, request: RoundRequest) -> Iterator[pb.UploadPart]:
            parts = list(of_one(offer, request))
            kept.extend(parts)
            kept.append(wire.RECEIPT.decode(stub.Upload(iter(parts))))
            return iter(parts)

        made["four"].answering = twice

        def waits(offer: wire.RoundOffer, request: RoundRequest) -> Iterator[pb.UploadPart]:
            until(lambda: made["four"].receipts)
            return of_several(offer, request)

        made["silo"].answering = waits
        total = collected(alone.transport(), request_to([0, 4]))
        assert kept.pop().accepted
        (again,) = made["four"].receipts
        assert again.accepted  # as if its connection had broken before the first receipt
        np.testing.assert_array_equal(total, of_users([0, 4]))

        def replays(offer: wire.RoundOffer, request: RoundRequest) -> Iterator[pb.UploadPart]:
            del offer, request
            return iter(kept)

        made["four"].answering = replays
        transport = alone.transport(PATIENCE.model_copy(update={"deadline_seconds": 1.0}))
        # An attempt that was abandoned without a charge is followed by one of the same number.
        for attempt in (1, 0):
            assert nothing(collected(transport, request_to([4], attempt=attempt)))
            until(lambda attempt=attempt: len(made["four"].receipts) == 3 - attempt)
            assert made["four"].receipts[-1].reason.startswith("the answer is to another round")


STEPS = np.full(LAYOUT.dimension, -7)


def malformed() -> dict[str, object]:
    """Answers of a node of one user that must count as zero and are told so."""

    def with_tensors(tensors: dict[str, np.ndarray]) -> object:
        header = SummedUpdates(1, 1)
        return lambda offer, _: sends(offer, header, tensors)

    def parts(offer: wire.RoundOffer) -> list[pb.UploadPart]:
        return list(summed(offer, PartialSum("", 1, STEPS, 1)))

    def damaged(offer: wire.RoundOffer, _: RoundRequest) -> list[pb.UploadPart]:
        made = parts(offer)
        data = bytearray(made[1].chunk.data)
        data[7] ^= 1
        made[1].chunk.data = bytes(data)
        return made

    def with_weight(weight: int) -> object:
        def answer(offer: wire.RoundOffer, _: RoundRequest) -> list[pb.UploadPart]:
            made = parts(offer)
            made[0].answer.sum.weight = weight
            return made

        return answer

    return {
        "name": with_tensors({"total": STEPS}),
        "the tensors of an update": with_tensors(PARAMETERS),
        "a tensor more": with_tensors({"sum": STEPS, "b": STEPS}),
        "shape": with_tensors({"sum": STEPS[np.newaxis]}),
        "longer": with_tensors({"sum": np.append(STEPS, 0)}),
        "shorter": with_tensors({"sum": STEPS[1:]}),
        "dtype": with_tensors({"sum": STEPS.astype(np.float32)}),
        "truncated": lambda offer, _: parts(offer)[:-1],
        "without a header": lambda offer, _: parts(offer)[1:],
        "nothing": lambda _offer, _: iter(()),
        "out of order": lambda offer, _: [parts(offer)[0], *reversed(parts(offer)[1:])],
        "too much": lambda offer, _: [*parts(offer), parts(offer)[-1]],
        "damaged": damaged,
        "more weight than any cap": with_weight(2**31 + 1),
        "more users than were drawn": lambda o, _: summed(o, PartialSum("", 2, STEPS, 2)),
    }


@pytest.mark.parametrize("case", malformed())
def test_a_malformed_answer_counts_as_zero_and_harms_nobody(federation: Site, case: str) -> None:
    answer = malformed()[case]
    with nodes(federation, {"four": answer}) as made:
        transport = federation.transport(PATIENCE.model_copy(update={"deadline_seconds": 3.0}))
        total = collected(transport, request_to([4, 5]))
        until(lambda: made["four"].receipts)
    np.testing.assert_array_equal(total, of_users([5]))
    assert not made["four"].receipts[0].accepted
    restore(federation)


BOUND = request_to([]).clipping.groups[0].squared_bound


def of_length(squares: int) -> np.ndarray:
    """[D] integers whose squares add up to so much."""
    total, place = np.zeros(LAYOUT.dimension, np.int64), 0
    while squares:
        total[place] = math.isqrt(squares)
        squares -= int(total[place]) ** 2
        place += 1
    return total


@pytest.mark.parametrize(
    ("partial", "counts"),
    [
        (PartialSum("", 1, of_length(BOUND), 1), True),
        (PartialSum("", 1, of_length(BOUND + 1), 1), False),
        (PartialSum("", 1, of_length(BOUND), 0), True),  # no group is weighted
        (PartialSum("", 1, of_length(BOUND), 2), False),
        (PartialSum("", 0, of_length(0), 0), True),
        (PartialSum("", 0, of_length(1), 0), False),
        (PartialSum("", 1, of_length(2**62), 1), False),
    ],
    ids=["B", "B + 1", "no weight", "more weight than c", "nobody", "of nobody", "2^31"],
)
def test_a_sum_of_one_user_counts_if_one_user_can_have_it(
    federation: Site, partial: PartialSum, *, counts: bool
) -> None:
    request = request_to([4, 5])
    with nodes(federation, {"four": lambda offer, _: summed(offer, partial)}) as made:
        cohort = add_up(federation.transport().collect(request), request.clipping, 2)
        until(lambda: made["four"].receipts)
        assert made["four"].receipts[0].accepted == counts
    restore(federation)
    np.testing.assert_array_equal(cohort.total, of_users([5]) + counts * partial.total)
    assert cohort.weight == 1 + counts * partial.weight


@pytest.mark.parametrize("value", [-(2**31), 2**31 - 1])
def test_hostile_numbers_count_as_zero(federation: Site, value: int) -> None:
    request = request_to([4, 5])
    total = {"sum": np.full(LAYOUT.dimension, value, np.int32)}
    header = SummedUpdates(1, 1)
    with nodes(federation, {"four": lambda offer, _: sends(offer, header, total)}):
        cohort = add_up(federation.transport().collect(request), request.clipping, 2)
    restore(federation)
    np.testing.assert_array_equal(cohort.total, of_users([5]))
    assert cohort.weight == 1


def restore(federation: Site) -> None:
    """Connect the usual nodes again in place of those that took their place."""
    for name in ("four",):
        NODES.append(TestNode(federation, name, ANSWERS[name]))
        assert NODES[-1].welcomed.wait(20.0)


NODES: list[TestNode] = []


@pytest.fixture(scope="module", autouse=True)
def _close_nodes() -> Iterator[None]:
    yield
    while NODES:
        NODES.pop().close()


def test_a_newer_connection_ends_the_older(alone: Site) -> None:
    with nodes(alone, {"four": of_one}) as older, nodes(alone, {"four": of_one}):
        while not older["four"].ended:
            time.sleep(0.01)
        assert older["four"].ended == [grpc.StatusCode.ABORTED]
        total = collected(alone.transport(), request_to([4]))
    np.testing.assert_array_equal(total, of_users([4]))


def test_a_node_struck_off_is_offered_nothing_and_counts_for_nothing(
    alone: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_RECHECK_SECONDS", 0.2)

    def struck_off_meanwhile(
        offer: wire.RoundOffer, request: RoundRequest
    ) -> Iterator[pb.UploadPart]:
        yield from of_one(offer, request)
        strike(alone.certs, "four")

    with nodes(alone, {"four": struck_off_meanwhile, "five": of_one}) as made:
        total = collected(alone.transport(), request_to([4, 5]))
        np.testing.assert_array_equal(total, of_users([5]))
        assert made["four"].receipts == []
        total = collected(alone.transport(), request_to([4, 5], attempt=1))
        np.testing.assert_array_equal(total, of_users([5]))
        assert made["four"].ended == [grpc.StatusCode.UNAUTHENTICATED]


def test_a_round_of_fixed_length_lasts_until_its_deadline(alone: Site) -> None:
    patience = PATIENCE.model_copy(update={"deadline_seconds": 1.5, "fixed_length": True})
    with nodes(alone, {"four": of_one}):
        for drawn in ([4], [5], []):
            began = time.monotonic()
            collected(alone.transport(patience), request_to(drawn))
            assert time.monotonic() - began >= 1.5


def test_a_round_waits_for_enough_nodes_whoever_is_drawn(alone: Site) -> None:
    transport = alone.transport(PATIENCE.model_copy(update={"least_nodes": 2}))
    totals: list[np.ndarray] = []

    def carry_out() -> None:
        transport.prepare(request_to([]))
        totals.append(collected(transport, request_to([4])))

    thread = threading.Thread(target=carry_out)
    with nodes(alone, {"four": of_one}):
        thread.start()
        time.sleep(0.3)
        assert totals == []
        with nodes(alone, {"silo": of_several}):
            thread.join()
    np.testing.assert_array_equal(totals[0], of_users([4]))


@pytest.mark.parametrize("least", [0, 5], ids=["while it is collected", "while nodes are awaited"])
def test_a_round_that_is_stopped_is_abandoned(alone: Site, least: int) -> None:
    transport = alone.transport(
        PATIENCE.model_copy(
            update={"absent_seconds": 60.0, "deadline_seconds": 60.0, "least_nodes": least}
        )
    )
    timer = threading.Timer(0.5, transport.stop)
    timer.start()

    def carry_out() -> None:
        transport.prepare(request_to([]))
        collected(transport, request_to([4]))

    for _ in range(2):
        with pytest.raises(StoppedError, match="asked to stop"):
            carry_out()


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (End.RUN_OVER, grpc.StatusCode.OK),
        (End.SHUTTING_DOWN, grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_when_it_is_over_connections_end(alone: Site, end: End, code: grpc.StatusCode) -> None:
    connections = alone.server.service.connections
    with nodes(alone, {"four": of_one}) as made:
        alone.server.call(lambda: connections.end_all(end))
        until(lambda: made["four"].ended)
        assert made["four"].ended == [code]
    with nodes(alone, {"four": of_one}) as made:
        until(lambda: made["four"].ended)
        assert made["four"].ended == [code]


def test_the_model_is_for_every_node_once_there_is_one(federation: Site) -> None:
    service = federation.server.service
    with nodes(federation, {"five": of_one}) as made:
        fetch = made["five"].stub.FetchModel
        parts = list(fetch(pb.ModelRequest()))
        assembler = wire.Assembler(parts[0].size, len(MODEL))
        for part in parts[1:]:
            assembler.add(part.chunk)
        assert assembler.finish().tobytes() == MODEL
        service.model = lambda: None
        try:
            with pytest.raises(grpc.RpcError) as caught:
                list(fetch(pb.ModelRequest()))
        finally:
            service.model = lambda: MODEL
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert caught.value.details() == "no round was released yet"
    restore(federation)


def test_the_ledger_and_the_status_are_for_every_node(federation: Site) -> None:
    with nodes(federation, {"five": of_one}) as made:
        parts = list(made["five"].stub.FetchLedger(pb.LedgerRequest()))
        assembler = wire.Assembler(parts[0].size, len(LEDGER))
        for part in parts[1:]:
            assembler.add(part.chunk)
        assert assembler.finish().tobytes() == LEDGER
        status = wire.STATUS.decode(made["five"].stub.GetStatus(pb.StatusRequest()))
        assert (status.nodes_enrolled, status.users_enrolled) == (4, 7)
        assert status.nodes_connected == len(federation.server.service.connections)
    restore(federation)
