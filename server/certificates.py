"""The node that a certificate names: what a server asks of each peer."""

import time
from datetime import datetime
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias
from urllib.parse import unquote

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedpriv.errors import FedprivError, InvalidValueError

URI = "fedpriv:node:"
MALFORMED = (ValueError, TypeError, UnsupportedAlgorithm, x509.DuplicateExtension)
_KEYS = (
    ec.EllipticCurvePublicKey,
    ed448.Ed448PublicKey,
    ed25519.Ed25519PublicKey,
    rsa.RSAPublicKey,
)

_REMEMBERED = 4096  # certificates; each takes some kilobytes


class Check(StrEnum):
    """What a certificate must pass, in the order of checking."""

    FORM = "form"
    ISSUER = "issuer"
    SIGNATURE = "signature"
    BEGIN = "begin of validity"
    END = "end of validity"
    USAGE = "usage"
    LIST = "revocation list"
    REVOCATION = "revocation"
    NAME = "name"


class CertificateError(FedprivError):
    """A certificate does not prove to be a node's; `check` is the first that it failed."""

    def __init__(self, check: Check, sentence: str) -> None:
        super().__init__(sentence)
        self.check = check


def check_node_name(name: str) -> str:
    """The name, if it can be a node's: it becomes a common name and the name of a folder.

    Raises:
        InvalidValueError: it is not 1 to 64 bytes of UTF-8, all printable, without "/", a leading
            ".", and spaces at its ends.
    """
    legal = name.isprintable() and name == name.strip() and "/" not in name and name[:1] != "."
    if not (legal and 1 <= len(name.encode()) <= 64):
        raise InvalidValueError(
            f"the name of a node is {name!r}; it must be 1 to 64 bytes of printable text "
            "without '/', a '.' at its begin and spaces at its ends"
        )
    return name


def load_ca(path: Path) -> x509.Certificate:
    """Read the certificate of an authority: ours, or one that was there before.

    Raises:
        InvalidValueError: it cannot be read, or is no authority's.
    """
    try:
        ca = x509.load_pem_x509_certificate(path.read_bytes())
        constraints = ca.extensions.get_extension_for_class(x509.BasicConstraints).value
    except (OSError, x509.ExtensionNotFound, *MALFORMED) as error:
        raise InvalidValueError(f"{path} is no certificate of an authority: {error}") from error
    if not constraints.ca:
        raise InvalidValueError(f"{path} is no certificate of an authority, but one issued by it")
    return ca


_Stamp: TypeAlias = tuple[int, ...]
_SETTLED_NANOSECONDS = 2_000_000_000


