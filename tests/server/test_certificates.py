"""Certificates: what is accepted, what is refused and why, alone and in real TLS."""

import shutil
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.errors import InvalidValueError
from fedpriv.server.authority import YEAR, init, issue, issue_server, revoke
from fedpriv.server.certificates import (
    CertificateError,
    Check,
    RevocationList,
    check_node_name,
    load_ca,
    node_of,
)

NOW = datetime.now(UTC)
DAY = timedelta(days=1)
HOSTS = ["localhost", "127.0.0.1"]


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


def ca_of(folder: Path) -> x509.Certificate:
    return load_ca(folder / "authority" / "ca.pem")


def crl_of(folder: Path) -> RevocationList:
    return RevocationList(folder / "authority" / "crl.pem")


def pem_of(bundle: Path) -> bytes:
    return (bundle / "node.pem").read_bytes()


def certificate_of(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def named(folder: Path, pem: bytes, now: datetime | None = None) -> str:
    return node_of(pem, ca_of(folder), crl_of(folder), now or datetime.now(UTC))


def failure(folder: Path, pem: bytes, now: datetime | None = None) -> Check:
    with pytest.raises(CertificateError) as caught:
        named(folder, pem, now)
    assert "\n" not in str(caught.value)
    return caught.value.check


def key_of(folder: Path) -> ec.EllipticCurvePrivateKey:
    key = load_pem_private_key((folder / "authority" / "ca.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    return key


def signed(
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey,
    issuer: x509.Name,
    *,
    names: tuple[str, ...] = ("n",),
    uris: tuple[str, ...] = (),
    usages: tuple[x509.ObjectIdentifier, ...] = (ExtendedKeyUsageOID.CLIENT_AUTH,),
    authority: bool = False,
) -> bytes:
    """A certificate for the key itself, as an authority might issue it by other means than ours."""
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, name) for name in names]
    builder = (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(x509.Name(attributes))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW - DAY)
        .not_valid_after(NOW + DAY)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
    )
    if usages:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    if uris:
        alternatives = x509.SubjectAlternativeName(map(x509.UniformResourceIdentifier, uris))
        builder = builder.add_extension(alternatives, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def test_the_authority_is_what_it_says(folder: Path) -> None:
    ca = ca_of(folder)
    constraints = ca.extensions.get_extension_for_class(x509.BasicConstraints)
    usage = ca.extensions.get_extension_for_class(x509.KeyUsage)
    assert (constraints.critical, constraints.value.ca, constraints.value.path_length) == (1, 1, 0)
    assert usage.critical
    assert usage.value.key_cert_sign
    assert usage.value.crl_sign
    assert isinstance(ca.public_key().curve, ec.SECP256R1)
    lifetime = ca.not_valid_after_utc - NOW
    assert 10 * YEAR - DAY < lifetime < 10 * YEAR + DAY
    assert list(crl_of(folder).read(ca)) == []


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
    bundle = issue(folder, "n")
    assert bundle == folder / "nodes" / "n"
    assert sorted(path.name for path in bundle.iterdir()) == ["ca.pem", "node.key", "node.pem"]
    key = load_pem_private_key((bundle / "node.key").read_bytes(), None)
    certificate = certificate_of(bundle / "node.pem")
    assert certificate.public_key() == key.public_key()
    assert load_ca(bundle / "ca.pem") == ca_of(folder)
    assert YEAR - DAY < certificate.not_valid_after_utc - NOW < YEAR + DAY
    assert named(folder, pem_of(bundle)) == "n"


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
    with pytest.raises(InvalidValueError, match="cannot be made: File exists"):
        init(folder, HOSTS)
    assert ca_of(folder) == before


@pytest.mark.parametrize("file", ["ca.key", "ca.pem"])
def test_without_a_whole_authority_nothing_is_issued(folder: Path, file: str) -> None:
    (folder / "authority" / file).write_text("nonsense")
    with pytest.raises(InvalidValueError, match=rf"{file}"):
        issue(folder, "n")
    with pytest.raises(InvalidValueError, match="holds no authority"):
        issue(folder / "elsewhere", "n")
    assert not (folder / "nodes").exists()


def test_the_key_of_another_authority_is_refused(folder: Path, other: Path) -> None:
    shutil.copy(other / "authority" / "ca.key", folder / "authority" / "ca.key")
    with pytest.raises(InvalidValueError, match="is not the key of"):
        issue(folder, "n")


@pytest.mark.parametrize("lifetime", [timedelta(0), -DAY, 10 * YEAR + DAY])
def test_a_lifetime_ends_within_the_authoritys(folder: Path, lifetime: timedelta) -> None:
    with pytest.raises(InvalidValueError, match="lifetime"):
        issue(folder, "n", lifetime=lifetime)
    with pytest.raises(InvalidValueError, match="time zone"):
        issue(folder, "n", begin=datetime(2030, 1, 1))


def test_a_live_node_gets_another_certificate_only_as_a_replacement(folder: Path) -> None:
    first = pem_of(issue(folder, "n"))
    with pytest.raises(InvalidValueError, match="must be revoked or replaced"):
        issue(folder, "n")
    assert named(folder, first) == "n"
    second = pem_of(issue(folder, "n", replace=True))
    assert failure(folder, first) is Check.REVOCATION
    assert named(folder, second) == "n"


def test_a_dead_node_gets_another_certificate(folder: Path) -> None:
    issue(folder, "n", begin=NOW - 2 * DAY, lifetime=DAY)
    revoked = pem_of(issue(folder, "n"))
    revoke(folder, "n")
    assert named(folder, pem_of(issue(folder, "n"))) == "n"
    assert failure(folder, revoked) is Check.REVOCATION


def test_a_node_is_revoked_though_its_folder_has_left(folder: Path) -> None:
    bundle = issue(folder, "n")
    pem = pem_of(bundle)
    shutil.rmtree(bundle)
    with pytest.raises(InvalidValueError, match="must be revoked"):
        issue(folder, "n")
    revoke(folder, "n")
    assert failure(folder, pem) is Check.REVOCATION


def test_revoked_is_for_ever(folder: Path) -> None:
    pems = {name: pem_of(issue(folder, name)) for name in "abc"}
    crl, ca = crl_of(folder), ca_of(folder)
    gone: set[int] = set()
    for number, name in enumerate("abc", start=1):
        assert node_of(pems[name], ca, crl, datetime.now(UTC)) == name
        revoke(folder, name)
        revoke(folder, name)
        gone.add(x509.load_pem_x509_certificate(pems[name]).serial_number)
        listed = crl.read(ca)
        assert {entry.serial_number for entry in listed} == gone
        value = listed.extensions.get_extension_for_class(x509.CRLNumber).value
        assert value.crl_number == number
        for other in "abc"[:number]:
            with pytest.raises(CertificateError, match="is revoked"):
                node_of(pems[other], ca, crl, datetime.now(UTC))


def test_revocations_at_once_are_all_kept(folder: Path) -> None:
    names = [f"n{i}" for i in range(12)]
    pems = [pem_of(issue(folder, name)) for name in names]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda name: revoke(folder, name), names))
    assert [failure(folder, pem) for pem in pems] == [Check.REVOCATION] * 12


