"""Peers that want the server's memory, its descriptors or its time: they get little of it."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import grpc
import pytest

from fedpriv import wire
from fedpriv.errors import LedgerError
from fedpriv.report.records import Trouble
from fedpriv.server import gateway, service
from fedpriv.wire import federation_pb2 as pb
from tests.server.charged_server import ChargedServer, charged_server
from tests.server.hostile_nodes import (
    CALLS,
    PATIENCE,
    PREFACE,
    SERVICE,
    Flood,
    called,
    encrypted,
    one,
    plain,
    settings,
)
from tests.server.loopback import TransferLimits, site, strike, until

USERS = {"four": ["4"], "five": ["5"]}
MEBIBYTE = 2**20
METHODS = [SERVICE + name for name in CALLS]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChargedServer]:
    with charged_server(tmp_path_factory.mktemp("site"), USERS) as made:
        strike(made.site.certs, "four")
        with made.site.channel("five") as channel:  # what is loaded at the first call is no growth
            assert isinstance(one(channel, SERVICE + "GetStatus"), bytes)
        yield made


def test_of_a_node_that_was_struck_off_nothing_is_read(server: ChargedServer) -> None:
    before = server.resident_bytes
    for method in METHODS:
        with encrypted(server.site.port, server.site.certs, "four") as connection:
            flood = Flood(connection, method)
            flood.go_on(256 * MEBIBYTE)
        assert flood.open == set()
        assert flood.sent <= 4 * MEBIBYTE, method
    assert server.resident_bytes - before < 32 * MEBIBYTE


@pytest.mark.parametrize("method", ["Upload", "GetStatus"])
def test_of_messages_that_do_not_end_little_is_taken(server: ChargedServer, method: str) -> None:
    before = server.resident_bytes
    with encrypted(server.site.port, server.site.certs, "five") as connection:
        flood = Flood(connection, SERVICE + method)
        flood.go_on(48 * MEBIBYTE)
    assert flood.sent < 6 * MEBIBYTE  # with what the kernel holds
    assert server.resident_bytes - before < 32 * MEBIBYTE


@pytest.mark.parametrize("kind", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a_message_that_is_compressed_is_not_inflated(
    server: ChargedServer, kind: grpc.Compression
) -> None:
    before, bomb = server.resident_bytes, iter([bytes(512 * MEBIBYTE)])
    bundle, options = server.site.certs / "nodes" / "five", [("grpc.max_send_message_length", -1)]
    key, pem = ((bundle / f"node.{end}").read_bytes() for end in ("key", "pem"))
    ca = (bundle / "ca.pem").read_bytes()
    credentials = grpc.ssl_channel_credentials(ca, key, pem)
    target = f"localhost:{server.site.port}"
    with grpc.secure_channel(target, credentials, options, compression=kind) as channel:
        upload = channel.stream_unary(SERVICE + "Upload")
        with pytest.raises(grpc.RpcError) as caught:
            upload(bomb, timeout=60.0)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert server.resident_bytes - before < 32 * MEBIBYTE


def test_many_refused_calls_are_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with site(tmp_path, USERS) as made:
        strike(made.certs, "four")
        with made.channel("four") as channel:
            for _ in range(20):
                one(channel, SERVICE + "GetStatus")
    lines = [r for r in caplog.records if getattr(r, "what", "") == Trouble.CALL]
    assert len(lines) == 1
    assert "struck off" in lines[0].getMessage()


def test_what_fails_in_the_server_is_not_told_to_nodes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_known: object) -> NoReturn:
        raise LedgerError("/secret/folder/ledger.sqlite cannot be read")

    with site(tmp_path, USERS) as made, made.channel("four") as channel:
        made.server.service.ledger = fails
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.unary_stream(SERVICE + "FetchLedger")(b"", timeout=PATIENCE))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in caught.value.details()
    assert "/secret/folder/ledger.sqlite cannot be read" in caplog.text


def test_silent_connections_are_bounded_and_keep_no_node_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_MOST_CONNECTIONS", 10)
    monkeypatch.setattr(gateway, "_HANDSHAKE_SECONDS", 3600.0)
    with site(tmp_path, USERS) as made, ExitStack() as stack:
        port = made.server.address.port
        silent = [stack.enter_context(plain(port)) for _ in range(10)]
        with made.channel("four") as channel:
            assert isinstance(one(channel, SERVICE + "GetStatus"), bytes)
            assert silent[0].recv(1) == b""
            silent[-1].settimeout(0.1)
            with pytest.raises(TimeoutError):
                silent[-1].recv(1)


def test_who_reads_nothing_does_not_keep_the_server_from_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_GRACE_SECONDS", 0.1)
    methods = [SERVICE + "Watch", *METHODS]
    with ExitStack() as peer:
        give_up = threading.Timer(PATIENCE, peer.close)  # or the server might never stop
        with site(tmp_path, USERS) as made:
            port = made.server.address.port
            connection = peer.enter_context(encrypted(port, made.certs, "four"))
            connection.sendall(PREFACE + settings(window=0))
            for number, method in enumerate(methods):
                connection.sendall(called(method, b"", stream=2 * number + 1, last=False))
            until(lambda: made.server.service.authentication._open["four"] > 1)
            give_up.start()
        assert give_up.is_alive()
        give_up.cancel()


@pytest.mark.parametrize("places", [1, 16])
def test_who_reads_no_part_of_the_ledger_keeps_nobody_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: int
) -> None:
    monkeypatch.setattr(service, "_DOWNLOADS", places)
    if places == 1:
        monkeypatch.setattr(service, "_SHARE_OF_A_PART", 0.01)
    users = USERS | {name: [name] for name in ("a", "b", "c")}
    with (
        site(tmp_path, users, TransferLimits(uploads=1, seconds=60.0)) as made,
        made.channel("four") as channel,
        ExitStack() as stack,
    ):
        for name in "abc":
            connection = stack.enter_context(encrypted(made.server.address.port, made.certs, name))
            connection.sendall(PREFACE + settings(window=0) + called(SERVICE + "FetchLedger", b""))
            until(lambda: made.server.service.authentication._open[name] == 1)  # noqa: B023
        assert len(list(channel.unary_stream(SERVICE + "FetchLedger")(b"", timeout=PATIENCE))) > 1


def test_a_hello_has_the_server_look_at_no_list_of_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looks(*_: object) -> NoReturn:
        raise AssertionError("the users of a node were looked at")

    right, wrong = (
        pb.FromNode(hello=wire.HELLO.encode(wire.Hello("four", digest))).SerializeToString()
        for digest in (wire.digest_of(USERS["four"]), bytes(32))
    )
    with site(tmp_path, USERS) as made, made.channel("four") as channel:
        monkeypatch.setattr(wire, "digest_of", looks)
        decode = wire.WELCOME.decode
        monkeypatch.setattr(wire, "WELCOME", SimpleNamespace(encode=looks))
        says = channel.stream_stream(SERVICE + "Connect")
        with pytest.raises(grpc.RpcError) as caught:
            list(says(iter([wrong]), timeout=PATIENCE))
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        call = says(iter([right]), timeout=PATIENCE)
        welcome = decode(pb.FromServer.FromString(next(call)).welcome)
        call.cancel()
    assert welcome.users.tolist() == [0]