class RevocationList:
    """A file of revoked serial numbers (a CRL), parsed again whenever it has changed.

    Guarantees:
        * A certificate is refused from the first call after the file holds it.
        * A file that is unreadable, not signed by the authority, past its next update, or that
          has a critical extension (it may be a part of a list only) lets no certificate pass.

    Attributes:
        path: the file, PEM.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read: tuple[_Stamp | None, x509.Certificate, x509.CertificateRevocationList] | None
        self._read = None

    def read(self, ca: x509.Certificate) -> x509.CertificateRevocationList:
        """The list as it is now.

        Raises:
            CertificateError: it is no complete list signed by the authority (`Check.LIST`).
        """
        try:
            stamp = _stamp_of(self.path)
            if self._read is None or stamp is None or self._read[:2] != (stamp, ca):
                self._read = (stamp, ca, _parsed_crl(self.path.read_bytes(), ca))
        except (OSError, *MALFORMED) as error:
            self._read = None
            raise CertificateError(Check.LIST, f"{self.path} cannot be used: {error}") from error
        return self._read[2]

    def holds(self, serial: int, ca: x509.Certificate, now: datetime) -> bool:
        """Whether the authority has revoked a serial number.

        Raises:
            CertificateError: the list cannot be believed at this time (`Check.LIST`).
        """
        crl = self.read(ca)
        if crl.next_update_utc is not None and crl.next_update_utc < now:
            due = crl.next_update_utc
            raise CertificateError(
                Check.LIST, f"{self.path} was to be renewed by {due}; it is {now}"
            )
        return crl.get_revoked_certificate_by_serial_number(serial) is not None


def _stamp_of(path: Path) -> _Stamp | None:
    """What is another once the file has changed; None just after a change.

    Two changes within a tick of the clock of the file system leave equal times.
    """
    found = path.stat()
    if time.time_ns() - found.st_ctime_ns < _SETTLED_NANOSECONDS:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_ctime_ns)


def _parsed_crl(content: bytes, ca: x509.Certificate) -> x509.CertificateRevocationList:
    crl, key = x509.load_pem_x509_crl(content), ca.public_key()
    if crl.issuer != ca.subject or not isinstance(key, _KEYS) or not crl.is_signature_valid(key):
        raise ValueError("it is not signed by the authority")
    if any(extension.critical for extension in crl.extensions):
        raise ValueError("it has a critical extension; only complete lists without one will do")
    return crl


def node_of(
    certificate_pem: bytes, ca: x509.Certificate, crl: RevocationList | None, now: datetime
) -> str:
    """Name of the node that a certificate was issued to; TLS has proven that the peer has its key.

    The name is NAME, percent-encoded, of the one URI `fedpriv:node:NAME` among the alternative
    names; without such a URI it is the one common name of the subject.

    Args:
        certificate_pem: the peer's certificate.
        ca: the authority that must have issued it directly.
        crl: what the authority has revoked; None for an authority that keeps no list.
        now: time to judge by, with a time zone.

    Raises:
        CertificateError: the first of these that holds, named by `check`: it cannot be parsed,
            has another issuer, is not signed by it; it or its issuer is not yet or no longer
            valid; it is not made for clients (extended key usage clientAuth, which must be there,
            and no authority); the list cannot be believed; it is revoked; it has no legal name.
    """
    certificate = _issued_by(ca, certificate_pem)
    for part, what in ((ca, "the authority"), (certificate, "the certificate")):
        begin, end = part.not_valid_before_utc, part.not_valid_after_utc
        if now < begin:
            raise CertificateError(Check.BEGIN, f"{what} is valid from {begin}; it is {now}")
        if now > end:
            raise CertificateError(Check.END, f"{what} expired at {end}; it is {now}")
    _check_usage(certificate)
    if crl is not None and crl.holds(certificate.serial_number, ca, now):
        sentence = f"the certificate with serial number {certificate.serial_number:x} is revoked"
        raise CertificateError(Check.REVOCATION, sentence)
    return _name_in(certificate)


@lru_cache(_REMEMBERED)
def _issued_by(ca: x509.Certificate, pem: bytes) -> x509.Certificate:
    """The certificate, if the authority has signed it; what never changes, and takes longest."""
    certificate = _parsed_certificate(pem)
    _check_issuer(certificate, ca)
    return certificate


def _parsed_certificate(pem: bytes) -> x509.Certificate:
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        # These are parsed when first asked for.
        _ = certificate.extensions, certificate.issuer, certificate.subject
    except (x509.InvalidVersion, *MALFORMED) as error:
        raise CertificateError(Check.FORM, f"the peer's certificate is none: {error}") from error
    return certificate


def _check_issuer(certificate: x509.Certificate, ca: x509.Certificate) -> None:
    issuer, ours = certificate.issuer.rfc4514_string(), ca.subject.rfc4514_string()
    if certificate.issuer != ca.subject:
        raise CertificateError(Check.ISSUER, f"the issuer is {issuer!r}; it must be {ours!r}")
    try:
        certificate.verify_directly_issued_by(ca)
    except (InvalidSignature, *MALFORMED) as error:
        sentence = f"the signature is not made with the key of {ours!r}"
        raise CertificateError(Check.SIGNATURE, sentence) from error


def _check_usage(certificate: x509.Certificate) -> None:
    found = {type(extension.value): extension.value for extension in certificate.extensions}
    extended = found.get(x509.ExtendedKeyUsage)
    constraints = found.get(x509.BasicConstraints)
    if not isinstance(extended, x509.ExtendedKeyUsage) or (
        ExtendedKeyUsageOID.CLIENT_AUTH not in extended
    ):
        sentence = "the certificate is not for clients; its extended key usage must be clientAuth"
        raise CertificateError(Check.USAGE, sentence)
    if isinstance(constraints, x509.BasicConstraints) and constraints.ca:
        raise CertificateError(
            Check.USAGE, "the certificate is an authority's; it must be a node's"
        )


def _name_in(certificate: x509.Certificate) -> str:
    uris = [
        uri.removeprefix(URI)
        for extension in certificate.extensions
        if isinstance(extension.value, x509.SubjectAlternativeName)
        for uri in extension.value.get_values_for_type(x509.UniformResourceIdentifier)
        if uri.startswith(URI)
    ]
    try:
        names = [unquote(uri, errors="strict") for uri in uris] or [
            str(part.value)
            for part in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        ]
        if len(names) != 1:
            raise ValueError(f"it has {len(names)} names of nodes; it must have one")
        return check_node_name(names[0])
    except ValueError as error:
        raise CertificateError(Check.NAME, f"the certificate names no node: {error}") from error
