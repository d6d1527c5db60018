"""X.509 certificates: how a server reads them, and a small authority that issues them.

    FOLDER/authority/    ca.pem ca.key
    FOLDER/server/       ca.pem server.pem server.key
    FOLDER/nodes/NAME/   ca.pem node.pem node.key

One folder per machine, open to its owner only. All files are PEM, and each is replaced atomically;
a key is never readable by others, not even while it is written.
"""

import ipaddress
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from fedpriv.errors import InvalidValueError
from fedpriv.training.checkpoint import write_atomically

MALFORMED = (ValueError, TypeError, UnsupportedAlgorithm, x509.DuplicateExtension)
"""What cryptography raises for a certificate or key that cannot be parsed."""
YEAR = timedelta(days=365)
_AUTHORITY_LIFETIME = 10 * YEAR
_CLOCK_SKEW = timedelta(minutes=5)
_LABEL = r"(?!-)[A-Za-z0-9_-]{1,63}"
_HOST = re.compile(rf"(?=.{{1,253}}$)(?!(.*\.)?[0-9]+$){_LABEL}(\.{_LABEL})*")
_FINGERPRINT = re.compile("[0-9a-f]{64}")


def check_node_name(name: str) -> str:
    """Return a name that a node can have; it becomes a common name and the name of a folder.

    Raises:
        InvalidValueError: it is not 1 to 64 bytes of UTF-8, all printable, without "/", a leading
            ".", or a leading or trailing space.
    """
    legal = name.isprintable() and name == name.strip() and "/" not in name and name[:1] != "."
    if not (legal and 1 <= len(name.encode()) <= 64):
        raise InvalidValueError(
            f"the name of a node is {name!r}; it must be 1 to 64 bytes of printable text without "
            "'/', a leading '.', or a leading or trailing space"
        )
    return name


def fingerprint_of(certificate: x509.Certificate) -> str:
    """SHA-256 of a certificate in DER, as 64 lower-case hexadecimal digits."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def parsed_fingerprint(text: object) -> str | None:
    """A fingerprint, also in OpenSSL's upper case with colons; None if it is not one."""
    digits = text.replace(":", "").lower() if isinstance(text, str) else ""
    return digits if _FINGERPRINT.fullmatch(digits) else None


def load_ca(path: Path) -> x509.Certificate:
    """Read the certificate of an authority.

    Raises:
        InvalidValueError: it cannot be read, or is not an authority's.
    """
    try:
        ca = x509.load_pem_x509_certificate(path.read_bytes())
        constraints = ca.extensions.get_extension_for_class(x509.BasicConstraints).value
    except (OSError, x509.ExtensionNotFound, *MALFORMED) as error:
        raise InvalidValueError(f"{path} is not an authority's certificate: {error}") from error
    if not constraints.ca:
        raise InvalidValueError(f"{path} is not an authority's certificate, but one issued by it")
    return ca


@dataclass(frozen=True)
class Issued:
    """A node's new certificate.

    Attributes:
        folder: to move to the node, with ca.pem, node.pem and node.key.
        fingerprint: SHA-256 of the certificate, to enrol at the server.
    """

    folder: Path
    fingerprint: str


@dataclass(frozen=True)
class _Signed:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def init(folder: Path, hosts: Sequence[str]) -> None:
    """Make an authority for ten years, and the server's certificate.

    Args:
        folder: gets `authority/` and `server/`.
        hosts: DNS names and IP addresses under which nodes reach the server, at least one.

    Raises:
        InvalidValueError: a host is neither, or the folder holds an authority or cannot be made.
    """
    _alternatives_of(hosts)
    path = folder / "authority"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    except OSError as error:
        raise InvalidValueError(f"{path} cannot be made: {error.strerror}") from error
    authority = _new_authority()
    with _writing(path):
        _write_key(path / "ca.key", authority.key)
        write_atomically(path / "ca.pem", authority.certificate.public_bytes(Encoding.PEM))
    issue_server(folder, hosts)


def issue_server(folder: Path, hosts: Sequence[str], *, lifetime: timedelta = YEAR) -> None:
    """Give the server a new key and certificate (serverAuth), in place of those it has.

    Args:
        folder: as given to `init`.
        hosts: as for `init`.
        lifetime: from now on.

    Raises:
        InvalidValueError: the folder holds no authority, a host is neither a DNS name nor an IP
            address, or the certificate would never be valid or outlive the authority.
    """
    alternatives, authority = _alternatives_of(hosts), _opened(folder)
    usage, begin = ExtendedKeyUsageOID.SERVER_AUTH, datetime.now(UTC) - _CLOCK_SKEW
    lifetime += _CLOCK_SKEW
    issued = _issued(authority, "fedpriv server", alternatives, usage, begin, lifetime)
    _write_bundle(folder / "server", "server", authority, issued)


