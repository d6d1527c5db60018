"""Nodes with certificates, and a server that they need not trust, without gRPC between them."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np

from fedpriv.clients.connection import Backoff, Identity, identity_of
from fedpriv.clients.consent import Consent
from fedpriv.clients.journal import Journal
from fedpriv.clients.ledger_check import LedgerVerifier, OfferPolicy
from fedpriv.clients.membership import OfferHandler
from fedpriv.clients.secure import SecureSums
from fedpriv.clients.worker import Built
from fedpriv.errors import FedprivError
from fedpriv.ledger import Head
from fedpriv.ledger.events import SecureSum
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import GaussianMechanism
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.round import OpenedSum, PartialSum
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.server.certificates import init
from fedpriv.server.collection import Ballot, Collection, SecureCollection
from fedpriv.server.enrolment import Enrolment
from fedpriv.training.request import LocalTraining, RoundRequest
from fedpriv.wire import (
    Countersignature,
    Price,
    Proposal,
    Receipt,
    RoundId,
    RoundOffer,
    SignedHead,
    Stage,
    Step,
    TaskDescription,
    Vote,
    Welcome,
    enrolment_digest,
)
from fedpriv.wire.naming import binding_of, fingerprint_of, load_certificate, roster_of, signed_head
from simulations.loopback import issue

PARAMETERS = {"w": np.ones((2, 3), np.float32)}
LAYOUT = Layout.of(PARAMETERS)
CLIPPING = Clipping(LAYOUT, flat(LAYOUT, 1.0))
TASK = TaskDescription("softmax", {}, 0, "cross-entropy")
USERS = 4  # at each node
HEAD = Head(1, "5f" * 32)
SECONDS = 60.0
Lie = Callable[[str, Step], Step]  # to a node, in place of the honest answer


def contribution_of(user: int) -> np.ndarray:
    """What a user adds to a sum, in steps: whole coarse steps, which nodes do not round."""
    return np.random.default_rng(user).integers(-(2**6), 2**6, LAYOUT.dimension) * 2**14


def honest(_: str, answer: Step) -> Step:
    return answer


@dataclass
class Trainer:
    """In place of a training process; it notes whom it was asked to train."""

    trained: list[np.ndarray] = field(default_factory=list)
    fails: bool = False
    built: Built = Built(LAYOUT, Layout((), ()))  # noqa: RUF009 - frozen

    async def train(self, request: RoundRequest, seconds: float) -> PartialSum | None:
        assert seconds > 0.0
        self.trained.append(request.users)
        if self.fails:
            return None
        total = sum(map(contribution_of, request.users.tolist()))
        return PartialSum("", request.users.size, np.asarray(total), request.users.size)


@dataclass
class Ledgers:
    """In place of a verifier: the charged attempts that a node is shown."""

    rows: list[SimpleNamespace] = field(default_factory=list)

    async def examined(self, *_: object) -> SimpleNamespace:
        return SimpleNamespace(ledger=SimpleNamespace(rows=self.rows))


@dataclass
class Site:
    """A node."""

    identity: Identity
    secure: SecureSums
    trainer: Trainer
    welcome: Welcome
    steps: list[Step] = field(default_factory=list)  # that it took
    uploads: int = 0

    @property
    def name(self) -> str:
        return self.identity.node

    def countersignature(self, terms: Proposal) -> Countersignature:
        secure = self.secure
        parts = secure.server, secure.worker, secure.policy, secure.backoff
        return OfferHandler(*parts, secure)._countersignature(self.welcome, terms)


class World:
    """An enrolment with certificates, its nodes, and one server."""

    def __init__(
        self,
        folder: Path,
        nodes: int = 5,
        secure: SecureSum | None = None,
        *,
        verify: bool = False,
        public: Callable[[Head | None], Iterator[str]] | None = None,
        head: Callable[[], Head] = lambda: HEAD,
    ) -> None:
        """With `verify`, nodes check ledgers that are told what to say; with `public`, a true one.

        `public` returns the ledger's lines after a head, and `head` its head.
        """
        self.folder, self.server, self.grace = folder, _Server(), SECONDS
        self.public, self.head = public, head
        init(folder, ["localhost"])
        names = [f"n{number}" for number in range(nodes)]
        identities = [identity_of(issue(folder, name).folder, None) for name in names]
        users = {name: [f"{name}-{user}" for user in range(USERS)] for name in names}
        prints = {
            one.node: fingerprint_of(one.certificate) for one in identities if one.certificate
        }
        self.enrolment = Enrolment("ab" * 16, users, prints)
        self.secure = secure or SecureSum(nodes, 1, 1)
        sampling = PoissonSampling(nodes * USERS, 0.5)
        self.mechanism = GaussianMechanism.calibrated(
            sampling, CLIPPING, 1.0, (1.0,), secure_sum=self.secure
        )
        self.price = Price(self.mechanism.event, 0, 1.0, 1e-5, 0)
        digest = enrolment_digest(self.enrolment.enrolled)
        self.consent = Consent(trust="none", enrolment=digest)
        self.ledgers = {name: Ledgers() for name in names} if verify else {}
        self.heads: dict[
            str, Head
        ] = {}  # that the server shows some nodes in place of the true one
        self.sites = {one.node: self._site(one) for one in identities}

    def _site(self, identity: Identity) -> Site:
        name = identity.node
        journal = Journal(self.folder / f"{name}.sqlite")
        backoff = Backoff(0.001, 0.001)
        stub: Any = SimpleNamespace(
            fetch_ledger=self._fetch_ledger,
            download=self.server.download,
            upload_masked=partial(self.server.upload, name),
            exchange=partial(self.server.exchange, name),
        )
        verifier: Any = self.ledgers.get(name)
        if self.public is not None:
            verifier = LedgerVerifier(stub, journal, backoff)
        digests = np.arange(USERS)
        policy = OfferPolicy(journal, self.consent, verifier, digests, identity.authorities)
        trainer: Any = Trainer()
        secure = SecureSums(stub, trainer, policy, identity, backoff)
        users, nodes = self.enrolment.users_of(name).copy(), self.enrolment.enrolled
        population = self.enrolment.population
        welcome = Welcome(self.enrolment.population_id, population, users, TASK, "", nodes)
        return Site(identity, secure, trainer, welcome)

    async def _fetch_ledger(self, head: Head | None) -> Iterator[str]:
        assert self.public is not None
        return self.public(head)

    def restarted(self, name: str) -> None:
        """A node's process begins anew, with its journal."""
        self.sites[name] = self._site(self.sites[name].identity)

    def unvoted(self, number: int, attempt: int = 0) -> Ballot:
        """A proposal of an attempt."""
        local = LocalTraining(0.1, epochs=1, max_examples=3)
        terms = Proposal(RoundId("run", number, attempt), CLIPPING, local, (), self.price)
        return Ballot(terms, partial(self.signed, self.head()))

    def proposal(self, number: int = 1) -> Ballot:
        """A proposal of an attempt, on which all nodes have voted."""
        ballot = self.unvoted(number)
        terms = ballot.terms
        for name, site in self.sites.items():
            head = ballot.head
            if name in self.heads:
                head = self.signed(self.heads[name], ballot.id)
            shown = replace(terms, id=ballot.id, head=head)
            signature = site.countersignature(shown)
            ballot.count(name, Vote(ballot.id, "", replace(signature, head=head)))
        return ballot

    def signed(self, head: Head, attempt: RoundId) -> SignedHead:
        """A head as the server signs it."""
        path = self.folder / "server"
        certificate, key = load_certificate(path / "server.pem"), (path / "server.key").read_bytes()
        return signed_head(self.enrolment.population_id, attempt, head, certificate, key)

    def collection(self, ballot: Ballot) -> tuple[SecureCollection, RoundOffer]:
        """The collection of a voted attempt, and its offer to the nodes."""
        terms, nobody = ballot.terms, np.empty(0, np.int64)
        at = "run", terms.id.round, terms.id.attempt
        request = RoundRequest(*at, PARAMETERS, CLIPPING, terms.local, nobody, bytes(32))
        signatures = ballot.roster(list(self.sites))
        collection = Collection(request, ballot, signatures, self.enrolment, SECONDS)
        name, event = self.enrolment.population_id, self.price.event
        binding = binding_of(name, ballot.id, event, ballot.head)

        async def watch() -> None:
            while collection.waiting:
                await asyncio.sleep(0.001)
                for name in self.server.gone:
                    collection.settle(name, None)
            collection.finish()

        roster = roster_of(signatures, binding)
        times = self.server, SECONDS, self.grace
        secure = SecureCollection(self.secure, roster, collection, watch, *times)
        return secure, collection.offer

    async def attempt(
        self,
        lie: Lie = honest,
        *,
        number: int = 1,
        gone: Mapping[Stage, Sequence[str]] | None = None,
        charge: bool = True,
        change: Callable[[str, RoundOffer], RoundOffer] = lambda _, offer: offer,
    ) -> tuple[OpenedSum | None, dict[str, FedprivError | None]]:
        """Carry out an attempt; return the opened sum, and why each node dropped out, if it did.

        The server answers with `lie`, and changes offers with `change`; nodes leave before steps.
        """
        collected, offer = self.collection(self.proposal(number))
        self.server.begin(collected, lie, gone or {})
        for name, ledger in self.ledgers.items():
            del name
            ledger.rows.clear()

        async def taking_part(site: Site) -> FedprivError | None:
            deadline = asyncio.get_running_loop().time() + SECONDS
            try:
                await site.secure.take_part(site.welcome, change(site.name, offer), deadline)
            except FedprivError as error:
                if site.name not in self.server.stays:
                    self.server.gone.add(site.name)
                return error
            except grpc.aio.AioRpcError:
                return None
            return None

        tasks = {n: asyncio.create_task(taking_part(s)) for n, s in self.sites.items()}
        opened = None
        async with asyncio.timeout(SECONDS):
            if await collected.collect():
                if charge:
                    row = SimpleNamespace(
                        run="run", round=number, attempt=0, event=self.price.event
                    )
                    for ledger in self.ledgers.values():
                        ledger.rows.append(row)
                opened = await collected.open()
            collected.collection.abandon()
            collected.exchange.end()
            return opened, {name: await task for name, task in tasks.items()}

    def expected(self, *without: str) -> np.ndarray:
        """The sum of all users that nodes have drawn last, but those of some nodes."""
        total = np.zeros(LAYOUT.dimension, np.int64)
        for name, site in self.sites.items():
            if name not in without and site.trainer.trained:
                total += sum(map(contribution_of, site.trainer.trained[-1].tolist()))
        return total


