"""A small authority that issues X.509 certificates.

    FOLDER/authority/    ca.pem ca.key
    FOLDER/server/       ca.pem server.pem server.key
    FOLDER/nodes/NAME/   node.key node.csr, made at the node; ca.pem node.pem, from the authority

Each machine has one folder, which only its owner may open. All files are PEM and are replaced
atomically. Other users can never read a key, not even while it is written.
"""

import ipaddress
import logging
import re
import secrets
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple, TypeGuard

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

from fedpriv.errors import InvalidValueError
from fedpriv.support.checks import require
from fedpriv.support.disk import write_atomically
from fedpriv.wire import naming

_log = logging.getLogger(__name__)
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
    """Return the certificate of an authority; InvalidValueError if the file holds anything else."""
    with naming.parsing(path, "an authority's certificate") as pem:
        ca = x509.load_pem_x509_certificate(pem)
        constraints = ca.extensions.get_extension_for_class(x509.BasicConstraints).value
    require(constraints.ca, f"{path} is not an authority's certificate, but one issued by it")
    return ca


def tls_context(folder: Path) -> ssl.SSLContext:
    """Return TLS that presents the server's certificate and requires one from every peer.

    InvalidValueError: a file is missing or malformed, the key does not fit the certificate, or the
    certificate is not for a server. If the authority in the same folder did not issue the
    certificate, a warning is logged, because nodes that trust only that authority cannot connect.
    """
    ca, certificate, key = [folder / n for n in ("ca.pem", "server.pem", "server.key")]
    authority, loaded = load_ca(ca), naming.load_certificate(certificate)
    naming.check_key(key, naming.read_key(key), loaded)
    if not naming.for_servers(loaded):
        raise InvalidValueError(
            f"{certificate} is not a certificate for a server (extended key usage serverAuth); "
            "`fedpriv certs server` issues one"
        )
    if not naming.issued_by([authority], loaded):
        _log.warning(
            "%s is not issued by ca.pem beside it: nodes that trust that one cannot connect",
            certificate,
        )
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Older versions renegotiate and keep sessions, which costs time and memory.
    tls.minimum_version, tls.verify_mode = ssl.TLSVersion.TLSv1_3, ssl.CERT_REQUIRED
    tls.num_tickets = 0  # for sessions
    tls.set_alpn_protocols(["h2"])
    tls.load_cert_chain(certificate, key)
    tls.load_verify_locations(ca)
    return tls


class Issued(NamedTuple):
    """A node's new certificate."""

    node: str
    folder: Path  # which contains the certificate
    fingerprint: str  # to be enrolled at the server


_PublicKey = ec.EllipticCurvePublicKey | rsa.RSAPublicKey


def init(folder: Path, hosts: Sequence[str]) -> None:
    """Create an authority that is valid for ten years, and the server's certificate.

    The hosts are DNS names and IP addresses under which nodes reach the server. InvalidValueError:
    a host is invalid, or the folder already holds an authority.
    """
    _alternatives_of(hosts)
    path = folder / "authority"
    # A key that signed something is never replaced, even if its own certificate was lost.
    if (path / "ca.pem").exists() or (folder / "server").exists():
        advice = "it is kept, and `fedpriv certs server` issues the server another certificate"
        raise InvalidValueError(f"an authority is already in {path}; {advice}")
    # The name is unique, so that messages distinguish two authorities.
    name, begin = f"fedpriv authority {secrets.token_hex(4)}", datetime.now(UTC) - _CLOCK_SKEW
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _signed(name, key.public_key(), key, None, begin, _AUTHORITY_LIFETIME)
    # The certificate is last: without it, a command that was killed has left a key that signed
    # nothing, and is replaced.
    _write_key(path / "ca.key", key)
    _write_certificate(path, "ca", certificate, certificate)
    issue_server(folder, hosts)


def issue_server(folder: Path, hosts: Sequence[str]) -> None:
    """Replace the server's key and certificate (serverAuth); the certificate lasts for a year.

    InvalidValueError: a host is invalid, or the folder holds no usable authority.
    """
    alternatives, (ca, signer) = _alternatives_of(hosts), _load_authority(folder)
    begin, usage = datetime.now(UTC) - _CLOCK_SKEW, ExtendedKeyUsageOID.SERVER_AUTH
    key = ec.generate_private_key(ec.SECP256R1())
    subject, lifetime = ("fedpriv server", key.public_key()), YEAR + _CLOCK_SKEW
    certificate = _signed(*subject, signer, ca, begin, lifetime, usage, alternatives)
    _write_key(folder / "server" / "server.key", key)
    _write_certificate(folder / "server", "server", certificate, ca)


