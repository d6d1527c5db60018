"""Nodes over TLS whose server shows two ledgers, or seems to, and one that does not."""

import asyncio
import logging
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.clients import membership
from fedpriv.clients.connection import Backoff, Identity, identity_of
from fedpriv.clients.membership import NodeSettings, take_part
from fedpriv.clients.worker import Built, HostSettings, Loaded
from fedpriv.ledger import Head, Ledger, ProposedCharge, Randomness
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.round import PartialSum
from fedpriv.server import certificates
from fedpriv.server.collection import Ballot, Collection
from fedpriv.server.deployment import GrpcTransport
from fedpriv.server.gateway import NODE
from fedpriv.training.request import LocalTraining, RoundRequest
from fedpriv.wire import (
    COUNTERSIGNATURE,
    HEAD,
    PROPOSAL,
    ROUND_ID,
    Countersignature,
    Price,
    Proposal,
    RoundId,
    RoundOffer,
    SignedHead,
    digest_of,
)
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.naming import (
    binding_of,
    by_server,
    certificate_of,
    countersigned,
    load_authorities,
    load_certificate,
    signed_head,
)
from simulations.loopback import issue
from tests.server.loopback import PATIENCE, POPULATION_ID, site, until

PARAMETERS = {"w": np.ones((2, 3), np.float32)}
LAYOUT = Layout.of(PARAMETERS)
CLIPPING = Clipping(LAYOUT, flat(LAYOUT, 1.0))
USERS = {"a": ["0", "1"], "b": ["2", "3"], "c": ["4", "5"], "one": ["6"]}
EVENT = poisson_gaussian(0.5, 1.0, population=7)
OTHER_EVENT = poisson_gaussian(0.5, 2.0, population=7)
PRICE = Price(EVENT, 0, 1e6, 1e-6, 0)
LOCAL = LocalTraining(0.1, epochs=1, max_examples=3)
TWO_LEDGERS = "the server has shown two ledgers in this run"
Change = Callable[["World", RoundOffer], RoundOffer]


def charge(
    ledger: Ledger, number: int, run: str = "run", event: object = EVENT, cohort: str = "0" * 64
) -> None:
    ledger.charge(ProposedCharge(run, number, 0, Randomness.OPERATING_SYSTEM, event, cohort))


def request(number: int, run: str = "run") -> RoundRequest:
    return RoundRequest(run, number, 0, PARAMETERS, CLIPPING, LOCAL, np.arange(7), bytes(32))


@dataclass(frozen=True)
class Player:
    """In place of a node's worker; its user adds 1 to each component."""

    loaded: Loaded
    built: Built = Built(LAYOUT, Layout((), ()))  # noqa: RUF009 - frozen

    async def prepare(self, _: object) -> None:
        pass

    async def learn(self, _: object) -> None:
        pass

    async def close(self) -> None:
        pass

    async def train(self, *_: object) -> PartialSum:
        return PartialSum("", 1, np.ones(6, np.int64), 1)


class Players:
    """In place of the class of workers."""

    async def start(self, settings: HostSettings) -> Player:
        users = USERS[settings.users]
        return Player(Loaded(len(users), digest_of(users), bytes(8 * len(users))))


