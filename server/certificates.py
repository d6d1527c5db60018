"""A small authority that issues X.509 certificates.

    FOLDER/authority/    ca.pem ca.key
    FOLDER/server/       ca.pem server.pem server.key
    FOLDER/nodes/NAME/   node.key node.csr, made at the node; ca.pem node.pem, from the authority

One folder per machine, open to its owner only. All files are PEM, and each is replaced atomically;
a key is never readable by others, not even while it is written.
"""

import ipaddress
import re
import secrets
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple, TypeGuard
from urllib.parse import quote

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from fedpriv.errors import InvalidValueError
from fedpriv.server.enrolment import MALFORMED, fingerprint_of
from fedpriv.support.disk import sync, write_atomically, writing
from fedpriv.wire.naming import NODE_URI, check_node_name, read_key

YEAR = timedelta(days=365)
_AUTHORITY_LIFETIME = 10 * YEAR
_CLOCK_SKEW = timedelta(minutes=5)
_LEAST_RSA_BITS = 2048
_CURVES = ("secp256r1", "secp384r1")
_OTHER_USAGES = (
    *("crl_sign", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("encipher_only", "decipher_only"),
)
_LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}"
_HOST = re.compile(rf"(?=.{{1,253}}$)(?!(.*\.)?[0-9]+$){_LABEL}(\.{_LABEL})*")


def load_ca(path: Path) -> x509.Certificate:
    """Read the certificate of an authority, and refuse any other."""
    try:
        ca = x509.load_pem_x509_certificate(path.read_bytes())
        constraints = ca.extensions.get_extension_for_class(x509.BasicConstraints).value
    except OSError as error:
        raise InvalidValueError(f"{path} cannot be read: {error.strerror}") from error
    except (x509.ExtensionNotFound, *MALFORMED) as error:
        raise InvalidValueError(f"{path} is not an authority's certificate") from error
    if not constraints.ca:
        raise InvalidValueError(f"{path} is not an authority's certificate, but one issued by it")
    return ca


def load_certificate(path: Path) -> x509.Certificate:
    """Read a certificate."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise InvalidValueError(f"{path} cannot be read: {error.strerror}") from error
    except MALFORMED as error:
        raise InvalidValueError(f"{path} is not a certificate") from error


class Issued(NamedTuple):
    """A node's new certificate: the node, the folder it is in, and what to enrol."""

    node: str
    folder: Path
    fingerprint: str


class _Authority(NamedTuple):
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


_PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey


def init(folder: Path, hosts: Sequence[str]) -> None:
    """Make an authority for ten years, and the server's certificate.

    The hosts are DNS names and IP addresses under which nodes reach the server. A folder that holds
    an authority is refused.
    """
    _alternatives_of(hosts)
    path = folder / "authority"
    if path.exists():
        more = "it is kept, and `fedpriv certs server` issues the server another certificate"
        raise InvalidValueError(f"an authority is already in {path}; {more}")
    # What a killed command left has signed nothing, and is replaced.
    begun = folder / "authority.new"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(begun, ignore_errors=True)
        begun.mkdir(mode=0o700)
    except OSError as error:
        raise InvalidValueError(f"{path} cannot be made: {error.strerror}") from error
    # Two authorities must not share a name, or messages could not tell them apart.
    name, begin = f"fedpriv authority {secrets.token_hex(4)}", datetime.now(UTC) - _CLOCK_SKEW
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _signed(name, key.public_key(), key, None, begin, _AUTHORITY_LIFETIME)
    _write_key(begun / "ca.key", key)
    _write_certificate(begun, "ca", certificate, certificate)
    with writing(path):
        begun.rename(path)
        sync(folder)
    issue_server(folder, hosts)


def issue_server(folder: Path, hosts: Sequence[str]) -> None:
    """Give the server a new key and certificate (serverAuth), in place of those it has."""
    alternatives, authority = _alternatives_of(hosts), _opened(folder)
    begin, usage = datetime.now(UTC) - _CLOCK_SKEW, ExtendedKeyUsageOID.SERVER_AUTH
    key, (ca, signer) = ec.generate_private_key(ec.SECP256R1()), authority
    given = "fedpriv server", key.public_key(), signer, ca, begin, YEAR + _CLOCK_SKEW
    certificate = _signed(*given, usage, alternatives)
    _write_key(folder / "server" / "server.key", key)
    _write_certificate(folder / "server", "server", certificate, ca)


def request(folder: Path, node: str) -> Path:
    """Make a node's key, at the node, and the request for an authority to sign; its path.

    The key is on the curve P-256 and never replaces another, which may be in use.
    """
    bundle = folder / "nodes" / check_node_name(node)
    if (bundle / "node.key").exists():
        raise InvalidValueError(f"{bundle} holds a key already; give another --folder")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, node)])
    signed = x509.CertificateSigningRequestBuilder(subject).sign(key, hashes.SHA256())
    _write_key(bundle / "node.key", key)
    write_atomically(bundle / "node.csr", signed.public_bytes(serialization.Encoding.PEM))
    return bundle / "node.csr"


def sign(
    folder: Path, path: Path, *, begin: datetime | None = None, lifetime: timedelta = YEAR
) -> Issued:
    """Give the node of a request a certificate (clientAuth, `fedpriv:node:NAME`).

    Of the request only the key and the common name, which is the node's name, are taken over. It
    replaces the node's certificate in the folder. The server knows the node by whichever
    certificate is enrolled: an older one stays good until its fingerprint is struck off. The new
    one is valid from `begin` on, which has a time zone, by default at once; it must not outlive the
    authority.
    """
    (node, key), (ca, signer) = _requested(path), _opened(folder)
    begin = datetime.now(UTC) - _CLOCK_SKEW if begin is None else begin
    uri = x509.UniformResourceIdentifier(NODE_URI + quote(node))
    usage, bundle = ExtendedKeyUsageOID.CLIENT_AUTH, folder / "nodes" / node
    certificate = _signed(node, key, signer, ca, begin, lifetime, usage, [uri])
    _write_certificate(bundle, "node", certificate, ca)
    return Issued(node, bundle, fingerprint_of(certificate))


