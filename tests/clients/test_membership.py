"""What a node does at a server, whatever the server does; who trains is played by the test."""

import asyncio
import logging
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message

from fedpriv.accounting.accountants import PrivacyLoss
from fedpriv.accounting.accountants import epsilon as priced
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.clients import ledger_check, membership, worker
from fedpriv.clients.connection import Backoff, FederationStub
from fedpriv.clients.consent import task_hash
from fedpriv.clients.membership import NodeSettings, take_part
from fedpriv.clients.worker import Built, HostSettings, Loaded
from fedpriv.errors import ModelError, UntrustedLedgerError, WireError
from fedpriv.ledger.events import (
    NeighbouringRelation,
    Randomness,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
)
from fedpriv.ledger.ledger import Ledger, ProposedCharge
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.round import PartialSum
from fedpriv.training.request import LocalTraining, RoundRequest
from fedpriv.wire import (
    ROUND_ID,
    WELCOME,
    Hello,
    Proposal,
    Receipt,
    RoundId,
    TaskDescription,
    Vote,
    Welcome,
    naming,
)
from fedpriv.wire import federation_pb2 as pb
from simulations.loopback import issue
from tests.clients.tiny_server import (
    NODE,
    PARAMETERS,
    PATIENCE,
    PRICE,
    TASK,
    Said,
    TinyServer,
    ledger_parts,
    make_certificates,
    make_offer,
    said,
    serving,
)
from tests.wire.examples import peak_memory

QUICK = Backoff(0.01, 0.05)
SECRET = "the data of a user"
SUM = PartialSum("", 1, np.arange(15), 1)


@dataclass
class Player:
    """Stands in for a node's worker."""

    # What training gives, or the error that it raises
    answer: PartialSum | Exception | None = field(default_factory=lambda: SUM)
    loaded: Loaded = Loaded(1, bytes(32), bytes(8))  # noqa: RUF009 - it is frozen
    built: Built = Built(Layout.of(PARAMETERS), Layout((), ()))  # noqa: RUF009 - it is frozen
    go: asyncio.Event = field(default_factory=asyncio.Event)  # training waits for it
    prepared: list[Welcome] = field(default_factory=list)
    learnt: list[Proposal] = field(default_factory=list)
    # Requests to train, as they come
    asked: asyncio.Queue[RoundRequest] = field(default_factory=asyncio.Queue)
    seconds: list[float] = field(default_factory=list)  # how long each may take
    abandoned: list[int] = field(default_factory=list)  # rounds whose training was cancelled
    closed: bool = False

    def __post_init__(self) -> None:
        self.go.set()

    async def start(self, _: HostSettings) -> "Player":
        return self

    async def prepare(self, welcome: Welcome) -> None:
        self.prepared.append(welcome)
        if isinstance(self.answer, ModelError):
            raise self.answer

    async def learn(self, proposal: Proposal) -> None:
        self.learnt.append(proposal)
        if isinstance(self.answer, ModelError | MemoryError):
            raise self.answer

    async def train(self, request: RoundRequest, seconds: float) -> PartialSum | None:
        self.seconds.append(seconds)
        await self.asked.put(request)
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.abandoned.append(request.round)
            raise
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def close(self) -> None:
        self.closed = True


@dataclass(frozen=True)
class Scene:
    """A server, a node's worker, and where the node keeps its things."""

    tiny: TinyServer
    player: Player
    folder: Path

    @asynccontextmanager
    async def joined(self, port: int, **changes: object) -> AsyncIterator[asyncio.Task[None]]:
        """A node that takes part until the block is left."""
        host, server = HostSettings("played"), f"127.0.0.1:{port}"
        node = NodeSettings(server, host, node="n", state=self.folder, once=True, backoff=QUICK)
        task = asyncio.create_task(take_part(replace(node, **changes)))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait([task])
            # A connection not yet seen to be over would take what the script says to the next.
            await happens(lambda: self.tiny.connected == 0)

    def consent(self, text: str) -> Path:
        path = self.folder / "consent.toml"
        path.write_text(text, encoding="utf-8")
        return path

    def recorded(self) -> list[tuple[int, int]]:
        """Rounds and attempts in the journal."""
        with sqlite3.connect(self.folder / "journal.sqlite") as journal:
            found = journal.execute("SELECT round, attempt FROM answers").fetchall()
        journal.close()
        return found


async def happens(condition: Callable[[], bool]) -> None:
    """Wait until it does; the scene has a limit of time."""
    while not condition():
        await asyncio.sleep(0.002)


Act = Callable[[Scene], Coroutine[None, None, None]]


@pytest.fixture
def play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[[Act], None]:
    """Runs a scene on an event loop of its own, within a limit of time."""
    caplog.set_level(logging.INFO)

    def run(act: Act) -> None:
        async def main() -> None:
            scene = Scene(TinyServer(), Player(), tmp_path)
            monkeypatch.setattr(membership, "Worker", scene.player)
            async with asyncio.timeout(PATIENCE):
                await act(scene)

        asyncio.run(main())

    return run


