"""A small authority that issues X.509 certificates.

    FOLDER/authority/    ca.pem ca.key
    FOLDER/server/       ca.pem server.pem server.key
    FOLDER/nodes/NAME/   ca.pem node.pem node.key

One folder per machine, open to its owner only. All files are PEM, and each is replaced atomically;
a key is never readable by others, not even while it is written.
"""

import ipaddress
import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from fedpriv.errors import InvalidValueError, writing
from fedpriv.server.enrolment import MALFORMED, fingerprint_of
from fedpriv.training.rounds import write_atomically
from fedpriv.wire.naming import NODE_URI, check_node_name

YEAR = timedelta(days=365)
_AUTHORITY_LIFETIME = 10 * YEAR
_CLOCK_SKEW = timedelta(minutes=5)
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
    except (OSError, x509.ExtensionNotFound, *MALFORMED) as error:
        raise InvalidValueError(f"{path} is not an authority's certificate: {error}") from error
    if not constraints.ca:
        raise InvalidValueError(f"{path} is not an authority's certificate, but one issued by it")
    return ca


class Issued(NamedTuple):
    """A node's new certificate: the folder to move to the node, and what to enrol."""

    folder: Path
    fingerprint: str


class _Signed(NamedTuple):
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def init(folder: Path, hosts: Sequence[str]) -> None:
    """Make an authority for ten years, and the server's certificate.

    The hosts are DNS names and IP addresses under which nodes reach the server. A folder that holds
    an authority is refused.
    """
    _alternatives_of(hosts)
    path = folder / "authority"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    except OSError as error:
        raise InvalidValueError(f"{path} cannot be made: {error.strerror}") from error
    # Two authorities must not share a name, or messages could not tell them apart.
    name, begin = f"fedpriv authority {secrets.token_hex(4)}", datetime.now(UTC) - _CLOCK_SKEW
    authority = _signed(name, None, begin, _AUTHORITY_LIFETIME)
    _write(path, "ca", authority, authority)
    issue_server(folder, hosts)


def issue_server(folder: Path, hosts: Sequence[str]) -> None:
    """Give the server a new key and certificate (serverAuth), in place of those it has."""
    alternatives, authority = _alternatives_of(hosts), _opened(folder)
    begin, usage = datetime.now(UTC) - _CLOCK_SKEW, ExtendedKeyUsageOID.SERVER_AUTH
    lifetime = YEAR + _CLOCK_SKEW
    issued = _signed("fedpriv server", authority, begin, lifetime, usage, alternatives)
    _write(folder / "server", "server", issued, authority)


def issue(
    folder: Path, node: str, *, begin: datetime | None = None, lifetime: timedelta = YEAR
) -> Issued:
    """Give a node a new key and certificate (clientAuth, `fedpriv:node:NAME`).

    It replaces the node's bundle in the folder. The server knows the node by whichever certificate
    is enrolled: an older one stays good until its fingerprint is struck off. The new one is valid
    from `begin` on, which has a time zone, by default at once; it must not outlive the authority.
    """
    begin = datetime.now(UTC) - _CLOCK_SKEW if begin is None else begin
    uri = x509.UniformResourceIdentifier(NODE_URI + quote(check_node_name(node)))
    usage, authority = ExtendedKeyUsageOID.CLIENT_AUTH, _opened(folder)
    issued = _signed(node, authority, begin, lifetime, usage, [uri])
    _write(folder / "nodes" / node, "node", issued, authority)
    return Issued(folder / "nodes" / node, fingerprint_of(issued.certificate))


def _opened(folder: Path) -> _Signed:
    path = folder / "authority"
    try:
        content = (path / "ca.key").read_bytes()
    except OSError as error:
        raise InvalidValueError(f"{folder} holds no authority: {error}") from error
    ca = load_ca(path / "ca.pem")
    try:
        key = serialization.load_pem_private_key(content, None)
    except MALFORMED as error:
        raise InvalidValueError(f"{path / 'ca.key'} cannot be read: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
        raise InvalidValueError(f"{path / 'ca.key'} is not the key of {path / 'ca.pem'}")
    return _Signed(ca, key)


def _signed(
    name: str,
    issuer: _Signed | None,
    begin: datetime,
    lifetime: timedelta,
    usage: ObjectIdentifier | None = None,
    alternatives: Sequence[x509.GeneralName] = (),
) -> _Signed:
    """A certificate for a new key on the curve P-256; an authority's own has no issuer."""
    key, authority = ec.generate_private_key(ec.SECP256R1()), issuer is None
    subject = signer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    signing = key
    if issuer is not None:
        signer, signing = issuer.certificate.subject, issuer.key
        _check_validity(begin, lifetime, issuer.certificate.not_valid_after_utc)
    usages = {"digital_signature": not authority, "key_cert_sign": authority}
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), False),
        (x509.BasicConstraints(ca=authority, path_length=0 if authority else None), True),
        (x509.KeyUsage(**dict.fromkeys(_OTHER_USAGES, False), **usages), True),
    ]
    if usage is not None:
        extensions.append((x509.ExtendedKeyUsage([usage]), False))
        extensions.append((x509.SubjectAlternativeName(alternatives), False))
    serial, end = x509.random_serial_number(), begin + lifetime
    builder = x509.CertificateBuilder(signer, subject, key.public_key(), serial, begin, end)
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return _Signed(builder.sign(signing, hashes.SHA256()), key)


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


def _write(folder: Path, name: str, issued: _Signed, authority: _Signed) -> None:
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    with writing(folder / f"{name}.pem"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        write_atomically(folder / "ca.pem", authority.certificate.public_bytes(pem))
        # What `write_atomically` fills and renames: a new file, so that no other process has it
        # open, with its final mode from the start.
        partial = folder / f".{name}.key.partial"
        partial.unlink(missing_ok=True)
        partial.touch(0o600, exist_ok=False)
        key = issued.key.private_bytes(pem, pkcs8, serialization.NoEncryption())
        write_atomically(folder / f"{name}.key", key)
        write_atomically(folder / f"{name}.pem", issued.certificate.public_bytes(pem))
