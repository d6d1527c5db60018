"""The endpoint that a configuration describes: what it needs, and what is refused at once."""

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from fedpriv.errors import InvalidValueError
from fedpriv.experiment.config import FederationSection
from fedpriv.server import certificates
from fedpriv.server.deployment import endpoint_of
from fedpriv.server.gateway import by_declaration
from fedpriv.wire.naming import Address
from simulations.loopback import issue
from tests.server.hostile_nodes import CALLS
from tests.server.loopback import channel_to, enrol, serving, strike, write_enrolment

USERS = {"four": ["4"], "five": ["5"]}


@pytest.fixture
def certs(tmp_path: Path) -> Path:
    certificates.init(tmp_path / "certs", ["localhost"])
    for node in USERS:
        issue(tmp_path / "certs", node)
    enrol(tmp_path / "certs", USERS)
    return tmp_path / "certs"


def section(certs: Path | None = None, **settings: object) -> FederationSection:
    if certs is None:
        return FederationSection(enrolment="e.toml", **settings)
    enrolment, folder = str(certs / "enrolment.toml"), str(certs / "server")
    return FederationSection(enrolment=enrolment, certificates=folder, **settings)


def told(section: FederationSection, node: Path) -> object:
    """What a server behind that endpoint tells a node of its status."""
    endpoint = endpoint_of(section, insecure=False)
    certs = node.parents[1]
    with (
        serving(certs, USERS, endpoint.identify, endpoint.tls) as made,
        channel_to(made.server.address.port, certs, node) as channel,
    ):
        return CALLS["GetStatus"](channel)


def test_with_certificates_an_enrolled_node_enters_and_one_struck_off_does_not(
    certs: Path,
) -> None:
    node = certs / "nodes" / "four"
    assert isinstance(told(section(certs), node), bytes)
    strike(certs, "four")
    assert not isinstance(told(section(certs), node), bytes)


def test_an_enrolment_without_certificates_would_let_nobody_in(certs: Path) -> None:
    write_enrolment(certs, {"four": {"users": ["4"]}})
    with pytest.raises(InvalidValueError, match=r"enrolment\.toml enrols no certificate"):
        endpoint_of(section(certs), insecure=False)


def test_the_address_is_the_configured_one(certs: Path) -> None:
    endpoint = endpoint_of(section(certs, address="[::1]:1234"), insecure=False)
    assert endpoint.address == Address("::1", 1234)
    with pytest.raises(InvalidValueError, match=r"federation.address is 'nowhere'"):
        endpoint_of(section(certs, address="nowhere"), insecure=False)


@pytest.mark.parametrize("address", ["127.0.0.1:7443", "localhost:0", "[::1]:7443"])
def test_plain_text_is_for_loopback(address: str) -> None:
    endpoint = endpoint_of(section(address=address), insecure=True)
    assert endpoint.tls is None
    assert endpoint.identify is by_declaration


@pytest.mark.parametrize("address", ["0.0.0.0:7443", "[::]:7443", "192.0.2.7:7443", "x.invalid:1"])
def test_plain_text_is_for_loopback_only(certs: Path, address: str) -> None:
    with pytest.raises(InvalidValueError, match="without TLS it must be on loopback"):
        endpoint_of(section(certs, address=address), insecure=True)


def test_tls_needs_certificates() -> None:
    with pytest.raises(InvalidValueError, match=r"federation.certificates is absent"):
        endpoint_of(section(), insecure=False)


@pytest.mark.parametrize("file", ["ca.pem", "server.pem", "server.key"])
def test_a_file_that_is_absent_is_named(certs: Path, file: str) -> None:
    (certs / "server" / file).unlink()
    with pytest.raises(InvalidValueError, match=file):
        endpoint_of(section(certs), insecure=False)


@pytest.mark.parametrize("file", ["server/ca.pem", "enrolment.toml"])
def test_a_file_that_is_damaged_is_named(certs: Path, file: str) -> None:
    (certs / file).write_text("nonsense")
    with pytest.raises(InvalidValueError, match=file):
        endpoint_of(section(certs), insecure=False)