def test_nobody_is_revoked_by_mistake(folder: Path) -> None:
    with pytest.raises(InvalidValueError, match="no certificate to node 'x'"):
        revoke(folder, "x")
    with pytest.raises(InvalidValueError, match="name of a node"):
        revoke(folder, "../x")


@pytest.mark.parametrize("content", [None, b"", b"nonsense"])
def test_a_damaged_list_lets_nobody_pass_and_is_not_begun_anew(
    folder: Path, content: bytes | None
) -> None:
    pem, path = pem_of(issue(folder, "n")), folder / "authority" / "crl.pem"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    assert failure(folder, pem) is Check.LIST
    with pytest.raises(CertificateError, match="cannot be used"):
        revoke(folder, "n")
    with pytest.raises(CertificateError, match="cannot be used"):
        issue(folder, "n", replace=True)
    assert path.exists() == (content is not None)


def test_a_list_is_read_again_when_it_may_have_changed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []
    read_bytes, now = Path.read_bytes, time.time_ns
    crl, ca, pem = crl_of(folder), ca_of(folder), pem_of(issue(folder, "n"))
    serial = x509.load_pem_x509_certificate(pem).serial_number

    def counted(path: Path) -> bytes:
        reads.append(path)
        return read_bytes(path)

    def revoked() -> bool:
        with monkeypatch.context() as patched:
            patched.setattr(Path, "read_bytes", counted)
            return crl.holds(serial, ca, datetime.now(UTC))

    assert [revoked(), revoked()] == [False, False]
    assert len(reads) == 2  # written just now, so it may change and look the same
    monkeypatch.setattr(time, "time_ns", lambda: now() + 3_000_000_000)
    assert [revoked(), revoked(), revoked()] == [False, False, False]
    assert len(reads) == 3
    revoke(folder, "n")
    assert revoked()
    assert len(reads) == 4


