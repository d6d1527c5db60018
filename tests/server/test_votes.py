"""Nodes vote on a round before its cohort is drawn; without enough of them nothing is charged."""

import logging
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import grpc
import numpy as np
import pytest

from fedpriv import wire
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.errors import DeclinedError, StoppedError
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import flat
from fedpriv.privacy.noise import OperatingSystemEntropy
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.server import deployment
from fedpriv.server import service as service_module
from fedpriv.server.collection import Ballot
from fedpriv.server.deployment import GrpcTransport
from fedpriv.training.request import LocalTraining, RoundRequest
from fedpriv.training.rounds import RoundResult, ServerState, Stop, initial_state, train
from fedpriv.wire import Decline, Vote
from fedpriv.wire import federation_pb2 as pb
from tests.server.loopback import (
    PATIENCE,
    POPULATION_ID,
    PRICE,
    Site,
    clipped,
    nodes,
    sends,
    site,
    until,
)
from tests.training.federation import LAYOUT, PARAMETERS, make_plan, open_records

USERS = {"a": ["0", "1"], "b": ["2"], "c": ["3"]}


@pytest.fixture
def there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Site]:
    monkeypatch.setattr(deployment, "_FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(service_module, "_RECHECK_SECONDS", 0.2)
    caplog.set_level(logging.INFO)
    with site(tmp_path, USERS) as made:
        yield made


def agrees(offer: wire.RoundOffer, request: RoundRequest) -> Iterator[pb.UploadPart]:
    ones = {name: np.ones_like(p) for name, p in request.parameters.items()}
    return clipped(offer, *[ones] * request.users.size)


def declines(offer: wire.RoundOffer, request: RoundRequest) -> Iterator[pb.UploadPart]:
    del request
    return sends(offer, Decline("it was declined"), {})


def waiting(there: Site, least: int, seconds: float) -> GrpcTransport:
    update = {"least_nodes": least, "patience_seconds": seconds}
    return there.transport(PATIENCE.model_copy(update=update))


def terms(number: int = 0) -> RoundRequest:
    clipping, nobody = Clipping(LAYOUT, flat(LAYOUT, 1.0)), np.empty(0, np.int64)
    local = LocalTraining(0.5, steps=1)
    return RoundRequest("run", number, 0, PARAMETERS, clipping, local, nobody, bytes(32))


class Trained:
    """Some rounds with every user drawn, and what is left of them."""

    def __init__(self, folder: Path, transport: GrpcTransport, rounds: int) -> None:
        sampling = PoissonSampling(4, 1.0)
        plan = make_plan(rounds=rounds, population=POPULATION_ID, sampling=sampling)
        self.results: list[RoundResult] = []
        self.state: ServerState = initial_state(plan, PARAMETERS)
        with open_records(folder, population=POPULATION_ID) as records:
            running = train(plan, self.state, transport, records, OperatingSystemEntropy())
            while True:
                try:
                    self.state, result = next(running)
                except StopIteration as end:
                    self.stop: Stop = end.value
                    break
                self.results.append(result)
            self.charges = records.ledger.head.count
            self.next_attempt = records.next_attempt(plan.run, self.state.round + 1)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_where_all_nodes_decline_nobody_is_drawn_and_nothing_charged(
    there: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with nodes(there, dict.fromkeys("abc", declines)) as made:
        for name, node in made.items():
            node.objections = repeat(f"{name} does not want to")
        done = Trained(tmp_path, waiting(there, 1, 1.0), rounds=50)
    assert (done.stop, done.charges, done.next_attempt) == (Stop.DECLINED, 0, 0)
    # Each is asked several times, and named once.
    for name in "abc":
        assert warnings(caplog).count(
            f"{name}: does not agree: {name} does not want to"
        ) == 1  # fmt: skip
    assert any("0 of the 1 required nodes agree to round 1" in line for line in warnings(caplog))


def test_a_node_that_comes_to_agree_lets_the_run_go_on(there: Site, tmp_path: Path) -> None:
    with nodes(there, dict.fromkeys("abc", agrees)) as made:
        made["a"].objections = made["b"].objections = iter(["not yet"] * 3)
        done = Trained(tmp_path, waiting(there, 2, 60.0), rounds=3)
    assert (done.stop, done.charges) == (Stop.ROUNDS, 3)


def test_rounds_that_follow_each_other_fast_leave_nodes_their_calls(tmp_path: Path) -> None:
    with (
        site(tmp_path, USERS, calls_per_minute=9) as quick,
        nodes(quick, dict.fromkeys("abc", agrees)) as made,
    ):
        done = Trained(tmp_path, waiting(quick, 3, 60.0), rounds=6)
        until(lambda: all(len(node.receipts) == 6 for node in made.values()))
    assert (done.stop, done.charges) == (Stop.ROUNDS, 6)


def test_one_that_does_not_agree_holds_nobody_up_and_is_asked_if_it_is_drawn(
    there: Site, tmp_path: Path
) -> None:
    offered: queue.SimpleQueue[int] = queue.SimpleQueue()

    def declines_and_counts(
        offer: wire.RoundOffer, request: RoundRequest
    ) -> Iterator[pb.UploadPart]:
        offered.put(offer.id.round)
        return declines(offer, request)

    with nodes(there, {"a": agrees, "b": declines_and_counts}) as made:
        made["b"].objections = repeat("never")
        done = Trained(tmp_path, waiting(there, 1, 1.0), rounds=2)
    assert (done.stop, done.charges) == (Stop.ROUNDS, 2)
    assert [offered.get() for _ in range(2)] == [1, 2]


def test_who_agrees_and_then_declines_is_charged_and_the_operator_told(
    there: Site, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with nodes(there, dict.fromkeys("abc", declines)):
        done = Trained(tmp_path, waiting(there, 3, 60.0), rounds=2)
    assert (done.stop, done.charges) == (Stop.ROUNDS, 2)
    # Where votes take long they are asked again, which the operator is told as well.
    assert [line for line in warnings(caplog) if line.startswith("no drawn user")] == [
        f"no drawn user contributed to round {number}; it is charged" for number in (1, 2)
    ]


def test_who_has_left_does_not_count_and_who_comes_is_asked(there: Site) -> None:
    transport, ready = waiting(there, 2, 60.0), threading.Event()

    def prepare() -> None:
        transport.prepare(terms())
        ready.set()

    thread = threading.Thread(target=prepare)
    with nodes(there, {"a": agrees, "b": agrees}) as made:
        made["b"].objections = repeat("never")
        thread.start()
        until(lambda: there.server.service.votes(agrees=True) == 1)
        made["a"].close()
        until(lambda: len(there.server.service.connections) == 1)
        assert there.server.service.votes(agrees=True) == 0
        with nodes(there, {"c": agrees}):
            until(lambda: there.server.service.votes(agrees=True) == 1)
            assert not ready.is_set()
            with nodes(there, {"a": agrees}):
                thread.join(30.0)
                assert ready.is_set()


def test_no_patience_is_lost_while_too_few_are_connected(there: Site) -> None:
    transport, ready = waiting(there, 1, 0.05), threading.Event()
    thread = threading.Thread(target=lambda: (transport.prepare(terms()), ready.set()))
    thread.start()
    time.sleep(0.3)
    assert thread.is_alive()
    with nodes(there, {"a": agrees}):
        thread.join(30.0)
    assert ready.is_set()


def test_who_does_not_vote_is_not_waited_for(there: Site) -> None:
    silent = threading.Event()

    def nothing() -> Iterator[str]:
        silent.wait(30.0)
        yield ""

    with nodes(there, {"a": agrees, "b": agrees}) as made:
        made["b"].objections = nothing()
        waiting(there, 1, 60.0).prepare(terms())
        with pytest.raises(DeclinedError, match="1 of the 2 required nodes agree to round 1"):
            waiting(there, 2, 0.5).prepare(terms(1))
        silent.set()


def test_a_stop_in_a_pause_is_heard(
    there: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "_FIRST_PAUSE_SECONDS", 3600.0)
    transport = waiting(there, 1, 7200.0)
    with nodes(there, {"a": agrees}) as made:
        made["a"].objections = repeat("never")
        timer = threading.Timer(0.5, transport.stop)
        timer.start()
        done = Trained(tmp_path, transport, rounds=2)
        assert (done.stop, done.charges, done.next_attempt) == (Stop.ASKED, 0, 0)
        with pytest.raises(StoppedError):
            transport.prepare(terms())


def test_agreement_to_other_terms_does_not_count(there: Site) -> None:
    service = there.server.service
    dearer = replace(PRICE, event=poisson_gaussian(0.5, 0.1, population=1000))
    cheap, dear = (
        (lambda: Ballot(wire.Proposal.of(terms(), PRICE))),
        Ballot(wire.Proposal.of(terms(), dearer)),
    )
    with nodes(there, {"a": agrees}) as made:
        there.server.call(lambda: service.propose(cheap()))
        until(lambda: service.votes(agrees=True) == 1)
        made["a"].objections = repeat("too dear")
        there.server.call(lambda: service.propose(cheap()))  # who agrees is not asked again
        assert service.votes(agrees=True) == 1
        there.server.call(lambda: service.propose(dear))
        until(lambda: service._objections.get("a") == "too dear")
        assert service.votes(agrees=True) == 0


@pytest.mark.parametrize("stray", ["unasked", "malformed", "a second hello"])
def test_who_says_what_was_not_asked_is_cut_off_and_moves_nothing(there: Site, stray: str) -> None:
    with nodes(there, {"a": agrees, "b": agrees}) as made, there.channel("c") as channel:
        digest = wire.digest_of(USERS["c"])
        hello = pb.FromNode(hello=wire.HELLO.encode(wire.Hello("c", digest))).SerializeToString()
        vote = pb.FromNode(vote=wire.VOTE.encode(Vote(wire.RoundId("run", 0, 0))))
        says = {"unasked": vote.SerializeToString(), "malformed": b"\xff", "a second hello": hello}
        said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for one in [hello, *[says[stray]] * 3]:
            said.put(one)
        call = channel.stream_stream("/fedpriv.v1.Federation/Connect")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter(said.get, None), timeout=30.0))
        said.put(None)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        waiting(there, 2, 60.0).prepare(terms())
        assert not made["a"].ended
