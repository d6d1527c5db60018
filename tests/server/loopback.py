"""A real server on loopback, and nodes made for tests: each a thread with its own channel."""

import queue
import ssl
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import tomli_w
from cryptography import x509

from fedpriv import wire
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.experiment.config import FederationSection
from fedpriv.ledger import Head
from fedpriv.privacy.layout import Layout, Tensors
from fedpriv.privacy.round import PartialSum
from fedpriv.server import certificates
from fedpriv.server.certificates import tls_context
from fedpriv.server.deployment import GrpcTransport
from fedpriv.server.enrolment import EnrolledCertificates, Enrolment
from fedpriv.server.gateway import (
    Authentication,
    Identify,
    RateLimit,
    by_certificate,
)
from fedpriv.server.service import Listener, Service, TransferLimits, listening
from fedpriv.training.request import RoundRequest
from fedpriv.wire import RunState, Status, TaskDescription, Welcome
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.naming import Address, fingerprint_of
from simulations.loopback import issue
from tests.wire.stub import FederationStub, received

PRICE = wire.Price(poisson_gaussian(0.5, 1.0, population=1000), 0, 2.0, 1e-6, 0)
PATIENCE = FederationSection(
    enrolment="none", deadline_seconds=20.0, absent_seconds=0.2
).model_copy(update={"least_nodes": 0})
TRANSFERS = TransferLimits(uploads=4, seconds=30.0)
NO_LIMIT = RateLimit(10**9)
TASK = TaskDescription("softmax", {}, 0, "cross-entropy")
POPULATION_ID = "5f" * 16
MODEL = bytes(range(256)) * 10_000  # some chunks
LEDGER = b'{"a line": 1}\n' * 200_000  # some chunks


LedgerSince = Callable[[Head | None], tuple[int, Iterator[str]] | None]


def ledger_since(_: Head | None) -> tuple[int, Iterator[str]]:
    """A ledger that is the same for all."""
    return len(LEDGER), iter([LEDGER.decode()])


@dataclass(frozen=True)
class Site:
    """A server that runs, with the folder of its certificates."""

    certs: Path
    enrolment: Enrolment
    server: Listener

    @property
    def target(self) -> str:
        return f"localhost:{self.server.address.port}"

    def transport(self, patience: FederationSection = PATIENCE) -> GrpcTransport:
        return GrpcTransport(self.server, lambda _: PRICE, patience)

    def channel(self, node: str | None) -> grpc.Channel:
        """A channel with the certificate of a node; None: without one."""
        bundle = None if node is None else self.certs / "nodes" / node
        return channel_to(self.server.address.port, self.certs, bundle)


@dataclass(frozen=True)
class RemoteSite:
    """A server that runs in another process."""

    certs: Path
    enrolment: Enrolment
    port: int

    def channel(self, node: str) -> grpc.Channel:
        return channel_to(self.port, self.certs, self.certs / "nodes" / node)


def channel_to(port: int, certs: Path, bundle: Path | None) -> grpc.Channel:
    """A channel with the certificate of a bundle; None: without one."""
    key = certificate = None
    if bundle is not None:
        key, certificate = ((bundle / f"node.{end}").read_bytes() for end in ("key", "pem"))
    ca = (certs / "authority" / "ca.pem").read_bytes()
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    options = [("grpc.max_receive_message_length", wire.NODE_RECEIVES_BYTES)]
    return grpc.secure_channel(f"localhost:{port}", credentials, options)


def enrol(certs: Path, users: Mapping[str, Sequence[str]]) -> Path:
    """Write an enrolment of these users, with the certificates that their nodes have now."""
    nodes = {}
    for node, ids in users.items():
        pem = (certs / "nodes" / node / "node.pem").read_bytes()
        fingerprint = fingerprint_of(x509.load_pem_x509_certificate(pem))
        nodes[node] = {"users": list(ids), "certificate": fingerprint}
    return write_enrolment(certs, nodes)


def strike(certs: Path, node: str) -> None:
    """Strike a node's certificate off the enrolment."""
    table = tomllib.loads((certs / "enrolment.toml").read_text(encoding="utf-8"))
    del table["nodes"][node]["certificate"]
    write_enrolment(certs, table["nodes"])


def write_enrolment(certs: Path, nodes: Mapping[str, object]) -> Path:
    """Write an enrolment, in place of another, all at once."""
    path, partial = certs / "enrolment.toml", certs / "enrolment.partial"
    partial.write_text(tomli_w.dumps({"population": POPULATION_ID, "nodes": nodes}), "utf-8")
    return partial.replace(path)


@contextmanager
def site(
    folder: Path,
    users: Mapping[str, Sequence[str]],
    transfers: TransferLimits = TRANSFERS,
    calls_per_minute: int = 100_000,
    ledger: LedgerSince = ledger_since,
    task: TaskDescription = TASK,
) -> Iterator[Site]:
    """A server for these users, whose nodes have certificates."""
    certs = folder / "certs"
    certificates.init(certs, ["localhost", "127.0.0.1"])
    for node in users:
        issue(certs, node)
    identify = by_certificate(EnrolledCertificates(enrol(certs, users)))
    rates = RateLimit(calls_per_minute)
    with serving(
        certs, users, identify, tls_context(certs / "server"), transfers, rates, ledger, task
    ) as made:
        yield made