def request(folder: Path, node: str) -> Path:
    """Create a node's key and a request for the authority to sign; return the request's path.

    This is done at the node. The key is on the curve P-256. It never replaces a key, which may be
    in use: InvalidValueError if there is one.
    """
    bundle = folder / "nodes" / naming.check_node_name(node)
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
    """Issue a certificate (clientAuth) for the node that made a request.

    The certificate takes only the key and the common name, which is the node's name, from the
    request, and replaces the node's certificate in the folder. The server accepts the certificate
    that is enrolled, so an older one remains usable until its fingerprint is removed. The new
    certificate is valid from `begin`, by default now, and must expire before the authority.
    InvalidValueError: the request, the authority or the validity is unusable.
    """
    (node, key), (ca, signer) = _load_request(path), _load_authority(folder)
    begin = datetime.now(UTC) - _CLOCK_SKEW if begin is None else begin
    usage, bundle = ExtendedKeyUsageOID.CLIENT_AUTH, folder / "nodes" / node
    certificate = _signed(node, key, signer, ca, begin, lifetime, usage)
    _write_certificate(bundle, "node", certificate, ca)
    return Issued(node, bundle, naming.fingerprint_of(certificate))


def _load_request(path: Path) -> tuple[str, _PublicKey]:
    """Return a request's node name and key; InvalidValueError if the name or key is unusable."""
    with naming.parsing(path, "a certificate signing request") as pem:
        csr = x509.load_pem_x509_csr(pem)
        key, valid = csr.public_key(), csr.is_signature_valid
    require(valid, f"{path} is not signed with its own key")
    if not _is_strong(key):
        choices = f"P-256, P-384 and RSA of at least {_LEAST_RSA_BITS} bits"
        raise InvalidValueError(f"the kind of the key of {path} is not one of {choices}")
    return naming.node_named(csr, path), key


def _is_strong(key: object) -> TypeGuard[_PublicKey]:
    if isinstance(key, rsa.RSAPublicKey):
        return key.key_size >= _LEAST_RSA_BITS
    return isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _CURVES


def _load_authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    path = folder / "authority"
    try:
        naming.read_file(path / "ca.key")
    except InvalidValueError as error:
        raise InvalidValueError(f"{folder} holds no authority: {error}") from error
    pem, ca = naming.read_key(path / "ca.key"), load_ca(path / "ca.pem")
    try:
        key = serialization.load_pem_private_key(pem, None)
    except naming.MALFORMED as error:
        raise InvalidValueError(f"{path / 'ca.key'} is not a private key in PEM") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
        raise InvalidValueError(f"{path / 'ca.key'} is not the key of {path / 'ca.pem'}")
    return ca, key


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
    """Return a certificate for a key; without `ca`, a self-signed one of an authority."""
    authority = ca is None
    subject = issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    if ca is not None:
        issuer, authority_end = ca.subject, ca.not_valid_after_utc
        if not timedelta(0) < lifetime <= authority_end - begin:
            condition = f"it must be positive and end before the authority's, at {authority_end}"
            raise InvalidValueError(f"the lifetime is {lifetime}; {condition}")
    usages = {"digital_signature": not authority, "key_cert_sign": authority}
    extensions: list[tuple[x509.ExtensionType, bool]] = [
        (x509.SubjectKeyIdentifier.from_public_key(key), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False),
        (x509.BasicConstraints(ca=authority, path_length=0 if authority else None), True),
        (x509.KeyUsage(**dict.fromkeys(_OTHER_USAGES, False), **usages), True),
    ]
    if usage is not None:
        extensions.append((x509.ExtendedKeyUsage([usage]), False))
    if alternatives:
        extensions.append((x509.SubjectAlternativeName(alternatives), False))
    serial, end = x509.random_serial_number(), begin + lifetime
    builder = x509.CertificateBuilder(issuer, subject, key, serial, begin, end)
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer, hashes.SHA256())


def _alternatives_of(hosts: Sequence[str]) -> list[x509.GeneralName]:
    require(bool(hosts), "the server has no host; it must have a DNS name or an IP address")
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


def _make_private(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    _make_private(path.parent)
    private = key.private_bytes(pem, pkcs8, serialization.NoEncryption())
    write_atomically(path, private, 0o600)


def _write_certificate(
    folder: Path, name: str, certificate: x509.Certificate, ca: x509.Certificate
) -> None:
    pem = serialization.Encoding.PEM
    _make_private(folder)
    write_atomically(folder / "ca.pem", ca.public_bytes(pem))
    write_atomically(folder / f"{name}.pem", certificate.public_bytes(pem))
