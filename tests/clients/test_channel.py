"""Who a node is, and how far its connection can be trusted."""

import asyncio
import base64
import shutil
import socket
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from fedpriv.clients.connection import FederationStub, Identity, identity_of
from fedpriv.errors import InvalidValueError, WireError
from fedpriv.privacy.layout import Layout
from fedpriv.wire import Decline, Hello, RoundId, RunState, Status, Welcome
from tests.clients.tiny_server import NODE, PATIENCE, TinyServer, make_certificates, said, serving

STATUS = Status("run", 1, 5, 0.5, 2.0, 1e-5, 3, 1, 12, RunState.WAITING)
HELLO = Hello(NODE, bytes(32))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, Path]:
    return make_certificates(tmp_path_factory.mktemp("certs"))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, Path]:
    return make_certificates(tmp_path_factory.mktemp("strangers"))


def write_certificate(folder: Path, names: list[str]) -> Path:
    """A node's folder whose certificate has these common names."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names])
    builder = (
        x509.CertificateBuilder()
        .issuer_name(subject)
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + timedelta(days=1))
    )
    pem = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for name, content in (("ca.pem", pem), ("node.pem", pem), ("node.key", private)):
        (folder / name).touch(0o600)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_key_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    (write_certificate(tmp_path, ["n"]) / "node.key").chmod(mode)
    sentence = rf"node\.key can be used by others than its owner \(mode {mode:04o}\)"
    with pytest.raises(InvalidValueError, match=sentence):
        identity_of(tmp_path, None)


def test_what_a_server_compresses_is_not_inflated(certificates: tuple[object, Path]) -> None:
    """A few kilobytes could be many megabytes, and gRPC inflates before it looks how many."""

    async def compressed(tiny: TinyServer) -> None:
        credentials, folder = certificates
        async with (
            serving(tiny, credentials, compression=grpc.Compression.Gzip) as port,
            FederationStub.open(f"localhost:{port}", identity_of(folder, None)) as stub,
        ):
            await stub.status()

    tiny = TinyServer()
    for size in (2**20, 2**26):
        tiny.status = bytes(size)
        with pytest.raises((WireError, grpc.aio.AioRpcError), match=r"disabled|^\d{4} bytes are"):
            asyncio.run(compressed(tiny))


def test_a_certificate_says_who_a_node_is(certificates: tuple[object, Path]) -> None:
    folder = certificates[1]
    identity = identity_of(folder, None)
    assert identity.node == NODE
    assert identity.credentials is not None
    assert identity_of(None, NODE) == Identity(NODE)
    assert stat.S_IMODE((folder / "node.key").stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["plain", "a b", "ä"])
def test_the_name_is_the_common_name(tmp_path: Path, name: str) -> None:
    assert identity_of(write_certificate(tmp_path, [name]), None).node == name


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ([], "0 common names"),
        (["one", "two"], "2 common names"),
        (["a/b"], "must be 1 to 64 bytes"),
    ],
)
def test_a_certificate_without_a_legal_name_is_refused(
    tmp_path: Path, names: list[str], reason: str
) -> None:
    with pytest.raises(InvalidValueError, match=reason):
        identity_of(write_certificate(tmp_path, names), None)


def test_a_damaged_certificate_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"ca\.pem cannot be read: No such file"):
        identity_of(tmp_path, None)
    write_certificate(tmp_path, ["n"])
    (tmp_path / "node.pem").write_bytes(b"-----BEGIN CERTIFICATE-----\nAAAA\n")
    with pytest.raises(InvalidValueError, match=r"node\.pem is not a certificate"):
        identity_of(tmp_path, None)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (b"\x02\x01\x02", b"\x02\x01\x09"),  # the version
        (b"\x2a\x86\x48\xce\x3d\x03\x01\x07", b"\x2a\x86\x48\xce\x3d\x03\x01\x7f"),  # the curve
        (b"\x03\x42\x00\x04", b"\x03\x42\x00\x09"),  # the point on it
    ],
)
def test_a_certificate_whose_key_or_version_is_unknown_is_refused(
    tmp_path: Path, good: bytes, bad: bytes
) -> None:
    pem = write_certificate(tmp_path, ["n"]) / "node.pem"
    begin, *lines, end = pem.read_text().splitlines()
    content = base64.b64decode("".join(lines))
    assert good in content
    text = base64.encodebytes(content.replace(good, bad, 1)).decode()
    pem.write_text(f"{begin}\n{text}{end}\n")
    with pytest.raises(InvalidValueError, match=r"node\.pem is not a certificate$"):
        identity_of(tmp_path, None)


def test_a_key_that_is_not_the_certificates_is_refused(
    tmp_path: Path, certificates: tuple[object, Path], strangers: tuple[object, Path]
) -> None:
    """Else every handshake would fail, as if the server were away."""
    for name in ("ca.pem", "node.pem", "node.key"):
        shutil.copy(certificates[1] / name, tmp_path / name)
    for content, reason in (
        ((strangers[1] / "node.key").read_bytes(), r"node\.key is not the key of the certificate"),
        (b"no key", r"node\.key is not a private key"),
    ):
        (tmp_path / "node.key").write_bytes(content)
        with pytest.raises(InvalidValueError, match=reason):
            identity_of(tmp_path, None)


@pytest.mark.parametrize("both", [(Path("certs"), "node"), (None, None)])
def test_exactly_one_identity_is_given(both: tuple[Path | None, str | None]) -> None:
    with pytest.raises(InvalidValueError, match="exactly one must be given"):
        identity_of(*both)


@pytest.mark.parametrize("node", ["", "a/b", ".hidden", " a", "a\nb", "ä" * 33])
def test_a_name_that_no_node_can_have_is_refused(node: str) -> None:
    with pytest.raises(InvalidValueError, match="the name of a node is"):
        identity_of(None, node)


@pytest.mark.parametrize(
    "server",
    ["", "localhost", ":7443", "localhost:", "localhost:0", "localhost:65536", "localhost:７",
     "::1:7443", "[::1]", "[::1]:", "[localhost]:1", "[::1%lo]:99999", "http://localhost:1",
     "localhost:1/x", "local host:1", "localhost:-1", "localhost:1\n"],
)  # fmt: skip
def test_an_address_that_is_none_is_refused_in_one_sentence(server: str) -> None:
    with pytest.raises(InvalidValueError, match=r"^server is ") as caught:
        FederationStub.open(server, Identity("n"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0", "[2001:db8::1]", "[::]"])
def test_plain_text_to_another_machine_is_refused(host: str) -> None:
    with pytest.raises(InvalidValueError, match="perhaps another machine"):
        FederationStub.open(f"{host}:7443", Identity("n"))


def test_a_host_that_does_not_exist_is_refused_for_plain_text() -> None:
    with pytest.raises(InvalidValueError, match="cannot be resolved"):
        FederationStub.open("nowhere.invalid:7443", Identity("n"))


def own_address() -> str:
    """An address of this machine that other machines could see."""
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("2001:db8::1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return str(probe.getsockname()[0])


def test_plain_text_stays_here_though_a_name_resolves_to_another_address_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address = own_address()
    loopback = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    async def main() -> None:
        server = grpc.aio.server()
        port = server.add_insecure_port(f"[{address}]:0")
        await server.start()
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: loopback)
        try:
            async with FederationStub.open(f"[{address}]:{port}", Identity("n")) as stub:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await stub.status()
            # A server that was reached would say UNIMPLEMENTED.
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        finally:
            await server.stop(None)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_plain_text_goes_through_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where somebody listens, since gRPC would go there first."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        for name in ("grpc_proxy", "https_proxy", "http_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        for name in ("no_grpc_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)

        async def main() -> Status:
            tiny = TinyServer()
            tiny.status = said(STATUS)
            named = identity_of(None, NODE)
            async with (
                serving(tiny) as port,
                FederationStub.open(f"127.0.0.1:{port}", named) as stub,
            ):
                return await stub.status()

        assert asyncio.run(asyncio.wait_for(main(), PATIENCE)) == STATUS
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()


async def say_everything(stub: FederationStub, tiny: TinyServer) -> None:
    """Call every method once."""
    assert await stub.status() == STATUS
    offer = await tiny.offer()
    await tiny.script.put(None)
    heard = [message async for message in stub.connect(HELLO, asyncio.Queue())]
    assert isinstance(heard[0], Welcome)
    await stub.download(offer.id, offer.model(Layout((), ())))
    await stub.upload(RoundId("run", 0, 0), Decline("no"))
    with pytest.raises(WireError):
        await stub.fetch_ledger()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_every_call_in_plain_text_says_which_node_it_is(host: str) -> None:
    async def main() -> TinyServer:
        tiny = TinyServer()
        tiny.status = said(STATUS)
        named = identity_of(None, NODE)
        async with serving(tiny) as port, FederationStub.open(f"{host}:{port}", named) as stub:
            await say_everything(stub, tiny)
        return tiny

    tiny = asyncio.run(asyncio.wait_for(main(), PATIENCE))
    assert tiny.names == {NODE}
    assert len(tiny.calls) == 5


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_tls_shows_both_certificates(certificates: tuple[object, Path], host: str) -> None:
    credentials, folder = certificates

    async def main() -> TinyServer:
        tiny = TinyServer()
        tiny.status = said(STATUS)
        certified = identity_of(folder, None)
        async with (
            serving(tiny, credentials) as port,
            FederationStub.open(f"{host}:{port}", certified) as stub,
        ):
            await say_everything(stub, tiny)
        return tiny

    assert asyncio.run(asyncio.wait_for(main(), PATIENCE)).names == {NODE}


async def status_of(
    credentials: object, folder: Path | None, host: str, tiny: TinyServer
) -> tuple[grpc.StatusCode, str]:
    """How asking for the status fails."""
    async with serving(tiny, credentials, host=host) as port:
        identity = identity_of(folder, None if folder else "n")
        async with FederationStub.open(f"{host}:{port}", identity) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.status()
    return caught.value.code(), caught.value.details()


def test_a_server_of_another_authority_is_not_spoken_to(
    certificates: tuple[object, Path], strangers: tuple[object, Path]
) -> None:
    for credentials, folder in (
        (strangers[0], certificates[1]),  # the server is a stranger
        (None, certificates[1]),  # the server does not speak TLS
        (certificates[0], None),  # the node does not
        (certificates[0], strangers[1]),  # the node is a stranger
    ):
        tiny = TinyServer()
        code, _ = asyncio.run(status_of(credentials, folder, "127.0.0.1", tiny))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert not tiny.calls


def test_a_server_with_a_certificate_for_another_host_is_not_spoken_to(
    certificates: tuple[object, Path],
) -> None:
    tiny = TinyServer()
    code, details = asyncio.run(status_of(*certificates, "127.0.0.2", tiny))
    assert code is grpc.StatusCode.UNAVAILABLE
    assert "Hostname Verification Check failed" in details
    assert not tiny.calls
