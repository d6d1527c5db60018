"""The nodes of the load benchmark, in one process: each has its own channel and certificate."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from fedpriv.clients.connection import FederationStub, Identity, identity_of
from fedpriv.errors import WireError
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.round import PartialSum
from fedpriv.wire import (
    NODE_RECEIVES_BYTES,
    RECEIPT,
    ROUND_ID,
    Hello,
    Proposal,
    RoundAnswer,
    RoundOffer,
    SummedUpdates,
    Vote,
    Welcome,
    chunks,
    digest_of,
    encode_answer,
    parse,
    pieces,
    sum_to_send,
)
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.naming import SERVICE, binding_of, countersigned
from simulations.load_server import BARE, messages
from simulations.load_site import Site, name_of, user_of

_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
_BACKOFF_SECONDS = 2.0


class Prepared:
    """A contribution to a site, made at the first offer and ready to be sent in any round."""

    def __init__(self, site: Site, kind: int) -> None:
        self._site, self._kind = site, kind
        self._made: tuple[SummedUpdates, list[bytes]] | None = None

    def messages(self, offer: RoundOffer) -> Iterator[bytes]:
        """Yield the messages of the answer to an offer."""
        content, parts = self._made = self._made or self._make(offer.clipping)
        header = encode_answer(RoundAnswer(offer.id, content))
        yield pb.UploadPart(answer=header).SerializeToString()
        yield from parts

    def _make(self, clipping: Clipping) -> tuple[SummedUpdates, list[bytes]]:
        partial = PartialSum("", 1, self._site.contribution(self._kind, clipping), 1)
        content, tensors = sum_to_send(partial)
        uploaded = chunks(pieces(tensors))
        return content, [pb.UploadPart(chunk=chunk).SerializeToString() for chunk in uploaded]


@dataclass
class Seen:
    """Counts of events at nodes."""

    answered: int = 0  # answers that the server accepted
    lost: int = 0  # connections that were lost, and answers that could not be sent


@asynccontextmanager
async def connected(site: Site, port: int, record: Seen | None = None) -> AsyncIterator[None]:
    """Connect all nodes of a site to its server within the context.

    Each answers every offer like bare nodes: it discards the model, and sends messages that were
    made before. Nodes make no checks, whose cost would be that of other machines. A node that has
    lost its connection connects again. A refused answer ends the context.
    """
    prepared, record = [Prepared(site, kind) for kind in range(site.kinds)], record or Seen()
    async with asyncio.TaskGroup() as group:
        welcomed = [asyncio.Event() for _ in range(site.nodes)]
        tasks = [
            group.create_task(_come_back(site, number, port, prepared, event, record))
            for number, event in enumerate(welcomed)
        ]
        for event in welcomed:
            await event.wait()
        yield
        for task in tasks:
            task.cancel()


async def _come_back(
    site: Site,
    number: int,
    port: int,
    prepared: list[Prepared],
    welcomed: asyncio.Event,
    record: Seen,
) -> None:
    """Run one node until the run is over."""
    update = prepared[number % site.kinds]
    while True:
        try:
            identity = identity_of(site.node_folder(number), None)
            async with FederationStub.open(f"localhost:{port}", identity) as stub:
                await _stay(stub, identity, number, update, welcomed, record)
            return
        except grpc.aio.AioRpcError as error:
            if error.code() not in _LOST:
                raise
            record.lost += 1
        await asyncio.sleep(_BACKOFF_SECONDS * random.random())


async def _stay(
    stub: FederationStub,
    identity: Identity,
    number: int,
    update: Prepared,
    welcomed: asyncio.Event,
    record: Seen,
) -> None:
    hello, population = Hello(name_of(number), digest_of([user_of(number)])), ""
    votes = asyncio.Queue[Vote]()
    async for message in stub.connect(hello, votes):
        match message:
            case Welcome():
                population = message.population_name
                welcomed.set()
            case Proposal():
                votes.put_nowait(agreeing(population, message, identity))
            case RoundOffer():
                request = ROUND_ID.encode(message.id).SerializeToString()
                call = stub.channel.unary_stream(f"/{SERVICE}/Download")
                async for _ in call(request):
                    pass
                await _upload(stub.channel, update.messages(message))
                record.answered += 1


def agreeing(population: str, proposal: Proposal, identity: Identity) -> Vote:
    """Return a vote for a proposal, countersigned if its server has signed a ledger's head."""
    if proposal.head is None or identity.certificate is None:
        return Vote(proposal.id)
    binding = binding_of(population, proposal.id, proposal.price.event, proposal.head)
    arguments = identity.node, b"", binding, identity.certificate, identity.key
    return Vote(proposal.id, countersignature=countersigned(*arguments))


async def _upload(channel: grpc.aio.Channel, parts: Iterator[bytes]) -> None:
    data = await channel.stream_unary(f"/{SERVICE}/Upload")(parts)
    receipt = RECEIPT.decode(parse(pb.Receipt, data, NODE_RECEIVES_BYTES))
    if not receipt.accepted:
        raise WireError(f"an answer is refused: {receipt.reason}")


class BareNodes:
    """Connections of some nodes to the bare server."""

    def __init__(self, site: Site, cohort: list[int], port: int) -> None:
        identities = [identity_of(site.node_folder(number), None) for number in cohort]
        self._stubs = [
            FederationStub.open(f"localhost:{port}", identity) for identity in identities
        ]
        self._parts = messages(site.model_bytes)

    async def exchange(self) -> None:
        """Let all nodes at once download, then upload the same number of bytes, unread."""
        async with asyncio.TaskGroup() as group:
            for stub in self._stubs:
                group.create_task(self._exchange(stub.channel))

    async def _exchange(self, channel: grpc.aio.Channel) -> None:
        async for _ in channel.unary_stream(f"/{BARE}/Download")(b""):
            pass
        await channel.stream_unary(f"/{BARE}/Upload")(iter(self._parts))

    async def close(self) -> None:
        """Close all connections."""
        for stub in self._stubs:
            await stub.channel.close()
