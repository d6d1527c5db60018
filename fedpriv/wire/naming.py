"""Names of nodes, addresses of servers, certificates and keys, and the signatures by them."""

import hashlib
import ipaddress
import json
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedpriv.errors import InvalidValueError, reason_of
from fedpriv.ledger import Head
from fedpriv.ledger.events import RoundEvent
from fedpriv.ledger.ledger import event_text
from fedpriv.secure_sums.protocol import Member, Roster, key_statement
from fedpriv.support.checks import require
from fedpriv.wire.messages import Countersignature, RoundId, SignedHead

SERVICE = "fedpriv.v1.Federation"
NODE_KEY = "fedpriv-node"  # metadata of plain-text calls: the node's name, percent-encoded
NEWER = "newer connection of the same node"  # the server's reason to end one; nodes look for it
# Errors that cryptography raises for a certificate or key that cannot be parsed.
MALFORMED = (
    *(ValueError, TypeError, UnsupportedAlgorithm),
    *(x509.DuplicateExtension, x509.ExtensionNotFound, x509.InvalidVersion),
)
_RSA_PADDING = padding.PSS(padding.MGF1(SHA256()), padding.PSS.DIGEST_LENGTH)
_ANY_USAGE = ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE
_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_ADDRESS = re.compile(r"(?:\[(?P<six>[^\[\]]+)\]|(?P<host>[^:\[\]/\s]+)):(?P<port>[0-9]{1,5})")


def check_node_name(name: str) -> str:
    """Return the name if it is valid for a node, InvalidValueError otherwise.

    The name serves as a common name in certificates, and as the name of a folder.
    """
    valid = name.isprintable() and name == name.strip() and "/" not in name and name[:1] != "."
    if not (valid and 1 <= len(name.encode()) <= 64):
        raise InvalidValueError(
            f"the name of a node is {name!r}; it must be 1 to 64 bytes of printable text without "
            "'/', a leading '.', or a leading or trailing space"
        )
    return name


def read_file(path: Path) -> bytes:
    """Return the content of a file; InvalidValueError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidValueError(f"{path} cannot be read: {error.strerror}") from error


def read_key(path: Path) -> bytes:
    """Return the content of a private key's file.

    InvalidValueError: it cannot be read, or users other than its owner may read or write it.
    """
    key = read_file(path)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise InvalidValueError(
            f"{path} can be used by others than its owner (mode {mode:04o}); it must have mode "
            f"0600, and if others may have read it, a new key is needed"
        )
    return key


@contextmanager
def parsing(path: Path, what: str) -> Iterator[bytes]:
    """Yield the content of a file, which is parsed within the context.

    InvalidValueError: it cannot be read, or it is malformed, and so not `what`.
    """
    content = read_file(path)
    try:
        yield content
    except MALFORMED as error:
        raise InvalidValueError(f"{path} is not {what}") from error


def load_certificate(path: Path) -> x509.Certificate:
    """Return the certificate in a file; InvalidValueError if there is none."""
    with parsing(path, "a certificate") as pem:
        certificate = x509.load_pem_x509_certificate(pem)
        certificate.public_key()  # raises if it is malformed or of an unknown kind
    return certificate


def fingerprint_of(certificate: x509.Certificate) -> str:
    """Return the SHA-256 of a certificate in DER, as 64 lower-case hexadecimal digits."""
    return certificate.fingerprint(SHA256()).hex()


def load_authorities(path: Path) -> list[x509.Certificate]:
    """Return the authorities' certificates in a file; InvalidValueError if there is none."""
    with parsing(path, "an authority's certificate") as pem:
        return x509.load_pem_x509_certificates(pem)


def issued_by(authorities: Iterable[x509.Certificate], certificate: x509.Certificate) -> bool:
    """Return whether one of the authorities has issued a certificate, directly."""
    for authority in authorities:
        with suppress(*MALFORMED, InvalidSignature):
            certificate.verify_directly_issued_by(authority)
            return True
    return False


def for_servers(certificate: x509.Certificate) -> bool:
    """Return whether a certificate may be a server's; without an extended key usage, it may."""
    try:
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return True
    return ExtendedKeyUsageOID.SERVER_AUTH in usage or _ANY_USAGE in usage


def _scheme(public: object) -> tuple[object, ...] | None:
    """Return the signature scheme of a kind of key; None if gRPC does not take the kind."""
    if isinstance(public, rsa.RSAPublicKey):
        return _RSA_PADDING, SHA256()
    if isinstance(public, ec.EllipticCurvePublicKey):
        return (ec.ECDSA(SHA256()),)
    return () if isinstance(public, ed25519.Ed25519PublicKey) else None


def signed(key: bytes, statement: bytes) -> bytes:
    """Return the signature of a statement by the private key of a certificate, in PEM."""
    private: Any = load_pem_private_key(key, None)  # of a kind that `check_key` has admitted
    return bytes(private.sign(statement, *_scheme(private.public_key()) or ()))


def has_signed(certificate: x509.Certificate, statement: bytes, signature: bytes) -> bool:
    """Return whether the key of a certificate has signed a statement with `signed`."""
    public: Any = certificate.public_key()
    if (scheme := _scheme(public)) is None:
        return False
    with suppress(InvalidSignature):
        public.verify(signature, statement, *scheme)
        return True
    return False


def node_named(by: x509.Certificate | x509.CertificateSigningRequest, what: Path | str) -> str:
    """Return the node that a certificate or a request names, as its only common name.

    InvalidValueError: it has none, several or an invalid one; `what` begins the sentence.
    """
    try:
        names = by.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        require(len(names) == 1, f"it has {len(names)} common names; it must have one")
        return check_node_name(str(names[0].value))
    except MALFORMED as error:
        raise InvalidValueError(f"{what} does not name a node: {error}") from error


