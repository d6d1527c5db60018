"""The front: who gets past it, how much it takes of a peer, and what else can reach gRPC."""

import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from fedpriv.errors import InvalidValueError
from fedpriv.server.gateway import listening_sockets
from fedpriv.wire.naming import Address
from tests.server.charged_server import ChargedServer, charged_server
from tests.server.hostile_nodes import (
    PREFACE,
    SERVICE,
    called,
    encrypted,
    frame,
    heading,
    one,
    settings,
)
from tests.server.loopback import Site, enrol, site, strike, until

USERS = {"four": ["4"], "five": ["5"]}
MEBIBYTE = 2**20
FLOODS = {
    "pings": frame(6, 0, 0, bytes(8)) * 4000,
    "settings": frame(4, 0, 0) * 8000,
    "an endless header": frame(9, 0, 1, bytes(2**14)) * 4,
    "headers": b"".join(heading(SERVICE + "GetStatus", stream) for stream in range(1, 800, 2)),
    "resets": b"".join(
        heading(SERVICE + "GetStatus", stream) + frame(3, 0, stream, bytes(4))
        for stream in range(1, 800, 2)
    ),
}


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path, USERS) as found:
        yield found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChargedServer]:
    with charged_server(tmp_path_factory.mktemp("site"), USERS) as found:
        yield found


def taken(connection: ssl.SSLSocket, flood: bytes, most: int) -> int:
    """Send a flood again and again, read nothing; how many bytes the server and kernel took."""
    connection.settimeout(0.5)
    sent = 0
    with suppress(OSError):  # it takes no more, or has ended the connection
        connection.sendall(PREFACE + settings())
        if flood == FLOODS["an endless header"]:
            connection.sendall(frame(1, 0, 1, b""))
        while sent < most:
            connection.sendall(flood)
            sent += len(flood)
    return sent


@pytest.mark.parametrize("kind", FLOODS)
def test_of_a_flood_whose_answers_are_not_read_little_is_taken(
    server: ChargedServer, kind: str
) -> None:
    before = server.resident_bytes
    with encrypted(server.site.port, server.site.certs, "four") as connection:
        assert taken(connection, FLOODS[kind], 64 * MEBIBYTE) < 32 * MEBIBYTE
        assert server.resident_bytes - before < 32 * MEBIBYTE
        with server.site.channel("five") as channel:
            assert isinstance(one(channel, SERVICE + "GetStatus"), bytes)


def test_of_a_certificate_that_is_struck_off_not_a_frame_reaches_grpc(made: Site) -> None:
    strike(made.certs, "four")
    with encrypted(made.server.address.port, made.certs, "four") as connection:
        connection.sendall(PREFACE + settings() + called(SERVICE + "GetStatus", b""))
        answer = b""
        with suppress(ConnectionResetError):
            while more := connection.recv(2**16):
                answer += more
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert made.server.service.authentication.peers == {}


def test_a_node_that_is_enrolled_again_gets_in(made: Site) -> None:
    strike(made.certs, "four")
    with made.channel("four") as channel:
        assert not isinstance(one(channel, SERVICE + "GetStatus"), bytes)
    enrol(made.certs, USERS)
    with made.channel("four") as channel:
        assert isinstance(one(channel, SERVICE + "GetStatus"), bytes)


def test_of_many_connections_of_a_node_the_oldest_end_and_others_have_theirs(made: Site) -> None:
    port, peers = made.server.address.port, made.server.service.authentication.peers
    with ExitStack() as stack:
        first, *others = (
            stack.enter_context(encrypted(port, made.certs, "four")) for _ in range(20)
        )
        other = stack.enter_context(encrypted(port, made.certs, "five"))
        with suppress(ConnectionResetError):
            while first.recv(2**16):
                pass
        until(lambda: [peer.node for peer in peers.values()].count("five") == 1)
        until(lambda: [peer.node for peer in peers.values()].count("four") == 8)
        others[-1].sendall(PREFACE + settings())
        other.sendall(PREFACE + settings())
        assert others[-1].recv(1)
        assert other.recv(1)


def test_only_this_user_can_reach_what_grpc_listens_on(made: Site) -> None:
    table = Path("/proc/net/unix").read_text(encoding="utf-8")
    paths = [Path(line.split()[-1]) for line in table.splitlines() if "/fedpriv-" in line]
    sockets = [path for path in paths if path.name.startswith("grpc-") and path.exists()]
    assert sockets
    for path in sockets:
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2])
def test_older_versions_of_tls_are_refused(made: Site, version: ssl.TLSVersion) -> None:
    context = ssl.create_default_context(cafile=made.certs / "authority" / "ca.pem")
    context.maximum_version = version
    address = ("127.0.0.1", made.server.address.port)
    with (
        socket.create_connection(address, timeout=20.0) as connection,
        pytest.raises(ssl.SSLError),
    ):
        context.wrap_socket(connection, server_hostname="localhost")


def test_a_taken_port_is_refused_in_a_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken_port:
        address = Address("127.0.0.1", taken_port.getsockname()[1])
        with pytest.raises(
            InvalidValueError, match=f"on {address} the server cannot listen: Address already"
        ):
            listening_sockets(address, f"on {address}")


def test_a_host_name_is_served_at_all_its_addresses_by_one_port() -> None:
    sockets, address = listening_sockets(Address("localhost", 0), "")
    try:
        assert {made.getsockname()[1] for made in sockets} == {address.port}
        assert address.port > 0
    finally:
        for made in sockets:
            made.close()