class LeftError(FedprivError):
    """A node has left."""


class _Server:
    """What nodes call."""

    def __init__(self) -> None:
        self.gone = set[str]()
        self.stays = set[str]()  # connected though they take no further step
        self.taken: dict[str, list[Step]] = {}
        self.uploads: dict[str, list[np.ndarray]] = {}

    def begin(
        self, collected: SecureCollection, lie: Lie, gone: Mapping[Stage, Sequence[str]]
    ) -> None:
        self.collected, self.lie, self.leaving, self.gone = collected, lie, gone, set()
        self.began = monotonic()

    def _leave(self, name: str, stage: Stage) -> None:
        if name in self.leaving.get(stage, ()):
            self.gone.add(name)
            raise LeftError(f"{name} has left")

    def seconds_left(self, waiting: Sequence[str], _deadline: float, _absent: float) -> float:
        """How long to wait for nodes, as `Connections` say."""
        return 0.002 * bool(set(waiting) - self.gone)

    async def download(self, _: RoundId, _model: Layout) -> dict[str, np.ndarray]:
        return PARAMETERS

    async def upload(self, name: str, _: RoundId, masked: np.ndarray) -> Receipt:
        self._leave(name, Stage.AGREE)
        self.uploads.setdefault(name, []).append(masked.copy())
        collection = self.collected.collection
        if collection.settle(name, PartialSum(name, 0, masked.astype(np.int64), 0)):
            await collection.until_taken()
            return Receipt(accepted=True)
        return Receipt(accepted=False, reason="the round is over")

    async def exchange(self, name: str, step: Step) -> Step:
        if step.stage is not Stage.AGREE:
            self._leave(name, step.stage)
        self.taken.setdefault(name, []).append(step)
        return self.lie(name, await self.collected.exchange.answer_to(name, step))
