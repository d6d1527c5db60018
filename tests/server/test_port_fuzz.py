"""Hostile bytes at the port: nothing breaks, nothing grows, and nothing of them counts.

At least 20,000 fuzzed messages: tests/wire/test_fuzz.py gives 32,000 to the decoders, and this
file 10,880 to the port of a real server: 4,080 answers to open rounds, 4,880 messages of the other
methods, and 1,920 connections that speak no protocol, or a damaged one.
The server is a process of its own, so that its memory is measured and not ours.
"""

import socket
import ssl
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from google.protobuf.message import Message

from fedpriv import wire
from fedpriv.privacy.layout import Tensors
from fedpriv.training.request import RoundRequest
from fedpriv.wire import federation_pb2 as pb
from tests.server.charged_server import ChargedServer, charged_server
from tests.server.hostile_nodes import (
    PATIENCE,
    PREFACE,
    SERVICE,
    called,
    encrypted,
    first,
    frame,
    one,
    plain,
    settings,
    uploaded,
)
from tests.server.loopback import TestNode, clipped, until
from tests.training.federation import LAYOUT
from tests.wire.test_fuzz import disturbed, mutated

HOSTILE = [f"hostile {number}" for number in range(16)]
USERS = {"witness": ["w"], "silo": ["s0", "s1", "s2"]} | {name: [name] for name in HOSTILE}
FORGED = "\nFORGED a line of the log\r\n\x1b[2J"
WAVES = 8  # of which two warm up
ROUNDS = 6  # of a wave
NOTHING = np.zeros(LAYOUT.dimension, np.int64)
GROWTH = 16 * 2**20  # bytes; a leak of 4 KB an input would pass it


