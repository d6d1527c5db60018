"""A server that says what a test tells it to, and keeps what it hears."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

import grpc
import numpy as np
from cryptography import x509
from google.protobuf.message import Message

from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.ledger import Head, Ledger
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, flat
from fedpriv.server.certificates import init
from fedpriv.training.request import LocalTraining, RoundRequest
from fedpriv.wire import (
    OFFER,
    PROPOSAL,
    RECEIPT,
    STATUS,
    VOTE,
    WELCOME,
    Price,
    Proposal,
    Receipt,
    RoundOffer,
    Status,
    TaskDescription,
    Vote,
    Welcome,
    chunks,
    model_of,
    pieces,
)
from fedpriv.wire import federation_pb2 as pb
from simulations.loopback import issue

NODE = "hospital ä-1"
PATIENCE = 60.0  # seconds that a test waits for something that must happen
TASK = TaskDescription("softmax", {"inputs": 4, "classes": 3}, seed=0, loss="cross-entropy")
PARAMETERS = {"1.weight": np.ones((3, 4), np.float32), "1.bias": np.zeros(3, np.float32)}
PRICE = Price(poisson_gaussian(0.5, 1.0, population=100), 0, 2.0, 1e-5, 0)

Context = grpc.aio.ServicerContext
Said = Message | bytes | tuple[grpc.StatusCode, str] | None
"""A message, any bytes, an end with a status, or a good end."""


class TinyServer:
    """Answers one node.

    Attributes:
        welcome: what is said first on each connection; None: nothing.
        script: what is said next on a connection, one after the other.
        model: what Download sends.
        ledger: what FetchLedger sends, or the ledger that it sends honestly.
        ledger_requests: what FetchLedger was asked for.
        released: what FetchModel sends.
        status: what GetStatus says.
        receipts: what Upload says; when there are none left, that it takes the answer.
        hellos: what nodes said when they connected.
        votes: what they said to proposals.
        names: of the nodes that called, as the certificate or else the metadata says.
        answers: header and tensors' bytes of each upload that was read to its end.
        calls: how many of each method.
        connected: how many connections are open.
        listens: whether uploads are read at all.
        keeps: whether the bytes of uploads are kept.
        received: how many bytes of tensors uploads had.
    """

    def __init__(self, users: Iterable[int] = (3,), task: TaskDescription = TASK) -> None:
        positions = np.array(sorted(users), np.int64)
        self.welcome: Said = said(
            Welcome("people", PRICE.event.sampling.population, positions, task)
        )
        self.script: asyncio.Queue[Said] = asyncio.Queue()
        self.model: list[Said] = []
        self.ledger: list[Said] | Ledger = []
        self.ledger_requests: list[pb.LedgerRequest] = []
        self.released: list[Said] = []
        self.status: Said = None
        self.receipts: list[Said] = []
        self.hellos: asyncio.Queue[pb.Hello] = asyncio.Queue()
        self.votes: asyncio.Queue[Vote] = asyncio.Queue()
        self.names: set[str] = set()
        self.answers: asyncio.Queue[tuple[pb.Answer, bytes]] = asyncio.Queue()
        self.calls: Counter[str] = Counter()
        self.connected = self.received = 0
        self.listens = self.keeps = True

    async def offer(self, number: int = 0, **changes: object) -> RoundOffer:
        """Offer a round to the node, and have its model ready."""
        offered, self.model = make_offer(number, **changes)
        await self.script.put(said(offered))
        return offered

    async def propose(self, number: int = 0, **changes: object) -> None:
        """Propose a round to the node."""
        proposal = Proposal.of(make_offer(number)[0], PRICE)
        await self.script.put(said(replace(proposal, **changes)))

    async def connect(
        self, heard: AsyncIterator[pb.FromNode], context: Context
    ) -> AsyncIterator[Said]:
        self._count("Connect", context)
        await self.hellos.put((await anext(aiter(heard))).hello)
        self.connected += 1

        async def count() -> None:
            async for message in heard:
                await self.votes.put(VOTE.decode(message.vote))

        voting = asyncio.create_task(count())
        try:
            if isinstance(self.welcome, tuple):
                await context.abort(*self.welcome)
            if self.welcome is not None:
                yield self.welcome
            while (one := await self.script.get()) is not None:
                if isinstance(one, tuple):
                    await context.abort(*one)
                yield one
        finally:
            voting.cancel()
            self.connected -= 1

    async def download(self, _: pb.RoundId, context: Context) -> AsyncIterator[Said]:
        self._count("Download", context)
        for one in self.model:
            if isinstance(one, tuple):
                await context.abort(*one)
            yield one

    async def fetch_ledger(
        self, request: pb.LedgerRequest, context: Context
    ) -> AsyncIterator[Said]:
        self._count("FetchLedger", context)
        self.ledger_requests.append(request)
        parts = self.ledger
        if isinstance(parts, Ledger):
            found = parts.since(Head(request.count, request.hash) if request.hash else None)
            unknown: list[Said] = [pb.FilePart(unknown=True)]
            parts = ledger_parts("".join(found[1]).encode()) if found else unknown
        for one in parts:
            if isinstance(one, tuple):
                await context.abort(*one)
            yield one

    async def fetch_model(self, _: pb.ModelRequest, context: Context) -> AsyncIterator[Said]:
        self._count("FetchModel", context)
        for one in self.released:
            yield one

    async def get_status(self, _: pb.StatusRequest, context: Context) -> Said:
        self._count("GetStatus", context)
        return self.status

    async def upload(self, parts: AsyncIterator[pb.UploadPart], context: Context) -> Said:
        self._count("Upload", context)
        receipt = self.receipts.pop(0) if self.receipts else said(Receipt(accepted=True))
        if isinstance(receipt, tuple):
            await context.abort(*receipt)
        if self.listens:
            header, kept = (await anext(aiter(parts))).answer, []
            async for part in parts:
                self.received += len(part.chunk.data)
                kept += [part.chunk.data] if self.keeps else []
            await self.answers.put((header, b"".join(kept)))
        return receipt

    def _count(self, method: str, context: Context) -> None:
        self.calls[method] += 1
        self.names |= {unquote(v) for k, v in context.invocation_metadata() if k == "fedpriv-node"}
        for pem in context.auth_context().get("x509_pem_cert", ()):
            subject = x509.load_pem_x509_certificate(pem).subject
            self.names |= {str(part.value) for part in subject}


@asynccontextmanager
async def serving(
    tiny: TinyServer,
    credentials: grpc.ServerCredentials | None = None,
    port: int = 0,
    host: str = "127.0.0.1",
    compression: grpc.Compression | None = None,
) -> AsyncIterator[int]:
    """Serve on loopback until the block is left; gives the port."""
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),), compression=compression)
    methods = {
        "Connect": grpc.stream_stream_rpc_method_handler(
            tiny.connect, pb.FromNode.FromString, _written
        ),
        "Download": grpc.unary_stream_rpc_method_handler(
            tiny.download, pb.RoundId.FromString, _written
        ),
        "Upload": grpc.stream_unary_rpc_method_handler(
            tiny.upload, pb.UploadPart.FromString, _written
        ),
        "FetchLedger": grpc.unary_stream_rpc_method_handler(
            tiny.fetch_ledger, pb.LedgerRequest.FromString, _written
        ),
        "FetchModel": grpc.unary_stream_rpc_method_handler(
            tiny.fetch_model, pb.ModelRequest.FromString, _written
        ),
        "GetStatus": grpc.unary_unary_rpc_method_handler(
            tiny.get_status, pb.StatusRequest.FromString, _written
        ),
    }
    handler = grpc.method_handlers_generic_handler("fedpriv.v1.Federation", methods)
    server.add_generic_rpc_handlers((handler,))
    address = f"{host}:{port}"
    if credentials is None:
        port = server.add_insecure_port(address)
    else:
        port = server.add_secure_port(address, credentials)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def _written(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def make_offer(number: int = 0, **changes: object) -> tuple[RoundOffer, list[Said]]:
    """An offer of round `number` to user 3, and the chunks of its model."""
    layout = Layout.of(PARAMETERS)
    request = RoundRequest(
        "run",
        number,
        0,
        PARAMETERS,
        Clipping(layout, flat(layout, 0.5)),
        LocalTraining(0.1, batch_size=2, epochs=2, max_examples=100),
        np.array([3]),
        bytes(range(32)),
    )
    offer = RoundOffer.of(request, PATIENCE, PRICE)
    return replace(offer, **changes), list(chunks(pieces(model_of(request))))


def said(value: Welcome | Proposal | RoundOffer | Receipt | Status) -> Message:
    """The message in which a server says a value."""
    match value:
        case Welcome():
            return pb.FromServer(welcome=WELCOME.encode(value))
        case Proposal():
            return pb.FromServer(proposal=PROPOSAL.encode(value))
        case RoundOffer():
            return pb.FromServer(offer=OFFER.encode(value))
        case Receipt():
            return RECEIPT.encode(value)
        case Status():
            return STATUS.encode(value)


def ledger_parts(data: bytes) -> list[Said]:
    """What FetchLedger sends of a ledger."""
    size = pb.FilePart(size=len(data))
    return [size, *(pb.FilePart(chunk=chunk) for chunk in chunks([data]))]


def make_certificates(folder: Path) -> tuple[grpc.ServerCredentials, Path]:
    """Credentials of a server on loopback, and the folder of the node `NODE`."""
    init(folder, ["localhost", "127.0.0.1"])
    names = ("ca.pem", "server.key", "server.pem")
    ca, key, certificate = ((folder / "server" / name).read_bytes() for name in names)
    credentials = grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)
    return credentials, issue(folder, NODE).folder