def write_crl(
    folder: Path, issuer: x509.Name, extensions: tuple[x509.ExtensionType, ...] = ()
) -> None:
    """Replace the list by another, signed with the authority's key."""
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(issuer)
        .last_update(NOW - DAY)
        .next_update(NOW + DAY)
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=True)
    crl = builder.sign(key_of(folder), hashes.SHA256())
    (folder / "authority" / "crl.pem").write_bytes(crl.public_bytes(Encoding.PEM))


def test_a_list_that_is_old_or_a_part_lets_nobody_pass(folder: Path) -> None:
    pem, ours = pem_of(issue(folder, "n")), ca_of(folder).subject
    write_crl(folder, ours)
    assert named(folder, pem) == "n"
    assert failure(folder, pem, NOW + 2 * DAY) is Check.LIST
    write_crl(folder, ours, (x509.DeltaCRLIndicator(1),))
    assert failure(folder, pem) is Check.LIST


def test_a_list_of_another_authority_lets_nobody_pass(folder: Path, other: Path) -> None:
    pem = pem_of(issue(folder, "n"))
    for issuer in (ca_of(other).subject, ca_of(folder).subject):
        write_crl(other, issuer)
        shutil.copy(other / "authority" / "crl.pem", folder / "authority" / "crl.pem")
        assert failure(folder, pem) is Check.LIST
    write_crl(folder, ca_of(other).subject)
    assert failure(folder, pem) is Check.LIST


def test_an_authority_need_not_keep_a_list(folder: Path) -> None:
    pem = pem_of(issue(folder, "n"))
    revoke(folder, "n")
    assert node_of(pem, ca_of(folder), None, datetime.now(UTC)) == "n"


