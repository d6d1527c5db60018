"""A small authority in a folder, which gives certificates to a server and to nodes.

    FOLDER/authority/    ca.pem ca.key crl.pem issued/NAME.pem
    FOLDER/server/       ca.pem server.pem server.key crl.pem
    FOLDER/nodes/NAME/   ca.pem node.pem node.key

One folder per machine, open to its owner only; all is PEM, and each file is replaced whole. Others
can never read a key, not even while it is written. `server/crl.pem` is a copy that follows.
"""

import fcntl
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedpriv.errors import InvalidValueError
from fedpriv.federated.checkpoint import write_atomically

from .certificates import MALFORMED, URI, RevocationList, check_node_name, load_ca
from .signing import Authority, alternatives_of, issued, new_authority, signed_crl

YEAR = timedelta(days=365)
_AUTHORITY_LIFETIME = 10 * YEAR
_CLOCK_SKEW = timedelta(minutes=5)


def init(folder: Path, hosts: Sequence[str]) -> None:
    """Make an authority for ten years, its empty revocation list, and the server's certificate.

    Args:
        folder: gets `authority/` and `server/`.
        hosts: DNS names and IP addresses under which nodes reach the server, at least one.

    Raises:
        InvalidValueError: a host is neither, or the folder holds an authority or cannot be made.
    """
    alternatives_of(hosts)
    path = folder / "authority"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
        (path / "issued").mkdir()
    except OSError as error:
        raise InvalidValueError(f"{path} cannot be made: {error.strerror}") from error
    authority = new_authority(path, datetime.now(UTC) - _CLOCK_SKEW, _AUTHORITY_LIFETIME)
    with _writing(path):
        _write_key(path / "ca.key", authority.key)
        write_atomically(authority.crl, signed_crl(authority, (), 0, datetime.now(UTC)))
        write_atomically(path / "ca.pem", authority.certificate.public_bytes(Encoding.PEM))
    issue_server(folder, hosts)


def issue_server(folder: Path, hosts: Sequence[str], *, lifetime: timedelta = YEAR) -> None:
    """Make the server a new key and certificate (serverAuth), in place of those it has.

    The revocation list is copied beside them.

    Args:
        folder: as given to `init`.
        hosts: as for `init`.
        lifetime: from now on.

    Raises:
        InvalidValueError: the folder holds no authority, a host is neither a DNS name nor an IP
            address, or the certificate would never be valid or outlive the authority.
    """
    alternatives = alternatives_of(hosts)
    with _opened(folder) as authority:
        usage, begin = ExtendedKeyUsageOID.SERVER_AUTH, datetime.now(UTC) - _CLOCK_SKEW
        certificate, key = issued(
            authority, "fedpriv server", alternatives, usage, begin, _CLOCK_SKEW + lifetime
        )
        _write_bundle(folder / "server", "server", authority, certificate, key)
        _copy_list(authority)


def issue(
    folder: Path,
    node: str,
    *,
    begin: datetime | None = None,
    lifetime: timedelta = YEAR,
    replace: bool = False,
) -> Path:
    """Make a node a key and a certificate (clientAuth, `fedpriv:node:NAME`).

    Guarantees:
        * At most one certificate of a node is valid: one that has neither expired nor been
          revoked is in the way, or is revoked before the new one is made.
        * `authority/issued/` holds a certificate before the node's folder does, so that one which
          has left this machine can still be revoked.

    Args:
        folder: as given to `init`.
        node: its name, see `check_node_name`.
        begin: when it becomes valid, with a time zone; None: at once.
        lifetime: from `begin` on.
        replace: revoke a certificate that is in the way.

    Returns:
        Folder to bring to the node: `nodes/NAME`, with ca.pem, node.pem and node.key.

    Raises:
        InvalidValueError: no such name, no authority, a certificate is in the way, or the new one
            would never be valid or outlive the authority.
        CertificateError: something is to be revoked and the revocation list is damaged.
    """
    begin = datetime.now(UTC) - _CLOCK_SKEW if begin is None else begin
    alternatives = [x509.UniformResourceIdentifier(URI + quote(check_node_name(node)))]
    with _opened(folder) as authority:
        usage = ExtendedKeyUsageOID.CLIENT_AUTH
        certificate, key = issued(authority, node, alternatives, usage, begin, lifetime)
        old = _valid_certificate_of(authority, node)
        if old is not None and not replace:
            raise InvalidValueError(
                f"node {node!r} has a certificate until {old.not_valid_after_utc}; it must be "
                "revoked or replaced for a new one"
            )
        if old is not None:
            _revoke(authority, old)
            _copy_list(authority)
        write_atomically(authority.record_of(node), certificate.public_bytes(Encoding.PEM))
        _write_bundle(folder / "nodes" / node, "node", authority, certificate, key)
    return folder / "nodes" / node


