"""Certificates: which are accepted, which are refused and why, alone and in real TLS."""

import base64
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import tomli_w
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.errors import InvalidValueError
from fedpriv.server import certificates
from fedpriv.server.certificates import init, load_ca, sign
from fedpriv.server.enrolment import EnrolledCertificates, Enrolment, UnknownPeerError
from fedpriv.wire.naming import check_node_name, fingerprint_of
from simulations.loopback import issue

NOW = datetime.now(UTC) + timedelta(hours=1)  # after what these tests issue
DAY = timedelta(days=1)
HOSTS = ["localhost", "127.0.0.1"]
ID = "5f" * 16


class KilledError(Exception):
    """In the place of a signal."""


@pytest.mark.parametrize("last", ["_write_key", "_write_certificate", "issue_server"])
def test_a_command_that_was_killed_leaves_a_whole_authority_or_none(
    last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = getattr(certificates, last)

    def killed(*given: object) -> None:
        honest(*given)
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(certificates, last, killed)
        with pytest.raises(KilledError):
            init(tmp_path, HOSTS)
    if last == "_write_key":
        init(tmp_path, HOSTS)
    else:  # it was whole by then
        with pytest.raises(InvalidValueError, match="an authority is already in"):
            init(tmp_path, HOSTS)
        certificates.issue_server(tmp_path, HOSTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["authority", "server"]
    issue(tmp_path, "site-1")


def test_a_key_that_has_signed_is_kept_if_its_certificate_is_lost(tmp_path: Path) -> None:
    init(tmp_path, HOSTS)
    (tmp_path / "authority" / "ca.pem").unlink()
    key = (tmp_path / "authority" / "ca.key").read_bytes()
    with pytest.raises(InvalidValueError, match="an authority is already in"):
        init(tmp_path, HOSTS)
    assert (tmp_path / "authority" / "ca.key").read_bytes() == key


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    init(tmp_path / "certs", HOSTS)
    return tmp_path / "certs"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    init(tmp_path / "other", HOSTS)
    return tmp_path / "other"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority that all examples of a property use."""
    folder = tmp_path_factory.mktemp("shared")
    init(folder, HOSTS)
    return folder


def pem_of(bundle: Path) -> bytes:
    return (bundle / "node.pem").read_bytes()


def enrol(folder: Path, **certificates: str) -> EnrolledCertificates:
    """The enrolment of nodes with these certificates, in place of an older one."""
    nodes = {node: {"users": [node], "certificate": text} for node, text in certificates.items()}
    path, partial = folder / "enrolment.toml", folder / "enrolment.partial"
    partial.write_text(tomli_w.dumps({"population": ID, "nodes": nodes}), encoding="utf-8")
    partial.replace(path)
    return EnrolledCertificates(path)


def refusal_of(certificates: EnrolledCertificates, pem: bytes, now: datetime = NOW) -> str:
    with pytest.raises(UnknownPeerError) as caught:
        certificates.node_of(pem, now)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_certificate_names_the_node_at_which_it_is_enrolled(folder: Path) -> None:
    a, b, c = (issue(folder, name) for name in "abc")
    certificates = enrol(folder, one=a.fingerprint, b=b.fingerprint)
    assert certificates.node_of(pem_of(a.folder), NOW) == "one"
    assert certificates.node_of(pem_of(b.folder), NOW) == "b"
    assert "not enrolled" in refusal_of(certificates, pem_of(c.folder))


def test_a_newer_certificate_of_a_node_must_be_enrolled_in_place_of_the_old(folder: Path) -> None:
    first = issue(folder, "n")
    old, certificates = pem_of(first.folder), enrol(folder, n=first.fingerprint)
    second = issue(folder, "n")
    assert certificates.node_of(old, NOW) == "n"
    assert "not enrolled" in refusal_of(certificates, pem_of(second.folder))
    enrol(folder, n=second.fingerprint)
    assert "struck off" in refusal_of(certificates, old)
    assert certificates.node_of(pem_of(second.folder), NOW) == "n"


def test_a_fingerprint_may_be_written_as_openssl_prints_it(folder: Path) -> None:
    issued = issue(folder, "n")
    printed = ":".join(re.findall("..", issued.fingerprint.upper()))
    assert enrol(folder, n=printed).node_of(pem_of(issued.folder), NOW) == "n"


@pytest.mark.parametrize("text", ["", "n", "ab" * 31, "ab" * 33, "xy" * 32, "٣" * 64])
def test_what_is_no_fingerprint_is_refused(folder: Path, text: str) -> None:
    certificates = enrol(folder, n=text)
    sentence = r"nodes\.n\.certificate is .*; it must be the SHA-256 fingerprint"
    with pytest.raises(InvalidValueError, match=sentence):
        certificates.nodes()
    with pytest.raises(InvalidValueError, match=sentence):
        Enrolment.load(certificates.path)


def test_a_certificate_is_one_nodes(folder: Path) -> None:
    issued = issue(folder, "n")
    certificates = enrol(folder, a=issued.fingerprint, b=issued.fingerprint.upper())
    sentence = r"nodes\.b\.certificate is that of node 'a'"
    with pytest.raises(InvalidValueError, match=sentence):
        certificates.node_of(pem_of(issued.folder), NOW)
    with pytest.raises(InvalidValueError, match=sentence):
        Enrolment.load(certificates.path)


@pytest.mark.parametrize("content", [None, b"", b"[nodes", b"nodes = 3", b"# \xe9\n"])
def test_a_damaged_enrolment_lets_nobody_pass(folder: Path, content: bytes | None) -> None:
    issued = issue(folder, "n")
    certificates = enrol(folder, n=issued.fingerprint)
    assert certificates.node_of(pem_of(issued.folder), NOW) == "n"
    certificates.path.unlink()
    if content is not None:
        certificates.path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(InvalidValueError, match=re.escape(str(certificates.path))):
            certificates.node_of(pem_of(issued.folder), NOW)
    enrol(folder, n=issued.fingerprint)
    assert certificates.node_of(pem_of(issued.folder), NOW) == "n"


@pytest.mark.parametrize("shift", [3_000_000_000, -3600_000_000_000])  # later; set back
def test_the_enrolment_is_read_again_when_it_may_have_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    reads = []
    read_text, now = Path.read_text, time.time_ns
    issued = issue(folder, "n")
    certificates, pem = enrol(folder, n=issued.fingerprint), pem_of(issued.folder)

    def counted(path: Path, encoding: str) -> str:
        reads.append(path)
        return read_text(path, encoding)

    monkeypatch.setattr(Path, "read_text", counted)
    assert [certificates.node_of(pem, NOW) for _ in range(2)] == ["n", "n"]
    assert len(reads) == 2  # written just now, so it may change and look the same
    monkeypatch.setattr(time, "time_ns", lambda: now() + shift)
    assert [certificates.node_of(pem, NOW) for _ in range(3)] == ["n", "n", "n"]
    assert len(reads) == 3
    enrol(folder, other="ab" * 32)
    assert "struck off" in refusal_of(certificates, pem)
    assert len(reads) == 4


@pytest.mark.parametrize("pem", [b"", b"nonsense", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_what_is_no_certificate_is_refused(folder: Path, pem: bytes) -> None:
    assert "cannot be parsed" in refusal_of(enrol(folder, n="ab" * 32), pem)


def damaged(path: Path, good: bytes, bad: bytes) -> bytes:
    """A PEM file with the first of these bytes of its DER replaced by as many others."""
    begin, *lines, end = path.read_text().splitlines()
    content = base64.b64decode("".join(lines))
    assert good in content
    text = base64.encodebytes(content.replace(good, bad, 1)).decode()
    return f"{begin}\n{text}{end}\n".encode()


@pytest.mark.parametrize(
    ("good", "bad"), [(b"\x02\x01\x02", b"\x02\x01\x09"), (b"\x0c\x01n", b"\x0c\x01\xff")]
)
def test_another_version_and_a_subject_that_is_no_text_are_refused(
    folder: Path, good: bytes, bad: bytes
) -> None:
    issued = issue(folder, "n")
    pem = damaged(issued.folder / "node.pem", good, bad)
    assert (
        refusal_of(enrol(folder, n=issued.fingerprint), pem)
        == "the certificate is refused: it cannot be parsed"
    )


def test_a_request_of_another_version_is_refused(folder: Path) -> None:
    request = issue(folder, "n").folder / "node.csr"
    request.write_bytes(damaged(request, b"\x02\x01\x00", b"\x02\x01\x09"))
    with pytest.raises(InvalidValueError, match="is not a certificate signing request"):
        sign(folder, request)


def test_time_is_checked_to_the_second(folder: Path) -> None:
    begin, second = datetime(2030, 1, 1, tzinfo=UTC), timedelta(seconds=1)
    issued = issue(folder, "n", begin=begin, lifetime=DAY)
    certificates, pem = enrol(folder, n=issued.fingerprint), pem_of(issued.folder)
    assert "it is valid from" in refusal_of(certificates, pem, begin - second)
    assert certificates.node_of(pem, begin) == certificates.node_of(pem, begin + DAY) == "n"
    assert "it is valid from" in refusal_of(certificates, pem, begin + DAY + second)


def test_an_authority_that_was_there_before_will_do(folder: Path) -> None:
    key = rsa.generate_private_key(65537, 2048)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Hospital CA")])
    for authority in (True, False):
        certificate = (
            x509.CertificateBuilder()
            .issuer_name(name)
            .subject_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - DAY)
            .not_valid_after(NOW + DAY)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        (folder / f"{authority}.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    assert load_ca(folder / "True.pem").subject == name
    certificates = enrol(folder, n=fingerprint_of(certificate))
    assert certificates.node_of((folder / "False.pem").read_bytes(), NOW) == "n"
    with pytest.raises(InvalidValueError, match="but one issued by it"):
        load_ca(folder / "False.pem")
    with pytest.raises(InvalidValueError, match=r"absent\.pem cannot be read: No such file"):
        load_ca(folder / "absent.pem")
    (folder / "text.pem").write_text("text")
    with pytest.raises(InvalidValueError, match=r"text\.pem is not an authority's certificate$"):
        load_ca(folder / "text.pem")


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=24) | st.from_regex(r"[^/\W]{1,20}", fullmatch=True))
def test_a_name_is_refused_or_issued(shared: Path, name: str) -> None:
    try:
        check_node_name(name)
    except InvalidValueError:
        with pytest.raises(InvalidValueError, match="the name of a node is"):
            issue(shared, name)
        return
    assert_named(shared, name)


def assert_named(folder: Path, name: str) -> None:
    """Assert that a certificate says this name, and lies where it should."""
    bundle = issue(folder, name).folder
    assert bundle.resolve().parent == (folder / "nodes").resolve()
    assert bundle.name == name
    certificate = x509.load_pem_x509_certificate(pem_of(bundle))
    assert [part.value for part in certificate.subject] == [name]


@given(st.text(max_size=70))
def test_legal_names_are_those_described(name: str) -> None:
    legal = (
        all(character.isprintable() and character != "/" for character in name)
        and not name.startswith((".", " "))
        and not name.endswith(" ")
        and 0 < len(name.encode(errors="replace")) <= 64
    )
    if legal:
        assert check_node_name(name) == name
    else:
        with pytest.raises(InvalidValueError):
            check_node_name(name)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/", " a", "a ", "a\n", "a\0", "a" * 65])
def test_a_name_cannot_leave_its_folder(folder: Path, name: str) -> None:
    with pytest.raises(InvalidValueError, match="the name of a node is"):
        issue(folder, name)


@pytest.mark.parametrize("name", ["a", "a.b", "ca", "server", "é" * 32, "a" * 64, "%2F", "a:b@c"])
def test_a_name_can_be_anything_else(folder: Path, name: str) -> None:
    assert_named(folder, name)


@contextmanager
def served(folder: Path) -> Iterator[int]:
    """Port of a server that tells each peer the node at which its certificate is enrolled."""
    certificates = EnrolledCertificates(folder / "enrolment.toml")

    def name(request: bytes, context: grpc.ServicerContext) -> bytes:
        (pem,) = context.auth_context()["x509_pem_cert"]
        try:
            return certificates.node_of(pem, datetime.now(UTC)).encode()
        except UnknownPeerError as error:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))

    pair = tuple((folder / "server" / f"server.{kind}").read_bytes() for kind in ("key", "pem"))
    root = (folder / "server" / "ca.pem").read_bytes()
    credentials = grpc.ssl_server_credentials([pair], root, require_client_auth=True)
    handlers = {"Name": grpc.unary_unary_rpc_method_handler(name)}
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t", handlers),))
        port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        try:
            yield port
        finally:
            server.stop(None).wait()


@contextmanager
def connected(port: int, root: Path, bundle: Path | None) -> Iterator[Callable[[], str]]:
    """A call to the server with the certificate of a bundle, trusting the authority of `root`."""
    pair = {}
    if bundle is not None:
        pair["private_key"] = (bundle / "node.key").read_bytes()
        pair["certificate_chain"] = pem_of(bundle)
    trusted = (root / "authority" / "ca.pem").read_bytes()
    credentials = grpc.ssl_channel_credentials(trusted, **pair)
    with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        call = channel.unary_unary("/t/Name")
        yield lambda: call(b"", timeout=5).decode()


def refusal(call: Callable[[], str]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def test_tls_accepts_enrolled_nodes_until_they_are_struck_off(folder: Path) -> None:
    first, second = issue(folder, "hôpital a"), issue(folder, "b")
    enrol(folder, a=first.fingerprint, b=second.fingerprint)
    with (
        served(folder) as port,
        connected(port, folder, first.folder) as a,
        connected(port, folder, second.folder) as b,
    ):
        assert (a(), b()) == ("a", "b")
        enrol(folder, a=first.fingerprint)
        code, details = refusal(b)
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert "struck off" in details
        assert a() == "a"
        again = issue(folder, "b")
        enrol(folder, a=first.fingerprint, b=again.fingerprint)
        with connected(port, folder, again.folder) as anew:
            assert anew() == "b"


def test_tls_refuses_whoever_has_no_valid_certificate(folder: Path, other: Path) -> None:
    expired = issue(folder, "expired", begin=NOW - 2 * DAY, lifetime=DAY)
    early, strange = issue(folder, "early", begin=NOW + DAY), issue(other, "n")
    good = issue(folder, "n")
    all_four = {"a": expired, "b": early, "c": strange, "d": good}
    enrol(folder, **{node: issued.fingerprint for node, issued in all_four.items()})
    with served(folder) as port:
        for bundle in (None, strange.folder, expired.folder, early.folder):
            with connected(port, folder, bundle) as call:
                assert refusal(call)[0] is grpc.StatusCode.UNAVAILABLE  # before our own check
        with connected(port, folder, good.folder) as call:
            assert call() == "d"


def test_tls_of_a_node_refuses_a_server_of_another_authority(folder: Path, other: Path) -> None:
    issued = issue(folder, "n")
    enrol(folder, n=issued.fingerprint)
    with served(folder) as port, connected(port, other, issued.folder) as call:
        assert refusal(call)[0] is grpc.StatusCode.UNAVAILABLE