def issue(
    folder: Path, node: str, *, begin: datetime | None = None, lifetime: timedelta = YEAR
) -> Issued:
    """Give a node a new key and certificate (clientAuth, `fedpriv:node:NAME`).

    It replaces the node's bundle in the folder. The server knows the node by whichever certificate
    is enrolled: an older one stays good until its fingerprint is struck off.

    Args:
        folder: as given to `init`.
        node: its name, see `check_node_name`.
        begin: when it becomes valid, with a time zone; None: at once.
        lifetime: from `begin` on.

    Raises:
        InvalidValueError: the name is illegal, there is no authority, or the certificate would
            never be valid or outlive the authority.
    """
    begin = datetime.now(UTC) - _CLOCK_SKEW if begin is None else begin
    uri = x509.UniformResourceIdentifier("fedpriv:node:" + quote(check_node_name(node)))
    authority, usage = _opened(folder), ExtendedKeyUsageOID.CLIENT_AUTH
    issued = _issued(authority, node, [uri], usage, begin, lifetime)
    bundle = folder / "nodes" / node
    _write_bundle(bundle, "node", authority, issued)
    return Issued(bundle, fingerprint_of(issued.certificate))


def _opened(folder: Path) -> _Signed:
    path = folder / "authority"
    try:
        content = (path / "ca.key").read_bytes()
    except OSError as error:
        raise InvalidValueError(f"{folder} holds no authority: {error}") from error
    ca = load_ca(path / "ca.pem")
    try:
        key = load_pem_private_key(content, None)
    except MALFORMED as error:
        raise InvalidValueError(f"{path / 'ca.key'} cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
        raise InvalidValueError(f"{path / 'ca.key'} is not the key of {path / 'ca.pem'}")
    return _Signed(ca, key)


def _new_authority() -> _Signed:
    """An authority that cannot make others, with a new key on the curve P-256."""
    key, begin = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC) - _CLOCK_SKEW
    # Two authorities must not share a name, or messages could not tell them apart.
    subject = _named(f"fedpriv authority {secrets.token_hex(4)}")
    builder = (
        _builder(subject, subject, key, key, begin, begin + _AUTHORITY_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(authority=True), critical=True)
    )
    return _Signed(builder.sign(key, hashes.SHA256()), key)


def _issued(
    authority: _Signed,
    name: str,
    alternatives: Sequence[x509.GeneralName],
    usage: ObjectIdentifier,
    begin: datetime,
    lifetime: timedelta,
) -> _Signed:
    ca, key = authority.certificate, ec.generate_private_key(ec.SECP256R1())
    if begin.tzinfo is None:
        raise InvalidValueError(f"the validity begins at {begin}; it must have a time zone")
    if not timedelta(0) < lifetime <= ca.not_valid_after_utc - begin:
        raise InvalidValueError(
            f"the lifetime is {lifetime}; it must be positive and end before the authority's, "
            f"at {ca.not_valid_after_utc}"
        )
    builder = (
        _builder(_named(name), ca.subject, key, authority.key, begin, begin + lifetime)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    )
    return _Signed(builder.sign(authority.key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    begin: datetime,
    end: datetime,
) -> x509.CertificateBuilder:
    ours, theirs = key.public_key(), issuer_key.public_key()
    identifier = x509.SubjectKeyIdentifier.from_public_key(ours)
    of_issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(theirs)
    return (
        x509.CertificateBuilder(issuer, subject, ours, x509.random_serial_number(), begin, end)
        .add_extension(identifier, critical=False)
        .add_extension(of_issuer, critical=False)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _key_usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _alternatives_of(hosts: Sequence[str]) -> list[x509.GeneralName]:
    if not hosts:
        raise InvalidValueError("the server has no host; it must have a DNS name or an IP address")
    alternatives: list[x509.GeneralName] = []
    for host in hosts:
        try:
            alternatives.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            if not _HOST.fullmatch(host):
                raise InvalidValueError(
                    f"host {host!r} is neither a DNS name nor an IP address"
                ) from None
            alternatives.append(x509.DNSName(host))
    return alternatives


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Turn a full disk or a file of another user into one sentence."""
    try:
        yield
    except OSError as error:
        sentence = f"{error.filename or folder} cannot be written: {error.strerror}"
        raise InvalidValueError(sentence) from error


def _write_bundle(folder: Path, name: str, authority: _Signed, issued: _Signed) -> None:
    with _writing(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(folder / "ca.pem", authority.certificate.public_bytes(Encoding.PEM))
        _write_key(folder / f"{name}.key", issued.key)
        write_atomically(folder / f"{name}.pem", issued.certificate.public_bytes(Encoding.PEM))


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.parent.chmod(0o700)
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    # A new file, so that no other process has it open, with its final mode from the first moment.
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)  # durable with the certificate that follows into the same folder