def revoke(folder: Path, node: str) -> None:
    """Put the node's certificate on the revocation list, for ever; again only copies the list.

    The copy is `server/crl.pem`, if there is that folder.

    Raises:
        InvalidValueError: no such name, no authority, or the node was issued no certificate.
        CertificateError: the revocation list is damaged.
    """
    check_node_name(node)
    with _opened(folder) as authority:
        certificate = _issued_to(authority, node)
        if certificate is None:
            raise InvalidValueError(f"{folder} has issued no certificate to node {node!r}")
        if not _is_revoked(authority, certificate):
            _revoke(authority, certificate)
        _copy_list(authority)


@contextmanager
def _opened(folder: Path) -> Iterator[Authority]:
    """The authority of a folder, for this process alone: a lost update would lose a revocation."""
    path = folder / "authority"
    try:
        file = (path / "ca.key").open("rb")
    except OSError as error:
        raise InvalidValueError(f"{folder} holds no authority: {error}") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ca = load_ca(path / "ca.pem")
        try:
            key = load_pem_private_key(file.read(), None)
        except MALFORMED as error:
            raise InvalidValueError(f"{path / 'ca.key'} cannot be read: {error}") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != ca.public_key():
            raise InvalidValueError(f"{path / 'ca.key'} is not the key of {path / 'ca.pem'}")
        with _writing(folder):
            yield Authority(path, ca, key)


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Say in one sentence that a disk is full or a file is somebody else's."""
    try:
        yield
    except OSError as error:
        sentence = f"{error.filename or folder} cannot be written: {error.strerror}"
        raise InvalidValueError(sentence) from error


def _issued_to(authority: Authority, node: str) -> x509.Certificate | None:
    path = authority.record_of(node)
    if not path.exists():
        return None
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, *MALFORMED) as error:
        raise InvalidValueError(f"{path} cannot be read as a certificate: {error}") from error


def _valid_certificate_of(authority: Authority, node: str) -> x509.Certificate | None:
    certificate = _issued_to(authority, node)
    if certificate is None or certificate.not_valid_after_utc < datetime.now(UTC):
        return None
    return None if _is_revoked(authority, certificate) else certificate


def _is_revoked(authority: Authority, certificate: x509.Certificate) -> bool:
    crl = RevocationList(authority.crl).read(authority.certificate)
    return crl.get_revoked_certificate_by_serial_number(certificate.serial_number) is not None


def _revoke(authority: Authority, certificate: x509.Certificate) -> None:
    old = RevocationList(authority.crl).read(authority.certificate)
    number = old.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
    now = datetime.now(UTC)
    entry = x509.RevokedCertificateBuilder().serial_number(certificate.serial_number)
    revoked = [*old, entry.revocation_date(now).build()]
    write_atomically(authority.crl, signed_crl(authority, revoked, number + 1, now))


def _write_bundle(
    folder: Path,
    name: str,
    authority: Authority,
    certificate: x509.Certificate,
    key: ec.EllipticCurvePrivateKey,
) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(folder / "ca.pem", authority.certificate.public_bytes(Encoding.PEM))
    _write_key(folder / f"{name}.key", key)
    write_atomically(folder / f"{name}.pem", certificate.public_bytes(Encoding.PEM))


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.parent.chmod(0o700)
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    # Made anew, so nobody has it open, and with its last mode from the first moment.
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)  # durable with the certificate that follows into the same folder


def _copy_list(authority: Authority) -> None:
    server = authority.folder.parent / "server"
    if server.is_dir():
        write_atomically(server / "crl.pem", authority.crl.read_bytes())