@contextmanager
def serving(
    certs: Path,
    users: Mapping[str, Sequence[str]],
    identify: Identify,
    tls: ssl.SSLContext | None,
    transfers: TransferLimits = TRANSFERS,
    rates: RateLimit = NO_LIMIT,
    ledger: LedgerSince = ledger_since,
    task: TaskDescription = TASK,
) -> Iterator[Site]:
    """A server that knows its callers so."""
    enrolment = Enrolment(POPULATION_ID, users)
    status = Status(
        "run", 0, 5, 0.5, 1.0, 1e-6, len(users), 0, enrolment.population, RunState.WAITING
    )

    def welcome_of(node: str) -> Welcome:
        return Welcome(POPULATION_ID, enrolment.population, enrolment.users_of(node).copy(), task)

    authentication = Authentication(identify, enrolment, rates)
    service = Service(authentication, welcome_of, status, transfers, ledger)
    service.model = lambda: MODEL
    with listening(service, Address("127.0.0.1", 0), tls) as server:
        yield Site(certs, enrolment, server)


Answering = Callable[[wire.RoundOffer, RoundRequest], Iterable[pb.UploadPart] | None]
"""Makes the parts of an upload; None: sends nothing."""


@dataclass
class TestNode:
    """A node of the simplest kind: it answers each offer once, as a function says.

    It agrees to every proposal, once it has said these objections.
    """

    __test__ = False

    site: Site | RemoteSite
    name: str
    answering: Answering
    objections: Iterator[str] = field(default_factory=lambda: iter(()))
    welcomed: threading.Event = field(default_factory=threading.Event)
    receipts: list[wire.Receipt] = field(default_factory=list)
    ended: list[grpc.StatusCode] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.channel = self.site.channel(self.name)
        self.stub = FederationStub(self.channel)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def hello(self) -> pb.Hello:
        digest = wire.digest_of(self.site.enrolment.users[self.name])
        return wire.HELLO.encode(wire.Hello(self.name, digest))

    def _run(self) -> None:
        said: queue.SimpleQueue[pb.FromNode | None] = queue.SimpleQueue()
        said.put(pb.FromNode(hello=self.hello()))
        stream = self.stub.Connect(iter(said.get, None), wait_for_ready=True)
        try:
            for message in stream:
                match message.WhichOneof("what"):
                    case "welcome":
                        self.welcome = wire.WELCOME.decode(message.welcome)
                        self.welcomed.set()
                    case "proposal":
                        at = wire.PROPOSAL.decode(message.proposal).id
                        objection = next(self.objections, "")
                        said.put(pb.FromNode(vote=wire.VOTE.encode(wire.Vote(at, objection))))
                    case _:
                        self._answer(message.offer)
            self.ended.append(grpc.StatusCode.OK)
        except grpc.RpcError as error:
            self.ended.append(error.code())
        finally:
            said.put(None)

    def _answer(self, message: pb.Offer) -> None:
        offer = wire.OFFER.decode(message)
        with suppress(grpc.RpcError):  # the round ended meanwhile
            parts = self.answering(offer, offer.request(self.download(offer)))
            if parts is not None:
                self.receipts.append(wire.RECEIPT.decode(self.stub.Upload(iter(parts))))

    def download(self, offer: wire.RoundOffer) -> dict[str, np.ndarray]:
        chunks = self.stub.Download(wire.ROUND_ID.encode(offer.id))
        return received(offer.model(Layout((), ())), chunks)

    def close(self) -> None:
        self.channel.close()
        self._thread.join()


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition; one that does not come fails the test."""
    end = time.monotonic() + 120.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def nodes(
    site: Site | RemoteSite, answering: Mapping[str, Answering]
) -> Iterator[dict[str, TestNode]]:
    """Nodes that are connected when the block begins."""
    with ExitStack() as stack:
        made = {}
        for name, function in answering.items():
            made[name] = TestNode(site, name, function)
            stack.callback(made[name].close)
        for node in made.values():
            assert node.welcomed.wait(20.0)
        yield made


def sends(offer: wire.RoundOffer, content: object, tensors: Tensors) -> Iterator[pb.UploadPart]:
    """The parts of an answer."""
    yield pb.UploadPart(answer=wire.encode_answer(wire.RoundAnswer(offer.id, content)))
    for chunk in wire.chunks(wire.pieces(tensors)):
        yield pb.UploadPart(chunk=chunk)


def summed(offer: wire.RoundOffer, partial: PartialSum) -> Iterator[pb.UploadPart]:
    """The answer of a node, whatever its sum is."""
    return sends(offer, *wire.sum_to_send(partial))


def clipped(offer: wire.RoundOffer, *updates: Tensors) -> Iterator[pb.UploadPart]:
    """The answer of an honest node whose users have these updates."""
    clipping, users = offer.clipping, len(updates)
    nothing = np.zeros(clipping.layout.dimension, np.int64)
    total = sum((clipping.contribution(update) for update in updates), start=nothing)
    return summed(offer, PartialSum("", users, total, users * clipping.weight_cap))