@dataclass
class World:
    """A server, the ledger that it shows each node, and nodes that run."""

    folder: Path
    loop: asyncio.AbstractEventLoop
    ledgers: dict[str, Ledger] = field(default_factory=dict)  # by node
    running: dict[str, Future[None]] = field(default_factory=dict)
    change: Change = lambda _, offer: offer  # of offers
    sign: Callable[["World", RoundId, Head], SignedHead | None] = lambda world, *what: world.signed(
        *what
    )

    @property
    def node(self) -> str:
        """The node whose call is handled."""
        return NODE.get("a")

    def since(self, head: Head | None) -> tuple[int, Iterator[str]] | None:
        return self.ledgers[self.node].since(head)

    def signed(self, attempt: RoundId, head: Head, bundle: str = "server/server") -> SignedHead:
        """A head, signed by the certificate and key of these files."""
        path = self.site.certs / bundle
        certificate, key = load_certificate(path.with_suffix(".pem")), path.with_suffix(".key")
        return signed_head(POPULATION_ID, attempt, head, certificate, key.read_bytes())

    def identity(self, node: str) -> Identity:
        return identity_of(self.site.certs / "nodes" / node, None)

    def join(self, node: str, *, verify: bool = True) -> None:
        """Start a node, and wait until it is there."""
        settings = NodeSettings(
            self.site.target,
            HostSettings(node),
            self.site.certs / "nodes" / node,
            verify_ledger=verify,
            state=self.folder / "states" / node,
            backoff=Backoff(0.01, 0.05),
        )
        self.running[node] = asyncio.run_coroutine_threadsafe(take_part(settings), self.loop)
        until(lambda: self.site.server.service.connections.of(node))

    def leave(self, node: str) -> None:
        """Stop a node, and wait until it is gone."""
        self.running.pop(node).cancel()
        until(lambda: self.site.server.service.connections.of(node) is None)

    def transport(self, least: int = 2) -> GrpcTransport:
        changes = {"least_nodes": least, "patience_seconds": 60.0, "deadline_seconds": 30.0}
        section = PATIENCE.model_copy(update=changes)
        return GrpcTransport(self.site.server, lambda _: PRICE, section)

    def answers(self, number: int, run: str = "run", least: int = 2) -> set[str]:
        """The nodes that send a sum in a round."""
        transport = self.transport(least)
        transport.prepare(request(number, run))
        return {partial.node for partial in transport.collect(request(number, run))}

    def objection(self, node: str, number: int = 1) -> str:
        """Why a node votes against a round."""
        service, transport = self.site.server.service, self.transport()
        ballot = transport._ballot(request(number))
        self.site.server.call(lambda: service.propose(ballot))
        until(lambda: ballot.agrees(node) is not None)
        return ballot._votes[node].objection

    def proofs(self, node: str) -> list[tuple[str, str, bytes, bytes, bytes]]:
        with sqlite3.connect(self.folder / "states" / node / "journal.sqlite") as journal:
            rows = journal.execute("SELECT * FROM equivocations").fetchall()
        journal.close()
        return rows

    @contextmanager
    def serving(self, folder: Path) -> Iterator[None]:
        """A server that begins anew, with the same certificates."""
        with site(folder, USERS, ledger=self.since) as self.site:
            yield

    def ledger(self, name: str, *events: object) -> Ledger:
        """A ledger with charges of a former run."""
        ledger = Ledger.open_or_create(self.folder / name, POPULATION_ID)
        for number, event in enumerate(events, 1):
            charge(ledger, number, "former", event)
        return ledger

    def fork(self, name: str, *events: object) -> Ledger:
        """A copy of the ledger of "a" that goes on by itself."""
        shutil.copy(self.folder / "a.sqlite", self.folder / name)
        ledger = Ledger.open(self.folder / name)
        for number, event in enumerate(events, ledger.head.count + 1):
            charge(ledger, number, "former", event)
        return ledger


class ShownBallot(Ballot):
    """A ballot that shows each node the head of its own ledger."""

    def __init__(self, world: World, terms: Proposal) -> None:
        self._world = world
        self.heads: dict[str, SignedHead | None] = dict.fromkeys(world.ledgers)
        super().__init__(terms)
        heads = {node: ledger.head for node, ledger in world.ledgers.items()}
        signed = {head: world.sign(world, self.id, head) for head in {*heads.values()}}
        self.heads = {node: signed[head] for node, head in heads.items()}

    @property
    def head(self) -> SignedHead | None:
        return self.heads[self._world.node]

    @head.setter
    def head(self, _: object) -> None:
        pass

    @property
    def message(self) -> pb.FromServer:
        sent = replace(self.terms, id=self.id, head=self.head)
        return pb.FromServer(proposal=PROPOSAL.encode(sent))

    @message.setter
    def message(self, _: object) -> None:
        pass


