"""Certificates as a server reads them: an authority's, and the fingerprints of nodes'."""

from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes

from fedpriv.errors import InvalidValueError

MALFORMED = (ValueError, TypeError, UnsupportedAlgorithm, x509.DuplicateExtension)
_DIGITS = frozenset("0123456789abcdef")


def check_node_name(name: str) -> str:
    """The name, if it can be a node's: it becomes a common name and the name of a folder.

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


def load_ca(path: Path) -> x509.Certificate:
    """Read the certificate of an authority.

    Raises:
        InvalidValueError: it cannot be read, or is not an authority's.
    """
    try:
        ca = x509.load_pem_x509_certificate(path.read_bytes())
        constraints = ca.extensions.get_extension_for_class(x509.BasicConstraints).value
    except (OSError, x509.ExtensionNotFound, *MALFORMED) as error:
        raise InvalidValueError(f"{path} is no certificate of an authority: {error}") from error
    if not constraints.ca:
        raise InvalidValueError(f"{path} is no certificate of an authority, but one issued by it")
    return ca


def fingerprint_of(certificate: x509.Certificate) -> str:
    """SHA-256 of a certificate in DER, as 64 lower-case hexadecimal digits."""
    return certificate.fingerprint(hashes.SHA256()).hex()


def parsed_fingerprint(text: object) -> str | None:
    """A fingerprint, also in the upper case and with the colons of OpenSSL; None: it is not one."""
    if not isinstance(text, str):
        return None
    digits = text.replace(":", "").lower()
    return digits if len(digits) == 64 and set(digits) <= _DIGITS else None