@pytest.mark.parametrize("pem", [b"", b"nonsense", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_what_is_no_certificate_is_refused(folder: Path, pem: bytes) -> None:
    assert failure(folder, pem) is Check.FORM


def test_another_authority_is_refused_under_its_name_and_under_ours(
    folder: Path, other: Path
) -> None:
    assert failure(folder, pem_of(issue(other, "n"))) is Check.ISSUER
    assert failure(folder, signed(key_of(other), ca_of(folder).subject)) is Check.SIGNATURE


def test_a_changed_certificate_is_refused(folder: Path) -> None:
    der = certificate_of(issue(folder, "node-a") / "node.pem").public_bytes(Encoding.DER)
    changed = x509.load_der_x509_certificate(der.replace(b"node-a", b"node-b"))
    assert failure(folder, changed.public_bytes(Encoding.PEM)) is Check.SIGNATURE


def test_time_is_checked_to_the_second(folder: Path) -> None:
    begin = datetime(2030, 1, 1, tzinfo=UTC)
    pem, second = pem_of(issue(folder, "n", begin=begin, lifetime=DAY)), timedelta(seconds=1)
    assert failure(folder, pem, begin - second) is Check.BEGIN
    assert named(folder, pem, begin) == named(folder, pem, begin + DAY) == "n"
    assert failure(folder, pem, begin + DAY + second) is Check.END


def test_an_authority_passes_nobody_before_and_after_its_time(folder: Path) -> None:
    pem = pem_of(issue(folder, "n"))
    assert failure(folder, pem, NOW - DAY) is Check.BEGIN
    with pytest.raises(CertificateError, match="the authority expired"):
        named(folder, pem, NOW + 11 * YEAR)


def test_only_certificates_for_clients_pass(folder: Path) -> None:
    ours = key_of(folder), ca_of(folder).subject
    server, client = ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH
    assert failure(folder, (folder / "server" / "server.pem").read_bytes()) is Check.USAGE
    assert failure(folder, (folder / "authority" / "ca.pem").read_bytes()) is Check.USAGE
    assert failure(folder, signed(*ours, usages=())) is Check.USAGE
    assert failure(folder, signed(*ours, usages=(server,))) is Check.USAGE
    assert failure(folder, signed(*ours, authority=True)) is Check.USAGE
    assert named(folder, signed(*ours, usages=(server, client))) == "n"


@pytest.mark.parametrize(
    ("names", "uris", "expected"),
    [
        (("a",), (), "a"),
        (("a",), ("https://a.org", "urn:x"), "a"),
        (("a",), ("fedpriv:node:b",), "b"),
        (("a",), ("fedpriv:node:b%20c%25",), "b c%"),
        ((), ("fedpriv:node:b",), "b"),
        ((), (), None),
        (("a", "b"), (), None),
        (("a/b",), (), None),
        (("a",), ("fedpriv:node:b", "fedpriv:node:c"), None),
        (("a",), ("fedpriv:node:",), None),
        (("a",), ("fedpriv:node:%2e%2e",), None),
        (("a",), ("fedpriv:node:b%2Fc",), None),
        (("a",), ("fedpriv:node:%ff",), None),
        (("a",), ("fedpriv:node:%0a",), None),
    ],
)
def test_the_name_is_the_uris_or_else_the_common_name(
    folder: Path, names: tuple[str, ...], uris: tuple[str, ...], expected: str | None
) -> None:
    pem = signed(key_of(folder), ca_of(folder).subject, names=names, uris=uris)
    if expected is None:
        assert failure(folder, pem) is Check.NAME
    else:
        assert named(folder, pem) == expected


def test_an_authority_that_was_there_before_will_do(tmp_path: Path) -> None:
    key = rsa.generate_private_key(65537, 2048)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Hospital CA")])
    (tmp_path / "ca.pem").write_bytes(signed(key, subject, names=("Hospital CA",), authority=True))
    pem = signed(key, subject)
    (tmp_path / "node.pem").write_bytes(pem)
    assert node_of(pem, load_ca(tmp_path / "ca.pem"), None, NOW) == "n"
    with pytest.raises(InvalidValueError, match="but one issued by it"):
        load_ca(tmp_path / "node.pem")
    with pytest.raises(InvalidValueError, match="no certificate of an authority"):
        load_ca(tmp_path / "absent.pem")


@settings(max_examples=25, deadline=None)
@given(st.text(max_size=24) | st.from_regex(r"[^/\W]{1,20}", fullmatch=True))
def test_a_name_is_refused_or_comes_back(shared: Path, name: str) -> None:
    try:
        check_node_name(name)
    except InvalidValueError:
        with pytest.raises(InvalidValueError, match="the name of a node is"):
            issue(shared, name)
        return
    bundle = issue(shared, name, replace=True)
    assert bundle.parent == shared / "nodes"
    assert bundle.resolve().parent == (shared / "nodes").resolve()
    assert bundle.name == name
    assert named(shared, pem_of(bundle)) == name


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
    assert named(folder, pem_of(issue(folder, name))) == name
    assert named(folder, pem_of(issue(folder, name, replace=True))) == name


@contextmanager
def served(folder: Path) -> Iterator[int]:
    """Port of a server that tells each peer the name in its certificate."""
    ca, crl = ca_of(folder), crl_of(folder)

    def name(request: bytes, context: grpc.ServicerContext) -> bytes:
        (pem,) = context.auth_context()["x509_pem_cert"]
        try:
            return node_of(pem, ca, crl, datetime.now(UTC)).encode()
        except CertificateError as error:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, error.check)

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


def test_tls_accepts_issued_nodes_until_they_are_revoked(folder: Path) -> None:
    bundles = [issue(folder, "hôpital a"), issue(folder, "b")]
    with (
        served(folder) as port,
        connected(port, folder, bundles[0]) as a,
        connected(port, folder, bundles[1]) as b,
    ):
        assert (a(), b()) == ("hôpital a", "b")
        revoke(folder, "b")
        assert refusal(b) == (grpc.StatusCode.UNAUTHENTICATED, "revocation")
        assert a() == "hôpital a"
        with connected(port, folder, issue(folder, "b")) as again:
            assert again() == "b"


def test_tls_refuses_whoever_has_no_valid_certificate(folder: Path, other: Path) -> None:
    expired = issue(folder, "expired", begin=NOW - 2 * DAY, lifetime=DAY)
    early = issue(folder, "early", begin=NOW + DAY)
    with served(folder) as port:
        for bundle in (None, issue(other, "n"), expired, early):
            with connected(port, folder, bundle) as call:
                code, details = refusal(call)
                assert (code, details in set(Check)) == (grpc.StatusCode.UNAVAILABLE, False)
        with connected(port, folder, issue(folder, "n")) as call:
            assert call() == "n"


def test_tls_of_a_node_refuses_a_server_of_another_authority(folder: Path, other: Path) -> None:
    with served(folder) as port, connected(port, other, issue(folder, "n")) as call:
        assert refusal(call)[0] is grpc.StatusCode.UNAVAILABLE
