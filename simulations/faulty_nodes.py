"""Nodes that take part in ways that nodes should not, and a network that can be cut."""

import asyncio
import socket
import threading
import tomllib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from fedpriv.clients.connection import FederationStub, Identity, identity_of
from fedpriv.privacy.layout import Layout
from fedpriv.privacy.round import PartialSum
from fedpriv.wire import (
    Hello,
    Proposal,
    RoundAnswer,
    RoundOffer,
    Vote,
    Welcome,
    chunks,
    digest_of,
    encode_answer,
    pieces,
    sum_to_send,
)
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.naming import SERVICE
from simulations.load_nodes import agreeing

Offers = AsyncIterator[RoundOffer]
Behaviour = Callable[[FederationStub, Offers], Awaitable[None]]


async def take_part(folder: Path, name: str, port: int, behaviour: Behaviour) -> None:
    """Take part as a node of a folder that `loopback.lay_out` made, until the behaviour ends."""
    enrolled = tomllib.loads((folder / "enrolment.toml").read_text(encoding="utf-8"))
    hello = Hello(name, digest_of(enrolled["nodes"][name]["users"]))
    identity = identity_of(folder / "certs" / "nodes" / name, None)
    async with (
        FederationStub.open(f"localhost:{port}", identity) as stub,
        aclosing(_offers(stub, identity, hello)) as offers,
    ):
        await behaviour(stub, offers)


async def _offers(
    stub: FederationStub, identity: Identity, hello: Hello
) -> AsyncGenerator[RoundOffer, None]:
    votes, population = asyncio.Queue[Vote](), ""
    async with aclosing(stub.connect(hello, votes)) as messages:
        async for message in messages:
            if isinstance(message, Welcome):
                population = message.population_name
            elif isinstance(message, Proposal):
                votes.put_nowait(agreeing(population, message, identity))
            elif isinstance(message, RoundOffer):
                yield message


def _parts(offer: RoundOffer, total: npt.NDArray[np.int64]) -> list[bytes]:
    """Return an upload of this sum of all drawn users."""
    users = len(offer.users)
    content, tensors = sum_to_send(PartialSum("", users, total, users))
    parts = [pb.UploadPart(answer=encode_answer(RoundAnswer(offer.id, content)))]
    parts += [pb.UploadPart(chunk=chunk) for chunk in chunks(pieces(tensors))]
    return [part.SerializeToString() for part in parts]


async def _upload(stub: FederationStub, parts: list[bytes]) -> None:
    await stub.channel.stream_unary(f"/{SERVICE}/Upload")(iter(parts))


def _zeros(offer: RoundOffer) -> npt.NDArray[np.int64]:
    return np.zeros(offer.clipping.layout.dimension, np.int64)


async def too_long(stub: FederationStub, offers: Offers) -> None:
    """Send a sum that no users of the round could make."""
    offer = await anext(offers)
    await _upload(stub, _parts(offer, _zeros(offer) + 2**40))


async def misshapen(stub: FederationStub, offers: Offers) -> None:
    """Send a sum with one component too many."""
    offer = await anext(offers)
    await _upload(stub, _parts(offer, np.append(_zeros(offer), 1)))


async def malformed(stub: FederationStub, offers: Offers) -> None:
    """Send bytes that are not a message."""
    await anext(offers)
    await _upload(stub, [b"\xff" * 100])


async def replayed(stub: FederationStub, offers: Offers) -> None:
    """Answer two offers with the same message."""
    offer = await anext(offers)
    parts = _parts(offer, _zeros(offer))
    await _upload(stub, parts)
    await anext(offers)
    await _upload(stub, parts)


async def late(stub: FederationStub, offers: Offers) -> None:
    """Answer after the deadline."""
    offer = await anext(offers)
    await asyncio.sleep(offer.seconds + 1.0)
    await _upload(stub, _parts(offer, _zeros(offer)))


async def killed(stub: FederationStub, offers: Offers) -> None:
    """Fetch the model, and disappear."""
    offer = await anext(offers)
    await stub.download(offer.id, offer.model(Layout((), ())))


async def vanishing(stub: FederationStub, offers: Offers) -> None:
    """Send the beginning of an answer, and disappear."""
    offer = await anext(offers)
    call = stub.channel.stream_unary(f"/{SERVICE}/Upload")()
    await call.write(_parts(offer, _zeros(offer))[0])
    await asyncio.sleep(0.5)
    call.cancel()


class Network:
    """Forwards connections to `port` to another port of this machine, until they are cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()

    def cut(self) -> None:
        """End all connections, and refuse new ones."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                node, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._open += [node, server]
                for ends in ((node, server), (server, node)):
                    threading.Thread(target=_pump, args=ends, daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(2**16):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)