async def _ended() -> None:
    """Wait until all that was cancelled on this loop has ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


@pytest.fixture
def world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[World]:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(membership, "Worker", Players())
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    made = World(tmp_path, loop)
    ballots: list[ShownBallot] = []

    def ballot(_: GrpcTransport, asked: RoundRequest) -> Ballot:
        price = replace(PRICE, charges=min(ledger.head.count for ledger in made.ledgers.values()))
        ballots.append(ShownBallot(made, Proposal.of(asked, price)))
        return ballots[-1]

    honest = Collection.offer_to

    def offer_to(collection: Collection, node: str) -> RoundOffer | None:
        if (offer := honest(collection, node)) is None:
            return None
        head = next(b.heads[node] for b in ballots if b.id == offer.id)
        return made.change(made, replace(offer, head=head))

    monkeypatch.setattr(GrpcTransport, "_ballot", ballot)
    monkeypatch.setattr(Collection, "offer_to", offer_to)
    with ExitStack() as stack:
        stack.enter_context(made.serving(tmp_path))
        stack.callback(loop.close)
        stack.callback(thread.join)
        stack.callback(loop.call_soon_threadsafe, loop.stop)
        stack.callback(lambda: asyncio.run_coroutine_threadsafe(_ended(), loop).result(60.0))
        made.ledgers = dict.fromkeys(USERS, made.ledger("a.sqlite", EVENT, EVENT))
        yield made
        for node in [*made.running]:
            made.leave(node)


def forked(world: World) -> Ledger:
    """The last charge is of another cohort."""
    other = world.fork("other.sqlite")
    charge(world.ledgers["a"], 3, "former")
    charge(other, 3, "former", cohort="1" * 64)
    return other


def altered(world: World) -> Ledger:
    """The last charge costs less."""
    other = world.fork("other.sqlite", OTHER_EVENT)
    charge(world.ledgers["a"], 3, "former")
    return other


def truncated(world: World) -> Ledger:
    """The last charge is missing."""
    other = world.fork("other.sqlite")
    charge(world.ledgers["a"], 3, "former")
    return other


def replaced(world: World) -> Ledger:
    """It is another ledger of the same population."""
    return world.ledger("other.sqlite", EVENT, EVENT)


@pytest.mark.parametrize("other", [forked, altered, truncated, replaced])
def test_two_ledgers_are_noticed_in_the_round_and_for_ever_with_proof(
    world: World, caplog: pytest.LogCaptureFixture, other: Callable[[World], Ledger]
) -> None:
    world.ledgers["b"] = other(world)
    for node in ("a", "b"):
        world.join(node)
    assert world.answers(1) == set()
    assert caplog.text.count("two ledgers: the server shows this node") == 2
    assert TWO_LEDGERS in caplog.text
    for node in ("a", "b"):  # the journal remembers, also if all ledgers agree now
        world.leave(node)
        world.ledgers = dict.fromkeys(USERS, world.ledgers["a"])
    world.join("a")
    assert world.objection("a", 2) == TWO_LEDGERS
    assert world.answers(1, "another run", least=1) == {"a"}

    # What anybody with the authority's certificate can check.
    authorities = load_authorities(world.site.certs / "authority" / "ca.pem")
    for node, shown_to in (("a", "b"), ("b", "a")):
        ((population, run, *blobs),) = world.proofs(node)
        attempt, mine, theirs = (
            codec.decode(codec.message.FromString(blob))
            for codec, blob in zip((ROUND_ID, HEAD, COUNTERSIGNATURE), blobs, strict=True)
        )
        assert (population, run, attempt.run) == (POPULATION_ID, "run", "run")
        assert mine.head != theirs.head.head
        for head in (mine, theirs.head):
            assert by_server(head, population, attempt, authorities)
        assert theirs.node == shown_to
        binding = binding_of(population, attempt, EVENT, theirs.head)
        signer = certificate_of(theirs, binding)
        assert signer == world.identity(shown_to).certificate


def test_an_honest_server_is_never_suspected(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Nodes that do not verify, that are late or start again, a server that starts again."""
    ledger = world.ledgers["a"]
    world.join("a")
    world.join("b", verify=False)
    assert world.answers(1) == {"a", "b"}
    assert "nodes that know this ledger: a, b" in caplog.text
    charge(ledger, 1)
    world.leave("a")
    world.join("a")
    charge(ledger, 1, "another run")
    transport = world.transport()
    transport.prepare(request(2))
    charge(ledger, 2, "another run")  # between proposal and offer
    world.join("c")  # it has voted on nothing
    assert {partial.node for partial in transport.collect(request(2))} == {"a", "b", "c"}
    charge(ledger, 2)
    world.transport().prepare(request(3))  # the server ends before it draws anybody
    assert world.answers(3) == {"a", "b", "c"}
    charge(ledger, 3)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not [proof for node in ("a", "b", "c") for proof in world.proofs(node)]


