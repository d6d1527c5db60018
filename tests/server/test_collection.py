"""One attempt while its answers come in: whose answer counts, once, and how long is waited."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from time import monotonic

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv import wire
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.round import PartialSum
from fedpriv.server.collection import Ballot, Collection, Connections
from fedpriv.server.enrolment import Enrolment
from fedpriv.training.request import LocalTraining, RoundRequest
from fedpriv.wire import Decline, RoundAnswer, SummedUpdates
from fedpriv.wire import federation_pb2 as pb
from tests.wire.stub import received

PARAMETERS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3)}
LAYOUT = Layout.of(PARAMETERS)
HOSTED = {"silo": ["0", "1", "2", "3"], "four": ["4"], "five": ["5"]}
ENROLMENT = Enrolment("5f" * 16, HOSTED)
PRICE = wire.Price(poisson_gaussian(0.5, 1.0, population=6), 0, 2.0, 1e-6, 0)
TOTAL = np.zeros(6, np.int64)


def request_to(users: list[int]) -> RoundRequest:
    clipping, drawn = Clipping(LAYOUT, flat(LAYOUT, 1.0)), np.array(users, np.int64)
    return RoundRequest(
        "run", 3, 1, PARAMETERS, clipping, LocalTraining(0.5, steps=1), drawn, bytes(32)
    )


def collecting(users: list[int], seconds: float = 60.0) -> Collection:
    request = request_to(users)
    ballot = Ballot(wire.Proposal.of(request, PRICE))
    return Collection(request, ballot, (), ENROLMENT, seconds)


def summed(users: int) -> SummedUpdates:
    return SummedUpdates(users, users)


def of(node: str, users: int = 1) -> PartialSum:
    return PartialSum(node, users, TOTAL, users)


def played(scene: Callable[[], Coroutine[object, object, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60.0):
            await scene()

    asyncio.run(limited())


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_each_node_of_a_drawn_user_is_asked_for_its_drawn_users_alone() -> None:
    async def scene() -> None:
        it = collecting([1, 3, 4])
        assert sorted(it.waiting) == ["four", "silo"]
        asked = {node: it.offer_to(node) for node in ("silo", "four", "five", "nobody")}
        assert asked["five"] is asked["nobody"] is None
        assert asked["silo"].users.tolist() == [1, 3]
        assert asked["four"].users.tolist() == [4]
        assert asked["four"].id == it.offer.id == replace(RUN, nonce=it.offer.id.nonce)
        assert 0.0 < asked["four"].seconds <= 60.0

    played(scene)


def test_the_model_is_the_one_that_was_offered_however_often_it_is_read() -> None:
    async def scene() -> None:
        it = collecting([4])
        for _ in range(2):
            layout = it.offer_to("four").model(Layout((), ()))
            model = received(layout, map(pb.Chunk.FromString, it.model_chunks))
            np.testing.assert_array_equal(model["w"], PARAMETERS["w"])

    played(scene)


def test_after_the_deadline_or_the_end_nobody_is_asked() -> None:
    async def scene() -> None:
        assert collecting([4], seconds=1e-9).offer_to("four") is None
        over = collecting([4])
        over.finish()
        assert over.offer_to("four") is None

    played(scene)


RUN = wire.RoundId("run", 3, 1)


def to(it: Collection, answer: RoundAnswer) -> RoundAnswer:
    """The answer with the nonce of the attempt."""
    return replace(answer, id=replace(answer.id, nonce=it.offer.id.nonce))


def test_attempts_of_one_number_are_told_apart() -> None:
    async def scene() -> None:
        first, second = collecting([4]), collecting([4])
        assert second.refusal("four", to(second, RoundAnswer(RUN, summed(1)))) is None
        assert "another round or attempt" in str(
            second.refusal("four", RoundAnswer(first.offer.id, summed(1)))
        )

    played(scene)


@pytest.mark.parametrize(
    ("node", "answer", "reason"),
    [
        ("four", RoundAnswer(RUN, summed(1)), None),
        ("four", RoundAnswer(RUN, summed(0)), None),
        ("four", RoundAnswer(RUN, summed(2)), "more users than were drawn"),
        ("four", RoundAnswer(RUN, Decline("no")), None),
        ("silo", RoundAnswer(RUN, Decline("no")), None),
        ("silo", RoundAnswer(RUN, summed(0)), None),
        ("silo", RoundAnswer(RUN, summed(2)), None),
        ("silo", RoundAnswer(RUN, summed(3)), "more users than were drawn"),
        (
            "five",
            RoundAnswer(RUN, summed(1)),
            "the server is not waiting for an answer of this node",
        ),
        (
            "nobody",
            RoundAnswer(RUN, summed(1)),
            "the server is not waiting for an answer of this node",
        ),
        ("four", RoundAnswer(replace(RUN, attempt=0), summed(1)), "another round or attempt"),
        ("four", RoundAnswer(replace(RUN, attempt=2), Decline("no")), "another round or attempt"),
        ("four", RoundAnswer(replace(RUN, round=2), summed(1)), "another round or attempt"),
        ("four", RoundAnswer(replace(RUN, run="walk"), summed(1)), "another round or attempt"),
    ],
)
def test_what_cannot_count_is_refused_in_one_sentence(
    node: str, answer: RoundAnswer, reason: str | None
) -> None:
    async def scene() -> None:
        it = collecting([0, 2, 4])
        found = it.refusal(node, to(it, answer))
        assert found is None if reason is None else reason in str(found)

    played(scene)


def taken(it: Collection) -> list[PartialSum]:
    """What there is to take, each taken at once, as the training loop does it."""
    found = []
    while not it.results.empty():
        partial = it.results.get()
        if partial is not None:
            found.append(partial)
            it.taken()
    return found


def test_an_answer_counts_once_in_whatever_order() -> None:
    async def scene() -> None:
        it = collecting([0, 4, 5])
        assert it.settle("four", of("four"))
        assert not it.settle("four", of("four"))
        assert not it.settle("four", None)
        assert (
            it.refusal("four", to(it, RoundAnswer(RUN, summed(1))))
            == "the server is not waiting for an answer of this node"
        )
        assert it.settle("five", None)
        assert not it.settle("five", of("five"))
        assert not it.settle("nobody", of("nobody"))
        assert it.waiting == ("silo",)
        assert it.changed.is_set()
        assert [partial.node for partial in taken(it)] == ["four"]

    played(scene)


def test_nothing_counts_after_the_end() -> None:
    async def scene() -> None:
        it = collecting([0, 4, 5])
        assert it.settle("four", of("four"))
        it.finish()
        it.finish()
        assert not it.settle("five", of("five"))
        assert it.refusal("silo", to(it, RoundAnswer(RUN, summed(1)))) is not None
        assert it.results.get().node == "four"
        it.taken()
        await it.until_taken()
        assert it.results.get() is None
        assert it.results.empty()

    played(scene)


def test_only_a_sum_that_counts_counts_already_when_it_is_sent_again() -> None:
    async def scene() -> None:
        it = collecting([0, 4, 5])
        again = to(it, RoundAnswer(RUN, summed(1)))
        assert not it.counts_already("four", again)
        it.settle("four", of("four"))
        it.settle("five", None)
        it.finish()
        assert it.counts_already("four", again)
        assert not it.counts_already("five", again)
        assert not it.counts_already("four", RoundAnswer(replace(RUN, attempt=9), summed(1)))
        assert not it.counts_already("nobody", again)

    played(scene)


def counted(it: Collection) -> list[asyncio.Task[None]]:
    """Calls of three nodes whose sums count, and who wait until they are taken."""
    assert all(it.settle(node, of(node)) for node in ("silo", "four", "five"))
    return [asyncio.create_task(it.until_taken()) for _ in range(3)]


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_call_waits_until_a_sum_was_taken_by_another_thread_even_if_it_is_cancelled(
    cancelled: bool,
) -> None:
    async def scene() -> None:
        it = collecting([0, 4, 5])
        tasks = counted(it)
        await settled()
        for task in tasks:
            if cancelled:
                task.cancel()
        for done in range(1, 4):
            await settled()
            assert sum(task.done() for task in tasks) == done - 1
            thread = threading.Thread(target=lambda: (it.results.get(), it.taken()))
            thread.start()
            await asyncio.to_thread(thread.join)
        await settled()
        assert [task.cancelled() for task in tasks] == [cancelled] * 3

    played(scene)


def test_to_abandon_lets_go_of_all_that_wait() -> None:
    async def scene() -> None:
        it = collecting([0, 4, 5])
        tasks = counted(it)
        await settled()
        it.abandon()
        await asyncio.gather(*tasks)
        assert it.results.empty()
        it.abandon()
        assert not it.settle("four", of("four"))

    played(scene)


class Clocked:
    """Connections in which nodes came and went when a test says so."""

    def __init__(self) -> None:
        self.now = monotonic()
        self.connections = Connections(lambda: None, lambda: self.now)

    def away(self, node: str, seconds: float) -> None:
        """A node that went so long ago."""
        connection = self.connections.connect(node)
        self.now = monotonic() - seconds
        self.connections.disconnect(node, connection)


def test_how_long_is_waited() -> None:
    async def scene() -> None:
        it, nodes = collecting([0, 4], seconds=100.0), Clocked()

        def left(*, absent: float = 10.0, fixed: bool = False) -> float:
            return it.seconds_left(nodes.connections, absent, fixed=fixed)

        # Somebody is there who has not answered: until the deadline.
        nodes.connections.connect("silo")
        assert 95.0 < left() <= 100.0
        # Only nodes are missing that are gone: as long as the last of them is waited for.
        nodes.away("silo", 4.0)
        nodes.away("four", 7.0)
        assert 5.0 < left() <= 6.0
        assert left(absent=4.0) == left(absent=0.0) == 0.0
        assert 95.0 < left(absent=1000.0) <= 100.0
        # One came back.
        nodes.connections.connect("four")
        assert 95.0 < left() <= 100.0
        # A round of fixed length takes until its deadline.
        nodes.away("four", 50.0)
        nodes.away("silo", 50.0)
        assert left() == 0.0
        assert 95.0 < left(fixed=True) <= 100.0
        # All have answered.
        it.settle("four", None)
        it.settle("silo", None)
        assert left(absent=1000.0) == 0.0
        assert 95.0 < left(fixed=True) <= 100.0

    played(scene)


def test_nobody_is_waited_for_in_an_empty_round_or_after_the_deadline() -> None:
    async def scene() -> None:
        nodes = Clocked()
        assert collecting([]).seconds_left(nodes.connections, 10.0, fixed=False) == 0.0
        assert collecting([]).seconds_left(nodes.connections, 10.0, fixed=True) > 55.0
        nodes.connections.connect("four")
        for fixed in (False, True):
            assert collecting([4], 1e-9).seconds_left(nodes.connections, 10.0, fixed=fixed) == 0.0

    played(scene)


@given(st.data())
def test_drawn_users_are_at_their_nodes(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    order = data.draw(st.permutations(range(sum(sizes))))
    ids, users = iter(order), {}
    for number, size in enumerate(sizes):
        users[f"node {number}"] = [f"{next(ids):03}" for _ in range(size)]
    enrolment = Enrolment("5f" * 16, users)
    drawn = sorted(data.draw(st.sets(st.integers(0, sum(sizes) - 1))))
    obvious: dict[str, list[int]] = {}
    for position in drawn:
        (node,) = [n for n in users if enrolment.user_ids[position] in users[n]]
        obvious.setdefault(node, []).append(position)
    found = enrolment.drawn(np.array(drawn, np.int64))
    assert {node: part.tolist() for node, part in found.items()} == obvious
