"""What the authority issues: certificates of the right kind, and keys that nobody else can read."""

import shutil
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedpriv.errors import InvalidValueError
from fedpriv.server.certificates import (
    YEAR,
    init,
    issue_server,
    load_ca,
    request,
    sign,
    tls_context,
)
from fedpriv.wire.naming import fingerprint_of
from simulations.loopback import issue

NOW = datetime.now(UTC)
DAY = timedelta(days=1)
HOSTS = ["localhost", "127.0.0.1"]

# Makes every kind of key under the most generous mask, and looks at each file as it is renamed.
WATCHED = """
import os, stat, sys
from pathlib import Path

from fedpriv.server.certificates import init, issue_server, request

os.umask(0)


def watch(event, arguments):
    if event == "os.rename" and ".key" in str(arguments[0]):
        print(Path(arguments[1]).name, oct(stat.S_IMODE(os.stat(arguments[0]).st_mode)))
    if event in ("os.chmod", "os.chown") and not os.path.isdir(arguments[0]):
        print(event, arguments[0])


sys.addaudithook(watch)
certs = Path(sys.argv[1])
init(certs, ["localhost"])
request(certs, "n")
(certs / "nodes" / "n" / "node.key").unlink()
request(certs, "n")
issue_server(certs, ["localhost"])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    init(tmp_path / "certs", HOSTS)
    return tmp_path / "certs"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    init(tmp_path / "other", HOSTS)
    return tmp_path / "other"


def ca_of(folder: Path) -> x509.Certificate:
    return load_ca(folder / "authority" / "ca.pem")


def certificate_of(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_the_authority_is_what_it_says(folder: Path) -> None:
    ca = ca_of(folder)
    constraints = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    usage = ca.extensions.get_extension_for_class(x509.KeyUsage)
    assert (constraints.critical, constraints.value.ca, constraints.value.path_length) == (1, 1, 0)
    assert usage.critical
    assert usage.value.key_cert_sign
    assert isinstance(ca.public_key().curve, ec.SECP256R1)
    lifetime = ca.not_valid_after_utc - NOW
    assert 10 * YEAR - DAY < lifetime < 10 * YEAR + DAY


def test_the_server_gets_a_certificate_for_its_hosts_only(folder: Path) -> None:
    server = certificate_of(folder / "server" / "server.pem")
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    usage = server.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert list(usage) == [ExtendedKeyUsageOID.SERVER_AUTH]
    issue_server(folder, ["::1"])
    renewed = certificate_of(folder / "server" / "server.pem")
    names = renewed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["::1"]
    assert renewed.public_key() != server.public_key()


def test_keys_are_their_owners(folder: Path) -> None:
    issue(folder, "n")
    keys = sorted(folder.rglob("*.key"))
    assert [key.name for key in keys] == ["ca.key", "node.key", "server.key"]
    assert [stat.S_IMODE(key.stat().st_mode) for key in keys] == [0o600] * 3
    assert [stat.S_IMODE(key.parent.stat().st_mode) for key in keys] == [0o700] * 3
    assert not list(folder.rglob("*.partial"))


def test_a_bundle_is_whole(folder: Path) -> None:
    issued = issue(folder, "n")
    bundle = issued.folder
    assert bundle == folder / "nodes" / "n"
    files = ["ca.pem", "node.csr", "node.key", "node.pem"]
    assert sorted(path.name for path in bundle.iterdir()) == files
    key = load_pem_private_key((bundle / "node.key").read_bytes(), None)
    certificate = certificate_of(bundle / "node.pem")
    assert certificate.public_key() == key.public_key()
    assert load_ca(bundle / "ca.pem") == ca_of(folder)
    assert YEAR - DAY < certificate.not_valid_after_utc - NOW < YEAR + DAY
    assert fingerprint_of(certificate) == issued.fingerprint
    usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not constraints.ca
    certificate.verify_directly_issued_by(ca_of(folder))


@pytest.mark.parametrize(
    "hosts", [[], [""], ["a:80"], ["[::1]"], ["a b"], ["ä.org"], ["-a"], ["a..b"], ["1.2.3.999"]]
)
def test_what_is_no_host_is_refused_before_anything_is_written(
    tmp_path: Path, hosts: list[str]
) -> None:
    with pytest.raises(InvalidValueError, match="host"):
        init(tmp_path / "certs", hosts)
    assert not (tmp_path / "certs").exists()


def test_an_authority_is_never_overwritten(folder: Path) -> None:
    before = ca_of(folder)
    with pytest.raises(InvalidValueError, match=r"an authority is already in .*certs server"):
        init(folder, HOSTS)
    assert ca_of(folder) == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666])
def test_keys_that_others_can_use_are_refused(tmp_path: Path, mode: int) -> None:
    init(tmp_path, ["localhost"])
    sentence = rf"\.key can be used by others than its owner \(mode {mode:04o}\)"
    (tmp_path / "authority" / "ca.key").chmod(mode)
    with pytest.raises(InvalidValueError, match="ca" + sentence):
        issue(tmp_path, "n")
    (tmp_path / "server" / "server.key").chmod(mode)
    with pytest.raises(InvalidValueError, match="server" + sentence):
        tls_context(tmp_path / "server")


@pytest.mark.parametrize("file", ["ca.key", "ca.pem"])
def test_without_a_whole_authority_nothing_is_issued(folder: Path, file: str) -> None:
    (folder / "authority" / file).write_text("nonsense")
    with pytest.raises(InvalidValueError, match=rf"{file}"):
        issue(folder, "n")
    with pytest.raises(InvalidValueError, match="holds no authority"):
        issue(folder / "elsewhere", "n")
    assert not list(folder.rglob("node.pem"))


def test_the_key_of_another_authority_is_refused(folder: Path, other: Path) -> None:
    shutil.copy(other / "authority" / "ca.key", folder / "authority" / "ca.key")
    with pytest.raises(InvalidValueError, match="is not the key of"):
        issue(folder, "n")


@pytest.mark.parametrize("lifetime", [timedelta(0), -DAY, 10 * YEAR + DAY])
def test_a_lifetime_ends_within_the_authoritys(folder: Path, lifetime: timedelta) -> None:
    with pytest.raises(InvalidValueError, match="lifetime"):
        issue(folder, "n", lifetime=lifetime)


def test_a_certificate_issued_again_takes_the_place_of_the_first(folder: Path) -> None:
    first = issue(folder, "n")
    second = issue(folder, "n")
    assert first.folder == second.folder
    assert first.fingerprint != second.fingerprint
    key = load_pem_private_key((second.folder / "node.key").read_bytes(), None)
    certificate = certificate_of(second.folder / "node.pem")
    assert fingerprint_of(certificate) == second.fingerprint
    assert certificate.public_key() == key.public_key()


def test_what_cannot_be_written_is_said_in_a_sentence(folder: Path) -> None:
    (folder / "nodes" / "n" / ".node.pem.partial").mkdir(parents=True)
    with pytest.raises(IsADirectoryError, match=r"node\.pem"):
        issue(folder, "n")


def test_a_key_is_its_owners_from_the_first_moment(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WATCHED, str(tmp_path / "certs")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    keys = ["ca.key", "server.key", "node.key", "node.key", "server.key"]
    # The mode at the renaming is that of the making, since no file's mode was ever changed.
    assert done.stdout.splitlines() == [f"{key} 0o600" for key in keys]


def test_whoever_left_a_file_open_reads_no_key(folder: Path) -> None:
    bundle = folder / "nodes" / "n"
    bundle.mkdir(parents=True)
    partial = bundle / ".node.key.partial"
    partial.write_bytes(b"")
    partial.chmod(0o666)
    with partial.open("rb") as opened:
        issue(folder, "n")
        assert opened.read() == b""
    assert stat.S_IMODE((bundle / "node.key").stat().st_mode) == 0o600
    assert not partial.exists()


def request_of(
    path: Path,
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey,
    name: str = "n",
    *extensions: x509.ExtensionType,
) -> Path:
    """A request as other tools may make it."""
    subject = x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "elsewhere"),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )
    builder = x509.CertificateSigningRequestBuilder(subject)
    for extension in extensions:
        builder = builder.add_extension(extension, critical=True)
    path.write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    return path


def test_a_key_that_is_made_at_the_node_never_leaves_it(folder: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    path = request(site, "n")
    bundle = site / "nodes" / "n"
    assert path == bundle / "node.csr"
    assert stat.S_IMODE((bundle / "node.key").stat().st_mode) == 0o600
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o700
    assert b"PRIVATE" not in path.read_bytes()
    issued = sign(folder, path, lifetime=DAY)
    assert issued.node == "n"
    assert sorted(each.name for each in issued.folder.iterdir()) == ["ca.pem", "node.pem"]
    key = load_pem_private_key((bundle / "node.key").read_bytes(), None)
    certificate = certificate_of(issued.folder / "node.pem")
    assert certificate.public_key() == key.public_key()
    assert fingerprint_of(certificate) == issued.fingerprint
    certificate.verify_directly_issued_by(ca_of(folder))


def test_a_key_that_may_be_in_use_is_not_replaced_by_a_request(tmp_path: Path) -> None:
    before = (request(tmp_path, "n").parent / "node.key").read_bytes()
    with pytest.raises(InvalidValueError, match="holds a key already"):
        request(tmp_path, "n")
    assert (tmp_path / "nodes" / "n" / "node.key").read_bytes() == before


def test_of_a_request_only_key_and_name_are_taken_over(folder: Path, tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    asked = (
        x509.BasicConstraints(ca=True, path_length=None),
        x509.SubjectAlternativeName([x509.UniformResourceIdentifier("fedpriv:node:other")]),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.TLSFeature([x509.TLSFeatureType.status_request]),
    )
    issued = sign(folder, request_of(tmp_path / "r", key, "n", *asked))
    plain = sign(folder, request_of(tmp_path / "plain", key))
    found, expected = (certificate_of(each.folder / "node.pem") for each in (issued, plain))
    assert found.subject == expected.subject
    assert [str(part.value) for part in found.subject] == ["n"]
    assert list(found.extensions) == list(expected.extensions)
    constraints = found.extensions.get_extension_for_class(x509.BasicConstraints).value
    assert not constraints.ca


def damaged(path: Path) -> Path:
    """The request with one bit of its signature changed."""
    der = bytearray(x509.load_pem_x509_csr(path.read_bytes()).public_bytes(Encoding.DER))
    der[-1] ^= 1
    path.write_bytes(x509.load_der_x509_csr(bytes(der)).public_bytes(Encoding.PEM))
    return path


def test_a_request_that_is_not_sound_is_refused_and_nothing_written(
    folder: Path, tmp_path: Path
) -> None:
    p256, path = ec.generate_private_key(ec.SECP256R1()), tmp_path / "r"

    def refusal(asked: Path) -> str:
        with pytest.raises(InvalidValueError) as caught:
            sign(folder, asked)
        assert not list(folder.rglob("node.pem"))
        return str(caught.value)

    assert "cannot be read" in refusal(tmp_path / "absent")
    path.write_text("no request")
    assert refusal(path) == f"{path} is not a certificate signing request"
    assert "the name of a node is '../n'" in refusal(request_of(path, p256, "../n"))
    assert "not signed with its own key" in refusal(damaged(request_of(path, p256)))
    weak = rsa.generate_private_key(65537, 1024)
    assert "RSA of at least 2048 bits" in refusal(request_of(path, weak))
    odd = ec.generate_private_key(ec.SECP192R1())
    assert "one of P-256, P-384" in refusal(request_of(path, odd))
    nameless = x509.CertificateSigningRequestBuilder(x509.Name([])).sign(p256, hashes.SHA256())
    path.write_bytes(nameless.public_bytes(Encoding.PEM))
    assert "has 0 common names" in refusal(path)


def test_an_rsa_key_of_a_sound_length_is_signed(folder: Path, tmp_path: Path) -> None:
    key = rsa.generate_private_key(65537, 2048)
    issued = sign(folder, request_of(tmp_path / "r", key))
    assert certificate_of(issued.folder / "node.pem").public_key() == key.public_key()