def issue(
    folder: Path, node: str, *, begin: datetime | None = None, lifetime: timedelta = YEAR
) -> Issued:
    """Request and sign in one folder, with a new key, where node and authority are one machine."""
    (folder / "nodes" / check_node_name(node) / "node.key").unlink(missing_ok=True)
    return sign(folder, request(folder, node), begin=begin, lifetime=lifetime)


def _requested(path: Path) -> tuple[str, _PublicKey]:
    """Name and key of a request; InvalidValueError unless it is of a node with a sound key."""
    try:
        found = x509.load_pem_x509_csr(path.read_bytes())
        key, valid = found.public_key(), found.is_signature_valid
        names = [
            str(each.value) for each in found.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        ]
    except OSError as error:
        raise InvalidValueError(f"{path} cannot be read: {error.strerror}") from error
    except MALFORMED as error:
        raise InvalidValueError(f"{path} is not a certificate signing request") from error
    if not valid:
        raise InvalidValueError(f"{path} is not signed with the key that it is about")
    if not _is_sound(key):
        legal = f"P-256, P-384 and RSA of at least {_LEAST_RSA_BITS} bits"
        raise InvalidValueError(f"the key of {path} is of another kind than are legal: {legal}")
    if len(names) != 1:
        raise InvalidValueError(f"{path} has {len(names)} common names; it must have the node's")
    try:
        return check_node_name(names[0]), key
    except InvalidValueError as error:
        raise InvalidValueError(f"{path}: {error}") from error


def _is_sound(key: object) -> TypeGuard[_PublicKey]:
    if isinstance(key, rsa.RSAPublicKey):
        return key.key_size >= _LEAST_RSA_BITS
    return isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _CURVES


def _opened(folder: Path) -> _Authority:
    path = folder / "authority"
    try:
        content = read_key(path / "ca.key")
    except OSError as error:
        raise InvalidValueError(
            f"{folder} holds no authority: {path / 'ca.key'} cannot be read: {error.strerror}"
        ) from error
    ca = load_ca(path / "ca.pem")
    try:
        key = serialization.load_pem_private_key(content, None)
    except MALFORMED as error:
        raise InvalidValueError(f"{path / 'ca.key'} is not a private key in PEM") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
        raise InvalidValueError(f"{path / 'ca.key'} is not the key of {path / 'ca.pem'}")
    return _Authority(ca, key)


def _signed(
    name: str,
    key: _PublicKey,
    signer: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate | None,
    begin: datetime,
    lifetime: timedelta,
    usage: ObjectIdentifier | None = None,
    alternatives: Sequence[x509.GeneralName] = (),
) -> x509.Certificate:
    """A certificate for a key; an authority's own is signed by itself, and has no `ca`."""
    authority = ca is None
    subject = issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    if ca is not None:
        issuer = ca.subject
        _check_validity(begin, lifetime, ca.not_valid_after_utc)
    usages = {"digital_signature": not authority, "key_cert_sign": authority}
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.SubjectKeyIdentifier.from_public_key(key), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False),
        (x509.BasicConstraints(ca=authority, path_length=0 if authority else None), True),
        (x509.KeyUsage(**dict.fromkeys(_OTHER_USAGES, False), **usages), True),
    ]
    if usage is not None:
        extensions.append((x509.ExtendedKeyUsage([usage]), False))
        extensions.append((x509.SubjectAlternativeName(alternatives), False))
    serial, end = x509.random_serial_number(), begin + lifetime
    builder = x509.CertificateBuilder(issuer, subject, key, serial, begin, end)
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer, hashes.SHA256())


def _check_validity(begin: datetime, lifetime: timedelta, last: datetime) -> None:
    if begin.tzinfo is None:
        raise InvalidValueError(f"the validity begins at {begin}; it must have a time zone")
    if not timedelta(0) < lifetime <= last - begin:
        legal = f"it must be positive and end before the authority's, at {last}"
        raise InvalidValueError(f"the lifetime is {lifetime}; {legal}")


def _alternatives_of(hosts: Sequence[str]) -> list[x509.GeneralName]:
    if not hosts:
        raise InvalidValueError("the server has no host; it must have a DNS name or an IP address")
    alternatives: list[x509.GeneralName] = []
    for host in hosts:
        try:
            alternatives.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError as error:
            if not _HOST.fullmatch(host):
                sentence = f"host {host!r} is neither a DNS name nor an IP address"
                raise InvalidValueError(sentence) from error
            alternatives.append(x509.DNSName(host))
    return alternatives


def _made(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    with writing(path):
        _made(path.parent)
        private = key.private_bytes(pem, pkcs8, serialization.NoEncryption())
        write_atomically(path, private, 0o600)


def _write_certificate(
    folder: Path, name: str, certificate: x509.Certificate, ca: x509.Certificate
) -> None:
    pem = serialization.Encoding.PEM
    with writing(folder / f"{name}.pem"):
        _made(folder)
        write_atomically(folder / "ca.pem", ca.public_bytes(pem))
        write_atomically(folder / f"{name}.pem", certificate.public_bytes(pem))