@pytest.mark.parametrize(("days", "warned"), [(29, {NODE}), (365, set())])
def test_a_certificate_that_soon_ends_is_warned_of_at_once_and_daily(
    play: Callable[[Act], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    days: int,
    warned: set[str],
) -> None:
    monkeypatch.setattr(membership, "_DAY_SECONDS", 0.05)

    def warnings() -> list[str]:
        found = [r for r in caplog.records if getattr(r, "what", "") == "certificate"]
        assert all(record.levelno == logging.WARNING for record in found)
        return [record.node for record in found]

    async def act(scene: Scene) -> None:
        credentials, _ = make_certificates(scene.folder / "certs")
        bundle = issue(scene.folder / "certs", NODE, lifetime=timedelta(days=days)).folder
        async with (
            serving(scene.tiny, credentials) as port,
            scene.joined(port, server=f"localhost:{port}", node=None, certificates=bundle),
        ):
            await happens(lambda: scene.tiny.connected == 1)
            await happens(lambda: all(warnings().count(who) >= 2 for who in warned))
            await happens(lambda: bool(scene.player.prepared))
            assert set(warnings()) == warned

    play(act)


def test_a_round_is_answered_and_the_end_of_the_run_is_the_end(
    play: Callable[[Act], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def act(scene: Scene) -> None:
        tiny, player = scene.tiny, scene.player
        async with serving(tiny) as port, scene.joined(port) as task:
            offer = await tiny.offer(4)
            request = await player.asked.get()
            header, data = await tiny.answers.get()
            await happens(lambda: "round 4 of run 'run': answered after" in caplog.text)
            await tiny.script.put(None)
            await task
        hello = tiny.hellos.get_nowait()
        assert (hello.node, hello.users_sha256) == ("n", player.loaded.users_sha256)
        assert (request.run, request.round, request.attempt) == ("run", 4, 0)
        np.testing.assert_array_equal(request.parameters["1.weight"], PARAMETERS["1.weight"])
        assert header.id == ROUND_ID.encode(offer.id)
        assert header.sum.weight == 1
        assert data == SUM.total.astype("<i4").tobytes()
        assert 0.0 < player.seconds[0] < offer.seconds
        assert scene.recorded() == [(4, 0)]
        assert player.closed

    play(act)
    assert "connected as n to 127.0.0.1:" in caplog.text
    assert ", with 1 of the 100 users of the population" in caplog.text


QUIET = replace(PRICE, event=poisson_gaussian(0.5, 2.0, population=100))
LOUD = replace(PRICE, event=poisson_gaussian(0.5, 0.5, population=100))
FEWER = replace(PRICE, event=poisson_gaussian(0.5, 1.0, population=99))


@dataclass(frozen=True)
class Step:
    """A proposal, or an offer, and what the node must say to it: "" if it agrees."""

    kind: str
    said: str
    number: int
    changes: dict[str, object]


def propose(said: str, number: int = 0, **changes: object) -> Step:
    return Step("propose", said, number, changes)


def offer(said: str, number: int = 0, **changes: object) -> Step:
    return Step("offer", said, number, changes)


@pytest.mark.parametrize(
    ("consent", "steps"),
    [
        pytest.param(
            "least_noise_multiplier = 1.5",
            [
                offer("consents to at least 1.5"),
                offer("", 1, price=QUIET),
                propose("consents to at least 1.5", id=RoundId("run", 0, 0, 77)),
                propose("", price=QUIET),
            ],
            id="noise",
        ),
        pytest.param(
            "most_rounds_per_day = 2",
            [offer(""), offer("", 1), offer("at most 2", 2)],
            id="rounds of a day",
        ),
        pytest.param(
            "most_rounds_per_day = 1",
            [propose(""), offer(""), propose("", 1), offer("at most 1", 1)],
            id="a vote does not tell how often users were drawn",
        ),
        pytest.param("most_rounds_per_day = 0", [propose("at most 0")], id="no rounds"),
        pytest.param(
            "",
            [
                offer(
                    "answered before" if user else "",
                    id=RoundId("run", 0, 0, user),
                    users=np.array([user]),
                )
                for user in range(25)
            ],
            id="one attempt under many nonces",
        ),
        pytest.param("", [offer("of 99", price=FEWER)], id="another population"),
        pytest.param(
            "",
            [offer("local.max_examples is absent", local=LocalTraining(0.1, steps=1))],
            id="work without bounds",
        ),
        pytest.param(
            "least_noise_multiplier = 1.0\nruns = ['run']",
            [
                propose(""),
                offer("consents to at least 1.0", price=LOUD, id=RoundId("run", 0, 0, 1)),
                offer("the run is 'other'", id=RoundId("other", 0, 0, 2)),
            ],
            id="other terms than were agreed to",
        ),
        *(
            pytest.param(consent, [propose(said), offer(said)], id=said or "all names fit")
            for consent, said in (
                ("purposes = ['to sell']", "the purpose is 'to heal'"),
                ("models = ['mlp', 'cnn']", "the model is 'softmax'"),
                ("runs = ['ru?-*']", "the run is 'run'"),
                ("purposes = ['to *']\nmodels = ['softmax']\nruns = ['run']", ""),
            )
        ),
    ],
)
def test_a_node_does_what_it_consents_to_and_says_why_it_does_nothing_else(
    play: Callable[[Act], None], consent: str, steps: list[Step]
) -> None:
    async def act(scene: Scene) -> None:
        tiny, trained = scene.tiny, []
        tiny.welcome = TinyServer(range(25)).welcome
        tiny.welcome.welcome.purpose = "to heal"
        async with serving(tiny) as port, scene.joined(port, consent=scene.consent(consent)):
            for step in steps:
                if step.kind == "propose":
                    await tiny.propose(step.number, **step.changes)
                    vote = await tiny.votes.get()
                    said, at = vote.objection, ROUND_ID.encode(vote.id)
                    made = step.changes.get("id", RoundId("run", step.number, 0))
                    assert at == ROUND_ID.encode(made)
                else:
                    made = await tiny.offer(step.number, **step.changes)
                    header, data = await tiny.answers.get()
                    said = header.decline.reason
                    assert header.HasField("decline") == bool(step.said) == (not data)
                    trained += [] if step.said else [(made.id.round, made.id.attempt)]
                assert step.said in said
                assert bool(said) == bool(step.said)
        assert sorted(scene.recorded()) == trained
        assert scene.player.asked.qsize() == len(trained)

    play(act)


def test_a_journal_that_cannot_be_written_stops_nobody_but_the_training(
    play: Callable[[Act], None],
) -> None:
    async def act(scene: Scene) -> None:
        async with serving(scene.tiny) as port, scene.joined(port) as task:
            await scene.tiny.hellos.get()
            with sqlite3.connect(scene.folder / "journal.sqlite") as journal:
                journal.execute("DROP TABLE answers")
            journal.close()
            await scene.tiny.offer()
            header, _ = await scene.tiny.answers.get()
            assert not task.done()
        assert "cannot check or record the offer" in header.decline.reason
        assert scene.player.asked.empty()

    play(act)


def test_the_newest_offer_wins(
    play: Callable[[Act], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def act(scene: Scene) -> None:
        tiny, player = scene.tiny, scene.player
        player.go.clear()
        async with serving(tiny) as port, scene.joined(port):
            await tiny.offer(0)
            assert (await player.asked.get()).round == 0
            await tiny.offer(1)
            assert (await player.asked.get()).round == 1
            assert player.abandoned == [0]
            player.go.set()
            header, _ = await tiny.answers.get()
        assert header.id.round == 1
        assert tiny.answers.empty()

    play(act)
    assert "round 0 of run 'run': left unfinished" in caplog.text


def test_the_same_offer_again_does_not_begin_anew(play: Callable[[Act], None]) -> None:
    async def act(scene: Scene) -> None:
        tiny, player = scene.tiny, scene.player
        player.go.clear()
        async with serving(tiny) as port, scene.joined(port):
            await tiny.offer(0)
            await player.asked.get()
            await tiny.offer(0)
            await tiny.script.put((grpc.StatusCode.UNAVAILABLE, "later"))
            await tiny.hellos.get()
            await tiny.hellos.get()
            player.go.set()
            await tiny.answers.get()
        assert (player.abandoned, player.asked.qsize(), len(player.prepared)) == ([], 0, 1)

    play(act)


def test_work_goes_on_while_the_server_is_away(
    play: Callable[[Act], None], caplog: pytest.LogCaptureFixture
) -> None:
    """It dies while a node trains, and comes back on the same port."""

    async def act(scene: Scene) -> None:
        tiny, player = scene.tiny, scene.player
        player.go.clear()
        other = TinyServer()
        async with AsyncExitStack() as node:
            async with serving(tiny) as port:
                task = await node.enter_async_context(scene.joined(port))
                await tiny.offer(0)
                await player.asked.get()
            player.go.set()
            await happens(lambda: task.done() or "tried again" in caplog.text)
            async with serving(other, port=port):
                header, _ = await other.answers.get()
                assert header.id.round == 0
                await other.hellos.get()
                await other.offer(1)
                header, _ = await other.answers.get()
                assert header.id.round == 1
                await other.script.put(None)
                await task
        assert player.abandoned == []
        assert len(player.prepared) == 1

    play(act)


def test_without_once_a_node_comes_back_after_the_end_of_a_run(
    play: Callable[[Act], None],
) -> None:
    async def act(scene: Scene) -> None:
        async with serving(scene.tiny) as port, scene.joined(port, once=False) as task:
            for _ in range(3):
                await scene.tiny.hellos.get()
                await scene.tiny.script.put(None)
            assert not task.done()
        assert len(scene.player.prepared) == 1

    play(act)


def test_another_task_is_prepared_and_ends_what_was_done_for_the_last(
    play: Callable[[Act], None],
) -> None:
    async def act(scene: Scene) -> None:
        tiny, player = scene.tiny, scene.player
        player.go.clear()
        async with serving(tiny) as port, scene.joined(port):
            await tiny.offer(0)
            await player.asked.get()
            tiny.welcome = TinyServer(task=replace(TASK, seed=1)).welcome
            await tiny.script.put((grpc.StatusCode.UNAVAILABLE, "later"))
            await happens(lambda: player.abandoned == [0])
            player.go.set()
            await tiny.offer(1)
            header, _ = await tiny.answers.get()
        assert [welcome.task.seed for welcome in player.prepared] == [0, 1]
        assert header.id.round == 1

    play(act)


def test_an_answer_that_is_refused_is_no_failure(
    play: Callable[[Act], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def act(scene: Scene) -> None:
        tiny = scene.tiny
        refusal = "round 0 of run 'run': the server refuses the answer: 'too late\\nfor this'"
        tiny.receipts = [said(Receipt(accepted=False, reason="too late\nfor this"))]
        async with serving(tiny) as port, scene.joined(port) as task:
            await tiny.offer(0)
            await happens(lambda: refusal in caplog.text)
            answer, _ = await tiny.answers.get()
            decline, _ = await tiny.answers.get()
            assert answer.WhichOneof("what") == "sum"
            # Otherwise the round would wait for another answer until its deadline.
            assert decline.decline.reason == "the answer was refused"
            assert decline.id == answer.id
            await tiny.offer(1)
            await happens(lambda: "round 1 of run 'run': answered" in caplog.text)
            assert not task.done()

    play(act)


@pytest.mark.parametrize("answer", [None, ModelError(SECRET)])
def test_training_that_fails_is_declined(
    play: Callable[[Act], None], caplog: pytest.LogCaptureFixture, answer: Exception | None
) -> None:
    async def act(scene: Scene) -> None:
        scene.player.answer = answer
        scene.player.prepare = lambda _: asyncio.sleep(0.0)  # type: ignore[method-assign]
        async with serving(scene.tiny) as port, scene.joined(port):
            await scene.tiny.offer()
            header, _ = await scene.tiny.answers.get()
        assert header.decline.reason == "training failed"

    play(act)
    assert SECRET not in caplog.text


@pytest.mark.parametrize("what", ["chunk", "checksum", "short", "long", "over"])
def test_a_round_whose_model_does_not_arrive_is_declined(
    play: Callable[[Act], None], what: str
) -> None:
    undeclared = "the model did not arrive as it was declared"
    good = make_offer()[1]
    model, reason = {
        "chunk": ([b"\xff"], undeclared),
        "checksum": ([pb.Chunk(number=0, data=bytes(60), crc32=1)], undeclared),
        "short": ([], undeclared),
        "long": ([*good, *good], undeclared),
        "over": (
            [(grpc.StatusCode.FAILED_PRECONDITION, "the round is over")],
            "the model cannot be fetched",
        ),
    }[what]

    async def act(scene: Scene) -> None:
        tiny = scene.tiny
        async with serving(tiny) as port, scene.joined(port):
            offered, _ = make_offer()
            tiny.model = model
            await tiny.script.put(said(offered))
            declined, _ = await tiny.answers.get()
            await tiny.offer(1)
            header, _ = await tiny.answers.get()
        assert (declined.id.round, declined.decline.reason) == (0, reason)
        assert header.HasField("sum")
        assert header.id.round == 1
        assert scene.player.asked.qsize() == 1

    play(act)


def test_lost_calls_are_repeated_until_the_answer_is_there(play: Callable[[Act], None]) -> None:
    async def act(scene: Scene) -> None:
        tiny = scene.tiny
        tiny.receipts = [
            (grpc.StatusCode.UNAVAILABLE, "lost"),
            (grpc.StatusCode.RESOURCE_EXHAUSTED, "busy"),
        ]
        async with serving(tiny) as port, scene.joined(port):
            offered, model = make_offer()
            tiny.model = [(grpc.StatusCode.UNAVAILABLE, "lost")]
            await tiny.script.put(said(offered))
            await happens(lambda: tiny.calls["Download"] >= 3)
            tiny.model = model
            header, _ = await tiny.answers.get()
        assert header.HasField("sum")
        assert tiny.calls["Upload"] == 3

    play(act)


def test_of_a_model_of_three_gibibytes_for_a_small_task_no_byte_is_fetched(
    play: Callable[[Act], None],
) -> None:
    layout = Layout(("1.weight", "1.bias"), ((3, 2**28), (3,)))
    clipping = Clipping(layout, flat(layout, 0.5))

    async def act(scene: Scene) -> None:
        tiny = scene.tiny
        async with serving(tiny) as port, scene.joined(port):
            await tiny.propose(clipping=clipping)
            voted = (await tiny.votes.get()).objection
            with peak_memory() as peak:
                await tiny.offer(clipping=clipping)
                header, _ = await tiny.answers.get()
        assert voted == header.decline.reason
        assert voted == (
            "the update has 1 tensors, as '1.weight', that differ from those of this node's task"
        )
        assert tiny.calls["Download"] == len(scene.player.learnt) == 0
        assert peak() < 2**24

    play(act)


def test_want_of_memory_is_an_objection_and_a_decline(
    play: Callable[[Act], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def act(scene: Scene) -> None:
        tiny, player = scene.tiny, scene.player
        player.answer = MemoryError()
        async with serving(tiny) as port, scene.joined(port) as task:
            await tiny.propose()
            assert (await tiny.votes.get()).objection == "the node cannot check the proposal"
            await tiny.offer()
            header, _ = await tiny.answers.get()
            assert header.decline.reason == "the node cannot check or record the offer"
            assert not task.done()

    play(act)
    assert caplog.text.count(": it takes more memory than the node may use") == 2


def test_the_memory_of_a_node_is_limited_by_the_size_of_its_task(
    play: Callable[[Act], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = list[int]()
    monkeypatch.setattr(worker, "limit_address_space", limits.append)
    monkeypatch.setattr(worker, "address_space", lambda: 10**9)

    async def act(scene: Scene) -> None:
        big = Layout(("w", "b"), ((1000, 1000), (10,)))
        scene.player.built = Built(big, Layout(("bn.mean",), ((7,),)))
        async with serving(scene.tiny) as port, scene.joined(port, own_mebibytes=50):
            await happens(lambda: len(limits) == 2)
        assert limits[0] >= 10**9 + 50 * 2**20
        assert limits[1] == limits[0] + 100 * 1_000_017

    play(act)


def test_nothing_is_sent_after_the_deadline(
    play: Callable[[Act], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def act(scene: Scene) -> None:
        tiny, player = scene.tiny, scene.player
        passed = "round 0 of run 'run': not answered, its deadline has passed"
        player.go.clear()
        async with serving(tiny) as port, scene.joined(port):
            await tiny.offer(0, seconds=0.3)
            await happens(lambda: passed in caplog.text)
            assert len(player.abandoned) == player.asked.qsize()
            assert all(0.0 < seconds < 0.3 for seconds in player.seconds)
            player.go.set()
            await tiny.offer(1)
            header, _ = await tiny.answers.get()
        assert header.id.round == 1
        assert tiny.calls["Upload"] == 1

    play(act)


# How a membership ends

OFFERED = make_offer()[0]
MESSAGES = [said(value) for value in (OFFERED, Proposal.of(OFFERED, PRICE))]


def with_unknown_field(message: Message) -> bytes:
    """The bytes of a message from the server whose price has a field of a later version."""
    altered = pb.FromServer.FromString(message.SerializeToString())
    (_, content), *_ = altered.ListFields()
    content.price.MergeFromString(b"\xc0\x3e\x01")  # field 1000
    return altered.SerializeToString()


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (b"\xff\xff", "not a message FromServer"),
        (pb.FromServer(offer=pb.Offer()), "not legal"),
        *((with_unknown_field(message), "does not know") for message in MESSAGES),
    ],
)
def test_a_server_that_talks_nonsense_is_left(
    play: Callable[[Act], None], says: Said, reason: str
) -> None:
    async def act(scene: Scene) -> None:
        await scene.tiny.script.put(says)
        async with serving(scene.tiny) as port, scene.joined(port) as task:
            with pytest.raises(WireError, match=reason) as caught:
                await task
        assert "\n" not in str(caught.value)
        assert scene.player.closed

    play(act)


@pytest.mark.parametrize(
    "code",
    [
        "UNAVAILABLE",
        "RESOURCE_EXHAUSTED",
        "ABORTED",
        "INTERNAL",
        "UNAUTHENTICATED",  # its certificate was struck off
        "PERMISSION_DENIED",  # it is not enrolled
        "FAILED_PRECONDITION",  # it is enrolled with other users
        "INVALID_ARGUMENT",
        "UNIMPLEMENTED",  # for instance while the server is replaced
    ],
)
def test_a_node_comes_back_after_other_failures(
    play: Callable[[Act], None], caplog: pytest.LogCaptureFixture, code: str
) -> None:
    async def act(scene: Scene) -> None:
        tiny = scene.tiny
        welcome, tiny.welcome = tiny.welcome, (grpc.StatusCode[code], "later")
        async with serving(tiny) as port, scene.joined(port) as task:
            await happens(lambda: tiny.calls["Connect"] >= 4)
            tiny.welcome = (grpc.StatusCode[code], "much later")
            await happens(lambda: f"no connection: {code} ('much later')" in caplog.text)
            tiny.welcome = welcome
            await tiny.script.put(None)
            await task

    play(act)
    warned = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warned == [f"no connection: {code} ({why!r})" for why in ("later", "much later")]


NEWER = grpc.StatusCode.ABORTED, naming.NEWER


def test_a_node_leaves_to_another_process_once_it_was_replaced_twice_in_a_row(
    play: Callable[[Act], None],
) -> None:
    async def act(scene: Scene) -> None:
        tiny = scene.tiny
        for says in (NEWER, (grpc.StatusCode.UNAVAILABLE, "later"), NEWER, NEWER):
            await tiny.script.put(says)
        async with serving(tiny) as port, scene.joined(port) as task:
            with pytest.raises(WireError, match="another process speaks for node 'n'"):
                await task
        assert tiny.calls["Connect"] == 4

    play(act)


def test_waits_grow_until_a_welcome(play: Callable[[Act], None]) -> None:
    drawn: list[float] = []

    def draw(low: float, high: float) -> float:
        drawn.append(high)
        return low

    async def act(scene: Scene) -> None:
        tiny = scene.tiny
        welcome, tiny.welcome = tiny.welcome, (grpc.StatusCode.UNAVAILABLE, "later")
        async with serving(tiny) as port:
            backoff = Backoff(1.0, 8.0, draw)
            async with scene.joined(port, backoff=backoff) as task:
                await happens(lambda: tiny.calls["Connect"] >= 6)
                tiny.welcome = welcome
                await tiny.script.put((grpc.StatusCode.UNAVAILABLE, "later"))
                await tiny.script.put(None)
                await task

    play(act)
    assert drawn[:5] == [2.0, 4.0, 8.0, 8.0, 8.0]
    assert drawn[-1] == 1.0


def test_code_that_the_server_names_is_run_only_if_it_is_trusted(
    play: Callable[[Act], None], caplog: pytest.LogCaptureFixture
) -> None:
    task = TaskDescription("models:mine", {}, 0, "losses:mine", ("metrics:mine",))

    async def act(scene: Scene) -> None:
        scene.tiny.welcome = TinyServer(task=task).welcome
        async with serving(scene.tiny) as port:
            trusted = ("models:mine", "losses:mine", "metrics:mine")
            for missing in trusted:
                others = tuple(path for path in trusted if path != missing)
                tries = scene.tiny.calls["Connect"]
                async with scene.joined(port, trusted=others) as taking_part:
                    await happens(lambda: scene.tiny.calls["Connect"] >= tries + 3)  # noqa: B023
                    assert not taking_part.done()
                assert caplog.text.count(f"--trust '{missing}' allows it") == 1
            assert scene.player.prepared == []
            async with scene.joined(port, trusted=trusted) as taking_part:
                # An older connection, not yet seen to be over, would take the end.
                await happens(lambda: scene.player.prepared and scene.tiny.connected == 1)
                await scene.tiny.script.put(None)
                await taking_part
            assert [welcome.task for welcome in scene.player.prepared] == [task]

    play(act)


@pytest.mark.parametrize("consent", ["models = ['mlp']", "purposes = ['research']"])
def test_no_task_is_built_that_the_node_does_not_consent_to(
    play: Callable[[Act], None], caplog: pytest.LogCaptureFixture, consent: str
) -> None:
    async def act(scene: Scene) -> None:
        tiny = scene.tiny
        async with serving(tiny) as port, scene.joined(port, consent=scene.consent(consent)):
            await tiny.propose()
            objection = (await tiny.votes.get()).objection
            await tiny.offer()
            header, _ = await tiny.answers.get()
        assert "this node consents to" in objection
        assert header.decline.reason == objection
        assert scene.player.prepared == []
        assert f"no task is built: {objection}" in caplog.text

    play(act)


def test_a_task_is_built_once_its_purpose_is_one_that_the_node_consents_to(
    play: Callable[[Act], None],
) -> None:
    async def act(scene: Scene) -> None:
        tiny, consent = scene.tiny, scene.consent("purposes = ['research']")
        async with serving(tiny) as port, scene.joined(port, consent=consent):
            await tiny.propose()
            assert "this node consents to" in (await tiny.votes.get()).objection
            own = np.array([3])
            tiny.welcome = said(
                Welcome("people", PRICE.event.sampling.population, own, TASK, "research")
            )
            await tiny.script.put((grpc.StatusCode.UNAVAILABLE, "later"))
            await happens(lambda: bool(scene.player.prepared) and tiny.connected == 1)
            await tiny.propose()
            assert (await tiny.votes.get()).objection == ""

    play(act)


def test_a_task_is_built_once_its_hash_is_one_that_the_node_consents_to(
    play: Callable[[Act], None],
) -> None:
    async def act(scene: Scene) -> None:
        tiny = scene.tiny
        first, _ = make_offer()
        known = task_hash(WELCOME.decode(tiny.welcome.welcome), first)
        one_step = LocalTraining(0.1, steps=1, max_examples=1)
        consent = scene.consent(f"tasks = ['{known}']")
        async with serving(tiny) as port, scene.joined(port, consent=consent):
            await tiny.propose(id=RoundId("run", 0, 0), local=one_step)
            assert "this node's consent does not name it" in (await tiny.votes.get()).objection
            await tiny.offer(local=one_step)
            header, _ = await tiny.answers.get()
            assert "this node's consent does not name it" in header.decline.reason
            assert scene.player.prepared == []
            for number in range(2):
                await tiny.propose(number + 1)
                assert (await tiny.votes.get()).objection == ""
                await tiny.offer(number + 1)
                assert (await tiny.answers.get())[0].HasField("sum")
            assert len(scene.player.prepared) == 1
            await tiny.offer(3, local=one_step)
            assert (await tiny.answers.get())[0].HasField("decline")

    play(act)


def test_a_review_prints_the_hash_votes_and_leaves_without_building_a_task(
    play: Callable[[Act], None], capsys: pytest.CaptureFixture[str]
) -> None:
    async def act(scene: Scene) -> None:
        tiny = scene.tiny
        await tiny.script.put((grpc.StatusCode.UNAVAILABLE, "later"))
        async with serving(tiny) as port:
            settings = NodeSettings(
                f"127.0.0.1:{port}", HostSettings("played"), node="n", backoff=QUICK
            )
            reviewing = asyncio.create_task(membership.show_review(settings))
            await tiny.offer()
            await tiny.propose(2)
            vote = await tiny.votes.get()
            await reviewing
        assert (vote.id.round, vote.objection) == (2, "under review")
        assert scene.player.prepared == scene.player.learnt == []
        assert scene.player.asked.empty()
        assert scene.player.closed
        known = task_hash(WELCOME.decode(tiny.welcome.welcome), make_offer()[0])
        assert f'\ntasks = ["{known}"]\n' in capsys.readouterr().out

    play(act)


def test_a_task_that_cannot_be_built_is_waited_out(
    play: Callable[[Act], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def act(scene: Scene) -> None:
        scene.player.answer = ModelError("no such model")
        async with serving(scene.tiny) as port, scene.joined(port) as task:
            await happens(lambda: len(scene.player.prepared) >= 3)
            scene.player.answer = SUM
            # An older connection, not yet seen to be over, would take the offer.
            await happens(lambda: "connected as n" in caplog.text and scene.tiny.connected == 1)
            await scene.tiny.offer()
            assert (await scene.tiny.answers.get())[0].HasField("sum")
            assert not task.done()

    play(act)


def named(population: str) -> Said:
    return said(Welcome(population, PRICE.event.sampling.population, np.array([3]), TASK))


@pytest.mark.parametrize("verify_ledger", [False, True])
def test_another_name_of_the_population_is_declined_until_the_consent_has_it(
    play: Callable[[Act], None], caplog: pytest.LogCaptureFixture, verify_ledger: bool
) -> None:
    async def act(scene: Scene) -> None:
        tiny, answers = scene.tiny, []

        async def answer(port: int, population: str, consent: str) -> str:
            attempt, tiny.welcome = RoundId("run", 0, len(answers)), named(population)
            with Ledger.open_or_create(scene.folder / f"{population}.sqlite", population) as ledger:
                tiny.ledger = ledger
                given = {"consent": scene.consent(consent), "verify_ledger": verify_ledger}
                async with scene.joined(port, **given):
                    await tiny.propose(id=attempt, price=HONEST)
                    objection = (await tiny.votes.get()).objection
                    await tiny.offer(id=attempt, price=HONEST)
                    header, _ = await tiny.answers.get()
            answers.append(header)
            assert header.decline.reason == objection
            return objection

        async with serving(tiny) as port:
            assert await answer(port, "people", "") == ""
            assert await answer(port, "people", "") == ""
            other = "the population is 'people-2'; the node knows another and consents to no more"
            assert await answer(port, "people-2", "") == other
            assert await answer(port, "people", "") == ""
            only = 'populations = ["people"]'
            assert "this node consents to" in await answer(port, "people-2", only)
            assert await answer(port, "people-2", 'populations = ["people*"]') == ""
            assert await answer(port, "people", "") == other.replace("-2", "")
        assert caplog.text.count("the ledger is not read: ") == 3 * verify_ledger

    play(act)


@pytest.mark.parametrize("consent", ["most_rounds_per_day = 1\npopulations = ['*']", ""])
def test_two_processes_with_one_journal_answer_no_more_than_one_may(
    play: Callable[[Act], None], consent: str
) -> None:
    async def act(scene: Scene) -> None:
        scene.player.go.clear()
        first, second = scene.tiny, TinyServer()
        second.welcome = named("others")
        other = replace(scene, tiny=second)
        given = scene.consent(consent)
        async with (
            serving(first) as one,
            serving(second) as two,
            scene.joined(one, consent=given),
            other.joined(two, consent=given),
        ):
            await first.offer()
            await second.offer()
            for _ in range(2):
                await scene.player.asked.get()
            scene.player.go.set()
            headers = [(await each.answers.get())[0] for each in (first, second)]
        assert sorted(header.WhichOneof("what") for header in headers) == ["decline", "sum"]
        assert len(scene.recorded()) == 1

    play(act)


class Pricing:
    """Stands in for an accountant that takes very long, until it is let go."""

    def __init__(self) -> None:
        self.let_go, self.begun, self.at_once, self.most = threading.Event(), 0, 0, 0

    def __call__(self, events: Sequence[RoundEvent], delta: float) -> PrivacyLoss:
        self.begun += 1
        self.at_once += 1
        self.most = max(self.most, self.at_once)
        assert self.let_go.wait(PATIENCE)
        self.at_once -= 1
        return priced(events, delta)


def test_a_ledger_that_takes_long_to_price_is_not_agreed_to_and_holds_up_nothing(
    play: Callable[[Act], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pricing, late = Pricing(), []
    monkeypatch.setattr(ledger_check, "priced", pricing)
    monkeypatch.setattr(ledger_check, "_LONGEST_CHECK_SECONDS", 0.2)

    async def act(scene: Scene) -> None:
        tiny = scene.tiny
        with Ledger.open_or_create(scene.folder / "ledger.sqlite", "people") as tiny.ledger:
            async with serving(tiny) as port, scene.joined(port, verify_ledger=True) as node:
                for number in range(2):
                    await tiny.propose(id=RoundId("run", 0, number), price=HONEST)
                    objection = (await tiny.votes.get()).objection
                    assert objection == "the node cannot check the proposal"
                await tiny.offer(price=HONEST)
                header, _ = await tiny.answers.get()
                assert header.decline.reason == "the node cannot check or record the offer"
                assert pricing.begun == 1
                monkeypatch.setattr(ledger_check, "_LONGEST_CHECK_SECONDS", PATIENCE)
                await tiny.propose(id=RoundId("run", 0, 3), price=HONEST)
                await happens(lambda: tiny.calls["FetchLedger"] >= 4)
                assert tiny.votes.empty()
                pricing.let_go.set()
                assert not (await tiny.votes.get()).objection
                pricing.let_go.clear()
                await tiny.propose(id=RoundId("run", 0, 4), price=HONEST)
                await happens(lambda: pricing.at_once == 1)
                assert not node.done()
        late.append(pricing.at_once)

    play(act)
    assert late == [1]
    assert pricing.at_once == 1  # the node has ended before it
    assert pricing.most == 1
    pricing.let_go.set()


@pytest.mark.parametrize("error", [OverflowError, IndexError, ValueError, MemoryError])
def test_a_ledger_that_cannot_be_priced_is_not_believed(
    play: Callable[[Act], None], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fails(_events: object, _delta: float) -> NoReturn:
        raise error("too extreme")

    async def act(scene: Scene) -> None:
        tiny = scene.tiny
        with Ledger.open_or_create(scene.folder / "ledger.sqlite", "people") as tiny.ledger:
            async with serving(tiny) as port, scene.joined(port, verify_ledger=True) as node:
                monkeypatch.setattr(ledger_check, "priced", fails)
                await tiny.propose(price=HONEST)
                assert (await tiny.votes.get()).objection == "the ledger cannot be believed"
                await tiny.offer(price=HONEST)
                header, _ = await tiny.answers.get()
                assert header.decline.reason == "the ledger cannot be believed"
                monkeypatch.undo()
                await tiny.propose(1, price=HONEST)
                assert not (await tiny.votes.get()).objection
                assert not node.done()

    play(act)


# What is said to proposals, and how offers are held to it


@pytest.mark.parametrize("drawn", [False, True])
def test_a_vote_does_not_tell_whether_users_were_ever_drawn(
    play: Callable[[Act], None], drawn: bool
) -> None:
    async def act(scene: Scene) -> None:
        votes = []
        for population in ("people", "people-2"):
            scene.tiny.welcome = named(population)
            async with serving(scene.tiny) as port, scene.joined(port):
                await scene.tiny.propose()
                votes.append((await scene.tiny.votes.get()).objection)
                if drawn and not votes[-1]:
                    await scene.tiny.offer()
                    await scene.tiny.answers.get()
        other = "the population is 'people-2'; the node knows another and consents to no more"
        assert votes == ["", other]

    play(act)


def test_one_vote_waits_for_a_server_that_proposes_and_reads_nothing(
    play: Callable[[Act], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = list[Vote]()

    async def connect(
        _: FederationStub, __: Hello, votes: asyncio.Queue[Vote]
    ) -> AsyncIterator[Welcome | Proposal]:
        yield Welcome("people", PRICE.event.sampling.population, np.array([3]), TASK)
        for number in range(20):
            proposal = Proposal.of(make_offer(number)[0], PRICE)
            yield proposal
            await happens(lambda: any(vote.id == proposal.id for vote in votes._queue))  # noqa: B023
        waiting.extend(votes._queue)

    async def act(scene: Scene) -> None:
        monkeypatch.setattr(FederationStub, "connect", connect)
        consent = scene.consent("least_noise_multiplier = 1.5")
        async with serving(scene.tiny) as port, scene.joined(port, consent=consent) as taking_part:
            await taking_part

    play(act)
    assert [vote.id.round for vote in waiting] == [19]
    assert caplog.text.count("consents to at least 1.5") == 1


def test_an_attempt_has_one_sum_even_if_the_node_is_restarted(
    play: Callable[[Act], None], caplog: pytest.LogCaptureFixture
) -> None:
    def settled() -> int:
        return sum("answered after" in line or "declined:" in line for line in caplog.messages)

    async def act(scene: Scene) -> None:
        tiny, consent, kinds = scene.tiny, scene.consent("most_rounds_per_day = 2"), []
        async with serving(tiny) as port:
            for _ in range(2):
                async with scene.joined(port, consent=consent):
                    for _ in range(2):
                        await tiny.offer(0)
                        kinds.append((await tiny.answers.get())[0])
                        # Until then, the same offer is the same work, and not begun again.
                        await happens(lambda: settled() == len(kinds))
            async with scene.joined(port, consent=consent):
                await tiny.offer(1)
                kinds.append((await tiny.answers.get())[0])
        assert [kind.WhichOneof("what") for kind in kinds] == [
            "sum", "decline", "decline", "decline", "sum"
        ]  # fmt: skip
        assert kinds[1].decline.reason == "this attempt was answered before"

    play(act)


def test_a_round_that_was_not_answered_yet_is_answered_after_a_restart(
    play: Callable[[Act], None],
) -> None:
    async def act(scene: Scene) -> None:
        tiny, player = scene.tiny, scene.player
        player.go.clear()
        async with serving(tiny) as port:
            async with scene.joined(port):
                await tiny.offer(0)
                await player.asked.get()
            player.go.set()
            async with scene.joined(port):
                await tiny.offer(0)
                assert (await tiny.answers.get())[0].HasField("sum")
        assert scene.recorded() == [(0, 0)]

    play(act)


# The ledger

EVENT = poisson_gaussian(0.5, 1.0, population=100)


@pytest.fixture
def ledger(tmp_path: Path) -> AsyncIterator[Ledger]:
    with Ledger.open_or_create(tmp_path / "ledger.sqlite", "people") as opened:
        yield opened


def charge(ledger: Ledger, number: int, run: str = "run") -> None:
    ledger.charge(ProposedCharge(run, number, 0, Randomness.OPERATING_SYSTEM, EVENT, "0" * 64))


HONEST = replace(PRICE, epsilon_after=1e6)


def test_a_ledger_is_read_before_and_after_taking_part(
    play: Callable[[Act], None], ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(scene: Scene) -> None:
        tiny = scene.tiny
        tiny.ledger = ledger
        async with serving(tiny) as port, scene.joined(port, verify_ledger=True) as task:
            for number in range(2):
                await tiny.offer(number, price=replace(HONEST, charges=number))
                header, _ = await tiny.answers.get()
                assert header.HasField("sum")
                charge(ledger, number)
            await tiny.script.put(None)
            await task

    play(act)
    assert "after this round ε would be" in caplog.text
    assert "the ledger holds 2 charges: ε = " in caplog.text


def test_no_user_is_asked_more_often_than_is_charged_whatever_position_it_is_given(
    play: Callable[[Act], None], ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    parts = 4
    population, relation = PRICE.event.sampling.population, NeighbouringRelation.ADD_OR_REMOVE_ONE
    sampling = SamplingEvent(
        SamplingPolicy.RANDOM_ALLOCATION, 1 / parts, population, relation, Schedule(parts, 1)
    )
    event = replace(EVENT, sampling=sampling)

    async def act(scene: Scene) -> None:
        tiny, declined = scene.tiny, []
        tiny.ledger, scene.player.loaded = ledger, Loaded(2, bytes(32), b"ann's   bob's   ")
        # Of both users once, then of the first again, and of the second at another position.
        asked = ([3, 8], 3), ([9, 40], 40), ([7, 3], 7), ([3, 90], 90)
        for part, (positions, user) in enumerate(asked):
            own = np.array(sorted(positions))
            tiny.welcome = said(Welcome("people", population, own, TASK))
            async with serving(tiny) as port, scene.joined(port, verify_ledger=True):
                price = replace(HONEST, event=event, part=part, charges=part)
                await tiny.offer(part + 1, users=np.array([user]), price=price)
                header, _ = await tiny.answers.get()
            declined.append(header.decline.reason)
            paid = 1 if part else None
            made = "run", part + 1, 0, Randomness.OPERATING_SYSTEM, event, "0" * 64
            ledger.charge(ProposedCharge(*made, part, paid))
        reason = "users would take part more often, or sooner again, than the event says"
        assert declined == ["", "", reason, reason]

    play(act)
    assert caplog.text.count("the server asks users more often than it has charged") == 2


def test_of_forty_runs_without_charges_three_get_a_sum_and_votes_do_not_tell(
    play: Callable[[Act], None], ledger: Ledger
) -> None:
    async def act(scene: Scene) -> None:
        tiny, votes, reasons = scene.tiny, [], []
        tiny.ledger = ledger

        async def ask(run: str, charges: int = 0) -> None:
            price = replace(HONEST, charges=charges)
            await tiny.propose(id=RoundId(run, 0, 0), price=price)
            votes.append((await tiny.votes.get()).objection)
            await tiny.offer(id=RoundId(run, 0, 0), price=price)
            reasons.append((await tiny.answers.get())[0].decline.reason)

        async with serving(tiny) as port:
            for start in (0, 20):
                async with scene.joined(port, verify_ledger=True):
                    for number in range(start, start + 20):
                        await ask(f"run {number}")
            for number in range(2):
                charge(ledger, 0, f"run {number}")
            async with scene.joined(port, verify_ledger=True):
                for number in range(40, 44):
                    await ask(f"run {number}", 2)
        refusal = "the ledger has no charge for 3 sums of the node; it sends no more"
        assert reasons == [""] * 3 + [refusal] * 37 + [""] * 2 + [refusal] * 2
        assert votes == [""] * 44
        assert len(scene.recorded()) == scene.player.asked.qsize() == 5

    play(act)


@pytest.mark.parametrize(("users", "sums"), [(120, 0), (1, 1)])
def test_everybody_is_asked_in_each_round_that_is_charged_at_next_to_no_chance(
    play: Callable[[Act], None],
    ledger: Ledger,
    caplog: pytest.LogCaptureFixture,
    users: int,
    sums: int,
) -> None:
    event = poisson_gaussian(1e-9, 1.0, population=120)

    async def act(scene: Scene) -> None:
        tiny, reasons = scene.tiny, []
        own = np.arange(users)
        tiny.welcome = said(Welcome("people", 120, own, TASK))
        tiny.ledger, scene.player.loaded = ledger, Loaded(users, bytes(32), bytes(8 * users))
        async with serving(tiny) as port, scene.joined(port, verify_ledger=True):
            for number in range(30):
                price = replace(HONEST, event=event, charges=number)
                await tiny.propose(number, id=RoundId("run", number, 0), price=price)
                assert not (await tiny.votes.get()).objection
                await tiny.offer(number, price=price, users=own)
                reasons.append((await tiny.answers.get())[0].decline.reason)
                named = "run", number, 0, Randomness.OPERATING_SYSTEM, event, "0" * 64
                ledger.charge(ProposedCharge(*named))
        refusal = "users are drawn more often than the charged sampling probability explains"
        assert reasons == [""] * sums + [refusal] * (30 - sums)

    play(act)
    assert caplog.text.count("the server draws users more often than it has charged for") == (
        30 - sums
    )


def test_a_ledger_without_charges_may_be_replaced_and_no_other(
    play: Callable[[Act], None], ledger: Ledger, tmp_path: Path
) -> None:
    async def act(scene: Scene) -> None:
        tiny, objections = scene.tiny, []
        with (
            Ledger.open_or_create(tmp_path / "second.sqlite", "people") as second,
            Ledger.open_or_create(tmp_path / "third.sqlite", "people") as third,
        ):
            async with serving(tiny) as port, scene.joined(port, verify_ledger=True):
                for tiny.ledger in (ledger, second, third):
                    charges = tiny.ledger.head.count
                    await tiny.propose(price=replace(HONEST, charges=charges))
                    objections.append((await tiny.votes.get()).objection)
                    if tiny.ledger is second:
                        charge(second, 0)
                        await tiny.propose(1, price=replace(HONEST, charges=1))
                        objections.append((await tiny.votes.get()).objection)
        assert objections == ["", "", "", "the ledger cannot be believed"]

    play(act)


def test_what_was_agreed_to_is_checked_once_and_for_one_offer(
    play: Callable[[Act], None], ledger: Ledger
) -> None:
    async def act(scene: Scene) -> None:
        tiny = scene.tiny
        tiny.ledger = ledger
        async with serving(tiny) as port, scene.joined(port, verify_ledger=True):
            await happens(lambda: tiny.calls["FetchLedger"] == 1)  # at the welcome
            await tiny.propose(price=HONEST)
            assert not (await tiny.votes.get()).objection
            charge(ledger, 0)
            await tiny.offer(price=HONEST)
            first, _ = await tiny.answers.get()
            assert tiny.calls["FetchLedger"] == 2
            await tiny.offer(price=HONEST, id=RoundId("run", 0, 0, 2))
            second, _ = await tiny.answers.get()
        assert first.HasField("sum")
        assert "charged already" in second.decline.reason

    play(act)


def test_a_total_epsilon_is_held_to_the_nodes_own_reading(
    play: Callable[[Act], None], ledger: Ledger
) -> None:
    """The server says 10⁶, but one round costs less than 20 at this δ."""

    async def act(scene: Scene) -> None:
        tiny, consent = scene.tiny, scene.consent("total_epsilon = 20.0\ndelta = 1e-5")
        tiny.ledger = ledger
        async with serving(tiny) as port:
            async with scene.joined(port, consent=consent, verify_ledger=True):
                await tiny.offer(0, price=HONEST)
                read, _ = await tiny.answers.get()
            async with scene.joined(port, consent=consent):
                await tiny.offer(1, price=HONEST)
                unread, _ = await tiny.answers.get()
        assert read.HasField("sum")
        assert "consents to at most 20" in unread.decline.reason

    play(act)


@pytest.mark.parametrize("ledger_sent", ["another", "garbage", "nothing", "uncharged"])
def test_a_ledger_that_cannot_be_believed_is_declined_until_it_can(
    play: Callable[[Act], None], ledger: Ledger, tmp_path: Path, ledger_sent: str
) -> None:
    another = Ledger.open_or_create(tmp_path / "another.sqlite", "people")

    async def act(scene: Scene) -> None:
        tiny = scene.tiny
        tiny.ledger = ledger
        bad: dict[str, list[Said] | Ledger] = {
            "another": another,
            "garbage": ledger_parts(b"\x00\xff\n"),
            "nothing": [],
            "uncharged": ledger_parts(f"{ledger.head.line}\n".encode()),
        }
        async with serving(tiny) as port, scene.joined(port, verify_ledger=True) as task:
            kinds = []
            for number in range(4):
                await tiny.offer(number, price=replace(HONEST, charges=number))
                kinds.append((await tiny.answers.get())[0])
                charge(ledger, number)
                tiny.ledger = bad[ledger_sent] if number < 2 else ledger
            assert not task.done()
        assert [kind.WhichOneof("what") for kind in kinds] == [
            "sum", "decline", "decline", "sum"
        ]  # fmt: skip
        assert kinds[1].decline.reason == "the ledger cannot be believed"

    play(act)


def test_a_ledger_that_cannot_be_believed_at_the_end_is_an_error_of_once(
    play: Callable[[Act], None], ledger: Ledger, tmp_path: Path
) -> None:
    another = Ledger.open_or_create(tmp_path / "another.sqlite", "people")

    async def act(scene: Scene) -> None:
        tiny = scene.tiny
        tiny.ledger = ledger
        async with serving(tiny) as port, scene.joined(port, verify_ledger=True) as task:
            await tiny.offer(0, price=HONEST)
            await tiny.answers.get()
            tiny.ledger = another
            await tiny.script.put(None)
            with pytest.raises(UntrustedLedgerError, match="does not contain its former head"):
                await task

    play(act)


def test_a_ledger_that_cannot_be_fetched_at_the_end_is_a_warning(
    play: Callable[[Act], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def act(scene: Scene) -> None:
        scene.tiny.ledger = [(grpc.StatusCode.UNIMPLEMENTED, "no such method")]
        async with serving(scene.tiny) as port, scene.joined(port, verify_ledger=True) as task:
            await happens(lambda: bool(scene.player.prepared))
            await scene.tiny.script.put(None)
            await task

    play(act)
    assert "the ledger cannot be fetched: UNIMPLEMENTED" in caplog.text


@pytest.mark.parametrize("run", ["run", "x" * 1024], ids=["a short name", "the longest name"])
def test_a_second_release_on_one_charge_finds_nobody_to_train(
    play: Callable[[Act], None], ledger: Ledger, run: str
) -> None:
    async def act(scene: Scene) -> None:
        charge(ledger, 0, run)
        scene.tiny.ledger = ledger
        async with serving(scene.tiny) as port, scene.joined(port, verify_ledger=True):
            await scene.tiny.offer(0, price=HONEST, id=RoundId(run, 0, 0))
            header, _ = await scene.tiny.answers.get()
        assert header.HasField("decline")
        assert ("charged already" in header.decline.reason) == (run == "run")
        assert scene.player.asked.empty()

    play(act)