def check_key(path: Path, key: bytes, certificate: x509.Certificate) -> None:
    """Raise InvalidValueError unless `key`, read from `path`, is that of the certificate.

    gRPC reports such an error like a taken port or a lost connection.
    """
    try:
        public = load_pem_private_key(key, None).public_key()
    except MALFORMED as error:
        raise InvalidValueError(f"{path} is not a private key without a password") from error
    if public != certificate.public_key():
        pem = path.with_suffix(".pem").name
        raise InvalidValueError(f"{path} is not the key of the certificate {pem} beside it")
    curve = public.curve.name if isinstance(public, ec.EllipticCurvePublicKey) else None
    if not isinstance(public, rsa.RSAPublicKey | ed25519.Ed25519PublicKey) and curve not in _CURVES:
        choices = "RSA, P-256, P-384, P-521 and Ed25519"
        raise InvalidValueError(f"{path} is of a kind that gRPC does not take; legal are {choices}")


def _head_statement(population: str, attempt: RoundId, head: Head | SignedHead) -> bytes:
    """Return the server's statement: my ledger had this head when I proposed this attempt."""
    names = [population, *vars(attempt).values(), head.count, head.hash]
    return b"fedpriv ledger head" + json.dumps(names).encode()


def signed_head(
    population: str, attempt: RoundId, head: Head, certificate: x509.Certificate, private_pem: bytes
) -> SignedHead:
    """Return the head of the server's ledger, signed by its certificate's key for a proposal."""
    signature = signed(private_pem, _head_statement(population, attempt, head))
    return SignedHead(head.count, head.hash, certificate.public_bytes(Encoding.DER), signature)


def by_server(
    head: SignedHead, population: str, attempt: RoundId, authorities: Sequence[x509.Certificate]
) -> bool:
    """Return whether a server with a certificate of these authorities signed a head."""
    try:
        certificate = x509.load_der_x509_certificate(head.certificate)
        statement = _head_statement(population, attempt, head)
        issued = for_servers(certificate) and issued_by(authorities, certificate)
        return issued and has_signed(certificate, statement, head.signature)
    except MALFORMED:
        return False


def binding_of(
    population: str, attempt: RoundId, event: RoundEvent, head: SignedHead | None
) -> bytes:
    """Return the SHA-256 of everything public that identifies an attempt at a round: 32 bytes."""
    names = [population, *vars(attempt).values(), event_text(event)]
    if head is not None:
        names += [head.count, head.hash]
    return hashlib.sha256(json.dumps(names).encode()).digest()


def countersigned(
    node: str, public: bytes, binding: bytes, certificate: x509.Certificate, private_pem: bytes
) -> Countersignature:
    """Return a node's signature of a proposal, with its public key of a secure sum, or none."""
    signature = signed(private_pem, key_statement(binding, node, public))
    return Countersignature(node, public, certificate.public_bytes(Encoding.DER), signature)


def certificate_of(of: Countersignature, binding: bytes) -> x509.Certificate:
    """Return the certificate of a node that has signed a proposal.

    InvalidValueError: it is malformed, or its key has not signed this proposal.
    """
    try:
        certificate = x509.load_der_x509_certificate(of.certificate)
        valid = has_signed(certificate, key_statement(binding, of.node, of.key), of.signature)
    except MALFORMED as error:
        raise InvalidValueError(f"the certificate of node {of.node!r} is malformed") from error
    require(valid, f"node {of.node!r} has not signed this attempt")
    return certificate


def roster_of(signatures: Iterable[Countersignature], binding: bytes) -> Roster:
    """Return the roster of these nodes, sorted by name."""
    members = sorted((of.node, of.key) for of in signatures)
    return Roster(binding, tuple(Member(node, public) for node, public in members))


def check_user_id(text: str, where: str) -> str:
    """Return the id if it is valid for a user; else InvalidValueError, which `where` begins."""
    if not text or not text.isprintable() or text != text.strip():
        condition = "an id must be one printable line without spaces at its ends"
        raise InvalidValueError(f"{where} is {text!r}; {condition}")
    return text


@dataclass(frozen=True)
class Address:
    """A DNS name or IP address, without brackets, and a port; 0 lets a server choose one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, key: str) -> Self:
        """Parse the value of the setting `key`: "host:port", "192.0.2.7:7443" or "[::1]:7443".

        InvalidValueError: it is none of these.
        """
        match = _ADDRESS.fullmatch(text)
        try:
            if match is None or int(match["port"]) >= 2**16:
                raise ValueError
            host = match["host"] or str(ipaddress.IPv6Address(match["six"]))
        except ValueError as error:
            excerpt = text if len(text) <= 100 else f"{text[:100]}…"
            sentence = f"{key} is {excerpt!r}; it must be HOST:PORT or [IPv6]:PORT"
            raise InvalidValueError(sentence) from error
        return cls(host, int(match["port"]))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def check_loopback(self, key: str) -> None:
        """Raise InvalidValueError unless the address, the value of `key`, is on loopback."""
        condition = "without TLS it must be on loopback, as in 127.0.0.1:7443"
        try:
            resolved = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, ValueError) as error:
            reason = f"whose host cannot be resolved, {reason_of(error)}"
            raise InvalidValueError(f"{key} is {self}, {reason}; {condition}") from error
        for *_, (address, *_) in resolved:
            # A scope such as "%lo" may follow an IPv6 address.
            if not ipaddress.ip_address(str(address).partition("%")[0]).is_loopback:
                raise InvalidValueError(f"{key} is {self}, perhaps another machine; {condition}")