def test_the_certificate_of_a_server_is_no_authority(certs: Path) -> None:
    shutil.copy(certs / "server" / "server.pem", certs / "server" / "ca.pem")
    with pytest.raises(InvalidValueError, match="not an authority's certificate"):
        endpoint_of(section(certs), insecure=False)


def test_a_certificate_that_is_damaged_is_refused(certs: Path) -> None:
    (certs / "server" / "server.pem").write_text("nonsense")
    with pytest.raises(InvalidValueError, match=r"server\.pem is not a certificate"):
        endpoint_of(section(certs), insecure=False)


def test_the_certificate_of_a_node_is_not_shown_by_a_server(certs: Path) -> None:
    for suffix in ("key", "pem"):
        shutil.copy(certs / f"nodes/four/node.{suffix}", certs / f"server/server.{suffix}")
    with pytest.raises(InvalidValueError, match=r"server\.pem is not a certificate for a server"):
        endpoint_of(section(certs), insecure=False)


def test_a_certificate_of_another_authority_is_warned_of(
    certs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endpoint_of(section(certs), insecure=False)
    assert not caplog.text
    certificates.init(tmp_path / "others", ["localhost"])
    shutil.copy(tmp_path / "others/server/ca.pem", certs / "server/ca.pem")
    endpoint_of(section(certs), insecure=False)
    assert "server.pem is not issued by" in caplog.text


def encrypted(key: bytes) -> bytes:
    made, hidden = load_pem_private_key(key, None), BestAvailableEncryption(b"password")
    return made.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, hidden)


@pytest.mark.parametrize("key", [lambda _: b"nonsense", encrypted])
def test_a_key_that_cannot_be_read_is_refused(certs: Path, key: Callable[[bytes], bytes]) -> None:
    path = certs / "server" / "server.key"
    path.write_bytes(key(path.read_bytes()))
    with pytest.raises(InvalidValueError, match=r"server\.key is not a private key without"):
        endpoint_of(section(certs), insecure=False)


TAKEN = {
    "P-256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "P-384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "P-521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
}
NOT_TAKEN = {
    "secp256k1": lambda: ec.generate_private_key(ec.SECP256K1()),
    "Ed448": ed448.Ed448PrivateKey.generate,
    "DSA": lambda: dsa.generate_private_key(2048),
}


@pytest.mark.parametrize("kind", [*TAKEN, *NOT_TAKEN])
def test_a_key_is_of_a_kind_that_grpc_takes(
    certs: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    key: Any = {**TAKEN, **NOT_TAKEN}[kind]()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
    begin, end = datetime(2020, 1, 1, tzinfo=UTC), datetime(2099, 1, 1, tzinfo=UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, begin, end)
    certificate = builder.sign(key, None if kind.startswith("Ed") else hashes.SHA256())
    parts = Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
    content = key.private_bytes(*parts), certificate.public_bytes(Encoding.PEM)
    (certs / "server" / "server.key").write_bytes(content[0])
    (certs / "server" / "server.pem").write_bytes(content[1])
    server = grpc.server(ThreadPoolExecutor(1))
    if kind in TAKEN:
        assert endpoint_of(section(certs), insecure=False).tls is not None
        credentials = grpc.ssl_server_credentials([content])
        assert server.add_secure_port("127.0.0.1:0", credentials) > 0
    else:
        with pytest.raises(InvalidValueError, match=r"server\.key is of a kind that gRPC does not"):
            endpoint_of(section(certs), insecure=False)
        credentials = grpc.ssl_server_credentials([content])
        with pytest.raises(RuntimeError):
            server.add_secure_port("127.0.0.1:0", credentials)
    server.stop(None)
    capfd.readouterr()  # of gRPC, which tells all that it refuses


@pytest.mark.parametrize("file", ["server.key", "server.pem"])
def test_key_and_certificate_belong_together(certs: Path, file: str) -> None:
    content = (certs / "server" / file).read_bytes()
    certificates.issue_server(certs, ["localhost"])
    (certs / "server" / file).write_bytes(content)
    with pytest.raises(InvalidValueError, match=r"server\.key is not the key of .* server\.pem"):
        endpoint_of(section(certs), insecure=False)