def update_of(seed: int) -> Tensors:
    """An update within the clipping norm, in all but a few components of the last bits."""
    rng = np.random.default_rng(seed)
    return {
        name: (0.1 * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in zip(LAYOUT.names, LAYOUT.shapes, strict=True)
    }


class Witness:
    """An honest node that answers when it is told to, and says what it was offered."""

    def __init__(self, server: ChargedServer) -> None:
        self.offers: list[tuple[wire.RoundOffer, RoundRequest]] = []
        self.told = Event()
        self.node = TestNode(server.site, "witness", self._answer)
        assert self.node.welcomed.wait(PATIENCE)

    def _answer(self, offer: wire.RoundOffer, request: RoundRequest) -> Iterable[pb.UploadPart]:
        self.offers.append((offer, request))
        assert self.told.wait(120.0)
        self.told.clear()
        return clipped(offer, update_of(offer.id.round))

    def asked(self, server: ChargedServer) -> tuple[wire.RoundOffer, RoundRequest]:
        """What a new round asks."""
        before = len(self.offers)
        server.begin_round()
        until(lambda: len(self.offers) > before)
        return self.offers[-1]

    def close(self) -> None:
        self.told.set()
        self.node.close()


Parts = list[bytes]


def fuzzed_uploads(valid: list[pb.UploadPart], rng: np.random.Generator) -> Iterator[Parts]:
    """A valid upload with one part mutated, doubled, lost or moved, or with a part of noise."""
    streams = [mutated(part.SerializeToString(), rng) for part in valid]
    streams += [disturbed(part, rng) for part in valid]
    while True:
        parts = [part.SerializeToString() for part in valid]
        at = int(rng.integers(len(parts)))
        match int(rng.integers(8)):
            case 0:
                del parts[at]
            case 1:
                parts.insert(at, parts[int(rng.integers(len(parts)))])
            case 2:
                parts.reverse()
            case 3:
                parts.insert(at, rng.bytes(int(rng.integers(100))))
            case _:
                parts[at] = next(streams[at + len(parts) * int(rng.integers(2))])
        yield parts


def declines(offer: wire.RoundOffer) -> Iterator[Parts]:
    """Reasons that would look well in a log."""
    answer = wire.encode_answer(wire.RoundAnswer(offer.id, wire.Decline(FORGED * 3)))
    yield [pb.UploadPart(answer=answer).SerializeToString()]


def meant(parts: Parts, request: RoundRequest) -> np.ndarray:
    """What an upload that the server took adds to the sum, in steps, the obvious way."""
    header, *chunks = [pb.UploadPart.FromString(part) for part in parts]
    said, data = header.answer.sum, b"".join(part.chunk.data for part in chunks)
    if header.answer.WhichOneof("what") != "sum":
        return NOTHING
    total = np.frombuffer(data, "<i4" if said.users <= 63 else "<i8")
    (group,) = request.clipping.groups
    squares = sum(component**2 for component in total.tolist())
    legal = squares <= said.users**2 * group.squared_bound and said.weight <= said.users
    return total.astype(np.int64) if legal else NOTHING


class Attackers:
    """Nodes with valid certificates, each with a channel of its own, which send what they like."""

    def __init__(self, server: ChargedServer, stack: ExitStack) -> None:
        self.server = server
        self.channels = {
            name: stack.enter_context(server.site.channel(name)) for name in (*HOSTILE, "silo")
        }
        self.rng = np.random.default_rng(7)
        self.inputs = {"answers": 0, "messages": 0, "connections": 0}

    def answers(self, offer: wire.RoundOffer, request: RoundRequest) -> np.ndarray:
        """Answer a round in the worst ways, at once; what of it the server took, summed."""
        seeds = self.rng.integers(2**32, size=len(self.channels)).tolist()

        def attack(name: str, seed: int) -> np.ndarray:
            rng, users = np.random.default_rng(seed), 3 if name == "silo" else 1
            valid = clipped(offer, *(update_of(seed + user) for user in range(users)))
            fuzzed = fuzzed_uploads(list(valid), rng)
            tries = [next(fuzzed) for _ in range(4)]
            tries.insert(int(rng.integers(5)), next(declines(offer)))
            accepted = []
            for parts in tries:
                outcome = uploaded(self.channels[name], parts)
                if isinstance(outcome, bytes):
                    receipt = wire.RECEIPT.decode(pb.Receipt.FromString(outcome))
                    accepted += [parts] if receipt.accepted else []
            self.inputs["answers"] += len(tries)
            # What follows a sum that counts is taken for the same again, and is not read.
            return meant(accepted[0], request) if accepted else NOTHING

        with ThreadPoolExecutor(4) as pool:
            return sum(pool.map(attack, self.channels, seeds))

    def messages(self, offer: wire.RoundOffer) -> None:
        """Fuzzed requests of the other methods, from all nodes in turn."""
        hello = wire.HELLO.encode(wire.Hello("hostile 0", wire.digest_of(["hostile 0"])))
        forged = pb.Hello(node=FORGED, version=1, users_sha256=bytes(32))
        asked: dict[str, tuple[list[Message], int]] = {
            "Connect": ([pb.FromNode(hello=one) for one in (hello, forged)], 300),
            "Download": ([wire.ROUND_ID.encode(offer.id)], 200),
            "FetchLedger": ([pb.LedgerRequest()], 30),
            "FetchModel": ([pb.ModelRequest()], 30),
            "GetStatus": ([pb.StatusRequest()], 50),
        }
        channels = list(self.channels.values())
        for method, (valid, count) in asked.items():
            sources = [mutated(message.SerializeToString(), self.rng) for message in valid]
            sources += [disturbed(message, self.rng) for message in valid if message.ByteSize()]
            call = one if method == "GetStatus" else first
            for number in range(count):
                request = next(sources[number % len(sources)])
                call(channels[number % len(channels)], SERVICE + method, request)
                self.inputs["messages"] += 1

    def connections(self, offer: wire.RoundOffer) -> None:
        """Bytes that are no TLS, and damaged HTTP/2 inside TLS, with some peers that just wait."""
        port, certs = self.server.site.port, self.server.site.certs
        with ExitStack() as stack:
            waiting = [stack.enter_context(plain(port)) for _ in range(30)]
            for number, connection in enumerate(waiting):
                connection.sendall(client_hello()[: 7 * number])  # a handshake that stays begun
            for data in raw_bytes(self.rng, 130):
                with plain(port) as connection:
                    ended(connection, data)
            for data in damaged_calls(offer, self.rng, 80):
                with encrypted(port, certs, "hostile 1") as connection:
                    ended(connection, data)
        self.inputs["connections"] += 30 + 130 + 80


def client_hello() -> bytes:
    """What a TLS client says first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


def raw_bytes(rng: np.random.Generator, count: int) -> Iterator[bytes]:
    """Noise, other protocols, and damaged beginnings of TLS."""
    hellos = mutated(client_hello(), rng)
    others = [
        b"",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /fedpriv.v1.Federation/Upload HTTP/1.1\r\nContent-Length: 9999999999\r\n\r\n",
        PREFACE + settings() + called(SERVICE + "GetStatus", b""),
        b"\x16\x03\x01\xff\xff" + bytes(100),
        FORGED.encode() * 10,
    ]
    for number in range(count):
        match number % 3:
            case 0:
                yield others[number // 3 % len(others)]
            case 1:
                yield rng.bytes(int(rng.integers(1, 2000)))
            case _:
                yield next(hellos)


def damaged_calls(offer: wire.RoundOffer, rng: np.random.Generator, count: int) -> Iterator[bytes]:
    """HTTP/2 with flipped bits, cut, or with hostile frames; all methods are ASCII."""
    round_id = wire.ROUND_ID.encode(offer.id).SerializeToString()
    calls = settings(window=2**14) + called(SERVICE + "Download", round_id)
    calls += called(SERVICE + "Upload", b"\x0a\x02", stream=3, last=False)
    fuzzed = (data for data in mutated(calls, rng) if data.isascii())
    hostile = [
        settings() + b"".join(called(SERVICE + "Upload", b"", stream=s) for s in range(1, 81, 2)),
        settings() + b"".join(frame(6, 0, 0, bytes(8)) for _ in range(500)),  # pings
        settings() + b"".join(frame(3, 0, s, bytes(4)) for s in range(1, 400, 2)),  # resets
        settings(window=0) + called(SERVICE + "FetchLedger", b""),
        frame(1, 0, 1, bytes(100)) + frame(9, 0, 1, bytes(16_000)) * 50,  # endless headers
        frame(0, 0, 1, b"\0\xff\xff\xff\xff" + bytes(100)),
    ]
    for number in range(count):
        yield PREFACE + (hostile[number // 4 % len(hostile)] if number % 4 == 0 else next(fuzzed))


def ended(connection: socket.socket, data: bytes) -> None:
    """Send bytes and say that no more come; the server must then end the connection."""
    try:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(2**16):
            pass
    except TimeoutError:
        raise
    except OSError:
        return  # it has ended already


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ChargedServer]:
    # It is about what counts, not about how fast a node may send it.
    fast = {"_CONTENT_PER_SECOND": 2.0**40, "_REST_PER_SECOND": 2.0**40}
    with charged_server(tmp_path, USERS, fast) as made:
        yield made


@pytest.mark.slow
def test_whatever_comes_to_the_port_the_server_stays_and_counts_what_is_right(
    server: ChargedServer,
) -> None:
    memory, descriptors = [], []
    with ExitStack() as stack:
        attackers, witness = Attackers(server, stack), Witness(server)
        stack.callback(witness.close)
        for _ in range(WAVES):
            for _ in range(ROUNDS):
                offer, request = witness.asked(server)
                taken = attackers.answers(offer, request)
                check_round(server, witness, taken)
            offer, _ = witness.asked(server)
            attackers.messages(offer)
            attackers.connections(offer)
            check_round(server, witness, NOTHING)
            descriptors.append(server.descriptors)
            memory.append(server.resident_bytes)
    assert server.stop() == 0
    assert server.charges() == len(witness.offers) == WAVES * (ROUNDS + 1)
    assert attackers.inputs == {"answers": 4080, "messages": 4880, "connections": 1920}
    # Allocators and late connections move single values either way; a leak moves all, wave by wave.
    assert min(memory[-3:]) - max(memory[2:5]) < GROWTH, memory
    assert min(descriptors[-3:]) - max(descriptors[:3]) < 10, descriptors
    check_log(server.log)


def check_round(server: ChargedServer, witness: Witness, taken: np.ndarray) -> None:
    """End the round; it must release the witness's contribution and what was taken of others.

    Args:
        taken: [D] in steps.
    """
    offer, request = witness.offers[-1]
    witness.told.set()
    honest = request.clipping.contribution(update_of(offer.id.round))
    expected = request.clipping.in_units(honest + taken)
    np.testing.assert_allclose(server.released_sum(), expected, atol=1e-4)


def check_log(log: str) -> None:
    """Nothing hostile begins a line or moves a cursor, and nothing that came is a traceback."""
    assert "declined: " in log
    assert "answer refused: " in log
    assert [line for line in log.split("\n") if not line.isprintable()] == []
    assert not [line for line in log.splitlines() if line.startswith("FORGED")]
    assert "Traceback" not in log
    assert not [name for name in HOSTILE if f"{name}: declined" in log]


def test_after_a_method_that_is_no_text_nodes_are_served_as_before(server: ChargedServer) -> None:
    """grpcio decodes a method before anybody asks who calls; 1.85 ends its loop there."""
    call = called("/METHOD", b"").replace(b"/METHOD", b"/\xff\xfeTHOD")
    for _ in range(2):
        before = Witness(server)
        with encrypted(server.site.port, server.site.certs, "hostile 1") as connection:
            ended(connection, PREFACE + settings() + call)
        before.close()
        witness = Witness(server)
        witness.asked(server)
        check_round(server, witness, NOTHING)
        witness.close()
    assert server.stop() == 0
    assert server.charges() == 2


@pytest.mark.slow
def test_a_handshake_that_is_not_finished_ends(server: ChargedServer) -> None:
    before = server.descriptors
    with ExitStack() as stack:
        held = [stack.enter_context(plain(server.site.port)) for _ in range(20)]
        for number, connection in enumerate(held):
            connection.sendall(client_hello()[: 10 * number])
            connection.settimeout(60.0)
        until(lambda: server.descriptors >= before + 20)
        for connection in held:
            with suppress(ConnectionError):
                while connection.recv(2**16):
                    pass
        until(lambda: server.descriptors <= before)