def test_no_node_learns_of_a_node_of_one_user(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    for node in ("a", "b", "one"):
        world.join(node)
    assert world.answers(1, least=3) == {"a", "b", "one"}
    assert caplog.text.count("nodes that know this ledger: a, b\n") == 3


# Rosters.

FORMER: list[RoundOffer] = []


def roster_with(offer: RoundOffer, **changes: object) -> RoundOffer:
    """An offer whose signature of b is changed."""
    first, second = offer.roster
    return replace(offer, roster=(first, replace(second, **changes)))


def signed_by(world: World, offer: RoundOffer, who: Identity, head: SignedHead) -> Countersignature:
    """What "b" would sign, with another's certificate or of another head."""
    assert who.certificate is not None
    binding = binding_of(POPULATION_ID, offer.id, offer.price.event, head)
    made = countersigned("b", b"", binding, who.certificate, who.key)
    return replace(made, head=head)


def of_a_former_round(world: World, offer: RoundOffer) -> RoundOffer:
    """A roster that was true once."""
    FORMER.append(offer)
    return replace(offer, roster=FORMER[0].roster)


def of_another_run(world: World, offer: RoundOffer) -> RoundOffer:
    own, attempt = world.identity("b"), replace(offer.id, run="another")
    head = world.signed(attempt, Head(0, "00" * 32))
    return replace(offer, roster=(offer.roster[0], signed_by(world, offer, own, head)))


def of_a_stranger(world: World, offer: RoundOffer) -> RoundOffer:
    """Another authority has issued the certificate."""
    folder = world.folder / "others"
    if not folder.exists():
        certificates.init(folder, ["localhost"])
        issue(folder, "b")
    who = identity_of(folder / "nodes" / "b", None)
    return replace(offer, roster=(offer.roster[0], signed_by(world, offer, who, offer.head)))


def by_another_node(world: World, offer: RoundOffer) -> RoundOffer:
    other = signed_by(world, offer, world.identity("c"), offer.head)
    return replace(offer, roster=(offer.roster[0], other))


def of_an_invented_head(world: World, offer: RoundOffer) -> RoundOffer:
    """The head is signed by a certificate that is not for servers: b would bring the run down."""
    head = world.signed(offer.id, Head(7, "00" * 32), "nodes/b/node")
    own = signed_by(world, offer, world.identity("b"), head)
    return replace(offer, roster=(offer.roster[0], own))


def of_no_head(world: World, offer: RoundOffer) -> RoundOffer:
    return roster_with(offer, head=None)


def with_a_malformed_certificate(_: World, offer: RoundOffer) -> RoundOffer:
    return roster_with(offer, certificate=b"nonsense")


def with_a_malformed_signature(_: World, offer: RoundOffer) -> RoundOffer:
    return roster_with(offer, signature=b"nonsense")


@pytest.mark.parametrize(
    "change",
    [
        of_a_former_round,
        of_another_run,
        of_a_stranger,
        by_another_node,
        of_an_invented_head,
        of_no_head,
        with_a_malformed_certificate,
        with_a_malformed_signature,
    ],
)
def test_what_no_node_has_signed_is_refused_and_proves_nothing(
    world: World, change: Change, caplog: pytest.LogCaptureFixture
) -> None:
    FORMER.clear()
    for node in ("a", "b"):
        world.join(node)
    world.change = change
    number = 1
    if change is of_a_former_round:
        assert world.answers(1) == {"a", "b"}
        charge(world.ledgers["a"], 1)
        number = 2
    assert world.answers(number) == set()
    assert "the offer cannot be checked or recorded:" in caplog.text
    assert "two ledgers" not in caplog.text
    world.change = lambda _, offer: offer
    assert world.answers(number) == {"a", "b"}


# Heads.


def unsigned(_: World, __: RoundId, ___: Head) -> None:
    return None


def signed_for_another_attempt(world: World, attempt: RoundId, head: Head) -> SignedHead:
    return world.signed(replace(attempt, nonce=7), head)


def signed_by_a_node(world: World, attempt: RoundId, head: Head) -> SignedHead:
    return world.signed(attempt, head, "nodes/b/node")


def damaged(world: World, attempt: RoundId, head: Head) -> SignedHead:
    return replace(world.signed(attempt, head), certificate=b"nonsense")


def of_another_ledger(world: World, attempt: RoundId, head: Head) -> SignedHead:
    return world.signed(attempt, replace(head, hash="00" * 32))


@pytest.mark.parametrize(
    ("sign", "reason"),
    [
        (unsigned, "the server has not signed the head of its ledger"),
        (signed_for_another_attempt, "the server has not signed the head of its ledger"),
        (signed_by_a_node, "the server has not signed the head of its ledger"),
        (damaged, "the server has not signed the head of its ledger"),
        (of_another_ledger, "the ledger cannot be believed"),
    ],
)
def test_nodes_vote_against_a_head_that_is_not_that_of_the_ledger(
    world: World, sign: Callable[..., SignedHead | None], reason: str
) -> None:
    world.sign = sign
    world.join("a")
    assert world.objection("a") == reason


@pytest.mark.parametrize("signature", [None, "of another head", "of another node"])
def test_a_server_takes_no_vote_that_others_would_refuse(
    world: World, monkeypatch: pytest.MonkeyPatch, signature: str | None
) -> None:
    """So a node that lies about what it was shown ends no round of others."""

    def lie(_: object, welcome: object, proposal: Proposal) -> Countersignature | None:
        del welcome
        if signature is None:
            return None
        head, who = proposal.head, world.identity("b")
        if signature == "of another head":
            head = replace(head, hash="00" * 32)
        else:
            who = world.identity("c")
        binding = binding_of(POPULATION_ID, proposal.id, EVENT, head)
        return countersigned("b", b"", binding, who.certificate, who.key)

    monkeypatch.setattr(membership.OfferHandler, "_countersignature", lie)
    world.join("b")
    assert world.objection("b") == "the vote is not signed by the node"
